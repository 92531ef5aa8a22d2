"""The command as its users type it: outputs, exit codes, and one clear line for whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from partitioner import cli, pipeline
from partitioner.emit import outcome

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 100)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny(batch=1, seq=16):
    with torch.device("meta"):
        return Tiny(), (torch.zeros(batch, seq, dtype=torch.int64),)


def raises():
    raise ValueError("the config file is missing")


def returns_a_number():
    return 3
"""
KEYS = {
    "schema", "status", "gap", "lower_bound_s", "step_time_s", "mfu", "hfu", "tokens_per_s_per_gpu", "peak_bytes",
    "peak_at", "memory_limit_bytes", "host_bytes_per_node", "parameters", "units", "activations", "baselines", "defaults",
    "warnings", "solver",
}  # fmt: skip
NESTED = {
    "parameters": {
        "unique", "numel", "bytes", "trainable_numel", "trainable_bytes", "frozen_bytes", "buffer_bytes",
        "padded_shard_bytes", "tied",
    },
    "units": {
        "name", "parameters", "placement", "reshard_after_forward", "prefetch_forward", "prefetch_backward", "offload",
    },
    "baselines": {"name", "step_time_s", "peak_bytes", "fits"},
    "solver": {"name", "build_s", "solve_s", "variables", "constraints"},
}  # fmt: skip
NUMEL = 100 * 32 + 3 * (2 * 32 + 32 * 128 + 128 + 128 * 32 + 32) + 32 * 100 + 100
"""Embedding; norm, up, down of each block; head."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def partition(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs the command in this process. ``COLUMNS`` keeps rich from folding what the tests look for."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(a) for a in args])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, captured.out, captured.err)

    return run


def test_a_plan_in_json_has_every_promised_key(partition, models):
    ran = partition(f"{models}:tiny", "--gpus", 4, "--json")
    assert ran.code == 0
    assert ran.err == ""
    plan = json.loads(ran.out)
    assert set(plan) >= KEYS
    for key, wanted in NESTED.items():
        row = plan[key][0] if isinstance(plan[key], list) else plan[key]
        assert set(row) >= wanted
    assert plan["status"] in ("optimal", "feasible")
    assert plan["lower_bound_s"] <= plan["step_time_s"]
    assert plan["peak_bytes"] <= plan["memory_limit_bytes"]
    assert plan["parameters"]["numel"] == NUMEL
    assert plan["parameters"]["bytes"] == 4 * NUMEL
    held = [name for unit in plan["units"] for name in unit["parameters"]]
    assert len(held) == len(set(held)) == plan["parameters"]["unique"] == 1 + 3 * 6 + 2
    assert all(row["step_time_s"] >= plan["step_time_s"] for row in plan["baselines"] if row["fits"])


def test_the_report_states_what_it_assumed(partition, models):
    ran = partition(f"{models}:tiny", "--gpus", 4)
    assert ran.code == 0
    for said in ("h100-sxm-80gb (not given)", "Compared with", "FSDP2 per block", "no plan is faster than", "estimate"):
        assert said in ran.out
    assert "Nothing was written" in ran.out


def test_the_folder_holds_a_plan_and_code_and_is_replaced_by_the_next_run(partition, models, tmp_path):
    out = tmp_path / "out"
    for gpus in (2, 4):
        ran = partition(f"{models}:tiny", "--gpus", gpus, "-o", out)
        assert ran.code == 0
        assert f"partition verify {out} --ranks 2" in ran.out
        assert sorted(p.name for p in out.iterdir()) == ["parallelize.py", "plan.json", "train.py"]
        assert json.loads((out / "plan.json").read_text())["cluster"]["num_gpus"] == gpus
        compile((out / "parallelize.py").read_text(), "parallelize.py", "exec")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["models.py", "out"]


def test_nothing_fits_is_exit_code_3_with_a_certificate_and_no_folder(partition, models, tmp_path):
    out = tmp_path / "out"
    ran = partition(f"{models}:tiny", "--gpus", 2, "--memory", "150KiB", "-o", out, "--json")
    assert ran.code == 3
    assert not out.exists()
    plan = json.loads(ran.out)
    assert plan["status"] == "infeasible"
    why = plan["infeasible"]
    assert why["budget"] == "gpu memory"
    assert why["limit_bytes"] == 150 * 1024
    assert why["missing_bytes"] == why["needed_bytes"] - 150 * 1024 > 0
    assert why["at"]
    assert why["remedies"][0].startswith("--memory ")
    told = partition(f"{models}:tiny", "--gpus", 2, "--memory", "150KiB")
    assert told.code == 3
    for part in ("Infeasible", "short by", why["at"], "What would make it fit"):
        assert part in told.out


def test_what_the_certificate_says_would_fit_fits(partition, models):
    ran = partition(f"{models}:tiny", "--gpus", 2, "--memory", "150KiB", "--json")
    needed = json.loads(ran.out)["infeasible"]["needed_bytes"]
    assert partition(f"{models}:tiny", "--gpus", 2, "--memory", f"{needed}B").code == 0
    assert partition(f"{models}:tiny", "--gpus", 2, "--memory", f"{needed - 1024}B").code == 3


def test_a_pin_is_kept(partition, models):
    ran = partition(f"{models}:tiny", "--gpus", 4, "--pin", "blocks.1=replicate", "--json")
    units = json.loads(ran.out)["units"]
    (held,) = [u for u in units if "blocks.1.up.weight" in u["parameters"]]
    assert held["placement"] == "replicate"


BAD: dict[str, tuple[list[str], int, str]] = {
    "missing onnx": (["no_such.onnx", "--gpus", "8"], 2, "no_such.onnx: no such file"),
    "missing module file": (["no_such.py:model", "--gpus", "8"], 2, "no_such.py"),
    "no factory named": (["{models}", "--gpus", "8"], 2, "path/to/file.py:factory"),
    "unknown factory": (["{models}:tinny", "--gpus", "8"], 2, "tiny"),
    "text named onnx": (["{text}", "--gpus", "8"], 2, "notes.onnx"),
    "text named pt2": (["{pt2}", "--gpus", "8"], 2, "notes.pt2"),
    "factory raises": (["{models}:raises", "--gpus", "8"], 2, "the config file is missing"),
    "factory returns no module": (["{models}:returns_a_number", "--gpus", "8"], 2, "int"),
    "no gpus": (["{models}:tiny", "--gpus", "0"], 2, "--gpus 0"),
    "gpus not given": (["{models}:tiny"], 2, "--gpus"),
    "unknown gpu": (["{models}:tiny", "--gpus", "8", "--gpu", "h10"], 2, "did you mean h100"),
    "unknown unit of memory": (["{models}:tiny", "--gpus", "8", "--memory", "80 bananas"], 2, "80 bananas"),
    "unknown pin": (["{models}:tiny", "--gpus", "8", "--pin", "block.1=keep"], 2, "nearest: "),
    "unknown pin choice": (["{models}:tiny", "--gpus", "8", "--pin", "blocks.1=stay"], 2, "reshard, keep, replicate"),
    "malformed pin": (["{models}:tiny", "--gpus", "8", "--pin", "blocks.1"], 2, "name=value"),
    "unknown pass": (["{models}:tiny", "--gpus", "8", "--passes", "find-unit"], 2, "did you mean find-units?"),
    "foreign folder": (["{models}:tiny", "--gpus", "8", "-o", "{foreign}"], 2, "not written by this tool"),
    "out is a file": (["{models}:tiny", "--gpus", "8", "-o", "{models}"], 2, "not a folder"),
    "no parent folder": (["{models}:tiny", "--gpus", "8", "-o", "{foreign}/a/b"], 2, "does not exist"),
    "verify of nothing": (["verify", "{foreign}"], 2, "plan.json"),
}


@pytest.mark.parametrize(("args", "code", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line_and_touches_nothing(partition, models, tmp_path, args, code, said):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for name in ("notes.onnx", "notes.pt2"):
        (tmp_path / name).write_text("just some notes\n")
    before = sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)
    places = {
        "models": models, "text": tmp_path / "notes.onnx", "pt2": tmp_path / "notes.pt2", "foreign": foreign,
    }  # fmt: skip
    ran = partition(*(a.format(**places) for a in args))
    assert ran.code == code
    assert ran.out == ""
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == before
    assert (foreign / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_leaves_nothing(partition, models, tmp_path, monkeypatch):
    def full(path: Path, text: str, **_: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    ran = partition(f"{models}:tiny", "--gpus", 2, "-o", tmp_path / "out")
    assert ran.code == 1
    assert "No space left on device" in ran.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["models.py"]


def test_an_interrupt_leaves_nothing(partition, models, tmp_path, monkeypatch):
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome, "train_source", interrupted)
    ran = partition(f"{models}:tiny", "--gpus", 2, "-o", tmp_path / "out")
    assert ran.code == 130
    assert "interrupted" in ran.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["models.py"]


def test_a_fault_of_ours_says_so(partition, models, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(pipeline, "plan_model", broken)
    ran = partition(f"{models}:tiny", "--gpus", 2)
    assert ran.code == 1
    assert "internal error, ZeroDivisionError" in ran.err


def test_passes_are_listed_and_chosen(partition, models):
    names = [row["name"] for row in json.loads(partition("passes", "--json").out)]
    assert names[:3] == ["canonicalize", "annotate-costs", "find-units"]
    assert {"attach-plan", "insert-unshard", "insert-reshard", "insert-grad-reduce"} < set(names)
    assert partition(f"{models}:tiny", "--gpus", 2, "--passes", "list").out.count("\n") == len(names)
    left_out = partition(f"{models}:tiny", "--gpus", 2, "--passes", "canonicalize")
    assert left_out.code == 2
    assert "annotate-costs" in left_out.err


def test_graphs_are_printed_after_the_passes_asked_for(partition, models):
    one = partition(f"{models}:tiny", "--gpus", 2, "--print-ir-after", "insert-unshard", "--json")
    assert one.err.count("// after ") == 1
    assert "unshard" in one.err
    json.loads(one.out)
    every = partition(f"{models}:tiny", "--gpus", 2, "--print-ir-after-all", "--json")
    assert every.err.count("// after ") == 7
    unknown = partition(f"{models}:tiny", "--gpus", 2, "--print-ir-after", "insert-unshards")
    assert unknown.code == 2
    assert "did you mean insert-unshard?" in unknown.err


def test_help_has_examples(partition):
    told = partition("--help")
    assert told.code == 0
    assert "partition examples/onnx/tiny_llama.onnx --gpus 8" in told.out
    assert "--intra-bandwidth" in partition("plan", "--help").out


def _in_new_process(args: list[str], seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-m", "partitioner", *args], env=environment, capture_output=True, timeout=120, check=True
    )
    return done.stdout


def test_the_same_command_gives_the_same_plan_under_any_hash_seed(models, tmp_path):
    plans = []
    for seed in ("1", "2", "2"):
        out = tmp_path / f"out{len(plans)}"
        _in_new_process([f"{models}:tiny", "--gpus", "4", "-o", str(out)], seed)
        plans.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert plans[0] == plans[1] == plans[2]

"""Every model of the examples the whole way, as a user would take it: plan, code, and the proof that it trains the same.

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --only tiny --json rows.json

Runs the command line in processes of its own, so times include starting Python and reading the model. Rows whose weights
are too large for this machine are planned, and their code is imported, but not verified.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import onnx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESNET = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
MODELS = "examples/models"


@dataclass(frozen=True)
class Case:
    """One model and what is asked of it."""

    name: str
    spec: str
    gpus: int
    options: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2, 4)  # process counts to verify with; none if the weights are too large


CASES = (
    Case("tiny Llama, ONNX", "examples/onnx/tiny_llama.onnx", 8, ("--seq", "128")),
    Case("tiny Llama", f"{MODELS}/llama.py:tiny_llama", 8),
    Case("tiny GPT-2, tied", f"{MODELS}/gpt2.py:tiny_gpt2", 8),
    Case("tiny LoRA, frozen", f"{MODELS}/lora.py:tiny_lora", 8),
    Case("convolutions", f"{MODELS}/convnet.py:convnet", 8, ("--loss", "cross_entropy")),
    Case("ResNet-50, ONNX", str(RESNET), 8),
    Case("GPT-2 small", f"{MODELS}/gpt2.py:gpt2_small", 8, ("--seq", "128")),
    Case("Llama 3 8B, ONNX shapes", "examples/onnx/llama_8b_shape.onnx", 8, (), ()),
    Case("Llama 3 8B", f"{MODELS}/llama.py:llama3_8b", 8, (), ()),
    Case("Llama 3 70B", f"{MODELS}/llama.py:llama3_70b", 64, (), ()),
)


@dataclass
class Row:
    """What was seen."""

    name: str
    gpus: int
    plan_s: float = 0.0  # the whole command, writing the folder included
    plan: dict[str, Any] = field(default_factory=dict)
    imports: bool = False
    verified: dict[int, dict[str, Any]] = field(default_factory=dict)  # ranks -> report


def _partition(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "partitioner", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"partition {' '.join(args)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}"
        )
    return done.stdout


def _imports(out: Path) -> bool:
    """Whether every emitted file is importable where nothing but torch and the folder itself is."""
    names = [path.stem for path in sorted(out.glob("*.py"))]
    code = "; ".join(f"import {name}" for name in names)
    return not subprocess.run([sys.executable, "-c", code], cwd=out, check=False).returncode


def run(case: Case, out: Path) -> Row:
    """Plan, write, import, verify."""
    row = Row(name=case.name, gpus=case.gpus)
    began = time.perf_counter()
    text = _partition(case.spec, "--gpus", str(case.gpus), *case.options, "-o", str(out), "--json")
    row.plan_s = time.perf_counter() - began
    row.plan = json.loads(text)
    row.imports = _imports(out)
    for ranks in case.ranks:
        row.verified[ranks] = json.loads(_partition("verify", str(out), "--ranks", str(ranks), "--json"))
    return row


def _baseline(plan: dict[str, Any], start: str) -> str:
    for row in plan["baselines"]:
        if row["name"].startswith(start):
            return f"{row['step_time_s'] / plan['step_time_s']:.3f}x" if row["fits"] else "does not fit"
    return "-"


def _proof(row: Row) -> str:
    if not row.verified:
        return "not run"
    return ", ".join(f"{n}: {'equal' if report['equal'] else 'DIFFERENT'}" for n, report in row.verified.items())


def table(rows: list[Row]) -> Table:
    """For people."""
    shown = Table("model", "GPUs", "command", "solver", "step", "gap", "per block", "ZeRO-2", "DDP", "code", "ranks")
    for row in rows:
        plan, solver = row.plan, row.plan["solver"]
        shown.add_row(
            row.name,
            str(row.gpus),
            f"{row.plan_s:.1f} s",
            f"{solver['build_s'] + solver['solve_s']:.1f} s",
            f"{plan['step_time_s'] * 1e3:.3f} ms",
            f"{plan['gap']:.3%}",
            _baseline(plan, "FSDP2 per block"),
            _baseline(plan, "ZeRO-2"),
            _baseline(plan, "DDP"),
            "imports" if row.imports else "FAILS",
            _proof(row),
        )
    return shown


@click.command()
@click.option("--only", default="", help="Only models whose name holds this.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the rows, plans included, to this file."
)
def main(only: str, json_path: Path | None) -> None:
    """Plan, write, import and verify the example models."""
    console = Console(width=160)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(CASES):
            if only.lower() in case.name.lower():
                console.print(f"{case.name} ...", style="dim")
                rows.append(run(case, Path(folder) / f"out{i}"))
    console.print(table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()

"""``partition verify``: one training step of an output folder on real gloo processes against the unsharded model.

Every process builds the original model with the same values and draws its own batch. Process 0 first runs the original,
unsharded, on the batch of every process in turn: its losses, and the mean of its gradients, are what data parallelism
must give. Then ``parallelize.py`` of the folder is applied, each process runs its batch, and every process compares its
loss and every whole gradient. The random state is set before each forward, so dropout draws the same masks in both.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partitioner import errors
from partitioner.errors import PartitionerError, UsageError, VerifyError
from partitioner.plan import Plan, load_plan
from partitioner.units import format_bytes

LOSS_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Relative. Sharding does not reorder a forward, so what remains is rounding in the last places."""
GRADIENT_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}
"""Relative to the largest element of the parameter's gradient (see ``SMALL_GRADIENT``)."""
SMALL_GRADIENT = 1e-2
"""A gradient smaller than this share of the model's largest is compared relative to that share: some gradients, such as
that of an attention's key bias, are zero in mathematics and rounding noise in practice."""
COPIES = 4  # per process: parameters, gradients, the gathered units, and what the step makes on the way
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class LossPair:
    """One process's loss, sharded and not. ``error`` is relative; None if either is not a finite number."""

    rank: int
    reference: float
    sharded: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """What was compared, how far apart it was, and whether that is equal."""

    equal: bool
    ranks: int
    dtype: str
    loss_tolerance: float
    gradient_tolerance: float
    losses: tuple[LossPair, ...]
    max_loss_error: float | None
    gradients: int
    """Parameters whose gradients were compared, element by element, on every process."""
    frozen: int
    """Parameters that take no gradient, and got none."""
    unused: int
    """Trainable parameters that got no gradient on either side."""
    max_gradient_error: float | None
    worst_gradient: str
    parameter_bytes: tuple[int, ...]
    """Measured: storage of the parameters on each process, before the step, in the dtype at rest here."""
    expected_parameter_bytes: int
    """What the plan's placements give for this number of processes, padding included."""
    problems: tuple[str, ...]
    """Every difference in a sentence; empty if ``equal``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def available_bytes() -> int:
    """Memory that this machine can still give away."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(plan: Plan, ranks: int, dtype: str) -> None:
    """Refuse what would swap or be killed. Parameters are at rest in float32 here (float64 for that dtype)."""
    itemsize = 8 if dtype == "float64" else 4
    need = plan.parameters.numel * itemsize * COPIES * (ranks + 2)
    have = available_bytes()
    if need > have:
        raise UsageError(
            f"verifying on {ranks} processes needs about {format_bytes(need)} of memory; {format_bytes(have)} are free",
            hint="use fewer --ranks, or plan and verify the same model with fewer layers: the emitted code has the same form",
        )


def _check_folder(out: Path) -> Plan:
    if not out.is_dir():
        raise UsageError(f"{out}: no such folder", hint="make one with partition MODEL -o OUT")
    plan = load_plan(out / "plan.json")
    names = ["parallelize.py"] if plan.source["kind"] == "module" else ["parallelize.py", "model.py"]
    for name in names:
        if not (out / name).is_file():
            raise UsageError(f"{out}: holds no {name}", hint="make the folder again with partition MODEL -o OUT")
    return plan


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no message")


class _Processes:
    """The workers of one run; leaving the ``with`` block ends those that still run."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Processes:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # nothing is left behind in the user's folders
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine, whatever its name resolves to
        for rank in range(self.ranks):
            command = [sys.executable, "-m", "partitioner.parity_worker", str(self.folder), str(rank)]
            with open(self.folder / f"log-{rank}", "wb") as log:
                self.running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
        for process in self.running:
            process.wait()

    def result(self, rank: int) -> dict[str, Any] | None:
        """What a worker wrote, once it is there."""
        path = self.folder / f"result-{rank}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def raise_failure(self) -> None:
        """Raise for the process that failed first; the others then wait for it in vain, or fail because of it."""
        ended = [process.poll() is not None for process in self.running]  # before looking for what they wrote
        results = [self.result(rank) for rank in range(self.ranks)]
        failed = [result["error"] for result in results if result is not None and "error" in result]
        if failed:
            first = min(failed, key=lambda error: float(error["at"]))
            kind = getattr(errors, first["kind"])
            assert issubclass(kind, PartitionerError)
            raise kind(first["what"], hint=first["hint"])
        for rank, process in enumerate(self.running):
            if ended[rank] and results[rank] is None:
                raise VerifyError(
                    f"process {rank} of {self.ranks} ended with code {process.returncode}: "
                    f"{_last_line(self.folder / f'log-{rank}')}",
                    hint="a killed process (code -9) usually ran out of memory",
                )

    def wait(self, timeout_s: float, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        """Every worker's result. Raises VerifyError for a failure or when time is up."""
        started, said = time.monotonic(), ""
        while True:
            self.raise_failure()
            found = [result for rank in range(self.ranks) if (result := self.result(rank)) is not None]
            if len(found) == self.ranks:
                return found
            stage = self.folder / "stage"
            text = stage.read_text(encoding="utf-8") if stage.exists() else "starting processes"
            if text != said:
                progress(text)
                said = text
            if time.monotonic() - started > timeout_s:
                raise VerifyError(
                    f"no answer after {timeout_s:.0f} s, last seen while {said}",
                    hint="the processes wait for one another, or the model is too large for this machine",
                )
            time.sleep(0.05)


def _relative(reference: float, sharded: float) -> float | None:
    error = abs(sharded - reference) / max(abs(reference), 1e-30)
    return error if math.isfinite(error) else None


def _loss_pairs(results: Sequence[dict[str, Any]]) -> tuple[LossPair, ...]:
    reference = results[0]["reference_losses"]
    return tuple(
        LossPair(rank=r, reference=reference[r], sharded=row["loss"], error=_relative(reference[r], row["loss"]))
        for r, row in enumerate(results)
    )


def _worst(errors_found: Sequence[float | None]) -> float | None:
    """The largest, where what is no number counts as larger than any."""
    known = [error for error in errors_found if error is not None]
    return None if len(known) < len(errors_found) else max(known, default=0.0)


def _gradient_errors(results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Per compared parameter the largest error over processes, relative as ``GRADIENT_TOLERANCE`` says."""
    sizes: dict[str, float] = results[0]["gradient_sizes"]
    floor = SMALL_GRADIENT * max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    found = {}
    for name, size in sizes.items():
        differences = [row["gradient_differences"][name] for row in results]
        finite = all(math.isfinite(value) for value in (size, *differences))
        found[name] = max(differences) / max(size, floor, 1e-30) if finite else None
    return found


def _over(error: float | None, tolerance: float) -> bool:
    return error is None or error > tolerance


def _spelled(error: float | None) -> str:
    return "a value that is not finite" if error is None else f"a relative error of {error:.2e}"


def _report(ranks: int, dtype: str, results: Sequence[dict[str, Any]]) -> ParityReport:
    losses, gradients = _loss_pairs(results), _gradient_errors(results)
    order = sorted(gradients, key=lambda name: (gradients[name] is not None, -(gradients[name] or 0.0)))
    problems = [text for row in results for text in row["problems"]]
    problems += [
        f"the loss on process {p.rank} has {_spelled(p.error)}: {p.sharded!r} sharded, {p.reference!r} unsharded"
        for p in losses
        if _over(p.error, LOSS_TOLERANCE[dtype])
    ]
    problems += [
        f"the gradient of {name} has {_spelled(gradients[name])}"
        for name in order
        if _over(gradients[name], GRADIENT_TOLERANCE[dtype])
    ]
    expected = int(results[0]["expected_bytes"])
    problems += [
        f"process {r} holds {row['bytes']} bytes of parameters; the plan gives {expected}"
        for r, row in enumerate(results)
        if row["bytes"] != expected
    ]
    return ParityReport(
        equal=not problems,
        ranks=ranks,
        dtype=dtype,
        loss_tolerance=LOSS_TOLERANCE[dtype],
        gradient_tolerance=GRADIENT_TOLERANCE[dtype],
        losses=losses,
        max_loss_error=_worst([p.error for p in losses]),
        gradients=len(gradients),
        frozen=int(results[0]["frozen"]),
        unused=int(results[0]["unused"]),
        max_gradient_error=_worst(list(gradients.values())),
        worst_gradient=order[0] if order else "",
        parameter_bytes=tuple(int(row["bytes"]) for row in results),
        expected_parameter_bytes=expected,
        problems=tuple(dict.fromkeys(problems)),
    )


def verify_folder(
    out: Path,
    ranks: int,
    *,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda _: None,
    timeout_s: float = TIMEOUT_S,
) -> ParityReport:
    """Run one step of ``out`` on ``ranks`` processes of this machine and compare it with the unsharded model.

    Args:
        out: an output folder; a model that came from Python code is loaded again as the plan names it, so this runs in
            the directory in which the plan was made.
        ranks: gloo processes, any number: the plan's own number of GPUs is not needed.
        dtype: of computation, a key of ``GRADIENT_TOLERANCE``; ``float32`` shows a mistake best.
        progress: told the stage in a few words.
        timeout_s: for the whole run.

    Returns:
        The comparison; a difference is a result with ``equal`` false, not an error.

    Raises:
        UsageError: no such folder, or the model does not fit this machine.
        PlanError: the folder's plan is unreadable or belongs to another model.
        VerifyError: a process failed or did not end.
    """
    if dtype not in GRADIENT_TOLERANCE:
        raise UsageError(f"cannot verify in {dtype}", hint="dtypes: " + ", ".join(GRADIENT_TOLERANCE))
    if ranks < 1:
        raise UsageError(f"cannot verify on {ranks} processes", hint="--ranks must be one or more")
    plan = _check_folder(out)
    _check_memory(plan, ranks, dtype)
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        job = {"out": str(out.resolve()), "ranks": ranks, "dtype": dtype, "timeout_s": timeout_s}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with _Processes(folder, ranks) as processes:
            results = processes.wait(timeout_s, progress)
    return _report(ranks, dtype, results)

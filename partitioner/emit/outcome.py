"""The output folder of a plan: which files it has, and what is in each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from partitioner.capture.onnx.weights import has_weights, read_weights
from partitioner.capture.pt2 import pt2_weights
from partitioner.emit.folder import Content, check_folder, write_folder
from partitioner.emit.graph_module import model_source
from partitioner.emit.graph_weights import write_weights
from partitioner.emit.parallelize import parallelize_source
from partitioner.emit.train import offload_source, train_source
from partitioner.plan import Plan
from partitioner.program import Program

__all__ = ["check_folder", "write_outcome"]


def wrapped_modules(plan: Plan) -> list[tuple[str, ...]]:
    """Groups of modules that ``parallelize`` looks up by name, so that an emitted model must have them."""
    units = [unit.modules for unit in plan.units if unit.modules]
    return units + [(a.module,) for a in plan.activations if a.policy == "recompute"]


def _weights(program: Program) -> Content | None:
    """Writes the model's weights; None where the source had none."""
    path = Path(program.source.spec)
    if program.source.kind == "onnx":
        return partial(_write_onnx, source=path, program=program) if has_weights(path) else None
    return partial(_write_pt2, source=path, program=program)


def _write_onnx(path: Path, *, source: Path, program: Program) -> None:
    write_weights(path, read_weights(source, program), program)


def _write_pt2(path: Path, *, source: Path, program: Program) -> None:
    write_weights(path, pt2_weights(source).items(), program)


def outcome_files(out: Path, plan: Plan, program: Program) -> dict[str, Content]:
    """File name -> content.

    Args:
        out: where the files will be, so that ``train.py`` can find the model's own code from there.
        plan: with units.
        program: as captured, not lowered: FSDP2 gathers and reduces at run time.

    Raises:
        EmitError: the plan or the model cannot be written as code.
    """
    files: dict[str, Content] = {
        "plan.json": plan.to_json(),
        "parallelize.py": parallelize_source(plan),
        "train.py": train_source(plan, out),
    }
    offload = offload_source(plan)
    if offload is not None:
        files["offload.py"] = offload
    if program.source.kind != "module":
        files["model.py"] = model_source(program, units=wrapped_modules(plan))
        weights = _weights(program)
        if weights is not None:
            files["weights.safetensors"] = weights
    return files


def write_outcome(out: Path, plan: Plan, program: Program) -> None:
    """Write the folder, whole or not at all (see ``write_folder``)."""
    write_folder(out, outcome_files(out, plan, program))

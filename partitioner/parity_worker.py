"""One process of ``partition verify``: ``python -m partitioner.parity_worker FOLDER RANK``.

Reads ``job.json`` of the folder and writes ``result-RANK.json``: numbers, or the error that stopped it. The parent
process judges.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from partitioner.capture.factory import load_factory
from partitioner.emit import parts
from partitioner.errors import PartitionerError, PlanError, VerifyError
from partitioner.plan import Plan, load_plan
from partitioner.program import Recipe, TensorInfo, dtype_name, dtype_of

SEED = 0
CPU = torch.device("cpu")
LOW = (torch.bfloat16, torch.float16)
Step = Callable[[nn.Module, torch.Generator], Tensor]
"""Draws a batch and runs the forward: the loss."""


@dataclass
class Job:
    """What to do, and the tables that go back."""

    folder: Path
    rank: int
    out: Path
    ranks: int
    dtype: torch.dtype
    timeout_s: float
    plan: Plan
    problems: list[str] = field(default_factory=list)

    @property
    def at_rest(self) -> torch.dtype:
        """Parameters are held in float32 and cast when gathered, as in mixed-precision training."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def stage(self, text: str) -> None:
        if self.rank == 0:
            (self.folder / "stage").write_text(text, encoding="utf-8")


def _load(path: Path) -> ModuleType:
    """Run a Python file of the output folder, which is not on the module path."""
    name = f"_gatherpoint_out_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _floating_to(tensors: Any, dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in the compute dtype, as FSDP2's root casts them."""
    if isinstance(value, tuple | list):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _recipe(plan: Plan) -> Recipe:
    known = {f.name for f in fields(Recipe)}
    return Recipe(**{name: value for name, value in plan.recipe.items() if name in known})


def _from_factory(job: Job) -> tuple[nn.Module, Step]:
    recipe = _recipe(job.plan)
    model, args, kwargs = parts.build(lambda: load_factory(job.plan.source["spec"], recipe), SEED)
    if any(parameter.is_meta for parameter in model.parameters()):
        parts.materialize(model, CPU)
        parts.initialize(model, SEED)
    tokens = parts.smallest_table(model)

    def step(module: nn.Module, generator: torch.Generator) -> Tensor:
        inputs, named = _cast(parts.random_like((args, kwargs), generator, tokens), job.dtype)
        return parts.loss_of(module(*inputs, **named), recipe.loss, generator)

    return model, step


def _from_folder(job: Job) -> tuple[nn.Module, Step]:
    source = _load(job.out / "model.py")
    model = source.build_model()
    assert isinstance(model, nn.Module)

    def step(module: nn.Module, generator: torch.Generator) -> Tensor:
        loss = module(*_cast(source.example_inputs(generator, CPU), job.dtype))
        assert isinstance(loss, Tensor)
        return loss

    return model, step


def build(job: Job) -> tuple[nn.Module, Step]:
    """The original model, real, with parameters in the dtype at rest."""
    model, step = _from_factory(job) if job.plan.source["kind"] == "module" else _from_folder(job)
    _floating_to(model.parameters(), job.at_rest)
    if job.dtype not in LOW:
        _floating_to((b for b in model.buffers() if b.dtype in (*LOW, torch.float32)), job.at_rest)
    return model, step


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whether or not a state dict has it."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run_step(step: Step, model: nn.Module, rank: int) -> Tensor:
    """One forward on the batch of ``rank``; randomness inside the model depends on the rank alone."""
    torch.manual_seed(SEED + rank)
    return step(model, torch.Generator().manual_seed(SEED + rank))


def reference(job: Job, model: nn.Module, step: Step) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of every rank's batch, and the mean of the gradients, of the unsharded model in the compute dtype."""
    _floating_to(model.parameters(), job.dtype)
    losses, total = [], dict[str, Tensor]()
    for rank in range(job.ranks):
        loss = run_step(step, model, rank)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to(job.at_rest) / job.ranks
                total[name] = total[name] + grad if name in total else grad
                parameter.grad = None
    return losses, total


def check_names(plan: Plan, model: nn.Module) -> None:
    """Raises PlanError if the plan and the model name different parameters."""
    planned = [name for unit in plan.units for name in unit.parameters]
    actual = [name for name, _ in model.named_parameters()]
    for name in (*planned, *actual):
        if (name in planned) != (name in actual):
            where = "the plan, not in the model" if name in planned else "the model, not in the plan"
            raise PlanError(f"parameter {name} is in {where}", hint="the model has changed since: plan again")


def local_bytes(model: nn.Module) -> int:
    """Storage behind this process's parameters, each counted once; FSDP2 pads a shard's storage."""
    storages = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        storages[local.untyped_storage().data_ptr() or id(parameter)] = local.untyped_storage().nbytes()
    return sum(storages.values())


def expected_bytes(plan: Plan, model: nn.Module, ranks: int) -> int:
    """What the plan's placements put on each of ``ranks`` processes, from the whole model's shapes."""
    total = 0
    for name, parameter in model.named_parameters():
        info = TensorInfo(name=name, aliases=(name,), shape=tuple(parameter.shape), dtype=dtype_name(parameter.dtype))
        total += info.nbytes if plan.unit_of(name).placement == "replicate" else info.padded_shard_bytes(ranks)
    return total


def _whole_gradient(job: Job, name: str, parameter: nn.Parameter) -> Tensor | None:
    """The gradient as one tensor, the same on all ranks if it was synchronised; None if some rank has none."""
    kinds = [0] * job.ranks
    dist.all_gather_object(kinds, 0 if parameter.grad is None else 2 if isinstance(parameter.grad, DTensor) else 1)
    if 0 in kinds:
        if len(set(kinds)) > 1:
            job.problems.append(f"only some processes have a gradient of {name}")
        return None
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def compare(job: Job, model: nn.Module, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's largest difference for every parameter; rank 0 knows the gradients and tells the others."""
    sizes, differences = {}, {}
    frozen = unused = 0
    for name, parameter in model.named_parameters():
        have = _whole_gradient(job, name, parameter)
        known = [name in wanted]
        dist.broadcast_object_list(known, src=0)
        if not parameter.requires_grad:
            frozen += 1
            if have is not None:
                job.problems.append(f"{name} is frozen but has a gradient")
        elif not known[0] and have is None:
            unused += 1
        elif have is None or not known[0]:
            side = "sharded" if have is None else "unsharded"
            job.problems.append(f"{name} has no gradient in the {side} model only")
        else:
            want = wanted[name] if job.rank == 0 else torch.empty(parameter.shape, dtype=job.at_rest)
            dist.broadcast(want, src=0)
            sizes[name] = want.abs().max().item() if want.numel() else 0.0
            differences[name] = (have.to(job.at_rest) - want).abs().max().item() if want.numel() else 0.0
    return {"gradient_sizes": sizes, "gradient_differences": differences, "frozen": frozen, "unused": unused}


def _parallelize(job: Job, model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("dp_shard",))
    source = _load(job.out / "parallelize.py")
    if not callable(getattr(source, "parallelize", None)):
        raise VerifyError(f"{job.out / 'parallelize.py'} defines no parallelize(model, mesh)")
    source.parallelize(model, mesh, param_dtype=job.dtype, reduce_dtype=job.at_rest)


def run(job: Job) -> dict[str, Any]:
    """All of one process's work; what it found, for the parent."""
    job.stage("building the model")
    model, step = build(job)
    check_names(job.plan, model)
    losses: list[float] = []
    wanted: dict[str, Tensor] = {}
    if job.rank == 0:
        values = {name: tensor.detach().clone() for name, tensor in _values(model).items()}
        job.stage("running the unsharded model")
        losses, wanted = reference(job, model, step)
        model, step = build(job)  # a forward may have changed more than buffers
        with torch.no_grad():
            for name, tensor in _values(model).items():
                tensor.copy_(values[name])
        del values
    job.stage("running the sharded model")
    for tensor in _values(model).values():
        dist.broadcast(tensor.detach(), src=0)  # a factory need not be deterministic
    expected = expected_bytes(job.plan, model, job.ranks)
    _parallelize(job, model)
    held = local_bytes(model)
    loss = run_step(step, model, job.rank)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    job.stage("comparing gradients")
    compared = compare(job, model, wanted)
    return {
        **compared,
        "reference_losses": losses,
        "loss": loss.item(),
        "bytes": held,
        "expected_bytes": expected,
        "problems": job.problems,
    }


def _told(error: Exception, rank: int) -> str:
    """Error, message and the line of code that raised it, torch's own left out."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((str(Path(torch.__file__).parent), __file__, "<"))]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"process {rank} failed: {type(error).__name__}: {lines[0] if lines else 'no message'}{where}"


def main(folder: Path, rank: int) -> None:
    """Join the group, work, and leave a result, or the error in its place."""
    data = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    sys.dont_write_bytecode = True
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // data["ranks"]))
    try:
        job = Job(
            folder=folder,
            rank=rank,
            out=Path(data["out"]),
            ranks=data["ranks"],
            dtype=dtype_of(data["dtype"]),
            timeout_s=data["timeout_s"],
            plan=load_plan(Path(data["out"]) / "plan.json"),
        )
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=job.timeout_s),
        )
        result = run(job)
        dist.barrier()
    except PartitionerError as error:
        result = {"error": {"kind": type(error).__name__, "what": error.what, "hint": error.hint, "at": time.time()}}
    except Exception as error:  # the model's or torch's: told like any other, with its place
        result = {"error": {"kind": "VerifyError", "what": _told(error, rank), "hint": "", "at": time.time()}}
    partial = folder / f"result-{rank}.part"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(folder / f"result-{rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

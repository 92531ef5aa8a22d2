"""``train.py``: a few steps of training under the plan, to run with torchrun and to start a real trainer from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partitioner.emit import offload, parts
from partitioner.plan import Plan

FROM_FACTORY: tuple[Callable[..., Any], ...] = (
    parts.MetaToCpu,
    parts.real_buffers,
    parts.build,
    parts.materialize,
    parts.initialize,
    parts.smallest_table,
    parts.random_like,
    parts.to_device,
    parts.named_tensors,
    parts.loss_of,
)
"""Parts of the file where the model comes from Python code; a model file brings its own."""


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _imports(plan: Plan) -> str:
    written = plan.source["kind"] != "module"
    file = not written and plan.source["spec"].rpartition(":")[0].endswith(".py")
    offloads = _offloads(plan)
    standard = [
        "import argparse",
        *([] if written else ["import dataclasses", "import importlib" + (".util" if file else ""), "import inspect"]),
        *(["import json"] if offloads else []),
        "import os",
        *(["import sys"] if file else []),
        *([] if written else ["from collections.abc import Callable, Iterator, Mapping"]),
        *([] if written else ["from contextlib import contextmanager"]),
        *(["from pathlib import Path"] if file or offloads else []),
        *([] if written else ["from typing import Any"]),
    ]
    third = [
        "import torch",
        "import torch.distributed as dist",
        "from torch import nn" if written else "from torch import Tensor, nn",
        "from torch.distributed.device_mesh import init_device_mesh",
    ]
    own = ["from model import build_model, example_inputs"] if written else []
    own += ["from offload import HostStateOptimizer"] if offloads else []
    own += ["from parallelize import parallelize"]
    if not written:
        third += [
            "from torch.distributed.tensor import DTensor, distribute_tensor",
            "from torch.nn import functional as F",
            "from torch.nn.modules.module import register_module_parameter_registration_hook",
            "from torch.overrides import TorchFunctionMode",
        ]
    return "\n".join(["from __future__ import annotations", "", *standard, "", *third, "", *own])


def _offloads(plan: Plan) -> bool:
    return any(unit.offload == "optimizer_state" for unit in plan.units)


def _factory(plan: Plan, out: Path | None) -> str:
    """The function that makes the model and its example batch, as the user's factory does."""
    location, _, attribute = plan.source["spec"].rpartition(":")
    offered = ", ".join(f"{_quoted(k)}: {plan.recipe[k]}" for k in ("batch", "seq") if plan.recipe.get(k) is not None)
    if location.endswith(".py"):
        if out is None:
            path = f"Path({_quoted(location)})"
        else:
            path = f"Path(__file__).parent / {_quoted(os.path.relpath(location, out))}"
        load = [
            f"    path = ({path}).resolve()",
            "    sys.path.insert(0, str(path.parent))",
            "    spec = importlib.util.spec_from_file_location(path.stem, path)",
            "    module = importlib.util.module_from_spec(spec)",
            "    sys.modules[path.stem] = module",
            "    spec.loader.exec_module(module)",
        ]
        if out is None:
            load[0] = f"    path = {path}.resolve()"
    else:
        load = [f"    module = importlib.import_module({_quoted(location)})"]
    lines = [
        "def factory() -> Any:",
        f'    """{attribute} of {location}, given the sizes that the plan is for."""'.replace("\\", "/"),
        *load,
        f"    make = module.{attribute}",
        f"    sizes = {{{offered}}}",
        "    return make(**{k: v for k, v in sizes.items() if k in inspect.signature(make).parameters})",
    ]
    return "\n".join(lines)


def _optimizer(plan: Plan) -> str:
    """The optimizer of some parameters, and of all of them."""
    mixed = len({unit.placement for unit in plan.units}) > 1
    name = {"adamw": "AdamW", "sgd": "SGD"}[plan.recipe["optimizer"]]
    make = [
        "def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:",
    ]
    if mixed:
        make += [
            '    """Sharded and replicated parameters apart: a fused kernel takes tensors of one mesh."""',
            "    by_mesh: dict[object, list[nn.Parameter]] = {}",
            "    for parameter in parameters:",
            "        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)",
            '    groups = [{"params": group} for group in by_mesh.values()]',
            f"    return torch.optim.{name}(groups, lr=lr, fused=True)",
        ]
    else:
        make += [f"    return torch.optim.{name}(parameters, lr=lr, fused=True)"]
    if not _offloads(plan):
        return "\n".join(make)
    return "\n".join(
        [
            *make,
            "",
            "",
            "def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer | HostStateOptimizer]:",
            '    """One for the state that stays on the device, one for the units whose state the plan keeps on the host."""',
            '    plan = json.loads((Path(__file__).parent / "plan.json").read_text())',
            '    moved = [unit["parameters"] for unit in plan["units"] if unit["offload"] == "optimizer_state"]',
            "    named = {name: p for name, p in model.named_parameters() if p.requires_grad}",
            "    units = [[named.pop(name) for name in names if name in named] for names in moved]",
            "    on_host = HostStateOptimizer(units, lambda parameters: make_optimizer(parameters, lr))",
            "    return [make_optimizer(list(named.values()), lr), on_host] if named else [on_host]",
        ]
    )


def _setup(plan: Plan) -> list[str]:
    if plan.source["kind"] != "module":
        return [
            "    model = build_model()",
            "    parallelize(model, mesh)",
        ]
    return [
        "    model, args, kwargs = build(factory, SEED)",
        "    on_meta = any(parameter.is_meta for parameter in model.parameters())",
        "    tokens = smallest_table(model)",
        "    parallelize(model, mesh)",
        "    if on_meta:",
        "        materialize(model, device)",
        "        initialize(model, SEED)",
    ]


def _loss(plan: Plan) -> list[str]:
    """Statements of one step, up to the loss."""
    number = "SEED + step * dist.get_world_size() + dist.get_rank()"
    if plan.source["kind"] != "module":
        return [
            f"        generator = torch.Generator(device).manual_seed({number})",
            "        loss = model(*example_inputs(generator, device))",
        ]
    return [
        f"        generator = torch.Generator().manual_seed({number})",
        "        inputs, named = to_device(random_like((args, kwargs), generator, tokens), device)",
        f"        loss = loss_of(model(*inputs, **named), {_quoted(plan.recipe['loss'])}, generator)",
    ]


def _main(plan: Plan) -> str:
    every = "[p for p in model.parameters() if p.requires_grad]"
    optimizers = "make_optimizers(model, options.lr)" if _offloads(plan) else f"[make_optimizer({every}, options.lr)]"
    lines = [
        "def main() -> None:",
        "    parser = argparse.ArgumentParser(description=__doc__)",
        '    parser.add_argument("--steps", type=int, default=3)',
        '    parser.add_argument("--lr", type=float, default=1e-4)',
        "    options = parser.parse_args()",
        "    if torch.cuda.is_available():",
        '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
        "        torch.cuda.set_device(device)",
        '        dist.init_process_group("nccl", device_id=device)',
        "    else:",
        '        device = torch.device("cpu")',
        '        dist.init_process_group("gloo")',
        '    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))',
        *_setup(plan),
        f"    optimizers = {optimizers}",
        "    for step in range(options.steps):",
        *_loss(plan),
        "        loss.backward()",
        "        for optimizer in optimizers:",
        "            optimizer.step()",
        "            optimizer.zero_grad()",
        "        mean = loss.detach().float() / dist.get_world_size()",
        "        dist.all_reduce(mean)",
        "        if dist.get_rank() == 0:",
        '            print(f"step {step}: loss {mean.item():.6f}", flush=True)',
        "    dist.destroy_process_group()",
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines)


def _docstring(plan: Plan) -> str:
    gpus = min(int(plan.cluster["num_gpus"]), 8)
    return "\n".join(
        [
            '"""Train a few steps on random data under the plan in plan.json.',
            "",
            f"torchrun --nproc-per-node {gpus} train.py --steps 3",
            "",
            "Runs on GPUs with NCCL, or without any on gloo. The seed decides the model and the data.",
            '"""',
        ]
    )


def train_source(plan: Plan, out: Path | None = None) -> str:
    """The text of ``train.py``.

    Args:
        plan: what to train under.
        out: the folder that the file goes to, from which it then finds the model's Python file; without it the file is
            looked for as the user named it, from the working directory.
    """
    pieces = [] if plan.source["kind"] != "module" else [_factory(plan, out)]
    if plan.source["kind"] == "module":
        pieces += [inspect.getsource(part).rstrip() for part in FROM_FACTORY]
    blocks = [*pieces, _optimizer(plan), _main(plan)]
    head = "\n\n".join([_docstring(plan), _imports(plan), "SEED = 0"])
    return head + "\n\n\n" + "\n\n\n".join(blocks) + "\n"


def offload_source(plan: Plan) -> str | None:
    """The text of ``offload.py``, where the plan keeps optimizer state on the host."""
    return inspect.getsource(offload) if _offloads(plan) else None

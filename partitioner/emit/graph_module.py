"""A captured graph as one Python file: nested ``nn.Module`` classes that read as if written for this model.

The file depends on torch alone. Parameters keep their canonical names in its state dict, so that weights and plans that
name them fit; sizes are those that were captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import torch
from torch import fx

from partitioner.emit.graph_classes import MODEL, Classes, check_units, lay_out
from partitioner.emit.graph_code import call, text
from partitioner.emit.graph_inputs import example
from partitioner.emit.graph_names import identifier
from partitioner.emit.graph_tree import ROOT, Frame, build_tree
from partitioner.emit.graph_weights import SAFETENSORS_DTYPES
from partitioner.errors import EmitError
from partitioner.program import Program, dtype_name

_IMPORTS = """from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
{functional}from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("weights.safetensors")
"""

_TAIL = '''def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file: eight bytes of header length, a JSON header, then the raw tensors."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        shape, offset = entry["shape"], start + entry["data_offsets"][0]
        dtype = DTYPES[entry["dtype"]]
        if math.prod(shape) == 0:
            yield name, torch.empty(shape, dtype=dtype)
        else:
            yield name, torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


@torch.no_grad()
def load_weights(model: nn.Module, path: Path = WEIGHTS) -> None:
    """Copy a file into the parameters and buffers of the same names; both must hold the same names and shapes."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in read_weights(path):
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(f"{path}: the model has no {name} of shape {tuple(tensor.shape)}")
        state.pop(name).copy_(tensor)
    if state:
        raise ValueError(f"{path}: nothing for {', '.join(state)}")


@torch.no_grad()
def init_weights(model: nn.Module, seed: int = 0) -> None:
    """The same weights wherever it runs: norm weights one, other parameters normal(0, 0.02), buffers one or zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    for buffer in model.buffers():
        buffer.fill_(buffer.is_floating_point() or buffer.dtype == torch.bool)


def build_model(device: torch.device | str | None = None) -> nn.Module:
    """The model with the weights beside this file, or fresh ones if there are none; on ``meta`` it has none at all."""
    with torch.device("meta"):
        model = Model()
    if device is not None and torch.device(device).type == "meta":
        return model
    model.to_empty(device=device or "cpu")
{tie}    if WEIGHTS.exists():
        load_weights(model)
    else:
        init_weights(model)
    return model
'''


def model_source(program: Program, *, units: Sequence[tuple[str, ...]] = ()) -> str:
    """One self-contained Python file for a captured model.

    It defines ``Model`` (forward takes the graph's inputs by name and returns the loss), ``build_model(device)``,
    ``example_inputs(generator, device)``, and ``read_weights``, ``load_weights``, ``init_weights`` for a
    ``weights.safetensors`` beside it (see ``graph_weights``).

    Args:
        program: captured; its graph computes one loss.
        units: names of modules that are wrapped together (``fully_shard``, recomputation), ``("",)`` being the root.

    Raises:
        EmitError: a module in ``units`` cannot hold exactly the operators that read its parameters, or the graph holds
            something that torch alone cannot express.
    """
    wanted = [tuple(m for m in group if m != ROOT) for group in units]
    dissolved: set[str] = {m.name for m in program.modules if not m.has_forward and m.name}
    while True:
        tree = build_tree(program, dissolved)
        numbered = {m for m in tree.kept if _only_numbers(tree.kept[m]) and m not in lay_out(tree).rows}
        numbered -= {m for group in wanted for m in group} | {ROOT}
        if not numbered <= dissolved:
            dissolved |= numbered
            continue
        classes = Classes(tree, lay_out(tree))
        different = classes.write()
        if not different:
            break
        dissolved |= different
    check_units(tree, wanted)
    placeholders = [n for n in program.graph.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise EmitError(f"input {node.name} is not a tensor", hint="fix it to a value before capture")
    return _file(program, classes, placeholders)


def _only_numbers(frames: Sequence[Frame]) -> bool:
    """Whether a module only calls numbered children (a list that a file format shows as a module)."""
    return all(isinstance(i, Frame) and i.scope[len(f.scope) + 1 :].isdigit() for f in frames for i in f.items)


def _file(program: Program, classes: Classes, placeholders: list[fx.Node]) -> str:
    body = "\n\n\n".join(_class(name, written, classes.members[name]) for name, written in classes.texts.items())
    used = {t.dtype for t in (*program.parameters, *program.buffers)}
    dtypes = [text(f'"{key}": torch.{name}') for name, key in SAFETENSORS_DTYPES.items() if name in used]
    functional = "import torch.nn.functional as F\n" if "F." in body else ""
    head = [_header(program, placeholders), _IMPORTS.replace("{functional}", functional).rstrip()]
    table = call("", dtypes, brackets="{}").lines("DTYPES = ", "", 0)
    tie = "    model.tie_weights()\n" if "def tie_weights" in classes.texts[MODEL] else ""
    tail = _TAIL.replace("{tie}", tie)
    return "\n".join([*head, *table, "", "", body, "", "", *_examples(placeholders), "", "", tail])


def _header(program: Program, placeholders: list[fx.Node]) -> str:
    inputs = [f"    {n.target}: {dtype_name(n.meta['val'].dtype)} {list(n.meta['val'].shape)}" for n in placeholders]
    name = PurePath(program.source.spec).name
    name = name.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
    return "\n".join(
        [
            f'"""Forward and loss of {name or "the captured model"}.',
            "",
            "Sizes are fixed to those of the captured inputs:",
            *inputs,
            "",
            f"Activations were captured in {program.recipe.compute_dtype}.",
            '"""',
            "",
        ]
    )


def _class(name: str, written: str, modules: list[str]) -> str:
    if name == MODEL:
        says = "The whole model; its forward returns the loss."
    else:
        says = ", ".join(modules)
        if len(says) > 100:
            says = f"{len(modules)} modules: {modules[0][:80]}, ..."
    says = says.encode("ascii", "replace").decode().replace('"', "'").replace("\\", "/")
    return f'class {name}(nn.Module):\n    """{says}"""\n\n{written.rstrip()}'


def _examples(placeholders: list[fx.Node]) -> list[str]:
    """Source of ``example_inputs``."""
    lines = [
        'def example_inputs(generator: torch.Generator, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:',
        '    """Random inputs of the captured sizes: normal, or integers in the range that the model indexes with."""',
    ]
    names = []
    for node in placeholders:
        name = identifier(str(node.target))
        name = f"{name}_" if name in ("generator", "device") else name
        names.append(f"{name}.to(device)")
        lines.append(f"    {name} = {example(node)}")
    result = call("", [text(n) for n in names], brackets="()")
    flat = ", ".join(names)
    if len(names) == 1:
        flat = f"({flat},)"
    return [*lines, *([f"    return {flat}"] if names and len(flat) < 100 else result.lines("return ", "", 4))]

"""Which module ran each operator, recovered from what exporters leave behind.

In order of trust: the metadata of ``torch.onnx.export(dynamo=True)``, node names like ``/model/layers.0/mlp/MatMul`` of
older exporters, the dotted names of the weights that a node reads. A path is a tuple of the modules entered, root first:
``("", "model", "model.layers.0")``; containers such as ``model.layers`` are not entered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto
from torch import fx

from partitioner.program import ModuleInfo

ScopePath = tuple[str, ...]

ROOT_PATH: ScopePath = ("",)
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_PART = re.compile(r"[A-Za-z_]\w*|\d+")


def is_fqn(name: str) -> bool:
    """Whether a name is made of identifiers and numbers between dots, beginning with an identifier."""
    parts = name.split(".")
    return all(_PART.fullmatch(p) for p in parts) and not parts[0].isdigit()


def _metadata_list(node: NodeProto, key: str) -> list[str]:
    text = next((p.value for p in node.metadata_props if p.key == key), "")
    if not text or len(text) > 10_000:
        return []
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(v) for v in found] if isinstance(found, list) else []


def _from_metadata(node: NodeProto, classes: dict[str, str]) -> ScopePath | None:
    names, kinds = _metadata_list(node, _SCOPES), _metadata_list(node, _CLASSES)
    if len(names) < 2 or names[0] != "":
        return None
    path = [""]
    for name, kind in zip(names[1:-1], kinds[1:-1] if len(kinds) == len(names) else names[1:-1], strict=True):
        if name == path[-1] or not is_fqn(name):
            continue
        path.append(name)
        if kind != name:
            classes.setdefault(name, kind.rpartition(".")[2])
    if len(kinds) == len(names):
        classes.setdefault("", kinds[0].rpartition(".")[2])
    return tuple(path)


def _from_node_name(node: NodeProto) -> ScopePath | None:
    if not node.name.startswith("/"):
        return None
    path = [""]
    last = ""
    for part in node.name.split("/")[1:-1]:
        # Children of a Sequential repeat its name: /layer1/layer1.0/conv1/Conv.
        inner = part[len(last) + 1 :] if last and part.startswith(last + ".") else part
        full = f"{path[-1]}.{inner}" if path[-1] else inner
        if not is_fqn(full):
            return None
        path.append(full)
        last = part.rpartition(".")[2] if inner == part else part
    return tuple(path)


def _from_weight(name: str) -> ScopePath | None:
    """``model.layers.0.q_proj.weight`` -> the modules around it; numbered containers are not entered."""
    if "." not in name or not is_fqn(name):
        return None
    parts = name.split(".")[:-1]
    path = [""]
    for i, part in enumerate(parts):
        container = i + 1 < len(parts) and parts[i + 1].isdigit() and not part.isdigit()
        if not container:
            path.append(".".join(parts[: i + 1]))
    return tuple(path)


@dataclass
class Scopes:
    """Paths of operators, and what the export says of modules' classes."""

    paths: dict[fx.Node, ScopePath] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)


def common_path(a: ScopePath, b: ScopePath) -> ScopePath:
    """The modules that both paths enter."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _between(before: ScopePath | None, after: ScopePath | None) -> ScopePath:
    """The path of an operator of unknown origin between two known ones.

    The modules that both are in; and, between two numbered siblings, the first of them.
    """
    if before is None or after is None:
        return ROOT_PATH
    shared = common_path(before, after)
    if len(before) > len(shared) and before[len(shared)].rpartition(".")[2].isdigit():
        return before[: len(shared) + 1]
    return shared or ROOT_PATH


def find_scopes(
    operators: Sequence[fx.Node], origin: Mapping[fx.Node, NodeProto], weights: Mapping[fx.Node, Sequence[str]]
) -> Scopes:
    """A path for every operator.

    Args:
        operators: in execution order.
        origin: the ONNX node each came from; those without (the loss) run in the root.
        weights: names of the stored parameters each reads.
    """
    scopes = Scopes()
    known: list[ScopePath | None] = []
    for node in operators:
        proto = origin.get(node)
        if proto is None:
            known.append(ROOT_PATH)
            continue
        path = _from_metadata(proto, scopes.classes) or _from_node_name(proto)
        if path is None:
            path = next((p for w in weights.get(node, ()) if (p := _from_weight(w)) is not None), None)
        known.append(path)
    after: list[ScopePath | None] = [None] * len(known)
    following: ScopePath | None = None
    for i in reversed(range(len(known))):
        after[i] = following
        following = known[i] or following
    before: ScopePath | None = None
    for node, path, later in zip(operators, known, after, strict=True):
        found = path or _between(before, later)
        scopes.paths[node] = found
        before = path or before
    return scopes


Signature = tuple[tuple[str, tuple[str, ...]], ...]


def _openings(operators: Sequence[fx.Node], paths: Mapping[fx.Node, ScopePath]) -> dict[str, list[list[fx.Node]]]:
    """For each module, the operators of each time it is entered."""
    found: dict[str, list[list[fx.Node]]] = {}
    current: ScopePath = ()
    for node in operators:
        path = paths[node]
        shared = len(common_path(current, path))
        for name in path[shared:]:
            found.setdefault(name, []).append([])
        for name in path:
            found[name][-1].append(node)
        current = path
    return found


def settle_calls(
    operators: Sequence[fx.Node],
    paths: dict[fx.Node, ScopePath],
    reads: Mapping[fx.Node, Sequence[str]],
    sizes: Mapping[str, int],
) -> dict[fx.Node, tuple[tuple[str, int], ...]]:
    """Module stacks with call numbers; a module entered again without being called again gives up the stray operators.

    A module that runs the same operators on the same weights each time is called several times. Otherwise the exporter
    moved or merged operators: the part that reads most bytes of weights keeps the module, the rest goes to its parent.
    """
    moved = True
    while moved:
        moved = False
        touched: set[fx.Node] = set()
        openings = _openings(operators, paths)
        for name in sorted(openings, key=lambda n: (n.count("."), n)):
            parts = openings[name]
            if name == "" or len(parts) < 2 or len({_signature(p, reads) for p in parts}) == 1:
                continue
            moved = True
            if any(node in touched for part in parts for node in part):
                continue  # look again when the modules around it are settled
            keep = max(range(len(parts)), key=lambda i: (_weight_bytes(parts[i], reads, sizes), len(parts[i]), -i))
            strays = [node for i, part in enumerate(parts) if i != keep for node in part]
            for node in strays:
                paths[node] = paths[node][: paths[node].index(name)]
            touched.update(strays)
    return _numbered(operators, paths)


def _signature(part: Sequence[fx.Node], reads: Mapping[fx.Node, Sequence[str]]) -> Signature:
    return tuple((str(n.target), tuple(reads.get(n, ()))) for n in part)


def _weight_bytes(part: Sequence[fx.Node], reads: Mapping[fx.Node, Sequence[str]], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(w, 0) for w in {w for n in part for w in reads.get(n, ())})


def _numbered(
    operators: Sequence[fx.Node], paths: Mapping[fx.Node, ScopePath]
) -> dict[fx.Node, tuple[tuple[str, int], ...]]:
    calls: dict[str, int] = {}
    stacks = {}
    current: ScopePath = ()
    for node in operators:
        path = paths[node]
        for name in path[len(common_path(current, path)) :]:
            calls[name] = calls.get(name, -1) + 1
        stacks[node] = tuple((name, calls[name]) for name in path)
        current = path
    return stacks


def _class_name(name: str) -> str:
    """``model.layers.0`` -> ``Layers``, where the export does not say."""
    last = next((p for p in reversed(name.split(".")) if not p.isdigit()), "Module")
    return "".join(word.capitalize() for word in last.split("_") if word) or "Module"


def module_tree(entered: Sequence[str], weights: Sequence[str], classes: Mapping[str, str]) -> tuple[ModuleInfo, ...]:
    """Every module in pre-order, root first, with the containers between.

    Args:
        entered: modules that run operators, in order of their first run; these have a forward.
        weights: names of parameters and buffers, whose prefixes are modules too.
    """
    runs = {*entered, ""}
    children: dict[str, dict[str, None]] = {"": {}}
    for name in (*entered, *(w.rpartition(".")[0] for w in weights)):
        parts = name.split(".") if name else []
        for i in range(len(parts)):
            parent, child = ".".join(parts[:i]), ".".join(parts[: i + 1])
            children.setdefault(parent, {}).setdefault(child)
            children.setdefault(child, {})
    found: list[ModuleInfo] = []
    stack = [""]
    while stack:
        name = stack.pop()
        default = "Model" if not name else _class_name(name)
        if name and name not in runs and any(c.rpartition(".")[2].isdigit() for c in children[name]):
            default = "ModuleList"
        found.append(ModuleInfo(name=name, class_name=classes.get(name, default), has_forward=name in runs))
        stack.extend(reversed(children[name]))
    return tuple(found)

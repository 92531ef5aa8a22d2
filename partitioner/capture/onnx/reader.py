"""Open an ONNX file: an untrusted protobuf becomes a sorted list of nodes, stored tensors and typed inputs, or one error."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from partitioner.capture.onnx.tensors import Stored, stored_tensor
from partitioner.errors import CaptureError, UsageError

_RE_EXPORT = "is it a complete .onnx file? export or download it again"
DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass
class Model:
    """What the file says, checked and in execution order; payloads unread."""

    path: Path
    nodes: list[NodeProto]
    inputs: list[onnx.ValueInfoProto]
    """Without the initializers that old files list among them."""
    outputs: list[str]
    stored: dict[str, Stored]
    opsets: dict[str, int]
    warnings: list[str] = field(default_factory=list)


def attribute(node: NodeProto, name: str) -> AttributeProto | None:
    """The attribute of that name, if the node has it."""
    return next((a for a in node.attribute if a.name == name), None)


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Bodies of an If, Loop or Scan."""
    return [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def label(node: NodeProto, position: int | None = None) -> str:
    """How messages call a node: its name, or what it writes (names may be empty and need not be unique)."""
    output = next((o for o in node.output if o), "")
    name = node.name or (f"writing {output!r}" if output else f"number {position}")
    return f"{node.domain + '::' if node.domain not in DEFAULT_DOMAINS else ''}{node.op_type} {name}"


def _refuse_text(path: Path, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise CaptureError(
            f"{path} is a Git LFS pointer, not the model", hint="run `git lfs pull` in the repository it came from"
        )
    if head.startswith(b"\x89PNG") or (head and all(32 <= b < 127 or b in b"\t\r\n" for b in head)):
        raise CaptureError(f"{path} is not an ONNX model", hint=_RE_EXPORT)


def _parse(path: Path) -> ModelProto:
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        with path.open("rb") as stream:
            _refuse_text(path, stream.read(64))
        model = onnx.load_model(path, load_external_data=False)
    except DecodeError as error:
        raise CaptureError(f"{path} is not an ONNX model, or is cut off: {error}", hint=_RE_EXPORT) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not model.graph.node and not model.graph.output:
        raise CaptureError(f"{path} has no graph in it", hint=_RE_EXPORT)
    return model


def _check_versions(path: Path, model: ModelProto, warnings: list[str]) -> dict[str, int]:
    opsets = {o.domain if o.domain not in DEFAULT_DOMAINS else "": int(o.version) for o in model.opset_import}
    newest = onnx.defs.onnx_opset_version()
    used = {n.domain for n in model.graph.node if n.domain in DEFAULT_DOMAINS}
    if "" not in opsets and used:
        raise CaptureError(
            f"{path} does not say which version of the standard operators it uses (IR version {model.ir_version}, "
            f"imports {sorted(opsets) or 'none'}; the highest supported opset is {newest})",
            hint="export it again with an opset_version",
        )
    if opsets.get("", 1) > newest:
        raise CaptureError(
            f"{path} uses opset {opsets['']}; the highest supported is {newest} (onnx {onnx.__version__})",
            hint="export with a lower opset_version, or upgrade onnx",
        )
    if model.ir_version > onnx.IR_VERSION:
        warnings.append(
            f"{path.name} has IR version {model.ir_version}, newer than the {onnx.IR_VERSION} that onnx {onnx.__version__} "
            "knows; it was read as far as it is understood"
        )
    return opsets


def _inline(path: Path, model: ModelProto) -> ModelProto:
    """Replace calls of functions that the file defines by their bodies."""
    if not model.functions:
        return model
    from onnx import inliner  # loads a native extension that most files do not need

    try:
        return inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CaptureError(
            f"{path}: the functions inside cannot be expanded: {str(error).splitlines()[0]}",
            hint="export without local functions",
        ) from error


def _reads(node: NodeProto) -> Iterator[str]:
    """Values that a node needs, those of its bodies included."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in own)
            own.update(inner.output)
        yield from (output.name for output in graph.output if output.name not in own)


def _writers(nodes: list[NodeProto], known: set[str], where: str) -> dict[str, int]:
    """Which node writes each value."""
    writer: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in writer or name in known:
                raise CaptureError(f"{where}: value {name!r} is written twice, the second time by {label(node, i)}")
            writer[name] = i
    return writer


def sort_nodes(nodes: list[NodeProto], known: set[str], where: str) -> list[NodeProto]:
    """Execution order; the order of the file wherever that is one.

    Raises:
        CaptureError: a value that nothing writes, two writers of one value, or a cycle.
    """
    writer = _writers(nodes, known, where)
    waiting: list[set[int]] = []
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        needs: set[int] = set()
        for name in _reads(node):
            if name in writer:
                needs.add(writer[name])
            elif name not in known:
                raise CaptureError(
                    f"{where}: {label(node, i)} reads {name!r}, which nothing writes", hint="the file is damaged"
                )
        waiting.append(needs)
        for source in needs:
            users.setdefault(source, []).append(i)
    ready = [i for i, needs in enumerate(waiting) if not needs]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for user in users.get(i, ()):
            waiting[user].discard(i)
            if not waiting[user]:
                heapq.heappush(ready, user)
    if len(order) < len(nodes):
        cycle = [label(nodes[i], i) for i in range(len(nodes)) if waiting[i]]
        raise CaptureError(f"{where}: these nodes wait for each other: {', '.join(cycle[:8])}")
    return [nodes[i] for i in order]


def _collect(graph: GraphProto, folder: Path, stored: dict[str, Stored], where: str) -> None:
    """Initializers of a graph and of the bodies inside it."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise CaptureError(f"{where}: initializer {name!r} is sparse", hint="export with dense weights")
    for proto in graph.initializer:
        if proto.name in stored:
            raise CaptureError(f"{where}: two initializers are called {proto.name!r}")
        stored[proto.name] = stored_tensor(proto, folder)
    for node in graph.node:
        for body in subgraphs(node):
            _collect(body, folder, stored, where)


def read_model(path: Path) -> Model:
    """Read, check and sort a model; no weight payload beside the file is opened.

    Raises:
        UsageError: no such file.
        CaptureError: not a model, cut off, of an unknown version, or inconsistent.
        UnsupportedError: a tensor has a dtype that torch lacks.
    """
    proto = _parse(path)
    warnings: list[str] = []
    opsets = _check_versions(path, proto, warnings)
    proto = _inline(path, proto)
    graph = proto.graph
    stored: dict[str, Stored] = {}
    _collect(graph, path.parent, stored, str(path))
    inputs = [v for v in graph.input if v.name not in stored]
    known = {v.name for v in inputs} | set(stored)
    nodes = sort_nodes(list(graph.node), known, str(path))
    written = known | {o for n in nodes for o in n.output}
    for output in graph.output:
        if output.name not in written:
            raise CaptureError(f"{path}: output {output.name!r} is written by nothing", hint="the file is damaged")
    return Model(
        path=path,
        nodes=nodes,
        inputs=inputs,
        outputs=[o.name for o in graph.output],
        stored=stored,
        opsets=opsets,
        warnings=warnings,
    )

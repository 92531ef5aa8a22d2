"""Operators that move values without computing: views, joins, cuts, padding, resampling."""

from __future__ import annotations

import math

import torch

from partitioner.capture.onnx.builder import Value, aten, shape_of
from partitioner.capture.onnx.ops.table import Op, Result, onnx_op, rank
from partitioner.errors import CaptureError, UnsupportedError


@onnx_op("Reshape")
def reshape(op: Op) -> Result:
    x = op.input(0)
    wanted = op.attr_ints("shape") if op.version < 5 else op.ints(1, "shape")
    sizes = shape_of(x)
    target = list(wanted or [])
    if not op.attr_int("allowzero", 0):
        target = [sizes[i] if d == 0 else d for i, d in enumerate(target)]
    if -1 in target:
        known = math.prod(d for d in target if d != -1)
        if known and math.prod(sizes) % known == 0:
            target[target.index(-1)] = math.prod(sizes) // known
    if math.prod(target) != math.prod(sizes) or any(d < 0 for d in target):
        raise CaptureError(
            f"it reshapes {list(sizes)} to {wanted}, which does not fit",
            hint="a fixed size in the file may contradict a --dim or --batch that you gave",
        )
    if tuple(target) == sizes:
        return x
    result: Value = op.build.call(aten.reshape.default, x, target)
    return result


@onnx_op("Flatten")
def flatten(op: Op) -> Result:
    x = op.input(0)
    sizes, axis = shape_of(x), op.axis(1)
    result: Value = op.build.call(aten.reshape.default, x, [math.prod(sizes[:axis]), math.prod(sizes[axis:])])
    return result


@onnx_op("Transpose")
def transpose(op: Op) -> Result:
    x = op.input(0)
    order = op.attr_ints("perm") or list(reversed(range(rank(x))))
    if order == list(range(rank(x))):
        return x
    moved = [i for i, d in enumerate(order) if i != d]
    result: Value
    if len(moved) == 2:
        result = op.build.call(aten.transpose.int, x, *moved)
    else:
        result = op.build.call(aten.permute.default, x, order)
    return result


@onnx_op("Squeeze")
def squeeze(op: Op) -> Result:
    x = op.input(0)
    axes = op.attr_ints("axes") if op.version < 13 else op.ints(1, "axes")
    sizes = shape_of(x)
    dims = [a % rank(x) for a in axes] if axes is not None else [i for i, d in enumerate(sizes) if d == 1]
    result: Value = op.build.call(aten.squeeze.dims, x, dims)
    return result


@onnx_op("Unsqueeze")
def unsqueeze(op: Op) -> Result:
    x = op.input(0)
    axes = op.attr_ints("axes") if op.version < 13 else op.ints(1, "axes")
    total = rank(x) + len(axes or [])
    for axis in sorted(a % total for a in axes or []):
        x = op.build.call(aten.unsqueeze.default, x, axis)
    return x


@onnx_op("Concat")
def concat(op: Op) -> Result:
    values = op.build.align([op.input(i) for i in range(op.num_inputs)])
    if len(values) == 1:
        return values[0]
    result: Value = op.build.call(aten.cat.default, values, op.axis(0))
    return result


@onnx_op("Split")
def split(op: Op) -> Result:
    x, axis = op.input(0), op.axis(0)
    sizes = op.attr_ints("split") if op.version < 13 else op.ints(1, "split")
    if sizes is None:
        count = op.attr_int("num_outputs", len(op.node.output))
        each = -(-shape_of(x)[axis] // count)
        sizes = [max(min(each, shape_of(x)[axis] - i * each), 0) for i in range(count)]
    result: tuple[Value, ...] = op.build.call(aten.split_with_sizes.default, x, sizes, axis)
    return tuple(result)


def _bounds(start: int, end: int, step: int, size: int) -> tuple[int, int]:
    """Clamp as numpy does."""
    return slice(start, end, step).indices(size)[:2]


@onnx_op("Slice")
def slice_(op: Op) -> Result:
    x, build = op.input(0), op.build
    if op.version < 10:
        starts, ends, axes, steps = op.attr_ints("starts"), op.attr_ints("ends"), op.attr_ints("axes"), None
    else:
        starts, ends = op.ints(1, "starts"), op.ints(2, "ends")
        axes, steps = op.ints(3, "axes"), op.ints(4, "steps")
    starts, ends = starts or [], ends or []
    axes = axes if axes is not None else list(range(len(starts)))
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        dim = axis % rank(x)
        size = shape_of(x)[dim]
        if step < 0:
            picked = torch.arange(size)[[*range(size)[start:end:step]]]
            x = build.call(aten.index_select.default, x, dim, picked)
            continue
        first, last = _bounds(start, end, step, size)
        if (first, last, step) != (0, size, 1):
            x = build.call(aten.slice.Tensor, x, dim, first, max(last, first), step)
    return x


@onnx_op("Expand")
def expand(op: Op) -> Result:
    x = op.input(0)
    target = torch.broadcast_shapes(shape_of(x), tuple(op.ints(1, "shape") or []))  # type: ignore[no-untyped-call]
    if tuple(target) == shape_of(x):
        return x
    result: Value = op.build.call(aten.expand.default, x, list(target))
    return result


@onnx_op("Tile")
def tile(op: Op) -> Result:
    repeats = op.ints(1, "repeats") or []
    if all(r == 1 for r in repeats):
        return op.input(0)
    result: Value = op.build.call(aten.repeat.default, op.input(0), repeats)
    return result


@onnx_op("Pad")
def pad(op: Op) -> Result:
    x, mode = op.input(0), op.attr_str("mode", "constant")
    if op.version < 11:
        amounts, fill, axes = op.attr_ints("pads") or [], op.attr_float("value", 0.0), None
    else:
        amounts, axes = op.ints(1, "pads") or [], op.ints(3, "axes")
        given = op.number(2, "constant_value")
        fill = 0.0 if given is None else float(given)
    dims = list(range(rank(x))) if axes is None else [a % rank(x) for a in axes]
    before = dict(zip(dims, amounts[: len(dims)], strict=True))
    after = dict(zip(dims, amounts[len(dims) :], strict=True))
    flat: list[int] = []
    for dim in reversed(range(rank(x))):  # torch names the last dim first
        flat += [before.get(dim, 0), after.get(dim, 0)]
    while flat and flat[-2:] == [0, 0]:
        del flat[-2:]
    if not flat:
        return x
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    result: Value = op.build.call(aten.pad.default, x, flat, names[mode], fill if mode == "constant" else None)
    return result


@onnx_op("Trilu")
def triangle(op: Op) -> Result:
    offset = op.number(1, "diagonal")
    target = aten.triu.default if op.attr_int("upper", 1) else aten.tril.default
    result: Value = op.build.call(target, op.input(0), int(offset or 0))
    return result


@onnx_op("DepthToSpace")
def depth_to_space(op: Op) -> Result:
    block, x = op.attr_int("blocksize", 1), op.input(0)
    result: Value
    if op.attr_str("mode", "DCR") == "CRD":
        result = op.build.call(aten.pixel_shuffle.default, x, block)
        return result
    n, c, h, w = shape_of(x)
    parts = op.build.call(aten.reshape.default, x, [n, block, block, c // block**2, h, w])
    moved = op.build.call(aten.permute.default, parts, [0, 3, 4, 1, 5, 2])
    result = op.build.call(aten.reshape.default, moved, [n, c // block**2, h * block, w * block])
    return result


@onnx_op("SpaceToDepth")
def space_to_depth(op: Op) -> Result:
    block, x = op.attr_int("blocksize", 1), op.input(0)
    n, c, h, w = shape_of(x)
    parts = op.build.call(aten.reshape.default, x, [n, c, h // block, block, w // block, block])
    moved = op.build.call(aten.permute.default, parts, [0, 3, 5, 1, 2, 4])
    result: Value = op.build.call(aten.reshape.default, moved, [n, c * block**2, h // block, w // block])
    return result


def _resized(op: Op) -> list[int]:
    """Sizes that a Resize or Upsample asks for."""
    sizes = shape_of(op.input(0))
    if op.node.op_type == "Upsample":
        found = op.attr("scales")
        scales = torch.tensor(list(found.floats)) if found is not None else op.constant(1, "scales")
    else:
        wanted = op.ints(3, "sizes") if op.version >= 11 else None
        if wanted:
            return wanted
        scales = op.constant(2 if op.version >= 11 else 1, "scales")
    if scales is None or scales.numel() != len(sizes):
        raise UnsupportedError("it gives neither scales nor sizes for every dim")
    return [math.floor(d * s) for d, s in zip(sizes, scales.reshape(-1).tolist(), strict=True)]


@onnx_op("Resize", "Upsample")
def resize(op: Op) -> Result:
    x, target = op.input(0), _resized(op)
    if tuple(target) == shape_of(x):
        return x
    if rank(x) != 4 or tuple(target[:2]) != shape_of(x)[:2] or op.attr("axes"):
        raise UnsupportedError("only height and width of (batch, channels, height, width) can be resampled")
    mode = op.attr_str("mode", "nearest")
    where = op.attr_str("coordinate_transformation_mode", "half_pixel" if op.version >= 11 else "asymmetric")
    result: Value
    whole = all(t % d == 0 for t, d in zip(target, shape_of(x), strict=True))
    if mode == "nearest" and (where == "asymmetric" or whole):
        result = op.build.call(aten.upsample_nearest2d.default, x, target[2:])
        return result
    if mode in ("linear", "cubic") and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        kernel = aten.upsample_bilinear2d.default if mode == "linear" else aten.upsample_bicubic2d.default
        result = op.build.call(kernel, x, target[2:], where == "align_corners")
        return result
    raise UnsupportedError(f"mode {mode} with {where} coordinates is not understood")

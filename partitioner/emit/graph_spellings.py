"""The calls of Python and torch that common aten operators are written as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spelling:
    """A call: ``head`` is a function, or a method of the first argument if it begins with a dot.

    ``order`` names schema arguments in the order in which Python takes them (``*size`` spreads a list), ``keywords``
    those that are given by name (``python=schema`` where the names differ).
    """

    head: str
    order: str = ""
    keywords: str = ""


_UNARY = (
    "abs", "cos", "erf", "exp", "log", "logical_not", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "tanh",
)  # fmt: skip
"""Functions of one tensor that ``torch`` has under their own names."""
_SINGLE = {
    "linear.default": Spelling("F.linear", "input weight bias"),
    "embedding.default": Spelling("F.embedding", "indices weight", "padding_idx"),
    "layer_norm.default": Spelling("F.layer_norm", "input normalized_shape weight bias eps"),
    "rms_norm.default": Spelling("F.rms_norm", "input normalized_shape weight eps"),
    "group_norm.default": Spelling("F.group_norm", "input num_groups weight bias eps"),
    "batch_norm.default": Spelling(
        "F.batch_norm", "input running_mean running_var weight bias", "training momentum eps"
    ),
    "scaled_dot_product_attention.default": Spelling(
        "F.scaled_dot_product_attention", "query key value attn_mask", "dropout_p is_causal scale enable_gqa"
    ),
    "cross_entropy_loss.default": Spelling("F.cross_entropy", "self target weight", "ignore_index label_smoothing"),
    "mse_loss.default": Spelling("F.mse_loss", "self target"),
    "dropout.default": Spelling("F.dropout", "input p", "training=train"),
    "gelu.default": Spelling("F.gelu", "self", "approximate"),
    "leaky_relu.default": Spelling("F.leaky_relu", "self negative_slope"),
    "softmax.int": Spelling("F.softmax", "self dim", "dtype"),
    "log_softmax.int": Spelling("F.log_softmax", "self dim", "dtype"),
    "one_hot.default": Spelling("F.one_hot", "self num_classes"),
    "pad.default": Spelling("F.pad", "self pad mode value"),
    "constant_pad_nd.default": Spelling("F.pad", "self pad", "value"),
    "max_pool2d.default": Spelling("F.max_pool2d", "self kernel_size stride padding dilation ceil_mode"),
    "adaptive_avg_pool2d.default": Spelling("F.adaptive_avg_pool2d", "self output_size"),
    "cat.default": Spelling("torch.cat", "tensors dim"),
    "stack.default": Spelling("torch.stack", "tensors dim"),
    "einsum.default": Spelling("torch.einsum", "equation *tensors"),
    "addmm.default": Spelling("torch.addmm", "self mat1 mat2", "beta alpha"),
    "arange.default": Spelling("torch.arange", "end", "dtype device"),
    "arange.start": Spelling("torch.arange", "start end", "dtype device"),
    "arange.start_step": Spelling("torch.arange", "start end step", "dtype device"),
    "full.default": Spelling("torch.full", "size fill_value", "dtype device"),
    "scalar_tensor.default": Spelling("torch.scalar_tensor", "s", "dtype device"),
    "view.default": Spelling(".view", "*size"),
    "reshape.default": Spelling(".reshape", "*shape"),
    "permute.default": Spelling(".permute", "*dims"),
    "expand.default": Spelling(".expand", "*size"),
    "repeat.default": Spelling(".repeat", "*repeats"),
    "transpose.int": Spelling(".transpose", "dim0 dim1"),
    "squeeze.dim": Spelling(".squeeze", "dim"),
    "flatten.using_ints": Spelling(".flatten", "start_dim end_dim"),
    "unflatten.int": Spelling(".unflatten", "dim sizes"),
    "chunk.default": Spelling(".chunk", "chunks dim"),
    "split.Tensor": Spelling(".split", "split_size dim"),
    "split_with_sizes.default": Spelling(".split", "split_sizes dim"),
    "unbind.int": Spelling(".unbind", "dim"),
    "to.dtype": Spelling(".to", "dtype", "copy"),
    "to.device": Spelling(".to", "dtype", "copy"),
    "to.dtype_layout": Spelling(".to", "dtype", "copy"),
    "_to_copy.default": Spelling(".to", "dtype", "copy"),
    "add_.Tensor": Spelling(".add_", "other"),
    "copy_.default": Spelling(".copy_", "src"),
    "type_as.default": Spelling(".type_as", "other"),
    "pow.Tensor_Scalar": Spelling(".pow", "exponent"),
    "mean.default": Spelling(".mean", "", "dtype"),
    "mean.dim": Spelling(".mean", "dim", "keepdim dtype"),
    "sum.default": Spelling(".sum", "", "dtype"),
    "sum.dim_IntList": Spelling(".sum", "dim", "keepdim dtype"),
    "max.dim": Spelling(".max", "dim", "keepdim"),
    "clamp.default": Spelling(".clamp", "", "min max"),
    "masked_fill.Scalar": Spelling(".masked_fill", "mask value"),
    "gather.default": Spelling(".gather", "dim index"),
    "index_select.default": Spelling(".index_select", "dim index"),
}


def _families() -> dict[str, Spelling]:
    """Operators that are spelled alike."""
    families: dict[str, Spelling] = {}
    for name, order in (
        ("conv1d", "input weight bias stride padding dilation groups"),
        ("conv2d", "input weight bias stride padding dilation groups"),
        ("conv3d", "input weight bias stride padding dilation groups"),
    ):
        families[f"{name}.default"] = families[f"{name}.padding"] = Spelling(f"F.{name}", order)
    for name in ("relu", "silu", "softplus", "mish", "hardswish", "hardsigmoid"):
        families[f"{name}.default"] = Spelling(f"F.{name}", "self")
    for name in _UNARY:
        families[f"{name}.default"] = Spelling(f"torch.{name}", "self")
    for name, order in (
        ("mm", "self mat2"),
        ("bmm", "self mat2"),
        ("maximum", "self other"),
        ("minimum", "self other"),
    ):
        families[f"{name}.default"] = Spelling(f"torch.{name}", order)
    for name in ("zeros", "ones"):
        families[f"{name}.default"] = Spelling(f"torch.{name}", "*size", "dtype device")
    for overload in ("self", "ScalarOther", "ScalarSelf", "Scalar"):
        families[f"where.{overload}"] = Spelling("torch.where", "condition self other")
    families["lift_fresh_copy.default"] = Spelling(".clone")
    for name in ("contiguous", "clone", "detach", "detach_", "t"):
        families[f"{name}.default"] = Spelling(f".{name}")
    for name, order in (("unsqueeze", "dim"), ("tril", "diagonal"), ("triu", "diagonal")):
        families[f"{name}.default"] = Spelling(f".{name}", order)
    for name in ("amax", "amin"):
        families[f"{name}.default"] = Spelling(f".{name}", "dim", "keepdim")
    return families


CALLS = _SINGLE | _families()
"""By operator and overload, such as ``linear.default``."""

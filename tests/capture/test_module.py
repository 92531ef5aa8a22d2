"""nn.Module -> Program: tables, loss, calls, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.capture.module import capture_module
from partitioner.errors import CaptureError, PartitionerError, UnsupportedError, UsageError
from partitioner.printer import print_program
from partitioner.program import LossKind, Program, Recipe, TensorInfo, node_info


def captured(module: nn.Module, *args: Any, loss: LossKind = "auto", dtype: str = "float32", **kwargs: Any) -> Program:
    return capture_module(module, args, kwargs, Recipe(compute_dtype=dtype, loss=loss), spec="m.py:f")


class Wrap(nn.Module):
    """A module whose forward is a function of (self, *args)."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class TiedLm(nn.Module):
    """Vocabulary 10, width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids))
        return out


IDS = torch.zeros(2, 3, dtype=torch.int64)
X = torch.zeros(2, 4)


def linears(program: Program) -> list[tuple[str, int]]:
    """(module, call) of each linear operator."""
    nodes = [n for n in program.graph.graph.nodes if n.target is torch.ops.aten.linear.default]
    return [(node_info(n).module, node_info(n).call) for n in nodes]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_weight_is_one_storage_with_two_names(device: str) -> None:
    with torch.device(device):
        program = captured(TiedLm(), IDS.to(device))
    assert program.parameters == (
        TensorInfo(
            name="embed.weight",
            aliases=("embed.weight", "head.weight"),
            shape=(10, 4),
            dtype="float32",
            trainable=True,
        ),
    )
    reads = [(n.name, node_info(n).reads) for n in program.graph.graph.nodes if node_info(n).reads]
    assert reads == [("embedding", ("embed.weight",)), ("linear", ("embed.weight",))]


def test_parameters_keep_their_dtype_in_the_table_and_have_the_compute_dtype_in_the_graph() -> None:
    program = captured(nn.Linear(4, 4), X, dtype="bfloat16")
    assert [p.dtype for p in program.parameters] == ["float32", "float32"]
    values = [n.meta["val"].dtype for n in program.graph.graph.nodes if n.op in ("get_attr", "placeholder")]
    assert values == [torch.bfloat16] * 3
    assert [p.nbytes for p in program.parameters] == [4 * 4 * 4, 4 * 4]


def test_frozen_parameters_and_buffers_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4))
    program = captured(model, X)
    assert [(p.name, p.trainable) for p in program.parameters] == [
        ("0.weight", False),
        ("0.bias", False),
        ("1.weight", True),
        ("1.bias", True),
    ]
    # mean and variance: 4 floats each; the count of batches: one int64
    assert [(b.name, b.dtype, b.nbytes) for b in program.buffers] == [
        ("1.running_mean", "float32", 16),
        ("1.running_var", "float32", 16),
        ("1.num_batches_tracked", "int64", 8),
    ]


def test_every_rank_holds_padded_shards() -> None:
    program = captured(
        Wrap(lambda m, x: m.fc(x) + m.table.sum(), fc=nn.Linear(4, 5), table=nn.Parameter(torch.ones(2, 7))), X
    )
    shards = {p.name: (p.padded_shard_numel(4), p.padded_shard_bytes(4)) for p in program.parameters}
    # 5 rows over 4 ranks: 2 rows each (8 in all, 3 of them padding); 2 rows over 4 ranks: 1 row each, two ranks hold padding
    assert shards == {"fc.weight": (2 * 4, 32), "fc.bias": (2, 8), "table": (7, 28)}


def test_a_module_called_twice_is_seen_twice() -> None:
    program = captured(Wrap(lambda m, x: m.out(m.block(m.block(x))), block=nn.Linear(4, 4), out=nn.Linear(4, 2)), X)
    assert linears(program) == [("block", 0), ("block", 1), ("out", 0)]
    assert sum(p.numel for p in program.parameters) == (16 + 4) + (8 + 2)


def test_one_module_in_two_places_goes_by_its_first_name() -> None:
    block = nn.Linear(4, 4)
    program = captured(nn.Sequential(block, nn.Linear(4, 4), block), X)
    assert linears(program) == [("0", 0), ("1", 0), ("0", 1)]
    assert [m.name for m in program.modules] == ["", "0", "1"]
    assert program.parameter("2.weight").name == "0.weight"


def test_containers_without_forward_are_marked() -> None:
    class Features(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self["a"](x)
            return out

    model = Wrap(
        lambda m, x: m.plain[0](m.features(x)),
        features=Features({"a": nn.Linear(4, 4)}),
        plain=nn.ModuleList([nn.Linear(4, 4)]),
    )
    assert {m.name: m.has_forward for m in captured(model, X).modules} == {
        "": True, "features": True, "features.a": True, "plain": False, "plain.0": True,
    }  # fmt: skip


def test_a_meta_model_gives_the_graph_of_the_real_one() -> None:
    with torch.device("meta"):
        meta, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.empty(2, 4)
    assert print_program(captured(meta, x)) == print_program(
        captured(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), X)
    )
    assert all(p.is_meta for p in meta.parameters())


def test_the_model_is_left_as_it_was() -> None:
    model = TiedLm()
    weight, before = model.embed.weight, model.embed.weight.detach().clone()
    captured(model, IDS, dtype="bfloat16")
    assert model.embed.weight is weight
    assert torch.equal(weight, before)
    assert not model._forward_hooks
    assert not torch.compiler.is_exporting()
    assert tuple(model(IDS).shape) == (2, 3, 10)


def output(program: Program) -> str:
    return print_program(program).strip().splitlines()[-1].removeprefix("return %")


def test_a_scalar_output_is_the_loss() -> None:
    program = captured(Wrap(lambda m, x: m.fc(x).pow(2).sum(), fc=nn.Linear(4, 4)), X)
    assert output(program) == "sum_1"
    assert "loss" not in program.defaults


def test_an_output_called_loss_is_the_loss() -> None:
    @dataclass
    class Out:
        logits: torch.Tensor
        loss: torch.Tensor
        cache: object = None

    def forward(m: Any, x: torch.Tensor) -> Out:
        y = m.fc(x)
        return Out(logits=y, loss=y.abs().mean(), cache=object())

    program = captured(Wrap(forward, fc=nn.Linear(4, 4)), x=X)
    assert output(program) == "mean"
    assert "loss" not in program.defaults


def test_without_a_loss_one_with_a_gradient_is_taken_and_said() -> None:
    """The mean of a softmax is constant: it would prove nothing about gradients."""
    program = captured(nn.Linear(4, 4), X)
    assert (output(program), program.recipe.loss) == ("mean_default", "mse")
    assert program.defaults["loss"].startswith("mean square of the first output")
    tokens = captured(TiedLm(), IDS)
    assert tokens.recipe.loss == "cross_entropy"
    assert tokens.defaults["loss"].startswith("cross_entropy of the first output against labels")
    assert "loss" not in captured(nn.Linear(4, 4), X, loss="mean").defaults


def test_cross_entropy_adds_labels_as_an_input() -> None:
    program = captured(TiedLm(), IDS, loss="cross_entropy", dtype="bfloat16")
    labels = next(n for n in program.graph.graph.nodes if n.name == "labels")
    assert (labels.op, tuple(labels.meta["val"].shape), labels.meta["val"].dtype) == (
        "placeholder",
        (2, 3),
        torch.int64,
    )
    loss = next(n for n in program.graph.graph.nodes if n.target is torch.ops.aten.cross_entropy_loss.default)
    # in float32, over 2 x 3 rows of 10 classes
    assert [(tuple(a.meta["val"].shape), a.meta["val"].dtype) for a in loss.args] == [
        ((6, 10), torch.float32),
        ((6,), torch.int64),
    ]


def test_mse_squares_the_output() -> None:
    program = captured(nn.Linear(4, 4), X, loss="mse")
    targets = [str(n.target) for n in program.graph.graph.nodes if n.op == "call_function"]
    assert targets[-2:] == ["aten.mul.Tensor", "aten.mean.default"]


@pytest.mark.parametrize(
    ("loss", "model", "message"),
    [
        ("output", nn.Linear(4, 4), "no floating scalar named loss"),
        ("cross_entropy", Wrap(lambda m, x: m.fc(x).sum(-1), fc=nn.Linear(4, 4)), "at least two dims"),
        ("mean", Wrap(lambda m, x: m.fc(x).argmax(-1), fc=nn.Linear(4, 4)), "nothing to differentiate"),
    ],
)
def test_a_loss_that_cannot_be(loss: LossKind, model: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        captured(model, X, loss=loss)


def branch_on_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.fc(x)
    if y.mean() > 0.25:
        y = y * 2
    return y


def test_a_branch_on_a_value_is_refused_with_its_line_and_nothing_else_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = branch_on_value.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError, match=rf"test_module\.py:{line}\)") as caught:
        captured(Wrap(branch_on_value, fc=nn.Linear(4, 4)), X)
    assert "m.py:f" in caught.value.what
    assert ".item()" in caught.value.hint
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model", "x", "kind", "message"),
    [
        (Wrap(lambda m, i: m.emb(i), emb=nn.Embedding(10, 4, sparse=True)), IDS, UsageError, "emb .*sparse=True"),
        (Wrap(lambda m, x: m.fc(x), fc=nn.LazyLinear(4)), X, UsageError, "fc.weight has no shape yet"),
        (Wrap(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(3, 4).t())), X, UsageError, "w is not contiguous"),
        (Wrap(lambda m, x: m.fc(x)[x[:, 0] > 0], fc=nn.Linear(4, 4)), X, UnsupportedError, "depends on values"),
        (Wrap(lambda m, x: m.fc(x), fc=nn.Linear(3, 4)), X, CaptureError, "cannot capture"),
        (Wrap(lambda m, x: m.fc(x), fc=nn.Linear(4, 4), bad=(n for n in ())), X, CaptureError, "cannot be copied"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_name(
    model: nn.Module, x: torch.Tensor, kind: type[PartitionerError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        captured(model, x)
    assert caught.value.hint


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_seen_through_and_said(reentrant: bool) -> None:
    parts = {"block": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)}
    plain = captured(Wrap(lambda m, x: m.head(m.block(x)), **parts), X)
    wrapped = captured(Wrap(lambda m, x: m.head(checkpoint(m.block, x, use_reentrant=reentrant)), **parts), X)
    assert print_program(wrapped) == print_program(plain)
    assert not any(n.meta.get("no_grad") for n in wrapped.graph.graph.nodes)
    assert [w.split(";")[0] for w in wrapped.warnings] == ["forward calls torch.utils.checkpoint itself (1x)"]
    assert plain.warnings == []


def test_warnings_name_what_is_unused_complex_or_frozen_in_eval() -> None:
    model = Wrap(
        lambda m, x: m.fc(x) + m.phase.real,
        fc=nn.Linear(4, 4),
        phase=nn.Parameter(torch.ones(4, dtype=torch.cfloat)),
        idle=nn.Linear(2, 2),
    )
    eval_mode, complex_, unused = captured(model.eval(), X).warnings
    assert "eval mode" in eval_mode
    assert "complex parameters (phase)" in complex_
    assert "idle.weight, idle.bias" in unused


def test_the_batch_that_was_used_is_said() -> None:
    assert captured(TiedLm(), IDS).defaults["batch"] == "2 (dim 0 of input ids [2, 3])"

"""Which units are proposed, and which windows the forward is cut into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import embedding
from torch.testing._internal.distributed.fake_pg import FakeStore

from partitioner.capture.module import capture_module
from partitioner.errors import UnsupportedError
from partitioner.program import Program, Recipe, UnitGroup, node_info
from passes.find_units import FindUnits

D = 16  # width; a Linear(D, D) has 272 parameters, a LayerNorm(D) 32: more than a twentieth, so not tiny
X = torch.zeros(2, D)
IDS = torch.zeros(2, 3, dtype=torch.int64)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def found(model: nn.Module, x: torch.Tensor = X) -> Program:
    program = capture_module(model, (x,), {}, Recipe(compute_dtype="float32"), spec="m.py:f")
    FindUnits().run(program)
    return program


def levels(program: Program, *wanted: str) -> dict[str, UnitGroup]:
    return {g.name: g for g in program.groups if g.level in wanted}


class Model(nn.Module):
    """A module whose forward is a function of (self, x)."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def chain(names: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Call the named children in order; a container's children one by one."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        for name in names.split():
            part = getattr(module, name)
            for layer in part if type(part) is nn.ModuleList else [part]:
                x = layer(x)
        return x

    return forward


def block() -> nn.Module:
    """Two parts of 272 and 544 parameters, and between them a norm of 8, which is tiny."""
    return Model(
        lambda m, x: x + m.mlp(torch.cat((m.norm(m.att(x)[..., :4]), x[..., 4:]), -1)),
        att=linear(), norm=nn.LayerNorm(4), mlp=nn.Sequential(linear(), linear()),
    )  # fmt: skip


def language_model() -> nn.Module:
    """Head tied to the embedding: 100 tokens x 16."""
    model = Model(
        chain("embed layers norm head"),
        embed=nn.Embedding(100, D),
        layers=nn.ModuleList(block() for _ in range(4)),
        norm=nn.LayerNorm(D),
        head=nn.Linear(D, 100, bias=False),
    )
    model.head.weight = model.embed.weight  # type: ignore[assignment]  # setattr in Model made it a module
    return model


def test_blocks_atoms_and_merges() -> None:
    program = found(Model(chain("stem layers"), stem=linear(), layers=nn.ModuleList(block() for _ in range(5))))
    parts = [f"layers.{i}.{part}" for i in range(5) for part in ("att", "mlp")]
    assert program.windows == ("stem", *parts)
    atoms = levels(program, "atom")
    assert list(atoms) == ["stem", *parts]
    assert atoms["layers.0.att"].modules == ("layers.0.att", "layers.0.norm")
    assert atoms["layers.0.att"].parameters == tuple(
        f"layers.0.{name}" for name in ("att.weight", "att.bias", "norm.weight", "norm.bias")
    )
    assert {name: g.calls for name, g in levels(program, "block").items()} == {
        f"layers.{i}": ((1 + 2 * i, 2 + 2 * i),) for i in range(5)
    }
    assert {name: (g.calls, len(g.parameters)) for name, g in levels(program, "merge").items()} == {
        "layers.0..1": (((1, 4),), 2 * 8),
        "layers.2..3": (((5, 8),), 2 * 8),
        "layers.0..3": (((1, 8),), 4 * 8),
    }
    assert not levels(program, "pinned", "bare")


def test_operators_carry_the_window_they_run_in() -> None:
    program = found(Model(chain("layers head"), layers=nn.ModuleList(block() for _ in range(2)), head=linear()))
    assert program.windows == ("layers.0.att", "layers.0.mlp", "layers.1.att", "layers.1.mlp", "head")
    by_module: dict[str, set[int]] = {}
    for node in program.graph.graph.nodes:
        if node.op == "call_function":
            by_module.setdefault(node_info(node).module, set()).add(node_info(node).atom)
    assert by_module["layers.1.att"] == by_module["layers.1.norm"] == {2}
    assert by_module["layers.1.mlp.0"] == by_module["layers.1.mlp.1"] == {3}
    assert by_module["layers.1"] == {2, 3}  # slices and the concatenation before mlp, the residual after it
    assert by_module[""] == {4}  # the loss


def test_a_second_run_changes_nothing() -> None:
    program = found(language_model(), IDS)
    groups, windows = program.groups, program.windows
    assert not FindUnits().run(program)
    assert (program.groups, program.windows) == (groups, windows)


def test_a_tied_head_and_its_embedding_are_one_unit_with_the_norm_between() -> None:
    program = found(language_model(), IDS)
    (pinned,) = levels(program, "pinned").values()
    # the norm's 32 parameters are less than a twentieth of the table's 1600
    assert pinned.modules == ("embed", "norm", "head")
    assert pinned.parameters == ("embed.weight", "norm.weight", "norm.bias")
    last = len(program.windows) - 1
    assert pinned.calls == ((0, last),)
    assert program.windows[0] == "embed"
    assert program.windows[-2:] == ("norm", "head")
    assert [g.name for g in levels(program, "bare").values()] == ["(embed)", "(norm)", "(head)"]


def test_a_module_called_six_times_is_one_unit_with_six_calls() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(m.block(x))
        out: torch.Tensor = m.out(x)
        return out

    program = found(Model(forward, block=nn.Sequential(linear(), linear()), out=linear()))
    (pinned,) = levels(program, "pinned").values()
    assert (pinned.modules, pinned.calls) == (("block",), tuple((i, i) for i in range(6)))
    assert len(pinned.parameters) == 4
    assert program.windows == (*(f"block#{i}" for i in range(6)), "out")


def test_lists_of_parameters_belong_to_the_module_that_reads_them() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.base(x)
        for a in m.adapters:
            y = y + x @ a
        return y * m.scales["s"]

    lists = {
        "adapters": nn.ParameterList(torch.ones(D, D) for _ in range(2)),
        "scales": nn.ParameterDict({"s": torch.ones(D)}),
    }
    program = found(Model(forward, base=linear(), **lists))
    assert levels(program, "pinned")["(root)"].parameters == ("adapters.0", "adapters.1", "scales.s")
    assert {m for g in program.groups for m in g.modules} == {"base", ""}


def test_attention_that_reads_its_child_itself_holds_the_child() -> None:
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    model = Model(lambda m, x: m.out(m.att(x, x, x, need_weights=False)[0]), att=attention, out=linear())
    program = found(model, torch.zeros(2, 3, D))
    assert levels(program, "atom")["att"].parameters == tuple(f"att.{name}" for name, _ in attention.named_parameters())
    assert not any("out_proj" in m for g in program.groups for m in g.modules)


class NotCalled(nn.ModuleDict):
    """A container that defines forward, so that FSDP2 may hook it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self["b"](self["a"](x))
        return out


def test_containers_without_forward_are_never_units() -> None:
    model = Model(
        chain("features plain head"),
        features=NotCalled({"a": linear(), "b": linear()}), plain=nn.ModuleList([linear(), linear()]), head=linear(),
    )  # fmt: skip
    modules = {m for g in found(model).groups for m in g.modules}
    assert modules == {"features.a", "features.b", "plain.0", "plain.1", "head"}


def test_a_weight_that_the_root_reads_itself_is_the_root_s_and_so_is_its_module() -> None:
    """As a unit, ``head`` would take its weight along, and the embedding would find a shard."""
    program = found(
        Model(lambda m, i: m.head(m.body(embedding(i, m.head.weight))), body=linear(), head=nn.Linear(D, 100)), IDS
    )
    assert levels(program, "pinned")["(root)"].parameters == ("head.weight", "head.bias")
    assert list(levels(program, "atom")) == ["body"]
    assert program.windows == ("body", "head")


def test_a_tied_head_that_is_not_called_leaves_the_weight_to_the_root() -> None:
    model = language_model()
    model.function = chain("embed layers norm")  # type: ignore[assignment]  # a plain attribute
    program = found(model, IDS)
    assert levels(program, "pinned")["(root)"].parameters == ("embed.weight",)
    assert not any(m in ("embed", "head") for g in program.groups for m in g.modules)


def test_a_decoder_that_reads_a_tied_weight_itself_is_not_joined_with_the_head() -> None:
    def forward(m: Any, ids: torch.Tensor) -> torch.Tensor:
        x = embedding(ids, m.embed.weight)
        for layer in m.layers:
            x = layer(x)
        return x

    decoder = Model(forward, embed=nn.Embedding(20, D), layers=nn.ModuleList(linear() for _ in range(3)))
    model = Model(chain("decoder head"), decoder=decoder, head=nn.Linear(D, 20))
    model.head.weight = decoder.embed.weight  # type: ignore[union-attr, assignment]  # setattr in Model made them modules
    program = found(model, IDS)
    assert levels(program, "pinned")["(root)"].parameters == ("decoder.embed.weight", "head.bias")
    assert list(levels(program, "block")) == ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]


def test_units_never_mix_dtypes_of_trainable_parameters() -> None:
    def routed() -> nn.Module:
        return Model(chain("router expert"), router=linear(), expert=linear().to(torch.bfloat16))

    program = found(Model(chain("layers"), layers=nn.ModuleList(routed() for _ in range(2))))
    assert [g.name for g in program.groups] == [f"layers.{i}.{part}" for i in range(2) for part in ("router", "expert")]


def test_frozen_parameters_may_have_another_dtype() -> None:
    def quantised() -> nn.Module:
        return Model(chain("base lora"), base=linear().to(torch.bfloat16).requires_grad_(False), lora=linear())

    program = found(Model(chain("layers"), layers=nn.ModuleList(quantised() for _ in range(2))))
    assert list(levels(program, "block")) == ["layers.0", "layers.1"]


def test_a_module_that_mixes_dtypes_itself_is_refused() -> None:
    odd = linear()
    odd.bias = nn.Parameter(odd.bias.detach().to(torch.float64))
    with pytest.raises(UnsupportedError, match=r"odd holds .* float32 and float64 \(odd.bias is float64\)") as caught:
        found(Model(chain("odd"), odd=odd))
    assert "module of their own" in caught.value.hint


def nested() -> nn.Module:
    """Three levels: outer.0.inner.{p,q}, outer.0.r, outer.1.{p,q}, head."""

    def pair() -> nn.Module:
        return Model(chain("p q"), p=linear(), q=linear())

    outer = nn.ModuleList([Model(chain("inner r"), inner=pair(), r=linear()), pair()])
    return Model(chain("outer head"), outer=outer, head=linear())


def scaled() -> nn.Module:
    """Blocks with a parameter of their own beside modules."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(m.a(x)) * m.gain  # type: ignore[no-any-return]  # Model's attributes are untyped

    layers = [Model(forward, a=linear(), b=linear(), gain=nn.Parameter(torch.ones(D))) for _ in range(2)]
    return Model(chain("layers"), layers=nn.ModuleList(layers))


def recurrent() -> nn.Module:
    return Model(lambda m, x: m.out(m.cell(m.cell(x))), cell=nn.Sequential(linear(), linear()), out=linear())


def read_by_root() -> nn.Module:
    return Model(lambda m, i: m.head(m.body(embedding(i, m.head.weight))), body=linear(), head=nn.Linear(D, 100))


ZOO = [(nested, X), (scaled, X), (recurrent, X), (language_model, IDS), (read_by_root, IDS)]


@pytest.mark.parametrize(("build", "x"), ZOO)
def test_atoms_and_pinned_units_hold_every_parameter_once_and_blocks_hold_their_atoms(
    build: Callable[[], nn.Module], x: torch.Tensor
) -> None:
    program = found(build(), x)
    finest = [g for g in program.groups if g.level == "pinned" or g.calls[0][0] == g.calls[0][1]]
    assert sorted(p for g in finest for p in g.parameters) == sorted(p.name for p in program.parameters)
    for group in levels(program, "block", "merge").values():
        first, last = group.calls[0]
        inner = [g for g in finest if g.level != "pinned" and first <= g.calls[0][0] <= last]
        assert sorted(group.parameters) == sorted(p for g in inner for p in g.parameters)
    free = [g.calls[0] for g in finest if g.level != "pinned"]
    assert free == [(w, w) for w in range(len(program.windows))]


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """A process group that moves nothing: enough for FSDP2 to accept or refuse a wrapping and run a step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # a Linear on three dims returns a view on cpu
@pytest.mark.parametrize("finest", [True, False], ids=["atoms", "blocks"])
@pytest.mark.parametrize(("build", "x"), ZOO)
def test_fsdp2_accepts_and_runs_what_is_proposed(build: Callable[[], nn.Module], x: torch.Tensor, finest: bool) -> None:
    model = build()
    skip = ("block", "merge") if finest else ("merge",)
    groups = [g for g in found(model, x).groups if g.level not in skip and g.parameters and g.modules != ("",)]
    if not finest:
        blocks = [m for g in groups if g.level == "block" for m in g.modules]
        groups = [
            g for g in groups if g.level != "atom" or not any(m.startswith(f"{b}.") for b in blocks for m in g.modules)
        ]
    mesh = init_device_mesh("cpu", (2,))
    for group in sorted(groups, key=lambda g: -max(m.count(".") for m in g.modules)):
        fully_shard([model.get_submodule(m) for m in group.modules], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())

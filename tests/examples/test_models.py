"""The example models are what they say: sizes, losses, and the units they fall into."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from partitioner.capture.factory import load_callable, load_factory
from partitioner.capture.module import capture_module
from partitioner.program import LossKind, Program, Recipe
from passes.find_units import FindUnits

RECIPE = Recipe(batch=2, seq=16)
TINY = ["llama.py:tiny_llama", "gpt2.py:tiny_gpt2", "lora.py:tiny_lora"]


def found(path: str, recipe: Recipe) -> Program:
    module, args, kwargs = load_factory(path, recipe)
    program = capture_module(module, args, kwargs, recipe, spec=path)
    FindUnits().run(program)
    return program


def llama_numel(layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> int:
    """Query and output, key and value, three of the feed-forward, two norms; table, head and the last norm."""
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    return layers * layer + 2 * vocab * hidden + hidden


@pytest.mark.parametrize(
    ("spec", "numel", "trainable"),
    [
        ("llama.py:llama3_8b", 8_030_261_248, 8_030_261_248),
        ("llama.py:llama3_70b", 70_553_706_496, 70_553_706_496),
        ("llama.py:llama3_405b", 405_853_388_800, 405_853_388_800),
        ("llama.py:tiny_llama", 229_952, 229_952),
        ("gpt2.py:gpt2_small", 124_439_808, 124_439_808),
        # rank 16 on 32 layers: query (4096 + 4096) x 16, value (4096 + 1024) x 16
        ("lora.py:llama3_8b_lora", 8_030_261_248 + 6_815_744, 6_815_744),
        # rank 4 on 4 layers: query (64 + 64) x 4, value (64 + 32) x 4
        ("lora.py:tiny_lora", 229_952 + 3_584, 3_584),
        ("convnet.py:convnet", 308_234, 308_234),
    ],
)
def test_parameter_counts(example_models: Path, spec: str, numel: int, trainable: int) -> None:
    with torch.device("meta"):
        module, _, _ = load_factory(f"{example_models}/{spec}", RECIPE)
    assert sum(p.numel() for p in module.parameters()) == numel
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == trainable


def test_the_published_llamas_by_formula() -> None:
    assert llama_numel(32, 4096, 14336, 8 * 128, 128256) == 8_030_261_248
    assert llama_numel(80, 8192, 28672, 8 * 128, 128256) == 70_553_706_496
    assert llama_numel(126, 16384, 53248, 8 * 128, 128256) == 405_853_388_800
    assert llama_numel(4, 64, 192, 2 * 16, 256) == 229_952


@pytest.mark.parametrize("spec", TINY)
def test_loss_starts_near_that_of_a_guess_and_reaches_every_trainable_parameter(
    example_models: Path, spec: str
) -> None:
    module, args, _ = load_factory(f"{example_models}/{spec}", RECIPE)
    loss = module(*args)
    assert abs(loss.item() - math.log(256)) < 0.5
    loss.backward()
    trained = {name for name, p in module.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("spec", TINY)
def test_no_position_sees_a_later_token(example_models: Path, spec: str) -> None:
    module, (tokens, labels), _ = load_factory(f"{example_models}/{spec}", RECIPE)
    labels = labels.clone()
    labels[:, 8:] = -100  # what cross_entropy ignores
    before = module(tokens, labels)
    later, earlier = tokens.clone(), tokens.clone()
    later[:, 8:] = (later[:, 8:] + 1) % 250
    earlier[:, 0] = (earlier[:, 0] + 1) % 250
    assert torch.equal(module(later, labels), before)
    assert not torch.equal(module(earlier, labels), before)


def test_a_factory_gives_the_same_model_every_time(example_models: Path) -> None:
    first, args, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    second, again, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    assert torch.equal(first(*args), second(*again))


def test_adapters_start_as_no_change(example_models: Path) -> None:
    base, args, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    lora, same, _ = load_factory(f"{example_models}/lora.py:tiny_lora", RECIPE)
    assert torch.equal(base(*args), lora(*same))


def test_rotation_depends_on_the_distance_alone(example_models: Path) -> None:
    rotate = load_callable(f"{example_models}/llama.py:rotate")
    module, _, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    rope = module.get_submodule("rope")
    q, k = torch.randn(16, generator=torch.Generator().manual_seed(1)), torch.ones(16)

    def score(i: int, j: int) -> float:
        at = [rotate(x, rope.get_buffer("cos")[n], rope.get_buffer("sin")[n]) for x, n in ((q, i), (k, j))]
        return float(at[0] @ at[1])

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
    # position 1, first frequency: one radian; the last of 8: theta ** -(7 / 8)
    assert rope.get_buffer("cos")[1, 0].item() == pytest.approx(math.cos(1.0))
    assert rope.get_buffer("sin")[1, 7].item() == pytest.approx(math.sin(500_000 ** -(7 / 8)), rel=1e-4)


def test_the_rotary_table_can_be_refilled(example_models: Path) -> None:
    real, _, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    with torch.device("meta"):
        empty, _, _ = load_factory(f"{example_models}/llama.py:tiny_llama", RECIPE)
    assert not any("rope" in name for name in real.state_dict())
    empty.to_empty(device="cpu")
    table = empty.get_submodule("rope")
    reset = table.reset_parameters
    assert callable(reset)
    reset()
    for name, buffer in real.get_submodule("rope").named_buffers():
        assert torch.equal(table.get_buffer(name), buffer)


@pytest.mark.parametrize(
    ("spec", "loss", "windows"),
    [
        ("llama.py:tiny_llama", "auto", ["embed", *(f"layers.{i}.{p}" for i in range(4) for p in ("attention", "feed_forward")), "head"]),
        ("lora.py:tiny_lora", "auto", ["embed", *(f"layers.{i}.{p}" for i in range(4) for p in ("attention", "feed_forward")), "head"]),
        ("gpt2.py:tiny_gpt2", "auto", ["wte", "wpe", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "ln_f", "head"]),
        ("convnet.py:convnet", "cross_entropy", [
            "stem", "stages.0.conv1", "stages.0.conv2", "stages.1.conv1", "stages.1.conv2", "stages.1.shortcut",
            "stages.2.conv1", "stages.2.conv2", "stages.2.shortcut", "head",
        ]),
    ],
)  # fmt: skip
def test_windows_of_the_small_models(example_models: Path, spec: str, loss: LossKind, windows: list[str]) -> None:
    program = found(f"{example_models}/{spec}", Recipe(batch=2, seq=16, loss=loss))
    assert list(program.windows) == windows
    assert program.warnings == []


def test_gpt2_ties_are_one_unit(example_models: Path) -> None:
    program = found(f"{example_models}/gpt2.py:tiny_gpt2", RECIPE)
    assert [p.aliases for p in program.parameters if len(p.aliases) > 1] == [("wte.weight", "head.weight")]
    (pinned,) = (g for g in program.groups if g.level == "pinned")
    assert pinned.modules == ("wte", "ln_f", "head")  # the last norm's 128 parameters join the table's 16000


def test_llama3_8b_falls_into_attention_and_feed_forward(example_models: Path) -> None:
    program = found(f"{example_models}/llama.py:llama3_8b", Recipe())
    assert len(program.windows) == 1 + 2 * 32 + 1
    sizes = {p.name: p.numel for p in program.parameters}
    numel = {g.name: sum(sizes[p] for p in g.parameters) for g in program.groups}
    attention = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096  # with both norms of the block
    feed_forward = 3 * 4096 * 14336
    assert numel["embed"] == 128256 * 4096
    assert numel["layers.7.attention"] == attention
    assert numel["layers.7.feed_forward"] == feed_forward
    assert numel["layers.7"] == attention + feed_forward
    assert numel["layers.4..7"] == 4 * (attention + feed_forward)
    assert numel["head"] == 128256 * 4096 + 4096
    # embedding, head, and of 32 blocks: 64 halves, 32 wholes, 16 pairs, 8 fours
    assert len(program.groups) == 2 + 64 + 32 + 16 + 8

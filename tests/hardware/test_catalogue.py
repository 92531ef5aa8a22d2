"""The catalogue: every entry is whole, sourced and plausible, and names find what people mean."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from partitioner.errors import UsageError
from partitioner.hardware.catalogue import find_gpu, find_link, gpus, links
from partitioner.units import GIB

DOC = Path(__file__).parents[2] / "docs" / "reference" / "hardware.md"
NEEDED = (
    "v100-sxm-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb", "h100-sxm-80gb", "h100-pcie-80gb",
    "h200-sxm-141gb", "b200-sxm-180gb", "l40s-48gb", "rtx-4090-24gb", "mi300x-192gb",
)  # fmt: skip


def raw(file_name: str) -> dict:
    return tomllib.loads(resources.files("partitioner.hardware").joinpath(file_name).read_text(encoding="utf-8"))


def test_has_the_gpus_people_train_on():
    assert tuple(g.name for g in gpus()) == NEEDED


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_every_gpu_number_has_a_source(gpu):
    entry = raw("gpus.toml")["gpus"][gpu.name]
    numbers = {key for key, value in entry.items() if isinstance(value, (int, float))}
    numbers = numbers - {"memory_gib"} | {"memory_bytes", "flop_per_s"} | set(gpu.efficiency)
    assert set(gpu.sources) == numbers
    assert all(re.search(r"https://|arXiv:|assumed|torch", text) for text in gpu.sources.values())


@pytest.mark.parametrize("link", links(), ids=lambda link: link.name)
def test_every_link_number_has_a_source(link):
    assert set(link.sources) == {"bytes_per_s", "latency_s"}
    assert all(re.search(r"https://|assumed|line rate", text) for text in link.sources.values())
    assert 1e9 < link.bytes_per_s < 1e12
    assert 1e-6 < link.latency_s < 1e-4


def test_every_source_is_used():
    for file_name, kind in (("gpus.toml", "gpus"), ("links.toml", "links")):
        data = raw(file_name)
        used = {reference for entry in data[kind].values() for reference in entry["source"].values()}
        assert used == set(data["sources"])


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_numbers_are_plausible(gpu):
    size = int(re.search(r"(\d+)gb$", gpu.name).group(1))
    assert 0.90 * size * GIB < gpu.memory_bytes <= size * GIB
    assert 0.5e12 < gpu.memory_bytes_per_s < 10e12
    assert all(0.2 < share < 1 for share in gpu.efficiency.values())
    assert set(gpu.efficiency) == {"matmul", "conv", "attention"}
    assert gpu.flop_per_s["float64"] <= gpu.flop_per_s["float32"] < gpu.flop_per_s["float16"]


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_16_bit_products_are_faster_where_the_card_has_the_units(gpu):
    if gpu.name == "v100-sxm-32gb":  # Volta has no bfloat16
        assert gpu.flop_per_s["bfloat16"] == gpu.flop_per_s["float32"]
        assert "tf32" not in gpu.flop_per_s
    else:
        assert gpu.flop_per_s["bfloat16"] == gpu.flop_per_s["float16"]
        # tensor rates halve from 8 to 16 to 32 bits: a sparse figure among them would break the pattern
        assert gpu.flop_per_s["bfloat16"] / gpu.flop_per_s["tf32"] == pytest.approx(2, rel=0.03)
        if "float8" in gpu.flop_per_s:
            assert gpu.flop_per_s["float8"] / gpu.flop_per_s["bfloat16"] == pytest.approx(2, rel=0.03)


def test_datasheet_values():
    h100, a100 = find_gpu("h100-sxm-80gb"), find_gpu("a100-sxm-80gb")
    assert h100.flop_per_s["bfloat16"] == 989.4e12
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.link.bytes_per_s == 450e9  # 900 GB/s, both ways together
    assert h100.host_link.name == "pcie5"
    assert a100.flop_per_s["bfloat16"] == 312e12
    assert a100.link.bytes_per_s == 300e9


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h100-sxm-80gb", "h100-sxm-80gb"),
        ("h100", "h100-sxm-80gb"),
        ("H100 SXM", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("a100 pcie", "a100-pcie-80gb"),
        ("RTX4090", "rtx-4090-24gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("80gb pcie h100", "h100-pcie-80gb"),
    ],
)
def test_finds_a_gpu_by_what_people_call_it(asked, name):
    assert find_gpu(asked).name == name


def test_aliases_name_one_gpu_each():
    names = [known for gpu in gpus() for known in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    assert all(find_gpu(alias) is gpu for gpu in gpus() for alias in gpu.aliases)


def test_unknown_gpu_names_the_nearest():
    with pytest.raises(UsageError, match="no GPU is called 'h10-sxm-80gb'") as caught:
        find_gpu("h10-sxm-80gb")
    assert "did you mean h100-sxm-80gb?" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        find_gpu("h10")
    assert "did you mean h100?" in caught.value.hint


def test_unknown_gpu_lists_all_when_none_is_near():
    with pytest.raises(UsageError) as caught:
        find_gpu("abacus")
    assert all(name in caught.value.hint for name in NEEDED)


@pytest.mark.parametrize("asked", ["", "  ", "NVIDIA"])
def test_a_name_that_says_nothing_is_an_error(asked):
    with pytest.raises(UsageError, match="no GPU is called"):
        find_gpu(asked)


def test_ambiguous_gpu_lists_what_it_could_be():
    with pytest.raises(UsageError, match="could be a100-pcie-40gb or a100-pcie-80gb or h100-pcie-80gb"):
        find_gpu("pcie")


def test_links():
    assert find_link("NVLink4").bytes_per_s == 450e9
    assert find_link("infiniband-ndr").bytes_per_s == 400e9 / 8
    with pytest.raises(UsageError, match="no link is called 'nvlink44'") as caught:
        find_link("nvlink44")
    assert "did you mean nvlink4?" in caught.value.hint


def gpu_row(gpu) -> str:
    def tera(dtype: str) -> str:
        return f"{gpu.flop_per_s[dtype] / 1e12:g}" if dtype in gpu.flop_per_s else "-"

    rates = " | ".join(tera(d) for d in ("float8", "bfloat16", "float16", "tf32", "float32", "float64"))
    shares = " | ".join(f"{gpu.efficiency[c]:g}" for c in ("matmul", "conv", "attention"))
    memory = f"{gpu.memory_bytes / GIB:.2f} | {gpu.memory_bytes_per_s / 1e9:g}"
    return f"| {gpu.name} | {memory} | {rates} | {shares} | {gpu.link.name} | {gpu.host_link.name} |"


def test_the_reference_page_shows_the_catalogue():
    page = DOC.read_text(encoding="utf-8")
    missing = [row for row in map(gpu_row, gpus()) if row not in page]
    missing += [
        row
        for row in (f"| {k.name} | {k.bytes_per_s / 1e9:g} | {k.latency_s * 1e6:g} |" for k in links())
        if row not in page
    ]
    assert missing == []
    assert all(f"`{alias}`" in page for gpu in gpus() for alias in gpu.aliases)
    assert all(source in page for entry in (*gpus(), *links()) for source in entry.sources.values())

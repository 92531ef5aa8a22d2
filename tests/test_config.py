"""The cluster from flags and cluster.toml: precedence, defaults in words, and every way to be wrong."""

import json

import pytest

from partitioner.config import resolve_cluster
from partitioner.errors import UsageError
from partitioner.hardware.catalogue import find_gpu
from partitioner.units import GIB, TIB


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_are_used_and_said():
    cluster, defaults = resolve_cluster(gpus=16)
    assert cluster.gpu is find_gpu("h100-sxm-80gb")
    assert (cluster.num_gpus, cluster.gpus_per_node) == (16, 8)
    assert cluster.memory_bytes == int(find_gpu("h100").memory_bytes * 0.96) - 2 * GIB
    assert cluster.host_memory_bytes == TIB
    assert (cluster.intra_bytes_per_s, cluster.inter_bytes_per_s) == (450e9, 50e9)
    assert (cluster.intra_latency_s, cluster.inter_latency_s) == (3.4e-6, 14e-6)
    assert defaults == {
        "gpus-per-node": "8 (not given)",
        "gpu": "h100-sxm-80gb (not given)",
        "memory": "73.95 GiB of the card's 79.11 GiB (not given; kept back: 2.00 GiB for the CUDA context and NCCL buffers, "
        "4% for fragmentation)",
        "host-memory": "1.00 TiB per node (not given)",
        "intra-bandwidth": "450.0 GB/s per GPU, nvlink4 (not given)",
        "inter-bandwidth": "50.0 GB/s per GPU, infiniband-ndr (not given)",
    }


def test_what_is_given_is_taken_and_not_called_a_default():
    cluster, defaults = resolve_cluster(
        gpus=4,
        gpu="A100 PCIe",
        gpus_per_node=2,
        memory="24GiB",
        host_memory="256GB",
        intra_bandwidth="20GB/s",
        inter_bandwidth="100Gbit/s",
    )
    assert cluster.gpu.name == "a100-pcie-80gb"
    assert (cluster.num_gpus, cluster.gpus_per_node) == (4, 2)
    assert cluster.memory_bytes == 24 * GIB
    assert cluster.host_memory_bytes == 256 * 10**9
    assert (cluster.intra_bytes_per_s, cluster.inter_bytes_per_s) == (20e9, 12.5e9)
    assert cluster.intra_latency_s == 5.7e-6  # PCIe's, whatever its speed
    assert defaults == {}


def test_links_that_are_not_used_are_not_mentioned():
    assert "inter-bandwidth" not in resolve_cluster(gpus=8)[1]
    assert resolve_cluster(gpus=1)[1].keys() == {"gpus-per-node", "gpu", "memory", "host-memory"}


def test_a_bandwidth_may_be_a_link():
    cluster, _ = resolve_cluster(gpus=16, intra_bandwidth="pcie4", inter_bandwidth="ethernet-100g")
    assert (cluster.intra_bytes_per_s, cluster.intra_latency_s) == (32e9, 5.7e-6)
    assert cluster.inter_bytes_per_s == 12.5e9


def test_file_over_defaults_and_flags_over_file(toml):
    path = toml('gpus = 32\ngpu = "a100"\ngpus-per-node = 4\nmemory = "60GiB"\ninter-bandwidth = "25GB/s"\n')
    cluster, defaults = resolve_cluster(file=path, gpu="h200", memory="100GiB")
    assert (cluster.num_gpus, cluster.gpus_per_node) == (32, 4)
    assert cluster.gpu.name == "h200-sxm-141gb"
    assert cluster.memory_bytes == 100 * GIB
    assert cluster.inter_bytes_per_s == 25e9
    assert defaults.keys() == {"host-memory", "intra-bandwidth"}


def test_every_flag_may_stand_in_the_file(toml):
    path = toml(
        'gpus = 2\ngpu = "l40s"\ngpus-per-node = 2\nmemory = "40GiB"\nhost-memory = "64GiB"\n'
        'intra-bandwidth = "pcie4"\ninter-bandwidth = "ethernet-25g"\n'
    )
    assert resolve_cluster(file=path)[1] == {}


def test_one_node_that_is_not_full():
    cluster, _ = resolve_cluster(gpus=4, gpus_per_node=8)
    assert (cluster.num_gpus, cluster.gpus_per_node) == (4, 8)
    assert resolve_cluster(gpus=3)[0].gpus_per_node == 3


def test_as_json():
    cluster, _ = resolve_cluster(gpus=8, memory="64GiB")
    assert json.loads(json.dumps(cluster.to_dict())) == {
        "num_gpus": 8,
        "gpu": "h100-sxm-80gb",
        "gpus_per_node": 8,
        "memory_bytes": 64 * GIB,
        "host_memory_bytes": TIB,
        "intra_bytes_per_s": 450e9,
        "inter_bytes_per_s": 50e9,
        "intra_latency_s": 3.4e-6,
        "inter_latency_s": 14e-6,
    }


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({}, "--gpus was not given", "--gpus 8"),
        ({"gpus": 0}, "--gpus 0: must be one or more", ""),
        ({"gpus": -2}, "--gpus -2: must be one or more", ""),
        ({"gpus": 8, "gpus_per_node": 0}, "--gpus-per-node 0: must be one or more", ""),
        ({"gpus": 12}, "--gpus 12: does not fill nodes of 8 GPUs", "use 8 or 16 GPUs, or --gpus-per-node 6"),
        ({"gpus": 7, "gpus_per_node": 2}, "--gpus 7: does not fill", "use 6 or 8 GPUs, or --gpus-per-node 1"),
        ({"gpus": 8, "gpu": "a10-sxm-80gb"}, "no GPU is called 'a10-sxm-80gb'", "did you mean a100-sxm-80gb?"),
        ({"gpus": 8, "memory": "lots"}, "--memory: 'lots' is not a size", "80GiB"),
        ({"gpus": 8, "memory": "0GiB"}, "--memory: '0GiB' must be more", ""),
        ({"gpus": 8, "host_memory": "1 potato"}, "--host-memory: '1 potato' is not a size", ""),
        ({"gpus": 8, "intra_bandwidth": "450"}, "--intra-bandwidth: '450' is not a bandwidth", "50GB/s"),
        ({"gpus": 8, "inter_bandwidth": "infiniband-ndf"}, "no link is called", "did you mean infiniband-ndr?"),
    ],
)
def test_wrong_flags_say_what_would_be_right(given, what, hint):
    with pytest.raises(UsageError) as caught:
        resolve_cluster(**given)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("gpus_per_node = 8\n", "there is no setting 'gpus_per_node'", "did you mean gpus-per-node?"),
        ('gpus = "8"\n', "gpus is '8', expected a whole number", "write gpus = 8"),
        ("gpus = true\n", "gpus is True, expected a whole number", ""),
        ("memory = 80\n", "memory is 80, expected text", 'write memory = "..."'),
        ('gpus = 8\nmemory = "x"\n', "cluster.toml: memory: 'x' is not a size", ""),
        ("gpus = 0\n", "cluster.toml: gpus 0: must be one or more", ""),
        ("gpus = 12\n", "cluster.toml: gpus 12: does not fill nodes of 8", "use 8 or 16 GPUs"),
        ("gpus = = 8\n", "is not TOML", ""),
        ("[cluster]\ngpus = 8\n", "there is no setting 'cluster'", "known: gpu, gpus"),
    ],
)
def test_wrong_files_say_where(toml, text, what, hint):
    with pytest.raises(UsageError) as caught:
        resolve_cluster(file=toml(text))
    assert what in caught.value.what
    assert "cluster.toml" in caught.value.what
    assert hint in caught.value.hint


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_cluster(file=tmp_path / "missing.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_cluster(file=tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_cluster(file=binary)

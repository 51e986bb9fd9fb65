import json
import os
from pathlib import Path

import pytest

from rlsim import catalogue
from rlsim.errors import CatalogueError, ConfigError
from rlsim.hardware import Cluster, load_cluster, load_gpu, node_types

LINK = {"name": "pcie4x16", "bytes_per_s": "31.5 GB/s", "latency_s": "1 us"}
INLINE = {"gpu": "a40", "nodes": 1, "gpus_per_node": 4, "intra": LINK, "host": LINK}


@pytest.mark.parametrize("name", catalogue.names("gpus"))
def test_every_gpu_loads_under_its_file_name(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert 40e9 < gpu.memory_bytes < 300e9
    # FLOPs per byte of memory traffic: 37 (H20) to 420 (L40S); a slip of a prefix would show.
    assert 30 < gpu.bf16_flop_per_s / gpu.memory_bytes_per_s < 500
    # Each halving of a number's bits doubles the dense rate, on Blackwell Ultra FP4 three times.
    for fewer, more in ((gpu.bf16_flop_per_s, gpu.fp8_flop_per_s), (gpu.fp8_flop_per_s, gpu.fp4_flop_per_s)):
        assert more is None or (fewer is not None and round(more / fewer, 2) in (2.0, 2.02, 3.0))


@pytest.mark.parametrize("kind", node_types())
def test_clusters_are_made_of_the_nodes_of_the_catalogue(kind: str) -> None:
    node = node_types()[kind]
    assert (node.name, node.nodes) == (f"{node.gpus_per_node}x{kind}", 1)
    assert node.domain_gpus == node.gpus_per_node == (4 if node.nodes_per_domain > 1 else 8)
    assert load_cluster(node.name) == node.model_copy(update={"inter": None})
    assert load_cluster(f"1x2x{kind.upper()}") == node.model_copy(
        update={"name": f"2x{kind}", "gpus_per_node": 2, "inter": None}
    )
    if node.inter is None:
        with pytest.raises(CatalogueError, match=f"link between nodes of {kind}, only of .*a100, .*with `inter`"):
            load_cluster(f"2x8x{kind}")
    else:
        several = load_cluster(f"128x4x{kind}")
        domain = 16 if node.nodes_per_domain > 1 else 1  # 128 nodes in eight racks of 18
        size = {"name": f"128x4x{kind}", "nodes": 128, "gpus_per_node": 4, "nodes_per_domain": domain}
        assert several == node.model_copy(update=size)
        assert Cluster.model_validate(several.model_dump()) == several


def test_figures_of_the_data_sheets() -> None:
    assert load_gpu("A40").bf16_flop_per_s == pytest.approx(149.7e12)
    assert load_cluster("8xh100").intra.bytes_per_s == pytest.approx(450e9)
    h800 = load_cluster("16x8xh800")
    assert h800.gpus == 128
    assert h800.intra.bytes_per_s == pytest.approx(200e9)
    assert h800.inter is not None
    assert h800.inter.bytes_per_s == pytest.approx(50e9)


def test_node_of() -> None:
    assert [load_cluster("2x8xh100").node_of(g) for g in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_a_cluster_spelled_out() -> None:
    cluster = load_cluster(INLINE)
    assert cluster.name == "custom"
    assert cluster.gpu == load_gpu("a40")
    own = {**load_gpu("a40").model_dump(), "name": "mine", "memory_bytes": "24 GB"}
    assert load_cluster({**INLINE, "gpu": own}).gpu.memory_bytes == 24e9
    assert Cluster.model_validate(cluster.model_dump()) == cluster


def test_unknown_names() -> None:
    with pytest.raises(CatalogueError, match=r"^unknown GPU 'h10'; did you mean .*'h100-sxm'"):
        load_gpu("h10")
    with pytest.raises(CatalogueError, match=r"^unknown cluster '9xh100'; did you mean '8xh100'"):
        load_cluster("9xh100")
    with pytest.raises(CatalogueError, match=r"^unknown cluster '2x8xh300'; did you mean .*'2x8xh200'"):
        load_cluster("2x8xh300")
    for name in ("h100", "0x8xh100", "x8xh100", "1x1x8xh100", "8xh100-sxm", "٢x8xh100"):
        with pytest.raises(CatalogueError, match=r"^unknown cluster .*; did you mean '(1x)?8xh100"):
            load_cluster(name)
    with pytest.raises(ConfigError, match=r"^20000x8xh100: 20,000 nodes of 8 GPUs: at most 65,536 GPUs"):
        load_cluster("20000x8xh100")
    with pytest.raises(ConfigError, match=r"^run.yaml: gpu: unknown GPU 'a4O'; did you mean 'a40'"):
        load_cluster({**INLINE, "gpu": "a4O"}, source="run.yaml")


def test_mistakes_in_a_mapping() -> None:
    with pytest.raises(ConfigError, match="needs `inter`"):
        load_cluster({**INLINE, "nodes": 2})
    with pytest.raises(ConfigError, match=r"^nods: unknown key; did you mean 'nodes'"):
        load_cluster({**INLINE, "nods": 2})
    with pytest.raises(ConfigError, match=r"^intra.bytes_per_s: unknown unit 'GBps'"):
        load_cluster({**INLINE, "intra": {**LINK, "bytes_per_s": "31.5 GBps"}})


def test_a_file_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = json.dumps({**INLINE, "nodes": 1})
    path.write_text(text, encoding="utf-8")
    first = load_cluster(str(path))
    assert load_cluster(str(path)) is first
    path.write_text(text.replace('"nodes": 1', '"nodes": 0'), encoding="utf-8")
    os.utime(path, ns=(1, 1))  # whatever the resolution of the clock
    with pytest.raises(ConfigError, match=r"mine\.yaml:1:.*nodes"):
        load_cluster(str(path))
    path.write_text(text, encoding="utf-8")
    assert load_cluster(str(path)) == first

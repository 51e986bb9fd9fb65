import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, cases

from rlsim.base import catalogue
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.errors import CapacityError, CatalogueError, ConfigError, RlsimError
from rlsim.experiment.run import run
from rlsim.frameworks.names import find_calibration
from rlsim.models.hardware import Cluster, MixedCluster, load_any_cluster, load_cluster, load_gpu, node_types
from rlsim.models.model import load_model

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


def test_a_cluster_spelled_out() -> None:
    cluster = load_cluster(INLINE)
    assert cluster.name == "custom"
    assert cluster.gpu == load_gpu("a40")
    own = {**load_gpu("a40").model_dump(), "name": "mine", "memory_bytes": "24 GB"}
    assert load_cluster({**INLINE, "gpu": own}).gpu.memory_bytes == 24e9
    assert Cluster.model_validate(cluster.model_dump()) == cluster


@cases("cost", "mistakes in clusters")
def test_mistakes_in_clusters(given: Any, message: str) -> None:
    whole = isinstance(given, str) or "groups" in given
    with pytest.raises((CatalogueError, ConfigError), match=message):
        load_any_cluster(given if whole else {**INLINE, **given}, source="run.yaml")


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


# Domains --------------------------------------------------------------------------------------------------------------

MODEL = load_model("llama-3.1-70b")
SPEC = {**TINY, "trace": {"fixed": 512, "cap": 1024}, "workflow": {"prompts": 8, "responses": 4, "steps": 1}}


def collectives(cluster: Cluster) -> Collectives:
    calibration = load_calibration("gb200-vllm")
    return Collectives(calibration.collectives, calibration.reference, cluster)


@cases("cost", "domains by name")
def test_domains_by_name(name: str, gpus: int, domain_gpus: int) -> None:
    cluster = load_cluster(name)
    assert (cluster.gpus, cluster.domain_gpus) == (gpus, domain_gpus)
    assert [cluster.domain_of(gpu) for gpu in (0, domain_gpus - 1)] == [0, 0]
    assert cluster.domain_of(gpus - 1) == (gpus - 1) // domain_gpus


def test_an_engines_own_all_reduce_stays_on_one_host() -> None:
    """It maps the memory of the other processes' GPUs, which NCCL alone does across hosts."""
    trays, host = load_cluster("2x4xgb200"), load_cluster("8xb200")
    size = 16384.0  # a decode step's
    of_nccl = load_calibration("gb200-vllm").collectives.nccl["all_reduce"][8]
    assert collectives(trays).time_s("all_reduce", size, 4) == collectives(host).time_s("all_reduce", size, 4)
    assert collectives(trays).time_s("all_reduce", size, 8) > collectives(host).time_s("all_reduce", size, 8)
    assert of_nccl.time_s[0] <= collectives(trays).time_s("all_reduce", size, 8) <= of_nccl.time_s[-1]


def test_tp_spans_the_nodes_of_a_domain_and_no_more() -> None:
    calibration = load_calibration("gb200-vllm")
    trays = load_cluster("2x4xgb200")
    steps = {tp: RooflineStep(MODEL, tp, trays, calibration) for tp in (4, 8)}
    four, eight = (steps[tp].prefill_s([Chunk(8192, 0)]) for tp in (4, 8))
    assert 0.5 * four < eight < four
    with pytest.raises(CapacityError, match="TP 16 exceeds the 8 GPUs of cluster '2x4xgb200'"):
        RooflineStep(MODEL, 16, trays, calibration)
    costs = RolloutCostModel(MODEL, load_cluster("16x4xgb200"), calibration)
    assert costs.feasible_tps(8192)[0][:4] == (1, 2, 4, 8)


def test_a_rollout_on_trays_of_a_rack() -> None:
    spec = SPEC | {"cluster": "4x4xgb200", "calibration": "gb200-vllm", "systems": [{"verl": {"tp": 8}}]}
    step, *_ = run(spec).steps.to_dict("records")
    assert step["gen_time_s"] > 0
    with pytest.raises(RlsimError, match="tp 32 does not divide the 16 GPUs"):
        run(spec | {"systems": [{"verl": {"tp": 32}}]})


def test_a_tp_group_lies_in_one_rack() -> None:
    names = ("generate", "old_log_prob", "ref_log_prob", "train")
    calls = {name: {"gpus": "64-79", "tp": 16} for name in names}
    spec = SPEC | {"calibration": "gb200-vllm", "systems": [{"name": "one", "use": [{"plan": {"calls": calls}}]}]}
    why = r"TP 16 group on GPUs 64-79, on NVLink domains 0 and 1 of 72 GPUs each: a TP group needs GPUs of one NVLink"
    with pytest.raises(RlsimError, match=why):
        run(spec | {"cluster": "36x4xgb200"})
    run(spec | {"cluster": "32x4xgb200"})  # racks of 64


def test_groups_of_several_kinds_have_whole_domains() -> None:
    mixed = load_any_cluster("18x4xgb200+2x4xgb300")
    assert isinstance(mixed, MixedCluster)
    assert (mixed.domain_gpus, mixed.domain_of(71), mixed.domain_of(72)) == (72, 0, 1)
    assert mixed.around(range(72, 80)).domain_of(79) == 1
    for name in ("17x4xgb200+18x4xgb300", "18x4xgb200+2x4xh100"):
        with pytest.raises(RlsimError, match="groups need as many nodes per NVLink domain, and whole domains in every"):
            load_any_cluster(name)


def test_a_gpu_without_a_calibration_says_so() -> None:
    assert load_cluster("2x8xmi300x").gpus == 16
    for name in ("mi300x-vllm", "mi300x-sglang"):
        with pytest.raises(RlsimError, match="no calibration of mi300x ships: no open table has its kernels"):
            load_calibration(name)
    with pytest.raises(RlsimError, match="no calibration of mi300x ships"):
        find_calibration("mi300x", "vllm")
    with pytest.raises(RlsimError, match=r"calibration: h100-sxm-vllm is for GPU 'h100-sxm', .*'mi300x'"):
        run(SPEC | {"cluster": "8xmi300x", "calibration": "h100-vllm", "systems": ["verl"]})

"""NVLink domains larger than a node, and GPUs whose calibration is another one's or missing."""

from typing import Any

import pytest

from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.groups import Groups
from rlsim.cost.layout import Layout
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.errors import CapacityError, RlsimError
from rlsim.experiment.run import run
from rlsim.hardware import Cluster, MixedCluster, load_any_cluster, load_cluster
from rlsim.init.names import find_calibration
from rlsim.models import load_model

MODEL = load_model("llama-3.1-70b")


def collectives(cluster: Cluster) -> Collectives:
    calibration = load_calibration("gb200-vllm")
    return Collectives(calibration.collectives, calibration.reference, cluster)


@pytest.mark.parametrize(
    ("name", "gpus", "domain_gpus"),
    [
        ("4xgb200", 4, 4),
        ("2x4xgb200", 8, 8),
        ("18x4xgb200", 72, 72),
        ("36x4xgb300", 144, 72),
        ("20x4xgb300", 80, 40),  # ten nodes in each of two racks
        ("32x4xgb200", 128, 64),
        ("19x4xgb200", 76, 72),  # does not divide by two: a full rack and one node
        ("4x2xgb200", 8, 8),
        ("64x8xh100", 512, 8),
    ],
)
def test_domains_by_name(name: str, gpus: int, domain_gpus: int) -> None:
    cluster = load_cluster(name)
    assert (cluster.gpus, cluster.domain_gpus) == (gpus, domain_gpus)
    assert [cluster.domain_of(gpu) for gpu in (0, domain_gpus - 1)] == [0, 0]
    assert cluster.domain_of(gpus - 1) == (gpus - 1) // domain_gpus


def test_only_messages_between_domains_take_the_slower_link() -> None:
    rack, two = load_cluster("18x4xgb200"), load_cluster("36x4xgb200")
    size = 64e6
    across_trays, inside = Layout(first_gpu=0, dp=2, tp=4), Layout(first_gpu=0, tp=4)
    for cluster in (rack, two):
        groups = Groups(collectives(cluster), cluster, across_trays)
        assert groups.spreads("shards") == [(1, 2, 2)]
    assert Groups(collectives(two), two, Layout(first_gpu=0, dp=2, tp=72)).spreads("shards") == [(2, 1, 1)]
    same = collectives(rack).time_s("all_gather", size, 4)
    assert Groups(collectives(rack), rack, inside).time_s("all_gather", size, "tp") == same
    # 4 GPUs by the ports of two racks: a ninth of NVLink's rate.
    assert collectives(two).time_s("all_gather", size, 4, 2) > 3 * same


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


def test_a_rollout_on_trays_of_a_rack(run_spec: dict[str, Any]) -> None:
    spec = run_spec | {"cluster": "4x4xgb200", "calibration": "gb200-vllm", "systems": [{"verl": {"tp": 8}}]}
    step, *_ = run(spec).steps.to_dict("records")
    assert step["gen_time_s"] > 0
    with pytest.raises(RlsimError, match="tp 32 does not divide the 16 GPUs"):
        run(spec | {"systems": [{"verl": {"tp": 32}}]})


@pytest.fixture
def run_spec() -> dict[str, Any]:
    return {
        "name": "rack",
        "model": "llama-3.1-8b",
        "trace": {"fixed": 512, "cap": 1024},
        "workflow": {"algorithm": "grpo", "prompts": 8, "responses": 4, "steps": 1},
    }


def test_a_tp_group_lies_in_one_rack(run_spec: dict[str, Any]) -> None:
    names = ("generate", "old_log_prob", "ref_log_prob", "train")
    calls = {name: {"gpus": "64-79", "tp": 16} for name in names}
    spec = run_spec | {"calibration": "gb200-vllm", "systems": [{"name": "one", "use": [{"plan": {"calls": calls}}]}]}
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


def test_a_gpu_without_a_calibration_says_so(run_spec: dict[str, Any]) -> None:
    assert load_cluster("2x8xmi300x").gpus == 16
    for name in ("mi300x-vllm", "mi300x-sglang"):
        with pytest.raises(RlsimError, match="no calibration of mi300x ships: no open table has its kernels"):
            load_calibration(name)
    with pytest.raises(RlsimError, match="no calibration of mi300x ships"):
        find_calibration("mi300x", "vllm")
    with pytest.raises(RlsimError, match=r"calibration: h100-sxm-vllm is for GPU 'h100-sxm', .*'mi300x'"):
        run(run_spec | {"cluster": "8xmi300x", "calibration": "h100-vllm", "systems": ["verl"]})


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_h20_has_its_own_peak_rates(engine: str) -> None:
    """Its calibration is H100's efficiencies: what is absolute in it must be H20's."""
    h20, h100 = load_calibration(f"h20-{engine}"), load_calibration(f"h100-{engine}")
    reference = h20.reference
    assert (reference.bf16_flop_per_s, reference.memory_bytes_per_s, reference.sm_count) == (148e12, 4.0e12, 78)
    assert h20.operators.decode_attention == h100.operators.decode_attention
    cluster, other = load_cluster("8xh20"), load_cluster("8xh100")
    model = load_model("qwen2.5-7b")
    mine, theirs = RooflineStep(model, 1, cluster, h20), RooflineStep(model, 1, other, h100)
    chunk = Chunk(8192, 0)
    # Decoding few sequences goes with the memory, a long prompt with the FLOPs.
    assert mine.decode(4).step_s(4 * 8192) < theirs.decode(4).step_s(4 * 8192)
    assert mine.prefill_s([chunk]) > 4 * theirs.prefill_s([chunk])

"""Prices of a rollout's switches and KV transfers, worked out by hand from made-up rates of round numbers."""

import pytest

from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.rollout import RolloutCostModel
from rlsim.hardware import load_cluster
from rlsim.models import load_model

LLAMA = load_model("llama-3.1-8b")
KV_BYTES = 131_072  # of a token: 2 · 32 layers · 8 KV heads · 128 · 2 bytes
WEIGHT_BYTES = 16_060_522_496  # 8,030,261,248 parameters in bf16


def costs(**rates: float | None) -> RolloutCostModel:
    """Llama on two nodes of eight H100s; 1 GB/s for KV, 2 GB/s for weights, 10 ms a graph, 0.3 s and 5 s otherwise."""
    calibration = load_calibration("h100-vllm")
    made_up = {
        "graph_capture_s": 0.01,
        "graph_batch_sizes": (1, 2, 4, 8, 16),
        "switch_control_s": 0.3,
        "group_create_s": 5.0,
        "reshard_bytes_per_s": 2e9,
        "migrate_bytes_per_s": 1e9,
    }
    runtime = calibration.runtime.model_copy(update=made_up | rates)
    return RolloutCostModel(LLAMA, load_cluster("2x8xh100"), calibration.model_copy(update={"runtime": runtime}))


def test_a_switch_by_hand() -> None:
    # TP2 to TP4 on a node of eight: two groups of four GPUs migrate side by side, so each moves half of the contexts,
    # of which a rank of TP2 holds half. Every rank lacks half of the weights.
    cost = costs().switch(8, 2, 4, [1000, 3000], 6, "migrate", first_use=False)
    assert cost.kv_s == pytest.approx(4000 / 2 * KV_BYTES / 2 / 1e9)
    assert cost.weights_s == pytest.approx(WEIGHT_BYTES / 2 / 2e9)
    # six requests on two replicas: three each, graphs of 1, 2 and 4
    assert cost.graph_s == pytest.approx(0.03)
    assert cost.control_s == pytest.approx(0.3)
    assert cost.total_s == pytest.approx(cost.kv_s + cost.weights_s + 0.33)


def test_a_switch_to_a_smaller_degree() -> None:
    # TP8 to TP2: one group of eight, a rank holds an eighth of all; seven requests on four replicas, two each
    cost = costs().switch(8, 8, 2, [8000], 7, "migrate", first_use=False)
    assert cost.kv_s == pytest.approx(8000 * KV_BYTES / 8 / 1e9)
    assert cost.weights_s == pytest.approx(WEIGHT_BYTES * 7 / 8 / 2e9)
    assert cost.graph_s == pytest.approx(0.02)


def test_kv_that_is_recomputed_is_not_moved() -> None:
    assert costs().switch(8, 2, 4, [1000, 3000], 6, "recompute", first_use=False).kv_s == 0.0


def test_communication_groups_are_made_at_their_first_use() -> None:
    assert costs().switch(8, 1, 8, [], 0, "recompute", first_use=True).control_s == pytest.approx(5.3)


def test_graphs_of_one_sequence_even_for_a_node_without_any() -> None:
    assert costs().switch(8, 1, 8, [], 0, "recompute", first_use=False).graph_s == pytest.approx(0.01)


def test_kv_transfer_inside_a_node_at_the_measured_rate() -> None:
    # Between TP2 and TP4 two ranks send, each half of the heads.
    link = load_cluster("2x8xh100").intra
    for from_tp, to_tp in ((2, 4), (4, 2)):
        time = costs().transfer_s([500, 1500], from_tp, to_tp, same_node=True)
        assert time == pytest.approx(link.latency_s + 2000 * KV_BYTES / 2 / 1e9)


def test_kv_transfer_across_nodes_takes_the_network() -> None:
    """As a send of NCCL: at the link's rate or less, and no faster than twice as many bytes."""
    link = load_cluster("2x8xh100").inter
    assert link is not None
    time = costs().transfer_s([500, 1500], 2, 4, same_node=False)
    calibration = load_calibration("h100-vllm")
    collectives = Collectives(calibration.collectives, calibration.reference, load_cluster("2x8xh100"))
    assert time == pytest.approx(collectives.time_s("send_recv", 2000 * KV_BYTES / 2, 2, nodes=2))
    assert time > link.latency_s + 2000 * KV_BYTES / 2 / link.bytes_per_s
    assert costs().transfer_s([], 2, 4, same_node=False) == 0.0


def test_kv_transfer_inside_a_node_without_a_measured_rate() -> None:
    """As NCCL's send and receive: in an all-gather between two GPUs each sends half of the tensor."""
    costs_ = costs(migrate_bytes_per_s=None)
    fit = load_calibration("h100-vllm").collectives.nccl["all_gather"][2]
    size, time = fit.message_bytes[-1], fit.time_s[-1]
    tokens = 8 * size / 2 / KV_BYTES  # of which a rank of TP8 sends half the message of the last measurement
    assert costs_.transfer_s([tokens], 8, 8, same_node=True) == pytest.approx(time)  # type: ignore[list-item]


def test_degrees_that_hold_a_response() -> None:
    feasible, infeasible = costs().feasible_tps(4096)
    assert feasible == (1, 2, 4, 8)
    assert not infeasible
    feasible, infeasible = costs().feasible_tps(1_100_000)
    # 1.1 million tokens are 144 GB of KV: TP1 has 77 GB in all, TP2 needs half of it, 72 GB, beside 8 GB of weights
    assert feasible == (4, 8)
    assert set(infeasible) == {1, 2}
    assert costs().feasible_tps(4096, degrees=[2]) == ((2,), {})

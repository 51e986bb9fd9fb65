"""Prices of a rollout's switches and KV transfers, worked out by hand from made-up rates of round numbers."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from conftest import Talk, tables

import rlsim
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.layout import PLAIN, Layout, ReplicaLayout
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.transfer import (
    NO_HOST_KV,
    RESTART,
    SwitchWay,
    captured_batch_sizes,
    kv_migrate_s,
    kv_send_s,
    reshard_s,
    rms_context_tokens,
    switch_peak_bytes,
)
from rlsim.cost.weight_sync import WeightSync
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

LLAMA = load_model("llama-3.1-8b")
KV_BYTES = 131_072  # of a token: 2 · 32 layers · 8 KV heads · 128 · 2 bytes
WEIGHT_BYTES = 16_060_522_496  # 8,030,261,248 parameters in bf16


def costs(limits: Mapping[str, int] = MappingProxyType({}), **rates: float | None) -> RolloutCostModel:
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
    made = calibration.model_copy(update={"runtime": runtime})
    return RolloutCostModel(LLAMA, load_cluster("2x8xh100"), made, **limits)


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
    # TP8 to TP2: one group of eight, a rank holds an eighth of all; seven requests on four replicas, two each
    cost = costs().switch(8, 8, 2, [8000], 7, "migrate", first_use=False)
    assert cost.kv_s == pytest.approx(8000 * KV_BYTES / 8 / 1e9)
    assert cost.weights_s == pytest.approx(WEIGHT_BYTES * 7 / 8 / 2e9)
    assert cost.graph_s == pytest.approx(0.02)
    assert costs().switch(8, 1, 8, [], 0, "recompute", first_use=True).control_s == pytest.approx(5.3)


@pytest.mark.parametrize(
    ("limits", "tail", "every"),
    [
        ({"largest_graph": 0}, 0, 0),
        ({"largest_graph": 2}, 2, 2),
        ({"max_sequences": 2}, 2, 2),
        ({"max_sequences": 5}, 3, 4),
    ],
)
def test_a_switch_captures_no_graph_that_the_engine_has_not(limits: dict[str, int], tail: int, every: int) -> None:
    """Three requests a replica; sizes are 1, 2, 4, 8 and 16: five sequences at most run in that of 8."""
    ways = (SwitchWay(), SwitchWay(graphs="all"))
    found = [costs(limits).switch(8, 2, 4, [1000, 3000], 6, "migrate", False, way).graph_s for way in ways]
    assert found == pytest.approx([0.01 * tail, 0.01 * every])


def test_a_switch_by_other_ways() -> None:
    """4 GB/s for weights that are loaded, 20 s to start an engine; the engine has five batch sizes."""
    made = costs(reload_bytes_per_s=4e9, restart_s=20.0)
    plain = made.switch(8, 2, 4, [1000, 3000], 6, "migrate", True)
    loaded = made.switch(8, 2, 4, [1000, 3000], 6, "migrate", True, SwitchWay("reload"))
    assert loaded == replace(plain, weights_s=WEIGHT_BYTES / 4e9, peak_bytes=loaded.peak_bytes)
    every = made.switch(8, 2, 4, [1000, 3000], 6, "migrate", True, SwitchWay(graphs="all"))
    assert every == replace(plain, graph_s=pytest.approx(0.05))
    whole = made.switch(8, 2, 4, [1000, 3000], 6, "migrate", True, SwitchWay("gather"))
    assert whole == replace(plain, peak_bytes=whole.peak_bytes)
    # half of the weights come to the other half; the KV of 2,000 tokens comes from two GPUs
    assert whole.peak_bytes == pytest.approx(8_029_995_008 + 1000 * KV_BYTES / 2, rel=1e-4)
    again = made.switch(8, 2, 4, [1000, 3000], 6, "recompute", True, RESTART)
    assert (again.weights_s, again.kv_s, again.control_s, again.peak_bytes) == (WEIGHT_BYTES / 4e9, 0.0, 20.0, 0.0)
    # a GPU of TP4 has a quarter of the weights, not half, but more buffers: what is left is larger KV
    assert plain.pool_bytes == made.memory(4).kv_bytes - made.memory(2).kv_bytes == pytest.approx(3.37e9, rel=0.01)


def test_kv_transfer_inside_a_node_with_and_without_a_measured_rate() -> None:
    # Between TP2 and TP4 two ranks send, each half of the heads.
    link = load_cluster("2x8xh100").intra
    for from_tp, to_tp in ((2, 4), (4, 2)):
        time = costs().transfer_s([500, 1500], from_tp, to_tp, same_node=True)
        assert time == pytest.approx(link.latency_s + 2000 * KV_BYTES / 2 / 1e9)
    # As NCCL's send and receive: in an all-gather between two GPUs each sends half of the tensor.
    costs_ = costs(migrate_bytes_per_s=None)
    fit = load_calibration("h100-vllm").collectives.nccl["all_gather"][2]
    size, time = fit.message_bytes[-1], fit.time_s[-1]
    tokens = 8 * size / 2 / KV_BYTES  # of which a rank of TP8 sends half the message of the last measurement
    assert costs_.transfer_s([tokens], 8, 8, same_node=True) == pytest.approx(time)  # type: ignore[list-item]


def test_kv_transfer_across_nodes_takes_the_network() -> None:
    """As a send of NCCL: at the link's rate or less, and no faster than twice as many bytes."""
    link = load_cluster("2x8xh100").inter
    time = costs().transfer_s([500, 1500], 2, 4, same_node=False)
    calibration = load_calibration("h100-vllm")
    collectives = Collectives(calibration.collectives, calibration.reference, load_cluster("2x8xh100"))
    assert time == pytest.approx(collectives.time_s("send_recv", 2000 * KV_BYTES / 2, 2, nodes=2))
    assert time > link.latency_s + 2000 * KV_BYTES / 2 / link.bytes_per_s
    assert costs().transfer_s([], 2, 4, same_node=False) == 0.0


def test_degrees_that_hold_a_response() -> None:
    feasible, infeasible = costs().feasible_tps(4096)
    assert feasible == (1, 2, 4, 8)
    assert not infeasible
    feasible, infeasible = costs().feasible_tps(1_100_000)
    # 1.1 million tokens are 144 GB of KV: TP1 has 77 GB in all, TP2 needs half of it, 72 GB, beside 8 GB of weights
    assert feasible == (4, 8)
    assert set(infeasible) == {1, 2}
    assert costs().feasible_tps(4096, degrees=[2]) == ((2,), {})


# The parts of a switch ------------------------------------------------------------------------------------------------

TAIL = [12 * 1024.0] * 9  # PAT's measured switch: nine sequences of 12K context


def per_byte() -> Talk:
    """A second per GB of a message."""
    return Talk(lambda op, size, gpus, nodes: size * 1e-9)


def test_weight_sync_gathers_every_layer_once() -> None:
    collectives = per_byte()
    cluster = load_cluster("8xh100")
    sync = WeightSync(model=LLAMA, cluster=cluster, collectives=collectives, engine="vllm", method="reshard")
    time = sync.time_s(Layout.of(0, TrainStrategy(dp=8, zero_stage=3)), Layout(first_gpu=0, dp=4, tp=2))
    assert {call[0::2] for call in collectives.asked} == {("all_gather", 8)}
    copy = 2 * 8.03e9 / cluster.gpu.memory_bytes_per_s
    # all weights but the final norm
    assert time == pytest.approx((LLAMA.weight_bytes - 8192) * 1e-9 + copy, rel=1e-4)


def test_reshard() -> None:
    assert reshard_s(LLAMA, per_byte(), 1, 8) == 0.0
    assert reshard_s(LLAMA, per_byte(), 4, 4) == 0.0
    assert reshard_s(LLAMA, per_byte(), 2, 8) == pytest.approx((LLAMA.weight_bytes - 8192) * 1e-9)
    assert reshard_s(LLAMA, per_byte(), 8, 2, bytes_per_s=1e9) == pytest.approx(LLAMA.weight_bytes * 7 / 8 / 1e9)


def test_kv_migration() -> None:
    context = sum(TAIL)
    assert kv_migrate_s(LLAMA, per_byte(), context, 2, 8, bytes_per_s=1e9) == pytest.approx(7.247757312)
    up, down = per_byte(), per_byte()
    assert kv_migrate_s(LLAMA, up, context, 2, 8) == pytest.approx(7.247757312)
    assert up.asked == {("all_gather", 7_247_757_312 / 32, 4, 1)}
    kv_migrate_s(LLAMA, down, context, 8, 2)
    assert down.asked == {("all_to_all", 7_247_757_312 / 4 / 32, 8, 1)}
    assert kv_migrate_s(LLAMA, per_byte(), context, 4, 4) == 0.0
    assert kv_migrate_s(LLAMA, per_byte(), 0, 2, 8) == 0.0


def test_kv_send_shares_a_port() -> None:
    a40, h100 = load_cluster("2x8xa40").inter, load_cluster("2x8xh100").inter
    # 1,000 tokens, 131,072,000 bytes: one 12.5 GB/s port for the node, or one 50 GB/s port per GPU
    for tp in (1, 2, 8):
        assert kv_send_s(LLAMA, a40, 1000, tp) == pytest.approx(131_072_000 / 12.5e9, rel=1e-3)
        assert kv_send_s(LLAMA, h100, 1000, tp) == pytest.approx(131_072_000 / tp / 50e9, rel=1e-2)
    assert kv_send_s(LLAMA, h100, 0, 1) == 0.0


def test_captured_batch_sizes() -> None:
    sizes = (1, 2, 4, 8, 12, 160)
    assert captured_batch_sizes(1, sizes) == (1,)
    assert captured_batch_sizes(8, sizes) == (1, 2, 4, 8)
    assert captured_batch_sizes(9, sizes) == (1, 2, 4, 8, 12)
    assert captured_batch_sizes(1000, sizes)[-1] == 160
    assert captured_batch_sizes(3, sizes=(1, 16, 32)) == (1, 16)
    assert rms_context_tokens([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))
    assert rms_context_tokens([]) == 0.0


def test_peak_memory_of_a_switch_against_pat() -> None:
    """Published: 2.5 GB layer-wise against 14 GB for a full move. Ours is 12% and 4% lower."""
    context = sum(TAIL)
    layerwise = switch_peak_bytes(LLAMA, context, 2, 8)
    full = switch_peak_bytes(LLAMA, context, 2, 8, SwitchWay("gather"))
    assert layerwise == pytest.approx(2.5e9, rel=0.15)
    assert full == pytest.approx(14e9, rel=0.05)
    # by hand: half a layer of weights, 3/4 of a layer of gathered KV, and the new KV slice
    assert layerwise == pytest.approx(218_112_000 + 0.75 * 7_247_757_312 / 32 + 7_247_757_312 / 4)
    assert switch_peak_bytes(LLAMA, context, 2, 8, SwitchWay("reload")) == pytest.approx(layerwise - 218_112_000)
    assert switch_peak_bytes(LLAMA, context, 2, 8, RESTART) == 0.0


# KV offloading --------------------------------------------------------------------------------------------------------

CLUSTER = load_cluster("8xh100")
#: Responses of 4,096 tokens to prompts of 512, 64 at a time on each GPU, which has KV cache for half of them.
SHORT_OF_KV: dict[str, Any] = tables("bases")["rollout costs short of kv"]


def test_host_memory_by_hand() -> None:
    """A page of 16 tokens takes 2 MiB at TP 1; copies of the GPU's own pages are among those there is room for."""
    model, calibration = load_model("llama-3.1-8b"), load_calibration("h100-vllm")
    costs = RolloutCostModel(model, CLUSTER, calibration, kv_offloading_bytes=200 * 2**30)
    for tp in (1, 4):
        host = costs.host_kv(tp)
        assert host.pages == 200 * 512 * tp - costs.capacity_pages(tp) > 0
        assert host.load_s(3) == pytest.approx(CLUSTER.host.latency_s + 3 * 2**21 / tp / CLUSTER.host.bytes_per_s)
        assert host.load_s(0) == 0.0
    # Latents are whole on every GPU: groups of attention hold eight times as many tokens as TP does.
    latent, groups = load_model("deepseek-v2-lite"), ReplicaLayout(ep=8, attention_dp=8)
    whole, each = (
        RolloutCostModel(latent, CLUSTER, calibration, kv_offloading_bytes=200 * 2**30, layout=one)
        for one in (PLAIN, groups)
    )
    pages = [one.host_kv(8).pages + one.capacity_pages(8) for one in (whole, each)]
    assert pages[1] == pytest.approx(8 * pages[0], rel=1e-3)
    assert RolloutCostModel(model, CLUSTER, calibration).host_kv(1) == NO_HOST_KV
    assert RolloutCostModel(model, CLUSTER, calibration, kv_offloading_bytes=2**30).host_kv(1).pages == 0


def test_preempted_responses_are_loaded_instead_of_prefilled() -> None:
    plain = rlsim.run(SHORT_OF_KV).steps.iloc[0]
    offloaded = rlsim.run(SHORT_OF_KV, overrides={"engine.kv_offloading_bytes": "128 GiB"}).steps.iloc[0]
    too_small = rlsim.run(SHORT_OF_KV, overrides={"engine.kv_offloading_bytes": "1 GiB"}).steps.iloc[0]
    assert plain.preemptions > 0
    assert plain.kv_loaded_tokens == too_small.kv_loaded_tokens == 0
    assert too_small.gen_time_s == plain.gen_time_s
    assert 0 < offloaded.kv_loaded_tokens < offloaded.prefix_hit_tokens
    assert offloaded.prefix_hit_tokens > plain.prefix_hit_tokens
    assert offloaded.gen_bound_s < offloaded.gen_time_s < plain.gen_time_s

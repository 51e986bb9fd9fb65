"""Weight syncs into a rollout engine: stages by hand, methods in an experiment, and published ones."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Talk, tables

import rlsim
from evidence.validate import weight_sync as published
from rlsim.cost.layout import Layout, ReplicaLayout
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.weight_sync import FITTED, SyncFit, WeightSync
from rlsim.errors import CalibrationError, ConfigError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

QWEN = load_model("qwen2.5-7b")  # 15,231,233,024 bytes, 339 tensors
MIXTURE = load_model("qwen3-30b-a3b")
#: Round numbers instead of the fitted ones.
FIT = SyncFit(
    network_share=0.5,
    stored_tensor_s=1e-3,
    named_tensor_s=1e-4,
    lone_tensor_s=1e-2,
    staging_bytes_per_s=1e9,
    sglang_s=2.0,
    sglang_bytes_per_s=1e10,
)
FSDP = Layout(first_gpu=0, dp=8, zero3=True)


def sync(**changes: Any) -> WeightSync:
    settings: dict[str, Any] = {"model": QWEN, "cluster": load_cluster("2x8xh100"), "engine": "vllm", "fit": FIT}
    settings["collectives"] = Talk(lambda op, size, gpus, nodes: size * 1e-11)
    return WeightSync(**settings | changes)


def test_under_hsdp_shards_are_larger_and_gathered_from_fewer() -> None:
    """Of 16 ranks 8 share the states: an all-gather inside a node, and shards twice as large from host memory."""
    talk = Talk()
    whole, halves = (Layout(first_gpu=0, dp=16, zero3=True, shard_gpus=n) for n in (None, 8))
    once, twice = (sync(collectives=talk, offload=True).parts(one, one).export_s for one in (whole, halves))
    assert {(gpus, nodes) for _, _, gpus, nodes in talk.asked} == {(16, 2), (8, 1)}
    assert twice - once == pytest.approx(4 * QWEN.parameters / 16 / FIT.staging_bytes_per_s)


def test_experts_that_are_apart_are_gathered_from_the_ranks_that_have_them() -> None:
    """Two of 16 ranks hold the same experts at EP 8."""
    talk = Talk()
    source = Layout.of(0, TrainStrategy(dp=16, ep=8, zero_stage=3))
    sync(model=MIXTURE, collectives=talk, method="reshard").parts(source, Layout(first_gpu=0, dp=16))
    (layer,) = MIXTURE.groups
    assert {gpus for _, size, gpus, _ in talk.asked if size == 2 * layer.expert_weights() / 8} == {2}
    assert {gpus for _, _, gpus, _ in talk.asked} == {16, 2, 8}, "of what is not experts, of shards, of all experts"


def test_an_engine_whose_replicas_share_attention_out_loads_what_its_gpus_hold() -> None:
    model, target = load_model("deepseek-v2-lite"), Layout(first_gpu=0, tp=32)
    layout = ReplicaLayout(ep=32, attention_dp=32)
    there = sync(model=model, cluster=load_cluster("4x8xh100"), engine=None, replica=layout)
    held_bytes = rollout_weight_bytes(model, 32, layout=layout)
    copied_s = there.parts(Layout(first_gpu=0, dp=32), target).transport_s
    assert copied_s == pytest.approx(2 * held_bytes / there.cluster.gpu.memory_bytes_per_s)
    with pytest.raises(ConfigError, match="does not divide its 16 heads"):
        sync(model=model, cluster=load_cluster("4x8xh100")).parts(Layout(first_gpu=0, dp=32), target)


def test_tensors_are_counted_by_their_names() -> None:
    assert QWEN.tensors() == 28 * (4 + 3 + 3 + 2) + 3
    assert load_model("qwen3-0.6b").tensors() == 28 * 11 + 2, "the head is the embedding"
    assert MIXTURE.tensors() == 48 * (4 + 4 + 1 + 3 * 128) + 3
    assert MIXTURE.tensors(stacked=True) == 48 * (4 + 4 + 1 + 2) + 3


def test_weights_by_way_of_host_memory_by_hand() -> None:
    relays = sync()
    host = relays.cluster.host
    share_s = host.latency_s + QWEN.weight_bytes / 8 / host.bytes_per_s
    assert relays.push_s(FSDP) == pytest.approx(relays.parts(FSDP, Layout(first_gpu=8, tp=4)).export_s + share_s)
    assert relays.spread_s(FSDP, Layout(first_gpu=4, tp=4)) == 0.0, "the same node"
    link = relays.cluster.inter
    once_s = QWEN.weight_bytes / (link.bytes_per_s / 2)
    assert relays.spread_s(FSDP, Layout(first_gpu=8, tp=4, dp=2)) == pytest.approx(link.latency_s + once_s)
    four = sync(cluster=load_cluster("5x8xh100"))
    assert four.spread_s(FSDP, Layout(first_gpu=8, dp=32)) == pytest.approx(4 * link.latency_s + once_s), "a chain"
    pulled = rollout_weight_bytes(QWEN, 4) / host.bytes_per_s + host.latency_s
    assert relays.pull_s(4) == pytest.approx(pulled + 339e-4)


def test_buckets_to_another_node_by_hand() -> None:
    parts = sync().parts(FSDP, Layout(first_gpu=8, tp=4, dp=2))
    gathered = QWEN.weight_bytes - 2 * QWEN.hidden_size  # all but the final norm
    assert parts.export_s == pytest.approx(gathered * 1e-11 + 339e-3, rel=1e-6)
    assert parts.transport_s == pytest.approx(15.231233024e9 / 25e9, rel=1e-4), "half of one GPU's 50 GB/s port"
    assert parts.load_s == pytest.approx(339e-4)
    assert parts.total_s == pytest.approx(parts.export_s + parts.transport_s + parts.load_s)


def test_on_the_same_gpus_nothing_crosses_a_link() -> None:
    cluster = load_cluster("2x8xh100")
    here = sync().parts(FSDP, Layout(first_gpu=4, tp=4))
    slice_bytes = 15.231233024e9 / 4
    assert here.transport_s == pytest.approx(2 * slice_bytes / cluster.gpu.memory_bytes_per_s, rel=0.01)
    beside = sync().parts(Layout(first_gpu=0, dp=4, zero3=True), Layout(first_gpu=4, dp=4))
    assert beside.transport_s == pytest.approx(0.15231233024), "a broadcast inside the node"
    target = Layout(first_gpu=8, dp=8)
    assert sync(engine=None).parts(FSDP, target).load_s == 0.0
    more = sync(engine="sglang").parts(FSDP, target).load_s - sync().parts(FSDP, target).load_s
    assert more == pytest.approx(2.0 + 1.5231233024)


def test_every_sender_has_its_port() -> None:
    target = Layout(first_gpu=8, dp=8)
    one, all_of_them = sync().parts(FSDP, target), sync(method="multi_sender").parts(FSDP, target)
    assert one.transport_s == pytest.approx(8 * all_of_them.transport_s, rel=1e-3)
    few = sync(method="multi_sender").parts(FSDP, Layout(first_gpu=8, dp=2))
    assert few.transport_s == pytest.approx(one.transport_s / 2, rel=1e-3), "two GPUs receive through two ports"
    shared = sync(method="multi_sender", cluster=load_cluster("2x8xa40"))
    assert shared.parts(FSDP, target).transport_s == pytest.approx(15.231233024 / 12.5 * 2, rel=1e-3)


def test_shards_come_from_host_memory_first() -> None:
    target = Layout(first_gpu=8, dp=8)
    more = sync(offload=True).parts(FSDP, target).export_s - sync().parts(FSDP, target).export_s
    assert more == pytest.approx(4 * QWEN.parameters / 8 / 1e9), "fp32, an eighth of them"
    megatron = Layout(first_gpu=0, tp=2, dp=4)
    more = sync(offload=True).parts(megatron, target).export_s - sync().parts(megatron, target).export_s
    assert more == pytest.approx(QWEN.weight_bytes / 2 / 63e9, rel=1e-3), "bf16, half of them, at once"
    here = Layout(first_gpu=0, tp=4, dp=2)
    both = [sync(method="reshard", offload=on).parts(megatron, here).export_s for on in (True, False)]
    assert both[0] - both[1] == pytest.approx(more), "as with any method"
    engine = sync(method="checkpoint_engine").parts(FSDP, target).export_s - sync().parts(FSDP, target).export_s
    assert engine == pytest.approx(2 * QWEN.weight_bytes / 8 / 63e9, rel=1e-3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="TP 3"):
        sync().time_s(FSDP, Layout(first_gpu=8, tp=3))
    with pytest.raises(CalibrationError, match="no inter-node link"):
        sync(cluster=load_cluster("8xh100")).time_s(FSDP, Layout(first_gpu=8, dp=8))


# Experiments ---------------------------------------------------------------------------------------------------------

EXPERIMENT: dict[str, Any] = tables("bases")["weight sync"]


def weights_s(method: str) -> dict[str, float]:
    found = rlsim.run(EXPERIMENT, overrides={"weight_sync": method}).calls
    found = found[(found["call"] == "weight_sync") & (found["step"] == 0)]
    return dict(zip(found["system"], found["weights_s"], strict=True))


def test_the_method_of_an_experiment_decides_in_every_placement() -> None:
    reshard, buckets, naive = (weights_s(method) for method in ("reshard", "bucketed", "naive"))
    assert reshard.get("planned", 0.0) == 0.0, "generation is laid out as training is"
    llama = load_model("llama-3.1-8b")
    for system in ("verl", "apart", "planned"):
        load_s = llama.tensors() * FITTED.named_tensor_s
        assert load_s < buckets[system] < 1.0
        assert naive[system] > buckets[system]
        assert buckets[system] > reshard.get(system, 0.0)


# Published syncs -----------------------------------------------------------------------------------------------------

KNOWN = published.settings()


def test_every_row_is_used_or_left_out_for_a_reason() -> None:
    assert not KNOWN.used.keys() & KNOWN.left_out.keys()
    assert len(KNOWN.used) + len(KNOWN.left_out) == 35
    assert len({setting.case for setting in KNOWN.used.values()}) == len(KNOWN.used)


def made_up() -> dict[int, float]:
    return {row: published.seconds(setting) for row, setting in KNOWN.used.items()}


def test_a_fit_finds_the_constants_that_made_its_rows() -> None:
    inputs = [row for row, setting in KNOWN.used.items() if setting.kind == "input"]
    found = published.fitted({row: 2 * time for row, time in made_up().items()}, inputs)
    assert found.lone_tensor_s > 1.9 * FITTED.lone_tensor_s
    same = published.fitted(made_up(), inputs)
    assert vars(same) == pytest.approx(vars(FITTED), rel=1e-3)


def test_a_row_that_alone_settles_a_constant_is_open_without_it() -> None:
    without = dict(published.left_out(made_up()))
    assert {row for row, time in without.items() if time is None} == {3, 4, 10, 12}
    assert without[8] == pytest.approx(made_up()[8], rel=1e-3)


def test_the_table_is_checked(tmp_path: Path) -> None:
    path = tmp_path / published.TABLE
    frame = pd.DataFrame({"id": list(KNOWN.used), "model": "m", "gpu": "g", "method": "x", "sync_s": 1.0})
    frame.to_csv(path, index=False)
    assert published.read_syncs(tmp_path)[3] == ("m, g, x", 1.0)
    for change, message in (
        (frame[1:], r"nothing is known of: id \[3\]"),
        (pd.concat([frame, frame[:1].assign(id=99)]), r"nothing is known of: id \[99\]"),
    ):
        change.to_csv(path, index=False)
        with pytest.raises(ConfigError, match=message):
            published.read_syncs(tmp_path)

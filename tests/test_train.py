import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsim.cost.flops import forward_flops
from rlsim.cost.memory import call_bytes, kept_bytes
from rlsim.cost.packing import deal, first_fit, pack
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost, TrainTime
from rlsim.cost.train_efficiency import TrainEfficiency
from rlsim.errors import ConfigError
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import load_model

LLAMA = load_model("llama-3.1-8b")
H100 = load_cluster("8xh100")
IDEAL = TrainEfficiency(flop=1.0, attention=1.0, overhead_tokens=0.0, memory=1.0)
REAL = TrainEfficiency(flop=0.5)
DATA = Path(__file__).resolve().parents[1] / "evidence" / "verl_steps.csv"


class Ring:
    """Ring collectives at a bus rate, without latency."""

    def __init__(self, bus_bytes_per_s: float = 360e9) -> None:
        self.rate = bus_bytes_per_s

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        moved = {"all_reduce": 2 * (gpus - 1) / gpus, "broadcast": 1.0, "send_recv": 1.0}.get(op, (gpus - 1) / gpus)
        return moved * message_bytes / self.rate


class Free:
    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        return 0.0


def cost(
    efficiency: TrainEfficiency = REAL,
    collectives: Ring | Free | None = None,
    cluster: Cluster = H100,
    **strategy: object,
) -> TrainCost:
    return TrainCost(LLAMA, cluster, collectives or Ring(), TrainStrategy(**strategy), efficiency)  # type: ignore[arg-type]


def uneven(count: int, seed: int = 0) -> np.ndarray:
    return np.round(np.minimum(np.random.default_rng(seed).lognormal(7, 1, count), 16384)) + 200


def test_forward_flops_by_hand() -> None:
    matrices = 32 * 218_103_808 + 128_256 * 4096
    # pairs of query and key: 3 for two tokens, 1 for one; two products of 2 · 4096 FLOPs a pair and layer
    assert forward_flops(LLAMA, [2, 1]) == 3 * 2 * matrices + 32 * 4 * 4096 * (3 + 1)
    assert forward_flops(LLAMA.as_critic(), [1]) == 2 * (32 * 218_103_808 + 4096) + 32 * 4 * 4096


def test_experts_count_only_where_tokens_go() -> None:
    moe = load_model("qwen3-30b-a3b")
    assert forward_flops(moe, [100]) == pytest.approx(2 * 100 * (moe.active_parameters - 151_936 * 2048), rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "linear", "attention"), [("none", 3, 3.5), ("selective", 3, 3.5), ("full", 4, 4.5)]
)
def test_compute_is_bounded_by_flops(recompute: str, linear: float, attention: float) -> None:
    lengths = np.full(16, 4096.0)
    tokens = lengths.sum()
    peak = H100.gpu.bf16_flop_per_s
    layers = 2 * 32 * 218_103_808 * tokens * linear
    head = 2 * 128_256 * 4096 * tokens * 3
    pairs = 32 * 4 * 4096 * (lengths * (lengths + 1) / 2).sum() * attention
    least = (layers + head + pairs) / peak
    time = cost(IDEAL, Free(), recompute=recompute, micro_batch_tokens=8192).train_s(lengths)
    assert least < time.compute_s < 1.35 * least  # the rest is memory-bound element-wise work
    assert time.communication_s == time.bubble_s == time.imbalance_s == 0.0


def test_parts_add_up() -> None:
    time = cost(dp=4, tp=2, zero_stage=1, offload=True).train_s(uneven(256), mini_batches=4)
    parts = (time.compute_s, time.communication_s, time.bubble_s, time.optimizer_s, time.offload_s, time.imbalance_s)
    assert sum(parts) == pytest.approx(time.total_s)
    assert min(parts[:2]) > 0
    assert TrainTime(1, 2, 3, 4, 5, 6) * 2 + TrainTime(1) == TrainTime(3, 4, 6, 8, 10, 12)


def test_epochs_and_batches_scale() -> None:
    lengths = np.full(64, 2048.0)
    one = cost(dp=8, zero_stage=3).train_s(lengths, mini_batches=2)
    assert cost(dp=8, zero_stage=3).train_s(lengths, mini_batches=2, epochs=3).total_s == pytest.approx(3 * one.total_s)
    twice = cost(dp=8, zero_stage=3).train_s(np.tile(lengths, 2), mini_batches=4)
    assert twice.total_s == pytest.approx(2 * one.total_s)


def test_twice_the_gpus_halve_the_compute() -> None:
    lengths = np.full(64, 2048.0)
    four, eight = (cost(dp=dp, zero_stage=3).train_s(lengths) for dp in (4, 8))
    assert eight.compute_s == pytest.approx(four.compute_s / 2)
    assert eight.imbalance_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "strategy", [{"dp": 8, "zero_stage": 3}, {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "offload": True}]
)
def test_hardware_twice_as_fast_halves_every_part(strategy: dict[str, object]) -> None:
    gpu = H100.gpu.model_copy(
        update={"bf16_flop_per_s": 2 * H100.gpu.bf16_flop_per_s, "memory_bytes_per_s": 2 * H100.gpu.memory_bytes_per_s}
    )
    host = H100.host.model_copy(update={"bytes_per_s": 2 * H100.host.bytes_per_s, "latency_s": H100.host.latency_s / 2})
    fast = H100.model_copy(update={"gpu": gpu, "host": host})
    slow_s = cost(**strategy).train_s(uneven(128), 2)
    fast_s = cost(collectives=Ring(720e9), cluster=fast, **strategy).train_s(uneven(128), 2)
    assert fast_s.total_s == pytest.approx(slow_s.total_s / 2)
    assert fast_s.communication_s == pytest.approx(slow_s.communication_s / 2)


def test_attention_makes_long_sequences_dearer() -> None:
    short = cost().train_s(np.full(32, 1024.0)).compute_s
    long = cost().train_s(np.full(2, 16384.0)).compute_s
    assert long > 1.2 * short


def test_inference_is_a_third_of_training_without_recomputation() -> None:
    lengths = np.full(32, 2048.0)
    forward = cost(IDEAL, Free()).forward_s(lengths).compute_s
    train = cost(IDEAL, Free(), recompute="none").train_s(lengths).compute_s
    assert 2.95 < train / forward < 3.1
    full = cost(IDEAL, Free(), recompute="full").train_s(lengths).compute_s
    assert 3.8 < full / forward < 4.1


def test_a_critic_saves_the_head() -> None:
    critic = TrainCost(LLAMA.as_critic(), H100, Ring(), TrainStrategy(dp=8, zero_stage=3), REAL)
    assert critic.forward_s(uneven(64)).total_s < cost(dp=8, zero_stage=3).forward_s(uneven(64)).total_s


def test_bubble_of_a_pipeline() -> None:
    lengths = np.full(64, 1024.0)
    time = cost(IDEAL, Free(), pp=4, micro_batch_sequences=8).train_s(lengths)
    assert time.bubble_s == pytest.approx(3 / 8 * time.compute_s)
    assert cost(IDEAL, Free(), pp=4, micro_batch_sequences=1).train_s(lengths).bubble_s < time.bubble_s


def test_slowest_rank_is_waited_for() -> None:
    lengths = np.array([16384.0, *([512.0] * 7)])
    time = cost(dp=8, zero_stage=3).train_s(lengths)
    assert time.imbalance_s > 4 * time.compute_s
    alone = cost(dp=1).train_s([16384.0])
    assert time.compute_s + time.imbalance_s == pytest.approx(alone.compute_s)


def test_zero3_hides_gathers_behind_compute() -> None:
    lengths = np.full(64, 4096.0)
    fast, slow = (cost(collectives=Ring(rate), dp=8, zero_stage=3).train_s(lengths) for rate in (360e9, 5e9))
    assert fast.communication_s < 0.05 * fast.compute_s
    assert slow.communication_s > slow.compute_s
    # With nothing hidden: per micro-batch two gathers in bf16 and one scatter in fp32 of all weights.
    most = 2 * 8.03e9 * (2 + 2 + 4) * 7 / 8 / 5e9
    assert slow.communication_s < most


def test_communication_of_tensor_parallelism_by_hand() -> None:
    lengths = np.full(8, 1024.0)
    time = cost(tp=8, recompute="none", micro_batch_tokens=8192).train_s(lengths)
    # two all-reduces forward and two backward a layer, of tokens · hidden · 2 bytes
    assert time.communication_s == pytest.approx(32 * 4 * 2 * 7 / 8 * 8192 * 4096 * 2 / 360e9)
    sequence = cost(tp=8, recompute="none", micro_batch_tokens=8192, sequence_parallel=True).train_s(lengths)
    assert sequence.communication_s == pytest.approx(time.communication_s)
    assert sequence.compute_s < time.compute_s


def test_gradient_reduction_by_stage() -> None:
    lengths = np.full(8, 1024.0)
    times = [cost(dp=8, zero_stage=stage).train_s(lengths) for stage in (0, 1, 2)]
    assert times[0].communication_s == pytest.approx(2 * 7 / 8 * 4 * LLAMA.parameters / 360e9)
    assert times[1].communication_s == pytest.approx(7 / 8 * (4 + 2) * LLAMA.parameters / 360e9)
    assert times[1].optimizer_s == pytest.approx(times[0].optimizer_s / 8)
    assert times[1] == times[2]


def test_gradients_in_bf16_are_half_as_many_bytes() -> None:
    """All reduced at once, or scattered and weights gathered, which stay in bf16; ZeRO-3 within and between groups."""

    def reduced_s(gradients: str, **strategy: object) -> float:
        return cost(gradients=gradients, **strategy).update_time().communication_s

    assert reduced_s("bf16", dp=8) == pytest.approx(reduced_s("fp32", dp=8) / 2)
    sharded = [reduced_s(kind, dp=8, zero_stage=1) for kind in ("fp32", "bf16")]
    assert sharded[1] / sharded[0] == pytest.approx((2 + 2) / (4 + 2))
    hsdp = [reduced_s(kind, dp=8, zero_stage=3, shard_gpus=4) for kind in ("fp32", "bf16")]
    assert hsdp[1] == pytest.approx(hsdp[0] / 2)
    memory = [call_bytes(LLAMA, TrainStrategy(gradients=kind), backward=True) for kind in ("fp32", "bf16")]  # type: ignore[arg-type]
    assert memory[1]["gradients"] == memory[0]["gradients"] / 2 == 2 * LLAMA.parameters
    with pytest.raises(ConfigError, match="gradients must be fp32 or bf16, got 'fp8'"):
        TrainStrategy(gradients="fp8")  # type: ignore[arg-type]


def test_offload_moves_the_shard_in_and_out() -> None:
    lengths = np.full(8, 1024.0)
    time = cost(dp=8, zero_stage=3, offload=True).train_s(lengths)
    assert time.offload_s == pytest.approx(2 * 14 * LLAMA.parameters / 8 / 63e9, rel=1e-3)
    again = cost(dp=8, zero_stage=3, offload=True).train_s(lengths, epochs=3)
    assert again.offload_s == time.offload_s, "once a call, however many epochs it has"
    assert cost(dp=8, zero_stage=3, offload=True).forward_s(lengths).offload_s == pytest.approx(
        time.offload_s / 7, rel=1e-3
    )


def test_context_parallelism_divides_the_work() -> None:
    one = cost(IDEAL, Free()).train_s([16384.0]).compute_s
    assert cost(IDEAL, Free(), cp=4).train_s([16384.0]).compute_s == pytest.approx(one / 4)


def test_nothing_to_train() -> None:
    assert cost(dp=8, zero_stage=3).forward_s([]).total_s == 0.0
    assert cost(dp=8, zero_stage=3).forward_s([10.0]).total_s > 0.0


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"^training strategy needs 16 GPUs; 8xh100 has 8"):
        cost(dp=16)
    with pytest.raises(ConfigError, match=r"TP 3 does not divide"):
        cost(tp=3)
    with pytest.raises(ConfigError, match=r"^training efficiency: flop must lie in \(0, 1\], got 1.5"):
        TrainEfficiency(flop=1.5)
    with pytest.raises(ValueError, match="at least 1"):
        cost().train_s([1.0], mini_batches=0)
    with pytest.raises(ValueError, match="flat sequence"):
        cost().train_s([-1.0])


@given(st.lists(st.integers(1, 30_000), max_size=120), st.integers(1, 16))
def test_dealing_keeps_everything_and_counts_equal(work: list[int], ranks: int) -> None:
    shares = deal(np.array(work, dtype=float), ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(work)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all((np.diff(share) > 0).all() for share in shares)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=80), st.integers(1, 12))
def test_packing_is_within_grahams_bound(work: list[int], bins: int) -> None:
    packed = pack([float(w) for w in work], bins)
    assert sorted(i for group in packed for i in group) == list(range(len(work)))
    # Graham 1969: no bin ends later than the mean load plus the largest item.
    assert max(sum(work[i] for i in group) for group in packed) <= sum(work) / bins + max(work)


def test_first_fit_by_hand() -> None:
    """Longest first, each into the first bin with room; one above the capacity is alone; splits make up a multiple."""
    sizes = np.array([30.0, 60.0, 110.0, 50.0, 40.0, 20.0])
    assert first_fit(sizes, 100.0, 1) == [[2], [1, 4], [3, 0, 5]]
    assert first_fit(sizes, 100.0, 2) == [[2], [1, 4], [3, 0], [5]]
    assert first_fit(sizes, 100.0, 4) == [[2], [1, 4], [3, 0], [5]]
    assert first_fit(sizes[:2], 100.0, 4) == [[1], [0]]  # one sequence each, and two ranks have none


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5))
def test_first_fit_keeps_every_item_and_the_capacity(sizes: list[int], ranks: int) -> None:
    bins = first_fit(np.array(sizes, dtype=float), 100.0, ranks)
    assert sorted(item for members in bins for item in members) == list(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in members) <= 100 for members in bins)
    assert len(bins) % ranks == 0 or len(bins) == len(sizes)
    assert len(bins) < 2 * sum(sizes) / 100 + ranks  # but for at most one, bins are half full on average


def test_dealing_balances_long_tails() -> None:
    work = uneven(1024)
    loads = [work[share].sum() for share in deal(work, 8)]
    assert max(loads) < 1.02 * np.mean(loads)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=60))
def test_more_tokens_never_take_less_time(lengths: list[int]) -> None:
    small = cost(dp=2, zero_stage=0).forward_s(lengths).total_s
    assert cost(dp=2, zero_stage=0).forward_s([2 * n for n in lengths]).total_s > small


def test_measured_verl_step() -> None:
    """Row 3: Qwen2-7B, FSDP on 8 A100/A800, at the fitted efficiency and bus rate (the part `training` of the fits)."""
    row = pd.read_csv(DATA).set_index("id").loc[3]
    draws = np.random.default_rng(0).lognormal(0, 0.7, int(row.responses_per_step))
    lengths = np.minimum(draws * row.mean_response / draws.mean(), row.max_response) + row.mean_prompt
    strategy = TrainStrategy(dp=8, zero_stage=3, micro_batch_sequences=16)
    train = TrainCost(
        load_model("qwen2.5-7b"), load_cluster("8xa100"), Ring(18e9), strategy, TrainEfficiency(flop=0.57)
    )
    assert train.train_s(lengths, 4).total_s == pytest.approx(row.update_actor_s, rel=0.2)
    assert train.forward_s(lengths).total_s == pytest.approx(row.old_logprob_s, rel=0.2)


# HSDP and log-probs ---------------------------------------------------------------------------------------------------


class Asked(Free):
    """Notes the collectives that are asked for."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, float, int, int]] = set()

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        self.seen.add((op, message_bytes, gpus, nodes))
        return 0.0


def test_hsdp_shards_inside_a_group_and_reduces_over_the_groups() -> None:
    two, asked = load_cluster("2x8xh100"), Asked()
    cost(collectives=asked, cluster=two, dp=16, zero_stage=3, shard_gpus=8).train_s(uneven(64))
    shard = LLAMA.parameters / 8 * 4
    assert {(gpus, nodes) for op, _, gpus, nodes in asked.seen if op != "all_reduce"} == {(8, 1)}
    ((_, size, gpus, nodes),) = [seen for seen in asked.seen if seen[0] == "all_reduce"]
    assert (size, gpus, nodes) == (pytest.approx(shard, rel=0.01), 2, 2)
    whole = Asked()
    cost(collectives=whole, cluster=two, dp=16, zero_stage=3).train_s(uneven(64))
    assert {(op, gpus) for op, _, gpus, _ in whole.seen} == {("all_gather", 16), ("reduce_scatter", 16)}


def test_hsdp_keeps_more_on_a_gpu() -> None:
    alone, shared = (kept_bytes(LLAMA, TrainStrategy(dp=16, zero_stage=3, shard_gpus=gpus)) for gpus in (4, None))
    assert alone == pytest.approx(4 * shared)
    with pytest.raises(ConfigError, match="shard_gpus 3 does not divide 16"):
        TrainStrategy(dp=16, zero_stage=3, shard_gpus=3)


def test_log_probs_have_micro_batches_of_their_own() -> None:
    lengths = np.full(32, 1024.0)
    own = cost(dp=2, zero_stage=3, micro_batch_tokens=2048, log_prob_micro_batch_tokens=8192)
    assert own.train_s(lengths) == cost(dp=2, zero_stage=3, micro_batch_tokens=2048).train_s(lengths)
    assert own.forward_s(lengths) == cost(dp=2, zero_stage=3, micro_batch_tokens=8192).forward_s(lengths)


# Micro-batches --------------------------------------------------------------------------------------------------------

LAYOUTS = ({"pp": 4}, {"pp": 2, "tp": 2, "dp": 2, "zero_stage": 1}, {"pp": 8}, {"dp": 8, "zero_stage": 3})


@given(
    st.lists(st.integers(1, 16384), min_size=1, max_size=24), st.sampled_from(LAYOUTS), st.integers(1, 3), st.booleans()
)
def test_more_micro_batches_than_sequences_save_nothing(
    lengths: list[int], layout: dict[str, object], more: int, train: bool
) -> None:
    def seconds(micro_batches: int) -> float:
        call = cost(micro_batches=micro_batches, **layout)
        return (call.train_s(lengths, mini) if train else call.forward_s(lengths)).total_s

    dp, mini = int(str(layout.get("dp", 1))), 2 if train else 1
    sequences = math.ceil(math.ceil(len(lengths) / dp) / mini)
    assert seconds(sequences * 10**more) == pytest.approx(seconds(sequences))


@given(st.lists(st.integers(64, 16384), min_size=1, max_size=24), st.integers(1, 64))  # no two fit into one budget
def test_a_token_budget_makes_no_more_micro_batches_than_sequences(lengths: list[int], budget: int) -> None:
    alone = cost(pp=8, micro_batches=len(lengths)).train_s(lengths)
    assert cost(pp=8, micro_batch_tokens=budget).train_s(lengths).total_s >= alone.total_s * (1 - 1e-9)
    part = cost(pp=8, micro_batch_tokens=budget).part_time(lengths, backward=True)
    assert part.total_s == pytest.approx(cost(pp=8, micro_batches=len(lengths)).train_s(lengths).total_s - update_s())


def update_s() -> float:
    return cost(pp=8).update_time().total_s


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("sizes", [[4096] * 8, [30000, *([100] * 15)], [100, 9000, 500, 16000, 2000]])
def test_a_pipeline_takes_what_its_stages_take_one_after_another(sizes: list[int], pp: int) -> None:
    """Each micro-batch enters a stage when the stage is free and the stage before it is done with it."""
    stage_s = [cost(IDEAL, Free(), pp=pp).part_time([size], backward=True).compute_s for size in sizes]
    free_at = [0.0] * pp
    for own_s in stage_s:
        done_at = 0.0
        for stage in range(pp):
            done_at = free_at[stage] = max(free_at[stage], done_at) + own_s
    time = cost(IDEAL, Free(), pp=pp, micro_batch_sequences=1).train_s(sizes)
    assert time.compute_s + time.bubble_s == pytest.approx(free_at[-1])

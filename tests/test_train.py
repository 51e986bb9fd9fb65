"""Training and inference calls: laws, micro-batches, and every part by hand on made-up GPUs of round numbers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Talk, cases
from hypothesis import given
from hypothesis import strategies as st

from rlsim.cost.flops import forward_flops, pair_flops
from rlsim.cost.memory import call_bytes, kept_bytes
from rlsim.cost.micro_batches import MicroBatches, MicroBatching, deal, first_fit, pack
from rlsim.cost.strategy import ContextParallel, TrainEfficiency, TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.transfer import host_copy_s
from rlsim.errors import ConfigError
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.model import load_model

LLAMA = load_model("llama-3.1-8b")
H100 = load_cluster("8xh100")
IDEAL = TrainEfficiency(flop=1.0, attention=1.0, overhead_tokens=0.0, memory=1.0)
REAL = TrainEfficiency(flop=0.5)


class Ring:
    """Ring collectives at a bus rate, without latency."""

    def __init__(self, bus_bytes_per_s: float = 360e9) -> None:
        self.rate = bus_bytes_per_s

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        moved = {"all_reduce": 2 * (gpus - 1) / gpus, "broadcast": 1.0, "send_recv": 1.0}.get(op, (gpus - 1) / gpus)
        return moved * message_bytes / self.rate


def cost(
    efficiency: TrainEfficiency = REAL,
    collectives: Ring | Talk | None = None,
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


def test_epochs_and_batches_scale() -> None:
    lengths = np.full(64, 2048.0)
    one = cost(dp=8, zero_stage=3).train_s(lengths, mini_batches=2)
    assert cost(dp=8, zero_stage=3).train_s(lengths, mini_batches=2, epochs=3).total_s == pytest.approx(3 * one.total_s)
    twice = cost(dp=8, zero_stage=3).train_s(np.tile(lengths, 2), mini_batches=4)
    assert twice.total_s == pytest.approx(2 * one.total_s)
    assert cost(dp=8, zero_stage=3).forward_s([]).total_s == 0.0 < cost(dp=8, zero_stage=3).forward_s([10.0]).total_s


def test_communication_of_tensor_parallelism_by_hand() -> None:
    lengths = np.full(8, 1024.0)
    time = cost(tp=8, recompute="none", micro_batch_tokens=8192).train_s(lengths)
    # two all-reduces forward and two backward a layer, of tokens · hidden · 2 bytes
    assert cost(tp=8, micro_batch_tokens=8192).forward_s(lengths).communication_s == time.communication_s / 2
    assert time.communication_s == pytest.approx(32 * 4 * 2 * 7 / 8 * 8192 * 4096 * 2 / 360e9)
    sequence = cost(tp=8, recompute="none", micro_batch_tokens=8192, sequence_parallel=True).train_s(lengths)
    assert sequence.communication_s == pytest.approx(time.communication_s)
    assert sequence.compute_s < time.compute_s


def test_gradients_in_bf16_are_half_as_many_bytes() -> None:
    """All reduced at once, or scattered and weights gathered, which stay in bf16; ZeRO-3 within and between groups."""

    def reduced_s(gradients: str, **strategy: object) -> float:
        return cost(gradients=gradients, **strategy).update_time().communication_s

    assert reduced_s("bf16", dp=8) == pytest.approx(reduced_s("fp32", dp=8) / 2)
    memory = [call_bytes(LLAMA, TrainStrategy(gradients=kind), backward=True) for kind in ("fp32", "bf16")]  # type: ignore[arg-type]
    assert memory[1]["gradients"] == memory[0]["gradients"] / 2 == 2 * LLAMA.parameters


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cost(dp=16), r"^training strategy needs 16 GPUs; 8xh100 has 8"),
        (lambda: cost(tp=3), r"TP 3 does not divide"),
        (lambda: TrainEfficiency(flop=1.5), r"^training efficiency: flop must lie in \(0, 1\], got 1.5"),
        (lambda: TrainStrategy(dp=16, zero_stage=3, shard_gpus=3), "shard_gpus 3 does not divide 16"),
        (lambda: cost().train_s([1.0], mini_batches=0), "at least 1"),
        (lambda: cost().train_s([-1.0]), "flat sequence"),
    ],
)
def test_mistakes(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make()


# HSDP and log-probs ---------------------------------------------------------------------------------------------------


def test_hsdp_shards_inside_a_group_and_reduces_over_the_groups() -> None:
    two, asked = load_cluster("2x8xh100"), Talk()
    cost(collectives=asked, cluster=two, dp=16, zero_stage=3, shard_gpus=8).train_s(uneven(64))
    shard = LLAMA.parameters / 8 * 4
    assert {(gpus, nodes) for op, _, gpus, nodes in asked.asked if op != "all_reduce"} == {(8, 1)}
    ((_, size, gpus, nodes),) = [seen for seen in asked.asked if seen[0] == "all_reduce"]
    assert (size, gpus, nodes) == (pytest.approx(shard, rel=0.01), 2, 2)
    whole = Talk()
    cost(collectives=whole, cluster=two, dp=16, zero_stage=3).train_s(uneven(64))
    assert {(op, gpus) for op, _, gpus, _ in whole.asked} == {("all_gather", 16), ("reduce_scatter", 16)}
    alone, shared = (kept_bytes(LLAMA, TrainStrategy(dp=16, zero_stage=3, shard_gpus=gpus)) for gpus in (4, None))
    assert alone == pytest.approx(4 * shared)


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


@pytest.mark.parametrize("pp", [2, 8])
@pytest.mark.parametrize("sizes", [[30000, *([100] * 15)], [100, 9000, 500, 16000, 2000]])
def test_a_pipeline_takes_what_its_stages_take_one_after_another(sizes: list[int], pp: int) -> None:
    """Each micro-batch enters a stage when the stage is free and the stage before it is done with it."""
    stage_s = [cost(IDEAL, Talk(), pp=pp).part_time([size], backward=True).compute_s for size in sizes]
    free_at = [0.0] * pp
    for own_s in stage_s:
        done_at = 0.0
        for stage in range(pp):
            done_at = free_at[stage] = max(free_at[stage], done_at) + own_s
    time = cost(IDEAL, Talk(), pp=pp, micro_batch_sequences=1).train_s(sizes)
    assert time.compute_s + time.bubble_s == pytest.approx(free_at[-1])


# Parts by hand --------------------------------------------------------------------------------------------------------

PARAMETERS = 8_030_261_248
MATRICES, LAYER = 218_103_808, 218_112_000  # weights of a layer: in matrices, and with 8,192 of norms
EMBEDDING = 128_256 * 4096  # and as many in the head
ELEMENTWISE = 2 * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14_336)  # bytes moved for a token in a layer
HEAD = 16 * 128_256  # bytes moved for a token's logits
#: Endless FLOPs and 10¹² bytes a second of memory; 10¹² FLOPs a second and endless bandwidth.
MEMORY_ONLY, FLOPS_ONLY = (
    H100.model_copy(update={"gpu": H100.gpu.model_copy(update={"bf16_flop_per_s": f, "memory_bytes_per_s": m})})
    for f, m in ((1e30, 1e12), (1e12, 1e30))
)


def test_optimizer_bytes_by_hand() -> None:
    """Of each parameter: clipping reads the gradient (4) and scales it (8); Adam reads gradient, master weight and two
    moments (16), writes master weight and moments (12) and the bf16 weight (2)."""
    traffic = 4 + 8 + 16 + 12 + 2
    alone = cost(IDEAL, Talk(), MEMORY_ONLY).update_time()
    assert alone.optimizer_s == pytest.approx(traffic * PARAMETERS / 1e12)
    assert cost(IDEAL, Talk(), MEMORY_ONLY, dp=8).update_time().optimizer_s == pytest.approx(alone.optimizer_s)
    sharded = cost(IDEAL, Talk(), MEMORY_ONLY, dp=4, tp=2, zero_stage=1).update_time()
    norms = 32 * 2 * 4096  # of the layers, on both GPUs of TP
    assert sharded.optimizer_s == pytest.approx(traffic * (PARAMETERS + norms) / 8 / 1e12)
    slow = TrainEfficiency(flop=1.0, memory=0.5)
    assert cost(slow, Talk(), MEMORY_ONLY).update_time().optimizer_s == pytest.approx(2 * alone.optimizer_s)


def test_elementwise_bytes_by_hand() -> None:
    """Of each token and layer, in bf16: norms 4 and additions 6 hidden widths, rotary embedding of q and k read and
    written, three MLP widths; of each token 16 bytes a logit. A layer's weights are read once."""
    hidden, rotary, mlp, head = 10 * 4096, 2 * (4096 + 1024), 3 * 14_336, HEAD
    whole = 32 * (2 * LAYER + 1000 * ELEMENTWISE) + 1000 * head
    forward = cost(IDEAL, Talk(), MEMORY_ONLY).forward_s([1000])
    assert forward.total_s == forward.compute_s == pytest.approx(whole / 1e12)
    norms = 2 * 4096
    own = (LAYER - norms) / 4 + norms
    tensor = 32 * (2 * own + 1000 * 2 * (hidden + (rotary + mlp) / 4)) + 1000 * head / 4
    assert cost(IDEAL, Talk(), MEMORY_ONLY, tp=4).forward_s([1000]).total_s == pytest.approx(tensor / 1e12)
    sequence = 32 * (2 * own + 1000 * 2 * (hidden + rotary + mlp) / 4) + 1000 * head / 4
    cut = cost(IDEAL, Talk(), MEMORY_ONLY, tp=4, sequence_parallel=True)
    assert cut.forward_s([1000]).total_s == pytest.approx(sequence / 1e12)


@pytest.mark.parametrize(("recompute", "linear", "elementwise"), [("none", 3, 3), ("selective", 3, 4), ("full", 4, 4)])
def test_passes_of_training_by_hand(recompute: str, linear: int, elementwise: int) -> None:
    """Forward once, backward twice, what is recomputed once more; the head's logits are never recomputed, but where it
    is fused with the loss."""
    weights, moved, head = 2 * LAYER, 1000 * ELEMENTWISE, 1000 * HEAD
    for logits, of_head in (("bf16", 3), ("fused", 4)):
        call = cost(IDEAL, Talk(), MEMORY_ONLY, recompute=recompute, logits=logits)
        expected = 32 * (linear * weights + elementwise * moved) + of_head * head
        assert call.part_time([1000], backward=True).total_s == pytest.approx(expected / 1e12)


def test_lora_by_hand() -> None:
    """Weights get no gradients: of their products one is left on the way back, of the head's too. Adapters, 1.04% of
    the weights, have all three, and are all that is reduced, stepped and copied but the weights."""
    adapters, tokens = 83_886_080 / PARAMETERS, 1000
    linear_s, head_s = 2 * 32 * MATRICES * tokens / 1e12, 2 * EMBEDDING * tokens / 1e12
    attention_s = cost(IDEAL, Talk(), FLOPS_ONLY).forward_s([tokens]).total_s - linear_s - head_s
    for recompute, again in (("none", 0), ("full", 1)):
        call = cost(IDEAL, Talk(), FLOPS_ONLY, recompute=recompute, lora_rank=32).part_time([tokens], backward=True)
        expected = (2 + again + (3 + again) * adapters) * linear_s + 2 * head_s + (3.5 + again) * attention_s
        assert call.total_s == pytest.approx(expected)
    # Bytes of kernels: k + 6 n numbers of bf16 forward and 5 k + 4 n backward, and a middle of 32, six times in all.
    into, out = 6 * 4096 + 14_336, 2 * 4096 + 2 * 1024 + 2 * 14_336 + 4096
    forth_s, back_s = (2 * 32 * tokens * n / 1e12 for n in (into + 6 * out + 448, 5 * into + 4 * out + 4 * 7 * 32))
    for recompute, again in (("none", 0), ("full", 1)):
        adapted, plain = (
            cost(IDEAL, Talk(), MEMORY_ONLY, recompute=recompute, lora_rank=rank).part_time([tokens], backward=True)
            for rank in (32, None)
        )
        weights_s = ((3 + again) * adapters - 1) * 32 * 2 * LAYER / 1e12  # once less, as they have no gradients
        more_s = (1 + again) * forth_s + back_s + weights_s - HEAD * tokens / 1e12
        assert adapted.total_s - plain.total_s == pytest.approx(more_s)
    talk = Talk(reduce_scatter=3.0, all_gather=5.0)
    whole, update = (cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=1, lora_rank=rank) for rank in (None, 32))
    assert update.update_time().optimizer_s == pytest.approx(adapters * whole.update_time().optimizer_s)
    sent = {round(asked[1]) for asked in talk.asked}
    assert sent == {4 * PARAMETERS, 2 * PARAMETERS, 4 * 83_886_080, 2 * 83_886_080}
    full, lora = (
        cost(IDEAL, Talk(), zero_stage=1, dp=2, offload=True, lora_rank=rank).copied_s(backward=True, out=True)
        for rank in (None, 32)
    )
    weights, states = 2 * PARAMETERS, 12 * PARAMETERS / 2
    assert lora / full == pytest.approx((weights + adapters * states) / (weights + states), rel=1e-3)


def test_communication_of_context_parallelism_by_hand() -> None:
    """Every layer gathers keys and values (2 · 1,024 wide, bf16) over four GPUs, where attention does not hide it."""
    gathered_s = 3 / 4 * 1000 * 2 * 1024 * 2 / 1e9
    call = cost(IDEAL, Ring(1e9), MEMORY_ONLY, cp=4)
    assert call.forward_s([1000]).communication_s == pytest.approx(32 * gathered_s)
    assert call.part_time([1000], backward=True).communication_s == pytest.approx(32 * 3 * gathered_s)  # and again
    slow = H100.model_copy(update={"gpu": H100.gpu.model_copy(update={"bf16_flop_per_s": 1e12})})
    attention_s = 4 * 4096 * 1000 * 1001 / 2 / 4 / 1e12
    assert 0 < attention_s < gathered_s
    partly = cost(IDEAL, Ring(1e9), slow, cp=4).forward_s([1000])
    assert partly.communication_s == pytest.approx(32 * (gathered_s - attention_s))
    assert cost(IDEAL, Ring(4e9), slow, cp=4).forward_s([1000]).communication_s == 0.0


@pytest.mark.parametrize(("cp", "heads"), [(4, 8), (16, 16)])
def test_communication_of_ulysses_by_hand(cp: int, heads: int) -> None:
    """All-to-alls of queries and outputs (4,096 wide), keys and values (8 heads of 128, for as many GPUs as there are),
    bf16, in each pass; attention hides none of it."""
    sent_s = (cp - 1) / cp * 1000 / cp * 2 * (2 * 4096 + 2 * heads * 128) / 1e9
    call = cost(IDEAL, Ring(1e9), load_cluster("2x8xh100"), cp=cp, context_parallel="ulysses")
    assert call.forward_s([1000]).communication_s == pytest.approx(32 * sent_s)
    assert call.part_time([1000], backward=True).communication_s == pytest.approx(32 * 3 * sent_s)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_layers_without_attention_exchange_nothing_over_cp(kind: ContextParallel) -> None:
    hybrid = load_model("nemotron-3-nano-30b-a3b")  # a block a layer: Mamba, experts or attention
    assert not all(layer.attention.blocks for layer in hybrid.groups)
    strategy = TrainStrategy(cp=2, context_parallel=kind)
    times = [TrainCost(hybrid, H100, Ring(bus), strategy, REAL).part_time([1000], backward=True) for bus in (1e9, 2e9)]
    slow, fast = (one.communication_s for one in times)
    assert 0 < fast < slow


def test_flops_by_hand() -> None:
    """Two per token and weight of matrices and head at half the peak; 4 · 4096 a layer for each pair of query and key
    at 0.62 of it, and for 200 pairs more a token."""
    tokens, pairs = 1000 + 500, 1000 * 1001 / 2 + 500 * 501 / 2
    products_s = 2 * (32 * MATRICES + EMBEDDING) * tokens / 0.5e12
    attention_s = 32 * 4 * 4096 * (pairs + 200 * tokens) / 0.62e12
    half = REAL
    assert cost(half, Talk(), FLOPS_ONLY).forward_s([1000, 500]).total_s == pytest.approx(products_s + attention_s)
    shared = cost(half, Talk(), FLOPS_ONLY, tp=2, cp=2).forward_s([1000, 500])
    assert shared.total_s == pytest.approx((products_s + attention_s) / 4)
    for recompute, linear, attention in (("none", 3, 3.5), ("full", 4, 4.5)):
        head_s = 2 * EMBEDDING * tokens / 0.5e12
        train = cost(half, Talk(), FLOPS_ONLY, recompute=recompute).part_time([1000, 500], backward=True)
        expected = linear * (products_s - head_s) + 3 * head_s + attention * attention_s
        assert train.total_s == pytest.approx(expected)


def test_flash_attention_2_is_as_fast_an_sm_on_later_gpus_as_on_hopper() -> None:
    for cluster, share in (("8xa100", 0.62), ("8xh100", 0.35), ("8xb200", 0.35 * 989.4 / 2250 * 148 / 132)):
        gpu = load_cluster(cluster).gpu
        assert REAL.attention_on(gpu, "flash_attention_2") == pytest.approx(share, rel=1e-3)
        assert REAL.attention_on(gpu, "cudnn") == REAL.attention_on(gpu, "flash_attention_3") == 0.62


def test_sends_between_stages_by_hand() -> None:
    """Both micro-batches over one boundary and the larger over the two others; gradients come back."""
    way_s = (3000 + 2 * 2000) * 4096 * 2 / 360e9
    call = cost(pp=4, micro_batch_sequences=1)
    assert call.forward_s([1000, 2000]).sends_s == pytest.approx(way_s)
    assert call.part_time([1000, 2000], backward=True).sends_s == pytest.approx(2 * way_s)
    halved = cost(IDEAL, Ring(), pp=4, tp=2, sequence_parallel=True, micro_batch_sequences=1)
    whole = cost(IDEAL, Ring(), pp=4, tp=2, micro_batch_sequences=1)
    saved_s = whole.forward_s([1000, 2000]).sends_s - halved.forward_s([1000, 2000]).sends_s
    assert saved_s == pytest.approx(way_s / 2)  # the layers' own communication is the same


def test_what_zero3_cannot_hide_by_hand() -> None:
    """A gather takes 5 s, a scatter 3 s, a layer's forward pass f, and the backward pass with recomputation 3 f. The
    first layer, embedding and head are gathered, and gradients of the last two scattered, in the open."""
    f = (2 * LAYER + 1000 * ELEMENTWISE) / 1e12
    talk = Talk(all_gather=5.0, reduce_scatter=3.0)
    call = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=3, micro_batch_sequences=1)
    copied = LAYER / (0.9 * call.cluster.gpu.memory_bytes_per_s)  # of a byte of each weight of a layer
    assert call.forward_s([1000] * 4).communication_s == pytest.approx(2 * (32 * (5 - f + 4 * copied) + 5 + 5))
    train = call.train_s([1000] * 4)
    late = 5 - f + 8 - 3 * f + 14 * copied  # read and written: bf16 weights twice; once gradients, as bf16 and fp32
    assert train.communication_s == pytest.approx(2 * (32 * late + 5 + 5 + 3))
    assert train.imbalance_s == pytest.approx(0.0, abs=1e-9)
    sizes = {("all_gather", 2 * LAYER), ("all_gather", 2 * 2 * EMBEDDING)}
    sizes |= {("reduce_scatter", 4 * LAYER), ("reduce_scatter", 4 * 2 * EMBEDDING)}
    assert {asked[:2] for asked in talk.asked} == sizes
    hidden = cost(IDEAL, Talk(all_gather=f / 2, reduce_scatter=f), MEMORY_ONLY, dp=2, zero_stage=3)
    assert hidden.forward_s([1000] * 2).communication_s == pytest.approx(f / 2 + f / 2 + 32 * 4 * copied)


def test_groups_of_hsdp_wait_for_each_other_at_the_end_of_a_mini_batch() -> None:
    """Two micro-batches, the longer one first in one group of two ranks and last in the other."""
    tokens = np.array([[2000.0, 1000], [1000, 1000], [1000, 2000], [1000, 1000]])
    micro = MicroBatches(tokens, dict.fromkeys(pair_flops(LLAMA), tokens))
    for gpus in (4, 2):
        call = cost(IDEAL, Talk(), MEMORY_ONLY, dp=4, zero_stage=3, shard_gpus=gpus)
        time = call._mini_batch(micro, call._passes(backward=False))
        long, short = ((32 * (2 * LAYER + n * ELEMENTWISE) + n * HEAD) / 1e12 for n in (2000, 1000))
        waited_s = 2 * long if gpus == 4 else long + short
        assert time.compute_s + time.imbalance_s == pytest.approx(waited_s)


def test_zero3_waits_for_the_slowest_rank_of_each_micro_batch() -> None:
    """Ranks of 1,000 and 2,000 tokens: gathers hide behind the longer one's layer, the other waits for it."""
    fast, slow = ((2 * LAYER + tokens * ELEMENTWISE) / 1e12 for tokens in (1000, 2000))
    talk = Talk(all_gather=5.0)
    call = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=3)
    time, copied = call.forward_s([1000, 2000]), 4 * LAYER / (0.9 * call.cluster.gpu.memory_bytes_per_s)
    assert time.communication_s == pytest.approx(32 * (5 - slow + copied) + 10)
    mean_s = 32 * (fast + slow) / 2 + 1500 * HEAD / 1e12
    assert time.compute_s == pytest.approx(mean_s)
    assert time.imbalance_s == pytest.approx(32 * slow + 2000 * HEAD / 1e12 - mean_s)


def test_a_pipelines_bubble_is_that_of_its_largest_micro_batch() -> None:
    """A rank of 100 and 300 tokens and one of 200 and 200: the mean of the bubbles, and a wait for the first rank."""
    call = cost(IDEAL, Talk(), MEMORY_ONLY, dp=2, pp=2, micro_batch_sequences=1)

    def stage_s(tokens: int) -> float:
        return (16 * (2 * LAYER + tokens * ELEMENTWISE) + tokens * HEAD) / 1e12

    time = call.forward_s([300, 250, 100, 150])  # dealt largest first, with equal counts: 300 and 100, 250 and 150
    sums = [stage_s(300) + stage_s(100), stage_s(250) + stage_s(150)]
    assert time.compute_s == pytest.approx(sum(sums) / 2)
    assert time.bubble_s == pytest.approx((stage_s(300) + stage_s(250)) / 2)
    assert time.total_s == pytest.approx(sums[0] + stage_s(300))


def test_states_come_in_from_host_memory_and_go_back_by_hand() -> None:
    """Training: bf16 weights, and fp32 master weights and two moments, 14 bytes a parameter, under FSDP the 12 of fp32
    weights and moments; inference: the weights."""
    call = cost(IDEAL, Talk(), MEMORY_ONLY, offload=True)
    assert call.train_s([100], epochs=3).offload_s == pytest.approx(2 * call.copied_s(backward=True, out=False)), (
        "once a call"
    )
    assert call.forward_s([100]).offload_s == pytest.approx(2 * call.copied_s(backward=False, out=False))
    # ZeRO-1 shards the optimizer's twelve bytes, ZeRO-3 all
    for zero_stage, weights, states in ((0, 2, 12), (1, 2, 12 / 4), (2, 2, 12 / 4), (3, 4 / 4, 8 / 4)):
        sharded = cost(IDEAL, Talk(), MEMORY_ONLY, offload=True, dp=4, zero_stage=zero_stage)
        for backward, held in ((True, weights + states), (False, weights)):
            copied_s = host_copy_s(held * PARAMETERS, H100.host)
            assert sharded.copied_s(backward=backward, out=False) == pytest.approx(copied_s)
    frozen = cost(IDEAL, Talk(), MEMORY_ONLY, offload=True, dp=4, zero_stage=3, weights="bf16")
    assert frozen.copied_s(backward=False, out=False) == pytest.approx(host_copy_s(2 / 4 * PARAMETERS, H100.host))
    kept = cost(IDEAL, Talk(), MEMORY_ONLY)
    assert (kept.copied_s(backward=True, out=False), kept.train_s([100]).offload_s) == (0.0, 0.0)


def test_gradients_are_reduced_by_hand() -> None:
    """Over two ranks: in fp32 by an all-reduce; under ZeRO-1 and 2 scattered, and the new bf16 weights gathered."""
    for zero_stage, expected in (
        (0, {("all_reduce", 4 * PARAMETERS)}),
        (1, {("reduce_scatter", 4 * PARAMETERS), ("all_gather", 2 * PARAMETERS)}),
        (2, {("reduce_scatter", 4 * PARAMETERS), ("all_gather", 2 * PARAMETERS)}),
        (3, set()),
    ):
        talk = Talk(all_reduce=7.0, reduce_scatter=3.0, all_gather=5.0)
        update = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=zero_stage).update_time()
        assert {asked[:2] for asked in talk.asked} == expected
        assert update.communication_s == {0: 7.0, 1: 8.0, 2: 8.0, 3: 0.0}[zero_stage]
    assert cost(IDEAL, Talk(all_reduce=7.0), MEMORY_ONLY).update_time().communication_s == 0.0


@pytest.mark.parametrize(("size", "last_with"), [(17_300, "two"), (17_700, "one")])
def test_micro_batches_are_balanced_by_their_flops(size: int, last_with: str) -> None:
    """Of sequences of 30,000, twice `size` and ten tokens the last goes to the micro-batch with fewer FLOPs.

    Two of 17,300 have 1% fewer than one of 30,000, two of 17,700 have more. The pipeline's bubble shows which it was.
    """

    def stage_s(*lengths: int) -> float:
        products = sum(2 * (16 * MATRICES + EMBEDDING) * n for n in lengths)
        return (products + sum(16 * 4 * 4096 * n * (n + 1) / 2 for n in lengths)) / 1e12

    assert (stage_s(size, size) < stage_s(30_000)) == (last_with == "two")
    largest_s = stage_s(30_000) if last_with == "two" else stage_s(size, size)  # neither has the last
    bubble_s = cost(IDEAL, Talk(), FLOPS_ONLY, pp=2, micro_batches=2).forward_s([30_000, size, size, 10]).bubble_s
    assert bubble_s == pytest.approx(largest_s, rel=1e-9)


def test_a_rank_without_sequences_says_nothing() -> None:
    """One sequence for two ranks of TP2: two all-reduces a layer of one of them, and none of the other."""
    talk = Ring(1e9)
    alone = cost(IDEAL, talk, MEMORY_ONLY, tp=2).forward_s([1000])
    beside = cost(IDEAL, talk, MEMORY_ONLY, dp=2, tp=2).forward_s([1000])
    assert alone.communication_s == pytest.approx(32 * 2 * 1000 * 4096 * 2 / 1e9)
    assert beside.communication_s == pytest.approx(alone.communication_s / 2)  # in the mean
    assert beside.total_s == pytest.approx(alone.total_s)


def test_packs_are_padded_where_there_are_stages() -> None:
    """70 + 20 and 60 tokens in packs of 100: one stage works on 150, several on twice 90, the 60 made longer."""
    lengths = [60.0, 20.0, 70.0]
    alone = MicroBatching(LLAMA, TrainStrategy(packing="first_fit", micro_batch_tokens=100))
    assert alone.of_part(lengths, backward=True).tokens.tolist() == [[90.0, 60.0]]
    stages = MicroBatching(LLAMA, TrainStrategy(packing="first_fit", micro_batch_tokens=100, pp=2))
    padded = stages.of_part(lengths, backward=True)
    assert padded.tokens.tolist() == [[90.0, 90.0]]
    (pairs,) = padded.pairs.values()
    assert pairs.tolist() == [[70 * 71 / 2 + 20 * 21 / 2, 90 * 91 / 2]]


def test_packs_of_a_mini_batch_are_dealt_in_turn() -> None:
    """Four sequences of two ranks: 90, 80, 30 and 15 make packs of 90, 80 + 15 and 30, and the 15 a fourth."""
    strategy = TrainStrategy(packing="first_fit", micro_batch_tokens=100, dp=2)
    first, second = MicroBatching(LLAMA, strategy).of_call([30, 90, 15, 80, *[100] * 4], 2, backward=True)
    assert first.tokens.tolist() == [[90.0, 30.0], [80.0, 15.0]]
    assert second.tokens.tolist() == [[100.0, 100.0]] * 2


def test_a_step_on_the_cpu_by_hand() -> None:
    """28 bytes a parameter at the node's rate, fp32 gradients out and weights back over the link; states stay there."""
    gpu, half, cpu = (
        cost(IDEAL, Talk(), MEMORY_ONLY, dp=2, zero_stage=1, cpu_optimizer=share) for share in (0, 0.5, 1)
    )
    step_s = 28 * PARAMETERS / 2e11  # two halves of one node
    assert cpu.update_time().optimizer_s == pytest.approx(step_s + 2 * host_copy_s(4 * PARAMETERS / 2, H100.host))
    on_both_s = (gpu.update_time().optimizer_s + cpu.update_time().optimizer_s) / 2
    assert half.update_time().optimizer_s == pytest.approx(on_both_s, rel=1e-4)  # but for the link's latency
    kept = {share: call_bytes(LLAMA, TrainStrategy(cpu_optimizer=share), backward=True) for share in (0.0, 0.25, 1.0)}
    assert kept[0.25]["optimizer states"] == pytest.approx(0.75 * kept[0.0]["optimizer states"])
    assert kept[1.0]["optimizer states"] == 0.0
    moved = cost(IDEAL, Talk(), MEMORY_ONLY, offload=True, cpu_optimizer=1.0)
    assert moved.copied_s(backward=True, out=False) == pytest.approx(host_copy_s(2 * PARAMETERS, H100.host))


def test_the_published_copy_of_a_precision_aware_optimizer_by_hand() -> None:
    """Qwen2.5-0.5B's 494 million parameters on one H100 (NeMo-RL issue 3976): 4.94 GB in 2.75 s."""
    model, efficiency = load_model("qwen2.5-0.5b"), TrainEfficiency(flop=1.0)
    strategy = TrainStrategy(zero_stage=1, offload=True, host_memory="pageable", optimizer_bytes=10)
    call = TrainCost(model, H100, Talk(), strategy, efficiency)  # type: ignore[arg-type]
    assert call_bytes(model, strategy, backward=True)["optimizer states"] == pytest.approx(4.94e9, rel=1e-3)
    states_s = call.copied_s(backward=True, out=True) - call.copied_s(backward=False, out=True)
    assert states_s == pytest.approx(2.75, rel=0.01)


def test_pageable_states_by_hand() -> None:
    """12 bytes of each parameter out at 1.8 GB/s and in at 16.1 GB/s; weights, pinned, over the link as ever, unless
    they are FSDP's."""
    pinned, pageable = (cost(IDEAL, Talk(), offload=True, host_memory=kind) for kind in ("pinned", "pageable"))
    states, weights_s = 12 * PARAMETERS, host_copy_s(2 * PARAMETERS, H100.host)
    assert pageable.copied_s(backward=True, out=True) == pytest.approx(weights_s + states / 1.8e9)
    assert pageable.copied_s(backward=True, out=False) == pytest.approx(weights_s + states / 16.1e9)
    assert pinned.copied_s(backward=True, out=False) == pinned.copied_s(backward=True, out=True)
    assert pinned.copied_s(backward=True, out=False) == pytest.approx(host_copy_s(14 * PARAMETERS, H100.host))
    assert (
        pageable.copied_s(backward=False, out=False)
        == pinned.copied_s(backward=False, out=False)
        == pytest.approx(weights_s)
    )
    fsdp = cost(IDEAL, Talk(), offload=True, host_memory="pageable", dp=2, zero_stage=3)
    assert fsdp.copied_s(backward=True, out=True) == pytest.approx((4 + 8) * PARAMETERS / 2 / 1.8e9)
    assert fsdp.copied_s(backward=False, out=False) == pytest.approx(4 * PARAMETERS / 2 / 16.1e9)
    weights = cost(IDEAL, Talk(), offload=True, host_memory="pageable_weights", dp=2, zero_stage=3)
    states_s = host_copy_s(8 * PARAMETERS / 2, H100.host)
    assert weights.copied_s(backward=True, out=True) == pytest.approx(4 * PARAMETERS / 2 / 1.8e9 + states_s)
    saver = cost(IDEAL, Talk(), offload=True, host_memory="saver", dp=2, zero_stage=1)
    assert saver.copied_s(backward=True, out=True) == pytest.approx((2 + 4 + 12 / 2) * PARAMETERS / 2.59e9)
    assert saver.copied_s(backward=True, out=False) == pytest.approx((2 + 4 + 12 / 2) * PARAMETERS / 5.71e9)
    assert saver.copied_s(backward=False, out=False) == pytest.approx(weights_s)
    train = pageable.train_s([1000])
    assert train.offload_s == pytest.approx(
        pageable.copied_s(backward=True, out=False) + pageable.copied_s(backward=True, out=True)
    )


def test_a_layer_with_experts_takes_no_less_than_its_launches() -> None:
    """Forward once, backward twice, recomputed once more; layers without experts are launched in no time."""
    model, lengths = load_model("qwen3-30b-a3b"), [16.0]
    waits = TrainEfficiency(flop=1.0, expert_launch_s=0.1)
    for recompute, passes in (("none", 3), ("full", 4)):
        call = TrainCost(model, H100, Talk(), TrainStrategy(recompute=recompute, ep=1), waits)  # type: ignore[arg-type]
        assert call.part_time(lengths, backward=True).total_s == pytest.approx(48 * passes * 0.1, rel=0.01)
        assert call.forward_s(lengths).total_s == pytest.approx(48 * 0.1, rel=0.01)
    busy = TrainCost(model, H100, Talk(), TrainStrategy(), TrainEfficiency(flop=0.5, expert_launch_s=1e-5))
    idle = TrainCost(model, H100, Talk(), TrainStrategy(), TrainEfficiency(flop=0.5))
    assert busy.forward_s([8192.0]) == idle.forward_s([8192.0])
    dense = cost(waits, Talk()).forward_s(lengths)
    assert dense == cost(TrainEfficiency(flop=1.0), Talk()).forward_s(lengths)


@cases("cost", "micro batches by number of sequences")
def test_micro_batches_by_number_of_sequences(
    given: dict[str, int], training: int | None, log_probs: int | None
) -> None:
    """So many sequences in their order, of whatever length; a budget or a number of a call's own goes before."""
    batching = MicroBatching(LLAMA, TrainStrategy(micro_batch_tokens=10_000, **given))  # type: ignore[arg-type]
    for backward, each in ((True, training), (False, log_probs)):
        (cut,) = batching.of_call([1000.0] * 16, 1, backward=backward)
        budget = 1000 if not backward and "log_prob_micro_batch_tokens" in given else 8000
        assert cut.tokens.max() == (1000 * each if each else budget), backward

"""Every part of a training or inference call worked out by hand, on made-up GPUs of round numbers."""

from __future__ import annotations

import numpy as np
import pytest
from test_train import H100, IDEAL, LLAMA, Free, Ring, cost

from rlsim.cost.micro_batches import MicroBatching
from rlsim.cost.strategy import AttentionKernel, TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.train_efficiency import TrainEfficiency
from rlsim.cost.transfer import host_copy_s
from rlsim.hardware import load_cluster
from rlsim.models import load_model

PARAMETERS = 8_030_261_248
MATRICES, LAYER = 218_103_808, 218_112_000  # weights of a layer: in matrices, and with 8,192 of norms
EMBEDDING = 128_256 * 4096  # and as many in the head
ELEMENTWISE = 2 * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14_336)  # bytes moved for a token in a layer
HEAD = 16 * 128_256  # bytes moved for a token's logits
#: Endless FLOPs and 10¹² bytes a second of memory; 10¹² FLOPs a second and endless bandwidth.
MEMORY_ONLY = H100.model_copy(
    update={"gpu": H100.gpu.model_copy(update={"bf16_flop_per_s": 1e30, "memory_bytes_per_s": 1e12})}
)
FLOPS_ONLY = H100.model_copy(
    update={"gpu": H100.gpu.model_copy(update={"bf16_flop_per_s": 1e12, "memory_bytes_per_s": 1e30})}
)


class Seconds:
    """Collectives that take so long whatever their size; 0 if not named. Keeps what was asked for."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.asked: set[tuple[str, float, int, int]] = set()

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        self.asked.add((op, message_bytes, gpus, nodes))
        return self.seconds.get(op, 0.0)


def test_optimizer_bytes_by_hand() -> None:
    """Of each parameter: clipping reads the gradient (4) and scales it (8); Adam reads gradient, master weight and two
    moments (16), writes master weight and moments (12) and the bf16 weight (2)."""
    traffic = 4 + 8 + 16 + 12 + 2
    alone = cost(IDEAL, Free(), MEMORY_ONLY).update_time()
    assert alone.optimizer_s == pytest.approx(traffic * PARAMETERS / 1e12)
    assert cost(IDEAL, Free(), MEMORY_ONLY, dp=8).update_time().optimizer_s == pytest.approx(alone.optimizer_s)
    sharded = cost(IDEAL, Free(), MEMORY_ONLY, dp=4, tp=2, zero_stage=1).update_time()
    norms = 32 * 2 * 4096  # of the layers, on both GPUs of TP
    assert sharded.optimizer_s == pytest.approx(traffic * (PARAMETERS + norms) / 8 / 1e12)
    slow = TrainEfficiency(flop=1.0, memory=0.5)
    assert cost(slow, Free(), MEMORY_ONLY).update_time().optimizer_s == pytest.approx(2 * alone.optimizer_s)


def test_elementwise_bytes_by_hand() -> None:
    """Of each token and layer, in bf16: norms 4 and additions 6 hidden widths, rotary embedding of q and k read and
    written, three MLP widths; of each token 16 bytes a logit. A layer's weights are read once."""
    hidden, rotary, mlp = 10 * 4096, 2 * (4096 + 1024), 3 * 14_336
    head = 16 * 128_256
    whole = 32 * (2 * LAYER + 1000 * 2 * (hidden + rotary + mlp)) + 1000 * head
    forward = cost(IDEAL, Free(), MEMORY_ONLY).forward_s([1000])
    assert forward.total_s == forward.compute_s == pytest.approx(whole / 1e12)
    norms = 2 * 4096
    own = (LAYER - norms) / 4 + norms
    tensor = 32 * (2 * own + 1000 * 2 * (hidden + (rotary + mlp) / 4)) + 1000 * head / 4
    assert cost(IDEAL, Free(), MEMORY_ONLY, tp=4).forward_s([1000]).total_s == pytest.approx(tensor / 1e12)
    sequence = 32 * (2 * own + 1000 * 2 * (hidden + rotary + mlp) / 4) + 1000 * head / 4
    cut = cost(IDEAL, Free(), MEMORY_ONLY, tp=4, sequence_parallel=True)
    assert cut.forward_s([1000]).total_s == pytest.approx(sequence / 1e12)


@pytest.mark.parametrize(("recompute", "linear", "elementwise"), [("none", 3, 3), ("selective", 3, 4), ("full", 4, 4)])
def test_passes_of_training_by_hand(recompute: str, linear: int, elementwise: int) -> None:
    """Forward once, backward twice, what is recomputed once more; the head's logits are never recomputed, but where it
    is fused with the loss."""
    weights, moved, head = 2 * LAYER, 1000 * 2 * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14_336), 1000 * 16 * 128_256
    for logits, of_head in (("bf16", 3), ("fused", 4)):
        call = cost(IDEAL, Free(), MEMORY_ONLY, recompute=recompute, logits=logits)
        expected = 32 * (linear * weights + elementwise * moved) + of_head * head
        assert call.part_time([1000], backward=True).total_s == pytest.approx(expected / 1e12)


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


def test_communication_of_tensor_parallelism_in_inference_by_hand() -> None:
    lengths = np.full(8, 1024.0)
    time = cost(tp=8, micro_batch_tokens=8192).forward_s(lengths)  # two all-reduces a layer
    assert time.communication_s == pytest.approx(32 * 2 * 2 * 7 / 8 * 8192 * 4096 * 2 / 360e9)


def test_communication_of_micro_batches_of_very_different_sizes() -> None:
    """Times of messages are interpolated between the smallest and the largest; a ring's are in proportion to bytes."""
    time = cost(tp=8, micro_batch_sequences=1).forward_s([100.0, 900.0, 8000.0, 3000.0])
    assert time.communication_s == pytest.approx(32 * 2 * 2 * 7 / 8 * 12_000 * 4096 * 2 / 360e9)


def test_flops_by_hand() -> None:
    """Two per token and weight of matrices and head at half the peak; 4 · 4096 a layer for each pair of query and key
    at 0.62 of it, and for 200 pairs more a token."""
    tokens, pairs = 1000 + 500, 1000 * 1001 / 2 + 500 * 501 / 2
    products_s = 2 * (32 * MATRICES + EMBEDDING) * tokens / 0.5e12
    attention_s = 32 * 4 * 4096 * (pairs + 200 * tokens) / 0.62e12
    half = TrainEfficiency(flop=0.5)
    assert cost(half, Free(), FLOPS_ONLY).forward_s([1000, 500]).total_s == pytest.approx(products_s + attention_s)
    shared = cost(half, Free(), FLOPS_ONLY, tp=2, cp=2).forward_s([1000, 500])
    assert shared.total_s == pytest.approx((products_s + attention_s) / 4)
    for recompute, linear, attention in (("none", 3, 3.5), ("full", 4, 4.5)):
        head_s = 2 * EMBEDDING * tokens / 0.5e12
        train = cost(half, Free(), FLOPS_ONLY, recompute=recompute).part_time([1000, 500], backward=True)
        expected = linear * (products_s - head_s) + 3 * head_s + attention * attention_s
        assert train.total_s == pytest.approx(expected)


def test_a_critics_head_has_one_number_a_token() -> None:
    critic = TrainCost(LLAMA.as_critic(), MEMORY_ONLY, Free(), TrainStrategy(), IDEAL)
    expected = 32 * (2 * LAYER + 1000 * ELEMENTWISE) + 1000 * 16
    assert critic.forward_s([1000]).total_s == pytest.approx(expected / 1e12)


B200_SHARE = 0.35 * 989.4 / 2250 * 148 / 132


@pytest.mark.parametrize(("cluster", "share"), [("8xa100", 0.62), ("8xh100", 0.35), ("8xb200", B200_SHARE)])
def test_flash_attention_2_is_as_fast_an_sm_on_later_gpus_as_on_hopper(cluster: str, share: float) -> None:
    gpu, half = load_cluster(cluster).gpu, TrainEfficiency(flop=0.5)
    assert half.attention_on(gpu, "flash_attention_2") == pytest.approx(share, rel=1e-3)
    assert half.attention_on(gpu, "cudnn") == half.attention_on(gpu, "flash_attention_3") == 0.62


def test_an_attention_kernel_of_half_the_speed_takes_twice_as_long() -> None:
    def seconds(attention: float, kernel: AttentionKernel = "cudnn") -> float:
        efficiency = TrainEfficiency(flop=1.0, attention=attention)
        strategy = TrainStrategy(attention=kernel)
        return TrainCost(LLAMA, H100, Free(), strategy, efficiency).forward_s(np.full(8, 65_536.0)).total_s

    assert seconds(0.7, "flash_attention_2") == pytest.approx(seconds(0.35), rel=1e-3)


def test_weights_are_read_once_a_micro_batch() -> None:
    for sequences, micro_batches in ((4, 1), (2, 2), (1, 4)):
        call = cost(IDEAL, Free(), MEMORY_ONLY, micro_batch_sequences=sequences)
        expected = 32 * (micro_batches * 2 * LAYER + 400 * ELEMENTWISE) + 400 * HEAD
        assert call.forward_s([100] * 4).total_s == pytest.approx(expected / 1e12)


def test_sends_between_stages_by_hand() -> None:
    """Both micro-batches over one boundary and the larger over the two others; gradients come back."""
    way_s = (3000 + 2 * 2000) * 4096 * 2 / 360e9
    call = cost(pp=4, micro_batch_sequences=1)
    assert call.forward_s([1000, 2000]).communication_s == pytest.approx(way_s)
    assert call.part_time([1000, 2000], backward=True).communication_s == pytest.approx(2 * way_s)
    halved = cost(IDEAL, Ring(), pp=4, tp=2, sequence_parallel=True, micro_batch_sequences=1)
    whole = cost(IDEAL, Ring(), pp=4, tp=2, micro_batch_sequences=1)
    saved_s = whole.forward_s([1000, 2000]).communication_s - halved.forward_s([1000, 2000]).communication_s
    assert saved_s == pytest.approx(way_s / 2)  # the layers' own communication is the same


def test_stages_on_other_nodes_send_over_the_network() -> None:
    for tp, dp, nodes in ((4, 2, 2), (4, 1, 1), (8, 1, 2)):
        asked = Seconds()
        TrainCost(LLAMA, load_cluster("2x8xh100"), asked, TrainStrategy(tp=tp, dp=dp, pp=2), IDEAL).forward_s([100])
        assert {(gpus, n) for op, _, gpus, n in asked.asked if op == "send_recv"} == {(2, nodes)}


def test_what_zero3_cannot_hide_by_hand() -> None:
    """A gather takes 5 s, a scatter 3 s, a layer's forward pass f, and the backward pass with recomputation 3 f. The
    first layer, embedding and head are gathered, and gradients of the last two scattered, in the open."""
    f = (2 * LAYER + 1000 * ELEMENTWISE) / 1e12
    talk = Seconds(all_gather=5.0, reduce_scatter=3.0)
    call = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=3, micro_batch_sequences=1)
    assert call.forward_s([1000] * 4).communication_s == pytest.approx(2 * (32 * (5 - f) + 5 + 5))
    train = call.train_s([1000] * 4)
    assert train.communication_s == pytest.approx(2 * (32 * (5 - f + 8 - 3 * f) + 5 + 5 + 3))
    assert train.imbalance_s == pytest.approx(0.0, abs=1e-9)
    sizes = {("all_gather", 2 * LAYER), ("all_gather", 2 * 2 * EMBEDDING)}
    sizes |= {("reduce_scatter", 4 * LAYER), ("reduce_scatter", 4 * 2 * EMBEDDING)}
    assert {asked[:2] for asked in talk.asked} == sizes
    hidden = cost(IDEAL, Seconds(all_gather=f / 2, reduce_scatter=f), MEMORY_ONLY, dp=2, zero_stage=3)
    assert hidden.forward_s([1000] * 2).communication_s == pytest.approx(f / 2 + f / 2)


def test_zero3_waits_for_the_slowest_rank_of_each_micro_batch() -> None:
    """Ranks of 1,000 and 2,000 tokens: gathers hide behind the longer one's layer, the other waits for it."""
    fast, slow = ((2 * LAYER + tokens * ELEMENTWISE) / 1e12 for tokens in (1000, 2000))
    talk = Seconds(all_gather=5.0)
    time = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=3).forward_s([1000, 2000])
    assert time.communication_s == pytest.approx(32 * (5 - slow) + 10)
    mean_s = 32 * (fast + slow) / 2 + 1500 * HEAD / 1e12
    assert time.compute_s == pytest.approx(mean_s)
    assert time.imbalance_s == pytest.approx(32 * slow + 2000 * HEAD / 1e12 - mean_s)


def test_a_pipelines_bubble_is_that_of_its_largest_micro_batch() -> None:
    """A rank of 100 and 300 tokens and one of 200 and 200: the mean of the bubbles, and a wait for the first rank."""
    call = cost(IDEAL, Free(), MEMORY_ONLY, dp=2, pp=2, micro_batch_sequences=1)

    def stage_s(tokens: int) -> float:
        return (16 * (2 * LAYER + tokens * ELEMENTWISE) + tokens * HEAD) / 1e12

    time = call.forward_s([300, 250, 100, 150])  # dealt largest first, with equal counts: 300 and 100, 250 and 150
    sums = [stage_s(300) + stage_s(100), stage_s(250) + stage_s(150)]
    assert time.compute_s == pytest.approx(sum(sums) / 2)
    assert time.bubble_s == pytest.approx((stage_s(300) + stage_s(250)) / 2)
    assert time.total_s == pytest.approx(sums[0] + stage_s(300))


def test_states_come_in_from_host_memory_and_go_back_by_hand() -> None:
    """Training: bf16 weights, and fp32 master weights and two moments, 14 bytes a parameter; inference: the weights."""
    call = cost(IDEAL, Free(), MEMORY_ONLY, offload=True)
    assert call.load_s(backward=True) == pytest.approx(host_copy_s(14 * PARAMETERS, H100.host))
    assert call.load_s(backward=False) == pytest.approx(host_copy_s(2 * PARAMETERS, H100.host))
    assert call.train_s([100]).offload_s == pytest.approx(2 * call.load_s(backward=True))
    assert call.forward_s([100]).offload_s == pytest.approx(2 * call.load_s(backward=False))
    # ZeRO-1 shards the optimizer's twelve bytes, ZeRO-3 all
    for zero_stage, held in ((0, 14), (1, 2 + 12 / 4), (2, 2 + 12 / 4), (3, 14 / 4)):
        sharded = cost(IDEAL, Free(), MEMORY_ONLY, offload=True, dp=4, zero_stage=zero_stage)
        assert sharded.load_s(backward=True) == pytest.approx(host_copy_s(held * PARAMETERS, H100.host))
    kept = cost(IDEAL, Free(), MEMORY_ONLY)
    assert (kept.load_s(backward=True), kept.train_s([100]).offload_s) == (0.0, 0.0)


def test_gradients_are_reduced_by_hand() -> None:
    """Over two ranks: in fp32 by an all-reduce; under ZeRO-1 and 2 scattered, and the new bf16 weights gathered."""
    for zero_stage, expected in (
        (0, {("all_reduce", 4 * PARAMETERS)}),
        (1, {("reduce_scatter", 4 * PARAMETERS), ("all_gather", 2 * PARAMETERS)}),
        (2, {("reduce_scatter", 4 * PARAMETERS), ("all_gather", 2 * PARAMETERS)}),
        (3, set()),
    ):
        talk = Seconds(all_reduce=7.0, reduce_scatter=3.0, all_gather=5.0)
        update = cost(IDEAL, talk, MEMORY_ONLY, dp=2, zero_stage=zero_stage).update_time()
        assert {asked[:2] for asked in talk.asked} == expected
        assert update.communication_s == {0: 7.0, 1: 8.0, 2: 8.0, 3: 0.0}[zero_stage]
    assert cost(IDEAL, Seconds(all_reduce=7.0), MEMORY_ONLY).update_time().communication_s == 0.0


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
    bubble_s = cost(IDEAL, Free(), FLOPS_ONLY, pp=2, micro_batches=2).forward_s([30_000, size, size, 10]).bubble_s
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


def test_pageable_states_by_hand() -> None:
    """12 bytes of each parameter out at 1.8 GB/s and in at 16.1 GB/s; weights, pinned, over the link as ever."""
    pinned, pageable = (cost(IDEAL, Free(), offload=True, host_memory=kind) for kind in ("pinned", "pageable"))
    states, weights_s = 12 * PARAMETERS, host_copy_s(2 * PARAMETERS, H100.host)
    assert pageable.unload_s(backward=True) == pytest.approx(weights_s + states / 1.8e9)
    assert pageable.load_s(backward=True) == pytest.approx(weights_s + states / 16.1e9)
    assert pinned.load_s(backward=True) == pinned.unload_s(backward=True)
    assert pinned.load_s(backward=True) == pytest.approx(host_copy_s(14 * PARAMETERS, H100.host))
    assert pageable.load_s(backward=False) == pinned.load_s(backward=False) == pytest.approx(weights_s)
    train = pageable.train_s([1000])
    assert train.offload_s == pytest.approx(pageable.load_s(backward=True) + pageable.unload_s(backward=True))


def test_a_layer_with_experts_takes_no_less_than_its_launches() -> None:
    """Forward once, backward twice, recomputed once more; layers without experts are launched in no time."""
    model, lengths = load_model("qwen3-30b-a3b"), [16.0]
    waits = TrainEfficiency(flop=1.0, expert_launch_s=0.1)
    for recompute, passes in (("none", 3), ("full", 4)):
        call = TrainCost(model, H100, Free(), TrainStrategy(recompute=recompute, ep=1), waits)  # type: ignore[arg-type]
        assert call.part_time(lengths, backward=True).total_s == pytest.approx(48 * passes * 0.1, rel=0.01)
        assert call.forward_s(lengths).total_s == pytest.approx(48 * 0.1, rel=0.01)
    busy = TrainCost(model, H100, Free(), TrainStrategy(), TrainEfficiency(flop=0.5, expert_launch_s=1e-5))
    idle = TrainCost(model, H100, Free(), TrainStrategy(), TrainEfficiency(flop=0.5))
    assert busy.forward_s([8192.0]) == idle.forward_s([8192.0])
    dense = cost(waits, Free()).forward_s(lengths)
    assert dense == cost(TrainEfficiency(flop=1.0), Free()).forward_s(lengths)


@pytest.mark.parametrize(
    ("given", "training", "log_probs"),
    [
        ({"micro_batch_sequences": 4}, 4, 4),
        ({"micro_batch_sequences": 4, "log_prob_micro_batch_sequences": 8}, 4, 8),
        ({"micro_batch_sequences": 4, "log_prob_micro_batch_tokens": 1000}, 4, None),
        ({"log_prob_micro_batch_sequences": 8}, None, 8),
        ({"micro_batch_sequences": 4, "micro_batches": 2}, None, None),
    ],
)
def test_micro_batches_by_number_of_sequences(
    given: dict[str, int], training: int | None, log_probs: int | None
) -> None:
    """So many sequences in their order, of whatever length; a budget or a number of a call's own goes before."""
    batching = MicroBatching(LLAMA, TrainStrategy(micro_batch_tokens=10_000, **given))  # type: ignore[arg-type]
    for backward, each in ((True, training), (False, log_probs)):
        (cut,) = batching.of_call([1000.0] * 16, 1, backward=backward)
        budget = 1000 if not backward and "log_prob_micro_batch_tokens" in given else 8000
        assert cut.tokens.max() == (1000 * each if each else budget), backward

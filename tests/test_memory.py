from typing import Any

import pytest
from conftest import cases

from rlsim.cost.engine_memory import GIB, SAMPLING_BYTES, SORTED_SAMPLING_BYTES, engine_memory_of
from rlsim.cost.memory import (
    RESERVED_BYTES,
    activation_bytes_per_token,
    call_bytes,
    kept_bytes,
    kv_page_bytes,
    logits_bytes,
    rollout_activation_bytes,
    rollout_memory,
    rollout_weight_bytes,
    stage_bytes,
)
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.models.hardware import load_gpu
from rlsim.models.model import load_model
from rlsim.workflow.memory import MARGIN

LLAMA = load_model("llama-3.1-8b")
LAYER = LLAMA.layer
A40 = load_gpu("a40")


def test_rollout_weights_and_kv_pages_by_hand() -> None:
    assert rollout_weight_bytes(LLAMA, 1) == LLAMA.weight_bytes == 16_060_522_496
    matrices = 32 * 218_103_808 + 2 * 128_256 * 4096
    norms = 65 * 4096
    assert rollout_weight_bytes(LLAMA, 8) == 2 * (matrices / 8 + norms)
    assert kv_page_bytes(LLAMA, 1, 16) == 131_072 * 16
    assert kv_page_bytes(LLAMA, 8, 16) == 131_072 * 2
    # 2 KV heads on 8 GPUs: each holds one, so all eight together hold each head four times
    qwen = load_model("qwen2.5-3b")
    assert 8 * kv_page_bytes(qwen, 8, 1) == 4 * qwen.kv_bytes_per_token


def test_working_memory_of_an_iteration_by_hand() -> None:
    """A layer's residual, normed input and three MLP widths, or the hidden states and sampling, if these are more."""
    assert rollout_activation_bytes(LLAMA, 8, 8192, 128) == 8192 * (2 * 4096 + 3 * 14_336 / 8) * 2
    hidden = 8192 * 4096 * 2
    assert rollout_activation_bytes(LLAMA, 8, 8192, 1024) == 1024 * 128_256 * SAMPLING_BYTES + hidden
    assert rollout_activation_bytes(LLAMA, 1, 8192, 1024, 38.0) == 1024 * 128_256 * 38 + hidden
    assert rollout_activation_bytes(LLAMA.as_critic(), 1, 8192, 1024) == 8192 * (2 * 4096 + 3 * 14_336) * 2
    experts = load_model("qwen3-30b-a3b")  # eight experts of width 768 a token
    # residual, input and output; for each of its experts gate and up, or their output if that is wider; the product
    assert rollout_activation_bytes(experts, 1, 8192, 1) == 8192 * (3 * 2048 + 8 * (2048 + 768)) * 2
    assert rollout_activation_bytes(experts, 4, 8192, 1) == 8192 * (3 * 2048 + 8 * (2048 + 768 / 4)) * 2
    wide = load_model("mixtral-8x7b")  # two of width 14,336, hidden 4,096
    assert rollout_activation_bytes(wide, 2, 8192, 1) == 8192 * (3 * 4096 + 2 * (14_336 + 7_168)) * 2


def test_a_replica_holds_a_page_at_least() -> None:
    free = rollout_memory(LLAMA, A40, 1)
    unused = 0.9 * A40.memory_bytes - free.weight_bytes - free.activation_bytes - free.reserved_bytes
    page = 131_072 * 16
    assert rollout_memory(LLAMA, A40, 1, resident_bytes=unused - page - 1).pages == 1
    with pytest.raises(CapacityError, match=r"KV cache of 1 tokens 0\.00 GB"):
        rollout_memory(LLAMA, A40, 1, resident_bytes=unused - page + 1)
    assert rollout_memory(LLAMA, A40, 1, resident_bytes=unused - 2 * page - 1, min_tokens=32).pages == 2
    with pytest.raises(CapacityError, match=r"KV cache of 33 tokens 0\.01 GB"):  # three pages
        rollout_memory(LLAMA, A40, 1, resident_bytes=unused - 2 * page - 1, min_tokens=33)


def test_each_engines_rule_by_hand() -> None:
    """vLLM's share is of the whole GPU, SGLang's of what is free before weights, TensorRT-LLM's of what is left."""
    h100, old = load_gpu("h100-sxm"), engine_memory_of("vllm", "0.14.0")
    total, weights = 79.19 * GIB, rollout_weight_bytes(LLAMA, 2)
    assert (old.sampling_bytes, old.graph_bytes) == (SORTED_SAMPLING_BYTES, 0.0)
    assert engine_memory_of("vllm", "0.24.0").sampling_bytes == SAMPLING_BYTES
    rooms = {
        "vllm": 0.8 * total - weights - 1024 * 128_256 * SORTED_SAMPLING_BYTES - 8192 * 4096 * 2 - (0.13 + 0.6) * GIB,
        "sglang": 0.8 * (total - (0.45 + 2.1) * GIB) - weights,
        "trtllm": 0.8 * (total - (0.45 + 2.1) * GIB - weights - 1024 * 128_256 * SAMPLING_BYTES - 8192 * 4096 * 2),
    }
    for engine, room in rooms.items():
        rule = engine_memory_of(engine, "0.14.0")
        memory = rollout_memory(LLAMA, h100, 2, memory_utilization=0.8, max_sequences=1024, rule=rule)
        assert memory.pages == int(room // (131_072 * 16 / 2)), engine
        working, beside = memory.activation_bytes, memory.reserved_bytes
        assert rule.kv_bytes(total, 0.8, weights, working, beside) == pytest.approx(room)
        assert rule.share_for(room, total, weights, working, beside) == pytest.approx(0.8)
        resident = 2.0 * GIB
        fewer = {"vllm": resident, "sglang": resident * (total - beside) / total, "trtllm": 0.8 * resident}
        kept = rule.kv_bytes(total, 0.8, weights, working, beside, resident)
        assert kept == pytest.approx(room - fewer[engine])
        assert rule.share_for(kept, total, weights, working, beside, resident) == pytest.approx(0.8)
    # Working memory has to fit into the rest of the GPU, and takes from KV where the share leaves none.
    rule, h100 = engine_memory_of("sglang"), load_gpu("h100-sxm")
    memory = rollout_memory(LLAMA, h100, 1, memory_utilization=1.0, rule=rule)
    left = h100.memory_bytes - memory.weight_bytes - memory.activation_bytes - memory.reserved_bytes
    assert memory.pages == int(left // memory.page_bytes)


def test_experts_in_mxfp4_are_padded() -> None:
    """vLLM 0.11 says 13.47 GiB of gpt-oss-20b and 64.38 of gpt-oss-120b: hidden 2,880 becomes 3,072."""
    for name, stated in (("gpt-oss-20b", 13.47), ("gpt-oss-120b", 64.38)):
        assert rollout_weight_bytes(load_model(name), 1) / GIB == pytest.approx(stated, rel=0.005)


def test_pats_kv_budget_is_plausible() -> None:
    """PAT keeps 128K KV tokens per A40 for LLaMA-3.1-8B: what 70 to 80% of its memory leaves at TP1."""
    tokens = [rollout_memory(LLAMA, A40, 1, memory_utilization=u).capacity_tokens for u in (0.7, 0.8)]
    assert tokens[0] < 128 * 1024 < tokens[1]


def test_stages_of_a_rollout_replica_by_hand() -> None:
    # the last of four stages: eight layers, head and final norm (the first has the embedding, 4096 weights fewer)
    assert rollout_weight_bytes(LLAMA, 1, 4) == 2 * (8 * 218_112_000 + 128_256 * 4096 + 4096)
    assert kv_page_bytes(LLAMA, 2, 16, 4) == 131_072 * 16 / 2 / 4
    whole, cut = rollout_memory(LLAMA, A40, 1), rollout_memory(LLAMA, A40, 1, pp=4)
    more = cut.reserved_bytes - whole.reserved_bytes  # communication of four GPUs
    free = whole.kv_bytes + whole.weight_bytes - cut.weight_bytes - more
    assert cut.capacity_tokens == pytest.approx(4 * free / 131_072, rel=1e-3)
    assert rollout_memory(LLAMA, A40, 1, pp=1) == whole
    with pytest.raises(ConfigError, match="PP 33"):
        rollout_memory(LLAMA, A40, 1, pp=33)
    with pytest.raises(CapacityError, match=r"at TP 1, PP 2"):
        rollout_memory(LLAMA, A40, 1, pp=2, resident_bytes=40e9)


def test_inference_by_hand() -> None:
    memory = call_bytes(LLAMA, TrainStrategy(tp=2, pp=2, dp=2), 8192, backward=False)
    norms = 2 * 4096  # of a layer, on both GPUs of TP
    assert memory["parameters"] == 2 * (16 * (218_112_000 + norms) + 128_256 * 4096 + 4096) / 2
    assert list(memory) == ["parameters", "gathered layers", "activations", "logits"]
    assert memory["gathered layers"] == 0.0
    assert (memory["activations"], memory["logits"]) == (0.0, 4 * 8192 * 128_256 / 2)  # most is held at the head
    critic = call_bytes(LLAMA.as_critic(), TrainStrategy(tp=2, pp=2, dp=2), 8192, backward=False)
    layer = 8192 * 2 * (4 * 4096 + (2 * 4096 + 2 * 1024 + 3 * 14336) / 2)
    assert (critic["activations"], critic["logits"]) == (layer, 0.0)
    for weights, each in (("fp32", 4), ("bf16", 2)):  # an actor's shards come in as training keeps them
        sharded = call_bytes(LLAMA, TrainStrategy(dp=8, zero_stage=3, weights=weights), backward=False)
        assert sharded["parameters"] == each * LLAMA.parameters / 8
    assert sharded["gathered layers"] == 4 * 128_256 * 4096  # the embedding, and as much ahead


def test_rollout_that_does_not_fit() -> None:
    big = load_model("llama-3-70b")
    why = (
        r"^llama-3-70b rollout at TP 1 does not fit: weights 141.11 GB \+ .* > 42\.93 GB \(0\.9 of 47\.70 GB on a40\)$"
    )
    with pytest.raises(CapacityError, match=why):  # 44.42 GiB
        rollout_memory(big, A40, 1)
    assert rollout_memory(big, A40, 8).pages > 0
    with pytest.raises(CapacityError, match=r"KV cache of 10000000 tokens 1310\.72 GB"):
        rollout_memory(LLAMA, A40, 1, min_tokens=10_000_000)
    with pytest.raises(ConfigError, match="TP 3 does not divide"):
        rollout_memory(LLAMA, A40, 3)


def test_activations_by_hand() -> None:
    width = 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336
    gradients = 2 * (4096 + 3 * 14336)  # of the MLP's output; of its product, gate and up
    assert activation_bytes_per_token(LAYER, TrainStrategy(recompute="none")) == (2 * width, 2 * width, gradients)
    assert activation_bytes_per_token(LAYER, TrainStrategy(recompute="full")) == (8192, 2 * width, gradients)
    memory = call_bytes(LLAMA, TrainStrategy(recompute="full"), 1000, backward=True)
    assert (memory["activations"], memory["logits"]) == (1000 * 32 * 8192, 1000 * 128_256 * 4)  # at the head
    eager = 2 * (4 + 2) * 4096 + 2 * 14_336  # both norms' inputs in fp32, what they scale, the activated gate
    assert activation_bytes_per_token(LAYER, TrainStrategy(zero_stage=3))[1] == 2 * width + eager
    critic = call_bytes(LLAMA.as_critic(), TrainStrategy(recompute="full"), 1000, backward=True)
    inside = 1000 * (32 * 8192 + 2 * width + gradients)  # of a layer
    assert (critic["activations"], critic["logits"]) == (inside, 0.0)


def test_what_training_holds_by_hand() -> None:
    """Weights in bf16, gradients in fp32, three fp32 optimizer states, of which FSDP's weights are one; it gathers the
    weights of the embedding, and as much ahead, and holds its gradient."""
    mixed, fsdp = ({"parameters": p, "gradients": 4, "optimizer states": s} for p, s in ((2, 12), (4, 8)))
    for stage, sharded in ((0, ()), (1, ("optimizer states",)), (2, ("optimizer states", "gradients")), (3, fsdp)):
        memory = call_bytes(LLAMA, TrainStrategy(dp=4, zero_stage=stage), backward=True)
        for name, each in (fsdp if stage == 3 else mixed).items():
            assert memory[name] == each * LLAMA.parameters / (4 if name in sharded else 1), (stage, name)
        assert memory["gathered layers"] == (2 + 2 + 4) * 128_256 * 4096 * (stage == 3)
        strategy = TrainStrategy(dp=4, zero_stage=stage)
        assert kept_bytes(LLAMA, strategy) == memory["parameters"] + memory["optimizer states"]
    reduced = call_bytes(LLAMA, TrainStrategy(dp=4, zero_stage=3, gradients="bf16"), backward=True)
    assert {part: reduced[part] * 4 / LLAMA.parameters for part in fsdp} == fsdp, "they are of the weights' type again"
    assert reduced["gathered layers"] == (2 + 2 + 2) * 128_256 * 4096
    step = call_bytes(LLAMA, TrainStrategy(dp=2, zero_stage=3), 1000, backward=True)
    assert step["the optimizer's step"] * 2 == 4 * LLAMA.parameters, "more than what a thousand tokens keep"
    halved = call_bytes(LLAMA, TrainStrategy(dp=4, tp=2, zero_stage=3), backward=True)
    assert halved["gathered layers"] == 8 * 128_256 * 4096 / 2


def test_under_lora_adapters_alone_have_gradients_and_states() -> None:
    """Of rank 32, as PEFT counts them: q and o 8,192 inputs and outputs, k and v 5,120, gate, up and down 18,432."""
    adapters = 32 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
    assert LLAMA.adapters(32) * LLAMA.parameters == pytest.approx(adapters) == pytest.approx(83_886_080)
    experts = load_model("qwen3-30b-a3b")
    each = 2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048 + (2048 + 128) + 128 * 3 * (2048 + 768)
    assert experts.adapters(8) * experts.parameters == pytest.approx(48 * 8 * each)
    for zero_stage, weight, states in ((1, 2, 12), (3, 4, 8)):
        memory = call_bytes(LLAMA, TrainStrategy(dp=4, zero_stage=zero_stage, lora_rank=32), backward=True)
        assert memory["parameters"] == pytest.approx(weight * (LLAMA.parameters + adapters) / (4 if weight == 4 else 1))
        assert memory["gradients"] == pytest.approx(4 * adapters / (4 if weight == 4 else 1))
        assert memory["optimizer states"] == pytest.approx(states * adapters / 4)
    assert memory["gathered layers"] == pytest.approx((2 + 2 + 4 * adapters / LLAMA.parameters) * 128_256 * 4096)


def test_a_pipelines_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    whole, cut = (
        call_bytes(LLAMA.as_critic(), TrainStrategy(pp=pp, recompute="none"), 1000, backward=True) for pp in (1, 4)
    )
    layer, gradients = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336), 2 * (4096 + 3 * 14_336)
    assert whole["activations"] == 1000 * (32 * layer + gradients)
    assert cut["activations"] == 1000 * (4 * 8 * layer + gradients)
    uneven = call_bytes(LLAMA.as_critic(), TrainStrategy(pp=3, recompute="none"), 1000, backward=True)
    assert uneven["activations"] == 1000 * (3 * 11 * layer + gradients)  # eleven of 32 layers
    few = stage_bytes(LLAMA.as_critic(), TrainStrategy(pp=4, recompute="none"), 1000, backward=True, rank_tokens=1500)
    assert [stage["activations"] for stage in few] == [
        t * 8 * layer + 1000 * gradients for t in (1500, 1500, 1500, 1000)
    ]
    first = call_bytes(LLAMA, TrainStrategy(pp=2, recompute="none"), 1000, backward=True)
    assert (first["activations"], first["logits"]) == (1000 * (2 * 16 * layer + gradients), 0.0)
    last = call_bytes(LLAMA, TrainStrategy(pp=2, recompute="full"), 1000, backward=True)
    assert last["activations"] == 1000 * 16 * 2 * 4096  # of one micro-batch: the head's peak is the last stage's
    assert last["logits"] == logits_bytes(LLAMA, TrainStrategy(pp=2), 1000, backward=True)
    selective, *_ = activation_bytes_per_token(LAYER, TrainStrategy(recompute="selective"))
    assert selective == 2 * (2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14_336)  # neither normed inputs nor the product
    halves = call_bytes(LLAMA.as_critic(), TrainStrategy(cp=2, recompute="none"), 1000, backward=True)
    assert halves["activations"] == whole["activations"] / 2
    both, *_ = activation_bytes_per_token(LAYER, TrainStrategy(tp=4, sequence_parallel=True, recompute="selective"))
    assert both == selective / 4
    alone, *_ = activation_bytes_per_token(LAYER, TrainStrategy(tp=4, recompute="selective"))
    assert alone == 2 * (2 * 4096 + (2 * 4096 + 2 * 1024 + 2 * 14_336) / 4)


@pytest.mark.parametrize(
    ("logits", "training", "log_probs", "old_log_probs"),
    # bytes of a logit at the peak, as veRL's code and NeMo-RL's DTensor hold them
    [("bf16", 4, 4, 4), ("fp32", 2 * 4, 2 + 4, 3 * 4), ("torch", 2 + 3 * 4 + 2, 2 + 2 * 4, 2 + 2 * 4)],
)
def test_logits_as_frameworks_compute_them(logits: str, training: int, log_probs: int, old_log_probs: int) -> None:
    strategy, words = TrainStrategy(tp=2, logits=logits), 128_256 / 2  # type: ignore[arg-type]
    assert logits_bytes(LLAMA, strategy, 1000, backward=True) == training * 1000 * words
    assert logits_bytes(LLAMA, strategy, 1000, backward=False) == log_probs * 1000 * words
    assert logits_bytes(LLAMA, strategy, 1000, backward=False, entropy=True) == old_log_probs * 1000 * words


def test_fused_kernels_hold_the_logits_of_a_chunk() -> None:
    fused = TrainStrategy(logits="fused")
    long, short = (logits_bytes(LLAMA, fused, tokens, backward=True) for tokens in (100_000, 512))
    assert long == short == 18 * 512 * 128_256
    assert logits_bytes(LLAMA, fused, 100, backward=True) == short * 100 / 512


@cases("cost", "what verls scripts run fits and what runs nowhere does not")
def test_what_verls_scripts_run_fits_and_what_runs_nowhere_does_not(
    model: str, gpu: str, tokens: int, layout: dict[str, Any], fit: bool
) -> None:
    """Whether one GPU holds training, and log-probs, of micro-batches of `tokens` tokens a GPU."""
    strategy = TrainStrategy(zero_stage=3, **layout)
    peak = call_bytes(load_model(model), strategy, tokens * strategy.cp, backward=True)
    inference = call_bytes(load_model(model), strategy, tokens * strategy.cp, entropy=True, backward=False)
    most = max(sum(peak.values()), sum(inference.values())) + RESERVED_BYTES
    assert (most <= load_gpu(gpu).memory_bytes * (1 - MARGIN)) is fit


@cases("cost", "strategies that make no sense")
def test_strategies_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call_bytes(LLAMA, TrainStrategy(**arguments), backward=True)


def test_shards_in_bf16_take_half_of_those_in_fp32() -> None:
    """AReaL and veRL's `model_dtype`: weights, gradients and moments are of one type, the passes as before."""
    plain, half = (
        call_bytes(load_model("qwen2.5-7b"), TrainStrategy(dp=8, zero_stage=3, weights=weights), 4096, backward=True)
        for weights in ("fp32", "bf16")
    )
    for part in ("parameters", "gradients", "optimizer states"):
        assert half[part] == pytest.approx(plain[part] / 2)
    assert half["activations"] == plain["activations"]

"""Bytes on one GPU: what rollout and training keep there, and how many KV pages are left.

Formulas: Rajbhandari et al. 2020 (ZeRO) for model states; Korthikanti et al. 2023 (activation recomputation) for which
activations are kept, counted anew for llama-like layers; vLLM's memory profiling for the KV cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlsim.cost.engine_memory import SAMPLING_BYTES, VLLM, EngineMemory
from rlsim.cost.flops import attention_work
from rlsim.cost.layout import PLAIN, ReplicaLayout
from rlsim.cost.ledger import does_not_fit
from rlsim.cost.step import KvShape
from rlsim.cost.strategy import Logits, TrainStrategy
from rlsim.models.hardware import Gpu
from rlsim.models.layers import Experts, FullAttention, LatentAttention, Layer
from rlsim.models.model import Model

BF16 = 2
FP32 = 4

#: What a process that trains keeps beside its tensors: CUDA context (about 0.5 GB), NCCL's buffers and the allocator's
#: gaps. An assumption of the right order; rollout engines have rules of their own (`engine_memory`).
RESERVED_BYTES = 2.0 * 2**30

#: What of a call outlives it.
STATES = ("parameters", "optimizer states")

#: The kernels of experts in MXFP4 take inputs of a multiple of so many numbers: weights are padded to it.
MXFP4_BLOCK = 256

#: Tokens whose logits are there at once where the head is fused with the loss (veRL's `FusedLinearForPPOFunction`).
FUSED_CHUNK_TOKENS = 512
#: Bytes of one logit at most, by what computes it (`logits_bytes`): in training, without gradient, and so with entropy.
LOGIT_BYTES: Mapping[Logits, tuple[int, int, int]] = {
    "bf16": (2 * BF16, 2 * BF16, 2 * BF16),
    "fp32": (2 * FP32, BF16 + FP32, 3 * FP32),
    "torch": (2 * BF16 + 3 * FP32, BF16 + 2 * FP32, BF16 + 2 * FP32),
    "fused": (BF16 + 4 * FP32, BF16 + 4 * FP32, BF16 + 4 * FP32),
}


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on one GPU of a rollout replica; `pages` and `capacity_tokens` are the replica's."""

    weight_bytes: float
    activation_bytes: float
    reserved_bytes: float
    page_bytes: float
    page_tokens: int
    pages: int
    groups: int = 1  # of GPUs that share the replica's sequences out, each with its share of the pages

    @property
    def kv_bytes(self) -> float:
        """KV cache on this GPU."""
        return self.pages / self.groups * self.page_bytes

    @property
    def engine_bytes(self) -> float:
        """All of it on this GPU, beside what any process has there (`RESERVED_BYTES`)."""
        total = self.weight_bytes + self.activation_bytes + self.reserved_bytes + self.kv_bytes
        return max(total - RESERVED_BYTES, 0.0)

    @property
    def capacity_tokens(self) -> int:
        """Context tokens that the replica can hold."""
        return self.pages * self.page_tokens


def rollout_weight_bytes(model: Model, tp: int, pp: int = 1, layout: ReplicaLayout = PLAIN) -> float:
    """Weights on one GPU of a replica: matrices, biases, embedding, LM head are sharded, norms and router replicated.

    KV projections are replicated when there are fewer KV heads than GPUs; of a quantised kv_b (latent attention) there
    is a copy in bf16, for decoding in the latent (vLLM's `process_weights_after_loading`), experts in MXFP4 are padded.
    With `pp` stages, those of the fullest: it has ⌈layers / pp⌉ layers and the larger of the embedding (first stage)
    and the head with the final norm (last stage). All GPUs of a stage share the experts, whether each is cut or they
    are dealt (`layout`). Raises `ConfigError` if `tp` or `pp` does not fit.
    """
    layout.check(model, tp)
    gpus, tp = tp, layout.attention_tp(tp)

    def layer_bytes(layer: Layer) -> float:
        moved = model.expert_bytes(layer) / gpus - model.expert_bytes(layer, tp) if tp < gpus else 0.0
        if model.of_experts == "mxfp4":
            padded = math.ceil(layer.hidden / MXFP4_BLOCK) * MXFP4_BLOCK
            moved += model.expert_bytes(layer) / gpus * (padded / layer.hidden - 1)
        if isinstance(layer.attention, LatentAttention) and model.precision != "bf16":
            moved += BF16 * layer.attention.kv_b(tp).weights
        return model.layer_bytes(layer, tp) + moved

    layers = model.fullest_stage(pp, layer_bytes)
    embedding = math.ceil(model.vocab_size / tp) * model.hidden_size
    head = 0 if model.head_parameters == 0 else model.head(tp).n_out * model.hidden_size
    head += model.hidden_size
    ends = embedding + head if pp == 1 else max(embedding, head)
    return layers + ends * model.dtype_bytes


def kv_page_bytes(model: Model, tp: int, page_tokens: int, pp: int = 1) -> float:
    """One page of KV cache on one GPU: what each of the fullest stage's layers keeps of a token here · bytes · tokens.

    Grouped-query attention keeps 2 · KV heads here · head_dim numbers, latent attention its latent, whole, linear
    attention nothing. In layers with a window only a sequence's last pages are kept (`kv_shape`).
    """
    kept = model.fullest_stage(pp, lambda layer: model.cached_elements(layer, tp))
    return kept * model.kv_element_bytes * page_tokens


def kv_shape(model: Model, tp: int) -> KvShape:
    """What a sequence takes of such pages, as vLLM's hybrid KV cache manager keeps it, or as `Model.kv_window_share`
    says.

    Pages are those of all layers together, whatever the pipeline stages, and so is the state of linear attention in
    pages: where stages are uneven, that is not what the fullest one holds. vLLM's window moves by whole pages and may
    touch one more than counted here.
    """
    elements: Counter[int | None] = Counter()
    chunked = any(layer.attention.chunked for layer in model.groups)
    for layer, count in model.groups.items():
        elements[layer.attention.window_tokens] += count * layer.attention.cached_elements(tp)
    everything, always = sum(elements.values()), elements.pop(None, 0)
    if model.kv_window_share is not None:
        always = everything
    state = sum(count * layer.attention.state_elements / tp for layer, count in model.groups.items())
    state *= model.dtype_bytes / model.kv_element_bytes  # stays in the model's type, whatever that of the KV cache
    window = max((tokens for layer in model.groups if (tokens := layer.attention.read_tokens)), default=None)
    unit = math.gcd(everything, always) if window is not None else everything
    return KvShape(
        window_tokens=window,
        page_units=everything // unit,
        late_units=always // unit,
        state_tokens=state / everything,
        chunked=chunked,
    )


def rollout_activation_bytes(
    model: Model,
    tp: int,
    max_batched_tokens: int,
    max_sequences: int,
    sampling_bytes: float = SAMPLING_BYTES,
) -> float:
    """Peak working memory of one engine iteration on one GPU, as vLLM's profiling run meets it.

    The larger of a layer's live tensors for `max_batched_tokens`, and what sampling `max_sequences` takes
    (`sampling_bytes` for each logit over the whole vocabulary, whatever TP) beside the hidden states.
    """
    layer = max_batched_tokens * max(_live_width(layer, tp) for layer in model.groups) * BF16
    if model.scalar_head:
        return float(layer)
    sampled = max_sequences * model.vocab_size * sampling_bytes
    return float(max(layer, sampled + max_batched_tokens * model.hidden_size * BF16))


def _live_width(layer: Layer, tp: int) -> float:
    """Numbers for each token at a layer's peak: residual and input, then gate, up and their product of a dense MLP
    (without a gate: up, and what its activation makes of it).

    A mixture of experts has the output besides, and vLLM's `fused_moe` a copy of the token for each of its experts: its
    gate and up, or later its output, in one buffer, their product in another. TP does not cut the output.
    """
    hidden, mlp = layer.hidden, layer.mlp
    if not isinstance(mlp, Experts):
        return 2 * hidden + (mlp.projections + 1) * mlp.active_width / tp
    copies = mlp.active * (max(mlp.projections * mlp.width / tp, mlp.token_width(hidden)) + mlp.width / tp)
    return 3 * hidden + max(copies, (mlp.projections + 1) * mlp.shared_width / tp)


def rollout_memory(
    model: Model,
    gpu: Gpu,
    tp: int,
    *,
    pp: int = 1,
    layout: ReplicaLayout = PLAIN,
    page_tokens: int = 16,
    memory_utilization: float = 0.9,
    max_batched_tokens: int = 8192,
    max_sequences: int = 256,
    rule: EngineMemory = VLLM,
    nvlink: bool = True,
    resident_bytes: float = 0.0,
    min_tokens: int = 1,
    draft_bytes: tuple[float, float] = (0.0, 0.0),
) -> RolloutMemory:
    """What a rollout replica of `tp` · `pp` GPUs keeps on each, and the KV pages left, by the engine's `rule`:

    vLLM's is (`memory_utilization` · memory − weights − activations − libraries and graphs − resident) / page, rounded
    down. `nvlink`: it joins the replica's GPUs. `resident_bytes` are what others hold on the GPU meanwhile (training
    states that are not offloaded), `min_tokens` the KV the replica must at least hold.
    With `pp` stages the fullest one decides; a page there holds a stage's layers only, so the replica has more of them.
    Groups of GPUs that share the sequences out (`layout`) have their own pages each, and must hold `min_tokens` each.

    `draft_bytes`: what drafts tokens (`cost.speculation`) adds to the weights, and to the KV cache of each token.

    Raises `CapacityError`, with the bytes, if that does not fit, and `ConfigError` if `tp` or `pp` does not split the
    model.
    """
    weights = rollout_weight_bytes(model, tp, pp, layout) + draft_bytes[0]
    own_tp = layout.attention_tp(tp)
    activations = rollout_activation_bytes(model, own_tp, max_batched_tokens, max_sequences, rule.sampling_bytes)
    beside = rule.beside_bytes(tp * pp, nvlink=nvlink)
    page = kv_page_bytes(model, own_tp, page_tokens, pp) + draft_bytes[1] * page_tokens
    room = rule.kv_bytes(gpu.memory_bytes, memory_utilization, weights, activations, beside, resident_bytes)
    pages = math.floor(room / page)
    shape = kv_shape(model, own_tp)
    if not shape.fits(min_tokens, page_tokens, pages):
        needed = math.ceil(shape.units(min_tokens, page_tokens) / shape.page_units) * page
        parts = {
            "weights": weights,
            "activations": activations,
            "context, communication and graphs": beside,
            "other residents": resident_bytes,
            f"KV cache of {min_tokens} tokens": needed,
        }
        degrees = {"TP": own_tp, "PP": pp, "EP": layout.ep, "DP of attention": layout.attention_dp}
        shown = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "TP")
        have = sum(parts.values()) - needed + room
        plain = math.isclose(have, memory_utilization * gpu.memory_bytes, rel_tol=1e-3)
        by = "" if plain else "by the engine's own rule, memory_utilization "
        of = f"({by}{memory_utilization:g} of {gpu.memory_bytes / 1e9:.2f} GB on {gpu.name})"
        raise does_not_fit(f"{model.name} rollout at {shown} does not fit", parts, have, of)
    groups = layout.attention_dp
    return RolloutMemory(weights, activations, beside, page, page_tokens, pages * groups, groups)


def stage_parts(model: Model, strategy: TrainStrategy) -> list[tuple[float, TrainStrategy]]:
    """Parameters of the fullest pipeline stage on one GPU, before ZeRO shards them, with what spreads them.

    One part, or two where the matrices of experts are apart: all others, cut by TP, and these, cut by EP × expert TP
    (`TrainStrategy.experts`).
    """
    return max(_stages(model, strategy), key=lambda parts: sum(n for n, _ in parts))


def _stages(model: Model, strategy: TrainStrategy) -> list[list[tuple[float, TrainStrategy]]]:
    """The same of every stage: of ⌈layers / PP⌉ layers; the first also holds the embedding, the last the head (a copy
    of the embedding, where they are tied) and the final norm."""
    embedding, stages = model.vocab_size * model.hidden_size, model.stages(strategy.pp)
    ends = [0] * len(stages)
    ends[0] += embedding
    ends[-1] += model.hidden_size + (model.head_parameters or embedding * (len(stages) > 1))
    found = []
    for end, stage in zip(ends, stages, strict=True):
        parts = [(count, *layer_parts(layer, strategy)) for layer, count in stage.items()]
        cut = end / strategy.tp + sum(count * own for count, own, _ in parts)
        routed = sum(count * apart for count, _, apart in parts)
        found.append([(cut, strategy), *([(routed, strategy.experts)] if routed else [])])
    return found


def layer_parts(layer: Layer, strategy: TrainStrategy) -> tuple[float, float]:
    """Parameters of a layer on one GPU, before ZeRO shards them: all that TP cuts, with what every GPU of a TP group
    has (norms, routers, the down-projections of latent attention), and the matrices of experts that are apart."""
    tp = strategy.tp
    if not strategy.experts_apart:
        return layer.parameters_per_gpu(tp), 0.0
    return layer.parameters_per_gpu(tp) - layer.expert_weights(tp), layer.expert_weights() / strategy.expert_cut


def activation_bytes_per_token(layer: Layer, strategy: TrainStrategy) -> tuple[float, float, float]:
    """Bytes per token of one layer: kept from forward to backward under `strategy.recompute`, all of a layer, and the
    gradients that its backward pass holds beside them.

    All of a layer, in elements: for each of its blocks the input of the norm and its output (2 · hidden); q, k, v and
    the attention output (`AttentionWork.kept`: 2 · q_dim + 2 · kv_dim for grouped queries); gate, up and their product
    (3 · the width of the MLP, or of all experts that a token passes; 2 without a gate), and a copy of the token for
    each of these, as its expert gets it. TP divides all but the first group, sequence parallelism the first too.
    `selective` keeps neither norm outputs nor the product; `full` keeps one input. Elements are bf16 and kernels fused,
    but under FSDP layers are Hugging Face's modules: each norm keeps its input in fp32 and what it scales in bf16 too,
    the MLP the output of its activation function, experts (as in torchtitan) the copies in their order and what they
    put out in fp32, for its product with the router's weights. Experts get equal shares of the tokens. Gradients are
    most in the MLP: of its output, its product, gate and up, and of the experts' copies; or, of grouped experts under
    FSDP, at that product with the router's weights: in fp32 what comes in, and what goes to both factors, as wide.
    """
    tp = strategy.tp
    outside = tp if strategy.sequence_parallel else 1
    work = attention_work(layer.attention)
    hidden, blocks, heads = layer.hidden, layer.blocks, work.kept
    projected, product = layer.mlp.projections * layer.mlp.active_width, layer.mlp.active_width
    copies = 0.0
    if isinstance(layer.mlp, Experts):
        copies = layer.mlp.active * layer.mlp.token_width(hidden) * strategy.expert_tp_degree
    heads += copies
    gradients = BF16 * (hidden / outside + (copies + projected + product) / tp)
    everything = BF16 * (2 * blocks * hidden / outside + (heads + projected + product) / tp) + BF16 * work.latent
    if strategy.fsdp:
        in_heads = work.kept / 2 if isinstance(layer.attention, FullAttention) and layer.attention.head_norms else 0
        everything += (FP32 + BF16) * (blocks * hidden / outside + (in_heads + copies) / tp) + BF16 * product / tp
        gradients += FP32 * copies / tp
        if not strategy.looped_experts:
            gradients = max(gradients, BF16 * hidden / outside + 3 * FP32 * copies / tp)
    if strategy.recompute == "full":
        return BF16 * hidden / outside, everything, gradients
    if strategy.recompute == "selective":
        return BF16 * (blocks * hidden / outside + (heads + projected) / tp) + BF16 * work.latent, everything, gradients
    return everything, everything, gradients


def logits_bytes(
    model: Model, strategy: TrainStrategy, tokens: float, *, backward: bool, entropy: bool = False
) -> float:
    """Bytes of the logits of `tokens` tokens on one GPU when most of them are there; TP divides the vocabulary.

    As veRL computes log-probabilities (v0.4.1 to v0.9.0):

    - `bf16`, FSDP (`verl/workers/engine/fsdp/transformer_impl.py`, `verl/utils/torch_functional.py`): the logits in
      bf16 and, divided by the temperature, in a second tensor (v0.9; in place before). flash-attn's Triton cross
      entropy copies nothing and writes the gradient over these (`inplace_backward`), while the division's own gradient
      takes the place of the first. Entropy, compiled or by chunks, keeps none.
    - `fp32`, Megatron (`megatron_actor.py`): `Float16Module` returns the logits in fp32 (beside the head's bf16);
      `VocabParallelCrossEntropy` works in place, and the division's gradient is a second tensor. With `entropy`, as for
      old log-probabilities, a clone and the softmax of `vocab_parallel_entropy` are there too.
    - `torch`, NeMo-RL's DTensor (`nemo_rl/algorithms/loss`, v0.4) and prime-rl's supervised training: bf16, a copy in
      fp32, its `log_softmax`, and the gradients of the latter two.
    - `fused`, `use_fused_kernels`: one chunk's, bf16 logits and up to four tensors of them in fp32.

    With `entropy_coeff` 0, as in veRL's scripts, training computes no entropy.
    """
    if model.scalar_head:
        return 0.0
    if strategy.logits == "fused":
        tokens = min(tokens, FUSED_CHUNK_TOKENS)
    return LOGIT_BYTES[strategy.logits][0 if backward else 1 + entropy] * tokens * model.vocab_size / strategy.tp


def stage_bytes(
    model: Model,
    strategy: TrainStrategy,
    tokens: float | None = None,
    *,
    backward: bool,
    entropy: bool = False,
    rank_tokens: float = math.inf,
) -> list[dict[str, float]]:
    """Peak bytes by part on a GPU of each pipeline stage, for a training call or one without gradient (log-probs,
    values, rewards).

    `tokens` are those of a micro-batch (default: its budget). Per parameter: 2 bytes of bf16 weight and, to train, 4 or
    2 of gradient (`strategy.gradients`), 12 of fp32 master and Adam moments (`optimizer_bytes`; `cpu_optimizer` of them
    none); FSDP keeps weights and gradients as `strategy.weights` alone, in whatever type it reduces them, and PyTorch's
    AdamW (`foreach`) takes another copy in its step. ZeRO stages 1, 2, 3 divide optimizer, gradients, parameters by the
    data-parallel ranks, those of experts that are apart by the ranks with the same experts. Under LoRA adapters alone
    have gradients and states. Stage 3 gathers two layers (one in use, one prefetched), or embedding and head, in bf16,
    and holds one unit's whole gradient. Training keeps what `strategy.recompute` says of each layer: of PP
    micro-batches on the first stage of a 1F1B pipeline, of one less on each that follows, but of no more than the
    `rank_tokens` of a rank's mini-batch. Only the last stage has
    logits. The peak is inside a layer (its live tensors, no logits) or at the head (`logits_bytes`; `entropy`: of the
    logits too): logits are there after the last layer's forward pass and gone before its backward pass. Host offload
    empties the GPU between calls: the peak is the same. Raises `ConfigError` if the strategy does not suit the model.
    """
    strategy.check_model(model)
    tokens, rank_tokens = (tokens or strategy.budget(backward=backward)) / strategy.cp, rank_tokens / strategy.cp
    zero, each = strategy.zero_stage, {layer: activation_bytes_per_token(layer, strategy) for layer in model.groups}
    all_logits = logits_bytes(model, strategy, tokens, backward=backward, entropy=entropy)
    adapters = model.adapters(strategy.lora_rank)
    trained = adapters if strategy.lora_rank else 1.0
    unit_bytes = 2 * BF16 + backward * strategy.gradient_bytes * trained
    embedding = model.vocab_size * model.hidden_size / strategy.tp
    largest = max(*(sum(layer_parts(layer, strategy)) for layer in model.groups), embedding)
    gathered = unit_bytes * largest * (zero == 3)

    def on_stage(at: int, layers: Mapping[Layer, int], parts: list[tuple[float, TrainStrategy]]) -> dict[str, float]:
        def sharded(bytes_per_parameter: int, stage: int) -> float:
            return sum(bytes_per_parameter * n / (spread.sharded_over if zero >= stage else 1) for n, spread in parts)

        found = {"parameters": sharded(strategy.shard_bytes, 3) * (1.0 + adapters)}
        kept, working = 0.0, tokens * max(each[layer][1] for layer in layers)
        if backward:
            states = sharded(strategy.states_bytes, 1) * (1 - strategy.cpu_optimizer) * trained
            gradient = strategy.shard_bytes if strategy.fsdp else strategy.gradient_bytes
            found |= {"gradients": sharded(gradient, 2) * trained, "optimizer states": states}
            kept = sum(count * each[layer][0] for layer, count in layers.items())
            kept *= min(tokens * (len(stages) - at), rank_tokens)
            live = (each[layer] for layer in layers)
            working = tokens * max(whole * (strategy.recompute != "none") + grads for _, whole, grads in live)
        logits = all_logits * (at == len(stages) - 1)
        at_head = logits > working
        activations = kept + working * (not at_head)
        passes = {"gathered layers": gathered, "activations": activations, "logits": logits * at_head}
        in_step = strategy.shard_bytes * (backward and strategy.fsdp)
        stepping = sharded(in_step, 3) * (1 - strategy.cpu_optimizer) * trained
        return found | (passes if sum(passes.values()) > stepping else {"the optimizer's step": stepping})

    stages = model.stages(strategy.pp)
    return [on_stage(at, *both) for at, both in enumerate(zip(stages, _stages(model, strategy), strict=True))]


def call_bytes(
    model: Model, strategy: TrainStrategy, tokens: float | None = None, *, backward: bool, entropy: bool = False
) -> dict[str, float]:
    """`stage_bytes` of the stage that needs most."""
    stages = stage_bytes(model, strategy, tokens, backward=backward, entropy=entropy)
    return max(stages, key=lambda found: sum(found.values()))


def kept_bytes(model: Model, strategy: TrainStrategy) -> float:
    """The most that training leaves on a GPU between calls: parameters and optimizer; nothing with offload."""
    stages = stage_bytes(model, strategy, backward=True)
    return max(sum(found[part] for part in STATES) for found in stages) * (not strategy.offload)

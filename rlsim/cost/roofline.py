"""A replica's iterations as the sum of their kernels and collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from rlsim.base.refusals import refuse
from rlsim.cost.assumed import Draw
from rlsim.cost.attention import LayerAttention, layer_attention
from rlsim.cost.calibration import Calibration, Known, load_calibration
from rlsim.cost.collectives import Collectives, Groups
from rlsim.cost.curve import DecodeCurve, InWindows, over_all, read_of_equal, sum_of
from rlsim.cost.derived import Boundaries, Change, DerivedStep, HostTime, Pipelined, ServedStep, hosted
from rlsim.cost.experts import expert_load
from rlsim.cost.layout import PLAIN, Layout, ReplicaLayout
from rlsim.cost.memory import BF16, kv_shape
from rlsim.cost.micro_batches import pack
from rlsim.cost.operators import Operators
from rlsim.cost.step import Chunk, Lookups, StepCost
from rlsim.errors import CalibrationError, CapacityError
from rlsim.models.hardware import Cluster
from rlsim.models.layers import Experts, LatentAttention

if TYPE_CHECKING:
    from rlsim.models.layers import Layer, Linear
    from rlsim.models.model import Model

N = TypeVar("N", int, float)


def for_model(model: Model, calibration: Calibration) -> Calibration:
    """`calibration` with all kernels that serve `model`, on its KV cache; what its engine lacks is lent.

    Raises `CalibrationError` for a precision of weights or KV cache that the GPU or the calibration lacks.
    """
    latent = any(isinstance(one.attention, LatentAttention) for one in model.groups)
    if latent:
        calibration = calibration.lent("latent_attention")
    if any(isinstance(one.mlp, Experts) for one in model.groups):
        calibration = calibration.lent("experts")
    calibration.check_precision(model.precision, model.kv_precision, latent=latent)
    if model.of_experts not in calibration.operators.experts:
        calibration.check_precision(model.of_experts)
    return calibration.on_kv(model.kv_precision, latent=latent)


class RooflineStep(StepCost):
    """One replica of `model` on `tp` GPUs of one NVLink domain, or of several whole ones, from a calibration's
    operators.

    A layer is: add+norm, fused QKV product, rotary embedding and KV write, attention, output product, all-reduce,
    add+norm, fused gate-up product, activation, down product, all-reduce; of a mixture of experts the router, the
    products of the shared expert, and the fused kernel of the experts that some token picks, on the GPU that most
    tokens reach; half of that where attention or feed-forward is missing. An iteration adds the embedding, a last norm,
    the LM head (sharded over the vocabulary, last tokens only) and the gather of its logits. Host time is not in it
    (`step_cost`). Every decode batch is taken to run from a captured CUDA graph.

    `layout`: with `attention_dp` groups of GPUs each group computes all but the experts for its share of the sequences.
    Tokens then reach the experts, and come back, by an all-to-all (DeepEP's where the calibration has it) if whole
    experts lie on every GPU, else by an all-gather and a reduce-scatter. With experts dealt to GPUs that share all
    sequences the all-reduce stays: every GPU has all tokens, and adds up what its own experts make of them.

    `queries`: tokens that each sequence has in a decode step: with one drafted token to verify two. They share what
    attention reads of the sequence, and are tokens apart in all else.

    Raises `ConfigError` if the model does not split that way, has layers of another kind, or `tp` is neither within a
    domain nor whole domains, `CapacityError` if `tp` exceeds the cluster, and `CalibrationError` if the calibration
    lacks the precision of the weights or of the KV cache.
    """

    def __init__(
        self,
        model: Model,
        tp: int,
        cluster: Cluster,
        calibration: Calibration,
        layout: ReplicaLayout = PLAIN,
        queries: int = 1,
    ) -> None:
        layout.check(model, tp)
        per_domain = cluster.domain_gpus
        refuse("TP beyond a cluster", CapacityError, tp=tp, cluster=cluster)
        refuse("TP beyond a domain", tp=tp, cluster=cluster)
        self.tp, self.layout, self.queries = tp, layout, queries
        self._domains = max(tp // per_domain, 1)
        self._attention_dp, self._group_tp = layout.attention_dp, layout.attention_tp(tp)
        self._group_domains = max(self._group_tp // per_domain, 1)
        self._expert_tp = layout.expert_tp(tp)
        calibration = for_model(model, calibration)
        self.skew = calibration.skew
        self.operators = Operators(calibration.operators, calibration.reference, calibration.residuals)
        self.collectives = Collectives(calibration.collectives, calibration.reference, cluster)
        self._model, self.hidden_size = model, model.hidden_size
        sums = [row for row in calibration.fused("sums", model) if model.hidden_size > row["hidden_above"]]
        self._fused_sum_bytes = max((row["bytes"].get(tp, 0) for row in sums if self._attention_dp == 1), default=0)
        self._fused_shared = {row["experts"] for row in calibration.fused("shared_expert", model) if layout.ep == 1}
        counts = Counter(layer.attention for layer in model.layers)
        shape = self._group_tp, model.dtype_bytes, calibration.costs.recurrent_served
        kinds = {one: layer_attention(self.operators, one, *shape) for one in counts}
        self._attentions = tuple((count, part) for one, count in counts.items() for part in kinds[one].parts)
        groups = {self._as_run(layer): count for layer, count in model.groups.items()}
        self._attention_of = {layer: kinds[layer.attention] for layer in groups}
        self.kv = kv_shape(model, self._group_tp)
        self._layers = tuple(
            (count, layer, self._attention_of[layer].linears(layer, self._group_tp)) for layer, count in groups.items()
        )
        self._head = model.head(self._group_tp)
        self.head_s = cache(self._head_s)
        self._tokens_s = cache(self._of_tokens_s)
        self._alone_s = cache(lambda chunk: self._together_s((chunk,)))

    def _as_run(self, layer: Layer) -> Layer:
        if isinstance(layer.mlp, Experts) and layer.mlp.experts in self._fused_shared:
            return replace(layer, mlp=replace(layer.mlp, shared_width=0))
        return layer

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        tokens = batch * self.queries
        fixed = self._tokens_s(tokens, self.own(batch) * self.queries) + self.head_s(tokens)
        curves = []
        for count, kind in self._attentions:
            curve = self._attention_curve(kind, batch)
            if kind.window_tokens is not None:
                curve = over_all(curve, kind.window_tokens, in_windows, kind.chunked)
            curves.append((count, curve))
        return sum_of(curves, fixed)

    def _attention_s(self, batch: int, context_tokens: float, in_windows: InWindows | None) -> float:
        total = 0.0
        for count, kind in self._attentions:
            read = context_tokens
            if kind.window_tokens is not None:
                equal = read_of_equal(read, batch, kind.window_tokens, kind.chunked)
                read = equal if in_windows is None else in_windows.at(read)
            total += count * self._attention_curve(kind, batch).step_s(read)
        return total

    def _attention_curve(self, kind: LayerAttention, batch: int) -> DecodeCurve:
        """Of one layer, over what all `batch` sequences read: the group of GPUs with most sequences has its share."""
        own = self.own(batch)
        curve = kind.curve(own, self.queries)
        return curve if own == batch else curve.stretched(batch / own, batch)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        """Seconds of one iteration in which the products run over decode and prefill tokens together, the LM head on
        each chunk's last token."""
        decoded, own, decode_s = batch * self.queries, self._busiest(chunks), 0.0
        tokens = sum([new for new, _ in chunks])
        own_tokens = tokens if own is chunks else sum([new for new, _ in own])
        if batch:
            for operator, values in self._decode_shapes(batch, context_tokens):
                self.operators.count(operator, **values)
            decode_s = self._attention_s(batch, context_tokens, in_windows)
        return (
            self._tokens_s(decoded + tokens, self.own(batch) * self.queries + own_tokens)
            + decode_s
            # one alone: the samples of a prompt, each on a replica of its own
            + (self._alone_s(own[0]) if len(own) == 1 else self._together_s(own))
            + self.head_s(decoded + len(chunks))
        )

    def lookups(self) -> Lookups:
        """Every shape asked for so far. A decode curve counts once, by the longest mean context it was used at."""
        own = Lookups()
        for batch, furthest in self.curves.used():
            for operator, values in self._decode_shapes(batch, furthest):
                self.operators.count(operator, own, **values)
        return own.merge([self.operators.lookups, self.collectives.lookups])

    def _decode_shapes(self, batch: int, context_tokens: float) -> Iterator[tuple[str, dict[str, float]]]:
        own = self.own(batch)
        for _, kind in self._attentions:
            read_tokens = min(context_tokens, batch * (kind.window_tokens or math.inf))
            if shape := kind.decode_shape(own, read_tokens * own / batch):
                yield shape

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step by kind: products (experts among them), attention, elementwise, all_reduce,
        exchange (of tokens between groups of GPUs), head."""
        own, tokens = self.own(batch) * self.queries, batch * self.queries
        elementwise = sum(count * self._elementwise_s(layer, own) for count, layer, _ in self._layers)
        products = sum(count * self._products_s(layer, linears, tokens, own) for count, layer, linears in self._layers)
        all_reduce, exchange = self._communication_s(tokens, own)
        return {
            "products": products,
            "attention": self._attention_s(batch, context_tokens, None),
            "elementwise": elementwise + self._embedding_s(own),
            "all_reduce": all_reduce,
            "exchange": exchange,
            "head": self.head_s(tokens),
        }

    def own(self, count: N) -> N:
        """Sequences, tokens or rows of the group of GPUs that has most."""
        return count if self._attention_dp == 1 else type(count)(math.ceil(count / self._attention_dp))

    def _busiest(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The chunks of the group of GPUs that gets most new tokens, where the groups are dealt them evenly."""
        if self._attention_dp == 1:
            return chunks
        dealt = pack([chunk.new_tokens for chunk in chunks], min(self._attention_dp, len(chunks)))
        return [chunks[i] for i in max(dealt, key=lambda members: sum(chunks[i].new_tokens for i in members))]

    def _of_tokens_s(self, tokens: float, own: float) -> float:
        """All that depends on the number of tokens alone, of which one group of GPUs has `own`: products, elementwise
        kernels, communication."""
        layers_s = sum(
            count * (self._products_s(layer, linears, tokens, own) + self._elementwise_s(layer, own))
            for count, layer, linears in self._layers
        )
        return layers_s + sum(self._communication_s(tokens, own)) + self._embedding_s(own)

    def _communication_s(self, tokens: float, own: float) -> tuple[float, float]:
        """Seconds of all layers' all-reduces and the embedding's, and of the exchanges around experts."""
        mixtures = [(count, layer.mlp) for count, layer, _ in self._layers if isinstance(layer.mlp, Experts)]
        exchanged = mixtures if self._attention_dp > 1 else []
        all_reduces = self._model.blocks + 1 - sum(count for count, _ in exchanged)
        exchange_s = sum(count * self._exchange_s(tokens, own, experts) for count, experts in exchanged)
        group, time_s = (self._group_tp, self._group_domains), self.collectives.time_s
        hidden_bytes = own * self._model.hidden_size * self._model.dtype_bytes
        reduced_s = all_reduces * time_s("all_reduce", hidden_bytes, *group)
        # Where a norm is over all heads GPUs that cut these sum the squares of queries and of keys, two numbers in fp32
        # a token (vLLM's `MiniMaxText01RMSNormTP`).
        normed = sum(count for count, layer, _ in self._layers if getattr(layer.attention, "whole_norms", False))
        return reduced_s + (normed * time_s("all_reduce", 8 * own, *group) if normed else 0.0), exchange_s

    def _exchange_s(self, tokens: float, own: float, experts: Experts) -> float:
        """Seconds in which the tokens of all groups reach the experts of one layer, and what these make of them comes
        back."""
        token_bytes = experts.token_width(self._model.hidden_size) * self._model.dtype_bytes
        if self._expert_tp == 1:
            each = own / self._group_tp  # a group's GPUs each send their part
            return self.collectives.exchange_s(each, experts.active, token_bytes, self.tp, self._domains)
        time_s, size = self.collectives.time_s, tokens * token_bytes
        gathered = time_s("all_gather", size, self.tp, self._domains)
        return gathered + time_s("reduce_scatter", size, self.tp, self._domains)

    def _products_s(self, layer: Layer, linears: Sequence[Linear], tokens: float, own: float) -> float:
        gemm, experts = self.operators.gemm_s, layer.mlp
        total = 0.0
        for linear in linears:
            precision = self._model.precision if linear.quantised else "bf16"
            total += gemm(own, linear.n_out, linear.k_in, precision=precision)
        if isinstance(experts, Experts):
            load = expert_load(tokens, experts.experts, experts.active, self.layout.ep, self.layout.imbalance)
            load = load.with_shared() if experts.experts in self._fused_shared else load
            width, hidden = experts.width // self._expert_tp, experts.token_width(layer.hidden)
            total += self.operators.experts_s(load, hidden, width, self._model.of_experts, experts.projections)
        return total

    def _elementwise_s(self, layer: Layer, tokens: float) -> float:
        element = self._model.dtype_bytes

        def move(elements_per_token: float) -> float:
            return self.operators.memory_bound_s(tokens * elements_per_token * element, tokens)

        norm = move(4 * layer.hidden)  # read input and residual, write sum and norm
        hidden_bytes = tokens * layer.hidden * element
        if hidden_bytes <= self._fused_sum_bytes:
            norm = 2 * hidden_bytes / self.operators.reference.memory_bytes_per_s  # read the residual, write the sum
        activated, mlp = layer.mlp.active_width, layer.mlp
        if isinstance(mlp, Experts):
            activated = mlp.shared_width  # that of experts is among theirs
        activation = move((layer.mlp.projections + 1) * (activated / self._group_tp)) if activated else 0.0
        more = layer.norms - layer.blocks
        more_norms = more * move(2 * layer.hidden) if more > 0 else 0.0
        return layer.blocks * norm + self._attention_of[layer].elementwise_s(tokens) + activation + more_norms

    def _embedding_s(self, tokens: float) -> float:
        one = self.operators.memory_bound_s(tokens * self._model.hidden_size * 2 * self._model.dtype_bytes, tokens)
        return 2 * one  # embedding, last norm

    def _head_s(self, rows: float) -> float:
        own = self.own(rows)
        time = self.operators.gemm_s(own, self._head.n_out, self._head.k_in)
        if not self._model.scalar_head:
            logits = own * self._model.vocab_size * self._model.dtype_bytes
            time += self.collectives.time_s("all_gather", logits, self._group_tp, self._group_domains)
        return time

    def _together_s(self, chunks: Sequence[Chunk]) -> float:
        return sum([count * kind.prefill_s(chunks) for count, kind in self._attentions])


def step_cost(
    model: Model,
    tp: int,
    cluster: Cluster,
    calibration: Calibration | str,
    layout: ReplicaLayout = PLAIN,
    *,
    pp: int = 1,
    dp: int = 1,
    first_gpu: int = 0,
    sampling_s_per_logit: float = 0.0,
    largest_graph: float = math.inf,
    prompt_graphs: bool = True,
    queries: int = 1,
    drafting: Callable[[RooflineStep], StepCost] | None = None,
) -> StepCost:
    """The step cost of one of `dp` replicas of `model` on `tp` · `pp` GPUs: the roofline with host time, times what
    whole iterations tell (`in_service`).

    Stages lie tp · dp GPUs apart (TP innermost, then DP, then PP), from `first_gpu` on. `sampling_s_per_logit` is what
    the GPU takes for each entry of a sampled token's vocabulary, on the last stage: nothing for the fused kernels of
    serving engines, much for a framework that sorts all logits of one sequence after another. An iteration of
    more sequences than `largest_graph` (0: any), or without `prompt_graphs` any that prefills, takes at least as long
    as the host needs to launch its kernels (`EagerFit`); without graphs a serving engine's whole iterations say nothing
    of it; of several stages they tell the level alone. `queries`: tokens of each sequence in a
    decode step; `drafting` adds what else the GPUs do in it (`rlsim.cost.speculation`).

    Raises `ConfigError` if the model cannot be cut that way, `CapacityError` if the replicas exceed the cluster,
    `CalibrationError` if the calibration was made for another GPU.
    """
    if isinstance(calibration, str):
        calibration = load_calibration(calibration)
    refuse("calibration of a cluster", CalibrationError, calibration=calibration, cluster=cluster)
    known = calibration.known(model, tp if layout.plain and pp == 1 else None) if largest_graph else Known()
    if known.fit is not None:
        calibration = calibration.scheduled(known.fit.overlapped)
    roofline = RooflineStep(model, tp, cluster, calibration, layout, queries)
    refuse("replicas beyond a cluster", CapacityError, tp=tp, pp=pp, dp=dp, cluster=cluster)
    kernels: StepCost = roofline if drafting is None else drafting(roofline)
    groups, logit_s = layout.attention_dp, sampling_s_per_logit * model.vocab_size
    if logit_s:  # each group of GPUs samples the tokens of its own sequences
        each_s = logit_s * queries
        kernels = DerivedStep(kernels, lambda n, _: Change(more_s=each_s * math.ceil(n / groups)), "sampling")
    captured = largest_graph * groups / queries  # sequences of all groups
    if captured < math.inf or not prompt_graphs:
        launch_s = calibration.costs.launches * calibration.eager.iteration_s(model.blocks / 2, tp)
        kernels = DerivedStep(kernels, lambda n, p: Change(least_s=launch_s * (n > captured or p > prompt_graphs)))
    if pp == 1:
        return in_service(hosted(kernels, calibration.host.in_rollouts, groups), calibration, known)
    inside, across = Groups(roofline.collectives, cluster, Layout(first_gpu=first_gpu, dp=dp, tp=tp, pp=pp)).boundaries
    hidden_bytes, collectives = BF16 * model.hidden_size, roofline.collectives
    ways = Boundaries(hidden_bytes=hidden_bytes, inside=inside, across=across, collectives=collectives, ranks=dp * tp)

    def head_s(rows: float) -> float:
        return roofline.head_s(rows) + logit_s * math.ceil(rows / groups)

    host, layers = HostTime(calibration.host.in_rollouts, groups), model.num_hidden_layers
    cost = Pipelined(kernels, pp, layers=layers, head_s=head_s, boundaries=ways, host=host)
    return in_service(cost, calibration, known)


def in_service(cost: StepCost, calibration: Calibration, known: Known) -> StepCost:
    """The step cost as far as whole iterations of the engine are known, in the world that the calibration is drawn for,
    and as long as its kernels are said to take."""
    draw, times = calibration.draw, calibration.costs.kernels
    if known.fit is not None:
        cost, draw = ServedStep(cost, known.fit), Draw()
    else:
        times *= known.level
        draw = draw.of_level() if known.own else draw
    if not draw.number and times == 1.0:
        return cost
    return DerivedStep(cost, lambda n, _: Change(scale=times * draw.iteration(cost.tp, n)))

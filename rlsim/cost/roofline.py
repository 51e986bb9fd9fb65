"""A replica's iterations as the sum of their kernels, collectives and host time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.curve import DecodeCurve
from rlsim.cost.experts import distinct_experts
from rlsim.cost.host import HostedStep
from rlsim.cost.lookups import Lookups
from rlsim.cost.operators import Operators
from rlsim.cost.profile import ProfileStep
from rlsim.cost.sharing import Scaled
from rlsim.cost.step import Chunk, StepCost
from rlsim.errors import CalibrationError, CapacityError
from rlsim.hardware import Cluster
from rlsim.layers import Experts

if TYPE_CHECKING:
    from rlsim.layers import Layer, Linear
    from rlsim.models import Model


class RooflineStep(StepCost):
    """One replica of `model` on `tp` GPUs of one node, from a calibration's operators.

    A layer is: add+norm, fused QKV product, rotary embedding and KV write, attention, output product, all-reduce,
    add+norm, fused gate-up product, activation, down product, all-reduce; of a mixture of experts the router, the
    products of the shared expert, and two grouped products of the experts that some token picks. An iteration adds the
    embedding, a last norm, the LM head (sharded over the vocabulary, last tokens only), the gather of its logits, and
    the host time that is not hidden. Every decode batch is taken to run from a captured CUDA graph.

    Raises `ConfigError` if the model does not split over `tp` or has layers of another kind, `CapacityError` if `tp`
    exceeds a node.
    """

    def __init__(self, model: Model, tp: int, cluster: Cluster, calibration: Calibration) -> None:
        model.check_tp(tp)
        if tp > cluster.gpus_per_node:
            raise CapacityError(
                f"TP {tp} exceeds the {cluster.gpus_per_node} GPUs of a node of cluster {cluster.name!r}"
            )
        self.tp = tp
        self.skew = calibration.operators.decode_attention.skew
        self.operators = Operators(calibration.operators, calibration.reference, calibration.residuals)
        self.collectives = Collectives(calibration.collectives, calibration.reference, cluster)
        self._host = calibration.host
        self._model = model
        self._attention = model.attention
        self._q_heads = self._attention.heads // tp
        self._kv_heads = self._attention.kv_heads_per_gpu(tp)
        self._layers = tuple((count, layer, layer.linears(tp)) for layer, count in model.groups.items())
        self._head = model.head(tp)
        self._curves: dict[int, DecodeCurve] = {}
        self._known_tokens_s: dict[float, float] = {}
        self._known_head_s: dict[float, float] = {}

    def decode(self, batch: int) -> DecodeCurve:
        """The decode curve of `batch` sequences; its knots are those of decode attention."""
        known = self._curves.get(batch)
        if known is not None:
            return known
        layers = self._model.num_hidden_layers
        fixed = self._tokens_s(batch) + self.head_s(batch) + self._host.step_s + self._host.sequence_s * batch
        knots, times = self.operators.decode_attention_curve(batch, self._kv_heads, self._attention.head_dim)
        curve = DecodeCurve(batch, knots, [fixed + layers * time for time in times])
        self._curves[batch] = curve
        return curve

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of one prefill iteration over `chunks`, the LM head on each chunk's last token."""
        tokens = sum([chunk.new_tokens for chunk in chunks])
        return (
            self._tokens_s(tokens)
            + self._prefill_attention_s(chunks)
            + self.head_s(len(chunks))
            + self._host.step_s
            + self._host.prefill_s
            + self._host.sequence_s * len(chunks)
        )

    def mixed_s(self, batch: int, context_tokens: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of one iteration in which the products run over decode and prefill tokens together."""
        tokens = batch + sum(chunk.new_tokens for chunk in chunks)
        decode_attention = self.operators.decode_attention_s(
            batch, context_tokens, self._q_heads, self._kv_heads, self._attention.head_dim
        )
        rows = batch + len(chunks)
        return (
            self._tokens_s(tokens)
            + self._model.num_hidden_layers * decode_attention
            + self._prefill_attention_s(chunks)
            + self.head_s(rows)
            + self._host.step_s
            + self._host.prefill_s
            + self._host.sequence_s * rows
        )

    def lookups(self) -> Lookups:
        """Every shape asked for so far. A decode curve counts once, by the longest mean context it was used at."""
        own = Lookups()
        group = self._q_heads / self._kv_heads
        ranges = self.operators.ranges("decode_attention")
        for batch, curve in self._curves.items():
            if not curve.furthest_tokens:
                continue  # looked at, by a policy or a bound, but never run
            context = curve.furthest_tokens / batch
            own.add_within(
                "decode_attention", ranges, batch=batch, kv_heads=self._kv_heads, group=group, context=context
            )
        return own.merge([self.operators.lookups, self.collectives.lookups])

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step by kind: products, attention, elementwise, all_reduce, head, host."""
        layers = self._model.num_hidden_layers
        attention = self.operators.decode_attention_s(
            batch, context_tokens, self._q_heads, self._kv_heads, self._attention.head_dim
        )
        elementwise = sum(count * self._elementwise_s(layer, batch) for count, layer, _ in self._layers)
        return {
            "products": sum(count * self._products_s(layer, linears, batch) for count, layer, linears in self._layers),
            "attention": layers * attention,
            "elementwise": elementwise + self._embedding_s(batch),
            "all_reduce": (2 * layers + 1) * self._all_reduce_s(batch),
            "head": self.head_s(batch),
            "host": self._host.step_s + self._host.sequence_s * batch,
        }

    def _tokens_s(self, tokens: float) -> float:
        """All that depends on the number of tokens alone: every layer's products, elementwise kernels and
        all-reduces."""
        known = self._known_tokens_s.get(tokens)
        if known is not None:
            return known
        layers_s = sum(
            count * (self._products_s(layer, linears, tokens) + self._elementwise_s(layer, tokens))
            for count, layer, linears in self._layers
        )
        all_reduces = 2 * self._model.num_hidden_layers + 1
        time = layers_s + all_reduces * self._all_reduce_s(tokens) + self._embedding_s(tokens)
        self._known_tokens_s[tokens] = time
        return time

    def _products_s(self, layer: Layer, linears: Sequence[Linear], tokens: float) -> float:
        gemm, experts = self.operators.gemm_s, layer.mlp
        total = sum(gemm(tokens, linear.n_out, linear.k_in) for linear in linears)
        if isinstance(experts, Experts):
            hit = distinct_experts(tokens, experts.experts, experts.active)
            rows, width = tokens * experts.active / hit, experts.width // self.tp
            total += gemm(rows, 2 * width, layer.hidden, hit)
            total += gemm(rows, layer.hidden, width, hit)
        return total

    def _elementwise_s(self, layer: Layer, tokens: float) -> float:
        element, attention = self._model.dtype_bytes, self._attention
        heads = self._q_heads + self._kv_heads

        def move(elements_per_token: float) -> float:
            return self.operators.memory_bound_s(tokens * elements_per_token * element, tokens)

        norm = move(4 * layer.hidden)  # read input and residual, write sum and norm
        rotary = move((2 * heads + self._kv_heads) * attention.head_dim)
        activation = move(3 * (layer.mlp.active_width / self.tp))
        head_norm = move(2 * heads * attention.head_dim) if attention.head_norms else 0.0
        more_norms = (layer.norms - 2) * move(2 * layer.hidden) if layer.norms > 2 else 0.0
        return 2 * norm + rotary + activation + head_norm + more_norms

    def _embedding_s(self, tokens: float) -> float:
        one = self.operators.memory_bound_s(tokens * self._model.hidden_size * 2 * self._model.dtype_bytes, tokens)
        return 2 * one  # embedding, last norm

    def _all_reduce_s(self, tokens: float) -> float:
        return self.collectives.time_s(
            "all_reduce", tokens * self._model.hidden_size * self._model.dtype_bytes, self.tp
        )

    def head_s(self, rows: float) -> float:
        """Seconds of the LM head on `rows` tokens, and of gathering its logits."""
        known = self._known_head_s.get(rows)
        if known is not None:
            return known
        time = self.operators.gemm_s(rows, self._head.n_out, self._head.k_in)
        if not self._model.scalar_head:
            time += self.collectives.time_s(
                "all_gather", rows * self._model.vocab_size * self._model.dtype_bytes, self.tp
            )
        self._known_head_s[rows] = time
        return time

    def _prefill_attention_s(self, chunks: Sequence[Chunk]) -> float:
        one = self.operators.prefill_attention_s(chunks, self._q_heads, self._kv_heads, self._attention.head_dim)
        return self._model.num_hidden_layers * one


def step_cost(model: Model, tp: int, cluster: Cluster, calibration: Calibration | str) -> StepCost:
    """The step cost of `model` at `tp`: the calibration's own decode profile if it has one, else the roofline.

    Raises `CalibrationError` if the calibration was made for another GPU.
    """
    if isinstance(calibration, str):
        calibration = load_calibration(calibration)
    if calibration.gpu != cluster.gpu.name:
        raise CalibrationError(
            f"calibration {calibration.name!r} is for GPU {calibration.gpu!r}, "
            f"cluster {cluster.name!r} has {cluster.gpu.name!r}"
        )
    profile, host = calibration.profile(model.name, tp), calibration.host
    if profile is not None:
        return drawn(ProfileStep.from_record(profile, skew=calibration.operators.decode_attention.skew), calibration)
    if not host.overlapped:
        return drawn(RooflineStep(model, tp, cluster, calibration), calibration)
    alone = host.model_copy(update={"step_s": 0.0, "sequence_s": 0.0, "prefill_s": 0.0})
    kernels = RooflineStep(model, tp, cluster, calibration.model_copy(update={"host": alone}))
    return drawn(HostedStep(kernels, host), calibration)


def drawn(cost: StepCost, calibration: Calibration) -> StepCost:
    """The step cost in the world that the calibration is drawn for."""
    draw = calibration.draw
    return Scaled(cost, partial(draw.iteration, cost.tp)) if draw.number else cost

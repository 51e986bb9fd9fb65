"""Speculative decoding: a cheap draft proposes k tokens of each sequence, and the model verifies them in one step.

A step over a sequence yields the drafted tokens that are accepted, up to the first that is not, and one token of the
model's own: r = 1 + a_1 + … + a_k in expectation, where a_j is the chance that the first j drafted tokens are all
accepted (Leviathan et al. 2023, section 3.1). For the engine "one more token of each of b sequences" then takes

    (verification of k + 1 tokens of each sequence + k passes of the draft + the host's time) / r

which is piecewise linear in the context as any decode curve is, so that the engine's jumps stay as they are. What a
jump gives is the time of so many expected steps; `drawn` ones yield what is drawn for each request (`rlsim.sim.drawn`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema
from rlsim.cost.calibration import Calibration
from rlsim.cost.curve import DecodeCurve, InWindows, longer, sum_of
from rlsim.cost.layout import PLAIN, ReplicaLayout
from rlsim.cost.memory import BF16, kv_page_bytes, rollout_weight_bytes
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.step import Chunk, Conditions, StepCost
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model
from rlsim.units import Tokens

#: What drafts tokens: the sequence's own text (`ngram`, `suffix`), a head of one layer that is trained for the model
#: (`eagle`, `eagle3`), the model's layer for multi-token prediction (`mtp`), or a small model.
Method = Literal["ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model"]
Chance = Annotated[float, Field(ge=0, le=1)]

#: Chance that a drafted token is accepted given those before it, where nobody says it (rlsim/data/assumptions.yaml).
ACCEPTANCE: dict[Method, float] = {
    "ngram": 0.3, "suffix": 0.3, "eagle": 0.65, "eagle3": 0.65, "mtp": 0.85, "draft_model": 0.65
}  # fmt: skip


class Speculation(Schema):
    """Speculative decoding of a rollout, in the words of vLLM's `speculative_config`.

    What the fields mean are rows of `rlsim/data/meanings.csv`.
    """

    method: Method
    num_speculative_tokens: int = Field(ge=0, le=64)
    num_draft_tokens: int | None = Field(default=None, ge=1, le=512)
    topk: int = Field(default=1, ge=1, le=64)
    acceptance: Chance | tuple[Chance, ...] | None = None
    model: str | None = None
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    draft_vocab_size: int | None = Field(default=None, ge=1, le=100_000_000)
    disable_by_batch_size: int | None = Field(default=None, ge=1)
    disable_by_kv_usage: float | None = Field(default=None, ge=0, lt=1)
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, Annotated[int, Field(ge=0)]], ...] = ()
    num_speculative_tokens_per_length: dict[Tokens, Annotated[int, Field(ge=0, le=64)]] | None = Field(
        default=None, min_length=1
    )
    dynamic: bool = False
    drawn: bool = False
    correlation: float = Field(default=0.0, ge=0, lt=1)
    drift: float = Field(default=0.0, ge=0, lt=1)
    draft_age: int = Field(default=0, ge=0)
    refresh: int = Field(default=0, ge=0)
    refresh_cost: float = Field(default=0.07, ge=0, le=10)

    @property
    def accepted(self) -> tuple[float, ...]:
        """By position the chance that all drafted tokens up to there are accepted."""
        given = ACCEPTANCE[self.method] if self.acceptance is None else self.acceptance
        each = given if isinstance(given, tuple) else tuple(accumulate([given] * self.num_speculative_tokens, mul))
        return each[: self.num_speculative_tokens]

    def verified(self, drafted: int) -> int:
        """Tokens of a sequence that a step verifies, the model's own among them: a tree's nodes, or a chain's."""
        return self.num_draft_tokens or drafted + 1

    def yielded(self, drafted: int) -> float:
        """Tokens of a sequence that a step with so many drafted ones yields, in expectation."""
        return 1.0 + sum(self.accepted[:drafted])

    def under(self, conditions: Conditions) -> Speculation:
        """What it is under these conditions."""
        own: dict[str, Any] = {"disable_by_batch_size": 0} if conditions.short else {}
        if budgets := self.num_speculative_tokens_per_length:
            own["num_speculative_tokens"] = (0, *(budgets[length] for length in sorted(budgets)))[conditions.level]
        age = self.draft_age + conditions.version
        age = age % self.refresh if self.refresh else age
        if self.drift and age:
            kept = (1 - self.drift) ** age
            own["acceptance"] = tuple(chance * kept**place for place, chance in enumerate(self.accepted, 1))
        return self.model_copy(update=own) if own else self

    @property
    def refreshes(self) -> float:
        """Refreshes of the draft in a step, on average."""
        return 1 / self.refresh if self.refresh else 0.0

    @property
    def drafted(self) -> Sequence[int]:
        """Numbers of tokens that a step may draft, 0 aside."""
        most, budgets = self.num_speculative_tokens, self.num_speculative_tokens_per_length or {}
        each = {most, *budgets.values(), *(drafted for *_, drafted in self.num_speculative_tokens_per_batch_size)}
        return range(1, most + 1) if self.dynamic else sorted(drafted for drafted in each if 0 < drafted <= most)


def head_of(model: Model, method: Method, vocab: int | None = None) -> Model | None:
    """The shape of what drafts, as a model; None where it is no network.

    Of `eagle` and `eagle3` one dense layer with the attention of a plain layer of the model, as wide as what a token
    passes there, in bf16; of `mtp` the layers that the model has for it.
    """
    if method in ("ngram", "suffix", "draft_model"):
        return None
    plain: dict[str, Any] = {"name": f"{model.name}-{method}", "indexer_types": (), "num_nextn_predict_layers": 0}
    if method == "mtp":
        kinds = model.mtp_layer_types or model.layer_types[-1:]
        alike = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": ()}
        return model.model_copy(update={**plain, **alike, "num_hidden_layers": len(kinds) or 1, "layer_types": kinds})
    return model.model_copy(
        update={
            **plain,
            "model_type": "llama",
            "num_hidden_layers": 1,
            "layer_types": (),
            "num_experts": 0,
            "intermediate_size": max(layer.mlp.active_width for layer in model.groups),
            "head_dim": model.v_head_dim if model.kv_lora_rank else model.head_dim,
            "vocab_size": vocab or model.vocab_size,
            "tie_word_embeddings": False,
            "precision": "bf16",
            "expert_precision": None,
        }
    )


class DraftBytes(NamedTuple):
    """What a draft takes on each GPU of a replica: its weights, and its KV cache of one token."""

    weights: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class Drafts:
    """Speculation with a model: how, and the shape of what drafts (None: the host does)."""

    speculation: Speculation
    model: Model | None

    @classmethod
    def of(cls, speculation: Speculation, model: Model, draft: Model | None = None) -> Drafts:
        """Speculation of a rollout of `model`, by the model `draft` if that is its method.

        Raises `ConfigError` if that has another vocabulary, which no engine takes.
        """
        refuse("draft", draft=draft, model=model)
        return cls(speculation, draft or head_of(model, speculation.method, speculation.draft_vocab_size))

    @property
    def is_head(self) -> bool:
        """Whether it works on the model's hidden states, and has the model's embedding."""
        return self.speculation.method != "draft_model"

    def tp(self, tp: int) -> int:
        """GPUs that cut it in a replica at `tp`."""
        return tp if self.is_head else self.speculation.draft_tensor_parallel_size or tp

    def layout(self, layout: ReplicaLayout) -> ReplicaLayout:
        """How a replica's GPUs share it: as the model, but for experts that it has none of."""
        if self.speculation.method == "mtp" and self.model is not None and self.model.num_experts:
            return layout
        return ReplicaLayout(attention_dp=layout.attention_dp if self.is_head else 1)

    def memory(self, tp: int, layout: ReplicaLayout = PLAIN) -> DraftBytes:
        """Bytes on each GPU. A head has the model's embedding, one for multi-token prediction its output head too."""
        if self.model is None:
            return DraftBytes()
        own, layout = self.tp(tp), self.layout(layout)
        weights, cut = rollout_weight_bytes(self.model, own, 1, layout), layout.attention_tp(own)
        if self.is_head:
            hidden, shared = self.model.hidden_size, self.model.embedding_parameters
            shared = shared if self.speculation.method != "eagle3" else shared - self.model.head_parameters
            weights += BF16 * (2 * hidden**2 - shared / cut)
        return DraftBytes(weights, kv_page_bytes(self.model, cut, 1))

    def synced(self, model: Model) -> float:
        """How many times its own bytes come with the new weights of `model`, the draft's included, on average."""
        return 1.0 + self.speculation.refreshes * self.memory(1).weights / model.weight_bytes


class DraftedStep(StepCost):
    """`verifying` (a decode step of k + 1 tokens of each sequence, or of a tree's) and the draft's k passes before it,
    without host time.

    The `first` pass takes in what the last step may have accepted, k + 1 tokens of each sequence (vLLM pads what was
    refused), each `later` one the token before, or the branches of a tree; None: the host drafts. A head multiplies two
    hidden states down to one first. Prompts pass the draft as well.
    """

    def __init__(
        self, verifying: RooflineStep, first: RooflineStep | None, later: RooflineStep | None, head: bool
    ) -> None:
        self.tp, self.skew, self.kv = verifying.tp, verifying.skew, verifying.kv
        self._verifying, self._first, self._later, self._head = verifying, first, later, head
        self.parts = [verifying, *filter(None, (first, later))]

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        verified = self._verifying.decode(batch, in_windows)
        first, later = self._first, self._later
        if first is None or later is None:
            return verified
        more, every, branches = first.queries - 2, batch * first.queries, batch * later.queries
        # Only the last accepted token of each sequence needs the first pass' output head.
        fixed_s = first.head_s(batch) - first.head_s(every) + self._joined_s(every) + more * self._joined_s(branches)
        return sum_of([(1, verified), (1, first.decode(batch)), (more, later.decode(batch))], fixed_s)

    def _joined_s(self, tokens: int) -> float:
        step, hidden = self._later, self._verifying.hidden_size
        if not self._head or step is None:
            return 0.0
        return step.operators.gemm_s(step.own(tokens), hidden, 2 * hidden)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        time_s = self._verifying.mixed_s(batch, context_tokens, chunks, in_windows)
        if batch:
            time_s += self.decode(batch).step_s(context_tokens) - self._verifying.decode(batch).step_s(context_tokens)
        if self._later is None:
            return time_s
        prompts_s = self._later.prefill_s(chunks) + self._joined_s(sum(chunk.new_tokens for chunk in chunks))
        return time_s + prompts_s

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one step by part: those of the verification, and the draft's."""
        parts = self._verifying.breakdown(batch, context_tokens)
        if self._later is None:
            return parts
        return parts | {"draft": self.decode(batch).step_s(context_tokens) - sum(parts.values())}


class SpeculativeStep(StepCost):
    """Steps of one token of each sequence, each a share 1 / r of a step of `steps` (by its drafted tokens), which
    yields r; `plain` where nothing is drafted.

    An iteration with prompts in it takes what these add to a step with drafts, and one token's share of that step.
    """

    def __init__(self, plain: StepCost, steps: Mapping[int, StepCost], speculation: Speculation) -> None:
        self.tp, self.skew, self.kv = plain.tp, plain.skew, plain.kv
        self._plain, self._steps, self._speculation = plain, steps, speculation
        self.parts = (plain, *steps.values())
        usage = speculation.disable_by_kv_usage
        self.lengths = sorted(speculation.num_speculative_tokens_per_length or ())
        self.conditional = usage is not None or speculation.drift > 0 or bool(self.lengths)
        self.most_kv = 1.0 if usage is None else usage
        self.drawn = speculation.drawn * (1 if speculation.dynamic else 2**30)

    def _made_for(self, conditions: Conditions) -> StepCost:
        own = self._speculation.under(conditions)
        return self if own is self._speculation else SpeculativeStep(self._plain, self._steps, own)

    @property
    def best(self) -> StepCost:
        lucky = {"acceptance": 1.0} if self.drawn else {}  # no draw accepts more
        own = self._speculation.model_copy(update={"dynamic": True, **lucky})
        return SpeculativeStep(self._plain, self._steps, own) if self.conditional or lucky else self

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        each = [self._token(drafted, batch, in_windows) for drafted in self._choices(batch)]
        return reduce(lambda one, other: longer(one, other, min), each)

    def _choices(self, batch: int) -> Sequence[int]:
        spec, most = self._speculation, self._speculation.disable_by_batch_size
        if most is not None and batch > most:
            return (0,)
        reached = [drafted for first, _, drafted in spec.num_speculative_tokens_per_batch_size if first <= batch]
        drafted = min([spec.num_speculative_tokens, *reached[-1:]])
        return (0, *(k for k in self._steps if k <= drafted)) if spec.dynamic else (drafted,)

    def _drafted(self, batch: int, context_tokens: float, in_windows: InWindows | None = None) -> int:
        """The tokens drafted at this context."""
        return min(self._choices(batch), key=lambda k: self._token(k, batch, in_windows).step_s(context_tokens))

    def accepted(self, batch: int, context_tokens: float, in_windows: InWindows | None = None) -> tuple[float, ...]:
        return self._speculation.accepted[: self._drafted(batch, context_tokens, in_windows)]

    def _token(self, drafted: int, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        """The curve of one token of each sequence where so many are drafted."""
        step = self._steps[drafted] if drafted else self._plain
        return step.decode(batch, in_windows).mapped(1 / self._speculation.yielded(drafted), 0.0)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        if not batch:
            return self._steps[max(self._steps)].prefill_s(chunks)
        token_s = self.decode(batch, in_windows).step_s(context_tokens)
        drafted = self._choices(batch)[-1]
        step = self._steps[drafted] if drafted else self._plain
        mixed_s = step.mixed_s(batch, context_tokens, chunks, in_windows)
        return token_s + max(mixed_s - step.decode(batch, in_windows).step_s(context_tokens), 0.0)

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one token of each sequence by part."""

        drafted = self._drafted(batch, context_tokens)
        step, share = self._steps[drafted] if drafted else self._plain, self._speculation.yielded(drafted)
        return {name: time_s / share for name, time_s in step.breakdown(batch, context_tokens).items()}


def speculative(
    model: Model,
    tp: int,
    cluster: Cluster,
    calibration: Calibration,
    layout: ReplicaLayout,
    drafts: Drafts,
    **other: Any,
) -> StepCost:
    """`step_cost` of a replica that speculates, at least one token ahead.

    An n-gram is sought in the tokens of the step before, so the host cannot prepare one step while the GPU is at
    another (vLLM refuses asynchronous scheduling with it). All other drafts run from graphs as the model does. Raises
    `ConfigError` for pipeline stages.
    """
    spec = drafts.speculation
    refuse("speculation", pp=other.get("pp", 1))
    if spec.method in ("ngram", "suffix"):
        calibration = calibration.scheduled(False)

    def passing(queries: int) -> RooflineStep | None:
        shape = cluster, calibration, drafts.layout(layout), queries
        return None if drafts.model is None else RooflineStep(drafts.model, drafts.tp(tp), *shape)

    later = passing(spec.topk)

    def drafted_step(drafted: int) -> StepCost:
        def drafting(verifying: RooflineStep) -> StepCost:
            return DraftedStep(verifying, passing(drafted + 1), later, drafts.is_head)

        own = other | {"queries": spec.verified(drafted), "drafting": drafting}
        return step_cost(model, tp, cluster, calibration, layout, **own)

    steps = {drafted: drafted_step(drafted) for drafted in spec.drafted}
    return SpeculativeStep(step_cost(model, tp, cluster, calibration, layout, **other), steps, spec)

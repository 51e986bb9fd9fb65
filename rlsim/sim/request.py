"""One response to generate, and the settings of the engine that generates it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt

from rlsim.base.schema import Schema
from rlsim.cost.speculation import Speculation
from rlsim.models.precision import KvPrecision, Precision
from rlsim.units import Bytes, Seconds, Tokens

if TYPE_CHECKING:
    from rlsim.trace.turns import ToolCall  # importing rlsim.trace loads pandas

NAN = float("nan")
#: The number of a sub-agent is that of its trajectory and a multiple of this.
AGENT = 1 << 32

#: Since when pages that a prefill fills may be shared: the iteration that computes them, or the end of that prefill.
PrefixHits = Literal["scheduled", "prefilled"]
#: What becomes of the KV cache of running responses when new weights come between two of their tokens.
UpdatedKv = Literal["keep", "recompute"]


class EngineConfig(Schema):
    """Settings of the inference engine that every replica runs (names as vLLM and SGLang write them)."""

    page_tokens: int = Field(default=16, ge=1, le=65_536)
    max_num_seqs: int = Field(default=1024, ge=1, le=1_000_000)
    max_num_batched_tokens: Tokens = Field(default=8192, ge=1)
    chunked_prefill: bool = False
    enable_prefix_caching: bool = True
    prefix_hits: PrefixHits | None = None
    kv_offloading_bytes: Bytes = Field(default=0.0, ge=0)
    first_layout_kept: bool = True
    graphs: bool | Literal["decode"] = True
    largest_graph: PositiveInt | None = None
    sampling_per_logit: Seconds = Field(default=0.0, ge=0, le=1)
    async_scheduling: bool | None = None
    moe_backend: str | None = None
    precision: Precision | None = None
    kv_precision: KvPrecision = "bf16"
    pp: int = Field(default=1, ge=1, le=1024)
    ep: int = Field(default=1, ge=1, le=1024)
    data_parallel_attention: int = Field(default=1, ge=1, le=1024)
    expert_imbalance: float = Field(default=0.0, ge=0, le=4)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    speculation: Speculation | None = None

    def with_prefix_hits(self, default: PrefixHits) -> EngineConfig:
        return self.model_copy(update={"prefix_hits": self.prefix_hits or default})

    def watermark_pages(self, capacity_pages: int) -> int:
        """Pages kept free when admitting, of a replica with this many."""
        return int(self.watermark * capacity_pages)


class Run(NamedTuple):
    """Tokens of a response that weights of one version generated, one after the other."""

    version: int  # updates that the weights had had
    tokens: int


@dataclass(slots=True, eq=False)
class Cached:
    """Pages of one context in a prefix cache: of its prompt from the start, or those that follow the prompt."""

    pages: int  # that are here, or will be with the next iteration
    holders: int  # requests that run, are being prefilled or are pinned
    idle_since: int  # the boundary at which the last holder left
    offloaded: int = 0  # the next pages, which are in host memory only; none while it is held

    def __lt__(self, _: Cached) -> bool:
        """Any may be first of two heap entries that are alike but for it: the other is stale."""
        return False


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One response: what is asked, how far it is, and when things happened (simulated seconds, NaN until they do)."""

    id: int
    position: int  # of its prompt in training order
    prompt_tokens: int
    response_tokens: int  # the truth; no policy sees it
    generated: int = 0  # brought up to date when the request leaves the running batch
    row: int = -1  # of the trace, -1 if it is from none; what its reward call takes stands there
    predicted_tokens: float = 0.0  # of the response, by the system's predictor; 0: it has none
    acceptance: Any = None  # `AcceptanceDraws` of its drafted tokens, where these are drawn
    tool_calls: tuple[ToolCall, ...] = ()  # of a trajectory; what they observe counts as generated once it is back
    called: int = 0  # of these, those that are over
    observed_tokens: int = 0  # of its tokens so far, those that no model generated
    parent: Request | None = None  # of a sub-agent: the trajectory that waits for it
    #: To a sub-agent: the number of the call that began it, and its own in that, from 1; those of its callers first.
    path: tuple[int, ...] = ()
    restarts: int = 0  # times that it began again, as its sandbox was lost
    #: Of its tokens, those lost so: all, those that this step generated, and those that it observed.
    lost_tokens: int = 0
    lost_new: int = 0
    lost_observed: int = 0
    kv_id: int = field(init=False)  # names its KV cache behind the prompt's: of each attempt another
    budget_tokens: int = field(init=False)  # with so many tokens it is complete, or pauses
    limit_tokens: int = field(init=False)  # the same, or it calls a tool: with so many it leaves its replica
    micro_batch: int = 0  # it is admitted where none of an earlier one is
    priority: float = 0.0  # its place in its replica's queue: the lowest goes first
    order: int = 0  # admission number at its replica; 0 while waiting
    offset: int = 0  # while running: context = offset + the replica's step counter
    prefill_left: int = 0  # while prefilling: tokens still to process
    kv_arrived: bool = False  # while waiting: its KV has just arrived with it
    hit_tokens: int = 0  # of its context, that the prefix cache had when it was last admitted without KV
    shared_pages: int = 0  # while admitted: of its prompt, held together with other responses to it
    prefix: Cached = field(init=False)  # where these are
    start_tokens: int = 0  # context when it was last admitted
    replica: int = -1
    tps: tuple[int, ...] = ()  # tensor-parallel degrees it ran under, in order
    preemptions: int = 0
    aborted: bool = False
    baseline: bool = False  # scored to compare with, not trained on
    timed_out: bool = False  # in its reward call
    tool_s: float = 0.0  # in tool calls so far
    tool_wait_s: float = 0.0  # for sandboxes and workers, so far
    resumed: bool = False  # begun in an earlier step
    resumed_tokens: int = 0  # generated in earlier steps
    resumed_observed: int = 0  # of these, those observed
    runs: tuple[Run, ...] = ()  # oldest first; tokens in none of them are of the step's weights (`runs_under`)
    #: Of its stay at the replica where it is: when it came to the queue, was admitted, joined the decoding batch.
    arrived_at: float = NAN
    admitted_at: float = NAN
    decoding_at: float = NAN
    started_at: float = NAN
    first_token_at: float = NAN
    finished_at: float = NAN
    reward: float = NAN
    score_started_at: float = NAN
    scored_at: float = NAN

    def __post_init__(self) -> None:
        self.budget_tokens = self.limit_tokens = self.response_tokens
        self.kv_id = self.id
        if self.tool_calls:
            self._set_limit()

    def _set_limit(self) -> None:
        self.limit_tokens = self.budget_tokens
        if self.called < len(self.tool_calls):
            self.limit_tokens = min(self.limit_tokens, self.tool_calls[self.called].after_tokens)

    @property
    def root(self) -> Request:
        """The trajectory itself, of a sub-agent the one that it works for."""
        return self.parent.root if self.parent else self

    def restart(self) -> None:
        """It begins again at its first turn; what it has generated is lost."""
        observed = self.observed_tokens - self.resumed_observed
        self.lost_tokens += self.generated
        self.lost_new += self.generated - self.resumed_tokens - observed
        self.lost_observed += observed
        self.generated = self.called = self.observed_tokens = self.resumed_tokens = self.resumed_observed = 0
        self.restarts, self.kv_id, self.runs = self.restarts + 1, self.kv_id + (1 << 60), ()
        self._set_limit()

    @property
    def acts(self) -> bool:
        """Whether it has generated what stands before its next tool call."""
        calls = self.tool_calls
        return self.called < len(calls) and self.generated == calls[self.called].after_tokens

    def observe(self) -> None:
        """Its tool call is over: what it observes follows in its context, without KV cache.

        It counts to the weights that made the call.
        """
        observed = self.tool_calls[self.called].observation_tokens
        self.generated += observed
        self.observed_tokens += observed
        self.called += 1
        self.end_run(self.runs[-1].version, self.generated)
        self._set_limit()

    def end_run(self, version: int, generated: int) -> None:
        """With so many tokens, those that stand in no run yet are of weights of this version."""
        runs = self.runs
        tokens = generated - sum([tokens for _, tokens in runs]) if runs else generated
        if not tokens:
            return
        if runs and runs[-1].version == version:
            self.runs = (*runs[:-1], Run(version, runs[-1].tokens + tokens))
        else:
            self.runs = (*runs, Run(version, tokens))

    def runs_under(self, version: int) -> tuple[Run, ...]:
        """All tokens so far by the version of the weights that generated them, oldest first.

        `version` is that of the step's weights, which generated those that stand in no run.
        """
        own = self.generated - sum([tokens for _, tokens in self.runs])
        return (*self.runs, Run(version, own)) if own else self.runs

    def resume(self, id: int, version: int) -> Request:  # noqa: A002
        """The same response in a later step, under another number: it keeps its tokens, but no KV cache.

        `version` is that of the weights in the step that it comes from.
        """
        return Request(
            id,
            self.position,
            self.prompt_tokens,
            self.response_tokens,
            self.generated,
            self.row,
            self.predicted_tokens,
            self.acceptance,
            self.tool_calls,
            self.called,
            self.observed_tokens,
            restarts=self.restarts,
            tps=self.tps,
            baseline=self.baseline,
            timed_out=self.timed_out,
            tool_s=self.tool_s,
            tool_wait_s=self.tool_wait_s,
            resumed=True,
            resumed_tokens=self.generated,
            resumed_observed=self.observed_tokens,
            runs=self.runs_under(version),
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            finished_at=self.finished_at,
            reward=self.reward,
            score_started_at=self.score_started_at,
            scored_at=self.scored_at,
        )

    @property
    def context(self) -> int:
        """Tokens of prompt and response so far (of a request that is not running)."""
        return self.prompt_tokens + self.generated

    @property
    def full_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def scored(self) -> bool:
        return not isnan(self.reward)

    @property
    def finished(self) -> bool:
        return self.generated >= self.response_tokens

    @property
    def at_limit(self) -> bool:
        """Whether it has all tokens that it may generate for now: it is complete, has used up its budget, or acts."""
        return self.generated >= self.limit_tokens

    def allow(self, tokens: int) -> None:
        """Let it generate so many tokens from now on, then pause."""
        self.budget_tokens = min(self.response_tokens, self.generated + tokens)
        self._set_limit()

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.generated}/{self.response_tokens})"

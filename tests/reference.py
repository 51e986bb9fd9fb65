"""A rollout token by token: the slow, plain reading of docs/engine.md that the engine is held to.

No events and no jumps. Every replica executes one iteration at a time, and the loop goes on with whatever ends next.
Sums, pages and loads are counted anew each time they are needed. Where the specification leaves a choice, the comment
that begins with "Choice:" says what is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from numpy.random import default_rng

from rlsim.cost.curve import InWindows
from rlsim.cost.step import PLAIN_KV, Chunk, Conditions, KvShape, StepCost
from rlsim.cost.transfer import SwitchCost, SwitchWay
from rlsim.sim.actions import Abort, Extend, Migrate, Reconfigure, Release, Stop
from rlsim.sim.control import Action, KvHandling, Launch, ReplicaView, RequestView, RolloutControl, RolloutCosts
from rlsim.sim.drawn import AcceptanceDraws
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import EngineConfig
from rlsim.trace.turns import AgentCall, ToolCall

ONE_MOMENT = 1e-11
#: The number of a sub-agent is that of its trajectory and a multiple of this.
AGENT = 2**32


def in_windows(step: StepCost, contexts: Sequence[int]) -> InWindows | None:
    """What these sequences read in windows in the one step that they take now."""
    if step.kv.window_tokens is None:
        return None
    window = step.kv.window_tokens
    if step.kv.chunked:
        read = [len([i for i in range(context) if i // window == (context - 1) // window]) for context in contexts]
    else:
        read = [min(context, window) for context in contexts]
    return InWindows(sum(read) + step.skew * (len(read) * max(read) - sum(read)), 0.0)


def one_moment(a: float, b: float) -> bool:
    """Moments closer than this share of their value are one."""
    return math.isclose(a, b, rel_tol=ONE_MOMENT)


# ------------------------------------------------------------------------------------------ what goes in and out


@dataclass(eq=False)
class RefRequest:
    id: int
    position: int
    prompt_tokens: int
    response_tokens: int
    generated: int = 0  # above 0: resumed
    budget_tokens: int = 0  # 0: none
    tools: Sequence[ToolCall] = ()  # those ahead
    predicted_tokens: float = 0.0  # 0: nothing is
    micro_batch: int = 0
    acceptance: tuple[Any, ...] = ((),)  # what its numbers for decode steps are drawn with


class RefEngine(EngineConfig):
    """Settings of the engine and of its reference: a watermark in pages, and no prefix cache unless it is told."""

    page_tokens: int = 1
    max_num_seqs: int = 256
    enable_prefix_caching: bool = False
    free_pages: int = 0

    def watermark_pages(self, capacity_pages: int) -> int:
        return self.free_pages


@dataclass(frozen=True)
class RefSwitch:
    begun_at: float  # when the last replica had stopped
    cost: SwitchCost


@dataclass
class RefStay:
    """A request at a replica, from its arrival in the queue to its leaving."""

    id: int
    gpus: tuple[int, ...]  # of the replica
    arrived_at: float
    admitted_at: float = math.nan
    decoding_at: float = math.nan
    left_at: float = math.nan
    start_tokens: int = 0  # context when it was admitted, or left without
    end_tokens: int = 0
    iteration: int = 0  # with decodes, that the replica had done when it joined them
    left: str = ""


@dataclass
class RefResult:
    finish_at: dict[int, float] = field(default_factory=dict)  # finished only
    first_token_at: dict[int, float] = field(default_factory=dict)  # first token generated in this rollout
    preemptions: dict[int, int] = field(default_factory=dict)  # every request, 0 where none
    generated: dict[int, int] = field(default_factory=dict)  # every request
    finished: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    end_at: float = 0.0
    peak_pages: dict[int, int] = field(default_factory=dict)  # by replica index, at the start of executed iterations
    busy_s: dict[tuple[int, ...], float] = field(default_factory=dict)  # by the GPUs of a replica
    actions: list[tuple[float, Action]] = field(default_factory=list)  # carried out, not ignored
    released_at: dict[int, float] = field(default_factory=dict)  # by replica index
    switches: list[RefSwitch] = field(default_factory=list)  # begun
    iterations: list[tuple[float, float, int, str]] = field(default_factory=list)  # start, end, replica, kind
    chunk_at: dict[tuple[int, int], float] = field(default_factory=dict)  # by id and tokens: when it was handed over
    stays: list[RefStay] = field(default_factory=list)
    hit_tokens: int = 0  # of completed prefills
    loaded_tokens: int = 0  # from host memory
    tool_s: dict[int, float] = field(default_factory=dict)  # of requests that called tools: in them
    tool_wait_s: dict[int, float] = field(default_factory=dict)  # and until these began


class HaltedError(Exception):
    """Something is waited for, and nothing will ever happen again."""


#: A KV page: whose it is, and which page of a context. Of a prompt ("prompt", position, tokens), of what follows
#: ("request", id), and of what a request fills for itself though others have it ("copy", id).
Page = tuple[str, int, int, int]


@dataclass(frozen=True)
class RefRollout:
    """One rollout from its start to its end, on so many GPUs of every node.

    The requests given are not changed. `resumed` are dealt after the others. With `chunk_tokens` above 0, a response is
    handed over whenever it reaches a multiple of it, and at its end; that takes `handover_s`.
    """

    requests: tuple[RefRequest, ...]
    node_gpus: tuple[int, ...]
    tp: int
    costs: RolloutCosts
    engine: RefEngine
    cap_tokens: int
    control: RolloutControl
    routing: Literal["contiguous", "round_robin"] = "contiguous"
    resumed: tuple[RefRequest, ...] = ()
    chunk_tokens: int = 0
    handover_s: float = 0.0
    tools: EnvironmentConfig | None = None  # where trajectories act; None: there are none
    micro_batches: int = 1  # of the requests that a replica begins with

    def launched(self, launch: Launch, first_id: int) -> Sequence[RefRequest]:
        """The requests of a launch."""
        raise NotImplementedError

    def simulate(self) -> RefResult:
        """The reference's answer."""
        rollout = _Rollout(self, [*self.requests, *self.resumed])
        rollout.chunk_tokens, rollout.handover_s = self.chunk_tokens, self.handover_s
        rollout.deal(self.routing, len(self.requests), self.micro_batches)
        rollout.run()
        return rollout.result


# -------------------------------------------------------------------------------------------- what it is made of


@dataclass(eq=False)
class _Request(RefRequest):
    state: Literal["waiting", "prefilling", "running", "finished", "aborted", "moving", "paused", "acting"] = "waiting"
    arrived_kv: bool = False  # waiting, and its KV has just arrived with it
    priority: float = 0.0  # in its queue, the lowest first
    prefilled: int = 0  # prefilling: tokens already in the cache
    hit: int = 0  # of these, found in the prefix cache
    shares: int = 0  # admitted: pages of its prompt that it has with others
    number: int = 0  # of its admission
    stay: RefStay | None = None  # at the replica where it is
    parent: _Request | None = None  # that waits for this sub-agent
    path: tuple[int, ...] = ()  # to a sub-agent: call, agent, call, agent …, from 1
    attempts: int = 0  # that were lost
    pinned: Sequence[Page] = ()  # kept for it while it is at its tools

    def __post_init__(self) -> None:
        self.numbers = AcceptanceDraws(*self.acceptance)
        self.all_tools = self.tools
        further = self.generated + (self.budget_tokens or self.response_tokens)
        self.budget = min(self.response_tokens, further)  # tokens with which it finishes, or pauses

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def limit(self) -> int:
        """Tokens with which it leaves: it finishes, pauses, or calls a tool."""
        return min(self.budget, self.tools[0].after_tokens) if self.tools else self.budget

    @property
    def calls(self) -> bool:
        return bool(self.tools) and self.generated == self.tools[0].after_tokens

    @property
    def calls_over(self) -> int:
        return len(self.all_tools) - len(self.tools)

    @property
    def left(self) -> bool:
        return self.state not in ("finished", "aborted", "paused")

    @property
    def root(self) -> _Request:
        return self.parent.root if self.parent else self

    def lose_kv(self) -> None:
        self.state, self.arrived_kv, self.prefilled, self.hit, self.shares = "waiting", False, 0, 0, 0


@dataclass(eq=False)
class _Call:
    """A tool call of a request that was at a replica before, if it was at any."""

    request: _Request
    home: _Replica | None
    asked_at: float
    where: Literal["sandbox", "starts", "worker", "runs", "waits", "over"] = "sandbox"
    until: float = math.inf
    takes_s: float = 0.0
    lost: bool = False

    @property
    def agents(self) -> tuple[AgentCall, ...]:
        return self.request.tools[0].agents


@dataclass(eq=False)
class _Agent:
    """A sub-agent that a call has begun."""

    request: _Request
    begins_at: float
    told_s: float
    told_at: float = math.inf
    begun: bool = False


@dataclass(eq=False)
class _Iteration:
    started_at: float
    ends_at: float
    kind: Literal["prefill", "mixed", "decode"]
    decoding: list[_Request]  # each generates one token
    chunks: list[tuple[_Request, int]]  # and the tokens that it prefills
    fresh: list[_Request]  # admitted without KV at the boundary before
    pages: int
    chances: tuple[float, ...]  # by drafted position, that all up to there are accepted


@dataclass(eq=False)
class _Replica:
    index: int
    node: int
    tp: int
    gpus: tuple[int, ...]
    admitted: list[_Request] = field(default_factory=list)  # running and prefilling, in admission order
    waiting: list[_Request] = field(default_factory=list)
    arrivals: list[_Request] = field(default_factory=list)  # not yet taken in at a boundary
    iteration: _Iteration | None = None
    owed_s: float = 0.0  # hand-overs of the boundary before, paid at the start of the next iteration
    idle_at: float = math.inf  # since when nothing is to be done
    stopping: Literal["no", "switch", "release", "stop"] = "no"
    stopped: bool = False
    stopped_at: float = math.nan
    decodes: int = 0  # iterations with decodes so far
    cache: list[Page] = field(default_factory=list)  # that can be found; what nobody holds in the order of its use
    promised: dict[Page, _Request] = field(default_factory=dict)  # of these, not computed yet, and by whom they will be
    host: list[Page] = field(default_factory=list)  # pages that are in host memory only, those that came first in front
    pinned: list[_Request] = field(default_factory=list)  # away at tool calls, or back, whose pages are kept
    unpinned: list[_Request] = field(default_factory=list)  # of these, those just admitted
    loading: int = 0  # pages that the next iteration with a prefill loads from there
    let_go: list[tuple[int, list[Page], _Request]] = field(default_factory=list)  # at this boundary
    settled: list[tuple[int, list[Page], _Request]] = field(default_factory=list)  # of these, those seen to

    @property
    def active(self) -> bool:
        return self.stopping == "no"

    def requests(self) -> list[_Request]:
        return [*self.admitted, *self.waiting, *self.arrivals]

    def load(self) -> int:
        return sum(r.context for r in self.requests())

    def arrive(self, request: _Request, now: float) -> None:
        self.arrivals.append(request)
        request.stay = RefStay(request.id, self.gpus, now)

    def remove(self, request: _Request) -> None:
        for place in (self.admitted, self.waiting, self.arrivals):
            if request in place:
                place.remove(request)


@dataclass(eq=False)
class _Move:
    requests: list[_Request]
    to: _Replica
    kv: KvHandling
    number: int
    gone: list[_Request] = field(default_factory=list)  # have left their replica, on the way
    held: list[tuple[_Request, _Replica]] = field(
        default_factory=list
    )  # those that held KV, and the replicas they left
    arrives_at: float | None = None  # None until the last one has left


@dataclass(eq=False)
class _Switch:
    node: int
    to_tp: int
    kv: KvHandling
    way: SwitchWay
    old: list[_Replica]
    ends_at: float | None = None  # None until the last replica has stopped


class _View:
    """The rollout as a control may see it. Good until the control returns."""

    def __init__(self, rollout: _Rollout, finished_on: set[int]) -> None:
        self._rollout = rollout
        self._finished_on = finished_on

    @property
    def now_s(self) -> float:
        return self._rollout.now

    @property
    def nodes(self) -> tuple[int, ...]:
        own = range(len(self._rollout.node_gpus))
        return tuple(sorted({replica.node for replica in self._rollout.active() if replica.node in own}))

    @property
    def finished_nodes(self) -> tuple[int, ...]:
        return tuple(node for node in self.nodes if node in self._finished_on)

    @property
    def finished(self) -> int:
        return len(self._rollout.result.finished)

    @property
    def total(self) -> int:
        return len(self._rollout.own)

    def unfinished(self, node: int | None = None) -> int:
        # Choice: a request on its way between replicas is on no node; one on a node that switches, or on a replica that
        # is being released, is on that node.
        if node is None:
            return sum(r.left for r in self._rollout.requests)
        return sum(len(replica.requests()) for replica in self._rollout.replicas if replica.node == node)

    def gpus(self, node: int) -> int:
        return self._rollout.node_gpus[node]

    def tp(self, node: int) -> int:
        return self._rollout.tps[node]

    def used_tps(self, node: int) -> frozenset[int]:
        return frozenset(self._rollout.used_tps[node])

    def replicas(self, node: int | None = None) -> tuple[ReplicaView, ...]:
        # Choice: a replica that is to stop (its node switches, it is being released) is not active any more.
        return tuple(
            ReplicaView(
                replica.index,
                replica.node,
                replica.tp,
                replica.gpus,
                tuple(
                    RequestView(r.id, r.position, r.prompt_tokens, r.generated, r.state == "running")
                    for r in replica.requests()
                ),
            )
            for replica in self._rollout.active()
            if node is None or replica.node == node
        )


# --------------------------------------------------------------------------------------------------- the rollout


class _Rollout:
    """Of what is asked for: a `RefRollout`, or a workload of `reference_open`."""

    chunk_tokens, handover_s = 0, 0.0
    view_kind = _View

    def __init__(self, work: Any, requests: Sequence[RefRequest]) -> None:
        self.work, self.now, self.admissions = work, 0.0, 0
        self.tools, self.paused_at_tools = work.tools or EnvironmentConfig(), False
        self.node_gpus, self.costs, self.engine, self.control = work.node_gpus, work.costs, work.engine, work.control
        tp, costs = work.tp, work.costs
        #: Prefixes are shared where a page of KV holds as many tokens in every layer, which no degree differs in.
        shares = self.engine.enable_prefix_caching and costs.step(tp).kv == PLAIN_KV
        self.prefix_hits = self.engine.prefix_hits or "scheduled" if shares else "off"
        self.at_tools: list[_Call] = []  # in the order in which they were asked for
        self.for_workers: list[_Call] = []  # those that wait for a worker
        self.sandboxes: list[_Request] = []  # who has one
        self.agents: list[_Agent] = []  # that somebody waits for
        self.agents_so_far = 0
        self.pins: list[tuple[float, _Replica, _Request, int]] = []  # until when, by which call
        self.unpinning: list[tuple[_Replica, _Request]] = []  # at the replica's next boundary
        self.requests = [_Request(**vars(r)) for r in requests]
        self.by_id = {r.id: r for r in self.requests}
        self.tps = dict.fromkeys(range(len(self.node_gpus)), tp)
        self.used_tps = {node: {tp} for node in self.tps}
        self.replicas: list[_Replica] = []  # all there have been, by index
        self.moves: list[_Move] = []
        self.switches: list[_Switch] = []  # not ended
        self.homeless: list[_Request] = []  # their replica is gone, and none is active
        self.came_back: list[list[_Request]] = []  # from their tools, without a replica, at this moment
        self.freed: list[list[_Request]] = []  # of replicas released at this moment
        self.stranded: list[tuple[int, list[_Request]]] = []  # of moves, to one that is gone, at this moment
        self.moves_so_far = 0
        self.aborting: set[_Request] = set()  # to leave at their replica's next boundary
        self.stop_asked = False
        self.result = RefResult(preemptions={r.id: 0 for r in self.requests})
        if len(self.by_id) < len(self.requests):
            raise ValueError("two requests have the same id")
        for r in self.requests:
            if not 0 <= r.generated < r.response_tokens:
                raise ValueError(f"request {r.id} has nothing to generate")
            if (
                self.pages_of(r.prompt_tokens + r.response_tokens, costs.step(tp).kv)
                > costs.capacity_pages(tp) * costs.step(tp).kv.page_units
            ):
                raise ValueError(f"request {r.id} does not fit an empty replica")
        for node in self.tps:
            self.create_replicas(node, self.node_gpus)

    # --- simple questions

    @property
    def own(self) -> list[_Request]:
        """All but sub-agents."""
        return [r for r in self.requests if not r.parent]

    def costs_of(self, replica: _Replica) -> RolloutCosts:
        return self.costs

    def version_of(self, replica: _Replica) -> int:
        """Updates that its weights have had."""
        return 0

    def pages_of(self, context: int, kv: KvShape) -> int:
        """In units of which a page of all layers has `page_units`, and one begun beyond the window `late_units`."""
        page = self.engine.page_tokens
        pages = -(-context // page)
        if kv.window_tokens is None:
            whole = pages
        elif kv.chunked:  # those with a token of the last chunk, or of none that is over
            over = (context - 1) // kv.window_tokens * kv.window_tokens
            whole = sum((n + 1) * page > over for n in range(pages))
        else:
            whole = sum(n * page < kv.window_tokens for n in range(pages))
        return kv.page_units * (whole + math.ceil(kv.state_tokens / page)) + kv.late_units * (pages - whole)

    def pages(self, replica: _Replica) -> int:
        if self.prefix_hits == "off":
            kv = self.costs_of(replica).step(replica.tp).kv
            return sum(self.pages_of(r.context, kv) for r in replica.admitted)
        return len(self.in_use(replica))

    def in_use(self, replica: _Replica) -> set[Page]:
        """Pages of running and prefilling requests, and all that are there of their prompts."""
        own = {page for r in replica.admitted for page in self.pages_held(r)}
        own |= {page for r in replica.pinned for page in r.pinned}
        prompts = {self.prompt_page(r, 0)[:3] for r in (*replica.admitted, *replica.pinned)}
        return own | {page for page in replica.cache if page[:3] in prompts}

    # --- the prefix cache

    def prompt_page(self, r: _Request, i: int) -> Page:
        return ("prompt", r.position, r.prompt_tokens, i)

    def context_pages(self, r: _Request, count: int) -> list[Page]:
        """The first pages of its context, as they are called in the cache."""
        common = (r.prompt_tokens - 1) // self.engine.page_tokens  # not the one with the prompt's last token
        return [self.prompt_page(r, i) if i < common else ("request", r.id, r.attempts, i) for i in range(count)]

    def pages_held(self, r: _Request) -> list[Page]:
        names = self.context_pages(r, -(-r.context // self.engine.page_tokens))
        return [("copy", r.id, 0, i) if n[0] == "prompt" and i >= r.shares else n for i, n in enumerate(names)]

    def find(self, replica: _Replica, r: _Request) -> list[Page]:
        """The pages of its context that are in the cache, from its start; its last token is computed in any case."""
        found: list[Page] = []
        there = {*replica.cache, *replica.host}
        for page in self.context_pages(r, (r.context - 1) // self.engine.page_tokens) if there else []:
            if page not in there:
                break
            found.append(page)
        return found

    def share(self, replica: _Replica, r: _Request, promised: bool) -> None:
        """All pages of its prompt are in the cache, computed or promised."""
        if self.prefix_hits == "off":
            return
        common = (r.prompt_tokens - 1) // self.engine.page_tokens
        for page in self.context_pages(r, common):
            if page not in replica.cache:
                replica.cache.append(page)
                if page in replica.host:
                    replica.host.remove(page)
                if promised:
                    replica.promised[page] = r
            if not promised:
                replica.promised.pop(page, None)
        r.shares = common

    def free(self, replica: _Replica, r: _Request, computed_tokens: int) -> None:
        """It is not admitted any more; the KV of so many of its tokens is there, counted from the start."""
        if self.prefix_hits == "off":
            return
        for page, by in list(replica.promised.items()):
            if by is r:
                del replica.promised[page]
                replica.cache.remove(page)
        own = self.context_pages(r, computed_tokens // self.engine.page_tokens)
        replica.let_go.append((r.number, [page for page in own if page[0] == "request"], r))
        r.shares = 0

    def unpin(self, replica: _Replica, r: _Request) -> None:
        """Others may have its pages; it lets go of them now."""
        if r in replica.pinned:
            own = [page for page in r.pinned if page[0] == "request"]
            replica.pinned.remove(r)
            replica.let_go.append((0, own, r))

    def let_pins_go(self) -> bool:
        any_gone = False
        for replica, r in list(self.unpinning):
            if r not in replica.pinned or replica.stopped:
                self.unpinning.remove((replica, r))
            elif self.at_boundary(replica):
                self.unpinning.remove((replica, r))
                self.unpin(replica, r)
                any_gone = True
        return any_gone

    def end_pins(self) -> None:
        for entry in list(self.pins):
            until, replica, r, number = entry
            if self.reached(until):
                self.pins.remove(entry)
                if r.state == "acting" and len(r.tools) == number:
                    self.unpinning.append((replica, r))

    def settle_cache(self, replica: _Replica) -> None:
        """What was let go at this boundary is what was used last: the last page of each is the first to go."""
        replica.cache += [page for _, own, _ in replica.let_go for page in own if page not in replica.cache]
        replica.settled += replica.let_go
        for _, own, _ in sorted(replica.settled, key=lambda item: (item[0], item[2].id)):
            there = [page for page in own[::-1] if page in replica.cache]
            replica.cache = [page for page in replica.cache if page not in own] + there
        prompts = {self.prompt_page(r, 0)[:3] for r in replica.admitted}
        for whose in sorted({self.prompt_page(r, 0)[:3] for *_, r in replica.settled}):
            if whose not in prompts:
                pages = sorted((page for page in replica.cache if page[:3] == whose), reverse=True)
                replica.cache = [page for page in replica.cache if page[:3] != whose] + pages
        replica.let_go = []

    def trim_cache(self, replica: _Replica) -> None:
        """Pages that nobody holds go, those used the longest ago first, until the others have room."""
        if self.prefix_hits == "off":
            return
        in_use = self.in_use(replica)
        idle = [page for page in replica.cache if page not in in_use]
        excess = len(idle) + len(in_use) - self.costs_of(replica).capacity_pages(replica.tp)
        host = self.costs_of(replica).host_kv(replica.tp)
        for page in idle[: max(excess, 0)]:
            replica.cache.remove(page)
            replica.host.append(page)
        replica.host = replica.host[max(len(replica.host) - host.pages, 0) :]

    def load(self, replica: _Replica, r: _Request, found: list[Page], arrived: bool) -> None:
        """It has been admitted: what it finds in host memory comes to the GPU, but where its KV has come with it."""
        coming = [page for page in found if page in replica.host]
        if not arrived:
            replica.loading += len(coming)
        own = {
            page for page in replica.host if page[:3] == ("request", r.id, r.attempts)
        }  # behind a gap nobody finds them again
        replica.host = [page for page in replica.host if page not in own and page not in coming]
        replica.cache += coming

    def active(self) -> list[_Replica]:
        return [replica for replica in self.replicas if replica.active]

    def switching(self, node: int) -> bool:
        return any(switch.node == node for switch in self.switches)

    def replica_of(self, request: _Request) -> _Replica | None:
        return next((replica for replica in self.replicas if request in replica.requests()), None)

    # --- replicas and dealing

    def create_replicas(self, node: int, node_gpus: Sequence[int]) -> list[_Replica]:
        tp, before, gpus = self.tps[node], sum(node_gpus[:node]), node_gpus[node]
        if gpus % tp:
            raise ValueError(f"a node of {gpus} GPUs cannot be divided into replicas of {tp}")
        new = []
        for first in range(before, before + gpus, tp):
            new.append(_Replica(len(self.replicas), node, tp, tuple(range(first, first + tp))))
            self.replicas.append(new[-1])
        return new

    def deal(self, routing: Literal["contiguous", "round_robin"], count: int, micro_batches: int = 1) -> None:
        """The first `count` by the routing, then the others by context. Of the first each replica's are so many
        micro-batches of neighbours, the first ones larger by one."""
        new, resumed = self.requests[:count], self.requests[count:]
        self.deal_evenly(new, self.replicas, routing)
        for replica in self.replicas:
            share, rest = replica.arrivals, len(replica.arrivals)
            for number in range(micro_batches):
                size = math.ceil(rest / (micro_batches - number))
                for r in share[len(share) - rest :][:size]:
                    r.micro_batch = number
                rest -= size
        going = [r for r in resumed if not r.calls]
        self.deal_by_context(going, self.replicas, lambda replica, r: replica.arrive(r, self.now))
        for r in resumed:
            if r.calls:
                self.call(r, None)

    def deal_evenly(self, new: list[_Request], replicas: list[_Replica], routing: str) -> None:
        each, more = divmod(len(new), len(replicas))
        for i, replica in enumerate(replicas):
            first = i * each + min(i, more)
            contiguous = new[first : first + each + (i < more)]
            for r in new[i :: len(replicas)] if routing == "round_robin" else contiguous:
                replica.arrive(r, self.now)

    def deal_by_context(self, requests: list[_Request], targets: list[_Replica], put: Callable[..., None]) -> None:
        """The longest context first (ties: lower id), to the replica with the least contexts (ties: lowest index)."""
        for r in sorted(requests, key=lambda r: (-r.context, r.id)):
            put(min(targets, key=lambda replica: (replica.load(), replica.index)), r)

    def end_stay(self, request: _Request, left: str, at: float | None = None) -> None:
        """It leaves its replica, or the running batch."""
        stay = request.stay
        stay.left, stay.left_at, stay.end_tokens = left, self.now if at is None else at, request.context
        if math.isnan(stay.admitted_at):
            stay.start_tokens = request.context
        self.result.stays.append(stay)
        request.stay = None

    # --- an iteration of a replica

    def begin(self, replica: _Replica) -> None:
        """Steps 1 to 4 of a boundary."""
        assert replica.iteration is None
        engine = self.engine
        kv = self.costs_of(replica).step(replica.tp).kv
        units = kv.page_units
        capacity = self.costs_of(replica).capacity_pages(replica.tp) * units

        # 1. arrivals
        waiting = [*replica.waiting, *replica.arrivals]
        for r in replica.arrivals:
            view = RequestView(r.id, r.position, r.prompt_tokens, r.generated, has_kv=False)
            r.priority = self.control.priority(view) or 0.0
        if replica.arrivals:
            waiting.sort(key=lambda r: (r not in replica.pinned, r.priority))
        replica.waiting, replica.arrivals, replica.unpinned = waiting, [], []

        # 2. evict
        if replica.idle_at < self.now and not one_moment(replica.idle_at, self.now):
            replica.settled = []
        self.settle_cache(replica)
        left = replica.settled
        replica.settled = []  # what is preempted counts as let go after what left on its own
        while self.pages(replica) > capacity:
            if replica.pinned:
                self.unpin(replica, replica.pinned[-1])
                self.settle_cache(replica)
                continue
            victim = replica.admitted.pop()
            # The KV of a running request's last token comes with its next step.
            self.free(replica, victim, victim.context - 1 if victim.state == "running" else victim.hit)
            self.end_stay(victim, "preempted")
            victim.stay = RefStay(victim.id, replica.gpus, self.now)
            victim.lose_kv()
            replica.waiting.insert(0, victim)
            self.result.preemptions[victim.id] += 1

        self.settle_cache(replica)
        replica.settled = []  # what an iteration that does not begin gives back leaves with those who go then
        self.trim_cache(replica)

        # 3. admit, handing out the token budget on the way
        chunks: list[tuple[_Request, int]] = []
        fresh: list[_Request] = []
        budget = max(1, engine.max_num_batched_tokens - sum(r.state == "running" for r in replica.admitted))

        def budget_left() -> int:
            return budget - sum(new for _, new in chunks)

        for r in replica.admitted:
            if r.state == "prefilling" and budget_left() > 0:
                chunks.append((r, min(budget_left(), r.context - r.prefilled)))
                if self.prefix_hits == "scheduled" and chunks[-1][1] == r.context - r.prefilled:
                    self.share(replica, r, promised=True)
        while replica.waiting:
            head = replica.waiting[0]
            if len(replica.admitted) >= engine.max_num_seqs:
                break
            if any(r.micro_batch < head.micro_batch for r in replica.admitted):
                break
            watermark = engine.free_pages * units if replica.admitted else 0
            found = self.find(replica, head)
            in_use = self.in_use(replica) if found else set()
            new = self.pages_of(head.context, kv) - len([page for page in found if page in in_use])
            if new + self.pages(replica) + watermark > capacity:
                if replica.admitted or not replica.pinned:
                    break
                self.unpin(replica, replica.pinned[-1])
                self.settle_cache(replica)
                continue
            needed = head.context - len(found) * engine.page_tokens
            if not head.arrived_kv:
                if engine.chunked_prefill:
                    if budget_left() <= 0:
                        break
                    chunks.append((head, min(budget_left(), needed)))
                else:
                    if chunks and sum(new for _, new in chunks) + needed > engine.max_num_batched_tokens:
                        break
                    chunks.append((head, needed))
                fresh.append(head)
                head.hit = head.prefilled = len(found) * engine.page_tokens
            replica.waiting.pop(0)
            if head in replica.pinned:
                replica.pinned.remove(head)
                replica.unpinned.append(head)
            replica.admitted.append(head)
            self.load(replica, head, found, head.arrived_kv)
            self.admissions += 1
            head.number = self.admissions
            head.shares = len([page for page in found if page[0] == "prompt"])
            if head.arrived_kv:
                self.share(replica, head, promised=False)
            elif self.prefix_hits == "scheduled" and chunks[-1][1] == needed:
                self.share(replica, head, promised=True)
            self.trim_cache(replica)
            head.state = "running" if head.arrived_kv else "prefilling"
            head.stay.admitted_at, head.stay.start_tokens = self.now, head.context
            if head.arrived_kv:
                head.stay.decoding_at, head.stay.iteration = self.now, replica.decodes
            head.arrived_kv = False
        replica.settled = []  # pins that gave way were let go before what leaves next
        for r in replica.waiting:
            r.arrived_kv = False

        # 4. iterate
        step = self.costs_of(replica).step(replica.tp)
        short = self.pages(replica) > step.most_kv * capacity
        running = [r for r in replica.admitted if r.state == "running"]
        expected = math.fsum(max(r.predicted_tokens, r.generated) for r in running) / max(len(running), 1)
        level = sum(length <= expected for length in step.lengths) if running and step.lengths else -1
        step = step.under(Conditions(self.version_of(replica), short, level))
        contexts = [r.context for r in running]
        new_chunks = [Chunk(new, r.prefilled) for r, new in chunks]
        chances: tuple[float, ...] = ()
        kind: Literal["prefill", "mixed", "decode"]
        if chunks and not engine.chunked_prefill:
            kind, time_s, running = "prefill", step.prefill_s(new_chunks), []
        elif chunks and not running:
            kind, time_s = "mixed", step.prefill_s(new_chunks)
        elif chunks:
            padding = len(running) * max(contexts) - sum(contexts)
            total = sum(contexts) + step.skew * padding
            kind, time_s = "mixed", step.mixed_s(len(running), total, new_chunks, in_windows(step, contexts))
            chances = step.accepted(len(running), total, in_windows(step, contexts))
            time_s += sum(chances) * step.decode(len(running), in_windows(step, contexts)).step_s(total)
        elif running:
            total = sum(contexts)
            padding = len(running) * max(contexts) - total
            curve = step.decode(len(running), in_windows(step, contexts))
            chances = step.accepted(len(running), total + step.skew * padding, in_windows(step, contexts))
            kind, time_s = "decode", (1 + sum(chances)) * curve.step_s(total + step.skew * padding)
        else:
            if replica.waiting:
                raise RuntimeError(f"request {replica.waiting[0].id} does not fit the empty replica {replica.index}")
            replica.idle_at = min(replica.idle_at, self.now)
            replica.settled = left  # what more is let go at this moment leaves with it
            return
        if replica.idle_at < self.now and not one_moment(replica.idle_at, self.now):
            replica.owed_s = 0.0
        replica.idle_at = math.inf
        if chunks and replica.loading:
            host = self.costs_of(replica).host_kv(replica.tp)
            time_s = max(time_s, host.latency_s + replica.loading * host.page_s)
        pages = self.pages(replica)
        ends_at = self.now + replica.owed_s + time_s
        replica.iteration = _Iteration(self.now, ends_at, kind, running, chunks, fresh, pages, chances)

    def cancel(self, replica: _Replica) -> None:
        """An iteration that has only just begun counts as not begun. What was evicted for it stays evicted."""
        iteration = replica.iteration
        assert one_moment(iteration.started_at, self.now)
        for r in iteration.fresh:
            replica.admitted.remove(r)
            self.free(replica, r, r.hit)
            r.stay.admitted_at = math.nan
            r.lose_kv()
        replica.waiting[:0] = iteration.fresh
        replica.pinned += [r for r in iteration.fresh if r in replica.unpinned]
        self.settle_cache(replica)
        replica.iteration = None

    def end(self, replica: _Replica) -> bool:
        """Step 5: tokens are there, finished requests and those that pause leave. Says whether there are any."""
        iteration = replica.iteration
        replica.iteration = None
        result = self.result
        result.iterations.append((iteration.started_at, self.now, replica.index, iteration.kind))
        busy_s = self.now - iteration.started_at
        result.busy_s[replica.gpus] = result.busy_s.get(replica.gpus, 0.0) + busy_s
        result.peak_pages[replica.index] = max(result.peak_pages.get(replica.index, 0), iteration.pages)
        generating = list(iteration.decoding)
        replica.decodes += bool(iteration.decoding)
        if iteration.chunks:
            result.loaded_tokens += replica.loading * self.engine.page_tokens
            replica.loading = 0
        for r, new in iteration.chunks:
            r.prefilled += new
            if r.prefilled == r.context:
                result.hit_tokens += r.hit
                self.share(replica, r, promised=False)
                r.state, r.prefilled = "running", 0
                r.stay.decoding_at, r.stay.iteration = self.now, replica.decodes
                generating.append(r)
        before = {r: r.generated for r in generating}
        for r in generating:
            r.generated += 1
            if r in iteration.decoding:
                number = r.numbers.ahead(1).tolist()[0]
                for chance in iteration.chances:
                    accepted = number < NormalDist().inv_cdf(chance)
                    r.generated += accepted and r.generated < r.limit
                r.numbers.steps += 1
            result.first_token_at.setdefault(r.id, self.now)
        handed_over = 0
        if self.chunk_tokens:
            for r in generating:
                last = r.generated == r.response_tokens
                pauses = r.generated == r.limit and not last
                if last or (r.generated // self.chunk_tokens > before[r] // self.chunk_tokens and not pauses):
                    handed_over += 1
                    if not (last or r.parent):
                        result.chunk_at[r.id, r.generated] = self.now
        replica.owed_s = handed_over * self.handover_s
        self.trim_cache(replica)
        finished = [r for r in replica.admitted if r.generated == r.response_tokens]
        for r in finished:
            replica.admitted.remove(r)
            self.free(replica, r, r.context - 1)
            r.state = "finished"
            self.end_stay(r, "finished")
            if r.parent:
                for agent in self.agents:
                    if agent.request is r:
                        agent.told_at = self.now + agent.told_s
                continue
            result.finished.add(r.id)
            result.finish_at[r.id] = self.now
            self.leave_sandbox(r)
        for r in [r for r in replica.admitted if r.calls]:
            replica.admitted.remove(r)
            self.free(replica, r, r.context - 1)
            self.end_stay(r, "tool")
            r.lose_kv()
            if self.tools.keep_kv_s and self.prefix_hits != "off":
                self.settle_cache(replica)
                if pages := self.find(replica, r):
                    r.pinned = pages
                    replica.pinned.append(r)
                    if self.tools.keep_kv_s < math.inf:
                        self.pins.append((self.now + self.tools.keep_kv_s, replica, r, len(r.tools)))
            self.call(r, replica)
        paused = [r for r in replica.admitted if r.generated == r.limit]
        for r in paused:
            self.leave_sandbox(r)
            replica.admitted.remove(r)
            self.free(replica, r, r.context - 1)
            self.end_stay(r, "paused")
            r.lose_kv()
            r.state = "paused"
            # Choice: what was to take it elsewhere at this boundary is forgotten, whether it goes on later or not.
            self.aborting.discard(r)
            self.forget_moves(r)
        return bool(finished or paused)

    # --- tool calls

    def call(self, r: _Request, home: _Replica | None) -> None:
        r.state = "acting"
        self.at_tools.append(_Call(r, home, self.now))
        self.result.tool_s.setdefault(r.id, 0.0)
        self.result.tool_wait_s.setdefault(r.id, 0.0)

    def leave_sandbox(self, r: _Request) -> None:
        """It has ended, pauses, or is dropped."""
        self.sandboxes = [other for other in self.sandboxes if other is not r]
        self.at_tools = [call for call in self.at_tools if call.request is not r]
        self.for_workers = [call for call in self.for_workers if call.request is not r]

    def begin_calls(self) -> bool:
        """Tool calls get sandboxes and workers, in order."""
        tools, before = self.tools, [(call.request, call.where) for call in self.at_tools]
        for call in self.at_tools:
            if call.where == "sandbox" and call.request.root in self.sandboxes:
                call.where = "worker"
                self.for_workers.append(call)
            elif call.where == "sandbox" and not 0 < (tools.sandboxes or 0) <= len(self.sandboxes):
                self.sandboxes.append(call.request)
                call.where, call.until = "starts", self.now + tools.start_s
            if call.where == "starts" and self.reached(call.until):
                call.where = "worker"
                self.for_workers.append(call)
        for call in list(self.for_workers):
            if not 0 < (tools.workers or 0) <= sum(other.where == "runs" for other in self.at_tools):
                self.for_workers.remove(call)
                call.where, call.takes_s = "runs", self.takes_s(call)
                call.until = self.now + call.takes_s
                for index, (prompt, length, own, delay_s, told_s) in enumerate(call.agents):
                    self.agents_so_far += 1
                    name = call.request.root.id + self.agents_so_far * AGENT
                    agent = _Request(name, name, prompt, length, tools=own, parent=call.request)
                    agent.numbers = call.request.numbers.of_sub_agent()
                    agent.path = (*call.request.path, call.request.calls_over + 1, index + 1)
                    self.agents.append(_Agent(agent, self.now + delay_s, told_s))
                self.result.tool_wait_s[call.request.id] += self.now - call.asked_at
        return before != [(call.request, call.where) for call in self.at_tools]

    def end_calls(self, at_once: bool = False) -> bool:
        """They come to their end; `at_once`: those alone that take no time and did not wait."""
        ending = [call for call in self.at_tools if call.where == "runs" and self.reached(call.until)]
        if at_once:
            ending = [call for call in ending if call.asked_at == call.until == self.now and not call.agents]
        for call in ending:
            call.where = "waits"
            self.result.tool_s[call.request.id] += call.takes_s
            if call.lost:
                self.lose(call)
            self.go_on_with(call)
        return bool(ending)

    def takes_s(self, call: _Call) -> float:
        """How long it runs, failures included; with one, or at its time-out, a sandbox may be lost."""
        tools, r, seconds = self.tools, call.request, call.request.tools[0].tool_s
        most_s = math.inf if tools.timeout is None else tools.timeout
        once, tries = min(seconds, most_s), 1
        numbers = default_rng((0, *self.sample(r.root), r.root.attempts, *r.path, r.calls_over + 1))
        if tools.on_failure != "repeat" and not r.parent:
            call.lost = numbers.random() < tools.failures or seconds > most_s
            return once
        while tries <= tools.retries and numbers.random() < tools.failures:
            tries += 1
        return once * tries

    def sample(self, r: _Request) -> tuple[int, int]:
        return r.position, r.id

    def lose(self, call: _Call) -> None:
        """Its sandbox is lost: it begins again, or is dropped."""
        r = call.request
        if r.attempts == self.tools.retries:
            self.aborting.add(r)
            self.stay_away()
            self.paused_at_tools = True
            return
        self.drop_agents(r)
        self.stay_away()  # those that wait for a worker do not get its own
        self.sandboxes.remove(r)
        r.generated, r.tools, r.attempts = 0, r.all_tools, r.attempts + 1

    def go_on_with(self, call: _Call) -> None:
        """Its own tool is over; it goes on if it waits for no sub-agent."""
        r = call.request
        if call.where != "waits" or call not in self.at_tools or any(a.request.parent is r for a in self.agents):
            return
        call.where = "over"
        if not call.lost:
            r.generated, r.tools = r.generated + r.tools[0].observation_tokens, r.tools[1:]
        if self.tools.turns == "each":
            self.came_back.append(self.come_back(call))

    def follow_agents(self) -> bool:
        """Sub-agents begin, and who waits for them is told."""
        followed = False
        for agent in list(self.agents):
            if agent in self.agents and not agent.begun and self.reached(agent.begins_at):
                agent.begun = followed = True
                self.requests.append(agent.request)
                self.by_id[agent.request.id] = agent.request
                self.result.preemptions[agent.request.id] = 0
                self.homeless.append(agent.request)
                self.house()
            if agent in self.agents and self.reached(agent.told_at):
                followed = True
                self.agents.remove(agent)
                for call in [call for call in self.at_tools if call.request is agent.request.parent]:
                    if call.where == "waits" and not any(a.request.parent is call.request for a in self.agents):
                        self.result.tool_s[call.request.id] += self.now - call.until
                    self.go_on_with(call)
        return followed

    def drop_agents(self, r: _Request) -> None:
        """Sub-agents of one that is dropped, or begins again, leave as soon as they can."""
        for agent in [agent for agent in self.agents if agent.request.parent is r]:
            self.agents.remove(agent)
            if agent.begun and agent.request.left:
                self.aborting.add(agent.request)

    def end_turn(self) -> bool:
        """Where trajectories take turns together: all have ended theirs, and are dealt together."""
        over = [call for call in self.at_tools if call.where == "over"]
        waiting = sum(call.where == "waits" for call in self.at_tools)
        if not over or len(over) + waiting < sum(r.left for r in self.requests):
            return False
        if any(self.reached(agent.told_at) for agent in self.agents):  # who waits for it is told at this very moment
            return False
        self.came_back.append(
            [r for call in sorted(over, key=lambda call: call.request.id) for r in self.come_back(call)]
        )
        return True

    def come_back(self, call: _Call) -> list[_Request]:
        """To its replica, or it is returned: it is dealt at the end of the moment."""
        r = call.request
        self.at_tools.remove(call)
        if r.generated >= r.limit:
            r.state, self.paused_at_tools = "paused", True
            self.leave_sandbox(r)
            if call.home:
                self.unpinning.append((call.home, r))
            return []
        r.state = "waiting"
        if call.home and call.home.active and not (self.tools.returns == "least_context" or call.lost):
            call.home.arrive(r, self.now)
            return []
        if call.home:
            self.unpinning.append((call.home, r))
        return [r]

    def deal_back(self) -> bool:
        """What is back from its tools and has no replica."""
        back, self.came_back = self.came_back, []
        for requests in back:
            self.homeless += requests
            self.house()
        return any(back)

    def stay_away(self) -> bool:
        """What was to be done at this boundary to those that have left for their tools: they are dropped, not moved."""
        away = {call.request: call.home for call in self.at_tools}
        for r, home in away.items():
            if r in self.aborting:
                if home:
                    self.unpinning.append((home, r))
                self.leave_sandbox(r)
                r.state = "aborted"
                self.result.aborted.add(r.id)
                self.drop_agents(r)
            self.forget_moves(r)
        return bool(self.aborting & away.keys())

    def forget_moves(self, r: _Request) -> None:
        for move in self.moves:
            if r not in move.gone:
                move.requests = [other for other in move.requests if other is not r]

    # --- actions: first noted, then settled at the boundaries of the replicas concerned

    def note(self, action: Action) -> bool:
        """Note what is to happen; False if the action is ignored."""
        if self.stop_asked:
            return False
        match action:
            case Reconfigure(node, tp, kv, way):
                # Choice: a node that has given up replicas (or is about to) cannot be laid out anew.
                old = [replica for replica in self.active() if replica.node == node]
                if not old or self.switching(node) or len(old) * self.tps[node] < self.node_gpus[node]:
                    return False
                if self.node_gpus[node] % tp:
                    raise ValueError(f"{self.node_gpus[node]} GPUs cannot be divided into replicas of {tp}")
                for replica in old:
                    replica.stopping = "switch"
                # Choice: with the engine its KV cache ends, whatever the action says of it.
                self.switches.append(_Switch(node, tp, "recompute" if way.restart else kv, way, old))
                return True
            case Migrate(ids, to, kv):
                target = self.replicas[to]
                if not target.active:
                    return False
                moving = []
                for i in dict.fromkeys(ids):
                    # Choice: the first Migrate of a request counts until it has arrived.
                    source = self.replica_of(self.by_id[i])
                    on_its_way = any(self.by_id[i] in move.requests for move in self.moves)
                    if source is not None and source.active and source is not target and not on_its_way:
                        moving.append(self.by_id[i])
                if not moving:
                    return False
                self.moves_so_far += 1
                self.moves.append(_Move(moving, target, kv, self.moves_so_far))
                return True
            case Release(indices):
                going = [replica for replica in self.active() if replica.index in indices]
                # Choice: somebody must stay, or the whole action is ignored.
                if not going or len(going) == len(self.active()):
                    return False
                for replica in going:
                    replica.stopping = "release"
                return True
            case Abort(ids):
                ids = [i for i in ids if not self.by_id[i].parent]
                leaving = [self.by_id[i] for i in ids if self.by_id[i].state == "acting"]
                for i in ids:
                    source = self.replica_of(self.by_id[i])
                    if source is not None and source.active:
                        leaving.append(self.by_id[i])
                self.aborting.update(leaving)
                return bool(leaving)
            case Launch():
                launched = [_Request(**vars(r)) for r in self.work.launched(action, len(self.own))]
                self.requests += launched
                self.by_id |= {r.id: r for r in launched}
                self.result.preemptions |= {r.id: 0 for r in launched}
                self.homeless += launched
                self.house()
                return bool(launched)
            case Extend(ids, tokens):
                further = [r for r in (self.by_id[i] for i in dict.fromkeys(ids)) if r.state == "paused"]
                for r in further:
                    r.state = "waiting"
                    r.budget = min(r.response_tokens, r.generated + tokens)
                self.homeless += further
                self.house()
                return bool(further)
            case Stop():
                self.stop_asked = True
                for replica in self.replicas:
                    if not replica.stopped:
                        replica.stopping = "stop"
                return True

    def settle(self) -> None:
        """Everything that replicas at a boundary and arrivals of this moment entail, until nothing more follows."""
        steps = (
            self.begin_calls, self.end_turn, self.stay_away, self.let_pins_go, self.leave, self.stop_replicas,
            self.arrive, self.begin_switches, self.end_switches, self.house,
        )  # fmt: skip
        followed = True
        while followed:
            followed = sum(step() for step in steps) > 0 or self.end_calls(at_once=True)  # every one of them
        stranded = [requests for _, requests in sorted(self.stranded, key=lambda item: item[0])]
        for requests in [*self.freed, *stranded]:  # replicas that start at this moment are there for them
            self.homeless += requests
            self.house()
        self.freed, self.stranded = [], []

    def at_boundary(self, replica: _Replica) -> bool:
        """Whether something can be done to the replica now; it is only asked where there is something to do."""
        if replica.iteration is not None and one_moment(replica.iteration.started_at, self.now):
            self.cancel(replica)
        return replica.iteration is None

    def leave(self) -> bool:
        """Requests to be aborted or migrated leave the replicas that are at a boundary."""
        any_left = False
        for replica in self.replicas:
            for r in [] if replica.stopped else replica.requests():  # who stays for a switch leaves after it
                move = next((move for move in self.moves if r in move.requests and r not in move.gone), None)
                if (r in self.aborting or move is not None) and self.at_boundary(replica):
                    any_left = True
                    if r in replica.admitted:
                        self.free(replica, r, r.context - 1 if r.state == "running" else r.hit)
                    self.unpin(replica, r)
                    if r in self.aborting:
                        replica.remove(r)
                        self.end_stay(r, "aborted")
                        r.state = "aborted"
                        self.result.aborted.add(r.id)
                        self.leave_sandbox(r)
                    elif move is not None:
                        if r.state == "running":
                            move.held.append((r, replica))
                        replica.remove(r)
                        self.end_stay(r, "migrated")
                        r.lose_kv()
                        r.state = "moving"
                        move.gone.append(r)
        return any_left

    def transfer_s(self, contexts: list[int], sources: list[_Replica], to: _Replica) -> float:
        same_node = all(source.node == to.node for source in sources)
        return self.costs.transfer_s(contexts, sources[0].tp, to.tp, same_node)

    def arrive(self) -> bool:
        """Migrated requests arrive; the transfer begins when the last one has left."""
        any_arrived = False
        for move in list(self.moves):
            if move.arrives_at is None and all(r in move.gone or not r.left for r in move.requests):
                move.arrives_at = self.now
                # Choice: only those that held KV have anything to transfer; the others travel with them.
                held = sorted(move.held, key=lambda item: move.requests.index(item[0]))
                if move.kv == "migrate" and held:
                    contexts = [r.context for r, _ in held]
                    move.arrives_at += self.transfer_s(contexts, [source for _, source in held], move.to)
            if move.arrives_at is not None and self.reached(move.arrives_at):
                self.moves.remove(move)
                any_arrived = any_arrived or bool(move.gone)
                arriving = [r for r in move.requests if r in move.gone]
                for r in arriving:
                    r.lose_kv()
                if move.to.stopped:
                    self.stranded.append((move.number, arriving))
                    continue
                for r in arriving:
                    r.arrived_kv = move.kv == "migrate" and any(r is q for q, _ in move.held)
                    move.to.arrive(r, self.now)
        return any_arrived

    def stop_replicas(self) -> bool:
        any_stopped = False
        for replica in self.replicas:
            if replica.stopping != "no" and not replica.stopped and self.at_boundary(replica):
                any_stopped = replica.stopped = True
                replica.stopped_at = self.now
                if replica.stopping == "release":
                    requests = replica.requests()
                    replica.admitted, replica.waiting, replica.arrivals = [], [], []
                    self.result.released_at[replica.index] = self.now
                    for r in requests:
                        self.end_stay(r, "released")
                        r.lose_kv()
                    self.freed.append(requests)
        return any_stopped

    def house(self) -> bool:
        """Deal those whose replica is gone to the active replicas, or keep them while there is none."""
        if not self.homeless or not self.active():
            return False
        self.deal_by_context(self.homeless, self.active(), lambda replica, r: replica.arrive(r, self.now))
        self.homeless = []
        return True

    def begin_switches(self) -> bool:
        begun = False
        for switch in list(self.switches):
            if self.stop_asked or switch.ends_at is not None or not all(replica.stopped for replica in switch.old):
                continue
            # Choice: those on their way to the node are unfinished there. Without any, it starts again as it was.
            coming = any(move.to in switch.old for move in self.moves)
            if not coming and not any(replica.requests() for replica in switch.old):
                switch.to_tp, switch.ends_at = self.tps[switch.node], self.now
                begun = True
                continue
            contexts = [r.context for replica in switch.old for r in replica.admitted if r.state == "running"]
            from_tp = self.tps[switch.node]
            first_use = switch.to_tp not in self.used_tps[switch.node]
            sequences = sum(len(replica.requests()) for replica in switch.old)
            gpus = self.node_gpus[switch.node]
            kv, way = switch.kv, switch.way
            cost = self.costs.switch(gpus, from_tp, switch.to_tp, contexts, sequences, kv, first_use, way)
            for replica in switch.old:
                for r in replica.requests():
                    self.end_stay(r, "switched", replica.stopped_at)
            self.used_tps[switch.node].add(switch.to_tp)
            switch.ends_at = self.now + cost.total_s
            self.result.switches.append(RefSwitch(self.now, cost))
            begun = True
        return begun

    def end_switches(self) -> bool:
        ended = False
        for switch in sorted(self.switches, key=lambda switch: switch.node):
            if self.stop_asked or switch.ends_at is None or not self.reached(switch.ends_at):
                continue
            ended = True
            self.switches.remove(switch)
            held, others = [], []
            for replica in switch.old:  # by index
                held += [r for r in replica.admitted if r.state == "running"]
                # Choice: those in the middle of their prefill come before those that waited.
                others += [r for r in replica.requests() if r.state != "running"]
                replica.admitted, replica.waiting, replica.arrivals = [], [], []
            for r in [*held, *others]:
                r.lose_kv()
            self.tps[switch.node] = switch.to_tp
            new = self.create_replicas(switch.node, self.node_gpus)
            self.deal_by_context([*held, *others], new, lambda replica, r: replica.arrive(r, self.now))
            order = [*held, *others]
            for replica in new:
                replica.arrivals.sort(key=order.index)
            if switch.kv == "migrate":
                for r in held:
                    r.arrived_kv = True
        return ended

    # --- the loop

    def reached(self, moment: float) -> bool:
        return moment <= self.now or one_moment(moment, self.now)

    def moments(self) -> Iterable[float]:
        for replica in self.replicas:
            if replica.iteration is not None:
                yield replica.iteration.ends_at
        for move in self.moves:
            if move.arrives_at is not None:
                yield move.arrives_at
        for call in self.at_tools:
            if call.where in ("starts", "runs"):
                yield call.until
        for until, *_ in self.pins:
            yield until
        for agent in self.agents:
            yield agent.told_at if agent.begun else agent.begins_at
        for switch in self.switches:
            if switch.ends_at not in (None, math.inf) and not self.stop_asked:
                yield switch.ends_at

    def next_look(self) -> list[float]:
        """When the control is asked next by its timer."""
        every_s, looks = self.control.every_s, 1
        while every_s and self.reached(looks * every_s):
            looks += 1
        return [looks * every_s] if every_s else []

    def go_on_to_next(self) -> bool:
        """The next moment at which something happens; whether the control's timer is due then."""
        moments, looks = list(self.moments()), self.next_look()
        if not moments:
            raise HaltedError
        self.now = min([*moments, *looks])
        return any(map(self.reached, looks))

    def end_iterations(self) -> set[int]:
        """Those that end now; the nodes on which responses have finished."""
        ending = [r for r in self.replicas if r.iteration is not None and self.reached(r.iteration.ends_at)]
        return {replica.node for replica in ending if self.end(replica)}

    def over(self) -> bool:
        if self.stop_asked:
            return all(replica.stopped for replica in self.replicas)
        return not any(r.left for r in self.requests)

    def begin_all(self) -> None:
        for replica in self.replicas:
            if not replica.stopped:
                if replica.arrivals and replica.iteration is not None:
                    self.at_boundary(replica)  # cancels what has only just begun, so that arrivals of this moment join
                if replica.iteration is None:
                    self.begin(replica)

    def go_on(self) -> None:
        """What this moment entails, then what tool calls that end at it do."""
        self.end_pins()
        self.settle()
        self.begin_all()
        while self.follow_agents() + self.end_calls() or self.deal_back():
            self.settle()
            self.begin_all()

    def run(self) -> None:
        self.go_on()
        while not self.over():
            looks, finished_on = self.go_on_to_next(), self.end_iterations()
            self.go_on()
            self.ask(finished_on, looks)
        self.close()

    def ask(self, finished_on: set[int], looks: bool) -> None:
        finishes, self.paused_at_tools = bool(finished_on) or self.paused_at_tools, False
        if (finishes or looks) and not self.stop_asked:
            # Choice: asked after the last finish too, though nothing can be done any more.
            for action in self.answers(finished_on, finishes, looks):
                if not self.over() and self.note(action):
                    self.result.actions.append((self.now, action))
            if not self.over():
                self.go_on()

    def answers(self, finished_on: set[int], finishes: bool, looks: bool) -> list[Action]:
        """To what has finished, then to the timer; of one moment, before anything is done."""
        methods = [self.control.on_finish] * finishes
        methods += [self.control.on_timer] * (looks and any(r.left for r in self.requests))
        found: list[Action] = []
        for method in methods:
            if not any(isinstance(action, Stop) for action in found):
                answer = method(self.view_kind(self, finished_on))
                found += [answer] if isinstance(answer, Action) else list(answer or ())
        return found

    def close(self) -> None:
        self.result.end_at = self.now
        for replica in self.replicas:
            for r in replica.requests():
                if r.stay:  # not of a switch that was broken off
                    self.end_stay(r, "stopped", replica.stopped_at)
        self.result.aborted = {r.id for r in self.own if r.state == "aborted"}
        self.result.unfinished = {r.id for r in self.own if r.state not in ("finished", "aborted")}
        self.result.generated = {r.id: r.generated for r in self.own}
        for counted in (self.result.preemptions, self.result.first_token_at, self.result.tool_s):
            for agent in [i for i in counted if i >= AGENT]:
                del counted[agent]


# ------------------------------------------------------------------------------------------------ a scoring model


@dataclass(frozen=True)
class Arrival:
    """At a moment, so many tokens of a sequence (prompt included) have come; the last one says that it is all."""

    at: float
    id: int
    tokens: int
    last: bool


def score(arrivals: Sequence[Arrival], step: StepCost, engine: EngineConfig, capacity_pages: int) -> dict[int, float]:
    """When one replica of a scoring model is done with each sequence. Everything is counted anew each time."""
    come: dict[int, int] = {}
    cached: dict[int, int] = {}
    whole: set[int] = set()
    queue: list[int] = []  # in the order in which tokens came that are not in the cache
    order: list[int] = []  # of first arrival
    scored_at: dict[int, float] = {}
    left = sorted(arrivals, key=lambda a: a.at)
    now = 0.0

    def pages(tokens: int) -> int:
        return -(-tokens // engine.page_tokens)

    def take_in(now: float, queue: list[int], after_all: bool) -> None:
        """What has come by now queues; at the end of an iteration only what came before it."""
        while (
            left
            and (left[0].at < now or one_moment(left[0].at, now))
            and (after_all or not one_moment(left[0].at, now))
        ):
            a = left.pop(0)
            if a.id not in order:
                order.append(a.id)
            come[a.id] = a.tokens
            cached.setdefault(a.id, 0)
            if a.last:
                whole.add(a.id)
            if a.id not in queue and (not after_all or cached[a.id] < a.tokens):
                queue.append(a.id)

    while left or queue:
        take_in(now, queue, after_all=True)
        if not queue:
            now = left[0].at
            continue
        work: dict[int, int] = {}
        for i in queue:
            new = min(come[i] - cached[i], engine.max_num_batched_tokens - sum(work.values()))
            if new <= 0 or len(work) == engine.max_num_seqs:
                break

            planned = {**work, i: new}
            resting = [j for j in order if cached[j] and j not in planned]
            while resting and sum(pages(n + planned.get(j, 0)) for j, n in cached.items()) > capacity_pages:
                cached[resting.pop()] = 0
            if sum(pages(n + planned.get(j, 0)) for j, n in cached.items()) > capacity_pages:
                break
            work = planned
        cut = [i for i, new in work.items() if cached[i] + new < come[i]]
        queue = [i for i in queue if i not in work]
        now += step.prefill_s([Chunk(new, cached[i]) for i, new in work.items()])
        for i, new in work.items():
            cached[i] += new
        # What comes while the iteration runs queues behind what was there; the one that was cut goes first.
        take_in(now, queue, after_all=False)
        queue = cut + [i for i in queue if i not in cut]
        for i in work:
            if i in whole and cached[i] == come[i]:
                scored_at[i] = now
                cached[i] = 0
    return scored_at

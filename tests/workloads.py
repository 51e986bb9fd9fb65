"""Costs, controls and random whole rollouts for tests of the engine."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import simpy
from hypothesis import strategies as st
from reference import RefEngine, RefRequest, RefRollout

from rlsim.cost.curve import DecodeCurve, InWindows, over_all, sum_of
from rlsim.cost.step import PLAIN_KV, Chunk, Conditions, KvShape, StepCost
from rlsim.cost.transfer import IN_PLACE, NO_HOST_KV, WAYS, HostKv, SwitchCost, SwitchWay
from rlsim.sim.actions import Abort, Extend, Migrate, Reconfigure, Release, Stop
from rlsim.sim.control import (
    Action,
    ControlContext,
    KvHandling,
    Launch,
    Prompt,
    ReplicaView,
    RequestView,
    RolloutControl,
    RolloutView,
    actions_of,
)
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import EngineConfig, PrefixHits, Request
from rlsim.sim.rollout import Rollout
from rlsim.sim.stage import GenerationStage
from rlsim.trace.turns import AgentCall, ToolCall

# --------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True)
class LinearStep(StepCost):
    """Iteration times that can be worked out by hand; all of them are multiplied by `scale`.

    A decode step of s sequences with T context tokens takes `a + s·b + t·T`, for each kink (T₀, extra) another
    `extra·(T − T₀)` above T₀, and `w` for each token in windows if `kv` has one. A prefill takes
    `a + p·new + q·new·(prior + new/2)`, summed over the chunks but for `a`.
    A mixed iteration takes both less one `a`.

    Where it is `conditional` all of them take `short` times as long with more than `most_kv` of the KV pages in use,
    `older` times more for each version of the weights since the last third one, and half as much more for each of the
    `lengths` that responses are expected to reach.
    """

    a: float = 0.0
    b: float = 0.0
    t: float = 0.0
    p: float = 0.0
    q: float = 0.0
    kinks: tuple[tuple[float, float], ...] = ()
    scale: float = 1.0
    tp: int = 1
    skew: float = 0.0
    kv: KvShape = PLAIN_KV
    w: float = 0.0
    conditional: bool = False
    most_kv: float = 1.0
    short: float = 1.0
    older: float = 0.0
    lengths: tuple[int, ...] = ()
    drawn: int = 0
    chances: tuple[float, ...] = ()
    most: int = 0  # with more sequences nothing is drafted
    until: float = math.inf  # with more tokens of context one is

    def accepted(self, batch: int, context_tokens: float, in_windows: InWindows | None = None) -> tuple[float, ...]:
        return () if batch > self.most else self.chances[: 1 if context_tokens > self.until else None]

    def _made_for(self, conditions: Conditions) -> Self:
        factor = (self.short if conditions.short else 1.0) * (1.0 + self.older * (conditions.version % 3))
        factor *= 1.0 + 0.5 * (conditions.level if self.lengths else 0)
        chances = () if conditions.short else self.chances
        return replace(self, scale=self.scale * factor, conditional=False, chances=chances)

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        knots = [0.0, *(at for at, _ in self.kinks)]
        knots.append(knots[-1] + 1.0)
        curve = DecodeCurve(batch, knots, [self.decode_s(batch, total) for total in knots])
        if self.kv.window_tokens is None:
            return curve
        window = DecodeCurve(batch, [0.0, 1.0], [0.0, self.scale * self.w])
        return sum_of([(1, curve), (1, over_all(window, self.kv.window_tokens, in_windows, self.kv.chunked))], 0.0)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """The decode curve as the docstring writes it."""
        bent = sum(extra * max(0.0, context_tokens - at) for at, extra in self.kinks)
        return self.scale * (self.a + batch * self.b + self.t * context_tokens + bent)

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        new = sum(chunk.new_tokens for chunk in chunks)
        attention = sum(chunk.new_tokens * (chunk.prior_tokens + chunk.new_tokens / 2) for chunk in chunks)
        return self.scale * (self.a + self.p * new + self.q * attention)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        if not batch:
            return self.prefill_s(chunks)
        decode_s = self.decode(batch, in_windows).step_s(context_tokens)
        return decode_s + self.prefill_s(chunks) - self.scale * self.a


@dataclass(frozen=True)
class StubCosts:
    """A machine for tests (a `RolloutCosts`).

    A switch takes `weights_s` shared by the new degree, `capture_s`, `kv_per_token_s` shared by the GPUs for each token
    that migrates, and `first_use_s` where the degree is new to the node. Weights that are loaded take as long as those
    of TP1, all graphs twice as long as a few, and a restart ten times `first_use_s` instead of that.
    """

    steps: Mapping[int, LinearStep]
    pages: Mapping[int, int]
    weights_s: float = 0.0
    capture_s: float = 0.0
    kv_per_token_s: float = 0.0
    first_use_s: float = 0.0
    transfer_base_s: float = 0.0
    transfer_per_token_s: float = 0.0
    other_node: float = 1.0  # times as long between nodes
    hosts: Mapping[int, HostKv] = field(default_factory=dict)  # by degree; none where there is none

    def step(self, tp: int) -> LinearStep:
        return self.steps[tp]

    def capacity_pages(self, tp: int) -> int:
        return self.pages[tp]

    def host_kv(self, tp: int) -> HostKv:
        return self.hosts.get(tp, NO_HOST_KV)

    def switch(
        self,
        gpus: int,
        from_tp: int,
        to_tp: int,
        contexts: Sequence[int],
        sequences: int,
        kv: KvHandling,
        first_use: bool,
        way: SwitchWay = IN_PLACE,
    ) -> SwitchCost:
        kv_s = self.kv_per_token_s * sum(contexts) / gpus if kv == "migrate" else 0.0
        weights_s = self.weights_s / (1 if way.weights == "reload" else to_tp)
        capture_s = self.capture_s * (2 if way.graphs == "all" else 1)
        return SwitchCost(weights_s, kv_s, capture_s, self.first_use_s * (10 if way.restart else first_use))

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        time_s = self.transfer_base_s + self.transfer_per_token_s * sum(contexts) / min(from_tp, to_tp)
        return time_s if same_node else time_s * self.other_node


# ------------------------------------------------------------------------------------------------------ controls
# Each is a function of the view alone, without memory: however a rollout is simulated, the answers are the same.


class Scripted(RolloutControl):
    """Base of the controls here: not used by workflows, so without an initial layout."""

    def initial_tp(self, context: ControlContext) -> int:
        return math.gcd(*context.node_gpus)


def load(replica: ReplicaView) -> int:
    """Tokens of all the replica's requests."""
    return sum(r.context_tokens for r in replica.requests)


def by_length(requests: Iterable[RequestView]) -> list[RequestView]:
    """The longest context first, ties by id."""
    return sorted(requests, key=lambda r: (-r.context_tokens, r.id))


@dataclass(frozen=True)
class Nothing(Scripted):
    """Never changes anything."""


@dataclass(frozen=True)
class At(Scripted):
    """Does this when so many responses have finished, and keeps what it saw."""

    script: Mapping[int, Action | Sequence[Action]] = field(default_factory=dict)
    seen: list[tuple[float, tuple[ReplicaView, ...]]] = field(default_factory=list)

    def on_finish(self, view: RolloutView) -> Action | Sequence[Action] | None:
        self.seen.append((view.now_s, view.replicas()))
        return self.script.get(view.finished)


#: What a rule is: of a view, and other things.
Deciding = Callable[..., Action | Iterable[Action] | None]


@dataclass(frozen=True)
class By(Scripted):
    """What a rule says at each finish, which is told these things beside the view."""

    rule: Deciding
    told: tuple[Any, ...]

    def on_finish(self, view: RolloutView) -> Action | Iterable[Action] | None:
        return self.rule(view, *self.told)


def switch_at(
    view: RolloutView, rungs: list[tuple[int, int]], kv: KvHandling, only_finished_nodes: bool, way: SwitchWay
) -> list[Action]:
    """When at most so many requests of a node are left, it gets that TP; of several rungs the last one applies."""
    falling, actions = sorted(rungs, key=lambda rung: -rung[0]), list[Action]()
    for node in view.finished_nodes if only_finished_nodes else view.nodes:
        tps = [tp for unfinished, tp in falling if 0 < view.unfinished(node) <= unfinished]
        if tps and tps[-1] != view.tp(node):
            actions.append(Reconfigure(node, tps[-1], kv, way))
    return actions


def switch_unused(view: RolloutView, tps: Sequence[int], every: int, kv: KvHandling, way: SwitchWay) -> list[Action]:
    """Every node goes through these degrees, the next whenever `every` more have finished; each is used once."""
    if view.finished % every:
        return []
    new = {node: [tp for tp in tps if tp not in view.used_tps(node)] for node in view.nodes}
    return [Reconfigure(node, tps[0], kv, way) for node, tps in new.items() if tps]


def balance(view: RolloutView, every: int, count: int, kv: KvHandling, running_only: bool) -> Action | None:
    """At every `every`-th finish, moves the `count` longest requests of the fullest replica to the emptiest."""
    replicas = sorted(view.replicas(), key=lambda replica: (load(replica), replica.index))
    if view.finished % every or len(replicas) < 2:
        return None
    moving = by_length(r for r in replicas[-1].requests if r.has_kv or not running_only)[:count]
    return Migrate(tuple(r.id for r in moving), replicas[0].index, kv) if moving else None


def gather(view: RolloutView, unfinished: int, kv: KvHandling) -> Action | None:
    """When so many are left, moves one request of every other replica to the fullest, all in one action."""
    replicas = [replica for replica in view.replicas() if replica.requests]
    if view.unfinished() > unfinished or len(replicas) < 2:
        return None
    target = max(replicas, key=lambda replica: (load(replica), -replica.index))
    moving = [replica.requests[0].id for replica in reversed(replicas) if replica is not target]
    return Migrate(tuple(moving), target.index, kv)


def shrink(view: RolloutView, finished: int, count: int, keep: int) -> Action | None:
    """Once so many have finished, releases the `count` emptiest replicas at each finish, but keeps `keep`."""
    replicas = sorted(view.replicas(), key=lambda replica: (load(replica), replica.index))
    count = min(count, len(replicas) - keep)
    if view.finished < finished or count < 1:
        return None
    return Release(tuple(replica.index for replica in replicas[:count]))


def abort_longest(view: RolloutView, unfinished: int, count: int) -> Action | None:
    """Once so many or fewer are left, drops the `count` longest contexts at each finish."""
    longest = by_length(r for replica in view.replicas() for r in replica.requests)[:count]
    return Abort(tuple(r.id for r in longest)) if longest and view.unfinished() <= unfinished else None


def launch_more(view: RolloutView, count: int, total: int) -> Action | None:
    """At each finish, launches `count` more requests until there have been `total`."""
    count = min(count, total - view.total)
    return Launch(tuple(Prompt(view.total + i) for i in range(count)), 1) if count > 0 else None


def extend_all(view: RolloutView, every: int, tokens: int) -> Action | None:
    """At every `every`-th finish, whoever has paused gets so many tokens more."""
    return None if view.finished % every else Extend(tuple(range(view.total)), tokens)


def stop_at(view: RolloutView, finished: int) -> Action | None:
    """Stops when so many responses are there."""
    return Stop() if view.finished >= finished else None


@dataclass(frozen=True)
class Together(Scripted):
    """The actions of several controls, one after the other."""

    controls: tuple[Scripted, ...]

    def on_finish(self, view: RolloutView) -> list[Action]:
        return [action for control in self.controls for action in actions_of(control.on_finish(view))]


@dataclass(frozen=True)
class Ranked(Together):
    """The same; and queues are in the order of contexts, or of a few classes."""

    classes: int  # 0: the longest context first

    def priority(self, request: RequestView) -> float | None:
        return request.context_tokens % self.classes if self.classes else -float(request.context_tokens)


@dataclass(frozen=True)
class Timed(Scripted):
    """One control at finishes, and what another would do then every so many seconds, for a while."""

    finish: Scripted
    look: Scripted
    seconds: float

    def priority(self, request: RequestView) -> float | None:
        return self.finish.priority(request)

    @property
    def every_s(self) -> float:
        return self.seconds

    def on_finish(self, view: RolloutView) -> Action | Iterable[Action] | None:
        return self.finish.on_finish(view)

    def on_timer(self, view: RolloutView) -> Action | Iterable[Action] | None:
        return self.look.on_finish(view) if view.now_s < 25.5 * self.seconds else None


# ------------------------------------------------------------------------------------------------ whole rollouts


def rolled_out(requests: list[Request], costs: Any, control: RolloutControl, env: Any = None, **stage: Any) -> Rollout:
    """One stage of generation to its end, on one GPU unless it is said otherwise."""
    usual = {"mesh": [(0,)], "tp": 1, "config": EngineConfig(), "cap_tokens": 1000}
    env = env or simpy.Environment()
    rollout = Rollout(env, GenerationStage(requests=requests, costs=costs, control=control, **(usual | stage)))
    env.run(rollout.done)
    rollout.close()
    return rollout


@dataclass(frozen=True)
class Workload(RefRollout):
    """A rollout for the engine and for its reference."""

    budget_tokens: int = 0  # of every request; 0: none

    def launched(self, launch: Launch, first_id: int) -> list[RefRequest]:
        """The requests of a launch: the sizes of the first ones again."""
        sizes = [self.requests[(first_id + i) % len(self.requests)] for i in range(len(launch.prompts))]
        if self.tools and (
            self.tools.sandboxes or self.tools.workers
        ):  # twins at one moment: who is first is left open
            sizes = [replace(size, tools=()) for size in sizes]
        again = {"generated": 0, "budget_tokens": self.budget_tokens}
        sizes = [
            replace(size, tools=tuple(call._replace(agents=()) for call in size.tools)) for size in sizes
        ]  # agents: the same
        return [replace(r, id=first_id + i, **again) for i, r in enumerate(sizes)]


def degrees(gpus: int) -> list[int]:
    """All tensor-parallel degrees that divide a number of GPUs."""
    return [tp for tp in (1, 2, 4, 8) if gpus % tp == 0]


#: GPUs of every node: the same of all, or more of some.
MESHES = ((2,), (4,), (8,), (2, 2), (4, 4), (8, 8), (8, 4), (4, 8), (5,), (6, 2), (2, 6, 4), (3, 1))


def _steps(draw: st.DrawFn, gpus: int, ties: bool) -> dict[int, LinearStep]:
    """Of the size of real ones. With `ties` all are multiples of 2⁻²⁰, so that sums have no rounding at all."""
    skew = 0.0 if ties else draw(st.sampled_from([0.0, 0.3, 1.0]))
    kinks_at = draw(st.lists(st.sampled_from([7, 64, 200, 500, 1500]), max_size=3, unique=True).map(sorted))
    if ties:
        grid = 2.0**-20
        a, b, t, p, q, bend = 4096 * grid, 64 * grid, 2 * grid, 32 * grid, 0.0, 2 * grid
        scales = {tp: 0.25 + 0.75 / tp for tp in degrees(gpus)}
    else:
        # Not drawn one by one: hypothesis would shrink them to round numbers, whose sums tie by accident.
        rng = random.Random(draw(st.integers(0, 2**32)))
        a, b, t = rng.uniform(2e-3, 2e-2), rng.uniform(1e-5, 1e-3), rng.uniform(1e-7, 1e-5)
        p, q, bend = rng.uniform(1e-5, 1e-3), rng.uniform(1e-8, 1e-6), rng.uniform(1e-7, 1e-5)
        scales = {tp: rng.uniform(0.9, 1.1) * (0.2 + 0.8 / tp) for tp in degrees(gpus)}
    kinks = tuple((float(at), bend) for at in kinks_at)
    steps = {tp: LinearStep(a, b, t, p, q, kinks, scale, tp, skew) for tp, scale in scales.items()}
    if draw(st.integers(0, 2)):
        return steps
    usage, short, older = draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])), draw(st.sampled_from([0.5, 2.0])), 0.25
    lengths = draw(st.sampled_from([(), (0, 4), (10,), (5, 20, 40, 100)]))
    more = {"conditional": True, "most_kv": usage, "short": short, "older": older, "lengths": lengths}
    return {tp: replace(step, **more) for tp, step in steps.items()}


KV: st.SearchStrategy[KvHandling] = st.sampled_from(["migrate", "recompute"])
WAY = st.sampled_from([*[IN_PLACE] * len(WAYS), *WAYS])
COUNT = st.integers(1, 4)


def by(rule: Deciding, *told: st.SearchStrategy[Any]) -> st.SearchStrategy[Scripted]:
    return st.tuples(*told).map(lambda drawn: By(rule, drawn))


def _kinds(requests: int, gpus: int) -> dict[str, st.SearchStrategy[Scripted]]:
    tps = st.sampled_from(degrees(gpus))
    left = st.integers(1, max(1, requests - 1))
    rungs = st.lists(st.tuples(left, tps), min_size=1, max_size=4)
    return {
        "nothing": st.just(Nothing()),
        "switch": by(switch_at, rungs, KV, st.booleans(), WAY),
        "unused": by(switch_unused, st.permutations(degrees(gpus)), COUNT, KV, WAY),
        "balance": by(balance, COUNT, COUNT, KV, st.booleans()),
        "gather": by(gather, left, KV),
        "shrink": by(shrink, st.integers(0, requests), COUNT, COUNT),
        "abort": by(abort_longest, left, COUNT),
        "stop": by(stop_at, left),
        "launch": by(launch_more, COUNT, st.integers(requests, requests + 12)),
        "extend": by(extend_all, COUNT, st.sampled_from([1, 10, 100])),
    }


#: Kinds whose mixtures the specification settles: nothing is on its way to a replica that goes away.
MIXTURES = (
    ("switch", "abort"),
    ("unused", "stop"),
    ("balance", "abort"),
    ("balance", "stop"),
    ("shrink", "abort"),
    ("switch", "abort", "stop"),
    ("launch", "abort"),
    ("launch", "switch"),
    ("launch", "shrink"),
    ("extend", "abort"),
    ("extend", "switch"),
    ("extend", "shrink"),
    ("extend", "balance"),
)


def controls(requests: int, gpus: int) -> st.SearchStrategy[Scripted]:
    """One control, or a mixture of several."""
    kind = _kinds(requests, gpus)
    mixtures = [st.tuples(*(kind[name] for name in names)).map(Together) for names in MIXTURES]
    return st.one_of(*kind.values(), *mixtures)


def any_controls(requests: int, gpus: int) -> st.SearchStrategy[Scripted]:
    """Mixtures of all kinds, also those where requests are on their way to a replica that goes away."""
    kind = _kinds(requests, gpus)
    some = st.lists(st.sampled_from([*kind][1:]), min_size=2, max_size=3, unique=True)
    return some.flatmap(lambda names: st.tuples(*(kind[name] for name in names)).map(Together))


@st.composite
def tool_calls(draw: st.DrawFn, id_: int, length: int, done: int, later: bool = False) -> tuple[ToolCall, ...]:
    """Those ahead of a response of so many tokens that has `done` of them: after how many, tokens observed, seconds,
    and perhaps sub-agents that need no more room, `later` than the call; of no two requests these are alike."""
    seed, calls = draw(st.integers(0, 2**32)), list[ToolCall]()
    rng, own = random.Random(seed), random.Random(100 * seed + id_)

    def agents(room: int) -> tuple[AgentCall, ...]:
        found = []
        for _ in range(own.choice([0, 0, 1, 3]) if room > 1 else 0):
            prompt = own.randint(1, room // 2)
            size = own.randint(1, room - prompt)
            call = (
                (ToolCall(own.randint(1, size - 1), 0, own.uniform(1e-3, 1.0), agents(room // 2)),) if size > 1 else ()
            )
            begins = own.choice([later * 0.5 * own.random(), own.uniform(0, 1.0)])
            found.append(AgentCall(prompt, size, call, begins, own.choice([0.0, own.random()])))
        return tuple(found)

    after = done + 1
    for _ in range(draw(st.sampled_from([0, 1, 2, 5, 20]))):
        after += rng.choice([0, rng.randint(0, min(30, length // 3))])
        observed = rng.choice([0, 1, rng.randint(0, min(100, length // 2))])
        if after + observed >= length:
            break
        seconds = rng.choice([0.0, rng.uniform(1e-4, 0.1), rng.uniform(0.1, 5.0)])
        begun = agents(length)
        calls.append(ToolCall(after, observed, seconds, begun if rng.choice([0, 0, 1]) else ()))
        after += observed + 1
    return tuple(calls)


def engines(prefix_hits: list[PrefixHits | None]) -> st.SearchStrategy[RefEngine]:
    """Any settings of the engine; without a prefix cache where one is found `None`."""
    return st.builds(
        lambda hits, **more: RefEngine(prefix_hits=hits, enable_prefix_caching=hits is not None, **more),
        page_tokens=st.sampled_from([1, 4, 16]),
        max_num_seqs=st.sampled_from([1, 2, 3, 5, 8, 64, 256]),
        max_num_batched_tokens=st.sampled_from([1, 7, 32, 100, 512, 8192]),
        chunked_prefill=st.booleans(),
        free_pages=st.sampled_from([0, 0, 1, 3]),
        hits=st.sampled_from(prefix_hits),
    )


@st.composite
def environments(draw: st.DrawFn) -> EnvironmentConfig:
    """What runs tool calls."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    slots = st.sampled_from([None, None, 1, 2, 7])
    start_s = draw(st.sampled_from([0.0, rng.uniform(1e-3, 1.0)]))
    turns = draw(st.sampled_from(["each", "together"]))
    keep_kv = draw(st.sampled_from(["idle", "idle", "pinned", rng.uniform(1e-3, 3.0)]))
    kept = ("repeat", None)
    lost = [(None, *kept)] * 3 + [(0.05, *kept), (0.5, "drop", 0), (0.5, "restart", 1), (2.0, "restart", 2)]
    timeout, on_failure, attempts = draw(st.sampled_from(lost))
    failures, retries = draw(st.sampled_from([(0.0, 0), (0.0, 0), (0.2, 1), (0.5, 2)]))
    return EnvironmentConfig(
        sandboxes=None if turns == "together" else draw(slots), start_s=start_s, workers=draw(slots), turns=turns,
        returns=draw(st.sampled_from(["same_replica", "least_context"])), keep_kv=keep_kv, timeout=timeout,
        on_failure=on_failure, failures=failures, retries=retries if attempts is None else attempts,
    )  # fmt: skip


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    deciding: Callable[[int, int], st.SearchStrategy[Scripted]] = controls,
    ties: bool = False,
    max_requests: int = 40,
    streamed: bool = False,
    prefixes: bool = False,
    most_samples: int = 4,
    offloaded: bool = False,
    timed: bool = False,
    agents: bool = False,
) -> Workload:
    """A whole rollout. Capacities are tight, so that preemption is frequent, but fit the longest request alone.

    `streamed`: somebody listens to chunks, and some requests are resumed from an earlier step.

    `prefixes`: requests of one position, `most_samples` or fewer, have one prompt, and share what is computed of it.
    `offloaded`: what the KV cache has no room for goes to host memory. `timed`: another control has a timer.
    `agents`: some requests call tools on their way.

    `deciding`: the controls. With `ties` all requests have equal prompts and lengths (but for a few in between), and
    all times but those of prefills and switches are exact.
    """
    n = draw(st.integers(1, max_requests))
    lengths = st.one_of(st.integers(1, 300), st.integers(1, 30), st.just(1), st.sampled_from([16, 100]))
    if ties:
        usual, prompt = draw(st.integers(1, 120)), draw(st.integers(1, 60))
        lengths = st.sampled_from([usual, usual, usual, usual // 2 + 1, 2 * usual])
    prompts = st.just(prompt) if ties else st.integers(1, 60)
    where = draw(environments()) if agents else None
    # Who of twins is first at one moment is left open, and of those that a waiting call of no time and sub-agents deal.
    limited = where is not None and bool(where.sandboxes or where.workers)
    samples = 1 if limited else draw(st.integers(1, most_samples))
    resumed = draw(st.sampled_from([False, False, False, True]))
    budget_tokens = draw(st.sampled_from([0, 0, 0, 1, 16, 100]))
    requests: list[RefRequest] = []
    for i in range(n):
        length = draw(lengths)
        done = draw(st.integers(0, length - 1)) if resumed else 0
        same = prefixes and i % samples > 0
        prompt_tokens = requests[-1].prompt_tokens if same else draw(prompts)
        tools = draw(tool_calls(i, length, done, limited)) if agents else ()
        predicted = length * factor if (factor := draw(st.sampled_from([0.0, 0.0, 0.3, 0.99, 1.0, 2.5]))) else 0.0
        requests.append(RefRequest(i, i // samples, prompt_tokens, length, done, budget_tokens, tools, predicted))

    node_gpus = draw(st.sampled_from(MESHES))
    gpus = math.gcd(*node_gpus)
    tp = draw(st.sampled_from(degrees(gpus)))
    engine = draw(engines(["scheduled", "prefilled"] if prefixes else [None]))
    full = [-(-(r.prompt_tokens + r.response_tokens) // engine.page_tokens) for r in requests]
    room = st.one_of(st.integers(0, max(full)), st.integers(0, sum(full)))
    capacities = {degree: max(full) + draw(room) for degree in degrees(gpus)}
    rng = random.Random(draw(st.integers(0, 2**32)))
    moving = draw(st.sampled_from([1.0, 1.0, 1.0, 0.0]))  # 0: moving takes no time at all
    costs = StubCosts(
        steps=_steps(draw, gpus, ties),
        pages=capacities,
        weights_s=moving * rng.uniform(0.01, 1.0),
        capture_s=moving * rng.uniform(0.01, 1.0),
        kv_per_token_s=moving * rng.uniform(1e-6, 1e-3),
        first_use_s=moving * rng.uniform(0.01, 1.0),
        transfer_base_s=moving * rng.uniform(1e-3, 0.1),
        transfer_per_token_s=moving * rng.uniform(1e-6, 1e-3),
        other_node=rng.uniform(1.0, 5.0),
    )
    if offloaded:
        host = st.one_of(st.integers(0, max(full)), st.integers(0, sum(full)), st.just(10**6))
        page_s = moving * rng.choice([1e-6, 1e-4, 1e-2])
        hosts = {degree: HostKv(draw(host), moving * 1e-5, page_s) for degree in degrees(gpus)}
        costs = replace(costs, hosts=hosts)
    chunk_tokens, handover_s, paused = 0, 0.0, 0
    if streamed and not (where and where.on_failure == "restart"):  # which goes with no chunks
        chunk_tokens = draw(st.sampled_from([1, 2, 7, 16, 50, 1000]))
        handover_s = draw(st.sampled_from([0.0, 2.0**-12])) if ties else rng.uniform(0.0, 0.01)
        paused = draw(st.integers(0, n - 1))
    control = draw(deciding(n, gpus))
    if draw(st.integers(0, 3)) == 0:
        control = Ranked((control,), draw(st.sampled_from([0, 1, 3])))
    if timed:
        apart = (
            draw(st.integers(1, 400)) * 2.0**-8 if ties else rng.uniform(0.5, 300) * costs.step(tp).decode_s(4, 100.0)
        )
        control = Timed(draw(st.sampled_from([control, Nothing()])), control, apart)
    return Workload(
        requests=tuple(requests[: n - paused]),
        resumed=tuple(requests[n - paused :]),
        chunk_tokens=chunk_tokens,
        handover_s=handover_s,
        budget_tokens=budget_tokens,
        node_gpus=node_gpus,
        tp=tp,
        costs=costs,
        engine=engine,
        cap_tokens=max(r.response_tokens for r in requests),
        control=control,
        routing=draw(st.sampled_from(["contiguous", "round_robin"])),
        micro_batches=draw(st.sampled_from([1, 1, 1, 2, 3, 50])),
        tools=where,
    )


@st.composite
def by_chance(draw: st.DrawFn, costs: StubCosts) -> StubCosts:
    """The same machine where a step yields what is drawn."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    chances = tuple(sorted((rng.uniform(0.05, 0.95) for _ in range(rng.choice([1, 2, 3, 7]))), reverse=True))
    until = rng.choice([math.inf, rng.uniform(10.0, 3000.0)])
    drawn, most = 1 if until < math.inf else 2**30, rng.choice([3, 8, 100])
    more = {"drawn": drawn, "chances": chances, "most": most, "until": until}
    return replace(costs, steps={tp: replace(step, **more) for tp, step in costs.steps.items()})


@st.composite
def drafted(draw: st.DrawFn, works: st.SearchStrategy[Workload]) -> Workload:
    """A random workload whose steps yield what is drawn."""
    work, common = draw(works), draw(st.sampled_from([0.0, 0.5]))

    def with_draws(given: Sequence[RefRequest]) -> tuple[RefRequest, ...]:
        return tuple(replace(r, acceptance=((r.id,), common)) for r in given)

    costs = draw(by_chance(work.costs))
    return replace(work, costs=costs, requests=with_draws(work.requests), resumed=with_draws(work.resumed))


@st.composite
def windowed(draw: st.DrawFn, **kinds: Any) -> Workload:
    """A random workload whose layers have a window, or a state of constant size."""
    work = draw(workloads(**kinds))
    page_units = draw(st.integers(1, 6))
    kv = KvShape(
        window_tokens=draw(st.one_of(st.none(), st.integers(1, 60))),
        page_units=page_units,
        late_units=draw(st.integers(0, page_units)),
        state_tokens=draw(st.sampled_from([0.0, 0.5, 7.0])),
        chunked=draw(st.booleans()),
    )
    if kv.window_tokens is None:
        kv = kv._replace(page_units=1, late_units=1, chunked=False)
    steps = {tp: replace(step, kv=kv, w=draw(st.sampled_from([0.0, 0.003]))) for tp, step in work.costs.steps.items()}
    state = -(-int(2 * kv.state_tokens) // work.engine.page_tokens)
    pages = {tp: pages + state for tp, pages in work.costs.pages.items()}
    return replace(work, costs=replace(work.costs, steps=steps, pages=pages))

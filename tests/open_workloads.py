"""Random runs of continuous generation, and of trainers that generate meanwhile, in the engine and in the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hypothesis import strategies as st
from reference import RefEngine
from reference_hybrid import HybridRollingRun, HybridRun, RefHybrid
from reference_open import OpenResult, RefCheck, RefRewards, RollingRun, _Run
from workloads import (
    COUNT,
    KV,
    LinearStep,
    Nothing,
    Ranked,
    Scripted,
    StubCosts,
    Timed,
    Together,
    _kinds,
    _steps,
    abort_longest,
    by,
    by_chance,
    degrees,
    engines,
    environments,
    tool_calls,
)

from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.transfer import HostKv
from rlsim.models.hardware import load_cluster
from rlsim.policies.hybrid_rollout import HybridRollout
from rlsim.sim.actions import Borrow, Migrate, Release
from rlsim.sim.batching import Batching, Batchings, PromptFeed
from rlsim.sim.continuous import Continuous, OpenView, Ready, Update
from rlsim.sim.control import Action, ControlContext, KvHandling, Prompt, RequestView, RolloutView, actions_of
from rlsim.sim.drawn import AcceptanceDraws
from rlsim.sim.elastic import Pieces
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.gpus import HybridReplicas
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.reward import RewardFunction, RewardJob
from rlsim.sim.run import simulate
from rlsim.sim.simulation import CallTimes, Relay, Simulation
from rlsim.trace.turns import AgentCall, ToolCall
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow
from rlsim.workflow.graph import CallKind

KINDS: tuple[CallKind, ...] = ("generate", "reward", "inference", "train", "sync")
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Rule(Continuous):
    """A batching made of one of several rules for each decision; keeps the questions about room, with its answers."""

    launches: Literal["staleness", "quota", "under_way", "one_at_a_time"] = "staleness"
    much: int = 0  # η, hundredths beyond a batch, or prompts running and waiting
    order: Literal["ready", "oldest", "longest", "all_equal"] = "ready"
    most_stale: int | None = None
    generated_again: bool = False  # those that are staler
    waits_from: int | None = None  # for prompts under way that are so stale
    weights: Update = Update()  # noqa: RUF009
    asked: list[tuple[OpenView, int]] = field(default_factory=list, compare=False, repr=False)

    def room(self, view: OpenView) -> int:
        under_way = view.running + view.waiting
        match self.launches:
            case "staleness":
                room = view.prompts * (view.version + self.much + 1) - view.admitted
            case "quota":
                room = math.floor((1 + self.much / 100) * view.prompts)
                room -= view.left_at_update + view.launched_since_update
            case "under_way":
                room = self.much - under_way
            case "one_at_a_time":
                room = int(under_way < self.much)
        self.asked.append((view, max(room, 0)))
        return max(room, 0)

    def update(self) -> Update:
        return self.weights

    def rank(self, ready: Ready) -> float:
        ranks = {"ready": ready.number, "oldest": ready.version, "longest": -max(ready.lengths), "all_equal": 0}
        return ranks[self.order]

    def usable(self, ready: Ready, staleness: int) -> bool:
        return self.most_stale is None or staleness <= self.most_stale

    def relaunches(self) -> bool:
        return self.generated_again

    def awaited(self, staleness: int) -> bool:
        return self.waits_from is not None and staleness >= self.waits_from


@dataclass(frozen=True)
class SomeCount(Batching):
    """A prompt counts if its rewards have a sum of so much."""

    least: float

    def counts(self, rewards: Sequence[float]) -> bool:
        return sum(rewards) >= self.least


@dataclass(frozen=True)
class Scoring(RewardFunction):
    """The reference's rewards for the engine; a request's row says which of the prompt's responses it is."""

    rewards: RefRewards

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.rewards.workers

    def job(self, request: Request) -> RewardJob:
        check = self.rewards.check(request.position, request.row)
        return RewardJob("sandbox", request.position, *check, check.reward > 0)


@dataclass(frozen=True)
class Noted(Scripted):
    """A control that notes down what it was asked, and what it answered."""

    control: Scripted
    notes: list[tuple[float, tuple[object, ...]]] = field(default_factory=list, compare=False, repr=False)

    @property
    def every_s(self) -> float | None:
        return self.control.every_s

    def priority(self, request: RequestView) -> float | None:
        return self.control.priority(request)

    def on_finish(self, view: RolloutView) -> list[Action]:
        return self.noted(view, self.control.on_finish(view))

    def on_timer(self, view: RolloutView) -> list[Action]:
        return self.noted(view, self.control.on_timer(view))

    def noted(self, view: RolloutView, answer: Action | Iterable[Action] | None) -> list[Action]:
        actions = actions_of(answer)
        replicas = [(one.index, one.tp, one.requests) for one in view.replicas()]
        seen = (view.finished_nodes, view.nodes, view.finished, view.total, view.unfinished(), replicas, actions)
        self.notes.append((view.now_s, seen))
        return actions


class StepTimes(CallTimes):
    """Given durations of inference, training and sync, call by call; counts the syncs that were asked for."""

    def __init__(self, spread_s: float = 0.0, pull_s: float = 0.0, **durations_s: Sequence[float]) -> None:
        self.left = {kind: list(times) for kind, times in durations_s.items()}
        self.syncs, self.spread_s, self.pull_s = 0, spread_s, pull_s
        self.parts_of: dict[str, list[list[int]]] = {"inference": [], "train": []}  # positions, by call

    def relay(self, call: Call) -> Relay:
        self.syncs += 1
        return Relay(self.left["sync"].pop(0), self.spread_s, lambda _: self.pull_s)

    def parts(self, call: Call, placement: Any, samples: Sequence[Request], *_: Any) -> list[tuple[str, float]]:
        self.syncs += call.kind == "sync"
        if call.kind in self.parts_of:
            self.parts_of[call.kind].append([request.position for request in samples])
        return [(call.name, self.left[call.kind].pop(0))]

    def pieces(self, call: Call) -> Pieces:
        raise NotImplementedError(call.name)


@dataclass
class OpenRun:
    """What the engine made of a run."""

    outcome: Outcome = field(default_factory=Outcome)
    #: By position, and which of the prompt's responses it is.
    requests: dict[tuple[int, int], Request] = field(default_factory=dict)
    launches: list[tuple[int, ...]] = field(default_factory=list)  # positions, as they were asked for together
    launched_in_update: int = 0  # prompts
    times: StepTimes = field(default_factory=StepTimes)


def longer(calls: Iterable[ToolCall], factor: float, nothing: float = 0.0) -> tuple[ToolCall, ...]:
    """The same calls with times `factor` as long, and those of no time as long as `nothing`."""

    def of(agent: AgentCall) -> AgentCall:
        times = (factor * (s or nothing) for s in (agent.delay_s, agent.told_s))
        return AgentCall(*agent[:2], longer(agent.tool_calls, factor, nothing), *times)

    return tuple(ToolCall(*call[:2], factor * (call.tool_s or nothing), tuple(map(of, call.agents))) for call in calls)


@dataclass(frozen=True)
class OpenWorkload:
    """A whole run: `sizes` has a prompt's tokens and those of its responses, over and over again.

    With `windows` training takes a step's batch in so many parts; `train_s` has the times of all parts of all steps,
    `infer_s`, if there are any, those of an inference call on the same GPU before it. `checks` are like `sizes`.
    """

    sizes: tuple[tuple[tuple[int, int], ...], ...]
    prompts: int
    rule: Rule
    train_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    node_gpus: tuple[int, ...] = (1,)
    tp: int = 1
    costs: StubCosts = StubCosts({1: LinearStep(a=1.0)}, {1: 10**6})  # noqa: RUF009
    engine: RefEngine = RefEngine()  # noqa: RUF009
    routing: Literal["contiguous", "round_robin"] = "contiguous"
    control: Scripted = Nothing()  # noqa: RUF009
    checks: tuple[tuple[RefCheck, ...], ...] = ()  # empty: rewards are not asked for
    workers: int = 1
    filter: Batching = Batching()  # noqa: RUF009
    windows: int = 0
    infer_s: tuple[float, ...] = ()
    grouped: bool = False  # training takes the responses of a prompt together
    spread_s: float = 0.0  # where replicas take new weights on their own: until all nodes have them
    pull_s: float = 0.0  # then: until a replica has them
    tools: EnvironmentConfig | None = None  # where trajectories act; None: there are none
    calls: tuple[tuple[ToolCall, ...], ...] = ()  # of trajectories, over and over again

    @property
    def rolling(self) -> bool:
        """Whether replicas take new weights each on its own."""
        return self.rule.weights.replicas == "each"

    @property
    def only_newer(self) -> bool:
        """Whether no response goes to a replica with older weights than it had."""
        return not (self.tools and self.tools.returns == "least_context")

    def each(self, way: Literal["interrupt", "drain"], spread_s: float, pull_s: float) -> OpenWorkload:
        """The same where each replica takes new weights on its own, without a control."""
        rule = replace(self.rule, weights=Update(way, self.rule.weights.kv, "each"), asked=[])
        return replace(self, rule=rule, control=Nothing(), spread_s=spread_s, pull_s=pull_s)

    def plain(self) -> OpenWorkload:
        """The same without rewards, windows or a control."""
        return replace(self, control=Nothing(), checks=(), filter=Batching(), windows=0, infer_s=(), grouped=False)

    def of_prompt(self, position: int) -> tuple[tuple[int, int], ...]:
        return self.sizes[position % len(self.sizes)]

    def tools_of(self, position: int, sample: int) -> tuple[ToolCall, ...]:
        """The tool calls of a response, as far as its length goes; every other prompt's lose no sandbox by time."""
        if not self.calls:
            return ()
        of_prompt = self.of_prompt(position)
        _, length = of_prompt[sample % len(of_prompt)]
        calls = self.calls[(position * len(of_prompt) + sample) % len(self.calls)]
        loses = self.tools is not None and self.tools.on_failure != "repeat" and position % 2
        most_s = (self.tools.timeout or math.inf) if loses else math.inf
        calls = tuple(call for call in calls if call[0] + call[1] < length and call.tool_s < most_s / 2)
        return longer(calls, 1.0 + random.Random(1000 * position + sample).random())  # of no two they are alike

    @property
    def rewards(self) -> RefRewards:
        checks = self.checks or ((RefCheck((0.0,), 1.0, 1.0),) * len(self.sizes[0]),)
        return RefRewards(self.workers, lambda at, i: checks[at % len(checks)][i % len(checks[0])], self.filter)

    @property
    def cap_tokens(self) -> int:
        return max(length for prompt in self.sizes for _, length in prompt)

    def reference(self) -> OpenResult:
        """The reference's answer."""
        return (RollingRun if self.rolling else _Run)(self).to_the_end()

    @property
    def trainer(self) -> tuple[tuple[int, ...], ...]:
        """Its GPUs, node by node."""
        return ((len(self.node_gpus) * GPUS_PER_NODE,),)

    def workflow(self) -> Workflow:
        """Generation, rewards and inference where they are asked for, training, and weights for the step after."""
        kinds = [k for k in KINDS if k != "reward" or self.checks]
        kinds = [k for k in kinds if k != "inference" or self.infer_s]
        ends = [(a, b) for a, b in (("generate", "reward"), ("generate", "inference"), ("reward", "train"))]
        ends += [("inference", "train"), ("generate", "train"), ("train", "sync")]
        edges = [Edge(a, b) for a, b in ends if {a, b} <= set(kinds)]
        calls = tuple(Call(kind, kind, "actor") for kind in kinds)
        workflow = Workflow("open", calls, (*edges, Edge("sync", "generate", lag=1)), group_advantage=self.grouped)
        streaming = workflow.streaming(["generate"], ["reward"])
        return workflow.in_windows(self.windows) if self.windows else replace(streaming, elastic=True)

    def simulation(self, run: OpenRun | None = None) -> Simulation:
        """What the engine is given; what it launches is noted down in `run`."""
        times = StepTimes(self.spread_s, self.pull_s, train=self.train_s, sync=self.sync_s, inference=self.infer_s)
        if run:
            run.times = times

        def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
            keys = [(prompt.position, prompt.first_sample + i) for prompt in launched for i in range(samples)]
            calls = [self.tools_of(*key) for key in keys]
            new = [
                Request(first_id + i, at, *self.of_prompt(at)[sample % samples], row=sample, tool_calls=calls[i])
                for i, (at, sample) in enumerate(keys)
            ]
            for request, key in zip(new, keys, strict=True):
                request.acceptance = AcceptanceDraws(key, 0.3)
            if run:
                run.launches.append(tuple(prompt.position for prompt in launched))
                run.requests |= dict(zip(keys, new, strict=True))
                assert self.rule.asked, "nothing is launched before `room` was asked"
                together = self.rule.weights.replicas == "together"
                if together and times.syncs != self.rule.asked[-1][0].version:
                    run.launched_in_update += len(launched)
            return new

        rollout = [n * GPUS_PER_NODE + gpu for n, gpus in enumerate(self.node_gpus) for gpu in range(gpus)]
        trainer = tuple(gpu for node in self.trainer for gpu in node)
        gpus = {"generate": tuple(rollout), "reward": (), "sync": (*rollout, *trainer)}
        workflow = self.workflow()
        return Simulation(
            workflow=workflow,
            plan=Plan(
                {
                    call.name: Placement(gpus.get(call.name, trainer), TrainStrategy(dp=1))
                    if call.kind in ("inference", "train")
                    else Placement(gpus[call.name])
                    for call in workflow.calls
                }
            ),
            cluster=load_cluster(f"{len(self.node_gpus) + len(self.trainer)}x8xh100"),
            control=self.control,
            initial_tp=self.tp,
            feasible_tps=tuple(self.costs.steps),
            feed=PromptFeed(self.prompts, len(self.sizes[0])),
            requests=requests,
            costs=self.costs,
            times=times,
            scoring=Scoring(self.rewards),
            config=self.engine,
            cap_tokens=self.cap_tokens,
            steps=len(self.sync_s),
            batching=Batchings((self.rule, self.filter)),
            routing=self.routing,
            environment=self.tools,
        )

    def simulate(self) -> OpenRun:
        """The engine's answer."""
        run = OpenRun()
        run.outcome = simulate(self.simulation(run))
        return run


def rules(most_prompts: int) -> st.SearchStrategy[Rule]:
    """All combinations; of a limit on what is under way, from one prompt to several batches."""
    amounts: dict[str, st.SearchStrategy[int]] = {
        "staleness": st.integers(0, 3),
        "quota": st.sampled_from([0, 30, 100, 250]),
        "under_way": st.integers(1, 3 * most_prompts),
        "one_at_a_time": st.integers(1, 2 * most_prompts),
    }
    return st.sampled_from(sorted(amounts)).flatmap(
        lambda launches: st.builds(
            Rule,
            launches=st.just(launches),
            much=amounts[launches],
            order=st.sampled_from(["ready", "oldest", "longest", "all_equal"]),
            most_stale=st.sampled_from([None, None, 0, 1, 2]),
            generated_again=st.booleans(),
            waits_from=st.sampled_from([None, None, None, 0, 1, 2]),
            weights=st.builds(
                Update,
                st.sampled_from(["interrupt", "interrupt", "drain"]),
                st.sampled_from(["recompute", "keep"]),
                st.just("together"),
            ),
        )
    )


MESHES = ((1,), (1,), (2,), (4,), (3,), (2, 2), (3, 1), (4, 2))


#: Seconds that are either nothing or more than rounding.
REAL = st.one_of(st.just(0.0), st.floats(1e-3, 20))

Clock = Literal["real", "grid", "whole"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


#: What a run may have besides a queue and updates.
Extension = Literal["rewards", "windows", "control"]
EXTENSIONS: tuple[Extension, ...] = get_args(Extension)


def abort_at_first(view: RolloutView, unfinished: int, count: int) -> Action | None:
    """So long as no more than 20 have been launched; later it would for ever abort what is launched anew."""
    return abort_longest(view, unfinished, count) if view.total <= 20 else None


MIXTURES = (
    ("switch", "abort"), ("balance", "abort"), ("gather", "abort"), ("unused", "abort"), ("shrink", "abort"),
    ("shrink", "switch"),
)  # fmt: skip


def controls(responses: int, gpus: int, lends: bool) -> st.SearchStrategy[Noted]:
    """Controls that switch, migrate, abort, and perhaps lend, for rollouts with so many responses under way."""
    kinds = _kinds(responses, gpus) | {"abort": by(abort_at_first, st.integers(1, responses), COUNT)}
    alone = [kinds[name] for name in ("switch", "unused", "balance", "gather", "abort", *["shrink"] * lends)]
    mixtures = [names for names in MIXTURES if lends or "shrink" not in names]
    mixed = [st.tuples(*(kinds[name] for name in names)).map(Together) for names in mixtures]
    return st.one_of(alone + mixed).map(Noted)


def perhaps_timed(draw: st.DrawFn, control: Scripted, clock: Clock, step: LinearStep) -> Scripted:
    """Asked at finishes alone, by a timer too, or by a timer alone; some iterations lie between two calls of that."""
    if draw(st.booleans()):
        return control
    apart = draw(st.integers(1, 30)) * (1.0 if clock == "whole" else step.decode_s(4, 100.0))
    if clock == "real":  # off the ends of iterations
        apart *= draw(st.floats(1.01, 1.09))
    return Timed(draw(st.sampled_from([control, Nothing()])), control, apart)


def times(clock: Clock, rng: random.Random, count: int, most: float) -> tuple[float, ...]:
    """So many durations of that clock; but for whole seconds, up to `most`."""
    if clock == "whole":
        return tuple(float(rng.choice([0, 1, 1, 2, 3, 5, 10, 40])) for _ in range(count))
    drawn = [rng.uniform(0.0, most) for _ in range(count)]
    return tuple(round(s * 2**20) / 2**20 if clock == "grid" else s for s in drawn)


@st.composite
def open_workloads(draw: st.DrawFn, clock: Clock = "real", always: Extension | None = None) -> OpenWorkload:
    """Whole runs. Capacities are tight, so that preemption is frequent, but fit the longest response alone.

    `clock`: times of the size of real ones, which never tie but by accident; the same as multiples of 2⁻²⁰; or whole
    seconds (every iteration takes one), so that most of what happens does so together with something else. `always`
    says what every run has; the others have it now and then.
    """
    ties = clock != "real"
    extensions = {one for one in EXTENSIONS if one == always or draw(st.sampled_from([False, False, False, True]))}
    steps, samples = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    prompts = draw(st.integers(1, 5 if samples < 3 else 3))
    lengths = st.one_of(st.integers(1, 60), st.integers(1, 12), st.just(1), st.sampled_from([16, 30]))
    prompt_tokens = st.integers(1, 30)
    if ties:
        usual, prompt = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        lengths = st.sampled_from([usual, usual, usual, usual // 2 + 1, 2 * usual])
        prompt_tokens = st.just(prompt)
    sizes = []
    for _ in range(draw(st.integers(1, 12))):
        of_prompt = draw(prompt_tokens)
        sizes.append(tuple((of_prompt, draw(lengths)) for _ in range(samples)))

    node_gpus = draw(st.sampled_from(MESHES))
    gpus = math.gcd(*node_gpus)
    tp = draw(st.sampled_from(degrees(gpus)))
    engine = draw(engines([None, "scheduled", "prefilled"]))
    full = [-(-(p + n) // engine.page_tokens) for prompt in sizes for p, n in prompt]
    room = st.one_of(st.integers(0, max(full)), st.integers(0, 3 * sum(full)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    iteration = dict.fromkeys(degrees(gpus), LinearStep(a=1.0)) if clock == "whole" else _steps(draw, gpus, ties)
    once = iteration[tp].decode_s(4, 100.0)

    def seconds(count: int, most: float) -> tuple[float, ...]:
        """Of up to so many iterations."""
        return times(clock, rng, count, once * most)

    windows = 0
    if "windows" in extensions:
        windows = draw(st.sampled_from([n for n in range(1, prompts + 1) if not prompts % n]))
    parts, often = steps * max(windows, 1), draw(st.sampled_from([0.3, 10.0, 60.0]))
    checks: list[tuple[RefCheck, ...]] = []
    least = 0
    if "rewards" in extensions:
        slow, least = draw(st.sampled_from([0.3, 3.0, 30.0])), draw(st.integers(0, samples))
        for _ in range(draw(st.integers(1, 12))):
            of_runs = [seconds(draw(st.integers(0, 3)), slow) for _ in range(samples)]
            rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=samples, max_size=samples))
            limit_s = draw(st.sampled_from([4.0, 100.0])) * (1.0 if clock == "whole" else once)
            checks.append(tuple(RefCheck(r, limit_s, reward) for r, reward in zip(of_runs, rewards, strict=True)))
        checks[::2] = [(RefCheck(runs_s[:1], 100.0, 1.0),) * samples for (runs_s, *_), *_ in checks[::2]]  # these count
    moving = {
        name: seconds(1, most)[0]
        for name, most in [("weights_s", 10.0), ("capture_s", 3.0), ("first_use_s", 3.0), ("transfer_base_s", 1.0)]
    }
    if not ties:
        moving |= {"kv_per_token_s": once * rng.uniform(0, 0.1), "transfer_per_token_s": once * rng.uniform(0, 0.1)}
    control: Scripted = Nothing()
    if "control" in extensions:
        control = draw(controls(draw(st.integers(1, 2 * prompts * samples)), gpus, lends=not windows))
        inner = control.control
        if draw(st.integers(0, 3)) == 0:
            inner = Ranked((inner,), draw(st.sampled_from([0, 1, 3])))
        control = Noted(perhaps_timed(draw, inner, clock, iteration[tp]))
    return OpenWorkload(
        sizes=tuple(sizes),
        prompts=prompts,
        rule=draw(rules(prompts)),
        train_s=seconds(parts, often / max(windows, 1)),
        infer_s=seconds(parts, often / max(windows, 1)) if windows and draw(st.booleans()) else (),
        sync_s=seconds(steps, often / 3),
        node_gpus=node_gpus,
        tp=tp,
        costs=StubCosts(iteration, {degree: max(full) + draw(room) for degree in iteration}, other_node=2.0, **moving),
        engine=engine,
        routing=draw(st.sampled_from(["contiguous", "round_robin"])),
        control=control,
        checks=tuple(checks),
        workers=draw(st.sampled_from([1, 1, 2, 4])),
        filter=SomeCount(least) if least else Batching(),
        windows=windows,
        grouped=draw(st.booleans()),
    )


@st.composite
def rolling(draw: st.DrawFn, clock: Clock, always: Extension | None = None) -> OpenWorkload:
    """Runs whose replicas take new weights each on its own."""
    work = draw(open_workloads(clock, always))
    seconds = REAL if clock == "real" else st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0])
    return work.each(draw(st.sampled_from(["interrupt", "drain"])), draw(seconds), draw(seconds))


@st.composite
def open_agents(draw: st.DrawFn) -> OpenWorkload:
    """Runs of trajectories that call tools."""
    work = draw(draw(st.sampled_from([open_workloads, rolling]))("real"))
    calls = tuple(draw(tool_calls(i, work.cap_tokens, 0)) for i in range(draw(st.integers(1, 12))))
    if draw(st.booleans()):
        calls = tuple(tuple(call._replace(agents=()) for call in own) for own in calls)
    else:
        calls = tuple(longer(own, 1.0, 0.003) for own in calls)
    tools = draw(environments()).model_copy(update={"turns": "each"})
    if work.node_gpus != (work.tp,):  # who of several is first is left open, and those of replicas alike begin together
        tools = tools.model_copy(update={"sandboxes": None, "workers": None, "returns": "same_replica"})
    return replace(work, calls=calls, tools=tools)


@st.composite
def open_drafted(draw: st.DrawFn) -> OpenWorkload:
    """Runs, of trajectories too, whose steps yield what is drawn."""
    work = draw(st.one_of(open_workloads("real"), rolling("real"), open_agents()))
    return replace(work, costs=draw(by_chance(work.costs)))


# ---- trainers that generate meanwhile --------------------------------------------------------------------------------


def borrow_while(view: RolloutView, missing: float, spread: str, kv: KvHandling, back: str) -> Iterator[Action]:
    """Borrows while the batch lacks so much (a share of it; below 0: at any time and twice); shares out; gives back."""
    if missing < 0 and view.finished % 2 == 0:
        yield Borrow()
        yield Borrow()
    elif view.borrowable and view.batch_missing > missing:
        yield Borrow()
    borrowed, replicas = view.borrowed, view.replicas()
    if not borrowed:
        return
    wanted = view.wanted_back
    if back == "unasked" and view.finished % 3 == 2:
        yield Release(borrowed)
    elif wanted and back == "one_by_one":
        yield Release(borrowed[-1:])
    elif wanted and back == "with_own":
        yield Release(tuple(replica.index for replica in replicas))
    elif wanted and (back != "when_there" or view.batch_missing <= 0.5):
        yield Release(borrowed)
    elif spread != "none":
        fullest = max(replicas, key=lambda replica: (len(replica.requests), -replica.index))
        emptiest = min(replicas, key=lambda replica: (len(replica.requests), -replica.index))
        surplus = (len(fullest.requests) - len(emptiest.requests)) // 2
        moving = [r.id for r in reversed(fullest.requests) if spread == "all" or not r.has_kv][:surplus]
        if moving and emptiest.index in borrowed:
            yield Migrate(tuple(moving), emptiest.index, kv)


@dataclass(frozen=True)
class Policy(Scripted):
    """`hybrid_rollout` itself, which remembers: each run begins with a new one."""

    made: dict[str, Any]
    context: ControlContext
    present: list[tuple[float, HybridRollout]] = field(default_factory=list, compare=False, repr=False)

    def on_finish(self, view: RolloutView) -> list[Action]:
        if not self.present or self.present[-1][0] > view.now_s:
            self.present.append((0.0, HybridRollout(**self.made)))
            self.present[-1][1].setup(self.context)
        self.present[-1] = view.now_s, self.present[-1][1]
        return actions_of(self.present[-1][1].on_finish(view))


class NotedHybrid(Noted):
    """Notes down, too, what it was shown of GPUs that it may borrow."""

    def noted(self, view: RolloutView, answer: Action | Iterable[Action] | None) -> list[Action]:
        shown = view.borrowable, view.borrowed, view.wanted_back, view.batch_missing, view.idle
        actions = super().noted(view, answer)
        now_s, seen = self.notes[-1]
        self.notes[-1] = now_s, (*seen, shown)
        return actions


@dataclass(frozen=True)
class HybridWorkload(OpenWorkload):
    """A whole run whose trainer has these replicas."""

    hybrid: RefHybrid = None  # type: ignore[assignment]

    @property
    def only_newer(self) -> bool:
        return not self.rolling

    def reference(self) -> OpenResult:
        return (HybridRollingRun if self.rolling else HybridRun)(self).to_the_end()

    @property
    def trainer(self) -> tuple[tuple[int, ...], ...]:
        firsts = [(len(self.node_gpus) + node) * GPUS_PER_NODE for node in range(len(self.hybrid.node_gpus))]
        return tuple(tuple(range(at, at + n)) for at, n in zip(firsts, self.hybrid.node_gpus, strict=True))

    def simulation(self, run: OpenRun | None = None) -> Simulation:
        hybrid, domains = self.hybrid, self.hybrid.domains
        there = HybridReplicas(
            self.trainer, hybrid.tp, hybrid.costs, hybrid.load_s, "sync", lambda gpu: domains[gpu // GPUS_PER_NODE]
        )
        return replace(super().simulation(run), hybrid=there)


def borrowing(draw: st.DrawFn, work: OpenWorkload) -> Scripted:
    """A control that borrows."""
    if draw(st.sampled_from([False, False, True])):
        made = {"until": draw(st.sampled_from([0.1, 0.4, 1.0])), "spread": draw(st.booleans()), "kv": draw(KV)}
        samples = len(work.sizes[0])
        context = ControlContext(
            costs=work.costs,
            feasible_tps=tuple(work.costs.steps),
            infeasible={},
            node_gpus=work.node_gpus,
            cap_tokens=work.cap_tokens,
            page_tokens=work.engine.page_tokens,
            requests=work.prompts * samples,
            prompt_tokens=max(prompt for of in work.sizes for prompt, _ in of),
            max_num_seqs=work.engine.max_num_seqs,
            windows=work.windows,
        )
        return Policy(made, context)
    return draw(
        by(
            borrow_while,
            st.sampled_from([-1.0, 0.0, 0.0, 0.4]),
            st.sampled_from(["none", "waiting", "all", "all"]),
            KV,
            st.sampled_from(["at_once", "at_once", "one_by_one", "with_own", "when_there", "unasked"]),
        )
    )


@st.composite
def trainers(draw: st.DrawFn, work: OpenWorkload, clock: Clock) -> RefHybrid:
    """Replicas on another kind of GPU than generation's, whose pages are tight too."""
    node_gpus = draw(st.sampled_from([(1,), (1,), (2,), (4,), (2, 2)]))
    tp = draw(st.sampled_from(degrees(math.gcd(*node_gpus))))
    own = work.costs
    rng = random.Random(draw(st.integers(0, 2**32)))
    faster = {"whole": 1.0, "grid": draw(st.sampled_from([0.5, 1.0, 1.5])), "real": rng.uniform(0.3, 2)}[clock]
    step: LinearStep = own.steps[work.tp]
    once = step.decode_s(4, 100.0)
    full = [-(-(p + n) // work.engine.page_tokens) for prompt in work.sizes for p, n in prompt]
    pages = max(full) + draw(st.one_of(st.integers(0, max(full)), st.integers(0, 3 * sum(full))))
    load = draw(st.sampled_from([0, 1, 3, 10, 40]))
    load_s = float(load) if clock == "whole" else round(once * rng.uniform(0, load) * 2**20) / 2**20
    costs = replace(
        own,
        steps={tp: replace(step, scale=faster * step.scale, tp=tp)},
        pages={tp: pages},
        transfer_base_s=own.transfer_base_s * draw(st.sampled_from([0.5, 1.0, 2.0])),
        hosts={tp: draw(st.sampled_from(HOSTS))} if own.hosts else {},
    )
    nodes = len(work.node_gpus) + len(node_gpus)
    domains = draw(st.sampled_from([tuple(range(nodes)), (0,) * nodes, (*range(nodes - 1), 0)]))
    return RefHybrid(node_gpus, tp, costs, load_s, domains)


HOSTS = (HostKv(3, 0.0, 1.0), HostKv(10, 0.0, 0.0), HostKv(1000, 0.0, 2.0**-10))


@st.composite
def hybrid_workloads(draw: st.DrawFn, clock: Clock = "real", always: Extension | None = None) -> HybridWorkload:
    """Runs as of `open_workloads`, with replicas on the trainer's GPUs; in some each one takes weights on its own."""
    work = draw(draw(st.sampled_from([open_workloads, open_workloads, rolling]))(clock, always))
    if draw(st.sampled_from([False, False, True])):
        hosts = {tp: draw(st.sampled_from(HOSTS)) for tp in work.costs.steps}
        work = replace(work, costs=replace(work.costs, hosts=hosts))
    others: list[Scripted] = [work.control.control] if isinstance(work.control, Noted) else []
    control = NotedHybrid(
        perhaps_timed(draw, Together((*others, borrowing(draw, work))), clock, work.costs.step(work.tp))
    )
    return HybridWorkload(**{**vars(work), "control": control, "hybrid": draw(trainers(work, clock))})

"""Random runs of continuous generation, in the engine and in the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hypothesis import strategies as st
from reference import RefEngine
from reference_open import OpenResult, simulate_open
from test_engine import FixedWatermark
from test_systems import Checks
from workloads import LinearStep, Nothing, StubCosts, _steps, degrees

from rlsim.cost.strategy import TrainStrategy
from rlsim.hardware import load_cluster
from rlsim.sim.batching import PromptFeed
from rlsim.sim.continuous import Continuous, OpenView, Ready, Update
from rlsim.sim.control import Prompt
from rlsim.sim.elastic import Pieces
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.run import simulate
from rlsim.sim.simulation import CallTimes, Relay, Simulation
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow

WORKFLOW = Workflow(
    "open",
    (Call("generate", "generate", "actor"), Call("train", "train", "actor"), Call("weight_sync", "sync", "actor")),
    (Edge("generate", "train"), Edge("train", "weight_sync"), Edge("weight_sync", "generate", lag=1)),
)
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Rule(Continuous):
    """A batching made of one of several rules for each decision; keeps the questions about room, with its answers."""

    launches: Literal["staleness", "quota", "under_way", "one_at_a_time"] = "staleness"
    much: int = 0  # η, hundredths beyond a batch, or prompts running and waiting
    order: Literal["ready", "oldest", "longest", "all_equal"] = "ready"
    most_stale: int | None = None
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

    def awaited(self, staleness: int) -> bool:
        return self.waits_from is not None and staleness >= self.waits_from


class StepTimes(CallTimes):
    """Given durations of training and sync, step by step; counts the syncs that were asked for."""

    def __init__(
        self, train_s: Sequence[float], sync_s: Sequence[float], spread_s: float = 0.0, pull_s: float = 0.0
    ) -> None:
        self.left = {"train": list(train_s), "sync": list(sync_s)}
        self.syncs, self.spread_s, self.pull_s = 0, spread_s, pull_s

    def relay(self, call: Call) -> Relay:
        return Relay(self.parts(call)[0][1], self.spread_s, lambda _: self.pull_s)

    def parts(self, call: Call, *_: Any) -> list[tuple[str, float]]:
        self.syncs += call.kind == "sync"
        return [(call.name, self.left[call.kind].pop(0))]

    def pieces(self, call: Call) -> Pieces:
        raise NotImplementedError(call.name)


@dataclass
class OpenRun:
    """What the engine made of a run."""

    outcome: Outcome
    requests: dict[tuple[int, int], Request]  # by position and which of the prompt's responses it is
    launches: list[tuple[int, ...]]  # positions, as they were asked for together
    launched_in_update: int  # prompts


@dataclass(frozen=True)
class OpenWorkload:
    """A whole run: `sizes` has a prompt's tokens and those of its responses, over and over again."""

    sizes: tuple[tuple[tuple[int, int], ...], ...]
    prompts: int
    rule: Rule
    train_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    node_gpus: tuple[int, ...] = (1,)
    tp: int = 1
    costs: StubCosts = StubCosts({1: LinearStep(a=1.0)}, {1: 10**6})  # noqa: RUF009
    engine: RefEngine = RefEngine(1, 256, 8192, False, 0)  # noqa: RUF009
    routing: Literal["contiguous", "round_robin"] = "contiguous"
    spread_s: float = 0.0  # where replicas take new weights on their own: until all nodes have them
    pull_s: float = 0.0  # then: until a replica has them

    def of_prompt(self, position: int) -> tuple[tuple[int, int], ...]:
        return self.sizes[position % len(self.sizes)]

    def reference(self) -> OpenResult:
        """The reference's answer."""
        return simulate_open(
            self.of_prompt,
            prompts=self.prompts,
            batching=self.rule,
            train_s=self.train_s,
            sync_s=self.sync_s,
            node_gpus=self.node_gpus,
            tp=self.tp,
            costs=self.costs,
            engine=self.engine,
            routing=self.routing,
        )

    def simulation(self, run: OpenRun | None = None) -> Simulation:
        """What the engine is given; what it launches is noted down in `run`."""
        times = StepTimes(self.train_s, self.sync_s, self.spread_s, self.pull_s)

        def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
            keys = [(prompt.position, sample) for prompt in launched for sample in range(samples)]
            new = [Request(first_id + i, at, *self.of_prompt(at)[sample]) for i, (at, sample) in enumerate(keys)]
            if run:
                run.launches.append(tuple(prompt.position for prompt in launched))
                run.requests |= dict(zip(keys, new, strict=True))
                assert self.rule.asked, "nothing is launched before `room` was asked"
                together = self.rule.weights.replicas == "together"
                if together and times.syncs != self.rule.asked[-1][0].version:
                    run.launched_in_update += len(launched)
            return new

        nodes = len(self.node_gpus)
        rollout = [n * GPUS_PER_NODE + gpu for n, gpus in enumerate(self.node_gpus) for gpu in range(gpus)]
        trainer = nodes * GPUS_PER_NODE
        engine = self.engine
        return Simulation(
            workflow=WORKFLOW,
            plan=Plan(
                {
                    "generate": Placement(tuple(rollout)),
                    "train": Placement((trainer,), TrainStrategy(dp=1)),
                    "weight_sync": Placement((*rollout, trainer)),
                }
            ),
            cluster=load_cluster(f"{nodes + 1}x8xh100"),
            control=Nothing(),
            initial_tp=self.tp,
            feasible_tps=tuple(self.costs.steps),
            feed=PromptFeed(self.prompts, len(self.sizes[0])),
            requests=requests,
            costs=self.costs,
            times=times,
            scoring=Checks(),
            config=FixedWatermark(
                page_tokens=engine.page_tokens,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                chunked_prefill=engine.chunked_prefill,
                pages=engine.watermark_pages,
            ),
            cap_tokens=max(length for prompt in self.sizes for _, length in prompt),
            steps=len(self.train_s),
            batching=self.rule,
            routing=self.routing,
        )

    def simulate(self) -> OpenRun:
        """The engine's answer."""
        run = OpenRun(Outcome(), {}, [], 0)
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


Clock = Literal["real", "grid", "whole"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


@st.composite
def open_workloads(draw: st.DrawFn, clock: Clock = "real") -> OpenWorkload:
    """Whole runs. Capacities are tight, so that preemption is frequent, but fit the longest response alone.

    `clock`: times of the size of real ones, which never tie but by accident; the same as multiples of 2⁻²⁰; or whole
    seconds (every iteration takes one), so that most of what happens does so together with something else.
    """
    ties = clock != "real"
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
    engine = RefEngine(
        page_tokens=draw(st.sampled_from([1, 4, 16])),
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 5, 64, 256])),
        max_num_batched_tokens=draw(st.sampled_from([1, 7, 32, 100, 8192])),
        chunked_prefill=draw(st.booleans()),
        watermark_pages=draw(st.sampled_from([0, 0, 1, 3])),
    )
    full = [-(-(p + n) // engine.page_tokens) for prompt in sizes for p, n in prompt]
    room = draw(st.one_of(st.integers(0, max(full)), st.integers(0, 3 * sum(full))))
    rng = random.Random(draw(st.integers(0, 2**32)))
    iteration = {tp: LinearStep(a=1.0)} if clock == "whole" else _steps(draw, gpus, ties)
    if clock == "whole":
        whole = st.sampled_from([0, 1, 1, 2, 3, 5, 10, 40])
        train_s, sync_s = (draw(st.lists(whole, min_size=steps, max_size=steps)) for _ in range(2))
    else:
        once = iteration[tp].decode_s(4, 100.0)
        often = draw(st.sampled_from([0.3, 10.0, 60.0]))
        train_s, sync_s = ([once * rng.uniform(0.0, most) for _ in range(steps)] for most in (often, often / 3))
        if ties:
            train_s, sync_s = ([round(s * 2**20) / 2**20 for s in times] for times in (train_s, sync_s))
    return OpenWorkload(
        sizes=tuple(sizes),
        prompts=prompts,
        rule=draw(rules(prompts)),
        train_s=tuple(map(float, train_s)),
        sync_s=tuple(map(float, sync_s)),
        node_gpus=node_gpus,
        tp=tp,
        costs=StubCosts(iteration, dict.fromkeys(iteration, max(full) + room)),
        engine=engine,
        routing=draw(st.sampled_from(["contiguous", "round_robin"])),
    )

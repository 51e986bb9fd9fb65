"""Random runs whose trainer generates meanwhile, in the engine and in the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hypothesis import strategies as st
from open_workloads import (
    GPUS_PER_NODE,
    REAL,
    Clock,
    Extension,
    Noted,
    OpenRun,
    OpenWorkload,
    Rule,
    open_workloads,
    perhaps_timed,
)
from reference import RefEngine
from reference_hybrid import HybridRollingRun, HybridRun, RefHybrid
from reference_open import RefCheck
from reference_steps import RefCalls, simulate_steps
from workloads import KV, LinearStep, Scripted, StubCosts, Together, _kinds, degrees

from rlsim.cost.transfer import HostKv
from rlsim.policies.hybrid_rollout import HybridRollout
from rlsim.sim.batching import Batching
from rlsim.sim.borrowing import HybridReplicas
from rlsim.sim.control import (
    Action,
    Borrow,
    ControlContext,
    KvHandling,
    Migrate,
    Prompt,
    Release,
    RolloutView,
    actions_of,
)
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.run import simulate
from rlsim.sim.simulation import Simulation


@dataclass(frozen=True)
class BorrowWhile(Scripted):
    """Borrows while the batch lacks so much, or at any time and twice; shares out; gives back, perhaps one by one."""

    missing: float  # share of a batch; below 0: asks for it whatever there is
    spread: Literal["none", "waiting", "all"]
    kv: KvHandling
    back: Literal["at_once", "one_by_one", "with_own", "when_there", "unasked"]

    def on_finish(self, view: RolloutView) -> Iterator[Action]:
        if self.missing < 0 and view.finished % 2 == 0:
            yield Borrow()
            yield Borrow()
        elif view.borrowable and view.batch_missing > self.missing:
            yield Borrow()
        borrowed = view.borrowed
        if not borrowed:
            return
        wanted = view.wanted_back
        if self.back == "unasked" and view.finished % 3 == 2:
            yield Release(borrowed)
        elif wanted and self.back == "one_by_one":
            yield Release(borrowed[-1:])
        elif wanted and self.back == "with_own":
            yield Release(tuple(replica.index for replica in view.replicas()))
        elif wanted and (self.back != "when_there" or view.batch_missing <= 0.5):
            yield Release(borrowed)
        else:
            yield from self.shares(view)

    def shares(self, view: RolloutView) -> Iterator[Action]:
        if self.spread == "none":
            return
        fullest = max(view.replicas(), key=lambda replica: (len(replica.requests), -replica.index))
        emptiest = min(view.replicas(), key=lambda replica: (len(replica.requests), -replica.index))
        surplus = (len(fullest.requests) - len(emptiest.requests)) // 2
        moving = [r.id for r in reversed(fullest.requests) if self.spread == "all" or not r.has_kv][:surplus]
        if moving and emptiest.index in view.borrowed:
            yield Migrate(tuple(moving), emptiest.index, self.kv)


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

    def way(self) -> dict[str, Any]:
        kind = HybridRollingRun if self.rolling else HybridRun
        return {**super().way(), "kind": kind, "hybrid": self.hybrid}

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
        st.builds(
            BorrowWhile,
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
    work = draw(open_workloads(clock, always))
    if draw(st.sampled_from([False, False, True])):
        hosts = {tp: draw(st.sampled_from(HOSTS)) for tp in work.costs.steps}
        work = replace(work, costs=replace(work.costs, hosts=hosts))
    others: list[Scripted] = [work.control.control] if isinstance(work.control, Noted) else []
    if draw(st.sampled_from([False, False, True])):
        seconds = REAL if clock == "real" else st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0])
        way: Literal["interrupt", "drain"] = draw(st.sampled_from(("interrupt", "drain")))
        work, others = work.each(way, draw(seconds), draw(seconds)), []
    control = NotedHybrid(
        perhaps_timed(draw, Together((*others, borrowing(draw, work))), clock, work.costs.step(work.tp))
    )
    return HybridWorkload(**{**vars(work), "control": control, "hybrid": draw(trainers(work, clock))})


# ---- a rollout for each step ----------------------------------------------------------------------------------------


@dataclass
class StepsRun:
    """What the engine made of a run."""

    outcome: Outcome
    requests: list[Request]  # in the order of their launch


@dataclass(frozen=True)
class StepsWorkload:
    """A whole run of steps whose trainer generates: see `reference_steps.simulate_steps`."""

    sizes: tuple[tuple[tuple[int, int], ...], ...]
    prompts: int
    lag: int
    windows: int
    train_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    checks_s: tuple[float, ...]  # of responses, over and over again; empty: nothing is scored
    workers: int
    node_gpus: tuple[int, ...]
    tp: int
    costs: StubCosts
    engine: RefEngine
    cap_tokens: int
    control: NotedHybrid
    hybrid: RefHybrid
    grouped: bool

    def of_prompt(self, position: int) -> tuple[tuple[int, int], ...]:
        return self.sizes[position % len(self.sizes)]

    def check_s(self, position: int, sample: int) -> float:
        return self.checks_s[(position + sample) % len(self.checks_s)]

    def reference(self) -> list[RefCalls]:
        """The reference's answer."""
        return simulate_steps(
            self.of_prompt,
            prompts=self.prompts,
            lag=self.lag,
            windows=self.windows,
            grouped=self.grouped,
            train_s=self.train_s,
            sync_s=self.sync_s,
            check_s=self.check_s if self.checks_s else None,
            workers=self.workers,
            node_gpus=self.node_gpus,
            tp=self.tp,
            costs=self.costs,
            engine=self.engine,
            cap_tokens=self.cap_tokens,
            control=self.control,
            hybrid=self.hybrid,
        )

    def simulate(self) -> StepsRun:
        """The engine's answer: that of continuous generation, with a rollout for each step in its place."""
        samples, prompts = len(self.sizes[0]), self.prompts * len(self.sync_s) if self.checks_s else 0
        checks = [[RefCheck((self.check_s(at, i),), 1e9, 1.0) for i in range(samples)] for at in range(prompts)]
        open_ended = HybridWorkload(
            sizes=self.sizes,
            prompts=self.prompts,
            rule=Rule(),
            train_s=self.train_s,
            sync_s=self.sync_s,
            node_gpus=self.node_gpus,
            tp=self.tp,
            costs=self.costs,
            engine=self.engine,
            control=self.control,
            checks=tuple(map(tuple, checks)),
            workers=self.workers,
            windows=self.windows,
            grouped=self.grouped,
            hybrid=self.hybrid,
        )
        made: list[Request] = []

        def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
            keys = [(prompt.position, sample) for prompt in launched for sample in range(samples)]
            new = [
                Request(first_id + i, at, *self.of_prompt(at)[sample], row=sample)
                for i, (at, sample) in enumerate(keys)
            ]
            made.extend(new)
            return new

        what = open_ended.simulation()
        workflow = what.workflow
        if not self.windows:
            edges = [replace(edge, grain="stage") for edge in workflow.edges]
            edges = [replace(e, lag=1 + self.lag, exact=True) if e.source == "sync" else e for e in edges]
            workflow = replace(workflow, edges=tuple(edges), elastic=False)
        outcome = simulate(replace(what, workflow=workflow, batching=Batching(), requests=requests))
        return StepsRun(outcome, made)


@st.composite
def steps_workloads(draw: st.DrawFn, clock: Clock = "real") -> StepsWorkload:
    """Runs of a few steps, with the sizes, costs and engines of continuous ones."""
    work = draw(open_workloads(clock))
    windows = draw(st.sampled_from([0, *(n for n in range(1, work.prompts + 1) if not work.prompts % n)]))
    steps = len(work.sync_s)
    once = max(*work.sync_s, *work.train_s, 1e-3)
    most = draw(st.sampled_from([0.1, 1.0, 5.0]))
    rng = random.Random(draw(st.integers(0, 2**32)))

    def seconds(count: int) -> tuple[float, ...]:
        if clock == "whole":
            return tuple(float(rng.choice([0, 1, 1, 2, 3, 5, 10, 40])) for _ in range(count))
        times = [most * once * rng.uniform(0, 1) for _ in range(count)]
        return tuple(round(s * 2**20) / 2**20 if clock == "grid" else s for s in times)

    responses = work.prompts * len(work.sizes[0])
    kinds = _kinds(responses, math.gcd(*work.node_gpus))
    others = draw(st.sampled_from(["nothing", "nothing", "switch", "unused", "balance", "shrink"]))
    control = Together((draw(kinds[others]), borrowing(draw, work)))
    return StepsWorkload(
        sizes=work.sizes,
        prompts=work.prompts,
        lag=0 if windows else draw(st.sampled_from([0, 1, 1])),
        windows=windows,
        train_s=seconds(steps * max(windows, 1)),
        sync_s=work.sync_s,
        checks_s=seconds(draw(st.sampled_from([0, 7, 11]))),
        workers=draw(st.sampled_from([1, 2, 4])),
        node_gpus=work.node_gpus,
        tp=work.tp,
        costs=work.costs,
        engine=work.engine,
        cap_tokens=work.cap_tokens,
        control=NotedHybrid(perhaps_timed(draw, control, clock, work.costs.step(work.tp))),
        hybrid=draw(trainers(work, clock)),
        grouped=work.grouped and bool(windows),
    )

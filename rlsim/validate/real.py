"""Part `real`: REAL's published figures (SYSTEMS: parameter reallocation and plan search) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlsim.experiment.result import Result
from rlsim.search import Dependency, Options, Problem
from rlsim.validate import parts
from rlsim.validate.parts import Section
from rlsim.validate.published import published_section
from rlsim.validate.rows import Row
from rlsim.validate.runs import run
from rlsim.workflow import ppo


@dataclass(frozen=True)
class Published:
    """One published plan: the nodes of every call, its seconds, and the iteration's."""

    nodes: Mapping[str, tuple[int, int]]  # first node, how many
    call_s: Mapping[str, float]
    iteration_s: float
    eager_generate_s: float  # without CUDA graphs
    eager_iteration_s: float


_BOTH, _FIRST, _SECOND = (0, 2), (0, 1), (1, 1)
_CALLS = ("generate", "reward_score", "ref_log_prob", "values", "train_critic", "train")
PLANS = {
    "published-plan": Published(
        dict(zip(_CALLS, (_BOTH, _FIRST, _SECOND, _BOTH, _SECOND, _FIRST), strict=True)),
        dict(zip(_CALLS, (16.3, 6.0, 8.0, 4.7, 28.1, 26.6), strict=True)),
        iteration_s=64.0,
        eager_generate_s=34.5,
        eager_iteration_s=82.2,
    ),
    "heuristic": Published(
        dict.fromkeys(_CALLS, _BOTH),
        dict(zip(_CALLS, (44.2, 7.3, 7.6, 6.8, 24.3, 24.7), strict=True)),
        iteration_s=122.6,
        eager_generate_s=104.6,
        eager_iteration_s=183.0,
    ),
}

#: Mean gain in throughput of searched plans over the heuristic, over the published settings with a context of 2K.
PUBLISHED_GAIN = 1.54

row = partial(Row, "real")


def section(_: parts.Options) -> Section:
    """Every figure (about two minutes, most of it the search for plans)."""
    plans, scaling = (run(name, overrides={"workflow.steps": 5}) for name in ("real_7b_7b", "real_weak_scaling"))
    return published_section("real", rows(plans, scaling))


def rows(plans: Result, scaling: Result) -> Iterator[Row]:
    """Every figure with rlsim's value."""
    yield from _list_scheduling()
    found, steps = call_seconds(plans), step_seconds(plans)
    for name, published in PLANS.items():
        for call, seconds in published.call_s.items():
            yield row(name, f"{call}_s", seconds, found[name, call])
        yield row(name, "iteration_s", published.iteration_s, steps["", name], "from rlsim's own costs")
    gain = steps["", "heuristic"] / steps["", "published-plan"]
    yield row("published-plan", "over the heuristic", 122.6 / 64.0, gain)
    by_case = step_seconds(scaling)
    cases = dict.fromkeys(case for case, _ in by_case)
    gains = [by_case[case, "megatron"] / by_case[case, "real"] for case in cases]
    spread = ", ".join(f"{gain:.2f}" for gain in gains)
    yield row("weak-scaling", "searched over heuristic, mean", PUBLISHED_GAIN, float(np.mean(gains)), spread)


def _list_scheduling() -> Iterator[Row]:
    """Iteration times from the published seconds of the calls; the rule is that of the engine and of the search."""
    outside_s = outside_calls_s()
    for name, published in PLANS.items():
        for eager in (False, True):
            of = published.eager_iteration_s if eager else published.iteration_s
            case = f"{name}-eager" if eager else name
            yield row(case, "iteration_s, scheduled", of, scheduled_s(published, eager), "published calls")
            note = "published calls and seconds outside calls"
            if not (eager and name == "heuristic"):
                yield row(case, "iteration_s, with outside", of, scheduled_s(published, eager, outside_s), note)


def outside_calls_s() -> float:
    """Seconds per call that lie in no call: of the heuristic without CUDA graphs, whose calls run one by one."""
    heuristic = PLANS["heuristic"]
    calls_s = sum(heuristic.call_s.values()) - heuristic.call_s["generate"] + heuristic.eager_generate_s
    return (heuristic.eager_iteration_s - calls_s) / len(heuristic.call_s)


def scheduled_s(published: Published, eager: bool = False, outside_s: float = 0.0) -> float:
    """The steady iteration time of list scheduling; `outside_s` is added to every call."""
    workflow = ppo(reward_first=False)  # its runtime waits for data alone
    names = [call.name for call in workflow.calls if call.kind != "sync"]
    seconds = {**published.call_s, **({"generate": published.eager_generate_s} if eager else {})}
    options = [
        Options(
            call=name,
            first_gpu=np.array([8 * published.nodes[name][0]]),
            gpus=np.array([8 * published.nodes[name][1]]),
            time_s=np.array([seconds[name] + outside_s]),
            resident_bytes=np.zeros(1),
            active_bytes=np.zeros(1),
        )
        for name in names
    ]
    edges = [Dependency(e.source, e.target, e.lag) for e in workflow.edges if {e.source, e.target} <= set(names)]
    again = [Dependency("train", "generate", 1), Dependency("train_critic", "values", 1)]
    problem = Problem(options, [*edges, *again], [], gpus=16, memory_bytes=1.0, order=names)
    return float(problem.cost_s([[0] * len(names)])[0])


def call_seconds(result: Result) -> dict[Any, float]:
    """Mean seconds of every call, by system and call."""
    calls = result.calls.assign(seconds=lambda c: c["end_at"] - c["start_at"])
    return calls.groupby(["system", "call"])["seconds"].mean().to_dict()


def step_seconds(result: Result) -> dict[tuple[str, str], float]:
    """Steady seconds of a step, by case and system: without the first and the last, which overlap on one side only."""
    groups = result.steps.groupby(["case", "system"])["step_time_s"]
    return {(str(case), str(system)): float(times.iloc[1:-1].mean()) for (case, system), times in groups}

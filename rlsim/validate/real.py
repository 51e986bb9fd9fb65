"""Part `real`: REAL's published figures (SYSTEMS: parameter reallocation and plan search) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.run import run
from rlsim.search import Dependency, Options, Problem
from rlsim.validate import parts
from rlsim.validate.charts import errors_chart
from rlsim.validate.parts import Section
from rlsim.validate.rows import Row, markdown, summarise, table
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

#: Open inputs that are changed one at a time, and together.
_SLOW_LINK = {"intra": {"name": "nvlink", "bytes_per_s": "150 GB/s", "latency_s": "0.6 us"}}
_EAGER_SAMPLING = {"engine.sampling_per_logit": 60e-6 / 128256}


row = partial(Row, "real")

_INTRODUCTION = """\
Execution plans for PPO: LLaMA-3 7B actor and critic, two nodes of 8 H100. Prompts and responses of 1,024 tokens each,
512 a step, 8 mini-batches. "Scheduled" takes the published seconds of the calls and the rule by which both the engine
and the search start calls; all else is rlsim's own.

"""
_READING = """\

How to read the errors:

- **List scheduling.** The published calls of the heuristic hold all GPUs one after another and add up to 114.9 s; the
  published iteration takes 122.6 s. So 7.7 s lie in no call, and no order of calls can bring them back: from the calls
  alone the iteration is 6% short there and 11% under the searched plan. Taking what is missing from one figure that is
  not compared here (the heuristic without CUDA graphs: 1.28 s a call, controller and data between calls), the three
  other iteration times come out within 3% ("with outside").
- **Generation** is that of a serving engine; the released code decodes several times slower. Its published script
  sorts the logits of every sequence to sample: 60 us a sequence explain most of it, but that number is read off the
  published seconds, not measured.
- **TP 8.** Every call of the heuristic takes longer in the paper, inference too. Collectives at a third of NCCL's
  measured rate would explain it; which version and settings were used is not published.
- **Recomputation** of activations is on by default in the released code, but the published pipeline of the actor is
  faster than that allows.
"""


def run_experiments() -> tuple[Result, Result]:
    """The results that `rows` takes (a minute)."""
    short = {"workflow.steps": 5}
    return run("real_7b_7b", overrides=short), run("real_weak_scaling", overrides=short)


def section(_: parts.Options) -> Section:
    """Every figure (about two minutes, most of it the search for plans)."""
    found = tuple(rows(*run_experiments()))
    text = "".join((_INTRODUCTION, table(found), _READING))
    return Section(found, tuple(summarise(found, depth=1)), text, chart=errors_chart(found))


def rows(plans: Result, scaling: Result) -> Iterator[Row]:
    """Every figure with rlsim's value."""
    yield from _list_scheduling()
    found, steps = call_seconds(plans), step_seconds(plans)
    for name, published in PLANS.items():
        for call, seconds in published.call_s.items():
            yield row(name, f"{call}_s", "output", seconds, found[name, call])
        yield row(name, "iteration_s", "output", published.iteration_s, steps["", name], "from rlsim's own costs")
    gain = steps["", "heuristic"] / steps["", "published-plan"]
    yield row("published-plan", "over the heuristic", "output", 122.6 / 64.0, gain)
    by_case = step_seconds(scaling)
    cases = dict.fromkeys(case for case, _ in by_case)
    gains = [by_case[case, "megatron"] / by_case[case, "real"] for case in cases]
    spread = ", ".join(f"{gain:.2f}" for gain in gains)
    yield row("weak-scaling", "searched over heuristic, mean", "output", PUBLISHED_GAIN, float(np.mean(gains)), spread)


def _list_scheduling() -> Iterator[Row]:
    """Iteration times from the published seconds of the calls; the rule is that of the engine and of the search."""
    outside_s = outside_calls_s()
    for name, published in PLANS.items():
        for eager in (False, True):
            of = published.eager_iteration_s if eager else published.iteration_s
            case = f"{name}-eager" if eager else name
            yield row(case, "iteration_s, scheduled", "output", of, scheduled_s(published, eager), "published calls")
            note = "published calls and seconds outside calls"
            if not (eager and name == "heuristic"):
                yield row(
                    case, "iteration_s, with outside", "output", of, scheduled_s(published, eager, outside_s), note
                )


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


def call_seconds(result: Result) -> dict[tuple[str, str], float]:
    """Mean seconds of every call, by system and call."""
    calls = result.calls.assign(seconds=lambda c: c["end_at"] - c["start_at"])
    rows = calls.groupby(["system", "call"], as_index=False)["seconds"].mean()
    return {(str(r.system), str(r.call)): float(r.seconds) for r in rows.itertuples()}


def step_seconds(result: Result) -> dict[tuple[str, str], float]:
    """Steady seconds of a step, by case and system: without the first and the last, which overlap on one side only."""
    groups = result.steps.groupby(["case", "system"])["step_time_s"]
    return {(str(case), str(system)): float(times.iloc[1:-1].mean()) for (case, system), times in groups}


def open_inputs() -> str:
    """A table of what the calls come to when an input that the paper leaves open is changed."""
    experiment, _, _ = load_experiment("real_7b_7b")
    systems = [s for s in experiment.systems if s != "real"]
    cluster = {**_cluster(), **_SLOW_LINK}
    recompute = {"training.recompute": "none"}
    settings: dict[str, dict[str, Any]] = {
        "as shipped": {},
        "activations kept, nothing recomputed": recompute,
        "sampling that sorts logits, 60 us a sequence": _EAGER_SAMPLING,
        "NVLink collectives at a third": {"cluster": cluster},
        "all three": {**recompute, **_EAGER_SAMPLING, "cluster": cluster},
    }
    table = []
    for what, changes in settings.items():
        result = run("real_7b_7b", overrides={**changes, "systems": systems, "workflow.steps": 3})
        found, steps = call_seconds(result), step_seconds(result)
        ratios = [found[name, call] / s for name, plan in PLANS.items() for call, s in plan.call_s.items()]
        within = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        iterations = [f"{steps['', name]:.1f}" for name in PLANS]
        gain = steps["", "heuristic"] / steps["", "published-plan"]
        spans = [f"{min(r):.2f}–{max(r):.2f}" for r in (ratios[:6], ratios[6:])]
        table.append((what, f"{within} of {len(ratios)}", *spans, *iterations, f"{gain:.2f}"))
    headings = (
        "setting", "calls within 25%", "ratios, published plan", "ratios, heuristic", "plan s", "heuristic s", "gain",
    )  # fmt: skip
    return markdown(headings, table)


def _cluster() -> dict[str, Any]:
    from rlsim.hardware import load_cluster

    return load_cluster("2x8xh100").model_dump(mode="json")

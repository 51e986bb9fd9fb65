"""Part `real`: REAL's published figures (SYSTEMS: parameter reallocation and plan search) beside rlsim's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from evidence.validate import parts
from evidence.validate.parts import Section
from evidence.validate.published import figures, published_section, told
from evidence.validate.rows import markdown, number
from rlsim.workflow import ppo
from rlsim.workflow.search import Dependency, Options, Problem

PLANS = ("published-plan", "heuristic")


def section(options: parts.Options) -> Section:
    """Every figure (about two minutes, most of it the search for plans)."""
    found: dict[str, Any] = {name: told(result) for name, result in figures(options, "real").results().items()}
    pairs = {case: (own["megatron"]["steady_s"], own["real"]["steady_s"]) for case, own in found["scaling"].items()}
    found |= {**scheduled(options), "mean_gain": float(np.mean([slow / fast for slow, fast in pairs.values()]))}
    cells = [(case, number(slow), number(fast), f"{slow / fast:.2f}") for case, (slow, fast) in pairs.items()]
    scaled = markdown(("setting", "heuristic s", "searched s", "gain"), cells)
    return published_section(options, "real", found, scaling=scaled)


def call_published_s(options: parts.Options) -> dict[str, dict[str, float]]:
    """The published seconds of every call, by plan."""
    found: dict[str, dict[str, float]] = {name: {} for name in PLANS}
    for row in figures(options, "real").rows:
        if row.case in found and row.quantity.endswith("_s") and row.quantity != "iteration_s":
            found[row.case][row.quantity.removesuffix("_s")] = float(row.value)
    return found


def scheduled(options: parts.Options) -> dict[str, dict[str, float]]:
    """Iteration times from the published seconds of the calls, by the rule of the engine and of the search; with the
    seconds that lie outside calls, and without.

    These are of the heuristic without CUDA graphs, whose calls run one by one.
    """
    given, calls = figures(options, "real").given, call_published_s(options)
    eager = {name: {**calls[name], "generate": given[name]["eager_generate_s"]} for name in PLANS}
    one_by_one_s = sum(eager["heuristic"].values())
    outside_s = (given["heuristic"]["eager_iteration_s"] - one_by_one_s) / len(eager["heuristic"])
    found: dict[str, dict[str, float]] = {"scheduled": {}, "with_outside": {}}
    for name in PLANS:
        for ending, call_s in (("", calls[name]), ("-eager", eager[name])):
            for kind, extra_s in (("scheduled", 0.0), ("with_outside", outside_s)):
                found[kind][name + ending] = iteration_s(given[name]["nodes"], call_s, extra_s)
    return found


def iteration_s(nodes: Mapping[str, tuple[int, int]], call_s: Mapping[str, float], outside_s: float = 0.0) -> float:
    """The steady iteration time of list scheduling; `nodes`: each call's first and how many. `outside_s` is added to
    every call."""
    workflow = ppo(reward_first=False)  # its runtime waits for data alone
    names = [call.name for call in workflow.calls if call.kind != "sync"]
    options = [
        Options(
            call=name,
            first_gpu=np.array([8 * nodes[name][0]]),
            gpus=np.array([8 * nodes[name][1]]),
            time_s=np.array([call_s[name] + outside_s]),
            resident_bytes=np.zeros(1),
            active_bytes=np.zeros(1),
        )
        for name in names
    ]
    edges = [Dependency(e.source, e.target, e.lag) for e in workflow.edges if {e.source, e.target} <= set(names)]
    again = [Dependency("train", "generate", 1), Dependency("train_critic", "values", 1)]
    problem = Problem(options, [*edges, *again], [], gpus=16, memory_bytes=1.0, order=names)
    return float(problem.cost_s([[0] * len(names)])[0])

"""A searched plan and what the estimator says of it: for people, for programs, and to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.charts import drawn, templates
from rlsim.base.refusals import refuse
from rlsim.cost.memory import RESERVED_BYTES
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.planning import PlanSpace
from rlsim.experiment.schema import Experiment
from rlsim.policies.plan import REAL, part_of
from rlsim.policies.relaxed import Lagged
from rlsim.workflow import Plan
from rlsim.workflow.search import Budget, Found, Improvement
from rlsim.workflow.search.greedy import start
from rlsim.workflow.search.scheduling import schedule

#: What the table of calls has of a strategy.
_OF_STRATEGY = ("gpus", "tp", "pp", "dp", "micro_batches", "zero_stage", "offload")


@dataclass(frozen=True)
class PlanReport:
    """What a search found for an experiment."""

    experiment: Experiment
    space: PlanSpace
    found: Found
    lag: int = 0  # updates that generation is behind

    @cached_property
    def plan(self) -> Plan:
        return self.space.plan(self.found.plan)

    @property
    def as_parts(self) -> list[dict[str, Any]]:
        """The plan as parts of a system: `{plan: {calls: …}}` and, where generation is behind, `{lagged: …}`."""
        return [part_of(self.plan, self.space.workflow), *([{"lagged": {"lag": self.lag}}] if self.lag else [])]

    @cached_property
    def start_cost_s(self) -> float:
        """Seconds of an iteration under the plan that the search begins with: the fastest option of each call alone."""
        problem = self.space.problem
        return float(problem.cost_s([start(problem)])[0])

    def sides(self) -> pd.DataFrame:
        """One row for generation and one for all other calls, where generation has GPUs of its own.

        `time_s`: of an iteration if the other side took no time, new weights included; `idle`: the share of the
        iteration for which this side waits for the other.
        """
        single, plan = self.space.problem.single, list(self.found.plan)
        calls_s, moves_s = single.seconds(plan)
        kinds = [call.kind for call in self.space.calls]
        rows = []
        for side in ("generation", "other calls"):
            its = [(kind == "generate") == (side == "generation") for kind in kinds]
            alone_s = [time_s if mine else 0.0 for time_s, mine in zip(calls_s, its, strict=True)]
            time_s = single.iteration_s(schedule(single.graph, alone_s, moves_s, single.meshes(plan)))
            rows.append({"side": side, "time_s": time_s, "idle": max(1 - time_s / self.found.cost_s, 0.0)})
        return pd.DataFrame(rows)

    def calls(self) -> pd.DataFrame:
        """One row per call: GPUs, degrees, micro-batches, seconds (with the data's way), bytes on each GPU."""
        problem = self.space.problem
        (seconds,), _ = problem.durations(np.array([self.found.plan]))
        rows = []
        for call, index, time_s in zip(self.space.calls, self.found.plan, seconds.tolist(), strict=True):
            first, option = self.space.options[call.name][index]
            row = {"call": call.name, "model": call.model, "first_gpu": first}
            row |= {name: getattr(option.strategy, name) for name in _OF_STRATEGY}
            if call.kind == "generate":
                row["zero_stage"] = None
            row |= {"time_s": time_s, "resident_bytes": option.resident_bytes, "active_bytes": option.active_bytes}
            rows.append(row)
        return pd.DataFrame(rows).astype({"micro_batches": "Int64", "zero_stage": "Int64"})

    def reallocations(self) -> pd.DataFrame:
        problem = self.space.problem
        _, (seconds,) = problem.durations(np.array([self.found.plan]))
        moves = zip(problem.reallocations, seconds.tolist(), strict=True)
        return pd.DataFrame([{"source": one.source, "target": one.target, "time_s": s} for one, s in moves])

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest GPU over the iteration."""
        return float(self.space.problem.peak_bytes([self.found.plan])[0]) + RESERVED_BYTES

    def as_json(self) -> dict[str, Any]:
        found = self.found
        calls = self.calls().astype(object)
        return {
            "experiment": self.experiment.name,
            "method": found.method,
            "seed": found.seed,
            "plans_in_space": self.space.problem.space,
            "options": {call.name: len(self.space.options[call.name]) for call in self.space.calls},
            "evaluations": found.evaluations,
            "scheduled": found.scheduled,
            "elapsed_s": found.elapsed_s,
            "iteration_time_s": found.cost_s,
            "start_iteration_time_s": self.start_cost_s,
            **({"least_iteration_time_s": found.least_s, "sides": self.sides().to_dict("records")} if self.lag else {}),
            "peak_bytes": self.peak_bytes,
            "calls": calls.where(calls.notna(), None).to_dict("records"),
            "reallocations": self.reallocations().to_dict("records"),
            "improvements": [asdict(improvement) for improvement in found.improvements],
            **{key: value for part in self.as_parts for key, value in part.items()},
        }


def search_plan(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    method: str = "descent",
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    lag: int = 0,
    most_plans: float | None = None,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> PlanReport:
    """Search an execution plan for an experiment, as `rlsim plan` does; the budget is 10 s unless one is given.

    With a `lag` generation is so many updates behind, on GPUs of its own, and the split of the GPUs is searched
    too. With `most_plans` of each call its fastest options are kept, so that there are no more plans (REAL's
    pruning). Costs are those of the first step's lengths under the experiment's first seed. Raises `RlsimError` for
    whatever does not exist or fit.
    """
    experiment, _, folder = load_experiment(source, overrides)
    refuse("rlsim plan", cases=experiment.cases)
    if seconds is None and evaluations is None:
        seconds = 10.0
    loaded = LoadedExperiment.of(experiment, folder)
    workflow = Lagged(lag=lag).rewired(loaded.algorithm) if lag else loaded.algorithm
    plans = PlanSpace(PlacedExperiment(loaded, workflow, None, REAL()), most_plans=most_plans or math.inf)
    space, found = plans.search(method, Budget(seconds, evaluations), seed=seed, on_improvement=on_improvement)
    return PlanReport(experiment, space, found, lag)


def improvement_chart(report: PlanReport) -> Any:
    """The best plan's seconds over the time of the search."""
    found = report.found
    points = [*((one.elapsed_s, one.best_cost_s) for one in found.improvements), (found.elapsed_s, found.cost_s)]
    told = f"{found.method}, seed {found.seed}: {found.evaluations:,} of {report.space.problem.space:.2g} plans"
    rows = [{"elapsed_s": elapsed_s, "best_s": best_s} for elapsed_s, best_s in points]
    return drawn(templates("plan")["search"], {"name": report.experiment.name, "told": told, "points": rows})

"""How fast and how good the plan searches are: PPO with a 7B critic and reward model, actors of 7B to 70B.

    python benchmarks/plan_search.py                  # a minute a method and setting
    python benchmarks/plan_search.py --seconds 600    # what "best" is measured against in docs/plans.md
    python benchmarks/plan_search.py --quick          # 8 GPUs only, seconds

Each search starts from the same problem; building that (the costs of all options) is timed apart. `time_to_…` is when a
search first came within 5% or 1% of the best plan that any method of the run found in that setting. The last line of
output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.planning import PlanSpace
from rlsim.experiment.simulator import Simulator
from rlsim.workflow.search import Budget, Found, Problem, find_best

SETTINGS: dict[str, dict[str, Any]] = {
    "7b-7b-8": {"cluster": "8xh100", "workflow.prompts": 256},
    "13b-7b-16": {"cluster": "2x8xh100", "model": "llama-3-13b", "workflow.prompts": 512},
    "34b-7b-32": {"cluster": "4x8xh100", "model": "llama-3-34b", "workflow.prompts": 1024},
    "70b-7b-64": {"cluster": "8x8xh100", "model": "llama-3-70b", "workflow.prompts": 2048},
}
QUICK = "7b-7b-8"


def problem_of(changes: dict[str, Any]) -> Problem:
    """The plan problem of a setting, its look-ups warm."""
    experiment, _, folder = load_experiment("real_weak_scaling", {"cases": {}, **changes})
    return PlanSpace(Simulator(LoadedExperiment.of(experiment, folder)).placed()).problem


def rows(setting: str, found: list[Found]) -> Iterator[dict[str, Any]]:
    """One row per method."""
    best = min(one.cost_s for one in found)
    for one in found:
        within = {
            share: next((i.elapsed_s for i in one.improvements if i.best_cost_s <= best * (1 + share)), None)
            for share in (0.05, 0.01)
        }
        yield {
            "setting": setting,
            "method": one.method,
            "evals_per_s": one.evaluations / one.elapsed_s,
            "scheduled_per_s": one.scheduled / one.elapsed_s,  # the others are left out by a lower bound of their own
            "time_to_5pct_s": within[0.05],
            "time_to_1pct_s": within[0.01],
            "best_cost_s": one.cost_s,
        }


def main() -> None:
    """Run all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of each search")
    parser.add_argument("--quick", action="store_true", help="8 GPUs only, at most 3 s a search")
    arguments = parser.parse_args()
    seconds = min(arguments.seconds, 3.0) if arguments.quick else arguments.seconds
    table: list[dict[str, Any]] = []
    for setting, changes in SETTINGS.items():
        if arguments.quick and setting != QUICK:
            continue
        start = time.perf_counter()
        problem = problem_of(changes)
        built_s = time.perf_counter() - start
        print(f"{setting}: {problem.space:.3g} plans, costs of all options in {built_s:.1f} s", file=sys.stderr)
        budget = Budget(seconds=seconds)
        found = [find_best([problem], method, budget, seed=0)[1] for method in ("descent", "mcmc")]
        table += rows(setting, found)
        for row in table[-len(found) :]:
            marks = ["never" if row[k] is None else f"{row[k]:.2f} s" for k in ("time_to_5pct_s", "time_to_1pct_s")]
            print(
                f"  {row['method']:8} {row['evals_per_s']:9,.0f} plans/s, to 5% {marks[0]}, to 1% {marks[1]}, "
                f"best {row['best_cost_s']:.3f} s",
                file=sys.stderr,
            )
    print(json.dumps(table))


if __name__ == "__main__":
    main()

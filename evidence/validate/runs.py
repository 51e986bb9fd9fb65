"""Experiments as the validation runs them, and every number that it takes from their results, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.experiment import run as experiments
from rlsim.experiment.result import Result


class Run(Schema):
    """An experiment, shipped or spelled out, and what is set in it."""

    experiment: str | dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)

    def result(self, more: Mapping[str, Any] = MappingProxyType({})) -> Result:
        return run(self.experiment, {**self.set, **more})


def run(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})) -> Result:
    """`rlsim.run`, without worlds: what is compared with published figures is the calibration itself."""
    return experiments.run(source, overrides={**overrides, "certainty": 0})


def told(result: Result) -> dict[str, Any]:
    """What `by_case` says; of a result of one case without a name, of that case."""
    cases = by_case(result)
    return cases[""] if [*cases] == [""] else cases


def by_case(result: Result) -> dict[str, Any]:
    """By case and system the numbers of the summary and:

    - `generate_s` and so on: mean seconds of each call; `scored_s`: from the start of generation to the last score;
    - `steady_s`: mean seconds of a step without the first and the last, which overlap on one side only;
    - `every`, `short`, `long`: means of all steps, of a kind of round.
    """
    steps, key = result.steps, ["case", "system"]
    found: dict[Any, dict[str, Any]] = _by(result.summary().set_index(key))
    calls = result.calls.assign(seconds=result.calls["end_at"] - result.calls["start_at"])
    for (*at, call), mean in _by(calls.groupby([*key, "call"])[["seconds"]].mean()).items():
        found[tuple(at)][f"{call}_s"] = mean["seconds"]
    of_kind = {kind: rows.groupby([*key, "seed", "step"]) for kind, rows in calls.groupby("kind")}
    if {"reward", "generate"} <= of_kind.keys():
        scored = of_kind["reward"]["end_at"].max() - of_kind["generate"]["start_at"].min()
        for at, seconds in scored.groupby(key).mean().to_dict().items():
            found[at]["scored_s"] = seconds
    kinds = pd.concat([steps.assign(round="every"), steps])
    for (*at, kind), means in _by(kinds.groupby([*key, "round"]).mean(numeric_only=True)).items():
        found[tuple(at)][kind] = means
    for at, times in steps.groupby(key)["step_time_s"]:
        found[at]["steady_s"] = float(times.iloc[1:-1].mean())
    cases: dict[str, Any] = {}
    for (case, system), own in found.items():
        cases.setdefault(case, {})[system] = own
    return cases


def _by(frame: pd.DataFrame) -> dict[Any, dict[str, Any]]:
    return {at: {str(name): value for name, value in row.items()} for at, row in frame.to_dict("index").items()}

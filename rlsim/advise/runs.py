"""The runs that an advice rests on: all systems here, and the best on other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.advise.scaling import resized, scaling_rows
from rlsim.errors import PolicyError, RlsimError
from rlsim.experiment.job import Execute
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.run import run_loaded
from rlsim.experiment.systems import PartSpec, SystemSpec
from rlsim.experiment.worlds import Progress
from rlsim.hardware import Cluster


@dataclass(frozen=True)
class Runner:
    """Runs the experiment with other settings, on the same responses."""

    source: str | Path | Mapping[str, Any]
    settings: Mapping[str, Any]
    execute: Execute
    progress: Progress | None

    def __call__(
        self, what: str, settings: Mapping[str, Any], optional: Collection[str], *, what_if: bool = False
    ) -> Result:
        """The results; systems named in `optional` are left out with a note where they do not fit.

        `what_if`: with the worth of what is assumed.
        """

        def told(done: int, total: int, name: str) -> None:
            if self.progress:
                self.progress(done, total, f"{what}: {name}" if name else what)

        loaded = load_experiment(self.source, {**self.settings, **settings})
        return run_loaded(*loaded, execute=self.execute, progress=told, optional=optional, what_if=what_if)


def _split_of(part: PartSpec) -> int:
    """The GPUs that generate by themselves, if the part says how many; else 0."""
    return int(part.parameters.get("rollout_gpus") or 0)


def _resplit(spec: SystemSpec, gpus: int, before: int) -> SystemSpec:
    """The system on another number of GPUs: the same share of them generates, in whole replicas."""

    def resplit(part: PartSpec) -> PartSpec:
        if not _split_of(part):
            return part
        tp = part.parameters.get("tp", 1)
        whole = tp if isinstance(tp, int) else 1
        count = max(round(_split_of(part) * gpus / before / whole), 1) * whole
        return replace(part, parameters={**part.parameters, "rollout_gpus": count})

    return replace(spec, parts=tuple(map(resplit, spec.parts)))


def scaled(
    runner: Runner, cluster: Cluster, result: Result, chosen: Sequence[SystemSpec], gpus: Sequence[int]
) -> tuple[pd.DataFrame, list[str]]:
    """`scaling_rows` of the chosen systems here and on other numbers of GPUs, and what was assumed or left out."""
    names = [spec.name for spec in chosen]
    here = result.steps[result.steps["system"].isin(names)]
    rows, notes = [scaling_rows(replace(result, steps=here), cluster.gpus)], list[str]()
    cases: dict[str, dict[str, Any]] = {}
    for size in gpus:
        spelled, assumed = resized(cluster, size)
        notes += [assumed] if assumed else []
        cases[f"{size} GPUs"] = {"cluster": spelled}
        if any(_split_of(part) for spec in chosen for part in spec.parts):
            cases[f"{size} GPUs"]["systems"] = [_resplit(spec, size, cluster.gpus).entry for spec in chosen]
    if not cases:
        return rows[0], notes
    settings = {"baseline": None, "certainty": 0, "systems": [spec.entry for spec in chosen], "cases": cases}
    try:
        found = runner("other numbers of GPUs", settings, names)
    except PolicyError:
        raise
    except RlsimError as error:
        return rows[0], [*notes, f"other numbers of GPUs left out: {error}"]
    for case, steps in found.steps.groupby("case", sort=False):
        rows.append(scaling_rows(replace(found, steps=steps), int(str(case).split()[0])))
    notes += [note for note in found.notes if " left out: " in note]
    return pd.concat(rows, ignore_index=True), notes

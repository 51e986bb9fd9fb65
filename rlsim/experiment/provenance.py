"""What a result records about how it came to be."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import Case
from rlsim.experiment.frames import Frames
from rlsim.experiment.schema import Experiment
from rlsim.version import __version__


def manifest_of(experiment: Experiment, cases: Sequence[Case], collected: list[Frames]) -> dict[str, Any]:
    """The manifest of a result, as docs/results.md describes it; `collected`: the tables of all runs."""
    loaded = cases[0].loaded
    return {
        "rlsim": __version__,
        "experiment": experiment.model_dump(mode="json"),
        "cluster": loaded.cluster.model_dump(mode="json"),
        "model": loaded.model.model_dump(mode="json"),
        "calibration": _calibration_record(loaded),
        "setups": {case.name: _setup_record(case.loaded) for case in cases},
        "seeds": list(experiment.seed_list),
        "baseline": cases[0].baseline,
        "systems": {case.name: [spec.name for spec in case.systems] for case in cases},
        "tuned": {case.name: case.chosen for case in cases},
        "plans": {case.name: case.plans() for case in cases},
        "worlds": {},
        "judge": {
            case.name: {names: placed.record() for names, placed in case.experiments().items()} for case in cases
        },
        "lookups": {case.name: case.lookups().table() for case in cases},
        "ledger": {case.name: case.ledger.model_dump() for case in cases},
        "notes": list(dict.fromkeys(note for case in cases for note in case.all_notes())),
        "hashes": {"trace": _sha256(loaded.trace_paths), "results": _digest(collected)},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "pandas", "pyarrow", "scipy", "simpy")},
        },
    }


def _setup_record(loaded: LoadedExperiment) -> dict[str, Any]:
    """What a case's figures refer to: cases may differ in cluster, model, cap and calibration."""
    return {
        "cluster": loaded.cluster.name,
        "gpus": loaded.cluster.gpus,
        "gpus_per_node": loaded.cluster.gpus_per_node,
        "model": loaded.model.name,
        "cap_tokens": loaded.experiment.trace.cap,
        "batch": loaded.experiment.workflow.prompts * loaded.experiment.workflow.responses,
        "responses": loaded.experiment.workflow.responses,
        "calibration": _calibration_record(loaded),
    }


def _calibration_record(loaded: LoadedExperiment) -> dict[str, Any] | list[dict[str, Any]]:
    """The calibration; of several kinds of GPU a list."""
    told = {"name", "gpu", "engine", "provenance", "residuals"}
    records = [known.model_dump(mode="json", include=told) for known in loaded.calibrations.values()]
    return records if len(records) > 1 else records[0]


def _sha256(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _digest(collected: list[Frames]) -> str:
    """A hash of all step times: equal results have equal hashes, on any machine with the same library versions."""
    digest = hashlib.sha256()
    for frames in collected:
        digest.update(frames["steps"]["step_time_s"].to_numpy().tobytes())
    return digest.hexdigest()

"""What the results of an experiment depend on, as hashes: settings, files that it reads, code that it runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlsim.cost.calibration import load_calibration
from rlsim.experiment.build import find_model, find_trace, placing
from rlsim.experiment.run import cases_of
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import parse_systems
from rlsim.hardware import load_cluster
from rlsim.policies.registry import home_of
from rlsim.usercode import load_module
from rlsim.version import __version__

#: Parts of rlsim that only start, store or show simulations.
NO_PART_OF_RESULTS = ("cli", "sweeps", "comparison", "report", "validate", "calibrate", "data")


def point_name(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Names a point by its content: `p` and 16 hexadecimal digits. Equal names have equal results.

    `config` is the resolved experiment and `inputs` the hashes of what it reads (`inputs_of`).
    """
    return "p" + _sha256(json.dumps([dict(config), dict(inputs)], sort_keys=True).encode())[:16]


def config_of(experiment: Experiment) -> dict[str, Any]:
    """The experiment with all its defaults as plain values; the seeds themselves, and no description."""
    config = experiment.model_dump(mode="json", exclude={"description"})
    return {**config, "seeds": list(experiment.seed_list)}


def inputs_of(experiment: Experiment, shown: str, folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """SHA-256 of everything that the experiment names: traces, models, calibrations, clusters, code, by what it is.

    Checks on the way that all of it exists, in every case, and that the systems can be made. `known` keeps hashes for
    the next experiment of the same folder. Raises `RlsimError`.
    """
    known = {} if known is None else known
    found: dict[str, str] = {"rlsim": f"{__version__} {code_hash()}"}

    def add(what: str, hash_of: Callable[..., str], *arguments: Any) -> None:
        if what not in known:
            known[what] = hash_of(*arguments)
        found[what] = known[what]

    for case_name, case in cases_of(experiment, shown):
        reward = case.workflow.reward
        with placing(shown, case_name):
            for name in traces_of(case):
                add(f"trace {name}", _trace_hash, name, folder)
            for name in [case.model, *case.models.values(), *([reward.judge.model] if reward.judge else [])]:
                add(f"model {name}", _model_hash, name, folder)
            add(f"calibration {case.calibration}", _calibration_hash, case.calibration)
            cluster = case.cluster if isinstance(case.cluster, str) else json.dumps(case.cluster, sort_keys=True)
            add(f"cluster {cluster}", _cluster_hash, case.cluster, f"{shown}: cluster")
        for module, file in modules_of(case, shown):
            add(f"module {module}", _file_hash, file)
    return dict(sorted(found.items()))


def traces_of(case: Experiment) -> tuple[str, ...]:
    """The traces that one case names, as it writes them."""
    named = case.trace.path or ()
    return (named,) if isinstance(named, str) else named


def modules_of(case: Experiment, shown: str) -> Iterator[tuple[str, Path]]:
    """Modules outside rlsim that define a system's parts or the workflow: name and file."""
    parts = [part.policy for spec in parse_systems(case.systems, shown) for part in spec.parts]
    for name in dict.fromkeys([*map(home_of, parts), case.workflow.algorithm]):
        module, colon, _ = name.partition(":")
        outside = colon and module.partition(".")[0] != "rlsim"
        if outside and (file := load_module(module, f"{shown}: {name}").__file__):
            yield module, Path(file)


@cache
def code_hash() -> str:
    """Hash of the code that decides results: all of rlsim but what starts, stores and shows simulations."""
    package = Path(sys.modules["rlsim"].__file__ or "").parent
    files = sorted(package.rglob("*.py"))
    deciding = [path for path in files if path.relative_to(package).parts[0] not in NO_PART_OF_RESULTS]
    digest = hashlib.sha256()
    for path in deciding:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _trace_hash(name: str, folder: Path) -> str:
    return _file_hash(find_trace(name, folder))


def _model_hash(name: str, folder: Path) -> str:
    return _record_hash(find_model(name, folder).model_dump(mode="json", exclude={"source"}))


def _calibration_hash(name: str) -> str:
    return _record_hash(load_calibration(name).model_dump(mode="json"))


def _cluster_hash(cluster: str | Mapping[str, Any], source: str) -> str:
    return _record_hash(load_cluster(cluster, source).model_dump(mode="json"))


def _file_hash(path: Path) -> str:
    return _sha256(path.read_bytes())


def _record_hash(record: Any) -> str:
    return _sha256(json.dumps(record, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

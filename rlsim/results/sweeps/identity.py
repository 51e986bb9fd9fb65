"""What the results of an experiment depend on, as hashes: settings, files that it reads, code that it runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from rlsim.base import catalogue
from rlsim.base.records import file_sha256
from rlsim.base.usercode import load_module
from rlsim.base.version import __version__
from rlsim.cost.calibration import load_calibration
from rlsim.cost.tables import csv_of
from rlsim.errors import CatalogueError, about
from rlsim.experiment.build import find_model, find_trace
from rlsim.experiment.case import cases_of
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import parse_systems
from rlsim.models.hardware import load_any_cluster
from rlsim.policies.registry import home_of

#: Parts of rlsim that only start, store or show simulations.
NO_PART_OF_RESULTS = ("calibrate", "cli", "data", "frameworks", "results")


def point_name(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Names a point by its content: `p` and 16 hexadecimal digits. Equal names have equal results.

    `config` is the resolved experiment and `inputs` the hashes of what it reads (`inputs_of`).
    """
    return "p" + _record_hash([dict(config), dict(inputs)])[:16]


def config_of(experiment: Experiment) -> dict[str, Any]:
    """The experiment with all its defaults as plain values; the seeds themselves, worlds only where they are asked for,
    and no description."""
    config = experiment.model_dump(mode="json", exclude={"description"})
    return {**config, "seeds": list(experiment.seed_list), "certainty": experiment.certainty or 0}


def inputs_of(experiment: Experiment, shown: str, folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """SHA-256 of everything that the experiment names: traces, models, calibrations, clusters, code, by what it is.

    Checks on the way that all of it exists, in every case, and that the systems can be made. `known` keeps hashes for
    the next experiment of the same folder. Raises `RlsimError`.
    """
    known = {} if known is None else known
    found: dict[str, str] = {"rlsim": f"{__version__} {code_hash()}"}
    hash_of: dict[str, Callable[[Any], str]] = {
        "trace": lambda name: file_sha256(find_trace(name, folder)),
        "model": lambda name: _record_hash(find_model(name, folder).model_dump(mode="json", exclude={"source"})),
        "calibration": lambda name: _record_hash(load_calibration(name).model_dump(mode="json")),
        "cluster": lambda one: _record_hash(load_any_cluster(one, f"{shown}: cluster").model_dump(mode="json")),
        "module": file_sha256,
    }

    def add(kind: str, name: str, given: Any) -> None:
        what = f"{kind} {name}"
        if what not in known:
            known[what] = hash_of[kind](given)
        found[what] = known[what]

    for case_name, case in cases_of(experiment, shown):
        with about(f"{shown}: case {case_name!r}" if case_name else shown, CatalogueError):
            for kind, given in _named(case):
                add(kind, given if isinstance(given, str) else json.dumps(given, sort_keys=True), given)
        for module, file in modules_of(case, shown):
            add("module", module, file)
    return dict(sorted(found.items()))


def _named(case: Experiment) -> Iterator[tuple[str, Any]]:
    """Kind and name of everything that one case reads but code; a cluster may be spelled out."""
    judge = case.workflow.reward.judge
    paths = case.trace.path or ()
    names = {
        "trace": (paths,) if isinstance(paths, str) else paths,
        "model": (case.model, *case.models.values(), *([judge.model] if judge else [])),
        "calibration": case.calibration_names,
        "cluster": (case.cluster,),
    }
    yield from ((kind, name) for kind, known in names.items() for name in known)


def files_of(experiment: Experiment, shown: str, folder: Path) -> dict[str, Path]:
    """The files that an experiment names by a relative path: to be sent to machines that do not have them.

    Relative path as the experiment writes it -> the file here: traces, model configs, calibrations, clusters, code.
    What is named by an absolute path, or one that leaves the folder, is expected to be on every machine.
    """
    found: dict[str, Path] = {}
    for _, case in cases_of(experiment, shown):
        for kind, name in _named(case):
            if kind == "trace":
                found[name] = find_trace(name, folder)
            elif isinstance(name, str):
                for path in (Path(name), folder / name, Path(name) / "config.json"):
                    if path.is_file():
                        found.setdefault(str(Path(name) / path.name) if path.parent == Path(name) else name, path)
                        if kind == "calibration" and (tables := csv_of(path)).is_file():
                            found.setdefault(str(csv_of(Path(name))), tables)
        for module, file in modules_of(case, shown):
            found[module.replace(".", "/") + ".py"] = file
    shipped = catalogue.data_dir("traces").resolve()  # part of rlsim: there already
    return {
        name: path
        for name, path in found.items()
        if not (path.resolve().is_relative_to(shipped) or PurePosixPath(name).is_absolute() or ".." in Path(name).parts)
    }


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
    files = sorted([*package.rglob("*.py"), package / "data" / "compositions.yaml"])
    deciding = [path for path in files if path.relative_to(package).parts[0] not in NO_PART_OF_RESULTS]
    digest = hashlib.sha256()
    for path in deciding:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _record_hash(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

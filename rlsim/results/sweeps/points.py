"""From a sweep file to its points: every one validated, named by its content, before anything runs; what the results of
an experiment depend on, as hashes: settings, files that it reads, code that it runs."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from rlsim.base import catalogue
from rlsim.base.formats import few
from rlsim.base.reading import is_file, plain, read_yaml
from rlsim.base.records import file_sha256
from rlsim.base.schema import validate
from rlsim.base.usercode import load_module
from rlsim.base.version import __version__
from rlsim.cost.calibration import load_calibration
from rlsim.cost.tables import csv_of
from rlsim.errors import CatalogueError, ConfigError, RlsimError, about, check_arguments
from rlsim.experiment.build import find_model, find_trace
from rlsim.experiment.case import cases_of
from rlsim.experiment.load import OVERRIDDEN, experiment_of, find_file, parse_overrides, read_experiment
from rlsim.experiment.run import CheckedExperiment, check_loaded
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import parse_systems
from rlsim.models.hardware import load_any_cluster
from rlsim.policies.registry import home_of
from rlsim.results.sweeps.schema import Block, Settings, SweepSpec, Value, check_free, settings_of
from rlsim.results.sweeps.tables import Axis, columns_of, resolved

#: More mistakes than these are counted, not listed.
MOST_MISTAKES = 20


@dataclass(frozen=True)
class Point:
    """One point: its name, its experiment with all defaults, and as it is given, inputs, and values of the axes."""

    name: str
    config: Mapping[str, Any]
    given: Mapping[str, Any]
    inputs: Mapping[str, str]
    axes: tuple[Axis, ...]

    def experiment(self, shown: str) -> Experiment:
        return validate(plain(self.given), Experiment, shown)


@dataclass(frozen=True)
class Definition:
    """A sweep whose points are all valid. Points that come out the same are one."""

    name: str
    points: tuple[Point, ...]
    asked: int  # points with their repetitions
    base: Mapping[str, Any]  # the resolved experiment without axes
    shown: str  # the experiment in messages
    folder: Path  # where the experiment's relative paths begin


def load_sweep(
    source: str | Path | Mapping[str, Any] | Definition,
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
) -> Definition:
    """A sweep from a file, the name of one that ships with rlsim, or a mapping; or an experiment, with `axes`.

    A definition that is loaded already is returned as it is.
    `overrides` sets keys of the experiment for every point, `seeds` its number of seeds, and `axes` adds a grid.
    Raises `ConfigError` that names all mistakes of all points, with the line where their values are given.
    """
    if isinstance(source, Definition):
        return source
    check_arguments(source=source, overrides=overrides, seeds=seeds, axes=axes)
    spec, shown, folder = _read(source)
    if axes:
        validate({"grid": dict(axes)}, Block, "axes")
        spec = spec.model_copy(update={"axes": (*spec.axes, Block(grid=dict(axes)))})
    if isinstance(spec.experiment, str):
        beside = folder / spec.experiment
        data, inner, folder = read_experiment(beside if is_file(beside) else spec.experiment)
        inner = spec.experiment if is_file(beside) else inner
    else:
        data, inner = spec.experiment, f"{shown}: experiment"
    pairs = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    fixed = {key: Value(value, f"{shown}: set") for key, value in spec.set.items()}
    fixed |= {key: Value(value, OVERRIDDEN) for key, value in pairs.items()}
    if seeds is not None:
        fixed["seeds"] = Value(seeds, OVERRIDDEN)
    every = settings_of(spec.axes, shown)
    check_free(dict.fromkeys(spec.set, f"{shown}: set") | dict.fromkeys(pairs, "--set"), every)
    if seeds is not None:
        check_free({"seeds": "--seeds"}, every)
    base = _experiment_of(data, fixed, inner)
    for name, case in base.cases.items():
        check_free({str(key): f"{inner}: case {name!r}" for key in case}, every)
    found = _valid(data, fixed, every, inner, folder, shown)
    return Definition(spec.name, _points(found, every), len(every), config_of(base), inner, folder)


def check_sweep(
    source: str | Path, overrides: Iterable[str] = (), seeds: int | None = None
) -> tuple[str, list[CheckedExperiment]]:
    """The name of a sweep and all its points, checked as their runs would check them; nothing is simulated.

    The arguments are those of `load_sweep`. Raises `RlsimError` with all mistakes of all points, and the settings of
    the first point that has each.
    """
    definition = load_sweep(source, overrides=overrides, seeds=seeds)
    found: list[CheckedExperiment] = []
    mistakes: dict[str, str] = {}
    for point in definition.points:
        try:
            found.append(check_loaded(point.experiment(definition.shown), definition.folder, definition.shown))
        except RlsimError as error:
            settings = ", ".join(f"{axis.column.name}={axis.value}" for axis in point.axes)
            mistakes.setdefault(str(error), f"{error} (point {settings})" if settings else str(error))
    if mistakes:
        told = few([*mistakes.values()], MOST_MISTAKES, f"mistakes of {definition.name}", "and ")
        raise ConfigError("\n".join(told))
    return definition.name, found


def is_sweep(source: str | Path) -> bool:
    """Whether a file, or a name of one that ships with rlsim, is a sweep; an experiment, or what is neither, is not."""
    path = Path(source)
    named = path.stem in catalogue.names("sweeps") and path.stem not in catalogue.names("experiments")
    if not is_file(path) and not named:
        return False
    data = read_yaml(find_file(path, "sweeps", "experiments"))
    return isinstance(data, Mapping) and ("experiment" in data or "axes" in data)


def _read(source: str | Path | Mapping[str, Any]) -> tuple[SweepSpec, str, Path]:
    """The sweep, its name in messages, and its folder; an experiment is a sweep without axes."""
    if isinstance(source, Mapping):
        data, shown, folder = dict(source), "sweep", Path.cwd()
    else:
        path = find_file(Path(source), "sweeps", "experiments")
        data, shown, folder = read_yaml(path), str(source), path.resolve().parent
    if not isinstance(data, dict):
        raise ConfigError(f"{shown}: expected a mapping of keys to values")
    if "experiment" not in data and "axes" not in data:
        given = dict(source) if isinstance(source, Mapping) else str(source)
        data = {"name": str(data.get("name") or "sweep"), "experiment": given}
    return validate(data, SweepSpec, shown), shown, folder


def _valid(
    data: Mapping[str, Any],
    fixed: Settings,
    every: Sequence[Settings],
    inner: str,
    folder: Path,
    shown: str,
) -> list[tuple[Experiment, dict[str, str]]]:
    found: list[tuple[Experiment, dict[str, str]]] = []
    mistakes: dict[str, list[Settings]] = {}
    known: dict[str, str] = {}

    def placed(mistake: str, where: Sequence[Settings]) -> str:
        """With the points that have it, unless all do."""
        if len(where) == len(every):
            return mistake
        first = ", ".join(f"{key}={value.value}" for key, value in where[0].items())
        place = "" if any(mistake.startswith(v.place) for v in where[0].values()) else f"{shown}: "
        return f"{place}{mistake} ({len(where)} of {len(every)} points, such as {first})"

    for settings in every:
        try:
            experiment = _experiment_of(data, {**fixed, **settings}, inner)
            found.append((experiment, inputs_of(experiment, inner, folder, known)))
        except RlsimError as error:
            for line in str(error).splitlines():
                mistakes.setdefault(line, []).append(settings)
    if mistakes:
        told = [placed(line, where) for line, where in mistakes.items()]
        raise ConfigError("\n".join(few(told, MOST_MISTAKES, "mistakes", "and ")))
    return found


def _experiment_of(data: Mapping[str, Any], settings: Settings, inner: str) -> Experiment:
    values = {key: copy.deepcopy(one.value) for key, one in settings.items()}
    places = {key: one.place for key, one in settings.items()}
    return experiment_of(copy.deepcopy(data), values, inner, lambda key: f"{places[key]}: ", places)


def _points(found: Sequence[tuple[Experiment, dict[str, str]]], every: Sequence[Settings]) -> tuple[Point, ...]:
    keys = list(dict.fromkeys(key for settings in every for key in settings))
    configs = [config_of(experiment) for experiment, _ in found]
    columns = columns_of(keys, configs)
    points: dict[str, Point] = {}
    for config, (experiment, inputs) in zip(configs, found, strict=True):
        name = point_name(config, inputs)
        axes = tuple(Axis(column, resolved(config, column)) for column in columns)
        given = experiment.model_dump(mode="json", exclude={"description"}, exclude_unset=True)
        given |= {key: config[key] for key in ("seeds", "certainty")}
        points.setdefault(name, Point(name, config, given, inputs, axes))
    return tuple(points.values())


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

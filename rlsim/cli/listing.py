"""`rlsim list`: what the catalogue holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import typer

from rlsim.base.formats import written
from rlsim.cli.common import Commands

if TYPE_CHECKING:
    from rlsim.base.reference import Key

T = TypeVar("T")

app = Commands(no_args_is_help=True, help="Show what the catalogue holds.", epilog="Example: rlsim list calibrations")


@app.command()
def gpus() -> None:
    """GPUs and their data-sheet figures.

    Example: rlsim list gpus
    """
    from rlsim.models.hardware import load_gpu

    _print(written("gpus", _loaded("gpus", load_gpu)))


@app.command()
def clusters() -> None:
    """Nodes of clusters: GPUs and links. Any number of nodes, or part of one, is known by its name.

    Example: rlsim list clusters
    """
    from rlsim.models.hardware import node_types

    _print(written("clusters", node_types().values()))
    typer.echo(
        "Several nodes, or part of one: nodes x GPUs of a node x GPU, such as 2x8xh100, 16x8xh100, 4x4xa100, 2xh100;\n"
        "18x4xgb200 is a rack whose 18 nodes are one NVLink domain; 32x4xgb200 is 16 nodes in each of two racks.\n"
        "Several kinds of GPU: groups of as many GPUs per node, joined by a plus, such as 2x8xh20+1x8xh800.\n"
        "-: the link between nodes is not known; spell out a cluster of several nodes."
    )


@app.command()
def models() -> None:
    """Models: parameters, KV cache, and whether they can be simulated (docs/models.md has what is not measured).

    Example: rlsim list models
    """
    from rlsim.models.model import load_model

    _print(written("models", _loaded("models", load_model)))


@app.command()
def calibrations() -> None:
    """Calibrations: which GPU, engine and release of it, and how far off on held-out shapes.

    Example: rlsim list calibrations
    """
    from rlsim.cost.calibration import calibration_names, load_calibration

    _print(written("calibrations", map(load_calibration, calibration_names())))
    typer.echo("derived: the kernels, and the errors shown, are those of another GPU (docs/calibration.md).")


class Written(StrEnum):
    """Kinds of files that people write."""

    EXPERIMENT = "experiment"
    SWEEP = "sweep"
    CLUSTER = "cluster"
    MODEL = "model"


@app.command()
def keys(key: str = "", of: Written = Written.EXPERIMENT) -> None:
    """Keys of an experiment, a sweep, a cluster or a model: type, unit, default and meaning.

    Example: rlsim list keys workflow.reward
    """
    from pydantic import BaseModel

    from rlsim.base.reference import keys_of
    from rlsim.errors import unknown_name
    from rlsim.experiment.schema import Experiment
    from rlsim.models.architectures import Config
    from rlsim.models.hardware import Cluster
    from rlsim.results.sweeps.schema import SweepSpec

    records: dict[str, type[BaseModel]] = {
        "experiment": Experiment,
        "sweep": SweepSpec,
        "cluster": Cluster,
        "model": Config,
    }
    rows = list(keys_of(records[of]))
    if key and key not in {row.key for row in rows}:
        raise unknown_name(f"key of the {of}", key, [row.key for row in rows])
    under = (f"{key}.", f"{key}[")
    _print_keys("key", [r for r in rows if (r.key == key or r.key.startswith(under) if key else "." not in r.key)])


@app.command()
def columns(table: str = "") -> None:
    """Columns of the tables of a result: type, unit and meaning.

    Example: rlsim list columns steps
    """
    from rlsim.errors import unknown_name
    from rlsim.experiment.columns import TABLES

    if table and table not in TABLES:
        raise unknown_name("table of a result", table, TABLES)
    for name in [table] if table else TABLES:
        _print(written("columns", TABLES[name]), f"{name}.parquet")


@app.command()
def policies(name: str = "") -> None:
    """Policies that an experiment's systems may use; the parameters of one.

    Example: rlsim list policies pat
    """
    from pydantic import BaseModel

    from rlsim.base.reference import first_paragraph, keys_of
    from rlsim.errors import RlsimError
    from rlsim.policies.registry import load_policy, policy_names

    if name:
        kind = load_policy(name)
        parameters = list(keys_of(kind)) if issubclass(kind, BaseModel) else []
        typer.echo(f"{name}: {first_paragraph(kind)}" + ("" if parameters else " It has no parameters."))
        if parameters:
            _print_keys("parameter", parameters)
        return

    def meaning(name: str) -> str:
        try:
            return first_paragraph(load_policy(name))
        except RlsimError as error:  # another package's, and no reason to hide the rest
            return f"error: {error}"

    _print(written("policies", sorted(policy_names().items()), meaning=meaning))


@app.command()
def traces() -> None:
    """Response-length traces that ship with rlsim.

    Example: rlsim list traces
    """
    from rlsim.base import catalogue
    from rlsim.trace import read_trace

    files = catalogue.names("traces", ".parquet")
    _print(written("traces", [{"name": name, "trace": read_trace(path)} for name, path in files.items()]))


@app.command()
def experiments() -> None:
    """Experiments and sweeps that ship with rlsim.

    Example: rlsim list experiments
    """
    from rlsim.base import catalogue
    from rlsim.base.reading import read_yaml

    rows = [(name, kind, path) for kind in ("experiments", "sweeps") for name, path in catalogue.names(kind).items()]
    _print(written("experiments", rows, read=read_yaml))


@app.command()
def systems() -> None:
    """The same as `rlsim list policies`: each policy is a system, alone or with others (docs/systems.md).

    Example: rlsim list systems
    """
    policies("")


def _loaded(kind: str, load: Callable[[str], T]) -> list[T]:
    from rlsim.base import catalogue

    return [load(name) for name in catalogue.names(kind)]


_NUMBERS = {"GB", "TB/s", "TFLOP/s", "params G", "active G", "KV KiB/token", "nodes", "responses", "P50", "P99", "max"}


def _print_keys(what: str, rows: Sequence[Key]) -> None:
    """Keys, or parameters of a policy."""
    _print({what: [row.key for row in rows], **written("keys", rows)})


def _print(columns: Mapping[str, Sequence[str]], title: str = "") -> None:
    """A table whose first column is the name to type; the longest other column is prose."""
    from rlsim.cli.tables import Table, print_tables

    words = [number for number, column in enumerate(columns) if column not in _NUMBERS]
    cells = [*columns.values()]
    prose = max(words[1:], key=lambda number: max(map(len, cells[number])))
    print_tables([Table([*columns], [*zip(*cells, strict=True)], title=title, words=words, prose=prose)])

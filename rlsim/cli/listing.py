"""`rlsim list`: what the catalogue holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from rlsim.base import catalogue
from rlsim.base.formats import Table, written
from rlsim.base.reading import read_yaml, records
from rlsim.base.refusals import code_of
from rlsim.base.usercode import load_object
from rlsim.cli.common import Commands
from rlsim.cli.tables import print_tables
from rlsim.errors import RlsimError, unknown_name

if TYPE_CHECKING:
    from rlsim.base.reference import Key

app = Commands(no_args_is_help=True, help="Show what the catalogue holds.", epilog="Example: rlsim list calibrations")


def _command(name: str, of: str, help: str, says: str) -> None:  # noqa: A002 - what it is
    """A row of `rlsim/data/listings.csv`: a table of what an expression gives, and what is said below it."""

    def show() -> None:
        at = lambda path: load_object(f"rlsim.{path}", name)  # noqa: E731
        _print(written(name, eval(code_of(of), {"names": catalogue.names, "at": at}), read=read_yaml))
        if says:
            typer.echo(says)

    app.command(name, help=f"{help}\n\nExample: rlsim list {name}")(show)


for _row in records("listings.csv"):
    _command(**_row)


class Written(StrEnum):
    """Kinds of files that people write."""

    EXPERIMENT = "experiment"
    SWEEP = "sweep"
    CLUSTER = "cluster"
    MODEL = "model"


#: The records that say what may stand in these files.
_RECORDS: Mapping[str, str] = {
    "experiment": "experiment.schema:Experiment",
    "sweep": "results.sweeps.schema:SweepSpec",
    "cluster": "models.hardware:Cluster",
    "model": "models.architectures:Config",
}


@app.command()
def keys(key: str = "", of: Written = Written.EXPERIMENT) -> None:
    """Keys of an experiment, a sweep, a cluster or a model: type, unit, default and meaning.

    Example: rlsim list keys workflow.reward
    """
    from rlsim.base.reference import keys_of

    rows = list(keys_of(load_object(f"rlsim.{_RECORDS[of]}", of)))
    if key and key not in {row.key for row in rows}:
        raise unknown_name(f"key of the {of}", key, [row.key for row in rows])
    under = (f"{key}.", f"{key}[")
    _print_keys("key", [r for r in rows if (r.key == key or r.key.startswith(under) if key else "." not in r.key)])


@app.command()
def columns(table: str = "") -> None:
    """Columns of the tables of a result: type, unit and meaning.

    Example: rlsim list columns steps
    """
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
def systems() -> None:
    """The same as `rlsim list policies`: each policy is a system, alone or with others (docs/systems.md).

    Example: rlsim list systems
    """
    policies("")


_NUMBERS = {"GB", "TB/s", "TFLOP/s", "params G", "active G", "KV KiB/token", "nodes", "responses", "P50", "P99", "max"}


def _print_keys(what: str, rows: Sequence[Key]) -> None:
    _print({what: [row.key for row in rows], **written("keys", rows)})


def _print(columns: Mapping[str, Sequence[str]], title: str = "") -> None:
    """A table whose first column is the name to type; the longest other column is prose."""
    words = [number for number, column in enumerate(columns) if column not in _NUMBERS]
    cells = [*columns.values()]
    prose = max(words[1:], key=lambda number: max(map(len, cells[number])))
    print_tables([Table.of(title, columns, *words, prose=prose)])

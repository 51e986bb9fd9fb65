"""One run among the results of an experiment: by case, system, seed and steps; and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rlsim.errors import CatalogueError, ConfigError, unknown_name
from rlsim.experiment.columns import TABLES, opened, to_pandas
from rlsim.formats import listed

if TYPE_CHECKING:
    from rlsim.experiment.result import Result, Results

#: Rows read at a time.
ROWS = 16_384
#: More seeds or steps than these are counted in messages, not listed.
MOST_LISTED = 20
#: Columns that name a run and its step.
_RUN = ("case", "system", "seed", "step")
_STEPS = [*_RUN, "steady", "step_time_s", "trained", "tokens"]
#: Tables that a timeline needs beside that of the steps.
_NEEDED = ("spans", "stays", "calls", "responses")


@dataclass(frozen=True)
class ChosenRun:
    """The run that was chosen, and what else there was to choose from."""

    case: str
    system: str
    seed: int
    steps: tuple[int, ...]
    step_ends: Mapping[int, float]  # by step: when all of its calls are done (s)
    others: Mapping[str, Sequence[Any]]  # by `case`, `system`, `seed`, `step`: all that the results have
    manifest: Mapping[str, Any]
    _source: Results | Mapping[str, pd.DataFrame] = field(repr=False)

    @property
    def setup(self) -> Mapping[str, Any]:
        """What the case ran on: `gpus`, `gpus_per_node`, …"""
        found: Mapping[str, Any] = self.manifest["setups"][self.case]
        return found

    def rows(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """The run's rows of a table, in their order."""
        wanted = [column for column in TABLES[table] if column.name in (*_RUN, *columns)]
        run = (self.case, self.system, self.seed)
        if isinstance(self._source, Mapping):
            rows = self._source[table]
            chosen = rows["step"].isin(self.steps)
            for name, value in zip(_RUN, run, strict=False):
                chosen &= rows[name] == value
            return rows.loc[chosen, list(columns)].reset_index(drop=True)
        found = []
        # Page by page: a file has the rows of all runs.
        with opened(self._source.path(table), wanted, self._source.sha256(table)) as file:
            for rows in file.iter_batches(ROWS, columns=[column.name for column in wanted], use_threads=False):
                chosen = pc.is_in(rows["step"], pa.array(self.steps))
                for name, value in zip(_RUN, run, strict=False):
                    chosen = pc.and_(chosen, pc.equal(rows[name], value))
                found.append(rows.filter(chosen).select(list(columns)))
            kinds = pa.schema([file.schema_arrow.field(name) for name in columns])
        return to_pandas(pa.Table.from_batches(found, kinds))


def choose_run(
    results: Result | str | Path,
    *,
    case: str | None = None,
    system: str | None = None,
    seed: int | None = None,
    steps: Sequence[int] | None = None,
) -> ChosenRun:
    """A run of an experiment, in memory or in a directory that `rlsim run` wrote.

    What is not given is the first that the results have: the first case, its first system, the first seed, all steps.
    Raises `CatalogueError` for what the results don't have, with the nearest names, and `ConfigError` for a directory
    that holds no results.
    """
    manifest, source = _opened(results)
    runs = source.table("steps", _STEPS) if not isinstance(source, Mapping) else source["steps"][_STEPS]
    others: dict[str, list[Any]] = {}
    chosen: dict[str, Any] = {}
    for column, wanted in (("case", case), ("system", system), ("seed", seed)):
        others[column] = runs[column].drop_duplicates().tolist()
        if wanted is not None and wanted not in others[column]:
            raise not_run(column, wanted, others[column])
        chosen[column] = others[column][0] if wanted is None else wanted
        runs = runs[runs[column] == chosen[column]]
    runs = runs.sort_values("step")
    others["step"] = runs["step"].tolist()
    for step in steps or ():
        if step not in others["step"]:
            raise not_run("step", step, others["step"])
    ends = dict(zip(others["step"], runs["step_time_s"].cumsum().tolist(), strict=True))
    wanted_steps = tuple(sorted(set(steps or others["step"])))
    return ChosenRun(**chosen, steps=wanted_steps, step_ends=ends, others=others, manifest=manifest, _source=source)


def _opened(results: Result | str | Path) -> tuple[Mapping[str, Any], Results | Mapping[str, pd.DataFrame]]:
    """The manifest and the tables; `ConfigError` where there is not what a timeline needs."""
    if not isinstance(results, str | Path):
        return results.manifest, {name: getattr(results, name) for name in ("steps", *_NEEDED)}
    from rlsim.experiment.result import open_results
    from rlsim.sweeps.store import DEFINITION

    folder = Path(results)
    if (folder / DEFINITION).is_file():
        raise ConfigError(f"{folder} is a sweep, which has no timeline: run one of its points with rlsim run")
    with open_results(folder) as source:
        return source.manifest, source


def not_run(kind: str, wanted: Any, known: Sequence[Any]) -> CatalogueError:
    """The error for a case, system, seed or step that the results don't have, with those they have."""
    if known == [""]:
        return CatalogueError(f"the results have no {kind}s to choose from")
    if isinstance(wanted, str):
        return unknown_name(kind, wanted, map(str, known))
    numbers = sorted(known)
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        known_ones = f"{numbers[0]} to {numbers[-1]}"
    else:
        known_ones = listed([*map(str, numbers)], MOST_LISTED)
    return CatalogueError(f"the results have no {kind} {wanted}, only {known_ones}")

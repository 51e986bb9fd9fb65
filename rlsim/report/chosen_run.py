"""One run among the results of an experiment: by case, system, seed and steps; and its rows, read as a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlsim.errors import CatalogueError, ConfigError, unknown_name
from rlsim.experiment.columns import TABLES
from rlsim.experiment.parquet import complete, opened

if TYPE_CHECKING:
    import pandas as pd

    from rlsim.experiment.result import Result, Results

#: Rows read at a time.
ROWS = 16_384
#: More seeds or steps than these are counted in messages, not listed.
MOST_LISTED = 20
#: Columns that name a run and its step.
_RUN = ("case", "system", "seed", "step")


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
    def gpus(self) -> int:
        """GPUs of the case's cluster."""
        return int(self.manifest["setups"][self.case]["gpus"])

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node of the case's cluster."""
        return int(self.manifest["setups"][self.case]["gpus_per_node"])

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The run's rows of a table, in their order, some at a time."""
        for rows in _batches(self._source, table, [*_RUN, *(name for name in columns if name != "step")]):
            chosen = pc.is_in(rows["step"], pa.array(self.steps))
            for name, value in zip(_RUN, (self.case, self.system, self.seed), strict=False):
                chosen = pc.and_(chosen, pc.equal(rows[name], value))
            found = rows.filter(chosen).select(list(columns))
            if found.num_rows:
                yield found

    def by_step(self, table: str, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The same, step by step; a table holds the rows of a run by step."""
        step, parts = -1, list[pa.Table]()
        for rows in self.rows(table, ["step", *columns]):
            steps = rows["step"].to_numpy()
            edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
            for first, last in itertools.pairwise(edges):
                if steps[first] != step and parts:
                    yield step, pa.concat_tables(parts)
                    parts = []
                step = int(steps[first])
                parts.append(rows.slice(first, last - first))
        if parts:
            yield step, pa.concat_tables(parts)


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
    that holds no results, or those of an rlsim that did not record `stays`.
    """
    source: Results | Mapping[str, pd.DataFrame]
    if isinstance(results, str | Path):
        from rlsim.experiment.result import open_results
        from rlsim.sweeps.store import DEFINITION

        folder = Path(results)
        if (folder / DEFINITION).is_file():
            raise ConfigError(f"{folder} is a sweep, which has no timeline: run one of its points with rlsim run")
        source = open_results(folder)
        manifest = source.manifest
        missing = [name for name in ("spans", "stays", "calls", "responses") if not source.path(name).is_file()]
        if missing or "setups" not in manifest:
            raise ConfigError(
                f"{folder}: written by an rlsim that did not record what a timeline needs "
                f"({', '.join(missing) or 'setups in manifest.json'}); run the experiment again"
            )
    else:
        manifest = results.manifest
        source = {name: getattr(results, name) for name in ("steps", "spans", "stays", "calls", "responses")}
    columns = [*_RUN, "steady", "step_time_s", "trained", "tokens"]
    runs = source.table("steps", columns) if not isinstance(source, Mapping) else source["steps"][columns]
    others: dict[str, list[Any]] = {}

    def choose(column: str, kind: str, wanted: Any) -> Any:
        nonlocal runs
        others[column] = runs[column].drop_duplicates().tolist()
        if wanted is None:
            wanted = others[column][0]
        elif wanted not in others[column]:
            raise _unknown(kind, wanted, others[column])
        runs = runs[runs[column] == wanted]
        return wanted

    case = choose("case", "case", case)
    system = choose("system", "system", system)
    seed = choose("seed", "seed", seed)
    others["step"] = sorted(runs["step"].tolist())
    for step in steps or ():
        if step not in others["step"]:
            raise _unknown("step", step, others["step"])
    chosen = tuple(sorted(set(steps))) if steps else tuple(others["step"])
    runs = runs.sort_values("step")
    ends = dict(zip(runs["step"].tolist(), runs["step_time_s"].cumsum().tolist(), strict=True))
    return ChosenRun(str(case), str(system), int(seed), chosen, ends, others, manifest, source)


def _unknown(kind: str, wanted: Any, known: Sequence[Any]) -> CatalogueError:
    if known == [""]:
        return CatalogueError(f"the results have no {kind}s to choose from")
    if isinstance(wanted, str):
        return unknown_name(kind, wanted, map(str, known))
    numbers = sorted(known)
    together = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    more = "" if len(numbers) <= MOST_LISTED else f" and {len(numbers) - MOST_LISTED} more"
    listed = ", ".join(map(str, numbers[:MOST_LISTED])) + more
    listed = f"{numbers[0]} to {numbers[-1]}" if together else listed
    return CatalogueError(f"the results have no {kind} {wanted}; there is {listed}")


def _batches(source: Results | Mapping[str, pd.DataFrame], table: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """A table some rows at a time, whether it lies in a file or in memory."""
    if isinstance(source, Mapping):
        frame = source[table]
        for first in range(0, len(frame), ROWS):
            yield pa.Table.from_pandas(frame.iloc[first : first + ROWS], columns=list(columns), preserve_index=False)
        return
    wanted = [column for column in TABLES[table] if column.name in columns]
    # Page by page: a data set would hold a whole group of rows.
    with opened(source.path(table), wanted, source.sha256(table)) as file:
        for batch in file.iter_batches(batch_size=ROWS, columns=list(columns), use_threads=False):
            yield complete(source.path(table), pa.Table.from_batches([batch]), wanted)

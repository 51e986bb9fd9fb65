"""One run among the results of an experiment: by case, system, seed and steps; and its rows, read as a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from rlsim.errors import CatalogueError, ConfigError, unknown_name

if TYPE_CHECKING:
    import pandas as pd

    from rlsim.experiment.result import Result

#: Rows read at a time.
ROWS = 65_536


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
    _source: Path | Mapping[str, pd.DataFrame] = field(repr=False)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node of the case's cluster."""
        return int(self.manifest["clusters"][self.case]["gpus_per_node"])

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The run's rows of a table, in their order, some at a time."""
        chosen = (
            (ds.field("case") == self.case)
            & (ds.field("system") == self.system)
            & (ds.field("seed") == self.seed)
            & ds.field("step").isin(self.steps)
        )
        batches = _dataset(self._source, table).to_batches(
            columns=list(columns),
            filter=chosen,
            batch_size=ROWS,
            batch_readahead=1,
            fragment_readahead=1,
            use_threads=False,
        )
        for batch in batches:
            if batch.num_rows:
                yield pa.Table.from_batches([batch])

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
    source: Path | Mapping[str, pd.DataFrame]
    manifest: Mapping[str, Any]
    if isinstance(results, str | Path):
        from rlsim.experiment.result import MANIFEST, read_manifest

        folder = Path(results)
        manifest, source = read_manifest(folder), folder
        missing = [
            name for name in ("spans", "stays", "calls", "responses") if not (folder / f"{name}.parquet").is_file()
        ]
        if missing or "clusters" not in manifest:
            raise ConfigError(
                f"{folder}: written by an rlsim that did not record what a timeline needs "
                f"({', '.join(missing) or f'clusters in {MANIFEST}'}); run the experiment again"
            )
    else:
        manifest = results.manifest
        source = {name: getattr(results, name) for name in ("steps", "spans", "stays", "calls", "responses")}
    runs = _dataset(source, "steps").to_table(columns=["case", "system", "seed", "step", "step_time_s"]).to_pandas()
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
    numbers = str(known[0]) if len(known) == 1 else f"{min(known)} to {max(known)}"
    return CatalogueError(f"the results have no {kind} {wanted}; there is {numbers}")


def _dataset(source: Path | Mapping[str, pd.DataFrame], table: str) -> ds.Dataset:
    if isinstance(source, Path):
        try:
            return ds.dataset(source / f"{table}.parquet", format="parquet")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source}: the results are damaged: {error}") from None
    return ds.dataset(pa.Table.from_pandas(source[table], preserve_index=False))

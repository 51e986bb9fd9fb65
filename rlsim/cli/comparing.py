"""`rlsim compare`."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlsim.base.charts import check_chart_path, save_chart
from rlsim.base.formats import Row, Table, written
from rlsim.base.output import check_files, write_text
from rlsim.cli.common import PRINTED, paths_only, say, say_notes, write_json
from rlsim.cli.tables import caption, print_tables, setting_texts
from rlsim.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from rlsim.results.comparison.compare import Comparison

#: Settings after these are not printed one by one.
MOST_GROUPS = 24
#: Headings of the ratios, in the order of `rlsim.experiment.summary.RATIOS`.
HEADINGS = ("speedup", "by tokens", "in gen", "90% by")
#: Characters of a setting's text.
MOST_TEXT = 40


def compare(
    directories: list[str],
    baseline: str | None = None,
    json_file: Path | None = None,
    csv: Path | None = None,
    chart: Path | None = None,
    quiet: bool = False,
) -> None:
    """Compare runs and sweeps: one row per run, differences with 95% intervals, paired by seed where that is fair.

    One directory is compared with its own baseline; several with the first of them, the same system each.

    Example: rlsim compare results/before results/after --baseline verl-best
    """
    from rlsim.results.comparison.compare import compare as compare_directories

    check_files(*(file for file in (json_file, csv, chart) if file != PRINTED))
    if chart is not None:
        check_chart_path(chart)
    found = compare_directories([one.rstrip("/") or one for one in directories], baseline=baseline)
    printed = write_json(json_file, found.as_json())
    text = found.table.to_csv(index=False) if csv else ""
    if csv == PRINTED:
        typer.echo(text, nl=False)
    elif csv:
        write_text(csv, text)
    if chart is not None:
        save_chart(_chart(found), chart)
    if not (printed or csv == PRINTED or paths_only(quiet, csv, chart)):
        _print(found)


def _print(found: Comparison) -> None:
    letters = _letters(found)
    for directory, letter in letters.items():
        say(f"{letter} = {directory}")
    for key, values in found.differences.items():
        texts = setting_texts(list(values.values()), MOST_TEXT)
        say(f"{key}: " + "; ".join(f"{text} in {letters[w]}" for text, w in zip(texts, values, strict=True)))
    if letters:
        say("")
    groups = list(_groups(found))
    for title, rows in groups[:MOST_GROUPS]:
        if title:
            say(title, "bold")
        print_tables(_tables(rows, letters))
    if len(groups) > MOST_GROUPS:
        say(f"{len(groups) - MOST_GROUPS} more settings: --csv or --json has them")
    paired, late = bool(found.table["paired"].all()), bool(found.table["unsteady"].any())
    say(caption("compare", paired=paired, late=late))
    say_notes(found.notes)


def _letters(found: Comparison) -> dict[str, str]:
    """Short names of the directories; none if there is one."""
    directories = list(found.table["directory"].unique())
    names = [*string.ascii_uppercase, *(f"D{i}" for i in range(len(directories)))]
    return dict(zip(directories, names, strict=False)) if len(directories) > 1 else {}


def _groups(found: Comparison) -> Iterator[tuple[str, pd.DataFrame]]:
    """Runs of the same case and settings, but for those in which whole directories differ."""
    import numpy as np

    own = [key for key in found.settings if key not in found.differences]
    keys = [*own, "case"]
    texts = [np.array(setting_texts(found.table[key].tolist(), MOST_TEXT)) for key in keys]
    for values, rows in found.table.groupby(texts, sort=False):
        parts = [f"{key} {value}" for key, value in zip(own, values, strict=False) if value != "–"]
        yield " · ".join([*parts, *([str(values[-1])] if values[-1] else [])]), rows


def _tables(rows: pd.DataFrame, letters: dict[str, str]) -> Iterator[Table]:
    where = {"in": [letters[one] for one in rows["directory"]]} if letters else {}
    yield Table.of("", {**where, **written("compare", rows)}, len(where))
    compared = rows[(rows["baseline"] != "") & ~rows["is_baseline"]]
    if len(compared):
        where = {"in": [letters[one] for one in compared["directory"]]} if letters else {}
        ratios = written("against", compared, against=lambda row: _against(row, letters))
        yield Table.of("", {**where, **ratios}, *range(len(where) + 2))


def _chart(found: Comparison) -> Any:
    """The intervals of the tables; raises `ConfigError` if nothing is compared."""
    import pandas as pd

    from rlsim.experiment.summary import ENDS, RATIOS
    from rlsim.results.report.speedups import ratios_chart

    letters, groups = _letters(found), list(_groups(found))
    runs = [
        (title, _against(row, letters), row)
        for title, rows in groups[:MOST_GROUPS]
        for row in rows.to_dict("records")
        if row["baseline"] and not row["is_baseline"]
    ]
    if not runs:
        raise ConfigError("nothing to draw: no run has another that it is compared with")
    against = {name for _, name, _ in runs}
    one = f" as {next(iter(against))}" if len(against) == 1 else ""

    def named(title: str, name: str, row: Row) -> str:
        star, other = "" if row["paired"] else "*", "" if one else f"against {name}"
        return " · ".join(filter(None, [title, letters.get(row["directory"]), f"{row['system']}{star}", other]))

    drawn = [
        {
            "panel": heading,
            "system": named(title, name, row),
            "unsteady": bool(row["unsteady"] or row["baseline_unsteady"]),
            **{end: row[f"{ratio}{suffix}"] for end, suffix in zip(("speedup", "low", "high"), ENDS, strict=True)},
        }
        for heading, ratio in zip(HEADINGS, RATIOS, strict=True)
        for title, name, row in runs
    ]
    told = [f"{letter} = {directory}" for directory, letter in letters.items()]
    told += ["* not paired by seed"] if any(not row["paired"] for *_, row in runs) else []
    told += [f"{len(groups) - MOST_GROUPS} more settings are not drawn"] if len(groups) > MOST_GROUPS else []
    return ratios_chart(pd.DataFrame(drawn), f"Times as fast{one}, with 95% intervals over seeds", told)


def _against(row: Row, letters: dict[str, str]) -> str:
    """Where the baseline differs from the run: its directory's letter, its axes, its system if that is another."""
    baseline = str(row["baseline"]).removesuffix(f":{row['system']}")
    for directory, letter in letters.items():
        if baseline == directory or baseline.startswith(f"{directory}:"):
            return " ".join([letter, *filter(None, [baseline[len(directory) + 1 :]])])
    return baseline

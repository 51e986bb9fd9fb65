"""`rlsim compare`."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsim.cli.tables import asynchrony, print_tables, setting_texts, table
from rlsim.formats import number, rate, share, with_interval

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from rlsim.comparison.compare import Comparison

#: Settings after these are not printed one by one.
MOST_GROUPS = 24
#: Characters of a setting's text.
MOST_TEXT = 40
PRINTED = Path("-")


def compare(
    directories: Annotated[list[str], typer.Argument(help="Directories that `rlsim run` or `rlsim sweep` wrote.")],
    baseline: Annotated[
        str | None,
        typer.Option(help="A system, one of the directories, DIRECTORY:SYSTEM, or KEY.PATH=VALUE[,…] of axes."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file; - prints it.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the run table to this file; - prints it.")] = None,
) -> None:
    """Compare runs and sweeps: one row per run, differences with 95% intervals, paired by seed where that is fair.

    One directory is compared with its own baseline; several with the first of them, the same system each.

    Example: rlsim compare results/before results/after --baseline verl-best
    """
    from rlsim.comparison.compare import compare as compare_directories
    from rlsim.output import check_files, write_text

    check_files(*(file for file in (json_file, csv) if file != PRINTED))
    found = compare_directories([one.rstrip("/") or one for one in directories], baseline=baseline)
    texts = []
    if json_file is not None:
        texts.append((json_file, json.dumps(found.as_json(), indent=2, ensure_ascii=False) + "\n"))
    if csv is not None:
        texts.append((csv, found.table.to_csv(index=False)))
    for file, text in texts:
        if file == PRINTED:
            typer.echo(text, nl=False)
        else:
            write_text(file, text)
    if PRINTED not in (json_file, csv):
        _print(found)


def _print(found: Comparison) -> None:
    from rlsim.cli.terminal import Console

    letters = _letters(found)
    plain = Console(soft_wrap=True)
    for directory, letter in letters.items():
        plain.print(f"{letter} = {directory}")
    for key, values in found.differences.items():
        texts = setting_texts(list(values.values()), MOST_TEXT)
        plain.print(f"{key}: " + "; ".join(f"{text} in {letters[w]}" for text, w in zip(texts, values, strict=True)))
    if letters:
        plain.print()
    groups = list(_groups(found))
    for title, rows in groups[:MOST_GROUPS]:
        if title:
            plain.print(title, style="bold")
        print_tables(_tables(rows, letters))
    if len(groups) > MOST_GROUPS:
        plain.print(f"{len(groups) - MOST_GROUPS} more settings: --csv or --json has them")
    plain.print(
        "speedup: responses trained on per second over the baseline's; by tokens: tokens trained on (with prompts);"
    )
    plain.print(
        "in gen, 90% by: responses per second of generation, and until 90% were there; 95% intervals over seeds"
    )
    if not found.table["paired"].all():
        plain.print("* not paired by seed")
    for note in found.notes:
        plain.print(f"note: {note}", style="dim")


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
    """The run table, and what each is compared with."""
    from rlsim.experiment.summary import RATIOS

    names = [*(["in"] if letters else []), "system"]
    relaxed_headings, relaxed_cells, _ = asynchrony(rows)
    means, speedups = [], []
    for row in rows.to_dict("records"):
        tuned = f" ({row['tuned']})" if row["tuned"] else ""
        where = [letters[row["directory"]]] if letters else []
        times = (number(row[name], 1) for name in ("step_time_s", "gen_time_s", "gen_p90_time_s"))
        shares = (share(row["bubble_fraction"], 1), share(row["tail_fraction"]))
        rates = (rate(row["responses_per_s"]), number(row["tokens_per_s"], 0))
        means.append([*where, row["system"] + tuned, *rates, *times, *shares, *relaxed_cells(row)])
        if row["baseline"] and not row["is_baseline"]:
            star = "" if row["paired"] else "*"
            cells = (with_interval(row, name) for name in RATIOS)
            speedups.append([*where, row["system"], _against(row, letters) + star, *cells])
    headings = ["responses/s", "tokens/s", "step s", "gen s", "90% by", "bubble", "tail", *relaxed_headings]
    yield table([*names, *headings], means, words=len(names))
    if speedups:
        headings = ["against", "speedup", "by tokens", "in gen", "90% by"]
        yield table([*names, *headings], speedups, words=len(names) + 1)


def _against(row: dict[Any, Any], letters: dict[str, str]) -> str:
    """Where the baseline differs from the run: its directory's letter, its axes, its system if that is another."""
    baseline = str(row["baseline"]).removesuffix(f":{row['system']}")
    for directory, letter in letters.items():
        if baseline == directory or baseline.startswith(f"{directory}:"):
            return " ".join([letter, *filter(None, [baseline[len(directory) + 1 :]])])
    return baseline

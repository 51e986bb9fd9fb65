"""`rlsim advise`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsim.cli import complete

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from rlsim.advise.advice import Advice, Progress

#: Columns that hold words.
WORDS = ("system", "system (* fastest)", "call", "why not", "")

#: With more GPUs than these, those of a node are shown together.
MOST_GPUS = 16


def advise(
    experiment: Annotated[
        str,
        typer.Argument(
            help="Experiment file, or the name of one that ships with rlsim.", autocompletion=complete.experiments
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Results directory (default: results/NAME-advice).")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds (default: the experiment's, at most 5).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to simulate (default: the experiment's).")] = None,
    case: Annotated[str | None, typer.Option(help="Which of the experiment's cases.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Set a key of the experiment; repeatable."),
    ] = None,
    worth: Annotated[float, typer.Option(help="Twice the GPUs pay if they are so many times as fast.")] = 1.5,
    top: Annotated[int, typer.Option(min=1, help="Systems that are tried on other numbers of GPUs.")] = 3,
    most: Annotated[int, typer.Option(min=1, help="Try up to so many times the GPUs.")] = 4,
    skip: Annotated[
        list[str] | None, typer.Option(help="Shipped policy to leave out, such as real; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the conclusions only.")] = False,
) -> None:
    """Say what fits, why GPUs are idle, which system and TP to take, and how many GPUs pay.

    Example: rlsim advise experiments/pat_vs_static.yaml --seeds 3
    """
    from rlsim.advise.advice import advise as find_advice
    from rlsim.experiment.load import load_experiment

    sys.path += [str(folder) for folder in (Path(experiment).resolve().parent, Path.cwd())]  # `module:Class` policies
    target = out or Path("results") / f"{load_experiment(experiment, settings or ())[0].name}-advice"
    with _progress(quiet or as_json) as progress:
        advice = find_advice(
            experiment,
            overrides=settings or (),
            case=case,
            seeds=seeds,
            steps=steps,
            worth=worth,
            top=top,
            most=most,
            skip=skip or (),
            out=target,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(advice.as_json(), indent=2))
        return
    _print(advice, target, quiet)


def _print(advice: Advice, target: Path, quiet: bool) -> None:
    from rich.console import Console

    console = Console()
    if not quiet:
        for table in _tables(advice):
            console.print(table)
            console.print()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for sentence in advice.conclusions:
        console.print(sentence, style="bold")
    if not quiet:
        for name, why in advice.not_applicable.items():
            console.print(f"does not apply: {name}: {why}", style="dim")
        for note in advice.notes:
            console.print(f"note: {note}", style="dim")
    console.print(f"results: {target}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on standard error, one update a run."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update


def _tables(advice: Advice) -> Iterator[Table]:
    from rlsim.advise.advice import SECTIONS

    shown: dict[str, Callable[[pd.DataFrame], tuple[list[str], list[list[str]]]]] = {
        "memory": _memory,
        "memory_calls": _memory_calls,
        "idle": _idle,
        "idle_waits": _waits,
        "ranking": _ranking,
        "scaling": _scaling,
    }
    for name, title, caption in SECTIONS:
        if name in shown and len(advice.tables[name]):
            yield _table(title, caption, *shown[name](advice.tables[name]))


def _table(title: str, caption: str, columns: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, header_style="bold", title=title, caption=caption, title_justify="left",
        caption_justify="left",
    )  # fmt: skip
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        words = column in WORDS  # these are folded where the terminal is narrow; numbers are never cut
        width = None if words else max(map(len, (*cells, *column.split())))
        table.add_column(column, justify="left" if words else "right", min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _memory(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    columns = [
        "TP",
        "fits",
        "weights",
        "working",
        "beside",
        "KV",
        "KV tokens",
        "full seq.",
        "mean seq.",
        "to hold",
        "why not",
    ]
    rows = []
    for row in frame.to_dict("records"):
        gb = [_number(row[f"{part}_gb"], 1) for part in ("weights", "activations", "resident", "kv")]
        counts = [_number(row[key]) for key in ("kv_tokens", "full_sequences", "mean_sequences", "sequences")]
        why = str(row["why_not"]) or ("responses wait for KV" if row["waits"] else "")
        rows.append([str(row["tp"]), "yes" if row["fits"] else "no", *gb, *counts, why])
    return columns, rows


def _memory_calls(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"{row['call']} ({row['model']})",
            "yes" if row["fits"] else "no",
            *(_number(row[f"{part}_gb"], 1) for part in ("kept", "working", "total", "gpu")),
        ]
        for row in frame.to_dict("records")
    ]
    return ["call", "fits", "kept", "while it runs", "in all", "GPU has"], rows


def _idle(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    from rlsim.advise.idle import CAUSES

    shares = frame[["gpu", "idle", *CAUSES]].set_index("gpu")
    if len(shares) > MOST_GPUS:  # as many groups of neighbours
        groups = (shares.index.to_numpy() * MOST_GPUS) // len(shares)
        names = [f"{part.index.min()}-{part.index.max()}" for _, part in shares.groupby(groups)]
        shares = shares.groupby(groups).mean().set_axis(names, axis=0)
    rows = [
        [str(gpu), *(_share(value) for value in row)] for gpu, row in zip(shares.index, shares.to_numpy(), strict=True)
    ]
    rows.append(["all", *(_share(value) for value in shares.mean())])
    return ["GPU", "idle", *(cause.replace("_", " ") for cause in CAUSES)], rows


def _waits(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [[row["waits_for"] or "(nothing runs)", _share(row["share"])] for row in frame.to_dict("records")]
    return ["call", "share"], rows


def _ranking(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in frame.to_dict("records"):
        if row["same_as"]:
            continue
        also = frame[frame["same_as"] == row["system"]]["system"].tolist()
        system = f"{row['system']} ({row['tuned']})" if row["tuned"] else str(row["system"])
        marks = []
        if row["rank"] > 1 and row["with_best"]:
            marks.append("≈ best")
        if row["staleness"]:
            marks.append(f"staleness {row['staleness']}")
        if not row["comparable"]:
            marks.append("not comparable yet")
        marks += [f"same: {', '.join(also)}"] if also else []
        rows.append(
            [
                system,
                _number(row["step_time_s"], 1),
                _number(row["tokens_per_s"]),
                _with_interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
                _share(row["idle"]),
                "; ".join(marks),
            ]
        )
    return ["system", "step s", "tokens/s", "speedup", "idle", ""], rows


def _scaling(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            str(row["gpus"]),
            str(row["system"]) + (" *" if row["best"] else ""),
            _number(row["step_time_s"], 1),
            _number(row["gpu_s_per_step"]),
            _with_interval(row["doubling"], row["doubling_low"], row["doubling_high"]),
            _share(row["marginal"]),
            "" if row["pays"] is None else "yes" if row["pays"] else "no",
        ]
        for row in frame.to_dict("records")
    ]
    return ["GPUs", "system (* fastest)", "step s", "GPU-s", "over half as many", "marginal", "pays"], rows


def _number(value: Any, digits: int = 0) -> str:
    return "–" if value is None or value != value else f"{value:,.{digits}f}"


def _share(value: float) -> str:
    return "–" if value != value else f"{value:.1%}"


def _with_interval(value: float, low: float, high: float) -> str:
    if value != value:
        return "–"
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low == low else "")

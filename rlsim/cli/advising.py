"""`rlsim advise`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.cli import complete
from rlsim.cli.common import Certainty, Experiment, Settings, add_code_folders, named, progress_bar, with_options
from rlsim.cli.tables import print_ledgers, print_tables

if TYPE_CHECKING:
    from rich.table import Table

    from rlsim.advise.advice import Advice
    from rlsim.advise.texts import Text


def advise(
    experiment: Experiment,
    out: Annotated[Path | None, typer.Option(help="Results directory (default: results/NAME-advice).")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds (default: the experiment's, at most 5).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to simulate (default: the experiment's).")] = None,
    case: Annotated[str | None, typer.Option(help="Which of the experiment's cases.")] = None,
    settings: Settings = None,
    certainty: Certainty = None,
    worth: Annotated[float, typer.Option(help="Twice the GPUs pay if they are so many times as fast.")] = 1.5,
    top: Annotated[int, typer.Option(min=1, help="Systems that are tried on other numbers of GPUs.")] = 3,
    most: Annotated[int, typer.Option(min=1, help="Try up to so many times the GPUs.")] = 4,
    skip: Annotated[
        list[str] | None,
        named("Shipped policy to leave out, such as real; repeatable.", complete.policies),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One step of every system, then a few seeds of the best; no other GPU counts."),
    ] = False,
    max_staleness: Annotated[
        int,
        typer.Option(min=0, help="Updates that responses may be old; 1 or more tries asynchronous systems and splits."),
    ] = 0,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Run the best at both ends of what is assumed, too.")
    ] = True,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a core).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the headline and the conclusions only.")] = False,
) -> None:
    """Say what to run and which settings of veRL to change, what fits, why GPUs are idle, and how many GPUs pay.

    Example: rlsim advise experiments/pat_vs_static.yaml --quick
    """
    from rlsim.advise.advice import advise as find_advice
    from rlsim.report.write import write_report

    add_code_folders(experiment)
    settings = with_options(settings, certainty=certainty)
    target = _target(experiment, settings, out)
    try:
        with progress_bar(quiet or as_json) as progress:
            advice = find_advice(
                experiment, overrides=settings, case=case, seeds=seeds, steps=steps, worth=worth, top=top,
                most=most, skip=skip or (), quick=quick, max_staleness=max_staleness, what_if=what_if, workers=workers,
                out=target, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("rlsim: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    page = write_report(target)
    if as_json:
        typer.echo(json.dumps(advice.as_json(), indent=2))
    else:
        _print(advice, target, quiet)
        typer.echo(f"report: {page}")


def _target(experiment: str, settings: list[str] | None, out: Path | None) -> Path:
    """Where the results go, with a report that is rlsim's own to replace."""
    from rlsim.experiment.load import load_experiment
    from rlsim.output import check_own_file, results_folder
    from rlsim.report.write import REPORT

    target = out or results_folder(f"{load_experiment(experiment, settings or ())[0].name}-advice")
    if target.is_dir():
        check_own_file(target / REPORT)
    return target


def _print(advice: Advice, target: Path, quiet: bool) -> None:
    from rlsim.advise.texts import texts
    from rlsim.cli.terminal import Console
    from rlsim.experiment.ledger import ledgers

    console = Console(soft_wrap=True)
    console.print(advice.headline.text, style="bold")
    if advice.headline.how:
        console.print(advice.headline.how)
    for change in advice.headline.changes:
        console.print(f"    {change}")
    if not quiet:
        console.print()
        print_tables(map(_table, texts(advice.tables)))
        print_ledgers(ledgers(advice.result.manifest))
    for sentence in advice.conclusions:
        console.print(sentence, style="bold")
    if not quiet:
        for name, why in advice.not_applicable.items():
            console.print(f"does not apply: {name}: {why}", style="dim")
        for note in advice.notes:
            console.print(f"note: {note}", style="dim")
    console.print(f"results: {target}")


def _table(text: Text) -> Table:
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, header_style="bold", title=text.title, caption=text.caption, title_justify="left",
        caption_justify="left", min_width=len(text.title),
    )  # fmt: skip
    for number, (heading, cells) in enumerate(zip(text.headings, zip(*text.rows, strict=True), strict=True)):
        words = number in text.words  # these are folded where the terminal is narrow; numbers are never cut
        width = None if words else max(map(len, (*cells, *heading.split())))
        table.add_column(heading, justify="left" if words else "right", min_width=width, overflow="fold")
    for row in text.rows:
        table.add_row(*row)
    return table

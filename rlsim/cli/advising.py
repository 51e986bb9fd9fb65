"""`rlsim advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.cli import complete
from rlsim.cli.common import (
    PRINTED,
    Certainty,
    Experiment,
    Json,
    Settings,
    add_code_folders,
    check_json,
    named,
    progress_bar,
    with_options,
    write_json,
)
from rlsim.cli.tables import Table, print_ledgers, print_tables

if TYPE_CHECKING:
    from rlsim.results.advise.advice import Advice
    from rlsim.results.advise.texts import Text

#: The tables that are printed unless all are wanted.
SHORT = ("memory", "ranking", "splits")


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
    skip: Annotated[
        list[str] | None,
        named("Shipped policy to leave out, such as real; repeatable.", complete.policies),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One step of every system under one seed, then a few seeds of the best."),
    ] = False,
    max_staleness: Annotated[
        str,
        typer.Option(help="Try asynchronous systems and splits: up to so many updates (η), or mean:1, p95:2, max:1."),
    ] = "0",
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Run the best at both ends of what is assumed, too.")
    ] = True,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a core).")] = None,
    json_file: Json = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every table, and all that does not apply.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the headline only.")] = False,
) -> None:
    """Say what to run and which settings of your framework to change, what fits, and why GPUs are idle.

    Example: rlsim advise experiments/pat_vs_static.yaml --quick
    """
    from rlsim.results.advise.advice import advise as find_advice
    from rlsim.results.report.write import write_report

    add_code_folders(experiment)
    check_json(json_file)
    settings = with_options(settings, certainty=certainty)
    target = _target(experiment, settings, out)
    try:
        with progress_bar(quiet or json_file == PRINTED) as progress:
            advice = find_advice(
                experiment, overrides=settings, case=case, seeds=seeds, steps=steps, skip=skip or (), quick=quick,
                max_staleness=max_staleness, what_if=what_if, workers=workers, out=target, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("rlsim: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    page = write_report(target)
    if write_json(json_file, advice.as_json()):
        return
    _print(advice, target, page, quiet=quiet, verbose=verbose)


def _target(experiment: str, settings: list[str] | None, out: Path | None) -> Path:
    """Where the results go, with a report that is rlsim's own to replace."""
    from rlsim.base.output import check_own_file, results_folder
    from rlsim.experiment.load import load_experiment
    from rlsim.results.report.write import REPORT

    target = out or results_folder(f"{load_experiment(experiment, settings or ())[0].name}-advice")
    if target.is_dir():
        check_own_file(target / REPORT)
    return target


def _print(advice: Advice, target: Path, page: Path, *, quiet: bool, verbose: bool) -> None:
    """The tables, what they come to, and at the end, where a reader of the screen is, what to do."""
    from rlsim.cli.terminal import Console
    from rlsim.experiment.ledger import ledgers
    from rlsim.results.advise.texts import texts

    console = Console(soft_wrap=True)
    if not quiet:
        print_tables(_table(text) for text in texts(advice.tables) if verbose or text.name in SHORT)
        print_ledgers(ledgers(advice.result.manifest))
        for sentence in advice.conclusions:
            console.print(sentence)
        for name, why in advice.not_applicable.items() if verbose else ():
            console.print(f"does not apply: {name}: {why}", style="dim")
        for note in advice.notes:
            console.print(f"note: {note}", style="dim")
        if not verbose:
            console.print(f"{_untried(advice)}; --verbose prints all, as does the report", style="dim")
        console.print(f"results: {target}; report: {page}\n")
    console.print(advice.headline.text, style="bold")
    if advice.headline.how:
        console.print(advice.headline.how)
    for change in advice.headline.changes:
        console.print(f"    {change}")


def _untried(advice: Advice) -> str:
    """How many policies were not tried, in a line."""
    from rlsim.results.advise.ranking import STALE

    stale = sum(why == STALE for why in advice.not_applicable.values())
    others = f"{len(advice.not_applicable) - stale} for other reasons"
    return f"not tried: {f'{stale} policies as {STALE}, {others}' if stale else others}"


def _table(text: Text) -> Table:
    prose = len(text.headings) - 1 if text.headings[-1] == "why not" else -1
    return Table(text.headings, text.rows, text.title, text.caption, text.words, prose)

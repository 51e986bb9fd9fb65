"""`rlsim run`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsim.cli.common import Experiment, Settings, add_code_folders, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from rlsim.experiment.result import Result


def run(
    experiment: Experiment,
    out: Annotated[Path | None, typer.Option(help="Results directory (default: results/NAME).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, instead of the experiment's.")] = None,
    settings: Settings = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse costs of shapes outside what the calibration was measured at.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the path of the results only.")] = False,
) -> None:
    """Run an experiment, print a comparison, write the results.

    Example: rlsim run experiments/pat_vs_static.yaml --seeds 10 --set trace.cap=8K
    """
    from rlsim.experiment.load import load_experiment
    from rlsim.output import results_folder

    add_code_folders(experiment)
    target = out or results_folder(load_experiment(experiment, settings or ())[0].name)
    run_and_print(experiment, settings or (), target, seeds=seeds, strict=strict, quiet=quiet)


def run_and_print(
    experiment: str,
    overrides: Iterable[str] | Mapping[str, Any],
    target: Path,
    *,
    seeds: int | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> None:
    """Run an experiment, print its tables and notes, write its results."""
    from rlsim.experiment.run import run as run_experiment

    with progress_bar(quiet) as progress:
        result = run_experiment(
            experiment, overrides=overrides, seeds=seeds, out=target, strict=strict, progress=progress
        )
    if quiet:
        typer.echo(str(target))
        return
    from rlsim.cli.terminal import Console

    console = Console(markup=False)
    for table in _tables(result):
        console.print(table)
        console.print()
    console = Console(soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    console.print(f"results: {target}", highlight=False, markup=False)


def _tables(result: Result) -> Iterator[Table]:
    """Two tables per case: the comparison, and where the step's time goes."""
    from rich.table import Table

    baseline, seeds = result.manifest["baseline"], len(result.manifest["seeds"])
    interval = "paired by seed" if seeds > 1 else "no interval"
    for case, rows in result.summary().groupby("case", sort=False):
        title = " · ".join(part for part in (result.manifest["experiment"]["name"], str(case)) if part)
        means = f"means of {seeds} seeds ± half their 95% interval" if seeds > 1 else "one seed"
        waste = ["wasted"] if rows["wasted_fraction"].max() > 0 else []
        legend = "wasted: of the generated tokens; " if waste else ""
        compared = Table(
            box=None,
            pad_edge=False,
            header_style="bold",
            title=title,
            caption=f"{means};\nspeedup over {baseline}, {interval}",
        )
        parts = Table(
            box=None,
            pad_edge=False,
            header_style="bold",
            caption="seconds of a step; paused: for switches; " + legend + "bound: lower bound / gen",
        )
        compared.add_column("system", overflow="fold")
        parts.add_column("system", overflow="fold")
        for heading in ("step s", "gen s", "speedup", "bubble", "switches"):
            compared.add_column(heading, justify="right", no_wrap=True)
        for heading in ("gen", "90% by", "prep", "train", "sync", "paused", "tokens/s", *waste, "bound"):
            parts.add_column(heading, justify="right", no_wrap=True)
        for row in rows.to_dict("records"):
            system, low, high = str(row["system"]), row["speedup_low"], row["speedup_high"]
            tuned = result.manifest["tuned"].get(case, {}).get(system)
            speedup = f"{row['speedup']:.2f}" if row["speedup"] == row["speedup"] else "–"
            speedup = "baseline" if system == baseline else speedup
            if system != baseline and low == low:
                speedup += f" [{low:.2f}, {high:.2f}]"
            step, *parts_s = (
                f"{row[f'{part}_time_s']:.1f}" for part in ("step", "gen", "gen_p90", "prep", "train", "sync", "switch")
            )
            bubble = f"{row['bubble_fraction']:.1%}"
            name = f"{system} ({tuned})" if tuned else system
            half = row["gen_time_s_half"]
            gen = parts_s[0] + (f" ±{half:.1f}" if half == half else "")
            compared.add_row(name, step, gen, speedup, bubble, f"{row['switches']:.1f}")
            wasted = [f"{row['wasted_fraction']:.0%}" for _ in waste]
            parts.add_row(system, *parts_s, f"{row['tokens_per_s']:,.0f}", *wasted, _share(row["bound_share"]))
        yield compared
        yield parts


def _share(value: float) -> str:
    return "–" if value != value else f"{value:.0%}"

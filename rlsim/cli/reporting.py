"""`rlsim report` and `rlsim timeline`: results as people look at them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlsim.base.formats import listed
from rlsim.base.refusals import refuse
from rlsim.cli.common import echo, paths_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlsim.results.report.chosen_run import ChosenRun

#: More names than these are counted, not listed.
MOST_NAMES = 6


def report(
    directory: Path,
    out: Path | None = None,
    title: str | None = None,
    png: Path | None = None,
    svg: Path | None = None,
    case: str | None = None,
    system: list[str] | None = None,
    seed: int | None = None,
    step: int | None = None,
    show: bool = False,
    quiet: bool = False,
) -> None:
    """Write results as one HTML page that works offline: what was found, charts, and exactly what was run.

    Example: rlsim report results/pat-vs-static --system verl-tp1 --system pat --png charts
    """
    from rlsim.results.report.write import write_report

    path = write_report(
        directory, out, title=title, png=png, svg=svg, case=case, systems=system or (), seed=seed, step=step
    )
    if show:
        typer.launch(path.resolve().as_uri())
    if paths_only(quiet, path):
        return
    typer.echo(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB, opens in any browser)")
    for folder in (png, svg):
        if folder is not None:
            typer.echo(f"charts: {folder}")


def timeline(
    results: Path,
    system: str | None = None,
    case: str | None = None,
    seed: int | None = None,
    steps: str | None = None,
    requests: bool = True,
    out: Path | None = None,
    compressed: bool = False,
    quiet: bool = False,
) -> None:
    """Write one run as a timeline to open at https://ui.perfetto.dev: GPUs, requests, calls, counters, migrations.

    Example: rlsim timeline results/pat-vs-static --system pat --steps 0-1
    """
    from rlsim.results.report.timeline import write_timeline

    path = out or results / ("timeline.json.gz" if compressed else "timeline.json")
    refuse("rlsim timeline", compressed=compressed, out=out)
    written = write_timeline(
        results, path, case=case, system=system, seed=seed, steps=_numbers(steps), requests=requests
    )
    if paths_only(quiet, path):
        return
    run = written.run
    shown = " · ".join(part for part in (run.case, run.system, f"seed {run.seed}", _steps(run.steps)) if part)
    echo(f"timeline of {shown}")
    for line in _others(run):
        echo(line)
    typer.echo(f"{written.slices:,} slices, {written.samples:,} counter values, {written.arrows:,} arrows")
    if requests and written.with_requests != run.steps:
        echo(f"requests have tracks in {_steps(written.with_requests)}: --steps chooses others")
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it at https://ui.perfetto.dev")


def _numbers(text: str | None) -> list[int] | None:
    """The steps that `--steps` names (`3`, `0-2`, `0,4`); None without the option."""
    from rlsim.experiment.schema import MOST_STEPS

    if text is None:
        return None
    steps: list[int] = []
    for part in text.split(","):
        found = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        refuse("--steps", text=text, first=first, last=last, most=MOST_STEPS)
        steps += range(first, last + 1)
    return steps


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    together = list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]}–{steps[-1]}" if together else "steps " + ", ".join(map(str, steps))


def _others(run: ChosenRun) -> list[str]:
    lines = []
    for option, chosen in (("case", run.case), ("system", run.system), ("seed", run.seed)):
        others = [str(name) for name in run.others[option] if name != chosen]
        if others:
            lines.append(f"  --{option} chooses another: {listed(others, MOST_NAMES)}")
    return lines

"""`rlsim plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlsim.base.charts import check_chart_path, save_chart
from rlsim.base.formats import Table, written
from rlsim.base.output import check_files, results_folder, write_text
from rlsim.base.reading import shipped
from rlsim.base.refusals import said
from rlsim.cli.common import PRINTED, add_code_folders, say, write_json
from rlsim.cli.tables import print_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlsim.experiment.plan_report import PlanReport
    from rlsim.workflow.search import Improvement


def plan(
    experiment: str,
    method: str = "descent",
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    lag: int = 0,
    most_plans: float | None = None,
    settings: list[str] | None = None,
    out: Path | None = None,
    json_file: Path | None = None,
    chart: Path | None = None,
    apply: bool = False,
    quiet: bool = False,
) -> None:
    """Search where the calls of an RLHF step should run, and how they should be spread there.

    With --lag generation is that many updates behind (as in one_step_off), and the split of the GPUs is searched too.
    The space: TP in powers of two, PP that divides the rest, DP that uses every GPU; micro-batches as the experiment
    says, or powers of two of them. Seconds are those of the first step's lengths.

    Example: rlsim plan experiments/real_7b_7b.yaml --seconds 5 --apply
    """
    from rlsim.experiment.load import load_experiment
    from rlsim.experiment.plan_report import search_plan
    from rlsim.experiment.result import check_target

    add_code_folders(experiment)
    shown = json_file == PRINTED
    check_files(None if shown else json_file, out, chart, inputs=(experiment,))  # before the search, not after it
    if chart is not None:
        check_chart_path(chart)
    target = results_folder(load_experiment(experiment, settings or ())[0].name) if apply else None
    if target is not None:
        check_target(target)
    report = search_plan(
        experiment,
        overrides=settings or (),
        method=method,
        seconds=seconds,
        evaluations=evaluations,
        seed=seed,
        lag=lag,
        most_plans=most_plans,
        on_improvement=None if quiet or shown else _progress(),
    )
    _write(report, out, chart)
    if write_json(json_file, report.as_json()):
        pass
    elif quiet:
        typer.echo(f"{report.found.cost_s:.6g}")
    else:
        _print(report)
    if target is not None:
        _run(experiment, report, settings or [], target, quiet or shown)


def _progress() -> Callable[[Improvement], None] | None:
    """A line on standard error that shows the best plan so far."""
    from rlsim.cli.terminal import Console

    console = Console(stderr=True, highlight=True)
    if not console.is_terminal:
        return None

    def show(improvement: Improvement) -> None:
        seconds, plans = improvement.elapsed_s, improvement.evaluations
        console.print(f"{seconds:7.2f} s  {plans:>9,} plans  best {improvement.best_cost_s:.2f} s", end="\r")

    return show


def _print(report: PlanReport) -> None:
    calls = report.calls().astype(object)
    plan = written("plan", calls.where(calls.notna(), None))
    print_tables(
        [Table.of(f"{report.experiment.name} · plan", plan), Table.of("", written("ways", report.reallocations()))]
    )
    found, space = report.found, report.space
    for row in report.sides().to_dict("records") if report.lag else ():
        say(f"{row['side']}: {row['time_s']:.2f} s with the new weights, idle {row['idle']:.0%}")
    cpus = any(call.kind == "reward" and not report.plan.of(call.name).gpus for call in space.workflow.calls)
    for line in said(shipped("says.yaml")["plan"], report=report, found=found, space=space, cpus=cpus):
        say(line)


def _write(report: PlanReport, out: Path | None, chart: Path | None) -> None:
    from rlsim.experiment.plan_report import improvement_chart
    from rlsim.policies.plan import plan_text

    if out is not None:
        parts = report.as_parts
        what = "parts" if len(parts) > 1 else "a part"
        about = f"Found by rlsim plan for {report.experiment.name}: {what} of a system, for `use`."
        write_text(out, plan_text(parts if len(parts) > 1 else parts[0], about))
    if chart is not None:
        save_chart(improvement_chart(report), chart)


def _run(experiment: str, report: PlanReport, settings: list[str], target: Path, quiet: bool) -> None:
    from rlsim.cli.running import run_and_print
    from rlsim.experiment.load import parse_overrides

    found = {"name": "found", "use": report.as_parts}
    overrides = {**parse_overrides(settings), "systems": [*report.experiment.systems, found]}
    run_and_print(experiment, overrides, target, quiet=quiet)

"""`rlsim check` and `rlsim run`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlsim.base.formats import Table, written
from rlsim.base.output import results_folder
from rlsim.cli.common import (
    PRINTED,
    add_code_folders,
    echo,
    paths_only,
    progress_bar,
    say,
    say_notes,
    with_options,
    write_json,
)
from rlsim.cli.tables import caption, print_ledgers, print_tables

if TYPE_CHECKING:
    import pandas as pd

    from rlsim.experiment.result import Result
    from rlsim.experiment.verdict import Verdict

#: Less than this share of a time is rounding.
ROUNDING = 1e-6


def check(
    file: str,
    settings: list[str] | None = None,
    seeds: int | None = None,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Check an experiment or a sweep, all its cases and points, without a simulation or a search for plans.

    Prints what it is in one line, or what is wrong with it (exit code 2; so it is with what the framework or engine
    would not start with, which `run` takes with a note). Whether a plan that is yet to be searched for
    fits into memory is known after the search only.

    Example: rlsim check experiments/pat_vs_static.yaml --set trace.cap=8K
    """
    from rlsim.experiment.run import check_experiment
    from rlsim.results.sweeps.points import check_sweep, is_sweep

    add_code_folders(file)
    if is_sweep(file):
        name, points = check_sweep(file, settings or (), seeds)
        runs = sum(point.runs for point in points)
        many = f"{len(points):,} point{'s' * (len(points) > 1)}"
        what = f"{many} (the first: {points[0].counted}); {runs:,} run{'s' * (runs > 1)} in all"
    else:
        points = [check_experiment(file, settings or (), seeds)]
        name, runs, what = points[0].name, points[0].runs, points[0].counted
    notes, refused = [*dict.fromkeys(note for point in points for note in point.notes)], any(p.refused for p in points)
    data = {"name": name, "points": len(points), "runs": runs, "notes": notes, "refused": refused}
    if not write_json(json_file, data) and not quiet:
        for line in (f"{name}: {what}", *(f"note: {note}" for note in notes)):
            echo(line)
    if refused:
        raise typer.Exit(2)


def run(
    experiment: str,
    out: Path | None = None,
    seeds: int | None = None,
    settings: list[str] | None = None,
    warmup: int | None = None,
    steps_at_cap: bool = False,
    certainty: int | None = None,
    strict: bool = False,
    what_if: bool = False,
    json_file: Path | None = None,
    workers: int = 1,
    quiet: bool = False,
) -> None:
    """Run an experiment, print a comparison, write the results.

    Example: rlsim run experiments/pat_vs_static.yaml --seeds 10 --set trace.cap=8K
    """
    from rlsim.experiment.load import load_experiment

    add_code_folders(experiment)
    target = out or results_folder(load_experiment(experiment, settings or ())[0].name)
    settings = with_options(settings, warmup=warmup, steps_at_cap=steps_at_cap or None, certainty=certainty)
    run_and_print(
        experiment, settings, target, seeds=seeds, strict=strict, what_if=what_if, workers=workers, quiet=quiet,
        json_file=json_file,
    )  # fmt: skip


def run_and_print(
    experiment: str,
    overrides: Iterable[str] | Mapping[str, Any],
    target: Path,
    *,
    seeds: int | None = None,
    strict: bool = False,
    what_if: bool = False,
    workers: int = 1,
    quiet: bool = False,
    json_file: Path | None = None,
) -> None:
    """Run an experiment, print its tables and notes (`json_file`: write them as JSON), write its results."""
    from rlsim.experiment.result import earlier
    from rlsim.experiment.run import run as run_experiment

    before, reported = earlier(target), (target / "report.html").is_file()
    with progress_bar(quiet or json_file == PRINTED) as progress:
        result = run_experiment(
            experiment, overrides=overrides, seeds=seeds, out=target, strict=strict, what_if=what_if, workers=workers,
            progress=progress,
        )  # fmt: skip
    from rlsim.experiment.ledger import ledgers
    from rlsim.experiment.verdict import judge

    summary = result.summary()
    cases = {str(case): rows for case, rows in summary.groupby("case", sort=False)}
    verdicts = {case: judge(rows, str(result.manifest["baseline"])) for case, rows in cases.items()}
    said = {case: one.sentences(result.manifest["tuned"].get(case)) for case, one in verdicts.items()}
    document = {"directory": str(target), "headlines": said, "summary": json.loads(summary.to_json(orient="records"))}
    document |= {"notes": [*result.notes], "ledger": result.manifest["ledger"]}
    if write_json(json_file, document) or paths_only(quiet, target):
        return
    print_tables(table for case, rows in cases.items() for table in _tables(result, case, rows, verdicts[case]))
    print_ledgers(
        ledgers(result.manifest), "what each is worth: rlsim run --what-if; say what you know: --set KEY=VALUE"
    )
    say_notes(result.notes)
    say(f"results: {target}{_replaced(before, result.manifest, reported) if before else ''}\n")
    for case, sentences in said.items():
        say(" ".join([*([f"{case}:"] if case else []), *sentences]), "bold")


def _replaced(before: Mapping[str, Any], after: Mapping[str, Any], reported: bool) -> str:
    """That earlier results were replaced, and in which settings they differ."""
    from rlsim.results.sweeps.tables import differences, listed

    both = ({**one["experiment"], "seeds": one["seeds"], "rlsim": one["rlsim"]} for one in (before, after))
    changed = differences([{key: value for key, value in one.items() if key != "description"} for one in both])
    what = f"in place of earlier ones{' and their report' if reported else ''}"
    return f" ({what}, {f'of other settings: {listed(changed)}' if changed else 'of the same settings'})"


def _tables(result: Result, case: str, rows: pd.DataFrame, verdict: Verdict) -> Iterator[Table]:
    """Of a case the comparison, where the step's time goes, and what asynchrony costs and leaves idle, if anything."""
    seeds, tuned = len(result.manifest["seeds"]), result.manifest["tuned"].get(case, {})
    title = " · ".join(part for part in (result.manifest["experiment"]["name"], case) if part)
    which = "of the speedup" if verdict.unit == "responses" else "by tokens, as lengths differ"
    said = caption("run", seeds=seeds, s="s" * (seeds > 1), baseline=verdict.baseline, which=which)
    yield Table.of(title, written("run", rows, tuned=tuned, verdict=verdict), 5, caption=said)
    waits = bool(rows["waiting_time_s"].max() > ROUNDING * rows["step_time_s"].max())
    overlaps = bool((rows["gen_time_s"] - rows["gen_exposed_s"] > ROUNDING * rows["gen_time_s"]).any())
    parts = written("parts", rows, waits=waits, overlaps=overlaps)
    said = caption("parts", columns=parts, overlaps=overlaps, wait="wait (no call of any step ran), " * waits)
    yield Table.of("", parts, caption=said)
    if len(more := written("relaxed", rows)) > 1:
        yield Table.of("", more, caption=caption("relaxed", columns=more))

"""From results to a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsim.base.charts import check_chart_path, save_chart
from rlsim.base.output import check_folder, check_own_file, make_folder
from rlsim.errors import ConfigError
from rlsim.experiment.ledger import ledgers, turns
from rlsim.experiment.result import Result, read_result
from rlsim.results.report.chosen_run import Choice, choose
from rlsim.results.report.gantt import generation_blocks, timeline_blocks
from rlsim.results.report.lengths import lengths_blocks
from rlsim.results.report.method import calibration_blocks, configuration_blocks, findings, ledger_blocks, listing
from rlsim.results.report.page import Page, check_page_path, sections_of, setups_of
from rlsim.results.report.shares import gpu_blocks, step_blocks, trajectory_blocks
from rlsim.results.report.speedups import speedup_blocks, staleness_blocks
from rlsim.results.report.sweep_page import sweep_page
from rlsim.results.sweeps.store import DEFINITION, SweepResult, read_sweep

#: The page's file in a results directory, if no other is given.
REPORT = "report.html"


def write_report(
    source: Result | SweepResult | str | Path,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    case: str | None = None,
    systems: Sequence[str] = (),
    seed: int | None = None,
    step: int | None = None,
    png: str | Path | None = None,
    svg: str | Path | None = None,
) -> Path:
    """Write the results of a run or sweep (or those in a directory) as one HTML page, and return its path.

    The page needs nothing else. `path` defaults to `report.html` in the results' directory. `case`, `systems`, `seed`
    and `step` say what the charts over time show; by default the first case, the baseline and the best other system, at
    the baseline's median step; a sweep has none. `png` and `svg` are folders to write every chart to as a picture.
    Raises `ConfigError` for results or targets that are not there, `CatalogueError` for names that were not run.
    """
    if isinstance(source, str | Path):
        is_sweep = (Path(source) / DEFINITION).is_file()
        found: Result | SweepResult = read_sweep(source) if is_sweep else read_result(source)
    else:
        found = source
    target = _target(source, path)
    folders = [(Path(folder), suffix) for folder, suffix in ((png, ".png"), (svg, ".svg")) if folder is not None]
    check_page_path(target)  # before the work, not after it
    for folder, suffix in folders:
        check_folder(folder)
        check_chart_path(folder / f"charts{suffix}")
    if isinstance(found, Result):
        page = report_page(found, choose(found, case=case, systems=systems, seed=seed, step=step), title)
    elif case or systems or seed is not None or step is not None:
        raise ConfigError(f"{found.directory} is a sweep: its page has no charts over time to choose a step for")
    else:
        page = sweep_page(found, title=title)
    pictures = {folder / f"{one.id}{suffix}": one.chart for folder, suffix in folders for one in page.figures}
    for picture in filter(Path.exists, pictures):
        check_own_file(picture)
    page.write(target)
    for picture, chart in pictures.items():
        make_folder(picture.parent)
        save_chart(chart, picture)
    return target


def _target(source: Result | SweepResult | str | Path, path: str | Path | None) -> Path:
    if path is not None:
        return Path(path)
    if isinstance(source, Result):
        raise ConfigError("results in memory have no directory: give the report's path")
    return (source.directory if isinstance(source, SweepResult) else Path(source)) / REPORT


def report_page(result: Result, choice: Choice, title: str | None = None) -> Page:
    """The page of some results; see `write_report`."""
    setups = setups_of(result.manifest)
    setup = next(one for one in setups if one.case == choice.case)
    experiment = result.manifest["experiment"]
    sections = sections_of(
        ("speedups", "Which system is fastest", speedup_blocks(result, setups)),
        ("staleness", "What staleness buys", staleness_blocks(result, setups)),
        ("step", "What a step consists of", step_blocks(result, setups)),
        ("gpu-time", "Where the GPU time went", gpu_blocks(result, setups)),
        ("trajectories", "Where the time of trajectories goes", trajectory_blocks(result, setups)),
        ("lengths", "How long the responses are", lengths_blocks(result, setups)),
        ("generation", "Generation over time", generation_blocks(result, choice, setup)),
        ("timeline", "What every GPU did", timeline_blocks(result, choice, setup)),
        ("ledger", "What it rests on", ledger_blocks(result)),
        ("calibration", "How sure the figures are", calibration_blocks(result.manifest["lookups"], setups)),
        ("notes", "Notes of the run", [listing(result.notes, "The run noted nothing.")]),
        ("configuration", "Exactly what was run", configuration_blocks(result, setups)),
    )
    workflow = experiment["workflow"]
    clusters, models = ({getattr(one, name): None for one in setups} for name in ("cluster", "model"))
    facts = (
        ("Cluster", ", ".join(clusters)),
        ("Model", ", ".join(models)),
        ("Algorithm", str(workflow["algorithm"])),
        ("Batch", f"{workflow['prompts']:,} prompts × {workflow['responses']:,} responses"),
        ("Steps", f"{workflow['steps']:,} × {len(result.manifest['seeds'])} seeds"),
    )
    deciding = [text for _, ledger in ledgers(result.manifest) if (text := turns(ledger))]
    *found, sure = findings(result)
    said = (*found, *(f"{text}." for text in deciding), sure)
    return Page(title or experiment["name"], experiment["description"], said, sections, facts)

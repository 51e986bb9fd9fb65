"""From results to a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsim.errors import ConfigError
from rlsim.experiment.result import Result, read_result
from rlsim.report.choice import choose
from rlsim.report.headline import findings
from rlsim.report.page import Page, check_page_path
from rlsim.report.pictures import check_pictures_folder, write_pictures
from rlsim.report.sections.comparison import gpu_section, lengths_section, speedup_section, step_section
from rlsim.report.sections.method import calibration_section, configuration_section, notes_section
from rlsim.report.sections.time import generation_section, timeline_section
from rlsim.report.setups import case_setups

#: The page's file in a results directory, if no other is given.
REPORT = "report.html"


def write_report(
    source: Result | str | Path,
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
    """Write results (or those in a directory) as one HTML page that needs nothing else, and return its path.

    `path` defaults to `report.html` in the results' directory. `case`, `systems`, `seed` and `step` say what the charts
    over time show; by default the first case, the baseline and the best other system, at the baseline's median step.
    `png` and `svg` are folders to write every chart to as a picture. Raises `ConfigError` for results or targets that
    are not there, `CatalogueError` for names that were not run.
    """
    if path is None and isinstance(source, Result):
        raise ConfigError("results in memory have no directory: give the report's path")
    target = Path(path) if path is not None else Path(str(source)) / REPORT
    folders = [(Path(folder), suffix) for folder, suffix in ((png, ".png"), (svg, ".svg")) if folder is not None]
    result = source if isinstance(source, Result) else read_result(source)
    check_page_path(target)  # before the work, not after it
    for folder, _ in folders:
        check_pictures_folder(folder)
    page = report_page(result, title=title, case=case, systems=systems, seed=seed, step=step)
    page.write(target)
    for folder, suffix in folders:
        write_pictures(page, folder, suffix)
    return target


def report_page(
    result: Result,
    *,
    title: str | None = None,
    case: str | None = None,
    systems: Sequence[str] = (),
    seed: int | None = None,
    step: int | None = None,
) -> Page:
    """The page of some results; see `write_report`."""
    setups = case_setups(result)
    choice = choose(result, case=case, systems=systems, seed=seed, step=step)
    setup = next(one for one in setups if one.case == choice.case)
    experiment = result.manifest["experiment"]
    sections = (
        speedup_section(result, setups),
        step_section(result, setups),
        gpu_section(result, setups),
        lengths_section(result, setups),
        generation_section(result, choice, setup),
        timeline_section(result, choice, setup),
        calibration_section(result, setups),
        notes_section(result),
        configuration_section(result, setups),
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
    return Page(title or experiment["name"], experiment["description"], findings(result), sections, facts)

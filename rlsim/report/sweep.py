"""The page of a sweep: how the systems compare as the axes change, and exactly what was run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlsim.errors import ConfigError
from rlsim.report.frames.sweep import labels
from rlsim.report.page import Block, Code, Listing, Page, Section, Table, Text
from rlsim.report.sections.method import as_yaml, calibration_section
from rlsim.report.sections.sweep import sweep_findings, sweep_section, sweep_table
from rlsim.report.setups import setups_of

if TYPE_CHECKING:
    from rlsim.sweeps.read import SweepResult

_MOST_NOTES = 40


def sweep_page(sweep: SweepResult, *, title: str | None = None) -> Page:
    """The page of the points that are done; raises `ConfigError` if there are none."""
    frame, units = sweep.summary(), {axis.name: axis.unit for axis in sweep.axes}
    if frame.empty:
        raise ConfigError(f"{sweep.directory}: no point of the sweep is done, there is nothing to report")
    names = {name: f"{name} ({unit})" if unit else name for name, unit in units.items()}
    frame = frame.rename(columns=names)
    axes = list(names.values())
    if frame["case"].nunique() > 1:
        axes.append("case")
    records = {point: sweep.record(point) for point in frame["point"].unique()}
    baselines = list(dict.fromkeys(str(record["baseline"]) for record in records.values()))
    baseline = baselines[0] if len(baselines) == 1 else "the point's baseline"
    states = sweep.points["status"].value_counts()
    first = next(iter(records.values()))
    sections = [
        sweep_section(frame, axes, baseline),
        Section("points", "Every point", _points(frame, axes, sweep)),
        calibration_section(_lookups(records), setups_of(records.values())),
        _notes(records),
        _configuration(sweep, first),
    ]
    facts = [("Experiment", str(first["experiment"]["name"])), ("Points", f"{len(sweep.points):,}")]
    facts += [(name, ", ".join(_labels(frame[name]))) for name in axes]
    facts += [(str(state), f"{count:,}") for state, count in states.items() if state != "done"]
    own = frame["system"] == frame["point"].map({point: str(record["baseline"]) for point, record in records.items()})
    findings = sweep_findings(frame, axes, baseline, own)
    return Page(
        title or sweep.name, str(first["experiment"].get("description", "")), findings, tuple(sections), tuple(facts)
    )


def _labels(values: pd.Series[Any], most: int = 8) -> list[str]:
    found = list(dict.fromkeys(labels(values)))
    return found if len(found) <= most else [found[0], "…", found[-1]]


def _points(frame: pd.DataFrame, axes: Sequence[str], sweep: SweepResult) -> tuple[Block, ...]:
    blocks: list[Block] = [sweep_table(frame, axes)]
    if sweep.failed:
        blocks.append(Text("Points without results", heading=True))
        rows = [[point, error] for point, error in sweep.failed.items()]
        blocks.append(Table("What went wrong", ("point", "error"), rows, words=frozenset({1})))
    return tuple(blocks)


def _lookups(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{point} {case}": table for point, record in records.items() for case, table in record["lookups"].items()}


def _notes(records: Mapping[str, Mapping[str, Any]]) -> Section:
    counts = Counter(note for record in records.values() for note in record["notes"])
    items = [f"{note} ({count:,} of {len(records):,} points)" for note, count in counts.most_common(_MOST_NOTES)]
    if len(counts) > _MOST_NOTES:
        items.append(f"{len(counts) - _MOST_NOTES:,} more are in the sweep's files")
    return Section("notes", "Notes of the runs", (Listing(tuple(items)) if items else Text("The runs noted nothing."),))


def _configuration(sweep: SweepResult, first: Mapping[str, Any]) -> Section:
    versions = [[name, value] for name, value in {"rlsim": first["rlsim"], **first["versions"]}.items()]
    return Section(
        "configuration",
        "Exactly what was run",
        (
            Text(
                "The experiment of the first point, with every default filled in; the axes say what differs at others."
            ),
            Code(as_yaml(first["experiment"]), "The experiment as YAML"),
            Table("Versions", ("what", "value"), versions, words=frozenset({1})),
            Text(f"Every file of the sweep holds the whole configuration of its point; this page is of {sweep.name}."),
        ),
    )

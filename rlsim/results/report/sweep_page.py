"""The page of a sweep: how the systems compare as the axes change, and exactly what was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlsim.base.formats import Table, few, is_missing, rate, written
from rlsim.base.reading import shipped
from rlsim.base.refusals import said
from rlsim.errors import ConfigError
from rlsim.experiment.steadiness import comparable
from rlsim.experiment.verdict import Verdict, decided, judge
from rlsim.results.report.method import as_run, calibration_blocks, listing
from rlsim.results.report.page import Block, Page, Text, figure, sections_of, setups_of
from rlsim.results.report.style import DASHES, DIVERGING, GREY, SERIES, WIDTH, chart, label_angle
from rlsim.results.sweeps.store import SweepResult

#: What a sweep is drawn in: the speedup where there are several systems, and throughput.
SPEEDUP, RATE = "speedup", "responses_per_s"
TITLES = {SPEEDUP: "speedup", RATE: "responses per second"}
#: The colour of what cannot be compared.
_LATE = {"condition": {"test": "datum.late", "value": GREY}}
_LOG = 10.0  # an axis whose values differ by more is drawn in log


#: By point and case.
Verdicts = Mapping[tuple[str, str], Verdict]


class Slice(NamedTuple):
    """Points that differ in at most two axes."""

    axes: tuple[str, ...]  # one or two of them
    fixed: dict[str, Any]  # the other axes that vary in the sweep, and their values here
    points: pd.DataFrame


def varying(frame: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The axes that take more than one value."""
    return [axis for axis in axes if frame[axis].map(_exact).nunique() > 1]


def cut(frame: pd.DataFrame, axes: Sequence[str]) -> Iterator[Slice]:
    """The sweep cut up: along its first two varying axes, once for each combination of the others."""
    shown, others = axes[:2], list(axes[2:])
    if not others:
        yield Slice(tuple(shown), {}, frame)
        return
    keys = [frame[axis].map(_exact) for axis in others]
    for _, points in frame.groupby(keys, sort=False):
        yield Slice(tuple(shown), {axis: points[axis].iloc[0] for axis in others}, points)


def is_grid(points: pd.DataFrame, axes: Sequence[str], most: int = 24) -> bool:
    """Whether two axes span a grid that is at least half full and small enough to write numbers into."""
    levels = [points[axis].map(_exact).nunique() for axis in axes]
    there = len(points[list(axes)].map(_exact).drop_duplicates())
    return max(levels) <= most and 2 * there >= levels[0] * levels[1]


def best_systems(points: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """At every point the system with the best ratio: axes, system, speedup, responses per second, unit, unsteady."""
    keys = [points[axis].map(_exact).rename(f"key {i}") for i, axis in enumerate(axes)]
    found = []
    for _, rows in points.groupby(keys, sort=False) if keys else [((), points)]:
        best = judge(rows, "").rows[0]
        found.append(rows[rows["system"] == best.system])
    return pd.concat(found)[[*axes, "system", SPEEDUP, RATE, "unit", "unsteady"]].sort_index()


def is_number(values: pd.Series[Any]) -> bool:
    """Whether an axis holds numbers only (true, false and none are names)."""
    found = values.tolist()
    return all(isinstance(value, Real) and not isinstance(value, bool) and not is_missing(value) for value in found)


def levels(values: pd.Series[Any]) -> list[str]:
    """An axis' values as labels: numbers in ascending order, names as they come."""
    unique = list(dict(zip(labels(values), values.tolist(), strict=True)).items())
    if is_number(values):
        unique.sort(key=lambda item: item[1])
    return [text for text, _ in unique]


def labels(values: pd.Series[Any]) -> pd.Series[str]:
    """An axis' values as they are written on it: in full where they could not be told apart otherwise."""
    short, exact = values.map(label), values.map(_exact)
    return short if short.nunique() == exact.nunique() else exact


def _exact(value: Any) -> str:
    """Tells a value from all others, however close."""
    return repr(float(value)) if isinstance(value, Real) and not is_missing(value) else label(value)


def label(value: Any) -> str:
    """An axis' value as it is written in text; a missing one (NaN in a column of numbers) is `none`."""
    if is_missing(value):
        return "none"
    if isinstance(value, bool | np.bool):
        return str(value).lower()
    if isinstance(value, Real):
        return f"{int(float(value)):,}" if float(value).is_integer() else f"{float(value):.4g}"
    return str(value)


def lines_chart(points: pd.DataFrame, axis: str, metric: str) -> Any:
    """One line per system along one axis (a number or names), with intervals where the speedup has them; dots of what
    cannot be compared are grey and have none."""
    systems = list(dict.fromkeys(points["system"]))
    numbers = is_number(points[axis])
    frame = points.assign(x=points[axis] if numbers else labels(points[axis]), value=points[metric])
    shown, colours = systems, SERIES
    if len(systems) > len(SERIES):
        shown, colours = [*systems[: len(SERIES) - 1], "others"], (*SERIES[:-1], GREY)
    frame["series"] = frame["system"].where(frame["system"].isin(shown), "others")
    frame["late"] = ~comparable(frame)
    kept = ["x", "value", "system", "series", "late"]
    if metric == SPEEDUP:
        frame = frame.assign(**{end: frame[f"speedup_{end}"].mask(frame["late"]) for end in ("low", "high")})
        kept += ["low", "high"]
    return chart(
        "sweep-lines",
        frame=frame[kept],
        along=_along(points[axis], axis),
        colours=dict(zip(shown, colours, strict=False)),
        dashes=dict(zip(shown, map(list, DASHES), strict=False)),
        kinds=_kinds(x=numbers),
        axis=axis,
        title=TITLES[metric],
        speedup=metric == SPEEDUP,
        grey=_LATE,
    )


def _along(values: pd.Series[Any], axis: str) -> dict[str, Any]:
    """The axis of lines: numbers in log if they are far apart, or names."""
    if not is_number(values):
        names = levels(values)
        angle = label_angle(names, WIDTH - 80)
        return {"field": "x", "type": "nominal", "title": axis, "sort": names, "axis": {"labelAngle": angle}}
    low, high = float(values.min()), float(values.max())
    kind: dict[str, Any] = {"type": "log"} if low > 0 and high / low >= _LOG else {"zero": False}
    ticks = {"values": sorted(set(values))} if values.nunique() <= 12 else {}
    look = {**ticks, "format": ",~f", "labelOverlap": "greedy"}
    return {"field": "x", "type": "quantitative", "title": axis, "axis": look,
            "scale": {"nice": False, "padding": 16, **kind}}  # fmt: skip


def map_chart(points: pd.DataFrame, axes: Sequence[str], metric: str, text: str = "", *, grid: bool = True) -> Any:
    """The metric of one system at every point: number and colour of the cells of a grid, or the colours of dots.

    `text`: a column to write into the cells instead. What cannot be compared is grey, with a dagger.
    """
    numbers = {name: is_number(points[axis]) for name, axis in zip("xy", axes, strict=True)}
    frame = pd.DataFrame({"value": points[metric], "late": ~comparable(points)})
    for name, axis in zip("xy", axes, strict=True):
        frame[name] = points[axis] if numbers[name] and not grid else labels(points[axis])
    frame["text"] = (
        points[text].astype(str) if text else points[metric].map("{:.2f}".format if metric == SPEEDUP else rate)
    )
    frame["text"] += np.where(frame["late"], " †", "")
    colour, dark = _colour(frame["value"], metric)
    across, down = (levels(points[axis]) for axis in axes)
    return chart(
        "sweep-grid" if grid else "sweep-dots",
        frame=frame[["x", "y", "value", "late", *(["text"] if grid else [])]],
        colour=colour,
        dark=dark,
        across=across,
        down=down[::-1] if numbers["y"] else down,
        each=min(max((WIDTH - 140) // len(across), 34), 110),
        kinds=_kinds(**numbers),
        x_axis=axes[0],
        y_axis=axes[1],
        title=TITLES[metric],
    )


def _kinds(**numbers: bool) -> SimpleNamespace:
    return SimpleNamespace(**{name: "quantitative" if own else "nominal" for name, own in numbers.items()})


def _colour(values: pd.Series[float], metric: str) -> tuple[dict[str, Any], str]:
    """Colour of the metric, which diverges at a speedup of 1, and the test that says where text must be white."""
    low, high = float(values.min()), float(values.max())
    if metric == SPEEDUP:
        far = max(high, float((1 / values).max()), 1.05)
        scale = {"type": "log", "domain": [1 / far, 1, far], "range": [*DIVERGING], "interpolate": "rgb"}
        dark, look = "", {"format": ".2f", "values": [round(far**power, 2) for power in (-1, -0.5, 0, 0.5, 1)]}
    else:
        scale = {"domain": [low, high] if high > low else [low * 0.9, high * 1.1], "range": ["#EAF2F9", "#0B4A8A"]}
        dark, look = f"datum.value > {low + 0.55 * (high - low):.6g}", {"format": ",.3~r"}
    key = {"title": TITLES[metric], "orient": "top", "gradientLength": 260, **look}
    return {"field": "value", "type": "quantitative", "scale": scale, "legend": key, **_LATE}, dark


_MOST_NOTES = 40
_TITLES = {SPEEDUP: "Speedup", RATE: "Throughput"}
_MOST_SLICES = 6
_MOST_MAPS = 6


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
    own = frame["point"].map({point: str(record["baseline"]) for point, record in records.items()})
    groups = frame.groupby(["point", "case"], sort=False)
    verdicts = {(str(p), str(case)): judge(rows, str(records[p]["baseline"])) for (p, case), rows in groups}
    judged, baselines = decided(frame, verdicts), own.unique().tolist()
    baseline = baselines[0] if len(baselines) == 1 else "the point's baseline"
    states = sweep.points["status"].value_counts()
    first = next(iter(records.values()))
    lookups = {f"{p} {case}": table for p, record in records.items() for case, table in record["lookups"].items()}
    notes = few(sweep.notes(), _MOST_NOTES, "are in the sweep's files")
    sections = (
        ("sweep", "Over the sweep", sweep_blocks(judged, axes, baseline)),
        ("points", "Every point", _points(frame, axes, sweep, verdicts)),
        ("calibration", "How sure the figures are", calibration_blocks(lookups, setups_of(*records.values()))),
        ("notes", "Notes of the runs", [listing(notes, "The runs noted nothing.")]),
        ("configuration", "Exactly what was run", _configuration(sweep, first)),
    )
    facts = [("Experiment", str(first["experiment"]["name"])), ("Points", f"{len(sweep.points):,}")]
    asked = sweep.points.rename(columns=names)  # those that failed, too
    facts += [(name, ", ".join(_labels((asked if name in asked else frame)[name]))) for name in axes]
    facts += [(str(state), f"{count:,}") for state, count in states.items() if state != "done"]
    findings = sweep_findings(judged, axes, baseline, frame["system"] == own)
    description = str(first["experiment"].get("description", ""))
    return Page(title or sweep.name, description, findings, sections_of(*sections), tuple(facts))


def _labels(values: pd.Series[Any], most: int = 8) -> list[str]:
    found = levels(values)
    return found if len(found) <= most else [found[0], "…", found[-1]]


def _points(frame: pd.DataFrame, axes: Sequence[str], sweep: SweepResult, verdicts: Verdicts) -> Iterator[Block]:
    yield sweep_table(frame, axes, verdicts)
    if sweep.failed:
        yield Text("Points without results", "heading")
        yield Table("What went wrong", ("point", "error"), [*sweep.failed.items()], words=(1,))


def _configuration(sweep: SweepResult, first: Mapping[str, Any]) -> Iterator[Block]:
    yield Text("The experiment of the first point, with every default filled in; the axes say what differs at others.")
    yield from as_run(first, "Versions", {})
    yield Text(f"Every file of the sweep holds the whole configuration of its point; this page is of {sweep.name}.")


def sweep_blocks(frame: pd.DataFrame, axes: Sequence[str], baseline: str) -> Iterator[Block]:
    """Lines along one varying axis, heatmaps over two, one set for each combination of further axes.

    `frame` has one row per point and system: the axes' columns, `system`, `responses_per_s`, and those of `decided`.
    The axes' columns are written on the charts by their names.
    """
    shown = varying(frame, axes)
    if not shown:
        yield Text("No axis takes more than one value: there is nothing to draw.")
    elif len(shown) == 1:
        yield from _lines(frame, shown[0], baseline)
    else:
        cuts = list(cut(frame, shown))
        for number, part in enumerate(cuts[:_MOST_SLICES]):
            yield from _maps(part, baseline, f"-{number + 1}" if len(cuts) > 1 else "")
        if len(cuts) > _MOST_SLICES:
            more = f"{len(cuts) - _MOST_SLICES} more combinations of {', '.join(shown[2:])}"
            yield Text(f"{more} are in the table, not drawn.")


def _metrics(points: pd.DataFrame) -> list[str]:
    """Speedups where systems are compared, and throughputs."""
    compared = points["system"].nunique() > 1 and points[SPEEDUP].notna().any()
    return [SPEEDUP, RATE] if compared else [RATE]


def _told(rows: pd.DataFrame, metric: str, baseline: str) -> dict[str, Any]:
    """What the captions of charts say: of what is drawn, in which unit, and whether all can be compared."""
    units = " or, where lengths of steady systems differ at a point, ".join(sorted(set(rows["unit"])))
    return {"speedup": metric == SPEEDUP, "baseline": baseline, "unit": units, "late": not comparable(rows).all()}


def _lines(points: pd.DataFrame, axis: str, baseline: str) -> Iterator[Block]:
    for metric in _metrics(points):
        rows = points.dropna(subset=[metric])
        bars = metric == SPEEDUP and rows["speedup_low"].notna().any()
        told = {"metric": _TITLES[metric], "axis": axis, "bars": bars, **_told(rows, metric, baseline)}
        name = f"sweep-{_TITLES[metric].lower()}"
        yield figure("sweep-lines", lines_chart(rows, axis, metric), name, **told)


def _maps(part: Slice, baseline: str, suffix: str) -> Iterator[Block]:
    x, y = part.axes
    at = ", ".join(f"{axis} {label(value)}" for axis, value in part.fixed.items())
    where = f" at {at}" if at else ""
    metric = _metrics(part.points)[0]
    systems = list(dict.fromkeys(part.points["system"]))
    grid = is_grid(part.points, part.axes)
    if len(systems) > 2 and grid:
        best = best_systems(part.points, part.axes)
        drawn = map_chart(best, part.axes, metric, text="system")
        yield figure("sweep-best", drawn, f"sweep-best{suffix}", metric=TITLES[metric], where=where,
                     **_told(best, metric, baseline))  # fmt: skip
    compared = [name for name in systems if name != baseline or len(systems) == 1]
    for order, system in enumerate(compared[:_MOST_MAPS], 1):
        rows = part.points[part.points["system"] == system].dropna(subset=[metric])
        if rows.empty:
            yield Text(f"{system} has no speedup{where}: {baseline} did not run at any of its points.")
            continue
        told = {"x": x, "y": y, "where": where, "system": system, "metric": _TITLES[metric].lower()}
        told |= {"form": "cell" if grid else "dot", **_told(rows, metric, baseline)}
        yield figure("sweep-map", map_chart(rows, part.axes, metric, grid=grid), f"sweep-map{suffix}-{order}", **told)
    if len(compared) > _MOST_MAPS:
        yield Text(f"The table has every system; of {len(compared)}, {_MOST_MAPS} are drawn.")


def sweep_findings(
    frame: pd.DataFrame, axes: Sequence[str], baseline: str, own: pd.Series[bool] | None = None
) -> tuple[str, ...]:
    """How often each system is the fastest, and where the speedup is largest and smallest.

    `own` says which rows are the baseline's at their point, where it is not the same at all of them.
    """
    shown = varying(frame, axes)
    best = best_systems(frame, list(axes))
    told = comparable(frame)
    best = best[comparable(best)]
    counts = ", ".join(f"{name} in {count:,}" for name, count in best["system"].value_counts().items())
    known = {"count": len(best), "units": " or ".join(sorted(set(best["unit"]))), "late": (~told).sum()}
    names = ", ".join(dict.fromkeys(frame["system"][~told]))
    sentences = said(shipped("says.yaml")["sweep findings"], counts=counts, names=names, **known)
    others = frame[told & ~(frame["system"].eq(baseline) if own is None else own)]
    if others[SPEEDUP].notna().any():
        ordered = others.dropna(subset=[SPEEDUP]).sort_values(SPEEDUP, kind="stable")
        for word, row in (("largest", ordered.iloc[-1]), ("smallest", ordered.iloc[0])):
            at = ", ".join(f"{axis} {label(row[axis])}" for axis in shown)
            who = f"{row['system']} at {at}" if at else row["system"]
            sentences.append(f"The {word} speedup over {baseline} is {row[SPEEDUP]:.2f} by {row['unit']}: {who}.")
    return tuple(sentences)


def sweep_table(frame: pd.DataFrame, axes: Sequence[str], verdicts: Verdicts, most: int = 500) -> Table:
    """The axes' values, system, throughput, speedups, verdict and step time of the first `most` rows."""
    shown = frame.head(most)
    columns = {axis: [label(value) for value in shown[axis]] for axis in axes}
    columns |= written("sweep-page", shown, verdicts=verdicts)
    caption = "Points of the sweep" + (f", the first {most:,} of {len(frame):,} rows" if len(frame) > most else "")
    caption += ". Speedup: trained responses per second over the baseline's; by tokens: the same of trained tokens. The"
    caption += " interval is of the speedup, or by tokens where lengths of steady systems differ at the point"
    return Table.of(caption, columns, len(axes), len(axes) + 5)

"""A sweep: how the systems compare as the axes change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from rlsim.experiment.backlog import comparable
from rlsim.formats import number, rate, share
from rlsim.report.charts.sweep import TITLES, heatmap, lines_chart, scatter
from rlsim.report.frames.sweep import (
    RATE,
    SPEEDUP,
    Slice,
    best_systems,
    cut,
    is_grid,
    label,
    varying,
)
from rlsim.report.page import Block, Figure, Section, Table, Text

_MOST_SLICES = 6
_MOST_MAPS = 6


def sweep_section(frame: pd.DataFrame, axes: Sequence[str], baseline: str) -> Section:
    """Lines along one varying axis, heatmaps over two, one set for each combination of further axes.

    `frame` has one row per point and system: the axes' columns, `system`, `responses_per_s`, and where there is a
    baseline `speedup`, `speedup_low`, `speedup_high`, as in `Result.summary()`. The axes' columns are written on the
    charts by their names. Raises `ConfigError` for an axis that is no column.
    """
    shown = varying(frame, axes)
    blocks: list[Block] = []
    if not shown:
        blocks.append(Text("No axis takes more than one value: there is nothing to draw."))
    elif len(shown) == 1:
        blocks += _lines(frame, shown[0], baseline)
    else:
        cuts = list(cut(frame, shown))
        for number, part in enumerate(cuts[:_MOST_SLICES]):
            blocks += _maps(part, baseline, f"-{number + 1}" if len(cuts) > 1 else "")
        if len(cuts) > _MOST_SLICES:
            text = (
                f"{len(cuts) - _MOST_SLICES} more combinations of {', '.join(shown[2:])} are in the table, not drawn."
            )
            blocks.append(Text(text))
    return Section("sweep", "Over the sweep", tuple(blocks))


def _metrics(points: pd.DataFrame) -> list[str]:
    """Speedups where systems are compared, and throughputs."""
    compared = SPEEDUP in points and points["system"].nunique() > 1 and points[SPEEDUP].notna().any()
    return [SPEEDUP, RATE] if compared else [RATE]


def _lines(points: pd.DataFrame, axis: str, baseline: str) -> Iterator[Block]:
    for metric in _metrics(points):
        rows = points.dropna(subset=[metric])
        caption = f"One line per system; every dot is a point of the sweep. {_meaning(metric, baseline)}"
        if metric == SPEEDUP and "speedup_low" in rows and rows["speedup_low"].notna().any():
            caption += " Bars are 95% intervals."
        yield Figure(
            f"sweep-{_slug(metric)}", f"{_title(metric)} along {axis}", lines_chart(rows, axis, metric), caption
        )


def _maps(part: Slice, baseline: str, suffix: str) -> Iterator[Block]:
    x, y = part.axes
    at = ", ".join(f"{axis} {label(value)}" for axis, value in part.fixed.items())
    where = f" at {at}" if at else ""
    metric = _metrics(part.points)[0]
    systems = list(dict.fromkeys(part.points["system"]))
    grid = is_grid(part.points, part.axes)
    if len(systems) > 2 and grid:
        best = best_systems(part.points, part.axes)
        caption = f"The system that trains on the most responses per second at every point; colour: {TITLES[metric]}."
        chart = heatmap(best, x, y, metric, text="system")
        yield Figure(f"sweep-best{suffix}", f"Fastest system{where}", chart, caption)
    compared = [name for name in systems if name != baseline or len(systems) == 1]
    for order, system in enumerate(compared[:_MOST_MAPS], 1):
        rows = part.points[part.points["system"] == system].dropna(subset=[metric])
        if rows.empty:
            yield Text(f"{system} has no speedup{where}: {baseline} did not run at any of its points.")
            continue
        chart = heatmap(rows, x, y, metric) if grid else scatter(rows, x, y, metric)
        form = "Every cell is a point of the sweep." if grid else "Every dot is a point of the sweep."
        title = f"{system}: {_title(metric).lower()} over {x} and {y}{where}"
        yield Figure(f"sweep-map{suffix}-{order}", title, chart, f"{form} {_meaning(metric, baseline)}")
    if len(compared) > _MOST_MAPS:
        yield Text(f"The table has every system; of {len(compared)}, {_MOST_MAPS} are drawn.")


def _title(metric: str) -> str:
    return {SPEEDUP: "Speedup", RATE: "Throughput"}[metric]


def _slug(metric: str) -> str:
    return {SPEEDUP: "speedup", RATE: "throughput"}[metric]


def _meaning(metric: str, baseline: str) -> str:
    if metric == SPEEDUP:
        return f"Above 1 more responses per second are trained on than under {baseline} at the same point."
    return "Responses trained on per second; more is better."


def sweep_findings(
    frame: pd.DataFrame, axes: Sequence[str], baseline: str, own: pd.Series[bool] | None = None
) -> tuple[str, ...]:
    """How often each system is the fastest, and where the speedup is largest and smallest.

    `own` says which rows are the baseline's at their point, where it is not the same at all of them.
    """
    shown = varying(frame, axes)
    best = best_systems(frame, list(axes))
    told = comparable(frame["held_back"])
    best = best[told[best.index]]
    counts = best["system"].value_counts()
    text = ", ".join(f"{name} in {count:,}" for name, count in counts.items())
    sentences = [f"Fastest at {len(best):,} point{'s' if len(best) != 1 else ''}: {text}."] if text else []
    if not told.all():
        names = ", ".join(dict.fromkeys(frame["system"][~told]))
        sentences.append(f"Not comparable yet, for the prompts that they put off, in {(~told).sum():,} rows: {names}.")
    others = frame[told & ~(frame["system"].eq(baseline) if own is None else own)]
    if SPEEDUP in frame and others[SPEEDUP].notna().any():
        ordered = others.dropna(subset=[SPEEDUP]).sort_values(SPEEDUP, kind="stable")
        for word, row in (("largest", ordered.iloc[-1]), ("smallest", ordered.iloc[0])):
            at = ", ".join(f"{axis} {label(row[axis])}" for axis in shown)
            who = f"{row['system']} at {at}" if at else row["system"]
            sentences.append(f"The {word} speedup over {baseline} is {row[SPEEDUP]:.2f}: {who}.")
    return tuple(sentences)


def sweep_table(frame: pd.DataFrame, axes: Sequence[str], most: int = 500) -> Table:
    """The axes' values, system, throughput, speedups and step time of the first `most` rows."""
    rows = []
    for row in frame.head(most).to_dict("records"):
        figures = [
            rate(row[RATE]),
            number(row[SPEEDUP], 3),
            number(row["token_speedup"], 3),
            number(row["step_time_s"]),
        ]
        figures += [share(row["bubble_fraction"], 1), share(row["tail_fraction"], 1)]
        rows.append([*(label(row[axis]) for axis in axes), str(row["system"]), *figures])
    caption = "Points of the sweep" + (f", the first {most:,} of {len(frame):,} rows" if len(frame) > most else "")
    caption += ". Speedup: trained responses per second over the baseline's; by tokens: the same of trained tokens"
    names = (*axes, "system", "responses/s", "speedup", "by tokens", "step (s)", "idle", "tail")
    return Table(caption, names, rows, words=frozenset({len(axes)}))

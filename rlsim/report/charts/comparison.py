"""Charts that compare systems: speedups, cases, parts of a step, GPU-seconds."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rlsim.report.charts.style import GRID, INK, WIDTH, bar_height, data, finished, label_angle, legend
from rlsim.report.palette import BUBBLE, DIVERGING, GREY, PARTS

#: Colour and shape of each verdict; shape too, for those who print in grey.
VERDICTS = {
    "faster": ("#0072B2", "triangle-right"),
    "not told apart": ("#7A7A7A", "circle"),
    "equal": ("#7A7A7A", "square"),
    "slower": ("#D55E00", "triangle-left"),
    "not comparable yet": ("#7A7A7A", "cross"),
    "baseline": ("#000000", "diamond"),
}


def speedup_chart(frame: pd.DataFrame, by_seed: pd.DataFrame, baseline: str) -> Any:
    """A dot and interval per system (columns system, speedup, low, high, verdict), a tick per seed behind them."""
    import altair as alt

    order = frame["system"].tolist()
    y = alt.Y("system:N", sort=order, title=None, axis=alt.Axis(grid=True))
    scale = alt.Scale(zero=False, nice=True, padding=12)
    x = alt.X(
        "speedup:Q",
        title=f"responses trained on per second, over those of {baseline} (times)",
        scale=scale,
        axis=alt.Axis(tickCount=10),
    )
    present = [name for name in VERDICTS if name in set(frame["verdict"])]
    colours, shapes = ([VERDICTS[name][i] for name in present] for i in (0, 1))
    hue = alt.Color("verdict:N", scale=alt.Scale(domain=present, range=colours), legend=legend(present))
    shape = alt.Shape("verdict:N", scale=alt.Scale(domain=present, range=shapes), legend=legend(present))
    told = ["system:N", alt.Tooltip("speedup:Q", format=".3f"), alt.Tooltip("low:Q", format=".3f")]
    told += [alt.Tooltip("high:Q", format=".3f"), "verdict:N"]
    base = alt.Chart(data(frame))
    one = alt.Chart(pd.DataFrame({"speedup": [1.0]})).mark_rule(color=INK, strokeDash=[4, 3]).encode(x=x)
    ticks = alt.Chart(data(by_seed)).mark_tick(color=GREY, opacity=0.7, thickness=1.2, height=11).encode(x=x, y=y)
    bars = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y, color=hue)
    bars = bars.transform_filter("isValid(datum.low)")
    dots = base.mark_point(size=95, filled=True, opacity=1).encode(x=x, y=y, color=hue, shape=shape, tooltip=told)
    layers = (one, ticks, bars, dots) if by_seed["seed"].nunique() > 1 else (one, dots)
    chart = alt.layer(*layers).properties(height=bar_height(len(order)))
    return finished(chart, description=f"Speedup of each system over {baseline}, with 95% intervals")


def cases_chart(summary: pd.DataFrame, baseline: str) -> Any:
    """Speedup of each system (rows) in each case (columns): number and colour."""
    import altair as alt

    rows = summary.dropna(subset=["speedup"]).assign(text=lambda s: s["speedup"].map("{:.2f}".format))
    rows = rows[["case", "system", "speedup", "text"]]
    systems, cases = (list(dict.fromkeys(rows[c])) for c in ("system", "case"))
    far = max(float((rows["speedup"].clip(lower=1e-9)).max()), float((1 / rows["speedup"]).max()), 1.05)
    colour = alt.Color(
        "speedup:Q",
        title="speedup",
        scale=alt.Scale(type="log", domain=[1 / far, 1, far], range=list(DIVERGING), interpolate="rgb"),
        legend=None,
    )
    x = alt.X("case:N", sort=cases, title=None, axis=alt.Axis(orient="top", labelAngle=label_angle(cases, WIDTH - 160)))
    y = alt.Y("system:N", sort=systems, title=None)
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    cells = base.mark_rect(stroke=GRID).encode(color=colour)
    chart = (cells + base.mark_text(color=INK, fontSize=12).encode(text="text:N")).properties(
        height=max(len(systems), 2) * 24
    )
    return finished(chart, description=f"Speedup over {baseline} of each system in each case")


def batch_parts_chart(parts: pd.DataFrame, batch: int) -> Any:
    """Stacked bars: seconds of each part of the time for a batch, by system (columns system, part, time_s)."""
    present = [name for name in PARTS if name in set(parts["part"])]
    totals = parts.groupby("system", sort=False)["time_s"].sum().reset_index()
    totals = totals.assign(label=totals["time_s"].map(lambda value: f"{value:,.1f} s"))
    return _stacked(
        parts.rename(columns={"part": "kind", "time_s": "value"}),
        totals.rename(columns={"time_s": "at"}),
        {name: PARTS[name] for name in present},
        title=f"mean time to train on {batch:,} responses (s)",
        unit=",.2f",
        description=f"Mean time in which each system trains on {batch:,} responses, by part",
    )


def gpu_time_chart(shares: pd.DataFrame, colours: dict[str, str]) -> Any:
    """Stacked bars that end at 100%: share of GPU-seconds by kind of work (columns system, kind, share)."""
    idle = shares[shares["kind"] == BUBBLE]
    labels = pd.DataFrame({"system": idle["system"], "at": 1.0, "label": idle["share"].map("{:.1%} idle".format)})
    present = {kind: colour for kind, colour in colours.items() if kind in set(shares["kind"])}
    return _stacked(
        shares[["system", "kind", "share"]].rename(columns={"share": "value"}),
        labels,
        present,
        title="share of all GPU-seconds",
        unit=".1%",
        description="Share of the GPU-seconds of each system by kind of work",
    )


def _stacked(
    rows: pd.DataFrame, labels: pd.DataFrame, colours: dict[str, str], *, title: str, unit: str, description: str
) -> Any:
    """Bars of columns system, kind, value, stacked in the order of `colours`; a text at the end of each."""
    import altair as alt

    order = list(dict.fromkeys(rows["system"]))
    names = list(colours)
    share = "%" in unit
    domain = [0, 1.13 if share else float(labels["at"].max()) * 1.1 or 1.0]
    axis = (
        alt.Axis(format=".0%", values=[0, 0.2, 0.4, 0.6, 0.8, 1.0]) if share else alt.Axis(format=",~f", tickCount=10)
    )
    scale = alt.Scale(domain=domain, nice=False)
    y = alt.Y("system:N", sort=order, title=None)
    rows = rows.assign(order=rows["kind"].map({name: i for i, name in enumerate(names)}))
    bars = (
        alt.Chart(data(rows))
        .mark_bar(stroke="#FFFFFF", strokeWidth=0.6)
        .encode(
            x=alt.X("value:Q", title=title, axis=axis, scale=scale, stack="zero"),
            y=y,
            order="order:Q",
            color=alt.Color(
                "kind:N", scale=alt.Scale(domain=names, range=list(colours.values())), legend=legend(names)
            ),
            tooltip=["system:N", "kind:N", alt.Tooltip("value:Q", format=unit, title="share" if share else "seconds")],
        )
    )
    text = alt.Chart(labels).mark_text(align="left", dx=5, color=INK, fontSize=12)
    chart = bars + text.encode(x=alt.X("at:Q", scale=scale), y=y, text="label:N")
    return finished(chart.properties(height=bar_height(len(order))), description=description)

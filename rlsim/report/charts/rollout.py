"""Generation of one step over time, and who held which GPU."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rlsim.report.charts.style import FAINT, WIDTH, data, finished, legend
from rlsim.report.frames.gantt import Gantt
from rlsim.report.frames.rollout import Generation, switch_labels
from rlsim.report.palette import ENGINE, SWITCH, TP_SHADES

_PANEL = WIDTH - 110  # px of a panel without its labels
_CHARACTER = 6.5  # px of a label


def generation_chart(shown: Generation, until_s: float, most: int, gpus: int) -> Any:
    """Three panels over the same seconds: active sequences, sequences per replica, GPUs by TP; switches as rules.

    The axes end at `until_s` seconds, `most` active sequences and all `gpus`, so that systems can be compared.
    """
    import altair as alt

    scale = alt.Scale(domain=[0, until_s], nice=False)

    def x(title: str | None) -> Any:
        return alt.X(
            "at_s:Q", title=title, scale=scale, axis=alt.Axis(labels=title is not None, format=",~f", tickCount=10)
        )

    def panel(column: str, title: str, colour: str, domain: Any) -> Any:
        axis = alt.Axis(minExtent=48, format=",~f", tickCount=4)
        y = alt.Y(f"{column}:Q", title=title, axis=axis, scale=alt.Scale(domain=domain, nice=True))
        base = alt.Chart(data(shown.sequences)).encode(x=x(None), y=y)
        area = base.mark_area(interpolate="step-after", color=colour, opacity=0.18)
        return area + base.mark_line(interpolate="step-after", color=colour, strokeWidth=1.8)

    degrees = sorted({int(tp) for tp in shown.tp["tp"]})
    shades = [TP_SHADES[min(tp.bit_length() - 1, len(TP_SHADES) - 1)] for tp in degrees]
    names = [f"TP {tp}" for tp in degrees]
    tp = data(shown.tp.assign(degree="TP " + shown.tp["tp"].astype(str)))
    layouts = (
        alt.Chart(tp)
        .mark_area(interpolate="step-after", stroke="#FFFFFF", strokeWidth=0.4)
        .encode(
            x=x("time since generation began (s)"),
            y=alt.Y(
                "gpus:Q",
                title="GPUs by TP degree",
                stack="zero",
                scale=alt.Scale(domain=[0, gpus], nice=False),
                axis=alt.Axis(minExtent=48, tickCount=4, format=",~f"),
            ),
            color=alt.Color("degree:N", scale=alt.Scale(domain=names, range=shades), legend=legend(names)),
            order="tp:Q",
        )
    )
    rules = [_switches(shown.switches, scale, until_s if first else None) for first in (True, False, False)]
    panels = [
        panel("active", "active sequences", ENGINE["decode"], [0, most]),
        panel("batch", "per replica", "#009E73", alt.Undefined),
        layouts,
    ]
    heights = (130, 100, 110)
    stacked = [
        alt.layer(one, *rule).properties(width=_PANEL, height=height)
        for one, rule, height in zip(panels, rules, heights, strict=True)
    ]
    chart = alt.vconcat(*stacked, spacing=8).resolve_scale(color="independent")
    return finished(chart, description=f"Generation under {shown.system}: active sequences, batch, TP", fit=False)


def _switches(switches: pd.DataFrame, scale: Any, until_s: float | None) -> list[Any]:
    """A rule per switch; with `until_s`, the end of the axis, also labels above the panel."""
    import altair as alt

    if switches.empty:
        return []
    rows = switches.assign(text=switches["from_tp"].astype(str) + "→" + switches["to_tp"].astype(str))
    told = [
        alt.Tooltip("at_s:Q", format=".2f", title="at (s)"),
        "node:N",
        alt.Tooltip("text:N", title="TP"),
        alt.Tooltip("pause_s:Q", format=".2f", title="pause (s)"),
    ]
    x = alt.X("at_s:Q", scale=scale)
    rule = alt.Chart(data(rows)).mark_rule(color=SWITCH, strokeWidth=1.4, strokeDash=[4, 2]).encode(x=x, tooltip=told)
    if until_s is None:
        return [rule]
    labels = alt.Chart(data(switch_labels(rows, _CHARACTER * until_s / _PANEL))).mark_text(
        color=SWITCH, align="left", fontSize=11
    )
    return [rule, labels.encode(x=x, y=alt.value(-7), text="text:N")]


def gantt_chart(shown: Gantt, system: str, colours: dict[str, str], until_s: float) -> Any:
    """Work on the GPUs of one step; one row per GPU, or per group of nodes."""
    import altair as alt

    rows = len(shown.rows)
    each = 22 if rows <= 16 else 15
    present = {kind: colour for kind, colour in colours.items() if kind in set(shown.marks["kind"])}
    labels = "[" + ",".join(f"'{row}'" for row in shown.rows) + "]"
    names = list(present)
    chart = (
        alt.Chart(data(shown.marks))
        .mark_rect(strokeWidth=0.5)  # in the fill's colour: no seams between neighbours
        .encode(
            x=alt.X(
                "start_s:Q",
                title="time since the step began (s)",
                axis=alt.Axis(format=",~f", tickCount=10),
                scale=alt.Scale(domain=[0, until_s], nice=False),
            ),
            x2="end_s:Q",
            y=alt.Y(
                "low:Q",
                title=None,
                scale=alt.Scale(domain=[0, rows], reverse=True, nice=False),
                axis=alt.Axis(
                    values=[row + 0.5 for row in range(rows)],
                    labelExpr=f"{labels}[floor(datum.value)]",
                    grid=False,
                    ticks=False,
                    labelColor=FAINT,
                ),
            ),
            y2="high:Q",
            color=alt.Color(
                "kind:N", scale=alt.Scale(domain=names, range=list(present.values())), legend=legend(names)
            ),
            stroke=alt.Stroke(
                "kind:N", scale=alt.Scale(domain=names, range=list(present.values())), legend=legend(names)
            ),
            tooltip=[
                "kind:N",
                alt.Tooltip("what:N", title="where"),
                alt.Tooltip("start_s:Q", format=".2f"),
                alt.Tooltip("end_s:Q", format=".2f"),
            ],
        )
    )
    return finished(chart.properties(height=max(each * rows, 80)), description=f"Work on each GPU under {system}")

"""Response lengths against the cap."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rlsim.report.charts.style import data, finished, legend
from rlsim.report.frames.lengths import Lengths, survival
from rlsim.report.palette import CAP, DASHES, GREY, SERIES

_OTHERS = "others"


def lengths_chart(groups: list[Lengths], cap_tokens: int) -> Any:
    """Share of responses of at least so many tokens, one line per set of lengths, the cap as a rule."""
    import altair as alt

    names = [_name(group.systems, len(groups)) if i < len(SERIES) else _OTHERS for i, group in enumerate(groups)]
    curves = [
        survival(group.tokens).assign(series=name, line=i)
        for i, (group, name) in enumerate(zip(groups, names, strict=True))
    ]
    rows = pd.concat(curves, ignore_index=True)
    rows["tokens"] = rows["tokens"].clip(lower=1)  # there is no zero on a log axis
    shown = list(dict.fromkeys(names))
    colours = [*SERIES[: min(len(groups), len(SERIES))], GREY][: len(shown)]
    dashes = [*DASHES[: min(len(groups), len(SERIES))], (1, 0)][: len(shown)]
    low = max(float(min(group.tokens[0] for group in groups)), 1)
    high = max(int(max(group.tokens[-1] for group in groups)), cap_tokens)
    low = min(low, high / 2)  # where all are equal there is still an axis
    x = alt.X(
        "tokens:Q",
        title="response length (tokens, log scale)",
        scale=alt.Scale(type="log", domain=[low, high * 1.04], nice=False),
        axis=alt.Axis(values=_ticks(low, high), format=",d", labelOverlap="greedy"),
    )
    y = alt.Y(
        "share:Q", title="responses at least this long", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%")
    )
    key = legend(shown) if len(shown) > 1 else None
    line = alt.Chart(data(rows)).mark_line(interpolate="step-before", strokeWidth=2)
    line = line.encode(
        x=x,
        y=y,
        detail="line:N",
        color=alt.Color("series:N", scale=alt.Scale(domain=shown, range=colours), legend=key),
        strokeDash=alt.StrokeDash(
            "series:N", scale=alt.Scale(domain=shown, range=[list(d) for d in dashes]), legend=key
        ),
    )
    share = groups[0].share_at(cap_tokens)
    at_cap = pd.DataFrame(
        {"tokens": [cap_tokens], "share": [share], "label": [f"cap {cap_tokens:,}: {share:.1%} reach it"]}
    )
    mark = alt.Chart(at_cap).encode(x=x)
    rule = mark.mark_rule(color=CAP, strokeDash=[5, 3], strokeWidth=1.5)
    text = mark.mark_text(color=CAP, align="right", dx=-7, fontSize=12).encode(text="label:N", y=alt.value(10))
    dot = mark.mark_point(color=CAP, filled=True, size=60, opacity=1).encode(y=y)
    chart = alt.layer(line, rule, text, dot).properties(height=280)
    return finished(
        chart, description=f"Share of responses by length; {share:.1%} reach the cap of {cap_tokens:,} tokens"
    )


def _name(systems: tuple[str, ...], groups: int) -> str:
    if groups == 1:
        return "all systems"
    return systems[0] if len(systems) == 1 else f"{systems[0]} and {len(systems) - 1} more"


def _ticks(low: float, high: int) -> list[int]:
    steps = (1, 2, 5) if high < 300 * low else (1, 3)
    return [step * 10**e for e in range(9) for step in steps if low <= step * 10**e <= high]

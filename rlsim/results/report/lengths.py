"""Response lengths against the cap."""

from __future__ import annotations

from typing import Any, NamedTuple

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.formats import listed
from rlsim.experiment.result import Result
from rlsim.results.report.page import Block, Section, Table, Text
from rlsim.results.report.setups import CaseSetup
from rlsim.results.report.shares import RUN
from rlsim.results.report.style import CAP, DASHES, GREY, SERIES, along, by_name, data, finished

_POINTS = 250  # of a curve
_OTHERS = "others"


class Lengths(NamedTuple):
    """Systems that trained on the same lengths, and these lengths in tokens, ascending."""

    systems: tuple[str, ...]
    tokens: npt.NDArray[np.int64]

    def share_at(self, cap_tokens: int) -> float:
        return float((self.tokens >= cap_tokens).mean())


def trained_lengths(result: Result, case: str) -> list[Lengths]:
    """The lengths that the steady steps of a case trained on, once for all systems that trained on the same ones."""
    steady = result.steps.loc[result.steps["steady"], [*RUN, "step"]]
    mine = result.responses[(result.responses["case"] == case) & result.responses["trained"]].merge(steady)
    groups: dict[bytes, tuple[list[str], npt.NDArray[np.int64]]] = {}
    for system in result.manifest["systems"][case]:
        tokens = np.sort(mine.loc[mine["system"] == system, "response_tokens"].to_numpy(dtype=np.int64))
        if len(tokens):
            groups.setdefault(tokens.tobytes(), ([], tokens))[0].append(system)
    return [Lengths(tuple(systems), tokens) for systems, tokens in groups.values()]


def survival(tokens: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Share of responses of at least so many tokens: columns tokens, share; `tokens` is ascending.

    Every length if there are few, else lengths evenly spread in log, the longest always among them.
    """
    grid: npt.NDArray[Any] = np.unique(tokens)
    if len(grid) > _POINTS:
        spread = np.geomspace(max(int(tokens[0]), 1), int(tokens[-1]), _POINTS)
        grid = np.unique(np.append(np.rint(spread).astype(np.int64), tokens[-1]))
    share = 1 - np.searchsorted(tokens, grid, side="left") / len(tokens)
    return pd.DataFrame({"tokens": grid, "share": share})


def lengths_chart(groups: list[Lengths], cap_tokens: int) -> Any:
    """Share of responses of at least so many tokens, one line per set of lengths, the cap as a rule."""
    names = [_name(group.systems, len(groups)) if i < len(SERIES) else _OTHERS for i, group in enumerate(groups)]
    curves = [
        survival(group.tokens).assign(series=name, line=i)
        for i, (group, name) in enumerate(zip(groups, names, strict=True))
    ]
    rows = pd.concat(curves, ignore_index=True)
    rows["tokens"] = rows["tokens"].clip(lower=1)  # there is no zero on a log axis
    shown = list(dict.fromkeys(names))
    colours = dict(zip(shown, [*SERIES[: len(groups)], GREY], strict=False))
    dashes = dict(zip(shown, [*map(list, DASHES[: len(groups)]), [1, 0]], strict=False))
    low = max(float(min(group.tokens[0] for group in groups)), 1)
    high = max(int(max(group.tokens[-1] for group in groups)), cap_tokens)
    low = min(low, high / 2)  # where all are equal there is still an axis
    scale, ticks = alt.Scale(type="log", domain=[low, high * 1.04], nice=False), _ticks(low, high)
    title = "response length (tokens, log scale)"
    x = along(alt.X, "tokens", title, scale, values=ticks, format=",d", labelOverlap="greedy")
    y = along(alt.Y, "share", "responses at least this long", alt.Scale(domain=[0, 1]), format=".0%")
    line = alt.Chart(data(rows)).mark_line(interpolate="step-before", strokeWidth=2)
    line = line.encode(
        x=x,
        y=y,
        detail="line:N",
        color=by_name(alt.Color, "series", colours, key=len(shown) > 1),
        strokeDash=by_name(alt.StrokeDash, "series", dashes, key=len(shown) > 1),
    )
    share = groups[0].share_at(cap_tokens)
    label = f"cap {cap_tokens:,}: {share:.1%} reach it"
    at_cap = pd.DataFrame({"tokens": [cap_tokens], "share": [share], "label": [label]})
    mark = alt.Chart(at_cap).encode(x=x)
    rule = mark.mark_rule(color=CAP, strokeDash=[5, 3], strokeWidth=1.5)
    text = mark.mark_text(color=CAP, align="right", dx=-7, fontSize=12).encode(text="label:N", y=alt.value(10))
    dot = mark.mark_point(color=CAP, filled=True, size=60, opacity=1).encode(y=y)
    chart = alt.layer(line, rule, text, dot).properties(height=280)
    reached = f"{share:.1%} reach the cap of {cap_tokens:,} tokens"
    return finished(chart, description=f"Share of responses by length; {reached}")


def _name(systems: tuple[str, ...], groups: int) -> str:
    return "all systems" if groups == 1 else listed(systems, 1)


def _ticks(low: float, high: int) -> list[int]:
    steps = (1, 2, 5) if high < 300 * low else (1, 3)
    return [step * 10**e for e in range(9) for step in steps if low <= step * 10**e <= high]


def lengths_section(result: Result, setups: list[CaseSetup]) -> Section:
    """The response lengths that were trained on, against the cap."""
    blocks: list[Block] = []
    for setup in setups:
        groups = trained_lengths(result, setup.case)
        if not groups:
            blocks.append(Text(setup.named("No response was trained on")))
            continue
        caption = (
            "Height of the line at a length: share of the responses that steady steps trained on that are at least "
            "that long. "
            f"The dashed line is the cap of {setup.cap_tokens:,} tokens; the dot on it is the share that reached it. "
        )
        if len(groups) == 1:
            caption += f"All systems trained on the same {len(groups[0].tokens):,} responses."
        else:
            caption += "Systems trained on different responses, as they choose or drop some; the dot is of "
            caption += f"{groups[0].systems[0]}."
        chart = lengths_chart(groups, setup.cap_tokens)
        blocks.append(setup.figure("lengths", "Response lengths", chart, caption))
        rows = [
            [
                ", ".join(group.systems),
                f"{len(group.tokens):,}",
                f"{group.tokens.mean():,.0f}",
                *(f"{pd.Series(group.tokens).quantile(q):,.0f}" for q in (0.5, 0.9, 0.99)),
                f"{group.tokens[-1]:,}",
                f"{group.share_at(setup.cap_tokens):.2%}",
            ]
            for group in groups
        ]
        headings = ("system", "responses", "mean", "median", "p90", "p99", "longest", "at the cap")
        blocks.append(Table(setup.named("Lengths in numbers (tokens)"), headings, rows, folded=True))
    return Section("lengths", "How long the responses are", tuple(blocks))

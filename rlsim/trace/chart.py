"""A trace as a chart: how many responses are longer than a length, and the histogram of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.charts import check_chart_path, save_chart
from rlsim.errors import TraceError
from rlsim.trace.schema import Trace

_COLOURS = ("#1f5a94", "#e08a1e", "#3f8f4f", "#7b5aa6", "#8c6d4f", "#4fa6b8", "#c46fa0", "#6b6b6b")
_CAP = "#b3322a"


def write_chart(trace: Trace, path: str | Path, cap_tokens: int | None = None) -> None:
    """Draws the share of responses longer than a length, and the histogram of lengths, to .html, .svg or .png.

    The HTML file holds everything it needs. Raises `TraceError` for another ending. Lengths are not cut at
    `cap_tokens` (default: the trace's own cap); it is drawn as a line.
    """
    path = Path(path)
    check_chart_path(path, TraceError)
    save_chart(_chart(trace, cap_tokens or trace.meta.cap_tokens), path, TraceError)


def _chart(trace: Trace, cap: int | None) -> Any:
    import altair as alt

    tokens = trace.response_tokens
    labels = _labels(trace)
    names = sorted(set(labels))
    survival = pd.concat([_survival(tokens[labels == n], n) for n in names])
    bars = pd.concat([_histogram(tokens[labels == n], tokens, n) for n in names])
    colour: Any = alt.value(_COLOURS[0])
    if len(names) > 1:
        legend = alt.Legend(orient="bottom-left", offset=8)
        colour = alt.Color("series:N", title="task", legend=legend, scale=alt.Scale(range=list(_COLOURS)))
    low, high = max(int(tokens.min()), 1), int(max(tokens.max(), cap or 1) * 1.1) + 1
    steps = (1, 2, 5) if high < 300 * low else (1, 3)
    x = alt.X(
        "tokens:Q",
        title="response length (tokens, log scale)",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(values=[s * 10**e for e in range(9) for s in steps], format=",d"),
    )
    shares = [1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, 1e-4, 1e-5]
    y = alt.Y(
        "share:Q",
        title="share of responses longer",
        scale=alt.Scale(type="log", domain=[float(survival["share"].min()) / 1.3, 1], nice=False),
        axis=alt.Axis(format="~%", values=shares),
    )
    upper = alt.Chart(survival).mark_line(interpolate="step-after", strokeWidth=2).encode(x=x, y=y, color=colour)
    y = alt.Y("share:Q", title="share of responses in the bin", axis=alt.Axis(format="~%"), stack=None)
    if len(names) == 1:
        lower = alt.Chart(bars).mark_bar(opacity=0.75, binSpacing=0).encode(x=x, x2="to:Q", y=y, y2="zero:Q")
        lower = lower.encode(color=colour)
    else:
        lower = alt.Chart(bars).mark_line(interpolate="step-after", strokeWidth=1.5).encode(x=x, y=y, color=colour)
    upper, lower = upper.properties(width=580, height=240), lower.properties(width=580, height=170)
    if cap is not None:
        rule = alt.Chart(pd.DataFrame({"tokens": [cap], "label": [f"cap {cap:,}"]})).encode(x=x)
        line = rule.mark_rule(color=_CAP, strokeDash=[5, 3])
        text = rule.mark_text(color=_CAP, align="right", dx=-5, y=10, fontSize=11).encode(text="label:N")
        upper, lower = upper + line + text, lower + line
    title = alt.TitleParams(
        f"Response lengths of {trace.meta.name}", subtitle=_subtitle(trace), anchor="start", offset=12
    )
    return alt.vconcat(upper, lower, title=title).configure_view(stroke=None).configure_axis(gridOpacity=0.4)


def _subtitle(trace: Trace) -> str:
    tokens, cut = trace.response_tokens, trace.capped
    prompts = trace.frame["prompt_id"].nunique()
    text = f"{len(tokens):,} responses, {prompts:,} prompts, median {np.median(tokens):,.0f}, longest {tokens.max():,}"
    return text + (f"; {cut.mean():.2%} were cut (in the last bin)" if cut.any() else "")


def _labels(trace: Trace) -> Any:
    """The task of every response; one label for all if there are no tasks, or more than there are colours."""
    tasks: Any = trace.frame.get("task")
    if tasks is None or not 1 < tasks.nunique() <= len(_COLOURS):
        return np.full(len(trace), trace.meta.name, dtype=object)
    return tasks.fillna("none").to_numpy()


def _survival(tokens: npt.NDArray[np.int64], name: str) -> pd.DataFrame:
    """Share longer than a length, at 400 lengths evenly spread in log."""
    grid = np.unique(np.rint(np.geomspace(tokens.min(), tokens.max(), 400)).astype(np.int64))
    share = 1 - np.searchsorted(np.sort(tokens), grid, side="right") / len(tokens)
    kept = share > 0
    return pd.DataFrame({"tokens": grid[kept], "share": share[kept], "series": name})


def _histogram(tokens: npt.NDArray[np.int64], all_tokens: npt.NDArray[np.int64], name: str) -> pd.DataFrame:
    low, high = int(all_tokens.min()), int(all_tokens.max())
    edges = np.unique(np.rint(np.geomspace(low, high + 1, 49))) if high > low else np.array([low, low + 1.0])
    counts = np.histogram(tokens, edges)[0]
    bars = pd.DataFrame({"tokens": edges[:-1], "to": edges[1:], "share": counts / len(tokens)})
    last = pd.DataFrame({"tokens": edges[-1:], "to": edges[-1:], "share": [0.0]})  # closes the outline
    return pd.concat([bars, last]).assign(zero=0.0, series=name)

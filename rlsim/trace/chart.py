"""A trace as a chart: how many responses are longer than a length, and the histogram of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.charts import check_chart_path, drawn, save_chart, templates
from rlsim.errors import TraceError
from rlsim.trace.schema import Trace

#: More tasks than these have no colours of their own.
MOST_TASKS = 8


def write_chart(trace: Trace, path: str | Path, cap_tokens: int | None = None) -> None:
    """Draws the share of responses longer than a length, and the histogram of lengths, to .html, .svg or .png.

    The HTML file holds everything it needs. Raises `TraceError` for another ending. Lengths are not cut at
    `cap_tokens` (default: the trace's own cap); it is drawn as a line.
    """
    path = Path(path)
    check_chart_path(path, TraceError)
    tokens, cap = trace.response_tokens, cap_tokens or trace.meta.cap_tokens
    tasks: Any = trace.frame.get("task")
    several = tasks is not None and 1 < tasks.nunique() <= MOST_TASKS
    labels = tasks.fillna("none").to_numpy() if several else np.full(len(trace), trace.meta.name, dtype=object)
    names = sorted(set(labels))
    low, high = max(int(tokens.min()), 1), int(max(tokens.max(), cap or 1) * 1.1) + 1
    steps = (1, 2, 5) if high < 300 * low else (1, 3)
    known = {
        "name": trace.meta.name, "told": _subtitle(trace), "cap": cap, "several": several, "low": low, "high": high,
        "ticks": [step * 10**e for e in range(9) for step in steps],
        "survival": pd.concat([_survival(tokens[labels == n], n) for n in names]).to_dict("records"),
        "bars": pd.concat([_histogram(tokens[labels == n], tokens, n) for n in names]).to_dict("records"),
    }  # fmt: skip
    save_chart(drawn(templates("trace")["lengths"], known), path, TraceError)


def _subtitle(trace: Trace) -> str:
    tokens, cut = trace.response_tokens, trace.capped
    prompts = trace.frame["prompt_id"].nunique()
    text = f"{len(tokens):,} responses, {prompts:,} prompts, median {np.median(tokens):,.0f}, longest {tokens.max():,}"
    return text + (f"; {cut.mean():.2%} were cut (in the last bin)" if cut.any() else "")


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

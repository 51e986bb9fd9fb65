"""Response lengths against the cap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.formats import Table, listed, written
from rlsim.experiment.result import Result
from rlsim.results.report.page import Block, CaseSetup, Text
from rlsim.results.report.shares import RUN
from rlsim.results.report.style import DASHES, GREY, SERIES, chart
from rlsim.trace import Trace

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


def lengths_chart(groups: list[Lengths], cap_tokens: int | None, title: str | None = None) -> Any:
    """Share of responses of at least so many tokens, one line per set of lengths, a cap as a rule."""
    named = ["all systems"] if len(groups) == 1 else [listed(group.systems, 1) for group in groups[: len(SERIES)]]
    names = [*named, *([_OTHERS] * (len(groups) - len(named)))]
    parts = [
        survival(group.tokens).assign(series=name, line=i)
        for i, (group, name) in enumerate(zip(groups, names, strict=True))
    ]
    curves = pd.concat(parts, ignore_index=True)
    curves["tokens"] = curves["tokens"].clip(lower=1)  # there is no zero on a log axis
    shown = list(dict.fromkeys(names))
    high = max(int(max(group.tokens[-1] for group in groups)), cap_tokens or 1)
    low = min(max(float(min(group.tokens[0] for group in groups)), 1), high / 2)  # where all are equal there is an axis
    return chart(
        "lengths",
        curves=curves,
        low=low,
        high=high,
        ticks=_ticks(low, high),
        colours=dict(zip(shown, [*SERIES[: len(groups)], GREY], strict=False)),
        dashes=dict(zip(shown, [*map(list, DASHES[: len(groups)]), [1, 0]], strict=False)),
        share=groups[0].share_at(cap_tokens) if cap_tokens else 0.0,
        cap=cap_tokens,
        title=title,
    )


def trace_chart(trace: Trace, cap_tokens: int | None = None) -> Any:
    """The lengths of a trace, by task if it has several, and the cap (tokens; default: its own, if it has one)."""
    tasks = trace.frame.get("task", pd.Series("", trace.frame.index)).fillna("none")
    lengths = {task: np.sort(own.to_numpy(np.int64)) for task, own in trace.frame["response_tokens"].groupby(tasks)}
    groups = [Lengths((str(task),), tokens) for task, tokens in lengths.items()]
    return lengths_chart(groups, cap_tokens or trace.meta.cap_tokens, f"Response lengths of {trace.meta.name}")


def _ticks(low: float, high: int) -> list[int]:
    steps = (1, 2, 5) if high < 300 * low else (1, 3)
    return [step * 10**e for e in range(9) for step in steps if low <= step * 10**e <= high]


def lengths_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """The response lengths that were trained on, against the cap."""
    for setup in setups:
        groups = trained_lengths(result, setup.case)
        if not groups:
            yield Text(setup.named("No response was trained on"))
            continue
        told = {"groups": len(groups), "count": len(groups[0].tokens), "first": groups[0].systems[0]}
        yield setup.figure("lengths", lengths_chart(groups, setup.cap_tokens), cap=setup.cap_tokens, **told)
        columns = written("trained", groups, cap=setup.cap_tokens, quantile=np.quantile)
        yield Table.of(setup.named("Lengths in numbers (tokens)"), columns, folded=True)

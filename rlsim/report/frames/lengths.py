"""Response lengths against the cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.report.frames.comparison import RUN

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

_POINTS = 250  # of a curve


class Lengths(NamedTuple):
    """Systems that trained on the same lengths, and these lengths in tokens, ascending."""

    systems: tuple[str, ...]
    tokens: npt.NDArray[np.int64]

    def share_at(self, cap_tokens: int) -> float:
        """Share of the responses that reach the cap."""
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

"""How responses fall into turns with tool calls between them: fitted to trajectories, drawn for other lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.errors import TraceError
from rlsim.trace.mixture import icc_log
from rlsim.trace.schema import Trace
from rlsim.trace.turns import Turn, Turns
from rlsim.units import Seconds

#: A tool call that is shorter (s) counts as one that takes no time: loggers do not resolve it.
INSTANT_S = 0.05
_Z95 = 1.6448536269514722


class TurnModel(Schema):
    """Tool calls of a response whose length (observations included) is known; all spreads are of logarithms."""

    calls_median: float = Field(gt=0)
    calls_p95: float = Field(gt=0)
    length_correlation: float = Field(default=0.8, ge=-1, le=1)
    observed_share: float = Field(gt=0, lt=1)
    generated_sigma: float = Field(default=1.0, ge=0, le=5)
    observed_sigma: float = Field(default=1.5, ge=0, le=5)
    instant: float = Field(default=0.0, ge=0, le=1)
    call_s_median: Seconds = Field(default=1.0, gt=0)
    call_s_p95: Seconds = Field(default=10.0, gt=0)
    task_share: float = Field(default=0.3, ge=0, le=1)
    source: str = ""

    def draw(
        self, tokens: npt.NDArray[np.int64], prompt: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> list[Turns]:
        """Turns of responses of so many tokens to these prompts (codes from 0)."""
        logs = np.log(tokens)
        place = (logs - logs.mean()) / (logs.std() or 1.0)
        rho, spread = self.length_correlation, np.log(self.calls_p95 / self.calls_median) / _Z95
        normal = rho * place + np.sqrt(1 - rho**2) * rng.standard_normal(len(tokens))
        counts = np.rint(self.calls_median * np.exp(spread * normal)).astype(np.int64)
        of_task = rng.standard_normal(int(prompt.max()) + 1)
        return [
            self._turns(int(length), int(min(count, (length - 1) // 2)), float(of_task[task]), rng)
            for length, count, task in zip(tokens, counts, prompt, strict=True)
        ]

    def _turns(self, length: int, calls: int, of_task: float, rng: np.random.Generator) -> Turns:
        if not calls:
            return (Turn(length, 0, 0.0),)
        observed = min(round(self.observed_share * length), length - calls - 1)
        generated = 1 + _parts(length - observed - calls - 1, self.generated_sigma, calls + 1, rng)
        returned = _parts(observed, self.observed_sigma, calls, rng)
        normal = np.sqrt(self.task_share) * of_task + np.sqrt(1 - self.task_share) * rng.standard_normal(calls)
        seconds = self.call_s_median * np.exp(np.log(self.call_s_p95 / self.call_s_median) / _Z95 * normal)
        seconds = np.where(rng.random(calls) < self.instant, 0.0, np.round(seconds, 3))
        rows = zip(generated.tolist(), [*returned.tolist(), 0], [*seconds.tolist(), 0.0], strict=True)
        return tuple(Turn(*row) for row in rows)


def _parts(total: int, sigma: float, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` whole numbers of sum `total` whose sizes spread as a lognormal."""
    ends = np.cumsum(np.exp(sigma * rng.standard_normal(count)))
    return np.asarray(np.diff(np.floor(ends / ends[-1] * total + 1e-9).astype(np.int64), prepend=0))


def fit_turns(trace: Trace) -> TurnModel:
    """The model of a trace's trajectories. Raises `TraceError` if fewer than 10 of them call tools."""
    cells: Any = trace.frame["turns"].dropna() if "turns" in trace.frame else []
    acting = [turns for turns in cells if len(turns) > 1]
    if len(acting) < 10:
        raise TraceError(f"{trace.meta.name}: {len(acting)} responses call tools; 10 or more are needed for a fit")
    lengths = trace.frame.loc[cells.index, "response_tokens"].to_numpy(np.float64)
    calls = np.array([len(turns) - 1 for turns in cells], np.float64)
    observed = [turn.observation_tokens for turns in acting for turn in turns[:-1]]
    codes = np.repeat(trace.prompt_codes()[0][cells.index], calls.astype(np.int64))
    call_s = np.array([turn.tool_s for turns in cells for turn in turns[:-1]])
    known, lasting = ~np.isnan(call_s), call_s > INSTANT_S
    more: dict[str, Any] = {}
    if lasting.any():
        found = np.quantile(call_s[lasting], [0.5, 0.95])
        _, task = np.unique(codes[lasting], return_inverse=True)
        share = icc_log(call_s[lasting], task)
        more = {
            "instant": float((known & ~lasting).sum() / known.sum()),
            "call_s_median": float(found[0]), "call_s_p95": float(max(found[1], found[0])),
            "task_share": float(np.clip(share or 0.0, 0.0, 1.0)),
        }  # fmt: skip
    median, p95 = np.quantile(calls, [0.5, 0.95])
    correlation = np.corrcoef(np.log(np.maximum(calls, 0.5)), np.log(lengths))[0, 1] if calls.std() else 0.0
    values = {
        "calls_median": float(max(median, 0.5)), "calls_p95": float(max(p95, median, 0.5)),
        "length_correlation": float(correlation), "observed_share": float(sum(observed) / lengths.sum()),
        "generated_sigma": _spread([turn.generated_tokens for turns in acting for turn in turns]),
        "observed_sigma": _spread(observed), **more,
    }  # fmt: skip
    return TurnModel(**{name: round(value, 4) for name, value in values.items()})


def _spread(tokens: list[int]) -> float:
    return float(min(np.log(np.maximum(tokens, 1)).std(), 5.0))

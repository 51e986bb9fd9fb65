"""Drafted tokens that are accepted by chance: responses that decode together go on at paces of their own.

A decode step yields each sequence one token, and its drafted ones up to the first that is refused. How many these are
follows from a number of the response's own for each of its steps (`AcceptanceDraws`), so all steps until the next
response leaves are known at once, and one jump takes them: as many sums as the batch has tokens, not as many events.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from rlsim.cost.curve import REACHED, DecodeCurve
from rlsim.cost.step import Chunk, StepCost
from rlsim.sim.batch import RunningBatch
from rlsim.sim.request import Request

_MOST = 1024  # steps that are looked at together


class AcceptanceDraws:
    """Of a response: a standard normal number for each of its decode steps, any two of which have this `correlation`.

    The drafted tokens up to the j-th are accepted where it lies below the quantile of their chance. So each chance is
    met in the mean of all responses, whatever the correlation, and a shorter draft is accepted as a longer one's start.
    """

    __slots__ = ("_agents", "_common", "_correlation", "_own", "_rng", "_seed", "_values", "steps")

    def __init__(self, seed: Sequence[int], correlation: float = 0.0) -> None:
        self._seed, self._correlation, self._agents = tuple(seed), correlation, count(1)
        self._rng = np.random.default_rng(seed)
        self._common, self._own = sqrt(correlation) * self._rng.standard_normal(), sqrt(1 - correlation)
        self._values = np.empty(0)
        self.steps = 0  # so far

    def ahead(self, steps: int) -> NDArray[np.float64]:
        """The numbers of its next steps."""
        while len(self._values) < self.steps + steps:
            new = self._rng.standard_normal(max(256, len(self._values)))
            self._values = np.append(self._values, self._common + self._own * new)
        return self._values[self.steps : self.steps + steps]

    def of_sub_agent(self) -> AcceptanceDraws:
        """Those of the next sub-agent that the response begins, with its correlation."""
        return AcceptanceDraws((*self._seed, next(self._agents)), self._correlation)


class _Ends(DecodeCurve):
    """The steps of one jump, by when each ends (seconds since its start, the first 0)."""

    __slots__ = ("_ends",)

    def __init__(self, batch: int, ends: NDArray[np.float64]) -> None:
        super().__init__(batch, [0.0], [0.0])
        self._ends = ends

    def steps_s(self, context_tokens: float, steps: int) -> float:  # noqa: ARG002
        return float(self._ends[min(steps, len(self._ends) - 1)])

    def steps_within(self, context_tokens: float, time_s: float) -> int:  # noqa: ARG002
        return int(np.searchsorted(self._ends * (1 + REACHED), time_s)) if time_s > 0 else 0


class DrawnBatch(RunningBatch):
    """A batch whose steps yield what is drawn. Its step counter goes on by the mean of what they yield."""

    _requests: Sequence[Request]  # of the jump
    _rows: dict[int, int]  # of these, by id
    _gains: NDArray[np.int64]  # tokens, by request and by steps from now
    _left: NDArray[np.int64]  # until each one's limit
    _limits: NDArray[np.int64]

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        self._reached: list[tuple[Request, int]] = []  # who has completed a chunk

    def ahead(self, cost: StepCost) -> tuple[DecodeCurve, float, int]:
        wary = self.windowed or not self.plain or self._same_level > 0
        contexts, curve, yielded = self._look(cost, 1 if wary else min(cost.drawn, _MOST))
        leaving = (self._gains == self._left).any(axis=0)
        if chunk := self._chunk_tokens:
            done = self._limits - self._left
            leaving |= ((done + self._gains) // chunk > done // chunk).any(axis=0)
        totals = contexts.sum(axis=0)
        if self.plain and not self._fits(int(totals[-1])):
            pages = (-(-contexts // self._page_tokens)).sum(axis=0)
            rooms = self.room_pages, self.room_pages - self.spare_pages
            leaving |= np.logical_or.reduce([(pages > room) & (self.pages <= room) for room in rooms])
        steps = int(np.argmax(leaving)) + 1 if leaving.any() else len(leaving)
        padded = totals + self._skew * (self.size * contexts.max(axis=0) - totals) if self._skew else totals
        before = np.append(self.padded_tokens(), padded[: steps - 1])
        curve.furthest_tokens = max(curve.furthest_tokens, float(before[-1]))
        return _Ends(self.size, np.append(0.0, np.cumsum(yielded * curve.each_s(before)))), before[0], steps

    def mixed_s(self, cost: StepCost, chunks: Sequence[Chunk]) -> float:
        _, curve, yielded = self._look(cost, 1)
        return super().mixed_s(cost, chunks) + (yielded - 1) * curve.step_s(self.padded_tokens())

    def _look(self, cost: StepCost, most: int) -> tuple[NDArray[np.int64], DecodeCurve, float]:
        """Draw the next steps: each one's context after them; the curve of their shares, and how many a step has."""
        self._requests = requests = self.requests()
        self._rows = {request.id: row for row, request in enumerate(requests)}
        have = np.array([(r.offset + self.step, r.prompt_tokens, r.limit_tokens) for r in requests])
        self._limits, self._left = have[:, 2:], have[:, 1:].sum(axis=1, keepdims=True) - have[:, :1]
        tokens = self.padded_tokens()
        asked = self.size, self.in_windows(tokens) if self.windowed else None
        chances = cost.accepted(asked[0], tokens, asked[1])
        numbers = np.stack([request.acceptance.ahead(min(most, int(self._left.min()))) for request in requests])
        gains = np.ones(numbers.shape, np.int64)
        for bar in ndtri(chances):
            gains += numbers < bar
        self._gains = np.minimum(gains.cumsum(axis=1), self._left)
        return have[:, :1] + self._gains, cost.decode(*asked), 1 + sum(chances)

    def advance(self, steps: int) -> None:
        if not steps:
            return
        requests, gains, chunk = self._requests, self._gains[:, steps - 1], self._chunk_tokens
        for request, gain in zip(requests, gains.tolist(), strict=True):
            before = request.offset + self.step - request.prompt_tokens
            request.generated = before + gain
            request.acceptance.steps += steps
            if chunk and request.generated // chunk > before // chunk and not request.at_limit:
                self._reached.append((request, request.generated))
        self._reset()
        self.step += max(round(float(gains.mean())), 1)
        self.join(requests)

    def join(self, requests: Sequence[Request]) -> None:
        super().join(requests)
        for request in requests:  # those of a search of plans have none
            request.acceptance = request.acceptance or AcceptanceDraws((request.position, request.id))

    def chunks_complete(self) -> list[tuple[Request, int]]:
        reached, self._reached = self._reached, []
        return reached

    def fits_to_the_end(self) -> bool:
        return False

    def context_of(self, request: Request, step: int) -> int:
        gained = int(self._gains[self._rows[request.id], step - self.step - 1]) if step > self.step else 0
        return super().context_of(request, self.step) + gained

    def tokens_at(self, step: int) -> int:
        return self.tokens + (int(self._gains[:, step - self.step - 1].sum()) if step > self.step else 0)

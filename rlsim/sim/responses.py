"""The responses of one generation stage as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from rlsim.sim.request import Request


@dataclass(frozen=True)
class Responses:
    """One entry per request: tokens, and moments in simulated seconds (NaN where something never happened)."""

    id: NDArray[np.int64]
    prompt_id: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    response_tokens: NDArray[np.int64]  # generated
    started_at: NDArray[np.float64]
    first_token_at: NDArray[np.float64]
    finished_at: NDArray[np.float64]
    preemptions: NDArray[np.int64]
    replica: NDArray[np.int64]
    tps: tuple[tuple[int, ...], ...]  # tensor-parallel degrees each ran under, in order
    aborted: NDArray[np.bool_]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Responses:
        """The columns of these requests, in their order."""

        def ints(name: str) -> NDArray[np.int64]:
            return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))

        def floats(name: str) -> NDArray[np.float64]:
            return np.fromiter(map(attrgetter(name), requests), np.float64, len(requests))

        return cls(
            id=ints("id"),
            prompt_id=ints("prompt_id"),
            prompt_tokens=ints("prompt_tokens"),
            response_tokens=ints("generated"),
            started_at=floats("started_at"),
            first_token_at=floats("first_token_at"),
            finished_at=floats("finished_at"),
            preemptions=ints("preemptions"),
            replica=ints("replica"),
            tps=tuple(map(attrgetter("tps"), requests)),
            aborted=np.fromiter(map(attrgetter("aborted"), requests), np.bool_, len(requests)),
        )

    def __len__(self) -> int:
        return len(self.id)

    @property
    def total_tokens(self) -> NDArray[np.int64]:
        """Prompt and response tokens of each: what inference and training process."""
        return self.prompt_tokens + self.response_tokens

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which responses are complete: those that are trained on."""
        return ~np.isnan(self.finished_at)

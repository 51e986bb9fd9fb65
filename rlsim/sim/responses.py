"""The responses of one generation stage as columns."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsim.sim.request import Request


@dataclass(frozen=True)
class Responses:
    """One entry per request: tokens, and moments in simulated seconds (NaN where something never happened)."""

    id: NDArray[np.int64]
    position: NDArray[np.int64]  # of the prompt in training order
    prompt_tokens: NDArray[np.int64]
    generated_tokens: NDArray[np.int64]
    started_at: NDArray[np.float64]
    first_token_at: NDArray[np.float64]
    finished_at: NDArray[np.float64]
    preemptions: NDArray[np.int64]
    replica: NDArray[np.int64]
    tps: tuple[tuple[int, ...], ...]  # tensor-parallel degrees each ran under, in order
    aborted: NDArray[np.bool_]  # dropped unfinished
    trained: NDArray[np.bool_]  # belongs to the step's batch
    baseline: NDArray[np.bool_]  # scored to compare the trained ones with
    row: NDArray[np.int64]  # of the trace
    score_started_at: NDArray[np.float64]
    scored_at: NDArray[np.float64]
    reward: NDArray[np.float64]  # NaN if it was not scored
    timed_out: NDArray[np.bool_]  # its reward call ran into a timeout
    paused: NDArray[np.bool_]  # goes on in a later step, with its tokens
    resumed: NDArray[np.bool_]  # was begun in an earlier step
    resumed_tokens: NDArray[np.int64]  # generated in earlier steps
    version: NDArray[np.int64]  # updates of the oldest weights that generated any of it

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        accepted: Container[int] | None = None,
        version: int = 0,
        paused: Container[int] | None = None,
    ) -> Responses:
        """The columns of these requests, in their order; `accepted` are the ids that are trained on, all if None.

        `version` is that of the step's weights; `paused` are the ids that go on in a later step, None where no response
        ever goes on from step to step.
        """

        def ints(name: str) -> NDArray[np.int64]:
            return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))

        def floats(name: str) -> NDArray[np.float64]:
            return np.fromiter(map(attrgetter(name), requests), np.float64, len(requests))

        def flags(name: str) -> NDArray[np.bool_]:
            return np.fromiter(map(attrgetter(name), requests), np.bool_, len(requests))

        finished_at = floats("finished_at")
        trained, baseline = ~np.isnan(finished_at), flags("baseline")
        if accepted is not None:
            trained &= np.fromiter((r.id in accepted for r in requests), np.bool_, len(requests))
        return cls(
            id=ints("id"),
            position=ints("position"),
            prompt_tokens=ints("prompt_tokens"),
            generated_tokens=ints("generated"),
            started_at=floats("started_at"),
            first_token_at=floats("first_token_at"),
            finished_at=finished_at,
            preemptions=ints("preemptions"),
            replica=ints("replica"),
            tps=tuple(map(attrgetter("tps"), requests)),
            aborted=flags("aborted"),
            trained=trained & ~baseline,
            baseline=trained & baseline,
            row=ints("row"),
            score_started_at=floats("score_started_at"),
            scored_at=floats("scored_at"),
            reward=floats("reward"),
            timed_out=flags("timed_out"),
            **_across_steps(requests, version, paused),
        )

    def __len__(self) -> int:
        return len(self.id)

    @property
    def total_tokens(self) -> NDArray[np.int64]:
        """Prompt and response tokens of each: what inference and training process."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which responses are complete."""
        return ~np.isnan(self.finished_at)


def _across_steps(requests: Sequence[Request], version: int, paused: Container[int] | None) -> dict[str, NDArray[Any]]:
    """The columns on what came from earlier steps and goes on in later ones; see `Responses.of`."""
    goes_on, resumed = np.zeros(len(requests), np.bool_), np.zeros(len(requests), np.bool_)
    resumed_tokens, oldest = np.zeros(len(requests), np.int64), np.full(len(requests), version, np.int64)
    for i, request in enumerate(requests if paused is not None else ()):
        goes_on[i] = paused is not None and request.id in paused
        if request.resumed:
            resumed[i], resumed_tokens[i], oldest[i] = True, *request.resumed
    return {"paused": goes_on, "resumed": resumed, "resumed_tokens": resumed_tokens, "version": oldest}

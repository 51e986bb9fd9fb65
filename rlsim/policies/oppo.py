"""OPPO (overlap for PPO): stream responses to the reward model in chunks, and let a few sequences more run than needed.

- `Chunked`, inside a step: the actor's output goes to the scoring model every so many tokens. Every some steps each
  candidate length is tried for one step, and the fastest is kept.
- `Overcommit`, between steps: the buffer holds B + Δ prompts, the step trains on the first B that finish, and the rest
  keep their tokens and go on in the next step. Δ grows while the reward improves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from rlsim.base.schema import Schema
from rlsim.errors import ConfigError
from rlsim.policies.parts import ChunkStreaming
from rlsim.policies.relaxed import Keeping
from rlsim.sim.batching import PromptFeed, Unfinished
from rlsim.sim.control import Launch, Prompt, RolloutControl, ScoringReport
from rlsim.units import Seconds, Tokens
from rlsim.workflow.graph import Workflow


class Chunked(Schema, RolloutControl, ChunkStreaming):
    """Responses go to the scoring models by the chunk, which prefill them while the actor decodes on.

    The fastest length is the one whose step took the least time from the start of generation to the last score, for
    each token generated in it: steps differ in their lengths.
    """

    size: Literal["adaptive"] | Annotated[Tokens, Field(ge=1)] = "adaptive"
    candidates: tuple[Annotated[Tokens, Field(ge=1)], ...] = Field(default=(128, 256, 512), min_length=1)
    every: int = Field(default=50, ge=1)
    models: tuple[str, ...] = Field(default=("reward",), min_length=1)
    handover: Annotated[Seconds, Field(ge=0)] = 0.001
    interference: float = Field(default=0.3, ge=0)

    _steps: int = PrivateAttr(default=0)  # begun
    _took_s: dict[int, float] = PrivateAttr(default_factory=dict)  # by candidate, at its last trial: s per token

    @property
    def handover_s(self) -> float:
        return self.handover

    @property
    def slowdown(self) -> float:
        return 1.0 + self.interference

    def rewired(self, workflow: Workflow) -> Workflow:
        return workflow.in_chunks(self.models, self.candidates[0] if self.size == "adaptive" else self.size)

    def chunk_tokens(self, planned: int) -> int:
        """The next candidate while they are tried, else the fastest of them, of the last trials that are over."""
        if self.size != "adaptive":
            return planned
        turn = self._steps % self.every
        self._steps += 1
        if turn < len(self.candidates):
            return self.candidates[turn]
        return min(self.candidates, key=lambda c: self._took_s.get(c, math.inf))

    def on_scored(self, report: ScoringReport) -> None:
        if report.step % self.every < len(self.candidates):
            self._took_s[report.chunk_tokens] = report.stage_time_s / max(report.response_tokens, 1)


class RewardCurve(Schema):
    """A simulated reward of every step: from `start` to `end` exponentially, or through `points`.

    Between two points the reward is on a straight line, beyond them constant.
    """

    start: float = 0.0
    end: float = 1.0
    time_constant_steps: float = Field(default=100.0, gt=0)
    points: tuple[tuple[float, float], ...] = ()
    noise: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)

    def at(self, step: int) -> float:
        """The reward of a step, from 0."""
        noise = float(np.random.default_rng((self.seed, step)).normal(0.0, self.noise)) if self.noise else 0.0
        if self.points:
            steps, rewards = zip(*self.points, strict=True)
            return float(np.interp(step, steps, rewards)) + noise
        return self.end + (self.start - self.end) * math.exp(-step / self.time_constant_steps) + noise

    def steps_to(self, reward: float, most: int = 1_000_000) -> int:
        """Steps until one has at least this reward: times the seconds of a step, the time to it on this curve.

        Raises `ConfigError` if none of the first `most` has.
        """
        for step in range(most):
            if self.at(step) >= reward:
                return step + 1
        raise ConfigError(f"the curve does not reach a reward of {reward:g} in {most:,} steps")


class Overcommit(Keeping):
    """Launch Δ prompts more than needed; what is not finished goes on in the next step.

    With `delta: adaptive` Δ follows the slope of the reward: d is the mean of the last `window` steps less that of
    the `window` steps before; Δ grows by max(1, ⌊Δ/4⌋) where d > 0 and shrinks by as much otherwise, within
    `delta_min` and `delta_max`. One published line has the opposite sign; the equation and the text say this. The
    equation itself changes Δ by one (`change: one`). The rewards are a simulated curve that the experiment gives, no
    claim about learning.
    """

    delta: Literal["adaptive"] | Annotated[int, Field(ge=0, le=100_000)] = "adaptive"
    delta_start: int = Field(default=8, ge=0, le=100_000)
    delta_min: int = Field(default=4, ge=0, le=100_000)
    delta_max: int = Field(default=64, ge=0, le=100_000)
    window: int = Field(default=5, ge=1, le=100_000)
    change: Literal["quarter", "one"] = "quarter"
    reward: RewardCurve = RewardCurve()

    _delta: int = PrivateAttr(default=0)
    _rewards: list[float] = PrivateAttr(default_factory=list)  # of the steps so far

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._delta = self.delta_start if self.delta == "adaptive" else self.delta

    def launch(self, feed: PromptFeed) -> Launch:
        """All that wait, and new prompts up to B + Δ."""
        return self.filled(feed, feed.prompts + self._delta)

    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:
        """All of them; the step is over, so its reward is known and Δ adapts."""
        self._rewards.append(self.reward.at(len(self._rewards)))
        if self.delta == "adaptive":
            change = max(1, self._delta // 4) if self.change == "quarter" else 1
            self._delta = adapted(self._delta, change, self._rewards, self.window, self.delta_min, self.delta_max)
        return super().keep(unfinished)


def adapted(delta: int, change: int, rewards: Sequence[float], window: int, least: int, most: int) -> int:
    """Δ after a step, by the rewards of all steps so far; as it was while these are fewer than two windows."""
    if len(rewards) < 2 * window:
        return delta
    slope = sum(rewards[-window:]) / window - sum(rewards[-2 * window : -window]) / window
    return min(max(delta + (change if slope > 0 else -change), least), most)

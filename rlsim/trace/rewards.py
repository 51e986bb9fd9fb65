"""Reward columns of a generated trace: correctness, run times of checks and test cases, lengths of a judge's answers.

Everything is drawn from stated distributions: correctness is Bernoulli with a Beta-distributed pass rate per prompt;
run times are lognormal, a share of the variance belonging to the prompt and its test case; some programs never end.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rlsim.base.schema import Schema
from rlsim.units import Seconds, Tokens

#: Run time (s) written for a program that never ends: far beyond any timeout.
NEVER_S = 3600.0


def _sigma(median: float, p95: float) -> float:
    """Standard deviation of the log of a lognormal with this median and 95th percentile."""
    return math.log(p95 / median) / 1.6448536269514722


class Correct(Schema):
    """How many responses are right."""

    share: float = Field(gt=0, lt=1, description="of responses that are not cut at the cap; a cut one is wrong")
    icc: float = Field(
        default=0.4, gt=0, lt=1, description="correlation of two responses to a prompt: pass rates are Beta-distributed"
    )


class RunTimes(Schema):
    """Lognormal run times."""

    median: Annotated[Seconds, Field(gt=0)] = Field(description="median, s")
    p95: Annotated[Seconds, Field(gt=0)] = Field(description="time that 95% do not exceed, s")

    @model_validator(mode="after")
    def _ordered(self) -> RunTimes:
        if self.p95 < self.median:
            raise ValueError("expected median <= p95")
        return self

    def sigma(self) -> float:
        return _sigma(self.median, self.p95)


class Sandbox(Schema):
    """Test cases that every response's program runs, one after the other."""

    cases: int = Field(ge=1, le=1000, description="test cases of a prompt")
    run: RunTimes = Field(description="run time of one test case")
    prompt_share: float = Field(
        default=0.7, ge=0, le=1, description="share of the log variance that prompt and test case decide"
    )
    hanging_prompts: float = Field(
        default=0.0, ge=0, lt=1, description="share of the prompts to which some wrong programs never end"
    )
    hanging_responses: float = Field(default=0.5, ge=0, le=1, description="share of their wrong programs that do not")


class Rewards(Schema):
    """What scoring takes and brings."""

    correct: Correct = Field(description="correctness")
    check: RunTimes | None = Field(default=None, description="a rule-based check of every response")
    sandbox: Sandbox | None = Field(default=None, description="test cases in a sandbox")
    judge_median: Annotated[Tokens, Field(ge=1)] | None = Field(default=None, description="a judge's answer, tokens")
    judge_p95: Annotated[Tokens, Field(ge=1)] | None = Field(default=None, description="and 95% are no longer, tokens")
    source: str = Field(default="", description="where the values come from")

    @model_validator(mode="after")
    def _one_kind(self) -> Rewards:
        judged = self.judge_median is not None
        if judged != (self.judge_p95 is not None):
            raise ValueError("give judge_median and judge_p95 together")
        if self.judge_median and self.judge_p95 and self.judge_p95 < self.judge_median:
            raise ValueError("expected judge_median <= judge_p95")
        if (self.check is not None) + (self.sandbox is not None) + judged != 1:
            raise ValueError("give one of check, sandbox, and judge_median with judge_p95")
        return self


def reward_columns(
    spec: Rewards, prompt: npt.NDArray[np.int64], capped: npt.NDArray[np.bool_], rng: np.random.Generator
) -> dict[str, Any]:
    """The columns `correct` and `reward_time_s`, `test_run_s` or `judge_tokens` of responses to these prompts."""
    prompts, n = int(prompt.max()) + 1, len(prompt)
    concentration = 1 / spec.correct.icc - 1
    pass_rate = rng.beta(spec.correct.share * concentration, (1 - spec.correct.share) * concentration, prompts)
    correct = (rng.random(n) < pass_rate[prompt]) & ~capped
    columns: dict[str, Any] = {"correct": correct}
    if spec.check is not None:
        columns["reward_time_s"] = np.round(spec.check.median * np.exp(spec.check.sigma() * rng.standard_normal(n)), 4)
    if spec.sandbox is not None:
        columns["test_run_s"] = list(_test_runs(spec.sandbox, prompt, correct, prompts, rng))
    if spec.judge_median is not None and spec.judge_p95 is not None:
        sigma = _sigma(spec.judge_median, spec.judge_p95)
        drawn = spec.judge_median * np.exp(sigma * rng.standard_normal(n))
        columns["judge_tokens"] = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return columns


def _test_runs(
    box: Sandbox, prompt: npt.NDArray[np.int64], correct: npt.NDArray[np.bool_], prompts: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Seconds of shape (responses, test cases)."""
    sigma, share, n = box.run.sigma(), box.prompt_share, len(prompt)
    of_prompt, of_case = rng.standard_normal((prompts, 1)), rng.standard_normal((prompts, box.cases))
    common = np.sqrt(share) * (of_prompt + of_case)[prompt] / np.sqrt(2)
    runs = box.run.median * np.exp(sigma * (common + np.sqrt(1 - share) * rng.standard_normal((n, box.cases))))
    prone = np.zeros(prompts, np.bool_)
    prone[rng.permutation(prompts)[: round(box.hanging_prompts * prompts)]] = True
    hangs = prone[prompt] & ~correct & (rng.random(n) < box.hanging_responses)
    runs[hangs, rng.integers(0, box.cases, n)[hangs]] = NEVER_S
    return np.asarray(np.round(runs, 3))

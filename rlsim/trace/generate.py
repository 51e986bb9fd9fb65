"""Makes a trace from a recipe: a fit, or a few published facts, with groups, prompts, rewards, growth over training.

The lengths of an epoch are exactly the (i − ½)/n quantiles of the distribution (see `LengthModel.draw`), so the trace
meets the facts to within one response; chance only decides which response gets which. Rewards are drawn from stated
distributions: correctness is Bernoulli with a Beta-distributed pass rate per prompt; run times are lognormal, a share
of the variance belonging to the prompt and its test case; some programs never end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field

from rlsim.base.schema import Schema, load
from rlsim.errors import TraceError
from rlsim.trace.facts import Fact, FactCheck, model_from_facts
from rlsim.trace.fit import LengthFit, load_fit
from rlsim.trace.mixture import Floats, LengthModel, icc_log
from rlsim.trace.schema import Trace, TraceMeta, make_trace
from rlsim.trace.turns import TurnModel
from rlsim.units import Seconds, Tokens


class PromptTokens(Schema):
    """Lengths of the prompts: lognormal, cut to a range."""

    median: Tokens = Field(ge=1)
    p95: Tokens = Field(ge=1)
    min: Tokens = Field(default=1, ge=1)
    max: Tokens = Field(default=4096, ge=1)


class GrowthPoint(Schema):
    """One point of a curve of mean length over training."""

    step: int = Field(ge=0)
    mean_tokens: float = Field(gt=0)


class Growth(Schema):
    """How lengths grow over training: a factor per epoch, or a curve over steps that the epochs are read off.

    The facts hold in the first epoch; later epochs multiply every uncapped length.
    """

    factors: tuple[float, ...] = ()
    curve: tuple[GrowthPoint, ...] = ()
    steps_per_epoch: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)

    def per_epoch(self) -> Floats:
        """The factor on length in each epoch; of a curve, its value at mid-epoch over that of the first epoch."""
        if self.factors:
            return np.array(self.factors)
        assert self.steps_per_epoch is not None
        assert self.epochs is not None
        middle = (np.arange(self.epochs) + 0.5) * self.steps_per_epoch
        mean = np.interp(middle, [p.step for p in self.curve], [p.mean_tokens for p in self.curve])
        return np.asarray(mean / mean[0])


class Groups(Schema):
    """How alike the responses of one prompt are."""

    icc: float = Field(ge=0, lt=1)
    tolerance: float = Field(default=0.03, gt=0)
    source: str = ""


class Lengths(Schema):
    """Where the distribution comes from: `facts`, a `fit` (inline, or the path of a file), or a `model` spelled out."""

    facts: tuple[Fact, ...] = ()
    components: int | None = Field(default=None, ge=1, le=3)
    fit: LengthFit | str | None = None
    model: LengthModel | None = None


class Recipe(Schema):
    """Everything needed to generate a trace, byte for byte."""

    name: str = Field(min_length=1)
    description: str = ""
    source: str = ""
    task: str | None = None
    seed: int = Field(default=0, ge=0)
    prompts: int = Field(ge=1)
    responses: int = Field(ge=1)
    cap_tokens: Tokens = Field(ge=2)
    lengths: Lengths
    groups: Groups | None = None
    prompt_tokens: PromptTokens | None = None
    rewards: Rewards | None = None
    growth: Growth | None = None
    turns: TurnModel | None = None


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a YAML file, a fit that it names by path read in. Raises `ConfigError` with every mistake in it."""
    recipe = load(Path(path), Recipe)
    if isinstance(recipe.lengths.fit, str):
        fit = load_fit(Path(path).parent / recipe.lengths.fit)
        recipe = recipe.model_copy(update={"lengths": recipe.lengths.model_copy(update={"fit": fit})})
    return recipe


def length_model(recipe: Recipe) -> LengthModel:
    """The distribution that a recipe draws from. Raises `TraceError` if its facts contradict each other."""
    lengths = recipe.lengths
    if isinstance(lengths.fit, str):
        raise TraceError(f"recipe {recipe.name}: fit {lengths.fit!r} is a path; read the recipe with load_recipe")
    model = lengths.fit.model if lengths.fit else lengths.model
    if model is not None:
        return model
    model = model_from_facts(lengths.facts, recipe.cap_tokens, lengths.components, f"recipe {recipe.name}")
    return model if recipe.groups is None else _with_capped_icc(model, recipe)


def _with_capped_icc(model: LengthModel, recipe: Recipe) -> LengthModel:
    """Shares that give the wanted correlation of *capped* log length, which lies a little below the uncapped one's."""
    assert recipe.groups is not None
    wanted = aim = recipe.groups.icc
    for _ in range(3):
        trial = _capped(model.with_icc(aim).draw(4000, 8, 1, np.random.default_rng(0)), recipe.cap_tokens)[0]
        aim = float(np.clip(aim + wanted - (icc_log(trial.ravel(), np.repeat(np.arange(4000), 8)) or 0.0), 0, 0.99))
    return model.with_icc(round(aim, 3))


def generate(recipe: Recipe) -> Trace:
    """The trace of a recipe; the same recipe gives the same trace.

    Raises `TraceError` if it does not meet the recipe's facts within their tolerance.
    """
    trace = draw_trace(recipe)
    require(recipe, check(recipe, trace))
    return trace


def require(recipe: Recipe, checks: Sequence[FactCheck]) -> None:
    """Raises `TraceError` naming every fact that is not met."""
    lines = [f"  {c.fact}: wanted {c.wanted:g} ± {c.tolerance:g}, got {c.got:g}" for c in checks if not c.ok]
    if lines:
        raise TraceError(f"recipe {recipe.name}: the generated trace does not meet its facts:\n" + "\n".join(lines))


def check(recipe: Recipe, trace: Trace) -> list[FactCheck]:
    """Every fact of the recipe beside what the first epoch of a trace says, and the intra-prompt correlation."""
    first = (trace.frame["epoch"] == trace.frame["epoch"].min()).to_numpy(np.bool_)
    tokens, cap = trace.response_tokens[first], trace.meta.cap_tokens or int(trace.response_tokens.max())
    checks = [fact.check(tokens, cap) for fact in recipe.lengths.facts]
    if (groups := recipe.groups) and recipe.responses > 1:
        icc = icc_log(tokens, trace.prompt_codes()[0][first]) or 0.0
        checks.append(FactCheck("intra-prompt correlation of log length", groups.icc, icc, groups.tolerance))
    return checks


def draw_trace(recipe: Recipe) -> Trace:
    """The trace of a recipe, not yet checked against its facts."""
    model = length_model(recipe)
    factors = recipe.growth.per_epoch() if recipe.growth else np.ones(1)
    length_seed, prompt_seed, reward_seed, turn_seed = np.random.SeedSequence(recipe.seed).spawn(4)
    drawn = model.draw(recipe.prompts, recipe.responses, len(factors), np.random.default_rng(length_seed))
    drawn = drawn * factors[:, None, None]
    tokens = _capped(drawn, recipe.cap_tokens)
    shape = tokens.shape
    epoch, prompt, sample = (axis.ravel() for axis in np.indices(shape))
    columns: dict[str, Any] = {"prompt_id": prompt, "sample_id": sample}
    if recipe.prompt_tokens is not None:
        columns["prompt_tokens"] = _prompt_lengths(recipe, np.random.default_rng(prompt_seed))[prompt]
    capped = tokens.ravel() >= recipe.cap_tokens
    columns |= {"response_tokens": tokens.ravel(), "capped": capped}
    if len(factors) > 1:
        columns["epoch"] = epoch
    if recipe.task is not None:
        columns["task"] = np.full(tokens.size, recipe.task, dtype=object)
    if recipe.rewards is not None:
        columns |= reward_columns(recipe.rewards, prompt, capped, np.random.default_rng(reward_seed))
    turns = recipe.turns or (recipe.lengths.fit.turns if isinstance(recipe.lengths.fit, LengthFit) else None)
    if turns is not None:
        columns["turns"] = turns.draw(columns["response_tokens"], prompt, np.random.default_rng(turn_seed))
    meta = TraceMeta(
        name=recipe.name,
        source=f"generated by rlsim from its recipe; {recipe.source}".rstrip("; "),
        cap_tokens=recipe.cap_tokens,
        recipe=recipe.model_dump(mode="json", exclude_defaults=True),
    )
    return make_trace(pd.DataFrame(columns), meta, where=f"recipe {recipe.name}")


def _capped(lengths: Floats, cap_tokens: int) -> Any:
    """Whole tokens: at least 1, at most the cap; a length of cap − ½ and more reaches it."""
    return np.clip(np.floor(lengths + 0.5), 1, cap_tokens).astype(np.int64)


def _prompt_lengths(recipe: Recipe, rng: np.random.Generator) -> Any:
    from scipy.special import ndtri

    spec = recipe.prompt_tokens
    assert spec is not None
    strata = ndtri((np.arange(recipe.prompts) + 0.5) / recipe.prompts)
    lengths = spec.median * np.exp(np.log(spec.p95 / spec.median) / ndtri(0.95) * strata)
    return rng.permutation(np.clip(np.rint(lengths), spec.min, spec.max).astype(np.int64))


#: Run time (s) written for a program that never ends: far beyond any timeout.
NEVER_S = 3600.0


def _sigma(median: float, p95: float) -> float:
    """Standard deviation of the log of a lognormal with this median and 95th percentile."""
    return math.log(p95 / median) / 1.6448536269514722


class Correct(Schema):
    """How many responses are right."""

    share: float = Field(gt=0, lt=1)
    icc: float = Field(default=0.4, gt=0, lt=1)


class RunTimes(Schema):
    """Lognormal run times."""

    median: Annotated[Seconds, Field(gt=0)]
    p95: Annotated[Seconds, Field(gt=0)]

    def sigma(self) -> float:
        return _sigma(self.median, self.p95)


class Sandbox(Schema):
    """Test cases that every response's program runs, one after the other."""

    cases: int = Field(ge=1, le=1000)
    run: RunTimes
    prompt_share: float = Field(default=0.7, ge=0, le=1)
    hanging_prompts: float = Field(default=0.0, ge=0, lt=1)
    hanging_responses: float = Field(default=0.5, ge=0, le=1)


class Rewards(Schema):
    """What scoring takes and brings."""

    correct: Correct
    check: RunTimes | None = None
    sandbox: Sandbox | None = None
    judge_median: Annotated[Tokens, Field(ge=1)] | None = None
    judge_p95: Annotated[Tokens, Field(ge=1)] | None = None
    source: str = ""


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

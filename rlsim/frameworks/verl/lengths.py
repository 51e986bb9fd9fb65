"""Response lengths that meet a log, and a trace of them: a log keeps a step's mean, longest and share at the cap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq

from rlsim.base.refusals import refuse
from rlsim.errors import CalibrationError
from rlsim.frameworks.verl.log import VerlLog, read_log
from rlsim.frameworks.verl.run import batch_of
from rlsim.sim.request import Request
from rlsim.trace import StepSampler, Trace, TraceMeta, make_trace
from rlsim.trace.mixture import Component, Floats, LengthModel

PROMPT_SHARE = 0.7  # of the variance of log length; assumed, groups with known prompts show 0.63 to 0.79
SPREAD = 0.7  # standard deviation of log length where neither the longest nor the share at the cap is logged; assumed
_SPREADS = (1e-3, 8.0)  # standard deviations of log length that are looked at


@dataclass(frozen=True)
class Logged:
    """What a step's metrics say about its lengths (tokens; NaN where not logged)."""

    step: int
    where: str
    response_mean: float
    response_max: float
    clip_ratio: float
    prompt_mean: float


def logged_lengths(log: VerlLog, steps: pd.DataFrame) -> list[Logged]:
    """What `steps` of a log say about their lengths."""
    columns = ["response_mean", "response_max", "clip_ratio", "prompt_mean"]
    rows = zip(steps.index.tolist(), steps[columns].to_numpy(float).tolist(), strict=True)
    return [Logged(int(step), log.where(int(step)), *row) for step, row in rows]


@dataclass(frozen=True)
class Batch:
    """A step's sequences, samples of a prompt side by side (tokens)."""

    position: NDArray[np.int64]  # of the prompt in the step
    prompt_tokens: NDArray[np.int64]
    response_tokens: NDArray[np.int64]

    @property
    def total_tokens(self) -> NDArray[np.int64]:
        """Prompt and response of each: what is trained on."""
        return self.prompt_tokens + self.response_tokens

    def requests(self) -> list[Request]:
        columns = (self.position, self.prompt_tokens, self.response_tokens)
        return [Request(i, *values) for i, values in enumerate(zip(*(c.tolist() for c in columns), strict=True))]


def deals(sequences: int) -> int:
    """How many ways of dealing a batch's lengths to its prompts are averaged: small batches depend on it."""
    return max(1, min(4, round(2048 / sequences)))


def reconstruct(logged: Logged, prompts: int, responses: int, cap: int, deal: int = 0) -> Batch:
    """Lengths of one lognormal that meet the log (see `_fitted`).

    They are its quantiles (i − ½)/n, dealt to prompts so that `PROMPT_SHARE` of the variance of their logs is the
    prompt's: for one number `deal` the same way in every step, as how they really fell is not known and must not look
    like information. Raises `CalibrationError` if the metrics contradict each other.
    """
    part = Component(weight=1.0, median_tokens=1.0, sigma=SPREAD, prompt_share=PROMPT_SHARE)
    rng = np.random.default_rng(deal)
    drawn = LengthModel(components=(part,)).draw(prompts, responses, 1, rng)[0].ravel()
    ids = np.repeat(np.arange(prompts), responses)
    prompt_tokens = np.full(prompts * responses, max(1, round(logged.prompt_mean)))
    return Batch(ids, prompt_tokens, _fitted(drawn, logged, cap))


def from_trace(trace: Trace, steps: Sequence[Logged], prompts: int, responses: int, cap: int) -> list[Batch]:
    """Lengths drawn from a trace, step by step, and made to meet the log (see `_fitted`); prompts are the trace's."""
    default = max(1, round(float(np.median([logged.prompt_mean for logged in steps]))))
    sampler = StepSampler(trace, prompts, responses, cap, 0, default_prompt_tokens=default)
    batches = []
    for place, logged in enumerate(steps):
        batch = sampler.step(place)
        response = _fitted(batch.response_tokens.astype(float), logged, cap)
        batches.append(Batch(batch.position, batch.prompt_tokens, response))
    return batches


def _fitted(drawn: Floats, logged: Logged, cap: int) -> NDArray[np.int64]:
    """`drawn` as edge · (length / anchor)^p, cut at the cap, with the logged mean.

    Edge is the cap and anchor the length that the logged share of `drawn` reaches; where none is cut, edge is the
    longest response logged and anchor the longest drawn. Then the mean falls as p grows, which gives p. Where neither
    is logged p is 1 and one factor gives the mean.
    """
    refuse("lengths of a log", CalibrationError, cap=cap, **vars(logged))
    mean, cut = logged.response_mean, round(logged.clip_ratio * len(drawn)) if logged.clip_ratio > 0.0 else 0
    edge = float(cap) if cut else logged.response_max
    x = np.log(drawn)
    spread = float(x.std())
    if math.isnan(edge) or spread == 0.0:
        return _stretched(drawn, mean, cap)
    x = (x - np.sort(x)[-max(cut, 1)]) / spread

    def lengths(p: float) -> Floats:
        return np.asarray(np.clip(edge * np.exp(p * x), 1.0, edge))

    low, high = _SPREADS
    if mean >= float(lengths(low).mean()):
        p = low
    elif mean <= float(lengths(high).mean()):
        raise CalibrationError(
            f"{logged.where}: step {logged.step}: response_length: no spread gives mean {mean:g} with {max(cut, 1)} of "
            f"{len(drawn)} responses at {edge:g} tokens"
        )
    else:
        p = float(brentq(lambda p: float(lengths(p).mean()) - mean, low, high, xtol=1e-7))
    return np.rint(lengths(p)).astype(np.int64)


def _stretched(drawn: Floats, mean: float, cap: int) -> NDArray[np.int64]:
    """All lengths times one factor, cut at the cap, with that mean."""

    def excess(log_factor: float) -> float:
        return float(np.clip(drawn * math.exp(log_factor), 1.0, cap).mean()) - mean

    low, high = math.log(0.5 / drawn.max()), math.log(2.0 * cap / drawn.min())
    factor = float(brentq(excess, low, high, xtol=1e-9)) if excess(low) < 0.0 < excess(high) else high
    return np.clip(np.rint(drawn * math.exp(factor)), 1, cap).astype(np.int64)


_DERIVED = (
    "DERIVED, not measured: the log has means of {steps:,} steps and no lengths. Each step's are those of one "
    "lognormal that meets its mean, and its share at the cap or else its longest response; assumed are this shape, "
    "that {share:.0%} of the variance of log length is the prompt's, and that prompts are as long as the step's mean"
)


def derive_trace(
    path: str | Path,
    *,
    prompts: int | None = None,
    responses: int | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    source: str = "",
) -> Trace:
    """Lengths (tokens) that meet the means in the metric log `path`, one epoch of the trace per logged step.

    `prompts` and `responses` to each are what a step launched, `cap_tokens` the response cap; what is left out is taken
    from the configuration that veRL prints into its log. A simulation's step k takes the lengths of the k-th logged
    step. Raises `CalibrationError` with file and line if the log cannot be read, lacks response_length/mean, tells
    neither batch nor cap, or contradicts itself.
    """
    log = read_log(path)
    log.need("response_mean")
    prompts, responses, cap, said = batch_of(log, prompts, responses, cap_tokens)
    steps = log.steps[log.steps["response_mean"].notna()]
    frames = []
    for epoch, logged in enumerate(logged_lengths(log, steps)):
        known = not np.isnan(logged.prompt_mean)
        batch = reconstruct(logged if known else replace(logged, prompt_mean=1.0), prompts, responses, cap)
        columns = {
            "prompt_id": epoch * prompts + batch.position,
            "sample_id": np.tile(np.arange(responses), prompts),
            "response_tokens": batch.response_tokens,
            "epoch": epoch,
        }
        if known:
            columns["prompt_tokens"] = batch.prompt_tokens
        frames.append(pd.DataFrame(columns))
    notes = [
        _DERIVED.format(steps=len(steps), share=PROMPT_SHARE),
        "every logged step is an epoch of its own with prompts of its own: which came again is not logged",
    ]
    if (steps["response_max"].isna() & ~(steps["clip_ratio"] > 0)).any():
        notes.append(f"where neither the longest nor a share at the cap is logged, log length has sd {SPREAD}: assumed")
    if len(steps) < len(log.steps):
        notes.append(f"{len(log.steps) - len(steps)} steps without response_length/mean are left out")
    meta = TraceMeta(
        name=name or Path(path).stem,
        source=source or f"derived from means in the metric log {Path(path).name}",
        cap_tokens=cap,
        notes=(*notes, *log.notes, *said),
    )
    return make_trace(pd.concat(frames, ignore_index=True), meta, where=str(path))


def batch_size(text: str) -> tuple[int, int]:
    """Prompts and responses of `128x8`. Raises `CalibrationError` for anything else."""
    prompts, sign, responses = text.lower().replace("×", "x").partition("x")
    whole = sign and prompts.strip().isdigit() and responses.strip().isdigit()
    refuse("--batch", CalibrationError, text=text, whole=whole, prompts=prompts, responses=responses)
    return int(prompts), int(responses)

"""Fits `LengthModel` to a trace. Lengths cut at the cap are censored, not observed.

First the mixture itself, by maximum likelihood over all responses; then, with the mixture held, the shares that the
prompt has in it, by pairwise composite likelihood over samples of the same prompt (Varin, Reid and Firth, 2011).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlsim.base.output import atomic_path, write_text
from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema, load
from rlsim.errors import TraceError
from rlsim.trace.mixture import (
    Floats,
    LengthModel,
    both_below,
    icc_log,
    joint_weights,
    mixture,
    straggling_groups,
    within_sd_log,
)
from rlsim.trace.schema import Trace
from rlsim.trace.turns import TurnModel, fit_turns

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
_SMALLEST_SIGMA = 0.02
_MAX_PAIRS = 40_000


class Goodness(Schema):
    """How well the fit describes the trace it was made from."""

    ks: float
    ks_single_lognormal: float
    share_at_cap_trace: float | None = None
    share_at_cap_fit: float | None = None
    icc_trace: float | None = None
    icc_fit: float | None = None
    within_sd_trace: float | None = None
    within_sd_fit: float | None = None
    straggling_prompts_trace: float | None = None
    straggling_prompts_fit: float | None = None


class Provenance(Schema):
    """What the fit was made from."""

    trace: str
    source: str = ""
    sha256: str = ""
    responses: int = Field(ge=1)
    prompts: int = Field(ge=1)
    rlsim: str = ""


class LengthFit(Schema):
    """A fitted length distribution: what `rlsim trace fit` writes."""

    model: LengthModel
    cap_tokens: int | None = Field(default=None, ge=1)
    goodness: Goodness
    provenance: Provenance
    notes: tuple[str, ...] = ()
    turns: TurnModel | None = None


def load_fit(path: str | Path) -> LengthFit:
    """The fit in a YAML or JSON file; raises `ConfigError` with every mistake in it."""
    return load(Path(path), LengthFit)


def check_fit_name(path: Path) -> None:
    """Raises `TraceError` if no fit is written under such a name."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise TraceError(f"{path}: a fit is written as .yaml or .json")


def save_fit(fit: LengthFit, path: str | Path) -> None:
    """Writes `fit` to a .yaml or .json file, whole or not at all; `load_fit` reads it back."""
    path = Path(path)
    check_fit_name(path)
    data = fit.model_dump(mode="json", exclude_none=True)
    if path.suffix == ".json":
        write_text(path, json.dumps(data, indent=2) + "\n", TraceError)
        return
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 110
    with atomic_path(path, TraceError) as temporary:
        yaml.dump(data, temporary)


def fit_trace(trace: Trace, cap_tokens: int | None = None, *, components: int = 2) -> LengthFit:
    """Fits a lognormal mixture with prompt structure to `trace`.

    `cap_tokens`: lengths at or above it are taken as cut there (default: the trace's own cap, if it has one). Raises
    `TraceError` if fewer than 20 responses, or fewer than two different lengths, are left below the cap.
    """
    from rlsim.base.version import __version__

    cap = cap_tokens or trace.meta.cap_tokens
    tokens, censored = trace.response_tokens, trace.capped
    if cap is not None:
        censored = censored | (tokens >= cap)
        tokens = np.minimum(tokens, cap)
    refuse("fit", TraceError, name=trace.meta.name, lengths=tokens[~censored].tolist())
    plain = fit_lengths(tokens, censored, 1)
    model = fit_lengths(tokens, censored, components) if components > 1 else plain
    codes = trace.prompt_codes()[0]
    notes = []
    if np.bincount(codes).max() > 1:
        model = _fit_shares(model, tokens, censored, codes)
    else:
        notes.append("every prompt has one sample: the prompt's share cannot be known and is 0")
    share = float(censored.mean()) if censored.any() else None
    limit = int(np.quantile(tokens, 0.99))
    groups, groups_fit = _groups(tokens, codes, limit), _groups(*_drawn(model, codes, cap), limit)
    goodness = Goodness(
        ks=_digits(ks_distance(model, tokens, censored)),
        ks_single_lognormal=_digits(ks_distance(plain, tokens, censored)),
        share_at_cap_trace=_digits(share),
        share_at_cap_fit=_digits(float(1 - model.cdf(cap - 0.5))) if cap and share is not None else None,
        icc_trace=groups[0], icc_fit=groups_fit[0],
        within_sd_trace=groups[1], within_sd_fit=groups_fit[1],
        straggling_prompts_trace=groups[2], straggling_prompts_fit=groups_fit[2],
    )  # fmt: skip
    provenance = Provenance(
        trace=trace.meta.name, source=trace.meta.source, sha256=trace.digest(),
        responses=len(trace), prompts=int(codes.max()) + 1, rlsim=__version__,
    )  # fmt: skip
    cells = trace.frame["turns"].tolist() if "turns" in trace.frame else None
    turns = None if cells is None else fit_turns(trace.meta.name, cells, trace.response_tokens, codes)
    return LengthFit(
        model=model, cap_tokens=cap, goodness=goodness, provenance=provenance, notes=tuple(notes), turns=turns
    )


def fit_lengths(tokens: Ints, censored: Bools, components: int) -> LengthModel:
    """The most likely mixture of `components` lognormals; a censored length says only that the true one is not shorter.

    Works on counts of different lengths, by interval likelihood P(L − ½ < length ≤ L + ½), so that a repeated length
    cannot draw a component onto itself; L-BFGS from several starts.
    """
    from scipy.optimize import minimize
    from scipy.special import log_ndtr, logsumexp

    pairs, counts = np.unique(np.stack([tokens, censored]), axis=1, return_counts=True)
    length, cut = pairs[0].astype(np.float64), pairs[1].astype(bool)
    low = np.log(length - 0.5)
    high = np.where(cut, np.inf, np.log(length + 0.5))
    log = np.log(length)

    def negative(theta: Floats) -> float:
        weight, mu, sigma = _unpack(theta, components)
        a, b = (low[:, None] - mu) / sigma, (high[:, None] - mu) / sigma
        flip = a + b > 0
        upper, lower = np.where(flip, -a, b), np.where(flip, -b, a)
        big, small = log_ndtr(upper), log_ndtr(lower)
        with np.errstate(divide="ignore"):
            part = big + np.log(-np.expm1(np.minimum(small - big, -1e-14)))
        return float(-counts @ logsumexp(part + np.log(weight), axis=1) / counts.sum())

    best = None
    for start in _starts(np.repeat(log, counts), components):
        found = minimize(negative, start, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-11})
        if np.isfinite(found.fun) and (best is None or found.fun < best.fun - 1e-9):
            best = found
    assert best is not None
    return mixture(*_unpack(best.x, components))


def _unpack(theta: Floats, k: int) -> tuple[Floats, Floats, Floats]:
    logits = np.concatenate([[0.0], np.clip(theta[2 * k :], -12, 12)])
    weight = np.exp(logits - logits.max())
    return weight / weight.sum(), theta[:k], _SMALLEST_SIGMA + np.exp(np.clip(theta[k : 2 * k], -12, 4))


def _starts(log: Floats, k: int) -> list[Floats]:
    mean, sd = float(log.mean()), max(float(log.std()), 0.05)
    if k == 1:
        return [np.array([mean, math.log(sd)])]
    starts = []
    for cut in (0.25, 0.5, 0.75, 0.9):
        edge = float(np.quantile(log, cut))
        low, high = log[log <= edge], log[log > edge]
        if len(low) < 2 or len(high) < 2:
            continue
        mus = np.concatenate([[low.mean()], np.quantile(high, np.linspace(0, 1, k + 1)[1:-1])])
        sds = np.log(np.maximum([low.std()] + [high.std()] * (k - 1), 0.05))
        starts.append(np.concatenate([mus, sds, np.full(k - 1, math.log((1 - cut) / cut / (k - 1)))]))
    wide = [mean + np.linspace(-0.1, 0.1, k), np.log(sd * np.geomspace(1.5, 0.5, k)), np.zeros(k - 1)]
    return [*starts, np.concatenate(wide)]


def ks_distance(model: LengthModel, tokens: Ints, censored: Bools) -> float:
    """Largest distance between model and trace distribution, over lengths not beyond the first censored one."""
    limit = tokens[censored].min() if censored.any() else np.inf
    length, counts = np.unique(tokens, return_counts=True)
    above = np.cumsum(counts) / counts.sum()
    inside = length < limit
    gap_above = np.abs(model.cdf(length + 0.5) - above)[inside]
    gap_below = np.abs(model.cdf(length - 0.5) - np.concatenate([[0.0], above[:-1]]))[length <= limit]
    return float(max(gap_above.max(initial=0.0), gap_below.max(initial=0.0)))


def _fit_shares(model: LengthModel, tokens: Ints, censored: Bools, codes: Ints) -> LengthModel:
    from scipy.optimize import minimize
    from scipy.special import expit

    likelihood = _pair_likelihood(model, tokens, censored, _pairs(codes))
    k = len(model.components)

    def shares(theta: Floats) -> tuple[Floats, float]:
        share: Floats = 0.995 * expit(theta)
        return share[:k], float(share[k]) if k > 1 else 0.0

    def negative(theta: Floats) -> float:
        return -likelihood(*shares(theta))

    starts = [np.full(k + (k > 1), 0.5), np.linspace(1.0, -1.0, k + (k > 1)), np.linspace(-1.0, 1.0, k + (k > 1))]
    options: Any = {"xatol": 5e-3, "fatol": 1e-6, "maxiter": 300}
    found = [minimize(negative, start, method="Nelder-Mead", options=options) for start in starts]
    s, r = shares(min(found, key=lambda f: float(f.fun)).x)
    return model.with_shares([round(float(v), 4) for v in s], round(r, 4))


def _pairs(codes: Ints) -> Ints:
    """Index pairs of samples of the same prompt, at most `_MAX_PAIRS` of them, evenly taken."""
    order = np.argsort(codes, kind="stable")
    sorted_codes = codes[order]
    found = []
    for step in range(1, int(np.bincount(codes).max())):
        same = np.flatnonzero(sorted_codes[:-step] == sorted_codes[step:])
        found.append(np.stack([order[same], order[same + step]]))
    pairs = np.concatenate(found, axis=1)
    return pairs[:, :: -(-pairs.shape[1] // _MAX_PAIRS)]


def _pair_likelihood(
    model: LengthModel, tokens: Ints, censored: Bools, pairs: Ints
) -> Callable[[Floats, float], float]:
    """Mean log likelihood of a pair as a function of the shares: one per component, one for the component itself."""
    from scipy.special import ndtr

    cut = censored[pairs]
    swap = cut[0] & ~cut[1]
    pairs = np.where(swap, pairs[::-1], pairs)  # a lone censored one comes second
    one, both = (censored[pairs[0]] ^ censored[pairs[1]]), censored[pairs[0]] & censored[pairs[1]]
    none = ~one & ~both
    z = (np.log(tokens)[pairs][..., None] - model.mu) / model.sigma  # [2, pair, component]
    limits = np.unique(tokens[pairs[:, both]]) if both.any() else np.array([], np.int64)

    def mean_log(share: Floats, r: float) -> float:
        joint = joint_weights(model.weight, r)
        density = np.zeros(pairs.shape[1])
        for k in range(len(model.components)):
            x = z[0, :, k]
            first = np.exp(-x * x / 2) / model.sigma[k]
            for m in range(len(model.components)):
                y, s = z[1, :, m], math.sqrt(share[k] * share[m])
                root = math.sqrt(1 - s * s)
                rest = (y - s * x) / root
                density[none] += (joint[k, m] * first * np.exp(-rest * rest / 2) / (root * model.sigma[m]))[none]
                density[one] += (joint[k, m] * first * ndtr(-rest))[one]
                if both.any():
                    ends = [[(model.mu[i] - math.log(at)) / model.sigma[i] for i in (k, m)] for at in limits.tolist()]
                    table = {at: both_below(x, y, s) for at, (x, y) in zip(limits.tolist(), ends, strict=True)}
                    shorter = np.minimum(*tokens[pairs[:, both]])
                    density[both] += joint[k, m] * np.array([table[int(t)] for t in shorter])
        return float(np.log(np.maximum(density, 1e-300)).mean())

    return mean_log


def _groups(tokens: Ints, codes: Ints, limit: int) -> tuple[float | None, float | None, float | None]:
    """ICC and within-prompt sd of log length, and the share of prompts with a response of `limit` tokens or more."""
    icc = icc_log(tokens, codes)
    stragglers = straggling_groups(tokens, codes, limit)[0] if icc is not None else None
    return _digits(icc), _digits(within_sd_log(tokens, codes)), _digits(stragglers)


def _drawn(model: LengthModel, codes: Ints, cap: int | None) -> tuple[Ints, Ints]:
    """Lengths and prompt codes drawn from the fit, in groups of the size that is usual in `codes`."""
    responses = int(np.median(np.bincount(codes)))
    prompts = max(int(codes.max()) + 1, 2000) if responses > 1 else 2000
    drawn = np.maximum(np.rint(model.draw(prompts, responses, 1, np.random.default_rng(0))[0]), 1)
    return np.minimum(drawn, cap or np.inf).astype(np.int64).ravel(), np.repeat(np.arange(prompts), responses)


def _digits(value: float | None) -> float | None:
    return None if value is None else round(value, 5)

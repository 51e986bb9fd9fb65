"""The model of response lengths: a lognormal mixture whose spread lies partly in the prompt, partly in the sample.

    log L = log median_k + sigma_k · (√s_k · u + √(1−s_k) · e)      u per prompt, e per sample, both N(0, 1)
    k     = the component where √r · a + √(1−r) · b falls           a per prompt, b per sample, both N(0, 1)

Over all responses this is exactly the lognormal mixture. `prompt_share` s_k says how far the length inside a component
is a property of the prompt, `runaway_share` r how far the component itself is (a runaway is only partly the prompt's).
Lengths in tokens; a response of L tokens stands for (L − ½, L + ½].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlsim.base.schema import Schema

Floats = npt.NDArray[np.float64]
Numbers = Floats | Sequence[float]
_NODES = np.polynomial.legendre.leggauss(40)


class Component(Schema):
    """One lognormal part of the distribution."""

    weight: float = Field(gt=0, le=1)
    median_tokens: float = Field(gt=0)
    sigma: float = Field(gt=0)
    prompt_share: float = Field(default=0.0, ge=0, lt=1)


class LengthModel(Schema):
    """A lognormal mixture with group structure, shortest component first."""

    components: tuple[Component, ...] = Field(min_length=1)
    runaway_share: float = Field(default=0.0, ge=0, lt=1)

    @property
    def weight(self) -> Floats:
        return np.array([c.weight for c in self.components])

    @property
    def mu(self) -> Floats:
        return np.log([c.median_tokens for c in self.components])

    @property
    def sigma(self) -> Floats:
        return np.array([c.sigma for c in self.components])

    @property
    def share(self) -> Floats:
        return np.array([c.prompt_share for c in self.components])

    def with_shares(self, share: Sequence[float], runaway_share: float) -> LengthModel:
        """The same distribution with other shares of the prompt, one per component and one for the component itself."""
        parts = [c.model_copy(update={"prompt_share": s}) for c, s in zip(self.components, share, strict=True)]
        return LengthModel(components=tuple(parts), runaway_share=runaway_share)

    def cdf(self, tokens: npt.ArrayLike) -> Floats:
        """P(L ≤ tokens) of the uncapped length."""
        return mixture_cdf(self.weight, self.mu, self.sigma, tokens)

    def quantile(self, share: npt.ArrayLike) -> Floats:
        """The uncapped length (tokens) that a `share` (between 0 and 1) of the responses does not exceed."""
        from scipy.special import ndtri

        p = np.atleast_1d(np.asarray(share, np.float64))
        ends = self.mu + self.sigma * ndtri(p)[:, None]
        low, high = ends.min(axis=1), ends.max(axis=1)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cdf(np.exp(middle)) < p
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray(np.exp((low + high) / 2)).reshape(np.shape(share))

    def mean(self, cap_tokens: float = math.inf) -> float:
        """Mean of min(L, cap) (tokens), closed form."""
        return mixture_mean(self.weight, self.mu, self.sigma, cap_tokens)

    def icc(self) -> float:
        """Intra-prompt correlation of the log of the uncapped length, closed form."""
        centre = self.mu - self.weight @ self.mu
        total = float(self.weight @ (centre**2 + self.sigma**2))
        joint = joint_weights(self.weight, self.runaway_share)
        spread = self.sigma * np.sqrt(self.share)
        shared = float(centre @ joint @ centre + spread @ joint @ spread)
        return shared / total

    def with_icc(self, icc: float) -> LengthModel:
        """The same distribution with all shares set to the one value that gives this intra-prompt correlation."""
        from scipy.optimize import brentq

        def at(share: float) -> LengthModel:
            return self.with_shares([share] * len(self.components), share)

        highest = at(0.999)
        if icc <= 0:
            return at(0.0)
        if highest.icc() <= icc:
            return highest
        return at(round(float(brentq(lambda s: at(s).icc() - icc, 0.0, 0.999, xtol=1e-9)), 5))

    def draw(self, prompts: int, responses: int, epochs: int, rng: np.random.Generator) -> Floats:
        """Uncapped lengths of shape (epochs, prompts, responses), tokens.

        Stratified: within an epoch the lengths are exactly the (i − ½)/n quantiles of the distribution, and only who
        gets which is drawn, by the rank of a plain draw from the model. A prompt keeps its u and a over the epochs.
        """
        u, a = rng.standard_normal((2, prompts, 1))
        e, b = rng.standard_normal((2, epochs, prompts, responses))
        r = self.runaway_share
        k = np.searchsorted(_thresholds(self.weight), math.sqrt(r) * a + math.sqrt(1 - r) * b)
        s = self.share[k]
        log = self.mu[k] + self.sigma[k] * (np.sqrt(s) * u + np.sqrt(1 - s) * e)
        n = prompts * responses
        strata = self.quantile((np.arange(n) + 0.5) / n)
        flat = log.reshape(epochs, n)
        out = np.empty_like(flat)
        np.put_along_axis(out, np.argsort(flat, axis=1, kind="stable"), np.broadcast_to(strata, (epochs, n)), axis=1)
        return np.asarray(out.reshape(epochs, prompts, responses))


def mixture_cdf(weight: Floats, mu: Floats, sigma: Floats, tokens: npt.ArrayLike) -> Floats:
    """P(L ≤ tokens) of the mixture with these weights and means and standard deviations of log length."""
    from scipy.special import ndtr

    log = np.log(np.maximum(np.asarray(tokens, np.float64), 1e-300))
    return np.asarray(ndtr((log[..., None] - mu) / sigma) @ weight)


def mixture_mean(weight: Floats, mu: Floats, sigma: Floats, cap_tokens: float = math.inf) -> float:
    """Mean of min(L, cap) (tokens) of the mixture with these weights, means and standard deviations of log length."""
    from scipy.special import ndtr

    whole = np.exp(mu + sigma * sigma / 2)
    if math.isinf(cap_tokens):
        return float(weight @ whole)
    z = (math.log(cap_tokens) - mu) / sigma
    return float(weight @ (whole * ndtr(z - sigma) + cap_tokens * ndtr(-z)))


def mixture(weight: Numbers, mu: Numbers, sigma: Numbers) -> LengthModel:
    """A mixture from plain numbers (mu = log of the median in tokens), shortest component first.

    Rounded to six digits: enough for any fact, and short of what differs between versions of a solver.
    """
    order = np.argsort(mu)
    rounded = [round(float(weight[i]), 6) for i in order]
    rounded[-1] = round(1.0 - sum(rounded[:-1]), 6)
    parts = [
        Component(weight=w, median_tokens=float(f"{math.exp(mu[i]):.6g}"), sigma=float(f"{sigma[i]:.6g}"))
        for w, i in zip(rounded, order, strict=True)
    ]
    return LengthModel(components=tuple(parts))


def joint_weights(weight: Floats, share: float) -> Floats:
    """K × K: P(one sample of a prompt in component k, another in m), when membership is `share` the prompt's."""
    edges = np.concatenate([[-np.inf], _thresholds(weight), [np.inf]])
    corner = np.array([[both_below(x, y, share) for y in edges] for x in edges])
    return np.asarray(np.diff(np.diff(corner, axis=0), axis=1))


def _thresholds(weight: Floats) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(np.minimum(np.cumsum(weight)[:-1], 1 - 1e-12)))


def both_below(x: float, y: float, correlation: float) -> float:
    """P(X ≤ x, Y ≤ y) of two standard normals, by Gauss–Legendre over the correlation (Plackett's identity)."""
    from scipy.special import ndtr

    if np.isinf(x) or np.isinf(y):
        return 0.0 if min(x, y) == -np.inf else float(ndtr(min(x, y)))
    node, w = _NODES
    angle = math.asin(correlation) * (node + 1) / 2
    inner = np.exp(-(x * x + y * y - 2 * x * y * np.sin(angle)) / (2 * np.cos(angle) ** 2))
    return float(ndtr(x) * ndtr(y) + math.asin(correlation) / 2 * (w @ inner) / (2 * math.pi))


def _within_between(tokens: npt.ArrayLike, codes: npt.NDArray[np.int64]) -> tuple[float, float, float] | None:
    """(mean square between prompts, mean square within, n0) of log length; None without repeated prompts."""
    log = np.log(np.asarray(tokens, np.float64))
    size = np.bincount(codes)
    prompts, n = len(size), len(log)
    if prompts < 2 or n <= prompts:
        return None
    mean = np.bincount(codes, weights=log) / size
    between = float(size @ (mean - log.mean()) ** 2) / (prompts - 1)
    within = float(((log - mean[codes]) ** 2).sum()) / (n - prompts)
    n0 = (n - float(size @ size) / n) / (prompts - 1)
    return between, within, n0


def icc_log(tokens: npt.ArrayLike, codes: npt.NDArray[np.int64]) -> float | None:
    """Intra-prompt correlation of log length: the one-way ANOVA estimator for unequal groups (Donner, 1986).

    `codes` numbers the prompt of every response from 0. None if no prompt has two samples or all lengths are equal.
    """
    squares = _within_between(tokens, codes)
    if squares is None:
        return None
    between, within, n0 = squares
    total = between + (n0 - 1) * within
    return (between - within) / total if total > 0 else None


def within_sd_log(tokens: npt.ArrayLike, codes: npt.NDArray[np.int64]) -> float | None:
    """Pooled standard deviation of log length within a prompt; None if no prompt has two samples."""
    squares = _within_between(tokens, codes)
    return None if squares is None else float(np.sqrt(squares[1]))


def straggling_groups(tokens: npt.NDArray[np.int64], codes: npt.NDArray[np.int64], limit: int) -> tuple[float, float]:
    """Share of prompts with a response of `limit` tokens or more: as it is, and with responses dealt out at random."""
    size = np.bincount(codes)
    long = np.bincount(codes, weights=tokens >= limit)
    return float((long > 0).mean()), float((1 - (1 - (tokens >= limit).mean()) ** size).mean())

"""Published facts about a length distribution: a mixture that meets them, and the check that a trace does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.errors import TraceError
from rlsim.trace.mixture import Floats, LengthModel, mixture, mixture_cdf, mixture_mean
from rlsim.units import Tokens


@dataclass(frozen=True)
class FactCheck:
    """One fact beside what the trace says; `tolerance` in the unit of `wanted` and `got`."""

    fact: str
    wanted: float
    got: float
    tolerance: float
    source: str = ""

    @property
    def ok(self) -> bool:
        return abs(self.got - self.wanted) <= self.tolerance


class Fact(Schema):
    """One published statement about the lengths of the first epoch. Exactly one of these forms:

    - `above` and `share`: this share of the responses is longer than so many tokens;
    - `quantile` and `tokens`: this share of the responses is no longer than so many tokens;
    - `at_cap`: this share of the responses reaches the recipe's cap;
    - `mean`: mean length (tokens), with lengths cut at the cap `under` if given.
    """

    above: Tokens | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0, lt=1)
    quantile: float | None = Field(default=None, gt=0, lt=1)
    tokens: Tokens | None = Field(default=None, ge=1)
    at_cap: float | None = Field(default=None, gt=0, lt=1)
    mean: float | None = Field(default=None, gt=0)
    under: Tokens | None = Field(default=None, ge=1)
    tolerance: float | None = Field(default=None, gt=0)
    source: str = ""

    @property
    def allowed(self) -> float:
        """The tolerance, by default 0.001 of a share and 1% of a length."""
        return self.tolerance or (0.001 if self.share or self.at_cap else 0.01)

    def check(self, tokens: npt.NDArray[np.int64], cap_tokens: int) -> FactCheck:
        if self.above and self.share:
            fact, wanted, got = f"share above {self.above} tokens", self.share, (tokens > self.above).mean()
        elif self.at_cap:
            fact, wanted, got = f"share at the cap of {cap_tokens} tokens", self.at_cap, (tokens >= cap_tokens).mean()
        elif self.quantile and self.tokens:
            fact = f"P{100 * self.quantile:g} length (tokens)"
            wanted, got = float(self.tokens), np.quantile(tokens, self.quantile)
        else:
            fact = f"mean length{f' under a cap of {self.under}' if self.under else ''} (tokens)"
            wanted, got = self.mean or 0.0, np.minimum(tokens, self.under or cap_tokens).mean()
        allowed = self.allowed if self.share or self.at_cap else self.allowed * wanted
        return FactCheck(fact, wanted, float(got), allowed, self.source)

    def point(self, cap_tokens: int) -> tuple[float, float, float, bool] | None:
        """(length, share longer than it, tolerances per standard deviation, of log length?), or None for a mean."""
        if self.quantile and self.tokens:
            return float(self.tokens), 1 - self.quantile, 1 / self.allowed, True
        share = self.share or self.at_cap
        if share is None:
            return None
        length = self.above + 0.5 if self.above else cap_tokens - 0.5
        density = NormalDist().pdf(NormalDist().inv_cdf(share))
        return length, share, density / self.allowed, False


def model_from_facts(
    facts: Sequence[Fact], cap_tokens: int, components: int | None = None, where: str = "recipe"
) -> LengthModel:
    """The distribution that meets `facts`: a mixture of `components` lognormals (default: 1 up to two facts, else 2).

    One fact alone takes a log sd of 0.8. Fewer facts than parameters (2, 5, 8 for 1, 2, 3 components) leave the mixture
    undetermined; the one nearest to a plain body with a tail is taken. More are met as well as such a mixture can.
    Raises `TraceError` if the facts contradict each other.
    """
    from scipy.optimize import least_squares
    from scipy.special import ndtri

    points = sorted(p for f in facts if (p := f.point(cap_tokens)))
    for (length, share, *_), (longer, smaller, *_) in itertools.pairwise(points):
        if smaller >= share or longer == length:
            raise TraceError(
                f"{where}: facts contradict each other: {share:.2%} above {length:.0f} tokens, "
                f"but {smaller:.2%} above {longer:.0f}"
            )
    k = components or (1 if len(facts) <= 2 else 2)
    lengths, shares = np.array([point[:2] for point in points]).reshape(-1, 2).T
    centre, spread = _first_guess(facts, lengths, shares)
    prior = _prior(centre, spread, k)
    strength = 1e-3 if k > 1 or len(facts) < 2 else 0.0
    scale = np.array([point[2] for point in points]) * np.where(np.array([point[3] for point in points]), spread, 1.0)

    def residuals(theta: Floats) -> Floats:
        parts = _read(theta, k)
        off = (ndtri(1 - mixture_cdf(*parts, lengths)) - ndtri(shares)) * scale
        means = [math.log(mixture_mean(*parts, f.under or cap_tokens) / f.mean) / f.allowed for f in facts if f.mean]
        return np.concatenate([off, means, strength * (theta - prior)])

    tries = [prior, prior + 0.3, prior - 0.3, _prior(centre, 1.5 * spread, k), _prior(centre - 0.5, spread, k)]
    if k == 3:  # a short part of its own, far below the body
        tries.append(prior + np.array([0, 0, 1.2, 0, 0, -0.5, 0, -0.5]))
    runs: list[Any] = [least_squares(residuals, t, xtol=1e-13, ftol=1e-13, gtol=1e-13) for t in tries]
    return mixture(*_read(min(runs, key=lambda run: float(run.cost)).x, k))


def _first_guess(facts: Sequence[Fact], lengths: Floats, shares: Floats) -> tuple[float, float]:
    """Centre and spread of log length: the straight line through the facts on lognormal paper."""
    from scipy.special import ndtri

    if len(lengths) >= 2:
        slope, centre = np.polyfit(ndtri(1 - shares), np.log(lengths), 1)
        return float(centre), float(max(slope, 0.1))
    spread = 0.8
    if len(lengths) == 1:
        return float(np.log(lengths[0]) - spread * ndtri(1 - shares[0])), spread
    return math.log(next(f.mean for f in facts if f.mean)) - spread**2 / 2, spread


def _prior(centre: float, spread: float, k: int) -> Floats:
    """Where the solver starts: a body, then a tail above it, then a short part below it (as many as `k` asks for)."""
    if k == 1:
        return np.array([centre, math.log(spread)])
    gaps = np.log([1.5, 1.0])[: k - 1]
    sigmas = np.log(np.array([0.8, 0.8, 1.0])[:k] * spread)
    return np.concatenate([[centre - 0.2], gaps, sigmas, np.array([-2.0, -2.0])[: k - 1]])


def _read(theta: Floats, k: int) -> tuple[Floats, Floats, Floats]:
    """(weights, mus, sigmas) of body, tail and short part; each part weighs at most as much as the body."""
    gap = np.exp(np.clip(theta[1:k], -4, 2)) * np.array([1, -1])[: k - 1]
    mu = theta[0] + np.concatenate([[0.0], gap])
    part = np.concatenate([[1.0], np.exp(np.clip(theta[2 * k :], -9, 0))])
    return part / part.sum(), mu, np.exp(np.clip(theta[k : 2 * k], -2.5, 0.75))

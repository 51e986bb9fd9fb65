"""How much faster one run is than another, with a 95% interval."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from rlsim.comparison.runs import Run
from rlsim.experiment.summary import CONFIDENCE, paired_ratio


class Speedup(NamedTuple):
    """Own rate / the baseline's, geometric mean over seeds, with its interval (missing with one seed).

    There is none of generation where a workflow generates nothing.
    """

    ratio: float
    low: float
    high: float


NONE = Speedup(float("nan"), float("nan"), float("nan"))


def why_unpaired(run: Run, baseline: Run) -> str:
    """Why two runs cannot be paired seed by seed; empty if they can: they saw the same responses."""
    own, theirs = run.workload, baseline.workload
    for key, value in own.items():
        if value != theirs.get(key):
            if key == "trace":
                return "the traces differ"
            return f"{key} is {value} against {theirs.get(key)}"
    if not set(run.by_seed.index) & set(baseline.by_seed.index):
        return "they have no seed in common"
    both = pd.concat([run.plain_tokens, baseline.plain_tokens], axis=1, join="inner", keys=["own", "theirs"]).dropna()
    unlike = both[both["own"] != both["theirs"]]
    if len(unlike):
        seed, step = unlike.index[0]
        own_tokens, their_tokens = (f"{int(value):,}" for value in unlike.iloc[0])
        return f"the responses differ (seed {seed}, step {step}: {own_tokens} tokens against {their_tokens})"
    return ""


def paired(run: Run, baseline: Run, rate: str) -> Speedup:
    """Over the seeds that both have: Student's t on the logarithms of the ratios, as `Result.summary` does."""
    return Speedup(*paired_ratio(run.by_seed[rate], baseline.by_seed[rate]))


def unpaired(run: Run, baseline: Run, rate: str) -> Speedup:
    """Of two independent samples: Welch's t on the logarithms of the seeds' means.

    Welch, Biometrika 34 (1947) 28, with the degrees of freedom that he and Satterthwaite (Biometrics 2 (1946) 110)
    give.
    """
    rates = [one.by_seed[rate].to_numpy() for one in (run, baseline)]
    if not all((values > 0).all() for values in rates):
        return NONE
    own, theirs = map(np.log, rates)
    centre = float(own.mean() - theirs.mean())
    if min(len(own), len(theirs)) < 2:
        return Speedup(float(np.exp(centre)), float("nan"), float("nan"))
    shares = [float(np.var(logs, ddof=1) / len(logs)) for logs in (own, theirs)]
    spread = sum(shares)
    if not spread:
        return Speedup(*(float(np.exp(centre)),) * 3)
    from scipy.special import stdtrit

    freedom = spread**2 / sum(share**2 / (len(logs) - 1) for share, logs in zip(shares, (own, theirs), strict=True))
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * spread**0.5
    return Speedup(*(float(np.exp(centre + side)) for side in (0, -half, half)))

"""Plain statistics of grouped lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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

"""What every fit shares: held-out rows, robust losses, residuals, and rounding to what the data tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.cost.calibration import (
    DecodeAttentionFit,
    GemmFit,
    MemoryOpFit,
    OperatorFits,
    PrefillAttentionFit,
    Reference,
    Residual,
)
from rlsim.cost.operators import Operators
from rlsim.schema import validate

Array = NDArray[np.float64]
Fit = TypeVar("Fit", GemmFit, DecodeAttentionFit, PrefillAttentionFit, MemoryOpFit)


HELD_OUT = 0.25  # share of the distinct shapes that no fit sees


@dataclass
class Fitted(Generic[Fit]):
    """A fit, its residual on held-out rows, and how it compares with rows measured with operands in L2 and with long
    prompts."""

    fit: Fit
    residual: Residual
    hot: Residual | None = None
    long: Residual | None = None


@dataclass(frozen=True)
class CollectiveTable:
    """One collective on some GPUs: message bytes and seconds."""

    op: str
    gpus: int
    table: pd.DataFrame


def held_out(keys: pd.Series) -> NDArray[np.bool_]:
    """True for the rows of a fixed random quarter of the distinct keys."""
    distinct = np.unique(keys.to_numpy())
    rng = np.random.default_rng(20)
    chosen = set(rng.choice(distinct, max(1, int(len(distinct) * HELD_OUT)), replace=False).tolist())
    return np.asarray(keys.isin(chosen).to_numpy(), dtype=bool)


def robust(error: Array) -> float:
    """Mean soft-L1 loss of log errors, scale 0.1."""
    return float(np.mean(2.0 * (np.sqrt(1.0 + (error / 0.1) ** 2) - 1.0)))


def descend(loss: Callable[[Array], float], start: Array, rounds: int = 40) -> tuple[Array, float]:
    """Coordinate descent with growing and shrinking steps: for losses with the jumps of whole waves."""
    point, best = start.copy(), loss(start)
    step = np.full(len(start), 0.4)
    for _ in range(rounds):
        for i in range(len(start)):
            moved = False
            for sign in (1.0, -1.0):
                while True:
                    trial = point.copy()
                    trial[i] += sign * step[i]
                    value = loss(trial)
                    if value >= best - 1e-6:
                        break
                    point, best, moved = trial, value, True
                if moved:
                    break
            step[i] *= 1.2 if moved else 0.5
    return point, best


def squash(x: Array) -> Array:
    """Any number to (0, 1)."""
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def unsquash(y: float) -> float:
    """The inverse of `squash`."""
    return math.log(y / (1.0 - y))


def residual(
    predicted: Iterable[float], measured: Iterable[float], ranges: dict[str, Array], note: str = ""
) -> Residual:
    """Error statistics of a prediction and the ranges it was measured over."""
    ratio = np.fromiter(predicted, float) / np.fromiter(measured, float) - 1.0
    return Residual(
        count=len(ratio),
        median=float(np.median(np.abs(ratio))),
        p90=float(np.quantile(np.abs(ratio), 0.9)),
        bias=float(np.median(ratio)),
        ranges={name: (float(np.min(values)), float(np.max(values))) for name, values in ranges.items()},
        note=note,
    )


def rounded(value: Any) -> Any:
    """Floats to four significant digits, everywhere in a nested record."""
    if isinstance(value, float):
        if not math.isfinite(value) or value == round(value):
            return value if abs(value) < 1e4 or not math.isfinite(value) else int(value)
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def percent(value: float) -> str:
    """A share as text."""
    return f"{100 * value:.1f}%"


_NEUTRAL = {
    "gemm": {
        "launch_s": 0.0,
        "memory_efficiency": 1.0,
        "k_overhead": 0.0,
        "split_s": 0.0,
        "blend": 2.0,
        "wave_rounding": 1.0,
        "tiles": [{"m": 128, "n": 128, "efficiency": 1.0}],
        "splits": [1],
    },
    "decode_attention": {
        "floor_s": 0.0,
        "floor_tile_s": 0.0,
        "floor_sequence_s": 0.0,
        "stream_s": 0.0,
        "stream_tile_s": 0.0,
        "stream_sequence_s": 0.0,
        "parallelism": [0.0],
        "efficiency": [1.0],
        "skew": 0.0,
    },
    "prefill_attention": {
        "launch_s": 0.0,
        "block_tokens": 128,
        "overhead_tokens": 0.0,
        "blend": 2.0,
        "keys": [1.0],
        "efficiency": [1.0],
        "single_efficiency": 1.0,
        "memory_efficiency": 1.0,
    },
    "memory_bound": {"launch_s": 0.0, "efficiency": 1.0},
}


def operators_with(
    ref: Reference,
    gemm: GemmFit | None = None,
    decode: DecodeAttentionFit | None = None,
    prefill: PrefillAttentionFit | None = None,
    memory: MemoryOpFit | None = None,
) -> Operators:
    """Operators in which only the given fit matters: residuals are computed by the code that the simulator runs."""
    fits = validate(_NEUTRAL, OperatorFits)
    parts = {"gemm": gemm, "decode_attention": decode, "prefill_attention": prefill, "memory_bound": memory}
    return Operators(fits.model_copy(update={name: part for name, part in parts.items() if part is not None}), ref)

"""One row per system: what a reader wants to know first, with intervals over paired seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

CONFIDENCE = 0.95


def summarise(result: Result) -> pd.DataFrame:
    """Means over steps and seeds, and the speedup of the step over the baseline.

    Columns: case, system, step_time_s, gen_time_s, gen_p90_time_s, prep_time_s, train_time_s, sync_time_s, speedup,
    speedup_low, speedup_high, gen_speedup, tokens_per_s (trained on), bubble_fraction, wasted_fraction (share of the
    generated tokens not trained on), switches and switch_time_s (per step), bound_share (lower bound / generation
    time); step_time_s_half and gen_time_s_half are half the width of the 95% interval of these means over seeds.
    `speedup` is the geometric mean over seeds of baseline time / system time on
    the same responses; its 95% interval is Student's t on the logarithms, missing with one seed; all are missing where
    the baseline did not run.
    """
    times = ["step_time_s", "gen_time_s", "gen_p90_time_s", "prep_time_s", "train_time_s", "sync_time_s"]
    rows = []
    steps = result.steps
    baseline = result.manifest["baseline"]
    order = [(case, name) for case, names in result.manifest["systems"].items() for name in names]
    by_seed = steps.groupby(["case", "system", "seed"])[["step_time_s", "gen_time_s"]].mean()
    for case, system in order:
        mine = steps[(steps["case"] == case) & (steps["system"] == system)]
        if mine.empty:
            continue
        row: dict[str, object] = {"case": case, "system": system}
        row |= {column: float(mine[column].mean()) for column in times}
        for column in ("step_time_s", "gen_time_s"):
            row[f"{column}_half"] = half_interval(mine.groupby("seed")[column].mean().tolist())
        step = gen = (float("nan"),) * 3
        if baseline in result.manifest["systems"][case]:
            reference, own = by_seed.loc[(case, baseline)], by_seed.loc[(case, system)]
            ratios = reference / own.reindex(reference.index)
            step, gen = (mean_ratio(ratios[c].dropna().tolist()) for c in ("step_time_s", "gen_time_s"))
        row["speedup"], row["speedup_low"], row["speedup_high"] = step
        row["gen_speedup"] = gen[0]
        row["tokens_per_s"] = float(mine["tokens"].sum() / mine["step_time_s"].sum())
        row["bubble_fraction"] = float(
            (mine["bubble_fraction"] * mine["step_time_s"]).sum() / mine["step_time_s"].sum()
        )
        row["wasted_fraction"] = float(mine["wasted_tokens"].sum() / max(mine["response_tokens"].sum(), 1))
        row["switches"] = float(mine["switches"].mean())
        row["switch_time_s"] = float(mine["switch_time_s"].mean())
        gen_time_s = float(mine["gen_time_s"].sum())
        row["bound_share"] = float(mine["gen_bound_s"].sum()) / gen_time_s if gen_time_s else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def half_interval(values: Sequence[float]) -> float:
    """Half the width of Student's 95% interval of the mean; NaN with a single value."""
    if len(values) < 2:
        return float("nan")
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    return float(quantile * np.std(values, ddof=1) / np.sqrt(len(values)))


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its interval (NaN with a single value; all NaN without any)."""
    if not ratios:
        return (float("nan"),) * 3
    logs = np.log(ratios)
    centre, half = float(logs.mean()), half_interval(logs.tolist())
    return float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half))

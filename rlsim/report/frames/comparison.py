"""Speedups seed by seed, the parts of a step, and where the GPU-seconds went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlsim.experiment.frames import uncovered
from rlsim.report.palette import BUBBLE, PARTS
from rlsim.sim.recorder import Span

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

RUN = ["case", "system", "seed"]
_WAITING = 1e-6  # of a step: less is rounding


def verdict(speedup: float, low: float, high: float) -> str:
    """`faster` or `slower` than the baseline, `not told apart` where the interval includes 1, `equal` in every seed.

    Without an interval (one seed) the speedup alone decides; `no speedup` where there is none.
    """
    if pd.isna(speedup):
        return "no speedup"
    low, high = (speedup, speedup) if pd.isna(low) else (low, high)
    if low == high == 1:
        return "equal"
    return "faster" if low > 1 else "slower" if high < 1 else "not told apart"


def speedups(summary: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row per system of one case's summary: system, speedup, low, high (NaN with one seed), verdict."""
    rows = summary[["system", "speedup", "speedup_low", "speedup_high"]]
    rows = rows.rename(columns={"speedup_low": "low", "speedup_high": "high"}).dropna(subset=["speedup"])
    told = [
        "baseline" if row["system"] == baseline else verdict(row["speedup"], row["low"], row["high"])
        for row in rows.to_dict("records")
    ]
    return rows.assign(verdict=told)


def seed_speedups(result: Result, case: str) -> pd.DataFrame:
    """One row per system and seed of a case: system, seed, speedup (mean step time of baseline / system)."""
    steps = result.steps[result.steps["case"] == case]
    times = steps.groupby(["system", "seed"], sort=False)["step_time_s"].mean()
    baseline = result.manifest["baseline"]
    if baseline not in times.index.get_level_values("system"):
        return pd.DataFrame({"system": [], "seed": [], "speedup": []})
    frame = times.reset_index()
    return frame.assign(speedup=frame["seed"].map(times.loc[baseline]) / frame["step_time_s"])[
        ["system", "seed", "speedup"]
    ]


def step_parts(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per system and part of a step, in seconds: system, part, time_s. The parts add up to the step time.

    `waiting` is the time in which no call of the step ran; the part is there only where there is such time.
    """
    columns = dict(zip(PARTS, ("gen_time_s", "prep_time_s", "train_time_s", "sync_time_s"), strict=False))
    rows = []
    for row in summary.to_dict("records"):
        times = {part: float(row[column]) for part, column in columns.items()}
        left = float(row["step_time_s"]) - sum(times.values())
        if left > _WAITING * float(row["step_time_s"]):
            times["waiting"] = left
        rows += [{"system": row["system"], "part": part, "time_s": time} for part, time in times.items()]
    return pd.DataFrame(rows)


def gpu_shares(result: Result, gpus: Mapping[str, int]) -> pd.DataFrame:
    """One row per case, system and kind of work, the bubble among them: case, system, kind, share (of GPU-seconds).

    `gpus` is the number of GPUs by case. The shares of a system add up to 1 over all seeds and steps; time on shared
    GPUs counts only where they do nothing else, as in `bubble_fraction`.
    """
    ran = result.steps.groupby(RUN, sort=False, as_index=False)["step_time_s"].sum()
    spans = exclusive(result.spans).merge(ran, on=RUN)
    held_s = (spans["end_at"].clip(upper=spans["step_time_s"]) - spans["start_at"]).clip(lower=0)
    kinds = spans.assign(gpu_s=held_s * spans["gpus"]).groupby(["case", "system", "kind"], sort=False, as_index=False)
    busy = kinds["gpu_s"].sum()
    total = ran.groupby(["case", "system"], sort=False, as_index=False)["step_time_s"].sum()
    rows = []
    for run in total.to_dict("records"):
        mine = busy[(busy["case"] == run["case"]) & (busy["system"] == run["system"])]
        shares = dict(zip(mine["kind"], mine["gpu_s"] / (gpus[run["case"]] * run["step_time_s"]), strict=True))
        shares[BUBBLE] = max(1.0 - sum(shares.values()), 0.0)
        rows += [{"case": run["case"], "system": run["system"], "kind": k, "share": v} for k, v in shares.items()]
    return pd.DataFrame(rows)


def exclusive(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans, those on shared GPUs cut down to the time in which their GPUs did nothing else."""
    beside = spans[spans["shared"]]
    if beside.empty:
        return spans
    runs = beside[RUN].drop_duplicates()
    mixed = spans.merge(runs, on=RUN)
    others = spans.merge(runs, on=RUN, how="left", indicator=True).query("_merge == 'left_only'")
    pieces = [others.drop(columns="_merge")]
    for run, rows in mixed.groupby(RUN, sort=False):
        cut = uncovered([_span(row) for row in rows.itertuples(index=False)])
        pieces.append(pd.DataFrame([dict(zip(RUN, run, strict=True)) | _row(span) for span in cut]))
    return pd.concat(pieces, ignore_index=True)


def _span(row: Any) -> Span:
    held = tuple(range(row.gpu, row.gpu + row.gpus))
    return Span(held, row.start_at, row.end_at, row.kind, row.tp, row.step, row.label, row.shared)


def _row(span: Span) -> dict[str, object]:
    return {**span._asdict(), "gpu": span.gpus[0], "gpus": len(span.gpus)}

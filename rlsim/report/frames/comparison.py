"""Speedups seed by seed, what a batch takes part by part, and where the GPU-seconds went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlsim.experiment.backlog import comparable
from rlsim.experiment.frames import PARTS_OF_A_STEP, uncovered
from rlsim.experiment.summary import means
from rlsim.report.palette import BUBBLE, PARTS, TAIL, WAITING
from rlsim.sim.recorder import Span

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

RUN = ["case", "system", "seed"]
_PART_COLUMNS = (*PARTS_OF_A_STEP, "waiting_time_s")  # of the summary, in the order of `PARTS`
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


def verdicts(summary: pd.DataFrame, baseline: str) -> dict[str, str]:
    """The `verdict` on each system of one case's summary.

    It is `not comparable yet` where the system or the baseline put off, or came back to, too many prompts.
    """
    late = set(summary["system"][~comparable(summary["held_back"])])
    found = {baseline: "baseline"}
    for row in summary.to_dict("records"):
        told = verdict(row["speedup"], row["speedup_low"], row["speedup_high"])
        found.setdefault(row["system"], "not comparable yet" if {row["system"], baseline} & late else told)
    return found


def speedups(summary: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row per system of one case's summary: system, speedup, low, high (NaN with one seed), verdict."""
    rows = summary[["system", "speedup", "speedup_low", "speedup_high"]]
    rows = rows.rename(columns={"speedup_low": "low", "speedup_high": "high"}).dropna(subset=["speedup"])
    return rows.assign(verdict=rows["system"].map(verdicts(summary, baseline)))


def seed_speedups(result: Result, case: str) -> pd.DataFrame:
    """One row per system and seed of a case: system, seed, speedup (trained responses per second over baseline's)."""
    rates = means(result.steps[result.steps["case"] == case], ["system", "seed"])["responses_per_s"]
    baseline = result.manifest["baseline"]
    if baseline not in rates.index.get_level_values("system"):
        return pd.DataFrame({"system": [], "seed": [], "speedup": []})
    frame = rates.reset_index()
    speedup = frame["responses_per_s"] / frame["seed"].map(rates.loc[baseline])
    return frame.assign(speedup=speedup)[["system", "seed", "speedup"]]


def batch_parts(summary: pd.DataFrame, batch: int) -> pd.DataFrame:
    """One row per system and part of its time, in seconds: system, part, time_s.

    The parts add up to the time in which a system trains on `batch` responses: the mean step time, if that is what a
    step trains on. `waiting` is the time in which no call of any step ran; the part is there only where there is any.
    """
    rows = []
    for row in summary.to_dict("records"):
        scale = batch / row["trained"]
        times = {part: scale * float(row[column]) for part, column in zip(PARTS, _PART_COLUMNS, strict=True)}
        if row["waiting_time_s"] <= _WAITING * row["step_time_s"]:
            del times[WAITING]
        rows += [{"system": row["system"], "part": part, "time_s": time} for part, time in times.items()]
    return pd.DataFrame(rows)


def gpu_shares(result: Result, gpus: Mapping[str, int]) -> pd.DataFrame:
    """One row per case, system and kind of work, the bubble among them: case, system, kind, share (of GPU-seconds).

    `gpus` is the number of GPUs by case. The shares of a system add up to 1 over the steady steps of all seeds; time on
    shared GPUs counts only where they do nothing else, as in `bubble_fraction`. Decoding in the tail is a kind of its
    own.
    """
    steps = result.steps.assign(end_at=result.steps.groupby(RUN)["step_time_s"].cumsum())
    steps = steps.assign(start_at=steps["end_at"] - steps["step_time_s"])[steps["steady"]]
    window = steps.groupby(RUN, sort=False, as_index=False).agg(first_at=("start_at", "min"), last_at=("end_at", "max"))
    spans = exclusive(result.spans).merge(window, on=RUN)
    held_s = (spans[["end_at", "last_at"]].min(axis=1) - spans[["start_at", "first_at"]].max(axis=1)).clip(lower=0)
    kinds = spans.assign(gpu_s=held_s * spans["gpus"]).groupby(["case", "system", "kind"], sort=False, as_index=False)
    busy = kinds["gpu_s"].sum()
    found = means(steps, ["case", "system"])[["bubble_fraction", "tail_fraction"]]
    found["time_s"] = steps.groupby(["case", "system"], sort=False)["step_time_s"].sum()
    rows = []
    for case, system, bubble, tail, time_s in found.reset_index().itertuples(index=False):
        mine = busy[(busy["case"] == case) & (busy["system"] == system)]
        shares = dict(zip(mine["kind"], mine["gpu_s"] / (gpus[case] * time_s), strict=True))
        if tail:
            shares[TAIL] = tail * (1.0 - bubble)
            shares["decode"] = max(shares["decode"] - shares[TAIL], 0.0)
        shares[BUBBLE] = max(1.0 - sum(shares.values()), 0.0)
        rows += [{"case": case, "system": system, "kind": kind, "share": value} for kind, value in shares.items()]
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

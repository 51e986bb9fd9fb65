"""What happened in one run, as the rows of the result tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from rlsim.cost.bound import GenerationBound
from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.columns import CALL_PARTS, TABLES, computed, to_arrow, to_pandas
from rlsim.experiment.parts import ROUNDING, Floats, Stretches, floats, parts_of_steps, tail_stretches
from rlsim.experiment.steadiness import Flow, Window
from rlsim.experiment.summary import percentile_of_counts
from rlsim.sim.outcome import CallRecord, Outcome, Responses
from rlsim.sim.recorder import NO_STEP, Span, Stays
from rlsim.sim.request import AGENT
from rlsim.trace import StepSampler

Frames = dict[str, pd.DataFrame]

#: Tables whose times are all known when a run ends; those of a response that was aborted are not.
_COMPLETE = ("steps", "calls", "spans")


def frames_of(
    outcome: Outcome,
    sampler: StepSampler,
    bound: GenerationBound | None,
    gpus: int,
    window: Window,
    generates: Set[int],
    trains: Set[int],
) -> Frames:
    """The tables of one run on `gpus` GPUs, without the columns that name the run; means count steps of `window`.

    Without a `bound` that of generation is 0. `generates` and `trains` are the GPUs of the calls of these kinds; where
    there is no such call all but a judge's own.
    """
    frames = {
        "responses": _responses(outcome, sampler),
        "stays": stays_frame(outcome.stays, outcome.responses),
        "calls": _calls(outcome),
        "switches": pd.DataFrame(
            [(*when, *astuple(cost)) for *when, cost in outcome.switches], columns=_own_columns("switches")
        ),
        "spans": _spans(outcome),
    }
    edges = np.array([0.0, *outcome.step_ends])
    busy_s = gpu_seconds([(s.start_at, s.end_at, len(s.gpus)) for s in uncovered(outcome.spans)], edges)
    tail = tail_stretches(frames["stays"], frames["spans"], frames["calls"])
    share = tail["gpus"] * tail["tail_s"] / (tail["end_at"] - tail["start_at"])
    tail_s = gpu_seconds(np.stack([tail["start_at"], tail["end_at"], share], axis=1), edges)
    rows = _steps(outcome, bound)
    durations_s = np.diff(edges)
    flow = Flow.of(outcome, sampler)
    block = window.blocks([row["round"] for row in rows], flow.fill)
    block[[row["longest_tokens"] < window.least_tokens for row in rows]] = -1
    columns: dict[str, Any] = {
        "steady": block >= 0,
        "block": block,
        "filled": [step >= flow.fill for step in range(len(rows))],
        "outstanding_tokens": flow.outstanding.astype(np.int64),
        "dropped_tokens": flow.dropped.astype(np.int64),
        "bubble_fraction": np.maximum(1.0 - busy_s / (gpus * durations_s), 0.0),
        "tail_fraction": np.divide(tail_s, busy_s, out=np.zeros(len(rows)), where=busy_s > 0),
        **parts_of_steps(outcome, trains, edges),
    }
    for name, own in {"rollout_idle": generates, "trainer_idle": trains}.items():
        busy = ((span.start_at, span.end_at) for span in outcome.spans if not own.isdisjoint(span.gpus))
        idle = np.maximum(1.0 - Stretches.merged(busy).within(edges) / durations_s, 0.0)
        columns[name] = idle if generates.isdisjoint(trains) else np.nan
    return {"steps": pd.DataFrame(rows).assign(step_time_s=durations_s, **columns), **frames}


def named(frames: Frames, case: str, system: str, seed: int) -> Frames:
    """The tables of a run with the columns that name it."""
    return {table: frame.assign(case=case, system=system, seed=seed) for table, frame in frames.items()}


def joined(runs: Sequence[Frames]) -> Frames:
    """The tables of all these runs, which are named, with the columns of `TABLES` in their order and types."""
    found = {}
    for table, columns in TABLES.items():
        rows = pd.concat([run[table] for run in runs], ignore_index=True)
        if unknown := {*rows.columns} - {column.name for column in columns}:
            raise ValueError(f"{table}: no column says what {', '.join(sorted(unknown))} is")
        found[table] = to_pandas(to_arrow(rows, columns))
    return found


def check_steps(frames: Frames, label: str) -> None:
    """Raises `ConfigError` that begins with `label` if a time of a run is NaN, infinite or negative.

    `PolicyError` for a step that trains on nothing: no throughput or ratio of such a run means anything.
    """
    nothing = frames["steps"]["trained"].to_numpy() == 0
    if nothing.any():
        dropped = " or did environment.on_failure drop all of them?" if frames["responses"]["tool_s"].any() else ""
        why = f"was generation stopped too early{',' if dropped else '?'}{dropped}"
        raise PolicyError(f"{label}: step {nothing.argmax()} trains on no response: {why}")
    end_s = float(frames["steps"]["step_time_s"].sum())
    for table in _COMPLETE:
        for name in (column.name for column in TABLES[table] if column.unit == "s" and column.name in frames[table]):
            values = frames[table][name].to_numpy(np.float64)
            wrong = ~(np.isfinite(values) & (values >= -ROUNDING * max(end_s, 1.0)))
            if wrong.any():
                raise ConfigError(
                    f"{label}: the column {name} of {table} comes out as {values[wrong][0]:g} s: some figure of the "
                    "cluster, the calibration or a policy is too large or negative"
                )


def _own_columns(table: str) -> list[str]:
    return [c.name for c in TABLES[table] if c.name not in ("case", "system", "seed")]


def _steps(outcome: Outcome, bound: GenerationBound | None) -> list[dict[str, Any]]:
    """What is known of every step on its own."""
    calls: dict[int, list[CallRecord]] = {}
    for call in outcome.calls:
        calls.setdefault(call.step, []).append(call)
    # A rollout for all steps works on the longest response of one beside those of others.
    endless = any(at_replica.step == NO_STEP for at_replica in outcome.stays)
    bound_s: Any = (bound.work_s if endless else bound.time_s) if bound else lambda *_: 0.0
    rows = []
    for step, began_at in enumerate([0.0, *outcome.step_ends[:-1]]):
        generate = [call for call in calls[step] if call.kind == "generate"]
        began = min((call.start_at for call in generate), default=began_at)
        ended = max((call.end_at for call in generate), default=began_at)
        responses, rollout = outcome.responses[step], outcome.rollouts[step]
        observed = responses.observed_tokens - responses.resumed_observed
        kept, new = responses.trained, responses.generated_tokens - responses.resumed_tokens - observed
        behind = step - responses.version[kept]  # the weights that it trains have had `step` updates
        finished = np.sort(responses.finished_at[kept])
        own = computed(
            TABLES["steps"],
            responses=responses,
            kept=kept,
            generated=responses.generated_tokens,
            new=new,
            observed=observed,
            here=(kept | responses.baseline) & (new > 0) & bool(generate),
            rollout=rollout,
            launches=rollout.launches,
            switches=[s for s in outcome.switches if s.step == step],
            rewards=Stretches.merged((c.start_at, c.end_at) for c in calls[step] if c.kind == "reward"),
            began=began,
            ended=ended,
            alone_s=float(np.diff(np.clip([began, *finished][-2:], began, ended)).sum()),
            p90_at=finished[max(int(np.ceil(0.9 * len(finished))) - 1, 0)] if len(finished) else ended,
            bound_s=bound_s,
            behind=behind,
            counts=Counter(behind.tolist()),
            turns=Counter(step - v for i, own in responses.turn_versions.items() if kept[i] for v in own.elements()),
            percentile_of_counts=percentile_of_counts,
        )
        rows.append({"step": step, **own})
    return rows


def gpu_seconds(held: Iterable[Sequence[float]], edges: Floats) -> Floats:
    """GPU-seconds in each step; `held` has start, end and GPUs of each stretch, which may reach over several steps."""
    start, end, gpus = floats(held, 3)
    shares = (np.minimum(end, last) - np.maximum(start, first) for first, last in itertools.pairwise(edges))
    return np.array([(np.clip(share, 0.0, None) * gpus).sum() for share in shares])


def uncovered(spans: Sequence[Span]) -> Sequence[Span]:
    """The spans, those on shared GPUs cut down to the time in which their GPUs did nothing else."""
    if not any(span.shared for span in spans):
        return spans
    kept = [span for span in spans if not span.shared]
    held: dict[int, list[tuple[float, float]]] = {}
    for span in kept:
        for gpu in span.gpus:
            held.setdefault(gpu, []).append((span.start_at, span.end_at))
    others = {gpu: Stretches.merged(its) for gpu, its in held.items()}
    for span in (span for span in spans if span.shared):
        for gpu in span.gpus:
            gaps = others[gpu].gaps(span.start_at, span.end_at) if gpu in others else [(span.start_at, span.end_at)]
            kept += [span._replace(gpus=(gpu,), start_at=start_at, end_at=end_at) for start_at, end_at in gaps]
    return kept


def _responses(outcome: Outcome, sampler: StepSampler) -> pd.DataFrame:
    names = np.asarray([str(name) for name in sampler.prompt_ids])
    made = [
        {"step": step} | computed(TABLES["responses"], step=step, responses=responses, names=names, sampler=sampler)
        for step, responses in enumerate(outcome.responses)
    ]
    return pd.concat(map(pd.DataFrame, made), ignore_index=True)


def stays_frame(stays: Sequence[Stays], responses: Sequence[Responses] = ()) -> pd.DataFrame:
    """The stays at these replicas as a table, step by step; in a rollout for all steps, of the responses' steps."""
    step_of = np.zeros(0, np.int64)  # by response
    if any(at_replica.step == NO_STEP for at_replica in stays):
        step_of = np.zeros(1 + max(int(of_step.id.max(initial=-1)) for of_step in responses), np.int64)
        for step, of_step in enumerate(responses):
            step_of[of_step.id] = step
    columns: dict[str, list[np.ndarray[Any, np.dtype[Any]]]] = {name: [] for name in _own_columns("stays")}
    for at_replica in filter(len, stays):
        own = at_replica.columns()
        own["step"] = step_of[own["response"] % AGENT] if at_replica.step == NO_STEP else np.array(at_replica.step)
        place = (at_replica.call, at_replica.replica, min(at_replica.gpus), len(at_replica.gpus))
        own |= zip(("call", "replica", "gpu", "gpus"), map(np.array, place), strict=True)
        for name, parts in columns.items():
            parts.append(np.broadcast_to(own[name], len(at_replica)))
    frame = pd.DataFrame({name: np.concatenate(parts) if parts else [] for name, parts in columns.items()})
    return frame.sort_values("step", kind="stable", ignore_index=True)


def _calls(outcome: Outcome) -> pd.DataFrame:
    calls = sorted(outcome.calls, key=lambda c: (c.start_at, c.step))
    frame = pd.DataFrame(calls).drop(columns=["parts", "samples"])
    parts = [{part.name: 0.0 for part in CALL_PARTS} | {f"{name}_s": s for name, s in one.parts} for one in calls]
    return frame.assign(**pd.DataFrame(parts))


def _spans(outcome: Outcome) -> pd.DataFrame:
    rows = [
        (s.step, first, count, s.start_at, s.end_at, s.kind, s.tp, s.label, s.shared)
        for s in outcome.spans
        for first, count in _runs(s.gpus)
    ]
    return pd.DataFrame(rows, columns=_own_columns("spans"))


@lru_cache(maxsize=10_000)
def _runs(gpus: tuple[int, ...]) -> Sequence[tuple[int, int]]:
    """Contiguous runs of GPU numbers: (first, how many)."""
    runs = itertools.groupby(enumerate(sorted(gpus)), key=lambda at: at[1] - at[0])
    return [((its := [gpu for _, gpu in run])[0], len(its)) for _, run in runs]

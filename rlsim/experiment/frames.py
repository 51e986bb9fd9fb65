"""What happened in one run, as the rows of the result tables."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.cost.bound import GenerationBound
from rlsim.experiment.columns import TABLES
from rlsim.sim.outcome import CallRecord, Outcome
from rlsim.sim.recorder import Span
from rlsim.sim.stays import Stays
from rlsim.trace import StepSampler

Frames = dict[str, pd.DataFrame]


def frames_of(outcome: Outcome, sampler: StepSampler, bound: GenerationBound, gpus: int) -> Frames:
    """The tables of one run, without the columns that name the run."""
    return {
        "steps": _steps(outcome, bound, gpus),
        "responses": _responses(outcome, sampler),
        "stays": stays_frame(outcome.stays),
        "calls": pd.DataFrame([_call_row(call) for call in sorted(outcome.calls, key=lambda c: (c.start_at, c.step))]),
        "switches": pd.DataFrame(outcome.switches, columns=_own_columns("switches")),
        "spans": pd.DataFrame(list(_span_rows(outcome.spans)), columns=_own_columns("spans")),
    }


def named(frames: Frames, case: str, system: str, seed: int) -> Frames:
    """The tables of a run with the columns that name it, in the order and types of `columns`."""
    result = {}
    for table, frame in frames.items():
        columns = TABLES[table]
        complete = frame.assign(case=case, system=system, seed=seed)
        result[table] = complete[[c.name for c in columns]].astype({c.name: c.dtype for c in columns})
    return result


def _own_columns(table: str) -> list[str]:
    return [c.name for c in TABLES[table] if c.name not in ("case", "system", "seed")]


def _steps(outcome: Outcome, bound: GenerationBound, gpus: int) -> pd.DataFrame:
    calls: dict[int, list[CallRecord]] = {}
    for call in outcome.calls:
        calls.setdefault(call.step, []).append(call)
    busy = _busy_gpu_s(outcome.spans, outcome.step_ends)
    pieces: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in outcome.spans:
        pieces.setdefault((span.step, span.kind), []).append((span.start_at, span.end_at))

    def at_work(call: CallRecord) -> list[tuple[float, float]]:
        """When a call ran: a reward call from start to end, one on GPUs while it had some."""
        return [(call.start_at, call.end_at)] if call.kind == "reward" else pieces.get((call.step, call.call), [])

    rows = []
    start = 0.0
    for step, end in enumerate(outcome.step_ends):
        responses, summary = outcome.responses[step], outcome.rollouts[step]
        generate = next((call for call in calls[step] if call.kind == "generate"), None)
        began, ended = (generate.start_at, generate.end_at) if generate else (start, start)
        switches = [s for s in outcome.switches if s.step == step]
        kept, settled = responses.trained, summary.settled
        generated_tokens = responses.response_tokens - responses.resumed_tokens
        here = (kept | responses.baseline) & (generated_tokens > 0) & (generate is not None)
        generated = [(began, ended)]
        prepared = [
            *generated,
            *(work for c in calls[step] if c.kind in ("reward", "inference") for work in at_work(c)),
        ]
        trained = [*prepared, *(work for c in calls[step] if c.kind == "train" for work in at_work(c))]
        finished = np.sort(responses.finished_at[kept])
        p90_at = finished[max(int(np.ceil(0.9 * len(finished))) - 1, 0)] if len(finished) else ended
        rows.append(
            {
                "step": step,
                "step_time_s": end - start,
                "round": settled.label,
                "gen_time_s": ended - began,
                "prep_time_s": _union_s(prepared) - _union_s(generated),
                "train_time_s": _union_s(trained) - _union_s(prepared),
                "reward_time_s": _union_s((c.start_at, c.end_at) for c in calls[step] if c.kind == "reward"),
                "sync_time_s": sum(c.end_at - c.start_at for c in calls[step] if c.kind == "sync"),
                "tokens": responses.total_tokens[kept].sum(),
                "response_tokens": generated_tokens.sum(),
                "wasted_tokens": responses.response_tokens[~(kept | responses.paused | responses.baseline)].sum(),
                "paused_tokens": responses.response_tokens[responses.paused].sum(),
                "resumed_tokens": responses.resumed_tokens.sum(),
                "launched": settled.launched,
                "trained": kept.sum(),
                "put_back": settled.put_back,
                "resumed": settled.resumed,
                "paused": settled.paused,
                "dropped": settled.dropped,
                "waiting": summary.waiting,
                "timeouts": (responses.timed_out & kept).sum(),
                "longest_tokens": responses.response_tokens[kept].max(initial=0),
                "bubble_fraction": max(1.0 - busy[step] / (gpus * (end - start)), 0.0),
                "gen_p90_time_s": max(p90_at - began, 0.0),
                "gen_bound_s": bound.time_s(
                    (responses.prompt_tokens + responses.resumed_tokens)[here], generated_tokens[here]
                ),
                "initial_tp": summary.initial_tp,
                "switches": len(switches),
                "switch_time_s": sum(s.weights_s + s.kv_s + s.graph_s + s.control_s for s in switches),
                "preemptions": summary.preemptions,
                "released_gpu_s": summary.released_gpu_s,
                "kv_peak_tokens": summary.peak_kv_tokens,
                "staleness": step - int(responses.version[kept].min(initial=step)),
            }
        )
        start = end
    return pd.DataFrame(rows)


def _busy_gpu_s(spans: Sequence[Span], step_ends: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """GPU-seconds of work in each step; a span over a step's end counts on both sides."""
    spans = uncovered(spans)
    start = np.array([s.start_at for s in spans])
    end = np.array([s.end_at for s in spans])
    gpus = np.array([len(s.gpus) for s in spans], dtype=np.float64)
    edges = np.array([0.0, *step_ends])
    return np.array(
        [
            (np.clip(np.minimum(end, last) - np.maximum(start, first), 0.0, None) * gpus).sum()
            for first, last in itertools.pairwise(edges)
        ]
    )


def uncovered(spans: Sequence[Span]) -> Sequence[Span]:
    """The spans, those on shared GPUs cut down to the time in which their GPUs did nothing else."""
    beside = [span for span in spans if span.shared]
    if not beside:
        return spans
    others: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if not span.shared:
            for gpu in span.gpus:
                others.setdefault(gpu, []).append((span.start_at, span.end_at))
    for intervals in others.values():
        intervals.sort()
    kept = [span for span in spans if not span.shared]
    for span in beside:
        for gpu in span.gpus:
            kept += [span._replace(gpus=(gpu,), start_at=a, end_at=b) for a, b in _gaps(span, others.get(gpu, []))]
    return kept


def _gaps(span: Span, intervals: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The parts of a span that lie in none of the intervals (sorted, without overlap)."""
    at = span.start_at
    for start, end in intervals[max(bisect_left(intervals, (at, at)) - 1, 0) :]:
        if start >= span.end_at:
            break
        if start > at:
            yield at, start
        at = max(at, end)
    if at < span.end_at:
        yield at, span.end_at


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the time that lies in at least one of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _responses(outcome: Outcome, sampler: StepSampler) -> pd.DataFrame:
    frames = []
    names = np.asarray([str(name) for name in sampler.prompt_ids])
    for step, responses in enumerate(outcome.responses):
        prompts = names[sampler.prompts_at(responses.position)]
        frames.append(
            pd.DataFrame(
                {
                    "step": step,
                    "response": responses.id,
                    "prompt_id": prompts,
                    "position": responses.position,
                    "prompt_tokens": responses.prompt_tokens,
                    "response_tokens": responses.response_tokens,
                    "start_at": responses.started_at,
                    "first_token_at": responses.first_token_at,
                    "finish_at": responses.finished_at,
                    "replica": responses.replica,
                    "tp_history": [">".join(map(str, tps)) for tps in responses.tps],
                    "preemptions": responses.preemptions,
                    "aborted": responses.aborted,
                    "trained": responses.trained,
                    "paused": responses.paused,
                    "resumed": responses.resumed,
                    "resumed_tokens": responses.resumed_tokens,
                    "staleness": step - responses.version,
                    "score_start_at": responses.score_started_at,
                    "scored_at": responses.scored_at,
                    "reward": responses.reward,
                    "timed_out": responses.timed_out,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def stays_frame(stays: Iterable[Stays]) -> pd.DataFrame:
    """The stays at these replicas as a table, step by step."""
    columns: dict[str, list[np.ndarray[Any, np.dtype[Any]]]] = {name: [] for name in _own_columns("stays")}
    for at_replica in stays:
        if not len(at_replica):
            continue
        place = {
            "step": at_replica.step,
            "call": at_replica.call,
            "replica": at_replica.replica,
            "gpu": min(at_replica.gpus),
            "gpus": len(at_replica.gpus),
        }
        for name, value in place.items():
            columns[name].append(np.full(len(at_replica), value))
        for name, values in at_replica.columns().items():
            columns[name].append(values)
    frame = pd.DataFrame({name: np.concatenate(parts) if parts else [] for name, parts in columns.items()})
    return frame.sort_values("step", kind="stable", ignore_index=True)


def _call_row(call: CallRecord) -> dict[str, Any]:
    parts = dict.fromkeys(("compute", "communication", "bubble", "optimizer", "offload", "imbalance"), 0.0)
    parts |= {name: seconds for name, seconds in call.parts if name in parts}
    row = {name: value for name, value in call._asdict().items() if name != "parts"}
    return {**row, **{f"{name}_s": seconds for name, seconds in parts.items()}}


def _span_rows(spans: Iterable[Span]) -> Iterable[tuple[Any, ...]]:
    for span in spans:
        for first, count in _runs(span.gpus):
            yield span.step, first, count, span.start_at, span.end_at, span.kind, span.tp, span.label, span.shared


def _runs(gpus: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Contiguous runs of GPU numbers: (first, how many)."""
    first = previous = None
    for gpu in sorted(gpus):
        if previous is None or gpu != previous + 1:
            if first is not None and previous is not None:
                yield first, previous - first + 1
            first = gpu
        previous = gpu
    if first is not None and previous is not None:
        yield first, previous - first + 1

"""The parts of a step: what the trainer did in each moment of it, or else what it waited for (docs/results.md)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from rlsim.sim.outcome import Outcome

Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Rounding of differences, relative to what they are taken of.
ROUNDING = 1e-9
#: The parts of a step's time, in the order in which its calls follow from one another, and their kinds of calls.
PARTS_OF_A_STEP = {
    "gen_exposed_s": ("generate",),
    "prep_time_s": ("reward", "inference"),
    "train_time_s": ("train",),
    "sync_time_s": ("sync",),
}
_GEN, _PREP, _TRAIN, _SYNC = PARTS_OF_A_STEP
_COLUMNS = (*PARTS_OF_A_STEP, "waiting_time_s")


class Stretches(NamedTuple):
    """Moments from `start` to `end`, in order and without overlap; the first begins at 0 and may have no length."""

    start: Floats
    end: Floats

    @classmethod
    def merged(cls, stretches: Iterable[Sequence[float]]) -> Stretches:
        """The time that lies in at least one of these (start, end)."""
        start, end = floats([(0.0, 0.0), *stretches], 2)
        order = np.lexsort((end, start))
        start, end = start[order], np.maximum.accumulate(end[order])
        begins = np.append(True, start[1:] > end[:-1])
        return cls(start[begins], end[np.append(begins[1:], True)])

    def cover(self, moments: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each of these moments lies in one of the stretches."""
        covered: np.ndarray[Any, np.dtype[np.bool_]] = moments < self.end[self._last(moments)]
        return covered

    def within(self, edges: Floats) -> Floats:
        """Seconds of them between each edge and the next."""
        last, before = self._last(edges), np.append(0.0, (self.end - self.start).cumsum())
        return np.diff(before[last] + np.minimum(edges, self.end[last]) - self.start[last])

    def gaps(self, start_at: float, end_at: float) -> Iterator[tuple[float, float]]:
        """Where none of them is between two moments."""
        first, last = np.searchsorted(self.end, start_at, side="right"), np.searchsorted(self.start, end_at)
        ends, starts = self.end[first:last].tolist(), self.start[first:last].tolist()
        return ((a, b) for a, b in zip([start_at, *ends], [*starts, end_at], strict=True) if a < b)

    def _last(self, moments: Floats) -> Any:
        return np.searchsorted(self.start, moments, side="right") - 1


def floats(rows: Iterable[Sequence[float]], columns: int) -> Floats:
    """The columns of these rows."""
    return np.fromiter(itertools.chain.from_iterable(rows), np.float64).reshape(-1, columns).T


def parts_of_steps(outcome: Outcome, trainer: Set[int], edges: Floats) -> dict[str, Floats]:
    """Seconds of each part in every step, which lies between two `edges`; `trainer` are the GPUs of the train calls.

    What runs on these GPUs says which part a moment belongs to: generation of the step itself, else training, log-probs
    and rewards, a sync, generation of another step. While nothing runs there, the call that comes there next waits: for
    generation until the last response that it waited for was complete, then for rewards or log-probs, for a sync, for
    other generation, whichever is at work; else a moment is `waiting_time_s`. A sync waits for generation to stand
    still.
    """
    part_of = {
        call.call: part for part, kinds in PARTS_OF_A_STEP.items() for call in outcome.calls if call.kind in kinds
    }
    here: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS_OF_A_STEP}
    anywhere: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS_OF_A_STEP}
    own, calls = [], []  # generation of the step itself; calls as they begin to work on the trainer's GPUs
    for span in outcome.spans:
        part, start_at = part_of.get(span.kind, _GEN), span.start_at
        anywhere[part].append((start_at, span.end_at))
        if trainer.isdisjoint(span.gpus):
            continue
        here[part].append((start_at, span.end_at))
        if part != _GEN:
            calls.append((start_at, span.step, part))
        elif span.end_at > edges[span.step]:
            own.append((max(start_at, edges[span.step]), span.end_at))
    anywhere[_GEN] += [(call.start_at, call.end_at) for call in outcome.calls if call.kind == "generate"]
    for of_step in outcome.responses:
        scored = ~np.isnan(of_step.scored_at)
        anywhere[_PREP] += np.stack([of_step.score_started_at, of_step.scored_at], axis=1)[scored].tolist()
    busy = Stretches.merged(itertools.chain(*here.values()))
    on, at_work = ({part: Stretches.merged(its) for part, its in of.items()} for of in (here, anywhere))
    of_step_itself = Stretches.merged(own)
    following = np.searchsorted([start_at for start_at, *_ in calls], busy.end, side="right")
    generated_at = np.array([_generated_at(outcome, *calls[i]) if i < len(calls) else -np.inf for i in following])
    known = [of_step_itself, busy, *on.values(), *at_work.values()]
    cuts = np.unique(np.concatenate([edges, generated_at, *itertools.chain(*known)]))
    cuts = cuts[(cuts >= edges[0]) & (cuts <= edges[-1])]
    moments = (cuts[1:] + cuts[:-1]) / 2
    gap = np.searchsorted(busy.end, moments, side="right") - 1
    rules = [
        (_GEN, of_step_itself.cover(moments)),
        *((part, on[part].cover(moments)) for part in (_TRAIN, _PREP, _SYNC, _GEN)),
        (_GEN, (moments < generated_at[np.maximum(gap, 0)]) & at_work[_GEN].cover(moments)),
        *((part, at_work[part].cover(moments)) for part in (_PREP, _SYNC, _GEN)),
    ]
    found = np.select([applies for _, applies in rules], [_COLUMNS.index(part) for part, _ in rules], len(_COLUMNS) - 1)
    steps = len(edges) - 1
    cell = found * steps + np.searchsorted(edges, moments, side="right") - 1
    seconds = np.bincount(cell, np.diff(cuts), len(_COLUMNS) * steps).reshape(len(_COLUMNS), steps)
    return dict(zip(_COLUMNS, seconds, strict=True))


def _generated_at(outcome: Outcome, start_at: float, step: int, part: str) -> float:
    """When the last response was complete that a call waited for which begins now: the last to arrive, or its reward.

    Of a sync: never; of a call that no response has arrived for: before all time.
    """
    if part == _SYNC:
        return np.inf
    responses = outcome.responses[step]
    needed, now = responses.trained | responses.baseline, start_at * (1 + ROUNDING)
    finished_at, scored_at = responses.finished_at[needed], responses.scored_at[needed]
    arrived_at = np.where(scored_at <= now, scored_at, np.where(finished_at <= now, finished_at, -np.inf))
    last = arrived_at.max(initial=-np.inf)
    return float(finished_at[arrived_at == last].max()) if last > -np.inf else -np.inf

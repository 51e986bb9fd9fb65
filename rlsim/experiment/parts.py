"""The parts of a step, and the tail of its generation, from what happened in a run.

Parts: what the trainer did in each moment of a step, or else what it waited for (docs/results.md). Tail: when GPUs
decode far fewer tokens a second than they did with their full batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.sim.outcome import Outcome

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

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

    def cover(self, moments: Floats) -> NDArray[np.bool_]:
        """Whether each of these moments lies in one of the stretches."""
        covered: NDArray[np.bool_] = moments < self.end[self._last(moments)]
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


# ---- the tail of generation -----------------------------------------------------------------------------------------


#: Decoding at less than this share of the throughput that a GPU reached in the same stage is its tail.
TAIL_SHARE = 0.5
COLUMNS = ("gpu", "gpus", "start_at", "end_at", "tail_s")


def tail_stretches(stays: pd.DataFrame, spans: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """When GPUs decoded in the tail, from the tables `stays`, `spans` and `calls` of one run (docs/results.md).

    Between two moments at which a response joins or leaves a replica's decoding batch, the replica's throughput is the
    batch times the iterations done, over the seconds that it iterated. A GPU decodes in the tail while its share of
    that is below `TAIL_SHARE` of the most that it reached in the same step, under whichever replica; where one rollout
    generates for all steps, in the run. One row per stretch and run of neighbouring GPUs: `gpu` (the first), `gpus`
    (how many), `start_at`, `end_at`, and `tail_s`, the seconds of decode iterations within the stretch (prefills may
    lie in between).
    """
    generating = calls.loc[calls["kind"] == "generate", "call"].unique()
    decoding = stays[stays["call"].isin(generating) & stays["decoding_at"].notna()]
    if decoding.empty:
        return pd.DataFrame({name: np.zeros(0) for name in COLUMNS})
    step, replica = (decoding[name].to_numpy(np.int64) for name in ("step", "replica"))
    kinds = spans["kind"].to_numpy()
    numbers = {f"replica {number}": number for number in np.unique(replica).tolist()}
    spans = spans[((kinds == "decode") | (kinds == "mixed")) & spans["label"].isin(numbers)]
    of_span = spans["step"].to_numpy(np.int64)
    if never_stops(decoding, calls):
        step, of_span = np.zeros_like(step), np.zeros_like(of_span)
    # A replica's number among all of the run is the place of its step and its own number.
    places, first, owner = np.unique(step * 2**32 + replica, return_index=True, return_inverse=True)
    place = of_span * 2**32 + np.array([numbers[label] for label in spans["label"]], np.int64)
    of_span = np.minimum(np.searchsorted(places, place), len(places) - 1)
    known = places[of_span] == place
    of, start, end, tokens, decode_s, busy_s = _constant_batches(decoding, owner, spans[known], of_span[known])
    throughput = np.divide(tokens, busy_s, out=np.zeros(len(of)), where=busy_s > 0)
    gpu, gpus = (decoding[name].to_numpy(np.int64)[first] for name in ("gpu", "gpus"))
    of_group, gpu, gpus, least = _thresholds(step[first], gpu, gpus, of, throughput)
    # Every replica's stretches once for each group of its GPUs that have the same threshold; mostly there is one.
    first = np.searchsorted(of, of_group)
    count = np.searchsorted(of, of_group, side="right") - first
    row = np.arange(count.sum()) - np.repeat(count.cumsum() - count - first, count)
    group = np.repeat(np.arange(len(of_group)), count)
    tail = (throughput[row] < least[group]) & (decode_s[row] > 0)
    row, group = row[tail], group[tail]
    found = (gpu[group], gpus[group], start[row], end[row], decode_s[row])
    return pd.DataFrame(dict(zip(COLUMNS, found, strict=True)))


def never_stops(stays: pd.DataFrame, calls: pd.DataFrame) -> bool:
    """Whether one rollout generates for all steps of a run: its responses may decode long before the step that trains
    on them waits for its batch."""
    began_at = calls[calls["kind"] == "generate"].groupby("step")["start_at"].min()
    return bool((stays["decoding_at"] < stays["step"].map(began_at)).any())


def _constant_batches(
    decoding: pd.DataFrame, owner: Integers, spans: pd.DataFrame, of_span: Integers
) -> tuple[Any, ...]:
    """Stretches of time in which a replica's batch did not change, by replica and time.

    Arrays of: the replica's number, start and end (s), tokens decoded, and the seconds in it of iterations that only
    decoded, and of all iterations with decodes.
    """
    joined_at, left_at = (decoding[name].to_numpy(np.float64) for name in ("decoding_at", "left_at"))
    joined, started = (decoding[name].to_numpy(np.int64) for name in ("iteration", "start_tokens"))
    # A prefill gives the first token with it; KV that was migrated joins the batch as it is.
    offset = started + (joined_at > decoding["admitted_at"].to_numpy(np.float64)) - joined
    begins, ends = (spans[name].to_numpy(np.float64) for name in ("start_at", "end_at"))
    decodes = (spans["kind"].to_numpy() == "decode").astype(np.int64)
    n, m = len(decoding), len(spans)
    replica = np.concatenate([owner, owner, of_span, of_span])
    at = np.concatenate([joined_at, left_at, begins, ends])
    done = np.concatenate([joined, decoding["end_tokens"].to_numpy(np.int64) - offset, np.zeros(2 * m, np.int64)])
    changes = np.zeros(
        (2 * n + 2 * m, 4), np.int64
    )  # of: the batch, decode spans, all spans; 1 where the batch changes
    changes[:n, 0], changes[n : 2 * n, 0], changes[: 2 * n, 3] = 1, -1, 1
    changes[2 * n : 2 * n + m, 1], changes[2 * n + m :, 1] = decodes, -decodes
    changes[2 * n : 2 * n + m, 2], changes[2 * n + m :, 2] = 1, -1
    order = np.lexsort((done, at, replica))
    replica, at, done = replica[order], at[order], done[order]
    # Every replica begins and ends with an empty batch and no span: one sum over all of them does.
    batch, decode, iterates, stretch = changes[order].cumsum(axis=0).T
    width = np.append(np.diff(at), 0.0) * np.append(replica[1:] == replica[:-1], False)
    mark = np.flatnonzero(changes[order, 3])  # where a stretch begins
    decode_s, busy_s = (np.bincount(stretch, width * there)[1:] for there in (decode, iterates))
    whole = np.append(replica[mark][1:] == replica[mark][:-1], False)
    following = np.minimum(np.arange(len(mark)) + 1, len(mark) - 1)
    tokens = batch[mark] * (done[mark][following] - done[mark])
    kept = whole & (busy_s > 1e-9 * at[mark])  # at one moment several may join and leave: rounding is no stretch
    columns = (replica[mark], at[mark], at[mark][following], tokens, decode_s, busy_s)
    return tuple(column[kept] for column in columns)


def _thresholds(
    step: Integers, first: Integers, gpus: Integers, of: Integers, throughput: Floats
) -> tuple[Integers, Integers, Integers, Floats]:
    """Replica by replica, neighbouring GPUs that have the same threshold: replica, first GPU, how many, tokens/s.

    `step`, `first` GPU and `gpus` are of each replica. The threshold is of the replica's throughput, which all of its
    GPUs share.
    """
    most = np.zeros(len(step))
    np.maximum.at(most, of, throughput)
    replica = np.repeat(np.arange(len(step)), gpus)
    gpu = first[replica] + np.arange(len(replica)) - np.repeat(gpus.cumsum() - gpus, gpus)
    _, cell = np.unique(step[replica] * (gpu.max() + 1) + gpu, return_inverse=True)
    reached = np.zeros(cell.max() + 1)
    np.maximum.at(reached, cell, (most / gpus)[replica])
    least = TAIL_SHARE * reached[cell] * gpus[replica]
    begins = np.flatnonzero(np.append(True, (np.diff(replica) != 0) | (np.diff(least) != 0)))
    count = np.diff(np.append(begins, len(replica)))
    return replica[begins], gpu[begins], count, least[begins]

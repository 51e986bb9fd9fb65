"""The tail of generation: when GPUs decode far fewer tokens a second than they did with their full batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

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
    if never_stops(decoding, calls):
        decoding, spans = decoding.assign(step=0), spans.assign(step=0)
    key = ["step", "replica"]
    place = decoding[[*key, "gpu", "gpus"]].drop_duplicates(key).sort_values(key, ignore_index=True)
    place["owner"] = place.index  # the number of a replica among all of the run
    numbers = {f"replica {number}": number for number in place["replica"]}
    iterating = spans[spans["kind"].isin(("decode", "mixed")) & spans["label"].isin(numbers)]
    iterating = iterating.assign(replica=iterating["label"].map(numbers).astype(np.int64)).merge(place, on=key)
    owner = decoding[key].merge(place, how="left", on=key)["owner"].to_numpy(np.int64)
    of, start, end, tokens, decode_s, busy_s = _constant_batches(decoding, owner, iterating)
    throughput = np.divide(tokens, busy_s, out=np.zeros(len(of)), where=busy_s > 0)
    of_group, gpu, gpus, least = _thresholds(place, of, throughput)
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
    began_at = calls[calls["kind"] == "generate"].set_index("step")["start_at"]
    return bool((stays["decoding_at"] < stays["step"].map(began_at)).any())


def _constant_batches(decoding: pd.DataFrame, owner: Integers, spans: pd.DataFrame) -> tuple[Any, ...]:
    """Stretches of time in which a replica's batch did not change, by replica and time.

    Arrays of: the replica's number, start and end (s), tokens decoded, and the seconds in it of iterations that only
    decoded, and of all iterations with decodes.
    """
    joined_at, left_at = (decoding[name].to_numpy(np.float64) for name in ("decoding_at", "left_at"))
    joined, started = (decoding[name].to_numpy(np.int64) for name in ("iteration", "start_tokens"))
    # A prefill gives the first token with it; KV that was migrated joins the batch as it is.
    offset = started + (joined_at > decoding["admitted_at"].to_numpy(np.float64)) - joined
    begins, ends = (spans[name].to_numpy(np.float64) for name in ("start_at", "end_at"))
    of_span, decodes = spans["owner"].to_numpy(np.int64), (spans["kind"] == "decode").astype(int).to_numpy(np.int64)
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


def _thresholds(place: pd.DataFrame, of: Integers, throughput: Floats) -> tuple[Integers, Integers, Integers, Floats]:
    """Replica by replica, neighbouring GPUs that have the same threshold: replica, first GPU, how many, tokens/s.

    The threshold is of the replica's throughput, which all of its GPUs share.
    """
    gpus = place["gpus"].to_numpy(np.int64)
    most = np.zeros(len(place))
    np.maximum.at(most, of, throughput)
    replica = np.repeat(np.arange(len(place)), gpus)
    gpu = place["gpu"].to_numpy(np.int64)[replica] + np.arange(len(replica)) - np.repeat(gpus.cumsum() - gpus, gpus)
    _, cell = np.unique(place["step"].to_numpy(np.int64)[replica] * (gpu.max() + 1) + gpu, return_inverse=True)
    reached = np.zeros(cell.max() + 1)
    np.maximum.at(reached, cell, (most / gpus)[replica])
    least = TAIL_SHARE * reached[cell] * gpus[replica]
    first = np.flatnonzero(np.append(True, (np.diff(replica) != 0) | (np.diff(least) != 0)))
    count = np.diff(np.append(first, len(replica)))
    return replica[first], gpu[first], count, least[first]

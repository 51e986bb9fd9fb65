"""What replicas held over time: active and waiting requests, and tokens of KV cache, from the stays of a stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.results.report.trace_events import microseconds

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Points, evenly spaced over a replica's time, at which its KV in use is shown besides those at which requests come or
#: go: counters are drawn as steps.
POINTS = 24


def held_by_replicas(stays: pd.DataFrame) -> pd.DataFrame:
    """What each replica held whenever a request arrived, was admitted, joined the batch or left, and in between.

    `stays` are those of one step, or of all steps that one rollout generates for, those of a request one after the
    other: as in results, with numbers for `call`, `replica` (among all) and `place` (its GPUs, and the call that it
    works for). Rows are moments `at` (µs), those of a replica one after the other: how many requests are `active`
    (admitted: in prefill or decoding) and `waiting`, and the contexts of the active ones, `kv_tokens`.

    Between two of these moments the contexts in the decoding batch grow by a token each an iteration. How many
    iterations a replica had done is known at every moment at which a request joined or left the batch; between two of
    these, it is taken to grow evenly.
    """
    here = SimpleNamespace(**{str(name): column.to_numpy() for name, column in stays.items()})
    joined = ~np.isnan(here.decoding_at)
    prefilled = here.decoding_at > here.admitted_at  # not, if its KV came with it
    # A context less the iterations of its replica does not change while it decodes.
    offset = np.where(joined, here.start_tokens + prefilled - here.iteration, 0)

    replicas, first = np.unique(here.replica, return_index=True)
    begin, end = np.full(replicas.max() + 1, np.inf), np.full(replicas.max() + 1, -np.inf)
    np.minimum.at(begin, here.replica, here.arrived_at)
    np.maximum.at(end, here.replica, here.left_at)
    share = np.linspace(0, 1, POINTS + 2)[1:-1]
    between = (begin[replicas, None] + (end - begin)[replicas, None] * share).ravel()

    at, changes = _changes(here, joined, offset)
    replica = np.tile(here.replica, len(at) // len(here.replica))
    happened = ~np.isnan(at)
    at = np.concatenate([at[happened], between])
    changes = np.concatenate([changes[happened], np.zeros((len(between), 5), np.int64)])
    replica = np.concatenate([replica[happened], np.repeat(replicas, POINTS)])
    order = np.lexsort((at, replica))
    at, replica = at[order], replica[order]
    # Every replica begins and ends with nothing: one sum over all of them does.
    waiting, active, decoding, offsets, prefill = np.cumsum(changes[order], axis=0).T

    done = _iterations(here, joined, offset, at, replica)
    kv = np.rint(offsets + decoding * done + prefill).astype(np.int64)
    at_us = microseconds(at)
    newest = np.concatenate([(np.diff(at_us) > 0) | (np.diff(replica) > 0), [True]])
    of = np.zeros(replicas.max() + 1, np.int64)
    of[replicas] = first
    row = of[replica[newest]]
    columns = {"active": active, "waiting": waiting, "kv_tokens": kv, "replica": replica}
    found = pd.DataFrame({name: column[newest] for name, column in columns.items()})
    return found.assign(place=here.place[row], call=here.call[row], at=at_us[newest])


def _changes(here: SimpleNamespace, joined: NDArray[np.bool_], offset: Ints) -> tuple[Floats, Ints]:
    """What each stay changes, and when: requests waiting, active, decoding; sums of offsets and of prefilled contexts.

    Four moments of every stay, one after the other; NaN for those that never happened.
    """
    admitted = ~np.isnan(here.admitted_at)
    zero, one, context = np.zeros_like(offset), np.ones_like(offset), here.start_tokens
    in_prefill = np.where(admitted & ~joined, context, 0)  # when it leaves
    parts = [
        (here.arrived_at, one, zero, zero, zero, zero),
        (here.admitted_at, -one, one, zero, zero, context),
        (here.decoding_at, zero, zero, one, offset, -context),
        (here.left_at, -1 * ~admitted, -1 * admitted, -1 * joined, -offset, -in_prefill),
    ]
    at = np.concatenate([moments for moments, *_ in parts])
    return at, np.concatenate([np.stack(change, axis=1) for _, *change in parts])


def _iterations(here: SimpleNamespace, joined: NDArray[np.bool_], offset: Ints, at: Floats, replica: Ints) -> Floats:
    """Iterations with decodes that these replicas had done at these moments."""
    if not joined.any():
        return np.zeros(len(at))
    known_at = np.concatenate([here.decoding_at[joined], here.left_at[joined]])
    known = np.concatenate([here.iteration[joined], here.end_tokens[joined] - offset[joined]])
    owner = np.tile(here.replica[joined], 2)
    order = np.lexsort((known, known_at, owner))
    # One interpolation for all replicas: each has a stretch of time of its own.
    begin = min(float(known_at.min()), float(at.min()))
    width = 2.0 * (max(float(known_at.max()), float(at.max())) - begin) + 1.0
    along: Any = known_at - begin + owner * width
    return np.interp(at - begin + replica * width, along[order], known[order].astype(np.float64))

"""The requests of a run on a timeline: what each was doing at which replica, and what the replicas held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.errors import ConfigError
from rlsim.results.report.chosen_run import ChosenRun
from rlsim.results.report.trace_events import TraceWriter, Track, Tracks, microseconds
from rlsim.sim.stays import LEFT

Ints = NDArray[np.int64]
#: The first steps have tracks for their requests: as many as have no more stays at replicas than these, or one.
MOST_STAYS = 200_000
_STAYS = (
    "step", "call", "response", "replica", "gpu", "gpus", "arrived_at", "admitted_at", "decoding_at", "left_at",
    "start_tokens", "end_tokens", "iteration", "left",
)  # fmt: skip
_RESPONSES = (
    "step", "response", "position", "finish_at", "paused", "resumed", "score_start_at", "scored_at", "reward",
    "timed_out",
)  # fmt: skip


def write_requests(writer: TraceWriter, run: ChosenRun, run_pid: int, generate: str, places: tuple[int, int]) -> int:
    """Write the requests of a run, and what CPU workers scored; returns of how many of its steps.

    The replicas that ever are on the same GPUs make a group of tracks with counters of their own; each request there
    is on one of its tracks. `run_pid` is the group with the counters of all replicas together, `generate` the call that
    makes the responses (others with requests are judges); `places` say where the groups of requests, and that of the
    CPU workers of reward calls, stand.
    """
    stays, responses = run.rows("stays", _STAYS), run.rows("responses", _RESPONSES)
    counts = stays.groupby("step").size().cumsum()
    shown = run.steps
    if (beyond := counts.index[counts > MOST_STAYS]).size:
        shown = tuple(step for step in shown if step < max(beyond[0], run.steps[0] + 1))
        stays, responses = (rows[rows["step"].isin(shown)] for rows in (stays, responses))
    if len(stays):
        stays = _in_order(stays, generate)
        pids = _groups(writer, stays, places[0])
        tracks = pd.Series(_write_phases(writer, stays, pids))
        _write_resumed(writer, stays.assign(track=tracks), responses)
        _write_counters(writer, stays, pids, run_pid)
    _write_rewards(writer, stays, responses, places[1])
    return len(shown)


def _in_order(stays: pd.DataFrame, generate: str) -> pd.DataFrame:
    """The stays of a request one after the other; numbers for calls and the replicas' places; moments also in µs."""
    if unknown := set(stays["left"]) - set(LEFT):
        raise ConfigError(f"stays: column left: expected one of {', '.join(LEFT)}, got {unknown.pop()!r}")
    calls = list(dict.fromkeys([generate, *stays["call"]]))
    found = stays.assign(name=stays["call"], call=stays["call"].map(calls.index), tp=stays["gpus"])
    found["place"] = found.groupby(["call", "gpu", "gpus"]).ngroup()
    for name in ("arrived", "admitted", "decoding", "left"):  # what never came begins when it leaves
        found[f"{name}_us"] = microseconds(found[f"{name}_at"].fillna(found["left_at"]))
    return found.sort_values(["step", "call", "response", "arrived_at", "left_at"], ignore_index=True)


def _groups(writer: TraceWriter, stays: pd.DataFrame, first_place: int) -> Ints:
    """A group of tracks for each place; their processes."""
    pids = []
    for row in stays.drop_duplicates("place").sort_values("place").to_dict("records"):
        gpu, gpus = row["gpu"], row["gpus"]
        which = f"GPU {gpu}" if gpus == 1 else f"GPUs {gpu}–{gpu + gpus - 1}"
        place = first_place + 10 * gpu + int(row["call"] > 0)
        pids.append(writer.process(f"{row['name']} · {which} · TP{gpus}", place))
    return np.array(pids)


# ---- slices and arrows -----------------------------------------------------------------------------------------------


@dataclass
class _Visit:
    """The stays of a request at one replica: when it is preempted it keeps its track. `before`: the visit that it comes
    from; it has its track from `begins` on, when it left there (µs)."""

    stays: list[Any]
    before: _Visit | None
    begins: int
    track: Track = (0, 0)


def _write_phases(writer: TraceWriter, stays: pd.DataFrame, pids: Ints) -> list[Track]:
    """Slices of all that requests went through, and arrows between replicas; returns the track of each stay."""
    visits: list[_Visit] = []
    stay: Any
    for stay in stays.itertuples():
        before = visits[-1] if visits else None
        last: Any = before and before.stays[-1]
        if last and (last.step, last.call, last.response) != (stay.step, stay.call, stay.response):
            before = None
        if before and last.left == "preempted":
            before.stays.append(stay)
        else:
            visits.append(_Visit([stay], before, min(stay.arrived_us, last.left_us) if before else stay.arrived_us))
    tracks = Tracks(lambda place, number: writer.track(int(pids[place]), f"slot {number}", number))
    for visit in sorted(visits, key=lambda visit: visit.begins):
        visit.track = tracks.place(visit.stays[0].place, visit.begins, visit.stays[-1].left_us)
    for visit in visits:
        if visit.before:
            _write_move(writer, visit, visit.before)
        for stay in visit.stays:
            known = {"response": stay.response, "tp": stay.tp, "step": stay.step}
            waited = {**known, "context": stay.start_tokens}
            done = {"tokens": stay.end_tokens - stay.start_tokens, "context": stay.end_tokens, "left": stay.left}
            for name, start, end, args in (
                ("queued", stay.arrived_us, stay.admitted_us, waited),
                ("prefill", stay.admitted_us, stay.decoding_us, waited),
                ("decode", stay.decoding_us, stay.left_us, {**known, **done}),
            ):
                writer.slice(visit.track, f"{name} {stay.response}", name, start, end, args)
    return [visit.track for visit in visits for _ in visit.stays]


def _write_move(writer: TraceWriter, visit: _Visit, before: _Visit) -> None:
    """What a request does between two replicas, and an arrow from the last microsecond at the one to the first at the
    other."""
    last, stay = before.stays[-1], visit.stays[0]
    args = {"response": stay.response, "tp": stay.tp, "step": stay.step, "context": stay.start_tokens}
    name, args = ("tool", args) if last.left == "tool" else ("paused", {**args, "after": last.left})
    writer.slice(visit.track, f"{name} {stay.response}", name, visit.begins, stay.arrived_us, args)
    begun = before.begins if len(before.stays) == 1 else last.arrived_us
    if last.left_us > begun and stay.left_us > visit.begins:
        writer.arrow(last.left, before.track, last.left_us - 1, visit.track, visit.begins)


def _write_resumed(writer: TraceWriter, stays: pd.DataFrame, responses: pd.DataFrame) -> None:
    """Arrows from where responses broke off to the requests that go on with them in a later step.

    The unfinished ones of a prompt are in the same order there, after those that had finished.
    """
    made: list[Any] = list(stays[stays["call"] == 0].itertuples())
    lasts = {(stay.step, stay.response): stay for stay in made}
    firsts = {(stay.step, stay.response): stay for stay in reversed(made)}
    broke_off: dict[Any, list[Any]] = {}  # by prompt, in the last step in which any did
    known = set(responses["step"])
    step: Any
    for step, rows in responses.groupby("step"):
        if step - 1 not in known:  # nor is what went on in it
            broke_off = {}
        paused = rows[rows["paused"] & rows["finish_at"].isna()].groupby("position")["response"].agg(list)
        resumed = rows[rows["resumed"]].groupby("position")["response"].agg(list)
        for position, those in resumed.items():
            for before, response in zip(reversed(broke_off.get(position, [])), reversed(those), strict=False):
                last, first = lasts.get(before), firsts.get((step, response))
                if last and first and last.left_us > last.arrived_us and first.left_us > first.arrived_us:
                    writer.arrow("resumed", last.track, last.left_us - 1, first.track, first.arrived_us)
        broke_off |= {position: [(step, response) for response in those] for position, those in paused.items()}


# ---- counters --------------------------------------------------------------------------------------------------------


def _write_counters(writer: TraceWriter, stays: pd.DataFrame, pids: Ints, run_pid: int) -> None:
    """What replicas held; those of a rollout that never stops hold responses of several steps at once."""
    made = stays.assign(own=stays["call"] == 0)
    ends = made[made["own"]].groupby("step").agg(first=("arrived_at", "min"), last=("left_at", "max"))
    rollout = (ends["first"] >= ends["last"].shift()).cumsum()
    rollout = stays["step"].map(rollout).fillna(-1)
    replica = stays.assign(rollout=rollout).groupby(["place", "replica", "rollout"]).ngroup()
    held = held_by_replicas(stays.assign(replica=replica))
    at, pid, generates = held["at"].to_numpy(), pids[held["place"]], (held["call"] == 0).to_numpy()
    counters = {"active sequences": "active", "waiting requests": "waiting", "KV tokens": "kv_tokens"}
    for name, column in counters.items():
        values = held[column].to_numpy()
        change = np.diff(values, prepend=0)  # also from replica to replica: each begins and ends with nothing
        for which in np.flatnonzero(change).tolist():
            writer.sample(name, int(pid[which]), int(at[which]), int(values[which]))
        # All replicas that generate together: whenever one of them has something new.
        mine = np.flatnonzero((change != 0) & generates)
        mine = mine[np.argsort(at[mine], kind="stable")]
        newest = np.append(np.diff(at[mine]) > 0, True)[: len(mine)]
        for moment, total in zip(at[mine][newest].tolist(), np.cumsum(change[mine])[newest].tolist(), strict=True):
            writer.sample(name, run_pid, moment, total)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def _write_rewards(writer: TraceWriter, stays: pd.DataFrame, responses: pd.DataFrame, place: int) -> None:
    """When CPU workers scored responses; what a judge scored shows as its requests."""
    key = ["step", "response"]
    judged = stays.loc[stays["call"] != 0, key].drop_duplicates() if len(stays) else stays[key]
    rows = responses.merge(judged, on=key, how="left", indicator=True)
    rows = rows[(rows["_merge"] == "left_only") & (rows["scored_at"] > rows["score_start_at"])]
    # What was scored in an earlier step and goes on in this one was shown there.
    shown = rows.groupby("step")["scored_at"].max().cummax().shift()
    rows = rows[~(rows["resumed"] & (rows["scored_at"] <= rows["step"].map(shown)))]
    if rows.empty:
        return
    pid = writer.process("rewards · CPU workers", place)
    workers = Tracks(lambda _, number: writer.track(pid, f"worker {number}", number))
    rows = rows.sort_values("score_start_at", kind="stable")
    times = microseconds(rows[["score_start_at", "scored_at"]]).tolist()
    for row, (start, end) in zip(rows.itertuples(), times, strict=True):
        args = {"response": row.response, "step": row.step, "reward": row.reward, "timed_out": row.timed_out}
        writer.slice(workers.place(0, start, end), f"score {row.response}", "reward", start, end, args)


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
    return pd.concat([_held(own) for _, own in stays.groupby("replica")], ignore_index=True)


def _held(stays: pd.DataFrame) -> pd.DataFrame:
    """The same of one replica."""
    arrived_at, admitted_at, decoding_at, left_at, context, ends, iteration = (
        stays[name].to_numpy()
        for name in (
            "arrived_at", "admitted_at", "decoding_at", "left_at", "start_tokens", "end_tokens", "iteration"
        )
    )  # fmt: skip
    admitted, joined = ~np.isnan(admitted_at), ~np.isnan(decoding_at)
    # A context less the iterations of its replica does not change while it decodes; its KV may have come with it.
    offset = np.where(joined, context + (decoding_at > admitted_at) - iteration, 0)
    zero, one = np.zeros_like(offset), np.ones_like(offset)
    begin, end = arrived_at.min(), left_at.max()
    between = begin + (end - begin) * np.linspace(0, 1, POINTS + 2)[1:-1]
    nothing = np.zeros(POINTS, np.int64)
    parts = [  # moments, and what changes: requests waiting, active, decoding; sums of offsets and prefilled contexts
        (arrived_at, one, zero, zero, zero, zero),
        (admitted_at, -one, one, zero, zero, context),
        (decoding_at, zero, zero, one, offset, -context),
        (left_at, -1 * ~admitted, -1 * admitted, -1 * joined, -offset, -np.where(admitted & ~joined, context, 0)),
        (between, nothing, nothing, nothing, nothing, nothing),
    ]
    at, *changes = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(at, kind="stable")[: int((~np.isnan(at)).sum())]  # what never happened comes last
    at = at[order]
    waiting, active, decoding, offsets, prefill = (change[order].cumsum() for change in changes)
    done = np.zeros(len(at))  # iterations with decodes
    if joined.any():
        known_at = np.concatenate([decoding_at[joined], left_at[joined]])
        known = np.concatenate([iteration[joined], ends[joined] - offset[joined]])
        in_time = np.lexsort((known, known_at))
        done = np.interp(at, known_at[in_time], known[in_time].astype(np.float64))
    kv_tokens = np.rint(offsets + decoding * done + prefill).astype(np.int64)
    found = pd.DataFrame({"active": active, "waiting": waiting, "kv_tokens": kv_tokens, "at": microseconds(at)})
    newest = found["at"].diff(-1).fillna(-1) < 0
    first = stays.iloc[0]
    return found[newest].assign(**{name: first[name] for name in ("replica", "place", "call")})

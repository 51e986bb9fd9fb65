"""The requests of a run on a timeline: what each was doing at which replica, and what the replicas held."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rlsim.errors import ConfigError
from rlsim.report.replica_load import Ints, Stays, held_by_replicas
from rlsim.report.trace_events import Piece, TraceWriter, Tracks, json_texts, microseconds
from rlsim.sim.stays import LEFT


class _End(NamedTuple):
    """Where an arrow begins: a process, a track, and a moment (µs)."""

    pid: int
    tid: int
    at: int


class RequestTracks:
    """Writes the requests of a run, one step after the other.

    The replicas that ever are on the same GPUs make a group of tracks with counters of their own; each request there
    is on one of its tracks. `run_pid` is the group with the counters of all replicas together, `generate` the call that
    makes the responses (others with requests are judges); `places` say where the groups of requests, and that of the
    CPU workers of reward calls, stand.
    """

    STAYS = (
        "call", "response", "replica", "gpu", "gpus", "arrived_at", "admitted_at", "decoding_at", "left_at",
        "start_tokens", "end_tokens", "iteration", "left",
    )  # fmt: skip
    RESPONSES = (
        "response", "position", "finish_at", "paused", "resumed", "score_start_at", "scored_at",
        "reward", "timed_out",
    )  # fmt: skip

    def __init__(self, writer: TraceWriter, run_pid: int, generate: str, places: tuple[int, int]) -> None:
        self._writer, self._run_pid = writer, run_pid
        self._requests_place, self._rewards_place = places
        self._groups: dict[tuple[str, int, int], int] = {}  # call, first GPU, GPUs: number of the group
        self._pids: list[int] = []  # by group
        self._tracks = Tracks(lambda group, number: writer.thread(self._pids[group], f"slot {number}", number))
        self._generate = generate
        self._workers_pid: int | None = None
        self._workers = Tracks(self._worker)
        self._last_scored_at = 0.0
        self._last_step = -1
        self._held: list[Stays] = []  # of steps whose counters are to come: those that one rollout generated for
        self._paused: dict[int, list[_End | None]] = {}  # by prompt: where those that go on in a later step broke off

    def write(self, step: int, stays: pa.Table | None, responses: pa.Table) -> None:
        """The stays (if there are any) and the rewards of one step."""
        judged: set[int] = set()
        if step != self._last_step + 1:  # what went on in a step between is not known
            self._paused.clear()
        self._last_step = step
        if stays is not None:
            here = self._stays(stays)
            pid, tid = self._write_phases(step, here, responses)
            if self._held and _last(self._held[-1]) <= _first(here):
                self.write_counters()
            self._held.append(here)
            judged = set(here.response[here.call > 0].tolist())
            self._note_paused(here, responses, pid, tid)
        self._write_rewards(step, responses, judged)

    def _stays(self, table: pa.Table) -> Stays:
        # Moments that are missing become NaN.
        columns = {name: table[name].to_numpy() for name in self.STAYS if name not in ("call", "left")}
        names, call = _numbered(table["call"])
        known = list(dict.fromkeys([self._generate, *names]))
        call = np.array([known.index(name) for name in names])[call]
        reasons, left = _numbered(table["left"])
        if unknown := set(reasons) - set(LEFT):
            raise ConfigError(f"stays: column left: expected one of {', '.join(LEFT)}, got {unknown.pop()!r}")
        columns["left"] = np.array([LEFT.index(reason) for reason in reasons])[left]
        where = np.stack([call, columns["gpu"], columns["gpus"]])
        kinds, group = np.unique(where, axis=1, return_inverse=True)
        place = np.array([self._group(known[c], gpu, gpus) for c, gpu, gpus in kinds.T.tolist()])[group.ravel()]
        order = np.lexsort((columns["left_at"], columns["arrived_at"], columns["response"], call))
        columns |= {"place": place, "call": call, "tp": columns["gpus"]}
        return Stays(**{name: columns[name][order] for name in Stays._fields})

    def _group(self, call: str, gpu: int, gpus: int) -> int:
        key = call, gpu, gpus
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            which = f"GPU {gpu}" if gpus == 1 else f"GPUs {gpu}–{gpu + gpus - 1}"
            place = self._requests_place + 10 * gpu + int(call != self._generate)
            self._pids.append(self._writer.process(f"{call} · {which} · TP{gpus}", place))
        return self._groups[key]

    # ---- slices and arrows -------------------------------------------------------------------------------------------

    def _write_phases(self, step: int, here: Stays, responses: pa.Table) -> tuple[Ints, Ints]:
        """Slices of all that requests went through; returns the process and the track of each stay."""
        arrived, left = microseconds(here.arrived_at), microseconds(here.left_at)
        admitted = microseconds(np.where(np.isnan(here.admitted_at), here.left_at, here.admitted_at))
        decoding = microseconds(np.where(np.isnan(here.decoding_at), here.left_at, here.decoding_at))
        same = (here.call[1:] == here.call[:-1]) & (here.response[1:] == here.response[:-1])
        follows = np.concatenate([[False], same])  # an earlier stay of the same request
        preempted = np.concatenate([[False], same & (here.left[:-1] == LEFT.index("preempted"))])
        before = np.roll(left, 1)
        moves = follows & ~preempted
        begun = np.where(moves, np.minimum(before, arrived), arrived)

        # A request that is preempted stays on its track.
        first = np.flatnonzero(~preempted)
        last = np.concatenate([first[1:], [len(arrived)]]) - 1
        chain = np.cumsum(~preempted) - 1
        tid = self._tracks.place(here.place[first], begun[first], left[last])[chain]
        pid = np.array(self._pids)[here.place]

        reasons = json_texts(pa.array(LEFT)).take(pa.array(here.left))
        known: dict[str, Piece] = {"response": here.response, "tp": here.tp, "step": step}
        waited = {**known, "context": here.start_tokens}
        args = {
            "response": here.response,
            "tokens": here.end_tokens - here.start_tokens,
            "context": here.end_tokens,
            "tp": here.tp,
            "step": step,
            "left": reasons,
        }
        previous = reasons.take(pa.array(np.maximum(np.arange(len(arrived)) - 1, 0)))
        for name, start, end, about in (
            ("paused", begun, arrived, {**waited, "after": previous}),
            ("queued", arrived, admitted, waited),
            ("prefill", admitted, decoding, waited),
            ("decode", decoding, left, args),
        ):
            self._writer.add_slices((f'"{name} ', here.response, '"'), name, pid, tid, start, end, about)

        # From the last microsecond at the one replica to the first at the other.
        arrow = np.flatnonzero(moves & (before > np.roll(begun, 1)) & (left > begun))
        source = arrow - 1
        self._writer.add_arrows(
            reasons.take(pa.array(source)),
            (pid[source], tid[source], left[source] - 1),
            (pid[arrow], tid[arrow], begun[arrow]),
        )
        self._write_resumed(here, responses, pid, tid, begun, left)
        return pid, tid

    def _write_resumed(self, here: Stays, responses: pa.Table, pid: Ints, tid: Ints, begun: Ints, left: Ints) -> None:
        """Arrows to the requests that were begun in an earlier step."""
        if not self._paused:
            return
        firsts = self._by_response(here, first=True)
        ends: list[_End] = []
        targets: list[int] = []
        for position, ids in _by_prompt(responses, "resumed").items():
            known = self._paused.pop(position, [])
            for end, response in zip(reversed(known), reversed(ids), strict=False):  # finished ones come first
                first = firsts.get(response)
                if end is not None and first is not None and left[first] > begun[first]:
                    ends.append(end)
                    targets.append(first)
        if ends:
            pids, tids, at = np.array(ends).T
            texts = json_texts(pa.array(["resumed"] * len(ends)))
            self._writer.add_arrows(texts, (pids, tids, at), (pid[targets], tid[targets], begun[targets]))

    def _note_paused(self, here: Stays, responses: pa.Table, pid: Ints, tid: Ints) -> None:
        """Remember where responses broke off that go on in a later step."""
        lasts = self._by_response(here, first=False) if any(responses["paused"].to_pylist()) else {}
        arrived, left = microseconds(here.arrived_at), microseconds(here.left_at)
        for position, ids in _by_prompt(responses, "paused").items():
            self._paused[position] = []
            for response in ids:
                i = lasts.get(response)
                shown = i is not None and left[i] > arrived[i]
                self._paused[position].append(_End(int(pid[i]), int(tid[i]), int(left[i]) - 1) if shown else None)

    def _by_response(self, here: Stays, first: bool) -> dict[int, int]:
        """The first or last stay of each response (those of judges apart)."""
        rows = np.flatnonzero(here.call == 0)
        rows = rows[::-1] if first else rows
        return dict(zip(here.response[rows].tolist(), rows.tolist(), strict=True))

    # ---- counters ----------------------------------------------------------------------------------------------------

    def write_counters(self) -> None:
        """What replicas held; those of a rollout that never stops hold responses of several steps at once."""
        if not self._held:
            return
        here = Stays(*map(np.concatenate, zip(*self._held, strict=True)))
        self._held.clear()
        _, replica = np.unique(np.stack([here.place, here.replica]), axis=1, return_inverse=True)
        held = held_by_replicas(here._replace(replica=replica.ravel()))
        pid = np.array(self._pids)[held.place]
        counters = {"active sequences": held.active, "waiting requests": held.waiting, "KV tokens": held.kv_tokens}
        for name, values in counters.items():
            change = np.diff(values, prepend=0)  # also from replica to replica: each begins and ends with nothing
            self._writer.add_samples(name, pid, held.at, values, change != 0)
            # All replicas that generate together: whenever one of them has something new.
            mine = np.flatnonzero((change != 0) & (held.call == 0))
            mine = mine[np.argsort(held.at[mine], kind="stable")]
            newest = np.append(np.diff(held.at[mine]) > 0, True)[: len(mine)]
            self._writer.add_samples(name, self._run_pid, held.at[mine], np.cumsum(change[mine]), newest)

    # ---- rewards -----------------------------------------------------------------------------------------------------

    def _worker(self, key: int, number: int) -> int:  # noqa: ARG002 - one key
        if self._workers_pid is None:
            self._workers_pid = self._writer.process("rewards · CPU workers", self._rewards_place)
        return self._writer.thread(self._workers_pid, f"worker {number}", number)

    def _write_rewards(self, step: int, responses: pa.Table, judged: set[int]) -> None:
        """When CPU workers scored responses; what a judge scored shows as its requests."""
        ids = responses["response"].to_numpy()
        start_at, end_at = responses["score_start_at"].to_numpy(), responses["scored_at"].to_numpy()
        here = ~np.isnan(start_at) & ~np.isnan(end_at) & ~np.isin(ids, list(judged))
        # What was scored in an earlier step and goes on in this one was shown there.
        here &= ~(responses["resumed"].to_numpy(zero_copy_only=False) & (end_at <= self._last_scored_at))
        rows = np.flatnonzero(here & (end_at > start_at))
        if not len(rows):
            return
        start, end = microseconds(start_at[rows]), microseconds(end_at[rows])
        tid = self._workers.place(np.zeros(len(rows), np.int64), start, end)
        timed_out = pa.array(responses["timed_out"].to_pylist()).take(pa.array(rows)).cast(pa.string())
        args: dict[str, Piece] = {
            "response": ids[rows],
            "step": step,
            "reward": responses["reward"].to_numpy()[rows],
            "timed_out": timed_out,
        }
        assert self._workers_pid is not None
        self._writer.add_slices(('"score ', ids[rows], '"'), "reward", self._workers_pid, tid, start, end, args)
        self._last_scored_at = max(self._last_scored_at, float(end_at[rows].max()))


def _first(here: Stays) -> float:
    return float(here.arrived_at[here.call == 0].min(initial=np.inf))


def _last(here: Stays) -> float:
    return float(here.left_at[here.call == 0].max(initial=-np.inf))


def _numbered(texts: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The different texts of a column, and which of them each is."""
    encoded = texts.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _by_prompt(responses: pa.Table, flag: str) -> dict[int, list[int]]:
    """By prompt: the unfinished responses with this flag, or, of those begun in an earlier step, all."""
    flags = responses[flag].to_numpy(zero_copy_only=False)
    if flag == "paused":
        flags = flags & np.isnan(responses["finish_at"].to_numpy())
    rows = np.flatnonzero(flags)
    positions, ids = (responses[name].to_numpy()[rows].tolist() for name in ("position", "response"))
    found: dict[int, list[int]] = {}
    for position, response in zip(positions, ids, strict=True):
        found.setdefault(position, []).append(response)
    return found

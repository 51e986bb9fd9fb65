"""Who held which GPUs when, and for what; and which response was at which replica when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from rlsim.sim.request import NAN, Request

#: Why a response leaves a replica; `preempted`: to the front of its queue; `updated`: the same, as new weights came;
#: `stopped`: generation was over; `paused`: it has used up its budget; `tool`: it calls one, and comes back.
Left = Literal[
    "finished", "preempted", "migrated", "switched", "released", "aborted", "stopped", "paused", "updated", "tool",
]  # fmt: skip

LEFT: tuple[Left, ...] = get_args(Left)
_CODES = {left: code for code, left in enumerate(LEFT)}
_FINISHED = _CODES["finished"]
_pack = Struct("=q4d4q").pack
_FIELDS = np.dtype(
    [
        ("response", "i8"),
        ("arrived_at", "f8"),
        ("admitted_at", "f8"),
        ("decoding_at", "f8"),
        ("left_at", "f8"),
        ("start_tokens", "i8"),
        ("end_tokens", "i8"),
        ("offset", "i8"),
        ("left", "i8"),
    ]
)


def _row(r: Request, left_at: float, code: int) -> bytes:
    tokens = r.prompt_tokens + r.generated
    return _pack(r.id, r.arrived_at, r.admitted_at, r.decoding_at, left_at, r.start_tokens, tokens, r.offset, code)


@dataclass(eq=False)
class Stays:
    """The stays at one replica during one step, in the order in which they end.

    A stay begins when a response arrives in the replica's queue, and ends when the replica lets go of it. One that is
    preempted begins another. A run has as many stays as responses or more, so each is packed into bytes at once.
    """

    step: int
    call: str  # that the replica works for
    replica: int
    gpus: tuple[int, ...]
    _packed: bytearray = field(default_factory=bytearray, init=False)

    def finished(self, requests: Iterable[Request]) -> None:
        packed = self._packed
        for r in requests:
            packed += _row(r, r.finished_at, _FINISHED)

    def add(self, requests: Iterable[Request], left_at: float, left: Left) -> None:
        packed, code = self._packed, _CODES[left]
        for r in requests:
            packed += _row(r, left_at, code)
            r.admitted_at = r.decoding_at = NAN

    def __len__(self) -> int:
        return len(self._packed) // _FIELDS.itemsize

    def columns(self) -> dict[str, NDArray[Any]]:
        """One entry per stay: moments in simulated seconds (NaN for what it did not come to), tokens, and why it ended.

        `start_tokens` and `end_tokens` are its context when it was admitted (arrived, if it never was) and when it
        left, `iteration` is how many iterations with decodes the replica had done when it joined the batch (0 if it
        did not).
        """
        rows = np.frombuffer(self._packed, _FIELDS)
        columns = {
            name: rows[name].copy() for name in ("response", "arrived_at", "admitted_at", "decoding_at", "left_at")
        }
        queued = np.isnan(rows["admitted_at"])
        columns["start_tokens"] = np.where(queued, rows["end_tokens"], rows["start_tokens"])
        columns["end_tokens"] = rows["end_tokens"].copy()
        # A prefill gives the first token with it; KV that arrived joins the batch as it is.
        joined = columns["start_tokens"] + (rows["decoding_at"] > rows["admitted_at"])
        columns["iteration"] = np.where(np.isnan(rows["decoding_at"]), 0, joined - rows["offset"])
        columns["left"] = np.array(LEFT, dtype=object)[rows["left"]]
        return columns


#: The step of spans and stays of a rollout or judge for all steps, until they are dealt to steps after the run.
NO_STEP = -1


class Span(NamedTuple):
    """GPUs busy with one kind of work from one moment to another (simulated seconds)."""

    gpus: tuple[int, ...]
    start_at: float
    end_at: float
    kind: str  # decode, prefill, mixed, switch, or the name of a call
    tp: int
    step: int
    label: str  # which call or replica
    shared: bool = False  # runs beside other work on the same GPUs


@dataclass
class Recorder:
    """Collects the spans and stays of one step into lists that several steps may share; with `kind`, all spans as that.

    Stays are recorded as of the call `call`; `numbers`, where several rollouts share them, are those of replicas.
    """

    spans: list[Span] = field(default_factory=list)
    step: int = 0
    kind: str = ""
    shared: bool = False
    stays: list[Stays] = field(default_factory=list)
    call: str = ""
    numbers: Iterator[int] | None = None

    def add(
        self, gpus: tuple[int, ...], start_at: float, end_at: float, kind: str, tp: int = 1, label: str = ""
    ) -> None:
        """Record one span; one of no length is dropped."""
        if end_at > start_at:
            self.spans.append(Span(gpus, start_at, end_at, self.kind or kind, tp, self.step, label, self.shared))

"""Who held which GPUs when, and for what; and which response was at which replica when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rlsim.sim.stays import Stays

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

    def stays_at(self, replica: int, gpus: tuple[int, ...]) -> Stays:
        stays = Stays(self.step, self.call, replica, gpus)
        self.stays.append(stays)
        return stays

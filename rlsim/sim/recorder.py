"""Who held which GPUs when, and for what."""

from __future__ import annotations

from typing import NamedTuple


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


class Recorder:
    """Collects the spans of one step into a list that several steps may share; with `kind`, all as that kind."""

    def __init__(self, spans: list[Span] | None = None, step: int = 0, kind: str = "", shared: bool = False) -> None:
        self.spans: list[Span] = [] if spans is None else spans
        self._step = step
        self._kind = kind
        self._shared = shared

    def add(
        self, gpus: tuple[int, ...], start_at: float, end_at: float, kind: str, tp: int = 1, label: str = ""
    ) -> None:
        """Record one span; one of no length is dropped."""
        if end_at > start_at:
            self.spans.append(Span(gpus, start_at, end_at, self._kind or kind, tp, self._step, label, self._shared))

"""One ledger of GPU memory: who holds how many bytes on which GPUs, from which phase of a step to which.

Every figure of memory follows from its rows: the peak, what stays beside a rollout engine and so its KV cache, what a
refusal lists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rlsim.errors import CapacityError

GB = 1e9


@dataclass(frozen=True)
class Row:
    """What `holder` has for `part`: `bytes` on each of `gpus`, from phase `start` to `end`, both counted from 0.

    Without phases it is there throughout.
    """

    holder: str
    part: str
    bytes: float
    gpus: frozenset[int]
    start: int = 0
    end: int = sys.maxsize

    @property
    def stays(self) -> bool:
        """Whether it is there throughout."""
        return self.end == sys.maxsize


@dataclass(frozen=True)
class Ledger:
    """Rows of a step; its phases are its calls, by name and in order, each on the GPUs that it has."""

    phases: Mapping[str, tuple[int, ...]]
    rows: tuple[Row, ...]

    def held(self, gpu: int, phase: str) -> list[Row]:
        """What a GPU holds in a phase."""
        at = list(self.phases).index(phase)
        return [row for row in self.rows if gpu in row.gpus and row.start <= at <= row.end]

    def fullest(self, phase: str) -> tuple[int, list[Row]]:
        """The GPU of a phase that holds most then, the first of equal ones, and its rows."""
        held = {gpu: self.held(gpu, phase) for gpu in self._unlike(self.phases[phase])}
        gpu = max(held, key=lambda gpu: (total(held[gpu]), -gpu))
        return gpu, held[gpu]

    def staying(self, gpus: Iterable[int], but: str = "") -> tuple[int, float]:
        """That of some GPUs on which most stays throughout, leaving out one holder's, and these bytes."""
        stays = [row for row in self.rows if row.stays and row.holder != but]
        on = {gpu: sum(row.bytes for row in stays if gpu in row.gpus) for gpu in self._unlike(gpus)}
        gpu = max(on, key=lambda gpu: (on[gpu], -gpu), default=0)
        return gpu, on.get(gpu, 0.0)

    def _unlike(self, gpus: Iterable[int]) -> list[int]:
        """One GPU, the first, of all those that have the same rows."""
        first: dict[tuple[bool, ...], int] = {}
        for gpu in gpus:
            first.setdefault(tuple(gpu in mesh for mesh in self._meshes), gpu)
        return list(first.values())

    @cached_property
    def _meshes(self) -> frozenset[frozenset[int]]:
        return frozenset(row.gpus for row in self.rows)


def total(rows: Iterable[Row]) -> float:
    """The bytes of some rows together."""
    return sum(row.bytes for row in rows)


def does_not_fit(what: str, parts: Mapping[str, float], have_bytes: float, of: str) -> CapacityError:
    """The refusal of what needs more than there is `of` something, with the bytes of each part."""
    listed = " + ".join(f"{part} {size / GB:.2f} GB" for part, size in parts.items() if size)
    return CapacityError(f"{what}: {listed} = {sum(parts.values()) / GB:.2f} GB > {have_bytes / GB:.2f} GB {of}")

"""The peak of something that rises up to it and falls after it, found with few evaluations, some of them at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

_Point = TypeVar("_Point")
_Found = TypeVar("_Found")
_End = TypeVar("_End")


def peak(
    points: Sequence[_Point], value: Callable[[_Found], float]
) -> Generator[list[_Point], list[_Found], dict[_Point, _Found]]:
    """A Fibonacci search over `points` in their order: yields those to evaluate now and takes what was found there.

    It returns everything that was found. Golden section leaves a point; as long as one beside the best is unknown, it
    is evaluated too, so that the best is at least as good as both beside it even where there are several peaks.
    """
    found: dict[int, _Found] = {}
    low, small, large = -1, 1, 1
    while large <= len(points):
        small, large = large, small + large
    while large > 2:  # the peak is one of `large` - 1 points after `low`
        left, right = low + large - small, low + small
        yield from _ask(points, found, (left, right))
        if right < len(points) and value(found[left]) < value(found[right]):
            low = left
        small, large = large - small, small
    yield from _ask(points, found, (low + 1,))
    known = 0
    while found and known < len(found):
        known, best = len(found), max(found, key=lambda at: value(found[at]))
        yield from _ask(points, found, (best - 1, best + 1))
    return {points[at]: found[at] for at in sorted(found)}


def _ask(
    points: Sequence[_Point], found: dict[int, _Found], wanted: Sequence[int]
) -> Generator[list[_Point], list[_Found], None]:
    """Evaluates those of the wanted numbers of points that exist and are not known."""
    new = [at for at in wanted if 0 <= at < len(points) and at not in found]
    if new:
        found.update(zip(new, (yield [points[at] for at in new]), strict=True))


def together(
    searches: Sequence[Generator[list[_Point], list[_Found], _End]],
) -> Generator[list[_Point], list[_Found], list[_End]]:
    """All searches side by side: what all of them want now is evaluated at once. Returns what each returned."""
    ends: dict[int, _End] = {}
    replies: dict[int, list[_Found] | None] = dict.fromkeys(range(len(searches)))
    while replies:
        wanted: dict[int, list[_Point]] = {}
        for number, reply in replies.items():
            try:
                wanted[number] = next(searches[number]) if reply is None else searches[number].send(reply)
            except StopIteration as stop:
                ends[number] = stop.value
        if not wanted:
            break
        answers = iter((yield [point for points in wanted.values() for point in points]))
        replies = {number: [next(answers) for _ in points] for number, points in wanted.items()}
    return [ends[number] for number in range(len(searches))]

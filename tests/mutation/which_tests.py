"""Which tests a mutant meets, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from mutation.coverage_map import FileMap

QUICK_S = 1.0


class CoveringTests:
    """The maps of all files of tests."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[FileMap] = []
        for path in sorted(folder.glob("*.json")):
            found = FileMap(**json.loads(path.read_text()))
            found.lines = {source: {int(n): t for n, t in by.items()} for source, by in found.lines.items()}
            self._maps.append(found)

    def failed(self) -> list[str]:
        """Those that fail without any mutation, and so can show nothing."""
        return [test for found in self._maps for test in found.failed]

    def of(self, source: str, lines: Iterable[int], most_s: float) -> tuple[list[str], float]:
        """The tests for a mutant on these lines, up to the first with which they take more than `most_s`, and their
        seconds.

        First quick ones that run the lines, for half of the time; then all that do, the files most devoted to this
        source first; then the other tests of these files, which may rest on what an earlier one has left in a cache.
        """
        running = list(self._running(source, set(lines)))
        quick = [(found, {t for t in tests if found.seconds[t] < QUICK_S}) for found, tests in running]
        quick.sort(key=lambda pair: sum(pair[0].seconds[t] for t in pair[1]) / self._devotion(source, pair[0]))
        running.sort(key=lambda pair: -self._devotion(source, pair[0]))
        whole = [(found, found.seconds.keys()) for found, _ in running]
        chosen: set[str] = set()
        ordered, total_s = [], 0.0
        for part_s, files in ((most_s / 2, quick), (most_s, [*running, *whole])):
            for found, tests in files:
                for test in sorted(tests, key=lambda t: (found.seconds[t], t)):
                    if total_s < part_s and test not in chosen and test not in found.failed:
                        chosen.add(test)
                        ordered.append(test)
                        total_s += found.seconds[test]
        return ordered, total_s

    def _devotion(self, source: str, found: FileMap) -> float:
        """The share of this source in all lines that a file of tests runs."""
        return len(found.lines[source]) / sum(map(len, found.lines.values()))

    def _running(self, source: str, lines: set[int]) -> Iterator[tuple[FileMap, Set[str]]]:
        for found in self._maps:
            by_line = found.lines.get(source, {})
            tests = {test for line in lines for test in by_line.get(line, ())} & found.seconds.keys()
            if lines & set(found.shared.get(source, ())):
                # At import, or in a fixture of the whole file: all tests that run anything of this source.
                tests |= {test for names in by_line.values() for test in names} & found.seconds.keys()
            if tests:
                yield found, tests

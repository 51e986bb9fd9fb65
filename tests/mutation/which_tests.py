"""Which tests a mutant meets, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from mutation.coverage_map import FileMap


class Tests:
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
        """The tests for a mutant on these lines, and their seconds together, which are at most `most_s` (the first test
        aside).

        First those that run the lines, file after file, the fastest file first; then the other tests of these files,
        which may rest on what an earlier one has left in a cache.
        """
        lines = set(lines)
        ranked = sorted(self._running(source, lines), key=lambda pair: sum(pair[0].seconds[t] for t in pair[1]))
        chosen: dict[str, float] = {}
        total = 0.0
        for found, tests in [*ranked, *((found, found.seconds) for found, _ in ranked)]:
            for test in sorted(tests, key=lambda t: found.seconds[t]):
                if test in chosen or test in found.failed or (chosen and total + found.seconds[test] > most_s):
                    continue
                chosen[test] = found.seconds[test]
                total += found.seconds[test]
        return list(chosen), total

    def _running(self, source: str, lines: set[int]) -> Iterator[tuple[FileMap, set[str]]]:
        for found in self._maps:
            by_line = found.lines.get(source, {})
            tests = {test for line in lines for test in by_line.get(line, ())} & found.seconds.keys()
            if lines & set(found.shared.get(source, ())):
                # At import, or in a fixture of the whole file: all tests that run anything of this source.
                tests |= {test for names in by_line.values() for test in names} & found.seconds.keys()
            if tests:
                yield found, tests

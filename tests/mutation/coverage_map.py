"""Which test runs which line of the code, and how long it takes: what decides which tests a mutant meets, and when."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: What is mutated, and what the named faults (`mutation.named`) touch besides.
MAPPED = ("rlsim/sim/*", "rlsim/cost/*", "rlsim/policies/*", "rlsim/experiment/times.py")

#: Their tests install, start or serve rlsim from outside, so that they would test another copy than the mutated one.
ELSEWHERE = {"test_docs.py", "test_site.py", "test_sweep_ray.py", "test_fit_scripts.py", "test_benchmark.py"}

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", "--tb=no")


@dataclass
class FileMap:
    """Of one file of tests: seconds of each test, and by source file and line the tests that run it.

    What a fixture of a whole file runs, and what is cached, counts for every test of the file (`shared`).
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    shared: dict[str, list[int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class _Contexts:
    """Tells coverage which test runs, as a pytest plug-in."""

    def __init__(self, coverage: Any, found: FileMap) -> None:
        self._coverage, self._found = coverage, found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = time.process_time()
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("shared")
        self._found.seconds[item.nodeid] = round(time.process_time() - start, 4)
        return result  # type: ignore[return-value]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)  # type: ignore[return-value]
        self._coverage.switch_context("shared")
        result = yield
        self._coverage.switch_context(request._pyfuncitem.nodeid)
        return result  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._found.failed.append(report.nodeid)


def map_file(test_file: str, tree: str, out: str) -> None:
    """Run a file of tests in `tree` and write its map to `out`; for a process of its own."""
    from coverage import Coverage

    os.chdir(tree)
    sys.path[:0] = [tree]
    coverage = Coverage(data_file=None, config_file=False, include=[f"{tree}/{mapped}" for mapped in MAPPED])
    found = FileMap()
    coverage.start()
    coverage.switch_context("shared")
    pytest.main([*PYTEST[1:], test_file], plugins=[_Contexts(coverage, found)])
    coverage.stop()
    data = coverage.get_data()
    for path in sorted(data.measured_files()):
        source = str(Path(path).relative_to(tree))
        found.lines[source], found.shared[source] = {}, []
        for line, contexts in data.contexts_by_lineno(path).items():
            tests = sorted(set(contexts) - {"shared", ""})
            if tests:
                found.lines[source][line] = tests
            else:
                found.shared[source].append(line)
    Path(out).write_text(json.dumps(vars(found)))

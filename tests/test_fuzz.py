"""The fuzzer's short run; the long one is `python -m tests.fuzz` (docs/fuzzing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.case import Case, Failure, run_case
from fuzz.targets import TARGETS

#: Few of those that take long.
SLOW = {"report": 1, "report-sweep": 1, "run": 6, "calibration": 3, "trace-generate": 2, "init": 3, "sweep": 4}
CASES = {name: SLOW.get(name, max(4, round(3 * target.share))) for name, target in TARGETS.items()}
MOST_SEEDS = 3


def told(found: object) -> str:
    return f"{found.what} at {found.where}\n{found.story}" if isinstance(found, Failure) else ""


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name: str, tmp_path: Path) -> None:
    """Else mutations of them would show nothing."""
    seeds = TARGETS[name].seeds()
    for seed in seeds[:: -(-len(seeds) // MOST_SEEDS)]:
        found = run_case(Case(TARGETS[name], 0, 0, seed, seed.changeable[0], ()), tmp_path / "case")
        assert found == "accepted", f"{seed.name}: {told(found) or found}"


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_refused_or_give_sane_results(name: str, tmp_path: Path) -> None:
    for index in range(CASES[name]):
        found = run_case(Case.drawn(TARGETS[name], 0, index), tmp_path / "case")
        assert not isinstance(found, Failure) or found.known, f"case {index}: {told(found)}"

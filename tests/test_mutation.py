"""The mutation tester itself; its long runs are `python -m tests.mutation` (docs/mutation.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutation.coverage_map import FileMap
from mutation.named import FAULTS, Fault
from mutation.which_tests import CoveringTests

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.topic}: {fault.what}")
def test_every_named_fault_is_one_change_that_compiles(fault: Fault) -> None:
    code, line = fault.code(ROOT)
    assert code != (ROOT / fault.path).read_text()
    assert 1 <= line <= code.count("\n")
    compile(code, fault.path, "exec")


def test_a_text_that_is_not_there_once_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'import' \(x\) stands there \d+ times, not 1"):
        Fault("x", "y", "rlsim/sim/pool.py", "import", "").code(ROOT)


def test_which_tests_a_mutant_meets(tmp_path: Path) -> None:
    """Quick ones first, then the files that do little else, then their other tests; what fails anyway is left out."""
    devoted = FileMap(
        seconds={"a::slow": 9.0, "a::quick": 0.1, "a::other": 0.2, "a::broken": 0.1},
        lines={"x.py": {5: ["a::slow", "a::quick", "a::broken"]}},
        shared={"x.py": [1]},
        failed=["a::broken"],
    )
    broad = FileMap(
        seconds={"b::quick": 0.3},
        lines={"x.py": {5: ["b::quick"]}, "y.py": {line: ["b::quick"] for line in range(9)}},
        shared={"x.py": [1], "y.py": []},
    )
    for name, found in (("a", devoted), ("b", broad)):
        (tmp_path / f"{name}.json").write_text(json.dumps(vars(found)))
    tests = CoveringTests(tmp_path)
    assert tests.of("x.py", [5], 100.0)[0] == ["a::quick", "b::quick", "a::slow", "a::other"]
    assert tests.of("x.py", [5], 0.3)[0] == ["a::quick", "b::quick"]
    assert tests.of("x.py", [1], 0.1)[0] == ["a::quick"], "run at import: by all that run anything of the file"
    assert tests.of("x.py", [7], 100.0) == ([], 0.0)
    assert tests.failed() == ["a::broken"]

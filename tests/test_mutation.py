"""The table of faults that the tests must notice; `scripts/mutate.py` puts them in."""

import runpy
from typing import Any

import pytest
from conftest import ROOT

FAULTS = tuple(runpy.run_path(str(ROOT / "scripts" / "mutate.py"))["faults"]())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.topic}: {fault.what}")
def test_every_fault_is_one_change_that_compiles_and_has_tests(fault: Any) -> None:
    code = fault.code()
    assert code != (ROOT / fault.path).read_text(encoding="utf-8")
    compile(code, fault.path, "exec")
    assert all((ROOT / test).is_file() for test in fault.tests)


def test_a_text_that_is_not_there_once_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'import' \(switch pricing\) stands there \d+ times, not 1"):
        FAULTS[0]._replace(old="import").code()

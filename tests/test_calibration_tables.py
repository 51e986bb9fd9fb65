"""Tables of a calibration in a CSV file beside its YAML file."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import cases

from rlsim.base.catalogue import names
from rlsim.calibrate.write import write
from rlsim.cost.calibration import load_calibration
from rlsim.cost.tables import csv_of, read_calibration, taken_out
from rlsim.errors import CalibrationError, RlsimError

TABLES = """\
# Tables of mine.yaml
a.0.table,m,n,64,1024,65536
,1,,1,1.5,0.002
,16384,,2.25,3,4.125
b.decode,batch,1,2
,,0.5,0.25
"""
TWO = {"axes": {"m": [1, 16384], "n": [64, 1024, 65536]}, "factor": [1, 1.5, 0.002, 2.25, 3, 4.125]}
ONE = {"axes": {"batch": [1, 2]}, "factor": [0.5, 0.25]}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file with two tables, one of them in a list."""
    path = tmp_path / "mine.yaml"
    path.write_text("a: [{table: see CSV, launch_s: 1}]\nb: {decode: see CSV}\n")
    csv_of(path).write_text(TABLES)
    return path


def test_tables_stand_where_the_file_says_so(mine: Path) -> None:
    """One of two axes and one of one, at their key paths; taken out again they are the same text."""
    data = read_calibration(mine)
    assert data == {"a": [{"table": TWO, "launch_s": 1}], "b": {"decode": ONE}}
    assert taken_out(data) == TABLES.partition("\n")[2]
    assert data == {"a": [{"table": "see CSV", "launch_s": 1}], "b": {"decode": "see CSV"}}


@cases("cost", "a damaged file is named with the table")
def test_a_damaged_file_is_named_with_the_table(mine: Path, old: str, new: str | None, says: str) -> None:
    """With its line, and what was expected there."""
    csv_of(mine).unlink() if new is None else csv_of(mine).write_text(TABLES.replace(old, new))
    with pytest.raises(RlsimError, match=re.escape(says)):
        read_calibration(mine)


def test_every_shipped_calibration_is_small_and_has_its_tables_apart() -> None:
    """A YAML file that one can read, with a CSV beside it; all together at most 3 MB."""
    shipped = names("calibration").values()
    assert all("factor:" not in path.read_text(encoding="utf-8") for path in shipped)
    assert all(path.stat().st_size < 50_000 for path in shipped)
    assert sum(each.stat().st_size for path in shipped for each in path.parent.glob(f"{path.stem}.*")) < 3_000_000


def test_a_changed_table_is_read_again_and_a_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    """Though the YAML file has not changed; what rlsim wrote it replaces."""
    for path in (shipped := names("calibration")["h100-sxm-vllm"], csv_of(shipped)):
        shutil.copy(path, tmp_path / f"mine{path.suffix}")
    mine = tmp_path / "mine.yaml"
    before = load_calibration(mine)
    text = csv_of(mine).read_text(encoding="utf-8")
    csv_of(mine).write_text(text.replace("operators.gemm.table", "operators.other.table"))
    with pytest.raises(CalibrationError, match=r"gemm.table: the CSV file beside has no such table \(got 'see CSV'\)"):
        load_calibration(mine)
    csv_of(mine).write_text(text.replace("operators.gemm.table,m,n,k,256,", "operators.gemm.table,m,n,k,255,"))
    table = load_calibration(mine).operators.gemm.table
    assert table
    assert table.axes["k"][0] == 255
    csv_of(mine).write_text("batch,seconds\n1,2\n")
    with pytest.raises(CalibrationError, match=r"mine\.csv: exists, and rlsim did not write it"):
        write(before, mine)
    csv_of(mine).write_text(text)
    assert write(before, mine) == mine
    assert load_calibration(mine).operators == before.operators

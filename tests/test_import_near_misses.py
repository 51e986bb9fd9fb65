"""Dumps that are nearly a project's: refused with file, row, what was expected and the nearest name; nothing is run."""

import builtins
import collections
import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import cases
from dump_samples import areal_row, jsonl, nemo_row, pt_file, roll_step, slime, slime_sample, tokenizer, trl, verl_row

from rlsim.errors import TraceError
from rlsim.trace.importers import DUMPS, FORMATS, import_trace
from rlsim.trace.importers.safe_pickle import load_torch

Row = dict[str, Any]


#: A row of each layout as its project writes it.
ROWS: dict[str, Row] = {
    "verl": verl_row(1, "p", 3, 0.0), "areal": areal_row(1, 0, "p", 10, 5),
    "nemo-rl": nemo_row(0, [1, 2], [1, 1, 1], 1.0), "roll": roll_step(1, ["one", "one"], [3, 4]),
}  # fmt: skip


@cases("import_near_misses", "one field misspelt")
def test_one_field_misspelt(tmp_path: Path, layout: str, theirs: str, wrong: str) -> None:
    good = ROWS[layout]
    bad = {wrong if key == theirs else key: value for key, value in good.items()}
    path = jsonl(tmp_path / "1.jsonl", [bad])
    with pytest.raises(
        TraceError, match=rf"1.jsonl: looks like the {layout} layout, but '{wrong}' should be '{theirs}'"
    ):
        import_trace(path, tokenizer=tokenizer(tmp_path))
    with pytest.raises(TraceError, match=rf"(not in|looks like) the {layout} layout, .*'{wrong}' should be '{theirs}'"):
        import_trace(path, tokenizer=tokenizer(tmp_path), format=layout)
    # and in a later row, where the layout is known
    path = jsonl(tmp_path / "2.jsonl", [good, bad])
    with pytest.raises(
        TraceError, match=rf"2.jsonl: line 2.*: no '{theirs}', which every row of .*did you mean '{wrong}'"
    ):
        import_trace(path, tokenizer=tokenizer(tmp_path))


@cases("import_near_misses", "wrong types")
def test_wrong_types(tmp_path: Path, layout: str, change: Row, message: str) -> None:
    path = jsonl(tmp_path / "1.jsonl", [ROWS[layout] | change])
    with pytest.raises(TraceError, match=message) as error:
        import_trace(path, tokenizer=tokenizer(tmp_path))
    assert str(path) in str(error.value)


@cases("import_near_misses", "slime wrong values")
def test_slime_wrong_values(tmp_path: Path, change: Row | None, message: str) -> None:
    sample = slime_sample(0, "q", 3, 4, **(change or {}))
    whole = {key: value for key, value in sample.items() if (change or {}).get(key, 0) is not None}
    path = slime(tmp_path / "0.pt", 0, ["x" if change is None else whole])
    with pytest.raises(TraceError, match=message):
        import_trace(path)
    with pytest.raises(TraceError, match=r"a .pt file is read as slime's"):
        import_trace(path, format="verl")


def test_trl_misspelt_column(tmp_path: Path) -> None:
    import pandas as pd

    path = trl(tmp_path / "c", 1, [("one", 2)])
    pd.read_parquet(path).rename(columns={"completion": "completions"}).to_parquet(path)
    with pytest.raises(TraceError, match="looks like the trl layout, but 'completions' should be 'completion'"):
        import_trace(path, tokenizer=tokenizer(tmp_path))
    pd.read_parquet(path).rename(columns={"completions": "completion"}).assign(step=1.5).to_parquet(path)
    with pytest.raises(TraceError, match="row 1: step should be a whole number"):
        import_trace(path, tokenizer=tokenizer(tmp_path))


def test_what_is_wrong_in_a_folder_names_its_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "1.jsonl", [ROWS["verl"]])
    jsonl(tmp_path / "d" / "2.jsonl", [ROWS["areal"]])
    with pytest.raises(
        TraceError, match=r"2.jsonl: line 1: no 'input', which every row of veRL's dump of generations has"
    ):
        import_trace(tmp_path / "d", tokenizer=tokenizer(tmp_path))
    jsonl(tmp_path / "d" / "1.jsonl", [ROWS["verl"]])
    (tmp_path / "d" / "2.jsonl").write_text("")
    with pytest.raises(TraceError, match=r"2.jsonl: the file is empty"):
        import_trace(tmp_path / "d", tokenizer=tokenizer(tmp_path))
    for step, length in ((1, 5), (2, -5)):
        jsonl(tmp_path / "d" / f"{step}.jsonl", [ROWS["verl"] | {"step": step, "n": length}])
    with pytest.raises(TraceError, match=r"d: 2.jsonl: line 1: response_tokens is negative \(got -5\)"):
        import_trace(tmp_path / "d", columns={"response_tokens": "n"})


def test_folders_and_patterns_without_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(TraceError, match="the folder holds no file that ends in"):
        import_trace(tmp_path / "d")
    with pytest.raises(TraceError, match="no file matches"):
        import_trace(tmp_path / "*.jsonl")
    with pytest.raises(TraceError, match="no such file"):
        import_trace(tmp_path / "1.jsonl")
    for name in "ab":
        (tmp_path / "d" / f"{name}.csv").write_text("response_tokens\n5\n")
    with pytest.raises(TraceError, match=r"2 files, such as a.csv, of no layout that a folder may hold"):
        import_trace(tmp_path / "d")


def test_help_names_every_format() -> None:
    from rlsim.cli.common import options

    told = str(options()["trace.import_"]["format"].help)
    assert sorted(told.removeprefix("One of ").partition(";")[0].split(", ")) == sorted(FORMATS)
    assert {dump.format for dump in DUMPS} <= set(FORMATS)


# Files of `torch.save` are read without running anything that they name -----------------------------------------------


class Evil:
    """Calls a function as it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.system, ("touch {mark}",), "system"),
        (subprocess.check_output, (["touch", "{mark}"],), "check_output"),
        (builtins.eval, ("open('{mark}', 'w').close()",), "eval"),
        (builtins.exec, ("open('{mark}', 'w').close()",), "exec"),
        (getattr, (os, "system"), "getattr"),
        (collections.Counter, (["a"],), "collections.Counter"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_malicious_sample_is_refused_and_not_run(
    tmp_path: Path, call: Any, arguments: tuple[Any, ...], name: str, protocol: int
) -> None:
    mark = tmp_path / "ran"

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{mark}", str(mark)) if isinstance(value, str) else value

    if call is getattr:  # a module cannot be pickled; its name is all that is needed
        pickled = b"cbuiltins\ngetattr\n(S'x'\nS'system'\ntR."
    else:
        sample = slime_sample(0, "q", 3, 4, metadata=Evil(call, *map(filled, arguments)))
        pickled = pickle.dumps({"rollout_id": 0, "samples": [sample]}, protocol=protocol)
    with pytest.raises(TraceError, match=rf"refused: it names \S*{name}, which is no plain value.*can run any code"):
        import_trace(pt_file(tmp_path / "0.pt", pickled))
    assert not mark.exists()


def test_a_list_in_the_place_of_a_class_runs_nothing(tmp_path: Path) -> None:
    """The opcodes that call without REDUCE: INST, OBJ and NEWOBJ look names up in the same way."""
    for pickled in (b"(S'true'\nios\nsystem\n.", b"(cos\nsystem\nS'true'\no.", b"\x80\x02cos\nsystem\n)\x81."):
        with pytest.raises(TraceError, match=r"refused: it names os\.system"):
            load_torch(pt_file(tmp_path / "0.pt", pickled))


def test_plain_values_come_through(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True, "ü", b"bytes"], "b": {"c": (1, {2})}, "d": collections.OrderedDict(x=1)}
    for protocol in (2, 4, 5):
        assert load_torch(pt_file(tmp_path / "0.pt", pickle.dumps(plain, protocol=protocol))) == plain
    pickled = pickle.dumps({"rollout_id": 0, "samples": []}, protocol=2)
    with pytest.raises(TraceError, match="cannot be read"):
        load_torch(pt_file(tmp_path / "0.pt", pickled[:-5]))
    with pytest.raises(TraceError, match="samples should be a list of samples, at least one"):
        import_trace(pt_file(tmp_path / "0.pt", pickled))
    with zipfile.ZipFile(tmp_path / "z.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(TraceError, match=r"holds no data\.pkl"):
        load_torch(tmp_path / "z.pt")

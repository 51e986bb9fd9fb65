"""Hostile and careless settings and names: one message, exit code 2, no traceback, nothing obeyed."""

import math
import re
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import Command, Failing, cases, edited
from ruamel.yaml import YAML

import rlsim
from rlsim.base.charts import save_chart
from rlsim.base.output import write_text
from rlsim.base.reading import MOST_BYTES, parse_yaml, read_yaml
from rlsim.base.schema import placed
from rlsim.cli import app
from rlsim.cli.terminal import Console
from rlsim.cost.calibration import load_calibration
from rlsim.errors import ConfigError, RlsimError, printable
from rlsim.experiment.frames import Frames, check_steps
from rlsim.experiment.load import load_experiment
from rlsim.frameworks.verl.config import read_config
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.results.report.lengths import trace_chart
from rlsim.results.sweeps.points import load_sweep
from rlsim.trace import TraceMeta, make_trace, write_trace
from rlsim.trace.generate import load_recipe

#: YAML that no settings file needs, and a part of what is said about it.
HOSTILE = {
    f"seeds: {'9' * 5000}": "not valid YAML",
    f"seeds: 0x{'f' * 5000}": "is beyond 9,223,372,036,854,775,807",
    f"seeds: {'- ' * 3000}a": "sequence entries are not allowed here",
    "{[[a]]: 1}": "not valid YAML",
    "name: a\0b": "not valid YAML",
    "seeds: !!int x": "not valid YAML",
    "workflow: &a\n  <<: *a": "not valid YAML",
}


READERS = {
    "experiment": load_experiment,
    "sweep": load_sweep,
    "cluster": lambda file: load_cluster(str(file)),
    "calibration": load_calibration,
    "model": load_model,
    "recipe": load_recipe,
    "veRL": lambda file: read_config([str(file)], "0.7"),
}


def test_who_changes_what_was_read_changes_it_for_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("seeds: [1, {a: 2}]\n")
    first = read_yaml(file)
    first["seeds"][1]["a"] = 3
    assert (again := read_yaml(file)) == {"seeds": [1, {"a": 2}]}
    assert again.lc.key("seeds") == (0, 0)
    file.write_text("seeds: [4]\n")
    assert read_yaml(file) == {"seeds": [4]}


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_has_the_limits(kind: str, tmp_path: Path) -> None:
    """All of them read by `read_yaml`: each gets its share of the texts."""
    for number, (text, message) in [*enumerate(HOSTILE.items())][list(READERS).index(kind) :: len(READERS)]:
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        began = time.monotonic()
        with pytest.raises(RlsimError, match=rf"{number}\.yaml") as caught:
            READERS[kind](file)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 400
        assert time.monotonic() - began < 5


def test_files_that_are_no_text_of_a_reasonable_size(tmp_path: Path) -> None:
    huge, odd, marked = (tmp_path / f"{name}.yaml" for name in ("huge", "odd", "marked"))
    huge.write_bytes(b"#" * (MOST_BYTES + 1))
    odd.write_bytes(b"name: \xff")
    marked.write_bytes(b"\xef\xbb\xbfname: x")
    for file, message in (
        (huge, "larger than 512 KiB"),
        (odd, "byte 6 is no UTF-8 text"),
        (tmp_path, "is a folder"),
        (Path("/dev/zero"), "is no regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "a\0b", "embedded null"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_yaml(file)
    assert read_yaml(marked) == {"name": "x"}


def test_an_experiment_without_a_proper_name_is_refused_as_a_sweep_too(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text('name: "two\\nlines"')
    with pytest.raises(ConfigError, match="name: expected a name: one line"):
        load_sweep(file)


def test_folded_text_and_dates_are_text() -> None:
    assert parse_yaml(">\n  one\n  line\n\n  and one", "x") == "one line\nand one"
    assert parse_yaml("[2001-12-14, 2001-13-45]", "x") == ["2001-12-14", "2001-13-45"]


def test_tags_do_not_change_what_is_read(tmp_path: Path) -> None:
    text = "{a: !mine [!mine 1, !!binary aGk=], b: !!set {c}, d: !!omap [e: 1], f: !!python/tuple [1, 2]}"
    read = {"a": ["1", "aGk="], "b": {"c": None}, "d": [{"e": 1}], "f": [1, 2]}
    assert parse_yaml(text, "x") == read
    (tmp_path / "x.yaml").write_text("systems: !mine [verl]")
    assert placed(read_yaml(tmp_path / "x.yaml")["systems"])[0].place == "1:17"


def test_text_that_no_file_can_hold_is_written_all_the_same(tmp_path: Path) -> None:
    write_text(tmp_path / "x.txt", parse_yaml('"a\\ud800"', "x"))
    assert (tmp_path / "x.txt").read_text() == "a\\ud800"


LINK = "{name: l, bytes_per_s: 450 GB/s, latency_s: 1 us}"
CLUSTER = f"{{gpu: h100-sxm, nodes: 1, gpus_per_node: 8, intra: {LINK}, inter: {LINK}, host: {LINK}}}"


@cases("experiments", "figures that cannot be meant")
def test_figures_that_cannot_be_meant(failing: Failing, key: str, value: str, message: str) -> None:
    assert message in failing("--set", f"{key}={value.replace('MANY', '1, ' * 2000)}", base=edited(("8xh100", CLUSTER)))


def test_no_run_succeeds_with_times_that_are_none() -> None:
    steps = pd.DataFrame({"step_time_s": [1.0, 2.0], "gen_time_s": [1.0, 1.0], "trained": 8})
    fine: Frames = {"steps": steps, "calls": pd.DataFrame(), "spans": pd.DataFrame()}
    check_steps(fine, "x")
    for value in (math.nan, math.inf, -1.0):
        wrong = {**fine, "steps": steps.assign(gen_time_s=[1.0, value])}
        with pytest.raises(ConfigError, match=r"system 'x': the column gen_time_s of steps comes out as"):
            check_steps(wrong, "system 'x'")


# ---- names in pages and terminals ------------------------------------------------------------------------------------

NAME = "x</script><script>alert(1)</script><!-- \u2028 <img src=x onerror=alert(1)> \x1b[31m\nrlsim: error: [/bold]"
ROWS = pd.DataFrame(
    {
        "prompt_id": range(20),
        "sample_id": 0,
        "response_tokens": range(1, 21),
        "task": ["</script><script>alert(2)</script>", "<!--\x1b[2J<script>[/x]"] * 10,
    }
)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    path = tmp_path / "named.parquet"
    write_trace(make_trace(ROWS, TraceMeta(name=NAME)), path)
    return path


def test_a_name_stays_text_in_a_chart(named: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = named.with_suffix(".html")
    app(["trace", "describe", str(named), "--chart", str(page)], standalone_mode=False)
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<script", text)) == len(re.findall(r"</script", text)) == 2
    assert "<!--" not in text
    assert "<img src=x" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u2029]", text)
    assert "default-src 'none'" in text
    printed = capfd.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "alert(1)" in printed.out
    assert not re.search(r"^ *rlsim: error", printed.out, re.MULTILINE)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_of_a_name_with_control_characters(suffix: str, tmp_path: Path) -> None:
    """Such a name once ended the process that draws."""
    path = tmp_path / f"chart{suffix}"
    save_chart(trace_chart(make_trace(ROWS, TraceMeta(name=NAME))), path)
    if suffix == ".svg":
        drawn = path.read_text(encoding="utf-8").replace("<!-- rlsim -->", "", 1)
        assert not re.search(r"<(script|img|b)\b|<!--|\x1b", drawn)


def test_the_terminal_shows_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("system \x1b[31m", title="\x9b31m[/b]")
    table.add_row("a\x07\x1b]0;gone\x07[red]b[/x]\u202e")
    Console(width=200).print(table, "\x1b[2J")
    printed = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed)
    assert "a\\x07\\x1b]0;gone\\x07[red]b[/x]\\u202e" in printed
    assert printable("a\tb\n") == "a\tb\n"


def test_no_command_prints_past_the_terminal() -> None:
    files = (Path(rlsim.__file__).parent / "cli").glob("*.py")
    assert [f.name for f in files if "from rich.console import Console\n" in f.read_text(encoding="utf-8")] == []


@pytest.mark.usefixtures("folder")
def test_an_error_shows_control_characters(call: Command) -> None:
    code, out, error = call("run", "\x1b[31m.yaml")
    assert (code, out) == (2, "")
    assert error.startswith("rlsim: error: \\x1b[31m.yaml: no such file")


@pytest.mark.parametrize(
    "text",
    [
        "[1, -2.5, 1e-3, 4E+2]",
        "{a: [1, 2, 3, 4], b: [1,2,\n  3, 4 ] # why\n, c: '[1, 2, 3, 4]'}",
        "[[1, 2, 3, 4], [1, 2, 3, x], [1, 2, 3, 0x10], [1, 2, 3, 4,], [1, 2, 3, .5]]",
        "a: [1, 2, 3, 1_0]\nb: &numbers [5, 6, 7, 8]\nc: *numbers\nd: text [1, 2, 3, 4]",
    ],
)
def test_lists_of_numbers_are_read_as_they_stand(text: str) -> None:
    expected = YAML(typ="safe", pure=True).load(text)
    found = parse_yaml(text, "x")
    assert found == expected
    assert repr(found) == repr(expected)  # whole numbers and others apart

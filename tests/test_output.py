"""Nothing of the user's is lost: what is replaced, what is refused, and what a crash, a full disk or others leave."""

import gzip
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Command, cases, contents

import rlsim
from rlsim.base.charts import save_chart
from rlsim.base.output import atomic_path, check_file, check_own_file, results_folder
from rlsim.calibrate.importers import import_calibration
from rlsim.errors import CalibrationError, CatalogueError, ConfigError
from rlsim.experiment.columns import TABLES
from rlsim.experiment.result import Result, read_result
from rlsim.results.report.chosen_run import choose_run


@pytest.fixture(scope="module")
def new() -> Result:
    return rlsim.run({**TINY, "name": "new"})


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of an experiment called old."""
    folder = tmp_path_factory.mktemp("results") / "old"
    rlsim.run({**TINY, "name": "old"}, out=folder)
    return folder


@pytest.fixture
def copy(old: Path, tmp_path: Path) -> Path:
    shutil.copytree(old, tmp_path / "out")
    return tmp_path / "out"


def name_in(folder: Path) -> str:
    """The name of the experiment whose results, all of them, are in a folder."""
    return str(read_result(folder).manifest["experiment"]["name"])


@pytest.fixture
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*_: object) -> None:
        raise AssertionError("simulated before it was known that the results can be written")

    monkeypatch.setattr("rlsim.experiment.simulator.Simulator.simulate", simulate)


# -------------------------------------------------------------------------------------------- directories of results


@pytest.mark.usefixtures("no_simulation")
@cases("experiments", "a directory of something else is left alone")
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "app.js").write_text("years of work")
    (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="choose another directory"):
        rlsim.run(TINY, out=tmp_path)
    assert contents(tmp_path) == before


def test_a_file_is_rlsims_by_its_mark_alone_and_others_stay(
    copy: Path, new: Result, tmp_path: Path, call: Command
) -> None:
    notes = "<p>My notes. # Fitted by hand: see `rlsim calibrate`; simulator: rlsim 1</p>"
    (copy / "plots").mkdir()
    mine = {copy / "report.html": notes, copy / "notes.txt": "mine", copy / "plots" / "a.py": "mine too"}
    for path, text in mine.items():
        path.write_text(text)
    (copy / "timeline.json.gz").write_bytes(gzip.compress(b"years of work", mtime=0)[:10] + b"\xff" * 40)
    new.write(copy)
    assert name_in(copy) == "new"
    assert {path: path.read_text() for path in mine} == mine
    assert (copy / "timeline.json.gz").exists()
    for name, text in (
        ("mycal.yaml", "# Fitted by Alice\n"),
        ("cluster.yaml", "# Ours\n# This machine, as `rlsim calibrate` found it.\n"),
        ("chart.svg", notes),
        ("timeline.json", notes),
        ("timeline.json.gz", "damaged"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="exists, and rlsim did not write it"):
            check_own_file(tmp_path / name)
    for _ in range(2):  # a timeline replaces its own
        assert call("timeline", copy, "--out", copy / "mine.json").code == 0


@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed_and_kept_as_the_directory_itself_is(
    tmp_path: Path, old: Path, new: Result, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "disk" / "results", tmp_path / "link"
    (tmp_path / "disk").mkdir()
    if there:
        shutil.copytree(old, target)
    link.symlink_to(target)
    new.write(link)
    assert link.is_symlink()
    assert name_in(target) == name_in(link) == "new"
    monkeypatch.chdir(target)
    new.write(".")
    assert name_in(Path()) == name_in(target) == "new"
    assert Path.cwd() == target
    assert [path.name for path in target.parent.iterdir()] == ["results"]


def test_run_writes_or_prints_all_that_it_says_as_json(folder: Path, call: Command) -> None:
    Path("tiny.yaml").write_text(json.dumps(TINY))
    printed = json.loads(call("run", "tiny.yaml", "--json", "-").out)
    assert call("run", "tiny.yaml", "--json", "all.json").out.rstrip().endswith(printed["headlines"][""][-1])
    assert json.loads(Path("all.json").read_text()) == printed
    assert printed["directory"] == f"results/{TINY['name']}"
    assert [row["system"] for row in printed["summary"]] == ["verl"]
    assert printed["notes"] == list(rlsim.read_result(printed["directory"]).notes)


def test_runs_that_write_the_same_directory_take_turns_and_what_was_made_of_the_old_goes(
    copy: Path, new: Result
) -> None:
    rlsim.write_timeline(copy, copy / "timeline.json.gz")
    (copy / "report.html").write_text('<html><meta name="generator" content="rlsim 1.0"></html>')
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(new.write, [copy] * 12))
    assert name_in(copy) == "new"
    assert {path.name for path in copy.iterdir()} == {"manifest.json", *(f"{table}.parquet" for table in TABLES)}


NAMES = ["a/b", "a-b", "a\\b", ".a-b", "a//b", "../x", "/x", "a/../../x", r"..\x", "..", "."]


def test_results_stay_in_their_folder_whatever_the_name_and_others_have_other_folders() -> None:
    folders = [results_folder(name) for name in NAMES]
    assert len(set(folders)) == len(NAMES)
    assert folders[1] == Path("results/a-b")
    assert {folder.parent for folder in folders} == {Path("results")}
    assert not {folder.name for folder in folders} & {"", ".", ".."}


def test_results_are_replaced_by_those_of_the_same_experiment_alone(
    tmp_path: Path, call: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was replaced is said, with the settings that differ."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**TINY, "name": name}))

    def told(*options: str) -> str:
        (line,) = [line for line in call("run", "mine.json", *options).out.splitlines() if line.startswith("results: ")]
        return line

    assert told() == "results: results/mine"
    again = told()
    assert again == "results: results/mine (in place of earlier ones, of the same settings)"
    (tmp_path / "results" / "mine" / "report.html").write_text("")
    changed = told("--seeds", "2")
    assert "(in place of earlier ones and their report, of other settings: " in changed
    assert changed.endswith("seeds [0] there, [0, 1] here)")
    refused = call("run", "other.json", "--out", "results/mine")
    assert refused.code == 2
    assert "results/mine holds the results of another experiment, mine, and this one is other" in refused.err
    assert rlsim.read_result("results/mine").manifest["experiment"]["name"] == "mine"


def test_results_can_be_read_while_they_are_replaced(new: Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    new.write(folder)
    over, problems = threading.Event(), list[Exception]()

    def write() -> None:
        try:
            for _ in range(12):
                new.write(folder)
        finally:
            over.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not over.is_set():
        try:
            rlsim.read_result(folder)
            reads += 1
        except ConfigError as error:
            problems.append(error)
    writer.join()
    assert (problems, reads > 3) == ([], True)


def swept(out: Path) -> dict[str, str]:
    """In a worker of a pool, which may start no processes."""
    return rlsim.sweep(TINY, axes={"trace.cap": ["64"]}, out=out, workers=2).failed


def test_a_worker_of_a_pool_sweeps_by_itself(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(swept, (tmp_path / "sweep",)) == {}


class Killed(BaseException):
    """As if the process were gone."""


@pytest.mark.parametrize("first", [True, False])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_results(
    tmp_path: Path, old: Path, new: Result, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    found = []
    for moment in range(100):
        target = tmp_path / str(moment)
        if not first:
            shutil.copytree(old, target)
            (target / "report.html").write_text('<meta name="generator" content="rlsim 1.0">')
        with monkeypatch.context() as patch:
            left = iter(range(moment))

            def crash(*_: object, left: Any = left, **__: object) -> None:
                if next(left, None) is None:
                    raise Killed

            for where in ("replace", "rename", "unlink", "rmdir", "write_bytes", "mkdir"):
                real = getattr(Path, where)
                patch.setattr(Path, where, lambda *a, real=real, **k: (crash(), real(*a, **k))[1])
            patch.setattr(shutil, "rmtree", crash)
            try:
                new.write(target)
            except Killed:
                done = False
            else:
                done = True
        if not first or (target / "manifest.json").exists():
            found.append(name_in(target))
        new.write(target)  # whatever it left behind
        assert name_in(target) == "new"
        assert not list(target.glob(".rlsim-*"))
        assert (target / "report.html").exists() is False
        if done:
            break
    assert done
    assert found == sorted(found, reverse=True)  # old, then new from one moment on
    assert {*found} == ({"new"} if first else {"old", "new"})


def test_a_first_write_that_is_interrupted_among_its_tables_is_begun_again(tmp_path: Path, new: Result) -> None:
    target = tmp_path / "results"
    with pytest.MonkeyPatch.context() as patch:
        moved = iter([False, True])
        real = Path.replace

        def replaced(path: Path, to: Path) -> Path:
            if next(moved):
                raise KeyboardInterrupt
            return real(path, to)

        patch.setattr(Path, "replace", replaced)
        with pytest.raises(KeyboardInterrupt):
            new.write(target)
    assert [path.suffix for path in target.iterdir()] == [".parquet"]
    new.write(target)
    assert name_in(target) == "new"


# ---------------------------------------------------------------------------------------- what cannot be written to


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("command", ["run", "sweep"])
@cases("experiments", "a bad directory is told before the work")
def test_a_bad_directory_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Command, command: str, out: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("loop").symlink_to("loop")
    Path("tiny.yaml").write_text(json.dumps(TINY))
    before = sorted(tmp_path.rglob("*"))
    code, _, shown = call(command, "tiny.yaml", "--out", out)
    assert (code, shown.count("\n")) == (2, 1)
    assert shown.startswith("rlsim: error: ")
    assert why in shown
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs file modes")
@pytest.mark.usefixtures("no_simulation")
def test_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:  # root may write anywhere
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    for write in (rlsim.run, rlsim.sweep):
        with pytest.raises(ConfigError, match=r"out: cannot be written: Permission denied"):
            write(TINY, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit for files")
def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(
    copy: Path, tmp_path: Path, call: Command
) -> None:
    """As far as a process can tell: none of its files may grow beyond a kilobyte."""
    import resource

    (tmp_path / "tiny.yaml").write_text(json.dumps({**TINY, "name": "old"}))
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for arguments in (
        ["run", tmp_path / "tiny.yaml", "--out", copy],
        ["run", tmp_path / "tiny.yaml", "--out", tmp_path / "a" / "b"],
        ["timeline", copy],
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            code, out, err = call(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert ": cannot be written: " in err
        assert contents(tmp_path) == before
    assert name_in(copy) == "old"
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "buffered"), [(["list", "gpus"], "1"), (["--help"], ""), (["--version"], "")])
def test_standard_output_that_is_full(arguments: list[str], buffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rlsim", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "rlsim: error: standard output: cannot be written: No space left on device\n"


# ------------------------------------------------------------------------------------------------------ single files


def test_files_follow_links_and_keep_them(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "far" / "page.html")
    with atomic_path(tmp_path / "link.html") as path:
        path.write_text("new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "far" / "page.html").read_text() == "new"
    assert len(list(tmp_path.rglob("*"))) == 3
    (tmp_path / "link.json").symlink_to(tmp_path / "gone" / "x.json")
    with pytest.raises(ConfigError, match=r"link.json: the folder .*gone does not exist"):
        check_file(tmp_path / "link.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    with atomic_path(pipe) as path:
        path.write_text("text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    with atomic_path(tmp_path / ("n" * 250)) as path:
        path.write_text("text")
    with pytest.raises(ConfigError, match="File name too long"):
        check_file(tmp_path / ("n" * 300))


def test_what_a_link_leads_to_is_not_written_over(folder: Path, call: Command) -> None:
    Path("lengths.parquet").symlink_to("lengths.csv")
    before = contents(folder)
    code, _, shown = call("trace", "import", "lengths.csv", "lengths.parquet")
    assert (code, shown.count("\n"), contents(folder)) == (2, 1, before)
    assert "is what the command reads" in shown


def test_plan_finds_a_policy_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Command) -> None:
    monkeypatch.chdir(tmp_path)
    Path("far").mkdir()
    Path("far/beside_plan.py").write_text(
        "from rlsim import RolloutControl\n\n\nclass Mine(RolloutControl):\n    pass\n"
    )
    Path("far/tiny.yaml").write_text(json.dumps({**TINY, "systems": ["beside_plan:Mine"]}))
    code, _, shown = call("plan", "far/tiny.yaml", "--evaluations", "5", "--apply", "--quiet")
    assert code == 0, shown


def test_a_seed_that_is_not_there_and_a_file_that_cannot_be_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rlsim.run({**TINY, "seeds": [0, 5]})
    with pytest.raises(CatalogueError, match=r"no seed 3, only 0, 5$"):
        choose_run(result, seed=3)

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("rlsim.experiment.columns.file_sha256", refuse)
    with pytest.raises(ConfigError, match=r"steps.parquet: not a readable .*Permission denied"):
        read_result(copy)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_standard_output_may_be_a_pipe(copy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlsim", "compare", str(copy), "--json", "/dev/stdout"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")


def test_files_that_rlsim_names_are_replaced_only_if_it_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "h100-sxm-vllm.yaml").write_text("mine: true\n")
    nccl = {"gpu": "h100-sxm", "engine": "vllm", "base": "h100-vllm"}
    with pytest.raises(CalibrationError, match=r"h100-sxm-vllm.yaml: exists, and rlsim did not write it"):
        import_calibration("nccl-tests", [tmp_path / "log"], **nccl, out=tmp_path)
    (tmp_path / "h100-sxm-vllm.yaml").write_text("# Fitted by rlsim calibrate import; change that, not this.\n")
    with pytest.raises(CalibrationError, match=r"log: no such"):
        import_calibration("nccl-tests", [tmp_path / "log"], **nccl, out=tmp_path)
    for chart in (tmp_path / "fit.html", tmp_path / "fit.svg", tmp_path / "fit.png"):
        chart.write_text("mine")
        with pytest.raises(ConfigError, match="exists, and rlsim did not write it"):
            check_own_file(chart)
        save_chart({"data": {"values": [{"a": 1}]}, "mark": "point"}, chart)
        assert check_own_file(chart) == chart


# ------------------------------------------------------------------------------------------------- malformed records


READERS = (["compare"], ["report"], ["timeline"])


def test_a_record_that_was_changed_or_is_of_another_version_is_told(copy: Path, call: Command) -> None:
    whole = (copy / "manifest.json").read_text()
    for old, new, why in (
        ('"format": 2', '"format": 1', "written by another version of rlsim: run it again"),
        ('"name": "old"', '"name": "new"', "damaged, or changed after rlsim wrote it"),
    ):
        (copy / "manifest.json").write_text(whole.replace(old, new, 1))
        for reader in READERS:
            code, _, shown = call(*reader, copy)
            assert (code, shown.count("\n")) == (2, 1)
            assert f"{copy / 'manifest.json'}: {why}" in shown


@cases("results_folder", "arguments of another type are told")
def test_arguments_of_another_type_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rlsim.run(**{"source": TINY, **given})
    assert str(raised.value).startswith(message)

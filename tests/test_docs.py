"""The documentation is true: generated parts are fresh, examples run, links and named files exist.

Every fenced block of a page says what it is. In one temporary folder a page, from top to bottom:

- `<!-- file: NAME -->` before a block writes it there; a Python file is only written, not run.
- `<!-- file: NAME, tested with NEW for OLD and … -->`: smaller than shown, where nothing printed of it is.
- ```sh blocks run, line by line; ```python blocks run as scripts. Scripts and lines that only call `rlsim` run in this
  process, as starting one for each of them takes longer than most do, and so do points of sweeps; all other lines run
  in processes of their own.
- `<!-- run with: OPTIONS -->` adds options to the `rlsim` lines of a block that run or search (small sizes). Where no
  output is shown, `rlsim run` draws no worlds.
- `<!-- in a checkout -->` runs a block in the repository; `<!-- fails -->` expects exit code 2.
- `<!-- output -->` before a ```text block: each of its lines occurs in the output of the block before.
- `<!-- same as: FILE -->`: the block is that file of the repository; `<!-- systems -->`: an experiment's `systems`.
- `<!-- not run: WHY -->` leaves a block alone.
"""

import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from conftest import ROOT, TINY, Command

import rlsim
from evidence.validate.page import with_tables
from rlsim.base.reading import read_yaml
from rlsim.experiment.systems import parse_systems

PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMES = [page.name for page in PAGES]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = set("|&;<>()$`\\*?[~")  # what means something to a shell
QUOTED = r"""'[^']*'|"[^"$`\\]*\""""  # but not there
ROOMS = r"(?:rlsim|docs|scripts|traces|calibration|experiments|tests)/[\w./-]+\w"


class Block(NamedTuple):
    """A fenced block: its language, its text, what the comment before it says, and the line it begins on."""

    language: str
    text: str
    kind: str
    value: str
    line: int
    shown: bool  # its output is in the next one


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        kind, _, value = (match["mark"] or "").partition(": ")
        line = text.count("\n", 0, match.start("language")) + 1
        shown = text[match.end() :].lstrip("\n").startswith("<!-- output -->")
        found.append(Block(match["language"], match["text"], kind, value, line, shown))
    return found


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_core() -> Iterator[None]:
    """`--workers` is by default one for each core: to start a second one takes longer than these examples do."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, {sorted(cores)[own]})
    yield
    os.sched_setaffinity(0, cores)


class Runner:
    """Runs the blocks of one page in a folder of its own."""

    def __init__(self, folder: Path, call: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rlsim, self.monkeypatch = call, monkeypatch
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setenv("COLUMNS", "120")
        self.folder = folder / "page"
        self.folder.mkdir()
        self.output = ""
        tools = folder / "bin"
        tools.mkdir()
        self._tool(tools / "rlsim", "-P -m rlsim")  # -P: as an installed script, without the working directory
        self._tool(tools / "python", "")
        self.environment = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.environment.pop("PYTHONPATH", None)

    @staticmethod
    def _tool(path: Path, options: str) -> None:
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {options} "$@"\n', encoding="utf-8")
        path.chmod(0o755)

    def run(self, block: Block) -> None:
        match block.language, block.kind:
            case _, "not run":
                pass
            case _, "file":
                name, _, smaller = block.value.partition(", tested with ")
                text = block.text
                for new, old in (one.split(" for ") for one in smaller.split(" and ") if one):
                    assert text.count(old) == 1, old
                    text = text.replace(old, new)
                (self.folder / name).write_text(text, encoding="utf-8")
            case _, "same as":
                assert block.text == (ROOT / block.value).read_text(encoding="utf-8")
            case "yaml", "systems":
                path = self.folder / "systems-of-the-page.yaml"
                path.write_text(block.text, encoding="utf-8")
                assert parse_systems(read_yaml(path)["systems"], str(path))
            case "text", "output":
                shown = " ".join(self.output.split())
                for line in block.text.splitlines():
                    assert " ".join(line.split()) in shown, f"not in the output: {line}\n{self.output}"
            case "sh", _:
                self.output = "".join(self.shell(line, block) for line in block.text.splitlines() if line.strip())
            case "python", "":
                self.output = self.script(block.text)
            case _:
                pytest.fail(f"a block of {block.language or 'no language'} that no comment explains")

    def shell(self, line: str, block: Block) -> str:
        options = [block.value] if block.kind == "run with" else []
        if line.startswith("rlsim run ") and not block.shown and "--certainty" not in line:
            options.append("--certainty 0")
        if options and line.startswith(("rlsim run ", "rlsim plan ")):
            command, hash_, comment = line.partition("#")
            line = f"{command} {' '.join(options)} {hash_}{comment}"
        folder = ROOT if block.kind == "in a checkout" else self.folder
        expected = 2 if block.kind == "fails" else 0
        if line.startswith("rlsim ") and not SHELL & set(re.sub(QUOTED, "", line).partition("#")[0]):
            return self.command(line, folder, expected)
        return self.process(["sh", "-c", line], folder, expected)

    @contextmanager
    def here(self, folder: Path) -> Iterator[None]:
        """As in a process of its own, which has seen no code of the page before."""
        importlib.invalidate_caches()
        self.monkeypatch.chdir(folder)
        yield
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]

    def command(self, line: str, folder: Path, expected: int) -> str:
        with self.here(folder):
            done = self.rlsim(*shlex.split(line, comments=True)[1:])
        assert done.code == expected, f"{line}\n{done.out}{done.err}"
        return done.out + done.err

    def script(self, text: str) -> str:
        printed = io.StringIO()
        with self.here(self.folder), self.monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("default")
            patch.setattr(sys, "path", [str(self.folder), *sys.path])
            with redirect_stdout(printed), redirect_stderr(printed):
                exec(compile(text, "script", "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    def process(self, command: list[str], folder: Path, expected: int) -> str:
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, encoding="utf-8", timeout=300
        )
        assert done.returncode == expected, f"{command[-1]}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.mark.ci
@pytest.mark.usefixtures("one_core", "in_process")
@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, tmp_path: Path, call: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tmp_path, call, monkeypatch)
    for block in blocks(ROOT / "docs" / name):
        try:
            runner.run(block)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"docs/{name}:{block.line}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
def test_generated_parts_are_fresh(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert script("make_reference").refreshed(text) == text, "run `python scripts/make_reference.py`"


def test_every_generated_part_stands_in_a_page() -> None:
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"<!-- (?:generated|on the site): ([\w-]+) -->", everything)
    assert sorted(found) == sorted(script("make_reference").PARTS)
    made = script("make_reference").for_site((ROOT / "docs" / "cli.md").read_text(encoding="utf-8"))
    assert "## `rlsim init`" in made
    assert "on the site" not in made


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        page = ROOT / "docs" / (path or name)
        assert page.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("name", NAMES)
def test_named_files_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for path in re.findall(rf"`({ROOMS})`", text):
        if "NAME" not in path and not path.endswith(("-", ".")):
            assert (ROOT / path).exists(), path


def test_index_names_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if name not in text} == {"index.md"}


def test_results_page_names_every_key_of_the_manifest_and_column_of_the_summary() -> None:
    result = rlsim.run(TINY, seeds=2)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    for section, names in (("Manifest", result.manifest), ("Summary", result.summary().columns)):
        first_cells = "".join(re.findall(r"^\|([^|]*)\|", sections[section], re.MULTILINE))
        assert set(re.findall(r"`(\w+)`", first_cells)) == set(names)


@pytest.mark.slow
def test_what_asynchrony_pays_is_what_a_run_says() -> None:
    draw = script("draw_asynchrony")
    names = ("asynchrony", "elastic_split")
    summaries = [rlsim.run(ROOT / "experiments" / f"{name}.yaml").summary() for name in names]
    assert draw.page_with(*summaries) == with_tables(draw.PAGE.read_text(encoding="utf-8"), draw.PAGE.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agents", "speculation"])
def test_steps_in_the_tables_of_a_page_are_what_a_run_says(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    told = {number for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for number in re.findall(r"[\d,.]+", row)}
    summary = rlsim.run(ROOT / "experiments" / f"{name}.yaml").summary()
    shown = summary[(summary["system"] != "shortest-first") | (summary["case"] == "kv idle")]
    assert {f"{step_s:,.0f}" for step_s in shown["step_time_s"]} <= told


@pytest.mark.ci
def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            assert cell["outputs"] == [], "outputs go stale: they are not committed"
    shown = names["result"]._repr_html_()  # type: ignore[attr-defined]
    assert all(name in shown for name in ("verl-tp1", "verl-tp4", "pat", "responses/s"))

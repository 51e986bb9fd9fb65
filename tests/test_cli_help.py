"""Every command explains itself with an example that it would accept; TAB completes names."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer.main
from conftest import Command as Run
from conftest import cases

import rlsim
from rlsim.base import catalogue
from rlsim.cli import app, complete

Command = Any  # typer brings its own click, whose classes have no public name


def commands(command: Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """The command itself and all below it, by path."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT))
IDS = [" ".join(path) or "rlsim" for path in COMMANDS]


def examples(command: Command) -> list[str]:
    """Its examples, each on a line of its own."""
    text = f"{command.help or ''}\n{command.epilog or ''}"
    return re.findall(r"^ *Example: *(rlsim .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_help_has_an_example(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert (command.help or "").strip()
    assert examples(command), "no line 'Example: rlsim …' in the docstring or epilog"
    assert all(line.split()[1 : len(path) + 1] == list(path) for line in examples(command))


@pytest.mark.parametrize("line", [line for command in COMMANDS.values() for line in examples(command)])
def test_examples_are_accepted(line: str) -> None:
    """Options and arguments exist, nothing required is missing."""
    command, words = ROOT, shlex.split(line)[1:]
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    command.make_context(" ".join(path), words)


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        if parameter.name not in ("help", "install_completion", "show_completion"):
            assert parameter.help, parameter.name


#: Commands that compute nothing: what they print is what they are asked for, or they draw what others computed.
NOTHING = {(), ("init",), ("report",), ("timeline",), ("trace",)}


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_what_computes_tells_scripts(path: tuple[str, ...]) -> None:
    """Only these compute for long in parts that are apart: a search for plans is one chain, and what measures needs the
    machine to itself."""
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    if path not in NOTHING and path[0] != "list":
        assert options >= {"--json", "--quiet"}
    assert ("--workers" in options) == (path in (("run",), ("sweep",), ("tune",)))


Completed = Callable[[str], list[str]]


@pytest.fixture
def completed(call: Run, monkeypatch: pytest.MonkeyPatch) -> Completed:
    """What bash would offer at the end of a line."""

    def offered(line: str) -> list[str]:
        monkeypatch.setenv("_RLSIM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return call().out.split()

    return offered


def test_bash_completes_experiments_and_falls_back_to_files(completed: Completed) -> None:
    assert completed("rlsim run ") == list(catalogue.names("experiments"))
    assert completed("rlsim run pat_v") == ["pat_vs_static"]
    assert completed("rlsim run no-such-") == []


def test_bash_asks_a_process_of_its_own() -> None:
    asked = {"_RLSIM_COMPLETE": "complete_bash", "COMP_WORDS": "rlsim run pat_v", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "rlsim"], env=os.environ | asked, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["pat_vs_static"]


@cases("cli_help", "bash completes options")
def test_bash_completes_options(completed: Completed, line: str, expected: str) -> None:
    assert completed(line) == [expected]


def test_keys_of_an_experiment_and_the_names_they_take() -> None:
    assert "trace.cap=" in complete.settings("trace.")
    assert "workflow.prompts=" in complete.settings("w")
    assert complete.settings("cluster=2x8xh1") == ["cluster=2x8xh100"]
    assert complete.settings("cluster=8xa") == ["cluster=8xa100", "cluster=8xa40", "cluster=8xa800"]
    assert "trace.path=deepscaler-llama-3.1-8b" in complete.settings("trace.path=")
    assert complete.settings("trace.cap=") == []


@pytest.mark.parametrize(
    ("names", "kind"),
    [(complete.models, "qwen3-8b"), (complete.gpus, "h100-sxm"), (complete.calibrations, "h100-sxm-vllm")],
)
def test_names_of_the_catalogue(names: complete.Completer, kind: str) -> None:
    assert kind in names("")
    assert names(kind) == [kind]
    assert names("?") == []


@cases("cli_help", "what may be written and read is listed")
def test_what_may_be_written_and_read_is_listed(
    asked: tuple[str, ...], has: tuple[str, ...], has_not: tuple[str, ...], call: Run
) -> None:
    out = call("list", *asked).out
    assert all(text in out for text in has)
    assert not any(text in out for text in has_not)


def test_the_version(call: Run) -> None:
    assert call("--version").out == f"rlsim {rlsim.__version__}\n"

"""What tests of several files use."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer.main
import typer.testing
from ruamel.yaml import YAML

import rlsim
from rlsim.cli import app, main
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.simulator import Simulator
from rlsim.results.sweeps import run as running
from rlsim.results.sweeps.task import Answer, Task

ROOT = Path(__file__).resolve().parents[1]
#: Measured tables and real traces, which are no part of the project.
DATA = Path(os.environ.get("RLSIM_DATA") or ROOT.parent / "shared" / "data")
KERNELS = DATA / "kernels" / "aiconfigurator"
needs_data = pytest.mark.skipif(not KERNELS.is_dir(), reason=f"needs the measured tables (RLSIM_DATA); not in {DATA}")
LENGTHS = "prompt_id,sample_id,response_tokens\n" + "".join(f"{i // 4},{i % 4},{37 * i % 400 + 1}\n" for i in range(32))


def cases(table: str, of: str) -> pytest.MarkDecorator:
    """The rows of a table in `cases/TABLE.yaml`, one a case; its first row names the parameters."""
    names, *rows = tables(table)[of]
    return pytest.mark.parametrize(names, rows)


@cache
def tables(name: str) -> Any:
    """All that is in `cases/NAME.yaml`."""
    return YAML(typ="safe", pure=True).load(Path(__file__).parent / "cases" / f"{name}.yaml")


def sample(name: str) -> str:
    """The text of a file in `cases`."""
    return (Path(__file__).parent / "cases" / name).read_text(encoding="utf-8")


#: An experiment that takes a fraction of a second.
TINY: dict[str, Any] = tables("refusals")["tiny"]
BASE = sample("base.yaml")


class Talk:
    """Made-up collectives: seconds by operation, or by all that is asked for, which is kept; in no time unless told."""

    def __init__(self, seconds: Callable[[str, float, int, int], float] = lambda *_: 0.0, **by_op: float) -> None:
        self.seconds, self.by_op = seconds, by_op
        self.asked: set[tuple[str, float, int, int]] = set()

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        self.asked.add((op, message_bytes, gpus, nodes))
        return self.by_op.get(op) or self.seconds(op, message_bytes, gpus, nodes)


class Called(NamedTuple):
    """What became of a command: its exit code, and what it printed on standard output and standard error."""

    code: int
    out: str
    err: str


Command = Callable[..., Called]


def pytest_collection_finish() -> None:
    """What imports and collecting have made is there to stay: looking for garbage in it took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@cache
def command_line() -> Any:
    """The commands, which `rlsim.cli.app` makes anew in each call: that took longer than many of them."""
    return typer.main.get_command(app)


typer.testing._get_command = lambda _: command_line()  # type: ignore[attr-defined]


def invoke(*arguments: object, **settings: Any) -> typer.testing.Result:
    """What a command of rlsim leaves behind, its exception too."""
    return typer.testing.CliRunner().invoke(app, [*map(str, arguments)], **settings)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of rlsim in this process."""
    monkeypatch.setattr("rlsim.cli.app", command_line())

    def called(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["rlsim", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return Called(int(left.value.code or 0), *capsys.readouterr())

    return called


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a small experiment `base.yaml` and its trace."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[Path]:
    """All below a folder, but for what Python compiles of a user's modules."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def trajectories_of(tasks: int, most_turns: int) -> list[dict[str, Any]]:
    """Rows of four trajectories for each task, whose turns are of random tokens and seconds in tools."""
    rng = np.random.default_rng(1)

    def turn() -> dict[str, Any]:
        tokens = {"generated_tokens": int(rng.integers(1, 400)), "observation_tokens": int(rng.integers(0, 800))}
        return tokens | {"tool_s": float(rng.exponential(3.0))}

    return [
        {"prompt_id": task, "sample_id": sample, "prompt_tokens": int(rng.integers(50, 700)),
         "reward": float(rng.random() < 0.5), "turns": [turn() for _ in range(rng.integers(1, most_turns + 1))]}
        for task in range(tasks) for sample in range(4)
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """What each file below a folder holds, but for a sweep's log and what Python compiles."""
    left_out = {"log.jsonl", "__pycache__"}
    below = (path for path in folder.rglob("*") if path.is_file() and left_out.isdisjoint(path.parts))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in below}


def runner(base: str) -> Callable[..., rlsim.Result]:
    """Runs systems of the experiment of that name in `cases/bases.yaml`, with changes of it and of its workflow."""
    experiment = tables("bases")[base]

    def run(*systems: Any, **changes: Any) -> rlsim.Result:
        workflow = {**experiment["workflow"], **changes.pop("workflow", {})}
        chosen = {"systems": list(systems)} if systems else {}
        return rlsim.run({**experiment, **changes, **chosen, "workflow": workflow})

    return run


def loaded_of(source: Any, overrides: Any = (), folder: Path | None = None) -> LoadedExperiment:
    """An experiment with all that it names, in its own folder or another one."""
    experiment, shown, own = load_experiment(source, overrides)
    return LoadedExperiment.of(experiment, folder or own, shown)


def placed_of(source: Any, overrides: Any = (), folder: Path | None = None) -> PlacedExperiment:
    """An experiment on its cluster, as its first system has it."""
    return Simulator(loaded_of(source, overrides, folder)).placed()


def answers_here(tasks: Sequence[Task], *_: Any) -> Iterator[Answer]:
    """Runs the points of a sweep in this process."""
    yield from (Answer(task, task.run(), 0.0) for task in tasks)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps run in this process, for tests of what processes have no part in: each takes two seconds to start."""
    monkeypatch.setattr(running, "_answers", answers_here)


class Failing:
    """Runs commands of rlsim that are refused, and checks what every failure has in common."""

    def __init__(self, folder: Path, call: Command) -> None:
        self.folder, self.call = folder, call

    def __call__(self, *arguments: str, base: str | None = None) -> str:
        """The message of `rlsim run`, with another base file if one is given."""
        if base is not None:
            (self.folder / "base.yaml").write_text(base)
        return self.told("run", "base.yaml", "--out", "out", *arguments)

    def told(self, *words: str) -> str:
        """The message of any command."""
        before = files(self.folder), contents(self.folder)
        printed = self.call(*words)
        assert (printed.code, printed.out) == (2, ""), printed.err
        assert "Traceback" not in printed.err
        assert printed.err.startswith(("rlsim: error: ", "Usage: ", "╭─ Error"))
        assert printed.err.count("rlsim: error: ") <= 1
        assert (files(self.folder), contents(self.folder)) == before
        return printed.err.removeprefix("rlsim: error: ").rstrip("\n")


@pytest.fixture
def failing(folder: Path, call: Command) -> Failing:
    return Failing(folder, call)


def edited(*pairs: tuple[str, str]) -> str:
    text = BASE
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text

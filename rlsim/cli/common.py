"""What several commands share: the experiment, its settings, and the bar while it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from rlsim.base.output import check_files, write_text
from rlsim.base.reading import records
from rlsim.cli import complete
from rlsim.errors import ConfigError, printable

if TYPE_CHECKING:
    from rlsim.experiment.run import Progress


F = TypeVar("F", bound=Callable[..., Any])


class Commands(typer.Typer):
    """Commands whose options are rows of `rlsim/data/options.csv`; those of `*` are of all that have such a one.

    A row has the `flags` of an option, if these are not its name (`argument`: it has none), `bounds` of a number, and
    what the shell `offers`: a completer, or names.
    """

    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        add = super().command(name, **more)
        return lambda function: add(told(function))

    def callback(self, **more: Any) -> Callable[[F], F]:
        add = super().callback(**more)
        return lambda function: add(told(function))


def told(function: F) -> F:
    """A command, its options as their rows say."""
    own = options().get(f"{function.__module__.removeprefix('rlsim.cli.')}.{function.__name__}", {})
    hints = get_type_hints(function, include_extras=True)
    plain = {name for name, hint in hints.items() if not hasattr(hint, "__metadata__")}  # others say it themselves
    rows = {name: option for name, option in (options()["*"] | own).items() if name in plain}
    function.__annotations__ |= {name: Annotated[hints[name], option] for name, option in rows.items()}
    return function


@cache
def options() -> dict[str, dict[str, Any]]:
    """The options of every command, by the module and the name of its function."""
    found: dict[str, dict[str, Any]] = {}
    for row in records("options.csv"):
        offers, flags = row["offers"].split(), row["flags"].split()
        offered = getattr(complete, offers[0], complete.one_of(*offers)) if offers else None
        known: dict[str, Any] = {"help": row["help"], "metavar": row["metavar"] or None, "autocompletion": offered}
        bounds = zip(("min", "max"), row["bounds"].split(".."), strict=False)
        known |= {end: json.loads(bound) for end, bound in bounds if bound}
        known |= {"callback": _checked} if row["option"] == "json_file" else {}
        argument = flags == ["argument"]
        option = typer.Argument(**known, show_default=False) if argument else typer.Option(*flags, **known)
        found.setdefault(row["command"], {})[row["option"]] = option
    return found


def with_options(
    settings: Sequence[str] | None,
    *,
    warmup: int | None = None,
    steps_at_cap: bool | None = None,
    certainty: int | None,
) -> list[str]:
    """Settings, and those that options of their own stand for."""
    options = {"workflow.warmup": warmup, "workflow.steps_at_cap": steps_at_cap, "certainty": certainty}
    given = (f"{key}={str(value).lower()}" for key, value in options.items() if value is not None)
    return [*(settings or ()), *given]


def add_code_folders(file: str) -> None:
    """`module:Class` policies lie beside an experiment or in the working directory; they hide no installed module."""
    sys.path += [str(folder) for folder in (Path(file).resolve().parent, Path.cwd())]


def echo(text: str, err: bool = False) -> None:
    """Print a line as it is but for control characters; `err`: to standard error."""
    typer.echo(printable(text), err=err)


def say(text: str, style: str = "") -> None:
    """Print text that a terminal shows in a style."""
    from rlsim.cli.terminal import Console

    Console(soft_wrap=True).print(text, style=style)


def say_notes(notes: Iterable[str]) -> None:
    """Print notes, a line each."""
    for note in notes:
        say(f"note: {note}", "dim")


#: `--json -`: the screen.
PRINTED = Path("-")


def _checked(file: Path | None) -> Path | None:
    """What `--json` gives; raises `ConfigError` if it cannot be written: before the work, not after it."""
    check_files(None if file == PRINTED else file)
    return file


def write_json(file: Path | None, data: Any) -> bool:
    """Write or print what `--json` asks for; whether it was printed, so that nothing else is."""
    if file is None:
        return False
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if file != PRINTED:
        write_text(file, text)
        return False
    typer.echo(text, nl=False)
    return True


def paths_only(quiet: bool, *paths: Path | None) -> bool:
    """With `--quiet` print the paths of what was written; whether that is so, and nothing else is printed."""
    for path in paths if quiet else ():
        if path is not None:
            typer.echo(str(path))
    return quiet


def tokens_of(option: str, text: str | None) -> int | None:
    """A number of tokens that an option gives, such as 16K; raises `ConfigError` for less than one."""
    from rlsim.units import token_count

    try:
        value = None if text is None else token_count(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if value is not None and value < 1:
        raise ConfigError(f"{option}: expected at least 1 token, got {text!r}")
    return value


#: Seconds between two lines of progress where there is no terminal for a bar.
BETWEEN_LINES_S = 15.0


@contextmanager
def progress_bar(hidden: bool, of: str = "runs") -> Iterator[Progress | None]:
    """Progress on standard error, one update a run, or what it is `of`; None if it is to be hidden.

    A bar in a terminal; elsewhere a line now and then.
    """
    if hidden:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rlsim.cli.terminal import Console

    what = TextColumn("{task.description}", markup=False)  # a case may be called [/b]
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    told_at = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, what: str) -> None:
            nonlocal told_at
            bar.update(task, completed=done, total=total, description=what or of)
            if not console.is_terminal and time.monotonic() - told_at >= BETWEEN_LINES_S:
                told_at = time.monotonic()
                echo(f"rlsim: {done} of {total} {of}{f': {what}' if what else ''}", err=True)

        yield update

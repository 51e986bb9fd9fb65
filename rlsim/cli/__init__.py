"""Arguments come in; calls of the rooms below, and what they found as tables for the terminal, go out."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rlsim.base.version import __version__
from rlsim.cli import (
    calibrate,
    comparing,
    init,
    listing,
    planning,
    reporting,
    running,
    sweeping,
    trace,
    tuning,
)
from rlsim.cli.common import Commands, echo
from rlsim.errors import ConfigError, RlsimError

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

app = Commands(
    name="rlsim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Simulate RLHF training steps under different schedulers: how long they take, and where the GPU time goes.",
    epilog="Example: rlsim run experiments/pat_vs_static.yaml --seeds 3",
)
#: In the order in which the help shows them; each has its function's name.
_COMMANDS: tuple[Callable[..., None], ...] = (
    init.init, running.check, running.run, sweeping.sweep, comparing.compare, reporting.report, reporting.timeline,
    tuning.tune, planning.plan,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
for _name, _group in {"list": listing.app, "trace": trace.app, "calibrate": calibrate.app}.items():
    app.add_typer(_group, name=_name)


def _elsewhere(_parts: Annotated[list[str] | None, typer.Argument(metavar="PARTS")] = None) -> None:
    """Compare rlsim with what was measured (in a clone of rlsim alone)."""
    raise ConfigError("validate needs the folder evidence, which a clone of rlsim has: pip install -e . there")


def _validate() -> Callable[..., None]:
    """`rlsim validate` of the clone that this rlsim is of, beside the evidence; else one that says where it is."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "evidence" / "validate").is_dir():
        return _elsewhere
    sys.path.append(str(clone))
    from evidence.validate.command import validate

    return validate


app.command("validate")(_validate())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlsim {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. A user's mistake, or a file that the system refuses, ends in one message and code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal or file cannot show is no reason to end
    try:
        try:
            app(prog_name="rlsim")  # also under `python -m`, whose help and completion are the same
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk can still be told
    except RlsimError as error:
        _leave(2, f"error: {error}")
    except BrokenPipeError:  # the reader of our output has gone (`rlsim … | head`)
        _leave(1)
    except OSError as error:
        _leave(2, f"error: {_shown(error)}")


def _shown(error: OSError) -> str:
    """Which file the system refused, and why; errors of files carry their names, those of standard output do not."""
    why = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {why}"
    return f"standard output: cannot be written: {why}" if error.errno in _NOT_WRITTEN else why


def _leave(code: int, message: str = "") -> NoReturn:
    """End with a message, if there is one and anywhere to put it."""
    with suppress(OSError):
        if message:
            echo(f"rlsim: {message}", err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # or the interpreter would try again when it ends, and say so
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it is closed
            continue
    sys.exit(code)

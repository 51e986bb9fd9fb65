"""The command line: arguments and printing only."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rlsim import __version__
from rlsim.cli import (
    advising,
    calibrate,
    checking,
    comparing,
    init,
    listing,
    planning,
    reporting,
    running,
    sweeping,
    timeline,
    trace,
    validate,
)
from rlsim.cli.common import echo
from rlsim.errors import RlsimError

app = typer.Typer(
    name="rlsim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Simulate RLHF training steps under different schedulers: how long they take, and where the GPU time goes.",
    epilog="Example: rlsim run experiments/pat_vs_static.yaml --seeds 3",
)
app.command("init")(init.init)
app.command("check")(checking.check)
app.command("run")(running.run)
app.command("sweep")(sweeping.sweep)
app.command("compare")(comparing.compare)
app.command("report")(reporting.report)
app.command("timeline")(timeline.timeline)
app.command("advise")(advising.advise)
app.command("plan")(planning.plan)
app.add_typer(listing.app, name="list")
app.add_typer(trace.app, name="trace")
app.add_typer(calibrate.app, name="calibrate")
app.command("validate")(validate.validate)


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
    """Run the command line. A user's mistake ends in one message and exit code 2."""
    try:
        app(prog_name="rlsim")  # also under `python -m`, whose help and completion are the same
    except RlsimError as error:
        echo(f"rlsim: error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has gone (`rlsim … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("rlsim: interrupted", err=True)
        sys.exit(130)

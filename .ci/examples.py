"""Checks experiments and sweeps, and runs a step of each under one seed: `examples.py FOLDER FILE ...`.

One process for many: reading the calibrations anew for every file would take longer than the runs.
"""

import sys
from pathlib import Path

from rlsim.cli import app


def called(*arguments: str) -> None:
    """The command line, in this process."""
    if code := app(arguments, standalone_mode=False):
        sys.exit(code)


def main(folder: str, *files: str) -> None:
    """Check and run."""
    for file in map(Path, files):
        called("check", str(file))
        command, more = "sweep" if file.parent.name == "sweeps" else "run", list[str]()
        if file.stem == "real_weak_scaling":  # its searches take minutes; the other experiments of `real` run the same
            continue
        if file.stem == "asynchrony":  # its cases ask for steps of their own, 18 of 1,024 responses
            more = ["--set", "cases={}"]
        out = f"{folder}/{command}-{file.stem}"
        called(command, str(file), "--seeds", "1", "--set", "workflow.steps=1", *more, "--out", out)


if __name__ == "__main__":
    main(*sys.argv[1:])

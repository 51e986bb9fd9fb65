"""The door to `rlsim validate`, which lives beside the evidence: in a clone, not in the wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import rlsim
from rlsim.errors import ConfigError

_CLONE = Path(rlsim.__file__).resolve().parents[1]


def _elsewhere(_parts: Annotated[list[str] | None, typer.Argument(metavar="PARTS")] = None) -> None:
    """Compare rlsim with what was measured (in a clone of rlsim alone)."""
    raise ConfigError("validate needs the folder evidence, which a clone of rlsim has: pip install -e . there")


def command() -> Callable[..., None]:
    """The command of the clone that this rlsim is of; outside a clone, one that says where it is."""
    if not (_CLONE / "evidence" / "validate").is_dir():
        return _elsewhere
    sys.path.append(str(_CLONE))
    from evidence.validate.command import validate

    return validate

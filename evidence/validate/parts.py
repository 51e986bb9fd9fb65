"""The parts of the validation: what each needs, and what each gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlsim.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from evidence.validate.rows import Row, Summary

#: First what decides whether to trust the rest: settings that no fit has seen; then each builds on those before it. The
#: last measures nothing.
PARTS = ("transfer", "kernels", "serving", "throughput", "speculation", "agents", "agent_shapes", "rollout",
         "weight_sync", "papers", "pat", "rollpacker", "oppo", "real", "steps", "asynchronous",
         "sensitivity")  # fmt: skip
#: Parts whose outcome hangs on nothing but rlsim and the measured tables: their text is the same every time.
REPEATABLE = tuple(name for name in PARTS if name != "rollout")
_SOURCE = Path(__file__).resolve().parents[2]  # a checkout, if rlsim runs from one
#: Measured and published rows: $RLSIM_EVIDENCE, or those of the checkout.
EVIDENCE = Path(os.environ.get("RLSIM_EVIDENCE") or _SOURCE / "evidence")


@dataclass(frozen=True)
class Options:
    """`evidence`: the folder of measured and published rows. `kernels`: that of kernel tables, which are no part of the
    project. `quick`: small sizes, as CI has them."""

    evidence: Path = EVIDENCE
    kernels: Path | None = None
    quick: bool = False
    device: str = "cpu"
    progress: Callable[[str], None] = field(default=lambda _: None)


@dataclass(frozen=True)
class Section:
    """What a part found: every comparison, their summaries, and other tables of the page by name.

    `reference`: what rows are compared with, where the page shows each. Where means are what counts (`summarised`), it
    is shown and recorded by its summaries.
    """

    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    tables: Mapping[str, str] = field(default_factory=dict)
    reference: Literal["published", "measured", ""] = "published"
    summarised: bool = False


def run_part(name: str, options: Options) -> Section | str:
    """Run one part; text says why it cannot run here.

    Raises `CatalogueError` for a name that is none, `RlsimError` for what goes wrong in it.
    """
    if name not in PARTS:
        raise unknown_name("part of the validation", name, PARTS)
    if name not in ("kernels", "rollout") and not options.evidence.is_dir():
        return f"{options.evidence}: no such folder; a clone of rlsim has it; set RLSIM_EVIDENCE"
    return import_module(f"evidence.validate.{name}").section(options)  # type: ignore[no-any-return]


def kernel_folder(given: Path | None) -> Path | None:
    """The folder of kernel tables: as given, from RLSIM_DATA, or `../shared/data` beside a checkout; None if absent.

    Raises `ConfigError` if a folder that was asked for does not hold them.
    """
    asked = given or (Path(os.environ["RLSIM_DATA"]) if os.environ.get("RLSIM_DATA") else None)
    folder = asked or _SOURCE.parent / "shared" / "data"
    if (folder / "kernels").is_dir():
        return folder
    if asked is not None:
        raise ConfigError(f"{asked}: no kernel tables there; expected the folder kernels")
    return None

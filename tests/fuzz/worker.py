"""The process that runs cases, so that one which kills it is told and the others go on."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

from fuzz.case import Case, Failure, minimised, run_case, save
from fuzz.targets import TARGETS

MEMORY_BYTES = 8 << 30  # a case that asks for more fails


def work(name: str, seed: int, start: int, count: int, saved: str, pipe: Any) -> None:
    """Cases, each told as (outcome, signature, where it is saved)."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    saved_at: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=fast()) as folder:
        scratch = Path(folder) / "case"
        for index in range(start, start + count):
            found = run_case(Case.drawn(TARGETS[name], seed, index), scratch)
            if not isinstance(found, Failure):
                pipe.send((found, "", ""))
                continue
            if found.signature not in saved_at:
                saved_at[found.signature] = str(save(minimised(found, scratch), Path(saved)))
            pipe.send(("known" if found.known else "failed", found.signature, saved_at[found.signature]))


def fast() -> str | None:
    """A folder in memory for what cases write, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

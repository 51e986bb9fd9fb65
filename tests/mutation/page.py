"""The results as docs/mutation.md shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from mutation.named import FAULTS

Records = Sequence[Mapping[str, Any]]


def rewrite(page: Path, samples: Mapping[str, Records], named: Records) -> None:
    """Put the tables between the page's marks; `samples` are results by seed."""
    parts = {
        "named": _table(("topic", "fault", "file", "outcome"), _named(named)),
        "samples": _table(
            (
                "seed",
                "mutants",
                "killed",
                "of these timed out",
                "survived",
                "share killed",
                "95% interval",
                "share at first",
            ),
            [_shares(f"{seed}", found) for seed, found in samples.items()],
        ),
    }
    mark = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end measured -->)", re.DOTALL)
    page.write_text(mark.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", page.read_text()))


def _shares(name: str, found: Records) -> tuple[str, ...]:
    survived, late = _count(found, "survived"), _count(found, "timed out")
    killed, first = len(found) - survived, sum(record["before"] != "survived" for record in found)
    interval = binomtest(killed, len(found)).proportion_ci(method="wilson")
    within = f"{interval.low:.1%} to {interval.high:.1%}"
    counts = (name, str(len(found)), str(killed), str(late), str(survived))
    return (*counts, f"{killed / len(found):.1%}", within, f"{first / len(found):.1%}")


def _count(found: Records, outcome: str) -> int:
    return sum(record["outcome"] == outcome for record in found)


def _named(found: Records) -> Iterable[tuple[str, ...]]:
    topic, order = "", [f"{fault.topic}: {fault.what}" for fault in FAULTS]
    for record in sorted(found, key=lambda record: order.index(record["key"])):
        yield "" if record["topic"] == topic else record["topic"], record["what"], _place(record), record["outcome"]
        topic = record["topic"]


def _place(record: Mapping[str, Any]) -> str:
    return f"`{record['path'].removeprefix('rlsim/')}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)

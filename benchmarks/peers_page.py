"""The tables of peers.py, as the page docs/peers.md shows them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.validate.long_tables import without_long_tables
from rlsim import __version__


class Price(NamedTuple):
    """Something that both tools put a number to."""

    what: str
    rlsim: float
    aisimulate: float

    @property
    def line(self) -> tuple[str, ...]:
        """As a row of a table, seconds as milliseconds."""
        shown = [f"{x * 1e3:.2f}" if x < 1 else f"{x:,.0f}" for x in (self.rlsim, self.aisimulate)]
        return (self.what, *shown, f"{self.rlsim / self.aisimulate - 1:+.1%}")


def tables(rows: list[dict[str, Any]], variants: Sequence[str], priced: list[Price], peer: str) -> dict[str, str]:
    """What the page shows, by name."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    of = {(row["case"], row["tool"]): row for row in rows}
    time_head = ("rollout", "AISimulate s", "rlsim s", "faster", "again s", "faster", "processes s", "faster")
    times, spans, one_digit = [], [], "{:.1f}".format
    others = [name for name in variants if name != "rlsim"]
    for case in cases:
        theirs, ours = of[case, "aisimulate"], of[case, "rlsim"]
        wall_s, process_s, makespan = theirs["wall_s"], theirs["process_s"], theirs["makespan_s"]
        again = f"{ours['again_s']:.4f}", f"{wall_s / ours['again_s']:.0f}×"
        processes = f"{process_s:.2f}, {ours['process_s']:.2f}", f"{process_s / ours['process_s']:.1f}×"
        times.append(
            (case, f"{wall_s:.2f}", f"{ours['wall_s']:.4f}", f"{wall_s / ours['wall_s']:.0f}×", *again, *processes)
        )
        said = [of[case, name]["makespan_s"] for name in others]
        difference = f"{ours['makespan_s'] / makespan - 1:+.1%}"
        spans.append((case, one_digit(makespan), one_digit(ours["makespan_s"]), difference, *map(one_digit, said)))
    span_head = ("makespan, s", "AISimulate", "rlsim", "difference", *(name.removeprefix("rlsim, ") for name in others))
    where = (
        f"Measured {datetime.now(UTC).date().isoformat()} on a machine with {os.cpu_count()} CPU cores: rlsim "
        f"{__version__} under Python {sys.version_info.major}.{sys.version_info.minor}, AISimulate {peer}."
    )
    return {
        "makespans": f"{where}\n\n{_markdown(span_head, spans)}",
        "prices": _markdown(("ms", "rlsim", "AISimulate", "difference"), [price.line for price in priced]),
        "times": _markdown(time_head, times),
    }


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns of figures, all but the first, are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def rewrite(page: Path, parts: Mapping[str, str]) -> None:
    """Put tables between the page's marks, `<!-- measured: NAME -->` and `<!-- end measured -->`, long ones as CSV."""
    text = page.read_text(encoding="utf-8")
    parts = {name: without_long_tables(part, page, name) for name, part in parts.items()}
    mark = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end measured -->)", re.DOTALL)
    page.write_text(mark.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", text), encoding="utf-8")

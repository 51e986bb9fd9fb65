"""The table of `rlsim trace describe`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from rlsim.base.formats import number, share, written
from rlsim.cli.tables import NO_BREAK, print_tables, table
from rlsim.cli.terminal import Console
from rlsim.trace.describe import Description, Summary

MOST_EPOCHS = 4  # that the table has columns for


def print_description(description: Description) -> None:
    """Prints a table with a column for the whole, each task, and each epoch, of many epochs only some."""
    first, shown = description.parts[0], _shown(description.parts)
    figures = pd.DataFrame([dict(part) for part in shown], dtype=object)
    rows = written("lengths", figures)
    rows |= {name: [number(part.quantiles[name], 0) for part in shown] for name in first.quantiles}
    at_cap = f"share at the cap of {first.cap_tokens:,}" if first.cap_tokens else "share marked as cut"
    rows |= written("longest", figures) | {at_cap: [share(part.share_at_cap, 2) for part in shown]}
    rows |= {f"share above {at:,}": [share(part.share_above[at], 2) for part in shown] for at in first.share_above}
    rows |= written("more", figures, first=first)
    headings = ["", *(part.part.replace(" ", NO_BREAK) for part in shown)]
    title = f"Response lengths of {description.name} (tokens)"
    print_tables([table(headings, [[name, *values] for name, values in rows.items()], title=title)])
    say = Console(soft_wrap=True).print
    if description.source:
        say(f"source: {description.source}")
    if len(shown) < len(description.parts):
        say(f"{len(shown)} of {len(description.parts)} columns: --json has the rest")
    for note in description.notes:
        say(f"note: {note}")


def _shown(parts: Sequence[Summary]) -> list[Summary]:
    """All parts, but of many epochs only some, the first and the last among them."""
    epochs = [part for part in parts if part.part.startswith("epoch ")]
    if len(epochs) <= MOST_EPOCHS:
        return list(parts)
    kept = {round(i * (len(epochs) - 1) / (MOST_EPOCHS - 1)) for i in range(MOST_EPOCHS)}
    return [part for part in parts if part not in epochs] + [epochs[i] for i in sorted(kept)]

"""Tables on the terminal: names are never broken, and what is too wide goes on below, with the names again."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsim.base.formats import Table, is_missing
from rlsim.base.reading import shipped
from rlsim.base.refusals import said
from rlsim.cli.common import say
from rlsim.errors import printable

if TYPE_CHECKING:
    from rlsim.experiment.ledger import LedgerRecord

#: Characters of a line where there is no terminal to say how many fit.
MOST_WIDTH = 160
#: The least width that prose is folded to, and spaces between columns.
LEAST_PROSE, GAP = 24, 2
#: A space at which no heading is broken.
NO_BREAK = "\u00a0"


def parts(table: Table, width: int) -> Iterator[tuple[str, list[str]]]:
    """Heading and lines of every part of at most so many characters, as long as no column alone has more."""
    cells = [[printable(cell) for cell in row] for row in table.rows]
    texts = [[*heading.split(" "), *(row[i] for row in cells)] for i, heading in enumerate(table.headings)]
    widths = [max(1, *map(_width, own)) for own in texts]
    last = len(widths) - 1
    names = [i for i in range(last) if set(range(i + 1)) <= set(table.words) - {table.prose}] or [0]
    if table.prose >= 0:
        others = [own + GAP for i, own in enumerate(widths) if i != table.prose]
        rest = width - sum(others)
        rest = rest if rest >= LEAST_PROSE else width - sum(widths[i] + GAP for i in names if i != table.prose)
        widths[table.prose] = min(widths[table.prose], max(rest, LEAST_PROSE) if table.prose else width // 2)
    parts, begun = [list(names)], sum(widths[i] + GAP for i in names)
    used = begun
    for i in range(len(names), last + 1):
        if used + widths[i] > width and len(parts[-1]) > len(names):
            parts.append(list(names))
            used = begun
        parts[-1].append(i)
        used += widths[i] + GAP
    for part in parts:
        own = [widths[i] for i in part]
        heading = [textwrap.wrap(table.headings[i], widths[i], break_long_words=False) for i in part]
        top = max(map(len, heading))
        stacked = [[""] * (top - len(lines)) + lines for lines in heading]
        fold = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
        rows = [[fold(row[i], widths[i]) if i == table.prose else [row[i]] for i in part] for row in cells]
        left = [i in table.words for i in part]
        yield "\n".join(_lines(stacked, own, left)), [line for row in rows for line in _lines(row, own, left)]


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int], left: Sequence[bool]) -> Iterator[str]:
    """The lines of a row whose cells have lines themselves."""
    for number in range(max(map(len, cells))):
        texts = [lines[number] if number < len(lines) else "" for lines in cells]
        padded = [
            text + " " * (width - _width(text)) if to_left else " " * (width - _width(text)) + text
            for text, width, to_left in zip(texts, widths, left, strict=True)
        ]
        yield (" " * GAP).join(padded).rstrip().replace(NO_BREAK, " ")


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def caption(table: str, **known: Any) -> str:
    """What stands below a table, by `rlsim/data/says.yaml`."""
    lines = ("; ".join(said(line, **known)) for line in shipped("says.yaml")[table])
    return "\n".join(filter(None, lines))


def setting_texts(values: Sequence[Any], width: int = 1_000) -> list[str]:
    """The values of a setting as texts of at most so many characters, – for none.

    Where values that differ would look the same, all of them in full.
    """
    from rlsim.results.sweeps.tables import shown

    known = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    known = [None if is_missing(value) else value for value in known]  # in a column of numbers, none is NaN
    full = ["–" if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in known]
    short = ["–" if v is None else f"{v:.4g}" if isinstance(v, float) else shown(v, width) for v in known]
    return short if len(set(short)) == len(set(full)) else full


def print_ledgers(ledgers: Iterable[tuple[str, LedgerRecord]], how: str = "") -> None:
    """What each case rests on that nobody gave or measured; `how`: how to ask what each is worth.

    One line each while no worth is known; else a table of what matters.
    """
    from rlsim.experiment.ledger import turns

    for case, ledger in ledgers:
        if not (rows := [row.cells(ledger) for row in ledger.weighed]):
            continue
        title = " · ".join(part for part in (case, ledger.title) if part)
        print_tables([Table(title, ledger.headings, rows, ledger.legend or how, words=(0, 1), prose=0)])
        if said := turns(ledger):
            say(f"{said}\n", "bold")


def print_tables(tables: Iterable[Table], *, stderr: bool = False) -> None:
    """Print tables with a blank line after each."""
    from rlsim.cli.terminal import Console

    console = Console(stderr=stderr, soft_wrap=True)
    width = console.width if console.is_terminal or os.environ.get("COLUMNS") else MOST_WIDTH
    for one in tables:
        if one.title:
            console.print(one.title, style="italic")
        for number, (heading, lines) in enumerate(parts(one, width)):
            console.print("\n" * (number > 0) + heading, style="bold")
            console.print("\n".join(lines))
        if one.caption:
            console.print(one.caption, style="dim")
        console.print()

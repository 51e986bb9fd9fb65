"""Long tables of a page, kept as CSV in a folder of the page's name; the site shows them in place of the links."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

from evidence.validate.rows import markdown
from rlsim.base.output import write_text
from rlsim.base.reading import read_text

#: More rows than people read on a page.
MOST_ROWS = 4
_TABLE = re.compile(r"^\|.*(?:\n\|.*)+$", re.MULTILINE)
_MEASURED = re.compile(r"(<!-- measured: ([\w ]+) -->\n).*?(<!-- end measured -->)", re.DOTALL)
_LINK = re.compile(r"^\[[\d,]+ rows\]\(([\w-]+/[\w.-]+\.csv)\)$", re.MULTILINE)


def with_tables(text: str, folder: Path) -> str:
    """The text of a page in `folder`, with its long tables in place of the links to them."""

    def table(found: re.Match[str]) -> str:
        headings, *rows = csv.reader(io.StringIO(read_text(folder / found[1])))
        return markdown(headings, rows).rstrip()

    return _LINK.sub(table, text)


def with_measured(text: str, tables: Mapping[str, str]) -> str:
    """The text of a page with these tables between its marks, `<!-- measured: NAME -->` and `<!-- end measured -->`."""
    return _MEASURED.sub(lambda found: f"{found[1]}\n{tables[found[2]].rstrip()}\n\n{found[3]}", text)


def without_long_tables(text: str, page: Path, name: str) -> str:
    """The text with a link for each long table, which is written to `PAGE/name.csv`; a second one to `name.2.csv`."""
    written = 0

    def link(found: re.Match[str]) -> str:
        nonlocal written
        headings, _, *rows = ([cell.strip() for cell in line[1:-2].split(" |")] for line in found[0].split("\n"))
        if len(rows) <= MOST_ROWS:
            return found[0]
        written += 1
        file, path = io.StringIO(), page.parent / page.stem / f"{name}{f'.{written}' if written > 1 else ''}.csv"
        csv.writer(file, lineterminator="\n").writerows([headings, *rows])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, file.getvalue())
        return f"[{len(rows):,} rows]({page.stem}/{path.name})"

    return _TABLE.sub(link, text)

"""The page `docs/validation.md`: its prose is written by hand, its tables are written here.

A table stands between `<!-- part.name -->` and `<!-- end -->`, so that the tables of one part can be written anew. One
that is long is a CSV in a folder of the page's name; the site shows it in place of the link.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from evidence.validate.parts import PARTS, Section
from evidence.validate.rows import Targets, bounds_of, markdown, verdicts
from rlsim.base.output import check_file, write_text
from rlsim.base.reading import read_text
from rlsim.errors import ConfigError

_BLOCK = re.compile(r"^<!-- (\w+)\.(\w+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def blocks(section: Section, targets: Targets) -> dict[str, str]:
    """The tables of a part by name: what its rows come to, each row, the part's own, and bounds of groups."""
    bounds = bounds_of(targets, section.rows, section.summaries)
    found = {"verdict": "".join(f"- {line}\n" for line in verdicts(targets, section.rows, bounds))}
    if section.reference:
        headings = ("case", "quantity", "kind", section.reference, "rlsim", "error", "target", "remark")
        cells = [(*row.cells, targets.cell(row), row.note) for row in section.rows]
        found["figures"] = markdown(headings, cells)
    told = [b for b in bounds if b.statistic != "row" and (b.why or not b.fine)]  # the verdict counts the others
    groups = [(b.what, b.quantity, b.statistic, f"{b.value:.1%}", b.shown, b.why) for b in told]
    if groups:
        found["bounds"] = markdown(("what", "quantity", "of the errors", "now", "bound", "why it is off"), groups)
    return {key: text for key, text in (found | dict(section.tables)).items() if text}


def read_page(page: Path) -> dict[str, str]:
    """The tables of a page by part, joined. Raises `ConfigError` if it cannot be read."""
    found: dict[str, str] = {}
    for (part, _), text in _tables(read_text(page), page).items():
        found[part] = f"{found.get(part, '')}{text}\n"
    return found


def _tables(text: str, page: Path) -> dict[tuple[str, str], str]:
    found = {(part, name): with_tables(body, page.parent).rstrip() for part, name, body in _BLOCK.findall(text)}
    if not found and text:
        raise ConfigError(f"{page}: not a validation page (no `<!-- part.table -->` in it)")
    return found


def check_page(page: Path) -> None:
    """Raises `ConfigError` if the page cannot be written, or is something else."""
    check_file(page)
    if page.exists():
        read_page(page)


def write_page(page: Path, sections: Mapping[str, Section], targets: Targets) -> None:
    """Put the tables of these parts on the page and keep all else."""
    check_page(page)
    text = read_text(page) if page.exists() else "# How far rlsim is from what was measured\n"
    for part, section in sections.items():
        known = _tables(text, page) if "<!--" in text else {}
        made = {}
        for name, body in blocks(section, targets).items():
            shown = without_long_tables(body.rstrip(), page, f"{part}.{name}")
            made[part, name] = f"<!-- {part}.{name} -->\n{shown}\n<!-- end -->"
        # What a part no longer has would stay for ever, and contradict the rest.
        for found in [*_BLOCK.finditer(text)]:
            if found[1] == part:
                text = text.replace(found[0], made.get((part, found[2]), ""))
        title = [] if any(at[0] == part for at in known) else [f"## {part}"]
        if missing := [block for at, block in made.items() if at not in known]:
            text = "\n\n".join([text.rstrip("\n"), *title, *missing]) + "\n"
    write_text(page, text)


def stale(page: Path, sections: Mapping[str, Section], targets: Targets, repeatable: Iterable[str]) -> list[str]:
    """The repeatable parts with a table that is not what would be written now, and parts that are not on the page."""
    written = _tables(read_text(page), page)
    changed = [
        part
        for part in repeatable
        if part in sections
        if {name: text for (of, name), text in written.items() if of == part}
        != {name: text.rstrip() for name, text in blocks(sections[part], targets).items()}
    ]
    return list(dict.fromkeys([*changed, *(name for name in PARTS if name not in {part for part, _ in written})]))


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

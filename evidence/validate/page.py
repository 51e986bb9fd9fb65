"""The page `docs/validation.md`: its prose is written by hand, its tables are written here.

A table stands between `<!-- part.name -->` and `<!-- end -->`, so that the tables of one part can be written anew. One
that is long is a CSV beside the page (`long_tables`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from evidence.validate.long_tables import with_tables, without_long_tables
from evidence.validate.parts import PARTS, TITLES, Section
from evidence.validate.rows import markdown
from evidence.validate.targets import Targets, bounds_of, verdicts
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
        title = [] if any(at[0] == part for at in known) else [f"## {TITLES[part]}"]
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

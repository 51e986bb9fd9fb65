"""The page: sections from the templates in `page/`, and Markdown tables in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evidence.validate.long_tables import with_tables, without_long_tables
from evidence.validate.rows import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "calibration.md"
_PAGE = Environment(loader=FileSystemLoader(Path(__file__).with_name("page")), undefined=StrictUndefined)


def section(name: str, **values: object) -> str:
    """The section of that template."""
    return _PAGE.get_template(f"{name}.md").render(values)


def read() -> str:
    """The page with all its tables."""
    return with_tables(PAGE.read_text(), PAGE.parent)


def rewrite(new: str) -> None:
    """Puts a section into the page, in place of the one under the same heading."""
    head = new.strip().partition("\n")[0] + "\n"
    before, _, rest = read().partition(head)
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    write(before.rstrip() + "\n\n" + new.strip() + "\n" + ("\n" + after if after else ""))


def write(text: str, page: Path = PAGE) -> None:
    """Writes the page: the long tables of each section are CSV, named by its heading."""
    page.parent.mkdir(parents=True, exist_ok=True)
    for heading in re.findall(r"^## ([\w ',-]+)", text, flags=re.MULTILINE):
        begin = text.index(f"## {heading}")
        end = text.find("\n## ", begin) + 1 or len(text)
        name = re.sub(r"\W+", "-", heading.strip().lower())
        text = text[:begin] + without_long_tables(text[begin:end], page, name) + text[end:]
    page.write_text(text)


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return markdown(head, [[str(cell) for cell in row] for row in rows]).strip()


def summary(errors: Iterable[float], size: str = ".1%", bias: str = "+.0%") -> tuple[str, str, str, int]:
    """Median and 90th percentile of their size, their median, and how many there are."""
    found = np.array(list(errors))
    off = np.abs(found)
    return format(np.median(off), size), format(np.quantile(off, 0.9), size), format(np.median(found), bias), len(found)

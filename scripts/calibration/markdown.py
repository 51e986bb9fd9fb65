"""The page: sections from the templates in `page/`, and Markdown tables in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlsim.validate.rows import markdown

_PAGE = Environment(loader=FileSystemLoader(Path(__file__).with_name("page")), undefined=StrictUndefined)


def section(name: str, **values: object) -> str:
    """The section of that template."""
    return _PAGE.get_template(f"{name}.md").render(values)


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return markdown(head, [[str(cell) for cell in row] for row in rows]).strip()

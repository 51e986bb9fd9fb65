"""Markdown tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlsim.validate.rows import markdown


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return markdown(head, [[str(cell) for cell in row] for row in rows]).strip()

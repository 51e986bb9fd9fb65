"""Markdown tables."""

from __future__ import annotations


def row(*cells: object) -> str:
    """One line of a table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(head: list[str], rows: list[str]) -> str:
    """A whole table."""
    return "\n".join([row(*head), row(*["---"] * len(head)), *rows])

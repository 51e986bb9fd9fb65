"""The text of a part of the page, and the section of a system whose figures a paper prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlsim.validate.charts import errors_chart
from rlsim.validate.parts import Section
from rlsim.validate.rows import Row, summarise, table

_TEXTS = Path(__file__).with_name("texts")


def filled_text(name: str, **values: str) -> str:
    """The Markdown text `texts/NAME.md`, tables and figures put in where it has `{their name}`."""
    text = (_TEXTS / f"{name}.md").read_text(encoding="utf-8")
    return text.format(**{key: value.rstrip("\n") for key, value in values.items()})


def published_section(name: str, rows: Iterable[Row], *, depth: int = 1, **values: str) -> Section:
    """A section with a table and a chart of all `rows`; `values` are what else its text has.

    Rows whose cases agree in the first `depth` components are summarised together.
    """
    found = tuple(rows)
    text = filled_text(name, figures=table(found), **values)
    return Section(found, tuple(summarise(found, depth)), text, errors_chart(found))

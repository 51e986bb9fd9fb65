"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: Characters of a line where there is no terminal to say how many fit.
MOST_WIDTH = 160


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, title: str = "", caption: str = ""
) -> Table:
    """A table without lines; its first `words` columns are names, which may break; figures may not."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold", title=title or None, caption=caption or None)
    for i, heading in enumerate(headings):
        if i < words:
            found.add_column(heading, overflow="fold")
        else:
            found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables with a blank line after each; not in a terminal, they are as wide as they need to be."""
    from rlsim.cli.terminal import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, MOST_WIDTH)
    for one in tables:
        legend, one.caption = one.caption, None  # a caption would be wrapped to the table's width
        console.print(one)
        if legend:
            console.print(legend, style="dim", highlight=False, soft_wrap=True)
        console.print()

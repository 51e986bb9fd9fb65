"""What the built site shows that the Markdown keeps in comments and file names (hooks of mkdocs.yml).

- `<!-- file: NAME -->` before a block becomes the block's title, without what it is tested with;
  `<!-- same as: FILE -->` and `<!-- output -->` too.
- A link whose text is a page's file name shows the page's title.
- `<!-- on the site: NAME -->` becomes that part of the reference.
- A link to the CSV of a long table becomes the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from make_reference import DOCS, for_site  # beside this file

from evidence.validate.page import with_tables

FENCE = re.compile(
    r"^<!-- (?P<kind>file|same as|output)(?:: (?P<value>[^\n]*?)(?:, tested with [^\n]*)?)? -->\n+"
    r"```(?P<language>\w+)$",
    re.MULTILINE,
)
LINK = re.compile(r"\[(?P<page>[\w-]+\.md)\]\((?P=page)(?P<anchor>#[\w-]+)?\)")


def titles(nav: Sequence[Any]) -> Mapping[str, str]:
    """The title of every page in the navigation."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, target in entry.items():
            found |= titles(target) if isinstance(target, list) else {target: title}
    return found


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """A page as the site shows it."""
    known = titles(config["nav"])

    def fence(found: re.Match[str]) -> str:
        title = "prints, among other lines" if found["kind"] == "output" else found["value"]
        return f'```{{ .{found["language"]} title="{title}" }}'

    def link(found: re.Match[str]) -> str:
        page, anchor = found["page"], found["anchor"] or ""
        return f"[{known.get(page, page)}]({page}{anchor})"

    return for_site(with_tables(LINK.sub(link, FENCE.sub(fence, markdown)), DOCS))

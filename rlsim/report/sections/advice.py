"""What `rlsim advise` found, where its results are reported."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from rlsim.advise.texts import texts
from rlsim.report.page import Block, Section, Table, Text


def advice_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """The tables of an advice."""
    blocks: list[Block] = []
    for text in texts(tables):
        blocks.append(Text(text.title, heading=True))
        caption = text.caption[0].upper() + text.caption[1:]
        blocks.append(Table(caption, tuple(text.headings), text.rows, words=text.words - {0}))
    return Section("advice", "Advice", tuple(blocks))

"""What a rollout dump's importer is: the keys that tell it, which keys hold what, and how its files are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.importers.collect import Collector, Response
from rlsim.trace.importers.rows import Row, file_rows
from rlsim.trace.importers.tokens import TokenCounter

#: What is said of dumps that do not tell which responses were cut.
NOT_TOLD = "which responses were cut is not in the dump: with a cap, those that reach it count as cut"
#: Counts what has to be said: sentences with `{n}` for the count.
Tally = Counter[str]
#: Fields of a `Response` that take more than one key of the row; None leaves the response out.
More = Callable[[Row, Tally], Mapping[str, Any] | None]

_READ: dict[str, Callable[[Row, str], Any]] = {
    "step": Row.whole, "group": Row.whole, "prompt": Row.text, "prompt_text": Row.text, "response_text": Row.text,
    "reward": Row.number,
}  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """A project's dump: its format's name, the keys every row has, how rows are read, and what is always to be said.

    `columns` maps fields of `Response` to the keys that hold them (one with a `response_text` holds no lengths, so that
    a tokenizer is needed), and `more` gives the others. `rows` reads a file as rows of one response each. `repeats`: a
    step's rows may be written again with the next. `refused` says why there is no trace in it.
    """

    name: str
    project: str
    needs: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    more: More | None = None
    notes: tuple[str, ...] = ()
    rows: Callable[[Path, str], Iterator[Row]] = file_rows
    repeats: bool = False
    refused: str = ""

    def response(self, row: Row, tally: Tally) -> Response | None:
        """The response of a row; None if it is left out."""
        more = self.more(row, tally) if self.more else {}
        if more is None:
            return None
        return Response(**{name: _READ[name](row, key) for name, key in self.columns.items()}, **more)


def read_dump(
    dump: Dump,
    files: Sequence[Path],
    where: Path,
    columns: Mapping[str, str],
    tokenizer: str | Path | None,
    cap_tokens: int | None,
) -> tuple[pd.DataFrame, list[tuple[Path, str]], list[str]]:
    """The responses in `files` as columns of rlsim's schema, the place of every row, and notes.

    `columns` maps columns of the schema to keys of the rows and comes before what the layout says. Raises `TraceError`
    with file and row, and where the dump holds no lengths and no tokenizer is given.
    """
    if dump.refused:
        raise TraceError(f"{where}: {dump.refused}")
    counted = "response_text" in dump.columns and "response_tokens" not in columns
    notes, counter = [dump.project, *dump.notes], None
    if counted and tokenizer is None:
        raise TraceError(
            f"{where}: {dump.project} holds texts and no token counts, and rlsim guesses no lengths. Give the model's "
            "tokenizer (--tokenizer PATH, its tokenizer.json or local folder; nothing is downloaded), or a key that "
            "holds lengths if yours has one (--column response_tokens=KEY). Without either, the run's metric log still "
            "gives lengths that are derived from its means (docs/traces.md)"
        )
    if counted and tokenizer is not None:
        counter = TokenCounter(tokenizer)
        notes.append(
            f"lengths counted by the tokenizer {counter.name} in decoded text without its special tokens: a response "
            "that ended by itself is one token (its end) shorter than generated, and one cut within a word may differ"
        )
    elif tokenizer is not None:
        notes.append("the dump holds lengths: the tokenizer was not used")
    collector = Collector(columns, counter, cap_tokens, repeats=dump.repeats)
    for file in files:
        for row in dump.rows(file, dump.project):
            response = dump.response(row, collector.tally)
            if response is not None:
                collector.add(response, row)
    frame, places, said = collector.frame()
    return frame, places, [*notes, *said]

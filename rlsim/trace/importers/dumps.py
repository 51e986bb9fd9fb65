"""What a rollout dump's importer is: the keys it is recognised by, and how a row becomes responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.importers.collect import Collector, Response
from rlsim.trace.importers.rows import Row, file_rows
from rlsim.trace.importers.tokens import TokenCounter

#: What is said of dumps that do not tell which responses were cut.
NOT_TOLD = "which responses were cut is not in the dump: with a cap, those that reach it count as cut"
#: A row of a dump as the responses it holds, each with the row (or part of a row) that it was read from. The counter
#: takes sentences with `{n}` for how often something was met that has to be said.
Reader = Callable[[Row, "Counter[str]"], Iterator[tuple[Response, Row]]]


@dataclass(frozen=True)
class Dump:
    """A project's dump: its format's name, the keys every row has, how rows are read, and what is always to be said.

    `texts`: it holds texts and no lengths, so that a tokenizer is needed. `repeats`: a step's rows may be written again
    with the next. `refused` says why there is no trace in it.
    """

    name: str
    project: str
    needs: tuple[str, ...]
    read: Reader | None = None
    notes: tuple[str, ...] = ()
    texts: bool = False
    repeats: bool = False
    refused: str = ""
    rows: Callable[[Path, str], Iterator[Row]] = file_rows


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
    if dump.refused or dump.read is None:
        raise TraceError(f"{where}: {dump.refused}")
    counted = dump.texts and "response_tokens" not in columns
    if counted and tokenizer is None:
        raise TraceError(_no_lengths(dump, where))
    notes = [f"{dump.project}", *dump.notes]
    counter = TokenCounter(tokenizer) if counted and tokenizer is not None else None
    if counter is not None:
        notes.append(
            f"lengths counted by the tokenizer {counter.name} in decoded text without its special tokens: a response "
            "that ended by itself is one token (its end) shorter than generated, and one cut within a word may differ"
        )
    elif tokenizer is not None:
        notes.append("the dump holds lengths: the tokenizer was not used")
    collector = Collector(columns, counter, cap_tokens, repeats=dump.repeats)
    for file in files:
        for row in dump.rows(file, dump.project):
            for response, part in dump.read(row, collector.tally):
                collector.add(response, part)
    frame, places, said = collector.frame()
    return frame, places, [*notes, *said]


def _no_lengths(dump: Dump, where: Path) -> str:
    return (
        f"{where}: {dump.project} holds texts and no token counts, and rlsim guesses no lengths. Give the model's "
        "tokenizer (--tokenizer PATH, its tokenizer.json or local folder; nothing is downloaded), or a key that holds "
        "lengths if yours has one (--column response_tokens=KEY). Without either, the run's metric log still gives "
        "lengths that are derived from its means (docs/traces.md)"
    )

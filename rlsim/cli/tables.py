"""Tables on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlsim.formats import Row, is_missing, number, with_interval

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from rlsim.experiment.ledger import LedgerRecord

#: Characters of a line where there is no terminal to say how many fit.
MOST_WIDTH = 160


def table(
    headings: Iterable[str], rows: Iterable[Sequence[str]], *, words: int = 1, title: str = "", caption: str = ""
) -> Table:
    """A table without lines; its first `words` columns are names, which may break; figures may not."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold", title=title or None, caption=caption or None)
    for i, heading in enumerate(headings):
        if i < words:
            found.add_column(heading, overflow="fold", min_width=len(heading))
        else:
            found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def speedup_text(row: Row, baseline: str = "") -> str:
    """A summary row's speedup with its interval, `baseline` for that, and a mark if it is not comparable yet."""
    text = "baseline" if row["system"] == baseline else with_interval(row, "speedup")
    return text + (" †" if row["unsteady"] else "")


MODEL_LEGEND = "model: 95% interval of speedup over the calibration's errors where no fit has seen the setting\n"


def model_text(row: Row, baseline: str) -> str:
    """The interval of a summary row's speedup over the calibration's errors; nothing for the baseline itself."""
    low, high = row["speedup_model_low"], row["speedup_model_high"]
    return "" if row["system"] == baseline or is_missing(low) else f"[{number(low)}, {number(high)}]"


def late_legend(summary: pd.DataFrame) -> str:
    """What the mark of `speedup_text` means, if any row has it."""
    return "\n†: not comparable: not steady, the notes say why" if summary["unsteady"].any() else ""


def relaxed_legend(columns: Collection[str]) -> str:
    """What those of the columns are that `rlsim.formats.relaxed` gives, for captions."""
    apart = "; rollout, trainer idle: time in which none of their GPUs did anything"
    stale = "; stale: weight updates behind, mean and 95th percentile of the responses trained on"
    return apart * ("rollout idle" in columns) + stale * ("stale" in columns)


def setting_texts(values: Sequence[Any], width: int = 1_000) -> list[str]:
    """The values of a setting as texts of at most so many characters, – for none.

    Where values that differ would look the same, all of them in full.
    """
    from rlsim.sweeps.differences import shown

    known = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    known = [
        None if isinstance(value, float) and math.isnan(value) else value for value in known
    ]  # in a column of numbers, none is NaN
    full = ["–" if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in known]
    short = ["–" if v is None else f"{v:.4g}" if isinstance(v, float) else shown(v, width) for v in known]
    return short if len(set(short)) == len(set(full)) else full


def print_ledgers(ledgers: Iterable[tuple[str, LedgerRecord]], how: str = "") -> None:
    """What each case rests on that nobody gave or measured; `how`: how to ask what each is worth.

    One line each while no worth is known; else a table of what matters, in which long texts are folded.
    """
    from rich.table import Table

    from rlsim.cli.terminal import Console
    from rlsim.experiment.ledger import turns

    console = Console()
    if not console.is_terminal:
        console.width = MOST_WIDTH // 2
    for case, ledger in ledgers:
        rows, said = ledger.weighed, turns(ledger)
        if not rows:
            continue
        found = Table(box=None, pad_edge=False, show_header=ledger.base is not None, header_style="bold")
        for i, heading in enumerate(ledger.headings):
            found.add_column(heading, overflow="fold", no_wrap=i > 1)
        for row in rows:
            found.add_row(*row.cells(ledger))
        title = " · ".join(part for part in (case, ledger.title) if part)
        console.print(title, style="bold", soft_wrap=True)
        console.print(found)
        for text in filter(None, (ledger.legend or how, said)):
            console.print(text, style="dim" if text != said else "bold", soft_wrap=True)
        console.print()


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
            console.print(legend, style="dim", soft_wrap=True)
        console.print()

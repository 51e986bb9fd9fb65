"""Tables on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsim.experiment.backlog import MOST_HELD_BACK
from rlsim.formats import is_missing, number, share, with_interval

if TYPE_CHECKING:
    import pandas as pd
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


def speedup_text(row: Mapping[Any, Any], baseline: str = "") -> str:
    """A summary row's speedup with its interval, `baseline` for that, and a mark if it is not comparable yet."""
    text = "baseline" if row["system"] == baseline else with_interval(row, "speedup")
    return text + (" †" if abs(row["held_back"]) > MOST_HELD_BACK else "")


MODEL_LEGEND = "model: 95% interval of speedup over the calibration's errors where no fit has seen the setting\n"


def model_text(row: Mapping[Any, Any], baseline: str) -> str:
    """The interval of a summary row's speedup over the calibration's errors; nothing for the baseline itself."""
    low, high = row["speedup_model_low"], row["speedup_model_high"]
    return "" if row["system"] == baseline or is_missing(low) else f"[{number(low)}, {number(high)}]"


def late_legend(summary: pd.DataFrame) -> str:
    """What the mark of `speedup_text` means, if any row has it."""
    late = (summary["held_back"].abs() > MOST_HELD_BACK).any()
    text = f"\n†: not comparable yet; the prompts put off change by over {MOST_HELD_BACK:.0%} of those trained on"
    return text if late else ""


#: What the columns of `asynchrony` are, for captions.
STALE_LEGEND = "; stale: weight updates behind, mean and 95th percentile of the responses trained on"
APART_LEGEND = "; rollout, trainer idle: time in which none of their GPUs did anything"


def asynchrony(rows: pd.DataFrame) -> tuple[list[str], Callable[[Mapping[Any, Any]], list[str]], str]:
    """Headings and cells of what relaxed synchrony costs and leaves idle, and their legend.

    Idle shares only where generation and training have different GPUs, staleness only where something stale is trained
    on.
    """
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {}
    legend = ""
    if rows["rollout_idle"].notna().any():
        columns |= {"rollout idle": ("rollout_idle", share), "trainer idle": ("trainer_idle", share)}
        legend += APART_LEGEND
    if rows["staleness_max"].max() > 0:
        columns |= {"stale": ("staleness_mean", number), "stale p95": ("staleness_p95", partial(number, digits=1))}
        legend += STALE_LEGEND
    return list(columns), lambda row: [shown(row[name]) for name, shown in columns.values()], legend


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

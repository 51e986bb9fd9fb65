"""Writes the picture and the tables of docs/asynchrony.md from a run of `experiments/asynchrony.yaml`.

python scripts/draw_asynchrony.py [RESULTS]    # runs the experiment (a minute), or reads results of it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

import rlsim
from rlsim.charts import save_chart
from rlsim.formats import number, rate, share
from rlsim.report.staleness import frontier, frontier_chart

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "asynchrony.md", ROOT / "docs" / "asynchrony.svg"
CASE = "long tail"


def main() -> None:
    """Run or read, draw, and put the tables into the page."""
    results = sys.argv[1:]
    found = rlsim.read_result(results[0]) if results else rlsim.run(ROOT / "experiments" / "asynchrony.yaml")
    save_chart(frontier_chart(frontier(found, CASE)), PICTURE)
    PAGE.write_text(page_with(found.summary()), encoding="utf-8")


def page_with(summary: pd.DataFrame) -> str:
    """The page with the tables of this summary."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in ((CASE, details(summary)), ("speedups", speedups(summary))):
        between = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end measured -->)", re.DOTALL)
        page, count = between.subn(rf"\1\n{table}\n\2", page)
        assert count == 1, name
    return page


def details(summary: pd.DataFrame) -> str:
    """Of one case: throughput, staleness and what is idle."""
    headings = (
        "system", "responses/s", "over `verl`", "staleness mean", "p95", "bubble", "rollout idle", "trainer idle",
    )  # fmt: skip
    rows = [
        (
            f"`{row['system']}`",
            rate(row["responses_per_s"]),
            number(row["speedup"], 2),
            number(row["staleness_mean"], 2),
            number(row["staleness_p95"], 1),
            share(row["bubble_fraction"]),
            share(row["rollout_idle"]),
            share(row["trainer_idle"]),
        )
        for row in summary[summary["case"] == CASE].to_dict("records")
    ]
    return markdown(headings, rows)


def speedups(summary: pd.DataFrame) -> str:
    """Of all cases: throughput over the baseline's."""
    cases = list(dict.fromkeys(summary["case"]))
    wide = summary.pivot_table(index="system", columns="case", values="speedup", sort=False)[cases]
    rows = [(f"`{system}`", *(number(value, 2) for value in row)) for system, row in wide.iterrows()]
    return markdown(("system", *cases), rows)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rule, *rows))


if __name__ == "__main__":
    main()

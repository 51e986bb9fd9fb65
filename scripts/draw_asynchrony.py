"""Writes the picture and the tables of docs/asynchrony.md from `experiments/asynchrony.yaml` and `elastic_split.yaml`.

python scripts/draw_asynchrony.py [RESULTS ELASTIC]    # runs both (four minutes), or reads results of them
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

import rlsim
from evidence.validate.page import with_measured, with_tables, without_long_tables
from evidence.validate.rows import markdown
from rlsim.base.charts import save_chart
from rlsim.base.formats import number, rate, share
from rlsim.results.report.speedups import frontier, frontier_chart

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "asynchrony.md", ROOT / "docs" / "asynchrony.svg"
CASE = "long tail"


def main() -> None:
    """Run or read, draw, and put the tables into the page."""
    results, names = sys.argv[1:], ("asynchrony", "elastic_split")
    if results:
        found, elastic = (rlsim.read_result(path) for path in results)
    else:
        found, elastic = (rlsim.run(ROOT / "experiments" / f"{name}.yaml") for name in names)
    save_chart(frontier_chart(frontier(found, CASE)), PICTURE)
    page, table = page_with(found.summary(), elastic.summary()), speedups(found.summary()).rstrip()
    page = page.replace(table, without_long_tables(table, PAGE, "speedups"))  # beside the page, as its bullets say it
    PAGE.write_text(page, encoding="utf-8")


def page_with(summary: pd.DataFrame, elastic: pd.DataFrame) -> str:
    """The page with all tables of these summaries in it."""
    tables = {CASE: details(summary), "speedups": speedups(summary), "elastic split": splits(elastic)}
    return with_measured(with_tables(PAGE.read_text(encoding="utf-8"), PAGE.parent), tables)


def details(summary: pd.DataFrame) -> str:
    """Of one case: throughput, staleness and what is idle."""
    heads = ("system", "responses/s", "over `verl`", "staleness mean", "p95", "bubble", "rollout idle", "trainer idle")
    idle = ("bubble_fraction", "rollout_idle", "trainer_idle")
    rows = [
        (f"`{row['system']}`", rate(row["responses_per_s"]), marked(number(row["speedup"], 2), row),
         number(row["staleness_mean"], 2), number(row["staleness_p95"], 1), *(share(row[name]) for name in idle))
        for row in summary[summary["case"] == CASE].to_dict("records")
    ]  # fmt: skip
    return markdown(heads, rows)


def speedups(summary: pd.DataFrame) -> str:
    """Of all cases: throughput over the baseline's."""
    cases = list(dict.fromkeys(summary["case"]))
    cells = [marked(number(row["speedup"], 2), row) for row in summary.to_dict("records")]
    wide = summary.assign(cell=cells).pivot(index="system", columns="case", values="cell")
    wide = wide.loc[summary["system"].unique(), cases]
    return markdown(("system", *cases), [(f"`{system}`", *row) for system, row in wide.iterrows()])


def marked(throughput: str, row: Mapping[Hashable, Any]) -> str:
    """A throughput of a row, with a mark where it is not steady."""
    return throughput + (" †" if row["unsteady"] else "")


def splits(summary: pd.DataFrame) -> str:
    """Throughput by how training gets its responses, and by the GPUs that generate."""
    names = summary["system"].str.extract(r"(?P<design>.+)-gpus(?P<gpus>\d+)")
    cells = [marked(rate(row["responses_per_s"]), row) for row in summary.to_dict("records")]
    wide = summary.assign(**names, cell=cells).pivot(index="design", columns="gpus", values="cell")
    rows = [(f"`{design}`", *row) for design, row in wide.loc[names["design"].unique()].iterrows()]
    return markdown(("responses/s", *(f"{gpus} + {32 - int(gpus)}" for gpus in wide.columns)), rows)


if __name__ == "__main__":
    main()

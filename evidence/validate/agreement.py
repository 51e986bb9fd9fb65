"""How near the papers' ratios come, and which of their orders are found: the output rows that stand beside the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from evidence.validate.parts import Options
from evidence.validate.published import Published, evaluated, figures
from evidence.validate.rows import markdown, number

PAPERS = {"pat": "PAT", "rollpacker": "RollPacker", "oppo": "OPPO", "real": "REAL"}
TARGET = 0.15  # of the mean |error| of ratios
#: What is a ratio: one thing over another, or a share. Of the first, which of both is more is an order.
RATIO, SHARE = re.compile(r"speedup|over|share| / |busy|at work"), re.compile(r"share|busy|at work")


def agreement(options: Options) -> dict[str, str]:
    """By paper the errors of ratios and how many orders are right; every order that is not."""
    sizes, orders, cells = list[tuple[str, float]](), list[tuple[str, ...]](), []
    for part, paper in PAPERS.items():
        shown = pd.read_csv(options.evidence.parent / "docs" / "validation" / f"{part}.figures.csv")
        pairs = zip(figures(options, part).rows, shown["error"].str.rstrip("%").astype(float) / 100, strict=True)
        found = [(row, evaluated(str(row.value), {}), error) for row, error in pairs if row.kind == "output"]
        sizes += [(paper, abs(error)) for row, _, error in found if RATIO.search(row.quantity)]
        orders += [(paper, *order) for order in _orders(found)]
    for paper in (*PAPERS.values(), "all"):
        own = [size for whose, size in sizes if paper in (whose, "all")]
        wrong = [missed for whose, *_, missed in orders if paper in (whose, "all")]
        errors = f"{np.mean(own):.1%}", f"{np.median(own):.1%}", "hit" if np.mean(own) <= TARGET else "**missed**"
        cells.append((paper, str(len(own)), *errors, str(len(wrong)), str(wrong.count(""))))
    headings = ("paper", "ratios", "mean error", "median", f"mean within {TARGET:.0%}", "orders", "right")
    missed = markdown(("paper", "quantity", "of", "beside", "published", "rlsim"), [o[:-1] for o in orders if o[-1]])
    return {"ratios": markdown(headings, cells), "orders": missed}


def _orders(found: Sequence[tuple[Published, float, float]]) -> Iterator[tuple[str, ...]]:
    """Of rows, what is published, and rlsim's errors: each ratio beside 1, and two of one quantity and run. Quantity,
    cases, both pairs of values, and whether rlsim has another order ("" if not)."""
    ratios = [one for one in found if RATIO.search(one[0].quantity) and not SHARE.search(one[0].quantity)]
    beside_one = [(one, (one[0].model_copy(update={"case": "1"}), 1.0, 0.0)) for one in ratios]
    for (row, a, d), (other, b, e) in [*beside_one, *combinations(found, 2)]:
        if a != b and _run(row) == _run(other):
            ours = a * (1 + d), b * (1 + e)
            shown = (f"{number(x)} : {number(y)}" for x, y in ((a, b), ours))
            yield row.quantity, row.case, other.case, *shown, "wrong" * ((a - b) * (ours[0] - ours[1]) <= 1e-9)


def _run(row: Published) -> tuple[str, str]:
    """The run, and case of it, that a row is of: `a.b.system.column` is of a.b, a quotient of its first name."""
    plain = re.fullmatch(r"((?:\w+\.)+)\w+\.\w+", row.of)
    return row.quantity, plain[1] if plain else re.split(r"\W", row.of.removeprefix("min("))[0] + "/"

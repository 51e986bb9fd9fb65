"""Part `papers`: every open figure and mechanism of the papers, and what of rlsim repeats it, or why nothing can.

`papers.csv` says it in words that are looked up: `row PART CASE` is a row of the evidence, `key POLICY.KEY` a key of a
part of a system, `setting PATH` one of the experiment, `column TABLE.NAME` a column of the results, `experiment NAME`
a shipped one, `table NAME` a file of the evidence, `test NAME` tests of that name; `none` has its reason in the remark.
How near the papers' ratios come, and which of their orders are found, is told by the output rows that stand beside the
page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from evidence.validate.parts import EVIDENCE, Options, Section
from evidence.validate.published import Published, evaluated, figures
from evidence.validate.rows import markdown, number, read_rows
from rlsim.base.catalogue import DATA
from rlsim.base.reading import read_text
from rlsim.base.reference import keys_of
from rlsim.base.schema import Schema
from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.schema import Experiment
from rlsim.policies.registry import load_policy

_ROOT = EVIDENCE.parent


class Told(Schema):
    """A figure or mechanism; `found`: what repeats it, several between semicolons."""

    paper: str
    what: str
    published: str = ""
    found: str
    remark: str = ""


def section(options: Options) -> Section:
    """The table as it stands, and what the figures beside the page come to (a second)."""
    headings = ("paper", "what", "published", "repeated by", "remark")
    cells = [(t.paper, t.what, t.published, t.found, t.remark) for t in told(options.evidence)]
    return Section((), (), {"table": markdown(headings, cells), **agreement(options)}, reference="")


def told(evidence: Path = EVIDENCE) -> list[Told]:
    """The rows. Raises `ConfigError` for one that names what is not there, or nothing without a reason."""
    path = evidence / "papers.csv"
    rows = read_rows(path, Told)
    for line, row in enumerate(rows, 2):
        for one in row.found.split("; "):
            kind, _, name = one.partition(" ")
            if not (bool(row.remark) if one == "none" else kind in _KNOWN and _KNOWN[kind](name)):
                raise ConfigError(f"{path}, row {line}: {row.what}: {one}: not there, or no reason given")
    return rows


def _is_key(name: str) -> bool:
    policy, _, key = name.partition(".")
    with suppress(RlsimError):
        return key in getattr(load_policy(policy), "model_fields", {})
    return False


@cache
def _cases(part: str) -> set[str]:
    return {row.case for row in figures(Options(), part).rows}


_KNOWN: Mapping[str, Callable[[str], bool]] = {
    "row": lambda name: name.partition(" ")[2] in _cases(name.partition(" ")[0]),
    "key": _is_key, "setting": lambda path: any(row.key == path for row in keys_of(Experiment)),
    "column": lambda name: f"{name.replace('.', ',', 1)}," in read_text(DATA / "columns.csv"),
    "experiment": lambda name: (_ROOT / "experiments" / f"{name}.yaml").exists(),
    "table": lambda name: (_ROOT / "evidence" / name).exists(),
    "test": lambda name: (_ROOT / "tests" / f"test_{name}.py").exists(),
}  # fmt: skip


# ---- ratios and orders -----------------------------------------------------------------------------------------------

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

"""Part `papers`: every open figure and mechanism of the papers, and what of rlsim repeats it, or why nothing can.

`papers.csv` says it in words that are looked up: `row PART CASE` is a row of the evidence, `key POLICY.KEY` a key of a
part of a system, `setting PATH` one of the experiment, `column TABLE.NAME` a column of the results, `experiment NAME`
a shipped one, `table NAME` a file of the evidence, `test NAME` tests of that name; `none` has its reason in the remark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from evidence.validate.agreement import agreement
from evidence.validate.parts import EVIDENCE, Options, Section
from evidence.validate.published import figures
from evidence.validate.rows import markdown, read_rows
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
    for number, row in enumerate(rows, 2):
        for one in row.found.split("; "):
            kind, _, name = one.partition(" ")
            if not (bool(row.remark) if one == "none" else kind in _KNOWN and _KNOWN[kind](name)):
                raise ConfigError(f"{path}, row {number}: {row.what}: {one}: not there, or no reason given")
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

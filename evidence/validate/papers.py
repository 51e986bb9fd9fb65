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
from typing import Any

import pandas as pd

from evidence.validate.parts import EVIDENCE, Options, Section
from evidence.validate.published import figures
from evidence.validate.rows import markdown
from rlsim.base.catalogue import DATA
from rlsim.base.tables import csv_errors
from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.schema import Experiment
from rlsim.policies.registry import load_policy

_ROOT = EVIDENCE.parent


def section(options: Options) -> Section:
    """The table, as it stands (a second)."""
    frame = table(options.evidence)
    return Section((), (), {"table": markdown(list(frame), frame.to_numpy().tolist())}, reference="")


def table(evidence: Path = EVIDENCE) -> pd.DataFrame:
    """The rows. Raises `ConfigError` for one that names what is not there, or nothing without a reason."""
    path = evidence / "papers.csv"
    with csv_errors(path, ConfigError):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for number, row in enumerate(frame.itertuples(), 2):
        for one in row.found.split("; "):
            kind, _, name = one.partition(" ")
            if not (bool(row.remark) if one == "none" else kind in _KNOWN and _KNOWN[kind](name)):
                raise ConfigError(f"{path}, row {number}: {row.what}: {one}: not there, or no reason given")
    return frame.rename(columns={"found": "repeated by"})


def _is_row(name: str) -> bool:
    part, _, case = name.partition(" ")
    return case in _cases(part)


@cache
def _cases(part: str) -> frozenset[str]:
    return frozenset(row.case for row in figures(Options(), part).rows)


def _is_key(name: str) -> bool:
    policy, _, key = name.partition(".")
    with suppress(RlsimError):
        return key in getattr(load_policy(policy), "model_fields", {})
    return False


def _is_setting(path: str) -> bool:
    here: Any = Experiment
    for part in path.split("."):
        if part not in (fields := getattr(here, "model_fields", {})):
            return False
        here = fields[part].annotation
    return True


def _is_column(name: str) -> bool:
    columns = pd.read_csv(DATA / "columns.csv", dtype=str)
    return bool(((columns["table"] + "." + columns["column"]) == name).any())


_KNOWN: Mapping[str, Callable[[str], bool]] = {
    "row": _is_row, "key": _is_key, "setting": _is_setting, "column": _is_column,
    "experiment": lambda name: (_ROOT / "experiments" / f"{name}.yaml").exists(),
    "table": lambda name: (_ROOT / "evidence" / name).exists(),
    "test": lambda name: (_ROOT / "tests" / f"test_{name}.py").exists(),
}  # fmt: skip

"""A calibration, and what else is measured or fitted, as a YAML file."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from rlsim.base.output import check_own_file, write_text
from rlsim.calibrate.fit.common import as_written, rounded
from rlsim.cost.calibration import Calibration, Source
from rlsim.cost.tables import csv_of, taken_out
from rlsim.errors import CalibrationError


def write_yaml(calibration: Calibration, folder: Path) -> Path:
    """One calibration as `folder/NAME.yaml`, keys in schema order, and its tables as `folder/NAME.csv`."""
    path, data = folder / f"{calibration.name}.yaml", rounded(calibration.model_dump(exclude_defaults=True))
    if tables := taken_out(data):
        head = f"# Tables of {path.name}: factors on what its formulas say"
        write_text(csv_of(path), f"{head}\n{tables}", CalibrationError)
    comment = f"Fitted by {calibration.provenance.script}; change that, not this. Units: seconds, bytes, FLOP/s."
    write_record(data, path, comment)
    return path


def write(calibration: Calibration, out: str | Path) -> Path:
    """The calibration as a YAML file: `out` itself if it ends in .yaml, else `out/NAME.yaml`. Returns the path.

    Its tables are in a CSV file beside it (`rlsim.cost.tables`).
    """
    out = Path(out)
    if out.suffix == ".yaml":
        calibration, out = calibration.model_copy(update={"name": out.stem}), out.parent
    elif out.is_dir():
        check_own_file(out / f"{calibration.name}.yaml", CalibrationError)
    if (tables := csv_of(out / f"{calibration.name}.yaml")).exists():
        check_own_file(tables, CalibrationError)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return write_yaml(calibration, out)
    except OSError as error:
        raise CalibrationError(f"{out}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class FromLog:
    """A calibration fitted to a log, and how well it predicts what the fit has not seen.

    `errors` has a row for each quantity: how many were held out, and of these the `mean`, `median` or `p90` of absolute
    relative errors, the `bias` (median, positive = predicted too slow), and `base_…` the same of the calibration that
    it started from. `excluded` counts what was not used, by reason.
    """

    calibration: Calibration
    errors: pd.DataFrame
    excluded: Mapping[str, int]
    notes: tuple[str, ...] = ()


def extended(
    base: Calibration, log: Path, script: str, whose: str, notes: Sequence[str], release: str = "", **update: Any
) -> Calibration:
    """`base` with what `script` fitted to a log, and where that is from; its engine's release unless one is said.

    Without a `name` it is called after both.
    """
    said = base.provenance
    version = f"{base.engine} {release}" if release else said.sources[0].engine_version
    own = Source(project=whose, commit="as logged", licence="own", files=(log.name,), engine_version=version)
    update["provenance"] = said.model_copy(
        update={
            "date": datetime.date.today().isoformat(),
            "script": script,
            "sources": (own, *said.sources),
            "notes": (*said.notes, *notes, f"everything else is {base.name}'s"),
        }
    )
    name = update.get("name") or re.sub(r"[^a-z0-9.]+", "-", f"{base.name}-{log.stem}".lower()).strip("-")
    return as_written(base.model_copy(update={**update, "name": name}))


def write_record(data: dict[str, Any], path: Path, comment: str) -> None:
    """Nested values with a comment above: four significant digits, lists of numbers on one line. The file appears whole
    or not at all."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    text.write(f"# {comment}\n")
    yaml.dump(_plain(rounded(data)), text)
    write_text(path, text.getvalue(), CalibrationError)


def _plain(value: Any) -> Any:
    """Only what YAML knows; numbers of one list, and a tile's numbers, stay on one line."""
    if isinstance(value, dict):
        mapping = CommentedMap({key: _plain(item) for key, item in value.items()})
        if {"m", "n", "efficiency"} <= set(value):
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list | tuple):
        sequence = CommentedSeq([_plain(item) for item in value])
        if all(isinstance(item, int | float) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value.item() if isinstance(value, np.generic) else value

"""A calibration, and what else is measured or fitted, as a YAML file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from rlsim.calibrate.fit.common import rounded
from rlsim.cost.calibration import Calibration
from rlsim.errors import CalibrationError
from rlsim.output import write_text


def write_yaml(calibration: Calibration, folder: Path) -> Path:
    """One calibration as `folder/NAME.yaml`, keys in schema order."""
    path = folder / f"{calibration.name}.yaml"
    comment = f"Fitted by {calibration.provenance.script}; change that, not this. Units: seconds, bytes, FLOP/s."
    write_record(calibration.model_dump(exclude_defaults=True), path, comment)
    return path


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
        if {"m", "n", "efficiency"} <= set(value) or set(value) == {"name", "knots"}:
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list | tuple):
        sequence = CommentedSeq([_plain(item) for item in value])
        if all(isinstance(item, int | float) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value.item() if isinstance(value, np.generic) else value

"""A calibration as a YAML file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from calibration.fitting import rounded
from calibration.provenance import SCRIPT
from rlsim.cost.calibration import Calibration


def write_yaml(calibration: Calibration, folder: Path) -> None:
    """One calibration as YAML: four significant digits, keys in schema order, lists of numbers on one line."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    text.write(f"# Fitted by {SCRIPT}; change that, not this. Units: seconds, bytes, FLOP/s.\n")
    yaml.dump(_plain(rounded(calibration.model_dump(exclude_defaults=True))), text)
    (folder / f"{calibration.name}.yaml").write_text(text.getvalue(), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Only what YAML knows; numbers of one list, and a tile's three numbers, stay on one line."""
    if isinstance(value, dict):
        mapping = CommentedMap({key: _plain(item) for key, item in value.items()})
        if set(value) == {"m", "n", "efficiency"}:
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list | tuple):
        sequence = CommentedSeq([_plain(item) for item in value])
        if all(isinstance(item, int | float) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value.item() if isinstance(value, np.generic) else value

"""Experiments as the validation runs them: as calibrated, in no world of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsim.experiment import run as experiments
from rlsim.experiment.result import Result


def run(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})) -> Result:
    """`rlsim.run`, without worlds: what is compared with published figures is the calibration itself."""
    return experiments.run(source, overrides={**overrides, "certainty": 0})

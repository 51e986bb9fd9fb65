"""Where rlsim's own data files lie: in the wheel under `rlsim/data`, in a checkout at the top level."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
#: Tables and catalogues that ship with rlsim.
DATA = _PACKAGE / "data"


def data_dir(kind: str) -> Path:
    """The folder of one kind of data: `calibration`, `experiments`, `traces`, `gpus`, `clusters` or `models`."""
    inside = DATA / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def names(kind: str, suffix: str = ".yaml") -> dict[str, Path]:
    """Every entry of one kind: its name (the file's stem) and path, sorted by name."""
    return {path.name.removesuffix(suffix): path for path in sorted(data_dir(kind).glob(f"*{suffix}"))}

"""The faults of `named.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ruamel.yaml import YAML


class Fault(NamedTuple):
    """One change of the text of a file."""

    topic: str
    what: str
    path: str
    old: str
    new: str

    def code(self, root: Path) -> tuple[str, int]:
        """The file with the fault in it, and the line where it begins; `ValueError` unless `old` is there just once."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path}: {self.old!r} ({self.topic}) stands there {text.count(self.old)} times, not 1"
            )
        return text.replace(self.old, self.new), text[: text.index(self.old)].count("\n") + 1


FAULTS = tuple(Fault(**row) for row in YAML(typ="safe", pure=True).load(Path(__file__).with_suffix(".yaml")))

"""Mutation tests: puts each fault of tests/mutations.yaml into a copy of the tree and runs the tests of its file.

python scripts/mutate.py            # all; exit code 1 if a fault is one that no test notices
python scripts/mutate.py Laminar    # those of a topic
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider")
LIMIT_S = 900.0  # of the tests of one fault, beyond which it counts as noticed


class Fault(NamedTuple):
    """One change of the text of a file, and the tests that are to notice it."""

    topic: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def code(self) -> str:
        """The file with the fault in it. Raises `ValueError` unless `old` stands there just once."""
        text = (ROOT / self.path).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path}: {self.old!r} ({self.topic}) stands there {text.count(self.old)} times, not 1"
            )
        return text.replace(self.old, self.new)


def faults() -> Iterator[Fault]:
    """The faults of the table."""
    table = YAML(typ="safe", pure=True).load(ROOT / "tests" / "mutations.yaml")
    for row in table["faults"]:
        names = table["tests"][row["path"].removeprefix("rlsim/")]
        yield Fault(**row, tests=tuple(f"tests/{name}.py" for name in names))


def main(topics: list[str]) -> int:
    """Run them one after another; 1 if one survives."""
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for file in map(Path, listed.splitlines()):
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)
        for fault in faults():
            if not topics or fault.topic in topics:
                (tree / fault.path).write_text(fault.code(), encoding="utf-8")
                noticed = True
                with suppress(subprocess.TimeoutExpired):
                    done = subprocess.run([*PYTEST, *fault.tests], cwd=tree, capture_output=True, timeout=LIMIT_S)
                    noticed = done.returncode in (1, 2)
                shutil.copy2(ROOT / fault.path, tree / fault.path)
                survivors += not noticed
                print(f"{'killed' if noticed else 'SURVIVED'}: {fault.topic}: {fault.what}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

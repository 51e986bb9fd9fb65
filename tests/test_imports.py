"""Which file imports which: none imports itself by way of others, and only the engine imports SimPy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rlsim

PACKAGE = Path(rlsim.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports."""
    name = module_name(path).split(".")
    return imports_of(path.read_text(encoding="utf-8"), name if path.name == "__init__.py" else name[:-1])


def imports_of(text: str, package: list[str]) -> Iterator[str]:
    """The modules that code of a package imports, wherever it does: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # `from package import module` names a file, or something in the package's own
                yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules() else origin


def test_imports_are_found_in_functions_and_for_type_checkers():
    text = """
import rlsim.errors
from rlsim import units
if TYPE_CHECKING:
    from rlsim.models.model import Model
def later():
    from .sim import request
"""
    found = set(imports_of(text, ["rlsim"]))
    assert found == {"rlsim.errors", "rlsim.units", "rlsim.models.model", "rlsim.sim.request"}


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: {other for other in imported(path) if other in modules()} for name, path in modules().items()}
    TopologicalSorter(graph).prepare()  # else an error that names a circle
    users = {name for name, path in modules().items() if any(i.split(".")[0] == "simpy" for i in imported(path))}
    assert users
    assert {name for name in users if name.split(".")[1] != "sim"} == set()


#: From the top of the house to its ground floor, as docs/architecture.md has them.
ROOMS = (
    "__main__", "cli", "results", "calibrate", "frameworks", "experiment", "policies", "sim", "workflow", "trace",
    "cost", "models", "base", "units", "errors",
)  # fmt: skip
LOOSE = {"__init__", "__main__", "errors", "units"}


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("rlsim.sim.rollout, rlsim.cost.rollout", "pandas"),
        ("rlsim.cli; dir(rlsim)", "pandas scipy simpy numpy pydantic pyarrow altair torch ray"),
    ],
)
def test_neither_the_engine_nor_the_command_line_loads_what_is_heavy(imports: str, heavy: str) -> None:
    """Pandas takes half a second and 70 MB in each of the processes that simulate."""
    code = f"import sys, {imports}; print([name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout == "[]\n"


def test_the_house_has_twelve_rooms_and_no_loose_files():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*ROOMS} - LOOSE | {"data"}
    assert len(folders - {"data"}) <= 12
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


def test_a_room_imports_from_those_below_it():
    floor = {room: place for place, room in enumerate(ROOMS)}
    upwards = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imported(path)
        if other in modules() and name.count(".") and other.count(".")
        if floor[name.split(".")[1]] > floor[other.split(".")[1]]
    ]
    assert not upwards, "\n".join(upwards)

"""The mutants: what cosmic-ray makes of the code, less what cannot change a result, and a sample of it."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOMS = ("rlsim/sim", "rlsim/cost", "rlsim/policies")
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}
ORDER = {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"}
#: Keywords that only guard against an author's mistake, or describe.
GUARDS = {"strict", "frozen", "kw_only", "slots", "description"}

Position = tuple[int, int]  # line from 1, column from 0


class Mutant(NamedTuple):
    """One fault: the `occurrence`-th place in the file where the operator applies."""

    path: str
    operator: str
    occurrence: int
    start: Position
    end: Position

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return f"{self.path}:{self.start[0]}:{self.start[1]} {self.operator} {self.occurrence}"


def sources(root: Path) -> list[str]:
    """The files that are mutated, relative to the root of the repository."""
    return sorted(str(path.relative_to(root)) for room in ROOMS for path in (root / room).glob("*.py"))


def mutants(root: Path, path: str) -> Iterator[Mutant]:
    """All mutants of a file that may change a result."""
    code = (root / path).read_text()
    tree, left_out = get_ast(code), excluded(code)
    nodes = list(ast_nodes(tree))
    for name in operators():
        operator = plugins.get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not any(low <= start and end <= high for low, high in left_out):
                yield Mutant(path, name, occurrence, start, end)


@cache
def operators() -> tuple[str, ...]:
    """Cosmic-ray's operators, without those that replace arithmetic by bit operations or comparisons by identity, which
    mostly raise at once or change nothing."""

    def fits(name: str) -> bool:
        _, _, pair = name.partition("Operator_")
        old, _, new = pair.partition("_")
        if "BinaryOperator" in name:
            return {old, new} <= ARITHMETIC
        if "ComparisonOperator" in name:
            return {old, new} <= ORDER or {old, new} == {"Is", "IsNot"}
        return "Invert" not in name and not plugins.get_operator(name).arguments()

    return tuple(name for name in sorted(plugins.operator_names()) if fits(name))


def excluded(code: str) -> list[tuple[Position, Position]]:
    """Where a mutation cannot change a result: annotations and protocols (never evaluated), `__slots__`, `__all__`,
    `if TYPE_CHECKING`, `@abstractmethod`, what a `raise` says, texts with values in them, `__repr__`, assertions (they
    tell the type checker) and keywords of `GUARDS`."""
    lines = code.splitlines()

    def span(node: ast.AST) -> tuple[Position, Position]:
        def at(line: int, column: int) -> Position:
            return line, len(lines[line - 1].encode()[:column].decode())  # ast counts bytes, cosmic-ray characters

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    found: list[ast.AST] = []
    spans: list[tuple[Position, Position]] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.arg(annotation=annotation) if annotation:
                found.append(annotation)
            case ast.AnnAssign():
                found.append(node.annotation)
            case ast.FunctionDef():
                found += [node.returns] if node.returns else []
                found += [node] if node.name == "__repr__" else []
                lines_of = [d.lineno for d in node.decorator_list if ast.unparse(d) == "abstractmethod"]
                spans += [((line, 0), (line + 1, 0)) for line in lines_of]
            case ast.ClassDef() if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                found.append(node)
            case (
                ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")])
                | ast.Assert()
                | ast.Raise()
                | ast.JoinedStr()
            ):
                found.append(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                found.append(node)
            case ast.keyword(arg=name) if name in GUARDS:
                found.append(node.value)
    return [*spans, *map(span, found)]


def places(root: Path) -> dict[str, list[list[Mutant]]]:
    """By file, the mutants of each place: those of one kind of operator at one position."""
    found: dict[str, list[list[Mutant]]] = {}
    for path in sources(root):
        by_place: dict[tuple[object, ...], list[Mutant]] = defaultdict(list)
        for mutant in mutants(root, path):
            by_place[mutant.start, mutant.end, mutant.operator.partition("_")[0]].append(mutant)
        if by_place:
            found[path] = [by_place[place] for place in sorted(by_place)]
    return found


def sample(by_file: dict[str, list[list[Mutant]]], size: int, seed: int) -> list[Mutant]:
    """`size` places, evenly spaced over all of them so that each file has its share to within one; a mutant of each.

    Shuffled, so that the first part of it is a sample too.
    """
    random_ = random.Random(seed)
    every = [group for groups in by_file.values() for group in groups]
    first = random_.random()
    chosen = [random_.choice(every[int((first + i) * len(every) / size)]) for i in range(size)]
    random_.shuffle(chosen)
    return chosen


def mutated(code: str, mutant: Mutant) -> str:
    """The text of the file with the fault in it."""
    text = mutate_code(code, plugins.get_operator(mutant.operator)(), mutant.occurrence)
    if text is None or text == code:
        raise ValueError(f"{mutant.key} changes nothing")
    return str(text)


def statement(code: str, line: int) -> range:
    """The lines of the innermost statement that holds `line`; of a compound one, of its head."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt) and node.lineno <= line:
            body: Sequence[ast.stmt] = getattr(node, "body", ())
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if line <= last:
                best = range(node.lineno, last + 1)
    return best


def difference(old: str, new: str) -> list[str]:
    """The changed lines, each after - or +."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    return [line[0] + " " + line[1:].strip() for line in lines if line[0] in "+-"]

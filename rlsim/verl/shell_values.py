"""What the words of a shell script stand for, as far as the text alone tells."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rlsim.verl.shell_words import Part, Word, tokens

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"(?P<name>\w+|[@*#?$!])(?:\[(?P<index>[@*]|\d+)\])?(?P<operation>.*)", re.DOTALL)
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
}
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Unknown:
    """Why a value cannot be told from the text, and the variable that would tell it ("" if none would)."""

    why: str
    variable: str = ""


@dataclass(frozen=True)
class Doubt:
    """An element of an array whose value cannot be told; `shown` is how it stands in the text."""

    shown: str
    unknown: Unknown
    line: int


class Element(str):
    """An element of an array, which knows its line."""

    line: int


Value = str | tuple[str | Doubt, ...] | Unknown


class UnresolvedError(Exception):
    """A word needs a value that the text does not tell."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.why)
        self.unknown = unknown


class Variables:
    """The variables of a script. Those that are given from outside win over what the script assigns."""

    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._values: dict[str, Value] = dict(given)

    def set(self, name: str, value: Value) -> None:
        """Assign, unless the variable is given from outside."""
        if name not in self._given:
            self._values[name] = value

    def get(self, name: str) -> Value | None:
        """The value; None if the variable is not set."""
        return self._values.get(name)

    def append(self, name: str, value: Value) -> None:
        """`NAME+=…`."""
        before = self._values.get(name)
        match before, value:
            case (tuple(), tuple()) | (str(), str()):
                self.set(name, before + value)  # type: ignore[operator]
            case (None, _) | (_, Unknown()):
                self.set(name, value)

    # ---- words ------------------------------------------------------------------------------------------------------

    def arguments(self, word: Word, *, split: bool = True) -> list[str | Doubt]:
        """The words that a word becomes: one, or those of an array, or none. Raises `UnresolvedError`.

        A variable without quotes is split at white space, which `split=False` keeps from happening.
        """
        result, text, there = list[str | Doubt](), "", False
        for part in word.parts:
            several = self._several(part)
            if several is None:
                value = self._one(part)
                pieces = (
                    re.split(r"[ \t\n]+", value) if split and part.kind == "variable" and not part.quoted else [value]
                )
                text += pieces[0]
                there = there or part.kind == "text" or part.quoted or bool(pieces[0])
                for piece in pieces[1:]:
                    result += [text] if there else []
                    text, there = piece, bool(piece)
            elif len(several) == 1 and isinstance(several[0], str):
                text, there = text + several[0], True
            elif several:
                result += [text, *several] if text else several
                text, there = "", False
        return [*result, text] if there and not (result and not text) else result

    def fields(self, word: Word, *, split: bool = False) -> list[str]:
        """The same, of which everything must be known; without splitting. Raises `UnresolvedError`."""
        result = []
        for found in self.arguments(word, split=split):
            if isinstance(found, Doubt):
                raise UnresolvedError(found.unknown)
            result.append(found)
        return result

    def text(self, word: Word) -> str:
        """A word as one text. Raises `UnresolvedError`."""
        return " ".join(self.fields(word))

    def value(self, word: Word, parts: tuple[Part, ...]) -> Value:
        """What an assignment gives its variable: `parts` are those of the word behind the `=`."""
        try:
            if parts and parts[0].kind == "array":
                return tuple(found for item in parts[0].words for found in self.element(item))
            return self.text(Word(parts, word.line))
        except UnresolvedError as error:
            return error.unknown

    def element(self, word: Word) -> list[str | Doubt]:
        """What a word becomes, or how it stands in the text and why that cannot be told."""
        try:
            return [_placed(found, word.line) for found in self.arguments(word)]
        except UnresolvedError as error:
            return [Doubt(shown(word), error.unknown, word.line)]

    def deciding(self, words: Iterable[Word]) -> str:
        """The variable that keeps the first unresolved of these words from being told; empty if none does."""
        for word in words:
            try:
                self.fields(word)
            except UnresolvedError as error:
                return error.unknown.variable
        return ""

    def _several(self, part: Part) -> tuple[str | Doubt, ...] | None:
        """The words of `${array[@]}` or `$@`; None for anything that is one text."""
        found = _PARAMETER.fullmatch(part.text) if part.kind == "variable" else None
        if found is None or found["operation"]:
            return None
        if found["name"] in ("@", "*"):
            return ()
        if found["index"] not in ("@", "*"):
            return None
        value = self._values.get(found["name"])
        if isinstance(value, Unknown):
            raise UnresolvedError(value)
        return (value,) if isinstance(value, str) else value or ()

    def _one(self, part: Part) -> str:
        if part.kind in ("text", "quoted"):
            return part.text
        if part.kind == "arithmetic":
            return str(self.arithmetic(part.text))
        if part.kind == "variable":
            return self._parameter(part.text)
        raise UnresolvedError(Unknown(f"$({part.text.strip()}) would have to be run"))

    def _parameter(self, text: str) -> str:
        found = _PARAMETER.fullmatch(text)
        if found is None:
            if re.fullmatch(r"[\w.]+(:.*)?", text):
                return "${" + text + "}"  # an interpolation of OmegaConf
            raise UnresolvedError(Unknown(f"${{{text}}} is not understood"))
        name, operation = found["name"], found["operation"]
        if operation.startswith((".", ":")) and not re.match(r":[-=+?]", operation):
            return "${" + text + "}"
        if name.isdigit():
            value: Value | None = None
        else:
            value = self._values.get(name)
        if isinstance(value, tuple):
            index = int(found["index"] or 0) if (found["index"] or "0").isdigit() else 0
            element = value[index] if index < len(value) else None
            value = element.unknown if isinstance(element, Doubt) else element
        rule = re.match(r":?[-=+?]", operation)
        if rule:
            return self._with_default(name, value, rule[0], operation[len(rule[0]) :])
        if isinstance(value, Unknown):
            raise UnresolvedError(Unknown(value.why, value.variable or name))
        if value is None:
            what = f"argument ${name} of the script" if name.isdigit() else f"variable {name}"
            raise UnresolvedError(Unknown(f"{what} is not set", "" if name.isdigit() else name))
        return _cut(value, operation, text) if operation else value

    def _with_default(self, name: str, value: Value | None, rule: str, default: str) -> str:
        """`${NAME:-default}` and its kin; an unknown value stays unknown."""
        if isinstance(value, Unknown):
            raise UnresolvedError(Unknown(value.why, value.variable or name))
        there = value is not None and (value != "" or not rule.startswith(":"))
        kind = rule[-1]
        if kind == "+":
            return self._inner(default) if there else ""
        if there:
            return str(value)
        if kind == "?":
            raise UnresolvedError(Unknown(f"variable {name} is not set", name))
        chosen = self._inner(default)
        if kind == "=":
            self.set(name, chosen)
        return chosen

    def _inner(self, text: str) -> str:
        """Text inside `${…}`, which may hold expansions itself."""
        words = (token for token in tokens(text, "") if isinstance(token, Word))
        return " ".join(self.text(word) for word in words)

    def arithmetic(self, text: str) -> int:
        """The whole number that `$((text))` is. Raises `UnresolvedError`."""
        expanded = "".join(self._inner_arithmetic(text))
        try:
            return self._number(ast.parse(expanded.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ArithmeticError, ValueError):
            raise UnresolvedError(Unknown(f"$(({text})) is not understood")) from None

    def _inner_arithmetic(self, text: str) -> Iterator[str]:
        """Pieces of an arithmetic expression, `$` expanded; names without `$` are left to `_number`."""
        for token in re.split(r"(\$\{[^}]*\}|\$\w+)", text):
            yield self._parameter(token.strip("${}")) if token.startswith("$") else token

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name):
                return int(self._parameter(name))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._number(inner)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return self._number(left) // self._number(right)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = self._number(left), self._number(right)
                if isinstance(op, ast.Pow) and sides[1] > _MOST_DIGITS:
                    raise ValueError(sides[1])
                return _ARITHMETIC[type(op)](*sides)
        raise ValueError(ast.dump(node))

    # ---- conditions -------------------------------------------------------------------------------------------------

    def condition(self, words: list[Word]) -> bool | None:
        """What `[ … ]`, `[[ … ]]` or `test …` says; None if that cannot be told, True for any other command."""
        if words and words[0].bare == "!":
            inner = self.condition(words[1:])
            return None if inner is None else not inner
        closing = {"[": "]", "[[": "]]", "test": ""}.get(words[0].bare if words else "")
        if closing is None:
            return None if words and words[0].bare not in ("true", ":") else True
        inside = words[1:-1] if closing else words[1:]
        bare = [word.bare for word in inside]
        try:
            for joint, joined in (("||", any), ("&&", all), ("-o", any), ("-a", all)):
                if joint in bare:
                    at = bare.index(joint)
                    sides = [self.condition([words[0], *half, words[-1]]) for half in (inside[:at], inside[at + 1 :])]
                    return None if None in sides else joined(sides)
            texts = ["".join(self.fields(word)) for word in inside]
        except UnresolvedError:
            return None
        match texts:
            case ["!", *_]:
                inner = self.condition([words[0], *inside[1:], words[-1]])
                return None if inner is None else not inner
            case [text] | ["-n", text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case ["-v", name]:
                return name in self._values
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatchcase(left, right)
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as op, right] if _whole(left) and _whole(right):
                compared = getattr(operator, op[1:])(int(left), int(right))
                return bool(compared)
        return None


def assignment(word: Word) -> tuple[str, bool, tuple[Part, ...]] | None:
    """The name that a word assigns, whether it appends (`+=`), and the parts of the value; None if it does neither."""
    text = ""
    for i, part in enumerate(word.parts):
        if part.kind != "text" or part.quoted:
            return None
        if part.text == "=":
            name = text.removesuffix("+")
            rest = word.parts[i + 1 :]
            return (name, text.endswith("+"), rest) if _NAME.fullmatch(name) else None
        text += part.text
    return None


def _placed(found: str | Doubt, line: int) -> str | Doubt:
    """Text with its line, unless it has one already."""
    if isinstance(found, Doubt | Element):
        return found
    element = Element(found)
    element.line = line
    return element


def shown(word: Word) -> str:
    """A word as it stands, without its quotes; expansions as `$…`."""
    return "".join(part.text if part.kind in ("text", "quoted") else f"${part.text}" for part in word.parts)


def _whole(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", text) is not None


def _cut(value: str, operation: str, shown: str) -> str:
    """`${NAME##*/}`, `${NAME%.yaml}`, `${NAME,,}`."""
    if operation in (",,", "^^"):
        return value.lower() if operation == ",," else value.upper()
    found = re.fullmatch(r"(##?|%%?)(.*)", operation, re.DOTALL)
    if not found or "$" in operation:
        raise UnresolvedError(Unknown(f"${{{shown}}} is not understood"))
    front, longest = found[1][0] == "#", len(found[1]) == 2
    cuts = range(len(value) + 1)
    pieces = [(value[:i], value[i:]) if front else (value[i:], value[:i]) for i in cuts]
    kept = [rest for cut, rest in pieces if fnmatchcase(cut, found[2])]
    return min(kept, key=len) if longest and kept else max(kept, key=len, default=value)

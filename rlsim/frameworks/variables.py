"""Shell text as words and operators, and what these stand for as far as the text alone tells. Nothing is run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import NamedTuple

from rlsim.errors import ConfigError
from rlsim.frameworks.settings import Unknown

#: What to do with a script that is not understood.
INSTEAD = "mend it, or run the script with `--cfg job --resolve` behind its settings and give what it prints as a .yaml"


def _nested(opening: str, closing: str) -> str:
    """Text in brackets that may hold such brackets, five deep."""
    inside = f"[^{opening}{closing}]++"
    pattern = f"{opening}(?:{inside})?{closing}"
    for _ in range(4):
        pattern = f"{opening}(?>{inside}|{pattern})*+{closing}"
    return pattern


_BRACES, _PARENTHESES = _nested(r"\{", r"\}"), _nested(r"\(", r"\)")
_EXPANSION = rf"(?>\$(?>{_BRACES}|{_PARENTHESES}|[A-Za-z_]\w*|[0-9@*#?$!])|`[^`]*`)"
_DOUBLE = rf'"(?>[^"\\$`]++|\\.|{_EXPANSION}|\$(?![{{(]))*+"'
_UNIT = rf"(?>'[^']*'|{_DOUBLE}|{_EXPANSION}|\\.?|[^\s;&|()<>'\"$`\\]++|\$(?![{{(]))"
_IN_DOUBLE = re.compile(rf"{_EXPANSION}|\\.|[^\\$`]++|\$", re.DOTALL)
_IN_WORD = re.compile(rf"{_UNIT}|.", re.DOTALL)
_TOKEN = re.compile(
    rf"""(?P<blank> (?: [ \t] | \\\n | \#[^\n]* )+ )           # with comments
       | (?P<redirection> [0-9]* [<>][<>&-]{{0,2}} [ \t]* (?:{_UNIT})* )
       | (?P<operator> ;; | && | \|\| | [;|&\n()] )
       | (?P<array> [A-Za-z_]\w*\+?= ) \(
       | (?P<word> (?:{_UNIT})+ )""",
    re.DOTALL | re.VERBOSE,
)
_HERE_DOCUMENT = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1(?P<rest>[^\n]*)\n(?:.*?\n)??[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE
)


class Token(NamedTuple):
    """A word of a command as it stands, quotes and all, or an `operator` between commands, such as the end of a line.

    Of the word `NAME=(…)` the text is `NAME=`, and `items` are the words inside.
    """

    text: str
    line: int
    operator: bool = False
    items: tuple[Token, ...] | None = None


class Piece(NamedTuple):
    """A part of a word: text without its quotes, or, if it `expands`, `$NAME`, `${…}`, `$((…))` or `$(…)`."""

    text: str
    expands: bool
    quoted: bool


def tokens(text: str, source: str) -> list[Token]:
    """The words and operators of a shell script; comments, redirections and here-documents are left out.

    Raises `ConfigError` with file and line for a quote or bracket that is not closed.
    """
    text = text.replace("\r\n", "\n")
    text = _HERE_DOCUMENT.sub(lambda found: found["rest"] + "\n" * found[0].count("\n"), text)
    result, array = list[Token](), list[Token]()
    opened: Token | None = None  # the array that is being read
    at, line, in_test = 0, 1, False  # in [[ … ]], && and || belong to the test
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            what = f"quote ({text[at]})" if text[at] in "'\"" else f"bracket ({text[at : at + 2]})"
            raise ConfigError(f"{source}:{line}: a {what} that is opened here is not closed; {INSTEAD}")
        kind, word = str(found.lastgroup), found[str(found.lastgroup)]
        if kind == "array" and opened is None:
            opened, array = Token(word, line), []
        elif kind == "operator" and opened is not None:
            if word == ")":
                result.append(opened._replace(items=tuple(array)))
                opened = None
        elif kind == "operator":
            in_test = in_test and word in ("&&", "||")
            result.append(Token(word, line, operator=not in_test))
        elif kind == "word":
            in_test = (in_test or word == "[[") and word != "]]"
            (result if opened is None else array).append(Token(word, line))
        at = found.end()
        line += found[0].count("\n")
    if opened is not None:
        raise ConfigError(f"{source}:{opened.line}: a bracket that is opened here is not closed; {INSTEAD}")
    return result


def pieces(text: str) -> Iterator[Piece]:
    """What a word is made of."""
    for unit in _IN_WORD.findall(text):
        if len(unit) == 1:
            yield Piece(unit, False, False)
        elif unit[0] == "'":
            yield Piece(unit[1:-1], False, True)
        elif unit[0] == '"':
            yield Piece("", False, True)
            for inner in _IN_DOUBLE.findall(unit[1:-1]):
                escaped = inner[0] == "\\" and inner[1:] in ('"', "\\", "$", "`", "\n")
                yield _piece(inner[1:].replace("\n", "") if escaped else inner, quoted=True, plain=escaped)
        elif unit[0] == "\\":
            yield Piece(unit[1:].replace("\n", ""), False, True)
        else:
            yield _piece(unit, quoted=False)


def _piece(unit: str, *, quoted: bool, plain: bool = False) -> Piece:
    return Piece(unit, not plain and unit[:1] in ("$", "`") and len(unit) > 1, quoted)


def unquoted(word: Token) -> str:
    """A word as it stands, without its quotes."""
    return "".join(piece.text for piece in pieces(word.text))


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"(?P<name>\w+|[@*#?$!])(?:(?P<rule>:?[-=+?])(?P<default>.*)|(?P<cut>##?|%%?)(?P<pattern>[^$]*))?", re.DOTALL
)
_INTERPOLATION = re.compile(r"[\w.]+(:.*)?", re.DOTALL)  # of OmegaConf, not of the shell
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}
#: Asks for Ascend's plugin of PyTorch, which machines with GPUs do not have: what is said there.
_ASKS_FOR_NPU = re.compile(
    r"""python3? -c (['"])import torch_npu\1 *(?:&?[12]?>\S+ *)*&& *echo \S+ *\|\| *echo (\S+)"""
)
_TESTS = {"[": "]", "[[": "]]", "test": ""}


@dataclass(frozen=True)
class Argument:
    """An argument of a command; where `unknown` is given, `text` is how it stands in the script."""

    text: str
    line: int
    unknown: Unknown | None = None


Value = str | tuple[Argument, ...] | Unknown


class UnresolvedError(Exception):
    """A word needs a value that the text does not tell."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.why)
        self.unknown = unknown


class Variables:
    """The variables of a script. Those that are given from outside win over what the script assigns."""

    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._values: dict[str, Value] = {"#": "0", **given}  # a script is read as run without arguments
        self.assumed: dict[str, int] = {}  # what tests take for granted, and the first line of one

    def set(self, name: str, value: Value) -> None:
        """Assign, unless the variable is given from outside."""
        if name not in self._given:
            self._values[name] = value

    def assign(self, word: Token) -> bool:
        """Carry out `NAME=value`, `NAME+=value` or `NAME=(…)`; False if the word is none of these."""
        found = _ASSIGNMENT.fullmatch(word.text)
        if found is None:
            return False
        name, appends, rest = found.groups()
        value: Value
        if word.items is not None:
            value = tuple(argument for item in word.items for argument in self.arguments(item))
        else:
            try:
                value = self.text(Token(rest, word.line))
            except UnresolvedError as error:
                value = error.unknown
        match self._values.get(name) if appends else None, value:
            case (str() as before, str()) | (tuple() as before, tuple()):
                value = before + value  # type: ignore[operator]
            case (None, _) | (_, Unknown()):
                pass
            case _:
                return True
        self.set(name, value)
        return True

    # ---- words ------------------------------------------------------------------------------------------------------

    def arguments(self, word: Token) -> list[Argument]:
        try:
            return self._arguments(word, split=True)
        except UnresolvedError as error:
            return [Argument(unquoted(word), word.line, error.unknown)]

    def text(self, word: Token) -> str:
        """A word as one text, of which everything must be known. Raises `UnresolvedError`."""
        found = self._arguments(word, split=False)
        for argument in found:
            if argument.unknown:
                raise UnresolvedError(argument.unknown)
        return " ".join(argument.text for argument in found)

    def _arguments(self, word: Token, split: bool) -> list[Argument]:
        """With `split`, a variable without quotes becomes several arguments where its value has white space."""
        found, text, there = list[Argument](), "", False
        parts = list(pieces(word.text))
        for piece, following in zip_longest(parts, parts[1:]):
            several = self._array(piece, word.line)
            if several is not None:
                found += [Argument(text, word.line)] if text else []
                found += several
                text, there = "", False
                continue
            value = self._value(piece, folder=following is not None and following.text.startswith("/"))
            words = re.split(r"[ \t\n]+", value) if split and piece.expands and not piece.quoted else [value]
            text += words[0]
            there = there or not piece.expands or piece.quoted or bool(words[0])
            for part in words[1:]:
                found += [Argument(text, word.line)] if there else []
                text, there = part, bool(part)
        return [*found, Argument(text, word.line)] if there and (text or not found) else found

    def _array(self, piece: Piece, line: int) -> tuple[Argument, ...] | None:
        """The elements of `${array[@]}` or `$@`; None for anything that is one text."""
        if piece.text in ("$@", "$*", "${@}", "${*}") and piece.expands:
            return ()
        found = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", piece.text) if piece.expands else None
        value = self._values.get(found[1]) if found else None
        if isinstance(value, Unknown):
            raise UnresolvedError(value)
        if isinstance(value, str):
            return (Argument(value, line),)
        return value or () if found else None

    def _value(self, piece: Piece, *, folder: bool) -> str:
        """What a part of a word stands for; a `folder` that nothing sets stays as it is written.

        Where files lie bears on nothing; the names at a path's end do.
        """
        if not piece.expands:
            return piece.text
        try:
            return self._expanded(piece.text)
        except UnresolvedError as error:
            if folder and error.unknown.unset:
                return "$" + piece.text.strip("${}").partition(":")[0]  # braces are OmegaConf's
            raise

    def _expanded(self, text: str) -> str:
        """What `$NAME`, `${…}` or `$((…))` stands for."""
        if text.startswith("$(("):
            return str(self._arithmetic(text[3:-2]))
        if text.startswith(("$(", "`")):
            command = text.strip("`") if text.startswith("`") else text[2:-1]
            if asked := _ASKS_FOR_NPU.fullmatch(command.strip()):
                return asked[2]
            if command.startswith("expr "):
                return str(self._arithmetic(command.removeprefix("expr ")))
            raise UnresolvedError(Unknown(f"$({command.strip()}) would have to be run"))
        return self._parameter(text[2:-1] if text.startswith("${") else text[1:])

    def _parameter(self, text: str) -> str:
        """The value of a variable, or what stands behind its `:-`, which may hold expansions itself."""
        found = _PARAMETER.fullmatch(text)
        value = self._values.get(found["name"]) if found else None
        if isinstance(value, tuple):
            value = (value[0].unknown or value[0].text) if value else None
        if found is None:
            if _INTERPOLATION.fullmatch(text):
                return "${" + text + "}"
            raise UnresolvedError(Unknown(f"${{{text}}} is not understood"))
        name, rule, default = found["name"], found["rule"] or "", Token(found["default"] or "", 0)
        if isinstance(value, Unknown):
            raise UnresolvedError(replace(value, variable=value.variable or name))
        there = value is not None and (value != "" or not rule.startswith(":"))
        if rule.endswith("+"):
            return self.text(default) if there else ""
        if value is not None and there:
            return _cut(value, found["cut"], found["pattern"]) if found["cut"] else value
        if not rule or rule.endswith("?"):
            argument = name.isdigit()
            what = f"argument ${name} of the script" if argument else f"variable {name}"
            raise UnresolvedError(Unknown(f"{what} is not set", "" if argument else name, unset=not rule))
        if rule.endswith("="):
            self.set(name, self.text(default))
        return self.text(default)

    def _arithmetic(self, text: str) -> int:
        """The whole number that `$((text))` is."""
        written = "".join(self._expanded(piece.text) if piece.expands else piece.text for piece in pieces(text))
        try:
            return self._number(ast.parse(written.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ArithmeticError, ValueError):
            raise UnresolvedError(Unknown(f"$(({text})) is not understood")) from None

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name):
                return int(self._parameter(name))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._number(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._number(left), self._number(right))
        raise ValueError(ast.dump(node))

    # ---- conditions -------------------------------------------------------------------------------------------------

    def condition(self, words: list[Token]) -> bool | None:
        """What `[ … ]`, `[[ … ]]` or `test …` says; None if that cannot be told or it is another command."""
        first = words[0].text if words else ""
        if first == "!":
            inner = self.condition(words[1:])
            return None if inner is None else not inner
        if first not in _TESTS:
            return True if first in ("", "true", ":") else None
        return self._says(words[1:-1] if _TESTS[first] else words[1:])

    def _says(self, words: list[Token]) -> bool | None:
        bare = [word.text for word in words]
        for joint, joined in (("||", any), ("&&", all), ("-o", any), ("-a", all)):
            if joint in bare:
                at = bare.index(joint)
                sides = [self._says(words[:at]), self._says(words[at + 1 :])]
                return None if None in sides else joined(sides)
        if bare[:1] == ["!"]:
            inner = self._says(words[1:])
            return None if inner is None else not inner
        try:
            texts = [self._tested(word) for word in words]
            if len(texts) == 2 and texts[0] in ("-d", "-e", "-f", "-s") and texts[1]:
                self.assumed.setdefault(f"{unquoted(words[1])} is there", words[0].line)
                return True
            return self._test(texts)
        except UnresolvedError:
            return None

    def _tested(self, word: Token) -> str:
        """A word of a test: a variable that nothing sets is empty, as it is to the shell."""
        try:
            return self.text(word)
        except UnresolvedError as error:
            if not error.unknown.unset:
                raise
            self.assumed.setdefault(f"{error.unknown.variable or unquoted(word)} is not set, so empty", word.line)
            return ""

    def _test(self, texts: list[str]) -> bool | None:
        match texts:
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
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as comparison, right]:
                if all(re.fullmatch(r"[-+]?\d+", side) for side in (left, right)):
                    return bool(getattr(operator, comparison[1:])(int(left), int(right)))
        return None


def assigned(word: Token) -> tuple[str, bool]:
    """The name that a word assigns ("" if none) and whether it appends."""
    found = _ASSIGNMENT.fullmatch(word.text)
    return (found[1], bool(found[2])) if found else ("", False)


def _cut(value: str, sign: str, pattern: str) -> str:
    """`${NAME##*/}` or `${NAME%.yaml}`: without the start or end that matches, the longest if the sign is doubled."""
    ways = ((value[:i], value[i:]) if sign[0] == "#" else (value[i:], value[:i]) for i in range(len(value) + 1))
    kept = [rest for cut, rest in ways if fnmatchcase(cut, pattern)]
    return (min if len(sign) == 2 else max)(kept, key=len, default=value)

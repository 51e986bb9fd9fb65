"""Shell text as words and operators. Nothing is run; `rlsim.frameworks.variables` finds what a word stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rlsim.errors import ConfigError

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

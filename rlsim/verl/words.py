"""Shell text as words and operators. Nothing is run; what a word stands for is found later (`rlsim.verl.variables`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rlsim.errors import ConfigError

#: What to do with a script that is not understood.
INSTEAD = "or run the script with `--cfg job --resolve` behind its settings and give the configuration that it prints"
_BLANK = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)+")  # with comments
_OPERATOR = re.compile(r";;|&&|\|\||[;|&\n()]")
_REDIRECTION = re.compile(r"[<>][<>&-]{0,2}[ \t]*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_HERE_DOCUMENT = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1(?P<rest>[^\n]*)\n(?:.*?\n)??[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE
)
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!])?")
_WORD_ENDS = frozenset(" \t\n;&|()<>")
_BRACKETS = (("'", "'"), ('"', '"'), ("`", "`"), ("$((", "))"), ("$(", ")"), ("${", "}"))


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


class _UnclosedError(Exception):
    """A quote or bracket (`args[0]`) without its other half, and where it stands (`args[1]`)."""


def tokens(text: str, source: str) -> list[Token]:
    """The words and operators of a shell script; comments, redirections and here-documents are left out.

    Raises `ConfigError` with file and line for a quote or bracket that is not closed.
    """
    text = text.replace("\r\n", "\n")
    text = _HERE_DOCUMENT.sub(lambda found: found["rest"] + "\n" * found[0].count("\n"), text)
    try:
        return _Reader(text).tokens()
    except _UnclosedError as error:
        opening, at = error.args
        line = text.count("\n", 0, at) + 1
        what = f"a quote ({opening})" if opening in "'\"" else f"a bracket ({opening})"
        raise ConfigError(f"{source}:{line}: {what} that is opened here is not closed; mend it, {INSTEAD}") from None


def pieces(text: str, quoted: bool = False) -> Iterator[Piece]:
    """What a word, or what is inside double quotes, is made of."""
    at = 0
    while at < len(text):
        end = _unit_end(text, at, quoted)
        unit, at = text[at:end], end
        if unit[0] in "$`" and len(unit) > 1:
            yield Piece(unit, True, quoted)
        elif unit[0] == '"' and len(unit) > 1:
            yield Piece("", False, True)
            yield from pieces(unit[1:-1], quoted=True)
        elif unit[0] == "'" and len(unit) > 1:
            yield Piece(unit[1:-1], False, True)
        elif unit[0] == "\\":
            kept = quoted and unit[1:] not in ('"', "\\", "$", "`", "\n")
            yield Piece(unit if kept else unit[1:].replace("\n", ""), False, True)
        else:
            yield Piece(unit, False, quoted)


def unquoted(word: Token) -> str:
    """A word as it stands, without its quotes."""
    return "".join(piece.text for piece in pieces(word.text))


class _Reader:
    """Script text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1

    def tokens(self, closing: str = "") -> list[Token]:
        """What follows, to the end or to a closing bracket, which is read too."""
        found: list[Token] = []
        began, in_test = self.at, False  # in [[ … ]], && and || belong to the test
        while self.at < len(self.text):
            line = self.line
            if blank := _BLANK.match(self.text, self.at):
                self._take(blank.end())
            elif closing and self.text[self.at] == closing:
                self._take(self.at + 1)
                return found
            elif redirection := _REDIRECTION.match(self.text, self.at):
                self._take(redirection.end())
                self._take(self._word_end())
            elif operator := _OPERATOR.match(self.text, self.at):
                self._take(operator.end())
                in_test = in_test and operator[0] in ("&&", "||")
                found.append(Token(operator[0], line, operator=not in_test))
            else:
                found.append(self._word())
                in_test = (in_test or found[-1].text == "[[") and found[-1].text != "]]"
        if closing:
            raise _UnclosedError("(", began - 1)
        return found

    def _word(self) -> Token:
        line = self.line
        if array := _ARRAY.match(self.text, self.at):
            self._take(array.end())
            items = tuple(token for token in self.tokens(")") if not token.operator)
            return Token(array[0][:-1], line, items=items)
        return Token(self._take(self._word_end()), line)

    def _take(self, end: int) -> str:
        taken = self.text[self.at : end]
        self.at = end
        self.line += taken.count("\n")
        return taken

    def _word_end(self) -> int:
        at = self.at
        while at < len(self.text) and self.text[at] not in _WORD_ENDS:
            at = _unit_end(self.text, at)
        return at


def _unit_end(text: str, at: int, quoted: bool = False) -> int:
    """Where the quoted text, the expansion or the single character that begins at `at` ends."""
    if text[at] not in "'\"`$\\" or (quoted and text[at] == "'"):
        return at + 1
    if text[at] == "\\":
        return min(at + 2, len(text))
    for opening, closing in _BRACKETS:
        if text.startswith(opening, at):
            return _closed(text, at, opening, closing)
    name = _NAME.match(text, at)
    return name.end() if name else at + 1


def _closed(text: str, began: int, opening: str, closing: str) -> int:
    """Where the quotes or brackets that are opened at `began` are closed."""
    at, depth = began + len(opening), 0
    while depth or not text.startswith(closing, at):
        if at >= len(text):
            raise _UnclosedError(opening, began)
        here = text[at]
        if opening in "'`":
            at += 1
        elif opening == '"' or (opening == "${" and here == "'"):
            at = _unit_end(text, at, quoted=True)
        elif here in "'\"`$\\":
            at = _unit_end(text, at)
        else:
            depth += (here == opening[-1]) - (here == closing[0])
            at += 1
    return at + len(closing)

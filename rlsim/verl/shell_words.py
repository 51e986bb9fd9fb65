"""Shell text as words and operators. Nothing is run; what a word stands for is found later (`rlsim.verl.shell`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rlsim.errors import ConfigError

PartKind = Literal["text", "quoted", "variable", "arithmetic", "command", "array"]
OPERATORS = (";;", "&&", "||", ";", "|", "&", "\n", "(", ")")
_END = "".join({op[0] for op in OPERATORS}) + " \t<>"


class Part(NamedTuple):
    """A piece of a word: text as it is, or what is between `${` and `}`, `$((` and `))`, `$(` and `)`."""

    kind: PartKind
    text: str
    quoted: bool
    words: tuple[Word, ...] = ()  # of an array


@dataclass(frozen=True)
class Word:
    """One word of a command and the line it begins on."""

    parts: tuple[Part, ...]
    line: int

    @property
    def bare(self) -> str:
        """The word if it is plain unquoted text, as keywords are; else empty."""
        plain = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if plain else ""


@dataclass(frozen=True)
class Operator:
    """What stands between commands: one of `OPERATORS`."""

    text: str
    line: int


Token = Word | Operator


@dataclass
class _Reader:
    """A place in the text."""

    text: str
    source: str
    line: int = 1
    at: int = 0
    here_documents: list[str] = field(default_factory=list)

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        taken = self.peek(count)
        self.at += count
        self.line += taken.count("\n")
        return taken

    def fail(self, what: str, line: int) -> ConfigError:
        return ConfigError(f"{self.source}:{line}: {what}")


def tokens(text: str, source: str) -> list[Token]:
    """The words and operators of a shell script; comments and here-documents are left out.

    Raises `ConfigError` with file and line for a quote or bracket that is not closed.
    """
    reader = _Reader(text.replace("\r\n", "\n"), source)
    return _until(reader, "")


def _until(reader: _Reader, closing: str) -> list[Token]:
    """Tokens up to an unmatched `closing` bracket, which is taken too; to the end of the text without one."""
    found: list[Token] = []
    began, depth = reader.line, 0
    while reader.at < len(reader.text):
        here = reader.peek()
        if here in " \t" or reader.peek(2) == "\\\n":
            reader.take(2 if here == "\\" else 1)
        elif here == "#":
            while reader.peek() not in ("", "\n"):
                reader.take()
        elif found and _inside_test(found) and (joint := reader.peek(2)) in ("&&", "||"):
            found.append(Word((Part("text", joint, False),), reader.line))
            reader.take(2)
        elif closing and here == closing and not depth:
            reader.take()
            return found
        elif here in "<>":
            _redirection(reader)
        elif operator := next((op for op in OPERATORS if reader.peek(len(op)) == op), ""):
            depth += (operator == "(") - (operator == ")" and depth > 0)
            found.append(Operator(operator, reader.line))
            reader.take(len(operator))
            if operator == "\n":
                _skip_here_documents(reader)
        else:
            found.append(_word(reader))
    if closing:
        raise reader.fail(f"a bracket that is opened here is not closed by {closing!r}", began)
    return found


def _inside_test(found: list[Token]) -> bool:
    """Whether the tokens so far end inside `[[ … ]]`, where `&&` and `||` belong to the test."""
    for token in reversed(found):
        if isinstance(token, Operator) or token.bare == "]]":
            return False
        if token.bare == "[[":
            return True
    return False


def _redirection(reader: _Reader) -> None:
    """Skip `> file`, `2>&1`, `<< EOF` and the like; what they name is no word of the command."""
    operator = ""
    while reader.peek() in ("<", ">", "&", "-") and len(operator) < 3:
        operator += reader.take()
    while reader.peek() in (" ", "\t"):
        reader.take()
    if reader.peek() not in ("", "\n", ";", "|", "("):
        target = _word(reader)
        if operator in ("<<", "<<-"):
            reader.here_documents.append("".join(part.text for part in target.parts))


def _skip_here_documents(reader: _Reader) -> None:
    for end in reader.here_documents:
        while reader.at < len(reader.text):
            line, _, _ = reader.text[reader.at :].partition("\n")
            reader.take(len(line) + 1)
            if line.strip() == end:
                break
    reader.here_documents.clear()


def _word(reader: _Reader) -> Word:
    line, parts = reader.line, list[Part]()
    while (here := reader.peek()) and here not in _END:
        text = "".join(part.text for part in parts)
        if here == "'":
            parts.append(_single_quoted(reader))
        elif here == '"':
            parts += _double_quoted(reader)
        elif here in "$`":
            parts.append(_expansion(reader, quoted=False))
        elif here == "\\":
            reader.take()
            taken = reader.take()
            if taken != "\n":
                parts.append(Part("text", taken, True))
        else:
            parts.append(Part("text", reader.take(), False))
            if here == "=" and reader.peek() == "(" and text.rstrip("+").isidentifier():
                reader.take()
                inside = tuple(token for token in _until(reader, ")") if isinstance(token, Word))
                parts.append(Part("array", "", False, inside))
    return Word(tuple(parts), line)


def _single_quoted(reader: _Reader) -> Part:
    line = reader.line
    reader.take()
    text = ""
    while reader.peek() != "'":
        if not reader.peek():
            raise reader.fail("a quote (') that is opened here is not closed", line)
        text += reader.take()
    reader.take()
    return Part("text", text, True)


def _double_quoted(reader: _Reader) -> list[Part]:
    line, parts = reader.line, [Part("quoted", "", True)]
    reader.take()
    while (here := reader.peek()) != '"':
        if not here:
            raise reader.fail('a quote (") that is opened here is not closed', line)
        if here in "$`":
            parts.append(_expansion(reader, quoted=True))
        elif here == "\\" and reader.peek(2)[1:] in ('"', "\\", "$", "`", "\n"):
            reader.take()
            taken = reader.take()
            parts.append(Part("text", "" if taken == "\n" else taken, True))
        else:
            parts.append(Part("text", reader.take(), True))
    reader.take()
    return parts


def _expansion(reader: _Reader, quoted: bool) -> Part:
    """What begins with `$` or a backquote."""
    for opening, closing, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
        if reader.peek(len(opening)) == opening:
            return Part(kind, _between(reader, opening, closing), quoted)  # type: ignore[arg-type]
    if reader.peek() == "`":
        return Part("command", _between(reader, "`", "`"), quoted)
    reader.take()
    name = ""
    if reader.peek() in ("@", "*", "#", "?", "$", "!") or reader.peek().isdigit():
        name = reader.take()
    else:
        while reader.peek().isidentifier() or (name and reader.peek().isdigit()):
            name += reader.take()
    return Part("variable", name, quoted) if name else Part("text", "$", quoted)


def _between(reader: _Reader, opening: str, closing: str) -> str:
    """The text up to the matching bracket, which is taken too."""
    line, depth, text = reader.line, 0, ""
    reader.take(len(opening))
    inner = opening[-1]
    while not (depth == 0 and reader.peek(len(closing)) == closing):
        if not reader.peek():
            raise reader.fail(f"{opening} that is opened here is not closed", line)
        if inner != closing[0]:
            depth += (reader.peek() == inner) - (reader.peek() == closing[0])
        text += reader.take()
    reader.take(len(closing))
    return text

"""`key=value` overrides in a script that starts veRL: read, never run.

Assignments, `${NAME:-default}`, `$((1024 * 2))`, arrays, `if` and `case` are followed as far as the text tells; what
would have to be run (`$(…)`), or comes from outside, is unknown. An unknown value that is needed is an error.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rlsim.errors import ConfigError
from rlsim.verl.shell_values import Doubt, Element, Unknown, UnresolvedError, Variables, assignment, shown
from rlsim.verl.shell_words import Operator, Token, Word, tokens

_OVERRIDE = re.compile(r"(?P<mode>\+\+|\+|~)?(?P<key>[A-Za-z_][\w/]*(?:[.@][\w/]+)*)=(?P<value>.*)", re.DOTALL)
#: The first parts of keys of veRL's configuration.
ROOTS = frozenset(
    {"actor_rollout_ref", "algorithm", "async_training", "critic", "custom_reward_function", "data", "distillation",
     "reward", "reward_model", "rollout", "sandbox_fusion", "trainer"}
)  # fmt: skip
#: Choices of Hydra without a dot.
GROUPS = frozenset({"model_engine"})
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_OPENING = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}


@dataclass(frozen=True)
class Override:
    """`key=value` as a command has it; `value` is text, or why it cannot be told."""

    key: str
    value: str | Unknown
    line: int
    removes: bool = False  # ~key


@dataclass(frozen=True)
class Script:
    """The overrides of the last command that has some, Hydra's `--config-name` if given, and what to know about it."""

    overrides: tuple[Override, ...]
    config_name: str
    notes: tuple[str, ...]


def is_override(text: str) -> bool:
    """Whether a word sets a key of veRL's configuration."""
    found = _OVERRIDE.fullmatch(text)
    return found is not None and ("." in found["key"] or found["key"] in GROUPS) and _root(found["key"])


def parse_override(text: str, line: int = 0) -> Override:
    """A word of the form `key=value`; see `is_override`."""
    found = _OVERRIDE.fullmatch(text)
    assert found is not None
    return Override(found["key"], found["value"], line, found["mode"] == "~")


def read_script(text: str, source: str, given: dict[str, str]) -> Script:
    """The overrides in a script, or in a plain list of overrides. `given` are variables set from outside.

    Raises `ConfigError` with file and line for text that no shell reads.
    """
    run = _Run(tokens(text, source), source, Variables(given))
    run.block(0, len(run.tokens))
    commands = [c for c in run.commands if c]
    notes = list(dict.fromkeys(run.notes))
    if len(commands) > 1:
        lines = ", ".join(str(command[0].line) for command in commands)
        notes.append(f"{len(commands)} commands with settings of veRL (from lines {lines}): the last one is taken")
    return Script(tuple(commands[-1]) if commands else (), run.config_name, tuple(notes))


def _root(key: str) -> bool:
    return re.split(r"[.@/]", key)[0] in ROOTS or key in GROUPS


class _Run:
    """Goes through the tokens once, as the shell would."""

    def __init__(self, found: list[Token], source: str, variables: Variables) -> None:
        self.tokens = found
        self.source = source
        self.variables = variables
        self.commands: list[list[Override]] = []
        self.config_name = ""
        self.notes: list[str] = []

    def block(self, at: int, end: int) -> None:
        """Carry out the tokens from `at` to `end`."""
        status: bool | None = True
        joint = ""
        while at < end:
            token = self.tokens[at]
            if isinstance(token, Operator):
                joint = token.text if token.text in ("&&", "||") else joint if token.text == "\n" and joint else ""
                at += 1
                continue
            stop = self._command_end(at, end)
            wanted = {"&&": status is True, "||": status is False}.get(joint, True)
            if not wanted and status is None:
                self._unknown(at, stop, "")
            elif wanted:
                status = self._carry_out(at, stop)
            at, joint = stop, ""

    def _command_end(self, at: int, end: int) -> int:
        """The end of the command that begins at `at`: of a compound one its closing word."""
        token = self.tokens[at]
        assert isinstance(token, Word)
        if token.bare in _OPENING:
            return self._matching(at, end) + 1
        while at < end and isinstance(self.tokens[at], Word):
            at += 1
        return at

    def _matching(self, at: int, end: int) -> int:
        """Where the closing word of the compound command at `at` stands."""
        depth = 0
        for i in range(at, end):
            word = self._bare(i)
            if self._starts_command(i):
                depth += (word in _OPENING) - (word in _OPENING.values())
                if not depth:
                    return i
        return end - 1

    def _bare(self, i: int) -> str:
        token = self.tokens[i]
        return token.bare if isinstance(token, Word) else ""

    def _starts_command(self, i: int) -> bool:
        """Whether a keyword may stand here: at the start of a command."""
        before = self.tokens[i - 1] if i else Operator("\n", 0)
        return isinstance(before, Operator) or before.bare in ("then", "else", "do", "elif", "if", "{", "!")

    def _carry_out(self, at: int, end: int) -> bool | None:
        """Carry out one command: whether it succeeds, None if that cannot be told."""
        match self._bare(at):
            case "if":
                self._if(at, end)
            case "case":
                self._case(at, end)
            case "for" | "while" | "until" | "select" as kind:
                self._loop(at, end, kind)
            case "{" | "}" | "then" | "do" | "done" | "fi" | "esac" | "else":
                return self._carry_out(at + 1, end) if at + 1 < end else True
            case _:
                return self._simple([t for t in self.tokens[at:end] if isinstance(t, Word)])
        return True

    def _word_after(self, at: int) -> Word:
        """What a `case` or a `for` is about."""
        token = self.tokens[at + 1] if at + 1 < len(self.tokens) else None
        if not isinstance(token, Word):
            raise ConfigError(f"{self.source}:{self.tokens[at].line}: expected a word behind `{self._bare(at)}`")
        return token

    # ---- compound commands ------------------------------------------------------------------------------------------

    def _parts(self, at: int, end: int, words: tuple[str, ...]) -> list[int]:
        """Where these keywords stand at the level of the compound command from `at` to `end`."""
        found, i = list[int](), at
        while i < end:
            word = self._bare(i)
            if i > at and word in _OPENING and self._starts_command(i):
                i = self._matching(i, end)
            elif word in words and (i == at or self._starts_command(i)):
                found.append(i)
            i += 1
        return found

    def _if(self, at: int, end: int) -> None:
        marks = [*self._parts(at, end, ("if", "then", "elif", "else", "fi"))]
        i = 0
        while i < len(marks) - 1:
            word, start, stop = self._bare(marks[i]), marks[i] + 1, marks[i + 1]
            if word == "else":
                self.block(start, stop)
                return
            if word in ("if", "elif"):
                says = self._condition(start, stop)
                body = (marks[i + 1] + 1, marks[i + 2]) if i + 2 < len(marks) else (stop, stop)
                if says is None:
                    words = [t for t in self.tokens[start:stop] if isinstance(t, Word)]
                    self._unknown(body[0], end - 1, self.variables.deciding(words))
                    return
                if says:
                    self.block(*body)
                    return
                i += 1
            i += 1

    def _condition(self, at: int, end: int) -> bool | None:
        """Commands joined by `&&` and `||` behind an `if`."""
        status: bool | None = True
        joint, i = "", at
        while i < end:
            token = self.tokens[i]
            if isinstance(token, Operator):
                joint = token.text if token.text in ("&&", "||") else joint
                i += 1
                continue
            stop = i
            while stop < end and isinstance(self.tokens[stop], Word):
                stop += 1
            words = [t for t in self.tokens[i:stop] if isinstance(t, Word) and t.bare not in ("{", "}")]
            if words and (joint != "||" or status is not True) and (joint != "&&" or status is not False):
                status = _joined(status, joint, self.variables.condition(words))
            i, joint = stop, ""
        return status

    def _case(self, at: int, end: int) -> None:
        """`case WORD in PATTERN) … ;; esac`: the branch that matches."""
        word = self._word_after(at)
        try:
            value = self.variables.text(word)
        except UnresolvedError:
            self._unknown(at + 2, end - 1, self.variables.deciding([word]))
            return
        i = next((k for k in range(at + 2, end) if self._bare(k) == "in"), end) + 1
        while i < end - 1:
            close = next((k for k in range(i, end) if self.tokens[k] == Operator(")", self.tokens[k].line)), end)
            patterns = [t for t in self.tokens[i:close] if isinstance(t, Word)]
            stop = self._branch_end(close + 1, end - 1)
            if any(fnmatchcase(value, self._pattern(pattern)) for pattern in patterns):
                self.block(close + 1, stop)
                return
            i = stop + 1

    def _pattern(self, word: Word) -> str:
        try:
            return self.variables.text(word)
        except UnresolvedError:
            return "\0"

    def _branch_end(self, at: int, end: int) -> int:
        while at < end:
            token = self.tokens[at]
            if isinstance(token, Operator) and token.text == ";;":
                return at
            if isinstance(token, Word) and token.bare in _OPENING and self._starts_command(at):
                at = self._matching(at, end)
            at += 1
        return end

    def _loop(self, at: int, end: int, kind: str) -> None:
        """A loop's body once; what it goes over is unknown unless that is a single word."""
        marks = self._parts(at, end, (kind, "do", "done"))
        if len(marks) < 3:
            return
        if kind == "for":
            listed = [t for t in self.tokens[marks[0] + 1 : marks[1]] if isinstance(t, Word)]
            name, values = self._word_after(at).bare, list[str]()
            with suppress(UnresolvedError):
                values = [field for word in listed[2:] for field in self.variables.fields(word, split=True)]
            line = self.tokens[at].line
            known = values[0] if len(values) == 1 else Unknown(f"the loop of line {line} goes over it", name)
            self.variables.set(name, known)
        self.block(marks[1] + 1, marks[2])

    def _unknown(self, at: int, end: int, deciding: str) -> None:
        """A branch that may or may not be taken: what it assigns is not known any more."""
        line = self.tokens[at].line
        on = f" on {deciding}" if deciding else ""
        why = f"it is set under a condition{on} (line {line}) that the text does not tell"
        for token in self.tokens[at:end]:
            assigned = assignment(token) if isinstance(token, Word) else None
            words = [word for part in assigned[2] for word in part.words] if assigned else []
            settings = any(is_override(shown(word)) for word in words)
            if assigned and not assigned[1] and (settings or not words):
                self.variables.set(assigned[0], Unknown(why, deciding or assigned[0]))
            elif settings:
                hint = f": give {deciding}=… to have them" if deciding else ""
                self.notes.append(f"line {line}: settings added under a condition{on} are left out{hint}")

    # ---- simple commands --------------------------------------------------------------------------------------------

    def _simple(self, words: list[Word]) -> bool | None:
        if words[0].bare in ("[", "[[", "test", "!"):
            return self.variables.condition(words)
        while words and (words[0].bare in _DECLARING or assignment(words[0])):
            if assigned := assignment(words[0]):
                name, appends, parts = assigned
                value = self.variables.value(words[0], parts)
                (self.variables.append if appends else self.variables.set)(name, value)
            words = words[1:]
        found: list[Override] = []
        for i, word in enumerate(words):
            found += self._overrides(word, words[i + 1 : i + 2], among_settings=bool(found))
        if found:
            # A list of settings needs no command; and a comment between the lines of one cuts it in two.
            if not self.commands or not is_override(shown(words[0])):
                self.commands.append([])
            self.commands[-1] += found
        return True

    def _overrides(self, word: Word, following: list[Word], *, among_settings: bool) -> list[Override]:
        found = []
        several = among_settings and len(word.parts) == 1 and word.parts[0].kind == "variable"
        for field in self.variables.element(word):
            text = field.shown if isinstance(field, Doubt) else field
            line = field.line if isinstance(field, Doubt | Element) else word.line
            if text.startswith("--config-name"):
                self.config_name = text.partition("=")[2] or (shown(following[0]) if following else "")
            if is_override(text):
                override = parse_override(text, line)
                found.append(replace(override, value=field.unknown) if isinstance(field, Doubt) else override)
            elif isinstance(field, Doubt) and (several or "[@]" in text) and "=" not in text:
                self.notes.append(f"line {word.line}: the settings in {text} are not known: {field.unknown.why}")
        return found


def _joined(status: bool | None, joint: str, says: bool | None) -> bool | None:
    """What two conditions say together: `a && b`, `a || b`, or the last one alone."""
    if not joint:
        return says
    deciding = joint == "||"
    return deciding if deciding in (status, says) else None if None in (status, says) else not deciding

"""Settings in a script that starts a framework, `key=value` or `--flag value`: read, never run.

Assignments, `${NAME:-default}`, `$((1024 * 2))`, arrays, `if` and `case` are followed as far as the text tells; what
would have to be run (`$(…)`), or comes from outside, is unknown. An unknown value that is needed is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from rlsim.errors import ConfigError
from rlsim.frameworks.settings import Unknown
from rlsim.frameworks.variables import INSTEAD, Argument, Token, Variables, assigned, tokens, unquoted

#: What sbatch takes from a script's `#SBATCH` lines, and the variables in which the script finds it.
_SBATCH = {
    r"(?:--nodes[= ]|-N ?)(\d+)": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    r"(?:--gres[= ]gpu:(?:\w+:)?|--gpus-per-node[= ](?:\w+:)?)(\d+)": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_STRAY = ("}", "then", "do", "done", "fi", "esac", "else", "elif")


@dataclass(frozen=True)
class Override:
    """`key=value` as a command has it; `value` is text, or why it cannot be told."""

    key: str
    value: str | Unknown
    line: int
    removes: bool = False  # ~key


#: Adds an argument of a command, behind that text, to the settings found in it; false if it is none, nor part of one.
Takes = Callable[[list[Override], str, Argument], bool]


@dataclass(frozen=True)
class Script:
    """The overrides of the last command that has some, the Python module that it runs ("" if none is named), Hydra's
    `--config-name` if given, the files that it sources, and what to know about it."""

    overrides: tuple[Override, ...]
    program: str
    config_name: str
    sourced: tuple[str, ...]
    notes: tuple[str, ...]


def read_script(text: str, source: str, given: dict[str, str], takes: Takes) -> Script:
    """The overrides in a script, or in a plain list of overrides. `given` are variables set from outside.

    Raises `ConfigError` with file and line for text that no shell reads.
    """
    try:
        run = _Run(tokens(text, source), source, Variables(given), takes)
        run.submitted(text)
        while run.at < len(run.tokens):
            run.block(mode=True)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be read; {INSTEAD}") from None
    commands = run.commands
    notes = list(dict.fromkeys(run.notes))
    if run.variables.assumed:
        assumed = ", ".join(f"{what} (line {line})" for what, line in run.variables.assumed.items())
        notes.append(f"taken in tests: {assumed}")
    if len(commands) > 1:
        lines = ", ".join(str(command[0].line) for command in commands)
        notes.append(f"{len(commands)} commands with settings (from lines {lines}): the last one is taken")
    program = run.programs[-1] if commands else ""
    return Script(tuple(commands[-1]) if commands else (), program, run.config_name, tuple(run.sourced), tuple(notes))


class _Doubt(NamedTuple):
    """Commands that may or may not be carried out, and the variable on which that depends, if it is one."""

    line: int
    deciding: str


#: Whether commands are carried out, passed over, or only cast doubt on what they set.
_Mode = bool | _Doubt


class _Run:
    """Goes through the tokens once, as the shell would."""

    def __init__(self, found: list[Token], source: str, variables: Variables, takes: Takes) -> None:
        self.tokens = found
        self.source = source
        self.variables = variables
        self.takes = takes
        self.at = 0
        self.commands: list[list[Override]] = []
        self.programs: list[str] = []  # of each command
        self.config_name = ""
        self.sourced: list[str] = []
        self.notes: list[str] = []

    def submitted(self, text: str) -> None:
        """Sets what Slurm tells a script that it was submitted as its `#SBATCH` lines say."""
        for pattern, names in _SBATCH.items():
            if found := re.search(rf"^#SBATCH\s+{pattern}\b", text, re.MULTILINE):
                for name in names:
                    self.variables.set(name, found[1])
                self.notes.append(f"{names[0]} = {found[1]}, as its line {found[0]!r} says")

    def block(self, *closing: str, mode: _Mode, asked: bool = False) -> bool | None:
        """Commands up to a closing word, which is left: whether the last succeeds, None if that cannot be told.

        Where the status is `asked` for, it is told of tests only; other commands count as successful elsewhere.
        """
        status: bool | None = True
        joint = ""
        while self.at < len(self.tokens) and self._here() not in closing:
            token = self.tokens[self.at]
            if token.operator:
                self.at += 1
                if token.text != "\n":
                    joint = token.text if token.text in ("&&", "||") else ""
                continue
            wanted: _Mode = mode
            if joint and mode is True:
                wanted = _Doubt(token.line, "") if status is None else status is (joint == "&&")
            says = self._command(wanted, asked)
            status, joint = says if wanted is True else status, ""
        return status

    def _here(self) -> str:
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def _words(self) -> list[Token]:
        found = []
        while self.at < len(self.tokens) and not self.tokens[self.at].operator:
            found.append(self.tokens[self.at])
            self.at += 1
        return found

    def _command(self, mode: _Mode, asked: bool) -> bool | None:
        """One command, which is passed: whether it succeeds."""
        match self._here():
            case "if":
                self._if(mode)
            case "case":
                self._case(mode)
            case "for" | "select" | "while" | "until":
                self._loop(mode)
            case "{":
                self.at += 1
                status = self.block("}", mode=mode, asked=asked)
                self.at += 1
                return status
            case word if word in _STRAY:
                self.at += 1
            case _:
                words = self._words()
                if mode is True:
                    return self._simple(words, asked)
                if mode:
                    self._doubt(words, mode)
        return True

    def _subject(self, keyword: Token) -> Token:
        """What a `case` or a `for` is about, which is passed."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token is None or token.operator:
            raise ConfigError(f"{self.source}:{keyword.line}: expected a word behind `{keyword.text}`; {INSTEAD}")
        self.at += 1
        return token

    # ---- compound commands ------------------------------------------------------------------------------------------

    def _if(self, mode: _Mode) -> None:
        while self._here() in ("if", "elif"):
            self.at += 1
            began = self.at
            says = self.block("then", mode=mode, asked=True)
            line = self.tokens[min(self.at, len(self.tokens) - 1)].line
            branch = mode
            if mode is True and says is None:
                mode = branch = _Doubt(line, self._deciding(self.tokens[began : self.at]))
            elif mode is True:
                mode, branch = not says, bool(says)
            self.at += 1
            self.block("elif", "else", "fi", mode=branch)
        if self._here() == "else":
            self.at += 1
            self.block("fi", mode=mode)
        self.at += 1

    def _case(self, mode: _Mode) -> None:
        """`case WORD in PATTERN) … ;; esac`: the branch that matches."""
        keyword = self.tokens[self.at]
        self.at += 1
        word = self._subject(keyword)
        subject = self.variables.arguments(word)
        if mode is True and any(argument.unknown for argument in subject):
            mode = _Doubt(word.line, self._deciding([word]))
        value = " ".join(argument.text for argument in subject)
        self.at += 1  # in
        while self.at < len(self.tokens) and self._here() != "esac":
            if self.tokens[self.at].operator:
                self.at += 1
                continue
            patterns = self._words()
            while self._here() == "|":
                self.at += 1
                patterns += self._words()
            known = [a.text for pattern in patterns for a in self.variables.arguments(pattern) if not a.unknown]
            matches = mode is True and any(fnmatchcase(value, pattern) for pattern in known)
            branch = matches if mode is True else mode
            self.at += 1
            self.block(";;", "esac", mode=branch)
            mode = False if matches else mode
        self.at += 1

    def _loop(self, mode: _Mode) -> None:
        """A loop's body once, unless its condition says no at once; what it goes over is unknown."""
        keyword = self.tokens[self.at]
        self.at += 1
        if keyword.text in ("for", "select") and self._here() != "(":  # for ((i = 0; …)) names no variable
            name = self._subject(keyword).text
            if mode is True:
                self.variables.set(name, Unknown(f"the loop of line {keyword.line} goes over it", name))
        elif keyword.text in ("while", "until"):
            says = self.block("do", mode=mode, asked=True)
            mode = mode if mode is not True or says is None else says is (keyword.text == "while")
        while self._here() not in ("do", ""):
            self.at += 1
        self.at += 1
        self.block("done", mode=mode)
        self.at += 1

    def _deciding(self, found: Sequence[Token]) -> str:
        """The variable that keeps the first unknown of these words from being told; empty if none does."""
        words = (word for word in found if not word.operator)
        unknown = (argument.unknown for word in words for argument in self.variables.arguments(word))
        return next((one.variable for one in unknown if one), "")

    def _doubt(self, words: list[Token], doubt: _Doubt) -> None:
        """What a command that may or may not be carried out assigns is not known any more."""
        condition = f"under a condition{f' on {doubt.deciding}' if doubt.deciding else ''}"
        why = f"it is set {condition} (line {doubt.line}) that the text does not tell"
        for word in words:
            name, appends = assigned(word)
            settings = any(map(self._begins, word.items or ()))
            if name and not appends and (settings or not word.items):
                self.variables.set(name, Unknown(why, doubt.deciding or name))
            elif settings:
                hint = f": give {doubt.deciding}=… to have them" if doubt.deciding else ""
                self.notes.append(f"line {doubt.line}: settings added {condition} are left out{hint}")

    # ---- simple commands --------------------------------------------------------------------------------------------

    def _simple(self, words: list[Token], asked: bool) -> bool | None:
        if asked or words[0].text in ("[", "[[", "test", "!"):
            return self.variables.condition(words)
        while words and (words[0].text in _DECLARING or self.variables.assign(words[0])):
            words = words[1:]
        if len(words) > 1 and words[0].text in ("source", "."):
            self.sourced.append(unquoted(words[1]))
        found: list[Override] = []
        program, before = "", ""
        for i, word in enumerate(words):
            for argument in self.variables.arguments(word):
                taken = self.takes(found, before, argument)
                program, before = argument.text if before == "-m" else program, argument.text
                if argument.text.startswith("--config-name"):
                    following = unquoted(words[i + 1]) if i + 1 < len(words) else ""
                    self.config_name = argument.text.partition("=")[2] or following
                if not taken and argument.unknown and "=" not in argument.text:
                    self._note_unknown(word, argument, argument.unknown, among_settings=bool(found))
        if found:
            # A list of settings needs no command; and a comment between the lines of one cuts it in two.
            if not self.commands or not self._begins(words[0]):
                self.commands.append([])
                self.programs.append(program)
            self.commands[-1] += found
        return True

    def _begins(self, word: Token) -> bool:
        return self.takes([], "", Argument(unquoted(word), word.line))

    def _note_unknown(self, word: Token, argument: Argument, unknown: Unknown, *, among_settings: bool) -> None:
        """Settings may be in an array, or in a variable that stands among other settings, whose value is not known."""
        alone = '"' not in word.text and re.fullmatch(r"\$\w+|\$\{\w[^}]*\}", argument.text)
        if "[@]" in argument.text or (among_settings and alone):
            self.notes.append(f"line {word.line}: the settings in {argument.text} are not known: {unknown.why}")

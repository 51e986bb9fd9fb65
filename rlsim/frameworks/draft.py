"""An experiment file to be, with the comment that says where each value is from; and changes of a framework's own file:
a script's lines and a YAML file's keys, in their place."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsim.base.output import check_file, write_text
from rlsim.errors import ConfigError, printable

WIDTH = 120
#: Whose default a comment says a value is, as `Settings.where` writes it: a program, and its release.
_DEFAULT = re.compile(r"([\w-]+(?: \d[\w.]*)?'s default)")
ASSUMED = "assumed"


@dataclass(frozen=True)
class Entry:
    """A value and what is said about it; one without a comment is written without. A tuple of entries is a list whose
    items have comments of their own."""

    value: Any
    comment: str = ""

    @property
    def source(self) -> str:
        """Whose value it is, by its comment: `assumed`, the default of some program, or given (empty)."""
        found = _DEFAULT.search(self.comment)
        return ASSUMED if self.comment.startswith(ASSUMED) else found[1] if found else ""


@dataclass
class Draft:
    """The keys of an experiment in order; a nested mapping is a block of its own."""

    entries: dict[str, Entry | dict[str, Entry]]
    heading: list[str] = field(default_factory=list)  # comments at the top
    missing: list[str] = field(default_factory=list)  # what bears on time and is not represented
    notes: list[str] = field(default_factory=list)  # what was assumed
    unread: list[str] = field(default_factory=list)  # keys that were not asked for
    refused: list[str] = field(default_factory=list)  # why the framework or its engine would not start

    def block(self, key: str) -> dict[str, Entry]:
        """The entries of a block, which may be new."""
        found = self.entries.setdefault(key, {})
        assert isinstance(found, dict)
        return found

    def data(self) -> dict[str, Any]:
        return {
            key: _plain(entry) if isinstance(entry, Entry) else {name: _plain(item) for name, item in entry.items()}
            for key, entry in self.entries.items()
        }

    def sources(self) -> dict[str, Entry]:
        found: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            inner = {key: entry} if isinstance(entry, Entry) else {f"{key}.{name}": one for name, one in entry.items()}
            for name, one in inner.items():
                if one.source:
                    found.setdefault(one.source, []).append(name)
        return {source: Entry(found[source]) for source in sorted(found, key=lambda source: source != ASSUMED)}

    def text(self) -> str:
        lines = [line for text in self.heading for line in _comment(text)]
        for title, items in (("Assumed", self.notes), ("Not represented, though it bears on time", self.missing)):
            if items:
                lines += ["#", f"# {title}:", *(line for item in items for line in _comment(item, "- "))]
        if self.unread:
            lines += ["#", *_comment(f"Not taken from the configuration: {', '.join(self.unread)}")]
        for key, entry in self.entries.items():
            if isinstance(entry, Entry):
                lines += _lines(key, entry)
            elif entry:
                lines.append(f"{key}:")
                lines += [f"  {line}" for name, item in entry.items() for line in _lines(name, item, WIDTH - 2)]
        return printable("\n".join(lines)) + "\n"

    def write(self, out: Path, *, force: bool = False) -> None:
        """Write the file; raises `ConfigError` if there is one and `force` is off."""
        check_free(out, force)
        write_text(out, self.text())


def check_free(out: Path, force: bool) -> None:
    """Raises `ConfigError` if a file is there and `force` is off, or it cannot be written."""
    check_file(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; give --force to write over it, or another --out")


def _comment(text: str, bullet: str = "") -> list[str]:
    indent = " " * len(bullet)
    return textwrap.wrap(text, WIDTH, initial_indent=f"# {bullet}", subsequent_indent=f"# {indent}",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _plain(entry: Entry) -> Any:
    return [item.value for item in entry.value] if isinstance(entry.value, tuple) else entry.value


def _lines(key: str, entry: Entry, width: int = WIDTH) -> list[str]:
    """`key: value # comment`; the comment above if the line would be too long for it."""
    if isinstance(entry.value, tuple):
        items = (line for item in entry.value for line in _commented(f"- {yaml_text(item.value)}", item, width - 2))
        return [f"{key}:", *(f"  {line}" for line in items)]
    return _commented(f"{key}: {yaml_text(entry.value)}", entry, width)


def _commented(line: str, entry: Entry, width: int) -> list[str]:
    if not entry.comment:
        lists = isinstance(entry.value, list)
        return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) if lists else [line]
    if len(line) + 3 + len(entry.comment) <= width:
        return [f"{line} # {entry.comment}"]
    return [*_comment(entry.comment), line]


def yaml_text(value: Any) -> str:
    """A value as YAML on one line."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)  # ruamel's stubs know no True here
    yaml.default_flow_style = True
    yaml.width = 10_000
    yaml.sort_base_mapping_type_on_output = False
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue().removesuffix("...\n").strip()


def written(value: Any) -> str:
    """A value as `key=value` of a framework has it."""
    return value if isinstance(value, str) else yaml_text(value)


#: Parts of a configuration that take any key, for which Hydra's `++` is needed.
_OPEN = re.compile(r"\.(engine_kwargs|override_\w+|vllm_kwargs)\.")
#: A line of a command that sets a key: what is before and behind the value.
_SETS = r"^(?P<before>\s*['\"]?\+{{0,2}}{key}=).*?(?P<behind>['\"]?(?:\s+\"?\$[@{{]\S*)*(?:\s*\\)?)$"
#: What begins a word behind a flag that is none of its values: another flag, an array of them, the end of the command.
_NO_VALUE = r"--|[\\#)|&;]|\d*[<>]|['\"]?\$(?:@|\{\w+\[)"
_ANY_KEY = r"[a-z]\w*(?:\.\w+)+"


def override(key: str, value: Any) -> str:
    """`key=value`, or `--flag value`, as the framework's command line takes it."""
    if key.startswith("--") and (value is None or isinstance(value, bool)):
        return key if value else f"(no {key})"
    text = written(value)
    quoted = f"'{text}'" if re.search(r"[\s\[\]{}*?$&;|<>()]", text) else text
    if key.startswith("--"):
        return f"{key} {quoted}"
    return f"{'++' * bool(_OPEN.search(key))}{key}={quoted}"


#: Parents of a YAML file, and a script that asks for its own folder.
_BESIDE = re.compile(r"^defaults:[\s-]*[\"']?[\w./-]+\.ya?ml|BASH_SOURCE|dirname[ \"'-]+\$\{?0", re.MULTILINE)


def check_new(out: Path, source: Path) -> None:
    """Raises `ConfigError` if there is a file already, none can be written, or `source` names files beside itself that
    are not beside `out`."""
    check_file(out)
    if out.exists():
        raise ConfigError(f"{out} exists: give another file to --write")
    elsewhere = source.is_file() and source.resolve().parent != out.resolve().parent
    if elsewhere and (found := _BESIDE.search(source.read_text(encoding="utf-8", errors="replace"))):
        what = f"{source} names files by where it lies ({found[0].strip()})"
        raise ConfigError(f"{what}: give --write a file in the same folder, such as {source.with_stem('tuned')}")


def write_changes(source: Path, changes: Mapping[str, Any], out: Path) -> None:
    """Write `out`: the file `source` with these keys set.

    Raises `ConfigError` as `check_new`, and for a script no line of which sets a key.
    """
    check_new(out, source)
    text = source.read_text(encoding="utf-8")
    flags = any(key.startswith("--") for key in changes)
    change = _flags if flags else _yaml if source.suffix in (".yaml", ".yml") else _script
    write_text(out, change(text, changes, source))
    out.chmod(source.stat().st_mode & 0o777)


def _yaml(text: str, changes: Mapping[str, Any], _: Path) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    from rlsim.experiment.load import place_in

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    data = yaml.load(text)
    for key, value in changes.items():
        *parents, last = key.split(".")
        at = data
        for name in parents:
            if (place := place_in(at, name)) is None and not isinstance(at.get(name), CommentedMap | CommentedSeq):
                at[name] = CommentedMap()
            at = at[name if place is None else place]
        at[last if (place := place_in(at, last)) is None else place] = value
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _script(text: str, changes: Mapping[str, Any], source: Path) -> str:
    """A line that sets a key is changed where it is; new ones go before the last line that sets one."""
    lines = text.split("\n")
    for key, value in changes.items():
        setting = re.compile(_SETS.format(key=re.escape(key)))
        found = {i: there for i, line in enumerate(lines) if (there := setting.match(line))}
        for i, there in found.items():
            new, behind = override(key, value).partition("=")[2], there["behind"].lstrip("'\"")
            if there["before"].lstrip()[0] in "'\"":  # quotes around key and value
                new, behind = written(value), there["behind"]
            lines[i] = f"{there['before']}{new}{behind}"
        if not found:
            at, there = _last(lines, re.compile(_SETS.format(key=_ANY_KEY)), "sets a key", source)
            indent = there[0].removesuffix(there[0].lstrip())
            lines.insert(at, f"{indent}{override(key, value)} \\")
    return "\n".join(lines)


def _last(lines: Sequence[str], form: re.Pattern[str], does: str, source: Path) -> tuple[int, re.Match[str]]:
    """The last line of that form; raises `ConfigError` if none of `source` has it."""
    for at in reversed(range(len(lines))):
        if found := form.match(lines[at]):
            return at, found
    raise ConfigError(f"{source}: no line of it {does}: add the lines above to your command")


def _flags(text: str, changes: Mapping[str, Any], source: Path) -> str:
    """A flag is changed, or taken out, where it stands; new ones go before the last line that begins with one."""
    lines = text.split("\n")
    for key, value in changes.items():
        new = "" if value is None or value is False else override(key, value)
        values = r"(?:=[^\s\\]+)?" if isinstance(value, bool) else rf"(?:[ =]+(?!{_NO_VALUE})[^\s\\]+)*"
        setting = re.compile(rf"(?<![\w-]){re.escape(key)}(?![\w-]){values}")
        if key == "program":
            setting, new = re.compile(r"\btrain(?:_async)?\.py\b"), str(value)
        places = [i for i, line in enumerate(lines) if setting.search(line) and not line.lstrip().startswith("#")]
        for i in reversed(places):
            lines[i] = setting.sub(new.replace("\\", r"\\"), lines[i])
            if lines[i].strip() in ("", "\\"):
                del lines[i]
        if new and not places:
            at, found = _last(lines, re.compile(r"(\s*)--[a-z][^\\]*(\\?)$"), "begins with a flag", source)
            lines.insert(at, f"{found[1]}{new} {found[2]}".rstrip())
    return "\n".join(lines)

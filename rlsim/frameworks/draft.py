"""An experiment file to be: keys, values, and the comment that says where each value is from."""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsim.base.output import check_file, write_text
from rlsim.errors import ConfigError

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
        """The experiment as a mapping."""
        return {
            key: _plain(entry) if isinstance(entry, Entry) else {name: _plain(item) for name, item in entry.items()}
            for key, entry in self.entries.items()
        }

    def sources(self) -> dict[str, Entry]:
        """The keys that are not given, by whose values they are."""
        found: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            inner = {key: entry} if isinstance(entry, Entry) else {f"{key}.{name}": one for name, one in entry.items()}
            for name, one in inner.items():
                if one.source:
                    found.setdefault(one.source, []).append(name)
        return {source: Entry(found[source]) for source in sorted(found, key=lambda source: source != ASSUMED)}

    def text(self) -> str:
        """The file."""
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
        return "\n".join(lines) + "\n"

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

"""Settings put into a framework's own file: a script's lines and a YAML file's keys, in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rlsim.base.output import check_file, write_text
from rlsim.errors import ConfigError
from rlsim.frameworks.draft import written

#: Parts of a configuration that take any key, for which Hydra's `++` is needed.
_OPEN = re.compile(r"\.(engine_kwargs|override_\w+|vllm_kwargs)\.")
#: A line of a command that sets a key: what is before and behind the value.
_SETS = r"^(?P<before>\s*['\"]?\+{{0,2}}{key}=).*?(?P<behind>['\"]?(?:\s+\"?\$[@{{]\S*)*(?:\s*\\)?)$"
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


def check_new(out: Path) -> None:
    """Raises `ConfigError` if there is a file already, or none can be written."""
    check_file(out)
    if out.exists():
        raise ConfigError(f"{out} exists: give another file to --write")


def write_changes(source: Path, changes: Mapping[str, Any], out: Path) -> None:
    """Write `out`: the file `source` with these keys set.

    Raises `ConfigError` as `check_new`, and for a script no line of which sets a key.
    """
    check_new(out)
    text = source.read_text(encoding="utf-8")
    flags = any(key.startswith("--") for key in changes)
    change = _flags if flags else _yaml if source.suffix in (".yaml", ".yml") else _script
    write_text(out, change(text, changes, source))
    out.chmod(source.stat().st_mode & 0o777)


def _yaml(text: str, changes: Mapping[str, Any], _: Path) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    data = yaml.load(text)
    for key, value in changes.items():
        *parents, last = key.split(".")
        at = data
        for name in parents:
            if not isinstance(at.get(name), CommentedMap):
                at[name] = CommentedMap()
            at = at[name]
        at[last] = value
    out = StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _script(text: str, changes: Mapping[str, Any], source: Path) -> str:
    """A line that sets a key is changed where it is; new ones go before the last line that sets one."""
    lines = text.split("\n")
    for key, value in changes.items():
        setting = re.compile(_SETS.format(key=re.escape(key)))
        places = [i for i, line in enumerate(lines) if setting.match(line)]
        for i in places:
            found = setting.match(lines[i])
            assert found is not None
            lines[i] = (
                f"{found['before']}{override(key, value).partition('=')[2]}{found['behind'].lstrip(chr(39) + chr(34))}"
            )
        if not places:
            some = [i for i, line in enumerate(lines) if re.match(_SETS.format(key=_ANY_KEY), line)]
            if not some:
                raise ConfigError(f"{source}: no line of it sets a key: add the lines above to your command")
            indent = re.match(r"\s*", lines[some[-1]])
            assert indent is not None
            lines.insert(some[-1], f"{indent[0]}{override(key, value)} \\")
    return "\n".join(lines)


def _flags(text: str, changes: Mapping[str, Any], source: Path) -> str:
    """A flag is changed, or taken out, where it stands; new ones go before the last line that begins with one."""
    lines = text.split("\n")
    for key, value in changes.items():
        new = "" if value is None or value is False else override(key, value)
        setting = re.compile(rf"(?<![\w-]){re.escape(key)}(?![\w-])(?:[ =]+(?!--|[\\#)])[^\s\\]+)*")
        if key == "program":
            setting, new = re.compile(r"\btrain(?:_async)?\.py\b"), str(value)
        places = [i for i, line in enumerate(lines) if setting.search(line) and not line.lstrip().startswith("#")]
        for i in reversed(places):
            lines[i] = setting.sub(new.replace("\\", r"\\"), lines[i])
            if lines[i].strip() in ("", "\\"):
                del lines[i]
        if new and not places:
            flag = re.compile(r"(\s*)--[a-z][^\\]*(\\?)$")
            some = [(i, found) for i, line in enumerate(lines) if (found := flag.match(line))]
            if not some:
                raise ConfigError(f"{source}: no line of it begins with a flag: add the lines above to your command")
            at, found = some[-1]
            lines.insert(at, f"{found[1]}{new} {found[2]}".rstrip())
    return "\n".join(lines)

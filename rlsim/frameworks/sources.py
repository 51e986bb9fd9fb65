"""Configurations of frameworks that read YAML files or run scripts, and overrides `key=value`; `${…}` as OmegaConf
resolves it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsim.base.reading import SyntaxConfigError, exists, is_folder, parse_yaml, read_text, read_yaml
from rlsim.errors import ConfigError, nearest
from rlsim.frameworks.mapping import default_values, names, newest
from rlsim.frameworks.settings import Settings, Unknown
from rlsim.frameworks.shell import Override, Takes, read_script

_OVERRIDE = re.compile(r"(?:\+\+|\+|--)?(?P<key>[A-Za-z_]\w*(?:\.\w+)*)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
#: Where Hydra keeps the configuration of a run in its folder.
_OF_A_RUN = (".hydra/config.yaml", "config.yaml")
#: A file may inherit from one that inherits, an interpolation lead to another, and so on.
_DEEPEST = 20


def override_of(text: str) -> Override | None:
    """`key=value`, as Hydra writes it; None for what is none."""
    found = _OVERRIDE.fullmatch(text)
    return Override(found["key"], found["value"], 0) if found else None


def read_sources(
    sources: Sequence[str],
    program: str,
    option: str,
    of: str = "",
    takes: Takes | None = None,
    given: Callable[[str], Override | None] = override_of,
) -> Settings:
    """What files and overrides say together; a YAML file may name its parents under `defaults`.

    `of` is what the tables call the program; its newest release's defaults hold for the rest, its settings have names.
    With `takes`, which tells the settings of a command, other files are run scripts, whose variables `NAME=value` may
    be given; the module that one runs is the setting `program`. `given` reads an override.

    Raises `ConfigError` for what is no file and no override, and for files that cannot be read.
    """
    release = newest(of)
    config = Settings(program=f"{program} {release}".strip(), option=option)

    def read(path: Path, variables: dict[str, str]) -> None:
        if takes is None or path.suffix in (".yaml", ".yml"):
            config.name = config.name or path.name
            _read(config, path, 0)
        else:
            config.name = config.name or path.stem
            _read_script(config, path, variables, takes)

    take_sources(config, sources, given, read, of_scripts=takes is not None)
    config.default, config.names = dict(default_values(of, release)), names(of)
    interpolate(config)
    return config


def take_sources(
    config: Settings,
    sources: Sequence[str],
    given: Callable[[str], Override | None],
    read: Callable[[Path, dict[str, str]], None],
    *,
    of_scripts: bool,
) -> None:
    """Takes files as `read` does, which has the variables of scripts, then overrides, which win, later ones last.

    Raises `ConfigError` for what is none of these, for variables that no script uses, and for a folder that is not one
    of a run.
    """
    files, overrides = list[Path](), list[Override]()
    variables, own = {"HOME": str(Path.home()), "PWD": str(Path.cwd())}, dict[str, str]()
    for text in sources:
        path = Path(text)
        if is_folder(path):
            inside = next((path / name for name in _OF_A_RUN if (path / name).is_file()), None)
            if inside is None:
                raise ConfigError(f"{config.option} {text}: a folder without {_OF_A_RUN[0]}: give a file")
            files.append(inside)
        elif exists(path):
            files.append(path)
        elif override := given(text):
            overrides.append(override)
        elif of_scripts and (found := _VARIABLE.fullmatch(text)):
            own[found[1]] = found[2]
        else:
            raise ConfigError(f"{config.option} {text}: no such file, nor a setting of {config.program}")
    config.file = next((path.name for path in files), config.file)
    for path in files:
        read(path, variables | own)
    text = " ".join(read_text(path) for path in files) if own else ""
    for name in own:
        if text and not re.search(rf"\b({name}|source)\b", text):  # what a script sources is not read
            hint = nearest(name, re.findall(r"\$\{?([A-Za-z_]\w*)", text))
            raise ConfigError(f"{config.option} {name}={own[name]}: {config.file} uses no such variable; {hint}")
    for override in overrides:
        put_override(config, override, "as given", replaces=not of_scripts)


def _read(config: Settings, path: Path, depth: int) -> None:
    if depth > _DEEPEST:
        raise ConfigError(f"{path}: `defaults` lead to ever more files")
    data = read_yaml(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    if "defaults" in data:
        named = data["defaults"]
        line = data.lc.key("defaults")[0] + 1  # type: ignore[attr-defined]  # ruamel.yaml keeps them
        for name in [named] if isinstance(named, str) else named or []:
            parent = path.parent / str(name)
            if name == "_self_":
                continue
            if isinstance(name, Mapping):  # a choice of Hydra's groups
                config.notes.append(f"{path.name}: defaults: {', '.join(name)}: not read: {config.program}'s own hold")
                continue
            if not isinstance(name, str) or not parent.is_file():
                raise ConfigError(
                    f"{path}:{line}: defaults: there is no file {parent}: give the file where its parents lie"
                )
            config.inherited.add(parent.name)
            _read(config, parent, depth + 1)
    config.put(data, path.name, lines=True, replaces=True)
    config.given.pop("defaults", None)


def _read_script(config: Settings, path: Path, variables: dict[str, str], takes: Takes) -> None:
    script = read_script(read_text(path), str(path), variables, takes)
    if not script.overrides:
        raise ConfigError(f"{path}: no command with settings of {config.program}, nor a list of them")
    config.notes += [f"{path.name}: {note}" for note in script.notes]
    config.sourced += [Path(name).stem for name in script.sourced]
    if script.program:
        config.put({"program": script.program}, path.name)
    for override in script.overrides:
        put_override(config, override, path.name)


def put_override(config: Settings, override: Override, source: str, *, replaces: bool = False) -> None:
    """Take one setting of a command; a flag without a value is true."""
    place = f"{source}:{override.line}" if override.line else source
    key, value, is_flag = override.key, override.value, override.key.startswith("--")
    config.doubts.pop(key, None)
    config.given.pop(key, None)
    if isinstance(value, Unknown):
        config.doubts[key] = place, value
    elif not override.removes:
        read = parsed(value) if value or not is_flag else True
        config.put({key: value if is_flag and isinstance(read, Mapping | list) else read}, place, replaces=replaces)


_INTERPOLATION = re.compile(r"\$\{(?:(?P<resolver>oc\.\w+|add|mul|div|max):)?(?P<body>[^${}]*)\}")
_MISSING = "???"
#: Resolvers of two numbers, which NeMo-RL registers.
_OF_TWO: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}


def parsed(text: str) -> Any:
    """A value as Hydra reads it: YAML, but for what YAML cannot read, which is text."""
    try:
        value = parse_yaml(text, "value")
    except SyntaxConfigError:
        return text
    return None if text == "None" else value


class _LeadsNowhereError(Exception):
    """An interpolation of a key, variable or resolver that is not there, or of itself."""


def interpolate(config: Settings) -> None:
    """Replace `${data.max_prompt_length}`, `${.key}`, `${oc.select:key,default}`; what leads nowhere is in doubt."""
    for key, value in list(config.given.items()):
        try:
            config.given[key] = _resolved(config, key, value, 0)
        except _LeadsNowhereError as error:
            del config.given[key]
            config.doubts[key] = (config.origin[key], Unknown(f"{error} has no value here"))


def _resolved(config: Settings, key: str, value: Any, depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return None if value == _MISSING else value
    found = _INTERPOLATION.search(value)
    if found is None or depth > _DEEPEST:
        raise _LeadsNowhereError(value)
    inner = _resolved(config, key, _looked_up(config, key, found), depth + 1)
    if found.span() == (0, len(value)) or inner is None:
        return inner
    return _resolved(config, key, value[: found.start()] + str(inner) + value[found.end() :], depth + 1)


def _looked_up(config: Settings, key: str, found: re.Match[str]) -> Any:
    """What one interpolation in the value of `key` stands for."""
    target, _, default = found["body"].partition(",")
    if found["resolver"] in _OF_TWO:
        try:  # whole numbers stay whole
            value = _OF_TWO[found["resolver"]](parsed(target), parsed(default))
            return int(value) if value == int(value) else float(value)
        except (TypeError, ValueError, ArithmeticError):
            raise _LeadsNowhereError(found[0]) from None
    if target.startswith("."):
        above = len(target) - len(target.lstrip("."))
        target = ".".join([*key.split(".")[:-above], target.lstrip(".")])
    if found["resolver"] in (None, "oc.select"):
        config.asked.add(target)
        known = config.given.get(target, config.default.get(target))
        if known is not None:
            return known
    if default and found["resolver"] in (None, "oc.select", "oc.env"):
        return parsed(default)
    if found["resolver"] == "oc.select" or (
        not found["resolver"] and (target in config.given or target in config.default)
    ):
        return None
    raise _LeadsNowhereError(found[0])

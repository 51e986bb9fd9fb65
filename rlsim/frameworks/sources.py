"""Configurations of frameworks that read one YAML file and overrides `key=value`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsim.base.reading import exists, is_folder, read_yaml
from rlsim.errors import ConfigError
from rlsim.frameworks.interpolation import interpolate, parsed
from rlsim.frameworks.settings import Settings
from rlsim.frameworks.tables import default_values, names, newest

_OVERRIDE = re.compile(r"(?:\+\+|\+|--)?(?P<key>[A-Za-z_]\w*(?:\.\w+)*)=(?P<value>.*)", re.DOTALL)
#: A file may inherit from one that inherits, and so on.
_DEEPEST = 20
#: The mapping that has this replaces what is inherited (NeMo-RL).
_REPLACES = "_override_"


def read_sources(sources: Sequence[str], program: str, option: str, of: str = "") -> Settings:
    """What YAML files and overrides say together, later ones winning; a file may name its parents under `defaults`.

    `of` is what the tables call the program; its newest release's defaults hold for the rest, its settings have names.

    Raises `ConfigError` for what is no file and no override, and for files that cannot be read.
    """
    release = newest(of)
    config = Settings(program=f"{program} {release}".strip(), option=option)
    for text in sources:
        found = _OVERRIDE.fullmatch(text)
        if exists(Path(text)) or not found:
            path = Path(text)
            if is_folder(path):
                raise ConfigError(f"{option} {text}: is a folder: give a file")
            config.name = config.name or path.name
            _read(config, path, 0)
        else:
            _put(config, {found["key"]: parsed(found["value"])}, "as given")
    interpolate(config)
    config.default, config.names = dict(default_values(of, release)), names(of)
    return config


def _read(config: Settings, path: Path, depth: int) -> None:
    """A file over those that it inherits from."""
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
            if not isinstance(name, str) or not parent.is_file():
                raise ConfigError(
                    f"{path}:{line}: defaults: there is no file {parent}: give the file where its parents lie"
                )
            config.inherited.add(parent.name)
            _read(config, parent, depth + 1)
    _put(config, {key: value for key, value in data.items() if key != "defaults"}, path.name, marks=data)


def _put(config: Settings, data: Mapping[str, Any], place: str, prefix: str = "", marks: Any = None) -> None:
    """Leaves of a mapping over what is there: a value replaces the keys below it, and keys the value above them."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key == _REPLACES:
            continue
        if isinstance(value, Mapping):
            if value.get(_REPLACES):
                _drop(config, name)
            config.given.pop(name, None)
            _put(config, value, place, f"{name}.", value)
            continue
        _drop(config, name)
        lines = getattr(marks, "lc", None)
        mark = lines.data.get(key) if lines is not None and lines.data else None
        config.put({name: value}, f"{place}:{mark[0] + 1}" if mark else place)


def _drop(config: Settings, section: str) -> None:
    for key in [key for key in config.given if key.startswith(f"{section}.")]:
        del config.given[key]

"""Reads veRL's settings from Hydra's configurations, run scripts, logs and single overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError
from rlsim.reading import SyntaxConfigError, parse_yaml, read_yaml
from rlsim.verl.defaults import VERSIONS, defaults
from rlsim.verl.log import logged_config
from rlsim.verl.settings import STRATEGY, Settings
from rlsim.verl.shell import Override, parse_override, read_script
from rlsim.verl.variables import Unknown

_INTERPOLATION = re.compile(r"\$\{(?:(?P<resolver>oc\.\w+):)?(?P<body>[^${}]*)\}")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_DEEPEST = 20  # interpolations of interpolations
_MISSING = "???"


def read_config(sources: Sequence[str], version: str) -> Settings:
    """The configuration that files and overrides give together, later ones winning; defaults of `version` for the rest.

    Each source is a YAML file (`.hydra/config.yaml`, one like `ppo_trainer.yaml`), a run's folder, a shell script or a
    list of overrides, a console log that begins with veRL's configuration, an override `key=value`, or a shell variable
    `NAME=value` that scripts use. Raises `ConfigError` for anything that is none of these.
    """
    if version not in VERSIONS:
        raise ConfigError(f"veRL {version}: its defaults are not known; one of: {', '.join(VERSIONS)}")
    config = Settings(version)
    files, overrides, variables = _sorted(sources)
    for path in files:
        config.name = config.name or (path.stem if path.stem != "config" else "")
        if path.suffix in (".yaml", ".yml"):
            _read_yaml(config, path)
        else:
            _read_text(config, path, variables)
    for override in overrides:
        _override(config, override, "as given")
    config.default = defaults(version, config.megatron)
    if not config.given and not config.doubts:
        raise ConfigError(
            f"{', '.join(sources)}: no setting of veRL found: expected keys such as data.train_batch_size or "
            "actor_rollout_ref.rollout.n"
        )
    _interpolate(config)
    return config


def _sorted(sources: Sequence[str]) -> tuple[list[Path], list[Override], dict[str, str]]:
    """Files, overrides, and variables of scripts."""
    files, overrides, variables = list[Path](), list[Override](), {"HOME": str(Path.home()), "PWD": str(Path.cwd())}
    for text in sources:
        if Path(text).exists():
            files.append(_file(Path(text)))
        elif override := parse_override(text):
            overrides.append(override)
        elif found := _VARIABLE.fullmatch(text):
            variables[found["name"]] = found["value"]
        elif "=" in text:
            raise ConfigError(
                f"--from-verl {text}: neither a file, nor a key of veRL such as data.train_batch_size=512"
            )
        else:
            raise ConfigError(f"--from-verl {text}: no such file")
    return files, overrides, variables


def _file(path: Path) -> Path:
    """A file as it is; the configuration in a run's folder."""
    if not path.is_dir():
        return path
    for inside in (".hydra/config.yaml", "config.yaml"):
        if (path / inside).is_file():
            return path / inside
    raise ConfigError(f"{path}: a folder without .hydra/config.yaml")


def _read_yaml(config: Settings, path: Path) -> None:
    """Hydra's configuration, or its list of overrides."""
    data = read_yaml(path)
    if isinstance(data, list):  # .hydra/overrides.yaml
        for i, item in enumerate(data):
            line = data.lc.item(i)[0] + 1  # type: ignore[attr-defined]  # ruamel.yaml keeps them
            override = parse_override(str(item), line)
            if override is None:
                raise ConfigError(f"{path}: expected key=value of veRL, got {item!r}")
            _override(config, override, path.name)
        return
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    config.put(data, path.name, lines=True)
    parts = config.given.pop("defaults", None)
    if isinstance(parts, list):
        config.notes.append(f"{path.name}: the files under `defaults` are not read: veRL's own defaults stand for "
                            "them; a run's .hydra/config.yaml has all of it")  # fmt: skip
        chosen = [str(part[key]) for part in parts if isinstance(part, Mapping) for key in part if "actor@" in str(key)]
        if any("megatron" in name for name in chosen) and STRATEGY not in config.given:
            config.given[STRATEGY], config.origin[STRATEGY] = "megatron", f"{path.name}: defaults"


def _read_text(config: Settings, path: Path, variables: dict[str, str]) -> None:
    """The configuration that a log begins with, or a script's settings."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if logged := logged_config(path):
        config.put(logged, path.name)
        return
    script = read_script(text, str(path), variables)
    config.notes += [f"{path.name}: {note}" for note in script.notes]
    if "megatron" in script.config_name:
        config.given[STRATEGY], config.origin[STRATEGY] = "megatron", f"--config-name {script.config_name}"
    for override in script.overrides:
        _override(config, override, path.name)


def _override(config: Settings, override: Override, source: str) -> None:
    place = f"{source}:{override.line}" if override.line else source
    key, value = override.key, override.value
    if key == "model_engine":  # Hydra's choice of the training engine
        key, value = STRATEGY, "fsdp" if value == "dp" else value
    config.doubts.pop(key, None)
    config.given.pop(key, None)
    if override.removes:
        return
    if isinstance(value, Unknown):
        config.doubts[key] = (place, value)
        return
    read = _parsed(value)
    if isinstance(read, Mapping):
        config.put(read, place, f"{key}.")
    else:
        config.put({key: read}, place)


def _parsed(text: str) -> Any:
    """A value as Hydra reads it: YAML, but for what YAML cannot read, which is text."""
    try:
        value = parse_yaml(text, "value")
    except SyntaxConfigError:
        return text
    return None if text == "None" else value


# ---- interpolations -------------------------------------------------------------------------------------------------


class _LeadsNowhereError(Exception):
    """An interpolation of a key, variable or resolver that is not there, or of itself."""


def _interpolate(config: Settings) -> None:
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
    if target.startswith("."):
        above = len(target) - len(target.lstrip("."))
        target = ".".join([*key.split(".")[:-above], target.lstrip(".")])
    if found["resolver"] in (None, "oc.select"):
        known = config.given.get(target, config.default.get(target))
        if known is not None:
            return known
    if default and found["resolver"] in (None, "oc.select", "oc.env"):
        return _parsed(default)
    if found["resolver"] == "oc.select" or (
        not found["resolver"] and (target in config.given or target in config.default)
    ):
        return None
    raise _LeadsNowhereError(found[0])

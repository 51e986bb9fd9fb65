"""Reads veRL's settings from Hydra's configurations, run scripts, logs and single overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsim.base.reading import is_file, read_yaml
from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError
from rlsim.frameworks.settings import Unknown
from rlsim.frameworks.shell import Override, read_script
from rlsim.frameworks.sources import interpolate, put_override, take_sources
from rlsim.frameworks.variables import Argument
from rlsim.frameworks.verl.log import logged_config
from rlsim.frameworks.verl.settings import STRATEGY, VerlSettings, defaults, release, settle_arguments, settle_engine

_OVERRIDE = re.compile(r"(?P<mode>\+\+|\+|~)?(?P<key>[A-Za-z_][\w/]*(?:[.@][\w/]+)*)=(?P<value>.*)", re.DOTALL)
#: The first parts of keys of veRL's configuration.
ROOTS = frozenset(
    {"actor_rollout_ref", "algorithm", "async_resources", "async_training", "critic", "custom_reward_function", "data",
     "distillation", "reward", "reward_model", "rollout", "sandbox_fusion", "trainer"}
)  # fmt: skip
#: Hydra's choices of the engine that trains.
GROUPS = frozenset({"model_engine", "actor@actor_rollout_ref.actor"})
#: Names of veRL's own configurations, whose defaults are known.
_TRAINER = re.compile(r"(\w+_)?(ppo|dapo)_(\w+_)?trainer")
#: Programs whose settings are veRL's own, and nothing else.
_READ_AS_PPO = re.compile(r"(verl|recipe\.(dapo|entropy|partial_rollout))\.")


def read_config(sources: Sequence[str], version: str) -> VerlSettings:
    """The configuration that files and overrides give (see `take_sources`); defaults of `version` for the rest.

    Each source is a YAML file (`.hydra/config.yaml`, one like `ppo_trainer.yaml`), a run's folder, a shell script or a
    list of overrides, a console log that begins with veRL's configuration, an override `key=value`, or a shell variable
    `NAME=value` that scripts use. Raises `ConfigError` for anything that is none of these, and for a release that is
    not known.
    """
    version = release(version)
    config = VerlSettings(version=version)

    def read(path: Path, variables: dict[str, str]) -> None:
        config.name = config.name or (path.stem if path.stem != "config" else "")
        if path.suffix in (".yaml", ".yml"):
            _read_yaml(config, path)
        else:
            _read_text(config, path, variables)

    take_sources(config, sources, parse_override, read, of_scripts=True)
    settle_engine(config)
    config.default = defaults(version, config.megatron)
    refuse("veRL's settings", sources=sources, found=config.given or config.doubts)
    interpolate(config)
    settle_arguments(config)
    return config


def parse_override(text: str, line: int = 0, unknown: Unknown | None = None) -> Override | None:
    """A word that sets a key of veRL's configuration; None for any other."""
    found = _OVERRIDE.fullmatch(text)
    if found is None:
        return None
    key, value = found["key"], found["value"]
    if key in GROUPS:
        engine = value.removesuffix("_actor")
        return Override(STRATEGY, unknown or ("fsdp" if engine == "dp" else engine), line)
    if "." in key and re.split(r"[.@/]", key)[0] in ROOTS:
        return Override(key, unknown or value, line, found["mode"] == "~")
    return None


def takes(found: list[Override], before: str, argument: Argument) -> bool:  # noqa: ARG001
    """See `rlsim.frameworks.shell.Takes`: each override is one word."""
    override = parse_override(argument.text, argument.line, argument.unknown)
    found += [override] if override else []
    return override is not None


def _read_yaml(config: VerlSettings, path: Path) -> None:
    """Hydra's configuration, or its list of overrides."""
    data = read_yaml(path)
    if isinstance(data, list):  # .hydra/overrides.yaml
        for i, item in enumerate(data):
            line = data.lc.item(i)[0] + 1  # type: ignore[attr-defined]  # ruamel.yaml keeps them
            override = parse_override(str(item), line)
            if override is None:
                raise ConfigError(f"{path}: expected key=value of veRL, got {item!r}")
            put_override(config, override, path.name)
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


def _read_text(config: VerlSettings, path: Path, variables: dict[str, str]) -> None:
    """The configuration that a log begins with, or a script's settings."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if logged := logged_config(path):
        config.put(logged, path.name)
        return
    script = read_script(text, str(path), variables, takes)
    if "main_generation" in script.program:
        raise ConfigError(f"{path}: it runs {script.program}, which only generates: an experiment is of RL training")
    config.notes += [f"{path.name}: {note}" for note in script.notes]
    if script.program and not _READ_AS_PPO.match(script.program):
        config.notes.append(
            f"{path.name}: {script.program} is read as verl.trainer.main_ppo: what it does otherwise is not represented"
        )
    name = script.config_name.removesuffix(".yaml")
    if is_file(own := path.parent / "config" / f"{name}.yaml"):
        _read_yaml(config, own)
    elif name and not _TRAINER.fullmatch(name):
        config.notes.append(f"{path.name}: the file of --config-name {name} is not read: give it before the script")
    if "megatron" in script.config_name:
        config.given[STRATEGY], config.origin[STRATEGY] = "megatron", f"--config-name {script.config_name}"
    for override in script.overrides:
        put_override(config, override, path.name)

"""A veRL configuration by dotted keys, from files and overrides, and where each value is from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError
from rlsim.reading import SyntaxConfigError, parse_yaml, read_yaml
from rlsim.verl.defaults import VERSIONS, defaults
from rlsim.verl.log import logged_config
from rlsim.verl.shell import Override, is_override, parse_override, read_script
from rlsim.verl.shell_values import Unknown

_INTERPOLATION = re.compile(r"\$\{(?:(?P<resolver>oc\.\w+):)?(?P<body>[^${}]*)\}")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_DEEPEST = 20  # interpolations of interpolations
_MISSING = "???"
#: Sections with keys like those that bear on time.
_ELSEWHERE = ("actor_rollout_ref.ref", "critic", "reward", "distillation")


@dataclass
class VerlConfig:
    """Values by dotted key, the place that each is from, and what to know about reading them.

    `given` has what files and overrides say, `default` what the release would take for the rest. `doubts` are keys
    whose value the text does not tell.
    """

    version: str
    given: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, tuple[str, Unknown]] = field(default_factory=dict)  # place, why
    default: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    name: str = ""

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return self.given.get("actor_rollout_ref.actor.strategy") == "megatron"

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that has one: as given, else the release's default; None without.

        Raises `ConfigError` for a value that the text does not tell.
        """
        for key in keys:
            if key in self.doubts:
                place, unknown = self.doubts[key]
                give = f"{unknown.variable}=… or {key}=…" if unknown.variable else f"{key}=…"
                raise ConfigError(f"{place}: {key}: {unknown.why}; give {give} beside --from-verl")
            if self.given.get(key) is not None:
                return self.given[key]
        return next((self.default[key] for key in keys if self.default.get(key) is not None), None)

    def where(self, *keys: str) -> str:
        """Where `get` has its value from."""
        found = next((key for key in keys if self.given.get(key) is not None), None)
        if found is not None:
            return f"{found} ({self.origin[found]})"
        key = next((key for key in keys if self.default.get(key) is not None), keys[0])
        return f"{key}: veRL {self.version}'s default"

    def is_given(self, *keys: str) -> bool:
        """Whether a file or an override says one of these."""
        return any(self.given.get(key) is not None or key in self.doubts for key in keys)

    def merged(self) -> dict[str, Any]:
        """Given values over defaults."""
        for key in self.doubts:
            if key in self.default:
                self.get(key)
        return {**self.default, **{key: value for key, value in self.given.items() if value is not None}}


def read_config(sources: Sequence[str], version: str) -> VerlConfig:
    """The configuration that files and overrides give together, later ones winning; defaults of `version` for the rest.

    Each source is a YAML file (`.hydra/config.yaml`, one like `ppo_trainer.yaml`), a run's folder, a shell script or a
    list of overrides, a console log that begins with veRL's configuration, an override `key=value`, or a shell variable
    `NAME=value` that scripts use. Raises `ConfigError` for anything that is none of these.
    """
    if version not in VERSIONS:
        raise ConfigError(f"veRL {version}: its defaults are not known; one of: {', '.join(VERSIONS)}")
    config = VerlConfig(version)
    files, overrides, variables = _sorted(sources)
    for path in files:
        _read(config, path, variables)
    for text in overrides:
        _override(config, parse_override(text), "as given")
    config.default = defaults(version, _trains_with_megatron(config))
    if not config.given and not config.doubts:
        raise ConfigError(
            f"{', '.join(sources)}: no setting of veRL found: expected keys such as data.train_batch_size or "
            "actor_rollout_ref.rollout.n"
        )
    _interpolate(config)
    return config


def _sorted(sources: Sequence[str]) -> tuple[list[Path], list[str], dict[str, str]]:
    files, overrides, variables = list[Path](), list[str](), {"HOME": str(Path.home()), "PWD": str(Path.cwd())}
    for text in sources:
        if Path(text).exists():
            files.append(_file(Path(text)))
        elif is_override(text):
            overrides.append(text)
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


def _read(config: VerlConfig, path: Path, variables: dict[str, str]) -> None:
    config.name = config.name or (path.stem if path.stem != "config" else "")
    if path.suffix in (".yaml", ".yml"):
        data = read_yaml(path)
        if isinstance(data, list):  # .hydra/overrides.yaml
            lines = data.lc  # type: ignore[attr-defined]  # ruamel.yaml keeps them
            for i, item in enumerate(data):
                if not is_override(str(item)):
                    raise ConfigError(f"{path}: expected key=value of veRL, got {item!r}")
                _override(config, parse_override(str(item), lines.item(i)[0] + 1), path.name)
            return
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path}: expected a mapping of keys to values")
        for key, value, line in _flat(data):
            config.given[key], config.origin[key] = value, f"{path.name}:{line}" if line else path.name
        _composed(config, config.given.pop("defaults", None), path)
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    logged = logged_config(path)
    if logged:
        config.given |= logged
        config.origin |= dict.fromkeys(logged, path.name)
        return
    script = read_script(text, str(path), variables)
    config.notes += [f"{path.name}: {note}" for note in script.notes]
    if "megatron" in script.config_name:
        config.given["actor_rollout_ref.actor.strategy"] = "megatron"
        config.origin["actor_rollout_ref.actor.strategy"] = f"--config-name {script.config_name}"
    for override in script.overrides:
        _override(config, override, path.name)


def _composed(config: VerlConfig, parts: Any, path: Path) -> None:
    """What Hydra's `defaults` of a file tell: which engine trains. The files that they name are not read."""
    if not isinstance(parts, list):
        return
    config.notes.append(f"{path.name}: the files under `defaults` are not read: veRL's own defaults stand for them; a "
                        "run's .hydra/config.yaml has all of it")  # fmt: skip
    strategy = "actor_rollout_ref.actor.strategy"
    chosen = [str(part[key]) for part in parts if isinstance(part, Mapping) for key in part if "actor@" in str(key)]
    if any("megatron" in name for name in chosen) and strategy not in config.given:
        config.given[strategy], config.origin[strategy] = "megatron", f"{path.name}: defaults"


def _override(config: VerlConfig, override: Override, source: str) -> None:
    place = f"{source}:{override.line}" if override.line else source
    if override.key == "model_engine":
        override = Override("actor_rollout_ref.actor.strategy", _engine(override.value), override.line)
    key = override.key
    config.doubts.pop(key, None)
    config.given.pop(key, None)
    if override.removes:
        return
    if isinstance(override.value, Unknown):
        config.doubts[key] = (place, override.value)
        return
    value = _parsed(override.value)
    if isinstance(value, Mapping):
        for inner, item, _ in _flat(value, f"{key}."):
            config.given[inner], config.origin[inner] = item, place
    else:
        config.given[key], config.origin[key] = value, place


def _engine(value: str | Unknown) -> str | Unknown:
    """Hydra's choice of the training engine as `actor.strategy` names it."""
    return "fsdp" if value == "dp" else value


def _parsed(text: str) -> Any:
    """A value as Hydra reads it: YAML, but for what YAML cannot read, which is text."""
    try:
        value = parse_yaml(text, "value")
    except SyntaxConfigError:
        return text
    return None if text == "None" else value


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, int]]:
    """Every leaf by its dotted key, with its line."""
    for key, value in data.items():
        marks = getattr(data, "lc", None)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            if isinstance(value, float):
                value = float(value)  # ruamel.yaml's own kind, which remembers how it was written
            mark = marks.data.get(key) if marks is not None and marks.data else None  # keys merged by << have none
            yield f"{prefix}{key}", value, mark[0] + 1 if mark else 0


def _trains_with_megatron(config: VerlConfig) -> bool:
    return bool(config.megatron)


# ---- interpolations -------------------------------------------------------------------------------------------------


class _LeadsNowhereError(Exception):
    """An interpolation of a key, variable or resolver that is not there, or of itself."""


def _interpolate(config: VerlConfig) -> None:
    """Replace `${data.max_prompt_length}`, `${.key}`, `${oc.select:key,default}`; what leads nowhere is in doubt."""
    for key, value in list(config.given.items()):
        if value == _MISSING:
            config.given[key] = None
        elif isinstance(value, str) and "${" in value:
            try:
                config.given[key] = _resolved(config, key, value, 0)
            except _LeadsNowhereError as error:
                del config.given[key]
                config.doubts[key] = (config.origin[key], Unknown(f"{error} has no value here"))


def _resolved(config: VerlConfig, key: str, value: Any, depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return None if value == _MISSING else value
    found = _INTERPOLATION.search(value)
    if found is None or depth > _DEEPEST:
        raise _LeadsNowhereError(value)
    inner = _lookup(config, key, found)
    inner = _resolved(config, key, inner, depth + 1)
    whole = found.span() == (0, len(value))
    if whole or inner is None:
        return inner
    return _resolved(config, key, value[: found.start()] + str(inner) + value[found.end() :], depth + 1)


def _lookup(config: VerlConfig, key: str, found: re.Match[str]) -> Any:
    target, _, default = found["body"].partition(",")
    resolver = found["resolver"]
    if resolver not in (None, "oc.select", "oc.env"):
        raise _LeadsNowhereError(found[0])
    if resolver == "oc.env":
        if not default:
            raise _LeadsNowhereError(found[0])
        return _parsed(default)
    if target.startswith("."):
        above = len(target) - len(target.lstrip("."))
        parents = key.split(".")[:-above]
        target = ".".join([*parents, target.lstrip(".")])
    known = config.given.get(target, config.default.get(target))
    if known is not None or default:
        return known if known is not None else _parsed(default)
    if resolver is None and target not in config.given and target not in config.default:
        raise _LeadsNowhereError(found[0])
    return None


# ---- checks ---------------------------------------------------------------------------------------------------------


def misspelt(config: VerlConfig, known: Sequence[str]) -> None:
    """Raises `ConfigError` for a key that veRL does not have and that looks like one of the `known` ones.

    Such a key would be passed over, and the run would not be the one that is meant.
    """
    for key in (*config.given, *config.doubts):
        if key in known:
            continue
        parent, _, last = key.rpartition(".")
        parents = {name.rpartition(".")[0] for name in known}
        if parent not in parents and not parent.startswith(_ELSEWHERE):
            parent = next(iter(difflib.get_close_matches(parent, parents, n=1, cutoff=0.85)), "")
        siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
        near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.85)
        if not near:
            continue
        place = config.origin.get(key) or config.doubts[key][0]
        raise ConfigError(f"{place}: unknown key {key}; did you mean {siblings[near[0]]}?")

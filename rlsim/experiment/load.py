"""An experiment from a file or a mapping, with overrides."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsim.base import catalogue
from rlsim.base.reading import SyntaxConfigError, is_file, parse_yaml, read_yaml
from rlsim.base.schema import validate
from rlsim.errors import ConfigError, check_arguments, nearest, unknown_name
from rlsim.experiment.schema import Experiment

#: Where a value is from that no file says, in messages.
OVERRIDDEN = "as overridden"
#: What only a framework's own files say, and the option of `rlsim init` that reads these.
_FRAMEWORKS = {
    "veRL": (r"actor_rollout_ref|verl\.trainer", "--from-verl"),
    # Files that others inherit from, as no other framework has them, say nothing else of whose they are.
    "NeMo-RL": (r"^ *grpo[:.]|run_grpo|nemo_rl|^defaults:[\s-]*[\"']?[\w./-]+\.ya?ml", "--from-nemo"),
    "slime": (r"rollout[-_]num[-_]gpus|actor[-_]num[-_]nodes", "--from-slime"),
    "SkyRL": (r"-m skyrl|trainer\.placement\.|generator\.(num_)?inference_engine", "--from-skyrl"),
    "AReaL": (r"^allocation_mode:|max_head_offpolicyness|^ +max_concurrent_rollouts:|-m areal\.", "--from-areal"),
}
#: The same of those that are not read, and the system that lays out their calls.
_UNREAD = {
    "OpenRLHF": (r"\bopenrlhf\.cli\.", ", with the system openrlhf"),
    "prime-rl": (r"\buv run (rl|inference|trainer|orchestrator) @|^\[orchestrator\b", ""),
}
_LOOKED_AT = 100_000  # characters of a file


def load_experiment(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
) -> tuple[Experiment, str, Path]:
    """The experiment, a name for it in messages, and the folder that its relative paths refer to.

    `source` is a YAML file, the name of an experiment that ships with rlsim, or a mapping. `overrides` are
    `key.path=value` texts, or a mapping of key paths to values; `seeds` sets their number. Raises `ConfigError`
    with file and line for anything that does not fit.
    """
    check_arguments(source=source, overrides=overrides, seeds=seeds)
    data, label, folder = read_experiment(source)
    pairs = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    pairs = {**pairs, **({} if seeds is None else {"seeds": seeds})}
    places = dict.fromkeys(pairs, OVERRIDDEN)
    return experiment_of(data, pairs, label, lambda _: "--set ", places), label, folder


def read_experiment(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, Path]:
    """The keys of an experiment as they are given, a name for it in messages, and the folder of its relative paths.

    `source` is as in `load_experiment`. Raises `RlsimError` if there is no such file, or it is no mapping.
    """
    if isinstance(source, Mapping):
        return _copied(source), "experiment", Path.cwd()
    path = find_file(Path(source), "experiments")
    try:
        data = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(unread(path) or f"{error}{_way_out(path)}") from None
    if not isinstance(data, dict):
        raise ConfigError(unread(path) or f"{source}: expected a mapping of keys to values{_way_out(path)}")
    if "systems" not in data and (way_out := _way_out(path)):
        raise ConfigError(f"{source} is no experiment of rlsim{way_out}")
    return data, str(source), path.resolve().parent


def with_settings(experiment: Experiment, settings: Mapping[str, Any], label: str) -> Experiment:
    """The experiment with some keys set to other values."""
    data = experiment.model_dump(exclude_unset=True)
    data["systems"] = copy.deepcopy(list(experiment.systems))  # not dumped: they know their lines
    return experiment_of(data, settings, label, lambda _: f"{label}: ")


def experiment_of(
    data: Any,
    settings: Mapping[str, Any],
    label: str,
    lead: Callable[[str], str],
    places: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """The experiment of these keys, some of them set to other values, which `sources` then says are given.

    Errors about a path to nowhere begin with the `lead` of its key, others with `label` or the place of a setting, if
    `places` has one.
    """
    for key, value in settings.items():
        set_path(data, str(key), value, lead(key))
    if isinstance(listed := data.get("sources"), Mapping):
        data["sources"] = {**listed, "given": [*listed.get("given", ()), *map(str, settings)]}
    return validate(data, Experiment, label, elsewhere=places)


def find_file(path: Path, *kinds: str) -> Path:
    """A file as it is; else one of these kinds that ships with rlsim, by its name or as `experiments/name.yaml`."""
    if is_file(path):
        return path
    shipped = {kind: catalogue.names(kind) for kind in kinds}
    for kind, files in shipped.items():
        if path.parent.name in ("", kind) and path.stem in files:
            return files[path.stem]
    if path.suffix or len(path.parts) > 1:
        return path  # reading it says what is wrong
    what = " or ".join(kind.removesuffix("s") for kind in kinds)
    raise unknown_name(what, str(path), [name for files in shipped.values() for name in files])


def _way_out(path: Path) -> str:
    """What to do with a file that is no experiment: make one of it, or name the one beside it that was meant."""
    name, option = framework_of(path)
    if name:
        file = path if name in ("veRL", "slime", "SkyRL") or path.suffix in (".yaml", ".yml") else "ITS_YAML"
        return f"; make an experiment of a configuration of {name}: rlsim init {option} {file} --gpu GPU"
    if path.suffix in (".sh", ".log", ".py", ".ipynb"):
        return f"; make an experiment of a run script or log of veRL: rlsim init --from-verl {path} --gpu GPU"
    if is_file(path) or not path.suffix:
        return ""
    known = {*map(str, path.parent.glob("*.y*ml")), *catalogue.names("experiments")}
    return f"; {nearest(str(path), known, 'experiments that ship with rlsim')}"


def framework_of(path: Path) -> tuple[str, str]:
    """Whose configuration a file is, and the option of `rlsim init` for it; empty of an experiment, or no file."""
    text = _head(path)
    if re.search(r"^systems:", text, re.MULTILINE):
        return "", ""
    found = ((name, option) for name, (mark, option) in _FRAMEWORKS.items() if re.search(mark, text, re.MULTILINE))
    return next(found, ("", ""))


def unread(path: Path) -> str:
    """What to do with a configuration of a framework that is not read; empty for any other."""
    text = "" if framework_of(path)[0] else _head(path)
    found = ((name, more) for name, (mark, more) in _UNREAD.items() if re.search(mark, text, re.MULTILINE))
    told = (f"{path}: configurations of {name} are not read, only those of {', '.join(_FRAMEWORKS)}: write an "
            f"experiment (rlsim init NAME){more}" for name, more in found)  # fmt: skip
    return next(told, "")


def _head(path: Path) -> str:
    """The beginning of a file; empty where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(_LOOKED_AT) if is_file(path) else ""
    except OSError:
        return ""


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def parse_overrides(texts: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`key.path=value` texts as a mapping of key paths to values; `option` is where they are from."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not equals or not key:
            raise ConfigError(f"{option} {text}: expected key.path=value")
        try:
            found[key] = parse_yaml(value, f"{option} {key}")
        except SyntaxConfigError:
            found[key] = value
    return found


def set_path(data: Any, key: str, value: Any, label: str = "") -> None:
    """Set `a.b.0.c` in nested mappings and lists; a `ConfigError` about a path to nowhere begins with `label`."""
    *path, last = key.split(".")
    here = data
    for part in path:
        if (place := place_in(here, part)) is not None:
            here = here[place]
        elif isinstance(here, dict):
            here = here.setdefault(part, {})
        else:
            raise ConfigError(f"{label}{key[:60]}: there is no {part[:60]!r}")
    if isinstance(here, list) and (place := place_in(here, last)) is not None:
        here[place] = value
    elif isinstance(here, dict):
        here[last] = value
    else:
        raise ConfigError(f"{label}{key[:60]}: there is no {last[:60]!r}")


def place_in(items: Any, part: str) -> int | None:
    """The place in a list that a part of a key path means, as `2` in `systems.2`; None if it means none."""
    if not isinstance(items, list | tuple) or not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(items):
        return None
    return int(part)

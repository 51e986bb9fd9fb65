"""veRL's settings: its keys, releases and defaults, what is wrong with a key, and the engines that train."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.errors import ConfigError
from rlsim.frameworks.mapping import default_values, names
from rlsim.frameworks.settings import TEXT, Settings

#: Releases whose defaults are known, oldest first.
VERSIONS = ("0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TP = ROLLOUT + "tensor_model_parallel_size"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
STRATEGY = ACTOR + "strategy"
#: Sections with keys like those that bear on time.
_ELSEWHERE = ("actor_rollout_ref.ref", "critic", "reward", "distillation")


@dataclass(kw_only=True)
class VerlSettings(Settings):
    """veRL's settings; the defaults are those of the release `version`."""

    version: str = ""

    def __post_init__(self) -> None:
        self.program, self.option, self.names = f"veRL {self.version}", "--from-verl", names("verl")

    @property
    def megatron(self) -> bool:
        return bool(self.given.get(STRATEGY) == "megatron")

    def check_keys(self, known: Sequence[str]) -> None:
        """Raises `ConfigError` for a key that veRL does not have and that looks like one of the `known` ones.

        Such a key would be passed over, and the run would not be the one that is meant.
        """
        parents = {name.rpartition(".")[0] for name in known}
        for key in (*self.given, *self.doubts):
            if key in known:
                continue
            parent, _, last = key.rpartition(".")
            if parent not in parents and not parent.startswith(_ELSEWHERE):
                parent = next(iter(difflib.get_close_matches(parent, parents, n=1, cutoff=0.85)), "")
            siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
            near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.85)
            if near:
                place = self.origin.get(key) or self.doubts[key][0]
                raise ConfigError(f"{place}: unknown key {key}; did you mean {siblings[near[0]]}?")


_FSDP_ONLY = (ACTOR + "ulysses", ACTOR + "fsdp_config")


def release(version: str) -> str:
    """The release of `VERSIONS` whose defaults a version has; raises `ConfigError` for one that is not known."""
    major, _, rest = version.removeprefix("v").partition(".")
    name = f"{major}.{rest.partition('.')[0]}"
    if name not in VERSIONS:
        raise ConfigError(f"veRL {version}: its defaults are not known; one of: {', '.join(VERSIONS)}")
    return name


def defaults(version: str, megatron: bool) -> dict[str, Any]:
    """The default of every key that bears on time; None where there is none. `version` is one of `VERSIONS`."""
    if not megatron:
        return dict(default_values("verl", version))
    keys = {**default_values("verl", version), **default_values("verl-megatron", version)}
    return {key: value for key, value in keys.items() if not key.startswith(_FSDP_ONLY)}


_MEGATRON_DEGREE = re.compile(rf"{re.escape(ACTOR)}megatron\.\w+_parallel_size")
#: Engines whose keys `rlsim/data/keys.csv` has by the names of what FSDP and Megatron call so.
_TITLES = {"veomni": "VeOmni", "fsdp_turbo": "FSDP-Turbo", "torchtitan": "torchtitan", "mlite": "Megatron Lite"}


def settle_arguments(config: VerlSettings) -> None:
    """Arguments of the rollout's engine (`engine_kwargs`) as the settings over which veRL hands them on."""
    engine = config.told(TEXT, "engine") or "vllm"
    for ours, (_, (key,)) in names(f"verl-{engine}").items():
        if config.given.get(key) is not None:
            place = f"{config.origin[key]}: {key.removeprefix(ROLLOUT)}"
            config.put({config.key(ours): config.given.pop(key)}, place)


def settle_engine(config: VerlSettings) -> None:
    """Megatron where its degrees are set and nothing says otherwise; engines that shard as FSDP2 does as FSDP2."""
    degrees = next((key for key in config.given if _MEGATRON_DEGREE.fullmatch(key)), None)
    if degrees is not None and STRATEGY not in config.given and STRATEGY not in config.doubts:
        config.given[STRATEGY], config.origin[STRATEGY] = "megatron", config.origin[degrees]
    chosen = config.told(TEXT, STRATEGY) or ""
    if chosen not in _TITLES:
        return
    config.notes.append(f"{config.where(STRATEGY)}: {_TITLES[chosen]} shards as FSDP2 does, as which it is simulated")
    config.given[STRATEGY] = "fsdp2"
    for name, (_, (theirs,)) in names(f"verl-{chosen}").items():
        ours = config.key(name)
        if theirs in config.given:
            config.given[ours] = config.given.pop(theirs)
            config.origin[ours] = f"{config.origin[theirs]}: {theirs.removeprefix(ACTOR)}"
        if theirs in config.doubts:
            config.doubts[ours] = config.doubts.pop(theirs)

"""veRL's engines that train: FSDP and Megatron, and those that are simulated as FSDP2."""

from __future__ import annotations

import re

from rlsim.frameworks.settings import TEXT
from rlsim.frameworks.tables import names
from rlsim.frameworks.verl.defaults import ACTOR, ROLLOUT
from rlsim.frameworks.verl.settings import STRATEGY, VerlSettings

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

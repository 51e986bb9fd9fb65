"""Whether the values of a veRL configuration are of the kind that veRL takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlsim.errors import ConfigError

if TYPE_CHECKING:
    from rlsim.verl.config import VerlConfig

#: Whole numbers of at least 1 without a default.
_COUNTS = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
)
_TEXTS = ("actor_rollout_ref.rollout.name",)
_SHARES = ("actor_rollout_ref.rollout.gpu_memory_utilization",)


#: Beyond it no number of tokens, sequences or GPUs can be meant.
MOST = 10**12


def check_values(config: VerlConfig) -> None:
    """Raises `ConfigError` for a value of another kind or size than veRL takes, where it bears on time."""
    sections = {key.rpartition(".")[0] for key in config.default}
    for key, value in config.given.items():
        if key in sections and value is not None:
            raise ConfigError(f"{config.origin[key]}: {key}: expected keys below it, got {value!r}")
        above = key.rpartition(".")[0]
        while above:
            if above in config.default:
                raise ConfigError(f"{config.origin[key]}: {above}: expected one value, got keys below it ({key})")
            above = above.rpartition(".")[0]
    for key, default in {**config.default, **dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_TEXTS, "")}.items():
        value = config.given.get(key)
        if value is not None and (expected := _unlike(key, value, default)):
            raise ConfigError(f"{config.origin[key]}: {key}: expected {expected}, got {value!r}")


def _unlike(key: str, value: Any, default: Any) -> str:
    """What was expected in place of `value`; empty if it will do."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or (isinstance(value, float) and math.isfinite(value))
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        least = "a whole number of at least 1" if default > 0 else "a whole number"
        return "" if whole and (default <= 0 or value > 0) and abs(value) <= MOST else least
    if key in _SHARES:
        return "" if number and 0.0 < value <= 1.0 else "a number above 0 and up to 1"
    if isinstance(default, float):
        return "" if number else "a number"
    if isinstance(default, str):
        return "" if isinstance(value, str) else "text"
    return ""

"""veRL's settings, and what is wrong with a key or a value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.errors import ConfigError, shown
from rlsim.init.settings import Settings
from rlsim.verl.defaults import ACTOR, KINDS, ROLLOUT

STRATEGY = ACTOR + "strategy"
#: The type in which FSDP reduces gradients, and whether Megatron's DDP does in fp32.
FSDP_REDUCES = ACTOR + "fsdp_config.mixed_precision.reduce_dtype"
MEGATRON_REDUCES = ACTOR + "megatron.override_ddp_config.grad_reduce_in_fp32"
#: Beyond it no number of tokens, sequences or GPUs can be meant.
MOST = 10**12
#: Sections with keys like those that bear on time.
_ELSEWHERE = ("actor_rollout_ref.ref", "critic", "reward", "distillation")


@dataclass(kw_only=True)
class VerlSettings(Settings):
    """veRL's settings; the defaults are those of the release `version`."""

    version: str = ""

    def __post_init__(self) -> None:
        self.program, self.option = f"veRL {self.version}", "--from-verl"

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return bool(self.given.get(STRATEGY) == "megatron")

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Raises `ConfigError` for a value of another kind or size than veRL takes, where it bears on time."""
        sections = {key.rpartition(".")[0] for key in self.default}
        for key, value in self.given.items():
            if key in sections and value is not None:
                raise ConfigError(f"{self.origin[key]}: {key}: expected keys below it, got {shown(value)}")
            above = next((above for above in _above(key) if above in self.default), None)
            if above:
                raise ConfigError(f"{self.origin[key]}: {above}: expected one value, got keys below it ({key})")
        for key in self.given:
            if problem := self.problem(key):
                raise ConfigError(f"{self.origin[key]}: {problem}")

    def problem(self, key: str) -> str:
        """What is wrong with the value given for a key; empty if nothing is."""
        value = self.given.get(key)
        expected = _unlike(key, value, KINDS[key]) if key in KINDS and value is not None else ""
        return f"{key}: expected {expected}, got {shown(value)}" if expected else ""

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


def _above(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


def _unlike(key: str, value: Any, default: Any) -> str:
    """What was expected in place of `value`, where `default` would do; empty if `value` will do too."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or (isinstance(value, float) and math.isfinite(value))
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        least = "a whole number of at least 1" if default > 0 else "a whole number"
        return "" if whole and (default <= 0 or value > 0) and abs(value) <= MOST else least
    if key == ROLLOUT + "gpu_memory_utilization":
        return "" if number and 0.0 < value <= 1.0 else "a number above 0 and up to 1"
    if isinstance(default, float):
        return "" if number else "a number"
    return "" if isinstance(value, str) else "text"

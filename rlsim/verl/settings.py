"""veRL's settings by dotted key, such as `data.train_batch_size`, and the place that each is from."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsim.errors import ConfigError, shown
from rlsim.verl.defaults import ACTOR, KINDS, ROLLOUT
from rlsim.verl.variables import Unknown

STRATEGY = ACTOR + "strategy"
#: The type in which FSDP reduces gradients, and whether Megatron's DDP does in fp32.
FSDP_REDUCES = ACTOR + "fsdp_config.mixed_precision.reduce_dtype"
MEGATRON_REDUCES = ACTOR + "megatron.override_ddp_config.grad_reduce_in_fp32"
#: Beyond it no number of tokens, sequences or GPUs can be meant.
MOST = 10**12
#: Sections with keys like those that bear on time.
_ELSEWHERE = ("actor_rollout_ref.ref", "critic", "reward", "distillation")


@dataclass
class Settings:
    """What files, logs and overrides say (`given`), and what the release would take for the rest (`default`).

    `origin` has the place of what is given, `doubts` those keys whose value the text does not tell, `notes` what to
    know about reading them; `name` is that of the first file.
    """

    version: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, tuple[str, Unknown]] = field(default_factory=dict)  # place, why
    default: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    name: str = ""

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return bool(self.given.get(STRATEGY) == "megatron")

    def put(self, data: Mapping[str, Any], place: str, prefix: str = "", *, lines: bool = False) -> None:
        """Take every leaf of a nested mapping; with `lines`, its line in the file `place` is added."""
        for key, value, line in _leaves(data, prefix):
            self.given[key] = value
            self.origin[key] = f"{place}:{line}" if lines and line else place

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

    def told(self, key: str) -> Any:
        """The value of a key, None if it has none or the text does not tell it."""
        return None if key in self.doubts else self.get(key)

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


def _leaves(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, int]]:
    """Every leaf by its dotted key, with its line (0 if it is not known)."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            if isinstance(value, float):
                value = float(value)  # ruamel.yaml's own kind, which remembers how it was written
            marks = getattr(data, "lc", None)
            mark = marks.data.get(key) if marks is not None and marks.data else None  # keys merged by << have none
            yield f"{prefix}{key}", value, mark[0] + 1 if mark else 0


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

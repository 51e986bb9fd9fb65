"""veRL's settings, and what is wrong with a key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from rlsim.errors import ConfigError
from rlsim.frameworks.settings import Settings
from rlsim.frameworks.tables import names
from rlsim.frameworks.verl.defaults import ACTOR

STRATEGY = ACTOR + "strategy"
#: The type in which FSDP reduces gradients, and whether Megatron's DDP does in fp32.
FSDP_REDUCES = ACTOR + "fsdp_config.mixed_precision.reduce_dtype"
MEGATRON_REDUCES = ACTOR + "megatron.override_ddp_config.grad_reduce_in_fp32"
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
        """Whether Megatron trains."""
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

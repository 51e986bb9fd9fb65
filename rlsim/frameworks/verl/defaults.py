"""veRL's keys, its releases, and its own defaults of the keys that bear on time."""

from __future__ import annotations

from typing import Any

from rlsim.errors import ConfigError
from rlsim.frameworks.tables import default_values

#: Releases whose defaults are known, oldest first.
VERSIONS = ("0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TP = ROLLOUT + "tensor_model_parallel_size"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"

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

"""Policies by name: those of rlsim, those that installed packages offer, and `module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from rlsim.errors import ConfigError, unknown_name
from rlsim.policies.parts import KINDS, Part

#: rlsim's own, loaded when asked for.
BUILTIN = {
    "adaptive_timeout": "rlsim.policies.reward_scheduler:AdaptiveTimeout",
    "async_reward": "rlsim.policies.reward_scheduler:AsyncReward",
    "chunked": "rlsim.policies.oppo:Chunked",
    "colocated_judge": "rlsim.policies.reward_scheduler:ColocatedJudge",
    "dynamic_sampling": "rlsim.policies.dynamic_sampling:DynamicSampling",
    "deepspeed_chat": "rlsim.policies.frameworks:DeepSpeedChat",
    "megatron": "rlsim.policies.frameworks:Megatron",
    "nemo_aligner": "rlsim.policies.frameworks:NeMoAligner",
    "openrlhf": "rlsim.policies.frameworks:OpenRLHF",
    "oppo": "rlsim.policies.oppo:OPPO",
    "overcommit": "rlsim.policies.oppo:Overcommit",
    "pat": "rlsim.policies.pat:PAT",
    "plan": "rlsim.policies.plan:ExplicitPlan",
    "planner": "rlsim.policies.planner:Planner",
    "real": "rlsim.policies.searched:REAL",
    "reward_beside": "rlsim.policies.reward_scheduler:RewardBeside",
    "reward_scheduler": "rlsim.policies.reward_scheduler:RewardScheduler",
    "rlhfuse": "rlsim.policies.rlhfuse:RLHFuse",
    "rlhfuse_plus": "rlsim.policies.rlhfuse:StrengthenedRLHFuse",
    "rollpacker": "rlsim.policies.rollpacker:RollPacker",
    "stream": "rlsim.policies.stream_trainer:StreamTrainer",
    "tail_batching": "rlsim.policies.tail_batching:TailBatching",
    "tail_consolidation": "rlsim.policies.rlhfuse:TailConsolidation",
    "trl": "rlsim.policies.frameworks:TRL",
    "verl": "rlsim.policies.verl:VeRL",
}
ENTRY_POINT_GROUP = "rlsim.policies"


def policy_names() -> dict[str, str]:
    """Every known policy and where it is defined (`module:Class`)."""
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**installed, **BUILTIN}


def home_of(name: str) -> str:
    """Where a policy is defined (`module:Class`); raises `CatalogueError` for an unknown name."""
    if name in BUILTIN:
        return BUILTIN[name]  # without a look through the installed packages, which takes milliseconds
    if ":" in name:
        return name
    known = policy_names()
    if name not in known:
        raise unknown_name("policy", name, known)
    return known[name]


def load_policy(name: str) -> type[Part]:
    """The policy class of that name, or at `module:Class`: a part of a system.

    Raises `CatalogueError` for an unknown name, `ConfigError` if what is there is no policy.
    """
    module_name, _, class_name = home_of(name).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be loaded: {error}") from None
    if not (isinstance(found, type) and issubclass(found, KINDS)):
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ConfigError(f"policy {name!r} is no part of a system: none of {kinds}")
    return found

"""Policies by name: those of rlsim, those that installed packages offer, and `module:Class`."""

from __future__ import annotations

from importlib.metadata import entry_points

from rlsim.base.usercode import load_object
from rlsim.errors import ConfigError, unknown_name
from rlsim.policies.parts import KIND_NAMES, KINDS, Part

#: rlsim's own, loaded when asked for.
BUILTIN = {
    "active_groups": "rlsim.policies.relaxed:ActiveGroups",
    "adaptive_timeout": "rlsim.policies.reward_scheduler:AdaptiveTimeout",
    "areal": "rlsim.policies.asynchronous:AReaL",
    "async_reward": "rlsim.policies.reward_scheduler:AsyncReward",
    "bounded_staleness": "rlsim.policies.continuous:BoundedStaleness",
    "chunked": "rlsim.policies.oppo:Chunked",
    "colocated_async": "rlsim.policies.relaxed:ColocatedAsync",
    "colocated_judge": "rlsim.policies.reward_scheduler:ColocatedJudge",
    "deepspeed_chat": "rlsim.policies.frameworks:DeepSpeedChat",
    "dynamic_sampling": "rlsim.policies.dynamic_sampling:DynamicSampling",
    "elastic_split": "rlsim.policies.elastic_split:ElasticSplit",
    "hybrid_rollout": "rlsim.policies.hybrid_rollout:HybridRollout",
    "laminar": "rlsim.policies.laminar:Laminar",
    "lagged": "rlsim.policies.relaxed:Lagged",
    "megatron": "rlsim.policies.frameworks:Megatron",
    "nemo_aligner": "rlsim.policies.frameworks:NeMoAligner",
    "nemo_async": "rlsim.policies.asynchronous:NeMoAsync",
    "one_step_off": "rlsim.policies.relaxed:OneStepOff",
    "openrlhf": "rlsim.policies.frameworks:OpenRLHF",
    "oppo": "rlsim.policies.oppo:OPPO",
    "overcommit": "rlsim.policies.oppo:Overcommit",
    "partial_rollout": "rlsim.policies.relaxed:PartialRollout",
    "pat": "rlsim.policies.pat:PAT",
    "plan": "rlsim.policies.plan:ExplicitPlan",
    "planner": "rlsim.policies.planner:Planner",
    "real": "rlsim.policies.searched:REAL",
    "repack": "rlsim.policies.laminar:Repack",
    "replica_batches": "rlsim.policies.laminar:ReplicaBatches",
    "reward_beside": "rlsim.policies.reward_scheduler:RewardBeside",
    "reward_scheduler": "rlsim.policies.reward_scheduler:RewardScheduler",
    "rlhfuse": "rlsim.policies.rlhfuse:RLHFuse",
    "rlhfuse_plus": "rlsim.policies.rlhfuse:StrengthenedRLHFuse",
    "roll_flash": "rlsim.policies.asynchronous:RollFlash",
    "rollout_log_probs": "rlsim.policies.continuous:RolloutLogProbs",
    "rollpacker": "rlsim.policies.rollpacker:RollPacker",
    "skewness_dispatch": "rlsim.policies.dispatch:SkewnessDispatch",
    "split": "rlsim.policies.relaxed:Split",
    "stream": "rlsim.policies.stream_trainer:StreamTrainer",
    "streamrl": "rlsim.policies.asynchronous:StreamRL",
    "sync_quota": "rlsim.policies.continuous:SyncQuota",
    "tail_batching": "rlsim.policies.tail_batching:TailBatching",
    "tail_consolidation": "rlsim.policies.rlhfuse:TailConsolidation",
    "trl": "rlsim.policies.frameworks:TRL",
    "verl": "rlsim.policies.verl:VeRL",
    "verl_fully_async": "rlsim.policies.asynchronous:VeRLFullyAsync",
    "training_windows": "rlsim.policies.continuous:Windows",
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
    home = home_of(name)
    found = load_object(home, f"policy {name!r}" if name == home else f"policy {name!r} ({home})")
    if not (isinstance(found, type) and issubclass(found, KINDS)):
        raise ConfigError(f"policy {name!r} is no part of a system: no class of the kinds {KIND_NAMES}")
    if found in KINDS:
        raise ConfigError(f"policy {name!r} is a kind of part, not a part: derive a class from it")
    return found

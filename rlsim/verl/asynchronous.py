"""veRL's asynchronous trainers: with generation on GPUs of its own, or on those of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlsim.errors import ConfigError
from rlsim.hardware import Cluster
from rlsim.init.draft import Draft, Entry
from rlsim.init.names import node_gpus
from rlsim.init.parts import Options, System, add_cluster, joined
from rlsim.init.settings import COUNT, FLAG, NUMBER, SHARE, TEXT
from rlsim.verl.defaults import ACTOR, GPUS_PER_NODE, NODES, ROLLOUT
from rlsim.verl.settings import VerlSettings

ASYNC = "async_training."
_MINI, _BATCH, _GENERATED = ACTOR + "ppo_mini_batch_size", "data.train_batch_size", "data.gen_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
#: Generation's GPUs: of the recipes, and as later releases write them.
_ROLLOUT_NODES = ("rollout.nnodes", ROLLOUT + "nnodes")
_ROLLOUT_GPUS = ("rollout.n_gpus_per_node", ROLLOUT + "n_gpus_per_node")
_USES_ROLLOUT = (ASYNC + "use_rollout_log_probs", ACTOR + "use_rollout_log_probs")
_PROXIMAL = ASYNC + "compute_prox_log_prob"
_TRIGGER, _BATCHES = ASYNC + "trigger_parameter_sync_step", ASYNC + "require_batches"
_THRESHOLD, _PARTIAL = ASYNC + "staleness_threshold", ASYNC + "partial_rollout"
_CONCURRENT = ASYNC + "concurrent_samples_per_replica"
#: The recipes' own defaults, of `fully_async_ppo_trainer.yaml` and `one_step_off_ppo_trainer.yaml`.
_DEFAULTS: dict[str, Any] = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, _BYPASS: True}
_FULLY: dict[str, Any] = {
    _THRESHOLD: 0.1, _TRIGGER: 4, _BATCHES: 1, _PARTIAL: True, _USES_ROLLOUT[0]: True, _PROXIMAL: False,
    _CONCURRENT: 16,
}  # fmt: skip
#: The trainers of veRL's v1, and batches that they launch before the first step.
_MODE, _V1 = "trainer.v1.trainer_mode", "trainer.v1."
_SYNC_STEP, _HYBRID = f"{_V1}separate_async.parameter_sync_step", f"{_V1}separate_async.hybrid_rollout."
#: GPUs of training generate while they would wait: the switch, until when, and whether that adapts; its other name.
_SWITCH, _UNTIL, _ADAPTS = (
    _HYBRID + key for key in ("enable_switch", "switch_threshold_ratio", "adaptive_switch_threshold")
)
_DYNAMIC = ASYNC + "use_dynamic_resource_scheduling"
_WARMUP = {mode: f"{_V1}{mode}.num_warmup_batches" for mode in ("colocate_async", "separate_async")}
_DROPPED = (f"{_V1}sampler.max_off_policy_threshold", f"{_V1}sampler.max_off_policy_strategy")
#: Keys that are known beside those of synchronous training.
KEYS = (
    *_ROLLOUT_NODES, *_ROLLOUT_GPUS, *_USES_ROLLOUT, *_FULLY, _SYNC_STEP, *_WARMUP.values(), *_DROPPED, _SWITCH, _UNTIL,
    _ADAPTS, _DYNAMIC,
)  # fmt: skip
Policy = Literal["verl_fully_async", "one_step_off"]


@dataclass(frozen=True)
class Apart:
    """GPUs of generation and of training, and the system that uses them."""

    policy: Policy
    rollout: tuple[int, int]  # nodes, GPUs of each
    training: tuple[int, int]
    where: str  # both are said

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generate."""
        return self.rollout[0] * self.rollout[1]

    def shares_nodes(self, per_node: int) -> bool:
        """Whether both sides fit on the same nodes of so many GPUs."""
        return self.rollout[0] == self.training[0] and self.rollout[1] + self.training[1] <= per_node

    def cluster(self, draft: Draft, options: Options) -> Cluster:
        """Both sides as one cluster: on the same nodes if they fit there, else on nodes of their own."""
        (nodes, per_node), (others, other_per_node) = self.training, self.rollout
        total = nodes * per_node + others * other_per_node
        if options.cluster is not None:
            return add_cluster(draft, options, 1, total, self.where)
        most = node_gpus(options.gpu) if options.gpu else total  # without a name `add_cluster` asks for it
        if self.shares_nodes(most):
            return add_cluster(draft, options, nodes, per_node + other_per_node, self.where)
        if per_node == other_per_node:
            return add_cluster(draft, options, nodes + others, per_node, self.where)
        if total % most:
            raise ConfigError(f"{self.where}: {total} GPUs are no whole nodes of {most}: give --cluster FILE")
        draft.notes.append(f"{self.where}: {total} GPUs, taken as {total // most} nodes of {most}")
        return add_cluster(draft, options, total // most, most, self.where)

    def trainers(self, machines: Cluster) -> Cluster:
        """What trains, as a cluster."""
        nodes, per_node = self.training
        return machines.model_copy(update={"nodes": nodes, "gpus_per_node": per_node})


def apart_of(config: VerlSettings) -> Apart | None:
    """The recipe that a configuration is of; None if it is synchronous.

    The batch of a step is set to what a fully asynchronous run trains on between two syncs. Raises `ConfigError` for
    asynchronous training that is not simulated.
    """
    separate_v1 = config.told(TEXT, _MODE) == "separate_async"
    if separate_v1:
        _as_fully_async(config)
    fully = config.has(ASYNC.removesuffix(".")) or config.is_given("rollout.total_rollout_steps")
    separate = config.told(FLAG, "actor_rollout_ref.hybrid_engine") is False or config.is_given(_ROLLOUT_NODES[0])
    separate = separate or bool(config.told(COUNT, _ROLLOUT_NODES[1]))
    if config.told(TEXT, _MODE) == "colocate_async" or _resumes(config):
        return None
    if fully and not separate:
        key = next(key for key in (*config.given, *config.doubts) if key.startswith((ASYNC, "rollout.")))
        raise ConfigError(
            f"{config.origin.get(key, 'the configuration')}: {key}, but no GPUs of generation (rollout.nnodes, "
            "rollout.n_gpus_per_node): of veRL's asynchronous recipes one_step_off_policy and fully_async_policy are "
            "simulated, whose generation has GPUs of its own"
        )
    if not separate:
        return None
    config.default |= {**_DEFAULTS, **(_FULLY if fully else {}), **({_BYPASS: False} if separate_v1 else {})}
    config.given.pop(ROLLOUT + "free_cache_engine", None)  # nothing trains beside the KV cache
    config.default.pop(ROLLOUT + "free_cache_engine", None)
    if fully:
        _set_batch(config)
    keys = (*(_said(config, both) for both in (_ROLLOUT_NODES, _ROLLOUT_GPUS)), NODES, GPUS_PER_NODE)
    nodes, per_node, trainers, per_trainer = (config.whole(key) for key in keys)
    policy: Policy = "verl_fully_async" if fully else "one_step_off"
    return Apart(policy, (nodes, per_node), (trainers, per_trainer), joined(*map(config.where, keys)))


def _as_fully_async(config: VerlSettings) -> None:
    """`separate_async` of veRL's v1 in the words of `fully_async_policy`: whole batches ahead, no limit of prompts."""
    warmup = _WARMUP["separate_async"]
    config.default |= {_SYNC_STEP: 4, warmup: 1}
    for theirs, ours in ((_SYNC_STEP, _TRIGGER), (warmup, _THRESHOLD)):
        config.put({ours: config.need(COUNT, theirs)}, config.where(theirs))
    config.put({_PARTIAL: True}, f"{_MODE} ({config.origin[_MODE]})")


def _resumes(config: VerlSettings) -> bool:
    """Whether it is the recipe `partial_rollout`, of whose section this one key is all that it has."""
    keys = [key for key in (*config.given, *config.doubts) if key.startswith(ASYNC)]
    return (
        keys == [_PARTIAL]
        and config.flag(_PARTIAL)
        and config.told(FLAG, "actor_rollout_ref.hybrid_engine") is not False
    )


def colocated_of(config: VerlSettings) -> System | None:
    """The system that trains where it generates and resumes what a step leaves unfinished; None if none does."""
    if config.told(TEXT, _MODE) == "colocate_async":
        config.default[_WARMUP["colocate_async"]] = 1
        return "colocated_async", {"active": 1 + config.need(COUNT, _WARMUP["colocate_async"])}
    return ("colocated_async", {"active": 2}) if _resumes(config) else None


def add_one_batch(config: VerlSettings, draft: Draft, responses: int, replicas: int) -> None:
    """The recipe `partial_rollout` begins a prompt where one is complete: one batch of responses is under way."""
    entries = draft.entries["engine"]
    if not _resumes(config) or not isinstance(entries, dict):
        return
    under_way = math.ceil(responses / replicas)
    if under_way < config.whole(ROLLOUT + "max_num_seqs"):
        said = f"{config.where(_PARTIAL)}: one batch is under way"
        entries["max_num_seqs"] = Entry(under_way, f"{said}, on {replicas} replicas")
        draft.notes.append(f"{said}: max_num_seqs = {under_way} with the TP that is configured, of other replicas than "
                           "another TP has")  # fmt: skip


def _said(config: VerlSettings, keys: Sequence[str]) -> str:
    """The one of these keys that is given, else the first."""
    return next((key for key in keys if config.is_given(key)), keys[0])


def _set_batch(config: VerlSettings) -> None:
    """A step lies between two syncs: so many updates, each on so many mini-batches."""
    factors = (_TRIGGER, _BATCHES, _MINI)
    batch = 1
    for key in factors:
        batch *= config.whole(key)
    config.doubts.pop(_BATCH, None)
    config.given.pop(_GENERATED, None)  # always 1
    config.put({_BATCH: batch}, " × ".join(f"{key.rpartition('.')[2]} {config.whole(key)}" for key in factors))


def parameters(config: VerlSettings, apart: Apart) -> dict[str, Any]:
    """What the system of the recipe is given beside its TP."""
    common: dict[str, Any] = {"rollout_gpus": apart.rollout_gpus}
    if apart.policy == "one_step_off":
        return common
    return {
        **common,
        "staleness_threshold": config.need(NUMBER, _THRESHOLD),
        "trigger_parameter_sync_step": config.whole(_TRIGGER),
        "partial_rollout": config.flag(_PARTIAL),
        "per_replica": None if config.told(TEXT, _MODE) == "separate_async" else config.whole(_CONCURRENT),
        "recompute_log_probs": recomputes(config),
    }


def parts_beside(config: VerlSettings, apart: Apart) -> list[Any]:
    """Further parts of the system: whether GPUs of training generate while they would wait."""
    if apart.policy != "verl_fully_async" or not (config.flag(_SWITCH) or config.flag(_DYNAMIC)):
        return []
    if not config.is_given(_UNTIL):
        return ["hybrid_rollout"]
    return [{"hybrid_rollout": {"until": config.need(SHARE, _UNTIL)}}]


def ahead(config: VerlSettings, apart: Apart | None) -> int:
    """Steps that generation may be ahead of training."""
    if apart is None:
        return 0 if colocated_of(config) is None else 1
    return 1 if apart.policy == "one_step_off" else math.ceil(config.need(NUMBER, _THRESHOLD))


def recomputes(config: VerlSettings) -> bool:
    """Whether training computes the old policy's log-probs; releases have several switches for it."""
    uses = all(config.told(FLAG, key) is not False for key in _USES_ROLLOUT)
    return not uses or config.flag(_PROXIMAL) or not config.get(FLAG, _BYPASS)


def said_of(config: VerlSettings, apart: Apart) -> str:
    """Where the parameters are said."""
    rules = (_THRESHOLD, _TRIGGER, _PARTIAL) if apart.policy == "verl_fully_async" else ()
    where = config.where(*_ROLLOUT_NODES), *map(config.where, rules)
    return joined(config.where(ROLLOUT + "tensor_model_parallel_size"), *where)


def missing(config: VerlSettings, apart: Apart, machines: Cluster) -> list[str]:
    """What the recipe does that the experiment has not."""
    found = []
    if apart.policy == "verl_fully_async":
        if config.flag(_SWITCH) and config.told(FLAG, _ADAPTS) is not False:
            found.append(f"{config.where(_ADAPTS)}: the share at which GPUs of training go back adapts: here it stays")
        if config.told(COUNT, _DROPPED[0]) and config.told(TEXT, _DROPPED[1]) == "drop":
            found.append(f"{config.where(_DROPPED[0])}: staler responses are dropped: here all are trained on")
    if apart.shares_nodes(machines.gpus_per_node) and apart.rollout[0] > 1:
        found.append(f"{apart.where}: every node has GPUs of both sides; here generation has the first GPUs of all")
    return found

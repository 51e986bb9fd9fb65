"""veRL's asynchronous trainers: with generation on GPUs of its own, or on those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlsim.errors import ConfigError
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.mapping import default_values
from rlsim.frameworks.names import node_gpus
from rlsim.frameworks.parts import Options, System, add_cluster, joined
from rlsim.frameworks.settings import COUNT, FLAG, TEXT
from rlsim.frameworks.verl.settings import GPUS_PER_NODE, NODES, ROLLOUT, VerlSettings
from rlsim.models.hardware import Cluster

ASYNC = "async_training."
_BATCH, _GENERATED, _CACHE = "data.train_batch_size", "data.gen_batch_size", ROLLOUT + "free_cache_engine"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
#: Which trainer of veRL's v1 runs.
_MODE = "trainer.v1.trainer_mode"
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
    separate = config.told(FLAG, "actor_rollout_ref.hybrid_engine") is False or config.is_given(
        config.key("rollout_nodes")
    )
    separate = separate or bool(config.told(COUNT, config.keys("rollout_nodes")[1]))
    if config.told(TEXT, _MODE) == "colocate_async" or _resumes(config):
        return None
    if fully and not separate:
        key = next(key for key in (*config.given, *config.doubts) if key.startswith((ASYNC, "rollout.")))
        raise ConfigError(
            f"{config.origin.get(key, config.file)}: {key}, but no GPUs of generation (rollout.nnodes, "
            "rollout.n_gpus_per_node): of veRL's asynchronous recipes one_step_off_policy and fully_async_policy are "
            "simulated, whose generation has GPUs of its own"
        )
    if not separate:
        return None
    config.default |= default_values("verl-apart") | default_values("verl-fully" if fully else "")
    config.default |= {_BYPASS: False} if separate_v1 else {}
    for settings in (config.given, config.default):
        settings.pop(_CACHE, None)  # nothing trains beside the KV cache
    if fully:
        _set_batch(config)
    named = (config.keys(name) for name in ("rollout_nodes", "rollout_per_node"))
    keys = (*(next(filter(config.is_given, own), own[0]) for own in named), NODES, GPUS_PER_NODE)
    nodes, per_node, trainers, per_trainer = (config.whole(key) for key in keys)
    policy: Policy = "verl_fully_async" if fully else "one_step_off"
    return Apart(policy, (nodes, per_node), (trainers, per_trainer), joined(*map(config.where, keys)))


def _as_fully_async(config: VerlSettings) -> None:
    """`separate_async` of veRL's v1 in the words of `fully_async_policy`: whole batches ahead, no limit of prompts."""
    config.default |= default_values("verl-v1")
    for theirs, ours in (("sync_step", "trigger"), ("separate_warmup", "threshold")):
        config.put({config.key(ours): config.needed(theirs)}, config.where(theirs))
    config.put({config.key("partial"): True}, f"{_MODE} ({config.origin[_MODE]})")


def _resumes(config: VerlSettings) -> bool:
    """Whether it is the recipe `partial_rollout`, of whose section this one key is all that it has."""
    keys = [key for key in (*config.given, *config.doubts) if key.startswith(ASYNC)]
    alone = keys == [config.key("partial")] and config.flag("partial")
    return alone and config.told(FLAG, "actor_rollout_ref.hybrid_engine") is not False


def colocated_of(config: VerlSettings) -> System | None:
    """The system that trains where it generates and resumes what a step leaves unfinished; None if none does."""
    if config.told(TEXT, _MODE) == "colocate_async":
        config.default |= default_values("verl-v1")
        return "colocated_async", {"active": 1 + config.needed("colocate_warmup")}, ""
    return ("colocated_async", {"active": 2}, "") if _resumes(config) else None


def add_one_batch(config: VerlSettings, draft: Draft, responses: int, replicas: int) -> None:
    """The recipe `partial_rollout` begins a prompt where one is complete: one batch of responses is under way."""
    entries = draft.entries["engine"]
    if not _resumes(config) or not isinstance(entries, dict):
        return
    under_way = math.ceil(responses / replicas)
    if under_way < config.whole(ROLLOUT + "max_num_seqs"):
        said = f"{config.where('partial')}: one batch is under way"
        entries["max_num_seqs"] = Entry(under_way, f"{said}, on {replicas} replicas")
        draft.notes.append(f"{said}: max_num_seqs = {under_way} with the TP that is configured, of other replicas than "
                           "another TP has")  # fmt: skip


def _set_batch(config: VerlSettings) -> None:
    """A step lies between two syncs: so many updates, each on so many mini-batches."""
    factors = {key: config.whole(key) for key in config.keys("trigger", "batches", "mini")}
    config.doubts.pop(_BATCH, None)
    config.given.pop(_GENERATED, None)  # always 1
    said = " × ".join(f"{key.rpartition('.')[2]} {factor}" for key, factor in factors.items())
    config.put({_BATCH: math.prod(factors.values())}, said)

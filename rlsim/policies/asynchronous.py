"""Published asynchronous trainers: GPUs for generation, a rule for what may be under way, and how training takes it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from rlsim.policies.continuous import BoundedStaleness, RolloutLogProbs, SyncQuota, Windows
from rlsim.policies.dispatch import SkewnessDispatch
from rlsim.policies.frameworks import StaticTP
from rlsim.policies.parts import Part
from rlsim.policies.relaxed import Lagged, Split
from rlsim.policies.reward_scheduler import AsyncReward
from rlsim.policies.verl import VeRL
from rlsim.sim.request import UpdatedKv


class Apart(StaticTP):
    """Generation on GPUs of its own, with one TP degree; rewards as responses finish."""

    rollout_gpus: int | None = Field(default=None, ge=1, description="GPUs that generate; none given: as `split` cuts")

    def common(self) -> tuple[Part, ...]:
        """The parts that all of these systems have."""
        return VeRL(tp=self.tp), Split(rollout_gpus=self.rollout_gpus), AsyncReward()


class VeRLFullyAsync(Apart):
    """veRL's `fully_async_policy`. A step is what is trained between two weight syncs: `workflow.prompts` are
    `trigger_parameter_sync_step` x `require_batches` x `ppo_mini_batch_size`.

    Its modes: on policy (one update a sync, threshold 0), stream (more, threshold 0), with stale samples (threshold
    above 0), and with partial rollout, where a sync interrupts what is generated.
    """

    staleness_threshold: float = Field(default=0.5, ge=0, le=1000, description="see `sync_quota`")
    trigger_parameter_sync_step: int = Field(default=4, ge=1, le=100_000, description="updates between two syncs")
    partial_rollout: bool = Field(default=True, description="see `sync_quota`")
    per_replica: int | None = Field(default=16, ge=1, description="see `sync_quota`")
    recompute_log_probs: bool = Field(
        default=False, description="compute old log-probs in training; if not, those of the rollout engine serve"
    )

    def parts(self) -> Sequence[Part]:
        quota = SyncQuota(
            staleness_threshold=self.staleness_threshold,
            per_replica=self.per_replica,
            partial_rollout=self.partial_rollout,
        )
        windows = Windows(parts=self.trigger_parameter_sync_step)
        log_probs = () if self.recompute_log_probs else (RolloutLogProbs(),)
        return (*self.common(), *log_probs, windows, quota)


class AReaL(Apart):
    """AReaL (Fu et al. 2025): bounded staleness, and new weights that interrupt what is generated."""

    eta: float = Field(default=4, ge=0, le=1000, description="see `bounded_staleness`")
    concurrent: int | None = Field(default=None, ge=1, description="see `bounded_staleness`")
    interrupt: bool = Field(default=True, description="see `bounded_staleness`")

    def parts(self) -> Sequence[Part]:
        rule = BoundedStaleness(eta=self.eta, concurrent=self.concurrent, interrupt=self.interrupt)
        return (*self.common(), rule)


class RollFlash(Apart):
    """ROLL Flash: at most 1 + α batches under way, none staler than α, each response rewarded when it ends."""

    alpha: float = Field(default=2.0, ge=0, le=1000, description="asynchronous ratio; see `eta` of `bounded_staleness`")

    def parts(self) -> Sequence[Part]:
        return (*self.common(), BoundedStaleness(eta=self.alpha, stale="wait"))


class NeMoAsync(Apart):
    """NeMo-RL's asynchronous GRPO: prompts at most so many steps ahead; a weight update waits for them, or does not.

    A prompt is generated for one step, which waits for all of its own (`ReplayBuffer.sample`): none is older.
    """

    max_trajectory_age_steps: int = Field(default=1, ge=0, le=1000, description="updates that a response may be old")
    in_flight_weight_updates: bool = Field(default=False, description="update while responses are generated")
    updated_kv: UpdatedKv = Field(default="keep", description="what becomes of their KV cache then")

    def parts(self) -> Sequence[Part]:
        rule = BoundedStaleness(
            eta=self.max_trajectory_age_steps,
            stale="wait",
            concurrent_batches=max(self.max_trajectory_age_steps, 1),
            interrupt=self.in_flight_weight_updates,
            updated_kv=self.updated_kv,
        )
        return (*self.common(), rule)


class SkyRLAsync(Apart):
    """SkyRL's `trainer.fully_async`: AReaL's rule; prompts are trained on as they are complete, and KV caches kept."""

    max_staleness_steps: float = Field(default=4, ge=0, le=1000, description="see `eta` of `bounded_staleness`")
    num_parallel_generation_workers: int | None = Field(default=None, ge=1, description="prompts under way at most")
    clear_kv_cache_on_weight_sync: bool = Field(default=False, description="compute KV caches again; if not, keep them")

    def parts(self) -> Sequence[Part]:
        rule = BoundedStaleness(
            eta=self.max_staleness_steps,
            order="ready",
            concurrent=self.num_parallel_generation_workers,
            updated_kv="recompute" if self.clear_kv_cache_on_weight_sync else "keep",
        )
        return (*self.common(), rule)


class StreamRL(Apart):
    """StreamRL (Zhong et al. 2025): one step off, each response on its way to training as soon as it is complete."""

    parts_per_step: int = Field(
        default=4, ge=1, le=100_000, description="mini-batches that training takes as they come"
    )
    skewness_aware: bool = Field(default=True, description="dispatch by predicted length: `skewness_dispatch`")

    def parts(self) -> Sequence[Part]:
        dispatch = (SkewnessDispatch(),) if self.skewness_aware else ()
        return (*self.common(), *dispatch, Lagged(lag=1), Windows(parts=self.parts_per_step))

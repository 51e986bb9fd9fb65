"""What a rollout takes as a function of host time, from the simulator's own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsim.calibrate.fit.common import Array
from rlsim.cost.calibration import Calibration, HostFit
from rlsim.cost.memory import kept_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.frameworks.verl.lengths import Batch
from rlsim.frameworks.verl.run import RunSettings
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage


@dataclass(frozen=True)
class RolloutTimes:
    """Every replica's time by step: `kernels_s + step_s · iterations + sequence_s · sequences` of its host time.

    Arrays of shape (steps, deals, replicas); a deal is one way in which a step's lengths may have fallen to prompts.
    Exact: in a static layout host time moves no decision of the engine, it only adds to every iteration. `sequences` is
    the sum of running sequences over iterations. `before_s` (by step) is the rollout with the calibration's own host
    time. `fixed` if the calibration has whole iterations of this model and TP: then `kernels_s` has host time in it.
    """

    kernels_s: Array
    iterations: Array
    sequences: Array
    before_s: Array
    fixed: bool
    notes: tuple[str, ...]

    def total_s(self, step_s: float, sequence_s: float) -> Array:
        """Seconds of each step's rollout: its slowest replica, averaged over the deals."""
        return _slowest(self.kernels_s + step_s * self.iterations + sequence_s * self.sequences)


def _slowest(ends: Array) -> Array:
    return np.asarray(ends.max(axis=2).mean(axis=1))


def rollout_times(
    model: Model,
    cluster: Cluster,
    calibration: Calibration,
    settings: RunSettings,
    batches: Sequence[Sequence[Batch]],
) -> RolloutTimes:
    """Simulates every step's rollouts (one for each deal) without host time, with a second of each kind of it, and with
    the calibration's own.

    Raises `CapacityError` if the model does not fit, `PolicyError` or `ConfigError` if it cannot be cut that way.
    """
    fixed = calibration.known(model, settings.rollout_tp).fit is not None
    kinds = [] if fixed else [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    hosts = [host_fit(calibration, *kind, "") for kind in kinds] + [calibration.host]
    candidates = [_costs(model, cluster, calibration.model_copy(update={"host": host}), settings) for host in hosts]
    ends = np.array(  # steps, kinds, deals, replicas
        [
            [[_replica_ends(costs, cluster, settings, batch) for batch in dealt] for costs in candidates]
            for dealt in batches
        ]
    )
    plain, before_s = ends[:, 0], _slowest(ends[:, -1])
    extra = [np.zeros_like(plain) if fixed else ends[:, i] - plain for i in (1, 2)]
    return RolloutTimes(plain, extra[0], extra[1], before_s, fixed, tuple(candidates[0].lookups().note()))


def host_fit(calibration: Calibration, step_s: float, sequence_s: float, source: str) -> HostFit:
    """`calibration`'s host time with these two numbers, on top of the kernels.

    Of an engine whose host works beside the GPU only what is not hidden can be seen in a run: that is added to the
    kernels too, and nothing for prefills.
    """
    host = calibration.host.model_copy(update={"step_s": step_s, "sequence_s": sequence_s, "source": source})
    return host.model_copy(update={"overlapped": False, "prefill_s": 0.0}) if host.overlapped else host


def _costs(model: Model, cluster: Cluster, calibration: Calibration, settings: RunSettings) -> RolloutCostModel:
    return RolloutCostModel(
        model,
        cluster,
        calibration,
        page_tokens=settings.engine.page_tokens,
        max_batched_tokens=settings.engine.max_num_batched_tokens,
        max_sequences=settings.engine.max_num_seqs,
        memory_utilization=settings.memory_utilization,
        resident_bytes=kept_bytes(model, settings.train),
    )


def _replica_ends(costs: RolloutCostModel, cluster: Cluster, settings: RunSettings, batch: Batch) -> Array:
    """When each replica finishes its last response (seconds from the start; 0 for one without responses)."""
    per_node = cluster.gpus_per_node
    rollout = run_rollout(
        GenerationStage(
            requests=batch.requests(),
            mesh=[tuple(range(first, first + per_node)) for first in range(0, cluster.gpus, per_node)],
            tp=settings.rollout_tp,
            costs=costs,
            config=settings.engine.with_prefix_hits(costs.calibration.prefix_hits),
            cap_tokens=settings.cap,
        )
    )
    ends = np.zeros(len(rollout.replicas))
    for request in rollout.requests:
        ends[request.replica] = max(ends[request.replica], request.finished_at)
    return ends

"""The fits to a run's timings: one training efficiency, and one or two host times of the rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares

from rlsim.base.refusals import refuse
from rlsim.calibrate.fit.common import Array, percent
from rlsim.cost.calibration import Calibration, HostFit
from rlsim.cost.calls import CallCosts
from rlsim.cost.flops import forward_flops
from rlsim.cost.memory import kept_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.train import TrainCost
from rlsim.errors import CalibrationError
from rlsim.frameworks.verl.lengths import Batch
from rlsim.frameworks.verl.log import VerlLog
from rlsim.frameworks.verl.run import RunSettings
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage

#: What is predicted and compared with the log.
QUANTITIES = ("gen_s", "old_log_prob_s", "ref_log_prob_s", "update_actor_s", "step_s")
#: Model FLOPs of the update over the peak of all GPUs. Outside this the times, the GPUs or the model must be wrong.
PLAUSIBLE_MFU = (0.01, 1.0)
#: Kernel time of the rollout over the logged one, likewise.
PLAUSIBLE_KERNELS = (0.02, 3.0)
#: Host times of engines and releases that were measured differ by less than this; more is something else inside gen.
DOUBTFUL = 5.0
#: Two host numbers are told apart if the standard error of what each adds to gen is below this share of gen.
TOLD_APART = 0.05
#: ... or if the spread of the errors with both is below this share of that with one.
CLEARLY_BETTER = 0.8
#: So far lengths that are reconstructed move a rollout (docs/calibrating-from-a-run.md).
LENGTHS_KNOWN = 0.08
_EFFICIENCIES = np.geomspace(0.01, 1.0, 13)


@dataclass(frozen=True)
class Run:
    """What is fitted: usable steps, their sequences, which of them the fit may see, and what they ran on."""

    log: VerlLog
    steps: pd.DataFrame
    batches: Sequence[Batch]
    used: Sequence[bool]
    settings: RunSettings
    model: Model
    cluster: Cluster
    base: Calibration

    @cached_property
    def logged(self) -> dict[str, Array]:
        """Seconds by step of every quantity that the log has; `gen_s` is without the resharding that it contains."""
        steps = self.steps.assign(gen_s=self.steps.gen_s - self.steps.reshard_s.fillna(0.0))
        found = {name: steps[name].to_numpy(float) for name in QUANTITIES}
        return {name: values for name, values in found.items() if not np.isnan(values).any()}

    def log_prob_s(self, efficiency: float, batches: Sequence[Batch] | None = None) -> Array:
        """Predicted seconds of a log-prob pass over each batch (default: all)."""
        cost = self._train_cost(efficiency, inference=True)
        return np.array([cost.forward_s(batch.total_tokens).total_s for batch in batches or self.batches])

    def update_s(self, efficiency: float, batches: Sequence[Batch] | None = None) -> Array:
        """Predicted seconds of an update over each batch (default: all)."""
        cost, mini, epochs = self._train_cost(efficiency, False), self.settings.mini_batches, self.settings.epochs
        return np.array([cost.train_s(batch.total_tokens, mini, epochs).total_s for batch in batches or self.batches])

    def _train_cost(self, efficiency: float, inference: bool) -> TrainCost:
        shares = {**self.base.training.flop_efficiency, self.settings.backend: efficiency}
        fitted = self.base.training.model_copy(update={"flop_efficiency": shares, "forward_efficiency": {}})
        base = self.base.model_copy(update={"training": fitted})
        calls = CallCosts({"actor": self.model}, self.cluster, base, self.settings.backend)
        return calls.of("actor", self.settings.inference if inference else self.settings.train)


# Training ------------------------------------------------------------------------------------------------------------


def check_mfu(run: Run) -> tuple[float, list[str]]:
    """The run's median MFU (FLOPs of 3 forward passes over the peak of all GPUs), and whether veRL's own agrees.

    Raises `CalibrationError` if no GPU could have it.
    """
    peak = run.cluster.gpus * run.cluster.gpu.bf16_flop_per_s
    flops = np.array([forward_flops(run.model, batch.total_tokens) for batch in run.batches])
    mfu = float(np.median(3.0 * run.settings.epochs * flops / (run.steps.update_actor_s.to_numpy(float) * peak)))
    refuse("MFU of a run", CalibrationError, run=run, mfu=mfu, plausible=PLAUSIBLE_MFU)
    logged = float(run.steps.mfu_actor.median())
    if logged > 0.0 and not 0.67 < mfu / logged < 1.5:
        return mfu, [
            f"veRL logs an MFU of {logged:.2f}, here it is {mfu:.2f}: check the model, the GPUs and their peak rate"
        ]
    return mfu, []


@dataclass(frozen=True)
class TrainingShares:
    """Shares of the peak of training and of log-prob calls, and the seconds of each call beside; `how` says which are
    fitted."""

    flop: float
    forward: float
    call_s: float = 0.0
    how: str = ""


def fit_training(run: Run) -> TrainingShares:
    """The efficiencies at which updates and log-prob passes of the used steps come out best (log errors, robust).

    Time that no tokens change is told from them only where it makes the errors clearly smaller. Times fall smoothly
    with the efficiency: they are worked out at 13 values and interpolated in between. Raises `CalibrationError` if the
    calls are faster than the peak or slower than a hundredth of it allows.
    """
    some = [batch for batch, use in zip(run.batches, run.used, strict=True) if use]
    curves, shown = [], []
    for quantity, times in (("update_actor_s", run.update_s), ("old_log_prob_s", run.log_prob_s)):
        if quantity in run.logged:
            table = np.array([times(float(efficiency), some) for efficiency in _EFFICIENCIES])
            curves.append(PchipInterpolator(np.log(_EFFICIENCIES), np.log(table), axis=0))
            shown.append(run.logged[quantity][np.asarray(run.used)])
    shortest_s, count = float(min(np.median(seconds) for seconds in shown)), len(curves)

    def errors(x: Array) -> list[Array]:
        fixed_s = shortest_s * (x[count] if len(x) > count else 0.0)
        return [
            np.log((np.exp(curve(at)) + fixed_s) / seconds)
            for curve, at, seconds in zip(curves, x, shown, strict=False)
        ]

    def error(x: Array) -> Array:
        return np.concatenate(errors(x))

    low, high = [float(np.log(_EFFICIENCIES[0]))] * count, [float(np.log(_EFFICIENCIES[-1]))] * count
    starts = [[float(np.log(start))] * count for start in (0.2, 0.5)]
    found, how = _robust_fit(error, starts, low, high), "no time of a call beside"
    _check_bounds(run, found, [float(np.median(off)) for off in errors(found)], low[0], high[0])
    more = _robust_fit(error, [[*start, 0.2] for start in starts], [*low, 0.0], [*high, 0.9])
    if _spread(error(more), count + 1) < CLEARLY_BETTER * _spread(error(found), count):
        found, how = more, f"and {more[count] * shortest_s:.3g} s a call beside"
    call_s = shortest_s * float(found[count]) if len(found) > count else 0.0
    flop, forward = float(np.exp(found[0])), float(np.exp(found[count - 1]))
    return TrainingShares(flop, forward, call_s, f"{flop:.3f} (updates), {forward:.3f} (log-probs), {how}")


def _check_bounds(run: Run, found: Array, medians: Sequence[float], low: float, high: float) -> None:
    for at, off in zip(found, medians, strict=True):
        if (at > high - 1e-3 and off > 0.05) or (at < low + 1e-3 and off < -0.05):
            way = "faster than the GPUs' peak allows" if off > 0 else "slower than a hundredth of the GPUs' peak"
            by = percent(abs(float(np.expm1(off))))
            raise CalibrationError(
                f"{run.log.path}: the training calls are {way} ({by} off at the bound); check the model, the cluster, "
                "the training strategy and the unit of the times"
            )


# Host time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostTimes:
    """Host seconds per iteration, and per running sequence and iteration; `how` says which of them are fitted.

    `kept`: the base calibration's host is the run's, with what of it is hidden beside the GPU.
    """

    step_s: float
    sequence_s: float
    how: str
    kept: bool = False


def fit_host(run: Run, times: RolloutTimes) -> HostTimes:
    """Host times at which the rollouts of the used steps come out best (log errors, robust, none below zero).

    If the steps are too alike to tell the two apart, the one that explains them better is fitted and the other stays
    the base calibration's. A host that works beside the GPU is kept while rollouts come out as well as lengths are
    known: the run shows only what is not hidden of it, and at another TP more may come out. Raises `CalibrationError`
    if the kernels alone are out of proportion to the logged times.
    """
    base, measured, used = run.base.host.in_rollouts, run.logged["gen_s"], np.asarray(run.used)
    share, slowest_s = float(np.median(times.total_s(0.0, 0.0) / measured)), float(np.median(measured))
    refuse("kernels of a run", CalibrationError, run=run, share=share, seconds=slowest_s, plausible=PLAUSIBLE_KERNELS)
    if times.fixed:
        whole = f"{run.base.name} has whole iterations of {run.model.name} at TP{run.settings.rollout_tp}"
        return HostTimes(base.step_s, base.sequence_s, f"not fitted: {whole}, host time included", kept=True)
    # What a unit of each parameter adds is about the whole of gen.
    units = np.array(
        [np.median(measured / part.max(axis=2).mean(axis=1)) for part in (times.iterations, times.sequences)]
    )
    y = np.log(measured[used])

    def both(x: Array) -> Array:
        return np.asarray(np.log(times.total_s(x[0] * units[0], x[1] * units[1])[used]) - y)

    two = _robust_fit(both, [[0.3, 0.3], [0.7, 0.05], [0.05, 0.7]], [0.0, 0.0], [np.inf, np.inf])
    told = max(_standard_errors(both, two)) <= TOLD_APART
    known = np.zeros(2) if base.overlapped else np.array([base.step_s, base.sequence_s]) / units
    names, ones = ("step_s", "sequence_s"), []
    for fitted in (1, 0):

        def one(x: Array, fitted: int = fitted) -> Array:
            return both(np.where(np.arange(2) == fitted, x[0], known))

        found = _robust_fit(one, [[0.1], [0.6]], [0.0], [np.inf])
        ones.append((_spread(one(found), 1), names[1 - fitted], fitted, float(found[0])))
    spread, kept, fitted, at = min(ones)
    if base.overlapped and _spread(np.log(times.before_s[used]) - y) < LENGTHS_KNOWN:
        beside = f"that of {run.base.name}, beside the GPU, explains the run as well"
        return HostTimes(base.step_s, base.sequence_s, f"not fitted: {beside}", kept=True)
    if told or _spread(both(two), 2) < CLEARLY_BETTER * spread:
        return HostTimes(float(two[0] * units[0]), float(two[1] * units[1]), "both numbers fitted")
    whose = "zero" if base.overlapped else f"that of {run.base.name}"
    step_s, sequence_s = np.where(np.arange(2) == fitted, at, known) * units
    alike = "the steps are too alike, or too noisy, to tell both apart"
    return HostTimes(float(step_s), float(sequence_s), f"{names[fitted]} fitted, {kept} {whose}: {alike}")


def doubts(base: Calibration, found: HostTimes) -> list[str]:
    """What to say of host times that are far from those of the calibration that the fit began with."""
    pairs = {"step_s": (found.step_s, base.host.step_s), "sequence_s": (found.sequence_s, base.host.sequence_s)}
    far = [
        f"host.{name} is {fitted:.3g} s, {fitted / was:.3g} times that of {base.name}"
        for name, (fitted, was) in pairs.items()
        if was > 0.0 and fitted > DOUBTFUL * was
    ]
    why = (
        "no engine's host is known to be so slow. Something else is inside gen (tools, environments, rewards, loading "
        "of weights), or the GPU, its kernels or the lengths are not the run's; the fit holds for this batch size alone"
    )
    return [f"{' and '.join(far)}: {why}"] if far else []


def _standard_errors(error: Callable[[Array], Array], at: Array) -> Array:
    """Of each parameter, from the spread of the errors and their slopes; infinite if the slopes are one direction."""
    step = 1e-4
    start = error(at)
    slopes = np.stack([(error(at + step * row) - start) / step for row in np.eye(len(at))], axis=1)
    if np.linalg.cond(slopes) > 1e3:
        return np.full(len(at), np.inf)
    covariance = np.linalg.inv(slopes.T @ slopes) * _spread(start, len(at)) ** 2
    return np.asarray(np.sqrt(np.diag(covariance)))


def _robust_fit(
    error: Callable[[Array], Array], starts: Sequence[Sequence[float]], low: Sequence[float], high: Sequence[float]
) -> Array:
    """Least squares with a soft-L1 loss at a scale of 10%, then with a Cauchy loss at twice the spread of the errors:
    single steps that took much longer for reasons of their own count next to nothing. Such a loss has several minima:
    of those found from `starts` the one with the smallest spread counts."""
    best, least = np.array(starts[0]), np.inf
    for start in starts:
        found = np.array(start)
        for loss in ("soft_l1", "cauchy", "cauchy"):
            scale = 0.1 if loss == "soft_l1" else max(2.0 * _spread(error(found)), 0.005)
            inside = np.clip(found, np.array(low) + 1e-9, np.array(high) - 1e-9)
            found = least_squares(error, inside, loss=loss, f_scale=scale, bounds=(low, high)).x
        if _spread(error(found)) < least:
            best, least = found, _spread(error(found))
    return np.asarray(best)


def _spread(errors: Array, fitted: int = 0) -> float:
    """Standard deviation by the median absolute deviation from zero, for that many fitted numbers."""
    freedom = len(errors) / max(len(errors) - fitted, 1)
    return float(1.4826 * np.median(np.abs(errors)) * np.sqrt(freedom))


# Rollouts -------------------------------------------------------------------------------------------------------------


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
    hosts = [host_fit(calibration, *kind, "") for kind in kinds] + [calibration.host.in_rollouts]
    candidates = [
        RolloutCostModel(
            model,
            cluster,
            calibration.model_copy(update={"host": host}),
            page_tokens=settings.engine.page_tokens,
            max_batched_tokens=settings.engine.max_num_batched_tokens,
            max_sequences=settings.engine.max_num_seqs,
            memory_utilization=settings.memory_utilization,
            resident_bytes=kept_bytes(model, settings.train),
        )
        for host in hosts
    ]
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
    host = calibration.host.in_rollouts.model_copy(
        update={"step_s": step_s, "sequence_s": sequence_s, "source": source}
    )
    return host.model_copy(update={"overlapped": False, "prefill_s": 0.0}) if host.overlapped else host


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

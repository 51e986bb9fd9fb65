"""The one free training efficiency per framework, fitted to measured veRL steps.

The rows with known lengths (2, 3: FSDP, 4: Megatron, all 8xA100/A800) name neither the interconnect nor the spread of
lengths. Both are therefore unknowns here: the spread is assumed, the bus rate fitted beside the efficiency (two
numbers to the four timings of rows 2 and 3) and reported for NVLink too. The H20 rows state no mean length, so only
the ratios between them can be checked: one number (mean response) is chosen to match row 10's update, everything else
is predicted. Rows 22, 28 and 29 state neither lengths nor a layout and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from calibration.tables import TrainingRun
from rlsim.calibrate.fit.common import Array
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost, TrainEfficiency
from rlsim.hardware import Cluster, Link, load_cluster
from rlsim.models import load_model

SPREAD = 0.7  # standard deviation of log response length; assumed, the logs give means only
PROMPT = 150.0  # tokens, where a row does not state them; assumed
NVLINK = 240e9  # bus rate of NCCL over A100's NVLink, bytes/s
H20_BUS = 360e9  # the same for H20
MINI_BATCHES = 4  # rows 2 to 4
H20_MINI_BATCHES = 16

FSDP = TrainStrategy(dp=8, zero_stage=3, micro_batch_sequences=16)
MEGATRON = TrainStrategy(dp=2, tp=2, pp=2, zero_stage=1, micro_batch_sequences=4, sequence_parallel=True)


@dataclass(frozen=True)
class Ring:
    """Ring collectives at a bus rate: latency + moved bytes / rate; across nodes one network port per GPU."""

    cluster: Cluster
    bus_bytes_per_s: float

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of one collective."""
        if gpus < 2:
            return 0.0
        moved = {"all_reduce": 2 * (gpus - 1) / gpus, "broadcast": 1.0, "send_recv": 1.0}.get(op, (gpus - 1) / gpus)
        rate = self.bus_bytes_per_s
        if nodes > 1 and self.cluster.inter:
            rate = min(rate, 0.8 * self.cluster.inter.bytes_per_s * (gpus // nodes))
        return 2e-5 + moved * message_bytes / rate


@dataclass(frozen=True)
class Timing:
    """One phase of one row."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Prediction:
    """One row: its two phases, and what of it the case was fitted to."""

    label: str
    role: str
    old_log_prob: Timing
    update_actor: Timing


@dataclass(frozen=True)
class Case:
    """One way of fitting, and what it says about the rows."""

    title: str
    efficiency: float
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class TrainingEfficiencies:
    """Shares of A100's peak by framework, the bus rate fitted beside them, and every case looked at."""

    fsdp: float
    megatron: float
    bus_bytes_per_s: float
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Setup:
    """What a row ran on, as far as it is known or assumed."""

    cluster: Cluster
    strategy: TrainStrategy
    bus_bytes_per_s: float
    mini_batches: int

    def predict(self, run: TrainingRun, efficiency: float, response: float, label: str, role: str) -> Prediction:
        """Both phases of `run` with that mean response."""
        prompt = PROMPT if math.isnan(run.mean_prompt) else run.mean_prompt
        batch = lengths(int(run.responses), prompt, response, run.max_response)
        shares = TrainEfficiency(flop=efficiency, attention=0.65, overhead_tokens=290)
        model = load_model("qwen2.5-7b")  # Qwen2, Qwen2.5 and Qwen2.5-Math 7B have one shape
        cost = TrainCost(model, self.cluster, Ring(self.cluster, self.bus_bytes_per_s), self.strategy, shares)
        forward, train = cost.forward_s(batch).total_s, cost.train_s(batch, self.mini_batches).total_s
        return Prediction(label, role, Timing(forward, run.old_log_prob_s), Timing(train, run.update_actor_s))

    def row(self, run: TrainingRun, efficiency: float, role: str) -> Prediction:
        """A run whose mean response is stated."""
        label = f"row {run.row}: mean response {run.mean_response:.0f}"
        return self.predict(run, efficiency, run.mean_response, label, role)

    def efficiency_of(self, run: TrainingRun) -> float:
        """The efficiency at which the run's update comes out as measured."""
        return _root(lambda x: self.row(run, x, "").update_actor.error, 0.05, 0.99)


def lengths(count: int, prompt: float, response: float, cap: float) -> Array:
    """`count` lengths, prompt included: lognormal responses cut at `cap` with mean `response`, always the same."""
    draws = np.exp(SPREAD * np.random.default_rng(0).standard_normal(count))
    scale = _root(lambda x: float(np.minimum(draws * x, cap).mean()) - response, 1e-3, 1e6)
    return np.asarray(np.round(np.minimum(draws * scale, cap)) + prompt)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high))


def fit_fsdp(runs: list[TrainingRun], bus_bytes_per_s: float) -> tuple[float, float, tuple[Prediction, ...]]:
    """The efficiency that suits all timings best at a bus rate; its loss, its value and the predictions."""
    setup = Setup(load_cluster("8xa100"), FSDP, bus_bytes_per_s, MINI_BATCHES)

    def predict(efficiency: float) -> tuple[Prediction, ...]:
        return tuple(setup.row(run, efficiency, "fitted") for run in runs)

    def loss(efficiency: float) -> float:
        timings = [timing for row in predict(efficiency) for timing in (row.old_log_prob, row.update_actor)]
        return sum(math.log(1.0 + timing.error) ** 2 for timing in timings)

    found = minimize_scalar(loss, bounds=(0.2, 0.9), method="bounded")
    return float(found.fun), float(found.x), predict(float(found.x))


def fit_training(runs: dict[int, TrainingRun]) -> TrainingEfficiencies:
    """The efficiencies from rows 2, 3 and 4, and what they say about the other rows."""
    cluster, fsdp_runs = load_cluster("8xa100"), [runs[2], runs[3]]
    _, nvlink, shown = fit_fsdp(fsdp_runs, NVLINK)
    cases = [Case("FSDP, NVLink assumed (240 GB/s)", nvlink, shown)]
    fits = {float(bus): fit_fsdp(fsdp_runs, float(bus)) for bus in np.arange(10, 42, 1) * 1e9}
    bus = min(fits, key=lambda bus: fits[bus][0])
    _, fsdp, shown = fits[bus]
    cases.append(Case(f"FSDP, bus rate fitted too ({bus / 1e9:.0f} GB/s)", fsdp, shown))
    setup = Setup(cluster, FSDP, bus, MINI_BATCHES)
    for seen, unseen in ((runs[3], runs[2]), (runs[2], runs[3])):
        efficiency = setup.efficiency_of(seen)
        shown = (setup.row(unseen, efficiency, "not fitted"),)
        cases.append(Case(f"FSDP, from the update of row {seen.row} alone", efficiency, shown))
    for rate, why in ((NVLINK, "NVLink assumed"), (bus, "FSDP's bus rate")):
        setup = Setup(cluster, MEGATRON, rate, MINI_BATCHES)
        megatron = setup.efficiency_of(runs[4])
        shown = (setup.row(runs[4], megatron, "update fitted"),)
        cases.append(Case(f"Megatron, TP2 PP2 DP2, {why} ({rate / 1e9:.0f} GB/s)", megatron, shown))
    cases += [check_h20(runs, fsdp, sequence_parallel=1), check_h20(runs, fsdp, sequence_parallel=4)]
    return TrainingEfficiencies(fsdp, megatron, bus, tuple(cases))


def check_h20(runs: dict[int, TrainingRun], efficiency: float, sequence_parallel: int) -> Case:
    """Scaling from 32 to 128 H20: the mean response is chosen on row 10's update, the rest predicted."""
    port = Link(name="ib-ndr400", bytes_per_s=50e9, latency_s=2.7e-6)
    offload = sequence_parallel > 1
    shown: list[Prediction] = []
    response = 0.0
    for row, gpus in ((10, 32), (11, 64), (12, 128)):
        cluster = load_cluster("8xh20").model_copy(update={"nodes": gpus // 8, "inter": port})
        strategy = TrainStrategy(
            dp=gpus // sequence_parallel,
            cp=sequence_parallel,
            zero_stage=3,
            micro_batch_tokens=36864 * sequence_parallel,
            offload=offload,
        )
        setup, run = Setup(cluster, strategy, H20_BUS, H20_MINI_BATCHES), runs[row]
        if not shown:
            response = _response(setup, run, efficiency)
        role = "not fitted" if shown else "length chosen to match the update"
        shown.append(setup.predict(run, efficiency, response, f"row {row}: {gpus} GPUs", role))
    title = f"FSDP2 on H20, sequence parallel {sequence_parallel}{', offload' * offload}"
    return Case(f"{title}, mean response {response:.0f}", efficiency, tuple(shown))


def _response(setup: Setup, run: TrainingRun, efficiency: float) -> float:
    """The mean response at which the run's update comes out as measured."""
    return _root(lambda x: setup.predict(run, efficiency, x, "", "").update_actor.error, 50, 20000)

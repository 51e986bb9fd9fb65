"""Two numbers of training stacks, fitted to the log-prob and update seconds of real runs.

`traffic`: what a framework moves through memory beside its matrix products, in bytes for each of their FLOPs (unfused
element-wise kernels; gaps between kernels count as such). It is added to the GPU's own rate of large products, so that
a GPU with much bandwidth for its FLOPs, such as H20, comes nearer to its peak than one with little.
`driver_s`: a single controller's seconds per token of the padded batch, for each call.

The traffic of FSDP is fitted to veRL rows 2 and 3 of `training.yaml` (A100 or A800), to NeMo-RL v0.3's DTensor on H100
(log-probs only: whether it recomputed is not known) and to veRL's 7B on H100; Megatron's to NeMo-RL's Megatron and to
veRL's 7B on H100 with fused rotary embeddings (`evidence/verl_training.csv`: by its MFU, which no controller is in).
The interconnect of veRL's machine of A100s is not named: its bus rate is fitted beside it. The driver's time is fitted
to the log-probs of dense models there, on H100 and H20.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from calibration.catalogue import DATE, GPUS, SCRIPT, all_gemms, large_gemm_share
from evidence.validate.coverage import CALLS, LeftOutCalls, TransferCalls, errors_by_setting, level_spread, spread
from evidence.validate.parts import Options
from evidence.validate.rows import Row
from evidence.validate.serving import read_runs
from evidence.validate.steps_training import DRIVER_S, TrainingRun, lengths, training_rows, training_runs
from evidence.validate.transfer import left_out_rows, shipped_fits, today_rows, unseen_rows
from evidence.validate.weight_sync import predicted_errors, read_syncs
from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.fit.common import Array
from rlsim.calibrate.write import write_record
from rlsim.cost.assumed import TransferErrors
from rlsim.cost.strategy import TRAFFIC, TrainEfficiency, TrainStrategy, efficiency_of
from rlsim.cost.train import TrainCost
from rlsim.models.hardware import Cluster, load_cluster, load_gpu
from rlsim.models.model import load_model

NVLINK = {"a100-sxm-80gb": 240e9, "h100-sxm": 360e9}  # bus rate of NCCL, bytes/s
BUSES = [bus * 1e9 for bus in range(14, 25)]  # tried for veRL's machine, bytes/s
SOURCE = "rl_timings/verl_steps.csv, rl_timings/rl_steps_async.csv, evidence/verl_training.csv (veRL and NeMo-RL)"
ROWS = plain(read_yaml(Path(__file__).with_suffix(".yaml")))


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

    def __str__(self) -> str:
        return f"{self.predicted_s:.1f} / {self.measured_s:.1f} ({self.error:+.0%})"


@dataclass(frozen=True)
class Stack:
    """One run: what it ran on and how, as far as that is known or assumed, and its measured seconds."""

    label: str
    framework: str
    group: str
    model: str
    cluster: Cluster
    strategy: TrainStrategy
    batch: Array
    mini_batches: int
    log_prob_s: float
    update_s: float
    bus_bytes_per_s: float | None = None
    passes: int = 1
    fits: tuple[int, ...] = (0, 1)  # of log-probs and update

    def timings(self, shares: dict[str, float], traffic: float) -> tuple[Timing, Timing]:
        """Log-probs and update; `shares`: of the peak that each GPU's large products reach."""
        gpu, share = self.cluster.gpu, shares[self.cluster.gpu.name]
        flop = efficiency_of(share, gpu.bf16_flop_per_s / gpu.memory_bytes_per_s, traffic)
        links = Ring(self.cluster, self.bus_bytes_per_s or NVLINK[gpu.name])
        cost = TrainCost(load_model(self.model), self.cluster, links, self.strategy, TrainEfficiency(flop=flop))
        log_prob_s, update = (
            self.passes * cost.forward_s(self.batch).total_s,
            cost.train_s(self.batch, self.mini_batches),
        )
        return Timing(log_prob_s, self.log_prob_s), Timing(update.total_s - update.offload_s, self.update_s)


def stacks(data: Path, bus_bytes_per_s: float) -> list[Stack]:
    """The runs; veRL's machine of A100s has that bus rate."""
    found = []
    for row in ROWS["stacks"]:
        logged = pd.read_csv(data / f"rl_timings/{row['table']}.csv").set_index("id").loc[row["row"]]
        shape = row.get("prompt", logged.get("mean_prompt")), row.get("response", logged.get("mean_response"))
        whose = "veRL" if row["table"] == "verl_steps" else "NeMo-RL"
        found.append(
            Stack(
                label=f"{whose} row {row['row']}: {row['label'].format(**logged)}",
                cluster=load_cluster(row["cluster"]),
                strategy=TrainStrategy(**row["strategy"]),
                batch=lengths(row["count"], *shape, row.get("longest", row["cap"]), row["spread"]),
                log_prob_s=logged.old_logprob_s,
                update_s=logged.update_actor_s,
                bus_bytes_per_s=bus_bytes_per_s if row.get("bus") else None,
                fits=tuple(row.get("fits", (0, 1))),
                **{name: row[name] for name in ("framework", "group", "model", "mini_batches")},
                passes=row.get("passes", 1),
            )
        )
    runs = (run for run in training_runs() if run.kind == "input" and not run.mixture)
    return [*found, *map(_of_run, runs)]


def _of_run(run: TrainingRun) -> Stack:
    return Stack(
        label=f"veRL {run.id}",
        framework=run.backend,
        group=f"veRL on H100 {run.backend}",
        model=run.model,
        cluster=load_cluster(run.cluster),
        strategy=run.strategy,
        batch=run.lengths,
        mini_batches=run.mini_batches,
        log_prob_s=run.old_log_prob_s or 0.0,
        update_s=run.counted_s,
        fits=(1,),
    )


@dataclass(frozen=True)
class Case:
    """One way of fitting, and what it says about some rows: log-probs and update of each, fitted or not."""

    title: str
    traffic: float
    rows: tuple[tuple[Stack, Timing, Timing], ...]


@dataclass(frozen=True)
class Fit:
    """The numbers, the bus rate fitted beside them, and every case looked at.

    `drivers`: the controller's seconds for all log-probs, and without those of each model on each GPU.
    """

    traffic: dict[str, float]
    bus_bytes_per_s: float
    cases: tuple[Case, ...]
    drivers: dict[str, float]


def fit_stacks(data: Path, shares: dict[str, float]) -> Fit:
    """Every number, and what each says about rows that it is not fitted to, group by group left out."""

    def case(title: str, traffic: float, curves: Iterable[_Curve]) -> None:
        rows = [curve.row for curve in curves]
        cases.append(Case(title, traffic, tuple((row, *row.timings(shares, traffic)) for row in rows)))

    def curves_of(framework: str, bus: float) -> list[_Curve]:
        rows = {(row.label, row.bus_bytes_per_s): row for row in stacks(data, bus) if row.framework == framework}
        return [known.get(key) or known.setdefault(key, _Curve(row, shares)) for key, row in rows.items()]

    cases: list[Case] = []
    known: dict[tuple[str, float | None], _Curve] = {}
    by_bus = {bus: _traffic(curves_of("fsdp", bus)) for bus in BUSES}
    bus = min(BUSES, key=lambda bus: by_bus[bus][0])
    found = {}
    for framework in TRAFFIC:
        curves = curves_of(framework, bus)
        found[framework] = _traffic(curves)[1]
        case(f"all of {framework}", found[framework], curves)
        for group in dict.fromkeys(curve.row.group for curve in curves):
            seen = _traffic([curve for curve in curves if curve.row.group != group])[1]
            case(f"without {group}", seen, [curve for curve in curves if curve.row.group == group])
    curves = curves_of("fsdp", NVLINK["a100-sxm-80gb"])
    case("veRL's machine with NVLink", _traffic(curves)[1], [curve for curve in curves if curve.row.bus_bytes_per_s])
    case("never fitted", found["megatron"], curves_of("none", bus))
    return Fit(found, bus, tuple(cases), driver_times())


def driver_times() -> dict[str, float]:
    """Seconds of a padded token that the log-probs of dense models want: of all, and without each model on each GPU.

    Every log-prob counts alike; rlsim's own seconds have the shipped shares of the peak.
    """
    runs = [run for run in training_runs() if run.old_log_prob_s and run.log_probs_kind == "input" and not run.mixture]
    of = {run: (run.simulated()[0].total_s, run.padded_tokens, run.old_log_prob_s or 0.0) for run in runs}

    def fitted(left_out: str = "") -> float:
        s, tokens, measured = np.array([row for run, row in of.items() if run.group != left_out]).T
        loss = lambda driver_s: float((np.log((s + driver_s * tokens) / measured) ** 2).sum())  # noqa: E731
        return float(minimize_scalar(loss, bounds=(0.0, 2e-6), method="bounded", options={"xatol": 1e-10}).x)

    return {"all": fitted(), **{group: fitted(group) for group in dict.fromkeys(run.group for run in runs)}}


def expert_balance() -> float:
    """What the busiest GPU's experts have of the mean, by log-probs and optimizer steps of mixtures under Megatron."""
    runs = [run for run in training_runs() if run.kind == "input" and run.mixture and run.backend == "megatron"]

    def loss(imbalance: float) -> float:
        errors = []
        for run in runs:
            log_probs, update = run.simulated(imbalance)
            errors.append(run.steps_s(update) / run.counted_s)
            errors.append((log_probs.total_s + DRIVER_S * run.padded_tokens) / (run.old_log_prob_s or 0.0))
        return float((np.log(errors) ** 2).sum())

    return float(minimize_scalar(loss, bounds=(1.0, 3.0), method="bounded", options={"xatol": 1e-3}).x)


class _Curve:
    """A row's seconds over the traffic, at a few values and linear in between (which they nearly are)."""

    _at = np.linspace(0.0, 0.006, 4)

    def __init__(self, row: Stack, shares: dict[str, float]) -> None:
        self.row = row
        self._s = np.array([[timing.predicted_s for timing in row.timings(shares, x)] for x in self._at])
        self._measured = np.array([row.log_prob_s, row.update_s])

    def log_errors(self, traffic: float) -> Array:
        """Of log-probs and update."""
        seconds = np.array([np.interp(traffic, self._at, phase) for phase in self._s.T])
        return np.asarray(np.log(seconds / self._measured))[list(self.row.fits)]


def _traffic(curves: Sequence[_Curve]) -> tuple[float, float]:
    """Sum of squared log errors and the traffic at which it is least; every row counts alike."""

    def loss(traffic: float) -> float:
        return float(sum((curve.log_errors(traffic) ** 2).mean() for curve in curves))

    best = minimize_scalar(loss, bounds=(0.0, 0.006), method="bounded", options={"xatol": 1e-6})
    return float(best.fun), float(best.x)


def gemm_shares(data: Path) -> dict[str, float]:
    """What share of its peak each GPU of the measured runs reaches in large GEMMs."""
    return {
        name: large_gemm_share(all_gemms(data, GPUS[name].training_gemm), load_gpu(name).bf16_flop_per_s)
        for name in ("a100-sxm-80gb", "h100-sxm")
    }


def main(options: argparse.Namespace) -> None:
    """The numbers of training stacks, to measured runs of veRL and NeMo-RL, predicted against measured.

    The outcome is `rlsim.cost.strategy.TRAFFIC`, `evidence.validate.steps_training.DRIVER_S` and words of notes.yaml.
    """
    found = fit_stacks(options.data, gemm_shares(options.data))
    print("predicted / measured, s: log-probs (without the driver) and update")
    for case in found.cases:
        print(f"\n{case.title}: {case.traffic * 1e3:.2f} bytes for a thousand FLOPs")
        for row, *timings in case.rows:
            print(f"  {row.label}: {', '.join(map(str, timings))}")
    print(f"\nexperts' imbalance: {expert_balance():.2f}")
    print("us of a padded token:", ", ".join(f"{who} {time * 1e6:.3f}" for who, time in found.drivers.items()))


# Errors on settings that no fit has seen, through the code of `rlsim validate` ----------------------------------------


def transfer_errors(calls: TransferCalls) -> TransferErrors:
    """From the measured rows, and the errors of calls."""
    evidence = Options().evidence
    rows = unseen_rows(left_out_rows(read_runs(evidence), shipped_fits()), today_rows(evidence, print))
    rollout = spread(errors_by_setting(rows, "tpot_s"))
    syncs = level_spread(predicted_errors(read_syncs(evidence)))
    return TransferErrors(rollout.family, rollout.setting, rollout.tilt, level_spread(calls.log_errors()), syncs)


def left_out_calls(cases: Sequence[Case]) -> TransferCalls:
    """Errors of every run under the fit that has not seen its group, and of veRL's runs that nothing is fitted to."""
    unseen = [case for case in cases if case.title.startswith(("without ", "never fitted"))]
    groups = [
        LeftOutCalls(
            runs=tuple(stack.label.partition(":")[0] for stack, *_ in case.rows),
            errors=tuple(
                timing.error for stack, *both in case.rows for timing in (both[index] for index in stack.fits)
            ),
        )
        for case in unseen
    ]
    others: dict[str, list[Row]] = {}
    for row in training_rows(Options().evidence):
        if row.kind == "output":
            others.setdefault(row.case.rpartition("/")[0].rpartition("/")[0], []).append(row)
    groups += [
        LeftOutCalls(runs=tuple(dict.fromkeys(f"veRL {row.case}" for row in rows)), errors=tuple(r.error for r in rows))
        for rows in others.values()
    ]
    return TransferCalls(date=DATE, script=f"{SCRIPT} transfer", source=SOURCE, left_out=tuple(groups))


def transfer(options: argparse.Namespace) -> None:
    """How far calibrations are off on settings that no fit has seen: `rlsim.cost.assumed.MEASURED`.

    `rollout` and `tilt`: time per output token of every measured serving run, with the fit that has not seen its TP;
    `calls`: log-probs and updates of measured runs, each group left out of the fit of the training stack, and veRL's
    row 4, which nothing is fitted to (written to `evidence/validate/transfer_calls.yaml`); `sync`: weight syncs that no
    constant is fitted to. Each is the root of the mean square over settings.
    """
    calls = left_out_calls(fit_stacks(options.data, gemm_shares(options.data)).cases)
    comment = f"Made by {calls.script}; change that, not this. Errors: rlsim / measured - 1."
    write_record(calls.model_dump(), CALLS, comment)
    for name, value in vars(transfer_errors(calls)).items():
        print(f"{name}={value:.3f}")

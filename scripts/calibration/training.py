"""Two numbers of training stacks, fitted to the log-prob and update seconds of real runs.

`traffic`: what a framework moves through memory beside its matrix products, in bytes for each of their FLOPs (unfused
element-wise kernels; gaps between kernels count as such). It is added to the GPU's own rate of large products, so that
a GPU with much bandwidth for its FLOPs, such as H20, comes nearer to its peak than one with little.
`driver_s`: a single controller's seconds per token of the padded batch, for each call.

Rows are those of `training.yaml`. The traffic is fitted to veRL rows 2 and 3 (FSDP, A100 or A800) and NeMo-RL v0.3 on
H100 (rows 49 to 52; of DTensor the log-probs only: whether it recomputed is not known). The interconnect of veRL's
machine is not named: its bus rate is fitted beside it. The driver's time is fitted to veRL on H20 (rows 10 to 12, 28,
29), whose mean lengths are not stated: 1,024 tokens are assumed, the mean of the same model on the same prompts
elsewhere (AsyncFlow).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize_scalar

from calibration.catalogue import DATE, GPUS, SCRIPT, all_gemms, large_gemm_share
from evidence.validate.coverage import CALLS, LeftOutCalls, TransferCalls, errors_by_setting, level_spread, spread
from evidence.validate.parts import Options
from evidence.validate.serving import read_runs
from evidence.validate.transfer import left_out_rows, shipped_fits, today_rows, unseen_rows
from evidence.validate.weight_sync import predicted_errors, read_syncs
from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.fit.common import Array
from rlsim.calibrate.write import write_record
from rlsim.cost.assumed import TransferErrors
from rlsim.cost.strategy import TrainEfficiency, TrainStrategy, efficiency_of
from rlsim.cost.train import TrainCost
from rlsim.models.hardware import Cluster, load_cluster, load_gpu
from rlsim.models.model import load_model

NVLINK = {"a100-sxm-80gb": 240e9, "h100-sxm": 360e9, "h20": 360e9}  # bus rate of NCCL, bytes/s
BUSES = [bus * 1e9 for bus in range(14, 25)]  # tried for veRL's machine, bytes/s
#: Seconds per token of veRL's padded batch: the outcome of the part `training`, as is `TRAFFIC`; a test holds it.
DRIVER_S = 0.185e-6
SOURCE = "rl_timings/verl_steps.csv, rl_timings/rl_steps_async.csv (logs of veRL and NeMo-RL)"
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
    group: str
    model: str
    cluster: Cluster
    strategy: TrainStrategy
    batch: Array
    cap: int
    mini_batches: int
    log_prob_s: float
    update_s: float
    bus_bytes_per_s: float | None
    passes: int = 1
    update_fits: bool = True

    def timings(self, shares: dict[str, float], traffic: float, driver_s: float = 0.0) -> tuple[Timing, Timing]:
        """Log-probs and update; `shares`: of the peak that each GPU's large products reach."""
        gpu, share = self.cluster.gpu, shares[self.cluster.gpu.name]
        flop = efficiency_of(share, gpu.bf16_flop_per_s / gpu.memory_bytes_per_s, traffic)
        links = Ring(self.cluster, self.bus_bytes_per_s or NVLINK[gpu.name])
        cost = TrainCost(load_model(self.model), self.cluster, links, self.strategy, TrainEfficiency(flop=flop))
        driver = driver_s * self.padded_tokens
        log_prob = self.passes * (cost.forward_s(self.batch).total_s + driver)
        update = cost.train_s(self.batch, self.mini_batches).total_s + driver
        return Timing(log_prob, self.log_prob_s), Timing(update, self.update_s)

    @property
    def padded_tokens(self) -> float:
        """Of the batch, every sequence as long as the longest possible one (prompts of at most 2,048 tokens)."""
        return len(self.batch) * (self.cap + 2048.0)


def lengths(count: int, prompt: float, response: float, cap: float, spread: float) -> Array:
    """`count` lengths, prompt included: lognormal responses cut at `cap` with mean `response`, always the same."""
    draws = np.exp(spread * np.random.default_rng(0).standard_normal(count))
    scale = float(brentq(lambda x: float(np.minimum(draws * x, cap).mean()) - response, 1e-3, 1e6))
    return np.asarray(np.round(np.minimum(draws * scale, cap)) + prompt)


def stacks(data: Path, part: str, bus_bytes_per_s: float) -> list[Stack]:
    """The rows that `part` is fitted to; veRL's machine of A100s has that bus rate."""
    found = []
    for row in (row for row in ROWS["stacks"] if row.get("part", "traffic") == part):
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
                **{name: row[name] for name in ("group", "model", "cap", "mini_batches")},
                **{name: row[name] for name in ("passes", "update_fits") if name in row},
            )
        )
    return found


@dataclass(frozen=True)
class Case:
    """One way of fitting, and what it says about some rows: log-probs and update of each, fitted or not."""

    title: str
    traffic: float
    driver_s: float
    rows: tuple[tuple[Stack, Timing, Timing], ...]


@dataclass(frozen=True)
class Fit:
    """The numbers, the bus rate fitted beside them, and every case looked at."""

    traffic: float
    driver_s: float
    bus_bytes_per_s: float
    cases: tuple[Case, ...]


def fit_stacks(data: Path, shares: dict[str, float]) -> Fit:
    """Both numbers, and what each says about rows that it is not fitted to, group by group left out."""

    known: dict[tuple[str, float | None], _Curve] = {}

    def curves_of(part: str, bus: float = 0.0) -> list[_Curve]:
        rows = {(row.label, row.bus_bytes_per_s): row for row in stacks(data, part, bus)}
        return [known.get(key) or known.setdefault(key, _Curve(row, shares)) for key, row in rows.items()]

    def case(title: str, traffic: float, driver_s: float, curves: Iterable[_Curve]) -> None:
        rows = [curve.row for curve in curves]
        found = tuple((row, *row.timings(shares, traffic, driver_s)) for row in rows)
        cases.append(Case(title, traffic, driver_s, found))

    cases: list[Case] = []
    by_bus = {bus: curves_of("traffic", bus) for bus in BUSES}
    fits = {bus: _traffic(curves) for bus, curves in by_bus.items()}
    bus = min(BUSES, key=lambda bus: fits[bus][0])
    traffic, curves = fits[bus][1], by_bus[bus]
    case("all of these rows", traffic, 0.0, curves)
    for group in dict.fromkeys(curve.row.group for curve in curves):
        seen = _traffic([curve for curve in curves if curve.row.group != group])[1]
        case(f"without {group}", seen, 0.0, [curve for curve in curves if curve.row.group == group])
    nvlink = curves_of("traffic", NVLINK["a100-sxm-80gb"])
    case("veRL's machine with NVLink", _traffic(nvlink)[1], 0.0, nvlink)
    case("never fitted", traffic, 0.0, curves_of("none", bus))
    h20 = curves_of("driver")
    driver_s = _driver(h20, traffic)
    case("driver, all of these rows", traffic, driver_s, h20)
    for curve in h20:
        seen = _driver([other for other in h20 if other is not curve], traffic)
        case(f"driver, without {curve.row.group}", traffic, seen, [curve])
    return Fit(traffic, driver_s, bus, tuple(cases))


class _Curve:
    """A row's seconds over the traffic, at a few values and linear in between (which they nearly are)."""

    _at = np.linspace(0.0, 0.006, 4)

    def __init__(self, row: Stack, shares: dict[str, float]) -> None:
        self.row = row
        self._s = np.array([[timing.predicted_s for timing in row.timings(shares, x)] for x in self._at])
        self._measured = np.array([row.log_prob_s, row.update_s])

    def log_errors(self, traffic: float, driver_s: float = 0.0) -> Array:
        """Of log-probs and update."""
        seconds = np.array([np.interp(traffic, self._at, phase) for phase in self._s.T])
        return np.asarray(np.log((seconds + driver_s * self.row.padded_tokens) / self._measured))


def _traffic(curves: Sequence[_Curve]) -> tuple[float, float]:
    """Sum of squared log errors and the traffic at which it is least; every row counts alike."""

    def loss(traffic: float) -> float:
        errors = [curve.log_errors(traffic)[: 2 if curve.row.update_fits else 1] for curve in curves]
        return float(sum((error**2).mean() for error in errors))

    best = minimize_scalar(loss, bounds=(0.0, 0.006), method="bounded", options={"xatol": 1e-6})
    return float(best.fun), float(best.x)


def _driver(curves: Sequence[_Curve], traffic: float) -> float:

    def loss(driver_s: float) -> float:
        return float(sum((curve.log_errors(traffic, driver_s) ** 2).sum() for curve in curves))

    return float(minimize_scalar(loss, bounds=(0.0, 2e-6), method="bounded", options={"xatol": 1e-10}).x)


def gemm_shares(data: Path) -> dict[str, float]:
    """What share of its peak each GPU of the measured runs reaches in large GEMMs; H20: taken to be H100's."""
    found = {}
    for name in ("a100-sxm-80gb", "h100-sxm"):
        found[name] = large_gemm_share(all_gemms(data, GPUS[name].training_gemm), load_gpu(name).bf16_flop_per_s)
    return {**found, "h20": found["h100-sxm"]}


def main(options: argparse.Namespace) -> None:
    """The numbers of training stacks, to measured runs of veRL and NeMo-RL, predicted against measured.

    The outcome is `rlsim.cost.strategy.TRAFFIC`, `DRIVER_S` and words of notes.yaml.
    """
    found = fit_stacks(options.data, gemm_shares(options.data))
    print(f"{found.traffic * 1e3:.2f} bytes for a thousand FLOPs, {found.driver_s * 1e6:.3f} us a padded token\n")
    print("predicted / measured, s: log-probs and update")
    for case in found.cases:
        print(f"\n{case.title}: {case.traffic * 1e3:.2f} bytes for a thousand FLOPs, {case.driver_s * 1e6:.3f} us")
        for row, *timings in case.rows:
            print(f"  {row.label}: {', '.join(map(str, timings))}")


# Errors on settings that no fit has seen, through the code of `rlsim validate` ----------------------------------------


def transfer_errors(calls: TransferCalls) -> TransferErrors:
    """From the measured rows, and the errors of calls."""
    evidence = Options().evidence
    rows = unseen_rows(left_out_rows(read_runs(evidence), shipped_fits()), today_rows(evidence, print))
    rollout = spread(errors_by_setting(rows, "tpot_s"))
    syncs = level_spread(predicted_errors(read_syncs(evidence)))
    return TransferErrors(rollout.family, rollout.setting, rollout.tilt, level_spread(calls.log_errors()), syncs)


def left_out_calls(cases: Sequence[Case]) -> TransferCalls:
    """Errors of every run under the fit that has not seen its group."""
    unseen = [case for case in cases if case.title.startswith(("without ", "driver, without ", "never fitted"))]
    groups = [
        LeftOutCalls(
            runs=tuple(stack.label.partition(":")[0] for stack, *_ in case.rows),
            errors=tuple(timing.error for _, *both in case.rows for timing in both),
        )
        for case in unseen
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

"""Two numbers of training stacks, fitted to the log-prob and update seconds of real runs.

`traffic`: what a framework moves through memory beside its matrix products, in bytes for each of their FLOPs (unfused
element-wise kernels; gaps between kernels count as such). It is added to the GPU's own rate of large products, so that
a GPU with much bandwidth for its FLOPs, such as H20, comes nearer to its peak than one with little.
`driver_s`: a single controller's seconds per token of the padded batch, for each call.

The traffic is fitted to veRL rows 2 and 3 (FSDP, A100 or A800) and NeMo-RL v0.3 on H100 (rows 49 to 52; of DTensor the
log-probs only: whether it recomputed is not known). The interconnect of veRL's machine is not named: its bus rate is
fitted beside it. The driver's time is fitted to veRL on H20 (rows 10 to 12, 28, 29), whose mean lengths are not stated:
1,024 tokens are assumed, the mean of the same model on the same prompts elsewhere (AsyncFlow).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize_scalar

from rlsim.calibrate.fit.common import Array
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.train_efficiency import TrainEfficiency, efficiency_of
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import load_model

SPREADS = {"math": 0.7, "dapo": 0.8}  # standard deviations of log response length; assumed, the runs give means only
PROMPTS = {"verl": 150, "nemo": 130}  # tokens, where a row does not state them; assumed
H20_RESPONSE = 1024
NVLINK = {"a100-sxm-80gb": 240e9, "h100-sxm": 360e9, "h20": 360e9}  # bus rate of NCCL, bytes/s
BUSES = [bus * 1e9 for bus in range(14, 25)]  # tried for veRL's machine, bytes/s
NEMO_BATCH, NEMO_CAP = 64 * 32, 4096


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
class Stack:
    """One run: what it ran on and how, as far as that is known or assumed, and its measured seconds."""

    label: str
    group: str  # left out together
    model: str
    cluster: Cluster
    strategy: TrainStrategy
    batch: Array
    cap: int
    mini_batches: int
    log_prob_s: float
    update_s: float
    passes: int = 1  # over the batch, in `log_prob_s`
    update_fits: bool = True
    bus_bytes_per_s: float | None = None

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


def verl_stacks(data: Path, bus_bytes_per_s: float) -> dict[int, Stack]:
    """veRL's rows with known lengths: 2 and 3 with FSDP, 4 with Megatron; one machine, at a bus rate."""
    fsdp = TrainStrategy(dp=8, zero_stage=3, micro_batch_sequences=16, attention="flash_attention_2")
    megatron = TrainStrategy(
        dp=2, tp=2, pp=2, zero_stage=1, micro_batch_sequences=4, sequence_parallel=True, recompute="none", logits="fp32"
    )
    table, found = pd.read_csv(data / "rl_timings/verl_steps.csv").set_index("id"), {}
    for number, strategy in ((2, fsdp), (3, fsdp), (4, megatron)):
        row = table.loc[number]
        batch = lengths(int(row.responses_per_step), row.mean_prompt, row.mean_response, 1024, SPREADS["math"])
        times = row.old_logprob_s, row.update_actor_s
        label = f"veRL row {number}: mean response {row.mean_response:.0f}"
        found[number] = Stack(label, "veRL", "qwen2.5-7b", load_cluster("8xa100"), strategy, batch, 1024, 4, *times,
                              bus_bytes_per_s=bus_bytes_per_s)  # fmt: skip
    return found


def nemo_stacks(data: Path) -> list[Stack]:
    """NeMo-RL v0.3, LLaMA-3.1-8B on 8 H100: log-probs of policy and reference together."""
    dtensor = TrainStrategy(
        dp=8, zero_stage=3, micro_batch_tokens=4096, log_prob_micro_batch_tokens=8192, attention="flash_attention_2"
    )
    megatron = TrainStrategy(
        dp=4, pp=2, zero_stage=1, micro_batch_tokens=4096, log_prob_micro_batch_tokens=16384, recompute="none",
        logits="fp32",
    )  # fmt: skip
    table, found = pd.read_csv(data / "rl_timings/rl_steps_async.csv").set_index("id"), []
    for number, strategy in ((49, megatron), (50, megatron), (51, dtensor), (52, dtensor)):
        row = table.loc[number]
        batch = lengths(NEMO_BATCH, PROMPTS["nemo"], row.mean_response, NEMO_CAP - PROMPTS["nemo"], SPREADS["math"])
        found.append(Stack(f"NeMo-RL row {number}: {row.train_backend}", f"NeMo-RL {row.train_backend}", "llama-3.1-8b",
                           load_cluster("8xh100"), strategy, batch, NEMO_CAP, 4, row.old_logprob_s, row.update_actor_s,
                           passes=2, update_fits=strategy is megatron))  # fmt: skip
    return found


def h20_stacks(data: Path) -> list[Stack]:
    """veRL on H20: rows 10 to 12 and 28 with FSDP2 (HSDP, Ulysses 4), 29 with Megatron; layouts of their scripts."""
    table, found = pd.read_csv(data / "rl_timings/verl_steps.csv").set_index("id"), []
    megatron = TrainStrategy(
        dp=4, tp=2, pp=2, zero_stage=1, micro_batch_sequences=2, sequence_parallel=True, recompute="none",
        logits="fp32", offload=True,
    )  # fmt: skip
    for number, responses, shard in ((10, 16, 8), (11, 16, 8), (12, 16, 8), (28, 12, 2), (29, 16, 0)):
        row = table.loc[number]
        gpus, cap, count = int(row.n_gpus), int(row.max_response), 512 * responses
        fsdp = TrainStrategy(dp=gpus // 4, cp=4, zero_stage=3, shard_gpus=shard or None, offload=True,
                             micro_batch_tokens=8 * (cap + 2048), attention="flash_attention_2")  # fmt: skip
        cluster = load_cluster(f"{gpus // 8}x8xh20")
        batch = lengths(count, PROMPTS["verl"], H20_RESPONSE, cap, SPREADS["dapo"])
        strategy, times = fsdp if shard else megatron, (row.old_logprob_s, row.update_actor_s)
        label = f"veRL row {number}: {gpus} H20"
        found.append(Stack(label, f"row {number}", "qwen2.5-7b", cluster, strategy, batch, cap, 16, *times))
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
    nemo = [_Curve(row, shares) for row in nemo_stacks(data)]
    fits = {bus: _traffic([*_verl(data, bus, shares), *nemo]) for bus in BUSES}
    bus = min(BUSES, key=lambda bus: fits[bus][0])
    traffic, curves = fits[bus][1], [*_verl(data, bus, shares), *nemo]
    cases = [_case("all of these rows", traffic, 0.0, curves, shares)]
    for group in dict.fromkeys(curve.row.group for curve in curves):
        seen = _traffic([curve for curve in curves if curve.row.group != group])[1]
        left_out = [curve for curve in curves if curve.row.group == group]
        cases.append(_case(f"without {group}", seen, 0.0, left_out, shares))
    nvlink = [*_verl(data, NVLINK["a100-sxm-80gb"], shares), *nemo]
    cases.append(_case("veRL's machine with NVLink", _traffic(nvlink)[1], 0.0, nvlink, shares))
    cases.append(_case("never fitted", traffic, 0.0, [_Curve(verl_stacks(data, bus)[4], shares)], shares))
    h20 = [_Curve(row, shares) for row in h20_stacks(data)]
    driver_s = _driver(h20, traffic)
    cases.append(_case("driver, all of these rows", traffic, driver_s, h20, shares))
    for curve in h20:
        seen = _driver([other for other in h20 if other is not curve], traffic)
        cases.append(_case(f"driver, without {curve.row.group}", traffic, seen, [curve], shares))
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


def _verl(data: Path, bus: float, shares: dict[str, float]) -> list[_Curve]:
    return [_Curve(row, shares) for number, row in verl_stacks(data, bus).items() if number != 4]


def _traffic(curves: Sequence[_Curve]) -> tuple[float, float]:
    """Sum of squared log errors and the traffic at which it is least; every row counts alike."""

    def loss(traffic: float) -> float:
        errors = [curve.log_errors(traffic)[: 2 if curve.row.update_fits else 1] for curve in curves]
        return float(sum((error**2).mean() for error in errors))

    best = minimize_scalar(loss, bounds=(0.0, 0.006), method="bounded", options={"xatol": 1e-6})
    return float(best.fun), float(best.x)


def _driver(curves: Sequence[_Curve], traffic: float) -> float:
    """The driver's seconds per padded token with the least squared log errors of both phases."""

    def loss(driver_s: float) -> float:
        return float(sum((curve.log_errors(traffic, driver_s) ** 2).sum() for curve in curves))

    return float(minimize_scalar(loss, bounds=(0.0, 2e-6), method="bounded", options={"xatol": 1e-10}).x)


def _case(title: str, traffic: float, driver_s: float, curves: Iterable[_Curve], shares: dict[str, float]) -> Case:
    rows = [curve.row for curve in curves]
    return Case(title, traffic, driver_s, tuple((row, *row.timings(shares, traffic, driver_s)) for row in rows))

"""Real rollouts against their simulation: the same responses, the same engine, times from shapes measured apart.

One call does everything: it measures steps of a small decoder at a grid of shapes, makes a step profile of them, lets
the decoder generate responses under three layouts, simulates the three with rlsim's own engine, and compares. Nothing
that is predicted is fitted to the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from scipy.optimize import minimize_scalar, nnls

from rlsim.cost.calibration import DecodeProfile, RuntimeFit
from rlsim.cost.profile import ProfileStep
from rlsim.cost.transfer import SwitchCost, kv_rank_bytes, kv_send_s
from rlsim.errors import CalibrationError
from rlsim.hardware import Link
from rlsim.models import Model
from rlsim.sim.control import Reconfigure, RolloutControl, RolloutView
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout
from rlsim.trace.files import read_trace
from rlsim.validate.rows import Row

PART = "rollout"
TRACE = "deepscaler-llama-3.1-8b"
PAGE_TOKENS = 16
MAKESPAN_BOUND, STEP_BOUND = 0.07, 0.10  # what the simulation is held to
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # unfinished responses; each row up to the next
FEWEST_STEPS = 3  # with one number of unfinished responses, for its throughput to count

#: Decodes in milliseconds on one core; weights, batch, context and TP all matter.
SMALL = Model(
    name="rollout-llama",
    model_type="llama",
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=2048,
    dtype_bytes=4,
)


@dataclass(frozen=True)
class Effort:
    """How much is measured: `rounds` of the grid with a run of every case after each, and the grid once more.

    A run in which others used our cores is made again, `again` times at the most in a round.
    """

    rounds: int = 4
    again: int = 2
    steps: int = 10  # of every decode shape in a round
    prefills: int = 2
    longest: int = 512  # response
    batches: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
    contexts: tuple[int, ...] = (24, 200, 620)
    prompts: tuple[int, int] = (8, 96)  # shortest and longest
    prefill_tokens: tuple[int, ...] = (96, 256, 512)
    prefill_lengths: tuple[int, ...] = (24, 96)

    def slots(self, sequences: int) -> int:
        """Sequences that a worker must have room for at TP 1."""
        return max(math.ceil(sequences / 2), math.ceil(self.prefill_tokens[-1] / self.prefill_lengths[0]))


QUICK = Effort(
    rounds=1,
    again=0,
    steps=4,
    prefills=1,
    longest=64,
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(8, 100),
    prompts=(4, 24),
    prefill_tokens=(64, 128),
    prefill_lengths=(8, 24),
)


@dataclass(frozen=True)
class Case:
    """One layout: from `tp`, at `switch_at` unfinished responses to `switch_to`, if that is not 0."""

    name: str
    tp: int
    switch_to: int = 0
    switch_at: int = 0


# ---- what is generated -----------------------------------------------------------------------------------------------


def draw_lengths(sequences: int, seed: int, effort: Effort) -> list[tuple[int, int]]:
    """(prompt, response) tokens of so many responses of the shipped trace, scaled to the longest that is wanted.

    Prompts are a quarter as long as in the trace, within the bounds of `effort`.
    """
    from rlsim import catalogue

    path = catalogue.names("traces")[TRACE].with_suffix(".parquet")
    frame = read_trace(Path(path)).frame
    rows = frame.iloc[np.random.default_rng(seed).choice(len(frame), sequences, replace=False)]
    response = rows.response_tokens.to_numpy(float)
    low, high = effort.prompts
    prompts = np.clip(rows.prompt_tokens.to_numpy(float) // 4, low, high).astype(int)
    lengths = np.maximum(np.ceil(response * effort.longest / response.max()), 2).astype(int)
    return list(zip(prompts.tolist(), lengths.tolist(), strict=True))


# ---- what is measured apart from the runs ----------------------------------------------------------------------------


@dataclass
class Samples:
    """Seconds of every repeat, by shape: (tp, contexts), (tp, prompt lengths), contexts of a switch from TP 1 to 2."""

    decode: dict[tuple[int, tuple[int, ...]], list[float]] = field(default_factory=dict)
    prefill: dict[tuple[int, tuple[int, ...]], list[float]] = field(default_factory=dict)
    switch: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    total: int = 0
    disturbed: int = 0  # repeats during which something else ran on our cores: kept only if a shape has no others
    _calm: set[Any] = field(default_factory=set)

    def keep(self, table: dict[Any, list[float]], shape: Any, laps: Sequence[Sequence[Any]], *, together: bool) -> None:
        """Add what every worker timed; where workers wait for each other, a step is disturbed if any of them was."""
        steps = list(zip(*laps, strict=True)) if together else [(lap,) for own in laps for lap in own]
        calm = [step for step in steps if not any(lap.disturbed for lap in step)]
        self.total += len(steps)
        self.disturbed += len(steps) - len(calm)
        if calm and (id(table), shape) not in self._calm:
            self._calm.add((id(table), shape))
            table[shape] = []
        if calm or (id(table), shape) not in self._calm:
            table.setdefault(shape, []).extend(max(lap.seconds for lap in step) for step in calm or steps)

    def spread(self) -> float:
        """The median over decode shapes of half the interquartile range of the repeats over their median."""
        found = [np.quantile(times, (0.25, 0.5, 0.75)) for times in self.decode.values()]
        return float(np.median([(high - low) / 2 / middle for low, middle, high in found]))


def shapes(sequences: int, effort: Effort) -> tuple[list[Any], list[Any], list[Any]]:
    """The shapes to measure: decode steps (equal contexts, then unequal ones), prefills, switches."""
    decode = []
    low, high = effort.contexts[0], effort.contexts[-1]
    for tp in (1, 2):
        most = math.ceil(sequences * tp / 2)
        inner = [batch for batch in effort.batches if batch < most]
        for batch in [*inner, most]:
            decode += [(tp, (context,) * batch) for context in effort.contexts]
        for batch in sorted({min(most, 4), min(most, 8), most}):  # one straggler; half of them long
            decode.append((tp, (low,) * (batch - 1) + (high,)))
            decode.append((tp, (low,) * (batch - batch // 2) + ((low + high) // 2,) * (batch // 2)))
    prefill = [
        (tp, (length,) * (tokens // length) + ((tokens % length,) if tokens % length else ()))
        for tp in (1, 2)
        for tokens in effort.prefill_tokens
        for length in effort.prefill_lengths
    ]
    switch = [(context,) * count for count in (2, max(sequences // 2, 2)) for context in effort.contexts[1:]]
    return decode, prefill, switch


def measure_round(workers: Any, samples: Samples, sequences: int, effort: Effort, seed: int) -> None:
    """Every shape once more, in an order of its own: what drifts on the machine hits all shapes alike."""
    from rlsim.validate import real_run

    decode, prefill, switch = shapes(sequences, effort)
    todo = [("decode", shape) for shape in decode] + [("prefill", shape) for shape in prefill]
    todo += [("switch", shape) for shape in switch]
    for index in np.random.default_rng(seed).permutation(len(todo)):
        kind, shape = todo[index]
        if kind == "decode":
            laps = workers.call(real_run.decode_times, *shape, effort.steps)
            samples.keep(samples.decode, shape, laps, together=shape[0] > 1)
        elif kind == "prefill":
            laps = workers.call(real_run.prefill_times, *shape, effort.prefills)
            samples.keep(samples.prefill, shape, laps, together=shape[0] > 1)
        else:
            laps = workers.call(real_run.switch_times, 1, 2, shape, effort.steps)
            samples.keep(samples.switch, shape, laps, together=True)


@dataclass(frozen=True)
class Fitted:
    """The calibration: a profile for each TP, what a switch costs, and the share of padding that is paid for."""

    model: Model
    profiles: Mapping[int, DecodeProfile]
    runtime: RuntimeFit
    skew: float


def fit(model: Model, samples: Samples, effort: Effort) -> Fitted:
    """Medians of the repeats as profiles; the skew and the switch by least squares of relative errors."""
    profiles = {tp: _profile(model, tp, samples, effort) for tp in (1, 2)}
    steps = {tp: ProfileStep.from_record(profile) for tp, profile in profiles.items()}
    unequal = [(tp, contexts, _median(t)) for (tp, contexts), t in samples.decode.items() if len(set(contexts)) > 1]

    def loss(skew: float) -> float:
        return sum((_step_s(steps[tp], skew, contexts) / seconds - 1.0) ** 2 for tp, contexts, seconds in unequal)

    skew = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    seconds = np.array([_median(times) for times in samples.switch.values()])
    moved = np.array([kv_rank_bytes(model, sum(contexts), 1) for contexts in samples.switch])
    design = np.stack([np.ones(len(moved)), moved / 1e9], axis=1) / seconds[:, None]
    control_s, per_gigabyte = nnls(design, np.ones(len(moved)))[0]
    runtime = RuntimeFit(
        graph_capture_s=0.0,
        graph_batch_sizes=(),
        switch_control_s=float(control_s),
        group_create_s=0.0,
        migrate_bytes_per_s=1e9 / max(float(per_gigabyte), 1e-6),
        source=f"{len(moved)} switches from TP 1 to 2, slicing of the weights in the control's time; groups exist",
    )
    return Fitted(model, profiles, runtime, skew)


def _profile(model: Model, tp: int, samples: Samples, effort: Effort) -> DecodeProfile:
    equal = {
        (len(contexts), contexts[0]): _median(times)
        for (degree, contexts), times in samples.decode.items()
        if degree == tp and len(set(contexts)) == 1
    }
    batches = sorted({batch for batch, _ in equal})
    prefills = {
        (sum(lengths), lengths[0]): _median(times)
        for (degree, lengths), times in samples.prefill.items()
        if degree == tp
    }
    return DecodeProfile(
        model=model.name,
        tp=tp,
        batches=tuple(batches),
        context_tokens=tuple(tuple(float(b * c) for c in effort.contexts) for b in batches),
        step_s=tuple(tuple(equal[b, c] for c in effort.contexts) for b in batches),
        prefill_tokens=tuple(float(t) for t in effort.prefill_tokens),
        prefill_lengths=tuple(float(length) for length in effort.prefill_lengths),
        prefill_s=tuple(tuple(prefills[t, length] for length in effort.prefill_lengths) for t in effort.prefill_tokens),
    )


def _median(times: Sequence[float]) -> float:
    return float(np.median(times))


def _step_s(step: ProfileStep, skew: float, contexts: Sequence[int]) -> float:
    return _read(step, skew, len(contexts), sum(contexts), max(contexts))


def _read(step: ProfileStep, skew: float, batch: int, context_tokens: float, longest: float) -> float:
    """A decode step as the engine reads it: at the contexts' sum and the share of the padding that is paid for."""
    return step.decode(batch).step_s(context_tokens + skew * (batch * longest - context_tokens))


# ---- the simulation --------------------------------------------------------------------------------------------------


class MeasuredCosts:
    """`RolloutCosts` of a node of two processes, from what was measured on them."""

    def __init__(self, fitted: Fitted, capacity_tokens: int) -> None:
        self.fitted = fitted
        self._pages = capacity_tokens // PAGE_TOKENS
        self._steps = {tp: ProfileStep.from_record(p, skew=fitted.skew) for tp, p in fitted.profiles.items()}

    def step(self, tp: int) -> ProfileStep:
        """The profile at this TP."""
        return self._steps[tp]

    def capacity_pages(self, tp: int) -> int:
        """The pool has as many more slots as ranks share a replica."""
        return self._pages * tp

    def switch(
        self,
        from_tp: int,
        to_tp: int,  # noqa: ARG002 - measured from 1 to 2 only
        contexts: Sequence[int],
        sequences: int,  # noqa: ARG002
        kv: str,  # noqa: ARG002
        first_use: bool,  # noqa: ARG002
    ) -> SwitchCost:
        """Control, slicing of the weights included, and the KV at the measured rate; there are no graphs."""
        runtime = self.fitted.runtime
        assert runtime.migrate_bytes_per_s is not None
        moved = kv_rank_bytes(self.fitted.model, sum(contexts), from_tp)
        return SwitchCost(0.0, moved / runtime.migrate_bytes_per_s, 0.0, runtime.switch_control_s)

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:  # noqa: ARG002
        """As a switch moves KV."""
        link = Link(name="processes", bytes_per_s=self.fitted.runtime.migrate_bytes_per_s or math.inf, latency_s=0.0)
        return kv_send_s(self.fitted.model, link, float(sum(contexts)), min(from_tp, to_tp))


class SwitchAt(RolloutControl):
    """Changes the layout once, when `remaining` responses or fewer are unfinished."""

    def __init__(self, remaining: int, tp: int) -> None:
        self._remaining, self._tp = remaining, tp

    def on_finish(self, view: RolloutView) -> Reconfigure | None:
        """At the first moment with few enough left."""
        if view.nodes and view.unfinished() <= self._remaining and view.tp(0) != self._tp:
            return Reconfigure(0, self._tp)
        return None


@dataclass(frozen=True)
class Simulated:
    """What rlsim says of a run, in seconds."""

    makespan_s: float
    finished_s: Mapping[int, float]
    pause_s: float
    prefill_s: float  # of all replicas


def simulate(case: Case, lengths: Sequence[tuple[int, int]], costs: MeasuredCosts, budget_tokens: int) -> Simulated:
    """The run of `case` by rlsim's engine: one node of two GPUs."""
    env = simpy.Environment()
    requests = [Request(i, i, prompt, response) for i, (prompt, response) in enumerate(lengths)]
    recorder = Recorder()
    rollout = Rollout(
        env,
        mesh=[(0, 1)],
        tp=case.tp,
        requests=requests,
        costs=costs,
        config=EngineConfig(page_tokens=PAGE_TOKENS, max_num_batched_tokens=budget_tokens, watermark=0.0),
        control=SwitchAt(case.switch_at, case.switch_to) if case.switch_to else RolloutControl(),
        cap_tokens=max(response for _, response in lengths),
        recorder=recorder,
        used_tps={0: {1, 2}},
    )
    env.run(rollout.done)
    rollout.close()
    return Simulated(
        makespan_s=float(env.now),
        finished_s={request.id: request.finished_at for request in requests},
        pause_s=sum(switch[4].total_s for switch in rollout.switches),
        prefill_s=sum(span.end_at - span.start_at for span in recorder.spans if span.kind == "prefill"),
    )


# ---- the comparison --------------------------------------------------------------------------------------------------


def validate_rollouts(
    *,
    device: str = "cpu",
    sequences: int = 48,
    seed: int = 1,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Calibrate on two processes of `device`, generate `sequences` responses for real in three cases, and compare.

    The cases are two replicas of TP 1, one of TP 2, and a switch from the first to the second when a third of the
    responses is left. Of the runs during which nothing else used our cores, the one with the median makespan is
    compared; if there is none, or they differ by more than the bound, the remark says that it is inconclusive. Errors
    as rows of their own (`..._error`) are ratios: 1 plus the mean or median of |error|, against 1. `quick` makes
    everything small.
    Raises `CalibrationError` without PyTorch, or on "cuda" without two GPUs.
    """
    from rlsim.calibrate.measure.workers import Workers

    try:
        from rlsim.validate import real_run
    except ImportError:
        raise CalibrationError("a real rollout needs PyTorch: pip install 'rlsim[gpu]'") from None
    if sequences < 8:
        raise CalibrationError(f"{sequences} sequences are too few to drain; expected at least 8")
    say = progress or (lambda _: None)
    effort = QUICK if quick else Effort()
    lengths = draw_lengths(sequences, seed, effort)
    asks = tuple(real_run.Ask(i, *tokens) for i, tokens in enumerate(lengths))
    budget = effort.prefill_tokens[-1]
    cases = (Case("tp1", 1), Case("tp2", 2), Case("switch", 1, 2, sequences // 3))
    slots = effort.slots(sequences)
    room = max(*effort.contexts, effort.longest + effort.prompts[1]) + PAGE_TOKENS
    samples = Samples()
    runs: dict[str, list[Any]] = {case.name: [] for case in cases}
    with Workers(2, device=device) as workers:
        say("building the decoder")
        dtype, element = ("float32", 4) if device == "cpu" else ("bfloat16", 2)
        model = SMALL.model_copy(update={"dtype_bytes": element, **({"num_hidden_layers": 2} if quick else {})})
        workers.call(real_run.prepare, real_run.Stage(model, slots, room, dtype), (1, 2))
        for number in range(effort.rounds):
            say(f"measuring steps, round {number + 1} of {effort.rounds + 1}")
            measure_round(workers, samples, sequences, effort, number)
            for case in cases:
                say(f"generating, round {number + 1} of {effort.rounds}: {case.name}")
                plan = real_run.Plan(asks, case.tp, budget, case.switch_to, case.switch_at)
                for _ in range(effort.again + 1):
                    runs[case.name].append(real_run.carry_out(workers, plan))
                    if not runs[case.name][-1].disturbed:
                        break
        say(f"measuring steps, round {effort.rounds + 1} of {effort.rounds + 1}")
        measure_round(workers, samples, sequences, effort, effort.rounds)
    fitted = fit(model, samples, effort)
    rows: list[Row] = []
    for case in cases:
        costs = MeasuredCosts(fitted, slots * room)
        rows += compare(
            f"{device}/{case.name}", runs[case.name], simulate(case, lengths, costs, budget), costs, samples
        )
    return rows


def compare(
    case: str, runs: Sequence[Any], simulated: Simulated, costs: MeasuredCosts, samples: Samples
) -> Iterator[Row]:
    """The rows of one case: the run with the median makespan against the simulation."""
    calm = [run for run in runs if not run.disturbed]
    ordered = sorted(calm or runs, key=lambda run: run.makespan_s)
    run = ordered[len(ordered) // 2]
    apart = ordered[-1].makespan_s / ordered[0].makespan_s - 1.0
    spread = samples.spread()
    remark = (
        f"{len(ordered)} runs, {apart:.1%} apart; repeats of a step {spread:.1%}; others used our cores in "
        f"{len(runs) - len(calm)} of {len(runs)} runs and {samples.disturbed / samples.total:.0%} of the steps measured"
    )
    if not calm or apart > MAKESPAN_BOUND or spread > STEP_BOUND:
        remark = f"inconclusive, the machine was too noisy: {remark}"

    def row(quantity: str, reference: float, value: float, note: str = "") -> Row:
        return Row(PART, case, quantity, "output", reference, value, note)

    yield row("makespan_s", run.makespan_s, simulated.makespan_s, remark)
    yield row("prefill_s", _sum(i.seconds for i in run.iterations if i.kind == "prefill"), simulated.prefill_s)
    if run.pause_s:
        yield row("switch_s", run.pause_s, simulated.pause_s)
    moments = np.array([[moment, simulated.finished_s[i]] for i, moment in run.finished_s.items()])
    yield row("finish_s", float(moments[:, 0].mean()), float(moments[:, 1].mean()), "mean over the responses")
    yield _error_row(row, "finish_median_error", np.median, moments[:, 1] / moments[:, 0], "responses")

    steps = [i for i in run.iterations if i.kind == "decode"]
    predicted = np.array(
        [_read(costs.step(i.tp), costs.fitted.skew, i.batch, i.context_tokens, i.longest) for i in steps]
    )
    measured = np.array([i.seconds for i in steps])
    seen = {(tp, len(c), sum(c), max(c)) for tp, c in samples.decode}
    common = sum((i.tp, i.batch, i.context_tokens, i.longest) in seen for i in steps)
    what = f"decode steps, {common} of them of a calibrated shape"
    yield _error_row(row, "step_median_error", np.median, predicted / measured, what)
    left = np.array([i.remaining for i in steps])
    for low, high in itertools.pairwise(BUCKETS):
        here = (left >= low) & (left < high)
        if here.any():
            note = f"{_range(low, high)} left, median of {here.sum()}"
            yield row("step_s", float(np.median(measured[here])), float(np.median(predicted[here])), note)
    rates = _throughput(steps, measured, predicted)
    for low, high in itertools.pairwise(BUCKETS):
        inside = np.array([pair for number, pair in rates.items() if low <= number < high])
        if len(inside):
            note = f"{_range(low, high)} left"
            yield row("throughput_tokens_per_s", float(inside[:, 0].mean()), float(inside[:, 1].mean()), note)
    pairs = np.array(list(rates.values()))
    yield _error_row(row, "throughput_mean_error", np.mean, pairs[:, 1] / pairs[:, 0], "numbers of responses left")


def _throughput(steps: Sequence[Any], measured: Any, predicted: Any) -> dict[int, tuple[float, float]]:
    """By the number of unfinished responses: tokens per second of all replicas together, measured and predicted.

    Numbers at which a replica made few steps are left out.
    """
    sums: dict[int, dict[int, list[float]]] = {}
    for i, own, model in zip(steps, measured, predicted, strict=True):
        of_replica = sums.setdefault(i.remaining, {}).setdefault(i.replica, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((i.batch, own, model, 1.0)):
            of_replica[place] += value
    return {
        left: (sum(s[0] / s[1] for s in replicas.values()), sum(s[0] / s[2] for s in replicas.values()))
        for left, replicas in sorted(sums.items())
        if min(s[3] for s in replicas.values()) >= FEWEST_STEPS
    }


def _error_row(row: Callable[..., Row], name: str, middle: Any, ratios: Any, what: str) -> Row:
    """1 plus the mean or median of |error|, so that the row's own error is that figure."""
    return row(name, 1.0, 1.0 + float(middle(np.abs(ratios - 1.0))), f"of {len(ratios)} {what}")


def _range(low: int, high: int) -> str:
    return str(low) if high == low + 1 else f"{low} to {high - 1}"


def _sum(values: Iterable[float]) -> float:
    return float(sum(values))

"""Part `rollout`: real rollouts against their simulation, the same responses, the same engine.

One call does everything: it measures steps of a small decoder at a grid of shapes, makes a step profile of them, lets
the decoder generate responses under three layouts, simulates the three with rlsim's own engine, and compares. Nothing
that is predicted is fitted to the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd

from evidence.validate.parts import Options, Section
from evidence.validate.rollout_steps import (
    PAGE_TOKENS,
    QUICK,
    SMALL,
    Effort,
    MeasuredCosts,
    Plan,
    Samples,
    draw_asks,
    fit,
    shapes,
    step_s,
)
from evidence.validate.rows import Row, summarise
from rlsim.errors import CalibrationError
from rlsim.sim.actions import Reconfigure
from rlsim.sim.control import RolloutControl, RolloutView
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage

PART = "rollout"
MAKESPAN_BOUND, STEP_BOUND = 0.07, 0.10  # what the simulation is held to
FEWEST_STEPS = 3  # with one number of unfinished responses, for its throughput to count
INCONCLUSIVE = "inconclusive, the machine was too noisy"


def section(options: Options) -> Section | str:
    """Calibrate, generate for real, simulate and compare."""
    if find_spec("torch") is None:
        return "a real rollout needs PyTorch: pip install 'rlsim[gpu]'"
    rows = tuple(validate_rollouts(device=options.device, quick=options.quick, progress=options.progress))
    noisy = {row.case for row in rows if row.note.startswith(INCONCLUSIVE)}
    # Bounds are for full size and a calm machine.
    summaries = () if options.quick else tuple(s for s in summarise(rows, depth=2) if s.group not in noisy)
    return Section(rows, summaries, {"machine": f"Machine: {_machine(options.device)}."}, "measured")


def _machine(device: str) -> str:
    from importlib.metadata import version

    from rlsim.calibrate.measure.host import cpu_name

    what = f"two cores of {cpu_name()}" if device == "cpu" else "two GPUs"
    return f"{what}, PyTorch {version('torch')}"


def validate_rollouts(
    *,
    device: str = "cpu",
    sequences: int = 48,
    seed: int = 1,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Calibrate on two processes of `device`, generate `sequences` responses for real in three cases, and compare.

    The cases are two replicas of TP 1, one of TP 2, and a switch from the first to the second when a third of the
    responses is left. Runs during which others used our cores do not count. Makespan and finishes are those of the run
    with the median makespan, steps and throughput of all runs; if no run counts, or their median is less sure than the
    bound, the remark says that it is inconclusive. Errors as rows of their own (`..._error`) are ratios:
    1 plus the mean or median of |error|, against 1. `quick` makes everything small.
    Raises `CalibrationError` on "cuda" without two GPUs.
    """
    from evidence.validate import real_run
    from rlsim.calibrate.measure.workers import Workers

    if sequences < 8:
        raise CalibrationError(f"{sequences} sequences are too few to drain; expected at least 8")
    effort = QUICK if quick else Effort()
    asks, budget = draw_asks(sequences, seed, effort), effort.prefill_tokens[-1]
    plans = {
        "tp1": Plan(asks, 1, budget),
        "tp2": Plan(asks, 2, budget),
        "switch": Plan(asks, 1, budget, switch_to=2, switch_at=sequences // 3),
    }
    dtype, element = ("float32", 4) if device == "cpu" else ("bfloat16", 2)
    model = SMALL.model_copy(update={"dtype_bytes": element, **({"num_hidden_layers": 2} if quick else {})})
    room, slots = max(*effort.contexts, effort.longest + effort.prompts[1]) + PAGE_TOKENS, effort.slots(sequences)
    with Workers(2, device=device) as workers:
        progress("building the decoder")
        workers.call(real_run.prepare, model, slots, room, dtype, (1, 2))
        samples, runs = _measured(workers, plans, effort, progress)
    costs = fit(model, samples, effort, slots * room)
    cases = plans.items()
    return [row for name, plan in cases for row in compare(f"{device}/{name}", plan, runs[name], costs, samples)]


def _measured(
    workers: Any, plans: Mapping[str, Plan], effort: Effort, progress: Callable[[str], None]
) -> tuple[Samples, dict[str, list[Any]]]:
    """Steps of every shape, and every case's runs between them, in rounds."""
    from evidence.validate import real_run

    samples, runs = Samples(), dict[str, list[Any]]((name, []) for name in plans)
    todo, turns = shapes(len(plans["tp1"].asks), effort), [*plans] * effort.runs
    for number in range(effort.rounds):
        progress(f"measuring steps and generating, round {number + 1} of {effort.rounds}")
        order = np.random.default_rng(number).permutation(len(todo))
        for some, name in itertools.zip_longest(np.array_split(order, len(turns) + 1), turns):
            for kind, shape in (todo[index] for index in some):
                laps = workers.call(real_run.times, kind, shape, effort.repeats[kind])
                samples.keep(kind, shape, laps, together=kind == "switch" or shape[0] > 1)
            if name is not None:
                runs[name].append(real_run.carry_out(workers, plans[name]))
    return samples, runs


class SwitchAt(RolloutControl):
    """Changes the layout once, when `remaining` responses or fewer are unfinished."""

    def __init__(self, remaining: int, tp: int) -> None:
        self._remaining, self._tp = remaining, tp

    def on_finish(self, view: RolloutView) -> Reconfigure | None:
        if view.nodes and view.unfinished() <= self._remaining and view.tp(0) != self._tp:
            return Reconfigure(0, self._tp)
        return None


def simulate(plan: Plan, costs: MeasuredCosts) -> tuple[dict[str, float], dict[int, float]]:
    """A run by rlsim's engine, one node of two GPUs: seconds by quantity, and when each response finishes."""
    recorder = Recorder()
    requests = [Request(ask.id, *ask) for ask in plan.asks]
    rollout = run_rollout(
        GenerationStage(
            requests=requests,
            mesh=[(0, 1)],
            tp=plan.tp,
            costs=costs,
            config=EngineConfig(page_tokens=PAGE_TOKENS, max_num_batched_tokens=plan.budget_tokens, watermark=0.0),
            control=SwitchAt(plan.switch_at, plan.switch_to) if plan.switch_to else RolloutControl(),
            cap_tokens=max(ask.response_tokens for ask in plan.asks),
            recorder=recorder,
            used_tps={0: {1, 2}},
        )
    )
    found = {
        "makespan_s": float(rollout.env.now),
        "prefill_s": sum(span.end_at - span.start_at for span in recorder.spans if span.kind == "prefill"),
        "switch_s": sum(switch[4].total_s for switch in rollout.switches),
    }
    return found, {request.id: request.finished_at for request in requests}


def compare(case: str, plan: Plan, runs: Sequence[Any], costs: MeasuredCosts, samples: Samples) -> Iterator[Row]:
    """The rows of one case: the run with the median makespan against the simulation, and the steps of all runs."""
    calm = [run for run in runs if not run.disturbed]
    ordered = sorted(calm or runs, key=lambda run: run.makespan_s)
    run = ordered[len(ordered) // 2]
    # Half the 95% interval of the median over it, from the middle half of the makespans (normal in the middle).
    low, middle, high = np.quantile([one.makespan_s for one in ordered], (0.25, 0.5, 0.75))
    unsure = 1.96 * math.sqrt(math.pi / 2) * (high - low) / 1.349 / math.sqrt(len(ordered)) / middle
    spread = samples.spread()
    remark = (
        f"median of {len(ordered)} runs ±{unsure:.1%}; repeats of a step {spread:.1%}; others used our cores in "
        f"{len(runs) - len(calm)} of {len(runs)} runs and {samples.disturbed:.0%} of the measured steps"
    )
    if not calm or unsure > MAKESPAN_BOUND or spread > STEP_BOUND:
        remark = f"{INCONCLUSIVE}: {remark}"
    simulated, finished_s = simulate(plan, costs)
    prefill_s = float(sum(i.seconds for i in run.iterations if i.kind == "prefill"))
    measured = {"makespan_s": run.makespan_s, "prefill_s": prefill_s, "switch_s": run.pause_s}
    for name, seconds in measured.items():
        if seconds:
            yield Row(PART, case, name, seconds, simulated[name], remark if name == "makespan_s" else "")
    moments, found = np.array([[moment, finished_s[i]] for i, moment in run.finished_s.items()]).T
    yield Row(PART, case, "finish_s", float(moments.mean()), float(found.mean()), "mean over the responses")
    yield _error_row(case, "finish_median_error", np.median, found / moments, "responses")
    yield from _compare_steps(
        case, [i for one in ordered for i in one.iterations if i.kind == "decode"], costs, samples
    )


def _compare_steps(case: str, steps: Sequence[Any], costs: MeasuredCosts, samples: Samples) -> Iterator[Row]:
    """Rows on decode steps: their errors, and step time and throughput by the number of unfinished responses."""
    frame = pd.DataFrame(steps)
    frame["predicted"] = [step_s(costs.step(i.tp), costs.skew, i.batch, i.context_tokens, i.longest) for i in steps]
    seen = {(tp, len(c), sum(c), max(c)) for tp, c in samples.seconds("decode")}
    common = sum((i.tp, i.batch, i.context_tokens, i.longest) in seen for i in steps)
    what = f"decode steps, {common} of them of a calibrated shape"
    yield _error_row(case, "step_median_error", np.median, frame.predicted / frame.seconds, what)
    for left, own in frame.groupby(np.log2(frame.remaining).astype(int)):
        median = own[["seconds", "predicted"]].median()
        yield Row(PART, case + _left(left), "step_s", median.seconds, median.predicted, f"median of {len(own)}")
    # Tokens per second of all replicas together; numbers of responses at which one made few steps are left out.
    sums = frame.groupby(["remaining", "replica"]).agg({"batch": ["sum", "size"], "seconds": "sum", "predicted": "sum"})
    tokens, made = sums["batch", "sum"], sums["batch", "size"].groupby("remaining").min()
    both = {"measured": tokens / sums["seconds", "sum"], "predicted": tokens / sums["predicted", "sum"]}
    rates = pd.DataFrame(both).groupby("remaining").sum()[made >= FEWEST_STEPS]
    for left, own in rates.groupby(np.log2(rates.index).astype(int)):
        yield Row(PART, case + _left(left), "throughput_tokens_per_s", own.measured.mean(), own.predicted.mean())
    ratios = rates.predicted / rates.measured
    yield _error_row(case, "throughput_mean_error", np.mean, ratios, "numbers of responses left")


def _error_row(case: str, name: str, middle: Any, ratios: Any, what: str) -> Row:
    """1 plus the mean or median of |error|, so that the row's own error is that figure."""
    return Row(PART, case, name, 1.0, 1.0 + float(middle(np.abs(ratios - 1.0))), f"of {len(ratios)} {what}")


def _left(doublings: Any) -> str:
    """The numbers of unfinished responses of a bucket: 1, 2 to 3, 4 to 7, and so on."""
    low = 2**doublings
    return f"/{low} left" if low == 1 else f"/{low} to {2 * low - 1} left"

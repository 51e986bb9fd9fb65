"""Part `rollout`: real rollouts against their simulation, the same responses, the same engine.

One call does everything: it measures steps of a small decoder at a grid of shapes, makes a step profile of them, lets
the decoder generate responses under three layouts, simulates the three with rlsim's own engine, and compares. Nothing
that is predicted is fitted to the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd

from evidence.validate.parts import Options, Section, Skipped
from evidence.validate.rollout_simulation import Case, MeasuredCosts, Simulated, simulate
from evidence.validate.rollout_steps import (
    PAGE_TOKENS,
    QUICK,
    SMALL,
    Effort,
    Samples,
    draw_lengths,
    fit,
    measure,
    read_step,
    shapes,
)
from evidence.validate.rows import Row, summarise
from rlsim.errors import CalibrationError

PART = "rollout"
MAKESPAN_BOUND, STEP_BOUND = 0.07, 0.10  # what the simulation is held to
FEWEST_STEPS = 3  # with one number of unfinished responses, for its throughput to count
INCONCLUSIVE = "inconclusive, the machine was too noisy"


def section(options: Options) -> Section | Skipped:
    """Calibrate, generate for real, simulate and compare."""
    if find_spec("torch") is None:
        return Skipped("a real rollout needs PyTorch: pip install 'rlsim[gpu]'")
    rows = tuple(validate_rollouts(device=options.device, quick=options.quick, progress=options.progress))
    noisy = {row.case for row in rows if row.note.startswith(INCONCLUSIVE)}
    # Bounds are for full size and a calm machine.
    summaries = () if options.quick else tuple(s for s in summarise(rows, depth=2) if s.group not in noisy)
    return Section(rows, summaries, {"machine": f"Machine: {_machine(options.device)}."}, "measured")


def _machine(device: str) -> str:
    """What the runs were made on."""
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
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Calibrate on two processes of `device`, generate `sequences` responses for real in three cases, and compare.

    The cases are two replicas of TP 1, one of TP 2, and a switch from the first to the second when a third of the
    responses is left. Runs during which others used our cores do not count. Makespan and finishes are those of the run
    with the median makespan, steps and throughput of all runs; if no run counts, or their median is less sure than the
    bound, the remark says that it is inconclusive. Errors as rows of their own (`..._error`) are ratios:
    1 plus the mean or median of |error|, against 1. `quick` makes everything small.
    Raises `CalibrationError` without PyTorch, or on "cuda" without two GPUs.
    """
    from rlsim.calibrate.measure.workers import Workers

    try:
        from evidence.validate import real_run
    except ImportError:
        raise CalibrationError("a real rollout needs PyTorch: pip install 'rlsim[gpu]'") from None
    if sequences < 8:
        raise CalibrationError(f"{sequences} sequences are too few to drain; expected at least 8")
    say = progress or (lambda _: None)
    effort = QUICK if quick else Effort()
    lengths = draw_lengths(sequences, seed, effort)
    cases = (Case("tp1", 1), Case("tp2", 2), Case("switch", 1, 2, sequences // 3))
    dtype, element = ("float32", 4) if device == "cpu" else ("bfloat16", 2)
    model = SMALL.model_copy(update={"dtype_bytes": element, **({"num_hidden_layers": 2} if quick else {})})
    room = max(*effort.contexts, effort.longest + effort.prompts[1]) + PAGE_TOKENS
    stage = real_run.Stage(model, effort.slots(sequences), room, dtype)
    with Workers(2, device=device) as workers:
        say("building the decoder")
        workers.call(real_run.prepare, stage, (1, 2))
        samples, runs = _measured(workers, cases, lengths, effort, say)
    costs = MeasuredCosts(fit(model, samples, effort), stage.slots * room)
    rows: list[Row] = []
    for case in cases:
        simulated = simulate(case, lengths, costs, effort.prefill_tokens[-1])
        rows += compare(f"{device}/{case.name}", runs[case.name], simulated, costs, samples)
    return rows


def _measured(
    workers: Any, cases: Sequence[Case], lengths: Sequence[tuple[int, int]], effort: Effort, say: Callable[[str], None]
) -> tuple[Samples, dict[str, list[Any]]]:
    """Steps of every shape, and every case's runs between them, in rounds."""
    from evidence.validate import real_run

    asks = tuple(real_run.Ask(i, *tokens) for i, tokens in enumerate(lengths))
    samples = Samples()
    runs: dict[str, list[Any]] = {case.name: [] for case in cases}
    todo = [(kind, shape) for kind, found in shapes(len(lengths), effort).items() for shape in found]
    turns = [case for _ in range(effort.runs) for case in cases]
    for number in range(effort.rounds):
        say(f"measuring steps and generating, round {number + 1} of {effort.rounds}")
        order = np.random.default_rng(number).permutation(len(todo))
        for some, case in itertools.zip_longest(np.array_split(order, len(turns) + 1), turns):
            for kind, shape in (todo[index] for index in some):
                measure(workers, samples, kind, shape, effort)
            if case is not None:
                plan = real_run.Plan(asks, case.tp, effort.prefill_tokens[-1], case.switch_to, case.switch_at)
                runs[case.name] += _calm(partial(real_run.carry_out, workers, plan), effort.again)
    return samples, runs


def _calm(run: Callable[[], Any], again: int) -> list[Any]:
    """Run once, and again while other processes disturbed it (at most `again` times); all runs."""
    made = [run()]
    while made[-1].disturbed and len(made) <= again:
        made.append(run())
    return made


def compare(
    case: str, runs: Sequence[Any], simulated: Simulated, costs: MeasuredCosts, samples: Samples
) -> Iterator[Row]:
    """The rows of one case: the run with the median makespan against the simulation, and the steps of all runs."""
    calm = [run for run in runs if not run.disturbed]
    ordered = sorted(calm or runs, key=lambda run: run.makespan_s)
    run = ordered[len(ordered) // 2]
    unsure = _median_interval([one.makespan_s for one in ordered])
    spread = samples.spread()
    remark = (
        f"median of {len(ordered)} runs ±{unsure:.1%}; repeats of a step {spread:.1%}; others used our cores in "
        f"{len(runs) - len(calm)} of {len(runs)} runs and {samples.disturbed / samples.total:.0%} of the measured steps"
    )
    if not calm or unsure > MAKESPAN_BOUND or spread > STEP_BOUND:
        remark = f"{INCONCLUSIVE}: {remark}"
    yield Row(PART, case, "makespan_s", run.makespan_s, simulated.makespan_s, remark)
    prefill_s = float(sum(i.seconds for i in run.iterations if i.kind == "prefill"))
    yield Row(PART, case, "prefill_s", prefill_s, simulated.prefill_s)
    if run.pause_s:
        yield Row(PART, case, "switch_s", run.pause_s, simulated.pause_s)
    measured, found = np.array([[moment, simulated.finished_s[i]] for i, moment in run.finished_s.items()]).T
    yield Row(PART, case, "finish_s", float(measured.mean()), float(found.mean()), "mean over the responses")
    yield _error_row(case, "finish_median_error", np.median, found / measured, "responses")
    yield from _compare_steps(
        case, [i for one in ordered for i in one.iterations if i.kind == "decode"], costs, samples
    )


def _compare_steps(case: str, steps: Sequence[Any], costs: MeasuredCosts, samples: Samples) -> Iterator[Row]:
    """Rows on decode steps: their errors, and step time and throughput by the number of unfinished responses."""
    skew = costs.fitted.skew
    frame = pd.DataFrame(steps)
    frame["predicted"] = [read_step(costs.step(i.tp), skew, i.batch, i.context_tokens, i.longest) for i in steps]
    seen = {(tp, len(c), sum(c), max(c)) for tp, c in samples.decode}
    common = sum((i.tp, i.batch, i.context_tokens, i.longest) in seen for i in steps)
    what = f"decode steps, {common} of them of a calibrated shape"
    yield _error_row(case, "step_median_error", np.median, frame.predicted / frame.seconds, what)
    for left, own in frame.groupby(_doublings(frame.remaining)):
        middle = own[["seconds", "predicted"]].median()
        yield Row(PART, case + _left(left), "step_s", middle.seconds, middle.predicted, f"median of {len(own)}")
    rates = _throughput(frame)
    for left, own in rates.groupby(_doublings(rates.index)):
        yield Row(PART, case + _left(left), "throughput_tokens_per_s", own.measured.mean(), own.predicted.mean())
    ratios = rates.predicted / rates.measured
    yield _error_row(case, "throughput_mean_error", np.mean, ratios, "numbers of responses left")


def _median_interval(values: Sequence[float]) -> float:
    """Half the 95% interval of the median over it, from the middle half of the values (normal in the middle)."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(1.96 * math.sqrt(math.pi / 2) * (high - low) / 1.349 / math.sqrt(len(values)) / middle)


def _throughput(steps: pd.DataFrame) -> pd.DataFrame:
    """By the number of unfinished responses: tokens per second of all replicas together, measured and predicted.

    Numbers at which a replica made few steps are left out.
    """
    sums = steps.groupby(["remaining", "replica"]).agg({"batch": ["sum", "size"], "seconds": "sum", "predicted": "sum"})
    tokens, made = sums["batch", "sum"], sums["batch", "size"]
    rates = {"measured": tokens / sums["seconds", "sum"], "predicted": tokens / sums["predicted", "sum"]}
    of_all = pd.DataFrame(rates).groupby("remaining").sum()
    return of_all[made.groupby("remaining").min() >= FEWEST_STEPS]


def _error_row(case: str, name: str, middle: Any, ratios: Any, what: str) -> Row:
    """1 plus the mean or median of |error|, so that the row's own error is that figure."""
    return Row(PART, case, name, 1.0, 1.0 + float(middle(np.abs(ratios - 1.0))), f"of {len(ratios)} {what}")


def _doublings(left: Any) -> Any:
    """The bucket of each number of unfinished responses: 1, 2 to 3, 4 to 7, and so on."""
    return np.log2(left).astype(int)


def _left(doublings: Any) -> str:
    low = 2**doublings
    return f"/{low} left" if low == 1 else f"/{low} to {2 * low - 1} left"

"""Real rollouts: what the replicas do is what docs/engine.md says, and the comparison finds what is put into it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rlsim.calibrate.measure.steps import Lap  # noqa: E402
from rlsim.calibrate.measure.workers import Workers  # noqa: E402
from rlsim.cost.transfer import kv_rank_bytes  # noqa: E402
from rlsim.errors import CalibrationError  # noqa: E402
from rlsim.validate import real_run  # noqa: E402
from rlsim.validate.rollout import validate_rollouts  # noqa: E402
from rlsim.validate.rollout_simulation import Case, MeasuredCosts, simulate  # noqa: E402
from rlsim.validate.rollout_steps import QUICK, SMALL, Samples, draw_lengths, fit, shapes  # noqa: E402

TINY = SMALL.model_copy(
    update={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
)
LENGTHS = [(5, 9), (3, 1), (8, 4), (4, 20), (6, 7), (2, 12)]
ASKS = tuple(real_run.Ask(i, *tokens) for i, tokens in enumerate(LENGTHS))
BUDGET = 12


@pytest.fixture(scope="module")
def runs():
    plans = {
        "tp1": real_run.Plan(ASKS, 1, BUDGET),
        "tp2": real_run.Plan(ASKS, 2, BUDGET),
        "switch": real_run.Plan(ASKS, 1, BUDGET, switch_to=2, switch_at=3),
        "back": real_run.Plan(ASKS, 2, BUDGET, switch_to=1, switch_at=3),
        "early": real_run.Plan(ASKS, 1, BUDGET, switch_to=2, switch_at=5),  # while some wait for their prefill
    }
    with Workers(2) as workers:
        workers.call(real_run.prepare, real_run.Stage(TINY, 3, 40, "float32"), (1, 2))
        return {name: real_run.carry_out(workers, plan) for name, plan in plans.items()}


def expected(asks):
    """(kind, batch, context tokens, longest) of every iteration of one replica, told token by token."""
    waiting, running, found = [(p, n) for _, p, n in asks], [], []
    while waiting or running:
        if waiting:
            chunk = [waiting.pop(0)]
            while waiting and sum(p for p, _ in chunk) + waiting[0][0] <= BUDGET:
                chunk.append(waiting.pop(0))
            prompts = [p for p, _ in chunk]
            found.append(("prefill", len(chunk), sum(prompts), max(prompts)))
            running += [(p + 1, n - 1) for p, n in chunk]
        else:
            contexts = [c for c, _ in running]
            found.append(("decode", len(running), sum(contexts), max(contexts)))
            running = [(c + 1, n - 1) for c, n in running]
        running = [(c, n) for c, n in running if n > 0]
    return found


def done(run, replica=0):
    return [(i.kind, i.batch, i.context_tokens, i.longest) for i in run.iterations if i.replica == replica]


def test_static_replicas_iterate_as_the_engine_does(runs):
    assert done(runs["tp2"]) == expected(ASKS)
    assert done(runs["tp1"], 0) == expected(ASKS[:3])
    assert done(runs["tp1"], 1) == expected(ASKS[3:])


def test_every_response_finishes_and_says_the_same_under_every_layout(runs):
    for run in runs.values():
        assert set(run.finished_s) == set(range(len(ASKS)))
        assert run.last_token == runs["tp1"].last_token
        assert run.makespan_s == max(run.finished_s.values())


def test_iterations_follow_one_another_without_gaps(runs):
    for replica in (0, 1):
        own = [i for i in runs["tp1"].iterations if i.replica == replica]
        for before, after in itertools.pairwise(own):
            assert after.start_s == pytest.approx(before.start_s + before.seconds, abs=1e-9)


@pytest.mark.parametrize(("name", "first", "then", "at"), [("switch", 1, 2, 3), ("back", 2, 1, 3), ("early", 1, 2, 5)])
def test_a_switch_happens_when_so_many_are_left(runs, name, first, then, at):
    run = runs[name]
    after = [i for i in run.iterations if i.tp == then]
    assert {i.tp for i in run.iterations} == {first, then}
    assert min(i.remaining for i in run.iterations if i.tp == first) > at
    assert max(i.remaining for i in after) <= at
    assert run.pause_s > 0.0
    assert runs["tp1"].pause_s == 0.0


def test_a_switch_between_replicas_of_several_ranks_is_refused():
    worker = type("Worker", (), {"rank": 0, "size": 4, "state": {"decoders": {}}})()
    with pytest.raises(CalibrationError, match="a switch needs"):
        real_run.rollout(worker, real_run.Plan(ASKS, 2, BUDGET, switch_to=4, switch_at=1))


def truth(tp, contexts, skew=0.7):
    """Step times to find again: linear in the batch and in the tokens, padding included."""
    padded = sum(contexts) + skew * (len(contexts) * max(contexts) - sum(contexts))
    return (1e-3 + 1e-4 * len(contexts) + 1e-6 * padded) / tp


def synthetic(sequences):
    samples = Samples()
    decode, prefill, switch = shapes(sequences, QUICK).values()
    for tp, contexts in decode:
        samples.decode[tp, contexts] = [truth(tp, contexts)] * 3
    for tp, lengths in prefill:
        samples.prefill[tp, lengths] = [2e-5 * sum(lengths) / tp] * 3
    for contexts in switch:
        samples.switch[contexts] = [4e-3 + kv_rank_bytes(TINY, sum(contexts), 1) / 2e9] * 3
    return samples


def test_the_fit_finds_what_made_the_times():
    fitted = fit(TINY, synthetic(12), QUICK)
    assert fitted.skew == pytest.approx(0.7, abs=1e-3)
    assert fitted.runtime.switch_control_s == pytest.approx(4e-3, rel=1e-6)
    assert fitted.runtime.migrate_bytes_per_s == pytest.approx(2e9, rel=1e-6)


def test_the_simulation_adds_up_the_same_steps(runs):
    """With the true times of every iteration, the simulated finish times are their sums along the real iterations."""
    costs = MeasuredCosts(fit(TINY, synthetic(12), QUICK), 6 * 40)
    for name, case in (("tp1", Case("tp1", 1)), ("tp2", Case("tp2", 2))):
        simulated = simulate(case, LENGTHS, costs, BUDGET)
        ends = []
        for replica in {i.replica for i in runs[name].iterations}:
            total = 0.0
            for kind, batch, tokens, longest in done(runs[name], replica):
                if kind == "decode":
                    padded = tokens + costs.fitted.skew * (batch * longest - tokens)
                    total += costs.step(case.tp).decode(batch).step_s(padded)
                else:
                    total += 2e-5 * tokens / case.tp
            ends.append(total)
        assert simulated.makespan_s == pytest.approx(max(ends), rel=0.02)  # prefill is interpolated over lengths
    switched = simulate(Case("switch", 1, 2, 3), LENGTHS, costs, BUDGET)
    assert 4e-3 < switched.pause_s < 5e-3
    assert set(switched.finished_s) == set(range(len(LENGTHS)))


def test_disturbed_repeats_are_left_out_unless_there_are_no_others():
    samples, calm, bad = Samples(), 1.0, 0.5
    samples.keep(samples.decode, "a", [[Lap(9.0, bad)], [Lap(8.0, bad)]], together=False)
    assert samples.decode["a"] == [9.0, 8.0]
    samples.keep(
        samples.decode, "a", [[Lap(1.0, calm), Lap(7.0, bad)], [Lap(2.0, calm), Lap(3.0, calm)]], together=False
    )
    assert samples.decode["a"] == [1.0, 2.0, 3.0]
    samples.keep(
        samples.decode, "b", [[Lap(1.0, calm), Lap(5.0, calm)], [Lap(2.0, bad), Lap(6.0, calm)]], together=True
    )
    assert samples.decode["b"] == [6.0]
    assert (samples.total, samples.disturbed) == (8, 4)


def test_lengths_are_drawn_alike_every_time_and_have_a_long_tail():
    effort = replace(QUICK, longest=512, prompts=(8, 96))
    lengths = draw_lengths(48, 1, effort)
    assert lengths == draw_lengths(48, 1, effort)
    assert lengths != draw_lengths(48, 2, effort)
    prompts, responses = (np.array(x) for x in zip(*lengths, strict=True))
    assert responses.max() == 512
    assert responses.max() > 4 * np.median(responses)
    assert prompts.min() >= 8
    assert prompts.max() <= 96


def test_the_whole_comparison_in_small():
    told = []
    rows = validate_rollouts(sequences=12, quick=True, progress=told.append)
    assert {"/".join(row.case.split("/")[:2]) for row in rows} == {"cpu/tp1", "cpu/tp2", "cpu/switch"}
    for case in ("cpu/tp1", "cpu/tp2", "cpu/switch"):
        own = [row for row in rows if row.case == case or row.case.startswith(f"{case}/")]
        quantities = {row.quantity for row in own}
        assert {"makespan_s", "step_s", "finish_s", "throughput_tokens_per_s", "step_median_error"} <= quantities
        assert ("switch_s" in quantities) == (case == "cpu/switch")
        for row in own:
            assert row.part == "rollout"
            assert row.kind == "output"
            assert math.isfinite(row.error)
            assert row.reference > 0.0
            assert row.simulated > 0.0
        makespan = next(row for row in own if row.quantity == "makespan_s")
        assert "inconclusive" in makespan.note or abs(makespan.error) < 0.35
    assert told


def test_too_few_sequences_are_refused():
    with pytest.raises(CalibrationError, match="expected at least 8"):
        validate_rollouts(sequences=4)

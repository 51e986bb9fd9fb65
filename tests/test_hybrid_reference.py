"""Training GPUs that generate, in the engine against the token-by-token reference, on random runs."""

from __future__ import annotations

import pytest
from hybrid_workloads import HybridWorkload, StepsWorkload, hybrid_workloads, steps_workloads
from hypothesis import given, settings
from hypothesis import strategies as st
from open_workloads import CLOCKS, EXTENSIONS, Clock, Extension
from test_open_reference import CLOSE, compare, near, relaxed


def compare_steps(work: StepsWorkload) -> None:
    """Calls, responses, and what the control was asked."""
    expected, notes = work.reference(), list(work.control.notes)
    work.control.notes.clear()
    run = work.simulate()
    since_start = CLOSE * run.outcome.step_ends[-1]  # a difference of moments, each right to 1e-9
    for ours, known in zip(work.control.notes, notes, strict=False):
        assert ours[0] == pytest.approx(known[0], abs=since_start), "moments at which the control is asked"
        assert ours[1] == known[1], "what the control sees"
    assert len(work.control.notes) == len(notes)
    size = work.prompts * len(work.sizes[0])
    for k, step in enumerate(expected):
        calls = {call.call: call for call in run.outcome.calls if call.step == k}
        assert (calls["generate"].start_at, calls["generate"].end_at) == tuple(map(near, step.generates))
        assert calls["train"].ready_at == near(step.train_ready_at), f"step {k} could train"
        assert calls["train"].start_at == near(step.parts[0][0]), f"step {k} trains"
        assert calls["train"].end_at == near(step.parts[-1][1]), f"step {k} has trained"
        assert (calls["sync"].start_at, calls["sync"].end_at) == tuple(map(near, step.syncs))
        version = max(k - work.lag, 0)
        assert (run.outcome.responses[k].version == version).all()
        for request in run.requests[k * size : (k + 1) * size]:
            i = request.id
            assert request.finished_at == near(step.rollout.finish_at[i]), f"finish of {i} in step {k}"
            assert request.first_token_at == near(step.rollout.first_token_at[i]), f"first token of {i} in step {k}"
            assert request.preemptions == step.rollout.preemptions[i], f"preemptions of {i} in step {k}"
            assert request.generated == step.rollout.generated[i]
            if work.checks_s:
                assert (request.score_started_at, request.scored_at) == tuple(map(near, step.scored[i]))


@settings(relaxed, max_examples=40)
@given(st.sampled_from(CLOCKS).flatmap(hybrid_workloads))
def test_the_engine_equals_the_reference_where_the_trainer_generates(work: HybridWorkload) -> None:
    compare(work)


@settings(relaxed, max_examples=40)
@given(st.sampled_from(CLOCKS).flatmap(steps_workloads))
def test_the_engine_equals_the_reference_where_the_trainer_generates_for_its_step(work: StepsWorkload) -> None:
    compare_steps(work)


@pytest.mark.slow
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_engine_equals_the_reference_on_many_runs_with(extension: Extension, clock: Clock) -> None:
    settings(relaxed, max_examples=1000)(given(hybrid_workloads(clock, extension))(compare))()


@pytest.mark.slow
@pytest.mark.parametrize("clock", CLOCKS)
def test_the_engine_equals_the_reference_on_many_steps(clock: Clock) -> None:
    settings(relaxed, max_examples=1000)(given(steps_workloads(clock))(compare_steps))()

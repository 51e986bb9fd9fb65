"""Continuous generation in the engine against the token-by-token reference, on random runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_workloads import (
    CLOCKS,
    EXTENSIONS,
    Clock,
    Extension,
    Noted,
    OpenRun,
    OpenWorkload,
    hybrid_workloads,
    open_agents,
    open_drafted,
    open_workloads,
    rolling,
)
from reference import HaltedError
from reference_open import OpenResult

from rlsim.errors import PolicyError

CLOSE = 1e-9

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def near(moment: float) -> object:
    return pytest.approx(moment, rel=CLOSE, abs=0, nan_ok=True)


def check_equal(run: OpenRun, expected: OpenResult, *, generated_again: bool = False) -> None:
    """Everything that both say; prompts that are `generated_again` stand out of their order."""
    outcome, samples = run.outcome, len(run.requests) // sum(map(len, run.launches))
    keys = {request.id: key for key, request in run.requests.items()}
    assert run.launches == expected.launches
    for number, step in enumerate(expected.steps):
        calls = {call.call: call for call in outcome.calls if call.step == number}
        assert calls["generate"].end_at == near(step.has_batch_at), f"step {number} has its batch"
        assert calls["sync"].ready_at == near(step.asks_at), f"step {number} asks for its update"
        assert calls["sync"].start_at == near(step.sync_starts_at), f"step {number} has all replicas stand"
        assert calls["sync"].end_at == near(step.sync_ends_at), f"step {number} has synced"
        assert calls["train"].end_at == near(step.parts[-1][1]), f"step {number} has trained"
        size = len(step.trained) // len(step.parts)
        for part in range(len(step.parts)):
            positions = [at for at in step.trained[part * size : (part + 1) * size] for _ in range(samples)]
            for worked_on in run.times.parts_of.values():
                got = worked_on[number * len(step.parts) + part] if worked_on else positions
                assert sorted(got) == sorted(positions), f"part {part} of step {number}"
        responses = outcome.responses[number]
        trained = responses.position[responses.trained].tolist()
        expected_ones = [at for at in sorted(step.trained) for _ in range(samples)]
        ordered = sorted(trained) if generated_again else trained
        assert ordered == expected_ones, f"step {number} trains on"
        for i, number_of in enumerate(responses.id.tolist()):
            response = expected.responses[keys[number_of]]
            if response.runs:
                assert responses.version[i] == response.oldest, f"oldest weights of {number_of}"
                stale = sum(tokens for version, tokens in response.runs if version < number)
                assert responses.stale_tokens[i] == stale, f"stale tokens of {number_of}"
        dropped = responses.position[~responses.trained & ~responses.paused]
        assert set(dropped.tolist()) == set(step.dropped), f"step {number} drops"
    assert outcome.step_ends[-1] == near(expected.steps[-1].sync_ends_at)
    last = outcome.responses[-1]
    assert set(last.position[last.paused].tolist()) == expected.in_flight
    assert not any(responses.paused.any() for responses in outcome.responses[:-1])
    assert run.requests.keys() == expected.responses.keys()
    end = outcome.step_ends[-1]
    for key, response in expected.responses.items():
        request = run.requests[key]
        assert request.generated == response.generated, f"tokens of {key}"
        assert request.finished_at == near(response.finished_at), f"finish of {key}"
        assert request.first_token_at == near(response.first_token_at), f"first token of {key}"
        assert [tuple(r) for r in request.runs] == response.runs, f"versions of {key}"
        assert request.preemptions == response.preemptions, f"preemptions of {key}"
        assert request.aborted == response.aborted, f"whether {key} was aborted"
        assert request.restarts == response.attempts, f"attempts of {key}"
        tools_s = request.tool_s, request.tool_wait_s
        assert tools_s == pytest.approx(response.tools_s, rel=CLOSE, abs=CLOSE), f"tools of {key}"
        if response.check_at != near(end):  # what else happens at that very moment is left open
            assert request.score_started_at == near(response.check_at), f"check of {key}"
        if response.scored_at != near(end):
            assert request.scored_at == near(response.scored_at), f"reward of {key}"
            assert request.reward == pytest.approx(response.reward, nan_ok=True), f"reward of {key}"
        if request.generated:  # the engine notes it down when a request is admitted
            assert request.replica == response.replica, f"replica of {key}"
    assert [switch.at for switch in outcome.switches] == [near(at) for at in expected.switches]


def check_invariants(work: OpenWorkload, run: OpenRun) -> None:
    """What must hold whatever the reference says."""
    outcome, rule = run.outcome, work.rule
    assert run.launched_in_update == 0
    everything = sum(request.generated for request in run.requests.values())
    told = sum(int(responses.generated_tokens.sum()) for responses in outcome.responses)
    assert everything == told
    seen = [i for responses in outcome.responses for i in responses.id.tolist()]
    assert len(seen) == len(set(seen)) == len(run.requests)
    samples = len(work.sizes[0])
    for number, responses in enumerate(outcome.responses):
        assert responses.trained.sum() == work.prompts * samples
        assert responses.finished[responses.trained].all()
        if rule.most_stale is not None:
            assert number - responses.version[responses.trained].min() <= rule.most_stale
    syncs = np.array([call.end_at for call in outcome.calls if call.call == "sync"])
    for request in run.requests.values():
        versions = [r.version for r in request.runs]
        if work.only_newer:
            assert versions == sorted(set(versions))
        assert sum(r.tokens for r in request.runs) == request.generated
        if request.finished:
            assert versions[-1] <= (syncs <= request.finished_at * (1 + CLOSE)).sum()


def compare(work: OpenWorkload) -> None:
    try:
        expected = work.reference()
    except HaltedError:
        with pytest.raises(PolicyError, match=r"comes to a halt|no end in sight"):
            work.simulate()
        return
    theirs, notes = list(work.rule.asked), []
    work.rule.asked.clear()
    if isinstance(work.control, Noted):
        notes = list(work.control.notes)
        work.control.notes.clear()
    run = work.simulate()
    if isinstance(work.control, Noted):
        for ours, known in zip(work.control.notes, notes, strict=False):
            assert ours[0] == near(known[0]), "moments at which the control is asked"
            assert ours[1] == known[1], "what the control sees"
        assert len(work.control.notes) == len(notes)
    check_equal(run, expected, generated_again=work.rule.generated_again)
    assert work.rule.asked == theirs, "the views at which room is asked"
    check_invariants(work, run)


# ---- trainers that generate meanwhile --------------------------------------------------------------------------------


ANY = st.sampled_from(CLOCKS)
#: Random runs of each kind, how each is compared, and how many there are; the many are slow.
KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None], int, int]] = {
    "real times": (open_workloads(), compare, 40, 2000),
    "much happens at once": (open_workloads("whole"), compare, 54, 2000),
    "times on a grid": (open_workloads("grid"), compare, 40, 2000),
    "replicas take weights on their own": (ANY.flatmap(rolling), compare, 34, 4500),
    "agents call tools": (open_agents(), compare, 40, 2000),
    "drafts are accepted by chance": (open_drafted(), compare, 40, 2000),
    "the trainer generates": (ANY.flatmap(hybrid_workloads), compare, 34, 500),
}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_equals_the_reference(kind: str, many: bool) -> None:
    works, check, few, very_many = KINDS[kind]
    settings(relaxed, max_examples=very_many if many else few)(given(works)(check))()


@pytest.mark.slow
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_engine_equals_the_reference_on_many_runs_with(extension: Extension, clock: Clock) -> None:
    for works in (open_workloads(clock, extension), hybrid_workloads(clock, extension)):
        settings(relaxed, max_examples=1000)(given(works)(compare))()

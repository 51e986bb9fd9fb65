"""One judge for all steps beside a rollout that never stops: each response is judged when it is complete."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_workloads import CLOCKS, OpenRun, OpenWorkload, Rule, open_workloads
from workloads import LinearStep, StubCosts

from rlsim.errors import PolicyError
from rlsim.experiment.frames import stays_frame
from rlsim.models.hardware import load_cluster
from rlsim.policies.reward_scheduler import AsyncReward
from rlsim.sim.batching import Batching, Batchings
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.reward import RewardFunction, RewardJob
from rlsim.sim.run import simulate
from rlsim.sim.server import RewardModelEngine
from rlsim.sim.simulation import Simulation
from rlsim.workflow import Placement, Plan, grpo

SECOND = LinearStep(a=1.0)  # every iteration of the judge takes a second
BY_HAND = StubCosts({1: LinearStep(a=1.0, p=1 / 8)}, {1: 10**6})  # of the rollout, as in test_continuous

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class Scoring(RewardFunction):
    """A judge's answers of so many tokens by position (else 1 to 7), or rules that take as long; notes who asks."""

    workers = 64

    def __init__(self, kind: Literal["rule", "judge"] = "judge", answers: Mapping[int, int] | None = None) -> None:
        self.kind, self.answers = kind, answers or {}
        self.asked: list[int] = []

    def job(self, request: Request) -> RewardJob:
        self.asked.append(request.id)
        tokens = self.answers.get(request.position, 1 + request.id % 7)
        reward = float(request.position % 3 > 0)
        if self.kind == "judge":
            return RewardJob(
                "judge", request.position, (), 0.0, reward, True, judge_prompt_tokens=4, judge_tokens=tokens
            )
        return RewardJob("rule", request.position, (tokens * SECOND.a,), 1e9, reward, True)


class WorthSomething(Batching):
    """Drops prompts whose responses are all worth nothing."""

    def counts(self, rewards: Sequence[float]) -> bool:
        return max(rewards) > 0


def simulation(
    work: OpenWorkload,
    scoring: Scoring,
    judges: int = 1,
    found: OpenRun | None = None,
    *,
    drops: bool = False,
    at_once: int = 256,
) -> Simulation:
    """What `work` is with rewards by the sample, given by so many replicas of a judge if there is one."""
    plain, nodes = work.simulation(found), len(work.node_gpus) + 1
    reward = Placement(tuple(range(8 * nodes, 8 * nodes + judges)))
    engine = RewardModelEngine(1, SECOND, SECOND, 1.0, 10_000, EngineConfig(max_num_seqs=at_once))
    return dataclasses.replace(
        plain,
        workflow=AsyncReward().rewired(grpo(reference=False, old_log_probs=False)),
        plan=Plan({**plain.plan.placements, "weight_sync": plain.plan.of("sync"), "reward": reward}),
        cluster=load_cluster(f"{nodes + -(-judges // 8)}x8xh100"),
        scoring=scoring,
        judge=engine if scoring.kind == "judge" else None,
        batching=Batchings([work.rule, WorthSomething()]) if drops else work.rule,
    )


def run(work: OpenWorkload, scoring: Scoring, judges: int = 1, **more: Any) -> OpenRun:
    found = OpenRun()
    found.outcome = simulate(simulation(work, scoring, judges, found, **more))
    return found


def judging(outcome: Outcome) -> tuple[pd.DataFrame, list[tuple[float, float]]]:
    """The stays at the judge, and when it was at work."""
    stays = stays_frame(outcome.stays, outcome.responses)
    spans = sorted((span.start_at, span.end_at) for span in outcome.spans if span.kind == "reward")
    return stays[stays["call"] == "reward"], spans


def ends(outcome: Outcome, call: str) -> list[float]:
    return [record.end_at for record in outcome.calls if record.call == call]


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_a_step_takes_a_prompt_when_it_is_judged_and_updates_do_not_wait_for_the_judge() -> None:
    """Without a judge: test_a_response_is_interrupted_and_goes_on_under_new_weights in test_continuous."""
    sizes = (((8, 2),), ((8, 6),), ((8, 9),))
    work = OpenWorkload(sizes, 1, Rule("quota", 100), (1.5, 1.0), (2.0, 1.0), costs=BY_HAND)
    done = run(work, Scoring(answers={0: 3, 1: 3}))
    first, second, third = (done.requests[at, 0] for at in range(3))
    assert (first.finished_at, first.scored_at) == (4.0, 7.0)
    # The update is asked for at 8.5 s, and nothing is generated then; the judge goes on.
    assert (second.finished_at, second.scored_at) == (8.0, 11.0)
    assert [record.start_at for record in done.outcome.calls if record.kind == "sync"] == [8.5, 12.5]
    # What is judged is under way: beside it there is room for one more.
    assert third.started_at == 10.5
    assert ends(done.outcome, "generate") == ends(done.outcome, "reward") == [7.0, 11.0]


def test_at_the_end_of_the_run_the_judge_is_broken_off() -> None:
    work = OpenWorkload((((8, 2),), ((8, 3),)), 1, Rule("under_way", 2), (1.0,), (1.0,), costs=BY_HAND)
    done = run(work, Scoring(answers={0: 3, 1: 100}))
    assert done.requests[0, 0].scored_at == 8.0
    assert done.outcome.step_ends == [11.0]  # an update from the end of the third's prefill on, 10 s
    stays, spans = judging(done.outcome)
    told = stays[["response", "admitted_at", "left_at", "end_tokens", "left"]].to_numpy().tolist()
    assert told == [[0, 4.0, 8.0, 4 + 3, "finished"], [1, 5.0, 11.0, 4 + 1 + 5, "stopped"]]
    assert (spans[0][0], spans[-1][1], sum(end - start for start, end in spans)) == (4.0, 11.0, 7.0)
    responses = done.outcome.responses[0]
    assert np.isnan(responses.reward).tolist() == [False, True, True]
    assert responses.paused.tolist() == [False, True, True]


# ---- random runs ----------------------------------------------------------------------------------------------------


def unless_it_halts(*args: Any, **more: Any) -> OpenRun | None:
    """What `run` gives; None if nothing more is launched before the last step has its batch."""
    with suppress(PolicyError):
        return run(*args, **more)
    return None


@settings(relaxed, max_examples=50)
@given(st.sampled_from(CLOCKS).flatmap(open_workloads).map(OpenWorkload.plain), st.booleans())
def test_a_judge_that_no_load_slows_down_is_as_a_rule_of_that_duration(work: OpenWorkload, drops: bool) -> None:
    """Every response has a replica, or a worker, of its own."""
    rule = unless_it_halts(work, Scoring("rule"), judges=Scoring.workers, drops=drops)
    judge = unless_it_halts(work, Scoring("judge"), judges=Scoring.workers, drops=drops)
    if rule is None or judge is None:
        assert rule is judge
        return
    assert judge.launches == rule.launches
    near = {"rel": 1e-9, "abs": 0.0, "nan_ok": True}
    for key, one in rule.requests.items():
        other = judge.requests[key]
        for name in ("started_at", "finished_at", "score_started_at", "scored_at", "reward"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), **near), (key, name)
        assert (other.generated, other.runs) == (one.generated, one.runs)
    assert len(judge.outcome.calls) == len(rule.outcome.calls)
    for one, other in zip(rule.outcome.calls, judge.outcome.calls, strict=True):
        assert (other.step, other.call) == (one.step, one.call)
        assert [other.start_at, other.end_at] == pytest.approx([one.start_at, one.end_at], **near)
    for rules, judges in zip(rule.outcome.responses, judge.outcome.responses, strict=True):
        assert (judges.id.tolist(), judges.trained.tolist()) == (rules.id.tolist(), rules.trained.tolist())


@settings(relaxed, max_examples=50)
@given(
    st.sampled_from(CLOCKS).flatmap(open_workloads).map(OpenWorkload.plain),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 256]),
    st.booleans(),
)
def test_every_response_is_judged_once(work: OpenWorkload, judges: int, at_once: int, drops: bool) -> None:
    scoring = Scoring()
    done = unless_it_halts(work, scoring, judges, drops=drops, at_once=at_once)
    if done is None:
        return
    outcome, requests = done.outcome, {r.id: r for r in done.requests.values()}
    assert sorted(scoring.asked) == sorted(i for i, r in requests.items() if r.finished)
    stays, _ = judging(outcome)
    last = stays[stays["left"] != "preempted"]
    assert sorted(last["response"]) == sorted(scoring.asked)
    assert sorted(last.loc[last["left"] == "finished", "response"]) == sorted(
        i for i, r in requests.items() if r.scored
    )
    step_of = {int(i): step for step, responses in enumerate(outcome.responses) for i in responses.id}
    assert stays["step"].tolist() == [step_of[i] for i in stays["response"]]
    for request in (requests[i] for i in scoring.asked):
        assert request.score_started_at == request.finished_at
        assert not request.scored or request.scored_at >= (request.finished_at + 1 + request.id % 7) * (1 - 1e-9)
    has_batch = ends(outcome, "generate")
    for step, responses in enumerate(outcome.responses):
        assert not np.isnan(responses.reward[~responses.paused]).any(), "trained on, or dropped once it was scored"
        in_time = (responses.scored_at[~responses.paused] <= has_batch[step] * (1 + 1e-9)).all()
        assert in_time or step == len(has_batch) - 1
        if drops:
            assert all(at % 3 for at in responses.position[responses.trained])
    of_gpu: dict[int, float] = {}
    for span in sorted((s for s in outcome.spans if s.kind == "reward"), key=lambda s: s.start_at):
        (gpu,) = span.gpus
        assert span.start_at >= of_gpu.get(gpu, 0.0) * (1 - 1e-9), "a replica does one thing at a time"
        of_gpu[gpu] = span.end_at
    assert all(end <= outcome.step_ends[-1] for end in of_gpu.values())

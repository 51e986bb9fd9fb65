"""Relaxed synchrony by stages: which weights generate what, and that nothing changes where nothing is relaxed."""

from typing import Any

import pandas as pd
import pytest
from conftest import runner
from test_oppo import conserved, graph, play
from test_systems import Times, call_of, gen_s, simulated

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.policies.relaxed import ActiveGroups, Lagged, PartialRollout
from rlsim.sim.outcome import Outcome
from rlsim.workflow import Call, Placement, Workflow, dpo
from rlsim.workflow.graph import Edge
from rlsim.workflow.plan import Plan

TP1 = {"verl": {"tp": 1}}
run = runner("relaxed")


def use(name: str, *parts: Any) -> dict[str, Any]:
    return {"name": name, "use": [TP1, *parts]}


# ------------------------------------------------------------------------------------------------------ one step off

STEPS = 6


class Given(Times):
    """Training and syncs take so long, whatever they work on."""

    def __init__(self, train_s: float, sync_s: float) -> None:
        self.seconds = {"train": train_s, "sync": sync_s}

    def parts(self, call: Call, placement: Placement, *_: Any) -> list[tuple[str, float]]:
        return [("compute", self.seconds[call.kind])]


def apart(tokens: int, train_s: float, sync_s: float, lag: int) -> Outcome:
    """Generation of a response of so many tokens, a second each, on GPU 0, and training on GPU 1."""
    calls = (Call("generate", "generate", "actor"), Call("train", "train", "actor"), Call("push", "sync", "actor"))
    edges = (Edge("generate", "train"), Edge("train", "push"), Edge("push", "generate", lag=1))

    placements = {"generate": Placement((0,)), "train": Placement((1,), TrainStrategy(dp=1)), "push": Placement((0, 1))}
    workflow = Lagged(lag=lag).rewired(Workflow("apart", calls, edges))
    lengths = {position: [tokens] for position in range(STEPS)}
    return simulated(workflow, Plan(placements), lengths, 1, gpus=2, times=Given(train_s, sync_s), steps=STEPS)


@pytest.mark.parametrize(("tokens", "train_s"), [(10, 6.0), (10, 15.0), (10, 10.0), (1, 15.0)])
def test_a_step_takes_as_long_as_the_slower_side_and_the_sync(tokens: int, train_s: float) -> None:
    """Batches 0 and 1 are generated under the first weights; the rest as the lines of the docstring of `Lagged` say."""
    outcome = apart(tokens, train_s, 2.0, lag=1)
    # Generation 0 and 1 follow each other, training 0 begins beside the second; then the first sync.
    first = max(tokens + train_s, 2 * tokens) + 2.0
    longer = max(tokens, train_s) + 2.0
    ends = [first + i * longer for i in range(STEPS - 1)]
    assert outcome.step_ends[:-1] == pytest.approx(ends)
    assert outcome.step_ends[-1] == pytest.approx(ends[-1] + train_s + 2.0)  # nothing more is generated beside it
    begins = [call_of(outcome, "generate", step).start_at for step in range(STEPS)]
    assert begins == pytest.approx([0.0, tokens, *ends[: STEPS - 2]])
    staleness = [step - int(r.version[0]) for step, r in enumerate(outcome.responses)]
    assert staleness == [0, 1, 1, 1, 1, 1]
    assert [int(r.stale_tokens[0]) for r in outcome.responses] == [0, *[tokens] * 5]


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_staleness_is_the_lag(lag: int) -> None:
    outcome = apart(10, 6.0, 2.0, lag)
    assert [step - int(r.version[0]) for step, r in enumerate(outcome.responses)] == [min(i, lag) for i in range(STEPS)]
    if lag == 0:
        assert outcome.step_ends == pytest.approx([18.0 * i for i in range(1, STEPS + 1)])
    with pytest.raises(ConfigError, match="no weight sync goes before generation"):
        Lagged(lag=lag).rewired(dpo())


# ----------------------------------------------------------------------------------------------- nothing is relaxed


def test_what_is_not_relaxed_equals_plain_verl_exactly() -> None:
    """All groups of `active: 1` are needed; a budget of the cap and a share of 1 are never used up."""
    same = {
        "active": {"active_groups": {"active": 1}},
        "share": {"partial_rollout": {"share": 1}},
        "budget": {"partial_rollout": {"budget": "2K"}},
        "beyond": {"partial_rollout": {"budget": "100K"}},
    }
    result = run(TP1, {"colocated_async": {"tp": 1, "active": 1}}, *(use(name, part) for name, part in same.items()))
    own = result.steps.set_index(["system", "step"]).drop(columns=["case", "seed"])
    assert (own["staleness_max"] == 0).all()
    assert (own[["staleness_mean", "staleness_p95", "stale_token_share"]] == 0).all().all()
    for system in ("colocated_async", *same):
        pd.testing.assert_frame_equal(own.loc[system], own.loc["verl"], check_exact=True)
    responses = result.responses.set_index(["system", "step"]).drop(columns=["case", "seed"])
    for system in ("colocated_async", *same):
        pd.testing.assert_frame_equal(responses.loc[system], responses.loc["verl"], check_exact=True)


# -------------------------------------------------------------------------------------------------- active groups


def test_twice_the_groups_stay_active() -> None:
    """A prompt of n tokens takes n seconds; two of four prompts are trained on, and the others go on."""
    lengths = {0: [2], 1: [9], 2: [3], 3: [9], 4: [1], 5: [5], 6: [9], 7: [9]}
    outcome = play(lengths, 2, workflow=graph(), gpus=4, steps=2, batching=ActiveGroups(active=2))
    first, second = outcome.responses
    assert first.trained.tolist() == [True, False, True, False]
    assert first.generated_tokens.tolist() == [2, 3, 3, 3]
    # Prompts 4 and 5 are new and take 1 and 5 s; 1 and 3 lack 6 tokens. The batch is complete after 5 s.
    assert gen_s(outcome, 1) == pytest.approx(5.0)
    assert second.position[second.trained].tolist() == [4, 5]
    assert second.generated_tokens.tolist() == [1, 5, 8, 8]
    assert second.stale_tokens.tolist() == [0, 0, 3, 3]
    conserved(outcome)


# ------------------------------------------------------------------------------------------------ partial rollout

LENGTHS = {0: [2, 2], 1: [9, 3], 2: [3, 3], 3: [1, 4], 4: [2, 2], 5: [9, 9], 6: [9, 9], 7: [9, 9]}


def test_a_response_pauses_when_its_budget_is_used_up() -> None:
    """Three prompts of two responses, three seconds a step, a replica for each response."""
    outcome = play(LENGTHS, 3, workflow=graph(), gpus=6, responses=2, steps=3, batching=PartialRollout(budget=3))
    first, second, third = outcome.responses
    assert [gen_s(outcome, step) for step in range(3)] == pytest.approx([3.0, 3.0, 3.0])
    assert first.generated_tokens.tolist() == [2, 2, 3, 3, 3, 3]
    assert first.position[first.trained].tolist() == [0, 0, 2, 2]
    assert first.paused.tolist() == [False, False, True, True, False, False]
    # Prompts 3 and 4 are new; 4 is complete, 3 lacks a token, and 1 has 6 of 9.
    assert second.position[second.trained].tolist() == [4, 4]
    assert second.position.tolist() == [3, 3, 4, 4, 1, 1]
    assert sorted(second.generated_tokens.tolist()) == [1, 2, 2, 3, 3, 6]
    # Prompt 1 has its last three, the other response of 3 its last one; the one new prompt has 3 of 9.
    assert sorted(set(third.position[third.trained].tolist())) == [1, 3]
    stale = {(at, n): (2 - v, s) for at, n, v, s in zip(third.position.tolist(), third.generated_tokens.tolist(),
             third.version.tolist(), third.stale_tokens.tolist(), strict=True)}  # fmt: skip
    assert stale == {(1, 9): (2, 6), (1, 3): (2, 3), (3, 4): (1, 3), (3, 1): (1, 1), (5, 3): (0, 0)}
    left = [left for at_replica in outcome.stays for left in at_replica.columns()["left"].tolist()]
    assert left.count("paused") == 2 + 1 + 2  # of prompt 1 in the first two steps but its short response, then of 5
    conserved(outcome)


def test_a_step_without_a_complete_prompt_goes_on() -> None:
    """Both prompts pause after two seconds, and again; the third budget of prompt 0 is enough."""
    outcome = play(
        {0: [5], 1: [9], 2: [1], 3: [1]}, 2, workflow=graph(), gpus=2, steps=2, batching=PartialRollout(budget=2)
    )
    first, second = outcome.responses
    assert gen_s(outcome) == 6.0  # the second replica goes on to the end of its budget
    assert first.generated_tokens.tolist() == [5, 6]
    assert first.trained.tolist() == [True, False]
    assert second.trained.tolist() == [True, False]
    assert second.generated_tokens.tolist() == [1, 8]
    conserved(outcome)


def test_generation_ends_with_the_share_of_its_responses() -> None:
    """Half of six responses: two of prompt 0 after 2 s, and three more at 3 s, when prompt 2 is complete too."""
    outcome = play(LENGTHS, 3, workflow=graph(), gpus=6, responses=2, steps=2, batching=PartialRollout(share=0.5))
    first, second = outcome.responses
    assert gen_s(outcome) == 3.0
    assert first.position[first.trained].tolist() == [0, 0, 2, 2]
    # Three of five that are generated: 3's short one and both of 4.
    assert gen_s(outcome, 1) == pytest.approx(2.0)
    assert second.position[second.trained].tolist() == [4, 4]
    conserved(outcome)


def test_a_response_is_split_only_so_often() -> None:
    """Prompt 1 takes 9 s: after one split it is waited for, after two a step later."""
    ends = []
    for splits in (1, 2, None):
        outcome = play(
            {0: [2], 1: [9], 2: [2], 3: [2], 4: [2], 5: [2], 6: [2]},
            2, workflow=graph(), gpus=2, steps=3, batching=PartialRollout(share=0.5, splits=splits),
        )  # fmt: skip
        ends.append([gen_s(outcome, step) for step in range(3)])
        conserved(outcome)
    assert ends == [pytest.approx(times) for times in ([2.0, 7.0, 2.0], [2.0, 2.0, 5.0], [2.0, 2.0, 2.0])]

"""Relaxed synchrony by stages: which weights generate what, and that nothing changes where nothing is relaxed."""

from typing import Any

import pandas as pd
import pytest
from conftest import runner
from test_systems import Times, call_of, simulated

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.policies.relaxed import Lagged
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

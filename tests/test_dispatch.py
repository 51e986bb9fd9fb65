"""Controls that say which replica gets which responses, and predicted lengths."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from test_asynchronous import run, use
from workloads import LinearStep, Nothing, StubCosts, rolled_out

from rlsim.errors import PolicyError
from rlsim.policies.dispatch import PrefixDispatch, QueueOrder, SkewnessDispatch
from rlsim.sim.control import ControlContext, Controls, ReplicaView, RequestView, RolloutControl
from rlsim.sim.request import EngineConfig, Request

COSTS = StubCosts({1: LinearStep(a=1.0, b=0.25)}, {1: 10**6})


def rollout(control: RolloutControl, lengths: Sequence[int], gpus: int = 2, max_num_seqs: int = 256) -> list[Request]:
    requests = [Request(i, i, 8, length) for i, length in enumerate(lengths)]
    for request in requests:
        request.predicted_tokens = float(request.response_tokens)
    rolled_out(requests, COSTS, control, mesh=[tuple(range(gpus))], config=EngineConfig(max_num_seqs=max_num_seqs))
    return requests


class Given(RolloutControl):
    """Deals as it is told."""

    def __init__(self, shares: Any) -> None:
        self.shares = shares

    def dispatch(self, launched: Sequence[RequestView], replicas: Sequence[ReplicaView]) -> Mapping[int, Sequence[int]]:
        assert all(not replica.requests for replica in replicas)
        assert [request.predicted_tokens for request in launched] == [30.0, 2.0, 3.0]
        return self.shares  # type: ignore[no-any-return]


def test_responses_go_where_the_control_says() -> None:
    alone = rollout(Given({1: [0], 0: [2, 1]}), [30, 2, 3])
    assert [request.replica for request in alone] == [1, 0, 0]
    dealt = rollout(Given(None), [30, 2, 3])
    assert [request.replica for request in dealt] == [0, 0, 1]
    assert alone[0].finished_at < dealt[0].finished_at


@pytest.mark.parametrize(
    "shares", [{0: [0, 1]}, {0: [0, 1, 2, 2]}, {0: [0, 1], 5: [2]}, {0: [0, 1, 9]}, [0, 1], {0: 1}]
)
def test_shares_that_lose_or_double_a_response_are_refused(shares: Any) -> None:
    with pytest.raises(PolicyError, match="dispatch"):
        rollout(Given(shares), [30, 2, 3])


class Rank(RolloutControl):
    """Queues in the order of these numbers, by response."""

    def __init__(self, places: Any) -> None:
        self.places = places

    def priority(self, request: RequestView) -> float:
        return self.places[request.id]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("control", "order"),
    [
        (Nothing(), [0, 1, 2, 3]),
        (Rank([3, 0.5, 3, -1]), [3, 1, 0, 2]),  # of equals who came first
        (QueueOrder(first="longest"), [0, 3, 2, 1]),
        (QueueOrder(first="shortest"), [1, 2, 3, 0]),
        (Controls([Nothing(), QueueOrder(first="shortest"), Rank([0, 1, 2, 3])]), [1, 2, 3, 0]),
    ],
)
def test_replicas_admit_by_priority(control: RolloutControl, order: list[int]) -> None:
    requests = rollout(control, [30, 2, 3, 9], gpus=1, max_num_seqs=1)
    assert [r.id for r in sorted(requests, key=lambda r: r.finished_at)] == order


@pytest.mark.parametrize("place", ["first", math.nan])
def test_a_place_that_is_no_number_is_refused(place: Any) -> None:
    with pytest.raises(PolicyError, match=r"Rank.priority: .* returned .*, expected a number, or None"):
        rollout(Rank([place] * 3), [30, 2, 3])


def dispatched(lengths: Sequence[int], replicas: int, **parameters: Any) -> dict[int, list[int]]:
    control = SkewnessDispatch(**parameters)
    control.setup(ControlContext(COSTS, (1,), {}, (replicas,), 100, 16, len(lengths), 8))
    launched = [RequestView(i, i, 8, 0, False, float(length)) for i, length in enumerate(lengths)]
    views = [ReplicaView(index, 0, 1, (index,), ()) for index in range(replicas)]
    return {index: list(ids) for index, ids in control.dispatch(launched, views).items()}


def test_the_longest_have_replicas_of_their_own() -> None:
    """A step takes 1 s and 0.25 s a response: 100 tokens beside four others take 225 s, alone 125 s."""
    shares = dispatched([100, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2, long=0.1)
    assert shares[0] == [0]
    assert shares[1] == list(range(1, 10))
    lengths = [5, 9, 7, 40, 3, 60, 8, 6, 2, 4]
    shares = dispatched(lengths, 3, long=0.2)
    assert sorted(i for ids in shares.values() for i in ids) == list(range(10))
    for ids in shares.values():
        assert [lengths[i] for i in ids] == sorted((lengths[i] for i in ids), reverse=True)


def test_responses_to_a_prompt_share_the_replica_that_has_fewest() -> None:
    launched = [RequestView(i, position, 8, 0, False) for i, position in enumerate([5, 7, 5, 6, 7, 7, 6])]
    busy = (RequestView(100, 1, 8, 3, True),) * 2
    views = [ReplicaView(0, 0, 1, (0,), busy), ReplicaView(1, 0, 1, (1,), ())]
    assert PrefixDispatch().dispatch(launched, views) == {0: [1, 4, 5], 1: [0, 2, 3, 6]}


def test_predictions_have_the_error_that_was_asked_for() -> None:
    seen: list[RequestView] = []

    class Watch(SkewnessDispatch):
        def dispatch(
            self, launched: Sequence[RequestView], replicas: Sequence[ReplicaView]
        ) -> Mapping[int, Sequence[int]]:
            seen.extend(launched)
            return super().dispatch(launched, replicas)

    globals()["Watch"] = Watch
    system = use("watched", {f"{__name__}:Watch": {"error": 0.5}})
    found = run(system, workflow={"prompts": 64, "responses": 8, "steps": 1})
    predicted = [view.predicted_tokens for view in sorted(seen, key=lambda view: view.id)]
    errors = np.log(predicted / found.responses["response_tokens"].to_numpy())
    assert abs(errors.mean()) < 0.05
    assert errors.std() == pytest.approx(0.5, abs=0.05)

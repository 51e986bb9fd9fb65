"""Replicas that take new weights each on its own, worked out by hand, and what must hold on random runs.

Times are those of `test_continuous`: an iteration takes one second, a prefill of n tokens 1 + n/8 seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from open_workloads import OpenRun, OpenWorkload, Rule, open_workloads
from test_continuous import COSTS, TWO_LAYOUTS, Once, moments, runs
from workloads import Scripted

from rlsim.errors import PolicyError
from rlsim.sim.continuous import OpenView, Update
from rlsim.sim.control import Migrate, Reconfigure, RolloutView

EACH = {way: Update(way, "recompute", "each") for way in ("interrupt", "drain")}


def run(rule: Rule, lengths: list[int], steps: int = 2, **more: Any) -> OpenRun:
    """Steps of one prompt of eight tokens with one response each on two replicas, that train and push for a second."""
    second = (1.0,) * steps
    sizes = tuple(((8, length),) for length in lengths)
    return OpenWorkload(sizes, 1, rule, second, second, (2,), costs=COSTS, **more).simulate()


def test_each_replica_is_interrupted_at_a_boundary_of_its_own() -> None:
    done = run(Rule("under_way", 2, weights=EACH["interrupt"]), [2, 20, 4, 9, 9], spread_s=0.5, pull_s=2.0)
    # Prompts 0 and 1 are prefilled until 2 s; at 3 s the first is complete, trained on until 4 s and pushed until 5 s.
    # All nodes have the weights at 5.5 s, both replicas stand still from 6 s to 8 s.
    assert moments(done, 0) == (3.0, 4.0, 4.0, 5.0)
    long, second = done.requests[1, 0], done.requests[2, 0]
    assert runs(long)[0] == (0, 5)  # until 6 s
    # The prompt that began at 3 s was prefilled until 5 s; it goes on at 8 s, from its prompt and two tokens on.
    assert runs(second) == [(0, 2), (1, 2)]
    assert second.finished_at == 8.0 + (1 + 10 / 8) + 1
    # The trainer waited for no replica: it had its second batch when that response was complete.
    assert moments(done, 1)[:3] == (11.25, 12.25, 12.25)


def test_a_replica_drains_before_it_takes_new_weights_and_nothing_is_launched_there() -> None:
    done = run(Rule("under_way", 2, weights=EACH["drain"]), [2, 20, 2, 3, 3], steps=3, spread_s=0.5, pull_s=2.0)
    # The replica that is free again at 3 s takes prompt 2, which ends at 6 s; it has new weights at 8 s. The other one
    # goes on with the old ones, and gets no other prompt.
    first, long, second, third = (done.requests[at, 0] for at in range(4))
    assert [r.replica for r in (first, long, second, third)] == [0, 1, 0, 0]
    assert (second.finished_at, runs(second)) == (6.0, [(0, 2)])
    assert third.started_at == 8.0  # when it has them
    assert {version for version, _ in runs(third)} == {1}
    assert runs(long) == [(0, long.generated)]


def test_an_idle_replica_takes_new_weights_at_once() -> None:
    done = run(Rule("under_way", 1, weights=EACH["drain"]), [2, 6, 9], spread_s=0.0, pull_s=2.0)
    assert [done.requests[at, 0].replica for at in (0, 1)] == [0, 0]
    assert runs(done.requests[1, 0])[0][0] == 0  # began at 3 s, before the push was over


@dataclass(frozen=True)
class PerReplica(Rule):
    """One prompt for each replica that has nothing left; keeps what it was told of free replicas."""

    def room(self, view: OpenView) -> Mapping[int, int]:  # type: ignore[override]
        self.asked.append((view, len(view.free)))
        return dict.fromkeys(view.free, 1)


def test_prompts_go_to_the_replicas_that_are_named() -> None:
    rule = PerReplica(weights=EACH["drain"])
    done = run(rule, [2, 5, 2, 2, 2, 2, 2], spread_s=0.5, pull_s=2.0)
    assert rule.asked[0][0].free == (0, 1)
    assert [done.requests[at, 0].replica for at in range(4)] == [0, 1, 0, 0]
    for request in done.requests.values():
        assert len(request.runs) <= 1  # by weights of one version


class MoveOnce(Scripted):
    """Moves what the second replica has to the first, once."""

    moved = False

    def on_finish(self, view: RolloutView) -> Migrate | None:
        first, second = view.replicas()
        if self.moved or not second.requests:
            return None
        self.moved = True
        return Migrate(tuple(r.id for r in second.requests), first.index, "migrate")


def test_a_replica_whose_responses_have_moved_takes_new_weights_and_prompts() -> None:
    rule = PerReplica(weights=EACH["drain"])
    done = run(rule, [2, 20, 2, 2, 2], control=MoveOnce(), spread_s=0.0, pull_s=2.0)
    long = done.requests[1, 0]
    assert (long.replica, long.tps) == (0, (1,))
    assert done.requests[3, 0].replica == 1


def test_a_replica_that_starts_with_responses_drains_before_it_takes_new_weights() -> None:
    sizes = tuple(((8, length),) for length in (2, 20, 4, 3, 3))
    rule, control, second = Rule("under_way", 2, weights=EACH["drain"]), Once(2, Reconfigure(0, 2)), (1.0,) * 3
    work = OpenWorkload(sizes, 1, rule, second, second, (2,), costs=TWO_LAYOUTS, control=control, pull_s=2.0)
    done = work.simulate()
    (switch,) = done.outcome.switches
    assert switch.at > moments(done, 0)[3], "all nodes have the new weights"
    long = done.requests[1, 0]
    assert long.tps == (1, 2)
    assert runs(long) == [(0, long.generated)], "which the run ends before"
    assert long.generated == 11
    assert not any("updated" in stays.columns()["left"] for stays in done.outcome.stays)


@pytest.mark.parametrize("room", [{0: -1}, {0: 1.5}, {"a": 1}, 1.5])
def test_room_is_refused_in_plain_words(room: Any) -> None:
    class Wrong(PerReplica):
        def room(self, view: OpenView) -> Any:
            return room

    with pytest.raises(PolicyError, match="room"):
        run(Wrong(), [2, 2])


relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(relaxed, max_examples=80)
@given(
    open_workloads().map(OpenWorkload.plain),
    st.sampled_from(["interrupt", "drain"]),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_what_holds_on_random_runs(work: OpenWorkload, way: str, spread_s: float, pull_s: float) -> None:
    rule = dataclasses.replace(work.rule, weights=EACH[way], waits_from=None, most_stale=None, asked=[])
    work = dataclasses.replace(work, rule=rule, spread_s=spread_s, pull_s=pull_s)
    try:
        done = work.simulate()
    except PolicyError:
        assume(False)  # a rule that never launches enough: the step comes to a halt
    generated = sum(request.generated for request in done.requests.values())
    assert generated == sum(int(r.generated_tokens.sum()) for r in done.outcome.responses)
    for request in done.requests.values():
        versions = [one.version for one in request.runs]
        assert versions == sorted(set(versions))
        assert sum(one.tokens for one in request.runs) == request.generated
        assert way == "interrupt" or len(versions) <= 1
    for step, responses in enumerate(done.outcome.responses):
        assert responses.trained.sum() == work.prompts * len(work.sizes[0])
        assert (responses.version[responses.trained] <= step).all()
        sync = next(c for c in done.outcome.calls if c.step == step and c.call == "sync")
        assert sync.start_at == sync.ready_at  # the trainer waits for no replica

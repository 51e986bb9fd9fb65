"""Continuous generation worked out by hand: interruption, draining, what is dropped, replicas on their own.

A decode step takes one second however many sequences it has, a prefill of n tokens 1 + n/8 seconds. All numbers are
exact in binary, so the tests compare with ==.
"""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from open_workloads import OpenRun, OpenWorkload, Rule, StepTimes
from reference_open import RefCheck
from workloads import At, LinearStep, StubCosts

from rlsim.errors import PolicyError
from rlsim.sim import scheduler
from rlsim.sim.actions import Reconfigure, Release
from rlsim.sim.batching import Batching
from rlsim.sim.continuous import OpenView, Update
from rlsim.sim.control import Action
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import Request, UpdatedKv
from rlsim.sim.run import simulate
from rlsim.trace.turns import ToolCall
from rlsim.workflow import Call

COSTS = StubCosts({1: LinearStep(a=1.0, p=1 / 8)}, {1: 10**6})


def run(
    lengths: Sequence[int],
    rule: Rule,
    train_s: Sequence[float],
    sync_s: Sequence[float],
) -> OpenRun:
    """Steps of one prompt of eight tokens with one response, of these lengths one after the other."""
    sizes = tuple(((8, length),) for length in lengths)
    return OpenWorkload(sizes, 1, rule, tuple(train_s), tuple(sync_s), costs=COSTS).simulate()


def moments(outcome: OpenRun, step: int) -> tuple[float, float, float, float]:
    """When the step has its batch, when its update is asked for, begins and ends."""
    calls = {call.call: call for call in outcome.outcome.calls if call.step == step}
    sync = calls["sync"]
    return calls["generate"].end_at, sync.ready_at, sync.start_at, sync.end_at


def positions(outcome: OpenRun, step: int, what: Literal["trained", "paused", "dropped"]) -> list[int]:
    responses = outcome.outcome.responses[step]
    flags = ~responses.trained & ~responses.paused if what == "dropped" else getattr(responses, what)
    return responses.position[flags].tolist()


def runs(request: Request) -> list[tuple[int, int]]:
    return [tuple(r) for r in request.runs]


def two(weights: Update = Update(), most_stale: int | None = None) -> Rule:  # noqa: B008
    """Two prompts between two updates, of which a step takes one."""
    return Rule("quota", 100, weights=weights, most_stale=most_stale)


@pytest.mark.parametrize(
    ("kv", "finished_at", "in_flight"),
    [
        # Both are prefilled again or for the first time: 12 + 8 tokens, 3.5 s from 8 s on.
        ("recompute", 12.5, 3),
        # The new prompt alone is prefilled, 2 s; the interrupted one pauses meanwhile, as for any prefill.
        ("keep", 12.0, 4),
    ],
)
def test_a_response_is_interrupted_and_goes_on_under_new_weights(
    kv: UpdatedKv, finished_at: float, in_flight: int
) -> None:
    rule = two(Update("interrupt", kv))
    done = run([2, 6, 9], rule, [1.5, 1.0], [2.0, 1.0])
    # The prefill of both prompts lasts until 3 s; at 4 s the first has its two tokens. The update is asked for at
    # 5.5 s, in the middle of an iteration: the other response has four tokens when the replica stands still.
    assert moments(done, 0) == (4.0, 5.5, 6.0, 8.0)
    first, second, third = (done.requests[at, 0] for at in range(3))
    assert (first.finished_at, runs(first)) == (4.0, [(0, 2)])
    assert (second.finished_at, runs(second)) == (finished_at, [(0, 4), (1, 2)])
    assert second.preemptions == 0  # an update is none
    # The step that takes it began when the weights were there, and so did the next prompt.
    assert moments(done, 1) == (finished_at, finished_at + 1, finished_at + 1, finished_at + 2)
    assert third.started_at == 8.0
    assert (third.generated, runs(third)) == (in_flight, [(1, in_flight)])
    assert [positions(done, step, "trained") for step in (0, 1)] == [[0], [1]]
    assert positions(done, 1, "paused") == [2]
    assert [view.left_at_update for view, _ in rule.asked] == [0, 0, 0, 1, 1]
    assert done.outcome.step_ends == [8.0, finished_at + 2]


def test_an_update_that_drains_waits_for_all_responses() -> None:
    done = run([2, 6, 9], two(Update("drain")), [1.5, 1.0], [2.0, 1.0])
    assert moments(done, 0) == (4.0, 5.5, 8.0, 10.0)  # at 8 s the second prompt has its six tokens
    assert runs(done.requests[1, 0]) == [(0, 6)]
    # It waits in the queue until the next step begins. Then the third is launched, and drained in its turn: a prefill
    # of 2 s, and eight tokens more.
    assert done.requests[2, 0].started_at == 10.0
    assert moments(done, 1) == (10.0, 11.0, 20.0, 21.0)
    assert runs(done.requests[2, 0]) == [(1, 9)]
    assert positions(done, 1, "paused") == [2]  # complete, but no step has taken it


TWO_LAYOUTS = StubCosts({tp: LinearStep(a=1.0, p=1 / 8) for tp in (1, 2)}, {1: 10**6, 2: 10**6}, weights_s=6.0)


@dataclasses.dataclass(frozen=True)
class Heard(Batching):
    """Every prompt counts; keeps the rewards that it is told of."""

    rewards: list[list[float]]

    def counts(self, rewards: Sequence[float]) -> bool:
        self.rewards.append(list(rewards))
        return True


def test_rewards_stand_in_the_order_in_which_the_responses_finished() -> None:
    checks = (tuple(RefCheck((0.0,), 1.0, reward) for reward in (0.25, 0.5, 0.75)),)
    heard = Heard([])
    OpenWorkload(
        (((8, 5), (8, 2), (8, 4)),), 1, Rule(), (1.0,), (1.0,), costs=COSTS, checks=checks, filter=heard
    ).simulate()
    assert heard.rewards == [[0.5, 0.75, 0.25]]


class Counting(StepTimes):
    """Counts the requests in memory whenever a sync is asked for."""

    def __init__(self, train_s: Sequence[float], sync_s: Sequence[float], every: int) -> None:
        super().__init__(train=train_s, sync=sync_s)
        self.every = every
        self.alive: list[int] = []

    def parts(self, call: Call, *more: Any) -> list[tuple[str, float]]:
        if call.kind == "sync" and self.syncs % self.every == 0:
            gc.collect()
            self.alive.append(sum(type(thing) is Request for thing in gc.get_objects()))
        return super().parts(call, *more)


@pytest.mark.parametrize("drops", [False, True])
def test_requests_of_steps_that_are_over_are_not_kept(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there are: those alive are the ones under way, and those of the last steps."""
    monkeypatch.setattr(scheduler, "FEW", 16)  # stale admissions that a replica may remember
    steps = 100
    rule = Rule("staleness", 2, most_stale=1 if drops else None)
    sizes = tuple(((4, 1 + 7 * i % 23), (4, 1 + 11 * i % 40)) for i in range(17))
    times = (2.5,) * steps, (1.0,) * steps
    work = OpenWorkload(sizes, 4, rule, *times, node_gpus=(2,), costs=COSTS)
    counting = Counting(*times, every=10)
    gc.collect()
    before = sum(type(thing) is Request for thing in gc.get_objects())
    outcome = simulate(dataclasses.replace(work.simulation(), times=counting))
    assert sum(len(responses) for responses in outcome.responses) > 2 * 4 * steps
    if drops:
        assert sum(rollout.launches.dropped for rollout in outcome.rollouts) > 10
    alive = [count - before for count in counting.alive]
    under_way = 2 * 4 * (rule.much + 1)  # responses: no more may be admitted and not taken at once
    assert len(alive) == 10
    assert max(alive) <= 3 * under_way
    assert max(alive[5:]) <= 1.2 * max(alive[:5])


def test_the_peak_of_the_kv_cache_is_a_steps_and_not_the_runs() -> None:
    rule = Rule(launches="one_at_a_time", much=1)
    found = run([8, 2, 4], rule, [1.0] * 3, [1.0] * 3).outcome.rollouts
    assert [rollout.peak_kv_tokens for rollout in found] == [16, 10, 12]


def test_what_is_launched_while_the_last_step_trains_is_of_that_step() -> None:
    """Two prompts are under way at a time; the run ends while the fourth and the fifth are generated."""
    outcome = run([2, 2, 2, 9, 9], Rule(launches="under_way", much=2), [4.0] * 2, [1.0] * 2).outcome
    settled = [rollout.launches for rollout in outcome.rollouts]
    assert sum(one.launched for one in settled) == sum(map(len, outcome.responses))
    assert [one.paused for one in settled] == [int(of_step.paused.sum()) for of_step in outcome.responses]
    assert settled[-1].paused > 0


# ---- replicas that take new weights each on its own -----------------------------------------------------------------

EACH = {way: Update(way, "recompute", "each") for way in ("interrupt", "drain")}


def on_two(rule: Rule, lengths: list[int], steps: int = 2, **more: Any) -> OpenRun:
    """Steps of one prompt with one response each on two replicas, that train and push for a second."""
    second = (1.0,) * steps
    sizes = tuple(((8, length),) for length in lengths)
    return OpenWorkload(sizes, 1, rule, second, second, (2,), costs=COSTS, **more).simulate()


def test_each_replica_is_interrupted_at_a_boundary_of_its_own() -> None:
    done = on_two(Rule("under_way", 2, weights=EACH["interrupt"]), [2, 20, 4, 9, 9], spread_s=0.5, pull_s=2.0)
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
    done = on_two(Rule("under_way", 2, weights=EACH["drain"]), [2, 20, 2, 3, 3], steps=3, spread_s=0.5, pull_s=2.0)
    # The replica that is free again at 3 s takes prompt 2, which ends at 6 s; it has new weights at 8 s. The other one
    # goes on with the old ones, and gets no other prompt.
    first, long, second, third = (done.requests[at, 0] for at in range(4))
    assert [r.replica for r in (first, long, second, third)] == [0, 1, 0, 0]
    assert (second.finished_at, runs(second)) == (6.0, [(0, 2)])
    assert third.started_at == 8.0  # when it has them
    assert {version for version, _ in runs(third)} == {1}
    assert runs(long) == [(0, long.generated)]


@dataclasses.dataclass(frozen=True)
class PerReplica(Rule):
    """One prompt for each replica that has nothing left; keeps what it was told of free replicas."""

    def room(self, view: OpenView) -> Mapping[int, int]:  # type: ignore[override]
        self.asked.append((view, len(view.free)))
        return dict.fromkeys(view.free, 1)


def test_prompts_go_to_the_replicas_that_are_named() -> None:
    rule = PerReplica(weights=EACH["drain"])
    done = on_two(rule, [2, 5, 2, 2, 2, 2, 2], spread_s=0.5, pull_s=2.0)
    assert rule.asked[0][0].free == (0, 1)
    assert [done.requests[at, 0].replica for at in range(4)] == [0, 1, 0, 0]
    for request in done.requests.values():
        assert len(request.runs) <= 1  # by weights of one version


def test_a_replica_that_starts_with_responses_drains_before_it_takes_new_weights() -> None:
    sizes = tuple(((8, length),) for length in (2, 20, 4, 3, 3))
    rule, control, second = Rule("under_way", 2, weights=EACH["drain"]), At({2: Reconfigure(0, 2)}), (1.0,) * 3
    work = OpenWorkload(sizes, 1, rule, second, second, (2,), costs=TWO_LAYOUTS, control=control, pull_s=2.0)
    done = work.simulate()
    (switch,) = done.outcome.switches
    assert switch.at > moments(done, 0)[3], "all nodes have the new weights"
    long = done.requests[1, 0]
    assert long.tps == (1, 2)
    assert runs(long) == [(0, long.generated)], "which the run ends before"
    assert long.generated == 11
    assert not any("updated" in stays.columns()["left"] for stays in done.outcome.stays)


SLOW = StubCosts({tp: LinearStep(a=4.0, p=1 / 8) for tp in (1, 2)}, {1: 10**6, 2: 10**6}, weights_s=6.0)


@pytest.mark.parametrize("action", [None, Reconfigure(0, 2), Release((1,))])
def test_a_run_ends_before_a_replica_has_stopped_that_is_told_to(action: Action | None) -> None:
    """Both prefill, until 5 s and 6 s; the first has its third token at 13 s, where the other is in its second step."""
    sizes, second = (((8, 3),), ((16, 20),), ((8, 20),)), (0.25,)
    rule, control = Rule("under_way", 2, weights=EACH["interrupt"]), At({1: action} if action else {})
    done = OpenWorkload(sizes, 1, rule, second, second, (2,), costs=SLOW, control=control).simulate()
    assert done.outcome.step_ends == [13.5]
    assert (done.requests[1, 0].generated, runs(done.requests[1, 0])) == (2, [(0, 2)])
    assert [tuple(span[:4]) for span in done.outcome.spans if span.gpus == (1,)] == [
        ((1,), 0.0, 6.0, "prefill"),
        ((1,), 6.0, 13.5, "decode"),
    ]
    (left,) = done.outcome.stays[1].columns()["left"]
    assert left == "stopped"


def test_a_run_ends_while_a_replica_takes_new_weights() -> None:
    """All nodes have them at 5.5 s; at 5 s the second step has its batch, at 7 s it has trained and pushed."""
    done = on_two(Rule("under_way", 2, weights=EACH["interrupt"]), [2, 20, 1, 9, 9], spread_s=0.5, pull_s=2.0)
    assert done.outcome.step_ends[-1] == 7.0
    taking = [span for span in done.outcome.spans if span.kind == "sync" and span.gpus == (1,)]
    assert [(span.start_at, span.end_at) for span in taking] == [(6.0, 7.0)]


def test_a_run_ends_while_a_node_switches() -> None:
    """Both have two tokens at 3 s, where the switch begins, of 6 s; the first is trained on and pushed until 5 s."""
    rule, control = Rule("under_way", 2, weights=EACH["interrupt"]), At({1: Reconfigure(0, 2)})
    sizes = tuple(((8, length),) for length in (2, 20, 20))
    done = OpenWorkload(sizes, 1, rule, (1.0,), (1.0,), (2,), costs=TWO_LAYOUTS, control=control).simulate()
    (switch,) = (span for span in done.outcome.spans if span.kind == "switch")
    assert (switch.gpus, switch.start_at, switch.end_at) == ((0, 1), 3.0, done.outcome.step_ends[-1])


def test_a_run_whose_trajectories_are_all_dropped_is_an_error() -> None:
    lost = EnvironmentConfig(on_failure="drop", failures=0.9999)
    work = OpenWorkload(
        (((8, 8),),), 1, two(), (1.0,), (1.0,), costs=COSTS, tools=lost, calls=((ToolCall(1, 1, 5.0),),)
    )
    with pytest.raises(PolicyError, match=r"dropped, .* no end in sight"):
        work.simulate()


@pytest.mark.parametrize("room", [{0: -1}, {0: 1.5}, {"a": 1}, 1.5])
def test_room_is_refused_in_plain_words(room: Any) -> None:
    class Wrong(PerReplica):
        def room(self, view: OpenView) -> Any:
            return room

    with pytest.raises(PolicyError, match="room"):
        on_two(Wrong(), [2, 2])

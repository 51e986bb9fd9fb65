"""Continuous generation worked out by hand: interruption, draining, what is dropped, which prompts come first.

A decode step takes one second however many sequences it has, a prefill of n tokens 1 + n/8 seconds. All numbers are
exact in binary, so the tests compare with ==.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from open_workloads import OpenRun, OpenWorkload, Rule, StepTimes
from reference_open import RefCheck
from workloads import LinearStep, Scripted, StubCosts

from rlsim.errors import PolicyError
from rlsim.sim import scheduler
from rlsim.sim.batching import Batching
from rlsim.sim.continuous import Update
from rlsim.sim.control import Abort, Action, Reconfigure, RolloutControl, RolloutView
from rlsim.sim.request import Request, UpdatedKv
from rlsim.sim.run import simulate
from rlsim.workflow import Call

COSTS = StubCosts({1: LinearStep(a=1.0, p=1 / 8)}, {1: 10**6})


def run(
    lengths: Sequence[int],
    rule: Rule,
    train_s: Sequence[float],
    sync_s: Sequence[float],
    node_gpus: tuple[int, ...] = (1,),
) -> OpenRun:
    """Steps of one prompt of eight tokens with one response, of these lengths one after the other."""
    sizes = tuple(((8, length),) for length in lengths)
    return OpenWorkload(sizes, 1, rule, tuple(train_s), tuple(sync_s), node_gpus, costs=COSTS).simulate()


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


def test_a_prefill_that_an_update_stops_at_its_very_beginning_has_not_begun() -> None:
    done = run([2, 20, 9], Rule("under_way", 2), [0.0, 1.0], [2.0, 1.0])
    assert moments(done, 0) == (4.0, 4.0, 4.0, 6.0)  # the third prompt comes at 4 s too
    assert done.requests[2, 0].started_at == 6.0


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


def test_a_prompt_that_is_too_stale_is_dropped() -> None:
    done = run([2, 6, 9], two(most_stale=0), [1.5, 1.0], [2.0, 1.0])
    # The second prompt is ready at 12.5 s, with tokens of the version before; the step waits for the third, which has
    # had its first token at 11.5 s.
    assert moments(done, 1)[0] == 19.5
    assert positions(done, 1, "trained") == [2]
    assert positions(done, 1, "dropped") == [1]
    assert [rollout.settled.dropped for rollout in done.outcome.rollouts] == [0, 1]
    assert not done.requests[1, 0].aborted


@pytest.mark.parametrize(
    ("order", "taken"), [("ready", [0, 1, 2]), ("longest", [0, 3, 2]), ("oldest", [0, 1, 2]), ("all_equal", [0, 1, 2])]
)
def test_a_step_takes_the_prompts_of_the_lowest_rank(
    order: Literal["ready", "oldest", "longest", "all_equal"], taken: list[int]
) -> None:
    # Four prompts, ready at 6, 7, 8 and 9 s, all of version 0; when the second step begins three of them wait.
    done = run([2, 3, 4, 5], Rule("quota", 300, order), [10.0] * 3, [1.0] * 3)
    assert [moments(done, step)[0] for step in range(3)] == [6.0, 17.0, 28.0]
    assert [positions(done, step, "trained")[0] for step in range(3)] == taken


def test_a_prompt_goes_to_the_replica_with_the_fewest_requests() -> None:
    # Prompts 0 and 1 begin on the first replica, prompt 2 on the second, where it is done first.
    done = run([30, 30, 2, 30], Rule("under_way", 3), [50.0], [1.0], node_gpus=(2,))
    assert [done.requests[at, 0].replica for at in range(4)] == [0, 0, 1, 1]
    assert done.requests[3, 0].started_at == done.requests[2, 0].finished_at == 3.0


def test_where_nothing_is_unfinished_prompts_are_dealt_as_at_the_start() -> None:
    rule = Rule("staleness", 0)  # synchronous: a batch at a time
    sizes = tuple(((8, 2),) for _ in range(4))
    done = OpenWorkload(sizes, 4, rule, (1.0, 1.0), (1.0, 1.0), (2,), costs=COSTS).simulate()
    assert [done.requests[at, 0].replica for at in range(8)] == [0, 0, 1, 1] * 2


def test_a_run_whose_batching_launches_nothing_more_comes_to_a_halt() -> None:
    with pytest.raises(PolicyError, match="step 0 comes to a halt"):
        run([2, 6, 9], two(most_stale=-1), [1.0], [1.0])


class Watcher(RolloutControl):
    """A control that is asked at every finish, and never does anything."""

    def on_finish(self, view: RolloutView) -> None:
        return None


def test_room_is_asked_as_often_whoever_else_is_asked() -> None:
    asked = []
    for control in (RolloutControl(), Watcher()):
        rule = Rule("one_at_a_time", 3)
        sizes = tuple(((8, 2 + i), (8, 5 + 2 * i)) for i in range(5))
        work = OpenWorkload(sizes, 2, rule, (3.0,) * 3, (1.0,) * 3, costs=COSTS)
        simulate(dataclasses.replace(work.simulation(), control=control))
        asked.append(rule.asked)
    assert asked[0] == asked[1]


@dataclasses.dataclass(frozen=True)
class Ticking(Scripted):
    """Notes down the moments of its timer."""

    seen: list[float]
    every_s = 3.0

    def on_timer(self, view: RolloutView) -> None:
        self.seen.append(view.now_s)


def test_a_timer_is_not_asked_at_the_moment_of_the_last_finish() -> None:
    """The first response ends at 3 s, and the next begins with the weights at 9 s; the second has its last at 12 s."""
    control = Ticking([])
    work = OpenWorkload((((8, 2),),) * 2, 1, Rule("quota", 0), (4.0,) * 2, (2.0,) * 2, costs=COSTS)
    assert moments(dataclasses.replace(work, control=control).simulate(), 0) == (3.0, 7.0, 7.0, 9.0)
    assert control.seen == []


@dataclasses.dataclass(frozen=True)
class Once(Scripted):
    """One action, when so many responses have finished."""

    finished: int
    action: Action

    def on_finish(self, view: RolloutView) -> Action | None:
        return self.action if view.finished == self.finished and view.finished_nodes else None


TWO_LAYOUTS = StubCosts({tp: LinearStep(a=1.0, p=1 / 8) for tp in (1, 2)}, {1: 10**6, 2: 10**6}, weights_s=6.0)


def test_a_node_may_change_its_layout_while_an_update_waits_for_it() -> None:
    # The second replica prefills for 11 s. On the first one a response finishes at 6 s, where it would stand still.
    sizes = ((8, 2),), ((80, 9),), ((8, 4),)
    rule, control = Rule("quota", 200), Once(2, Reconfigure(0, 2))
    work = OpenWorkload(sizes, 1, rule, (1.5,), (2.0,), (2,), costs=TWO_LAYOUTS, routing="round_robin", control=control)
    done = work.simulate()
    assert moments(done, 0) == (4.0, 5.5, 14.0, 16.0)  # both replicas have stopped at 11 s; the switch takes 3 s
    assert [(switch.at, switch.to_tp) for switch in done.outcome.switches] == [(11.0, 2)]
    assert [view.replicas for view, _ in rule.asked] == [2, 2, 2]


def test_room_knows_the_layouts_that_the_nodes_have() -> None:
    rule = Rule("under_way", 2)
    work = OpenWorkload(
        (((8, 2),), ((8, 20),)), 1, rule, (30.0,), (1.0,), (2,), costs=TWO_LAYOUTS, control=Once(1, Reconfigure(0, 2))
    )
    work.simulate()
    assert [view.replicas for view, _ in rule.asked] == [2, 2, 2, 1, 1]


def test_a_prompt_is_dropped_when_a_control_has_aborted_a_response() -> None:
    sizes = ((8, 2), (8, 2)), ((8, 9), (8, 4))
    rule = Rule("under_way", 2)
    done = OpenWorkload(sizes, 1, rule, (20.0, 1.0), (1.0, 1.0), costs=COSTS, control=Once(2, Abort((2,)))).simulate()
    assert done.requests[1, 0].aborted
    assert not done.requests[1, 1].aborted
    assert done.requests[1, 1].finished  # the other one goes on; then the prompt is dropped and gives its place back
    assert positions(done, 1, "dropped") == [1, 1]
    assert [rollout.aborted for rollout in done.outcome.rollouts] == [1, 0]
    assert rule.asked[-1][0].dropped == 1


def test_responses_of_one_moment_are_scored_in_the_order_of_their_prompts() -> None:
    # Both finish at 8 s; the second replica has not had anything else to do since 2 s, the first since 4 s.
    sizes, checks = (((8, 6),), ((8, 7),), ((8, 2),)), ((RefCheck((3.0,), 9.0, 1.0),),)
    rule = Rule("quota", 200)
    done = OpenWorkload(sizes, 1, rule, (9.0,), (1.0,), (2,), costs=COSTS, routing="round_robin", checks=checks)
    requests = done.simulate().requests
    assert [requests[at, 0].finished_at for at in range(3)] == [8.0, 8.0, 4.0]
    assert [requests[at, 0].score_started_at for at in range(3)] == [8.0, 11.0, 4.0]


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
    steps = 200
    rule = Rule("staleness", 2, most_stale=1 if drops else None)
    sizes = tuple(((4, 1 + 7 * i % 23), (4, 1 + 11 * i % 40)) for i in range(17))
    times = (2.5,) * steps, (1.0,) * steps
    work = OpenWorkload(sizes, 4, rule, *times, node_gpus=(2,), costs=COSTS)
    counting = Counting(*times, every=20)
    gc.collect()
    before = sum(type(thing) is Request for thing in gc.get_objects())
    outcome = simulate(dataclasses.replace(work.simulation(), times=counting))
    assert sum(len(responses) for responses in outcome.responses) > 2 * 4 * steps
    if drops:
        assert sum(rollout.settled.dropped for rollout in outcome.rollouts) > 10
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
    settled = [rollout.settled for rollout in outcome.rollouts]
    assert sum(one.launched for one in settled) == sum(map(len, outcome.responses))
    assert [one.paused for one in settled] == [int(of_step.paused.sum()) for of_step in outcome.responses]
    assert settled[-1].paused > 0

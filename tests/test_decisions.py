"""What policies decide in made-up moments, worked out by hand."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from workloads import LinearStep, StubCosts

from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.transfer import RESTART, SwitchWay
from rlsim.errors import CapacityError, ConfigError
from rlsim.policies.continuous import BoundedStaleness, SyncQuota
from rlsim.policies.frameworks import AllOnAll, Megatron, ThreeGroups, TwoGroups
from rlsim.policies.laminar import Repack, ReplicaBatches
from rlsim.policies.oppo import Overcommit
from rlsim.policies.pat import BATCHES, PAT
from rlsim.policies.plan import CallPlan, ExplicitPlan
from rlsim.policies.planner import Planner
from rlsim.policies.registry import load_policy
from rlsim.policies.rlhfuse import TailConsolidation
from rlsim.policies.stream_trainer import StreamTrainer
from rlsim.sim.actions import Migrate, Reconfigure, Release
from rlsim.sim.batching import PromptFeed, Unfinished
from rlsim.sim.continuous import OpenView
from rlsim.sim.control import ControlContext, Prompt, RolloutReport
from rlsim.workflow import Workflow, grpo, ppo

TPS = (1, 2, 4)


def context(**changes: Any) -> ControlContext:
    """A node of four GPUs: a decode step of s sequences takes 1/TP + s/10 seconds, a token of a prompt 1 ms.

    A switch takes 8 s shared by the new degree, 1 s of graphs, 8 ms for a token that migrates shared by the four
    GPUs, and 3 s where the degree is new to the node.
    """
    costs = StubCosts(
        {tp: LinearStep(a=1.0 / tp, b=0.1, p=1e-3, tp=tp) for tp in TPS},
        dict.fromkeys(TPS, 10**6),
        weights_s=8.0,
        capture_s=1.0,
        kv_per_token_s=8e-3,
        first_use_s=3.0,
    )
    given = {
        "costs": costs,
        "feasible_tps": TPS,
        "infeasible": {},
        "node_gpus": (4,),
        "cap_tokens": 1000,
        "page_tokens": 16,
        "requests": 12,
        "prompt_tokens": 10,
    }
    return ControlContext(**{**given, **changes})


def running(generated: int, prompt: int = 10, has_kv: bool = True, number: int = 0) -> Any:
    return SimpleNamespace(
        id=number, prompt_tokens=prompt, generated_tokens=generated, context_tokens=prompt + generated, has_kv=has_kv
    )


def moment(replicas: Sequence[Sequence[Any]], tp: int, **more: Any) -> Any:
    """Node 0 as a view shows it: what its replicas hold; responses of 400 to 600 tokens have finished."""
    shown = [
        SimpleNamespace(index=i, tp=tp, gpus=tuple(range(i * tp, (i + 1) * tp)), requests=own)
        for i, own in enumerate(replicas)
    ]
    every = [r for own in replicas for r in own]
    return SimpleNamespace(
        finished_nodes=(0,),
        finished_tokens=(400, 600),
        cap_tokens=1000,
        gpus=lambda node: 4,
        tp=lambda node: tp,
        generated=lambda node: Counter(r.generated_tokens for r in every),
        context_tokens=lambda node: sum(r.context_tokens for r in every),
        requests_on=lambda node: {index: len(own) for index, own in enumerate(replicas)},
        used_tps=lambda node: {tp, *more.get("used", ())},
        replicas=lambda node=0: shown,
        label=more.get("label", ""),
        finished=more.get("finished", 0),
        total=more.get("total", 0),
        unfinished=lambda node=None: len(every),
    )


# PAT ------------------------------------------------------------------------------------------------------------------


def decided(view: Any, moving: StubCosts | None = None, **settings: Any) -> list[Any]:
    pat = PAT(**{"start_tp": 1, "candidates": TPS, "redispatch": False, **settings})
    pat.setup(context(**({"costs": moving, "feasible_tps": (1,)} if moving else {})))
    return pat.on_finish(view)


def test_pat_switches_where_the_gain_is_more_than_the_pause() -> None:
    """One response, `left` tokens before the cap: TP4 saves 0.75 s a token, for 2 + 1 + 3 s and a prefill of 1.24 s."""
    for left, expected in ((9, []), (10, [Reconfigure(0, 4, "recompute")])):
        assert decided(moment([[running(1000 - left, prompt=1)], [], [], []], 1)) == expected, left
    for left, expected in ((5, []), (6, [Reconfigure(0, 4, "recompute")])):  # 3 s less where TP4 was used before
        assert decided(moment([[running(1000 - left, prompt=1)], [], [], []], 1, used=(4,))) == expected, left


def test_pat_moves_kv_the_cheaper_way() -> None:
    """From TP1 a token migrates in 2 ms, or is computed again in 1 ms, and 0.25 s for the iteration."""
    few = [[running(100, prompt=100)], [], [], []]
    assert decided(moment(few, 1)) == [Reconfigure(0, 4, "migrate")]  # 0.4 s against 0.25 + 0.2 s
    many = [[running(300, prompt=100)], [], [], []]
    assert decided(moment(many, 1)) == [Reconfigure(0, 4, "recompute")]  # 0.8 s against 0.25 + 0.4 s
    waiting = [[running(300, prompt=100, has_kv=False)], [], [], []]
    assert decided(moment(waiting, 1)) == [Reconfigure(0, 4, "migrate")]  # nothing to move


def test_pat_switches_as_it_is_told() -> None:
    """Weights loaded: 8 s, not 2. All graphs: 2 s, not 1. A restart: 8 + 2 + 30 s, and the prefill of 1.24 s."""
    left = [[running(960, prompt=1)], [], [], []]  # 30 s saved at most
    forced = {"kv": "migrate", "weights": "reload", "graphs": "all"}  # 0.96 · 2 + 8 + 2 + 3 s
    assert decided(moment(left, 1), **forced) == [Reconfigure(0, 4, "migrate", SwitchWay("reload", "all"))]
    assert decided(moment(left, 1), kv="recompute") == [Reconfigure(0, 4, "recompute")]
    assert decided(moment(left, 1), restart=True) == []
    early = [[running(940, prompt=1)], [], [], []]  # 45 s against 40 + 1.2
    for kv in ("migrate", "recompute", "cheaper"):
        assert decided(moment(early, 1), restart=True, kv=kv) == [Reconfigure(0, 4, "recompute", RESTART)]
    assert Reconfigure(0, 4, "migrate", RESTART).kv == "recompute"


def test_pat_with_a_fixed_switch_point() -> None:
    """It switches however few tokens are left, to the largest candidate, and once; nothing else makes it switch."""
    for tokens in (100, 999):
        held = [[running(tokens, prompt=1)] * 3, [], [], []]
        assert decided(moment(held, 1), switch_at=2) == []
        assert decided(moment(held, 1), switch_at=3, kv="migrate") == [Reconfigure(0, 4, "migrate")]
        assert decided(moment([[running(tokens, prompt=1)] * 3], 4), switch_at=3) == []
    assert decided(moment([[running(100, prompt=1)] * 3, [], [], []], 1), switch_at=3, candidates=(1, 2))[0].tp == 2


def test_pats_predictor_errs_by_the_seed() -> None:
    """With 0 it is the profile itself; else every profiled batch of every TP is off by a factor of its own."""

    def steps(seed: int, error: float) -> dict[tuple[int, int], float]:
        pat = PAT(start_tp=1, candidates=TPS, predictor_error=error)
        pat.setup(context(seed=seed))
        return {(tp, n): pat._profiles[tp].decode(n).step_s(1000.0 * n) for tp in TPS for n in BATCHES}

    exact = steps(1, 0.0)
    assert exact == steps(2, 0.0)
    assert steps(1, 0.04) == steps(1, 0.04) != steps(2, 0.04)
    errors = [abs(steps(seed, 0.04)[key] / exact[key] - 1) for seed in range(50) for key in exact]
    assert np.mean(errors) == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize(
    ("tp", "left", "expected_s"),
    [
        (4, [10], 3.5),  # 10 · 0.35
        (4, [10, 6], 6 * 0.45 + 4 * 0.35),
        (4, [10, 6, 6], 6 * 0.55 + 4 * 0.35),
        (2, [10], 6.0),  # one of two replicas: 10 · 0.6
        (2, [10] * 2, 6.0),
        (2, [10] * 3, (7.0 + 6.0) / 2),  # one and a half each
        (2, [10] * 4, 7.0),
        (2, [10] * 5, (8.0 + 7.0) / 2),
        (1, [10] * 5, (12.0 + 3 * 11.0) / 4),  # one and a quarter each
        (2, [10, 10, 4, 4], 4 * 0.7 + 6 * 0.6),
    ],
)
def test_pats_remaining_time_by_hand(tp: int, left: Sequence[int], expected_s: float) -> None:
    pat = PAT(start_tp=1, candidates=TPS)
    pat.setup(context())
    groups = sorted(Counter(left).items(), reverse=True)
    batch = np.array([(tokens, 100.0, count) for tokens, count in groups])
    assert pat._remaining_s(4, tp, batch, []) == pytest.approx(expected_s)


def test_pat_begins_with_the_shortest_step_of_the_full_batch() -> None:
    """Twelve requests on four GPUs: 1.3, 1.1, 1.45 s a step by TP; four: 1.1, 0.7, 0.65; forty: 2.0, 2.5, 4.25."""
    for requests, nodes, expected in ((12, 1, 2), (4, 1, 4), (40, 1, 1), (12, 3, 4)):
        known = context(requests=requests, node_gpus=(4,) * nodes)
        pat = PAT(candidates=TPS)
        pat.setup(known)
        assert pat.initial_tp(known) == expected


def test_pat_may_wait_for_the_replica_that_holds_most() -> None:
    """Four responses, all on one of four replicas of TP1: 1.4 s a step as they lie, 1.1 s if they were spread.

    At TP4 a step takes 0.65 s, after 2 + 1 s of switching and a prefill of 0.25 s and 1 ms a token. With n tokens to go
    these are 0.65·n + 3.25 + 4·(1001 − n)/1000 s: less than 1.4·n from ten on, than 1.1·n from sixteen on.
    """
    for spread, last in (("actual", 9), ("even", 15)):
        for left, expected in ((last, []), (last + 1, [Reconfigure(0, 4, "recompute")])):
            held = [[running(1000 - left, prompt=1)] * 4, [], [], []]
            assert decided(moment(held, 1, used=(4,)), spread=spread) == expected, (spread, left)


@pytest.mark.parametrize(
    ("held", "move_s", "expected"),
    [
        # A step of s sequences takes 1 + s/10 seconds; all have 10 tokens to go: 13 s, or 12 s and the move.
        ([3, 1], 0.99, Migrate((2,), 1)),
        ([3, 1], 1.01, None),
        ([2, 1], 0.0, None),  # as even as they can be
        ([1, 5], 1.99, Migrate((5, 4), 0)),  # 15 s, or 13 s: the two with the least context
        ([1, 5], 2.01, None),
    ],
)
def test_pat_deals_anew_where_that_pays(held: Sequence[int], move_s: float, expected: Migrate | None) -> None:
    costs = StubCosts({1: LinearStep(a=1.0, b=0.1)}, {1: 10**6}, transfer_base_s=move_s)
    numbers = iter(range(100))
    replicas = [[running(990, prompt=90 - n, number=n) for n in (next(numbers) for _ in range(k))] for k in held]
    found = decided(moment(replicas, 1), costs, redispatch=True)
    assert found == ([expected] if expected else [])
    waiting = [[running(990, number=n, has_kv=n != 0) for n in range(3)], [running(990, number=3)]]
    assert decided(moment(waiting, 1), costs, redispatch=True) == [Migrate((0,), 1)], "its KV is not there to move"


# The planner ----------------------------------------------------------------------------------------------------------


def test_a_round_by_the_profile_by_hand() -> None:
    """Two replicas of TP2: a step of s sequences with T tokens takes 0.5 + s/10 + T/100 s, a prefilled token 1 ms.

    Of four responses the longest goes with the third longest: 220 + 6 and 240 + 3 tokens of prompt and response.
    """
    costs = StubCosts({2: LinearStep(a=0.5, b=0.1, t=0.01, p=1e-3, tp=2)}, {2: 10**6})
    loads = [(210, 4), (220, 6), (230, 2), (240, 3)]

    def round_s(**changes: Any) -> float:
        planner = Planner(start_tp=2)
        planner.setup(context(**{"costs": costs, "feasible_tps": (2,), **changes}))
        return planner.round_s(2, loads)

    prefill_s = 0.5 + 0.460
    together_s = sum(0.5 + 0.2 + 0.01 * tokens for tokens in (460, 462, 464))
    last_s = sum(0.5 + 0.1 + 0.01 * tokens for tokens in (223, 224, 225))
    assert round_s() == pytest.approx(prefill_s + together_s + last_s)
    in_turn_s = 2 * sum(0.5 + 0.1 + 0.01 * tokens for tokens in (230, 231, 232))
    assert round_s(max_num_seqs=1) == pytest.approx(prefill_s + in_turn_s + last_s)
    for tokens, both in ((466, True), (465, False)):  # 230 tokens each in the mean, and three more
        room = StubCosts(costs.steps, {2: tokens})
        expected_s = prefill_s + (together_s if both else in_turn_s) + last_s
        assert round_s(costs=room, page_tokens=1) == pytest.approx(expected_s)
    planner = Planner(start_tp=2)
    planner.setup(context(costs=costs, feasible_tps=(2,)))
    assert planner.round_s(2, []) == 0.0


# Laminar --------------------------------------------------------------------------------------------------------------


def repacked(before: Sequence[Sequence[int]], now: Sequence[Sequence[int]], **more: Any) -> list[tuple[int, int]]:
    """From which replica to which: each holds responses of so many generated tokens (prompts of 10), before and now.

    A response keeps its place in the list as its number, 10 · replica + i; of those before, the last ones are gone. A
    replica has 100 pages of 16 tokens; `waits` has no KV cache, `version` is of a replica's weights.
    """
    repack = Repack(**more.get("settings", {"max_batch": 4}))
    repack.setup(context(costs=StubCosts({1: LinearStep(a=1.0)}, {1: 100}), feasible_tps=(1,)))

    def look(lengths: Sequence[Sequence[int]], waits: int | None) -> list[Any]:
        held = [
            [running(n, number=10 * at + i, has_kv=10 * at + i != waits) for i, n in enumerate(own)]
            for at, own in enumerate(lengths)
        ]
        shown = moment(held, 1)
        for replica in shown.replicas():
            replica.version = more.get("version", {}).get(replica.index, 0)
        return repack.on_timer(shown)

    assert look(before, None) == []
    moves = look(now, more.get("waits"))
    assert all(move.kv == "recompute" and len({i // 10 for i in move.requests}) == 1 for move in moves)
    return [(move.requests[0] // 10, move.to) for move in moves]


def test_what_is_left_of_replicas_that_end_goes_to_the_fullest_that_has_room() -> None:
    full = [[100] * 4] * 3
    assert repacked(full, [[200], [150], [160]]) == [(1, 0), (2, 0)]  # the emptiest first
    assert repacked(full, [[200], [150, 150], [160]]) == [(2, 1), (0, 1)]  # 320 tokens, then 490
    assert repacked(full, [[430], [150], [160]]) == [(1, 2)]  # 440 tokens: no less than before
    assert repacked(full, [[429], [150], [160]]) == [(1, 0), (2, 0)]
    assert repacked(full, [[200], [], [160]]) == [(2, 0)]
    # What keeps responses where they are.
    full = [[100] * 4] * 2
    assert repacked(full, [[150], [160]]) == [(0, 1)]
    assert repacked(full, [[150], [160]], waits=0) == []  # one waits for its prefill
    assert repacked(full, [[150], [160]], version={1: 1}) == []  # other weights
    assert repacked(full, [[150], [160]], settings={"max_batch": 1}) == []
    assert repacked(full, [[150] * 2, [90] * 2], settings={"max_batch": 3}) == []
    # 160 + 170 tokens are more than 0.2 of 1,600, and no more than 0.20625.
    assert repacked(full, [[150], [160]], settings={"max_batch": 4, "utilization": 0.2}) == []
    assert repacked(full, [[150], [160]], settings={"max_batch": 4, "utilization": 0.20625}) == [(0, 1)]
    assert repacked([[100] * 4, [100]], [[150], [120, 20]]) == []  # another has begun there


# Consolidation of the tail --------------------------------------------------------------------------------------------


def gathered(
    held: Sequence[int], total: int, pages: int = 10**6, step: LinearStep | None = None, **settings: Any
) -> Any:
    """What RLHFuse asks for where replicas of TP1 hold so many responses (prompts of 10, up to 1,000 more tokens each).

    They are numbered from 0 on; a page holds 16 tokens.
    """
    control = TailConsolidation(**settings)
    costs = StubCosts({1: step or LinearStep(a=1.0)}, {1: pages})
    control.setup(context(costs=costs, feasible_tps=(1,)))
    numbers = iter(range(sum(held)))
    replicas = [[running(5, number=next(numbers)) for _ in range(count)] for count in held]
    return control.on_finish(moment(replicas, 1, total=total))


def test_the_tail_goes_to_as_few_replicas_as_hold_it_at_full_length() -> None:
    """Four responses of 1,010 tokens: two in 127 pages, one in 126. To the fullest, and there to the emptiest."""
    assert gathered([2, 1, 1, 0], 20, 127, max_batch=9) == [Migrate((3,), 1), Release((2, 3))]
    assert gathered([2, 1, 1, 0], 20, 126, max_batch=9) == [Release((3,))]
    assert gathered([2, 1, 1, 0], 20, 63, max_batch=9) is None  # 1,008 tokens: five replicas would have to stay
    assert gathered([2, 1, 1], 20, 126, max_batch=9) is None  # all three stay
    assert gathered([2, 1, 1, 0], 20, max_batch=9) == [Migrate((2,), 0), Migrate((3,), 0), Release((1, 2, 3))]
    assert gathered([0, 1, 2, 1], 20, 127, max_batch=9) == [Migrate((3,), 1), Release((3, 0))]
    # one more on the second replica, then both have two
    assert gathered([2, 1, 1, 1], 25, 190, max_batch=9) == [Migrate((3,), 1), Migrate((4,), 0), Release((2, 3))]


def test_the_tail_decodes_nearly_as_fast_as_one_sequence() -> None:
    """A step of one takes 1.1 s, of two 1.2 s, still less than 1.25 times that, of four 1.4 s.

    Where tokens count, 0.1 ms each, and not sequences, one with half of the cap, 500 tokens, takes 1.05 s, four with
    2,000 take 1.2 s, and eight 1.4 s.
    """
    assert gathered([1] * 4, 20, step=LinearStep(a=1.0, b=0.1))[-1] == Release((2, 3))
    assert gathered([1] * 4, 20, step=LinearStep(a=1.0, t=1e-4))[-1] == Release((1, 2, 3))
    assert gathered([1] * 5, 25, step=LinearStep(a=1.0, t=1e-4))[-1] == Release((2, 3, 4))
    assert gathered([1] * 4, 20, step=LinearStep(b=1.0)) is None  # two take twice as long as one
    assert gathered([1] * 4, 20, step=LinearStep(a=1.0), max_batch=3)[-1] == Release((2, 3))


# The stream trainer ---------------------------------------------------------------------------------------------------


def streaming(
    pages: int, history: Sequence[int] = (100,) * 10, page_tokens: int = 16, **settings: Any
) -> StreamTrainer:
    """Of a step of ten responses, after one of such lengths."""
    trainer = StreamTrainer(**settings)
    trainer.setup(context(costs=StubCosts({}, {1: pages}), page_tokens=page_tokens, requests=10))
    trainer.next_tp(RolloutReport(0, 1, 1.0, 0, tuple(history), ""))
    return trainer


def fits(pages: int, per_page: int = 16, history: Sequence[int] = (100,) * 10) -> bool:
    """Whether two replicas shrink to one of so many pages: six responses of 10 + 50 tokens, which will end at 100.

    The last moment before that among those looked at is 45 tokens on: 6 · 105 tokens.
    """
    trainer = streaming(pages, history, page_tokens=per_page)
    action = trainer.on_finish(moment([[running(50)] * 3, [running(50)] * 3], 1, finished=2))
    assert action in (None, Release((1,)))
    return action is not None


def test_the_stream_trainer_releases_half_if_the_rest_can_hold_the_peak() -> None:
    assert not fits(39)  # 624 tokens
    assert fits(40)
    assert not fits(629, per_page=1)
    assert fits(630, per_page=1)
    assert not fits(10**6, history=()), "not without a history"
    nothing = moment([[], []], 1, finished=2)
    assert streaming(10**6).on_finish(nothing) is None, "nothing runs: rewards decide what comes next"


def test_the_stream_trainer_tries_each_milestone_once_and_releases_once_a_step() -> None:
    trainer = streaming(40)
    crowded = [[running(50)] * 4, [running(50)] * 3]
    room = [[running(50)] * 3, [running(50)] * 3]
    assert trainer.on_finish(moment(room, 1, finished=1)) is None  # a tenth: before the first milestone
    assert trainer.on_finish(moment(crowded, 1, finished=2)) is None
    assert trainer.on_finish(moment(room, 1, finished=2)) is None  # 0.20 has been tried
    assert trainer.on_finish(moment(room, 1, finished=3)) == Release((1,))
    assert trainer.on_finish(moment(room, 1, finished=4)) is None
    trainer.next_tp(RolloutReport(1, 1, 1.0, 0, (100,) * 10, ""))
    assert trainer.on_finish(moment(room, 1, finished=5)) == Release((1,))
    named = streaming(40, (), rounds=("long",), trigger=0.5)
    assert named.on_finish(moment(room, 1, finished=5, label="short")) is None
    assert named.on_finish(moment(room, 1, finished=5, label="long")) == Release((1,))
    assert streaming(10**6, (), trigger=0.5).on_finish(moment([[running(50)]], 4, finished=5)) is None, (
        "it splits no replica"
    )


# Settings that the papers give ----------------------------------------------------------------------------------------


def test_room_of_rules_by_hand() -> None:
    """8 prompts a step after 2 updates: 6 run, 5 wait, 20 were taken, 1 dropped; 3 were left, 4 launched since."""
    view = OpenView(8, 2, 6, 5, 20, 1, 4, (1, 3), 4, 3)
    for threshold, per_replica, room in ((0.5, None, 5), (0.5, 2, 2), (0.0, None, 1), (0.0, 16, 1), (0.5, 1, 0)):
        assert SyncQuota(staleness_threshold=threshold, per_replica=per_replica).room(view) == room
    assert SyncQuota(staleness_threshold=0, per_replica=None).room(view._replace(left_at_update=5)) == 0
    for given, room in (
        ({"eta": 1}, 1),  # 8 * (2 + 1 + 1) - 31
        ({"eta": 1.5}, 5),
        ({"eta": 1.5, "concurrent": 9}, 3),
        ({"eta": 1.5, "concurrent_batches": 1}, 2),
        ({"eta": 1.5, "queue": 5}, 0),
        ({"eta": 1.5, "queue": 6}, 5),
        ({"eta": 0}, 0),
    ):
        assert BoundedStaleness(**given).room(view) == room
    for given, rooms in (({"eta": 1.5}, {1: 2, 3: 2}), ({"eta": 1.5, "per_replica": 4}, {1: 4, 3: 1})):
        assert ReplicaBatches(**given).room(view) == rooms


@pytest.mark.parametrize(("waiting", "new"), [(0, 6), (5, 1), (6, 0), (8, 0)])
def test_overcommit_fills_up_to_the_batch_and_delta(waiting: int, new: int) -> None:
    """Two prompts and four beyond them, less those that wait; no new one where more than that wait."""
    ways, feed = Overcommit(delta=4), PromptFeed(2, 1)
    ways.keep([Unfinished(Prompt(100 + i), (5,), (False,), (0,)) for i in range(waiting)])
    launch = ways.launch(feed)
    assert [prompt.position for prompt in launch.resume] == [100 + i for i in range(waiting)]
    assert [prompt.position for prompt in launch.prompts] == list(range(new))
    assert ways.waiting() == 0, "they are on their way"


# Placements -----------------------------------------------------------------------------------------------------------


def test_megatron_shards_no_more_than_the_optimizer_over_a_pipeline() -> None:
    """Two nodes of two GPUs: TP2 and DP2 under the experiment's ZeRO stage, or TP2 and PP2 if that does not fit."""

    def layout(fits: Callable[[int], bool], zero_stage: int) -> TrainStrategy:
        def check(plan: Any) -> None:
            if not fits(plan.of("train").strategy.pp):
                raise CapacityError("too large")

        style, cluster = TrainStrategy(zero_stage=zero_stage, sequence_parallel=True), SimpleNamespace(gpus_per_node=2)
        return Megatron().plan(known(4, grpo(), style=style, cluster=cluster, check=check)).of("train").strategy

    flat = layout(lambda pp: True, 3)
    assert (flat.dp, flat.tp, flat.pp, flat.zero_stage, flat.sequence_parallel) == (2, 2, 1, 3, True)
    piped = [layout(lambda pp: pp == 2, stage) for stage in (0, 1, 2, 3)]
    assert [(s.dp, s.tp, s.pp, s.zero_stage) for s in piped] == [(1, 2, 2, stage) for stage in (0, 1, 1, 1)]
    with pytest.raises(CapacityError, match="too large"):
        layout(lambda pp: False, 0)


PPO = {"generate", "reward_score", "ref_log_prob", "values", "train", "train_critic"}


def known(gpus: int, workflow: Workflow | None = None, **more: Any) -> Any:
    """What a plan is made of: PPO with a reward model, or another workflow, on so many GPUs."""
    given = {"workflow": workflow or ppo(), "reward": None, "style": TrainStrategy(), "degrees": {}}
    given["training"] = lambda count: TrainStrategy(dp=count)
    return SimpleNamespace(gpus=tuple(range(gpus)), **given | more)


def placed(placing: Any, gpus: int, workflow: Workflow | None = None) -> dict[str, tuple[int, ...]]:
    """The GPUs of every call but the transfers."""
    given = known(gpus, workflow)
    plan = placing.plan(given)
    every = {call.name: plan.of(call.name) for call in given.workflow.calls if call.kind not in ("sync", "reward")}
    assert all(at.strategy is None or at.strategy.gpus == len(at.gpus) for at in every.values())
    return {name: at.gpus for name, at in every.items()}


def test_trl_scores_on_the_last_gpu() -> None:
    assert placed(AllOnAll(scorer_apart=True), 4) == {**dict.fromkeys(PPO, (0, 1, 2)), "reward_score": (3,)}
    assert placed(AllOnAll(scorer_apart=True), 2) == {**dict.fromkeys(PPO, (0,)), "reward_score": (1,)}
    with pytest.raises(ConfigError, match="two GPUs or more"):
        placed(AllOnAll(scorer_apart=True), 1)


def test_nemo_aligner_halves_the_gpus() -> None:
    critics = dict.fromkeys(("values", "train_critic", "reward_score"), (3, 4, 5))
    assert placed(TwoGroups(), 6) == {**dict.fromkeys(PPO, (0, 1, 2)), **critics}
    assert placed(TwoGroups(), 2)["values"] == (1,)
    for gpus, workflow in ((1, ppo()), (6, grpo())):
        with pytest.raises(ConfigError, match="need a critic or a reward model"):
            placed(TwoGroups(), gpus, workflow)


def test_openrlhf_generates_on_its_share_and_halves_the_rest() -> None:
    critics = dict.fromkeys(("values", "train_critic", "reward_score"), (6, 7))
    actors = dict.fromkeys(("train", "ref_log_prob"), (4, 5))
    assert placed(ThreeGroups(), 8) == {"generate": (0, 1, 2, 3), **actors, **critics}
    assert placed(ThreeGroups(rollout=0.25), 8)["generate"] == (0, 1)
    assert placed(ThreeGroups(), 4, grpo())["train"] == (2, 3)  # neither critic nor reward model
    assert placed(ThreeGroups(rollout=0.34), 3)["values"] == (2,)
    for gpus, rollout, workflow in ((8, 0.05, ppo()), (8, 0.95, ppo()), (2, 0.5, ppo()), (1, 0.4, grpo())):
        with pytest.raises(ConfigError, match="cannot be cut into the groups"):
            placed(ThreeGroups(rollout=rollout), gpus, workflow)


def test_deepspeed_chat_runs_every_call_on_all_gpus_under_zero3_and_without_graphs() -> None:
    for graphs in (True, False):
        plan = AllOnAll(graphs=graphs, zero_stage=3).plan(known(2))
        assert {plan.of(name).gpus for name in PPO} == {(0, 1)}
        stages = {at.strategy.zero_stage for name in PPO - {"generate"} if (at := plan.of(name)).strategy is not None}
        assert stages == {3}
        assert plan.of("generate").graphs is graphs
        assert plan.of("values").graphs


def test_a_plan_spelled_out_fills_its_gpus() -> None:
    """What it does not say is as training has it, but a pipeline shards no more than the optimizer."""
    calls = {
        "generate": CallPlan(), "reward_score": CallPlan(gpus="3"), "ref_log_prob": CallPlan(gpus="2-3"),
        "values": CallPlan(gpus="0-3", tp=2), "train": CallPlan(gpus="0-3", tp=2, pp=2),
        "train_critic": CallPlan(gpus="0-3", pp=2, zero_stage=0),
    }  # fmt: skip
    given = known(4, style=TrainStrategy(zero_stage=3, sequence_parallel=True))
    plan = ExplicitPlan(calls=calls).plan(given)
    found = {name: (plan.of(name).gpus, plan.of(name).strategy) for name in calls}
    shapes = {
        name: (gpus, s and (s.dp, s.tp, s.pp, s.zero_stage, s.sequence_parallel)) for name, (gpus, s) in found.items()
    }
    assert shapes == {
        "generate": ((0, 1, 2, 3), None),
        "reward_score": ((3,), (1, 1, 1, 3, False)),
        "ref_log_prob": ((2, 3), (2, 1, 1, 3, False)),
        "values": ((0, 1, 2, 3), (2, 2, 1, 3, True)),
        "train": ((0, 1, 2, 3), (1, 2, 2, 1, True)),
        "train_critic": ((0, 1, 2, 3), (2, 1, 2, 0, False)),
    }
    with pytest.raises(ConfigError, match=r"train: DP 1 × TP 3 × PP 1 × CP 1 are not its 4 GPUs"):
        ExplicitPlan(calls=calls | {"train": CallPlan(gpus="0-3", tp=3)}).plan(given)


@pytest.mark.parametrize("text", ["0:7", "some", "1-", "-3", ""])
def test_gpus_of_a_call_are_all_or_a_range(text: str) -> None:
    with pytest.raises(ValidationError, match="expected `all`, or GPU numbers such as 0-7"):
        CallPlan(gpus=text)
    assert [CallPlan(gpus=gpus).gpus for gpus in ("all", "3", "0-7")] == ["all", "3", "0-7"]


@pytest.mark.parametrize("home", ["simpy:Environment", "numpy:array", "numpy:pi"])
def test_what_is_no_part_of_a_system_is_refused(home: str) -> None:
    with pytest.raises(ConfigError, match="is no part of a system"):
        load_policy(home)

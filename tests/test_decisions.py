"""What policies decide in made-up moments, worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from workloads import LinearStep, StubCosts

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError
from rlsim.policies.frameworks import Megatron
from rlsim.policies.oppo import Overcommit
from rlsim.policies.pat import PAT
from rlsim.policies.plan import CallPlan
from rlsim.policies.planner import Planner
from rlsim.policies.reward_scheduler import AdaptiveTimeout
from rlsim.policies.rollpacker import RollPacker
from rlsim.policies.stream_trainer import StreamTrainer
from rlsim.policies.tail_batching import TailBatching
from rlsim.sim.control import ControlContext, Reconfigure, Release, RolloutReport
from rlsim.workflow import grpo

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


def running(generated: int, prompt: int = 10, has_kv: bool = True) -> Any:
    return SimpleNamespace(
        prompt_tokens=prompt, generated_tokens=generated, context_tokens=prompt + generated, has_kv=has_kv
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
        used_tps=lambda node: {tp, *more.get("used", ())},
        replicas=lambda node=0: shown,
        label=more.get("label", ""),
        finished=more.get("finished", 0),
    )


# PAT ------------------------------------------------------------------------------------------------------------------


def decided(view: Any, **settings: Any) -> list[Any]:
    pat = PAT(start_tp=1, candidates=TPS, **settings)
    pat.setup(context())
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


def test_pat_stays_where_nobody_is_beyond_the_only_length_that_was_seen() -> None:
    view = moment([[running(400)], [], [], []], 1)
    view.finished_tokens = (400, 400)
    assert decided(view) == []
    view = moment([[running(401)], [], [], []], 1)
    view.finished_tokens = (400, 400)
    assert decided(view) != []


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


# The planner ----------------------------------------------------------------------------------------------------------


def test_the_planner_remembers_eight_rounds() -> None:
    """Of nine rounds of one response each, 0 to 800 tokens long, the typical one has the lengths of the last eight."""
    planner = Planner(start_tp=1)
    planner.setup(context())
    seen: list[Any] = []
    planner.__class__ = type("Watched", (Planner,), {"round_s": lambda self, tp, loads: seen.append(loads) or 1.0})
    for tokens in range(0, 900, 100):
        planner.next_tp(RolloutReport(0, 1, 1.0, 1, (), "", "", ((10, tokens),)))
    assert seen[-1] == [(10, 500)]


# The stream trainer ---------------------------------------------------------------------------------------------------


def fits(pages: int, per_page: int = 16, history: Sequence[int] = (100,) * 10) -> bool:
    """Whether two replicas shrink to one of so many pages: six responses of 10 + 50 tokens, which will end at 100.

    The last moment before that among those looked at is 45 tokens on: 6 · 105 tokens.
    """
    trainer = StreamTrainer()
    costs = StubCosts({}, {1: pages})
    trainer.setup(context(costs=costs, page_tokens=per_page, requests=10))
    trainer.next_tp(RolloutReport(0, 1, 1.0, 0, tuple(history), ""))
    action = trainer.on_finish(moment([[running(50)] * 3, [running(50)] * 3], 1, finished=2))
    assert action in (None, Release((1,)))
    return action is not None


def test_the_stream_trainer_releases_half_if_the_rest_can_hold_the_peak() -> None:
    assert not fits(39)  # 624 tokens
    assert fits(40)
    assert not fits(629, per_page=1)
    assert fits(630, per_page=1)
    assert not fits(10**6, history=()), "not without a history"


def test_the_stream_trainer_tries_each_milestone_once_and_releases_once_a_step() -> None:
    trainer = StreamTrainer()
    trainer.setup(context(costs=StubCosts({}, {1: 40}), requests=10))
    trainer.next_tp(RolloutReport(0, 1, 1.0, 0, (100,) * 10, ""))
    crowded = [[running(50)] * 4, [running(50)] * 3]
    room = [[running(50)] * 3, [running(50)] * 3]
    assert trainer.on_finish(moment(room, 1, finished=1)) is None  # a tenth: before the first milestone
    assert trainer.on_finish(moment(crowded, 1, finished=2)) is None
    assert trainer.on_finish(moment(room, 1, finished=2)) is None  # 0.20 has been tried
    assert trainer.on_finish(moment(room, 1, finished=3)) == Release((1,))
    assert trainer.on_finish(moment(room, 1, finished=4)) is None
    trainer.next_tp(RolloutReport(1, 1, 1.0, 0, (100,) * 10, ""))
    assert trainer.on_finish(moment(room, 1, finished=5)) == Release((1,))


def test_the_stream_trainer_acts_in_the_rounds_that_are_named_and_splits_no_replica() -> None:
    room = [[running(50)] * 3, [running(50)] * 3]
    trainer = StreamTrainer(rounds=("long",), trigger=0.5)
    trainer.setup(context(costs=StubCosts({}, {1: 40}), requests=10))
    assert trainer.on_finish(moment(room, 1, finished=5, label="short")) is None
    assert trainer.on_finish(moment(room, 1, finished=4, label="long")) is None
    assert trainer.on_finish(moment(room, 1, finished=5, label="long")) == Release((1,))
    one = StreamTrainer(trigger=0.5)
    one.setup(context(requests=10))
    assert one.on_finish(moment([[running(50)]], 4, finished=5)) is None


# Settings that the papers give ----------------------------------------------------------------------------------------


def test_published_settings() -> None:
    """RollPacker: η 1.25, preemptions 5% up, four quiet rounds, 2 s and 1.5 anchors for a test case, milestones
    from 20% to 50%. PAT: the degrees of a node of eight."""
    assert (TailBatching().eta, RollPacker().eta) == (1.25, 1.25)
    assert (Planner().rise, Planner().quiet_steps) == (1.05, 4)
    assert (AdaptiveTimeout().least, AdaptiveTimeout().factor) == (2.0, 1.5)
    assert StreamTrainer().milestones == (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
    assert PAT().candidates == (1, 2, 4, 8)


def test_overcommit_begins_and_stays_within_its_settings() -> None:
    ways = Overcommit()
    assert (ways.delta_start, ways.delta_min, ways.delta_max, ways.window) == (8, 4, 64, 5)


# Placements -----------------------------------------------------------------------------------------------------------


def test_megatron_shards_no_more_than_the_optimizer_over_a_pipeline() -> None:
    """Two nodes of two GPUs: TP2 and DP2 under the experiment's ZeRO stage, or TP2 and PP2 if that does not fit."""

    def layout(fits: Callable[[int], bool], zero_stage: int) -> TrainStrategy:
        def check(plan: Any) -> None:
            if not fits(plan.of("train").strategy.pp):
                raise CapacityError("too large")

        known = SimpleNamespace(
            gpus=(0, 1, 2, 3), cluster=SimpleNamespace(gpus_per_node=2), style=TrainStrategy(zero_stage=zero_stage),
            workflow=grpo(), reward=None, check=check,
        )  # fmt: skip
        strategy = Megatron().plan(known).of("train").strategy  # type: ignore[arg-type]
        assert strategy is not None
        return strategy

    flat = layout(lambda pp: True, 3)
    assert (flat.dp, flat.tp, flat.pp, flat.zero_stage, flat.sequence_parallel) == (2, 2, 1, 3, True)
    piped = [layout(lambda pp: pp == 2, stage) for stage in (0, 1, 2, 3)]
    assert [(s.dp, s.tp, s.pp, s.zero_stage) for s in piped] == [(1, 2, 2, stage) for stage in (0, 1, 1, 1)]
    with pytest.raises(CapacityError, match="too large"):
        layout(lambda pp: False, 0)


@pytest.mark.parametrize("text", ["0:7", "some", "1-", "-3", ""])
def test_gpus_of_a_call_are_all_or_a_range(text: str) -> None:
    with pytest.raises(ValidationError, match="expected `all`, or GPU numbers such as 0-7"):
        CallPlan(gpus=text)
    assert [CallPlan(gpus=gpus).gpus for gpus in ("all", "3", "0-7")] == ["all", "3", "0-7"]

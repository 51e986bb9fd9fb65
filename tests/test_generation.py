"""Generation stages one after the other, worked out by hand: their layouts, the pauses between them, their GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from test_systems import simulated
from workloads import At, LinearStep, StubCosts

from rlsim.cost.transfer import RESTART
from rlsim.errors import CapacityError, PolicyError
from rlsim.models.hardware import load_cluster
from rlsim.sim.actions import Abort, Reconfigure
from rlsim.sim.control import Controls, Prompt, RolloutControl, RolloutReport
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow

# A switch: 7 s of weights (by the new degree), 3 s of graphs, 5 s where the degree is new to the node.
COSTS = StubCosts(
    {tp: LinearStep(a=1.0, tp=tp) for tp in (1, 2)}, {1: 40, 2: 100}, weights_s=7.0, capture_s=3.0, first_use_s=5.0
)


@dataclass
class Planned(RolloutControl):
    """Begins at TP1, then with these layouts; keeps what it was told of each stage."""

    tps: Sequence[int | None]

    def __post_init__(self) -> None:
        self.reports: list[RolloutReport] = []

    def next_tp(self, report: RolloutReport) -> int | None:
        self.reports.append(report)
        return self.tps[report.step]


def generate(
    control: RolloutControl,
    sizes: Sequence[tuple[int, int]],
    steps: int = 1,
    nodes: int = 1,
    tp: int = 1,
    costs: StubCosts = COSTS,
    gpus: int = 2,
    **settings: Any,
) -> Outcome:
    """Steps of so many prompt and response tokens, on nodes of so many GPUs; pages of one token."""

    def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
        each = [(prompt.position, *sizes[prompt.position % len(sizes)]) for prompt in launched]
        return [Request(first_id + i, *size) for i, size in enumerate(each)]

    return simulated(
        Workflow("generation", (Call("generate", "generate", "actor"),), (Edge("generate", "generate", lag=1),)),
        Plan({"generate": Placement(tuple(range(gpus * nodes)))}),
        {0: [n for _, n in sizes]},
        len(sizes),
        cluster=load_cluster("2x8xh100").model_copy(update={"gpus_per_node": gpus, "nodes": nodes}),
        control=control,
        initial_tp=tp,
        requests=requests,
        costs=costs,
        feasible_tps=tuple(costs.steps),
        config=EngineConfig(page_tokens=1, watermark=0.0, **settings),
        steps=steps,
    )


def ends(outcome: Outcome) -> list[float]:
    return [call.end_at for call in outcome.calls]


def test_a_newly_planned_layout_is_captured_before_its_first_step() -> None:
    """The sync has brought the weights: graphs and groups are what is left, and groups are made once."""
    control = Planned([2, None, 1, None])
    outcome = generate(control, [(1, 3)] * 2, steps=4)
    # A step takes 3 s (a prefill and two decodes); 3 + 5 s before the second, 3 s before the fourth.
    assert ends(outcome) == [3.0, 3 + 8 + 3, 17.0, 17 + 3 + 3]
    assert [
        (s.step, s.at, s.from_tp, s.to_tp, s.cost.weights_s, s.cost.graph_s, s.cost.control_s) for s in outcome.switches
    ] == [
        (1, 3.0, 1, 2, 0.0, 3.0, 5.0),
        (3, 17.0, 2, 1, 0.0, 3.0, 0.0),
    ]
    assert [(s.start_at, s.end_at, s.gpus, s.tp) for s in outcome.spans if s.kind == "switch"] == [
        (3.0, 11.0, (0, 1), 2),
        (17.0, 20.0, (0, 1), 1),
    ]
    assert [report.tp for report in control.reports] == [1, 2, 2, 1]
    assert [report.gen_time_s for report in control.reports] == [3.0] * 4
    assert [rollout.initial_tp for rollout in outcome.rollouts] == [1, 2, 2, 1]
    assert control.reports[0].lengths == (3, 3)
    assert control.reports[0].loads == ((1, 3), (1, 3))


def test_a_layout_whose_engine_was_ended_is_started_anew() -> None:
    """TP1 to TP2 after a second: 7 s to load the weights, 6 s of graphs, 50 s for the engine, and a prefill; back to
    TP1, which was kept otherwise, takes all but the weights."""
    once, sizes = At({1: Reconfigure(0, 2, "migrate", RESTART)}), [(1, 1), (1, 4)]
    outcome = generate(once, sizes, steps=2)
    times = [
        (s.step, s.at, s.to_tp, s.cost.weights_s, s.cost.kv_s, s.cost.graph_s, s.cost.control_s)
        for s in outcome.switches
    ]
    once_more = (1, 124.0, 2, 7.0, 0.0, 6.0, 50.0)
    assert times == [(0, 1.0, 2, 7.0, 0.0, 6.0, 50.0), (1, 67.0, 1, 0.0, 0.0, 6.0, 50.0), once_more]
    assert ends(outcome) == [1.0 + 63 + 3, 67.0 + 56 + 1 + 63 + 3]
    kept = generate(At({1: Reconfigure(0, 2)}), sizes, steps=2)
    assert [(s.step, s.to_tp) for s in kept.switches] == [(0, 2), (1, 2)]


def test_each_replica_has_gpus_of_its_own() -> None:
    outcome = generate(Planned([2, None]), [(1, 3)] * 4, steps=2, nodes=2)
    by_step = [{s.gpus for s in outcome.spans if s.step == step and s.kind == "decode"} for step in (0, 1)]
    assert by_step == [{(0,), (1,), (2,), (3,)}, {(0, 1), (2, 3)}]


DOWN = Reconfigure(0, 1, "recompute")


@pytest.mark.parametrize(
    "control", [At({2: DOWN}), Controls([At({1: Abort((0,))}), At({2: DOWN})])], ids=["finished", "aborted"]
)
def test_a_layout_must_hold_every_response_that_is_left_at_its_full_length(control: RolloutControl) -> None:
    """A prompt token and 39 response tokens fill the 40 pages of TP1; who is finished or aborted needs no room."""
    over = (50, 2) if isinstance(control, At) else (1, 60)
    outcome = generate(control, [over, (1, 2), (1, 3), (1, 39)], tp=2)
    assert [(s.from_tp, s.to_tp) for s in outcome.switches] == [(2, 1)]
    with pytest.raises(PolicyError, match="a replica holds 40 tokens of KV, too few for a whole response"):
        generate(control, [over, (1, 2), (1, 3), (1, 40)], tp=2)


def test_the_longest_that_a_layout_must_hold_is_asked_for_anew_once_it_is_over() -> None:
    """TP4 holds the longest response; when that is over TP1, which would not have, holds the rest."""
    costs = StubCosts({tp: LinearStep(a=1.0, tp=tp) for tp in (1, 2, 4)}, {1: 40, 2: 100, 4: 200})
    control = Controls([At({1: Reconfigure(0, 4, "recompute")}), At({3: DOWN})])
    outcome = generate(control, [(50, 3), (1, 1), (1, 3), (1, 39)], tp=2, costs=costs, gpus=4)
    assert [(s.from_tp, s.to_tp) for s in outcome.switches] == [(2, 4), (4, 1)]


def test_going_back_to_the_first_layout_is_free_unless_its_graphs_are_lost() -> None:
    """Responses of 2 and 5 tokens on two replicas of TP1. A step decodes in a second.

    The shorter is there after 2 s. The longer is stopped at TP1, with 3.5 + 3 + 5 s for weights, graphs and groups of
    TP2 (5 s less in the next step, which has the groups), prefilled again and three more steps long.
    """
    up = At({1: Reconfigure(0, 2, "recompute")})
    kept = generate(up, [(1, 2), (1, 5)], steps=2)
    first_s, second_s = 2 + (3.5 + 3 + 5) + 3, 2 + (3.5 + 3) + 3
    assert ends(kept) == [first_s, first_s + second_s]
    assert ends(generate(up, [(1, 2), (1, 5)], steps=2, first_layout_kept=True)) == ends(kept)
    lost = generate(up, [(1, 2), (1, 5)], steps=2, first_layout_kept=False)
    assert ends(lost) == [first_s, first_s + 3 + second_s]  # the groups of TP1 are there from the first step
    assert [(s.step, s.from_tp, s.to_tp) for s in lost.switches] == [(0, 1, 2), (1, 2, 1), (1, 1, 2)]


@dataclass(frozen=True)
class Full(StubCosts):
    """A machine whose GPUs do not hold the model at TP1."""

    def capacity_pages(self, tp: int) -> int:
        if tp == 1:
            raise CapacityError("TP1 is too large for the GPU")
        return super().capacity_pages(tp)


def test_a_switch_to_a_layout_that_the_gpus_do_not_hold_says_why() -> None:
    costs = Full(COSTS.steps, COSTS.pages)
    with pytest.raises(PolicyError, match=r"Reconfigure.*TP1 is too large for the GPU"):
        generate(At({1: DOWN}), [(1, 2), (1, 5)], tp=2, costs=costs)


def test_a_rollout_that_comes_to_a_halt_says_how_many_are_left() -> None:
    """An open stage goes on until a `Stop`; a prompt of 41 tokens never fits into 40 pages."""
    config = EngineConfig(page_tokens=1, watermark=0.0)
    for prompts, left in (((1, 1), 0), ((1, 41), 1), ((41, 41, 41), 3)):
        requests = [Request(i, i, tokens, 2) for i, tokens in enumerate(prompts)]
        settings: dict[str, Any] = {"costs": COSTS, "config": config, "cap_tokens": 2, "open": True}
        stage = GenerationStage(requests=requests, mesh=[(0,)], tp=1, **settings)
        with pytest.raises(PolicyError, match=f"comes to a halt with {left} requests unfinished"):
            run_rollout(stage)

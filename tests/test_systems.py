"""Batchings, rewards and streamed calls by hand beyond cases/stages.yaml: an iteration of a replica takes a second."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import simpy
from workloads import At, LinearStep, StubCosts

import rlsim
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.systems import System
from rlsim.models.hardware import load_cluster
from rlsim.policies.parts import Streaming
from rlsim.policies.planner import Planner
from rlsim.policies.registry import policy_names
from rlsim.policies.reward_scheduler import AdaptiveTimeout, AsyncReward
from rlsim.policies.stream_trainer import StreamTrainer, projected_kv_tokens
from rlsim.policies.tail_batching import TailBatching
from rlsim.policies.verl import DynamicSampling, VeRL
from rlsim.sim.actions import Abort, Release
from rlsim.sim.batching import Batching, PromptFeed
from rlsim.sim.control import ControlContext, Launch, Prompt, ReplicaView, RolloutControl, RolloutReport, RolloutView
from rlsim.sim.elastic import Pieces
from rlsim.sim.outcome import Outcome
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.reward import RewardFunction, RewardJob
from rlsim.sim.run import simulate
from rlsim.sim.server import InferenceServer
from rlsim.sim.simulation import CallTimes, Simulation
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow, colocated, grpo
from rlsim.workflow.plan import with_transfers

Lengths = Mapping[int, Sequence[int]]  # by prompt position, one per sample
FUSED = Streaming(sources=("generate", "inference", "reward"), targets=("inference", "reward", "train"))


@dataclass
class Checks(RewardFunction):
    """A check of `seconds`, or the runs of a sandbox by (position, sample); rewards likewise."""

    seconds: float = 0.0
    workers: int = 1
    rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)
    runs: Mapping[int, Sequence[Sequence[float]]] = field(default_factory=dict)

    def job(self, request: Request) -> RewardJob:
        position, sample = divmod(request.row, 100)
        reward = self.rewards[position][sample] if position in self.rewards else 1.0
        if position in self.runs:
            return RewardJob("sandbox", position % 10, tuple(self.runs[position][sample]), 30.0, reward, reward > 0)
        return RewardJob("rule", position, (self.seconds,), 2.0, reward, reward > 0)


class Times(CallTimes):
    """A tenth of a second a token, one way or the other; training ends with an update of a second."""

    def parts(self, call: Call, placement: Placement, samples: Sequence[Request], *_: Any) -> list[tuple[str, float]]:
        if call.kind == "sync":
            return [("weights", 0.0)]
        update = [("optimizer", 1.0)] if call.kind == "train" else []
        return [("compute", 0.1 * sum(r.context for r in samples) / len(placement.gpus)), *update]

    def pieces(self, call: Call) -> Pieces:
        finish = [("optimizer", 1.0)] if call.kind == "train" else []
        return Pieces(lambda lengths: [("compute", 0.1 * sum(lengths))], 1000, 0.0, finish)


class OneEach(RolloutControl):
    """Every GPU a replica."""

    def initial_tp(self, context: Any) -> int:
        return 1


def simulated(
    workflow: Workflow,
    plan: Plan,
    lengths: Lengths,
    prompts: int,
    responses: int = 1,
    *,
    gpus: int = 1,
    step: LinearStep = LinearStep(a=1.0),  # noqa: B008
    **more: Any,
) -> Outcome:
    """Steps of prompts of one token, and responses of these lengths, on a node of so many GPUs."""

    def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
        made = [(p.position, p.first_sample + k) for p in launched for k in range(samples)]
        return [Request(first_id + i, at, 1, lengths[at][k], row=at * 100 + k) for i, (at, k) in enumerate(made)]

    given = {
        "cluster": load_cluster("8xh100").model_copy(update={"gpus_per_node": gpus}),
        "control": OneEach(),
        "initial_tp": 1,
        "feasible_tps": (1,),
        "feed": PromptFeed(prompts, responses),
        "requests": requests,
        "costs": StubCosts({1: step}, {1: 10**6}),
        "times": Times(),
        "scoring": Checks(),
        "config": EngineConfig(),
        "cap_tokens": max(n for of in lengths.values() for n in of),
        "steps": 1,
    }
    return simulate(Simulation(workflow=workflow, plan=plan, **given | more))


def train(
    lengths: Lengths,
    prompts: int,
    responses: int,
    *,
    gpus: int = 1,
    rewire: Callable[[Workflow], Workflow] = lambda w: w,
    **more: Any,
) -> Outcome:
    """Every call on all GPUs."""
    graph = rewire(grpo(reference=False, old_log_probs=False))
    plan = colocated(graph, tuple(range(gpus)), TrainStrategy(dp=gpus))
    return simulated(graph, plan, lengths, prompts, responses, gpus=gpus, routing="round_robin", **more)


def gen_s(outcome: Outcome, step: int = 0) -> float:
    call = call_of(outcome, "generate", step)
    return float(call.end_at - call.start_at)


def call_of(outcome: Outcome, kind: str, step: int = 0) -> Any:
    return next(c for c in outcome.calls if c.kind == kind and c.step == step)


# ------------------------------------------------------------------------------------- several calls that generate


def two_calls(*, together: bool) -> tuple[Workflow, Plan]:
    """ReMax: a sampled and a greedy response to each prompt, on a GPU each or both on one; one to train and score."""
    calls = [Call("sampled", "generate", "actor"), Call("greedy", "generate", "actor", 0, 1)]
    calls += [Call("score", "inference", "reward"), Call("train", "train", "actor"), Call("push", "sync", "actor")]
    ends = [("sampled", "score"), ("greedy", "score"), ("score", "train"), ("train", "push")]
    edges = [*(Edge(*two) for two in ends), Edge("push", "sampled", lag=1), Edge("push", "greedy", lag=1)]
    graph = Workflow("remax", tuple(calls), tuple(edges))
    alone = TrainStrategy(dp=1)
    where = {"sampled": Placement((0,)), "greedy": Placement((0 if together else 1,))}
    return graph, with_transfers(graph, {**where, "score": Placement((0,), alone), "train": Placement((0,), alone)})


@pytest.mark.parametrize("together", [True, False])
def test_two_calls_generate_at_once_or_take_turns(together: bool) -> None:
    """Two steps of two prompts; the greedy responses have 9 tokens each, the sampled ones 3 and 5."""
    graph, plan = two_calls(together=together)
    lengths = {0: [3, 9], 1: [5, 9], 2: [3, 9], 3: [5, 9]}
    others = {"greedy": (StubCosts({1: LinearStep(a=1.0)}, {1: 10**6}), 1)}
    outcome = simulated(graph, plan, lengths, 2, 2, gpus=1 if together else 2, steps=2, others=others)
    ends = {(call.call, call.step): (call.start_at, call.end_at) for call in outcome.calls}
    # A second a token, the first from the prefill. Scoring reads all four, 4 prompt tokens and 3 + 5 + 9 + 9 more, at
    # 0.1 s each; training the sampled, 2 + 3 + 5, and then takes a second.
    assert ends["sampled", 0] == (0.0, 5.0)
    assert ends["greedy", 0] == ((5.0, 14.0) if together else (0.0, 9.0))
    scored = ends["greedy", 0][1] + 0.1 * 30
    assert ends["score", 0][1] == pytest.approx(scored)
    assert ends["train", 0][1] == pytest.approx(scored + 0.1 * 10 + 1.0)
    assert ends["sampled", 1][0] == ends["push", 0][1] == ends["train", 0][1]
    assert [rollout.launches.launched for rollout in outcome.rollouts] == [4, 4]
    for responses in outcome.responses:
        assert responses.generated_tokens.tolist() == [3, 5, 9, 9]
        assert responses.trained.tolist() == [True, True, False, False]
        assert responses.baseline.tolist() == [False, False, True, True]
        assert responses.replica.tolist() == [0, 0, 1, 1], "the replicas of a step have numbers of their own"
    assert [responses.version.tolist() for responses in outcome.responses] == [[0] * 4, [1] * 4]


def test_a_call_that_generated_before_newer_weights_came_keeps_its_version() -> None:
    """Sampled responses may be of weights two updates old: the second step's are done before the greedy ones begin."""
    graph, plan = two_calls(together=False)
    edges = [replace(e, lag=2) if e.target == "sampled" else e for e in graph.edges]
    places = {call.name: plan.of(call.name) for call in graph.calls if call.kind not in ("sync", "generate")}
    graph = replace(graph, edges=tuple(edges))
    places = {name: replace(place, gpus=(2,)) for name, place in places.items()}
    plan = with_transfers(graph, {"sampled": Placement((0,)), "greedy": Placement((1,)), **places})
    others = {"greedy": (StubCosts({1: LinearStep(a=1.0)}, {1: 10**6}), 1)}
    lengths = {0: [3, 9], 1: [5, 9], 2: [3, 9], 3: [5, 9]}
    outcome = simulated(graph, plan, lengths, 2, 2, gpus=3, steps=2, others=others)
    ends = {(call.call, call.step): (call.start_at, call.end_at) for call in outcome.calls}
    assert ends["sampled", 1] == (5.0, 10.0)
    assert ends["greedy", 1][0] > 10.0
    assert outcome.responses[1].version.tolist() == [0, 0, 1, 1]
    assert outcome.responses[1].stale_tokens.tolist() == [3, 5, 0, 0]


def test_halves_of_a_group_that_two_calls_generate_are_trained_on_together() -> None:
    """Each response goes to its reward as it is done, and a prompt to training with its last one, of whichever call."""
    calls = [Call("first", "generate", "actor", 1), Call("second", "generate", "actor")]
    calls += [Call("reward", "reward", "reward"), Call("train", "train", "actor")]
    edges = [Edge(one.name, "reward", grain="sample") for one in calls[:2]] + [Edge("reward", "train", grain="sample")]
    edges += [Edge("train", "first", lag=1), Edge("train", "second", lag=1)]
    graph = Workflow("halves", tuple(calls), tuple(edges), group_advantage=True)
    where = {"first": Placement((0,)), "second": Placement((1,)), "train": Placement((2,), TrainStrategy(dp=1))}
    others = {"second": (StubCosts({1: LinearStep(a=1.0)}, {1: 10**6}), 1)}
    lengths = {0: [2, 6], 1: [8, 3]}
    outcome = simulated(graph, with_transfers(graph, where), lengths, 2, 2, gpus=3, others=others)
    trains = [span for span in outcome.spans if span.kind == "train"]
    scored_s = Checks().seconds
    assert trains[0].start_at == pytest.approx(6.0 + scored_s), "prompt 0, with its second response"
    assert call_of(outcome, "train").end_at == pytest.approx(8.0 + scored_s + 0.1 * (2 + 8 + 3) + 1.0)
    assert outcome.responses[0].trained.all()


# -------------------------------------------------------------------------------------------------- tail batching


def test_the_queue_fills_over_short_rounds_and_a_long_round_empties_it() -> None:
    slow = [7] * 9
    lengths = {i: [1 + i % 3] * 9 for i in range(40)} | {1: slow, 4: slow, 6: slow, 10: slow}
    outcome = train(lengths, 2, 2, steps=6, batching=TailBatching(eta=1.5))
    assert [r.launches.label for r in outcome.rollouts] == ["short", "short", "long", "short", "short", "long"]
    assert [r.waiting for r in outcome.rollouts] == [1, 2, 0, 1, 2, 0]
    long = outcome.responses[2]
    assert set(long.position) == {1, 4}
    assert long.trained.all()
    assert (long.row % 100).tolist() == [3, 4, 3, 4]  # three samples each were generated in vain: new ones now
    assert gen_s(outcome, 2) == 7.0
    trained = np.concatenate([r.position[r.trained] for r in outcome.responses])
    assert sorted(trained) == sorted(list(range(12)) * 2)  # every prompt once, with both responses


def test_what_speculation_launches_is_rounded_up_without_rounding_errors() -> None:
    launch = TailBatching(eta=1.1).launch(PromptFeed(10, 8))
    assert (len(launch.prompts), launch.samples) == (11, 9)


# ------------------------------------------------------------------------------------------------ dynamic sampling


FLAT = {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [0.0, 0.0], 3: [0.0, 1.0]}


def test_a_batching_may_train_on_the_prompts_that_count() -> None:
    """Of three prompts one has no variance; the longest response is there after 3 s, six rewards take 3 s more."""

    class Leaves(DynamicSampling):
        def more(self, missing: int, feed: PromptFeed) -> None:
            return None

    lengths = {0: [1, 3], 1: [2, 2], 3: [1, 1], 2: [1, 1]}
    rewards = {0: FLAT[1], 1: FLAT[0], 2: FLAT[3]}
    outcome = train(lengths, 3, 2, batching=Leaves(), scoring=Checks(0.5, rewards=rewards))
    assert outcome.responses[0].position[outcome.responses[0].trained].tolist() == [0, 0, 2, 2]
    assert outcome.rollouts[0].launches.dropped == 1
    assert gen_s(outcome) == 3.0 + 6 * 0.5


def test_a_batch_that_cannot_become_complete_is_an_error() -> None:
    """A control aborts a response that the batch waits for; or rewards never vary."""
    with pytest.raises(PolicyError, match="step 0 comes to a halt: its batch cannot become complete"):
        train({0: [1, 3]}, 1, 2, batching=DynamicSampling(), control=At({1: Abort((1,))}), scoring=Checks(rewards=FLAT))
    with pytest.raises(PolicyError, match="no end in sight"):
        train({i: [1, 1] for i in range(500)}, 1, 2, batching=DynamicSampling())


# --------------------------------------------------------------------------------------------------------- rewards


def test_adaptive_timeouts_follow_the_longest_correct_run() -> None:
    control = AdaptiveTimeout()
    assert control.timeout_s("sandbox", 7, 0, 30.0) == 30.0
    control.observe("sandbox", 7, [4.0, 0.1], correct=True)
    control.observe("sandbox", 7, [9.0, 9.0], correct=False)
    assert control.timeout_s("sandbox", 7, 0, 30.0) == 6.0
    assert control.timeout_s("sandbox", 7, 1, 30.0) == 2.0  # never below
    assert control.timeout_s("sandbox", 8, 0, 30.0) == 30.0  # another prompt
    control.observe("sandbox", 7, [25.0], correct=True)
    assert control.timeout_s("sandbox", 7, 0, 30.0) == 30.0  # never above
    assert control.timeout_s("rule", 7, 0, 2.0) == 2.0


def test_a_timeout_adapts_once_a_correct_response_is_known() -> None:
    runs = {0: [[1.0], [1000.0]], 10: [[1.0], [1000.0]]}  # the same prompt again in the second step
    lengths = {0: [1, 3], 1: [1, 1], 10: [1, 1]}

    class Again(Batching):
        def launch(self, feed: PromptFeed) -> Launch:
            return Launch(tuple(Prompt(0 if p.position == 0 else 10) for p in feed.take(1)), 2)

    outcome = train(
        lengths, 1, 2, steps=2, batching=Again(), scoring=Checks(workers=2, runs=runs), reward=AdaptiveTimeout(),
        rewire=AsyncReward().rewired,
    )  # fmt: skip
    assert outcome.responses[0].scored_at.tolist() == [2.0, 5.0]  # the hanging one begins when the other is known
    start = call_of(outcome, "generate", 1).start_at
    assert (outcome.responses[1].scored_at - start).tolist() == [2.0, 3.0]  # and in the next epoch at once


# ---------------------------------------------------------------------------------------------- calls in pieces


class ReleaseLast(OneEach):
    """The last replica goes when so many have finished."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_finish(self, view: RolloutView) -> Release | None:
        replicas = view.replicas()
        return Release((replicas[-1].index,)) if view.finished >= self._at and len(replicas) > 1 else None


class HostTimes(Times):
    """Weights are copied in in half a second, gradients in or out in a quarter."""

    def pieces(self, call: Call) -> Pieces:
        return super().pieces(call)._replace(swap_s=0.5, gradients_s=0.25 * (call.kind == "train"))


def test_streamed_pieces_swap_weights_and_move_gradients() -> None:
    """GPU 1 goes at 2 s. The reference's log-probs of 5 tokens take half a second there, and so does training."""
    lengths = {0: [1], 1: [2], 2: [4], 3: [10]}
    graph = StreamTrainer(swap=True, gradients="host").rewired(grpo(old_log_probs=False))
    plan = colocated(graph, (0, 1), TrainStrategy(dp=2))
    more = {"gpus": 2, "routing": "round_robin", "control": ReleaseLast(2), "times": HostTimes()}
    outcome = simulated(graph, plan, lengths, 4, **more)
    pieces = sorted((s.start_at, s.end_at, s.kind) for s in outcome.spans if s.kind in ("ref_log_prob", "train"))
    assert pieces[:4] == [
        (2.0, 3.0, "ref_log_prob"),  # its weights come in
        (3.0, 4.25, "train"),  # the actor's in, gradients out
        (5.0, 6.0, "ref_log_prob"),
        (6.0, 7.5, "train"),  # gradients in and out
    ]
    # At 10 s the last response, of 11 tokens, is there. GPU 1 takes it, and has its gradients back for the update.
    assert pieces[4] == (10.0, pytest.approx(11.6), "ref_log_prob")
    assert pieces[5] == (pytest.approx(11.6), pytest.approx(11.6 + 0.5 + 1.1 + 0.25), "train")
    assert pieces[6:] == [(pytest.approx(13.45), pytest.approx(14.45), "train")]


def test_a_release_that_comes_too_late_frees_nothing_twice() -> None:
    """Replica 1 is told to go in the middle of the iteration that ends the last response."""
    lengths = {0: [2], 1: [3], 2: [2]}
    step = LinearStep(a=1.0, b=0.5)  # two sequences decode in 2 s, one in 1.5 s

    def rewire(_: Workflow) -> Workflow:
        return FUSED.rewired(grpo())  # several calls that take turns

    outcome = train(lengths, 3, 1, gpus=2, control=ReleaseLast(2), rewire=rewire, step=step)
    assert gen_s(outcome) == 4.0
    assert outcome.rollouts[0].released_gpu_s == 0.0
    spans = sorted((gpu, s.start_at, s.end_at) for s in outcome.spans for gpu in s.gpus)
    for (gpu, _, end), (other, start, _) in itertools.pairwise(spans):
        assert gpu != other or start >= end - 1e-9


def test_log_probs_by_the_sample_leave_rewards_at_the_barrier() -> None:
    def rewire(workflow: Workflow) -> Workflow:
        return grpo(old_log_probs=False).streaming(["generate"], ["inference"])

    outcome = train({0: [1, 8]}, 1, 2, scoring=Checks(1.0), rewire=rewire)
    assert call_of(outcome, "reward").start_at == 8.0
    grains = {
        (e.source, e.target): e.grain
        for e in Streaming(sources=("generate",), targets=("reward", "inference")).rewired(grpo()).edges
    }
    assert grains["generate", "ref_log_prob"] == "sample"
    assert grains["ref_log_prob", "train"] == "stage"


# --------------------------------------------------------------------------------------------------------- planner


def planner(start_tp: int = 1, profiled: bool = True) -> Planner:
    """Of eight GPUs: a step of s sequences takes 1/TP + s/10 seconds, so that larger batches want a smaller TP."""
    made, tps = Planner(start_tp=start_tp, profiled=profiled), (1, 2, 4, 8)
    made.setup(
        ControlContext(
            costs=StubCosts({tp: LinearStep(a=1.0 / tp, b=0.1) for tp in tps}, dict.fromkeys(tps, 10**6)),
            feasible_tps=tps,
            infeasible={},
            node_gpus=(8,),
            cap_tokens=1000,
            page_tokens=16,
            requests=80,
            prompt_tokens=10,
        )
    )
    return made


def played(responses: int, preemptions: int, tp: int = 1, label: str = "short", coming: str = "short") -> RolloutReport:
    """A round of so many responses of 100 tokens."""
    return RolloutReport(0, tp, 1.0, preemptions, (), label, coming, ((10, 100),) * responses)


def test_the_planner_takes_for_each_kind_of_round_what_the_profile_says_is_fastest() -> None:
    plans = planner(start_tp=2)
    assert plans.next_tp(played(80, 7, coming="long")) == 2  # nothing is known of long rounds: as the run began
    # 80 responses: 1/TP + TP seconds a step at TP, 8 responses: 1/TP + TP/10.
    assert plans.next_tp(played(8, 7, tp=2, label="long")) == 1
    assert plans.next_tp(played(80, 7, coming="long")) == 4
    assert plans.round_s(1, ((10, 100),) * 80) == pytest.approx(1.0 + 100 * 2.0)  # a prefill is a second
    assert plans.round_s(4, ((10, 100),) * 8) == pytest.approx(0.25 + 100 * 0.65)


def test_a_rise_of_preemptions_doubles_the_choice_unless_the_profile_says_that_it_costs_more() -> None:
    """24 responses take 1.1 s a step at TP2 (1.3 at TP1, 1.45 at TP4), 8 take 0.65 s at TP4: four rounds of 24 and the
    last of 8 are typically of 24, and TP4 is no loss for the last."""
    plans = planner()
    assert [plans.next_tp(played(n, preempted, 2)) for n, preempted in ((24, 10), (24, 20), (24, 20), (8, 40))] == [
        2, 2, 2, 4,
    ]  # fmt: skip


def test_the_rule_on_preemptions_alone_doubles_and_halves_the_last_degree() -> None:
    """A rise of exactly 1.05 is not more; four rounds without any halve, and four more do so again."""
    plans, tp, seen = planner(profiled=False), 1, []
    for preemptions in (100, 105, 111, 90, 100, 0, 0, 0, 0, 0, 0, 0, 0):
        tp = plans.next_tp(played(80, preemptions, tp))
        seen.append(tp)
    assert seen == [1, 1, 2, 2, 4, 4, 4, 4, 2, 2, 2, 2, 1]


def test_quiet_rounds_halve_the_choice_unless_the_profile_says_that_it_costs_more() -> None:
    grown = planner()
    assert [grown.next_tp(played(n, 0)) for n in (8, 8, 8, 48)] == [4, 4, 4, 1]  # 1.6 s a step at TP1, 1.7 s at TP2
    restless = planner()
    assert [restless.next_tp(played(n, 9)) for n in (8, 8, 8, 48)] == [4, 4, 4, 2]
    steady = planner()
    assert [steady.next_tp(played(8, 0)) for _ in range(6)] == [4] * 6
    other = planner()  # quiet rounds of another kind
    other.next_tp(played(8, 50, label="long"))
    assert [other.next_tp(played(80, 0, coming="long")) for _ in range(4)] == [4] * 4


# ------------------------------------------------------------------------------------------------- stream trainer


def test_projected_kv_is_that_of_many_drawn_futures() -> None:
    rng = np.random.default_rng(0)
    history = np.sort(rng.lognormal(6, 1, 4000).clip(1, 8000).astype(int))
    prompts, done = rng.integers(50, 300, 40).astype(float), rng.integers(0, 3000, 40).astype(float)
    ahead = np.arange(0, 8000, 25)
    held = np.zeros(len(ahead))
    for prompt, g in zip(prompts, done, strict=True):
        longer = history[history > g]
        ends = rng.choice(longer, 2000)
        held += ((ends[:, None] > g + ahead) * (prompt + g + ahead)).mean(axis=0)
    assert projected_kv_tokens(history, prompts, done, 8000) == pytest.approx(held.max(), rel=0.03)
    few = np.array([10, 20, 30])  # beyond all history a response is expected to reach the cap
    assert projected_kv_tokens(few, np.array([5.0]), np.array([40.0]), 100) == pytest.approx(105, rel=0.1)


@pytest.mark.parametrize(("gpus", "released"), [((4, 2, 2), (1, 2)), ((2, 2, 4), (2,)), ((4, 4), (1,)), ((8, 4), None)])
def test_half_of_the_gpus_is_released_whatever_the_replicas_are(
    gpus: tuple[int, ...], released: tuple[int, ...] | None
) -> None:
    replicas = tuple(ReplicaView(i, 0, n, tuple(range(n)), ()) for i, n in enumerate(gpus))
    view = SimpleNamespace(finished=2, label="", replicas=lambda: replicas)
    stream = StreamTrainer(trigger=0.5)
    stream.setup(cast(ControlContext, SimpleNamespace(requests=4)))
    answer = stream.on_finish(cast(RolloutView, view))
    assert answer == (released and Release(released))


# ------------------------------------------------------------------------------------------------ the judge


def test_a_judge_forgets_answers_that_nobody_waits_for_and_a_closed_one_has_no_work() -> None:
    env, busy, answered = simpy.Environment(), [], []

    def serving() -> InferenceServer:
        return InferenceServer(
            env, [(0,)], LinearStep(a=1.0), 1000, EngineConfig(), Recorder(), lambda _: 0,
            on_busy=lambda gpus, on: busy.append((env.now, gpus, on)),
        )  # fmt: skip

    service = serving()
    for i, tokens in enumerate((5, 100)):
        service.submit(Request(i, 0, 1, tokens), lambda i=i: answered.append((i, env.now)))
    env.run(until=2.5)
    service.forget(frozenset({1}))
    assert service.busy_gpus == {0}
    env.run(until=50)
    assert answered == [(0, 5.0)]
    assert busy == [(0, (0,), True), (5.0, (0,), False)]
    assert not service.busy_gpus
    closed = serving()
    closed.submit(Request(2, 0, 1, 100), lambda: pytest.fail("not asked any more"))
    env.run(until=52.5)
    closed.close()
    assert not closed.busy_gpus
    env.run(until=200)
    assert busy[2:] == [(50, (0,), True), (52.5, (0,), False)]


# ------------------------------------------------------------------------------------------------ systems of parts


def test_parts_that_decide_the_same_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="TailBatching and TailBatching all decide what to launch"):
        System.of([VeRL(tp=1), TailBatching(), TailBatching()], "x")
    with pytest.raises(ConfigError, match="none of its parts decides the layout"):
        System.of([TailBatching()], "x")


def test_the_engine_knows_no_system() -> None:
    names = {*policy_names(), "rollpacker", "rlhfuse", "oppo", "real_heuristic", "trl", "openrlhf", "nemo_aligner",
             "deepspeed_chat", "streamrl", "areal", "dapo"}  # fmt: skip
    names -= {"chunked", "megatron", "plan", "planner", "split", "stream"}  # words of costs and plans, too
    root = Path(rlsim.__file__).parent
    for room in ("sim", "workflow", "cost"):
        for path in (root / room).glob("*.py"):
            code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines()).lower()
            code = "".join(code.split('"""')[::2])  # without docstrings
            words = set(re.findall(r"\w+", code))
            assert not words & names, path.name
    for room in ("sim", "policies"):
        for path in (root / room).glob("*.py"):
            assert "prompt_id" not in path.read_text(), f"{path.name}: a place in training order is a `position`"


def test_trl_without_a_scoring_gpu_works_on_all() -> None:
    """The last GPU scores and nothing else, or it generates and trains as the others do."""
    experiment: dict[str, Any] = {
        "name": "trl", "cluster": "4xh100", "model": "qwen2.5-1.5b", "models": {"reward": "qwen2.5-1.5b"},
        "calibration": "h100-vllm", "trace": {"fixed": 64, "cap": 64}, "seeds": 1, "certainty": 0,
        "workflow": {"algorithm": "ppo", "prompts": 12, "responses": 1, "steps": 1},
        "systems": [{"trl": {"tp": 1, "scoring_gpu": [True, False]}}],
    }  # fmt: skip
    spans = rlsim.run(experiment).spans
    last = spans[spans["gpu"] + spans["gpus"] > 3].groupby("system")["kind"].unique()
    assert {*last["trl-gpuTrue"]} == {"reward_score"}
    assert {"decode", "train"} <= {*last["trl-gpuFalse"]}

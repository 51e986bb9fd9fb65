"""Chunks, scoring models, prompts that go on in the next step, and the policies that use them, worked out by hand."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Arrival, score
from test_systems import OneEach, Times, simulated, train
from workloads import LinearStep

from rlsim.cost.derived import crowded
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.systems import System
from rlsim.policies.oppo import Chunked, Overcommit, RewardCurve, adapted
from rlsim.policies.verl import VeRL
from rlsim.sim.batching import Batching, PromptFeed, Unfinished
from rlsim.sim.control import Launch, Prompt, ScoringReport
from rlsim.sim.outcome import Outcome
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.server import RewardModelEngine, StreamingScorer
from rlsim.workflow import Call, Placement, Workflow
from rlsim.workflow.graph import Edge
from rlsim.workflow.plan import Plan

PREFILL = LinearStep(a=0.5, p=0.25)  # an iteration of the scoring model
PAGES = 10**6


def graph(chunk_tokens: int = 0) -> Workflow:
    """Generate, score by a model, train; without chunks the model scores at the barrier."""
    calls = (
        Call("generate", "generate", "actor"),
        Call("score", "inference", "reward"),
        Call("train", "train", "actor"),
        Call("weight_sync", "sync", "actor"),
    )
    edges = (
        Edge("generate", "score"),
        Edge("score", "train"),
        Edge("train", "weight_sync"),
        Edge("weight_sync", "generate", lag=1),
    )
    workflow = Workflow("stream", calls, edges)
    return workflow.in_chunks(["reward"], chunk_tokens) if chunk_tokens else workflow


class Listening(OneEach):
    def __init__(self) -> None:
        self.reports: list[ScoringReport] = []

    def on_scored(self, report: ScoringReport) -> None:
        self.reports.append(report)


class BarrierTimes(Times):
    """The scoring model at the barrier takes one iteration."""

    def parts(self, call: Call, placement: Placement, samples: Sequence[Request], *_: Any) -> list[tuple[str, float]]:
        if call.kind == "inference":
            return [("compute", 0.5 + 0.25 * sum(r.context for r in samples))]
        return super().parts(call, placement, samples)


def play(
    lengths: Mapping[int, Sequence[int]],
    prompts: int,
    *,
    workflow: Workflow,
    gpus: int = 1,
    shared: float | None = None,
    takes_turns: bool = False,
    responses: int = 1,
    step: LinearStep = LinearStep(a=1.0),  # noqa: B008
    **more: Any,
) -> Outcome:
    """Prompts of one token on `gpus` GPUs and a scoring model on one more.

    `shared`: on the first of them, beside generation, both that factor slower. `takes_turns`: there, but after it.
    """
    actor, factor = tuple(range(gpus)), shared or 1.0
    scoring = Placement((gpus,) if shared is None and not takes_turns else (0,), shared=shared is not None)
    placed = dict.fromkeys(("train", "weight_sync"), Placement(actor, TrainStrategy(dp=gpus)))
    scorer = RewardModelEngine(1, PREFILL, crowded(PREFILL, factor), factor, PAGES, EngineConfig(page_tokens=1))
    given = {
        "times": BarrierTimes(),
        "scorers": {"score": scorer},
        "crowded": None if shared is None else lambda _: crowded(step, factor),
        "routing": "round_robin",
    }
    plan = Plan({"generate": Placement(actor), "score": scoring, **placed})
    return simulated(workflow, plan, lengths, prompts, responses, gpus=gpus + 1, step=step, **given | more)


# ---------------------------------------------------------------------------------------------------------- chunks


def test_what_a_scoring_model_did_is_reported() -> None:
    listening = Listening()
    play({0: [10]}, 1, workflow=graph(4), control=listening)
    assert listening.reports == [ScoringReport(0, 4, 11.0, 10)]


# ------------------------------------------------------------------------------------------------ the scoring model


def serve(
    arrivals: Sequence[Arrival], step: StepCost, engine: EngineConfig, pages: int
) -> tuple[dict[int, float], StreamingScorer]:
    """What the scoring model makes of these."""
    env = simpy.Environment()
    scorer = StreamingScorer(env, [(0,)], step, pages, engine, Recorder())
    total = {a.id: a.tokens for a in arrivals if a.last}
    requests = {i: Request(i, i, 1, n - 1, n - 1) for i, n in total.items()}
    scored_at: dict[int, float] = {}

    def come(a: Arrival) -> None:
        if a.last:
            scorer.complete(requests[a.id], lambda r: scored_at.update({r.id: env.now}))
        else:
            scorer.chunks([(requests[a.id], a.tokens - 1)])

    for arrival in sorted(arrivals, key=lambda a: a.at):
        event = env.timeout(arrival.at)
        event.callbacks.append(lambda _, a=arrival: come(a))  # type: ignore[misc]
    env.run()
    return scored_at, scorer


@settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, max_examples=100)
@given(st.integers(0, 2**32), st.booleans())
def test_the_scoring_model_equals_its_reference(seed: int, ties: bool) -> None:
    rng = random.Random(seed)
    arrivals = []
    for i in range(rng.randint(1, 14)):
        total, chunk = rng.randint(2, 90), rng.choice([3, 10, 40])
        at = float(rng.randint(0, 6)) if ties else rng.uniform(0, 6)
        for tokens in [*range(chunk, total, chunk), total]:
            arrivals.append(Arrival(at, i, tokens, tokens == total))
            at += float(rng.randint(1, 3)) if ties else rng.uniform(0.01, 3.0)
    page, seqs, tokens = map(rng.choice, ([1, 4, 16], [1, 3, 100], [5, 20, 1000]))
    engine = EngineConfig(page_tokens=page, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    largest = max(-(-a.tokens // engine.page_tokens) for a in arrivals)
    pages = largest + rng.choice([0, 3, 20, 10**6])
    step = LinearStep(a=0.25, p=1 / 64) if ties else LinearStep(a=rng.uniform(0.01, 1.0), p=0.013, q=1e-4)
    expected = score(arrivals, step, engine, pages)
    scored_at, scorer = serve(arrivals, step, engine, pages)
    assert scored_at == pytest.approx(expected, rel=1e-9, abs=0)
    assert set(scored_at) == {a.id for a in arrivals}
    assert scorer.replicas[0].peak_pages <= pages
    if pages > 10**6:
        assert scorer.replicas[0].recomputed_tokens == 0


def test_the_last_to_come_loses_its_cache_where_pages_are_missing() -> None:
    # 10 pages of a token. At 0 s 4 tokens of 0, at 1 s 4 of 1 (0.5 + 4/4 s each). At 5 s 8 of 0: 4 more, so 1 goes.
    arrivals = [Arrival(0, 0, 4, False), Arrival(2, 1, 4, False), Arrival(5, 0, 8, True), Arrival(8, 1, 6, True)]
    engine = EngineConfig(page_tokens=1)
    scored_at, scorer = serve(arrivals, PREFILL, engine, 10)
    assert scored_at == {0: 5.0 + 1.5, 1: 8.0 + 0.5 + 6 / 4}  # all 6 tokens of 1, not 2
    assert scorer.replicas[0].recomputed_tokens == 4


# ------------------------------------------------------------------------------------------------ from step to step


def test_what_nobody_wants_is_forgotten() -> None:
    env = simpy.Environment()
    scorer = StreamingScorer(env, [(0,), (1,)], PREFILL, 100, EngineConfig(page_tokens=1), Recorder())
    a, b, c = (Request(i, i, 1, 20, 20) for i in range(3))
    done: list[tuple[int, float]] = []
    scorer.chunks([(a, 3), (b, 7), (c, 3)])  # a and c on GPU 0, b on GPU 1
    env.run(until=0.6)
    assert scorer.busy_gpus == {0, 1}
    scorer.keep_only(frozenset({2}))
    scorer.complete(c, lambda r: done.append((r.id, env.now)))
    env.run()
    assert done == [(2, (0.5 + 8 / 4) + (0.5 + 17 / 4))]
    assert scorer.busy_gpus == frozenset()


def conserved(outcome: Outcome) -> None:
    generated = sum(int((r.generated_tokens - r.resumed_tokens).sum()) for r in outcome.responses)
    trained = sum(int(r.generated_tokens[r.trained].sum()) for r in outcome.responses)
    aborted = sum(int(r.generated_tokens[~(r.trained | r.paused)].sum()) for r in outcome.responses)
    last = outcome.responses[-1]
    assert generated == trained + aborted + int(last.generated_tokens[last.paused].sum())
    for before, after in zip(outcome.responses, outcome.responses[1:], strict=False):
        paused = dict(zip(before.row[before.paused], before.generated_tokens[before.paused], strict=True))
        resumed = dict(zip(after.row[after.resumed], after.resumed_tokens[after.resumed], strict=True))
        assert paused == resumed


class Partial(Batching):
    """Keeps what prompts have, but only of the first; the others begin again."""

    def __init__(self) -> None:
        self.kept: list[Prompt] = []
        self.back: list[Prompt] = []
        self.seen: list[Unfinished] = []

    def launch(self, feed: PromptFeed) -> Launch:
        again, self.back = tuple(self.back), []
        return Launch((*again, *feed.take(4 - len(again) - len(self.kept))), 1, resume=tuple(self.kept))

    def keep(self, unfinished: Sequence[Unfinished]) -> list[Prompt]:
        self.seen += unfinished
        self.kept = [u.prompt for u in unfinished[:1]]
        return self.kept

    def put_back(self, unfinished: Sequence[Prompt]) -> None:
        self.back = list(unfinished)


def test_a_batching_may_keep_some_and_put_others_back() -> None:
    batching = Partial()
    lengths = {0: [2], 1: [9, 9], 2: [8, 3], 3: [2], 4: [9], 5: [9]}
    played = play(lengths, 2, workflow=graph(), gpus=4, steps=2, batching=batching)
    first, second = played.responses
    assert batching.seen[:2] == [
        Unfinished(Prompt(1), (2,), (False,), (0,)),
        Unfinished(Prompt(2), (2,), (False,), (0,)),
    ]
    assert first.aborted.tolist() == [False, False, True, False]
    assert second.position.tolist() == [2, 4, 5, 1]
    assert second.resumed_tokens.tolist() == [0, 0, 0, 2]
    assert sorted(second.generated_tokens[second.trained]) == [3, 9]  # another sample of 2, the same one of 1
    wrong = Partial()
    wrong.kept = [Prompt(7)]
    with pytest.raises(PolicyError, match="position 7 was not kept"):
        play(lengths, 1, workflow=graph(), batching=wrong)


def test_a_batching_sees_how_stale_the_responses_are() -> None:
    batching = Partial()
    train({i: [60, 60] if i == 1 else [2, 2] for i in range(40)}, 2, 1, gpus=4, steps=4, batching=batching)
    seen = [u.staleness for u in batching.seen if u.prompt.position == 1]
    assert seen == [(0,), (1,), (0,), (1,)], "kept, then put back, launched anew with newer weights, and kept"


# ------------------------------------------------------------------------------------------------------- Δ


def test_delta_grows_while_the_reward_improves_and_shrinks_otherwise() -> None:
    assert adapted(8, 2, [0.0, 0.0, 1.0], 2, 0, 99) == 8  # fewer than two windows
    assert adapted(8, 2, [0.0, 0.0, 1.0, 1.0], 2, 0, 99) == 10
    assert adapted(8, 2, [1.0, 1.0, 0.0, 0.0], 2, 0, 99) == 6
    assert adapted(8, 2, [1.0, 1.0, 1.0, 1.0], 2, 0, 99) == 6  # no better
    assert adapted(8, 2, [0.0, 1.0], 1, 0, 9) == 9
    assert adapted(8, 2, [1.0, 0.0], 1, 7, 99) == 7


@pytest.mark.parametrize(("change", "deltas"), [("quarter", [8, 8, 10, 12, 15]), ("one", [8, 8, 9, 10, 11])])
def test_delta_changes_by_a_quarter_or_by_one(change: Literal["quarter", "one"], deltas: list[int]) -> None:
    batching, feed = Overcommit(change=change, window=1), PromptFeed(4, 1)
    seen = []
    for _ in deltas:
        seen.append(len(batching.launch(feed).prompts) - 4)
        batching.keep(())
    assert seen == deltas


def test_reward_curves() -> None:
    rising = RewardCurve(start=0.2, end=0.8, time_constant_steps=10)
    assert rising.at(0) == pytest.approx(0.2)
    assert rising.at(10) == pytest.approx(0.8 - 0.6 / np.e)
    assert rising.at(10_000) == pytest.approx(0.8)
    noisy = RewardCurve(noise=0.5, seed=3)
    assert noisy.at(4) == noisy.at(4) != RewardCurve().at(4)
    points = RewardCurve(points=((2, 1.0), (4, 3.0)))
    assert [points.at(step) for step in (0, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert [points.steps_to(reward) for reward in (1.0, 2.0, 3.0)] == [1, 4, 5]
    with pytest.raises(ConfigError, match=r"does not reach a reward of 3\.1 in 10 steps"):
        points.steps_to(3.1, 10)
    with pytest.raises(ValueError, match="ascend"):
        RewardCurve(points=((2, 1.0), (2, 3.0)))
    with pytest.raises(ValueError, match="leave out start, end and time_constant_steps"):
        RewardCurve(points=((2, 1.0),), end=1.0)
    with pytest.raises(ValueError, match="delta_start 3 does not lie between"):
        Overcommit(delta_start=3)
    with pytest.raises(ValueError, match="no time to try all candidates"):
        Chunked(every=2)


# ------------------------------------------------------------------------------------------------- chunk lengths


def test_each_candidate_is_tried_and_the_fastest_kept() -> None:
    chunked = Chunked(candidates=(10, 20, 40), every=6)
    took = {10: 3.0, 20: 1.0, 40: 2.0}

    def step(number: int) -> int:
        size = chunked.chunk_tokens(0)
        tokens = (100, 1000, 100)[number % 3]  # the step of 20 takes longest: it has the most tokens
        chunked.on_scored(ScoringReport(number, size, took[size] * tokens, tokens))
        return size

    assert [step(i) for i in range(6)] == [10, 20, 40, 20, 20, 20]
    took[40] = 0.5
    assert [step(i) for i in range(6, 14)] == [10, 20, 40, 40, 40, 40, 10, 20]


def test_a_trial_that_is_over_late_counts() -> None:
    """One step off a step is scored after the next has begun: the last candidate, the fastest, is kept all the same."""
    chunked, sizes = Chunked(candidates=(20, 10), every=6), list[int]()
    for number in range(6):
        sizes.append(chunked.chunk_tokens(0))
        if number:
            chunked.on_scored(ScoringReport(number - 1, sizes[-2], float(sizes[-2]), 1))
    assert sizes == [20, 10, 20, 10, 10, 10]


# ----------------------------------------------------------------------------------------------------- what fits


def test_graphs_with_chunks_are_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"no inference call of critic takes responses from generation \(.* of reward"
    ):
        graph().in_chunks(["critic"], 10)
    with pytest.raises(ConfigError, match="has chunk_tokens, at least 1"):
        graph().in_chunks(["reward"], 0)
    calls = graph().calls
    with pytest.raises(ConfigError, match="cannot have the grain `chunk`"):
        Workflow("w", calls, (Edge("score", "train", grain="chunk", chunk_tokens=4),))
    twice = (*calls, Call("values", "inference", "critic"))
    edges = (Edge("generate", "score", 0, "chunk", 4), Edge("generate", "values", 0, "chunk", 8))
    with pytest.raises(ConfigError, match="the same length"):
        Workflow("w", twice, edges)
    with pytest.raises(ConfigError, match="all decide the chunks of responses"):
        System.of([VeRL(tp=1), Chunked(), Chunked()], "x")

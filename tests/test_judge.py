"""A judge on GPUs of its own, on GPUs that join training, and on those of the rollout: one step worked out by hand."""

from collections.abc import Sequence

import pytest
from test_systems import call_of, simulated
from workloads import LinearStep

from rlsim.cost.derived import crowded
from rlsim.cost.strategy import TrainStrategy
from rlsim.policies.reward_scheduler import AsyncReward
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.reward import RewardFunction, RewardJob
from rlsim.sim.server import RewardModelEngine
from rlsim.workflow import Placement, grpo
from rlsim.workflow.plan import grouped

SECOND = LinearStep(a=1.0)  # every iteration takes a second


class Judged(RewardFunction):
    """Prompts of four tokens, answers of three: an iteration for the prompt and the first token, two for the others."""

    workers = 0

    def job(self, request: Request) -> RewardJob:
        return RewardJob("judge", request.position, (), 0.0, 0.5, True, judge_prompt_tokens=4, judge_tokens=3)


def judged(
    reward: Placement, training: Sequence[int], *, steps: int = 1, load_s: float = 0.0, together: bool = True
) -> Outcome:
    """Responses of 2 and 10 tokens on GPU 0, done after 2 s and 10 s, judged as they come or `together` at the end.

    Beside the other, the judge takes three times as long, the rollout twice as long.
    """
    graph = grpo(reference=False, old_log_probs=False)
    graph = graph if together else AsyncReward().rewired(graph)
    strategy = TrainStrategy(dp=len(training))
    groups = {c.name: ((0,) if c.kind == "generate" else tuple(training), strategy) for c in graph.calls}

    return simulated(
        graph,
        grouped(graph, groups, reward),
        {position: [(2, 10)[position % 2]] for position in range(2 * steps)},
        2,
        gpus=2,
        scoring=Judged(),
        steps=steps,
        judge=RewardModelEngine(1, SECOND, crowded(SECOND, 3.0), 4.0, 1000, EngineConfig(), load_s=load_s),
        crowded=(lambda _: crowded(SECOND, 2.0)) if reward.shared else None,
    )


def scored(outcome: Outcome, step: int = 0) -> list[float]:
    return [float(x) for x in outcome.responses[step].scored_at]


def test_on_gpus_of_its_own_nobody_waits_for_anybody() -> None:
    outcome = judged(Placement((1,)), [0], together=False)
    assert scored(outcome) == [2 + 3, 10 + 3]
    assert call_of(outcome, "generate").end_at == 10.0
    assert call_of(outcome, "train").start_at == 13.0
    assert outcome.responses[0].reward.tolist() == [0.5, 0.5]
    assert outcome.responses[0].score_started_at.tolist() == [2.0, 10.0]


@pytest.mark.parametrize(("load_s", "first_at"), [(1.0, 5.0), (4.0, 7.0)])
def test_weights_come_first_where_its_gpus_join_training(load_s: float, first_at: float) -> None:
    """They come from the start of generation on, which has the judge's GPU reserved."""
    outcome = judged(Placement((1,)), [0, 1], load_s=load_s, together=False, steps=2)
    assert scored(outcome) == [first_at, 13.0]
    train = call_of(outcome, "train")
    # 12 tokens and two of prompts, a tenth of a second each on one of two GPUs, and an update of a second
    assert (train.start_at, train.end_at, train.gpus) == (13.0, pytest.approx(13 + 0.7 + 1.0), 2)
    begins = call_of(outcome, "generate", 1).start_at
    assert begins == pytest.approx(14.7)
    assert scored(outcome, 1) == pytest.approx([begins + first_at, begins + 13])
    loading = [s for s in outcome.spans if s.kind == "reward" and s.step == 0 and s.gpus == (1,)]
    assert (loading[0].start_at, loading[0].end_at) == (0.0, load_s)


def test_beside_the_rollout_both_are_slower() -> None:
    """The judge reads the first response from 2 s to 11 s; the rollout's steps take two seconds as long as it does, the
    step that begins at 10 s too, and then one."""
    outcome = judged(Placement((0,), shared=True), [0], together=False)
    generate = call_of(outcome, "generate")
    assert generate.end_at == 2 + 5 * 2 + 3
    assert scored(outcome) == [11.0, generate.end_at + 9]

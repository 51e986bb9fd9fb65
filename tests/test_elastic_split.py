"""GPUs that an asynchronous rollout lends to training: by hand, as nothing where nothing is lent, on random systems."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import tables
from open_workloads import OpenWorkload, Rule, StepTimes
from test_asynchronous import TOLD, of, run
from test_continuous import COSTS

import rlsim
from rlsim.cost.memory import call_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError
from rlsim.models.model import load_model
from rlsim.policies.elastic_split import ElasticSplit
from rlsim.policies.parts import Rewiring
from rlsim.sim.actions import Release
from rlsim.sim.continuous import Update
from rlsim.sim.control import RolloutControl, RolloutView
from rlsim.sim.elastic import Guests, Pieces
from rlsim.sim.outcome import Outcome
from rlsim.sim.run import simulate
from rlsim.workflow import Call, Workflow

# ---- by hand --------------------------------------------------------------------------------------------------------


class LendIdle(RolloutControl):
    """Lends what is idle, but for one replica."""

    def on_finish(self, view: RolloutView) -> Release:
        return Release(() if view.launching else view.idle if view.unfinished() else view.idle[1:])


class Parts(StepTimes):
    """A part of a training call takes a second a token; a guest loads weights for 2 s, its gradients take 3 s."""

    def __init__(self, lends: Sequence[tuple[int, ...]], sync_s: Sequence[float], spread_s: float = 0.0) -> None:
        super().__init__(spread_s, 1.0, sync=sync_s)
        self.lends = lends

    def pieces(self, call: Call) -> Pieces:
        def part(lengths: Sequence[int]) -> list[tuple[str, float]]:
            return [("compute", float(sum(lengths)))]

        guests = Guests(self.lends, part, 2.0, 0, 3.0) if self.lends else None
        return Pieces(part, 12, 0.0, [("optimizer", 1.0)], guests)


def two_steps(lends: Sequence[tuple[int, ...]], weights: Update = Update(), spread_s: float = 0.0) -> Outcome:  # noqa: B008
    """Synchronous steps of two prompts on two replicas; one trainer, on GPU 8. Responses are of 2 and 6 tokens."""
    sizes, rule = (((8, 2),), ((8, 6),)), Rule("staleness", 0, weights=weights)
    work = OpenWorkload(sizes, 2, rule, (), (2.0, 2.0), (2,), costs=COSTS)
    what, times = work.simulation(), Parts(lends, (2.0, 2.0), spread_s)
    workflow = ElasticSplit(lend=bool(lends)).rewired(what.workflow)
    control = LendIdle() if lends else RolloutControl()
    return simulate(dataclasses.replace(what, workflow=workflow, control=control, times=times))


def spans_of(outcome: Outcome, kind: str) -> list[tuple[int, float, float]]:
    """First GPU, start and end."""
    return sorted((span.gpus[0], span.start_at, span.end_at) for span in outcome.spans if span.kind == kind)


def test_a_replica_without_work_trains_until_the_next_weights_come() -> None:
    outcome = two_steps(lends=[(0,)])
    # The first response is there at 3 s; its replica has nothing else to do. The second comes at 7 s, when the trainer
    # is at work on the first until 13 s: the guest takes it, with 2 s for the weights. Then gradients and the update.
    first = [span for span in spans_of(outcome, "train") if span[1] < 28.0]
    assert first == [(0, 7.0, 23.0), (8, 3.0, 13.0), (8, 23.0, 27.0)]
    train, sync = ([c for c in outcome.calls if c.call == name] for name in ("train", "sync"))
    assert (train[0].end_at, train[0].samples) == (27.0, (1, 1))
    assert dict(train[0].parts) == {"compute": 10.0, "optimizer": 1.0, "communication": 3.0}
    assert (sync[0].start_at, sync[0].end_at) == (27.0, 29.0)
    # The GPU generates again from the update on, as the third replica that there ever was. In the next step it is the
    # other one that has the short response.
    assert [(stays.gpus, stays.replica) for stays in outcome.stays] == [((0,), 0), ((1,), 1), ((0,), 2), ((1,), 3)]
    assert outcome.responses[1].started_at.tolist() == [29.0, 29.0]
    assert [rollout.released_gpu_s for rollout in outcome.rollouts] == [0.0, 24.0 + 25.0]  # 3 s to 27 s, 32 s to 57 s
    for step, responses in enumerate(outcome.responses):
        assert (responses.trained & (responses.version == step)).all()


def test_where_each_replica_takes_weights_on_its_own_a_lent_one_does_so_when_it_is_back() -> None:
    outcome = two_steps([(0,)], Update("interrupt", "recompute", "each"), spread_s=5.0)
    # Training ends at 27 s; the trainer pushes for 2 s, the nodes have the weights at 34 s, each replica pulls for 1 s.
    pulls = [span for span in spans_of(outcome, "sync") if span[0] in (0, 1) and span[1] < 40.0]
    assert pulls == [(0, 34.0, 35.0), (1, 34.0, 35.0)]
    assert outcome.responses[1].started_at.tolist() == [35.0, 35.0]


# ---- real systems ---------------------------------------------------------------------------------------------------


class Elastic(Rewiring):
    """Training may borrow, and nobody lends."""

    def rewired(self, workflow: Workflow) -> Workflow:
        return dataclasses.replace(ElasticSplit().rewired(workflow), elastic=True)


def systems(*parts: Any) -> list[Any]:
    """One system without lending, one with it."""
    common = [{"verl": {"tp": 1}}, {"split": {"rollout_gpus": 7}}, "async_reward", *parts]
    return [{"name": name, "use": [*common, {"elastic_split": {"lend": name == "elastic"}}]}
            for name in ("plain", "elastic")]  # fmt: skip


def test_a_guest_holds_what_fsdp_does_but_an_optimizer() -> None:
    """Weights and gradients in fp32, both whole; layers that are not fused, gathered as everywhere."""
    use = [{"verl": {"tp": 1}}, {"split": {"rollout_gpus": 4}}, {"bounded_staleness": {"eta": 1}}, "elastic_split"]
    training, model = {"backend": "fsdp", "micro_batch_tokens": 32_768}, load_model("qwen2.5-7b")
    given = {**tables("bases")["asynchronous"], "model": model.name, "training": training}
    with pytest.raises(CapacityError, match="on a GPU that generation lends") as refused:
        rlsim.run({**given, "systems": [{"name": "elastic", "use": use}]})
    own = call_bytes(model, TrainStrategy(zero_stage=3, micro_batch_tokens=32_768), backward=True)
    batch = sum(own[part] for part in ("gathered layers", "activations", "logits"))
    whole = 4 * model.parameters
    assert f"weights {whole / 1e9:.2f} GB + gradients {whole / 1e9:.2f} GB + a micro-batch {batch / 1e9:.2f} GB" in str(
        refused.value
    )


RULE = {"bounded_staleness": {"eta": 1, "stale": "wait"}}


def test_where_nothing_is_lent_it_is_the_plain_run_exactly() -> None:
    plain, _ = systems(RULE)
    borrowing = {"name": "borrows", "use": [*plain["use"][:-1], f"{__name__}:Elastic"]}
    found = run(plain, borrowing)
    for table, columns in (("steps", TOLD), ("responses", ["finish_at"]), ("calls", ["start_at", "end_at"])):
        one, other = (of(found, name, table)[columns] for name in ("plain", "borrows"))
        np.testing.assert_array_equal(one, other)

"""GPUs of training that generate while it waits: by hand, on real systems, on random ones, and refused."""

import dataclasses
from typing import Any

import pytest
from conftest import tables
from open_workloads import OpenWorkload, Rule
from reference import RefEngine
from reference_open import RefCheck
from test_asynchronous import run
from workloads import LinearStep, StubCosts

import rlsim
from rlsim.errors import CapacityError, PolicyError
from rlsim.sim.actions import Borrow, Migrate, Reconfigure, Release
from rlsim.sim.batching import Batching
from rlsim.sim.continuous import Update
from rlsim.sim.control import Action, RolloutControl, RolloutView
from rlsim.sim.gpus import HybridReplicas
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.run import simulate

# ---- by hand --------------------------------------------------------------------------------------------------------


class BorrowAlways(RolloutControl):
    """Borrows whatever it may while the batch is not there, moves half of what waits, gives back when asked."""

    keep = False

    def on_finish(self, view: RolloutView) -> list[Action]:
        if view.borrowed:
            if view.wanted_back and not self.keep:
                return [Release(view.borrowed)]
            own, there = view.replicas()
            moving = [r.id for r in reversed(own.requests) if not r.has_kv]
            surplus = (len(own.requests) - len(there.requests)) // 2
            return [Migrate(tuple(moving[:surplus]), there.index, "recompute")] if surplus > 0 and moving else []
        return [Borrow()] if view.borrowable and view.batch_missing else []


class KeepAlways(BorrowAlways):
    keep = True


#: A response of 5 tokens to a prompt of 8 takes 6 s on generation's own GPU, and 3 s on the trainer's: another kind.
SLOW = StubCosts({1: LinearStep(a=1.0, p=1 / 8)}, {1: 1000})
FAST = StubCosts({1: LinearStep(a=0.5, p=1 / 16)}, {1: 1000})
TRAINER = 8
ONE_AT_A_TIME = RefEngine(max_num_seqs=1)


def steps_of_four(eta: int, control: RolloutControl | None, load_s: float = 2.0, steps: int = 2) -> Outcome:
    """Steps of four responses: training takes 10 s, new weights 2 s, and the trainer's engine gets them in `load_s`."""
    rule = Rule("staleness", eta, weights=Update("interrupt", "keep"))
    sizes = (((8, 5),),)
    work = OpenWorkload(sizes, 4, rule, (10.0,) * steps, (2.0,) * steps, (1,), costs=SLOW, engine=ONE_AT_A_TIME)
    what = work.simulation()
    hybrid = HybridReplicas([(TRAINER,)], 1, FAST, load_s, "sync") if control else None
    return simulate(dataclasses.replace(what, control=control or RolloutControl(), hybrid=hybrid))


def call_times(outcome: Outcome, name: str) -> list[tuple[float, float]]:
    return [(call.start_at, call.end_at) for call in outcome.calls if call.call == name]


def on_trainer(outcome: Outcome, kind: str) -> list[tuple[float, float]]:
    return [(s.start_at, s.end_at) for s in outcome.spans if s.gpus == (TRAINER,) and s.kind == kind]


def test_under_a_bound_it_gives_back_what_it_has_not_finished() -> None:
    """Eight responses are under way from the start.

    The trainer has four of them from 2 s on, and three done at 11 s, when its own batch is complete: those of 5, 8 and
    11 s, and one of 6 s. The fourth, which it begins at this moment, goes back. Weights come at 21 s, when generation
    has done two more, is 3 s into its fourth and stands still for 2 s. Then four more begin. At 25 s the trainer has
    weights again, and takes three of the six under way; at 26 s the fourth is done, at 28 s the trainer's first: these
    are a batch, with those of 12 and 18 s.
    """
    outcome = steps_of_four(1, BorrowAlways())
    assert [end for _, end in call_times(outcome, "generate")] == [11.0, 28.0]
    assert call_times(outcome, "train") == [(11.0, 21.0), (28.0, 38.0)]
    assert call_times(outcome, "sync")[0] == (21.0, 23.0)
    assert [rollout.borrowed_gpu_s for rollout in outcome.rollouts] == [11.0, 5.0]
    first, second = outcome.responses
    assert sorted(first.finished_at[first.trained]) == [5.0, 6.0, 8.0, 11.0]
    assert sorted(second.finished_at[second.trained]) == [12.0, 18.0, 26.0, 28.0]
    staleness = [1 - version for version in second.version[second.trained].tolist()]
    assert sorted(staleness) == [0, 1, 1, 1]
    # On the trainer there were two replicas, with weights of versions 0 and 1; the first kept the GPU until training.
    assert [stays.replica for stays in outcome.stays if stays.gpus == (TRAINER,)] == [1, 2]


def test_weights_that_come_too_late_are_waited_for() -> None:
    """Generation's own GPU has all four at 24 s; the trainer's engine has its weights at 30 s, and sleeps again."""
    outcome = steps_of_four(0, BorrowAlways(), load_s=30.0, steps=1)
    assert call_times(outcome, "generate")[0][1] == 24.0
    assert call_times(outcome, "train") == [(30.0, 40.0)]
    assert on_trainer(outcome, "sync")[0] == (0.0, 30.0)
    assert not on_trainer(outcome, "decode")


@pytest.mark.parametrize(
    ("lag", "check_s", "generate", "train", "sync", "borrowed_s"),
    [
        (0, 0.0, [(0.0, 12.0), (24.0, 36.0)], [(12.0, 22.0), (36.0, 46.0)], [(22.0, 24.0), (46.0, 48.0)], [12.0, 12.0]),
        # Training has its GPU while the second step is generated, and new weights wait for that.
        (1, 0.0, [(0.0, 12.0), (12.0, 36.0)], [(12.0, 22.0), (38.0, 48.0)], [(36.0, 38.0), (48.0, 50.0)], [12.0, 0.0]),
        # It waits for rewards until 20 s, when the trainer has done two responses of the second step, since 14 s.
        (1, 8.0, [(0.0, 12.0), (12.0, 24.0)], [(20.0, 30.0), (32.0, 42.0)], [(30.0, 32.0), (42.0, 44.0)], [12.0, 8.0]),
    ],
)
def test_a_rollout_of_each_step_borrows_until_training_begins(
    lag: int, check_s: float, generate: Any, train: Any, sync: Any, borrowed_s: list[float]
) -> None:
    """The trainer has the last two of four responses, done after 5 and 8 s; the others are done after 6 and 12 s."""
    checks = ((RefCheck((check_s,), 1e9, 1.0),),) if check_s else ()
    times = (10.0,) * 2, (2.0,) * 2, (1,)
    work = OpenWorkload((((8, 5),),), 4, Rule(), *times, costs=SLOW, engine=ONE_AT_A_TIME, checks=checks, workers=4)
    what = work.simulation()
    edges = [dataclasses.replace(edge, grain="stage") for edge in what.workflow.edges]
    edges = [dataclasses.replace(e, lag=1 + lag, exact=True) if e.source == "sync" else e for e in edges]
    outcome = simulate(
        dataclasses.replace(
            what,
            workflow=dataclasses.replace(what.workflow, edges=tuple(edges), elastic=False),
            batching=Batching(),
            requests=lambda launched, _, first: [Request(first + i, p.position, 8, 5) for i, p in enumerate(launched)],
            control=BorrowAlways(),
            hybrid=HybridReplicas([(TRAINER,)], 1, FAST, 2.0, "sync"),
        )
    )
    assert [call_times(outcome, name) for name in ("generate", "train", "sync")] == [generate, train, sync]
    assert [rollout.borrowed_gpu_s for rollout in outcome.rollouts] == borrowed_s


class BorrowAnyway(RolloutControl):
    def on_finish(self, view: RolloutView) -> Borrow:
        return Borrow()


class SwitchThere(BorrowAlways):
    def on_finish(self, view: RolloutView) -> list[Action]:
        return [Reconfigure(1, 1)] if view.borrowed else super().on_finish(view)


def test_what_a_control_may_not_do_there() -> None:
    what = OpenWorkload((((8, 5),),), 4, Rule(), (1.0,), (1.0,), costs=SLOW).simulation()
    with pytest.raises(PolicyError, match="no system part says that GPUs of training may be borrowed"):
        simulate(dataclasses.replace(what, control=BorrowAnyway()))
    with pytest.raises(PolicyError, match="node 1 is training's, and keeps its layout"):
        steps_of_four(1, SwitchThere())
    with pytest.raises(PolicyError, match=r"step 0 comes to a halt.*borrowed and not given back"):
        steps_of_four(1, KeepAlways())


# ---- real systems ---------------------------------------------------------------------------------------------------

RULE = {"bounded_staleness": {"eta": 1, "stale": "wait"}}


def test_two_kinds_of_gpu_each_generate_at_their_own_rate() -> None:
    """The trainer's H100s decode in a shorter time than the H20s of generation would, by their own calibration."""
    common = [{"verl": {"tp": 4}}, "split", {"bounded_staleness": {"eta": 0}}]
    hybrid = {"name": "hybrid", "use": [*common, "hybrid_rollout"]}
    found = rlsim.run({**tables("bases")["two kinds"], "systems": [hybrid]})
    assert (found.steps["gen_bound_s"] < found.steps["gen_time_s"]).all(), "which knows of both kinds"
    stays = found.stays.query("left == 'finished'")
    on = {kind: stays.query(f"gpu {there} 16") for kind, there in (("h20", "<"), ("h100", ">="))}
    assert len(on["h20"])
    assert len(on["h100"])
    assert on["h100"]["left_at"].max() <= on["h20"]["left_at"].max(), "they are done with their share before"


# ---- refusals -------------------------------------------------------------------------------------------------------

FOUR: dict[str, Any] = {"split": {"rollout_gpus": 4}}
TP1 = {"verl": {"tp": 1}}


def test_replicas_must_fit_beside_the_states_of_training() -> None:
    training = {"backend": "fsdp", "logits": "fused", "micro_batch_tokens": "4K"}

    def steps(offload: bool, *parts: str) -> int:
        system = {"name": "large", "use": [TP1, FOUR, RULE, *parts]}
        training["offload"] = offload
        return len(run(system, model="qwen2.5-14b", training=training, workflow={"steps": 1}).steps)

    assert steps(False) == 1
    told = (
        r"no rollout replica fits on the GPUs of call train, where 44\.\d+ GB stay.*it fits with training.offload=true"
    )
    with pytest.raises(CapacityError, match=told):
        steps(False, "hybrid_rollout")
    assert steps(True, "hybrid_rollout") == 1

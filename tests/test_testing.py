"""The contract checker: every registered policy passes, and policies that break it do not."""

import random
import sys
from functools import cache
from typing import Any

import pytest
from conftest import cases

import rlsim
from rlsim import Schema
from rlsim.errors import ConfigError
from rlsim.experiment.testing import Checked, ContractError, check_policy
from rlsim.policies.registry import load_policy, policy_names
from rlsim.sim.actions import Abort, Reconfigure, Release, Stop
from rlsim.sim.batching import Batching, PromptFeed
from rlsim.sim.control import ControlContext, Launch, RolloutControl, RolloutView
from rlsim.sim.rollout import Rollout


@cache
def contract_of(name: str) -> Checked:
    """What was checked of a policy of rlsim."""
    return check_policy(load_policy(name))


@pytest.mark.parametrize("name", sorted(policy_names()))
def test_every_policy_keeps_the_contract(name: str) -> None:
    contract_of(name)


class Base(RolloutControl):
    def initial_tp(self, context: ControlContext) -> int:
        return 2


class Fine(Base):
    """Does a bit of everything."""

    def on_finish(self, view: RolloutView) -> Any:
        if view.unfinished() == 1 and view.now_s > 60:
            return Stop()
        if view.unfinished() < view.total // 8:
            return [Reconfigure(node, 8, "recompute") for node in view.finished_nodes if view.tp(node) != 8]
        if view.unfinished() == view.total // 2 and len(view.replicas()) > 2:
            return Release((view.replicas()[-1].index,))
        return None


def test_a_policy_that_stops_and_releases() -> None:
    checked = check_policy(Fine)
    assert {kind for kind, count in checked.actions.items() if count} == {"Reconfigure", "Release", "Stop"}
    assert checked.answers > sum(checked.actions.values())
    assert checked.not_checked == ("Fine.on_finish never returned Migrate or Abort",)
    assert check_policy(lambda: Fine()) == checked


def test_what_was_checked_is_told() -> None:
    with pytest.raises(ContractError, match="'a long tail': tp 3 does not divide the 8 GPUs of a node"):
        check_policy(load_policy("verl"), tp=3)
    tuned = contract_of("verl")
    assert tuned.parameters == ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 8})
    assert tuned.rollouts == 10 * 8 * 4  # twice two, then six other futures; batches; choices
    assert str(tuned).startswith("VeRL keeps the contract in 320 rollouts")
    assert "on_finish" not in str(tuned)  # nobody overrides on_finish
    sampling = contract_of("dynamic_sampling")
    assert sampling.prompts["dropped"] > 0
    assert sampling.not_checked == ()
    assert "one request" not in sampling.batches  # a single response has no variance
    assert contract_of("adaptive_timeout").not_checked == ()
    (predicted,) = check_policy(load_policy("queue_order"), error=0.1).not_checked
    assert predicted == "QueueOrder may know lengths in advance: length_error asks for a predictor of them"
    beside = str(contract_of("async_reward"))
    assert beside.endswith("AsyncReward: only a run of an experiment calls rewired")


class Peeks(Base):
    """Looks behind the view."""

    def on_finish(self, view: RolloutView) -> None:
        max(r.response_tokens for r in view._rollout.requests)  # type: ignore[attr-defined]


class Clairvoyant(Base):
    """Finds the true lengths somewhere else, and switches early if there is a long response to come."""

    def on_finish(self, view: RolloutView) -> Any:
        frame: Any = sys._getframe()
        while not isinstance(rollout := frame.f_locals.get("self"), Rollout):
            frame = frame.f_back
        left = max(r.response_tokens for r in rollout.requests if not r.finished)
        return [Reconfigure(n, 8) for n in view.finished_nodes if view.tp(n) != 8] if left > 9000 else []


class KnowsBefore(Base):
    """Chooses its first layout by the lengths to come."""

    def setup(self, context: ControlContext) -> None:
        KnowsBefore.calls += 1

    calls = 0

    def initial_tp(self, context: ControlContext) -> int:
        return 2 if KnowsBefore.calls <= 2 else 4


class Random(Base):
    """Throws dice."""

    dice = random.Random(0)

    def on_finish(self, view: RolloutView) -> Any:
        requests = view.replicas()[0].requests
        return Abort((requests[0].id,)) if requests and self.dice.random() < 0.3 else None


class Frail(Base):
    """Fails where nothing finishes twice."""

    def on_finish(self, view: RolloutView) -> Any:
        return None if view.finished > 1 else 1 / 0


class Tampers(Base):
    def on_finish(self, view: RolloutView) -> Any:
        view.total = 3  # type: ignore[misc]


class Shortens(Base):
    """Takes work away from what runs."""

    def on_finish(self, view: RolloutView) -> None:
        frame: Any = sys._getframe()
        while not isinstance(rollout := frame.f_locals.get("self"), Rollout):
            frame = frame.f_back
        for request in [r for r in rollout.requests if not r.finished][:1]:
            request.response_tokens -= 1


class GivesUp(Base):
    """Stops before anything is finished."""

    every_s = 0.01

    def on_timer(self, view: RolloutView) -> Stop:
        return Stop()


class Nothing(Batching):
    def launch(self, feed: PromptFeed) -> Launch:
        return Launch((), feed.responses)


class Backwards(Batching):
    def launch(self, feed: PromptFeed) -> Launch:
        return Launch(feed.take(-1), feed.responses)


def raises(view: RolloutView, key: int = 3) -> None:
    raise KeyError(key)


class Few(Batching):
    """Launches less than a batch."""

    def launch(self, feed: PromptFeed) -> Launch:
        return Launch(feed.take(max(feed.prompts - 1, 1)), feed.responses)


@cases("hooks", "policies that break it")
def test_policies_that_break_it(policy: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_policy({**globals(), "dict": dict}[policy])


def to_eight(view: RolloutView, left: int = 16) -> Any:
    """A function that decides."""
    return [
        Reconfigure(node, 8) for node in view.finished_nodes if view.tp(node) != 8 and view.unfinished(node) <= left
    ]


class ToEight(Schema, RolloutControl):
    left: int = 16

    def on_finish(self, view: RolloutView) -> Any:
        return to_eight(view, self.left)


def test_a_function_of_the_view_is_a_control() -> None:
    """It is asked as the class with the same `on_finish`, takes its other arguments as parameters, and is checked."""
    base = {"name": "x", "cluster": "8xh100", "model": "llama-3.1-8b", "calibration": "h100-vllm", "seeds": 1,
            "trace": {"path": "deepscaler-llama-3.1-8b", "cap": "4K"},
            "workflow": {"prompts": 8, "responses": 4, "steps": 1}}  # fmt: skip
    systems = [
        {"name": name, "use": [{"verl": {"tp": 2}}, {f"{__name__}:{name}": {"left": [4, 8]}}]}
        for name in ("to_eight", "ToEight")
    ]
    rows = rlsim.run({**base, "systems": systems}).summary().set_index("system")
    assert rows["switches"].gt(0).all()
    for left in (4, 8):
        assert rows.loc[f"to_eight-left{left}", "step_time_s"] == rows.loc[f"ToEight-left{left}", "step_time_s"]
    assert check_policy(to_eight, left=8).actions == check_policy(ToEight, left=8).actions
    with pytest.raises(ConfigError, match="left: expected a whole number"):
        rlsim.run({**base, "systems": [{f"{__name__}:to_eight": {"left": "x"}}]})

"""What a system must be for one rollout to serve all steps."""

from __future__ import annotations

from rlsim.errors import ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.system import System
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import Controls, RolloutControl
from rlsim.workflow import Plan, Workflow


def is_open(system: System) -> bool:
    """Whether the system generates in one rollout for all steps."""
    return isinstance(system.batching.launcher, Continuous)


def check_open(loaded: LoadedExperiment, system: System, graph: Workflow) -> None:
    """Raises `ConfigError` if the calls, or parts of the system, do not go with a rollout that never ends."""
    if not is_open(system):
        return
    who = type(system.batching.launcher).__name__
    generate = next((call.name for call in graph.calls if call.kind == "generate"), None)
    if generate is None:
        raise ConfigError(f"{graph.name} generates nothing: {who} has nothing to launch")
    sources = graph.into(generate)
    syncs = [edge for edge in sources if graph.call(edge.source).kind == "sync"]
    if not syncs:
        raise ConfigError(f"{graph.name}: no weight sync brings new weights to {generate}, which {who} never stops")
    if any(edge.lag != 1 for edge in syncs):
        raise ConfigError(
            f"{graph.name}: {who} says how old a response may be, so no lag of the weights does: leave the part or the "
            f"edge that gives {generate} a lag out"
        )
    if any(edge.grain == "chunk" for edge in graph.edges):
        raise ConfigError(f"responses go on by the chunk within a step; under {who} they belong to none until complete")
    if graph.baseline_responses:
        raise ConfigError(f"{graph.name}: {who} cannot tell the response of each prompt that others are compared with")
    early = any(edge.grain == "sample" and graph.call(edge.target).kind == "reward" for edge in graph.edges)
    if system.batching.needs_rewards and not early:
        raise ConfigError(f"under {who} rewards that decide what is trained on come by the sample: add async_reward")
    if loaded.scoring.judged.any() and system.judge:
        raise ConfigError(
            f"under {who} training would go on all the time beside a colocated judge, and what that costs it is not "
            "known: leave out colocated_judge, and the judge has GPUs of its own (in place of reward_scheduler, name "
            "async_reward and adaptive_timeout)"
        )
    for part in system.control.parts if isinstance(system.control, Controls) else (system.control,):
        if type(part).next_tp is not RolloutControl.next_tp:
            raise ConfigError(f"{type(part).__name__} plans the layout of the next rollout; under {who} there is none")


def check_open_gpus(system: System, graph: Workflow, plan: Plan) -> None:
    """Raises `ConfigError` if other calls work on the GPUs of a rollout that never ends."""
    if not is_open(system):
        return
    generating = {gpu for c in graph.calls if c.kind == "generate" for gpu in plan.of(c.name).gpus}
    for call in graph.calls:
        if call.kind not in ("generate", "sync") and not generating.isdisjoint(plan.of(call.name).gpus):
            raise ConfigError(
                f"call {call.name} works on GPUs on which {type(system.batching.launcher).__name__} generates without "
                "end: add `split`, or a plan, that gives generation GPUs of its own"
            )

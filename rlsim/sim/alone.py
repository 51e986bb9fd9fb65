"""One generation stage on its own, without the workflow around it: the one way to run the engine from outside `sim`."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from rlsim.errors import PolicyError
from rlsim.sim.rollout import Rollout
from rlsim.sim.stage import GenerationStage


def run_rollout(stage: GenerationStage, begun: Callable[[Rollout], None] | None = None) -> Rollout:
    """Run the stage, and return the rollout once it is over; the requests hold their moments.

    The clock starts at 0 and stands at `env.now`, in seconds. `begun` is handed the rollout at its start. Raises
    `PolicyError` if it comes to a halt: requests are left and nobody is at work.
    """
    env = simpy.Environment()
    rollout = Rollout(env, stage)
    if begun:
        begun(rollout)
    try:
        env.run(until=rollout.done)
    except RuntimeError as error:
        if rollout.done.triggered or env.peek() != float("inf"):
            raise
        left = sum(not (request.finished or request.aborted) for request in rollout.requests)
        raise PolicyError(f"the rollout comes to a halt with {left} requests unfinished and nobody at work") from error
    rollout.close()
    return rollout

"""One generation stage on its own, without the workflow around it: the one way to run the engine from outside `sim`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simpy

from rlsim.errors import PolicyError
from rlsim.sim.control import RolloutControl, RolloutCosts
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout


def run_rollout(
    requests: Sequence[Request],
    *,
    mesh: Sequence[tuple[int, ...]],
    tp: int,
    costs: RolloutCosts,
    config: EngineConfig,
    cap_tokens: int,
    control: RolloutControl | None = None,
    begun: Callable[[Rollout], None] | None = None,
    **more: Any,
) -> Rollout:
    """Generate `requests`, and return the rollout once it is over; the requests hold their moments.

    The clock starts at 0 and stands at `env.now`, in seconds. `mesh` are the GPUs of each node. Without a `control` the
    layout stays as it is. `begun` is handed the rollout at its start, `more` are further arguments of `Rollout`. Raises
    `PolicyError` if it comes to a halt: requests are left and nobody is at work.
    """
    env = simpy.Environment()
    rollout = Rollout(
        env,
        mesh=mesh,
        tp=tp,
        requests=requests,
        costs=costs,
        config=config,
        control=control or RolloutControl(),
        cap_tokens=cap_tokens,
        **more,
    )
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

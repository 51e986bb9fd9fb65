"""veRL's keys for what systems differ in: `rlsim init --from-verl` reads them, `rlsim advise` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlsim.verl.defaults import ROLLOUT

TP = ROLLOUT + "tensor_model_parallel_size"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
#: Groups whose rewards are all alike are dropped, and others generated: `dynamic_sampling`.
FILTER = "algorithm.filter_groups.enable"
#: Log-probs do not wait for rewards: `reward_beside`, or `workflow.reward.order`.
REWARD_ASYNC = "reward_model.launch_reward_fn_async"
#: Policies that veRL has a switch for.
SWITCHES = {"dynamic_sampling": FILTER, "reward_beside": REWARD_ASYNC}


def overrides_of(parts: Iterable[tuple[str, Mapping[str, Any]]], per_tp: int = 1) -> dict[str, Any] | None:
    """veRL's settings for a system of these policies with their parameters, by key; None if it has none for one.

    A TP that is to be tuned (`best`) is no setting: give the parts of what it came out as. A replica has `per_tp` GPUs
    for each of its TP: pipeline stages times groups of data-parallel attention, which veRL counts apart.
    """
    found: dict[str, Any] = {}
    for policy, parameters in parts:
        if policy == "verl" and isinstance(parameters.get("tp"), int):
            found[TP] = parameters["tp"] // per_tp
        elif policy in SWITCHES and not parameters:
            found[SWITCHES[policy]] = True
        else:
            return None
    return found


def gpus_of(nodes: int, gpus_per_node: int) -> dict[str, int]:
    """veRL's settings for so many GPUs."""
    return {NODES: nodes, GPUS_PER_NODE: gpus_per_node}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What to change in a veRL run, a `key=value` each; switches that are not on any more are off."""
    wanted = {**{key: False for key, value in before.items() if value is True}, **after}
    return tuple(f"{key}={value}" for key, value in wanted.items() if before.get(key) != value)

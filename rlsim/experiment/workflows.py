"""The workflow that an experiment names: one of the algorithms, a graph spelled out, or what a function makes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection

from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.schema import WorkflowSpec
from rlsim.workflow import Call, Edge, Workflow
from rlsim.workflow.algorithms import ALGORITHMS


def workflow_of(spec: WorkflowSpec, roles: Collection[str]) -> Workflow:
    """The calls of a step; `roles` are the models that the experiment has.

    Raises `ConfigError` or `CatalogueError` for an unknown algorithm or model, or a graph that cannot run.
    """
    workflow = _make(spec, roles)
    for call in workflow.calls:
        if call.kind != "reward" and call.model not in roles:
            raise unknown_name(f"model of the call {call.name} (see `models`)", call.model, roles)
    unused = set(roles) - {"actor", "reference", "critic", *(call.model for call in workflow.calls)}
    if unused:
        known = sorted({call.model for call in workflow.calls if call.kind != "reward"} - {"actor"})
        raise unknown_name(f"model role for {workflow.name}", min(unused), known)
    return workflow


def _make(spec: WorkflowSpec, roles: Collection[str]) -> Workflow:
    if spec.algorithm == "custom":
        calls = tuple(Call(call.name, call.kind, call.model) for call in spec.calls)
        edges = tuple(Edge(edge.source, edge.target, edge.lag, edge.grain, barrier=edge.barrier) for edge in spec.edges)
        return Workflow("custom", calls, edges, spec.group_advantage)
    if ":" in spec.algorithm:
        return _loaded(spec.algorithm)
    if spec.algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", spec.algorithm, [*ALGORITHMS, "custom"])
    make = ALGORITHMS[spec.algorithm]
    old_log_probs = spec.algorithm == "grpo" if spec.old_log_probs is None else spec.old_log_probs
    given = {
        "reference": spec.reference,
        "old_log_probs": old_log_probs,
        "reward_model": "reward" in roles,
        "reward_first": spec.reward.order != "beside_log_probs",
    }
    return make(**{key: value for key, value in given.items() if key in inspect.signature(make).parameters})


def _loaded(name: str) -> Workflow:
    module_name, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"workflow.algorithm: {name} cannot be loaded: {error}") from None
    if not isinstance(made, Workflow):
        raise ConfigError(f"workflow.algorithm: {name} made {made!r}, expected a rlsim.workflow.Workflow")
    return made

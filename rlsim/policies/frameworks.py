"""Where published frameworks place the calls of an RLHF step, each a baseline under its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from pydantic import Field

from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema
from rlsim.errors import CapacityError
from rlsim.policies.parts import Placing, PlanContext
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan, grouped, with_transfers

#: GPUs, and whether they take a call.
Group = tuple[tuple[int, ...], Callable[[Call], bool]]


class Megatron(Schema, Placing):
    """The heuristic of Megatron-style frameworks, as REAL's authors state it: one symmetric layout for all calls.

    TP fills a node, PP and DP go across nodes, DP as large as memory allows.
    """

    micro_batches: int | None = Field(default=None, ge=1, le=1_000_000)
    graphs: bool = True

    def plan(self, context: PlanContext) -> Plan:
        """The first layout that fits, from the fewest pipeline stages on; raises `CapacityError` if none does."""
        gpus = len(context.gpus)
        tp = min(context.cluster.gpus_per_node, gpus)
        error = CapacityError("no layout")
        for pp in (pp for pp in range(1, gpus // tp + 1) if gpus % (tp * pp) == 0):
            zero = context.style.zero_stage if pp == 1 else min(context.style.zero_stage, 1)
            strategy = replace(
                context.style, dp=gpus // tp // pp, tp=tp, pp=pp, cp=1, zero_stage=zero,
                micro_batches=self.micro_batches, sequence_parallel=context.style.sequence_parallel and tp > 1,
            )  # fmt: skip
            # A rollout engine shards no parameters, and batches continuously: the degrees are the same.
            engine = replace(strategy, zero_stage=0, micro_batches=None)
            placed = {
                call.name: Placement(context.gpus, engine if call.kind == "generate" else strategy)
                for call in context.workflow.calls
                if call.kind not in ("sync", "reward")
            }
            plan = with_transfers(context.workflow, placed, context.reward)
            plan = plan if self.graphs else _eager(plan, context.workflow)
            try:
                context.check(plan)
            except CapacityError as too_large:
                error = too_large
            else:
                return plan
        raise error


class ThreeGroups(Schema, Placing):
    """Generation on its own GPUs; of the rest, half for actor and reference, half for critic and reward model."""

    rollout: float = Field(default=0.5, gt=0, lt=1)

    def plan(self, context: PlanContext) -> Plan:
        """Three groups (two if there is neither critic nor reward model), all trained under ZeRO-3."""
        gpus = context.gpus
        count = round(self.rollout * len(gpus))
        rest = gpus[count:]
        second = any(call.model in ("critic", "reward") and call.kind != "reward" for call in context.workflow.calls)
        half = len(rest) // 2 if second else len(rest)
        refuse("three groups", gpus=len(gpus), cut=0 < count < len(gpus) and half)
        actor = (rest[:half], lambda call: call.model in ("actor", "reference"))
        generate = (gpus[:count], lambda call: call.kind == "generate")
        return on_groups(context, [generate, actor, (rest[half:], any_call)], zero_stage=3)


class TwoGroups(Schema, Placing):
    """Actor and reference on the first half of the GPUs, critic and reward model on the second."""

    def plan(self, context: PlanContext) -> Plan:
        gpus, half = context.gpus, len(context.gpus) // 2
        models = {call.model for call in context.workflow.calls if call.kind != "reward"}
        refuse("two groups", half=half, models=models)
        return on_groups(
            context, [(gpus[:half], lambda call: call.model in ("actor", "reference")), (gpus[half:], any_call)]
        )


class AllOnAll(Schema, Placing):
    """Every call on all GPUs, spread as the experiment's `training` says; or the reward model apart on the last one."""

    graphs: bool = True
    zero_stage: int | None = None
    scorer_apart: bool = False

    def plan(self, context: PlanContext) -> Plan:
        gpus, groups = context.gpus, [(context.gpus, any_call)]
        if self.scorer_apart:
            groups = [(gpus[:-1], lambda call: call.model != "reward"), (gpus[-1:], any_call)]
        refuse("reward model apart", apart=self.scorer_apart, gpus=gpus)
        plan = on_groups(context, groups, zero_stage=self.zero_stage)
        return plan if self.graphs else _eager(plan, context.workflow)


def any_call(call: Call) -> bool:  # noqa: ARG001
    """Whether a group takes the call: it takes all that none before it has taken."""
    return True


def _eager(plan: Plan, workflow: Workflow) -> Plan:
    """The plan, its generation without CUDA graphs."""
    generating = {call.name for call in workflow.calls if call.kind == "generate"}
    return Plan({name: replace(at, graphs=False) if name in generating else at for name, at in plan.placements.items()})


def on_groups(
    context: PlanContext,
    groups: Iterable[Group],
    zero_stage: int | None = None,
) -> Plan:
    """Every call on the first group that wants it, spread as the experiment's `training` says."""
    known = list(groups)
    found = {}
    for call in context.workflow.calls:
        if call.kind not in ("sync", "reward"):
            gpus = next(gpus for gpus, wants in known if wants(call))
            # Generation alone need not be cut as training is: the rollout control lays it out.
            strategy = context.style if call.kind == "generate" else context.training(len(gpus))
            if zero_stage is not None:
                strategy = replace(context.style, dp=len(gpus), zero_stage=zero_stage)
            found[call.name] = gpus, strategy
    return grouped(context.workflow, found, context.reward)

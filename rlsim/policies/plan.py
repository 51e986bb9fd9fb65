"""Plans: spelled out, for every call its GPUs and its parallel strategy; or searched for before training begins."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field

from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema
from rlsim.cost.strategy import Recompute, TrainStrategy
from rlsim.errors import ConfigError, unknown_name
from rlsim.policies.parts import Placing, PlanContext, PlanSearch, Rewiring
from rlsim.units import Tokens
from rlsim.workflow.graph import Workflow
from rlsim.workflow.plan import Placement, Plan, with_transfers

#: What the plan of a generating call may say.
_GENERATION = ("gpus", "tp", "pp", "dp", "micro_batches", "memory_share", "graphs")
#: Of any call.
_DEGREES = ("tp", "pp", "dp", "cp", "ep", "expert_tp", "micro_batches")


class CallPlan(Schema):
    """Where one call runs, and how it is spread there. What is not given is as the experiment's `training` says."""

    gpus: str = "all"
    tp: int | None = Field(default=None, ge=1)
    pp: int | None = Field(default=None, ge=1)
    cp: int | None = Field(default=None, ge=1)
    dp: int | None = Field(default=None, ge=1)
    ep: int | None = Field(default=None, ge=1)
    expert_tp: int | None = Field(default=None, ge=1)
    micro_batches: int | None = Field(default=None, ge=1, le=1_000_000)
    micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    memory_share: float | None = Field(default=None, gt=0, le=1)
    graphs: bool = True
    zero_stage: Literal[0, 1, 2, 3] | None = None
    recompute: Recompute | None = None
    offload: bool | None = None


class ExplicitPlan(Schema, Placing):
    """Every call of the workflow but weight syncs, which run over the GPUs of the calls on both sides, and rewards."""

    calls: Mapping[str, CallPlan] = {}

    @classmethod
    def of(cls, plan: Plan, workflow: Workflow) -> ExplicitPlan:
        """A plan as it would be written."""
        calls = {}
        for call in (call for call in workflow.calls if call.kind not in ("sync", "reward")):
            at, backward = plan.of(call.name), call.kind == "train"
            given: dict[str, Any] = {"gpus": f"{at.gpus[0]}-{at.gpus[-1]}", "memory_share": at.memory_share}
            if own := at.strategy:
                keys = _DEGREES if call.kind != "generate" else set(_DEGREES).intersection(_GENERATION)
                given |= {key: getattr(own, key) for key in keys}
            if own and call.kind != "generate":
                given |= {"zero_stage": own.zero_stage, "offload": own.offload}
                if own.micro_batches is None and not own.sequences(backward=backward):  # else `training` has it
                    given["micro_batch_tokens"] = own.budget(backward=backward)
            calls[call.name] = CallPlan(graphs=at.graphs, **given)
        return cls(calls=calls)

    def plan(self, context: PlanContext) -> Plan:
        """The plan; raises `ConfigError` for a call that is missing or unknown, or degrees that are not its GPUs."""
        placed = {call.name: call for call in context.workflow.calls if call.kind not in ("sync", "reward")}
        for name in self.calls:
            if name not in placed:
                raise ConfigError(str(unknown_name("call in the plan", name, placed)))
        refuse("plan", missing=", ".join(sorted(placed.keys() - self.calls.keys())))
        style, found = replace(context.style, **context.degrees), dict[str, Placement]()
        for name, call in self.calls.items():
            gpus = _gpus(name, call.gpus, context.gpus)
            if placed[name].kind == "generate":
                strategy = _generation(name, call, len(gpus))
                found[name] = Placement(gpus, strategy, memory_share=call.memory_share, graphs=call.graphs)
            else:
                refuse("planned call", name=name, call=call)
                found[name] = Placement(gpus, _strategy(name, call, len(gpus), style))
        return with_transfers(context.workflow, found, context.reward)


def part_of(plan: Plan, workflow: Workflow) -> dict[str, Any]:
    """A plan as a part of a system: `{plan: {calls: …}}`."""
    written = ExplicitPlan.of(plan, workflow)
    return {"plan": written.model_dump(mode="json", exclude_none=True, exclude_defaults=True)}


def plan_text(data: Mapping[str, Any] | Sequence[Any], about: str) -> str:
    """What holds a plan as YAML, one call a line, with a comment above."""
    from ruamel.yaml import YAML

    yaml, file = YAML(), io.StringIO()
    yaml.default_flow_style, yaml.width = None, 120
    file.write(f"# {about}\n")
    yaml.dump(data, file)
    return file.getvalue()


def _gpus(name: str, text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    if text == "all":
        return known
    first, _, last = text.partition("-")
    gpus = tuple(range(int(first), int(last or first) + 1))
    refuse("planned GPUs", name=name, text=text, gpus=gpus, known=known, last=known[-1])
    return gpus


def _generation(name: str, call: CallPlan, gpus: int) -> TrainStrategy | None:
    """The rollout engine's degrees; None if the system's layout says them. It knows nothing of training's switches."""
    given = call.model_dump(exclude_defaults=True).keys()
    senseless, cut = ", ".join(sorted(given - set(_GENERATION))), bool(given & {"pp", "dp", "micro_batches"})
    refuse("planned generation", name=name, call=call, senseless=senseless, cut=cut, known=", ".join(_GENERATION))
    return None if call.tp is None else _strategy(name, call, gpus, TrainStrategy(sequence_parallel=True))


def _strategy(name: str, call: CallPlan, gpus: int, style: TrainStrategy) -> TrainStrategy:
    tp, pp, cp = call.tp or style.tp, call.pp or style.pp, call.cp or style.cp
    share = tp * pp * cp
    dp = call.dp or max(gpus // share, 1)
    refuse("planned degrees", name=name, dp=dp, tp=tp, pp=pp, cp=cp, share=share, gpus=gpus)
    given = call.model_dump(exclude={"gpus", "memory_share", "graphs"}, exclude_none=True)
    if call.micro_batch_tokens is not None:
        own = ("log_prob_micro_batch_tokens", "micro_batch_sequences", "log_prob_micro_batch_sequences")
        given |= dict.fromkeys(own)  # the call's own budget holds, whatever its kind
    if pp > 1 and style.zero_stage > 1 and call.zero_stage is None:
        given["zero_stage"] = 1  # the other stages do not go with a pipeline
    given |= {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    return replace(style, sequence_parallel=style.sequence_parallel and tp > 1, **given)


class REAL(Schema, Placing, Rewiring):
    """Search meshes and strategies for all calls under the light estimator, then keep that plan.

    REAL (Mei et al., MLSys 2025). Its runtime starts a call when its data and GPUs are there: log-probs and values do
    not wait for rewards.
    """

    method: Literal["descent", "mcmc"] = "descent"
    evaluations: int = Field(default=250_000, ge=1, le=1_000_000_000)
    seed: int = Field(default=0, ge=0)
    pipelined_generation: bool = True
    most_plans: Annotated[float, Field(ge=1)] | None = None
    context_parallel: bool = False

    def rewired(self, workflow: Workflow) -> Workflow:
        """Edges that carry data or parameters only."""
        return workflow.without_barriers()

    def plan(self, context: PlanContext) -> Plan:
        most, spaces = self.most_plans or inf, (self.pipelined_generation, self.context_parallel)
        return context.search(PlanSearch(self.method, self.evaluations, self.seed, *spaces, most))

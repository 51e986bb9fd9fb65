"""Engines of an experiment: the rollout's, a judge's, and those of calls that take responses by the chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from rlsim.base.refusals import refuse
from rlsim.cost.derived import crowded, streamed
from rlsim.cost.ledger import Row
from rlsim.cost.memory import RESERVED_BYTES, kv_page_bytes, rollout_weight_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.transfer import host_copy_s, judge_bytes, layers_to_offload, stream_s
from rlsim.errors import CapacityError
from rlsim.experiment.build import Kind, LoadedExperiment
from rlsim.experiment.schema import JudgeSpec
from rlsim.models.hardware import AnyCluster, Gpu
from rlsim.models.model import Model
from rlsim.policies.parts import ChunkStreaming, JudgePlacement
from rlsim.sim.server import RewardModelEngine
from rlsim.workflow import Call, Placement, Plan, Workflow

#: Share of GPU memory that a scoring model beside other calls has for its KV cache (assumed).
KV_SHARE = 0.05

#: Sequences whose scores such a model computes at once: its logits are no larger.
SEQUENCES = 64


def streamed_calls(workflow: Workflow) -> tuple[Call, ...]:
    """The calls that take responses by the chunk."""
    return tuple(call for call in workflow.calls if any(e.grain == "chunk" for e in workflow.into(call.name)))


def beside_generation(plan: Plan, workflow: Workflow, streamed: Sequence[Call]) -> Plan:
    """The plan, with `streamed` calls beside generation where they want its GPUs."""
    generating = {g for call in workflow.calls if call.kind == "generate" for g in plan.of(call.name).gpus}
    own = {call.name: plan.of(call.name) for call in streamed}
    shared = {name: replace(one, shared=not generating.isdisjoint(one.gpus)) for name, one in own.items()}
    return Plan({**plan.placements, **shared})


def _engine(loaded: LoadedExperiment, kind: Kind, model: Model, share: float, **other: Any) -> RolloutCostModel:
    """An engine of the experiment with a model on GPUs of one kind, of each of which it has this share.

    Raises `ConfigError` for a share with which it does not start.
    """
    engine, most = loaded.experiment.engine, kind.calibration.memory_rule.most_share(kind.cluster.gpu.memory_bytes)
    planned = engine.pp > 1 and other.get("planned", False)
    refuse("engine", share=share, most=most, engine=kind.calibration.engine, planned=planned)
    return RolloutCostModel(
        model,
        kind.cluster,
        kind.calibration,
        page_tokens=engine.page_tokens,
        max_batched_tokens=engine.max_num_batched_tokens,
        max_sequences=engine.max_num_seqs,
        memory_utilization=share,
        **other,
    )


def rollout_costs(
    loaded: LoadedExperiment,
    gpus: Sequence[int],
    *,
    memory_share: float | None = None,
    strategy: TrainStrategy | None = None,
    graphs: bool = True,
    resident_bytes: float = 0.0,
    role: str = "actor",
) -> RolloutCostModel:
    """The rollout engine on these GPUs, by `strategy` if a plan has one for them.

    `memory_share`: what it has of each, by default what the experiment says. Raises `ConfigError` for stages of the
    plan's beside the engine's own.
    """
    engine, kind = loaded.experiment.engine, loaded.kind(gpus, "generation")
    return _engine(
        loaded,
        kind,
        loaded.served[role],
        loaded.experiment.memory_utilization if memory_share is None else memory_share,
        sampling_s_per_logit=engine.sampling_per_logit,
        largest_graph=(engine.largest_graph or math.inf) if engine.graphs and graphs else 0,
        prompt_graphs=engine.graphs is True,
        gpus=gpus,
        pp=engine.pp if strategy is None else strategy.pp,
        planned=strategy is not None,
        layout=loaded.replica,
        resident_bytes=resident_bytes,
        kv_offloading_bytes=engine.kv_offloading_bytes,
        drafts=loaded.drafts,
    )


def scorer_of(
    loaded: LoadedExperiment, call: Call, placement: Placement, streaming: ChunkStreaming
) -> RewardModelEngine:
    """The engine of a call that takes responses by the chunk, on GPUs of its own or beside generation."""
    model, kind = loaded.models[call.model], loaded.kind(placement.gpus)
    cost = step_cost(model, placement.tp, kind.cluster, kind.calibration)
    slowdown = streaming.slowdown if placement.shared else None
    made = scoring_engine(loaded, kind, model, cost, loaded.longest_sequence, f"call {call.name}", slowdown)
    return made._replace(handover_s=streaming.handover_s)


def scoring_engine(
    loaded: LoadedExperiment,
    kind: Kind,
    model: Model,
    cost: StepCost,
    longest: int,
    what: str,
    slowdown: float | None,
    resident_bytes: float = 0.0,
) -> RewardModelEngine:
    """The engine of a scoring model: beside other calls, which take `slowdown` times as long, or on GPUs of its own.

    These others leave while it works, but for `resident_bytes`. Raises `CapacityError`, about `what`, if its KV cache
    does not hold the `longest` that it reads (tokens).
    """
    engine, share = loaded.experiment.engine, loaded.experiment.memory_utilization
    if slowdown is not None:
        page_bytes = kv_page_bytes(model, cost.tp, engine.page_tokens)
        pages = int(KV_SHARE * kind.cluster.gpu.memory_bytes / page_bytes)
    else:
        pages = _engine(loaded, kind, model, share, resident_bytes=resident_bytes).capacity_pages(cost.tp)
    page = engine.page_tokens
    refuse("scoring engine", CapacityError, what=what, model=model, cost=cost, longest=longest, page=page, pages=pages)
    factor = slowdown or 1.0
    return RewardModelEngine(cost.tp, cost, crowded(cost, factor), factor, pages, engine)


def bytes_beside(loaded: LoadedExperiment, gpu: Gpu, model: Model, tp: int, offloaded_layers: int = 0) -> float:
    """What a scoring model beside other calls takes of each GPU's memory: weights, working memory and KV cache."""
    batched = loaded.experiment.engine.max_num_batched_tokens
    return KV_SHARE * gpu.memory_bytes + judge_bytes(model, offloaded_layers, tp, batched, SEQUENCES)


# ---- the LLM that judges responses: on GPUs that are kept for it, or beside the other calls -------------------------


#: The holder of a judge's memory.
JUDGE = "the judge"


class Judge:
    """The judge of an experiment. `beside`: how it works beside the other calls; None: on GPUs of its own.

    `may_join`: whether log-probs and training may take those GPUs once all of a step is scored.
    """

    def __init__(
        self, loaded: LoadedExperiment, spec: JudgeSpec, model: Model, beside: JudgePlacement | None, *, may_join: bool
    ) -> None:
        self._loaded, self._spec, self._model, self.beside = loaded, spec, model, beside
        self.gpus = reserved_gpus(spec, loaded.cluster) if beside is None else ()  # its own
        on = self.gpus or range(loaded.cluster.gpus)
        self._kind = loaded.kind(on, "workflow.reward.judge")
        self._cluster, calibration = self._kind
        self._resident = step_cost(model, spec.tp, self._cluster, calibration)
        self.joins = may_join and beside is None and spec.while_training != "apart"

    def engine(self, resident_bytes: float) -> RewardModelEngine:
        """Its engine, where log-probs and training that it joins keep so many bytes on its GPUs.

        Raises `CapacityError` if the longest response to judge does not fit.
        """
        loaded, spec, model, cost, load_s = self._loaded, self._spec, self._model, self._resident, 0.0
        if self.beside is not None:
            cost = streamed(cost, stream_s(model, self.offloaded_layers, spec.tp, self._cluster.host))
        elif self.joins and spec.while_training == "offloaded":
            load_s = host_copy_s(math.ceil(rollout_weight_bytes(model, spec.tp)), self._cluster.host)
        answers = loaded.trace.frame.get("judge_tokens")
        answer = 0 if answers is None else int(answers.fillna(0).max())
        longest = loaded.longest_sequence + spec.prompt_tokens + answer
        slowdown = self.beside.slowdown if self.beside else None
        made = scoring_engine(loaded, self._kind, model, cost, longest, JUDGE, slowdown, resident_bytes)
        return made._replace(load_s=load_s)

    @cached_property
    def offloaded_layers(self) -> int:
        """Layers that stay in host memory where it works beside other calls."""
        if self.beside is None:
            return 0
        if self.beside.offload != "auto":
            return round(self.beside.offload * self._model.num_hidden_layers)
        judged = self._loaded.scoring.judged
        lengths = (self._loaded.prompt_lengths, self._loaded.response_lengths)
        typical = self._spec.prompt_tokens + round(sum(float(each[judged].mean()) for each in lengths))
        batched = self._loaded.experiment.engine.max_num_batched_tokens
        return layers_to_offload(self._model, self._resident, self._cluster.host, batched, typical)

    def rows(self, gpus: Sequence[int]) -> list[Row]:
        """What it holds where log-probs and training run: beside the calls on `gpus`, or on its own while it rests."""
        if self.beside is not None:
            gpu, layers = self._cluster.gpu, self.offloaded_layers
            size = bytes_beside(self._loaded, gpu, self._model, self._spec.tp, layers)
            return [Row(JUDGE, "beside the calls", size, frozenset(gpus))]
        if not self.joins:
            return []
        weights = rollout_weight_bytes(self._model, self._spec.tp) * (self._spec.while_training == "resident")
        return [Row(JUDGE, "at rest", RESERVED_BYTES + weights, frozenset(self.gpus))]

    def record(self, calls_gpus: int) -> dict[str, object]:
        """The judge as the manifest has it; beside other calls it has their GPUs."""
        return {
            "model": self._model.name,
            "tp": self._spec.tp,
            "gpus": len(self.gpus) or calls_gpus,
            "colocated": self.beside is not None,
            "while_training": self._spec.while_training if self.joins else "apart" if self.gpus else None,
            "layers_in_host_memory": self.offloaded_layers,
        }


def reserved_gpus(judge: JudgeSpec, cluster: AnyCluster) -> tuple[int, ...]:
    """GPUs kept for the judge: whole nodes, the last ones, or else the last GPUs of every node.

    Raises `ConfigError` if its share of the cluster is no whole number of judges, or not the same of every node.
    """
    count = round(judge.reserved * cluster.gpus)
    each, over = divmod(count, cluster.nodes)
    refuse("judge", judge=judge, cluster=cluster, count=count, each=each, over=over)
    if count % cluster.gpus_per_node == 0:
        return tuple(range(cluster.gpus - count, cluster.gpus))
    return tuple(g for g in range(cluster.gpus) if g % cluster.gpus_per_node >= cluster.gpus_per_node - each)

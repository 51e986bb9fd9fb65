"""Engines of an experiment: the rollout's, and those of calls that take responses by the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsim.cost.derived import crowded
from rlsim.cost.memory import kv_page_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import judge_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.build import Kind, LoadedExperiment
from rlsim.hardware import Gpu
from rlsim.models import Model
from rlsim.policies.parts import ChunkStreaming
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
    placements: dict[str, Placement] = dict(plan.placements)
    for call in streamed:
        placement = plan.of(call.name)
        placements[call.name] = replace(placement, shared=not generating.isdisjoint(placement.gpus))
    return Plan(placements)


def _engine(loaded: LoadedExperiment, kind: Kind, model: Model, share: float, **other: Any) -> RolloutCostModel:
    """An engine of the experiment with a model on GPUs of one kind, of each of which it has this share.

    Raises `ConfigError` for a share with which it does not start.
    """
    engine, most = loaded.experiment.engine, kind.calibration.memory_rule.most_share(kind.cluster.gpu.memory_bytes)
    if share > most:
        raise ConfigError(
            f"memory_utilization: {share:g} of a GPU is more than is free when {kind.calibration.engine} starts: "
            f"CUDA's context takes some; {most:.3f} is the most"
        )
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
) -> RolloutCostModel:
    """The rollout engine on these GPUs, by `strategy` if a plan has one for them.

    `memory_share`: what it has of each, by default what the experiment says. Raises `ConfigError` for stages of the
    plan's beside the engine's own.
    """
    if strategy is not None and loaded.experiment.engine.pp > 1:
        raise ConfigError("engine.pp and the plan of generation both say its stages; leave engine.pp out")
    engine, kind = loaded.experiment.engine, loaded.kind(gpus, "generation")
    return _engine(
        loaded,
        kind,
        loaded.model,
        loaded.experiment.memory_utilization if memory_share is None else memory_share,
        sampling_s_per_logit=engine.sampling_per_logit,
        graphs=engine.graphs and graphs,
        gpus=gpus,
        pp=engine.pp if strategy is None else strategy.pp,
        planned=strategy is not None,
        layout=loaded.replica,
        resident_bytes=resident_bytes,
        kv_offloading_bytes=engine.kv_offloading_bytes,
    )


def scorer_of(
    loaded: LoadedExperiment, call: Call, placement: Placement, streaming: ChunkStreaming
) -> RewardModelEngine:
    """The engine of a call that takes responses by the chunk, on GPUs of its own or beside generation.

    Raises `CapacityError` if its KV cache cannot hold the longest prompt and response.
    """
    model, tp, engine = loaded.models[call.model], tp_of(placement), loaded.experiment.engine
    kind = loaded.kind(placement.gpus)
    cost = step_cost(model, tp, kind.cluster, kind.calibration)
    pages = kv_pages(loaded, kind, model, tp, shared=placement.shared)
    if pages * engine.page_tokens < loaded.longest_sequence:
        raise CapacityError(
            f"{model.name} at TP {tp}, which takes responses by the chunk, has room for {pages * engine.page_tokens} "
            f"tokens of KV cache; a response with its prompt may need {loaded.longest_sequence}"
        )
    slowdown = streaming.slowdown if placement.shared else 1.0
    return RewardModelEngine(tp, cost, crowded(cost, slowdown), slowdown, pages, engine, streaming.handover_s)


def tp_of(placement: Placement) -> int:
    """TP of the engine of a scoring model there."""
    return placement.strategy.tp if placement.strategy else 1


def kv_pages(
    loaded: LoadedExperiment, kind: Kind, model: Model, tp: int, *, shared: bool, resident_bytes: float = 0.0
) -> int:
    """Room for the KV cache of a scoring model, beside other calls or on GPUs that others leave while it works.

    `resident_bytes`: what these keep on each of such GPUs meanwhile.
    """
    if shared:
        page_bytes = kv_page_bytes(model, tp, loaded.experiment.engine.page_tokens)
        return int(KV_SHARE * kind.cluster.gpu.memory_bytes / page_bytes)
    share = loaded.experiment.memory_utilization
    return _engine(loaded, kind, model, share, resident_bytes=resident_bytes).capacity_pages(tp)


def bytes_beside(loaded: LoadedExperiment, gpu: Gpu, model: Model, tp: int, offloaded_layers: int = 0) -> float:
    """What a scoring model beside other calls takes of each GPU's memory: weights, working memory and KV cache."""
    batched = loaded.experiment.engine.max_num_batched_tokens
    return KV_SHARE * gpu.memory_bytes + judge_bytes(model, offloaded_layers, tp, batched, SEQUENCES)

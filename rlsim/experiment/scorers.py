"""Engines of the calls that take responses by the chunk: what they cost, and the memory they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsim.cost.calibration import Calibration
from rlsim.cost.memory import kv_page_bytes, rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import Crowded, judge_bytes
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.schema import Experiment, JudgeSpec
from rlsim.hardware import Cluster
from rlsim.models import Model
from rlsim.policies.parts import ChunkStreaming
from rlsim.sim.service import ScoringEngine
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


def reserved_gpus(judge: JudgeSpec, cluster: Cluster) -> tuple[int, ...]:
    """GPUs kept for the judge: whole nodes, the last ones, or else the last GPUs of every node.

    Raises `ConfigError` if its share of the cluster is no whole number of judges, or not the same of every node.
    """
    count = round(judge.reserved * cluster.gpus)
    kept = f"workflow.reward.judge: {judge.reserved:g} of {cluster.gpus} GPUs are {count}"
    if not 0 < count < cluster.gpus or count % judge.tp:
        raise ConfigError(f"{kept}, no whole number of judges of TP {judge.tp} beside the other calls")
    if count % cluster.gpus_per_node == 0:
        return tuple(range(cluster.gpus - count, cluster.gpus))
    each, over = divmod(count, cluster.nodes)
    if over or each % judge.tp:
        raise ConfigError(
            f"{kept}, neither whole nodes of {cluster.gpus_per_node} nor as many of each of the {cluster.nodes} nodes"
        )
    return tuple(g for g in range(cluster.gpus) if g % cluster.gpus_per_node >= cluster.gpus_per_node - each)


def scorer_of(
    model: Model,
    placement: Placement,
    streaming: ChunkStreaming,
    experiment: Experiment,
    cluster: Cluster,
    calibration: Calibration,
    longest_tokens: int,
) -> ScoringEngine:
    """A scoring model on its GPUs, or beside generation.

    `longest_tokens`: the longest prompt and response together. Raises `CapacityError` if its KV cache cannot hold that.
    """
    engine = experiment.engine
    tp = tp_of(placement)
    cost = step_cost(model, tp, cluster, calibration)
    pages = kv_pages(model, tp, placement.shared, experiment, cluster)
    if pages * engine.page_tokens < longest_tokens:
        raise CapacityError(
            f"{model.name} at TP {tp}, which takes responses by the chunk, has room for {pages * engine.page_tokens} "
            f"tokens of KV cache; a response with its prompt may need {longest_tokens}"
        )
    slowdown = streaming.slowdown if placement.shared else 1.0
    return ScoringEngine(tp, cost, Crowded(cost, slowdown), slowdown, pages, engine, streaming.handover_s)


def tp_of(placement: Placement) -> int:
    """TP of the engine of a scoring model there."""
    return placement.strategy.tp if placement.strategy else 1


def kv_pages(
    model: Model, tp: int, shared: bool, experiment: Experiment, cluster: Cluster, resident_bytes: float = 0.0
) -> int:
    """Room for the KV cache of a scoring model, beside other calls or on GPUs that others leave while it works.

    `resident_bytes`: what these keep on each of such GPUs meanwhile.
    """
    engine = experiment.engine
    if shared:
        return int(KV_SHARE * cluster.gpu.memory_bytes / kv_page_bytes(model, tp, engine.page_tokens))
    return rollout_memory(
        model,
        cluster.gpu,
        tp,
        page_tokens=engine.page_tokens,
        memory_utilization=experiment.memory_utilization,
        max_batched_tokens=engine.max_num_batched_tokens,
        max_sequences=engine.max_num_seqs,
        resident_bytes=resident_bytes,
    ).pages


def bytes_beside(model: Model, tp: int, experiment: Experiment, cluster: Cluster, offloaded_layers: int = 0) -> float:
    """What a scoring model beside other calls takes of each GPU's memory: weights, working memory and KV cache."""
    batched = experiment.engine.max_num_batched_tokens
    return KV_SHARE * cluster.gpu.memory_bytes + judge_bytes(model, offloaded_layers, tp, batched, SEQUENCES)

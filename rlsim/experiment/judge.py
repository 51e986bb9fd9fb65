"""The LLM that judges responses: on GPUs that are kept for it, or beside the other calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from rlsim.cost.derived import streamed
from rlsim.cost.ledger import Row
from rlsim.cost.memory import RESERVED_BYTES, rollout_weight_bytes
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import layers_to_offload, stream_s
from rlsim.cost.step import StepCost
from rlsim.cost.transfer import host_copy_s
from rlsim.errors import ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.engines import bytes_beside, scoring_engine
from rlsim.experiment.schema import JudgeSpec
from rlsim.hardware import AnyCluster
from rlsim.models import Model
from rlsim.policies.parts import JudgePlacement
from rlsim.sim.server import RewardModelEngine

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
        self._cluster, self._calibration = self._kind
        self.joins = may_join and beside is None and spec.while_training != "apart"

    @property
    def gpus_apart(self) -> tuple[int, ...]:
        """GPUs that log-probs and training never have."""
        return () if self.joins else self.gpus

    def engine(self, resident_bytes: float) -> RewardModelEngine:
        """Its engine, where log-probs and training that it joins keep so many bytes on its GPUs.

        Raises `CapacityError` if the longest response to judge does not fit.
        """
        loaded, spec, model, cost, load_s = self._loaded, self._spec, self._model, self._resident, 0.0
        if self.beside is not None:
            cost = streamed(cost, stream_s(model, self.offloaded_layers, spec.tp, self._cluster.host))
        elif self.joins and spec.while_training == "offloaded":
            load_s = host_copy_s(math.ceil(rollout_weight_bytes(model, spec.tp)), self._cluster.host)
        longest = loaded.longest_sequence + spec.prompt_tokens + loaded.longest_answer
        slowdown = self.beside.slowdown if self.beside else None
        made = scoring_engine(loaded, self._kind, model, cost, longest, JUDGE, slowdown, resident_bytes)
        return made._replace(load_s=load_s)

    @cached_property
    def _resident(self) -> StepCost:
        return step_cost(self._model, self._spec.tp, self._cluster, self._calibration)

    @cached_property
    def offloaded_layers(self) -> int:
        """Layers that stay in host memory where it works beside other calls."""
        if self.beside is None:
            return 0
        if self.beside.offload != "auto":
            return round(self.beside.offload * self._model.num_hidden_layers)
        typical = self._spec.prompt_tokens + self._loaded.judged_tokens
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

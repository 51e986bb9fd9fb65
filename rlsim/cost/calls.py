"""Inference and training calls of several models on one cluster, and the weights that go from one call to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from rlsim.base.refusals import refuse
from rlsim.cost.calibration import Calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.layout import PLAIN, ReplicaLayout
from rlsim.cost.operators import Operators
from rlsim.cost.reallocation import DataTransfer, Reallocation, Side
from rlsim.cost.strategy import (
    EXPERT_LAUNCH_S,
    LOOPED_EXPERT_S,
    TrainEfficiency,
    TrainStrategy,
    efficiency_of,
    traffic_of,
    unfused_of,
)
from rlsim.cost.train import TrainCost
from rlsim.cost.weight_sync import SyncMethod, WeightSync
from rlsim.models.hardware import Cluster
from rlsim.models.layers import Experts, Layer, Linear
from rlsim.models.model import Model
from rlsim.models.precision import Precision, peak_flop_per_s


class CallCosts:
    """The `TrainCost` of every model under every strategy on one kind of GPU, each made once.

    `models` are named by their roles (`actor`, `critic`, …); `backend` names the training framework whose efficiency
    the calibration gives, unless `efficiency` (share of the peak) does. `call_s`: what each call takes beside that.
    `precision` is that of the layers' products, `rollout` the models that generate, as engines serve them. Raises
    `ConfigError` for an unknown backend, `CalibrationError` for a precision that the GPU or the calibration lacks.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        cluster: Cluster,
        calibration: Calibration,
        backend: str,
        efficiency: float | None = None,
        *,
        precision: Precision = "bf16",
        rollout: Mapping[str, Model] = MappingProxyType({}),
        replica: ReplicaLayout = PLAIN,
    ) -> None:
        known = calibration.training.flop_efficiency
        refuse("training backend", backend=backend, calibration=calibration.name, known=known)
        self.models, self.cluster, self._backend = models, cluster, backend
        self.collectives = Collectives(calibration.collectives, calibration.reference, cluster)
        launches = calibration.costs.expert_launch
        self._draw, self._given, self._training = calibration.draw, efficiency, calibration.training
        self._slower = calibration.costs.training
        self._efficiency = TrainEfficiency(
            flop=1.0,
            attention=calibration.training.attention,
            expert_launch_s=EXPERT_LAUNCH_S * launches,
            looped_expert_s=LOOPED_EXPERT_S * launches,
            recurrent=calibration.costs.recurrent,
        )
        self.call_s = calibration.training.call_s.get(backend, 0.0)
        calibration.check_precision(precision)
        self._precision: Precision = precision
        self._operators = Operators(calibration.operators, calibration.reference)
        self._reference = calibration.reference
        self._rollout, self._replica = rollout, replica
        self._shapes = {role: next(r for r in models if models[r] == model) for role, model in models.items()}
        self._engine = calibration.engine
        self._made, ends = cache(self._of), (cluster, self.collectives)
        self.data = cache(lambda to: DataTransfer(*ends, self._receiver(to)))
        self._moved = cache(lambda role, to: Reallocation(models[role], *ends, self._receiver(to)))

    def of(self, role: str, strategy: TrainStrategy, first_gpu: int = 0) -> TrainCost:
        """Calls on the model of that role, on the GPUs from `first_gpu` on.

        Raises `ConfigError` if the strategy suits neither model nor cluster.
        """
        # Which domains does not matter, and roles with models of one shape share it.
        return self._made(self._shapes[role], strategy, first_gpu % self.cluster.domain_gpus)

    def _of(self, role: str, strategy: TrainStrategy, first_gpu: int) -> TrainCost:
        model, backend = self.models[role], self._backend
        framework = backend if strategy.fused_rope or backend != "megatron" else "fsdp"  # whose modules fuse as little
        more = (traffic_of(framework) - traffic_of(backend)) * self._reference.flops_per_byte
        known = efficiency_of(self._training.flop_efficiency[backend], more, 1.0)
        flop = (self._given or known) / self._slower
        forward = None if self._given else self._training.forward_efficiency.get(backend)
        forward = efficiency_of(forward, more, 1.0) / self._slower if forward else None
        if self._draw.number:
            forward = min((forward or flop) / self._draw.call("inference"), 1.0)
            flop = min(flop / self._draw.call("train"), 1.0)
        # A share that is given is that of the model at hand; what slows a fitted one down slows all down.
        flops_per_byte = 0.0 if self._given else self._reference.flops_per_byte * known / flop
        unfused = unfused_of(model, framework, flops_per_byte)
        efficiency = replace(self._efficiency, flop=flop, forward=forward, unfused=unfused)
        efficiency = replace(efficiency, fp8_saved=self._fp8_saved(model, strategy, efficiency.layers))
        return TrainCost(model, self.cluster, self.collectives, strategy, efficiency, first_gpu)

    def _fp8_saved(self, model: Model, strategy: TrainStrategy, share: float) -> float:
        """`TrainEfficiency.fp8_saved`, read off the inference engine's measured products of a full micro-batch.

        Forward products alone are measured, with one quantising of the activations; the backward ones are taken to save
        as much each. No product beats the FP8 peak. `share`: of the bf16 peak that products reach.
        """
        if self._precision == "bf16":
            return 0.0
        peak, gemm_s = self._reference.bf16_flop_per_s, self._operators.gemm_s
        tokens = strategy.micro_batch_tokens / strategy.cp
        saved_s = ideal_s = 0.0
        for layer, count in model.groups.items():
            for m, linear, groups in products(layer, tokens, strategy.tp):
                if linear.quantised:
                    shape = (m, linear.n_out, linear.k_in, groups)
                    saved_s += count * (gemm_s(*shape) - gemm_s(*shape, self._precision))
                ideal_s += count * 2.0 * m * groups * linear.weights / peak
        most = 1.0 / share - peak / (peak_flop_per_s(self._reference, self._precision) or peak)
        return min(saved_s / ideal_s, most)

    def weight_sync(self, role: str, method: SyncMethod, to: CallCosts, *, offload: bool) -> WeightSync:
        """Seconds of bringing updated weights into the rollout engine, on GPUs of the kind of `to`.

        `offload`: they wait in host memory.
        """
        return WeightSync(
            model=self.models[role],
            cluster=self.cluster,
            collectives=self.collectives,
            engine=to._engine,
            rollout=to.cluster,
            method=method,
            offload=offload,
            served=self._rollout.get(role),
            replica=self._replica,
            factor=1.0 if method == "reshard" else self._draw.sync(),
        )

    def reallocation(self, role: str, to: CallCosts) -> Reallocation:
        """Seconds of moving that model's parameters from these GPUs to ones of the kind of `to`."""
        return self._moved(self._shapes[role], to)

    def _receiver(self, to: CallCosts) -> Side | None:
        return None if to is self else Side(to.cluster, to.collectives)


def products(layer: Layer, tokens: float, tp: int) -> Iterator[tuple[float, Linear, int]]:
    """A layer's matrix products on one GPU: rows, the matrix, and how many of it; experts are met evenly."""
    for linear in layer.linears(tp):
        yield tokens, linear, 1
    if isinstance(layer.mlp, Experts):
        experts, token = layer.mlp, layer.mlp.token_width(layer.hidden)
        rows, width = tokens * experts.active / experts.experts, experts.width // tp
        yield rows, Linear("gate_up", experts.projections * width, token), experts.experts
        yield rows, Linear("down", token, width), experts.experts

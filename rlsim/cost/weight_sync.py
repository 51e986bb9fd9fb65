"""Seconds of bringing new weights from a trainer into the rollout engine, as RL frameworks do it.

Three stages, one after another (measured syncs show no overlap beyond their buckets):

1. **Export.** The trainer makes whole tensors of its shards: all-gathers over ZeRO ranks, TP and EP, broadcasts over
   stages (`rlsim.cost.transfer.gather_s`), and some time for every tensor that ZeRO-3 gathers. Shards that wait in host
   memory come from there first, tensor by tensor.
2. **Transport.** On the same GPUs CUDA IPC: one copy in GPU memory. Elsewhere in the node an NCCL broadcast over
   NVLink. To other nodes a broadcast of one sender, which has no more than its own network port.
3. **Load.** The engine finds the place of every tensor by its name (each expert of a mixture has its own tensors) and
   copies its slice. A rollout in another precision quantises there: what is sent is bf16, and every rank quantises
   whole tensors before it takes its slice (veRL: docs/advance/fp8.md, `quant_weights` of
   `verl/utils/vllm/vllm_fp8_utils.py`; NeMo-RL: docs/fp8.md, `load_weights` of `nemo_rl/models/generation/fp8.py`).

What no measurement tells apart is one constant: see `SyncFit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlsim.cost.calibration import Engine
from rlsim.cost.collectives import CollectiveTime
from rlsim.cost.layout import PLAIN, Layout, ReplicaLayout
from rlsim.cost.memory import FP32, rollout_weight_bytes
from rlsim.cost.transfer import gather_s, host_copy_s
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model

#: How new weights reach the rollout engine: a row of `rlsim/data/meanings.csv` says what each is. No engine loads those
#: of reshard (`Reallocation`, or here on the same GPUs).
SyncMethod = Literal["naive", "bucketed", "multi_sender", "checkpoint_engine", "reshard"]

#: Memory traffic of quantising a weight by blocks with PyTorch's own kernels, as veRL and NeMo-RL do one after the
#: other: bf16 to fp32 (2 + 4), reordered (4 + 4), its size and the largest of a block (4 + 4 + 4), scaled and clamped
#: (2 · (4 + 4)), cast (4 + 1) and reordered back (1 + 1).
QUANTISING_BYTES = 49.0

#: Of an engine's memory that is given up as it falls asleep, or mapped again as it wakes; graphs stay. vLLM 0.26 maps
#: 70.4 GiB on B200 in 0.273 s (srt-slurm's page on failover); 0.11 wakes 72 GB on A100, 1.2 of them copied, in 0.26 s
#: (vLLM's blog, 2025-10-26), and gives 32.1 and 47.4 GiB up in 0.12 and 0.31 s (vllm-project/vllm pull request 48337).
REMAPPED_BYTES_PER_S = 2.77e11


@dataclass(frozen=True, kw_only=True)
class SyncFit:
    """The constants of a sync, fitted to veRL's published ones by `evidence.validate.weight_sync`, which says which row
    gives which."""

    network_share: float = 0.460  # of the rate of the sender's port, in a broadcast to other nodes; GH200, 4 to 4 GPUs
    stored_tensor_s: float = 0.224e-3  # for each tensor that ZeRO-3 gathers; FSDP, 2 to 30 H100, experts apart
    # for each tensor by name that is put into a bucket and loaded from it; Megatron to vLLM by way of host memory, H20
    named_tensor_s: float = 0.0851e-3
    lone_tensor_s: float = 0.695e-3  # for each that goes alone: gather, broadcast and load call; Megatron to vLLM, H20
    # of a GPU that takes its ZeRO-3 shards from host memory tensor by tensor; FSDP2 to SGLang, H100, with and without
    # offload
    staging_bytes_per_s: float = 2.21e9
    sglang_s: float = 0.310  # for each sync into SGLang; inside a node of A100
    sglang_bytes_per_s: float = 6.22e9  # of what gets into SGLang, beside the time for tensors; FSDP2, H100


FITTED = SyncFit()


@dataclass(frozen=True)
class SyncTime:
    """Seconds of the stages of one sync."""

    export_s: float
    transport_s: float
    load_s: float

    @property
    def total_s(self) -> float:
        return self.export_s + self.transport_s + self.load_s


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """Syncs of one model's weights into a rollout engine by `method`.

    `cluster` and `collectives` are those of the trainer, `rollout` the cluster as the engine's GPUs know it, if these
    are of another kind. `offload`: the trainer's shards wait in host memory. `stacked`: the trainer keeps the experts
    of a layer in one tensor, as transformers does from version 5 on. `engine` None: the weights are only received.
    `served`: the model as that engine serves it, if in another precision; `replica`: how a replica's GPUs share it.
    """

    model: Model
    cluster: Cluster
    collectives: CollectiveTime
    engine: Engine | None
    rollout: Cluster | None = None
    method: SyncMethod = "bucketed"
    offload: bool = False
    stacked: bool = True
    served: Model | None = None
    replica: ReplicaLayout = PLAIN
    fit: SyncFit = FITTED
    factor: float = 1.0  # of the time of the whole sync

    def time_s(self, source: Layout, target: Layout) -> float:
        """Seconds until every GPU of `target`, a rollout engine, has the weights that training has at `source`.

        Raises `ConfigError` if a TP degree does not split the model, and `CalibrationError` if the two are on several
        nodes of a cluster without a link between them.
        """
        return self.factor * self.parts(source, target).total_s

    def parts(self, source: Layout, target: Layout) -> SyncTime:
        """`time_s` by its stages; reshard gathers each layer, over TP only if the target has another."""
        self.replica.check(self.model, target.tp)
        if self.method == "reshard":
            gathered_s = gather_s(self.model, self.collectives, self.cluster, source, over_tp=source.tp != target.tp)
            return SyncTime(self._staged_s(source) + gathered_s, self._transport_s(source, target), 0.0)
        return SyncTime(self._export_s(source), self._transport_s(source, target), self._load_s())

    # ---- by way of host memory, where every replica fetches them (relays: Laminar, Sheng et al. 2025) ----------------

    def push_s(self, source: Layout) -> float:
        """Until training at `source` has put whole tensors into host memory, each GPU its share, and goes on."""
        copy_s = host_copy_s(self.model.weight_bytes / source.gpus, self.cluster.host)
        return self.factor * (self._export_s(source) + copy_s)

    def spread_s(self, source: Layout, target: Layout) -> float:
        """From there to the other nodes of `target`, each of which sends on what it gets: a chain, in pieces."""
        nodes = [{self.cluster.node_of(gpu) for gpu in (one.first_gpu, one.end_gpu - 1)} for one in (source, target)]
        first, last = min(nodes[1]), max(nodes[1])
        hops = len(set(range(first, last + 1)) - set(range(min(nodes[0]), max(nodes[0]) + 1)))
        return self.factor * self._network_s(1, hops) if hops else 0.0

    def pull_s(self, tp: int, pp: int = 1) -> float:
        """Of a replica at this degree, which takes its weights from the host memory of its node."""
        copy_s = host_copy_s(
            rollout_weight_bytes(self.model, tp, pp, self.replica), (self.rollout or self.cluster).host
        )
        return self.factor * (copy_s + self._load_s())

    # ---- stages -----------------------------------------------------------------------------------------------------

    def _export_s(self, source: Layout) -> float:
        fit, model = self.fit, self.model
        total = gather_s(model, self.collectives, self.cluster, source) + self._staged_s(source)
        if source.zero3 and self.method != "naive":
            total += fit.stored_tensor_s * model.tensors(stacked=self.stacked)
        if self.method == "checkpoint_engine":  # into host memory and out of it, each GPU its share
            total += 2 * host_copy_s(model.weight_bytes / source.gpus, self.cluster.host)
        return total

    def _staged_s(self, source: Layout) -> float:
        """The trainer's weights in from host memory, if they are there."""
        model = self.model
        if not self.offload:
            return 0.0
        if source.zero3:
            return FP32 * model.parameters / (source.tp * source.sharded_over) / self.fit.staging_bytes_per_s
        # A slice of its stage on each GPU, and its experts if these are apart.
        apart = source.expert_cut is not None
        routed = apart * sum(count * model.expert_bytes(layer) for layer, count in model.groups.items())
        held = (model.weight_bytes - routed) / (source.tp * source.pp) + routed / (source.experts.tp * source.pp)
        return host_copy_s(held, self.cluster.host)

    def _transport_s(self, source: Layout, target: Layout) -> float:
        if source.first_gpu <= target.first_gpu and target.end_gpu <= source.end_gpu:
            held_bytes = rollout_weight_bytes(self.model, target.tp, target.pp, self.replica)
            return 2 * held_bytes / self.cluster.gpu.memory_bytes_per_s
        first = self.cluster.domain_of(min(source.first_gpu, target.first_gpu))
        if first == self.cluster.domain_of(max(source.first_gpu, target.end_gpu - 1)):
            return self.collectives.time_s("broadcast", self.model.weight_bytes, 1 + target.gpus)
        senders = min(source.gpus, target.gpus, self.cluster.gpus_per_node) if self.method == "multi_sender" else 1
        return self._network_s(senders)

    def _network_s(self, senders: int, hops: int = 1) -> float:
        """To other nodes, by the ports of so many GPUs: the slower network of the two sides binds."""
        links = [side.inter for side in (self.cluster, self.rollout or self.cluster) if side.inter is not None]
        if len(links) < 2:
            raise CalibrationError(f"cluster {self.cluster.name!r} has no inter-node link for a weight sync")
        rate = self.fit.network_share
        return max(
            hops * link.latency_s
            + self.model.weight_bytes / (math.ceil(senders / link.shared_by_gpus) * link.bytes_per_s * rate)
            for link in links
        )

    def _load_s(self) -> float:
        if self.engine is None:
            return 0.0
        fit, model = self.fit, self.model
        tensor_s = fit.lone_tensor_s if self.method == "naive" else fit.named_tensor_s
        total = tensor_s * model.tensors()
        if self.engine == "sglang":
            total += fit.sglang_s + model.weight_bytes / fit.sglang_bytes_per_s
        quantised = self.served.quantised_parameters if self.served else 0
        return total + QUANTISING_BYTES * quantised / (self.rollout or self.cluster).gpu.memory_bytes_per_s

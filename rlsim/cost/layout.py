"""Which GPUs a model's call has, in what layout, and times between many pairs of such placements.

Here a node is what the faster link joins: an NVLink domain where that is larger than a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.cost.flops import Floats
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.models.hardware import Cluster
from rlsim.models.layers import Experts
from rlsim.models.model import Model

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, the GPUs from number `first_gpu` on, and the degrees of a model on it.

    On the mesh TP is innermost, then CP, DP and PP, as in `TrainStrategy`. `expert_cut`: neighbouring GPUs of a stage
    that hold the experts of a layer once, where these are cut otherwise than the rest. Raises `ConfigError` for a
    degree below 1, a GPU number below 0, or parameters sharded over data-parallel ranks (`zero3`; under HSDP over
    `shard_gpus` of them) together with PP.
    """

    first_gpu: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero3: bool = False
    shard_gpus: int | None = None
    expert_cut: int | None = None

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp, self.cp) < 1 or self.first_gpu < 0:
            raise ConfigError(f"layout: degrees must be at least 1 and GPU numbers at least 0, got {self}")
        if self.zero3 and self.pp > 1:
            raise ConfigError("layout: ZeRO stage 3 does not go with pipeline parallelism")

    @classmethod
    def of(cls, first_gpu: int, strategy: TrainStrategy) -> Layout:
        """The placement of a training or inference call on the GPUs from number `first_gpu` on."""
        return cls(
            first_gpu=first_gpu,
            dp=strategy.dp,
            tp=strategy.tp,
            pp=strategy.pp,
            cp=strategy.cp,
            zero3=strategy.zero_stage == 3 and strategy.shards > 1,
            shard_gpus=strategy.shard_gpus if strategy.zero_stage == 3 else None,
            expert_cut=strategy.expert_cut if strategy.experts_apart else None,
        )

    @property
    def experts(self) -> Layout:
        """Where the experts' weights lie: as tensors do under TP of degree `expert_cut`; itself where all are alike."""
        if self.expert_cut is None:
            return self
        dp = self.shards * self.tp // self.expert_cut
        return replace(self, dp=dp, tp=self.expert_cut, cp=1, zero3=self.zero3 and dp > 1, expert_cut=None)

    @property
    def shards(self) -> int:
        """Ranks with the same layers and tensor-parallel piece (`zero3`: parts of it): Megatron's DP × CP group."""
        return self.dp * self.cp

    @property
    def sharded_over(self) -> int:
        """Those of them that share the states between them: all, or fewer under HSDP."""
        return min(self.shard_gpus or self.shards, self.shards)

    @property
    def gpus(self) -> int:
        """GPUs of the mesh."""
        return self.shards * self.tp * self.pp

    @property
    def end_gpu(self) -> int:
        """One more than the number of the last GPU."""
        return self.first_gpu + self.gpus

    def moved(self, gpus: int) -> Layout:
        """The same layout on the mesh that begins so many GPUs later."""
        return replace(self, first_gpu=self.first_gpu + gpus) if gpus else self


def canonical(cluster: Cluster, source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The same pair moved to the first nodes that will do: only the relative position counts for a transfer.

    Raises `ConfigError` for a GPU that the cluster does not have.
    """
    size = cluster.domain_gpus
    if max(source.end_gpu, target.end_gpu) > cluster.gpus:
        raise ConfigError(f"layout beyond the {cluster.gpus} GPUs of cluster {cluster.name!r}: {source}, {target}")
    starts = source.first_gpu // size, target.first_gpu // size
    ends = (source.end_gpu - 1) // size, (target.end_gpu - 1) // size
    if ends[0] < starts[1] or ends[1] < starts[0]:  # no node in common: how far apart does not matter
        return source.moved(-starts[0] * size), target.moved((ends[0] - starts[0] + 1 - starts[1]) * size)
    return source.moved(-min(starts) * size), target.moved(-min(starts) * size)


class PairTimes:
    """`time_s(source, target)` for pairs of two lists of placements, each pair computed once and when it is asked for.

    Pairs that differ only in which nodes they lie on are one. `cluster` tells the nodes.
    """

    def __init__(
        self,
        time_s: Callable[[Layout, Layout], float],
        cluster: Cluster,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
    ) -> None:
        self._time_s, self._cluster = cache(time_s), cluster
        self._sources, self._targets = sources, targets
        self._known = cache(self._pair_s)

    def __call__(self, source: npt.ArrayLike, target: npt.ArrayLike) -> Floats:
        """Seconds from placement number `source` to number `target`, broadcast against each other like any arrays."""
        numbers = np.asarray(source, dtype=np.int64) * len(self._targets) + np.asarray(target, dtype=np.int64)
        different, back = np.unique(numbers, return_inverse=True)
        seconds = np.array([self._known(number) for number in different.tolist()], dtype=np.float64)
        return seconds[back].reshape(numbers.shape)

    def _pair_s(self, number: int) -> float:
        source, target = divmod(number, len(self._targets))
        return self._time_s(*canonical(self._cluster, self._sources[source], self._targets[target]))


# Replicas of a rollout ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """Experts and attention on the `gpus` GPUs of a pipeline stage of a replica (what its TP is without them).

    `ep`: GPUs that whole experts are dealt to, each holding its experts' part under TP `gpus` / `ep` (vLLM's
    `enable_expert_parallel`: ep = gpus; SGLang's `ep_size`). `attention_dp`: groups of GPUs that share the sequences
    out; attention, dense MLPs and the head have TP `gpus` / `attention_dp` inside a group (vLLM's
    `data_parallel_size`, SGLang's `dp_size` with `enable_dp_attention`). `imbalance`: exponent of the power law that
    the popularity of experts follows, 0: all are as popular (`experts.expert_load`).
    """

    ep: int = 1
    attention_dp: int = 1
    imbalance: float = 0.0

    def attention_tp(self, gpus: int) -> int:
        """GPUs that cut a layer's heads."""
        return gpus // self.attention_dp

    def expert_tp(self, gpus: int) -> int:
        """GPUs that cut one expert."""
        return gpus // self.ep

    @property
    def plain(self) -> bool:
        """Whether it is tensor parallelism alone."""
        return self.ep == self.attention_dp == 1

    def check(self, model: Model, gpus: int) -> None:
        """Raises `ConfigError` if the model cannot be split that way over so many GPUs."""
        counts = {layer.mlp.experts for layer in model.groups if isinstance(layer.mlp, Experts)}
        refuse("layout of a replica", layout=self, model=model.name, gpus=gpus, counts=counts)
        model.check_tp(self.attention_tp(gpus), self.expert_tp(gpus))


#: Tensor parallelism alone.
PLAIN = ReplicaLayout()

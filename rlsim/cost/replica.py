"""How the GPUs of a rollout replica share a model, beyond tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from rlsim.errors import ConfigError
from rlsim.models.layers import Experts
from rlsim.models.model import Model


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
        for name, degree in (("ep", self.ep), ("data_parallel_attention", self.attention_dp)):
            if gpus < 1 or gpus % degree:
                raise ConfigError(f"engine.{name} {degree} does not divide the {gpus} GPUs of a replica")
        counts = {layer.mlp.experts for layer in model.groups if isinstance(layer.mlp, Experts)}
        if self.ep > 1 and not counts:
            raise ConfigError(f"engine.ep {self.ep}: {model.name} has no experts")
        for count in counts:
            if count % self.ep:
                raise ConfigError(f"engine.ep {self.ep} does not divide the {count} experts of {model.name}")
        model.check_tp(self.attention_tp(gpus), self.expert_tp(gpus))


#: Tensor parallelism alone.
PLAIN = ReplicaLayout()

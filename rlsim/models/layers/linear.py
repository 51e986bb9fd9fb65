"""The matrix multiplications of a layer, and what a part of a layer has beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix multiplication of a layer on one GPU: (tokens × `k_in`) · (`k_in` × `n_out`).

    `quantised`: its weights have the precision in which an engine serves the model. Those of a router and of the LM
    head never do (vLLM: `ignored_layers` of published checkpoints, and `Fp8Config` quantises no `ParallelLMHead`).
    `bias`: it adds `n_out` numbers. `matrices`: so many of a checkpoint are joined in it.
    """

    name: str
    n_out: int
    k_in: int
    quantised: bool = True
    bias: bool = False
    matrices: int = 1

    @property
    def weights(self) -> int:
        return self.n_out * self.k_in


def weights_of(linears: Iterable[Linear]) -> int:
    """Weights of all these products together."""
    return sum(linear.weights for linear in linears)


class Part(ABC):
    """Attention or the feed-forward of a layer: products, and vectors beside them."""

    #: Blocks that it is: each has a residual connection, and an all-reduce under TP.
    blocks: int = 1

    @abstractmethod
    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The matrix multiplications that every token takes part in, in order."""

    def vectors(self, tp: int) -> tuple[int, ...]:  # noqa: ARG002
        """Sizes of the weights that are no matrix multiplication nor its bias: norms, sinks, convolutions."""
        return ()

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights on one GPU."""
        linears = self.linears(hidden, tp)
        return weights_of(linears) + sum(one.n_out for one in linears if one.bias) + sum(self.vectors(tp))

    def tensors(self, hidden: int) -> int:
        """Weights and biases that have a name of their own in a checkpoint."""
        return sum(one.matrices * (1 + one.bias) for one in self.linears(hidden, 1)) + len(self.vectors(1))

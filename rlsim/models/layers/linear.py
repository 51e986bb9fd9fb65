"""The matrix multiplications of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix multiplication of a layer on one GPU: (tokens × `k_in`) · (`k_in` × `n_out`).

    `quantised`: its weights have the precision in which an engine serves the model. Those of a router and of the LM
    head never do (vLLM: `ignored_layers` of published checkpoints, and `Fp8Config` quantises no `ParallelLMHead`).
    """

    name: str
    n_out: int
    k_in: int
    quantised: bool = True

    @property
    def weights(self) -> int:
        return self.n_out * self.k_in


def weights_of(linears: Iterable[Linear]) -> int:
    """Weights of all these products together."""
    return sum(linear.weights for linear in linears)

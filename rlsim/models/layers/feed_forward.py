"""Kinds of feed-forwards: MLPs, mixtures of them, and none (`NoFeedForward`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from rlsim.models.layers.linear import Linear, Part


class FeedForward(Part):
    """What a layer must say about its feed-forward part."""

    #: Whether a gate is multiplied with what goes in: a third matrix (SwiGLU, Shazeer 2020).
    gated: bool = True

    @property
    def projections(self) -> int:
        """Matrices from the hidden state to the width."""
        return 1 + self.gated

    def grouped_weights(self, hidden: int, tp: int = 1) -> int:  # noqa: ARG002
        """Weights of all experts' matrices on one GPU."""
        return 0

    def expert_linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:  # noqa: ARG002
        """One expert's matrix multiplications."""
        return ()

    def routed_weights(self, hidden: int) -> int:  # noqa: ARG002
        """Those of the experts that one token is routed to."""
        return 0

    def idle_parameters(self, hidden: int) -> int:  # noqa: ARG002
        """Weights and biases of the experts that a token is not routed to."""
        return 0

    @property
    @abstractmethod
    def active_width(self) -> int:
        """Width that one token passes."""

    def expert_tensors(self, *, stacked: bool) -> int:  # noqa: ARG002
        """Weights and biases of its experts by name; `stacked`: those of a layer are two."""
        return 0

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """What TP must divide."""


@dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """That of a layer which is attention alone."""

    blocks = 0
    active_width = 0
    widths = ()

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:  # noqa: ARG002
        return ()


@dataclass(frozen=True, kw_only=True)
class Dense(FeedForward):
    """An MLP; without a gate it has two matrices instead of three (nemotron_h)."""

    width: int
    bias: bool = False
    gated: bool = True

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        width, into = self.width // tp, self.projections
        name = "gate_up" if self.gated else "up"
        first = Linear(name, into * width, hidden, bias=self.bias, matrices=into)
        return first, Linear("down", hidden, width, bias=self.bias)

    @property
    def active_width(self) -> int:
        return self.width

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, kw_only=True)
class Experts(FeedForward):
    """A mixture of MLPs of `width`: every token passes `active` of `experts`, and one of `shared_width` besides.

    `shared_gate`: the shared expert's output has a gate of one number per token (qwen2_moe). `router_bias`: of the
    router (gpt_oss), or what balances the load of its experts (deepseek_v3). `bias`: of every expert (gpt_oss).
    `latent_width`: tokens are brought to it before their experts, and back after them (Nemotron 3 Super's LatentMoE,
    on every GPU whole; the shared expert has its own input); 0: they are not.
    """

    experts: int
    active: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    gated: bool = True
    latent_width: int = 0

    def token_width(self, hidden: int) -> int:
        """Numbers of a token as experts take it and give it back."""
        return self.latent_width or hidden

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The router, the way to the experts' latent and back, and the shared expert; the experts themselves are
        grouped products."""
        found = [Linear("router", self.experts, hidden, quantised=False, bias=self.router_bias)]
        if self.latent_width:
            found += [Linear("latent_in", self.latent_width, hidden), Linear("latent_out", hidden, self.latent_width)]
        if self.shared_width:
            found += Dense(width=self.shared_width, gated=self.gated).linears(hidden, tp)
        if self.shared_gate:
            found.append(Linear("shared_gate", 1, hidden, quantised=False))
        return tuple(found)

    def _expert_weights(self, hidden: int, tp: int = 1) -> int:
        return (self.projections + 1) * (self.width // tp) * self.token_width(hidden)

    def _expert_biases(self, hidden: int, tp: int = 1) -> int:
        return self.bias * (self.projections * (self.width // tp) + self.token_width(hidden))

    def grouped_weights(self, hidden: int, tp: int = 1) -> int:
        return self.experts * self._expert_weights(hidden, tp)

    def expert_linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        outside, inside = self.token_width(hidden), self.width // tp
        into = Linear("up", self.projections * inside, outside, matrices=self.projections)
        return into, Linear("down", outside, inside)

    def routed_weights(self, hidden: int) -> int:
        return self.active * self._expert_weights(hidden)

    def idle_parameters(self, hidden: int) -> int:
        return (self.experts - self.active) * (self._expert_weights(hidden) + self._expert_biases(hidden))

    def parameters(self, hidden: int, tp: int = 1) -> int:
        biases = self.experts * self._expert_biases(hidden, tp)
        return super().parameters(hidden, tp) + self.grouped_weights(hidden, tp) + biases

    @property
    def active_width(self) -> int:
        """Width of all experts together that one token passes."""
        return self.active * self.width + self.shared_width

    def expert_tensors(self, *, stacked: bool) -> int:
        return (2 if stacked else (self.projections + 1) * self.experts) * (1 + self.bias)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width, self.shared_width) if self.shared_width else (self.width,)

"""One layer: attention, feed-forward and the norms around them."""

from __future__ import annotations

from dataclasses import dataclass

from rlsim.models.layers.attention import REPLICATED, Attention
from rlsim.models.layers.feed_forward import Experts, FeedForward
from rlsim.models.layers.linear import Linear, weights_of


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: attention and feed-forward, and `norms` RMS norms over the hidden state around them."""

    hidden: int
    attention: Attention
    mlp: FeedForward
    norms: int = 2

    @property
    def blocks(self) -> int:
        """Parts with a residual connection: two, or one where attention or feed-forward is missing."""
        return self.attention.blocks + self.mlp.blocks

    def linears(self, tp: int = 1) -> tuple[Linear, ...]:
        """The matrix multiplications on one GPU, in order (Megatron's column-row split); experts are not among them."""
        return (*self.attention.linears(self.hidden, tp), *self.mlp.linears(self.hidden, tp))

    def parameters_per_gpu(self, tp: int) -> int:
        """Weights on one GPU of a TP group."""
        around = self.norms * self.hidden
        return self.attention.parameters(self.hidden, tp) + self.mlp.parameters(self.hidden, tp) + around

    def quantised_weights(self, tp: int = 1) -> int:
        """Those of them that have the precision of the layers' matrices; experts are not among them."""
        return weights_of(linear for linear in self.linears(tp) if linear.quantised)

    def expert_weights(self, tp: int = 1) -> int:
        """Those of them that are matrices of experts; 0 for a dense layer."""
        return self.mlp.grouped_weights(self.hidden, tp)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.parameters_per_gpu(1)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes: without those of the experts that it is not routed to."""
        return self.parameters - self.mlp.idle_parameters(self.hidden)

    @property
    def active_weights(self) -> int:
        """Weights of the matrices that one token passes (biases and norms are not multiplications)."""
        return weights_of(self.linears()) + self.mlp.routed_weights(self.hidden)

    def adapter_parameters(self, rank: int) -> int:
        """Weights of LoRA's adapters, two of this rank beside every matrix (Hu et al. 2021), of each expert its own."""
        experts = self.mlp.experts if isinstance(self.mlp, Experts) else 0
        adapted = (*self.linears(), *self.mlp.expert_linears(self.hidden) * experts)
        return rank * sum(one.matrices * one.k_in + one.n_out for one in adapted)

    def adapter_moved(self, rank: int, tp: int = 1) -> tuple[int, int]:
        """Elements that these move for each token on one GPU, forward and backward.

        Kernels as of PEFT's and prime-rl's `base(x) + scaling * B(A(x))`, in one type and without dropout. Forward A
        reads the k inputs, B writes n outputs, which are scaled (2 n) and added (3 n). Backward the outputs' gradient
        is scaled (2 n) and read for B's and for the middle's (2 n), the inputs for A's (k); the inputs' is written (k)
        and added (3 k). The middle, `rank` numbers, is written once and read once forward, thrice backward.
        """
        active = self.mlp.active if isinstance(self.mlp, Experts) else 0
        adapted = (*self.linears(tp), *self.mlp.expert_linears(self.hidden, tp) * active)
        k, n = sum(one.matrices * one.k_in for one in adapted), sum(one.n_out for one in adapted)
        middle = rank * sum(one.matrices for one in adapted)
        return k + 6 * n + 2 * middle, 5 * k + 4 * n + 4 * middle

    def tensors(self, *, stacked: bool = False) -> int:
        """Weights and biases that have a name of their own in a checkpoint; `stacked`: experts of a layer are two."""
        parts = self.attention.tensors(self.hidden) + self.mlp.tensors(self.hidden)
        return parts + self.norms + self.mlp.expert_tensors(stacked=stacked)

    def splits(self, tp: int, expert_tp: int | None = None) -> bool:
        """Whether heads and widths split evenly over `tp` GPUs (KV heads are replicated when there are too few), and
        experts over `expert_tp` if that is another number."""
        for name, count in self.attention.split.items():
            if count % tp and not (name in REPLICATED and tp % count == 0):
                return False
        first, *others = self.mlp.widths or (0,)
        degree = expert_tp or tp if isinstance(self.mlp, Experts) else tp
        return first % degree == 0 and not any(width % tp for width in others)

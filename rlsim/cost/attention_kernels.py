"""Kernels of attention with grouped queries on one GPU: what they work on, and their seconds.

KV is taken as cold, as weights are (`cost.operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import AttentionFit, KernelFit
from rlsim.cost.kernel import Kernel, Work
from rlsim.models.precision import KV_BYTES

BF16_BYTES = 2.0
BLOCK_QUERIES = 128  # of one block of a prompt's kernel
#: Axes of the tables, in order. `tiles`: sequences times KV heads; `new`: of the prompt with as many keys for a query.
DECODE_AXES = ("tiles", "context", "kv_heads")
DECODE_WINDOW_AXES = ("tiles", "window")
PROMPT_AXES = ("sequences", "new", "q_heads", "group")
PROMPT_WINDOW_AXES = ("sequences", "new", "kv_heads", "group")


class _Kernels(dict[float, Kernel]):
    """By size of heads; of a size that was not measured the first."""

    def __init__(self, fits: Mapping[int, KernelFit], axes: Sequence[str]) -> None:
        super().__init__({size: Kernel(fit, axes) for size, fit in fits.items()})

    def __missing__(self, _: float) -> Kernel:
        return next(iter(self.values()))


def bent(
    kernel: Kernel, first: float, batch: int, work: Callable[[float], Work], least_slope: float
) -> tuple[list[float], list[float]]:
    """Knots of T, the sum of a batch's context tokens, and the seconds there of a kernel that works on `work(T)`;
    linear in between, the last slope continues.

    Its table is taken at `first` of its first axis; the knots of the second, the context (T / batch), bend the line.
    Times never fall with T and are never below `least_slope · T`.
    """
    contexts: Sequence[float] = (1.0,)
    factors = [1.0]
    if kernel.surface is not None and kernel.fit.table is not None:
        contexts, factors = kernel.fit.table.knots("context"), kernel.surface.along(first).at_knots()
    return _line(kernel, [batch * context for context in contexts], factors, work, least_slope)


def _line(
    kernel: Kernel, totals: Sequence[float], factors: Sequence[float], work: Callable[[float], Work], least_slope: float
) -> tuple[list[float], list[float]]:
    last, times, longest = totals[-1], [], 0.0
    for total, factor in zip([0.0, *totals], [factors[0], *factors], strict=True):
        longest = max(longest, kernel.fit.launch_s + kernel.roofline_s(work(total)) * factor, total * least_slope)
        times.append(longest)
    more_s = (kernel.roofline_s(work(2.0 * last)) - kernel.roofline_s(work(last))) * factors[-1]
    return [0.0, *totals, 2.0 * last], [*times, longest + max(more_s, last * least_slope)]


class DecodeKernels:
    """Attention of one new token for each sequence. Work: bytes of the KV; sequences times KV heads, and sequences.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, fit: AttentionFit, reference: Reference) -> None:
        self._bytes, self._reference = KV_BYTES[fit.kv_precision], reference
        self._whole = _Kernels(fit.heads, DECODE_AXES)
        self._windows = _Kernels(fit.windows, DECODE_WINDOW_AXES)
        self._whole_at = cache(lambda kv_heads, head_dim: self._whole[head_dim].at(kv_heads))

    def work(self, batch: int, tokens: float, kv_heads: int, head_dim: int) -> Work:
        """That of reading so many tokens in all."""
        read = 2.0 * tokens * kv_heads * head_dim * self._bytes
        added = {"tiles": batch * kv_heads, "sequences": batch}
        return Work({"memory": read / self._reference.memory_bytes_per_s}, added)

    def curve(
        self, batch: int, kv_heads: int, head_dim: int, window_tokens: int | None = None
    ) -> tuple[list[float], list[float]]:
        """Knots of T, the sum of the tokens that the batch reads, and one layer's seconds there: see `bent`.

        A window's kernel is a straight line for any context: in a CUDA graph it is the one for the longest context
        that a model may have. Where it was not measured, it is the kernel of as many tokens.
        """

        def work(total: float) -> Work:
            return self.work(batch, total, kv_heads, head_dim)

        least_slope = 2.0 * kv_heads * head_dim * self._bytes / self._reference.memory_bytes_per_s
        if window_tokens is not None and head_dim in self._windows:
            window = self._windows[head_dim]
            factor = 1.0 if window.surface is None else window.surface(batch * kv_heads, window_tokens)
            return _line(window, [float(batch * window_tokens)], [factor], work, least_slope)
        return bent(self._whole_at(kv_heads, head_dim), batch * kv_heads, batch, work, least_slope)


class Prompts(NamedTuple):
    """What a kernel works on over some chunks of prompts."""

    work: Work
    tokens: float  # new ones
    pairs: float  # of a query and a key that it attends to
    cut: bool  # by a window
    least_s: float  # at the data sheet's bandwidth


class PromptKernels:
    """Causal attention of prompts. Work: FLOPs of all pairs of a query and a key; those of the longest block on its one
    SM; bytes of q, k, v and the output; the queries; and FLOPs of pairs that a window masks out, if the kernel computes
    them.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, fit: AttentionFit, reference: Reference) -> None:
        self._bytes, self._reference = KV_BYTES[fit.kv_precision], reference
        self._whole = _Kernels(fit.heads, PROMPT_AXES)
        self._windows = _Kernels(fit.windows, PROMPT_WINDOW_AXES)
        self._kernel_at = cache(self._of_heads)

    def work(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> Prompts:
        """That of `chunks` of (new tokens, tokens already cached), in one kernel."""
        zero: float = 0  # whole numbers add up faster
        tokens = read = doubled = masked = longest = zero
        cut = False
        for new, prior in chunks:
            end = prior + new
            tokens += new
            every = new * (prior + end)
            if window_tokens is None or end <= window_tokens:
                read += end
                doubled += every
            else:
                cut = True
                growing = max(window_tokens - prior, 0.0)  # queries that have no more tokens before them than it holds
                seen = growing * (2.0 * prior + growing) + 2.0 * (new - growing) * window_tokens
                read += new + min(prior, window_tokens)
                doubled += seen
                masked += every - seen
                end = window_tokens + BLOCK_QUERIES
            if end > longest:
                longest = end
        ref, flop = self._reference, 4.0 * head_dim
        size = (tokens * q_heads * 2 * BF16_BYTES + read * kv_heads * 2 * self._bytes) * head_dim
        rate, memory_s = ref.bf16_flop_per_s, size / ref.memory_bytes_per_s
        resources = {
            "compute": flop * q_heads * doubled / 2 / rate,
            "block": flop * BLOCK_QUERIES * longest * ref.sm_count / rate,
            "memory": memory_s,
        }
        added = {"queries": tokens * q_heads}
        if cut:
            added["masked"] = flop * q_heads * masked / 2 / rate
        return Prompts(Work(resources, added), tokens, doubled / 2, cut, memory_s)

    def time_s(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> float:
        """Seconds of one layer; with a window a query attends to its last `window_tokens` tokens."""
        found = self.work(chunks, q_heads, kv_heads, head_dim, window_tokens)
        windows = found.cut and head_dim in self._windows
        kernel, count = self._kernel_at(q_heads, kv_heads, head_dim, windows), len(chunks)
        new = found.tokens / count if windows else 2.0 * found.pairs / found.tokens
        return max(kernel.time_s(found.work, count, new), found.least_s)

    def reached(self, head_dim: float) -> float:
        """Share of the peak of bf16 at which long prompts are computed."""
        return self._whole[head_dim].fit.efficiency["compute"]

    def _of_heads(self, q_heads: int, kv_heads: int, head_dim: float, windows: bool) -> Kernel:
        if windows:
            return self._windows[head_dim].at(kv_heads, q_heads / kv_heads)
        return self._whole[head_dim].at(q_heads, q_heads / kv_heads)

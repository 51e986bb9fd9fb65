"""Seconds of DeepGEMM's blocks on Hopper, which scale FP8 products by blocks of 128 × 128 weights.

The library compiles a kernel for each product by its own estimate of the traffic of every block shape that it has
(release 2.3 of 2026, `csrc/jit_kernels/heuristics/sm90.hpp`). How long the chosen block takes is fitted: some choices
are poor, and no smooth formula over sizes shows that.
"""

from __future__ import annotations

from math import ceil, gcd, inf
from typing import NamedTuple

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import DeepGemmFit

SCALED = 128  # elements of k, and columns, that share a scale
ROWS = (16, 32, 64, 128, 256)  # of a block; 16 and 32 only for no more tokens than that
LEAST_ROWS = 64  # that the tensor cores multiply at once
COLUMNS = (*range(16, SCALED + 1, 16), 144, 160, 192)  # with more than 128 rows: up to 128
#: What the library takes an SM to load from its L1, and from L2, of which there is no more than for the whole chip.
L1_BYTES_PER_CYCLE = 128
L2_BYTES_PER_CYCLE = 64
L2_CHIP_BYTES_PER_CYCLE = 8e6 / 1.3e3
QUANTISED_AT_ONCE = 16  # groups of 128 activations in a thread block, or the largest power of two that divides all


class Block(NamedTuple):
    """One shape, and whether the blocks of two neighbouring SMs load what they share once."""

    rows: int
    columns: int
    multicast: bool


def blocks_of(k: int, sms: int) -> list[tuple[float, Block]]:
    """The library's estimate of a wave's cycles for each block, in its order: of equal ones it takes the first."""
    l1, l2 = L1_BYTES_PER_CYCLE, min(L2_BYTES_PER_CYCLE, L2_CHIP_BYTES_PER_CYCLE / sms)
    passes: tuple[list[tuple[float, Block]], ...] = ([], [], [])  # no multicast, of columns, of rows
    for rows in ROWS:
        for columns in COLUMNS:
            if rows > SCALED and columns > SCALED:
                continue
            out = 2 * rows * columns
            cycles_l1 = (k * (rows + max(rows, LEAST_ROWS) + 2 * columns) + 2 * out) / l1
            loads = (rows + columns, rows // 2 + columns, rows + columns // 2)
            alone, *shared = (max(cycles_l1, (k * load + out) / l2) for load in loads)
            passes[0].append((alone, Block(rows, columns, False)))
            least = min(shared)
            if least < alone and sms % 2 == 0:
                passes[1 + shared.index(least)].append((least, Block(rows, columns, True)))
    return [one for found in passes for one in found]


def choose(m: float, n: int, blocks: list[tuple[float, Block]], sms: int, groups: float = 1) -> tuple[Block, int]:
    """The block of the fewest estimated cycles, and its waves; a single wave has no multicast."""
    least, chosen, waves = inf, blocks[0][1], 1
    for cycles, block in blocks:
        rows, columns, multicast = block
        if rows < LEAST_ROWS and m > rows:
            continue
        count = ceil(ceil(m / rows) * ceil(n / columns) * groups / sms)
        if count * cycles < least and not (multicast and count == 1):
            least, chosen, waves = count * cycles, block, count
    return chosen, waves


def quantising_blocks(m: float, k: int) -> float:
    """Thread blocks of the kernel that quantises m × k activations: `per_token_group_quant_8bit` of SGLang."""
    groups = ceil(m) * ceil(k / SCALED)
    return groups / gcd(groups, QUANTISED_AT_ONCE)


class DeepGemm:
    """The blocks of one GPU's products."""

    def __init__(self, fit: DeepGemmFit, reference: Reference, peak_flop_per_s: float) -> None:
        self._fit, self._sms = fit, reference.sm_count
        self._per_sm = peak_flop_per_s / reference.sm_count
        self._blocks: dict[int, list[tuple[float, Block]]] = {}
        self._times: dict[tuple[int, int, int, float], float] = {}

    def time_s(self, m: float, n: int, k: int, groups: float) -> float:
        """Seconds of all waves. They depend on m by its number of blocks alone, which many m share."""
        rows = LEAST_ROWS if m > 32 else 16
        key = (ceil(m / rows) * rows, n, k, groups)
        known = self._times.get(key)
        if known is None:
            blocks = self._blocks.get(k)
            if blocks is None:
                blocks = self._blocks[k] = blocks_of(k, self._sms)
            block, waves = choose(m, n, blocks, self._sms, groups)
            known = self._times[key] = waves * self._block_s(block, k)
        return known

    def quantise_s(self, m: float, k: int) -> float:
        """Least seconds of quantising m × k activations."""
        return self._fit.quantise_block_s * quantising_blocks(m, k)

    def _block_s(self, block: Block, k: int) -> float:
        fit = self._fit
        area = max(block.rows, LEAST_ROWS) * block.columns
        step = 2.0 * SCALED * area / (self._per_sm * fit.efficiency[max(0, ROWS.index(block.rows) - 2)])
        if SCALED % block.columns:
            step *= fit.uneven
        steps = k / SCALED * (fit.step_s + step + spilled_s(block, fit.spilled_s))
        return steps + fit.end_s * area / SCALED**2


def spilled_s(block: Block, seconds: tuple[float, float]) -> float:
    """How much longer each of its steps takes for want of registers: what is moved out of them and back takes its time
    beside the products, however fast these are."""
    if block.multicast or block.rows * block.columns < 128 * 160:
        return 0.0
    return seconds[block.rows * block.columns > 128 * 160]

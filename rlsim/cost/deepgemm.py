"""The work of DeepGEMM's blocks on Hopper, which scale FP8 products by blocks of 128 × 128 weights.

The library compiles a kernel for each product by its own estimate of the traffic of every block shape that it has
(release 2.3 of 2026, `csrc/jit_kernels/heuristics/sm90.hpp`). How long the chosen block takes is fitted: some choices
are poor, and no smooth formula over sizes shows that.
"""

from __future__ import annotations

from functools import cache
from math import ceil, gcd, inf
from typing import NamedTuple

from rlsim.cost.calibration import Reference

SCALED = 128  # elements of k, and columns, that share a scale
ROWS = (16, 32, 64, 128, 256)  # of a block; 16 and 32 only for no more tokens than that
LEAST_ROWS = 64  # that the tensor cores multiply at once
#: Resources: products by rows of a block, and those whose columns two scales share.
KINDS = ("rows_64", "rows_128", "rows_256", "uneven_64", "uneven_128", "uneven_256")
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
    """The work of the blocks of one GPU's products.

    Blocks of up to 64, of 128 and of 256 rows reach shares of the peak of their own, and lower ones where two scales
    share their columns. Each step of 128 elements of k takes its time beside the products; so do the start and end of a
    block, and registers that are moved out and back where a block wants more than there are.
    """

    def __init__(self, reference: Reference, peak_flop_per_s: float) -> None:
        self._sms, self._per_sm = reference.sm_count, peak_flop_per_s / reference.sm_count
        self._blocks = cache(lambda k: blocks_of(k, self._sms))
        self._chosen = cache(lambda m, n, k, groups: choose(m, n, self._blocks(k), self._sms, groups))

    def work(self, m: float, n: int, k: int, groups: float) -> tuple[dict[str, float], dict[str, float]]:
        """Resources (seconds at the peak by kind of block, all but one 0) and what comes on top."""
        rows = LEAST_ROWS if m > 32 else 16  # the choice depends on m by its number of blocks alone, which many m share
        block, waves = self._chosen(ceil(m / rows) * rows, n, k, groups)
        area, steps = max(block.rows, LEAST_ROWS) * block.columns, waves * k / SCALED
        resources = dict.fromkeys(KINDS, 0.0)
        kind = max(0, ROWS.index(block.rows) - 2) + (3 if SCALED % block.columns else 0)
        resources[KINDS[kind]] = 2.0 * SCALED * area * steps / self._per_sm
        spilled = _spills(block)
        return resources, {
            "quantising_blocks": quantising_blocks(m * groups, k),
            "steps": steps,
            "blocks": waves * area / SCALED**2,
            "few_spilled": steps * (spilled == 1),
            "many_spilled": steps * (spilled == 2),
        }


def _spills(block: Block) -> int:
    """0: it has registers enough; 1: 128 × 160 without multicast; 2: 128 × 192 or 256 × 128."""
    if block.multicast or block.rows * block.columns < 128 * 160:
        return 0
    return 1 + (block.rows * block.columns > 128 * 160)

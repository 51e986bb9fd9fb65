"""The work of matrix products, and their seconds by the one form of all kernels (`cost.kernel`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import ceil, gcd, inf
from typing import Any, NamedTuple

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import ProductFit
from rlsim.cost.kernel import Kernel, Work
from rlsim.models.precision import peak_flop_per_s, product_bytes, quantising_bytes

# DeepGEMM's choice of blocks ------------------------------------------------------------------------------------------

# The work of DeepGEMM's blocks on Hopper, which scale FP8 products by blocks of 128 × 128 weights.
#
# The library compiles a kernel for each product by its own estimate of the traffic of every block shape that it has
# (release 2.3 of 2026, `csrc/jit_kernels/heuristics/sm90.hpp`). How long the chosen block takes is fitted: some choices
# are poor, and no smooth formula over sizes shows that.

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
        wanted = 0 if block.multicast else block.rows * block.columns  # of registers: with multicast there are enough
        return resources, {
            "quantising_blocks": quantising_blocks(m * groups, k),
            "steps": steps,
            "blocks": waves * area / SCALED**2,
            "few_spilled": steps * (wanted == 128 * 160),
            "many_spilled": steps * (wanted > 128 * 160),
        }


# Products -------------------------------------------------------------------------------------------------------------


#: Axes of the table, in order.
GEMM_AXES = ("m", "n", "k")


class ProductWork:
    """What products with a fit's choice of blocks ask of one GPU; sizes are those after tensor-parallel sharding.

    `compute` are the FLOPs, or those of whole waves of blocks where the choice of blocks is known or fitted; `memory`
    reads the weights cold. Activations come in bf16: quantising them is part of the time, as of the measured one.
    """

    def __init__(self, fit: ProductFit, reference: Reference) -> None:
        self._fit, self._reference = fit, reference
        self._peak_flop_per_s = peak_flop_per_s(reference, fit.precision) or inf
        self._deepgemm = DeepGemm(reference, self._peak_flop_per_s) if fit.blocks == "deepgemm" else None
        self._row_block = gcd(*(tile.m for tile in fit.tiles), *(tile.from_rows - 1 for tile in fit.tiles))
        self._times: dict[tuple[int, int, int, float], list[float]] = {}

    def __call__(self, m: float, n: int, k: int, groups: float = 1) -> Work:
        """Of `groups` products of an m×k activation and a k×n weight in one kernel."""
        fit, rate = self._fit, self._reference.memory_bytes_per_s
        memory = groups * product_bytes(fit.precision, m, float(n), float(k)) / rate
        added: dict[str, Any] = {}
        if fit.precision != "bf16":
            added["quantised"] = groups * quantising_bytes(fit.precision, m, float(k)) / rate
        if self._deepgemm is not None:
            resources, more = self._deepgemm.work(m, n, k, groups)
            return Work({**resources, "memory": memory}, {**added, **more})
        if not fit.tiles:
            return Work({"compute": 2.0 * m * n * k * groups / self._peak_flop_per_s, "memory": memory}, added)
        fastest = inf  # at the tiles' shares of the peak, of all block shapes and splits of k
        for split, time in zip(fit.splits, self._tiles_s(m, n, k, groups), strict=True):
            fastest = min(fastest, time + self.split_s(split, m, n, groups))
        return Work({"compute": fastest, "memory": memory}, added)

    def fastest_s(self, m: float, n: int, k: int, groups: float) -> float:
        """Seconds that no kernel can beat: the data sheet's FLOP/s and bandwidth."""
        memory = groups * product_bytes(self._fit.precision, m, float(n), float(k)) / self._reference.memory_bytes_per_s
        return max(2.0 * m * n * k * groups / self._peak_flop_per_s, memory)

    def _tiles_s(self, m: float, n: int, k: int, groups: float) -> list[float]:
        """The fastest block shape at each split of k. It depends on m by its number of blocks, which many m share."""
        key = (ceil(m / self._row_block), n, k, groups)
        known = self._times.get(key)
        if known is None:
            fit = self._fit
            from_rows = max(tile.from_rows for tile in fit.tiles if tile.from_rows <= max(m, 1.0))
            tiles = [tile for tile in fit.tiles if tile.from_rows == from_rows]
            known = self._times[key] = [
                min(self.tile_s((tile.m, tile.n), tile.efficiency, split, m, n, k, groups) for tile in tiles)
                for split in fit.splits
            ]
        return known

    def split_s(self, split: int, m: Any, n: Any, groups: Any = 1) -> Any:
        """What splitting k takes beside its blocks."""
        if split == 1:
            return 0.0
        return self._fit.split_s + 4.0 * m * n * groups * split / self._reference.memory_bytes_per_s

    def tile_s(
        self, shape: tuple[int, int], share: Any, split: int, m: Any, n: Any, k: Any, groups: Any = 1, most: Any = max
    ) -> Any:
        """Seconds of one block shape at that share of the peak: `blocks · split / SMs` waves (at least one, rounded up
        in part) of `2 · block · (k / split + overhead)` FLOPs each. For arrays `most` is `np.maximum`."""
        fit, ref = self._fit, self._reference
        rows, columns = shape
        waves = most(1.0, -(-m // rows) * -(-n // columns) * groups * split / ref.sm_count)
        waves = waves + fit.wave_rounding * (-(-waves // 1.0) - waves)
        unit_s = 2.0 * rows * columns * ref.sm_count / self._peak_flop_per_s
        return waves * unit_s * (k / split + fit.k_overhead) / share


class Products:
    """The products of one precision on one GPU.

    Raises `CalibrationError` for a table over other axes than `GEMM_AXES`.
    """

    def __init__(self, fit: ProductFit, reference: Reference) -> None:
        self.work = ProductWork(fit, reference)
        self._kernel_at = cache(Kernel(fit, GEMM_AXES).at)
        self._times: dict[tuple[float, int, int, float], float] = {}

    @property
    def shapes(self) -> Iterable[tuple[float, int, int, float]]:
        """Every (m, n, k, groups) asked for so far."""
        return self._times

    def time_s(self, m: float, n: int, k: int, groups: float = 1) -> float:
        """Seconds of `groups` products of an m×k activation and a k×n weight in one kernel.

        More than one group stands for a mixture's experts (each with `m` rows); that form is an approximation from
        plain GEMMs, not measured. Never less than the data sheet allows.
        """
        key = (m, n, k, groups)
        known = self._times.get(key)
        if known is not None:
            return known
        time = self._kernel_at(n, k).time_s(self.work(m, n, k, groups), m)
        time = self._times[key] = max(time, self.work.fastest_s(m, n, k, groups))
        return time

"""The work of matrix products, and their seconds by the one form of all kernels (`cost.kernel`)."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, gcd, inf
from typing import Any

from rlsim.cost.calibration import Reference
from rlsim.cost.deepgemm import DeepGemm
from rlsim.cost.fits import ProductFit
from rlsim.cost.kernel import Kernel, Work
from rlsim.models.precision import peak_flop_per_s, product_bytes, quantising_bytes

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
        return Work({"compute": self._fastest_s(m, n, k, groups), "memory": memory}, added)

    def fastest_s(self, m: float, n: int, k: int, groups: float) -> float:
        """Seconds that no kernel can beat: the data sheet's FLOP/s and bandwidth."""
        memory = groups * product_bytes(self._fit.precision, m, float(n), float(k)) / self._reference.memory_bytes_per_s
        return max(2.0 * m * n * k * groups / self._peak_flop_per_s, memory)

    def _fastest_s(self, m: float, n: int, k: int, groups: float) -> float:
        """Seconds at the tiles' shares of the peak of the fastest block shape and split of k."""
        fit, fastest = self._fit, inf
        for split, time in zip(fit.splits, self._tiles_s(m, n, k, groups), strict=True):
            time += self.split_s(split, m, n, groups)
            if time < fastest:
                fastest = time
        return fastest

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
        self._kernel = Kernel(fit, GEMM_AXES)
        self._kernels: dict[tuple[int, int], Kernel] = {}
        self._times: dict[tuple[float, int, int, float], float] = {}

    @property
    def shapes(self) -> Iterable[tuple[float, int, int, float]]:
        """Every (m, n, k, groups) asked for so far."""
        return self._times

    def time_s(self, m: float, n: int, k: int, groups: float = 1) -> float:
        """Seconds of `groups` products of an m×k activation and a k×n weight in one kernel.

        More than one group stands for a mixture's experts (each with `m` rows); that form is an approximation from
        plain GEMMs, not measured. Where there is a table, never less than the data sheet allows.
        """
        key = (m, n, k, groups)
        known = self._times.get(key)
        if known is not None:
            return known
        kernel = self._kernels.get((n, k))
        if kernel is None:
            kernel = self._kernels[n, k] = self._kernel.at(n, k)
        time = kernel.time_s(self.work(m, n, k, groups), m)
        if kernel.surface is not None:
            time = max(time, self.work.fastest_s(m, n, k, groups))
        self._times[key] = time
        return time

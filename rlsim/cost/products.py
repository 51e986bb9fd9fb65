"""Seconds of matrix products in one precision, from a calibration's few fitted constants."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, gcd, inf

from rlsim.cost.calibration import Reference
from rlsim.cost.deepgemm import DeepGemm
from rlsim.cost.fits import DeepGemmFit, GemmFit, ProductFit
from rlsim.cost.surface import Surface, surface_of
from rlsim.precision import peak_flop_per_s, product_bytes, quantising_bytes

#: Axes of the correction, in order.
GEMM_AXES = ("m", "n", "k")


class Products:
    """The products of one precision; sizes are those one GPU sees, after tensor-parallel sharding.

    Raises `CalibrationError` for a correction over other axes than `GEMM_AXES`.
    """

    def __init__(self, fit: ProductFit, reference: Reference) -> None:
        self._fit, self._reference = fit, reference
        self._peak_flop_per_s = peak_flop_per_s(reference, fit.precision) or inf
        self._deepgemm: DeepGemm | None = None
        self._blocks: DeepGemm | TiledProducts
        if isinstance(fit, DeepGemmFit):
            self._blocks = self._deepgemm = DeepGemm(fit, reference, self._peak_flop_per_s)
        else:
            self._blocks = TiledProducts(fit, reference, self._peak_flop_per_s)
        self._times: dict[tuple[float, int, int, float], float] = {}
        self._factor = surface_of(fit.correction, GEMM_AXES)
        self._factors: dict[tuple[int, int], Surface] = {}

    @property
    def shapes(self) -> Iterable[tuple[float, int, int, float]]:
        """Every (m, n, k, groups) asked for so far."""
        return self._times

    def time_s(self, m: float, n: int, k: int, groups: float = 1) -> float:
        """Seconds of `groups` products of an m×k activation and a k×n weight in one kernel.

        `compute` is that of the blocks (`TiledProducts`, `DeepGemm`). `memory` reads the weights cold.
        Activations come in bf16: quantising them is part of the time, as of the measured one.
        More than one group stands for a mixture's experts (each with `m` rows); that form is an approximation from
        plain GEMMs, not measured.
        """
        key = (m, n, k, groups)
        known = self._times.get(key)
        if known is not None:
            return known
        fit, ref = self._fit, self._reference
        compute = self._blocks.time_s(m, n, k, groups)
        rate = ref.memory_bytes_per_s * fit.memory_efficiency
        size = groups * product_bytes(fit.precision, m, float(n), float(k))
        memory = size / rate
        quantise = groups * quantising_bytes(fit.precision, m, float(k)) / rate
        if self._deepgemm:
            quantise = max(quantise, self._deepgemm.quantise_s(m * groups, k))
        high, low = (compute, memory) if compute > memory else (memory, compute)
        time = fit.launch_s + quantise + high * float((1.0 + (low / high) ** fit.blend) ** (1.0 / fit.blend))
        if self._factor is not None:
            factor = self._factors.get((n, k))
            if factor is None:
                factor = self._factors[n, k] = self._factor.sliced(n, k)
            fastest = max(2.0 * m * n * k * groups / self._peak_flop_per_s, size / ref.memory_bytes_per_s)
            time = max(time * factor(m), fastest)
        self._times[key] = time
        return time


class TiledProducts:
    """The blocks of kernels whose choice is not known: of a few shapes and splits of k the fastest."""

    def __init__(self, fit: GemmFit, reference: Reference, peak_flop_per_s: float) -> None:
        self._fit, self._reference, self._peak_flop_per_s = fit, reference, peak_flop_per_s
        self._row_block = gcd(*(tile.m for tile in fit.tiles), *(tile.from_rows - 1 for tile in fit.tiles))
        self._times: dict[tuple[int, int, int, float], list[float]] = {}

    def time_s(self, m: float, n: int, k: int, groups: float) -> float:
        """Seconds of the fastest of the block shapes for so many rows and of the splits of k: `blocks · split / SMs`
        waves (at least one, rounded up in part) of `2 · block · (k / split + overhead)` FLOPs each."""
        fit, fastest = self._fit, inf
        for split, time in zip(fit.splits, self._split_times_s(m, n, k, groups), strict=True):
            if split > 1:
                time += fit.split_s + 4.0 * m * n * groups * split / self._reference.memory_bytes_per_s
            if time < fastest:
                fastest = time
        return fastest

    def _split_times_s(self, m: float, n: int, k: int, groups: float) -> list[float]:
        """Seconds of the blocks at each split of k, in the shape that is fastest there.

        They depend on m by its number of blocks alone, which many m share.
        """
        key = (ceil(m / self._row_block), n, k, groups)
        known = self._times.get(key)
        if known is not None:
            return known
        fit, sms = self._fit, self._reference.sm_count
        rounding = fit.wave_rounding
        per_sm = self._peak_flop_per_s / sms
        times = [inf] * len(fit.splits)
        from_rows = max(tile.from_rows for tile in fit.tiles if tile.from_rows <= max(m, 1.0))
        for tile in fit.tiles:
            if tile.from_rows != from_rows:
                continue
            blocks = ceil(m / tile.m) * ceil(n / tile.n) * groups
            unit = 2.0 * tile.m * tile.n / (per_sm * tile.efficiency)
            for i, split in enumerate(fit.splits):
                waves = blocks * split / sms
                waves = max(1.0, waves + rounding * (ceil(waves) - waves))
                times[i] = min(times[i], waves * unit * (k / split + fit.k_overhead))
        self._times[key] = times
        return times

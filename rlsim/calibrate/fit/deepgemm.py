"""The constants of DeepGEMM's products on Hopper, whose choice of blocks is the library's own."""

from __future__ import annotations

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, as_written, columns_of, fit_logs
from rlsim.cost.calibration import Reference
from rlsim.cost.deepgemm import LEAST_ROWS, SCALED, Block, blocks_of, choose, quantising_blocks, spilled_s
from rlsim.cost.fits import DeepGemmFit
from rlsim.precision import Precision, peak_flop_per_s, product_bytes, quantising_bytes

PRECISION: Precision = "fp8_block"
#: Logs of launch (us), blend - 1, quantising block (ns), step (ns), three efficiencies, uneven, two spills (us), end
#: (us), and the rate of L2 over the memory's, less 1.
START = np.log([4.0, 2.0, 1.2, 100.0, 0.8, 1.0, 0.9, 1.2, 0.2, 2.0, 0.8, 2.0])
MOST_BLEND = 50.0


def fit_deepgemm(rows: pd.DataFrame, ref: Reference, memory_efficiency: float) -> tuple[DeepGemmFit, float]:
    """The fit to `rows` (m, n, k, seconds, in_l2) without a correction, and the rate of L2 over that of the memory,
    at which weights come where `in_l2`."""
    m, n, k, measured, in_l2 = columns_of(rows, ("m", "n", "k", "seconds", "in_l2"))
    known = {one: blocks_of(int(one), ref.sm_count) for one in set(k)}
    chosen = [choose(a, int(b), known[c], ref.sm_count) for a, b, c in zip(m, n, k, strict=True)]
    blocks, waves = [block for block, _ in chosen], np.array([count for _, count in chosen], float)
    steps = k / SCALED
    columns = np.array([block.columns for block in blocks])
    height = np.array([max(block.rows, LEAST_ROWS) for block in blocks])
    kind = np.log2(height / LEAST_ROWS).astype(int)
    products_s = 2.0 * SCALED * height * columns * ref.sm_count / (peak_flop_per_s(ref, PRECISION) or np.nan)
    of_spill = np.array([_spill_of(block) for block in blocks])
    cold = ref.memory_bytes_per_s * memory_efficiency
    size, activations = product_bytes(PRECISION, m, n, k), quantising_bytes(PRECISION, m, k)
    quantising = np.array([quantising_blocks(a, int(c)) for a, c in zip(m, k, strict=True)])

    def shown(p: Array) -> Array:
        x = np.exp(p)
        rate = cold * np.where(in_l2, 1.0 + x[11], 1.0)
        memory, quantised = size / rate, activations / rate
        step = x[3] * 1e-9 + np.concatenate([[0.0], x[8:10] * 1e-6])[of_spill]
        step = step + products_s / x[4:7][kind] * np.where(SCALED % columns, x[7], 1.0)
        compute = waves * (steps * step + x[10] * 1e-6 * height * columns / SCALED**2)
        high, low = np.maximum(compute, memory), np.minimum(compute, memory)
        blend = min(1.0 + x[1], MOST_BLEND)
        quantise = np.maximum(quantised, x[2] * 1e-9 * quantising)
        return np.asarray(x[0] * 1e-6 + quantise + high * (1.0 + (low / high) ** blend) ** (1.0 / blend))

    x = [float(one) for one in np.exp(fit_logs(shown, measured, START, pull=0.02, within=4.0).x)]
    fit = DeepGemmFit(
        launch_s=x[0] * 1e-6,
        quantise_block_s=x[2] * 1e-9,
        memory_efficiency=memory_efficiency,
        blend=min(1.0 + x[1], MOST_BLEND),
        step_s=x[3] * 1e-9,
        efficiency=(x[4], x[5], x[6]),
        uneven=x[7],
        spilled_s=(x[8] * 1e-6, x[9] * 1e-6),
        end_s=x[10] * 1e-6,
    )
    return as_written(fit), 1.0 + x[11]


def _spill_of(block: Block) -> int:
    """0: it has registers enough; else which of the two is its own, from 1."""
    return int(spilled_s(block, (1.0, 2.0)))

"""Attention in a sliding window: a factor on the kernel of as many tokens, for each head size that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, held_out, soft_l1
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.calibrate.fit.heads import GROUP, HEAD_DIM, OTHER_HEAD_DIMS, heads_of, per_head_of_128
from rlsim.calibrate.fit.kernels import FULL, Knots
from rlsim.calibrate.fit.prefill import fit_prefill_attention
from rlsim.calibrate.points import residual
from rlsim.cost.calibration import Reference, Residual
from rlsim.cost.fits import Correction, OperatorFits, PrefillAttentionFit
from rlsim.cost.operators import Operators

#: KV heads over the whole batch, and the window: with few, kernels do not split what a window holds over the SMs.
DECODE_KNOTS: Knots = {
    "tiles": [1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 1024.0, 4096.0, 16384.0],
    "window": [128.0, 1024.0, 8192.0],
}
PREFILL_KNOTS: Knots = {
    "sequences": [4.0**e for e in range(5)],
    "tokens": [128.0, 256.0, 1024.0, 4096.0, 16384.0],
    "kv_heads": [1.0, 4.0, 16.0, 64.0],
    "group": [1.0, 8.0],
}
#: Windows of this size are Llama 4's chunks (SGLang's rows take the time of chunks, not of windows). A prompt's chunks
#: are sequences of their own to rlsim, without a factor.
CHUNK = 8192
NOTE = "sequences beyond their window; (batch, heads) not fitted; KV from L2 too"


def with_windows(
    fits: OperatorFits, ref: Reference, tables: dict[str, pd.DataFrame]
) -> tuple[OperatorFits, dict[str, Residual]]:
    """`fits` with the factors of `tables` (by slot: batch, tokens, window, q_heads, kv_heads, head_dim, seconds), and
    the residuals by operator, of batches and heads that no fit has seen."""
    found: dict[str, Residual] = {}
    for slot, table in tables.items():
        dims = (HEAD_DIM, *OTHER_HEAD_DIMS)
        used = (table.q_heads <= GROUP * table.kv_heads) & table.head_dim.isin(dims)
        if slot == "prefill_windows":
            used &= table.window < CHUNK
        rows = table[used].reset_index(drop=True)
        if rows.empty:
            continue
        rows = rows.assign(tiles=rows.batch * rows.kv_heads, sequences=rows.batch, group=rows.q_heads / rows.kv_heads)
        test, knots = held_out(heads_of(rows)), DECODE_KNOTS if slot == "decode_windows" else PREFILL_KNOTS
        error = np.log(rows.seconds / _seconds(Operators(fits, ref), slot, rows)).to_numpy(float)
        factors: dict[int, Correction] = {}
        masked: dict[int, PrefillAttentionFit] = {}
        for dim in map(int, sorted(rows.head_dim.unique())):
            own = ~test & (rows.head_dim == dim).to_numpy(bool)
            if slot == "prefill_windows" and _masks(rows[own], error[own], fits, ref, dim):
                masked[dim] = _masked(rows[own], ref, dim)
            elif (factor := fit_correction(rows[own], knots, error[own])) is not None:
                factors[dim] = factor
        fits = fits.model_copy(update={slot: factors, **({"masked_prefill": masked} if masked else {})})
        unseen = rows[test]
        shown = _seconds(Operators(fits, ref), slot, unseen)
        operator = slot.replace("_windows", "_attention_windows")
        found[operator] = residual(shown, unseen.seconds, rows[["batch", "tokens", "window", "head_dim"]], NOTE)
    return fits, found


def _masks(rows: pd.DataFrame, error: Array, fits: OperatorFits, ref: Reference, dim: int) -> bool:
    """Whether prompts take as long as if the kernel went through all keys: tried on the longest of `rows` and on a
    quarter of the batches and heads, by fits to the others. `error`: log of measured over the window's own formula."""
    unseen = held_out(heads_of(rows)) | (rows.tokens == rows.tokens.max()).to_numpy(bool)
    seen, rest = rows[~unseen], rows[unseen]
    if len(seen) < FULL:
        return False
    factor = fit_correction(seen, PREFILL_KNOTS, error[~unseen])
    cut = {"prefill_windows": {dim: factor} if factor else {}, "masked_prefill": {}}
    whole = {"prefill_windows": {}, "masked_prefill": {dim: _masked(seen, ref, dim)}}

    def off(update: Mapping[str, object]) -> float:
        shown = _seconds(Operators(fits.model_copy(update=update), ref), "prefill_windows", rest)
        return float(soft_l1(np.log(shown / rest.seconds.to_numpy(float))).sum())

    return off(whole) < off(cut)


def _masked(rows: pd.DataFrame, ref: Reference, dim: int) -> PrefillAttentionFit:
    """The formula of all keys, which needs no correction."""
    fit = fit_prefill_attention(rows.assign(new=rows.tokens, prior=0), per_head_of_128(ref, dim))
    return fit.model_copy(update={"correction": None})


def _seconds(operators: Operators, slot: str, rows: pd.DataFrame) -> list[float]:
    """Seconds of each row, sequences beyond their window."""

    def one(row: Any) -> float:
        batch, window, heads = int(row.batch), int(row.window), (int(row.q_heads), int(row.kv_heads), int(row.head_dim))
        if slot == "decode_windows":
            factor = operators.decode_window_factor(batch, *heads[1:], window)
            return factor * operators.decode_attention_s(batch, batch * window, *heads)
        return operators.prefill_attention_s([(float(row.tokens), 0.0)] * batch, *heads, window)

    return [one(row) for row in rows.itertuples(index=False)]

"""Latent attention: decode in the latent, and prompts.

Where the tables time a whole module, its products and elementwise kernels are those of the calibration's other fits,
and what is fitted is the module less those. Errors are those of the sum. The head counts of `UNSEEN` (whole degrees of
tensor parallelism) judge a fit that has seen none of them, over the number of heads, or over blocks of heads for
kernels that are made for these (on B200 the one for 32 heads takes a third longer than those for 16 and 64); what steps
are then costed with has seen all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import KNOTS
from rlsim.calibrate.fit.kernel import fit_kernel, stacked
from rlsim.calibrate.measurements import Fitted, join, point_rows, residual_of
from rlsim.cost.attention import Latent
from rlsim.cost.fits import KernelFit, LatentAttentionFit
from rlsim.cost.kernel import Work
from rlsim.cost.operators import Operators
from rlsim.models.layers import LatentAttention
from rlsim.models.precision import KV_BYTES, KvPrecision

#: What was measured: a layer of DeepSeek-V3.
MEASURED = LatentAttention(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
HIDDEN = 7168
UNSEEN = (16, 64)  # heads on one GPU
FEWEST_HEADS = 8  # of prompts: with fewer, L2 holds all weights of the layer that was measured over and over
TINY = 64  # tokens of the contexts that give the floor
LEAST = 0.1  # of a module's time, what is taken to be the attention's at least
ADDED_S = {"sequences": 2e-8, "heads": 1e-9}  # where the search begins

_EMPTY = KernelFit(launch_s=0.0, efficiency={"memory": 1.0, "compute": 1.0}, added_s={"sequences": 0.0, "heads": 0.0})


def kernel_latent_attention(
    decode: pd.DataFrame,
    prompts: pd.DataFrame,
    operators: Operators,
    *,
    module: bool,
    blocks: bool,
    kv: KvPrecision = "bf16",
) -> Fitted[LatentAttentionFit]:
    """Both tables (columns batch, heads, new, prior, seconds) of one GPU on a KV cache of `kv`, whose products, and
    attention of grouped queries in bf16, cost what `operators` say.

    `module`: they time all of a layer's attention with its products. Otherwise prompts are not fitted: what such a
    table times works in the latent, which engines do for prompts with cached tokens only. `blocks`: the kernel of
    decode is made for 16, 32 or 64 heads.
    """
    none = LatentAttentionFit(kv_precision=kv, decode=_EMPTY)

    def kernels(**fits: KernelFit) -> dict[int, Latent]:
        fit = none.model_copy(update=fits)
        return {int(heads): Latent(operators, MEASURED, int(heads), fit) for heads in decode.heads.unique()}

    made = kernels()

    def beside_s(row: Any, tokens: float) -> float:
        """A measured layer's products over all tokens, `kv_b` not among them, and its elementwise kernels."""
        linears = MEASURED.linears(HIDDEN, MEASURED.heads // int(row.heads))
        products = (operators.gemm_s(tokens, one.n_out, one.k_in) for one in linears if one.name != "kv_b")
        return sum(products) + made[row.heads].elementwise_s(tokens)

    decode = decode.assign(context=decode.prior + decode.new)
    size = decode.batch * decode.context * MEASURED.cached_elements() * KV_BYTES[kv]
    rows = decode[(size > 1.2 * operators.reference.l2_bytes) | (decode.context <= TINY)].reset_index(drop=True)
    each: list[Any] = list(rows.itertuples(index=False))
    absorb = np.array([made[row.heads].absorb_s(row.batch) for row in each])
    beside = np.array([beside_s(row, row.batch) if module else 0.0 for row in each])
    rows = rows.assign(beside_s=beside - (0.0 if module else absorb))  # a kernel's own table does not time those
    rows = rows.assign(own_s=rows.seconds - beside - (absorb if module else 0.0))
    works = [made[row.heads].decode_work(int(row.batch), row.batch * row.context) for row in each]
    name, points, residuals = "latent_attention" if kv == "bf16" else f"latent_attention_{kv}", [], {}
    what = "whole module, its products by their own fit" if module else "kernel alone"
    note = f"heads of {UNSEEN[0]} and {UNSEEN[1]} on a GPU not fitted; {what}"

    def fitted(
        operator: str, part: str, rows: pd.DataFrame, works: list[Work], seen: str, ranges: list[str]
    ) -> KernelFit:
        """The kernel of decode or of prompts (`part`) to all rows, judged by one with such knots of the heads that has
        not seen those of `UNSEEN`."""
        unseen, knots = rows.heads.isin(UNSEEN).to_numpy(bool), KNOTS[f"latent_{part}"]
        own_s = np.maximum(rows.own_s.to_numpy(float), LEAST * rows.seconds.to_numpy(float))
        some = stacked(work for work, left in zip(works, unseen, strict=True) if not left)
        first, every = ({**knots, "heads": KNOTS["latent_heads"][heads]} for heads in (seen, "all"))
        judged = kernels(**{part: fit_kernel(some, own_s[~unseen], rows[~unseen], first, added_s=ADDED_S)})
        calls = zip(rows.heads.tolist(), rows.itertuples(index=False), strict=True)
        times = [_seconds(judged[heads], part, row) for heads, row in calls]
        points.append(point_rows(operator, _labels(rows), rows.seconds, np.array(times) + rows.beside_s, unseen))
        residuals[operator] = residual_of(points[-1], rows[ranges], note)
        return fit_kernel(stacked(works), own_s, rows, every, added_s=ADDED_S)

    seen = "seen in blocks" if blocks else "seen"
    fit = none.model_copy(update={"decode": fitted(name, "decode", rows, works, seen, ["batch", "context", "heads"])})
    if not module:
        notes = ("prompts of latent attention: prompt attention of grouped queries, not measured",)
        return Fitted(fit, residuals, points[0], notes)
    rows = prompts[prompts.heads >= FEWEST_HEADS].reset_index(drop=True)
    each = list(rows.itertuples(index=False))
    beside = np.array([beside_s(row, row.batch * row.new) for row in each])
    rows = rows.assign(beside_s=beside, own_s=rows.seconds - beside)
    works = [made[row.heads].prompt_work(_chunks(row))[0] for row in each]
    of_prompts = fitted(f"{name}_prompts", "prompts", rows, works, "seen", ["new", "heads"])
    return Fitted(fit.model_copy(update={"prompts": of_prompts}), residuals, join(points))


def _seconds(attention: Latent, part: str, row: Any) -> float:
    if part == "decode":
        return attention.curve(int(row.batch)).step_s(row.batch * row.context)
    return attention.prefill_s(_chunks(row))


def _chunks(row: Any) -> list[tuple[float, float]]:
    return [(float(row.new), float(row.prior))] * int(row.batch)


def _labels(rows: pd.DataFrame) -> list[str]:
    return [f"{row.batch} x {row.new} tokens on {row.prior}, {row.heads} heads" for row in rows.itertuples(index=False)]

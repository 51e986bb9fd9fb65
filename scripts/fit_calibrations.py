"""Fit `calibration/*.yaml` and write `docs/calibration.md` from measured kernel tables.

    python scripts/fit_calibrations.py [DATA_DIR]

DATA_DIR holds `kernels/aiconfigurator`, `kernels/vidur` and `engine` (default: `../shared/data`). The tables
themselves are never copied; what is written are fitted constants, their residuals on held-out shapes and where they
come from. Running it again on the same data gives the same bytes. A `training` section that somebody else has filled
in is kept.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from rlsim.cost.calibration import (
    Calibration,
    CollectiveFit,
    CollectiveFits,
    DecodeAttentionFit,
    GemmFit,
    HostFit,
    MemoryOpFit,
    OperatorFits,
    PrefillAttentionFit,
    Provenance,
    Reference,
    Residual,
    RuntimeFit,
    Source,
    Tile,
    TrainingFit,
    load_calibration,
)
from rlsim.cost.operators import Operators
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import load_model
from rlsim.schema import validate

Array = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]
DATE = "2026-11-21"
SCRIPT = "scripts/fit_calibrations.py"
COMMIT = "095f58a"
VIDUR_COMMIT = "7d47513"
MS = 1e-3
HELD_OUT = 0.25


@dataclass(frozen=True)
class Gpu:
    """One measured GPU: its folder in the tables, its catalogue cluster, the releases fitted and Vidur's tables for
    it."""

    name: str
    folder: str
    cluster: str
    versions: dict[str, str]
    nccl: str
    vidur: tuple[str, ...]


GPUS = (
    Gpu(
        "h100-sxm",
        "h100_sxm",
        "8xh100",
        {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.2.0rc5"},
        "2.29.2",
        ("h100/meta-llama/Llama-2-7b-hf", "h100/meta-llama/Llama-2-70b-hf"),
    ),
    Gpu(
        "h200-sxm",
        "h200_sxm",
        "8xh200",
        {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.2.0rc5"},
        "2.29.2",
        ("h100/meta-llama/Llama-2-7b-hf", "h100/meta-llama/Llama-2-70b-hf"),
    ),
    Gpu(
        "a100-sxm-80gb",
        "a100_sxm",
        "8xa100",
        {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.0.0"},
        "2.27.3",
        ("a100/meta-llama/Meta-Llama-3-8B", "a100/meta-llama/Meta-Llama-3-70B"),
    ),
    Gpu(
        "l40s",
        "l40s",
        "8xl40s",
        {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.0.0"},
        "2.27.3",
        ("a40/meta-llama/Llama-2-7b-hf", "a40/meta-llama/Llama-2-70b-hf"),
    ),
)

#: GPUs without tables: everything relative is taken from another one, the data-sheet figures are their own.
DERIVED = {
    "h800-sxm": (
        "h100-sxm",
        "2x8xh800",
        "H100 kernels; NVLink part of the collectives stretched by the ratio of the link rates",
    ),
    "h20": (
        "h100-sxm",
        "4x8xh20",
        "H100 efficiencies on H20's own peak rates and SM count; no H20 kernel is measured here",
    ),
    "gh200": ("h100-sxm", "8xgh200", "H100 efficiencies on GH200's own peak rates; no GH200 kernel is measured here"),
}

GRAPH_BATCHES = {
    "sglang": (1, 2, 4, *range(8, 161, 8)),
    "vllm": (1, 2, 4, *range(8, 257, 8)),
    "trtllm": (1, 2, 4, *range(8, 129, 8)),
}


# --- small helpers ---------------------------------------------------------------------------------------------------


def held_out(keys: pd.Series) -> NDArray[np.bool_]:
    """True for the rows of a fixed random quarter of the distinct keys."""
    distinct = np.unique(keys.to_numpy())
    rng = np.random.default_rng(20)
    chosen = set(rng.choice(distinct, max(1, int(len(distinct) * HELD_OUT)), replace=False).tolist())
    return np.asarray(keys.isin(chosen).to_numpy(), dtype=bool)


def robust(error: Array) -> float:
    """Mean soft-L1 loss of log errors, scale 0.1."""
    return float(np.mean(2.0 * (np.sqrt(1.0 + (error / 0.1) ** 2) - 1.0)))


def descend(loss: Callable[[Array], float], start: Array, rounds: int = 40) -> tuple[Array, float]:
    """Coordinate descent with growing and shrinking steps: for losses with the jumps of whole waves."""
    point, best = start.copy(), loss(start)
    step = np.full(len(start), 0.4)
    for _ in range(rounds):
        for i in range(len(start)):
            moved = False
            for sign in (1.0, -1.0):
                while True:
                    trial = point.copy()
                    trial[i] += sign * step[i]
                    value = loss(trial)
                    if value >= best - 1e-6:
                        break
                    point, best, moved = trial, value, True
                if moved:
                    break
            step[i] *= 1.2 if moved else 0.5
    return point, best


def squash(x: Array) -> Array:
    """Any number to (0, 1)."""
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def unsquash(y: float) -> float:
    """The inverse of `squash`."""
    return math.log(y / (1.0 - y))


def residual(
    predicted: Iterable[float], measured: Iterable[float], ranges: dict[str, Array], note: str = ""
) -> Residual:
    """Error statistics of a prediction and the ranges it was measured over."""
    ratio = np.fromiter(predicted, float) / np.fromiter(measured, float) - 1.0
    return Residual(
        count=len(ratio),
        median=float(np.median(np.abs(ratio))),
        p90=float(np.quantile(np.abs(ratio), 0.9)),
        bias=float(np.median(ratio)),
        ranges={name: (float(np.min(values)), float(np.max(values))) for name, values in ranges.items()},
        note=note,
    )


def rounded(value: Any) -> Any:
    """Floats to four significant digits, everywhere in a nested record."""
    if isinstance(value, float):
        if not math.isfinite(value) or value == round(value):
            return value if abs(value) < 1e4 or not math.isfinite(value) else int(value)
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


# --- GEMM ------------------------------------------------------------------------------------------------------------

TILES = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8)


def gemm_time(p: Array, memory_efficiency: float, m: Array, n: Array, k: Array, ref: Reference) -> Array:
    """`Operators.gemm_s` on arrays.

    p = log launch (us), log k overhead, log split (us), log (blend - 1), rounding, tiles.
    """
    launch, overhead, split_s, blend = np.exp(p[0]) * 1e-6, np.exp(p[1]), np.exp(p[2]) * 1e-6, 1.0 + np.exp(p[3])
    share, efficiency = squash(p[4]), squash(p[5:])
    compute = np.full(m.shape, np.inf)
    for (bm, bn), eff in zip(TILES, efficiency, strict=True):
        blocks = np.ceil(m / bm) * np.ceil(n / bn)
        unit = 2.0 * bm * bn / (ref.bf16_flop_per_s / ref.sm_count * eff)
        for split in SPLITS:
            waves = blocks * split / ref.sm_count
            waves = np.maximum(1.0, waves + share * (np.ceil(waves) - waves))
            extra = split_s + 4.0 * m * n * split / ref.memory_bytes_per_s if split > 1 else 0.0
            compute = np.minimum(compute, waves * unit * (k / split + overhead) + extra)
    memory = 2.0 * (n * k + m * k + m * n) / (ref.memory_bytes_per_s * memory_efficiency)
    high, low = np.maximum(compute, memory), np.minimum(compute, memory)
    return np.asarray(launch + high * (1.0 + (low / high) ** blend) ** (1.0 / blend))


@dataclass
class Fitted:
    """A fit, its residual on held-out rows, and how it compares with rows measured with operands in L2."""

    fit: Any
    residual: Residual
    hot: Residual | None = None
    long: Residual | None = None


def fit_gemm(table: pd.DataFrame, ref: Reference, include_hot: bool = False) -> Fitted:
    """Fit the GEMM of one GPU. `table`: m, n, k, seconds.

    Rows that are memory-bound and whose weights are under 1.5 L2 are left out and only compared. The memory
    efficiency comes first, from products of few rows with weights beyond four times L2; the rest follows with it fixed.
    """
    m, n, k, y = (table[c].to_numpy(float) for c in ("m", "n", "k", "seconds"))
    foot = 2.0 * n * k
    test = held_out(table.n.astype(str) + "x" + table.k.astype(str))
    ridge = min(ref.bf16_flop_per_s / ref.memory_bytes_per_s, 64.0 if ref.l2_bytes < 60e6 else 1e9)
    hot = (foot < 1.5 * ref.l2_bytes) & (m <= ridge) & (not include_hot)
    large = (m <= 16) & (foot > 4.0 * ref.l2_bytes) & ~test
    size = 2.0 * (n * k + m * k + m * n)
    # seconds = launch + size / rate, in relative errors
    design = np.stack([1.0 / y[large], size[large] / y[large]], axis=1)
    (_, slope), _ = nnls(design, np.ones(large.sum()))
    efficiency = min(1.0 / (slope * ref.memory_bytes_per_s), 0.95)
    rng = np.random.default_rng(0)
    train = np.flatnonzero(~test & ~hot)
    train = np.sort(rng.choice(train, min(5000, len(train)), replace=False))
    args = (m[train], n[train], k[train], ref)
    target = np.log(y[train])

    def loss(p: Array) -> float:
        # a launch under 0.5 us or a blend above 20 is not told apart by the data
        guard = max(0.0, -p[0] - 0.7) + max(0.0, p[3] - 3.0)
        return robust(np.log(gemm_time(p, efficiency, *args)) - target) + 0.1 * guard

    best, best_loss = None, math.inf
    for seed in range(3):
        tiles = np.random.default_rng(seed).normal(0.7, 0.3 * (seed > 0), len(TILES))
        point, value = descend(loss, np.concatenate([np.log([2.5, 100.0, 3.0, 2.0]), [0.0], tiles]))
        if value < best_loss:
            best, best_loss = point, value
    assert best is not None
    fit = GemmFit(
        launch_s=float(np.exp(best[0]) * 1e-6),
        memory_efficiency=float(efficiency),
        k_overhead=float(np.exp(best[1])),
        split_s=float(np.exp(best[2]) * 1e-6),
        blend=float(1.0 + np.exp(best[3])),
        wave_rounding=float(squash(best[4])),
        tiles=tuple(Tile(m=a, n=b, efficiency=float(e)) for (a, b), e in zip(TILES, squash(best[5:]), strict=True)),
        splits=SPLITS,
    )
    fit = validate(rounded(fit.model_dump()), GemmFit)
    check = _operators(ref, gemm=fit)
    score = np.flatnonzero(test & ~hot)
    values = [check.gemm_s(m[i], int(n[i]), int(k[i])) for i in score]
    ranges = {"m": m, "n": n, "k": k}
    hot_rows = np.flatnonzero(hot & test)
    hot_score = None
    if len(hot_rows):
        hot_values = [check.gemm_s(m[i], int(n[i]), int(k[i])) for i in hot_rows]
        hot_score = residual(hot_values, y[hot_rows], {"m": m[hot_rows], "megabytes": foot[hot_rows] / 1e6})
    return Fitted(
        fit,
        residual(values, y[score], ranges, "shapes (n, k) not fitted; weights beyond L2 or compute-bound"),
        hot_score,
    )


# --- attention -------------------------------------------------------------------------------------------------------

PARALLELISM = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 11.0)
PLAUSIBLE = 0.95  # rows that would need more of the peak bandwidth were served from L2 in part
GROUP = 8  # query heads per KV head in the models RL runs use


def fit_decode_attention(table: pd.DataFrame, ref: Reference, skew: float, include_hot: bool = False) -> Fitted:
    """Fit decode attention. `table`: batch, context, q_heads, kv_heads, seconds (head size 128).

    The floor comes from contexts of at most 64 tokens, the streaming part from KV beyond 1.2 L2. Rows that imply
    more than 95% of the peak bandwidth cannot have read their KV from memory and are left out, however large
    (TensorRT-LLM's grouped-query rows).
    """
    table = table[table.q_heads <= GROUP * table.kv_heads]
    b, s, kv, q, y = (table[c].to_numpy(float) for c in ("batch", "context", "kv_heads", "q_heads", "seconds"))
    size = b * s * kv * 512.0
    test = held_out(table.batch.astype(str) + "/" + table.q_heads.astype(str) + "/" + table.kv_heads.astype(str))
    plausible = (size / y < PLAUSIBLE * ref.memory_bytes_per_s) | include_hot
    tiny, cold = (s <= 64) & (size < 0.5 * ref.l2_bytes), (size > 1.2 * ref.l2_bytes) & (s >= 128)
    cold = (cold | (include_hot & (s >= 128))) & plausible

    def floor(p: Array, i: NDArray[Any]) -> Array:
        return np.asarray(np.exp(p[0]) + np.exp(p[1]) * b[i] * kv[i] + np.exp(p[2]) * b[i])

    rows = np.flatnonzero(tiny & ~test)
    low = least_squares(
        lambda p: np.log(floor(p, rows) / (y[rows] * 1e6)), np.log([9.0, 0.02, 0.01]), loss="soft_l1", f_scale=0.1
    ).x
    knots = np.array(PARALLELISM)

    def stream(p: Array, i: NDArray[Any]) -> Array:
        rate = ref.memory_bytes_per_s * np.interp(np.log2(b[i] * kv[i]), knots, squash(p[3:]))
        return np.asarray((np.exp(p[0]) + np.exp(p[1]) * b[i] * kv[i] + np.exp(p[2]) * b[i]) * 1e-6 + size[i] / rate)

    rows = np.flatnonzero(cold & ~test)
    start = np.concatenate([np.log([12.0, 0.008, 0.004]), np.full(len(knots), unsquash(0.8))])

    def error(p: Array) -> Array:  # a small pull to the start keeps knots without data where they are
        shown = np.maximum(stream(p, rows), floor(low, rows) * 1e-6)
        return np.concatenate([np.log(shown / y[rows]), 0.03 * (p - start)])

    p = least_squares(error, start, loss="soft_l1", f_scale=0.1).x
    fit = DecodeAttentionFit(
        floor_s=math.exp(low[0]) * 1e-6,
        floor_tile_s=math.exp(low[1]) * 1e-6,
        floor_sequence_s=math.exp(low[2]) * 1e-6,
        stream_s=math.exp(p[0]) * 1e-6,
        stream_tile_s=math.exp(p[1]) * 1e-6,
        stream_sequence_s=math.exp(p[2]) * 1e-6,
        parallelism=PARALLELISM,
        efficiency=tuple(np.minimum(squash(p[3:]), PLAUSIBLE).tolist()),
        skew=skew,
    )
    fit = validate(rounded(fit.model_dump()), DecodeAttentionFit)
    check = _operators(ref, decode=fit)

    def predict(i: NDArray[Any]) -> list[float]:
        return [check.decode_attention_s(int(b[j]), b[j] * s[j], int(q[j]), int(kv[j]), 128) for j in i]

    score = np.flatnonzero(cold & test & (b <= 512))
    dropped = np.mean(((size > 1.2 * ref.l2_bytes) & ~plausible)[size > 1.2 * ref.l2_bytes])
    note = f"(batch, heads) not fitted; KV beyond L2; {percent(float(dropped))} of such rows dropped as impossible"
    ranges = {"batch": b, "context": s, "kv_heads": kv, "group": q / kv}
    hot = np.flatnonzero(~cold & (size <= 1.2 * ref.l2_bytes) & (s >= 128) & test & (b <= 512))
    return Fitted(
        fit,
        residual(predict(score), y[score], ranges, note),
        residual(predict(hot), y[hot], {"batch": b[hot], "megabytes": size[hot] / 1e6}) if len(hot) else None,
    )


KEYS = (128.0, 192.0, 320.0, 576.0, 1088.0, 2112.0, 4160.0, 8256.0)


def fit_prefill_attention(table: pd.DataFrame, ref: Reference) -> Fitted:
    """Fit causal prompt attention. `table`: batch, new, q_heads, kv_heads, seconds (head size 128); 4 query heads
    and more."""
    table = table[(table.q_heads >= 4) & (table.q_heads <= GROUP * table.kv_heads) & (table.new >= 64)]
    b, s, q, kv, y = (table[c].to_numpy(float) for c in ("batch", "new", "q_heads", "kv_heads", "seconds"))
    test = held_out(table.batch.astype(str) + "/" + table.q_heads.astype(str) + "/" + table.kv_heads.astype(str))
    block, memory_efficiency = 128, 0.8
    blocks = np.ceil(s / block)

    def shown(p: Array, i: NDArray[Any]) -> Array:
        overhead, blend, single = np.exp(p[1]), 1.0 + np.exp(p[2]), squash(p[3])
        keys = block * (blocks[i] + 1.0) / 2.0 + overhead
        work = b[i] * blocks[i] * block * keys
        longest = block * (blocks[i] * block + overhead)
        total_s = 512.0 * q[i] * work / (ref.bf16_flop_per_s * np.interp(keys, KEYS, squash(p[4:])))
        longest_s = 512.0 * longest * ref.sm_count / (ref.bf16_flop_per_s * single)
        compute = (total_s**blend + longest_s**blend) ** (1 / blend)
        memory = b[i] * s[i] * (2 * q[i] + 2 * kv[i]) * 256.0 / (ref.memory_bytes_per_s * memory_efficiency)
        return np.asarray(np.exp(p[0]) * 1e-6 + np.maximum(compute, memory))

    rows = np.flatnonzero(~test)
    guess = (0.5, 0.14, 0.25, 0.33, 0.42, 0.5, 0.55, 0.58, 0.6)
    start = np.concatenate([np.log([8.0, 8.0, 1.0]), [unsquash(e) for e in guess]])

    def error(p: Array) -> Array:  # a small pull to the start keeps what the data do not tell where it is
        return np.concatenate([np.log(shown(p, rows) / y[rows]), 0.3 * (p - start)])

    p = least_squares(error, start, loss="soft_l1", f_scale=0.1).x
    fit = PrefillAttentionFit(
        launch_s=math.exp(p[0]) * 1e-6,
        block_tokens=block,
        overhead_tokens=math.exp(p[1]),
        blend=1.0 + math.exp(p[2]),
        keys=KEYS,
        efficiency=tuple(squash(p[4:]).tolist()),
        single_efficiency=float(squash(p[3])),
        memory_efficiency=memory_efficiency,
    )
    fit = validate(rounded(fit.model_dump()), PrefillAttentionFit)
    check = _operators(ref, prefill=fit)
    ranges = {"new": s, "context": s, "group": q / kv}

    def score(rows: NDArray[Any], note: str) -> Residual:
        values = [check.prefill_attention_s([(s[i], 0)] * int(b[i]), int(q[i]), int(kv[i]), 128) for i in rows]
        return residual(values, y[rows], ranges, f"(batch, heads) not fitted; {note}")

    every = score(np.flatnonzero(test), "4 heads or more")
    long = score(np.flatnonzero(test & (s >= 1024)), "4 heads or more, prompts of 1024 tokens or more")
    return Fitted(fit, every, long=long)


def derived_skew(ref: Reference, uniform: bool) -> float:
    """Share of the padding of unequal contexts that a split-KV kernel pays for, by list scheduling (nothing is
    measured).

    Contexts are lognormal (sigma 0.6, mean 4096 tokens), batches 8, 32 and 128, 2 and 8 KV heads. Every (sequence,
    head) is cut into pieces: equal in size over the batch (FlashInfer, FlashAttention 3 with scheduler metadata),
    or, if `uniform`, the same number of pieces for every sequence (TensorRT-LLM's multi-block mode). Pieces run in
    order, two to an SM, and share the bandwidth; a lone block can take at most twice its fair share (assumption).
    """
    rng = np.random.default_rng(7)
    slots = 2 * ref.sm_count  # blocks that run at once
    shares = []
    for batch in (8, 32, 128):
        for heads in (2, 8):
            for _ in range(8):
                lengths = rng.lognormal(0.0, 0.6, batch)
                lengths *= 4096.0 / lengths.mean()
                if uniform:
                    count = max(1, slots // (batch * heads))
                    pieces = np.repeat(lengths / count, count * heads)
                else:
                    chunk = (
                        256.0  # the smallest that fits all pieces into one round, as FlashInfer's planner searches it
                    )
                    while chunk < lengths.max() and np.ceil(lengths / chunk).sum() * heads > slots:
                        chunk += 64.0
                    cut = [np.full(math.ceil(x / chunk), x / math.ceil(x / chunk)) for x in lengths]
                    pieces = np.concatenate(cut * heads)
                shares.append((_fluid(pieces, slots) / heads - lengths.sum()) / (batch * lengths.max() - lengths.sum()))
    return float(np.clip(np.mean(shares), 0.0, 1.0))


def _fluid(pieces: Array, slots: int, alone: float = 2.0) -> float:
    """Bytes that could have moved until the last piece is done: pieces in order on slots sharing one bandwidth of 1."""
    waiting = pieces.tolist()[::-1]
    running = [waiting.pop() for _ in range(min(slots, len(waiting)))]
    now = 0.0
    while running:
        rate = min(1.0 / len(running), alone / slots)
        done = min(running)
        now += done / rate
        running = [left - done for left in running if left - done > 1e-9]
        while waiting and len(running) < slots:
            running.append(waiting.pop())
    return now


# --- elementwise kernels ---------------------------------------------------------------------------------------------


def fit_memory_ops(paths: Iterable[Path], ref: Reference) -> Fitted:
    """Fit a layer's elementwise kernels (two norms, rotary embedding, activation) to Vidur's tables.

    Launch and efficiency are fitted to the sum over the four kernels, which is what a step pays; single kernels of 1 to
    6 microseconds were timed to the microsecond. Residual addition is fused into the norm in today's engines, so it
    is left out here but moves its bytes in the step's model.
    """
    parts = []
    for path in paths:
        table = pd.read_csv(path)
        table = table.groupby(["num_tensor_parallel_workers", "num_tokens"], as_index=False).median(numeric_only=True)
        tokens, tp = table.num_tokens, table.num_tensor_parallel_workers
        head = table.n_embd / table.n_head
        size = tokens * (
            table.n_embd * 8.0 + (table.n_head + table.n_kv_head) / tp * head * 4.0 + table.n_expanded_embd / tp * 6.0
        )
        names = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
        seconds = sum(table[f"time_stats.{name}.median"] for name in names) * MS
        key = str(path.parent.name) + "/" + tokens.astype(str)
        parts.append(pd.DataFrame({"size": size, "seconds": seconds, "key": key}))
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.seconds > 0]
    x, y, test = rows["size"].to_numpy(float), rows.seconds.to_numpy(float), held_out(rows.key)

    def shown(p: Array, i: NDArray[Any]) -> Array:
        return np.asarray(4.0 * np.exp(p[0]) * 1e-6 + x[i] / (ref.memory_bytes_per_s * squash(p[1])))

    train = np.flatnonzero(~test)
    p = least_squares(lambda p: np.log(shown(p, train) / y[train]), np.array([1.0, 1.0]), loss="soft_l1", f_scale=0.1).x
    fit = validate(rounded({"launch_s": math.exp(p[0]) * 1e-6, "efficiency": float(squash(p[1]))}), MemoryOpFit)
    score = np.flatnonzero(test)
    predicted = 4.0 * fit.launch_s + x[score] / (ref.memory_bytes_per_s * fit.efficiency)
    note = "sum over a layer's four kernels, token counts not fitted; kernels timed to 1 us"
    return Fitted(fit, residual(predicted, y[score], {"bytes": x / 4.0}, note))


# --- collectives -----------------------------------------------------------------------------------------------------

COLLECTIVE_KNOTS = tuple(2.0**e for e in (9, 12, 14, 16, 17, 18, 19, 20, 22, 23, 24, 26))


def fit_collective(sizes: Array, seconds: Array) -> tuple[CollectiveFit, Array]:
    """Log-log knots through one collective's measurements; returns the fit and the signed log errors."""
    x, y = np.log(sizes), np.log(seconds)
    inner = [k for k in COLLECTIVE_KNOTS if sizes.min() / 1.01 <= k < sizes.max() / 1.01]
    knots = np.log([*inner, sizes.max()])
    hats = np.stack([np.interp(x, knots, row) for row in np.eye(len(knots))], axis=1)
    rises = np.tril(np.ones((len(knots), len(knots))))  # the first value, then steps up that are never negative
    start = np.maximum(np.diff(np.maximum.accumulate(np.interp(knots, x, y)), prepend=y.min()), 1e-3)
    lower = np.concatenate([[-np.inf], np.zeros(len(knots) - 1)])
    start[0] = y[0]
    fitted = least_squares(
        lambda v: hats @ (rises @ v) - y,
        start,
        loss="soft_l1",
        f_scale=0.02,
        bounds=(lower, np.full(len(knots), np.inf)),
    )
    values = np.maximum.accumulate(rises @ fitted.x)
    fit = CollectiveFit(
        message_bytes=tuple(float(round(math.exp(k))) for k in knots), time_s=tuple(rounded(np.exp(values).tolist()))
    )
    return fit, np.asarray(np.interp(x, knots, values) - y)


def fit_collectives(data: Path, gpu: Gpu, engine: str) -> tuple[CollectiveFits, dict[str, Residual]]:
    """NCCL by operation and GPUs, and the engine's own all-reduce; message sizes of the tables are elements of 2
    bytes."""
    folder = data / "kernels/aiconfigurator" / gpu.folder / "comm"
    nccl = pd.read_parquet(folder / "nccl" / gpu.nccl / "nccl_perf.parquet")
    nccl = nccl[nccl.nccl_dtype == "half"]
    names = {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "alltoall": "all_to_all",
    }
    fits: dict[str, dict[int, CollectiveFit]] = {}
    errors: list[Array] = []
    for (op, gpus), rows in nccl.groupby(["op_name", "num_gpus"]):
        rows = rows.groupby("message_size", as_index=False).latency.median()
        fit, error = fit_collective(rows.message_size.to_numpy(float) * 2.0, rows.latency.to_numpy(float) * MS)
        fits.setdefault(names[op], {})[int(gpus)] = fit
        errors.append(error)
    custom: dict[int, CollectiveFit] = {}
    custom_errors: list[Array] = []
    table = pd.read_parquet(folder / engine / gpu.versions[engine] / "custom_allreduce_perf.parquet")
    if "backend" in table:
        table = table[table.backend.str.endswith("_graph")]
    for gpus, rows in table.groupby("num_gpus"):
        rows = rows.groupby("message_size", as_index=False).latency.median()
        fit, error = fit_collective(rows.message_size.to_numpy(float) * 2.0, rows.latency.to_numpy(float) * MS)
        custom[int(gpus)] = fit
        custom_errors.append(error)
    bytes_range = {"bytes": np.array([512.0, 2.0**29])}

    def score(parts: list[Array], note: str) -> Residual:
        ratio = np.exp(np.concatenate(parts))
        return residual(ratio, np.ones(len(ratio)), bytes_range, note)

    residuals = {
        "nccl": score(errors, "in sample: 13 knots through 21 sizes; all operations and 2, 4, 8 GPUs"),
        "custom_all_reduce": score(custom_errors, "in sample: 13 knots through 23 sizes; 2, 4, 8 GPUs"),
    }
    order = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return CollectiveFits(
        nccl={op: fits[op] for op in order}, custom_all_reduce=custom, inter_efficiency=0.8
    ), residuals


# --- tables ----------------------------------------------------------------------------------------------------------


def gemm_table(path: Path) -> pd.DataFrame:
    """bf16 products of the sizes that RL runs use."""
    table = pd.read_parquet(path)
    table = table[(table.gemm_dtype == "bfloat16") & table.m.between(1, 16384) & table.n.between(256, 65536)]
    table = table[table.k.between(256, 32768)].groupby(["m", "n", "k"], as_index=False).latency.median()
    return table.assign(seconds=table.latency * MS)


def attention_table(path: Path, decode: bool) -> pd.DataFrame:
    """bf16 attention with heads of 128, no sliding window; a KV-head count of 0 stands for one per head."""
    table = pd.read_parquet(path)
    table = table[(table.attn_dtype == "bfloat16") & (table.kv_cache_dtype == "bfloat16") & (table.head_dim == 128)]
    if "window_size" in table:
        table = table[table.window_size == 0]
    table = table.assign(
        kv_heads=table.num_key_value_heads.where(table.num_key_value_heads > 0, table.num_heads),
        q_heads=table.num_heads,
        batch=table.batch_size,
        context=table.step + 1,
        new=table.isl,
    )
    table = table[table.q_heads <= 64]
    keys = ["batch", "context" if decode else "new", "q_heads", "kv_heads"]
    table = table.groupby(keys, as_index=False).latency.median()
    return table.assign(seconds=table.latency * MS)


def vidur_gemm_table(paths: Iterable[Path]) -> pd.DataFrame:
    """The four products of a layer in Vidur's tables, as m, n, k, seconds."""
    parts = []
    for path in paths:
        table = pd.read_csv(path)
        table = table.groupby(["num_tensor_parallel_workers", "num_tokens"], as_index=False).median(numeric_only=True)
        tp, hidden, width = table.num_tensor_parallel_workers, table.n_embd, table.n_expanded_embd
        head = hidden / table.n_head
        shapes = {
            "attn_pre_proj": ((table.n_head + 2 * table.n_kv_head) * head / tp, hidden),
            "attn_post_proj": (hidden, hidden / tp),
            "mlp_up_proj": (2 * width / tp, hidden),
            "mlp_down_proj": (hidden, width / tp),
        }
        for name, (n, k) in shapes.items():
            seconds = table[f"time_stats.{name}.median"] * MS
            parts.append(pd.DataFrame({"m": table.num_tokens, "n": n.round(), "k": k.round(), "seconds": seconds}))
    joined = pd.concat(parts, ignore_index=True).astype(float)
    joined = joined[(joined.m >= 1) & (joined.k >= 256)]
    return joined.groupby(["m", "n", "k"], as_index=False).seconds.median().astype({"n": int, "k": int})


# --- calibrations ----------------------------------------------------------------------------------------------------

_NEUTRAL = {
    "gemm": {
        "launch_s": 0.0,
        "memory_efficiency": 1.0,
        "k_overhead": 0.0,
        "split_s": 0.0,
        "blend": 2.0,
        "wave_rounding": 1.0,
        "tiles": [{"m": 128, "n": 128, "efficiency": 1.0}],
        "splits": [1],
    },
    "decode_attention": {
        "floor_s": 0.0,
        "floor_tile_s": 0.0,
        "floor_sequence_s": 0.0,
        "stream_s": 0.0,
        "stream_tile_s": 0.0,
        "stream_sequence_s": 0.0,
        "parallelism": [0.0],
        "efficiency": [1.0],
        "skew": 0.0,
    },
    "prefill_attention": {
        "launch_s": 0.0,
        "block_tokens": 128,
        "overhead_tokens": 0.0,
        "blend": 2.0,
        "keys": [1.0],
        "efficiency": [1.0],
        "single_efficiency": 1.0,
        "memory_efficiency": 1.0,
    },
    "memory_bound": {"launch_s": 0.0, "efficiency": 1.0},
}


def _operators(
    ref: Reference,
    gemm: GemmFit | None = None,
    decode: DecodeAttentionFit | None = None,
    prefill: PrefillAttentionFit | None = None,
) -> Operators:
    """Operators in which only the given fit matters: residuals are computed by the code that the simulator runs."""
    fits = validate(_NEUTRAL, OperatorFits)
    parts = {"gemm": gemm, "decode_attention": decode, "prefill_attention": prefill}
    return Operators(fits.model_copy(update={name: part for name, part in parts.items() if part is not None}), ref)


def reference_of(cluster: Cluster) -> Reference:
    """The data-sheet figures of a cluster's GPU."""
    gpu = cluster.gpu
    return Reference(
        bf16_flop_per_s=gpu.bf16_flop_per_s,
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        sm_count=gpu.sm_count,
        l2_bytes=gpu.l2_bytes,
        link_bytes_per_s=cluster.intra.bytes_per_s,
    )


RUNTIME_SOURCE = (
    "PAT's figures on 8xA40 (naive recapture 3.59 s for SGLang's 23 default batch sizes; control = 5.52 s total less "
    "weights, KV and recapture), host-bound work and therefore reused for every GPU; group creation is an assumption, "
    "not measured; graph batch sizes are the engine's defaults"
)


def runtime_of(engine: str, reshard: float | None = None, migrate: float | None = None) -> RuntimeFit:
    """Costs of a layout change: PAT's host-bound items."""
    return RuntimeFit(
        graph_capture_s=3.59 / 23,
        graph_batch_sizes=GRAPH_BATCHES[engine],
        switch_control_s=5.52 - 1.03 - 2.36 - 0.73,
        group_create_s=1.0,
        reshard_bytes_per_s=reshard,
        migrate_bytes_per_s=migrate,
        source=RUNTIME_SOURCE,
    )


def training_of(folder: Path, name: str) -> TrainingFit:
    """The training section already in the file, unless it is a placeholder."""
    path = folder / f"{name}.yaml"
    if path.exists():
        try:
            old = load_calibration(path).training
        except Exception:  # a file of an older layout
            old = None
        if old is not None and not old.source.startswith("placeholder"):
            return old
    return TrainingFit(flop_efficiency={"fsdp": 1.0, "megatron": 1.0}, source="placeholder: 1.0 is not a measurement")


COLD_NOTE = "weights and KV are taken as cold: bandwidths are fitted on footprints beyond L2 and used for every size"
MOE_NOTE = "a mixture's grouped GEMM is approximated from plain GEMMs, not measured"
SKEW_NOTE = "skew of unequal contexts is derived by list scheduling of the kernel's split, not measured"
INTER_NOTE = (
    "collectives across nodes follow a hierarchical ring at an assumed 80% of the link; nothing inter-node is measured"
)
PAIR_NOTE = "broadcast and send/receive are derived from all-gather"
"""Notes that hold for every calibration."""

_CACHE: dict[str, Fitted] = {}


def vidur_mlp(data: Path, names: Iterable[str]) -> list[Path]:
    """Paths of Vidur's layer tables."""
    return [data / "kernels/vidur/head/data/profiling/compute" / name / "mlp.csv" for name in names]


def fit_one(data: Path, out: Path, gpu: Gpu, engine: str) -> tuple[Calibration, dict[str, Residual]]:
    """The calibration of one GPU and engine, host time still zero, and its comparisons with L2-hot rows."""
    cluster = load_cluster(gpu.cluster)
    ref = reference_of(cluster)
    base = data / "kernels/aiconfigurator" / gpu.folder
    version = gpu.versions[engine]
    files = [
        f"{gpu.folder}/gemm/{engine}/{version}/gemm_perf.parquet",
        f"{gpu.folder}/attention/{engine}/{version}/generation_attention_perf.parquet",
        f"{gpu.folder}/attention/{engine}/{version}/context_attention_perf.parquet",
        f"{gpu.folder}/comm/{engine}/{version}/custom_allreduce_perf.parquet",
        f"{gpu.folder}/comm/nccl/{gpu.nccl}/nccl_perf.parquet",
    ]
    gemm = fit_gemm(gemm_table(base / f"gemm/{engine}/{version}/gemm_perf.parquet"), ref)
    attention = base / f"attention/{engine}/{version}"
    skew = derived_skew(ref, uniform=engine == "trtllm")
    decode = fit_decode_attention(attention_table(attention / "generation_attention_perf.parquet", True), ref, skew)
    prefill = fit_prefill_attention(attention_table(attention / "context_attention_perf.parquet", False), ref)
    donor = gpu.vidur[0].split("/")[0]
    donor_ref = reference_of(load_cluster({"h100": "8xh100", "a100": "8xa100", "a40": "8xa40"}[donor]))
    memory = fit_memory_ops(vidur_mlp(data, gpu.vidur), donor_ref)
    collectives, collective_residuals = fit_collectives(data, gpu, engine)
    notes = [COLD_NOTE, MOE_NOTE, SKEW_NOTE, INTER_NOTE, PAIR_NOTE]
    if not gpu.name.startswith(donor):
        notes.append(f"norms, rotary embedding and activation: launch and efficiency measured on {donor}")
    calibration = Calibration(
        name=f"{gpu.name}-{engine}",
        gpu=gpu.name,
        engine=engine,  # type: ignore[arg-type]
        provenance=Provenance(
            date=DATE,
            script=SCRIPT,
            sources=(
                Source(
                    project="NVIDIA aiconfigurator",
                    commit=COMMIT,
                    licence="Apache-2.0",
                    files=tuple(files),
                    engine_version=f"{engine} {version}, NCCL {gpu.nccl}",
                ),
                Source(
                    project="Microsoft Vidur",
                    commit=VIDUR_COMMIT,
                    licence="MIT",
                    files=tuple(f"data/profiling/compute/{name}/mlp.csv" for name in gpu.vidur),
                ),
            ),
            notes=tuple(notes),
        ),
        reference=ref,
        operators=OperatorFits(
            gemm=gemm.fit, decode_attention=decode.fit, prefill_attention=prefill.fit, memory_bound=memory.fit
        ),
        collectives=collectives,
        host=HostFit(step_s=0.0, sequence_s=0.0, source="not fitted yet"),
        runtime=runtime_of(engine),
        training=training_of(out, f"{gpu.name}-{engine}"),
        residuals={
            "gemm": gemm.residual,
            "decode_attention": decode.residual,
            "prefill_attention": prefill.residual,
            **({"prefill_attention_long": prefill.long} if prefill.long else {}),
            "memory_bound": memory.residual,
            **collective_residuals,
        },
    )
    hot = {name: part.hot for name, part in (("gemm", gemm), ("decode_attention", decode)) if part.hot is not None}
    return calibration, hot


# --- A40 -------------------------------------------------------------------------------------------------------------

#: PAT, LLaMA-3.1-8B near 1K tokens of context on 8xA40: (TP, sequences per replica) -> seconds per token.
PAT_LATENCIES = {(2, 1): 15.37e-3, (8, 1): 9.64e-3, (2, 32): 24.41e-3, (8, 128): 30.87e-3}
PAT_CONTEXT = 1024
#: Rate of a rank while PAT reshards weights: an all-gather of 16.06 GB / 2 in 1.03 s.
PAT_RESHARD = 16.06e9 / 2 / 1.03
#: Same for KV: 2 * layers * kv_dim * bytes * sum of contexts / TP_src = 9 sequences of 12K tokens at TP2, in 2.36 s.
PAT_MIGRATE = 2 * 32 * 1024 * 2 * 9 * 12288 / 2 / 2.36


def a40_collectives(data: Path, eight: tuple[float, float]) -> CollectiveFits:
    """Vidur's A40 all-reduce on 2 and 4 GPUs; on 8 `latency + bytes / rate` with `eight` = (latency, rate).

    A ring all-reduce is a reduce-scatter and an all-gather of the same bytes, so each of those takes half of it.
    """
    table = pd.read_csv(data / "kernels/vidur/history/a40_all_reduce_6d98aa8.csv")
    curves: dict[int, CollectiveFit] = {}
    for gpus in (2, 4):
        rows = table[table.num_workers == gpus].groupby("size", as_index=False)["time_stats.all_reduce.median"].median()
        sizes, seconds = rows["size"].to_numpy(float), rows["time_stats.all_reduce.median"].to_numpy(float) * MS
        curves[gpus], _ = fit_collective(sizes[seconds > 0], seconds[seconds > 0])
    sizes = [2.0**e for e in range(9, 31)]
    latency, rate = eight
    curves[8] = CollectiveFit(message_bytes=tuple(sizes), time_s=tuple(latency + size / rate for size in sizes))

    def half(fit: CollectiveFit) -> CollectiveFit:
        return CollectiveFit(message_bytes=fit.message_bytes, time_s=tuple(rounded([t / 2 for t in fit.time_s])))

    halves = {gpus: half(fit) for gpus, fit in curves.items()}
    nccl = {"all_reduce": curves, "all_gather": halves, "reduce_scatter": halves, "all_to_all": halves}
    return CollectiveFits(nccl=nccl, inter_efficiency=0.8)


def fit_a40(data: Path, out: Path, donor: Calibration) -> tuple[Calibration, dict[str, Residual]]:
    """A40 from Vidur's layers and PAT's four latencies.

    PAT's two TP2 latencies give the host time (never negative), its two TP8 latencies the 8-GPU all-reduce (latency
    and rate), because Vidur's own 8-GPU all-reduce takes three times what PAT's figures leave for it.
    """
    cluster = load_cluster("8xa40")
    ref = reference_of(cluster)
    names = ("a40/meta-llama/Llama-2-7b-hf", "a40/meta-llama/Llama-2-70b-hf")
    gemm = fit_gemm(vidur_gemm_table(vidur_mlp(data, names)), ref)
    memory = fit_memory_ops(vidur_mlp(data, names), ref)
    # 0.0089 ms + KV bytes / 582 GB/s describes measured LLaMA-2-7B rows with 3% mean error.
    decode = DecodeAttentionFit(
        floor_s=8.9e-6,
        floor_tile_s=0.0,
        floor_sequence_s=0.0,
        stream_s=8.9e-6,
        stream_tile_s=0.0,
        stream_sequence_s=0.0,
        parallelism=(0.0,),
        efficiency=(582e9 / ref.memory_bytes_per_s,),
        skew=derived_skew(ref, uniform=False),
    )
    model = load_model("llama-3.1-8b")
    host = HostFit(step_s=0.0, sequence_s=0.0, source="")
    eight = (60e-6, 4e9)

    def build() -> Calibration:
        return Calibration(
            name="a40-vllm",
            gpu="a40",
            engine="vllm",
            provenance=Provenance(
                date=DATE,
                script=SCRIPT,
                sources=(
                    Source(
                        project="Microsoft Vidur",
                        commit=VIDUR_COMMIT,
                        licence="MIT",
                        files=(
                            *(f"data/profiling/compute/{name}/mlp.csv" for name in names),
                            "A40 all_reduce.csv of commit 6d98aa8 (2 and 4 GPUs)",
                        ),
                        engine_version="vLLM-era kernels of 2024",
                    ),
                    Source(
                        project="PAT (published figures)",
                        commit="as printed",
                        licence="facts quoted from the paper",
                        files=("four per-token latencies", "switch cost TP2 to TP8"),
                    ),
                ),
                notes=(
                    "decode attention: 0.0089 ms + KV bytes / 582 GB/s, describing measured LLaMA-2-7B rows",
                    f"prefill attention: no A40 table; efficiencies of {donor.name} (nearest SM type)",
                    "8-GPU all-reduce: latency and rate solved from PAT's two TP8 latencies; 2 and 4 GPUs: Vidur",
                    "all-gather, reduce-scatter and all-to-all: half an all-reduce (ring)",
                    COLD_NOTE,
                    MOE_NOTE,
                    SKEW_NOTE,
                    INTER_NOTE,
                    PAIR_NOTE,
                ),
            ),
            reference=ref,
            operators=OperatorFits(
                gemm=gemm.fit,
                decode_attention=validate(rounded(decode.model_dump()), DecodeAttentionFit),
                prefill_attention=donor.operators.prefill_attention,
                memory_bound=memory.fit,
            ),
            collectives=a40_collectives(data, eight),
            host=host,
            runtime=runtime_of("sglang", PAT_RESHARD, PAT_MIGRATE),
            training=training_of(out, "a40-vllm"),
            residuals={"gemm": gemm.residual, "memory_bound": memory.residual},
        )

    def step(tp: int, batch: int) -> float:
        return RooflineStep(model, tp, cluster, build()).decode(batch).step_s(batch * PAT_CONTEXT)

    missing = [PAT_LATENCIES[2, b] - step(2, b) for b in (1, 32)]
    host = HostFit(
        step_s=rounded(max(0.0, sum(missing) / 2)),
        sequence_s=0.0,
        source="mean of what PAT's two TP2 latencies leave over the kernels, not below zero",
    )
    count = 2 * model.num_hidden_layers + 1
    small, large = 1 * model.hidden_size * 2.0, 128 * model.hidden_size * 2.0
    for _ in range(60):  # the gather of the logits uses the same link, so the two unknowns are solved by iteration
        off = [(PAT_LATENCIES[8, b] - step(8, b)) / count for b in (1, 128)]
        times = eight[0] + small / eight[1] + 0.5 * off[0], eight[0] + large / eight[1] + 0.5 * off[1]
        rate = (large - small) / (times[1] - times[0])
        eight = times[0] - small / rate, rate
    return build(), {}


# --- host time from whole engines ------------------------------------------------------------------------------------


@dataclass
class EngineRow:
    """One measured serving run and what the kernels say about it."""

    label: str
    tp: int
    measured_s: float
    decode_s: float  # kernels of a decode step at mid context
    prompt_s: float  # kernels that the prompts of later requests add to it
    batch: int
    fit: bool

    def predicted_s(self, host: HostFit, share: float = 1.0) -> float:
        """TPOT in closed form; `share` of the prompts' time falls between a request's first and last token."""
        return self.decode_s + share * self.prompt_s + host.step_s + host.sequence_s * self.batch


@dataclass
class Serving:
    """One engine's serving runs, what is fitted to half of them, and the runs left out."""

    version: str
    rows: list[EngineRow]
    left_out: list[str]
    host: HostFit
    share: float


def engine_rows(data: Path, calibration: Calibration) -> tuple[list[EngineRow], list[str]]:
    """The serving runs of the calibration's engine: every second one for the fit; and the labels of those left out.

    TPOT = decode step at mid context + concurrency / response length x what one prompt adds. vLLM and TensorRT-LLM
    run a prompt in the same iteration as the decodes, SGLang in one of its own. Runs whose sequences cannot all hold
    their KV queue, so they are left out.
    """
    table = pd.read_csv(data / "engine/h100_serving.csv")
    table = table[table.backend == calibration.engine]
    keys = ["tp", "prompt_tokens", "response_tokens", "concurrency"]
    cluster = load_cluster("8xh100")
    models = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b"}
    bare = calibration.model_copy(update={"host": HostFit(step_s=0.0, sequence_s=0.0, source="none")})
    rows, left_out = [], []
    for row in table.sort_values(keys).itertuples():
        model, tp, batch = load_model(models[str(row.model)]), int(row.tp), int(row.concurrency)  # type: ignore[arg-type]
        prompt, response = int(row.prompt_tokens), int(row.response_tokens)  # type: ignore[arg-type]
        label = f"TP{tp} {prompt}+{response} x{batch}"
        room = tp * (0.9 * cluster.gpu.memory_bytes - 2e9) - model.weight_bytes
        if batch * (prompt + response) * model.kv_bytes_per_token > room:
            left_out.append(label)
            continue
        step = RooflineStep(model, tp, cluster, bare)
        context = batch * (prompt + response / 2)
        decode = step.decode(batch).step_s(context)
        chunk = [Chunk(prompt, 0)]
        alone = calibration.engine == "sglang"
        added = step.prefill_s(chunk) if alone else step.mixed_s(batch, context, chunk) - decode
        rows.append(
            EngineRow(
                label=label,
                tp=tp,
                measured_s=float(row.tpot_ms) * MS,  # type: ignore[arg-type]
                decode_s=decode,
                prompt_s=batch / response * added,
                batch=batch,
                fit=len(rows) % 2 == 0,
            )
        )
    return rows, left_out


def fit_host(rows: list[EngineRow], source: str) -> tuple[HostFit, float]:
    """Host time per step and per sequence, and the share of the prompts' time; least squares of relative errors,
    none below zero.

    The share is a property of the benchmark run, not of the engine: in steady arrivals a request sees all prompts of
    later ones (1), in waves of requests that start and end together only about half. It is fitted beside the host
    time so that the host time does not have to make up for it, and is not part of the calibration.
    """
    chosen = [row for row in rows if row.fit]
    design = np.array([[row.prompt_s, 1.0, row.batch] for row in chosen])
    measured = np.array([row.measured_s for row in chosen])
    target = 1.0 - np.array([row.decode_s for row in chosen]) / measured
    (share, step, sequence), _ = nnls(design / measured[:, None], target)
    return HostFit(step_s=rounded(float(step)), sequence_s=rounded(float(sequence)), source=source), float(share)


def error_of(rows: list[EngineRow], host: HostFit, share: float = 1.0) -> tuple[float, float]:
    """Mean absolute and mean signed relative error."""
    ratio = np.array([row.predicted_s(host, share) / row.measured_s - 1.0 for row in rows])
    return float(np.mean(np.abs(ratio))), float(np.mean(ratio))


def decode_sums(data: Path) -> dict[str, list[tuple[int, int, int, float]]]:
    """Sums over Vidur's layer tables: GPU -> (TP, batch, context, seconds), LLaMA-3-8B with LM head."""
    table = pd.read_csv(data / "kernels/vidur/decode_latency_llama3_8b.csv")
    table = table[table.fits_mem]
    result: dict[str, list[tuple[int, int, int, float]]] = {}
    for row in table.itertuples():
        point = (int(row.tp), int(row.batch), int(row.ctx), float(row.plus_lmhead_ms) * MS)  # type: ignore[arg-type]
        result.setdefault(str(row.gpu), []).append(point)
    return result


def hot_variants(data: Path, made: dict[str, Calibration]) -> dict[str, Serving]:
    """The serving runs predicted with kernels fitted to all rows, L2-hot ones included: the treatment rlsim does not
    use."""
    result = {}
    gpu = GPUS[0]
    base = data / "kernels/aiconfigurator" / gpu.folder
    for engine, version in gpu.versions.items():
        cold = made[f"{gpu.name}-{engine}"]
        decode = attention_table(base / f"attention/{engine}/{version}/generation_attention_perf.parquet", True)
        operators = cold.operators.model_copy(
            update={
                "gemm": fit_gemm(
                    gemm_table(base / f"gemm/{engine}/{version}/gemm_perf.parquet"), cold.reference, True
                ).fit,
                "decode_attention": fit_decode_attention(decode, cold.reference, 0.0, True).fit,
            }
        )
        rows, left_out = engine_rows(data, cold.model_copy(update={"operators": operators}))
        host, share = fit_host(rows, "")
        result[engine] = Serving("", rows, left_out, host, share)
    return result


# --- output ----------------------------------------------------------------------------------------------------------


def write_yaml(calibration: Calibration, folder: Path) -> None:
    """One calibration as YAML: four significant digits, keys in schema order, lists of numbers on one line."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    text.write(f"# Fitted by {SCRIPT}; change that, not this. Units: seconds, bytes, FLOP/s.\n")
    yaml.dump(plain(rounded(calibration.model_dump(exclude_defaults=True))), text)
    (folder / f"{calibration.name}.yaml").write_text(text.getvalue(), encoding="utf-8")


def plain(value: Any) -> Any:
    """Only what YAML knows; numbers of one list, and a tile's three numbers, stay on one line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, dict):
        mapping = CommentedMap({key: plain(item) for key, item in value.items()})
        if set(value) == {"m", "n", "efficiency"}:
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list | tuple):
        sequence = CommentedSeq([plain(item) for item in value])
        if all(isinstance(item, int | float) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value.item() if isinstance(value, np.generic) else value


def percent(value: float) -> str:
    """A share as text."""
    return f"{100 * value:.1f}%"


def derive(source: Calibration, gpu: str, cluster: str, note: str, out: Path) -> Calibration:
    """`source`'s efficiencies on another GPU's data-sheet figures; the link stays that of the measured node."""
    reference = reference_of(load_cluster(cluster)).model_copy(
        update={"link_bytes_per_s": source.reference.link_bytes_per_s}
    )
    name = f"{gpu}-{source.engine}"
    provenance = source.provenance.model_copy(update={"notes": (f"derived: {note}", *source.provenance.notes)})
    residuals = {
        key: value.model_copy(update={"note": f"of {source.gpu}; not measured on {gpu}. {value.note}".strip()})
        for key, value in source.residuals.items()
    }
    update = {
        "name": name,
        "gpu": gpu,
        "reference": reference,
        "provenance": provenance,
        "residuals": residuals,
        "training": training_of(out, name),
    }
    return source.model_copy(update=update)


def main() -> None:
    """Fit everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=ROOT)
    options = parser.parse_args()
    data, folder = options.data, options.out / "calibration"
    folder.mkdir(parents=True, exist_ok=True)
    (options.out / "docs").mkdir(parents=True, exist_ok=True)

    made: dict[str, Calibration] = {}
    hot: dict[str, dict[str, Residual]] = {}
    for gpu in GPUS:
        for engine in gpu.versions:
            calibration, compared = fit_one(data, folder, gpu, engine)
            made[calibration.name], hot[calibration.name] = calibration, compared
            print(calibration.name, {k: (percent(r.median), percent(r.p90)) for k, r in calibration.residuals.items()})
    serving: dict[str, Serving] = {}
    for engine in ("trtllm", "vllm", "sglang"):
        rows, left_out = engine_rows(data, made[f"h100-sxm-{engine}"])
        version = {"trtllm": "1.0.0rc3", "vllm": "0.12.0", "sglang": "0.5.1.post1"}[engine]
        host, share = fit_host(
            rows, f"every second of {len(rows)} serving runs on 8xH100, {engine} {version} (docs/calibration.md)"
        )
        serving[engine] = Serving(version, rows, left_out, host, share)
        for name, calibration in made.items():
            if calibration.engine == engine:
                reused = "" if calibration.gpu == "h100-sxm" else "; reused from H100, host CPUs may differ"
                shown = host.model_copy(update={"source": host.source + reused})
                made[name] = calibration.model_copy(update={"host": shown})
        print(
            engine, host.step_s, host.sequence_s, share, error_of([r for r in rows if not r.fit], host, share), left_out
        )
    for gpu_name, (source, cluster, note) in DERIVED.items():
        for engine in ("sglang", "vllm", "trtllm"):
            derived = derive(made[f"{source}-{engine}"], gpu_name, cluster, note, folder)
            made[derived.name] = derived
    a40, _ = fit_a40(data, folder, made["l40s-vllm"])
    made[a40.name] = a40
    print(a40.name, {k: (percent(r.median), percent(r.p90)) for k, r in a40.residuals.items()}, a40.host)
    for name in sorted(made):
        write_yaml(made[name], folder)
    from calibration_report import report

    text = report(made, hot, serving, hot_variants(data, made), decode_sums(data))
    (options.out / "docs" / "calibration.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

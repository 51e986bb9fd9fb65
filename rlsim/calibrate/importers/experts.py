"""aiconfigurator's tables of fused mixtures of experts (`moe_perf`), and which work each row did.

The tables say tokens, sizes and a routing. What the measured GPU had to do follows from the collector's code (commit
095f58a, `collector/helper.py`, `collector/vllm/collect_moe.py`, `collector/sglang/collect_moe.py`): a row is the whole
fused operator on one GPU, from the router's logits to the sum over a token's experts, without communication. Tokens are
those of all GPUs; the measured GPU holds the first experts, under a power law those of the busiest GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.reading import shipped
from rlsim.calibrate.importers.reading import check_kernels, launches, medians, numbers, read_table
from rlsim.cost.calibration import Reference
from rlsim.cost.experts import BLOCK_ROWS, MXFP8
from rlsim.models.precision import WEIGHT_BYTES, Precision, peak_flop_per_s

_LISTS = shipped("expert_tables.yaml")
W4A8: str = _LISTS["w4a8"]
INT4, MXFP4 = "int4_wo", "w4a16_mxfp4"
PRECISIONS: Mapping[str, Precision] = _LISTS["precisions"]
UNGATED, GROUPED, MISROUTED, UNTUNED, OTHERS = (
    {tuple(row) for row in _LISTS[name]} for name in ("ungated", "grouped", "misrouted", "untuned", "others")
)
TUNED_SGLANG: Mapping[str, str] = _LISTS["tuned"]
SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
GROUPS, CHOSEN_GROUPS = 8, 4  # of experts, where a router chooses among groups first
DEEPEP_SMS = 20  # SMs of DeepEP's normal kernels unless an engine says otherwise (`Buffer.num_sms`)

_DRAWS = 5  # random routings that a power law's work is averaged over, as many as the collector timed
Counts = npt.NDArray[np.float64]


def experts(
    path: Path, ref: Reference | None = None, notes: list[str] | None = None, *, others: bool = False
) -> pd.DataFrame:
    """The rows of `path` by the columns of `KEYS`, with seconds; only the kernel that most rows of a precision have,
    apart for experts on one GPU and on several.

    An engine of its own accord takes that kernel on this GPU: the collector builds the engine's layer and notes what it
    chose. `others`: instead of these the kernels of `OTHERS`, which it takes when it is told to. Raises
    `CalibrationError` for damaged tables.
    """
    table = launches(path, SIZES, needed=["moe_dtype", "kernel_source", "distribution", "device"])
    shape = [*zip(table.hidden_size, table.inter_size, strict=True)]
    misrouted = pd.Series([pair in MISROUTED for pair in shape], table.index) & (table.moe_ep_size > 1)
    sglang = table.kernel_source.str.startswith("sglang")
    kept = ~(misrouted & sglang) & ~pd.Series([pair in UNGATED for pair in shape], table.index)
    if others:
        told = [*zip(table.moe_dtype, table.kernel_source.map(_family), strict=True)]
        # What a power law brings the busiest of several GPUs is one draw's with few tokens: of no use for constants.
        kept &= table.distribution.eq("balanced") | table.moe_ep_size.eq(1)
        kept &= ~sglang & pd.Series([pair in OTHERS for pair in told], table.index)
        if not kept.any():
            return pd.DataFrame()
        table = table.assign(moe_dtype=table.moe_dtype.replace(INT4, MXFP4))
    else:
        kept &= table.moe_dtype.isin(list(PRECISIONS))
        serves = [*map(_serves_gpt_oss, table.moe_dtype, table.kernel_source, table.moe_ep_size)]
        kept &= ~table.moe_dtype.str.contains("mxfp4") | pd.Series(serves, table.index)
    kept &= table.distribution.eq("balanced") | ~_grouped(table)  # a power law that such a router changes
    kept &= table.distribution.eq("balanced") | table.distribution.str.fullmatch(r"power_law_\d+(\.\d+)?")
    table = table[kept & (table.inter_size % table.moe_tp_size == 0) & (table.num_experts % table.moe_ep_size == 0)]
    names = [table[name].astype(str) for name in ("hidden_size", "inter_size", "topk", "num_experts")]
    table = table.assign(
        precision=table.moe_dtype.map(PRECISIONS),
        kernel=table.kernel_source.map(_family) + np.where(table.moe_dtype.str.endswith(MXFP8), MXFP8, ""),
        parallel=table.moe_ep_size > 1,
        tokens=table.num_tokens,
        hidden=table.hidden_size,
        width=table.inter_size // table.moe_tp_size,
        active=table.topk,
        experts=table.num_experts // table.moe_ep_size,
        ep=table.moe_ep_size,
        model=names[0] + " x " + names[1] + ", " + names[2] + " of " + names[3],
        routing=table.distribution,
    )
    untuned = [pair in UNTUNED for pair in zip(table.precision, table.kernel, strict=True)]
    table = table[~np.array(untuned, dtype=bool)]
    rows = [group[group.kernel == group.kernel.mode()[0]] for _, group in table.groupby(["precision", "parallel"])]
    table = pd.concat(rows)
    grouped = _grouped(table)
    calls = table[["routing", "tokens", "num_experts", "active", "ep"]].itertuples(index=False)
    work = [_work(*row, grouped=only) for row, only in zip(calls, grouped, strict=True)]
    table = pd.concat([table, pd.DataFrame(work, table.index)], axis=1).assign(tuned=_tuned(table))
    size, flops = table.precision.map(WEIGHT_BYTES), 6.0 * table.rows * table.hidden * table.width
    if ref is not None:  # as many as bf16 would need for the same time
        rates = {name: peak_flop_per_s(ref, name) or ref.bf16_flop_per_s for name in WEIGHT_BYTES}
        in_fp8 = table.kernel.str.endswith(MXFP8)
        flops *= ref.bf16_flop_per_s / table.precision.map(rates).where(~in_fp8, rates["fp8"])
    table = check_kernels(path, table, flops, 3.0 * table.hit * table.hidden * table.width * size, ref, notes)
    return medians(table, "experts")


def exchanges(low_latency: Path, normal: Path) -> pd.DataFrame:
    """DeepEP's dispatch and combine inside a node of 8 GPUs, by the columns of `KEYS`, with the seconds of both.

    Low-latency kernels dispatch in fp8 and combine in bf16; normal ones are those with `DEEPEP_SMS` SMs. Raises
    `CalibrationError` for damaged tables.
    """
    sizes, parts = ("num_token", "num_topk", "hidden_size"), []
    for kind, path, times in (
        ("low_latency", low_latency, ("dispatch_avg_t_us", "combine_avg_t_us")),
        ("normal", normal, ("dispatch_transmit_us", "combine_transmit_us")),
    ):
        table = read_table(path, [*sizes, *times, "node_num", "num_experts"])
        table = numbers(path, table, [*sizes, *times], positive=True)
        table = table[table.node_num == 1]
        if kind == "normal":
            table = table[(table.dispatch_sms == DEEPEP_SMS) & (table.combine_sms == DEEPEP_SMS)]
        found = table[[*sizes]].set_axis(["tokens", "active", "hidden"], axis=1)
        parts.append(found.assign(kind=kind, gpus=8, seconds=table[[*times]].sum(axis=1) * 1e-6))
    return medians(pd.concat(parts, ignore_index=True), "exchange")


def _grouped(table: pd.DataFrame) -> pd.Series[bool]:
    models = zip(table.hidden_size, table.inter_size, table.num_experts, strict=True)
    return pd.Series([model in GROUPED for model in models], table.index)


def _serves_gpt_oss(dtype: str, source: str, ep: int) -> bool:
    """Whether the engine by itself runs this kernel for gpt-oss, whose weights are MXFP4.

    SGLang on Blackwell turns activations into MXFP8 (`flashinfer_mxfp4_moe_precision` of its server's arguments). On
    Hopper it runs Triton's kernel, on weights turned into bf16, with experts on several GPUs only: on one GPU it takes
    OpenAI's `triton_kernels` (`moe_runner_backend`), which its table has not. Other layers are of other models.
    """
    if source.startswith("sglang"):
        known = {"sglang_flashinfer_trtllm_moe": dtype == W4A8, "sglang_fused_moe_triton": ep > 1}
        return known.get(source, False)
    return "gptoss" in source or "mxfp4moe" not in source


def _family(source: str) -> str:
    """The kernel family of a `kernel_source`, whose name also says which engine or library wraps the kernel."""
    for name in ("flashinfer_cutlass", "flashinfer_trtllm", "triton", "marlin"):
        if name in source:
            return name
    return source


def _tuned(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether the engine has tuned block sizes for the row; True for all kernels and GPUs that `TUNED_SGLANG` lacks."""
    (device,) = table.device.unique() if table.device.nunique() == 1 else ("",)
    known = next((pairs for gpu, pairs in TUNED_SGLANG.items() if gpu in str(device)), None)
    some = table.kernel_source.eq("sglang_fused_moe_triton") & table.precision.eq("bf16")
    if known is None:
        return np.ones(len(table), dtype=bool)
    pairs = set(known.split())
    names = table.experts.astype(str) + "x" + table.width.astype(str)
    return np.asarray(~some | names.isin(pairs), dtype=bool)


# Routings -------------------------------------------------------------------------------------------------------------


@cache
def _work(routing: str, tokens: int, experts: int, active: int, ep: int, grouped: bool) -> dict[str, float]:
    """On the measured GPU: rows, experts that have any rows, and the blocks of `BLOCK_ROWS` rows that these take."""
    if routing == "balanced":
        drawn = [_balanced(tokens, experts, active, grouped)[: experts // ep]]
    else:
        rng, exponent = np.random.default_rng(0), float(routing.rpartition("_")[2])
        drawn = [_power_law(tokens, experts, active, ep, exponent, rng) for _ in range(_DRAWS)]
    found = {"rows": [float(counts.sum()) for counts in drawn], "hit": [float((counts > 0).sum()) for counts in drawn]}
    for size in BLOCK_ROWS:
        found[f"blocks_{size}"] = [float(np.ceil(counts / size).sum()) for counts in drawn]
    return {name: float(np.mean(values)) for name, values in found.items()}


@cache
def _balanced(tokens: int, experts: int, active: int, grouped: bool) -> Counts:
    """Tokens of every expert where token i chooses i, i + s, i + 2s, … of the experts, s apart as far as they go.

    Where the router may only choose among some groups, every group has as good a best expert, so the first groups are
    taken, and the first experts of the first group for what is missing.
    """
    stride = math.ceil(experts / active)
    token, choice = np.arange(tokens)[:, None], np.arange(active)[None, :]
    start = token if tokens >= stride else token * stride / tokens
    chosen = np.floor((start + choice * stride) % experts).astype(int)
    if not grouped:
        return np.bincount(chosen.ravel(), minlength=experts).astype(float)
    wanted = np.zeros((tokens, experts))
    wanted[token, chosen] = 1.0
    # the sum of the two best experts of every group, by which DeepSeek-V3's router compares groups
    best_two = np.sort(wanted.reshape(tokens, GROUPS, -1), axis=2)[:, :, -2:].sum(axis=2)
    allowed = np.repeat(_first(best_two, CHOSEN_GROUPS), experts // GROUPS, axis=1)
    return np.asarray(_first(np.where(allowed, wanted, -1.0), active).sum(axis=0), dtype=float)


def _first(score: Counts, count: int) -> npt.NDArray[np.bool_]:
    """The `count` best columns of every row; of equal ones the first."""
    best = np.argsort(-score, axis=1, kind="stable")[:, :count]
    found = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(found, best, True, axis=1)
    return found


def _power_law(tokens: int, experts: int, active: int, ep: int, exponent: float, rng: np.random.Generator) -> Counts:
    """Tokens of each expert of the busiest GPU where their shares are drawn from a bounded power law."""
    low, high = (1.0, 0.8 * tokens) if tokens * active > experts else (0.01, 2.0)
    power = 1.0 - exponent
    weight = (low**power + rng.random(experts) * (high**power - low**power)) ** (1.0 / power)
    counts = np.minimum(np.round(weight / weight.sum() * tokens * active), tokens)
    missing = int(tokens * active - counts.sum())
    while missing:  # one each for the experts with the least, or from those with the most
        room = counts < tokens if missing > 0 else counts > 0
        order = np.argsort(np.where(room, np.sign(missing) * counts, np.inf), kind="stable")
        order = order[: min(abs(missing), int(room.sum()))]
        counts[order] += np.sign(missing)
        missing -= int(np.sign(missing)) * len(order)
    by_gpu = counts.reshape(ep, -1)
    return np.asarray(by_gpu[by_gpu.sum(axis=1).argmax()])

"""What fits on a GPU: the rollout engine at every TP, and the calls beside it."""

from __future__ import annotations

import sys

import pandas as pd

from rlsim.cost.memory import RESERVED_BYTES, rollout_memory
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.build import Setup

GB = 1e9


def memory_by_tp(setup: Setup) -> pd.DataFrame:
    """The rollout engine at every TP that divides a node, where all calls share all GPUs.

    One row per TP. Bytes are GB (1e9) on each GPU: `weights_gb`, `activations_gb` (working memory of an iteration),
    `reserved_gb` (context, communication, graphs), `resident_gb` (what training and other models keep meanwhile),
    `kv_gb` (the KV cache: what is left of `budget_gb`). Of a replica: `kv_tokens`, `full_sequences` and
    `mean_sequences` (sequences of the longest prompt and the cap, and of mean length, that the cache holds), `replicas`
    and `sequences` (that a step gives each). `fits`: whether one full sequence does; `why_not` says what is lacking,
    `waits` whether a step's sequences of mean length are more than the cache or the engine takes at once.
    """
    site, engine = setup.site(), setup.experiment.engine
    longest = setup.longest_prompt + setup.experiment.trace.cap
    beside, unplaced = _beside(setup)
    launched = setup.experiment.workflow.prompts * setup.launched_responses
    gpu, rows = setup.cluster.gpu, []
    cluster = site.cluster if unplaced else site.rollout_cluster
    whole = setup.cluster.gpus_per_node
    for tp in (1 << i for i in range(whole.bit_length()) if whole % (1 << i) == 0):
        row: dict[str, object] = {"tp": tp, "replicas": cluster.gpus // tp}
        if cluster.gpus_per_node % tp:
            why = (
                f"TP {tp} does not divide the {cluster.gpus_per_node} GPUs of a node that workflow.reward.judge leaves"
            )
            rows.append({**row, "fits": False, "waits": False, "why_not": why})
            continue
        try:
            memory = rollout_memory(
                setup.model,
                gpu,
                tp,
                page_tokens=engine.page_tokens,
                memory_utilization=setup.experiment.memory_utilization,
                max_batched_tokens=engine.max_num_batched_tokens,
                max_sequences=engine.max_num_seqs,
                resident_bytes=beside,
                min_tokens=-sys.maxsize,  # how much is lacking, too
            )
        except ConfigError as error:
            rows.append({**row, "fits": False, "waits": False, "why_not": str(error)})
            continue
        kv_tokens, share = memory.capacity_tokens, -(-launched * tp // cluster.gpus)
        fits = kv_tokens >= longest
        mean = int(kv_tokens // setup.batch.mean_tokens)
        rows.append(
            {
                **row,
                "fits": fits and not unplaced,
                "budget_gb": setup.experiment.memory_utilization * gpu.memory_bytes / GB,
                "weights_gb": memory.weight_bytes / GB,
                "activations_gb": memory.activation_bytes / GB,
                "reserved_gb": memory.reserved_bytes / GB,
                "resident_gb": beside / GB,
                "kv_gb": max(memory.kv_bytes, 0.0) / GB,
                "kv_tokens": max(kv_tokens, 0),
                "full_sequences": max(kv_tokens // longest, 0),
                "mean_sequences": max(mean, 0),
                "sequences": share,
                "waits": share > min(max(mean, 0), engine.max_num_seqs),
                "why_not": unplaced or ("" if fits else _lacking(memory.kv_bytes, kv_tokens, longest, tp)),
            }
        )
    return pd.DataFrame(rows, columns=[*_COLUMNS])


_COLUMNS = (
    "tp", "replicas", "fits", "budget_gb", "weights_gb", "activations_gb", "reserved_gb", "resident_gb", "kv_gb",
    "kv_tokens", "full_sequences", "mean_sequences", "sequences", "waits", "why_not",
)  # fmt: skip


def memory_by_call(setup: Setup) -> pd.DataFrame:
    """The calls beside generation where all calls share all GPUs, on each GPU in GB: one row per call.

    `kept_gb` between its runs, `working_gb` only while it runs, `total_gb` on the fullest GPU while it runs with all
    that others keep there, `gpu_gb` what the GPU has, `fits`.
    """
    site, gpu = setup.site(), setup.cluster.gpu
    plan = site.unchecked_plan
    calls = site.memory.calls(plan)
    rows = []
    for name, (placement, memory) in calls.items():
        others = max(
            sum(its.resident_bytes for other, (at, its) in calls.items() if other != name and on in at.gpus)
            for on in placement.gpus
        )
        total = memory.resident_bytes + memory.active_bytes + others + RESERVED_BYTES
        rows.append(
            {
                "call": name,
                "model": setup.models[setup.algorithm.call(name).model].name,
                "kept_gb": memory.resident_bytes / GB,
                "working_gb": memory.active_bytes / GB,
                "total_gb": total / GB,
                "gpu_gb": gpu.memory_bytes / GB,
                "fits": total <= gpu.memory_bytes,
            }
        )
    return pd.DataFrame(rows, columns=["call", "model", "kept_gb", "working_gb", "total_gb", "gpu_gb", "fits"])


def _beside(setup: Setup) -> tuple[float, str]:
    """Bytes that other calls keep on a GPU while responses are generated, and why they do not fit themselves."""
    site = setup.site()
    try:
        plan, unplaced = site.plan, ""
    except CapacityError as error:
        plan, unplaced = site.unchecked_plan, str(error)
    return site.memory.resident_bytes(plan, site.gpus), unplaced


def _lacking(kv_bytes: float, kv_tokens: int, longest: int, tp: int) -> str:
    if kv_bytes <= 0.0:
        return f"weights and working memory exceed the budget by {-kv_bytes / GB:.1f} GB"
    return f"room for {kv_tokens:,} tokens of KV at TP {tp}, a full sequence has {longest:,}"

"""The measured tables: where they lie in the data folder, which rows count, and columns in SI units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import CollectiveTable

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MS = 1e-3


def aiconfigurator(data: Path, table: str) -> Path:
    """Path of one of aiconfigurator's tables."""
    return data / "kernels/aiconfigurator" / table


def vidur_layers(data: Path, names: Iterable[str]) -> list[Path]:
    """Paths of Vidur's layer tables."""
    return [data / "kernels/vidur/head/data/profiling/compute" / name / "mlp.csv" for name in names]


def _median_seconds(table: pd.DataFrame, keys: list[str], value: str = "latency") -> pd.DataFrame:
    """`keys` and seconds: medians over the rows of the same keys. `value` is in milliseconds."""
    medians = table.groupby(keys, as_index=False)[[value]].median()
    return medians.assign(seconds=medians[value] * MS)[[*keys, "seconds"]]


def all_gemms(path: Path) -> pd.DataFrame:
    """bf16 products of every size measured: m, n, k, seconds."""
    table = pd.read_parquet(path)
    return _median_seconds(table[table.gemm_dtype == "bfloat16"], ["m", "n", "k"])


def gemm_table(path: Path) -> pd.DataFrame:
    """bf16 products of the sizes that RL runs use."""
    table = all_gemms(path)
    return table[table.m.between(1, 32768) & table.n.between(256, 65536) & table.k.between(256, 32768)]


def _attention(path: Path) -> pd.DataFrame:
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
    return table[table.q_heads <= 64]


def decode_attention_table(path: Path) -> pd.DataFrame:
    """Decode attention: batch, context, q_heads, kv_heads, seconds."""
    return _median_seconds(_attention(path), ["batch", "context", "q_heads", "kv_heads"])


def prefill_attention_table(path: Path) -> pd.DataFrame:
    """Prompt attention: batch, new, q_heads, kv_heads, seconds."""
    return _median_seconds(_attention(path), ["batch", "new", "q_heads", "kv_heads"])


def _messages(op: str, gpus: object, rows: pd.DataFrame) -> CollectiveTable:
    """Medians by message; sizes are elements of 2 bytes."""
    table = _median_seconds(rows, ["message_size"])
    return CollectiveTable(op, int(str(gpus)), table.assign(bytes=table.message_size * 2.0))


def nccl_tables(path: Path) -> list[CollectiveTable]:
    """NCCL by operation and GPUs."""
    table = pd.read_parquet(path)
    table = table[table.nccl_dtype == "half"]
    return [_messages(str(op), gpus, rows) for (op, gpus), rows in table.groupby(["op_name", "num_gpus"])]


def custom_all_reduce_tables(path: Path) -> list[CollectiveTable]:
    """An engine's own all-reduce by GPUs, as captured in a graph."""
    table = pd.read_parquet(path)
    if "backend" in table:
        table = table[table.backend.str.endswith("_graph")]
    return [_messages("all_reduce", gpus, rows) for gpus, rows in table.groupby("num_gpus")]


def a40_all_reduce_tables(data: Path) -> list[CollectiveTable]:
    """Vidur's A40 all-reduce on 2 and 4 GPUs; zeros are messages too short for its clock."""
    table = pd.read_csv(data / "kernels/vidur/history/a40_all_reduce_6d98aa8.csv")
    found = []
    for gpus in (2, 4):
        rows = _median_seconds(table[table.num_workers == gpus], ["size"], "time_stats.all_reduce.median")
        rows = rows.assign(bytes=rows["size"])
        found.append(CollectiveTable("all_reduce", gpus, rows[rows.seconds > 0]))
    return found


def _medians(path: Path) -> pd.DataFrame:
    """One of Vidur's layer tables, one row for each TP and token count."""
    table = pd.read_csv(path)
    return table.groupby(["num_tensor_parallel_workers", "num_tokens"], as_index=False).median(numeric_only=True)


def vidur_gemm_table(paths: Iterable[Path]) -> pd.DataFrame:
    """The four products of a layer in Vidur's tables: m, n, k, seconds."""
    parts = []
    for path in paths:
        table = _medians(path)
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
    return joined.groupby(["m", "n", "k"], as_index=False)[["seconds"]].median().astype({"n": int, "k": int})


def elementwise_table(paths: Iterable[Path]) -> pd.DataFrame:
    """A layer's four elementwise kernels together in Vidur's tables: kernels, tokens, bytes, seconds, and as key the
    model and tokens."""
    parts = []
    for path in paths:
        table = _medians(path)
        tokens, tp = table.num_tokens, table.num_tensor_parallel_workers
        head = table.n_embd / table.n_head
        size = tokens * (
            table.n_embd * 8.0 + (table.n_head + table.n_kv_head) / tp * head * 4.0 + table.n_expanded_embd / tp * 6.0
        )
        names = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
        seconds = sum(table[f"time_stats.{name}.median"] for name in names) * MS
        key = path.parent.name + "/" + tokens.astype(str)
        parts.append(
            pd.DataFrame({"kernels": len(names), "tokens": tokens, "bytes": size, "seconds": seconds, "key": key})
        )
    rows = pd.concat(parts, ignore_index=True)
    return rows[rows.seconds > 0]


@dataclass(frozen=True)
class DecodePoint:
    """One decode step of LLaMA-3-8B as the sum over Vidur's layers, LM head included."""

    gpu: str
    tp: int
    batch: int
    context: int
    seconds: float


def decode_sums(data: Path) -> list[DecodePoint]:
    """Every decode step that fits the GPU's memory."""
    table = pd.read_csv(data / "kernels/vidur/decode_latency_llama3_8b.csv")
    table = table[table.fits_mem].assign(context=table.ctx, seconds=table.plus_lmhead_ms * MS)
    rows = table[["gpu", "tp", "batch", "context", "seconds"]].to_dict("records")
    return [DecodePoint(**{str(key): value for key, value in row.items()}) for row in rows]


@dataclass(frozen=True)
class ServingRun:
    """One measured serving run on H100: lengths in tokens, time per output token."""

    model: str
    tp: int
    prompt: int
    response: int
    concurrency: int
    tpot_s: float


def serving_runs(data: Path, engine: str) -> list[ServingRun]:
    """One engine's serving runs, in a fixed order."""
    table = pd.read_csv(data / "engine/h100_serving.csv")
    table = table.assign(prompt=table.prompt_tokens, response=table.response_tokens, tpot_s=table.tpot_ms * MS)
    columns = ["model", "tp", "prompt", "response", "concurrency", "tpot_s"]
    table = table[table.backend == engine][columns].astype(dict.fromkeys(columns[1:5], int))
    rows = table.sort_values(columns[1:5]).to_dict("records")
    return [ServingRun(**{str(key): value for key, value in row.items()}) for row in rows]


def cpu_overheads(data: Path) -> list[tuple[str, str, int, float, float]]:
    """Vidur's measured CPU time of a vLLM-like engine: GPU, model, TP, seconds per step and per sequence.

    The sum of scheduling, input preparation and output processing (medians), a straight line over 8 to 128 sequences.
    """
    found = []
    for gpu in ("a100", "a40"):
        table = pd.read_csv(data / f"kernels/vidur/history/{gpu}_cpu_overheads_6d98aa8.csv")
        parts = ["schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median"]
        table = table.assign(host_s=table[parts].sum(axis=1) * MS)[table.batch_size <= 128]
        for (model, tp), group in table.groupby(["model_name", "tensor_parallel_degree"]):
            sequence_s, step_s = np.polyfit(group.batch_size, group.host_s, 1)
            found.append((gpu, str(model), int(tp), float(step_s), float(sequence_s)))
    return found


@dataclass(frozen=True)
class TrainingRun:
    """One measured veRL run: batch in responses, lengths in tokens (nan: not stated), seconds of two phases a step."""

    row: int
    responses: float
    mean_prompt: float
    mean_response: float
    max_response: float
    old_log_prob_s: float
    update_actor_s: float


def training_runs(data: Path) -> dict[int, TrainingRun]:
    """The veRL runs by row number."""
    table = pd.read_csv(data / "rl_timings/verl_steps.csv")
    table = table.assign(row=table.id, responses=table.responses_per_step, old_log_prob_s=table.old_logprob_s)
    rows = table[list(TrainingRun.__annotations__)].to_dict("records")
    runs = [TrainingRun(**{str(key): value for key, value in row.items()}) for row in rows]
    return {run.row: run for run in runs}

"""The measured tables: where they lie in the data folder, and what of them is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import CollectiveTable
from rlsim.calibrate.importers import aiconfigurator as operators
from rlsim.calibrate.importers import vidur

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MS = 1e-3


def aiconfigurator(data: Path, table: str) -> Path:
    """Path of one of aiconfigurator's tables."""
    return data / "kernels/aiconfigurator" / table


def vidur_layers(data: Path, names: Iterable[str]) -> list[Path]:
    """Paths of Vidur's layer tables."""
    return [data / "kernels/vidur/head/data/profiling/compute" / name / "mlp.csv" for name in names]


def all_gemms(path: Path) -> pd.DataFrame:
    """bf16 products of every size measured: m, n, k, seconds."""
    return operators.gemms(path)


def gemm_table(path: Path) -> pd.DataFrame:
    """bf16 products of the sizes that RL runs use."""
    return operators.used_sizes(operators.gemms(path))


def _heads_of_128(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    return table[table.head_dim == 128][[*columns, "seconds"]].reset_index(drop=True)


def decode_attention_table(path: Path) -> pd.DataFrame:
    """Decode attention: batch, context, q_heads, kv_heads, seconds."""
    return _heads_of_128(operators.decode_attention(path), ["batch", "context", "q_heads", "kv_heads"])


def prefill_attention_table(path: Path) -> pd.DataFrame:
    """Prompt attention: batch, new, q_heads, kv_heads, seconds."""
    return _heads_of_128(operators.prefill_attention(path), ["batch", "new", "q_heads", "kv_heads"])


def _by_gpus(table: pd.DataFrame, names: Mapping[str, str]) -> list[CollectiveTable]:
    groups = table.assign(op=table.op.replace(dict(names))).groupby(["op", "gpus"])
    return [CollectiveTable(str(op), int(str(gpus)), rows) for (op, gpus), rows in groups]


def nccl_tables(path: Path) -> list[CollectiveTable]:
    """NCCL by operation and GPUs."""
    return _by_gpus(operators.nccl(path), {"all_to_all": "alltoall"})


def custom_all_reduce_tables(path: Path) -> list[CollectiveTable]:
    """An engine's own all-reduce by GPUs, as captured in a graph."""
    return _by_gpus(operators.custom_all_reduce(path), {"custom_all_reduce": "all_reduce"})


def a40_all_reduce_tables(data: Path) -> list[CollectiveTable]:
    """Vidur's A40 all-reduce on 2 and 4 GPUs; zeros are messages too short for its clock."""
    table = vidur.collectives(data / "kernels/vidur/history/a40_all_reduce_6d98aa8.csv", "all_reduce")
    return _by_gpus(table[table.gpus <= 4], {})


def vidur_gemm_table(paths: Iterable[Path]) -> pd.DataFrame:
    """The four products of a layer in Vidur's tables: m, n, k, seconds."""
    return vidur.gemm_table(paths)


def elementwise_table(paths: Iterable[Path]) -> pd.DataFrame:
    """A layer's four elementwise kernels together in Vidur's tables: kernels, tokens, bytes, seconds, and as key the
    model and tokens."""
    return vidur.elementwise_table(paths)


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

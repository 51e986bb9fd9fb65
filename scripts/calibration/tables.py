"""Which measured tables go into the shipped calibrations, and where they lie in the data folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.gpus import Gpu
from rlsim.calibrate.importers import aiconfigurator
from rlsim.calibrate.importers.reading import MS, imported
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Engine, Source
from rlsim.models.precision import KvPrecision, Precision

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def operator_tables(data: Path, gpu: Gpu, engine: Engine) -> Measurements:
    """What aiconfigurator measured of an engine on a GPU."""
    folder = data / "kernels/aiconfigurator" / gpu.folder
    measured = aiconfigurator.read(folder, engine, gpu.versions[engine])
    (source,) = measured.sources
    source = source.model_copy(update={"commit": "095f58a"})
    tables = dict(measured.tables)
    for name, table in tables.items():
        if name.startswith("gemm"):
            tables[name] = aiconfigurator.used_sizes(table)
        elif name.startswith("decode_attention") and engine == "trtllm":  # `grouped` in notes.yaml says why
            tables[name] = table[table.q_heads == table.kv_heads]
    return Measurements(tables, (source,))


def all_gemms(data: Path, table: str, precision: Precision = "bf16") -> pd.DataFrame:
    """Products of every size in a table of aiconfigurator's: m, n, k, seconds."""
    return aiconfigurator.gemms(data / "kernels/aiconfigurator" / table, precision=precision)


def all_precisions(data: Path, gpu: Gpu, engine: Engine) -> list[Precision]:
    """The precisions other than bf16 in which products were measured."""
    return aiconfigurator.precisions(data / "kernels/aiconfigurator" / gpu.gemm(engine))


def latent_tables(
    data: Path, gpu: Gpu, engine: str, kv: KvPrecision
) -> tuple[pd.DataFrame, pd.DataFrame, bool, Source] | None:
    """Latent attention on a KV cache of `kv` as aiconfigurator measured it, of decode and of prompts, whether its
    kernels are made for blocks of heads, and where from; None if it did not."""
    folder = data / "kernels/aiconfigurator" / gpu.folder
    paths = aiconfigurator.latent_tables(folder, engine)
    if paths is None:
        return None
    decode, prompts = (aiconfigurator.latent(path, kv) for path in paths)
    release = f"{engine} {paths[0].parent.name}"
    files = (str(path.relative_to(folder.parent)) for path in paths)
    source = imported("NVIDIA aiconfigurator", "Apache-2.0", files, release)
    return decode, prompts, aiconfigurator.in_blocks(paths[0]), source.model_copy(update={"commit": "095f58a"})


def vidur_layers(data: Path, names: Iterable[str]) -> list[Path]:
    """Paths of Vidur's layer tables."""
    return [data / "kernels/vidur/head/data/profiling/compute" / name / "mlp.csv" for name in names]


def decode_sums(data: Path) -> pd.DataFrame:
    """Decode steps of LLaMA-3-8B as sums over Vidur's layers, LM head included: gpu, tp, batch, ctx (the context),
    seconds; those that fit the GPU's memory."""
    table = pd.read_csv(data / "kernels/vidur/decode_latency_llama3_8b.csv")
    return table[table.fits_mem].assign(seconds=table.plus_lmhead_ms * MS)


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

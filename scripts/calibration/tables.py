"""The GPUs of `tables.yaml` that calibrations are made for, which measured tables go into theirs and where these lie,
and what is said of where numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.build import COLD, INTER, PAIR
from rlsim.calibrate.importers import aiconfigurator
from rlsim.calibrate.importers.reading import imported
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Engine, Provenance, RuntimeFit, Source
from rlsim.models.precision import KvPrecision, Precision

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
DATE = "2026-11-24"
SCRIPT = "scripts/fit_calibrations.py"
NOTES: dict[str, str] = plain(read_yaml(Path(__file__).with_name("notes.yaml")))
COMMON = (COLD, NOTES["skew"], INTER, PAIR)
LARGEST_GRAPH = {"sglang": 160, "vllm": 256, "trtllm": 128}  # of the engine's defaults
ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")


@dataclass(frozen=True)
class Gpu:
    """One measured GPU: a row of `tables.yaml`, which says what is what."""

    name: str
    folder: str
    cluster: str
    versions: Mapping[Engine, str]
    vidur: tuple[str, ...]
    training: str = "0.5.10"
    deepgemm: str = "0.5.10"

    @property
    def elementwise_donor(self) -> str:
        """Vidur's name of the GPU that the elementwise kernels were measured on."""
        return self.vidur[0].split("/")[0]

    def gemm(self, engine: Engine, release: str = "") -> str:
        """Path of the GEMM table of an engine, by default of the release fitted."""
        return f"{self.folder}/gemm/{engine}/{release or self.versions[engine]}/gemm_perf.parquet"

    @property
    def training_gemm(self) -> str:
        """Path of the GEMM table that the share of the peak in training is from."""
        return self.gemm("sglang", self.training)


_ROWS = plain(read_yaml(Path(__file__).with_suffix(".yaml")))
GPUS = {row["name"]: Gpu(**row) for row in _ROWS["gpus"]}
OLDER: dict[str, tuple[str, Engine, str]] = {name: tuple(row) for name, row in _ROWS["older"].items()}
KEPT: list[str] = _ROWS["kept"]


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


def vidur_source(names: Iterable[str]) -> Source:
    """Microsoft Vidur's layer tables of these GPUs and models."""
    files = tuple(f"data/profiling/compute/{name}/mlp.csv" for name in names)
    return Source(project="Microsoft Vidur", commit="7d47513", licence="MIT", files=files)


def provenance(sources: Iterable[Source], notes: Iterable[str]) -> Provenance:
    """Today's fit from these sources."""
    return Provenance(date=DATE, script=SCRIPT, sources=tuple(sources), notes=tuple(notes))


def runtime_of(engine: str) -> RuntimeFit:
    """Costs of a layout change."""
    return RuntimeFit(
        graph_capture_s=3.59 / 23,
        graph_batch_sizes=(1, 2, 4, *range(8, LARGEST_GRAPH[engine] + 1, 8)),
        switch_control_s=5.52 - 1.03 - 2.36 - 0.73,
        group_create_s=1.0,
        source=NOTES["runtime"],
    )

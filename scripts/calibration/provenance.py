"""Where the numbers come from: sources, notes on what is derived or assumed (`notes.yaml`), and what a change of layout
costs, which is PAT's for every GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.build import COLD, INTER, PAIR
from rlsim.cost.calibration import Provenance, RuntimeFit, Source

DATE = "2026-11-24"
SCRIPT = "scripts/fit_calibrations.py"
NOTES: dict[str, str] = plain(read_yaml(Path(__file__).with_name("notes.yaml")))
COMMON = (COLD, NOTES["skew"], INTER, PAIR)
LARGEST_GRAPH = {"sglang": 160, "vllm": 256, "trtllm": 128}  # of the engine's defaults


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

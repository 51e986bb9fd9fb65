"""Where the numbers come from: sources, and the notes on what is derived or assumed that every calibration shares."""

from __future__ import annotations

from collections.abc import Iterable

from rlsim.cost.calibration import Provenance, Source

DATE = "2026-11-21"
SCRIPT = "scripts/fit_calibrations.py"

COLD = "weights and KV are taken as cold: bandwidths are fitted on footprints beyond L2 and used for every size"
MIXTURE = "a mixture's grouped GEMM is approximated from plain GEMMs, not measured"
SKEW = "skew of unequal contexts is derived by list scheduling of the kernel's split, not measured"
INTER = (
    "collectives across nodes follow a hierarchical ring at an assumed 80% of the link; nothing inter-node is measured"
)
PAIR = "broadcast and send/receive are derived from all-gather"
GROUPED = (
    "decode attention is fitted to rows with one query head per KV head: with grouped queries this engine's rows imply "
    "1.2 to 1.7 times the peak bandwidth however large the KV cache, so they cannot have read what they state"
)
COMMON = (COLD, MIXTURE, SKEW, INTER, PAIR)


def aiconfigurator_source(files: Iterable[str], version: str) -> Source:
    """NVIDIA aiconfigurator's operator tables."""
    return Source(
        project="NVIDIA aiconfigurator",
        commit="095f58a",
        licence="Apache-2.0",
        files=tuple(files),
        engine_version=version,
    )


def vidur_source(names: Iterable[str], *more: str, version: str = "") -> Source:
    """Microsoft Vidur's layer tables of these GPUs and models, and further files."""
    return Source(
        project="Microsoft Vidur",
        commit="7d47513",
        licence="MIT",
        files=(*(f"data/profiling/compute/{name}/mlp.csv" for name in names), *more),
        engine_version=version,
    )


def pat_source() -> Source:
    """The figures that PAT's paper prints."""
    return Source(
        project="PAT (published figures)",
        commit="as printed",
        licence="facts quoted from the paper",
        files=("four per-token latencies", "switch cost TP2 to TP8"),
    )


def provenance(sources: Iterable[Source], notes: Iterable[str]) -> Provenance:
    """Today's fit from these sources."""
    return Provenance(date=DATE, script=SCRIPT, sources=tuple(sources), notes=tuple(notes))

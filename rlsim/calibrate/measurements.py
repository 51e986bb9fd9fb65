"""What every source of measurements delivers: one table per operator, in SI units.

A microbenchmark run, an imported set of tables and a journal read back are all `Measurements`; the fits know no other
form. Times are medians of one launch (or one whole step) in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from rlsim.cost.calibration import Reference, Source
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, Gpu, Link, node_types
from rlsim.models.precision import PRECISIONS

#: Attention: mean and longest context of a decode step; new and cached tokens of a sequence that is prefilled.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "decode_attention": ("batch", "context", "longest", "q_heads", "kv_heads", "head_dim"),
    "prefill_attention": ("batch", "new", "prior", "q_heads", "kv_heads", "head_dim"),
}

EXPERTS = (
    *("precision", "kernel", "model", "routing", "tokens", "hidden", "width", "active", "experts", "ep", "tuned"),
    *("rows", "hit", *(f"blocks_{size}" for size in (8, 16, 32, 64, 128))),
)

#: Operators and the columns that identify a point. Every table has `seconds` besides, and may have `spread`: half the
#: interquartile range of the repeats over their median.
KEYS: Mapping[str, tuple[str, ...]] = {
    "copy": ("kind", "bytes"),  # device, host_to_device or device_to_host; bytes copied (read once, written once)
    "gemm": ("m", "n", "k"),  # tokens x (n, k) weight, after tensor-parallel sharding
    **{gemm_of(precision): ("m", "n", "k") for precision in PRECISIONS[1:]},  # the same, with activations quantised
    **ATTENTION,
    "decode_attention_fp8": ATTENTION["decode_attention"],  # on an FP8 KV cache
    "prefill_attention_fp8": ATTENTION["prefill_attention"],
    # a fused mixture on one GPU: tokens of all GPUs, width and experts of this one; the work as in `ExpertLoad`
    "experts": EXPERTS,
    "other_experts": EXPERTS,  # by kernels that the engine takes when it is told to
    "memory_bound": ("kernels", "tokens", "bytes"),  # launches in the row, bytes moved by all of them
    "collective": ("op", "gpus", "bytes"),  # full tensor; the engine's own all-reduce is `custom_all_reduce`
    "exchange": ("kind", "gpus", "tokens", "active", "hidden"),  # DeepEP's dispatch and combine; tokens of one GPU
    "decode_step": ("model", "tp", "mode", "batch", "context_tokens"),  # whole step; sum of contexts; graph or eager
    "prefill_step": ("model", "tp", "tokens", "length"),  # whole prefill: new tokens in all, tokens per sequence
}


@dataclass(frozen=True)
class Measurements:
    """Measured times by operator, and where they are from. Raises `CalibrationError` for tables of another form."""

    tables: Mapping[str, pd.DataFrame]
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for operator, table in self.tables.items():
            _check(operator, table)

    def table(self, operator: str) -> pd.DataFrame:
        """The table of `operator`, empty if nothing of it was measured."""
        found = self.tables.get(operator)
        return pd.DataFrame(columns=[*KEYS[operator], "seconds"]) if found is None else found

    def __contains__(self, operator: str) -> bool:
        return len(self.table(operator)) > 0

    @property
    def one_device(self) -> bool:
        """Whether whole steps were measured, on single devices only."""
        steps = self.table("decode_step")
        return len(steps) > 0 and bool((steps.tp == 1).all())

    @staticmethod
    def merge(parts: Iterable[Measurements]) -> Measurements:
        """All rows of all parts; points measured more than once have the median of their times."""
        parts = list(parts)
        tables = {}
        for operator in KEYS:
            found = [part.tables[operator] for part in parts if operator in part]
            if found:
                rows = pd.concat(found, ignore_index=True)
                tables[operator] = rows.groupby(list(KEYS[operator]), as_index=False).median(numeric_only=True)
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        return Measurements(tables, tuple(source for part in parts for source in part.sources), notes)


def _check(operator: str, table: pd.DataFrame) -> None:
    if operator not in KEYS:
        raise CalibrationError(f"unknown operator {operator!r}; one of: {', '.join(KEYS)}")
    missing = [name for name in (*KEYS[operator], "seconds") if name not in table]
    if missing:
        raise CalibrationError(f"the {operator} table lacks: {', '.join(missing)}")
    seconds = table.seconds.to_numpy(float)
    if not np.all(np.isfinite(seconds) & (seconds > 0.0)):
        raise CalibrationError(f"the {operator} table has times that are not positive numbers")


# The node -------------------------------------------------------------------------------------------------------------

# One node of the GPUs that were measured, as the cost models want to see it.

GPUS = 64  # in the node: more than any that is measured


def node_of(gpu: str) -> Cluster:
    """A node of the catalogue with such GPUs; raises `CalibrationError` if there is none."""
    for node in node_types().values():
        if node.gpu.name == gpu:
            return node
    raise CalibrationError(f"the catalogue has no node of {gpu}; spell its cluster out")


def measured_node(gpu: str, ref: Reference) -> Cluster:
    """A node of GPUs with the figures of `ref`. Memory size and latencies do not enter the time of a step."""
    return Cluster(
        name="measured",
        gpu=Gpu(
            name=gpu,
            title=gpu,
            memory_bytes=1e12,
            memory_bytes_per_s=ref.memory_bytes_per_s,
            bf16_flop_per_s=ref.bf16_flop_per_s,
            l2_bytes=ref.l2_bytes,
            sm_count=ref.sm_count,
            source="the calibration's reference",
        ),
        nodes=1,
        gpus_per_node=GPUS,
        intra=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
        host=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
    )

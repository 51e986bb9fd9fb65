"""Part `kernels`: every operator at measured shapes that its fit has not seen, by GPU and engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from evidence.validate.parts import Options, Section
from evidence.validate.rows import Row, summarise, summary_table
from rlsim.calibrate.fit.attention import HEAD_DIM, kernel_attention
from rlsim.calibrate.fit.collectives import kernel_collectives
from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.calibrate.fit.kernel import kernel_memory_bound
from rlsim.calibrate.importers import aiconfigurator
from rlsim.calibrate.importers.reading import MS
from rlsim.calibrate.measurements import join, measured_node
from rlsim.cost.calibration import Calibration, calibration_names, load_calibration

#: Elementwise kernels of a layer in Vidur's tables.
_LAYER = [
    f"time_stats.{name}.median" for name in ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
]


def section(options: Options) -> Section | str:
    """Fit every calibration that has tables of its own anew (a minute) and look up what was left out."""
    if options.kernels is None:
        return "the kernel tables are not here (they are no part of rlsim); --data FOLDER says where they are"
    points = []
    for name in _with_tables():
        options.progress(f"kernels: {name}")
        found = _left_out(options.kernels, load_calibration(name))
        points.append(found.assign(calibration=name))
    frame = pd.concat(points, ignore_index=True)
    rows = tuple(
        Row("kernels", f"{at['calibration']}/{at['label']}", f"{at['operator']}_s", at["measured_s"], at["fitted_s"])
        for at in frame.to_dict("records")
    )
    summaries = tuple(summarise(rows, depth=1))
    return Section(rows, summaries, {"summaries": summary_table(summaries)}, "")


def _with_tables() -> list[str]:
    """Calibrations fitted to aiconfigurator's tables of their own GPU."""
    found = []
    for name in calibration_names():
        calibration = load_calibration(name)
        source = calibration.provenance.sources[0]
        own = source.files[0].split("/")[0].replace("_", "-") if source.project == "NVIDIA aiconfigurator" else ""
        if own and calibration.gpu.startswith(own):
            found.append(name)
    return found


def _left_out(data: Path, calibration: Calibration) -> pd.DataFrame:
    """The held-out points of one calibration's operators, refitted from its own tables: in bf16, heads of 128."""
    tables, *others = calibration.provenance.sources
    layers = next(source for source in others if source.project == "Microsoft Vidur")
    gpu, _, backend, version = tables.files[0].split("/")[:4]
    folder = data / "kernels" / "aiconfigurator" / gpu
    ref = calibration.reference
    measured = aiconfigurator.read(folder, backend, version, gpu=calibration.gpu, reference=ref)
    decode, prefill = (measured.table(f"{phase}_attention") for phase in ("decode", "prefill"))
    decode, prefill = (table[table.head_dim == HEAD_DIM] for table in (decode, prefill))
    parts = [
        kernel_gemm(measured.table("gemm"), ref, cold=False).points,
        kernel_attention("decode_attention", decode, ref, calibration.engine, cold=False).points,
        kernel_attention("prefill_attention", prefill, ref, calibration.engine, cold=False).points,
        kernel_collectives(measured.table("collective"), ref, measured_node(calibration.gpu, ref)).points,
    ]
    if layers.files[0].split("/")[3] == calibration.gpu.split("-")[0]:
        paths = [data / "kernels" / "vidur" / "head" / file for file in layers.files]
        parts.append(kernel_memory_bound(elementwise_table(paths), ref).points)
    points = join(parts)
    return points[points.held_out]


def elementwise_table(paths: Iterable[Path]) -> pd.DataFrame:
    """A layer's four elementwise kernels together, of Microsoft Vidur's layers (`mlp.csv`): kernels, tokens, bytes,
    seconds (medians), and as key the model and tokens.

    Rows timed as zero, shorter than the clock's tick, are left out.
    """
    keys, found = ["num_tensor_parallel_workers", "num_tokens"], []
    for path in paths:
        table = pd.read_csv(path).groupby(keys, as_index=False).median(numeric_only=True)
        tokens, tp = table.num_tokens, table.num_tensor_parallel_workers
        of_heads = (table.n_head + table.n_kv_head) / tp * (table.n_embd / table.n_head) * 4.0
        size = tokens * (table.n_embd * 8.0 + of_heads + table.n_expanded_embd / tp * 6.0)
        seconds = sum(table[name] for name in _LAYER) * MS
        key = path.parent.name + "/" + tokens.astype(str)
        columns = {"kernels": len(_LAYER), "tokens": tokens, "bytes": size, "seconds": seconds, "key": key}
        found.append(pd.DataFrame(columns))
    rows = pd.concat(found, ignore_index=True)
    return rows[rows.seconds > 0]

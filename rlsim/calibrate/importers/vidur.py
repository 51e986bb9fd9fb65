"""Microsoft Vidur's profiles, in their own layout.

`compute/<gpu>/<org>/<model>/mlp.csv` and `attention.csv`, `network/<node>/all_reduce.csv` and `send_recv.csv`. Times
are milliseconds, of several statistics the median; sizes of collectives are bytes, in older files `n_embd` x
`num_tokens` elements of 2 bytes. What a file holds is told by its columns, so files of other names can be given one by
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.calibrate.importers.reading import (
    MS,
    OTHER_LINK,
    check_kernels,
    check_messages,
    imported,
    medians,
    numbers,
    read_table,
    subfolders,
)
from rlsim.calibrate.measurements import KEYS, Measurements
from rlsim.cost.calibration import Reference
from rlsim.errors import CalibrationError, nearest

LAYER = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
ATTENTION = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size")
COLLECTIVES = ("all_reduce", "send_recv")
Tables = dict[str, pd.DataFrame]


def read(folder: Path, gpu: str, *, reference: Reference | None = None) -> Measurements:
    """What Vidur measured on a GPU: products, elementwise kernels, attention and collectives inside a node.

    `folder` is the profiling folder, a part of it, or one file; `gpu` a catalogue name (`a100-sxm-80gb` is Vidur's
    `a100`). With several kinds of node for the GPU, give the folder of one. Rows timed as zero (shorter than the
    clock's tick) and collectives that cross nodes are left out. Raises `CalibrationError` for a folder without tables
    of the GPU and for damaged tables; with `reference`, for times in other units.
    """
    files = [folder] if folder.is_file() else _files(folder, gpu)
    tables: dict[str, list[pd.DataFrame]] = {}
    notes: list[str] = []
    for path in files:
        for operator, rows in _read_file(path, reference, notes).items():
            tables.setdefault(operator, []).append(rows)
    names = (path.name if folder.is_file() else str(path.relative_to(folder)) for path in files)
    source = imported("Microsoft Vidur", "MIT", names)
    joined = {operator: medians(pd.concat(parts), operator) for operator, parts in tables.items()}
    return Measurements(joined, (source,), tuple(dict.fromkeys(notes)))


def _files(folder: Path, gpu: str) -> list[Path]:
    """The tables of a GPU under `folder`; where the path names GPUs or nodes, those of this one."""
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such file or folder")
    family = gpu.split("-")[0]
    found = [path for path in sorted(folder.rglob("*.csv")) if _kind_of_name(path) is not None]
    compute = [path for path in found if "compute" in path.parts]
    network = [path for path in found if "network" in path.parts]
    others = [path for path in found if path not in compute and path not in network]
    for_gpu = [path for path in compute if _after(path, "compute") == family]
    nodes = sorted({_after(path, "network") for path in network if _after(path, "network").split("_")[0] == family})
    if len(nodes) > 1:
        raise CalibrationError(
            f"{folder}: {gpu} was measured in several kinds of node ({', '.join(nodes)}); "
            "give the compute folder and the network folder of one of them"
        )
    chosen = [*for_gpu, *(path for path in network if _after(path, "network") in nodes), *others]
    if not chosen:
        known = {_after(path, "compute") for path in compute} | {_after(path, "network") for path in network}
        if known:
            raise CalibrationError(f"{folder}: no tables of GPU {family!r}; {nearest(family, known)}")
        raise CalibrationError(
            f"{folder}: no mlp.csv, attention.csv, all_reduce.csv or send_recv.csv; "
            f"there are: {', '.join(subfolders(folder)) or 'no folders'}"
        )
    return chosen


def _kind_of_name(path: Path) -> str | None:
    kinds = ("mlp", "attention", *COLLECTIVES)
    return next((kind for kind in kinds if kind in path.stem), None)


def _after(path: Path, part: str) -> str:
    """The folder below `part` in a path."""
    at = len(path.parts) - 1 - path.parts[::-1].index(part)
    return path.parts[at + 1]


def _read_file(path: Path, ref: Reference | None, notes: list[str]) -> Tables:
    """The tables in one file, by what its columns say it holds."""
    names = set(read_table(path, []).columns)
    readers: dict[str, Callable[[], Tables]] = {
        "mlp_up_proj": lambda: _layers(path, ref, notes),
        "attn_decode": lambda: _attention(path, ref, notes),
        "all_reduce": lambda: {"collective": collectives(path, "all_reduce", ref, notes)},
        "send_recv": lambda: {"collective": collectives(path, "send_recv", ref, notes)},
    }
    for kind, reader in readers.items():
        if any(name.startswith(f"time_stats.{kind}.") for name in names):
            return reader()
    near = nearest("time_stats.mlp_up_proj.median", names)
    raise CalibrationError(f"{path}: no times of layers, attention or collectives in its columns; {near}")


# Layers ---------------------------------------------------------------------------------------------------------------


def layer_medians(path: Path) -> pd.DataFrame:
    """An `mlp.csv`, one row for each TP and token count."""
    times = [_median(name) for name in (*PRODUCTS, *ELEMENTWISE)]
    table = numbers(path, read_table(path, [*LAYER, *times]), [*LAYER, *times])
    table = table.astype({"num_tokens": int, "num_tensor_parallel_workers": int})
    return table.groupby(["num_tensor_parallel_workers", "num_tokens"], as_index=False).median(numeric_only=True)


def gemm_table(paths: Iterable[Path]) -> pd.DataFrame:
    """The four products of a layer: m, n, k, seconds."""
    joined = pd.concat([_products(layer_medians(path)) for path in paths], ignore_index=True).astype(float)
    return medians(joined[(joined.m >= 1) & (joined.k >= 256)], "gemm").astype({"n": int, "k": int})


def _products(table: pd.DataFrame) -> pd.DataFrame:
    tp, hidden, width = table.num_tensor_parallel_workers, table.n_embd, table.n_expanded_embd
    head = hidden / table.n_head
    gates = 1 + table.use_gated_mlp.astype(int) if "use_gated_mlp" in table else 2
    shapes = {
        "attn_pre_proj": ((table.n_head + 2 * table.n_kv_head) * head / tp, hidden),
        "attn_post_proj": (hidden, hidden / tp),
        "mlp_up_proj": (gates * width / tp, hidden),
        "mlp_down_proj": (hidden, width / tp),
    }
    parts = [
        pd.DataFrame({"m": table.num_tokens, "n": n.round(), "k": k.round(), "seconds": table[_median(name)] * MS})
        for name, (n, k) in shapes.items()
    ]
    return pd.concat(parts, ignore_index=True)


def elementwise_table(paths: Iterable[Path]) -> pd.DataFrame:
    """A layer's four elementwise kernels together: kernels, tokens, bytes, seconds, and as key the model and tokens."""
    rows = pd.concat([_elementwise(path, layer_medians(path)) for path in paths], ignore_index=True)
    return rows[rows.seconds > 0]


def _elementwise(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    tokens, tp = table.num_tokens, table.num_tensor_parallel_workers
    head = table.n_embd / table.n_head
    size = tokens * (
        table.n_embd * 8.0 + (table.n_head + table.n_kv_head) / tp * head * 4.0 + table.n_expanded_embd / tp * 6.0
    )
    seconds = sum(table[_median(name)] for name in ELEMENTWISE) * MS
    key = path.parent.name + "/" + tokens.astype(str)
    return pd.DataFrame({"kernels": len(ELEMENTWISE), "tokens": tokens, "bytes": size, "seconds": seconds, "key": key})


def _layers(path: Path, ref: Reference | None, notes: list[str]) -> Tables:
    gemm = _timed(gemm_table([path]), path, notes)
    m, n, k = (gemm[name].to_numpy(float) for name in ("m", "n", "k"))
    gemm = check_kernels(path, gemm, 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), ref, notes)
    return {"gemm": gemm, "memory_bound": elementwise_table([path])[[*KEYS["memory_bound"], "seconds"]]}


# Attention ------------------------------------------------------------------------------------------------------------


def _attention(path: Path, ref: Reference | None, notes: list[str]) -> Tables:
    """An `attention.csv`: decode steps of equal contexts, prompts in chunks on cached tokens."""
    whole = [*ATTENTION, "prefill_chunk_size", "kv_cache_size"]
    table = read_table(path, [*whole, "is_prefill", _median("attn_decode"), _median("attn_prefill")])
    table = numbers(path, table, whole)
    table = numbers(path, table, ["n_q_head", "num_tensor_parallel_workers"], positive=True)  # they divide
    tp, cached = table.num_tensor_parallel_workers, table.kv_cache_size.astype(int)
    table = table.assign(
        head_dim=(table.n_embd / table.n_q_head).astype(int),
        q_heads=(table.n_q_head / tp).astype(int),
        kv_heads=np.maximum(1, table.n_kv_head / tp).astype(int),
        batch=table.batch_size.astype(int),
        context=cached + 1,
        longest=cached + 1,
        new=table.prefill_chunk_size.astype(int),
        prior=cached,
    )
    is_prompt = table.is_prefill.astype(str).str.lower() == "true"
    found = {}
    for operator, time, prompts in (
        ("decode_attention", _median("attn_decode"), False),
        ("prefill_attention", _median("attn_prefill"), True),
    ):
        rows = numbers(path, table[is_prompt == prompts], [time])
        rows = _timed(rows.assign(seconds=rows[time] * MS), path, notes)
        pairs = rows.new * (rows.prior + 0.5 * rows.new) if prompts else rows.context
        each = 4.0 * rows.batch * pairs * rows.head_dim
        read = 0.0 * each if prompts else each * rows.kv_heads
        rows = check_kernels(path, rows, each * rows.q_heads, read, ref, notes)
        if len(rows):
            found[operator] = rows[[*KEYS[operator], "seconds"]]
    return found


# Collectives ----------------------------------------------------------------------------------------------------------


def collectives(path: Path, op: str, ref: Reference | None = None, notes: list[str] | None = None) -> pd.DataFrame:
    """One collective inside a node: op, gpus, bytes, seconds; in older files the size is tokens of a hidden width."""
    notes = [] if notes is None else notes
    time = _median(op)
    sized = ["size"] if "size" in read_table(path, [time, "num_workers"]) else ["n_embd", "num_tokens"]
    table = numbers(path, read_table(path, sized), [*sized, "num_workers", time])
    table = table.assign(bytes=table["size"] if sized == ["size"] else table.n_embd * table.num_tokens * 2.0)
    if "devices_per_node" in table:
        table = numbers(path, table, ["devices_per_node"])
        across = table.num_workers > table.devices_per_node
        if across.any():
            table = table[~across]
            notes.append(f"{path.name}: {int(across.sum())} rows across nodes are left out")
    table = table[table.bytes > 0]
    table = _timed(table.assign(op=op, gpus=table.num_workers.astype(int), seconds=table[time] * MS), path, notes)
    if table.empty:
        raise CalibrationError(f"{path}: no {op} inside a node that took any time")
    check_messages(path, table, ref, "bytes", "milliseconds", OTHER_LINK)
    return medians(table, "collective")


def _timed(table: pd.DataFrame, path: Path, notes: list[str]) -> pd.DataFrame:
    """The rows that took any time; the others were shorter than the clock's tick."""
    short = table.seconds <= 0.0
    if short.any():
        notes.append(f"{path.name}: {int(short.sum())} rows timed as zero are left out")
    return table[~short]


def _median(name: str) -> str:
    return f"time_stats.{name}.median"

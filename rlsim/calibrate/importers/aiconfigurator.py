"""NVIDIA aiconfigurator's operator tables, in their own layout.

Current: `<gpu>/<family>/<backend>/<version>/<op>_perf.parquet` with families gemm, attention and comm; a version may
say in its `reuse.yaml` which other one a table is taken from. Older: `<gpu>/<backend>/<version>/<op>_perf.txt`, the
same columns separated by commas. Latency is milliseconds of one launch; message sizes count elements; n and k are
after tensor-parallel sharding, heads those of one GPU; no KV heads means one for each query head.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from rlsim.calibrate.importers import experts
from rlsim.calibrate.importers.reading import (
    check_device,
    check_kernels,
    check_messages,
    choose,
    imported,
    in_seconds,
    launches,
    medians,
    read_table,
    reference_of,
    subfolders,
    version_key,
)
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Reference
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError, ConfigError, nearest
from rlsim.hardware import Gpu
from rlsim.precision import KV_BYTES, KvPrecision, Precision, peak_flop_per_s, product_bytes
from rlsim.reading import read_yaml

SUFFIXES = (".parquet", ".txt", ".csv")
KERNEL_TABLES = {"gemm_perf": "gemm", "generation_attention_perf": "attention", "context_attention_perf": "attention"}
BF16 = ("bfloat16", "float16")  # older tables call every 16-bit float float16
#: Products in other precisions; the names are the project's own.
QUANTISED: tuple[Precision, ...] = ("fp8", "fp8_block", "nvfp4")
#: These were launched one by one from Python, without a CUDA graph (`use_cuda_graph` of the project's
#: collector/vllm/collect_gemm.py): below some 0.1 ms (Hopper) or 0.2 ms (Blackwell) they time the host.
NOT_CAPTURED = {("vllm", "fp8_block")}
OPERATIONS = {"alltoall": "all_to_all"}  # where the names differ
ELEMENT_BYTES = 2.0
MESSAGE = ["num_gpus", "message_size"]
SHAPE = ["num_heads", "num_key_value_heads", "batch_size", "isl", "step"]  # of attention, beside the head size
#: Products and heads of the sizes that RL runs use.
SIZES = {"m": (1, 32768), "n": (256, 65536), "k": (256, 32768)}
MOST_HEADS = 64


def read(
    folder: Path, backend: str, version: str | None = None, *, gpu: str = "", reference: Reference | None = None
) -> Measurements:
    """GEMM, decode and prompt attention and mixtures of experts of `backend`, each in every precision, its own
    all-reduce, DeepEP's exchange, and NCCL's collectives, from the folder of one GPU.

    `version` is a release of the backend, the newest one with all three kernel tables by default; NCCL is the newest.
    With `gpu` (a catalogue name) and `reference`, tables of another GPU or in other units are refused. Raises
    `CalibrationError` for an unknown backend or version and for damaged tables.
    """
    version = _version(folder, backend, version)
    found = {name: _table(_root(folder, family, backend), version, name) for name, family in KERNEL_TABLES.items()}
    notes: list[str] = []
    own = _existing(folder / "comm" / backend, folder / backend)
    nccl_version, found["nccl_perf"] = _newest(_existing(folder / "comm" / "nccl", folder / "nccl"), "nccl_perf")
    for what, name, root in (
        ("the engine's all-reduce is", "custom_allreduce_perf", own),
        ("mixtures of experts are", "moe_perf", _existing(folder / "moe" / backend)),
    ):
        release, found[name] = version, _table(root, version, name)
        if found[name] is None:
            release, found[name] = _newest(root, name)
        if release not in (version, ""):
            notes.append(f"{what} {backend} {release}'s; {version} has no table of it")
    exchange = [f"wideep_deepep_{kind}_perf" for kind in ("ll", "normal")]
    newest = {name: _newest(folder / "comm" / backend, name)[1] for name in exchange}
    if found["moe_perf"] is not None and all(newest.values()):
        found |= newest
    paths = {name: path for name, path in found.items() if path is not None}
    tables = _kernels(paths, backend, reference, notes)
    readers = {"nccl_perf": nccl, "custom_allreduce_perf": custom_all_reduce}
    collectives = [reader(paths[name], reference) for name, reader in readers.items() if name in paths]
    if "custom_allreduce_perf" not in paths:
        notes.append(f"no all-reduce of {backend}'s own is measured: NCCL's alone")
    if collectives:
        tables["collective"] = pd.concat(collectives, ignore_index=True)
    if "moe_perf" in paths:
        tables["experts"] = experts.experts(paths["moe_perf"], reference, notes)
    if exchange[0] in paths:
        tables["exchange"] = experts.exchanges(*(paths[name] for name in exchange))
    for path in paths.values():
        for device in read_table(path, ["device"]).device.unique():
            check_device(path, str(device), gpu)
    files = (str(path.relative_to(folder.parent)) for path in paths.values())
    release = f"{backend} {version}" + (f", NCCL {nccl_version}" if nccl_version else "")
    source = imported("NVIDIA aiconfigurator", "Apache-2.0", files, release)
    return Measurements(tables, (source,), tuple(notes))


def _kernels(
    paths: dict[str, Path], backend: str, reference: Reference | None, notes: list[str]
) -> dict[str, pd.DataFrame]:
    """Products and attention, in every precision that their tables have."""
    gemm, decode, prefill = (paths[name] for name in KERNEL_TABLES)
    tables = {
        "gemm": gemms(gemm, reference, notes),
        "decode_attention": decode_attention(decode, reference, notes),
        "prefill_attention": prefill_attention(prefill, reference, notes),
    }
    for precision in precisions(gemm):
        if (backend, precision) in NOT_CAPTURED:
            notes.append(f"products in {precision} were timed without a CUDA graph, so with the host's time: left out")
        else:
            tables[gemm_of(precision)] = gemms(gemm, reference, notes, precision)
    if has_fp8_kv(decode) and has_fp8_kv(prefill):
        tables["decode_attention_fp8"] = decode_attention(decode, reference, notes, "fp8")
        tables["prefill_attention_fp8"] = prefill_attention(prefill, reference, notes, "fp8")
    return tables


def gpu_folder(folder: Path, gpu: str) -> Path:
    """The folder of a GPU's tables: `folder` itself, or the one in it (or in its `data`) named like `gpu`."""
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such folder; expected a GPU's tables, <family>/<backend>/<version>/")
    if any((folder / family).is_dir() for family in ("gemm", "attention", "comm", "trtllm", "vllm", "sglang", "nccl")):
        return folder
    wanted, names = gpu.replace("-", "_"), []
    for parent in (folder, folder / "data"):
        for name in subfolders(parent):
            names.append(name)
            if name == wanted or wanted.startswith(f"{name}_"):
                return parent / name
    raise CalibrationError(f"{folder}: no tables of GPU {wanted!r}; {nearest(wanted, names)}")


def reference(folder: Path, gpu: Gpu, link_bytes_per_s: float | None) -> Reference:
    """The data-sheet figures of `gpu`: peak rates as the project publishes them in `systems/<gpu>.yaml`, if that lies
    near `folder`, SMs and L2 from the catalogue. The link is `link_bytes_per_s`, or the project's if None.

    Raises `CalibrationError` if the two differ by more than a tenth: then the tables are another GPU's.
    """
    rates = {"bf16_flop_per_s": gpu.bf16_flop_per_s, "memory_bytes_per_s": gpu.memory_bytes_per_s}
    for parent in (folder.parent, folder.parent.parent):
        for path in (parent / "systems" / f"{folder.name}.yaml", parent / f"{folder.name}.yaml"):
            if path.is_file():
                published = _published(path)
                for key, value in rates.items():
                    if abs(published[key] / value - 1.0) > 0.1:
                        raise CalibrationError(
                            f"{path}: {key} {published[key]:.4g}, but {gpu.name} has {value:.4g}: another GPU's tables?"
                        )
                link = published.pop("link_bytes_per_s")
                return reference_of(gpu, link if link_bytes_per_s is None else link_bytes_per_s, **published)
    if link_bytes_per_s is None:
        raise CalibrationError(
            f"{folder}: no systems/{folder.name}.yaml that tells the link, and no cluster of {gpu.name}"
        )
    return reference_of(gpu, link_bytes_per_s)


def _published(path: Path) -> dict[str, float]:
    """The figures of a `systems` file in bytes/s and FLOP/s."""
    try:
        data = read_yaml(path)
        rates = {
            "bf16_flop_per_s": float(data["gpu"]["bfloat16_tc_flops"]),
            "memory_bytes_per_s": float(data["gpu"]["mem_bw"]),
            "link_bytes_per_s": float(data["node"]["intra_node_bw"]),
        }
        if not all(0 < rate < math.inf for rate in rates.values()):
            raise ValueError("expected numbers above 0")
        return rates
    except ConfigError as error:
        raise CalibrationError(str(error)) from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CalibrationError(
            f"{path}: expected gpu.mem_bw, gpu.bfloat16_tc_flops, node.intra_node_bw: {error}"
        ) from None


# Tables ---------------------------------------------------------------------------------------------------------------


def gemms(
    path: Path, ref: Reference | None = None, notes: list[str] | None = None, precision: Precision = "bf16"
) -> pd.DataFrame:
    """Products in one precision: m, n, k, seconds.

    Quantised ones come with the kernel that quantises their bf16 activations: the project times the engines' own layers
    (vLLM, TensorRT-LLM), or both kernels (SGLang). Only fp8 of vLLM 0.14 takes the activations' scales as given.
    """
    table = launches(path, ["m", "n", "k"], {"gemm_dtype": BF16 if precision == "bf16" else (precision,)})
    m, n, k = (table[name].to_numpy(float) for name in ("m", "n", "k"))
    flops = 2.0 * m * n * k
    if ref is not None:  # as many as bf16 would need for the same time
        flops *= ref.bf16_flop_per_s / (peak_flop_per_s(ref, precision) or ref.bf16_flop_per_s)
    table = check_kernels(path, table, flops, product_bytes(precision, m, n, k), ref, notes)
    return medians(table, gemm_of(precision))


def precisions(path: Path) -> list[Precision]:
    """The precisions other than bf16 in a table of products."""
    found = set(read_table(path, ["gemm_dtype"]).gemm_dtype)
    return [precision for precision in QUANTISED if precision in found]


def has_fp8_kv(path: Path) -> bool:
    """Whether a table of attention has rows on an FP8 KV cache."""
    return "fp8" in set(read_table(path, ["kv_cache_dtype"]).kv_cache_dtype)


def used_sizes(table: pd.DataFrame) -> pd.DataFrame:
    """Products of the sizes that RL runs use."""
    inside = [table[name].between(*bounds) for name, bounds in SIZES.items()]
    return table[inside[0] & inside[1] & inside[2]]


def decode_attention(
    path: Path, ref: Reference | None = None, notes: list[str] | None = None, kv: KvPrecision = "bf16"
) -> pd.DataFrame:
    """Decode attention of equal contexts without a sliding window; columns of `KEYS` and seconds."""
    table = _attention(path, kv)
    table = table.assign(context=table.step + 1, longest=table.step + 1)
    size = 2.0 * KV_BYTES[kv] * table.batch * table.context * table.kv_heads * table.head_dim
    flops = 4.0 * table.batch * table.context * table.q_heads * table.head_dim
    table = check_kernels(path, table, flops, size, ref, notes)
    return medians(table, "decode_attention")


def prefill_attention(
    path: Path, ref: Reference | None = None, notes: list[str] | None = None, kv: KvPrecision = "bf16"
) -> pd.DataFrame:
    """Causal prompt attention without a sliding window; columns of `KEYS` and seconds.

    On an FP8 KV cache queries are bf16 where the engine's kernel was measured with these, else FP8 too (SGLang 0.5.14).
    """
    table = _attention(path, kv)
    table = table.assign(new=table.isl, prior=table.step)
    pairs = table.new * (table.prior + 0.5 * table.new)
    size = 4.0 * table.batch * table.head_dim * (table.new * table.q_heads + (table.new + table.prior) * table.kv_heads)
    flops = 4.0 * table.batch * pairs * table.q_heads * table.head_dim
    table = check_kernels(path, table, flops, size, ref, notes)
    return medians(table, "prefill_attention")


def windows(path: Path) -> pd.DataFrame:
    """bf16 attention of sequences beyond a sliding window: batch, tokens (of each sequence), window, q_heads,
    kv_heads, head_dim and seconds; no rows where the table knows no windows."""
    table = _attention(path, windows=True)
    table = table.assign(tokens=table.isl + table.step, window=table.window_size)
    table = table[table.tokens > table.window]
    keys = ["batch", "tokens", "window", "q_heads", "kv_heads", "head_dim"]
    return table.groupby(keys, as_index=False)[["seconds"]].median()


def nccl(path: Path, ref: Reference | None = None) -> pd.DataFrame:
    """NCCL's collectives: op, gpus, bytes, seconds."""
    table = launches(path, MESSAGE, {"nccl_dtype": ("half", "bfloat16")}, ["op_name"])
    return _collectives(path, table.assign(op=table.op_name.replace(OPERATIONS)), ref)


def custom_all_reduce(path: Path, ref: Reference | None = None) -> pd.DataFrame:
    """An engine's own all-reduce, as captured in a graph where both kinds were measured: op, gpus, bytes, seconds."""
    table = read_table(path, [*MESSAGE, "latency"])
    if "backend" in table:
        table = table[table.backend.astype(str).str.endswith("_graph")]
        if table.empty:
            raise CalibrationError(f"{path}: no rows whose backend ends in _graph")
    return _collectives(path, in_seconds(path, table, MESSAGE).assign(op="custom_all_reduce"), ref)


def _attention(path: Path, kv: KvPrecision = "bf16", *, windows: bool = False) -> pd.DataFrame:
    table = read_table(path, ["attn_dtype", "kv_cache_dtype", "head_dim", *SHAPE, "latency"])
    if kv == "bf16":
        table = choose(path, choose(path, table, "attn_dtype", BF16), "kv_cache_dtype", BF16)
    else:
        table = choose(path, table, "kv_cache_dtype", (kv,))
        if "kernel_source" in table:  # the kernel with most rows is the engine's; others may have other queries
            own = table[table.kernel_source == table.kernel_source.value_counts().index[0]]
            table = table[table.attn_dtype.isin(own.attn_dtype.unique())]
        table = choose(path, table, "attn_dtype", (*BF16, kv))
    if windows or "window_size" in table:
        sizes = table.get("window_size", pd.Series(0, index=table.index))
        table = table.assign(window_size=sizes)[(sizes > 0) == windows]
    table = _of_engines_choice(in_seconds(path, table, ["head_dim", *SHAPE]))
    table = table.assign(
        kv_heads=table.num_key_value_heads.where(table.num_key_value_heads > 0, table.num_heads),
        q_heads=table.num_heads,
        batch=table.batch_size,
    )
    return table[table.q_heads <= MOST_HEADS]


def _of_engines_choice(table: pd.DataFrame) -> pd.DataFrame:
    """Without the kernels that were measured beside the one with most rows of its head size, at the same shapes.

    Kernels at different shapes are the engine's own choice by shape. At the same shapes they are what a user can choose
    instead: SGLang on B200 runs `trtllm_mha` unless it is told otherwise, and `flashinfer` and `triton` lie beside it.
    """
    if "kernel_source" not in table or table.empty:
        return table
    kept = []
    for _, rows in table.groupby("head_dim", sort=False):
        most = rows.kernel_source.value_counts().index[0]
        measured = pd.MultiIndex.from_frame(rows.loc[rows.kernel_source == most, SHAPE])
        shared = pd.MultiIndex.from_frame(rows[SHAPE]).isin(measured)
        beside = set(rows.kernel_source[shared]) - {most}
        kept.append(rows[~rows.kernel_source.isin(beside)])
    return pd.concat(kept).sort_index()


def _collectives(path: Path, table: pd.DataFrame, ref: Reference | None) -> pd.DataFrame:
    table = table.assign(gpus=table.num_gpus, bytes=table.message_size * ELEMENT_BYTES)
    check_messages(path, table, ref, "elements", "milliseconds")
    return medians(table, "collective")


# Layout ---------------------------------------------------------------------------------------------------------------


def _existing(*folders: Path) -> Path | None:
    return next((folder for folder in folders if folder.is_dir()), None)


def _root(folder: Path, family: str, backend: str) -> Path:
    """Where the versions of a backend lie, in the current layout or the older one."""
    found = _existing(folder / family / backend, folder / backend)
    if found is None:
        known = {*subfolders(folder / family), *(set(subfolders(folder)) - {"gemm", "attention", "comm", "nccl"})}
        raise CalibrationError(f"{folder}: no {family} tables of backend {backend!r}; {nearest(backend, known)}")
    return found


def _version(folder: Path, backend: str, version: str | None) -> str:
    """`version` if it has all kernel tables, or the newest that does."""
    roots = {table: _root(folder, family, backend) for table, family in KERNEL_TABLES.items()}
    known = sorted({name for root in roots.values() for name in subfolders(root)}, key=version_key)
    if version is not None and version not in known:
        raise CalibrationError(f"{folder}: no {backend} version {version!r}; {nearest(version, known)}")
    for name in [version] if version is not None else reversed(known):
        lacking = [table for table, root in roots.items() if _table(root, name, table) is None]
        if not lacking:
            return name
        if version is not None:
            whole = [v for v in known if all(_table(root, v, table) for table, root in roots.items())]
            raise CalibrationError(
                f"{folder}: {backend} {version} has no {' and no '.join(lacking)}; "
                f"complete versions: {', '.join(whole) or 'none'}"
            )
    raise CalibrationError(
        f"{folder}: no version of {backend} has all of {', '.join(roots)}; there are: {', '.join(known)}"
    )


def _newest(root: Path | None, table: str) -> tuple[str, Path | None]:
    """The newest version that has a table, and the table's file."""
    versions = sorted(subfolders(root), key=version_key, reverse=True) if root is not None else []
    files = ((version, _table(root, version, table)) for version in versions)
    return next(((version, path) for version, path in files if path is not None), ("", None))


def _table(root: Path | None, version: str, table: str) -> Path | None:
    """The file of a version's table, its own or the one that `reuse.yaml` points to."""
    if root is None:
        return None
    for name in (version, *_reused(root / version, table)):
        for suffix in SUFFIXES:
            path = root / name / f"{table}{suffix}"
            if path.is_file():
                return path
    return None


def _reused(folder: Path, table: str) -> list[str]:
    path = folder / "reuse.yaml"
    if not path.is_file():
        return []
    try:
        entries = read_yaml(path)["reuse"]
        versions = [str(entry["from_version"]) for entry in entries if entry["table"] == table]
        return [version for version in versions if version in subfolders(folder.parent)]
    except ConfigError as error:
        raise CalibrationError(str(error)) from None
    except (KeyError, TypeError):
        raise CalibrationError(f"{path}: expected a list `reuse` of table and from_version") from None

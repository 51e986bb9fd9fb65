"""NVIDIA aiconfigurator's operator tables, in their own layout.

`<gpu>/<family>/<backend>/<version>/<op>_perf.parquet` with families gemm, attention, mla, moe, comm; a version may say
in its `reuse.yaml` which other one a table is taken from. Latency is milliseconds of one launch; message sizes count
elements; n and k are after tensor-parallel sharding, heads those of one GPU; no KV heads means one for each query head.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rlsim.base.reading import read_yaml
from rlsim.base.refusals import refuse
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
    subfolders,
    version_key,
)
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Reference
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError, ConfigError, nearest
from rlsim.models.precision import KV_BYTES, KvPrecision, Precision, peak_flop_per_s, product_bytes

#: Tables that a release must have, and their families.
KERNELS = {"gemm_perf": "gemm", "generation_attention_perf": "attention", "context_attention_perf": "attention"}
#: Latent attention of DeepSeek-V3's shape, by backend: tables of decode and of prompts, and whether they time the whole
#: module (projections, norms, rotary embedding and attention) or the attention kernel alone.
LATENT = {
    "vllm": ("mla_generation_module_perf", "mla_context_module_perf", True),
    "sglang": ("generation_mla_perf", "context_mla_perf", False),
}
BF16 = ("bfloat16", "float16")  # older tables call every 16-bit float float16
#: Products in other precisions; the names are the project's own.
QUANTISED: tuple[Precision, ...] = ("fp8", "fp8_block", "nvfp4")
#: These were launched one by one from Python, without a CUDA graph (`use_cuda_graph` of the project's
#: collector/vllm/collect_gemm.py): below some 0.1 ms (Hopper) or 0.2 ms (Blackwell) they time the host.
NOT_CAPTURED = {("vllm", "fp8_block")}
#: Decode attention of these with grouped queries implies 1.2 to 1.7 times the peak bandwidth, however large the cache.
GROUPED_IN_L2 = {"trtllm"}
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
    version, notes, comm = _version(folder, backend, version), list[str](), folder / "comm" / backend
    paths = {table: _releases(folder / family / backend, table)[version] for table, family in KERNELS.items()}
    nccl_version, nccl = _newest(folder / "comm" / "nccl", "nccl_perf")
    if nccl:
        paths["nccl_perf"] = nccl
    for what, table, root in (
        ("the engine's all-reduce is", "custom_allreduce_perf", comm),
        ("mixtures of experts are", "moe_perf", folder / "moe" / backend),
    ):
        found = _releases(root, table)
        release = version if version in found else next(reversed(found), "")
        paths |= {table: found[release]} if found else {}
        if release not in (version, ""):
            notes.append(f"{what} {backend} {release}'s; {version} has no table of it")
    exchange = {name: _newest(comm, name)[1] for name in ("wideep_deepep_ll_perf", "wideep_deepep_normal_perf")}
    both = {name: path for name, path in exchange.items() if path is not None and "moe_perf" in paths}
    both = both if len(both) == len(exchange) else {}
    paths |= both
    tables = _kernels(paths, backend, reference, notes)
    readers = {"nccl_perf": nccl_collectives, "custom_allreduce_perf": custom_all_reduce}
    collectives = [reader(paths[name], reference) for name, reader in readers.items() if name in paths]
    if "custom_allreduce_perf" not in paths:
        notes.append(f"no all-reduce of {backend}'s own is measured: NCCL's alone")
    if collectives:
        tables["collective"] = pd.concat(collectives, ignore_index=True)
    if "moe_perf" in paths:
        tables["experts"] = experts.experts(paths["moe_perf"], reference, notes)
        others = experts.experts(paths["moe_perf"], reference, notes, others=True)
        tables |= {"other_experts": others} if len(others) else {}
    if both:
        tables["exchange"] = experts.exchanges(*both.values())
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
    gemm, *attentions = (paths[name] for name in KERNELS)
    operators = dict(zip(("decode_attention", "prefill_attention"), attentions, strict=True))
    tables = {"gemm": used_sizes(gemms(gemm, reference, notes))}
    tables |= {operator: attention(path, operator, reference, notes) for operator, path in operators.items()}
    for precision in precisions(gemm):
        if (backend, precision) in NOT_CAPTURED:
            notes.append(f"products in {precision} were timed without a CUDA graph, so with the host's time: left out")
        else:
            tables[gemm_of(precision)] = used_sizes(gemms(gemm, reference, notes, precision))
    if all("fp8" in set(read_table(path, ["kv_cache_dtype"]).kv_cache_dtype) for path in attentions):
        for operator, path in operators.items():
            tables[f"{operator}_fp8"] = attention(path, operator, reference, notes, "fp8")
    if backend in GROUPED_IN_L2:
        notes.append(f"decode attention with grouped queries: {backend}'s rows are left out, as they beat the memory")
        for name in (name for name in tables if name.startswith("decode_attention")):
            tables[name] = tables[name][tables[name].q_heads == tables[name].kv_heads]
    return tables


def gpu_folder(folder: Path, gpu: str) -> Path:
    """The folder of a GPU's tables: `folder` itself, or the one in it (or in its `data`) named like `gpu`."""
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such folder; expected a GPU's tables, <family>/<backend>/<version>/")
    if any((folder / family).is_dir() for family in ("gemm", "attention", "comm")):
        return folder
    wanted, names = gpu.replace("-", "_"), []
    for parent in (folder, folder / "data"):
        for name in subfolders(parent):
            names.append(name)
            if name == wanted or wanted.startswith(f"{name}_"):
                return parent / name
    raise CalibrationError(f"{folder}: no tables of GPU {wanted!r}; {nearest(wanted, names)}")


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


def used_sizes(table: pd.DataFrame) -> pd.DataFrame:
    """Products of the sizes that RL runs use."""
    inside = [table[name].between(*bounds) for name, bounds in SIZES.items()]
    return table[inside[0] & inside[1] & inside[2]]


def attention(
    path: Path, operator: str, ref: Reference | None = None, notes: list[str] | None = None, kv: KvPrecision = "bf16"
) -> pd.DataFrame:
    """`decode_attention` of equal contexts, or causal `prefill_attention`, without a sliding window; columns of `KEYS`
    and seconds.

    Of prompts on an FP8 KV cache queries are bf16 where the engine's kernel was measured with these, else FP8 too
    (SGLang 0.5.14).
    """
    table = _attention(path, kv)
    table = table.assign(context=table.step + 1, longest=table.step + 1, new=table.isl, prior=table.step)
    if operator == "decode_attention":
        pairs, size = table.context, 2.0 * KV_BYTES[kv] * table.context * table.kv_heads
    else:
        pairs = table.new * (table.prior + 0.5 * table.new)
        size = 4.0 * (table.new * table.q_heads + (table.new + table.prior) * table.kv_heads)
    each = table.batch * table.head_dim
    table = check_kernels(path, table, 4.0 * each * pairs * table.q_heads, each * size, ref, notes)
    return medians(table, operator)


def windows(path: Path) -> pd.DataFrame:
    """bf16 attention of sequences beyond a sliding window: batch, tokens (of each sequence), window, q_heads,
    kv_heads, head_dim and seconds; no rows where the table knows no windows."""
    table = _attention(path, windows=True)
    table = table.assign(tokens=table.isl + table.step, window=table.window_size)
    table = table[table.tokens > table.window]
    keys = ["batch", "tokens", "window", "q_heads", "kv_heads", "head_dim"]
    return table.groupby(keys, as_index=False)[["seconds"]].median()


def latent(path: Path, kv: KvPrecision = "bf16") -> pd.DataFrame:
    """Latent attention, in bf16 on a KV cache of `kv`: batch, heads, new (tokens of each sequence), prior (those cached
    before), seconds."""
    chosen = {"kv_cache_dtype": ("bfloat16" if kv == "bf16" else kv,), "mla_dtype": ("bfloat16",)}
    if "gemm_type" in read_table(path, []):
        chosen["gemm_type"] = ("bfloat16",)
    table = launches(path, ["num_heads", "batch_size", "isl", "step"], chosen)
    table = table.rename(columns={"batch_size": "batch", "num_heads": "heads", "isl": "new", "step": "prior"})
    return table.groupby(["batch", "heads", "new", "prior"], as_index=False)[["seconds"]].median()


def latent_tables(folder: Path, backend: str) -> tuple[Path, Path] | None:
    """The newest tables of latent attention of a backend, of decode and of prompts; None if there are none."""
    *names, _ = LATENT.get(backend, ("", "", False))
    decode, prompts = (_releases(folder / "mla" / backend, name) for name in names)
    return next(((decode[version], prompts[version]) for version in reversed(decode) if version in prompts), None)


def in_blocks(path: Path) -> bool:
    """Whether a table of latent attention is of TensorRT-LLM's kernels, made for 16, 32 or 64 heads (Blackwell)."""
    return set(read_table(path, ["kernel_source"]).kernel_source) <= {"trtllm_mla", "FLASHINFER_MLA"}


def nccl_collectives(path: Path, ref: Reference | None) -> pd.DataFrame:
    """NCCL's collectives: op, gpus, bytes, seconds."""
    table = launches(path, MESSAGE, {"nccl_dtype": ("half", "bfloat16")}, ["op_name"])
    return _collectives(path, table.assign(op=table.op_name.replace({"alltoall": "all_to_all"})), ref)


def custom_all_reduce(path: Path, ref: Reference | None) -> pd.DataFrame:
    """An engine's own all-reduce, as captured in a graph where both kinds were measured: op, gpus, bytes, seconds."""
    table = read_table(path, [*MESSAGE, "latency"])
    if "backend" in table:
        table = table[table.backend.astype(str).str.endswith("_graph")]
        refuse("all-reduce in graphs", CalibrationError, path=path, table=table)
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


def _version(folder: Path, backend: str, version: str | None) -> str:
    """`version` if it has all kernel tables, or the newest that does."""
    known = set[str]()
    for family in KERNELS.values():
        if not (folder / family / backend).is_dir():
            raise CalibrationError(
                f"{folder}: no {family} tables of backend {backend!r}; {nearest(backend, subfolders(folder / family))}"
            )
        known |= {*subfolders(folder / family / backend)}
    having = {table: _releases(folder / family / backend, table) for table, family in KERNELS.items()}
    whole = sorted(set.intersection(*map(set, having.values())), key=version_key)
    known_as = {"known": sorted(known, key=version_key), "whole": whole, "having": having}
    refuse("version of tables", CalibrationError, folder=folder, backend=backend, version=version, **known_as)
    return version or whole[-1]


def _releases(root: Path, table: str) -> dict[str, Path]:
    """The files of a table by release, oldest first: a release's own, or that of the one that its `reuse.yaml` says."""
    names = sorted(subfolders(root), key=version_key)
    own = {name: path for name in names if (path := root / name / f"{table}.parquet").is_file()}
    from_of = {name: name if name in own else _reused(root / name, table) for name in names}
    return {name: own[other] for name, other in from_of.items() if other in own}


def _newest(root: Path, table: str) -> tuple[str, Path | None]:
    return next(reversed(_releases(root, table).items()), ("", None))


def _reused(folder: Path, table: str) -> str:
    path = folder / "reuse.yaml"
    if not path.is_file():
        return ""
    try:
        entries = read_yaml(path)["reuse"]
        return next((str(entry["from_version"]) for entry in entries if entry["table"] == table), "")
    except ConfigError as error:
        raise CalibrationError(str(error)) from None
    except (KeyError, TypeError):
        raise CalibrationError(f"{path}: expected a list `reuse` of table and from_version") from None

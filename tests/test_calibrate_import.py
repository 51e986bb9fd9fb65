"""Importers: each project's own layout and units, and one clear error for every way in which tables break."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import KERNELS, cases, needs_data

from rlsim.calibrate.build import build_calibration
from rlsim.calibrate.importers import FORMATS, aiconfigurator, import_calibration, nccl_tests, read_format
from rlsim.calibrate.importers.reading import version_key
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import load_calibration
from rlsim.cost.operators import Operators
from rlsim.errors import CalibrationError, CatalogueError
from rlsim.models.hardware import node_types

H100 = load_calibration("h100-vllm")
OPERATORS = Operators(H100.operators, H100.reference)
DEVICE = "NVIDIA H100 80GB HBM3"


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expects a CalibrationError of one line that contains all the words."""
    with pytest.raises(CalibrationError) as error:
        yield
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


# aiconfigurator -------------------------------------------------------------------------------------------------------


def gemm_rows(version: str = "0.14.0") -> pd.DataFrame:
    rows = [
        ("VLLM", version, DEVICE, "gemm", "vllm_default", dtype, m, n, k, OPERATORS.gemm_s(m, n, k) * 1e3 * scale)
        for dtype, scale in (("bfloat16", 1.0), ("fp8", 0.5))
        for m in (1, 16, 128, 1024, 4096)
        for n in (1024, 4096, 8192)
        for k in (1024, 4096, 8192)
    ]
    columns = ["framework", "version", "device", "op_name", "kernel_source", "gemm_dtype", "m", "n", "k", "latency"]
    return pd.DataFrame(rows, columns=columns)


def attention_rows(kind: str) -> pd.DataFrame:
    decode = kind == "generation_attention"
    rows = []
    for dim in (128, 64):
        for batch in (1, 8, 32, 128):
            for tokens in (31, 1023, 8191) if decode else (64, 1024, 4096):
                for heads, kv_heads in ((8, 1), (32, 8), (32, 0)):
                    kv = kv_heads or heads
                    if decode:
                        time = OPERATORS.decode_kernels.curve(batch, kv, dim).step_s(batch * (tokens + 1))
                    else:
                        time = OPERATORS.prefill_attention_s([(tokens, 0)] * batch, heads, kv, dim)
                    shape = (batch, 1 if decode else tokens, heads, kv_heads, dim, 1)
                    rows.append((*shape, "bfloat16", "bfloat16", tokens if decode else 0, time * 1e3))
    columns = "batch_size isl num_heads num_key_value_heads head_dim beam_width attn_dtype kv_cache_dtype step latency"
    table = pd.DataFrame(rows, columns=columns.split())
    return table.assign(
        framework="VLLM", version="0.14.0", device=DEVICE, op_name=kind, kernel_source="vllm_flash_attn"
    )


def collective_rows(custom: bool) -> pd.DataFrame:
    rows = []
    for op in ("all_reduce",) if custom else ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        for gpus in (2, 4, 8):
            for elements in (256, 4096, 65536, 2**20, 2**24, 2**27):
                latency = 0.008 + elements * 2 / 300e9 * 1e3
                rows.append(("vLLM", "0.14.0", DEVICE, op, "NCCL", gpus, elements, latency))
    columns = ["framework", "version", "device", "op_name", "kernel_source", "num_gpus", "message_size", "latency"]
    table = pd.DataFrame(rows, columns=columns)
    if not custom:
        return table.assign(nccl_dtype="half")
    eager = table.assign(backend="vllm_eager", latency=table.latency * 3)
    return pd.concat([table.assign(backend="vllm_graph"), eager]).assign(allreduce_dtype="bfloat16")


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    """The project's folder of measured systems with one GPU in the current layout."""
    gpu = tmp_path / "aic" / "h100_sxm"
    files = {
        "gemm/vllm/0.14.0/gemm_perf": gemm_rows(),
        "attention/vllm/0.14.0/generation_attention_perf": attention_rows("generation_attention"),
        "attention/vllm/0.14.0/context_attention_perf": attention_rows("context_attention"),
        "comm/vllm/0.14.0/custom_allreduce_perf": collective_rows(custom=True),
        "comm/nccl/2.29.2/nccl_perf": collective_rows(custom=False),
        "comm/nccl/2.3/nccl_perf": collective_rows(custom=False).assign(latency=1.0),
    }
    for name, table in files.items():
        path = gpu / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)
    return tmp_path / "aic"


def gpu_read(systems: Path, version: str | None = None) -> Measurements:
    return aiconfigurator.read(systems / "h100_sxm", "vllm", version, gpu="h100-sxm", reference=H100.reference)


def test_aiconfigurator_units_and_rows(systems: Path) -> None:
    read = gpu_read(systems)
    gemm = read.table("gemm")
    assert len(gemm) == 45  # bfloat16 alone
    row = gemm.query("m == 1024 and n == 4096 and k == 8192").iloc[0]
    assert row.seconds == pytest.approx(OPERATORS.gemm_s(1024, 4096, 8192))
    decode = read.table("decode_attention")
    assert sorted(decode.context.unique()) == [32, 1024, 8192]
    assert (decode.longest == decode.context).all()
    assert set(decode.kv_heads) == {1, 8, 32}  # no KV heads: one for each query head
    collective = read.table("collective")
    assert set(collective.op) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "custom_all_reduce"}
    assert collective.bytes.max() == 2**28  # elements of two bytes
    own = collective.query("op == 'custom_all_reduce' and gpus == 2 and bytes == 512").seconds.item()
    assert own == pytest.approx(8e-6, rel=0.01)  # from graphs, not eager
    nccl = collective.query("op == 'all_reduce' and gpus == 2 and bytes == 512").seconds.item()
    assert nccl == pytest.approx(8e-6, rel=0.01)  # of NCCL 2.29.2, which is newer than 2.3
    assert read.sources[0].engine_version == "vllm 0.14.0, NCCL 2.29.2"
    assert "h100_sxm/gemm/vllm/0.14.0/gemm_perf.parquet" in read.sources[0].files


def test_aiconfigurator_takes_the_attention_kernel_that_the_engine_chooses(systems: Path) -> None:
    path = systems / "h100_sxm" / "attention" / "vllm" / "0.14.0" / "generation_attention_perf.parquet"
    before, table = gpu_read(systems).table("decode_attention"), pd.read_parquet(path)
    by_shape = table.assign(kernel_source=table.kernel_source.where(table.batch_size < 128, "for_large_batches"))
    some = table[(table.batch_size == 8) & (table.head_dim == 128)]
    instead = some.assign(kernel_source="flashinfer", latency=some.latency * 3)
    elsewhere = instead.assign(batch_size=9)  # the same kernel, where the engine's own was not measured
    pd.concat([by_shape, instead, elsewhere]).to_parquet(path)
    pd.testing.assert_frame_equal(gpu_read(systems).table("decode_attention"), before)


def test_aiconfigurator_follows_reuse(systems: Path) -> None:
    folder = systems / "h100_sxm"
    newer = folder / "gemm" / "vllm" / "0.22.0"
    newer.mkdir()
    gemm_rows("0.22.0").assign(latency=lambda t: t.latency * 2).to_parquet(newer / "gemm_perf.parquet")
    reuse = folder / "attention" / "vllm" / "0.22.0"
    reuse.mkdir()
    lines = ["schema_version: 1", "reuse:"]
    for table in ("context_attention_perf", "generation_attention_perf"):
        lines += [f"- table: {table}", "  from_version: 0.14.0"]
    (reuse / "reuse.yaml").write_text("\n".join(lines))
    read = gpu_read(systems)
    assert read.sources[0].engine_version.startswith("vllm 0.22.0")
    assert any("0.14.0's; 0.22.0 has no table of it" in note for note in read.notes)
    assert read.table("gemm").seconds.sum() == pytest.approx(
        2 * gpu_read(systems, "0.14.0").table("gemm").seconds.sum()
    )
    names = ["0.9.1", "0.14.0rc2", "0.14.0", "0.14.0.post1", "0.14.1", "1.3.0rc10", "1.3.0rc20"]
    assert sorted(sorted(names), key=version_key) == names


def spoil(systems: Path, table: str, change: str) -> Path:
    """Changes a table by an assignment of pandas."""
    path = next(systems.rglob(f"{table}.parquet"))
    pd.read_parquet(path).eval(change, engine="python").to_parquet(path)
    return path


@cases("calibrate_import", "aiconfigurator broken tables")
def test_aiconfigurator_broken_tables(systems: Path, table: str, change: str, words: list[str]) -> None:
    path = spoil(systems, table, change)
    with refused(str(path), *words):
        gpu_read(systems)


def test_aiconfigurator_single_faults_are_left_out_and_noted(systems: Path) -> None:
    spoil(systems, "gemm_perf", "latency = latency.where(index != 44, 1e-5)")
    read = gpu_read(systems)
    assert len(read.table("gemm")) == 44
    assert "gemm_perf.parquet: 1 rows far beyond the GPU's peak rates are left out" in read.notes


def test_aiconfigurator_unknown_names(systems: Path, tmp_path: Path) -> None:
    folder = systems / "h100_sxm"
    with refused("no gemm tables of backend 'vlm'", "did you mean 'vllm'"):
        aiconfigurator.read(folder, "vlm")
    with refused("no vllm version '0.14.1'", "did you mean '0.14.0'"):
        aiconfigurator.read(folder, "vllm", "0.14.1")
    with refused("no tables of GPU 'h200_sxm'", "did you mean 'h100_sxm'"):
        aiconfigurator.gpu_folder(systems, "h200-sxm")
    with refused("no such folder"):
        aiconfigurator.gpu_folder(tmp_path / "nowhere", "h100-sxm")
    (folder / "attention" / "vllm" / "0.14.0" / "context_attention_perf.parquet").unlink()
    with refused("vllm 0.14.0 has no context_attention_perf"):
        aiconfigurator.read(folder, "vllm", "0.14.0")


# nccl-tests -----------------------------------------------------------------------------------------------------------


def nccl_text(program: str = "all_reduce", gpus: int = 8, hosts: int = 1, named: bool = True) -> str:
    """The output of nccl-tests 2.17: header, devices, table with both columns, footer."""
    first = [f"# Collective test starting: {program}_perf"] if named else []
    lines = [
        "# nccl-tests version 2.17.8 nccl-headers=22902 nccl-library=22902",
        *first,
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1",
        "#",
        "# Using devices",
    ]
    for rank in range(gpus):
        host = f"node{rank * hosts // gpus}"
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {1000 + rank:6d} on {host:>10s} device {rank:2d} [0000:19:00] {DEVICE}"
        )
    lines += [
        "#",
        "#                                                   out-of-place                       in-place",
        f"#       size         count      type   redop    root{2 * '     time   algbw   busbw  #wrong'}",
        f"#        (B)    (elements)                      {2 * '         (us)  (GB/s)  (GB/s)'}",
    ]
    factor = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "alltoall": 1.0, "sendrecv": None}[program]
    ratio = 1.0 if factor is None else factor * (gpus - 1) / gpus
    for size in [0, *(8**e for e in range(1, 11))]:
        time = 12.0 + size / 250e3
        alg = size / time / 1e3
        cells = f"  {time:8.2f}  {alg:6.2f}  {alg * ratio:6.2f}       0"
        lines.append(f"{size:12d}  {size // 4:12d}     float     sum      -1{cells}{cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 97.3", "#", ""])


def nccl_read(tmp_path: Path, text: str, name: str = "log.txt") -> Measurements:
    (tmp_path / name).write_text(text)
    return nccl_tests.read([tmp_path / name], gpu="h100-sxm", reference=H100.reference)


def test_nccl_tests_text(tmp_path: Path) -> None:
    read = nccl_read(tmp_path, nccl_text())
    table = read.table("collective")
    assert set(zip(table.op, table.gpus, strict=True)) == {("all_reduce", 8)}
    assert len(table) == 10  # the empty message left out
    assert table.query("bytes == 8**10").seconds.item() == pytest.approx(12e-6 + 8**10 / 250e9, rel=1e-3)
    text = nccl_text().replace("all_reduce_perf", "hypercube_perf")
    with pytest.raises(CalibrationError, match="hypercube is of no use"):
        nccl_read(tmp_path, text)
    read = nccl_read(tmp_path, text + nccl_text())
    assert any("hypercube" in note for note in read.notes)
    assert len(read.table("collective")) == 10


def test_nccl_tests_several_tests_in_a_file_and_prefixes(tmp_path: Path) -> None:
    """mpirun and srun put the rank before every line, `mpirun --tag-output` also before what the process wrote later of
    it, and NCCL its messages between them."""
    noise = "node0:21:21 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n"
    both = noise + nccl_text("all_gather", 4) + noise + nccl_text("sendrecv", 2)
    plain = nccl_read(tmp_path, both).table("collective")
    assert set(zip(plain.op, plain.gpus, strict=True)) == {("all_gather", 4), ("send_recv", 2)}
    for tag in ("[0] ", "[1,0]<stdout>:", " 0: "):
        for later in ("", tag.strip()):
            lines = [tag + line.replace(" -1  ", f" -1{later}  ") for line in both.splitlines()]
            assert nccl_read(tmp_path, "\n".join(lines)).table("collective").equals(plain)


def test_nccl_tests_older_header_without_root(tmp_path: Path) -> None:
    """Before 2.11 there was no root column and an error instead of a count; the name of the file tells the test."""
    text = nccl_text("alltoall", 2, named=False).replace("    root  ", "").replace("      -1", "")
    text = text.replace("#wrong", " error").replace("       0", "   5e-07")
    table = nccl_read(tmp_path, text, "alltoall-2gpu.out").table("collective")
    assert set(zip(table.op, table.gpus, strict=True)) == {("all_to_all", 2)}
    assert len(table) >= 9


def row_of(text: str, size: int) -> str:
    return next(line for line in text.splitlines() if re.match(rf"\s*{size}\s", line))


def test_nccl_tests_broken_text(tmp_path: Path) -> None:
    text = nccl_text()
    large = row_of(text, 8**10)
    number = text.splitlines().index(large) + 1
    cases = {
        text[: text.index(large) + 60]: [f"line {number}", "cut off"],
        text[: text.index("# Out of bounds")]: [f"cut off after line {number}", "Avg bus bandwidth"],
        text.replace(large, large.replace(f"{12 + 8**10 / 250e3:8.2f}", f"{(12 + 8**10 / 250e3) / 1e3:8.2f}")): [
            f"line {number}",
            "microseconds",
        ],
        text.replace(large, large.replace("       0", "      17")): [f"line {number}", "17 wrong elements"],
        text.replace(DEVICE, "NVIDIA A100-SXM4-80GB"): ["measured on NVIDIA A100"],
        nccl_text(hosts=2): ["over 2 nodes"],
        nccl_text(gpus=1): ["on 1 GPUs"],
        nccl_text("sendrecv", named=False): ["which collective"],
        nccl_text().replace("#  Rank  7", "#  Rook  7"): ["busbw / algbw", "on 7 GPUs"],
        "hello\n": ["no table of nccl-tests"],
        "": ["empty"],
    }
    for broken, words in cases.items():
        with refused("log.txt", *words):
            nccl_read(tmp_path, broken)


# Straight to a calibration --------------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_import_of_each_format_writes_a_calibration_and_its_chart(systems: Path, tmp_path: Path, out: Path) -> None:
    log = tmp_path / "all_reduce.txt"
    log.write_text(nccl_text())
    for name, path in zip(FORMATS, (systems, log), strict=True):
        path = import_calibration(name, [path], gpu="h100-sxm", engine="vllm", base="h100-sxm-vllm", name=name, out=out)
        calibration = load_calibration(path)
        assert (calibration.gpu, calibration.name) == ("h100-sxm", name)
        assert calibration.provenance.script == "rlsim calibrate import"
        assert any(note.startswith("not measured, from h100-sxm-vllm") for note in calibration.provenance.notes)
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(f"{name}{suffix}" for name in FORMATS for suffix in (".yaml", ".csv", ".html"))
    assert calibration.operators == H100.operators  # the log changes collectives alone
    assert calibration.collectives.nccl["all_reduce"][8] != H100.collectives.nccl["all_reduce"][8]
    assert calibration.collectives.nccl["all_reduce"][2] == H100.collectives.nccl["all_reduce"][2]


def test_import_refuses_and_writes_nothing(systems: Path, tmp_path: Path, out: Path) -> None:
    def run(format_name: str = "aiconfigurator", gpu: str = "h100-sxm", engine: str = "vllm", **more: object) -> None:
        import_calibration(format_name, [systems], gpu=gpu, engine=engine, **{"out": out, **more})  # type: ignore[arg-type]

    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"format_name": "aiconfig"}, ["unknown format", "did you mean 'aiconfigurator'"]),
        ({"engine": "vlm"}, ["unknown engine", "did you mean 'vllm'"]),
        ({"engine": "sglang"}, ["no gemm tables of backend 'sglang'"]),
        ({"out": tmp_path / "nowhere"}, ["no such folder"]),
        ({}, ["not measured: memory_bound", "--base h100-sxm-vllm"]),
        ({"format_name": "nccl-tests", "version": "1"}, ["no engine versions"]),
    ]
    for options, words in cases:
        with refused(*words):
            run(**options)  # type: ignore[arg-type]
    with pytest.raises(CatalogueError, match="h100-sxm"):
        run(gpu="h100-sxn")
    with pytest.raises(CatalogueError, match="h100"):
        run(base="h100-vlm")
    assert list(out.iterdir()) == []


@pytest.mark.ci
@needs_data
def test_real_tables_give_what_is_shipped() -> None:
    """The H100 under vLLM: the same times within 3%, and the same errors of as many held-out rows."""
    read, reference = read_format("aiconfigurator", [KERNELS], node_types()["h100"], "vllm", "0.24.0")
    fitted = ("gemm", "decode_attention", "prefill_attention", "collective")
    measured = Measurements({name: read.tables[name] for name in fitted}, read.sources, read.notes)
    said = {"name": "imported", "gpu": "h100-sxm", "engine": "vllm", "date": "2026-11-21", "script": "a test"}
    built = build_calibration(measured, **said, reference=reference, base=H100, cold=False)  # type: ignore[arg-type]
    mine = Operators(built.fit.operators, built.fit.reference)
    shapes = {
        "gemm_s": [(m, n, k) for m in (1, 64, 2048) for n, k in ((6144, 4096), (4096, 14336), (1280, 5120))],
        "prefill_attention_s": [([(n, 0)] * b, 32, 8, 128) for b in (1, 8) for n in (128, 1024, 8192)],
    }
    for name, calls in shapes.items():
        ratios = [getattr(mine, name)(*call) / getattr(OPERATORS, name)(*call) for call in calls]
        assert np.abs(np.array(ratios) - 1.0).max() < 0.03, name
    for batch, context in product((1, 32, 256), (128, 2048, 16384)):
        own_s, other_s = (o.decode_kernels.curve(batch, 8, 128).step_s(batch * context) for o in (mine, OPERATORS))
        assert own_s == pytest.approx(other_s, rel=0.03), (batch, context)
    for operator in fitted[:3]:
        found, shipped = built.fit.residuals[operator], H100.residuals[operator]
        unseen = built.points[(built.points.operator == operator) & built.points.held_out]
        assert found.count == shipped.count == len(unseen)
        assert found.median == pytest.approx(shipped.median, rel=0.1)
        assert found.median == pytest.approx(unseen.error.abs().median(), rel=0.01)

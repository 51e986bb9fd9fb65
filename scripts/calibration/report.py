"""The tables of `docs/calibration.md`, whose text is in `page/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import pandas as pd

from calibration.across import across_section
from calibration.catalogue import Catalogue
from calibration.host import CLIENT_S
from calibration.kv import kv_section
from calibration.markdown import section, table
from calibration.tables import GPUS, KEPT, SCRIPT, cpu_overheads, decode_sums, operator_tables
from calibration.training import training_section
from calibration.windows import engine_section
from evidence.validate.serving import SERVED
from evidence.validate.transfer import SettingFit, TransferFits, shipped_fits
from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.fit import gemm
from rlsim.calibrate.fit.attention import DECODE, GROUP, HEAD_DIM, PROMPTS, decode_rows, usual_groups
from rlsim.calibrate.fit.common import percent, predict
from rlsim.calibrate.fit.gemm import gemm_rows
from rlsim.calibrate.points import residual
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, HostFit, Reference, Residual, derived_gpus, load_calibration
from rlsim.cost.carried import carried_operators
from rlsim.cost.roofline import RooflineStep
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

ROWS = plain(read_yaml(Path(__file__).with_suffix(".yaml")))
MODEL = "llama-3.1-8b"
FEW_ROWS = 64  # of products that decode
ERRORS = ["median", "p90", "bias", "rows"]


def _name(operator: str) -> str:
    """An operator, as the page calls it."""
    found = ((re.fullmatch(pattern, operator), shown) for pattern, shown in ROWS["operators"])
    return next(match.expand(shown) for match, shown in found if match)


def _errors(item: Residual) -> tuple[str, str, str, int]:
    return percent(item.median), percent(item.p90), percent(item.bias), item.count


def _residuals(made: Iterable[Calibration]) -> str:
    """By operator and engine, over its calibrations; each file has its own."""
    found: dict[tuple[str, str], list[Residual]] = {}
    for calibration in made:
        for key, item in calibration.residuals.items():
            found.setdefault((_name(key), calibration.engine), []).append(item)
    rows = []
    for (operator, engine), items in sorted(found.items()):
        shares = [[percent(getattr(item, name)) for item in sorted(items, key=attrgetter(name))] for name in ERRORS[:3]]
        spans = [" to ".join(dict.fromkeys((each[0], each[-1]))) for each in shares]
        rows.append((operator, engine, len(items), *spans, sum(item.count for item in items)))
    return table(["operator", "engine", "calibrations", *ERRORS], rows)


def _hot(catalogue: Catalogue) -> str:
    rows = []
    for name, items in catalogue.hot().items():
        for key, item in items.items():
            shares = (item.measured.median, item.measured.bias, item.with_read, item.below, item.above)
            rows.append((name, _name(key), *map(percent, shares), item.measured.count))
    head = ["calibration", "operator", "median", "bias", "bias against hot + read", "below hot", "above hot + read"]
    return table([*head, "rows"], rows)


def _sums(catalogue: Catalogue) -> str:
    sums, rows = decode_sums(catalogue.data), []
    for gpu, bare in (
        ("a40", load_calibration("a40-sglang")),
        ("a100", catalogue.calibration("a100-sxm-80gb-vllm")),
        ("h100", catalogue.calibration("h100-sxm-vllm")),
    ):
        bare = bare.model_copy(update={"host": NO_HOST})
        for tp, points in sums[sums.gpu == gpu].groupby("tp"):
            step = RooflineStep(load_model(MODEL), int(str(tp)), load_cluster(f"8x{gpu}"), bare)
            errors = [
                step.decode(point.batch).step_s(point.batch * point.ctx) / point.seconds - 1
                for point in points.itertuples()
            ]
            mean, middle = sum(abs(e) for e in errors) / len(errors), sorted(errors)[len(errors) // 2]
            rows.append((gpu, f"TP{tp}", len(errors), percent(mean), percent(middle)))
    return table(["GPU", "layout", "points", "mean absolute difference", "median difference"], rows)


def _serving(fits: TransferFits) -> str:
    def value(fit: SettingFit, name: str) -> float:
        return float(getattr(fit.host if name in HostFit.model_fields else fit.front_end, name))

    rows = []
    for engine, version in SERVED.items():
        whole, *others = [fit for fit in fits.fits if fit.engine == engine and not fit.without]
        for name, interval in whole.intervals.items():
            what, unit, factor = ROWS["units"][name]
            low, high = (one * factor for one in interval)
            found = ", ".join(f"{value(fit, name) * factor:.3g} ({fit.left_out.split('/')[-1]})" for fit in others)
            shown = f"{value(whole, name) * factor:.3g} {unit}"
            rows.append((f"{engine} {version}", what, shown, f"{low:.3g} to {high:.3g}", found))
    return table(["engine", "time", "all runs", "95% interval", "fitted without"], rows)


def _host_check(measured: list[tuple[str, str, int, float, float]]) -> str:
    head = ["GPU's machine", "model", "TP", "per step, ms", "per sequence, ms"]
    return table(head, [(*what, f"{step * 1e3:.2f}", f"{seq * 1e3:.3f}") for *what, step, seq in measured])


def carried_errors(data: Path, source: Calibration, target: str) -> dict[str, Residual]:
    """Errors of `source`'s kernels on `target`'s data-sheet figures, by operator, on rows that L2 does not hold.

    Nothing of the target is fitted, so every such row counts.
    """
    gpu, engine = GPUS[target], source.engine
    ref = Reference.of(load_cluster(gpu.cluster))
    fits, measured = carried_operators(source.operators, source.reference, ref), operator_tables(data, gpu, engine)
    gemms = measured.table("gemm")
    rows = {
        gemm.KERNEL: gemms[~gemm_rows(gemms, ref).hot],
        DECODE: _usual(measured.table("decode_attention"), "decode_attention"),
        PROMPTS: _usual(measured.table("prefill_attention"), "prefill_attention"),
    }
    rows[DECODE] = rows[DECODE][decode_rows(rows[DECODE], ref).streamed]
    return {
        kernel.operator: residual(predict(kernel, getattr(fits, kernel.operator), ref, some), some.seconds, {})
        for kernel, some in rows.items()
    }


def measured_there(data: Path, derived: Calibration) -> dict[str, Residual]:
    """Errors of a `derived` calibration of H20 or H800 on rows that InferSim measured there: products of DeepGEMM by
    rows, decode attention by query heads for each KV head."""
    table = pd.read_csv(data / "kernels/infersim/infersim_h20_h800.csv")
    table = table[table.gpu == derived.gpu.partition("-")[0]].assign(seconds=table.latency_us * 1e-6)
    products, fit = table[table.op == "gemm"], derived.operators.gemms["fp8_block"]
    decode = table[(table.op == "mha/decode") & (table.kv_dtype == "bf16")].rename(
        columns={"batch_size": "batch", "kv_len": "context"}
    )
    decode[["q_heads", "kv_heads", "head_dim"]] = decode["shape"].str.split("-", expand=True).astype(int)
    few, many = products.m <= FEW_ROWS, decode.q_heads > GROUP * decode.kv_heads
    block, kv = gemm.kernel_of("fp8_block"), derived.operators.decode_attention
    parts = {
        f"products in fp8_block, up to {FEW_ROWS} rows": (block, fit, products[few]),
        "products in fp8_block, more rows": (block, fit, products[~few]),
        f"decode attention, up to {GROUP} query heads for each KV head": (DECODE, kv, decode[~many]),
        "decode attention, more": (DECODE, kv, decode[many]),
    }
    return {
        name: residual(predict(kernel, own, derived.reference, rows), rows.seconds, {})
        for name, (kernel, own, rows) in parts.items()
    }


def _usual(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    return usual_groups(table[table.head_dim == HEAD_DIM], operator)


def _carried(catalogue: Catalogue) -> Iterator[tuple[str, str, str, str, str, str, int]]:
    for source, target in ROWS["pairs"]:
        for engine in ("vllm", "sglang"):
            found = carried_errors(catalogue.data, catalogue.calibration(f"{source}-{engine}"), target)
            for key, item in found.items():
                yield f"{source} to {target}", engine, _name(key), *_errors(item)


def _there(catalogue: Catalogue) -> Iterator[tuple[str, str, str, str, str, str, int]]:
    for gpu in ("h20", "h800-sxm"):
        for engine in ("vllm", "sglang"):
            for name, item in measured_there(catalogue.data, load_calibration(f"{gpu}-{engine}")).items():
                yield gpu, engine, name, *_errors(item)


def report(catalogue: Catalogue) -> str:
    """The whole page."""
    kept = {name: load_calibration(name) for name in KEPT}
    made, fits = kept | {name: catalogue.calibration(name) for name in catalogue.names()}, shipped_fits()
    head = ["engine", "operator", *ERRORS]
    page = section(
        "page",
        script=SCRIPT,
        residuals=_residuals(made.values()),
        hot=_hot(catalogue),
        sums=_sums(catalogue),
        serving=_serving(fits),
        client_s=CLIENT_S,
        vllm=fits.of("vllm").host,
        host_check=_host_check(cpu_overheads(catalogue.data)),
        training=training_section(catalogue.data, made),
        derived=derived_gpus(),
        across=across_section(),
        carried=table(["from, to", *head], _carried(catalogue)),
        there=table(["GPU", *head], _there(catalogue)),
        group=GROUP,
        kv=kv_section(),
        engine=engine_section(),
    )
    return page + "\n"

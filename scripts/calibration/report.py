"""The tables of `docs/calibration.md`, whose text is in `page/`."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from calibration.a40 import PAT_CONTEXT, PAT_LATENCIES
from calibration.across import across_section
from calibration.carried import PAIRS, carried_errors, measured_there
from calibration.catalogue import Catalogue
from calibration.host import CLIENT_S
from calibration.kv import kv_section
from calibration.markdown import section, table
from calibration.measured import HotRows
from calibration.provenance import SCRIPT
from calibration.tables import cpu_overheads, decode_sums
from calibration.training_report import training_section
from calibration.windows import engine_section
from rlsim.calibrate.fit.attention import GROUP
from rlsim.calibrate.fit.common import percent
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, HostFit, Residual, derived_gpus, load_calibration
from rlsim.cost.roofline import RooflineStep
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.precision import WEIGHT_BYTES
from rlsim.validate.serving import SERVED
from rlsim.validate.transfer import SettingFit, TransferFits, shipped_fits

PHASES = ("decode", "prefill")
NAMES = {
    "gemm": "GEMM",
    "decode_attention": "decode attention",
    "gemm_fp8": "GEMM in fp8",
    "gemm_fp8_block": "GEMM in fp8_block",
    "gemm_nvfp4": "GEMM in nvfp4",
    "decode_attention_fp8": "decode attention, FP8 KV",
    "prefill_attention_fp8": "prefill attention, FP8 KV",
    "prefill_attention_fp8_long": "prefill attention, FP8 KV, 1K tokens and more",
    "prefill_attention": "prefill attention",
    "prefill_attention_long": "prefill attention, 1K tokens and more",
    **{f"{name}_attention_heads_of_{dim}": f"{name} attention, heads of {dim}" for name in PHASES for dim in (64, 256)},
    "decode_attention_windows": "decode attention in windows",
    "prefill_attention_windows": "prefill attention in windows",
    "latent_attention": "latent attention, heads left out",
    "latent_attention_prompts": "latent attention, prompts, heads left out",
    "latent_attention_fp8": "latent attention, FP8 KV, heads left out",
    "latent_attention_fp8_prompts": "latent attention, FP8 KV, prompts, heads left out",
    "memory_bound": "elementwise, per layer",
    **{f"experts_{name}": f"experts, {name}" for name in WEIGHT_BYTES},
    **{f"experts_{name}_skewed": f"experts, {name}, skewed" for name in WEIGHT_BYTES},
    "experts_mxfp4_parallel": "experts, mxfp4, on several GPUs",
    "experts_mxfp4_parallel_skewed": "experts, mxfp4, on several GPUs, skewed",
    "exchange": "DeepEP, hidden sizes left out",
    "nccl": "NCCL (in sample)",
    "custom_all_reduce": "engine all-reduce (in sample)",
}


def _errors(item: Residual) -> tuple[str, str, str, int]:
    return percent(item.median), percent(item.p90), percent(item.bias), item.count


def _residuals(found: dict[str, Mapping[str, Residual]]) -> str:
    rows = [(name, NAMES[key], *_errors(item)) for name, items in found.items() for key, item in items.items()]
    return table(["calibration", "operator", "median", "p90", "bias", "rows"], rows)


def _hot(found: dict[str, dict[str, HotRows]]) -> str:
    rows = [
        (
            name,
            NAMES[key],
            percent(item.measured.median),
            *(percent(one) for one in (item.measured.bias, item.with_read, item.below, item.above)),
            item.measured.count,
        )
        for name, items in found.items()
        for key, item in items.items()
    ]
    head = ["calibration", "operator", "median", "bias", "bias against hot + read", "below hot", "above hot + read"]
    return table([*head, "rows"], rows)


def _a40(calibration: Calibration) -> dict[str, object]:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xa40")
    rows = []
    for (tp, batch), measured in PAT_LATENCIES.items():
        shown = RooflineStep(model, tp, cluster, calibration).decode(batch).step_s(batch * PAT_CONTEXT)
        origin = "predicted" if tp == 2 else "used for the 8-GPU all-reduce"
        error = percent(shown / measured - 1)
        rows.append((f"TP{tp}", batch, f"{measured * 1e3:.2f}", f"{shown * 1e3:.2f}", error, origin))
    eight = calibration.collectives.nccl["all_reduce"][8]
    latency = eight.time_s[0]
    rate = (eight.message_bytes[-1] - eight.message_bytes[0]) / (eight.time_s[-1] - eight.time_s[0])
    return {
        "pat_context": PAT_CONTEXT,
        "a40": table(["layout", "sequences per replica", "PAT, ms", "rlsim, ms", "error", "role"], rows),
        "a40_host_s": calibration.host.step_s,
        "a40_latency_s": latency,
        "a40_rate": rate,
    }


def _sums(made: dict[str, Calibration], sums: pd.DataFrame) -> str:
    model = load_model("llama-3.1-8b")
    rows = []
    for name, cluster_name, gpu in (
        ("a40-sglang", "8xa40", "a40"),
        ("a100-sxm-80gb-vllm", "8xa100", "a100"),
        ("h100-sxm-vllm", "8xh100", "h100"),
    ):
        cluster = load_cluster(cluster_name)
        bare = made[name].model_copy(update={"host": NO_HOST})
        for tp, points in sums[sums.gpu == gpu].groupby("tp"):
            step = RooflineStep(model, int(str(tp)), cluster, bare)
            errors = [
                step.decode(point.batch).step_s(point.batch * point.ctx) / point.seconds - 1
                for point in points.itertuples()
            ]
            mean, middle = sum(abs(e) for e in errors) / len(errors), sorted(errors)[len(errors) // 2]
            rows.append((gpu, f"TP{tp}", len(errors), percent(mean), percent(middle)))
    return table(["GPU", "layout", "points", "mean absolute difference", "median difference"], rows)


#: What is fitted to whole engines: its unit, and how many of them a second has.
_UNITS = {
    "step_s": ("host, per step", "ms", 1e3),
    "sequence_s": ("host, per sequence and step", "us", 1e6),
    "prefill_s": ("host, per prefill iteration", "ms", 1e3),
    "token_s": ("front end, per generated token", "us", 1e6),
    "prompt_token_s": ("front end, per token of a prompt", "us", 1e6),
    "delay_s": ("delay of each request", "ms", 1e3),
}


def _serving(fits: TransferFits) -> str:
    rows = []
    for engine, version in SERVED.items():
        own = [fit for fit in fits.fits if fit.engine == engine and not fit.without]
        whole, *others = own
        for name in whole.intervals:
            what, unit, factor = _UNITS[name]
            low, high = (value * factor for value in whole.intervals[name])
            found = ", ".join(f"{_value(fit, name) * factor:.3g} ({fit.left_out.split('/')[-1]})" for fit in others)
            shown = f"{_value(whole, name) * factor:.3g} {unit}"
            rows.append((f"{engine} {version}", what, shown, f"{low:.3g} to {high:.3g}", found))
    return table(["engine", "time", "all runs", "95% interval", "fitted without"], rows)


def _value(fit: SettingFit, name: str) -> float:
    return float(getattr(fit.host if name in HostFit.model_fields else fit.front_end, name))


def _host_check(measured: list[tuple[str, str, int, float, float]]) -> str:
    head = ["GPU's machine", "model", "TP", "per step, ms", "per sequence, ms"]
    return table(head, [(*what, f"{step * 1e3:.2f}", f"{seq * 1e3:.3f}") for *what, step, seq in measured])


def _carried(catalogue: Catalogue) -> dict[str, str]:
    rows = []
    for source, target in PAIRS:
        for engine in ("vllm", "sglang"):
            found = carried_errors(catalogue.data, catalogue.calibration(f"{source}-{engine}"), target)
            rows += [(f"{source} to {target}", engine, NAMES[key], *_errors(item)) for key, item in found.items()]
    there = []
    for gpu in ("h20", "h800-sxm"):
        for engine in ("vllm", "sglang"):
            judged = measured_there(catalogue.data, load_calibration(f"{gpu}-{engine}"))
            there += [(gpu, engine, name, *_errors(item)) for name, item in judged.items()]
    head = ["engine", "operator", "median", "p90", "bias", "rows"]
    return {"carried": table(["from, to", *head], rows), "there": table(["GPU", *head], there)}


def report(catalogue: Catalogue) -> str:
    """The whole page."""
    made, fits = catalogue.all(), shipped_fits()
    return (
        section(
            "page",
            script=SCRIPT,
            residuals=_residuals({name: made[name].residuals for name in sorted(made)}),
            hot=_hot(catalogue.hot()),
            **_a40(made["a40-sglang"]),
            sums=_sums(made, decode_sums(catalogue.data)),
            serving=_serving(fits),
            client_s=CLIENT_S,
            vllm=fits.of("vllm").host,
            host_check=_host_check(cpu_overheads(catalogue.data)),
            training=training_section(catalogue.data, made),
            derived=derived_gpus(),
            across=across_section(),
            **_carried(catalogue),
            group=GROUP,
            kv=kv_section(),
            engine=engine_section(),
        )
        + "\n"
    )

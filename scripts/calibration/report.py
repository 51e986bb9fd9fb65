"""The text of `docs/calibration.md`."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from calibration.a40 import PAT_CONTEXT, PAT_LATENCIES
from calibration.across import across_section
from calibration.carried import PAIRS, carried_errors, measured_there
from calibration.catalogue import Catalogue
from calibration.host import CLIENT_S
from calibration.kv import kv_section
from calibration.markdown import table
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

INTRO = f"""# Calibration: what the kernel costs are fitted to, and how far off they are

Written by `{SCRIPT}` from measured tables that are not part of this project (NVIDIA aiconfigurator,
Apache-2.0; Microsoft Vidur, MIT). The files in `calibration/` hold fitted constants and tables of what they leave
over. Errors below are absolute relative errors, `p90` the 90th percentile, `bias` the
median signed error (positive: predicted too slow), on shapes that the fit has not seen unless a row says so.

Experts are judged on Qwen3-235B-A22B and DeepSeek-V3, by a fit that has seen no row of either (or on a quarter of the
models where neither was measured); "skewed" rows route by a power law.

## Cold weights and KV

A decode step reads every layer's weights and KV once, so by the time a layer comes round again, the others have
displaced it from L2. Microbenchmarks repeat one small kernel and find its operands in L2. The fits therefore take
bandwidths from footprints beyond L2 (weights: 1.5 times, KV: 1.2 times)
and use them for every size. Quantised weights are so small that next to no product of few tokens is left: for these,
rows whose weights are under half of L2 are fitted too, by the same roofline with weights at a rate of L2's own, which
is found beside the constants and thrown away. Without them nothing told the launch and the blocks of few rows.

The table "against L2-hot rows" shows what this comes to. A product with its weights in memory takes the hot
measurement at least, and no more than it and a whole read of the weights: a fit should lie between the two.

TensorRT-LLM's grouped-query decode rows beyond L2 imply up to 1.3 times the peak bandwidth (1.5 times on L40S). No
kernel can read its KV that fast, so these rows were served from L2 in part whatever their size; rows above 95% of
peak are left out.
"""

MISSED = """\
**What is missed, and why.** SGLang's tables of B200 hold rows that are slow at random: a product in bf16 is PyTorch's
in both engines' tables, yet 11% of SGLang's rows take over 20% longer than vLLM's, of every size alike, and next to
none the other way. In bf16, fp8 and NVFP4 10 to 12% of its rows take over 15% longer than a larger product with the
same weights (vLLM's: 4% in bf16 and NVFP4). Its 90th percentiles of 15 to 21% are made of these.
SGLang's fp8_block on B200 is fitted with Hopper's choice of blocks, which describes rows not fitted better than tiles;
DeepGEMM's own rule for Blackwell is another and was not tried. In vLLM's fp8 on B200 (CUTLASS) every
product of one row, and one short product of twenty, takes over 1.5 times as long as one of more rows: the host was
timed, and such rows are not fitted in any table. SGLang on B200 runs Triton's attention for hybrids of linear
attention, not the kernel fitted here: its rows of heads of 256 take 3.4 times as long at the median for prompts, 1.2
times in decode. TensorRT-LLM's decode in windows was not looked into again.
Latent attention is judged at 16 and 64 heads on a GPU. With FP8 KV vLLM takes less time at 64 heads than at 32 where
sequences are many and short (H100, 1,024 of 129 tokens: 633 and 679 us), which no curve through the other head counts
shows: at 16 it is 2% off at the 90th percentile, at 64 45%. Steps are costed with a fit that has seen all of them.
"""

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
    return f"""Weights (n, k), and batches and heads, that no fit has seen. "below hot": the share of rows that are
predicted over 15% faster than the hot measurement; "above hot + read": over 15% slower than it with a whole read of
the weights or the KV at peak bandwidth. Neither can be, but rows scatter, and no kernel reads at the peak.

{table([*head, "rows"], rows)}"""


def _a40(calibration: Calibration) -> str:
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
    return f"""## A40: PAT's four decode latencies (LLaMA-3.1-8B under SGLang, {PAT_CONTEXT} tokens of context)

{table(["layout", "sequences per replica", "PAT, ms", "rlsim, ms", "error", "role"], rows)}

The kernels alone give the TP2 rows, so no host time is left to fit under SGLang ({calibration.host.step_s * 1e3:.2f} ms
a step); `a40-vllm` has vLLM's from H100.
The two TP8 rows give the 8-GPU all-reduce: {latency * 1e6:.0f} us + bytes / {rate / 1e9:.2f} GB/s, which holds
whatever else TP8 adds on that machine. Prefill attention has no A40 table: its efficiencies are the L40S's.
"""


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
    return f"""## Against sums over Vidur's layers (LLaMA-3-8B decode with LM head, no host time)

Differences, not errors: the sums take A40's linear layers from a third party and, for A40 at TP8, an all-reduce
three times slower than PAT's figures allow; their all-reduce of small messages on A100 and H100 is a noisy floor of
20 to 40 us that CUDA graphs and custom all-reduce do not have.

{table(["GPU", "layout", "points", "mean absolute difference", "median difference"], rows)}
"""


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
    return f"""## Whole engines: host time, fitted through the closed loop

Each measured serving run is repeated on rlsim's own engine in the same closed loop, and the times below are fitted to
TPOT and TTFT of all runs of an engine (`scripts/fit_serving.py`), and once more without each TP. TensorRT-LLM's host
works beside the GPU (the longer of the two counts), the other engines' host after it; vLLM's too since 0.14, whose
kernels the calibrations have (`engine.async_scheduling`). The front end and the delays
belong to the server and its client, not to the engine: rollouts have none of them. How far a fit is off on the setting
that it has not seen is in [validation.md](validation.md). Precision of these runs is not stated; bf16 is assumed.

{table(["engine", "time", "all runs", "95% interval", "fitted without"], rows)}

Not fitted: a client sends its next request {CLIENT_S * 1e3:g} ms after a response (whatever is below the time of a step
makes it miss the iteration that begins at that moment), and SGLang's first tokens come one prefill later, as its code
has it.
"""


def _value(fit: SettingFit, name: str) -> float:
    return float(getattr(fit.host if name in HostFit.model_fields else fit.front_end, name))


def _host_check(measured: list[tuple[str, str, int, float, float]], vllm: HostFit) -> str:
    head = ["GPU's machine", "model", "TP", "per step, ms", "per sequence, ms"]
    rows = [(gpu, model, tp, f"{step * 1e3:.2f}", f"{seq * 1e3:.3f}") for gpu, model, tp, step, seq in measured]
    return f"""## Is it host time? An independent look

Each engine ran one model. What its runs leave over the kernels is taken as host time and carried over to every model
and TP of the engine. That it scales with the sequences, not with the model's layers, is an assumption which those runs
cannot test.
Vidur measured the CPU work of a vLLM-like engine by itself (scheduling, preparing inputs, processing outputs; 2024,
older code): it does grow with the sequences, hardly with the model's size; fitted above for vLLM is
{vllm.step_s * 1e3:.2f} ms + {vllm.sequence_s * 1e3:.3f} ms a sequence. A part of that is not the host's: Qwen3's own
generation settings ask for top-k and top-p sampling, for which this vLLM sorts the logits of its whole vocabulary.

{table(head, rows)}
"""


def _derived() -> str:
    notes = "\n".join(
        f"- {gpu}: {about.note}. Its residuals are those of {about.source}." for gpu, about in derived_gpus().items()
    )
    return f"""## Derived, not measured

{notes}
- **Skew** (share of the padding of unequal contexts that decode attention pays for): no table measures unequal
  contexts; none is taken.
- Chunks of a prompt on top of cached tokens; mixtures of experts where the table above has none; broadcast,
  send/receive inside a node.
- Host time on GPUs other than H100 is H100's of the same engine. Graph capture and control of a layout change are
  PAT's (A40, host-bound) everywhere; creating a communication group (1 s) is an assumption.
"""


def _carried(catalogue: Catalogue) -> str:
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
    return f"""## How far efficiencies carry over

A derived calibration is one GPU's efficiencies on another's data-sheet figures. Done to GPUs that are measured too,
with nothing fitted to them: the same chip with other memory (H100 to H200) is as far off as a fit of its own; a
generation further (A100 to H100, H100 to B200) or another family (A100 to L40S) is not. B300, GB200 and GB300 are of
B200's chip, L20 of L40S's, A800 of A100's, H800, H20 and GH200 of H100's; the RTX PRO 6000 is a generation after its
source. Where the SMs are others, rooflines are carried without tables. Blocks of bf16 products may then have 16 rows:
the fits' least is 64, hidden by the weights' way from memory on every measured GPU, and would make decoding
compute-bound on H20, with an eighth of the FLOPs for its bandwidth. For the same reason a block, of experts or of a
product in another precision, that reaches little of an SM's peak is taken to last as long on an SM with fewer FLOP/s,
and so to reach more of its peak, up to what the best block does. What DeepGEMM's blocks lose to a want of registers
hides behind products that take longer.

{table(["from, to", "engine", "operator", "median", "p90", "bias", "rows"], rows)}

Two derived GPUs were measured by others (alibaba/InferSim@f2293da: DeepGEMM and attention). No
constant is fitted to it, but that registers hide was decided with these rows in view (H20 in fp8_block: 55% off
before).
H20's memory serves decode attention at 83% of its bandwidth where H100's, carried over, reaches 95%. With many query
heads for each KV head H20 is bound by FLOPs there, which the fits (up to {GROUP}) do not know. On H800, H100's chip,
DeepGEMM of SGLang's release loses to a want of registers with many rows what InferSim's does not.

{table(["GPU", "engine", "operator", "median", "p90", "bias", "rows"], there)}
"""


def report(catalogue: Catalogue) -> str:
    """The whole page."""
    made = catalogue.all()
    measured = {name: made[name].residuals for name in sorted(made)}
    parts = [
        INTRO,
        "## Operators on held-out shapes\n\n" + _residuals(measured) + "\n\n" + MISSED,
        "## Against L2-hot rows (not fitted)\n\n" + _hot(catalogue.hot()),
        _a40(made["a40-sglang"]),
        _sums(made, decode_sums(catalogue.data)),
        _serving(shipped_fits()),
        _host_check(cpu_overheads(catalogue.data), shipped_fits().of("vllm").host),
        training_section(catalogue.data, made),
        _derived(),
        across_section(),
        _carried(catalogue),
        kv_section(),
        engine_section(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"

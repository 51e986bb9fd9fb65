"""The page's section on training efficiency."""

from __future__ import annotations

from pathlib import Path

from calibration.gpus import A40_VIDUR, ENGINES, GPUS
from calibration.markdown import table
from calibration.real import CALLS, check_real
from calibration.stacks import Fit, Timing, fit_stacks
from calibration.tables import all_gemms, vidur_layers
from calibration.training import DRIVER_S, LARGE_GEMMS, large_gemm_share
from rlsim.calibrate.importers import vidur
from rlsim.cost.calibration import Calibration, derived_gpus, load_calibration
from rlsim.cost.train_efficiency import TRAFFIC
from rlsim.hardware import load_gpu


def training_section(data: Path, made: dict[str, Calibration]) -> str:
    """The numbers of training stacks, what they are fitted to, and how they do on rows they have not seen."""
    found = fit_stacks(data, gemm_shares(data))
    return f"""## Training efficiency

No backward pass, optimizer or whole training step is in the operator tables. Linear layers take the time of the GPU's
own large products in SGLang's tables ({LARGE_GEMMS}) and that of moving **{TRAFFIC * 1e3:.2f} bytes for every thousand
of their FLOPs** at the data sheet's bandwidth: kernels that are not fused, and gaps between kernels. That one number is
fitted to real runs of veRL and NeMo-RL, for FSDP and Megatron alike; rows of one framework differ by more than the
frameworks do. A GPU with much bandwidth for its FLOPs comes nearer to its peak: H20 to 0.70 of it, L40S to 0.35.

{_gpus(data, made)}

SGLang's tables are used on every GPU, so that the numbers keep their meaning; other engines' tables of the same GPU
give up to 1.4 times as much (L40S), so L40S may train faster than this. A40's GEMMs are Vidur's layers: 4,096 tokens
only, other software. GPUs without tables (H800, GH200, H20) are taken to reach H100's share of peak in large GEMMs.

veRL's trainer hands every call its batch through one process, padded: **{DRIVER_S * 1e6:.2f} us for each token of the
padded batch** (`training.driver_per_token`), which no number of GPUs shortens. NeMo-RL pads to the longest response
there is, and shows no such part.

### Measured runs

Response lengths are drawn from a lognormal with the row's mean, its cap and an assumed spread of 0.7 (DAPO's: 0.8).
Seconds are predicted / measured; NeMo-RL's log-probs are those of policy and reference.

{stacks_table(found)}

- **veRL's machine is not described.** At NVLink's bus rate no number suits both FSDP rows, so a bus rate is fitted
  beside it: {found.bus_bytes_per_s / 1e9:.0f} GB/s, which is PCIe's. The rate takes part in the case without veRL, so
  its rows are not wholly unseen there. Generation of rows 3 and 4, which nothing is fitted to, agrees with PCIe
  ([steps](validation.md)).
- **veRL row 4** (Megatron, micro-batches of 1,000 tokens) is off by half and not fitted: its log has 20 to 36 s in
  every call that no tokens change ([from a run](calibrating-from-a-run.md)), and ring collectives at a bus rate leave
  out what many small messages cost.
- **On H20 no row states its mean response**: 1,024 tokens are assumed for all. The run on 32 GPUs grew longer than the
  others (its steps 200 to 400 took twice as long as those before), so the rows scatter around the fit.
- Row 22 (a mixture of experts) states no lengths. Nothing here is checked on L40S, H200, A40, GH200 or H800.

{_real_section(made["h100-sxm-sglang"].training.flop_efficiency["megatron"])}
"""


def _real_section(real: float) -> str:
    return f"""### REAL's calls

The same on H100 (efficiency {real:.2f}) against the {len(CALLS)} times per call that REAL publishes for
7B actors and critics, nothing fitted. The model spreads layouts further apart than the measurements do: tensor
parallelism over 8 comes out too fast, a pipeline of 4 stages too slow. Do not compare training layouts with this model
without a measurement of your own.

{real_table(real)}"""


def _gpus(data: Path, made: dict[str, Calibration]) -> str:
    rows = []
    for gpu in GPUS.values():
        tables = [gpu.training_gemm, *(gpu.gemm(engine) for engine in ENGINES[1:] if engine in gpu.versions)]
        shares = [f"{gemm_share(data, gpu.name, path):.2f}" for path in tables]
        shares += [""] * (len(ENGINES) - len(shares))
        rows.append((gpu.name, *shares, _efficiency(made[f"{gpu.name}-sglang"])))
    a40 = large_gemm_share(vidur.gemm_table(vidur_layers(data, A40_VIDUR)), load_gpu("a40").bf16_flop_per_s)
    rows.append(("a40", f"{a40:.2f} (Vidur)", "", "", _efficiency(made["a40-sglang"])))
    derived = ((gpu, load_calibration(f"{gpu}-sglang")) for gpu in derived_gpus())
    rows += [(gpu, "carried over", "", "", _efficiency(item)) for gpu, item in derived]
    engines = [f"GEMM, {engine}" for engine in ENGINES]
    return table(["GPU", *engines, "training"], rows)


def gemm_shares(data: Path) -> dict[str, float]:
    """What share of its peak each GPU of the measured runs reaches in large GEMMs; H20: taken to be H100's."""
    found = {name: gemm_share(data, name, GPUS[name].training_gemm) for name in ("a100-sxm-80gb", "h100-sxm")}
    return {**found, "h20": found["h100-sxm"]}


def gemm_share(data: Path, gpu: str, table: str) -> float:
    """What share of its peak a GPU's large GEMMs reach in a table."""
    return large_gemm_share(all_gemms(data, table), load_gpu(gpu).bf16_flop_per_s)


def _efficiency(calibration: Calibration) -> str:
    (value,) = set(calibration.training.flop_efficiency.values())
    return f"{value:.3f}"


def _timing(timing: Timing) -> str:
    return f"{timing.predicted_s:.1f} / {timing.measured_s:.1f} ({timing.error:+.0%})"


def stacks_table(found: Fit) -> str:
    """Predicted and measured seconds of the runs, by case."""
    rows = [
        (
            case.title,
            f"{case.traffic * 1e3:.2f}",
            f"{case.driver_s * 1e6:.3f}",
            row.label,
            _timing(log_prob),
            _timing(update),
        )
        for case in found.cases
        for row, log_prob, update in case.rows
    ]
    return table(["case", "bytes / 1000 FLOPs", "driver, us", "row", "log-probs, s", "update, s"], rows)


def real_table(efficiency: float) -> str:
    """Predicted and measured seconds of the calls that REAL publishes."""
    rows = [
        (call.name, "TP{} PP{} DP{}".format(*call.layout), *(_timing(timing) for timing in timings), *[""] * missing)
        for call, timings in check_real(efficiency)
        for missing in (2 - len(timings),)
    ]
    return table(["call", "layout", "s", "with recomputation, s"], rows)

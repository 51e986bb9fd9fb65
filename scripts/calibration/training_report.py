"""The page's section on training efficiency."""

from __future__ import annotations

from pathlib import Path

from calibration.gpus import A40_VIDUR, DERIVED, GPUS
from calibration.markdown import table
from calibration.real import CALLS, check_real
from calibration.tables import all_gemms, training_runs, vidur_layers
from calibration.training import LARGE_GEMMS, SHARES, large_gemm_share
from calibration.verl import Timing, TrainingEfficiencies, fit_training
from rlsim.calibrate.importers import vidur
from rlsim.cost.calibration import Calibration
from rlsim.hardware import load_gpu


def training_section(data: Path, made: dict[str, Calibration]) -> str:
    """Shares, what they are fitted to, and how they do on rows they have not seen."""
    found = fit_training(training_runs(data))
    h20 = made["h20-sglang"].training.flop_efficiency["fsdp"]
    nvlink = found.cases[0].efficiency / own_gemm_share(data, "a100-sxm-80gb")
    return f"""## Training efficiency

No backward pass, optimizer or whole training step is in the operator tables. The one free number of the training
model, the share of peak bf16 that the linear layers of a framework reach (gaps between kernels and unfused
elementwise kernels included), is fitted to the step times of real veRL runs on 8xA100/A800:
**fsdp {SHARES["fsdp"].value:.2f}** and **megatron {SHARES["megatron"].value:.2f}** (low confidence) of what the GPU's
own large GEMMs reach in SGLang's tables ({LARGE_GEMMS}).
Each calibration multiplies these shares by its GPU's own large-GEMM share of peak; only the A100's are fitted to a
training run.

{_gpus(data, made)}

SGLang's tables are used on every GPU, so that the shares keep their meaning; other engines' tables of the same GPU
give up to 1.4 times as much (L40S), so L40S may train faster than this. A40's GEMMs are Vidur's layers: 4,096 tokens
only, other software. GPUs without tables (H800, GH200, H20) carry over the H100's shares of peak; H20, with little
compute for its bandwidth, probably reaches more of it.

### Measured veRL steps

Response lengths are drawn from a lognormal with the row's mean, its cap and an assumed spread of 0.7. The logs name no
interconnect. At NVLink's bus rate one efficiency cannot give both FSDP rows, so the bus rate is fitted beside it: two
numbers from four timings of one model on one machine. Seconds are predicted / measured.

{verl_table(found)}

- **The fsdp share rests on the fitted bus rate** of {found.bus_bytes_per_s / 1e9:.0f} GB/s, a guess about that machine.
  Were it NVLink after all, the share would be {nvlink:.2f} and the rows {_spread(found)} off.
  The rate, fitted to both rows, also takes part in the two "alone" cases, so their other row is not wholly unseen.
  From row 2 alone, whose responses are short, row 3 comes out 27% too slow.
- **The megatron share rests on one timing**, the update of row 4. Log-probabilities of the same run come out 44% too
  fast: what slows them there is not in the model.
- **H20: log-probabilities come out 44 to 77% too fast**, and the more so the more GPUs share them. The measured times
  follow 36 s + 2,300 s / GPUs within 3%: a part of half a minute that more GPUs do not shorten is missing in the model.
  Updates are within -28% to +24%, with the mean response, which is not stated, chosen on row 10. These rows use the
  A100's efficiency; with the H20 files' {h20:.2f} they change by four points at most.
- Rows 22, 28 and 29 state neither lengths nor a layout and are not used. Nothing here is checked on L40S, H200, A40,
  GH200 or H800.

{_real_section(made["h100-sxm-sglang"].training.flop_efficiency["megatron"])}
"""


def _real_section(real: float) -> str:
    return f"""### REAL's calls

The same Megatron share on H100 (efficiency {real:.2f}) against the {len(CALLS)} times per call that REAL publishes for
7B actors and critics, nothing fitted. The model spreads layouts further apart than the measurements do: tensor
parallelism over 8 comes out too fast, a pipeline of 4 stages too slow. Do not compare training layouts with this model
without a measurement of your own.

{real_table(real)}"""


def _gpus(data: Path, made: dict[str, Calibration]) -> str:
    rows = []
    for gpu in GPUS.values():
        shares = [f"{own_gemm_share(data, gpu.name, engine):.2f}" for engine in gpu.versions]
        rows.append((gpu.name, *shares, *_efficiencies(made[f"{gpu.name}-sglang"])))
    a40 = large_gemm_share(vidur.gemm_table(vidur_layers(data, A40_VIDUR)), load_gpu("a40").bf16_flop_per_s)
    rows.append(("a40", f"{a40:.2f} (Vidur)", "", "", *_efficiencies(made["a40-sglang"])))
    derived = [item for item in made.values() if item.gpu in DERIVED and item.engine == "sglang"]
    rows += [(item.gpu, "carried over", "", "", *_efficiencies(item)) for item in derived]
    engines = [f"GEMM, {engine}" for engine in next(iter(GPUS.values())).versions]
    return table(["GPU", *engines, *SHARES], rows)


def own_gemm_share(data: Path, gpu: str, engine: str = "sglang") -> float:
    """What share of its peak a GPU's large GEMMs reach in an engine's table."""
    return large_gemm_share(all_gemms(data, GPUS[gpu], engine), load_gpu(gpu).bf16_flop_per_s)


def _efficiencies(calibration: Calibration) -> list[str]:
    return [f"{calibration.training.flop_efficiency[name]:.3f}" for name in SHARES]


def _spread(found: TrainingEfficiencies) -> str:
    """Errors of the case that assumes NVLink."""
    rows = found.cases[0].predictions
    sizes = [abs(timing.error) for item in rows for timing in (item.old_log_prob, item.update_actor)]
    return f"{100 * min(sizes):.0f} to {100 * max(sizes):.0f}%"


def _timing(timing: Timing) -> str:
    return f"{timing.predicted_s:.1f} / {timing.measured_s:.1f} ({timing.error:+.0%})"


def verl_table(found: TrainingEfficiencies) -> str:
    """Predicted and measured seconds of the veRL rows, by case."""
    rows = [
        (
            case.title,
            f"{case.efficiency:.3f}",
            item.label,
            _timing(item.old_log_prob),
            _timing(item.update_actor),
            item.role,
        )
        for case in found.cases
        for item in case.predictions
    ]
    return table(["case", "share of peak", "row", "old_log_prob, s", "update_actor, s", "role"], rows)


def real_table(efficiency: float) -> str:
    """Predicted and measured seconds of the calls that REAL publishes."""
    rows = [
        (call.name, "TP{} PP{} DP{}".format(*call.layout), *(_timing(timing) for timing in timings), *[""] * missing)
        for call, timings in check_real(efficiency)
        for missing in (2 - len(timings),)
    ]
    return table(["call", "layout", "s", "with recomputation, s"], rows)

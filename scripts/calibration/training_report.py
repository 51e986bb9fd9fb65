"""The page's section on training efficiency."""

from __future__ import annotations

from pathlib import Path

from calibration.gpus import A40_VIDUR, ENGINES, GPUS
from calibration.markdown import section, table
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
    efficiency = made["h100-sxm-sglang"].training.flop_efficiency["megatron"]
    return section(
        "training",
        large_gemms=LARGE_GEMMS,
        traffic=TRAFFIC,
        gpus=_gpus(data, made),
        driver_s=DRIVER_S,
        stacks=stacks_table(found),
        bus_bytes_per_s=found.bus_bytes_per_s,
        efficiency=efficiency,
        calls=len(CALLS),
        real=real_table(efficiency),
    )


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

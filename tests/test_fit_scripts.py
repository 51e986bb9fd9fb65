"""The calibration scripts: what is written is what was fitted, and fits find what generated their data."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import DATA, ROOT, needs_data

from evidence.validate.parts import EVIDENCE
from rlsim.cost.calibration import derived_gpus, load_calibration

sys.path.insert(0, str(ROOT / "scripts"))

from calibration.catalogue import GPUS, KEPT, Catalogue, operator_tables
from calibration.host import CLIENT_S, ENGINES, ROUNDS, Serving, _begin
from calibration.training import (
    DRIVER_S,
    Fit,
    expert_balance,
    fit_stacks,
    gemm_shares,
    large_gemm_share,
    left_out_calls,
)

from evidence.validate.coverage import shipped_calls
from evidence.validate.serving import ServingRun, kernels_of, simulate
from evidence.validate.steps import iterations
from evidence.validate.steps_training import training_rows, training_runs
from rlsim.calibrate.fit.attention import DECODE, HEAD_DIM, PROMPTS, decode_rows, usual_groups
from rlsim.calibrate.fit.collectives import fit_collective
from rlsim.calibrate.fit.common import held_out, predict
from rlsim.calibrate.fit.gemm import gemm_rows, kernel_of
from rlsim.calibrate.measurements import residual
from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import Calibration, FrontEndFit, HostFit, Reference, Residual
from rlsim.cost.experts import FusedExperts, expert_load
from rlsim.cost.fits import carried_operators
from rlsim.cost.operators import Operators
from rlsim.cost.strategy import EXPERT_IMBALANCE, EXPERT_LAUNCH_S, TRAFFIC
from rlsim.models.hardware import load_cluster
from rlsim.models.precision import Precision

DERIVED = derived_gpus()


def test_the_scripts_make_every_shipped_calibration_and_no_other() -> None:
    assert sorted([*Catalogue.names(), *KEPT]) == sorted(path.stem for path in (ROOT / "calibration").glob("*.yaml"))


def test_launches_of_a_layer_with_experts_are_those_of_the_published_iteration() -> None:
    (smallest,) = (one for one in iterations() if one.megatron and one.kind == "input")
    assert smallest.simulated_s(EXPERT_LAUNCH_S) == pytest.approx(smallest.iteration_s, rel=2e-3)


@pytest.mark.parametrize("name", ["a40-vllm", "b200-sxm-vllm"])
def test_a_file_read_and_written_again_says_the_same(name: str, tmp_path: Path) -> None:
    write_yaml(load_calibration(name), tmp_path)
    assert load_calibration(tmp_path / f"{name}.yaml") == load_calibration(name)


@pytest.mark.parametrize("gpu", ["h20", "gb200", "h800-sxm"])
def test_a_derived_gpu_has_its_own_figures_and_says_whose_kernels(gpu: str) -> None:
    row = DERIVED[gpu]
    own = Reference.of(load_cluster(row.cluster))
    for engine in row.engines:
        source, derived = load_calibration(f"{row.source}-{engine}"), load_calibration(f"{gpu}-{engine}")
        assert (derived.name, derived.gpu, derived.engine) == (f"{gpu}-{engine}", gpu, engine)
        assert derived.provenance.notes == (f"derived from {source.name}: {row.note}", *source.provenance.notes)
        assert derived.reference == own.model_copy(update={"link_bytes_per_s": source.reference.link_bytes_per_s})
        assert (derived.collectives, derived.host) == (source.collectives, source.host)
        assert (derived.operators == source.operators) == (own.sm_count == source.reference.sm_count)
        assert all(f"of {row.source}; not measured on {gpu}" in item.note for item in derived.residuals.values())


def test_blocks_last_as_long_on_sms_with_fewer_flops() -> None:
    """Up to the share of the peak that the best block or large products reach, and no more than the peak where a block
    that never bound has any share on H100; on faster SMs shares stay what they are."""
    source, h20 = load_calibration("h100-vllm"), load_calibration("h20-vllm")
    slower = (989.4e12 / 132) / (148e12 / 78)
    few_rows = 0
    for precision, fit in source.operators.experts.items():
        best = min(1.0, max(0.94, *(share for name, share in fit.efficiency.items() if name != "memory")))
        after = h20.operators.experts[precision].efficiency
        assert after["memory"] == fit.efficiency["memory"]
        for name, before in fit.efficiency.items():
            if name != "memory":
                assert after[name] == pytest.approx(min(before * slower, best), rel=1e-3)
                few_rows += after[name] > 1.5 * before
    assert few_rows >= 3
    blackwell, gb200 = load_calibration("b200-vllm"), load_calibration("gb200-vllm")
    for precision, fit in blackwell.operators.experts.items():
        capped = {name: share if name == "memory" else min(share, 1.0) for name, share in fit.efficiency.items()}
        assert gb200.operators.experts[precision].efficiency == capped
    # Masked pairs of SGLang's kernel for heads of 256 take as long on H20, not 6.7 times.
    h100, slow = (load_calibration(f"{gpu}-sglang") for gpu in ("h100", "h20"))
    masked = [one.operators.prefill_attention.windows[256].added_s["masked"] for one in (h100, slow)]
    assert masked[1] == pytest.approx(masked[0] / slower, rel=1e-3)


def test_large_batches_of_experts_on_h20_take_what_was_measured() -> None:
    """Both products of 128 experts, 8 of a token, 4,096 to 1,536, by DeepGEMM (InferSim); here with all between."""
    for engine in ("vllm", "sglang"):
        calibration = load_calibration(f"h20-{engine}")
        operators = Operators(calibration.operators, calibration.reference)
        for tokens, seconds in ((4096, 5.620e-3), (8192, 10.178e-3), (32768, 38.227e-3)):
            found = operators.experts_s(expert_load(tokens, 128, 8), 4096, 1536, "fp8_block")
            assert found == pytest.approx(1.1 * seconds, rel=0.1)


def test_decoding_a_mixture_on_h20_is_bound_by_its_memory() -> None:
    """Experts of Qwen3-235B-A22B at TP4: with 148 TFLOP/s for 4 TB/s, blocks of 16 rows have FLOPs enough."""
    calibration = load_calibration("h20-vllm")
    operators, load = Operators(calibration.operators, calibration.reference), expert_load(16, 128, 8)
    # MXFP4 is a quarter of bf16's bytes for as many FLOPs.
    most: dict[Precision, float] = {"bf16": 1.5, "fp8_block": 2.1, "mxfp4": 3.5}
    for precision, times in most.items():
        fit = calibration.operators.experts[precision]
        read = FusedExperts(fit, calibration.reference, precision).weight_bytes(load, 4096, 384) / 4e12
        assert read < operators.experts_s(load, 4096, 384, precision) - fit.launch_s < times * read, precision


def usual(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    return usual_groups(table[table.head_dim == HEAD_DIM], operator)


def carried_errors(data: Path, source: Calibration, target: str) -> dict[str, Residual]:
    """Errors of `source`'s kernels on `target`'s data-sheet figures, by operator, on rows that L2 does not hold.

    Nothing of the target is fitted, so every such row counts.
    """
    gpu, engine = GPUS[target], source.engine
    ref = Reference.of(load_cluster(gpu.cluster))
    fits, measured = carried_operators(source.operators, source.reference, ref), operator_tables(data, gpu, engine)
    gemms = measured.table("gemm")
    rows = {
        kernel_of("bf16"): gemms[~gemm_rows(gemms, ref).hot],
        DECODE: usual(measured.table("decode_attention"), "decode_attention"),
        PROMPTS: usual(measured.table("prefill_attention"), "prefill_attention"),
    }
    rows[DECODE] = rows[DECODE][decode_rows(rows[DECODE], ref).streamed]
    return {
        kernel.operator: residual(predict(kernel, getattr(fits, kernel.operator), ref, some), some.seconds, {})
        for kernel, some in rows.items()
    }


@needs_data
@pytest.mark.ci
def test_efficiencies_carry_over_to_the_same_chip_and_less_to_the_next() -> None:
    """What the page says of derived calibrations; nothing of the target is fitted."""
    source = load_calibration("h100-vllm")
    near, far = (carried_errors(DATA, source, target) for target in ("h200-sxm", "b200-sxm"))
    assert all(item.median <= 0.05 for item in near.values())
    assert all(far[name].median > item.median for name, item in near.items())
    assert near.keys() == {"gemm", "decode_attention", "prefill_attention"}


# Training -------------------------------------------------------------------------------------------------------------


def test_large_gemm_share_is_the_median_of_large_products() -> None:
    shapes = [(4096, 4096, 4096, 0.5), (8192, 4096, 8192, 0.6), (4096, 3584, 3584, 0.7)]
    small = [(2048, 4096, 4096, 0.1), (4096, 1024, 4096, 0.1), (4096, 4096, 1024, 0.1), (4096, 128256, 4096, 0.9)]
    rows = [(m, n, k, 2.0 * m * n * k / (1e15 * share)) for m, n, k, share in shapes + small]
    table = pd.DataFrame(rows, columns=["m", "n", "k", "seconds"])
    assert large_gemm_share(table, 1e15) == pytest.approx(0.6)


@pytest.fixture(scope="module")
def stacks() -> Fit:
    return fit_stacks(DATA, gemm_shares(DATA))


@needs_data
@pytest.mark.ci
def test_the_numbers_of_training_stacks_are_what_the_runs_give(stacks: Fit) -> None:
    assert stacks.traffic == pytest.approx(TRAFFIC, abs=0.01e-3)
    assert stacks.drivers["all"] == pytest.approx(DRIVER_S, abs=0.001e-6)
    assert stacks.bus_bytes_per_s == 18e9
    assert expert_balance() == pytest.approx(EXPERT_IMBALANCE, abs=0.01)


@needs_data
@pytest.mark.ci
def test_quoted_errors_of_runs_left_out(stacks: Fit) -> None:
    """The percentages that the calibrations and docs/costs.md quote, and those of the file of left-out calls."""
    left_out = [row for case in stacks.cases if case.title.startswith("without") for row in case.rows]
    errors = [both[index].error for row, *both in left_out for index in row.fits]
    assert (min(errors), max(errors)) == (pytest.approx(-0.06, abs=0.005), pytest.approx(0.10, abs=0.005))
    (row4,) = next(case.rows for case in stacks.cases if case.title == "never fitted")
    assert [timing.error for timing in row4[1:]] == pytest.approx([-0.59, -0.46], abs=0.005)
    h20 = [row.error for row in training_rows(EVIDENCE) if "/h20/" in row.case and "-moe" not in row.case]
    assert (min(h20), max(h20)) == (pytest.approx(-0.20, abs=0.01), pytest.approx(0.083, abs=0.005))


def test_mean_responses_that_no_run_states_are_what_their_counter_implies() -> None:
    runs = [run for run in training_runs() if run.update_actor_s and run.kind == "input"]
    for model in ("qwen2.5-7b", "qwen3-30b-a3b"):
        own = [run for run in runs if run.model == model and (run.backend == "megatron" or not run.mixture)]
        own += [run for run in training_runs() if run.group == f"{model}/h100" and not run.fused_rope]
        by_mfu = [1 / (run.mfu * load_cluster(run.cluster).gpus) for run in own]
        slope, _ = np.polyfit(by_mfu, [run.update_actor_s for run in own], 1)  # a batch's FLOPs over one GPU's peak
        assert slope == pytest.approx(own[0].counted_s / by_mfu[0], rel=0.01), model
    (run,) = (run for run in training_runs() if run.prompts == 64)
    assert run.counted_s == pytest.approx(run.update_actor_s, rel=0.01)


@needs_data
@pytest.mark.ci
def test_shipped_errors_of_calls_are_what_the_fits_give(stacks: Fit) -> None:
    made, shipped = left_out_calls(stacks.cases), shipped_calls()
    assert [group.runs for group in made.left_out] == [group.runs for group in shipped.left_out]
    for found, known in zip(made.left_out, shipped.left_out, strict=True):
        assert found.errors == pytest.approx(known.errors, rel=1e-3)


# Fits -----------------------------------------------------------------------------------------------------------------


def test_held_out_is_a_fixed_quarter_of_the_keys() -> None:
    keys = pd.Series(np.repeat([f"shape {i}" for i in range(100)], 3))
    chosen = held_out(keys)
    assert chosen.sum() == 75
    assert keys[chosen].nunique() == 25
    assert (chosen == held_out(keys)).all()
    found = residual([1.1, 0.9, 1.2], [1.0, 1.0, 1.0], {"x": np.array([3.0, 1.0, 2.0])})
    assert (found.count, found.ranges) == (3, {"x": (1.0, 3.0)})
    assert (found.median, found.bias) == (pytest.approx(0.1), pytest.approx(0.1))


def test_collective_knots_follow_latency_and_rate() -> None:
    sizes = 2.0 ** np.arange(9, 30)
    times = 1e-5 + sizes / 100e9
    fit = fit_collective(pd.DataFrame({"bytes": sizes, "seconds": times}))
    shown = np.exp(np.interp(np.log(sizes), np.log(fit.message_bytes), np.log(fit.time_s)))
    assert np.abs(shown / times - 1).max() < 0.1
    assert fit.time_s[0] == pytest.approx(1e-5, rel=0.01)
    assert fit.time_s[-1] == pytest.approx(times[-1], rel=0.01)


class Serial:
    """A pool of no processes."""

    def map(self, work: Callable[..., Any], tasks: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        return map(work, tasks)


def serving_run(tp: int, users: int) -> ServingRun:
    sizes = {"tp": tp, "prompt_tokens": 512, "response_tokens": 32, "concurrency": users, "ttft_ms": 1, "tpot_ms": 1}
    return ServingRun.model_validate({"engine": "vllm", "model": "qwen3-32b", "gpu": "h100-sxm", **sizes})


def test_host_fit_finds_what_made_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that the closed loop itself made: the same host time comes back, from two settings or from one."""
    monkeypatch.setitem(ENGINES["vllm"], "terms", {"step_s": 3e-4, "sequence_s": 5e-5})
    monkeypatch.setitem(ENGINES["vllm"], "ablations", {"host time per step": ("step_s",)})
    calibration = load_calibration("h100-vllm")
    _begin({"vllm": calibration})
    host = HostFit(step_s=1e-3, sequence_s=8e-5, source="test")
    runs = []
    for tp in (2, 8):
        for users in (2, 16, 48):
            run = serving_run(tp, users)
            bare = kernels_of(calibration, run)
            served = simulate(run, bare, host, FrontEndFit(client_s=CLIENT_S), ROUNDS)
            times = {"ttft_ms": served.ttft_s * 1e3, "tpot_ms": served.tpot_s * 1e3}
            runs.append(run.model_copy(update=times))
    serving = Serving("vllm", runs, Serial())  # type: ignore[arg-type]
    for left_out in ("", "vllm/qwen3-32b/tp8"):
        found = serving.fit(left_out)
        assert found.host.step_s == pytest.approx(1e-3, rel=0.05)
        assert found.host.sequence_s == pytest.approx(8e-5, rel=0.05)
        low, high = found.intervals["sequence_s"]
        assert low <= found.host.sequence_s <= high
    without = serving.fit("vllm/qwen3-32b/tp8", "host time per step")
    assert without.host.step_s == 0.0
    assert "step_s" not in without.intervals

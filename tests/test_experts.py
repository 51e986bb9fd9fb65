"""Mixtures of experts: who gets which tokens, the fused kernel, and replicas that deal experts to GPUs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import KERNELS, TINY, needs_data
from hypothesis import given
from hypothesis import strategies as st

import rlsim
from rlsim.calibrate.fit.experts import LEFT_OUT, calls_of, kernel_exchange, kernel_experts
from rlsim.calibrate.importers.experts import W4A8, _balanced, _power_law, _serves_gpt_oss, exchanges, experts
from rlsim.cost.calibration import HostFit, Reference, load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.experts import BLOCK_ROWS, ExpertLoad, FusedExperts, expert_load
from rlsim.cost.fits import Correction, ExpertsFit
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.memory import rollout_memory
from rlsim.cost.operators import Operators
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.step import Chunk
from rlsim.errors import CalibrationError, CapacityError, ConfigError, RlsimError
from rlsim.frameworks.draft import Draft
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from tests.test_frameworks import nemo, verl

MODEL, DENSE = load_model("qwen3-30b-a3b"), load_model("qwen3-8b")
NODE, NODES = load_cluster("8xh100"), load_cluster("4x8xh100")
CALIBRATION = load_calibration("h100-sglang")
NODE_REFERENCE = CALIBRATION.reference
ALL_EIGHT = ReplicaLayout(ep=8)
IN_GROUPS = ReplicaLayout(ep=8, attention_dp=8)

#: One SM of 1 FLOP/s for each of 2 · 16 · 10 FLOPs in a block, memory of 1 byte/s.
REF = Reference(
    bf16_flop_per_s=1e6,
    fp8_flop_per_s=2e6,
    fp4_flop_per_s=6e6,
    memory_bytes_per_s=1e3,
    sm_count=1,
    l2_bytes=1.0,
    link_bytes_per_s=1e3,
)


ADDED = ("rows", "rows_hidden", "rows_width", "selections", "selections_hidden", "selections_width", "tokens_hidden")


def fit(added: dict[str, float] | None = None, **changes: object) -> ExpertsFit:
    plain = {
        "kernel": "made up",
        "launch_s": 0.5,
        "efficiency": {"rows_16": 1.0, "memory": 0.5},
        "added_s": {**dict.fromkeys((*ADDED, "experts"), 0.0), "parallel": 0.25, **(added or {})},
        "block_rows": (16,),
    }
    return ExpertsFit.model_validate({**plain, **changes})


def load(rows: float, hit: float, *, experts: float = 4, tokens: float = 8, parallel: float = 0.0) -> ExpertLoad:
    blocks = tuple(hit * math.ceil(rows / hit / size) for size in BLOCK_ROWS)
    return ExpertLoad(2 * tokens, tokens, rows, hit, experts, parallel, 0.0, blocks)


# Loads ----------------------------------------------------------------------------------------------------------------


def test_balanced_experts_hit_their_share_of_every_gpu() -> None:
    for tokens in (1, 7, 500):
        whole, eighth = (expert_load(tokens, 128, 8, ep) for ep in (1, 8))
        assert whole.hit == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens))
        assert eighth.hit == pytest.approx(whole.hit / 8)
        assert eighth.rows == pytest.approx(tokens)  # of 8 choices each, an eighth of the experts
        assert (eighth.experts, eighth.selections, whole.parallel, eighth.parallel) == (16, 8 * tokens, 0, 1)


@given(st.integers(1, 5000), st.sampled_from([1, 2, 8, 32]), st.floats(0, 3))
def test_a_popular_expert_makes_one_gpu_busier_and_fewer_experts_hit(tokens: int, ep: int, exponent: float) -> None:
    even, skewed = expert_load(tokens, 128, 8, ep), expert_load(tokens, 128, 8, ep, exponent)
    assert skewed.rows >= even.rows * (1 - 1e-9)
    assert expert_load(tokens, 128, 8, 1, exponent).rows == pytest.approx(8 * tokens)
    assert expert_load(tokens, 128, 8, 1, exponent).hit <= expert_load(tokens, 128, 8).hit * (1 + 1e-9)


@pytest.mark.parametrize("ep", [1, 8])
def test_popularity_nears_equal_shares_without_a_jump(ep: int) -> None:
    even, almost = expert_load(64, 128, 8, ep), expert_load(64, 128, 8, ep, 1e-9)
    assert (almost.rows, almost.hit) == pytest.approx((even.rows, even.hit), rel=1e-8)
    assert almost.blocks == pytest.approx(even.blocks, rel=1e-8)


# The kernel -----------------------------------------------------------------------------------------------------------


BLEND = 3.0


def both(compute_s: float, memory_s: float) -> float:
    return (compute_s**BLEND + memory_s**BLEND) ** (1 / BLEND)


def test_seconds_by_hand() -> None:
    # gate-up: 2 hit experts · 1 block of 16 rows · ceil(200 / 128) columns = 4 blocks of 2 · 16 · 128 · 30 FLOPs;
    # down: 2 · 1 · 1 blocks of 2 · 16 · 128 · 100
    compute = (4 * 30 + 2 * 100) * 4096 / 1e6
    memory = 3 * 30 * 100 * 2 * 2.0 / 500.0
    kernel = FusedExperts(fit(), REF, "bf16")
    assert kernel(load(10, 2), 30, 100) == pytest.approx(0.5 + both(compute, memory))
    assert kernel(load(10, 2, parallel=1.0), 30, 100) == pytest.approx(0.75 + both(compute, memory))
    amounts = (10, 10 * 0.06, 10 * 0.2, 16, 16 * 0.06, 16 * 0.2, 8 * 0.06)  # 2 bytes of 30 and of 100 at 1000 byte/s
    for name, amount in zip(ADDED, amounts, strict=True):
        more = FusedExperts(fit({name: 3.0}), REF, "bf16")(load(10, 2), 30, 100)
        assert more == pytest.approx(0.5 + both(compute, memory) + 3.0 * amount)
    half = FusedExperts(fit(), REF, "fp8")(load(10, 2), 30, 100)
    assert half == pytest.approx(0.5 + both(compute, memory) / 2)
    quarter = FusedExperts(fit(), REF, "nvfp4")(load(10, 2), 30, 100)
    assert quarter == pytest.approx(0.5 + both(compute / 6, memory * 9 / 32))
    for rate, speed in ((None, 1), ("fp8", 2)):  # MXFP4 is multiplied in bf16, or in fp8 by kernels with MXFP8
        kernel = FusedExperts(fit(multiplied_in=rate), REF, "mxfp4")
        assert kernel(load(10, 2), 30, 100) == pytest.approx(0.5 + both(compute / speed, memory * 17 / 64))


@pytest.mark.parametrize(("experts", "hit", "factor"), [(4, 4, 1.0), (4, 2, 2.0), (8, 2, 2.0), (2, 2, 2.0)])
def test_a_table_is_looked_up_at_the_rows_of_an_expert_that_has_any(experts: int, hit: int, factor: float) -> None:
    """8 rows over 4 experts are 2 each, over 2 of however many 4 each: twice as long as the roofline says."""
    table = Correction(axes={"rows": [2, 4], "width": [1], "bytes": [1], "popularity": [1]}, factor=[1.0, 2.0])
    plain, kernel = (FusedExperts(fit(launch_s=0.0, table=one), REF, "bf16") for one in (None, table))
    call = load(8, hit, experts=experts)
    assert kernel(call, 10, 10) == pytest.approx(factor * plain(call, 10, 10))


def test_default_blocks_where_none_are_tuned() -> None:
    shares = {"rows_16": 1.0, "default_16": 0.5, "default_64": 0.25, "memory": 1.0}
    of_blocks = fit(efficiency=shares, default_blocks=((16, 128), (64, 128)), tuned=((4, 100),))
    default = FusedExperts(of_blocks, REF.model_copy(update={"memory_bytes_per_s": 1e9}), "bf16")
    compute = (4 * 30 + 2 * 100) * 4096 / 1e6
    for held, times in ((4, 1), (8, 2), (5, 16)):  # five: more tokens than experts
        assert default(load(10, 2, experts=held), 30, 100) == pytest.approx(0.5 + times * compute, rel=0.01)


@pytest.mark.parametrize(("tokens", "which"), [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2), (900, 2)])
def test_blocks_that_follow_from_the_mean_rows_of_an_expert(tokens: float, which: int) -> None:
    rows = (8, 16, 32)  # of two selections a token, over four experts
    by_mean, alone = (FusedExperts(fit(block_rows=own), REF, "bf16") for own in (rows, rows[which : which + 1]))
    call = load(40, 2, tokens=tokens)
    found, own = (kernel.work(call, 30, 10).resources for kernel in (by_mean, alone))
    assert {name: seconds for name, seconds in found.items() if seconds} == own


# Replicas -------------------------------------------------------------------------------------------------------------


def test_groups_share_the_sequences_and_have_pages_of_their_own() -> None:
    plain = rollout_memory(MODEL, NODE.gpu, 8)
    grouped = rollout_memory(MODEL, NODE.gpu, 8, layout=IN_GROUPS)
    assert grouped.page_bytes == 4 * plain.page_bytes  # all four KV heads instead of one
    assert grouped.pages % 8 == 0
    assert grouped.kv_bytes < 0.9 * NODE.gpu.memory_bytes
    # replicated KV heads: 8 GPUs of TP hold each KV head twice, groups hold every token once
    assert grouped.capacity_tokens == pytest.approx(2 * plain.capacity_tokens, rel=0.2)
    with pytest.raises(CapacityError, match="TP 1, EP 8, DP of attention 8"):
        rollout_memory(MODEL, NODE.gpu, 8, layout=IN_GROUPS, min_tokens=plain.capacity_tokens)


def test_a_step_of_groups_by_its_parts() -> None:
    step, batch = RooflineStep(MODEL, 8, NODE, CALIBRATION, IN_GROUPS), 61  # 8 sequences of the fullest group
    alone = RooflineStep(MODEL, 1, NODE, CALIBRATION)
    parts, one = step.breakdown(batch, 61_000), alone.breakdown(8, 8_000)
    assert parts["attention"] == pytest.approx(one["attention"])
    assert parts["all_reduce"] == 0.0
    assert step.decode(batch).step_s(61_000) == pytest.approx(sum(parts.values()))
    exchange = Collectives(CALIBRATION.collectives, CALIBRATION.reference, NODE).exchange_s(8, 8, 4096, 8)
    assert parts["exchange"] == pytest.approx(48 * exchange)
    chunks = ReplicaLayout(ep=8, attention_dp=2)
    assert RooflineStep(MODEL, 8, NODE, CALIBRATION, chunks).breakdown(16, 16_000)["exchange"] > 0
    layout = ReplicaLayout(ep=4, attention_dp=2)
    parts = RooflineStep(MODEL, 8, NODE, CALIBRATION, layout).breakdown(100, 1e5)
    links = Collectives(CALIBRATION.collectives, CALIBRATION.reference, NODE)
    both = sum(links.time_s(op, 100 * 4096, 8) for op in ("all_gather", "reduce_scatter"))
    assert parts["exchange"] == pytest.approx(48 * both)
    assert parts["all_reduce"] == pytest.approx(49 * links.time_s("all_reduce", 50 * 4096, 4))


@pytest.mark.parametrize(
    ("settings", "rounds", "own"),
    [
        pytest.param({}, 1, 8, id="plain"),
        pytest.param({"sampling_s_per_logit": 1e-30}, 1, 8, id="sampling"),
        pytest.param({"largest_graph": 0}, 1, 8, id="no graphs"),
        pytest.param({"pp": 2}, 2, 4, id="two micro-batches of 31 sequences"),
    ],
)
def test_each_group_has_a_host_process_of_its_own(settings: dict[str, Any], rounds: int, own: int) -> None:
    """A host that takes 10 s a sequence: however the kernels are priced, a group waits for its own sequences alone."""
    host = HostFit(step_s=0.0, sequence_s=10.0, overlapped=True, source="test")
    calibration = CALIBRATION.model_copy(update={"host": host})
    step = step_cost(MODEL, 8, NODES, calibration, pp=settings.pop("pp", 1), layout=IN_GROUPS, **settings)
    assert step.decode(61).step_s(61_000) == pytest.approx(rounds * own * 10.0)
    assert step.prefill_s([Chunk(10, 0)] * 61) == pytest.approx(rounds * own * 10.0)


def test_tensor_parallelism_over_nodes_uses_the_links_between_them() -> None:
    one, two = (RooflineStep(MODEL, tp, NODES, CALIBRATION) for tp in (4, 16))
    with pytest.raises(ConfigError, match="TP 12 does not divide"):
        RooflineStep(MODEL, 12, NODES, CALIBRATION)
    with pytest.raises(CapacityError, match="TP 64 exceeds the 32 GPUs"):
        RooflineStep(load_model("llama-3-70b"), 64, NODES, CALIBRATION)
    two.decode(16), one.decode(16)
    assert "all_reduce across nodes" in two.lookups().examples
    assert "all_reduce across nodes" not in one.lookups().examples
    assert two.breakdown(16, 16_000)["all_reduce"] > one.breakdown(16, 16_000)["all_reduce"]


def test_layouts_that_cannot_be_are_one_clear_message() -> None:
    for layout, model, gpus, message in (
        (ReplicaLayout(ep=3), MODEL, 8, "engine.ep 3 does not divide the 8 GPUs of a replica"),
        (ReplicaLayout(attention_dp=16), MODEL, 8, "engine.data_parallel_attention 16 does not divide the 8 GPUs"),
        (ReplicaLayout(ep=256), MODEL, 256, "engine.ep 256 does not divide the 128 experts of qwen3-30b-a3b"),
        (ALL_EIGHT, DENSE, 8, "engine.ep 8: qwen3-8b has no experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            layout.check(model, gpus)
    costs = RolloutCostModel(MODEL, NODE, CALIBRATION, layout=ALL_EIGHT)
    with pytest.raises(ConfigError, match="TP 8 cannot become TP 4 during a run"):
        costs.switch(8, 8, 4, [], 8, "migrate", first_use=False)
    assert costs.feasible_tps(1000)[0] == (8,)


# The collector's routings ---------------------------------------------------------------------------------------------


def test_the_balanced_routing_is_even_and_a_power_law_gives_every_choice_to_some_expert() -> None:
    assert _balanced(128, 128, 8, False).tolist() == [8.0] * 128
    assert _balanced(1, 128, 8, False).nonzero()[0].tolist() == [16 * i for i in range(8)]
    grouped = _balanced(256, 256, 8, True)  # half of the choices fall on the first experts of the first group
    assert grouped.sum() == 2048
    assert grouped[:4].tolist() == [256.0] * 4
    assert not grouped[128:].any()
    for tokens in (1, 16, 4096):
        counts = _power_law(tokens, 128, 8, 1, 1.2, np.random.default_rng(1))
        assert counts.sum() == 8 * tokens
        assert counts.max() <= tokens
        busiest = _power_law(tokens, 128, 8, 8, 1.2, np.random.default_rng(1))
        assert len(busiest) == 16
        assert busiest.sum() >= tokens


def test_only_kernels_that_engines_run_for_gpt_oss_count_as_mxfp4() -> None:
    triton, trtllm = "sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"
    monolithic = "vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic"
    w4a16 = "w4a16_mxfp4"
    assert [_serves_gpt_oss(w4a16, triton, ep) for ep in (1, 2)] == [False, True]
    assert [_serves_gpt_oss(dtype, trtllm, 1) for dtype in (w4a16, W4A8)] == [False, True]
    assert _serves_gpt_oss(w4a16, monolithic, 1)
    assert not _serves_gpt_oss(w4a16, "vllm_compressedtensorsw4a4mxfp4moe_marlin_marlinexperts", 1)
    assert not _serves_gpt_oss(w4a16, "sglang_marlin_moe_situ_as_silu", 1)


def test_sglang_serves_gpt_oss_on_one_hopper_with_the_kernels_that_vllm_runs() -> None:
    """The weights of its 128 experts take 0.4 ms from H100's memory in MXFP4; as bf16 they took 2.2 ms."""
    sglang, vllm = (load_calibration(f"h100-{engine}").operators for engine in ("sglang", "vllm"))
    assert sglang.experts["mxfp4"] == vllm.experts["mxfp4"]
    assert sglang.parallel_experts["mxfp4"].kernel == "triton"
    assert any("triton_kernels" in note for note in CALIBRATION.provenance.notes)
    assert CALIBRATION.residuals["experts_mxfp4"].note.startswith("of h100-sxm-vllm, not measured here")
    time_s = FusedExperts(sglang.experts["mxfp4"], CALIBRATION.reference, "mxfp4")(expert_load(128, 128, 4), 2880, 2880)
    assert 3 * 128 * 2880**2 * 17 / 32 / CALIBRATION.reference.memory_bytes_per_s < time_s < 0.9e-3


def test_experts_by_a_kernel_that_the_engine_is_told_to_take() -> None:
    """Marlin takes less of the peak for prompts of gpt-oss than Triton's kernels; decodes take about as long."""
    vllm = load_calibration("h100-vllm")
    told = vllm.with_experts("marlin")
    assert vllm.with_experts(None) is vllm
    assert told.operators.experts["bf16"] == vllm.operators.experts["bf16"]
    assert told.operators.parallel_experts["mxfp4"].kernel == "marlin"
    kernels = [FusedExperts(one.operators.experts["mxfp4"], vllm.reference, "mxfp4") for one in (vllm, told)]
    ratios = [np.divide(*(kernel(expert_load(n, 128, 4), 2880, 2880) for kernel in kernels)) for n in (8192, 64)]
    assert ratios[0] < 0.5
    assert 0.9 < ratios[1] < 1.2
    with pytest.raises(CalibrationError, match="has no 'triton'; one of: marlin, deep_gemm"):
        vllm.with_experts("triton")
    with pytest.raises(CalibrationError, match="none beside the engine's own choice, so leave it out"):
        load_calibration("h100-sglang").with_experts("marlin")


def test_vllm_on_blackwell_keeps_activations_of_gpt_oss_in_bf16_unless_told() -> None:
    """Its own table: 3 ms for 8,192 tokens; the kernel on MXFP8 takes 0.8, as under SGLang."""
    vllm, sglang = (load_calibration(f"b200-{engine}") for engine in ("vllm", "sglang"))
    told = vllm.with_experts("flashinfer_trtllm_mxfp8").operators
    assert vllm.operators.experts["mxfp4"].multiplied_in is None
    assert told.experts["mxfp4"] == sglang.operators.experts["mxfp4"]
    kernels = [FusedExperts(one.experts["mxfp4"], vllm.reference, "mxfp4") for one in (vllm.operators, told)]
    ratios = [np.divide(*(kernel(expert_load(n, 128, 4), 2880, 2880) for kernel in kernels)) for n in (8192, 64)]
    assert 2.8 < ratios[0] < 3.8
    assert 1.1 < ratios[1] < 1.7
    assert kernels[0](expert_load(8192, 128, 4), 2880, 2880) == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize(("engine", "lender"), [("h200-trtllm", "h200-vllm"), ("a100-vllm", "h100-vllm")])
def test_experts_that_were_not_measured_are_lent(engine: str, lender: str) -> None:
    """By vLLM on the same GPU, or else on H100: at its efficiencies, and on this GPU's own figures."""
    calibration, lent = load_calibration(engine), load_calibration(lender).operators
    cost = step_cost(MODEL, 1, load_cluster(f"8x{engine.partition('-')[0]}"), calibration)
    roofline = cost.parts[0] if cost.parts else cost
    assert isinstance(roofline, RooflineStep)
    kernel = FusedExperts(lent.experts["bf16"], calibration.reference, "bf16")
    load = expert_load(512, 128, 8)
    assert roofline.operators.experts_s(load, 2048, 768) == kernel(load, 2048, 768)
    cost.decode(512)
    (said,) = [line for line in cost.lookups().note() if "experts_bf16" in line]
    assert "at the efficiencies of another precision, engine or GPU" in said


def test_experts_in_a_precision_that_was_not_measured_reach_the_efficiency_of_bf16() -> None:
    fits = load_calibration("h100-vllm").operators
    operators, load = Operators(fits, NODE_REFERENCE), expert_load(20_000, 128, 8)
    assert "fp8" not in fits.experts
    fp8_s, bf16_s = (operators.experts_s(load, 4096, 1536, name) for name in ("fp8", "bf16"))
    assert fp8_s == FusedExperts(fits.experts["bf16"], NODE_REFERENCE, "fp8")(load, 4096, 1536)
    assert 0.5 < fp8_s / bf16_s < 0.7


def test_kernels_that_trtllm_lacks_are_lent_so_that_it_serves_gpt_oss_and_deepseek() -> None:
    gpt_oss, deepseek = load_model("gpt-oss-120b"), load_model("deepseek-v3").served("fp8_block", "fp8")
    for model, tp in ((gpt_oss, 1), (deepseek, 8)):
        ours, theirs = (step_cost(model, tp, load_cluster("8xh200"), f"h200-{engine}") for engine in ("trtllm", "vllm"))
        assert 0.5 < ours.decode(64).step_s(64e3) / theirs.decode(64).step_s(64e3) < 2
    with pytest.raises(CalibrationError, match=r"latent attention \(MLA\) is not in this calibration"):
        step_cost(load_model("deepseek-v3"), 8, load_cluster("8xa100"), "a100-vllm")  # H100's says nothing of it


def test_deep_gemm_has_a_block_for_every_expert() -> None:
    """Both products of 256 experts of DeepSeek-V3 on one H800, and of the 64 and 16 on one of 4 and 16 (InferSim)."""
    h800 = load_calibration("h800-vllm").with_experts("deep_gemm")
    fit = h800.operators.experts["fp8_block"].model_copy(update={"launch_s": 1e-5, "added_s": {}})
    kernel = FusedExperts(fit, h800.reference, "fp8_block")
    for here, rows, seconds in ((256, 128, 5.240e-3), (64, 512, 2.857e-3), (16, 2048, 2.332e-3)):
        load = expert_load(rows * here / 8, here, 8)
        full = load._replace(rows=load.rows - here * 127)  # no row of a block is empty there
        assert kernel(full, 7168, 2048) == pytest.approx(seconds, rel=0.15)
    few, some, many = (kernel(expert_load(n, 128, 8), 4096, 768) for n in (1, 16, 2048))
    assert few < some < 1.6 * few < many  # the more experts are read, not the more rows


# Measured tables ------------------------------------------------------------------------------------------------------


@needs_data
def test_models_that_no_fit_has_seen() -> None:
    ref = CALIBRATION.reference
    table = experts(KERNELS / "h100_sxm/moe/vllm/0.24.0/moe_perf.parquet", ref)
    rows = table[table.precision.eq("bf16") & table.routing.eq("balanced")]
    found = kernel_experts(rows, ref)
    error = found.residuals["experts_bf16"]
    assert set(found.points.label.str.split(":").str[0]) == {LEFT_OUT[0]}
    assert error.count > 150
    assert error.median <= 0.06
    assert error.p90 <= 0.18


@needs_data
def test_experts_without_a_gate_which_no_fit_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsim.calibrate.importers.experts.UNGATED", set())
    calibration = load_calibration("h100-vllm")
    table = experts(KERNELS / "h100_sxm" / "moe/vllm/0.24.0/moe_perf.parquet", calibration.reference)
    for hidden, width in ((2048, 5120), (2688, 1856)):  # the second is Nemotron 3 Nano's
        cut = table.width.isin([width // tp for tp in (1, 2, 4, 8)])
        rows = table[table.hidden.eq(hidden) & cut & table.precision.eq("bf16") & table.routing.eq("balanced")]
        kernels = Operators(calibration.operators, calibration.reference)
        found = [kernels.experts_s(load, hidden, int(w), "bf16", 1) for load, _, w in calls_of(rows)]
        assert len(found) > 200
        assert float(np.median(abs(np.array(found) / rows.seconds - 1))) < 0.1


@needs_data
def test_deepep_inside_a_node() -> None:
    folder = KERNELS / "h100_sxm/comm/sglang/0.5.12"
    paths: list[Path] = [folder / f"wideep_deepep_{kind}_perf.parquet" for kind in ("ll", "normal")]
    table = exchanges(*paths)
    assert set(table.kind) == {"low_latency", "normal"}
    found = kernel_exchange(table)
    assert found.residuals["exchange"].median <= 0.1
    own = table[(table.kind == "low_latency") & (table.tokens == 128) & (table.hidden == 7168) & (table.active == 8)]
    links = Collectives(CALIBRATION.collectives.model_copy(update={"deepep": found.fit}), CALIBRATION.reference, NODE)
    assert links.exchange_s(128, 8, 2 * 7168, 8) == pytest.approx(float(pd.Series(own.seconds).median()), rel=0.2)


# Configurations of other frameworks -----------------------------------------------------------------------------------


def test_expert_parallelism_of_configurations(tmp_path: Path) -> None:
    def engine(draft: Callable[..., Draft], *options: str) -> tuple[object, ...]:
        data = draft(tmp_path, *options).data()
        tp = next(iter(data["systems"][0]["use"][0].values()))["tp"]
        return tp, *(data["engine"].get(name) for name in ("ep", "data_parallel_attention", "pp"))

    mixture, vllm = "policy.model_name=Qwen/Qwen3-30B-A3B", "policy.generation.vllm_cfg."
    for tp, ep, found in ((4, 4, (4, 4, None, None)), (2, 8, (8, 8, 4, None))):
        degrees = f"{vllm}tensor_parallel_size={tp}", f"{vllm}expert_parallel_size={ep}"
        assert engine(nemo, mixture, *degrees) == found
    staged = f"{vllm}tensor_parallel_size=2", f"{vllm}pipeline_parallel_size=2"
    assert engine(nemo, *staged) == (4, None, None, 2)
    with pytest.raises(ConfigError, match="no multiple of TP 4"):
        engine(nemo, mixture, f"{vllm}tensor_parallel_size=4", f"{vllm}expert_parallel_size=6")
    model, rollout = "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "actor_rollout_ref.rollout."
    assert engine(verl, model, f"{rollout}expert_parallel_size=2", f"{rollout}data_parallel_size=2") == (2, 2, 2, None)


def test_a_replica_over_two_nodes_runs() -> None:
    spec = {
        **TINY,
        "cluster": "2x8xh100",
        "model": "qwen3-30b-a3b",
        "trace": {"fixed": 32, "cap": 64},
        "workflow": {"prompts": 4, "responses": 4, "steps": 1, "reference": False},
        "training": {"backend": "megatron", "tp": 8, "offload": True},
        "systems": [{"verl": {"tp": [8, 16]}}],
    }
    result = rlsim.run(spec)
    steps = result.steps.set_index("system")
    assert steps.loc["verl-tp16", "initial_tp"] == 16
    assert set(result.responses.groupby("system").replica.nunique()) == {1, 2}
    assert (steps.gen_time_s >= steps.gen_bound_s).all()
    apart = rlsim.run(spec, overrides={"engine.ep": 8, "engine.data_parallel_attention": 8})
    assert len(apart.steps) == 2
    assert apart.steps.prefix_hit_tokens.sum() == 0 < result.steps.prefix_hit_tokens.sum()
    assert any("responses to a prompt share no prefill" in note for note in apart.notes)
    one_each = {
        "engine.ep": 8,
        "engine.data_parallel_attention": 8,
        "engine.max_num_seqs": 1,
        "systems": [{"verl": {"tp": 8}}],
    }
    limited = rlsim.run(spec, overrides=one_each).steps.gen_time_s
    assert limited.tolist() == apart.steps[apart.steps.system == "verl-tp8"].gen_time_s.tolist()  # eight at a time
    with pytest.raises(RlsimError, match="tp 12 does not divide the 8 GPUs of a node"):
        rlsim.run(spec, overrides={"systems": [{"verl": {"tp": 12}}]})


def test_a_shared_expert_is_one_more_of_the_others_where_the_engine_has_it_so() -> None:
    """SGLang's DeepSeek-V3 on eight GPUs: 58 layers lose two products and an activation."""
    model, cluster, kernels = load_model("deepseek-v3"), load_cluster("8xh200"), load_calibration("h200-sxm-sglang")

    def less(layout: ReplicaLayout) -> dict[str, float]:
        one, apart = (
            RooflineStep(model, 8, cluster, kernels.model_copy(update={"engine": engine}), layout).breakdown(4, 4e3)
            for engine in ("sglang", "vllm")
        )
        return {part: apart[part] - time_s for part, time_s in one.items() if apart[part] != time_s}

    operators = Operators(kernels.operators, kernels.reference)
    load = expert_load(4, 256, 8)
    more = load.with_shared()
    assert (more.rows - load.rows, more.selections, more.hit - load.hit, more.experts) == (4, 36, 1, 257)
    assert more.blocks[0] - load.blocks[0] == more.blocks[-1] - load.blocks[-1] == 1
    alone_s = sum(operators.gemm_s(4, n, k) for n, k in ((512, 7168), (7168, 256)))
    then_s, now_s = (operators.experts_s(one, 7168, 256) for one in (load, more))
    found = less(ReplicaLayout())
    assert found.pop("products") == pytest.approx(58 * (alone_s + then_s - now_s))
    assert found.pop("elementwise") == pytest.approx(58 * operators.memory_bound_s(4 * 3 * 256 * 2, 4))
    assert not found
    assert not less(ReplicaLayout(ep=8))

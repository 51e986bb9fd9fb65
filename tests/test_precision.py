"""Precisions of weights, activations and KV caches: bytes, kernels by hand, refusals, quantised configurations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import TINY, cases
from pydantic import ValidationError

from rlsim.calibrate.fit.attention import attention_kernels
from rlsim.calibrate.fit.gemm import gemm_rows, kernel_gemm
from rlsim.calibrate.importers import aiconfigurator
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Calibration, Reference, load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.fits import AttentionFit, OperatorFits, ProductFit, Tile
from rlsim.cost.layout import Layout
from rlsim.cost.operators import Operators
from rlsim.cost.products import Products
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.strategy import TrainEfficiency, TrainStrategy
from rlsim.cost.weight_sync import QUANTISING_BYTES
from rlsim.errors import CalibrationError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.schema import Experiment
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.models.precision import Precision, published_precision

LLAMA, MIXTURE = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
MATRICES = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)  # of LLaMA's layers
H100 = load_cluster("8xh100")
REFERENCE = Reference(
    bf16_flop_per_s=100e12,
    fp8_flop_per_s=200e12,
    fp4_flop_per_s=400e12,
    memory_bytes_per_s=1e12,
    sm_count=100,
    l2_bytes=40e6,
    link_bytes_per_s=100e9,
)


def fit(precision: Precision) -> ProductFit:
    return ProductFit(
        precision=precision,
        launch_s=1e-6,
        efficiency={"compute": 1.0, "memory": 0.1},
        added_s={} if precision == "bf16" else {"quantised": 10.0},
        tiles=(Tile(m=100, n=100, efficiency=0.5),),
    )


def quantised(name: str = "h100-vllm", *precisions: Precision) -> Calibration:
    """A calibration with products of these precisions as good as its bf16 ones, and attention on FP8 KV caches."""
    known = load_calibration(name)
    fits = known.operators
    update: dict[str, Any] = {
        "quantised_gemm": tuple(fits.gemm.model_copy(update={"precision": one}) for one in precisions),
        **{
            f"{kind}_attention_fp8": getattr(fits, f"{kind}_attention").model_copy(update={"kv_precision": "fp8"})
            for kind in ("decode", "prefill")
        },
    }
    reference = known.reference.model_copy(update={"fp8_flop_per_s": 2 * known.reference.bf16_flop_per_s})
    return known.model_copy(update={"operators": fits.model_copy(update=update), "reference": reference})


# Kernels --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "weight", "activation", "speed"),
    [("bf16", 2, 2, 1), ("fp8", 1, 1, 2), ("fp8_block", 1 + 4 / 128**2, 1 + 4 / 128, 2), ("nvfp4", 9 / 16, 9 / 16, 4)],
)
def test_products_by_hand(precision: Precision, weight: float, activation: float, speed: float) -> None:
    products, quantised_bytes = Products(fit(precision), REFERENCE), 0.0 if precision == "bf16" else 2 + activation
    m, n, k = 1, 10_000, 1000
    size = weight * n * k + activation * m * k + 2 * m * n + quantised_bytes * m * k
    assert products.time_s(m, n, k) == pytest.approx(1e-6 + size / 0.1e12, rel=0.01), "bound by memory"
    m = n = k = 10_000
    compute = 2 * m * n * k / (speed * 100e12 * 0.5)
    assert products.time_s(m, n, k) == pytest.approx(1e-6 + compute + quantised_bytes * m * k / 0.1e12, rel=0.01)


def test_fits_name_each_precision_once() -> None:
    known = load_calibration("h100-vllm").operators
    with pytest.raises(ValidationError, match="one fit for each other precision"):
        OperatorFits.model_validate({**dict(known), "quantised_gemm": (fit("fp8"), fit("fp8"))})
    with pytest.raises(ValidationError, match="attention must be of a bf16 KV cache"):
        OperatorFits.model_validate({**dict(known), "decode_attention_fp8": known.decode_attention})


def with_fits(known: Calibration, **fits: AttentionFit) -> Operators:
    return Operators(known.operators.model_copy(update=fits), known.reference)


def test_attention_on_fp8_reads_half_the_bytes() -> None:
    known = quantised()
    kernel = known.operators.decode_attention.heads[128].model_copy(update={"table": None})
    bare, bare8 = (
        with_fits(known, decode_attention=AttentionFit(kv_precision=kv, heads={128: kernel})) for kv in ("bf16", "fp8")
    )
    times = [[o.decode_kernels.curve(64, 8, 128).step_s(t) for t in (1e6, 2e6)] for o in (bare, bare8)]
    slow, quick = (high - low for low, high in times)
    assert slow == pytest.approx(2 * quick)


def test_a_fit_finds_what_a_table_in_fp8_was_made_with() -> None:
    """Weights that L2 held come at twice the memory's rate; a block is slow, which only few tokens show."""
    ref = load_calibration("b200-vllm").reference
    shares = ((1, 0.03), (17, 0.05), (33, 0.1), (65, 0.5), (129, 0.6), (257, 0.7))
    tiles = tuple(Tile(m=64, n=128, efficiency=share, from_rows=rows) for rows, share in shares)
    known = ProductFit(
        precision="fp8",
        launch_s=5e-6,
        efficiency={"compute": 1.0, "memory": 0.8},
        added_s={"quantised": 1.3},
        tiles=tiles,
        k_overhead=200.0,
    )
    in_cache = known.model_copy(update={"efficiency": {"compute": 1.0, "memory": 1.6}})
    cold, hot = Products(known, ref), Products(in_cache, ref)
    widths = [512, 1024, 4096, 8192, 28672, 65536]
    sizes = [(m, n, k) for n in widths for k in widths[:-1] for m in (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)]
    table = pd.DataFrame(sizes, columns=["m", "n", "k"])
    in_l2 = gemm_rows(table, ref, "fp8").in_l2
    seconds = [(hot if held else cold).time_s(*size) for size, held in zip(sizes, in_l2, strict=True)]
    table = table.assign(seconds=seconds)
    found = kernel_gemm(table, ref, cold=False, precision="fp8")
    assert found.fit.precision == "fp8"
    assert found.fit.tiles
    assert found.fit.launch_s == pytest.approx(5e-6, rel=0.2)
    assert found.residuals["gemm_fp8"].median < 0.03
    assert set(found.points.operator) == {"gemm_fp8"}
    small = [(m, n, k) for m, n, k in sizes if m <= 64 and n * k <= 8192 * 8192]
    again = Products(found.fit, ref)
    errors = np.array([again.time_s(*size) / cold.time_s(*size) - 1.0 for size in small])
    assert np.median(np.abs(errors)) < 0.03
    assert np.quantile(np.abs(errors), 0.9) < 0.1
    with pytest.raises(CalibrationError, match="data sheet has no rate"):
        kernel_gemm(table, ref.model_copy(update={"fp8_flop_per_s": None}), cold=False, precision="fp8")


def test_attention_on_fp8_is_fitted_under_its_own_name() -> None:
    known = load_calibration("h100-sglang")
    bf16 = {name: getattr(known.operators, name) for name in ("decode_attention", "prefill_attention")}
    fp8 = {name: one.model_copy(update={"kv_precision": "fp8"}) for name, one in bf16.items()}
    operators = with_fits(known, **fp8)
    decode = [
        (b, c, c, kv * 4, kv, 128, operators.decode_kernels.curve(b, kv, 128).step_s(b * c))
        for b in (1, 4, 16, 64, 256)
        for c in (2, 16, 256, 1024, 4096, 16384, 65536)
        for kv in (1, 2, 4, 8)
    ]
    prefill = [
        (b, n, 0, kv * 4, kv, 128, operators.prefill_attention_s([(n, 0)] * b, kv * 4, kv, 128))
        for b in (1, 2, 4, 8)
        for n in (16, 64, 256, 1024, 4096, 16384)
        for kv in (1, 2, 4, 8)
    ]
    heads = ["q_heads", "kv_heads", "head_dim", "seconds"]
    tables = {
        "decode_attention_fp8": pd.DataFrame(decode, columns=["batch", "context", "longest", *heads]),
        "prefill_attention_fp8": pd.DataFrame(prefill, columns=["batch", "new", "prior", *heads]),
    }
    found = attention_kernels(Measurements(tables), known.reference, "sglang", cold=False)
    assert [(name, part.fit.kv_precision) for name, part in found.items()] == [(name, "fp8") for name in tables]
    for name, part in found.items():
        assert part.residuals[name].median < 0.05
        assert part.points.operator.str.startswith(name).all()


# Tables ---------------------------------------------------------------------------------------------------------------


def test_products_of_a_table_by_precision(tmp_path: Path) -> None:
    rows = [
        (dtype, m, 4096, 4096, ms)
        for dtype, ms in (("bfloat16", 0.1), ("fp8", 0.06), ("fp8_static", 0.05))
        for m in (1, 64)
    ]
    path = tmp_path / "gemm_perf.parquet"
    pd.DataFrame(rows, columns=["gemm_dtype", "m", "n", "k", "latency"]).to_parquet(path)
    assert aiconfigurator.precisions(path) == ["fp8"]
    assert aiconfigurator.gemms(path).seconds.tolist() == [0.1e-3] * 2
    assert aiconfigurator.gemms(path, precision="fp8").seconds.tolist() == [0.06e-3] * 2
    with pytest.raises(CalibrationError, match="no rows with gemm_dtype nvfp4"):
        aiconfigurator.gemms(path, precision="nvfp4")


def test_attention_on_an_fp8_cache_is_of_the_engines_kernel(tmp_path: Path) -> None:
    """Queries are bf16 where that kernel was measured with these, else fp8; other kernels' do not count."""
    shape = (1, 64, 8, 1, 128, 0)
    columns = ["batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step"]
    rows = [("triton", "bfloat16", *shape, 9.0), ("fa3", "fp8", *shape, 1.0), ("fa3", "fp8", 2, *shape[1:], 2.0)]
    path = tmp_path / "context_attention_perf.parquet"
    names = ["kernel_source", "attn_dtype", *columns, "latency"]
    pd.DataFrame(rows, columns=names).assign(kv_cache_dtype="fp8").to_parquet(path)
    assert aiconfigurator.attention(path, "prefill_attention", kv="fp8").seconds.tolist() == [1e-3, 2e-3]
    rows += [("fa3", "bfloat16", *shape, 3.0), ("fa3", "bfloat16", 2, *shape[1:], 4.0)]
    pd.DataFrame(rows, columns=names).assign(kv_cache_dtype="fp8").to_parquet(path)
    assert aiconfigurator.attention(path, "prefill_attention", kv="fp8").seconds.tolist() == [3e-3, 4e-3]


# Models and memory ----------------------------------------------------------------------------------------------------


def test_the_router_of_a_mixture_stays_in_bf16() -> None:
    attention = 48 * 2048 * 128 * (32 + 2 * 4 + 32)
    experts = 48 * 128 * 3 * 2048 * 768
    assert MIXTURE.served("fp8").quantised_parameters == attention + experts
    published = MIXTURE.model_copy(update={"expert_precision": "mxfp4"})
    assert published.quantised_parameters == experts
    assert published.served("bf16").weight_bytes == MIXTURE.weight_bytes
    assert published.served().of_experts == "mxfp4"


def test_tp_must_not_cut_a_block() -> None:
    """As `validate_fp8_block_shape` of vLLM and SGLang: 768 / 4 is no multiple of 128, 14336 / 8 is."""
    served = MIXTURE.served("fp8_block")
    assert [tp for tp in (1, 2, 4, 8) if served.supports_tp(tp)] == [1, 2]
    assert LLAMA.served("fp8_block").supports_tp(8)
    assert MIXTURE.served("fp8").supports_tp(4)
    with pytest.raises(ConfigError, match="TP 4 cuts its MLP width 768 inside a block of 128 weights"):
        served.check_tp(4)


@cases("cost", "what a config json says of its weights")
def test_what_a_config_json_says_of_its_weights(config: Any, precision: str | None) -> None:
    assert published_precision(config) == precision


def test_experts_alone_are_quantised_where_attention_is_left_out(tmp_path: Path) -> None:
    dense = ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    words = (*dense, "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    shape = {name: getattr(load_model("qwen3-30b-a3b"), name) for name in words} | {"model_type": "qwen3_moe"}
    excluded = ["lm_head", "model.layers.*.mlp.gate", "model.layers.*.input_layernorm"]
    for more, precision, of_experts in (([], "nvfp4", "nvfp4"), (["model.layers.0.self_attn*"], "bf16", "nvfp4")):
        quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [*excluded, *more]}
        (tmp_path / "config.json").write_text(json.dumps(shape | {"quantization_config": quantised}))
        model = load_model(tmp_path)
        assert (model.precision, model.of_experts) == (precision, of_experts)
    llama = {name: getattr(LLAMA, name) for name in (*dense, "intermediate_size")} | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(llama | {"quantization_config": quantised}))
    with pytest.raises(ConfigError, match="attention is not quantised are supported where the others are experts"):
        load_model(tmp_path)


def test_a_hybrid_of_which_parts_are_quantised_is_refused(tmp_path: Path) -> None:
    words = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_experts",
             "num_experts_per_tok", "moe_intermediate_size", "layer_types")  # fmt: skip
    shape = {name: getattr(load_model("nemotron-3-nano-30b-a3b"), name) for name in words} | {
        "model_type": "nemotron_h"
    }
    quantised = {"quant_method": "modelopt", "quant_algo": "FP8"}
    for left, refused in (("layers.5.mixer.q_proj", True), ("layers.4.mixer*", True), ("layers.0.mixer.conv1d", False)):
        listed = quantised | {"exclude_modules": ["lm_head", f"backbone.{left}"]}
        (tmp_path / "config.json").write_text(json.dumps(shape | {"quantization_config": listed}))
        if not refused:
            assert load_model(tmp_path).precision == "fp8"
            continue
        with pytest.raises(ConfigError, match="a nemotron_h of which some products are not quantised is not supported"):
            load_model(tmp_path)


# Steps and calls ------------------------------------------------------------------------------------------------------


def test_a_step_in_fp8_is_shorter_and_its_head_as_long() -> None:
    calibration = quantised("h100-vllm", "fp8")
    plain, fp8 = (RooflineStep(model, 1, H100, calibration) for model in (LLAMA, LLAMA.served("fp8")))
    slow, quick = plain.breakdown(8, 8000), fp8.breakdown(8, 8000)
    assert quick["products"] < 0.65 * slow["products"]
    assert {**quick, "products": 0} == {**slow, "products": 0}
    halved = RooflineStep(LLAMA.served("bf16", "fp8"), 1, H100, calibration)
    assert halved.decode(64).step_s(64 * 20_000) < 0.75 * plain.decode(64).step_s(64 * 20_000)


@cases("cost", "what a gpu lacks is refused by name")
def test_what_a_gpu_lacks_is_refused_by_name(
    calibration: str, cluster: str, precision: Precision, kv: Any, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        RooflineStep(LLAMA.served(precision, kv), 1, load_cluster(cluster), load_calibration(calibration))


def costs(precision: Precision, **changes: Any) -> CallCosts:
    return CallCosts({"actor": LLAMA}, H100, quantised("h100-vllm", "fp8"), "fsdp", precision=precision, **changes)


def test_fp8_training_saves_what_its_products_save() -> None:
    strategy, lengths = TrainStrategy(dp=8, zero_stage=1), np.full(64, 4096.0)
    plain, fp8 = (costs(one).of("actor", strategy).train_s(lengths, 1) for one in ("bf16", "fp8"))
    assert 0.6 < fp8.compute_s / plain.compute_s < 0.95
    assert fp8.optimizer_s == plain.optimizer_s
    saved = costs("fp8").of("actor", strategy).efficiency.fp8_saved
    flop = costs("bf16").of("actor", strategy).efficiency.flop
    assert 0 < saved <= 1 / flop - 0.5, "no product beats the FP8 peak"
    assert TrainEfficiency(flop=0.5, fp8_saved=0.5).layers == pytest.approx(1 / 1.5)
    assert TrainEfficiency(flop=0.5).layers == 0.5


def test_a_rollout_quantises_what_it_receives() -> None:
    source, target = Layout(first_gpu=0, dp=8), Layout(first_gpu=0, tp=1)
    served = costs("bf16", rollout={"actor": LLAMA.served("fp8")})
    parts, plain = (
        one.weight_sync("actor", "bucketed", one, offload=False).parts(source, target)
        for one in (served, costs("bf16"))
    )
    assert parts.load_s - plain.load_s == pytest.approx(QUANTISING_BYTES * MATRICES / H100.gpu.memory_bytes_per_s)
    assert (parts.export_s, parts.transport_s) == (plain.export_s, plain.transport_s), "bf16 is sent"


# Experiments ----------------------------------------------------------------------------------------------------------


def loaded(folder: Path, **changes: Any) -> LoadedExperiment:
    return LoadedExperiment.of(Experiment.model_validate({**TINY, **changes}), folder)


def test_a_quantised_config_json_is_served_as_published(tmp_path: Path) -> None:
    words = {name: getattr(LLAMA, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim")}
    words |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "model_type": "llama"}
    words["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(words))
    model = load_model(tmp_path)
    assert model.precision == "fp8_block"
    assert "engines serve them so unless engine.precision says otherwise, training takes bf16" in model.note
    bf16 = loaded(tmp_path, model=str(tmp_path / "config.json"), engine={"precision": "bf16"})
    assert bf16.model.precision == bf16.models["actor"].precision == "bf16"

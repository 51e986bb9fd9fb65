"""Latent attention: its formula by hand, its fit on made-up and on measured tables."""

import pandas as pd
import pytest
from conftest import KERNELS, needs_data
from pydantic import ValidationError

from rlsim.calibrate.fit.latent import MEASURED, UNSEEN, kernel_latent_attention
from rlsim.calibrate.importers import aiconfigurator
from rlsim.cost.attention import Latent
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.fits import KernelFit, LatentAttentionFit, OperatorFits
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.operators import Operators
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.errors import CalibrationError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

FIT = LatentAttentionFit(
    decode=KernelFit(
        launch_s=20e-6, efficiency={"memory": 0.9, "compute": 0.6}, added_s={"sequences": 1e-8, "heads": 1e-9}
    )
)


def base() -> Calibration:
    return load_calibration("h100-vllm")


def operators() -> Operators:
    return Operators(base().operators, base().reference)


def kernels(heads: int, fit: LatentAttentionFit = FIT) -> Latent:
    return Latent(operators(), MEASURED, heads, fit)


def test_decode_by_hand() -> None:
    ref, batch = base().reference, 1024
    for heads, at_least, precision, size in ((1, 64, "fp8", 1), (128, 128, "bf16", 2)):
        curve = kernels(heads, FIT.model_copy(update={"kv_precision": precision})).curve(batch)
        read = 576 * size / (ref.memory_bytes_per_s * 0.9)
        computed = 2 * at_least * (576 + 512) / (ref.bf16_flop_per_s * 0.6)
        assert curve.step_s(2e6) - curve.step_s(1e6) == pytest.approx(1e6 * (read**3 + computed**3) ** (1 / 3))
    launch = 20e-6 + 1e-8 * batch + 1e-9 * batch * heads
    assert curve.step_s(0) == pytest.approx(launch + kernels(heads).absorb_s(batch))
    multiplied = 2 * heads * 512 * (128 + 128) * batch / (ref.bf16_flop_per_s * 0.7)
    assert kernels(heads).absorb_s(batch) == pytest.approx(2 * base().operators.gemm.launch_s + multiplied)


def test_prompts_by_hand() -> None:
    """Over keys and values that are made of all latents, as a kernel of its own or as grouped queries."""
    chunks = [(1000, 0), (500, 3000)]
    made = operators().gemm_s(4500, 16 * 256, 512)
    attention = operators().prefill_attention_s(chunks, 16, 16, 160)
    assert kernels(16).prefill_s(chunks) == pytest.approx(made + attention)
    own = KernelFit(launch_s=50e-6, efficiency={"compute": 0.5, "memory": 1.0}, added_s={"heads": 2e-9})
    pairs, weights = 1000 * 500 + 500 * 3250, 16 * 256 * 512
    flop = 2 * 16 * 320 * pairs + 2 * weights * 4500
    by_hand = 50e-6 + 2e-9 * 16 * 1500 + flop / (0.5 * base().reference.bf16_flop_per_s)
    found = kernels(16, FIT.model_copy(update={"prompts": own})).prefill_s(chunks)
    assert found == pytest.approx(by_hand, rel=0.01)


def made_up(fit: LatentAttentionFit) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables of a kernel that follows the formula exactly."""
    rows = []
    for heads in (1, 4, 16, 32, 64, 128):
        one = kernels(heads, fit)
        for batch in (1, 4, 16, 64, 256):
            curve = one.curve(batch)
            for context in (4, 64, 1024, 8192, 65_536):
                time = curve.step_s(batch * context) - one.absorb_s(batch)
                rows.append((batch, heads, 1, context - 1, time))
    decode = pd.DataFrame(rows, columns=["batch", "heads", "new", "prior", "seconds"])
    return decode, decode.head(0)


def test_a_fit_finds_what_made_the_rows() -> None:
    found = kernel_latent_attention(*made_up(FIT), operators(), module=False, blocks=False)
    residual = found.residuals["latent_attention"]
    assert residual.median < 0.05  # the launch is nearly all of the shortest times, more than a fit takes it for
    assert residual.p90 < 0.13
    unseen = found.points[found.points.held_out].label.str.extract(r", (\d+) heads")[0].astype(int)
    assert set(unseen) == set(UNSEEN)
    seen = found.points[~found.points.held_out].label.str.extract(r", (\d+) heads")[0].astype(int)
    assert not set(seen) & set(UNSEEN)


@needs_data
@pytest.mark.parametrize(("engine", "median", "p90"), [("vllm", 0.02, 0.06), ("sglang", 0.03, 0.10)])
def test_head_counts_that_no_fit_has_seen(engine: str, median: float, p90: float) -> None:
    paths = aiconfigurator.latent_tables(KERNELS / "h100_sxm", engine)
    assert paths is not None
    calibration = load_calibration(f"h100-{engine}")
    others = Operators(calibration.operators, calibration.reference)
    module, blocks = aiconfigurator.LATENT[engine][2], aiconfigurator.in_blocks(paths[0])
    found = kernel_latent_attention(*map(aiconfigurator.latent, paths), others, module=module, blocks=blocks)
    residual = found.residuals["latent_attention"]
    assert residual.median < median
    assert residual.p90 < p90
    if engine == "vllm":
        assert found.residuals["latent_attention_prompts"].median < 0.06
        assert found.residuals["latent_attention_prompts"].p90 < 0.16


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *((name, 0.4, 0.9) for name in ("h100-vllm", "h200-vllm", "b200-vllm", "b200-sglang")),
        # FlashAttention 3, which SGLang chooses for latents on Hopper, is measured to be very slow on an FP8 cache.
        *((name, 3.0, 10.0) for name in ("h100-sglang", "h200-sglang")),
    ],
)
def test_an_fp8_cache_of_latents_takes_what_was_measured(name: str, least: float, most: float) -> None:
    model, cluster = load_model("deepseek-v3"), load_cluster(f"8x{name.partition('-')[0]}")
    plain, halved = (
        RooflineStep(one, 8, cluster, load_calibration(name)) for one in (model, model.served(kv_precision="fp8"))
    )
    slow, quick = (one.decode(64).step_s(64 * 60_000) - one.decode(64).step_s(64 * 30_000) for one in (plain, halved))
    assert least * slow < quick < most * slow
    assert halved.prefill_s([Chunk(8192, 0)]) == pytest.approx(plain.prefill_s([Chunk(8192, 0)]), rel=0.1)
    halved.decode(64).steps_s(64 * 30_000, 2)
    assert halved.lookups().table()["latent_attention"]["interpolated"] == 1


def test_an_fp8_cache_of_latents_that_was_not_measured_is_refused() -> None:
    model = load_model("deepseek-v2-lite").served(kv_precision="fp8")
    known = load_calibration("h100-vllm")
    bare = known.operators.model_copy(update={"latent_attention_fp8": None})
    calibration = known.model_copy(update={"operators": bare})
    with pytest.raises(CalibrationError, match="latent attention on a KV cache of bf16 only"):
        RooflineStep(model, 1, load_cluster("8xh100"), calibration)
    wrong = dict(known.operators) | {"latent_attention_fp8": known.operators.latent_attention}
    with pytest.raises(ValidationError, match="latent_attention_fp8 of an fp8 one"):
        OperatorFits.model_validate(wrong)


def test_a_quantised_kv_b_has_a_copy_in_bf16() -> None:
    model = load_model("deepseek-v3")
    kv_b = 61 * 128 * (128 + 128) * 512
    for precision, copy in (("bf16", 0), ("fp8_block", 2 * kv_b)):
        served = model.served(precision)
        assert rollout_weight_bytes(served, 1) == pytest.approx(served.weight_bytes + copy, rel=1e-12)

"""What no kernel and no step of a shipped calibration may do: beat the data sheet, or fall where work grows."""

from itertools import pairwise, product

import pytest

from rlsim.cost.calibration import calibration_names, load_calibration
from rlsim.cost.experts import expert_load, peak_of
from rlsim.cost.operators import Operators
from rlsim.cost.roofline import RooflineStep, for_model, step_cost
from rlsim.cost.step import Chunk
from rlsim.errors import CalibrationError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

LLAMA, H100 = load_model("llama-3.1-8b"), load_cluster("8xh100")


@pytest.fixture(params=["a40-vllm", "b200-sxm-vllm", "h100-sxm-trtllm", "l40s-sglang", "gb200-sglang"])
def fitted(request: pytest.FixtureRequest) -> Operators:
    calibration = load_calibration(request.param)
    return Operators(calibration.operators, calibration.reference, calibration.residuals)


def roofline(tp: int = 1) -> RooflineStep:
    return RooflineStep(LLAMA, tp, H100, load_calibration("h100-sglang"))


def test_the_gemm_formula_never_falls_with_size(fitted: Operators) -> None:
    plain = fitted.fits.gemm.model_copy(update={"table": None})
    formula = Operators(fitted.fits.model_copy(update={"gemm": plain}), fitted.reference)
    for n, k in ((512, 4096), (6144, 4096), (4096, 14336), (16032, 4096)):
        times = [formula.gemm_s(m, n, k) for m in range(1, 2049, 7)]
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times))
    for m in (1, 64, 300, 4096):
        assert formula.gemm_s(m, 4096, 4096) <= formula.gemm_s(m, 8192, 4096)
        assert formula.gemm_s(m, 4096, 4096) <= formula.gemm_s(m, 4096, 8192)


def test_fitted_gemms_fall_no_more_than_measured_ones(fitted: Operators) -> None:
    """A measured product of more rows is at times a little faster, where another kernel takes over."""
    for n, k in ((512, 4096), (6144, 4096), (4096, 14336), (16032, 4096)):
        times = [fitted.gemm_s(m, n, k) for m in range(1, 2049, 7)]
        most = 0.0
        for time in times:
            most = max(most, time)
            assert time > 0.85 * most


@pytest.mark.parametrize("name", calibration_names())
def test_no_kernel_of_any_calibration_beats_the_data_sheet(name: str) -> None:
    """Products and experts of few rows and many; attention of prompts and decode, whole and with windows of any size;
    no pair of a query and a key within a window takes less than it does without one."""
    calibration = load_calibration(name)
    ref, plain = calibration.reference, Operators(calibration.operators, calibration.reference)
    for precision in plain.fits.gemms:
        for m, n, k in product((1, 16, 128, 8192), (1024, 8192, 28672), (1024, 8192)):
            assert plain.gemm_s(m, n, k, 1, precision) >= 2 * m * n * k / (peak_of(ref, precision) * (1 + 1e-9))
    for m, n, k in product((1, 16, 128, 8192), (1024, 8192, 28672), (1024, 8192)):
        assert plain.gemm_s(m, n, k) > 2 * n * k / ref.memory_bytes_per_s
    for batch, context in product((1, 8, 64, 512), (1024, 8192, 65536)):
        read_s = batch * context * 8 * 512 / ref.memory_bytes_per_s
        assert plain.decode_kernels.curve(batch, 8, 128).step_s(batch * context) > read_s
    for model in map(load_model, ("olmo-3-32b", "gemma-3-27b", "gemma-2-9b", "gpt-oss-20b", "mistral-7b-v0.1")):
        (attention,) = {one.attention for one in model.groups if one.attention.window_tokens}
        q, kv, size = attention.heads, attention.kv_heads_per_gpu(1), attention.head_elements // 2
        window, kernels = attention.window_tokens, plain.prompt_kernels
        for chunks in ([(2048.0, 0.0)] * 4, [(32768.0, 0.0)], [(8192.0, 32768.0)]):
            found = kernels.work(chunks, q, kv, size, window)
            share = kernels.reached(size) if found.cut and size in plain.fits.prefill_attention.windows else 1.0
            least_s = found.pairs * 4 * size * q / ref.bf16_flop_per_s / min(share, 1.0)
            assert kernels.time_s(chunks, q, kv, size, window) >= least_s * (1 - 1e-9), (model.name, chunks)
        for batch in (1, 64, 1024):
            read_s = batch * window * kv * size * 4 / ref.memory_bytes_per_s
            assert plain.decode_kernels.curve(batch, kv, size, window).step_s(batch * window) >= read_s
    for mixture, precision in product(("mixtral-8x7b", "qwen3-30b-a3b"), ("bf16", "fp8_block")):
        try:
            model = load_model(mixture).served(precision)
            operators = Operators(for_model(model, calibration).operators, ref)
        except CalibrationError:  # a precision that the GPU lacks
            continue
        mlp = model.layers[0].mlp
        for tokens in (1, 64, 1024, 8192):
            load = expert_load(tokens, mlp.experts, mlp.active)
            floor_s = 6 * load.rows * model.hidden_size * mlp.width / peak_of(ref, precision)
            assert operators.experts_s(load, model.hidden_size, mlp.width, precision) >= floor_s * (1 - 1e-9)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gpu_of_fewer_flops_and_the_same_bandwidth_is_no_faster(engine: str) -> None:
    """L20 has a third of L40S' FLOPs; what a product of few rows leaves of the bandwidth is the same."""
    for model in (load_model("qwen3-8b"), load_model("qwen3-8b").served("fp8")):
        l40s, l20 = (step_cost(model, 1, load_cluster(f"8x{gpu}"), f"{gpu}-{engine}") for gpu in ("l40s", "l20"))
        for batch in (1, 8, 32, 128):
            assert l20.decode(batch).step_s(batch * 1024) > 0.99 * l40s.decode(batch).step_s(batch * 1024)


def test_fitted_decode_attention_grows_with_context_and_batch(fitted: Operators) -> None:
    for kv_heads in (1, 2, 8):
        by_context = [fitted.decode_kernels.curve(16, kv_heads, 128).step_s(16 * c) for c in (128, 1024, 8192, 65536)]
        assert by_context == sorted(by_context)
        by_batch = [fitted.decode_kernels.curve(b, kv_heads, 128).step_s(b * 4096) for b in (1, 2, 4, 8, 16, 64, 256)]
        assert all(b > 0.85 * a for a, b in pairwise(by_batch))  # near the floor a kernel may choose another split
        assert by_batch[-1] > 5.0 * by_batch[0]


def test_fitted_prefill_attention_grows(fitted: Operators) -> None:
    times = [fitted.prefill_attention_s([(n, 0)], 32, 8, 128) for n in (128, 512, 2048, 8192, 16384)]
    assert times == sorted(times)
    assert fitted.prefill_attention_s([(512, 4096)], 32, 8, 128) > fitted.prefill_attention_s([(512, 0)], 32, 8, 128)


def test_decode_time_grows_with_batch_and_context() -> None:
    step = roofline(2)
    for context in (200, 4000):
        times = [step.decode(b).step_s(b * context) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
        assert times == sorted(times)
    curve = step.decode(32)
    times = [curve.step_s(32 * c) for c in (10, 100, 1000, 10_000, 100_000)]
    assert times == sorted(times)


def test_more_gpus_are_faster_but_not_by_their_number() -> None:
    times = [roofline(tp).decode(8).step_s(8 * 4096) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert all(low > high / 2 for high, low in pairwise(times))
    for tp in (1, 2, 4, 8):
        floor = LLAMA.weight_bytes / tp / H100.gpu.memory_bytes_per_s * (1 - LLAMA.vocab_size * 4096 / LLAMA.parameters)
        assert roofline(tp).decode(1).step_s(100) > floor


def test_prefill_grows_and_chunks_pay_for_what_they_attend_to() -> None:
    step = roofline(2)
    times = [step.prefill_s([Chunk(n, 0)]) for n in (16, 128, 1024, 4096, 16384)]
    assert times == sorted(times)
    assert step.prefill_s([Chunk(1024, 8192)]) > step.prefill_s([Chunk(1024, 0)])
    together = step.prefill_s([Chunk(512, 0), Chunk(512, 0)])
    assert together < 2 * step.prefill_s([Chunk(512, 0)])
    assert together < step.prefill_s([Chunk(1024, 0)]) * 1.02


def test_prefill_flops_stay_below_the_peak() -> None:
    tokens = 8192
    flop = 2 * LLAMA.num_hidden_layers * LLAMA.layer.parameters * tokens
    share = flop / roofline().prefill_s([Chunk(tokens, 0)]) / H100.gpu.bf16_flop_per_s
    assert 0.4 < share < 0.8


def test_mixed_step_shares_the_weights() -> None:
    step, chunks = roofline(), [Chunk(512, 0)]
    mixed = step.mixed_s(32, 32 * 1024, chunks)
    decode, prefill = step.decode(32).step_s(32 * 1024), step.prefill_s(chunks)
    assert max(decode, prefill) < mixed < decode + prefill

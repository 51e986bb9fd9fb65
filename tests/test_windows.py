"""Windows in a rollout: a jump under real costs is the sum of its steps, and costs follow what is read."""

from itertools import pairwise

import pytest
from conftest import cases

from rlsim.cost.calibration import load_calibration
from rlsim.cost.curve import DecodeCurve, InWindows, over_all
from rlsim.cost.memory import kv_page_bytes, kv_shape
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.step import PLAIN_KV, Chunk, KvShape
from rlsim.models.hardware import load_cluster
from rlsim.models.model import Model, load_model
from rlsim.models.precision import KvPrecision
from rlsim.sim.batch import RunningBatch
from rlsim.sim.request import Request

H100 = load_cluster("8xh100")
KNOWN = load_calibration("h100-vllm")
#: Without the kernels of windows of decode: those of as many tokens alone.
WHOLE = KNOWN.operators.decode_attention.model_copy(update={"windows": {}})
CALIBRATION = KNOWN.model_copy(update={"operators": KNOWN.operators.model_copy(update={"decode_attention": WHOLE})})


@cases("cost", "a jump under real costs is the sum of its steps")
def test_a_jump_under_real_costs_is_the_sum_of_its_steps(
    model: str, tp: int, calibration: str, pp: int, contexts: list[int], jumps: int
) -> None:
    """Llama 4 reads (context - 1) mod 8,192 + 1 tokens in three of four layers."""
    cost = step_cost(load_model(model), tp, H100, calibration, pp=pp)
    window, chunked = cost.kv.window_tokens or 0, cost.kv.chunked
    batch = RunningBatch(16, 100_000, cost.skew, 0, cost.kv)
    requests = [Request(i, 0, context, 5000) for i, context in enumerate(contexts)]
    for request in requests:
        request.order = request.id + 1
    batch.join(requests)
    found = 0
    while batch.step < 1200:
        assert batch.pages == sum(cost.kv.units(context, 16) for context in contexts)
        steps, tokens = batch.steps_ahead(), batch.padded_tokens()
        took = cost.decode(batch.size, batch.in_windows(tokens)).steps_s(tokens, steps)
        one_by_one = 0.0
        for _ in range(steps):
            read = [(n - 1) % window + 1 if chunked else min(n, window) for n in contexts]
            line = InWindows(sum(read) + cost.skew * (len(read) * max(read) - sum(read)), 0.0)
            padded = sum(contexts) + cost.skew * (len(contexts) * max(contexts) - sum(contexts))
            one_by_one += cost.decode(len(contexts), line).step_s(padded)
            contexts = [context + 1 for context in contexts]
        assert took == pytest.approx(one_by_one, rel=1e-9)
        batch.advance(steps)
        found += 1
    assert found == jumps


def test_chunks_in_the_kv_cache_and_in_prompts() -> None:
    scout = load_model("llama-4-scout-17b-16e")
    shape = kv_shape(scout, 8)
    assert shape == KvShape(8192, 4, 1, chunked=True)
    # A page of 16 tokens: 512 in the chunk; those of chunks that are over are kept by a quarter of the layers.
    assert [shape.units(n, 16) for n in (1, 8192, 8193, 16_384, 16_385)] == [4, 2048, 516, 2560, 1028]
    assert not shape.fits(20_000, 16, 600)  # with 16,384 tokens it takes 640 pages, more than at its end
    assert shape.fits(20_000, 16, 640)
    local = sum(1 for layer in scout.layers if layer.attention.chunked)
    token = scout.kv_bytes_per_token / scout.num_hidden_layers
    assert local == 36
    assert scout.sequence_bytes(10_000) == pytest.approx(token * (12 * 10_000 + 36 * (10_000 - 8192)))
    cost = step(scout, 8)
    layers = [one for one in scout.groups if one.attention.chunked]
    attention = cost._attention_of[layers[0]]
    pieces = [(6192.0, 2000.0), (8192.0, 0.0), (616.0, 0.0)]
    heads = scout.layers[0].attention.kv_heads_per_gpu(8)
    whole = cost.operators.prefill_attention_s(pieces, 5, heads, 128)
    assert attention.prefill_s([(15_000, 2000)]) == whole
    assert attention.prefill_s([(100, 8192)]) == attention.prefill_s([(100, 0)])
    # Without saying what is read contexts are equal, and beyond the first chunk those of its mean.
    curve = DecodeCurve(2, [0.0, 100.0], [0.0, 100.0])
    equal = over_all(curve, 50, None, chunked=True)
    assert [equal.step_s(total) for total in (0.0, 60.0, 100.0, 101.0, 9000.0)] == [0.0, 60.0, 100.0, 51.0, 51.0]


# Costs ---------------------------------------------------------------------------------------------------------------


def test_a_curve_over_windows_is_read_at_what_lies_in_them() -> None:
    curve = DecodeCurve(4, [0.0, 100.0, 300.0], [1.0, 2.0, 3.0])
    line = over_all(curve, 50, InWindows(20.0, 0.25))
    for total in (0.0, 400.0, 320.0, 4000.0):
        assert line.step_s(total) == pytest.approx(curve.step_s(20.0 + 0.25 * total))
    equal = over_all(curve, 50, None)
    assert [equal.step_s(total) for total in (0.0, 100.0, 150.0, 200.0, 9000.0)] == [1.0, 2.0, 2.25, 2.5, 2.5]


def step(model: Model, tp: int = 1) -> RooflineStep:
    return RooflineStep(model, tp, H100, CALIBRATION)


def test_a_window_saturates_and_a_prompt_in_chunks_reads_it() -> None:
    gemma = load_model("gemma-3-4b")
    plain = gemma.model_copy(update={"layer_types": (), "sliding_window": None})
    windows, whole = step(gemma), step(plain)
    assert windows.kv.window_tokens == 1024
    assert windows.decode(8).step_s(8 * 1000) == pytest.approx(whole.decode(8).step_s(8 * 1000), rel=1e-12)
    assert windows.decode(8).step_s(8 * 9000) < 0.8 * whole.decode(8).step_s(8 * 9000)
    layers = sum(1 for layer in gemma.layers if layer.attention.window_tokens)
    more = [cost.decode(8).step_s(8 * 20_000) - cost.decode(8).step_s(8 * 10_000) for cost in (windows, whole)]
    assert more[0] == pytest.approx(more[1] * (1 - layers / gemma.num_hidden_layers), rel=1e-9)
    prompts = [[Chunk(n, 0)] for n in (512, 1024, 4096, 16_384)]
    short, same, longer, longest = [windows.prefill_s(p) / whole.prefill_s(p) for p in prompts]
    assert [short, same] == pytest.approx([1.0, 1.0])
    assert 0.5 < longest < longer < 1.0
    attention = step(load_model("gemma-3-4b")).operators.prefill_attention_s
    times = [attention([(1024, prior)], 8, 4, 256, 1024) for prior in (0, 1024, 8192, 65_536)]
    assert times[0] < times[1]
    assert times[1] == pytest.approx(times[2], rel=1e-9)
    assert times[2] == pytest.approx(times[3], rel=1e-9)
    whole = [attention([(n, 0)], 8, 4, 256, 1024) for n in (256, 1024, 1025, 2048, 4096, 8192)]
    assert all(a < b for a, b in pairwise(whole))


def test_linear_attention_does_not_grow_with_the_context() -> None:
    cost, model = step(load_model("qwen3-next-80b-a3b")), load_model("qwen3-next-80b-a3b")
    full = sum(1 for layer in model.layers if layer.attention.kv_heads)
    rise = cost.decode(32).step_s(32 * 20_000) - cost.decode(32).step_s(32 * 10_000)
    read = full * 32 * 10_000 * 2 * 2 * 256 * 2 / CALIBRATION.reference.memory_bytes_per_s
    assert read <= rise < 1.5 * read


# Memory --------------------------------------------------------------------------------------------------------------


def test_what_a_sequence_keeps() -> None:
    assert kv_shape(load_model("llama-3.1-8b"), 1) == PLAIN_KV
    assert kv_shape(load_model("deepseek-v3"), 8) == PLAIN_KV
    assert kv_shape(load_model("mistral-7b-v0.1"), 1) == KvShape(4096, 1, 0)
    shape = kv_shape(load_model("gemma-2-9b"), 1)
    assert shape == KvShape(4096, 2, 1)
    assert shape.units(4096, 16) == 2 * 256
    assert shape.units(8192, 16) == 2 * 256 + 256


@pytest.mark.parametrize(("name", "share"), [("gemma-3-27b", 1.0), ("gpt-oss-120b", 0.8)])
def test_sglang_keeps_every_token_of_layers_with_a_window(name: str, share: float) -> None:
    model = load_model(name)
    assert load_calibration("h100-vllm").window_share(model.model_type) is None
    assert load_calibration("h100-sglang").window_share(model.model_type) == share
    served = model.served(window_share=share)
    assert kv_shape(served, 1) == KvShape(kv_shape(model, 1).window_tokens, 1, 1)
    full = sum(n for layer, n in model.groups.items() if layer.attention.window_tokens is None)
    windowed = model.num_hidden_layers - full
    assert served.sequence_bytes(65_536) / model.kv_bytes_per_token == pytest.approx(
        65_536 * (full + share * windowed) / model.num_hidden_layers
    )
    assert 65_536 / 16 * kv_page_bytes(served, 1, 16) == served.sequence_bytes(65_536)
    assert load_model("qwen2.5-7b").served(window_share=1.0) == load_model("qwen2.5-7b")


@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-27b", "mistral-7b-v0.1", "qwen3-next-80b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("tokens", [160, 65_536])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_units_are_the_bytes_of_a_sequence(name: str, tokens: int, kv: KvPrecision) -> None:
    model = load_model(name).served(kv_precision=kv)
    shape = kv_shape(model, 1)
    counted = shape.units(tokens, 16) / shape.page_units * kv_page_bytes(model, 1, 16)
    state_rounding = kv_page_bytes(model, 1, 16) if shape.state_tokens else 0.0
    assert 0 <= counted - model.sequence_bytes(tokens) <= state_rounding

"""Engines that share their GPU, or keep layers in host memory, by hand."""

import pytest
from workloads import LinearStep

from rlsim.cost.derived import crowded, streamed
from rlsim.cost.memory import RESERVED_BYTES, rollout_activation_bytes, rollout_weight_bytes
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import judge_bytes, layers_to_offload, stream_s
from rlsim.models.hardware import Link
from rlsim.models.model import load_model

LLAMA = load_model("llama-3.1-8b")
LAYER_BYTES = 436_224_000  # 218,112,000 weights in bf16
ONE_A_SECOND = Link(name="made-up", bytes_per_s=LAYER_BYTES, latency_s=0.0)
STEP = LinearStep(a=1.0, b=0.5, t=0.25, p=2.0, skew=0.1)


def test_beside_other_work_everything_takes_so_many_times_as_long() -> None:
    slow = crowded(STEP, 3.0)
    assert slow.decode(2).step_s(8) == pytest.approx(3 * (1 + 1 + 2))
    assert slow.decode(2).step_s(5e6) == pytest.approx(3 * (2 + 0.25 * 5e6))
    assert slow.prefill_s([Chunk(4, 0)]) == pytest.approx(3 * 9)
    assert slow.mixed_s(2, 8, [Chunk(4, 0)]) == pytest.approx(3 * (4 + 8))
    assert (slow.tp, slow.skew) == (1, 0.1)
    assert crowded(STEP, 1.0).prefill_s([Chunk(4, 0)]) == 9.0


def test_layers_from_host_memory_set_the_pace_where_they_take_longer() -> None:
    slow = streamed(STEP, 10.0)
    assert slow.decode(2).step_s(8) == 10.0
    assert slow.decode(2).step_s(40) == pytest.approx(12.0)
    assert [slow.prefill_s([Chunk(n, 0)]) for n in (4, 5)] == [10.0, 11.0]
    assert [slow.mixed_s(2, t, [Chunk(2, 0)]) for t in (0, 40)] == [10.0, 16.0]
    assert (slow.tp, slow.skew) == (1, 0.1)


def test_as_many_layers_as_a_full_prefill_hides() -> None:
    """Sequences of 2,000 tokens in a batch of 5,000: two whole ones and half of one, 4.5 s of attention."""
    attention = LinearStep(q=1e-6)
    assert layers_to_offload(LLAMA, attention, ONE_A_SECOND, 5000, 2000) == 4
    assert layers_to_offload(LLAMA, attention, ONE_A_SECOND, 4000, 2000) == 4  # two whole ones
    assert layers_to_offload(LLAMA, attention, ONE_A_SECOND, 3999, 2000) == 3
    assert layers_to_offload(LLAMA, LinearStep(a=0.9), ONE_A_SECOND, 5000, 2000) == 0
    assert layers_to_offload(LLAMA, LinearStep(a=31.9), ONE_A_SECOND, 5000, 2000) == 31
    assert layers_to_offload(LLAMA, LinearStep(a=99.0), ONE_A_SECOND, 5000, 2000) == 32  # all there are
    assert layers_to_offload(LLAMA, LinearStep(q=1e-6, tp=2), ONE_A_SECOND, 5000, 2000) == 9  # each GPU half of a layer


def test_seconds_of_copying_layers() -> None:
    link = Link(name="made-up", bytes_per_s=1e9, latency_s=0.5)
    assert stream_s(LLAMA, 3, 2, link) == pytest.approx(0.5 + 3 * LAYER_BYTES / 2 / 1e9)
    assert stream_s(LLAMA, 0, 2, link) == 0.0


@pytest.mark.parametrize(("layers", "fewer"), [(0, 0), (1, 0), (2, 0), (3, 1), (10, 8)])
def test_bytes_of_a_judge_whose_layers_are_in_host_memory(layers: int, fewer: int) -> None:
    """Two of the layers have buffers on the GPU."""
    for tp in (1, 4):
        whole = rollout_weight_bytes(LLAMA, tp) + rollout_activation_bytes(LLAMA, tp, 8192, 64) + RESERVED_BYTES
        assert judge_bytes(LLAMA, layers, tp, 8192, 64) == pytest.approx(whole - fewer * LAYER_BYTES / tp)

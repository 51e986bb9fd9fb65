"""The lower bound of a generation stage, by hand."""

import pytest
from workloads import LinearStep

from rlsim.cost.bound import GenerationBound


def test_nothing_to_generate_takes_no_time() -> None:
    bound = GenerationBound({1: LinearStep(a=1.0)}, 1, 4)
    assert bound.time_s([], []) == 0.0
    assert bound.time_s([10], [1]) == 0.0  # the prefill gives the first token


def test_total_work_in_the_best_company() -> None:
    """A step of b sequences takes 1 + b/4 seconds: in company of four a token costs half a GPU-second."""
    bound = GenerationBound({1: LinearStep(a=1.0, b=0.25)}, 2, 4)
    assert bound.time_s([3] * 10, [5] * 10) == pytest.approx(40 * 0.5 / 2)
    more = GenerationBound({1: LinearStep(a=1.0, b=0.25)}, 3, 4)
    assert more.time_s([3] * 10, [5] * 10) == pytest.approx(40 * 0.5 / 3)


def test_longest_response_at_the_fastest_step() -> None:
    """Alone a step takes 1.25 s."""
    bound = GenerationBound({1: LinearStep(a=1.0, b=0.25)}, 2, 4)
    assert bound.time_s([3] * 10, [5] * 9 + [41]) == pytest.approx(40 * 1.25)
    faster = GenerationBound({1: LinearStep(a=1.0, b=0.25), 2: LinearStep(a=0.5, b=0.25, tp=2)}, 2, 4)
    assert faster.time_s([3] * 10, [5] * 9 + [41]) == pytest.approx(40 * 0.75)


def test_context_makes_work_dearer() -> None:
    """In company of four a token with t tokens of context costs 1/4 + t/100 GPU-seconds. After a prompt of three tokens
    a response of five has four to decode, with contexts of 4 to 7."""
    bound = GenerationBound({1: LinearStep(a=1.0, t=0.01)}, 1, 4)
    assert bound.time_s([3] * 10, [5] * 10) == pytest.approx(40 * (0.25 + 0.055))
    # contexts of 101 to 104, and 4 to 7: the mean counts
    assert bound.time_s([3, 100] * 5, [5] * 10) == pytest.approx(40 * (0.25 + 0.01 * (5.5 + 102.5) / 2))


def test_contexts_of_the_longest_response_are_rounded_down_to_32_tokens() -> None:
    bound = GenerationBound({1: LinearStep(a=1.0, t=0.01)}, 1000, 4)
    # 94 and 95 count as 64, 96 and 97 as 96; 1 + context / 100 seconds each
    assert bound.time_s([93], [5]) == pytest.approx(2 * 1.64 + 2 * 1.96)


def test_gpu_seconds_of_a_degree_count_for_all_its_gpus() -> None:
    """Two GPUs at 0.4 s a step are 0.8 GPU-seconds, less than one GPU at 1 s; at 0.6 s they are more."""
    for step_s, least in ((0.4, 0.8), (0.6, 1.0)):
        bound = GenerationBound({1: LinearStep(a=1.0), 2: LinearStep(a=step_s, tp=2)}, 1, 1)
        assert bound.time_s([3] * 10, [5] * 10) == pytest.approx(40 * least)


def test_a_straight_line_below_the_cheapest_of_both() -> None:
    """min(1 + t/10, 3) is not convex: only its hull, which hardly leaves 1, bounds every mixture of contexts."""
    bound = GenerationBound({1: LinearStep(a=1.0, t=0.1), 2: LinearStep(a=1.5, tp=2)}, 1, 1)
    assert bound.time_s([99], [3]) == pytest.approx(2 * 1.5, rel=1e-3)  # the longest response at the fastest
    assert bound.time_s([99] * 10, [3] * 10) == pytest.approx(20 * 1.0, rel=1e-3)


def test_large_batches_are_looked_up_a_few_percent_apart_and_never_too_dear() -> None:
    """A token costs 1/b + 1/1000 GPU-seconds; between the sizes looked up as if the next smaller were as large."""
    for most in (40, 100, 1000):
        found = GenerationBound({1: LinearStep(a=1.0, b=0.001)}, 1, most).time_s([3] * 1000, [1001] * 1000)
        exact = 1e6 * (1 / most + 0.001)
        assert 0.97 * exact < found <= exact * (1 + 1e-12)


def test_the_hull_of_several_bends() -> None:
    """1 + t/100, ten times as steep from 100 tokens on and twenty times from 200. Where two GPUs never take more than
    6 s, the hull is the line from one second without context to 12 GPU-seconds a million tokens away."""
    steps = {1: LinearStep(a=1.0, t=0.01, kinks=((100, 0.09), (200, 0.1)))}
    rising = GenerationBound(steps, 1, 1)
    for prompt, each in ((48, 1.505), (148, 7.05), (248, 22.1)):  # contexts are 2.5 more in the mean
        assert rising.time_s([prompt] * 10, [5] * 10) == pytest.approx(40 * each)
    cut = GenerationBound({**steps, 2: LinearStep(a=6.0, tp=2)}, 1, 1)
    assert cut.time_s([148] * 10, [5] * 10) == pytest.approx(40 * (1 + 150.5 * 11 / 1_000_402), rel=1e-6)

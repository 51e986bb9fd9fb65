"""The lower bound of a generation stage, by hand."""

import pytest
from workloads import LinearStep

from rlsim.cost.bound import GenerationBound


@pytest.mark.parametrize(
    ("steps", "gpus", "most", "prompts", "responses", "expected"),
    [
        ({1: {}}, 1, 4, [], [], 0.0),
        ({1: {}}, 1, 4, [10], [1], 0.0),  # the prefill gives the first token
        # A step of b sequences takes 1 + b/4 seconds: in company of four a token costs half a GPU-second.
        ({1: {"b": 0.25}}, 3, 4, [3] * 10, [5] * 10, 40 * 0.5 / 3),
        # The longest response alone at the fastest step.
        ({1: {"b": 0.25}, 2: {"a": 0.5, "b": 0.25}}, 2, 4, [3] * 10, [5] * 9 + [41], 40 * 0.75),
        # In company of four a token with t tokens of context costs 1/4 + t/100 GPU-seconds. After a prompt of three
        # tokens a response of five has four to decode, with contexts of 4 to 7; with 101 to 104 too the mean counts.
        ({1: {"t": 0.01}}, 1, 4, [3] * 10, [5] * 10, 40 * (0.25 + 0.055)),
        ({1: {"t": 0.01}}, 1, 4, [3, 100] * 5, [5] * 10, 40 * (0.25 + 0.01 * (5.5 + 102.5) / 2)),
        # Contexts of the longest response are rounded down to 32: 94 and 95 count as 64, 96 and 97 as 96.
        ({1: {"t": 0.01}}, 1000, 4, [93], [5], 2 * 1.64 + 2 * 1.96),
        # Two GPUs at 0.4 s a step are 0.8 GPU-seconds, less than one GPU at 1 s; at 0.6 s they are more.
        ({1: {}, 2: {"a": 0.4}}, 1, 1, [3] * 10, [5] * 10, 40 * 0.8),
        ({1: {}, 2: {"a": 0.6}}, 1, 1, [3] * 10, [5] * 10, 40 * 1.0),
        # min(1 + t/10, 3) is not convex: only its hull, which hardly leaves 1, bounds every mixture of contexts.
        ({1: {"t": 0.1}, 2: {"a": 1.5}}, 1, 1, [99], [3], 2 * 1.5),  # the longest response at the fastest
        ({1: {"t": 0.1}, 2: {"a": 1.5}}, 1, 1, [99] * 10, [3] * 10, 20 * 1.0),
    ],
)
def test_bounds_by_hand(
    steps: dict[int, dict[str, float]],
    gpus: int,
    most: int,
    prompts: list[int],
    responses: list[int],
    expected: float,
) -> None:
    made = {tp: LinearStep(**{"a": 1.0, "tp": tp, **words}) for tp, words in steps.items()}  # type: ignore[arg-type]
    assert GenerationBound(made, gpus, most).time_s(prompts, responses) == pytest.approx(expected, rel=1e-3)


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

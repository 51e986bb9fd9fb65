"""Properties of the step sampler, on random traces."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsim.errors import TraceError
from rlsim.trace import StepSampler, Trace, TraceMeta, make_trace


def grid(prompts: int, samples: int, epochs: int = 1, cap: int | None = None, seed: int = 0) -> Trace:
    epoch, prompt, sample = (a.ravel() for a in np.indices((epochs, prompts, samples)))
    length = np.random.default_rng(seed).integers(1, cap or 1000, len(prompt), endpoint=True)
    if cap is not None:
        length[::10] = cap
    frame = pd.DataFrame({"prompt_id": prompt, "sample_id": sample, "epoch": epoch, "response_tokens": length})
    return make_trace(frame.assign(prompt_tokens=100 + prompt), TraceMeta(cap_tokens=cap))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 20), samples=st.integers(1, 6), epochs=st.integers(1, 3), take=st.integers(1, 25),
    wanted=st.integers(1, 8), seed=st.integers(0, 2**31), steps=st.integers(1, 8),
)  # fmt: skip
def test_every_prompt_once_an_epoch(
    prompts: int, samples: int, epochs: int, take: int, wanted: int, seed: int, steps: int
) -> None:
    trace = grid(prompts, samples, epochs)
    if samples < wanted and prompts * samples < wanted:
        return
    sampler = StepSampler(trace, take, wanted, seed=seed)
    again = StepSampler(trace, take, wanted, seed=seed)
    batches = [sampler.step(k) for k in range(steps)]
    for one, two in zip(batches, map(again.step, range(steps)), strict=True):
        assert len(one) == take * wanted
        assert all(np.array_equal(getattr(one, f), getattr(two, f)) for f in one.__dataclass_fields__)
    size = sampler.epoch_size(0)
    order = np.concatenate([b.prompt[::wanted] for b in batches])
    epoch = np.concatenate([b.epoch[::wanted] for b in batches])
    for first in range(0, len(order) - size + 1, size):
        assert sorted(order[first : first + size]) == list(range(size))
        assert set(epoch[first : first + size]) == {first // size}
    rows = np.concatenate([b.row for b in batches]).reshape(-1, wanted)
    if samples >= wanted:
        assert all(len(set(r)) == wanted for r in rows)
        frame = trace.frame
        assert (frame["prompt_id"].to_numpy()[rows] == order[:, None]).all()
        assert (frame["epoch"].to_numpy()[rows] == np.minimum(epoch, epochs - 1)[:, None]).all()


def test_samples_do_not_depend_on_how_many_are_taken() -> None:
    trace = grid(40, 10)
    few, many = StepSampler(trace, 8, 10, seed=3), StepSampler(trace, 16, 10, seed=3)
    a, b = few.draw(np.arange(16), np.zeros(16), 4), many.step(0)
    assert np.array_equal(a.row.reshape(16, 4), b.row.reshape(16, 10)[:, :4])
    assert not np.array_equal(StepSampler(trace, 8, 10, seed=4).step(0).row, few.step(0).row)


def test_the_cap_cuts_and_the_traces_own_cap_is_noted() -> None:
    trace = grid(50, 4, cap=500)
    cut = StepSampler(trace, 50, 4, cap_tokens=200).step(0)
    full = trace.response_tokens[cut.row]
    assert np.array_equal(cut.response_tokens, np.minimum(full, 200))
    assert np.array_equal(cut.capped, full > 200)
    above = StepSampler(trace, 50, 4, cap_tokens=800)
    assert trace.capped.any()
    assert any("true lengths are unknown" in n for n in above.notes)
    assert not any("true lengths" in n for n in StepSampler(trace, 50, 4).notes)


def test_prompt_and_response_together_may_be_cut() -> None:
    trace = grid(50, 4, cap=500)  # prompts of 100 to 149 tokens
    cut = StepSampler(trace, 50, 4, cap_tokens=200, max_model_len=310).step(0)
    full, room = trace.response_tokens[cut.row], 310 - cut.prompt_tokens
    assert np.array_equal(cut.response_tokens, np.minimum(full, np.minimum(200, room)))
    assert np.array_equal(cut.capped, (full > 200) | (full > room) | trace.capped[cut.row])
    with pytest.raises(TraceError, match="a prompt of 149 tokens leaves no room for a response in max_model_len, 149"):
        StepSampler(trace, 50, 4, max_model_len=149)


def test_unknown_prompt_lengths_are_filled_and_noted() -> None:
    trace = grid(4, 2)
    assert StepSampler(trace, 2, 2).step(0).prompt_tokens.min() >= 100
    bare = make_trace(trace.frame.drop(columns="prompt_tokens"))
    sampler = StepSampler(bare, 2, 2, default_prompt_tokens=77)
    assert set(sampler.step(0).prompt_tokens) == {77}
    assert any("77 tokens" in n for n in sampler.notes)
    some = trace.frame.assign(prompt_tokens=pd.array([None, *range(1, 8)], dtype="Int64"))
    assert 77 in StepSampler(make_trace(some), 4, 2, default_prompt_tokens=77).step(0).prompt_tokens


def test_single_samples_are_grouped_with_a_note() -> None:
    sampler = StepSampler(grid(100, 1), 12, 8)
    assert sampler.epoch_size(0) == 12
    assert any("at random" in n for n in sampler.notes)
    batch = sampler.step(0)
    assert len(set(batch.row)) == 96
    with pytest.raises(TraceError, match="cannot form one group of 8"):
        StepSampler(grid(7, 1), 5, 8)


def test_too_few_samples_are_used_again_or_left_out_with_a_note() -> None:
    frame = pd.concat([grid(3, 8).frame, grid(2, 4).frame.assign(prompt_id=lambda f: f.prompt_id + 3),
                       grid(1, 1).frame.assign(prompt_id=9)])  # fmt: skip
    sampler = StepSampler(make_trace(frame), 5, 8)
    assert sampler.epoch_size(0) == 5
    assert any("1 of 6 prompts" in n and "left out" in n for n in sampler.notes)
    assert any("2 of 6 prompts" in n and "used again" in n for n in sampler.notes)
    rows = sampler.step(0).row.reshape(5, 8)
    assert sorted(len(set(r)) for r in rows) == [4, 4, 8, 8, 8]
    thin = [grid(3, 8).frame.assign(epoch=e) for e in (0, 2)] + [grid(3, 1).frame.assign(epoch=1)]
    notes = StepSampler(make_trace(pd.concat(thin)), 3, 8).notes
    assert "no prompt of epoch 1 is left: those after it move up" in notes


def test_beyond_the_last_epoch_and_more_prompts_than_there_are() -> None:
    sampler = StepSampler(grid(4, 2, epochs=2), 6, 2)
    assert any("more than once in a step" in n for n in sampler.notes)
    batch = sampler.draw(np.arange(16), np.zeros(16), 2)
    assert any("the last is repeated" in n for n in sampler.notes)
    assert set(batch.epoch) == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", [{"prompts": 0}, {"responses": 0}, {"cap_tokens": 0}, {"default_prompt_tokens": 0},
                                 {"max_model_len": 0}])  # fmt: skip
def test_parameters_below_one(bad: dict[str, int]) -> None:
    with pytest.raises(TraceError, match="must be at least 1"):
        StepSampler(grid(4, 2), **({"prompts": 1, "responses": 1} | bad))

"""The sequences that a replica decodes together, by hand: pages of four tokens, prompts, and what is generated."""

from __future__ import annotations

from collections import Counter

import pytest

from rlsim.cost.curve import DecodeCurve
from rlsim.sim.batch import RunningBatch
from rlsim.sim.request import Request


def batch(*sizes: tuple[int, int, int], pages: int = 100, skew: float = 0.0, chunk: int = 0) -> RunningBatch:
    """A batch of requests: tokens of the prompt, of the response, and generated so far."""
    made = RunningBatch(4, pages, skew, chunk)
    requests = []
    for i, (prompt, response, generated) in enumerate(sizes):
        request = Request(i, i, prompt, response, generated)
        request.order = i + 1
        requests.append(request)
    made.join(requests)
    return made


def go_on(decoding: RunningBatch, steps: int) -> RunningBatch:
    decoding.advance(steps)
    return decoding


def test_pages_are_counted_request_by_request() -> None:
    """Contexts of 4, 5 and 10 tokens: 1 + 2 + 3 pages; a step later 5, 6, 11: 2 + 2 + 3."""
    decoding = batch((3, 9, 1), (4, 9, 1), (5, 9, 5))
    assert [decoding.pages, *(go_on(decoding, 1).pages for _ in range(4))] == [6, 7, 7, 8, 9]
    # ten steps at once: contexts of 14, 15 and 20 tokens
    assert go_on(batch((3, 19, 1), (4, 19, 1), (5, 19, 5)), 10).pages == 4 + 4 + 5


@pytest.mark.parametrize(("pages", "fits"), [(8, False), (9, True)])
def test_what_fits_to_the_end(pages: int, fits: bool) -> None:
    """In the end 9 + 9 + 9 tokens, in three pages each: though the tokens would fill seven."""
    assert batch((4, 5, 1), (4, 5, 1), (8, 1, 0), pages=pages).fits_to_the_end() is fits


def test_steps_to_the_next_finish_chunk_or_missing_page() -> None:
    sizes = ((3, 9, 1), (4, 6, 1), (5, 19, 5))
    assert batch(*sizes).steps_ahead() == 5
    # pages after 0, 1, 2, … steps: 6, 7, 7, 8, 9; with eight of them the fifth step has no room
    assert [batch(*sizes, pages=n).steps_ahead() for n in (6, 7, 8, 9)] == [1, 3, 4, 5]
    assert batch(*sizes, chunk=4).steps_ahead() == 3  # 5 + 3 = 8 generated, 1 + 3 = 4
    assert batch(*sizes, chunk=7).steps_ahead() == 2
    # a chunk that would end with the response is none
    assert batch((3, 8, 5), chunk=8).steps_ahead() == 3


def test_chunks_are_told_of_once() -> None:
    decoding = go_on(batch((3, 9, 1), (5, 19, 5), chunk=4), 3)
    assert [(request.id, tokens) for request, tokens in decoding.chunks_complete()] == [(0, 4), (1, 8)]
    assert decoding.chunks_complete() == []
    assert decoding.steps_ahead() == 4


def test_a_step_pays_for_a_share_of_the_padding_to_the_longest() -> None:
    """Contexts of 4, 5 and 10: padded to 30, of which a tenth of the 11 tokens more."""
    sizes = ((3, 9, 1), (4, 9, 1), (5, 9, 5))
    assert batch(*sizes).padded_tokens() == 19
    assert batch(*sizes, skew=0.1).padded_tokens() == pytest.approx(19 + 1.1)
    assert go_on(batch(*sizes, skew=0.1), 2).padded_tokens() == pytest.approx(25 + 1.1)
    decoding = batch(*sizes, skew=0.1)
    decoding.leave([request for request in decoding if request.id == 2])
    assert decoding.padded_tokens() == pytest.approx(9 + 0.1)  # the longest left has 5


def test_who_leaves_keeps_what_was_generated() -> None:
    decoding = go_on(batch((3, 4, 1), (4, 9, 1)), 3)
    assert decoding.generated(decoding.step) == Counter({4: 2})
    (finished,) = decoding.complete()
    assert (finished.id, finished.generated, finished.order) == (0, 4, 0)
    assert (decoding.size, decoding.tokens) == (1, 8)
    assert decoding.generated(decoding.step + 1) == Counter({5: 1})
    assert [request.id for request in decoding.requests()] == [1]


@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_a_drain_decodes_to_the_end(skew: float) -> None:
    """A step of b sequences takes b seconds and 1/100 for each token of context, padding in part.

    Contexts 4 and 10, for three and five more steps: three of both, then two of the longer, which has 13 then.
    """
    decoding = batch((3, 4, 1), (5, 10, 5), skew=skew)
    together = sum(2 + 0.01 * (14 + 2 * i + skew * 6) for i in range(3))
    alone = sum(1 + 0.01 * (13 + i) for i in range(2))
    curves = {b: DecodeCurve(b, [0.0, 100.0], [b, b + 1.0]) for b in (1, 2)}
    end, finished, peak = decoding.drain(7.0, curves.__getitem__)
    assert [(r.id, r.generated, r.order) for r in finished] == [(0, 4, 0), (1, 10, 0)]
    assert [r.finished_at for r in finished] == pytest.approx([7 + together, 7 + together + alone])
    assert end == finished[1].finished_at
    assert peak == 14 + 2 * 3  # both, before the shorter leaves
    assert (decoding.size, decoding.tokens, decoding.step, decoding.pages) == (0, 0, 5, 0)
    assert decoding.generated(decoding.step) == Counter()

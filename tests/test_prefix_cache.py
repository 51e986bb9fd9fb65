"""Prefix caching: by hand, in the engine and in the token-by-token reference, and what it saves."""

from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from reference import RefEngine, RefRequest
from test_engine import check, relaxed, simulate
from test_reference import COSTS, PLAIN, capacity
from workloads import Nothing, StubCosts, Workload, workloads

from rlsim.cost.calibration import load_calibration
from rlsim.cost.transfer import HostKv
from rlsim.sim.prefix_cache import PrefixCache
from rlsim.sim.request import EngineConfig, Request

SCHEDULED = replace(PLAIN, page_tokens=2, prefix_hits="scheduled")
PREFILLED = replace(SCHEDULED, prefix_hits="prefilled")


def finishes(
    requests: list[tuple[int, int, int]], engine: RefEngine, costs: StubCosts = COSTS
) -> tuple[dict[int, float], int]:
    """When requests of (position, prompt tokens, response tokens) are complete on one GPU, and the tokens found."""
    made = tuple(RefRequest(i, *request) for i, request in enumerate(requests))
    work = Workload(made, (1,), 1, costs, engine, 100, Nothing(), "contiguous")
    check(work)
    rollout, _ = simulate(work)
    return {r.id: r.finished_at for r in rollout.requests}, sum(replica.hit_tokens for replica in rollout.replicas)


# With the costs of test_reference: a prefill of n tokens 1 + n/8 s, a decode of s sequences with T 1 + s/4 + T/64 s.
# A prompt of 5 tokens has two full pages of two tokens.


def test_samples_share_a_prefill_in_the_iteration_that_computes_it_or_later() -> None:
    first = 1 + (5 + 1) / 8
    end = first + 1 + 2 / 4 + 12 / 64
    assert finishes([(0, 5, 2), (0, 5, 2)], SCHEDULED) == ({0: end, 1: end}, 4)
    end = 1 + (5 + 5) / 8 + 1 + 2 / 4 + 12 / 64
    assert finishes([(0, 5, 2), (0, 5, 2)], PREFILLED) == ({0: end, 1: end}, 0)
    first, second = 1 + 5 / 8, 1 + 1 / 8
    assert finishes([(0, 5, 1), (0, 5, 1)], replace(PREFILLED, max_num_seqs=1)) == ({0: first, 1: first + second}, 4)


def test_admission_counts_new_pages_only() -> None:
    """Three samples need 3 + 1 + 1 pages; without sharing the second would wait."""
    finished_at, _ = finishes([(0, 5, 1)] * 3, SCHEDULED, capacity(5))
    assert set(finished_at.values()) == {1 + 7 / 8}
    finished_at, _ = finishes([(0, 5, 1)] * 3, replace(SCHEDULED, prefix_hits="off"), capacity(5))
    assert sorted(finished_at.values()) == [1 + 5 / 8, 2 * (1 + 5 / 8), 3 * (1 + 5 / 8)]


def test_what_nobody_holds_goes_from_its_end_when_others_need_the_room() -> None:
    """Of four common pages of one token request 1 leaves one: it needs 7 of 8 with its own first token."""
    one_by_one = replace(SCHEDULED, page_tokens=1, max_num_seqs=1)
    first, second, third = 1 + 5 / 8, 1 + 6 / 8, 1 + (5 - 1) / 8
    finished_at, found = finishes([(0, 5, 1), (1, 6, 1), (0, 5, 1)], one_by_one, capacity(8))
    assert (finished_at, found) == ({0: first, 1: first + second, 2: first + second + third}, 1)


def test_a_preempted_response_finds_what_is_left_of_its_own_pages() -> None:
    """As in the reference's test of preemption: request 1 leaves with 7 tokens, 6 of them computed, beside 7 pages."""
    shared = replace(SCHEDULED, page_tokens=1)
    finished_at, found = finishes([(0, 4, 4), (1, 4, 4)], shared, capacity(12))
    evicted = (1 + 8 / 8) + (1.5 + 10 / 64) + (1.5 + 12 / 64)
    first = evicted + 1.25 + 7 / 64
    left = 12 - 8  # request 0 has 8 tokens when it is complete
    assert (finished_at, found) == ({0: first, 1: first + 1 + (7 - left) / 8}, left)


def test_engines_differ_in_when_pages_are_found() -> None:
    assert {name: load_calibration(f"h100-{name}").prefix_hits for name in ("sglang", "vllm", "trtllm")} == {
        "sglang": "prefilled",
        "vllm": "scheduled",
        "trtllm": "scheduled",
    }
    assert EngineConfig().with_prefix_hits("prefilled").prefix_hits == "prefilled"
    assert EngineConfig(prefix_hits="scheduled").with_prefix_hits("prefilled").prefix_hits == "scheduled"


# --------------------------------------------------------------------------------------------------- KV offloading


def offloaded(pages: int, host: HostKv) -> StubCosts:
    return replace(capacity(pages), hosts={1: host})


def test_a_preempted_response_loads_what_others_took_the_room_of() -> None:
    """As above: four pages of request 1 are still there when it comes back, the other two come from host memory."""
    shared = replace(SCHEDULED, page_tokens=1)
    evicted = (1 + 8 / 8) + (1.5 + 10 / 64) + (1.5 + 12 / 64)
    first = evicted + 1.25 + 7 / 64
    for host, left, time_s in (
        (HostKv(2, 0.25, 1.0), 6, 0.25 + 2 * 1.0),  # longer than the prefill of the last token
        (HostKv(2, 0.25, 0.25), 6, 1 + 1 / 8),  # in its time
        (HostKv(1, 0.25, 0.25), 5, 1 + 2 / 8),  # the last page found no room
    ):
        finished_at, found = finishes([(0, 4, 4), (1, 4, 4)], shared, offloaded(12, host))
        assert (finished_at, found) == ({0: first, 1: first + time_s}, left)


def test_a_context_may_be_let_go_and_forgotten_again_and_again_at_one_boundary() -> None:
    cache, request = PrefixCache(1), Request(0, 0, 5, 3, generated=1)
    for _ in range(3):
        for _ in range(2):
            cache.hold(request, fills=True)
            cache.release(request, computed_tokens=5)
        assert cache.idle_pages == 5
        cache.evict(0)
        assert (cache.idle_pages, cache.find(request)) == (0, (0, 0, 0))


def test_what_runs_has_its_pages_before_who_waits_looks_for_some() -> None:
    """One response leaves at the boundary at which another one grows: the page that goes for that takes the place, in
    host memory for one, of the page that the waiting request would have found there."""
    shared = replace(SCHEDULED, page_tokens=1)
    assert finishes([(0, 4, 4), (0, 3, 2), (2, 2, 2)], shared, offloaded(9, HostKv(1, 0.0, 1.0)))[1] == 0


def test_prompts_come_back_from_host_memory() -> None:
    """As above: of the four common pages one is left on the GPU, and the others are loaded."""
    one_by_one = replace(SCHEDULED, page_tokens=1, max_num_seqs=1)
    first, second, third = 1 + 5 / 8, 1 + 6 / 8, 1 + 1 / 8
    requests = [(0, 5, 1), (1, 6, 1), (0, 5, 1)]
    finished_at, found = finishes(requests, one_by_one, offloaded(8, HostKv(10, 0.0, 0.125)))
    assert (finished_at, found) == ({0: first, 1: first + second, 2: first + second + third}, 4)


class Counted(PrefixCache):
    """Counts all pages anew whenever some are let go."""

    def evict(self, free_pages: int) -> None:
        super().evict(free_pages)
        cached = self._cached.values()
        assert self.idle_pages == sum(one.pages for one in cached if not one.holders) <= max(free_pages, 0)
        assert self.offloaded_pages == sum(one.offloaded for one in cached) <= self._host_pages
        assert not any(one.offloaded for one in cached if one.holders)


@settings(relaxed, max_examples=50)
@given(workloads(prefixes=True, offloaded=True, max_requests=12))
def test_pages_are_where_they_are_counted(work: Workload) -> None:
    with patch("rlsim.sim.scheduler.PrefixCache", Counted):
        simulate(work)


# ------------------------------------------------------------------------------------------------- random rollouts


STATIC = workloads(prefixes=True, deciding=lambda *_: st.just(Nothing()), max_requests=24)


@settings(relaxed, max_examples=50)
@given(STATIC)
def test_with_room_for_all_each_prompt_is_prefilled_once_on_each_replica(work: Workload) -> None:
    room = dict.fromkeys(work.costs.pages, 10**6)
    engine = replace(work.engine, prefix_hits="scheduled", watermark_pages=0)
    work = replace(work, costs=replace(work.costs, pages=room), engine=engine)
    rollout, _ = simulate(work)
    samples: dict[tuple[int, int, int], int] = defaultdict(int)
    for r in rollout.requests:
        samples[r.replica, r.position, r.prompt_tokens] += 1
    page = engine.page_tokens
    common = sum((n - 1) * ((tokens - 1) // page) * page for (*_, tokens), n in samples.items())
    assert sum(replica.hit_tokens for replica in rollout.replicas) == common
    contexts = sum(r.prompt_tokens + r.generated for r in work.requests)
    assert work.simulate().prefilled_tokens == contexts - common

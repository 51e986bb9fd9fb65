"""Prefix caching beyond the timelines of cases/timelines.yaml: how pages are counted, and what it saves."""

from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import relaxed, simulate
from workloads import Nothing, Workload, workloads

from rlsim.cost.calibration import load_calibration
from rlsim.sim.prefix_cache import PrefixCache
from rlsim.sim.request import EngineConfig, Request


def test_engines_differ_in_when_pages_are_found() -> None:
    assert {name: load_calibration(f"h100-{name}").prefix_hits for name in ("sglang", "vllm", "trtllm")} == {
        "sglang": "prefilled",
        "vllm": "scheduled",
        "trtllm": "scheduled",
    }
    assert EngineConfig().with_prefix_hits("prefilled").prefix_hits == "prefilled"
    assert EngineConfig(prefix_hits="scheduled").with_prefix_hits("prefilled").prefix_hits == "scheduled"


def test_a_context_may_be_let_go_and_forgotten_again_and_again_at_one_boundary() -> None:
    cache, request = PrefixCache(1), Request(0, 0, 5, 3, generated=1)
    for _ in range(3):
        for _ in range(2):
            cache.hold(request, fills=True)
            cache.release(request, computed_tokens=5)
        assert cache.idle_pages == 5
        cache.evict(0)
        assert (cache.idle_pages, cache.find(request)) == (0, (0, 0, 0))


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
    engine = work.engine.model_copy(update={"prefix_hits": "scheduled", "free_pages": 0})
    work = replace(work, costs=replace(work.costs, pages=room), engine=engine)
    rollout, _ = simulate(work)
    samples: dict[tuple[int, int, int], int] = defaultdict(int)
    for r in rollout.requests:
        samples[r.replica, r.position, r.prompt_tokens] += 1
    page = engine.page_tokens
    common = sum((n - 1) * ((tokens - 1) // page) * page for (*_, tokens), n in samples.items())
    assert sum(replica.scheduler.hit_tokens for replica in rollout.replicas) == common

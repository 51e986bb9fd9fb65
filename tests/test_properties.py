"""What must hold on any rollout: scaling, bounds, conservation, monotonicity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import RefEngine, RefRequest
from test_engine import simulate
from workloads import LinearStep, Nothing, StubCosts, Workload, workloads

from rlsim.cost.bound import GenerationBound
from rlsim.cost.roofline import step_cost
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout
from rlsim.sim.stage import GenerationStage

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, max_examples=60)


def scaled(work: Workload, factor: float) -> Workload:
    costs = work.costs
    times = ("weights_s", "capture_s", "kv_per_token_s", "first_use_s", "transfer_base_s", "transfer_per_token_s")
    steps = {tp: dataclasses.replace(step, scale=step.scale * factor) for tp, step in costs.steps.items()}
    larger = dataclasses.replace(costs, steps=steps, **{name: getattr(costs, name) * factor for name in times})
    return dataclasses.replace(work, costs=larger)


@settings(relaxed)
@given(workloads(), st.sampled_from([0.01, 0.5, 3.7, 1000.0]))
def test_scaling_every_cost_scales_every_time(work: Workload, factor: float) -> None:
    once, _ = simulate(work)
    other, _ = simulate(scaled(work, factor))
    assert [r.generated for r in once.requests] == [r.generated for r in other.requests]
    assert [r.preemptions for r in once.requests] == [r.preemptions for r in other.requests]
    for a, b in zip(once.requests, other.requests, strict=True):
        assert b.finished_at == pytest.approx(a.finished_at * factor, rel=1e-9, nan_ok=True)


@settings(relaxed)
@given(workloads())
def test_tokens_are_conserved(work: Workload) -> None:
    rollout, _ = simulate(work)
    first = len(work.requests)
    launched = {r.id: work.requests[r.id % first].response_tokens for r in rollout.requests}
    assert len(rollout.requests) >= first
    finished = {r.id for r in rollout.requests if r.finished}
    aborted = {r.id for r in rollout.requests if r.aborted}
    paused = {r.id for r in rollout.requests if r.at_limit and not r.finished}  # their budgets are used up
    carried = set(launched) - finished - aborted - paused
    assert not finished & aborted
    assert set(launched) == set(range(len(rollout.requests)))
    for r in rollout.requests:
        assert r.response_tokens == launched[r.id]
        assert r.generated == launched[r.id] if r.id in finished else 0 <= r.generated < launched[r.id]
    if type(work.control).__name__ in (
        "Nothing",
        "SwitchAt",
        "SwitchUnused",
        "Balance",
        "Gather",
        "Shrink",
        "LaunchMore",
    ):
        assert not aborted | carried


def plain(lengths: Sequence[int], pages: int, tp: int = 1, gpus: int = 1, seed: int = 0, prompt: int = 20) -> Workload:
    """A static rollout on one node, in plain mode; prefill and decode as a real machine's, in proportion."""
    rng = np.random.default_rng(seed)
    a, b, t = rng.uniform(2e-3, 2e-2), rng.uniform(1e-5, 1e-3), rng.uniform(1e-7, 1e-5)
    step = {d: LinearStep(a, b, t, p=2 * b, q=t, scale=0.3 + 0.7 / d, tp=d) for d in (1, 2, 4, 8) if d <= gpus}
    return Workload(
        requests=tuple(RefRequest(i, i, prompt, int(length), 0) for i, length in enumerate(lengths)),
        node_gpus=(gpus,),
        tp=tp,
        costs=StubCosts(steps=step, pages=dict.fromkeys(step, pages)),
        engine=RefEngine(
            page_tokens=16, max_num_seqs=256, max_num_batched_tokens=2048, chunked_prefill=False, watermark_pages=0
        ),
        cap_tokens=max(lengths),
        control=Nothing(),
        routing="contiguous",
    )


LENGTHS = st.lists(st.one_of(st.integers(1, 400), st.just(1), st.just(100)), min_size=1, max_size=24)


@settings(relaxed)
@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**16))
def test_no_rollout_beats_the_bound(lengths: list[int], tp: int, seed: int) -> None:
    work = plain(lengths, 10**6, tp, 8, seed)
    rollout, _ = simulate(work)
    bound = GenerationBound(work.costs.steps, 8, len(lengths))
    assert rollout.env.now >= bound.time_s([20] * len(lengths), lengths) * (1 - 1e-9)


def test_a_long_sequence_beside_short_ones_does_not_beat_the_bound() -> None:
    """Some decode kernels run one long sequence faster with a few short ones beside it."""
    prompts, lengths = [100_000, 100, 100, 100], [4000, 4000, 4000, 4000]
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xh100")
    steps = {tp: step_cost(model, tp, cluster, "h100-vllm") for tp in (1, 2, 4, 8)}
    bound_s = GenerationBound(steps, 8, 128).time_s(prompts, lengths)
    for tp, step in steps.items():
        env = simpy.Environment()
        rollout = Rollout(
            env,
            GenerationStage(
                mesh=[tuple(range(8))],
                tp=tp,
                requests=[Request(i, i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))],
                costs=StubCosts({tp: step}, {tp: 10**6}),  # type: ignore[dict-item]
                config=EngineConfig(),
                control=Nothing(),
                cap_tokens=4000,
            ),
        )
        env.run(rollout.done)
        assert env.now >= bound_s


@settings(relaxed)
@given(LENGTHS, st.integers(0, 2**16), st.integers(0, 23), st.integers(1, 300))
def test_a_longer_response_ends_no_rollout_earlier(lengths: list[int], seed: int, which: int, more: int) -> None:
    longer = list(lengths)
    longer[which % len(lengths)] += more
    before, _ = simulate(plain(lengths, 10**6, seed=seed))
    after, _ = simulate(plain(longer, 10**6, seed=seed))
    assert after.env.now >= before.env.now * (1 - 1e-9)


def preemptions(lengths: Sequence[int], pages: int) -> int:
    rollout, _ = simulate(plain(lengths, pages))
    return sum(r.preemptions for r in rollout.requests)


@settings(relaxed, max_examples=150)
@given(LENGTHS, st.integers(0, 40))
def test_memory_for_all_means_no_preemption(lengths: list[int], spare: int) -> None:
    need = [-(-(20 + length) // 16) for length in lengths]
    assert preemptions(lengths, sum(need) + spare) == 0
    rollout, _ = simulate(plain(lengths, max(need)))  # room for only one at its full length
    assert all(request.finished for request in rollout.requests)

"""Timelines worked out by hand that pin the token-by-token reference.

With the costs below, on one GPU and in seconds:
    decode of s sequences with T context tokens   1 + s/4 + T/64
    prefill of n tokens                           1 + n/8
    mixed                                         1 + s/4 + T/64 + n/8
and half of that on two GPUs. All numbers are exact in binary, so the tests compare with ==.
"""

from dataclasses import replace
from typing import Any

import pytest
from reference import RefEngine, RefRequest, RefResult, RefRollout
from workloads import At, LinearStep, Nothing, StubCosts

from rlsim.sim.control import (
    Abort,
    Extend,
    Migrate,
    Reconfigure,
    Release,
    ReplicaView,
    RequestView,
    Stop,
)

ONE_GPU = LinearStep(a=1.0, b=1 / 4, t=1 / 64, p=1 / 8)
COSTS = StubCosts(
    steps={1: ONE_GPU, 2: replace(ONE_GPU, scale=0.5, tp=2)},
    pages={1: 1000, 2: 1000},
    weights_s=1.0,  # divided by the new TP
    capture_s=0.25,
    kv_per_token_s=1 / 8,  # divided by the old TP
    first_use_s=2.0,
    transfer_base_s=0.25,
    transfer_per_token_s=1 / 8,
    other_node=3.0,
)
PLAIN = RefEngine(
    page_tokens=1, max_num_seqs=100, max_num_batched_tokens=1000, chunked_prefill=False, watermark_pages=0
)


def run(
    sizes: list[tuple[int, int]],
    *,
    gpus: int = 1,
    nodes: tuple[int, ...] = (),
    tp: int = 1,
    budget: int = 0,
    **settings: Any,
) -> RefResult:
    """A rollout of requests 0, 1, ... with these (prompt, response) tokens; `nodes`: the GPUs of each, if not one."""
    usual: dict[str, Any] = {"costs": COSTS, "engine": PLAIN, "control": Nothing()}
    requests = tuple(RefRequest(i, i, *size, budget_tokens=budget) for i, size in enumerate(sizes))
    return RefRollout(requests, nodes or (gpus,), tp, cap_tokens=1000, **(usual | settings)).simulate()


def capacity(pages: int, tp: int = 1) -> StubCosts:
    return replace(COSTS, pages={**COSTS.pages, tp: pages})


# --------------------------------------------------------------------------------------------------- one replica


def test_one_request() -> None:
    result = run([(4, 3)])
    prefill = 1 + 4 / 8  # gives the first token
    assert result.first_token_at == {0: prefill}
    assert result.finish_at == {0: prefill + (1.25 + 5 / 64) + (1.25 + 6 / 64)}
    assert result.end_at == result.finish_at[0]
    assert result.generated == {0: 3}
    assert (result.finished, result.aborted, result.unfinished) == ({0}, set(), set())
    assert result.busy_s == {(0,): result.end_at}
    assert result.peak_pages == {0: 6}  # at the start of the last step
    assert [kind for *_, kind in result.iterations] == ["prefill", "decode", "decode"]


def test_skew_pays_for_padding() -> None:
    steps = {1: replace(ONE_GPU, skew=0.5)}
    result = run([(4, 2), (6, 4)], costs=replace(COSTS, steps=steps))
    padded = 12 + 0.5 * (2 * 7 - 12)
    first = 2.25 + 1.5 + padded / 64
    assert result.finish_at == {0: first, 1: first + 2.5 + (8 + 9) / 64}  # one alone has no padding


def test_micro_batches_run_one_after_the_other() -> None:
    result = run([(4, 2), (4, 3), (4, 2)], micro_batches=2)
    two = 2 + 1.5 + 10 / 64
    first = two + 1.25 + 6 / 64  # until the longer one of the first two is done
    assert result.finish_at == {0: two, 1: first, 2: first + 1.5 + 1.25 + 5 / 64}


def test_a_plain_prefill_batch_keeps_to_the_budget_and_pauses_decoding() -> None:
    result = run([(4, 2), (4, 2), (4, 2)], engine=replace(PLAIN, max_num_batched_tokens=8))
    two = 1 + 8 / 8  # 4 + 4 is all the budget
    third = two + 1 + 4 / 8  # the others pause
    assert result.first_token_at == {0: two, 1: two, 2: third}
    assert set(result.finish_at.values()) == {third + 1.75 + 15 / 64}
    result = run([(20, 1), (4, 1)], engine=replace(PLAIN, max_num_batched_tokens=8))
    assert result.finish_at == {0: 1 + 20 / 8, 1: 3.5 + 1 + 4 / 8}


def test_the_watermark_is_kept_except_by_the_first() -> None:
    engine = replace(PLAIN, watermark_pages=3)
    alone = 1.5 + 1.25 + 5 / 64
    # 4 + 4 + 3 pages are more than 10, so request 1 waits (5 + 4 + 3 at the next boundary too).
    assert run([(4, 2), (4, 2)], engine=engine, costs=capacity(10)).finish_at == {0: alone, 1: 2 * alone}
    together = 2 + 1.5 + 10 / 64
    assert run([(4, 2), (4, 2)], engine=engine, costs=capacity(11)).finish_at == {0: together, 1: together}
    # A single one may use everything.
    assert run([(4, 2)], engine=engine, costs=capacity(6)).finish_at == {0: alone}


def test_pages_are_rounded_up() -> None:
    result = run([(4, 2), (5, 2)], engine=replace(PLAIN, page_tokens=4), costs=capacity(2))
    # 1 + 2 pages do not fit together, though 4 + 5 tokens would nearly.
    first = 1.5 + 1.25 + 5 / 64
    assert result.finish_at[1] == first + (1 + 5 / 8) + (1.25 + 6 / 64)
    assert result.peak_pages == {0: 2}
    with pytest.raises(ValueError, match="request 1 does not fit"):
        run([(4, 4), (4, 9)], costs=capacity(12))


def test_chunked_prefill_over_two_iterations() -> None:
    steps = {1: replace(ONE_GPU, q=1 / 32)}
    engine = replace(PLAIN, chunked_prefill=True, max_num_batched_tokens=6)
    result = run([(4, 3), (6, 2)], engine=engine, costs=replace(COSTS, steps=steps))
    # Request 0 needs 4 of the 6, request 1 gets 2. Attention: 4·(0 + 2) + 2·(0 + 1) = 10.
    first = 1 + 6 / 8 + 10 / 32
    # Request 0 decodes with 5 tokens and leaves 5 of the budget, request 1 needs 4. Attention: 4·(2 + 2) = 16.
    second = first + 1 + 1 / 4 + 5 / 64 + 4 / 8 + 16 / 32
    # Both decode, with 6 and 7 tokens.
    third = second + 1.5 + 13 / 64
    assert result.first_token_at == {0: first, 1: second}
    assert result.finish_at == {0: third, 1: third}
    assert result.peak_pages == {0: 6 + 7}


def test_joiners_with_kv_take_nothing_of_the_budget_at_first() -> None:
    # One at a time on two replicas: 0 and then 1 | 2 and then 3. Request 0 finishes at 1 + 4/8 = 1.5. Replica 1 ends at
    # 1 + 8/8 = 2, where request 2 has its first token and context 9; 1 and 3 wait.
    engine = replace(PLAIN, chunked_prefill=True, max_num_batched_tokens=8)
    costs = replace(COSTS, pages={1: 12, 2: 100})
    result = run(
        [(4, 1), (9, 2), (8, 2), (5, 1)], gpus=2, engine=engine, costs=costs, control=At({1: Reconfigure(0, 2)})
    )
    # 8 tokens of budget at 0: request 0 has 4, request 1 does not fit (4 + 9 pages). Request 3 does not fit beside 2.
    start = 2 + 1 / 2 + 9 / 8 / 2 + 1 / 4 + 2
    # The new replica admits 2 with its KV, then 1 with all of 8 tokens, though 2 runs; 3 must wait.
    first = start + (1 + 1 / 4 + 9 / 64 + 8 / 8) / 2
    # Request 2 is finished; nobody runs: 1 token of request 1, and all 5 of request 3.
    second = first + (1 + 6 / 8) / 2
    third = second + (1.25 + 10 / 64) / 2
    assert result.finish_at == {0: 1.5, 2: first, 3: second, 1: third}


def test_preemption_and_recomputation() -> None:
    result = run([(4, 4), (4, 4)], costs=capacity(12))
    # Contexts 5 + 5 and 6 + 6 fit 12 pages, 7 + 7 do not: the last admitted goes, and would not fit again (7 + 7).
    evicted = (1 + 8 / 8) + (1.5 + 10 / 64) + (1.5 + 12 / 64)
    first = evicted + 1.25 + 7 / 64
    # Its 7 tokens are computed again, and with them comes the fourth and last token.
    assert result.finish_at == {0: first, 1: first + 1 + 7 / 8}
    assert result.first_token_at == {0: 2.0, 1: 2.0}
    assert result.preemptions == {0: 0, 1: 1}
    assert result.peak_pages == {0: 12}
    result = run([(4, 4), (4, 4), (1, 1)], costs=capacity(12), engine=replace(PLAIN, max_num_seqs=2))
    first = 2 + 3 + 22 / 64 + 1.25 + 7 / 64  # as above; request 2 (1 page) would fit, but request 1 is before it
    assert result.finish_at == {0: first, 1: first + 1 + 8 / 8, 2: first + 1 + 8 / 8}  # prefilled together, 7 + 1


# ---------------------------------------------------------------------------------------------- several replicas


def test_contiguous_and_round_robin() -> None:
    sizes = [(8, 1), (8, 1), (8, 1), (8, 1), (16, 1)]
    # contiguous: 0, 1, 2 | 3, 4
    assert run(sizes, gpus=2).finish_at == {0: 4.0, 1: 4.0, 2: 4.0, 3: 4.0, 4: 4.0}
    # round-robin: 0, 2, 4 | 1, 3
    assert run(sizes, gpus=2, routing="round_robin").finish_at == {0: 5.0, 2: 5.0, 4: 5.0, 1: 3.0, 3: 3.0}


# Two replicas of one GPU. Replica 0: request 0 (4, 2): prefill to 1.5, a step of 1.25 + 5/64: finished at T0.
# Replica 1: request 1 (8, 5): prefill to 2, a step of 1.25 + 9/64: with 2 tokens and a context of 10 at T1 > T0.
PAIR = [(4, 2), (8, 5)]
T0 = 2.75 + 5 / 64
T1 = 3.25 + 9 / 64


def test_the_control_sees_the_tokens_of_the_start_of_an_iteration() -> None:
    control = At()
    run(PAIR, gpus=2, control=control)
    assert control.seen[0] == (
        T0,
        (ReplicaView(0, 0, 1, (0,), ()), ReplicaView(1, 0, 1, (1,), (RequestView(1, 1, 8, 1, True),))),
    )


def test_a_switch_with_migration() -> None:
    result = run(PAIR, gpus=2, control=At({1: Reconfigure(0, 2)}))
    switch = 1 / 2 + 10 / 8 / 2 + 1 / 4 + 2  # weights, 10 tokens of KV, capture, communication groups
    assert result.actions == [(T0, Reconfigure(0, 2))]
    assert result.switches[0].begun_at == T1
    assert result.switches[0].cost.total_s == switch
    assert result.finish_at == {0: T0, 1: T1 + switch + 0.5 * (3 * 1.25 + (10 + 11 + 12) / 64)}
    assert result.busy_s == {(0,): T0, (1,): T1, (0, 1): 0.5 * (3.75 + 33 / 64)}
    assert result.peak_pages == {0: 5, 1: 9, 2: 12}
    result = run(PAIR, gpus=2, control=At({1: Reconfigure(0, 2, "recompute")}))
    start = T1 + 1 / 2 + 1 / 4 + 2
    assert result.finish_at[1] == start + 0.5 * ((1 + 10 / 8) + 2 * 1.25 + (11 + 12) / 64)


def test_a_degree_used_before_has_its_communication_groups() -> None:
    sizes = [(4, 1), (4, 2), (4, 8)]
    result = run(sizes, control=At({1: Reconfigure(0, 1), 2: Reconfigure(0, 1)}))
    assert [switch.cost.control_s for switch in result.switches] == [0.0, 0.0]  # 1 is the initial degree
    result = run(sizes, gpus=2, control=At({1: Reconfigure(0, 2), 2: Reconfigure(0, 1)}))
    assert [switch.cost.control_s for switch in result.switches] == [2.0, 0.0]


def test_an_iteration_only_just_begun_does_not_delay_a_switch() -> None:
    result = run([(4, 2), (4, 5)], gpus=2, control=At({1: Reconfigure(0, 2)}))
    assert result.switches[0].begun_at == T0  # both replicas are at a boundary then
    switch = 1 / 2 + 6 / 8 / 2 + 1 / 4 + 2
    assert result.finish_at[1] == T0 + switch + 0.5 * (3 * 1.25 + (6 + 7 + 8) / 64)


def test_dealing_after_a_switch() -> None:
    # One replica of two GPUs, 20 prompt tokens. At 1.75 request 0 is finished, contexts are 5, 7 and 6.
    result = run(
        [(5, 1), (4, 2), (6, 2), (5, 2)],
        gpus=2, tp=2, control=At({1: Reconfigure(0, 1)}), costs=capacity(8, tp=1),
    )  # fmt: skip
    start = 1.75 + 1 + 18 / 16 + 1 / 4 + 2
    # Request 2 (7) to the one replica, 3 (6) and then 1 (5) to the other, where 1 goes first: it was admitted before.
    # 5 + 6 pages do not fit there, so the KV of 3 is dropped.
    assert result.finish_at == {
        0: 1.75,
        2: start + 1.25 + 7 / 64,
        1: start + 1.25 + 5 / 64,
        3: start + 1.25 + 5 / 64 + 1 + 6 / 8,
    }
    assert result.preemptions == dict.fromkeys(range(4), 0)


# Replica 0: requests 0 (4, 2) and 1 (4, 6): prefill to 2, a step of 1.5 + 10/64 to M0: 0 is finished, 1 has context 6.
# Replica 1: request 2 (8, 4): prefill to 2, steps to 3.25 + 9/64 and to M1 > M0 with 3 tokens and a context of 11.
TRIPLE = [(4, 2), (4, 6), (8, 4)]
M0 = 3.5 + 10 / 64
M1 = 4.5 + 19 / 64


def test_migration_with_and_without_kv() -> None:
    result = run(TRIPLE, gpus=2, control=At({1: Migrate((1,), 1)}))
    assert M0 + 1 / 4 + 6 / 8 < M1  # arrived in time for this boundary
    together = M1 + 1.5 + (11 + 6) / 64
    assert result.finish_at == {0: M0, 2: together, 1: together + 3 * 1.25 + (7 + 8 + 9) / 64}
    assert result.busy_s[0,] == M0
    result = run(TRIPLE, gpus=2, control=At({1: Migrate((1,), 1, "recompute")}))
    together = M1 + (1 + 6 / 8) + 1.5 + (11 + 7) / 64
    assert result.finish_at == {0: M0, 2: together, 1: together + 2 * 1.25 + (8 + 9) / 64}


def test_kv_that_finds_no_room_is_dropped() -> None:
    result = run(TRIPLE, gpus=2, control=At({1: Migrate((1,), 1)}), costs=capacity(16))
    second = M1 + 1.25 + 11 / 64  # 11 + 6 pages are too many until request 2 has finished
    assert result.finish_at == {0: M0, 2: second, 1: second + (1 + 6 / 8) + 3 * 1.25 + (7 + 8 + 9) / 64}
    assert result.preemptions[1] == 0


def test_kv_arrives_at_an_idle_replica_of_another_node() -> None:
    result = run([(4, 2), (8, 5)], nodes=(1, 1), control=At({1: Migrate((1,), 0)}))
    arrival = T1 + 3 * (1 / 4 + 10 / 8)
    assert result.finish_at[1] == arrival + 3 * 1.25 + (10 + 11 + 12) / 64


def test_release_deals_the_longest_first_to_the_least_loaded() -> None:
    # One request each on replicas 0 and 1 (contexts 9 and 5 when 4 finishes), three on replica 2, two of them left.
    result = run(
        [(8, 9), (4, 9), (7, 9), (6, 9), (5, 1)],
        gpus=3, routing="contiguous", control=At({1: Release((1,))}),
    )  # fmt: skip
    # contiguous: 0, 1 | 2, 3 | 4: request 4 finishes at 1.625, when replicas 0 and 1 are in their prefills.
    # Replica 1 ends at 1 + 13/8 = 2.625: contexts 8 and 7. Replica 0 ended at 2.5 (9 + 5), replica 2 is idle:
    # 2 goes there (0 < 14), and 3 too (8 < 14).
    assert result.released_at == {1: 2.625}
    third = 2.625 + (1 + (8 + 7) / 8)
    assert result.finish_at[2] == result.finish_at[3] == third + 7 * 1.5 + sum(9 + 8 + 2 * i for i in range(7)) / 64


def test_kv_that_arrives_at_a_replica_that_is_gone() -> None:
    # Replica 1 is released while request 1 is on its way there. Both requests end up on replica 0.
    slow = replace(COSTS, transfer_base_s=4.25)
    control = At({1: [Migrate((1,), 1), Release((1,))]})
    result = run(TRIPLE, gpus=2, costs=slow, control=control)
    assert result.actions == [(M0, Migrate((1,), 1)), (M0, Release((1,)))]
    moved = M1 + (1 + 11 / 8)  # request 2 is computed again on replica 0 with its 11 tokens, and has its fourth
    arrival = M0 + 4.25 + 6 / 8
    assert moved < arrival
    assert result.finish_at == {0: M0, 2: moved, 1: arrival + (1 + 6 / 8) + 3 * 1.25 + (7 + 8 + 9) / 64}


def test_a_node_with_nothing_left_does_not_switch() -> None:
    # Two nodes of one GPU: 0 | 1, the second switches though its request finishes at the boundary where it stops.
    result = run([(4, 2), (8, 2)], nodes=(1, 1), control=At({1: [Reconfigure(0, 1), Reconfigure(1, 1)]}))
    assert len(result.actions) == 2
    assert result.switches == []
    assert result.end_at == T1


def test_abort_and_stop() -> None:
    result = run(PAIR, gpus=2, control=At({1: Abort((1,))}))
    assert (result.finished, result.aborted, result.unfinished) == ({0}, {1}, set())
    assert result.end_at == T1
    assert result.generated == {0: 2, 1: 2}
    result = run(PAIR, gpus=2, control=At({1: Stop()}))
    assert (result.finished, result.aborted, result.unfinished) == ({0}, set(), {1})
    assert result.end_at == T1
    assert result.generated == {0: 2, 1: 2}
    assert result.actions == [(T0, Stop())]


def test_a_further_budget() -> None:
    # On replica 0 request 0 (4, 9) pauses as request 1 (4, 2) finishes, while request 2 (12, 2) decodes on replica 1.
    control = At({1: Extend((0, 1, 2), 2)})
    result = run([(4, 9), (4, 2), (12, 2)], gpus=2, budget=2, control=control)
    third = 2.5 + 1.25 + 13 / 64
    pause = 2.0 + 1.5 + 10 / 64
    assert pause < third
    assert result.actions == [(pause, Extend((0, 1, 2), 2))]
    # Contexts are 0 and 13 tokens: request 0 goes back to replica 0, with 6 tokens, and pauses again with 4.
    assert result.end_at == pause + (1 + 6 / 8) + 1.25 + 7 / 64
    assert result.finish_at == {1: pause, 2: third}
    assert result.generated == {0: 4, 1: 2, 2: 2}


def test_ignored_actions() -> None:
    one = At({1: [Reconfigure(0, 2), Reconfigure(0, 1), Migrate((1,), 0), Release((1,)), Abort((1,)), Abort((0,))]})
    assert run(PAIR, gpus=2, control=one).actions == [(T0, Reconfigure(0, 2))]  # the node is switching
    assert run(PAIR, gpus=2, control=At({1: Release((0, 1))})).actions == []  # nobody would stay

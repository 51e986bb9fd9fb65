"""Who gets which GPUs when, by hand: the pool's order, and replicas that work on samples as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import simpy

from rlsim.sim.elastic import ElasticCall, Guests, Pieces
from rlsim.sim.flow import Inbox
from rlsim.sim.pool import GpuPool
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import Request
from rlsim.workflow import Call

Kind = Literal["train", "generate", "sync"]


def served(first: set[int], then: Sequence[tuple[str, set[int], Kind]]) -> list[list[str]]:
    """Who has GPUs at each turn: one call holds `first`, the others ask in this order; all that hold GPUs let go of
    them at once, turn after turn."""
    pool = GpuPool(simpy.Environment())
    assert pool.acquire(first, "train").triggered
    waiting = {name: (gpus, pool.acquire(gpus, kind)) for name, gpus, kind in then}
    held, turns = [first], []
    while waiting:
        pool.release({gpu for gpus in held for gpu in gpus})
        turns.append([name for name, (_, granted) in waiting.items() if granted.triggered])
        assert turns[-1], f"{list(waiting)} wait for nobody"
        held = [waiting.pop(name)[0] for name in turns[-1]]
    return turns


def test_nobody_passes_a_call_that_waits_for_the_same_gpus() -> None:
    """GPU 1 is free, but kept for who has asked before; GPU 2 is nobody's."""
    pool = GpuPool(simpy.Environment())
    pool.acquire({0}, "train")
    both, one, other = pool.acquire({0, 1}, "train"), pool.acquire({1}, "train"), pool.acquire({2}, "train")
    assert [event.triggered for event in (both, one, other)] == [False, False, True]
    pool.release({0})
    assert [event.triggered for event in (both, one)] == [True, False]
    pool.release({0, 1})
    assert one.triggered


def test_all_that_wait_for_different_gpus_begin_together() -> None:
    assert served({0, 1, 2}, [("a", {0}, "train"), ("b", {1, 2}, "train"), ("c", {2}, "train")]) == [["a", "b"], ["c"]]


def test_syncs_go_before_generations_that_wait_and_before_nobody_else() -> None:
    asked: list[tuple[str, set[int], Kind]] = [
        ("train", {0}, "train"),
        ("generate", {0}, "generate"),
        ("inference", {0}, "train"),
        ("sync", {0}, "sync"),
        ("second sync", {0}, "sync"),
    ]
    assert served({0}, asked) == [["train"], ["sync"], ["second sync"], ["generate"], ["inference"]]


def test_syncs_wait_their_turn_where_no_generation_waits() -> None:
    asked: list[tuple[str, set[int], Kind]] = [("train", {0}, "train"), ("sync", {0}, "sync")]
    assert served({0}, asked) == [["train"], ["sync"]]
    # One that generates already does not wait.
    pool = GpuPool(simpy.Environment())
    pool.acquire({0}, "generate")
    train, sync = pool.acquire({0}, "train"), pool.acquire({0}, "sync")
    pool.release({0})
    assert (train.triggered, sync.triggered) == (True, False)


def test_a_guest_goes_after_all_who_want_its_gpus_however_late_they_ask() -> None:
    pool = GpuPool(simpy.Environment())
    pool.acquire({0, 1}, "generate")
    guest, later = pool.acquire({0, 1}, "train", guest=True), pool.acquire({1}, "train")
    pool.release({0, 1})
    assert (guest.triggered, later.triggered) == (False, True)
    pool.release({1})
    assert guest.triggered


def test_a_guest_that_waits_no_more_gets_nothing_and_makes_room() -> None:
    pool = GpuPool(simpy.Environment())
    pool.acquire({0}, "generate")
    both, one = (pool.acquire(gpus, "train", guest=True) for gpus in ({0, 1}, {1}))
    assert not one.triggered
    pool.withdraw(both)
    assert one.triggered
    pool.release({0})
    assert pool.acquire({0}, "train").triggered


# Samples as they come -------------------------------------------------------------------------------------------------


def elastic(
    arrivals: Sequence[tuple[float, int]],
    closes_at: float,
    *,
    replicas: int = 2,
    tokens: int = 10,
    load_s: float = 0.0,
    slowdown: float = 1.0,
    guests: Guests | None = None,
    held_until: float = 0.0,
) -> tuple[ElasticCall, list[tuple[int, float, float]]]:
    """A call on samples of so many tokens, which come at these moments; a part takes a second a token.

    GPU 9, on which there may be a guest, is somebody else's until `held_until`. Returns the call when it is over, and
    which GPU worked from when to when.
    """
    env = simpy.Environment()
    pool, inbox, recorder = GpuPool(env), Inbox(env), Recorder()
    pieces = Pieces(lambda lengths: [("compute", float(sum(lengths)))], tokens, load_s, (), guests)
    pool.acquire({9}, "generate")
    call = ElasticCall(
        env, pool, [(i,) for i in range(replicas)], pieces, inbox, recorder, Call("train", "train", "actor"),
        lambda _: slowdown,
    )  # fmt: skip

    def feed() -> object:
        for i, (at, size) in enumerate(arrivals):
            yield env.timeout(at - env.now)
            inbox.put([Request(i, i, size, 0)])
        yield env.timeout(closes_at - env.now)
        inbox.close()

    def lend() -> object:
        yield env.timeout(held_until)
        pool.release({9})

    env.process(feed())  # type: ignore[arg-type]
    env.process(lend())  # type: ignore[arg-type]
    env.run(call.done)
    return call, sorted((span.gpus[0], span.start_at, span.end_at) for span in recorder.spans)


def test_the_replica_that_has_been_idle_for_longest_takes_the_next_sample() -> None:
    """The first two wake the replicas in their order; the one that is done first takes the third, then the other."""
    call, spans = elastic([(1.0, 4), (2.0, 2), (6.0, 1), (6.5, 1)], 10.0)
    assert spans == [(0, 1.0, 5.0), (0, 6.5, 7.5), (1, 2.0, 4.0), (1, 6.0, 7.0)]
    assert call.samples == [2, 2]
    assert call.started_at == 1.0
    assert call.parts_s == {"compute": pytest.approx((4 + 2 + 1 + 1) / 2)}


def test_a_replica_takes_what_fits_into_a_part_in_order_of_arrival() -> None:
    """Ten tokens at a time, but at least one sample."""
    _, spans = elastic([(0.0, 3), (1.0, 4), (1.0, 6), (1.0, 12), (1.0, 2)], 100.0, replicas=1)
    assert spans == [(0, 0.0, 3.0), (0, 3.0, 13.0), (0, 13.0, 25.0), (0, 25.0, 27.0)]


def test_what_is_left_is_spread_evenly_once_no_more_can_come() -> None:
    """Eight tokens wait when the inbox closes: one replica takes half, the other half of what is left, and the rest."""
    _, spans = elastic([(0.0, 9), (0.0, 9), *[(1.0, 2)] * 4], 2.0)
    assert spans == [(0, 0.0, 9.0), (0, 9.0, 13.0), (1, 0.0, 9.0), (1, 9.0, 11.0), (1, 11.0, 13.0)]


def test_states_are_loaded_once_a_replica_and_work_beside_others_is_slower() -> None:
    call, spans = elastic([(0.0, 4), (20.0, 1)], 50.0, replicas=1, load_s=2.0, slowdown=1.5)
    assert spans == [(0, 0.0, 9.0), (0, 20.0, 21.5)]
    assert call.parts_s == {"compute": pytest.approx(7.5), "offload": pytest.approx(3.0)}


def guest(load_s: float = 3.0) -> Guests:
    """On GPU 9; the call's own replica takes a token a second, and the guest's gradients another 5 s."""
    return Guests([(9,)], lambda lengths: [("compute", float(sum(lengths)))], load_s, 1.0, 5.0)


def test_a_guest_takes_what_the_others_cannot_and_loads_the_weights_once() -> None:
    """Its GPU is free from 2 s on; its gradients come to the others' at the end."""
    call, spans = elastic([(0.0, 10)] * 4, 50.0, replicas=1, guests=guest(), held_until=2.0)
    assert spans == [(0, 0.0, 10.0), (0, 10.0, 20.0), (9, 2.0, 15.0), (9, 15.0, 25.0)]
    assert call.samples == [2, 2]
    assert call.parts_s == {"compute": 20.0}  # of the call's own GPUs
    assert call.finish == [("communication", 5.0)]


def test_a_guest_does_not_begin_for_less_than_it_takes_to_load() -> None:
    """Ten tokens wait, which the other replica has done ten seconds later."""
    call, spans = elastic([(0.0, 10), (0.0, 10)], 1.0, replicas=1, guests=guest(load_s=11.0))
    assert spans == [(0, 0.0, 10.0), (0, 10.0, 20.0)]
    assert call.finish == []


def test_a_guest_whose_gpus_do_not_become_free_is_not_waited_for() -> None:
    call, spans = elastic([(0.0, 10), (0.0, 10)], 1.0, replicas=1, guests=guest(), held_until=1000.0)
    assert spans == [(0, 0.0, 10.0), (0, 10.0, 20.0)]
    assert call.samples == [2, 0]

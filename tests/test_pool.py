"""Who gets which GPUs when, by hand: the pool's order, and replicas that work on samples as they come."""

from collections.abc import Sequence
from typing import Any, Literal

import simpy
from conftest import cases

from rlsim.sim.elastic import ElasticCall, Guests, Pieces
from rlsim.sim.flow import Inbox
from rlsim.sim.gpus import GpuPool
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import Request
from rlsim.workflow import Call

Kind = Literal["train", "generate", "sync"]


def served(first: set[int], then: Sequence[tuple[str, set[int], Kind, bool]]) -> list[list[str]]:
    """Who has GPUs at each turn: one call holds `first`, the others ask in this order, some streaming; all that hold
    GPUs let go of them at once, turn after turn."""
    pool = GpuPool(simpy.Environment())
    assert pool.acquire(first, "train").triggered
    waiting = {name: (gpus, pool.acquire(gpus, kind, streams=streams)) for name, gpus, kind, streams in then}
    held, turns = [first], []
    while waiting:
        pool.release({gpu for gpus in held for gpu in gpus})
        turns.append([name for name, (_, granted) in waiting.items() if granted.triggered])
        assert turns[-1], f"{list(waiting)} wait for nobody"
        held = [waiting.pop(name)[0] for name in turns[-1]]
    return turns


def test_nobody_passes_a_call_that_waits_for_the_same_gpus_and_others_begin_together() -> None:
    """GPU 1 is free, but kept for who has asked before; GPU 2 is nobody's."""
    pool = GpuPool(simpy.Environment())
    pool.acquire({0}, "train")
    both, one, other = pool.acquire({0, 1}, "train"), pool.acquire({1}, "train"), pool.acquire({2}, "train")
    assert [event.triggered for event in (both, one, other)] == [False, False, True]
    pool.release({0})
    assert [event.triggered for event in (both, one)] == [True, False]
    pool.release({0, 1})
    assert one.triggered
    asked: list[tuple[str, set[int], Kind, bool]]
    asked = [("a", {0}, "train", False), ("b", {1, 2}, "train", False), ("c", {2}, "train", False)]
    assert served({0, 1, 2}, asked) == [["a", "b"], ["c"]]


def test_syncs_go_before_generations_and_streams_that_wait_and_before_nobody_else() -> None:
    for passed in ("generate", "train"):
        asked: list[tuple[str, set[int], Kind, bool]] = [
            ("train", {0}, "train", False),
            ("passed", {0}, passed, passed == "train"),
            ("inference", {0}, "train", False),
            ("sync", {0}, "sync", False),
            ("second sync", {0}, "sync", False),
        ]
        assert served({0}, asked) == [["train"], ["sync"], ["second sync"], ["passed"], ["inference"]]
    asked = [("train", {0}, "train", False), ("sync", {0}, "sync", False)]
    assert served({0}, asked) == [["train"], ["sync"]]
    # One that generates already does not wait.
    pool = GpuPool(simpy.Environment())
    pool.acquire({0}, "generate")
    train, sync = pool.acquire({0}, "train"), pool.acquire({0}, "sync")
    pool.release({0})
    assert (train.triggered, sync.triggered) == (True, False)


def test_a_guest_goes_after_all_who_want_its_gpus_and_gets_nothing_once_it_waits_no_more() -> None:
    pool = GpuPool(env := simpy.Environment())
    pool.acquire({0, 1}, "generate")
    guest, later = pool.acquire({0, 1}, "train", guest=True), pool.acquire({1}, "train")
    pool.release({0, 1})
    env.run(1)
    assert (guest.triggered, later.triggered) == (False, True)
    pool.release({1})
    next_one = pool.acquire({0}, "generate")  # at the same moment
    env.run(2)
    assert (guest.triggered, next_one.triggered) == (False, True)
    pool.release({0})
    env.run(3)
    assert guest.triggered
    pool = GpuPool(env := simpy.Environment())
    pool.acquire({0}, "generate")
    both, one = (pool.acquire(gpus, "train", guest=True) for gpus in ({0, 1}, {1}))
    env.run(1)
    assert not one.triggered
    pool.withdraw(both)
    env.run(2)
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
    guest_loads_s: float | None = None,
    held_until: float = 0.0,
) -> tuple[ElasticCall, list[tuple[int, float, float]]]:
    """A call on samples of so many tokens, which come at these moments; a part takes a second a token.

    On GPU 9, which is somebody else's until `held_until`, there may be a guest, whose gradients take another 5 s.
    Returns the call when it is over, and which GPU worked from when to when.
    """
    env = simpy.Environment()
    pool, inbox, recorder = GpuPool(env), Inbox(env), Recorder()

    def part(lengths: Sequence[int]) -> list[tuple[str, float]]:
        return [("compute", float(sum(lengths)))]

    guests = None if guest_loads_s is None else Guests([(9,)], part, guest_loads_s, 1.0, 5.0)
    pieces = Pieces(part, tokens, load_s, (), guests)
    pool.acquire({9}, "generate")
    call = ElasticCall(
        env, pool, [(i,) for i in range(replicas)], pieces, inbox, recorder, Call("train", "train", "actor"),
        lambda _: slowdown, lambda: False, {},
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


@cases("pool", "samples as they come")
def test_samples_as_they_come(
    arrivals: list[Any], closes_at: float, how: dict[str, Any], spans: list[Any], says: dict[str, Any]
) -> None:
    call, worked = elastic(arrivals, closes_at, **how)
    assert [list(span) for span in worked] == spans
    said = {"samples": call.samples, "started_at": call.started_at, "parts_s": call.parts_s}
    assert says == {key: value for key, value in (said | {"finish": dict(call.finish)}).items() if key in says}

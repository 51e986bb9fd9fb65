"""A replica alone, and the sequences that it decodes together."""

import itertools
from collections.abc import Generator

import numpy as np
import pytest
import simpy
from workloads import LinearStep

from rlsim.sim.batch import RunningBatch
from rlsim.sim.moment import URGENT, Sleep, at
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import EngineConfig, Request


def one_of(env: simpy.Environment, step: LinearStep, finished: list[Request], config: EngineConfig) -> Replica:
    number = itertools.count(1)
    return Replica(env, 0, 0, (0,), step, 10_000, config, Recorder(), lambda _, done: finished.extend(done), number)


@pytest.mark.parametrize("begins_at", np.random.default_rng(0).uniform(1e4, 1e6, 50).tolist())
def test_an_order_at_the_end_of_a_jump_adds_no_token(begins_at: float) -> None:
    """Late on the clock the rounding of a moment is more than a jump's tolerance of its own short time."""
    env, finished = simpy.Environment(begins_at), []
    replica = one_of(env, LinearStep(a=1e-3), finished, EngineConfig())
    request = Request(0, 0, 10, 5)
    replica.receive([request])

    def order() -> Generator[simpy.Event, object, None]:
        yield env.timeout(2e-3)
        end = next(moment for moment, _, _, event in env._queue if event is replica._sleep)
        at(env, end, lambda _: replica.at_boundary(lambda: None), URGENT)

    env.process(order())
    env.run()
    assert [r.generated for r in finished] == [5]
    assert request.finished_at == pytest.approx(begins_at + 5e-3, rel=1e-14)


def test_a_trajectory_that_is_back_while_new_weights_drop_its_kv_goes_last() -> None:
    """Its pages were pinned when it came back, within the iteration before; they are gone when anybody is served."""
    env, finished = simpy.Environment(), []
    replica = one_of(env, LinearStep(a=1.0), finished, EngineConfig(max_num_seqs=1))
    first, second, back = (Request(i, i, 8, tokens) for i, tokens in enumerate((40, 4, 4)))
    replica.receive([first, second])
    env.run(until=3.5)
    replica.scheduler.pinned[back] = (back, 0)
    stands = replica.pause("recompute")
    replica.receive([back])
    env.run(until=stands)
    replica.scheduler.pinned.clear()  # as a stage does with what new weights made worthless
    replica.resume()
    env.run()
    assert finished == [first, second, back]


@pytest.mark.parametrize(("pages", "fits"), [(8, False), (9, True)])
def test_what_fits_to_the_end(pages: int, fits: bool) -> None:
    """Pages of four tokens: in the end 9 + 9 + 9 tokens, in three pages each, though the tokens would fill seven."""
    batch = RunningBatch(4, pages, 0.0, 0)
    requests = [Request(i, i, *size) for i, size in enumerate([(4, 5, 1), (4, 5, 1), (8, 1, 0)])]
    for request in requests:
        request.order = request.id + 1
    batch.join(requests)
    assert batch.fits_to_the_end() is fits


def test_nobody_sleeps_until_what_is_over() -> None:
    with pytest.raises(ValueError, match=r"until 4.0 cannot begin at 5.0"):
        Sleep(simpy.Environment(initial_time=5.0), 4.0)

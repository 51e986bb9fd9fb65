"""Sleeps, on a clock of their own."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import simpy

from rlsim.sim.moment import Sleep


def test_a_sleep_ends_at_its_moment_or_when_it_is_cut() -> None:
    env, woken = simpy.Environment(), []

    def sleeper(until: float | None) -> Generator[simpy.Event, object, None]:
        sleeps.append(sleep := Sleep(env, until))
        yield sleep
        woken.append((until, env.now, sleep.was_cut))

    def cutter() -> Generator[simpy.Event, object, None]:
        yield env.timeout(2.0)
        for sleep in [*sleeps, *sleeps]:  # those that are over, or cut already, stay as they are
            sleep.cut()
        assert len(woken) == 1  # at the end of what happens here

    sleeps: list[Sleep] = []
    for until in (1.0, 3.0, None):
        env.process(sleeper(until))
    env.process(cutter())
    env.run()
    assert woken == [(1.0, 1.0, False), (3.0, 2.0, True), (None, 2.0, True)]


def test_nobody_sleeps_until_what_is_over() -> None:
    env = simpy.Environment(initial_time=5.0)
    with pytest.raises(ValueError, match=r"until 4.0 cannot begin at 5.0"):
        Sleep(env, 4.0)

"""Sleeps, on a clock of their own."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import simpy

from rlsim.sim.moment import Sleep


def test_a_sleep_ends_at_its_moment_or_earlier_if_it_is_cut() -> None:
    env, woken = simpy.Environment(), []

    def sleeper(until: float | None) -> Generator[simpy.Event, object, None]:
        sleeps.append(sleep := Sleep(env, until))
        yield sleep
        woken.append((until, env.now))

    def cutter() -> Generator[simpy.Event, object, None]:
        yield env.timeout(2.0)
        assert [sleep.lasts for sleep in sleeps] == [False, True, True, True]  # the first is over
        for sleep, moment in zip(sleeps[1:], (2.0, 2.5, 1.5), strict=True):
            sleep.cut(moment)
        assert not any(sleep.lasts for sleep in sleeps)
        assert len(woken) == 1  # at the end of what happens here

    sleeps: list[Sleep] = []
    for until in (1.0, 3.0, 3.5, None):
        env.process(sleeper(until))
    env.process(cutter())
    env.run()
    assert woken == [(1.0, 1.0), (3.0, 2.0), (None, 2.0), (3.5, 2.5)]


def test_nobody_sleeps_until_what_is_over() -> None:
    env = simpy.Environment(initial_time=5.0)
    with pytest.raises(ValueError, match=r"until 4.0 cannot begin at 5.0"):
        Sleep(env, 4.0)

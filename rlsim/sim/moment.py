"""The end of a moment: what wants to see all of it waits until everything else that happens at it has happened."""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappush

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

#: Times that differ by this share of their value are one (rounding of sums, nothing physical).
ONE_MOMENT = 1e-11

#: Priorities of the end of a moment; SimPy's own are 0 (urgent) and 1 (normal).
DEAL = EventPriority(2)  # nodes start and requests are dealt, once all that stops and leaves at this moment is known
IDLE = EventPriority(3)  # what replicas do that have nothing left
ASK = EventPriority(4)  # decisions
START = EventPriority(5)  # what starts after all decisions


def at(
    env: simpy.Environment,
    moment: float,
    then: Callable[[simpy.Event], None] | None = None,
    priority: EventPriority = NORMAL,
) -> simpy.Event:
    """An event at just that moment: a delay added to the present one may miss its last digit."""
    event = env.event()
    event._ok, event._value = True, None  # SimPy's way to schedule with a priority
    if then is not None:
        event.callbacks.append(then)
    heappush(env._queue, (moment, priority, next(env._eid), event))
    return event


class Sleep(simpy.Event):
    """Fires at a moment that is not over (None: never), or earlier once it is cut.

    Cheaper than a timeout and an interrupt of SimPy, which throws into the process that waits.
    """

    def __init__(self, env: simpy.Environment, until: float | None = None) -> None:
        self.env, self.callbacks = env, []
        self._ok, self._value = True, None
        if until is not None:
            if until < env.now:
                raise ValueError(f"a sleep until {until} cannot begin at {env.now}")
            heappush(env._queue, (until, NORMAL, next(env._eid), self))

    @property
    def lasts(self) -> bool:
        """Whether somebody waits for its moment, and it was not cut."""
        return bool(self.callbacks)

    def cut(self, moment: float) -> None:
        """Wake those who wait at that moment; if it is the present one, before all else of it."""
        now = self.env.now
        early = at(self.env, moment) if moment > now else at(self.env, now, priority=URGENT)
        early.callbacks, self.callbacks = self.callbacks, []


def is_over(env: simpy.Environment) -> bool:
    """Whether nothing is left of this moment but the event that is being carried out."""
    queue = env._queue
    return not queue or queue[0][0] > env.now * (1 + ONE_MOMENT)


def rest_of(env: simpy.Environment) -> float | None:
    """When the next event is that is later, but of this same moment but for rounding (`ONE_MOMENT`), if any is.

    It may stand behind others that wait for the end of this one, so it is looked for in SimPy's heap.
    """
    queue, last = env._queue, env.now * (1 + ONE_MOMENT)
    if not queue or queue[0][0] > last:
        return None
    later, look_at = [], [0]
    while look_at:
        i = look_at.pop()
        if i < len(queue) and queue[i][0] <= last:
            if queue[i][0] > env.now:
                later.append(queue[i][0])
            else:
                look_at += [2 * i + 1, 2 * i + 2]
    return min(later, default=None)


def when_over(env: simpy.Environment, priority: EventPriority, then: Callable[[], None]) -> None:
    """Call `then` after all else of this moment, what is of it but for rounding included."""

    def look(_: simpy.Event) -> None:
        following = rest_of(env)
        if following is None:
            then()
        else:
            at(env, following, look, priority)

    at(env, env.now, look, priority)


def until_over(env: simpy.Environment) -> Generator[simpy.Event, object, None]:
    """Wait until this moment is over."""
    moment: float | None = env.now
    while moment is not None:
        yield at(env, moment, priority=START)
        moment = rest_of(env)

"""Where trajectories act: sandboxes and workers that run their tool calls, while they are out of the batch.

docs/engine.md has the rules under "Tool calls".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import simpy
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.sim.moment import at
from rlsim.sim.request import Request
from rlsim.units import Seconds


class EnvironmentConfig(Schema):
    """What runs the tool calls of trajectories, and how they come back."""

    sandboxes: int | None = Field(default=None, ge=1, le=1_000_000)
    start_s: Seconds = Field(default=0.0, ge=0)
    workers: int | None = Field(default=None, ge=1, le=1_000_000)
    timeout: Seconds | None = Field(default=None, gt=0)
    failures: float = Field(default=0.0, ge=0, lt=1)
    retries: int = Field(default=0, ge=0, le=100)
    on_failure: Literal["repeat", "restart", "drop"] = "repeat"
    default_tool_s: Seconds | None = Field(default=None, ge=0)
    max_turns: int | None = Field(default=None, ge=1)
    turns: Literal["each", "together"] = "each"
    keep_kv: Literal["idle", "pinned"] | Seconds = "idle"
    returns: Literal["same_replica", "least_context"] = "same_replica"

    @property
    def keep_kv_s(self) -> float:
        """For how long KV cache is pinned during a tool call, at most."""
        if isinstance(self.keep_kv, str):
            return math.inf if self.keep_kv == "pinned" else 0.0
        return self.keep_kv


class _Slots:
    """So many places, given in the order in which they are asked for; `None`: as many as are wanted."""

    def __init__(self, places: int | None) -> None:
        self._free = places
        self._waiting: dict[Request, Callable[[], None]] = {}

    def take(self, request: Request, then: Callable[[], None]) -> None:
        if self._free == 0:
            self._waiting[request] = then
            return
        if self._free is not None:
            self._free -= 1
        then()

    def give_back(self) -> None:
        if self._waiting:
            self._waiting.pop(next(iter(self._waiting)))()
        elif self._free is not None:
            self._free += 1

    def forgo(self, request: Request) -> None:
        """It waits for none any more."""
        self._waiting.pop(request, None)


class Environments:
    """Runs the tool calls of a run, and notes down in requests how long they ran, and waited for it."""

    def __init__(self, env: simpy.Environment, config: EnvironmentConfig, seed: int = 0) -> None:
        self.config = config
        self._env, self._seed = env, seed
        self._sandboxes, self._workers = _Slots(config.sandboxes), _Slots(config.workers)
        self._held: set[Request] = set()  # trajectories that have a sandbox
        self._calls: dict[Request, str] = {}  # under way, and where: waits for a sandbox or a worker, starts, runs
        self.agents = itertools.count(1)  # of the run
        self._over, self._over_s = 0, 0.0  # calls that are over, and how long these took

    @property
    def mean_s(self) -> float:
        """Of the tool calls that are over, waits included; 0 before the first."""
        return self._over_s / self._over if self._over else 0.0

    def call(
        self,
        request: Request,
        begun: Callable[[Request], None],
        back: Callable[[Request, bool], None],
        soon: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        """Run the tool call at which a trajectory is; `begun` and `back` are told when that runs and when it is over,
        `back` also whether its sandbox is lost. A sub-agent works in the sandbox of its trajectory.

        `soon` does something at this boundary, after what is ordered for it: what takes no time.
        """
        asked_at = self._env.now

        def given() -> None:
            self._held.add(request)
            if self.config.start_s:
                self._calls[request] = "starts"
                self._after(self.config.start_s, request, ready)
            else:
                ready()

        def ready() -> None:
            self._calls[request] = "worker"
            self._workers.take(request, run)

        def run() -> None:
            self._calls[request] = "runs"
            takes_s, lost = self._takes_s(request)
            request.tool_wait_s += self._env.now - asked_at
            begun(request)
            if soon and not takes_s and self._env.now == asked_at:
                soon(lambda: over(0.0, lost) if request in self._calls else None)
            else:
                self._after(takes_s, request, lambda: over(takes_s, lost))

        def over(takes_s: float, lost: bool) -> None:
            del self._calls[request]
            request.tool_s += takes_s
            self._over += 1
            self._over_s += self._env.now - asked_at
            self._workers.give_back()
            back(request, lost)

        self._calls[request] = "sandbox"
        if request.root in self._held:
            ready()
        else:
            self._sandboxes.take(request, given)

    def _after(self, seconds: float, request: Request, then: Callable[[], None]) -> None:
        """Go on after so many seconds, if it is there."""
        at(self._env, self._env.now + seconds, lambda _: then() if request in self._calls else None)

    def _takes_s(self, request: Request) -> tuple[float, bool]:
        """Seconds of its tool call, those that failed before it included, and whether its sandbox is lost with it."""
        config, once, root = self.config, request.tool_calls[request.called].tool_s, request.root
        loses = config.on_failure != "repeat" and root is request
        lost = loses and config.timeout is not None and once > config.timeout
        if config.timeout is not None:
            once = min(once, config.timeout)
        tries = 1
        if config.failures:  # by numbers of this call, whichever is first
            key = self._seed, root.position, root.row if root.row >= 0 else root.id, root.restarts
            draws = np.random.default_rng((*key, *request.path, request.called + 1))
            if loses:
                lost |= draws.random() < config.failures
            while not loses and tries <= config.retries and draws.random() < config.failures:
                tries += 1
        return once * tries, lost

    def leave(self, requests: Iterable[Request]) -> None:
        """These trajectories have ended, or pause, or are dropped: what they hold is free again, for others."""
        held = []
        for request in requests:
            where = self._calls.pop(request, "")
            self._sandboxes.forgo(request)
            self._workers.forgo(request)
            held += [self._workers] * (where == "runs")
            if request in self._held:
                self._held.remove(request)
                held.append(self._sandboxes)
        for slots in held:
            slots.give_back()

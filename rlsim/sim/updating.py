"""New weights for the replicas of a rollout that goes on: for all of them together, or for each on its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import simpy

from rlsim.sim.moment import IDLE, when_over
from rlsim.sim.node import Node, active
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import NAN, UpdatedKv


class Pull(NamedTuple):
    """How a replica takes weights that are there for it."""

    version: int
    drain: bool  # once it has nothing left to generate; if not, between two iterations
    kv: UpdatedKv  # of what it generates then
    takes_s: Callable[[int], float]  # by TP: how long it stands still
    call: str  # that it is recorded as


class WeightUpdates:
    """Has the replicas of a rollout stand still, and go on with other weights."""

    def __init__(self, env: simpy.Environment, recorder: Recorder, nodes: Sequence[Node], version: int) -> None:
        self.version = version  # the newest that a replica may take
        self.together = version  # of the last update of all: no replica begins with older weights
        self._env, self._recorder, self._nodes = env, recorder, nodes
        self._kv: UpdatedKv = "recompute"  # in the last update
        self._paused: list[simpy.Event] | None = None  # while an update of all goes on, by replica: it stands still
        self._pull: Pull | None = None
        self._pulling: dict[Replica, float] = {}  # since when they stand still for it; NaN: not yet

    # ---- all together -----------------------------------------------------------------------------------------------

    def pause(self, kv: UpdatedKv) -> simpy.Event:
        """Have every replica stand still from its next boundary on; the event fires when all do.

        A node that changes its layout finishes that, and starts with its new replicas standing still.
        """
        self._kv, self._paused = kv, [replica.pause(kv) for replica in active(self._nodes)]
        return self._env.process(self._stand_still(self._paused))

    def _stand_still(self, paused: list[simpy.Event]) -> Generator[simpy.Event, Any, None]:
        def awaited() -> list[simpy.Event]:
            switched = [node.switched for node in self._nodes if node.switched]
            return [*switched, *(event for event in paused if not event.triggered)]

        while there := awaited():
            yield simpy.AllOf(self._env, there)

    def resume(self, version: int) -> None:
        self.version, self.together, self._paused = version, version, None
        for replica in active(self._nodes):
            replica.renew(version)
            replica.resume()

    # ---- each on its own --------------------------------------------------------------------------------------------

    def publish(self, pull: Pull) -> None:
        self.version, self._kv, self._pull = pull.version, pull.kv, pull
        for replica in active(self._nodes):
            self.refresh(replica)

    def refresh(self, replica: Replica) -> None:
        """The replica begins to take the newest weights, if it lacks them and may."""
        pull, known = self._pull, replica in self._pulling or replica.stopped is not None
        if pull and not known and replica.version < pull.version and (replica.idle or not pull.drain):
            self._pulling[replica] = NAN
            self._env.process(self._take(replica))

    def _take(self, replica: Replica) -> Generator[simpy.Event, Any, None]:
        assert self._pull is not None
        yield replica.pause(self._pull.kv)
        pull, self._pulling[replica] = self._pull, self._env.now
        yield self._env.timeout(pull.takes_s(replica.tp))
        if replica.stopped is not None:  # its node changes its layout
            return
        self._record(replica, self._pulling.pop(replica), pull)
        replica.renew(pull.version)
        replica.resume()
        self.refresh(replica)

    def _record(self, replica: Replica, start: float, pull: Pull) -> None:
        self._recorder.add(replica.gpus, start, self._env.now, pull.call, replica.tp, f"replica {replica.index}")

    def break_off(self) -> None:
        """The run is over, and with it what replicas are taking."""
        for replica, start in self._pulling.items():
            if self._pull and replica.stopped is None:
                self._record(replica, start, self._pull)

    def takes_launches(self, replica: Replica) -> bool:
        """Whether new requests may go there: not while it finishes what it has before it takes newer weights."""
        behind = self._pull is not None and self._pull.drain and replica.version < self._pull.version
        return not behind or replica.idle or replica in self._pulling

    # ---- replicas that come, KV cache that moves --------------------------------------------------------------------

    def started(self, replicas: Sequence[Replica]) -> None:
        if self._paused is not None:
            self._paused += [replica.pause(self._kv) for replica in replicas]
        for replica in replicas:
            if replica.version < self.version:
                when_over(self._env, IDLE, partial(self.refresh, replica))  # it may get requests at this moment

    def keeps(self, version: int, now: int) -> bool:
        """Whether KV cache of the weights of that version is of use under those that there are now."""
        return self._kv == "keep" or version == now

"""A node of a rollout: GPUs that generate in replicas of one layout."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import simpy

from rlsim.cost.transfer import SwitchWay
from rlsim.sim.gpus import RolloutCosts
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica


class Node:
    """GPUs of generation, or (not `own`) those of training that it may borrow."""

    def __init__(
        self, number: int, gpus: tuple[int, ...], tp: int, costs: RolloutCosts, own: bool, used_tps: set[int]
    ) -> None:
        self.number, self.gpus, self.costs, self.own = number, gpus, costs, own
        self.tp = tp  # of its replicas, those to come included
        self.used_tps = used_tps  # of this run
        self.replicas: list[Replica] = []  # until others follow them, even if they have stopped
        self.switched: simpy.Event | None = None  # while it changes its layout: fires when it has
        self.way: SwitchWay | None = None  # how it switched last
        self.pause: tuple[float, int, str] | None = None  # for a switch: since when, to what
        self.bound_for = 0  # requests on their way here
        self.just_finished = False  # responses have

    @property
    def unfinished(self) -> int:
        """Requests here, but those at tools or on their way."""
        return sum([replica.unfinished for replica in self.replicas])

    def end_pause(self, recorder: Recorder, now: float) -> None:
        """It switches no more."""
        if self.pause:
            (start, tp, label), self.pause = self.pause, None
            recorder.add(self.gpus, start, now, "switch", tp, label)


def active(nodes: Iterable[Node]) -> list[Replica]:
    """The replicas of these nodes that have not been told to stop, by index."""
    return sorted((r for node in nodes for r in node.replicas if r.stopped is None), key=attrgetter("index"))

"""Continuous generation whose replicas take new weights each on its own, token by token; see `reference_open`."""

from __future__ import annotations

import math

from reference import _Replica, _Request
from reference_open import _Run


class RollingRun(_Run):
    """Weights are pushed to host memory, spread to all nodes, and pulled by each replica when it may; no switches."""

    spread_s: float
    pull_s: float

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.versions = dict.fromkeys((replica.index for replica in self.replicas), 0)
        self.published = 0
        self.spreading: list[tuple[float, int]] = []  # when all nodes have it, version
        self.emptied: list[_Replica] = []  # at this moment, perhaps
        self.told: set[int] = set()  # replicas that are to stand still
        self.pulling: dict[int, tuple[float, int]] = {}  # by replica: until when, version

    def version_of(self, replica: _Replica) -> int:
        return self.versions[replica.index]

    def version_at(self, request: _Request) -> int:
        return next((self.version_of(r) for r in self.replicas if request in r.requests()), self.published)

    @property
    def shown_version(self) -> int:
        return self.published

    def may_launch(self) -> bool:
        return bool(self.launchable())

    def launchable(self) -> list[_Replica]:
        behind = [r for r in self.active() if self.version_of(r) < self.published and r.index not in self.pulling]
        drain = self.batching.update().responses == "drain"
        return [r for r in self.active() if not (drain and r in behind and r.requests() and r.index not in self.told)]

    def end(self, replica: _Replica) -> bool:
        finished = super().end(replica)
        self.emptied.append(replica)
        return finished

    def look_at_idle(self) -> bool:
        """At the end of a moment: what has nothing left takes new weights, or prompts."""
        idle = [replica for replica in self.emptied if replica.active and not replica.requests()]
        self.emptied.clear()
        for replica in idle:
            self.news = True
            self.tell(replica)
        return bool(idle)

    def tell(self, replica: _Replica) -> None:
        """It is to take the newest weights, if it lacks them and may."""
        known = replica.index in self.told or replica.index in self.pulling
        waits = self.batching.update().responses == "drain" and replica.requests()
        if not known and self.version_of(replica) < self.published and not waits:
            self.told.add(replica.index)
            self.at_boundary(replica)  # an iteration that has just begun counts as not begun

    # --- in place of an update of all

    def push(self) -> bool:
        if self.phase == "asks":
            self.step.sync_starts_at = self.now
            self.phase, self.synced_at = "syncs", self.now + self.sync_s[len(self.open.steps) - 1]
            return True
        return False

    def go_on(self) -> bool:
        followed = self.push() + self.pull()
        if self.phase == "syncs" and self.reached(self.synced_at):
            self.step.sync_ends_at = self.now
            self.version += 1
            self.spreading.append((self.now + self.spread_s, self.version))
            self.next_step()
            return True
        return followed > 0

    def publish(self) -> bool:
        """At the end of the moment."""
        if not (self.spreading and self.reached(self.spreading[0][0])):
            return False
        _, self.published = self.spreading.pop(0)
        self.left_at_update, self.launched_since_update = len(self.running) + len(self.queue), 0
        self.news = True
        for replica in self.active():
            self.tell(replica)
        return True

    def pull(self) -> bool:
        followed = False
        for replica in self.active():
            until, version = self.pulling.get(replica.index, (math.inf, 0))
            if self.reached(until):
                del self.pulling[replica.index]
                self.versions[replica.index] = version
                self.tell(replica)
                followed = True
            if replica.index in self.told and replica.iteration is None:
                self.told.discard(replica.index)
                self.pulling[replica.index] = self.now + self.pull_s, self.published
                if self.batching.update().kv == "recompute":
                    self.lose_kv_of(replica)
                followed = True
        return followed

    def stands(self, replica: _Replica) -> bool:
        return replica.index in self.told or replica.index in self.pulling

    def moments_of_update(self) -> list[float]:
        pulls = [until for until, _ in self.pulling.values()]
        return [*super().moments_of_update(), *pulls, *(at for at, _ in self.spreading)]

"""Clock, GPUs and record of a run: what all its calls share."""

from __future__ import annotations

import simpy

from rlsim.sim.borrowing import Borrowing
from rlsim.sim.elastic import ElasticCall
from rlsim.sim.outcome import Outcome
from rlsim.sim.pool import GpuPool
from rlsim.sim.simulation import Simulation


class Machine:
    """Clock, GPUs and record of a run."""

    def __init__(self, what: Simulation) -> None:
        self.what = what
        self.env = simpy.Environment()
        self.pool = GpuPool(self.env)
        self.outcome = Outcome()
        self.borrowing = Borrowing(self.env, self.pool, what.hybrid) if what.hybrid else None
        self.elastic: list[ElasticCall] = []  # training at work that may borrow GPUs

    def backlog_s(self) -> float:
        """How long training that may borrow GPUs will be at work, on its own, on what waits for it."""
        self.elastic = [work for work in self.elastic if not work.done.triggered]
        return sum(work.backlog_s for work in self.elastic)

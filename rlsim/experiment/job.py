"""The runs of one system as a piece of work that any process can do: all that they need is sent along."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsim.cost.lookups import Lookups
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.frames import Frames
from rlsim.experiment.planning import FoundPlans
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec
from rlsim.schema import validate

#: Experiments that a process keeps loaded.
KEPT = 8
#: Tables of runs, by what a tuned system stands for, then seed.
Tables = Sequence[Sequence[Frames]]


@dataclass(frozen=True)
class Ran:
    """What runs came to; what a simulator of their own searched for and looked up, if they had one."""

    frames: Tables
    plans: FoundPlans = field(default_factory=dict)
    lookups: Lookups | None = None


@dataclass(frozen=True)
class Job:
    """Runs of one system under some seeds."""

    point: str  # its number among the jobs, and the case and system in messages
    key: str  # of the system
    config: str  # the case's resolved experiment, without its systems and further seeds, as JSON
    shown: str
    folder: Path
    system: SystemSpec
    seeds: tuple[int, ...]
    plans: FoundPlans = field(compare=False)  # found before

    @property
    def content(self) -> tuple[Any, ...]:
        """Jobs with the same come to the same."""
        return self.key, self.config, self.folder, self.seeds

    @property
    def name(self) -> str:
        """The case and system."""
        return self.point.partition(": ")[2].strip()

    def run(self) -> Ran | RlsimError:
        """Simulate on a simulator of its own, so that what it finds depends on nothing else.

        Never raises: what goes wrong is the answer.
        """
        try:
            simulator = Simulator(_loaded(self.config, self.shown, self.folder))
            simulator.plans.found |= self.plans
            return Ran(self.tables(simulator), simulator.plans.found, simulator.lookups())
        except RlsimError as error:
            return error
        except MemoryError:
            return RlsimError(f"{self.name}: out of memory")
        except Exception as error:  # a mistake of rlsim's own
            return RlsimError(f"{self.name}: {type(error).__name__}: {error}")

    def tables(self, simulator: Simulator) -> Tables:
        """Simulate on that simulator; raises whatever goes wrong."""
        context = simulator.placed(self.system.make()).context
        return [
            [simulator.tables(alternative, seed) for seed in self.seeds]
            for alternative, _ in self.system.alternatives(context)
        ]


#: Does jobs, in any order; calls its second argument as it begins one, and gives each with its answer.
Execute = Callable[[Sequence[Job], Callable[[Job], None]], Iterable[tuple[Job, Ran | RlsimError]]]


def in_turn(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterable[tuple[Job, Ran | RlsimError]]:
    """One job after the other in this process."""
    for job in jobs:
        begun(job)
        yield job, job.run()


def remembering(execute: Execute) -> Execute:
    """Does no job again that it did before."""
    known: dict[tuple[Any, ...], Ran | RlsimError] = {}

    def does(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterable[tuple[Job, Ran | RlsimError]]:
        yield from [(job, known[job.content]) for job in jobs if job.content in known]
        for job, answer in execute([job for job in jobs if job.content not in known], begun):
            known[job.content] = answer
            yield job, answer

    return does


@lru_cache(maxsize=KEPT)
def _loaded(config: str, shown: str, folder: Path) -> LoadedExperiment:
    return LoadedExperiment.of(validate(json.loads(config), Experiment, shown), folder, shown)

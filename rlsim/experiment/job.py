"""The runs of one system as a piece of work that any process can do: all that they need is sent along."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsim.cost.lookups import Lookups
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.frames import Frames, check_steps, frames_of
from rlsim.experiment.planning import FoundPlans
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec
from rlsim.reading import plain
from rlsim.schema import validate
from rlsim.trace import StepSampler
from rlsim.usercode import blamed

#: Experiments that a process keeps loaded.
KEPT = 8


@dataclass(frozen=True)
class Ran:
    """What runs came to: tables by what a tuned system stands for, then seed; plans searched for; costs looked up."""

    frames: Sequence[Sequence[Frames]]
    plans: FoundPlans
    lookups: Lookups


@dataclass(frozen=True)
class Job:
    """Runs of one system under some seeds. Its simulator is its own, so that what it finds depends on nothing else."""

    point: str  # its number among the jobs, and the case and system in messages
    key: str  # of the system
    config: str  # the case's resolved experiment, without its systems and further seeds, as JSON
    shown: str
    folder: Path
    system: SystemSpec
    seeds: tuple[int, ...]
    plans: FoundPlans = field(compare=False)  # found before

    @classmethod
    def of(
        cls, point: str, experiment: Experiment, shown: str, folder: Path, system: SystemSpec, seeds: Iterable[int],
        plans: FoundPlans,
    ) -> Job:  # fmt: skip
        """The job of a system of an experiment that messages call `shown`; its relative paths start at `folder`."""
        bare: dict[str, Any] = {
            "systems": ["verl"],
            "baseline": None,
            "cases": {},
            "certainty": 0,
            "seeds": list(experiment.seed_list[:1]),
        }
        config = json.dumps({**experiment.model_dump(mode="json"), **bare})  # of the seeds, searches take the first
        parts = tuple(replace(part, parameters=plain(part.parameters)) for part in system.parts)
        return cls(point, system.key, config, shown, folder, replace(system, parts=parts), tuple(seeds), plans)

    @property
    def content(self) -> tuple[Any, ...]:
        """Jobs with the same come to the same."""
        return self.key, self.config, self.folder, self.seeds

    @property
    def name(self) -> str:
        """The case and system."""
        return self.point.partition(": ")[2].strip()

    def run(self) -> Ran | RlsimError:
        """Simulate. Never raises: what goes wrong is the answer."""
        try:
            return self._ran()
        except RlsimError as error:
            return error
        except MemoryError:
            return RlsimError(f"{self.name}: out of memory")
        except Exception as error:  # a mistake of rlsim's own
            return RlsimError(f"{self.name}: {type(error).__name__}: {error}")

    def _ran(self) -> Ran:
        simulator = Simulator(_loaded(self.config, self.shown, self.folder))
        simulator.plans.found |= self.plans
        placed = simulator.placed(self.system.make())
        samplers = [simulator.loaded.sampler(seed) for seed in self.seeds]
        frames = [
            [simulated(simulator, alternative, sampler) for sampler in samplers]
            for alternative, _ in self.system.alternatives(placed.context)
        ]
        return Ran(frames, simulator.plans.found, simulator.lookups())


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


def simulated(simulator: Simulator, spec: SystemSpec, sampler: StepSampler) -> Frames:
    """The tables of one run, without the columns that name it."""
    system = spec.make()
    with _few_collections():
        with blamed(spec.shown):
            outcome = simulator.simulate(system, sampler)
        placed = simulator.placed(system)
        bound = placed.bound(max([rollout.initial_tp for rollout in outcome.rollouts], default=0))
        sides = placed.gpus_of("generate"), placed.gpus_of("train")
        frames = frames_of(outcome, sampler, bound, simulator.loaded.cluster.gpus, simulator.window(system), *sides)
    check_steps(frames, spec.shown)
    return frames


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: a run makes many small objects and no cycles worth looking for (a fifth of its time)."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 1_000_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@lru_cache(maxsize=KEPT)
def _loaded(config: str, shown: str, folder: Path) -> LoadedExperiment:
    return LoadedExperiment.of(validate(json.loads(config), Experiment, shown), folder, shown)

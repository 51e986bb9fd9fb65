"""One case of an experiment: what it loaded, its systems, and their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.base.reading import shipped
from rlsim.base.refusals import said
from rlsim.base.schema import located
from rlsim.cost.step import Lookups
from rlsim.errors import CapacityError, CatalogueError, ConfigError, about, unknown_name
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.frames import Frames, named
from rlsim.experiment.ledger import LedgerRecord, ledger_of
from rlsim.experiment.load import with_settings
from rlsim.experiment.placed import PlacedExperiment, SearchAheadError
from rlsim.experiment.planning import FoundPlans
from rlsim.experiment.refusals import kv_note, remedies, starts_of, tight_note, worst_note
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.steadiness import steady_notes
from rlsim.experiment.summary import (
    idle_notes,
    listed,
    luck_note,
    mean_ratio,
    means,
    preemption_notes,
    rate_notes,
    tool_notes,
)
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.plan import part_of
from rlsim.sim.control import decides


def cases_of(experiment: Experiment, label: str) -> Iterable[tuple[str, Experiment]]:
    """Every case of an experiment with its settings, by name; the experiment itself under \"\" if it has none.

    Raises `ConfigError` with file and line for settings that do not fit.
    """
    if not experiment.cases:
        yield "", experiment
    for name, settings in experiment.cases.items():
        where = located(label, settings)
        for key in ("seeds", "baseline"):
            if key in settings:
                raise ConfigError(f"{where}: case {name!r}: {key} are the same for all cases: set them beside `cases`")
        yield name, with_settings(experiment, {**settings, "cases": {}}, f"{where}: case {name!r}")


class Case:
    """One case: what it loaded, its systems, and the runs so far. Nothing is searched for before `search`.

    With `optional` systems, all that do not fit are left out with a note; else only variants for want of memory are.
    """

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        folder: Path,
        label: str,
        plans: FoundPlans,
        optional: bool = False,
    ) -> None:
        self.name = name
        self.experiment = experiment
        self._place, self._optional = (label, folder), optional
        with about(f"{label}: case {name!r}" if name else label, CatalogueError):
            self.loaded = LoadedExperiment.of(experiment, folder, label)
        self.simulator = Simulator(self.loaded, search=False)
        self.simulator.found |= plans
        self.chosen: dict[str, str] = {}  # tuned systems: what they came out as
        self._specs = parse_systems(experiment.systems, label)
        self.names = [spec.name for spec in self._specs]
        self.baseline = ""  # settled for all cases together
        if experiment.baseline is not None and experiment.baseline not in self.names:
            raise unknown_name("baseline system", experiment.baseline, self.names)
        self._done: dict[tuple[str, int], Frames] = {}
        self._ran: dict[str, str] = {}  # by system: the key of what it came out as
        self._settle()

    def search(self, progress: Callable[[int, int, str], None]) -> None:
        """Search for the plans that systems leave to a search; raises `RlsimError` if one does not fit."""
        if self.searched:
            progress(0, len(self.runs()), f"{self.name} plan of {', '.join(self.searched)}".strip())
            self.simulator.search = True
            self._settle()

    def _settle(self) -> None:
        """Which systems can run, and what each stands for: of a tuned one several, the fastest of which is it."""
        self.refused = starts_of(self.loaded)  # why its framework or engine would not start
        self.notes: list[str] = [*self.loaded.notes, *self.refused]
        self.searched: list[str] = []  # systems whose plan is yet to be searched for
        #: What each stands for, and what that chose; itself if it is not tuned.
        self.systems: dict[SystemSpec, tuple[tuple[SystemSpec, str], ...]] = {
            spec: ((spec, ""),) if spec.name in self.searched else tuple(spec.alternatives(self._placed(spec).context))
            for spec in self._specs
            if self._fits(spec)
        }
        self.memory_notes = list(self._memory_notes())
        self.notes += self.memory_notes

    def runs(self) -> list[tuple[SystemSpec, int]]:
        """The runs to do, a system and a seed each; two systems with the same policy and parameters share theirs."""
        needed: dict[str, SystemSpec] = {}
        for spec, _ in chain.from_iterable(self.systems.values()):
            needed.setdefault(spec.key, spec)
        return [(spec, seed) for spec in needed.values() for seed in self.experiment.seed_list]

    def run(self, spec: SystemSpec, seed: int) -> None:
        self._done[spec.key, seed] = self.simulator.tables(spec, seed)

    def _placed(self, spec: SystemSpec) -> PlacedExperiment:
        return self.simulator.placed(spec.make())

    @property
    def compares(self) -> bool:
        """Whether the baseline runs."""
        return any(spec.name == self.baseline for spec in self.systems)

    def tables(self) -> list[Frames]:
        collected = []
        for spec, alternatives in self.systems.items():
            best, chosen = alternatives[0]
            if len(alternatives) > 1:
                rates = [means(self._steps(one.key), ["seed"])["responses_per_s"].tolist() for one, _ in alternatives]
                ranked = zip(map(mean_ratio, rates), alternatives, strict=True)
                best, chosen = max(ranked, key=lambda item: item[0][0])[1]
                self.chosen[spec.name] = chosen
            self._ran[spec.name] = best.key
            collected += [named(frames, self.name, spec.name, seed) for seed, frames in self._frames(best.key)]
        return collected

    def _frames(self, key: str) -> list[tuple[int, Frames]]:
        """The tables of a system's runs by seed."""
        return [(seed, self._done[key, seed]) for seed in self.experiment.seed_list]

    def _steps(self, key: str) -> pd.DataFrame:
        return pd.concat(frames["steps"].assign(seed=seed) for seed, frames in self._frames(key))

    def _fits(self, spec: SystemSpec) -> bool:
        """Whether the system can run; if not, it is left out with a note, or that is an error."""
        try:
            self.simulator.check_all(spec)
        except SearchAheadError:
            self.searched.append(spec.name)
        except (CapacityError, ConfigError) as error:
            if not (self._optional or (spec.variant and isinstance(error, CapacityError))):
                more = self.remedies(spec) if isinstance(error, CapacityError) else ""
                raise type(error)(f"{spec.shown}: {error}{more}") from None
            self.notes.append(f"{spec.name} left out: {error}")
            return False
        return True

    def remedies(self, spec: SystemSpec | None = None) -> str:
        """The settings with which a system (the last) that does not fit does, even where the longest sequences that the
        limits allow meet; empty where a search tells that."""
        own = spec or self._specs[-1]
        return remedies(self.loaded, lambda changed: Simulator(changed, search=False).check_free(own, worst=True))

    def _memory_notes(self) -> Iterable[str]:
        """What memory lacks for the longest responses, or of `MARGIN`, and for a static layout's batch, each once."""
        found = dict[str, None]()
        for spec, alternatives in self.systems.items():
            if spec.name in self.searched:
                continue
            placed = self._placed(spec)
            if (note := worst_note(placed) or tight_note(placed)) not in ("", *found):
                found[note] = None
                yield note + self.remedies(spec)
            if len(alternatives) == 1 and not decides(spec.make().control) and placed.generates:
                found[kv_note(placed, alternatives[0][0].make().initial_tp(placed.context))] = None
        yield from (note for note in found if note.startswith("KV"))

    def _rate_notes(self) -> Iterable[str]:
        if self._ran:
            steps = pd.concat(self._steps(key).assign(system=name) for name, key in self._ran.items())
            yield from steady_notes(steps)
            yield from luck_note(steps)
            yield from idle_notes(steps, {spec.name for spec in self.systems if decides(spec.make().control)})
            yield from tool_notes(steps)
            yield from rate_notes(steps, self.baseline, self.experiment.workflow.batch)

    def experiments(self) -> dict[str, PlacedExperiment]:
        """Where the systems run, by the names of those that run there."""
        found: dict[int, tuple[PlacedExperiment, list[str]]] = {}
        for spec in self.systems:
            placed = self._placed(spec)
            found.setdefault(id(placed), (placed, []))[1].append(spec.name)
        return {", ".join(names): placed for placed, names in found.values()}

    def lookups(self) -> Lookups:
        return Lookups().merge(placed.lookups() for placed in self.experiments().values())

    @cached_property
    def ledger(self) -> LedgerRecord:
        """What this case rests on, once it has run."""
        return ledger_of(self.loaded, self.lookups())

    def came_out(self, name: str) -> SystemSpec:
        """A system that ran, as what it came out as if it is a tuned one."""
        own = next(spec for spec in self.systems if spec.name == name)
        return next(spec for spec, _ in self.systems[own] if spec.key == self._ran[name])

    def reduced(self, names: Sequence[str]) -> Experiment:
        """The experiment with these systems only, as they came out, one seed, and as few steps as count one block."""
        seed = self.experiment.seed_list[0]
        few = max(self._shortest(self.came_out(name), seed) for name in names)
        settings = {
            "systems": [self.came_out(name).entry for name in names],
            "baseline": self.baseline,
            "seeds": list(self.experiment.seed_list[:1]),
            "certainty": 0,
            "workflow.steps": few,
        }
        return with_settings(self.experiment, settings, self._place[0])

    def _shortest(self, spec: SystemSpec, seed: int) -> int:
        """Steps of the shortest run whose means begin where they did under this seed, and count as much as a block."""
        steps = self._done[spec.key, seed]["steps"]
        first = steps.loc[steps["block"] == 0, "step"]
        begins = 0 if self.experiment.workflow.warmup else 2 * int(first.min())  # no later than halfway
        return min(max(int(first.max()) + 1 + self.simulator.window(spec.make()).lag, begins), len(steps))

    def again(self, experiment: Experiment, name: str) -> Case:
        """A case of another experiment in the same place, with the plans that were found; its systems need not fit."""
        found = self.simulator.found
        made = Case(name, experiment, self._place[1], self._place[0], found, optional=True)
        made.baseline = self.baseline
        return made

    def plans(self) -> dict[str, Any]:
        """The plans that were searched for, by system, as parts of systems."""
        places = {spec.name: self._placed(spec) for spec in self.systems}
        return {name: part_of(placed.plan, placed.workflow) for name, placed in places.items() if placed.searched}

    def all_notes(self) -> list[str]:
        """Everything worth knowing about this case's numbers."""
        samplers = map(self.simulator.sampler, self.experiment.seed_list)
        sampled = dict.fromkeys(note for sampler in samplers for note in sampler.notes)
        scored = self.loaded.scoring.notes
        tuned = [f"{name} ran with {what}, its fastest setting on these seeds" for name, what in self.chosen.items()]
        preemptions = {
            name: pd.concat(frames["responses"]["preemptions"] for _, frames in self._frames(key))
            for name, key in self._ran.items()
        }
        rates, preempted = self._rate_notes(), preemption_notes(preemptions)
        experiments, unfit = self.experiments(), dict[str, list[str]]()
        for names, placed in experiments.items():
            for tp, why in placed.context.infeasible.items():
                unfit.setdefault(f"TP{tp} is infeasible%s: {why}", []).append(names)
        infeasible = [
            note % (f" for {listed(', '.join(names).split(', '))}" if len(names) < len(experiments) else "")
            for note, names in unfit.items()
        ]
        prefix = f"{self.name}: " if self.name else ""
        kinds = said(shipped("says.yaml")["kinds"], kinds=self.loaded.cluster.kinds)
        found = (*tuned, *rates, *preempted, *infeasible, *self.notes, *sampled, *scored, *kinds)
        return [prefix + note for note in found]

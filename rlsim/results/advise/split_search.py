"""The search for the split of the GPUs: short runs of one seed, several systems side by side, each run once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from rlsim.cost.rollout import powers_of_two
from rlsim.experiment.simulator import Simulator
from rlsim.results.advise.asynchronous import Family
from rlsim.results.advise.bound import KINDS, Bound, staleness
from rlsim.results.advise.peak import peak, together
from rlsim.results.advise.ranking import unfit
from rlsim.results.advise.runs import Runner
from rlsim.results.advise.splits import MEASURED, NOTHING, Point, Probe, Splits

#: From so many nodes on they are not cut: whole nodes are as fine a choice then as the GPUs of one node are.
WHOLE_NODES = 8
#: Times that the next best point of a system is taken where one breaks the bound under another seed.
MOST_TRIES = 4


class Search:
    """The search on one experiment under a bound of staleness; runs have `steps` steps."""

    def __init__(self, runner: Runner, simulator: Simulator, bound: Bound, steps: int) -> None:
        self._runner, self._simulator, self._bound, self._steps = runner, simulator, bound, steps
        experiment = simulator.loaded.experiment
        self._seeds = experiment.seed_list
        self._total = len(simulator.placed().gpus)
        self._grids: dict[int, list[int]] = {}  # by TP: the numbers of GPUs that may generate
        self._tried: dict[Point, Probe] = {}  # on the first seed
        self._over: dict[Point, Probe] = {}  # what those measured that break the bound under all seeds
        self._fits_at: dict[Point, bool] = {}
        self._why: dict[str, str] = {}  # by family: why it did not fit at the last point at which it did not
        self._rounds = 0

    def __call__(self, families: Sequence[Family], contenders: int = 0) -> Splits:
        """Searches for all of them side by side; the best of each goes on if it keeps the bound under all seeds.

        With `contenders` the search is a quick one: for the first family that fits, whose split the others take, and
        only so many of them go on, each with the best of this split and those beside it.
        """
        splitting = [family for family in families if family.split]
        first = next((f for f in splitting if self._has_grids(f)), None)
        searches = [self._variants(family, [[Point(family, 0)]]) for family in families if not family.split]
        if contenders and first:
            split = self._quick(first)
            searches += [self._variants(family, [[split._replace(family=family)]]) for family in splitting]
        elif first:
            searches += [self._variants(family, self._points(family)) for family in splitting]
        self._run(together(searches))
        best = {family.name: point for family in families if (point := self._best(family, beside=not contenders))}
        if contenders:
            fastest = sorted(best, key=lambda name: -self._rate(best[name]))[:contenders]
            best = {name: self._best(best[name].family, beside=True) or best[name] for name in fastest}
        best = self._confirmed(best, quick=bool(contenders))
        refused = {family.name: self._refusal(family) for family in families if not self._best(family)}
        stalenesses = [column for column, _ in KINDS.values() if column]
        over = {p: {**self._tried[p], **{c: probe[c] for c in stalenesses}} for p, probe in self._over.items()}
        return Splits(best, {**self._tried, **over}, refused, self._grids)

    def _has_grids(self, family: Family) -> bool:
        """Notes by TP the numbers of GPUs that may generate: whole replicas, and what training and memory allow."""
        cluster = self._simulator.loaded.cluster
        whole = cluster.gpus_per_node if cluster.nodes >= WHOLE_NODES else 1
        for tp in powers_of_two(cluster.domain_gpus):
            counts = range(max(tp, whole), self._total, max(tp, whole))
            if grid := [count for count in counts if self._fits(Point(family, 0, tp, count))]:
                self._grids[tp] = grid
        return bool(self._grids)

    def _points(self, family: Family) -> list[list[Point]]:
        return [[Point(family, 0, tp, count) for count in grid] for tp, grid in self._grids.items()]

    def _fits(self, point: Point) -> bool:
        if point not in self._fits_at:
            why = unfit(self._simulator, point.spec(point.family.name))
            self._fits_at[point] = why is None
            if why is not None:
                self._why[point.family.name] = why
        return self._fits_at[point]

    def _variants(self, family: Family, grids: Sequence[Sequence[Point]]) -> Generator[list[Point], list[Probe], None]:
        """The peaks over all grids, from the variant of their points on, until the best of one keeps the bound."""
        for variant in range(grids[0][0].variant, len(family.variants)):
            peaks = [peak([point._replace(variant=variant) for point in grid], _rate_of) for grid in grids]
            found = yield from together(peaks)
            best = max((probe for probes in found for probe in probes.values()), key=_rate_of)
            if self._bound.keeps(best):
                return

    def _quick(self, family: Family) -> Point:
        """The best TP with about half of the GPUs, then the best number of GPUs at that TP."""
        halves = [min(points, key=lambda p: abs(2 * p.rollout_gpus - self._total)) for points in self._points(family)]
        self._evaluate(halves)
        tp = max(halves, key=self._rate).tp
        self._run(self._variants(family, [points for points in self._points(family) if points[0].tp == tp]))
        return self._best(family) or max((p for p in self._tried if p.family is family), key=self._rate)

    def _best(self, family: Family, *, beside: bool = False) -> Point | None:
        """The fastest point of a family that keeps the bound; `beside`: once those next to it are tried as well."""
        while True:
            kept = [
                point
                for point, probe in self._tried.items()
                if point.family is family and point not in self._over and _rate_of(probe) > 0
                if self._bound.keeps(probe)
            ]
            best = max(kept, key=self._rate, default=None)
            near = self._beside(best) if best and beside else []
            if not near:
                return best
            self._evaluate(near)

    def _beside(self, point: Point) -> list[Point]:
        """Those next to a point, at its TP, that are not tried yet."""
        grid = self._grids[point.tp] if point.family.split else [point.rollout_gpus]
        at = grid.index(point.rollout_gpus)
        near = [point._replace(rollout_gpus=count) for count in (*grid[max(at - 1, 0) : at], *grid[at + 1 : at + 2])]
        return [other for other in near if other not in self._tried]

    def _stricter(self, point: Point, *, quick: bool) -> list[list[Point]]:
        """Where to try the next variant of a point's family: everywhere, at the same split, or nowhere if it was."""
        family, variant = point.family, point.variant + 1
        known = any(p.family is family and p.variant == variant for p in self._tried)
        if known or variant == len(family.variants):
            return []
        grids = self._points(family) if family.split and not quick else [[point]]
        return [[p._replace(variant=variant) for p in grid] for grid in grids]

    def _confirmed(self, best: Mapping[str, Point], *, quick: bool) -> dict[str, Point]:
        """The points, each known to keep the bound under all seeds, or the next best of its family that does."""
        confirmed, waiting = dict(best), dict(best) if len(self._seeds) > 1 else {}
        for _ in range(MOST_TRIES):
            measured = self._measured(waiting.values(), self._seeds, "all seeds") if waiting else {}
            self._over |= {point: found for point, found in measured.items() if not self._bound.keeps(found)}
            failed = {name: point for name, point in waiting.items() if point in self._over}
            self._run(together([self._variants(point.family, grids) for point in failed.values()
                                if (grids := self._stricter(point, quick=quick))]))  # fmt: skip
            again = {name: self._best(point.family, beside=not quick) for name, point in failed.items()}
            waiting = {name: point for name, point in again.items() if point}
            confirmed = {name: waiting.get(name, point) for name, point in confirmed.items()
                         if name not in failed or name in waiting}  # fmt: skip
        self._over |= {point: self._tried[point] for point in waiting.values()}  # not known to keep it
        return {name: point for name, point in confirmed.items() if name not in waiting}

    def _refusal(self, family: Family) -> str:
        """Why no point of a family goes on."""
        own = [probe for p, probe in {**self._tried, **self._over}.items() if p.family is family]
        stalest = [self._bound.measured(probe) for probe in own if probe is not NOTHING]
        return self._bound.beyond(min(stalest)) if stalest else self._why.get(family.name, "no split of the GPUs fits")

    def _run(self, search: Generator[list[Point], list[Probe], Any]) -> None:
        try:
            wanted = next(search)
            while True:
                wanted = search.send(self._evaluate(wanted))
        except StopIteration:
            return

    def _rate(self, point: Point) -> float:
        return _rate_of(self._tried[point])

    def _evaluate(self, points: Sequence[Point]) -> list[Probe]:
        """What is measured at these points on the first seed, each of which is run once."""
        new = [point for point in dict.fromkeys(points) if point not in self._tried]
        fitting = [point for point in new if self._fits(point)]
        self._tried |= dict.fromkeys(new, NOTHING)
        if fitting:
            self._rounds += 1
            self._tried |= self._measured(fitting, self._seeds[:1], f"round {self._rounds}")
        return [self._tried[point] for point in points]

    def _measured(self, points: Iterable[Point], seeds: Sequence[int], what: str) -> dict[Point, Probe]:
        """What is measured at the points under these seeds."""
        names = {f"{point.family.name}: {point.chosen}": point for point in points}
        settings = {
            "systems": [{"name": name, "use": [point.parts]} for name, point in names.items()],
            "seeds": list(seeds),
            "baseline": None,
            "certainty": 0,
            "workflow.steps": self._steps,
        }
        steps = self._runner(f"splits, {what}", settings, list(names)).steps
        found = staleness(steps)
        rows = {str(name): {key: float(row[key]) for key in MEASURED} for name, row in found.iterrows()}
        return {point: rows[name] for name, point in names.items() if name in rows}


def _rate_of(probe: Probe) -> float:
    return probe["responses_per_s"]

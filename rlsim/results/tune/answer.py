"""`rlsim tune` from Python: the settings to change, what they bring, and how sure that is."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rlsim.base.processes import cores
from rlsim.base.refusals import sentence
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.ledger import GIVEN, source_of
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.summary import mean_ratio
from rlsim.frameworks.draft import override
from rlsim.models.hardware import one_kind
from rlsim.results.tune.parts import Parts, parts_of
from rlsim.results.tune.search import PARTS, Changes, Measure, measuring, search
from rlsim.results.tune.space import ALTERS, Axis, Bound, axes_of, baseline_of, check_keys
from rlsim.results.tune.systems import ranked
from rlsim.results.tune.trial import Configuration, Run, Trial

#: Share of the budget that the search may take; the rest tells what it found on draws that it has not seen.
SEARCH_SHARE = 0.5
#: Share of the budget that systems have, where they are asked for; the search's is one of the rest.
SYSTEMS_SHARE = 0.4
#: At most: sets that go on to fresh draws, halved until one is left; paired draws of the answer, and worlds; steps of a
#: synchronous run.
CONTENDERS, PAIRS, STEPS = 8, 5, 3
#: Trials that the rest of a budget should do at least, with as many steps as that allows.
_LEAST_TRIALS = 30
#: A change that brings less is not worth making.
LEAST = 1.005


@dataclass(frozen=True)
class Change:
    """A key, its value, what it brings alone, and what the whole set is worth more with it than without."""

    key: str
    value: Any
    alone: float | None
    within: float


@dataclass(frozen=True)
class Tuned:
    """The answer: `best` sets these keys; `gain` is responses trained on per second over those of the configuration.

    `gain_low`, `gain_high`: 95% over draws of the trace; `model_low`, `model_high`: the least and most of it and
    of worlds whose costs are off as the calibration may be.
    """

    best: Mapping[str, Any]
    gain: float
    gain_low: float
    gain_high: float
    model_low: float
    model_high: float
    before: Mapping[str, float]
    after: Mapping[str, float]
    gpus: tuple[int, int] = (0, 0)  # as configured, and as tuned
    unfit: str = ""  # what of the configuration as it is does not fit, on a draw: nothing is compared with it
    stale: bool = False  # the configuration as it is is staler than allowed
    money: bool = False  # `gain` is one of responses a GPU
    changes: Sequence[Change] = ()
    untried: Sequence[str] = ()  # settings for which time was too short
    evaluated: int = 0
    legal: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    binds: str = ""
    assumptions: Sequence[Mapping[str, Any]] = ()
    beside: Sequence[Mapping[str, Any]] = ()  # what changes of other kinds would bring
    frontiers: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)  # rate against staleness, GPUs
    no_gpus: Sequence[str] = ()  # which numbers of GPUs have no row, and why
    systems: Sequence[Mapping[str, Any]] = ()  # on top, that must be built
    not_tried: Mapping[str, str] = field(default_factory=dict)  # systems, and why
    parts: Parts | None = None
    unsteady: Mapping[str, str] = field(default_factory=dict)  # why a rate would not last: as configured, as tuned

    @property
    def sure(self) -> bool:
        """Whether both intervals lie above no gain."""
        return bool(self.best) and self.gain_low > 1 and not self.model_low <= 1

    def as_json(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if name not in ("stale", "money", "parts")}
        found |= {"changes": [vars(change) for change in self.changes], "seconds": round(self.seconds, 1)}
        found |= self.parts.as_json() if self.parts else {}
        return json.loads(json.dumps(found), parse_constant=lambda _: None)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Wish:
    """What is wanted of the answer.

    `keep` are keys that stay as they are, `allow` what changes may alter beside speed (`ALTERS`); `bound` limits the
    staleness of what is chosen; up to `most_gpus` (None: as configured) may be taken; `money` counts responses of a
    GPU, not of all; with `systems` those that must be built are ranked, too.
    """

    keep: Collection[str] = ()
    allow: Collection[str] = ()
    bound: Bound | None = None
    most_gpus: int | None = None
    money: bool = False
    systems: bool = False

    @property
    def altered(self) -> tuple[str, ...]:
        stale, gpus = self.bound is not None and self.bound.most > 0, self.most_gpus is not None
        return tuple(dict.fromkeys([*self.allow, *["staleness"] * stale, *["gpus"] * gpus]))

    def judged(self, trial: Trial, configured: float = math.inf) -> Trial:
        """A trial as it counts: one that changes something must keep the bound, and take no more GPUs than are allowed,
        or as `configured`."""
        trial, most = replace(trial, each_gpu=self.money), self.most_gpus or configured
        if trial.changes and trial.gpus > most:
            return replace(trial, kind="other", problem=f"{trial.gpus} GPUs, of {most}")
        stale = trial.changes and not trial.kind and not self.kept(trial)
        return replace(trial, kind="stale", problem="staler than allowed") if stale else trial

    def kept(self, trial: Trial) -> bool:
        """Whether a trial that ran is no staler than allowed."""
        return self.bound is None or self.bound.kept(trial.means)


def tune(
    configuration: Configuration,
    wish: Wish | None = None,
    *,
    budget_s: float = 60.0,
    trials: int | None = None,
    workers: int | None = None,
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """The settings of a configuration's framework with which most responses are trained on per second.

    About `budget_s` seconds, by `clock`, are spent in `workers` processes (None: one a core); with `trials` the search
    tries so many sets instead, and the answer is the same on any machine. Raises `RlsimError` for a configuration that
    does not run. An interrupt ends the search; what it found by then is the answer.
    """
    wish = wish or Wish()
    if unknown := {*wish.allow} - {*ALTERS}:
        raise ConfigError(f"allow: unknown {', '.join(sorted(unknown))}; there are {', '.join(ALTERS)}")
    began = clock()
    experiment = configuration.experiment({})
    loaded = LoadedExperiment.of(experiment, configuration.options.folder)
    one_kind(loaded.cluster, "rlsim tune")
    own = Simulator(loaded, search=False)
    spec = baseline_of(experiment.systems, experiment.baseline)
    with suppress(CapacityError):  # what fits is to be found
        if len(list(spec.alternatives(own.placed(spec.make()).context))) > 1:
            raise ConfigError(f"{spec.name} is tuned already: name a plain system with the override baseline=NAME")
    overlaps = own.overlap(spec.make())
    warmup = experiment.workflow.warmup or 0
    check_keys(loaded, wish.keep)
    allowed = {*wish.altered, *["staleness"] * (wish.bound is not None and overlaps > 0)}  # to become fresher, too
    axes = sorted(axes_of(loaded, allowed, wish.keep, wish.most_gpus), key=lambda axis: not axis.alters)

    def spent() -> float:
        return (clock() - began) / budget_s

    done: list[Trial] = []
    stopped = False
    settings_share = 1 - SYSTEMS_SHARE * wish.systems

    def in_time(share: float = settings_share) -> bool:
        return not stopped and (trials is not None or spent() < share)

    def over(tried: int) -> bool:
        return tried >= trials if trials is not None else spent() > SEARCH_SHARE * settings_share

    def left_s() -> float:
        return math.inf if trials is not None else budget_s * (settings_share - spent())

    def told(found: Sequence[Trial]) -> None:
        done[:] = found
        base, best = done[0].rate, max(trial.rate for trial in done)
        share = len(done) / trials if trials is not None else spent()
        progress(share, f"{len(done)} tried, best {best / base:.2f} times" if base else f"{len(done)} tried")

    with measuring(configuration, workers or cores(), partial(wish.judged, configured=loaded.cluster.gpus)) as measure:
        run = Run(_seed(seed, 0), 1 + warmup)
        (base,) = measure([({}, run)])
        began = clock()  # that processes start is no part of the budget
        if base.kind not in ("", "memory"):
            raise ConfigError(base.problem)
        try:
            tried = search(axes, measure, run, over, told, left_s)
        except KeyboardInterrupt:
            if not any(trial.rate for trial in done):
                raise
            tried, stopped = sorted(done, key=lambda trial: -trial.rate), True
        ran = sum(not trial.kind for trial in tried)
        first = {_key(trial.changes): trial for trial in tried}
        # What the rest of the budget can do, by what the fastest sets took to simulate.
        each_s = np.mean([trial.took_s for trial in [base, *tried[:CONTENDERS]] if trial.rate] or [math.inf])
        have_s = 0.0 if stopped else left_s()
        rest = have_s if math.isinf(have_s) else have_s * (workers or cores()) / float(each_s)
        steps = int(min(max(rest / _LEAST_TRIALS, 1), STEPS, experiment.workflow.steps))
        confirmed = steps + warmup
        rest /= 1 if overlaps else steps
        progress(spent(), "the best on fresh draws")
        stale = not base.kind and not wish.kept(base)
        pairs = [Run(_seed(seed, 5 + n), confirmed) for n in range(int(min(max(0.12 * rest, 3), PAIRS)))]
        unfit = base.problem
        bare = not (stale or unfit)
        contenders = [trial.changes for trial in tried if trial.rate and trial.changes]
        if stale and not contenders:
            raise ConfigError("as configured it is staler than allowed, and so is all that was tried and runs")
        contenders = [*[{}] * bare, *contenders[: int(min(max(0.17 * rest, 2), CONTENDERS))]]
        if not contenders:
            raise CapacityError(f"{unfit}\nnone of the {len(tried)} sets of settings that were tried fits")
        races = [Run(_seed(seed, n), confirmed) for n in range(1, 4 if rest > 2 * CONTENDERS else 2)]
        best = _raced(list({_key(one): one for one in contenders}.values()), measure, races)
        trims = [Run(_seed(seed, n), confirmed) for n in (4, 8, 9)[: len(races)]]
        best = _simplified(best, axes, measure, trims, bare)
        progress(spent(), "how sure that is")
        before, after, ratios, late = _pairs(best, measure, pairs)
        if bare and ratios and mean_ratio(ratios)[0] < LEAST:  # on draws that did not choose it, it is none
            best = {}
            before, after, ratios, late = _pairs(best, measure, pairs)
        worlds = [Run(one.seed, one.steps, draw=n + 1) for n, one in enumerate(pairs)] if ratios and in_time() else []
        _, _, drawn, _ = _pairs(best, measure, worlds)
        changes = _worths(best, axes, first, base, measure, trims)
        tuned = LoadedExperiment.of(configuration.experiment(best), configuration.options.folder)
        assumptions = _turns(best, tuned.experiment, measure, run, lambda: not unfit and in_time())
        beside = _beside(loaded, wish, best, measure, run, pairs, in_time)
        parts = parts_of(tuned, configuration.options.folder, pairs[0])
        systems, refused = list[dict[str, Any]](), dict[str, str]()
        if wish.systems:
            progress(spent(), "systems that must be built")
            mine = baseline_of(tuned.experiment.systems, tuned.experiment.baseline)
            start = spent()
            left = lambda share: in_time(start + share * SYSTEMS_SHARE)  # noqa: E731
            systems, refused = ranked(tuned, best, mine, measure, pairs[:3], wish.bound, left)
    gain, low, high = mean_ratio(ratios) if best else (1.0, 1.0, 1.0)
    return Tuned(
        best=best, gain=gain, gain_low=low, gain_high=high,
        model_low=min(gain, *drawn) if drawn else math.nan, model_high=max(gain, *drawn) if drawn else math.nan,
        before=before, after=after, unfit=unfit, stale=stale, money=wish.money,
        gpus=(loaded.cluster.gpus, tuned.cluster.gpus), changes=changes,
        evaluated=len(tried), legal=ran, excluded=dict(Counter(trial.kind for trial in tried if trial.kind)),
        untried=[axis.name for axis in axes if not any(
            option.items() <= trial.changes.items() for option in axis.options for trial in tried)],
        seconds=clock() - began, binds=_binds(after), assumptions=assumptions, beside=beside,
        frontiers=_frontiers([one for one in tried if one.rate and wish.kept(one)], {axis.alters for axis in axes}),
        systems=systems, not_tried=refused, parts=parts,
        unsteady=late, no_gpus=_no_gpus(tried, axes, wish),
    )  # fmt: skip


def _frontiers(ran: Sequence[Trial], altered: Collection[str]) -> dict[str, list[dict[str, float]]]:
    """The fastest set of each number of GPUs, and of each staleness that no fresher one beats."""
    costs: dict[str, Callable[[Trial], float]] = {
        "staleness": lambda trial: round(trial.means["staleness_mean"], 2),
        "gpus": lambda trial: trial.gpus,
    }
    found: dict[str, list[dict[str, float]]] = {}
    for name, cost in ((name, cost) for name, cost in costs.items() if name in altered):
        best = list[Trial]()
        for trial in sorted(ran, key=lambda one: (cost(one), -one.rate)):
            if not best or (cost(trial) > cost(best[-1]) if name == "gpus" else trial.rate > best[-1].rate):
                best.append(trial)
        told = ("responses_per_s", "step_time_s")
        found[name] = [{"gpus": one.gpus, name: cost(one), **{key: one.means[key] for key in told}} for one in best]
    return found


def _seed(seed: int, number: int) -> int:
    """Draws that the search, the race and the answer do not share."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] % 2**31)


def _no_gpus(tried: Sequence[Trial], axes: Sequence[Axis], wish: Wish) -> list[str]:
    """That no other number of GPUs could be tried; or those with which nothing runs, and why the least changed set does
    not."""
    options = [option for axis in axes if axis.alters == "gpus" for option in axis.options]
    if wish.most_gpus and len(options) < 2:
        return [f"--gpus {wish.most_gpus} has no effect: no key that is tried leads to another number up to that"]
    found = []
    for option in options:
        each = [trial for trial in tried if option.items() <= trial.changes.items()]
        if each and not any(trial.rate for trial in each):
            words = " ".join(override(key, value) for key, value in option.items())
            found.append(f"nothing runs with {words}: {min(each, key=lambda trial: len(trial.changes)).problem}")
    return found


def _key(changes: Changes) -> str:
    return str(sorted(changes.items(), key=str))


def _raced(contenders: Sequence[Changes], measure: Measure, runs: Sequence[Run]) -> dict[str, Any]:
    """The set that is fastest on draws that chose nothing: half of the contenders stay after each."""
    rates = np.zeros(len(contenders))
    for run in runs:
        rates += [np.log(max(trial.rate, 1e-9)) for trial in measure([(one, run) for one in contenders])]
        order = np.argsort(-rates, kind="stable")[: max(len(contenders) // 2, 1)]
        contenders, rates = [contenders[i] for i in order], rates[order]
    return dict(contenders[0])


def _simplified(
    best: dict[str, Any], axes: Sequence[Axis], measure: Measure, runs: Sequence[Run], bare: bool
) -> dict[str, Any]:
    """The set without the changes that it loses nothing without: all of these at once if that loses nothing either,
    else the one that is worth least; all of the set only if the configuration as it is (`bare`) is an answer."""
    while len(groups := _groups(best, axes)) > (not bare):
        without = [_without(best, [group]) for group in groups]
        worth = _times(best, without, measure, runs)
        least = int(np.argmin(worth))
        if worth[least] >= LEAST:
            return best
        idle = [group for group, times in zip(groups, worth, strict=True) if times < LEAST]
        fewer = _without(best, idle)
        best = fewer if (bare or fewer) and _times(best, [fewer], measure, runs)[0] < LEAST else without[least]
    return best


def _times(best: Changes, others: Sequence[Changes], measure: Measure, runs: Sequence[Run]) -> list[float]:
    """How many times as fast a set is as each of some others, in the mean of these runs; infinitely if one fails."""
    rates = np.array([trial.rate for trial in measure([(one, run) for one in (best, *others) for run in runs])])
    own, *rest = rates.reshape(-1, len(runs))
    if not own.all():
        return [0.0] * len(rest)
    return [float(np.exp(np.mean(np.log(own / one)))) if one.all() else math.inf for one in rest]


def _without(changes: Changes, groups: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if not any(key in group for group in groups)}


def _groups(changes: Changes, axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    return [keys for keys in dict.fromkeys(tuple(axis.options[0]) for axis in axes) if set(keys) <= set(changes)]


def _pairs(
    best: Changes, measure: Measure, runs: Sequence[Run]
) -> tuple[dict[str, float], dict[str, float], list[float], dict[str, str]]:
    """Means of the configuration and of the set (geometric, as the gain), ratios of pairs, why one would not last."""
    both = ({}, best) if best else ({},)
    each = measure([(one, run) for run in runs for one in both])
    found = [each[start : start + len(both)] for start in range(0, len(each), len(both))]

    def mean(which: int) -> dict[str, float]:
        rows = [trials[which].means for trials in found]
        columns = {name: np.array([row.get(name, np.nan) for row in rows]) for name in (rows[0] if rows else ())}
        return {
            name: float(np.exp(np.mean(np.log(values))) if (values > 0).all() else np.mean(values))
            for name, values in columns.items()
        }

    ratios = [after.rate / before.rate for before, after in found if before.rate and after.rate] if best else []
    words = ("as configured", "as tuned")
    late = {words[which]: one.unsteady for trials in found for which, one in enumerate(trials) if one.unsteady}
    return mean(0), mean(-1), ratios, late


def _worths(
    best: Changes, axes: Sequence[Axis], first: Mapping[str, Trial], base: Trial, measure: Measure, runs: Sequence[Run]
) -> list[Change]:
    """Every change of the set: what it brought alone on the search's draw, and what the set has of it on `runs`."""
    found = list[Change]()
    for group in sorted(_groups(best, axes), key=len, reverse=True):  # a key of several is told with the most others
        own = {key: best[key] for key in group}
        single = first.get(_key(own))
        (within,) = _times(best, [_without(best, [group])], measure, runs)
        gained = single.rate / base.rate if single is not None and single.rate and base.rate else None
        if len(own) == len(best) and within < math.inf:
            gained = within  # the set itself: one comparison has one number
        new = own.keys() - {change.key for change in found}
        worth = within if within < math.inf else math.nan
        found += [Change(key, value, gained, worth) for key, value in own.items() if key in new]
    return sorted(found, key=lambda change: -(change.within if change.within == change.within else np.inf))


def _turns(
    best: Changes, tuned: Experiment, measure: Measure, run: Run, in_time: Callable[[], bool]
) -> list[dict[str, Any]]:
    """What the answer rests on: each assumption, the gain as taken, and at both ends of its range if there is time.

    One that changes make, or unmake, is tried on one side; one for which they give a value is none of the answer's.
    """
    if not best:
        return []

    both: tuple[Changes, Changes] = ({}, best)
    rests = [{row.name: row for row in trial.assumed} for trial in measure([(one, run) for one in both])]

    def gain(name: str = "", **settings: Any) -> float | None:
        there = replace(run, settings=tuple(settings.items()))
        before, after = measure([(one, there if name in made else run) for one, made in zip(both, rests, strict=True)])
        return after.rate / before.rate if before.rate and after.rate else None

    found, own = [], gain()
    before = {name: row for name, row in rests[0].items() if source_of(tuned, row.key) != GIVEN}
    for name, row in (rests[1] | before | rests[1]).items():  # in the order of the set's
        gains = [gain(name, **end.settings) for end in row.ends] if in_time() else []
        shown_ends = [end.shown for end in row.ends]
        found.append({"assumed": name, "taken": row.taken, "ends": shown_ends, "gain": own, "gains": gains})
    return found


def _beside(
    loaded: LoadedExperiment, wish: Wish, best: Changes, measure: Measure, run: Run, pairs: Sequence[Run],
    in_time: Callable[[], bool],
) -> list[dict[str, Any]]:  # fmt: skip
    """What the best single change of each kind that is not allowed would bring on top: the search's draw chooses, those
    of the answer tell."""
    found = []
    for kind, words in ALTERS.items():
        if kind in wish.altered or not in_time():
            continue
        options = [one for axis in axes_of(loaded, [kind], wish.keep) if axis.alters == kind for one in axis.options]
        trials = measure([({**best, **one}, run) for one in options])
        top = max(trials, key=lambda trial: trial.rate, default=None)
        (gain,) = _times(top.changes, [best], measure, pairs) if top else (0.0,)
        if top and LEAST <= gain < math.inf:
            more = {key: value for key, value in top.changes.items() if best.get(key) != value}
            found.append({"kind": kind, "what": words, "changes": more, "gain": gain})
    return found


def _binds(means: Mapping[str, float]) -> str:
    name = max(PARTS, key=lambda name: means.get(name, 0.0))
    time_s, step_s, tail = (means.get(one, 0.0) for one in (name, "step_time_s", "tail_fraction"))
    return sentence("binds", part=PARTS[name], time_s=time_s, step_s=step_s, tail=tail)

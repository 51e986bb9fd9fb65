"""Which changes pay: single ones at both ends of their range first, then sets that a model of a step promises most of.

Memory couples settings: what one change takes another must give. So sets differ from the best so far in one to four
changes at once, and some are chosen by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsim.base.processes import ending, pool_of
from rlsim.results.tune.space import Axis
from rlsim.results.tune.trial import Configuration, Run, Trial, tried

Changes = Mapping[str, Any]
#: What is chosen of each axis that is not left as it is: numbers of axes and options.
Choice = frozenset[tuple[int, int]]
#: A trial to make, and what makes some, in the order asked.
Job = tuple[Changes, Run]


class Measure(Protocol):
    """Makes trials, none of which takes longer than `most_s`."""

    def __call__(self, jobs: Sequence[Job], most_s: float = ...) -> list[Trial]: ...


Told = Callable[[Sequence[Trial]], None]
#: Sets that are made between two looks at what is best, and sets that run between two looks at the clock; the same
#: however many processes work on them.
ROUND, AT_ONCE = 16, 4
#: The best so far, around which new sets are made; so many are made, and so many of a round are chosen by chance.
ELITES, MADE, BY_CHANCE = 6, 300, 4
#: Sets that are priced without generation, at most, and the share of what is left of the time for that.
PRICED, PRICED_SHARE = 400, 0.1
#: Parts of a step, and what binds where one is the largest.
PARTS = {
    "gen_exposed_s": "generation", "train_time_s": "training", "prep_time_s": "log-probs and rewards",
    "sync_time_s": "weight sync", "waiting_time_s": "waiting",
}  # fmt: skip
#: How much evidence a factor needs (trials), what an option of which nothing is known may be worth, and what a certain
#: refusal takes of a set's worth (logarithms).
RIDGE, HOPE, REFUSED = 0.1, 0.02, 0.3
Floats = NDArray[np.float64]


@contextmanager
def measuring(configuration: Configuration, workers: int, judged: Callable[[Trial], Trial]) -> Iterator[Measure]:
    """Trials in so many processes, as they are `judged`; the same trial is run once."""
    known: dict[str, Trial] = {}

    def through(each: Callable[[Sequence[tuple[*Job, float]]], Iterable[Trial]]) -> Measure:
        def measure(jobs: Sequence[Job], most_s: float = math.inf) -> list[Trial]:
            keys = [str((sorted(changes.items(), key=str), run)) for changes, run in jobs]
            missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in known}
            known.update(zip(missing, map(judged, each([(*job, most_s) for job in missing.values()])), strict=True))
            return [known[key] for key in keys]

        return measure

    if workers == 1:
        yield through(lambda jobs: [tried(configuration, *job) for job in jobs])
        return
    with ending(pool_of(workers)) as pool:
        yield through(lambda jobs: pool.map(partial(tried, configuration), *zip(*jobs, strict=True)))


def search(
    axes: Sequence[Axis],
    measure: Measure,
    run: Run,
    over: Callable[[int], bool],
    told: Told,
    left_s: Callable[[], float],
) -> list[Trial]:
    """Every trial until it is `over` (given how many there are), fastest first; none takes longer than `left_s`.

    The first to run is the configuration as it is. `run.seed` is the search's own seed, too; `told` is called now and
    then with all that was tried.
    """
    found: dict[Choice, Trial] = {}

    def add(choices: Sequence[Choice]) -> None:
        for start in range(0, len(choices), AT_ONCE):
            if found and over(len(found)):
                return
            some = choices[start : start + AT_ONCE]
            found.update(zip(some, measure([(changes_of(axes, one), run) for one in some], left_s()), strict=True))
            told(list(found.values()))

    add([Choice()])
    add(_ends(axes))
    add([one for one in _priced(axes, measure, run, over, left_s) if one not in found])
    _explore(axes, found, run.seed, add, lambda: over(len(found)))
    # What is fastest on some number of GPUs on all others: fewer are slower, and no search for the fastest takes them.
    best = max(found, key=lambda one: found[one].rate)
    numbers = [(i, j) for i, axis in enumerate(axes) if axis.alters == "gpus" for j in range(len(axis.options))]
    others = [_with(best, [one]) for one in numbers]
    found |= dict(zip(others, measure([(changes_of(axes, one), run) for one in others], left_s()), strict=True))
    return sorted(found.values(), key=lambda trial: -trial.rate)


def _ends(axes: Sequence[Axis]) -> list[Choice]:
    """Single changes, both ends of every axis."""
    return [Choice([(i, j)]) for i, axis in enumerate(axes) for j in sorted({0, len(axis.options) - 1})]


def _explore(
    axes: Sequence[Axis],
    found: Mapping[Choice, Trial],
    seed: int,
    add: Callable[[Sequence[Choice]], None],
    over: Callable[[], bool],
) -> None:
    """Adds rounds of sets, each made of what was found before, until it is over or nothing is new."""
    generator = np.random.default_rng(seed)
    while not over() and (new := _sets(axes, found, generator)):
        add(new)


def _priced(
    axes: Sequence[Axis], measure: Measure, run: Run, over: Callable[[int], bool], left_s: Callable[[], float]
) -> list[Choice]:
    """Sets with which the calls beside generation are fastest, priced by their formulas alone: these and generation
    meet only in memory, so they are the fastest of all, and those of which less stays on a GPU than of all faster."""
    began_s = left_s()

    def trials(of: Sequence[Axis], choices: Sequence[Choice]) -> dict[Choice, Trial]:
        jobs = [(changes_of(of, one), replace(run, rollout=False)) for one in choices]
        return dict(zip(choices, measure(jobs), strict=True))

    def done() -> bool:
        return len(found) >= PRICED or over(len(found)) or began_s - left_s() > PRICED_SHARE * began_s

    singles = {one: trial.means or trial.kind for one, trial in trials(axes, [Choice(), *_ends(axes)]).items()}
    altering = {i for one, came in singles.items() for i, _ in one if came != singles[Choice()]}
    numbers = [i for i in sorted(altering) if axes[i].alters != "gpus"]
    own = [axes[i] for i in numbers]
    found = trials(own, [Choice(), *_ends(own)])
    _explore(own, found, run.seed, lambda new: found.update(trials(own, new)), done)
    front, least_bytes = list[Choice](), math.inf
    for one in sorted((one for one, trial in found.items() if trial.rate), key=lambda one: -found[one].rate):
        if (kept_bytes := found[one].means["kept_bytes"]) < least_bytes:
            front.append(Choice((numbers[i], j) for i, j in one))
            least_bytes = kept_bytes
    return front[:ELITES]


def changes_of(axes: Sequence[Axis], choice: Choice) -> dict[str, Any]:
    """What a choice sets, by key."""
    return {key: value for i, j in sorted(choice) for key, value in axes[i].options[j].items()}


def _sets(axes: Sequence[Axis], found: Mapping[Choice, Trial], generator: np.random.Generator) -> list[Choice]:
    """The sets to try next: of many around the best so far those that promise most, and some that chance chooses."""
    ran = sorted((one for one, trial in found.items() if trial.rate), key=lambda one: -found[one].rate)
    elites = ran[:ELITES] or [Choice()]  # nothing fits yet
    made: dict[Choice, None] = {}
    for elite in elites[:2]:  # every single further change, and every change taken back
        others = [(i, j) for i, axis in enumerate(axes) for j in range(len(axis.options)) if (i, j) not in elite]
        made |= dict.fromkeys(_with(elite, [one]) for one in others)
        made |= dict.fromkeys(elite - {one} for one in sorted(elite))
    for _ in range(MADE if axes else 0):
        parent = elites[int(generator.integers(len(elites)))]
        mate = elites[int(generator.integers(len(elites)))] if generator.random() < 0.3 else Choice()
        flips = generator.choice(len(axes), min(int(generator.integers(1, 5)), len(axes)), replace=False)
        drawn = [(int(i), int(generator.integers(-1, len(axes[i].options)))) for i in flips]
        made[_with(_with(mate, parent), drawn)] = None
    new = [one for one in made if one not in found]
    rated = _expected(axes, found, new) if ran and new else np.zeros(len(new))
    order = [new[i] for i in np.argsort(-rated, kind="stable")]
    best, rest = order[: ROUND - BY_CHANCE], order[ROUND - BY_CHANCE :]
    chosen = generator.choice(len(rest), min(BY_CHANCE, len(rest)), replace=False) if rest else ()
    return [*best, *(rest[int(i)] for i in chosen)]


def _with(choice: Choice, options: Iterable[tuple[int, int]]) -> Choice:
    """A choice with these options in place of its own of the same axes; option -1 leaves an axis as it is."""
    return Choice((i, j) for i, j in {**dict(choice), **dict(options)}.items() if j >= 0)


def _expected(axes: Sequence[Axis], found: Mapping[Choice, Trial], wanted: Sequence[Choice]) -> Floats:
    """What sets are expected to be worth, up to a constant: the logarithm of a rate.

    An option multiplies each part of a step (generation, training …) by a factor of its own, and parts add up: factors
    by ridge regression over all that ran, the best of it counting most. What was not seen is expected to change
    nothing, what was refused for memory without some change that ran to be refused again.
    """
    ran = {one: trial for one, trial in found.items() if trial.rate}
    width = np.cumsum([0, *(len(axis.options) for axis in axes)])

    def rows(choices: Collection[Choice]) -> Floats:
        made = np.zeros((len(choices), width[-1]))
        for row, one in zip(made, choices, strict=True):
            row[[width[i] + j for i, j in one]] = 1.0
        return made

    seconds = np.array([[max(trial.means.get(name, 0.0), 0.0) for name in PARTS] for trial in ran.values()])
    rates = np.array([trial.rate for trial in ran.values()])
    seconds *= (1 / rates / np.maximum(seconds.sum(axis=1), 1e-12))[:, None]  # of a response
    logs = np.log(seconds + 1e-3 / rates.max())
    known = np.hstack([rows(ran), np.ones((len(ran), 1))])
    weights = (rates / rates.max())[:, None] ** 2
    evidence = known.T @ (weights * known) + np.diag([RIDGE] * int(width[-1]) + [1e-6])
    factors = np.linalg.solve(evidence, known.T @ (weights * logs))
    asked = rows(wanted)
    full = np.hstack([asked, np.ones((len(asked), 1))])
    expected: Floats = -np.log(np.exp(full @ factors).sum(axis=1))
    expected += HOPE * np.sqrt(np.sum(full * np.linalg.solve(evidence, full.T).T, axis=1))
    refused = rows([one for one, trial in found.items() if trial.kind])
    if len(refused):  # the share of what is refused of sets that are alike
        near = np.exp(-np.abs(asked[:, None, :] - np.vstack([refused, rows(ran)])[None]).sum(axis=2))
        expected -= REFUSED * near[:, : len(refused)].sum(axis=1) / near.sum(axis=1)
    return expected

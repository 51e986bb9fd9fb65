"""Which changes pay: every single one first, then sets of them, as elites of an evolutionary search.

Memory couples settings: what one change takes another must give. So a set is made of what the best so far have, with
one to three further changes at once, those first that gained alone or that memory alone refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np

from rlsim.errors import RlsimError
from rlsim.results.tune.space import Axis
from rlsim.results.tune.trial import Configuration, Run, Trial, tried

Changes = Mapping[str, Any]
#: What is chosen of each axis that is not left as it is: numbers of axes and options.
Choice = frozenset[tuple[int, int]]
#: Runs trials, in the order asked.
Measure = Callable[[Sequence[Changes], Run], list[Trial]]
Told = Callable[[Sequence[Trial]], None]
#: Sets that are made between two looks at what is best, and sets that run between two looks at the clock; the same
#: however many processes work on them.
ROUND, AT_ONCE = 16, 4
#: The best so far, of which new sets are made.
ELITES = 6
#: An option that brings less, either way, does not matter; what lies between two of them is not tried alone.
MATTERS = 0.002
_FLIPS = (0.45, 0.35, 0.2)  # chances of one, two, three changes
#: What to expect of a change that was not tried alone, of one that memory refused, and of one that did not start.
_UNKNOWN, _TIGHT, _REFUSED = 1.0, 1.01, 0.9


@contextmanager
def measuring(configuration: Configuration, workers: int) -> Iterator[Measure]:
    """Trials in so many processes; the same trial is run once."""
    known: dict[tuple[Any, ...], Trial] = {}

    def through(each: Callable[[Sequence[tuple[Changes, Run]]], list[Trial]]) -> Measure:
        def measure(wanted: Sequence[Changes], run: Run) -> list[Trial]:
            keys = [(*sorted(changes.items(), key=str), run) for changes in wanted]
            new = dict(zip([str(key) for key in keys], wanted, strict=True))
            missing = [text for text in new if (text,) not in known]
            known.update(zip([(text,) for text in missing], each([(new[text], run) for text in missing]), strict=True))
            return [known[(str(key),)] for key in keys]

        return measure

    if workers == 1:
        yield through(lambda jobs: [tried(configuration, *job) for job in jobs])
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (configuration,)) as pool:
        try:
            yield through(lambda jobs: list(pool.map(_one, jobs)))
        except BrokenProcessPool:
            raise RlsimError("a process that ran trials was killed (no memory left?); try --workers 1") from None
        finally:
            pool.shutdown(cancel_futures=True)


_configuration: Configuration | None = None


def _begin(configuration: Configuration) -> None:
    global _configuration
    _configuration = configuration


def _one(job: tuple[Changes, Run]) -> Trial:
    assert _configuration is not None
    return tried(_configuration, *job)


def search(axes: Sequence[Axis], measure: Measure, run: Run, over: Callable[[int], bool], told: Told) -> list[Trial]:
    """Every trial until it is `over` (given how many there are), fastest first.

    The first to run is the configuration as it is. `run.seed` is the search's own seed, too; `told` is called now and
    then with all that was tried.
    """
    generator = np.random.default_rng(run.seed)
    found: dict[Choice, Trial] = {}

    def add(choices: Sequence[Choice]) -> None:
        for start in range(0, len(choices), AT_ONCE):
            if found and over(len(found)):
                return
            some = choices[start : start + AT_ONCE]
            found.update(zip(some, measure([changes_of(axes, one) for one in some], run), strict=True))
            told(list(found.values()))

    add([Choice()])
    ends = [{0, len(axis.options) - 1} for axis in axes]
    add([Choice([(i, j)]) for i, both in enumerate(ends) for j in sorted(both)])
    promise = _promises(axes, found)
    between = [
        [j for j in range(len(axis.options)) if j not in both and any(abs(promise[i][k] - 1) > MATTERS for k in both)]
        for i, (axis, both) in enumerate(zip(axes, ends, strict=True))
    ]
    add([Choice([(i, j)]) for i, options in enumerate(between) for j in options])
    promise = _promises(axes, found)
    while not over(len(found)):
        new = list(islice(_sets(axes, promise, found, generator), ROUND))
        if not new:
            break
        add(new)
    return sorted(found.values(), key=lambda trial: -trial.rate)


def changes_of(axes: Sequence[Axis], choice: Choice) -> dict[str, Any]:
    """What a choice sets, by key."""
    return {key: value for i, j in sorted(choice) for key, value in axes[i].options[j].items()}


def _promises(axes: Sequence[Axis], found: Mapping[Choice, Trial]) -> list[list[float]]:
    """What each option is expected to be worth, as a ratio: what it brought alone."""
    base = found[Choice()].rate

    def promise(trial: Trial | None) -> float:
        if trial is None or not base:
            return _UNKNOWN
        if trial.kind:
            return _TIGHT if trial.kind == "memory" else _REFUSED
        return trial.rate / base

    return [[promise(found.get(Choice([(i, j)]))) for j in range(len(axis.options))] for i, axis in enumerate(axes)]


def _sets(
    axes: Sequence[Axis], promise: list[list[float]], found: Mapping[Choice, Trial], generator: np.random.Generator
) -> Iterator[Choice]:
    """New sets; ends when none was found for long."""
    elites = sorted((one for one, trial in found.items() if trial.rate), key=lambda one: -found[one].rate)[:ELITES]
    if not axes:
        return
    elites = elites or [Choice()]  # nothing fits yet
    seen, misses = set(found), 0
    best = np.array([max(options) for options in promise])
    weights = np.exp(np.clip(10 * (best - 1), -3, 3)) + 0.05
    while misses < 200:
        parent = elites[int(generator.integers(len(elites)))]
        mate = elites[int(generator.integers(len(elites)))] if generator.random() < 0.3 else frozenset()
        made = dict(mate) | dict(parent)
        flips = 1 + int(generator.choice(3, p=_FLIPS))
        for i in generator.choice(len(axes), min(flips, len(axes)), replace=False, p=weights / weights.sum()):
            values = [1.0, *promise[i]]  # as it is, or one of the options
            chances = np.exp(np.clip(15 * (np.array(values) - 1), -4, 4))
            chosen = int(generator.choice(len(values), p=chances / chances.sum()))
            made.pop(int(i), None)
            if chosen:
                made[int(i)] = chosen - 1
        choice = Choice(made.items())
        if choice in seen:
            misses += 1
            continue
        seen.add(choice)
        yield choice


def intervals(ratios: Sequence[float]) -> tuple[float, float]:
    """95% of a mean ratio by Student's t over paired runs; NaN of fewer than two."""
    from scipy.stats import t

    if len(ratios) < 2:
        return math.nan, math.nan
    logs = np.log(ratios)
    half = float(t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)

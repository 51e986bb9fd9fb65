"""What each assumption of a run is worth: one run at each end of its range, on the same responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from rlsim.errors import RlsimError
from rlsim.experiment.case import Case
from rlsim.experiment.frames import Frames
from rlsim.experiment.ledger import EndRecord, LedgerRecord
from rlsim.experiment.load import with_settings
from rlsim.experiment.schema import Experiment
from rlsim.experiment.summary import means

#: Systems that run at the ends beside the baseline: the fastest, in order.
OTHERS = 2
#: Runs all systems of some cases; gives their tables.
Runs = Callable[[Sequence[Case]], Sequence[Frames]]


def weighed(case: Case, rates: Mapping[str, float], run: Runs) -> LedgerRecord:
    """The ledger of a case that ran, with the worth of every assumption.

    `rates` are the responses that its systems trained on per second, the fastest first: the baseline and the first
    others are tried, of those that are as fast one. All runs are of the case's first seed and of few steps; tuned and
    searched systems keep what they came out as.
    """
    ledger = case.ledger
    if case.baseline not in rates or not ledger.assumed:
        return ledger
    distinct = {rate: name for name, rate in rates.items()}
    others = [name for rate, name in distinct.items() if rate != rates[case.baseline]]
    trial = case.reduced([case.baseline, *others[:OTHERS]])
    base = EndRecord(settings={}, shown="as taken")
    named = {"as taken": base} | {f"{row.name} {end.shown}": end for row in ledger.assumed for end in row.ends}
    ends = list(named.values())
    made = [_made(trial, case, end, name) for name, end in named.items()]
    found = _ran([one for one in made if isinstance(one, Case)], run)
    done = [_done(end, one, found, case.baseline) for end, one in zip(ends, made, strict=True)]
    rest = iter(done[1:])
    rows = [row.model_copy(update={"ends": [next(rest) for _ in row.ends]}) for row in ledger.assumed]
    return ledger.model_copy(update={"assumed": rows, "base": done[0], "baseline": case.baseline})


def _made(trial: Experiment, case: Case, end: EndRecord, name: str) -> Case | str:
    """The case at an end, or why it cannot run."""
    try:
        made = case.again(with_settings(trial, end.settings, name), name)
    except RlsimError as error:
        return str(error)
    return made if made.compares else str(made.notes[-1])


def _ran(cases: Sequence[Case], run: Runs) -> dict[str, pd.DataFrame | str]:
    """The steps of each case by its name, or why it did not run; where one of them fails they run one by one."""
    try:
        steps = pd.concat([frames["steps"] for frames in run(cases)])
        return {str(name): own for name, own in steps.groupby("case")}
    except RlsimError as error:
        if len(cases) == 1:
            return {cases[0].name: str(error)}
        found = dict[str, pd.DataFrame | str]()
        for case in cases:
            found |= _ran([case], run)
        return found


def _done(end: EndRecord, made: Case | str, found: Mapping[str, pd.DataFrame | str], baseline: str) -> EndRecord:
    steps = found[made.name] if isinstance(made, Case) else made
    if isinstance(steps, str):
        return end.model_copy(update={"problem": steps})
    mean = means(steps, ["system"])
    rate = mean["responses_per_s"]
    speedups = {str(name): float(rate[name] / rate[baseline]) for name in rate.index}
    return end.model_copy(update={"step_s": float(mean["step_time_s"][baseline]), "speedups": speedups})

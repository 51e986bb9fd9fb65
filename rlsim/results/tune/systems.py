"""What systems that must be built would bring on top of the settings: every shipped policy that applies, ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from rlsim.base.reading import shipped
from rlsim.base.refusals import holds, worth
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.refusals import starts_of
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.summary import mean_ratio
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.registry import BUILTIN
from rlsim.results.tune.search import AT_ONCE, Changes, Measure
from rlsim.results.tune.space import Bound, facts_of
from rlsim.results.tune.trial import Run, Trial

#: Why a system has no number, though it could have one.
FEW, LATE = "not comparable in so few steps", "not tried, as time was over"
STALE = "it trains on responses of older weights, which is yours to allow (--max-staleness)"
#: Systems that are compared on draws of their own; updates that a system is held to, at most: more bring little.
CONTENDERS, MOST_AGE = 5, 4
#: Steps that a run is doubled to at most while it is not steady; shares of the time up to which all systems run on the
#: first draw, and then those that are not steady for longer.
MOST_STEPS, SHARES = 48, (0.4, 0.8)
#: Shares of the GPUs that generate, where a system has GPUs for that.
_SPLITS = (0.5, 0.375, 0.625, 0.25, 0.75)


def ranked(
    loaded: LoadedExperiment, best: Changes, own: SystemSpec, measure: Measure, runs: Sequence[Run],
    bound: Bound | None, in_time: Callable[[float], bool] = lambda _: True,
) -> tuple[list[dict[str, Any]], dict[str, str]]:  # fmt: skip
    """Systems by what they train a second over the settings `best` of the experiment `loaded`, and why others are not.

    All run on the first of `runs`, each as it is fastest there; the first of them also on the rest, paired, which gives
    `gain_low` and `gain_high`. `in_time` says whether a share of the time for all that is left.
    """
    refused: dict[str, str] = {}
    each = [[(name, *one) for one in _of(name, loaded, own, bound, refused)] for name in BUILTIN]
    tried = [one for turn in zip_longest(*each) for one in turn if one]  # every system once before any of them twice
    found = _paired([(spec, runs[0]) for _, spec, _ in tried], loaded, own, best, measure, bound,
                    in_time, *SHARES)  # fmt: skip
    fastest: dict[str, tuple[float, Trial, SystemSpec, str]] = {}
    for i, (name, spec, chosen) in enumerate(tried):
        if i not in found:
            refused.setdefault(name, LATE)
            continue
        trial, gain = found[i][0], _gain(found[i])
        if bound and not trial.kind and not bound.kept(trial.means):
            refused[name] = f"it was {trial.means['staleness_mean']:.1f} updates stale in the mean"
        elif gain > (fastest[name][0] if name in fastest else 0.0):
            fastest[name] = gain, trial, spec, chosen
        elif any(one.unsteady for one in found[i]):
            refused[name] = FEW
        elif trial.kind:
            refused.setdefault(name, trial.problem)
    order = sorted(fastest, key=lambda name: -fastest[name][0])
    again = _paired([(fastest[name][2], run) for name in order[:CONTENDERS] for run in runs[1:]], loaded, own, best,
                    measure, bound, in_time, 1.0, 1.0)  # fmt: skip
    rows = []
    for place, name in enumerate(order):
        first, trial, _, chosen = fastest[name]
        own_runs = range(place * len(runs[1:]), (place + 1) * len(runs[1:]))
        ratios = [_gain(again[i]) for i in own_runs] if {*own_runs} <= {*again} else []
        ratios = ratios if all(ratios) else []
        gain, low, high = mean_ratio(ratios or [first])
        rows.append({
            "system": name, "with": chosen, "gain": gain,
            "gain_low": low, "gain_high": high,
            "step_time_s": trial.means["step_time_s"], "staleness_mean": trial.means.get("staleness_mean", 0.0),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["gain"]), {name: why for name, why in refused.items() if name not in order}


def _paired(
    jobs: Sequence[tuple[SystemSpec, Run]], loaded: LoadedExperiment, own: SystemSpec, best: Changes, measure: Measure,
    bound: Bound | None, in_time: Callable[[float], bool], share: float, longer: float,
) -> dict[int, tuple[Trial, Trial]]:  # fmt: skip
    """The trial of each system and one of the settings alone, of as many steps: of twice as many as long as one of them
    is not steady, of each system as it is fastest. Those for which time was over are not in it: a share of the time for
    all of them, and one up to which some run `longer`."""
    age = min(math.ceil(bound.most if bound else 0), MOST_AGE)
    stale = (loaded.experiment.workflow.warmup or age) + age + 5 * (age + 1)
    steps = [stale if _overlap(spec, loaded) else run.steps or loaded.experiment.workflow.steps for spec, run in jobs]
    found: dict[int, tuple[Trial, Trial]] = {}
    left = sorted(range(len(jobs)), key=lambda i: steps[i])
    while left:
        for start in range(0, len(left), AT_ONCE):
            some = left[start : start + AT_ONCE] if in_time(share) else []
            trials = measure([(best, _as(jobs[i][1], spec, steps[i])) for i in some for spec in (jobs[i][0], own)])
            found |= zip(some, zip(trials[::2], trials[1::2], strict=True), strict=True)
        late = [i for i in left if i in found and any(one.unsteady for one in found[i]) and 2 * steps[i] <= MOST_STEPS]
        fastest = {(jobs[i][0].name, jobs[i][1]): i for i in sorted(late, key=lambda i: found[i][0].rate)}
        share, left = longer, sorted(fastest.values()) if in_time(longer) else []
        steps = [count * (1 + (i in left)) for i, count in enumerate(steps)]
    return found


def _gain(pair: tuple[Trial, Trial]) -> float:
    """Of a system over the settings; 0 where one of the two does not count or is not steady."""
    trial, whole = pair
    return trial.rate / whole.rate if whole.rate and not (trial.unsteady or whole.unsteady) else 0.0


def _as(run: Run, spec: SystemSpec, steps: int) -> Run:
    """The run of a system, in place of the configuration's own, for so many steps."""
    settings = {"systems": [spec.entry], "baseline": spec.name, "workflow.steps": steps}
    return Run(run.seed, run.steps, run.draw, tuple(settings.items()))


def _overlap(spec: SystemSpec, loaded: LoadedExperiment) -> bool:
    """Whether a system may train on responses of older weights; not so for one that cannot run."""
    with suppress(RlsimError):
        system = spec.make()
        return Simulator(loaded, search=False).overlap(system) > 0 or system.batching.launcher.pauses
    return False


def _of(
    name: str, loaded: LoadedExperiment, own: SystemSpec, bound: Bound | None, refused: dict[str, str]
) -> Iterator[tuple[SystemSpec, str]]:
    """A policy in all the ways that it may be tried, each with what was chosen; or why it is not, in `refused`."""
    row = shipped("systems.yaml").get(name, {})
    tested = "test_run_s" in loaded.trace.frame.columns and loaded.experiment.workflow.reward.from_trace
    in_turn = loaded.experiment.routing == "round_robin"
    facts = {"judged": bool(loaded.scoring.judged.any()), "tested": tested, "in_turn": in_turn}
    if "why" in row and not ("when" in row and holds(row["when"], facts)):
        refused[name] = row["why"]
        return
    simulator, mine = Simulator(loaded, search=False), starts_of(loaded)
    for parameters in _variants(row, loaded, bound):
        (spec,) = parse_systems([{"name": name, "use": [{name: parameters}]}])
        if spec.key == own.key:
            return
        try:
            context = simulator.placed(spec.make()).context
            alternatives = list(spec.alternatives(context))
            stale = _overlap(spec, loaded)
            if stale and bound is None:
                refused[name] = STALE
                return
            if unmet := [reason for reason in starts_of(loaded, [spec]) if reason not in mine]:
                refused[name] = unmet[0]
                return
        except RlsimError as error:
            refused[name] = str(error).removeprefix(f"{spec.shown}: ")
            continue
        shown = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
        for one, chosen in alternatives:
            if one.key != own.key:
                yield one, ", ".join(filter(None, (shown, chosen)))


def _variants(row: Mapping[str, Any], loaded: LoadedExperiment, bound: Bound | None) -> Iterator[dict[str, Any]]:
    if not row:
        yield {}
        return
    training, facts = loaded.experiment.training, facts_of(loaded)
    parts = training.mini_batches if training.epochs == 1 else 1
    parts = parts if loaded.experiment.workflow.prompts % parts == 0 else 1
    age = min(math.ceil(bound.most), MOST_AGE) if bound else 1
    known = {"age": age, "parts": parts}
    values = {key: worth(text, known) for key, text in row.get("parameters", {}).items()}
    if not row.get("split"):
        yield values
        return
    tp, gpus = facts["tp"], facts["gpus"]
    unit = tp * (facts["gpus_per_node"] // math.gcd(tp, facts["gpus_per_node"]) if facts["nodes"] > 1 else 1)
    for share in _SPLITS:
        if 0 < (rollout := round(share * gpus / unit) * unit) < gpus:
            yield {"tp": tp, "rollout_gpus": rollout, **values}

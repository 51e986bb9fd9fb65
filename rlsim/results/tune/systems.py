"""What systems that must be built would bring on top of the settings: every shipped policy that applies, ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlsim.base.catalogue import DATA
from rlsim.base.reading import plain, read_yaml
from rlsim.base.refusals import code_of
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.refusals import starts_of
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.registry import BUILTIN
from rlsim.results.tune.bound import Bound
from rlsim.results.tune.search import Changes, Measure, intervals
from rlsim.results.tune.space import facts_of
from rlsim.results.tune.trial import Run, Trial

STALE = "it trains on responses of older weights, which is yours to allow (--max-staleness)"
#: Systems that are compared on draws of their own; updates that a system is held to, at most: more bring little.
CONTENDERS, MOST_AGE = 5, 4
#: Shares of the GPUs that generate, where a system has GPUs for that.
_SPLITS = (0.25, 0.375, 0.5, 0.625, 0.75)


def ranked(
    loaded: LoadedExperiment, best: Changes, own: SystemSpec, measure: Measure, runs: Sequence[Run], bound: Bound | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Systems by what they train a second over the settings `best` of the experiment `loaded`, and why others are not.

    All run on the first of `runs`, each as it is fastest there; the first of them also on the rest, paired, which gives
    `gain_low` and `gain_high`.
    """
    refused: dict[str, str] = {}
    tried = [(name, spec, chosen) for name in BUILTIN for spec, chosen in _of(name, loaded, own, bound, refused)]
    jobs = [(best, _as(runs[0], spec, loaded, bound)) for _, spec, _ in tried]
    (whole, *trials) = measure([(best, runs[0]), *jobs])
    fastest: dict[str, tuple[Trial, SystemSpec, str]] = {}
    for (name, spec, chosen), trial in zip(tried, trials, strict=True):
        if bound and not trial.kind and not bound.kept(trial.means):
            refused[name] = f"it was {trial.means['staleness_mean']:.1f} updates stale in the mean"
        elif trial.rate > (fastest[name][0].rate if name in fastest else 0.0):
            fastest[name] = trial, spec, chosen
        elif trial.kind:
            refused.setdefault(name, trial.problem)
    order = sorted(fastest, key=lambda name: -fastest[name][0].rate)
    again = measure([
        (best, one) for run in runs[1:]
        for one in (run, *(_as(run, fastest[name][1], loaded, bound) for name in order[:CONTENDERS]))
    ])  # fmt: skip
    pairs = np.reshape([trial.rate for trial in again], (-1, 1 + min(len(order), CONTENDERS)))
    rows = []
    for place, name in enumerate(order):
        trial, _, chosen = fastest[name]
        ratios = (pairs[:, place + 1] / pairs[:, 0]).tolist() if place < CONTENDERS and len(runs) > 1 else []
        gain = float(np.exp(np.mean(np.log(ratios)))) if all(ratios) and ratios else trial.rate / whole.rate
        low, high = intervals(ratios) if all(ratios) else (math.nan, math.nan)
        rows.append({
            "system": name, "with": chosen, "gain": gain, "gain_low": low, "gain_high": high,
            "step_time_s": trial.means["step_time_s"], "staleness_mean": trial.means.get("staleness_mean", 0.0),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["gain"]), {name: why for name, why in refused.items() if name not in order}


def _as(run: Run, spec: SystemSpec, loaded: LoadedExperiment, bound: Bound | None) -> Run:
    """The run with a system in place of the configuration's own."""
    settings: dict[str, Any] = {"systems": [spec.entry], "baseline": spec.name}
    if _overlap(spec, loaded):
        age = min(math.ceil(bound.most if bound else 0), MOST_AGE)
        settings["workflow.steps"] = (loaded.experiment.workflow.warmup or age) + age + 5 * (age + 1)
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
    row = plain(read_yaml(DATA / "systems.yaml")).get(name, {})
    tested = "test_run_s" in loaded.trace.frame.columns and loaded.experiment.workflow.reward.from_trace
    facts = {"judged": bool(loaded.scoring.judged.any()), "tested": tested}
    if "why" in row and not ("when" in row and eval(code_of(row["when"]), {"__builtins__": {}, **facts})):
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
    """Parameters of a policy to try."""
    if not row:
        yield {}
        return
    training, facts = loaded.experiment.training, facts_of(loaded)
    parts = training.mini_batches if training.epochs == 1 else 1
    parts = parts if loaded.experiment.workflow.prompts % parts == 0 else 1
    age = min(math.ceil(bound.most), MOST_AGE) if bound else 1
    values = {key: eval(code_of(text), {"__builtins__": {}, "age": age, "parts": parts})
              for key, text in row.get("parameters", {}).items()}  # fmt: skip
    if not row.get("split"):
        yield values
        return
    tp, gpus = facts["tp"], facts["gpus"]
    unit = tp * (facts["gpus_per_node"] // math.gcd(tp, facts["gpus_per_node"]) if facts["nodes"] > 1 else 1)
    for share in _SPLITS:
        if 0 < (rollout := round(share * gpus / unit) * unit) < gpus:
            yield {"tp": tp, "rollout_gpus": rollout, **values}

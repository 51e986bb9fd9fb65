"""Which system and which TP to take: everything that applies, run on the same responses and ranked with intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from rlsim.errors import RlsimError, unknown_name
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.refusals import starts_of
from rlsim.experiment.result import Result
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.registry import BUILTIN
from rlsim.results.comparison.verdict import judge

#: Policies that only mean something where there is this to decide about.
_JUDGE, _SANDBOX = "no response of the trace is judged by an LLM", "no response of the trace runs in a sandbox"
STALE = "what older weights have generated is yours to allow (--max-staleness, or name it among the systems)"
_ALONE = {
    "real": "rlsim plan searches for plans; name it among the systems",
    "plan": "it is a plan spelled out, which only you can give (rlsim plan searches one)",
    "split": "alone it makes generation and training wait for each other; it is a part of one_step_off",
    "repack": "it frees replicas that take new weights on their own, as those of laminar do; name it beside them",
    "rollout_log_probs": "it trains with log-probs of another engine, which only you can accept",
    "skewness_dispatch": "it needs a predictor of lengths, which only you can have; name it among the systems",
}
#: Parts that decide on a layout and take the degree that it starts with.
_START_TP = ("pat", "planner")


def candidates(
    simulator: Simulator, own: Sequence[SystemSpec], skip: Collection[str] = (), *, quick: bool = False
) -> tuple[list[Any], dict[str, str]]:
    """Entries of `systems` for every shipped policy that applies, and why each of the others does not.

    Static TP at every feasible degree, PAT and the planner from each (`quick`: from the one that they choose), every
    other policy as it ships (tuned where it has something to tune). Those that behave like one of `own` are left out,
    and policies in `skip`. Raises `CatalogueError` if one of these does not exist.
    """
    for name in skip:
        if name not in BUILTIN:
            raise unknown_name("policy", name, BUILTIN)
    degrees = list(simulator.placed().context.feasible_tps)
    starts = [] if quick else [{part: {"start_tp": tp}} for part in _START_TP for tp in degrees[:-1]]
    entries: list[Any] = [*({"verl": {"tp": tp}} for tp in degrees), *(_START_TP if quick else starts)]
    entries += [name for name in BUILTIN if name not in (*_START_TP, "verl")]
    taken, known, refused = list[Any](), {_key(spec, simulator) for spec in own}, dict[str, str]()
    known |= {spec.key for spec in own}
    names = {spec.name for spec in own}
    for entry in entries:
        policy, name = (entry, entry) if isinstance(entry, str) else (next(iter(entry)), _name(entry))
        why = "left out, as asked" if policy in skip else _ALONE.get(name) or _pointless(name, simulator.loaded)
        if why is None:
            named = {"name": free_name(name, names), "use": [entry]}
            (spec,) = parse_systems([named])
            if known & {spec.key, _key(spec, simulator)}:
                continue
            why = STALE if _is_stale(simulator, spec) else unfit(simulator, spec)
        if why is None:
            known |= {spec.key, _key(spec, simulator)}
            names.add(spec.name)
            taken.append(named)
        else:
            refused[name] = why
    return taken, refused


def _key(spec: SystemSpec, simulator: Simulator) -> str:
    """A key that equal systems share: a part that chooses its first TP has the key of one that is given that TP."""
    if len(spec.parts) != 1 or spec.parts[0].policy not in _START_TP:
        return spec.key
    system = spec.make()
    try:
        context = simulator.placed(system).context
        system.control.setup(context)
        start = {"start_tp": system.initial_tp(context)}
    except RlsimError:  # what it is, a check says
        return spec.key
    (part,) = spec.parts
    return replace(part, parameters={**part.parameters, **start}).key


def _is_stale(simulator: Simulator, spec: SystemSpec) -> bool:
    """Whether a system may train on responses of older weights; False too for one that cannot run."""
    system = spec.make()
    try:
        return simulator.overlap(system) > 0 or system.batching.pauses
    except RlsimError:
        return False


def unfit(simulator: Simulator, spec: SystemSpec) -> str | None:
    """Why a system cannot run; None if it can."""
    try:
        simulator.check_all(spec)
    except RlsimError as error:
        return str(error).removeprefix(f"{spec.shown}: ")
    mine, its = starts_of(simulator.loaded), starts_of(simulator.loaded, [spec])
    return next((reason for reason in its if reason not in mine), None)


def _name(entry: Mapping[str, Mapping[str, Any]]) -> str:
    ((policy, parameters),) = entry.items()
    return f"{policy}-tp{next(iter(parameters.values()))}"


def free_name(name: str, taken: Iterable[str]) -> str:
    """The name, or another if an experiment's own system has it."""
    return f"{name} (as shipped)" if name in taken else name


def _pointless(name: str, loaded: LoadedExperiment) -> str | None:
    judged = bool(loaded.scoring.judged.any())
    tested = "test_run_s" in loaded.trace.frame.columns and loaded.experiment.workflow.reward.from_trace
    if name == "colocated_judge" and not judged:
        return _JUDGE
    if name == "adaptive_timeout" and not tested:
        return _SANDBOX
    if name == "reward_scheduler" and not (judged or tested):
        return f"{_JUDGE}, and {_SANDBOX}"
    return None


def ranking(result: Result) -> pd.DataFrame:
    """The rows of `Result.summary`, in the order of the verdict on them (`rlsim.results.comparison.verdict.judge`).

    Beside the summary's columns: `rank`, `tuned` (what a tuned system came out as), `verdict`, `why` it cannot be
    compared (such rows come last), and `same_as` (a system above that is just as fast).
    """
    summary = result.summary().set_index("system", drop=False).drop(columns="case")
    tuned: Mapping[str, str] = next(iter(result.manifest["tuned"].values()), {})
    verdict = judge(summary, str(result.manifest["baseline"]))
    found = summary.loc[[row.system for row in verdict.rows]].reset_index(drop=True)
    first: dict[float, str] = {}
    same = [first.setdefault(rate, name) for rate, name in zip(found["responses_per_s"], found["system"], strict=True)]
    return found.assign(
        rank=range(1, len(found) + 1),
        tuned=[tuned.get(name, "") for name in found["system"]],
        verdict=[row.outcome for row in verdict.rows],
        why=[row.why for row in verdict.rows],
        same_as=["" if one == own else one for one, own in zip(same, found["system"], strict=True)],
    )

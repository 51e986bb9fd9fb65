"""Which system and which TP to take: everything that applies, run on the same responses and ranked with intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from rlsim.advise.quick import REAL, SEARCHED_GPUS
from rlsim.errors import RlsimError, unknown_name
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import check_system
from rlsim.experiment.placed import SearchAheadError
from rlsim.experiment.result import Result
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.steadiness import comparable, unsteady
from rlsim.experiment.summary import mean_ratio, means, model_interval, paired_ratio, ratios
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.registry import BUILTIN

#: Policies that only mean something where there is this to decide about.
_JUDGE, _SANDBOX = "no response of the trace is judged by an LLM", "no response of the trace runs in a sandbox"
STALE = (
    "it trains on what older weights have generated, which only you can allow (--max-staleness, or name it among the "
    "systems)"
)
_ALONE = {
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
    other policy as it ships (tuned where it has something to tune; `quick`: with a smaller search). Those that behave
    like one of `own` are left out, and policies in `skip`. Raises `CatalogueError` if one of these does not exist.
    """
    for name in skip:
        if name not in BUILTIN:
            raise unknown_name("policy", name, BUILTIN)
    degrees = list(simulator.placed().context.feasible_tps)
    entries: list[Any] = [{"verl": {"tp": tp}} for tp in degrees]
    if quick:
        entries += [*_START_TP, {"real": REAL}]
    else:
        entries += [{part: {"start_tp": tp}} for part in _START_TP for tp in degrees[:-1]]
    entries += [name for name in BUILTIN if name not in (*_START_TP, "verl", *(("real",) if quick else ()))]
    taken, known, refused = list[Any](), {_key(spec, simulator) for spec in own}, dict[str, str]()
    known |= {spec.key for spec in own}
    names = {spec.name for spec in own}
    for entry in entries:
        policy, name = (entry, entry) if isinstance(entry, str) else (next(iter(entry)), _name(entry))
        why = "left out, as asked" if policy in skip else _ALONE.get(name) or _pointless(name, simulator.loaded)
        if quick and policy == "real" and simulator.loaded.cluster.gpus > SEARCHED_GPUS:
            why = f"--quick searches no plan for more than {SEARCHED_GPUS} GPUs; rlsim plan does"
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
        check_system(simulator, spec)
    except SearchAheadError:
        return None  # as far as is known before the search
    except RlsimError as error:
        return str(error).removeprefix(f"{spec.shown}: ")
    return None


def _name(entry: Mapping[str, Mapping[str, Any]]) -> str:
    ((policy, parameters),) = entry.items()
    return policy if parameters is REAL else f"{policy}-tp{next(iter(parameters.values()))}"


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
    """Systems from the fastest on: by the geometric mean over seeds of the responses that they train on per second.

    One row per system: `rank`, `system`, `tuned` (what a tuned one came out as); of `rlsim.experiment.summary.means`
    `responses_per_s`, `tokens_per_s`, `step_time_s`, `gen_time_s`, and its shares as `idle` (of GPU time) and `tail`
    (of busy GPU time); `speedup` (in responses per second) and `token_speedup` over the baseline with their 95%
    intervals `…_low` to `…_high`, of `speedup` also over the calibration's errors (`speedup_model_low` and `…_high`,
    missing without draws); `behind_best` (the best's responses per second over its own) with `behind_low` and
    `behind_high`, `with_best` (the interval includes 1, so the difference may be chance; missing with one seed),
    `same_as` (a system above that is just as fast), `staleness` (weight updates, the most of any step), `unsteady`
    (why the throughput would not last) and `comparable` (it is steady). Systems that are not comparable come last and
    are never the best, unless none is comparable.
    """
    steps, tuned = result.steps, dict[str, str](next(iter(result.manifest["tuned"].values()), {}))
    found = means(steps, ["system"])
    by_seed = means(steps, ["system", "seed"]).sort_index()
    seeds = {str(system): own.droplevel("system") for system, own in by_seed.groupby("system")}
    worlds: Mapping[str, Sequence[float]] = next(iter(result.manifest.get("worlds", {}).values()), {})
    found["unsteady"] = [unsteady(steps[steps["system"] == system]) for system in found.index]
    found["comparable"] = comparable(found)
    found["typical"] = [mean_ratio(seeds[system]["responses_per_s"].tolist())[0] for system in map(str, found.index)]
    found = found.sort_values(["comparable", "typical"], ascending=False, kind="stable")
    best, baseline = str(found.index[0]), result.manifest["baseline"]
    first: dict[float, str] = {}
    rows = []
    for rank, system in enumerate(map(str, found.index), 1):
        row, own = found.loc[system].to_dict(), seeds[system]
        reference = seeds.get(baseline, own.iloc[:0])
        behind = paired_ratio(seeds[best]["responses_per_s"], own["responses_per_s"])
        fastest = first.setdefault(float(row["responses_per_s"]), system)
        rows.append(
            {
                "rank": rank,
                "system": system,
                "tuned": tuned.get(system, ""),
                **{name: row[name] for name in ("responses_per_s", "tokens_per_s", "step_time_s", "gen_time_s")},
                **(speedups := ratios(own, reference, ("speedup", "token_speedup"))),
                **model_interval(speedups["speedup"], worlds.get(system, ())),
                **dict(zip(("behind_best", "behind_low", "behind_high"), behind, strict=True)),
                "with_best": None if math.isnan(behind[1]) else system == best or behind[1] <= 1.0,
                "same_as": "" if fastest == system else fastest,
                "idle": row["bubble_fraction"],
                "tail": row["tail_fraction"],
                "staleness": int(steps.loc[steps["system"] == system, "staleness_max"].max()),
                "unsteady": row["unsteady"],
                "comparable": bool(row["comparable"]),
            }
        )
    return pd.DataFrame(rows)

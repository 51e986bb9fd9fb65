"""Which system and which TP to take: everything that applies, run on the same responses and ranked with intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.errors import RlsimError, unknown_name
from rlsim.experiment.build import Setup
from rlsim.experiment.result import Result
from rlsim.experiment.run import check_system
from rlsim.experiment.summary import mean_ratio
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.policies.registry import BUILTIN

#: Beyond this share of prompts held back at the end, a system's time says little: it has put off the longest responses.
MOST_HELD_BACK = 0.05

#: Policies that only mean something where there is this to decide about.
_JUDGE, _SANDBOX = "no response of the trace is judged by an LLM", "no response of the trace runs in a sandbox"
_ALONE = {"plan": "it is a plan spelled out, which only you can give (rlsim plan searches one)"}
#: Parts that decide on a layout and take the degree that it starts with.
_START_TP = ("pat", "planner")


def candidates(setup: Setup, own: Sequence[SystemSpec], skip: Collection[str] = ()) -> tuple[list[Any], dict[str, str]]:
    """Entries of `systems` for every shipped policy that applies, and why each of the others does not.

    Static TP at every feasible degree, PAT and the planner from each, every other policy as it ships (tuned where it
    has something to tune). Those that behave like one of `own` are left out, and policies in `skip`. Raises
    `CatalogueError` if one of these does not exist.
    """
    for name in skip:
        if name not in BUILTIN:
            raise unknown_name("policy", name, BUILTIN)
    context = setup.site().context
    degrees = list(context.feasible_tps)
    entries: list[Any] = [{"verl": {"tp": tp}} for tp in degrees]
    entries += [{part: {"start_tp": tp}} for part in _START_TP for tp in degrees[:-1]]
    entries += [name for name in BUILTIN if name not in (*_START_TP, "verl")]
    taken, known, refused = list[Any](), {spec.key for spec in own}, dict[str, str]()
    names = {spec.name for spec in own}
    for entry in entries:
        policy, name = (entry, entry) if isinstance(entry, str) else (next(iter(entry)), _name(entry))
        why = "left out, as asked" if policy in skip else _ALONE.get(name) or _pointless(name, setup)
        if why is None:
            named = {"name": _free(name, names), "use": [entry]}
            (spec,) = parse_systems([named])
            if spec.key in known:
                continue
            try:
                check_system(setup, spec)
            except RlsimError as error:
                why = str(error).removeprefix(f"{spec.shown}: ")
            else:
                known.add(spec.key)
                names.add(spec.name)
                taken.append(named)
                continue
        refused[name] = why
    return taken, refused


def _name(entry: Mapping[str, Mapping[str, int]]) -> str:
    ((policy, parameters),) = entry.items()
    return f"{policy}-tp{next(iter(parameters.values()))}"


def _free(name: str, taken: Iterable[str]) -> str:
    """The name, or another if an experiment's own system has it."""
    return f"{name} (as shipped)" if name in taken else name


def _pointless(name: str, setup: Setup) -> str | None:
    judged = bool(setup.scoring.judged.any())
    tested = "test_run_s" in setup.trace.frame.columns and setup.experiment.workflow.reward.from_trace
    if name == "colocated_judge" and not judged:
        return _JUDGE
    if name == "adaptive_timeout" and not tested:
        return _SANDBOX
    if name == "reward_scheduler" and not (judged or tested):
        return f"{_JUDGE}, and {_SANDBOX}"
    return None


def ranking(result: Result) -> pd.DataFrame:
    """Systems from the fastest on: how many tokens they train on per second, over the same responses seed by seed.

    One row per system: `rank`, `system`, `tuned` (what a tuned one came out as), `step_time_s`, `gen_time_s` (means),
    `tokens_per_s` (prompt and response tokens trained on), `speedup` over the baseline with its 95% interval
    `speedup_low` to `speedup_high`, `behind_best` (the best's tokens per second over its own) with `behind_low` and
    `behind_high`, `with_best` (the interval includes 1, so the difference may be chance; missing with one seed),
    `same_as` (a system above that takes just as long), `idle` (share of GPU time), `staleness` (weight updates, the
    most of any step), `held_back` (prompts that wait at the end of a run, as a share of those trained on) and
    `comparable` (that is at most `MOST_HELD_BACK`: else the longest responses are yet to come). Systems that are not
    comparable come last and are never the best, unless none is comparable.
    """
    steps = result.steps
    tuned: Mapping[str, str] = next(iter(result.manifest["tuned"].values()), {})
    sums = steps.groupby(["system", "seed"], sort=False)[["tokens", "step_time_s"]].sum()
    rate = (sums["tokens"] / sums["step_time_s"]).unstack("seed")
    total = sums.groupby("system", sort=False).sum()
    rates = total["tokens"] / total["step_time_s"]
    held_back = _held_back(result)
    order = pd.DataFrame({"rate": rates, "late": held_back.reindex(rates.index) > MOST_HELD_BACK})
    order = order.sort_values(["late", "rate"], ascending=[True, False], kind="stable")
    best = str(order.index[0])
    first: dict[float, str] = {}
    bubble = (steps["bubble_fraction"] * steps["step_time_s"]).groupby(steps["system"]).sum() / total["step_time_s"]
    baseline = result.manifest["baseline"]
    rows = []
    for rank, system in enumerate(map(str, order.index), 1):
        mine = steps[steps["system"] == system]
        speedup = _ratio(rate, system, str(baseline)) if baseline in rate.index else (float("nan"),) * 3
        behind = _ratio(rate, best, system)
        rows.append(
            {
                "rank": rank,
                "system": system,
                "tuned": tuned.get(system, ""),
                "step_time_s": float(mine["step_time_s"].mean()),
                "gen_time_s": float(mine["gen_time_s"].mean()),
                "tokens_per_s": float(rates[system]),
                **dict(zip(("speedup", "speedup_low", "speedup_high"), speedup, strict=True)),
                **dict(zip(("behind_best", "behind_low", "behind_high"), behind, strict=True)),
                "with_best": None if np.isnan(behind[1]) else system == best or behind[1] <= 1.0,
                "same_as": "" if first.setdefault(float(rates[system]), system) == system else first[rates[system]],
                "idle": float(bubble[system]),
                "staleness": int(mine["staleness"].max()),
                "held_back": float(held_back[system]),
                "comparable": bool(held_back[system] <= MOST_HELD_BACK),
            }
        )
    return pd.DataFrame(rows)


def _held_back(result: Result) -> pd.Series[float]:
    """By system: prompts that wait when the last step is over, as a share of the prompts trained on."""
    spec = result.manifest["experiment"]["workflow"]
    last = result.steps[result.steps["step"] == result.steps["step"].max()]
    trained = result.steps.groupby("system")["trained"].sum() / int(spec["responses"])
    waiting: pd.Series[float] = last.groupby("system")["waiting"].sum().astype(float)
    return waiting / trained


def _ratio(rate: pd.DataFrame, one: str, other: str) -> tuple[float, float, float]:
    """Geometric mean over seeds of one system's rate over another's, and its 95% interval (NaN with one seed)."""
    ratios = (rate.loc[one] / rate.loc[other]).to_numpy(np.float64)
    return mean_ratio(ratios[~np.isnan(ratios)].tolist())

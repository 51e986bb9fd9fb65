"""Means of the steady steps, throughputs, and their ratios to a baseline with intervals over paired seeds.

And what a reader must know of these: who trains on other responses, who recomputes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.refusals import code_of
from rlsim.experiment.columns import ACTED, MEANS, SUMMARY, TABLES, computed
from rlsim.experiment.steadiness import held_back, unsteady

CONFIDENCE = 0.95
#: One or two values say nothing of how far others would lie from them.
FEWEST = 3
#: Columns of `steps` that are a mean or share of another column.
_SHARES = {
    "staleness_mean": "trained",
    "stale_token_share": "trained_response_tokens",
    "rollout_idle": "step_time_s",
    "trainer_idle": "step_time_s",
}
#: What else of steps means need the sum of, as their rows say.
_SUMMED = sorted(
    {name for column in (*SUMMARY, *MEANS) if column.of for name in code_of(column.of).co_names}
    & {column.name for column in TABLES["steps"]} - {*_SHARES, "staleness_p95", "staleness_max"}
)
#: Columns of `steps` that `means` needs.
MEASURED = ("steady", *_SUMMED, *_SHARES, "bubble_fraction", "tail_fraction", "staleness_counts", "staleness_max")
#: Ratios that are shown, and the column of `means` whose ratio each is; all of them count trained work per second.
RATIOS = {
    "speedup": "responses_per_s",
    "token_speedup": "tokens_per_s",
    "gen_speedup": "responses_per_gen_s",
    "gen_p90_speedup": "responses_per_gen_p90_s",
}
#: A ratio's column, and its interval's.
ENDS = ("", "_low", "_high")
#: Worlds from which the seconds of a step have an interval: fewer know their spread by a factor of several.
FEWEST_WORLDS = 5


def means(steps: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """What the steady ones of these rows of `steps` come to, a row for each value of the columns `by`.

    The columns are those of `SUMMARY` and `MEANS` that are expressions: over sums of columns of `steps`, the `count` of
    steps, and seconds of generation (NaN where nothing is generated).
    """
    rows = steps[steps["steady"]]
    held_s = rows["step_time_s"]
    busy_s = (1.0 - rows["bubble_fraction"]) * held_s
    weighted = {
        "bubble_s": rows["bubble_fraction"] * held_s,
        "busy_s": busy_s,
        "tail_s": rows["tail_fraction"] * busy_s,
        **{share: rows[share] * rows[whole] for share, whole in _SHARES.items()},
    }
    kept = rows[[*by, *_SUMMED, "staleness_counts", "staleness_max"]]
    grouped = pd.concat([kept, pd.DataFrame(weighted)], axis=1).groupby(list(by), sort=False)
    sums = grouped[[*_SUMMED, "bubble_s", "busy_s", "tail_s"]].sum().astype(float)
    tables = (sums, grouped[[*_SHARES]].sum(min_count=1), grouped[["staleness_max"]].max())
    known: dict[str, Any] = {str(name): own.to_numpy() for table in tables for name, own in table.items()}
    known |= {
        "count": grouped.size().to_numpy(),
        "staleness_p95": grouped["staleness_counts"].agg(lambda steps: percentile_of_counts(_counted(steps))),
    }
    for part in ("", "_p90"):
        seconds = known[f"gen{part}_time_s"]
        known[f"generated{part}_s"] = np.where(seconds > 0, seconds, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return pd.DataFrame(computed((*SUMMARY, *MEANS), np=np, **known), index=sums.index)


def _counted(steps: Iterable[str]) -> Counter[int]:
    """What columns as `staleness_counts` of these steps count together."""
    counts: Counter[int] = Counter()
    for updates, _, count in (pair.partition(":") for one in steps for pair in one.split()):
        counts[int(updates)] += int(count)
    return counts


def percentile_of_counts(counts: Mapping[int, int]) -> int:
    """The 95th percentile of values that are there so many times: the least that 95% do not exceed; 0 of none."""
    values = np.repeat([*counts], [*counts.values()])
    return int(np.percentile(values, 95, method="inverted_cdf")) if len(values) else 0


def summarise(steps: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
    """One row per case and system: `means` over the steady `steps` of all seeds, and ratios to the baseline.

    The columns are `rlsim.experiment.columns.SUMMARY`. `speedup` is the ratio of trained responses per second,
    `token_speedup` that of trained tokens, `gen_speedup` that of trained responses per second of generation: geometric
    means over seeds on the same responses. Their 95% intervals are Student's t on the logarithms, missing with one
    seed; all ratios are missing where the baseline did not run. `speedup_model_…` and `step_time_s_model_…`:
    `model_interval`. `step_time_s_half` and `gen_time_s_half` are the `half_width` of these means.
    """
    baseline = manifest["baseline"]
    whole = means(steps, ["case", "system"])
    by_seed = means(steps, ["case", "system", "seed"]).sort_index()
    steps_of = dict(iter(steps.groupby(["case", "system"], sort=False)))
    rows: list[dict[str, object]] = []
    for case, system in ((case, system) for case, systems in manifest["systems"].items() for system in systems):
        if (case, system) not in whole.index:
            continue
        own, its_steps = by_seed.loc[(case, system)], steps_of[case, system]
        row: dict[str, object] = {"case": case, "system": system, **whole.loc[(case, system)].to_dict()}
        row |= {f"{time}_half": half_width(its_steps, time) for time in ("step_time_s", "gen_time_s")}
        compared = baseline in manifest["systems"][case]
        row |= ratios(own, by_seed.loc[(case, baseline)] if compared else own.iloc[:0])
        for name, drawn in (("speedup", "worlds"), ("step_time_s", "world_steps")):
            found = manifest.get(drawn, {}).get(case, {}).get(system, ())
            enough = name == "speedup" or len(found) >= FEWEST_WORLDS
            row |= model_interval(name, row[name], found if enough else ())
        rows.append(row | {"held_back": held_back(its_steps), "unsteady": unsteady(its_steps)})
    return pd.DataFrame(rows, columns=[column.name for column in SUMMARY])


def model_interval(name: str, value: Any, worlds: Sequence[float]) -> dict[str, float]:
    """The 95% interval of a figure of that name over the calibration's errors: `…_model_low` and `_high`.

    `worlds`: how many times as large it was in each world drawn as in the calibration's own, on the same seed. The
    errors are Student's t on the logarithms; missing with fewer than two worlds.
    """
    logs = np.log(worlds)
    half = half_interval(logs.tolist()) * np.sqrt(len(logs))  # of one world more, not of their mean
    ends = value * np.exp([-half, half])
    return dict(zip((f"{name}_model_low", f"{name}_model_high"), ends.tolist(), strict=True))


def half_interval(values: Sequence[float]) -> float:
    """Half the width of Student's 95% interval of the mean; NaN with a single value."""
    if len(values) < 2:
        return float("nan")
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    return float(quantile * np.std(values, ddof=1) / np.sqrt(len(values)))


def half_width(steps: pd.DataFrame, time: str) -> float:
    """Half the width of the 95% interval of one system's mean of a column of `steps`, by its blocks in all seeds.

    Batch means: of what each block takes more or less than the mean would have it take. NaN with fewer than `FEWEST`.
    """
    blocks = steps[steps["steady"]].groupby(["seed", "block"])[time].agg(["sum", "size"])
    if len(blocks) < FEWEST:
        return float("nan")
    mean = blocks["sum"].sum() / blocks["size"].sum()
    return half_interval(((blocks["sum"] - mean * blocks["size"]) / blocks["size"].mean()).tolist())


#: The ratio of two systems' rates by seed, and its interval.
Ratio = Callable[["pd.Series[float]", "pd.Series[float]"], tuple[float, float, float]]


def paired_ratio(own: pd.Series[float], reference: pd.Series[float]) -> tuple[float, float, float]:
    """`mean_ratio` of own / reference over the seeds that both have (their index)."""
    return mean_ratio((own / reference).dropna().tolist())


def ratios(own: pd.DataFrame, reference: pd.DataFrame, ratio: Ratio = paired_ratio) -> dict[str, float]:
    """The `RATIOS` of the `means` of each seed, with their intervals: `speedup`, `speedup_low`, `speedup_high`, …"""
    found: dict[str, float] = {}
    for name, rate in RATIOS.items():
        found |= zip((f"{name}{end}" for end in ENDS), ratio(own[rate], reference[rate]), strict=True)
    return found


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its interval (NaN with a single value; all NaN without any)."""
    if not ratios:
        return (float("nan"),) * 3
    logs = np.log(ratios)
    centre, half = float(logs.mean()), half_interval(logs.tolist())
    return float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half))


# ---- notes on throughputs --------------------------------------------------------------------------------------------


#: A ratio of responses that differs by more than this from that of tokens is explained.
EXPLAINED = 0.02
#: A mean step time that is not known to this share of itself by its own steps is noted.
KNOWN = 0.03
#: More systems than these are counted, not listed.
MOST_NAMES = 4
#: Columns of `steps` that say what becomes of what is not trained on.
PUT_OFF = ("put_back", "paused", "resumed", "dropped", "dropped_stale")
#: From this share of preempted responses on, the results say so. Each of them is prefilled a second time with all its
#: tokens and waits for room before; fewer are what a batch brings that happens to be long.
CONSIDERABLE = 0.05


def idle_notes(steps: pd.DataFrame, deciding: Collection[str]) -> Iterator[str]:
    """Which systems that decide something while they generate never changed anything.

    One that trains on fewer responses than it launched may have ended generation early.
    """
    for system, own in steps.groupby("system", sort=False):
        whole = (own["launched"] <= own["trained"]).all()
        if system in deciding and whole and not own[[*ACTED, "paused", "borrowed_gpu_s"]].any(axis=None):
            yield f"{system} never acted: its controls switched, moved, released and aborted nothing in any step"


def tool_notes(steps: pd.DataFrame) -> Iterator[str]:
    """How long responses were in tool calls, and waited for sandboxes and workers, by system, means of steady steps;
    and by which weights turns were begun where these are not all the same."""
    if not steps["tool_calls_mean"].any():
        return
    own = steps[steps["steady"]].groupby("system", sort=False)[["tool_s_mean", "tool_wait_s_mean"]].mean()
    each = [
        f"{system} {row.tool_s_mean:,.2f} s in them, {row.tool_wait_s_mean:,.2f} s waiting for a sandbox or worker"
        for system, row in zip(own.index, own.itertuples(), strict=True)
    ]
    yield f"tool calls of a response trained on: {'; '.join(each)}"
    turns = {str(system): _counted(one) for system, one in steps.groupby("system", sort=False)["turn_staleness_counts"]}
    shares = [
        f"{system} {', '.join(f'{updates}: {count / counts.total():.0%}' for updates, count in sorted(counts.items()))}"
        for system, counts in turns.items()
        if any(counts)
    ]
    if shares:
        yield f"turns trained on, by the updates that the weights that began them were behind: {'; '.join(shares)}"


def luck(steps: pd.DataFrame) -> float:
    """The share of itself to which one system's mean step time is known, by its own steps (`half_width`)."""
    return half_width(steps, "step_time_s") / float(steps.loc[steps["steady"], "step_time_s"].mean())


def luck_note(steps: pd.DataFrame) -> Iterator[str]:
    """Which steady systems have too few steps for their step time to be another draw's as well."""
    found = {str(system): own for system, own in steps.groupby("system", sort=False)}
    vague = {name: share for name, own in found.items() if (share := luck(own)) > KNOWN and not unsteady(own)}
    if not vague:
        return
    of = "" if len(vague) == len(found) else f" of {listed(list(vague))}"
    ends = dict.fromkeys(f"±{share:.1%}" for share in (min(vague.values()), max(vague.values())))
    counts = [int(own[own["steady"]].groupby("seed").size().min()) for name, own in found.items() if name in vague]
    seeds, times = steps["seed"].nunique(), (max(vague.values()) / KNOWN) ** 2
    yield (
        f"step times{of} are known to {' to '.join(ends)} by their own {min(counts)} steps"
        f"{f' of {seeds} seeds' * (seeds > 1)}: ±{KNOWN:.0%} takes about {math.ceil(times)} times as many steps or "
        "seeds. Ratios on the same draw are surer"
    )


def rate_notes(steps: pd.DataFrame, baseline: str, batch: int) -> Iterator[str]:
    """Notes on the systems of one case, by name in `steps`: a batch is `batch` responses."""
    trained = steps[steps["steady"]].groupby("system", sort=False)["trained"].mean()
    mine = {str(system): own for system, own in steps.groupby("system", sort=False)}
    for system in mine:
        if trained[system] < batch * (1 - 1e-9):
            yield (
                f"{system} trains on {trained[system] / batch:.1%} of a batch each step: its step is shorter for that; "
                "speedups count the responses trained on per second"
            )
    if len(mine) == 1 or baseline not in mine:
        return
    by_seed = means(steps, ["system", "seed"]).sort_index()
    for system, own in mine.items():
        rates = by_seed.loc[system], by_seed.loc[baseline]
        ratios = [paired_ratio(*(one[rate] for one in rates))[0] for rate in ("responses_per_s", "tokens_per_s")]
        yield from ratio_note(system, own, baseline, mine[baseline], *ratios)


def ratio_note(
    system: str, own: pd.DataFrame, baseline: str, reference: pd.DataFrame, by_responses: float, by_tokens: float
) -> Iterator[str]:
    """Why a system's throughput in responses is not as many times the baseline's as that in tokens, if so.

    `own` and `reference` are rows of `steps`, the ratios what a table shows of them.
    """
    if not by_tokens or not abs(by_responses / by_tokens - 1) > EXPLAINED:
        return
    own, reference = (steps[steps["steady"]] for steps in (own, reference))
    under = f"under {baseline} {why}" if (why := _why(reference)) else "the two train on other responses"
    yield (
        f"{system} trains on {by_responses:.2f} times the responses per second of {baseline}, but {by_tokens:.2f} "
        f"times the tokens: its responses have {_tokens_per_response(own):,.0f} tokens in the mean, prompts counted, "
        f"against {_tokens_per_response(reference):,.0f}, as {_why(own) or under}"
    )


def _tokens_per_response(steady: pd.DataFrame) -> float:
    return float(steady["tokens"].sum() / max(steady["trained"].sum(), 1))


#: By column of `steps`: how a system comes to train on other responses than it would have drawn.
_REASONS = {
    "put_back": "prompts that are not finished in time are generated again later",
    "dropped_stale": "prompts are dropped as too stale",
    "paused": "responses that are not finished in time go on in a later step",
    "resumed": "responses that are not finished in time go on in a later step",
    "dropped": "prompts are dropped, for their rewards or with an aborted response",
    "wasted_tokens": "the first to finish are trained on and others dropped",
}


def _why(steady: pd.DataFrame) -> str:
    """The first of the reasons that holds of a system; empty if none does."""
    return next((text for column, text in _REASONS.items() if steady[column].sum() > 0), "")


def preemption_notes(preemptions: Mapping[str, pd.Series[int]]) -> Iterator[str]:
    """One note on all systems with a considerable share; `preemptions`: of each response, by system."""
    told = [
        f"{name} ({(counts > 0).mean():.0%} of its responses, {counts.mean():.2f} times each on average)"
        for name, counts in preemptions.items()
        if len(counts) and (counts > 0).mean() >= CONSIDERABLE
    ]
    if told:
        yield (
            f"responses were preempted (they lost their KV cache and were prefilled again) under {', '.join(told)}: "
            "the KV cache is too small for what runs at once. A larger tp or memory_utilization makes room, as does "
            "training.offload where training's states stay beside the engine; with a smaller engine.max_num_seqs "
            "responses wait instead of being recomputed, and with engine.kv_offloading_bytes they are loaded from host "
            "memory"
        )


def listed(names: Sequence[str]) -> str:
    """The names of systems, or of many how many there are."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} systems, {names[0]} among them"

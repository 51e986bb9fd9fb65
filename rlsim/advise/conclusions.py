"""What the tables of an advice come to, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from rlsim.advise.idle import CAUSES, tail_of
from rlsim.advise.scaling import enough, shape
from rlsim.formats import number, with_interval
from rlsim.hardware import Cluster
from rlsim.verl.overrides import gpus_of

#: Names in a sentence.
MOST_NAMES = 4


def conclusions(tables: Mapping[str, pd.DataFrame], baseline: str, worth: float, cluster: Cluster) -> tuple[str, ...]:
    """What fits, why GPUs are idle, what is fastest, and how many GPUs pay, with veRL's settings for fewer of them."""
    return (
        _fits(tables["memory"]),
        _idle(tables["idle"], baseline),
        _fastest(tables["ranking"], baseline),
        _pays(tables["scaling_best"], worth, cluster),
    )


def waits_for_kv(row: Mapping[Any, Any] | pd.Series[Any]) -> bool:
    """Whether it is KV cache that a row's waiting responses lack, rather than a place in the engine's batch."""
    return bool(row["sequences"] > row["mean_sequences"])


def _fits(memory: pd.DataFrame) -> str:
    fitting = memory[memory["fits"]]
    text = f"fits: TP {_listed(fitting['tp'])} of {_listed(memory['tp'])}"
    queued = fitting[fitting["waits"]]
    short = queued.apply(waits_for_kv, axis=1).astype(bool) if len(queued) else queued["waits"]
    for tps, lacking in ((queued[short]["tp"], "KV cache"), (queued[~short]["tp"], "a place (max_num_seqs)")):
        if len(tps):
            text += f"; at TP {_listed(tps)} responses of mean length wait for {lacking}"
    return text


def _idle(idle: pd.DataFrame, baseline: str) -> str:
    text, means = f"idle today ({baseline}): no GPU", idle[[*CAUSES, "idle"]].mean()
    if means["idle"] > 0:
        parts = sorted(CAUSES, key=lambda cause: -means[cause])
        shares = ", ".join(f"{cause.replace('_', ' ')} {means[cause]:.0%}" for cause in parts if means[cause] >= 0.005)
        text = f"idle today ({baseline}): {means['idle']:.0%} of GPU time{f': {shares}' if shares else ''}"
    if (tail := tail_of(idle)) >= 0.005:
        text += f"; {tail:.0%} of the busy time decodes in the tail, at under half of the full throughput"
    return text


def _fastest(ranked: pd.DataFrame, baseline: str) -> str:
    best = ranked.iloc[0].to_dict()
    others = ranked[(ranked["same_as"] == "") & (ranked["system"] != best["system"]) & ranked["comparable"]]
    close = others[others["with_best"].eq(other=True)]["system"].tolist()
    if not best["comparable"]:
        text = "fastest: none yet, as no system is comparable"
    elif best["system"] == baseline:
        text = f"fastest: {baseline}, the baseline"
    else:
        text = f"fastest: {best['system']}, {with_interval(best, 'speedup')} times the responses per second of "
        text += f"{baseline} and {number(best['token_speedup'])} times the tokens"
    if close:
        beyond_few = len(close) - MOST_NAMES
        more = f" and {beyond_few} other{'s' * (beyond_few > 1)}" if beyond_few > 0 else ""
        text += f"; within chance of it: {', '.join(close[:MOST_NAMES])}{more}"
    return text


def _pays(best: pd.DataFrame, worth: float, cluster: Cluster) -> str:
    if len(best) == 1:
        return f"GPUs: no other number than {cluster.gpus} was tried"
    gpus, beyond = enough(best, worth)
    if beyond:
        fewest = ", the fewest tried," if gpus == best["gpus"].min() else ""
        text = f"GPUs: more than {gpus}{fewest} do not pay (twice as many are less than {worth:g} times as fast)"
        if gpus >= cluster.gpus:
            return text
        settings = gpus_of(*shape(cluster, gpus))
        return f"{text}; in veRL {' '.join(f'{key}={value}' for key, value in settings.items())}"
    tried = int(best["gpus"].max())
    return f"GPUs: every doubling up to {tried} pays (at least {worth:g} times as fast); more were not tried"


def _listed(tps: Iterable[int]) -> str:
    return ", ".join(map(str, tps))

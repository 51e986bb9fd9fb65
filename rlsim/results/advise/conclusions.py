"""What the tables of an advice come to, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from rlsim.results.advise.idle import CAUSES, tail_of


def conclusions(tables: Mapping[str, pd.DataFrame], baseline: str) -> tuple[str, ...]:
    """What fits, and why GPUs are idle; who is fastest is the headline's to say."""
    return _fits(tables["memory"]), _idle(tables["idle"], baseline)


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


def _listed(tps: Iterable[int]) -> str:
    return ", ".join(map(str, tps))

"""`rlsim advise --quick`: one step of every system under one seed, then more seeds of those that may be the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

#: Seeds of the contenders, and steps of every run beyond those that no mean counts.
SEEDS, STEPS = 3, 1
#: Systems that go on beside the baseline and the best that veRL has settings for.
CONTENDERS = 2
#: What `real` may take, a search in a smaller space; on more GPUs it is left out, as it takes minutes.
SEARCHED_GPUS = 16
REAL = {"evaluations": 50_000, "pipelined_generation": False}


def quick_settings(seeds: int | None, steps: int | None, warmup: int | None, certainty: int | None) -> dict[str, Any]:
    """Settings of the experiment: seeds, steps and worlds as asked, else few seeds and steps and no worlds."""
    return {"seeds": seeds or SEEDS, "workflow.steps": steps or STEPS + (warmup or 0), "certainty": certainty or 0}


def contenders(screened: pd.DataFrame, baseline: str, in_verl: Sequence[str]) -> list[str]:
    """The systems that go on, from a ranking of one seed."""
    distinct = screened[screened["comparable"] & (screened["same_as"] == "")]["system"].tolist()
    within = [name for name in distinct if name in in_verl]
    return list(dict.fromkeys([*distinct[:CONTENDERS], *within[:1], baseline]))


def left_out(screened: pd.DataFrame, kept: Sequence[str], seeds: int, steps: int) -> str:
    """What a quick advice does not say."""
    what = f"{steps} step{'s' * (steps > 1)}"
    return (
        f"quick: {len(screened)} systems ran {what} under one seed, and only {', '.join(kept)} under {seeds}; the "
        f"other {len(screened) - len(kept)} were dropped by that one seed. Left out: PAT and the planner from a TP "
        f"that is not their own choice, plan searches with pipelined generation or beyond {SEARCHED_GPUS} GPUs, other "
        "numbers of GPUs. Intervals are wider than those of a full advice, and what later steps bring is not seen"
    )

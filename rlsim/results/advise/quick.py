"""`rlsim advise --quick`: one step of every system under one seed, then more seeds of those that may be the best."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from rlsim.experiment.schema import Experiment

#: Seeds of the contenders, and steps of every run beyond those that no mean counts.
SEEDS, STEPS = 3, 1
#: Systems that go on beside the baseline and the best that the user's framework has settings for.
CONTENDERS = 2


def quick_settings(seeds: int | None, steps: int | None, experiment: Experiment, *, overlaps: bool) -> dict[str, Any]:
    """Settings of the experiment: seeds, steps and worlds as asked, else few seeds and steps and no worlds.

    An experiment one of whose systems `overlaps` steps keeps its own: fewer would show how the pipeline fills.
    """
    few = experiment.workflow.steps if overlaps else STEPS + (experiment.workflow.warmup or 0)
    return {"seeds": seeds or SEEDS, "workflow.steps": steps or few, "certainty": experiment.certainty or 0}


def contenders(screened: pd.DataFrame, baseline: str, settings: Collection[str]) -> list[str]:
    """The systems that go on, from a ranking of one seed; the user's framework has `settings` for some."""
    distinct = screened[screened["why"].eq("") & screened["same_as"].eq("")]["system"].tolist()
    within = [name for name in distinct if name in settings]
    return list(dict.fromkeys([*distinct[:CONTENDERS], *within[:1], baseline]))


def left_out(screened: pd.DataFrame, kept: Sequence[str], seeds: int, steps: int) -> str:
    """What a quick advice does not say."""
    what = f"{steps} step{'s' * (steps > 1)}"
    return (
        f"quick: {len(screened)} systems ran {what} under one seed, and only {', '.join(kept)} under {seeds}; the "
        f"other {len(screened) - len(kept)} were dropped by that one seed, PAT and the planner from a TP that is not "
        "their own choice were left out. Intervals are wider than those of a full advice, and what later steps bring "
        "is not seen"
    )

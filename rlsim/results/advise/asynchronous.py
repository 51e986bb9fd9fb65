"""Systems that train on what older weights have generated, each with parameters that hold its staleness to a bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlsim.experiment.schema import Experiment

#: Ages beyond these bring hardly any throughput and many steps to simulate: no system is tried with more (updates).
MOST_AGE = 4


@dataclass(frozen=True, eq=False)
class Family:
    """A policy with parameters to try until some keep a bound; `split`: it generates on `rollout_gpus` of its own."""

    name: str
    policy: str
    variants: tuple[Mapping[str, Any], ...]
    split: bool = True

    def parts(self, variant: int, **more: int) -> dict[str, Any]:
        """The part of a system, as an experiment spells it."""
        return {self.policy: {**more, **self.variants[variant]}}


def families(most: float, experiment: Experiment, skip: Collection[str] = ()) -> list[Family]:
    """What may train on responses at most `most` updates old, but for policies in `skip`; the most general comes first.

    `areal` and `verl_fully_async` may measure more than their parameter says, so that they come with half of it too.
    """
    age, training = min(math.ceil(most), MOST_AGE), experiment.training
    parts = training.mini_batches if training.epochs == 1 else 1
    parts = parts if experiment.workflow.prompts % parts == 0 else 1
    quotas = ({"staleness_threshold": share, "trigger_parameter_sync_step": parts} for share in (age, age / 2))
    every = [
        Family("roll_flash", "roll_flash", ({"alpha": age},)),
        Family("areal", "areal", ({"eta": age}, {"eta": age / 2})),
        Family("one_step_off", "one_step_off", ({"lag": 1},)),
        Family("verl_fully_async", "verl_fully_async", tuple(quotas)),
        Family("nemo_async", "nemo_async", ({"max_trajectory_age_steps": age},)),
        Family("laminar", "laminar", ({"eta": age}, {"eta": age / 2})),
        Family("streamrl", "streamrl", ({"parts_per_step": parts},)),
        Family("colocated_async", "colocated_async", ({"active": 2.0}, {"active": 1.5}, {"active": 1.25}), split=False),
        Family("partial_rollout", "partial_rollout", ({"splits": age},), split=False),
    ]
    if age > 1:
        every.insert(3, Family(f"one_step_off-lag{age}", "one_step_off", ({"lag": age},)))
    return [family for family in every if family.policy not in skip]


def steps_for(most: float, experiment: Experiment, periods: int) -> int:
    """Steps that a run takes until `periods` times age + 1 of them are steady: neither fill nor drain the pipeline."""
    age, warmup = min(math.ceil(most), MOST_AGE), experiment.workflow.warmup
    return (age if warmup is None else warmup) + age + periods * (age + 1)

"""Costs that no measurement of this model, GPU, engine release or network backs, as an experiment may state them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.units import Seconds

Factor = Annotated[float, Field(gt=0, le=1000)]


class AssumedCosts(Schema):
    """What you know of costs that rlsim assumes; the ledger of a run lists those that bear on it, with their ranges.

    What the fields mean are rows of `rlsim/data/meanings.csv`.
    """

    host_per_sequence: Annotated[Seconds, Field(ge=0, le=1)] | None = None
    recurrent: Factor = 1.0
    recurrent_served: Factor = 1.0
    kernels: Factor = 1.0
    launches: Factor = 1.0
    expert_launch: Annotated[float, Field(ge=0, le=1000)] = 1.0
    training: Factor = 1.0
    network: Factor = 1.0
    link: Factor = 1.0
    skew: Annotated[float, Field(ge=0, le=1)] | None = None


PLAIN_COSTS = AssumedCosts()

# Worlds that a calibration's errors allow -----------------------------------------------------------------------------

# By what factors times may differ where no fit has seen the setting. A world is drawn as a whole: all systems and seeds
# run in the same one, so that what two systems share cancels.

#: Sequences around which the error of a rollout's iterations turns, and the batch sizes that were measured.
MIDDLE_BATCH = 16
SMALLEST_BATCH, LARGEST_BATCH = 1, 128

Part = Literal["rollout", "tilt", "inference", "train", "sync", "family"]


@dataclass(frozen=True)
class TransferErrors:
    """Standard deviations, over settings that no fit has seen, of log(simulated / measured)."""

    family: float  # iterations of a model on a GPU under an engine, over all its TPs
    rollout: float  # beside that, those at one TP, with `MIDDLE_BATCH` sequences
    tilt: float  # what that grows by with each doubling of the sequences
    calls: float  # training calls, and inference calls on their own
    sync: float  # weight syncs into an engine


#: Printed by `scripts/fit_calibrations.py transfer`; `rlsim validate transfer` and `weight_sync` say how many left-out
#: measurements lie inside. Without veRL's row 4, a run whose calls the model of training stacks cannot tell, calls
#: would be 0.204. Rollouts keep what was measured before one family's error (Qwen3-235B on H200, a third) was explained
#: by looking at it: nobody has looked at the next one.
MEASURED = TransferErrors(family=0.130, rollout=0.068, tilt=0.037, calls=0.269, sync=0.174)


@dataclass(frozen=True)
class Draw:
    """The world of a number; 0 is the calibration as it was fitted.

    All iterations share one error, as they are of one model, GPU and engine; every TP has one of its own beside it.
    None depends on the GPU, the engine or the model, so that a number stands for one world in all experiments.
    """

    number: int = 0
    errors: TransferErrors = MEASURED

    def iteration(self, tp: int, sequences: int) -> float:
        """How many times as long as calibrated an iteration of so many sequences takes at a TP."""
        number, errors = self.number, self.errors
        family, level, tilt = _normal(number, "family"), _normal(number, "rollout", tp), _normal(number, "tilt", tp)
        doublings = math.log2(min(max(sequences, SMALLEST_BATCH), LARGEST_BATCH) / MIDDLE_BATCH)
        return math.exp(family * errors.family + level * errors.rollout + tilt * errors.tilt * doublings)

    def of_level(self) -> Draw:
        """The same where a model's level was measured at another TP: `family` errs no more than one TP's own."""
        errors = self.errors
        return replace(self, errors=replace(errors, family=min(errors.family, errors.rollout)))

    def call(self, kind: Literal["inference", "train"]) -> float:
        """How many times as long as calibrated the computation of inference or training calls takes."""
        return math.exp(_normal(self.number, kind) * self.errors.calls)

    def sync(self) -> float:
        """How many times as long as calibrated a weight sync into an engine takes."""
        return math.exp(_normal(self.number, "sync") * self.errors.sync)


@cache
def _normal(number: int, part: Part, tp: int = 0) -> float:
    return float(np.random.default_rng([number, get_args(Part).index(part), tp]).standard_normal()) if number else 0.0

"""Costs that no measurement of this model, GPU, engine release or network backs, as an experiment may state them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.units import Seconds

Factor = Annotated[float, Field(gt=0, le=1000)]


class AssumedCosts(Schema):
    """What you know of costs that rlsim assumes; the ledger of a run lists those that bear on it, with their ranges."""

    host_per_sequence: Annotated[Seconds, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="the engine's host time per running sequence and iteration, s; default: the calibration's, which "
        "is that of the models it was fitted to",
    )
    recurrent: Factor = Field(
        default=1.0,
        description="layers with linear attention or a state-space mixer in training and log-probs: how many times "
        "their roofline they take",
    )
    recurrent_served: Factor = Field(
        default=1.0, description="such attention in generation: how many times its roofline it takes"
    )
    kernels: Factor = Field(
        default=1.0, description="iterations of the rollout engine: how many times as long as calibrated they take"
    )
    expert_launch: Annotated[float, Field(ge=0, le=1000)] = Field(
        default=1.0,
        description="launches of a layer with experts in training: times 4.12 ms, which one published iteration gave",
    )
    training: Factor = Field(
        default=1.0, description="products in training and log-probs: how many times as long as calibrated they take"
    )
    network: Factor = Field(default=1.0, description="bandwidth between nodes, times the cluster's `inter`")
    link: Factor = Field(default=1.0, description="bandwidth inside a node, times the cluster's `intra`")
    skew: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="what unequal contexts add to decode attention, as a share of the padding to the longest; default: "
        "the calibration's",
    )


PLAIN_COSTS = AssumedCosts()

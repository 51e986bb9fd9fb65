"""Dynamic sampling (DAPO, Yu et al. 2025): prompts whose responses all got the same reward teach nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rlsim.base.schema import Schema
from rlsim.sim.batching import Batching


class DynamicSampling(Schema, Batching):
    """Drop prompts without variance in their rewards, and keep launching until the batch is full."""

    def counts(self, rewards: Sequence[float]) -> bool:
        """Only prompts whose rewards differ."""
        return max(rewards) > min(rewards)

"""Systems whose rollout never stops: AReaL, veRL's fully asynchronous trainer, ROLL Flash, NeMo-RL's asynchronous GRPO.

Each says how many prompts may be under way; SYSTEMS that combine them with GPUs of their own stand below.
"""

from __future__ import annotations

from pydantic import Field

from rlsim.schema import Schema
from rlsim.sim.continuous import Continuous, OpenView


class BoundedStaleness(Schema, Continuous):
    """AReaL (Fu et al. 2025): a prompt begins only while those admitted so far are at most B · (version + η + 1)."""

    eta: int = Field(default=4, ge=0, le=1000, description="updates by which a response may be old; 0: synchronous")

    def room(self, view: OpenView) -> int:
        return max(view.prompts * (view.version + self.eta + 1) - view.admitted, 0)

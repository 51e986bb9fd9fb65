"""veRL: colocated, synchronous, static (Sheng et al., EuroSys 2025), and its recipe of dynamic sampling (DAPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.errors import ConfigError
from rlsim.sim.batching import Batching, PromptFeed
from rlsim.sim.control import ControlContext, Launch, RolloutControl


class VeRL(Schema, RolloutControl):
    """`gpus / tp` independent replicas; requests are spread up front and the layout never changes."""

    tp: int | Literal["best"] = "best"

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """For `tp: best`, every degree that fits (one, where the plan says it)."""
        return [{"tp": tp} for tp in context.feasible_tps] if self.tp == "best" else ()

    def initial_tp(self, context: ControlContext) -> int:
        """The given degree; raises if it does not divide the node or the model does not fit."""
        if self.tp == "best":
            raise ConfigError("tp: best must be resolved by running every feasible degree")
        return context.check_tp(self.tp)


class DynamicSampling(Schema, Batching):
    """Drop prompts without variance in their rewards, which teach nothing (DAPO, Yu et al. 2025), and launch others."""

    def counts(self, rewards: Sequence[float]) -> bool:
        """Only prompts whose rewards differ."""
        return max(rewards) > min(rewards)


class GenBatches(Schema, Batching):
    """Launch prompts by whole batches of `prompts` (default: a step's), another when too few of the last ones count.

    With `together` each is generated to its end before that is decided, by the order of its prompts, as frameworks do
    that generate call by call (veRL's `gen_batch_size`, NeMo-RL's `batch_multiplier`, SkyRL); without it what is too
    much is given up once the batch is complete (slime's `over-sampling-batch-size`).
    """

    prompts: int | None = Field(default=None, ge=1)
    together: bool = True

    @property
    def decides_together(self) -> bool:
        return self.together

    def launch(self, feed: PromptFeed) -> Launch:
        """The first of these batches; raises `ConfigError` if it is smaller than a step's."""
        if (self.prompts or feed.prompts) < feed.prompts:
            raise ConfigError(f"gen_batches.prompts: {self.prompts} are fewer than the {feed.prompts} of a step")
        return self.more(0, feed)

    def more(self, missing: int, feed: PromptFeed) -> Launch:  # noqa: ARG002
        """Another."""
        return Launch(feed.take(self.prompts or feed.prompts), feed.responses)

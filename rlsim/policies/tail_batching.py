"""Tail batching (RollPacker): which prompts and responses a step waits for.

A short round launches more prompts and more responses than it needs and ends when the first prompts have the first of
their responses; what was still running is aborted, and its prompts are put back to be generated again from scratch.
Once enough of them wait, a long round generates exactly these, without speculation. Every prompt is trained on in the
end, and each step on exactly prompts × responses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from pydantic import Field, PrivateAttr

from rlsim.base.schema import Schema
from rlsim.sim.batching import Batching, PromptFeed, Unfinished
from rlsim.sim.control import Launch, Prompt


class TailBatching(Schema, Batching):
    """Short rounds that leave the tail behind, and long rounds that collect it."""

    eta: float = Field(default=1.25, ge=1, le=100)
    eta_prompts: float | None = Field(default=None, ge=1, le=100)
    eta_responses: float | None = Field(default=None, ge=1, le=100)
    active: float | None = Field(default=None, gt=0, le=100)
    resume: bool = False

    _queue: deque[Prompt] = PrivateAttr(default_factory=deque)
    _round: str = PrivateAttr(default="short")

    def launch(self, feed: PromptFeed) -> Launch:
        """A long round if the queue holds a batch of prompts, else a short one of new prompts."""
        self._round = self.upcoming(feed)
        if self._round == "long":
            queued = tuple(self._queue.popleft() for _ in range(feed.prompts))
            return Launch(() if self.resume else queued, feed.responses, "long", resume=queued if self.resume else ())
        prompts = _times(self.eta if self.eta_prompts is None else self.eta_prompts, feed.prompts)
        return Launch(feed.take(self.under_way(feed) or prompts), self._responses(feed), "short")

    def under_way(self, feed: PromptFeed) -> int:
        return _times(self.active, feed.prompts) if self.active and self._round == "short" else 0

    def more(self, missing: int, feed: PromptFeed) -> Launch:
        return Launch(feed.take(missing), self._responses(feed) if self.under_way(feed) else feed.responses)

    def _responses(self, feed: PromptFeed) -> int:
        return _times(self.eta if self.eta_responses is None else self.eta_responses, feed.responses)

    @property
    def pauses(self) -> bool:
        return self.resume

    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:
        """With `resume`, all of them, in the queue of long prompts."""
        kept = [one.prompt for one in unfinished] if self.resume else []
        self.put_back(kept)
        return kept

    def upcoming(self, feed: PromptFeed) -> str:
        return "long" if len(self._queue) >= feed.prompts else "short"

    def put_back(self, unfinished: Sequence[Prompt]) -> None:
        """Into the queue of long prompts, across steps and epochs."""
        self._queue.extend(unfinished)

    def waiting(self) -> int:
        return len(self._queue)


def _times(factor: float, count: int) -> int:
    return math.ceil(factor * count - 1e-9)

"""Batchings that throw nothing away: what a step leaves unfinished goes on in the next one."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PrivateAttr

from rlsim.base.schema import Schema
from rlsim.sim.batching import Batching, PromptFeed, Unfinished
from rlsim.sim.control import Launch, Prompt


class Keeping(Schema, Batching):
    """Base of batchings that keep so many prompts under way: each step resumes what it finds, and adds new ones."""

    _kept: list[Prompt] = PrivateAttr(default_factory=list)

    def filled(self, feed: PromptFeed, prompts: int) -> Launch:
        """All that wait, and new prompts up to so many."""
        resume, self._kept = tuple(self._kept), []
        return Launch(feed.take(max(prompts - len(resume), 0)), feed.responses, resume=resume)

    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:
        """All of them."""
        self._kept = [one.prompt for one in unfinished]
        return self._kept

    def waiting(self) -> int:
        return len(self._kept)

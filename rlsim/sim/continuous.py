"""What a rollout that stays open for the whole run launches, which responses a step takes, and how new weights come.

docs/engine.md has the rules under "Continuous generation".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rlsim.base.hooks import hook, is_number, is_whole
from rlsim.sim.batching import Batching
from rlsim.sim.control import Prompt
from rlsim.sim.request import UpdatedKv


class Update(NamedTuple):
    """How new weights come: what happens to the responses that are generated at that time."""

    responses: Literal["interrupt", "drain"] = "interrupt"  # go on under the new ones, or are waited for; none begins
    kv: UpdatedKv = "recompute"  # of those that are interrupted
    #: All stand still until the last has the weights, which come from the trainer; or each takes them on its own from
    #: host memory, where the trainer has put them and goes on: after a drain of its own, or between two iterations.
    replicas: Literal["together", "each"] = "together"


class OpenView(NamedTuple):
    """Where continuous generation stands; everything is counted in prompts (groups of responses)."""

    prompts: int  # that a step trains on
    version: int  # weight updates so far: of the newest weights that a replica may take
    running: int  # some of whose responses are still generated or scored
    waiting: int  # complete, and not yet taken by a step
    taken: int  # by steps so far
    dropped: int  # so far
    replicas: int  # of the rollout, in the layouts that its nodes have
    free: tuple[int, ...]  # replicas that have no response to generate
    launched_since_update: int  # less those that were dropped before they came to wait
    left_at_update: int  # were running or waiting when the last update came

    @property
    def admitted(self) -> int:
        """Launched so far and not dropped."""
        return self.running + self.waiting + self.taken


class Ready(NamedTuple):
    """A prompt whose responses are complete, and that waits for a step to take it."""

    prompt: Prompt
    number: int  # of those that became ready before it
    version: int  # of the weights that generated its oldest token
    lengths: tuple[int, ...]  # of its responses (tokens)


def _is_room(room: object, *_: object) -> bool:
    numbers = [*room.keys(), *room.values()] if isinstance(room, Mapping) else [room]
    return all(is_whole(number, 0) for number in numbers)


class Continuous(Batching):
    """Base of batchings of fully asynchronous rollout (not an engine's continuous batching): prompts are launched
    whenever `room` says so, and a step takes the `feed.prompts` ready ones of the lowest `rank`.

    Everything is asked at the end of a moment at which prompts became ready, a step began to take some or an update was
    over. While an update of all replicas together comes nothing is launched.
    """

    @property
    @hook("a whole number of steps", lambda ahead: is_whole(ahead, 0))
    def ahead(self) -> int:
        """Steps that generation may be ahead of training. `rlsim tune` tries systems with 0 in short runs."""
        return 1

    @property
    def launches_its_own(self) -> bool:
        return True

    @property
    def pauses(self) -> bool:
        return True

    @hook("a whole number of prompts, or such numbers by replica: {0: 4}", _is_room)
    def room(self, view: OpenView) -> int | Mapping[int, int]:
        """How many prompts may begin now, with `feed.responses` responses each; by replica, where they are to go to
        certain ones.
        """
        raise NotImplementedError

    @hook("an Update", lambda update: isinstance(update, Update))
    def update(self) -> Update:
        """New weights are there: how they come to the rollout."""
        return Update()

    @hook("a number", lambda rank, *_: is_number(rank, float("-inf")))
    def rank(self, ready: Ready) -> float:
        """A step takes the prompts of the lowest rank first; by default those that became ready first."""
        return ready.number

    @hook("True or False", lambda value, *_: isinstance(value, bool))
    def usable(self, ready: Ready, staleness: int) -> bool:  # noqa: ARG002
        """Whether a step may train on a prompt whose oldest token is `staleness` updates old; if not, it is dropped."""
        return True

    @hook("True or False", lambda value: isinstance(value, bool))
    def relaunches(self) -> bool:
        """Whether prompts that were dropped as not usable begin again, before new ones, with their next samples."""
        return False

    @hook("True or False", lambda value, *_: isinstance(value, bool))
    def awaited(self, staleness: int) -> bool:  # noqa: ARG002
        """Whether a step takes a prompt whose oldest token is so many updates old before others, whatever its rank; for
        one that is under way when it begins to take prompts it keeps a place until it is ready.
        """
        return False

"""Hybrid rollout: GPUs of training generate too, while training waits for its batch.

As in veRL (`separate_async` with `hybrid_rollout.enable_switch`, and dynamic scheduling in `fully_async_policy`):
replicas on the trainer's GPUs take the trainer's weights after an update, and join generation if that saves more time
than it takes to bring the weights. They get their share of the responses under way. Once training waits for its GPUs,
and enough of its batch is there, they stop; what they generate goes on elsewhere, from the prefill of its context.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from pydantic import Field, PrivateAttr

from rlsim.policies.parts import Informed, Rewiring
from rlsim.sim.actions import Borrow, Migrate, Release
from rlsim.sim.control import Action, Borrowable, KvHandling, ReplicaView, RolloutView
from rlsim.workflow.graph import Workflow


class HybridRollout(Informed, Rewiring):
    """Generation borrows the GPUs of training where that is worth it, and gives them back when training wants them.

    It is worth it if what the batch lacks takes generation longer than with them by more than they take to get the
    weights. How long it takes follows from the responses that a second of a replica has finished so far, and how much
    faster it gets from the profile of the machine: half as many responses on a replica are not done in half the time.
    """

    until: float = Field(default=0.4, gt=0, le=1)
    spread: bool = True
    kv: KvHandling = "recompute"

    _declined: bool = PrivateAttr(default=False)  # since training last had its GPUs
    _shared: bool = PrivateAttr(default=False)  # what runs, since they came
    _last: tuple[float, int, int] = PrivateAttr(default=(0.0, 0, 0))  # asked when, responses so far, replicas at work
    _replica_s: float = PrivateAttr(default=0.0)  # of replicas at work, in the run so far
    _finished: int = PrivateAttr(default=0)  # responses meanwhile

    def rewired(self, workflow: Workflow) -> Workflow:
        return replace(workflow, hybrid=True)

    def on_finish(self, view: RolloutView) -> Sequence[Action]:
        """Give back what training waits for, share out what runs, or borrow."""
        self._count(view)
        if view.borrowed:
            if view.wanted_back and 1.0 - view.batch_missing >= self.until:
                return [Release(view.borrowed)]
            shares = [] if self._shared or not self.spread else self._shares(view.replicas(), view.borrowed)
            self._shared = True
            return shares
        self._shared, offer = False, view.borrowable
        if offer is None:
            self._declined = False
        elif not self._declined:
            self._declined = not self._is_worth_it(view, offer)
            return [] if self._declined else [Borrow()]
        return []

    def _count(self, view: RolloutView) -> None:
        """How long replicas have been at work, and how many responses they have finished."""
        at_s, finished, working = self._last if self._last[0] <= view.now_s else (0.0, 0, 0)
        self._replica_s += (view.now_s - at_s) * working
        self._finished += view.finished - finished
        working = self._own(view) + len(view.borrowed) - len(view.idle)
        self._last = view.now_s, view.finished, max(working, 0)

    def _own(self, view: RolloutView) -> int:
        return sum(view.gpus(node) // view.tp(node) for node in view.nodes)

    def _is_worth_it(self, view: RolloutView, offer: Borrowable) -> bool:
        """Whether the batch, or the share until which they stay, is there sooner by more than the weights take."""
        goes_back_at = max(self.until, 1 / self._context.windows) if self._context.windows else 1.0
        missing = (view.batch_missing - 1.0 + goes_back_at) * self._context.requests
        own = self._own(view)
        if missing <= 0 or not own or not view.unfinished():
            return False
        if not self._finished or not self._replica_s:
            return True  # nothing is known yet
        alone_s = missing * self._replica_s / self._finished / own
        faster = self._tokens_per_s(view, own) / self._tokens_per_s(view, own + offer.replicas)
        return alone_s * (1.0 - faster) > offer.load_s

    def _tokens_per_s(self, view: RolloutView, replicas: int) -> float:
        """Of so many replicas with all that is unfinished, by the profile; contexts are those of the mean half-way."""
        context, lengths, tp = self._context, view.finished_lengths(), view.tp(view.nodes[0])
        tokens = context.prompt_tokens + sum(lengths) / max(len(lengths), 1) / 2
        fits = context.kv_tokens(tp) / tokens
        batch = max(min(view.unfinished() / replicas, fits, context.max_num_seqs), 1.0)
        return replicas * batch / context.costs.step(tp).decode(math.ceil(batch)).step_s(batch * tokens)

    def _shares(self, replicas: Sequence[ReplicaView], new: Collection[int]) -> list[Action]:
        """An even share of all responses for each of the new replicas: of those with most, what costs least to move."""
        share = sum(len(replica.requests) for replica in replicas) / len(replicas)
        moving: list[int] = []
        for replica in replicas:
            last_first = sorted(replica.requests, key=lambda r: (r.has_kv, r.context_tokens))
            surplus = max(len(replica.requests) - math.ceil(share), 0)
            moving += [request.id for request in last_first[:surplus]]
        moves: list[Action] = []
        for replica in replicas:
            room = math.floor(share) - len(replica.requests)
            if replica.index in new and room > 0 and moving:
                moves.append(Migrate(tuple(moving[:room]), replica.index, self.kv))
                del moving[:room]
        return moves

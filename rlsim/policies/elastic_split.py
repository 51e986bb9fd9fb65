"""An elastic split: replicas that run out of work help the trainer until the next weights come.

Where generation and training have GPUs of their own, a bound of staleness, or the end of a batch, leaves replicas with
little to do while the trainer works. Their GPUs become further data-parallel replicas of the trainer: they take its
weights, accumulate gradients, and generate again from the next weights on. The optimizer states stay where they are.

Replicas that have nothing left lend their GPUs at once. Where what waits for training will keep it busy for longer than
the responses that run can take at most, these go together onto as few replicas as hold them, and the others lend too:
as training would end last anyway, the step does not get longer by it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import PrivateAttr

from rlsim.policies.laminar import RIDGE
from rlsim.policies.parts import Informed, Rewiring
from rlsim.policies.rlhfuse import memory_bound_batch
from rlsim.sim.actions import Release
from rlsim.sim.control import RolloutView
from rlsim.workflow.graph import Workflow


class ElasticSplit(Informed, Rewiring):
    """Training takes responses as they come, also on GPUs of replicas that have run out of work.

    It takes them in the parts of a batch that the system has (`training_windows`), or each on its own.
    """

    lend: bool = True

    _known: dict[int, int] = PrivateAttr(default_factory=dict)  # by TP: `_most`

    def rewired(self, workflow: Workflow) -> Workflow:
        """By the sample from generation to training, which may have replicas on GPUs that generation leaves idle."""
        if not workflow.windows:
            workflow = workflow.streaming(["generate", "inference", "reward"], ["inference", "reward", "train"])
        return replace(workflow, elastic=self.lend)

    def on_finish(self, view: RolloutView) -> Release | None:
        """Idle replicas leave, but one stays; where training ends last, those with the fewest responses leave too.

        None does while generation has GPUs of training itself.
        """
        if not self.lend or view.launching or not view.nodes or view.borrowed:
            return None
        leaving = view.idle if view.unfinished() else view.idle[1:]
        stay = max(math.ceil(view.unfinished() / self._most(view)), 1)
        replicas = sum(view.gpus(node) // view.tp(node) for node in view.nodes)
        if stay < replicas and 0 < self._at_most_s(view) < view.training_backlog_s:
            fullest = sorted(view.replicas(), key=lambda replica: (-len(replica.requests), replica.index))
            leaving = tuple(replica.index for replica in fullest[stay:])
        return Release(leaving) if leaving else None

    def _most(self, view: RolloutView) -> int:
        """Responses that a replica holds at full length, and decodes in at most twice the time of one."""
        context, tp = self._context, view.tp(view.nodes[0])
        if tp not in self._known:
            fits = context.kv_tokens(tp) // context.sequence_tokens
            self._known[tp] = max(min(memory_bound_batch(context, tp, context.cap_tokens / 2, RIDGE), fits), 1)
        return self._known[tp]

    def _at_most_s(self, view: RolloutView) -> float:
        """How long generation can still take: to the cap, on full replicas; 0 if nothing runs."""
        most, running = self._most(view), [tokens for node in view.nodes for tokens in view.generated(node)]
        step = self._context.costs.step(view.tp(view.nodes[0]))
        left_tokens = view.cap_tokens - min(running, default=view.cap_tokens)
        return left_tokens * step.decode(most).step_s(most * view.cap_tokens)

"""RLHFuse (Zhong et al., NSDI 2025): inter-stage fusion, plain and as RollPacker's authors strengthen it.

Once few sequences are left they are migrated onto few replicas, and the freed GPUs start the inference calls of
responses that are finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlsim.policies.parts import Informed
from rlsim.sim.actions import Migrate, Release
from rlsim.sim.control import Action, ControlContext, RolloutView

#: A decode step that takes so many times as long as that of one sequence is still nearly as fast.
NEARLY = 1.25

#: Shares of the responses that are tried for the best moment to consolidate.
TRIED = (0.05, 0.1, 0.2)


def memory_bound_batch(context: ControlContext, tp: int, tokens: float, slower: float = NEARLY) -> int:
    """Decoding is bound by reading the weights up to some batch size: there a step begins to take longer.

    `tokens` is the context of each sequence, `slower` how much longer than that of one sequence a step may take.
    """
    step = context.costs.step(tp)
    alone_s, batch = step.decode(1).step_s(tokens), 1
    while step.decode(2 * batch).step_s(2 * batch * tokens) <= slower * alone_s:
        batch *= 2
    return batch


class TailConsolidation(Informed):
    """Migrate the last sequences onto as few replicas as can hold them at full length, and release the others."""

    remaining: Annotated[float, Field(gt=0, lt=1)] | Literal["best"] = 0.2
    max_batch: int | Literal["auto"] = "auto"

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        return [{"remaining": share} for share in TRIED] if self.remaining == "best" else ()

    def on_finish(self, view: RolloutView) -> list[Action] | None:
        """Once, when the share that is left is small enough; again if not all could be released then."""
        left, share = view.unfinished(), TRIED[0] if self.remaining == "best" else self.remaining
        if left > share * view.total:
            return None
        replicas = sorted(view.replicas(), key=lambda r: -len(r.requests))
        tp = replicas[0].tp if replicas else 1
        needed = sum(r.prompt_tokens + view.cap_tokens for replica in replicas for r in replica.requests)
        most = self.max_batch
        if most == "auto":
            most = memory_bound_batch(self._context, tp, self._context.cap_tokens / 2)
        keep = max(math.ceil(needed / self._context.kv_tokens(tp)), math.ceil(left / most), 1)
        if keep >= len(replicas):
            return None
        staying, leaving = replicas[:keep], replicas[keep:]
        load = [len(replica.requests) for replica in staying]
        actions: list[Action] = []
        for replica in leaving:
            if replica.requests:
                to = min(range(keep), key=load.__getitem__)
                load[to] += len(replica.requests)
                actions.append(Migrate(tuple(r.id for r in replica.requests), staying[to].index))
        return [*actions, Release(tuple(replica.index for replica in leaving))]

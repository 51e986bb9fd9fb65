"""PAT: adaptive tensor parallelism inside one generation stage.

Small TP serves many sequences best, large TP the tail. As responses finish PAT predicts, for every layout, how long
the unfinished ones would take if each ran to the length limit, adds the cost of switching there, and switches when
that beats staying. The predictor knows an offline profile and the batch's state, never a response's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, PrivateAttr

from rlsim.cost.profile import ProfileStep, profile_of
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import rms_context_tokens
from rlsim.errors import CapacityError
from rlsim.schema import Schema
from rlsim.sim.control import Action, ControlContext, KvHandling, Reconfigure, RolloutControl, RolloutView

#: The profile's grid: about 10 batch sizes, contexts denser below a few K tokens.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072)


class PAT(Schema, RolloutControl):
    """Switch a node's TP whenever the predicted gain beats the cost of switching."""

    start_tp: int | Literal["auto"] = Field(
        default="auto", description="first layout; auto: the fastest decode step with all active"
    )
    candidates: tuple[int, ...] = Field(
        default=(1, 2, 4, 8), min_length=1, description="degrees that may be switched to"
    )

    _context: ControlContext = PrivateAttr()
    _profiles: dict[int, ProfileStep] = PrivateAttr(default_factory=dict)

    def setup(self, context: ControlContext) -> None:
        """Profile every candidate layout, and the first one, within its KV budget."""
        self._context = context
        for tp in dict.fromkeys((*self.candidates, self.start_tp)):
            if tp in context.feasible_tps:
                budget = context.costs.capacity_pages(tp) * context.page_tokens
                self._profiles[tp] = profile_of(context.costs.step(tp), BATCHES, CONTEXTS, budget)

    def initial_tp(self, context: ControlContext) -> int:
        """The layout whose decode step is shortest while the whole batch is active."""
        if self.start_tp != "auto":
            return context.check_tp(self.start_tp)
        if not self._profiles:
            raise CapacityError(
                f"none of the candidates TP {', '.join(map(str, self.candidates))} is feasible; "
                f"feasible: TP {', '.join(map(str, context.feasible_tps))}"
            )

        def step_s(tp: int) -> float:
            batch = math.ceil(context.requests * tp / (context.gpus_per_node * context.nodes))
            return self._profiles[tp].decode(batch).step_s(batch * context.prompt_tokens)

        return min(self._profiles, key=step_s)

    def on_finish(self, view: RolloutView) -> list[Action]:
        """Every node on which responses have finished decides on its own."""
        return [action for node in view.finished_nodes if (action := self._decide(view, node)) is not None]

    def _decide(self, view: RolloutView, node: int) -> Action | None:
        now_tp = view.tp(node)
        if now_tp not in self._profiles:
            return None
        requests = [r for replica in view.replicas(node) for r in replica.requests]
        if not requests:
            return None
        left = sorted((view.cap_tokens - r.generated_tokens for r in requests), reverse=True)
        context = sum(r.context_tokens for r in requests) / len(requests)
        # 1. The remaining time if the layout stays.
        best, best_s = None, self._remaining_s(now_tp, left, context)
        # 2. For every candidate: the unfinished sequences merged over its replicas, and the switch paid for once.
        held = [r.context_tokens for r in requests if r.has_kv]
        for tp in self._profiles:
            if tp == now_tp or tp not in self.candidates:
                continue
            remaining_s = self._remaining_s(tp, left, context)
            if remaining_s >= best_s:
                continue
            switch_s, kv = self._switch_s(now_tp, tp, held, tp not in view.used_tps(node))
            # 3. The cheapest, and only if it beats staying.
            if remaining_s + switch_s < best_s:
                best, best_s = Reconfigure(node, tp, kv), remaining_s + switch_s
        return best

    def _remaining_s(self, tp: int, left: Sequence[int], context: float) -> float:
        """Predicted time until every sequence has run to the length limit, `left` tokens away (in descending order).

        Layouts are compared with the sequences spread evenly over their replicas, the present one too, each sequence
        with the mean `context`: an imbalance of the moment is no merit of another layout, and would be back a few
        finishes after a switch. For the same reason n sequences on d replicas count as n / d on each, linearly between
        the whole numbers, but never as less than one.
        """
        replicas = self._context.gpus_per_node // tp
        fullest = left[::replicas]
        time_s = self._drain_s(tp, fullest, context)
        beyond = len(left) % replicas
        if beyond == 0 or len(left) < replicas:
            return time_s
        share = beyond / replicas
        return share * time_s + (1 - share) * self._drain_s(tp, fullest[:-1], context)

    def _drain_s(self, tp: int, left: Sequence[int], context: float) -> float:
        """Time of one replica until each of its sequences is at the limit."""
        profile = self._profiles[tp]
        time_s, steps = 0.0, 0
        for active in range(len(left), 0, -1):  # the sequence nearest to its limit leaves first
            more = left[active - 1] - steps
            if more:
                time_s += profile.decode(active).steps_s(active * (context + steps), more)
                steps += more
        return time_s

    def _switch_s(self, from_tp: int, to_tp: int, held: Sequence[int], first_use: bool) -> tuple[float, KvHandling]:
        """Cost of the switch, KV handled the cheaper way: migrated, or recomputed under the target."""
        costs = self._context.costs
        migrate_s = costs.switch(from_tp, to_tp, held, "migrate", first_use).total_s
        # One prefill of as many sequences of the RMS context, over the target's replicas.
        replicas = self._context.gpus_per_node // to_tp
        prefill = [Chunk(round(rms_context_tokens(held)), 0)] * math.ceil(len(held) / replicas)
        recompute_s = costs.switch(from_tp, to_tp, held, "recompute", first_use).total_s
        recompute_s += self._profiles[to_tp].prefill_s(prefill) if held else 0.0
        return (migrate_s, "migrate") if migrate_s <= recompute_s else (recompute_s, "recompute")

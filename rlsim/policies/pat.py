"""PAT: adaptive tensor parallelism inside one generation stage.

Small TP serves many sequences best, large TP the tail. As responses finish PAT predicts, for every layout, how long
the unfinished ones would take if each ran to the length limit, adds the cost of switching there, and switches when
that beats staying. The predictor knows an offline profile and the batch's state, never a response's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, PrivateAttr

from rlsim.cost.profile import ProfileStep, profile_of
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import rms_context_tokens
from rlsim.policies.verl import checked_tp
from rlsim.schema import Schema
from rlsim.sim.control import Action, ControlContext, KvHandling, Reconfigure, RolloutControl, RolloutView, deal

#: The profile's grid: about 10 batch sizes, contexts denser below a few K tokens.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072)


class PAT(Schema, RolloutControl):
    """Switch a node's TP whenever the predicted gain beats the cost of switching."""

    start_tp: int | str = Field(
        default="auto", description="first layout; auto: the fastest decode step with all active"
    )
    candidates: tuple[int, ...] = Field(default=(1, 2, 4, 8), description="degrees that may be switched to")

    _context: ControlContext = PrivateAttr()
    _profiles: dict[int, ProfileStep] = PrivateAttr(default_factory=dict)

    def setup(self, context: ControlContext) -> None:
        """Profile every candidate layout, within its KV budget."""
        self._context = context
        for tp in self.candidates:
            if tp in context.feasible_tps:
                budget = context.costs.capacity_pages(tp) * context.page_tokens
                self._profiles[tp] = profile_of(context.costs.step(tp), BATCHES, CONTEXTS, budget)

    def initial_tp(self, context: ControlContext) -> int:
        """The layout whose decode step is shortest while the whole batch is active."""
        if self.start_tp != "auto":
            return checked_tp(int(self.start_tp), context)

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
        batch = [(r.context_tokens, view.cap_tokens - r.generated_tokens) for r in requests]
        # 1. The remaining time if the layout stays.
        best, best_s = None, self._remaining_s(now_tp, batch)
        # 2. For every candidate: the unfinished sequences merged over its replicas, and the switch paid for once.
        held = [r.context_tokens for r in requests if r.has_kv]
        for tp in self._profiles:
            remaining_s = self._remaining_s(tp, batch)
            if tp == now_tp or remaining_s >= best_s:
                continue
            switch_s, kv = self._switch_s(now_tp, tp, held, tp not in view.used_tps(node))
            # 3. The cheapest, and only if it beats staying.
            if remaining_s + switch_s < best_s:
                best, best_s = Reconfigure(node, tp, kv), remaining_s + switch_s
        return best

    def _remaining_s(self, tp: int, batch: Sequence[tuple[int, int]]) -> float:
        """Predicted time until every sequence, given as (context, tokens to its limit), has run to the length limit.

        Layouts are compared with the sequences spread evenly over their replicas, the present one too: an imbalance
        of the moment is no merit of another layout, and would be back a few finishes after a switch.
        """
        profile = self._profiles[tp]
        slowest_s = 0.0
        for share in deal([context for context, _ in batch], self._context.gpus_per_node // tp):
            sequences = sorted((batch[i][1], batch[i][0]) for i in share)
            time_s, steps, tokens = 0.0, 0, sum(context for _, context in sequences)
            for done, (left, context) in enumerate(sequences):
                if left > steps:
                    active = len(sequences) - done
                    time_s += profile.decode(active).steps_s(tokens, left - steps)
                    tokens += active * (left - steps)
                    steps = left
                tokens -= context + steps
            slowest_s = max(slowest_s, time_s)
        return slowest_s

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

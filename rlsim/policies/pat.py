"""PAT: adaptive tensor parallelism inside one generation stage.

Small TP serves many sequences best, large TP the tail. As responses finish PAT predicts, for every layout, how long the
unfinished ones would take if each ran to the length limit, adds the cost of switching there, and switches when that
beats staying. The predictor knows an offline profile and the batch's state, never a response's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapreplace
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from rlsim.cost.profile import ProfileStep, profile_of
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import rms_context_tokens
from rlsim.errors import CapacityError
from rlsim.schema import Schema
from rlsim.sim.control import Action, ControlContext, KvHandling, Reconfigure, RolloutControl, RolloutView
from rlsim.units import Tokens

#: The profile's grid: about 10 batch sizes, contexts denser below a few K tokens.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072)

#: A sequence as the predictor sees it: tokens to the length limit, and tokens of context.
Row = tuple[int, float]


class PAT(Schema, RolloutControl):
    """Switch a node's TP whenever the predicted gain beats the cost of switching."""

    start_tp: int | Literal["auto"] = Field(
        default="auto", description="first layout; auto: the fastest decode step with all active"
    )
    candidates: tuple[int, ...] = Field(
        default=(1, 2, 4, 8), min_length=1, description="degrees that may be switched to"
    )

    profile_tokens_per_gpu: Annotated[Tokens, Field(ge=1)] = Field(
        default=131072, description="KV tokens per GPU up to which a layout is profiled"
    )
    spread: Literal["even", "actual"] = Field(
        default="even",
        description="what replicas are predicted to hold: equal shares, or what they hold and would be dealt",
    )

    _context: ControlContext = PrivateAttr()
    _profiles: dict[int, ProfileStep] = PrivateAttr(default_factory=dict)

    def setup(self, context: ControlContext) -> None:
        """Profile every candidate layout, and the first one, within its KV budget."""
        self._context = context
        for tp in dict.fromkeys((*self.candidates, self.start_tp)):
            if tp in context.feasible_tps:
                capacity = context.costs.capacity_pages(tp) * context.page_tokens
                budget = min(capacity, tp * self.profile_tokens_per_gpu)
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
        requests = [replica.requests for replica in view.replicas(node)]
        layout = [[(view.cap_tokens - r.generated_tokens, float(r.context_tokens)) for r in rs] for rs in requests]
        batch = sorted((row for rows in layout for row in rows), reverse=True)
        if not batch or now_tp not in self._profiles:
            return None
        shortest, longest = view.finished_tokens
        if shortest == longest >= view.cap_tokens - batch[-1][0]:
            return None  # all lengths seen are equal, and nobody is beyond them: there is no tail to switch for
        # 1. The remaining time if the layout stays.
        best, best_s = None, self._remaining_s(now_tp, batch, layout)
        # 2. For every candidate: the unfinished sequences merged over its replicas, and the switch paid for once.
        held = [r.context_tokens for rs in requests for r in rs if r.has_kv]
        for tp in self.candidates:
            if tp == now_tp or tp not in self._profiles:
                continue
            remaining_s = self._remaining_s(tp, batch)
            if remaining_s < best_s:
                switch_s, kv = self._switch_s(now_tp, tp, held, len(batch), tp not in view.used_tps(node))
                # 3. The cheapest, and only if it beats staying.
                if remaining_s + switch_s < best_s:
                    best, best_s = Reconfigure(node, tp, kv), remaining_s + switch_s
        return best

    def _remaining_s(self, tp: int, batch: Sequence[Row], layout: Sequence[Sequence[Row]] | None = None) -> float:
        """Predicted time until every sequence of `batch` (longest way to go first) has run to the length limit.

        With `spread: actual` the slowest replica decides, of the present `layout` or of the one the engine would deal.
        With `even`, layouts are compared as such: n sequences on d replicas count as n / d on each, linearly between
        the whole numbers but never less than one, all with the mean context. An imbalance of the moment is then no
        merit of another layout; it would be back a few finishes after a switch.
        """
        replicas = self._context.gpus_per_node // tp
        if self.spread == "actual":
            return max(self._drain_s(tp, sorted(rows, reverse=True)) for rows in layout or _dealt(batch, replicas))
        mean = sum(context for _, context in batch) / len(batch)
        fullest = [(left, mean) for left, _ in batch[::replicas]]
        time_s = self._drain_s(tp, fullest)
        beyond = len(batch) % replicas
        if beyond == 0 or len(batch) < replicas:
            return time_s
        share = beyond / replicas
        return share * time_s + (1 - share) * self._drain_s(tp, fullest[:-1])

    def _drain_s(self, tp: int, sequences: Sequence[Row]) -> float:
        """Time of one replica until each of its sequences, longest way to go first, is at the limit."""
        profile = self._profiles[tp]
        time_s, steps, tokens = 0.0, 0, sum(context for _, context in sequences)
        for active in range(len(sequences), 0, -1):  # the sequence nearest to its limit leaves first
            left, context = sequences[active - 1]
            if left > steps:
                time_s += profile.decode(active).steps_s(tokens, left - steps)
                tokens += active * (left - steps)
                steps = left
            tokens -= context + steps
        return time_s

    def _switch_s(
        self, from_tp: int, to_tp: int, held: Sequence[int], sequences: int, first_use: bool
    ) -> tuple[float, KvHandling]:
        """Cost of the switch, KV handled the cheaper way: migrated, or recomputed under the target."""
        switch = self._context.costs.switch
        migrate_s = switch(from_tp, to_tp, held, sequences, "migrate", first_use).total_s
        # One prefill of as many sequences of the RMS context, over the target's replicas.
        replicas = self._context.gpus_per_node // to_tp
        prefill = [Chunk(round(rms_context_tokens(held)), 0)] * math.ceil(len(held) / replicas)
        recompute_s = switch(from_tp, to_tp, held, sequences, "recompute", first_use).total_s
        recompute_s += self._profiles[to_tp].prefill_s(prefill) if held else 0.0
        return (migrate_s, "migrate") if migrate_s <= recompute_s else (recompute_s, "recompute")


def _dealt(batch: Sequence[Row], replicas: int) -> list[list[Row]]:
    """As the engine deals after a switch: longest context first, each to the replica with the least so far."""
    loads = [(0.0, index) for index in range(replicas)]
    shares: list[list[Row]] = [[] for _ in range(replicas)]
    for row in sorted(batch, key=lambda row: -row[1]):
        load, index = loads[0]
        shares[index].append(row)
        heapreplace(loads, (load + row[1], index))
    return shares

"""PAT: adaptive tensor parallelism inside one generation stage.

Small TP serves many sequences best, large TP the tail. As responses finish PAT predicts, for every layout, how long the
unfinished ones would take if each ran to the length limit, adds the cost of switching there, and switches when that
beats staying. The predictor knows an offline profile and the batch's state, never a response's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from rlsim.cost.profile import ProfileStep, profile_of
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import RESTART, GraphCapture, SwitchWay, WeightHandling, rms_context_tokens
from rlsim.errors import CapacityError
from rlsim.policies.parts import Informed
from rlsim.sim.actions import Migrate, Reconfigure
from rlsim.sim.control import Action, ControlContext, KvHandling, RequestView, RolloutView, one_of
from rlsim.sim.stage import to_least
from rlsim.units import Tokens

#: The profile's grid: about 10 batch sizes, contexts denser below a few K tokens.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072)


#: Unfinished sequences, a row for those that the predictor does not tell apart, longest way to go first: tokens left to
#: the length limit, context tokens, how many sequences.
Batch = NDArray[np.float64]
Alike = tuple[int, int, int]  # a row of it


class PAT(Informed):
    """Switch a node's TP whenever the predicted gain beats the cost of switching."""

    start_tp: int | Literal["auto"] = "auto"
    candidates: tuple[int, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    profile_tokens_per_gpu: Annotated[Tokens, Field(ge=1)] = 131072
    spread: Literal["even", "actual"] = "even"
    redispatch: bool = True
    switch_at: int | None = Field(default=None, ge=1)
    predictor_error: float = Field(default=0.0, ge=0, le=1)
    kv: Literal["cheaper", "migrate", "recompute"] = "cheaper"
    weights: WeightHandling = "reshard"
    graphs: GraphCapture = "tail"
    restart: bool = False

    _profiles: dict[int, ProfileStep] = PrivateAttr(default_factory=dict)

    def setup(self, context: ControlContext) -> None:
        """Profile every candidate layout, and the first one, within its KV budget."""
        super().setup(context)
        for tp in dict.fromkeys((*self.candidates, self.start_tp)):
            if tp in context.feasible_tps:
                capacity = context.kv_tokens(tp)
                budget = min(capacity, tp * self.profile_tokens_per_gpu)
                profile = profile_of(context.costs.step(tp), BATCHES, CONTEXTS, budget)
                if self.predictor_error:  # the mean size of errors whose standard deviation is √(π/2) times as large
                    errors = np.random.default_rng((context.seed, tp)).normal(size=len(BATCHES))
                    profile = profile.scaled(np.exp(math.sqrt(math.pi / 2) * self.predictor_error * errors).tolist())
                self._profiles[tp] = profile
        if self._profiles:
            context.check_switches(self._profiles)

    def initial_tp(self, context: ControlContext) -> int:
        """The layout whose decode step is shortest while the whole batch is active."""
        if self.start_tp != "auto":
            return context.check_tp(self.start_tp)
        if not self._profiles:
            few = f"none of the candidates {one_of(self.candidates)} is feasible"
            raise CapacityError(f"{few}; feasible: {one_of(context.feasible_tps)}")

        def step_s(tp: int) -> float:
            batch = math.ceil(context.requests * tp / context.gpus)
            return self._profiles[tp].decode(batch).step_s(batch * context.prompt_tokens)

        return min(self._profiles, key=step_s)

    def on_finish(self, view: RolloutView) -> list[Action]:
        """Every node on which responses have finished decides on its own."""
        return [action for node in view.finished_nodes if (action := self._decide(view, node)) is not None]

    def _decide(self, view: RolloutView, node: int) -> Action | None:
        gpus, now_tp, generated = view.gpus(node), view.tp(node), view.generated(node)
        if not generated or now_tp not in self._profiles:
            return None
        shortest, longest = view.finished_tokens
        if self.switch_at is None and shortest == longest >= max(generated):
            return None  # all lengths seen are equal, and nobody is beyond them: there is no tail to switch for
        sequences = sum(generated.values())
        mean_tokens = view.context_tokens(node) / sequences
        left_tokens = view.cap_tokens - np.array(list(generated))
        batch = np.array([left_tokens, np.full(len(generated), mean_tokens), list(generated.values())])
        batch = batch[:, np.argsort(-left_tokens)].T
        others = [tp for tp in self.candidates if tp in self._profiles and tp != now_tp]
        best: Reconfigure | None = None
        held: list[int] | None = None
        if self.switch_at is None:
            # 1. The remaining time if the layout stays.
            best_s = self._remaining_s(gpus, now_tp, batch, self._spread_out(view, node, None))
        else:  # at a fixed switch point the largest is taken, whatever it costs
            best_s, largest = math.inf, max(others, default=0)
            others = [largest] if sequences <= self.switch_at and largest > now_tp else []
        # 2. For every candidate: the unfinished sequences merged over its replicas, and the switch paid for once.
        for tp in others:
            remaining_s = self._remaining_s(gpus, tp, batch, self._spread_out(view, node, tp))
            if remaining_s < best_s:
                held = _held(view, node) if held is None else held
                switch_s, kv = self._switch_s(gpus, now_tp, tp, held, sequences, tp not in view.used_tps(node))
                # 3. The cheapest, and only if it beats staying.
                if remaining_s + switch_s < best_s:
                    best, best_s = Reconfigure(node, tp, kv, self._way), remaining_s + switch_s
        return best or (self._dealt_anew(view, node) if self.redispatch else None)

    @property
    def _way(self) -> SwitchWay:
        return RESTART if self.restart else SwitchWay(self.weights, self.graphs)

    @property
    def _kv(self) -> Sequence[KvHandling]:
        if self.restart:
            return ("recompute",)
        return ("migrate", "recompute") if self.kv == "cheaper" else (self.kv,)

    def _dealt_anew(self, view: RolloutView, node: int) -> Migrate | None:
        """Responses of the replica that would take longest, for the one that would be done first, if that pays.

        Half of the difference in number moves: those that wait, which cost nothing, then those with the least context.
        """
        numbers = view.requests_on(node).values()
        if max(numbers) - min(numbers) < 2:
            return None
        profile, held = self._profiles[view.tp(node)], {r.index: list(r.requests) for r in view.replicas(node)}
        remaining_s = {index: profile.drain_s(_batch(view, own)) if own else 0.0 for index, own in held.items()}
        last, first = max(remaining_s, key=remaining_s.__getitem__), min(remaining_s, key=remaining_s.__getitem__)
        count = (len(held[last]) - len(held[first])) // 2
        if count < 1:
            return None
        own = sorted(held[last], key=lambda r: (r.has_kv, r.context_tokens))
        moving, staying = own[:count], own[count:]
        contexts = [r.context_tokens for r in moving if r.has_kv]
        tp, transfer_s = view.tp(node), self._context.costs.transfer_s
        move_s = transfer_s(contexts, tp, tp, same_node=True) if contexts else 0.0
        after_s = max(profile.drain_s(_batch(view, own)) for own in (staying, [*held[first], *moving]))
        if after_s + move_s < remaining_s[last]:
            return Migrate(tuple(r.id for r in moving), first)
        return None

    def _spread_out(self, view: RolloutView, node: int, tp: int | None) -> list[Batch]:
        """With `spread: actual`, what each replica holds now, or would be dealt at `tp`; else nothing."""
        if self.spread == "even":
            return []
        replicas = [
            [(view.cap_tokens - r.generated_tokens, r.context_tokens, 1) for r in replica.requests]
            for replica in view.replicas(node)
        ]
        if tp is not None:
            replicas = _dealt([one for own in replicas for one in own], view.gpus(node) // tp)
        return [np.array(sorted(own, reverse=True), dtype=float) for own in replicas if own]

    def _remaining_s(self, gpus: int, tp: int, batch: Batch, replicas: Sequence[Batch]) -> float:
        """Predicted time until every sequence of `batch` has run to the length limit.

        With `spread: actual` the slowest of the `replicas` decides. With `even`, layouts are compared as such: n
        sequences on d replicas count as n / d on each, linearly between the whole numbers but never less than one, all
        with the mean context. An imbalance of the moment is then no merit of another layout; it would be back a few
        finishes after a switch.
        """
        profile = self._profiles[tp]
        if replicas:
            return max(profile.drain_s(own) for own in replicas)
        count = gpus // tp
        fullest = _every(count, batch)
        time_s = profile.drain_s(fullest)
        sequences = int(batch[:, 2].sum())
        beyond = sequences % count
        if beyond == 0 or sequences < count:
            return time_s
        share = beyond / count
        fullest[-1, 2] -= 1
        return share * time_s + (1 - share) * profile.drain_s(fullest)

    def _switch_s(
        self, gpus: int, from_tp: int, to_tp: int, held: Sequence[int], sequences: int, first_use: bool
    ) -> tuple[float, KvHandling]:
        """Cost of the switch, KV handled as `kv` says, or the cheaper way: migrated, or recomputed under the target."""
        costs: dict[KvHandling, float] = {
            kv: self._context.costs.switch(gpus, from_tp, to_tp, held, sequences, kv, first_use, self._way).total_s
            for kv in self._kv
        }
        if held and "recompute" in costs:
            # One prefill of as many sequences of the RMS context, over the target's replicas.
            prefill = [Chunk(round(rms_context_tokens(held)), 0)] * math.ceil(len(held) / (gpus // to_tp))
            costs["recompute"] += self._profiles[to_tp].prefill_s(prefill)
        kv = min(costs, key=costs.__getitem__)
        return costs[kv], kv


def _batch(view: RolloutView, requests: Sequence[RequestView]) -> Batch:
    """What a replica with these has to drain."""
    rows = [(view.cap_tokens - r.generated_tokens, r.context_tokens, 1) for r in requests]
    return np.array(sorted(rows, reverse=True), dtype=float)


def _held(view: RolloutView, node: int) -> list[int]:
    """Contexts that are in the KV caches of a node."""
    return [r.context_tokens for replica in view.replicas(node) for r in replica.requests if r.has_kv]


def _every(replicas: int, batch: Batch) -> Batch:
    """What the fullest of `replicas` holds if they are dealt the sequences in turn, the longest way to go first."""
    fullest = batch.copy()
    dealt = fullest[:, 2] = np.ceil(batch[:, 2].cumsum() / replicas)
    fullest[1:, 2] -= dealt[:-1]
    return fullest[fullest[:, 2] > 0]


def _dealt(sequences: Sequence[Alike], replicas: int) -> list[list[Alike]]:
    """As the engine deals after a switch: longest context first, each to the replica with the least so far."""
    ordered = sorted(sequences, key=lambda one: (-one[1], -one[0]))
    return [*to_least([(one, one[1]) for one in ordered], dict.fromkeys(range(replicas), 0)).values()]

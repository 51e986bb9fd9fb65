"""RollPacker's parallelism planner: the tensor-parallel degree of each round.

Offline every degree is profiled: decode steps by batch size and context, prefill, room for the KV cache. Online, after
each step, for the kind of round (short, long) that comes next:

1. The loads of that kind so far and the profiles say how long it would take at each degree; the fastest is chosen.
2. If the last round of that kind had more than `rise` times the preemptions of the last one before it at the same
   TP, the choice is doubled: the load has grown faster than what is known of it.
3. If its last `quiet_steps` rounds had none, the choice is halved.

The last two hold where the last load and the profile do not say that they cost more. Without profiles they are all of
the rule, and change the degree that this kind of round had last. A kind of round that has not been yet has the degree
that the run began with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, PrivateAttr

from rlsim.cost.profile import ProfileStep, profile_of
from rlsim.cost.step import Chunk
from rlsim.errors import ConfigError
from rlsim.policies.parts import Informed
from rlsim.policies.pat import BATCHES, CONTEXTS
from rlsim.sim.control import ControlContext, RolloutReport

Loads = Sequence[tuple[int, int]]  # prompt and generated tokens of every response of a round


@dataclass
class _Kind:
    """What is known of one kind of round."""

    loads: deque[Loads] = field(default_factory=lambda: deque(maxlen=8))  # of its last rounds
    preemptions: dict[int, int] = field(default_factory=dict)  # by TP: of the last round under it
    risen: bool = False  # its last round had many more than the last one before it at the same TP
    quiet: int = 0  # rounds in a row without any, since its degree was halved last
    tp: int = 0  # of its last round

    def remember(self, report: RolloutReport, rise: float) -> None:
        before = self.preemptions.get(report.tp, report.preemptions)
        self.risen = report.preemptions > rise * before
        self.quiet = 0 if report.preemptions else self.quiet + 1
        self.preemptions[report.tp] = report.preemptions
        self.tp = report.tp
        self.loads.append(report.loads)

    def typical(self) -> Loads:
        """A round's load with the lengths of all that are remembered."""
        pooled = sorted((load for round_ in self.loads for load in round_), key=lambda load: load[1])
        return pooled[len(self.loads) // 2 :: len(self.loads)]


class Planner(Informed):
    """The TP of each round from profiles and loads, doubled when preemptions rise, halved when there are none."""

    profiled: bool = True
    start_tp: int | Literal["best"] = "best"
    rise: float = Field(default=1.05, ge=1, le=1000)
    quiet_steps: int = Field(default=4, ge=1, le=100_000)

    _profiles: dict[int, ProfileStep] = PrivateAttr(default_factory=dict)
    _kinds: dict[str, _Kind] = PrivateAttr(default_factory=dict)

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        return [{"start_tp": tp} for tp in context.feasible_tps] if self.start_tp == "best" else ()

    def setup(self, context: ControlContext) -> None:
        """Profile every degree that fits inside a node, as far as its KV cache reaches."""
        super().setup(context)
        for tp in context.feasible_tps:
            self._profiles[tp] = profile_of(context.costs.step(tp), BATCHES, CONTEXTS, self._context.kv_tokens(tp))
        context.check_switches(self._profiles)

    def initial_tp(self, context: ControlContext) -> int:
        if self.start_tp == "best":
            raise ConfigError("start_tp: best must be resolved by running every feasible degree")
        return context.check_tp(self.start_tp)

    def next_tp(self, report: RolloutReport) -> int:
        self._kinds.setdefault(report.label, _Kind()).remember(report, self.rise)
        kind = self._kinds.get(report.next_label)
        if kind is None:
            return self.initial_tp(self._context)
        loads, last = kind.typical(), kind.loads[-1]
        tp = min(self._profiles, key=lambda tp: self.round_s(tp, loads)) if self.profiled else kind.tp
        quiet = kind.quiet >= self.quiet_steps
        other = 2 * tp if kind.risen else tp // 2 if quiet else tp
        if other not in self._profiles or (self.profiled and self.round_s(other, last) > self.round_s(tp, last)):
            return tp
        if quiet and not self.profiled:
            kind.quiet = 0
        return other

    def round_s(self, tp: int, loads: Loads) -> float:
        """Seconds of a round of these loads at `tp`, by the profile.

        Responses are spread evenly. Where the unfinished ones of a replica do not fit into its KV cache together, they
        take turns.
        """
        replicas = self._context.gpus // tp
        batch = sorted(loads, key=lambda load: load[1], reverse=True)[::replicas]
        if not batch:
            return 0.0
        profile, room, done = self._profiles[tp], self._context.kv_tokens(tp), 0
        held = float(sum(prompt for prompt, _ in batch))  # tokens of the unfinished
        time_s = profile.prefill_s([Chunk(round(held / len(batch)), 0)] * len(batch))
        for active in range(len(batch), 0, -1):  # the shortest leaves first
            prompt, generated = batch[active - 1]
            if (steps := generated - done) > 0:
                mean = held / active
                running = max(min(active, int(room / (mean + steps)), self._context.max_num_seqs), 1)
                time_s += active / running * profile.decode(running).steps_s(running * mean, steps)
                held += active * steps
                done = generated
            held -= prompt + done
        return time_s

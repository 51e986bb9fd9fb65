"""What a run leaves behind: its calls, switches, generation stages, responses and who held which GPU when."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from rlsim.cost.transfer import SwitchCost
from rlsim.sim.batching import LaunchCounts
from rlsim.sim.recorder import NO_STEP, Span
from rlsim.sim.request import NAN
from rlsim.sim.responses import Responses
from rlsim.sim.stays import Stays

#: What a call spends its time on, one after the other: names and seconds.
Parts = tuple[tuple[str, float], ...]


class Ran(NamedTuple):
    """How a call went, which is over now."""

    start_at: float
    parts: Parts = ()
    samples: tuple[int, ...] = ()  # that each data-parallel replica worked on, if it took them as they came
    ready_at: float = NAN  # if it was not when the calls before it were over


class CallRecord(NamedTuple):
    """One call of one step: when it was ready, ran and ended (simulated seconds), and what its time went to."""

    step: int
    call: str
    kind: str
    model: str
    ready_at: float
    start_at: float
    end_at: float
    gpus: int
    parts: Parts
    samples: tuple[int, ...] = ()  # that each data-parallel replica worked on, if it took them as they came


class SwitchRecord(NamedTuple):
    """One change of a node's tensor-parallel degree."""

    step: int
    at: float
    node: int
    from_tp: int
    to_tp: int
    weights_s: float
    kv_s: float
    graph_s: float
    control_s: float
    peak_bytes: float
    pool_bytes: float

    @classmethod
    def of(cls, step: int, at: float, node: int, from_tp: int, to_tp: int, cost: SwitchCost) -> SwitchRecord:
        return cls(step, at, node, from_tp, to_tp, *astuple(cost))


class RolloutSummary(NamedTuple):
    """What one generation stage came to besides its responses."""

    step: int
    initial_tp: int
    preemptions: int
    peak_kv_tokens: int  # of the fullest replica
    launches: LaunchCounts
    waiting: int  # prompts that wait afterwards to be launched again or, in continuous generation, to be trained on
    released_gpu_s: float  # GPU time that generation gave up before its end
    prefix_hit_tokens: int = 0  # that prefills found in the prefix cache
    kv_loaded_tokens: int = 0  # of these, that came from host memory
    borrowed_gpu_s: float = 0.0  # GPU time that generation had on GPUs of training
    moved: int = 0  # responses that a control moved to another replica
    released: int = 0  # replicas that one gave up
    aborted: int = 0  # responses that one dropped

    def with_rest(self, rest: RolloutSummary) -> RolloutSummary:
        """This, and what another one of the same step came to, or the rest of the run."""
        counts = {name: getattr(self.launches, name) + getattr(rest.launches, name) for name in _SUMMED}
        sums = {name: getattr(self, name) + getattr(rest, name) for name in self._fields if name not in _KEPT}
        peak = max(self.peak_kv_tokens, rest.peak_kv_tokens)
        return self._replace(launches=self.launches._replace(**counts), peak_kv_tokens=peak, **sums)


_SUMMED = ("launched", "dropped", "put_back", "paused", "stale")
_KEPT = ("step", "initial_tp", "peak_kv_tokens", "launches", "waiting")


@dataclass
class Outcome:
    """Everything that happened in a run."""

    spans: list[Span] = field(default_factory=list)
    stays: list[Stays] = field(default_factory=list)  # by replica of every step
    calls: list[CallRecord] = field(default_factory=list)
    switches: list[SwitchRecord] = field(default_factory=list)
    rollouts: list[RolloutSummary] = field(default_factory=list)
    responses: list[Responses] = field(default_factory=list)  # by step
    step_ends: list[float] = field(default_factory=list)  # moment when all calls of a step are done

    def assign_steps(self) -> None:
        """The run is over: rollouts of a step are one; spans of one, or of a judge, for all steps belong to the step in
        which they begin."""
        of_step: dict[int, RolloutSummary] = {}
        for one in self.rollouts:
            of_step[one.step] = of_step[one.step].with_rest(one) if one.step in of_step else one
        self.rollouts = [of_step[step] for step in sorted(of_step)]
        steps = len(self.step_ends) - 1
        for i, (gpus, start_at, end_at, kind, tp, step, label, shared) in enumerate(self.spans):
            if step == NO_STEP:
                began = min(bisect_right(self.step_ends, start_at), steps)
                self.spans[i] = Span(gpus, start_at, end_at, kind, tp, began, label, shared)

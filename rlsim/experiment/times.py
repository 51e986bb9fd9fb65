"""Durations of an experiment's inference, training and weight-sync calls, as the engine asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsim.experiment.guests import guests_of
from rlsim.experiment.placed import PlacedExperiment, layout_of
from rlsim.sim.elastic import Pieces
from rlsim.sim.request import Request
from rlsim.sim.simulation import Relay
from rlsim.workflow import Call, Placement
from rlsim.workflow.graph import CallKind
from rlsim.workflow.plan import same_weights

#: Bytes per token that a call hands on: generation token numbers (int64) and log-probs (fp32), inference fp32 numbers.
GENERATED_BYTES = 12
INFERRED_BYTES = 4


def handed_on_bytes(kind: CallKind, tokens: float) -> float:
    """Bytes that a call of this kind hands on for so many tokens."""
    return (GENERATED_BYTES if kind == "generate" else INFERRED_BYTES) * tokens


class ExperimentTimes:
    """The `CallTimes` of a system with its plan."""

    def __init__(self, placed: PlacedExperiment) -> None:
        self._placed, self._workflow, self._training = placed, placed.workflow, placed.loaded.experiment.training

    def parts(
        self, call: Call, placement: Placement, samples: Sequence[Request], rollout_tp: int, windows: int = 1
    ) -> list[tuple[str, float]]:
        if call.kind == "sync":
            return [("weights", self._weights_s(call, rollout_tp))]
        assert placement.strategy is not None
        calls = self._placed.calls_on(placement.gpus)
        cost = calls.of(call.model, placement.strategy, placement.gpus[0])
        lengths = np.fromiter((r.prompt_tokens + r.generated for r in samples), np.int64, len(samples))
        if call.kind == "train":
            time = cost.train_s(lengths, self._training.mini_batches // windows, self._training.epochs)
        else:
            time = cost.forward_s(lengths)
        padded = len(lengths) * self._placed.loaded.longest_sequence
        data_s = self._data_s(call, float(lengths.sum()), rollout_tp)
        data_s += self._training.driver_per_token * padded + calls.call_s
        return [*time.named, *([("data", data_s)] if data_s else ())]

    def pieces(self, call: Call) -> Pieces:
        placement = self._placed.plan.of(call.name)
        strategy = placement.strategy
        assert strategy is not None
        cost = self._placed.calls_on(placement.gpus).of(call.model, strategy, placement.gpus[0])
        train = call.kind == "train"
        # Every part fills and drains the pipeline: with several times as many micro-batches as stages that is little.
        each, mean_tokens = strategy.sequences(backward=train), self._placed.loaded.batch.mean_tokens
        tokens = round(each * mean_tokens) if each else strategy.budget(backward=train)
        tokens *= 1 if strategy.pp == 1 else 4 * strategy.pp
        load_s, unload_s = cost.load_s(backward=train), cost.unload_s(backward=train)
        finish = [*(cost.update_time().named if train else ()), *([("offload", unload_s)] if unload_s else ())]
        guests = guests_of(self._placed, call, tokens) if train and self._workflow.elastic else None
        return Pieces(lambda lengths: cost.part_time(lengths, backward=train).named, tokens, load_s, finish, guests)

    def relay(self, call: Call) -> Relay:
        placed, (source, *_) = self._placed, self._workflow.beside(call.name)[0]
        training, rollout = placed.plan.of(source), placed.generation
        assert training.strategy is not None
        sync, start = placed.relaying(call.model, training.gpus, rollout.gpus), layout_of(training)
        pp = placed.rollout_pp
        return Relay(sync.push_s(start), sync.spread_s(start, layout_of(rollout)), lambda tp: sync.pull_s(tp // pp, pp))

    def _weights_s(self, call: Call, rollout_tp: int) -> float:
        """New weights on their way from a training call to the other calls of the model, one after the other."""
        sources, targets = self._workflow.beside(call.name)
        plan, source = self._placed.plan, self._placed.plan.of(sources[0])
        assert source.strategy is not None
        total = 0.0
        for name in targets:
            target = plan.of(name)
            if target.strategy is None and (target.gpus == source.gpus or not self._placed.has_placing):
                total += self._placed.colocated_sync_s(call.model, source.strategy, rollout_tp, source.gpus[0])
            elif self._placed.loads(name) or not same_weights(source, target):
                both = (layout_of(one, rollout_tp, self._placed.rollout_pp) for one in (source, target))
                total += self._placed.moving(call.model, source, name, target)(*both)
        return total

    def _data_s(self, call: Call, tokens: float, rollout_tp: int) -> float:
        """What the calls before it have made on its way to this call; nothing to speak of where all are colocated."""
        if not self._placed.has_placing:
            return 0.0
        target, total, pp = self._placed.plan.of(call.name), 0.0, self._placed.rollout_pp
        receiver, to = self._placed.calls_on(target.gpus), layout_of(target, rollout_tp, pp)
        for edge in self._workflow.into(call.name):
            source = self._placed.plan.of(edge.source)
            kind = self._workflow.call(edge.source).kind
            carries = edge.lag == 0 and not edge.barrier and kind != "reward"  # a reward is one number a response
            if carries and source.gpus:
                data = self._placed.calls_on(source.gpus).data(receiver)
                total += data.time_s(handed_on_bytes(kind, tokens), layout_of(source, rollout_tp, pp), to)
        return total

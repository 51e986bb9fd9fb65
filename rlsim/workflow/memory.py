"""The ledger of a plan: bytes that its calls keep and need on every GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from rlsim.cost.flops import Floats
from rlsim.cost.layout import PLAIN, ReplicaLayout
from rlsim.cost.ledger import Ledger, Row, does_not_fit, total
from rlsim.cost.memory import RESERVED_BYTES, STATES, rollout_weight_bytes, stage_bytes
from rlsim.cost.micro_batches import MicroBatching
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError
from rlsim.models.hardware import AnyCluster
from rlsim.models.model import Model
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan, same_weights

#: Share of a GPU's memory to keep free: what is not modelled, fragments and imbalance. Measured peaks came out up to 7%
#: above what is counted, and two runs that were out of memory at 0.99 of the GPU (docs/costs.md).
MARGIN = 0.03


@dataclass(frozen=True)
class BatchSize:
    """What a step's calls work on; lengths are those of prompt and response together (tokens)."""

    sequences: int
    mean_tokens: float
    longest_tokens: int  # in the trace
    mini_batches: int = 1  # of a training call
    baselines: int = 0  # sequences beside these that only a reward model reads (ReMax)
    limit_tokens: int = 0  # the longest that the limits allow, whatever the trace holds
    drawn: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # lengths, by step

    def micro_batch_tokens(
        self, call: Call, model: Model, strategy: TrainStrategy, *, as_they_come: bool = False, worst: bool = False
    ) -> int:
        """Tokens of the largest micro-batch of one rank, no sequence cut in two: of the trace's lengths, or the `worst`
        that the limits allow.

        A token budget is filled, whatever the lengths; one sequence may be longer. Of so many sequences the worst are
        as many of the longest, those of the trace are in `drawn`. So many micro-batches a rank are balanced: an equal
        share. One rank may take all sequences where the call takes them `as_they_come`.
        """
        longest, share, most = self._share(call, strategy, as_they_come, worst)
        if strategy.micro_batches is not None:
            return math.ceil(max(longest, share / strategy.micro_batches * self.mean_tokens))
        backward = call.kind == "train"
        each = strategy.sequences(backward=backward)
        if each is None or worst:
            budget = strategy.budget(backward=backward) if each is None else each * longest
            return min(max(budget, longest), most * longest)
        return max(longest, *(math.ceil(float(one.max())) for one in self._made(call, model, strategy, as_they_come)))

    def rank_tokens(
        self, call: Call, model: Model, strategy: TrainStrategy, *, as_they_come: bool = False, worst: bool = False
    ) -> int:
        """Tokens of a mini-batch on its fullest rank, likewise; of so many of the longest where none are drawn."""
        longest, share, most = self._share(call, strategy, as_they_come, worst)
        if strategy.micro_batches is not None:
            return math.ceil(max(longest, share * self.mean_tokens))
        if worst or not len(self.drawn):
            return most * longest
        made = self._made(call, model, strategy, as_they_come)
        return max(longest, *(math.ceil(float(one.sum(axis=1).max())) for one in made))

    def _share(self, call: Call, strategy: TrainStrategy, as_they_come: bool, worst: bool) -> tuple[int, float, int]:
        """The longest sequence; sequences of a rank's mini-batch, on average and at most."""
        longest = max(self.limit_tokens, self.longest_tokens) if worst else self.longest_tokens
        sequences = self.sequences + (self.baselines if call.model == "reward" else 0)
        share = sequences / strategy.dp / (self.mini_batches if call.kind == "train" else 1)
        return longest, share, sequences if as_they_come else math.ceil(share)

    def _made(self, call: Call, model: Model, strategy: TrainStrategy, as_they_come: bool) -> list[Floats]:
        """Tokens of the micro-batches of the steps drawn, by rank, of each mini-batch."""
        batching, backward = MicroBatching(model, strategy), call.kind == "train"
        if as_they_come:
            return [batching.of_part(step, backward=backward).tokens for step in self.drawn]
        minis = self.mini_batches if backward else 1
        return [one.tokens for step in self.drawn for one in batching.of_call(step, minis, backward=backward)]


class PlanMemory:
    """Memory of the calls of a workflow under any plan.

    `models` are named by role; `rollout`: those that generate, as engines serve them (default: as trained), in replicas
     of the layout `replica`; `engine_bytes`: of an engine that has a share of its GPUs, on each. `worst`: micro-batches
     are the largest that the limits allow.
    """

    def __init__(
        self,
        workflow: Workflow,
        models: Mapping[str, Model],
        cluster: AnyCluster,
        batch: BatchSize,
        rollout: Mapping[str, Model] = MappingProxyType({}),
        replica: ReplicaLayout = PLAIN,
        engine_bytes: Callable[[Call, Placement], float] = lambda *_: 0.0,
    ) -> None:
        self._workflow, self._models, self._cluster, self._batch = workflow, models, cluster, batch
        self._rollout, self._replica, self._engine_bytes = rollout, replica, engine_bytes

    def micro_batch_tokens(self, call: Call, strategy: TrainStrategy, *, worst: bool = False) -> int:
        """Tokens of a call's largest micro-batch: see `BatchSize`."""
        model, come = self._models[call.model], self._as_they_come(call)
        return self._batch.micro_batch_tokens(call, model, strategy, as_they_come=come, worst=worst)

    def _as_they_come(self, call: Call) -> bool:
        return any(edge.grain != "stage" for edge in self._workflow.into(call.name))

    def of(
        self, call: Call, strategy: TrainStrategy, *, holds_weights: bool = False, worst: bool = False
    ) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Bytes by part on each GPU of a training or inference call, by pipeline stage: what it keeps between its runs,
        and what it needs beside that while it runs. `holds_weights`: training of the same model keeps what an inference
        has there."""
        model, backward, rank_tokens = self._models[call.model], call.kind == "train", math.inf
        tokens = self.micro_batch_tokens(call, strategy, worst=worst)
        if backward and strategy.pp > 1:
            come = self._as_they_come(call)
            rank_tokens = self._batch.rank_tokens(call, model, strategy, as_they_come=come, worst=worst)
        policy = any(c.kind == "generate" and c.model == call.model for c in self._workflow.calls)
        found = list[tuple[dict[str, float], dict[str, float]]]()
        stages = stage_bytes(model, strategy, tokens, backward=backward, entropy=policy, rank_tokens=rank_tokens)
        for parts in stages:
            # A copy of a trained model stays too: it comes right after training, and generation is before its use.
            states = {part: parts.pop(part) for part in STATES if part in parts}
            if holds_weights and not backward:
                states = {}
            found.append(({}, states | parts) if strategy.offload else (states, parts))
        return found

    def ledger(self, plan: Plan, others: Iterable[Row] = (), *, worst: bool = False) -> Ledger:
        """The rows of every call that the plan says how to spread, beside `others`; a KV cache takes what is left.

        Calls in pieces have their states, and gradients, from the first of them to the last. With `Workflow.swaps` only
        while they run; with `host_gradients` gradients too, and the optimizer's states come once activations are gone.
        """
        workflow, rows, phases = self._workflow, list(others), dict[str, tuple[int, ...]]()
        trains = {call.model: plan.of(call.name) for call in workflow.calls if call.kind == "train"}
        calls = [call for call in map(workflow.call, workflow.order()) if call.kind not in ("sync", "reward")]
        calls = [call for call in calls if plan.of(call.name).strategy and plan.of(call.name).gpus]
        beside = [phase for phase, call in enumerate(calls) if workflow.in_pieces(call.name)]
        for call in calls:
            at, pieces = plan.of(call.name), workflow.in_pieces(call.name)
            together = pieces and not workflow.swaps
            if call.kind == "generate":
                stages = [(dict[str, float](), self._engine(call, at, at.spread))]
            else:
                holder = trains.get(call.model)
                holds = call.kind == "inference" and holder is not None and same_weights(holder, at)
                holds &= together or not at.spread.offload
                stages = self.of(call, at.spread, holds_weights=holds, worst=worst)
            phase, each = len(phases), len(at.gpus) // (at.spread.pp if len(stages) > 1 else 1)
            phases[call.name] = at.gpus
            host = workflow.host_gradients and pieces and call.kind == "train"
            lasting = (("parameters",) if host else (*STATES, "gradients")) if together else ()
            for stage, (kept, working) in enumerate(stages):
                gpus = frozenset(at.gpus[stage * each : (stage + 1) * each])  # TP is innermost, PP outermost
                if host:  # the fuller of a piece, beside the others' states, and the update
                    update = {"optimizer states", "the optimizer's step"}
                    piece = {"gathered layers", "activations", "logits"}
                    alike = [r for r in rows if (r.start, r.end) == (beside[0], beside[-1]) and r.gpus & gpus]
                    at_update, at_work = (sum(working.get(part, 0.0) for part in parts) for parts in (update, piece))
                    if at_update > at_work + total(alike):
                        piece, update = update, piece
                        rows = [replace(row, end=phase - 1) if row in alike else row for row in rows]
                    working = {part: size for part, size in working.items() if part not in update}
                rows += [Row(call.name, part, size, gpus) for part, size in kept.items()]
                working["context and communication"] = RESERVED_BYTES
                for part, size in working.items():
                    first, last = (beside[0], beside[-1]) if part in lasting else (phase, phase)
                    rows.append(Row(call.name, part, size, gpus, first, last))
        return Ledger(phases, tuple(rows))

    def _engine(self, call: Call, at: Placement, strategy: TrainStrategy) -> dict[str, float]:
        """A rollout engine's: all of it where the plan says its share, else its weights: KV takes what is left."""
        if at.memory_share is not None:
            return {"rollout engine": self._engine_bytes(call, at)}
        model = self._rollout.get(call.model) or self._models[call.model]
        return {"weights": rollout_weight_bytes(model, strategy.tp, strategy.pp, self._replica)}

    def over(self, ledger: Ledger, margin: float = 0.0) -> dict[str, float]:
        """By call: the bytes that its fullest GPU lacks while it runs, a share of it kept free; below 0 are left."""
        fullest = {name: ledger.fullest(name) for name in ledger.phases}
        have = {name: self._cluster.gpu_at(gpu).memory_bytes * (1 - margin) for name, (gpu, _) in fullest.items()}
        return {name: total(rows) - have[name] for name, (_, rows) in fullest.items()}

    def check(self, ledger: Ledger, plan: Plan, margin: float = 0.0) -> None:
        """Raises `CapacityError`, with the call, the GPU and the bytes, where a call does not fit beside the others."""
        if max(self.over(ledger, margin).values(), default=0.0) > 0:
            raise self.refusal(ledger, plan, margin)

    def refusal(self, ledger: Ledger, plan: Plan, margin: float = 0.0) -> CapacityError:
        """What is lacking for the call that lacks most."""
        over = self.over(ledger, margin)
        name = max(over, key=over.__getitem__)
        gpu, rows = ledger.fullest(name)
        own = {row.part: row.bytes for row in rows if row.holder == name}
        others = {row.holder: f"{row.holder} {'between its runs' if row.holder in ledger.phases else row.part}"
                  for row in rows if row.holder != name}  # fmt: skip
        beside = {text: total(row for row in rows if row.holder == holder) for holder, text in others.items()}
        model, strategy = self._models[self._workflow.call(name).model].name, plan.of(name).strategy
        of, layout = self._cluster.gpu_at(gpu), strategy.shown if strategy else ""
        what = f"{model}: call {name} ({layout}) does not fit on GPU {gpu}"
        kept = f", {margin:.0%} of it kept free" if margin else ""
        return does_not_fit(what, own | beside, of.memory_bytes * (1 - margin), f"of {of.name}{kept}")

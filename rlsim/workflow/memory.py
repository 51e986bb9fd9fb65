"""Bytes that the calls of a plan keep and need on every GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlsim.cost.memory import RESERVED_BYTES, inference_memory, rollout_weight_bytes, training_memory
from rlsim.cost.replica import PLAIN, ReplicaLayout
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError
from rlsim.hardware import AnyCluster
from rlsim.models import Model
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan, same_weights


@dataclass(frozen=True)
class BatchSize:
    """What a step's calls work on."""

    sequences: int
    mean_tokens: float  # prompt and response together
    longest_tokens: int
    mini_batches: int = 1  # of a training call
    baselines: int = 0  # sequences beside these that only a reward model reads (ReMax)

    def micro_batch_tokens(self, call: Call, strategy: TrainStrategy, *, as_they_come: bool = False) -> int:
        """Tokens of the largest micro-batch of one rank, if sequences spread evenly: no sequence is cut in two.

        One rank may take them all where the call takes them `as_they_come`.
        """
        sequences = self.sequences + (self.baselines if call.model == "reward" else 0)
        shares = strategy.dp * (self.mini_batches if call.kind == "train" else 1)
        if strategy.micro_batches is None:
            most = sequences if as_they_come else math.ceil(sequences / shares)
            budget = strategy.budget(backward=call.kind == "train")
            if each := strategy.sequences(backward=call.kind == "train"):
                return math.ceil(max(self.longest_tokens, min(each, most) * self.mean_tokens))
            return min(max(budget, self.longest_tokens), most * self.longest_tokens)
        share = sequences / shares / strategy.micro_batches
        return math.ceil(max(self.longest_tokens, share * self.mean_tokens))


@dataclass(frozen=True)
class CallMemory:
    """Bytes of one call on each of its GPUs: by kind, between its runs and only while it runs."""

    resident: Mapping[str, float] = field(default_factory=dict)
    active: Mapping[str, float] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> float:
        """Between its runs, too."""
        return sum(self.resident.values())

    @property
    def active_bytes(self) -> float:
        """Beside that, while it runs."""
        return sum(self.active.values())


class PlanMemory:
    """Memory of the calls of a workflow under any plan.

    `models` are named by role; `rollout`: the model that generates, as its engine serves it (default: as trained), in
    replicas of the layout `replica`.
    """

    def __init__(
        self,
        workflow: Workflow,
        models: Mapping[str, Model],
        cluster: AnyCluster,
        batch: BatchSize,
        rollout: Model | None = None,
        replica: ReplicaLayout = PLAIN,
    ) -> None:
        self._workflow, self._models, self._cluster, self._batch = workflow, models, cluster, batch
        self._rollout, self._replica = rollout, replica

    def of(self, call: Call, strategy: TrainStrategy, *, holds_weights: bool = False) -> CallMemory:
        """A call's memory on each GPU. `holds_weights`: training of the same model keeps just these weights there."""
        model = self._models[call.model]
        as_they_come = any(edge.grain != "stage" for edge in self._workflow.into(call.name))
        tokens = self._batch.micro_batch_tokens(call, strategy, as_they_come=as_they_come)
        if call.kind == "train":
            train = training_memory(model, strategy, tokens, reserved_bytes=0.0)
            states = {"parameters": train.parameter_bytes, "optimizer states": train.optimizer_bytes}
            working = {
                "gradients": train.gradient_bytes,
                "gathered layers": train.gathered_bytes,
                "activations": train.activation_bytes,
                "logits": train.logits_bytes,
            }
            return CallMemory({}, {**states, **working}) if strategy.offload else CallMemory(states, working)
        if call.kind == "inference":
            policy = any(c.kind == "generate" and c.model == call.model for c in self._workflow.calls)
            memory = inference_memory(model, strategy, tokens, entropy=policy, reserved_bytes=0.0)
            weights = {} if holds_weights else {"parameters": memory.parameter_bytes}
            working = {
                "gathered layers": memory.gathered_bytes,
                "activations": memory.activation_bytes,
                "logits": memory.logits_bytes,
            }
            # A copy of a trained model stays too: it comes right after training, and generation is before its use.
            return CallMemory({}, {**weights, **working}) if strategy.offload else CallMemory(weights, working)
        return CallMemory()

    def of_engine(self, call: Call, placement: Placement) -> CallMemory:
        """A rollout engine's: its share of the GPU where the plan says it, else its weights: KV takes what is left."""
        assert placement.strategy is not None
        if placement.memory_share is not None:
            gpu = self._cluster.gpu_at(placement.gpus[0])
            engine_bytes = max(placement.memory_share * gpu.memory_bytes - RESERVED_BYTES, 0.0)
            return CallMemory({}, {"rollout engine": engine_bytes})
        strategy = placement.strategy
        model = self._rollout or self._models[call.model]
        return CallMemory({}, {"weights": rollout_weight_bytes(model, strategy.tp, strategy.pp, self._replica)})

    def calls(self, plan: Plan) -> dict[str, tuple[Placement, CallMemory]]:
        """The memory of every call that the plan says how to spread; a rollout's KV cache takes what is left."""
        found = {}
        train = {c.model: plan.of(c.name) for c in self._workflow.calls if c.kind == "train"}
        for call in self._workflow.calls:
            placement = plan.of(call.name)
            if placement.strategy is not None and call.kind == "generate":
                found[call.name] = placement, self.of_engine(call, placement)
            elif placement.strategy is not None and placement.gpus and call.kind != "sync":
                holder = train.get(call.model)
                holds = holder is not None and same_weights(holder, placement)
                found[call.name] = placement, self.of(call, placement.strategy, holds_weights=holds)
        return found

    def resident_bytes(self, plan: Plan, gpus: tuple[int, ...]) -> float:
        """What stays on the fullest of these GPUs between calls."""
        return max(self._resident_bytes(plan, gpus).values(), default=0.0)

    def fullest_resident(self, plan: Plan, gpus: tuple[int, ...]) -> int:
        """Which of these GPUs that is; the first of equal ones."""
        on = self._resident_bytes(plan, gpus)
        return max(on, key=lambda gpu: (on[gpu], -gpu))

    def _resident_bytes(self, plan: Plan, gpus: tuple[int, ...]) -> dict[int, float]:
        calls = [(frozenset(at.gpus), memory.resident_bytes) for at, memory in self.calls(plan).values()]
        return {gpu: sum(resident for on, resident in calls if gpu in on) for gpu in gpus}

    def check(self, plan: Plan, beside_bytes: float = 0.0) -> None:
        """Raises `CapacityError`, with the call, the GPU and the bytes, where a call does not fit beside the others.

        `beside_bytes` are those of something that is in no plan, on every GPU.
        """
        needs = self.needs(plan, beside_bytes)
        if not needs:
            return
        name = self.tightest(needs)
        (gpu, parts), strategy = needs[name], plan.of(name).strategy
        total, of = sum(parts.values()), self._cluster.gpu_at(gpu)
        if total > of.memory_bytes and strategy is not None:
            model = self._models[self._workflow.call(name).model].name
            layout = f"DP {strategy.dp}, TP {strategy.tp}, PP {strategy.pp}, "
            layout += f"CP {strategy.cp}, " * (strategy.cp > 1) + f"EP {strategy.ep}, " * (strategy.ep > 1)
            layout += f"ZeRO {strategy.zero_stage}"
            listed = " + ".join(f"{part} {size / 1e9:.2f} GB" for part, size in parts.items() if size)
            raise CapacityError(
                f"{model}: call {name} ({layout}) does not fit on GPU {gpu}: {listed} = {total / 1e9:.2f} GB > "
                f"{of.memory_bytes / 1e9:.2f} GB of {of.name}"
            )

    def needs(self, plan: Plan, beside_bytes: float = 0.0) -> dict[str, tuple[int, dict[str, float]]]:
        """By call: the GPU that has most to hold while it runs, and the bytes of each part there."""
        calls = self.calls(plan)
        return {name: self._fullest(name, calls, beside_bytes) for name in calls}

    def tightest(self, needs: Mapping[str, tuple[int, Mapping[str, float]]]) -> str:
        """The call whose fullest GPU has the least room left, or lacks most; `needs` as this class gives them."""

        def over_bytes(name: str) -> float:
            gpu, parts = needs[name]
            return sum(parts.values()) - self._cluster.gpu_at(gpu).memory_bytes

        return max(needs, key=over_bytes)

    def _fullest(
        self, name: str, calls: Mapping[str, tuple[Placement, CallMemory]], beside_bytes: float
    ) -> tuple[int, dict[str, float]]:
        placement, memory = calls[name]
        sharing: dict[int, dict[str, float]] = {gpu: {} for gpu in placement.gpus}
        for other, (at, its) in calls.items():
            if other != name and its.resident_bytes:
                for gpu in sharing.keys() & set(at.gpus):
                    sharing[gpu][f"{other} between its runs"] = its.resident_bytes
        gpu = max(sharing, key=lambda gpu: (sum(sharing[gpu].values()), -gpu))
        own = {**memory.resident, **memory.active, "context and communication": RESERVED_BYTES}
        return gpu, {**own, **sharing[gpu], "others on the GPU": beside_bytes}

"""Where a system runs: the GPUs of its calls, the judge's, and what they make of an experiment's costs and limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import gcd
from typing import Any

from rlsim.base.refusals import refuse
from rlsim.cost.bound import GenerationBound
from rlsim.cost.calls import CallCosts
from rlsim.cost.derived import crowded
from rlsim.cost.layout import Layout
from rlsim.cost.ledger import Ledger, Row
from rlsim.cost.rollout import RolloutCostModel, powers_of_two
from rlsim.cost.step import Lookups, StepCost
from rlsim.cost.strategy import EXPERT_IMBALANCE, TrainStrategy
from rlsim.cost.weight_sync import REMAPPED_BYTES_PER_S, SyncMethod, WeightSync
from rlsim.errors import CapacityError, ConfigError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.engines import JUDGE, Judge, beside_generation, bytes_beside, rollout_costs, streamed_calls
from rlsim.experiment.schema import TrainingSpec
from rlsim.models.hardware import Cluster
from rlsim.policies.parts import ChunkStreaming, JudgePlacement, Placing, PlanContext, PlanSearch
from rlsim.sim.control import ControlContext, divides_nodes
from rlsim.sim.server import RewardModelEngine
from rlsim.workflow import Call, Placement, Plan, Workflow, colocated
from rlsim.workflow.graph import CallKind
from rlsim.workflow.memory import PlanMemory
from rlsim.workflow.plan import check_mesh, check_meshes

#: Keys of `training` that are fields of `TrainStrategy`: degrees, and all others.
_DEGREES = ("tp", "pp", "cp", "ep", "expert_tp")
_SWITCHES = [one.name for one in fields(TrainStrategy) if one.name in {*TrainingSpec.model_fields} - {*_DEGREES}]

#: Searches for the best plan of an experiment.
Planner = Callable[["PlacedExperiment", PlanSearch], Plan]


class SearchAheadError(RlsimError):
    """Where calls run is known only after a search that has been put off."""


@dataclass(eq=False)
class PlacedExperiment:
    """One experiment with its calls where `placing` puts them. Raises `RlsimError`s that say what does not fit."""

    loaded: LoadedExperiment
    workflow: Workflow  # the calls and edges that are placed
    judge_beside: JudgePlacement | None  # how a judge, if there is one, works beside the calls; None: on its own GPUs
    placing: Placing | None  # None: all calls are on the same GPUs
    streaming: ChunkStreaming | None = None  # how calls that take responses by the chunk do, on the GPUs of the others
    planner: Planner | None = None  # searches for a plan if `placing` asks; without, that raises `SearchAheadError`
    searched: bool = False
    generating: str = ""  # the call whose engine `generation` and what follows from it are about; empty: the first
    _crowded_steps: dict[int, StepCost] = field(default_factory=dict)
    _calls: dict[str, CallCosts] = field(default_factory=dict)  # by GPU
    _bounds: dict[tuple[int, ...], GenerationBound] = field(default_factory=dict)  # by TPs of replicas, and the batch
    _others: dict[str, PlacedExperiment] = field(default_factory=dict)  # of further calls that generate, by these

    @property
    def _streamed(self) -> tuple[Call, ...]:
        return streamed_calls(self.workflow) if self.streaming else ()

    @cached_property
    def _judge(self) -> Judge | None:
        """The judge; None if no response is to be judged.

        Its own GPUs may take part in log-probs and training once it has scored all of a step. A system that places its
        calls says itself where they run: never on those GPUs. Where nothing is generated the judge works beside
        log-probs, so it keeps them.
        """
        spec, model = self.loaded.experiment.workflow.reward.judge, self.loaded.judge_model
        if spec is None or model is None or not self.loaded.scoring.judged.any():
            return None
        may_join = self.placing is None and self.generates
        return Judge(self.loaded, spec, model, self.judge_beside, may_join=may_join)

    @property
    def _gpus_apart(self) -> tuple[int, ...]:
        """A judge's own GPUs, which log-probs and training never have."""
        return self._judge.gpus if self._judge and not self._judge.joins else ()

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of log-probs and training: all, or all but a judge's own; neighbours where calls are placed."""
        gpus = tuple(sorted(set(range(self.loaded.cluster.gpus)) - set(self._gpus_apart)))
        if self.placing is not None:
            refuse("placing", gpus=gpus, kept=len(self._gpus_apart))
        return gpus

    @property
    def _gpus_per_node(self) -> int:
        """GPUs of a node that log-probs and training have."""
        return len(self.gpus) // len({self.loaded.cluster.node_of(gpu) for gpu in self.gpus})

    def left_of(self, cluster: Cluster) -> Cluster:
        """What a judge's own GPUs leave of the cluster, as GPUs of one kind know it."""
        per_node = self._gpus_per_node
        if len(self.gpus) == cluster.gpus:
            return cluster
        return cluster.model_copy(update={"nodes": len(self.gpus) // per_node, "gpus_per_node": per_node})

    @cached_property
    def judge(self) -> RewardModelEngine | None:
        """The judge's engine."""
        if (own := self._judge) is None:
            return None
        return own.engine(self.ledger.staying(own.gpus, but=JUDGE)[1] if own.joins else 0.0)

    def record(self) -> dict[str, object] | None:
        return self._judge.record(len(self.gpus)) if self._judge else None

    def ledger_of(self, plan: Plan, *, worst: bool = False) -> Ledger:
        """What a plan's calls hold on every GPU, and engines beside them: a judge's, and of models that take responses
        by the chunk. `worst`: micro-batches are the largest that the limits allow."""
        loaded, others = self.loaded, self._judge.rows(self.gpus) if self._judge else []
        for call, at in ((call, plan.of(call.name)) for call in self._streamed):
            if at.shared:
                gpu, model = loaded.cluster.gpu_at(at.gpus[0]), loaded.models[call.model]
                size = bytes_beside(loaded, gpu, model, at.tp)
                others.append(Row(call.name, "engine beside the calls", size, frozenset(at.gpus)))
        return self.memory.ledger(plan, others, worst=worst)

    def training_strategy(self, gpus: int) -> TrainStrategy:
        """How training and log-prob passes are spread over so many GPUs, as the experiment says."""
        training = self.loaded.experiment.training
        share = training.tp * training.pp * training.cp
        apart = len(self._gpus_apart)
        beside = f" ({apart} more are kept for the judge)" * bool(apart)
        of = "of the cluster" if gpus == len(self.gpus) else "that a call is to have"
        known = {"training": training, "loaded": self.loaded, "gpus": gpus, "share": share, "node": self._gpus_per_node}
        refuse("spread", **known, apart=apart, of=of + beside)
        cut = training.sequence_parallel and training.tp > 1
        return replace(self.style, dp=gpus // share, sequence_parallel=cut, **self._degrees)

    @property
    def _degrees(self) -> dict[str, Any]:
        return {name: getattr(self.loaded.experiment.training, name) for name in _DEGREES}

    @property
    def style(self) -> TrainStrategy:
        """The switches of training: micro-batches, ZeRO stage, recomputation, offload; no degrees."""
        training = self.loaded.experiment.training
        refuse("training", training=training, loaded=self.loaded, imbalance=EXPERT_IMBALANCE)
        switches = {name: getattr(training, name) for name in _SWITCHES}
        return TrainStrategy(**{**switches, **training.kinds})

    @cached_property
    def plan(self) -> Plan:
        """Where every call runs. Raises `CapacityError` if a GPU would have to hold more than it can."""
        self.check(self.unchecked_plan)
        return self.unchecked_plan

    def check(self, plan: Plan, *, worst: bool = False, margin: float = 0.0) -> None:
        """Raises `CapacityError` if a plan does not fit, a share of each GPU kept free; `worst`: where the longest
        sequences that may be meet."""
        self.memory.check(self.ledger_of(plan, worst=worst), plan, margin)

    @cached_property
    def ledger(self) -> Ledger:
        """What the plan, which fits, holds on every GPU."""
        return self.ledger_of(self.plan)

    @cached_property
    def unchecked_plan(self) -> Plan:
        """The plan, which need not fit into memory."""
        workflow = self.workflow
        if self.placing is None:
            strategy, kept = self.training_strategy(len(self.gpus)), self._judge.gpus if self._judge else ()
            generating = tuple(gpu for gpu in self.gpus if gpu not in kept)
            plan = colocated(workflow, self.gpus, strategy, self.reward_placement, generating)
            for call in workflow.calls:
                check_mesh(call, plan.of(call.name), self.loaded.cluster)
        else:
            loaded, limits = self.loaded, (self.training_strategy, self.style, self._degrees, self.reward_placement)
            asked = PlanContext(
                workflow, loaded.cluster, self.gpus, loaded.models, *limits, check=self.check, search=self._search
            )
            plan = self.placing.plan(asked)
            check_meshes(workflow, plan, self.loaded.cluster)
            plan = self._without_idle_syncs(plan)
        return beside_generation(self._with_own(plan), workflow, self._streamed)

    def _with_own(self, plan: Plan) -> Plan:
        """The plan with the calls' own switches, where the plan does not say others than the actor's."""
        usual, placements = self.style, dict(plan.placements)
        for call in self.workflow.calls:
            if (strategy := plan.of(call.name).strategy) and (own := self._own_of(call)):
                own = {name: own[name] for name in own if getattr(strategy, name) == getattr(usual, name)}
                placements[call.name] = replace(plan.of(call.name), strategy=replace(strategy, **own))
        return Plan(placements)

    def _own_of(self, call: Call) -> dict[str, Any]:
        """The switches that the critic has of its own, in training all, in inference where its weights are between; and
        the type of weights that are not trained."""
        training = self.loaded.experiment.training
        if all(one.model != call.model for one in self.workflow.calls if one.kind == "train"):
            return {"weights": training.frozen_weights}
        own = training.of_critic if call.model == "critic" else {}
        return own if call.kind == "train" else {name: own[name] for name in own if name == "offload"}

    def style_of(self, call: Call) -> TrainStrategy:
        """The switches of training as a call has them: some may be its own."""
        return replace(self.style, **self._own_of(call))

    def epochs_of(self, call: Call) -> int:
        """Passes of a training call over a step's batch."""
        training = self.loaded.experiment.training
        return (call.model == "critic" and training.critic_epochs) or training.epochs

    def _without_idle_syncs(self, plan: Plan) -> Plan:
        """The plan with no GPUs for weight syncs where every GPU has the weights that it needs already."""
        workflow, placements = self.workflow, dict(plan.placements)
        for call in (call for call in workflow.calls if call.kind == "sync"):
            (source, *_), targets = workflow.beside(call.name)
            trainer, ends = plan.of(source), {name: plan.of(name) for name in targets}
            if all(end.strategy is not None for end in (trainer, *ends.values())) and not any(
                self.moving(call.model, trainer, name, end)(layout_of(trainer), layout_of(end))
                for name, end in ends.items()
            ):
                placements[call.name] = Placement(())
        return Plan(placements)

    @property
    def generates(self) -> bool:
        """Whether a call generates."""
        return any(call.kind == "generate" for call in self.workflow.calls)

    def _search(self, how: PlanSearch) -> Plan:
        if self.planner is None:
            raise SearchAheadError
        self.searched = True
        return self.planner(self, how)

    @cached_property
    def memory(self) -> PlanMemory:
        loaded = self.loaded

        def engine_bytes(call: Call, at: Placement) -> float:
            share, strategy = at.memory_share, at.spread
            costs = rollout_costs(loaded, at.gpus, memory_share=share, strategy=strategy, role=call.model)
            return costs.memory(strategy.tp * strategy.pp, min_tokens=-sys.maxsize).engine_bytes

        return PlanMemory(
            *(self.workflow, loaded.models, loaded.cluster, loaded.batch),
            rollout=loaded.served,
            replica=loaded.replica,
            engine_bytes=engine_bytes,
        )

    def calls_on(self, gpus: Sequence[int]) -> CallCosts:
        """Costs of inference and training calls on these GPUs, which are of one kind."""
        loaded, training = self.loaded, self.loaded.experiment.training
        cluster, calibration = loaded.kind(gpus)
        if cluster.gpu.name not in self._calls:
            self._calls[cluster.gpu.name] = CallCosts(
                loaded.models,
                self.left_of(cluster),
                calibration,
                training.backend,
                training.efficiency,
                precision=training.precision,
                rollout=loaded.served,
                replica=loaded.replica,
            )
        return self._calls[cluster.gpu.name]

    def loads(self, call: str) -> bool:
        """Whether a call generates in an engine that loads new weights, be they on its GPUs already or not."""
        method = self.loaded.experiment.weight_sync
        return self.loaded.algorithm.call(call).kind == "generate" and method != "reshard"

    def moving(self, model: str, source: Placement, call: str, target: Placement) -> Callable[[Layout, Layout], float]:
        """Seconds of a model's new weights from the layout of its training to one of the call, each on its GPUs."""
        if self.loads(call):
            return self.weight_sync(model, source, target.gpus).time_s
        return self.calls_on(source.gpus).reallocation(model, self.calls_on(target.gpus)).time_s

    def colocated_sync_s(self, model: str, strategy: TrainStrategy, rollout_tp: int, first_gpu: int) -> float:
        """Seconds of a model's new weights to generation on the GPUs of its training, from `first_gpu` on."""
        target = Layout(first_gpu=first_gpu, tp=rollout_tp // self.rollout_pp, pp=self.rollout_pp)
        sync = self.weight_sync(model, Placement((first_gpu,), strategy), (first_gpu,))
        return sync.time_s(Layout.of(first_gpu, strategy), target)

    def asleep_s(self, call: str) -> float:
        """Seconds in which the engine of a call falls asleep and wakes, where others have its GPUs in between."""
        at, others = self.plan.of(call), (one.name for one in self.workflow.calls if one.kind in ("train", "inference"))
        shared = any(not (o := self.plan.of(name)).shared and not set(at.gpus).isdisjoint(o.gpus) for name in others)
        return self.remapped_s(call, at.memory_share, at.gpus[0]) if shared else 0.0

    def remapped_s(self, call: str, share: float | None, gpu: int) -> float:
        """Seconds in which an engine with this share of such a GPU gives that up and maps it again; of none that loads
        new weights there are none."""
        share = self.loaded.experiment.memory_utilization if share is None else share
        return self.loads(call) * 2 * share * self.loaded.cluster.gpu_at(gpu).memory_bytes / REMAPPED_BYTES_PER_S

    def weight_sync(
        self, model: str, source: Placement, target: Sequence[int], method: SyncMethod | None = None
    ) -> WeightSync:
        """Of a model's new weights from its training to other GPUs, by this method or that of the experiment."""
        costs, drafts = self.calls_on(source.gpus), self.loaded.drafts
        method, offload = method or self.loaded.experiment.weight_sync, (source.strategy or self.style).offload
        sync = costs.weight_sync(model, method, self.calls_on(target), offload=offload)
        return replace(sync, factor=sync.factor * drafts.synced(sync.model)) if drafts else sync

    def trained_along(self, call: Call) -> float:
        """How many times as long a training call takes where it also trains what drafts, on average."""
        drafts = self.loaded.drafts
        generated = {one.model for one in self.workflow.calls if one.kind == "generate"}
        if drafts is None or call.model not in generated:
            return 1.0
        return 1.0 + drafts.speculation.refreshes * drafts.speculation.refresh_cost

    def gpus_of(self, kind: CallKind) -> frozenset[int]:
        """The GPUs of the calls of a kind; where there is none, `gpus`: all but a judge's own."""
        names = [call.name for call in self.workflow.calls if call.kind == kind]
        return frozenset(gpu for name in names for gpu in self.plan.of(name).gpus) or frozenset(self.gpus)

    def shares_generation(self, call: str) -> bool:
        """Whether a call has GPUs of generation."""
        return not self.gpus_of("generate").isdisjoint(self.plan.of(call).gpus)

    @property
    def engines(self) -> list[PlacedExperiment]:
        """The same for each call that generates, the first one first."""
        for call in self.workflow.generating[1:]:
            if call.name not in self._others:
                self._others[call.name] = replace(self, generating=call.name, _crowded_steps={}, _bounds={}, _others={})
        return [self, *self._others.values()]

    @cached_property
    def generation(self) -> Placement:
        if not self.workflow.generating:
            return Placement(self.gpus)  # responses are given
        return self.unchecked_plan.of(self.call.name)

    @property
    def call(self) -> Call:
        """The call whose engine this is about."""
        return self.workflow.call(self.generating or self.workflow.generating[0].name)

    @property
    def responses(self) -> int:
        """To each prompt, that this engine generates."""
        return len(self.workflow.samples(self.call.name, self.loaded.experiment.workflow.responses))

    @property
    def rollout_pp(self) -> int:
        """Pipeline stages of a rollout replica."""
        strategy = self.generation.strategy
        return self.loaded.experiment.engine.pp if strategy is None else strategy.pp

    @cached_property
    def rollout_costs(self) -> RolloutCostModel:
        """Times and sizes of the rollout; made once, since look-ups are cached in it."""
        share, strategy = self.generation.memory_share, self.generation.strategy
        _, resident_bytes = self.ledger.staying(self.generation.gpus)
        return rollout_costs(
            self.loaded,
            self.generation.gpus,
            memory_share=share,
            graphs=self.generation.graphs,
            strategy=strategy,
            resident_bytes=resident_bytes if share is None else 0.0,  # all of it is there, or the plan does not fit
            role=self.call.model if self.generates else "actor",
        )

    @cached_property
    def hybrid_gpus(self) -> tuple[int, ...]:
        """GPUs of training that generation may borrow."""
        models = {call.model for call in self.workflow.calls if call.kind == "generate"}
        trains = (call.name for call in self.workflow.calls if call.kind == "train" and call.model in models)
        return tuple(gpu for name in trains for gpu in self.plan.of(name).gpus) if self.workflow.hybrid else ()

    @cached_property
    def hybrid_costs(self) -> RolloutCostModel:
        """Times and sizes of replicas on `hybrid_gpus`, beside what stays in memory there between calls."""
        gpus = self.hybrid_gpus
        return rollout_costs(self.loaded, gpus, resident_bytes=self.ledger.staying(gpus)[1])

    @cached_property
    def context(self) -> ControlContext:
        experiment, workflow = self.loaded.experiment, self.loaded.experiment.workflow
        planned = self.generation.strategy
        replica = None if planned is None else planned.tp * planned.pp
        node_gpus = tuple(map(len, self.generation.rollout_mesh(self.loaded.cluster)))
        if self.generates:
            degrees = powers_of_two(gcd(*node_gpus)) if replica is None else (replica,)
            feasible, infeasible = self.rollout_costs.feasible_tps(self.loaded.longest_sequence, degrees)
            if replica is None and (not feasible or self.rollout_pp > 1):  # too large for a node, or stages over nodes
                several = [node_gpus[0] * count for count in range(2, len(node_gpus) + 1)]
                several = [tp for tp in several if divides_nodes(tp, node_gpus)]
                larger, beyond = self.rollout_costs.feasible_tps(self.loaded.longest_sequence, several)
                feasible, infeasible = feasible + larger, infeasible | beyond
        else:
            feasible, infeasible = (1,), {}  # responses are given: one layout is as good as another
        for tp in powers_of_two(self.loaded.cluster.domain_gpus) if replica is None else ():
            if odd := [gpus for gpus in node_gpus if gpus % tp]:
                who = "workflow.reward.judge leaves" if self.placing is None else "generation has"
                infeasible[tp] = f"TP {tp} does not divide the {odd[0]} GPUs of a node that {who}"
        if not feasible and replica is not None:
            gpu, _ = self.ledger.staying(self.generation.gpus)
            raise CapacityError(f"call generate does not fit on GPU {gpu}: {infeasible[replica]}")
        if not feasible and all(degree % self.rollout_pp for degree in infeasible):
            raise ConfigError(
                f"engine.pp {self.rollout_pp} divides no replica's GPUs: {', '.join(map(str, infeasible))}"
            )
        if not feasible:
            reasons = [f"TP{tp}: {why}" for tp, why in infeasible.items()]
            raise CapacityError("\n".join(["no TP degree is feasible:", *reasons]))
        return ControlContext(
            costs=self.rollout_costs,
            feasible_tps=feasible,
            infeasible=infeasible,
            node_gpus=node_gpus,
            cap_tokens=self.loaded.longest_response,
            page_tokens=experiment.engine.page_tokens,
            requests=workflow.prompts * workflow.responses,
            prompt_tokens=self.loaded.longest_prompt,
            max_num_seqs=self.loaded.engine.max_num_seqs,
            replica_gpus=replica,
            windows=self.workflow.windows,
            sequence_tokens=self.loaded.longest_sequence,
        )

    def bound(self, tp: int, together: float) -> GenerationBound:
        """What no schedule beats of all that generates, at any feasible degree or at `tp` GPUs (0: none other), with so
        many responses `together` at most."""
        tps, batch = {*self.context.feasible_tps, tp} - {0}, min(together, self.loaded.engine.max_num_seqs)
        known = (*sorted(tps), int(batch))
        if known not in self._bounds:
            steps = {tp: self.rollout_costs.step(tp) for tp in tps}
            others = [(tp, self.hybrid_costs.step(tp)) for tp in tps] if self.hybrid_gpus else []
            others += [(tp, one.rollout_costs.step(tp)) for one in self.engines[1:] for tp in one.context.feasible_tps]
            gpus = len(self.gpus_of("generate")) + len(self.hybrid_gpus)
            self._bounds[known] = GenerationBound(steps, gpus, int(batch), others)
        return self._bounds[known]

    @cached_property
    def reward_placement(self) -> Placement:
        """Where reward calls run: on CPUs, on the judge's own GPUs, or beside the other calls."""
        if self._judge is None:
            return Placement(())
        return Placement(self._judge.gpus) if self._judge.gpus else Placement(self.gpus, shared=True)

    def lookups(self) -> Lookups:
        """The shapes that the rollout, training and the judge asked for."""
        for step in self._crowded_steps.values():
            step.lookups()  # tells the machine's own curves how far they were followed
        judge = [self.judge.crowded.lookups()] if self.judge else []
        calls = [costs.collectives.lookups for costs in self._calls.values()]
        hybrid = [self.hybrid_costs.lookups()] if self.hybrid_gpus else []
        return Lookups().merge([*(one.rollout_costs.lookups() for one in self.engines), *calls, *judge, *hybrid])

    def crowded(self, tp: int) -> StepCost:
        """A rollout replica's steps while a colocated judge, or a model that takes chunks, works on its GPUs."""
        if tp not in self._crowded_steps:
            beside = (self._judge and self._judge.beside, self.streaming)
            factor = max(part.slowdown if part else 1.0 for part in beside)
            self._crowded_steps[tp] = crowded(self.rollout_costs.step(tp), factor)
        return self._crowded_steps[tp]


def layout_of(placement: Placement, rollout_tp: int = 1, pp: int = 1) -> Layout:
    """The mesh and degrees of a call; where the plan says none replicas of so many GPUs, in `pp` stages."""
    first, gpus = placement.gpus[0], len(placement.gpus)
    if placement.gpus != tuple(range(first, first + gpus)):
        raise ConfigError(f"a plan with several placements needs neighbouring GPUs, got {placement.gpus}")
    return Layout.of(first, placement.strategy or TrainStrategy(dp=gpus // rollout_tp, tp=rollout_tp // pp, pp=pp))

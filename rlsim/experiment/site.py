"""Where a system runs: the GPUs of its calls, the judge's, and what they make of an experiment's costs and limits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlsim.cost.bound import GenerationBound
from rlsim.cost.calls import CallCosts
from rlsim.cost.layout import Layout
from rlsim.cost.lookups import Lookups
from rlsim.cost.machine import Machine
from rlsim.cost.memory import RESERVED_BYTES, rollout_weight_bytes
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import Crowded, Streamed, layers_to_offload, stream_s
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy, logits_of
from rlsim.cost.transfer import host_copy_s
from rlsim.errors import CapacityError, ConfigError, RlsimError
from rlsim.experiment.remedies import advice
from rlsim.experiment.scorers import beside_generation, bytes_beside, kv_pages, reserved_gpus, streamed_calls, tp_of
from rlsim.hardware import Cluster
from rlsim.policies.parts import ChunkStreaming, JudgePlacement, Placing, PlanContext
from rlsim.search import Budget, find_plan
from rlsim.sim.control import ControlContext
from rlsim.sim.service import ScoringEngine
from rlsim.workflow import Placement, Plan, Workflow, colocated
from rlsim.workflow.memory import PlanMemory
from rlsim.workflow.plan import check_meshes

if TYPE_CHECKING:
    from rlsim.experiment.build import Setup


class SearchAheadError(RlsimError):
    """Where calls run is known only after a search that has been put off."""


class Site:
    """One experiment with its calls where `placing` puts them (None: all on the same GPUs).

    `workflow`: the calls and edges that are placed. The experiment's judge, if it has one, generates on GPUs of its own
    (`judge` None) or beside the other calls. `streaming`: how calls that take responses by the chunk do, on the GPUs of
    the others. Raises `RlsimError`s that say what does not fit.
    """

    def __init__(
        self,
        setup: Setup,
        workflow: Workflow,
        judge: JudgePlacement | None,
        placing: Placing | None,
        streaming: ChunkStreaming | None = None,
    ) -> None:
        self._setup = setup
        self.workflow = workflow
        self._judge, self._placing, self._searched = judge, placing, False
        self._streaming, self._streamed = streaming, streamed_calls(workflow) if streaming else ()
        self._spec = setup.experiment.workflow.reward.judge if setup.scoring.judged.any() else None
        self._colocated = judge if self._spec else None

    @cached_property
    def judge_gpus(self) -> tuple[int, ...]:
        """GPUs kept for the judge while responses are generated; none where it is beside the other calls."""
        if self._spec is None or self._colocated is not None:
            return ()
        return reserved_gpus(self._spec, self._setup.cluster)

    @property
    def judge_joins(self) -> bool:
        """Whether the judge's own GPUs take part in log-probs and training, once it has scored all of a step.

        A system that places its calls says itself where they run: never on those GPUs. Where nothing is generated the
        judge works beside log-probs, so it keeps them.
        """
        spec, generates = self._spec, any(call.kind == "generate" for call in self.workflow.calls)
        return bool(self.judge_gpus and spec and spec.while_training != "apart" and self._placing is None and generates)

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of log-probs and training: all, or all but a judge's own."""
        apart = () if self.judge_joins else self.judge_gpus
        return tuple(sorted(set(range(self._setup.cluster.gpus)) - set(apart)))

    @cached_property
    def cluster(self) -> Cluster:
        """What these GPUs are as a cluster."""
        whole, gpus = self._setup.cluster, len(self.gpus)
        if gpus == whole.gpus:
            return whole
        nodes = len({whole.node_of(gpu) for gpu in self.gpus})
        return whole.model_copy(update={"nodes": nodes, "gpus_per_node": gpus // nodes})

    @cached_property
    def judge(self) -> ScoringEngine | None:
        """The judge's engine; None if no response is to be judged."""
        spec, model, whole = self._spec, self._setup.judge_model, self._setup.cluster
        if spec is None or model is None:
            return None
        experiment, engine = self._setup.experiment, self._setup.experiment.engine
        cost, slowdown = self._resident, 1.0
        if self._colocated is not None:
            cost = Streamed(cost, stream_s(model, self.offloaded_layers, spec.tp, whole.host))
            slowdown = self._colocated.slowdown
        beside = self.memory.resident_bytes(self.plan, self.judge_gpus) if self.judge_joins else 0.0
        pages = kv_pages(model, spec.tp, self._colocated is not None, experiment, whole, beside)
        longest = self._setup.longest_prompt + experiment.trace.cap + spec.prompt_tokens + self._setup.longest_answer
        if pages * engine.page_tokens < longest:
            raise CapacityError(
                f"workflow.reward.judge: {model.name} at TP {spec.tp} has room for {pages * engine.page_tokens} tokens "
                f"of KV cache, a response to judge may need {longest}"
            )
        load_s = 0.0
        if self.judge_joins and spec.while_training == "offloaded":
            load_s = host_copy_s(math.ceil(rollout_weight_bytes(model, spec.tp)), whole.host)
        return ScoringEngine(spec.tp, cost, Crowded(cost, slowdown), slowdown, pages, engine, load_s=load_s)

    @cached_property
    def _resident(self) -> StepCost:
        """The judge with all its layers on the GPU."""
        assert self._spec is not None
        assert self._setup.judge_model is not None
        return step_cost(self._setup.judge_model, self._spec.tp, self._setup.cluster, self._setup.calibration)

    @cached_property
    def offloaded_layers(self) -> int:
        """Layers of a colocated judge that stay in host memory."""
        model = self._setup.judge_model
        if self._spec is None or self._colocated is None or model is None:
            return 0
        if self._colocated.offload != "auto":
            return round(self._colocated.offload * model.num_hidden_layers)
        typical = self._spec.prompt_tokens + self._setup.judged_tokens
        batched = self._setup.experiment.engine.max_num_batched_tokens
        return layers_to_offload(model, self._resident, self._setup.cluster.host, batched, typical)

    @property
    def _judge_bytes(self) -> float:
        """What a colocated judge takes of each GPU's memory."""
        model = self._setup.judge_model
        if self._colocated is None or self._spec is None or model is None:
            return 0.0
        setup = self._setup
        return bytes_beside(model, self._spec.tp, setup.experiment, setup.cluster, self.offloaded_layers)

    def _beside_bytes(self, plan: Plan) -> float:
        """The same with models that take responses by the chunk on the generator's GPUs."""
        shared = [(call, plan.of(call.name)) for call in self._streamed if plan.of(call.name).shared]
        engines = (
            bytes_beside(self._setup.models[call.model], tp_of(at), self._setup.experiment, self.cluster)
            for call, at in shared
        )
        return self._judge_bytes + sum(engines)

    @property
    def _resting_bytes(self) -> float:
        """What a judge that rests keeps on each of its own GPUs while log-probs and training run there."""
        spec, model = self._spec, self._setup.judge_model
        if not self.judge_joins or spec is None or model is None:
            return 0.0
        return RESERVED_BYTES + (rollout_weight_bytes(model, spec.tp) if spec.while_training == "resident" else 0.0)

    def record(self) -> dict[str, object] | None:
        """The judge as the manifest has it; None if there is none."""
        if self._spec is None or self._setup.judge_model is None:
            return None
        return {
            "model": self._setup.judge_model.name,
            "tp": self._spec.tp,
            "gpus": len(self.judge_gpus) or len(self.gpus),
            "colocated": self._colocated is not None,
            "while_training": self._spec.while_training if self.judge_joins else "apart" if self.judge_gpus else None,
            "layers_in_host_memory": self.offloaded_layers,
        }

    def training_strategy(self, gpus: int) -> TrainStrategy:
        """How training and log-prob passes are spread over so many GPUs, as the experiment says."""
        training = self._setup.experiment.training
        share = training.tp * training.pp * training.cp
        apart = () if self.judge_joins else self.judge_gpus
        beside = f" ({len(apart)} more are kept for the judge)" if apart else ""
        if gpus % share:
            of = "of the cluster" if gpus == self.cluster.gpus else "that a call is to have"
            raise ConfigError(f"training: tp × pp × cp = {share} does not divide the {gpus} GPUs {of}{beside}")
        if apart and self.cluster.gpus_per_node % min(training.tp, self.cluster.gpus_per_node):
            raise ConfigError(
                f"training.tp {training.tp} does not divide the {self.cluster.gpus_per_node} GPUs of a node that "
                f"workflow.reward.judge leaves ({len(apart)} of the cluster are kept for it)"
            )
        return replace(
            self.style,
            dp=gpus // share,
            tp=training.tp,
            pp=training.pp,
            cp=training.cp,
            sequence_parallel=training.tp > 1,
        )

    @property
    def style(self) -> TrainStrategy:
        """The switches of training: micro-batches, ZeRO stage, recomputation, offload; no degrees."""
        training = self._setup.experiment.training
        default_zero = 3 if training.backend == "fsdp" else 1
        return TrainStrategy(
            micro_batch_tokens=training.micro_batch_tokens,
            zero_stage=default_zero if training.zero_stage is None else training.zero_stage,
            recompute=training.recompute,
            offload=training.offload,
            logits=logits_of(training.backend, training.fused_kernels),
        )

    @cached_property
    def plan(self) -> Plan:
        """Where every call runs. Raises `CapacityError` if a GPU would have to hold more than it can."""
        plan, resting = self.unchecked_plan, self._resting_bytes
        try:
            self.memory.check(plan, self._beside_bytes(plan))
        except CapacityError as error:
            raise CapacityError(f"{error}{self._remedies()}") from None
        try:
            self.memory.check(plan, resting)
        except CapacityError as error:
            other = "offloaded or apart" if self._spec and self._spec.while_training == "resident" else "apart"
            judge = f"{resting / 1e9:.2f} GB of it are the judge's: set workflow.reward.judge.while_training: {other}"
            raise CapacityError(f"{error}; {judge}") from None
        return plan

    def _remedies(self) -> str:
        """Settings under which the call that needs most needs less; none where a search chose the plan."""
        if self._searched:
            return ""
        needs, parts = self._needs(), (self.workflow, self._judge, self._placing, self._streaming)
        call = max(needs, key=needs.__getitem__)
        return advice(self._setup, needs[call], lambda setup: Site(setup, *parts)._needs()[call])

    def _needs(self) -> dict[str, float]:
        """Bytes on the fullest GPU of every call while it runs."""
        plan = self.unchecked_plan
        needs = self.memory.needs(plan, self._beside_bytes(plan))
        return {name: sum(parts.values()) for name, (_, parts) in needs.items()}

    @cached_property
    def unchecked_plan(self) -> Plan:
        """The same before it is known to fit into memory."""
        workflow = self.workflow
        if self._placing is None:
            strategy, kept = self.training_strategy(len(self.gpus)), set(self.judge_gpus)
            generating = tuple(gpu for gpu in self.gpus if gpu not in kept)
            plan = colocated(workflow, self.gpus, strategy, self.reward_placement, generating)
        else:
            plan = self._placing.plan(self.plan_context)
            check_meshes(workflow, plan, self._placeable)
            plan = self._without_idle_syncs(plan)
        return beside_generation(plan, workflow, self._streamed)

    @property
    def _placeable(self) -> Cluster:
        """The cluster, if the GPUs that calls may have are numbered as it does."""
        if self.gpus != tuple(range(len(self.gpus))):
            raise ConfigError(
                f"workflow.reward.judge keeps {len(self.judge_gpus)} GPUs, some of every node: a system that places "
                "its calls needs the judge on whole nodes, or beside the calls"
            )
        return self.cluster

    def _without_idle_syncs(self, plan: Plan) -> Plan:
        """The plan with no GPUs for weight syncs where every GPU has the weights that it needs already."""
        workflow, placements = self.workflow, dict(plan.placements)
        for call in workflow.calls:
            if call.kind == "sync":
                sources, targets = workflow.beside(call.name)
                ends = [plan.of(name) for name in (*sources, *targets)]
                if all(end.strategy is not None for end in ends):
                    time_s = self.calls.reallocation(call.model).time_s
                    source, *others = (layout_of(end) for end in ends)
                    if not any(time_s(source, other) for other in others):
                        placements[call.name] = Placement(())
        return Plan(placements)

    @property
    def placed(self) -> bool:
        """Whether a system says where its calls run."""
        return self._placing is not None

    @cached_property
    def plan_context(self) -> PlanContext:
        """What a placement learns."""
        setup = self._setup
        return PlanContext(
            workflow=self.workflow,
            cluster=setup.cluster,
            gpus=self.gpus,
            models=setup.models,
            training=self.training_strategy,
            style=self.style,
            reward=self.reward_placement,
            check=lambda plan: self.memory.check(plan, self._beside_bytes(plan)),
            search=self._search,
        )

    def _search(self, method: str, evaluations: int, seed: int) -> Plan:
        from rlsim.experiment.planning import PlanSpace

        if not self._setup.search:
            raise SearchAheadError
        self._searched = True
        space = PlanSpace(self._setup, self)
        return space.plan(find_plan(space.problem, method, Budget(evaluations=evaluations), seed=seed).plan)

    @cached_property
    def memory(self) -> PlanMemory:
        """What calls keep on their GPUs."""
        setup = self._setup
        return PlanMemory(self.workflow, setup.models, setup.cluster.gpu, setup.batch)

    @cached_property
    def calls(self) -> CallCosts:
        """Times of inference and training calls."""
        setup, training = self._setup, self._setup.experiment.training
        return CallCosts(setup.models, self.cluster, setup.calibration, training.backend, training.efficiency)

    @cached_property
    def generation(self) -> Placement:
        """Where responses are generated."""
        generate = [call.name for call in self.workflow.calls if call.kind == "generate"]
        return self.plan.of(generate[0]) if generate else Placement(self.gpus)  # none: responses are given

    @cached_property
    def rollout_cluster(self) -> Cluster:
        """The GPUs that generate, as a cluster."""
        groups = self.generation.nodes(self._setup.cluster)
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise ConfigError(f"generation has {sizes} GPUs on different nodes; as many of each node are needed")
        return self._setup.cluster.model_copy(update={"nodes": len(groups), "gpus_per_node": sizes.pop()})

    @cached_property
    def machine(self) -> Machine:
        """Times and sizes of the rollout; made once, since look-ups are cached in it."""
        setup, engine, share = self._setup, self._setup.experiment.engine, self.generation.memory_share
        resident_bytes = self.memory.resident_bytes(self.plan, self.generation.gpus) + self._beside_bytes(self.plan)
        return Machine(
            setup.model,
            self.rollout_cluster,
            setup.calibration,
            page_tokens=engine.page_tokens,
            max_batched_tokens=engine.max_num_batched_tokens,
            max_sequences=engine.max_num_seqs,
            memory_utilization=setup.experiment.memory_utilization if share is None else share,
            sampling_s_per_logit=engine.sampling_per_logit,
            pp=1 if self.generation.strategy is None else self.generation.strategy.pp,
            resident_bytes=resident_bytes if share is None else 0.0,  # the share is there, or the plan does not fit
        )

    @cached_property
    def context(self) -> ControlContext:
        """What policies learn before a run."""
        experiment, workflow = self._setup.experiment, self._setup.experiment.workflow
        prompt_tokens = self._setup.longest_prompt
        planned = self.generation.strategy
        replica = None if planned is None else planned.tp * planned.pp
        if any(call.kind == "generate" for call in self.workflow.calls):
            feasible, infeasible = self.machine.feasible_tps(prompt_tokens + experiment.trace.cap, replica)
        else:
            feasible, infeasible = (1,), {}  # responses are given: one layout is as good as another
        mesh = self.generation.rollout_mesh(self._setup.cluster)
        left, whole = len(mesh[0]), self._setup.cluster.gpus_per_node
        for tp in (1 << i for i in range(whole.bit_length())):
            if whole % tp == 0 and left % tp and planned is None:
                who = "workflow.reward.judge leaves" if self._placing is None else "generation has"
                infeasible[tp] = f"TP {tp} does not divide the {left} GPUs of a node that {who}"
        if not feasible and replica is not None:
            gpu = self.memory.fullest_resident(self.plan, self.generation.gpus)
            raise CapacityError(f"call generate does not fit on GPU {gpu}: {infeasible[replica]}")
        if not feasible:
            raise CapacityError(
                "no TP degree is feasible:\n" + "\n".join(f"TP{tp}: {why}" for tp, why in infeasible.items())
            )
        return ControlContext(
            costs=self.machine,
            feasible_tps=feasible,
            infeasible=infeasible,
            gpus_per_node=left,
            nodes=len(mesh),
            cap_tokens=experiment.trace.cap,
            page_tokens=experiment.engine.page_tokens,
            requests=workflow.prompts * workflow.responses,
            prompt_tokens=prompt_tokens,
            max_num_seqs=experiment.engine.max_num_seqs,
            replica_gpus=replica,
        )

    @cached_property
    def bound(self) -> GenerationBound:
        """The generation stage at best."""
        steps = {tp: self.machine.step(tp) for tp in self.context.feasible_tps}
        return GenerationBound(
            steps, self.rollout_cluster.gpus, min(self.context.requests, self._setup.experiment.engine.max_num_seqs)
        )

    @cached_property
    def reward_placement(self) -> Placement:
        """Where reward calls run: on CPUs, on the judge's own GPUs, or beside the other calls."""
        if self._spec is None:
            return Placement(())
        if self._colocated is not None:
            return Placement(self.gpus, shared=True)
        return Placement(self.judge_gpus)

    def lookups(self) -> Lookups:
        """The shapes that the rollout, training and the judge asked for."""
        for crowded in self._crowded_steps.values():
            crowded.lookups()  # tells the machine's own curves how far they were followed
        judge = [self.judge.crowded.lookups()] if self.judge else []
        return self.machine.lookups().merge([self.calls.lookups(), *judge])

    def crowded(self, tp: int) -> StepCost:
        """A rollout replica's steps while a colocated judge, or a model that takes chunks, works on its GPUs."""
        if tp not in self._crowded_steps:
            beside = (self._colocated, self._streaming)
            factor = max(part.slowdown if part else 1.0 for part in beside)
            self._crowded_steps[tp] = Crowded(self.machine.step(tp), factor)
        return self._crowded_steps[tp]

    @cached_property
    def _crowded_steps(self) -> dict[int, StepCost]:
        return {}


def layout_of(placement: Placement, rollout_tp: int = 1) -> Layout:
    """The mesh and degrees of a call; those of generation are its TP where the plan does not say them."""
    first, gpus = placement.gpus[0], len(placement.gpus)
    if placement.gpus != tuple(range(first, first + gpus)):
        raise ConfigError(f"a plan with several placements needs neighbouring GPUs, got {placement.gpus}")
    return Layout.of(first, placement.strategy or TrainStrategy(dp=gpus // rollout_tp, tp=rollout_tp))

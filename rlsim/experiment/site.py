"""Where a system runs: the GPUs of its calls, the judge's, and what they make of an experiment's costs and limits."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rlsim.cost.bound import GenerationBound
from rlsim.cost.lookups import Lookups
from rlsim.cost.machine import Machine
from rlsim.cost.memory import rollout_memory, rollout_weight_bytes
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import Crowded, Streamed, layers_to_offload, stream_s
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.hardware import Cluster
from rlsim.models import load_model
from rlsim.policies.parts import JudgePlacement
from rlsim.sim.control import ControlContext
from rlsim.sim.simulation import Judge
from rlsim.workflow import Placement

if TYPE_CHECKING:
    from rlsim.experiment.build import Setup

#: Share of GPU memory that a colocated judge's engine may use beside its resident weights, for its own KV cache.
JUDGE_KV_SHARE = 0.05


class Site:
    """One experiment with its judge, if it has one, on GPUs of its own (`colocated` None) or beside the other calls.

    Raises `RlsimError`s that say what does not fit.
    """

    def __init__(self, setup: Setup, colocated: JudgePlacement | None) -> None:
        self._setup = setup
        self._spec = setup.experiment.workflow.reward.judge if setup.scoring.judged else None
        self._colocated = colocated if self._spec else None

    @cached_property
    def judge_gpus(self) -> tuple[int, ...]:
        """GPUs kept for the judge: whole nodes, the last ones, or else the last GPUs of every node."""
        if self._spec is None or self._colocated is not None:
            return ()
        whole = self._setup.cluster
        count = round(self._spec.reserved * whole.gpus)
        kept = f"workflow.reward.judge: {self._spec.reserved:g} of {whole.gpus} GPUs are {count}"
        if not 0 < count < whole.gpus or count % self._spec.tp:
            raise ConfigError(f"{kept}, no whole number of judges of TP {self._spec.tp} beside the other calls")
        if count % whole.gpus_per_node == 0:
            return tuple(range(whole.gpus - count, whole.gpus))
        each, over = divmod(count, whole.nodes)
        if over or each % self._spec.tp:
            raise ConfigError(
                f"{kept}, neither whole nodes of {whole.gpus_per_node} nor as many of each of the {whole.nodes} nodes"
            )
        return tuple(g for g in range(whole.gpus) if g % whole.gpus_per_node >= whole.gpus_per_node - each)

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of all calls but a judge's own."""
        return tuple(sorted(set(range(self._setup.cluster.gpus)) - set(self.judge_gpus)))

    @cached_property
    def cluster(self) -> Cluster:
        """What these GPUs are as a cluster."""
        whole, gpus = self._setup.cluster, len(self.gpus)
        if not self.judge_gpus:
            return whole
        nodes = len({whole.node_of(gpu) for gpu in self.gpus})
        return whole.model_copy(update={"nodes": nodes, "gpus_per_node": gpus // nodes})

    @cached_property
    def judge(self) -> Judge | None:
        """The judge's engine; None if no response is to be judged."""
        spec, whole = self._spec, self._setup.cluster
        if spec is None:
            return None
        experiment, model = self._setup.experiment, load_model(spec.model)
        engine = experiment.engine
        resident: StepCost = step_cost(model, spec.tp, whole, self._setup.calibration)
        cost = resident
        if self._colocated is not None:
            layers = self._offloaded(resident)
            cost = Streamed(resident, stream_s(model, layers, spec.tp, whole.host))
            pages = int(
                JUDGE_KV_SHARE * whole.gpu.memory_bytes * spec.tp / (model.kv_bytes_per_token * engine.page_tokens)
            )
        else:
            pages = rollout_memory(
                model,
                whole.gpu,
                spec.tp,
                page_tokens=engine.page_tokens,
                memory_utilization=experiment.memory_utilization,
                max_batched_tokens=engine.max_num_batched_tokens,
                max_sequences=engine.max_num_seqs,
            ).pages
        longest = self._setup.longest_prompt + experiment.trace.cap + spec.prompt_tokens + self._setup.longest_answer
        if pages * engine.page_tokens < longest:
            raise CapacityError(
                f"workflow.reward.judge: {model.name} at TP {spec.tp} has room for {pages * engine.page_tokens} tokens "
                f"of KV cache, a response to judge may need {longest}"
            )
        crowded = Crowded(cost, self._colocated.slowdown) if self._colocated else cost
        return Judge(spec.tp, cost, crowded, pages, engine)

    def _offloaded(self, resident: StepCost) -> int:
        """Layers of a colocated judge that stay in host memory."""
        assert self._spec is not None
        assert self._colocated is not None
        model, setup = load_model(self._spec.model), self._setup
        if self._colocated.offload != "auto":
            return round(self._colocated.offload * model.num_hidden_layers)
        typical = self._spec.prompt_tokens + setup.mean_tokens
        return layers_to_offload(
            model, resident, setup.cluster.host, setup.experiment.engine.max_num_batched_tokens, typical
        )

    @property
    def _beside_bytes(self) -> float:
        """What a colocated judge takes of each rollout GPU's memory."""
        if self._colocated is None or self._spec is None:
            return 0.0
        whole, model = self._setup.cluster, load_model(self._spec.model)
        kept = (
            1
            - self._offloaded(step_cost(model, self._spec.tp, whole, self._setup.calibration)) / model.num_hidden_layers
        )
        return rollout_weight_bytes(model, self._spec.tp) * kept + JUDGE_KV_SHARE * whole.gpu.memory_bytes

    @cached_property
    def machine(self) -> Machine:
        """Times and sizes; made once, since look-ups are cached in it."""
        setup = self._setup
        experiment, engine, training = setup.experiment, setup.experiment.engine, setup.experiment.training
        share = training.tp * training.pp * training.cp
        if self.cluster.gpus % share:
            beside = f" ({len(self.judge_gpus)} more are kept for the judge)" if self.judge_gpus else ""
            raise ConfigError(
                f"training: tp × pp × cp = {share} does not divide the {self.cluster.gpus} GPUs of the cluster{beside}"
            )
        default_zero = 3 if training.backend == "fsdp" else 1
        train = TrainStrategy(
            dp=self.cluster.gpus // share,
            tp=training.tp,
            pp=training.pp,
            cp=training.cp,
            micro_batch_tokens=training.micro_batch_tokens,
            zero_stage=default_zero if training.zero_stage is None else training.zero_stage,
            recompute=training.recompute,
            offload=training.offload,
            sequence_parallel=training.tp > 1,
        )
        return Machine(
            setup.model,
            self.cluster,
            setup.calibration,
            train=train,
            inference=train,
            backend=training.backend,
            train_efficiency=training.efficiency,
            page_tokens=engine.page_tokens,
            max_batched_tokens=engine.max_num_batched_tokens,
            max_sequences=engine.max_num_seqs,
            memory_utilization=experiment.memory_utilization,
            beside_bytes=self._beside_bytes,
        )

    @cached_property
    def context(self) -> ControlContext:
        """What policies learn before a run."""
        experiment, workflow = self._setup.experiment, self._setup.experiment.workflow
        prompt_tokens = self._setup.longest_prompt
        feasible, infeasible = self.machine.feasible_tps(prompt_tokens + experiment.trace.cap)
        if not feasible:
            raise CapacityError(
                "no TP degree is feasible:\n" + "\n".join(f"TP{tp}: {why}" for tp, why in infeasible.items())
            )
        return ControlContext(
            costs=self.machine,
            feasible_tps=feasible,
            infeasible=infeasible,
            gpus_per_node=self.cluster.gpus_per_node,
            nodes=self.cluster.nodes,
            cap_tokens=experiment.trace.cap,
            page_tokens=experiment.engine.page_tokens,
            requests=workflow.prompts * workflow.responses,
            prompt_tokens=prompt_tokens,
        )

    @cached_property
    def bound(self) -> GenerationBound:
        """The generation stage at best."""
        steps = {tp: self.machine.step(tp) for tp in self.context.feasible_tps}
        return GenerationBound(
            steps, self.cluster.gpus, min(self.context.requests, self._setup.experiment.engine.max_num_seqs)
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
        return self.machine.lookups().merge([self.judge.cost.lookups()] if self.judge else [])

    def crowded(self, tp: int) -> StepCost:
        """A rollout replica's steps while a colocated judge has work on its GPUs."""
        if tp not in self._crowded_steps:
            factor = self._colocated.slowdown if self._colocated else 1.0
            self._crowded_steps[tp] = Crowded(self.machine.step(tp), factor)
        return self._crowded_steps[tp]

    @cached_property
    def _crowded_steps(self) -> dict[int, StepCost]:
        return {}

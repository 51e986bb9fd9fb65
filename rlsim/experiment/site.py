"""Where a system runs: the GPUs of its calls, the judge's, and what they make of an experiment's costs and limits."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rlsim.cost.bound import GenerationBound
from rlsim.cost.lookups import Lookups
from rlsim.cost.machine import Machine
from rlsim.cost.memory import kv_page_bytes, rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.sharing import Crowded, Streamed, judge_bytes, layers_to_offload, stream_s
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.scorers import bytes_beside
from rlsim.hardware import Cluster
from rlsim.policies.parts import ChunkStreaming, JudgePlacement
from rlsim.sim.control import ControlContext
from rlsim.sim.simulation import Judge
from rlsim.workflow import Call, Placement

if TYPE_CHECKING:
    from rlsim.experiment.build import Setup

#: Share of GPU memory that a colocated judge's engine may use beside its resident weights, for its own KV cache.
JUDGE_KV_SHARE = 0.05

#: Sequences whose next token a colocated judge samples at once: its logits are no larger.
JUDGE_SEQUENCES = 64


class Site:
    """One experiment with its judge, if it has one, on GPUs of its own (`colocated` None) or beside the other calls.

    `streamed` are calls that take responses by the chunk, as `streaming` says, on the GPUs of the others. Raises
    `RlsimError`s that say what does not fit.
    """

    def __init__(
        self,
        setup: Setup,
        colocated: JudgePlacement | None,
        streaming: ChunkStreaming | None = None,
        streamed: tuple[Call, ...] = (),
    ) -> None:
        self._setup = setup
        self._streaming, self._streamed = streaming, streamed
        self._spec = setup.experiment.workflow.reward.judge if setup.scoring.judged.any() else None
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
        spec, model, whole = self._spec, self._setup.judge_model, self._setup.cluster
        if spec is None or model is None:
            return None
        experiment, engine = self._setup.experiment, self._setup.experiment.engine
        cost, slowdown = self._resident, 1.0
        if self._colocated is not None:
            cost = Streamed(cost, stream_s(model, self.offloaded_layers, spec.tp, whole.host))
            slowdown = self._colocated.slowdown
            page_bytes = kv_page_bytes(model, spec.tp, engine.page_tokens)
            pages = int(JUDGE_KV_SHARE * whole.gpu.memory_bytes / page_bytes)
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
        return Judge(spec.tp, cost, Crowded(cost, slowdown), slowdown, pages, engine)

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
    def _beside_bytes(self) -> float:
        """What a colocated judge, and models that take responses by the chunk, take of each GPU's memory."""
        model, engine = self._setup.judge_model, self._setup.experiment.engine
        experiment, tp = self._setup.experiment, self._setup.experiment.training.tp
        streamed = [bytes_beside(self._setup.model_of(c), tp, experiment, self.cluster) for c in self._streamed]
        if self._colocated is None or self._spec is None or model is None:
            return sum(streamed)
        kv_bytes = JUDGE_KV_SHARE * self._setup.cluster.gpu.memory_bytes
        layers, batched = self.offloaded_layers, engine.max_num_batched_tokens
        return kv_bytes + judge_bytes(model, layers, self._spec.tp, batched, JUDGE_SEQUENCES) + sum(streamed)

    def record(self) -> dict[str, object] | None:
        """The judge as the manifest has it; None if there is none."""
        if self._spec is None or self._setup.judge_model is None:
            return None
        return {
            "model": self._setup.judge_model.name,
            "tp": self._spec.tp,
            "gpus": len(self.judge_gpus) or len(self.gpus),
            "colocated": self._colocated is not None,
            "layers_in_host_memory": self.offloaded_layers,
        }

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
        if self.judge_gpus and self.cluster.gpus_per_node % min(training.tp, self.cluster.gpus_per_node):
            raise ConfigError(
                f"training.tp {training.tp} does not divide the {self.cluster.gpus_per_node} GPUs of a node that "
                f"workflow.reward.judge leaves ({len(self.judge_gpus)} of the cluster are kept for it)"
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
        left, whole = self.cluster.gpus_per_node, self._setup.cluster.gpus_per_node
        for tp in (1 << i for i in range(whole.bit_length())):
            if whole % tp == 0 and left % tp:
                infeasible[tp] = f"TP {tp} does not divide the {left} GPUs of a node that workflow.reward.judge leaves"
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
        for crowded in self._crowded_steps.values():
            crowded.lookups()  # tells the machine's own curves how far they were followed
        return self.machine.lookups().merge([self.judge.crowded.lookups()] if self.judge else [])

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

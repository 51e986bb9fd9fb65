"""What an experiment file may say. Every field has a unit or meaning; the reference page is made from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlsim.base.schema import Name, Schema, name_of, placed
from rlsim.cost.assumed import PLAIN_COSTS, AssumedCosts
from rlsim.cost.strategy import (
    AttentionKernel,
    GradientType,
    HostMemory,
    Logits,
    Packing,
    Recompute,
    attention_of,
    logits_of,
)
from rlsim.cost.weight_sync import SyncMethod
from rlsim.errors import shown, unknown_name
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import EngineConfig
from rlsim.units import BytesPerSecond, Seconds, Tokens
from rlsim.workflow.graph import CallKind, Grain

#: Steps of one run.
MOST_STEPS = 100_000
#: A seed is at most this, and these are the most seeds.
LARGEST_SEED = 2**32 - 1
MOST_SEEDS = 10_000


class TraceSpec(Schema):
    """Which response lengths are replayed."""

    path: str | tuple[str, ...] | None = Field(
        default=None,
        description="trace file, or the name of one that ships with rlsim; several are mixed prompt by prompt",
    )
    fixed: Annotated[Tokens, Field(ge=1)] | None = Field(
        default=None, description="instead of a file: every response that long, every prompt `default_prompt_tokens`"
    )
    cap: Annotated[Tokens, Field(ge=1)] = Field(
        description="maximum response length, tokens (K = 1,024); longer ones are cut"
    )
    max_model_len: Annotated[Tokens, Field(ge=1)] | None = Field(
        default=None,
        description="longest prompt and response together, tokens, where a response is cut as well: vLLM's setting of "
        "that name, NeMo-RL's max_total_sequence_length",
    )
    default_prompt_tokens: Annotated[Tokens, Field(ge=1)] = Field(
        default=256, description="prompt length where the trace has none, tokens"
    )
    scale: float = Field(default=1.0, gt=0, le=1000, description="every response so many times as long, before the cap")
    prompt_scale: float = Field(default=1.0, gt=0, le=1000, description="every prompt so many times as long")


class JudgeSpec(Schema):
    """The LLM that judges responses whose trace has `judge_tokens`."""

    model: str = Field(default="qwen2.5-7b", description="a model of the catalogue, or a config.json")
    tp: int = Field(default=1, ge=1, le=1024, description="tensor-parallel degree of one judge")
    reserved: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="share of the GPUs that judge and do not generate, unless a system colocates the judge",
    )
    while_training: Literal["offloaded", "resident", "apart"] = Field(
        default="offloaded",
        description="what these GPUs do when all is scored. offloaded: they join log-probs and training, the judge's "
        "weights wait in host memory until the next generation begins; resident: they join, its weights stay; "
        "apart: nothing",
    )
    prompt_tokens: Annotated[Tokens, Field(ge=0)] = Field(
        default=512, description="instructions and reference answer that stand around prompt and response (assumed)"
    )


class RewardSpec(Schema):
    """How responses are scored: by a check, test cases in a sandbox, or a judge, as the trace's columns say.

    A response with `judge_tokens` goes to the judge, one with `test_run_s` to the sandbox, any other to a check of
    `reward_time_s`, or `time_per_response` where the trace has none.
    """

    order: Literal["before_log_probs", "beside_log_probs"] | None = Field(
        default=None,
        description="before_log_probs: log-probs and values wait for all rewards, as in veRL's trainer; "
        "beside_log_probs: they do not, as with its launch_reward_fn_async. Default of an algorithm by name: "
        "before_log_probs; of a graph of your own its edges say it",
    )
    from_trace: bool = Field(
        default=True,
        description="take run times, test cases and judges from the trace; false: only check each response",
    )
    time_per_response: Seconds = Field(default=0.01, ge=0, description="CPU time of one check, s (assumed: 10 ms)")
    workers: int = Field(
        default=16, ge=1, le=1_000_000, description="CPU workers: checks and sandboxes that run at once"
    )
    timeout: Annotated[Seconds, Field(gt=0)] = Field(default=2.0, description="a check is ended then, s")
    sandbox_timeout: Annotated[Seconds, Field(gt=0)] = Field(default=30.0, description="a test case is ended then, s")
    judge: JudgeSpec | None = Field(default=None, description="needed if the trace has responses to judge")


class CallSpec(Schema):
    """A call of a workflow of your own."""

    name: Name = Field(description="names it in edges, plans and results")
    kind: CallKind = Field(description="generate, inference, train, reward (outside models) or sync (of new weights)")
    model: str = Field(description="the role of its model: actor, or one of `models`")


class EdgeSpec(Schema):
    """`target` needs what `source` makes."""

    source: str = Field(description="a call")
    target: str = Field(description="a call")
    lag: int = Field(default=0, ge=0, le=1000, description="of so many steps before")
    exact: bool = Field(
        default=False,
        description="sync to generate: weights of just so many steps before, even if newer ones are there",
    )
    grain: Grain = Field(default="stage", description="stage: all of it; sample: each response as it is done")
    barrier: bool = Field(
        default=False, description="only the order: `target` waits for `source`, unless a system overlaps the two"
    )


class WorkflowSpec(Schema):
    """The RL algorithm and its batch."""

    algorithm: str = Field(
        default="grpo",
        description="grpo, ppo, remax, dpo, online_dpo, custom (`calls` and `edges`) or a module:function",
    )
    calls: tuple[CallSpec, ...] = Field(default=(), description="of a custom workflow")
    edges: tuple[EdgeSpec, ...] = Field(default=(), description="of a custom workflow; `a -> b` for short")
    group_advantage: bool = Field(
        default=False, description="custom workflow: training takes all responses to a prompt together, as in GRPO"
    )
    prompts: int = Field(ge=1, le=1_000_000, description="prompts per step; with all responses at most 1,000,000")
    responses: int = Field(ge=1, le=10_000, description="responses per prompt")
    steps: int = Field(ge=1, le=MOST_STEPS, description="training steps to simulate")
    warmup: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="first steps that no mean counts; default: until what the first step began has been trained on",
    )
    steps_at_cap: bool = Field(
        default=False, description="means count only steps that train on a response which reaches the cap"
    )
    reference: bool = Field(default=True, description="whether a frozen reference model scores the responses (KL term)")
    old_log_probs: bool | None = Field(
        default=None, description="whether the trainer computes the old policy's log-probs anew; default: in grpo"
    )
    reward: RewardSpec = RewardSpec()

    @property
    def batch(self) -> int:
        """Responses that a step trains on."""
        return self.prompts * self.responses

    @field_validator("edges", mode="before")
    @classmethod
    def _arrows(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [_edge(item) if isinstance(item, str) else item for item in value]


def _edge(text: str) -> dict[str, str]:
    source, arrow, target = (part.strip() for part in text.partition("->"))
    if not arrow or not source or not target:
        raise ValueError(f"expected an edge such as `generate -> train`, got {shown(text)}")
    return {"source": source, "target": target}


class TrainingSpec(Schema):
    """How training and log-prob passes run on their GPUs; data parallelism takes what TP and PP leave."""

    backend: Literal["fsdp", "megatron", "torch"] = Field(
        default="fsdp", description="framework; sets the fitted efficiency (torch: own products, of `rlsim calibrate`)"
    )
    efficiency: float | None = Field(
        default=None, gt=0, le=1, description="share of the peak that linear layers reach; default: the calibration's"
    )
    precision: Literal["bf16", "fp8", "fp8_block"] = Field(
        default="bf16",
        description="of the layers' matrix products, in all three passes and log-probs; states, and what is sent, stay "
        "as they are. What FP8 saves is what the engine's kernels save at such sizes: not measured in training",
    )
    tp: int = Field(default=1, ge=1, le=1024, description="tensor-parallel degree")
    pp: int = Field(default=1, ge=1, le=1024, description="pipeline-parallel degree")
    cp: int = Field(default=1, ge=1, le=1024, description="context-parallel degree")
    ep: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="expert-parallel degree: so many GPUs of a pipeline stage (of TP, CP or DP) share the experts",
    )
    expert_tp: int | None = Field(
        default=None, ge=1, le=1024, description="tensor-parallel degree of an expert; default: tp if ep is 1, else 1"
    )
    expert_imbalance: float = Field(
        default=1.0,
        ge=1,
        le=1024,
        description="tokens of the busiest GPU's experts over the mean of all that share experts; 1 is balanced",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        default=None, description="ZeRO stage; default 3 for fsdp, 1 for megatron"
    )
    micro_batch_tokens: Annotated[Tokens, Field(ge=1)] = Field(
        default=16384, description="token budget of a micro-batch on one data-parallel rank"
    )
    log_prob_micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = Field(
        default=None, description="the same of log-prob calls; default: as of training"
    )
    micro_batch_sequences: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="instead of a budget so many sequences, in their order (veRL without `use_dynamic_bsz`, NeMo-RL "
        "without packing): time is that of the lengths drawn, memory is checked as docs/costs.md says",
    )
    log_prob_micro_batch_sequences: int | None = Field(
        default=None, ge=1, le=1_000_000, description="the same of log-prob calls; default: as of training"
    )
    shard_gpus: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="HSDP (veRL's `fsdp_size`): neighbouring GPUs that share the states of training; default: all",
    )
    gradients: GradientType = Field(
        default="fp32", description="type in which gradients are accumulated and reduced over GPUs"
    )
    recompute: Recompute = Field(default="full", description="activation recomputation")
    packing: Packing = Field(
        default="balanced",
        description="sequences into micro-batches by token budget. balanced: those of a rank, of nearly equal work "
        "(veRL); first_fit: longest first, each where it has room, padded to the longest where there are pipeline "
        "stages (NeMo-RL's sequence_packing)",
    )
    logits: Logits | None = Field(
        default=None,
        description="what log-probs are computed from: all logits of a micro-batch in bf16 (veRL's FSDP) or fp32 "
        "(Megatron's cross entropy), by torch's own log_softmax (NeMo-RL's DTensor), or fused: by chunks of tokens, "
        "never all at once (veRL's `use_fused_kernels`); default: bf16 under fsdp, fp32 under megatron",
    )
    attention: AttentionKernel | None = Field(
        default=None,
        description="attention kernel: flash_attention_2 has none of Hopper's or Blackwell's instructions and reaches "
        "35% of an H100's peak; flash_attention_3, or cudnn (Transformer Engine); default: flash_attention_2 under "
        "fsdp, as Hugging Face's models and veRL have it, cudnn under megatron",
    )
    driver_per_token: Seconds = Field(
        default=0.0,
        ge=0,
        le=1e-3,
        description="time that a single controller takes for each log-prob and training call to hand its batch to the "
        "ranks and take the outputs back, s per token of the padded batch (every sequence as long as the longest "
        "prompt and the cap together); veRL: 0.2 us",
    )
    offload: bool = Field(default=False, description="keep weights and optimizer states in host memory between calls")
    host_memory: HostMemory = Field(
        default="pinned",
        description="of the optimizer's states with `offload`: pinned, or pageable and allocated anew each time, which "
        "takes 1.8 GB/s of a GPU (NeMo-RL's Megatron worker)",
    )
    cpu_optimizer: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the optimizer's states that stay in host memory and step on the CPU (Megatron's "
        "`optimizer_cpu_offload`)",
    )
    cpu_optimizer_rate: BytesPerSecond = Field(
        default=2e11, gt=0, description="memory traffic of that step on a node, bytes/s (assumed)"
    )
    mini_batches: int = Field(default=1, ge=1, le=10_000, description="optimizer steps per training step")
    epochs: int = Field(default=1, ge=1, le=1000, description="passes over a step's batch")

    @property
    def kinds(self) -> dict[str, Any]:
        """ZeRO stage, attention kernel and logits: as given, or the backend's own."""
        attention, logits = self.attention or attention_of(self.backend), self.logits or logits_of(self.backend)
        return {"zero_stage": self.stage, "attention": attention, "logits": logits}

    @property
    def stage(self) -> int:
        """The ZeRO stage: as given, or the backend's own."""
        default = 3 if self.backend == "fsdp" else 1
        return default if self.zero_stage is None else self.zero_stage


def _numbers_in(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number with a fraction at any depth, and its key path."""
    if isinstance(value, float):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _numbers_in(item, f"{path}.{key}".lstrip("."))


class Experiment(Schema):
    """One experiment file."""

    name: Name = Field(description="names the results")
    description: str = Field(default="", description="what it asks, in a sentence")
    framework: str = Field(default="", description="whose configuration `rlsim init` made it of, such as `veRL 0.9`")
    cluster: str | dict[str, Any] = Field(
        description="a cluster of the catalogue, several kinds joined by `+`, or one spelled out"
    )
    model: str = Field(description="a model of the catalogue, or the path of a Hugging Face config.json")
    models: dict[Name, str] = Field(
        default={},
        description="models beside the actor, by role (reference, critic, reward), as `model` names them; default: "
        "reference and critic like the actor, and responses scored by no model",
    )
    calibration: str | dict[str, str] = Field(
        description="<gpu>-<engine>: kernels, links and host time; where a cluster has several kinds of GPU one for "
        "each, by GPU: `{h20: h20-vllm, h800: h800-vllm}`"
    )
    engine: EngineConfig = EngineConfig()
    memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of GPU memory for the rollout engine, as that counts it"
    )
    routing: Literal["contiguous", "round_robin"] = Field(
        default="contiguous", description="how a step's responses are dealt to the replicas; veRL: contiguous"
    )
    weight_sync: SyncMethod = Field(
        default="bucketed",
        description="how new weights reach the rollout engine. naive: tensor by tensor; bucketed: in buckets, by CUDA "
        "IPC on the same GPUs, by an NCCL broadcast of one GPU elsewhere; multi_sender: that broadcast by all ports of "
        "the sender's node; checkpoint_engine: buckets by way of the trainers' host memory; reshard: every GPU takes "
        "what it lacks from where it is, without an engine that loads it (REAL; generation in the trainer's process)",
    )
    trace: TraceSpec
    environment: EnvironmentConfig = EnvironmentConfig()
    workflow: WorkflowSpec
    training: TrainingSpec = TrainingSpec()
    costs: AssumedCosts = PLAIN_COSTS
    seeds: Annotated[int, Field(le=MOST_SEEDS)] | tuple[Annotated[int, Field(le=LARGEST_SEED)], ...] = Field(
        default=5, description=f"number of seeds, or the seeds themselves (at most {MOST_SEEDS:,})"
    )
    certainty: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="worlds to draw from the calibration's errors on settings that no fit has seen; every system runs "
        "a seed in each, which gives speedups an interval of the model beside that of the seeds (2 or more; 0: none). "
        "Default: as many as there are seeds, where two or more seeds and systems are compared; none otherwise, in a "
        "sweep and where `draw` is given",
    )
    draw: int = Field(
        default=0, ge=0, le=1_000_000, description="the world to run in, by number; 0: the calibration as it was fitted"
    )
    baseline: str | None = Field(default=None, description="system that speedups refer to; default: the first")
    systems: tuple[Any, ...] = Field(min_length=1, description="what is compared; see docs/experiments.md")
    cases: dict[str, Any] = Field(
        default={}, description="settings to repeat everything under: name -> {key.path: value}"
    )
    sources: dict[str, tuple[str, ...]] = Field(
        default={},
        description="whose values these are: `assumed: [trace.path]`, `veRL 0.9's default: [training.recompute]`; "
        "what is not listed is given by you. Of keys that cover a value the longest counts",
    )

    @field_validator("systems", mode="before")
    @classmethod
    def _with_places(cls, value: Any) -> Any:
        return placed(value)

    @field_validator("systems")
    @classmethod
    def _finite(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        for key, number in _numbers_in(value):
            if not math.isfinite(number):  # JSON has none: records and sweeps would hold something else
                raise ValueError(f"{key} is {number}; parameters are finite numbers")
        return value

    @field_validator("cases")
    @classmethod
    def _cases_are_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, settings in value.items():
            name_of(name)
            if not isinstance(settings, Mapping):
                raise ValueError(f"case {name!r}: expected settings such as {{trace.cap: 8K}}, got {shown(settings)}")
        return value

    @field_validator("sources")
    @classmethod
    def _sources_of_keys(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for key in itertools.chain.from_iterable(value.values()):
            if (first := key.partition(".")[0]) not in cls.model_fields:
                raise ValueError(str(unknown_name("key", first, cls.model_fields)))
        return value

    @property
    def seed_list(self) -> tuple[int, ...]:
        """The seeds themselves: 0, 1, … unless they are given."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def calibration_names(self) -> tuple[str, ...]:
        """The calibration, or those of all kinds of GPU, as they are given."""
        return (self.calibration,) if isinstance(self.calibration, str) else tuple(self.calibration.values())

    def worlds(self, systems: int) -> int:
        """How many worlds a run draws in which at most so many systems are compared with each other."""
        if self.certainty is not None:
            return self.certainty
        seeds = len(self.seed_list)
        return seeds if seeds > 1 and systems > 1 and not self.draw else 0

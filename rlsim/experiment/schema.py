"""What an experiment file may say. What its fields mean are rows of `rlsim/data/meanings.csv`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlsim.base.schema import Name, Schema, name_of, placed
from rlsim.cost.assumed import PLAIN_COSTS, AssumedCosts
from rlsim.cost.strategy import (
    EXPERT_IMBALANCE,
    AttentionKernel,
    ContextParallel,
    GradientType,
    HostMemory,
    Logits,
    Packing,
    Recompute,
    WeightType,
    attention_of,
    context_parallel_of,
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

    path: str | tuple[str, ...] | None = None
    fixed: Annotated[Tokens, Field(ge=1)] | None = None
    cap: Annotated[Tokens, Field(ge=1)]
    max_model_len: Annotated[Tokens, Field(ge=1)] | None = None
    max_prompt_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    default_prompt_tokens: Annotated[Tokens, Field(ge=1)] = 256
    scale: float = Field(default=1.0, gt=0, le=1000)
    prompt_scale: float = Field(default=1.0, gt=0, le=1000)


class JudgeSpec(Schema):
    """The LLM that judges responses whose trace has `judge_tokens`."""

    model: str = "qwen2.5-7b"
    tp: int = Field(default=1, ge=1, le=1024)
    reserved: float = Field(default=0.25, gt=0, lt=1)
    while_training: Literal["offloaded", "resident", "apart"] = "offloaded"
    prompt_tokens: Annotated[Tokens, Field(ge=0)] = 512


class RewardSpec(Schema):
    """How responses are scored: by a check, test cases in a sandbox, or a judge, as the trace's columns say.

    A response with `judge_tokens` goes to the judge, one with `test_run_s` to the sandbox, any other to a check of
    `reward_time_s`, or `time_per_response` where the trace has none.
    """

    order: Literal["before_log_probs", "beside_log_probs"] | None = None
    from_trace: bool = True
    time_per_response: Seconds = Field(default=0.01, ge=0)
    workers: int = Field(default=16, ge=1, le=1_000_000)
    timeout: Annotated[Seconds, Field(gt=0)] = 2.0
    sandbox_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    judge: JudgeSpec | None = None


class CallSpec(Schema):
    """A call of a workflow of your own."""

    name: Name
    kind: CallKind
    model: str
    responses: int | None = Field(default=None, ge=0, le=10_000)
    baselines: int = Field(default=0, ge=0, le=10_000)


class EdgeSpec(Schema):
    """`target` needs what `source` makes."""

    source: str
    target: str
    lag: int = Field(default=0, ge=0, le=1000)
    exact: bool = False
    grain: Grain = "stage"
    barrier: bool = False


class WorkflowSpec(Schema):
    """The RL algorithm and its batch."""

    algorithm: str = "grpo"
    calls: tuple[CallSpec, ...] = ()
    edges: tuple[EdgeSpec, ...] = ()
    group_advantage: bool = False
    prompts: int = Field(ge=1, le=1_000_000)
    responses: int = Field(ge=1, le=10_000)
    steps: int = Field(ge=1, le=MOST_STEPS)
    warmup: int | None = Field(default=None, ge=0, le=100_000)
    steps_at_cap: bool = False
    reference: bool = True
    old_log_probs: bool | None = None
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

    backend: Literal["fsdp", "megatron", "torch"] = "fsdp"
    efficiency: float | None = Field(default=None, gt=0, le=1)
    precision: Literal["bf16", "fp8", "fp8_block"] = "bf16"
    tp: int = Field(default=1, ge=1, le=1024)
    pp: int = Field(default=1, ge=1, le=1024)
    cp: int = Field(default=1, ge=1, le=1024)
    ep: int = Field(default=1, ge=1, le=1024)
    expert_tp: int | None = Field(default=None, ge=1, le=1024)
    expert_imbalance: float = Field(default=EXPERT_IMBALANCE, ge=1, le=1024)
    sequences: Literal["responses", "turns"] = "responses"
    zero_stage: Literal[0, 1, 2, 3] | None = None
    micro_batch_tokens: Annotated[Tokens, Field(ge=1)] = 16384
    log_prob_micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    micro_batch_sequences: int | None = Field(default=None, ge=1, le=1_000_000)
    log_prob_micro_batch_sequences: int | None = Field(default=None, ge=1, le=1_000_000)
    shard_gpus: int | None = Field(default=None, ge=1, le=1_000_000)
    lora_rank: int | None = Field(default=None, ge=1, le=65_536)
    gradients: GradientType = "fp32"
    weights: WeightType = "fp32"
    frozen_weights: WeightType = "bf16"
    sequence_parallel: bool = True
    recompute: Recompute = "full"
    critic_recompute: Recompute | None = None
    critic_offload: bool | None = None
    critic_micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    critic_micro_batch_sequences: int | None = Field(default=None, ge=1, le=1_000_000)
    critic_epochs: int | None = Field(default=None, ge=1, le=1000)
    packing: Packing = "balanced"
    logits: Logits | None = None
    attention: AttentionKernel | None = None
    context_parallel: ContextParallel | None = None
    looped_experts: bool = False
    fused_rope: bool = True
    driver_per_token: Seconds = Field(default=0.0, ge=0, le=1e-3)
    offload: bool = False
    host_memory: HostMemory = "pinned"
    optimizer_bytes: int = Field(default=12, ge=4, le=12)
    cpu_optimizer: float = Field(default=0.0, ge=0, le=1)
    cpu_optimizer_rate: BytesPerSecond = Field(default=2e11, gt=0)
    mini_batches: int = Field(default=1, ge=1, le=10_000)
    epochs: int = Field(default=1, ge=1, le=1000)

    @property
    def of_critic(self) -> dict[str, Any]:
        """What the critic's training has of its own, by the names that the actor's has."""
        names = ("recompute", "offload", "micro_batch_tokens", "micro_batch_sequences")
        found = {name: own for name in names if (own := getattr(self, f"critic_{name}")) is not None}
        return {"micro_batch_sequences": None, **found} if "micro_batch_tokens" in found else found

    @property
    def kinds(self) -> dict[str, Any]:
        """ZeRO stage, attention kernel, its context parallelism and logits: as given, or the backend's own."""
        return {
            "zero_stage": self.stage,
            "attention": self.attention or attention_of(self.backend),
            "context_parallel": self.context_parallel or context_parallel_of(self.backend),
            "logits": self.logits or logits_of(self.backend),
        }

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

    name: Name
    description: str = ""
    framework: str = ""
    cluster: str | dict[str, Any]
    model: str
    models: dict[Name, str] = Field(default={})
    calibration: str | dict[str, str]
    engine: EngineConfig = EngineConfig()
    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    routing: Literal["contiguous", "round_robin"] = "contiguous"
    weight_sync: SyncMethod = "bucketed"
    trace: TraceSpec
    environment: EnvironmentConfig = EnvironmentConfig()
    workflow: WorkflowSpec
    training: TrainingSpec = TrainingSpec()
    costs: AssumedCosts = PLAIN_COSTS
    seeds: Annotated[int, Field(le=MOST_SEEDS)] | tuple[Annotated[int, Field(le=LARGEST_SEED)], ...] = 5
    certainty: int | None = Field(default=None, ge=0, le=1000)
    draw: int = Field(default=0, ge=0, le=1_000_000)
    baseline: str | None = None
    systems: tuple[Any, ...] = Field(min_length=1)
    cases: dict[str, Any] = Field(default={})
    sources: dict[str, tuple[str, ...]] = Field(default={})

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

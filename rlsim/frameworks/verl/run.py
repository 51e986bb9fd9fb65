"""What a run was launched with: from the caller's arguments, else from veRL's own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema, validate
from rlsim.cost.strategy import EXPERT_IMBALANCE, Recompute, TrainStrategy, attention_of, context_parallel_of, logits_of
from rlsim.errors import CalibrationError
from rlsim.frameworks.mapping import Reading, own_limits
from rlsim.frameworks.verl.log import VerlLog
from rlsim.frameworks.verl.settings import ACTOR
from rlsim.models.hardware import Cluster, Gpu
from rlsim.sim.request import EngineConfig
from rlsim.units import Tokens

T = TypeVar("T")


class TrainingArguments(Schema):
    """How training ran. What is left out is taken from the log's configuration, else as rlsim's experiments do."""

    tp: int | None = Field(default=None, ge=1)
    pp: int | None = Field(default=None, ge=1)
    cp: int | None = Field(default=None, ge=1)
    ep: int | None = Field(default=None, ge=1)
    expert_tp: int | None = Field(default=None, ge=1)
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = None
    micro_batch_sequences: int | None = Field(default=None, ge=1)
    log_prob_micro_batch_tokens: Annotated[Tokens, Field(ge=1)] | None = Field(default=None)
    log_prob_micro_batch_sequences: int | None = Field(default=None, ge=1)
    recompute: Recompute | None = None
    lora_rank: int | None = Field(default=None, ge=1)
    offload: bool | None = None
    mini_batches: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything about a run that its metrics do not say."""

    prompts: int
    responses: int
    cap: int  # tokens
    rollout_tp: int
    backend: str
    train: TrainStrategy
    inference: TrainStrategy
    mini_batches: int
    epochs: int
    engine: EngineConfig
    memory_utilization: float
    notes: tuple[str, ...]


class _Finder:
    """Takes each setting from the caller, else from the log, else the default; remembers where they disagree."""

    def __init__(self, log: VerlLog, batch: str = "--prompts, --responses", otherwise: str = "") -> None:
        self.batch = batch  # the options that give it
        self._otherwise = otherwise  # what gives all that is missing
        self.config, self._path = log.config, log.path
        self.notes: list[str] = []
        self.missing: list[str] = []  # what nobody says: a setting and its option

    def check(self) -> None:
        refuse("settings of a log", CalibrationError, path=self._path, missing=self.missing, instead=self._otherwise)

    def logged(self, name: str) -> Any:
        """The value of the first key of a setting that has one. Raises `ConfigError` for one of another kind."""
        kind, keys = self.config.names[name]
        return next((value for key in keys if (value := self.config.told(kind, key)) is not None), None)

    def pick(self, what: str, given: T | None, name: str) -> T | None:
        return self.prefer(what, given, self.logged(name))

    def prefer(self, what: str, given: T | None, logged: T | None) -> T | None:
        if given is None:
            return logged
        if logged is not None and logged != given:
            self.notes.append(f"{what}: {given} as given, though the log's configuration says {logged}")
        return given


def settings_of(
    log: VerlLog,
    cluster: Cluster,
    *,
    rollout_tp: int | None = None,
    prompts: int | None = None,
    responses: int | None = None,
    cap: int | None = None,
    backend: str | None = None,
    train: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    memory_utilization: float | None = None,
    rollout: tuple[int, int] | None = None,
) -> RunSettings:
    """Arguments joined with the log's configuration and checked against its metrics.

    `rollout` are the nodes that generate and the GPUs of each, if those of the cluster only train. Raises
    `CalibrationError` for what neither says, or what the metrics contradict, `ConfigError` for unknown fields of
    `train` and `engine`.
    """
    find = _Finder(log, otherwise=", or the experiment of the run, which rlsim init writes")
    given = validate(dict(train or {}), TrainingArguments, "train")
    _check_gpus(log, cluster, find)
    prompts, responses = _batch(log, prompts, responses, find)
    cap = _cap(cap, find)
    rollout_tp = find.pick("the rollout's TP", rollout_tp, "rollout_tp")
    if rollout_tp is None:
        find.missing.append("the rollout's TP (--tp)")
    find.check()
    rollout_tp = rollout_tp or 1
    problem = replica_problem(rollout_tp, *(rollout or (cluster.gpus // cluster.domain_gpus, cluster.domain_gpus)))
    refuse("replica of a log", CalibrationError, tp=rollout_tp, problem=problem)
    logged = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}.get(str(find.logged("strategy")))
    backend = find.prefer("backend", backend, logged) or "fsdp"
    strategies = _strategies(given, backend, cluster, find)
    mini = find.logged("mini")
    if find.logged("eager"):
        find.notes.append(
            "the engine ran without CUDA graphs (enforce_eager): the host time holds the launching of every kernel"
        )
    share = find.pick("memory_utilization", memory_utilization, "memory")
    return RunSettings(
        prompts=prompts, responses=responses, cap=cap, rollout_tp=rollout_tp, backend=backend,
        train=strategies[0], inference=strategies[1],
        mini_batches=find.prefer("mini_batches", given.mini_batches, math.ceil(prompts / mini) if mini else None) or 1,
        epochs=find.pick("epochs", given.epochs, "epochs") or 1,
        engine=_engine(engine or {}, find, cluster.gpu), memory_utilization=share or 0.9, notes=tuple(find.notes),
    )  # fmt: skip


def replica_problem(tp: int, nodes: int, per_node: int) -> str:
    """Why so many GPUs make no replica on nodes of `per_node`; empty if they do: a part of a node, or whole nodes."""
    if per_node % tp == 0 or (tp % per_node == 0 and nodes % (tp // per_node) == 0):
        return ""
    return f"does not divide the {per_node} GPUs of a node, nor is it whole nodes that divide the {nodes}"


def batch_of(
    log: VerlLog, prompts: int | None = None, responses: int | None = None, cap: int | None = None
) -> tuple[int, int, int, tuple[str, ...]]:
    """Prompts, responses to each, and the response cap (tokens) of a logged run's steps, and notes.

    What is not given is taken from the log's configuration and metrics. Raises `CalibrationError` for what neither
    says, or what the metrics contradict.
    """
    find = _Finder(log, "--batch, such as 128x8")
    prompts, responses = _batch(log, prompts, responses, find)
    cap = _cap(cap, find)
    find.check()
    return prompts, responses, cap, tuple(find.notes)


def _cap(cap: int | None, find: _Finder) -> int:
    cap = find.pick("cap", cap, "cap")
    if cap is None:
        find.missing.append("the cap of a response (--cap; veRL's data.max_response_length)")
    return cap or 0


def _check_gpus(log: VerlLog, cluster: Cluster, find: _Finder) -> None:
    """veRL's throughput is tokens per second and GPU, which gives the number of GPUs away."""
    steps = log.steps
    gpus = (steps.total_tokens / steps.step_s / steps.throughput).median()
    nodes, per_node = map(find.logged, ("nodes", "per_node"))
    told = nodes * per_node if nodes and per_node else None
    refuse("GPUs of a log", CalibrationError, path=log.path, told=told, gpus=gpus, cluster=cluster)


def _batch(log: VerlLog, prompts: int | None, responses: int | None, find: _Finder) -> tuple[int, int]:
    """Prompts and responses per prompt; all tokens over the mean length say how many sequences there were."""
    steps = log.steps
    counted = (steps.total_tokens / (steps.prompt_mean + steps.response_mean)).median()
    prompts = find.pick("prompts", prompts, "batch")
    responses = find.pick("responses", responses, "responses")
    known = not math.isnan(counted)
    if prompts is None and responses is None and known:
        find.notes.append(
            f"{round(counted):,} sequences a step, from perf/total_num_tokens; each is taken as a prompt of its own"
        )
        return round(counted), 1
    if known and prompts is None and responses is not None:
        prompts = max(1, round(counted / responses))
    if known and responses is None and prompts is not None:
        responses = max(1, round(counted / prompts))
    if prompts is None or responses is None:
        find.missing.append(f"prompts and responses of a step ({find.batch}; veRL's train_batch_size and rollout.n)")
        return 0, 0
    refuse("batch of a log", CalibrationError, path=log.path, counted=counted, prompts=prompts, responses=responses)
    return prompts, responses


def _strategies(
    given: TrainingArguments, backend: str, cluster: Cluster, find: _Finder
) -> tuple[TrainStrategy, TrainStrategy]:
    """The strategy of training and that of log-prob passes, which may have other micro-batches."""
    megatron, own = backend == "megatron", attention_of(backend)
    logged = Reading("verl", find.config, megatron=megatron).known("run")
    names = ("tp", "pp", "cp", "ep", "expert_tp", "recompute", "lora_rank")
    values = {name: find.prefer(f"train.{name}", getattr(given, name), logged.get(name)) for name in names}
    tp, pp, cp, ep = (values[name] or 1 for name in names[:4])
    share = tp * pp * cp
    refuse("strategy of a log", CalibrationError, share=share, gpus=cluster.gpus)
    common: dict[str, Any] = {
        "ep": ep,
        "expert_tp": tp if values["expert_tp"] is None and ep > 1 else values["expert_tp"],  # Megatron-LM's own default
        "dp": cluster.gpus // share,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "zero_stage": given.zero_stage if given.zero_stage is not None else (1 if megatron else 3),
        "recompute": values["recompute"] or "full",
        "lora_rank": values["lora_rank"],
        "offload": _offload(given, find),
        "sequence_parallel": tp > 1,
        "weights": logged["weights"],
        "gradients": logged["gradients"],
        "attention": "flash_attention_3" if not megatron and find.logged("attention") == "flash_attention_3" else own,
        "fused_rope": not megatron or bool(find.logged("rope_fusion")),
        "host_memory": "pageable_weights" if find.logged("strategy") == "fsdp2" else "pinned",
        "context_parallel": context_parallel_of(backend),
        "logits": logits_of(backend, bool(find.logged("fused"))),
        "looped_experts": not megatron,
        "expert_imbalance": EXPERT_IMBALANCE,
    }

    def micro_batches(call: str) -> dict[str, Any]:
        """As given, else as configured: a token budget, or a count."""
        tokens, sequences = f"{call}micro_batch_tokens", f"{call}micro_batch_sequences"
        if count := getattr(given, sequences):
            return {"micro_batch_sequences": count}
        if budget := getattr(given, tokens) or logged.get(tokens, 0) * cp:
            return {"micro_batch_tokens": budget}
        return {"micro_batch_sequences": logged[sequences]} if sequences in logged else {}

    train = micro_batches("")
    return TrainStrategy(**common, **train), TrainStrategy(**common, **(micro_batches("log_prob_") or train))


def _offload(given: TrainingArguments, find: _Finder) -> bool:
    kinds = {kind: find.logged(kind) for kind in ("param_offload", "optimizer_offload")}
    on = [kind for kind, value in kinds.items() if value]
    if given.offload is None and len(on) == 1:
        find.notes.append(f"the run had {on[0]} only; taken as weights and optimizer states both offloaded")
    keys = (*find.config.given, *find.config.default)
    known = any(key.endswith("_offload") and key.startswith(ACTOR) for key in keys)
    return bool(find.prefer("train.offload", given.offload, bool(on) if known else None))


def _engine(given: Mapping[str, Any], find: _Finder, gpu: Gpu) -> EngineConfig:
    """Limits as given, else as veRL hands them to its engine; to SGLang it hands on the number of sequences alone."""
    limits = ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "enable_prefix_caching")
    logged = {limit: find.logged(limit) for limit in limits}
    if find.logged("engine") == "sglang":
        own = own_limits("sglang", gpu)
        logged |= {limit: own[limit] for limit in ("max_num_batched_tokens", "chunked_prefill")}
    return validate({**{k: v for k, v in logged.items() if v is not None}, **given}, EngineConfig, "engine")

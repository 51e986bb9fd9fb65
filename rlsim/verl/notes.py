"""What a veRL configuration says that bears on time and that an experiment does not represent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsim.errors import ConfigError
from rlsim.verl.defaults import ACTOR, MODEL, ROLLOUT
from rlsim.verl.settings import Settings

_REF = "actor_rollout_ref.ref."


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_true(value: Any) -> bool:
    return value is True


def _is_false(value: Any) -> bool:
    return value is False


#: Key, when it matters, and what it does that the experiment has not.
_UNLIKE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (ROLLOUT + "multi_turn.enable", _is_true, "turns with tools between them: not all of a response's tokens are decoded"),
    (ROLLOUT + "enforce_eager", _is_true, "no CUDA graphs: decode steps take longer (rlsim calibrate from-run has that)"),
    (ROLLOUT + "pipeline_model_parallel_size", _more_than_one, "generation in pipeline stages: here without"),
    (ROLLOUT + "expert_parallel_size", _more_than_one, "generation with experts apart: here they are cut by TP"),
    (ROLLOUT + "data_parallel_size", _more_than_one, "data parallelism inside an engine: here replicas are apart"),
    (ROLLOUT + "free_cache_engine", _is_false, "the KV cache stays while training runs: here it is freed"),
    (ROLLOUT + "over_sample_rate", bool, "the last requests of a batch are cut off early"),
    (ROLLOUT + "skip_rollout", _is_true, "generation is skipped"),
    (ROLLOUT + "quantization", bool, "a quantised rollout: here in bf16"),
    (MODEL + "use_remove_padding", _is_false, "training on padded sequences: here on packed ones, which is much faster"),
    (ACTOR + "megatron.use_remove_padding", _is_false, "training on padded sequences: here on packed ones"),
    (MODEL + "lora_rank", bool, "LoRA: here all weights are trained"),
    (MODEL + "enable_activation_offload", _is_true, "activations in host memory"),
    (ACTOR + "entropy_coeff", bool, "training computes the entropy of every token"),
    (ACTOR + "fsdp_config.fsdp_size", _more_than_one, "weights sharded over some of the GPUs: here over all"),
    (ACTOR + "fsdp_config.reshard_after_forward", _is_false, "weights stay gathered between forward and backward"),
    (ACTOR + "fsdp_config.offload_policy", _is_true, "weights come from host memory while training runs"),
    (ACTOR + "megatron.virtual_pipeline_model_parallel_size", _more_than_one, "interleaved pipeline stages"),
    (ACTOR + "megatron.expert_model_parallel_size", _more_than_one, "experts on GPUs of their own in training"),
    (ACTOR + "freeze_vision_tower", _is_true, "a vision model"),
    ("algorithm.filter_groups.max_num_gen_batches", _more_than_one, "a limit on the batches generated in a step"),
    ("trainer.balance_batch", _is_false, "sequences dealt to GPUs as they come: here they are balanced"),
    ("distillation.enabled", _is_true, "a teacher's log-probs"),
    ("reward_model.enable_resource_pool", _is_true, "the reward model on GPUs of its own: here on all GPUs"),
    ("reward.reward_model.enable_resource_pool", _is_true, "the reward model on GPUs of its own: here on all GPUs"),
)  # fmt: skip

#: Settings of another kind, which need words of their own.
_WORTH_A_WORD = (
    _REF + "fsdp_config.param_offload",
    "custom_reward_function.path",
    "reward.custom_reward_function.path",
    "reward_model.sandbox_fusion.url",
    "reward.sandbox_fusion.url",
    "data.gen_batch_size",
    "critic.ppo_mini_batch_size",
    "trainer.test_freq",
    "trainer.save_freq",
)
KEYS = (*(key for key, _, _ in _UNLIKE), *_WORTH_A_WORD)


def missing(config: Settings) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    found = []
    for key, matters, what in _UNLIKE:
        elsewhere = key.startswith(ACTOR + "megatron.") and not config.megatron
        if elsewhere or (key == MODEL + "use_remove_padding" and config.megatron):  # Megatron has a key of its own
            continue
        value = config.given.get(key, config.default.get(key))
        if value is not None and matters(value):
            found.append(f"{config.where(key)} = {value}: {what}")
    given = config.given.get
    scoring = next((key for key in _WORTH_A_WORD if "custom_reward" in key and given(key)), None)
    sandbox = next((key for key in _WORTH_A_WORD if "sandbox" in key and given(key)), None)
    if scoring or sandbox:
        key = sandbox or scoring or ""
        what = "a sandbox" if sandbox else "a function of yours"
        found.append(
            f"{config.where(key)}: scores come from {what}; here from a check of 10 ms, or as long as the trace says "
            "(workflow.reward)"
        )
    generated, trained = given("data.gen_batch_size"), config.get("data.train_batch_size")
    if generated and generated != trained:
        found.append(
            f"{config.where('data.gen_batch_size')} = {generated}: prompts are generated {generated} at a time; here a "
            f"step begins with {trained} and launches what is lacking"
        )
    often = [key for key in ("trainer.test_freq", "trainer.save_freq") if (given(key) or -1) > 0]
    if often:
        found.append(f"{' and '.join(config.where(key) for key in often)}: validation and checkpoints between steps")
    critic = given("critic.ppo_mini_batch_size")
    if (
        critic
        and config.get("algorithm.adv_estimator") == "gae"
        and critic != config.get(ACTOR + "ppo_mini_batch_size")
    ):
        found.append(f"{config.where('critic.ppo_mini_batch_size')} = {critic}: the critic is trained as the actor is")
    return found


def refuse_asynchronous(config: Settings) -> None:
    """Raises `ConfigError` for a run that trains while it generates, on GPUs apart: no step of it is simulated so."""
    signs = {
        "actor_rollout_ref.hybrid_engine": config.given.get("actor_rollout_ref.hybrid_engine") is False,
        "trainer.v1.trainer_mode": config.given.get("trainer.v1.trainer_mode") in ("colocate_async", "separate_async"),
        "rollout.nnodes": (config.given.get("rollout.nnodes") or 0) > 0,
        ROLLOUT + "nnodes": (config.given.get(ROLLOUT + "nnodes") or 0) > 0,
        "async_training": any(key.startswith("async_training.") for key in config.given),
    }
    for key, there in signs.items():
        if there:
            place = config.origin.get(key, "the configuration")
            raise ConfigError(
                f"{place}: {key}: training and generation at the same time, on GPUs of their own: init makes "
                "experiments of synchronous training only; give the GPUs of each call with a plan (rlsim plan)"
            )

"""What a veRL configuration says that bears on time and that an experiment does not represent."""

from __future__ import annotations

from rlsim.init import parts
from rlsim.init.draft import Draft
from rlsim.init.settings import ANYTHING, INTEGER, TEXT, WHOLE
from rlsim.init.tables import unlike_rows, without
from rlsim.init.unlike import unlike
from rlsim.models import Model
from rlsim.verl.defaults import ACTOR, MODEL, ROLLOUT
from rlsim.verl.engines import ARGUMENTS
from rlsim.verl.run import RunSettings
from rlsim.verl.settings import VerlSettings

EXPERTS, _GROUPS = ROLLOUT + "expert_parallel_size", ROLLOUT + "data_parallel_size"
STAGES = ROLLOUT + "pipeline_model_parallel_size"

#: Settings of another kind, which need words of their own.
_SCORING = ("custom_reward_function.path", "reward.custom_reward_function.path")
_SANDBOX = ("reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url")
_BETWEEN_STEPS = ("trainer.test_freq", "trainer.save_freq")
_GENERATED, _CRITIC = "data.gen_batch_size", "critic.ppo_mini_batch_size"
REFERENCE_OFFLOAD = "actor_rollout_ref.ref.fsdp_config.param_offload"
QUANTISED = ROLLOUT + "quantization"
KV_TYPES = tuple(f"{ROLLOUT}engine_kwargs.{engine}.kv_cache_dtype" for engine in ("vllm", "sglang"))
#: What settings of the engines themselves begin with.
VLLM, SGLANG = (f"{ROLLOUT}engine_kwargs.{engine}." for engine in ("vllm", "sglang"))
#: Positions of a model where nothing says how many it has: models of today have as many or more.
_CONTEXT = 32_768
_SIZES = {
    "micro_sizes": [f"{ACTOR}ppo_micro_batch_size{per}" for per in ("", "_per_gpu")],
    "log_prob_sizes": [f"{ROLLOUT}log_prob_micro_batch_size{per}" for per in ("", "_per_gpu")],
}


def note_refusals(config: VerlSettings, draft: Draft, settings: RunSettings, model: Model, *, apart: bool) -> None:
    """Notes of what veRL or its engine would not start with."""
    strategy, vllm = settings.train, config.told(TEXT, ROLLOUT + "name") in ("vllm", None)
    longest = config.told(WHOLE, "max_model_len")
    values = {
        **{name: sum(map(config.is_given, keys)) for name, keys in _SIZES.items()},
        "longest": longest or config.whole("prompts_longest") + settings.cap,
        "positions": None if longest else model.max_position_embeddings or _CONTEXT,
        "prompts": None if apart else settings.prompts,
        **{name: getattr(strategy, name) for name in ("gpus", "dp", "tp", "pp", "cp")},
    }
    of, megatron = ("veRL", "vLLM") if vllm else ("veRL",), settings.backend == "megatron"
    parts.note_refusals(config, draft, model, *of, megatron=megatron, release=config.version, **values)


KEYS = (
    *ARGUMENTS,
    ROLLOUT + "max_model_len",
    *(key for keys in _SIZES.values() for key in keys),
    VLLM + "kv_offloading_size",
    SGLANG + "enable_hierarchical_cache",
    SGLANG + "hicache_size",
    EXPERTS,
    _GROUPS,
    *(key for key, _, _ in unlike_rows("verl")),
    *(key for engine in ("vllm", "sglang") for key, _, _ in unlike_rows(engine, f"{ROLLOUT}engine_kwargs.{engine}.")),
    QUANTISED,
    *KV_TYPES,
    REFERENCE_OFFLOAD,
    *_SCORING,
    *_SANDBOX,
    *_BETWEEN_STEPS,
    _GENERATED,
    _CRITIC,
)


def experts_apart(config: VerlSettings) -> bool:
    """Whether generation deals whole experts to the GPUs of TP and DP together."""
    return (config.get(WHOLE, EXPERTS) or 1) > 1


def missing(config: VerlSettings) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    found = list[str]()
    rows = unlike_rows("verl")
    elsewhere = {key for key, _, _ in rows if key.startswith(ACTOR + "megatron.") and not config.megatron}
    if config.megatron:  # whose own key counts before 0.8, the model's from then on
        elsewhere.add((MODEL if config.version < "0.8" else ACTOR + "megatron.") + "use_remove_padding")
    engine = config.told(TEXT, ROLLOUT + "name") or "vllm"
    found += unlike(config, without((*rows, *unlike_rows(engine, f"{ROLLOUT}engine_kwargs.{engine}.")), *elsewhere))
    if not experts_apart(config) and (config.get(WHOLE, _GROUPS) or 1) > 1:
        found.append(f"{config.where(_GROUPS)}: data parallelism inside an engine: here replicas are apart")
    for keys, what in ((_SANDBOX, "a sandbox"), (_SCORING, "a function of yours")):
        key = next((key for key in keys if config.told(ANYTHING, key)), "")
        if key:
            found.append(f"{config.where(key)}: scores come from {what}; how long that takes is in workflow.reward")
            break
    generated, trained = config.told(WHOLE, _GENERATED), config.get(WHOLE, "data.train_batch_size")
    if generated and generated != trained:
        found.append(
            f"{config.where(_GENERATED)} = {generated}: prompts are generated {generated} at a time; here a step "
            f"begins with {trained} and launches what is lacking"
        )
    often = [key for key in _BETWEEN_STEPS if config.told(INTEGER, key) not in (None, -1, 0)]
    if often:
        found.append(f"{' and '.join(config.where(key) for key in often)}: validation and checkpoints between steps")
    mini, actors = config.told(WHOLE, _CRITIC), config.get(WHOLE, ACTOR + "ppo_mini_batch_size")
    if mini and config.get(TEXT, "algorithm.adv_estimator") == "gae" and mini != actors:
        found.append(f"{config.where(_CRITIC)} = {mini}: the critic is trained as the actor is")
    return found

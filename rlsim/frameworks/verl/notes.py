"""What a veRL configuration says that bears on time and that an experiment does not represent."""

from __future__ import annotations

from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.settings import ANYTHING, INTEGER, TEXT, WHOLE
from rlsim.frameworks.tables import names, unlike_rows
from rlsim.frameworks.verl.defaults import ACTOR, MODEL, ROLLOUT
from rlsim.frameworks.verl.run import RunSettings
from rlsim.frameworks.verl.settings import VerlSettings
from rlsim.models.model import Model

#: What settings of the engines themselves begin with.
ENGINES = {engine: f"{ROLLOUT}engine_kwargs.{engine}." for engine in ("vllm", "sglang")}
#: Keys that are known beside those that have names or defaults.
KEYS = (
    *(key for engine in ENGINES for _, keys in names(f"verl-{engine}").values() for key in keys),
    *(key for key, _, _ in unlike_rows("verl")),
    *(key for engine, section in ENGINES.items() for key, _, _ in unlike_rows(engine, section)),
)
#: Positions of a model where nothing says how many it has: models of today have as many or more.
_CONTEXT = 32_768


def note_refusals(config: VerlSettings, draft: Draft, settings: RunSettings, model: Model, *, apart: bool) -> None:
    """Notes of what veRL or its engine would not start with."""
    strategy, vllm = settings.train, config.told(TEXT, "engine") in ("vllm", None)
    longest = config.told(WHOLE, "max_model_len")
    values = {
        **{name: sum(map(config.is_given, config.keys(name))) for name in ("micro_sizes", "log_prob_sizes")},
        "longest": longest or config.whole("prompts_longest") + settings.cap,
        "positions": None if longest else model.max_position_embeddings or _CONTEXT,
        "train_tokens": strategy.micro_batch_tokens,
        "prompts": None if apart else settings.prompts,
        **{name: getattr(strategy, name) for name in ("gpus", "dp", "tp", "pp", "cp")},
    }
    of, megatron = ("veRL", "vLLM") if vllm else ("veRL",), settings.backend == "megatron"
    parts.note_refusals(config, draft, model, *of, megatron=megatron, release=config.version, **values)


def experts_apart(config: VerlSettings) -> bool:
    """Whether generation deals whole experts to the GPUs of TP and DP together."""
    return (config.value("rollout_ep") or 1) > 1


def missing(config: VerlSettings) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    elsewhere = {key for key in KEYS if key.startswith(ACTOR + "megatron.") and not config.megatron}
    if config.megatron:  # whose own key counts before 0.8, the model's from then on
        elsewhere.add((MODEL if config.version < "0.8" else ACTOR + "megatron.") + "use_remove_padding")
    engine = config.told(TEXT, "engine") or "vllm"
    found = parts.unlike_of(config, "verl", engine, ENGINES.get(engine, ""), but=elsewhere)
    if not experts_apart(config) and (config.value("rollout_dp") or 1) > 1:
        found.append(f"{config.where('rollout_dp')}: data parallelism inside an engine: here replicas are apart")
    for name, what in (("sandbox", "a sandbox"), ("scoring", "a function of yours")):
        if key := next((key for key in config.keys(name) if config.told(ANYTHING, key)), ""):
            found.append(f"{config.where(key)}: scores come from {what}; how long that takes is in workflow.reward")
            break
    generated, trained = config.told(WHOLE, "generated"), config.get(WHOLE, "data.train_batch_size")
    if generated and generated != trained:
        found.append(f"{config.where('generated')} = {generated}: prompts are generated {generated} at a time; here a "
                     f"step begins with {trained} and launches what is lacking")  # fmt: skip
    often = [name for name in ("test_freq", "save_freq") if config.told(INTEGER, name) not in (None, -1, 0)]
    found += parts.between_steps(config, *often)
    mini, actors = config.told(WHOLE, "critic_mini"), config.value("mini")
    if mini and config.get(TEXT, "algorithm.adv_estimator") == "gae" and mini != actors:
        found.append(f"{config.where('critic_mini')} = {mini}: the critic is trained as the actor is")
    return found

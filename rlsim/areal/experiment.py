"""`rlsim init --from-areal`: a configuration of AReaL as an experiment, every value with where it is from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.areal.allocation import GENERATES, TRAINS, Allocation, allocation, both_sides
from rlsim.areal.defaults import ACTOR, BETWEEN_STEPS, ENGINE_KEYS, GENERATION, ROLLOUT
from rlsim.areal.training import add_training
from rlsim.errors import ConfigError
from rlsim.experiment.starts import shape_values
from rlsim.hardware import Gpu
from rlsim.init import parts
from rlsim.init.draft import Draft, Entry
from rlsim.init.parts import Options, joined
from rlsim.init.settings import COUNT, NUMBER, PERIOD, SHARE, TEXT, WHOLE, Settings
from rlsim.init.sources import read_sources
from rlsim.init.tables import default_values, unlike_rows, without
from rlsim.init.unlike import unlike
from rlsim.models import Model

OPTION = "--from-areal"
_MODE, _ROLLOUT, _ACTOR = "allocation_mode", ROLLOUT + "backend", ACTOR + "backend"
_NODES, _PER_NODE = "cluster.n_nodes", "cluster.n_gpus_per_node"
_STRATEGY = ROLLOUT + "scheduling_strategy.type"
_BATCH, _SAMPLES, _NEW = "train_dataset.batch_size", GENERATION + "n_samples", GENERATION + "max_new_tokens"
_LONGEST_PROMPT = "train_dataset.max_length"
_AGE, _CONCURRENT = ROLLOUT + "max_head_offpolicyness", ROLLOUT + "max_concurrent_rollouts"
_CONSUMED, _MODEL, _KL = ROLLOUT + "consumer_batch_size", ACTOR + "path", ACTOR + "kl_ctl"
_DECOUPLED, _RECOMPUTED, _METHOD = (
    ACTOR + key for key in ("use_decoupled_loss", "recompute_logprob", "prox_logp_method")
)


#: Keys of the layout before areal-lite, and how they are written today.
_LEGACY = {
    "ppo": f"{GENERATION.rstrip('.')} (ppo.gen) and actor (ppo_n_minibatches, recompute_logprob, use_decoupled_loss)",
    "group_size": _SAMPLES,
    "dataset": f"{_BATCH} (train_bs_n_seqs) and {_LONGEST_PROMPT} (max_prompt_len)",
    "max_head_offpolicyness": _AGE,
    "actor_train": "actor.mb_spec",
    "n_nodes": _NODES,
    "n_gpus_per_node": _PER_NODE,
}


@dataclass(frozen=True)
class _Sides:
    """Engines and GPUs of generation and of training."""

    generation: Allocation
    training: Allocation
    shared: bool  # they take turns on the same GPUs
    where: str

    @property
    def gpus(self) -> int:
        """GPUs of both."""
        sizes = self.generation.gpus, self.training.gpus
        return max(sizes) if self.shared else sum(sizes)


def from_areal(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that AReaL's YAML files and overrides describe.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_sources(sources, "AReaL", OPTION)
    config.default = dict(default_values("areal"))
    if not (config.has("gconfig") and config.has("rollout") and config.has("actor")):
        if old := next((key for key in _LEGACY if config.is_given(key) or config.has(key)), ""):
            today = "; ".join(f"{theirs} is {ours}" for theirs, ours in _LEGACY.items())
            raise ConfigError(f"{config.name}: {old} is of AReaL's legacy layout (realhf, before areal-lite), which is "
                              f"not read; write it as today: {today}")  # fmt: skip
        raise ConfigError(f"{config.name}: expected a configuration of AReaL's GRPO or PPO, with the keys rollout.…, "
                          "gconfig.… and actor.…")  # fmt: skip
    draft = Draft({}, notes=list(config.notes))
    sides = _sides(config)
    gpus = joined(sides.where, config.where(_NODES))
    machines = parts.add_cluster(draft, options, *_machines(config, draft, sides), gpus)
    path = options.model or config.text(_MODEL)
    actor = parts.add_model(draft, options, path, config.where(_MODEL))
    parts.add_calibration(draft, options, machines, Entry(sides.generation.engine, sides.where))
    prompts = config.entry(WHOLE, _LONGEST_PROMPT) if config.get(WHOLE, _LONGEST_PROMPT) else None
    cap = config.entry(WHOLE, _NEW)
    parts.add_trace(draft, options, actor, cap, "", prompts)
    _workflow(config, draft, sides)
    _critic(config, draft, options, actor)
    add_training(config, draft, sides.training, sides.where)
    _engine(config, draft, sides, machines.gpu)
    _systems(config, draft, sides)
    memory = ENGINE_KEYS[sides.generation.engine]["memory"]
    parts.add_memory(draft, config.entry(SHARE, memory), options.folder, apart=not sides.shared)
    draft.missing = _missing(config, sides)
    training, trains = sides.training, {"megatron": "Megatron", "fsdp": "FSDP"}.get(sides.training.engine, "")
    values = shape_values(actor) | {key: getattr(training, key) for key in ("tp", "pp", "cp", "ep", "gpus")}
    parts.note_refusals(config, draft, {}, "AReaL", trains, **values)
    titles = config.get(TEXT, "experiment_name"), parts.own_name(config.name)
    config.check_spelling()
    draft.unread = config.unasked()
    return parts.finish(config, draft, options, sources, *titles)


def _sides(config: Settings) -> _Sides:
    """Engines by their own keys, else by `allocation_mode`, as older releases write them."""
    if config.is_given(_ROLLOUT) or not config.is_given(_MODE):
        generation = allocation(config.text(_ROLLOUT), config.where(_ROLLOUT), GENERATES)
        training = allocation(config.text(_ACTOR), config.where(_ACTOR), TRAINS)
        shared = config.text(_STRATEGY) == "colocation"
        where = joined(config.where(_ROLLOUT), config.where(_ACTOR))
    else:
        where = config.where(_MODE)
        generation, training, shared = both_sides(config.text(_MODE), where)
    if shared and generation.gpus != training.gpus:
        raise ConfigError(f"{where}: generation on {generation.gpus} GPUs shares them with training on "
                          f"{training.gpus}: expected the same number")  # fmt: skip
    if shared and config.need(COUNT, _AGE):
        raise ConfigError(f"{config.where(_AGE)}: asynchronous training on the GPUs that generate is not simulated: "
                          "expected 0, or GPUs of its own for generation")  # fmt: skip
    return _Sides(generation, training, shared, where)


def _machines(config: Settings, draft: Draft, sides: _Sides) -> tuple[int, int]:
    """Nodes and GPUs of each that the engines take."""
    nodes, per_node, gpus = config.whole(_NODES), config.whole(_PER_NODE), sides.gpus
    if gpus > nodes * per_node:
        raise ConfigError(f"{sides.where}: {gpus} GPUs, but {config.where(_NODES)} × {config.where(_PER_NODE)} are "
                          f"{nodes * per_node}")  # fmt: skip
    if gpus < nodes * per_node:
        draft.notes.append(f"{sides.where}: {gpus} of the {nodes * per_node} GPUs are used, and simulated")
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise ConfigError(f"{sides.where}: {gpus} GPUs are no whole nodes of {per_node} ({config.where(_PER_NODE)})")
    return gpus // per_node, per_node


def _workflow(config: Settings, draft: Draft, sides: _Sides) -> None:
    critic = config.has("critic")
    reference = config.has("ref") and config.need(NUMBER, _KL) > 0
    decoupled = config.flag(_DECOUPLED)
    anew = config.get(TEXT, _METHOD) == "recompute" if decoupled else config.flag(_RECOMPUTED)
    said = joined(config.where(_DECOUPLED), config.where(_METHOD if decoupled else _RECOMPUTED))
    why = "critic" if critic else "no critic"
    draft.entries["workflow"] |= {  # type: ignore[operator]
        "algorithm": Entry("ppo" if critic else "grpo", f"{config.name}: {why}"),
        "prompts": config.entry(WHOLE, _BATCH),
        "responses": config.entry(WHOLE, _SAMPLES),
        "steps": parts.steps_of(0 if sides.shared else config.need(COUNT, _AGE)),
        "reference": Entry(reference, joined(config.where(_KL), "" if config.has("ref") else "no ref")),
        "old_log_probs": Entry(anew, said),
    }


def _critic(config: Settings, draft: Draft, options: Options, actor: Model) -> None:
    """The shape of the critic, unless it is the actor's."""
    key = "critic.path"
    if not config.is_given(key) or config.get(TEXT, key) == config.get(TEXT, _MODEL):
        return
    other = Draft({})
    if parts.add_model(other, options, config.text(key), config.where(key)).name != actor.name:
        draft.entries["models"] = {"critic": Entry(other.data()["model"], config.where(key))}


def _engine(config: Settings, draft: Draft, sides: _Sides, gpu: Gpu) -> None:
    engine = sides.generation.engine
    parts.add_engine(config, draft, ENGINE_KEYS[engine], engine, gpu, "server")
    whole, entries = "vllm.no_enable_chunked_prefill", draft.entries["engine"]
    assert isinstance(entries, dict)
    if engine == "vllm":
        entries["chunked_prefill"] = Entry(not config.flag(whole), config.where(whole))
    if sides.generation.pp > 1:
        entries["pp"] = Entry(sides.generation.pp, sides.where)


def _systems(config: Settings, draft: Draft, sides: _Sides) -> None:
    tp, where = sides.generation.tp * sides.generation.pp, sides.where
    draft.entries["routing"] = Entry("round_robin", "AReaL's default (rollout.routing_strategy)")
    if sides.shared:
        parts.add_systems(draft, tp, where)
        return
    rule: dict[str, Any] = {"rollout_gpus": sides.generation.gpus, "eta": config.need(COUNT, _AGE)}
    limit = _CONCURRENT if config.get(WHOLE, _CONCURRENT) is not None else _CONSUMED
    if config.is_given(limit):
        rule["concurrent"] = config.whole(limit)
    said = joined(where, config.where(_AGE), config.where(limit))
    parts.add_systems(draft, tp, said, apart=("areal", rule))


def _missing(config: Settings, sides: _Sides) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    engine = sides.generation.engine
    rows = (*unlike_rows("areal"), *unlike_rows(engine, f"{engine}."))
    found = unlike(config, without(rows, *ENGINE_KEYS[engine].values()))
    consumed, batch = config.get(WHOLE, _CONSUMED), config.whole(_BATCH)
    if not sides.shared and consumed != batch:
        found.append(f"{config.where(_CONSUMED)} = {consumed}: the bound on staleness counts batches of so many "
                     f"prompts; here of the {batch} of a step")  # fmt: skip
    if sides.training.engine == "archon":
        found.append(f"{sides.where}: Archon's own layers: here those of FSDP")
    mode = ACTOR + "weight_update_mode"
    if config.get(TEXT, mode) == "disk":
        found.append(f"{config.where(mode)}: weights by way of files: here as weight_sync says")
    periods = ("freq_epochs", "freq_steps", "freq_secs")
    keys = [f"{section}.{each}" for section in BETWEEN_STEPS for each in periods]
    often = [key for key in keys if 0 < (config.get(PERIOD, key) or 0) < math.inf]
    if often:
        found.append(f"{', '.join(map(config.where, often))}: evaluation and checkpoints between steps")
    return found

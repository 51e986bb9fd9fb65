"""`rlsim init --from-areal`: a configuration of AReaL as an experiment, every value with where it is from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.errors import ConfigError
from rlsim.frameworks import parts
from rlsim.frameworks.areal.allocation import GENERATES, TRAINS, Allocation, allocation, both_sides
from rlsim.frameworks.areal.training import add_training
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.parts import Options, joined
from rlsim.frameworks.settings import PERIOD, Settings
from rlsim.frameworks.sources import read_sources
from rlsim.frameworks.tables import names
from rlsim.models.hardware import Gpu
from rlsim.models.model import Model

OPTION = "--from-areal"
_BETWEEN_STEPS = ("saver", "evaluator", "recover")
#: Keys of the layout before areal-lite, and how they are written today.
_LEGACY = {
    "ppo": "gconfig (ppo.gen) and actor (ppo_n_minibatches, recompute_logprob, use_decoupled_loss)",
    "group_size": "gconfig.n_samples",
    "dataset": "train_dataset.batch_size (train_bs_n_seqs) and train_dataset.max_length (max_prompt_len)",
    "max_head_offpolicyness": "rollout.max_head_offpolicyness",
    "actor_train": "actor.mb_spec",
    "n_nodes": "cluster.n_nodes",
    "n_gpus_per_node": "cluster.n_gpus_per_node",
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
    config = read_sources(sources, "AReaL", OPTION, "areal")
    if not (config.has("gconfig") and config.has("rollout") and config.has("actor")):
        if old := next((key for key in _LEGACY if config.given.get(key) is not None or config.has(key)), ""):
            today = "; ".join(f"{theirs} is {ours}" for theirs, ours in _LEGACY.items())
            raise ConfigError(f"{config.name}: {old} is of AReaL's legacy layout (realhf, before areal-lite), which is "
                              f"not read; write it as today: {today}")  # fmt: skip
        raise ConfigError(f"{config.name}: expected a configuration of AReaL's GRPO or PPO, with the keys rollout.…, "
                          "gconfig.… and actor.…")  # fmt: skip
    draft = Draft({}, notes=list(config.notes))
    sides = _sides(config)
    training, engine = sides.training, sides.generation.engine
    config.names = {**config.names, **names(f"areal-{engine}")}
    gpus = joined(sides.where, config.where("nodes"))
    machines = parts.add_cluster(draft, options, *_machines(config, draft, sides), gpus)
    actor = parts.add_model(draft, options, options.model or config.text("model"), config.where("model"))
    parts.add_calibration(draft, options, machines, Entry(engine, sides.where))
    prompts = config.entry("longest_prompt") if config.value("longest_prompt") else None
    parts.add_trace(draft, options, actor, config.entry("new_tokens"), "", prompts)
    _workflow(config, draft, sides)
    _critic(config, draft, options, actor)
    add_training(config, draft, training, sides.where)
    _engine(config, draft, sides, machines.gpu)
    _systems(config, draft, sides)
    parts.add_memory(draft, config.entry("memory"), options.folder, apart=not sides.shared)
    draft.missing = _missing(config, sides)
    values = {key: getattr(training, key) for key in ("tp", "pp", "cp", "ep", "gpus")}
    values |= {engine: training.engine == engine for engine in ("fsdp", "megatron")}
    parts.note_refusals(config, draft, actor, "AReaL", **values)
    titles = config.value("title"), parts.own_name(config.name)
    config.check_spelling()
    draft.unread = config.unasked()
    return parts.finish(config, draft, options, sources, *titles)


def _sides(config: Settings) -> _Sides:
    """Engines by their own keys, else by `allocation_mode`, as older releases write them."""
    if config.is_given("rollout_backend") or not config.is_given("both_sides"):
        generation = allocation(config.text("rollout_backend"), config.where("rollout_backend"), GENERATES)
        training = allocation(config.text("actor_backend"), config.where("actor_backend"), TRAINS)
        shared = config.text("strategy") == "colocation"
        where = config.said("rollout_backend", "actor_backend")
    else:
        where = config.where("both_sides")
        generation, training, shared = both_sides(config.text("both_sides"), where)
    if shared and generation.gpus != training.gpus:
        raise ConfigError(f"{where}: generation on {generation.gpus} GPUs shares them with training on "
                          f"{training.gpus}: expected the same number")  # fmt: skip
    if shared and config.needed("age"):
        raise ConfigError(f"{config.where('age')}: asynchronous training on the GPUs that generate is not simulated: "
                          "expected 0, or GPUs of its own for generation")  # fmt: skip
    return _Sides(generation, training, shared, where)


def _machines(config: Settings, draft: Draft, sides: _Sides) -> tuple[int, int]:
    """Nodes and GPUs of each that the engines take."""
    nodes, per_node, gpus = config.whole("nodes"), config.whole("per_node"), sides.gpus
    if gpus > nodes * per_node:
        raise ConfigError(f"{sides.where}: {gpus} GPUs, but {config.where('nodes')} × {config.where('per_node')} are "
                          f"{nodes * per_node}")  # fmt: skip
    if gpus < nodes * per_node:
        draft.notes.append(f"{sides.where}: {gpus} of the {nodes * per_node} GPUs are used, and simulated")
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise ConfigError(f"{sides.where}: {gpus} GPUs are no whole nodes of {per_node} ({config.where('per_node')})")
    return gpus // per_node, per_node


def _workflow(config: Settings, draft: Draft, sides: _Sides) -> None:
    critic = config.has("critic")
    reference = config.has("ref") and config.needed("kl") > 0
    decoupled = config.flag("decoupled")
    anew = config.value("method") == "recompute" if decoupled else config.flag("recomputed")
    draft.entries["workflow"] |= {  # type: ignore[operator]
        "algorithm": Entry("ppo" if critic else "grpo", f"{config.name}: {'critic' if critic else 'no critic'}"),
        "prompts": config.entry("batch"),
        "responses": config.entry("samples"),
        "steps": parts.steps_of(0 if sides.shared else config.needed("age")),
        "reference": Entry(reference, joined(config.where("kl"), "" if config.has("ref") else "no ref")),
        "old_log_probs": Entry(anew, config.said("decoupled", "method" if decoupled else "recomputed")),
    }


def _critic(config: Settings, draft: Draft, options: Options, actor: Model) -> None:
    """The shape of the critic, unless it is the actor's."""
    if not config.is_given("critic") or config.value("critic") == config.value("model"):
        return
    other = Draft({})
    if parts.add_model(other, options, config.text("critic"), config.where("critic")).name != actor.name:
        draft.entries["models"] = {"critic": Entry(other.data()["model"], config.where("critic"))}


def _engine(config: Settings, draft: Draft, sides: _Sides, gpu: Gpu) -> None:
    parts.add_engine(config, draft, sides.generation.engine, gpu, "server")
    entries = draft.entries["engine"]
    assert isinstance(entries, dict)
    if sides.generation.engine == "vllm":
        entries["chunked_prefill"] = Entry(not config.flag("whole_prefills"), config.where("whole_prefills"))
    if sides.generation.pp > 1:
        entries["pp"] = Entry(sides.generation.pp, sides.where)


def _systems(config: Settings, draft: Draft, sides: _Sides) -> None:
    tp, where = sides.generation.tp * sides.generation.pp, sides.where
    draft.entries["routing"] = Entry("round_robin", f"{config.program}'s default (rollout.routing_strategy)")
    if sides.shared:
        parts.add_systems(draft, tp, where)
        return
    rule: dict[str, Any] = {"rollout_gpus": sides.generation.gpus, "eta": config.needed("age")}
    limit = "concurrent" if config.value("concurrent") is not None else "consumed"
    if config.is_given(limit):
        rule["concurrent"] = config.whole(limit)
    parts.add_systems(draft, tp, joined(where, config.said("age", limit)), apart=("areal", rule))


def _missing(config: Settings, sides: _Sides) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    engine = sides.generation.engine
    found = parts.unlike_of(config, "areal", engine, f"{engine}.")
    consumed, batch = config.value("consumed"), config.whole("batch")
    if not sides.shared and consumed != batch:
        found.append(f"{config.where('consumed')} = {consumed}: the bound on staleness counts batches of so many "
                     f"prompts; here of the {batch} of a step")  # fmt: skip
    if sides.training.engine == "archon":
        found.append(f"{sides.where}: Archon's own layers: here those of FSDP")
    if config.value("update_mode") == "disk":
        found.append(f"{config.where('update_mode')}: weights by way of files: here as weight_sync says")
    keys = [f"{section}.freq_{each}" for section in _BETWEEN_STEPS for each in ("epochs", "steps", "secs")]
    often = [key for key in keys if 0 < (config.get(PERIOD, key) or 0) < math.inf]
    return found + parts.between_steps(config, *often, sign=", ", what="evaluation")

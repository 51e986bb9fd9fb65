"""What does not go together, and what to do about memory.

Parts of a system (`rlsim/data/refusals.yaml`), and settings with which a framework or its engine does not start
(`rlsim/data/starts.yaml`). For an experiment that does not fit, settings with which it does, and starts: each is tried
before it is named. Where all fits: the worst that can meet, what leaves too little free, and a KV cache too small for
its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice, product
from typing import Any

import numpy as np

from rlsim.base.reading import shipped
from rlsim.base.refusals import code_of, holds, refuse, text_of
from rlsim.base.version import numbers_of
from rlsim.cost.memory import kv_shape
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import with_settings
from rlsim.experiment.placed import PlacedExperiment, SearchAheadError
from rlsim.experiment.schema import TrainingSpec
from rlsim.experiment.systems import System, SystemSpec, parse_systems
from rlsim.models.hardware import Cluster, node_types
from rlsim.models.layers import FullAttention
from rlsim.models.model import Model
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import asked
from rlsim.workflow import Call, Workflow
from rlsim.workflow.memory import MARGIN


def endless(system: System) -> str:
    """What generates in one rollout for all steps; empty if each step has a rollout."""
    launcher = system.batching.launcher
    return type(launcher).__name__ if isinstance(launcher, Continuous) else ""


def planner(system: System) -> str:
    """The first control that plans the layout of the next rollout; empty if none does."""
    return next((type(part).__name__ for part in asked(system.control, "next_tp")), "")


def check_calls(loaded: LoadedExperiment, system: System, graph: Workflow) -> None:
    """Raises `ConfigError` if the calls, as the system connects them, or its parts do not go together."""
    ways = {(edge.grain, graph.call(edge.target).kind) for edge in graph.edges}
    generate = next((call.name for call in graph.generating), "")
    responses, given = loaded.experiment.workflow.responses, sum(call.responses or 0 for call in graph.generating)
    refuse(
        "calls",
        loaded=loaded,
        system=system,
        graph=graph,
        training=loaded.experiment.training,
        prompts=loaded.experiment.workflow.prompts,
        responses=responses,
        given=given,
        idle=[call.name for call in graph.generating if not graph.samples(call.name, responses)],
        left=responses - given if graph.generating else 0,
        unfed=next((call.name for call in graph.generating if not _is_fed(call, graph)), ""),
        several=" and ".join(call.name for call in graph.generating) if len(graph.generating) > 1 else "",
        streamed=("sample", "train") in ways,
        chunked="chunk" in {grain for grain, _ in ways},
        rewarded=any(call.kind == "reward" for call in graph.calls),
        rewarded_by_sample=("sample", "reward") in ways,
        generate=generate,
        sync_lags={edge.lag for edge in graph.into(generate) if graph.call(edge.source).kind == "sync"},
        endless=endless(system),
        planner=planner(system),
    )


def _is_fed(call: Call, graph: Workflow) -> bool:
    """Whether an edge from a sync or training brings a call new weights, if its model is trained."""
    before = [graph.call(name) for name in graph.beside(call.name)[0]]
    trained = any(one.kind == "train" and one.model == call.model for one in graph.calls)
    return not trained or any(one.kind in ("sync", "train") and one.model == call.model for one in before)


# ---- whether a framework and its engine start with settings, over names and values ----------------------------------


@dataclass(frozen=True)
class Condition:
    """A row: what refuses settings, which ones, and in what words; releases are of the framework."""

    of: str
    refused: str
    says: str
    at: str
    since: str = ""
    until: str = ""

    def unmet(self, values: Mapping[str, Any], release: str) -> bool:
        """Whether these values are refused by that release (empty: any); false where one is not known."""
        known = all(values.get(name) is not None for name in code_of(self.refused).co_names)
        within = numbers_of(self.since) <= numbers_of(release) <= numbers_of(self.until or "9999") or not release
        return known and within and holds(self.refused, values)

    def text(self, values: Mapping[str, Any], release: str) -> str:
        """The row in words for a person."""
        whose = f"{self.of} {release}" if release and self.since + self.until else self.of
        return f"{text_of(self.says, values)}: {whose} does not start with it ({self.at})"


@cache
def conditions() -> tuple[Condition, ...]:
    """All rows of the table."""
    table = shipped("starts.yaml")
    return tuple(Condition(of, row.pop("if"), **row) for of, rows in table.items() for row in map(dict, rows))


def unmet(values: Mapping[str, Any], *of: str, release: str = "") -> list[Condition]:
    """The conditions of those frameworks and engines that these values do not meet."""
    return [row for row in conditions() if row.of in of and row.unmet(values, release)]


def shape_values(model: Model) -> dict[str, Any]:
    """What of a model's shape the conditions ask for."""
    plain = all(isinstance(layer.attention, FullAttention) for layer in model.layers)
    return {
        "heads": model.num_attention_heads if plain else None,
        "kv_heads": model.num_key_value_heads if plain else None,
        "layers": model.num_hidden_layers,
        "positions": model.max_position_embeddings,
    }


def starts_of(loaded: LoadedExperiment, systems: Sequence[SystemSpec] = ()) -> list[str]:
    """Why the framework or engine of an experiment would not start with it, in words; empty if nothing is known to.

    Of other `systems` if any are given. Of engine settings only those that are written count, of training's all.
    """
    experiment = loaded.experiment
    engine, training, workflow = experiment.engine, experiment.training, experiment.workflow
    written = {key: value for key, value in engine if key in engine.model_fields_set}
    framework, _, release = experiment.framework.partition(" ")
    (engine_name, *others) = {calibration.engine for calibration in loaded.calibrations.values()}
    colocated = not any(spec.make().placing for spec in systems or parse_systems(experiment.systems))
    gpus = loaded.cluster.gpus if colocated else None
    by_tokens, packed = training.micro_batch_sequences is None, training.packing == "first_fit"
    values = {
        **{name: getattr(training, name) for name in ("tp", "pp", "cp", "ep", "offload")},
        **{name: getattr(workflow, name) for name in ("prompts", "responses")},
        **shape_values(loaded.model),
        "budget": written.get("max_num_batched_tokens"),
        "seqs": written.get("max_num_seqs"),
        "chunked": written.get("chunked_prefill"),
        "longest": loaded.longest_sequence,
        "megatron": training.backend == "megatron",
        "uneven": bool(framework),  # its own keys may say which stage has fewer layers: `rlsim init` looked
        "zero": training.zero_stage,
        "gpus": gpus,
        "dp": (gpus and gpus // (training.tp * training.pp * training.cp)) or None,
        "train_tokens": training.micro_batch_tokens,
        "dynamic": by_tokens and not (packed and framework == "NeMo-RL"),  # whose dynamic_batching packs nothing
        "minis": training.mini_batches,
        "colocated": colocated,
    }
    serves = {"vllm": "vLLM"}.get(engine_name, "") if not others else ""
    trains = {"megatron": "Megatron", "fsdp": "FSDP"}.get(training.backend, "")
    return [row.text(values, release) for row in unmet(values, serves, trains, framework, release=release)]


#: Most settings that are combined, combinations of settings that are tried, and ways out that a message names.
MOST_TOGETHER, MOST_TRIED, MOST_NAMED = 3, 150, 8

#: What is asked of a way out beyond what the message says is missing (`Simulator.check_free`).
_ROOM = f"{MARGIN:.0%} kept free and the longest sequences considered"

#: Settings with their new values; `nodes` is no setting: so many of the cluster's.
Change = dict[str, Any]

#: Raises `RlsimError` for an experiment that does not fit, or cannot be.
Fits = Callable[[LoadedExperiment], object]


def remedies(loaded: LoadedExperiment, fits: Fits) -> str:
    """The settings with which the experiment fits, alone or the fewest together, as the end of a message.

    Empty where that depends on a search. No way out is what its framework or engine would not start with.
    """
    refused = {*starts_of(loaded)}
    others = ([{key: value} for value in values] for key, values in _settings(loaded).items())
    ladders = [rungs for rungs in (_smaller_micro_batches(loaded.experiment.training), *others) if rungs]
    try:
        for size in range(1, MOST_TOGETHER + 1):
            # Alone every value is tried, from the mildest on; together each setting at its mildest or furthest.
            rungs = ladders if size == 1 else [[one[0], *one[1:][-1:]] for one in ladders]
            tried = islice((product(*chosen) for chosen in combinations(rungs, size)), MOST_TRIED)
            if found := [name for ways in tried if (name := _first(loaded, ways, fits, refused))]:
                alone = "" if size == 1 else f"no setting that was tried does alone, {_ROOM}; "
                return f"; {alone}it fits with {', or '.join(found[:MOST_NAMED])}"
    except SearchAheadError:
        return ""
    return f"; no setting that was tried makes it fit, {_ROOM}, nor do up to {MOST_TOGETHER} together"


def changed(loaded: LoadedExperiment, changes: Change) -> LoadedExperiment:
    """The experiment with other settings; raises `ConfigError` for what cannot be."""
    cluster, settings = loaded.cluster, dict(changes)
    nodes = settings.pop("nodes", None)
    if nodes and isinstance(cluster, Cluster):
        cluster = cluster.model_copy(update={"nodes": nodes})
    made = replace(loaded, experiment=with_settings(loaded.experiment, settings, ""), cluster=cluster)
    for name in ("scoring", "drawn_steps"):  # none of these settings changes what the trace says, which takes long
        vars(made)[name] = getattr(loaded, name)
    return made


def _first(loaded: LoadedExperiment, ways: Iterable[tuple[Change, ...]], fits: Fits, refused: set[str]) -> str:
    """The first of these ways with which the experiment fits, for no more reasons `refused`; empty if there is none."""
    for way in ways:
        changes = {key: value for change in way for key, value in change.items()}
        try:
            fits(made := changed(loaded, changes))
        except SearchAheadError:
            raise
        except RlsimError:
            continue
        if not {*starts_of(made)} - refused:
            named = [
                (f"{value} nodes" if key == "nodes" else f"{key}={value}".lower()) for key, value in changes.items()
            ]
            return " and ".join(named)
    return ""


def _smaller_micro_batches(training: TrainingSpec) -> list[Change]:
    """Those of training, of log-probs, or of both, halved again and again."""
    found: list[Change] = []
    for halvings in range(1, 7):
        smaller: Change = {}
        for call in ("", "log_prob_"):
            counted, budget = (f"{call}micro_batch_{unit}" for unit in ("sequences", "tokens"))
            key, least = (counted, 1) if getattr(training, counted) else (budget, 256)
            if (value := (getattr(training, key) or 0) >> halvings) >= least:
                smaller[f"training.{key}"] = value
        found += [dict([item]) for item in smaller.items()] + [smaller] * (len(smaller) > 1)
    return found


def _settings(loaded: LoadedExperiment) -> dict[str, list[Any]]:
    """All others that memory depends on, with the values that may need less, from the mildest on.

    Frameworks with FSDP have no stages, and TP at most where it is given.
    """
    experiment, training, cluster = loaded.experiment, loaded.experiment.training, loaded.cluster
    megatron, engine, judge = training.backend == "megatron", experiment.engine, experiment.workflow.reward.judge
    stage, kinds = 3 if training.backend == "fsdp" else 1, ["none", "selective", "full"]
    places, stages = ["resident", "offloaded", "apart"], _doubled(training.pp, 8 * training.pp) if megatron else []
    # Of several kinds it is not said which to add, and of the nodes of some GPUs not what would join them.
    joined = isinstance(cluster, Cluster) and (
        cluster.inter or any(node.inter for node in node_types().values() if node.gpu == cluster.gpu)
    )
    return {
        "training.cp": _doubled(training.cp, cluster.domain_gpus),
        "training.tp": _doubled(training.tp, cluster.domain_gpus) if megatron or training.tp > 1 else [],
        "training.pp": [pp for pp in stages if not loaded.model.num_hidden_layers % pp],
        "training.ep": _doubled(training.ep, cluster.gpus_per_node) if megatron else [],
        "training.zero_stage": [stage] if training.stage < stage else [],
        "training.recompute": kinds[kinds.index(training.recompute) + 1 :],
        "training.logits": [] if training.logits == "fused" else ["fused"],
        "training.offload": [] if training.offload else [True],
        "workflow.reward.judge.while_training": places[places.index(judge.while_training) + 1 :] if judge else [],
        "memory_utilization": [share for share in (0.8, 0.85, 0.9, 0.95) if share > experiment.memory_utilization],
        "engine.max_num_seqs": _halved(engine.max_num_seqs, 64),
        "engine.max_num_batched_tokens": _halved(engine.max_num_batched_tokens, 2048),
        "nodes": [2 * cluster.nodes, 4 * cluster.nodes] if joined else [],
    }


def _halved(now: int, least: int) -> list[int]:
    return [value for value in (now >> n for n in range(1, 7)) if value >= least]


def _doubled(now: int, most: int) -> list[int]:
    return [value for value in (now << n for n in range(1, 4)) if value <= most]


# ---- where all fits -------------------------------------------------------------------------------------------------


#: The largest share of memory that is advised.
MOST_SHARE = 0.95


def worst_note(placed: PlacedExperiment) -> str:
    """Which micro-batch does not fit if the longest sequences that the limits allow meet in it; empty if all fit."""
    memory, plan, trace = placed.memory, placed.plan, placed.loaded.experiment.trace
    ledger = placed.ledger_of(plan, worst=True)
    over = memory.over(ledger)
    name = max(over, key=over.__getitem__, default="")
    strategy = plan.of(name).strategy if name else None
    if strategy is None or over[name] <= 0:
        return ""
    call, longest = placed.workflow.call(name), placed.loaded.batch.limit_tokens
    met, worst = (memory.micro_batch_tokens(call, strategy, worst=worst) for worst in (False, True))
    limit = "trace.max_model_len" if trace.max_model_len else "the longest prompt and trace.cap"
    return (
        f"memory is enough for the trace's lengths, not for the longest that may meet: a micro-batch of {name} with "
        f"{round(worst / longest)} of {longest:,} tokens ({limit}) has {worst:,}, of the trace's at most {met:,}. "
        f"{memory.refusal(ledger, plan)}"
    )


def tight_note(placed: PlacedExperiment) -> str:
    """Which call leaves less than `MARGIN` of a GPU's memory free; empty if none does."""
    if max(placed.memory.over(placed.ledger, MARGIN).values(), default=0.0) <= 0:
        return ""
    error = placed.memory.refusal(placed.ledger, placed.plan, MARGIN)
    return f"memory is enough only as counted, and measured peaks came out up to 7% higher. {error}"


def kv_note(placed: PlacedExperiment, tp: int) -> str:
    """What the KV cache of a replica at `tp` lacks for the responses that a step gives it; empty if they find room.

    Of the responses that run at once; they begin together, or take the place of others where there are more.
    """
    loaded, costs, gpus = placed.loaded, placed.rollout_costs, len(placed.generation.gpus)
    workflow, engine = loaded.experiment.workflow, loaded.engine
    memory, shape = costs.memory(tp), kv_shape(costs.model, loaded.replica.attention_tp(tp // placed.rollout_pp))
    given = math.ceil(workflow.prompts * placed.responses * tp / gpus / placed.generation.micro_batches)
    running = min(given, engine.max_num_seqs)
    prompt = float(loaded.prompt_lengths.mean()) / (placed.responses if engine.enable_prefix_caching else 1)
    lengths = np.sort(loaded.response_lengths)
    at = np.linspace(0, len(lengths) - 1, 65).astype(int)
    left = 1.0 - at / len(lengths)  # of the responses when those of this length end

    def units(tokens: float) -> float:
        return shape.units(math.ceil(tokens), engine.page_tokens)

    each = max(
        share * units(prompt + length) for share, length in zip(left.tolist(), lengths[at].tolist(), strict=True)
    )
    if given > running:
        each = max(each, units(prompt + float((lengths**2).mean() / lengths.mean() / 2)))
    have, tokens = memory.pages * shape.page_units, engine.page_tokens / shape.page_units
    if running * each <= have:
        return ""
    pages = running * each / shape.page_units / loaded.replica.attention_dp / (1 - engine.watermark)
    share = math.ceil(1000 * costs.share_for(tp, pages)) / 1000
    enough = f"memory_utilization {share:g} has room for that mean; a replica of longer ones needs more"
    if share > MOST_SHARE:
        enough = f"no memory_utilization up to {MOST_SHARE} would hold them; a larger tp has room for more"
    mean, worst = (int(running * of * tokens) for of in (each, units(loaded.longest_sequence)))
    return (
        f"KV cache: a replica of {tp} GPU{'s' * (tp > 1)} has room for {int(have * tokens):,} tokens; the {running:,} "
        f"responses that run there at once, of {given:,} a step, need about {mean:,} ({worst:,} if all were the "
        f"longest), so that responses wait or are preempted; {enough}"
    )

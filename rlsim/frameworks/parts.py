"""Parts of a draft that every adapter of a framework writes: cluster, model, calibration, trace, memory, heading."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim.base.refusals import code_of
from rlsim.base.schema import validate
from rlsim.errors import CatalogueError, ConfigError, RlsimError, about, unknown_name
from rlsim.experiment.build import LoadedExperiment, beside, find_trace
from rlsim.experiment.refusals import conditions, shape_values, unmet
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.frameworks.draft import ASSUMED, Draft, Entry
from rlsim.frameworks.mapping import Reading, Use, names, own_limits, unlike, unlike_rows
from rlsim.frameworks.names import (
    check_calibration,
    find_calibration,
    find_cluster,
    find_model,
    nearest_trace,
    spelled_out,
)
from rlsim.frameworks.settings import INTEGER, TEXT, Settings
from rlsim.models.hardware import Cluster, Gpu, load_cluster
from rlsim.models.layers import LatentAttention
from rlsim.models.model import Model, load_model
from rlsim.models.names import UNSEEN
from rlsim.sim.request import EngineConfig
from rlsim.trace import Trace, read_trace

SEEDS = 5
#: The check of a rule, one response after the other: veRL logs timing_s/reward of 1.0 to 1.2 s for 5,120 responses of
#: GSM8K (github.com/verl-project/verl/issues/1037, zhaochenyang20/Awesome-ML-SYS-Tutorial 106).
RULE_CHECK: Mapping[str, Any] = {"time_per_response": "0.21 ms", "workers": 1}
#: A policy, its parameters but for TP, and where those are said.
System = tuple[str, Mapping[str, Any], str]
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "vllm_omni": "vllm", "dynamo": "vllm"}


@dataclass(frozen=True)
class Options:
    """What the options of `rlsim init` say beside a configuration; the draft is to be written into `folder`.

    Configurations name no GPU: `gpu` or `cluster` does. A GPU that is only like `gpu` is `described` by its name and
    figures, and `network` is the rate of a node (`rlsim.frameworks.names.spelled_out`). `model` and `reward_model` name
    shapes that their paths do not tell, `trace` the lengths (default: the nearest that ships), `calibration` the costs
    (default: that of the GPU and engine).
    """

    folder: Path
    gpu: str | None = None
    cluster: str | None = None
    model: str | None = None
    reward_model: str | None = None
    calibration: str | None = None
    trace: str | None = None
    name: str | None = None
    described: tuple[str, ...] = ()
    network: str | None = None

    @classmethod
    def of(cls, folder: Path, gpu: str | None, gpu_like: str | None, **others: Any) -> Options:
        """Options for a GPU of the catalogue, or one that is like it: `h100,48GB,864GB/s,362TFLOP/s`."""
        if gpu_like is None:
            return cls(folder, gpu, **others)
        kind, *figures = re.split(r"[,\s]+", gpu_like.strip())
        return cls(folder, kind, described=(gpu or f"{kind}-like", *figures), **others)


def joined(*parts: str) -> str:
    """Parts of a comment; empty ones are left out."""
    return "; ".join(part for part in parts if part)


def add_cluster(draft: Draft, options: Options, nodes: int, per_node: int, where: str) -> Cluster:
    """The cluster of `nodes` × `per_node` GPUs; one that is named must have as many."""
    if options.cluster is None:
        with about(where, CatalogueError):
            found = find_cluster(options.gpu, nodes, per_node, network=options.network is not None)
        draft.entries["cluster"] = Entry(found.name, joined(f"--gpu {options.gpu}", where))
        if found.gpus_per_node < per_node:
            draft.notes.append(
                f"{where}: nodes of {per_node}, as which {options.gpu} is not built: taken as {found.nodes} nodes of "
                f"{found.gpus_per_node}"
            )
        return _spelled_out(draft, options, found) if options.described or options.network else found
    found = load_cluster(options.cluster)
    if found.gpus != nodes * per_node:
        raise ConfigError(f"{where}: {nodes * per_node} GPUs, cluster {found.name} has {found.gpus}")
    draft.entries["cluster"] = Entry(options.cluster, f"as given; {where}")
    return found


def _spelled_out(draft: Draft, options: Options, found: Cluster) -> Cluster:
    """The cluster key by key, of a GPU or a network that the catalogue does not have."""
    keys = spelled_out(found, options.described, options.network)
    said = {"inter": f"--network {options.network} of a node"} if options.network else {}
    if options.described:
        said |= dict.fromkeys(("intra", "host"), f"{ASSUMED}: of a node of {found.gpu.name}")
        said["gpu"] = f"{ASSUMED}: as {found.gpu.name}, but for the figures that are given"
    draft.entries["cluster"] = {key: Entry(value, said.get(key, "")) for key, value in keys.items()}
    return load_cluster(keys, "the GPU or network as given")


def whole_nodes(gpus: int, per_node: int, where: str, options: Options) -> tuple[int, int]:
    """Nodes, and GPUs of each, that so many GPUs are; raises `ConfigError` unless they fill them, or are one."""
    if gpus % per_node == 0:
        return gpus // per_node, per_node
    if gpus > per_node and options.cluster is None:
        raise ConfigError(f"{where}: {gpus} GPUs are no whole nodes of {per_node}: give --cluster")
    return 1, gpus


def add_model(draft: Draft, options: Options, path: str, where: str) -> Model:
    """The actor's shape: that of `path`, unless an option names one."""
    try:
        chosen, said = find_model(options.model or path, options.folder)
    except CatalogueError as error:
        raise CatalogueError(f"{'--model' if options.model else where}: {error}") from None
    draft.entries["model"] = Entry(chosen, joined("--model" if options.model else where, said))
    if said.endswith(UNSEEN):
        draft.notes.append(f"{where}: {said}")
    return load_model(beside(chosen, options.folder))


def add_own_model(config: Settings, draft: Draft, options: Options, name: str, role: str) -> None:
    """The shape of the critic or reference that the setting of this name says, unless it is the actor's."""
    path = config.text(name) if name in config.names and config.is_given(name) else None
    if path is None or path == config.told(TEXT, "model"):
        return
    try:
        chosen, said = find_model(path, options.folder)
    except RlsimError:
        draft.notes.append(f"{config.where(name)}: the shape of {path} is not known; the {role} is taken to be "
                           "like the actor")  # fmt: skip
        return
    if chosen != draft.data()["model"]:
        draft.block("models")[role] = Entry(chosen, joined(config.where(name), said))


def add_calibration(draft: Draft, options: Options, machines: Cluster, engine: Entry) -> None:
    """The calibration of the GPU and engine, unless an option names one."""
    if options.calibration is not None:
        check_calibration(options.calibration, machines, options.folder)
        draft.entries["calibration"] = Entry(options.calibration, "as given")
        return
    if engine.value not in ENGINES:
        raise ConfigError(f"{engine.comment}: {unknown_name('rollout engine', str(engine.value), ENGINES)}")
    like = machines.gpu.like
    name, said = find_calibration(like or machines.gpu.name, ENGINES[engine.value])
    draft.notes += [said] if said else []
    carried = f"{ASSUMED}: the efficiencies of {like}; " if like else ""
    draft.entries["calibration"] = Entry(name, f"{carried}{engine.comment}")


def add_trace(draft: Draft, options: Options, actor: Model, cap: Entry, filters: str, prompts: Entry | None) -> None:
    """The lengths under a cap: a trace as given, else the nearest that ships, with the rewards that `filters` needs.

    `filters` is the key that drops prompts by their rewards, empty if none does; `prompts` the longest prompt, if any.
    """
    if options.trace is None:
        path, trace, why = nearest_trace(actor, cap.value, rewards=bool(filters))
        mean = f"lengths alone, mean {trace.cut(cap.value)[0].mean():,.0f} tokens"
        draft.notes.append(f"response lengths: {path}, {mean}: {why}")
        comment = f"{ASSUMED}: {mean}; {why}"
    else:
        path, comment = options.trace, "as given"
        trace = read_trace(find_trace(path, options.folder))
        if "turns" in trace.frame:
            draft.entries["environment"] = {}
        if filters and not {"correct", "reward"} & set(trace.frame.columns):
            raise ConfigError(f"--trace {path}: {filters} drops prompts by their rewards, but the trace has neither "
                              "the column reward nor correct")  # fmt: skip
    cut = trace.meta.cap_tokens
    if cut is not None and cut < cap.value:
        draft.notes.append(f"the trace was sampled under a cap of {cut:,} tokens, below {cap.value:,}: no response "
                           "gets longer")  # fmt: skip
    draft.entries["trace"] = entries = {"path": Entry(path, comment), "cap": cap}
    draft.entries["workflow"] = {"reward": _reward(trace, options)}
    longest = trace.frame["prompt_tokens"].max() if "prompt_tokens" in trace.frame else None
    if prompts is None:
        return
    if longest is None:
        why = f"{ASSUMED}, as the trace has no prompt lengths: {prompts.comment}"
        entries["default_prompt_tokens"] = Entry(prompts.value, why)
    most, why = prompts.value, prompts.comment
    if longest is None or longest <= most:
        pass
    elif options.trace is None and (trace.frame["prompt_tokens"] <= most).mean() > 0.5:
        entries["max_prompt_tokens"] = Entry(most, f"{why}; of the assumed trace longer ones are left out")
    else:
        draft.notes.append(f"{why} = {most:,}; the trace's longest prompt has {int(longest):,} and is not cut")
        most, why = int(longest), "the trace's longest prompt"
    entries["max_model_len"] = Entry(most + cap.value, f"{why} + {cap.comment}")


def limit_context(config: Settings, draft: Draft) -> None:
    """The engine's own `max_model_len`, where it is below what the trace has."""
    entries, longest = draft.block("trace"), config.value("max_model_len")
    if longest and longest < entries.get("max_model_len", Entry(longest + 1)).value:
        entries["max_model_len"] = config.entry("max_model_len")


def _reward(trace: Trace, options: Options) -> Entry:
    """How responses are scored: as a trace that is given says, else by the check of a rule.

    A trace that ships gives lengths, and what was right, not how long the checks of somebody's rewards take.
    """
    told = {"reward_time_s", "test_run_s", "judge_tokens"} & set(trace.frame.columns)
    if told and options.trace is not None:
        return Entry({"from_trace": True}, f"as given: {', '.join(sorted(told))} of the trace")
    return Entry({"from_trace": False, **RULE_CHECK}, f"{ASSUMED}: a rule's check, 1.1 s for 5,120 responses of GSM8K")


def add_memory(draft: Draft, share: Entry, folder: Path, *, apart: bool) -> None:
    """A share of GPU memory that is the engine's own; rlsim's also holds what stays of training beside it.

    With generation on GPUs of its own (`apart`) nothing does.
    """
    said = share
    if not apart:
        loaded = LoadedExperiment.of(validate(draft.data() | {"name": "-"}, Experiment), folder)
        try:
            placed = Simulator(loaded).placed()
            _, beside = placed.ledger.staying(placed.gpus)
        except RlsimError:  # what it is, `check` tells
            draft.entries["memory_utilization"] = said
            return
        gpu_bytes, rule = loaded.cluster.gpu_at(0).memory_bytes, loaded.kind((0,)).calibration.memory_rule
        total, most = share.value + beside / gpu_bytes, rule.most_share(gpu_bytes)
        if total > most:
            draft.notes.append(f"{share.comment} = {share.value:g} and {beside / 1e9:.1f} GB of training states are "
                               "more than a GPU has: all of it is taken")  # fmt: skip
            total = max(math.floor(1e4 * most) / 1e4, share.value)
        text = f"{share.comment} = {share.value:g}, which is the engine's own"
        if beside:
            text += f", and {beside / 1e9:.1f} GB of weights and optimizer states beside it"
        said = Entry(float(f"{total:.4g}"), text)
    draft.entries["memory_utilization"] = said


def add_mapped(reading: Reading, draft: Draft, actor: Model) -> None:
    """What the framework's table says of the workflow, training, the engine and the rest."""
    reading.facts |= {"predicts": actor.num_nextn_predict_layers > 0, "mxfp4": actor.of_experts == "mxfp4"}
    latent = any(isinstance(layer.attention, LatentAttention) for layer in actor.groups)
    reading.facts |= {"has_experts": actor.num_experts > 0, "latent": latent}
    for section in ("workflow", "training", "engine"):
        draft.block(section).update(reading.entries(section))
    speculation = reading.entries("engine.speculation")
    if {"method", "num_speculative_tokens"} <= speculation.keys():
        said = joined(*dict.fromkeys(entry.comment for entry in speculation.values()))
        found = Entry({key: entry.value for key, entry in speculation.items()}, said)
        draft.block("engine")["speculation"] = found
    if "environment" in draft.entries:
        draft.block("environment").update(reading.entries("environment"))
    for key in ("weight_sync", "routing"):
        if entry := reading.entry(key):
            draft.entries[key] = entry
    draft.notes += reading.texts("note")


def add_systems(
    reading: Reading,
    draft: Draft,
    tp: int,
    where: str,
    more: Sequence[Any] = (),
    policy: str = "",
    rollout: int = 0,
    *,
    apart: System | None = None,
    best: str = "best-tp",
    over_nodes: bool = False,
) -> None:
    """The system as configured, which is the baseline, the same with the fastest TP (`best`), and PAT.

    `more` are further parts of each system, which is that of an asynchronous `policy` (its parameters are those of the
    framework's table), or `apart`, or in turns, on `rollout` GPUs for generation alone, or all; PAT is of the last. A
    replica that is `over_nodes` leaves PAT out, which switches between degrees within a node.
    """
    if policy:
        found = reading.entries(policy)
        said = joined(*(entry.comment for entry in found.values()))
        apart = policy, {key: entry.value for key, entry in found.items()}, said
    elif rollout:
        split = {key: entry.value for key, entry in reading.entries("split").items()}
        apart, more = ("verl", {}, ""), [{"split": {"rollout_gpus": rollout, **split}}, *more]
    policy, parameters, said = apart or ("verl", {}, "")

    def system(name: str, degree: int | str, comment: str) -> Entry:
        return Entry({"name": name, "use": [{policy: {"tp": degree, **parameters}}, *more]}, comment)

    fastest = "the fastest TP of generation on the same GPUs" if apart else "the fastest static TP"
    systems = [system("as-configured", tp, joined(where, said)), system(best, "best", fastest)]
    engine = draft.entries.get("engine")
    cut = {"pp", "ep", "data_parallel_attention"}
    fixed = over_nodes or (isinstance(engine, dict) and bool(cut & engine.keys()))  # such a replica stays one
    if apart is None and not fixed:
        systems.append(Entry({"name": "pat", "use": ["pat", *more]}, "TP switched while responses are generated"))
    draft.entries["seeds"] = Entry(SEEDS, "runs of each system, each on other draws")
    draft.entries["baseline"] = Entry("as-configured")
    draft.entries["systems"] = Entry(tuple(systems))


def add_engine(config: Settings, draft: Draft, engine: str, gpu: Gpu, use: Use = "class", said: str = "") -> None:
    """Limits of the engine that are given, by their names, and those that it sets itself if they are not rlsim's."""
    draft.entries["engine"] = entries = {
        limit: Entry(value, joined(f"{engine}'s default on {gpu.name}", said))
        for limit, value in own_limits(engine, gpu, use).items()
        if value != getattr(EngineConfig(), limit)
    }
    for limit in ("max_num_seqs", "max_num_batched_tokens", "page_tokens"):
        if limit in config.names and config.get(INTEGER, limit) not in (None, -1):  # -1: SGLang's for no chunks
            entries[limit] = config.entry(limit)


def batching(reading: Reading, draft: Draft, name: str) -> list[Any]:
    """The parts of every system that drop prompts by their rewards, if the setting of this name does ("": none), and
    that launch others than those of a step."""
    launched = reading.entries("gen_batches")
    found: list[Any] = []
    if name:
        found.append("dynamic_sampling")
        draft.notes.append(f"{reading.config.where(name)}: dynamic_sampling in every system")
    if launched:
        found.append({"gen_batches": {key: entry.value for key, entry in launched.items()}})
        where, prompts = joined(*(entry.comment for entry in launched.values())), launched["prompts"].value
        draft.notes.append(f"{where}: gen_batches in every system, {prompts:,} prompts at a time")
    return found


def unlike_of(
    config: Settings, draft: Draft, of: str, engine: str, *sections: str, but: Iterable[str] = (), also: str = ""
) -> list[str]:
    """What a framework, and an engine below these sections, has that an experiment has not, `but` for some keys.

    Keys of the engine that are read are left out, and those of turns where the trace has some; `also` names more rows.
    """
    rows = (*unlike_rows(of), *(unlike_rows(engine, *sections) if sections else ()))
    if "environment" not in draft.entries:
        rows += unlike_rows(f"{of}-turns")
    elsewhere = {*but, *config.keys(*names(f"{of}-{engine}"))}
    kept = (row for row in rows if row[0] not in elsewhere)
    return unlike(config, [*kept, *(unlike_rows(also) if also else ())])


def note_refusals(
    reading: Reading, draft: Draft, actor: Model, *of: str, megatron: bool, release: str = "", **more: Any
) -> None:
    """Notes of what a framework, its engines and Megatron would not start with (`rlsim.experiment.refusals`).

    What the conditions ask for are facts and settings by their names, the actor's shape, and `more`.
    """
    config = reading.config
    wanted = {name for row in conditions() for name in code_of(row.refused).co_names} - more.keys()
    more |= {name: reading.fact(name) for name in wanted & {*reading.fact_names, *reading.facts}}
    asked = wanted & config.names.keys() - more.keys()
    values = {name: config.told(kind, name) for name, (kind, _) in config.names.items() if name in asked}
    values["uneven"] = bool(values.get("uneven"))  # stages with layers that are dealt otherwise
    values |= shape_values(actor) | {"megatron": megatron, "vllm": "vLLM" in of, "sglang": "SGLang" in of} | more
    for row in unmet(values, *of, *(["Megatron"] if megatron else []), release=release):
        said = config.said(*(name for name in code_of(row.refused).co_names if name in asked and config.is_given(name)))
        draft.refused.append(f"{said or config.file}: {row.text(values, release)}")
    draft.notes += draft.refused


def finish(
    config: Settings, draft: Draft, options: Options, sources: Sequence[str], *titles: Any, unread: tuple[str, ...] = ()
) -> Draft:
    """The draft with its heading, its keys in the order of the schema, and the first name among `titles`, if any.

    Keys that nobody asked for are told, those that begin with `unread`; without it, raises `ConfigError` for a misspelt
    one.
    """
    if not unread:
        config.check_spelling()
    draft.unread = [key for key in config.unasked() if not unread or key.startswith(unread)]
    otherwise = config.option.removeprefix("--")
    text = next((one for one in titles if isinstance(one, str) and one and "$" not in one), otherwise)
    title = options.name or re.sub(r"[^\w.+-]+", "-", text).strip("-") or otherwise
    draft.heading = [
        f"{title}: made by rlsim init from {' '.join(sources)}",
        f"What the configuration does not say is {config.program}'s default. Run it: rlsim run FILE",
    ]
    draft.entries["framework"] = Entry(config.program, "whose settings rlsim tune searches")
    ordered = (key for key in Experiment.model_fields if key in draft.entries)
    draft.entries = {"name": Entry(title), **{key: draft.entries[key] for key in ordered}}
    draft.entries["sources"] = draft.sources()
    return draft


def check(draft: Draft, folder: Path, warnings: list[str] | None = None) -> str:
    """Why `rlsim run` would refuse the experiment of a draft in `folder`; empty if it would not.

    What memory may lack though it runs is added to `warnings`.
    """
    from rlsim.experiment.run import checked_cases

    try:
        cases = checked_cases(validate(draft.data(), Experiment), folder)
    except RlsimError as error:
        return str(error)
    if warnings is not None:
        warnings += (note for case in cases for note in case.memory_notes)
    return ""

"""What does not go together: parts of a system (`rlsim/data/refusals.yaml`), and settings with which a framework or its
engine does not start (`rlsim/data/starts.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlsim.base.catalogue import DATA
from rlsim.base.reading import read_yaml
from rlsim.base.refusals import code_of, holds, refuse
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.systems import System, SystemSpec, parse_systems
from rlsim.models.layers import FullAttention
from rlsim.models.model import Model
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import asked
from rlsim.workflow import Workflow


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
    generate = next((call.name for call in graph.calls if call.kind == "generate"), "")
    refuse(
        "calls",
        loaded=loaded,
        system=system,
        graph=graph,
        training=loaded.experiment.training,
        prompts=loaded.experiment.workflow.prompts,
        streamed=("sample", "train") in ways,
        chunked="chunk" in {grain for grain, _ in ways},
        rewarded=any(call.kind == "reward" for call in graph.calls),
        rewarded_by_sample=("sample", "reward") in ways,
        generate=generate,
        sync_lags={edge.lag for edge in graph.into(generate) if graph.call(edge.source).kind == "sync"},
        endless=endless(system),
        planner=planner(system),
    )


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
        within = _number(self.since) <= _number(release) <= _number(self.until or "9999") or not release
        return known and within and holds(self.refused, values)

    def text(self, values: Mapping[str, Any], release: str) -> str:
        """The row in words for a person."""
        whose = f"{self.of} {release}" if release and self.since + self.until else self.of
        return f"{self.says.format(**values)}: {whose} does not start with it ({self.at})"


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part)


@cache
def conditions() -> tuple[Condition, ...]:
    """All rows of the table."""
    table = read_yaml(DATA / "starts.yaml")
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
        "experts": model.num_experts,
        "positions": model.max_position_embeddings,
    }


def starts_of(loaded: LoadedExperiment, systems: Sequence[SystemSpec] = ()) -> list[str]:
    """Why the framework or engine of an experiment would not start with it, in words; empty if nothing is known to.

    Of other `systems` if any are given. What is not written in it, the engine and the framework settle themselves.
    """
    experiment = loaded.experiment
    engine, training, workflow = experiment.engine, experiment.training, experiment.workflow
    written = {key: value for key, value in engine if key in engine.model_fields_set}
    framework, _, release = experiment.framework.partition(" ")
    (engine_name, *others) = {calibration.engine for calibration in loaded.calibrations.values()}
    colocated = not any(spec.make().placing for spec in systems or parse_systems(experiment.systems))
    gpus = loaded.cluster.gpus if colocated else None
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
        "dynamic": training.micro_batch_sequences is None,
        "minis": training.mini_batches,
        "colocated": colocated,
    }
    serves = {"vllm": "vLLM"}.get(engine_name, "") if not others else ""
    trains = {"megatron": "Megatron", "fsdp": "FSDP"}.get(training.backend, "")
    return [row.text(values, release) for row in unmet(values, serves, trains, framework, release=release)]

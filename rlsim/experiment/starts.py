"""Whether a framework and its engine start with settings: rows of `rlsim/data/starts.yaml`, over names and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.refusals import code_of, holds
from rlsim.layers import FullAttention
from rlsim.models import Model
from rlsim.reading import read_yaml

TABLE = Path(__file__).resolve().parents[1] / "data" / "starts.yaml"


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
        number = _number(release)
        within = not number or (_number(self.since) <= number and (not self.until or number <= _number(self.until)))
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
    table = read_yaml(TABLE)
    return tuple(
        Condition(of, row["if"], row["says"], row["at"], row.get("since", ""), row.get("until", ""))
        for of, rows in table.items()
        for row in rows
    )


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


def starts_of(loaded: LoadedExperiment, systems: Any = None) -> list[str]:
    """Why the framework or engine of an experiment would not start with it, in words; empty if nothing is known to.

    Of other `systems` if any are given. What is not written in it, the engine and the framework settle themselves.
    """
    experiment = loaded.experiment
    engine, training, workflow = experiment.engine, experiment.training, experiment.workflow
    written = {key: value for key, value in engine if key in engine.model_fields_set}
    framework, _, release = experiment.framework.partition(" ")
    (engine_name, *others) = {calibration.engine for calibration in loaded.calibrations.values()}
    colocated = "rollout_gpus" not in json.dumps(systems or experiment.systems, default=str)
    megatron, tp, pp, cp = training.backend == "megatron", training.tp, training.pp, training.cp
    values = {
        **shape_values(loaded.model),
        "budget": written.get("max_num_batched_tokens"),
        "seqs": written.get("max_num_seqs"),
        "chunked": written.get("chunked_prefill"),
        "longest": loaded.longest_sequence,
        "megatron": megatron,
        "uneven": bool(framework),  # its own keys may say which stage has fewer layers: `rlsim init` looked
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": training.ep,
        "zero": training.zero_stage,
        "gpus": loaded.cluster.gpus if colocated else None,
        "dp": loaded.cluster.gpus // (tp * pp * cp) or None if colocated else None,
        "prompts": workflow.prompts,
        "responses": workflow.responses,
        "train_tokens": training.micro_batch_tokens,
        "dynamic": training.micro_batch_sequences is None,
        "minis": training.mini_batches,
        "offload": training.offload,
        "colocated": colocated,
    }
    serves = {"vllm": "vLLM"}.get(engine_name, "") if not others else ""
    trains = {"megatron": "Megatron", "fsdp": "FSDP"}.get(training.backend, "")
    return [row.text(values, release) for row in unmet(values, serves, trains, framework, release=release)]

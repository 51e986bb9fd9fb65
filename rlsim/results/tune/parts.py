"""Where the time of a configuration goes: why its GPUs are idle, and what fits on them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.cost.ledger import GB, total
from rlsim.cost.memory import RESERVED_BYTES
from rlsim.cost.rollout import powers_of_two
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.engines import rollout_costs
from rlsim.experiment.placed import PlacedExperiment
from rlsim.results.tune.idle import idle_causes, idle_shares, waits
from rlsim.results.tune.space import baseline_of
from rlsim.results.tune.trial import Run, simulator_of, tables_of


def memory_by_tp(placed: PlacedExperiment) -> pd.DataFrame:
    """The rollout engine at every TP that divides a node, on the GPUs that it has, beside what others keep there.

    One row per TP. Bytes are GB (1e9) on each GPU: `weights_gb`, `activations_gb` (working memory of an iteration),
    `reserved_gb` (context, communication, graphs), `resident_gb` (what training and other models keep meanwhile),
    `kv_gb` (the KV cache: what is left of `budget_gb`). Of a replica: `kv_tokens`, `full_sequences` and
    `mean_sequences` (sequences of the longest prompt and the cap, and of mean length, that the cache holds), `replicas`
    and `sequences` (that a step gives each). `fits`: whether one full sequence does; `why_not` says what is lacking,
    `waits` whether a step's sequences of mean length are more than the cache or the engine takes at once.
    """
    try:
        plan, unplaced = placed.plan, ""
    except CapacityError as error:  # other calls do not fit: what generation needs is known nonetheless
        plan, unplaced = placed.unchecked_plan, str(error)
    loaded, cluster, gpus = placed.loaded, placed.loaded.cluster, len(placed.generation.gpus)
    left = len(placed.generation.nodes(cluster)[0])  # of a node; as many of each
    _, beside_bytes = placed.ledger_of(plan).staying(placed.generation.gpus)
    costs = rollout_costs(loaded, placed.generation.gpus, resident_bytes=beside_bytes)
    budget_bytes = loaded.experiment.memory_utilization * cluster.gpu_at(0).memory_bytes
    step, longest, rows = loaded.experiment.workflow.prompts * loaded.launched_responses, loaded.longest_sequence, []
    for tp in powers_of_two(cluster.domain_gpus):
        row: dict[str, object] = {"tp": tp, "replicas": gpus // tp, "fits": False, "waits": False}
        rows.append(row)
        if left % tp:
            row["why_not"] = f"TP {tp} does not divide the {left} GPUs of a node that generation has"
            continue
        try:
            memory = costs.memory(tp, min_tokens=-sys.maxsize)  # whatever is left, and be it less than nothing
        except ConfigError as error:
            row["why_not"] = str(error)
            continue
        tokens, sequences = memory.capacity_tokens, -(-step * tp // gpus)
        mean_sequences = max(int(tokens // loaded.batch.mean_tokens), 0)
        lacking = f"room for {tokens:,} tokens of KV at TP {tp}, a full sequence has {longest:,}"
        if memory.kv_bytes <= 0.0:
            lacking = f"weights and working memory exceed the budget by {-memory.kv_bytes / GB:.1f} GB"
        engine = memory.weight_bytes, memory.activation_bytes, memory.reserved_bytes
        sizes = budget_bytes, *engine, beside_bytes, max(memory.kv_bytes, 0.0)
        row |= dict(zip(_BYTES, (size / GB for size in sizes), strict=True)) | {
            "fits": tokens >= longest and not unplaced,
            "kv_tokens": max(tokens, 0),
            "full_sequences": max(tokens // longest, 0),
            "mean_sequences": mean_sequences,
            "sequences": sequences,
            "waits": sequences > min(mean_sequences, loaded.engine.max_num_seqs),
            "why_not": unplaced or lacking * (tokens < longest),
        }
    counts = ("kv_tokens", "full_sequences", "mean_sequences", "sequences", "waits", "why_not")
    return pd.DataFrame(rows, columns=["tp", "replicas", "fits", *_BYTES, *counts])


_BYTES = ("budget_gb", "weights_gb", "activations_gb", "reserved_gb", "resident_gb", "kv_gb")


def memory_by_call(placed: PlacedExperiment) -> pd.DataFrame:
    """The calls beside generation, on each of their GPUs in GB: one row per call.

    `kept_gb` between its runs, `working_gb` only while it runs, `total_gb` on the fullest GPU while it runs with all
    that others keep there, `gpu_gb` what the GPU has, `fits`.
    """
    loaded, ledger, found = placed.loaded, placed.ledger_of(placed.unchecked_plan), []
    for name in ledger.phases:
        gpu, rows = ledger.fullest(name)
        kept = total(row for row in rows if row.holder == name and row.stays)
        working = total(row for row in rows if row.holder == name and not row.stays) - RESERVED_BYTES
        gpu_bytes, model = loaded.cluster.gpu_at(gpu).memory_bytes, loaded.models[placed.workflow.call(name).model]
        sizes = [size / GB for size in (kept, working, total(rows), gpu_bytes)]
        found.append((name, model.name, *sizes, total(rows) <= gpu_bytes))
    return pd.DataFrame(found, columns=["call", "model", "kept_gb", "working_gb", "total_gb", "gpu_gb", "fits"])


@dataclass(frozen=True)
class Parts:
    """Tables of one run: `idle` (`idle_shares`), what stage barriers wait for (`waits`), and what fits: the engine by
    TP (`memory_by_tp`), the other calls (`memory_by_call`)."""

    idle: pd.DataFrame
    waits: pd.DataFrame
    memory: pd.DataFrame
    memory_calls: pd.DataFrame

    def as_json(self) -> dict[str, Any]:
        return {name: json.loads(frame.to_json(orient="records")) for name, frame in vars(self).items()}


def parts_of(loaded: LoadedExperiment, folder: Path, run: Run) -> Parts:
    """The parts of an experiment's baseline, run as `run` says."""
    simulator = simulator_of(loaded.experiment, folder, run)
    spec = baseline_of(loaded.experiment.systems, loaded.experiment.baseline)
    tables, gpus = tables_of(simulator, spec, run.seed), loaded.cluster.gpus
    own = {name: tables[name] for name in ("steps", "spans", "responses", "stays", "calls")}
    causes = idle_causes(**own, gpus=gpus)
    placed = simulator.placed(spec.make())
    return Parts(
        idle_shares(causes, own["steps"], gpus).drop(columns=["case", "system"]),
        waits(causes, own["steps"], gpus).drop(columns=["case", "system"]),
        memory_by_tp(placed),
        memory_by_call(placed),
    )

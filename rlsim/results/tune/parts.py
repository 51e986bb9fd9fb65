"""Where the time of a configuration goes: why its GPUs are idle, and what fits on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.simulator import Simulator
from rlsim.results.tune.idle import idle_causes, idle_shares, tail_seconds, waits
from rlsim.results.tune.memory import memory_by_call, memory_by_tp
from rlsim.results.tune.space import baseline_of
from rlsim.results.tune.trial import Run, alone, tables_of


@dataclass(frozen=True)
class Parts:
    """Tables of one run: `idle` (`idle_shares`), what stage barriers wait for (`waits`), and what fits: the engine by
    TP (`memory_by_tp`), the other calls (`memory_by_call`)."""

    idle: pd.DataFrame
    waits: pd.DataFrame
    memory: pd.DataFrame
    memory_calls: pd.DataFrame

    def as_json(self) -> dict[str, Any]:
        """The tables as lists of rows."""
        return {name: json.loads(frame.to_json(orient="records")) for name, frame in vars(self).items()}


def parts_of(loaded: LoadedExperiment, folder: Path, run: Run) -> Parts:
    """The parts of an experiment's baseline, run as `run` says."""
    simulator = Simulator(LoadedExperiment.of(alone(loaded.experiment, run), folder), search=False)
    spec = baseline_of(loaded.experiment.systems, loaded.experiment.baseline)
    tables, gpus = tables_of(simulator, spec, run.seed), loaded.cluster.gpus
    own = {name: tables[name] for name in ("steps", "spans", "responses", "stays", "calls")}
    causes = idle_causes(**own, gpus=gpus)
    tail = tail_seconds(own["steps"], own["spans"], own["stays"], own["calls"], gpus)
    placed = Simulator(loaded, search=False).placed()
    return Parts(
        idle_shares(causes, tail, own["steps"], gpus).drop(columns=["case", "system"]),
        waits(causes, own["steps"], gpus).drop(columns=["case", "system"]),
        memory_by_tp(placed),
        memory_by_call(placed),
    )

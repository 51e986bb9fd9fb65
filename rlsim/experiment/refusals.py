"""What parts of a system do not go with: rows of `rlsim/data/refusals.yaml`. Conditions of all tables are held here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from rlsim.errors import ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.system import System
from rlsim.reading import read_yaml
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import asked
from rlsim.workflow import Workflow

TABLE = Path(__file__).resolve().parents[1] / "data" / "refusals.yaml"


@cache
def code_of(condition: str) -> CodeType:
    """A condition of a table that ships with rlsim: an expression; the names in it are those of values."""
    return compile(condition, condition, "eval")


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether such a condition holds of these values."""
    return bool(eval(code_of(condition), {"__builtins__": {}}, values))


@cache
def _rows() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = read_yaml(TABLE)
    return found


def refuse(group: str, **values: Any) -> None:
    """Raises `ConfigError` with the words of the first row of a group whose condition holds."""
    for row in _rows()[group]:
        if holds(row["if"], values):
            raise ConfigError(row["says"].format(**values))


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

"""The plans that searched systems were given: as a table, and as an experiment that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.experiment.build import beside, find_trace
from rlsim.experiment.result import Result
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import SystemSpec
from rlsim.policies.plan import plan_text
from rlsim.reading import plain

PLAN = "plan.yaml"
COLUMNS = ("system", "call", "gpus", "tp", "pp", "dp", "micro_batches", "zero_stage", "offload", "memory_share")
#: The calls of a searched system begin when their data is there, as under this policy (`rlsim.policies.searched`).
WITHOUT_BARRIERS = "reward_beside"


def found_plans(result: Result) -> pd.DataFrame:
    """One row per searched system and call: the range of its GPUs, TP, PP, DP, micro-batches of a rank, ZeRO stage,
    whether its states wait in host memory, the engine's share of a GPU; what a call has not is missing."""
    rows = [
        {"system": system, "call": call, "pp": 1, **placed}
        for system, part in result.manifest["plans"][""].items()
        for call, placed in part["plan"]["calls"].items()
    ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


def plan_file(found: Sequence[SystemSpec], experiment: Experiment, folder: Path) -> dict[str, str]:
    """`plan.yaml` by name: the experiment with its own systems and the `found` ones, whose plan is spelled out.

    Files that it names by a path from `folder` are named by their whole path. Nothing if there is no such system.
    """
    if not found:
        return {}
    data = _placed(plain(experiment.model_dump(mode="json", exclude_defaults=True)), folder)
    data["systems"] += [{**spec.entry, "name": f"{spec.name} (found)"} for spec in found]
    about = f"The plan that rlsim advise found for {experiment.name}. Run it: rlsim run {PLAN}"
    return {PLAN: plan_text(data, about)}


def _placed(experiment: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The experiment with the whole paths of its files."""

    def found(name: Any) -> Any:
        if isinstance(name, dict):  # calibrations by GPU
            return {kind: found(one) for kind, one in name.items()}
        path = Path(beside(name, folder)) if isinstance(name, str) else None
        return str(path.resolve()) if path is not None and path.suffix and path.is_file() else name

    def trace(name: str) -> str:
        whole = find_trace(name, folder)
        return str(whole.resolve()) if whole in (folder / name, Path(name)) else name

    named = experiment["trace"].get("path") or []
    paths = [trace(one) for one in ([named] if isinstance(named, str) else named)]
    places = {key: found(experiment[key]) for key in ("model", "calibration")}
    models = {role: found(name) for role, name in experiment.get("models", {}).items()}
    lengths = {**experiment["trace"], **({"path": paths} if paths else {})}
    return {**experiment, **places, **({"models": models} if models else {}), "trace": lengths}

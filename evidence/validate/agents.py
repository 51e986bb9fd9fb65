"""Part `agents`: a measured run of agents on SWE-bench, by every split of its GPUs that may be meant.

Its trajectories are drawn by rlsim's recipe from what the report states of them (`agents.yaml`), so that turns and
sandbox seconds are inputs. Nothing is fitted to the times of its phases. The first step, before which nothing could be
generated, is left out on both sides. In splits without a remark each step launches 8 groups, one batch ahead, and
rlsim syncs after each: a fifth of that counts in the step. With groups in flight, a step of rlsim is five of the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from evidence.validate.asynchronous import experiments
from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, measured_section, run
from evidence.validate.rows import Row, markdown, number
from rlsim.base.schema import validate
from rlsim.base.tables import csv_errors
from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.result import Result
from rlsim.trace import write_trace
from rlsim.trace.generate import Recipe, generate

TABLE = "agents.csv"
#: Groups of a step, and steps between two updates of the rollout's weights.
PROMPTS, SYNC_EVERY = 8, 5


#: Quantities of the trajectories that the trace is drawn from, and columns that are compared: seconds of a step's
#: phases (`rollout_s` is the wall time of collecting the trajectories, `sync_s` of every fifth step), figures over its
#: 64 trajectories, staleness in versions of the rollout's weights.
INPUTS = ("sandbox_s_mean", "sandbox_s_p95", "turns")
SHOWN = (
    "rollout_s", "wait_s", "logprob_s", "train_s", "sync_s", "step_s", "inference_s_mean", "inference_s_p95",
    "staleness_mean",
)  # fmt: skip


def measured(options: Options) -> dict[str, float]:
    """Means over the run's steps but the first."""
    with csv_errors(options.evidence / TABLE, ConfigError):
        steps = pd.read_csv(options.evidence / TABLE)[1:]
    return {name: float(steps[name].mean()) for name in (*SHOWN, *INPUTS)}


def phases(result: Result, prompts: int) -> dict[str, float]:
    """The same of an experiment with so many prompts a step."""
    steps, parts = result.steps[result.steps["steady"]], prompts // PROMPTS
    mean = steps.mean(numeric_only=True)
    synced_s = (1 - 1 / SYNC_EVERY) * mean["sync_time_s"] if parts == 1 else 0.0  # more often than in the run
    own = result.responses[result.responses["step"].isin(steps["step"]) & result.responses["trained"]]
    inference_s = own["finish_at"] - own["start_at"] - own["tool_s"] - own["tool_wait_s"]
    found = {
        "rollout_s": mean["gen_time_s"] / parts, "wait_s": mean["gen_exposed_s"] / parts,
        "logprob_s": mean["prep_time_s"] / parts, "train_s": mean["train_time_s"] / parts,
        "sync_s": mean["sync_time_s"], "step_s": mean["step_time_s"] / parts - synced_s,
        "inference_s_mean": inference_s.mean(), "inference_s_p95": inference_s.quantile(0.95),
        "sandbox_s_mean": own["tool_s"].mean(), "sandbox_s_p95": own["tool_s"].quantile(0.95),
        "turns": own["tool_calls"].mean() + 1,
    }  # fmt: skip
    return found | ({"staleness_mean": mean["staleness_mean"]} if parts > 1 else {})


def splits(options: Options, given: Mapping[str, Any]) -> dict[str, dict[str, float] | str]:
    """By split its phases, or why it is refused."""
    found: dict[str, dict[str, float] | str] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.parquet"
        write_trace(generate(validate(dict(given["recipe"]), Recipe)), path)
        for arm, experiment, _ in experiments(given["swe"]):
            options.progress(f"agents: {arm}")
            experiment["trace"]["path"] = str(path)
            try:
                found[arm] = phases(run(experiment), experiment["workflow"]["prompts"])
            except RlsimError as error:
                found[arm] = str(error).split("; no setting")[0].split(": ", 2)[-1]
    return found


def section(options: Options) -> Section:
    """All splits (a minute)."""
    real, found = measured(options), splits(options, figures(options, "agents").given)
    rows = [
        Row("agents", f"swe-qwen235b/{arm}", name, real[name], value, kind="input" if name in INPUTS else "output")
        for arm, own in found.items() if not isinstance(own, str) for name, value in own.items()
    ]  # fmt: skip
    cells = [["measured", *(number(real[name]) for name in SHOWN), ""]]
    for arm, own in found.items():
        there, refused = ({}, own) if isinstance(own, str) else (own, "")
        cells.append([arm, *(number(there[name]) if name in there else "" for name in SHOWN), refused])
    return measured_section(rows, 1, splits=markdown(("trainer + engines", *SHOWN, "refused"), cells))

"""Part `asynchronous`: measured steps of trainers that relax synchrony, and their gain over synchronous ones.

Of some of veRL's runs the mean response is not stated: what makes the synchronous run as long as it was is an input,
and the asynchronous run on the same lengths is predicted. AReaL's mean follows from its table; nothing is fitted there.

What stated runs have in common is here too: experiments that a file of the evidence states, lengths from a stated mean,
seconds by call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from scipy.optimize import brentq

from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, measured_section, published_rows
from evidence.validate.published import run as run_experiment
from evidence.validate.rows import markdown
from rlsim.base.schema import validate
from rlsim.experiment.build import find_trace
from rlsim.experiment.load import set_path
from rlsim.experiment.result import Result
from rlsim.trace import read_trace, write_trace
from rlsim.trace.generate import Recipe, draw_trace, length_model
from rlsim.trace.mixture import LengthModel

#: The shipped trace whose shape stands in for lengths of which a source states the mean alone.
SHAPE = "rollpacker-math"
CURVE = ("step_time_s", "responses_per_s", "staleness_mean", "staleness_p95", "rollout_idle", "trainer_idle")


def section(options: Options) -> Section:
    """Every figure of every run (about two minutes)."""
    found = stated(options, "asynchronous")
    rows = published_rows(options, "asynchronous", found, whose="measured")
    curve = [
        [arm, *("—" if pd.isna(own[name]) else f"{own[name]:.3g}" for name in CURVE)]
        for arm, own in found["areal"].items()
    ]
    return measured_section(rows, 2, curve=markdown(("system", *CURVE), curve))


def scaled(model: LengthModel, mean_tokens: float, cap_tokens: int) -> LengthModel:
    """The same mixture with all lengths multiplied so that the mean of the capped ones is `mean_tokens`."""

    def times(factor: float) -> LengthModel:
        parts = [part.model_copy(update={"median_tokens": part.median_tokens * factor}) for part in model.components]
        return model.model_copy(update={"components": tuple(parts)})

    return times(float(brentq(lambda x: times(x).mean(cap_tokens) - mean_tokens, 1e-4, 1e4)))


def write_lengths(
    path: Path, mean_tokens: float, cap_tokens: int, prompts: int, responses: int, shape: str = SHAPE
) -> None:
    """A trace of lengths with that mean under that cap, of the form of a shipped one and its correlation in prompts."""
    recipe = validate(dict(read_trace(find_trace(shape, Path())).meta.recipe or {}), Recipe)
    model = scaled(length_model(recipe), mean_tokens, cap_tokens)
    lengths = recipe.lengths.model_copy(update={"model": model, "fit": None, "facts": ()})
    size = {"prompts": prompts, "responses": responses, "cap_tokens": cap_tokens}
    unknown = {"rewards": None, "prompt_tokens": None, "growth": None, "groups": None}
    write_trace(draw_trace(recipe.model_copy(update={"lengths": lengths, **size, **unknown})), path)


def stated(options: Options, name: str) -> dict[str, dict[str, Any]]:
    """By run of a file of the evidence and by arm what rlsim says: see `results`."""
    found = {}
    for run, given in figures(options, name).given.items():
        options.progress(f"{name}: {run}")
        found[run] = dict(results(given))
    return found


def results(run: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What rlsim says of each arm: its summary, mean seconds of its calls, and the GPU-seconds of a step."""
    mean, shape = 0.0, run.get("shape", SHAPE)
    for arm, experiment, given in experiments(run):
        mean = _mean_for(experiment, given, shape) if isinstance(given, Mapping) else given or mean
        result = run_stated(experiment, mean, shape)
        own: dict[str, Any] = {str(column): value for column, value in result.summary().iloc[0].items()}
        own |= {f"{call}_s": call_s for call, call_s in call_seconds(result).items()}
        cluster = result.manifest["cluster"]
        yield arm, own | {"mean": mean, "gpu_s": own["step_s"] * cluster["nodes"] * cluster["gpus_per_node"]}


def experiments(run: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each arm, its experiment without the path of a trace, and what is given as the mean response, if anything is."""
    for arm, settings in run["arms"].items():
        experiment = copy.deepcopy(run["experiment"])
        for key, value in settings.items():
            set_path(experiment, key, copy.deepcopy(value))
        yield arm, experiment, experiment.pop("mean", None)


def _mean_for(experiment: Mapping[str, Any], wanted_s: Mapping[str, float], shape: str) -> float:
    """The mean response (tokens) with which these calls of a step take their seconds together."""

    def excess_s(mean: float) -> float:
        found = seconds(experiment, mean, shape)
        return sum(found[call] - call_s for call, call_s in wanted_s.items())

    return float(brentq(excess_s, 100, 6000, xtol=1))


def seconds(experiment: Mapping[str, Any], mean_response: float, shape: str = SHAPE) -> dict[str, float]:
    """The `call_seconds` of an experiment on lengths of a stated mean; see `run_stated`."""
    return call_seconds(run_stated(experiment, mean_response, shape))


def call_seconds(result: Result) -> dict[str, float]:
    """Mean seconds of a step (`step`) and of each call of an experiment's only system."""
    steady = result.steps[result.steps["steady"]]
    calls = result.calls[result.calls["step"].isin(steady["step"])]
    times = (calls["end_at"] - calls["start_at"]).groupby(calls["call"]).mean()
    return {"step": float(steady["step_time_s"].mean()), **{str(call): float(s) for call, s in times.items()}}


def run_stated(experiment: Mapping[str, Any], mean_response: float, shape: str = SHAPE) -> Result:
    """An experiment on lengths of that mean (tokens) and form; its trace has no path, which is made here."""
    workflow, cap = experiment["workflow"], int(experiment["trace"]["cap"])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.parquet"
        write_lengths(path, mean_response, cap, workflow["prompts"] * workflow["steps"], workflow["responses"], shape)
        return run_experiment({**experiment, "trace": {**experiment["trace"], "path": str(path)}})

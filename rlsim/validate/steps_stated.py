"""What measured steps have in common: lengths from a stated mean, and seconds by call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy.optimize import brentq

from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.schema import validate
from rlsim.trace import read_trace, write_trace
from rlsim.trace.generate import Recipe, draw_trace, length_model
from rlsim.trace.mixture import LengthModel
from rlsim.validate.runs import run

#: The shipped trace whose shape stands in for lengths of which a source states the mean alone.
SHAPE = "rollpacker-math"


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


def seconds(experiment: Mapping[str, Any], mean_response: float, shape: str = SHAPE) -> dict[str, float]:
    """Mean seconds of a step (`step`) and of each call of an experiment's only system; see `run_stated`."""
    result = run_stated(experiment, mean_response, shape)
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
        return run({**experiment, "trace": {**experiment["trace"], "path": str(path)}})

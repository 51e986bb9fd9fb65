"""Iterations of an engine from the times of its requests, and what a table of half of them says of the others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear

from calibration.markdown import section, table
from rlsim.calibrate.engine_log import read_engine_log
from rlsim.calibrate.from_engine import from_engine
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.steps import iteration_times
from rlsim.cost.calibration import load_calibration
from rlsim.cost.roofline import step_cost
from rlsim.models.model import load_model

REQUESTS = Path(__file__).resolve().parents[2] / "evidence" / "vllm_requests.csv"
BASE, RELEASE, WINDOW_S = "rtx-pro-6000-vllm", "0.19.0", 0.5
#: The source states no TP. Weights alone of a 32B in bf16 take 36 ms at TP1, where steps of 26 ms were measured.
TPS = {"llama-3.1-8b": 1, "qwen3-30b-a3b": 2, "qwen3-32b": 2}


def windows(requests: pd.DataFrame) -> pd.DataFrame:
    """Mean decode steps of half seconds after the last prefill: sequences, tokens of each and seconds.

    All running sequences take part in each step. So a response's tokens but the first are the steps between its first
    and its last; how many steps each window has follows from all responses together (least squares, with a pull to
    windows that are alike).
    """
    first, last = requests.first_token_s.to_numpy(float), requests.last_token_s.to_numpy(float)
    ends = np.arange(0.0, last.max() + WINDOW_S, WINDOW_S)
    inside = np.clip(last[:, None], ends[:-1], ends[1:]) - np.clip(first[:, None], ends[:-1], ends[1:])
    share, alike = inside / WINDOW_S, np.diff(np.eye(len(ends) - 1), axis=0)
    steps = lsq_linear(
        np.vstack([share, alike]),
        np.concatenate([requests.output_tokens - 1.0, np.zeros(len(alike))]),
        bounds=(0, np.inf),
    ).x
    middle = (ends[:-1] + ends[1:]) / 2
    grown = np.clip((middle - first[:, None]) / (last - first)[:, None], 0.0, 1.0)
    contexts = requests.input_tokens.to_numpy(float)[:, None] + grown * requests.output_tokens.to_numpy(float)[:, None]
    batch = share.sum(axis=0)
    whole = (ends[:-1] >= first.max()) & (ends[1:] <= last.max()) & (batch >= 1.0)
    found = {"batch": batch.round(), "context_mean": (contexts * share).sum(axis=0) / batch.clip(1e-9)}
    return pd.DataFrame({**found, "seconds": WINDOW_S / steps})[whole]


def halves(rows: pd.DataFrame, model: str, folder: Path) -> tuple[list[str], float]:
    """Errors before and after on every second window, from a table of the others, as text; and the mean one by
    `from_engine` of all windows, where every third batch size is left out."""
    paths = [folder / f"{i}.csv" for i in range(3)]
    for path, part in zip(paths, (rows, rows[::2], rows[1::2]), strict=True):
        part.to_csv(path, index=False)
    asked, found = read_engine_log(paths[2]).rows, []
    fits = [from_engine(path, model=model, tp=TPS[model], calibration=BASE, release=RELEASE) for path in paths[:2]]
    for one in (load_calibration(BASE), fits[1].calibration):
        cost = step_cost(load_model(model), TPS[model], measured_node(one.gpu, one.reference), one)
        off_s = np.abs(iteration_times(cost, asked) - asked.seconds)
        off = off_s / asked.seconds
        found.append(f"{off.mean():.1%} / {off.quantile(0.9):.1%} / {1e3 * off_s.mean():.2f} ms")
    return found, float(fits[0].errors["mean"][0])


HEAD = ("model", "windows", "half of them, before: mean / p90 / off", "from the other half", "batch sizes left out")


def engine_section() -> str:
    """The page's section on calibrations fitted to an engine's own log."""
    requests, lines = pd.read_csv(REQUESTS), []
    with tempfile.TemporaryDirectory() as folder:
        for model in TPS:
            rows = windows(requests[requests.model == model])
            cells, by_batch = halves(rows, model, Path(folder))
            lines.append((f"{model} at TP{TPS[model]}", len(rows), *cells, f"{by_batch:.1%}"))
    return section("engine", runs=table(HEAD, lines))

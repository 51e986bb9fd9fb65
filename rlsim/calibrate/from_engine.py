"""Fits whole iterations to what an engine logs in service: one model at one TP, over what a calibration says of them.

Every third batch size is predicted from a table of the others, and these errors are the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from rlsim.calibrate.engine_log import read_engine_log
from rlsim.calibrate.fit.common import Array
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.steps import fit_iterations, iteration_points, iteration_times
from rlsim.calibrate.write import extended
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.roofline import step_cost
from rlsim.errors import CalibrationError, unknown_name
from rlsim.models.model import load_model
from rlsim.models.precision import KV_BYTES, PRECISIONS, KvPrecision, Precision

FEWEST_ROWS = 6  # decode steps: a third of them is left out
MOST_ROWS = 20_000  # more are thinned out evenly
PLAUSIBLE = (0.1, 10.0)  # times what the calibration says: beyond that a time is of something else


@dataclass(frozen=True)
class FromEngine:
    """A calibration with the tables of an engine, and how well they predict iterations that they have not seen.

    `errors` has a row for each kind of `iterations`: `rows`, `held_out`, and of these the `mean` and `p90` of absolute
    relative errors, the `bias` (median, positive = predicted too slow) and the mean absolute error `off_s`; the same of
    the calibration that it started from (`base_`). `excluded` counts lines that were not used, by reason.
    """

    calibration: Calibration
    errors: pd.DataFrame
    excluded: Mapping[str, int]
    notes: tuple[str, ...] = ()


def from_engine(
    log: str | Path,
    *,
    model: str,
    tp: int,
    calibration: str | Path,
    precision: str | None = None,
    kv_precision: str = "bf16",
    release: str = "",
    name: str | None = None,
) -> FromEngine:
    """Fit a table of whole iterations to the server log or table in `log` (see `read_engine_log`).

    `calibration` is what the factors are on and where everything else comes from; `precision` (of the weights; default:
    as published) and `kv_precision` are what `model` was served in at `tp`; `release` is the engine's, where the log
    does not say it.

    Raises `CalibrationError` for a log that cannot be read, is of another engine, has fewer than 6 decode steps, or
    times that no such GPU takes; other `RlsimError`s for names that do not exist.
    """
    for kind, one, known in (("precision", precision, PRECISIONS), ("kv_precision", kv_precision, KV_BYTES)):
        if one is not None and one not in known:
            raise unknown_name(kind, one, known)
    base, read, path = load_calibration(calibration), read_engine_log(log), Path(log)
    if read.engine not in ("", base.engine):
        raise CalibrationError(f"{path}: a log of {read.engine}; calibration {base.name} is for {base.engine}")
    shape = load_model(model)
    shape = shape.served(
        cast(Precision, precision), cast(KvPrecision, kv_precision), base.window_share(shape.model_type)
    )
    plain = base.model_copy(update={"iterations": ()})
    cost = step_cost(shape, tp, measured_node(base.gpu, base.reference), plain)
    places = np.unique(np.linspace(0, len(read.rows) - 1, MOST_ROWS).round().astype(int))
    rows, excluded = read.rows.iloc[places], dict(read.excluded)
    if len(rows) < len(read.rows):
        excluded["thinned out"] = len(read.rows) - len(rows)
    rows = _plausible(path, rows, iteration_times(cost, rows), excluded)
    if (decodes := int((rows.prefill_tokens == 0).sum())) < FEWEST_ROWS:
        raise CalibrationError(
            f"{path}: {decodes} iterations that only decode; at least {FEWEST_ROWS} are needed"
            + "".join(f"; {count} left out: {reason}" for reason, count in excluded.items())
        )
    release = release or read.release
    whence = f"{len(rows)} iterations of {path.name} ({base.engine} {release or 'of a release not said'})"
    fit, shown = fit_iterations(rows, cost, shape, plain, whence)
    errors = _errors(shown)
    tested = [f"{row['iterations']} {row['mean']:.1%}" for row in errors.to_dict("records") if row["held_out"]]
    found = extended(
        base,
        path,
        "rlsim calibrate from-engine",
        "own engine",
        [f"whole iterations of {shape.name} at TP{tp}: {whence}; mean error on those left out: {', '.join(tested)}"],
        release,
        name=name,
        iterations=(*(one for one in base.iterations if not (one.of(shape) and one.tp == tp)), fit),
        residuals={**base.residuals, **iteration_points([shown])[1]},
    )
    return FromEngine(found, errors, excluded)


def _plausible(path: Path, rows: pd.DataFrame, base_s: Array, excluded: dict[str, int]) -> pd.DataFrame:
    """The rows that take a time as such an iteration may; `excluded` gets the others."""
    factor, (low, high) = rows.seconds.to_numpy(float) / base_s, PLAUSIBLE
    if not low <= (middle := float(np.median(factor))) <= high:
        hint = "are the times in ms?" if middle > high else "vLLM times no more than a wait under --async-scheduling"
        raise CalibrationError(
            f"{path}: iterations take {middle:.2g} times as long as the calibration says; plausible is {low:g} to "
            f"{high:g}; check the model, the TP and the precision ({hint})"
        )
    kept = rows[(factor >= low) & (factor <= high)]
    if len(kept) < len(rows):
        excluded["no such iteration takes that time"] = len(rows) - len(kept)
    return kept


def _errors(shown: pd.DataFrame) -> pd.DataFrame:
    found = []
    for kind, rows in shown.groupby("kind"):
        unseen, row = rows[rows.held_out], {"iterations": kind, "rows": len(rows), "held_out": int(rows.held_out.sum())}
        for before, said in (("base_", unseen.base_s), ("", unseen.fitted_s)):
            off_s = said - unseen.seconds
            off = off_s / unseen.seconds
            row |= {f"{before}mean": off.abs().mean(), f"{before}p90": off.abs().quantile(0.9)}
            row |= {f"{before}bias": off.median(), f"{before}off_s": off_s.abs().mean()}
        found.append(row)
    return pd.DataFrame(found)

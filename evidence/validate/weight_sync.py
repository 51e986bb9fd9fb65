"""Part `weight_sync`: measured weight syncs of veRL against `rlsim.cost.weight_sync`, and the fit of its constants.

How each row was made, and what of it is assumed, is in `weight_syncs.yaml` of the evidence. veRL's trainers kept every
expert's tensors apart until transformers 5 (the test with 30 receivers is of January 2026); the GH200 rows, of August
2026, have them stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveFloat

from evidence.validate.coverage import counted, level_spread
from evidence.validate.parts import EVIDENCE, Options, Section
from evidence.validate.published import measured_section
from evidence.validate.rows import Kind, Row, markdown, number, read_rows
from rlsim.base.schema import Schema, load
from rlsim.cost.calibration import Engine, load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.flops import Floats
from rlsim.cost.layout import Layout
from rlsim.cost.weight_sync import FITTED, SyncFit, SyncMethod, WeightSync
from rlsim.errors import ConfigError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

TABLE = "weight_syncs.csv"


class Setting(Schema):
    """How one row was measured, and whether constants are fitted to it (`kind`: input)."""

    case: str  # of rows with the same first component one setting was measured
    kind: Kind = "output"
    model: str
    layers: int | None = None  # of a model that stands in for another
    cluster: str | dict[str, Any]
    calibration: str
    ranks: tuple[int, int]  # of trainer and rollout, data parallel, one after the other
    zero3: bool = True
    engine: Engine | None = "sglang"
    method: SyncMethod = "bucketed"
    offload: bool = False
    stacked: bool = True
    sync_s: float = 0.0  # of one that is in no table

    @property
    def measured_on(self) -> str:
        return self.case.split("/")[0]

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        source, target = self.ranks
        return Layout(first_gpu=0, dp=source, zero3=self.zero3), Layout(first_gpu=source, dp=target)

    @cached_property
    def under_fitted(self) -> WeightSync:
        model, cluster, fits = load_model(self.model), load_cluster(self.cluster), load_calibration(self.calibration)
        return WeightSync(
            model=model if self.layers is None else model.model_copy(update={"num_hidden_layers": self.layers}),
            cluster=cluster,
            collectives=Collectives(fits.collectives, fits.reference, cluster),
            engine=self.engine,
            method=self.method,
            offload=self.offload,
            stacked=self.stacked,
        )


class Settings(Schema):
    """By the table's `id`: how rows were measured, and why nothing is taken from others.

    `repeated` has the figure of another row: no error of its own.
    """

    used: dict[int, Setting]
    quoted: Setting
    repeated: int
    left_out: dict[int, str]


@cache
def settings(evidence: Path = EVIDENCE) -> Settings:
    """How the measured syncs were made."""
    return load(evidence / "weight_syncs.yaml", Settings)


class Measured(Schema):
    """A row of the table: what was synced, and how long it took."""

    id: int
    model: str = "GPU not stated"
    gpu: str = "GPU not stated"
    method: str
    sync_s: PositiveFloat


def read_syncs(evidence: Path) -> dict[int, tuple[str, float]]:
    """What was measured and its seconds, by `id`; raises `ConfigError` for a missing or damaged table, and if its rows
    are not those that `settings` knows."""
    path, known = evidence / TABLE, settings()
    found = {row.id: (f"{row.model}, {row.gpu}, {row.method}", row.sync_s) for row in read_rows(path, Measured)}
    if odd := (known.used.keys() - found.keys()) | (found.keys() - known.used.keys() - known.left_out.keys()):
        raise ConfigError(f"{path}: rows that are missing, or that nothing is known of: id {sorted(odd)}")
    return found


def seconds(setting: Setting, fit: SyncFit = FITTED) -> float:
    """What rlsim says of a measured sync."""
    return replace(setting.under_fitted, fit=fit).time_s(*setting.layouts)


# The fit ------------------------------------------------------------------------------------------------------------


def fitted(measured: Mapping[int, float], rows: Iterable[int]) -> SyncFit:
    """Constants that leave the least squares of the logarithms of rlsim's over the measured seconds of some rows."""
    from scipy.optimize import least_squares

    known = list(rows)
    target = np.log([measured[row] for row in known])

    def errors(logs: Floats) -> Floats:
        return _logs(known, logs) - target

    return _of(least_squares(errors, np.log(_numbers(FITTED))).x)


def left_out(measured: Mapping[int, float]) -> list[tuple[int, float | None]]:
    """Each used row with the seconds under constants fitted to all rows of other settings; None where these leave a
    constant open that the row depends on.
    """
    found: list[tuple[int, float | None]] = []
    for row, setting in settings().used.items():
        others = [n for n, other in settings().used.items() if other.measured_on != setting.measured_on]
        slopes, own = _slopes(others), _slopes([row])[0]
        told = np.linalg.pinv(slopes, rcond=1e-3) @ slopes @ own  # the part of its slope that other rows settle
        if np.abs(told - own).max() > 0.02:
            found.append((row, None))
        else:
            found.append((row, seconds(setting, fitted(measured, others))))
    return found


# Whether intervals hold ----------------------------------------------------------------------------------------------


def predicted_errors(found: Mapping[int, tuple[str, float]]) -> dict[str, Floats]:
    """By system: log errors of the syncs that no constant is fitted to, under the shipped constants."""
    used = settings().used.items()
    return left_out_errors(found, [(row, seconds(setting)) for row, setting in used if setting.kind == "output"])


def left_out_errors(
    found: Mapping[int, tuple[str, float]], left: Iterable[tuple[int, float | None]]
) -> dict[str, Floats]:
    """By system: log errors of predicted rows, and that of the quoted sync, which nothing is fitted to."""
    known, errors = settings(), dict[str, list[float]]()
    ratios = [(known.used[row], s / found[row][1]) for row, s in left if s is not None and row != known.repeated]
    for setting, ratio in (*ratios, (known.quoted, seconds(known.quoted) / known.quoted.sync_s)):
        errors.setdefault(setting.measured_on, []).append(float(np.log(ratio)))
    return {system: np.array(own) for system, own in errors.items()}


def coverage_table(predicted: Mapping[str, Floats], left: Mapping[str, Floats]) -> str:
    """How many errors of a system lie inside the 90% interval that those of the others allow."""
    systems = list(dict.fromkeys((*predicted, *left)))
    both = counted(predicted, systems), counted(left, systems)
    cells = [(name, *one, *other) for name, one, other in zip([*systems, "all"], *both, strict=True)]
    return markdown(("system", "predicted", "inside", "without the system", "inside"), cells)


# Constants as numbers ------------------------------------------------------------------------------------------------


def _numbers(fit: SyncFit) -> Floats:
    return np.array(list(asdict(fit).values()))


def _of(logs: Floats) -> SyncFit:
    return SyncFit(**dict(zip(asdict(FITTED), np.exp(logs).tolist(), strict=True)))


def _logs(rows: Sequence[int], logs: Floats) -> Floats:
    fit = _of(logs)
    return np.log([seconds(settings().used[row], fit) for row in rows])


def _slopes(rows: Sequence[int]) -> Floats:
    """Elasticities of the rows' seconds in the constants: (rows, constants)."""
    at, step = np.log(_numbers(FITTED)), 1e-4
    columns = [(_logs(rows, at + step * one) - _logs(rows, at - step * one)) / (2 * step) for one in np.eye(len(at))]
    return np.stack(columns, axis=1)


# The section --------------------------------------------------------------------------------------------------------


def section(options: Options) -> Section:
    """Every used row under the shipped constants, then each setting under constants fitted without it."""
    options.progress("weight_sync")
    found = read_syncs(options.evidence)
    measured = {row: time for row, (_, time) in found.items()}
    rows = [_row(setting, measured[row], f"id {row}") for row, setting in settings().used.items()]
    quoted = settings().quoted
    rows.append(_row(quoted, quoted.sync_s, "not in the data; quoted from veRL's table"))
    left = left_out(measured)
    predicted, unseen = predicted_errors(found), left_out_errors(found, left)
    omitted = [
        (str(row), found[row][0], number(found[row][1]), why)
        for row, why in settings().left_out.items()
        if row in found
    ]
    spreads = f"Spread: {level_spread(predicted):.0%} of predictions, {level_spread(unseen):.0%} without the system."
    tables = {
        "without": _without(measured, left),
        "coverage": f"{coverage_table(predicted, unseen)}\n{spreads}",
        "left_out": markdown(("id", "what", "measured", "why"), omitted),
    }
    return measured_section(rows, 1, **tables)


def _row(setting: Setting, measured_s: float, note: str) -> Row:
    parts = setting.under_fitted.parts(*setting.layouts)
    stages = f"export {number(parts.export_s)}, transport {number(parts.transport_s)}, load {number(parts.load_s)}"
    return Row("weight_sync", setting.case, "sync_s", measured_s, parts.total_s, f"{note}; {stages}", setting.kind)


def _without(measured: Mapping[int, float], left: Iterable[tuple[int, float | None]]) -> str:
    cells = []
    for row, predicted in left:
        outcome = ("", "open") if predicted is None else (number(predicted), f"{predicted / measured[row] - 1:+.1%}")
        cells.append((settings().used[row].case, number(measured[row]), *outcome))
    return markdown(("case", "measured", "rlsim", "error"), cells)

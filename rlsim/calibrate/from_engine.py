"""Fits whole iterations to what an engine logs in service: one model at one TP, over what a calibration says of them.

Every third batch size is predicted from a table of the others, and these errors are the result.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from rlsim.base.reading import shipped
from rlsim.base.refusals import refuse
from rlsim.calibrate.fit.common import Array
from rlsim.calibrate.importers.reading import numbers, read_table, read_text, row_name
from rlsim.calibrate.measurements import measured_node
from rlsim.calibrate.steps import ITERATION, as_iterations, fit_iterations, iteration_points, iteration_times
from rlsim.calibrate.write import FromLog, extended
from rlsim.cost.calibration import load_calibration
from rlsim.cost.roofline import step_cost
from rlsim.errors import CalibrationError, unknown_name
from rlsim.models.model import load_model
from rlsim.models.precision import KV_BYTES, PRECISIONS, KvPrecision, Precision

# The log --------------------------------------------------------------------------------------------------------------

# Reads iterations as an engine logs them in service: lines of servers (data/engine_logs.yaml), or a table of them.

LIKE = 0.2  # share by which two lines of averages may differ in their size: the mean of both stands for it
#: Columns of a table; of the contexts either, tokens of each sequence or of all.
COLUMNS = ("batch", "context_mean", "context_total", "prefill_tokens", "prefill_sequences", "cached_tokens", "seconds")
SPECULATIVE, OTHER = "speculative decoding", "other work or a pause in its time"
UNLIKE, SHORT = "of another size than the line before", "too little of the KV cache in use to tell the contexts"

OTHERWISE = "give the iterations as a table (.csv)"

_FORMS: list[tuple[Mapping[str, str], re.Pattern[str], re.Pattern[str]]] = [
    (row, re.compile(row["mark"]), re.compile(row["numbers"])) for row in shipped("engine_logs.yaml")
]
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"pid=\d+|\bEngine \d+|\b[DT]P\d+")


@dataclass(frozen=True)
class EngineLog:
    """`rows` are iterations of `seconds` (`as_iterations`), in their order. `excluded` counts lines by why they are no
    rows. `engine` and `release` are empty where the log does not tell them."""

    rows: pd.DataFrame
    excluded: Mapping[str, int]
    engine: str = ""
    release: str = ""


def read_engine_log(path: str | Path) -> EngineLog:
    """The iterations in `path`: a table if its name ends in .csv or .parquet, else a server's log.

    Raises `CalibrationError` with file and line for what cannot be read, and if there is no iteration at all.
    """
    path = Path(path)
    found = _table(path) if path.suffix in (".csv", ".parquet") else _log(path)
    examples = "\n  ".join(row["example"] for row, *_ in _FORMS if "kind" in row)
    refuse("log of an engine", CalibrationError, path=path, found=found, examples=examples, columns=COLUMNS)
    return found


def _table(path: Path) -> EngineLog:
    table = read_table(path, ["seconds"])
    others = [name for name in map(str, table.columns) if name not in COLUMNS]
    near = {name: difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.75) for name in others}
    refuse("table of iterations", CalibrationError, path=path, table=table, near=near)
    names = [name for name in COLUMNS if name in table]
    table = numbers(path, table, names)[names]
    numbers(path, table, ["seconds"], positive=True)
    if "context_mean" in table:
        table["context_total"] = table.context_mean * table.batch
    rows = as_iterations(table.rename(columns={"context_total": "context_tokens"}))
    if len(empty := np.flatnonzero(rows.batch + rows.prefill_tokens < 1)):
        where = row_name(path, int(empty[0]))
        raise CalibrationError(f"{path}: {where}: an iteration of nothing; expected a batch or prefill_tokens")
    return EngineLog(rows, {})


def _log(path: Path) -> EngineLog:
    rows: list[Mapping[str, float]] = []
    excluded: Counter[str] = Counter()
    before: dict[Any, tuple[str, Mapping[str, float]]] = {}
    last, said = dict.fromkeys(("pool", "usage"), 0.0), {"engine": "", "release": ""}
    lines = _ANSI.sub("", read_text(path, errors="replace")).split("\n")
    for number, line in enumerate(lines, 1):
        for form, mark, numbered in _FORMS:
            if not (at := mark.search(line)):
                continue
            if not (found := numbered.search(line)):
                if number == len(lines):
                    continue  # cut while it was written
                raise CalibrationError(
                    f"{path}:{number}: not as {form['engine']} writes such a line; expected\n  {form['example']}\n"
                    f"Take the line out, or {OTHERWISE}"
                )
            values = {name: text for name, text in found.groupdict().items() if text}
            said |= {"engine": form["engine"]} | ({"release": values.pop("release")} if "release" in values else {})
            now = {name: float(text.replace(",", "").rstrip(".")) for name, text in values.items()}
            last |= {name: now[name] for name in last if name in now}
            if "kind" not in form:
                continue
            if now.get("batch") and "context_tokens" not in now:
                if not last["pool"]:
                    raise CalibrationError(
                        f"{path}:{number}: the log does not say before how large the KV cache is; expected\n  "
                        f"GPU KV cache size: 559,232 tokens\nKeep the log from its start, or {OTHERWISE}"
                    )
                now["context_tokens"] = last["usage"] / 100 * last["pool"]
            process = (form["engine"], *sorted(set(_PROCESS.findall(line[: at.start()]))))
            row = _row(form["kind"], now, *before.get(process, ("", {})))
            before[process] = form["kind"], now
            if isinstance(row, str):
                excluded[row] += 1
            else:
                rows.append(row)
    return EngineLog(as_iterations(pd.DataFrame(rows)), dict(excluded), **said)


def _row(kind: str, now: Mapping[str, float], kind_before: str, before: Mapping[str, float]) -> dict[str, float] | str:
    """The iteration that a line tells of, beside the line before of the same process; or why it tells of none.

    A throughput is over the time since that line. Of two prefills it may be of either, so they have to be alike.
    """
    if "accepted" in now or now.get("generated", now.get("batch")) != now.get("batch"):
        return SPECULATIVE
    if now.get("batch") and not now["context_tokens"]:
        return SHORT
    if kind == "iteration":
        return {**now, "seconds": now["ms"] / 1e3} if now["ms"] else OTHER
    decodes = kind == "averages"
    size, rate = ("batch", "rate") if decodes else ("prefill_tokens", "prompt_rate")
    alone = not now.get("prompt_rate") if decodes else before.get("waiting")
    if kind_before != kind or not alone or not now.get(rate) or not now[size] * before[size]:
        return OTHER
    if abs(now[size] - before[size]) > LIKE * max(now[size], before[size]):
        return UNLIKE
    mean = {name: (now[name] + before[name]) / 2 for name in ITERATION if name in now and name in before}
    return {**mean, "seconds": mean[size] / now[rate]}


# The fit --------------------------------------------------------------------------------------------------------------


FEWEST_ROWS = 6  # decode steps: a third of them is left out
MOST_ROWS = 20_000  # more are thinned out evenly
PLAUSIBLE = (0.1, 10.0)  # times what the calibration says: beyond that a time is of something else


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
) -> FromLog:
    """Fit a table of whole iterations to the server log or table in `log` (see `read_engine_log`).

    The errors have a row for each kind of `iterations`, and their mean absolute error `off_s` too.

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
    refuse("engine of a log", CalibrationError, path=path, engine=read.engine, calibration=base)
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
    decodes = int((rows.prefill_tokens == 0).sum())
    refuse("decode steps", CalibrationError, path=path, decodes=decodes, fewest=FEWEST_ROWS, excluded=excluded)
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
    return FromLog(found, errors, excluded)


def _plausible(path: Path, rows: pd.DataFrame, base_s: Array, excluded: dict[str, int]) -> pd.DataFrame:
    """The rows that take a time as such an iteration may; `excluded` gets the others."""
    factor, (low, high) = rows.seconds.to_numpy(float) / base_s, PLAUSIBLE
    refuse("times of iterations", CalibrationError, path=path, middle=float(np.median(factor)), low=low, high=high)
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

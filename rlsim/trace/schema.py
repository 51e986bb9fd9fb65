"""The one schema of a trace, and `Trace`: response lengths that have passed every check.

`COLUMNS`, the rows of `rlsim/data/trace.csv`, is the only list of columns: the checks, the reader, the writer and the
reference page are made from it.
Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import AfterValidator, Field, model_validator

from rlsim.base.reading import records
from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema
from rlsim.base.tables import floats, parse_json
from rlsim.errors import TraceError, one_line
from rlsim.trace.turns import FIELDS, as_json, read_turns, response_tokens, tool_calls

Kind = Literal["id", "tokens", "index", "number", "flag", "text", "numbers", "turns"]
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Column:
    """One column of the schema: what it is called, holds and means."""

    name: str
    kind: Kind
    unit: str
    required: bool
    meaning: str


_ROWS: list[dict[str, Any]] = [row | {"required": bool(row["required"])} for row in records("trace.csv")]
COLUMNS = tuple(Column(**row) for row in _ROWS)
BY_NAME = {column.name: column for column in COLUMNS}


class TraceMeta(Schema):
    """What is known about a trace beside its rows."""

    name: Annotated[str, AfterValidator(one_line)] = "trace"
    source: str = ""
    cap_tokens: int | None = Field(default=None, ge=1)
    recipe: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    known_tokens: int | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _known_by_its_recipe(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "known_tokens" in given:
            return given
        with suppress(KeyError, TypeError, ValueError):  # no recipe, or one without facts
            facts = [fact for fact in given["recipe"]["lengths"]["facts"] if "mean" not in fact]
            known = max(f.get("above") or f.get("tokens") or given["recipe"]["cap_tokens"] for f in facts)
            return {**given, "known_tokens": known}
        return given


@dataclass(frozen=True)
class Trace:
    """Checked response lengths: `frame` has the columns of `COLUMNS` that are known, always with epoch and capped.

    Make one with `make_trace` or `read_trace`; treat `frame` as read-only.
    """

    frame: pd.DataFrame
    meta: TraceMeta

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def response_tokens(self) -> npt.NDArray[np.int64]:
        return self.frame["response_tokens"].to_numpy(np.int64)

    @property
    def capped(self) -> npt.NDArray[np.bool_]:
        return self.frame["capped"].to_numpy(np.bool_)

    def cut(
        self, limit_tokens: Any, most_turns: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The lengths of responses of at most `limit_tokens` (one for all, or one for each), and which are cut.

        Trajectories end with a turn, of which they have at most `most_turns`.
        """
        length = self.response_tokens
        kept = np.minimum(length, limit_tokens)
        for row, turns in enumerate(self.frame.get("turns", ())):
            if turns:
                kept[row], _ = tool_calls(turns, int(kept[row]), most_turns, 0.0)
        return kept, self.capped | (length > kept)

    def prompt_codes(self) -> tuple[npt.NDArray[np.int64], list[Any]]:
        """For every response a code of its prompt (from 0, in order of appearance), and the prompt id of each code."""
        codes, ids = pd.factorize(self.frame["prompt_id"])
        return codes.astype(np.int64), list(ids)

    def digest(self) -> str:
        """SHA-256 of the rows, whatever file they came from."""
        frame = self.frame
        if "turns" in frame:
            frame = frame.assign(turns=frame["turns"].map(as_json))
        rows = frame.to_csv(index=False, lineterminator="\n")
        return hashlib.sha256(rows.encode()).hexdigest()


def make_trace(
    frame: pd.DataFrame,
    meta: TraceMeta | None = None,
    *,
    where: str = "trace",
    row_name: Callable[[int], str] = lambda i: f"row {i + 1}",
) -> Trace:
    """`frame` checked against the schema, with the dtypes of the schema and columns in its order.

    `where` and `row_name` (from a row's position) are used in messages. Columns that the schema does not know are left
    out with a note, unless they look like a misspelt one. Raises `TraceError` naming the first bad row.
    """
    meta = meta or TraceMeta()
    notes = list(meta.notes)
    frame = frame.reset_index(drop=True)
    frame = _with_lengths(frame, where, row_name)
    names = [str(c) for c in frame.columns]
    check_names(names, where)
    if len(frame) == 0:
        raise TraceError(f"{where}: the trace holds no responses")
    unknown = [n for n in names if n not in BY_NAME]
    if unknown:
        notes.append(f"columns left out: {', '.join(unknown)}")
    out = {
        column.name: _checked(frame[column.name], column, where, row_name)
        for column in COLUMNS
        if column.name in names and (column.required or not bool(frame[column.name].isna().all()))
    }
    checked = pd.DataFrame(out).reset_index(drop=True)
    if "epoch" not in checked:
        checked["epoch"] = np.zeros(len(checked), np.int64)
    _check_duplicates(checked, where, row_name)
    meta = _settle_caps(checked, meta, notes, where, row_name)
    ordered = [c.name for c in COLUMNS if c.name in checked]
    said = {"notes": tuple(map(_writable, notes)), "name": _writable(meta.name), "source": _writable(meta.source)}
    return Trace(checked[ordered], meta.model_copy(update=said))


def _with_lengths(frame: pd.DataFrame, where: str, row_name: Callable[[int], str]) -> pd.DataFrame:
    """The frame with the turns of its trajectories read, and the lengths of responses that follow from them.

    Raises `TraceError` for turns that cannot be read, or a length that contradicts them.
    """
    if "turns" not in frame or bool(frame["turns"].map(lambda cell: cell is None or cell is pd.NA).all()):
        return frame
    turns = _checked(frame["turns"], BY_NAME["turns"], where, row_name)
    length = pd.Series([None if cell is None else response_tokens(cell) for cell in turns], frame.index, "Int64")
    if "response_tokens" in frame:
        stated = pd.to_numeric(frame["response_tokens"], errors="coerce")
        wrong = ((stated != length) & length.notna() & stated.notna()).fillna(False).to_numpy(np.bool_)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise TraceError(
                f"{where}: {row_name(row)}: response_tokens is {stated.iloc[row]:g}, but its turns have "
                f"{length.iloc[row]} tokens, generated and observed"
            )
        length = frame["response_tokens"].where(length.isna(), length)
    return frame.assign(turns=turns, response_tokens=length)


def mix(traces: Sequence[Trace]) -> Trace:
    """The prompts of all traces together, each under its trace's name; an epoch passes over them in random order.

    Raises `TraceError` if two traces have the same name, or their numbers of epochs differ.
    """
    if len(traces) == 1:
        return traces[0]
    names = [trace.meta.name for trace in traces]
    epochs = {int(trace.frame["epoch"].max()) + 1 for trace in traces}
    refuse("mixed traces", TraceError, names=names, epochs=epochs)
    frames = [
        trace.frame.assign(prompt_id=[f"{trace.meta.name}/{prompt}" for prompt in trace.frame["prompt_id"]])
        for trace in traces
    ]
    caps = {trace.meta.cap_tokens for trace in traces}
    notes = list(dict.fromkeys(note for trace in traces for note in trace.meta.notes))
    meta = TraceMeta(
        name=" + ".join(names),
        source="; ".join(dict.fromkeys(trace.meta.source for trace in traces)),
        cap_tokens=caps.pop() if len(caps) == 1 else None,
        notes=tuple(notes),
        known_tokens=max((t.meta.known_tokens for t in traces if t.meta.known_tokens), default=None),
    )
    mixed = pd.concat(frames, ignore_index=True)
    if "turns" in mixed:  # some of the traces have none
        mixed["turns"] = mixed["turns"].astype(object).where(mixed["turns"].notna(), None)
    return make_trace(mixed, meta, where=meta.name)


def _writable(text: str) -> str:
    """The text with what no file can hold as escapes: names of files and columns may have any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def check_names(names: Sequence[str], where: str, *, optional: Sequence[str] = ()) -> None:
    """Raises `TraceError` for a required column that is missing and for a near miss of any column.

    Columns in `optional` may be missing although the schema requires them.
    """
    spare = [n for n in names if n not in BY_NAME]
    for column in COLUMNS:
        if column.name in names:
            continue
        plain = {name: name.lower().replace("-", "_").replace(" ", "_") for name in spare}
        near = [n for n in spare if difflib.SequenceMatcher(None, plain[n], column.name).ratio() >= 0.85]
        if near:
            raise TraceError(
                f"{where}: unknown column {near[0]!r}; did you mean {column.name!r}? "
                f"(rename it, or import with --column {column.name}={near[0]})"
            )
    missing = [c.name for c in COLUMNS if c.required and c.name not in names and c.name not in optional]
    if missing:
        need = " and ".join(repr(n) for n in missing)
        near = difflib.get_close_matches(missing[-1], spare, n=1, cutoff=0.4)
        example = f"--column {missing[-1]}={near[0] if near else 'THEIR_NAME'}"
        has = ", ".join(repr(n) for n in names) or "no columns"
        if missing == ["sample_id"]:
            raise TraceError(
                f"{where}: no column 'sample_id'; it has {has}. `rlsim trace import IN OUT` numbers samples"
            )
        raise TraceError(
            f"{where}: no column {need}; it has {has}. "
            f"Another program's layout is read by `rlsim trace import IN OUT {example}`"
        )


def _checked(series: pd.Series[Any], column: Column, where: str, row_name: Callable[[int], str]) -> Any:
    """A column with the dtype of its kind. Raises `TraceError` naming the first bad row."""

    def refuse(bad: npt.ArrayLike, why: str) -> None:
        if np.any(bad):
            row = int(np.argmax(bad))
            shown = series.iloc[row]
            shown = shown.item() if isinstance(shown, np.generic) else shown
            raise TraceError(f"{where}: {row_name(row)}: {column.name} {why} (got {repr(shown)[:200]})")

    null = np.asarray([cell is None for cell in series] if column.kind == "turns" else series.isna(), np.bool_)
    if column.required:
        refuse(null, "is missing or NaN: leave out the rows that have none")
    if column.kind == "id":
        return _ids(series, refuse)
    if column.kind == "flag" and pd.api.types.is_bool_dtype(series.dtype) and not null.any():
        return series.to_numpy(np.bool_)
    if column.kind in _CELLS:
        read, why = _CELLS[column.kind]
        cells = [None if n else read(v) for v, n in zip(series, null, strict=True)]
        refuse([cell is None and not n for cell, n in zip(cells, null, strict=True)], why)
        if column.kind == "flag":
            return pd.array(cells, dtype="boolean") if null.any() else np.array(cells, np.bool_)
        return pd.Series(cells, dtype=object)
    values = floats(series)
    refuse(np.isnan(values) & ~null, "is not a number")
    refuse(np.isinf(values), "is infinite")
    if column.name != "reward":
        refuse(values < 0, "is negative")
    if column.kind == "number":
        return values
    if column.kind == "tokens":
        refuse(values == 0, "is zero; a length is at least 1 token")
    refuse(~null & (values != np.floor(values)), "is not a whole number")
    refuse(values > MAX_TOKENS, f"is above {MAX_TOKENS}")
    if column.kind == "index":
        refuse(null, "is missing or NaN")
    if not null.any():
        return values.astype(np.int64)
    return pd.array([pd.NA if n else int(v) for v, n in zip(values, null, strict=True)], dtype="Int64")


def _ids(series: pd.Series[Any], refuse: Callable[[npt.ArrayLike, str], None]) -> Any:
    """Whole numbers stay numbers if all are; otherwise everything becomes text."""
    if pd.api.types.is_signed_integer_dtype(series.dtype):
        return series.to_numpy(np.int64)
    values = [v.item() if isinstance(v, np.generic) else v for v in series]
    neither = [isinstance(v, bool) or not isinstance(v, int | float | str) for v in values]
    refuse(neither, "is neither a whole number nor text")
    refuse([isinstance(v, float) and not v.is_integer() for v in values], "is not a whole number")
    if all(not isinstance(v, str) and abs(v) < 2**63 for v in values):
        return np.array([int(v) for v in values], np.int64)
    return pd.Series([str(int(v) if isinstance(v, float) else v) for v in values], dtype=object)


_FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def _numbers(value: Any) -> list[float] | None:
    try:
        numbers = [float(v) for v in (parse_json(value) if isinstance(value, str) else value)]
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if all(np.isfinite(v) and v >= 0 for v in numbers) else None


#: Kinds of cells that are read one by one: what reads one, None if it is none, and what to say of that.
_CELLS: dict[Kind, tuple[Callable[[Any], Any], str]] = {
    "text": (lambda value: None if isinstance(value, bytes) else str(value), "is bytes, not text"),
    "flag": (lambda value: _FLAGS.get(str(value).lower()), "is neither true nor false"),
    "numbers": (_numbers, "is not a list of finite numbers, 0 or more"),
    "turns": (read_turns, f"is not a list of turns with {FIELDS[0]} of 1 or more, {FIELDS[1]} and {FIELDS[2]}"),
}


def _check_duplicates(frame: pd.DataFrame, where: str, row_name: Callable[[int], str]) -> None:
    keys = ["prompt_id", "sample_id", "epoch"]
    again = frame.duplicated(keys).to_numpy(np.bool_)
    if not again.any():
        return
    second = int(np.argmax(again))
    first = int(np.argmax((frame[keys] == frame.loc[second, keys]).all(axis=1)))
    prompt, sample, epoch = (frame[k].iloc[second] for k in keys)
    raise TraceError(
        f"{where}: {row_name(second)}: prompt_id {prompt}, sample_id {sample}, epoch {epoch} stands already in "
        f"{row_name(first)}; each response may appear once"
    )


def _settle_caps(
    frame: pd.DataFrame, meta: TraceMeta, notes: list[str], where: str, row_name: Callable[[int], str]
) -> TraceMeta:
    """Fills `capped`, and the cap where the rows tell it; refuses a response above the cap."""
    length = frame["response_tokens"].to_numpy(np.int64)
    cap = meta.cap_tokens
    if cap is not None and bool((length > cap).any()):
        row = int(np.argmax(length > cap))
        raise TraceError(f"{where}: {row_name(row)}: response_tokens {length[row]} is above the trace's cap {cap}")
    if "capped" in frame:
        capped = frame["capped"].fillna(False).to_numpy(np.bool_)
    elif "finish_reason" in frame:
        capped = (frame["finish_reason"] == "length").to_numpy(np.bool_)
    else:
        capped = np.zeros(len(frame), np.bool_)
    if cap is None and capped.any() and len(np.unique(length[capped])) == 1 and length[capped][0] == length.max():
        cap = int(length.max())
        notes.append(f"cap {cap} tokens taken from the longest responses, which are marked as cut")
    if cap is not None and "capped" not in frame:
        capped = capped | (length >= cap)
    frame["capped"] = capped
    return meta.model_copy(update={"cap_tokens": cap})

"""ServeGen's clients: `chunk-<i>-dataset.json` (distributions of lengths) with `chunk-<i>-trace.csv` (rates).

Read from alibaba/ServeGen at f891d11, `servegen/clientpool.py` (`_load_data`) and its `data/`. A dataset has, by the
second its window begins, input_tokens (text_tokens of multimodal models) and output_tokens as the text of a dictionary
{length: probability}, "{}" in a window without requests; a trace has, without a header, rows of second, requests per
second, CV, pattern and two parameters. Windows weigh as many requests as their rates say.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.refusals import refuse
from rlsim.base.tables import number_of, parse_json
from rlsim.errors import TraceError
from rlsim.trace.schema import MAX_TOKENS

Floats = npt.NDArray[np.float64]
DATASET = re.compile(r"chunk-(\d+)-dataset\.json")
_INPUTS = ("input_tokens", "text_tokens")


class _Window(NamedTuple):
    """One client's window: lengths with the share of its requests up to each, and how many requests it has."""

    requests: float
    output: tuple[Floats, Floats]
    input: tuple[Floats, Floats] | None
    text_only: bool


def datasets(path: Path) -> list[Path]:
    """The datasets of clients that `path` (a file or a folder) holds."""
    found = sorted(path.glob("chunk-*-dataset.json")) if path.is_dir() else [path]
    return [file for file in found if DATASET.fullmatch(file.name)]


def read_servegen(files: Sequence[Path], where: Path, rows: int, notes: list[str]) -> pd.DataFrame:
    """`rows` equally likely requests of all clients: response_tokens, and prompt_tokens of the same quantile.

    The marginal of response lengths is exact to 1 in `rows`. A client's window pairs prompt and response by quantile,
    as ServeGen's generator does. Raises `TraceError` with file and window.
    """
    windows, unrated = [], 0
    for file in files:
        rates = file.with_name(file.name.replace("-dataset.json", "-trace.csv"))
        known = _rates(rates) if rates.is_file() else None
        unrated += known is None
        windows += _windows(file, known)
    total = sum(window.requests for window in windows)
    if total <= 0:
        raise TraceError(f"{where}: no window of a ServeGen client has any requests")
    weights, outputs, inputs = zip(*(_atoms(window) for window in windows), strict=True)
    weight, output, prompt = (np.concatenate(parts) for parts in (weights, outputs, inputs))
    order = np.lexsort((prompt, output))
    places = np.searchsorted(np.cumsum(weight[order]) / weight.sum(), (np.arange(rows) + 0.5) / rows)
    at = order[np.minimum(places, len(order) - 1)]
    notes.append(
        f"ServeGen layout: distributions of {len(files):,} clients in {len(windows):,} windows"
        + (f", {total:,.0f} requests" if not unrated else "")
        + f", taken at {rows:,} equally likely points; prompt and response of a client's window are paired by "
        "quantile, as ServeGen's generator pairs them; arrivals are left out"
    )
    if any(window.text_only for window in windows):
        notes.append("prompts of multimodal models are their text: tokens of images, audio and video are not in them")
    if unrated:
        notes.append(f"{unrated} clients without chunk-<i>-trace.csv: their windows weigh 1 request each")
    frame = pd.DataFrame({"response_tokens": np.maximum(output[at], 1)})
    if (output[at] < 1).any():
        notes.append(f"{int((output[at] < 1).sum())} requests of no output tokens are taken as 1 token long")
    if np.isnan(prompt).all():
        return frame
    return frame.assign(prompt_tokens=pd.Series(prompt[at]).where(prompt[at] >= 1))


def _atoms(window: _Window) -> tuple[Floats, Floats, Floats]:
    """Pieces of a window on which both lengths are constant: requests, response and prompt tokens of each."""
    lengths, share = window.output
    if window.input is None:
        return np.diff(share, prepend=0.0) * window.requests, lengths, np.full(len(lengths), np.nan)
    prompts, prompt_share = window.input
    ends = np.union1d(share, prompt_share)
    middle = ends - np.diff(ends, prepend=0.0) / 2
    output = lengths[np.minimum(np.searchsorted(share, middle), len(lengths) - 1)]
    prompt = prompts[np.minimum(np.searchsorted(prompt_share, middle), len(prompts) - 1)]
    return np.diff(ends, prepend=0.0) * window.requests, output, prompt


def _windows(file: Path, rates: dict[int, float] | None) -> list[_Window]:
    try:
        data: Any = parse_json(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise TraceError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{file}: not valid JSON (truncated or damaged?): {error}") from None
    refuse("windows of ServeGen", TraceError, file=file, data=data)
    windows = sorted(((int(start), fields) for start, fields in data.items()), key=lambda window: window[0])
    ends = [*(start for start, _ in windows[1:]), math.inf]
    found = []
    for (start, fields), end in zip(windows, ends, strict=False):
        if "output_tokens" not in fields:
            raise TraceError(f"{file}: window {start}: no 'output_tokens'; it has {', '.join(fields) or 'nothing'}")
        output = _pdf(fields["output_tokens"], f"{file}: window {start}: output_tokens")
        named = next((name for name in _INPUTS if name in fields), None)
        prompt = _pdf(fields[named], f"{file}: window {start}: {named}") if named else None
        if output is None or (named and prompt is None):
            continue
        within = 1.0 if rates is None else sum(requests for at, requests in rates.items() if start <= at < end)
        found.append(_Window(within, output, prompt, named == "text_tokens"))
    return found


def _pdf(text: Any, where: str) -> tuple[Floats, Floats] | None:
    """Lengths and the share up to each, of the text of a dictionary; None if it is empty."""
    if not isinstance(text, str) or not re.fullmatch(r"\{[-+\d.eE:,\s]*\}", text):
        raise TraceError(f"{where} should be the text of a dictionary such as '{{81: 0.25, 82: 0.75}}'")
    pairs = [pair.split(":") for pair in text[1:-1].split(",") if pair.strip()]
    if not pairs:
        return None
    values = np.array([[number_of(cell) for cell in pair] if len(pair) == 2 else [math.nan] * 2 for pair in pairs])
    if np.isnan(values).any():
        raise TraceError(f"{where} is not a dictionary of lengths and probabilities")
    lengths, share = values[np.argsort(values[:, 0])].T
    refuse("distribution of lengths", TraceError, where=where, lengths=lengths, share=share, most=MAX_TOKENS)
    return lengths, np.cumsum(share) / share.sum()


def _rates(file: Path) -> dict[int, float]:
    """Requests of each window of a client's rates, by the second it begins; the last is as long as the one before."""
    rates: list[tuple[int, float]] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            for number, cells in enumerate(csv.reader(opened), 1):
                at, rate = (number_of(cell) for cell in (*cells, "", "")[:2])
                if not (at.is_integer() and 0 <= rate < math.inf):
                    shown = ",".join(cells)[:60]
                    raise TraceError(f"{file}: line {number}: expected second,rate,cv,pattern,… (got {shown!r})")
                if rates and at <= rates[-1][0]:
                    raise TraceError(f"{file}: line {number}: second {at:g} does not come after {rates[-1][0]}")
                rates.append((int(at), rate))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{file}: cannot be read (truncated or damaged?): {error}") from None
    if not rates:
        raise TraceError(f"{file}: the file is empty")
    ends = [at for at, _ in rates[1:]]
    last = rates[-1][0] + (rates[-1][0] - rates[-2][0] if len(rates) > 1 else 600)
    return {at: rate * (end - at) for (at, rate), end in zip(rates, [*ends, last], strict=True)}

"""Today's engines in part `transfer`: FP8, FP4 and mixtures on H100, H200 and B200, of which no fit has seen a row.

No constant is fitted to these runs, but what is priced was chosen with them in view (docs/validation.md). A family is a
model on a GPU under an engine; its rows are predicted from kernels that were measured alone, and from host time of
another family. The same rows beside what another simulator said of them (`aisimulate.csv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from rlsim.cost.calibration import FrontEndFit, load_calibration
from rlsim.errors import CapacityError
from rlsim.sim.closed_loop import Served
from rlsim.validate.rows import Row, Summary, markdown, summarise
from rlsim.validate.serving import (
    AISIMULATE,
    QUANTITIES,
    TODAY,
    Protocol,
    ServingRun,
    calibration_of,
    kernels,
    read_runs,
    simulate,
)

#: Rounds of requests that are simulated where lengths differ. Those of equal lengths stay in step for long: all run.
ROUNDS = Protocol(simulated_rounds=4)
CLIENT_S = 1e-3  # from a response to the next request, of an HTTP client on the same machine


def predicted(run: ServingRun) -> Served:
    """The run with the shipped calibration of its GPU and engine.

    The front end of TensorRT-LLM is fitted to the client of the runs in bf16 and is left out with any other.
    """
    calibration = load_calibration(calibration_of(run)).scheduled(run.plans_ahead)
    front_end = calibration.front_end if run.lengths == "equal" else FrontEndFit(client_s=CLIENT_S)
    return simulate(run, kernels(run), calibration.host, front_end, ROUNDS if run.lengths == "uniform" else None)


def rows_of(runs: Iterable[ServingRun], group: str) -> Iterator[Row]:
    """Two rows of each run, `tpot_s` and `ttft_s`; none where one request does not fit."""
    for run in runs:
        try:
            served = predicted(run)
        except CapacityError:
            continue
        case = f"{group}/{run.family}/{run.case.split('/', 2)[2]}"
        for name in QUANTITIES:
            yield Row("transfer", case, name, getattr(run, name), getattr(served, name))


def today_rows(evidence: Path, progress: Callable[[str], None]) -> list[Row]:
    """The rows of every run of today's engines."""
    progress("transfer: today's engines")
    return list(rows_of(read_runs(evidence, TODAY), "today"))


def families_table(rows: Iterable[Row]) -> str:
    """Errors by family: TPOT, then TTFT. Causes, as far as they are known, are those of the bounds."""
    by_family: dict[str, dict[str, Summary]] = {}
    for summary in summarise(rows, depth=4):
        by_family.setdefault(summary.group, {})[summary.quantity] = summary
    cells = []
    for family, found in by_family.items():
        tpot, ttft = (found[name] for name in QUANTITIES)
        errors = f"{tpot.mean:.1%}", f"{tpot.median:.1%}", f"{tpot.bias:+.1%}", f"{ttft.mean:.0%}", f"{ttft.median:.0%}"
        cells.append((family.partition("/")[2], f"{tpot.count}", *errors))
    headings = ("family", "runs", "TPOT mean error", "median", "bias", "TTFT mean error", "median")
    return markdown(headings, cells)


def peer_table(evidence: Path) -> str:
    """Mean and median |error| of rlsim and AISimulate on the same rows, by set of them."""
    found = []
    for run in read_runs(evidence, AISIMULATE):
        try:
            found.append((run, predicted(run)))
        except CapacityError:
            continue
    sets = {name: [pair for pair in found if pair[0].of == name] for name in dict.fromkeys(run.of for run, _ in found)}
    cells = [(name, str(len(own)), *_errors(own)) for name, own in {**sets, "all": found}.items()]
    return markdown(("runs", "", "TPOT, rlsim", "AISimulate", "TTFT, rlsim", "AISimulate"), cells)


def _errors(found: list[tuple[ServingRun, Served]]) -> Iterator[str]:
    for name in QUANTITIES:
        measured = np.array([getattr(run, name) for run, _ in found])
        own, peer = [getattr(served, name) for _, served in found], [getattr(run, f"peer_{name}") for run, _ in found]
        for said in (own, peer):
            errors = np.abs(np.array(said) / measured - 1)
            yield f"{errors.mean():.1%} / {np.median(errors):.1%}"

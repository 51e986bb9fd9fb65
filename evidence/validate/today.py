"""Today's engines in part `transfer`: FP8, FP4 and mixtures on H100, H200 and B200, of which no fit has seen a row.

No constant is fitted to these runs, but what is priced was chosen with them in view (docs/validation.md). A family is a
model on a GPU under an engine; its rows are predicted from kernels that were measured alone, and from host time of
another family. The same rows beside what another simulator said of them (`aisimulate.csv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from evidence.validate.rows import Row, Summary, markdown, summarise
from evidence.validate.serving import (
    AISIMULATE,
    AS_ASSUMED,
    QUANTITIES,
    TODAY,
    Protocol,
    ServingRun,
    calibration_of,
    kernels,
    read_runs,
    simulate,
)
from rlsim.cost.calibration import FrontEndFit, load_calibration
from rlsim.errors import CapacityError
from rlsim.sim.closed_loop import Served

#: Rounds of requests that are simulated where lengths differ. Those of equal lengths stay in step for long: all run.
ROUNDS = Protocol(simulated_rounds=4)
CLIENT_S = 1e-3  # from a response to the next request, of an HTTP client on the same machine


def predicted(runs: Iterable[ServingRun]) -> Iterator[tuple[ServingRun, Served]]:
    """Runs with the shipped calibration of their GPU and engine; none where one request does not fit.

    The front end of TensorRT-LLM is fitted to the client of the runs in bf16 and is left out with any other.
    """
    for run in runs:
        calibration = load_calibration(calibration_of(run)).scheduled(run.plans_ahead)
        front_end = calibration.front_end if run.lengths == "equal" else FrontEndFit(client_s=CLIENT_S)
        protocol = ROUNDS if run.lengths == "uniform" else AS_ASSUMED
        with suppress(CapacityError):
            yield run, simulate(run, kernels(run), calibration.host, front_end, protocol)


def today_rows(evidence: Path, progress: Callable[[str], None]) -> list[Row]:
    """Two rows of every run of today's engines, `tpot_s` and `ttft_s`."""
    progress("transfer: today's engines")
    return [
        Row("transfer", f"today/{run.family}/{run.case.split('/', 2)[2]}", q, run.seconds(q), getattr(served, q))
        for run, served in predicted(read_runs(evidence, TODAY))
        for q in QUANTITIES
    ]


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
    rows = [
        Row("transfer", f"{name}/{who}", quantity, run.seconds(quantity), said)
        for run, served in predicted(read_runs(evidence, AISIMULATE))
        for name in (run.of, "all")
        for quantity in QUANTITIES
        for who, said in (("rlsim", getattr(served, quantity)), ("peer", run.seconds(f"peer_{quantity}")))
    ]
    cells: dict[str, list[str]] = {}
    for found in sorted(summarise(rows, depth=2), key=lambda one: one.group.startswith("all/")):
        own = cells.setdefault(found.group.partition("/")[0], [str(found.count)])
        own.append(f"{found.mean:.1%} / {found.median:.1%}")
    headings = ("runs", "", "TPOT, rlsim", "AISimulate", "TTFT, rlsim", "AISimulate")
    return markdown(headings, [(name, *own) for name, own in cells.items()])

"""Part `transfer`: host time fitted to some settings of an engine, against the runs of one that no fit has seen.

A setting is an engine, a model and a TP. The fits are made by `scripts/fit_calibrations.py serving` and shipped with
rlsim (`transfer_fits.yaml`): one to all runs of an engine, one without each of its TPs, and all of these once more for
each structural term left out. This part simulates the runs with them; nothing is fitted here.

Today's engines are FP8, FP4 and mixtures on H100, H200 and B200, of which no fit has seen a row. No constant is fitted
to these runs, but what is priced was chosen with them in view (docs/validation.md). A family is a model on a GPU under
an engine; its rows are predicted from kernels that were measured alone, and from host time of another family. The same
rows stand beside what another simulator said of them (`aisimulate.csv`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import Field

from evidence.validate.closed_loop import Served
from evidence.validate.coverage import calls_table, errors_by_setting, inside, level_spread, shipped_calls, spread
from evidence.validate.parts import Options, Section
from evidence.validate.rows import Row, Summary, markdown, summarise, summary_table
from evidence.validate.serving import (
    AISIMULATE,
    AS_ASSUMED,
    CALIBRATIONS,
    QUANTITIES,
    SERVED,
    TODAY,
    Protocol,
    ServingRun,
    calibration_of,
    kernels,
    read_runs,
    run_rows,
    simulate,
)
from rlsim.base.schema import Schema, load
from rlsim.cost.assumed import MEASURED
from rlsim.cost.calibration import Engine, FrontEndFit, HostFit, load_calibration
from rlsim.errors import CapacityError

#: Rounds of requests that are simulated where lengths differ. Those of equal lengths stay in step for long: all run.
ROUNDS = Protocol(simulated_rounds=4)
COLD = "first tokens hold compilation"  # what is noted of such runs, after their release
CLIENT_S = 1e-3  # from a response to the next request, of an HTTP client on the same machine
#: Of a request of InferenceX' client from sending to its first token, beside the engine's time and the tokenizer's: as
#: measured of vLLM 0.13.0's server over an engine that takes a known time, on one core of a Xeon. For 2 ms of it vLLM
#: waits for other prompts to tokenize (`AsyncMicrobatchTokenizer`). No other server was measured.
SERVER_S: dict[Engine, float] = {"vllm": 7.6e-3}
FITS = Path(__file__).with_name("transfer_fits.yaml")
WHOLE = ""  # the left-out setting or term of a fit that leaves out none


class SettingFit(Schema):
    """Host time and front end of an engine, fitted to its runs but those of one setting."""

    engine: Engine
    left_out: str = Field(default=WHOLE, description="setting whose runs the fit has not seen, vllm/qwen3-32b/tp8")
    without: str = Field(default=WHOLE, description="term that the model lacks")
    host: HostFit
    front_end: FrontEndFit
    intervals: dict[str, tuple[float, float]] = Field(default={}, description="95% interval of what is fitted, by name")


class TransferFits(Schema):
    """The fits, and where they come from."""

    date: str
    script: str
    source: str
    fits: tuple[SettingFit, ...]

    def of(self, engine: Engine, left_out: str = WHOLE, without: str = WHOLE) -> SettingFit:
        """One fit; raises `KeyError` if there is none."""
        return {(fit.engine, fit.left_out, fit.without): fit for fit in self.fits}[engine, left_out, without]

    def terms(self, engine: Engine) -> list[str]:
        """The terms that fits of an engine were made without."""
        return list(dict.fromkeys(fit.without for fit in self.fits if fit.engine == engine and fit.without))


@cache
def shipped_fits() -> TransferFits:
    """The fits that come with rlsim."""
    return load(FITS, TransferFits)


def section(options: Options) -> Section:
    """Every run with the fit that has not seen its setting (a minute or two); part `serving` has those that have."""
    fits = shipped_fits()
    runs = read_runs(options.evidence)
    options.progress("transfer")
    left_out = left_out_rows(runs, fits)
    summaries, engines = (tuple(summarise(left_out, depth)) for depth in (3, 1))
    today = today_rows(options.evidence, options.progress)
    families = (*summarise(today, depth=4), *summarise(today, depth=1))
    warm = [replace(row, case=f"warmed up/{row.case}") for row in today if COLD not in row.note]
    spread = f"{level_spread(shipped_calls().log_errors(outlier=False)):.0%}"
    tables = {
        "engines": summary_table(engines),
        "families": families_table(today),
        "today": summary_table((*summarise(today, depth=1), *summarise(warm, depth=1))),
        "peers": peer_table(options.evidence),
        "settings": summary_table(summaries),
        "fits": fits_table(fits),
        "choices": choices_table(unseen_rows(left_out, today)),
        "coverage": coverage_table(unseen_rows(left_out, today)),
        "calls": f"{calls_table()}\nWithout veRL's row 4 calls scatter by {spread}, with it by {MEASURED.calls:.0%}.",
        "ablation": "" if options.quick else _ablation(runs, fits, options.progress),
    }
    return Section((*left_out, *today), (*summaries, *engines, *families), tables, "", summarised=True)


def fits_table(fits: TransferFits) -> str:
    """What each fit that leaves a setting out has found, and whether anything was left out by it."""
    cells = []
    for fit in (fit for fit in fits.fits if fit.left_out and not fit.without):
        whole = fits.of(fit.engine)
        found = [[part.model_dump(exclude={"source"}) for part in (one.host, one.front_end)] for one in (fit, whole)]
        own, of_all = (
            ", ".join(f"{n.removesuffix('_s')} {v * 1e6:.3g} us" for n, v in host.items() if v and n.endswith("_s"))
            for host, _ in found
        )
        if found[0] == found[1]:
            own = "the same: this setting's fit leaves nothing out"
        cells.append((fit.left_out, of_all or "none", own))
    return markdown(("setting", "host time fitted to all settings", "fitted without it"), cells)


def choices_table(rows: Iterable[Row]) -> str:
    """Of as many users on as many GPUs under two TPs, with TPOTs that differ by over a tenth: the faster one chosen?

    Both are runs of one release: another one changes times, too.
    """
    served: dict[tuple[str, str, str], list[tuple[int, int, Row]]] = {}
    for row in rows:
        *place, degrees, lengths = row.case.split("/")
        found, (tokens, asked) = re.fullmatch(r"tp(\d+)(?:-ep\d+)?", degrees), lengths.split("x")
        if found and row.quantity == "tpot_s":
            served.setdefault(("/".join(place), tokens, row.note), []).append((int(found[1]), int(asked), row))
    chosen: dict[str, list[bool]] = {}
    for (setting, *_), runs in served.items():
        for (tp, users, one), (other_tp, others, other) in itertools.combinations(runs, 2):
            measured, said = np.log(one.reference / other.reference), np.log(one.simulated / other.simulated)
            if tp != other_tp and users * other_tp == others * tp and abs(measured) > np.log(1.1):
                chosen.setdefault(setting.split("/")[2], []).append(bool(measured * said > 0))
    chosen["all"] = [right for own in chosen.values() for right in own]
    cells = [(engine, str(len(own)), f"{np.mean(own):.0%}") for engine, own in chosen.items() if own]
    return markdown(("engine", "pairs of TPs", "the faster one chosen"), cells)


def unseen_rows(left_out: Iterable[Row], today: Iterable[Row]) -> list[Row]:
    """The runs of settings that no fit has seen, named by their families alike."""
    return [*(replace(row, case=f"today/h100-sxm/{row.case}", note="") for row in left_out), *today]


def coverage_table(unseen: Sequence[Row]) -> str:
    """How many runs lie inside the 90% interval that the errors of the other families allow, by engine."""
    errors = {quantity: errors_by_setting(unseen, quantity) for quantity in QUANTITIES}
    shares = {quantity: inside(errors[quantity]) for quantity in QUANTITIES}
    settings = [*errors[QUANTITIES[0]]]
    runs = np.array([len(errors[QUANTITIES[0]][setting]) for setting in settings])
    engines = np.array([setting.split("/")[2] for setting in settings])
    cells = []
    for engine in (*dict.fromkeys(engines), "all"):
        own = (engines == engine) | (engine == "all")
        means = (
            np.average([shares[q][setting] for setting in np.array(settings)[own]], weights=runs[own])
            for q in QUANTITIES
        )
        cells.append((str(engine), str(runs[own].sum()), *(f"{mean:.0%}" for mean in means)))
    found = spread(errors["tpot_s"])
    spreads = ", ".join(f"{value:.3f}" for value in found[:3])
    drawn = ", ".join(f"{value:.3f}" for value in (MEASURED.family, MEASURED.rollout, MEASURED.tilt))
    told = "families, settings of one beside that, and doublings of users"
    table = markdown(("engine", "runs", "TPOT inside", "TTFT inside"), cells)
    return f"{table}\nLog errors of TPOT scatter by {spreads} over {told}; worlds draw {drawn}.\n"


def left_out_rows(runs: Iterable[ServingRun], fits: TransferFits, without: str = WHOLE) -> list[Row]:
    """The rows of runs under the fits that have left their setting out."""
    of = ((run, fits.of(run.engine, run.setting, without)) for run in runs)
    return [row for run, fit in of for row in run_rows("transfer", run, "left-out", fit.host, fit.front_end)]


def _ablation(runs: Sequence[ServingRun], fits: TransferFits, progress: Callable[[str], None]) -> str:
    """Errors on left-out settings without each term, the others fitted anew."""
    cells = []
    for engine in SERVED:
        own = [run for run in runs if run.engine == engine]
        for term in (WHOLE, *fits.terms(engine)):
            progress(f"transfer: {engine} without {term or 'nothing'}")
            cells.append((engine, term or "nothing", *_means(left_out_rows(own, fits, term))))
    headings = ("engine", "without", "TPOT mean error", "bias", "worst TP", "TTFT mean error", "bias", "worst TP")
    return markdown(headings, cells)


def _means(rows: Sequence[Row]) -> list[str]:
    """Mean absolute and signed error of TPOT and TTFT, and the mean of the worst setting."""
    worst: dict[str, float] = {}
    for found in summarise(rows, depth=3):
        worst[found.quantity] = max(found.mean, worst.get(found.quantity, 0.0))
    whole = summarise(rows, depth=1)  # TPOT first, as in every run
    return [cell for one in whole for cell in (f"{one.mean:.1%}", f"{one.bias:+.1%}", f"{worst[one.quantity]:.1%}")]


def predicted(runs: Iterable[ServingRun]) -> Iterator[tuple[ServingRun, Served]]:
    """Runs with the shipped calibration of their GPU and engine; none where one request does not fit, nor those that
    are known not to be what they are called.

    The front ends are fitted to the client of the runs in bf16. Of any other the server's time is known where it was
    measured (`SERVER_S`), and the tokenizer's, from the one fit that tells it, TensorRT-LLM's: all servers have the
    same tokenizers.
    """
    tokenizer_s = load_calibration(CALIBRATIONS["trtllm"]).front_end.prompt_token_s
    for run in (run for run in runs if not run.settings.left_out):
        calibration = load_calibration(calibration_of(run)).scheduled(run.plans_ahead)
        front_end, protocol = calibration.front_end, AS_ASSUMED
        if run.lengths == "uniform":
            delay_s, protocol = SERVER_S.get(run.engine, 0.0), ROUNDS
            front_end = FrontEndFit(delay_s=delay_s, client_s=CLIENT_S, prompt_token_s=tokenizer_s)
        with suppress(CapacityError):
            yield run, simulate(run, kernels(run), calibration.host, front_end, protocol)


def today_rows(evidence: Path, progress: Callable[[str], None]) -> list[Row]:
    """Two rows of every run of today's engines, `tpot_s` and `ttft_s`."""
    progress("transfer: today's engines")
    return [
        Row("transfer", f"today/{run.family}/{run.case.split('/', 2)[2]}", q, run.seconds(q), getattr(served, q), note)
        for run, served in predicted(read_runs(evidence, TODAY))
        for note in [f"{run.release} {COLD * run.settings.cold}".strip()]
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

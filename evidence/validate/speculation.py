"""Part `speculation`: measured runs with drafted tokens, and published gains, against rlsim with the acceptance given.

The runs (`speculation.csv`): gpt-oss-120b on one H200, vLLM 0.22, without drafts and with one token of an EAGLE-3 head
a step, 1 to 256 users in a closed loop. Prompts and responses are drawn evenly from 0.8 of 8,000 and 1,000 tokens up to
these, as their means say (7,200 and 900 tokens). What they do not say is as in `serving`. Nothing is fitted to them.

The gains (`speculation_gains.csv`) are of decoding alone, at one batch and context. SpecDecode-Bench's are computed by
that project's own model of time, which charges one pass of the draft whatever it drafts. InferenceX' (TensorRT-LLM,
here with vLLM's kernels) and the trainers' are measured; drafted tokens (3 of InferenceX) and contexts are taken where
nobody states them. Where no acceptance is told, the tokens a step that would explain the gain are the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from evidence.validate.closed_loop import Served, closed_loop
from evidence.validate.parts import Options, Section
from evidence.validate.published import measured_section
from evidence.validate.rows import Row, markdown, read_rows, summarise, summary_table
from evidence.validate.serving import AS_ASSUMED, ServingRun
from rlsim.base.schema import Schema
from rlsim.cost.calibration import load_calibration
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.roofline import step_cost
from rlsim.cost.speculation import Drafts, Method, Speculation, speculative
from rlsim.models.hardware import load_cluster
from rlsim.models.model import Model, load_model
from rlsim.models.precision import Precision

TABLE, GAINS = "speculation.csv", "speculation_gains.csv"

#: What else could be true of the runs: exponent of the experts' popularity, and whether the engine chose their kernel.
VARIANTS = {
    "as the scripts and the measured kernels say": (0.0, False),
    "experts of unequal popularity (exponent 1)": (1.0, False),
    "experts by the engine's own choice (OpenAI's Triton kernels)": (0.0, True),
}


class DraftedRun(ServingRun):
    """A measured run, by output tokens a second; of `drafted` tokens the share `acceptance` is accepted."""

    drafted: int
    acceptance: float = 0.0
    tokens_per_s: PositiveFloat

    @property
    def shown(self) -> str:
        return f"{self.model}/k{self.drafted}/{self.concurrency}"


class Gain(Schema):
    """A published gain of decoding over none drafted. `yielded`: tokens a step, where they are told."""

    case: str
    method: Method
    model: str
    cluster: str
    calibration: str
    precision: Precision | None = None
    tp: PositiveInt
    ep: PositiveInt
    drafted: PositiveInt
    batch: PositiveInt
    context_tokens: PositiveInt
    acceptance: str = ""
    yielded: PositiveFloat | None = None
    gain: PositiveFloat

    @property
    def told(self) -> float | None:
        return 1 + sum(map(float, self.acceptance.split())) if self.acceptance else self.yielded

    def ratio(self) -> float:
        """How many times as long as a plain one rlsim's step with drafts takes."""
        model, layout = load_model(self.model).served(self.precision), ReplicaLayout(ep=self.ep)
        replica = model, self.tp, load_cluster(self.cluster), load_calibration(self.calibration), layout
        drafts = _drafts(model, self.method, self.drafted, 0.0)
        steps = (step_cost(*replica), speculative(*replica, drafts))
        plain, drafted = (one.decode(self.batch).step_s(self.batch * self.context_tokens) for one in steps)
        return drafted / plain


def _drafts(model: Model, method: Method, drafted: int, acceptance: float) -> Drafts:
    return Drafts.of(Speculation(method=method, num_speculative_tokens=drafted, acceptance=acceptance), model)


def served(run: DraftedRun, imbalance: float = 0.0, own: bool = False) -> Served:
    """The run on rlsim's engine, with the experts' kernel that it was made with, or that the engine takes by itself."""
    calibration = load_calibration(f"{run.gpu}-{run.engine}").scheduled(run.plans_ahead)
    calibration = calibration.with_experts(None if own else run.settings.moe_backend)
    replica = run.served, run.gpus, run.cluster, calibration, replace(run.layout, imbalance=imbalance)
    drafts = _drafts(run.served, "eagle3", run.drafted, run.acceptance) if run.drafted else None
    cost = speculative(*replica, drafts) if drafts else step_cost(*replica)
    pages = AS_ASSUMED.pages(run, drafts.memory(run.gpus) if drafts else (0.0, 0.0))
    config, load = AS_ASSUMED.config(run), AS_ASSUMED.load(run)
    return closed_loop(cost, pages, config, load, calibration.front_end, run.intake)


def rows_of(runs: Sequence[DraftedRun], imbalance: float = 0.0, own: bool = False) -> list[Row]:
    """Tokens a second of every run, and the gain of drafts for each number of users."""
    found = {run: served(run, imbalance, own) for run in runs}
    rates = {(run.drafted, run.concurrency): (run.tokens_per_s, one.tokens_per_s) for run, one in found.items()}
    rows = []
    for run, one in found.items():
        note = f"TPOT {run.tpot_ms:.3g} ms, rlsim {one.tpot_s * 1e3:.3g}; TTFT {run.ttft_ms:.0f}, "
        note += f"{one.ttft_s * 1e3:.0f}"
        rows.append(Row("speculation", run.shown, "tokens_per_s", *rates[run.drafted, run.concurrency], note))
    for run in (run for run in runs if run.drafted):
        drafted, plain = rates[run.drafted, run.concurrency], rates[0, run.concurrency]
        rows.append(Row("speculation", run.shown, "gain", drafted[0] / plain[0], drafted[1] / plain[1]))
    return rows


def chance(yielded: float, drafted: int) -> float:
    """The chance of each drafted token, given those before it, with which a step yields so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(drafted + 1)) < yielded else (low, middle)
    return low


def gain_table(gains: Sequence[Gain]) -> str:
    """Published gains beside rlsim's with the tokens a step that are told, and those that would explain each gain."""
    cells = []
    for one in gains:
        ratio, given = one.ratio(), ["", ""]
        needed = one.gain * ratio
        chances = f"{chance(needed, one.drafted):.2f}" if 1 <= needed <= one.drafted + 1 else "none"
        if one.told is not None:
            given = [f"{one.told:.2f}", f"{one.told / ratio:.2f}"]
        sizes = (str(one.drafted), str(one.batch), f"{one.context_tokens:,}")
        cells.append((f"{one.case}, {one.method}", *sizes, f"{one.gain:.2f}", *given, f"{needed:.2f}", chances))
    asked = ("run", "k", "batch", "context", "gain, published", "tokens a step, told", "gain, rlsim's with these")
    return markdown((*asked, "tokens a step that explain it", "chance of each"), cells)


def section(options: Options) -> Section:
    """All measured runs; unless quick, under each other assumption too."""
    runs = read_rows(options.evidence / TABLE, DraftedRun)
    options.progress("speculation")
    rows = rows_of(runs)
    tables = {
        "summaries": summary_table(summarise(rows, depth=2)),
        "gains": gain_table(read_rows(options.evidence / GAINS, Gain)),
    }
    if not options.quick:
        tables["variants"] = _variants(runs, rows, options)
    return measured_section(rows, 2, **tables)


def _variants(runs: Sequence[DraftedRun], rows: Sequence[Row], options: Options) -> str:
    """Mean and largest |error| of tokens a second and of gains under each assumption."""
    cells = []
    for name, (imbalance, own) in VARIANTS.items():
        options.progress(f"speculation: {name}")
        found = rows_of(runs, imbalance, own) if imbalance or own else rows
        sizes = {q: [abs(row.error) for row in found if row.quantity == q] for q in ("tokens_per_s", "gain")}
        cells.append((name, *(f"{np.mean(each):.1%} / {max(each):.1%}" for each in sizes.values())))
    return markdown(("what is taken", "tokens a second: mean / largest error", "gain"), cells)

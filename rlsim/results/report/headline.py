"""What was found, in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rlsim.experiment.result import Result
from rlsim.models.precision import PRECISIONS
from rlsim.results.comparison.verdict import Verdict, judge
from rlsim.results.report.setups import calibrations_of

_MOST_CASES = 6


def findings(result: Result) -> tuple[str, ...]:
    """The answer first: the best system of each case; then idle GPUs, and how sure the figures are."""
    summary, manifest = result.summary(), result.manifest
    baseline = str(manifest["baseline"])
    cases = list(dict.fromkeys(summary["case"]))
    verdicts = {case: judge(summary[summary["case"] == case], baseline) for case in cases}
    sentences = [cases_sentence(list(verdicts.values()))] if len(cases) > 1 else []
    for case in cases[:_MOST_CASES]:
        said = " ".join(verdicts[case].sentences(manifest["tuned"].get(case)))
        sentences.append(f"{case}: {said}" if case else said)
    if len(cases) > _MOST_CASES:
        sentences.append(f"{len(cases) - _MOST_CASES} more cases are compared below.")
    if len(cases) == 1:
        sentences.append(idle_sentence(summary, verdicts[cases[0]]))
    sentences.append(calibration_sentence(manifest))
    return tuple(sentences)


def cases_sentence(verdicts: Sequence[Verdict]) -> str:
    """Over several cases: which systems have the best mean in how many, and in how many one is surely faster."""
    counts = Counter(verdict.first.system for verdict in verdicts if verdict.first)
    who = ", ".join(f"{name} in {count}" for name, count in counts.most_common(_MOST_CASES)) or "none can be compared"
    faster = sum(bool(verdict.faster) for verdict in verdicts)
    text = f"Best mean in {len(verdicts)} cases: {who}."
    if all(row.outcome == "no speedup" for verdict in verdicts for row in verdict.rows):
        return text
    return f"{text} In {faster} of {len(verdicts)} a system is faster than {verdicts[0].baseline}."


def idle_sentence(rows: pd.DataFrame, verdict: Verdict) -> str:
    """How much of the GPU time is idle, or busy with the tail, under the baseline and under the best other system."""
    shares = rows.set_index("system")[["bubble_fraction", "tail_fraction"]]
    first = verdict.baseline if verdict.baseline in shares.index else verdict.rows[0].system
    idle, tail = shares.loc[first]
    text = f"GPUs are idle {idle:.1%} of the time under {first}, and decode in the tail for {tail:.1%} of what is left"
    if (best := verdict.runner_up) and best.system != first:
        idle, tail = shares.loc[best.system]
        text += f"; under {best.system} {idle:.1%} and {tail:.1%}"
    return f"{text} (at less than half of the full batch's throughput)."


def calibration_sentence(manifest: Mapping[str, Any]) -> str:
    """The error of the calibrations used, and how much was looked up outside what they were measured at."""
    records = {record["name"]: record for setup in manifest["setups"].values() for record in calibrations_of(setup)}
    texts = []
    asked = {operator for table in manifest["lookups"].values() for operator in table}
    for name, record in records.items():
        medians = [
            residual["median"]
            for operator, residual in record["residuals"].items()
            if operator in asked or not any(f"_{precision}" in operator for precision in PRECISIONS)
        ]
        if medians:
            low, high = (f"{value:.1%}" for value in (min(medians), max(medians)))
            error = f"off by {low}" if low == high else f"off by {low} to {high}"
            notes = (str(residual["note"]) for residual in record["residuals"].values())
            elsewhere = sorted({note.partition(". ")[0] for note in notes if "not measured on" in note})
            where = f" ({', '.join(elsewhere)})" if elsewhere else ""
            texts.append(f"kernel times of {name} are {error} in the median, by operator{where}")
        else:
            texts.append(f"the calibration {name} states no errors")
    counts = pd.DataFrame([row for table in manifest["lookups"].values() for row in table.values()]).sum()
    outside = float(counts.get("extrapolated", 0)) / max(float(counts.sum()), 1.0)
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}; {outside:.1%} of the shapes looked up lie outside what was measured."

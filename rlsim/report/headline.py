"""What was found, in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlsim.experiment.backlog import comparable
from rlsim.experiment.result import Result
from rlsim.formats import is_missing, rate, with_choice
from rlsim.precision import PRECISIONS
from rlsim.report.choice import best_other, fastest
from rlsim.report.setups import calibrations_of
from rlsim.report.speedups import intervals, verdict, verdicts

_MOST_CASES = 6
_SPEEDUP = ("speedup", "speedup_low", "speedup_high")


def findings(result: Result) -> tuple[str, ...]:
    """The answer first: the best system of each case; then idle GPUs, and how sure the figures are."""
    summary, manifest = result.summary(), result.manifest
    baseline, seeds = str(manifest["baseline"]), len(manifest["seeds"])
    cases = list(dict.fromkeys(summary["case"]))
    sentences = [cases_sentence(summary, baseline)] if len(cases) > 1 else []
    for case in cases[:_MOST_CASES]:
        rows = summary[summary["case"] == case]
        tuned = manifest["tuned"].get(case, {})
        prefix = f"{case}: " if case else ""
        sentences.append(prefix + best_sentence(rows, baseline, tuned, seeds) + late_sentence(rows))
    if len(cases) > _MOST_CASES:
        sentences.append(f"{len(cases) - _MOST_CASES} more cases are compared below.")
    if len(cases) == 1:
        sentences.append(idle_sentence(summary, baseline))
    sentences.append(calibration_sentence(manifest))
    return tuple(sentences)


def cases_sentence(summary: pd.DataFrame, baseline: str) -> str:
    """Over several cases: which systems are fastest in how many, and where that is certain."""
    groups = [rows for _, rows in summary.groupby("case", sort=False)]
    counts = Counter(fastest(rows) for rows in groups if comparable(rows["held_back"]).any())
    leads = ["faster" in verdicts(rows, baseline).values() for rows in groups]
    who = ", ".join(f"{name} in {count}" for name, count in counts.most_common(_MOST_CASES)) or "none is comparable yet"
    text = f"Fastest in {len(groups)} cases: {who}."
    if summary["speedup"].notna().any():
        text += f" In {sum(leads)} of {len(groups)} a system is faster than {baseline}"
        text += " beyond the spread of the seeds." if summary["speedup_low"].notna().any() else "."
    return text


def best_sentence(rows: pd.DataFrame, baseline: str, tuned: Mapping[str, str], seeds: int) -> str:
    """Which system of one case's summary is fastest, by how much, and whether that is certain."""
    by_name = {str(row["system"]): row for row in rows.to_dict("records")}
    if len(by_name) == 1:
        name, row = next(iter(by_name.items()))
        return f"{with_choice(name, tuned)} trains on {_rate(row)}; there is nothing to compare it with."
    if not comparable(rows["held_back"]).any():
        return "No system is comparable yet."
    if baseline not in by_name:
        best = fastest(rows)
        named = with_choice(best, tuned)
        return f"{named} is the fastest: {_rate(by_name[best])}. The baseline {baseline} did not run."
    best = str(best_other(rows, baseline))
    named, row = with_choice(best, tuned), by_name[best]
    speedup, low, high = (float(row[c]) for c in _SPEEDUP)
    digits = 3 if any(0.9 < value < 1.1 for value in (speedup, low, high)) else 2
    interval = (
        "one seed, no interval"
        if is_missing(low)
        else f"95% interval {low:.{digits}f} to {high:.{digits}f}, {seeds} seeds"
    )
    least, most = intervals(row)["calibration"]
    if not is_missing(least):
        interval += f"; {least:.{digits}f} to {most:.{digits}f} over the calibration's errors"
    over = with_choice(baseline, tuned)
    by = (
        f"{speedup:.{digits}f} times the responses per second of {over} ({interval}), and "
        f"{row['token_speedup']:.{digits}f} times the tokens; over all seeds together {rate(row['responses_per_s'])} "
        f"against {rate(by_name[baseline]['responses_per_s'])} responses per second"
    )
    match verdicts(rows, baseline)[best]:
        case "not comparable yet":
            return f"No system can be compared with {over} yet."
        case "equal":
            return f"All systems are as fast: {_rate(row)}."
        case "faster":
            return f"{named} is the fastest: {by}."
        case "slower":
            return f"No system is faster than {over}. {named} comes next: {by}."
        case _:
            by_seeds = verdict(speedup, (low, high)) == "not told apart"
            why = "by these seeds" if by_seeds else "within the calibration's errors"
            return f"{named} and {over} cannot be told apart {why}: {by}."


def late_sentence(rows: pd.DataFrame) -> str:
    """Which systems of one case's summary are not comparable yet, and why; nothing if all are."""
    late = rows[~comparable(rows["held_back"])]
    who = ", ".join(f"{name} ({share:+.0%})" for name, share in zip(late["system"], late["held_back"], strict=True))
    return (
        f" Not comparable yet, for the prompts put off or dropped as too stale (of those trained on): {who}."
        if who
        else ""
    )


def _rate(row: Mapping[Any, Any]) -> str:
    return f"{rate(row['responses_per_s'])} responses per second"


def idle_sentence(rows: pd.DataFrame, baseline: str) -> str:
    """How much of the GPU time is idle, or busy with the tail, under the baseline and under the best other system."""
    shares = rows.set_index("system")[["bubble_fraction", "tail_fraction"]]
    first = baseline if baseline in shares.index else str(shares.index[0])
    best = best_other(rows, first)
    idle, tail = shares.loc[first]
    text = f"GPUs are idle {idle:.1%} of the time under {first}, and decode in the tail for {tail:.1%} of what is left"
    if best:
        idle, tail = shares.loc[best]
        text += f"; under {best} {idle:.1%} and {tail:.1%}"
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

"""How sure the figures are, what to know about them, and exactly what was run."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from rlsim.base.formats import Table, written
from rlsim.base.refusals import sentence
from rlsim.cost.step import KINDS
from rlsim.experiment.ledger import ledgers, turns
from rlsim.experiment.result import Result
from rlsim.experiment.verdict import Verdict, judge
from rlsim.models.precision import PRECISIONS
from rlsim.results.report.page import (
    Block,
    CaseSetup,
    Text,
    calibrations_of,
    figure,
    unique_slug,
)
from rlsim.results.report.style import chart

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
    compared = any(row.outcome != "no speedup" for verdict in verdicts for row in verdict.rows)
    return sentence("cases", verdicts=verdicts, who=who, faster=faster, compared=compared)


def idle_sentence(rows: pd.DataFrame, verdict: Verdict) -> str:
    """How much of the GPU time is idle, or busy with the tail, under the baseline and under the best other system."""
    shares = rows.set_index("system")[["bubble_fraction", "tail_fraction"]]
    first = verdict.baseline if verdict.baseline in shares.index else verdict.rows[0].system
    idle, tail = shares.loc[first]
    best = verdict.runner_up.system if verdict.runner_up else first
    return sentence("idle", first=first, idle=idle, tail=tail, best=best, others=shares.loc[best])


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
        ends = dict.fromkeys(f"{value:.1%}" for value in (min(medians), max(medians))) if medians else {}
        notes = (str(residual["note"]) for residual in record["residuals"].values())
        elsewhere = sorted({note.partition(". ")[0] for note in notes if "not measured on" in note})
        texts.append(sentence("errors", name=name, errors=" to ".join(ends), elsewhere=", ".join(elsewhere)))
    counts = pd.DataFrame([row for table in manifest["lookups"].values() for row in table.values()]).sum()
    outside = float(counts.get("extrapolated", 0)) / max(float(counts.sum()), 1.0)
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}; {outside:.1%} of the shapes looked up lie outside what was measured."


Lookups = Mapping[str, Mapping[str, Mapping[str, int]]]


def calibration_blocks(lookups: Lookups, setups: list[CaseSetup]) -> Iterator[Block]:
    """Errors of every calibration used, and how many shapes lay outside what it was measured at.

    `lookups` as in a manifest: by case and operator, how many shapes of each kind.
    """
    taken: set[str] = set()
    records = {record["name"]: record for setup in setups for record in setup.calibrations}
    for name, record in records.items():
        yield Text(f"Calibration {name}", "heading")
        yield Text(_origin(record))
        rows = pd.DataFrame([{"operator": op, **values} for op, values in record["residuals"].items()])
        if rows.empty:
            yield Text("It states no errors: how far its times are off is unknown.")
            continue
        errors, kinds = rows[["operator", "median", "p90"]], ["median error", "90% of the errors are below"]
        both = errors.set_axis(["operator", *kinds], axis=1).melt("operator", var_name="kind", value_name="error")
        drawn = chart("residuals", errors=errors, both=both, kinds=kinds)
        yield figure("residuals", drawn, unique_slug(f"calibration {name}", taken), name=name)
        caption = f"Errors of {name} in numbers; bias: median signed error, positive is predicted too slow"
        yield Table.of(caption, written("errors", rows), 5)
    yield Text("Look-ups", "heading")
    yield _lookups(lookups)
    yield Text(
        "These are errors of single kernels. How far whole engines, real rollouts and published figures are off is "
        "compared in rlsim's documentation, docs/validation.md, and repeated by the command rlsim validate."
    )


def _origin(record: Mapping[str, Any]) -> str:
    provenance = record["provenance"]
    sources = [
        f"{source['project']} at {source['commit']}" if source.get("commit") else str(source["project"])
        for source in provenance.get("sources", [])
    ]
    known = {"date": provenance.get("date"), "sources": ", ".join(sources)}
    return sentence("origin", record=record, notes="; ".join(provenance.get("notes", [])), **known)


def _lookups(tables: Lookups) -> Table:
    counts: dict[str, Counter[str]] = {}
    for operator, row in (item for table in tables.values() for item in table.items()):
        counts.setdefault(operator, Counter()).update(row)
    caption = (
        "Distinct shapes whose time was looked up: within the range of a fit, and outside, where the times are least "
        "certain"
    )
    return Table.of(caption, written("lookups", counts.items(), kinds=KINDS))


def ledger_blocks(result: Result) -> Iterator[Block]:
    """What each case rests on that nobody gave or measured, and what it is worth where that was asked."""
    for case, ledger in ledgers(result.manifest):
        title = " · ".join(filter(None, (case, ledger.title)))
        rows = [row.cells(ledger) for row in ledger.weighed]
        yield Text(title, "heading")
        if said := turns(ledger):
            yield Text(said)
        yield Table(ledger.legend or title, ledger.headings, rows, words=(1,))
        why = written("why", ledger.assumed)
        yield Table.of("Why these are not known", why, 1, 2, folded=True)
        defaults = [[whose, ", ".join(keys)] for whose, keys in ledger.defaults.items()]
        if defaults:
            yield Table("Whose defaults were taken", ("of", "values"), defaults, words=(1,), folded=True)


def listing(notes: Sequence[str], none: str) -> Text:
    """Notes as a list, or that there are none."""
    return Text(notes, "list") if notes else Text(none)


def configuration_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """The experiment with all defaults, what it ran on, versions and hashes."""
    manifest = result.manifest
    hashes = {f"SHA-256 of the {name}": value for name, value in manifest["hashes"].items()}
    yield Table.of("What each case ran on", written("setups", setups), 1, 4, 6)
    yield Text(f"Seeds: {', '.join(map(str, manifest['seeds']))}. Baseline: {manifest['baseline']}.")
    yield Text("The experiment, with every default filled in and every override applied", "heading")
    yield from as_run(manifest, "Versions and hashes", hashes)


def as_run(manifest: Mapping[str, Any], title: str, hashes: Mapping[str, str]) -> Iterator[Block]:
    """The experiment of a manifest as YAML, and the versions that it ran with."""
    yield Text(as_yaml(manifest["experiment"]), "code", "The experiment as YAML")
    versions = {"rlsim": manifest["rlsim"], **manifest["versions"], **hashes}
    yield Table(title, ("what", "value"), [*versions.items()], words=(1,))


def as_yaml(data: Any) -> str:
    """A JSON-like value as YAML."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 100
    yaml.representer.add_representer(type(None), lambda to, _: to.represent_scalar("tag:yaml.org,2002:null", "null"))
    yaml.dump(data, stream)
    return stream.getvalue()

"""`rlsim advise` from Python: what to do, what fits, and why GPUs idle, for one experiment."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.base.records import file_sha256
from rlsim.errors import CapacityError, ConfigError, PolicyError, RlsimError, unknown_name
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import remembering
from rlsim.experiment.ledger import LedgerRecord, turns
from rlsim.experiment.load import load_experiment, parse_overrides
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.result import Result, check_target, open_results
from rlsim.experiment.run import Progress
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.frameworks.keys import Keys
from rlsim.models.hardware import Cluster, one_kind
from rlsim.results.advise.bound import Bound
from rlsim.results.advise.conclusions import conclusions
from rlsim.results.advise.headline import Headline, headline, settings_of
from rlsim.results.advise.idle import idle_causes, idle_shares, tail_seconds, waits
from rlsim.results.advise.memory import memory_by_call, memory_by_tp
from rlsim.results.advise.quick import contenders, left_out, quick_settings
from rlsim.results.advise.ranking import candidates, ranking
from rlsim.results.advise.runs import Runner
from rlsim.results.advise.staleness import Allowed, allowed_steps, allowing
from rlsim.results.sweeps.local import in_processes

ADVICE = "advice.json"
#: Runs of each system, at most, unless it is said how many.
SEEDS = 5

#: The tables in the order of reading: name, title, what it shows.
SECTIONS = (
    ("memory", "What fits: rollout", "each GPU's memory at every TP (GPUs of a replica), GB; what its KV cache holds"),
    ("memory_calls", "What fits: the other calls", "on the fullest GPU, GB"),
    ("idle", "Idle time of every GPU", "shares of GPU time under the baseline, by cause; tail: share of its busy time"),
    ("idle_waits", "What stage barriers wait for", "share of GPU time"),
    (
        "ranking",
        "Systems, the best first",
        "times the baseline's responses and tokens trained on per second; 95% interval: of what decides the verdict",
    ),
    ("screened", "All systems, one seed", "what the systems above were chosen from (--quick)"),
    (
        "splits",
        "GPUs that generate, and GPUs that train",
        "the best split of each system, on one seed, and those beside it",
    ),
    ("splits_tried", "All splits that were tried", "on one seed"),
)  # fmt: skip
#: Those that only an advice under which staleness is allowed has.
ALLOWING = ("splits", "splits_tried")


@dataclass(frozen=True)
class Advice:
    """What was found. `tables` are frames whose columns carry units, by section; `result` is the ranking's run.

    - `memory`, `memory_calls`: `rlsim.results.advise.memory`;
    - `idle`: shares of every GPU's time under the baseline, `idle_waits`: what its stage barriers wait for
      (`rlsim.results.advise.idle`);
    - `ranking`: `rlsim.results.advise.ranking`; `screened` the same of one seed, where a quick advice chose from it;
    - `splits`, `splits_tried`: `rlsim.results.advise.splits`, where staleness is allowed.
    """

    result: Result
    tables: Mapping[str, pd.DataFrame]
    baseline: str
    headline: Headline
    conclusions: tuple[str, ...]
    notes: tuple[str, ...]
    not_applicable: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the result's own tables, as JSON knows it; what is missing is null."""
        shown = {
            name: frame
            for name, frame in self.tables.items()
            if name not in ALLOWING or "max_staleness" in self.settings
        }
        tables = {name: json.loads(frame.to_json(orient="records")) for name, frame in shown.items()}
        return {
            "experiment": self.result.manifest["experiment"]["name"],
            "baseline": self.baseline,
            "settings": dict(self.settings),
            "headline": self.headline.text,
            "how": self.headline.how,
            "changes": list(self.headline.changes),
            "conclusions": list(self.conclusions),
            "notes": list(self.notes),
            "not_applicable": dict(self.not_applicable),
            "ledger": self.result.manifest["ledger"][""],
            **tables,
        }

    def write(self, directory: str | Path) -> Path:
        """The ranking's result as `rlsim run` writes it, with advice.json; returns the directory."""
        return self.result.write(directory, {ADVICE: json.dumps(self.as_json(), indent=2) + "\n"})


def advise(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    case: str | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    skip: Collection[str] = (),
    quick: bool = False,
    max_staleness: float | str = 0,
    what_if: bool = True,
    workers: int | None = 1,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Advice on an experiment: its model, cluster, trace and workflow, its systems and all shipped ones that apply.

    `case` names one of the experiment's cases; `seeds` and `steps` go before its own, of which at most `SEEDS` seeds
    are taken. `skip` are shipped policies to leave out. `quick`: see `rlsim.results.advise.quick`. With
    `max_staleness` (a number of updates by the setting, or `mean:1`, `p95:2`, `max:1`: `rlsim.results.advise.bound`),
    systems are tried by themselves that train on what older weights have generated, with the best split of the GPUs
    where they generate on GPUs of their own (`rlsim.results.advise.splits`); those that break the bound are left out.
    `what_if` runs the best at both ends of what is assumed, too: its worth is in the result's ledger, and in the
    headline if it decides. `workers` is the number of processes (None: one a core), of which the advice does not
    depend. With `out` the results are written there. Raises `RlsimError` for whatever does not exist or fit.
    """
    bound = Bound.of(max_staleness)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers: expected 1 or more, got {workers}")
    if out is not None:
        check_target(out, (ADVICE,))
    if progress:
        progress(0, 1, "what fits")
    settings = _settings(source, overrides, case, seeds, steps, quick)
    if bound.most and not quick:
        settings["workflow.steps"] = allowed_steps(bound.most, load_experiment(source, settings)[0], quick=False)
    execute = in_processes(workers)
    runner = Runner(source, settings, remembering(execute) if quick else execute, progress)
    advice = _advice(runner, skip, quick, bound, what_if)
    if out is not None:
        advice.write(out)
    return advice


def _advice(runner: Runner, skip: Collection[str], quick: bool, stale: Bound, what_if: bool) -> Advice:
    experiment, shown, folder = load_experiment(runner.source, runner.settings)
    simulator = Simulator(LoadedExperiment.of(experiment, folder, shown), search=False)
    cluster = one_kind(simulator.loaded.cluster, "rlsim advise")
    memory = _memory(simulator.placed(), shown)
    own = parse_systems(experiment.systems, shown)
    more, refused = candidates(simulator, own, skip, quick=quick)
    baseline = experiment.baseline or own[0].name
    with _told_what_fits(memory["memory"], cluster):
        allowed = allowing(runner, simulator, baseline, stale, skip, quick=quick)
    more += [] if quick else allowed.entries
    entries = [*experiment.systems, *more]
    with _told_what_fits(memory["memory"], cluster):
        first = {"seeds": list(experiment.seed_list[:1]), "certainty": 0} if quick else {}
        settings = {"systems": entries, "baseline": baseline, **first}
        result = runner("all systems", settings, [entry["name"] for entry in more])
    ranked = ranking(result) if quick else allowed.ranking(result)
    tables = {**memory, "ranking": ranked, "screened": pd.DataFrame(), **allowed.tables}
    specs = _came_out(simulator, [*entries, *(allowed.entries if quick else ())], result)
    (calibration,) = simulator.loaded.calibrations.values()
    pp, per_tp = experiment.engine.pp, experiment.engine.pp * experiment.engine.data_parallel_attention
    keys = Keys(experiment.framework.partition(" ")[0], calibration.engine, cluster.gpus, pp, per_tp)
    notes = list[str]()
    if quick:
        result, note = _second_pass(runner, tables, baseline, specs, settings_of(keys, specs, baseline), allowed)
        notes.append(note)
    tables |= _idle(result, baseline, cluster.gpus)
    ranked, over = tables["ranking"], allowed.over(result)
    best = dict.fromkeys([*ranked[ranked["why"].eq("") & ranked["same_as"].eq("")]["system"][:2], baseline])
    result = _with_worths(runner, result, [specs[name] for name in best], baseline, what_if)
    head = headline(ranked, baseline, keys, specs, over.pop(baseline, ""))
    deciding = turns(LedgerRecord.model_validate(result.manifest["ledger"][""]))
    return Advice(
        result=result,
        tables=tables,
        baseline=baseline,
        headline=head._replace(text=" ".join(filter(None, (head.text, deciding)))),
        conclusions=(*conclusions(tables, baseline), *allowed.conclusions(tables)),
        notes=tuple(dict.fromkeys([*notes, *allowed.notes, *result.notes])),
        not_applicable={**allowed.refusals(refused), **over},
        settings={
            "seeds": list(experiment.seed_list), "steps": experiment.workflow.steps, "quick": quick, **allowed.settings
        },
    )  # fmt: skip


def _with_worths(runner: Runner, result: Result, best: Sequence[SystemSpec], baseline: str, what_if: bool) -> Result:
    """The result with what each assumption is worth to the best systems and the baseline, in its ledger."""
    names = [spec.name for spec in best]
    seeds = {"seeds": result.manifest["seeds"][:1], "certainty": 0}
    settings = {"systems": [spec.entry for spec in best], "baseline": baseline, **seeds}
    try:
        ledger = runner("what is assumed", settings, names, what_if=what_if).manifest["ledger"] if what_if else {}
    except PolicyError:
        raise
    except RlsimError:  # too small a run for these systems: nothing is known of what their assumptions are worth
        ledger = {}
    return replace(result, manifest={**result.manifest, "ledger": ledger or result.manifest["ledger"]})


def _came_out(simulator: Simulator, entries: Sequence[Any], result: Result) -> dict[str, SystemSpec]:
    """The systems by name, tuned ones with what they chose."""
    tuned = result.manifest["tuned"].get("", {})
    found = {spec.name: spec for spec in parse_systems(entries)}
    for name, chosen in tuned.items():
        alternatives = found[name].alternatives(simulator.placed(found[name].make()).context)
        found[name] = next(one for one, chose in alternatives if chose == chosen)
    return found


def _second_pass(
    runner: Runner, tables: dict[str, pd.DataFrame], baseline: str, specs: Mapping[str, SystemSpec],
    settings: Collection[str], allowed: Allowed,
) -> tuple[Result, str]:  # fmt: skip
    """The contenders of a quick advice under all seeds; puts their ranking in place of that of one seed."""
    screened = tables["screened"] = tables["ranking"]
    others = screened[~screened["system"].isin(list(allowed.own))]  # which go on in any case
    kept = contenders(others, baseline, settings)
    tried = [specs[name].entry for name in dict.fromkeys([*kept, *allowed.own])]
    systems = {"systems": [*tried, *allowed.entries], "baseline": baseline, **allowed.longer}
    final = runner("the best", systems, [entry["name"] for entry in allowed.entries])
    tuned = dict(zip(screened["system"], screened["tuned"], strict=True))
    ranked = allowed.ranking(final)
    tables["ranking"] = ranked.assign(
        tuned=[tuned.get(*own) for own in zip(ranked["system"], ranked["tuned"], strict=True)]
    )
    steps = int(runner.settings["workflow.steps"])
    return final, left_out(screened, kept, len(final.manifest["seeds"]), steps)


def _settings(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any],
    case: str | None,
    seeds: int | None,
    steps: int | None,
    quick: bool,
) -> dict[str, Any]:
    """All settings of the one case that is looked at."""
    settings = dict(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)
    shown = str(source) if isinstance(source, str | Path) else ""
    settings |= _one_case(load_experiment(source, settings)[0], case, shown)
    experiment, shown, folder = load_experiment(source, settings)
    planned = experiment.seed_list
    if quick:
        simulator = Simulator(LoadedExperiment.of(experiment, folder, shown), search=False)
        overlaps = any(simulator.overlap(spec.make()) for spec in parse_systems(experiment.systems, shown))
        return settings | quick_settings(seeds, steps, experiment, overlaps=overlaps)
    asked = {"seeds": seeds or (SEEDS if len(planned) > SEEDS else None), "workflow.steps": steps}
    return settings | {key: value for key, value in asked.items() if value is not None}


def _memory(placed: PlacedExperiment, shown: str) -> dict[str, pd.DataFrame]:
    """What fits; raises `CapacityError` if nothing does."""
    tables = {"memory": memory_by_tp(placed), "memory_calls": memory_by_call(placed)}
    if not tables["memory"]["fits"].any():
        by_reason = tables["memory"].groupby("why_not", sort=False)["tp"]
        reasons = "\n".join(f"TP {', '.join(map(str, tps))}: {why}" for why, tps in by_reason)
        raise CapacityError(f"{shown}: nothing fits on {placed.loaded.cluster.name}:\n{reasons}")
    return tables


@contextmanager
def _told_what_fits(memory: pd.DataFrame, cluster: Cluster) -> Iterator[None]:
    """Where the experiment's own systems do not fit, in the block, it is told what does."""
    try:
        yield
    except CapacityError as error:
        fitting = ", ".join(map(str, memory.query("fits")["tp"]))
        raise CapacityError(
            f"{error}\nOn {cluster.name} generation fits at TP {fitting}: make one of these the experiment's system, "
            "and ask again"
        ) from None


def _one_case(experiment: Experiment, case: str | None, shown: str) -> dict[str, Any]:
    """The settings of the case that is wanted."""
    if case is None and not experiment.cases:
        return {}
    if case is None:
        raise ConfigError(f"{shown}: the experiment has several cases: choose one of {', '.join(experiment.cases)}")
    if not experiment.cases:
        raise ConfigError(f"{shown or 'the experiment'} has no cases: leave out --case {case}")
    if case not in experiment.cases:
        raise unknown_name("case", case, experiment.cases)
    return {**experiment.cases[case], "cases": {}}


def _idle(result: Result, baseline: str, gpus: int) -> dict[str, pd.DataFrame]:
    own = {table: getattr(result, table) for table in ("steps", "spans", "responses", "stays", "calls")}
    own = {table: frame[frame["system"] == baseline] for table, frame in own.items()}
    if own["steps"].empty:
        raise ConfigError(f"the baseline {baseline} did not run:\n" + "\n".join(result.notes))
    steps, causes = own["steps"], idle_causes(**own, gpus=gpus)
    tail = tail_seconds(steps, own["spans"], own["stays"], own["calls"], gpus)
    return {"idle": idle_shares(causes, tail, steps, gpus), "idle_waits": waits(causes, steps, gpus)}


def read_tables(directory: str | Path) -> dict[str, pd.DataFrame]:
    """The tables of `SECTIONS` that `Advice.write` left in a results directory; empty if it holds no advice."""
    found = read_advice(directory)
    return {} if found is None else found[0]


def read_advice(directory: str | Path) -> tuple[dict[str, pd.DataFrame], list[str]] | None:
    """The same, and the headline with the conclusions; None if the directory holds no advice.

    Raises `ConfigError` if it is damaged.
    """
    path = Path(directory) / ADVICE
    if not path.is_file():
        return None
    with open_results(directory) as found:
        if file_sha256(path) != found.files.get(ADVICE):
            raise ConfigError(f"{path}: damaged, or changed after rlsim wrote it: its SHA-256 is not the recorded one")
        data = json.loads(path.read_bytes())
    said = [data["headline"], " ".join([data["how"], *data["changes"]]), *data["conclusions"]]
    tables = {name: pd.DataFrame(data.get(name, [])) for name, _, _ in SECTIONS}
    return tables, [text for text in said if text]

"""What a run rests on: which assumptions hold in it, and what each is worth.

Every value of an experiment is *given*, *a framework's default* (its release named), *measured* (the calibration) or
*assumed*. What may be assumed is a table, `rlsim/data/assumptions.yaml`; `ledger_of` says which of its rows hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import Field, TypeAdapter

from rlsim.base.formats import number
from rlsim.base.reading import shipped
from rlsim.base.records import Record
from rlsim.base.refusals import holds, sentence, text_of
from rlsim.base.schema import Schema
from rlsim.cost.calibration import calibration_names
from rlsim.cost.derived import ITERATIONS
from rlsim.cost.step import Lookups
from rlsim.errors import one_line
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.schema import Experiment
from rlsim.models.hardware import Cluster, MixedCluster
from rlsim.models.layers import Experts, Recurrent
from rlsim.trace.turns import unrecorded

#: What an assumption moves by less than this, as a share of the step or of a speedup, does not matter.
MATTERS = 0.01
#: A step that is so many times as long, or as short, at an end of a range is said in the headline.
LOUD = 1.5


def _both(texts: Iterable[str]) -> str:
    return " … ".join(texts)


class EndRecord(Record):
    """A run with one assumption at an end of its range: its settings, and what came out on one seed.

    `step_s` is the baseline's step (s), `speedups` each system's throughput over the baseline's, in the ledger's unit;
    `problem` says why it did not run.
    """

    settings: dict[str, Any]
    shown: str
    step_s: float | None = None
    speedups: dict[str, float] = Field(default={})
    problem: str = ""

    @property
    def first(self) -> str:
        """The fastest system; the first of those named if several are."""
        return max(self.speedups, key=lambda name: self.speedups[name], default="")


class AssumedRecord(Record):
    """An assumption that holds: what was taken, why it is not known, and both ends of its range."""

    name: str
    key: str
    taken: str
    why: str
    ends: list[EndRecord]

    def cells(self, ledger: LedgerRecord) -> list[str]:
        """The row of a table: what is assumed (as what), its range, and what comes out at its ends."""
        cells = [f"{self.name} ({self.taken})", _both(end.shown for end in self.ends)]
        if ledger.base is None:
            return cells
        steps = _both("no run" if end.step_s is None else number(end.step_s, 1) for end in self.ends)
        return [*cells, steps, *(_both(number(end.speedups.get(name)) for end in self.ends) for name in ledger.others)]

    def moves(self, base: EndRecord) -> float:
        """By what share it moves the baseline's step or a speedup, whichever more; infinite if an end does not run."""
        if any(end.problem for end in self.ends):
            return float("inf")
        steps = [abs(end.step_s / base.step_s - 1) for end in self.ends if end.step_s and base.step_s]
        ratios = [abs(end.speedups[name] / base.speedups[name] - 1) for end in self.ends for name in end.speedups]
        return max([*steps, *ratios], default=0.0)


class LedgerRecord(Record):
    """What a case rests on. `defaults`: keys by whose defaults they are; `measured`: the calibrations.

    `base` is the run without a change that the ends of `assumed` are compared with; none where worths were not asked.
    `unit` is what throughputs count, as the verdict does: responses or tokens trained on.
    """

    assumed: list[AssumedRecord]
    defaults: dict[str, list[str]]
    measured: list[str]
    baseline: str = ""
    base: EndRecord | None = None
    unit: str = "responses"

    @property
    def others(self) -> list[str]:
        """The systems whose speedup over the baseline is known at the ends."""
        return [name for name in (self.base.speedups if self.base else ()) if name != self.baseline]

    @property
    def headings(self) -> list[str]:
        """Of the cells of its rows."""
        return ["assumed (taken)", "range", *(["step s", *self.others] if self.base else ())]

    @property
    def title(self) -> str:
        """What its table shows."""
        if self.base is None:
            return f"Assumed, as nobody gave them and nothing measured them: {len(self.assumed)} inputs"
        taken = ", ".join(f"{name} {self.base.speedups[name]:.2f} times" for name in self.others)
        step = f"{self.baseline} {number(self.base.step_s, 1)} s a step"
        return f"What is assumed, and what it is worth; as taken: {'; '.join(filter(None, (step, taken)))}"

    @property
    def legend(self) -> str:
        """How to read its table; empty where no worth is known."""
        return sentence("ledger", of=self, small=len(self.assumed) - len(self.weighed), matters=MATTERS)

    @property
    def weighed(self) -> list[AssumedRecord]:
        """Those that matter, what moves most first; where no worth is known all, as the table has them."""
        base = self.base
        if base is None:
            return self.assumed
        return sorted((row for row in self.assumed if row.moves(base) >= MATTERS), key=lambda row: -row.moves(base))


def turns(ledger: LedgerRecord) -> str:
    """One sentence on what is assumed and decides the answer, for the headline; empty if nothing is known to.

    It names a system that would be first instead; if none would, how far a step or a gain moves over the ranges.
    """
    base = ledger.base
    if base is None or base.step_s is None:
        return ""
    ends = [(row, end) for row in ledger.weighed for end in row.ends if end.step_s]
    for row, end in ends:
        there, taken = end.speedups, base.speedups[base.first]
        led = taken > base.speedups.get(end.first, 0.0) * (1 + MATTERS)  # else the two are as fast as taken
        if led and base.first in there and there[end.first] > there[base.first] * (1 + MATTERS):
            return (
                f"What is assumed decides who is first: with {row.name} at {end.shown} it is {end.first}, "
                f"{number(there[end.first])} times the {ledger.unit} per second of {ledger.baseline}, not {base.first} "
                f"({number(there[base.first])} there, {number(taken)} as taken: {row.taken})"
            )
    steps = {end.step_s: row for row, end in ends if end.step_s} | {base.step_s: None}
    low, high = min(steps), max(steps)
    most = steps[low if base.step_s / low > high / base.step_s else high]
    gains = [end.speedups[base.first] for _, end in ends if base.first in end.speedups]
    lost = bool(gains) and base.first != ledger.baseline and min(gains) < 1 + MATTERS < base.speedups[base.first]
    if most is None or not (lost or max(high / base.step_s, base.step_s / low) > LOUD):
        return ""
    gain = f", and the gain of {base.first} from {number(min(gains))} to {number(max(gains))} times" if lost else ""
    return (
        f"What is assumed takes the step of {number(base.step_s, 1)} s from {number(low, 1)} to {number(high, 1)} s"
        f"{gain}; most by itself: {most.name} (taken: {most.taken})"
    )


def ledgers(manifest: Mapping[str, Any]) -> Iterator[tuple[str, LedgerRecord]]:
    """The ledgers of a manifest by case; none of results of earlier versions."""
    for case, record in manifest.get("ledger", {}).items():
        yield case, LedgerRecord.model_validate(record)


# ---- which rows of the table hold -----------------------------------------------------------------------------------


GIVEN, ASSUMED, OWN = "given", "assumed", "rlsim's default"


class Assumption(Schema):
    """A row of the table, whose head says what its keys mean."""

    name: str
    of: str = ""
    when: str = "True"
    key: str
    range: tuple[Any, Any] | None = None
    times: tuple[float, float] | None = None
    taken: str = ""
    why: str


@cache
def table() -> tuple[Assumption, ...]:
    """What may be assumed."""
    return TypeAdapter(tuple[Assumption, ...]).validate_python(shipped("assumptions.yaml"))


# ---- whose values these are -----------------------------------------------------------------------------------------


def source_of(experiment: Experiment, key: str) -> str:
    """Whose the value of a key is: `given`, `assumed`, a framework's default, or rlsim's own, which is assumed too."""
    listed = ((len(one), name == GIVEN, name) for name, keys in experiment.sources.items() for one in keys
              if f"{key}.".startswith(f"{one}."))  # fmt: skip
    if found := max(listed, default=None):
        return found[2]
    here: Any = experiment
    for part in key.split("."):
        if part not in getattr(here, "model_fields_set", ()):
            return OWN
        here = getattr(here, part)
    return GIVEN


# ---- what holds in a run --------------------------------------------------------------------------------------------


#: What the names of a rollout engine's kernels begin with.
_ATTENTION = ("decode", "prefill", "latent")
_KERNELS = ("gemm", "experts", "memory_bound", *_ATTENTION)


def facts_of(loaded: LoadedExperiment, lookups: Lookups) -> dict[str, Any]:
    """What the conditions and texts of the table ask about a run, by name."""
    experiment, cluster, calibration = loaded.experiment, loaded.cluster, next(iter(loaded.calibrations.values()))
    layers = [layer for model in (*loaded.models.values(), loaded.model) for layer in model.groups]
    frame, reward, counts = loaded.trace.frame, experiment.workflow.reward, lookups.counts
    wholly = (name for name in lookups.examples if counts[name]["extrapolated"] == counts[name].total())
    outside = sorted(name for name in wholly if name.startswith(_KERNELS))  # none of whose shapes was measured
    links = [one.inter for one in (cluster.groups if isinstance(cluster, MixedCluster) else (cluster,)) if one.inter]
    cells = frame["turns"].tolist() if "turns" in frame else []
    without_time, tool_s = unrecorded(cells, experiment.environment.default_tool_s)[:2]  # share of tool calls, seconds
    known, drafts, eager = loaded.trace.meta.known_tokens or 0, loaded.drafts, calibration.eager
    return {
        "loaded": loaded,
        "trace": experiment.trace,
        "training": experiment.training,
        "engine": experiment.engine,
        "reward": reward,
        "cluster": cluster,
        "calibration": calibration,
        "known": calibration.known(loaded.model),
        "whole": ITERATIONS in counts and not any(name.startswith(_ATTENTION) for name in counts),
        "shipped": calibration.name in calibration_names(),
        "columns": set(frame.columns),
        "rewarded": any(call.kind == "reward" for call in loaded.algorithm.calls),
        "experts": any(isinstance(layer.mlp, Experts) for layer in layers),
        "mxfp4": loaded.model.of_experts == "mxfp4",
        "blackwell": calibration.reference.fp4_flop_per_s is not None,
        "recurrent": any(isinstance(layer.attention, Recurrent) for layer in layers),
        "skew_assumed": any("skew" in note and "not measured" in note for note in calibration.provenance.notes),
        "prompts": float(frame["prompt_tokens"].mean()) if "prompt_tokens" in frame else 0.0,
        "check": seconds_text(reward.time_per_response),
        "carried": known if source_of(experiment, "trace.path") == GIVEN else 0,
        "beyond": float((loaded.trace.response_tokens > known).mean()),
        "unrecorded": without_time,
        "tool_s": tool_s,
        "workers": f"{reward.workers} worker{'s' * (reward.workers > 1)}",
        "speculation": drafts and drafts.speculation,
        "yielded": drafts.speculation.yielded(drafts.speculation.num_speculative_tokens) if drafts else 1.0,
        "launches": f"{eager.layer_s * 1e3:.3g} ms a layer, {2 * eager.collective_s * 1e3:.3g} ms more under TP",
        "host_us": calibration.host.in_rollouts.sequence_s * 1e6,
        "host_source": one_line(calibration.host.in_rollouts.source),
        "outside": ", ".join(outside),
        "examples": "; ".join(f"{name} ({lookups.examples[name]})" for name in outside),
        "network": links[0].bytes_per_s / 1e9 if links else 0.0,
        "network_of": f"for {links[0].shared_by_gpus} GPUs" if links and links[0].shared_by_gpus > 1 else "a GPU",
        "link": cluster.intra.bytes_per_s / 1e9 if isinstance(cluster, Cluster) else 0.0,
        "cpu_rate": experiment.training.cpu_optimizer_rate / 1e9,
    }


def ledger_of(loaded: LoadedExperiment, lookups: Lookups) -> LedgerRecord:
    """What a case rests on; `lookups` are the shapes whose costs its runs asked for."""
    facts, experiment = facts_of(loaded, lookups), loaded.experiment
    held = [row for row in table() if source_of(experiment, row.of or row.key) in (ASSUMED, OWN)]
    assumed = [_record(row, experiment, facts) for row in held if holds(row.when, facts)]
    defaults = {name: list(keys) for name, keys in experiment.sources.items() if name not in (GIVEN, ASSUMED)}
    measured = [
        f"{one.name}: {', '.join(source.project for source in one.provenance.sources)}"
        for one in loaded.calibrations.values()
    ]
    return LedgerRecord(assumed=[row for row in assumed if row.ends], defaults=defaults, measured=measured)


def _record(row: Assumption, experiment: Experiment, facts: Mapping[str, Any]) -> AssumedRecord:
    value = attrgetter(row.key)(experiment)
    if row.times is not None:
        whole = isinstance(value, int)
        ends = [(max(round(value * one), 1) if whole else value * one, f"× {one:g}") for one in row.times]
    else:
        ends = [(value if one == "same" else one, str(one)) for one in row.range or ()]
    return AssumedRecord(
        name=row.name,
        key=row.key,
        taken=text_of(row.taken, facts) if row.taken else _text(value, row.key),
        why=text_of(row.why, facts),
        ends=[EndRecord(settings={row.key: one}, shown=shown) for one, shown in ends],
    )


def seconds_text(value: float) -> str:
    """A short time in the unit that suits it."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if value >= size), ("us", 1e-6))
    return f"{value / size:g} {unit}"


def _text(value: Any, key: str) -> str:
    if isinstance(value, float):
        return seconds_text(value) if key.endswith(("per_token", "per_response", "per_sequence")) else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

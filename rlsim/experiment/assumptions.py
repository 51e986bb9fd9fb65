"""Which of the table's assumptions hold in a run: what nobody gave and nothing measured.

Every value of an experiment is *given*, *a framework's default* (its release named), *measured* (the calibration) or
*assumed*. What may be assumed is a table, `rlsim/data/assumptions.yaml`; `ledger_of` says which of its rows hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, model_validator

from rlsim.cost.calibration import calibration_names
from rlsim.cost.lookups import Lookups
from rlsim.errors import one_line
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.ledger import AssumedRecord, EndRecord, LedgerRecord
from rlsim.experiment.refusals import holds
from rlsim.experiment.schema import Experiment
from rlsim.hardware import MixedCluster
from rlsim.layers import Experts, Recurrent
from rlsim.reading import read_yaml
from rlsim.schema import Schema

TABLE = Path(__file__).resolve().parents[1] / "data" / "assumptions.yaml"
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

    @model_validator(mode="after")
    def _ends(self) -> Assumption:
        if (self.range is None) == (self.times is None):
            raise ValueError("give either range or times")
        return self


@cache
def table() -> tuple[Assumption, ...]:
    """What may be assumed."""
    return TypeAdapter(tuple[Assumption, ...]).validate_python(read_yaml(TABLE))


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


def value_at(experiment: Experiment, key: str) -> Any:
    """The value of a dotted key."""
    return attrgetter(key)(experiment)


# ---- what holds in a run --------------------------------------------------------------------------------------------


#: What the names of a rollout engine's kernels begin with.
_KERNELS = ("gemm", "experts", "memory_bound", "decode", "prefill", "latent")


def facts_of(loaded: LoadedExperiment, lookups: Lookups) -> dict[str, Any]:
    """What the conditions and texts of the table ask about a run, by name."""
    experiment, cluster, calibration = loaded.experiment, loaded.cluster, next(iter(loaded.calibrations.values()))
    layers = [layer for model in (*loaded.models.values(), loaded.model) for layer in model.groups]
    frame, reward, counts = loaded.trace.frame, experiment.workflow.reward, lookups.counts
    wholly = (name for name in lookups.examples if counts[name]["extrapolated"] == counts[name].total())
    outside = sorted(name for name in wholly if name.startswith(_KERNELS))  # none of whose shapes was measured
    links = [one.inter for one in (cluster.groups if isinstance(cluster, MixedCluster) else (cluster,)) if one.inter]
    return {
        "loaded": loaded,
        "trace": experiment.trace,
        "training": experiment.training,
        "reward": reward,
        "cluster": cluster,
        "calibration": calibration,
        "shipped": calibration.name in calibration_names(),
        "columns": set(frame.columns),
        "rewarded": any(call.kind == "reward" for call in loaded.algorithm.calls),
        "experts": any(isinstance(layer.mlp, Experts) for layer in layers),
        "recurrent": any(isinstance(layer.attention, Recurrent) for layer in layers),
        "skew_derived": any("skew" in note and "derived" in note for note in calibration.provenance.notes),
        "prompts": float(frame["prompt_tokens"].mean()) if "prompt_tokens" in frame else 0.0,
        "check": seconds_text(reward.time_per_response),
        "workers": f"{reward.workers} worker{'s' * (reward.workers > 1)}",
        "host_us": calibration.host.sequence_s * 1e6,
        "host_source": one_line(calibration.host.source),
        "outside": ", ".join(outside),
        "examples": "; ".join(f"{name} ({lookups.examples[name]})" for name in outside),
        "network": links[0].bytes_per_s / 1e9 if links else 0.0,
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
    value = value_at(experiment, row.key)
    if row.times is not None:
        whole = isinstance(value, int)
        ends = [(max(round(value * one), 1) if whole else value * one, f"× {one:g}") for one in row.times]
    else:
        ends = [(value if one == "same" else one, str(one)) for one in row.range or ()]
    return AssumedRecord(
        name=row.name,
        key=row.key,
        taken=row.taken.format(**facts) if row.taken else _text(value, row.key),
        why=row.why.format(**facts),
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

"""Which of the table's assumptions hold in a run: what nobody gave and nothing measured.

Every value of an experiment is *given*, *a framework's default* (its release named), *measured* (the calibration) or
*assumed*. What may be assumed is a table, `rlsim/data/assumptions.yaml`; `ledger_of` says which of its rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, model_validator

from rlsim.cost.calibration import calibration_names
from rlsim.cost.lookups import Lookups
from rlsim.errors import one_line
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.ledger import AssumedRecord, EndRecord, LedgerRecord
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
    when: str = "always"
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
    here: Any = experiment
    for part in key.split("."):
        here = getattr(here, part)
    return here


# ---- what holds in a run --------------------------------------------------------------------------------------------


#: What the names of a rollout engine's kernels begin with.
_KERNELS = ("gemm", "experts", "memory_bound", "decode", "prefill", "latent")


class _Facts:
    """What the conditions and texts of the table ask about a run."""

    def __init__(self, loaded: LoadedExperiment, lookups: Lookups) -> None:
        self.loaded, self.experiment, self.lookups = loaded, loaded.experiment, lookups
        self.reward = self.experiment.workflow.reward
        self.calibration = next(iter(loaded.calibrations.values()))
        self.layers = [layer for model in (*loaded.models.values(), loaded.model) for layer in model.groups]
        self.has_experts = any(isinstance(layer.mlp, Experts) for layer in self.layers)
        self.frame = loaded.trace.frame

    @property
    def unmeasured(self) -> list[str]:
        """Kernels of the rollout engine none of whose shapes was measured."""
        counts = self.lookups.counts
        wholly = [name for name in self.lookups.examples if counts[name]["extrapolated"] == counts[name].total()]
        return sorted(name for name in wholly if name.startswith(_KERNELS))

    @property
    def texts(self) -> dict[str, str]:
        """By name, for the texts of the table."""
        cluster, host = self.loaded.cluster, self.calibration.host
        links = [
            one.inter for one in (cluster.groups if isinstance(cluster, MixedCluster) else (cluster,)) if one.inter
        ]
        scored = self.reward
        prompts = self.frame["prompt_tokens"].mean() if "prompt_tokens" in self.frame else 0.0
        return {
            "trace": self.loaded.trace.meta.name,
            "mean": f"{self.loaded.mean_response_tokens:,.0f}",
            "prompts": f"{float(prompts):,.0f}",
            "check": seconds_text(scored.time_per_response),
            "workers": f"{scored.workers} worker{'s' * (scored.workers > 1)}",
            "host": f"{host.sequence_s * 1e6:g}",
            "host_source": one_line(host.source),
            "outside": ", ".join(self.unmeasured),
            "examples": "; ".join(f"{name} ({self.lookups.examples[name]})" for name in self.unmeasured),
            "skew": f"{self.calibration.skew:g}",
            "network": f"{links[0].bytes_per_s / 1e9:g}" if links else "",
        }


def _host_of_others(facts: _Facts) -> bool:
    """Whether the host time is that of other models, releases or GPUs; a calibration of your own run has its own."""
    source, calibration = facts.calibration.host.source, facts.calibration
    shipped = calibration.name in calibration_names()
    return "reused" in source or "not measured" in source or (shipped and facts.loaded.model.name not in source)


def _checked(facts: _Facts) -> bool:
    """Whether rewards are checks whose time the trace does not say."""
    timed = facts.reward.from_trace and {"reward_time_s", "test_run_s", "judge_tokens"} & set(facts.frame.columns)
    return not timed and any(call.kind == "reward" for call in facts.loaded.algorithm.calls)


#: When a row of the table bears on a run.
_WHEN: Mapping[str, Callable[[_Facts], bool]] = {
    "always": lambda facts: True,  # noqa: ARG005
    "replayed": lambda facts: facts.experiment.trace.path is not None,
    "has_prompts": lambda facts: "prompt_tokens" in facts.frame and facts.experiment.trace.path is not None,
    "no_prompts": lambda facts: "prompt_tokens" not in facts.frame,
    "by_tokens": lambda facts: facts.experiment.training.micro_batch_sequences is None,
    "checked": _checked,
    "host_of_others": _host_of_others,
    "recurrent": lambda facts: any(isinstance(layer.attention, Recurrent) for layer in facts.layers),
    "outside": lambda facts: bool(facts.unmeasured),
    "skew_derived": lambda facts: any(
        "skew" in note and "derived" in note for note in facts.calibration.provenance.notes
    ),
    "experts": lambda facts: facts.has_experts,
    "experts_trained_apart": lambda facts: facts.has_experts and facts.experiment.training.ep > 1,
    "fp8_trained": lambda facts: facts.experiment.training.precision != "bf16",
    "several_nodes": lambda facts: (
        facts.loaded.cluster.nodes > facts.loaded.cluster.domain_gpus // facts.loaded.cluster.gpus_per_node
    ),
    "offload": lambda facts: facts.experiment.training.offload,
}


def ledger_of(loaded: LoadedExperiment, lookups: Lookups) -> LedgerRecord:
    """What a case rests on; `lookups` are the shapes whose costs its runs asked for."""
    facts, experiment = _Facts(loaded, lookups), loaded.experiment
    held = [row for row in table() if source_of(experiment, row.of or row.key) in (ASSUMED, OWN)]
    texts = facts.texts
    assumed = [_record(row, experiment, texts) for row in held if _WHEN[row.when](facts)]
    defaults = {name: list(keys) for name, keys in experiment.sources.items() if name not in (GIVEN, ASSUMED)}
    measured = [
        f"{one.name}: {', '.join(source.project for source in one.provenance.sources)}"
        for one in loaded.calibrations.values()
    ]
    return LedgerRecord(assumed=[row for row in assumed if row.ends], defaults=defaults, measured=measured)


def _record(row: Assumption, experiment: Experiment, texts: Mapping[str, str]) -> AssumedRecord:
    value = value_at(experiment, row.key)
    if row.times is not None:
        whole = isinstance(value, int)
        ends = [(max(round(value * one), 1) if whole else value * one, f"× {one:g}") for one in row.times]
    else:
        ends = [(value if one == "same" else one, str(one)) for one in row.range or ()]
    return AssumedRecord(
        name=row.name,
        key=row.key,
        taken=row.taken.format(**texts) if row.taken else _text(value, row.key),
        why=row.why.format(**texts),
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

"""What the manifest of some results must hold for the commands that read it. docs/results.md says what it means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from rlsim.experiment.ledger import LedgerRecord
from rlsim.records import Record

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]


class SourceRecord(Record):
    """Measurements that a calibration was fitted to."""

    project: str
    commit: str = ""


class ProvenanceRecord(Record):
    """Where a calibration comes from."""

    date: str = ""
    sources: list[SourceRecord] = Field(default=[])
    notes: list[str] = Field(default=[])


class ResidualRecord(Record):
    """Errors of a fit on shapes that it has not seen."""

    count: Count
    median: float
    p90: float
    bias: float
    note: str = ""


class CalibrationRecord(Record):
    """A calibration of a case."""

    name: str
    gpu: str
    engine: str
    provenance: ProvenanceRecord
    residuals: dict[str, ResidualRecord]


class SetupRecord(Record):
    """What a case ran on."""

    cluster: str
    gpus: Positive
    gpus_per_node: Positive
    model: str
    cap_tokens: Positive
    batch: Positive
    responses: Positive | None = None  # of a prompt; only summaries need it
    calibration: CalibrationRecord | list[CalibrationRecord]  # a list of several kinds of GPU

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "batch" not in data:
            raise ValueError("written by another version of rlsim (it has no key `batch`): run it again")
        return data


class WorkflowRecord(Record):
    """The size of a step."""

    algorithm: str
    prompts: Positive
    responses: Positive
    steps: Positive


class TraceRecord(Record):
    """The responses' lengths."""

    path: str | list[str] | None = None


class ExperimentRecord(Record):
    """The experiment, with its defaults."""

    name: str
    description: str = ""
    trace: TraceRecord
    workflow: WorkflowRecord
    cases: dict[str, dict[str, Any]] = Field(default={})


class LookupRecord(Record):
    """How many shapes an operator was asked for."""

    exact: Count
    interpolated: Count
    extrapolated: Count


class Manifest(Record):
    """The manifest. Keys that readers do without may be missing, as older versions of rlsim had fewer."""

    rlsim: str
    experiment: ExperimentRecord
    seeds: list[Count] = Field(min_length=1)
    baseline: str
    systems: dict[str, list[str]]
    tuned: dict[str, dict[str, str]]
    lookups: dict[str, dict[str, LookupRecord]]
    ledger: dict[str, LedgerRecord] = Field(default={})
    notes: list[str]
    hashes: dict[str, str]
    versions: dict[str, str]
    setups: dict[str, SetupRecord] = Field(default={})
    plans: dict[str, dict[str, Any]] = Field(default={})
    worlds: dict[str, dict[str, list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]]] = Field(default={})
    #: SHA-256 of every file beside the manifest, by name.
    files: dict[str, str] = Field(default={})

    @field_validator("hashes")
    @classmethod
    def _has_trace(cls, hashes: dict[str, str]) -> dict[str, str]:
        if "trace" not in hashes:
            raise ValueError("'trace' is missing")
        return hashes

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, str]) -> dict[str, str]:
        if any(name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name for name in files):
            raise ValueError("expected names of files beside the manifest")
        return files

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if not any(self.systems.values()):
            raise ValueError("systems: no case has any")
        for case in [case for case, names in self.systems.items() if names]:
            if self.setups and case not in self.setups:
                raise ValueError(f"setups: case {case!r} of systems is missing")
            if self.experiment.cases and case not in self.experiment.cases:
                raise ValueError(f"experiment.cases: case {case!r} of systems is missing")
            if not self.experiment.cases and case:
                raise ValueError(f"systems: the experiment has no case {case!r}")
        return self

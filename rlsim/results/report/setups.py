"""What each case ran on, and by which name its parts of the page are known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rlsim.errors import ConfigError
from rlsim.experiment.result import Result
from rlsim.results.report.page import Figure, figure


@dataclass(frozen=True)
class CaseSetup:
    """One case of an experiment: its name (empty if there are no cases), its id in the page, what it ran on."""

    case: str
    id: str  # appended to the ids of its charts; empty if there are no cases
    cluster: str
    gpus: int
    gpus_per_node: int
    model: str
    cap_tokens: int
    batch: int  # responses that a step is to train on
    calibrations: Sequence[Mapping[str, Any]]  # one for each kind of GPU

    def named(self, what: str) -> str:
        """A title that names the case, if there are cases."""
        return f"{what}: {self.case}" if self.case else what

    def figure(self, name: str, chart: Any, /, **known: Any) -> Figure:
        """The figure of that name, of this case."""
        made = figure(name, chart, **known)
        return replace(made, id=f"{name}-{self.id}" if self.id else name, title=self.named(made.title))


def case_setups(result: Result) -> list[CaseSetup]:
    """Every case in which something ran, in order. Raises `ConfigError` for results that do not say on what."""
    return setups_of([result.manifest])


def setups_of(manifests: Iterable[Mapping[str, Any]]) -> list[CaseSetup]:
    """The same of several results."""
    setups: list[CaseSetup] = []
    ids: set[str] = set()
    for manifest in manifests:
        if "setups" not in manifest:
            raise ConfigError(
                f"the results were written by another version of rlsim ({manifest.get('rlsim')}): run again"
            )
        for case, record in manifest["setups"].items():
            if manifest["systems"][case]:
                known = {field.name: record[field.name] for field in fields(CaseSetup) if field.name in record}
                known["calibrations"] = calibrations_of(record)
                setups.append(CaseSetup(case=case, id=unique_slug(case, ids), **known))
    return setups


def calibrations_of(setup: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calibrations in a case's part of a manifest, one for each kind of GPU."""
    found = setup["calibration"]
    return found if isinstance(found, list) else [found]


def unique_slug(text: str, taken: set[str]) -> str:
    """`text` as it may stand in a file name or an id, told apart from those in `taken`, to which it is added."""
    base = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or ("x" if text else "")
    slug, count = base, 2
    while slug in taken:
        slug, count = f"{base}-{count}", count + 1
    taken.add(slug)
    return slug

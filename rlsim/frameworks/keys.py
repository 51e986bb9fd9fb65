"""What is changed for a system, in the words of the framework that a configuration came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlsim.experiment.systems import PartSpec, SystemSpec
from rlsim.frameworks.mapping import keys_of
from rlsim.policies.registry import load_policy

#: The table of each framework, by the name that experiments have for it.
FRAMEWORKS = {"veRL": "verl", "NeMo-RL": "nemo", "AReaL": "areal"}


@dataclass(frozen=True)
class Keys:
    """The keys of one framework, or of none: then an experiment is changed in rlsim's own words.

    Generation runs under `engine` on `gpus` GPUs, or on those that a system has for it; its replicas have `pp` pipeline
    stages, and `per_tp` GPUs for each of their TP.
    """

    framework: str
    engine: str
    gpus: int
    pp: int = 1
    per_tp: int = 1

    def changes(self, before: SystemSpec, after: SystemSpec) -> tuple[str, ...] | None:
        """What makes the one system the other: `key=value` lines; None if the framework has no keys for it.

        Without a framework it is a line of `systems`. A TP that is to be tuned (`best`) has none: give what it came
        out as.
        """
        if not self.framework:
            return (line_of(after),)
        rows = keys_of(FRAMEWORKS[self.framework], self.engine)
        old, new = ({part.policy: _complete(part) for part in spec.parts} for spec in (before, after))
        given = {part.policy: part.parameters for spec in (before, after) for part in spec.parts}
        lines = []
        for policy in {**old, **new}:
            if policy in old and policy in new:
                values = {
                    f"{policy}.{name}": new[policy].get(name)
                    for name in {**old[policy], **new[policy]}
                    if old[policy].get(name) != new[policy].get(name)
                }
            elif given[policy]:
                return None  # no switch has parameters
            else:
                values = {policy: policy in new}
            for ours, value in values.items():
                name = ours if ours in rows else ours.rpartition(".")[2]
                if name not in rows or value is None or isinstance(value, str):
                    return None
                key, written = rows[name]
                said = self._written(written, value, new.get(policy, {}), is_tp=name == "tp")
                lines.append(f"{key}={said}")
        return tuple(lines)

    def _written(self, text: str, value: Any, parameters: Mapping[str, Any], *, is_tp: bool) -> str:
        own = parameters.get("rollout_gpus") or self.gpus
        replicas = (own if isinstance(own, int) else math.prod(own)) // value if is_tp else 0
        value = value // self.per_tp if is_tp else value
        return text.format(value=value, engine=self.engine, replicas=replicas, pp=self.pp)


def _complete(part: PartSpec) -> dict[str, Any]:
    """All parameters of a part, with their defaults."""
    kind = load_policy(part.policy)
    defaults = kind.model_fields if issubclass(kind, BaseModel) else {}
    return {**{name: field.default for name, field in defaults.items()}, **part.parameters}


def line_of(spec: SystemSpec) -> str:
    """A system as a line of `systems` of an experiment."""
    parts = [
        f"{part.policy}: {{{', '.join(f'{key}: {_text(value)}' for key, value in part.parameters.items())}}}"
        if part.parameters
        else part.policy
        for part in spec.parts
    ]
    if len(parts) == 1:
        return f"- {parts[0]}"
    return f"- use: [{', '.join(f'{{{part}}}' if ': ' in part else part for part in parts)}]"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)

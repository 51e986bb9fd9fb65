"""The `systems` of an experiment: names, parts, and the variants that lists of values make.

- pat                              a part as it is
- verl: {tp: [1, 2, 4, 8, best]}   one system per value: verl-tp1, …, verl-best
- name: mine                       parts that work together under a name of their own
  use: [pat, {tail_batching: {eta: 1.25}}, stream]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rlsim.base.refusals import refuse
from rlsim.base.schema import located, name_of, placed, validate
from rlsim.base.usercode import blamed
from rlsim.errors import ConfigError, about, shown
from rlsim.policies.parts import ChunkStreaming, Composition, JudgePlacement, Part, Placing, Rewiring, flattened
from rlsim.policies.registry import load_policy
from rlsim.sim.batching import Batching, Batchings
from rlsim.sim.control import PLANNED, ControlContext, Controls, RolloutControl, asked
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import Workflow


@dataclass(frozen=True, eq=False)
class PartSpec:
    """A part by name and parameters. `make` gives a fresh one: parts may keep state during a run."""

    policy: str
    parameters: Mapping[str, Any]

    def make(self, label: str) -> Part:
        """A new part; raises `ConfigError` if it does not take these parameters."""
        kind = load_policy(self.policy)
        refuse("part", shown=label, kind=kind, senseless=self.parameters and not issubclass(kind, BaseModel))
        with blamed(label, kind):
            return validate(dict(self.parameters), kind, source=label) if issubclass(kind, BaseModel) else kind()

    @property
    def key(self) -> str:
        """Parts with the same key behave the same."""
        return f"{self.policy} {sorted(self.parameters.items())}"


#: Systems of an experiment, the variants that lists make included.
MOST_SYSTEMS = 1000

#: What decides the layout where no part of a system does: the tuned static one.
DEFAULT_LAYOUT = PartSpec("verl", {})


@dataclass(frozen=True, eq=False)
class SystemSpec:
    """One system to run, as the parts it is made of."""

    name: str
    parts: tuple[PartSpec, ...]
    variant: bool = False  # one of several values that a list gave
    shown: str = ""  # for messages: file, line and name

    @property
    def key(self) -> str:
        """Systems with the same key behave the same."""
        return " + ".join(part.key for part in self.parts)

    @property
    def entry(self) -> dict[str, Any]:
        """The system as an experiment spells it."""
        return {"name": self.name, "use": [{part.policy: dict(part.parameters)} for part in self.parts]}

    def make(self) -> System:
        """A new system; raises `ConfigError` if a part does not take its parameters or the parts do not go together."""
        with blamed(self.shown):
            return System.of([part.make(self.shown) for part in self.parts], self.shown)

    def alternatives(self, context: ControlContext) -> Iterator[tuple[SystemSpec, str]]:
        """The systems that a tuned one stands for, each with what it chose; itself if nothing is to be tuned."""
        choices: list[list[tuple[PartSpec, Mapping[str, object]]]] = []
        for part in self.parts:
            made = part.make(self.shown)
            with blamed(self.shown):
                tried = list(made.alternatives(context)) if isinstance(made, RolloutControl | Composition) else []
            found = [(replace(part, parameters={**part.parameters, **choice}), choice) for choice in tried]
            choices.append([*found] or [(part, {})])
        for combination in itertools.product(*choices):
            chosen = ", ".join(f"{key} {value}" for _, choice in combination for key, value in choice.items())
            yield replace(self, parts=tuple(part for part, _ in combination)), chosen


def parse_systems(entries: Sequence[Any], source: str = "") -> tuple[SystemSpec, ...]:
    """All systems that these YAML entries stand for, `source` being their file.

    Raises `ConfigError` for unreadable ones or a name used twice, `CatalogueError` for an unknown policy.
    """
    specs = list(itertools.islice((spec for entry in entries for spec in _parse(entry, source)), MOST_SYSTEMS + 1))
    refuse("many systems", source=source, count=len(specs), most=MOST_SYSTEMS)
    for spec in specs:
        spec.make()  # what is wrong is found before anything runs
    names = [spec.name for spec in specs]
    refuse("systems", again=[spec.shown for spec in specs if names.count(spec.name) > 1])
    return tuple(specs)


def _parse(entry: Any, source: str) -> Iterator[SystemSpec]:
    where = located(source, entry)
    if isinstance(entry, Mapping) and "use" in entry:
        used, given = entry["use"], sorted(map(str, entry))
        listed = used if isinstance(used, Sequence) and not isinstance(used, str) else [used]
        refuse("system with parts", shown=where, given=given, name=entry.get("name"), listed=listed)
        found = [list(_parse_part(part, source)) for part in placed(listed)]
        base = str(entry["name"])
    else:
        found, base = [list(_parse_part(entry, source))], ""
    for variants in itertools.product(*found):
        name = (base or variants[0][0]) + "".join(suffix for _, suffix, _ in variants)
        try:
            told = f"{where}: system {name_of(name)!r}"
        except ValueError as error:
            raise ConfigError(f"{where}: systems: {error}") from None
        parts = tuple(part for _, _, part in variants)
        named = [part.policy for part in parts]
        refuse("parts of a system", shown=told, again=[policy for policy in named if named.count(policy) > 1])
        variant = any(suffix for _, suffix, _ in variants)
        with blamed(told):
            lays_out = any(map(is_layout, [*flattened(part.make(told) for part in parts)]))
        yield SystemSpec(name, parts if lays_out else (*parts, DEFAULT_LAYOUT), variant, told)


def _parse_part(entry: Any, source: str) -> Iterator[tuple[str, str, PartSpec]]:
    """Each part that an entry stands for: its label, the suffix that names the variant, and itself."""
    where = located(source, entry)
    parameters: Mapping[str, Any] = {}
    if isinstance(entry, str):
        policy = str(entry)
    elif isinstance(entry, Mapping) and len(entry) == 1:
        ((policy, parameters),) = entry.items()
        policy, parameters = str(policy), {} if parameters is None else parameters
        mapping = isinstance(parameters, Mapping)
        refuse("parameters", shown=where, policy=policy, mapping=mapping, got=shown(parameters))
    else:
        raise ConfigError(f"{where}: systems: expected a policy's name, or one with parameters, got {shown(entry)}")
    with about(where):
        kind = load_policy(policy)
    label = policy.rpartition(":")[2].lower() if ":" in policy else policy
    axes = [
        key for key, value in parameters.items() if isinstance(value, Sequence) and not _takes_list(kind, key, value)
    ]
    counts = {key: len(parameters[key]) for key in axes}
    empty, count = next((key for key in axes if not counts[key]), ""), math.prod(counts.values())
    refuse("variants", shown=where, policy=policy, empty=empty, count=count, most=MOST_SYSTEMS)
    for values in itertools.product(*(parameters[key] for key in axes)):
        chosen = dict(zip(axes, values, strict=True))
        suffix = "".join(f"-{_label(key, value)}" for key, value in chosen.items())
        yield label, suffix, PartSpec(policy, {**parameters, **chosen})


def _takes_list(kind: type, key: str, value: Any) -> bool:
    """Whether a parameter is itself a list, so that a list is one value of it."""
    if isinstance(value, str) or not issubclass(kind, BaseModel) or key not in kind.model_fields:
        return True
    field = kind.model_fields[key]
    if _holds_sequence(field.annotation):
        return True
    try:
        kind_of_value: Any = Annotated[field.annotation, "value", *field.metadata]
        TypeAdapter(kind_of_value).validate_python(value)
    except (PydanticUserError, ValidationError):
        return False
    return True


def _holds_sequence(annotation: Any) -> bool:
    """Whether values of a type may be lists: itself a collection, or one of the alternatives of a union."""
    annotation = getattr(annotation, "__value__", annotation)  # `type X = …`
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return any(map(_holds_sequence, get_args(annotation)))
    if origin is Annotated:
        return _holds_sequence(get_args(annotation)[0])
    kind = origin or annotation
    return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, str | bytes | Mapping)


def _label(key: str, value: Any) -> str:
    """How a variant's value shows in its name: `best` as it is, a number after what it counts (`tp2`)."""
    return str(value) if isinstance(value, str) else f"{key.rpartition('_')[2]}{value}"


# ---- the parts that one run is made of, each in its place -----------------------------------------------------------


def is_layout(part: object) -> bool:
    """Whether the part says which layout a rollout starts with."""
    return isinstance(part, RolloutControl) and type(part).initial_tp is not RolloutControl.initial_tp


@dataclass(frozen=True, eq=False)
class System:
    """The decisions of one system. Make one with `of`."""

    layout: RolloutControl
    control: RolloutControl  # the layout's and all others' together
    batching: Batching
    reward: RewardControl
    rewirings: tuple[Rewiring, ...]
    judge: JudgePlacement | None  # None: GPUs are kept for it
    placing: Placing | None  # None: all calls share all GPUs
    streaming: ChunkStreaming | None = None  # None: nothing is handed over by the chunk

    @classmethod
    def of(cls, parts: Iterable[Part], label: str = "") -> System:
        """The system of these parts; raises `ConfigError` if two of them decide the same thing, or none the layout."""
        every = list(flattened(parts))
        layouts = [part for part in every if is_layout(part)]
        kinds = RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Placing, ChunkStreaming
        found: list[list[Any]] = [[part for part in every if isinstance(part, kind)] for kind in kinds]
        controls, batchings, rewards, rewirings, judges, placings, streams = found
        launching = [part for part in batchings if part.launches_its_own]
        single = {"what to launch": launching, "timeouts": rewards, "where the judge runs": judges}
        single |= {"where the calls run": placings, "the chunks of responses": streams}
        several = next((what for what, deciding in single.items() if len(deciding) > 1), "")
        batchings.sort(key=lambda part: part not in launching)
        names = {"layouts": layouts, "both": single.get(several, ()), "ending": batchings[:1]}
        names["deciding"] = [part for part in batchings if part.needs_rewards]
        shown = {name: " and ".join(type(part).__name__ for part in parts) for name, parts in names.items()}
        early = any(part.ends_early for part in batchings[:1])
        refuse("system", shown=label, count=len(layouts), several=several, early=early, **shown)
        return cls(
            controls[controls.index(layouts[0])],
            controls[0] if len(controls) == 1 else Controls(controls),
            batchings[0] if len(batchings) == 1 else Batchings(batchings) if batchings else Batching(),
            rewards[0] if rewards else RewardControl(),
            tuple(rewirings),
            *(next(iter(parts), None) for parts in (judges, placings, streams)),
        )

    def initial_tp(self, context: ControlContext) -> int:
        """GPUs of a replica at the start of the run.

        Raises `ConfigError` if the plan says that too, and the layout contradicts it or would change it later;
        `CapacityError` if the model does not fit.
        """
        changes = asked(self.layout, "on_finish", "on_timer", "next_tp")
        if changes and context.replica_gpus is not None:
            name = type(self.layout).__name__
            raise ConfigError(f"{PLANNED.format(context.replica_gpus)}; {name} changes that while it runs")
        tp = self.layout.initial_tp(context)
        with about(f"{type(self.layout).__name__}.initial_tp"):
            return context.check_tp(tp)

    def rewired(self, workflow: Workflow) -> Workflow:
        for part in self.rewirings:
            workflow = part.rewired(workflow)
        return workflow

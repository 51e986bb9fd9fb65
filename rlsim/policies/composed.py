"""Published systems that are parts under one name: rows of `rlsim/data/compositions.yaml`, each a class."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from types import new_class
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.fields import FieldInfo

from rlsim.base.catalogue import DATA
from rlsim.base.reading import plain, read_yaml
from rlsim.base.reference import meaning_of
from rlsim.base.refusals import holds, worth
from rlsim.base.schema import Schema
from rlsim.policies.parts import Composition, Part
from rlsim.policies.registry import load_policy
from rlsim.sim.control import ControlContext, RolloutControl

ROWS: Mapping[str, Mapping[str, Any]] = plain(read_yaml(DATA / "compositions.yaml"))


class Composed(Schema, Composition):
    """The parts of a row, each with those parameters of the system that are its own."""

    row: ClassVar[Mapping[str, Any]] = {}
    #: By part and its parameter: the system's.
    names: ClassVar[Mapping[tuple[str, str], str]] = {}

    def _made(self) -> Iterator[tuple[str, Part]]:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        for one in self.row["parts"]:
            part = dict(one) if isinstance(one, Mapping) else {one: {}}
            if holds(part.pop("if", "True"), values):
                ((name, given),) = part.items()
                own = {key: values[of] for (whose, key), of in self.names.items() if whose == name}
                for key, value in given.items():
                    own[key] = worth(value[1:], values) if isinstance(value, str) and value[:1] == "=" else value
                yield name, load_policy(name)(**own)

    def parts(self) -> Sequence[Part]:
        return [part for _, part in self._made()]

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """Those of all parts, in every combination."""
        choices = []
        for name, part in self._made():
            tried = part.alternatives(context) if isinstance(part, RolloutControl | Composition) else ()
            own = [{self.names[name, key]: value for key, value in one.items()} for one in tried]
            choices += [own] if own else []
        return [dict(ChainMap(*reversed(one))) for one in product(*choices)] if choices else ()


def __getattr__(name: str) -> type[Composed]:
    if name not in ROWS:
        raise AttributeError(name)
    return composed(name)


@cache
def composed(name: str) -> type[Composed]:
    """The class of a row."""
    row, names = ROWS[name], dict[tuple[str, str], str]()
    body: dict[str, Any] = {"__module__": __name__, "__doc__": row["about"], "__annotations__": {}}
    for key, told in row["keys"].items():
        said = told if isinstance(told, Mapping) else {"of": told}
        part, _, own = said.get("of", "").rpartition(".")
        kind: Any = load_policy(part) if part else None
        field: FieldInfo = kind.model_fields[own] if part else Field()
        if part:
            names[part, own] = key
        about = Field(description=said.get("meaning") or meaning_of(kind, own))
        body["__annotations__"][key] = Annotated[field.annotation or bool, about, *field.metadata]
        body[key] = said.get("default", field.default)
    body |= {"row": row, "names": names}
    return new_class(name, (Composed,), {}, lambda namespace: namespace.update(body))

"""A bound of staleness, as `--max-staleness` has it: `mean:1`, `p95:2`, `max:1`; a plain number is one of `max`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from rlsim.errors import ConfigError, unknown_name

#: Of what a bound may be: the mean of the responses trained on, 95% of them, or each.
KINDS = ("mean", "p95", "max")


class Bound(NamedTuple):
    """So many updates of staleness at most."""

    kind: str
    most: float

    @classmethod
    def of(cls, given: str) -> Bound:
        """Raises `ConfigError` for what is no bound."""
        kind, colon, number = given.partition(":")
        kind, number = (kind, number) if colon else ("max", kind)
        if kind not in KINDS:
            raise unknown_name("kind of staleness bound", kind, KINDS)
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if not 0 <= most < math.inf:
            raise ConfigError(f"max_staleness: expected updates, 0 or more, got {given!r} (or mean:1, p95:2, max:1)")
        return cls(kind, most)

    def kept(self, means: Mapping[str, float]) -> bool:
        """Whether a run kept it, by its means; to a tenth of an update."""
        return round(means.get(f"staleness_{self.kind}", 0.0), 1) <= self.most

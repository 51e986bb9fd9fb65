"""What a plan is made of: the options of every call, what calls wait for, and costs between the options of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlsim.errors import ConfigError
from rlsim.workflow.search.scheduling import Bools, Floats, Ints

# f(source_indices, target_indices) of two calls' options, of any shapes that broadcast -> an array of that shape.
OfPair = Callable[[Ints, Ints], npt.ArrayLike]


@dataclass(frozen=True, eq=False)
class Options:
    """Where and how one call may run: equally long 1-D arrays, one entry per option.

    An option's mesh is the GPUs `first_gpu` to `first_gpu + gpus - 1`. `time_s` > 0: duration without data transfers.
    `resident_bytes`: kept on each GPU of the mesh during the whole iteration (optimizer states, parameters that stay).
    `active_bytes`: needed besides on each GPU while the call runs. Raises `ConfigError` for arrays of different
    lengths, empty ones, and values that are missing (NaN), infinite or out of range.
    """

    call: str
    first_gpu: Ints
    gpus: Ints
    time_s: Floats
    resident_bytes: Floats
    active_bytes: Floats

    def __post_init__(self) -> None:
        for name in ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes"):
            values = np.asarray(getattr(self, name))
            if values.ndim != 1 or len(values) != len(self.time_s):
                raise ConfigError(f"options of {self.call}: {name} must be one value per option")
            if len(values) == 0:
                raise ConfigError(f"the call {self.call} has no option")
            bad = ~np.isfinite(values) | (values < 0) | ((values == 0) & (name in ("gpus", "time_s")))
            if bad.any():
                at = int(bad.argmax())
                raise ConfigError(f"option {at} of {self.call}: {name} is {values[at]}")
            if name in ("first_gpu", "gpus"):
                if (values != np.floor(values)).any():
                    raise ConfigError(f"options of {self.call}: {name} must be whole numbers")
                object.__setattr__(self, name, values.astype(np.int64))
            else:
                object.__setattr__(self, name, values.astype(np.float64))

    def __len__(self) -> int:
        return len(self.time_s)

    @cached_property
    def by_time(self) -> Ints:
        """All indices, fastest first, equal ones in their order."""
        return np.argsort(self.time_s, kind="stable")


@dataclass(frozen=True)
class Dependency:
    """`target` of iteration k needs what `source` of iteration k - `lag` produces.

    `seconds`: transfer of the data, by option of source and target. The target receives while it holds its mesh, so it
    lengthens the target, by the sum over its inputs; in the first `lag` iterations too, so that all are alike.
    """

    source: str
    target: str
    lag: int = 0
    seconds: OfPair | None = None


@dataclass(frozen=True)
class Reallocation:
    """Parameters that `source` (train) updates go to `target` (generate or inference of the same model).

    A node of its own before `target` of iteration k: ready when `source` of iteration k - 1 is done (at 0 for k = 0),
    it holds both meshes alone for `seconds`. Zero seconds: no node, but `target` still waits for `source`.
    `resident_bytes`: what the target's copy keeps on each GPU of the target's mesh over the whole iteration.

    With a `lag` above 1 the target runs ahead: its iteration k + 1 has the parameters of `source` in iteration
    k + 1 - `lag`, no newer ones. So they go out between the target's iterations k and k + 1, and calls that need what
    the target makes in iteration k begin after that (docs/engine.md, "Exact lags").
    """

    source: str
    target: str
    seconds: OfPair
    resident_bytes: OfPair | None = None
    lag: int = 1


@dataclass(frozen=True)
class PairCost:
    """A cost between the options of two calls: the seconds of a transfer or reallocation, or the bytes of a copy."""

    kind: str
    unit: str
    source: int  # place of the call in a plan
    target: int
    names: tuple[str, str]
    cost: OfPair

    def of(self, source: Ints, target: Ints) -> Floats:
        """The cost of options of the two calls, indices that broadcast to the shape of what is returned.

        Raises `ConfigError` where it is missing (NaN), infinite or negative.
        """
        source, target = np.broadcast_arrays(source, target)
        values = np.broadcast_to(np.asarray(self.cost(source, target), dtype=float), source.shape)
        if not (values.min(initial=0.0) >= 0 and values.max(initial=0.0) < np.inf):  # NaN fails both comparisons
            at = np.unravel_index(int((~(values >= 0) | np.isinf(values)).argmax()), values.shape)
            raise ConfigError(
                f"the {self.kind} {self.names[0]} -> {self.names[1]} has no valid cost between options "
                f"{source[at]} and {target[at]}: {values[at]} {self.unit}"
            )
        return values


@dataclass(frozen=True)
class Meshes:
    """GPUs of each call in each plan: `first` to `last` - 1, both (n, C)."""

    first: Ints
    last: Ints

    @cached_property
    def covers(self) -> Bools:
        """(n, C, C): whether call j's mesh holds the first GPU of call i's mesh, at [., i, j].

        Sums over intervals that hold a GPU are largest at some interval's first GPU, so no other need be looked at.
        """
        points = self.first[:, :, None]
        return (self.first[:, None, :] <= points) & (points < self.last[:, None, :])

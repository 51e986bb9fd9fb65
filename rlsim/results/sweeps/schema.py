"""What a sweep file may say: blocks of axes, and the settings of every point that they come to."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from rlsim.base.schema import Name, Schema, located
from rlsim.errors import ConfigError
from rlsim.units import Tokens

Bounds = tuple[float, float]


class Distribution(Schema):
    """What a key of a random block is drawn from."""

    uniform: Bounds | None = None
    loguniform: Bounds | None = None
    whole: tuple[Tokens, Tokens] | None = Field(default=None, alias="int")
    choice: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None


class RandomBlock(Schema):
    """Points drawn at random. The first points of a longer block are those of a shorter one."""

    points: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0)
    keys: dict[str, Distribution] = Field(min_length=1)


class Block(Schema):
    """One block of axes: grid, zip, list or random."""

    grid: dict[str, Any] | None = None
    zipped: dict[str, Any] | None = Field(default=None, alias="zip")
    listed: tuple[Any, ...] | None = Field(default=None, alias="list")
    random: RandomBlock | None = None


class SweepSpec(Schema):
    """One sweep file."""

    name: Name
    description: str = ""
    experiment: str | dict[str, Any]
    set: dict[str, Any] = Field(default={})
    axes: tuple[Block, ...] = ()

    @field_validator("axes", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError("expected a list of blocks such as `- grid: {trace.cap: [4K, 8K]}`")
        return value


class Value(NamedTuple):
    """A value of a key, and where it was given (`sweep.yaml:7:12`)."""

    value: Any
    place: str


Settings = dict[str, Value]


def settings_of(blocks: Sequence[Block], source: str) -> list[Settings]:
    """The settings of every point, the last block changing fastest: every combination of the blocks' own.

    `source` is the file that the blocks are from. Raises `ConfigError` if two blocks set the same key.
    """
    each = [list(_settings(block, source)) for block in blocks]
    keys = [list(dict.fromkeys(key for settings in found for key in settings)) for found in each]
    for one, other in itertools.combinations(range(len(each)), 2):
        for key, again in itertools.product(keys[one], keys[other]):
            if _overlap(key, again):
                raise ConfigError(f"{source}: axes: two blocks set {max(key, again, key=len)}")
    combinations = itertools.product(*each)
    return [{key: value for part in parts for key, value in part.items()} for parts in combinations]


def check_free(keys: Mapping[str, str], blocks: Sequence[Settings]) -> None:
    """Raises `ConfigError` if a key of `keys` (with what sets it) is also set by an axis."""
    for axis in dict.fromkeys(key for settings in blocks for key in settings):
        for key, what in keys.items():
            if _overlap(key, axis):
                raise ConfigError(f"{what} sets {key}, which is an axis of the sweep ({axis})")


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _settings(block: Block, source: str) -> Iterator[Settings]:
    if block.grid is not None:
        axes = [[(key, value) for value in _placed(values, source)] for key, values in block.grid.items()]
        yield from (dict(combination) for combination in itertools.product(*axes))
    elif block.zipped is not None:
        columns = [_placed(values, source) for values in block.zipped.values()]
        yield from (dict(zip(block.zipped, row, strict=True)) for row in zip(*columns, strict=True))
    elif block.listed is not None:
        for item in block.listed:
            marks = getattr(item, "lc", None)
            yield {
                str(key): Value(value, _where(source, marks.value(key) if marks else None))
                for key, value in item.items()
            }
    elif block.random is not None:
        yield from _drawn(block.random, source)


def _placed(values: Any, source: str) -> list[Value]:
    marks = getattr(values, "lc", None)
    return [Value(value, _where(source, marks.item(i) if marks else None)) for i, value in enumerate(values)]


def _where(source: str, mark: tuple[int, int] | None) -> str:
    return source if mark is None else f"{source}:{mark[0] + 1}:{mark[1] + 1}"


def _drawn(block: RandomBlock, source: str) -> Iterator[Settings]:
    """Every key has a stream of its own, so that neither a new key nor more points change what was drawn before."""
    streams = {key: np.random.default_rng([block.seed, zlib.crc32(key.encode())]) for key in block.keys}
    place = located(source, block)
    for _ in range(block.points):
        yield {key: Value(_draw(block.keys[key], rng), place) for key, rng in streams.items()}


def _draw(of: Distribution, rng: np.random.Generator) -> Any:
    if of.uniform is not None:
        return float(rng.uniform(*of.uniform))
    if of.loguniform is not None:
        low, high = of.loguniform
        # exp(log(low)) may fall a rounding beyond the bounds.
        return min(max(math.exp(rng.uniform(math.log(low), math.log(high))), low), high)
    if of.whole is not None:
        return int(rng.integers(of.whole[0], of.whole[1], endpoint=True))
    assert of.choice is not None
    return of.choice[int(rng.integers(len(of.choice)))]

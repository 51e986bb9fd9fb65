"""What a sweep file may say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from rlsim.base.schema import Name, Schema
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

    @field_validator("grid", "zipped")
    @classmethod
    def _lists(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        for key, values in (value or {}).items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"{key}: expected a list of values such as [4K, 8K], got {values!r}")
        if value is not None and not value:
            raise ValueError("expected keys such as trace.cap, each with a list of values")
        lengths = {key: len(values) for key, values in (value or {}).items()}
        if info.field_name == "zipped" and len(set(lengths.values())) > 1:
            raise ValueError(f"zip takes as many values of each key, got {lengths}")
        return value

    @field_validator("listed")
    @classmethod
    def _mappings(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        for item in value or ():
            if not isinstance(item, dict) or not item:
                raise ValueError(f"expected settings such as {{trace.cap: 8K}}, got {item!r}")
        if value == ():
            raise ValueError("expected at least one mapping of settings")
        return value


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

"""Text such as `20 ms`, `80 GiB` or `24K` to SI floats, at the YAML border and nowhere else.

Inside rlsim a time is in seconds, a size in bytes, a rate in bytes/s or FLOP/s, a length in tokens.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Annotated, Any

from pydantic import BeforeValidator

from rlsim.errors import shown

_NUMBER = re.compile(r"^\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s].*?)?\s*$")

_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {p + "B": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS = {p + "b": f / 8 for p, f in _DECIMAL.items()}
_BANDWIDTH = {u + "/s": f for u, f in (_BYTES | _BITS).items()} | {p + "bit/s": f / 8 for p, f in _DECIMAL.items()}
_FLOPS = {p + "FLOP/s": f for p, f in _DECIMAL.items()} | {p + "FLOPS": f for p, f in _DECIMAL.items()}
# A published cap of 8K is 8,192 tokens.
_TOKENS = {"": 1.0, "K": 1024.0, "k": 1024.0, "M": 1024.0**2, "tokens": 1.0}


#: Figures beyond these cannot be meant, and sums of such figures are no numbers any more.
MOST_SECONDS, MOST_BYTES, MOST_RATE, MOST_FLOP_RATE, MOST_TOKENS = 1e9, 1e18, 1e18, 1e24, 1e9


def _parse(value: Any, units: dict[str, float], what: str, example: str, most: float) -> float:
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if match is None:
            raise ValueError(f"expected {what} such as {example!r}, got {shown(value)}")
        unit = match[2] or ""
        if unit and unit not in units:
            known = ", ".join(u for u in units if u)
            raise ValueError(f"unknown unit {shown(unit)} in {shown(value)}; {what} takes one of: {known}")
        number = float(match[1]) * (units[unit] if unit else 1.0)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) <= sys.float_info.max else math.inf
    else:
        raise ValueError(f"expected {what} such as {example!r}, got {shown(value)}")
    if not math.isfinite(number):
        raise ValueError(f"expected {what} that is finite, got {shown(value)}")
    if number > most:
        raise ValueError(f"expected {what} of at most {most:g}, got {shown(value)}")
    return number


def seconds(value: Any) -> float:
    """A duration: a number of seconds, or text such as `20 ms`."""
    return _parse(value, _TIME, "a time", "20 ms", MOST_SECONDS)


def byte_count(value: Any) -> float:
    """A size: a number of bytes, or text such as `80 GiB` (binary) or `80 GB` (decimal)."""
    return _parse(value, _BYTES, "a size", "80 GiB", MOST_BYTES)


def bandwidth(value: Any) -> float:
    """A rate in bytes/s: a number, or text such as `450 GB/s` (bytes) or `400 Gb/s` (bits)."""
    return _parse(value, _BANDWIDTH, "a bandwidth", "450 GB/s", MOST_RATE)


def flop_rate(value: Any) -> float:
    """A compute rate in FLOP/s: a number, or text such as `989 TFLOP/s`."""
    return _parse(value, _FLOPS, "a compute rate", "989 TFLOP/s", MOST_FLOP_RATE)


def token_count(value: Any) -> int:
    """A length in tokens: a whole number, or text such as `24K` (K = 1,024)."""
    number = _parse(value, _TOKENS, "a length", "24K", MOST_TOKENS)
    if number != int(number):
        raise ValueError(f"expected a whole number of tokens, got {shown(value)}")
    return int(number)


Seconds = Annotated[float, BeforeValidator(seconds)]
Bytes = Annotated[float, BeforeValidator(byte_count)]
BytesPerSecond = Annotated[float, BeforeValidator(bandwidth)]
FlopPerSecond = Annotated[float, BeforeValidator(flop_rate)]
Tokens = Annotated[int, BeforeValidator(token_count)]

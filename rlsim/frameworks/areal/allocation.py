"""AReaL's words for GPUs and degrees: `sglang:d4p1t1`, and both sides in one, `sglang.d4p1t1+d4p1t1`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsim.errors import ConfigError

#: One engine: its name, if it has one, a name of its own in brackets, and degrees by their letters.
_ENGINE = re.compile(r"(?:(?P<engine>[a-z]+)\b)?(?:\[\w+\])?[:.]?(?P<degrees>(?:[dtpcem][1-9]\d*)+)")
#: Experts of Megatron apart: the degrees of attention are those of the engine, `ffn` says how experts are cut.
_HYBRID = re.compile(r"(?P<engine>[a-z]+)?:?\(?attn:(?P<degrees>[a-z\d]+)\|ffn:(?P<experts>[a-z\d]+)\)?")
_DEGREE = re.compile(r"([dtpcem])(\d+)")
GENERATES, TRAINS = ("sglang", "vllm"), ("fsdp", "megatron", "archon")
_EXPECTED = "expected an engine and degrees such as sglang:d4t2, fsdp:d8 or megatron:d2p2t2"


@dataclass(frozen=True)
class Allocation:
    """An engine and its degrees; `ep` of experts, which takes no further GPUs."""

    engine: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.dp * self.tp * self.pp * self.cp


def allocation(text: str, place: str, known: tuple[str, ...]) -> Allocation:
    """One engine's GPUs; training without an engine is FSDP's, or Megatron's with stages or experts.

    Raises `ConfigError`, which begins with `place`, for text that is none or an engine that is not `known`.
    """
    written = re.sub(r"\s", "", text)
    found = _HYBRID.fullmatch(written) or _ENGINE.fullmatch(written)
    if found is None:
        raise ConfigError(f"{place}: {text!r}: {_EXPECTED}")
    degrees = _degrees(found["degrees"], text, place)
    experts = _degrees(found["experts"], text, place).get("e", 1) if found.re is _HYBRID else degrees.get("e", 1)
    stages = degrees.get("p", 1)
    engine = found["engine"] or ("megatron" if max(stages, experts) > 1 else "fsdp")
    if engine not in known:
        raise ConfigError(f"{place}: {text!r}: {engine} is not simulated here; {_EXPECTED}")
    return Allocation(engine, degrees.get("d", 1), degrees.get("t", 1), stages, degrees.get("c", 1), experts)


def _degrees(written: str, text: str, place: str) -> dict[str, int]:
    """Degrees by letter; `m` is TP, as before AReaL's 1.0."""
    found = [("t" if letter == "m" else letter, int(size)) for letter, size in _DEGREE.findall(written)]
    if len(found) > len(dict(found)):
        raise ConfigError(f"{place}: {text!r}: a degree is given twice")
    return dict(found)


def both_sides(text: str, place: str) -> tuple[Allocation, Allocation, bool]:
    """Generation, training, and whether they share GPUs (`|`), of an `allocation_mode`."""
    written = re.sub(r"\s", "", text)
    for sign in ("+", "|"):
        left, joint, right = written.partition(sign)
        if joint and not left.endswith(")") and "attn:" not in left:
            return allocation(left, place, GENERATES), allocation(right, place, TRAINS), sign == "|"
    raise ConfigError(f"{place}: {text!r}: expected generation and training, such as sglang:d4t1+fsdp:d4")

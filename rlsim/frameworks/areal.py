"""`rlsim init --from-areal`: a configuration of AReaL as an experiment, every value with where it is from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.errors import ConfigError
from rlsim.frameworks.adapter import adapted
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.mapping import Reading
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import PERIOD, Settings
from rlsim.frameworks.sources import read_sources

_BETWEEN_STEPS = ("saver", "evaluator", "recover")
#: Keys of the layout before areal-lite.
_LEGACY = ("ppo", "group_size", "dataset", "max_head_offpolicyness", "actor_train", "n_nodes", "n_gpus_per_node")
#: One engine: its name, if it has one, a name of its own in brackets, and degrees by their letters.
_ENGINE = re.compile(r"(?:(?P<engine>[a-z]+)\b)?(?:\[\w+\])?[:.]?(?P<degrees>(?:[dtpcem][1-9]\d*)+)")
#: Experts of Megatron apart: the degrees of attention are those of the engine, `ffn` says how experts are cut.
_HYBRID = re.compile(r"(?P<engine>[a-z]+)?:?\(?attn:(?P<degrees>[a-z\d]+)\|ffn:(?P<experts>[a-z\d]+)\)?")
_DEGREE = re.compile(r"([dtpcem])(\d+)")
GENERATES, TRAINS = ("sglang", "vllm"), ("fsdp", "megatron", "archon")
_EXPECTED = "expected an engine and degrees such as sglang:d4t2, fsdp:d8 or megatron:d2p2t2"


@dataclass(frozen=True)
class Allocation:
    """An engine and its degrees; `ep` and `expert_tp` of experts, which take no further GPUs."""

    engine: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


def from_areal(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that AReaL's YAML files and overrides describe.

    Raises as `adapted`.
    """
    config = read_sources(sources, "AReaL", "--from-areal", "areal")
    old = next((key for key in _LEGACY if config.given.get(key) is not None or config.has(key)), "")
    reading = Reading("areal", config, old=old)
    reading.refuse()
    generation, training, shared, where = _sides(config)
    engine, gpus = generation.engine, (generation.gpus, training.gpus)
    degrees: dict[str, Any] = {name: getattr(training, name) for name in ("tp", "pp", "cp", "ep", "expert_tp", "dp")}
    keys = [f"{section}.freq_{each}" for section in _BETWEEN_STEPS for each in ("epochs", "steps", "secs")]
    often = [key for key in keys if 0 < (config.get(PERIOD, key) or 0) < math.inf]
    reading.facts |= degrees | {
        "sides": where, "backend": training.engine, "engine": engine, "apart": not shared, "rollout": generation.gpus,
        "rollout_tp": generation.tp, "rollout_pp": generation.pp, "gpus": training.gpus,
        "taken": max(gpus) if shared else sum(gpus), "often": ", ".join(map(config.where, often)),
    }  # fmt: skip
    return adapted(reading, engine, options, sources)


def _sides(config: Settings) -> tuple[Allocation, Allocation, bool, str]:
    """Generation, training, whether they take turns on the same GPUs, and where that is said.

    Engines by their own keys, else by `allocation_mode`, as older releases write them.
    """
    if config.is_given("rollout_backend") or not config.is_given("both_sides"):
        generation = allocation(config.text("rollout_backend"), config.where("rollout_backend"), GENERATES)
        training = allocation(config.text("actor_backend"), config.where("actor_backend"), TRAINS)
        shared = config.text("strategy") == "colocation"
        where = config.said("rollout_backend", "actor_backend")
    else:
        where = config.where("both_sides")
        generation, training, shared = both_sides(config.text("both_sides"), where)
    return generation, training, shared, where


# AReaL's words for GPUs and degrees: `sglang:d4p1t1`, and both sides in one, `sglang.d4p1t1+d4p1t1` -------------------


def allocation(text: str, place: str, known: tuple[str, ...]) -> Allocation:
    """One engine's GPUs; training without an engine is FSDP's, or Megatron's with stages or experts.

    Raises `ConfigError`, which begins with `place`, for text that is none or an engine that is not `known`.
    """
    written = re.sub(r"\s", "", text)
    found = _HYBRID.fullmatch(written) or _ENGINE.fullmatch(written)
    if found is None:
        raise ConfigError(f"{place}: {text!r}: {_EXPECTED}")
    degrees = _degrees(found["degrees"], text, place)
    of_experts = _degrees(found["experts"], text, place) if found.re is _HYBRID else degrees
    experts, expert_tp = of_experts.get("e", 1), of_experts.get("t", 1) if found.re is _HYBRID else None
    stages = degrees.get("p", 1)
    engine = found["engine"] or ("megatron" if max(stages, experts) > 1 else "fsdp")
    if engine not in known:
        raise ConfigError(f"{place}: {text!r}: {engine} is not simulated here; {_EXPECTED}")
    return Allocation(engine, degrees.get("d", 1), degrees.get("t", 1), stages, degrees.get("c", 1), experts, expert_tp)


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

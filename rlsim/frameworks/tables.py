"""Settings of frameworks and engines as tables: names, defaults, limits, and what an experiment does not represent.

`rlsim/data/keys.csv` has a setting's name, kind and key (several in turn), `defaults.csv` a key's default since a
release (empty: any), `unlike.csv` a key, when it matters, and what it does. They were read off
github.com/verl-project/verl (YAML of its trainers, 0.2 to 0.9, and of its asynchronous recipes), NVIDIA-NeMo/RL
(`GRPOConfig` and its kin, `examples/configs/grpo_math_1B.yaml`; the same in 0.7 and 7ea279a), inclusionAI/AReaL
(`areal/api/cli_args.py`, 1.0), THUDM/slime (`slime/utils/arguments.py`, 0.3 at 624b824), all Apache-2.0, and the
arguments of vLLM 0.9 to 0.26 and SGLang 0.5.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal

from rlsim.base.catalogue import DATA
from rlsim.frameworks.settings import ANYTHING, FLAG, KINDS, NUMBER, Kind, Names, Settings
from rlsim.models.hardware import Gpu

#: Key, when it matters (`_MATTERS`), and what it does that an experiment has not.
Row = tuple[str, str, str]


def _rows(name: str, of: str) -> Iterator[list[str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        yield from (row[1:] for row in csv.reader(file) if row[0] == of)


@cache
def names(of: str) -> Names:
    """The settings of a framework, or of an engine below it, by name."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for name, kind, key in _rows("keys.csv", of):
        found[name] = KINDS[kind], (*found.get(name, (None, ()))[1], key)
    return found


@cache
def default_values(of: str, release: str = "") -> dict[str, Any]:
    """The default of every key that bears on time; None where there is none."""
    rows = _rows("defaults.csv", of)
    return {key: json.loads(value) for since, key, value in rows if _number(since) <= _number(release)}


@cache
def newest(of: str) -> str:
    """The newest release of whose defaults the table knows; empty where it names none."""
    return max((since for since, *_ in _rows("defaults.csv", of)), key=_number, default="")


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part)


@cache
def unlike_rows(of: str, *sections: str) -> tuple[Row, ...]:
    """What a framework, or an engine below these sections of a framework, has that an experiment has not."""
    rows = [(key, when, what) for key, when, what in _rows("unlike.csv", of)]
    flags = bool(sections) and sections[0].startswith("--")  # slime's have dashes
    rows = [(key.replace("_", "-"), when, what) for key, when, what in rows] if flags else rows
    return tuple((section + key, when, what) for section in sections or ("",) for key, when, what in rows)


def without(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The rows of other keys."""
    return [row for row in rows if row[0] not in keys]


#: The kind of a setting, and when it matters.
_MATTERS: dict[str, tuple[Kind[Any], Callable[[Any], bool]]] = {
    "on": (FLAG, bool),
    "off": (FLAG, lambda value: not value),
    "set": (ANYTHING, bool),
    "above 1": (NUMBER, lambda value: value > 1),
}


def unlike(config: Settings, table: Iterable[Row]) -> list[str]:
    """What of the table matters here, each with where it is said."""
    found = list[str]()
    for key, when, what in table:
        kind, matters = _MATTERS[when]
        value, where = config.told(kind, key), config.where(key)
        if kind is ANYTHING and (below := [other for other in config.given if other.startswith(f"{key}.")]):
            config.asked.update(below)
            value = ", ".join(f"{other.removeprefix(f'{key}.')}={config.given[other]}" for other in below)
            where = f"{key} ({config.origin[below[0]]})"
        if value is not None and matters(value):
            found.append(f"{where} = {value}: {what}")
    return found


_GIB = 2.0**30
#: SGLang's `chunked_prefill_size` on GPUs of less than so much memory (`_handle_gpu_memory_settings` of
#: python/sglang/srt/server_args.py, 0.5), and beyond.
_SGLANG_CHUNKS = ((35 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, 8192))
_SGLANG_MOST = 16384


#: How an engine is used, as vLLM's `UsageContext` tells: its class `LLM`, a server, or its asynchronous engine.
Use = Literal["class", "server", "engine"]


def own_limits(engine: str, gpu: Gpu, use: Use = "class") -> dict[str, Any]:
    """The fields of `EngineConfig` that the engine sets by itself on such a GPU; empty for one that is not known.

    - vLLM 0.9 to 0.26 (`EngineArgs.get_batch_defaults` of vllm/engine/arg_utils.py): chunks share iterations with
      decodes; limits go by memory, A100 apart, and by `use`: `AsyncLLM` as a library has those of `SchedulerConfig`.
    - SGLang 0.5: prefills have iterations of their own (`enable_mixed_chunk` is off), whose budget goes by memory.
    """
    if engine == "vllm":
        large = gpu.memory_bytes >= 70 * _GIB and "a100" not in gpu.name
        tokens, seqs = {
            "class": (16384 if large else 8192, 1024 if large else 256),
            "server": (8192 if large else 2048, 1024 if large else 256),
            "engine": (2048, 128),
        }[use]
        return {"chunked_prefill": True, "max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    if engine == "sglang":
        chunk = next((chunk for below, chunk in _SGLANG_CHUNKS if gpu.memory_bytes < below), _SGLANG_MOST)
        return {"chunked_prefill": False, "max_num_batched_tokens": chunk, "max_num_seqs": 4096}
    return {}

"""What engines print of their memory when they start: published logs, constants fitted to them, the page's section."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from calibration.markdown import section, table
from rlsim.calibrate.fit.common import percent
from rlsim.cost import engine_memory as shipped
from rlsim.cost.engine_memory import GIB, EngineMemory, engine_memory_of
from rlsim.cost.memory import kv_page_bytes, rollout_activation_bytes, rollout_weight_bytes
from rlsim.cost.replica import ReplicaLayout
from rlsim.models import Model, load_model
from rlsim.reading import read_yaml

LOGS = Path(__file__).with_name("kv_logs.yaml")
PARTS = ("weights", "activations", "libraries", "context", "kv")


@dataclass(frozen=True)
class Constants:
    """The fitted ones of `rlsim.cost.engine_memory`, in bytes."""

    sorted_logit: float = shipped.SORTED_SAMPLING_BYTES
    fused_logit: float = shipped.SAMPLING_BYTES
    library: float = shipped.LIBRARY_BYTES
    library_per_doubling: float = shipped.LIBRARY_BYTES_PER_DOUBLING


@dataclass(frozen=True)
class Log:
    """One start of an engine: its settings, and what it stated (GiB of a GPU, KV tokens of the replica)."""

    source: str
    assumed: str
    engine: str
    release: str
    model_name: str
    precision: str
    tp: int
    ep: bool
    pcie: bool
    memory: float | None
    util: float
    batched: int
    seqs: int
    stated: dict[str, float]

    @property
    def setting(self) -> str:
        """`vLLM 0.11.0, llama-3.1-8b, TP1`."""
        name = {"vllm-v0": "vLLM (V0)", "vllm": "vLLM", "sglang": "SGLang"}[self.engine]
        precision = "" if self.precision == "bf16" else f" {self.precision}"
        return f"{name} {self.release}, {self.model_name}{precision}, TP{self.tp}"

    @property
    def rule(self) -> EngineMemory:
        return engine_memory_of(self.engine.removesuffix("-v0"), self.release)

    @property
    def sorts(self) -> bool:
        """Whether this release sorts its logits to sample."""
        return self.rule.sampling_bytes == shipped.SORTED_SAMPLING_BYTES

    def predicted(self, constants: Constants = Constants()) -> dict[str, float]:
        """What rlsim says of each part, in GiB, and the KV tokens."""
        model, rule = _model(self.model_name, self.precision), self.rule
        rule = replace(rule, sampling_bytes=constants.sorted_logit if self.sorts else constants.fused_logit)
        weights = rollout_weight_bytes(model, self.tp, 1, ReplicaLayout(ep=self.tp if self.ep else 1))
        found = {"weights": weights / GIB}
        if self.memory is None:
            return found
        working = rollout_activation_bytes(model, self.tp, self.batched, self.seqs, rule.sampling_bytes)
        beside = rule.beside_bytes(self.tp, nvlink=not self.pcie)
        if rule.share_of == "all":
            libraries = constants.library + constants.library_per_doubling * math.log2(self.tp)
            beside = libraries + rule.graph_bytes
            found |= {"activations": working / GIB, "libraries": libraries / GIB}
        else:
            found["context"] = beside / GIB
        kv = rule.kv_bytes(self.memory, self.util, weights, working, beside)
        return found | {"kv": kv / GIB, "tokens": kv / kv_page_bytes(model, self.tp, 1)}

    def errors(self, constants: Constants = Constants()) -> dict[str, float]:
        """GiB that rlsim says too much of each stated part; of the KV tokens the relative error."""
        predicted = self.predicted(constants)
        found = {part: predicted[part] - self.stated[part] for part in PARTS if part in self.stated}
        tokens = self.stated.get("tokens")
        kv = self.stated.get("kv")
        if tokens is not None:
            found["tokens"] = predicted["tokens"] / tokens - 1.0
        elif kv is not None:
            found["tokens"] = predicted["kv"] / kv - 1.0  # the same in tokens
        return found


@cache
def logs() -> tuple[Log, ...]:
    """All of the file."""
    return tuple(
        Log(
            source=str(log["source"]),
            assumed="; ".join(str(one["assumed"]) for one in (log["common"], run) if "assumed" in one),
            engine=str(said["engine"]),
            release=str(said["release"]),
            model_name=str(said["model"]),
            precision=str(said.get("precision", "bf16")),
            tp=int(said["tp"]),
            ep=bool(said.get("ep", False)),
            pcie=bool(said.get("pcie", False)),
            memory=float(said["gib"]) * GIB if "gib" in said else None,
            util=float(said.get("util", 0)),
            batched=int(said.get("batched", 0)),
            seqs=int(said.get("seqs", 0)),
            stated={part: float(said[part]) for part in (*PARTS, "tokens") if part in said},
        )
        for log in read_yaml(LOGS)["logs"]
        for run in log["runs"]
        for said in [{**log["common"], **run}]
    )


def fit(measured: Sequence[Log]) -> Constants:
    """Medians over vLLM's starts: of bytes for each logit, where these are most, and of what libraries take."""
    logits: dict[bool, list[float]] = {True: [], False: []}
    alone, doubled = [], []
    for log in measured:
        model, stated = _model(log.model_name, log.precision), log.stated
        if log.engine != "vllm":
            continue
        if (
            "activations" in stated
            and rollout_activation_bytes(model, log.tp, log.batched, 0) < log.stated["activations"] * GIB / 2
        ):
            hidden = 2 * log.batched * model.hidden_size
            logits[log.sorts].append((stated["activations"] * GIB - hidden) / (log.seqs * model.vocab_size))
        if "libraries" in stated:
            (alone if log.tp == 1 else doubled).append((stated["libraries"], math.log2(log.tp)))
    library = float(np.median([size for size, _ in alone]))
    more = float(np.median([(size - library) / doublings for size, doublings in doubled]))
    each = {sorts: float(f"{np.median(found):.3g}") if found else None for sorts, found in logits.items()}
    found = Constants(library=round(library, 2) * GIB, library_per_doubling=round(more, 2) * GIB)
    known = {"sorted_logit": each[True], "fused_logit": each[False]}
    return replace(found, **{name: value for name, value in known.items() if value is not None})


def left_out(measured: Sequence[Log]) -> list[dict[str, float]]:
    """Every log's errors by a fit that has seen no log of its model."""
    models = {log.model_name for log in measured}
    fits = {name: fit([log for log in measured if log.model_name != name]) for name in models}
    return [log.errors(fits[log.model_name]) for log in measured]


@cache
def _model(name: str, precision: str) -> Model:
    return load_model(name) if precision in ("bf16", "published") else load_model(name).served(precision)


def kv_section(errors: Sequence[dict[str, float]] | None = None) -> str:
    """The page's section, of the errors of `logs` left out, if these are known."""
    measured = logs()
    errors = left_out(measured) if errors is None else errors
    both = list(zip(measured, errors, strict=True))
    engines = {"vllm": "vLLM", "vllm-v0": "vLLM's first engine (to 0.8)", "sglang": "SGLang"}
    rows = [
        (name, _NAMES[part], *_summary([error[part] for log, error in both if log.engine == engine and part in error]))
        for engine, name in engines.items()
        for part in PARTS
        if any(log.engine == engine and part in error for log, error in both)
    ]
    tokens = [
        (name, *_relative([error["tokens"] for log, error in both if log.engine == engine and "tokens" in error]))
        for engine, name in engines.items()
    ]
    each = [
        (log.setting, *(_shown(log, error, part) for part in PARTS), _tokens(error), log.source, log.assumed)
        for log, error in both
    ]
    return section(
        "kv",
        starts=len(measured),
        sources=len({log.source for log in measured}),
        shipped=shipped,
        gib=GIB,
        tokens=table(["engine", "of the KV tokens", "p90", "bias", "starts"], tokens),
        parts=table(["engine", "part", "median error, GiB", "p90", "bias", "starts"], rows),
        each=table(["start", *(_NAMES[part] for part in PARTS), "KV tokens", "source", "assumed"], each),
    )


_NAMES = {
    "weights": "weights",
    "activations": "activations",
    "libraries": "libraries",
    "context": "context",
    "kv": "KV cache",
}


def _shown(log: Log, error: dict[str, float], part: str) -> str:
    return f"{log.stated[part]:.2f} ({error[part]:+.2f})" if part in error else ""


def _tokens(error: dict[str, float]) -> str:
    return f"{error['tokens']:+.0%}" if "tokens" in error else ""


def _summary(errors: Iterable[float]) -> tuple[str, str, str, int]:
    found = np.array(list(errors))
    size = np.abs(found)
    return f"{np.median(size):.2f}", f"{np.quantile(size, 0.9):.2f}", f"{np.median(found):+.2f}", len(found)


def _relative(errors: Iterable[float]) -> tuple[str, str, str, int]:
    found = np.array(list(errors))
    size = np.abs(found)
    return percent(np.median(size)), percent(np.quantile(size, 0.9)), f"{np.median(found):+.0%}", len(found)

"""What engines print of their memory when they start: published logs, and constants fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from rlsim.base.reading import plain, read_yaml
from rlsim.base.schema import Schema
from rlsim.cost import engine_memory as shipped
from rlsim.cost.engine_memory import GIB, EngineMemory, engine_memory_of
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.memory import kv_page_bytes, rollout_activation_bytes, rollout_weight_bytes
from rlsim.models.model import Model, load_model

LOGS = Path(__file__).with_name("kv_logs.yaml")
PARTS = ("weights", "activations", "libraries", "context", "kv")  # of a GPU's memory


@dataclass(frozen=True)
class Constants:
    """The fitted ones of `rlsim.cost.engine_memory`, in bytes."""

    sorted_logit: float = shipped.SORTED_SAMPLING_BYTES
    fused_logit: float = shipped.SAMPLING_BYTES
    library: float = shipped.LIBRARY_BYTES
    library_per_doubling: float = shipped.LIBRARY_BYTES_PER_DOUBLING


class Log(Schema):
    """One start of an engine: its settings, and what it stated (GiB of a GPU, KV tokens of the replica)."""

    source: str
    assumed: str
    engine: str
    release: str
    model: str
    precision: str = "bf16"
    tp: int
    ep: bool = False
    pcie: bool = False
    gpu: str = ""
    gib: float | None = None
    util: float = 0.0
    batched: int = 0
    seqs: int = 0
    weights: float | None = None
    activations: float | None = None
    libraries: float | None = None
    context: float | None = None
    kv: float | None = None
    tokens: float | None = None

    @property
    def stated(self) -> dict[str, float]:
        """What it says, by part."""
        found = {part: getattr(self, part) for part in (*PARTS, "tokens")}
        return {part: value for part, value in found.items() if value is not None}

    @property
    def rule(self) -> EngineMemory:
        return engine_memory_of(self.engine.removesuffix("-v0"), self.release)

    @property
    def sorts(self) -> bool:
        """Whether this release sorts its logits to sample."""
        return self.rule.sampling_bytes == shipped.SORTED_SAMPLING_BYTES

    def predicted(self, constants: Constants = Constants()) -> dict[str, float]:
        """What rlsim says of each part, in GiB, and the KV tokens."""
        model, rule = _model(self.model, self.precision), self.rule
        rule = replace(rule, sampling_bytes=constants.sorted_logit if self.sorts else constants.fused_logit)
        weights = rollout_weight_bytes(model, self.tp, 1, ReplicaLayout(ep=self.tp if self.ep else 1))
        found = {"weights": weights / GIB}
        if self.gib is None:
            return found
        working = rollout_activation_bytes(model, self.tp, self.batched, self.seqs, rule.sampling_bytes)
        beside = rule.beside_bytes(self.tp, nvlink=not self.pcie)
        if rule.share_of == "all":
            libraries = constants.library + constants.library_per_doubling * math.log2(self.tp)
            beside = libraries + rule.graph_bytes
            found |= {"activations": working / GIB, "libraries": libraries / GIB}
        else:
            found["context"] = beside / GIB
        kv = rule.kv_bytes(self.gib * GIB, self.util, weights, working, beside)
        return found | {"kv": kv / GIB, "tokens": kv / kv_page_bytes(model, self.tp, 1)}

    def errors(self, constants: Constants = Constants()) -> dict[str, float]:
        """GiB that rlsim says too much of each stated part; of the KV tokens the relative error."""
        predicted = self.predicted(constants)
        found = {part: predicted[part] - self.stated[part] for part in PARTS if part in self.stated}
        if self.tokens is not None:
            found["tokens"] = predicted["tokens"] / self.tokens - 1.0
        elif self.kv is not None:
            found["tokens"] = predicted["kv"] / self.kv - 1.0  # the same in tokens
        return found


@cache
def logs() -> tuple[Log, ...]:
    """All of the file."""
    found = []
    for log in plain(read_yaml(LOGS))["logs"]:
        for run in log["runs"]:
            assumed = "; ".join(one["assumed"] for one in (log["common"], run) if "assumed" in one)
            found.append(Log(**{**log["common"], **run, "source": log["source"], "assumed": assumed}))
    return tuple(found)


def fit(measured: Sequence[Log]) -> Constants:
    """Medians over vLLM's starts: of bytes for each logit, where these are most, and of what libraries take."""
    logits: dict[bool, list[float]] = {True: [], False: []}
    alone, doubled = [], []
    for log in measured:
        model, stated = _model(log.model, log.precision), log.stated
        if log.engine != "vllm":
            continue
        sampled = stated.get("activations", 0.0) * GIB
        if rollout_activation_bytes(model, log.tp, log.batched, 0) < sampled / 2:
            hidden = 2 * log.batched * model.hidden_size
            logits[log.sorts].append((sampled - hidden) / (log.seqs * model.vocab_size))
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
    models = {log.model for log in measured}
    fits = {name: fit([log for log in measured if log.model != name]) for name in models}
    return [log.errors(fits[log.model]) for log in measured]


@cache
def _model(name: str, precision: str) -> Model:
    return load_model(name) if precision in ("bf16", "published") else load_model(name).served(precision)


def main(_: object) -> None:
    """What engines keep beside weights and KV cache, to published logs: prints the constants of
    `rlsim.cost.engine_memory`."""
    print(fit(logs()))

"""What users have published: memory that engines print when they start, and nccl-tests across nodes."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from evidence.validate.parts import EVIDENCE
from rlsim.base.reading import plain, read_yaml
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.engine_memory import CONTEXT_BYTES, GIB, engine_memory_of
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.memory import kv_page_bytes, rollout_activation_bytes, rollout_weight_bytes
from rlsim.models.hardware import load_cluster
from rlsim.models.model import Model, load_model

PARTS = ("weights", "activations", "context", "kv", "tokens")  # GiB of a GPU, and KV tokens of the replica
UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


@cache
def model_of(name: str, precision: str) -> Model:
    return load_model(name) if precision in ("bf16", "published") else load_model(name).served(precision)  # type: ignore[arg-type]


def starts() -> list[dict[str, Any]]:
    logs = plain(read_yaml(EVIDENCE / "kv_logs.yaml"))["logs"]
    return [{"precision": "bf16", **log["common"], **run} for log in logs for run in log["runs"]]


def errors(log: Mapping[str, Any]) -> dict[str, float]:
    """How many times as much as an engine stated rlsim says of each part, less one."""
    model, tp = model_of(log["model"], log["precision"]), log["tp"]
    rule = engine_memory_of(log["engine"].removesuffix("-v0"), log.get("release", ""))
    weights = rollout_weight_bytes(model, tp, 1, ReplicaLayout(ep=tp if log.get("ep") else 1))
    found = {"weights": weights / GIB}
    if "gib" in log:
        working = rollout_activation_bytes(model, tp, log["batched"], log["seqs"], rule.sampling_bytes)
        beside = rule.beside_bytes(tp, nvlink=not log.get("pcie"))
        kv = rule.kv_bytes(log["gib"] * GIB, log["util"], weights, working, beside)
        found |= {"activations": working / GIB, "kv": kv / GIB, "tokens": kv / kv_page_bytes(model, tp, 1)}
        found |= {"context": beside / GIB} if rule.share_of != "all" else {}
    return {part: found[part] / log[part] - 1 for part in PARTS if part in found and part in log}


@pytest.mark.parametrize(
    ("engine", "count", "median", "p90"),
    [("vllm", 19, 0.02, 0.2), ("vllm-v0", 10, 0.04, 0.2), ("sglang", 7, 0.03, 0.1)],
)
def test_kv_caches_are_what_engines_print(engine: str, count: int, median: float, p90: float) -> None:
    found = [errors(log) for log in starts() if log["engine"] == engine]
    kv = [abs(one.get("tokens", one.get("kv"))) for one in found if {"tokens", "kv"} & one.keys()]  # type: ignore[arg-type]
    assert len(kv) == count
    assert np.median(kv) < median
    assert np.quantile(kv, 0.9) < p90


def test_weights_and_contexts_are_what_engines_print() -> None:
    logs = starts()
    assert len(logs) >= 44
    assert np.median([abs(errors(log)["weights"]) for log in logs if "weights" in log]) < 0.01
    context = [log["context"] for log in logs if "context" in log and (log["tp"] == 1 or log.get("pcie"))]
    assert round(np.median(context), 2) * GIB == CONTEXT_BYTES


def test_a_published_sum_comes_out_whole() -> None:
    """Qwen3-32B at TP 2 on H100 under vLLM 0.11.0: 30.59 GiB of weights, 5.64 while it samples, 34.49 left for KV."""
    (log,) = [one for one in starts() if (one["model"], one["tp"], one.get("release")) == ("qwen3-32b", 2, "0.11.0")]
    assert (log["weights"], log["kv"]) == (30.59, 34.49)
    assert all(abs(error) < 0.02 for error in errors(log).values())


def across() -> Iterator[tuple[str, float, float]]:
    """Of each published collective the operation, its bytes, and rlsim's seconds over the measured ones, less one."""
    for one in plain(read_yaml(EVIDENCE / "across_nodes.yaml"))["clusters"]:
        calibration = load_calibration(f"{one['gpu']}-vllm")
        for table in one["tables"]:
            cluster, nodes, op = load_cluster(f"{table['nodes']}x8x{one['gpu']}"), table["nodes"], table["op"]
            assert cluster.inter is not None
            latency_s = one["latency_us"] * 1e-6 if "latency_us" in one else cluster.inter.latency_s
            link = {"bytes_per_s": one["gbit_per_s"] / 8 * 1e9, "latency_s": latency_s}
            cluster = cluster.model_copy(update={"inter": cluster.inter.model_copy(update=link)})
            collectives = Collectives(calibration.collectives, calibration.reference, cluster)
            gpus = 2 if op == "send_recv" else nodes * one.get("local", 8)
            for size, us in ((str(size), us) for size, us in table["us"].items()):
                count = float(size[:-1]) * UNITS[size[-1]] if size[-1] in UNITS else float(size)
                yield op, count, collectives.time_s(op, count, gpus, nodes) / (us * 1e-6) - 1


def test_collectives_across_nodes_are_what_users_measured() -> None:
    found = list(across())
    assert len(found) == 150
    assert np.median([abs(error) for *_, error in found]) < 0.13
    assert np.median([abs(error) for op, size, error in found if op == "all_reduce" and size > 2**25]) < 0.08
    assert abs(math.log1p(np.median([error for *_, error in found]))) < 0.05  # neither side

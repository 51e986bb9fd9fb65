"""What must hold of whatever a target accepted: nothing missing, infinite or negative that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlsim.cost.calibration import Calibration
    from rlsim.experiment.result import Result
    from rlsim.trace import Trace

#: Columns of results that are documented as missing at times, or may be below zero.
_MAY_MISS = ("finish_at", "score_start_at", "scored_at", "reward", "admitted_at", "decoding_at", "first_token_at",
             "start_at", "rollout_idle", "trainer_idle")  # fmt: skip
_MAY_BE_NEGATIVE = ("reward", "speedup_low")

ROUNDING = 1e-9  # of sums and differences of times, s


class NonsenseError(AssertionError):
    """A result that cannot be."""


def must(holds: object, what: str) -> None:
    """Raises `NonsenseError` unless it holds."""
    if not holds:
        raise NonsenseError(what)


def amounts(values: Iterable[Any], what: str) -> None:
    """Numbers of something there is: finite, none below zero."""
    for value in values:
        must(isinstance(value, int | float) and math.isfinite(value) and value >= 0, f"{what} is {value!r}")


def trace(found: Trace) -> None:
    """Lengths of at least one token, times that are finite and not below zero."""
    must(len(found) > 0, "a trace without responses")
    must(bool((found.response_tokens >= 1).all()), "a response of no tokens")
    for name in ("prompt_tokens", "judge_tokens", "reward_time_s", "arrival_s"):
        if name in found.frame:
            values = found.frame[name].dropna().to_numpy(np.float64)
            must(bool(np.isfinite(values).all() and (values >= 0).all()), f"{name} of a trace")


def result(found: Result) -> None:
    """Every table of a result, and its summary."""
    steps = found.steps
    must(len(steps) > 0, "results without a step")
    must(bool((steps["trained"] > 0).all()), "a step that trains on nothing")
    must(bool((steps["step_time_s"] > 0).all()), "a step that takes no time")
    for table in ("steps", "responses", "stays", "calls", "switches", "spans"):
        _columns(getattr(found, table), table)
    summary = found.summary()
    must(bool((summary["step_time_s"] > 0).all()), "a summary without times")


def _columns(frame: Any, table: str) -> None:
    for name in frame.columns:
        if frame[name].dtype.kind not in "fiu":
            continue
        values = frame[name].to_numpy(np.float64)
        if name in _MAY_MISS:
            values = values[~np.isnan(values)]
        must(bool(np.isfinite(values).all()), f"{table}.{name} is not finite")
        if name not in _MAY_BE_NEGATIVE:
            must(bool((values >= -ROUNDING).all()), f"{table}.{name} is below zero: {min(values, default=0)}")


def costs(calibration: Calibration) -> None:
    """Decode steps, prefills, collectives, switches, training calls and reallocations that a calibration prices."""
    from rlsim.cost.calls import CallCosts
    from rlsim.cost.layout import Layout
    from rlsim.cost.rollout import RolloutCostModel
    from rlsim.cost.step import Chunk
    from rlsim.cost.strategy import TrainStrategy
    from rlsim.hardware import load_cluster, node_types
    from rlsim.models import load_model

    two = load_cluster("2x8xh100")
    node = next((one for one in node_types().values() if one.gpu.name == calibration.gpu), None)
    node = node or load_cluster(f"8x{calibration.gpu}")  # which does not exist, and says so
    size = {"nodes": 2, "gpus_per_node": 8, "nodes_per_domain": 1, "inter": two.inter}
    cluster = node.model_copy(update=size)
    model = load_model("llama-3.1-8b")
    costs = RolloutCostModel(model, cluster, calibration)
    found: dict[str, float] = {}
    for tp in (1, 2, 8):
        step = costs.step(tp)
        for batch in (1, 3, 64, 700):
            curve = step.decode(batch)
            for context in (1, 300, 40_000):
                found[f"decode of {batch} × {context} at TP {tp}"] = curve.step_s(batch * context)
            found[f"100 decode steps of {batch} at TP {tp}"] = curve.steps_s(batch * 500, 100)
        for chunks in ([Chunk(1, 0)], [Chunk(512, 0)] * 4, [Chunk(2048, 9000), Chunk(100, 0)], [Chunk(60_000, 0)]):
            found[f"prefill of {len(chunks)} at TP {tp}"] = step.prefill_s(chunks)
            found[f"prefill of {len(chunks)} beside decodes at TP {tp}"] = step.mixed_s(4, 3000, chunks)
    for first in (True, False):
        switch = costs.switch(8, 2, 8, [500, 9000], 40, "migrate", first)
        found |= {f"switch: {name}": getattr(switch, name) for name in ("weights_s", "kv_s", "graph_s", "control_s")}
    found["transfer"] = costs.transfer_s([400, 9000], 2, 4, same_node=True)
    found["transfer across nodes"] = costs.transfer_s([400, 9000], 2, 4, same_node=False)
    tokens = np.array([300, 9000, 12, 777] * 8)
    for backend, strategy in (
        ("fsdp", TrainStrategy(dp=16, zero_stage=3, micro_batch_tokens=16384)),
        ("megatron", TrainStrategy(dp=2, tp=4, pp=2, sequence_parallel=True, zero_stage=1, micro_batch_tokens=16384)),
    ):
        calls = CallCosts({"actor": model}, cluster, calibration, backend, None)
        train, forward = calls.of("actor", strategy).train_s(tokens), calls.of("actor", strategy).forward_s(tokens)
        found |= {f"{backend} training": train.total_s, f"{backend} log-probs": forward.total_s}
        moved = calls.reallocation("actor", calls).time_s(
            Layout.of(0, strategy), Layout.of(0, TrainStrategy(dp=2, tp=8))
        )
        found[f"{backend} weight sync"] = moved
    for what, seconds in found.items():
        must(math.isfinite(seconds) and seconds >= 0, f"{what}: {seconds!r} s")
    never = [what for what, seconds in found.items() if what.startswith(("decode", "prefill")) and not seconds > 0]
    must(not never, f"{never[:1]} takes no time")

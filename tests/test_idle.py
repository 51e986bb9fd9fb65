"""Why GPUs are idle, on timelines made by hand, and what fits on them."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import cases, placed_of, tables

import rlsim
from rlsim.results.tune.parts import CAUSES, idle_causes, idle_shares, memory_by_call, memory_by_tp, waits

RUN = {"case": "", "system": "s", "seed": 0, "step": 0}
SMALL: dict[str, Any] = tables("bases")["idle"]


# Idle time ------------------------------------------------------------------------------------------------------------


class Timeline:
    """A run of one step on a few GPUs, spelled out."""

    def __init__(self, gpus: int, end: float, stage: tuple[float, float], mesh: int | None = None) -> None:
        self.gpus, self.end = gpus, end
        self.spans: list[dict[str, Any]] = []
        self.responses: list[dict[str, Any]] = []
        self.stays: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.call("generate", "generate", *stage, gpus if mesh is None else mesh)

    def call(self, name: str, kind: str, start: float, end: float, gpus: int) -> None:
        row = {"call": name, "kind": kind, "start_at": start, "end_at": end, "gpus": gpus}
        self.calls.append(RUN | row)

    def span(
        self, gpu: int, start: float, end: float, kind: str = "decode", tp: int = 1, label: str | None = None
    ) -> None:
        named = f"replica {gpu // tp}" if label is None else label
        row = {"gpu": gpu, "gpus": tp, "start_at": start, "end_at": end, "kind": kind, "tp": tp, "label": named}
        self.spans.append(RUN | row | {"shared": False})

    def response(
        self, replica: int, finish: float, start: float = 0.0, arrived: float = 0.0, again: tuple[float, ...] = (),
        called: tuple[float, ...] = (), tool_s: float = 0.0, tool_wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        """One that was admitted at `start`; `again`: when it was preempted, and admitted once more; `called`: when it
        left for its tools, and came back."""
        number = len(self.responses)
        self.responses.append(
            RUN | {"response": number, "finish_at": finish, "tool_s": tool_s, "tool_wait_s": tool_wait_s}
        )
        stay = RUN | {"call": "generate", "response": number, "replica": replica}
        again_at = [*again[:1], *called[1:]]
        stays = zip(
            (arrived, *again_at), (start, *again[1:], *called[1:]), (*again[:1], *called[:1], finish), strict=True
        )
        for arrived_at, admitted_at, left_at in stays:
            moments = {"arrived_at": arrived_at, "admitted_at": admitted_at, "decoding_at": admitted_at}
            left = "finished" if left_at == finish else "tool" if called else "preempted"
            self.stays.append(stay | moments | {"left_at": left_at, "left": left})

    def causes(self) -> pd.DataFrame:
        steps = pd.DataFrame([RUN | {"step_time_s": self.end, "steady": True}])
        tables = (pd.DataFrame(rows) for rows in (self.spans, self.responses, self.stays, self.calls))
        frame = idle_causes(steps, *tables, self.gpus)
        assert set(frame["cause"]) <= set(CAUSES)
        return frame

    def idle_s(self) -> dict[str, float]:
        """Seconds by cause over all GPUs, checked against what the spans leave."""
        found = self.causes().groupby("cause")["idle_s"].sum().to_dict()
        busy = sum((s["end_at"] - s["start_at"]) * s["gpus"] for s in self.spans)
        assert sum(found.values()) == pytest.approx(self.gpus * self.end - busy, abs=1e-9)
        return {str(cause): value for cause, value in found.items()}


@cases("experiments", "idle time by cause")
def test_idle_time_by_cause(
    busy_until: tuple[float, ...], responses: list[tuple[Any, ...]], expected: dict[str, float]
) -> None:
    """GPUs that decode until different times; the responses are arguments of Timeline.response."""
    line = Timeline(len(busy_until), 10.0, (0.0, 10.0))
    for gpu, end in enumerate(busy_until):
        if end:
            line.span(gpu, 0.0, end)
    for response in responses:
        line.response(*response)
    assert line.idle_s() == pytest.approx(expected)


def test_skew_and_imbalance_share_the_idle_time() -> None:
    """Of four replicas one has three responses left: two could help, one could not."""
    line = Timeline(4, 10.0, (0.0, 10.0))
    line.span(0, 0.0, 10.0)
    for replica in (1, 2, 3):
        line.span(replica, 0.0, 4.0)
        line.response(replica, 4.0)
    for _ in range(3):
        line.response(0, 10.0)
    found = line.idle_s()
    assert found == {"split_imbalance": pytest.approx(2 * 6.0), "length_skew": pytest.approx(1 * 6.0)}


def test_prefill_in_turn_is_no_wait_for_kv() -> None:
    line = Timeline(2, 10.0, (0.0, 10.0))
    for gpu, prefilled, end in ((0, 2.0, 10.0), (1, 1.0, 6.0)):
        line.span(gpu, 0.0, prefilled, "prefill")
        line.span(gpu, prefilled, end)
    line.response(0, 10.0, start=1.0)  # in the second prefill, before anything was decoded
    line.response(1, 6.0)
    assert line.idle_s() == {"length_skew": pytest.approx(4.0)}


def test_who_is_at_its_tools_is_not_left_to_generate() -> None:
    """From 2 s to 4 GPU 0 waits for the one that is away, from 4 to 8 one of both does, from 8 on GPU 1 for none."""
    line = Timeline(2, 10.0, (0.0, 10.0))
    for gpu, start, end in ((0, 0.0, 2.0), (0, 8.0, 10.0), (1, 0.0, 4.0)):
        line.span(gpu, start, end)
    line.response(0, 10.0, called=(2.0, 8.0), tool_s=4.0, tool_wait_s=2.0)
    line.response(1, 4.0)
    expected = {"tools": (2 + 4) * 4 / 6, "tool_queues": (2 + 4) * 2 / 6, "length_skew": 4.0 + 2.0}
    assert line.idle_s() == pytest.approx(expected)


def test_a_replica_alone_waits_for_tools_and_sandboxes() -> None:
    acting = {"trace": {"path": "swe-agents", "cap": "4K"}, "workflow.prompts": 2, "environment.sandboxes": 2}
    result = rlsim.run(SMALL, overrides={"systems": [{"verl": {"tp": 8}}], **acting}, seeds=1)
    causes = idle_causes(result.steps, result.spans, result.responses, result.stays, result.calls, 8)
    found = causes.groupby("cause")["idle_s"].sum()
    assert found.index.tolist() == ["stage_barrier", "tool_queues", "tools"]


def test_stage_barrier_alone() -> None:
    """Both replicas end together; then rewards run on CPUs, then one GPU scores, and generation held not all GPUs."""
    line = Timeline(3, 12.0, (0.0, 6.0), mesh=2)
    for replica in (0, 1):
        line.span(replica, 0.0, 6.0)
        line.response(replica, 6.0)
    line.call("reward", "reward", 6.0, 8.0, 0)
    line.call("reward_score", "inference", 8.0, 12.0, 1)
    line.span(2, 8.0, 12.0, "reward_score", label="")
    assert line.idle_s() == {"stage_barrier": pytest.approx(6.0 + 3 * 2.0 + 2 * 4.0)}
    by_call = line.causes().groupby("waits_for")["idle_s"].sum().to_dict()
    assert by_call == {
        "generate": pytest.approx(6.0), "reward": pytest.approx(6.0), "reward_score": pytest.approx(8.0),
    }  # fmt: skip
    steps = pd.DataFrame([RUN | {"step_time_s": 12.0, "steady": True}])
    shares = idle_shares(line.causes(), steps, 3)
    assert list(shares["idle"]) == pytest.approx([(0.5 + 0.5 + 8 / 12) / 3])
    assert (shares["idle"] + shares["busy"] == 1.0).all()
    assert waits(line.causes(), steps, 3)["share"].tolist() == pytest.approx([8 / 36, 6 / 36, 6 / 36])


def test_replicas_of_several_gpus_count_once() -> None:
    """TP 2: two replicas, two responses left on one of them; an even split would use the other."""
    line = Timeline(4, 10.0, (0.0, 10.0))
    line.span(0, 0.0, 10.0, tp=2)
    line.span(2, 0.0, 4.0, tp=2)
    line.response(0, 10.0)
    line.response(0, 8.0)
    line.response(1, 4.0)
    assert line.idle_s() == {"split_imbalance": pytest.approx(2 * 4.0), "length_skew": pytest.approx(2 * 2.0)}


@cases("experiments", "the causes are exactly the bubble")
def test_the_causes_are_exactly_the_bubble(systems: list[Any], changes: dict[str, Any]) -> None:
    result = rlsim.run(SMALL, overrides={"systems": systems, "trace.cap": "1K", "seeds": 1, **changes})
    causes = idle_causes(result.steps, result.spans, result.responses, result.stays, result.calls, 8)
    keys = ["system", "seed", "step"]
    found = causes.groupby(keys)["idle_s"].sum()
    steps = result.steps.set_index(keys)
    expected = steps["bubble_fraction"] * 8 * steps["step_time_s"]
    np.testing.assert_allclose(found.reindex(expected.index).fillna(0.0), expected, atol=1e-9)
    assert (causes["idle_s"] > 0).all()


def test_a_rollout_that_never_stops_is_one_stage() -> None:
    """Two replicas generate for a trainer. A and B begin at 0; B is trained a step later and ends at 3, A at 4. C and D
    of that step begin at 4, both on replica 0, and end at 8; then nothing is begun before the last step has trained."""
    line = Timeline(3, 12.0, (0.0, 4.0), mesh=2)
    line.call("generate", "generate", 4.0, 8.0, 2)
    for gpu, start, end, kind in ((0, 0.0, 8.0, "decode"), (1, 0.0, 3.0, "decode"), (2, 4.0, 6.0, "train")):
        line.span(gpu, start, end, kind)
    line.span(2, 8.0, 12.0, "train")
    for start, end in ((4.0, 6.0), (8.0, 12.0)):
        line.call("train", "train", start, end, 1)
    for replica, finish, start in ((0, 4.0, 0.0), (1, 3.0, 0.0), (0, 8.0, 4.0), (0, 8.0, 4.0)):
        line.response(replica, finish, start, arrived=start)
    steps = pd.DataFrame([RUN | {"step": step, "step_time_s": 6.0, "steady": True} for step in (0, 1)])
    of_call, of_response = [0, 1, 0, 1], [0, 1, 1, 1]
    stays = pd.DataFrame(line.stays).assign(step=of_response)
    tables = [pd.DataFrame(line.spans), pd.DataFrame(line.responses).assign(step=of_response), stays]
    causes = idle_causes(steps, *tables, pd.DataFrame(line.calls).assign(step=of_call), 3)
    assert causes.groupby(["step", "cause", "waits_for"])["idle_s"].sum().to_dict() == {
        (0, "length_skew", ""): 1.0,  # 3 to 4: A alone holds the batch up
        (0, "split_imbalance", ""): 2.0,  # 4 to 6, and 6 to 8: D could run on replica 1
        (0, "stage_barrier", "generate"): 4.0,  # the trainer, for A
        (1, "split_imbalance", ""): 2.0,
        (1, "stage_barrier", "generate"): 2.0,
        (1, "stage_barrier", "train"): 8.0,  # 8 to 12: nothing is under way
    }


def test_too_little_kv_shows_as_such() -> None:
    tight = {
        "trace": {"fixed": 1500, "cap": "2K"}, "routing": "round_robin", "memory_utilization": 0.25,
        "engine.max_num_seqs": 3, "training.offload": True, "workflow": {"prompts": 25, "responses": 1, "steps": 1},
        "systems": [{"verl": {"tp": 1}}],
    }  # fmt: skip
    result = rlsim.run(SMALL, overrides=tight, seeds=1)
    causes = idle_causes(result.steps, result.spans, result.responses, result.stays, result.calls, 8)
    by_cause = causes[causes["cause"] != "stage_barrier"].groupby("cause")["idle_s"].sum()
    assert by_cause.index.tolist() == ["kv_limit"]  # the fourth of one replica's responses waits for a place
    assert by_cause["kv_limit"] > 1.0


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_engine() -> None:
    placed = placed_of(SMALL)
    table = memory_by_tp(placed).set_index("tp")
    assert table["fits"].tolist() == [True] * 4
    for tp in (1, 2, 4, 8):
        assert table.loc[tp, "kv_tokens"] == placed.rollout_costs.capacity_pages(tp) * 16
    parts = table[["weights_gb", "activations_gb", "reserved_gb", "resident_gb", "kv_gb"]].sum(axis=1)
    assert (parts <= table["budget_gb"]).all()
    assert (parts > table["budget_gb"] - 0.1).all()
    assert table["sequences"].tolist() == [2, 4, 8, 16]
    calls = memory_by_call(placed).set_index("call")
    assert calls.loc["train", "kept_gb"] == pytest.approx(float(table.loc[1, "resident_gb"]))
    assert calls["fits"].all()


def test_memory_says_why_not_and_that_responses_wait() -> None:
    qwen = {"model": "qwen2.5-14b", "training.offload": True, "cluster": "8xa40", "calibration": "a40-vllm"}
    qwen |= {"memory_utilization": 0.6, "training.micro_batch_tokens": 2048}
    table = memory_by_tp(placed_of(SMALL, qwen)).set_index("tp")
    assert table["fits"].tolist() == [False, True, True, True]
    assert "exceed the budget" in str(table.loc[1, "why_not"])
    odd = memory_by_tp(placed_of(SMALL, {"model": "qwen2.5-7b"})).set_index("tp")
    assert "does not divide its 28 heads" in str(odd.loc[8, "why_not"])
    crowded = {"model": "qwen2.5-32b", "cluster": "8xa40", "calibration": "a40-vllm"}
    placed = placed_of(SMALL, crowded)
    assert not memory_by_tp(placed)["fits"].any()
    assert not memory_by_call(placed)["fits"].all()
    many = {"workflow.prompts": 400, "workflow.responses": 8, "memory_utilization": 0.5}
    cache = memory_by_tp(placed_of(SMALL, many)).set_index("tp").loc[1]
    assert cache["waits"]
    assert (cache["sequences"], cache["mean_sequences"] < 400) == (400, True)
    crowded = {"workflow.prompts": 400, "workflow.responses": 8, "engine.max_num_seqs": 16, "trace.cap": 128}
    table = memory_by_tp(placed_of(SMALL, crowded))
    assert table.loc[0, "waits"]

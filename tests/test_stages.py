"""Stages of generation, scores and training on timelines worked out by hand, of one step and from one to the next."""

from collections import Counter
from typing import Any

import pytest
from conftest import tables
from test_oppo import conserved, graph, play
from test_systems import Checks, ReleaseLast, gen_s, train
from workloads import LinearStep

from rlsim.policies.registry import load_policy
from rlsim.sim.batching import Batching, Batchings
from rlsim.sim.outcome import Outcome
from rlsim.workflow import grpo


def staged(row: dict[str, Any]) -> Outcome:
    """What becomes of a row of cases/stages.yaml."""
    parts: list[Any] = [load_policy(name)(**keys) for name, keys in row.get("use", {}).items()]
    more: dict[str, Any] = {key: row[key] for key in ("gpus", "steps") if key in row} | row.get("placed", {})
    if batchings := [part for part in parts if isinstance(part, Batching)]:
        more["batching"] = Batchings(batchings) if batchings[1:] else batchings[0]
    if "release" in row:
        more["control"] = ReleaseLast(row["release"])
    lengths, prompts, responses = row["lengths"], row.get("prompts", 1), row.get("responses", 1)
    if "chunks" in row:
        step = LinearStep(a=1.0, p=row.get("prefill", 0.0))
        return play(lengths, prompts, workflow=graph(row["chunks"]), responses=responses, step=step, **more)
    workflow = grpo(**row.get("workflow", {"reference": False, "old_log_probs": False}))
    for part in parts:
        workflow = part.rewired(workflow) if hasattr(part, "rewired") else workflow
    scoring = Checks(**row.get("checks", {}))
    return train(lengths, prompts, responses, rewire=lambda _: workflow, scoring=scoring, **more)


def as_said(said: Any, found: Any) -> Any:
    """What is found, in the form of what is said of it: fields of objects, of the first so many of a list of them."""
    if isinstance(said, dict):
        of = found if isinstance(found, dict) else {key: getattr(found, key) for key in said}
        return {key: as_said(value, of[key]) for key, value in said.items()}
    if isinstance(said, list):
        rows = isinstance(said[0], dict)
        return [as_said(value, each) for value, each in zip(said, found, strict=not rows)]
    return said if found == pytest.approx(said, nan_ok=True) else found


@pytest.mark.parametrize("name", tables("stages"))
def test_a_stage_by_hand(name: str) -> None:
    row = tables("stages")[name]
    outcome = staged(row)
    kinds = {kind for like in ("calls", "starts", "ends") for kind in row["is"].get(like, ())}
    found = {
        "left": Counter(left for stays in outcome.stays for left in stays.columns()["left"].tolist()),
        "seconds": [gen_s(outcome, step) for step in range(len(row["is"].get("seconds", ())))],
        "responses": outcome.responses,
        "rollouts": outcome.rollouts,
        "calls": {kind: [call for call in outcome.calls if call.kind == kind] for kind in kinds},
        "starts": {kind: sorted(span.start_at for span in outcome.spans if span.kind == kind) for kind in kinds},
        "ends": {kind: sorted(span.end_at for span in outcome.spans if span.kind == kind) for kind in kinds},
    }
    assert as_said(row["is"], found) == row["is"]
    if "chunks" in row:
        conserved(outcome)

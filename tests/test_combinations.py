"""Systems drawn at random: none comes to a halt, loses a token, breaks its bound or has a GPU do two things."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from conftest import tables, trajectories_of
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from test_asynchronous import check_gpus, check_tokens, run

import rlsim
from rlsim.errors import ConfigError
from rlsim.experiment.times import ExperimentTimes
from rlsim.trace import make_trace, write_trace

#: Parts that decide what begins and what a step trains on, and those that go with any of them.
BATCHINGS: list[Any] = tables("bases")["batchings"]
LAGGED = [rule for rule in BATCHINGS if "lagged" in rule]
BESIDE = ("async_reward", "rollout_log_probs", "repack", "elastic_split", "hybrid_rollout", "dynamic_sampling",
          "skewness_dispatch", "reward_beside", "queue_order", "prefix_dispatch")  # fmt: skip


class Drawn(NamedTuple):
    """An experiment of one system."""

    system: Any
    sizes: dict[str, Any]
    mini_batches: int
    bound: float  # of staleness, in updates
    partial: bool  # whether a step may train on fewer than a batch
    rollout_gpus: int  # that generate, before all others
    changes: Mapping[str, Any] = MappingProxyType({})  # of the rest of the experiment


@st.composite
def combined(draw: st.DrawFn, batchings: Sequence[Any] = BATCHINGS) -> Drawn:
    """Parts of a system; without a split all GPUs generate, and then train."""
    rollout_gpus, batching = draw(st.sampled_from([0, 2, 4, 6])), draw(st.sampled_from(batchings))
    pat, planner = {"pat": draw(switching())}, {"planner": {"start_tp": 1, "profiled": draw(st.booleans())}}
    layout = draw(st.sampled_from([{"verl": {"tp": 1}}, {"verl": {"tp": 2}}, "pat", pat, planner]))
    parts = [{"split": {"rollout_gpus": rollout_gpus}}] if rollout_gpus else []
    parts += [layout, batching, *(part for part in BESIDE if draw(st.integers(0, 3)) == 0)]
    if "hybrid_rollout" in parts:
        hybrid = {"until": draw(st.sampled_from([0.1, 0.4, 1.0])), "spread": draw(st.booleans())}
        parts[parts.index("hybrid_rollout")] = {"hybrid_rollout": {**hybrid, "kv": draw(st.sampled_from(KV))}}
    windows = draw(st.sampled_from([0, 0, 1, 2, 4]))
    parts += [{"training_windows": {"parts": windows}}] if windows else []
    rule: dict[str, Any] = batching if isinstance(batching, dict) else {}
    bounded, lag = rule.get("bounded_staleness", {}), rule.get("lagged", {}).get("lag")
    bound = np.ceil(bounded["eta"]) if bounded.get("stale") else np.inf if lag is None else lag
    partial, least = "partial_rollout" in rule, 1 + ("dynamic_sampling" in parts)  # rewards that differ
    tools = draw(st.sampled_from([{}, {}, draw(agents())]))
    return Drawn({"name": "s", "use": parts}, draw(sizes(least)), windows or 1, bound, partial, rollout_gpus, tools)


KV = ("recompute", "migrate")
AGENTS = "trajectories.parquet"


@pytest.fixture(autouse=True)
def trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of trajectories of up to six turns, in the folder where a test runs."""
    write_trace(make_trace(pd.DataFrame(trajectories_of(24, 6))), tmp_path / AGENTS)
    monkeypatch.chdir(tmp_path)


@st.composite
def switching(draw: st.DrawFn) -> dict[str, Any]:
    """How PAT switches, and when."""
    when = draw(st.sampled_from([{}, {"start_tp": 1, "switch_at": 3}, {"start_tp": 1, "predictor_error": 0.3}]))
    ways = {"weights": ["reshard", "gather", "reload"], "graphs": ["tail", "all"], "kv": [*KV, "cheaper"]}
    return {**when, "restart": draw(st.booleans()), **{key: draw(st.sampled_from(of)) for key, of in ways.items()}}


@st.composite
def agents(draw: st.DrawFn) -> dict[str, Any]:
    """Trajectories that wait for tools, and what these run on."""
    together = draw(st.integers(0, 5)) == 0
    environment = {
        "sandboxes": None if together else draw(st.sampled_from([None, 8, 64])),
        "workers": draw(st.sampled_from([None, 2])),
        "keep_kv": draw(st.sampled_from(["idle", "pinned", 2.0])),
        "turns": "together" if together else "each",
        "start_s": draw(st.sampled_from([0, 3])),
    }
    return {"trace": {"path": AGENTS, "cap": "4K"}, "environment": environment}


@st.composite
def sizes(draw: st.DrawFn, least: int = 1) -> dict[str, Any]:
    return {
        "prompts": 4 * draw(st.integers(1, 3)),
        "responses": draw(st.sampled_from([n for n in (1, 2, 4) if n >= least])),
        "steps": 5,
        "reference": draw(st.booleans()),
        "reward": {"workers": draw(st.sampled_from([2, 64]))},
    }


@st.composite
def published(draw: st.DrawFn) -> Drawn:
    """A system of the literature."""
    updates, alpha = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 0.5, 1, 2]))
    choices: list[tuple[str, dict[str, Any], int, float]] = [
        ("verl_fully_async", {"staleness_threshold": draw(st.sampled_from([0, 0.5, 1, 3])),
                              "partial_rollout": draw(st.booleans()), "trigger_parameter_sync_step": updates,
                              "recompute_log_probs": draw(st.booleans())}, 4, np.inf),
        ("areal", {"eta": draw(st.integers(0, 4)), "interrupt": draw(st.booleans())}, 1, np.inf),
        ("roll_flash", {"alpha": alpha}, 1, np.ceil(alpha)),
        ("nemo_async", {"in_flight_weight_updates": draw(st.booleans())}, 1, 1),
        ("skyrl_async", {"max_staleness_steps": draw(st.integers(0, 4)),
                         "clear_kv_cache_on_weight_sync": draw(st.booleans())}, 1, np.inf),
        ("streamrl", {"parts_per_step": updates, "skewness_aware": draw(st.booleans())}, 4, 1),
        ("laminar", {"eta": draw(st.integers(0, 4)), "per_replica": draw(st.sampled_from([None, 1, 4]))}, 1, np.inf),
    ]  # fmt: skip
    name, parameters, mini_batches, bound = draw(st.sampled_from(choices))
    gpus = draw(st.sampled_from([2, 4]))
    system = {name: {**parameters, "tp": draw(st.sampled_from([1, 2])), "rollout_gpus": gpus}}
    return Drawn(system, draw(sizes()), mini_batches, bound, False, gpus)


@st.composite
def in_two_calls(draw: st.DrawFn) -> Drawn:
    """Any parts, where two calls generate: shares of a prompt's responses, or some that others are compared with.

    Most batchings are refused, as they decide on those of one call: every other one is `lagged`, which is not.
    """
    drawn = draw(combined(draw(st.sampled_from([BATCHINGS, LAGGED]))))
    responses = drawn.sizes["responses"]
    baselines = draw(st.sampled_from([0, 0, 1])) if responses > 1 else 1
    first = draw(st.integers(0, responses) if baselines else st.integers(1, responses - 1))
    calls: list[dict[str, Any]] = [
        {"name": "one", "kind": "generate", "model": "actor", "responses": first},
        {
            "name": "other",
            "kind": "generate",
            "model": (model := draw(st.sampled_from(["actor", "actor", "teacher"]))),
            "baselines": baselines,
        },
        {"name": "reward", "kind": "reward", "model": "reward"},
        {"name": "train", "kind": "train", "model": "actor"},
    ]
    edges: list[Any] = ["one -> reward", "other -> reward", "reward -> train"]
    for name in ("one", "other") if model == "actor" else ("one",):
        sync = draw(st.sampled_from(["push", f"push_{name}"]))
        edges.append({"source": sync, "target": name, "lag": 1})
        if sync not in [call["name"] for call in calls]:
            calls.append({"name": sync, "kind": "sync", "model": "actor"})
            edges.append(f"train -> {sync}")
    if drawn.sizes["reference"]:
        calls.append({"name": "ref_log_prob", "kind": "inference", "model": "reference"})
        edges += [*draw(st.sampled_from([["one -> ref_log_prob"], ["one -> ref_log_prob", "other -> ref_log_prob"]]))]
        edges.append("ref_log_prob -> train")
    parts = list(drawn.system["use"])
    if not drawn.rollout_gpus and draw(st.booleans()):  # at the same time
        own = {"one": {"gpus": "0-3"}, "other": {"gpus": "4-7"}}
        all_of = {call["name"]: {"gpus": "all"} for call in calls if call["kind"] in ("inference", "train")}
        parts.append({"plan": {"calls": {**own, **all_of}}})
    sizes = {
        **drawn.sizes,
        "algorithm": "custom",
        "calls": calls,
        "edges": edges,
        "group_advantage": draw(st.booleans()),
    }
    changes = {**drawn.changes, "models": {"teacher": "qwen2.5-1.5b"}} if model == "teacher" else drawn.changes
    return drawn._replace(system={"name": "s", "use": parts}, sizes=sizes, changes=changes)


@st.composite
def of_the_papers(draw: st.DrawFn) -> Drawn:
    """A system of the seed papers on all GPUs, under each algorithm that it takes."""
    kept = {"change": draw(st.sampled_from(["one", "quarter"])), "delta_min": 1, "delta_start": draw(st.integers(1, 8))}
    trl = {"trl": {"tp": 1, "scoring_gpu": draw(st.booleans()), "vllm": draw(st.booleans())}}
    searched = {"evaluations": 300, "most_plans": draw(st.sampled_from([None, 100, 1e6]))}
    rollpacker = {"start_tp": 1, "profiled": draw(st.booleans())}
    offload, gradients = draw(st.booleans()), draw(st.sampled_from(["gpu", "host"]))
    streamed = {"swap": offload and draw(st.booleans()), "gradients": gradients, "trigger": 0.3}
    system = draw(
        st.sampled_from([
            {"name": "s", "use": [trl, "chunked"]},
            {"name": "s", "use": [trl, {"overcommit": kept}]},
            {"name": "s", "use": [trl, {"chunked": {"size": 256}}, {"overcommit": kept}]},
            {"real": {**searched, "pipelined_generation": draw(st.booleans())}},
            {"rlhfuse": {"tp": 1, "remaining": 0.3}},
            {"name": "s", "use": [{"planner": rollpacker}, "tail_batching", "reward_scheduler"]},
            {"name": "s", "use": [{"verl": {"tp": 1}}, "tail_batching", {"stream": streamed}]},
        ])
    )  # fmt: skip
    algorithm = draw(st.sampled_from(["grpo", "ppo", "remax", "online_dpo"]))
    workflow = {**draw(sizes()), "algorithm": algorithm, "responses": {"online_dpo": 2, "grpo": 2}.get(algorithm, 1)}
    models = {"reward": "qwen2.5-1.5b"} | ({"critic": "qwen2.5-1.5b"} if algorithm == "ppo" else {})
    others = {"models": models, "training": {"backend": "megatron", "offload": offload}}
    return Drawn(system, {**workflow, "reference": True, "reward": {}}, 1, np.inf, False, 0, others)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many responses each train call, or each of its parts, works on."""
    found: list[int] = []
    whole, pieces = ExperimentTimes.parts, ExperimentTimes.pieces

    def counted(self: ExperimentTimes, call: Any, placement: Any, samples: Any, *more: Any) -> Any:
        found.extend([len(samples)] * (call.kind == "train" and call.model == "actor"))
        return whole(self, call, placement, samples, *more)

    def in_pieces(self: ExperimentTimes, call: Any) -> Any:
        def counting(cost: Any) -> Any:
            def piece(lengths: Any) -> Any:
                found.extend([len(lengths)] * (call.kind == "train" and call.model == "actor"))
                return cost.piece(lengths)

            return cost and cost._replace(piece=piece)

        cost = counting(pieces(self, call))
        return cost._replace(guests=counting(cost.guests))

    monkeypatch.setattr(ExperimentTimes, "parts", counted)
    monkeypatch.setattr(ExperimentTimes, "pieces", in_pieces)
    return found


SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


MANY = pytest.param(combined, 400, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "runs"), [(combined, 34), (published, 12), (of_the_papers, 25), (in_two_calls, 25), MANY]
)
def test_systems_keep_every_invariant_or_are_refused(
    kind: Callable[[], st.SearchStrategy[Drawn]], runs: int, trained: list[int]
) -> None:
    """A run that comes to a halt is a PolicyError."""

    def check(drawn: Drawn) -> None:
        trained.clear()
        training = {"training": {"backend": "megatron", "mini_batches": drawn.mini_batches}}
        try:
            found = run(drawn.system, workflow=drawn.sizes, **{**training, **drawn.changes})
        except ConfigError:
            reject()  # with the reason
        assert sum(trained) == found.steps["trained"].sum() > 0
        check_steps(found, drawn)
        check_responses(found)
        check_gpus(found.spans)
        if drawn.rollout_gpus:
            check_borrowing(found, drawn.rollout_gpus)

    settings(SETTINGS, max_examples=runs)(given(kind())(check))()


def check_steps(found: rlsim.Result, drawn: Drawn) -> None:
    steps, batch = found.steps, drawn.sizes["prompts"] * drawn.sizes["responses"]
    check_tokens(steps)
    assert (steps["trained"] == batch).all() or drawn.partial
    assert (steps["trained"] % drawn.sizes["responses"] == 0).all()
    assert (steps["staleness_max"] <= steps["step"].clip(upper=drawn.bound)).all()
    assert steps["launched"].sum() == (~found.responses["resumed"]).sum(), "each response is launched in one step"
    assert steps["paused"].tolist() == found.responses.groupby("step")["paused"].sum().tolist()
    spent = steps[["gen_exposed_s", "prep_time_s", "train_time_s", "sync_time_s", "waiting_time_s"]].sum(axis=1)
    assert np.allclose(spent, steps["step_time_s"])
    assert steps["step_time_s"].sum() == pytest.approx(found.calls["end_at"].max(), rel=1e-9)
    idle = steps[["rollout_idle", "trainer_idle"]]
    assert ((idle >= 0) & (idle <= 1 + 1e-9)).all().all() if drawn.rollout_gpus else idle.isna().all().all()


def check_responses(found: rlsim.Result) -> None:
    """What is trained on is complete and scored, of one step, and counted by the weights that generated it."""
    trained = found.responses[found.responses["trained"]]
    assert not trained.duplicated(["position", "step", "response"]).any()
    assert trained.groupby("position")["step"].nunique().max() == 1, "a prompt is trained on once"
    ends = trained["step"].map(found.calls[found.calls["call"] == "train"].set_index("step")["end_at"])
    for moment in ("finish_at", "scored_at"):
        assert not (trained[moment] > ends * (1 + 1e-9)).any()
    assert (trained["stale_tokens"] <= trained["response_tokens"]).all()
    assert ((trained["stale_tokens"] > 0) == (trained["staleness"] > 0)).all()
    share = trained.groupby("step")[["stale_tokens", "response_tokens"]].sum()
    share_of_steps = found.steps.set_index("step")["stale_token_share"]
    np.testing.assert_allclose(share["stale_tokens"] / share["response_tokens"], share_of_steps)


def check_borrowing(found: rlsim.Result, first: int) -> None:
    """Training's GPUs generate while they are borrowed alone, with the weights of the version that generates."""
    train, calls = found.calls[found.calls["call"] == "train"], found.calls
    generated = found.spans.query(f"gpu >= {first} and kind in ('decode', 'prefill', 'mixed')")
    generated_s = ((generated["end_at"] - generated["start_at"]) * generated["gpus"]).sum()
    after_last_batch_s = (8 - first) * found.steps["step_time_s"].iloc[-1]  # which is in no step
    assert generated_s <= found.steps["borrowed_gpu_s"].sum() + after_last_batch_s
    begun, synced = np.sort(train["start_at"]), np.sort(calls.loc[calls["kind"] == "sync", "end_at"])
    loaded = found.spans[found.spans["label"] == "hybrid replicas"]["start_at"] * (1 + 1e-9)
    assert (np.searchsorted(begun, loaded) <= np.searchsorted(synced, loaded)).all(), "weights of the version"

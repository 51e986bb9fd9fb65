"""Trajectories: turns in a trace, tool calls in sandboxes, KV cache that is kept, by hand."""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import simpy
from conftest import loaded_of, placed_of, runner, tables, trajectories_of
from workloads import LinearStep, Nothing, StubCosts, rolled_out

import rlsim
from evidence.validate import agent_shapes
from evidence.validate.agents import measured, splits
from evidence.validate.parts import Options
from evidence.validate.published import figures
from rlsim.errors import ConfigError, TraceError
from rlsim.experiment.planning import PlanSpace
from rlsim.experiment.run import check_experiment
from rlsim.experiment.times import ExperimentTimes
from rlsim.policies.plan import part_of
from rlsim.results.report.shares import TRAJECTORY, trajectory_times
from rlsim.sim.control import RolloutControl, ToolCallView
from rlsim.sim.environment import EnvironmentConfig, Environments
from rlsim.sim.outcome import Responses
from rlsim.sim.request import AGENT, EngineConfig, Request, Run
from rlsim.sim.rollout import Rollout
from rlsim.trace import StepSampler, make_trace, read_trace, write_trace
from rlsim.trace.generate import Recipe, draw_trace
from rlsim.trace.turns import AgentCall, ToolCall, Turn, tool_calls

AGENTS = tables("bases")["agents"]
Acts = Callable[..., rlsim.Result]
AHEAD = {"skyrl_async": {"tp": 1, "rollout_gpus": 4}}


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 32 tasks × 4 trajectories with 1 to 12 turns."""
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, trajectories_of(32, 12))))
    return str(path)


@pytest.fixture(scope="module")
def acts(trajectories: str) -> Acts:
    """Runs systems on these trajectories."""
    return partial(runner("agents"), trace={"path": trajectories, "cap": "8K"})


@pytest.fixture(scope="module")
def acted(acts: Acts) -> rlsim.Result:
    """veRL on these trajectories."""
    return acts("verl")


THREE = [
    {"generated_tokens": 10, "observation_tokens": 100, "tool_s": 2.0},
    {"generated_tokens": 20, "observation_tokens": 200, "tool_s": None},
    {"generated_tokens": 30, "observation_tokens": 7, "tool_s": 1.0},
]


def trace_of(*cells: Any, **more: Any) -> Any:
    rows = {"prompt_id": range(len(cells)), "sample_id": 0, "prompt_tokens": 50, "turns": list(cells), **more}
    return make_trace(pd.DataFrame(rows))


# ------------------------------------------------------------------------------------------------------------ traces


def test_a_response_is_what_was_generated_and_observed(tmp_path: Path) -> None:
    trace = trace_of(THREE, json.dumps(THREE[:1]))
    assert trace.response_tokens.tolist() == [10 + 100 + 20 + 200 + 30, 10]  # nothing follows the last turn
    write_trace(trace, tmp_path / "a.parquet")
    assert read_trace(tmp_path / "a.parquet").digest() == trace.digest()
    rows = [{"prompt_id": 1, "sample_id": 0, "turns": THREE}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_trace(tmp_path / "b.jsonl").response_tokens.tolist() == [360]


@pytest.mark.parametrize("bad", ["[]", "{}", "nothing", [{"observation_tokens": 3}], [{"generated_tokens": 0}], 7])
def test_turns_that_are_none_are_told(bad: Any) -> None:
    with pytest.raises(TraceError, match="row 2: turns is not a list of turns with generated_tokens of 1 or more"):
        trace_of(THREE, bad)


def test_a_length_that_contradicts_its_turns_is_told() -> None:
    with pytest.raises(TraceError, match="row 1: response_tokens is 60, but its turns have 360 tokens"):
        trace_of(THREE, response_tokens=[60])


def test_limits_end_a_trajectory_with_a_turn() -> None:
    turns = tuple(Turn(t["generated_tokens"], t["observation_tokens"], t["tool_s"] or math.nan) for t in THREE)
    calls = [ToolCall(10, 100, 2.0), ToolCall(130, 200, 0.5)]
    assert tool_calls(turns, 1000, None, 0.5) == (360, calls)
    assert tool_calls(turns, 1000, 2, 0.5) == (130, calls[:1])
    assert tool_calls(turns, 331, None, 0.5) == (331, calls)  # one token after the last observation
    assert tool_calls(turns, 330, None, 0.5) == (130, calls[:1])  # which leaves no room for one
    assert tool_calls(turns, 4, None, 0.5) == (4, [])


def test_what_is_not_recorded_is_said() -> None:
    sampler = StepSampler(trace_of(THREE, THREE), 1, 1)
    assert sampler.tool_calls == [(ToolCall(10, 100, 2.0), ToolCall(130, 200, 2.0))] * 2
    assert sampler.notes == ["50.0% of the tool calls have no recorded time: taken as 2 s (the mean of the others)"]
    given = StepSampler(trace_of(THREE), 1, 1, default_tool_s=9.0)
    assert given.tool_calls[0][1].tool_s == 9.0


# ------------------------------------------------------------------------------------------------------------ engine

#: A step takes a second, and so does a prefill, with an eighth of a second for each token.
COSTS = StubCosts({1: LinearStep(a=1.0, p=0.125)}, {1: 10_000})


def play(
    *tools: tuple[tuple[Any, ...], ...],
    where: EnvironmentConfig | None = None,
    pages: int = 10_000,
    control: RolloutControl | None = None,
    lengths: int = 4,
    seed: int = 0,
    **engine: Any,
) -> tuple[Rollout, Environments]:
    """Requests of 8 prompt tokens on one GPU, with these tool calls each, then `lengths` tokens more."""
    env = simpy.Environment()
    environments = Environments(env, where or EnvironmentConfig(), seed)
    requests = []
    for i, calls in enumerate(tools):
        before = calls[-1][0] + calls[-1][1] if calls else 0
        given = tuple(ToolCall(*call) for call in calls)
        requests.append(Request(i, i, 8, before + lengths, tool_calls=given))
    costs, config = StubCosts(COSTS.steps, {1: pages}), EngineConfig(page_tokens=1, watermark=0.0, **engine)
    rollout = rolled_out(requests, costs, control or Nothing(), env, config=config, environments=environments)
    return rollout, environments


def test_a_tool_call_by_hand() -> None:
    # Prefill of 8 tokens (2 s, gives token 1), token 2 at 3 s; 5 s away; 3 observed tokens and the last of its own are
    # computed (1.5 s, gives token 6), and three steps more.
    rollout, environments = play(((2, 3, 5.0),))
    (request,) = rollout.requests
    assert (request.first_token_at, request.finished_at) == (2.0, 3.0 + 5.0 + 1.5 + 3.0)
    assert (request.generated, request.observed_tokens, request.called) == (9, 3, 1)
    assert (request.tool_s, request.tool_wait_s, environments.mean_s) == (5.0, 0.0, 5.0)
    without, _ = play(((2, 3, 5.0),), enable_prefix_caching=False)
    assert without.requests[0].finished_at == 3.0 + 5.0 + (1 + 13 / 8) + 3.0  # 8 + 2 + 3 tokens anew


def test_sandboxes_are_held_to_the_end_and_workers_for_a_call() -> None:
    call = ((1, 1, 10.0),)
    alone = 3.0 + 10.0 + 1.25 + 3.0  # both are prefilled together in 3 s
    one, environments = play(call, call, where=EnvironmentConfig(sandboxes=1, start_s=4.0))
    first, second = one.requests
    assert first.finished_at == 4.0 + alone
    assert second.tool_wait_s == first.finished_at - 3.0 + 4.0
    assert environments._sandboxes._free == 1
    worker, _ = play(call, call, where=EnvironmentConfig(workers=1))
    assert [request.tool_wait_s for request in worker.requests] == [0.0, 10.0]


def test_time_outs_failures_and_retries() -> None:
    (request,) = play(((1, 0, 50.0),), where=EnvironmentConfig(timeout=7.0))[0].requests
    assert request.tool_s == 7.0
    config = EnvironmentConfig(failures=0.5, retries=2)
    taken = [play(((1, 0, 1.0),), where=config, seed=seed)[0].requests[0].tool_s for seed in range(300)]
    assert set(taken) == {1.0, 2.0, 3.0}
    assert np.mean(taken) == pytest.approx(1 + 0.5 + 0.25, abs=0.15)


def test_a_call_waits_for_its_sub_agents() -> None:
    # Prefill of 8 tokens (2 s), call at 2 s. One sub-agent begins with it (prefill of 4 tokens 1.5 s, a step: 4.5 s;
    # told 0.5 s later), one after 10 s (prefill of 2 tokens, 1.25 s: 13.25 s); the tool takes 3 s.
    agents = (AgentCall(4, 2, (), 0.0, 0.5), AgentCall(2, 1, (), 10.0, 0.25))
    rollout, _ = play(((1, 1, 3.0, agents),))
    (request,) = rollout.requests
    assert request.finished_at == 2.0 + 11.5 + 1.25 + 3.0
    assert (request.tool_s, request.generated, rollout.finished) == (11.5, 6, 1)
    # They work in the sandbox of their trajectory, and need none of their own.
    nested = (AgentCall(4, 2, (ToolCall(1, 0, 2.0),), 0.0, 0.0),)
    rollout, environments = play(((1, 1, 3.0, nested),), where=EnvironmentConfig(sandboxes=1, start_s=4.0))
    assert rollout.requests[0].tool_wait_s == 4.0
    assert environments._sandboxes._free == 1


def test_sub_agents_accept_drafts_by_the_seed_and_correlation_of_their_trajectory(tmp_path: Path) -> None:
    agent = {"prompt_tokens": 8, "turns": [{"generated_tokens": 400}]}
    turns = [{"generated_tokens": 1, "observation_tokens": 1, "tool_s": 0.0, "agents": [agent]}, THREE[0]]
    (tmp_path / "agents.jsonl").write_text(json.dumps({"prompt_id": 0, "sample_id": 0, "turns": turns}))
    drafts = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": 0.6, "drawn": True}

    def tool_s(correlation: float) -> set[float]:
        more = {"engine.speculation": {**drafts, "correlation": correlation}, "workflow.responses": 1, "seeds": 8}
        own = {**AGENTS, "trace": {"path": str(tmp_path / "agents.jsonl"), "cap": "8K"}, "environment": {}}
        found = rlsim.run({**own, "systems": [{"verl": {"tp": 1}}]}, overrides=more).responses
        return set(found["tool_s"])

    apart, alike = tool_s(0.0), tool_s(0.9)
    assert len(apart) > 1, "each run has numbers of its own"
    assert np.std(list(alike)) > 3 * np.std(list(apart))


@pytest.mark.parametrize(("on_failure", "retries", "restarts", "finished"), [("restart", 3, 2, 1), ("drop", 0, 0, 0)])
def test_a_lost_sandbox(on_failure: str, retries: int, restarts: int, finished: int) -> None:
    # At 2 s a call that fails after 10 s: two attempts of 2 + 4 + 10 s are lost, in sandboxes that start anew.
    where = EnvironmentConfig(sandboxes=1, start_s=4.0, failures=0.6, retries=retries, on_failure=on_failure)  # type: ignore[arg-type]
    agents = (AgentCall(4, 50, (ToolCall(1, 0, 5.0),), 1.0, 0.0),)
    for seed in range(20):
        rollout, environments = play(((1, 1, 10.0, ()),), where=where, seed=seed)
        (request,) = rollout.requests
        if request.restarts == restarts and request.aborted == (not finished):
            break
    assert rollout.finished == finished
    if finished:  # its prompt is in the cache: a prefill of its last token alone
        assert request.finished_at == 2.0 + 14.0 + restarts * (1.125 + 14.0) + 1.25 + 3.0
        assert (request.generated, request.tool_s, request.tool_wait_s) == (6, 30.0, 12.0)
        assert (request.lost_tokens, request.lost_new, request.lost_observed) == (2, 2, 0)
    rollout, environments = play(*[((1, 1, 10.0, agents),)] * 5, where=where)
    assert sum(request.finished + request.aborted for request in rollout.requests) == 5
    assert environments._sandboxes._free == 1
    assert (environments._held, environments._calls) == (set(), {})


def test_sub_agents_in_steps_and_in_rollouts_for_all_steps(tmp_path: Path) -> None:
    rows = trajectories_of(32, 12)
    agents = [{"prompt_tokens": 300, "delay_s": 0.5, "turns": [*THREE[:1], {"generated_tokens": 30}]}]
    for row in rows:
        row["turns"][0]["agents"] = agents
    (tmp_path / "agents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {**AGENTS, "trace": {"path": str(tmp_path / "agents.jsonl"), "cap": "8K"}, "environment": {"sandboxes": 6}}
    result = rlsim.run({**own, "systems": ["verl", AHEAD]})
    for system, stays in result.stays.groupby("system"):
        mine = result.responses[result.responses["system"] == system]
        helpers = stays[stays["response"] >= AGENT]
        assert set(zip(helpers["step"], helpers["response"] % AGENT, strict=True)) <= set(
            zip(mine["step"], mine["response"], strict=True)
        )
        over = mine["finish_at"].notna()
        begun, last = mine["tool_calls"] > 0, (mine["tool_wait_s"] > 0) & ~over
        of_those = helpers["response"][(helpers["response"] % AGENT).isin(mine["response"][over])]
        assert of_those.nunique() == (begun & over).sum()
        assert helpers["response"].nunique() <= (begun | last).sum()  # the run ended, for one before it came
        assert trajectory_times(result, "").loc[system, "held up otherwise"] == pytest.approx(0.0, abs=1e-9)
    rlsim.write_report(result, tmp_path / "page.html")
    rlsim.write_timeline(result, tmp_path / "timeline.json")


def test_what_is_generated_before_a_sandbox_is_lost_is_wasted(acts: Acts) -> None:
    restarts = {"failures": 0.05, "on_failure": "restart", "retries": 3}
    result = acts("verl", {"partial_rollout": {}}, environment=restarts)
    stays = result.stays.assign(new=result.stays["end_tokens"] - result.stays["start_tokens"])
    steps = result.steps.groupby("system").sum(numeric_only=True)
    assert stays.groupby("system")["new"].sum().to_dict() == steps["response_tokens"].to_dict()
    assert (steps["wasted_tokens"] > 0).all()
    kept = steps["trained_response_tokens"] + steps["wasted_tokens"] + steps["paused_tokens"] - steps["resumed_tokens"]
    assert (kept == steps["response_tokens"] + steps["observed_tokens"]).all()


def test_who_loses_its_sandbox_is_replaced_where_more_may_be_launched(acts: Acts) -> None:
    more = {"name": "more", "use": ["verl", "dynamic_sampling"]}
    result = acts("verl", more, AHEAD, environment={"failures": 0.05, "on_failure": "drop"})
    lost = result.responses.groupby("system")["aborted"].sum()
    trained = result.responses[result.responses["trained"]].groupby(["system", "step"]).size().groupby("system").min()
    batch = AGENTS["workflow"]["prompts"] * AGENTS["workflow"]["responses"]
    assert min(lost["verl"], lost["more"]) > 0
    assert trained["verl"] < batch
    assert trained["more"] == trained["skyrl_async"] == batch
    of_steps = result.steps[result.steps["system"] == "verl"]
    assert not of_steps["outstanding_tokens"].any(), "prompts that lost all their sandboxes are not to come"


def test_turns_together_wait_for_the_slowest() -> None:
    rollout, _ = play(((1, 0, 1.0),), ((1, 0, 9.0),), where=EnvironmentConfig(turns="together"))
    assert [request.finished_at for request in rollout.requests] == [3.0 + 9.0 + 1.25 + 3.0] * 2
    with pytest.raises(ValueError, match="turns: together and sandboxes exclude each other"):
        EnvironmentConfig(turns="together", sandboxes=3)


def test_pinned_kv_keeps_others_waiting_and_is_found_again() -> None:
    # Two run at once, in 23 pages. The first is at its tool when the third asks for 8 pages beside the second's 9.
    def keeping(keep: Any) -> tuple[float, int]:
        calls = ((1, 1, 30.0),), (), ()
        rollout, _ = play(*calls, where=EnvironmentConfig(keep_kv=keep), pages=23, max_num_seqs=2)
        return rollout.requests[2].first_token_at, rollout.replicas[0].scheduler.hit_tokens

    assert keeping("idle") == (3.0 + 2.0, 0)  # it begins at once; what both need on their way is taken from the first
    assert keeping("pinned") == (3.0 + 3.0 + 2.0, 8)  # when the second has done its three steps
    assert keeping(1.5) == (3.0 + 2.0 + 2.0, 0)  # at the boundary after these seconds
    rollout, _ = play(((1, 1, 30.0),), (), where=EnvironmentConfig(keep_kv="pinned"), pages=15, max_num_seqs=1)
    assert rollout.requests[1].first_token_at == 2.0 + 2.0


class KeepShort(RolloutControl):
    """Pins KV cache while a trajectory's own calls have been shorter than this, where nobody waits."""

    def keep_kv_s(self, call: ToolCallView) -> float | None:
        return 2 * call.own_mean_s if call.own_mean_s < 20.0 and not call.waiting else 0.0


def test_a_policy_says_for_how_long_kv_is_pinned() -> None:
    seen = []

    class Asked(KeepShort):
        def keep_kv_s(self, call: ToolCallView) -> float | None:
            seen.append(call)
            return super().keep_kv_s(call)

    play(((1, 1, 3.0), (3, 1, 5.0)), control=Asked())
    first, second = seen
    assert (first.calls, first.own_mean_s, first.mean_s, first.waiting) == (0, 0.0, 0.0, 0)
    assert (second.calls, second.own_mean_s, second.mean_s) == (1, 3.0, 3.0)
    assert first.capacity_pages - first.free_pages == 0  # all that is left is idle


# ------------------------------------------------------------------------------------------------------- experiments


def test_the_page_says_where_the_time_of_trajectories_goes(acts: Acts, tmp_path: Path) -> None:
    where = {"workers": 2, "sandboxes": 12}
    result = acts("verl", {"partial_rollout": {}}, environment=where)
    times = trajectory_times(result, "")
    trained = result.responses[result.responses["trained"] & (result.responses["system"] == "verl")]
    took_s = (trained["finish_at"] - trained["start_at"]).mean()
    assert times.loc["verl", [*TRAJECTORY]].sum() == pytest.approx(took_s)
    assert times.loc["verl", "held up otherwise"] == pytest.approx(0.0, abs=1e-9)  # each second is told
    assert times.loc["verl", "tools"] == pytest.approx(trained["tool_s"].mean())
    assert 0 < times.loc["verl", "found"] < 1
    rlsim.write_report(result, tmp_path / "page.html")
    assert "Where the time of trajectories goes" in (tmp_path / "page.html").read_text()
    plain = acts("verl", environment=where, trace={"path": "rollpacker-code", "cap": "1K"})
    assert "environment has no effect: no response of the trace has turns" in plain.notes
    rlsim.write_report(plain, tmp_path / "plain.html")
    assert "Where the time of trajectories goes" not in (tmp_path / "plain.html").read_text()


def test_the_estimator_prices_trajectories_in_their_environment(trajectories: str) -> None:
    """Generation waits for two workers, which replicas share; training takes every turn as a sequence."""
    more = {"trace": {"path": trajectories, "cap": "8K"}, "environment": {"workers": 2, "sandboxes": 6}}
    given = {**AGENTS, **more, "cluster": "2xh100", "model": "qwen2.5-1.5b", "systems": ["verl"]}
    given |= {"training": {"backend": "megatron", "sequences": "turns"}}
    given["workflow"] = {"algorithm": "grpo", "prompts": 4, "responses": 2, "steps": 1, "reference": False}
    space = PlanSpace(placed_of(given), pipelined=False)
    spread = {
        name: next(i for i, (_, option) in enumerate(options) if option.strategy.dp == 2)
        for name, options in space.options.items()
    }
    system = {"name": "spread", "use": [part_of(space.plan([*spread.values()]), space.workflow)]}
    calls = rlsim.run({**given, "systems": [system]}).calls.set_index("call")
    took_s = (calls["end_at"] - calls["start_at"]).to_dict()
    told_s, _ = space.problem.single.seconds([*spread.values()])
    assert dict(zip(spread, told_s, strict=True)) == pytest.approx({name: took_s[name] for name in spread}, rel=1e-9)


def test_a_model_with_windows_keeps_nothing_of_a_turn(trajectories: str, tmp_path: Path) -> None:
    spec = {**AGENTS, "model": "gemma-3-12b", "trace": {"path": trajectories, "cap": "8K"}, "systems": ["verl"]}
    loaded = loaded_of(spec, {"environment.keep_kv": "pinned"}, tmp_path)
    note = "gemma-3-12b: each turn computes all of its context again; environment.keep_kv has no effect"
    assert note in loaded.notes
    plain = loaded_of(spec, {"model": "qwen2.5-7b"}, tmp_path)
    assert not any("keep_kv" in other for other in plain.notes)


def test_trajectories_and_plain_responses_mix_and_short_calls_are_not_told_as_none(
    acts: Acts, trajectories: str
) -> None:
    mixed = {"path": ["rollpacker-math", trajectories], "cap": "2K"}
    result = acts("verl", trace=mixed, environment={"timeout": 0.2})
    told = next(note for note in result.notes if note.startswith("tool calls of a response trained on"))
    means = result.steps.groupby("system")["tool_s_mean"].mean()
    assert told.startswith(f"tool calls of a response trained on: verl {means['verl']:.2f} s in them")
    assert 0 < means["verl"] < 0.5
    trained = result.responses[result.responses["trained"]]
    assert set(trained["tool_calls"] > 0) == {True, False}


def test_turns_count_to_the_weights_that_begin_them(acts: Acts) -> None:
    # Two tokens and a call, its three count to it; then four tokens, of which three are of newer weights; a call whose
    # answer nothing follows: the second turn began with the old weights.
    request = Request(0, 0, 8, 11, generated=11, called=2, tool_calls=(ToolCall(2, 3, 1.0), ToolCall(9, 2, 1.0)))
    request.runs = (Run(3, 6), Run(4, 5))
    assert Responses([request], version=4, trained_version=5).turn_versions == {0: {3: 2}}
    request.runs = (Run(3, 5),)  # the others are of the step's own
    assert Responses([request], version=4, trained_version=5).turn_versions == {0: {3: 1, 4: 1}}
    ahead = {"skyrl_async": {"tp": 1, "rollout_gpus": 4, "max_staleness_steps": 2}}
    result = acts("verl", ahead, workflow={"steps": 6})
    seen = {system: set(re.findall(r"(\d+):", " ".join(own["turn_staleness_counts"]))) for system, own in
            result.steps.groupby("system")}  # fmt: skip
    assert seen["verl"] == {"0"}
    assert {"0", "1"} <= seen["skyrl_async"]
    called = result.responses[result.responses["trained"] & (result.responses["tool_calls"] > 0)]
    turns = called["turn_versions"].str.split().map(lambda cell: sum(int(pair.split(":")[1]) for pair in cell))
    assert set(turns - called["tool_calls"]) <= {0, 1}  # an answer that nothing follows begins none
    (note,) = [note for note in result.notes if note.startswith("turns trained on")]
    assert "skyrl_async 0: " in note
    assert "verl" not in note


def test_each_turn_is_trained_on_with_what_stands_before_it(acts: Acts, acted: rlsim.Result) -> None:
    request = Request(0, 0, 8, 11, generated=11, called=1, tool_calls=(ToolCall(2, 3, 1.0), ToolCall(20, 2, 1.0)))
    training = SimpleNamespace(sequences="turns")
    assert ExperimentTimes.lengths(SimpleNamespace(_training=training), [request]).tolist() == [10, 19]  # type: ignore[arg-type]
    apart = acts("verl", training={"sequences": "turns"})
    whole, turns = (one.steps[["train_time_s", "gen_time_s"]].sum() for one in (acted, apart))
    assert turns["gen_time_s"] == pytest.approx(whole["gen_time_s"])
    assert turns["train_time_s"] > 2 * whole["train_time_s"]


def test_models_with_gpus_of_their_own(trajectories: str) -> None:
    workflow = {**AGENTS["workflow"], "algorithm": "ppo"}
    ahead = {"one_step_off": {"tp": 1, "rollout_gpus": 2, "apart": {"critic": 2, "reference": 1}}}
    own = {**AGENTS, "trace": {"path": trajectories, "cap": "8K"}, "workflow": workflow, "systems": [ahead]}
    calls = (
        rlsim.run({**own, "cluster": "8xh200", "calibration": "h200-sxm-vllm"})
        .calls.groupby(["kind", "model"])["gpus"]
        .max()
    )
    assert [calls["generate", "actor"], calls["train", "actor"], calls["train", "critic"]] == [2, 3, 2]
    assert calls["inference", "reference"] == 1
    ahead["one_step_off"]["apart"] = {"critics": 2}
    with pytest.raises(ConfigError, match=r"split.apart: .*'critics'.*critic"):
        check_experiment(own)


def test_tool_calls_stand_on_the_timeline(acted: rlsim.Result, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    rlsim.write_timeline(acted, path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "tool"]
    drawn_s = sum(event["dur"] for event in events) * 1e-6
    assert drawn_s == pytest.approx(float(acted.responses["tool_s"].sum()), rel=1e-3)


def test_the_validation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits of the measured run: one that memory refuses, one whose trajectories take as long as measured."""
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    given, short = figures(Options(), "agents").given, {"workflow.steps": 5}
    arms = {arm: {**own, **short} for arm, own in given["swe"]["arms"].items() if "all on" in arm or "32 groups" in arm}
    found = splits(Options(), {**given, "swe": {**given["swe"], "arms": arms}})
    refused, streamed = found.values()
    assert "does not fit" in refused
    real = measured(Options())
    assert streamed["inference_s_mean"] == pytest.approx(real["inference_s_mean"], rel=0.1)
    assert streamed["turns"] == pytest.approx(real["turns"], rel=0.05)


def test_the_validation_compares_shapes(tmp_path: Path) -> None:
    """Without traces the part is skipped; those that a recipe draws keep their own shape."""
    assert isinstance(agent_shapes.section(Options()), str)
    given = figures(Options(), "agents").given["recipe"]
    (tmp_path / "agentic").mkdir()
    write_trace(draw_trace(Recipe.model_validate({**given, "prompts": 100})), tmp_path / "agentic" / "drawn.parquet")
    found = agent_shapes.section(Options(kernels=tmp_path))
    assert {row.quantity: abs(row.error) < 0.15 for row in found.rows} == dict.fromkeys(
        ["calls_median", "calls_p95", "generated_per_turn", "observed_per_call", "observed_share",
         "context_growth_mean", "context_growth_p95", "tool_s_mean", "tool_s_p95"], True,
    )  # fmt: skip


def test_check_refuses_a_trace_that_forms_no_group(tmp_path: Path) -> None:
    write_trace(trace_of(THREE, THREE), tmp_path / "two.parquet")
    experiment = {**AGENTS, "trace": {"path": str(tmp_path / "two.parquet"), "cap": "8K"}, "systems": ["verl"]}
    with pytest.raises(ConfigError, match=r"its 2 responses cannot form one group of 4"):
        check_experiment(experiment)

"""Agents' trajectories in other programs' layouts: recorded calls and texts become turns."""

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from conftest import cases
from dump_samples import jsonl, noted, tokenizer

from rlsim.errors import TraceError
from rlsim.trace import read_trace, write_trace
from rlsim.trace.describe import describe
from rlsim.trace.importers import import_trace
from rlsim.trace.importers.agents import texts_of
from rlsim.trace.schema import Trace
from rlsim.trace.turns import Agent, Turn, turns_of_mask

SEEN = "\nuser\n<tool_response>\nfour five\n</tool_response>"
ANSWER = f"one two{SEEN}\nassistant\nthree four"


def turns(trace: Trace) -> list[Any]:
    """(generated, observed, seconds) of all turns; None for seconds that are not recorded."""
    cells = ([Turn(*turn) for turn in cell or ()] for cell in trace.frame["turns"])
    return [[(*turn[:2], None if isnan(turn.tool_s) else turn.tool_s) for turn in cell] for cell in cells]


def call(name: str, session: str, tokens: tuple[int, int], **other: Any) -> dict[str, Any]:
    return {"request_id": name, "session_id": session, "input_length": tokens[0], "output_length": tokens[1],
            "hash_ids": [1], **other}  # fmt: skip


def wait(name: str, delay_ms: float, trigger: str = "completion") -> dict[str, Any]:
    return {"request_id": name, "trigger": trigger, "delay_ms": delay_ms, "relation": "sequence"}


HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", "source": {}}


def test_agentic_mooncake_of_version_2(tmp_path: Path) -> None:
    p = {"play_id": "p", "model": "m", "not_before_ms": 50.0}
    rows = [
        HEADER,
        call("a0", "s", (100, 20), **p),
        call("a1", "s", (150, 30), **p, dependencies=[wait("a0", 2500.0)]),
        call("b0", "sub", (40, 5), **p, dependencies=[wait("a1", 10.0, "dispatch")]),
        call("c0", "sub2", (30, 5), **p, dependencies=[wait("a1", 250.0)]),
        call("d0", "nested", (7, 1), **p, dependencies=[wait("c0", 0.0)]),
        call("c1", "sub2", (50, 5), **p, dependencies=[wait("c0", 1000.0), wait("d0", 40.0)]),
        call("e0", "back", (9, 1), **p, dependencies=[wait("a1", 0.0)]),
        call("a2", "s", (190, 3), **p, dependencies=[wait("a1", 100.0), wait("b0", 0.0), wait("c1", 70.0)]),
        call("fork", "s", (160, 9), **p, dependencies=[wait("a1", 1.0)]),
        call("a3", "s", (170, 0), **p, dependencies=[wait("a2", 1000.0), wait("e0", 0.0)]),
    ]
    trace = import_trace(jsonl(tmp_path / "agents.jsonl", rows))
    # 150 - 100 - 20 tokens observed in 2.5 s; a3 has less context than a2 left, and waits for another trajectory too.
    spine = [(20, 30, 2.5), (30, 10, 0.1), (3, 0, None), (1, 0, None)]
    assert turns(trace) == [spine, [(1, 0, None)], [(9, 0, None)]]
    assert trace.frame["prompt_tokens"].tolist() == [100, 9, 160]
    assert trace.response_tokens.tolist() == [20 + 30 + 30 + 10 + 3 + 1, 1, 9]
    assert trace.frame["arrival_s"].dropna().tolist() == [0.05]
    nested = Agent(7, (Turn(1, 0, 0.04),))
    b0, c0 = Agent(40, (Turn(5, 0, 0.0),)), Agent(30, (Turn(5, 15, 1.0, (nested,)), Turn(5, 0, 0.07)), 0.25)
    assert trace.frame["turns"][0][1].agents == (b0, c0)
    noted(trace, "1 calls began with a context shorter", "1 sessions have calls after which the seconds are not",
          "3 sub-agents, or calls beside others, work while", "2 sub-agents, or calls beside others, that the next",
          "1 sub-agents began with the dispatch")  # fmt: skip
    write_trace(trace, tmp_path / "a.parquet")
    assert read_trace(tmp_path / "a.parquet").frame["turns"][0][1].agents == (b0, c0)
    assert describe(trace)["parts"][0]["sub_agents_mean"] == 1.0


def test_agentic_mooncake_before_version_2(tmp_path: Path) -> None:
    rows = [call("root", "s", (4, 2), timestamp=0), call("x", "s", (9, 1), wait_for=["root"], delay=2, tool_wait_ms=3)]
    assert turns(import_trace(jsonl(tmp_path / "a.jsonl", rows))) == [[(2, 3, 0.005), (1, 0, None)]]
    with pytest.raises(TraceError, match="line 1: agentic Mooncake of version 3; version 2 is read"):
        import_trace(jsonl(tmp_path / "a.jsonl", [HEADER | {"version": 3}, call("a", "s", (4, 2))]))


def test_weka_files(tmp_path: Path) -> None:
    def request(t: float, tokens: tuple[int, int], **other: Any) -> dict[str, Any]:
        return {"t": t, "type": "s", "model": "m", "in": tokens[0], "out": tokens[1], "hash_ids": [], **other}

    agent = {"t": 2.5, "type": "subagent", "agent_id": "x", "status": "completed", "requests": [request(0.0, (5, 4))]}
    one = {
        "id": "c", "block_size": 64, "hash_id_scope": "local",
        "requests": [request(0.0, (100, 10), api_time=2.0), agent, request(9.0, (140, 20))],
    }  # fmt: skip
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(one | {"id": name}, indent=2))
    trace = import_trace(tmp_path)
    assert turns(trace) == [[(10, 30, 0.0), (20, 0, None)]] * 2
    assert trace.frame["turns"][0][0].agents == (Agent(5, (Turn(4, 0, 6.5),)),)  # ends at 2.5 s
    # Two at a time, that took 1 s and 4 s of the 5 s after the call; one in the background, one that no call follows.
    agents = [agent | {"t": t, "duration_ms": ms, "agent_id": t} for t, ms in ((4.0, 1000.0), (7.0, 4000.0))]
    more = agent | {"status": "async_launched", "duration_ms": None}
    one["requests"] = [*one["requests"][:1], *agents, more, one["requests"][2], agent]
    (tmp_path / "three.json").write_text(json.dumps(one | {"id": "three"}))
    trace = import_trace(tmp_path / "three.json")
    assert turns(trace) == [[(10, 30, 0.0), (20, 0, None)], [(4, 0, None)], [(4, 0, None)]]
    own = [(agent.delay_s, agent.turns[-1].tool_s) for agent in trace.frame["turns"][0][0].agents]
    assert own == [(1.0, 0.0), (1.0, 2.0)]
    noted(
        trace, "2 sub-agents, or calls beside others, work while", "2 sub-agents, or calls beside others, that the next"
    )


def test_rllm_episodes(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four five"}]
    steps = [
        {"observation": "", "model_response": "three four five", "chat_completions": messages,
         "timing": {"env_time": 0.75}},
        {"observation": "two four", "model_response": "one", "chat_completions": [], "timing": {}},
    ]  # fmt: skip
    episode = {"training_step": 3, "task_hash": "abc", "episode_id": "e:0", "is_correct": True,
               "trajectories": [{"name": "solver", "reward": 1.0, "steps": steps}]}  # fmt: skip
    for kind in ("train", "val"):
        folder = tmp_path / "episodes" / f"{kind}_step_3_epoch_0"
        folder.mkdir(parents=True)
        (folder / "episode_hashabc_ide_0.json").write_text(json.dumps(episode, indent=2))
        (folder / "batch_summary.json").write_text("{}")
    trace = import_trace(tmp_path / "episodes", tokenizer=tokenizer(tmp_path))
    assert turns(trace) == [[(3, 2, 0.75), (1, 0, None)]]
    assert trace.frame["prompt_tokens"].tolist() == [2]
    assert trace.frame["correct"].tolist() == [True]


def test_rllm_episodes_of_agents_flows(tmp_path: Path) -> None:
    """As its engine of agents' flows converts recorded calls: texts in the messages, one time for the whole flow."""
    asks = [{"role": "user", "content": "one two"}]
    calls = {"role": "assistant", "content": "three", "tool_calls": [{"function": {"name": "four"}}]}
    said = [{"role": "tool", "content": "one two three"}, {"role": "assistant", "content": "four"}]
    empty = {"observation": None, "action": None, "reward": 0.0, "done": False, "timing": {}}
    steps = [empty | {"thought": "one ", "model_response": "three", "chat_completions": [*asks, calls]},
             empty | {"thought": "", "model_response": "four", "chat_completions": [*asks, calls, *said]}]  # fmt: skip
    metrics = {"time/agentflow_s": 9.0, "time/agentflow_llm_sum_s": 7.0, "time/agentflow_llm_wall_s": 6.5}
    episode = {
        "training_step": 3,
        "epoch": 0,
        "episode_id": "e:0",
        "session_id": "s",
        "task": {},
        "task_hash": "abc",
        "is_correct": True,
        "termination_reason": "env_done",
        "metrics": metrics,
        "metadata": {},
        "timing": {},
        "trajectories": [{"name": "a", "uid": "u", "reward": 1.0, "num_steps": 2, "timing": {}, "steps": steps}],
    }
    path = tmp_path / "episode_hashabc_ide_0.json"
    path.write_text(json.dumps(episode, indent=2))
    trace = import_trace(path, tokenizer=tokenizer(tmp_path))
    # Thought, words and a call in JSON (3 words by blanks), then 3 words of the tool in the seconds that are left.
    ((first, last),) = turns(trace)
    assert (first[0] > 2, first[1:], last[:2]) == (True, (3, 2.5), (1, 0))
    noted(trace, "1 trajectories' seconds outside of generation are shared out evenly among their calls")


def test_skyrl_evaluations(tmp_path: Path) -> None:
    row = {"input_prompt": "one two three", "output_response": ANSWER, "score": [0, 0, 1.0], "stop_reason": "stop",
           "env_class": "search"}  # fmt: skip
    folder = tmp_path / "dumped_evals" / "global_step_7_evals"
    jsonl(folder / "d.jsonl", [row, row | {"output_response": "one", "score": 0.5, "stop_reason": "length"}])
    jsonl(folder / "aggregated_results.jsonl", [{"eval/score": 0.75}])
    trace = import_trace(tmp_path / "dumped_evals", tokenizer=tokenizer(tmp_path))
    assert turns(trace)[0][0][0] == 2
    assert turns(trace)[0][1] == (2, 0, None)
    assert trace.frame["reward"].tolist() == [1.0, 0.5]
    assert trace.capped.tolist() == [False, True]


def test_verl_texts_are_split_where_a_tool_answers(tmp_path: Path) -> None:
    row = {"input": "one two", "output": ANSWER, "score": 1.0, "step": 1}
    trace = import_trace(jsonl(tmp_path / "1.jsonl", [row]), tokenizer=tokenizer(tmp_path))
    assert [turn[0] for turn in turns(trace)[0]] == [2, 2]
    noted(trace, "1 trajectories have several turns; the seconds of their tools are not in the dump")


@cases("import_near_misses", "texts of turns")
def test_texts_of_turns(text: str, expected: list[str]) -> None:
    assert [made for made, *_ in texts_of(text)] == expected
    assert not expected or "".join(made + seen for made, seen, _ in texts_of(text)) == text


@cases("import_near_misses", "turns of a mask")
def test_turns_of_a_mask(mask: list[int], expected: list[list[int]] | None) -> None:
    found = turns_of_mask(mask)
    assert (found and [list(turn[:2]) for turn in found]) == expected

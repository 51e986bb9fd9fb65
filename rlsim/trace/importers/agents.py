"""Trajectories of agents: recorded model calls of a session, and texts, become turns. data/layouts.yaml names these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from rlsim.trace.importers.dumps import Fields, Tally
from rlsim.trace.importers.rows import Row, file_rows, is_number
from rlsim.trace.turns import Turn, response_tokens

#: What is observed in a text that Qwen's and Hermes' chat templates made, with or without their special tokens; and
#: what Search-R1 and SkyRL's search and SQL (skyrl_gym at a956457) put behind a call, with or without such a template.
_OBSERVED = re.compile(
    r"(?:<\|im_end\|>)?\s*(?:<\|im_start\|>)?(?:user|tool)\s*\n<tool_response>.*?</tool_response>\s*"
    r"(?:(?:<\|im_end\|>\s*)?(?:<\|im_start\|>)?assistant\n|$)"
    r"|(?:(?<=</search>)|(?<=</sql>))(?:<\|im_end\|>)?\s*(?:(?:<\|im_start\|>)?user)?\s*"
    r"<(?P<tag>information|observation)>.*?</(?P=tag)>\s*"
    r"(?:(?:<\|im_end\|>\s*)?(?:<\|im_start\|>)?assistant\n)?",
    re.DOTALL,
)
NOT_TIMED = "{n} trajectories have several turns; the seconds of their tools are not in the dump"


class _Call(NamedTuple):
    """A model call of a session: its context and what it generated (tokens), and seconds until the next began."""

    context_tokens: int
    generated_tokens: int
    tool_s: float  # NaN: not recorded


def _session(row: Row, name: str, calls: Sequence[_Call], arrival_s: float | None) -> Row:
    """A row for a session's calls in their order: what a call's context has beyond the last one was observed."""
    observed = [b.context_tokens - a.context_tokens - a.generated_tokens for a, b in pairwise(calls)]
    turns = [Turn(c.generated_tokens, max(0, o), c.tool_s) for c, o in zip(calls, [*observed, 0], strict=True)]
    values = {"session": name, "prompt_tokens": calls[0].context_tokens, "turns": turns, "arrival_s": arrival_s,
              "shrunk": sum(one < 0 for one in observed)}  # fmt: skip
    return row.having(values, f", session {name}")


def session(row: Row, tally: Tally) -> Fields:
    """A session's turns and its length."""
    turns, shrunk = row.values["turns"], row.values["shrunk"]
    if shrunk:
        tally["{n} calls began with a context shorter than the last call left (it was compacted, or another agent's): "
              "nothing counts as observed before them"] += shrunk  # fmt: skip
    if any(turn.tool_s != turn.tool_s for turn in turns[:-1]):
        tally["{n} sessions have calls after which the seconds are not recorded"] += 1
    given = {key: row.values[key] for key in ("prompt_tokens", "arrival_s")}
    return given | {"step": 0, "turns": turns, "response_tokens": response_tokens(tuple(turns))}


def mooncake_sessions(path: Path, project: str) -> Iterator[Row]:
    """The sessions of an agentic Mooncake trace: of version 2, whose first row is a header, or before it."""
    first: dict[str, Row] = {}
    calls: dict[str, list[_Call]] = {}
    last: dict[str, str] = {}
    for row in file_rows(path, project):
        if row.values.get("version", 2) != 2:
            raise row.fail(f"agentic Mooncake of version {row.values['version']}; version 2 is read")
        if "schema" in row.values:
            continue
        name = "/".join(str(row.values[key]) for key in ("play_id", "session_id") if row.values.get(key) is not None)
        name = name or str(row.get("request_id"))
        if name in calls:
            calls[name][-1] = calls[name][-1]._replace(tool_s=_delay_s(row, last[name]))
        first.setdefault(name, row)
        call = _Call(row.whole("input_length", 1), max(1, row.whole("output_length")), nan)
        calls.setdefault(name, []).append(call)
        last[name] = str(row.get("request_id"))
    for name, row in first.items():
        waits = row.values.get("dependencies") or row.values.get("wait_for")
        at: Any = None if waits else row.values.get("not_before_ms", row.values.get("timestamp"))
        yield _session(row, name, calls[name], at * 1e-3 if is_number(at) else None)


def _delay_s(row: Row, before: str) -> float:
    """Seconds from the end of the session's call `before` to this one; NaN if it waits for anything else too."""
    if "dependencies" not in row.values:
        waits = row.items("wait_for") if row.values.get("wait_for") is not None else []
        given = [row.number(key) or 0.0 for key in ("delay", "tool_wait_ms") if key in row.values]
        return 1e-3 * sum(given) if [str(one) for one in waits] == [before] else nan
    dependencies = row.objects("dependencies")
    first = dependencies[0] if len(dependencies) == 1 else None
    if first is None or str(first.get("request_id")) != before or first.values.get("trigger") != "completion":
        return nan
    return 1e-3 * (first.number("delay_ms") or 0.0)


def weka_sessions(path: Path, project: str) -> Iterator[Row]:
    """The sessions of Weka's traces, an object each: its own calls, and those of every sub-agent."""
    for row in file_rows(path, project):
        name, entries = str(row.get("id")), row.objects("requests")
        agents = [one for one in entries if one.values.get("type") == "subagent"]
        own = [one for one in entries if one.values.get("type") != "subagent"]
        for session_name, timed in (
            (name, own),
            *((f"{name}/{a.get('agent_id')}", a.objects("requests")) for a in agents),
        ):
            calls = [_Call(c.whole("in", 1), max(1, c.whole("out")), nan) for c in timed]
            for i, (call, after) in enumerate(pairwise(timed)):
                times = (
                    call.number("t"),
                    call.number("api_time") if "api_time" in call.values else None,
                    after.number("t"),
                )
                if None not in times:
                    began, took, then = (float(one or 0.0) for one in times)
                    calls[i] = calls[i]._replace(tool_s=max(0.0, then - began - took))
            if calls:
                yield _session(row, session_name, calls, None)


# Texts ----------------------------------------------------------------------------------------------------------------


def texts_of(response: str) -> list[tuple[str, str, float | None]]:
    """What a response's text generated and observed, turn by turn; none if no tool's answer stands in it."""
    ends = [0, *(place for found in _OBSERVED.finditer(response) for place in found.span()), len(response)]
    texts = [response[a:b] for a, b in pairwise(ends)]
    if not texts[-1]:
        texts.pop()
    texts += [""] * (len(texts) % 2)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [(made, seen, None) for made, seen in pairs] if len(texts) > 2 else []


def verl(row: Row, tally: Tally) -> Fields:
    """Turns; and the group, the prompt's part of a uid `{sample}_{rollout}_{output}`, as trainer v1 writes it."""
    uid = row.values.get("uid")
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    group = parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else None
    return _turn_texts(row.values.get("output"), tally) | {"group": group, "correct": row.values.get("acc")}


def skyrl(row: Row, tally: Tally) -> Fields:
    """Turns, the step in the folder's name, and the reward, which may be one of each token."""
    step = re.search(r"global_step_(\d+)", str(row.file))
    score, reason = row.values.get("score"), row.values.get("stop_reason")
    return _turn_texts(row.values.get("output_response"), tally) | {
        "step": int(step[1]) if step else 0,
        "reward": sum(one for one in score if is_number(one)) if isinstance(score, list) else row.number("score"),
        "capped": reason == "length",
        "finish_reason": reason if reason in ("length", "stop") else None,
    }  # fmt: skip


def _turn_texts(response: Any, tally: Tally) -> dict[str, Any]:
    turns = texts_of(response) if isinstance(response, str) else []
    if turns:
        tally[NOT_TIMED] += 1
    return {"turn_texts": turns}


def rllm_rows(path: Path, project: str) -> Iterator[Row]:
    """A row for each trajectory of an episode, with the texts and seconds of its steps."""
    for row in file_rows(path, project):
        for one in row.objects("trajectories"):
            steps = [step.values for step in one.objects("steps")]
            if not steps:
                continue
            turns = [
                (_text(one.having(step).get("model_response")), _text(after.get("observation")), _environment_s(step))
                for step, after in zip(steps, [*steps[1:], {}], strict=True)
            ]
            yield one.having({
                "step": row.get("training_step"),
                "prompt": f"{row.get('task_hash')} {one.values.get('name')}",
                "prompt_text": _before_answer(one.objects("steps")[0]),
                "response": "".join(made for made, *_ in turns),
                "turn_texts": turns if len(turns) > 1 else [],
                "reward": one.values.get("reward"),
                "correct": row.values.get("is_correct"),
            })  # fmt: skip


def rllm(row: Row, _: Tally) -> Fields:
    """Turns, and whether the episode's answer was right."""
    return {key: row.values[key] for key in ("turn_texts", "correct")}


def _environment_s(step: Mapping[str, Any]) -> float | None:
    timing = step.get("timing")
    seconds: Any = timing.get("env_time") if isinstance(timing, dict) else None
    return float(seconds) if is_number(seconds) else None


def _before_answer(step: Row) -> str:
    """The messages before the first answer of a step, or what it observed where it has none."""
    texts = []
    for message in step.objects("chat_completions") if step.values.get("chat_completions") else ():
        if message.values.get("role") == "assistant":
            break
        texts.append(_text(message.values.get("content")))
    return "\n".join(texts) or _text(step.values.get("observation"))


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

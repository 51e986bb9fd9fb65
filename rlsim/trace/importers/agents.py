"""Trajectories of agents: recorded model calls of a session, and texts, become turns. data/layouts.yaml names these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

from rlsim.base.tables import number_of
from rlsim.trace.importers.dumps import Fields, Tally
from rlsim.trace.importers.rows import Row, file_rows, is_number
from rlsim.trace.turns import Agent, Turn, Turns, response_tokens

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
SHARED = (
    "{n} trajectories' seconds outside of generation are shared out evenly among their calls: no call is timed alone"
)
NOT_TIMED = "{n} trajectories have several turns; the seconds of their tools are not in the dump"


AGENTS = "{n} sub-agents, or calls beside others, work while the call that began them is waited for by the next"
APART = "{n} sub-agents, or calls beside others, that the next call does not wait for are trajectories of their own"
DISPATCHED = "{n} sub-agents began with the dispatch of a call: here with its end"
SHRUNK = (
    "{n} calls began with a context shorter than the last call left (it was compacted, or another agent's): nothing "
    "counts as observed before them"
)


class _Call(NamedTuple):
    """A model call of a session: its context and what it generated (tokens), and seconds until the next began."""

    context_tokens: int
    generated_tokens: int
    tool_s: float  # NaN: not recorded
    agents: tuple[Agent, ...] = ()  # that the next call waits for


class _Chain(NamedTuple):
    """Calls one after the other, and of those of a sub-agent the one that began it."""

    name: str
    calls: list[str]
    begun_by: str | None


def _turns_of(calls: Sequence[_Call], tally: Tally) -> Turns:
    """The turns of calls in their order: what a call's context has beyond the last one was observed."""
    observed = [b.context_tokens - a.context_tokens - a.generated_tokens for a, b in pairwise(calls)]
    tally[SHRUNK] += sum(one < 0 for one in observed)
    rows = zip(calls, [*observed, 0], strict=True)
    return tuple(Turn(c.generated_tokens, max(0, o), c.tool_s, c.agents) for c, o in rows)


def _session(row: Row, name: str, calls: Sequence[_Call], tally: Tally, arrival_s: float | None = None) -> Row:
    values = {"session": name, "prompt_tokens": calls[0].context_tokens, "turns": _turns_of(calls, tally),
              "arrival_s": arrival_s, "told": tally}  # fmt: skip
    return row.having(values, f", session {name}")


def session(row: Row, tally: Tally) -> Fields:
    """A session's turns and its length."""
    turns = row.values["turns"]
    tally.update(+row.values["told"])
    row.values["told"].clear()  # it is of the whole file
    if any(turn.tool_s != turn.tool_s for turn in turns[:-1]):
        tally["{n} sessions have calls after which the seconds are not recorded"] += 1
    given = {key: row.values[key] for key in ("prompt_tokens", "arrival_s")}
    return given | {"step": 0, "turns": turns, "response_tokens": response_tokens(turns)}


def mooncake_sessions(path: Path, project: str) -> Iterator[Row]:
    """The sessions of an agentic Mooncake trace: of version 2, whose first row is a header, or before it.

    A call that waits for one of its session which another already follows begins a chain beside it.
    """
    rows: dict[str, Row] = {}  # by call
    needs: dict[str, dict[str, float]] = {}  # of a call: after whom, and how many seconds after
    chains: list[_Chain] = []
    of_session: dict[str, list[_Chain]] = {}
    for row in file_rows(path, project):
        if row.values.get("version", 2) != 2:
            raise row.fail(f"agentic Mooncake of version {row.values['version']}; version 2 is read")
        if "schema" in row.values:
            continue
        play = str(row.values.get("play_id", ""))
        id_, waits = f"{play}/{row.get('request_id')}", _needs(row, play)
        name = "/".join(str(row.values[key]) for key in ("play_id", "session_id") if row.values.get(key) is not None)
        own = of_session.setdefault(name or id_, [])
        before = [chain for chain in own if any(one in chain.calls for one in waits)]
        follows = [chain for chain in before or own[:1] if not before or chain.calls[-1] in waits]
        if not follows:
            follows = [_Chain(f"{name or id_}#{len(own)}" if own else name or id_, [], next(reversed(waits), None))]
            own += follows
            chains += follows
        follows[-1].calls.append(id_)
        rows[id_], needs[id_] = row, waits
    agents: dict[str, list[Agent]] = {}  # by the call that begins them
    beside: dict[str, set[str]] = {}  # calls of these
    followed = {a: b for chain in chains for a, b in pairwise(chain.calls)}
    told, found = Tally(), list[Row]()
    for chain in reversed(chains):  # a sub-agent stands behind the one that begins it
        calls = list[_Call]()
        for id_ in chain.calls:
            waits = needs.get(followed.get(id_, ""), {})
            unknown = set(waits) - {id_} - beside.get(id_, set())
            tool_s = nan if unknown else waits.get(id_, 0.0 if id_ in agents else nan)
            sizes = rows[id_].whole("input_length", 1), max(1, rows[id_].whole("output_length"))
            calls.append(_Call(*sizes, tool_s, tuple(reversed(agents.get(id_, ())))))
        first, begun_by = chain.calls[0], chain.begun_by
        waits = needs.get(followed.get(begun_by or "", ""), {})
        if begun_by is not None and (told_s := [waits[id_] for id_ in chain.calls if id_ in waits]):
            calls[-1] = calls[-1]._replace(tool_s=told_s[-1])
            delay_s = needs[first][begun_by]
            told += Tally({AGENTS: 1, DISPATCHED: int(isnan(delay_s))})
            agent = Agent(calls[0].context_tokens, _turns_of(calls, told), 0.0 if isnan(delay_s) else delay_s)
            agents.setdefault(begun_by, []).append(agent)
            beside.setdefault(begun_by, set()).update(chain.calls)
            continue
        at: Any = None if needs[first] else rows[first].values.get("not_before_ms", rows[first].values.get("timestamp"))
        told[APART] += begun_by is not None
        found.append(_session(rows[first], chain.name, calls, told, at * 1e-3 if is_number(at) else None))
    yield from reversed(found)


def _needs(row: Row, play: str) -> dict[str, float]:
    """The calls that this one waits for, and how many seconds after their end it begins; NaN: after their dispatch."""
    if "dependencies" in row.values:
        return {
            f"{play}/{one.get('request_id')}":
                1e-3 * (one.number("delay_ms") or 0.0) if one.values.get("trigger") == "completion" else nan
            for one in row.objects("dependencies")
        }  # fmt: skip
    waits = row.items("wait_for") if row.values.get("wait_for") is not None else []
    given = [row.number(key) or 0.0 for key in ("delay", "tool_wait_ms") if key in row.values]
    return {f"{play}/{one}": 1e-3 * sum(given) for one in waits}


def weka_sessions(path: Path, project: str) -> Iterator[Row]:
    """The sessions of Weka's traces, an object each; sub-agents begin with the end of the call before them.

    `t` is when a call began and when a sub-agent ended.
    """
    for row in file_rows(path, project):
        name, own, agents = str(row.get("id")), list[Row](), dict[int, list[Row]]()
        for one in row.objects("requests"):
            if one.values.get("type") == "subagent":
                agents.setdefault(len(own) - 1, []).append(one)
            else:
                own.append(one)
        calls, told, found = _timed(own), Tally(), list[Row]()
        for i, beside in agents.items():
            waited = [one for one in beside if one.values.get("status") == "completed" and 0 <= i < len(own) - 1]
            last_s = max([one.number("t") or 0.0 for one in waited], default=0.0)
            for one in beside:
                its, end_s = _timed(one.objects("requests")), one.number("t") or 0.0
                if its and one in waited:
                    took_s = 1e-3 * (one.number("duration_ms") or 0.0) if "duration_ms" in one.values else inf
                    delay_s = end_s - took_s - (own[i].number("t") or 0.0) - (_api_s(own[i]) or 0.0)
                    rest_s = (own[i + 1].number("t") or 0.0) - end_s if end_s == last_s else 0.0
                    its[-1] = its[-1]._replace(tool_s=max(rest_s, 0.0))
                    agent = Agent(its[0].context_tokens, _turns_of(its, told), max(delay_s, 0.0))
                    calls[i] = calls[i]._replace(tool_s=0.0, agents=(*calls[i].agents, agent))
                elif its:
                    found.append(_session(row, f"{name}/{one.get('agent_id')}", its, told))
                told[AGENTS if one in waited else APART] += bool(its)
        if calls:
            found.insert(0, _session(row, name, calls, told))
        yield from found


def _timed(rows: Sequence[Row]) -> list[_Call]:
    """Calls with the seconds from the end of each to the beginning of the next."""
    calls = [_Call(row.whole("in", 1), max(1, row.whole("out")), nan) for row in rows]
    for i, (row, after) in enumerate(pairwise(rows)):
        times = row.number("t"), _api_s(row), after.number("t")
        if None not in times:
            began, took, then = (float(one or 0.0) for one in times)
            calls[i] = calls[i]._replace(tool_s=max(0.0, then - began - took))
    return calls


def _api_s(call: Row) -> float | None:
    return call.number("api_time") if "api_time" in call.values else None


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
        trajectories = row.objects("trajectories")
        for one in trajectories:
            steps = one.objects("steps")
            if not steps:
                continue
            rest_s = _rest_s(row.values.get("metrics"), sum(len(each.items("steps")) - 1 for each in trajectories))
            turns = [
                (*_step_texts(step, after), rest_s if (took_s := _environment_s(step.values)) is None else took_s)
                for step, after in zip(steps, [*steps[1:], one.having({})], strict=True)
            ]
            yield one.having({
                "step": row.get("training_step"),
                "prompt": f"{row.get('task_hash')} {one.values.get('name')}",
                "prompt_text": _before_answer(steps[0]),
                "response": "".join(made for made, *_ in turns),
                "turn_texts": turns if len(turns) > 1 else [],
                "reward": one.values.get("reward"),
                "correct": row.values.get("is_correct"),
                "shared": rest_s is not None and len(turns) > 1,
            })  # fmt: skip


def rllm(row: Row, tally: Tally) -> Fields:
    """Turns, and whether the episode's answer was right."""
    tally[SHARED] += row.values["shared"]
    return {key: row.values[key] for key in ("turn_texts", "correct")}


def _rest_s(metrics: Any, calls: int) -> float | None:
    """What an agent's flow took beside its model calls, for each of so many tool calls; None if that is not there."""
    found: Mapping[str, Any] = metrics if isinstance(metrics, dict) else {}
    took_s, model_s = (number_of(found.get(f"time/agentflow{of}_s")) for of in ("", "_llm_wall"))
    return max(took_s - model_s, 0.0) / calls if calls and isfinite(took_s - model_s) else None


def _messages(step: Row) -> list[Row]:
    return step.objects("chat_completions") if step.values.get("chat_completions") else []


def _step_texts(step: Row, after: Row) -> tuple[str, str]:
    """What a step generated and observed; of an agent's flow, whose steps say neither, by the messages of its calls."""
    made, seen = _text(step.get("model_response")), _text(after.values.get("observation"))
    chat, later = _messages(step), _messages(after)
    if step.values.get("observation") is None and chat:
        made = "".join([_text(step.values.get("thought")), made, _text(chat[-1].values.get("tool_calls"))])
        seen = seen or "\n".join(_text(message.values.get("content")) for message in later[len(chat) : -1])
    return made, seen


def _environment_s(step: Mapping[str, Any]) -> float | None:
    timing = step.get("timing")
    seconds: Any = timing.get("env_time") if isinstance(timing, dict) else None
    return float(seconds) if is_number(seconds) else None


def _before_answer(step: Row) -> str:
    """The messages before the first answer of a step, or what it observed where it has none."""
    texts = []
    for message in _messages(step):
        if message.values.get("role") == "assistant":
            break
        texts.append(_text(message.values.get("content")))
    return "\n".join(texts) or _text(step.values.get("observation"))


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""The turns of a trajectory: tokens that the model generates, then a tool call, whose observation follows them.

A response is all that follows the prompt, observations included (as veRL's response and its mask); it ends with tokens
that the model generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from math import inf, isfinite, isnan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.base.tables import parse_json
from rlsim.errors import TraceError
from rlsim.trace.mixture import icc_log
from rlsim.units import Seconds

#: What of the trajectory a cell of the column `turns` says: one mapping a turn.
FIELDS = ("generated_tokens", "observation_tokens", "tool_s", "agents")


class Turn(NamedTuple):
    """One turn. What is observed after the last one is not part of the response."""

    generated_tokens: int
    observation_tokens: int
    tool_s: float  # seconds in the environment after it; NaN: not recorded
    agents: tuple[Agent, ...] = ()  # that work meanwhile, and are waited for


class Agent(NamedTuple):
    """A sub-agent that a turn begins, with a context of its own; `tool_s` of its last turn is until that is told."""

    prompt_tokens: int
    turns: Turns
    delay_s: float = 0.0  # after the tool call began


class ToolCall(NamedTuple):
    """A trajectory leaves the batch with so many tokens of its response, and comes back with an observation more."""

    after_tokens: int
    observation_tokens: int
    tool_s: float
    agents: tuple[AgentCall, ...] = ()


class AgentCall(NamedTuple):
    """A sub-agent as it is generated."""

    prompt_tokens: int
    response_tokens: int
    tool_calls: tuple[ToolCall, ...] = ()
    delay_s: float = 0.0  # from the beginning of the tool call to its own
    told_s: float = 0.0  # from its end until the one that waits is told


Turns = tuple[Turn, ...]


def read_turns(value: Any) -> Turns | None:
    """The turns of a cell: a list of mappings, or its JSON; None if it is neither, or holds what cannot be."""
    try:
        rows = parse_json(value) if isinstance(value, str) else value
        turns = tuple(_turn(row) for row in rows)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        return None
    return turns or None


def _turn(row: Turn | Mapping[str, Any]) -> Turn:
    if isinstance(row, Turn):
        return row
    generated, observed = int(row["generated_tokens"]), int(row.get("observation_tokens") or 0)
    tool_s = float("nan") if row.get("tool_s") is None else float(row["tool_s"])
    if generated < 1 or observed < 0 or not (isnan(tool_s) or (isfinite(tool_s) and tool_s >= 0)):
        raise ValueError(row)
    agents = row.get("agents") or "[]"
    return Turn(
        generated, observed, tool_s, tuple(map(_agent, parse_json(agents) if isinstance(agents, str) else agents))
    )


def _agent(row: Mapping[str, Any]) -> Agent:
    prompt, turns, delay_s = int(row["prompt_tokens"]), read_turns(row["turns"]), float(row.get("delay_s") or 0.0)
    if prompt < 1 or turns is None or not 0 <= delay_s < inf:
        raise ValueError(row)
    return Agent(prompt, turns, delay_s)


def turns_of_mask(mask: Sequence[Any]) -> Turns | None:
    """The turns of a response under its mask: 1 for a token that the model generated, 0 for one that it observed.

    None if it has no more than one; what the mask leaves out before the first 1 counts as generated.
    """
    runs = [[bool(one), sum(1 for _ in run)] for one, run in groupby(mask, bool)]
    if len(runs) > 1 and not runs[0][0]:
        runs[1][1] += runs.pop(0)[1]
    lengths = [length for _, length in runs] + [0] * (len(runs) % 2)
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    return tuple(Turn(*pair, float("nan")) for pair in pairs) if len(runs) > 2 else None


def as_rows(turns: Turns | None) -> list[dict[str, Any]] | None:
    """A cell as it is written, sub-agents as JSON."""
    if turns is None:
        return None
    rows = []
    for *tokens, tool_s, agents in turns:
        row = dict(zip(FIELDS, (*tokens, None if isnan(tool_s) else tool_s), strict=False))
        own = [one._asdict() | {"turns": as_rows(one.turns)} for one in agents]
        rows.append(row | ({FIELDS[3]: json.dumps(own)} if own else {}))
    return rows


def as_json(turns: Turns | None) -> str | None:
    """The same as text, for files of text and digests."""
    return None if turns is None else json.dumps(as_rows(turns))


def response_tokens(turns: Turns) -> int:
    """Tokens that the model generated and those observed, but for what follows the last turn."""
    return sum(turn.generated_tokens + turn.observation_tokens for turn in turns) - turns[-1].observation_tokens


def tool_calls(
    turns: Turns, limit_tokens: int, most_turns: int | None, unknown_s: float, context_tokens: int = 0
) -> tuple[int, list[ToolCall]]:
    """The response's tokens and its tool calls, within `limit_tokens` and `most_turns` turns.

    Where an observation leaves no room for another token, the response ends before it. A tool call whose seconds are
    not recorded takes `unknown_s`. Sub-agents have `context_tokens` at most.
    """
    calls: list[ToolCall] = []
    ends = list(accumulate(turn.generated_tokens + turn.observation_tokens for turn in turns))
    for turn, end in zip(turns[: (most_turns or len(turns)) - 1], ends, strict=False):
        if end >= limit_tokens:
            break
        tool_s = unknown_s if isnan(turn.tool_s) else turn.tool_s
        agents = tuple(_agent_call(one, most_turns, unknown_s, context_tokens) for one in turn.agents)
        calls.append(ToolCall(end - turn.observation_tokens, turn.observation_tokens, tool_s, agents))
    begun = ends[len(calls) - 1] if calls else 0
    return min(begun + turns[len(calls)].generated_tokens, limit_tokens), calls


def _agent_call(agent: Agent, most_turns: int | None, unknown_s: float, context_tokens: int) -> AgentCall:
    prompt, told_s = min(agent.prompt_tokens, max(context_tokens - 1, 1)), agent.turns[-1].tool_s
    room = max(context_tokens - prompt, 1)
    length, calls = tool_calls(agent.turns, room, most_turns, unknown_s, context_tokens)
    return AgentCall(prompt, length, tuple(calls), agent.delay_s, 0.0 if isnan(told_s) else told_s)


def agents_of(turns: Turns | None) -> list[Agent]:
    """All its sub-agents, and theirs."""
    own = [agent for turn in turns or () for agent in turn.agents]
    return own + [one for agent in own for one in agents_of(agent.turns)]


def scale_turns(turns: Turns | None, factor: float) -> Turns | None:
    """All lengths of responses so many times as long."""
    return turns and tuple(
        Turn(
            max(round(generated * factor), 1),
            round(observed * factor),
            tool_s,
            tuple(agent._replace(turns=scale_turns(agent.turns, factor) or ()) for agent in agents),
        )
        for generated, observed, tool_s, agents in turns
    )


def recorded_s(cells: Sequence[Turns | None]) -> list[float]:
    """The seconds of all tool calls of which they are recorded."""
    return [turn.tool_s for turns in cells if turns for turn in turns[:-1] if not isnan(turn.tool_s)]


def unrecorded(cells: Sequence[Turns | None], default_s: float | None) -> tuple[float, float, str]:
    """The share of tool calls whose time is not recorded, the seconds that these are taken to have, and why."""
    known = recorded_s(cells)
    calls = sum(len(turns) - 1 for turns in cells if turns)
    share = (calls - len(known)) / calls if calls else 0.0
    if default_s is not None:
        return share, default_s, "as given"
    return (share, sum(known) / len(known), "the mean of the others") if known else (share, 0.0, "none is recorded")


#: A tool call that is shorter (s) counts as one that takes no time: loggers do not resolve it.
INSTANT_S = 0.05
_Z95 = 1.6448536269514722


class TurnModel(Schema):
    """Tool calls of a response whose length (observations included) is known; all spreads are of logarithms."""

    calls_median: float = Field(gt=0)
    calls_p95: float = Field(gt=0)
    length_correlation: float = Field(default=0.8, ge=-1, le=1)
    observed_share: float = Field(gt=0, lt=1)
    generated_sigma: float = Field(default=1.0, ge=0, le=5)
    observed_sigma: float = Field(default=1.5, ge=0, le=5)
    instant: float = Field(default=0.0, ge=0, le=1)
    call_s_median: Seconds = Field(default=1.0, gt=0)
    call_s_p95: Seconds = Field(default=10.0, gt=0)
    task_share: float = Field(default=0.3, ge=0, le=1)
    source: str = ""

    def draw(
        self, tokens: npt.NDArray[np.int64], prompt: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> list[Turns]:
        """Turns of responses of so many tokens to these prompts (codes from 0)."""
        logs = np.log(tokens)
        place = (logs - logs.mean()) / (logs.std() or 1.0)
        rho, spread = self.length_correlation, np.log(self.calls_p95 / self.calls_median) / _Z95
        normal = rho * place + np.sqrt(1 - rho**2) * rng.standard_normal(len(tokens))
        counts = np.rint(self.calls_median * np.exp(spread * normal)).astype(np.int64)
        of_task = rng.standard_normal(int(prompt.max()) + 1)
        return [
            self._turns(int(length), int(min(count, (length - 1) // 2)), float(of_task[task]), rng)
            for length, count, task in zip(tokens, counts, prompt, strict=True)
        ]

    def _turns(self, length: int, calls: int, of_task: float, rng: np.random.Generator) -> Turns:
        if not calls:
            return (Turn(length, 0, 0.0),)
        observed = min(round(self.observed_share * length), length - calls - 1)
        generated = 1 + _parts(length - observed - calls - 1, self.generated_sigma, calls + 1, rng)
        returned = _parts(observed, self.observed_sigma, calls, rng)
        normal = np.sqrt(self.task_share) * of_task + np.sqrt(1 - self.task_share) * rng.standard_normal(calls)
        seconds = self.call_s_median * np.exp(np.log(self.call_s_p95 / self.call_s_median) / _Z95 * normal)
        seconds = np.where(rng.random(calls) < self.instant, 0.0, np.round(seconds, 3))
        rows = zip(generated.tolist(), [*returned.tolist(), 0], [*seconds.tolist(), 0.0], strict=True)
        return tuple(Turn(*row) for row in rows)


def _parts(total: int, sigma: float, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` whole numbers of sum `total` whose sizes spread as a lognormal."""
    ends = np.cumsum(np.exp(sigma * rng.standard_normal(count)))
    return np.asarray(np.diff(np.floor(ends / ends[-1] * total + 1e-9).astype(np.int64), prepend=0))


def fit_turns(
    name: str, turns: Sequence[Turns | None], tokens: npt.NDArray[np.int64], prompt: npt.NDArray[np.int64]
) -> TurnModel:
    """The model of the trajectories among the responses of the trace `name`: turns, tokens and code of the prompt.

    Raises `TraceError` if fewer than 10 of them call tools.
    """
    cells = [cell for cell in turns if cell]
    acting = [turns for turns in cells if len(turns) > 1]
    if len(acting) < 10:
        raise TraceError(f"{name}: {len(acting)} responses call tools; 10 or more are needed for a fit")
    there = np.array([bool(cell) for cell in turns])
    lengths = tokens[there].astype(np.float64)
    calls = np.array([len(turns) - 1 for turns in cells], np.float64)
    observed = [turn.observation_tokens for turns in acting for turn in turns[:-1]]
    codes = np.repeat(prompt[there], calls.astype(np.int64))
    call_s = np.array([turn.tool_s for turns in cells for turn in turns[:-1]])
    known, lasting = ~np.isnan(call_s), call_s > INSTANT_S
    more: dict[str, Any] = {}
    if lasting.any():
        found = np.quantile(call_s[lasting], [0.5, 0.95])
        _, task = np.unique(codes[lasting], return_inverse=True)
        share = icc_log(call_s[lasting], task)
        more = {
            "instant": float((known & ~lasting).sum() / known.sum()),
            "call_s_median": float(found[0]), "call_s_p95": float(max(found[1], found[0])),
            "task_share": float(np.clip(share or 0.0, 0.0, 1.0)),
        }  # fmt: skip
    median, p95 = np.quantile(calls, [0.5, 0.95])
    correlation = np.corrcoef(np.log(np.maximum(calls, 0.5)), np.log(lengths))[0, 1] if calls.std() else 0.0
    values = {
        "calls_median": float(max(median, 0.5)), "calls_p95": float(max(p95, median, 0.5)),
        "length_correlation": float(correlation), "observed_share": float(sum(observed) / lengths.sum()),
        "generated_sigma": _spread([turn.generated_tokens for turns in acting for turn in turns]),
        "observed_sigma": _spread(observed), **more,
    }  # fmt: skip
    return TurnModel(**{name: round(value, 4) for name, value in values.items()})


def _spread(tokens: list[int]) -> float:
    return float(min(np.log(np.maximum(tokens, 1)).std(), 5.0))

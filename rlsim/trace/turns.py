"""The turns of a trajectory: tokens that the model generates, then a tool call, whose observation follows them.

A response is all that follows the prompt, observations included (as veRL's response and its mask); it ends with tokens
that the model generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from math import isfinite, isnan
from typing import Any, NamedTuple

from rlsim.base.tables import parse_json

#: What of the trajectory a cell of the column `turns` says: one mapping a turn.
FIELDS = ("generated_tokens", "observation_tokens", "tool_s")


class Turn(NamedTuple):
    """One turn. What is observed after the last one is not part of the response."""

    generated_tokens: int
    observation_tokens: int
    tool_s: float  # seconds in the environment after it; NaN: not recorded


class ToolCall(NamedTuple):
    """A trajectory leaves the batch with so many tokens of its response, and comes back with an observation more."""

    after_tokens: int
    observation_tokens: int
    tool_s: float


Turns = tuple[Turn, ...]


def read_turns(value: Any) -> Turns | None:
    """The turns of a cell: a list of mappings, or its JSON; None if it is neither, or holds what cannot be."""
    try:
        rows = parse_json(value) if isinstance(value, str) else value
        turns = tuple(_turn(row) for row in rows)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    return turns or None


def _turn(row: Turn | Mapping[str, Any]) -> Turn:
    if isinstance(row, Turn):
        return row
    generated, observed = int(row["generated_tokens"]), int(row.get("observation_tokens") or 0)
    tool_s = float("nan") if row.get("tool_s") is None else float(row["tool_s"])
    if generated < 1 or observed < 0 or not (isnan(tool_s) or (isfinite(tool_s) and tool_s >= 0)):
        raise ValueError(row)
    return Turn(generated, observed, tool_s)


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
    """A cell as it is written."""
    if turns is None:
        return None
    return [turn._asdict() | {"tool_s": None if isnan(turn.tool_s) else turn.tool_s} for turn in turns]


def as_json(turns: Turns | None) -> str | None:
    """The same as text, for files of text and digests."""
    return None if turns is None else json.dumps(as_rows(turns))


def response_tokens(turns: Turns) -> int:
    """Tokens that the model generated and those observed, but for what follows the last turn."""
    return sum(turn.generated_tokens + turn.observation_tokens for turn in turns) - turns[-1].observation_tokens


def tool_calls(turns: Turns, limit_tokens: int, most_turns: int | None, unknown_s: float) -> tuple[int, list[ToolCall]]:
    """The response's tokens and its tool calls, within `limit_tokens` and `most_turns` turns.

    Where an observation leaves no room for another token, the response ends before it. A tool call whose seconds are
    not recorded takes `unknown_s`.
    """
    calls: list[ToolCall] = []
    ends = list(accumulate(turn.generated_tokens + turn.observation_tokens for turn in turns))
    for turn, end in zip(turns[: (most_turns or len(turns)) - 1], ends, strict=False):
        if end >= limit_tokens:
            break
        tool_s = unknown_s if isnan(turn.tool_s) else turn.tool_s
        calls.append(ToolCall(end - turn.observation_tokens, turn.observation_tokens, tool_s))
    begun = ends[len(calls) - 1] if calls else 0
    return min(begun + turns[len(calls)].generated_tokens, limit_tokens), calls


def scale_turns(turns: Turns | None, factor: float) -> Turns | None:
    """All lengths so many times as long."""
    return turns and tuple(
        Turn(max(round(t.generated_tokens * factor), 1), round(t.observation_tokens * factor), t.tool_s) for t in turns
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

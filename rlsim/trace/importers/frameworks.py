"""What takes more than one key of a row of a framework's dump: functions that data/layouts.yaml names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsim.base.tables import parse_json
from rlsim.errors import TraceError
from rlsim.trace.importers import agents
from rlsim.trace.importers.dumps import Fields, Tally
from rlsim.trace.importers.rows import Row, file_rows, is_number
from rlsim.trace.importers.safe_pickle import load_torch
from rlsim.trace.turns import Turns, response_tokens, turns_of_mask

# TRL ------------------------------------------------------------------------------------------------------------------

_TRL_FIXED = ("step", "prompt", "completion", "advantage", "image", "images")


def trl(row: Row, tally: Tally) -> Fields:
    """The reward, or the value of the only reward function; of several the weights are not known."""
    if "reward" in row.values:
        return {"reward": row.number("reward")}
    others = {key: value for key, value in row.values.items() if key not in _TRL_FIXED}
    found = [key for key, value in others.items() if is_number(value) or value is None]
    if len(found) > 1:
        tally[f"several columns may be rewards, their weights are not logged ({', '.join(found)}): the reward is left "
              "out; --column reward=NAME takes one"] += 1  # fmt: skip
    return {"reward": row.number(found[0]) if len(found) == 1 else None}


# NeMo-RL --------------------------------------------------------------------------------------------------------------


def nemo_rows(path: Path, project: str) -> Iterator[Row]:
    """Rows with the one element of the list that the logger makes of every value but idx."""
    for row in file_rows(path, project):
        for key, value in row.values.items():
            if key != "idx" and isinstance(value, list) and len(value) != 1:
                raise row.fail(f"{key} should be a list of one element, as NeMo-RL logs it (got {len(value)})")
        yield row.having({k: v[0] if k != "idx" and isinstance(v, list) else v for k, v in row.values.items()})


def nemo(row: Row, tally: Tally) -> Fields:
    """Lengths under the loss mask, or before 0.6 from the first log-prob of generation on."""
    total = row.whole("input_lengths", 1)
    if "token_loss_mask" in row.values:
        mask = _nemo_numbers(row, "token_loss_mask", total)
        ids = _nemo_numbers(row, "token_ids", total) if "token_ids" in row.values else None
        first = next((i for i, one in enumerate(mask) if one), total)
        turns, generated = _turns(mask[first:total], tally)
    else:
        logprobs, ids = _nemo_numbers(row, "generation_logprobs", total), None
        first = next((i for i, one in enumerate(logprobs) if one), total)
        turns, generated = None, total - first
        tally["{n} responses without token_loss_mask (before 0.6): taken to begin at the first generation_logprobs "
              "that is not 0, and to reach to the end, tools included"] += 1  # fmt: skip
    step = re.search(r"step_?(\d+)", row.file.name)
    return {
        "step": int(step[1]) if step else 0,
        "prompt": _nemo_prompt(row) if ids is None else " ".join(map(str, ids[:first])),
        "prompt_tokens": first or None,
        "response_tokens": generated,
        "turns": turns,
    }


def _turns(mask: Sequence[Any], tally: Tally, tools_s: Any = None) -> tuple[Turns | None, int]:
    """The turns under a response's mask, if there are several, and the response's tokens.

    `tools_s`: the seconds of all tool calls together, if known and not 0.
    """
    turns = turns_of_mask(mask)
    if turns and is_number(tools_s) and tools_s:
        turns = tuple(turn._replace(tool_s=tools_s / (len(turns) - 1)) for turn in turns)
        tally[agents.SHARED] += 1
    elif turns:
        tally[agents.NOT_TIMED] += 1
    return turns, response_tokens(turns) if turns else sum(1 for one in mask if one)


def _nemo_numbers(row: Row, key: str, count: int) -> list[float]:
    values = row.items(key)
    if len(values) < count:
        raise row.fail(f"{key} has {len(values)} elements, fewer than input_lengths {count}")
    if not all(is_number(one) for one in values[:count]):
        raise row.fail(f"{key} should be a list of numbers")
    return values[:count]


def _nemo_prompt(row: Row) -> str | None:
    """The messages before the first answer: of an even number the first (user), of an odd one two (system, user)."""
    messages = row.values.get("content")
    if not isinstance(messages, list) or len(messages) < 2:
        return None
    return repr(messages[: 1 + len(messages) % 2])


# ROLL -----------------------------------------------------------------------------------------------------------------


def roll_rows(path: Path, project: str) -> Iterator[Row]:
    """Rows of one response each, of lines that hold a step with a list per column."""
    for row in file_rows(path, project):
        count = len(row.items("responses"))
        for key, value in row.values.items():
            if not isinstance(value, list) or len(value) != count:
                raise row.fail(f"{key} should be a list of {count} elements, one per response, as ROLL dumps a step")
        for i in range(count):
            yield row.having({key: value[i] for key, value in row.values.items()}, f", response {i + 1}")


def roll(row: Row, tally: Tally) -> Fields:
    """The prompt, which may be messages; the task; and the cap, which is only told."""
    try:
        settings: Any = parse_json(row.text("sampling_params"))
    except ValueError:
        settings = None
    config = settings.get("generation_config") if isinstance(settings, dict) else None
    cap = config.get("max_new_tokens") if isinstance(config, dict) else None
    if isinstance(cap, int):
        tally[f"{{n}} responses were sampled under max_new_tokens {cap}: --cap {cap} marks those that reach it"] += 1
    texts = {key: _roll_text(row.values.get(key)) for key in ("prompt", "messages", "domain", "tag")}
    return {
        "prompt": texts["prompt"] or texts["messages"],
        "prompt_text": texts["prompt"],
        "task": texts["domain"] or texts["tag"],
    }


def _roll_text(value: Any) -> str | None:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return None if value is None else str(value) or None


def roll_board(row: Row, _: Tally) -> Fields:
    """The length under the response's mask."""
    mask = row.items("new_response_mask")
    if not all(isinstance(one, bool) or is_number(one) for one in mask):
        raise row.fail("new_response_mask should be a list of 0 and 1")
    length, padded = sum(1 for one in mask if one), len(row.items("response_tokens"))
    if length > padded:
        raise row.fail(f"new_response_mask counts {length} tokens, but response_tokens has {padded}")
    return {"response_tokens": length}


# slime ----------------------------------------------------------------------------------------------------------------

_STATUS = ("pending", "completed", "truncated", "aborted", "failed")


def slime_rows(path: Path, project: str) -> Iterator[Row]:
    """The samples of a rollout, with its number as their step; `load_torch` runs nothing."""
    loaded = load_torch(path)
    if not isinstance(loaded, dict) or not {"rollout_id", "samples"} <= set(loaded):
        got = f"a {type(loaded).__name__}"
        got += f" with {', '.join(map(str, loaded))[:200]}" if isinstance(loaded, dict) else ""
        raise TraceError(f"{path}: not a rollout of slime, a dictionary with rollout_id and samples (got {got})")
    samples = loaded["samples"]
    if not isinstance(samples, list) or not samples:
        raise TraceError(f"{path}: samples should be a list of samples, at least one")
    for number, sample in enumerate(samples, 1):
        if not isinstance(sample, dict):
            raise TraceError(f"{path}: sample {number}: expected a dictionary, as Sample.to_dict() gives")
        yield Row(path, f"sample {number}", {**sample, "_step": loaded["rollout_id"]}, project)


def slime(row: Row, tally: Tally) -> Fields | None:
    """Everything about a completed or truncated sample; others are left out."""
    status = row.text("status")
    if status not in _STATUS:
        raise row.fail(f"status should be one of {', '.join(_STATUS)} (got {status!r})")
    length = row.whole("response_length")
    if status not in ("completed", "truncated"):
        tally[f"{{n}} samples that are {status} are left out"] += 1
        return None
    tokens, prompt = row.get("tokens"), row.values.get("prompt")
    total = len(tokens) if hasattr(tokens, "__len__") else 0
    if total and total < length:
        raise row.fail(f"response_length {length} is more than the {total} tokens")
    reward, correct = _slime_reward(row, tally)
    mask: Any = row.values.get("loss_mask")
    masked = isinstance(mask, list) and len(mask) == length and any(mask)
    turns, generated = _turns(mask, tally, row.values.get("non_generation_time")) if masked else (None, length)
    versions = row.values.get("weight_versions")
    if isinstance(versions, list) and len(set(map(str, versions))) > 1:
        tally["{n} responses were generated by more than one version of the weights"] += 1
    return {
        "prompt": None if not prompt else prompt if isinstance(prompt, str) else repr(prompt),
        "group": row.values.get("group_index"),
        "prompt_tokens": total - length if total > length else None,
        "response_tokens": generated,
        "turns": turns,
        "reward": reward,
        "correct": correct,
        "capped": status == "truncated",
        "finish_reason": "length" if status == "truncated" else "stop",
    }


def _slime_reward(row: Row, tally: Tally) -> tuple[float | None, Any]:
    """The reward, and where it is a dictionary (DAPO's has score and acc) those."""
    reward = row.get("reward")
    if not isinstance(reward, dict):
        return row.number("reward"), None
    score = reward.get("score")
    if not is_number(score):
        tally[f"{{n}} rewards are dictionaries without score ({', '.join(map(str, reward))}): left out"] += 1
        score = None
    return score, reward.get("acc")


# AReaL ----------------------------------------------------------------------------------------------------------------


def areal(row: Row, tally: Tally) -> Fields:
    """Lengths, and the newest version of the weights as the step."""
    total, prompt = row.whole("seqlen", 1), row.whole("prompt_len")
    if prompt >= total:
        raise row.fail(f"prompt_len {prompt} leaves nothing of seqlen {total} for the response")
    head, tail = row.whole("head_version", -1), row.whole("tail_version", -1)
    if tail > head:
        tally["{n} responses are of tasks that more than one version of the weights generated"] += 1
    return {"step": tail, "prompt_tokens": prompt or None, "response_tokens": total - prompt}

"""NeMo-RL's training data: `train_data_step<N>.jsonl` in the logger's folder, one line per response.

Read from NVIDIA-NeMo/RL at 7ea279a and v0.3.0 to v0.7.0: `nemo_rl/algorithms/grpo.py` and `grpo_sync.py` write
content, rewards, input_lengths, generation_logprobs and prev_logprobs, since v0.6.0 also token_ids, token_loss_mask,
sample_loss_mask and advantages, through `nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`), which makes every
value a list of one and adds idx. `val_data_step<N>.jsonl` has content and rewards alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsim.trace.importers.collect import Response
from rlsim.trace.importers.dumps import NOT_TOLD, Dump
from rlsim.trace.importers.rows import Row, is_number

_TURNS = "{n} responses have several turns: what was generated in them is added up, tokens of tools are left out"


def _read(packed: Row, tally: Counter[str]) -> Iterator[tuple[Response, Row]]:
    row = packed.having({key: _only(packed, key, value) for key, value in packed.values.items()})
    total = row.whole("input_lengths", 1)
    reward = row.number("rewards")
    if "token_loss_mask" in row.values:
        mask = _numbers(row, "token_loss_mask", total)
        ids = _numbers(row, "token_ids", total) if "token_ids" in row.values else None
        first = next((i for i, one in enumerate(mask) if one), total)
        generated = sum(1 for one in mask if one)
        if first < total and generated < total - first and any(mask[first + generated :]):
            tally[_TURNS] += 1
    else:
        logprobs, ids = _numbers(row, "generation_logprobs", total), None
        first = next((i for i, one in enumerate(logprobs) if one), total)
        generated = total - first
        tally["{n} responses without token_loss_mask (before 0.6): taken to begin at the first generation_logprobs "
              "that is not 0, and to reach to the end, tools included"] += 1  # fmt: skip
    prompt = _prompt(row) if ids is None else " ".join(map(str, ids[:first]))
    yield (
        Response(step=_step(row.file), prompt=prompt, prompt_tokens=first or None, response_tokens=generated,
                 reward=reward),
        row,
    )  # fmt: skip


def _only(row: Row, key: str, value: Any) -> Any:
    """The one element of the list that the logger makes of every value but idx."""
    if key == "idx" or not isinstance(value, list):
        return value
    if len(value) != 1:
        raise row.fail(f"{key} should be a list of one element, as NeMo-RL logs it (got {len(value)})")
    return value[0]


def _numbers(row: Row, key: str, least: int) -> list[float]:
    values = row.items(key)
    if len(values) < least:
        raise row.fail(f"{key} has {len(values)} elements, fewer than input_lengths {least}")
    cut = values[:least]
    if not all(is_number(one) for one in cut):
        raise row.fail(f"{key} should be a list of numbers")
    return cut


def _prompt(row: Row) -> str | None:
    """The messages before the first answer: of an even number the first (user), of an odd one two (system, user)."""
    messages = row.values.get("content")
    if not isinstance(messages, list) or len(messages) < 2:
        return None
    return repr(messages[: 1 + len(messages) % 2])


def _step(file: Path) -> int:
    found = re.search(r"step_?(\d+)", file.name)
    return int(found[1]) if found else 0


_PROJECT = "NeMo-RL's training data"
DUMPS = (
    Dump("nemo-rl", _PROJECT, ("input_lengths", "rewards", "token_loss_mask", "idx"), _read, (NOT_TOLD,)),
    Dump("nemo-rl", _PROJECT, ("input_lengths", "rewards", "generation_logprobs", "idx"), _read, (NOT_TOLD,)),
    Dump(
        "nemo-rl",
        "NeMo-RL's validation data",
        ("content", "rewards", "idx"),
        refused="NeMo-RL's validation data (val_data_step<N>.jsonl) holds messages and rewards and no lengths; import "
        "train_data_step<N>.jsonl",
    ),
)  # fmt: skip

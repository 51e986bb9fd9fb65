"""ROLL's dumps: `rollout_dump_dir` of RLVR pipelines, and `save_logging_board_dir`.

Read from alibaba/ROLL at 8eb27cc (0.3.0). `roll/pipeline/rlvr/utils.py` writes `rollout_dump_data.step_<N>.jsonl`, one
line per step with a list per column: global_step, responses, scores, sampling_params and what the data set has of id,
source, difficulty, prompt, messages, ground_truth, tag, domain; responses are decoded without special tokens.
`roll/pipeline/rlvr/rlvr_pipeline.py` writes `data_<time>.jsonl`, one line per response with prompt, response,
response_tokens (the tokens as text, padded), new_response_mask, logprobs, reward and step. Agentic pipelines dump
trajectory_data, messages, tools and exp_name: of lengths only means over a trajectory's steps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlsim.tables import parse_json
from rlsim.trace.importers.collect import Response
from rlsim.trace.importers.dumps import NOT_TOLD, Dump
from rlsim.trace.importers.rows import Row, is_number


def _read_rollout(row: Row, tally: Counter[str]) -> Iterator[tuple[Response, Row]]:
    count = len(row.items("responses"))
    for key, value in row.values.items():
        if not isinstance(value, list) or len(value) != count:
            raise row.fail(f"{key} should be a list of {count} elements, one per response, as ROLL dumps a step")
    for i in range(count):
        one = row.having({key: value[i] for key, value in row.values.items()}, f", response {i + 1}")
        prompt = _text(one.values.get("prompt"))
        cap = _cap(one)
        if cap is not None:
            tally[
                f"{{n}} responses were sampled under max_new_tokens {cap}: --cap {cap} marks those that reach it"
            ] += 1
        yield (
            Response(
                step=one.whole("global_step"),
                prompt=prompt or _text(one.values.get("messages")),
                prompt_text=prompt,
                response_text=one.text("responses"),
                reward=one.number("scores"),
                task=_text(one.values.get("domain")) or _text(one.values.get("tag")),
            ),
            one,
        )


def _cap(row: Row) -> int | None:
    try:
        settings: Any = parse_json(row.text("sampling_params"))
    except ValueError:
        return None
    config = settings.get("generation_config") if isinstance(settings, dict) else None
    cap = config.get("max_new_tokens") if isinstance(config, dict) else None
    return cap if isinstance(cap, int) else None


def _text(value: Any) -> str | None:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return None if value is None else str(value) or None


def _read_board(row: Row, _: Counter[str]) -> Iterator[tuple[Response, Row]]:
    mask = row.items("new_response_mask")
    if not all(isinstance(one, bool) or is_number(one) for one in mask):
        raise row.fail("new_response_mask should be a list of 0 and 1")
    length = sum(1 for one in mask if one)
    padded = len(row.items("response_tokens"))
    if length > padded:
        raise row.fail(f"new_response_mask counts {length} tokens, but response_tokens has {padded}")
    yield (
        Response(
            step=row.whole("step"), prompt=row.text("prompt"), response_tokens=length, reward=row.number("reward")
        ),
        row,
    )


DUMPS = (
    Dump(
        "roll",
        "ROLL's rollout dump",
        ("global_step", "responses", "scores", "sampling_params"),
        _read_rollout,
        ("prompt lengths are those of the data set's prompt, without what a chat template adds",
         NOT_TOLD),
        texts=True,
    ),
    Dump(
        "roll",
        "ROLL's logging board",
        ("new_response_mask", "response_tokens", "logprobs", "reward", "step"),
        _read_board,
        ("prompts are dumped with their padding: their lengths are left out",),
    ),
    Dump(
        "roll",
        "ROLL's dump of agentic trajectories",
        ("trajectory_data", "messages", "tools", "exp_name"),
        refused="ROLL's dump of agentic trajectories keeps no length of a response, only means over the steps of a "
        "trajectory (length_info); there is no trace in it",
    ),
)  # fmt: skip

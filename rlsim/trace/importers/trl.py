"""TRL's completions (`log_completions=True` of GRPO and RLOO): `completions/completions_<step>.parquet`, or the table.

Read from huggingface/trl, `trl/trainer/grpo_trainer.py` and `rloo_trainer.py` at f2cd577 (1.10.0.dev0), v1.0.0 and
v0.15.0 to v0.26.0: step (text until 0.26), prompt, completion, one column per reward function under its name, columns
of `log_extra`, and advantage (since 0.19); 0.15 had reward. Texts are decoded without special tokens. The
table is that of the last batch generated, so that a batch which serves several steps is written with each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlsim.trace.importers.collect import Response
from rlsim.trace.importers.dumps import NOT_TOLD, Dump
from rlsim.trace.importers.rows import Row, is_number

_FIXED = ("step", "prompt", "completion", "advantage", "image", "images")


def _read(row: Row, tally: Counter[str]) -> Iterator[tuple[Response, Row]]:
    prompt = row.text("prompt")
    step = row.get("step")
    if isinstance(step, str) and step.isdigit():
        row = row.having({**row.values, "step": int(step)})
    yield (
        Response(
            step=row.whole("step"),
            prompt=prompt,
            prompt_text=prompt,
            response_text=row.text("completion"),
            reward=_reward(row, tally),
        ),
        row,
    )


def _reward(row: Row, tally: Counter[str]) -> float | None:
    """The reward, or the value of the only reward function; of several the weights are not known."""
    if "reward" in row.values:
        return row.number("reward")
    others = {key: value for key, value in row.values.items() if key not in _FIXED}
    found = [key for key, value in others.items() if is_number(value) or value is None]
    if len(found) > 1:
        tally[f"several columns may be rewards, their weights are not logged ({', '.join(found)}): the reward is left "
              "out; --column reward=NAME takes one"] += 1  # fmt: skip
        return None
    return row.number(found[0]) if found else None


DUMPS = (
    Dump(
        "trl",
        "TRL's table of completions",
        ("step", "prompt", "completion"),
        _read,
        (NOT_TOLD,
         "TRL writes the last batch before each logging: with logging_steps above 1 steps are missing"),
        texts=True,
        repeats=True,
    ),
)  # fmt: skip

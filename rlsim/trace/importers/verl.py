"""veRL's dumps of generations: `trainer.rollout_data_dir` (and `validation_data_dir`), a file `<step>.jsonl` each.

Read from verl-project/verl, `verl/trainer/ppo/ray_trainer.py` (`_dump_generations`, `_write_generations`) and
`verl/trainer/ppo/v1/trainer_base.py` at 1dda039 (0.10.0.dev), and v0.4.0 to v0.7.0, where `gts` came with 0.5. Every
row has input, output, score and step; gts, request_id or uid, and whatever the reward function returned (acc of the
DAPO and naive reward managers) may stand beside them. Texts are decoded without special tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlsim.trace.importers.collect import Response
from rlsim.trace.importers.dumps import NOT_TOLD, Dump
from rlsim.trace.importers.rows import Row


def _read(row: Row, _: Counter[str]) -> Iterator[tuple[Response, Row]]:
    prompt = row.text("input")
    yield (
        Response(
            step=row.whole("step"),
            prompt=prompt,
            group=_sample(row),
            prompt_text=prompt,
            response_text=row.text("output"),
            reward=row.number("score"),
            correct=row.values.get("acc"),
        ),
        row,
    )


def _sample(row: Row) -> str | None:
    """The prompt's part of a uid `{sample}_{rollout}_{output}`, as trainer v1 writes it."""
    uid = row.values.get("uid")
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    return parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else None


DUMPS = (
    Dump(
        "verl",
        "veRL's dump of generations",
        ("input", "output", "score", "step"),
        _read,
        (NOT_TOLD,
         "of several turns the text of tools stands between, and counts"),
        texts=True,
    ),
)  # fmt: skip

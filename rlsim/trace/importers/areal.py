"""AReaL's trajectory dumps, joined with the times of its session traces, which hold no lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rlsim.trace.importers.dumps import Dump, Fields, Tally
from rlsim.trace.importers.rows import Row, file_rows


def areal(row: Row, tally: Tally) -> Fields:
    """Lengths, and the newest version of the weights as the step."""
    total, prompt = row.whole("seqlen", 1), row.whole("prompt_len")
    if prompt >= total:
        raise row.fail(f"prompt_len {prompt} leaves nothing of seqlen {total} for the response")
    head, tail = row.whole("head_version", -1), row.whole("tail_version", -1)
    if tail > head:
        tally["{n} responses are of tasks that more than one version of the weights generated"] += 1
    return {"step": tail, "prompt_tokens": prompt or None, "response_tokens": total - prompt}


def trial_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The trajectory dumps and session traces of a trial's folder, `…/logs/USER/EXPERIMENT/TRIAL`."""
    parts = ("rollout", "session_tracer")
    dumps, sessions = (sorted((folder / part).rglob("*.jsonl")) if (folder / part).is_dir() else [] for part in parts)
    return dumps, sessions


def with_sessions(dump: Dump, files: Sequence[Path]) -> tuple[Dump, Callable[[pd.DataFrame, list[str]], pd.DataFrame]]:
    """`dump` for reading a trial's trajectories, and what joins the times of the session traces `files` to them.

    That gives arrival_s, and reward_time_s where a task has one session for each of its samples: sessions start in
    the order of the samples. Ranks number their tasks alike; with several nothing is joined, and a note says so.
    """
    keys: list[tuple[int, int]] = []

    def more(row: Row, tally: Tally) -> Fields:
        fields = areal(row, tally)
        keys.append((row.whole("task_id"), row.whole("sample_idx")))
        return fields

    def join(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
        sessions, ranks = _sessions(files)
        if ranks > 1:
            notes.append(f"session traces of {ranks} ranks, which number their tasks alike: times are not joined")
            return frame
        sizes = Counter(task for task, _ in keys)
        first = min(one[0].submit_at for one in sessions.values())
        arrival: list[float | None] = []
        reward: list[float | None] = []
        for task, sample in keys:
            of_task = sessions.get(task, [])
            own = of_task[sample] if len(of_task) == sizes[task] > sample else None
            any_of = own or (of_task[0] if of_task else None)
            arrival.append(any_of.submit_at - first if any_of else None)
            reward.append(own.reward_s if own else None)
        known = [sum(value is not None for value in values) for values in (arrival, reward)]
        notes.append(f"session traces give the arrival of {known[0]:,} responses and the reward time of {known[1]:,}")
        columns = {"arrival_s": arrival, "reward_time_s": reward}
        return frame.assign(**{name: pd.Series(v, dtype=object) for name, v in columns.items() if name not in frame})

    return replace(dump, more=more), join


class _Session(NamedTuple):
    session: int
    submit_at: float
    reward_s: float | None


def _sessions(files: Sequence[Path]) -> tuple[dict[int, list[_Session]], int]:
    """The sessions of every task in the order they started, and how many ranks they are of."""
    sessions: dict[int, list[_Session]] = {}
    ranks = set()
    for file in files:
        for row in file_rows(file, "AReaL's session trace"):
            reward_s = row.number("reward_s") if "reward_s" in row.values else None
            submit_at = row.number("submit_ts")
            if submit_at is None:
                raise row.fail("submit_ts should be a number (got null)")
            one = _Session(row.whole("session_id"), submit_at, reward_s)
            sessions.setdefault(row.whole("task_id"), []).append(one)
            ranks.add((str(row.values.get("role")), row.whole("rank")))
    for found in sessions.values():
        found.sort(key=lambda one: one.session)
    return sessions, len(ranks)

"""What a trace looks like, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.trace.mixture import icc_log, straggling_groups, within_sd_log
from rlsim.trace.schema import Trace
from rlsim.trace.turns import agents_of, recorded_s

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def describe(trace: Trace, cap_tokens: int | None = None, above: Sequence[int] = ()) -> dict[str, Any]:
    """The numbers of `trace`, with lengths cut at `cap_tokens` (default: as they are) and shares above lengths.

    `name`, `source`, `notes`, and `parts`: the whole, then each task and each epoch if there are several. What a part
    does not know is None, or missing where no part knows it.
    """
    notes = list(trace.meta.notes)
    own = trace.meta.cap_tokens
    if cap_tokens is not None and bool((trace.capped & (trace.response_tokens < cap_tokens)).any()):
        notes.append(f"the cap of {cap_tokens} tokens is above the trace's own ({own}): lengths there are not known")
    frame = trace.frame.assign(code=trace.prompt_codes()[0])
    parts = [_summary("all", frame, cap_tokens, own, above)]
    for column in ("task", "epoch"):
        if column in frame and frame[column].nunique() > 1:
            groups: Any = frame.groupby(column, sort=True)
            parts += [_summary(f"{column} {value}", rows, cap_tokens, own, above) for value, rows in groups]
    every = dict.fromkeys(name for part in parts for name in part)
    parts = [every | part for part in parts]
    return {"name": trace.meta.name, "source": trace.meta.source, "notes": notes, "parts": parts}


def _summary(part: str, frame: pd.DataFrame, cap: int | None, own: int | None, above: Sequence[int]) -> dict[str, Any]:
    """The numbers of a trace, or of one task or epoch in it (`part`). Lengths in tokens, cut at the cap if one is
    given; the correlations are intra-prompt ones of logarithms, stragglers responses in the longest 1%."""
    full = frame["response_tokens"].to_numpy(np.int64)
    tokens = full if cap is None else np.minimum(full, cap)
    cut = frame["capped"].to_numpy(np.bool_) | (tokens >= (cap or own or np.inf))
    codes = np.unique(frame["code"].to_numpy(np.int64), return_inverse=True)[1]
    sizes, counts = np.unique(np.bincount(codes), return_counts=True)
    icc = icc_log(tokens, codes)
    stragglers = straggling_groups(tokens, codes, int(np.quantile(tokens, 0.99))) if icc is not None else (None, None)
    prompt: Any = frame.get("prompt_tokens")
    return {
        "part": part, "responses": len(tokens), "prompts": int(codes.max()) + 1,
        "samples_per_prompt": {int(s): int(c) for s, c in zip(sizes, counts, strict=True)},
        "mean_tokens": round(float(tokens.mean()), 2),
        "quantiles": {f"P{100 * q:g}": round(float(np.quantile(tokens, q)), 1) for q in QUANTILES},
        "max_tokens": int(tokens.max()),
        "max_over_median": round(float(tokens.max() / np.median(tokens)), 2),
        "cap_tokens": min(cap or own or 0, own or cap or 0) or None,
        "share_at_cap": round(float(cut.mean()), 6),
        "share_above": {int(a): round(float((tokens > a).mean()), 6) for a in above},
        "icc_log": _round(icc), "within_sd_log": _round(within_sd_log(tokens, codes)),
        "straggling_prompts": _round(stragglers[0]), "straggling_prompts_shuffled": _round(stragglers[1]),
        "prompt_tokens_median": None if prompt is None or prompt.isna().all() else float(prompt.median()),
        **_rewards(frame), **_turns(frame),
    }  # fmt: skip


def _turns(frame: pd.DataFrame) -> dict[str, float | None]:
    cells = frame["turns"].dropna() if "turns" in frame else pd.Series(dtype=object)
    if not len(cells):
        return {}
    calls = cells.map(lambda turns: len(turns) - 1)
    observed = sum(turn.observation_tokens for turns in cells for turn in turns[:-1])
    found: dict[str, float | None] = {
        "tool_calls_mean": _round(float(calls.mean())),
        "tool_calls_max": int(calls.max()),
        "turn_tokens_median": float(np.median([turn.generated_tokens for turns in cells for turn in turns])),
        "observed_share": _round(observed / int(frame.loc[cells.index, "response_tokens"].sum())),
    }
    if agents := sum(len(agents_of(turns)) for turns in cells):
        found["sub_agents_mean"] = _round(agents / len(cells))
    if known := recorded_s(cells.tolist()):
        total = cells.map(lambda turns: sum(recorded_s([turns])))
        codes = np.unique(frame.loc[cells.index, "code"].to_numpy(np.int64), return_inverse=True)[1]
        found |= {"call_s_mean": _round(float(np.mean(known))), "call_s_p95": _round(float(np.quantile(known, 0.95)))}
        found |= {"tool_s_mean": _round(float(total.mean())), "tool_s_max": _round(float(total.max()))}
        found["tool_s_icc_log"] = _round(icc_log(np.maximum(total.to_numpy(np.float64), 1e-3), codes))
    return found


def _rewards(frame: pd.DataFrame) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    columns = ("correct", "reward", "reward_time_s", "test_run_s", "judge_tokens")
    correct, reward, seconds, runs, judged = (frame[c].dropna() if c in frame else pd.Series() for c in columns)
    if len(correct):
        right = correct.astype(float)
        share = right.groupby(frame.loc[right.index, "code"]).mean()
        found["correct_share"] = _round(float(right.mean()))
        found["mixed_prompts"] = _round(float(((share > 0) & (share < 1)).mean()))
    if len(reward):
        found |= {"reward_mean": _round(float(reward.mean())), "reward_min": float(reward.min()),
                  "reward_max": float(reward.max())}  # fmt: skip
    if len(seconds):
        found |= {"reward_time_mean_s": _round(float(seconds.mean())), "reward_time_max_s": float(seconds.max())}
    longest = [max(cases) for cases in runs if len(cases)]
    if longest:
        found["longest_test_run_mean_s"] = _round(float(np.mean(longest)))
    if len(judged):
        found["judge_tokens_mean"] = round(float(judged.mean()), 2)
    return found


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

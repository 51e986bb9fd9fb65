"""A trace derived from a metric log: lengths that meet each step's mean, longest and share at the cap.

A log keeps no lengths. `rlsim.frameworks.verl.lengths.reconstruct` makes them up, and the trace says so of itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.errors import CalibrationError
from rlsim.frameworks.verl.lengths import PROMPT_SHARE, SPREAD, logged_lengths, reconstruct
from rlsim.frameworks.verl.log import read_log
from rlsim.frameworks.verl.run import batch_of
from rlsim.trace import Trace, TraceMeta, make_trace

_DERIVED = (
    "DERIVED, not measured: the log has means of {steps:,} steps and no lengths. Each step's are those of one "
    "lognormal that meets its mean, and its share at the cap or else its longest response; assumed are this shape, "
    "that {share:.0%} of the variance of log length is the prompt's, and that prompts are as long as the step's mean"
)


def derive_trace(
    path: str | Path,
    *,
    prompts: int | None = None,
    responses: int | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    source: str = "",
) -> Trace:
    """Lengths (tokens) that meet the means in the metric log `path`, one epoch of the trace per logged step.

    `prompts` and `responses` to each are what a step launched, `cap_tokens` the response cap; what is left out is taken
    from the configuration that veRL prints into its log. A simulation's step k takes the lengths of the k-th logged
    step. Raises `CalibrationError` with file and line if the log cannot be read, lacks response_length/mean, tells
    neither batch nor cap, or contradicts itself.
    """
    log = read_log(path)
    log.need("response_mean")
    prompts, responses, cap, said = batch_of(log, prompts, responses, cap_tokens)
    steps = log.steps[log.steps["response_mean"].notna()]
    frames = []
    for epoch, logged in enumerate(logged_lengths(log, steps)):
        known = not np.isnan(logged.prompt_mean)
        batch = reconstruct(logged if known else replace(logged, prompt_mean=1.0), prompts, responses, cap)
        columns = {
            "prompt_id": epoch * prompts + batch.position,
            "sample_id": np.tile(np.arange(responses), prompts),
            "response_tokens": batch.response_tokens,
            "epoch": epoch,
        }
        if known:
            columns["prompt_tokens"] = batch.prompt_tokens
        frames.append(pd.DataFrame(columns))
    notes = [
        _DERIVED.format(steps=len(steps), share=PROMPT_SHARE),
        "every logged step is an epoch of its own with prompts of its own: which came again is not logged",
    ]
    if (steps["response_max"].isna() & ~(steps["clip_ratio"] > 0)).any():
        notes.append(f"where neither the longest nor a share at the cap is logged, log length has sd {SPREAD}: assumed")
    if len(steps) < len(log.steps):
        notes.append(f"{len(log.steps) - len(steps)} steps without response_length/mean are left out")
    meta = TraceMeta(
        name=name or Path(path).stem,
        source=source or f"derived from means in the metric log {Path(path).name}",
        cap_tokens=cap,
        notes=(*notes, *log.notes, *said),
    )
    return make_trace(pd.concat(frames, ignore_index=True), meta, where=str(path))


def batch_size(text: str) -> tuple[int, int]:
    """Prompts and responses of `128x8`. Raises `CalibrationError` for anything else."""
    prompts, sign, responses = text.lower().replace("×", "x").partition("x")
    if not (sign and prompts.strip().isdigit() and responses.strip().isdigit()):
        raise CalibrationError(f"--batch {text}: expected PROMPTSxRESPONSES of a step, such as 128x8")
    if not int(prompts) or not int(responses):
        raise CalibrationError(f"--batch {text}: expected at least 1x1")
    return int(prompts), int(responses)

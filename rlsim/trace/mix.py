"""Several traces as one."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.schema import Trace, TraceMeta, make_trace


def mix(traces: Sequence[Trace]) -> Trace:
    """The prompts of all traces together, each under its trace's name; an epoch passes over them in random order.

    Raises `TraceError` if two traces have the same name, or their numbers of epochs differ.
    """
    if len(traces) == 1:
        return traces[0]
    names = [trace.meta.name for trace in traces]
    if len(set(names)) < len(names):
        raise TraceError(f"the traces {', '.join(names)} cannot be mixed: two have the same name")
    epochs = {int(trace.frame["epoch"].max()) + 1 for trace in traces}
    if len(epochs) > 1:
        raise TraceError(f"the traces {', '.join(names)} cannot be mixed: they have different numbers of epochs")
    frames = [
        trace.frame.assign(prompt_id=[f"{trace.meta.name}/{prompt}" for prompt in trace.frame["prompt_id"]])
        for trace in traces
    ]
    caps = {trace.meta.cap_tokens for trace in traces}
    notes = list(dict.fromkeys(note for trace in traces for note in trace.meta.notes))
    meta = TraceMeta(
        name=" + ".join(names),
        source="; ".join(dict.fromkeys(trace.meta.source for trace in traces)),
        cap_tokens=caps.pop() if len(caps) == 1 else None,
        notes=tuple(notes),
    )
    return make_trace(pd.concat(frames, ignore_index=True), meta, where=meta.name)

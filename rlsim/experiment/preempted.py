"""The note on systems whose KV cache is too small for what they run at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

#: From this share of preempted responses on, the results say so. Each of them is prefilled a second time with all its
#: tokens and waits for room before; fewer are what a batch brings that happens to be long.
CONSIDERABLE = 0.05


def preemption_notes(preemptions: Mapping[str, pd.Series[int]]) -> Iterator[str]:
    """One note on all systems with a considerable share; `preemptions`: of each response, by system."""
    told = [
        f"{name} ({(counts > 0).mean():.0%} of its responses, {counts.mean():.2f} times each on average)"
        for name, counts in preemptions.items()
        if len(counts) and (counts > 0).mean() >= CONSIDERABLE
    ]
    if told:
        yield (
            f"responses were preempted (they lost their KV cache and were prefilled again) under {', '.join(told)}: "
            "the KV cache is too small for what runs at once. A larger tp or memory_utilization makes room, as does "
            "training.offload where training's states stay beside the engine; with a smaller engine.max_num_seqs "
            "responses wait instead of being recomputed"
        )

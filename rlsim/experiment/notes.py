"""What a reader must know of throughputs: which steps count, who trains on other responses, who recomputes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import pandas as pd

from rlsim.experiment.columns import ACTED
from rlsim.experiment.steadiness import unsteady
from rlsim.experiment.summary import half_width, means, paired_ratio

#: A ratio of responses that differs by more than this from that of tokens is explained.
EXPLAINED = 0.02
#: A mean step time that is not known to this share of itself by its own steps is noted.
KNOWN = 0.03
#: More systems than these are counted, not listed.
MOST_NAMES = 4
#: Columns of `steps` that say what becomes of what is not trained on.
PUT_OFF = ("put_back", "paused", "resumed", "dropped")
#: From this share of preempted responses on, the results say so. Each of them is prefilled a second time with all its
#: tokens and waits for room before; fewer are what a batch brings that happens to be long.
CONSIDERABLE = 0.05


def kinds_note(kinds: Sequence[str]) -> Iterator[str]:
    """What shares of GPU time mean where GPUs are of several kinds."""
    if len(kinds) > 1:
        yield (
            f"bubble and tail count a second of {' and '.join(kinds)} alike; rollout_idle and trainer_idle tell the "
            "GPUs of generation from those of training"
        )


def idle_notes(steps: pd.DataFrame, deciding: Collection[str]) -> Iterator[str]:
    """Which systems that decide something while they generate never changed anything."""
    for system, own in steps.groupby("system", sort=False):
        if system in deciding and not own[[*ACTED, "paused", "borrowed_gpu_s"]].any(axis=None):
            yield f"{system} never acted: its controls switched, moved, released and aborted nothing in any step"


def luck(steps: pd.DataFrame) -> float:
    """The share of itself to which one system's mean step time is known, by its own steps (`half_width`)."""
    return half_width(steps, "step_time_s") / float(steps.loc[steps["steady"], "step_time_s"].mean())


def luck_note(steps: pd.DataFrame) -> Iterator[str]:
    """Which steady systems have too few steps for their step time to be another draw's as well."""
    found = {str(system): own for system, own in steps.groupby("system", sort=False)}
    vague = {name: share for name, own in found.items() if (share := luck(own)) > KNOWN and not unsteady(own)}
    if not vague:
        return
    of = "" if len(vague) == len(found) else f" of {listed(list(vague))}"
    ends = dict.fromkeys(f"±{share:.1%}" for share in (min(vague.values()), max(vague.values())))
    counts = [int(own["steady"].groupby(own["seed"]).sum().min()) for name, own in found.items() if name in vague]
    seeds, times = steps["seed"].nunique(), (max(vague.values()) / KNOWN) ** 2
    yield (
        f"step times{of} are known to {' to '.join(ends)} by their own {min(counts)} steps"
        f"{f' of {seeds} seeds' * (seeds > 1)}: ±{KNOWN:.0%} takes about {math.ceil(times)} times as many steps or "
        "seeds. Ratios on the same draw are surer"
    )


def rate_notes(steps: pd.DataFrame, baseline: str, batch: int) -> Iterator[str]:
    """Notes on the systems of one case, by name in `steps`: a batch is `batch` responses."""
    trained = steps[steps["steady"]].groupby("system", sort=False)["trained"].mean()
    mine = {str(system): own for system, own in steps.groupby("system", sort=False)}
    for system in mine:
        if trained[system] < batch * (1 - 1e-9):
            yield (
                f"{system} trains on {trained[system] / batch:.1%} of a batch each step: its step is shorter for that; "
                "speedups count the responses trained on per second"
            )
    if len(mine) == 1 or baseline not in mine:
        return
    by_seed = means(steps, ["system", "seed"]).sort_index()
    for system, own in mine.items():
        rates = by_seed.loc[system], by_seed.loc[baseline]
        ratios = [paired_ratio(*(one[rate] for one in rates))[0] for rate in ("responses_per_s", "tokens_per_s")]
        yield from ratio_note(system, own, baseline, mine[baseline], *ratios)


def ratio_note(
    system: str, own: pd.DataFrame, baseline: str, reference: pd.DataFrame, by_responses: float, by_tokens: float
) -> Iterator[str]:
    """Why a system's throughput in responses is not as many times the baseline's as that in tokens, if so.

    `own` and `reference` are rows of `steps`, the ratios what a table shows of them.
    """
    if not by_tokens or not abs(by_responses / by_tokens - 1) > EXPLAINED:
        return
    own, reference = (steps[steps["steady"]] for steps in (own, reference))
    under = f"under {baseline} {why}" if (why := _why(reference)) else "the two train on other responses"
    yield (
        f"{system} trains on {by_responses:.2f} times the responses per second of {baseline}, but {by_tokens:.2f} "
        f"times the tokens: its responses have {_tokens_per_response(own):,.0f} tokens in the mean, prompts counted, "
        f"against {_tokens_per_response(reference):,.0f}, as {_why(own) or under}"
    )


def _tokens_per_response(steady: pd.DataFrame) -> float:
    return float(steady["tokens"].sum() / max(steady["trained"].sum(), 1))


def _why(steady: pd.DataFrame) -> str:
    """How a system comes to train on other responses than it would have drawn; empty if it does not."""
    total = steady[["wasted_tokens", *PUT_OFF]].sum()
    reasons = [
        (total["put_back"] > 0, "prompts that are not finished in time are generated again later"),
        (total["paused"] + total["resumed"] > 0, "responses that are not finished in time go on in a later step"),
        (total["dropped"] > 0, "prompts are dropped, for their rewards or as too stale"),
        (total["wasted_tokens"] > 0, "the first to finish are trained on and others dropped"),
    ]
    return next((text for applies, text in reasons if applies), "")


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
            "responses wait instead of being recomputed, and with engine.kv_offloading_bytes they are loaded from host "
            "memory"
        )


def listed(names: Sequence[str]) -> str:
    """The names of systems, or of many how many there are."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} systems, {names[0]} among them"

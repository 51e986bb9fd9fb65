"""What a real rollout is predicted from: steps, prefills and switches of a small decoder, measured apart from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from rlsim.base import catalogue
from rlsim.cost.profile import ProfileStep, rising
from rlsim.cost.transfer import NO_HOST_KV, HostKv, SwitchCost, kv_rank_bytes, kv_send_s
from rlsim.models.hardware import Link
from rlsim.models.model import Model
from rlsim.trace.files import read_trace

TRACE = "deepscaler-llama-3.1-8b"
PAGE_TOKENS = 16

#: Decodes in milliseconds on one core; weights, batch, context and TP all matter.
SMALL = Model(
    name="rollout-llama",
    model_type="llama",
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=2048,
    dtype_bytes=4,
)


class Ask(NamedTuple):
    """One response to generate."""

    id: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Plan:
    """One run. With `switch_to`, the layout changes once `switch_at` responses or fewer are unfinished."""

    asks: tuple[Ask, ...]
    tp: int
    budget_tokens: int  # of one prefill iteration
    switch_to: int = 0
    switch_at: int = 0


@dataclass(frozen=True)
class Effort:
    """How much is measured: `rounds` of the grid, each in an order of its own, with `runs` of every case in between, so
    that what drifts on the machine hits all alike."""

    rounds: int = 6
    runs: int = 3
    repeats: Mapping[str, int] = field(default_factory=lambda: {"decode": 6, "prefill": 2, "switch": 6})  # in a round
    longest: int = 512  # response
    #: Odd sizes too: products of 23 rows take as long as those of 26.
    batches: tuple[int, ...] = (*range(1, 25), 27, 28, 31, 32, 35, 38, 40, 43, 46, 48, 56, 64, 79, 96, 127, 128)
    contexts: tuple[int, ...] = (24, 200, 620)
    prompts: tuple[int, int] = (8, 96)  # shortest and longest
    prefill_tokens: tuple[int, ...] = (96, 256, 512)
    prefill_lengths: tuple[int, ...] = (24, 96)

    def slots(self, sequences: int) -> int:
        return max(math.ceil(sequences / 2), math.ceil(self.prefill_tokens[-1] / self.prefill_lengths[0]))


QUICK = Effort(
    rounds=1,
    runs=1,
    repeats={"decode": 4, "prefill": 1, "switch": 4},
    longest=64,
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(8, 100),
    prompts=(4, 24),
    prefill_tokens=(64, 128),
    prefill_lengths=(8, 24),
)


def draw_asks(sequences: int, seed: int, effort: Effort) -> tuple[Ask, ...]:
    """So many responses of the shipped trace, scaled to the longest that is wanted.

    Prompts are a quarter as long as in the trace, within the bounds of `effort`.
    """
    frame = read_trace(Path(catalogue.names("traces")[TRACE].with_suffix(".parquet"))).frame
    rows = frame.iloc[np.random.default_rng(seed).choice(len(frame), sequences, replace=False)]
    response = rows.response_tokens.to_numpy(float)
    prompts = np.clip(rows.prompt_tokens.to_numpy(float) // 4, *effort.prompts).astype(int)
    lengths = np.maximum(np.ceil(response * effort.longest / response.max()), 2).astype(int)
    return tuple(map(Ask, range(sequences), prompts.tolist(), lengths.tolist()))


def shapes(sequences: int, effort: Effort) -> list[tuple[str, Any]]:
    """What to measure, kind and shape: decode steps (TP, contexts; equal ones, then unequal), prefills (TP, lengths of
    prompts), switches (TP before, after, contexts)."""
    found: list[tuple[str, Any]] = []
    low, high = effort.contexts[0], effort.contexts[-1]
    for tp in (1, 2):
        most = math.ceil(sequences * tp / 2)
        batches = [*(batch for batch in effort.batches if batch < most), most]
        decodes = [(context,) * batch for batch in batches for context in effort.contexts]
        for batch in sorted({min(most, 4), min(most, 8), most}):  # one straggler; half of them long
            decodes += [(low,) * (batch - 1) + (high,)]
            decodes += [(low,) * (batch - batch // 2) + ((low + high) // 2,) * (batch // 2)]
        found += [("decode", (tp, contexts)) for contexts in decodes]
        for tokens in effort.prefill_tokens:
            for length in effort.prefill_lengths:
                rest = (tokens % length,) if tokens % length else ()
                found.append(("prefill", (tp, (length,) * (tokens // length) + rest)))
    counts = 2, max(sequences // 2, 2)
    return found + [("switch", (1, 2, (context,) * n)) for n in counts for context in effort.contexts[1:]]


@dataclass
class Samples:
    """Seconds of every repeat by kind and shape (`shapes`), and whether something else ran on our cores meanwhile."""

    laps: dict[tuple[str, Any], list[tuple[float, bool]]] = field(default_factory=dict)

    def keep(self, kind: str, shape: Any, laps: Sequence[Sequence[Any]], *, together: bool) -> None:
        """Add what every worker timed; where workers wait for each other, a step is disturbed if any of them was."""
        steps = zip(*laps, strict=True) if together else ((lap,) for own in laps for lap in own)
        found = ((max(lap.seconds for lap in step), any(lap.disturbed for lap in step)) for step in steps)
        self.laps.setdefault((kind, shape), []).extend(found)

    def seconds(self, kind: str) -> dict[Any, list[float]]:
        """By shape, without disturbed repeats unless there are no others."""
        own = {shape: laps for (one, shape), laps in self.laps.items() if one == kind}
        return {
            shape: [s for s, disturbed in laps if not disturbed] or [s for s, _ in laps] for shape, laps in own.items()
        }

    @property
    def disturbed(self) -> float:
        return float(np.mean([disturbed for laps in self.laps.values() for _, disturbed in laps]))

    def spread(self) -> float:
        """The median over decode shapes of half the interquartile range of the repeats over their median."""
        found = [np.quantile(times, (0.25, 0.5, 0.75)) for times in self.seconds("decode").values()]
        return float(np.median([(high - low) / 2 / middle for low, middle, high in found]))


@dataclass(frozen=True)
class MeasuredCosts:
    """`rlsim.sim.gpus.RolloutCosts` of a node of two processes, from what was measured on them.

    `skew`: the share of padding that is paid for. A switch takes `control_s`, slicing of the weights included, and the
    KV at the measured rate; there are no graphs.
    """

    model: Model
    steps: Mapping[int, ProfileStep]
    skew: float
    control_s: float
    migrate_bytes_per_s: float
    pages: int  # of a replica at TP 1

    def step(self, tp: int) -> ProfileStep:
        return self.steps[tp]

    def capacity_pages(self, tp: int) -> int:
        """The pool has as many more slots as ranks share a replica."""
        return self.pages * tp

    def host_kv(self, tp: int) -> HostKv:  # noqa: ARG002
        return NO_HOST_KV

    def switch(self, gpus: int, from_tp: int, to_tp: int, contexts: Sequence[int], *_: Any, **__: Any) -> SwitchCost:  # noqa: ARG002
        moved = kv_rank_bytes(self.model, sum(contexts), from_tp)
        return SwitchCost(0.0, moved / self.migrate_bytes_per_s, 0.0, self.control_s)

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:  # noqa: ARG002
        link = Link(name="processes", bytes_per_s=self.migrate_bytes_per_s, latency_s=0.0)
        return kv_send_s(self.model, link, float(sum(contexts)), min(from_tp, to_tp))


def fit(model: Model, samples: Samples, effort: Effort, capacity_tokens: int) -> MeasuredCosts:
    """Means of the repeats as profiles; the skew and the switch by least squares of relative errors."""
    decode, prefill, switch = (
        {shape: float(np.mean(times)) for shape, times in samples.seconds(kind).items()}  # a run sums many steps
        for kind in ("decode", "prefill", "switch")
    )
    steps = {}
    for tp in (1, 2):
        own = {(len(c), c[0]): s for (degree, c), s in decode.items() if degree == tp and len(set(c)) == 1}
        curves = [
            rising(b, [b * c for c in effort.contexts], [own[b, c] for c in effort.contexts])
            for b in sorted({batch for batch, _ in own})
        ]
        known = {(sum(lengths), lengths[0]): s for (degree, lengths), s in prefill.items() if degree == tp}
        grid = [[known[tokens, length] for length in effort.prefill_lengths] for tokens in effort.prefill_tokens]
        steps[tp] = ProfileStep(tp, curves, effort.prefill_tokens, effort.prefill_lengths, grid)
    unequal = [(tp, c, s) for (tp, c), s in decode.items() if len(set(c)) > 1]

    def loss(skew: float) -> float:
        return sum((step_s(steps[tp], skew, len(c), sum(c), max(c)) / s - 1.0) ** 2 for tp, c, s in unequal)

    skew = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    for step in steps.values():
        step.skew = skew
    moved = np.array([kv_rank_bytes(model, sum(contexts), 1) for *_, contexts in switch])
    design = np.stack([np.ones(len(moved)), moved / 1e9], axis=1) / np.array([*switch.values()])[:, None]
    control_s, per_gigabyte = nnls(design, np.ones(len(moved)))[0]
    rate = 1e9 / max(float(per_gigabyte), 1e-6)
    return MeasuredCosts(model, steps, skew, float(control_s), rate, capacity_tokens // PAGE_TOKENS)


def step_s(step: ProfileStep, skew: float, batch: int, context_tokens: float, longest: float) -> float:
    """A decode step as the engine reads it: at the contexts' sum and the share of the padding that is paid for."""
    return step.decode(batch).step_s(context_tokens + skew * (batch * longest - context_tokens))

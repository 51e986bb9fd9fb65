"""What a real rollout is predicted from: steps, prefills and switches of a small decoder, measured apart from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from rlsim.cost.calibration import RuntimeFit
from rlsim.cost.profile import ProfileStep, rising
from rlsim.cost.transfer import kv_rank_bytes
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


@dataclass(frozen=True)
class Effort:
    """How much is measured: `rounds` of the grid, each in an order of its own, with `runs` of every case in between, so
    that what drifts on the machine hits all alike.

    A run in which others used our cores is made again, `again` times at the most in a round.
    """

    rounds: int = 6
    runs: int = 3
    again: int = 2
    steps: int = 6  # of every decode shape in a round
    prefills: int = 2
    longest: int = 512  # response
    #: Odd sizes too: products of 23 rows take as long as those of 26.
    batches: tuple[int, ...] = (*range(1, 25), 27, 28, 31, 32, 35, 38, 40, 43, 46, 48, 56, 64, 79, 96, 127, 128)
    contexts: tuple[int, ...] = (24, 200, 620)
    prompts: tuple[int, int] = (8, 96)  # shortest and longest
    prefill_tokens: tuple[int, ...] = (96, 256, 512)
    prefill_lengths: tuple[int, ...] = (24, 96)

    def slots(self, sequences: int) -> int:
        """Sequences that a worker must have room for at TP 1."""
        return max(math.ceil(sequences / 2), math.ceil(self.prefill_tokens[-1] / self.prefill_lengths[0]))


QUICK = Effort(
    rounds=1,
    runs=1,
    again=0,
    steps=4,
    prefills=1,
    longest=64,
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(8, 100),
    prompts=(4, 24),
    prefill_tokens=(64, 128),
    prefill_lengths=(8, 24),
)


# ---- what is generated -----------------------------------------------------------------------------------------------


def draw_lengths(sequences: int, seed: int, effort: Effort) -> list[tuple[int, int]]:
    """(prompt, response) tokens of so many responses of the shipped trace, scaled to the longest that is wanted.

    Prompts are a quarter as long as in the trace, within the bounds of `effort`.
    """
    from rlsim.base import catalogue

    path = catalogue.names("traces")[TRACE].with_suffix(".parquet")
    frame = read_trace(Path(path)).frame
    rows = frame.iloc[np.random.default_rng(seed).choice(len(frame), sequences, replace=False)]
    response = rows.response_tokens.to_numpy(float)
    low, high = effort.prompts
    prompts = np.clip(rows.prompt_tokens.to_numpy(float) // 4, low, high).astype(int)
    lengths = np.maximum(np.ceil(response * effort.longest / response.max()), 2).astype(int)
    return list(zip(prompts.tolist(), lengths.tolist(), strict=True))


# ---- what is measured apart from the runs ----------------------------------------------------------------------------


@dataclass
class Samples:
    """Seconds of every repeat, by shape: (tp, contexts), (tp, prompt lengths), contexts of a switch from TP 1 to 2."""

    decode: dict[tuple[int, tuple[int, ...]], list[float]] = field(default_factory=dict)
    prefill: dict[tuple[int, tuple[int, ...]], list[float]] = field(default_factory=dict)
    switch: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    total: int = 0
    disturbed: int = 0  # repeats during which something else ran on our cores: kept only if a shape has no others
    _calm: set[Any] = field(default_factory=set)

    def keep(self, table: dict[Any, list[float]], shape: Any, laps: Sequence[Sequence[Any]], *, together: bool) -> None:
        """Add what every worker timed; where workers wait for each other, a step is disturbed if any of them was."""
        steps = list(zip(*laps, strict=True)) if together else [(lap,) for own in laps for lap in own]
        calm = [step for step in steps if not any(lap.disturbed for lap in step)]
        self.total += len(steps)
        self.disturbed += len(steps) - len(calm)
        if calm and (id(table), shape) not in self._calm:
            self._calm.add((id(table), shape))
            table[shape] = []
        if calm or (id(table), shape) not in self._calm:
            table.setdefault(shape, []).extend(max(lap.seconds for lap in step) for step in calm or steps)

    def spread(self) -> float:
        """The median over decode shapes of half the interquartile range of the repeats over their median."""
        found = [np.quantile(times, (0.25, 0.5, 0.75)) for times in self.decode.values()]
        return float(np.median([(high - low) / 2 / middle for low, middle, high in found]))


def shapes(sequences: int, effort: Effort) -> dict[str, list[Any]]:
    """The shapes to measure: decode steps (equal contexts, then unequal ones), prefills, switches."""
    decode = []
    low, high = effort.contexts[0], effort.contexts[-1]
    for tp in (1, 2):
        most = math.ceil(sequences * tp / 2)
        inner = [batch for batch in effort.batches if batch < most]
        for batch in [*inner, most]:
            decode += [(tp, (context,) * batch) for context in effort.contexts]
        for batch in sorted({min(most, 4), min(most, 8), most}):  # one straggler; half of them long
            decode.append((tp, (low,) * (batch - 1) + (high,)))
            decode.append((tp, (low,) * (batch - batch // 2) + ((low + high) // 2,) * (batch // 2)))
    prefill = [
        (tp, (length,) * (tokens // length) + ((tokens % length,) if tokens % length else ()))
        for tp in (1, 2)
        for tokens in effort.prefill_tokens
        for length in effort.prefill_lengths
    ]
    switch = [(context,) * count for count in (2, max(sequences // 2, 2)) for context in effort.contexts[1:]]
    return {"decode": decode, "prefill": prefill, "switch": switch}


def measure(workers: Any, samples: Samples, kind: str, shape: Any, effort: Effort) -> None:
    """One shape once more; `kind` is decode, prefill or switch."""
    from evidence.validate import real_run

    function, repeats = {
        "decode": (real_run.decode_times, effort.steps),
        "prefill": (real_run.prefill_times, effort.prefills),
        "switch": (real_run.switch_times, effort.steps),
    }[kind]
    laps = workers.call(function, *((1, 2, shape) if kind == "switch" else shape), repeats)
    samples.keep(getattr(samples, kind), shape, laps, together=kind == "switch" or shape[0] > 1)


@dataclass(frozen=True)
class Fitted:
    """The calibration: a profile for each TP, what a switch costs, and the share of padding that is paid for."""

    model: Model
    profiles: Mapping[int, Callable[..., ProfileStep]]  # of a skew
    runtime: RuntimeFit
    skew: float


def fit(model: Model, samples: Samples, effort: Effort) -> Fitted:
    """Means of the repeats as profiles; the skew and the switch by least squares of relative errors."""
    profiles = {tp: _profile(tp, samples, effort) for tp in (1, 2)}
    steps = {tp: profile() for tp, profile in profiles.items()}
    unequal = [(tp, contexts, _expected(t)) for (tp, contexts), t in samples.decode.items() if len(set(contexts)) > 1]

    def loss(skew: float) -> float:
        return sum((step_s(steps[tp], skew, contexts) / seconds - 1.0) ** 2 for tp, contexts, seconds in unequal)

    skew = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    seconds = np.array([_expected(times) for times in samples.switch.values()])
    moved = np.array([kv_rank_bytes(model, sum(contexts), 1) for contexts in samples.switch])
    design = np.stack([np.ones(len(moved)), moved / 1e9], axis=1) / seconds[:, None]
    control_s, per_gigabyte = nnls(design, np.ones(len(moved)))[0]
    runtime = RuntimeFit(
        graph_capture_s=0.0,
        graph_batch_sizes=(),
        switch_control_s=float(control_s),
        group_create_s=0.0,
        migrate_bytes_per_s=1e9 / max(float(per_gigabyte), 1e-6),
        source=f"{len(moved)} switches from TP 1 to 2, slicing of the weights in the control's time; groups exist",
    )
    return Fitted(model, profiles, runtime, skew)


def _profile(tp: int, samples: Samples, effort: Effort) -> Callable[..., ProfileStep]:
    equal = {
        (len(contexts), contexts[0]): _expected(times)
        for (degree, contexts), times in samples.decode.items()
        if degree == tp and len(set(contexts)) == 1
    }
    batches = sorted({batch for batch, _ in equal})
    prefills = {
        (sum(lengths), lengths[0]): _expected(times)
        for (degree, lengths), times in samples.prefill.items()
        if degree == tp
    }
    tokens, lengths = effort.prefill_tokens, effort.prefill_lengths
    curves = [rising(b, [b * c for c in effort.contexts], [equal[b, c] for c in effort.contexts]) for b in batches]
    grid = [[prefills[t, length] for length in lengths] for t in tokens]
    return partial(ProfileStep, tp, curves, tokens, lengths, grid)


def _expected(times: Sequence[float]) -> float:
    """The mean: what is predicted is a sum of many steps."""
    return float(np.mean(times))


def step_s(step: ProfileStep, skew: float, contexts: Sequence[int]) -> float:
    """Seconds of a decode step of sequences with these contexts."""
    return read_step(step, skew, len(contexts), sum(contexts), max(contexts))


def read_step(step: ProfileStep, skew: float, batch: int, context_tokens: float, longest: float) -> float:
    """A decode step as the engine reads it: at the contexts' sum and the share of the padding that is paid for."""
    return step.decode(batch).step_s(context_tokens + skew * (batch * longest - context_tokens))

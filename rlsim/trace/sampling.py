"""Which responses each training step launches: a seeded permutation of the prompts per epoch.

The k-th sample of a prompt in an epoch is the same row however many samples or prompts a step takes, so that systems
which launch more of them (tail batching, overcommitment) are compared on common random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.errors import TraceError
from rlsim.trace.schema import Trace
from rlsim.trace.turns import ToolCall, agents_of, response_tokens, tool_calls, unrecorded

Ints = npt.NDArray[np.int64]
AGAIN = "a system generates more responses to a prompt than the trace has: their lengths are used again"


@dataclass(frozen=True)
class DrawnResponses:
    """The responses of one step; all arrays have one entry per response, a prompt's samples side by side.

    `position` counts prompts over the whole training (a prompt comes again in the next epoch at another position),
    `prompt` is a code into `StepSampler.prompt_ids`, `sample` runs from 0 within the prompt, `row` is the row of the
    trace's frame (for reward and sandbox columns). Lengths in tokens, `response_tokens` already cut at the cap.
    """

    position: Ints
    epoch: Ints
    prompt: Ints
    sample: Ints
    row: Ints
    prompt_tokens: Ints
    response_tokens: Ints
    capped: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class _Epoch:
    """One epoch of the trace, rows sorted by prompt: `rows[first[i] : first[i] + count[i]]` are of `prompts[i]`."""

    rows: Ints
    prompts: Ints
    first: Ints
    count: Ints


class StepSampler:
    """Draws the prompts and responses of every training step from a trace.

    `prompts` × `responses` a step; `cap_tokens` cuts responses (default: the trace's own cap), and so does what their
    prompt leaves of `max_model_len`; an unknown prompt length is taken as `default_prompt_tokens`. A trajectory has at
    most `max_turns` turns, and `tool_calls` holds its tool calls by row; one whose seconds nobody recorded takes
    `default_tool_s`, by default the mean of those that are. Every prompt comes
    exactly once an epoch, in a permutation of its own; a step that reaches the end of an epoch goes on with the next. A
    trace with epochs gives training epoch e its rows of epoch e, and those of its last epoch afterwards.

    A prompt with too few samples: with at least a quarter of `responses` (and two) it is kept and its samples are used
    again, otherwise it is left out. If no prompt has enough, rows are grouped at random. Everything of this kind is
    said in `notes`. Raises `TraceError` if a parameter is below 1, the trace cannot fill one group, or a prompt leaves
    no room for a response.
    """

    def __init__(
        self,
        trace: Trace,
        prompts: int,
        responses: int,
        cap_tokens: int | None = None,
        seed: int = 0,
        *,
        default_prompt_tokens: int = 256,
        max_model_len: int | None = None,
        max_turns: int | None = None,
        default_tool_s: float | None = None,
    ) -> None:
        given = {"prompts": prompts, "responses": responses, "cap_tokens": cap_tokens, "max_turns": max_turns,
                 "default_prompt_tokens": default_prompt_tokens, "max_model_len": max_model_len}  # fmt: skip
        for name, value in given.items():
            if value is not None and value < 1:
                raise TraceError(f"{trace.meta.name}: {name} must be at least 1 (got {value})")
        self.trace, self.prompts, self.responses, self.seed = trace, prompts, responses, seed
        self.notes: list[str] = []
        self._prompt_lengths(default_prompt_tokens)
        self._lengths(cap_tokens, max_model_len, max_turns)
        self.tool_calls: list[tuple[ToolCall, ...]] | None = None
        if "turns" in trace.frame:
            self._trajectories(default_tool_s)
        codes, self.prompt_ids = trace.prompt_codes()
        self._epochs = self._group(codes, trace.frame["epoch"].to_numpy(np.int64))
        self._starts = [0]
        self._orders: dict[int, tuple[Ints, Ints]] = {}
        if prompts > self.epoch_size(0):
            self.notes.append(
                f"a step takes {prompts} prompts but the trace has {self.epoch_size(0)}: "
                "the same prompt appears more than once in a step"
            )

    def epoch_size(self, epoch: int) -> int:
        return len(self._rows_of(epoch).prompts)

    def step(self, step: int) -> DrawnResponses:
        """The responses of one training step (from 0): `prompts` × `responses` of them."""
        positions = np.arange(self.prompts) + step * self.prompts
        return self.draw(positions, np.zeros_like(positions), self.responses)

    def draw(self, positions: npt.ArrayLike, first_samples: npt.ArrayLike, samples: int) -> DrawnResponses:
        """`samples` samples of the prompt at each position, from its `first_samples` on.

        Samples beyond those that the trace has of a prompt are its first ones again; the notes say so.
        """
        position, first = np.asarray(positions, np.int64), np.asarray(first_samples, np.int64)
        while self._starts[-1] <= int(position.max(initial=0)):
            self._starts.append(self._starts[-1] + self.epoch_size(len(self._starts) - 1))
        epoch = np.searchsorted(self._starts, position, side="right") - 1
        prompt = np.empty(len(position), np.int64)
        rows = np.empty((len(position), samples), np.int64)
        again = False
        for e in sorted(set(epoch.tolist())):
            mine = epoch == e
            places, shuffled = self._order(e)
            of, place = self._rows_of(e), places[position[mine] - self._starts[e]]
            turn = first[mine, None] + np.arange(samples)
            again |= bool(((turn >= of.count[place, None]) & (turn >= self.responses)).any())
            prompt[mine] = of.prompts[place]
            rows[mine] = shuffled[of.first[place, None] + turn % of.count[place, None]]
        if again and AGAIN not in self.notes:
            self.notes.append(AGAIN)
        flat = rows.ravel()
        return DrawnResponses(
            position=np.repeat(position, samples),
            epoch=np.repeat(epoch, samples),
            prompt=np.repeat(prompt, samples),
            sample=(first[:, None] + np.arange(samples)).ravel(),
            row=flat,
            prompt_tokens=self._prompt_tokens[flat],
            response_tokens=self._response_tokens[flat],
            capped=self._capped[flat],
        )

    def whole_tokens(self, rows: Ints) -> Ints:
        """Prompt and response tokens of these rows of the trace, with the response generated to its end or the cap."""
        return self._prompt_tokens[rows] + self._response_tokens[rows]

    def prompts_at(self, positions: npt.ArrayLike) -> Ints:
        """The code of the prompt at each position, into `prompt_ids`."""
        position = np.asarray(positions, np.int64)
        return self.draw(position, np.zeros_like(position), 1).prompt

    def _rows_of(self, epoch: int) -> _Epoch:
        return self._epochs[min(epoch, len(self._epochs) - 1)]

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        """The order of prompts in an epoch, and its rows with the samples of each prompt in the order of their use."""
        if epoch not in self._orders:
            rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            rows = self._rows_of(epoch)
            if len(self._epochs) > 1 and epoch == len(self._epochs):
                self.notes.append(f"training goes beyond the trace's {len(self._epochs)} epochs: the last is repeated")
            owner = np.repeat(np.arange(len(rows.prompts)), rows.count)
            shuffled = rows.rows[np.lexsort((rng.random(len(owner)), owner))]
            self._orders[epoch] = rng.permutation(len(rows.prompts)), shuffled
        return self._orders[epoch]

    def _lengths(self, cap_tokens: int | None, max_model_len: int | None, max_turns: int | None) -> None:
        trace, length = self.trace, self.trace.response_tokens
        own = trace.meta.cap_tokens
        self.cap_tokens = cap_tokens or own or int(length.max())
        below = trace.capped & (length < self.cap_tokens)
        if below.any():
            at = f"its own cap of {own} tokens" if own else "a shorter cap"
            self.notes.append(
                f"the cap of {self.cap_tokens} tokens is above {at}: {below.mean():.2%} of the responses were cut "
                "there, their true lengths are unknown and are taken as the cut ones (the tail is too short)"
            )
        limit_tokens = limits(self._prompt_tokens, self.cap_tokens, max_model_len)
        self._response_tokens, self._capped = trace.cut(limit_tokens, max_turns)

    def _trajectories(self, default_s: float | None) -> None:
        """The tool calls of every row, as far as its response goes."""
        cells: list[Any] = self.trace.frame["turns"].tolist()
        share, unknown_s, which = unrecorded(cells, default_s)
        if share:
            self.notes.append(
                f"{share:.1%} of the tool calls have no recorded time: taken as {unknown_s:.3g} s ({which})"
            )
        longest = int((self._prompt_tokens + self._response_tokens).max())  # of which it is known that they fit
        cut = sum(one.prompt_tokens + response_tokens(one.turns) > longest for c in cells for one in agents_of(c))
        if cut:
            self.notes.append(f"{cut:,} sub-agents are cut at the longest trajectory's context, {longest:,} tokens")
        rows = zip(cells, self._response_tokens.tolist(), strict=True)
        self.tool_calls = [
            tuple(tool_calls(turns, kept, None, unknown_s, longest)[1]) if turns else () for turns, kept in rows
        ]

    def _prompt_lengths(self, default: int) -> None:
        frame = self.trace.frame
        known: Any = frame.get("prompt_tokens")
        if known is None:
            missing = np.ones(len(frame), np.bool_)
            self._prompt_tokens = np.full(len(frame), default, np.int64)
        else:
            missing = known.isna().to_numpy(np.bool_)
            self._prompt_tokens = known.fillna(default).to_numpy(np.int64)
        if missing.any():
            self.notes.append(f"{missing.mean():.1%} of the responses have no prompt length: taken as {default} tokens")

    def _group(self, codes: Ints, epoch: Ints) -> list[_Epoch]:
        need = 1 if self.responses == 1 else max(2, -(-self.responses // 4))
        per_epoch = [_sorted_rows(np.flatnonzero(epoch == e), codes) for e in np.unique(epoch)]
        if max(int(e.count.max()) for e in per_epoch) < need:
            per_epoch = [self._regrouped(e, index) for index, e in enumerate(per_epoch)]
            largest = max(int(np.bincount(codes[epoch == e]).max()) for e in np.unique(epoch))
            self.prompt_ids = list(range(max(len(e.prompts) for e in per_epoch)))
            self.notes.append(
                f"no prompt has more than {largest} of the {self.responses} samples a group needs: groups are formed "
                "from rows at random, so responses of one prompt are no more alike than others (real prompts explain "
                "60-80% of the variance of log length, and stragglers cluster in fewer groups)"
            )
            return per_epoch
        counts = np.concatenate([e.count for e in per_epoch])
        short, few = int(((counts < self.responses) & (counts >= need)).sum()), int((counts < need).sum())
        if few:
            self.notes.append(f"{few} of {len(counts)} prompts have fewer than {need} samples and are left out")
            kept = [e.rows[np.repeat(e.count >= need, e.count)] for e in per_epoch]
            per_epoch = [_sorted_rows(rows, codes) for rows in kept if len(rows)]
            if gone := [str(e) for e, rows in zip(np.unique(epoch).tolist(), kept, strict=True) if not len(rows)]:
                self.notes.append(f"no prompt of epoch {', '.join(gone)} is left: those after it move up")
        if short:
            self.notes.append(
                f"{short} of {len(counts)} prompts have fewer than {self.responses} samples: theirs are used again"
            )
        return per_epoch

    def _regrouped(self, rows: _Epoch, index: int) -> _Epoch:
        groups = len(rows.rows) // self.responses
        refuse("groups", TraceError, name=self.trace.meta.name, rows=rows.rows, size=self.responses, groups=groups)
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0, index)))
        chosen = rng.permutation(rows.rows)[: groups * self.responses]
        first = np.arange(groups) * self.responses
        return _Epoch(chosen, np.arange(groups), first, np.full(groups, self.responses))


def limits(prompt_tokens: npt.ArrayLike, cap_tokens: int, max_model_len: int | None) -> Ints:
    """How long the response to each prompt may get: up to the cap, and to what the prompt leaves of `max_model_len`.

    Raises `TraceError` if it leaves nothing.
    """
    prompts = np.asarray(prompt_tokens, np.int64)
    if max_model_len is None:
        return np.full_like(prompts, cap_tokens)
    refuse("room for responses", TraceError, longest=prompts.max(), most=max_model_len)
    return np.minimum(cap_tokens, max_model_len - prompts)


def _sorted_rows(rows: Ints, codes: Ints) -> _Epoch:
    ordered = rows[np.argsort(codes[rows], kind="stable")]
    prompts, first, count = np.unique(codes[ordered], return_index=True, return_counts=True)
    return _Epoch(ordered, prompts, first, count)

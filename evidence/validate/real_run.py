"""A rollout carried out for real: every worker is a rank of a replica that decodes under the rules of docs/engine.md.

Response lengths are forced, tokens are sampled greedily, weights are random. Functions here run on workers
(`Workers.call`) and must be called by all of them together.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rlsim.calibrate.measure.bench import CORE_SHARE, Lap, synchronize
from rlsim.calibrate.measure.decoder import Batch, Decoder, KvCache, build_decoder, weight_splits
from rlsim.calibrate.measure.steps import step_times
from rlsim.errors import CalibrationError
from rlsim.models.model import Model


class Ask(NamedTuple):
    """One response to generate."""

    id: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Stage:
    """What the replicas are built for: the model, KV room for `slots` sequences of `max_tokens` a worker at TP 1."""

    model: Model
    slots: int
    max_tokens: int
    dtype: str


@dataclass(frozen=True)
class Plan:
    """One run. With `switch_to`, the layout changes once `switch_at` responses or fewer are unfinished."""

    asks: tuple[Ask, ...]
    tp: int
    budget_tokens: int  # of one prefill iteration
    switch_to: int = 0
    switch_at: int = 0


class Iteration(NamedTuple):
    """One iteration of a replica, as it was when it began. Times are seconds since the run began."""

    start_s: float
    seconds: float
    kind: str  # prefill or decode
    tp: int
    batch: int  # sequences decoded or prefilled
    context_tokens: int  # sum of the contexts, or tokens prefilled
    longest: int
    remaining: int  # unfinished responses of the whole rollout
    replica: int


@dataclass
class Run:
    """What all replicas did."""

    iterations: list[Iteration]
    finished_s: dict[int, float]  # response: since the run began
    core_share: float = 1.0  # least share of its core that a worker had while it was at work
    pause_s: float = 0.0  # of the switch: from the last replica's stop to the first step after it
    last_token: dict[int, int] = field(default_factory=dict)  # of each response: the same under every layout

    @property
    def disturbed(self) -> bool:
        return self.core_share < CORE_SHARE

    @property
    def makespan_s(self) -> float:
        return max(self.finished_s.values())


# ---- on a worker -----------------------------------------------------------------------------------------------------


def prepare(worker: Any, stage: Stage, tps: Sequence[int]) -> None:
    """Build the decoders of these degrees around one KV pool; they stay on the worker."""
    dtype = getattr(torch, stage.dtype)
    cache = KvCache(stage.model, stage.slots, stage.max_tokens, worker.device, dtype)
    worker.state["decoders"] = {tp: build_decoder(worker, stage.model, tp, cache, dtype) for tp in tps}
    board = worker.folder / "finished"
    if worker.rank == 0:
        np.zeros((worker.size, 8), dtype=np.int64).tofile(board)
    worker.all.together()
    worker.state["finished"] = np.memmap(board, dtype=np.int64, mode="r+", shape=(worker.size, 8))


def decode_times(worker: Any, tp: int, contexts: Sequence[int], repeats: int) -> list[Lap]:
    """Each of `repeats` decode steps of these contexts, all replicas at once."""
    with torch.inference_mode():
        batch = Batch(worker.state["decoders"][tp])
        batch.arrive(range(len(contexts)), contexts, [0] * len(contexts))
        return step_times(worker, batch.step, batch.rewind, repeats + 3)[3:]


def prefill_times(worker: Any, tp: int, lengths: Sequence[int], repeats: int) -> list[Lap]:
    """Each of `repeats` prefills of prompts of these lengths, all replicas at once."""
    with torch.inference_mode():
        batch = Batch(worker.state["decoders"][tp])
        prompts = [_prompt(batch.decoder.model.vocab_size, i, length) for i, length in enumerate(lengths)]
        ids = range(len(lengths))
        return step_times(worker, lambda: batch.prefill(ids, prompts), lambda: batch.leave(ids), repeats + 1)[1:]


def switch_times(worker: Any, from_tp: int, to_tp: int, contexts: Sequence[int], repeats: int) -> list[Lap]:
    """Each of `repeats` switches with sequences of these contexts, dealt in turn over the replicas."""
    replicas = worker.size // from_tp
    own = contexts[worker.rank // from_tp :: replicas]
    with torch.inference_mode():
        batch = Batch(worker.state["decoders"][from_tp])
        batch.arrive(range(len(own)), own, [0] * len(own))
        return step_times(
            worker, lambda: _switch(worker, batch, [], to_tp), lambda: worker.all.together(), repeats + 1
        )[1:]


def rollout(worker: Any, plan: Plan) -> tuple[float, Run]:
    """Carry out `plan`: the moment it began, and what this worker's replica did, in moments of the same clock.

    Only the first rank of a replica has something to tell. Raises `CalibrationError` for a switch from several
    replicas of several ranks each.
    """
    decoders: dict[int, Decoder] = worker.state["decoders"]
    replicas, number = worker.size // plan.tp, worker.rank // plan.tp
    if plan.switch_to and plan.tp > 1 and replicas > 1:
        raise CalibrationError("a switch needs replicas of one rank, or one replica: its ranks must stop together")
    if plan.switch_to:  # what the switch does not bring is not there
        for weight in itertools.chain.from_iterable(w.values() for w in decoders[plan.switch_to].weights):
            weight.zero_()
    share = np.array_split(np.arange(len(plan.asks)), replicas)[number]
    run = Run([], {})
    replica = _Replica(worker, plan, run, Batch(decoders[plan.tp]), [plan.asks[i] for i in share])
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            worker.state["finished"][worker.rank] = 0
            worker.all.together()
            began, busy = time.perf_counter(), time.process_time()
            replica.drain(plan.switch_at if plan.switch_to else -1)
            if plan.switch_to:
                stopped = time.perf_counter()
                batch, waiting = _switch(worker, replica.batch, replica.waiting, plan.switch_to)
                resumed = time.perf_counter()
                run.pause_s = resumed - max(worker.all.agree(stopped))
                replica.follow(batch, waiting, sum(worker.all.agree(len(batch) + len(waiting))) // plan.switch_to)
                replica.drain(-1)
            run.core_share = min((time.process_time() - busy) / (time.perf_counter() - began), 1.0)
    finally:
        if collecting:
            gc.enable()
    return began, run


class _Replica:
    """The loop of one rank of a replica."""

    def __init__(self, worker: Any, plan: Plan, run: Run, batch: Batch, waiting: list[Ask]) -> None:
        self.worker, self.plan, self.run = worker, plan, run
        self.asks = {ask.id: ask for ask in plan.asks}
        vocabulary = batch.decoder.model.vocab_size
        self.prompts = {ask.id: _prompt(vocabulary, ask.id, ask.prompt_tokens) for ask in plan.asks}
        self.board = worker.state["finished"]
        self.follow(batch, waiting, len(plan.asks))

    def follow(self, batch: Batch, waiting: list[Ask], left: int) -> None:
        """Go on with this batch and queue; `left` responses of all replicas are unfinished."""
        self.batch, self.waiting = batch, waiting
        self.ends = [self._end(number) for number in batch.ids]  # contexts at which responses are complete, by place
        self.first = batch.decoder.index == 0
        self.alone = self.worker.size == batch.decoder.tp  # all ranks of one replica know the count, and must agree
        self.left = left

    def drain(self, stop_at: int) -> None:
        """Iterate until nothing is left, or to a boundary at which `stop_at` responses or fewer are unfinished."""
        batch, device, now = self.batch, self.worker.device, time.perf_counter
        tp, replica = batch.decoder.tp, self.worker.rank // batch.decoder.tp
        began = now()
        while True:
            left = self.left if self.alone else len(self.asks) - int(self.board[:, 0].sum())
            if left <= stop_at or not (self.waiting or batch.ids):
                return
            if self.waiting:
                asks = self._admitted()
                prompts = [self.prompts[ask.id] for ask in asks]
                state = ("prefill", tp, len(asks), sum(map(len, prompts)), max(map(len, prompts)), left, replica)
                batch.prefill([ask.id for ask in asks], prompts)
                self.ends += [self._end(ask.id) for ask in asks]
            else:
                state = ("decode", tp, len(batch), batch.context_tokens, batch.longest, left, replica)
                batch.step()
            synchronize(device)
            over = now()
            if self._finish(over):
                synchronize(device)
                over = now()
            if self.first:
                self.run.iterations.append(Iteration(began, over - began, *state))
            began = over

    def _finish(self, moment: float) -> bool:
        """Let go of the complete responses, if there are any."""
        batch = self.batch
        done = [i for i, (end, context) in enumerate(zip(self.ends, batch.contexts, strict=True)) if context >= end]
        if not done:
            return False
        if self.first:
            for place in done:
                number = batch.ids[place]
                self.run.finished_s[number] = moment
                self.run.last_token[number] = int(batch.tokens[place])
            self.board[self.worker.rank, 0] += len(done)
        self.left -= len(done)
        batch.leave(done)
        self.ends = [self._end(number) for number in batch.ids]
        return True

    def _end(self, number: int) -> int:
        ask = self.asks[number]
        return ask.prompt_tokens + ask.response_tokens

    def _admitted(self) -> list[Ask]:
        """The head of the queue, and those after it while the token budget lasts."""
        left, count = self.plan.budget_tokens, 0
        while count < len(self.waiting) and (count == 0 or self.waiting[count].prompt_tokens <= left):
            left -= self.waiting[count].prompt_tokens
            count += 1
        admitted, self.waiting = self.waiting[:count], self.waiting[count:]
        return admitted


def _switch(worker: Any, batch: Batch, waiting: Sequence[Ask], tp: int) -> tuple[Batch, list[Ask]]:
    """The whole switch: agree on what there is, deal it out, move weights and KV. Returns what this rank goes on with.

    Sequences are dealt as docs/engine.md says: longest context first, each to the replica with the least so far.
    """
    old, target = batch.decoder, worker.state["decoders"][tp]
    own = list(zip(batch.ids, batch.contexts, batch.tokens[: len(batch)].tolist(), strict=True)), list(waiting)
    found = worker.all.agree(own)[:: old.tp]
    live = [
        (number, context, token, i, slot)
        for i, (running, _) in enumerate(found)
        for slot, (number, context, token) in enumerate(running)
    ]
    others = [ask for _, queue in found for ask in queue]
    loads = [0] * (worker.size // tp)
    place = {}
    for context, number in sorted(
        [(context, number) for number, context, *_ in live] + [(ask.prompt_tokens, ask.id) for ask in others],
        key=lambda item: (-item[0], item[1]),
    ):
        place[number] = min(range(len(loads)), key=lambda i: (loads[i], i))
        loads[place[number]] += context
    slots = [0] * len(loads)
    moves = []
    for number, context, _, replica, slot in live:
        to = place[number]
        moves.append(Move(context - 1, replica, slot, to, slots[to]))
        slots[to] += 1
    reshard(old, target)
    migrate(worker, old.cache, old.tp, tp, moves)
    here = worker.rank // tp
    mine = [item for item in live if place[item[0]] == here]
    following = Batch(target)
    following.arrive([item[0] for item in mine], [item[1] for item in mine], [item[2] for item in mine])
    worker.all.together()
    return following, [ask for ask in others if place[ask.id] == here]


# Both go layer by layer, so that never more than one layer is there twice.


class Move(NamedTuple):
    """One sequence with `tokens` in the cache, from a slot of a replica of the old layout to one of the new."""

    tokens: int
    from_replica: int
    from_slot: int
    to_replica: int
    to_slot: int


def reshard(decoder: Decoder, into: Decoder) -> None:
    """The weights of `decoder` to one of another degree: its ranks gather each weight, and every rank keeps its slice.

    From TP 1 nothing is gathered. All workers call this together. The KV cache stays as it is: see `migrate`.
    """
    for layer, old, new in zip(weight_splits(decoder.model), decoder.weights, into.weights, strict=True):
        for name, split in layer.items():
            shares = [old[name]] if split.axis is None else decoder.ranks.all_gather(old[name])
            split.slice(split.join(shares), into.tp, into.index, new[name])


def migrate(worker: Any, cache: KvCache, from_tp: int, to_tp: int, moves: Sequence[Move]) -> None:
    """Move the KV of live sequences from one layout to another inside the same pool.

    A rank sends to every rank of the sequence's new replica the heads that one keeps. All workers call this together,
    with the same moves.
    """
    heads, own = cache.model.num_key_value_heads, worker.rank
    outgoing = _parts(own, heads, from_tp, to_tp, moves)
    incoming = _parts(own, heads, to_tp, from_tp, [Move(m.tokens, *m[3:], *m[1:3]) for m in moves])
    for layer in range(cache.model.num_hidden_layers):
        source, target = cache.layer(layer, from_tp), cache.layer(layer, to_tp)
        packed = {peer: torch.cat([source[part].reshape(-1) for part in parts]) for peer, parts in outgoing.items()}
        places = {peer: [target[part] for part in parts] for peer, parts in incoming.items()}
        sizes = {peer: sum(place.numel() for place in found) for peer, found in places.items() if peer != own}
        received = worker.all.exchange({peer: x for peer, x in packed.items() if peer != own}, sizes, source)
        for peer, found in places.items():
            flat = packed[own] if peer == own else received[peer]
            for place, x in zip(found, torch.split(flat, [place.numel() for place in found]), strict=True):
                place.copy_(x.view(place.shape))


def _parts(rank: int, heads: int, own_tp: int, other_tp: int, moves: Sequence[Move]) -> dict[int, list[Any]]:
    """By peer, in the order of `moves`: what the sequences leaving `rank`'s replica have in common with the peer, as
    indices into this rank's layer of the cache."""
    own, other = heads // own_tp, heads // other_tp
    first = rank % own_tp * own
    parts: dict[int, list[Any]] = {}
    for move in moves:
        if move.from_replica != rank // own_tp:
            continue
        for index in range(other_tp):
            low, high = max(first, index * other), min(first + own, (index + 1) * other)
            if low < high:
                part = (slice(None), move.from_slot, slice(move.tokens), slice(low - first, high - first))
                parts.setdefault(move.to_replica * other_tp + index, []).append(part)
    return parts


def _prompt(vocabulary: int, number: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(0, vocabulary, length)]


# ---- from all workers ------------------------------------------------------------------------------------------------


def carry_out(workers: Any, plan: Plan) -> Run:
    """`plan` on prepared workers (see `prepare`), as one run whose clock starts when the first worker began."""
    parts: list[tuple[float, Run]] = workers.call(rollout, plan)
    zero = min(began for began, _ in parts)
    run = Run([], {}, min(part.core_share for _, part in parts), max(part.pause_s for _, part in parts))
    for _, part in parts:
        run.iterations += [iteration._replace(start_s=iteration.start_s - zero) for iteration in part.iterations]
        run.finished_s |= {number: moment - zero for number, moment in part.finished_s.items()}
        run.last_token |= part.last_token
    run.iterations.sort()
    return run

"""A rollout carried out for real: every worker is a rank of a replica that decodes under the rules of docs/engine.md.

Response lengths are forced, tokens are sampled greedily, weights are random. Functions here run on workers
(`Workers.call`) and must be called by all of them together.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evidence.validate.rollout_steps import Ask, Plan
from rlsim.calibrate.measure.bench import CORE_SHARE, Call, Lap, laps, synchronize
from rlsim.calibrate.measure.decoder import Batch, Decoder, KvCache, Split, random_weights, weight_splits
from rlsim.calibrate.measure.ranks import Ranks
from rlsim.errors import CalibrationError
from rlsim.models.model import Model


class Iteration(NamedTuple):
    """One iteration of a replica, as it was when it began."""

    kind: str  # prefill or decode
    tp: int
    batch: int  # sequences decoded or prefilled
    context_tokens: int  # sum of the contexts, or tokens prefilled
    longest: int
    remaining: int  # unfinished responses of the whole rollout
    replica: int
    seconds: float


@dataclass
class Run:
    """What all replicas did."""

    iterations: list[Iteration] = field(default_factory=list)
    finished_s: dict[int, float] = field(default_factory=dict)  # response: since the run began
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


def prepare(worker: Any, model: Model, slots: int, max_tokens: int, dtype: str, tps: Sequence[int]) -> None:
    """Build decoders of these degrees around one KV pool, with room for `slots` sequences of `max_tokens` a worker at
    TP 1; they stay on the worker."""
    kind = getattr(torch, dtype)
    cache = KvCache(model, slots, max_tokens, worker.device, kind)
    worker.state["decoders"] = {tp: build_decoder(worker, model, tp, cache, kind) for tp in tps}
    board = worker.folder / "finished"
    if worker.rank == 0:
        np.zeros((worker.size, 8), dtype=np.int64).tofile(board)
    worker.all.together()
    worker.state["finished"] = np.memmap(board, dtype=np.int64, mode="r+", shape=(worker.size, 8))


def build_decoder(worker: Any, model: Model, tp: int, cache: KvCache, dtype: torch.dtype) -> Decoder:
    """This worker's rank of a decoder at `tp`: consecutive workers share a replica. All workers call it together.

    Raises `CalibrationError` if the ranks cannot share the heads, the MLP or the vocabulary evenly.
    """
    weights = random_weights(model, tp, worker.rank % tp, worker.device, dtype)
    return Decoder(model, tp, worker.rank % tp, worker.ranks(tp), worker.device, weights, cache)


def step_times(worker: Any, run: Call, undo: Call, repeats: int) -> list[Lap]:
    """Each of `repeats` runs that all workers begin together."""
    worker.all.together()
    return laps(run, repeats, worker.device, undo)


def times(worker: Any, kind: str, shape: Any, repeats: int) -> list[Lap]:
    """Each of `repeats` steps of a kind and shape of `rollout_steps.shapes`, all replicas at once; the sequences of a
    switch are dealt in turn over the replicas."""
    tp, *after, lengths = shape
    batch, warm_up = Batch(worker.state["decoders"][tp]), 3 if kind == "decode" else 1
    with torch.inference_mode():
        if kind == "prefill":
            prompts, ids = [_prompt(batch.decoder, i, length) for i, length in enumerate(lengths)], range(len(lengths))
            found = step_times(worker, lambda: batch.prefill(ids, prompts), lambda: batch.leave(ids), repeats + warm_up)
        else:
            own = lengths if kind == "decode" else lengths[worker.rank // tp :: worker.size // tp]
            batch.arrive(range(len(own)), own, [0] * len(own))
            run = batch.step if kind == "decode" else lambda: _switch(worker, batch, [], *after)
            undo = batch.rewind if kind == "decode" else worker.all.together
            found = step_times(worker, run, undo, repeats + warm_up)
    return found[warm_up:]


def rollout(worker: Any, plan: Plan) -> tuple[float, Run]:
    """Carry out `plan`: the moment it began, and what this worker's replica did, in moments of the same clock.

    Only the first rank of a replica has something to tell. Raises `CalibrationError` for a switch from several
    replicas of several ranks each.
    """
    decoders: dict[int, Decoder] = worker.state["decoders"]
    replicas = worker.size // plan.tp
    if plan.switch_to and plan.tp > 1 and replicas > 1:
        raise CalibrationError("a switch needs replicas of one rank, or one replica: its ranks must stop together")
    if plan.switch_to:  # what the switch does not bring is not there
        for weight in itertools.chain.from_iterable(w.values() for w in decoders[plan.switch_to].weights):
            weight.zero_()
    run, batch = Run(), Batch(decoders[plan.tp])
    share = np.array_split(np.arange(len(plan.asks)), replicas)[worker.rank // plan.tp]
    waiting = [plan.asks[i] for i in share]
    prompts = {ask.id: _prompt(batch.decoder, ask.id, ask.prompt_tokens) for ask in plan.asks}
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            worker.state["finished"][worker.rank] = 0
            worker.all.together()
            began, busy = time.perf_counter(), time.process_time()
            _drain(worker, plan, prompts, run, batch, waiting, plan.switch_at if plan.switch_to else -1)
            if plan.switch_to:
                stopped = time.perf_counter()
                batch, waiting = _switch(worker, batch, waiting, plan.switch_to)
                resumed = time.perf_counter()
                run.pause_s = resumed - max(worker.all.agree(stopped))
                _drain(worker, plan, prompts, run, batch, waiting, -1)
            run.core_share = min((time.process_time() - busy) / (time.perf_counter() - began), 1.0)
    finally:
        gc.enable()
    return began, run


def _drain(
    worker: Any, plan: Plan, prompts: Mapping[int, list[int]], run: Run, batch: Batch, waiting: list[Ask], stop_at: int
) -> None:
    """Iterate until nothing is left, or to a boundary at which `stop_at` responses or fewer are unfinished."""
    device, now, board = worker.device, time.perf_counter, worker.state["finished"]
    tp, replica, first = batch.decoder.tp, worker.rank // batch.decoder.tp, batch.decoder.index == 0
    ends = {ask.id: ask.prompt_tokens + ask.response_tokens for ask in plan.asks}  # contexts of complete responses
    alone = worker.size == tp  # all ranks of one replica know the count, and must agree
    left = len(ends) - int(board[:, 0].sum())
    began = now()
    while left > stop_at and (waiting or batch.ids):
        if waiting:
            asks, room = [waiting.pop(0)], plan.budget_tokens  # the head of the queue, and others while there is room
            room -= asks[0].prompt_tokens
            while waiting and waiting[0].prompt_tokens <= room:
                room -= waiting[0].prompt_tokens
                asks.append(waiting.pop(0))
            sizes = [ask.prompt_tokens for ask in asks]
            state = ("prefill", tp, len(asks), sum(sizes), max(sizes), left, replica)
            batch.prefill([ask.id for ask in asks], [prompts[ask.id] for ask in asks])
        else:
            state = ("decode", tp, len(batch), batch.context_tokens, batch.longest, left, replica)
            batch.step()
        synchronize(device)
        over = now()
        sequences = enumerate(zip(batch.ids, batch.contexts, strict=True))
        if done := [place for place, (number, context) in sequences if context >= ends[number]]:
            if first:
                for place in done:
                    run.finished_s[batch.ids[place]] = over
                    run.last_token[batch.ids[place]] = int(batch.tokens[place])
                board[worker.rank, 0] += len(done)
            left -= len(done)
            batch.leave(done)
            synchronize(device)
            over = now()
        if first:
            run.iterations.append(Iteration(*state, over - began))
        began = over
        if not alone:
            left = len(ends) - int(board[:, 0].sum())


def _switch(worker: Any, batch: Batch, waiting: Sequence[Ask], tp: int) -> tuple[Batch, list[Ask]]:
    """The whole switch: agree on what there is, deal it out, move weights and KV. Returns what this rank goes on with.

    Sequences are dealt as docs/engine.md says: longest context first, each to the replica with the least so far.
    """
    old, target = batch.decoder, worker.state["decoders"][tp]
    own = list(zip(batch.ids, batch.contexts, batch.tokens[: len(batch)].tolist(), strict=True)), list(waiting)
    found = worker.all.agree(own)[:: old.tp]
    live = [(*one, replica, slot) for replica, (running, _) in enumerate(found) for slot, one in enumerate(running)]
    others = [ask for _, queue in found for ask in queue]
    loads, place = [0] * (worker.size // tp), dict[int, int]()
    sizes = [(number, context) for number, context, *_ in live] + [(ask.id, ask.prompt_tokens) for ask in others]
    for number, context in sorted(sizes, key=lambda one: (-one[1], one[0])):
        place[number] = loads.index(min(loads))
        loads[place[number]] += context
    slots = [itertools.count() for _ in loads]
    moves = [
        Move(context - 1, replica, slot, place[number], next(slots[place[number]]))
        for number, context, _, replica, slot in live
    ]
    reshard(old, target)
    migrate(worker, old.cache, old.tp, tp, moves)
    here = worker.rank // tp
    following = Batch(target)
    following.arrive(*([one[i] for one in live if place[one[0]] == here] for i in range(3)))
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
            split.slice(_whole(split, shares), into.tp, into.index, new[name])


def _whole(split: Split, shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole weight from all ranks' shares."""
    if split.axis is None or len(shares) == 1:
        return shares[0]
    sizes = [part // len(shares) for part in split.parts]
    cuts = zip(*(torch.split(share, sizes, split.axis) for share in shares), strict=True)
    return torch.cat([torch.cat(cut, split.axis) for cut in cuts], split.axis)


def exchange(
    ranks: Ranks, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], like: torch.Tensor
) -> dict[int, torch.Tensor]:
    """A flat tensor to each of some other ranks, and from those in `sizes` one of so many numbers each.

    All are on the device and of the type of `like`.
    """
    if ranks.size == 1:
        return {}
    first = dist.get_global_rank(ranks.group, 0)
    found = {peer: like.new_empty(size) for peer, size in sizes.items()}
    operations = [dist.P2POp(dist.isend, tensor, first + peer) for peer, tensor in sends.items()]
    operations += [dist.P2POp(dist.irecv, tensor, first + peer) for peer, tensor in found.items()]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    return found


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
        received = exchange(worker.all, {peer: x for peer, x in packed.items() if peer != own}, sizes, source)
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


def _prompt(decoder: Decoder, number: int, length: int) -> list[int]:
    drawn = np.random.default_rng(number).integers(0, decoder.model.vocab_size, length)
    return [int(token) for token in drawn]


# ---- from all workers ------------------------------------------------------------------------------------------------


def carry_out(workers: Any, plan: Plan) -> Run:
    """`plan` on prepared workers (see `prepare`), as one run whose clock starts when the first worker began."""
    parts: list[tuple[float, Run]] = workers.call(rollout, plan)
    zero = min(began for began, _ in parts)
    run = Run(core_share=min(own.core_share for _, own in parts), pause_s=max(own.pause_s for _, own in parts))
    for _, own in parts:
        run.iterations += own.iterations
        run.finished_s |= {number: moment - zero for number, moment in own.finished_s.items()}
        run.last_token |= own.last_token
    return run

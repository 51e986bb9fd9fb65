"""What a control may ask for while a rollout goes on, besides a `Launch`; each action carries itself out.

docs/engine.md says exactly when each takes effect.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import simpy

from rlsim.cost.transfer import IN_PLACE, RESTART, SwitchWay
from rlsim.errors import RlsimError
from rlsim.sim.control import Action, Launch, RefusedError, one_of
from rlsim.sim.gpus import Borrowing, KvHandling
from rlsim.sim.node import Node, active
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request
from rlsim.sim.rollout import Order, Rollout

_Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Reconfigure(Action):
    """Give a whole node a new tensor-parallel degree, and say what becomes of the KV cache, and how the rest goes."""

    node: int
    tp: int
    kv: KvHandling = "migrate"
    way: SwitchWay = IN_PLACE

    def __post_init__(self) -> None:
        if self.way == RESTART:  # which no KV cache outlives
            object.__setattr__(self, "kv", "recompute")

    def carry_out(self, rollout: Rollout) -> None:
        _check(self.node < len(rollout.nodes), f"there is no node {self.node}")
        node = rollout.nodes[self.node]
        _check(node.own, f"node {self.node} is training's, and keeps its layout")
        _check(self.tp != node.tp, "the node has that layout already")
        if why := _unfit(rollout, node, self.tp):
            others = {*range(1, len(node.gpus) + 1)} - {node.tp}
            fits = [tp for tp in sorted(others) if not _unfit(rollout, node, tp)]
            raise RefusedError(f"{why}; possible: {one_of(fits) if fits else 'none'}")
        if not node.switched and len(active([node])) == len(node.replicas) > 0:
            node.switched = rollout.env.event()
            rollout.env.process(self._switch(rollout, node, [replica.stop() for replica in node.replicas]))

    def _switch(self, rollout: Rollout, node: Node, stops: Sequence[simpy.Event]) -> _Process:
        for event in stops:  # noqa: UP028 - what SimPy sends back is for us, a list could not take it
            yield event
        if rollout.stopping:
            return
        old = node.replicas
        version = max(replica.version for replica in old)
        drained = [rollout.take(replica, "switched") for replica in old]
        holding = [r for running, _ in drained for r in running]
        requests = [*holding, *(r for _, others in drained for r in others)]
        if not (requests or node.bound_for):  # nothing to switch for
            rollout.start_at_end(node, node.tp, version)
            return
        contexts, first_use = [r.context for r in holding], self.tp not in node.used_tps
        cost = node.costs.switch(
            len(node.gpus), node.tp, self.tp, contexts, len(requests), self.kv, first_use, self.way
        )
        node.used_tps.add(self.tp)
        rollout.switches.append((rollout.env.now, self.node, node.tp, self.tp, cost))
        node.way, node.pause = self.way, (rollout.env.now, self.tp, f"TP{node.tp} to TP{self.tp}")
        yield rollout.env.timeout(cost.total_s)
        if rollout.stopping:  # it was over before the switch was
            return
        node.end_pause(rollout.recorder, rollout.env.now)
        version = max(version, rollout.updates.together)  # where all have been updated meanwhile
        for replica, (running, _) in zip(old, drained, strict=True):
            for request in running:
                request.kv_arrived = self.kv == "migrate" and rollout.updates.keeps(replica.version, version)
        rollout.start_at_end(node, self.tp, version, requests)


@dataclass(frozen=True, slots=True)
class Migrate(Action):
    """Move requests to another replica."""

    requests: tuple[int, ...]
    to: int
    kv: KvHandling = "migrate"

    def carry_out(self, rollout: Rollout) -> None:
        (to,), _ = _replicas(rollout, [self.to]), _requests(rollout, self.requests)
        if to.stopped is not None:
            return
        sources = [(r, i - rollout.leaving) for r, i in rollout.where(self.requests) if r is not to]
        sources = [(r, i) for r, i in sources if i]  # the first migration of a request counts until it has left
        rollout.leaving.update(*(ids for _, ids in sources))
        moving: list[_Moving] = []
        waiting_for, number = len(sources), next(rollout.migrations)

        def leave(source: Replica, ids: frozenset[int]) -> None:
            nonlocal waiting_for
            rollout.leaving -= ids
            running, others = rollout.take(source, "migrated", ids)
            moving.extend([_Moving(r, source, source.version) for r in running])
            moving.extend([_Moving(r, source, None) for r in others])
            rollout.moved += len(running) + len(others)
            rollout.nodes[to.node].bound_for += len(running) + len(others)
            waiting_for -= 1
            if waiting_for == 0 and moving:
                rollout.env.process(self._transfer(rollout, number, moving, to))

        for source, ids in sources:
            source.at_boundary(lambda s=source, i=ids: leave(s, i))  # type: ignore[misc]

    def _transfer(self, rollout: Rollout, number: int, moving: list[_Moving], to: Replica) -> _Process:
        place = {id_: i for i, id_ in enumerate(self.requests)}
        moving.sort(key=lambda one: place[one.request.id])
        with_kv = [one for one in moving if one.kv_version is not None]
        if self.kv == "migrate" and with_kv:
            near = all(_are_near(rollout, one.source, to) for one in with_kv)
            contexts, from_tp = [one.request.context for one in with_kv], with_kv[0].source.tp
            nodes = [rollout.nodes[replica.node] for replica in (to, *(one.source for one in with_kv))]
            ends = {node.own: node.costs for node in nodes}.values()  # the slower kind of GPU binds
            takes_s = max(costs.transfer_s(contexts, from_tp, to.tp, near) for costs in ends)
            if takes_s > 0:  # else it arrives before what leaves later
                yield rollout.env.timeout(takes_s)
        for request, _, kv_version in moving:
            fits = kv_version is not None and rollout.updates.keeps(kv_version, to.version)
            request.kv_arrived = fits and self.kv == "migrate"
        arrivals = [one.request for one in moving]
        rollout.nodes[to.node].bound_for -= len(arrivals)

        def arrive() -> None:
            if to.stopped and to.stopped.triggered:
                rollout.deal(arrivals)
            else:
                rollout.give(to, arrivals)

        if to.stopped is None or (rollout.stopping and not to.stopped.triggered):
            arrive()
        else:  # whether it stops at this very moment is known when that is over
            rollout.at_end((Order.ARRIVE, number), arrive)


def _are_near(rollout: Rollout, one: Replica, other: Replica) -> bool:
    """Whether KV cache goes from one to the other without the network between nodes."""
    domain_of = rollout.borrowing.there.domain_of if rollout.borrowing else None
    return one.node == other.node or bool(domain_of and domain_of(one.gpus[0]) == domain_of(other.gpus[0]))


class _Moving(NamedTuple):
    """A request on its way from one replica to another."""

    request: Request
    source: Replica
    kv_version: int | None  # of the weights of its KV cache, if it has one


@dataclass(frozen=True, slots=True)
class Release(Action):
    """Give up the GPUs of these replicas; their requests go to those that stay, to be recomputed.

    None of generation's own replicas go if all of them would. In continuous generation they are lent, until the next
    weights come. GPUs of training that are borrowed go back.
    """

    replicas: tuple[int, ...]

    def carry_out(self, rollout: Rollout) -> None:
        named = _replicas(rollout, sorted(set(self.replicas)))
        leaving = [(r, rollout.nodes[r.node].own) for r in named if r.stopped is None]
        all_own = sum(own for _, own in leaving) == sum(rollout.nodes[r.node].own for r in rollout.active())
        for replica, own in leaving:
            if not (own and all_own):
                replica.stop().callbacks.append(lambda _, r=replica: self._stopped(rollout, r))  # type: ignore[misc]

    def _stopped(self, rollout: Rollout, replica: Replica) -> None:
        rollout.at_end((Order.RELEASE, replica.index), lambda: self._let_go(rollout, replica))

    def _let_go(self, rollout: Rollout, replica: Replica) -> None:
        rollout.released += 1
        if rollout.borrowing and not rollout.nodes[replica.node].own:
            rollout.borrowing.give_back(replica.gpus)
        else:
            rollout.released_at.update(dict.fromkeys(replica.gpus, rollout.env.now))
            rollout.stage.on_release(replica.gpus)
            rollout.lent.append(replica)
        running, others = rollout.take(replica, "released")
        rollout.deal([*running, *others])


@dataclass(frozen=True, slots=True)
class Borrow(Action):
    """Have the replicas that there may be on GPUs of training, while it waits (`RolloutView.borrowable`).

    They begin to generate once they have the weights, and go on until a `Release` gives their GPUs back. Somebody
    waits for it as soon as `RolloutView.wanted_back`.
    """

    def carry_out(self, rollout: Rollout) -> None:
        if rollout.borrowing is None:
            raise RefusedError("no system part says that GPUs of training may be borrowed")
        if rollout.borrowing.offer():
            rollout.borrowing.take()
            rollout.env.process(self._begin(rollout, rollout.borrowing))

    def _begin(self, rollout: Rollout, borrowing: Borrowing) -> _Process:
        """Its replicas load the trainer's weights, which are those of the rollout."""
        there, start = borrowing.there, rollout.env.now
        yield rollout.env.timeout(there.load_s)
        for gpus in there.mesh:
            rollout.recorder.add(gpus, start, rollout.env.now, there.call, there.tp, "hybrid replicas")
        borrowing.loading = False
        if rollout.over:
            borrowing.give_back([gpu for gpus in there.mesh for gpu in gpus])
            return
        for node in rollout.nodes:
            if not node.own:
                rollout.start_at_end(node, there.tp, rollout.updates.version)
        rollout.ask()


@dataclass(frozen=True, slots=True)
class Abort(Action):
    """Drop these requests unfinished."""

    requests: tuple[int, ...]

    chosen: ClassVar[bool] = True  # by a control

    def carry_out(self, rollout: Rollout) -> None:
        rollout.drop([r.id for r in _requests(rollout, self.requests) if not r.parent], self.chosen)


class Surplus(Abort):
    """What a step's batching drops: nothing that a control did."""

    __slots__ = ()
    chosen = False


@dataclass(frozen=True, slots=True)
class Extend(Action):
    """Let those of these requests that have used up their budget go on, for so many tokens more."""

    requests: tuple[int, ...]
    tokens: int

    def carry_out(self, rollout: Rollout) -> None:
        rollout.extend(_requests(rollout, dict.fromkeys(self.requests)), self.tokens)


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End the rollout; what is unfinished is handed back with its tokens."""

    last = True

    def carry_out(self, rollout: Rollout) -> None:
        rollout.stopping = True
        rollout.env.process(self._stop(rollout))

    def _stop(self, rollout: Rollout) -> _Process:
        for replica in rollout.active():
            replica.stop()
        for replica in rollout.replicas:
            if replica.stopped is not None and not replica.stopped.processed:
                yield replica.stopped
        for replica in rollout.replicas:
            rollout.take(replica, "stopped")  # brings the tokens of what was running up to date
        rollout.end()


#: All there are.
ACTIONS: tuple[type[Action], ...] = (Reconfigure, Migrate, Release, Borrow, Abort, Launch, Extend, Stop)


def _check(fine: bool, why: str) -> None:
    if not fine:
        raise RefusedError(why)


def _requests(rollout: Rollout, ids: Iterable[int]) -> list[Request]:
    _check(rollout.by_id.keys() >= set(ids), "there is no such request")
    return [rollout.by_id[id_] for id_ in ids]


def _replicas(rollout: Rollout, indices: Sequence[int]) -> list[Replica]:
    missing = [i for i in indices if not 0 <= i < len(rollout.replicas)]
    _check(not missing, f"there is no replica {missing[0] if missing else ''}")
    return [rollout.replicas[i] for i in indices]


def _unfit(rollout: Rollout, node: Node, tp: int) -> str:
    """Why replicas of `tp` GPUs cannot follow on a node, each able to hold every unfinished response at its full
    length; empty if they can.
    """
    page_tokens, gpus = rollout.stage.config.page_tokens, len(node.gpus)
    if tp < 1 or gpus % tp:
        return f"{tp} does not divide the {gpus} GPUs of a node"
    try:
        pages, kv = node.costs.capacity_pages(tp), node.costs.step(tp).kv
        node.costs.switch(gpus, node.tp, tp, (), 0, "recompute", False)
    except RlsimError as error:
        return str(error)
    unfinished = (r.full_tokens for r in rollout.by_id.values() if not (r.finished or r.aborted))
    fits = kv.fits(max(unfinished, default=0), page_tokens, pages)
    return "" if fits else f"a replica holds {pages * page_tokens} tokens of KV, too few for a whole response"

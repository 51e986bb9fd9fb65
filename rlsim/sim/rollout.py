"""One generation stage: replicas on a mesh, a control that is asked as responses finish, and the actions it returns.

docs/engine.md is the specification.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from operator import attrgetter, itemgetter
from sys import maxsize
from typing import Any

import simpy

from rlsim.base.hooks import misused
from rlsim.cost.step import StepCost
from rlsim.cost.transfer import SwitchCost, SwitchWay
from rlsim.errors import PolicyError, RlsimError
from rlsim.sim.control import (
    Abort,
    Action,
    Borrow,
    Extend,
    Launch,
    Migrate,
    Reconfigure,
    Release,
    RolloutControl,
    Stop,
    Surplus,
    actions_of,
    asked,
    one_of,
)
from rlsim.sim.gpus import Borrowing, KvHandling, RolloutCosts
from rlsim.sim.moment import ASK, DEAL, IDLE, ONE_MOMENT, at, at_end, when_over
from rlsim.sim.recorder import Left
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request
from rlsim.sim.stage import GenerationStage, Shares, by_context, by_number, evenly
from rlsim.sim.trajectories import Trajectories
from rlsim.sim.updating import WeightUpdates
from rlsim.sim.view import RolloutState, RolloutView, view_of, view_of_replica


class Rollout(RolloutState):
    """Generates the requests of a stage on the nodes of its mesh.

    `done` fires when no request is left (with `open`, never for that alone), or a `Stop` has taken effect. Raises
    `PolicyError` for an action that names what is not there.
    """

    def __init__(self, env: simpy.Environment, stage: GenerationStage) -> None:
        super().__init__(env, (*stage.requests, *stage.resumed), stage.mesh, stage.tp, stage.borrowing)
        self.cap_tokens, self.label, self.backlog_s = stage.cap_tokens, stage.label, stage.backlog_s
        self.missing_share, self._used_tps = stage.batch_missing, stage.used_tps
        self.done = env.event()
        self.switches: list[tuple[float, int, int, int, SwitchCost]] = []  # when, node, from TP, to TP, what it cost
        self.ways: dict[int, SwitchWay] = {}  # by node: how it switched last
        self.released_at: dict[int, float] = {}  # GPU: when it was given up
        #: By actions of controls: responses that left for another replica, replicas given up, responses dropped.
        self.moved = self.released = self.aborted = 0
        self.replicas: list[Replica] = []  # all there ever were, by index
        self._stage = stage
        self._shared: Counter[int] = Counter()  # by GPU: how many other things run there too
        self._pauses: dict[int, tuple[float, int, str]] = {}  # nodes that pause for a switch: since when, to what
        self._homeless: list[Request] = []
        self._released: list[Replica] = []  # stopped at this moment
        self._emptied: list[Replica] = []  # had nothing left at this moment
        #: At this moment at replicas that are to stop: by the number of the migration, and last those whose tools did.
        self._stranded: list[tuple[int, list[Request], Replica | None]] = []
        self._migrations = itertools.count()
        #: Nodes that start at this moment: TP, version of the weights, requests.
        self._starting: dict[int, tuple[int, int, Sequence[Request]]] = {}
        self._leaving: set[int] = set()  # requests that a migration has told to leave, until they do
        self._dropped: set[int] = set()  # sub-agents at no replica: they are dropped at the next one
        self._at: dict[int, Replica] = {}  # by request: the replica that it was last given to
        tools = stage.environments
        self._trajectories = Trajectories(self, tools, stage.control) if tools else None
        self._longest: Request | None = None  # of those that were unfinished when that was last asked
        #: By method: the controls that answer to it, of `on_timer` with the seconds between two calls.
        self._asked: dict[str, list[tuple[RolloutControl, float]]] = {
            "on_finish": [(part, 0.0) for part in asked(stage.control, "on_finish")],
            "on_timer": [(part, part.every_s) for part in asked(stage.control, "on_timer") if part.every_s],
        }
        self._ranks = bool(asked(stage.control, "priority"))
        self._asks = stage.asked_at_finish and bool(self._asked["on_finish"])
        self._due: set[tuple[str, int]] = set()  # who is asked at the end of this moment: method, index
        self._answers: list[tuple[Action, RolloutControl, str]] = []  # the last ones: of whom, of which method
        self._ticks = False  # whether the next call of an `on_timer` is planned
        #: Nobody decides anything or is told of anything before the end.
        self._quiet = not (
            self._asks or self._asked["on_timer"] or stage.open or stage.on_finish or stage.chunks or stage.crowded
        )
        self._quiet &= all(r.limit_tokens == r.response_tokens for r in self._requests.values())
        self._bound_for = dict.fromkeys(self._tp, 0)  # requests migrating to the node
        self._stopping = False
        self.updates = WeightUpdates(self, stage.recorder, stage.version)
        self._numbers = itertools.count(1)

        for node, tp in self._tp.items():
            self._used_tps.setdefault(node, set()).add(tp)
        for node in range(self.own_nodes):
            self._start_node(node, stage.tp, stage.version)
        self._deal_new(stage.requests, self.active(), idle=True)
        if stage.resumed:
            self._deal_to_active(self._trajectories.resume(stage.resumed) if self._trajectories else stage.resumed)
        self._look_for_end()
        self._set_timer()
        if stage.borrowing:
            stage.borrowing.serve(lambda: self.updates.version, self.ask)
            self.ask()

    # ---- requests and replicas --------------------------------------------------------------------------------------

    def _start_node(self, node: int, tp: int, version: int) -> list[Replica]:
        gpus = self.mesh[node]
        started = [self._start(node, gpus[first : first + tp], version) for first in range(0, len(gpus), tp)]
        self._active[node] = started
        self._tp[node] = tp
        self.updates.started(started)
        return started

    def _start(self, node: int, gpus: tuple[int, ...], version: int) -> Replica:
        replica = Replica(
            self.env,
            len(self.replicas),
            node,
            gpus,
            self._step_cost(node, gpus),
            self._costs(node).capacity_pages(len(gpus)),
            self._stage.config,
            self._stage.recorder,
            self._finished,
            self._numbers,
            self._stage.chunks,
            self._quiet,
            version,
            self._costs(node).host_kv(len(gpus)),
        )
        self.replicas.append(replica)
        return replica

    def _costs(self, node: int) -> RolloutCosts:
        borrowing = self._stage.borrowing
        return borrowing.there.costs if borrowing and node >= self.own_nodes else self._stage.costs

    def _step_cost(self, node: int, gpus: tuple[int, ...]) -> StepCost:
        crowded = self._stage.crowded is not None and any(self._shared[gpu] for gpu in gpus)
        return (self._stage.crowded if crowded and self._stage.crowded else self._costs(node).step)(len(gpus))

    def share(self, gpus: tuple[int, ...], shared: bool) -> None:
        """Something else begins to run on these GPUs, or ends: replicas there take on their other pace."""
        (self._shared.update if shared else self._shared.subtract)(gpus)
        for replica in self.active():
            if not set(gpus).isdisjoint(replica.gpus):
                replica.at_boundary(lambda r=replica: r.set_cost(self._step_cost(r.node, r.gpus)))  # type: ignore[misc]

    def _give(self, replica: Replica, requests: Sequence[Request]) -> None:
        self._unfinished_on[replica.node] += len(requests)
        if self._ranks:
            for request in requests:
                place = self._stage.control.priority(view_of(request, request.context, running=False))
                request.priority = place or 0.0
        if requests:
            self._at.update(dict.fromkeys([r.id for r in requests], replica))
            replica.receive(requests)
            if dropped := self._dropped.intersection(r.id for r in requests):
                self._drop_at(replica, frozenset(dropped), Surplus(()))

    def _take(
        self, replica: Replica, left: Left, ids: frozenset[int] | None = None
    ) -> tuple[list[Request], list[Request]]:
        """Take requests (all, unless named) out of a replica at its boundary: the running ones, and the others."""
        running, others = replica.drain(left) if ids is None else replica.remove(ids, left)
        self._unfinished_on[replica.node] -= len(running) + len(others)
        for request in (*running, *others):
            del self._at[request.id]
            request.end_run(replica.version, request.generated)
        self._look_after(replica)
        return running, others

    def _look_after(self, replica: Replica) -> None:
        """Requests have left: if it has none at the end of this moment, it takes new weights, or other requests."""
        if self._stage.on_idle and replica.idle:
            if not self._emptied:
                when_over(self.env, IDLE, self._look_at_idle)
            self._emptied.append(replica)

    def _look_at_idle(self) -> None:
        emptied, self._emptied = self._emptied, []
        idle = [replica for replica in emptied if replica.idle and replica.stopped is None]
        for replica in idle:
            self.updates.refresh(replica)
        if idle and self._stage.on_idle:
            self._stage.on_idle()

    def _deal(self, shares: Shares) -> None:
        for index, share in shares.items():
            self._give(self.replicas[index], share)

    def _deal_to_active(self, requests: Sequence[Request]) -> None:
        """Give requests without KV to the active replicas with the least context; keep them while there is none."""
        load = {replica.index: replica.context_tokens() for replica in self.active()}
        for request in requests:
            request.kv_arrived = False
        if load:
            self._deal(by_context(requests, load))
        else:
            self._homeless.extend(requests)

    def _deal_new(self, requests: Sequence[Request], replicas: Sequence[Replica], idle: bool) -> None:
        """Give new requests to these replicas: as the control says, else evenly or to those that have the fewest."""
        if not replicas:
            self._homeless.extend(requests)
            return
        if (shares := self._wanted(requests, replicas)) is None and idle:
            even = evenly(requests, len(replicas), self._stage.routing)
            shares = {replica.index: share for replica, share in zip(replicas, even, strict=True)}
        elif shares is None:
            shares = by_number(requests, {replica.index: replica.unfinished for replica in replicas})
        if self._stage.micro_batches > 1 and idle:
            for share in shares.values():
                for number, part in enumerate(evenly(share, self._stage.micro_batches, "contiguous")):
                    for request in part:
                        request.micro_batch = number
        self._deal(shares)

    def _wanted(self, requests: Sequence[Request], replicas: Sequence[Replica]) -> Shares | None:
        if not requests or not asked(self._stage.control, "dispatch"):
            return None
        known = {request.id: request for request in requests}
        views = [view_of(request, request.context, running=False) for request in requests]
        wanted = self._stage.control.dispatch(views, [view_of_replica(replica) for replica in replicas])
        if wanted is None:
            return None
        named = [id_ for ids in wanted.values() for id_ in ids]
        if sorted(named) != sorted(known) or not wanted.keys() <= {replica.index for replica in replicas}:
            what = "returned a share that does not give each response to one of the replicas"
            raise misused(self._stage.control, "dispatch", what)
        return {index: [known[id_] for id_ in ids] for index, ids in wanted.items()}

    @property
    def takes_launches(self) -> bool:
        """Whether what is launched may go to a replica, or waits for those that start next as there is none."""
        return any(map(self.updates.takes_launches, self.there())) or not self.active()

    # ---- responses that somebody follows ----------------------------------------------------------------------------

    def version_of(self, request: Request) -> int:
        """Of the weights that generate it, or would next."""
        replica = self._at.get(request.id)
        return replica.version if replica else self.updates.version

    def forget(self, requests: Iterable[Request]) -> None:
        for request in requests:
            del self._requests[request.id]
            self._at.pop(request.id, None)

    def break_off(self) -> None:
        """The run is over: bring the tokens of what is running up to date, and take everything out."""
        for replica in self.active():
            replica.catch_up()
            self._take(replica, "stopped")
        if self._trajectories:
            self._trajectories.forget(self._requests.values())

    def close(self) -> None:
        """The rollout is over: note down the spans of replicas that were still there, and let go of the requests."""
        for replica in self.replicas:
            replica.retire()

    # ---- asking the control -----------------------------------------------------------------------------------------

    def _finished(self, replica: Replica, left: list[Request]) -> None:
        finished = [request for request in left if request.generated >= request.response_tokens]
        acting = self._trajectories.leave(replica, left) if self._trajectories else ()
        if self._trajectories:
            self.forget(request for request in finished if request.parent)
            finished = [request for request in finished if not request.parent]
        self.finished += len(finished)
        if (self._asks or self._asked["on_timer"]) and finished:
            lengths = [request.generated for request in finished]
            self.finished_lengths += lengths
            shortest, longest = self.finished_tokens
            self.finished_tokens = min(shortest or lengths[0], *lengths), max(longest, *lengths)
        self._unfinished -= len(left) - len(acting)
        self._unfinished_on[replica.node] -= len(left)
        if self._stage.on_finish and finished:
            self._stage.on_finish(finished)
        self._look_after(replica)
        if self._trajectories:
            self._trajectories.call(acting, replica)
        self._look_for_end()
        if self._asks and len(acting) < len(left) and not self.done.triggered:
            self._just_finished.add(replica.node)
            self.ask()

    def come_back(self, requests: Sequence[Request]) -> None:
        assert self._trajectories is not None
        elsewhere, paused, gone = list[Request](), False, False
        for request in requests:
            home = self._at.get(request.id)
            if request.at_limit:
                paused = True
                self._unfinished -= 1
            elif self._trajectories.sticky and home and home.stopped is None and request.generated:
                self._give(home, [request])
                continue
            else:
                elsewhere.append(request)
            if home:
                home.unpin(request)
                gone |= home.stopped is not None and not home.stopped.triggered
        if elsewhere and gone:  # what stops with their replica at this very moment is dealt before them
            self._deal_at_end()
            self._stranded.append((maxsize, elsewhere, None))
        elif elsewhere:
            self._deal_to_active(elsewhere)
        self._look_for_end()
        if paused and self._asks and not self.done.triggered:
            self.ask()

    def begin(self, agent: Request) -> None:
        """A sub-agent begins, where the least context is."""
        self._requests[agent.id] = agent
        self._unfinished += 1
        self._longest = None
        self._deal_to_active([agent])

    def drop(self, ids: Sequence[int], action: Abort = Surplus(())) -> None:  # noqa: B008 - it is frozen
        """Requests are dropped, at once or at their replicas' next boundaries, with their sub-agents."""
        if self._trajectories:
            ids = [id_ for id_ in self._trajectories.with_agents(ids) if id_ in self._requests]
        if away := self._drop_away(dict.fromkeys(ids)):
            self._drop(away, action)
        self._dropped |= {id_ for id_ in ids if id_ in self._requests and self._requests[id_].parent}
        for replica, there in self._where(ids, self._dropped):
            self._drop_at(replica, there, action)

    def _drop_at(self, replica: Replica, ids: frozenset[int], action: Abort) -> None:
        self._dropped -= ids
        replica.at_boundary(lambda: self._abort(replica, ids, action), urgent=True)

    def _drop_away(self, ids: Iterable[int]) -> list[Request]:
        """Trajectories that are at their tool calls do not come back."""
        dropped = self._trajectories.drop(ids) if self._trajectories else []
        for request in dropped:
            if home := self._at.get(request.id):
                home.unpin(request)
        return dropped

    def _is_away(self, id_: int) -> bool:
        return self._trajectories is not None and id_ in self._trajectories

    def _look_for_end(self) -> None:
        if self._unfinished == 0 and self._stage.open and self._stage.on_drained:
            self._stage.on_drained()
        elif self._unfinished == 0 and not self._stage.open and not self.done.triggered:
            self.done.succeed()

    def ask(self) -> None:
        """Have the controls asked at this moment, after everything else that happens at it."""
        self._ask_at_end({("on_finish", i) for i in range(len(self._asked["on_finish"]))})

    def _ask_at_end(self, due: set[tuple[str, int]]) -> None:
        if due and not self._due:
            when_over(self.env, ASK, self._ask)
        self._due |= due

    def _ask(self) -> None:
        due = sorted((method, i) for method, i in self._due if method != "on_timer" or self._unfinished)
        self._due = set()
        if self.done.triggered or self._stopping:
            return
        view = RolloutView(self)
        # All of it before anything is done, and while the view still shows this moment: it may be a generator.
        self._answers = []
        for method, i in due:
            part, _ = self._asked[method][i]
            self._answers += [(action, part, method) for action in actions_of(getattr(part, method)(view))]
            if any(isinstance(action, Stop) for action, *_ in self._answers):
                break
        self._just_finished.clear()
        for action, *_ in self._answers:
            if not self._stopping:
                self._carry_out(action)
        self._set_timer()

    def _set_timer(self) -> None:
        """Plan the next call of an `on_timer`; none while nothing is unfinished, or nothing else is going to happen."""
        if self._asked["on_timer"] and self._unfinished and not self._ticks and self.env.peek() < math.inf:
            self._ticks, now = True, self.env.now * (1 + ONE_MOMENT)
            next_at = [
                self.started_at + every_s * (math.floor((now - self.started_at) / every_s) + 1)
                for _, every_s in self._asked["on_timer"]
            ]
            first = min(next_at) * (1 + ONE_MOMENT)
            due = {("on_timer", i) for i, moment in enumerate(next_at) if moment <= first}
            at(self.env, min(next_at), lambda _: self._tick(due))

    def _tick(self, due: set[tuple[str, int]]) -> None:
        self._ticks = False
        self._ask_at_end(due)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reconfigure(node, tp, kv, way):
                self._check(node in self._active, action, f"there is no node {node}")
                self._check(node < self.own_nodes, action, f"node {node} is training's, and keeps its layout")
                self._check(tp != self._tp[node], action, "the node has that layout already")
                if why := self._unfit(node, tp):
                    others = {*range(1, len(self.mesh[node]) + 1)} - {self._tp[node]}
                    fits = [degree for degree in sorted(others) if not self._unfit(node, degree)]
                    self._check(False, action, f"{why}; possible: {one_of(fits) if fits else 'none'}")
                old = self._active[node]
                if node not in self._switching and len(self.active(node)) == len(old) > 0:
                    self._switching.add(node)
                    self.env.process(self._reconfigure(node, old, [replica.stop() for replica in old], tp, kv, way))
            case Migrate(requests, to, kv):
                self._check(0 <= to < len(self.replicas), action, f"there is no replica {to}")
                self._check(self._requests.keys() >= set(requests), action, "there is no such request")
                if self.replicas[to].stopped is None:
                    self._migrate(requests, self.replicas[to], kv)
            case Release(replicas):
                self._check(all(0 <= i < len(self.replicas) for i in replicas), action, "there is no such replica")
                leaving = [self.replicas[i] for i in sorted(set(replicas)) if self.replicas[i].stopped is None]
                borrowed = self.borrowed
                own = [replica for replica in leaving if replica not in borrowed]
                if len(own) == len(self.active()) - len(borrowed):
                    leaving = [replica for replica in leaving if replica in borrowed]
                for replica in leaving:
                    replica.stop().callbacks.append(lambda _, r=replica: self._release(r))  # type: ignore[misc]
            case Borrow():
                borrowing = self._stage.borrowing
                self._check(borrowing is not None, action, "no system part says that GPUs of training may be borrowed")
                if borrowing and borrowing.offer():
                    borrowing.take()
                    self.env.process(self._borrow(borrowing))
            case Abort(requests) as abort:
                self._check(self._requests.keys() >= set(requests), action, "there is no such request")
                self.drop([i for i in requests if not self._requests[i].parent], abort)
            case Launch():
                self.launch(action)
            case Extend(requests, tokens):
                self._check(self._requests.keys() >= set(requests), action, "there is no such request")
                self._extend([self._requests[i] for i in dict.fromkeys(requests)], tokens)
            case Stop():
                self._stopping = True
                self.env.process(self._stop())

    def _unfit(self, node: int, tp: int) -> str:
        """Why replicas of `tp` GPUs cannot follow on a node, each able to hold every unfinished response at its full
        length; empty if they can.
        """
        costs, page_tokens, gpus = self._stage.costs, self._stage.config.page_tokens, len(self.mesh[node])
        if tp < 1 or gpus % tp:
            return f"{tp} does not divide the {gpus} GPUs of a node"
        try:
            pages, kv = costs.capacity_pages(tp), costs.step(tp).kv
            costs.switch(gpus, self._tp[node], tp, (), 0, "recompute", False)
        except RlsimError as error:
            return str(error)
        if self._longest is None or self._longest.finished or self._longest.aborted:
            unfinished = (r for r in self._requests.values() if not (r.finished or r.aborted))
            self._longest = max(unfinished, key=attrgetter("full_tokens"), default=None)
        longest = self._longest.full_tokens if self._longest else 0
        room = pages * page_tokens
        fits = kv.fits(longest, page_tokens, pages)
        return "" if fits else f"a replica holds {room} tokens of KV, too few for a whole response"

    def _check(self, fine: bool, action: Action, why: str) -> None:
        if not fine:
            part, method = next((part, method) for wanted, part, method in self._answers if wanted is action)
            raise misused(part.author, method, f"returned {action!r}: {why}")

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _reconfigure(
        self,
        node: int,
        old: Sequence[Replica],
        stops: Sequence[simpy.Event],
        tp: int,
        kv: KvHandling,
        way: SwitchWay,
    ) -> Generator[simpy.Event, Any, None]:
        for event in stops:  # noqa: UP028 - what SimPy sends back is for us, a list could not take it
            yield event
        if self._stopping:
            return
        version = max(replica.version for replica in old)
        drained = [self._take(replica, "switched") for replica in old]
        holding = [r for running, _ in drained for r in running]
        others = [r for _, rest in drained for r in rest]
        if not (holding or others or self._bound_for[node]):  # nothing to switch for
            self._restart(node, self._tp[node], version)
            return
        old_tp = self._tp[node]
        contexts, sequences = [r.context for r in holding], len(holding) + len(others)
        first_use = tp not in self._used_tps[node]
        cost = self._stage.costs.switch(len(self.mesh[node]), old_tp, tp, contexts, sequences, kv, first_use, way)
        self._used_tps[node].add(tp)
        self.switches.append((self.env.now, node, old_tp, tp, cost))
        self.ways[node] = way
        self._pauses[node] = self.env.now, tp, f"TP{old_tp} to TP{tp}"
        yield self.env.timeout(cost.total_s)
        if self._stopping:  # the rollout was over before the switch was
            return
        self._end_pause(node)
        version = max(version, self.updates.together)  # where all have been updated meanwhile
        for replica, (running, _) in zip(old, drained, strict=True):
            for request in running:
                request.kv_arrived = kv == "migrate" and self.updates.keeps(replica.version, version)
        self._restart(node, tp, version, [*holding, *others])

    def _restart(self, node: int, tp: int, version: int, requests: Sequence[Request] = ()) -> None:
        """New replicas on a node, for these requests; nodes that start at this moment do so at its end, one by one."""
        if not self._starting:
            when_over(self.env, DEAL, self._start_nodes)
        self._starting[node] = tp, version, requests

    def _start_nodes(self) -> None:
        starting, self._starting = self._starting, {}
        if self._stopping or self.done.triggered:
            return
        for node, (tp, version, requests) in sorted(starting.items()):
            self._switching.discard(node)
            new, place = self._start_node(node, tp, version), {request.id: i for i, request in enumerate(requests)}
            self.updates.switched()
            shares = by_context(requests, {replica.index: 0 for replica in new})
            self._deal({index: sorted(share, key=lambda r: place[r.id]) for index, share in shares.items()})
        homeless, self._homeless = self._homeless, []  # those that nobody was there to take
        self._deal_to_active(homeless)

    def _migrate(self, ids: Sequence[int], to: Replica, kv: KvHandling) -> None:
        moving: list[tuple[Request, Replica, int | None]] = []
        sources = [(r, i - self._leaving) for r, i in self._where(ids) if r is not to]
        sources = [(r, i) for r, i in sources if i]  # the first migration of a request counts until it has left
        self._leaving.update(*(i for _, i in sources))
        waiting_for, number = len(sources), next(self._migrations)

        def leave(source: Replica, wanted: frozenset[int]) -> None:
            nonlocal waiting_for
            self._leaving -= wanted
            running, others = self._take(source, "migrated", wanted)
            moving.extend((r, source, source.version) for r in running)
            moving.extend((r, source, None) for r in others)
            self.moved += len(running) + len(others)
            self._bound_for[to.node] += len(running) + len(others)
            waiting_for -= 1
            if waiting_for == 0 and moving:
                self.env.process(self._transfer(number, moving, ids, to, kv))

        for source, wanted in sources:
            source.at_boundary(lambda s=source, w=wanted: leave(s, w))  # type: ignore[misc]

    def _transfer(
        self,
        number: int,
        moving: list[tuple[Request, Replica, int | None]],
        ids: Sequence[int],
        to: Replica,
        kv: KvHandling,
    ) -> Generator[simpy.Event, Any, None]:
        """Each with the replica that it comes from, and the version of the weights of its KV cache if it has one."""
        place = {id_: i for i, id_ in enumerate(ids)}
        moving.sort(key=lambda item: place[item[0].id])
        with_kv = [(r, source) for r, source, version in moving if version is not None]
        if kv == "migrate" and with_kv:
            same_node = all(self._is_near(source, to) for _, source in with_kv)
            contexts = [r.context for r, _ in with_kv]
            nodes = {to.node, *(source.node for _, source in with_kv)}
            ends = {id(costs): costs for costs in map(self._costs, nodes)}.values()  # the slower kind of GPU binds
            takes_s = max(c.transfer_s(contexts, with_kv[0][1].tp, to.tp, same_node) for c in ends)
            if takes_s > 0:  # else it arrives before what leaves later
                yield self.env.timeout(takes_s)
        arrivals = [r for r, _, _ in moving]
        for request, _, version in moving:
            fits = version is not None and self.updates.keeps(version, to.version)
            request.kv_arrived = fits and kv == "migrate"
        self._bound_for[to.node] -= len(arrivals)
        if to.stopped is None or (self._stopping and not to.stopped.triggered):
            self._give(to, arrivals)
        else:  # whether it stops at this very moment is known when that is over
            self._deal_at_end()
            self._stranded.append((number, arrivals, to))

    def _is_near(self, one: Replica, other: Replica) -> bool:
        """Whether KV cache goes from one to the other without the network between nodes."""
        if one.node == other.node or not self._stage.borrowing:
            return one.node == other.node
        domain_of = self._stage.borrowing.there.domain_of
        return domain_of(one.gpus[0]) == domain_of(other.gpus[0])

    def _release(self, replica: Replica) -> None:
        """It has stopped: when all that stop at this moment have, what they hold is dealt out, by index."""
        self._deal_at_end()
        self._released.append(replica)

    def _deal_at_end(self) -> None:
        """At the end of this moment those are dealt whose replicas are gone."""
        if not (self._released or self._stranded):
            at_end(self.env, DEAL, self._deal_released)

    def _deal_released(self, _: simpy.Event) -> None:
        released, self._released = sorted(self._released, key=attrgetter("index")), []
        stranded, self._stranded = sorted(self._stranded, key=itemgetter(0)), []
        if self._stopping or self.done.triggered:  # who waits for the rollout has its GPUs already
            return
        if self._starting:  # those that start at this moment are there for them too
            self._start_nodes()
        self.released += len(released)
        for replica in released:
            if replica.node >= self.own_nodes and self._stage.borrowing:
                self._stage.borrowing.give_back(replica.gpus)
            else:
                self.released_at.update(dict.fromkeys(replica.gpus, self.env.now))
                if self._stage.on_release:
                    self._stage.on_release(replica.gpus)
                self.lent.append(replica)
            running, others = self._take(replica, "released")
            self._deal_to_active([*running, *others])
        for _number, requests, to in stranded:
            if to and not (to.stopped and to.stopped.triggered):
                self._give(to, requests)
            else:
                self._deal_to_active(requests)

    def _borrow(self, borrowing: Borrowing) -> Generator[simpy.Event, Any, None]:
        """Replicas on GPUs of training load its weights, which are those of the rollout, and begin."""
        there, start = borrowing.there, self.env.now
        yield self.env.timeout(there.load_s)
        for gpus in there.mesh:
            self._stage.recorder.add(gpus, start, self.env.now, there.call, there.tp, "hybrid replicas")
        borrowing.loading = False
        if self._stopping or self.done.triggered:
            borrowing.give_back([gpu for gpus in there.mesh for gpu in gpus])
            return
        for node in range(self.own_nodes, len(self.mesh)):
            self._restart(node, there.tp, self.updates.version)
        self.ask()

    def take_back(self, lent: Sequence[Replica]) -> None:
        """New replicas on the GPUs of these, which were released, with the weights that they had."""
        for replica in lent:
            self.lent.remove(replica)
            there = self._active[replica.node]
            new = there[there.index(replica)] = self._start(replica.node, replica.gpus, replica.version)
            self.updates.started([new])

    def launch(self, launch: Launch) -> None:
        self._check(self._stage.launcher is not None, launch, "nothing can be launched here")
        requests = list(self._stage.launcher(launch)) if self._stage.launcher else []
        for request in requests:
            self._requests[request.id] = request
        self._longest = None
        idle = not self._unfinished
        self._unfinished += len(requests)
        self.launched += len(requests)
        self._set_timer()
        if launch.to and (wanted := [replica for replica in self.active() if replica.index in launch.to]):
            self._deal_new(requests, wanted, idle=False)
        elif self._stage.dispatch == "fewest_requests":
            self._deal_new(requests, [*filter(self.updates.takes_launches, self.active())], idle)
        else:
            self._deal_to_active(requests)

    def _extend(self, requests: Sequence[Request], tokens: int) -> None:
        paused = [r for r in requests if r.at_limit and not (r.finished or r.aborted or self._is_away(r.id))]
        for request in paused:
            request.allow(tokens)
        self._unfinished += len(paused)
        self._set_timer()
        self._deal_to_active(paused)

    def _abort(self, replica: Replica, ids: frozenset[int], action: Abort) -> None:
        running, others = self._take(replica, "aborted", ids)
        self._drop([*running, *others, *self._drop_away(ids)], action)

    def _drop(self, requests: Sequence[Request], action: Abort) -> None:
        for request in requests:
            request.aborted = True
            self._unfinished -= 1
        if self._trajectories:
            self._trajectories.end(requests)
            self.forget(request for request in requests if request.parent)
            requests = [request for request in requests if not request.parent]
        self.aborted += 0 if isinstance(action, Surplus) else len(requests)
        if self._stage.on_abort and requests:
            self._stage.on_abort(requests)
        if self._trajectories:
            self._trajectories.end_turn()
        self._look_for_end()

    def _stop(self) -> Generator[simpy.Event, Any, None]:
        for replica in self.active():
            replica.stop()
        for replica in self.replicas:
            if replica.stopped is not None and not replica.stopped.processed:
                yield replica.stopped
        for replica in self.replicas:
            self._take(replica, "stopped")  # brings the tokens of what was running up to date
        if self._trajectories:
            self._trajectories.forget(self._requests.values())
        for node in list(self._pauses):
            self._end_pause(node)
        if not self.done.triggered:
            self.done.succeed()

    def _end_pause(self, node: int) -> None:
        start, tp, label = self._pauses.pop(node)
        self._stage.recorder.add(self.mesh[node], start, self.env.now, "switch", tp, label)

    def _where(self, ids: Sequence[int], last: Container[int] = ()) -> list[tuple[Replica, frozenset[int]]]:
        """The active replicas that hold some of these requests, and which; of `last` those that are to stop, too."""
        found: dict[Replica, set[int]] = {}
        for id_ in ids:
            replica = self._at.get(id_)
            there = replica and (replica.stopped is None or (id_ in last and not replica.stopped.triggered))
            if replica and there and not (self._requests[id_].at_limit or self._is_away(id_)):
                found.setdefault(replica, set()).add(id_)
        return [(r, frozenset(found[r])) for r in sorted(found, key=attrgetter("node", "index"))]


def run_rollout(stage: GenerationStage, begun: Callable[[Rollout], None] | None = None) -> Rollout:
    """Run the stage with no workflow around it; returns the rollout once it is over. The requests hold their moments.

    The clock starts at 0 and stands at `env.now`, in seconds. `begun` is handed the rollout at its start. Raises
    `PolicyError` if it comes to a halt: requests are left and nobody is at work.
    """
    env = simpy.Environment()
    rollout = Rollout(env, stage)
    if begun:
        begun(rollout)
    try:
        env.run(until=rollout.done)
    except RuntimeError as error:
        if rollout.done.triggered or env.peek() != float("inf"):
            raise
        left = sum(not (request.finished or request.aborted) for request in rollout.requests)
        raise PolicyError(f"the rollout comes to a halt with {left} requests unfinished and nobody at work") from error
    rollout.close()
    return rollout

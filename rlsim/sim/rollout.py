"""One generation stage: replicas on the nodes of a mesh, and a control that is asked as responses finish.

docs/engine.md is the specification; `rlsim.sim.actions` has what a control may ask for.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from enum import IntEnum
from operator import attrgetter, itemgetter

import simpy

from rlsim.base.hooks import misused
from rlsim.cost.step import StepCost
from rlsim.cost.transfer import SwitchCost
from rlsim.errors import PolicyError
from rlsim.sim.control import Action, Launch, RefusedError, RolloutControl, actions_of, asked
from rlsim.sim.environment import EnvironmentConfig, Environments
from rlsim.sim.moment import ASK, DEAL, IDLE, ONE_MOMENT, at, when_over
from rlsim.sim.node import Node
from rlsim.sim.recorder import Left
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request
from rlsim.sim.stage import GenerationStage, Shares, by_context
from rlsim.sim.trajectories import Trajectories
from rlsim.sim.updating import WeightUpdates
from rlsim.sim.view import RolloutState, RolloutView, view_of


class Order(IntEnum):
    """What comes first at the end of a moment."""

    START = 0  # nodes, with new replicas
    WAITING = 1  # requests that nobody was there to take
    RELEASE = 2  # replicas: what they held is dealt
    ARRIVE = 3  # requests at a replica that was to stop
    BACK = 4  # requests from tools, whose replica was to stop


class Rollout(RolloutState):
    """Generates the requests of a stage on the nodes of its mesh, and on those of GPUs that it may borrow.

    `done` fires when no request is left (with `open`, never for that alone), or a `Stop` has taken effect. Raises
    `PolicyError` for an action that names what is not there. A control sees it as a `RolloutView`.
    """

    def __init__(self, env: simpy.Environment, stage: GenerationStage) -> None:
        nodes = [(gpus, stage.tp, stage.costs, True) for gpus in stage.mesh]
        if there := stage.borrowing and stage.borrowing.there:
            nodes += [(gpus, there.tp, there.costs, False) for gpus in there.mesh]
        used_tps = [stage.used_tps.setdefault(number, set()) for number in range(len(nodes))]
        super().__init__(env, [Node(number, *node, used_tps[number]) for number, node in enumerate(nodes)], stage)
        self.stage, self.recorder = stage, stage.recorder
        self.done = env.event()
        self.stopping = False  # a `Stop` is being carried out
        self.replicas: list[Replica] = []  # all there ever were, by index
        self.switches: list[tuple[float, int, int, int, SwitchCost]] = []  # when, node, from TP, to TP, what it cost
        self.released_at: dict[int, float] = {}  # GPU: when it was given up
        #: By actions of controls: responses that left for another replica, replicas given up, responses dropped.
        self.moved = self.released = self.aborted = 0
        self.leaving: set[int] = set()  # requests that a migration has told to leave, until they do
        self.migrations = itertools.count()
        self._dropping: set[int] = set()  # sub-agents at no replica: they are dropped at the next one
        self._at: dict[int, Replica] = {}  # by request: the replica that it was last given to
        self._waiting: list[Request] = []  # there is no replica for them
        self._shared: Counter[int] = Counter()  # by GPU: how many other things run there too
        self._at_end: list[tuple[tuple[Order, int], Callable[[], None]]] = []  # to be done when this moment is over
        #: Controls and the methods that they are asked by; of timers with the seconds between two calls.
        self._asked = [(part, "on_finish", 0.0) for part in asked(stage.control, "on_finish")]
        self._asks = stage.asked_at_finish and bool(self._asked)
        self._asked += [(part, "on_timer", part.every_s) for part in asked(stage.control, "on_timer") if part.every_s]
        self._timers = [(i, every_s) for i, (_, _, every_s) in enumerate(self._asked) if every_s]
        self._due: set[int] = set()  # which of these are asked at the end of this moment
        self._ticks = False  # whether the next call of an `on_timer` is planned
        self._ranks = bool(asked(stage.control, "priority"))
        #: Nobody decides anything or is told of anything before the end.
        self._quiet = not (self._asks or self._timers or stage.open or stage.on_finish or stage.chunks)
        self._quiet &= not stage.crowded and all(r.limit_tokens == r.response_tokens for r in self.by_id.values())
        self._numbers = itertools.count(1)
        self.updates = WeightUpdates(env, stage.recorder, self.nodes, stage.version)
        self._environments = stage.environments or Environments(env, EnvironmentConfig())
        self._trajectories = Trajectories(self, self._environments, stage.control)

        for node in self.nodes:
            node.used_tps.add(node.tp)
            if node.own:
                self._start_node(node, stage.tp, stage.version)
        self._deal_new(stage.requests, self.active(), idle=True)
        self.deal(self._trajectories.resume(stage.resumed))
        self._look_for_end()
        self._set_timer()
        if self.borrowing:
            self.borrowing.serve(lambda: self.updates.version, self.ask)
            self.ask()

    @property
    def over(self) -> bool:
        """Whether it is over, or about to be: who waits for it has its GPUs already."""
        return self.stopping or self.done.triggered

    # ---- replicas ---------------------------------------------------------------------------------------------------

    def _start_node(self, node: Node, tp: int, version: int) -> None:
        starts = range(0, len(node.gpus), tp)
        node.tp, node.replicas = tp, [self._start(node, node.gpus[i : i + tp], version) for i in starts]
        self.updates.started(node.replicas)

    def _start(self, node: Node, gpus: tuple[int, ...], version: int) -> Replica:
        replica = Replica(
            self.env,
            len(self.replicas),
            node.number,
            gpus,
            self._step_cost(node, gpus),
            node.costs.capacity_pages(len(gpus)),
            self.stage.config,
            self.recorder,
            self._finished,
            self._numbers,
            self.stage.chunks,
            self._quiet,
            version,
            node.costs.host_kv(len(gpus)),
        )
        self.replicas.append(replica)
        return replica

    def _step_cost(self, node: Node, gpus: tuple[int, ...]) -> StepCost:
        crowded = self.stage.crowded if any(self._shared[gpu] for gpu in gpus) else None
        return (crowded or node.costs.step)(len(gpus))

    def share(self, gpus: tuple[int, ...], shared: bool) -> None:
        """Something else begins to run on these GPUs, or ends: replicas there take on their other pace."""
        (self._shared.update if shared else self._shared.subtract)(gpus)
        for replica in self.active():
            if not set(gpus).isdisjoint(replica.gpus):
                node = self.nodes[replica.node]
                replica.at_boundary(lambda r=replica, n=node: r.set_cost(self._step_cost(n, r.gpus)))  # type: ignore[misc]

    def take_back(self, lent: Sequence[Replica]) -> None:
        """New replicas on the GPUs of these, which were released, with the weights that they had."""
        for replica in lent:
            self.lent.remove(replica)
            node = self.nodes[replica.node]
            new = self._start(node, replica.gpus, replica.version)
            node.replicas[node.replicas.index(replica)] = new
            self.updates.started([new])

    # ---- what waits for the end of a moment -------------------------------------------------------------------------

    def at_end(self, order: tuple[Order, int], then: Callable[[], None]) -> None:
        """Do it at the end of this moment unless the rollout is over, and all there is to do then in this order."""
        if not self._at_end:
            when_over(self.env, DEAL, self._end_moment)
        self._at_end.append((order, then))

    def _end_moment(self) -> None:
        due, self._at_end = sorted(self._at_end, key=itemgetter(0)), []
        for _, then in due:
            if not self.over:
                then()

    def start_at_end(self, node: Node, tp: int, version: int, requests: Sequence[Request] = ()) -> None:
        """New replicas on a node, for these requests; then they are there for those that nobody was there to take."""

        def start() -> None:
            self._start_node(node, tp, version)
            if node.switched:
                node.switched.succeed()
                node.switched = None
            place = {request.id: i for i, request in enumerate(requests)}
            shares = by_context(requests, {replica.index: 0 for replica in node.replicas})
            self._deal({index: sorted(share, key=lambda r: place[r.id]) for index, share in shares.items()})

        def deal_waiting() -> None:
            waiting, self._waiting = self._waiting, []
            self.deal(waiting)

        self.at_end((Order.START, node.number), start)
        self.at_end((Order.WAITING, 0), deal_waiting)

    # ---- where requests are -----------------------------------------------------------------------------------------

    def give(self, replica: Replica, requests: Sequence[Request]) -> None:
        if self._ranks:
            for request in requests:
                place = self.stage.control.priority(view_of(request, request.context, running=False))
                request.priority = place or 0.0
        if requests:
            self._at.update(dict.fromkeys([r.id for r in requests], replica))
            replica.receive(requests)
            if dropped := self._dropping.intersection(r.id for r in requests):
                self._drop_at(replica, frozenset(dropped), chosen=False)

    def take(
        self, replica: Replica, left: Left, ids: frozenset[int] | None = None
    ) -> tuple[list[Request], list[Request]]:
        """Take requests (all, unless named) out of a replica at its boundary: the running ones, and the others."""
        running, others = replica.remove(left, ids)
        for request in (*running, *others):
            del self._at[request.id]
            request.end_run(replica.version, request.generated)
        self._look_after(replica)
        return running, others

    def where(self, ids: Iterable[int], last: Container[int] = ()) -> list[tuple[Replica, frozenset[int]]]:
        """The active replicas that hold some of these requests, and which; of `last` those that are to stop, too."""
        found: dict[Replica, set[int]] = {}
        for id_ in ids:
            replica = self._at.get(id_)
            there = replica and (replica.stopped is None or (id_ in last and not replica.stopped.triggered))
            if replica and there and not (self.by_id[id_].at_limit or id_ in self._trajectories):
                found.setdefault(replica, set()).add(id_)
        return [(r, frozenset(found[r])) for r in sorted(found, key=attrgetter("node", "index"))]

    def version_of(self, request: Request) -> int:
        """Of the weights that generate it, or would next."""
        replica = self._at.get(request.id)
        return replica.version if replica else self.updates.version

    def forget(self, requests: Iterable[Request]) -> None:
        for request in requests:
            del self.by_id[request.id]
            self._at.pop(request.id, None)

    def _look_after(self, replica: Replica) -> None:
        """Requests have left: if it has none at the end of this moment, it takes new weights, or other requests."""
        if self.stage.on_idle and replica.idle:
            when_over(self.env, IDLE, lambda: self._look_at_idle(replica))

    def _look_at_idle(self, replica: Replica) -> None:
        if replica.idle and replica.stopped is None:
            self.updates.refresh(replica)
            if self.stage.on_idle:
                self.stage.on_idle()

    # ---- requests that come -----------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        requests = self.stage.launcher(launch)
        idle = not self.unfinished
        self.launched += len(requests)
        self._come(requests)
        if launch.to and (wanted := [replica for replica in self.active() if replica.index in launch.to]):
            self._deal_new(requests, wanted, idle=False)
        elif self.stage.dispatch == "fewest_requests":
            self._deal_new(requests, [*filter(self.updates.takes_launches, self.active())], idle)
        else:
            self.deal(requests)

    def _come(self, requests: Sequence[Request]) -> None:
        self.by_id.update((request.id, request) for request in requests)
        self.unfinished += len(requests)
        self._set_timer()

    def begin(self, agent: Request) -> None:
        """A sub-agent begins, where the least context is."""
        self._come([agent])
        self.deal([agent])

    def extend(self, requests: Sequence[Request], tokens: int) -> None:
        """Those that have used up their budgets may generate so many tokens more."""
        paused = [r for r in requests if r.at_limit and not (r.finished or r.aborted or r.id in self._trajectories)]
        for request in paused:
            request.allow(tokens)
        self._come(paused)
        self.deal(paused)

    @property
    def takes_launches(self) -> bool:
        """Whether what is launched may go to a replica, or waits for those that start next as there is none."""
        return any(map(self.updates.takes_launches, self.active())) or not self.active()

    def deal(self, requests: Sequence[Request]) -> None:
        """Give requests without KV to the active replicas with the least context; keep them while there is none."""
        load = {replica.index: replica.context_tokens() for replica in self.active()}
        for request in requests:
            request.kv_arrived = False
        if load:
            self._deal(by_context(requests, load))
        else:
            self._waiting.extend(requests)

    def _deal(self, shares: Shares) -> None:
        for index, share in shares.items():
            self.give(self.replicas[index], share)

    def _deal_new(self, requests: Sequence[Request], replicas: Sequence[Replica], idle: bool) -> None:
        """Give new requests to these replicas, or keep them while there is none."""
        if replicas:
            self._deal(self.stage.shares(requests, replicas, idle))
        else:
            self._waiting.extend(requests)

    # ---- requests that leave ----------------------------------------------------------------------------------------

    def _finished(self, replica: Replica, left: list[Request]) -> None:
        acting = self._trajectories.leave(replica, left)
        finished = self._without_agents([request for request in left if request.finished])
        self.finished += len(finished)
        if (self._asks or self._timers) and finished:
            lengths = [request.generated for request in finished]
            self.finished_lengths += lengths
            shortest, longest = self.finished_tokens
            self.finished_tokens = min(shortest or lengths[0], *lengths), max(longest, *lengths)
        self.unfinished -= len(left) - len(acting)
        if self.stage.on_finish and finished:
            self.stage.on_finish(finished)
        self._look_after(replica)
        self._trajectories.call(acting, replica)
        self._look_for_end()
        if self._asks and len(acting) < len(left) and not self.done.triggered:
            self.nodes[replica.node].just_finished = True
            self.ask()

    def _without_agents(self, requests: Sequence[Request]) -> list[Request]:
        """These without sub-agents, which it knows no more."""
        self.forget(request for request in requests if request.parent)
        return [request for request in requests if not request.parent]

    def come_back(self, requests: Sequence[Request]) -> None:
        """These are back from their tools: they go on, but for those whose budget is used up."""
        elsewhere, paused = list[Request](), False
        for request in requests:
            home = self._at.pop(request.id, None)
            if request.at_limit:
                paused = True
                self.unfinished -= 1
            elif self._trajectories.sticky and home and home.stopped is None and request.generated:
                self.give(home, [request])
                continue
            else:
                elsewhere.append(request)
            if home:
                home.unpin(request)
        if elsewhere:  # what leaves a replica at this very moment, or stops with it, comes before them
            self.at_end((Order.BACK, 0), lambda: self.deal(elsewhere))
        self._look_for_end()
        if paused and self._asks and not self.done.triggered:
            self.ask()

    def drop(self, ids: Iterable[int], chosen: bool = False) -> None:
        """Requests are dropped, at once or at their replicas' next boundaries, with their sub-agents; `chosen`: by a
        control.
        """
        ids = [id_ for id_ in self._trajectories.with_agents(ids) if id_ in self.by_id]
        if away := self._drop_away(ids):
            self._dropped(away, chosen)
        self._dropping |= {id_ for id_ in ids if id_ in self.by_id and self.by_id[id_].parent}
        for replica, there in self.where(ids, self._dropping):
            self._drop_at(replica, there, chosen)

    def _drop_at(self, replica: Replica, ids: frozenset[int], chosen: bool) -> None:
        self._dropping -= ids
        replica.at_boundary(lambda: self._abort(replica, ids, chosen), urgent=True)

    def _abort(self, replica: Replica, ids: frozenset[int], chosen: bool) -> None:
        running, others = self.take(replica, "aborted", ids)
        self._dropped([*running, *others, *self._drop_away(ids)], chosen)

    def _drop_away(self, ids: Iterable[int]) -> list[Request]:
        """Trajectories that are at their tool calls do not come back."""
        dropped = self._trajectories.drop(ids)
        for request in dropped:
            if home := self._at.get(request.id):
                home.unpin(request)
        return dropped

    def _dropped(self, requests: Sequence[Request], chosen: bool) -> None:
        for request in requests:
            request.aborted = True
        self.unfinished -= len(requests)
        self._environments.leave(requests)
        own = self._without_agents(requests)
        self.aborted += len(own) if chosen else 0
        self.stage.on_abort(own)
        self._trajectories.end_turn()
        self._look_for_end()

    # ---- asking the control -----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Have the controls asked at this moment, after everything else that happens at it."""
        self._ask_at_end({i for i, (_, method, _) in enumerate(self._asked) if method == "on_finish"})

    def _ask_at_end(self, due: set[int]) -> None:
        if due and not self._due:
            when_over(self.env, ASK, self._ask)
        self._due |= due

    def _ask(self) -> None:
        due, self._due = sorted(self._due), set()
        if self.over:
            return
        view = RolloutView(self)
        # All of it before anything is done, and while the view still shows this moment: it may be a generator.
        answers: list[tuple[Action, RolloutControl, str]] = []
        for part, method, every_s in [self._asked[i] for i in due]:
            if self.unfinished or not every_s:
                answers += [(action, part, method) for action in actions_of(getattr(part, method)(view))]
                if any(action.last for action, *_ in answers):
                    break
        for node in self.nodes:
            node.just_finished = False
        for action, part, method in answers:
            if not self.stopping:
                try:
                    action.carry_out(self)
                except RefusedError as why:
                    raise misused(part.author, method, f"returned {action!r}: {why}") from None
        self._set_timer()

    def _set_timer(self) -> None:
        """Plan the next call of an `on_timer`; none while nothing is unfinished, or nothing else is going to happen."""
        if self._timers and self.unfinished and not self._ticks and self.env.peek() < math.inf:
            self._ticks, passed_s = True, self.env.now * (1 + ONE_MOMENT) - self.started_at
            next_at = {i: self.started_at + s * (math.floor(passed_s / s) + 1) for i, s in self._timers}
            first = min(next_at.values())
            due = {i for i, moment in next_at.items() if moment <= first * (1 + ONE_MOMENT)}
            at(self.env, first, lambda _: self._tick(due))

    def _tick(self, due: set[int]) -> None:
        self._ticks = False
        self._ask_at_end(due)

    # ---- its end ----------------------------------------------------------------------------------------------------

    def _look_for_end(self) -> None:
        if self.unfinished == 0 and self.stage.open:
            self.stage.on_drained()
        elif self.unfinished == 0 and not self.done.triggered:
            self.done.succeed()

    def end(self) -> None:
        """It has been stopped, or the run is over: all replicas have handed out what they had."""
        self._trajectories.forget(self.by_id.values())
        for node in self.nodes:
            node.end_pause(self.recorder, self.env.now)
        if not self.done.triggered:
            self.done.succeed()

    def break_off(self) -> None:
        """The run is over: bring the tokens of what is running up to date, and take everything out."""
        for replica in self.replicas:  # those that are to stop and have not yet, too
            replica.catch_up()
            self.take(replica, "stopped")
        self.updates.break_off()
        self.end()

    def close(self) -> None:
        """The rollout is over: note down the spans of replicas that were still there, and let go of the requests."""
        for replica in self.replicas:
            replica.retire()


def run_rollout(
    stage: GenerationStage,
    begun: Callable[[Rollout], None] | None = None,
    *,
    environment: EnvironmentConfig | None = None,
    seed: int = 0,
) -> Rollout:
    """Run the stage with no workflow around it; returns the rollout once it is over. The requests hold their moments.

    The clock starts at 0 and stands at `env.now`, in seconds. `begun` is handed the rollout at its start.
    `environment`, with its `seed`, runs tool calls. Raises `PolicyError` if it comes to a halt: requests are left and
    nobody is at work.
    """
    env = simpy.Environment()
    if environment:
        stage.environments = Environments(env, environment, seed)
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

"""Continuous generation token by token: the plain reading of that section of docs/engine.md, held against the engine.

Written from the specification alone. What a replica does in an iteration, and what a control's actions do, is
`reference._Rollout`'s; here is what comes with one rollout for all steps: launches, rewards, the queue, parts of a
batch, and updates. A moment is worked through in this order: iterations end; rewards come, the trainer goes on, an
update is over, and the replicas begin their next iterations; then prompts line up, a step takes some, `room` and the
control are asked; last of all an update that was asked for has the replicas stand still.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from reference import HaltedError, RefStay, _Call, _Replica, _Request, _Rollout

from rlsim.sim.batching import Batching
from rlsim.sim.continuous import OpenView, Ready, Update
from rlsim.sim.control import Prompt, decides
from rlsim.sim.drawn import AcceptanceDraws

if TYPE_CHECKING:
    from open_workloads import OpenWorkload

#: A response: the position of its prompt, and which of the prompt's responses it is.
Key = tuple[int, int]


class RefCheck(NamedTuple):
    """What scoring a response takes, and its reward unless one of the runs takes longer than the limit."""

    runs_s: tuple[float, ...]
    limit_s: float
    reward: float


@dataclass(frozen=True)
class RefRewards:
    """Rewards by the sample."""

    workers: int
    check: Callable[[int, int], RefCheck]  # of a prompt's position, and which of its responses
    filter: Batching  # says whether a prompt's rewards count


@dataclass
class RefStep:
    """One step, and what it trained on."""

    has_batch_at: float = math.nan
    asks_at: float = math.nan  # for its update
    sync_starts_at: float = math.nan
    sync_ends_at: float = math.nan
    trained: list[int] = field(default_factory=list)  # positions, in the order in which it took them
    dropped: list[int] = field(default_factory=list)  # positions, since the step before had its batch
    parts: list[tuple[float, float]] = field(default_factory=list)  # of its batch: when training began and ended each


@dataclass
class RefResponse:
    """One response at the end of the run."""

    prompt_tokens: int
    response_tokens: int
    replica: int = -1  # that admitted it last
    generated: int = 0
    preemptions: int = 0
    aborted: bool = False
    attempts: int = 0  # that were lost
    tools_s: tuple[float, float] = (0.0, 0.0)  # in tool calls, and until these began
    first_token_at: float = math.nan
    finished_at: float = math.nan
    check_at: float = math.nan  # a worker begins
    scored_at: float = math.nan
    reward: float = math.nan
    runs: list[tuple[int, int]] = field(default_factory=list)  # version and tokens, in the order of the tokens

    @property
    def oldest(self) -> int:
        """The lowest version of its tokens; more than any if there are none."""
        return min((version for version, _ in self.runs), default=sys.maxsize)


@dataclass
class OpenResult:
    steps: list[RefStep] = field(default_factory=list)
    responses: dict[Key, RefResponse] = field(default_factory=dict)
    launches: list[tuple[int, ...]] = field(default_factory=list)  # positions
    in_flight: set[int] = field(default_factory=set)  # positions that are running or waiting at the end
    switches: list[float] = field(default_factory=list)  # moments at which one began


@dataclass(eq=False)
class _Group:
    """A prompt and its responses."""

    position: int
    requests: list[_Request]


@dataclass(eq=False)
class _Check:
    """A response that a worker checks."""

    request: _Request
    ends_at: float
    reward: float


class _Run(_Rollout):
    """All steps of a run, as many as there are durations of syncs. What inference takes is a part of training."""

    def __init__(self, work: OpenWorkload) -> None:
        super().__init__(work, [])
        self.prompts, self.batching, self.sync_s, self.windows = work.prompts, work.rule, work.sync_s, work.windows or 1
        self.rewards = work.rewards if work.checks else None
        self.train_s = list(map(sum, zip(*filter(None, (work.infer_s, work.train_s)), strict=True)))
        self.open = OpenResult()
        self.update = Update()  # of the present step
        self.keys: dict[int, Key] = {}  # by request id
        self.version = 0
        self.running: list[_Group] = []
        self.queue: list[tuple[Ready, _Group]] = []
        self.taken = self.ready = self.launched = 0  # prompts so far
        self.dropped: list[int] = []  # positions so far
        self.again: list[int] = []  # of these, to begin before new ones
        self.told_dropped = 0  # of these, to a step
        self.useless = 0  # of these since a step had its batch, not for their age
        self.launched_since_update = self.left_at_update = 0
        self.phase: Literal["works", "asks", "stops", "syncs", "over"] = "works"  # of the present step
        self.begins = False  # the step, at this moment
        self.news = False  # something else that is new for the batching
        self.asks = False  # the control, for another reason than that responses have finished
        self.looks = False  # the control, as its timer is due
        self.works_until: float | None = None  # on a part of its batch
        self.synced_at = math.nan
        self.places: set[int] = set()  # positions of prompts that the step waits for
        self.still: set[int] = set()  # replicas that stand still
        self.back: set[int] = set()  # replicas that were lent, and in whose place there are others
        self.complete: list[_Request] = []  # at this moment, not yet given to a reward
        self.unchecked: list[_Request] = []  # wait for a worker
        self.checks: list[_Check] = []

    # --- which weights are where

    @property
    def shown_version(self) -> int:
        return self.version

    def version_of(self, replica: _Replica) -> int:
        return self.version

    def version_at(self, request: _Request) -> int:
        return self.version

    def may_launch(self) -> bool:
        return self.phase == "works"

    def launchable(self) -> list[_Replica]:
        return self.active()

    @property
    def step(self) -> RefStep:
        return self.open.steps[-1]

    def response(self, request: _Request) -> RefResponse:
        return self.open.responses[self.keys[request.id]]

    # --- GPUs that are lent

    def lent(self) -> list[_Replica]:
        """Replicas of generation's own that were released, whose GPUs generate nothing since."""
        own = [replica for replica in self.replicas if replica.node < len(self.node_gpus)]
        return [r for r in own if r.stopping == "release" and r.stopped and r.index not in self.back]

    def take_back(self) -> None:
        for old in self.lent():
            self.back.add(old.index)
            self.replicas.append(_Replica(len(self.replicas), old.node, old.tp, old.gpus))

    def size(self) -> int:
        """How many replicas there are, by the layouts of the nodes, without those that are lent."""
        return sum(gpus // self.tps[node] for node, gpus in enumerate(self.node_gpus)) - len(self.lent())

    # --- prompts

    def room(self) -> int:
        view = OpenView(
            prompts=self.prompts,
            version=self.shown_version,
            running=len(self.running),
            waiting=len(self.queue),
            taken=self.taken,
            dropped=len(self.dropped),
            replicas=self.size(),
            free=tuple(replica.index for replica in self.active() if not replica.requests()),
            launched_since_update=self.launched_since_update,
            left_at_update=self.left_at_update,
        )
        return self.batching.room(view)

    def launch(self, count: int) -> list[_Request]:
        """So many prompts of the feed; their requests are still to be dealt."""
        new: list[_Request] = []
        again, self.again = self.again[:count], self.again[count:]
        first = self.launched - len(again)
        positions = (*again, *range(self.launched, first + count))
        for position in positions:
            group = _Group(position, [])
            before = sum(at == position for at, _ in self.keys.values())  # samples that it has had
            for sample, (prompt_tokens, response_tokens) in enumerate(self.work.of_prompt(position), before):
                tools = self.work.tools_of(position, sample)
                request = _Request(len(self.own), position, prompt_tokens, response_tokens, tools=tools)
                request.numbers = AcceptanceDraws((position, sample), 0.3)
                self.requests.append(request)
                self.by_id[request.id] = request
                self.keys[request.id] = position, sample
                self.open.responses[position, sample] = RefResponse(prompt_tokens, response_tokens)
                self.result.preemptions[request.id] = 0
                group.requests.append(request)
            new += group.requests
            self.running.append(group)
        if count:
            self.open.launches.append(positions)
        self.launched = first + count
        self.launched_since_update += count
        return new

    def deal_launched(self, new: list[_Request], idle: bool) -> None:
        """One by one to the replica with the fewest; where nothing was unfinished, as at the start of a rollout."""
        replicas = self.launchable()
        if not replicas:
            self.homeless += new
        elif not idle:
            for request in new:
                replica = min(replicas, key=lambda replica: (len(replica.requests()), replica.index))
                replica.arrive(request, self.now)
        else:
            self.deal_evenly(new, replicas, self.work.routing)

    def begin(self, replica: _Replica) -> None:
        super().begin(replica)
        for r in (r for r in replica.admitted if not r.parent):
            self.response(r).replica = replica.index

    def end(self, replica: _Replica) -> bool:
        """Every token is of the version that the replica has now."""
        version = self.version_of(replica)
        there = [(r, r.generated) for r in replica.admitted if not r.parent]
        finished = super().end(replica)
        for r, before in there:
            response = self.response(r)
            for _ in range(r.generated - before):
                if math.isnan(response.first_token_at):
                    response.first_token_at = self.now
                if response.runs and response.runs[-1][0] == version:
                    response.runs[-1] = version, response.runs[-1][1] + 1
                else:
                    response.runs.append((version, 1))
            if r.state == "finished":
                response.finished_at = self.now
                self.complete.append(r)
        return finished

    def go_on_with(self, call: _Call) -> None:
        """What is observed counts to the version of the weights that made the call."""
        r, generated = call.request, call.request.generated
        super().go_on_with(call)
        if r.generated > generated and not r.parent:
            version, tokens = self.response(r).runs[-1]
            self.response(r).runs[-1] = version, tokens + r.generated - generated

    def sample(self, r: _Request) -> Key:
        return self.keys[r.id]

    def lose(self, call: _Call) -> None:
        super().lose(call)
        if not call.request.generated:  # it begins again
            self.response(call.request).runs.clear()

    # --- what happens without a decision; each says whether anything did

    def check(self) -> bool:
        """Workers take responses first come, first served; those of one moment by their prompts."""
        if self.rewards is None:
            return False
        ended = [check for check in self.checks if self.reached(check.ends_at)]
        for check in ended:
            self.checks.remove(check)
            response = self.response(check.request)
            response.scored_at, response.reward = self.now, check.reward
        self.unchecked += sorted(self.complete, key=lambda r: (r.position, r.id))
        followed, self.complete = bool(ended), []
        while self.unchecked and len(self.checks) < self.rewards.workers:
            request = self.unchecked.pop(0)
            runs_s, limit_s, reward = self.rewards.check(*self.keys[request.id])
            too_long = [i for i, run_s in enumerate(runs_s) if run_s > limit_s]
            if too_long:
                runs_s, reward = (*runs_s[: too_long[0]], limit_s), 0.0
            self.checks.append(_Check(request, self.now + sum(runs_s), reward))
            self.response(request).check_at, followed = self.now, True
        return followed

    def train(self) -> bool:
        """The step trains on the next part of its batch once that is there; after the last it asks for its update."""
        if self.phase != "works":
            return False
        if self.works_until is not None:
            if not self.reached(self.works_until):
                return False
            self.step.parts[-1] = self.step.parts[-1][0], self.now
            self.works_until = None
        done = len(self.step.parts)
        if done == self.windows:
            self.phase, self.step.asks_at, self.update = "asks", self.now, self.batching.update()
        elif len(self.step.trained) * self.windows >= (done + 1) * self.prompts and self.has_gpus():
            self.works_until = self.now + self.train_s[(len(self.open.steps) - 1) * self.windows + done]
            self.step.parts.append((self.now, math.nan))
        else:
            return False
        return True

    def has_gpus(self) -> bool:
        """Whether the trainer, who has something to train on, has its GPUs for it."""
        return True

    def stand_still(self) -> bool:
        """Replicas stop at their boundaries, and when the last one has, the weights come."""
        if self.phase != "stops":
            return False
        for replica in self.active():
            if replica.index in self.still or replica.iteration is not None:
                continue
            self.still.add(replica.index)
            if self.update.kv == "recompute":
                self.lose_kv_of(replica)
        if self.switches or any(replica.index not in self.still for replica in self.active()):
            return False
        self.step.sync_starts_at = self.now
        self.phase, self.synced_at = "syncs", self.now + self.sync_s[len(self.open.steps) - 1]
        return True

    def lose_kv_of(self, replica: _Replica) -> None:
        losing, replica.admitted = replica.admitted, []
        replica.cache, replica.host, replica.promised, replica.let_go, replica.pinned = [], [], {}, [], []
        replica.settled = []
        for r in losing:
            self.end_stay(r, "updated")
            r.lose_kv()
            r.stay = RefStay(r.id, replica.gpus, self.now)
        replica.waiting[:0] = losing

    def go_on(self) -> bool:
        """The weights are there: the next version, and the next step."""
        if self.phase != "syncs" or not self.reached(self.synced_at):
            return False
        self.step.sync_ends_at = self.now
        self.version += 1
        self.left_at_update, self.launched_since_update = len(self.running) + len(self.queue), 0
        self.still.clear()
        if self.update.kv == "recompute":
            for r in self.requests:
                r.arrived_kv = False
            for move in self.moves:
                move.held = []
        self.next_step()
        return True

    def next_step(self) -> None:
        if len(self.open.steps) == len(self.sync_s):
            self.phase = "over"
        else:
            self.phase, self.begins = "works", True
            self.open.steps.append(RefStep())

    def stands(self, replica: _Replica) -> bool:
        """Whether it begins no iteration."""
        return self.phase in ("stops", "syncs")

    def begin_all(self) -> None:
        """Where an update has been asked for, and is not over, replicas stand still at their boundaries."""
        for replica in self.active():
            if replica.iteration is None and not replica.requests():
                replica.settled = []
                self.settle_cache(replica)
            if not self.stands(replica):
                if replica.arrivals and replica.iteration is not None:
                    self.at_boundary(replica)
                if replica.iteration is None and replica.requests():
                    self.begin(replica)

    def look_at_idle(self) -> bool:
        """Replicas that take weights on their own have nothing left."""
        return False

    def publish(self) -> bool:
        """New weights are there for replicas that take them on their own."""
        return False

    # --- decisions, at the end of a moment

    def over_with(self, request: _Request) -> bool:
        """It is complete, and scored where that is asked for, or was aborted."""
        if self.rewards and request.state == "finished":
            return not math.isnan(self.response(request).scored_at)
        return not request.left

    def ready_now(self) -> list[_Group]:
        groups = [group for group in self.running if all(map(self.over_with, group.requests))]
        return sorted(groups, key=lambda group: group.position)

    def line_up(self) -> None:
        """Prompts that are ready join the queue, by position, if all of their responses are there and they count."""
        for group in self.ready_now():
            self.running.remove(group)
            responses = [self.response(r) for r in group.requests]
            aborted = any(r.state == "aborted" for r in group.requests)
            if aborted or (self.rewards and not self.rewards.filter.counts([r.reward for r in responses])):
                self.launched_since_update -= 1
                self.drop(group.position)
                self.useless += 1
                if self.useless > 50 * self.prompts:
                    raise HaltedError
                continue
            lengths = tuple(r.generated for r in group.requests)
            oldest = min(response.oldest for response in responses)
            self.queue.append((Ready(Prompt(group.position), self.ready, oldest, lengths), group))
            self.ready += 1

    def drop(self, position: int) -> None:
        self.dropped.append(position)
        self.places.discard(position)

    def keep_places(self) -> None:
        """A step that begins keeps places for prompts under way that it waits for."""
        number, self.begins = len(self.open.steps) - 1, False
        for group in self.running:
            under_way = [r for r in group.requests if r.left]
            oldest = min([*(self.response(r).oldest for r in group.requests), *map(self.version_at, under_way)])
            if self.batching.awaited(number - oldest):
                self.places.add(group.position)

    def take(self) -> None:
        """The step that takes prompts is offered the queue."""
        number = len(self.open.steps) - 1
        if self.phase != "works" or len(self.step.trained) == self.prompts:
            return
        for item in list(self.queue):
            if not self.batching.usable(item[0], number - item[0].version):
                self.queue.remove(item)
                self.drop(item[1].position)
                if self.batching.relaunches():
                    self.again.append(item[1].position)
        while len(self.step.trained) < self.prompts:
            fit = [item for item in self.queue if item[1].position in self.places]
            if not fit and len(self.step.trained) + len(self.places) < self.prompts:
                fit = self.queue
            if not fit:
                return
            due = [item for item in fit if self.batching.awaited(number - item[0].version)]
            item = min(due or fit, key=lambda item: self.batching.rank(item[0]))  # of equals the first in the queue
            self.queue.remove(item)
            self.places.discard(item[1].position)
            self.taken += 1
            self.step.trained.append(item[0].prompt.position)
        self.step.has_batch_at, self.useless = self.now, 0
        self.places.clear()
        self.tell_dropped()

    def tell_dropped(self) -> None:
        self.step.dropped += self.dropped[self.told_dropped :]
        self.told_dropped = len(self.dropped)

    def decide(self, finished_on: set[int]) -> None:
        """First the batching, if there is something new for it; the control sees the moment as it was before."""
        count, looks = 0, self.looks
        finishes = bool(self.begins or self.ready_now() or self.news or finished_on or self.asks)
        self.looks = False
        if self.begins or self.ready_now() or self.news:
            self.news = False
            self.line_up()
            if self.begins:
                self.keep_places()
            self.take()
            if self.may_launch():
                count = self.room()
        self.asks = False
        actions = self.answers(finished_on, finishes, looks)
        idle = not any(r.left for r in self.requests)
        self.deal_launched(self.launch(count), idle)
        for action in actions:
            self.note(action)

    # --- the loop

    def moments(self) -> Iterable[float]:
        yield from super().moments()
        yield from (check.ends_at for check in self.checks)
        if self.works_until is not None:
            yield self.works_until
        yield from self.moments_of_update()

    def moments_of_update(self) -> list[float]:
        return [self.synced_at] if self.phase == "syncs" else []

    def rest_of_moment(self, finished_on: set[int]) -> None:
        """All but the ends of iterations."""
        followed = True
        self.end_pins()
        while followed:
            while followed and self.phase != "over":
                self.settle()
                followed = self.check() + self.train() + self.stand_still() + self.go_on() > 0
            self.begin_all()
            if self.phase != "over" and (self.follow_agents() + self.end_calls() or self.deal_back()):
                followed = True
                continue
            self.asks, self.paused_at_tools = self.asks or self.paused_at_tools, False
            followed = self.phase != "over"
            if self.phase == "over" or self.look_at_idle():
                pass
            elif (
                self.begins
                or self.ready_now()
                or self.news
                or ((finished_on or self.asks or self.looks) and decides(self.control))
            ):
                self.decide(finished_on)
                finished_on = set()
            elif self.publish():
                pass
            elif self.phase == "asks" and (
                self.update.responses == "interrupt" or not any(r.left for r in self.requests)
            ):
                self.phase = "stops"
                for replica in self.active():
                    self.at_boundary(replica)  # an iteration that has just begun counts as not begun
                self.take_back()
            else:
                followed = False

    def to_the_end(self) -> OpenResult:
        self.open.steps.append(RefStep())
        self.deal_launched(self.launch(self.room()), idle=True)
        self.begins = True
        self.rest_of_moment(set())
        while self.phase != "over":
            self.looks = self.go_on_to_next()
            self.rest_of_moment(self.end_iterations())
        self.tell_dropped()
        for r in self.own:
            response = self.response(r)
            response.generated, response.preemptions = r.generated, self.result.preemptions[r.id]
            response.aborted, response.attempts = r.state == "aborted", r.attempts
            response.tools_s = self.result.tool_s.get(r.id, 0.0), self.result.tool_wait_s.get(r.id, 0.0)
        self.open.in_flight = {group.position for group in (*self.running, *(group for _, group in self.queue))}
        self.open.switches = [switch.begun_at for switch in self.result.switches]
        return self.open


# ---- replicas that take new weights each on its own ------------------------------------------------------------------


class RollingRun(_Run):
    """Weights are pushed to host memory, spread to all nodes, and pulled by each replica when it may; no switches."""

    def __init__(self, work: OpenWorkload) -> None:
        super().__init__(work)
        self.versions = dict.fromkeys((replica.index for replica in self.replicas), 0)
        self.published = 0
        self.spreading: list[tuple[float, int]] = []  # when all nodes have it, version
        self.emptied: list[_Replica] = []  # at this moment, perhaps
        self.told: set[int] = set()  # replicas that are to stand still
        self.pulling: dict[int, tuple[float, int]] = {}  # by replica: until when, version

    def version_of(self, replica: _Replica) -> int:
        return self.versions[replica.index]

    def version_at(self, request: _Request) -> int:
        away = [call.home for call in self.at_tools if call.request is request and call.home]
        there = [replica for replica in self.replicas if request in replica.requests()]
        return next((self.version_of(replica) for replica in (*away, *there)), self.published)

    @property
    def shown_version(self) -> int:
        return self.published

    def may_launch(self) -> bool:
        return bool(self.launchable())

    def launchable(self) -> list[_Replica]:
        behind = [r for r in self.active() if self.version_of(r) < self.published and r.index not in self.pulling]
        drain = self.batching.update().responses == "drain"
        return [r for r in self.active() if not (drain and r in behind and r.requests() and r.index not in self.told)]

    def end(self, replica: _Replica) -> bool:
        finished = super().end(replica)
        self.emptied.append(replica)
        return finished

    def leave(self) -> bool:
        before = [replica for replica in self.active() if replica.requests()]
        any_left = super().leave()
        self.emptied += before
        return any_left

    def look_at_idle(self) -> bool:
        """At the end of a moment: what has nothing left takes new weights, or prompts."""
        idle = [replica for replica in self.emptied if replica.active and not replica.requests()]
        self.emptied.clear()
        for replica in idle:
            self.news = True
            self.tell(replica)
        return bool(idle)

    def tell(self, replica: _Replica) -> None:
        """It is to take the newest weights, if it lacks them and may."""
        known = replica.index in self.told or replica.index in self.pulling
        waits = self.batching.update().responses == "drain" and replica.requests()
        if not known and self.version_of(replica) < self.published and not waits:
            self.told.add(replica.index)
            self.at_boundary(replica)  # an iteration that has just begun counts as not begun

    # --- in place of an update of all

    def push(self) -> bool:
        if self.phase == "asks":
            self.step.sync_starts_at = self.now
            self.phase, self.synced_at = "syncs", self.now + self.sync_s[len(self.open.steps) - 1]
            return True
        return False

    def go_on(self) -> bool:
        followed = self.push() + self.pull()
        if self.phase == "syncs" and self.reached(self.synced_at):
            self.step.sync_ends_at = self.now
            self.version += 1
            self.spreading.append((self.now + self.work.spread_s, self.version))
            self.next_step()
            return True
        return followed > 0

    def publish(self) -> bool:
        """At the end of the moment."""
        if not (self.spreading and self.reached(self.spreading[0][0])):
            return False
        _, self.published = self.spreading.pop(0)
        self.left_at_update, self.launched_since_update = len(self.running) + len(self.queue), 0
        self.news = True
        for replica in self.active():
            self.tell(replica)
        return True

    def pull(self) -> bool:
        followed = False
        for replica in self.active():
            until, version = self.pulling.get(replica.index, (math.inf, 0))
            if self.reached(until):
                del self.pulling[replica.index]
                self.versions[replica.index] = version
                self.tell(replica)
                followed = True
            if replica.index in self.told and replica.iteration is None:
                self.told.discard(replica.index)
                self.pulling[replica.index] = self.now + self.work.pull_s, self.published
                if self.batching.update().kv == "recompute":
                    self.lose_kv_of(replica)
                followed = True
        return followed

    def stands(self, replica: _Replica) -> bool:
        return replica.index in self.told or replica.index in self.pulling

    def moments_of_update(self) -> list[float]:
        pulls = [until for until, _ in self.pulling.values()]
        return [*super().moments_of_update(), *pulls, *(at for at, _ in self.spreading)]

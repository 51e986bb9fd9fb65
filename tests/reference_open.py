"""Continuous generation token by token: the plain reading of that section of docs/engine.md, held against the engine.

Written from the specification alone. What a replica does in an iteration is `reference._Rollout`'s; here is what comes
with one rollout for all steps: launches, the queue, windows, and updates. A moment is worked through in this order:
iterations end, prompts become ready, then the trainer and the update go on, then a step takes, then `room`
is asked, and last of all the replicas begin their next iterations. So no iteration ever has to count as not begun.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reference import RefEngine, RefStay, _Replica, _Request, _Rollout
from workloads import Nothing

from rlsim.sim.continuous import Continuous, OpenView, Ready, Update
from rlsim.sim.control import Prompt, RolloutCosts

#: A response: the position of its prompt, and which of the prompt's responses it is.
Key = tuple[int, int]


class HaltedError(Exception):
    """A step waits for prompts, and nothing will ever happen again."""


@dataclass
class RefStep:
    """One step, and what it trained on."""

    begins_at: float  # to take prompts
    has_batch_at: float = math.nan
    asks_at: float = math.nan  # for its update
    sync_starts_at: float = math.nan
    sync_ends_at: float = math.nan
    trained: list[int] = field(default_factory=list)  # positions, in the order in which it took them
    staleness: list[int] = field(default_factory=list)  # of these
    dropped: list[int] = field(default_factory=list)  # positions


@dataclass
class RefResponse:
    """One response at the end of the run."""

    prompt_tokens: int
    response_tokens: int
    replica: int
    launched_at: float
    generated: int = 0
    preemptions: int = 0
    nearly: int = 0  # of the times its KV was lost to an update: at boundaries where it would have been preempted
    first_token_at: float = math.nan
    finished_at: float = math.nan
    finished_version: int = -1  # of the rollout at that moment
    runs: list[tuple[int, int]] = field(default_factory=list)  # version and tokens, oldest first


@dataclass
class OpenResult:
    steps: list[RefStep] = field(default_factory=list)
    responses: dict[Key, RefResponse] = field(default_factory=dict)
    launches: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # moment and positions
    asked: list[tuple[float, OpenView, int]] = field(default_factory=list)  # `room`, where the answer counted
    in_flight: set[int] = field(default_factory=set)  # positions that are running or waiting at the end


def simulate_open(
    sizes: Callable[[int], Sequence[tuple[int, int]]],
    *,
    prompts: int,
    batching: Continuous,
    train_s: Sequence[float],
    sync_s: Sequence[float],
    node_gpus: Sequence[int],
    tp: int,
    costs: RolloutCosts,
    engine: RefEngine,
    routing: Literal["contiguous", "round_robin"] = "contiguous",
) -> OpenResult:
    """All steps of a run, as many as there are durations.

    `sizes` says for the prompt at a position how long it and each of its responses are, in tokens; `train_s` is the
    time from the moment at which a step has its batch to the one at which its update is asked for.
    """
    run = _Run(node_gpus, tp, costs, engine, batching, prompts, sizes, train_s, sync_s, routing)
    run.to_the_end()
    return run.open


@dataclass(eq=False)
class _Group:
    """A prompt and its responses."""

    position: int
    requests: list[_Request]


class _Run(_Rollout):
    def __init__(
        self,
        node_gpus: Sequence[int],
        tp: int,
        costs: RolloutCosts,
        engine: RefEngine,
        batching: Continuous,
        prompts: int,
        sizes: Callable[[int], Sequence[tuple[int, int]]],
        train_s: Sequence[float],
        sync_s: Sequence[float],
        routing: Literal["contiguous", "round_robin"],
    ) -> None:
        super().__init__([], node_gpus, tp, costs, engine, 0, Nothing(), None)
        self.batching, self.prompts, self.sizes = batching, prompts, sizes
        self.train_s, self.sync_s = train_s, sync_s
        self.routing: Literal["contiguous", "round_robin"] = routing
        self.update = Update()  # of the present step
        self.open = OpenResult()
        self.keys: dict[int, Key] = {}  # by request id
        self.version = 0
        self.running: list[_Group] = []
        self.queue: list[tuple[Ready, _Group]] = []
        self.taken = self.dropped = self.ready = self.launched = 0  # prompts so far
        self.launched_since_update = self.left_at_update = 0
        self.phase: Literal["takes", "trains", "asks", "syncs", "over"] = "takes"  # of the present step
        self.until = math.nan  # when it has trained, or has synced
        self.places: set[int] = set()  # positions of prompts that the step waits for
        self.still: set[int] = set()  # replicas that stand still

    @property
    def step(self) -> RefStep:
        return self.open.steps[-1]

    # --- prompts

    def room(self) -> int:
        view = OpenView(
            prompts=self.prompts,
            version=self.version,
            running=len(self.running),
            waiting=len(self.queue),
            taken=self.taken,
            dropped=self.dropped,
            replicas=len(self.replicas),
            free=tuple(replica.index for replica in self.replicas if not replica.requests()),
            launched_since_update=self.launched_since_update,
            left_at_update=self.left_at_update,
        )
        room = self.batching.room(view)
        self.open.asked.append((self.now, view, room))
        return room

    def launch(self, count: int) -> list[_Request]:
        """So many prompts of the feed; their requests are still to be dealt."""
        new: list[_Request] = []
        for position in range(self.launched, self.launched + count):
            group = _Group(position, [])
            for sample, (prompt_tokens, response_tokens) in enumerate(self.sizes(position)):
                request = _Request(len(self.requests), position, prompt_tokens, response_tokens, 0, response_tokens)
                if self.pages_of(prompt_tokens + response_tokens) > self.costs.capacity_pages(self.tps[0]):
                    raise ValueError(f"request {request.id} does not fit an empty replica")
                self.requests.append(request)
                self.by_id[request.id] = request
                self.keys[request.id] = position, sample
                self.result.preemptions[request.id] = 0
                group.requests.append(request)
            new += group.requests
            self.running.append(group)
        if count:
            self.open.launches.append((self.now, tuple(range(self.launched, self.launched + count))))
        self.launched += count
        self.launched_since_update += count
        return new

    def begin_response(self, request: _Request, replica: _Replica) -> None:
        self.open.responses[self.keys[request.id]] = RefResponse(
            request.prompt_tokens, request.response_tokens, replica.index, self.now
        )

    def end(self, replica: _Replica) -> bool:
        """Every token is of the version that the rollout has now."""
        there = [(r, r.generated) for r in replica.admitted]
        finished = super().end(replica)
        for r, before in there:
            response = self.open.responses[self.keys[r.id]]
            for _ in range(r.generated - before):
                if math.isnan(response.first_token_at):
                    response.first_token_at = self.now
                if response.runs and response.runs[-1][0] == self.version:
                    response.runs[-1] = self.version, response.runs[-1][1] + 1
                else:
                    response.runs.append((self.version, 1))
            if r.state == "finished":
                response.finished_at, response.finished_version = self.now, self.version
        return finished

    def become_ready(self) -> bool:
        """Prompts whose responses are all complete join the queue, by position. Says whether there are any."""
        before = self.ready
        for group in sorted(self.running, key=lambda group: group.position):
            if all(r.state == "finished" for r in group.requests):
                self.running.remove(group)
                oldest = min(self.open.responses[self.keys[r.id]].runs[0][0] for r in group.requests)
                lengths = tuple(r.generated for r in group.requests)
                self.queue.append((Ready(Prompt(group.position), self.ready, oldest, lengths), group))
                self.ready += 1
        return self.ready > before

    def begin_step(self) -> None:
        """It keeps places for prompts under way that it waits for."""
        number, self.phase = len(self.open.steps), "takes"
        self.open.steps.append(RefStep(self.now))
        for group in self.running:
            runs = [self.open.responses[self.keys[r.id]].runs for r in group.requests]
            oldest = min(r[0][0] if r else self.version for r in runs)
            if self.batching.awaited(number - oldest):
                self.places.add(group.position)

    # --- what follows within a moment; each says whether anything did

    def take(self) -> bool:
        """The step that takes prompts is offered the queue."""
        if self.phase != "takes":
            return False
        number = len(self.open.steps) - 1
        for item in list(self.queue):
            if not self.batching.usable(item[0], number - item[0].version):
                self.queue.remove(item)
                self.dropped += 1
                self.step.dropped.append(item[0].prompt.position)
                self.places.discard(item[1].position)
        while len(self.step.trained) < self.prompts:
            fit = [item for item in self.queue if item[1].position in self.places]
            if not fit and len(self.step.trained) + len(self.places) < self.prompts:
                fit = self.queue
            if not fit:
                break
            item = min(fit, key=lambda item: self.batching.rank(item[0]))  # of equals the first in the queue
            self.queue.remove(item)
            self.places.discard(item[1].position)
            self.taken += 1
            self.step.trained.append(item[0].prompt.position)
            self.step.staleness.append(number - item[0].version)
        if len(self.step.trained) < self.prompts:
            return False
        self.step.has_batch_at = self.now
        self.places.clear()
        self.phase, self.until = "trains", self.now + self.train_s[number]
        return True

    def ask_for_update(self) -> bool:
        """The step has trained: its update is asked for."""
        if self.phase != "trains" or not self.reached(self.until):
            return False
        self.step.asks_at = self.now
        self.update = self.batching.update()
        self.phase = "asks"
        return True

    def stand_still(self) -> bool:
        """Replicas stop at their boundaries, and when the last one has, the weights come."""
        if self.phase != "asks" or (self.update.responses == "drain" and any(r.left for r in self.requests)):
            return False
        for replica in self.replicas:
            if replica.index in self.still or replica.iteration is not None:
                continue
            self.still.add(replica.index)
            if self.update.kv == "recompute":
                if self.step.asks_at == self.now:
                    self.note_nearly_preempted(replica)
                losing, replica.admitted = replica.admitted, []
                for r in losing:
                    self.end_stay(r, "updated")
                    r.lose_kv()
                    r.stay = RefStay(r.id, replica.gpus, self.now)
                replica.waiting[:0] = losing
        if len(self.still) < len(self.replicas):
            return False
        self.step.sync_starts_at = self.now
        self.phase, self.until = "syncs", self.now + self.sync_s[len(self.open.steps) - 1]
        return True

    def note_nearly_preempted(self, replica: _Replica) -> None:
        """Choice: what a boundary would evict loses its KV to the update instead, where that is asked for just then."""
        staying = list(replica.admitted)
        while sum(self.pages_of(r.context) for r in staying) > self.costs.capacity_pages(replica.tp):
            self.open.responses[self.keys[staying.pop().id]].nearly += 1

    def go_on(self) -> bool:
        """The weights are there: the next version, and the next step."""
        if self.phase != "syncs" or not self.reached(self.until):
            return False
        self.step.sync_ends_at = self.now
        self.version += 1
        self.left_at_update, self.launched_since_update = len(self.running) + len(self.queue), 0
        self.still.clear()
        if len(self.open.steps) == len(self.sync_s):
            self.phase = "over"
        else:
            self.begin_step()
        return True

    # --- the loop

    def begin_all(self) -> None:
        for replica in self.replicas:
            if replica.iteration is None and replica.index not in self.still:
                self.begin(replica)

    def rest_of_moment(self, asked: bool) -> None:
        """All but the ends of iterations; `asked`: whether `room` is, whatever else happens.

        Where training takes no time, its update is asked for at the moment at which the step took its last prompts, but
        after `room` was.
        """
        took = True
        while took and self.phase != "over":
            steps = len(self.open.steps)
            while self.ask_for_update() or self.stand_still() or self.go_on():
                pass
            took = self.take()
            if (asked or len(self.open.steps) > steps) and self.phase in ("takes", "trains"):
                self.launch_more()
            asked = False
        self.begin_all()

    def launch_more(self) -> None:
        idle = not any(r.left for r in self.requests)
        new = self.launch(self.room())
        if idle:
            self.deal_evenly(new)
            return
        for request in new:
            replica = min(self.replicas, key=lambda replica: (len(replica.requests()), replica.index))
            replica.arrive(request, self.now)
            self.begin_response(request, replica)

    def deal_evenly(self, new: list[_Request]) -> None:
        """As at the start of a rollout."""
        each, more = divmod(len(new), len(self.replicas))
        for i, replica in enumerate(self.replicas):
            if self.routing == "round_robin":
                share = [r for j, r in enumerate(new) if j % len(self.replicas) == i]
            else:
                first = i * each + min(i, more)
                share = new[first : first + each + (i < more)]
            for request in share:
                replica.arrive(request, self.now)
                self.begin_response(request, replica)

    def to_the_end(self) -> None:
        self.deal_evenly(self.launch(self.room()))
        self.begin_step()
        self.rest_of_moment(asked=True)
        while self.phase != "over":
            moments = [replica.iteration.ends_at for replica in self.replicas if replica.iteration is not None]
            if self.phase in ("trains", "syncs"):
                moments.append(self.until)
            if not moments:
                raise HaltedError
            self.now, idle = min(moments), False
            for replica in self.replicas:
                if replica.iteration is not None and self.reached(replica.iteration.ends_at):
                    self.end(replica)
                    idle |= not replica.requests()
            self.rest_of_moment(asked=self.become_ready() or idle)
        for r in self.requests:
            response = self.open.responses[self.keys[r.id]]
            response.generated, response.preemptions = r.generated, self.result.preemptions[r.id]
        self.open.in_flight = {group.position for group in (*self.running, *(group for _, group in self.queue))}

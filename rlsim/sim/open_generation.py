"""Generation that never stops: one rollout for all steps, a queue of complete prompts, and the steps that take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import simpy

from rlsim.errors import PolicyError
from rlsim.sim.batching import ENDLESS, LaunchCounts, PromptFeed
from rlsim.sim.continuous import Continuous, OpenView, Ready
from rlsim.sim.control import Controls, Launch, Prompt, RolloutControl, RolloutView, decides
from rlsim.sim.flow import batch_of
from rlsim.sim.generation import Generation
from rlsim.sim.moment import until_over
from rlsim.sim.outcome import RolloutSummary
from rlsim.sim.recorder import NO_STEP
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request
from rlsim.sim.reward import RewardDesk
from rlsim.sim.rollout import Rollout
from rlsim.sim.server import InferenceServer
from rlsim.sim.simulation import Machine, Relay, StepState
from rlsim.sim.updating import Pull
from rlsim.workflow.graph import Call
from rlsim.workflow.plan import Placement


@dataclass(slots=True, eq=False)
class _Group:
    """The responses to one prompt, from their launch until a step takes them."""

    prompt: Prompt
    requests: list[Request] = field(default_factory=list)
    left: int = 0  # responses that are not complete, or not scored where rewards come by the sample

    def version(self, now: Callable[[Request], int]) -> int:
        """The oldest of the weights that generated a token of it; `now`, those that generate a response at present."""
        known = [version for request in self.requests for version, _ in request.runs]
        return min(known + [now(request) for request in self.requests if not request.finished])


@dataclass(slots=True, eq=False)
class _Window:
    """A step that takes prompts."""

    step: int
    state: StepState
    call: Call
    complete: simpy.Event
    missing: int  # prompts
    awaited: set[int] | None = None  # positions of those under way for which it keeps places, once that is known


class OpenGeneration(Generation, RolloutControl):
    """Continuous generation. As a control of its rollout it says what is launched; `window` and `update` are for calls.

    Where rewards come by the sample (`scores`), a response is scored as soon as it is complete, before a step takes it:
    if an LLM does that, by one judge for all steps, which `judge` makes.
    """

    def __init__(
        self, machine: Machine, desk: RewardDesk, call: Call, judge: Callable[[Call, int], InferenceServer | None]
    ) -> None:
        super().__init__(machine, machine.what.costs, machine.what.initial_tp)
        what = self._what
        self.served_at = self._env.now  # when a step last had its batch
        batching = what.batching.launcher
        assert isinstance(batching, Continuous)
        self._desk, self._batching = desk, batching
        self._feed: PromptFeed = what.feed
        ends = (what.workflow.call(edge.target) for edge in what.workflow.edges if edge.grain == "sample")
        reward = next((end for end in ends if end.kind == "reward"), None)
        self.scores = reward is not None
        self._judge = judge(reward, NO_STEP) if reward else None
        self._groups: dict[int, _Group] = {}  # by prompt position: those that are not ready
        self._ready_now: list[_Group] = []
        self._queue: dict[Ready, _Group] = {}
        self._discarded: list[_Group] = []  # since the last window
        self._again: list[Prompt] = []  # were dropped and are to begin before new ones
        #: Since the last window: responses launched; prompts dropped, for their rewards, as not usable, to begin again.
        self._counts: Counter[str] = Counter()
        self._window: _Window | None = None
        self._updating = self._due = False
        self._spreading = 0  # weights on their way to replicas that take them each on its own
        self._lent_gpu_s = 0.0  # of those taken back since the last window
        self._drained: simpy.Event | None = None
        self._ids = self._ready = self._taken = self._dropped = 0
        self._launched_since_update = self._left_at_update = 0
        self._open = self._begin(call, what.plan.of(call.name))
        for launch in self._launches():
            self._open.launch(launch)

    # ---- the rollout ------------------------------------------------------------------------------------------------

    def _begin(self, call: Call, placement: Placement) -> Rollout:
        what, mesh = self._what, placement.rollout_mesh(self._what.cluster, self._what.initial_tp)
        self._pool.acquire(placement.gpus, call.kind)
        return self._rollout(
            call,
            NO_STEP,
            mesh,
            requests=(),
            tp=what.initial_tp,
            control=Controls([self, what.control]),
            asked_at_finish=decides(what.control),
            dispatch="fewest_requests",
            open=True,
            launcher=self._launched,
            on_finish=self._finished,
            on_abort=self._aborted,
            on_drained=self._all_finished,
            on_idle=self._idle,
            on_release=self._lend,
            batch_missing=lambda: self._window.missing / self._feed.prompts if self._window else 0.0,
        )

    def _launched(self, launch: Launch) -> list[Request]:
        requests = self._what.requests(launch.prompts, launch.samples, self._ids)
        self._ids += len(requests)
        self._counts["launched"] += len(requests)
        self._launched_since_update += len(launch.prompts)
        for prompt in launch.prompts:
            self._groups[prompt.position] = _Group(prompt)
        for request in requests:
            group = self._groups[request.position]
            group.requests.append(request)
            group.left += 1
        return requests

    def _lend(self, gpus: Iterable[int]) -> None:
        """Training may have these GPUs until the next weights come."""
        if not self._what.workflow.elastic:
            raise PolicyError(
                "a part of the system releases GPUs of a rollout that never ends, and no call of the workflow takes "
                "them: training must be able to borrow them (Workflow.elastic)"
            )
        self._pool.release(gpus)

    def _call_in(self) -> Generator[simpy.Event, Any, list[Replica]]:
        """At the end of a moment: wait for the GPUs that are lent; returns whose they were, by index."""
        yield from until_over(self._env)
        lent_at = self._open.released_at
        lent = sorted((r for r in self._open.lent if r.gpus[0] in lent_at), key=attrgetter("index"))
        since = {gpu: lent_at.pop(gpu) for replica in lent for gpu in replica.gpus}
        if lent and not (granted := self._pool.acquire(since, "generate")).triggered:
            yield granted
            yield from until_over(self._env)
        self._lent_gpu_s += sum(self._env.now - at for at in since.values())
        return lent

    def _finished(self, responses: Sequence[Request]) -> None:
        version = self._open.version_of(responses[0])  # all are of one replica
        for request in responses:
            request.end_run(version, request.generated)
        if self.scores:
            self._desk.submit(responses, self._judge, self._counted)
        else:
            self._aborted(responses)

    def _aborted(self, responses: Sequence[Request]) -> None:
        for request in responses:
            self._counted(request)

    def _counted(self, request: Request) -> None:
        """This response is complete, and scored where rewards come by the sample; or it is aborted."""
        group = self._groups[request.position]
        group.left -= 1
        if not group.left:
            self._ready_now.append(self._groups.pop(request.position))
            self._ask()

    def _idle(self) -> None:
        if self.relays:
            self._ask()

    def _ask(self) -> None:
        self._due = True
        self._open.ask()

    def on_finish(self, view: RolloutView) -> list[Launch]:  # noqa: ARG002
        """At the end of a moment: the open window takes what is ready, and prompts begin where there is room."""
        launches: list[Launch] = []
        if self._due:  # another control is asked more often
            self._due = False
            self._line_up()
            self._serve()
            if not self._updating and self._open.takes_launches:
                launches += self._launches()
        self._open.launching = bool(launches or self._updating or self._spreading)
        return launches

    def _launches(self) -> Iterator[Launch]:
        room = self._batching.room(self._seen())
        wanted = room if isinstance(room, Mapping) else {None: room}
        for replica, prompts in wanted.items():
            if prompts:
                to = () if replica is None else (replica,)
                again, self._again = self._again[:prompts], self._again[prompts:]
                new = self._feed.take(prompts - len(again))
                yield Launch((*again, *new), self._feed.responses, to=to)

    def _seen(self) -> OpenView:
        free = tuple([replica.index for replica in self._open.active() if replica.idle])
        return OpenView(
            self._feed.prompts,
            self._open.updates.version,
            len(self._groups),
            len(self._queue),
            self._taken,
            self._dropped,
            self._open.size,
            free,
            self._launched_since_update,
            self._left_at_update,
        )

    # ---- the queue and the steps that take from it ------------------------------------------------------------------

    def _line_up(self) -> None:
        """What became ready at this moment joins the queue, by position, if it is whole and its rewards count."""
        for group in sorted(self._ready_now, key=lambda g: g.prompt.position):
            self._open.forget(group.requests)
            if any(r.aborted for r in group.requests) or not self._fits(group):
                self._launched_since_update -= 1  # another may take its place
                self._drop(group)
                self._counts["useless"] += 1
                if (useless := self._counts["useless"]) > ENDLESS * self._feed.prompts:
                    raise PolicyError(
                        f"{useless} prompts were dropped, for their rewards or as a response was, since a step last "
                        f"had its batch of {self._feed.prompts}: no end in sight"
                    )
                continue
            lengths = tuple(r.generated for r in group.requests)
            ready = Ready(group.prompt, self._ready, group.version(self._open.version_of), lengths)
            self._queue[ready] = group
            self._ready += 1
        self._ready_now.clear()

    def _fits(self, group: _Group) -> bool:
        """Whether its rewards count."""
        batching = self._what.batching
        if not batching.needs_rewards:
            return True
        return batching.counts([r.reward for r in sorted(group.requests, key=attrgetter("finished_at"))])

    def _drop(self, group: _Group) -> None:
        self._dropped += 1
        self._counts["dropped"] += 1
        self._discarded.append(group)
        if self._window and self._window.awaited:
            self._window.awaited.discard(group.prompt.position)

    def _serve(self) -> None:
        """The step whose window is open takes prompts until it has its batch."""
        window, queue, batching = self._window, self._queue, self._batching
        if window is None:
            return
        if window.awaited is None:  # it begins at this moment
            window.awaited = self._awaited(window.step)
        fits = {ready: batching.usable(ready, window.step - ready.version) for ready in queue}
        for group in [queue.pop(ready) for ready in fits if not fits[ready]]:
            self._drop(group)
            self._counts["stale"] += 1
            if batching.relaunches():
                self._counts["relaunched"] += 1
                samples = group.prompt.first_sample + len(group.requests)
                self._again.append(group.prompt._replace(first_sample=samples))
        usable = sorted(
            queue, key=lambda ready: (not batching.awaited(window.step - ready.version), batching.rank(ready))
        )
        awaited = [ready for ready in usable if ready.prompt.position in window.awaited][: window.missing]
        window.awaited.difference_update(ready.prompt.position for ready in awaited)
        others = [ready for ready in usable if ready not in awaited] if awaited else usable
        taken = [*awaited, *others[: max(window.missing - len(awaited) - len(window.awaited), 0)]]
        window.missing -= len(taken)
        self._taken += len(taken)
        for requests in [queue.pop(ready).requests for ready in taken]:
            window.state.take(requests)
            window.state.flow.deliver(batch_of(window.call.name), requests)
            if self.scores:
                window.state.flow.deliver(window.call.name, requests)
        if not window.missing:
            self._window = None
            window.complete.succeed()

    def window(self, call: Call, step: int, state: StepState) -> Generator[simpy.Event, Any, None]:
        """A step takes its batch from the queue; over when it has all of it."""
        state.version = self.version
        complete = self._env.event()
        self._window = _Window(step, state, call, complete, self._feed.prompts)
        self._ask()
        yield complete
        self.served_at = self._env.now
        state.requests.sort(key=attrgetter("id"))  # as they were launched, in whatever order they came
        if state.flow.wants(call.name) and not self.scores:
            state.flow.deliver(call.name, state.trained_on())
        state.flow.close(call.name)
        state.flow.close(batch_of(call.name))
        self._outcome.rollouts.append(self._note(step, state))

    def _awaited(self, step: int) -> set[int]:
        if type(self._batching).awaited is Continuous.awaited:
            return set()
        waits = self._batching.awaited
        return {at for at, group in self._groups.items() if waits(step - group.version(self._open.version_of))}

    # ---- new weights ------------------------------------------------------------------------------------------------

    @property
    def relays(self) -> bool:
        """Whether each replica takes new weights on its own."""
        return self._batching.update().replicas == "each"

    def update(self, seconds: float) -> Generator[simpy.Event, Any, float]:
        """Bring new weights, which takes so long once all replicas stand still; returns when they did."""
        self._updating = True
        how = self._batching.update()
        if how.responses == "drain" and self._open.unfinished:
            self._drained = self._env.event()
            yield self._drained
        lent = yield from self._call_in()
        paused = self._open.updates.pause(how.kv)
        self._open.take_back(lent)
        yield paused
        start = self._env.now
        yield self._env.timeout(seconds)
        self._open.updates.resume(self.version + 1)
        self._updating = False
        self._begin_version()
        return start

    def publish(self, relay: Relay, call: str) -> None:
        """New weights are on their way to every replica, which takes them on its own."""
        how = self._batching.update()
        pull = Pull(self.version + 1, how.responses == "drain", how.kv, relay.pull_s, call)
        self._spreading += 1
        self._env.process(self._spread(relay.spread_s, pull))

    def _spread(self, seconds: float, pull: Pull) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(seconds)
        lent = yield from self._call_in()
        self._spreading -= 1
        self._open.take_back(lent)
        self._open.updates.publish(pull)
        self._begin_version()

    def _begin_version(self) -> None:
        left = len(self._groups) + len(self._ready_now) + len(self._queue)
        self._launched_since_update, self._left_at_update = 0, left
        self._ask()

    def _all_finished(self) -> None:
        if self._drained and not self._drained.triggered:
            self._drained.succeed()

    # ---- what is written down ---------------------------------------------------------------------------------------

    def _note(self, step: int, state: StepState) -> RolloutSummary:
        """What happened since the last step had its batch; the step is given what was dropped meanwhile."""
        for group in self._discarded:
            state.requests += group.requests
        counts, self._counts, self._discarded = self._counts, Counter(), []
        lent_gpu_s, self._lent_gpu_s = self._lent_gpu_s, 0.0
        launches = LaunchCounts("", counts["launched"], counts["dropped"], counts["relaunched"], stale=counts["stale"])
        waiting = len(self._queue) + len(self._again)
        return self._summary(step, self.planned_tp, self._open, launches, waiting, lent_gpu_s)

    def end(self, state: StepState) -> None:
        """The run is over: its last step has all that is in flight, to go on in a step that does not come."""
        self._open.break_off()
        if self._judge:
            self._judge.break_off()
        self._lent_gpu_s += sum(self._env.now - at for at in self._open.released_at.values())
        rest = self._note(len(self._outcome.step_ends) - 1, state)
        left = [*self._groups.values(), *self._ready_now, *self._queue.values()]
        requests = sorted((r for group in left for r in group.requests), key=attrgetter("id"))
        state.requests += requests
        state.paused = frozenset(request.id for request in requests)
        rest = rest._replace(launches=rest.launches._replace(paused=len(requests)))
        self._outcome.rollouts[-1] = self._outcome.rollouts[-1].with_rest(rest)
        self._open.close()

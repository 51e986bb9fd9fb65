"""Samples of one step on their way along edges of the grain `sample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from rlsim.sim.request import Request
from rlsim.workflow.graph import Call, Workflow


class Inbox:
    """Samples that a call may work on, and whether more will come.

    `on_samples` is told of new ones, `first` fires with the first of them or when none will come, `closed` at the end.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.first = env.event()
        self.closed = env.event()
        self.samples: list[Request] = []  # all that ever came
        self.on_samples: Callable[[Sequence[Request]], None] | None = None

    def put(self, samples: Sequence[Request]) -> None:
        """These have come."""
        self.samples += samples
        if samples and not self.first.triggered:
            self.first.succeed()
        if samples and self.on_samples:
            self.on_samples(samples)

    def listen(self, on_samples: Callable[[Sequence[Request]], None]) -> None:
        """Tell of what is here already, and of all that comes."""
        self.on_samples = on_samples
        if self.samples:
            on_samples(self.samples)

    def close(self) -> None:
        """No more will come."""
        if not self.first.triggered:
            self.first.succeed()
        if not self.closed.triggered:
            self.closed.succeed()


class _Join:
    """Lets a sample through to a call once all its sources have delivered it."""

    def __init__(self, inbox: Inbox, sources: frozenset[str], group: int) -> None:
        self.inbox = inbox
        self.sources = sources
        self._group = group  # samples of a prompt that go through together
        self._open = set(sources)
        self._seen: dict[int, int] = {}  # sources that delivered the sample
        self._ready: dict[int, list[Request]] = {}  # by prompt

    def deliver(self, samples: Sequence[Request]) -> None:
        through: list[Request] = []
        for sample in samples:
            seen = self._seen[sample.id] = self._seen.get(sample.id, 0) + 1
            if seen == len(self.sources):
                ready = self._ready.setdefault(sample.prompt_id, [])
                ready.append(sample)
                if len(ready) >= self._group:
                    through += self._ready.pop(sample.prompt_id)
        self.inbox.put(through)

    def close(self, source: str) -> None:
        self._open.discard(source)
        if not self._open:
            self.inbox.put([sample for ready in self._ready.values() for sample in ready])  # of groups cut short
            self._ready.clear()
            self.inbox.close()


#: A source of its own: the step's batch, which responses join once it is sure that they are trained on.
BATCH = ""


class Flow:
    """One step's samples, from the calls that make them to the inboxes of the calls that take them.

    Reward calls score whatever their source delivers, so that rewards can decide what is trained on; inference and
    training work on responses of the batch only. With `Workflow.group_advantage` training takes a prompt's `responses`
    together.
    """

    def __init__(self, env: simpy.Environment, workflow: Workflow, responses: int) -> None:
        self.inboxes: dict[str, Inbox] = {}
        self._joins: list[_Join] = []
        for call in workflow.calls:
            sources = {e.source for e in workflow.into(call.name) if e.grain == "sample"}
            if sources or call.kind == "reward":
                group = responses if call.kind == "train" and workflow.group_advantage else 1
                inbox = self.inboxes[call.name] = Inbox(env)
                self._joins.append(_Join(inbox, _sources(workflow, call, sources), group))

    def wants(self, source: str) -> bool:
        """Whether some call takes what `source` delivers."""
        return any(source in join.sources for join in self._joins)

    def deliver(self, source: str, samples: Sequence[Request]) -> None:
        """`source` is done with these samples."""
        for join in self._joins:
            if source in join.sources:
                join.deliver(samples)

    def close(self, source: str) -> None:
        """`source` will deliver no more."""
        for join in self._joins:
            if source in join.sources:
                join.close(source)


def _sources(workflow: Workflow, call: Call, sources: set[str]) -> frozenset[str]:
    if call.kind == "reward":
        return frozenset(sources or {e.source for e in workflow.into(call.name) if e.lag == 0})
    return frozenset({s for s in sources if workflow.call(s).kind != "generate"} | {BATCH})

"""Samples of one step on their way along edges of the grains `sample` and `chunk`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf

import simpy

from rlsim.sim.request import Request
from rlsim.workflow.graph import Call, Workflow


class Inbox:
    """Samples that a call may work on, and whether more will come.

    `on_samples` is told of new ones, `first` fires with the first of them or when none will come, `closed` at the end.
    Where responses come by the chunk, `on_chunks` is told of those that are on their way.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.closed = env.event()
        self.samples: list[Request] = []  # all that ever came
        self.chunks: dict[int, tuple[Request, int]] = {}  # by request: how many tokens have come of it
        self._awaited: list[tuple[int, simpy.Event]] = []  # how many samples in all, and what fires then
        self.first = self.at_least(1)
        self.on_samples: Callable[[Sequence[Request]], None] | None = None
        self.on_chunks: Callable[[Sequence[tuple[Request, int]]], None] | None = None

    def put(self, samples: Sequence[Request]) -> None:
        self.samples += samples
        if samples and self.on_samples:
            self.on_samples(samples)
        self._tell(len(self.samples))

    def at_least(self, samples: int) -> simpy.Event:
        """Fires once so many samples have come in all, or no more will come."""
        event = self._env.event()
        self._awaited.append((samples, event))
        self._tell(samples if self.closed.triggered else len(self.samples))
        return event

    def _tell(self, there: int) -> None:
        for samples, event in self._awaited:
            if samples <= there and not event.triggered:
                event.succeed()
        self._awaited = [(samples, event) for samples, event in self._awaited if samples > there]

    def put_chunks(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Take samples of which so many tokens have come, and tell the listener of them."""
        self.chunks.update((request.id, (request, tokens)) for request, tokens in chunks)
        if not self.first.triggered:
            self.first.succeed()
        if self.on_chunks:
            self.on_chunks(chunks)

    def listen(
        self,
        on_samples: Callable[[Sequence[Request]], None],
        on_chunks: Callable[[Sequence[tuple[Request, int]]], None] | None = None,
    ) -> None:
        """Tell of what is here already, and of all that comes."""
        self.on_samples, self.on_chunks = on_samples, on_chunks
        if on_chunks and self.chunks:
            on_chunks(list(self.chunks.values()))
        if self.samples:
            on_samples(self.samples)

    def close(self) -> None:
        if not self.closed.triggered:
            self.closed.succeed()
            self._tell(max((samples for samples, _ in self._awaited), default=0))


def closed(env: simpy.Environment, samples: Sequence[Request]) -> Inbox:
    """An inbox of these samples, to which no more will come."""
    inbox = Inbox(env)
    inbox.put(samples)
    inbox.close()
    return inbox


def batch_of(call: str) -> str:
    """A source of its own: what a call generates of the step's batch, once it is sure that it is trained on."""
    return f"the batch of {call}"


class _Join(Inbox):
    """An inbox of what all sources of a call have delivered, together with the other samples of its prompt.

    Of the sources that are in `made` each sample has but one, which says how many deliver it in all. A prompt has
    `group` samples, or as many as these have delivered once they are closed.
    """

    def __init__(self, env: simpy.Environment, sources: frozenset[str], made: Mapping[str, int], group: int) -> None:
        super().__init__(env)
        self.sources = sources
        self._made = made
        self._needed: dict[int, float] = {}  # sources that are to deliver the sample
        self._group = group
        self._open = set(sources)
        self._in_batch: Counter[int] = Counter()  # by prompt: its samples there
        self._all_known = False  # whether no more of them can come
        self._seen: dict[int, int] = {}  # sources that delivered the sample
        self._ready: dict[int, list[Request]] = {}  # by prompt

    def deliver(self, source: str, samples: Sequence[Request]) -> None:
        through: list[Request] = []
        seen_of, needed, in_batch, made = self._seen, self._needed, self._in_batch, self._made.get(source)
        unmade = inf if self._made else len(self.sources)
        for sample in samples:
            position = sample.position
            if made:
                in_batch[position] += 1
                needed[sample.id] = made
            seen = seen_of[sample.id] = seen_of.get(sample.id, 0) + 1
            if seen < needed.get(sample.id, unmade):
                continue
            ready = self._ready.setdefault(position, [])
            ready.append(sample)
            if len(ready) >= self._group or (self._all_known and len(ready) == in_batch[position]):
                through += self._ready.pop(position)
        self.put(through)

    def close_source(self, source: str) -> None:
        self._open.discard(source)
        self._all_known |= source in self._made and self._open.isdisjoint(self._made)
        whole = [
            prompt
            for prompt, ready in self._ready.items()
            if not self._open or (self._all_known and len(ready) == self._in_batch[prompt])
        ]
        self.put([sample for prompt in whole for sample in self._ready.pop(prompt)])
        if not self._open:
            self.close()


class Flow:
    """One step's samples, from the calls that make them to the inboxes of the calls that take them.

    Reward calls score whatever their source delivers, so that rewards can decide what is trained on; inference and
    training work on responses of the batch only. With `Workflow.group_advantage` training, and inference that takes the
    batch in windows, take a prompt's `responses` together. A call that takes chunks is told of every response on its
    way, and gets those of the batch whole. With `Workflow.fetch_once` responses of the batch are held back but for
    those that are there at the first `fetch`.
    """

    def __init__(self, env: simpy.Environment, workflow: Workflow, responses: int) -> None:
        self.inboxes: dict[str, _Join] = {}
        self._chunked: dict[str, tuple[int, list[str]]] = {}  # by source: chunk length, who takes them
        self._held: list[Request] | None = [] if workflow.fetch_once else None  # of the batch
        self._fetches = workflow.fetch_once
        self._batch = batch_of(workflow.generating[0].name) if workflow.generating else ""
        for call in workflow.calls:
            edges = workflow.into(call.name)
            for edge in edges:
                if edge.grain == "chunk":
                    self._chunked.setdefault(edge.source, (edge.chunk_tokens, []))[1].append(call.name)
            sources = {e.source for e in edges if e.grain in ("sample", "chunk")}
            if sources or call.kind == "reward":
                whole = call.kind == "train" or (call.kind == "inference" and workflow.windows)
                group = responses if whole and workflow.group_advantage else 1
                self.inboxes[call.name] = _Join(env, *_sources(workflow, call, sources), group)

    def wants(self, source: str) -> bool:
        """Whether some call takes what `source` delivers."""
        return any(source in inbox.sources for inbox in self.inboxes.values())

    def deliver(self, source: str, samples: Sequence[Request]) -> None:
        """`source` is done with these samples."""
        if source == self._batch and self._held is not None:
            self._held += samples
            return
        for inbox in self.inboxes.values():
            if source in inbox.sources:
                inbox.deliver(source, samples)

    def chunked(self, source: str) -> tuple[int, Sequence[str]]:
        """How long the chunks are that `source` hands over (tokens), and which calls take them; 0 if none does."""
        return self._chunked.get(source, (0, ()))

    def deliver_chunks(self, source: str, chunks: Sequence[tuple[Request, int]]) -> None:
        """`source` has come so far with these samples (tokens)."""
        for name in self.chunked(source)[1]:
            self.inboxes[name].put_chunks(chunks)

    def fetch(self) -> None:
        """GPUs have been given up: what is there goes on to the calls that take responses of the batch, once."""
        if self._fetches and self._held:
            self._fetches, held, self._held = False, self._held, None
            self.deliver(self._batch, held)
            self._held = []

    def close(self, source: str) -> None:
        if source == self._batch and self._held is not None:
            held, self._held = self._held, None
            self.deliver(self._batch, held)
        for inbox in self.inboxes.values():
            if source in inbox.sources:
                inbox.close_source(source)

    def forget(self) -> None:
        """The step is over: let go of its samples and of those who listen, which may deliver to this flow."""
        for inbox in self.inboxes.values():
            inbox.samples, inbox.chunks, inbox.on_samples, inbox.on_chunks = [], {}, None, None


def _sources(workflow: Workflow, call: Call, sources: set[str]) -> tuple[frozenset[str], dict[str, int]]:
    """What delivers samples to a call, and for those of these that generate them how many deliver one of theirs."""
    generate, reward = {c.name for c in workflow.generating}, call.kind == "reward"
    own = sources or {e.source for e in workflow.into(call.name) if e.lag == 0} if reward else sources
    others = [workflow.takes(source) for source in own - generate]
    makers = own & generate if reward else workflow.takes(call.name)
    made = {name if reward else batch_of(name): 1 + sum(name in of for of in others) for name in makers}
    return frozenset(own - generate) | made.keys(), made

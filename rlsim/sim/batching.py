"""What a step launches, when its batch is complete, and what becomes of the rest.

A batching decides; `StepBatch` keeps count of one step for it: which prompts have their responses, which responses
belong to the batch, and what is to be aborted or launched beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlsim.base.hooks import Hooked, hook, is_whole
from rlsim.errors import PolicyError
from rlsim.sim.actions import Extend, Stop, Surplus
from rlsim.sim.control import Action, Launch, Prompt, RolloutControl, RolloutView, is_launch
from rlsim.sim.request import Request

#: A step that launches so many times the prompts it needs, because their rewards do not count, is given up.
ENDLESS = 50


class PromptFeed:
    """The prompts of the training set in training order; a step's batch is `prompts` × `responses`."""

    def __init__(self, prompts: int, responses: int) -> None:
        self.prompts = prompts
        self.responses = responses
        self._next = 0

    def take(self, count: int) -> tuple[Prompt, ...]:
        """The next `count` prompts; raises `ValueError` for a number below 0."""
        if count < 0:
            raise ValueError(f"feed.take({count}): expected a number of prompts")
        first, self._next = self._next, self._next + count
        return tuple(Prompt(position) for position in range(first, self._next))


class Unfinished(NamedTuple):
    """A prompt whose responses are not all there, or do not all count yet, when the step's batch is complete."""

    prompt: Prompt
    generated_tokens: tuple[int, ...]  # of each of its responses that was not aborted
    complete: tuple[bool, ...]  # which of these are whole responses
    staleness: tuple[int, ...]  # weight updates between the oldest token of each and this step's generation


class Progress(NamedTuple):
    """How far a step's generation is."""

    launched: int  # responses that the step generates: new ones, and those that go on
    finished: int  # of these, whole responses
    complete: int  # prompts that belong to the batch
    unfinished: Collection[Prompt]  # those that do not, or not yet


def _are_of(kept: object, unfinished: Sequence[Unfinished]) -> bool:
    asked = {one.prompt.position for one in unfinished}
    return isinstance(kept, Sequence) and all(isinstance(p, Prompt) and p.position in asked for p in kept)


_LAUNCH = "a Launch of different Prompts, such as Launch(feed.take(feed.prompts), feed.responses)"


class Batching(Hooked):
    """Base of all batchings: launches exactly a batch, and every response belongs to it.

    A batching serves all steps of a run, one after the other: `launch` begins a step, then come `ends` as responses
    finish, `counts` and `more` while they are scored, and at its end `keep`, `put_back`, `waiting` and `upcoming`, in
    this order.
    """

    @property
    def needs_rewards(self) -> bool:
        """Whether a prompt is decided on only once its responses are scored: where `counts` is overridden."""
        return type(self).counts is not Batching.counts

    @property
    def launches_its_own(self) -> bool:
        """Whether it launches anything but exactly a batch: where `launch` is overridden."""
        return type(self).launch is not Batching.launch

    @property
    def pauses(self) -> bool:
        """Whether responses may go on in a later step: where `keep` is overridden."""
        return type(self).keep is not Batching.keep

    @property
    def ends_early(self) -> bool:
        """Whether generation may end before the batch is complete: where `ends` is overridden."""
        return type(self).ends is not Batching.ends

    @property
    def decides_together(self) -> bool:
        """Whether it is decided on all prompts of a step once each is finished, by their order, and not as they are."""
        return False

    @property
    def launcher(self) -> Batching:
        """The batching that says what to launch, what to keep and when generation ends."""
        return self

    @hook("a whole number of prompts", lambda prompts, *_: is_whole(prompts, 0))
    def under_way(self, feed: PromptFeed) -> int:  # noqa: ARG002
        """A step begins: how many prompts it keeps under way until the batch is complete. `more` brings new ones as
        others are finished or dropped; 0: only as many as the batch still lacks."""
        return 0

    @hook(_LAUNCH, is_launch)
    def launch(self, feed: PromptFeed) -> Launch:
        """A step begins: the prompts and the number of responses to each that it starts with.

        The step's batch is `feed.prompts` prompts with `feed.responses` responses each; `feed.take(n)` gives the next
        n prompts of the training set, each of them once. What is launched beyond the batch is aborted, or kept, when
        the batch is complete. `resume` names prompts that `keep` returned in an earlier step. With `budget_tokens` a
        step in which every response is finished or has used up its budget trains on the prompts that are complete;
        while none is, all get the same budget again.
        """
        return Launch(feed.take(feed.prompts), feed.responses)

    @hook("True or False", lambda value, *_: isinstance(value, bool | np.bool_))
    def ends(self, progress: Progress) -> bool:  # noqa: ARG002
        """Responses have just finished: whether generation ends now, though the batch is not complete.

        The step trains on the prompts that are, and all others go to `keep`.
        """
        return False

    @hook("the name of a kind of round: text", lambda label, *_: isinstance(label, str))
    def upcoming(self, feed: PromptFeed) -> str:  # noqa: ARG002
        """A step is over: the kind of round that the next launch begins, as its `label` will say."""
        return ""

    @hook("True or False", lambda value, *_: isinstance(value, bool | np.bool_))
    def counts(self, rewards: Sequence[float]) -> bool:  # noqa: ARG002
        """A prompt's `feed.responses` responses are finished and scored: whether it belongs to the batch.

        If not, it is dropped for good. `rewards` stand in the order in which the responses finished.
        """
        return True

    @hook(f"{_LAUNCH}, without resume, or None", lambda more, *_: more is None or (is_launch(more) and not more.resume))
    def more(self, missing: int, feed: PromptFeed) -> Launch | None:
        """`missing` more prompts are needed, as others were dropped, or are to be `under_way`: what to launch, or None
        to train on those that are there. Asked of batchings that override `counts` or `under_way`.
        """
        return Launch(feed.take(missing), feed.responses)

    @hook("some of the unfinished prompts: [one.prompt for one in unfinished if …]", _are_of)
    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:  # noqa: ARG002
        """A step is over: those of its unfinished prompts whose responses keep their tokens (not their KV cache) until
        a launch resumes them. The others are aborted and go to `put_back`.
        """
        return ()

    @hook()
    def put_back(self, unfinished: Sequence[Prompt]) -> None:
        """A step is over, and these prompts are not finished, dropped or kept; what they generated is gone.

        Remember them to launch them again; each names the samples that it has had (`first_sample`), so that it gets
        others. A batching that does not drops them.
        """

    @hook("a whole number of prompts", lambda prompts, *_: is_whole(prompts, 0))
    def waiting(self) -> int:
        """A step is over: how many prompts that were kept or put back wait to be launched again, for the results."""
        return 0


class Batchings(Batching):
    """Several batchings as one: the first is the `launcher`, a prompt counts if it counts for all of them."""

    def __init__(self, parts: Sequence[Batching]) -> None:
        self.parts = tuple(parts)

    @property
    def launcher(self) -> Batching:
        return self.parts[0]

    @property
    def needs_rewards(self) -> bool:
        return any(part.needs_rewards for part in self.parts)

    def counts(self, rewards: Sequence[float]) -> bool:
        return all(part.counts(rewards) for part in self.parts)

    def put_back(self, unfinished: Sequence[Prompt]) -> None:
        for part in self.parts:
            part.put_back(unfinished)

    def waiting(self) -> int:
        return sum(part.waiting() for part in self.parts)


class LaunchCounts(NamedTuple):
    """What a step's launches came to."""

    label: str
    launched: int  # responses
    dropped: int  # prompts that do not count
    put_back: int  # prompts handed to `Batching.put_back`, or dropped as not usable and to be launched again
    resumed: int = 0  # responses that came from an earlier step
    paused: int = 0  # responses that go on in a later step
    stale: int = 0  # of the prompts that do not count, those whose weights were too old


@dataclass(slots=True, eq=False)
class _Group:
    """The requests of one prompt in one step."""

    prompt: Prompt
    samples: int = 0  # launched
    left: dict[int, Request] = field(default_factory=dict)  # those that are neither finished nor aborted
    finished: list[Request] = field(default_factory=list)  # in that order
    decided: bool = False  # whether it belongs to the batch or is dropped


class StepBatch(RolloutControl):
    """The batch of one step, asked as a rollout control: it aborts what is surplus, stops when the batch is complete.

    A prompt is finished when its first `feed.responses` responses are (and are scored, if the batching needs that);
    the batch is complete when `feed.prompts` prompts are. Where nothing can be surplus, dropped, kept or cut off
    (`certain`), each response belongs to it as soon as it is finished. `accept` is told of responses that belong to it.
    """

    def __init__(
        self,
        batching: Batching,
        feed: PromptFeed,
        accept: Callable[[Sequence[Request]], None],
        version: int = 0,
        first: Launch | None = None,
    ) -> None:
        self._batching, self._feed, self._accept, self._version = batching, feed, accept, version
        self._groups: dict[int, _Group] = {}
        self._of: dict[int, _Group] = {}  # by request
        self._news: dict[int, _Group] = {}
        self._settled: dict[int, _Group] = {}  # where it is decided on all together
        self._unfinished: dict[int, Prompt] = {}  # those of the groups that are not decided
        self._complete = self._dropped = 0
        self._generated = self._finished = 0  # responses that the step generates, and those of them that are whole
        self.size = 0  # new requests launched
        self.resumed = 0  # requests that came from earlier steps
        self.paused: dict[int, list[Request]] = {}  # by prompt position, once the step is over: what it keeps
        self.over = False
        self._launcher = batching.launcher
        self.first = first or self._launcher.launch(feed)
        surplus = len(self.first.prompts) > feed.prompts or self.first.samples > feed.responses
        #: The step trains on the prompts that are complete when generation ends, be they fewer than a batch.
        self.incomplete_ok = self._launcher.ends_early or self.first.budget_tokens > 0
        self._refilled = self._launcher.under_way(feed)
        self._grows = batching.needs_rewards or self._refilled > 0  # more may be launched
        self.certain = not (surplus or self._grows or self._launcher.pauses or self.incomplete_ok)
        self._accepted: set[int] = set()
        #: The rollout goes on when nothing is left to generate: more may be launched, or budgets grow.
        self.open = self._grows or self.first.budget_tokens > 0

    def launched(self, requests: Sequence[Request], launch: Launch) -> None:
        resumed = sum(request.resumed for request in requests) if self._launcher.pauses else 0
        self.size += len(requests) - resumed
        self.resumed += resumed
        if self.certain:
            return
        for prompt in (*launch.prompts, *launch.resume):
            self._groups[prompt.position] = _Group(prompt)
            self._unfinished[prompt.position] = prompt
        for request in requests:
            if launch.budget_tokens:
                request.allow(launch.budget_tokens)
            self._generated += not request.finished
            group = self._of[request.id] = self._groups[request.position]
            group.left[request.id] = request
            group.samples += 1

    def finished(self, requests: Sequence[Request]) -> None:
        if self.certain:
            self._accept(requests)
            return
        for request in requests:
            group = self._of[request.id]
            group.left.pop(request.id, None)
            group.finished.append(request)
            self._finished += request.generated > request.resumed_tokens
            self._news[request.position] = group

    def lost(self, requests: Sequence[Request]) -> None:
        """These have lost their sandboxes: a prompt that cannot become whole any more does not count."""
        for group in [self._of[request.id] for request in requests if not self.certain]:
            for request in requests:
                group.left.pop(request.id, None)
            self._news[group.prompt.position] = group

    def scored(self, request: Request) -> bool:
        """This response has its reward; returns whether that may decide something."""
        if not self._batching.needs_rewards or self.over or self._of[request.id].decided:
            return False
        self._news[request.position] = self._of[request.id]
        return True

    def on_finish(self, view: RolloutView) -> list[Action]:
        """Abort what is surplus, launch what is missing, stop when the batch is complete or generation ends."""
        actions = list(self._decide())
        if self.incomplete_ok and not self.over:
            actions += self._end(view)
        return actions

    def _end(self, view: RolloutView) -> Iterator[Action]:
        """Stop before the batch is complete, if it is time; give new budgets if all are used up for nothing."""
        progress = Progress(self._generated, self._finished, self._complete, self._unfinished.values())
        budget, idle = self.first.budget_tokens, not view.unfinished()
        if (budget and idle and self._complete) or self._launcher.ends(progress):
            yield Stop()
        elif budget and idle:
            yield Extend(tuple(i for group in self._groups.values() for i in group.left), budget)

    def close(self) -> LaunchCounts:
        """The rollout is over: decide on what its last moment brought; keep or put back what is not finished."""
        if not self.over:
            for _ in self._decide():
                pass
        self.over = True
        unfinished = {g.prompt.position: g for g in self._groups.values() if not g.decided}
        if self._launcher.pauses:
            there = {at: [*g.finished, *g.left.values()] for at, g in unfinished.items()}
            asked = [self._seen(g.prompt, there[at]) for at, g in unfinished.items()]
            self.paused = {prompt.position: there[prompt.position] for prompt in self._launcher.keep(asked)}
        back = [group for at, group in unfinished.items() if at not in self.paused]
        self._batching.put_back([g.prompt._replace(first_sample=g.prompt.first_sample + g.samples) for g in back])
        paused = sum(map(len, self.paused.values()))
        return LaunchCounts(self.first.label, self.size, self._dropped, len(back), self.resumed, paused)

    def _seen(self, prompt: Prompt, responses: Sequence[Request]) -> Unfinished:
        return Unfinished(
            prompt,
            tuple(r.generated for r in responses),
            tuple(r.finished for r in responses),
            tuple(self._version - (r.runs[0].version if r.runs else self._version) for r in responses),
        )

    @property
    def accepted(self) -> Set[int] | None:
        return None if self.certain else self._accepted

    def _decided_on(self) -> Iterator[_Group]:
        """Those on which it is to be decided now, of which there is news."""
        news, self._news = self._news, {}
        if self._launcher.decides_together:
            self._settled |= {at: group for at, group in news.items() if self._is_settled(group)}
            if len(self._settled) < len(self._unfinished):
                return iter(())
            news, self._settled = dict(sorted(self._settled.items())), {}
        return iter(news.values())

    def _is_settled(self, group: _Group) -> bool:
        """Whether it is known whether the prompt counts: its responses are there and scored, or can never be."""
        needed = self._feed.responses
        if len(group.finished) + len(group.left) < needed:
            return True
        batch = group.finished[:needed]
        return len(batch) == needed and not (self._batching.needs_rewards and any(not r.scored for r in batch))

    def _decide(self) -> Iterator[Action]:
        needed = self._feed.responses
        for group in self._decided_on():
            enough = len(group.finished) + len(group.left) >= needed
            if group.decided or (enough and len(group.finished) < needed):
                continue
            if group.left:
                yield Surplus(tuple(sorted(group.left)))
                group.left.clear()
            if not self._is_settled(group):
                continue
            batch = group.finished[:needed]
            group.decided = True
            del self._unfinished[group.prompt.position]
            if not enough or not self._batching.counts([request.reward for request in batch]):
                self._dropped += 1
                continue
            self._accepted.update(request.id for request in batch)
            self._accept(batch)
            self._complete += 1
            if self._complete == self._feed.prompts:
                self.over = True
                yield Stop()
                return
        if not self._grows:
            return
        possible = len(self._groups) - self._dropped
        missing = (self._refilled + self._complete if self._refilled else self._feed.prompts) - possible
        if missing > 0:
            launch = self._launcher.more(missing, self._feed)
            if launch is not None:
                if len(self._groups) > ENDLESS * self._feed.prompts:
                    raise PolicyError(
                        f"{len(self._groups)} prompts were launched for a batch of {self._feed.prompts} and "
                        f"{self._dropped} of them dropped for their rewards: no end in sight"
                    )
                yield launch
            elif possible == self._complete:
                self.over = True
                yield Stop()

"""The sequences that a replica decodes together: sequence i of the batch is in slot i of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlsim.calibrate.measure.bench import captured
from rlsim.calibrate.measure.decoder import Decoder


class Batch:
    """One rank's side of a running batch, with room for as many sequences as the cache has slots.

    A sequence's context is its prompt and what it has generated; all but the last token of it are in the cache.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        slots = decoder.cache.slots(decoder.tp)
        self.ids: list[int] = []
        self.tokens = torch.zeros(slots, dtype=torch.long, device=decoder.device)  # the last token of each
        self._contexts = torch.zeros(slots, dtype=torch.long, device=decoder.device)
        self._starts: list[int] = []  # context less the steps made so far: steps change no list
        self._steps = 0
        self._longest = self._sum = 0  # of the starts
        self._graphs: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def contexts(self) -> list[int]:
        return [start + self._steps for start in self._starts]

    @property
    def longest(self) -> int:
        return self._longest + self._steps

    @property
    def context_tokens(self) -> int:
        return self._sum + len(self.ids) * self._steps

    def prefill(self, ids: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Sequences join with these prompts; each has generated its first token afterwards."""
        device, first, last = self.decoder.device, len(self), len(self) + len(ids)
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        lengths = [len(prompt) for prompt in prompts]
        hidden = self.decoder.prefill(flat, lengths, first)
        self.tokens[first:last] = self.decoder.sample(hidden)
        self._enter(ids, [length + 1 for length in lengths])

    def arrive(self, ids: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]) -> None:
        """Sequences join whose KV is in their slots already, with their last tokens."""
        first, last = len(self), len(self) + len(ids)
        self.tokens[first:last] = torch.tensor(tokens, device=self.decoder.device)
        self._enter(ids, contexts)

    def step(self) -> None:
        """One token for every sequence."""
        batch = len(self.ids)
        graph = self._graphs.get(batch)
        if graph is None:
            self._advance(batch)
        else:
            graph.replay()
        self._steps += 1

    def capture(self) -> None:
        """Capture the step of a batch of the present size as a CUDA graph; `step` uses it from now on."""
        batch, state = len(self), (self.tokens.clone(), self._contexts.clone())
        self._graphs[batch] = captured(lambda: self._advance(batch), self.decoder.device)
        self.tokens.copy_(state[0])
        self._contexts.copy_(state[1])

    def rewind(self) -> None:
        """Take the last step back, so that the next one costs exactly the same."""
        self._contexts[: len(self)] -= 1
        self._steps -= 1

    def leave(self, places: Sequence[int]) -> None:
        """Sequences leave; the last ones move into the slots that become free."""
        for place in sorted(places, reverse=True):
            last = len(self) - 1
            if place != last:
                cached = self._starts[last] + self._steps - 1
                self.decoder.cache.copy(self.decoder.tp, last, place, cached)
                self.tokens[place], self._contexts[place] = self.tokens[last], self._contexts[last]
                self.ids[place], self._starts[place] = self.ids[last], self._starts[last]
            self.ids.pop()
            self._starts.pop()
        self._longest, self._sum = max(self._starts, default=0), sum(self._starts)

    def _enter(self, ids: Sequence[int], contexts: Sequence[int]) -> None:
        first, last = len(self), len(self) + len(ids)
        self._contexts[first:last] = torch.tensor(contexts, device=self.decoder.device)
        self.ids += ids
        self._starts += [context - self._steps for context in contexts]
        self._longest, self._sum = max(self._starts, default=0), sum(self._starts)

    def _advance(self, batch: int) -> None:
        tokens, contexts = self.tokens[:batch], self._contexts[:batch]
        hidden = self.decoder.decode(tokens, contexts, self._longest + self._steps)
        tokens.copy_(self.decoder.sample(hidden))
        contexts += 1

"""The sequences that a replica decodes together: sequence i of the batch is in slot i of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlsim.calibrate.measure.bench import captured
from rlsim.calibrate.measure.decoder import Decoder


class Batch:
    """One rank's side of a running batch, with room for as many sequences as the cache has slots.

    `contexts` are the sequences' prompts and what they have generated; all but the last token of each is in the cache.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        slots = decoder.cache.slots(decoder.tp)
        self.ids: list[int] = []
        self.contexts: list[int] = []
        self.tokens = torch.zeros(slots, dtype=torch.long, device=decoder.device)  # the last token of each
        self._contexts = torch.zeros(slots, dtype=torch.long, device=decoder.device)
        self._graphs: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def prefill(self, ids: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Sequences join with these prompts; each has generated its first token afterwards."""
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=self.decoder.device)
        lengths = [len(prompt) for prompt in prompts]
        hidden = self.decoder.prefill(flat, lengths, len(self))
        self._enter(ids, [length + 1 for length in lengths], self.decoder.sample(hidden))

    def arrive(self, ids: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]) -> None:
        """Sequences join whose KV is in their slots already, with their last tokens."""
        self._enter(ids, contexts, torch.tensor(tokens, device=self.decoder.device))

    def step(self) -> None:
        """One token for every sequence."""
        if graph := self._graphs.get(len(self)):
            graph.replay()
        else:
            self._advance()
        self.contexts = [context + 1 for context in self.contexts]

    def capture(self) -> None:
        """Capture the step of a batch of the present size as a CUDA graph; `step` uses it from now on."""
        state = self.tokens.clone(), self._contexts.clone()
        self._graphs[len(self)] = captured(self._advance, self.decoder.device)
        self.tokens.copy_(state[0])
        self._contexts.copy_(state[1])

    def rewind(self) -> None:
        """Take the last step back, so that the next one costs exactly the same."""
        self._contexts[: len(self)] -= 1
        self.contexts = [context - 1 for context in self.contexts]

    def leave(self, places: Sequence[int]) -> None:
        """Sequences leave; the last ones move into the slots that become free."""
        for place in sorted(places, reverse=True):
            number, context = self.ids.pop(), self.contexts.pop()
            last = len(self)
            if place != last:
                self.decoder.cache.copy(self.decoder.tp, last, place, context - 1)
                self.tokens[place], self._contexts[place] = self.tokens[last], self._contexts[last]
                self.ids[place], self.contexts[place] = number, context

    def _enter(self, ids: Sequence[int], contexts: Sequence[int], tokens: torch.Tensor) -> None:
        new = slice(len(self), len(self) + len(ids))
        self.tokens[new] = tokens
        self._contexts[new] = torch.tensor(contexts, device=self.decoder.device)
        self.ids += ids
        self.contexts += contexts

    def _advance(self) -> None:
        tokens, contexts = self.tokens[: len(self)], self._contexts[: len(self)]
        tokens.copy_(self.decoder.sample(self.decoder.decode(tokens, contexts, max(self.contexts))))
        contexts += 1

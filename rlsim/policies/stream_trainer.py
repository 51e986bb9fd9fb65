"""RollPacker's stream trainer: give half of the rollout GPUs to training while the tail still decodes, on-policy.

At milestones of completed responses it asks whether half of the rollout's GPUs can be given up: without splitting a TP
group, and so that the KV cache that the running responses will need still fits on the rest. Their requests move by
recomputation; the freed GPUs accumulate gradients of finished responses. Weights change only when the rollout is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from rlsim.policies.parts import Informed, Rewiring
from rlsim.sim.actions import Release
from rlsim.sim.control import Action, ReplicaView, RolloutReport, RolloutView
from rlsim.workflow.graph import Workflow

_OFFSETS = 48  # moments of the future at which the KV cache is projected
_HISTORY = 8192  # lengths kept of each kind of round


class StreamTrainer(Informed, Rewiring):
    """Overlap rollout and training inside a step."""

    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50), min_length=1
    )
    trigger: Literal["adaptive"] | Annotated[float, Field(gt=0, lt=1)] = "adaptive"
    fetch: Literal["streaming", "once"] = "streaming"
    swap: bool = False
    gradients: Literal["gpu", "host"] = "gpu"
    rounds: tuple[str, ...] = ()

    _history: dict[str, list[int]] = PrivateAttr(default_factory=dict)  # lengths by kind of round
    _next: int = PrivateAttr(default=0)  # milestone to try next; beyond the last once a step has scaled

    def rewired(self, workflow: Workflow) -> Workflow:
        """Responses go on to reward, log-probs and training by the sample; log-probs do not wait for rewards."""
        streamed = workflow.streaming(["generate", "inference", "reward"], ["inference", "reward", "train"])
        away = self.gradients == "host"
        return replace(streamed, fetch_once=self.fetch == "once", swaps=self.swap, host_gradients=away)

    def on_finish(self, view: RolloutView) -> Action | None:
        """At each milestone, once a step: release half of the GPUs if the rest can hold what is running."""
        milestones = self.milestones if self.trigger == "adaptive" else (self.trigger,)
        completed = view.finished / self._context.requests
        if self._next >= len(milestones) or completed < milestones[self._next]:
            return None
        if self.rounds and view.label not in self.rounds:
            return None
        while self._next < len(milestones) and milestones[self._next] <= completed:
            self._next += 1
        replicas = view.replicas()
        held = list(accumulate(len(replica.gpus) for replica in replicas))
        if not held or held[-1] / 2 not in held:
            return None  # half of the GPUs would split a TP group
        half = held.index(held[-1] // 2) + 1
        staying = replicas[:half]
        if self.trigger == "adaptive" and not self._fits(view, replicas, staying):
            return None
        self._next = len(milestones)
        return Release(tuple(replica.index for replica in replicas[half:]))

    def next_tp(self, report: RolloutReport) -> None:
        """The step is over: remember its lengths."""
        lengths = self._history.setdefault(report.label, [])
        lengths += report.lengths
        del lengths[:-_HISTORY]
        self._next = 0

    def _fits(self, view: RolloutView, replicas: Sequence[ReplicaView], staying: Sequence[ReplicaView]) -> bool:
        """Whether the projected peak of the KV cache fits on the replicas that stay; not without a history."""
        same = self._history.get(view.label)  # the first round of a kind has only the others to go by
        history = np.sort(same or [length for lengths in self._history.values() for length in lengths])
        if not len(history):
            return False
        capacity = sum(self._context.kv_tokens(r.tp) for r in staying)
        running = [(r.prompt_tokens, r.generated_tokens) for replica in replicas for r in replica.requests]
        if not running:
            return False  # all is generated, and rewards decide what else is
        prompts, done = np.array(running, dtype=np.float64).T
        return projected_kv_tokens(history, prompts, done, view.cap_tokens) <= capacity


def projected_kv_tokens(history: np.ndarray, prompts: np.ndarray, done: np.ndarray, cap_tokens: int) -> float:
    """Peak, over the future, of the expected KV tokens of running responses.

    `history`: sorted lengths of past responses; `prompts`, `done`: prompt and generated tokens of each running one.
    After s more steps a response with g tokens is still there with probability S(g + s) / S(g), S being the share of
    past responses that were longer, and then holds prompt + g + s tokens. One beyond all of history stays to the cap.
    """

    def longer(tokens: np.ndarray) -> np.ndarray:
        return len(history) - np.searchsorted(history, tokens, side="right")

    now = longer(done)
    known = now > 0
    ahead = np.unique(np.rint(np.geomspace(1, cap_tokens, _OFFSETS)) - 1)[:, None]
    left = np.where(known, longer(done + ahead) / np.where(known, now, 1), 1.0)
    held = prompts + np.minimum(done + ahead, cap_tokens)
    return float((left * held * (done + ahead <= cap_tokens)).sum(axis=1).max(initial=0.0))

"""A system: the parts that one run is made of, each in its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from rlsim.errors import ConfigError, RlsimError
from rlsim.policies.parts import ChunkStreaming, JudgePlacement, Part, Placing, Rewiring, flattened
from rlsim.sim.batching import Batching, Batchings
from rlsim.sim.control import PLANNED, ControlContext, Controls, RolloutControl, asked
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import Workflow

_Kind = TypeVar("_Kind")


def is_layout(part: object) -> bool:
    """Whether the part says which layout a rollout starts with."""
    return isinstance(part, RolloutControl) and type(part).initial_tp is not RolloutControl.initial_tp


@dataclass(frozen=True, eq=False)
class System:
    """The decisions of one system. Make one with `of`."""

    layout: RolloutControl
    control: RolloutControl  # the layout's and all others' together
    batching: Batching
    reward: RewardControl
    rewirings: tuple[Rewiring, ...]
    judge: JudgePlacement | None  # None: GPUs are kept for it
    placing: Placing | None  # None: all calls share all GPUs
    streaming: ChunkStreaming | None = None  # None: nothing is handed over by the chunk

    @classmethod
    def of(cls, parts: Iterable[Part], shown: str = "") -> System:
        """The system of these parts; raises `ConfigError` if two of them decide the same thing, or none the layout."""
        every = list(flattened(parts))
        layouts: list[Part] = [part for part in every if is_layout(part)]
        if len(layouts) != 1:
            what = "none of its parts decides" if not layouts else f"{_names(layouts)} all decide"
            raise ConfigError(f"{shown}: {what} the layout that a rollout starts with; exactly one does")
        controls, batchings = _of_kind(every, RolloutControl), _of_kind(every, Batching)
        rewards, judges = _of_kind(every, RewardControl), _of_kind(every, JudgePlacement)
        placings, streams = _of_kind(every, Placing), _of_kind(every, ChunkStreaming)
        launching = [part for part in batchings if part.launches_its_own]
        for deciding, what in (
            (launching, "what to launch"),
            (rewards, "timeouts"),
            (judges, "where the judge runs"),
            (placings, "where the calls run"),
            (streams, "the chunks of responses"),
        ):
            if len(deciding) > 1:
                raise ConfigError(f"{shown}: {_names(deciding)} all decide {what}; at most one may")
        batchings.sort(key=lambda part: part not in launching)
        deciding = [part for part in batchings if part.needs_rewards]
        if deciding and batchings[0].ends_early:
            raise ConfigError(
                f"{shown}: {_names(batchings[:1])} trains on the prompts that are complete when generation ends, and "
                f"{_names(deciding)} drops prompts by rewards that need not be there by then; they cannot go together"
            )
        layout = layouts[0]
        assert isinstance(layout, RolloutControl)
        return cls(
            layout,
            controls[0] if len(controls) == 1 else Controls(controls),
            batchings[0] if len(batchings) == 1 else Batchings(batchings) if batchings else Batching(),
            rewards[0] if rewards else RewardControl(),
            tuple(_of_kind(every, Rewiring)),
            judges[0] if judges else None,
            placings[0] if placings else None,
            streams[0] if streams else None,
        )

    def initial_tp(self, context: ControlContext) -> int:
        """GPUs of a replica at the start of the run.

        Raises `ConfigError` if the plan says that too, and the layout contradicts it or would change it later;
        `CapacityError` if the model does not fit.
        """
        changes = asked(self.layout, "on_finish", "on_timer", "next_tp")
        if changes and context.replica_gpus is not None:
            name = type(self.layout).__name__
            raise ConfigError(f"{PLANNED.format(context.replica_gpus)}; {name} changes that while it runs")
        tp = self.layout.initial_tp(context)
        try:
            return context.check_tp(tp)
        except RlsimError as error:
            raise type(error)(f"{type(self.layout).__name__}.initial_tp: {error}") from error

    def rewired(self, workflow: Workflow) -> Workflow:
        for part in self.rewirings:
            workflow = part.rewired(workflow)
        return workflow


def _of_kind(parts: Iterable[object], kind: type[_Kind]) -> list[_Kind]:
    return [part for part in parts if isinstance(part, kind)]


def _names(parts: Iterable[object]) -> str:
    return " and ".join(type(part).__name__ for part in parts)

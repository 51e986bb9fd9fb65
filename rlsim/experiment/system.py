"""A system: the parts that one run is made of, each in its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlsim.errors import ConfigError
from rlsim.policies.parts import ChunkStreaming, JudgePlacement, Part, Placing, Rewiring, flattened
from rlsim.policies.plan import AsPlanned
from rlsim.policies.verl import VeRL
from rlsim.sim.batching import Batching, Batchings
from rlsim.sim.control import ControlContext, Controls, RolloutControl
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import Workflow


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
        placings = [part for part in every if isinstance(part, Placing)]
        if placings and not layouts:
            layouts = [AsPlanned()]
            every += layouts
        if len(layouts) != 1:
            what = "none of its parts decides" if not layouts else f"{_names(layouts)} all decide"
            raise ConfigError(f"{shown}: {what} the layout that a rollout starts with; exactly one does")
        controls = [part for part in every if isinstance(part, RolloutControl)]
        batchings = [part for part in every if isinstance(part, Batching)]
        rewards = [part for part in every if isinstance(part, RewardControl)]
        judges = [part for part in every if isinstance(part, JudgePlacement)]
        streams = [part for part in every if isinstance(part, ChunkStreaming)]
        launching = [part for part in batchings if type(part).launch is not Batching.launch]
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
        layout = layouts[0]
        assert isinstance(layout, RolloutControl)
        return cls(
            layout,
            controls[0] if len(controls) == 1 else Controls(controls),
            batchings[0] if len(batchings) == 1 else Batchings(batchings) if batchings else Batching(),
            rewards[0] if rewards else RewardControl(),
            tuple(part for part in every if isinstance(part, Rewiring)),
            judges[0] if judges else None,
            placings[0] if placings else None,
            streams[0] if streams else None,
        )

    def check_layout(self, context: ControlContext) -> None:
        """Raises `ConfigError` if the plan says how generation uses its GPUs, and a part of the system does too."""
        open_ = isinstance(self.layout, AsPlanned) or (isinstance(self.layout, VeRL) and self.layout.tp == "best")
        if context.replica_gpus is not None and not open_:
            raise ConfigError(
                f"the plan says how generation uses its GPUs (replicas of {context.replica_gpus}), and so does "
                f"{type(self.layout).__name__}; leave tp out of the plan's generation, or the layout out of the system"
            )

    def rewired(self, workflow: Workflow) -> Workflow:
        """The workflow as all parts want it."""
        for part in self.rewirings:
            workflow = part.rewired(workflow)
        return workflow


def _names(parts: Iterable[object]) -> str:
    return " and ".join(type(part).__name__ for part in parts)

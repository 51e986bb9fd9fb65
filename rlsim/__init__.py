"""Discrete-event cluster simulator for long-tail RLHF scheduling research.

    import rlsim
    result = rlsim.run("pat_vs_static")
    result.summary()      # one row per system, a pandas frame
    result.steps          # every step of every run

Names are loaded when they are first used, so that `import rlsim` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsim.version import __version__

if TYPE_CHECKING:
    from rlsim.comparison.compare import Comparison as Comparison
    from rlsim.comparison.compare import compare as compare
    from rlsim.errors import RlsimError as RlsimError
    from rlsim.experiment.result import Result as Result
    from rlsim.experiment.result import read_result as read_result
    from rlsim.experiment.run import run as run
    from rlsim.policies.parts import Composition as Composition
    from rlsim.policies.parts import Rewiring as Rewiring
    from rlsim.report.timeline import write_timeline as write_timeline
    from rlsim.report.write import write_report as write_report
    from rlsim.schema import Schema as Schema
    from rlsim.sim.batching import Batching as Batching
    from rlsim.sim.continuous import Continuous as Continuous
    from rlsim.sim.continuous import OpenView as OpenView
    from rlsim.sim.continuous import Ready as Ready
    from rlsim.sim.continuous import Update as Update
    from rlsim.sim.control import Abort as Abort
    from rlsim.sim.control import Borrow as Borrow
    from rlsim.sim.control import ControlContext as ControlContext
    from rlsim.sim.control import Extend as Extend
    from rlsim.sim.control import Launch as Launch
    from rlsim.sim.control import Migrate as Migrate
    from rlsim.sim.control import Prompt as Prompt
    from rlsim.sim.control import Reconfigure as Reconfigure
    from rlsim.sim.control import Release as Release
    from rlsim.sim.control import RolloutControl as RolloutControl
    from rlsim.sim.control import RolloutView as RolloutView
    from rlsim.sim.control import Stop as Stop
    from rlsim.sim.reward import RewardControl as RewardControl
    from rlsim.sweeps.read import SweepResult as SweepResult
    from rlsim.sweeps.read import read_sweep as read_sweep
    from rlsim.sweeps.run import sweep as sweep

_CONTROL = (
    "Abort",
    "Borrow",
    "ControlContext",
    "Extend",
    "Launch",
    "Migrate",
    "Prompt",
    "Reconfigure",
    "Release",
    "RolloutControl",
    "RolloutView",
    "Stop",
)
_CONTINUOUS = ("Continuous", "OpenView", "Ready", "Update")
_HOME = {
    "Batching": "rlsim.sim.batching",
    "Comparison": "rlsim.comparison.compare",
    "Composition": "rlsim.policies.parts",
    "Result": "rlsim.experiment.result",
    "RewardControl": "rlsim.sim.reward",
    "Rewiring": "rlsim.policies.parts",
    "RlsimError": "rlsim.errors",
    "Schema": "rlsim.schema",
    "SweepResult": "rlsim.sweeps.read",
    "compare": "rlsim.comparison.compare",
    "read_result": "rlsim.experiment.result",
    "read_sweep": "rlsim.sweeps.read",
    "run": "rlsim.experiment.run",
    "sweep": "rlsim.sweeps.run",
    "write_report": "rlsim.report.write",
    "write_timeline": "rlsim.report.timeline",
    **dict.fromkeys(_CONTROL, "rlsim.sim.control"),
    **dict.fromkeys(_CONTINUOUS, "rlsim.sim.continuous"),
}
__all__ = [
    "Abort",
    "Batching",
    "Borrow",
    "Comparison",
    "Composition",
    "Continuous",
    "ControlContext",
    "Extend",
    "Launch",
    "Migrate",
    "OpenView",
    "Prompt",
    "Ready",
    "Reconfigure",
    "Release",
    "Result",
    "RewardControl",
    "Rewiring",
    "RlsimError",
    "RolloutControl",
    "RolloutView",
    "Schema",
    "Stop",
    "SweepResult",
    "Update",
    "__version__",
    "compare",
    "read_result",
    "read_sweep",
    "run",
    "sweep",
    "write_report",
    "write_timeline",
]


def __getattr__(name: str) -> object:
    """Load a public name from where it lives."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rlsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

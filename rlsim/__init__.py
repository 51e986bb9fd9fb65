"""Discrete-event cluster simulator for long-tail RLHF scheduling research.

    import rlsim
    result = rlsim.run("pat_vs_static")
    result.summary()      # one row per system, a pandas frame
    result.steps          # every step of every run

Names are loaded when they are first used, so that `import rlsim` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsim.base.version import __version__

if TYPE_CHECKING:
    from rlsim.base.schema import Schema as Schema
    from rlsim.cost.transfer import SwitchWay as SwitchWay
    from rlsim.errors import RlsimError as RlsimError
    from rlsim.experiment.result import Result as Result
    from rlsim.experiment.result import read_result as read_result
    from rlsim.experiment.run import run as run
    from rlsim.experiment.testing import Checked as Checked
    from rlsim.experiment.testing import ContractError as ContractError
    from rlsim.experiment.testing import check_policy as check_policy
    from rlsim.policies.parts import Composition as Composition
    from rlsim.policies.parts import Rewiring as Rewiring
    from rlsim.results.comparison.compare import Comparison as Comparison
    from rlsim.results.comparison.compare import compare as compare
    from rlsim.results.report.timeline import write_timeline as write_timeline
    from rlsim.results.report.write import write_report as write_report
    from rlsim.results.sweeps.run import sweep as sweep
    from rlsim.results.sweeps.store import SweepResult as SweepResult
    from rlsim.results.sweeps.store import read_sweep as read_sweep
    from rlsim.sim.actions import Abort as Abort
    from rlsim.sim.actions import Borrow as Borrow
    from rlsim.sim.actions import Extend as Extend
    from rlsim.sim.actions import Migrate as Migrate
    from rlsim.sim.actions import Reconfigure as Reconfigure
    from rlsim.sim.actions import Release as Release
    from rlsim.sim.actions import Stop as Stop
    from rlsim.sim.batching import Batching as Batching
    from rlsim.sim.continuous import Continuous as Continuous
    from rlsim.sim.continuous import OpenView as OpenView
    from rlsim.sim.continuous import Ready as Ready
    from rlsim.sim.continuous import Update as Update
    from rlsim.sim.control import ControlContext as ControlContext
    from rlsim.sim.control import Launch as Launch
    from rlsim.sim.control import Prompt as Prompt
    from rlsim.sim.control import RolloutControl as RolloutControl
    from rlsim.sim.control import RolloutView as RolloutView
    from rlsim.sim.reward import RewardControl as RewardControl

#: The names that `rlsim` has, by the module that each lives in.
_NAMES = {
    "rlsim.base.schema": ("Schema",),
    "rlsim.cost.transfer": ("SwitchWay",),
    "rlsim.errors": ("RlsimError",),
    "rlsim.experiment.result": ("Result", "read_result"),
    "rlsim.experiment.run": ("run",),
    "rlsim.experiment.testing": ("Checked", "ContractError", "check_policy"),
    "rlsim.policies.parts": ("Composition", "Rewiring"),
    "rlsim.results.comparison.compare": ("Comparison", "compare"),
    "rlsim.results.report.timeline": ("write_timeline",),
    "rlsim.results.report.write": ("write_report",),
    "rlsim.results.sweeps.store": ("SweepResult", "read_sweep"),
    "rlsim.results.sweeps.run": ("sweep",),
    "rlsim.sim.actions": ("Abort", "Borrow", "Extend", "Migrate", "Reconfigure", "Release", "Stop"),
    "rlsim.sim.batching": ("Batching",),
    "rlsim.sim.continuous": ("Continuous", "OpenView", "Ready", "Update"),
    "rlsim.sim.control": ("ControlContext", "Launch", "Prompt", "RolloutControl", "RolloutView"),
    "rlsim.sim.reward": ("RewardControl",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    """Load a public name from where it lives."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rlsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

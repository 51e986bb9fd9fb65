"""An algorithm and a placement come in; calls, the edges between them, and the GPUs of each go out.

Workflows are graphs of model function calls, plans say which GPUs run each call and how; `search` finds plans.
"""

from rlsim.workflow.algorithms import dpo, grpo, online_dpo, ppo, remax
from rlsim.workflow.graph import Call, Edge, Grain, Workflow
from rlsim.workflow.plan import Placement, Plan, colocated

__all__ = [
    "Call",
    "Edge",
    "Grain",
    "Placement",
    "Plan",
    "Workflow",
    "colocated",
    "dpo",
    "grpo",
    "online_dpo",
    "ppo",
    "remax",
]

"""Workflows (graphs of model function calls) and plans (which GPUs run each call, and how)."""

from rlsim.workflow.algorithms import dpo, grpo, ppo, remax
from rlsim.workflow.graph import Call, Edge, Grain, Workflow
from rlsim.workflow.plan import Placement, Plan, colocated

__all__ = ["Call", "Edge", "Grain", "Placement", "Plan", "Workflow", "colocated", "dpo", "grpo", "ppo", "remax"]

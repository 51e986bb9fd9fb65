"""Search for execution plans: which GPUs and which strategy each call of an RLHF iteration gets.

Knows arrays only: who makes the options and costs of calls from models and clusters, builds a `Problem` from them.
"""

from rlsim.workflow.search.methods import find_best
from rlsim.workflow.search.problem import Dependency, Options, Problem, Reallocation
from rlsim.workflow.search.progress import Budget, Found, Improvement

__all__ = [
    "Budget",
    "Dependency",
    "Found",
    "Improvement",
    "Options",
    "Problem",
    "Reallocation",
    "find_best",
]

"""Where searches start: for each call the option that is fastest alone, changed until all of them fit together."""

from __future__ import annotations

import numpy as np

from rlsim.errors import CapacityError
from rlsim.workflow.search.problem import Problem
from rlsim.workflow.search.scheduling import Floats, Ints


def greedy(problem: Problem) -> Ints:
    """The fastest option of each call (C,) among those that fit into a GPU's memory with nothing beside them.

    Transfers and reallocations are not looked at, and together the calls need not fit. Raises `CapacityError` if a call
    has no option that fits alone.
    """
    plan = []
    for options in problem.options:
        bytes_needed = options.resident_bytes + options.active_bytes
        fits = bytes_needed <= problem.memory_bytes
        if not fits.any():
            raise CapacityError(
                f"the call {options.call} has no option that fits: the smallest needs {bytes_needed.min() / 2**30:.1f}"
                f" GiB on each of its GPUs, which have {problem.memory_bytes / 2**30:.1f} GiB"
            )
        plan.append(int(np.where(fits, options.time_s, np.inf).argmin()))
    return np.array(plan, dtype=np.int64)


def start(problem: Problem) -> Ints:
    """The greedy plan (C,), and where that does not fit, the nearest plan that does.

    While GPUs are too full, one call takes another option: the one that leaves the least bytes too many, and of equal
    ones the fastest alone. From plans that do not fit a search would seldom get away, as a penalty on all plans nearby
    says little about the way out. Ends at a plan that does not fit if no single change takes bytes away. Raises
    `CapacityError` as `greedy`.
    """
    plan = greedy(problem)
    excess = _excess_bytes(problem, plan[None])[0]
    while excess > 0:
        moves = [_least_excess(problem, plan, call) for call in range(len(plan))]
        left, _, _, moved = min(moves, key=lambda move: move[:3])
        if left >= excess:
            break
        plan, excess = moved, left
    return plan


def _excess_bytes(problem: Problem, plans: Ints) -> Floats:
    """Bytes beyond a GPU's memory, summed over the first GPUs of the meshes, (n, C) -> (n,)."""
    excess: Floats = np.maximum(problem.loads_bytes(plans) - problem.memory_bytes, 0.0).sum(axis=1)
    return excess


def _least_excess(problem: Problem, plan: Ints, call: int) -> tuple[float, float, int, Ints]:
    """The change of one call that leaves the least bytes too many: these, seconds added, the call, and the plan."""
    options = problem.options[call]
    others = np.repeat(plan[None], len(options), axis=0)
    others[:, call] = options.by_time
    left = _excess_bytes(problem, others)
    at = int(left.argmin())
    added_s = options.time_s[others[at, call]] - options.time_s[plan[call]]
    return float(left[at]), float(added_s), call, others[at]

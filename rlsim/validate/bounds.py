"""How large errors may be: the targets rlsim sets itself, and what holds where one is missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from rlsim.validate.rows import Summary

Statistic = Literal["mean", "median", "p90"]


@dataclass(frozen=True)
class Bound:
    """An upper limit of a statistic of the absolute errors of one group and quantity (shell patterns).

    `missed`: the target that the limit stands in for, and why.
    """

    part: str
    group: str
    quantity: str
    statistic: Statistic
    limit: float
    missed: str = ""
    kind: str = "*"

    def holds_for(self, summary: Summary) -> bool:
        """Whether this bound is about that summary."""
        return (
            summary.part == self.part
            and fnmatch(summary.group, self.group)
            and fnmatch(summary.quantity, self.quantity)
            and fnmatch(summary.kind, self.kind)
        )


#: The first that matches counts, for each statistic.
BOUNDS: tuple[Bound, ...] = (
    # Kernels on Hopper: median 5%, 90th percentile 15%.
    Bound("kernels", "h[12]00-*-trtllm", "decode_attention_s", "p90", 0.175, "15%: rows served from L2 in part"),
    Bound("kernels", "h[12]00-*-trtllm", "decode_attention_s", "median", 0.055, "5%: rows served from L2 in part"),
    Bound("kernels", "h[12]00-*", "custom_all_reduce_s", "p90", 0.235, "15%: jumps between algorithms"),
    Bound("kernels", "h[12]00-*", "custom_all_reduce_s", "median", 0.06, "5%: jumps between algorithms"),
    Bound("kernels", "h[12]00-*", "*", "median", 0.05),
    Bound("kernels", "h[12]00-*", "*", "p90", 0.15),
    # Elsewhere there is no target; errors must not grow.
    Bound("kernels", "*", "*", "median", 0.065),
    Bound("kernels", "*", "*", "p90", 0.26),
)


def checked(
    summaries: Iterable[Summary], bounds: Iterable[Bound] = BOUNDS
) -> Iterator[tuple[Summary, Bound, float, bool]]:
    """Every summary with each of its bounds, the statistic's value, and whether it is within."""
    known = tuple(bounds)
    for summary in summaries:
        seen: set[Statistic] = set()
        for bound in known:
            if bound.statistic not in seen and bound.holds_for(summary):
                seen.add(bound.statistic)
                value: float = getattr(summary, bound.statistic)
                yield summary, bound, value, value <= bound.limit

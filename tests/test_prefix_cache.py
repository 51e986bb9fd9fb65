"""Prefix caching: the engine against the token-by-token reference, by hand, and what it saves."""

from __future__ import annotations

from hypothesis import given, settings
from test_engine import check, relaxed
from workloads import Workload, workloads


@settings(relaxed, max_examples=100)
@given(workloads(prefixes=True))
def test_engine_equals_stepping(work: Workload) -> None:
    check(work)

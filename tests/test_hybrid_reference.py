"""Training GPUs that generate, in the engine against the token-by-token reference, on random runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hybrid_workloads import HybridWorkload, hybrid_workloads
from open_workloads import CLOCKS, EXTENSIONS, Clock, Extension
from test_open_reference import compare, relaxed


@settings(relaxed, max_examples=200)
@given(st.sampled_from(CLOCKS).flatmap(hybrid_workloads))
def test_the_engine_equals_the_reference_where_the_trainer_generates(work: HybridWorkload) -> None:
    compare(work)


@pytest.mark.slow
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_engine_equals_the_reference_on_many_runs_with(extension: Extension, clock: Clock) -> None:
    given(hybrid_workloads(clock, extension))(settings(relaxed, max_examples=1000)(compare))()

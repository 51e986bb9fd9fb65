"""Timelines worked out by hand that pin the token-by-token reference, and the engine with it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from conftest import tables
from reference import RefEngine, RefRequest
from test_engine import check, simulate
from workloads import At, LinearStep, Nothing, StubCosts, Workload

from rlsim.cost.transfer import HostKv
from rlsim.errors import PolicyError
from rlsim.sim import actions, control

ONE_GPU = LinearStep(a=1.0, b=1 / 4, t=1 / 64, p=1 / 8)
COSTS = StubCosts(
    steps={1: ONE_GPU, 2: replace(ONE_GPU, scale=0.5, tp=2)},
    pages={1: 1000, 2: 1000},
    weights_s=1.0,  # divided by the new TP
    capture_s=0.25,
    kv_per_token_s=1 / 8,  # divided by the old TP
    first_use_s=2.0,
    transfer_base_s=0.25,
    transfer_per_token_s=1 / 8,
    other_node=3.0,
)
#: Moments at which the first of two, or of three, requests is finished, and the next boundary of the other replica.
NAMES = {**vars(control), **vars(actions), "replace": replace, "COSTS": COSTS, "ONE_GPU": ONE_GPU}
NAMES |= {"SECOND": LinearStep(a=1.0, conditional=True)}
NAMES |= {"T0": 2.75 + 5 / 64, "T1": 3.25 + 9 / 64, "M0": 3.5 + 10 / 64, "M1": 4.5 + 19 / 64}


def capacity(pages: int, tp: int = 1) -> StubCosts:
    return replace(COSTS, pages={**COSTS.pages, tp: pages})


def by_hand(row: dict[str, Any]) -> Workload:
    """A row of cases/timelines.yaml as a rollout."""
    costs = eval(row["costs"], NAMES) if "costs" in row else capacity(row.get("pages", 1000))
    costs = replace(costs, hosts={1: HostKv(*row["host"])} if "host" in row else {})
    budget = row.get("budget", 0)
    of_all = {"budget_tokens": budget, "predicted_tokens": row.get("predicted", 0.0)}
    placed = zip(row.get("positions", itertools.count()), row["sizes"], strict=False)
    return Workload(
        requests=tuple(RefRequest(i, at, *size, **of_all) for i, (at, size) in enumerate(placed)),
        node_gpus=tuple(row.get("nodes", (row.get("gpus", 1),))),
        tp=row.get("tp", 1),
        costs=costs,
        engine=RefEngine(**{"max_num_seqs": 100, "max_num_batched_tokens": 1000, **row.get("engine", {})}),
        cap_tokens=1000,
        control=At(eval(row["at"], NAMES)) if "at" in row else Nothing(),
        routing=row.get("routing", "contiguous"),
        micro_batches=row.get("micro_batches", 1),
        budget_tokens=budget,
    )


@pytest.mark.parametrize("name", tables("timelines"))
def test_a_timeline_by_hand(name: str) -> None:
    row, names = tables("timelines")[name], dict(NAMES)
    for key, value in row.get("let", {}).items():
        names[key] = eval(str(value), names)
    work = by_hand(row)
    result = work.simulate()
    found = {
        **vars(result),
        "kinds": [kind for *_, kind in result.iterations],
        "switched": [(switch.begun_at, switch.cost.total_s) for switch in result.switches],
        "control_s": [switch.cost.control_s for switch in result.switches],
        "seen": work.control.seen[0] if isinstance(work.control, At) and work.control.seen else None,
    }
    for key, value in row["is"].items():
        assert found[key] == eval(str(value), names), key
    if row.get("refused"):
        with pytest.raises(PolicyError):
            simulate(work)
    else:
        check(work)


def test_what_fits_no_empty_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="request 1 does not fit"):
        by_hand({"sizes": [[4, 4], [4, 9]], "pages": 12}).simulate()

"""PAT and veRL on real machines of the catalogue."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from conftest import placed_of, tables
from workloads import StubCosts, rolled_out

import rlsim
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.placed import PlacedExperiment
from rlsim.policies.pat import PAT
from rlsim.policies.planner import Planner
from rlsim.policies.verl import VeRL
from rlsim.sim.control import ControlContext, RolloutControl
from rlsim.sim.request import Request
from rlsim.sim.rollout import Rollout

PROMPT = 200
MACHINES = [("8xh100", "h100-vllm"), ("8xa40", "a40-sglang"), ("8xl40s", "l40s-vllm")]
both = pytest.mark.parametrize(("cluster", "calibration"), MACHINES)


@cache
def machine(cluster: str, calibration: str) -> PlacedExperiment:
    """LLaMA-3.1-8B, 128 responses a step, training states in host memory."""
    own = {"cluster": cluster, "calibration": calibration}
    return placed_of({**tables("bases")["policies"], **own})


def context(
    placed: PlacedExperiment, requests: int, cap: int = 16384, node_gpus: tuple[int, ...] = (8,), costs: Any = None
) -> ControlContext:
    known = dataclasses.replace(placed.context, requests=requests, prompt_tokens=PROMPT, cap_tokens=cap)
    return dataclasses.replace(known, node_gpus=node_gpus, costs=known.costs if costs is None else costs)


def generate(control: RolloutControl, known: ControlContext, lengths: Sequence[int], samples: int = 8) -> Rollout:
    """One generation stage under a control."""
    control.setup(known)
    ends = itertools.accumulate(known.node_gpus)
    mesh = [tuple(range(end - gpus, end)) for end, gpus in zip(ends, known.node_gpus, strict=True)]
    requests = [Request(i, i // samples, PROMPT, int(length)) for i, length in enumerate(lengths)]
    tp, cap = control.initial_tp(known), known.cap_tokens
    return rolled_out(requests, known.costs, control, mesh=mesh, tp=tp, cap_tokens=cap)


def long_tail(count: int, cap: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(cap / 12), 1.1, count)
    return [int(x) for x in np.clip(drawn, 1, cap)]


# ------------------------------------------------------------------------------------------------------------ PAT


@both
@pytest.mark.parametrize(("requests", "length", "cap"), [(32, 4096, 4096), (128, 4096, 4096), (101, 500, 16384)])
def test_pat_does_nothing_where_all_are_equally_long(
    cluster: str, calibration: str, requests: int, length: int, cap: int
) -> None:
    """At the limit or short of it: replicas of unequal share finish one after the other, no tail to switch for."""
    known = context(machine(cluster, calibration), requests, cap)
    pat = generate(PAT(), known, [length] * requests)
    assert pat.switches == []
    static = generate(VeRL(tp=start_of_pat(known)), known, [length] * requests)
    assert pat.env.now == static.env.now


def start_of_pat(known: ControlContext) -> int:
    """The layout that PAT begins with."""
    pat = PAT()
    pat.setup(known)
    return pat.initial_tp(known)


@both
@pytest.mark.parametrize(("requests", "cap"), [(32, 16384), (128, 4096), (250, 16384)])
def test_pat_loses_no_more_than_its_switches_cost(cluster: str, calibration: str, requests: int, cap: int) -> None:
    known = context(machine(cluster, calibration), requests, cap)
    for seed in range(2):
        lengths = long_tail(requests, cap, seed)
        pat = generate(PAT(redispatch=False), known, lengths)
        static = generate(VeRL(tp=start_of_pat(known)), known, lengths)
        spent_s = sum(cost.total_s for *_, cost in pat.switches)
        assert pat.env.now <= static.env.now + spent_s + 1e-9


def test_pat_deals_responses_anew_between_nodes_of_two_replicas() -> None:
    """On 2 x 8 A40 it stays at TP4, where the lengths of a node's two replicas differ: TP8 has no such loss."""
    name = "2x8xa40"
    found = rlsim.run(
        {
            "name": name, "cluster": name, "model": "llama-3.1-8b", "calibration": "a40-sglang",
            "trace": {"path": "deepscaler-llama-3.1-8b", "cap": "8K"}, "training": {"backend": "fsdp", "offload": True},
            "workflow": {"prompts": 16, "responses": 8, "steps": 2}, "seeds": 2, "certainty": 0, "baseline": "verl",
            "systems": [{"verl": {"tp": 8}}, {"name": "even", "use": [{"pat": {"redispatch": False}}]}, "pat"],
        }
    )  # fmt: skip
    speedup = found.summary().set_index("system")["speedup"]
    assert speedup["even"] < 1 < 1.03 < speedup["pat"]
    moved = found.steps.groupby("system")["moved"].sum()
    assert moved["pat"] > 0 == moved["even"] == moved["verl"]
    said = [note for note in found.notes if "never acted" in note]
    assert said == ["even never acted: its controls switched, moved, released and aborted nothing in any step"]


def test_pat_gains_on_a_long_tail() -> None:
    known = context(machine("8xa40", "a40-sglang"), 128)
    lengths = long_tail(128, 16384, 0)
    pat, static = generate(PAT(), known, lengths), generate(VeRL(tp=start_of_pat(known)), known, lengths)
    assert [tp for _, _, _, tp, _ in pat.switches][-1] > start_of_pat(known)
    assert pat.env.now < 0.9 * static.env.now


@pytest.mark.parametrize("node_gpus", [(8, 8), (4, 8)])
def test_each_node_decides_on_its_own(node_gpus: tuple[int, int]) -> None:
    """Two nodes do what each does alone with its share of the batch, at its own moments."""
    placed = machine("8xa40", "a40-sglang")
    pat = partial(PAT, start_tp=2, candidates=[tp for tp in (1, 2, 4, 8) if math.gcd(*node_gpus) % tp == 0])
    shares = [long_tail(16 * gpus, cap, cap) for gpus, cap in zip(node_gpus, (16384, 9000), strict=True)]
    both_nodes = generate(pat(), context(placed, 16 * sum(node_gpus), node_gpus=node_gpus), [*shares[0], *shares[1]])
    when = []
    for node, (gpus, share) in enumerate(zip(node_gpus, shares, strict=True)):
        alone = generate(pat(), context(placed, len(share), node_gpus=(gpus,)), share)
        mine = [(at, a, b) for at, n, a, b, _ in both_nodes.switches if n == node]
        assert mine == [(pytest.approx(at, rel=1e-9), a, b) for at, _, a, b, _ in alone.switches]
        first = node * len(shares[0])
        finished = [r.finished_at for r in both_nodes.requests[first : first + len(share)]]
        assert finished == pytest.approx([r.finished_at for r in alone.requests], rel=1e-9)
        when += mine
    assert len({at for at, _, _ in when}) == len(when) >= 2


@both
@pytest.mark.parametrize("tp", [2, 8])
def test_the_predictor_follows_a_real_trajectory(cluster: str, calibration: str, tp: int) -> None:
    """Given the lengths that it never sees, PAT's predictor comes close to the engine (published: 4.04% and 3.07%)."""
    lengths = [max(length, 2) for length in long_tail(32, 4096, 5)]
    # A node of one replica, so that the dealing of requests plays no part.
    known = context(machine(cluster, calibration), len(lengths), cap=4096, node_gpus=(tp,))
    rollout = generate(VeRL(tp=tp), known, lengths)
    began = max(r.first_token_at for r in rollout.requests)
    pat = PAT(candidates=(tp,))
    pat.setup(known)
    batch = np.array([(left, PROMPT + 1.0, 1) for left in sorted((length - 1 for length in lengths), reverse=True)])
    predicted_s = pat._remaining_s(tp, tp, batch, ())
    error = predicted_s / (rollout.env.now - began) - 1
    assert abs(error) < 0.03


# -------------------------------------------------------------------------------------------------------- planner


@pytest.mark.parametrize(("tp", "requests", "kv_share"), [(1, 128, 1.0), (8, 512, 1.0), (2, 512, 0.1), (8, 512, 0.1)])
def test_the_planner_predicts_a_round_from_its_loads(tp: int, requests: int, kv_share: float) -> None:
    """Beside the engine on the same lengths; where the KV cache is short, it does not know what is recomputed.

    Nor does it know who shares a prompt: here nobody does.
    """
    placed = machine("8xh100", "h100-vllm")
    lengths = long_tail(requests, 16384, 0)
    pages = {n: int(kv_share * placed.rollout_costs.capacity_pages(n)) for n in (1, 2, 4, 8)}

    class Less(StubCosts):
        def step(self, tp: int) -> Any:
            return placed.rollout_costs.step(tp)

    known = context(placed, requests, costs=Less({}, pages))
    plans = Planner(start_tp=tp)
    plans.setup(known)
    rollout = generate(VeRL(tp=tp), known, lengths, samples=1)
    preempted = sum(replica.scheduler.preemptions for replica in rollout.replicas) > 0
    assert preempted == (kv_share < 1.0 and tp < 8)
    predicted_s = plans.round_s(tp, [(PROMPT, int(length)) for length in lengths])
    assert predicted_s == pytest.approx(rollout.env.now, rel=0.25 if preempted else 0.08)


# ----------------------------------------------------------------------------------------------------------- veRL


def test_verl_best_stands_for_every_degree_that_fits() -> None:
    known = context(machine("8xh100", "h100-vllm"), 64)
    assert VeRL().alternatives(known) == [{"tp": tp} for tp in known.feasible_tps]
    assert VeRL(tp=2).alternatives(known) == ()
    with pytest.raises(ConfigError, match="best must be resolved"):
        VeRL().initial_tp(known)
    with pytest.raises(ConfigError, match="does not divide"):
        VeRL(tp=0).initial_tp(known)
    small = dataclasses.replace(known, feasible_tps=(4, 8), infeasible={1: "too big", 2: "too big"})
    for told in (VeRL(tp=1), PAT(start_tp=2)):
        with pytest.raises(CapacityError, match="too big"):
            told.initial_tp(small)
    with pytest.raises(ConfigError, match="tp 3 does not divide"):
        PAT(start_tp=3).initial_tp(known)
    none = PAT(candidates=(1, 2))
    none.setup(small)
    with pytest.raises(CapacityError, match="none of the candidates TP 1, 2 is feasible; feasible: TP 4, 8"):
        none.initial_tp(small)

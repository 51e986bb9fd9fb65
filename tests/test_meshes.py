"""Meshes that are neither part of a node nor whole nodes: how groups lie, what they cost, whole runs, refusals."""

import math
from collections import Counter
from typing import Any

import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_asynchronous import check_gpus

import rlsim
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives, Groups
from rlsim.cost.layout import Layout
from rlsim.experiment.result import Result
from rlsim.models.hardware import load_cluster

TWO = load_cluster("2x8xh100")
H100 = load_calibration("h100-sglang")


# ---- groups ----------------------------------------------------------------------------------------------------------


@given(*[st.integers(1, 4)] * 4, st.integers(0, 20), st.integers(1, 8))
def test_groups_lie_as_their_gpus_do(dp: int, tp: int, pp: int, cp: int, first: int, per_node: int) -> None:
    """Against the order that `Layout` states: TP innermost, then CP, DP and PP."""
    cluster = TWO.model_copy(update={"nodes": 64, "gpus_per_node": per_node})
    layout = Layout(first_gpu=first, dp=dp, tp=tp, pp=pp, cp=cp)
    groups = Groups(Collectives(H100.collectives, H100.reference, cluster), cluster, layout)
    ranks = [(p, d, c, t) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]
    node = {rank: cluster.node_of(first + i) for i, rank in enumerate(ranks)}
    shared: dict[str, Any] = {
        "tp": lambda p, d, c, t: (p, d, c), "cp": lambda p, d, c, t: (p, d, t),
        "shards": lambda p, d, c, t: (p, t), "pp": lambda p, d, c, t: (d, c, t),
    }  # fmt: skip
    for group, name in shared.items():
        members: dict[object, Counter[int]] = {}
        for rank in ranks:
            members.setdefault(name(*rank), Counter())[node[rank]] += 1
        expected = {(len(on), min(on.values()), max(on.values())) for on in members.values()}
        assert groups.spreads(group) == sorted(expected)  # type: ignore[arg-type]
    across = [sum(node[p, *r[1:]] != node[p + 1, *r[1:]] for p in range(pp - 1)) for r in ranks if r[0] == 0]
    assert groups.boundaries == (pp - 1 - max(across), max(across))


def test_a_group_of_eight_and_four_by_hand() -> None:
    """Gathered inside the fuller node, and over four ports of either."""
    collectives = Collectives(H100.collectives, H100.reference, TWO)
    groups = Groups(collectives, TWO, Layout(first_gpu=0, dp=12))
    assert groups.spreads("shards") == [(2, 4, 8)]
    size = 1e9
    over_the_network = collectives.time_s("all_gather", size, 8, 2) - collectives.time_s("all_gather", size, 4)
    inside = collectives.time_s("all_gather", size, 8)
    assert groups.time_s("all_gather", size, "shards") == pytest.approx(inside + over_the_network, rel=1e-12)
    even = Groups(collectives, TWO, Layout(first_gpu=0, dp=16))
    assert even.time_s("all_gather", size, "shards") == collectives.time_s("all_gather", size, 16, 2)
    assert even.time_s("all_gather", size, "shards") < groups.time_s("all_gather", size, "shards")


# ---- whole runs ------------------------------------------------------------------------------------------------------

#: Clusters, GPUs of generation and of everything else.
SPLITS = [("2x8xh100", (0, 11), (12, 15)), ("8xh100", (0, 4), (5, 7)), ("4x8xh100", (2, 21), (22, 31))]


def experiment(cluster: str, systems: list[Any]) -> Result:
    told = {"cluster": cluster, "model": "qwen2.5-1.5b", "calibration": "h100-sglang", "systems": systems}
    trace = {"path": "deepscaler-llama-3.1-8b", "cap": "2K"}
    return rlsim.run({**TINY, **told, "trace": trace, "workflow": {"prompts": 24, "responses": 4, "steps": 2}})


def split(generate: tuple[int, int], rest: tuple[int, int], *others: Any, **training: Any) -> list[Any]:
    gpus = "{}-{}".format
    calls = {name: {"gpus": gpus(*rest), **training} for name in ("old_log_prob", "ref_log_prob", "train")}
    return [{"plan": {"calls": {"generate": {"gpus": gpus(*generate)}, **calls}}}, *others]


def node_gpus(cluster: str, first: int, last: int) -> list[int]:
    return list(Counter(load_cluster(cluster).node_of(gpu) for gpu in range(first, last + 1)).values())


@pytest.mark.parametrize(("cluster", "generate", "rest"), SPLITS)
def test_every_system_runs_on_any_gpus(cluster: str, generate: tuple[int, int], rest: tuple[int, int]) -> None:
    degrees = [tp for tp in (1, 2, 4) if math.gcd(*node_gpus(cluster, *generate)) % tp == 0]  # of 12 heads
    systems = [{"name": f"tp{tp}", "use": split(generate, rest, {"verl": {"tp": tp}})} for tp in degrees]
    systems += [{"name": name, "use": split(generate, rest, name)} for name in ("pat", "rlhfuse", "rollpacker")]
    result = experiment(cluster, systems)
    assert (result.steps["trained"] == 96).all()
    assert set(result.steps["initial_tp"]) <= set(degrees)
    for system, spans in result.spans.groupby("system"):
        check_gpus(spans)
        used: dict[str, set[int]] = {}
        for span in spans.itertuples():
            gpus = range(span.gpu, span.gpu + span.gpus)
            used.setdefault(span.kind, set()).update(gpus)
            if span.kind in ("decode", "prefill"):
                assert len({load_cluster(cluster).node_of(gpu) for gpu in gpus}) == 1, "a replica lies in one node"
        assert used["decode"] == set(range(generate[0], generate[1] + 1)), system
        assert used["train"] == set(range(rest[0], rest[1] + 1)), system


def test_openrlhf_cuts_where_it_is_told() -> None:
    result = experiment("2x8xh100", [{"openrlhf": {"rollout": 0.75, "tp": "best"}}])
    assert set(result.spans.loc[result.spans["kind"] == "train", "gpu"]) <= set(range(12, 16))
    assert set(result.steps["initial_tp"]) <= {1, 2, 4}

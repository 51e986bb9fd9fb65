"""Reallocation and data transfer: by hand, and against plain loops over GPUs."""

import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from conftest import Talk, cases

from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives, CollectiveTime
from rlsim.cost.layout import Layout, PairTimes, canonical
from rlsim.cost.reallocation import DataTransfer, Reallocation
from rlsim.errors import ConfigError
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.model import load_model

LLAMA = load_model("llama-3-7b")
H100 = load_cluster("16x8xh100")
A40 = load_cluster("2x8xa40").model_copy(update={"nodes": 4})  # one port to the network for all GPUs of a node
NVLINK, NETWORK = 100e9, 10e9


def rates() -> Talk:
    """A broadcast inside a node at 100 GB/s, a send to another at 10 GB/s, a gather at 50 GB/s; no latencies."""
    known = {("broadcast", 1): NVLINK, ("send_recv", 2): NETWORK}
    return Talk(lambda op, size, gpus, nodes: size / known.get((op, nodes), 50e9) if gpus > 1 else 0.0)


def measured(cluster: Cluster) -> Collectives:
    calibration = load_calibration("h100-sxm-sglang" if cluster is H100 else "a40-vllm")
    return Collectives(calibration.collectives, calibration.reference, cluster)


def at(first_gpu: int, dp: int = 1, tp: int = 1, pp: int = 1, *, zero3: bool = False) -> Layout:
    return Layout(first_gpu=first_gpu, dp=dp, tp=tp, pp=pp, zero3=zero3)


def moved_s(source: Layout, target: Layout, cluster: Cluster = H100) -> float:
    return Reallocation(LLAMA, cluster, rates()).time_s(source, target)


# The plain loops -----------------------------------------------------------------------------------------------------


def messages_s(
    cluster: Cluster, collectives: CollectiveTime, messages: dict[tuple[int, object, float], list[int]], busy: dict
) -> float:
    """The busiest sender, receiver or port; `messages`: (source GPU, piece, bytes) -> target GPUs."""
    loads = defaultdict(float)
    for gpu, time in busy.items():
        loads["receive", gpu] += time
    inter = cluster.inter
    for (source, _, size), targets in messages.items():
        members = defaultdict(list)
        for gpu in targets:
            members[cluster.node_of(gpu)].append(gpu)
        home = cluster.node_of(source)
        away = [node for node in members if node != home]
        largest = max(len(gpus) + (node == home) for node, gpus in members.items())
        time = collectives.time_s("broadcast", size, largest, 1)
        if away:
            network = collectives.time_s("send_recv", size, 2, 2) + (len(away) - 1) * inter.latency_s
            time = max(time, network)
            loads["out", home, source % cluster.gpus_per_node // inter.shared_by_gpus] += network
            for node in away:
                loads["in", node, min(members[node]) % cluster.gpus_per_node // inter.shared_by_gpus] += network
        loads["send", source] += time
        for gpu in targets:
            loads["receive", gpu] += time
    return max(loads.values(), default=0.0)


def loop_s(cluster: Cluster, collectives: CollectiveTime, source: Layout, target: Layout) -> float:
    """REAL's scheme, GPU by GPU and layer by layer."""
    if source == target:
        return 0.0

    def holders(placement: Layout) -> dict[tuple[int, int], list[int]]:
        """(stage, TP rank) -> GPUs, in their order."""
        held = defaultdict(list)
        gpu = placement.first_gpu
        for stage in range(placement.pp):
            for _ in range(placement.shards):
                for rank in range(placement.tp):
                    held[stage, rank].append(gpu)
                    gpu += 1
        return held

    def parameters(placement: Layout, stage: int) -> dict[str, int]:
        size = math.ceil(LLAMA.num_hidden_layers / placement.pp)
        layers = range(min(stage * size, LLAMA.num_hidden_layers), min((stage + 1) * size, LLAMA.num_hidden_layers))
        units = {f"layer {layer}": LLAMA.layer.parameters for layer in layers}
        if stage == 0:
            units["embedding"] = LLAMA.vocab_size * LLAMA.hidden_size
        if stage == placement.pp - 1:
            units["head"] = LLAMA.head_parameters + LLAMA.hidden_size
        return units

    have, need = holders(source), holders(target)
    messages = defaultdict(list)
    copies = defaultdict(float)
    for i in range(source.pp):
        for j in range(target.pp):
            common = parameters(source, i).keys() & parameters(target, j).keys()
            count = sum(parameters(source, i)[unit] for unit in common)
            for t in range(target.tp):
                for r in range(source.tp):
                    share = min((t + 1) / target.tp, (r + 1) / source.tp) - max(t / target.tp, r / source.tp)
                    if share < 1e-9 or not count:
                        continue
                    size = 2 * count * share / (target.shards if target.zero3 else 1)
                    for gpu in need[j, t]:
                        place = gpu - target.first_gpu
                        candidates = have[i, r]
                        near = [g for g in candidates if cluster.node_of(g) == cluster.node_of(gpu)]
                        if gpu in candidates:
                            if source.tp != target.tp:
                                copies[gpu] += 2 * size / cluster.gpu.memory_bytes_per_s
                            continue
                        if near:
                            chosen = near[place % len(near)]
                        else:
                            same = [g for g in need[j, t] if cluster.node_of(g) == cluster.node_of(gpu)]
                            leader = place if target.zero3 else min(same) - target.first_gpu
                            chosen = candidates[leader % len(candidates)]
                        piece = gpu if target.zero3 else (j, t)
                        messages[chosen, piece, float(f"{size:.12g}")].append(gpu)
    gather = 0.0
    if source.zero3:
        assert cluster.gpus_per_node % source.tp == 0
        nodes = len({cluster.node_of(source.first_gpu + source.tp * rank) for rank in range(source.shards)})
        for size in parameters(source, 0).values():
            gather += collectives.time_s("all_gather", 2 * size / source.tp, source.shards, nodes)
    return gather + messages_s(cluster, collectives, messages, copies)


def random_placement(rng: random.Random, cluster: Cluster) -> Layout:
    size = cluster.gpus_per_node
    gpus = rng.choice([n for n in (1, 2, 4, 8, 16, 24, 32, 64) if n <= min(cluster.gpus, 32)])
    starts = range(0, min(cluster.gpus, 64) - gpus + 1, min(gpus, size))
    tp = rng.choice([d for d in (1, 2, 4, 8) if gpus % d == 0])
    pp = rng.choice([d for d in range(1, gpus // tp + 1) if gpus // tp % d == 0])
    zero3 = pp == 1 and gpus > tp and rng.random() < 0.3
    return at(rng.choice(starts), gpus // tp // pp, tp, pp, zero3=zero3)


@pytest.mark.parametrize("cluster", [H100, A40], ids=["own ports", "shared port"])
def test_equals_the_plain_loops(cluster: Cluster) -> None:
    rng = random.Random(5)
    reallocation = Reallocation(LLAMA, cluster, measured(cluster))
    for _ in range(120):
        source, target = random_placement(rng, cluster), random_placement(rng, cluster)
        expected = loop_s(cluster, measured(cluster), source, target)
        assert reallocation.time_s(source, target) == pytest.approx(expected, rel=1e-9), (source, target)


# By hand -------------------------------------------------------------------------------------------------------------


@cases("cost", "layouts that cannot be")
def test_layouts_that_cannot_be(source: dict[str, Any], target: dict[str, Any], cluster: str, message: str) -> None:
    on = A40 if cluster == "a40" else load_cluster(cluster)
    with pytest.raises(ConfigError, match=message):
        moved_s(at(**{"first_gpu": 0, **source}), at(**{"first_gpu": 0, **target}), on)


# Data ----------------------------------------------------------------------------------------------------------------


def data_loop_s(cluster: Cluster, collectives: CollectiveTime, size: float, source: Layout, target: Layout) -> float:
    messages = defaultdict(list)
    for d in range(source.dp):
        head = source.first_gpu + ((source.pp - 1) * source.shards + d * source.cp) * source.tp
        for rank in range(target.dp):
            share = min((d + 1) / source.dp, (rank + 1) / target.dp) - max(d / source.dp, rank / target.dp)
            if share < 1e-9:
                continue
            for stage in range(target.pp):
                for c in range(target.cp):
                    for t in range(target.tp):
                        place = ((stage * target.dp + rank) * target.cp + c) * target.tp + t
                        if target.first_gpu + place != head:
                            messages[head, rank, size * share].append(target.first_gpu + place)
    return messages_s(cluster, collectives, messages, {})


@pytest.mark.parametrize("cluster", [H100, A40], ids=["own ports", "shared port"])
def test_data_equals_the_plain_loops(cluster: Cluster) -> None:
    rng = random.Random(6)
    data = DataTransfer(cluster, measured(cluster))
    for _ in range(120):
        source, target = random_placement(rng, cluster), random_placement(rng, cluster)
        expected = data_loop_s(cluster, measured(cluster), 12e6, source, target)
        assert data.time_s(12e6, source, target) == pytest.approx(expected, rel=1e-9), (source, target)


# Many pairs ----------------------------------------------------------------------------------------------------------


def test_pairs_are_computed_once() -> None:
    asked: list[tuple[Layout, Layout]] = []
    reallocation = Reallocation(LLAMA, H100, measured(H100))

    def time_s(source: Layout, target: Layout) -> float:
        asked.append((source, target))
        return reallocation.time_s(source, target)

    rng = random.Random(1)
    sources, targets = ([random_placement(rng, H100) for _ in range(40)] for _ in range(2))
    pairs = PairTimes(time_s, H100, sources, targets)
    everything = pairs(np.arange(40)[:, None], np.arange(40))
    assert everything.shape == (40, 40)
    assert len(asked) <= 1600
    seen = len(asked)
    one_by_one = [[reallocation.time_s(source, target) for target in targets] for source in sources]
    assert everything.tolist() == one_by_one
    assert pairs(3, [5, 6]).tolist() == everything[3, 5:7].tolist()
    assert len(asked) == seen


@cases("cost", "pairs are moved to the first nodes")
def test_pairs_are_moved_to_the_first_nodes(source: list[int], target: list[int], expected: list[int]) -> None:
    """Meshes by first GPU and size."""
    found = canonical(H100, *(at(first, dp=gpus) for first, gpus in (source, target)))
    assert [layout.first_gpu for layout in found] == expected
    assert [layout.gpus for layout in found] == [source[1], target[1]]

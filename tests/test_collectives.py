"""Collectives: hand values on a made-up link, order of the operations, and the rules across nodes."""

import pytest

from rlsim.cost.calibration import Reference, load_calibration
from rlsim.cost.collectives import OPERATIONS, Collectives
from rlsim.cost.fits import CollectiveFit, CollectiveFits
from rlsim.errors import CalibrationError
from rlsim.hardware import Cluster, Link, load_cluster

REFERENCE = Reference(
    bf16_flop_per_s=100e12, memory_bytes_per_s=1e12, sm_count=100, l2_bytes=40e6, link_bytes_per_s=100e9
)


def cluster(intra: float = 100e9, nodes: int = 1, shared: int = 1) -> Cluster:
    base = load_cluster("8xh100")
    inter = Link(name="ib", bytes_per_s=50e9, latency_s=2e-6, shared_by_gpus=shared) if nodes > 1 else None
    return base.model_copy(
        update={"nodes": nodes, "intra": Link(name="made-up", bytes_per_s=intra, latency_s=1e-6), "inter": inter}
    )


def curve(latency: float, rate: float) -> CollectiveFit:
    sizes = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
    return CollectiveFit(message_bytes=sizes, time_s=tuple(latency + size / rate for size in sizes))


FITS = CollectiveFits(
    nccl={
        "all_reduce": {2: curve(10e-6, 100e9), 8: curve(20e-6, 50e9)},
        "all_gather": {2: curve(5e-6, 200e9), 8: curve(10e-6, 100e9)},
        "reduce_scatter": {2: curve(5e-6, 200e9), 8: curve(10e-6, 100e9)},
        "all_to_all": {2: curve(5e-6, 200e9), 8: curve(10e-6, 100e9)},
    },
    custom_all_reduce={8: curve(5e-6, 10e9)},
    inter_efficiency=0.5,
)


def test_nothing_to_send_takes_no_time() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert all(c.time_s(op, 1e6, 1) == 0.0 and c.time_s(op, 0.0, 8) == 0.0 for op in OPERATIONS)


def test_knots_flat_below_proportional_above() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert c.time_s("all_gather", 1e6, 8) == pytest.approx(10e-6 + 1e6 / 100e9)
    assert c.time_s("all_gather", 1.0, 8) == pytest.approx(10e-6 + 1e3 / 100e9)
    assert c.time_s("all_gather", 1e10, 8) == pytest.approx(100 * c.time_s("all_gather", 1e8, 8))


def test_all_reduce_takes_the_faster_of_nccl_and_the_engines_own() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert c.time_s("all_reduce", 1e4, 8) == pytest.approx(5e-6 + 1e4 / 10e9)
    assert c.time_s("all_reduce", 1e7, 8) == pytest.approx(20e-6 + 1e7 / 50e9)


def test_derived_operations() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert c.time_s("send_recv", 5e5, 2) == pytest.approx(c.time_s("all_gather", 1e6, 2))
    assert c.time_s("broadcast", 7e5, 8) == pytest.approx(c.time_s("all_gather", 8e5, 8))


def test_gpu_counts_between_the_measured_ones() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    two, four, eight = (c.time_s("all_gather", 1e6, n) for n in (2, 4, 8))
    assert four == pytest.approx((two + eight) / 2)


def test_a_slower_link_stretches_all_but_the_latency() -> None:
    fast, slow = Collectives(FITS, REFERENCE, cluster()), Collectives(FITS, REFERENCE, cluster(intra=50e9))
    latency = fast.time_s("all_gather", 1e3, 8)
    assert slow.time_s("all_gather", 1e3, 8) == pytest.approx(latency)
    assert slow.time_s("all_gather", 1e7, 8) - latency == pytest.approx(
        2 * (fast.time_s("all_gather", 1e7, 8) - latency)
    )


def test_across_nodes_by_hand() -> None:
    c = Collectives(FITS, REFERENCE, cluster(nodes=2))
    size, link = 1e8, 25e9  # 50 GB/s at 50%
    inside = 2 * (10e-6 + size / 100e9)
    outside = 2 * (2e-6 + size / 8 / 2 / link)  # reduce-scatter and all-gather of an eighth over two nodes
    assert c.time_s("all_reduce", size, 16, nodes=2) == pytest.approx(inside + outside)
    assert c.time_s("send_recv", size, 2, nodes=2) == pytest.approx(2e-6 + size / link)


def test_a_shared_port_is_shared() -> None:
    own, shared = (
        Collectives(FITS, REFERENCE, cluster(nodes=2)),
        Collectives(FITS, REFERENCE, cluster(nodes=2, shared=8)),
    )
    assert shared.time_s("all_reduce", 1e8, 16, nodes=2) > own.time_s("all_reduce", 1e8, 16, nodes=2)
    assert shared.time_s("send_recv", 1e8, 2, nodes=2) == own.time_s("send_recv", 1e8, 2, nodes=2)


def test_mistakes_are_named() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    with pytest.raises(ValueError, match="unknown collective 'allreduce'"):
        c.time_s("allreduce", 1.0, 2)
    with pytest.raises(ValueError, match="9 GPUs cannot be spread evenly over 2 nodes"):
        c.time_s("all_reduce", 1.0, 9, nodes=2)
    with pytest.raises(CalibrationError, match="no inter-node link"):
        c.time_s("all_reduce", 1.0, 16, nodes=2)


@pytest.mark.parametrize("name", ["h100-sglang", "a100-trtllm", "l40s-vllm", "a40-vllm"])
def test_fitted_collectives_grow_with_bytes(name: str) -> None:
    calibration = load_calibration(name)
    clusters = {"h100-sxm": "8xh100", "a100-sxm-80gb": "8xa100", "l40s": "8xl40s", "a40": "8xa40"}
    c = Collectives(calibration.collectives, calibration.reference, load_cluster(clusters[calibration.gpu]))
    for op in OPERATIONS:
        for gpus in (2, 4, 8):
            times = [c.time_s(op, 2.0**e, gpus) for e in range(6, 34)]
            assert times == sorted(times)
            assert times[-1] / 2.0**33 > 0.3 / c.cluster.intra.bytes_per_s  # no link beyond its rate


def test_h800_has_h100s_latency_and_less_bandwidth() -> None:
    h100 = load_calibration("h100-sglang")
    h800 = load_calibration("h800-sglang")
    fast = Collectives(h100.collectives, h100.reference, load_cluster("8xh100"))
    slow = Collectives(h800.collectives, h800.reference, load_cluster("2x8xh800"))
    assert slow.time_s("all_reduce", 4096, 8) == pytest.approx(fast.time_s("all_reduce", 4096, 8), rel=0.1)
    assert slow.time_s("all_reduce", 2**30, 8) == pytest.approx(2.25 * fast.time_s("all_reduce", 2**30, 8), rel=0.05)


def test_across_four_nodes_by_hand() -> None:
    """Between nodes each of eight GPUs carries an eighth: in a ring in three hops three quarters of the bytes, in a
    tree in two hops all of them. The ring is faster for large messages, the tree for small ones."""
    c, link = Collectives(FITS, REFERENCE, cluster(nodes=4)), 25e9

    def inside(size: float) -> float:
        return 10e-6 + size / 100e9

    for size, way in ((1e8, 3 * 2e-6 + 3 / 4 * 1e8 / 8 / link), (1e5, 2 * 2e-6 + 1e5 / 8 / link)):
        assert c.time_s("all_gather", size, 32, nodes=4) == pytest.approx(inside(size) + way)
        assert c.time_s("reduce_scatter", size, 32, nodes=4) == pytest.approx(inside(size) + way)
        assert c.time_s("all_reduce", size, 32, nodes=4) == pytest.approx(2 * inside(size) + 2 * way)
        tree = 2 * 2e-6 + size / 8 / link
        assert c.time_s("broadcast", size, 32, nodes=4) == pytest.approx(inside(size) + tree)
    # three quarters of what a GPU sends in an all-to-all go to other nodes
    assert c.time_s("all_to_all", 4e7, 32, nodes=4) == pytest.approx(inside(1e7) + 2e-6 + 3e7 / link)


@pytest.mark.parametrize(("local", "shared", "at_once"), [(8, 8, 8), (2, 8, 2), (8, 4, 4), (1, 8, 1)])
def test_a_port_is_shared_by_the_gpus_of_a_node_that_send(local: int, shared: int, at_once: int) -> None:
    c = Collectives(FITS, REFERENCE, cluster(nodes=2, shared=shared))
    inside = {8: 10e-6 + 1e8 / 100e9, 2: 5e-6 + 1e8 / 200e9, 1: 0.0}[local]
    outside = 2e-6 + 1e8 / local / 2 / (25e9 / at_once)
    assert c.time_s("all_gather", 1e8, 2 * local, nodes=2) == pytest.approx(inside + outside)


def test_more_gpus_of_a_node_than_were_measured() -> None:
    """Twice as many as eight: latency in proportion to log₂, bytes to (n − 1) / n."""
    c = Collectives(FITS, REFERENCE, cluster())
    latency, size = 10e-6 + 1e3 / 100e9, 1e7
    rest = 10e-6 + size / 100e9 - latency
    assert c.time_s("all_gather", size, 16) == pytest.approx(latency * 4 / 3 + rest * (15 / 16) / (7 / 8))


def test_what_was_not_measured_is_counted() -> None:
    c = Collectives(FITS, REFERENCE, cluster(nodes=2))
    for _ in range(2):  # the same message counts once
        c.time_s("all_gather", 1e8, 8)
    c.time_s("all_gather", 1e3, 4)
    assert c.lookups.table() == {"all_gather": {"exact": 0, "interpolated": 2, "extrapolated": 0}}
    c.time_s("all_gather", 1.1e8, 8)
    assert c.lookups.examples == {"all_gather": "1.1e+08 bytes over 8 GPUs, beyond what was measured"}
    c.time_s("reduce_scatter", 1e6, 16)
    assert c.lookups.examples["reduce_scatter"] == "16 GPUs of one domain, measured 2 to 8"
    for _ in range(2):
        c.time_s("send_recv", 1e6, 2, nodes=2)
    assert c.lookups.counts["send_recv across nodes"] == {"extrapolated": 1}
    assert c.lookups.counts["all_gather"] == {"interpolated": 2, "extrapolated": 1}

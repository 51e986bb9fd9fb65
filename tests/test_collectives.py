"""Collectives: hand values on a made-up link, order of the operations, and the rules across nodes."""

import pytest

from rlsim.cost.calibration import Reference, load_calibration
from rlsim.cost.collectives import OPERATIONS, Collectives
from rlsim.cost.fits import AcrossFit, CollectiveFit, CollectiveFits
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, Link, load_cluster

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
    across=AcrossFit(
        base_s=5e-6, step_s=1e-6, tree_hop_s=3e-6, message_s=5e-7, efficiency=0.5, ramp=0.0, power=0.5, source="made up"
    ),
)


def test_knots_flat_below_proportional_above() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert c.time_s("all_gather", 1e6, 8) == pytest.approx(10e-6 + 1e6 / 100e9)
    assert c.time_s("all_gather", 1.0, 8) == pytest.approx(10e-6 + 1e3 / 100e9)
    assert c.time_s("all_gather", 1e10, 8) == pytest.approx(100 * c.time_s("all_gather", 1e8, 8))
    c = Collectives(FITS, REFERENCE, cluster())
    assert all(c.time_s(op, 1e6, 1) == 0.0 and c.time_s(op, 0.0, 8) == 0.0 for op in OPERATIONS)


def test_all_reduce_takes_the_faster_of_nccl_and_the_engines_own() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    assert c.time_s("all_reduce", 1e4, 8) == pytest.approx(5e-6 + 1e4 / 10e9)
    assert c.time_s("all_reduce", 1e7, 8) == pytest.approx(20e-6 + 1e7 / 50e9)


def test_across_two_nodes_by_hand() -> None:
    """A tree: along seven GPUs and to the other node, at 2 us of the link and 3 us, and back. Of many bytes a node's
    own all-reduce takes longer than an eighth of them over a GPU's port, 50 GB/s at 50%: what is longer counts."""
    c = Collectives(FITS, REFERENCE, cluster(nodes=2))
    empty = 5e-6 + 2 * (7 * 1e-6 + 2e-6 + 3e-6)
    assert c.time_s("all_reduce", 1.0, 16, nodes=2) == pytest.approx(empty, rel=1e-4)
    assert c.time_s("all_reduce", 1e8, 16, nodes=2) == pytest.approx(empty + (1e8 - 1e3) / 50e9)
    assert c.time_s("all_reduce", 1e8, 4, nodes=2) == pytest.approx(5e-6 + 2 * 6e-6 + 1e8 / 2 / 25e9)
    assert c.time_s("send_recv", 1e8, 2, nodes=2) == pytest.approx(5e-6 + 2e-6 + 3e-6 + 1e8 / 25e9)


def test_middling_messages_ramp_up() -> None:
    """`L (1 + x + ramp x^power)`, x being the bytes' time over an empty message's."""
    across = FITS.across.model_copy(update={"ramp": 3.0})
    ramped = Collectives(FITS.model_copy(update={"across": across}), REFERENCE, cluster(nodes=2))
    plain = Collectives(FITS, REFERENCE, cluster(nodes=2))
    for size in (1e4, 1e6, 1e9):
        x = size / 25e9 / 10e-6
        assert plain.time_s("send_recv", size, 2, nodes=2) == pytest.approx(10e-6 * (1 + x))
        assert ramped.time_s("send_recv", size, 2, nodes=2) == pytest.approx(10e-6 * (1 + x + 3 * x**0.5))


def test_deepep_across_nodes() -> None:
    """The authors' dispatch and combine of 128 tokens on H800 (docs/legacy.md of DeepEP): fitted to 16 GPUs, the others
    predicted."""
    calibration = load_calibration("h800-sglang")
    for gpus, measured_us in ((16, 118 + 195), (32, 155 + 273), (64, 173 + 314), (128, 192 + 369), (256, 194 + 360)):
        c = Collectives(calibration.collectives, calibration.reference, load_cluster(f"{gpus // 8}x8xh800"))
        assert c.exchange_s(128, 8, 7168 * 2, gpus, gpus // 8) * 1e6 == pytest.approx(measured_us, rel=0.1)


def test_mistakes_are_named() -> None:
    c = Collectives(FITS, REFERENCE, cluster())
    with pytest.raises(CalibrationError, match="no measurement of 'allreduce'"):
        c.time_s("allreduce", 1.0, 2)
    with pytest.raises(CalibrationError, match="no inter-node link"):
        c.time_s("all_reduce", 1.0, 16, nodes=2)


@pytest.mark.parametrize("name", ["a100-trtllm", "l40s-vllm"])
def test_fitted_collectives_grow_with_bytes(name: str) -> None:
    calibration = load_calibration(name)
    cluster = load_cluster(f"8x{name.partition('-')[0]}")
    c = Collectives(calibration.collectives, calibration.reference, cluster)
    for op in OPERATIONS:
        for gpus in (2, 4, 8):
            times = [c.time_s(op, 2.0**e, gpus) for e in range(6, 34)]
            assert times == sorted(times)
            assert times[-1] / 2.0**33 > 0.3 / c.cluster.intra.bytes_per_s  # no link beyond its rate


def test_across_four_nodes_by_hand() -> None:
    """Beyond two nodes a ring carries the bytes, all but a 32nd of them past every GPU, in an all-reduce twice; a tree
    of two hops the latency of all-reduces; and 24 of a GPU's 31 messages of an all-to-all leave the node."""
    c, rate = Collectives(FITS, REFERENCE, cluster(nodes=4)), 25e9
    ring, size = 5e-6 + 28 * 5e-7 + 3 * 2e-6, 1e9
    assert c.time_s("all_reduce", 1.0, 32, nodes=4) == pytest.approx(5e-6 + 2 * (7e-6 + 2 * 5e-6), rel=1e-4)
    for op in ("all_gather", "reduce_scatter", "broadcast"):
        assert c.time_s(op, 1.0, 32, nodes=4) == pytest.approx(ring, rel=1e-4)
    # inside a node they are slower than between nodes here: 100 GB/s against 206
    assert c.time_s("all_gather", size, 32, nodes=4) == pytest.approx(
        ring + 10 * c._curve_s("all_gather", 1e8, 8), rel=2e-3
    )
    alone = Collectives(FITS, REFERENCE, cluster(nodes=32))
    one = 5e-6 + 31 * 2e-6 + size * 31 / 32 / rate
    assert alone.time_s("all_gather", size, 32, nodes=32) == pytest.approx(one)
    assert alone.time_s("broadcast", size, 32, nodes=32) == pytest.approx(5e-6 + 31 * 2e-6 + size / rate)
    tree = 5e-6 + 2 * 5 * 5e-6
    assert alone.time_s("all_reduce", size, 32, nodes=32) == pytest.approx(tree + 2 * size * 31 / 32 / rate)
    to_all = 5e-6 + 2e-6 + 31 * 5e-7
    assert c.time_s("all_to_all", size, 32, nodes=4) == pytest.approx(to_all + size * 24 / 32 / rate)


@pytest.mark.parametrize(("local", "shared", "at_once"), [(8, 8, 8), (2, 8, 2), (8, 4, 4), (1, 8, 1)])
def test_a_port_is_shared_by_the_gpus_of_a_node_that_send(local: int, shared: int, at_once: int) -> None:
    c = Collectives(FITS, REFERENCE, cluster(nodes=2, shared=shared))
    gpus = 2 * local
    latency = 5e-6 + (gpus - 2) * 5e-7 + 2e-6
    outside = 1e8 / local * (gpus - 1) / gpus / (25e9 / at_once)
    assert c.time_s("all_gather", 1e8, gpus, nodes=2) == pytest.approx(latency + outside)
    alone = c.time_s("send_recv", 1e8, 2, nodes=2)
    assert c.time_s("send_recv", 1e8, gpus, nodes=2) - alone == pytest.approx(1e8 * (at_once - 1) / 25e9)


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
    assert c.lookups.table() == {"all_gather": {"interpolated": 2, "extrapolated": 0}}
    c.time_s("all_gather", 1.1e8, 8)
    assert c.lookups.examples == {"all_gather": "1.1e+08 bytes over 8 GPUs, beyond what was measured"}
    c.time_s("reduce_scatter", 1e6, 16)
    assert c.lookups.examples["reduce_scatter"] == "16 GPUs of one domain, measured 2 to 8"
    for _ in range(2):
        c.time_s("send_recv", 1e6, 2, nodes=2)
    assert c.lookups.counts["send_recv across nodes"] == {"extrapolated": 1}
    assert c.lookups.counts["all_gather"] == {"interpolated": 2, "extrapolated": 1}

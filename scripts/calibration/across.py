"""Collectives across nodes: published nccl-tests, and the fit of three constants to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from rlsim.base.reading import plain, read_yaml
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.fits import ACROSS, AcrossFit
from rlsim.models.hardware import load_cluster

POINTS = Path(__file__).with_suffix("").with_name("across_nodes.yaml")
#: What NCCL does not publish: `AcrossFit` fields, and the bounds of their fit.
FITTED = {"efficiency": (0.5, 1.0), "ramp": (0.0, 20.0), "power": (0.05, 0.95)}
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


class Point(NamedTuple):
    """One measured collective; `network` are the GPUs of the nodes, these, and their link's rate and latency."""

    cluster: str
    op: str
    gpus: int
    size: float
    time_s: float
    network: tuple[str, int, float, float | None]

    def error(self, fit: AcrossFit = ACROSS) -> float:
        """Relative error of rlsim's time, positive: too slow."""
        collectives = _collectives(*self.network)
        collectives.across = fit
        gpus = 2 if self.op == "send_recv" else self.gpus
        return collectives.time_s(self.op, self.size, gpus, self.network[1]) / self.time_s - 1.0


def points() -> list[Point]:
    """All of the file."""
    found = []
    for one in plain(read_yaml(POINTS))["clusters"]:
        latency_s = one["latency_us"] * 1e-6 if "latency_us" in one else None
        for table in one["tables"]:
            nodes, network = table["nodes"], (one["gpu"], table["nodes"], one["gbit_per_s"] / 8 * 1e9, latency_s)
            for size, us in ((str(size), us) for size, us in table["us"].items()):
                count = float(size[:-1]) * _UNITS[size[-1]] if size[-1] in _UNITS else float(size)
                gpus = nodes * one.get("local", 8)
                found.append(Point(one["cluster"], table["op"], gpus, count, us * 1e-6, network))
    return found


def fit(measured: Sequence[Point]) -> AcrossFit:
    """The constants that NCCL does not publish, over these points; every cluster counts alike."""
    many = Counter(point.cluster for point in measured)
    weights = np.array([many[point.cluster] ** -0.5 for point in measured])

    def off(values: Sequence[float]) -> np.ndarray:
        tried = ACROSS.model_copy(update=dict(zip(FITTED, map(float, values), strict=True)))
        return weights * np.log1p([point.error(tried) for point in measured])

    lower, upper = zip(*FITTED.values(), strict=True)
    start = [getattr(ACROSS, name) for name in FITTED]
    found = least_squares(off, start, bounds=(lower, upper), loss="soft_l1", f_scale=0.05, ftol=1e-5).x
    return ACROSS.model_copy(update={name: float(f"{value:.2g}") for name, value in zip(FITTED, found, strict=True)})


def left_out(measured: Sequence[Point]) -> list[float]:
    """Every point's error by a fit that has seen no point of its cluster."""
    fits = {name: fit([one for one in measured if one.cluster != name]) for name in {one.cluster for one in measured}}
    return [point.error(fits[point.cluster]) for point in measured]


@cache
def _collectives(gpu: str, nodes: int, bytes_per_s: float, latency_s: float | None) -> Collectives:
    """What rlsim knows of such nodes, joined by this network."""
    cluster = load_cluster(f"{nodes}x8x{gpu}")
    assert cluster.inter is not None
    link = {"bytes_per_s": bytes_per_s, "latency_s": latency_s or cluster.inter.latency_s}
    cluster = cluster.model_copy(update={"inter": cluster.inter.model_copy(update=link)})
    calibration = load_calibration(f"{gpu}-vllm")
    return Collectives(calibration.collectives, calibration.reference, cluster)


def main(_: object) -> None:
    """Collectives across nodes, to published nccl-tests: prints the constants of `rlsim.cost.fits.ACROSS`."""
    found = fit(points())
    print(", ".join(f"{name} {getattr(found, name):g}" for name in FITTED))

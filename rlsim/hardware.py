"""GPUs, links and clusters: published data-sheet figures, one YAML file each under `rlsim/data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rlsim import catalogue
from rlsim.errors import unknown_name
from rlsim.schema import Schema, load, validate
from rlsim.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds


class Gpu(Schema):
    """One GPU, by its data sheet."""

    name: str
    title: str = Field(description="name as the maker writes it")
    memory_bytes: Bytes = Field(gt=0, description="device memory")
    memory_bytes_per_s: BytesPerSecond = Field(gt=0, description="peak device-memory bandwidth")
    bf16_flop_per_s: FlopPerSecond = Field(gt=0, description="peak dense bf16 tensor-core rate")
    l2_bytes: Bytes = Field(gt=0, description="L2 cache")
    sm_count: int = Field(gt=0, description="streaming multiprocessors")
    source: str = Field(description="where the figures are from")


class Link(Schema):
    """A path between GPUs, or between a GPU and host memory."""

    name: str = Field(description="nvlink, pcie, ib or roce, with generation and width")
    bytes_per_s: BytesPerSecond = Field(gt=0, description="peak rate of one GPU in one direction")
    latency_s: Seconds = Field(ge=0, description="time of an empty message")


class Cluster(Schema):
    """Identical nodes of identical GPUs; GPU g sits in node g // gpus_per_node."""

    name: str
    gpu: Gpu
    nodes: int = Field(gt=0)
    gpus_per_node: int = Field(gt=0)
    intra: Link = Field(description="GPU to GPU inside a node")
    inter: Link | None = Field(default=None, description="GPU to GPU across nodes; none in a one-node cluster")
    host: Link = Field(description="GPU to host memory")

    @property
    def gpus(self) -> int:
        """GPUs in all nodes together."""
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        """The node that GPU number `gpu` sits in."""
        return gpu // self.gpus_per_node

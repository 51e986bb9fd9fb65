"""GPUs, links and clusters: published data-sheet figures, one YAML file each under `rlsim/data`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from rlsim import catalogue
from rlsim.errors import CatalogueError, RlsimError, shown, unknown_name
from rlsim.schema import Name, Schema, load, validate
from rlsim.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds

#: GPUs of a cluster: more than any training run has had.
MOST_GPUS = 65_536

_CLUSTER_NAME = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,5})x)?(?P<gpus>[1-9][0-9]{0,3})x(?P<gpu>[a-z].*)")


class Gpu(Schema):
    """One GPU, by its data sheet."""

    name: Name
    title: str = Field(description="name as the maker writes it")
    memory_bytes: Bytes = Field(gt=0, description="device memory")
    memory_bytes_per_s: BytesPerSecond = Field(ge=1, description="peak device-memory bandwidth")
    bf16_flop_per_s: FlopPerSecond = Field(ge=1, description="peak dense bf16 tensor-core rate")
    l2_bytes: Bytes = Field(gt=0, description="L2 cache")
    sm_count: int = Field(gt=0, le=1_000_000, description="streaming multiprocessors")
    source: str = Field(description="where the figures are from")


class Link(Schema):
    """A path between GPUs, or between a GPU and host memory."""

    name: Name = Field(description="nvlink, pcie, ib or roce, with generation and width")
    bytes_per_s: BytesPerSecond = Field(ge=1, description="peak rate of one GPU in one direction")
    latency_s: Seconds = Field(ge=0, le=10, description="time of one hop of an empty message")
    shared_by_gpus: int = Field(default=1, gt=0, le=MOST_GPUS, description="GPUs of a node that share one such port")


class Cluster(Schema):
    """Identical nodes of identical GPUs; GPU g sits in node g // gpus_per_node."""

    name: Name = Field(default="custom", description="catalogue name; an inline cluster needs none")
    gpu: Gpu = Field(description="a catalogue name, or the fields of a GPU")
    nodes: int = Field(gt=0, le=MOST_GPUS)
    gpus_per_node: int = Field(gt=0, le=1024)
    intra: Link = Field(description="GPU to GPU inside a node")
    inter: Link | None = Field(default=None, description="GPU to GPU across nodes; none in a one-node cluster")
    host: Link = Field(description="GPU to host memory")

    @field_validator("gpu", mode="before")
    @classmethod
    def _gpu_by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return load_gpu(value)
        except RlsimError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _nodes_are_joined(self) -> Cluster:
        if self.gpus > MOST_GPUS:
            raise ValueError(f"{self.nodes:,} nodes of {self.gpus_per_node:,} GPUs: at most {MOST_GPUS:,} GPUs")
        if self.nodes > 1 and self.inter is None:
            raise ValueError("a cluster of several nodes needs `inter`, the link between them")
        return self

    @property
    def gpus(self) -> int:
        """GPUs in all nodes together."""
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        """The node that GPU number `gpu` sits in."""
        return gpu // self.gpus_per_node


def load_gpu(name: str) -> Gpu:
    """The GPU of that name in the catalogue, e.g. `h100-sxm`; letter case does not matter.

    Raises `CatalogueError` if there is none, and `ConfigError` if its file is damaged.
    """
    known = catalogue.names("gpus")
    if name.lower() not in known:
        raise unknown_name("GPU", name, known)
    return load(known[name.lower()], Gpu)


def node_types() -> dict[str, Cluster]:
    """The catalogue's nodes by what names of clusters call their GPU (`h100`): a full node, and its link to others.

    A node without `inter` is one whose link to others is not known.
    """
    return {name.partition("x")[2]: load(path, Cluster) for name, path in catalogue.names("clusters").items()}


def load_cluster(cluster: str | Mapping[str, Any], source: str = "") -> Cluster:
    """A cluster by name, by a `.yaml` path, or spelled out as a mapping (see `Cluster`).

    A name is nodes x GPUs of a node x GPU, the nodes left out if it is one: `4x8xh100`, `2xh100`. Nodes are those of
    `rlsim list clusters`, or parts of them. `source` is the file that a mapping is from, for error messages. Raises
    `CatalogueError` for an unknown cluster, and `ConfigError` for a mapping with mistakes (an unknown GPU among them).
    """
    if not isinstance(cluster, str):
        return validate(cluster, Cluster, source)
    if cluster.endswith((".yaml", ".yml")):
        return load(Path(cluster), Cluster)
    named, known = _CLUSTER_NAME.fullmatch(cluster.lower()), node_types()
    nodes = int(named["nodes"] or 1) if named else 1
    node = known.get(named["gpu"]) if named else None
    if named is None or node is None or int(named["gpus"]) > node.gpus_per_node:
        several = f"{nodes}x" if nodes > 1 else ""
        usual = [several + one.name for one in known.values() if one.inter is not None or not several]
        raise unknown_name("cluster", cluster, usual)
    if nodes > 1 and node.inter is None:
        raise CatalogueError(
            f"cluster {shown(cluster)}: the catalogue does not know the link between nodes of {named['gpu']}, only of "
            f"{', '.join(gpu for gpu in known if known[gpu].inter)}; spell the cluster out, with `inter`"
        )
    name = cluster.lower() if nodes > 1 else f"{named['gpus']}x{named['gpu']}"
    size = {"name": name, "nodes": nodes, "gpus_per_node": int(named["gpus"])}
    return validate({**node.model_dump(), **size, **({} if nodes > 1 else {"inter": None})}, Cluster, name)

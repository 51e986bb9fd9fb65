"""GPUs, links and clusters: published data-sheet figures, one YAML file each under `rlsim/data`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from rlsim.base import catalogue
from rlsim.base.reading import read_yaml
from rlsim.base.schema import Name, Schema, load, validate
from rlsim.errors import CatalogueError, ConfigError, RlsimError, shown, unknown_name
from rlsim.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds

#: GPUs of a cluster: more than any training run has had.
MOST_GPUS = 65_536

_CLUSTER_NAME = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,5})x)?(?P<gpus>[1-9][0-9]{0,3})x(?P<gpu>[a-z].*)")


class Gpu(Schema):
    """One GPU, by its data sheet."""

    name: Name
    title: str = ""
    memory_bytes: Bytes = Field(gt=0)
    memory_bytes_per_s: BytesPerSecond = Field(ge=1)
    bf16_flop_per_s: FlopPerSecond = Field(ge=1)
    fp8_flop_per_s: FlopPerSecond | None = Field(default=None, ge=1)
    fp4_flop_per_s: FlopPerSecond | None = Field(default=None, ge=1)
    l2_bytes: Bytes = Field(gt=0)
    sm_count: int = Field(gt=0, le=1_000_000)
    source: str
    like: Name | None = None


class Link(Schema):
    """A path between GPUs, or between a GPU and host memory."""

    name: Name
    bytes_per_s: BytesPerSecond = Field(ge=1)
    latency_s: Seconds = Field(ge=0, le=10)
    shared_by_gpus: int = Field(default=1, gt=0, le=MOST_GPUS)

    def at(self, times: float) -> Link:
        """The link at so many times its rate."""
        return self if times == 1.0 else self.model_copy(update={"bytes_per_s": self.bytes_per_s * times})


def _read_by(find: Callable[[Any], Any]) -> BeforeValidator:
    """Reads a value by `find`, whose errors are told as those of the value."""

    def read(value: Any) -> Any:
        try:
            return find(value)
        except RlsimError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


class Cluster(Schema):
    """Identical nodes of identical GPUs; GPU g sits in node g // gpus_per_node.

    Neighbouring nodes that `intra` joins are one NVLink domain: a single node, or up to 18 of a GB200 NVL72 rack. GPU g
    sits in domain g // domain_gpus; only messages between domains take `inter`.
    """

    name: Name = "custom"
    gpu: Annotated[Gpu, _read_by(lambda value: load_gpu(value) if isinstance(value, str) else value)]
    nodes: int = Field(gt=0, le=MOST_GPUS)
    gpus_per_node: int = Field(gt=0, le=1024)
    nodes_per_domain: int = Field(default=1, gt=0, le=MOST_GPUS)
    intra: Link
    inter: Link | None = None
    host: Link

    @property
    def gpus(self) -> int:
        """GPUs in all nodes together."""
        return self.nodes * self.gpus_per_node

    @property
    def kinds(self) -> tuple[str, ...]:
        """The name of its GPU, as the names of those of a `MixedCluster`."""
        return (self.gpu.name,)

    @property
    def nvlink(self) -> bool:
        """Whether NVLink joins its GPUs."""
        return self.intra.name.startswith("nvlink")

    @property
    def domain_gpus(self) -> int:
        """GPUs that `intra` joins: those of a node, or of all nodes of a domain."""
        return min(self.nodes_per_domain, self.nodes) * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        """The node that GPU number `gpu` sits in."""
        return gpu // self.gpus_per_node

    def domain_of(self, gpu: int) -> int:
        """The NVLink domain that GPU number `gpu` sits in."""
        return gpu // self.domain_gpus

    def joined_at(self, network: float, inside: float = 1.0) -> Cluster:
        """The cluster with so many times the bandwidth between nodes, and inside them."""
        links = {"inter": self.inter and self.inter.at(network), "intra": self.intra.at(inside)}
        return self.model_copy(update=links)

    def gpu_at(self, number: int) -> Gpu:  # noqa: ARG002
        """The GPU of that number."""
        return self.gpu

    def around(self, gpus: Iterable[int], what: str = "a call") -> Cluster:  # noqa: ARG002
        """The cluster, as in `MixedCluster.around`."""
        return self


class MixedCluster(Schema):
    """Groups of nodes, each of one kind of GPU. Nodes and GPUs are numbered on from group to group."""

    name: Name = "custom"
    groups: Annotated[tuple[Cluster, ...], _read_by(lambda value: _groups(value))] = Field(min_length=2)

    @model_validator(mode="after")
    def _kinds_have_names_of_their_own(self) -> MixedCluster:
        first: dict[str, Cluster] = {}
        for group in self.groups:
            like = first.setdefault(group.gpu.name, group)
            if group.model_copy(update={"name": like.name, "nodes": like.nodes}) != like:
                raise ValueError(
                    f"groups of {group.gpu.name} differ in GPU or links: give their GPUs names of their own"
                )
        return self

    @property
    def nodes(self) -> int:
        """Nodes of all groups together."""
        return sum(group.nodes for group in self.groups)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node, in all groups."""
        return self.groups[0].gpus_per_node

    @property
    def gpus(self) -> int:
        """GPUs of all groups together."""
        return self.nodes * self.gpus_per_node

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its GPUs, in the order of the groups."""
        return tuple(dict.fromkeys(group.gpu.name for group in self.groups))

    @property
    def domain_gpus(self) -> int:
        """GPUs of each NVLink domain, in all groups."""
        return min(self.groups[0].nodes_per_domain, self.nodes) * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        """The node that GPU number `gpu` sits in."""
        return gpu // self.gpus_per_node

    def domain_of(self, gpu: int) -> int:
        """The NVLink domain that GPU number `gpu` sits in."""
        return gpu // self.domain_gpus

    def joined_at(self, network: float, inside: float = 1.0) -> MixedCluster:
        """The cluster with so many times the bandwidth between nodes, and inside them."""
        return self.model_copy(update={"groups": tuple(group.joined_at(network, inside) for group in self.groups)})

    def gpu_at(self, number: int) -> Gpu:
        """The GPU of that number."""
        return self._group_of(number).gpu

    def _group_of(self, gpu: int) -> Cluster:
        node = self.node_of(gpu)
        for group in self.groups[:-1]:
            if node < group.nodes:
                return group
            node -= group.nodes
        return self.groups[-1]

    def around(self, gpus: Iterable[int], what: str = "a call") -> Cluster:
        """The cluster as these GPUs of one kind know it: numbered as it is, with every node like theirs.

        Raises `ConfigError`, about `what` they are for, if they are of several kinds.
        """
        found = {group.gpu.name: group for group in map(self._group_of, gpus)}
        if len(found) != 1:
            raise ConfigError(
                f"{what} is placed on GPUs of several kinds ({', '.join(found)}) of cluster {self.name}; every call "
                "needs GPUs of one kind: `split` places generation apart from the others"
            )
        (group,) = found.values()
        return group.model_copy(update={"name": self.name, "nodes": self.nodes})


def _groups(value: Any) -> Any:
    """A list of groups, those by name as the catalogue has them."""
    groups = value if isinstance(value, list | tuple) else []
    return [_named(one, joined=True) if isinstance(one, str) else one for one in groups] or value


AnyCluster: TypeAlias = Cluster | MixedCluster


def one_kind(cluster: AnyCluster, what: str) -> Cluster:
    """The cluster, if its GPUs are of one kind, however spelled; else raises `ConfigError` about `what` needs that."""
    if len(cluster.kinds) == 1:
        return cluster.around(range(cluster.gpus))
    kinds = ", ".join(cluster.kinds)
    raise ConfigError(f"{what} needs nodes of one kind; cluster {cluster.name} has groups of {kinds}")


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


def spread_evenly(nodes: int, most: int) -> int:
    """Nodes of each NVLink domain if `nodes` nodes take as few domains of at most `most` as they need.

    As many in each where the number divides, as schedulers place the nodes of a job in segments (Slurm's `--segment`):
    32 nodes are 16 in each of two racks of 18. Else all domains but the last are full.
    """
    domains = -(-nodes // most)
    return most if domains == 1 or nodes % domains else nodes // domains


def load_any_cluster(cluster: str | Mapping[str, Any], source: str = "") -> AnyCluster:
    """A cluster by name, by a `.yaml` path, or spelled out as a mapping (see `Cluster` and `MixedCluster`).

    A name is nodes x GPUs of a node x GPU, the nodes left out if it is one: `4x8xh100`, `2xh100`. Nodes are those of
    `rlsim list clusters`, or parts of them, those of racks spread by `spread_evenly`. Groups of several kinds are
    joined by a plus: `2x8xh20+1x8xh800`. `source` is the file that a mapping is from, for error messages. Raises
    `CatalogueError` for an unknown cluster, and `ConfigError` for a mapping or groups with mistakes (an unknown GPU
    among them).
    """
    if not isinstance(cluster, str):
        return validate(cluster, MixedCluster, source) if "groups" in cluster else validate(cluster, Cluster, source)
    if cluster.endswith((".yaml", ".yml")):
        path, data = Path(cluster), read_yaml(Path(cluster))
        several = isinstance(data, Mapping) and "groups" in data
        return load(path, MixedCluster) if several else load(path, Cluster)
    if "+" in cluster:
        groups = [_named(part or cluster, joined=True) for part in cluster.split("+")]
        return validate({"name": cluster.lower(), "groups": groups}, MixedCluster, f"cluster {shown(cluster)}")
    return _named(cluster)


def load_cluster(cluster: str | Mapping[str, Any], source: str = "") -> Cluster:
    """A cluster of one kind of GPU, as `load_any_cluster`; raises `ConfigError` for one of several."""
    return one_kind(load_any_cluster(cluster, source), "rlsim init or calibrate")


def _named(cluster: str, *, joined: bool = False) -> Cluster:
    """A cluster of one kind by its name; `joined` to other nodes even where it is only one."""
    named, known = _CLUSTER_NAME.fullmatch(cluster.lower()), node_types()
    nodes = int(named["nodes"] or 1) if named else 1
    node = known.get(named["gpu"]) if named else None
    if named is None or node is None or int(named["gpus"]) > node.gpus_per_node:
        if named and node and node.inter is not None and int(named["gpus"]) % node.gpus_per_node == 0:
            whole = nodes * int(named["gpus"]) // node.gpus_per_node
            spelled = f"{whole}x{node.gpus_per_node}x{named['gpu']}"
            raise CatalogueError(
                f"cluster {shown(cluster)}: a node of {named['gpu']} has {node.gpus_per_node} GPUs; "
                f"did you mean {spelled!r}?"
            )
        several = f"{nodes}x" if nodes > 1 else ""
        usual = [several + one.name for one in known.values() if one.inter is not None or not several]
        raise unknown_name("cluster", cluster, usual)
    linked = nodes > 1 or joined
    if linked and node.inter is None:
        raise CatalogueError(
            f"cluster {shown(cluster)}: the catalogue does not know the link between nodes of {named['gpu']}, only of "
            f"{', '.join(gpu for gpu in known if known[gpu].inter)}; spell the cluster out, with `inter`"
        )
    name = cluster.lower() if nodes > 1 else f"{named['gpus']}x{named['gpu']}"
    size = {"name": name, "nodes": nodes, "gpus_per_node": int(named["gpus"])}
    if not joined:
        size["nodes_per_domain"] = spread_evenly(nodes, node.nodes_per_domain)
    return validate({**node.model_dump(), **size, **({} if linked else {"inter": None})}, Cluster, name)

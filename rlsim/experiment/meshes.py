"""The GPUs that a search of plans may give to a call, and the degrees that use all of them."""

from __future__ import annotations

from collections.abc import Iterator

from rlsim.errors import ConfigError

#: Whole nodes: any run of neighbouring ones up to so many nodes in the cluster, aligned powers of two beyond.
ANY_RUN_NODES = 8

#: At most so many splits of the GPUs are tried where generation has some of its own.
SPLITS = 16


def meshes(gpus: int, per_node: int) -> Iterator[tuple[int, int]]:
    """First GPU and size of every mesh: aligned power-of-two slices of a node, and runs of whole nodes."""
    size = 1
    while size < per_node:
        yield from ((first, size) for first in range(0, gpus, size) if per_node % size == 0)
        size *= 2
    nodes = gpus // per_node
    for count in range(1, nodes + 1):
        power = count & (count - 1) == 0
        if nodes <= ANY_RUN_NODES or power or count == nodes:
            step = 1 if nodes <= ANY_RUN_NODES else count
            yield from ((first * per_node, count * per_node) for first in range(0, nodes - count + 1, step))


def borders(gpus: int) -> range:
    """The numbers of GPUs, out of so many, that are tried for generation: multiples of the same power of two."""
    if gpus < 2:
        raise ConfigError("generation that runs ahead needs GPUs of its own: a cluster of one GPU cannot be split")
    step = 1 << (-(-gpus // SPLITS) - 1).bit_length()
    return range(step, gpus, step)


def degrees(gpus: int, per_node: int) -> Iterator[tuple[int, int]]:
    """TP and PP that leave no GPU of a mesh unused: TP a power of two inside a node, PP what divides the rest."""
    tp = 1
    while tp <= per_node:
        if gpus % tp == 0:
            yield from ((tp, pp) for pp in range(1, gpus // tp + 1) if gpus // tp % pp == 0)
        tp *= 2

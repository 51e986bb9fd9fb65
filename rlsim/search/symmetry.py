"""Permutations of GPUs that change nothing: plans that differ by one of them cost the same, so one of them will do."""

from __future__ import annotations

import numpy as np

from rlsim.search.partial import PairCosts
from rlsim.search.problem import Problem
from rlsim.search.scheduling import Bools, Ints

LARGEST_GROUP = 4096  # permutations kept; fewer than all only keep more plans than needed


def mesh_permutations(problem: Problem, meshes: Ints, pairs: PairCosts) -> Ints:
    """Permutations (p, m) of meshes (m, 2; first GPU and GPUs) under which seconds and bytes of all plans are equal.

    Made of exchanges of the halves of aligned power-of-two blocks of GPUs. An exchange counts if every call has as many
    options on a mesh as on its image, with equal values one by one, and if `pairs` do not change with it, all to the
    last bit. The identity comes first.
    """
    index = {(int(first), int(gpus)): at for at, (first, gpus) in enumerate(meshes)}
    of_option = [
        np.array([index[f, g] for f, g in zip(options.first_gpu.tolist(), options.gpus.tolist(), strict=True)])
        for options in problem.options
    ]
    exchanges = []
    half = 1
    while 2 * half <= problem.gpus:
        for first in range(0, problem.gpus - 2 * half + 1, 2 * half):
            image = _mesh_images(index, first, half)
            if image is not None and _changes_nothing(problem, image, of_option, pairs):
                exchanges.append(image)
        half *= 2
    return _group(exchanges, len(meshes))


def _mesh_images(index: dict[tuple[int, int], int], first: int, half: int) -> Ints | None:
    """Where each mesh goes when GPUs from `first` change places with those `half` further on; None if to no mesh."""
    images = []
    for start, gpus in index:
        inside = first <= start and start + gpus <= first + 2 * half
        if inside and gpus <= half and (start - first) % half + gpus <= half:
            start = start + half if start < first + half else start - half
        elif not (
            start + gpus <= first or first + 2 * half <= start or (start <= first and first + 2 * half <= start + gpus)
        ):
            return None  # it holds a part of the block
        if (start, gpus) not in index:
            return None
        images.append(index[start, gpus])
    return np.array(images)


def _changes_nothing(problem: Problem, image: Ints, of_option: list[Ints], pairs: PairCosts) -> bool:
    moved = []
    for options, meshes in zip(problem.options, of_option, strict=True):
        to = np.empty(len(options), dtype=np.int64)
        for mesh in np.unique(meshes):
            here, there = np.flatnonzero(meshes == mesh), np.flatnonzero(meshes == image[mesh])
            if len(here) != len(there):
                return False
            to[here] = there
        columns = (options.time_s, options.resident_bytes, options.active_bytes)
        if any((values != values[to]).any() for values in columns):
            return False
        moved.append(to)
    return all(
        np.array_equal(values, values[np.ix_(moved[source], moved[target])])
        for some in pairs
        for source, target, values in some
    )


def _group(exchanges: list[Ints], meshes: int) -> Ints:
    """All permutations that exchanges make when done one after another, up to `LARGEST_GROUP`."""
    identity = tuple(range(meshes))
    known, new = {identity: None}, [identity]
    while new and len(known) < LARGEST_GROUP:
        before, new = new, []
        for permutation in before:
            for exchange in exchanges:
                made = tuple(exchange[list(permutation)].tolist())
                if made not in known:
                    known[made] = None
                    new.append(made)
    return np.array(list(known), dtype=np.int64)


def smallest_of_its_images(permutations: Ints, fixing: Bools, meshes: Ints) -> Bools:
    """Which choices of the next call's mesh (n,) to keep: no permutation that `fixing` (n, p) marks makes it smaller.

    With `fixing` the permutations that leave all meshes chosen before in place, what is kept in the end are the plans
    whose list of mesh numbers is the smallest among its images.
    """
    smaller = meshes[:, None] > permutations[:, meshes].T
    drop: Bools = np.any(fixing & smaller, axis=1)
    return np.logical_not(drop)

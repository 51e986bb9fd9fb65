"""Plan problems for tests and benchmarks: random small ones, and PPO on one node with costs by rules of thumb."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlsim.workflow.search import Dependency, Options, Problem, Reallocation

GIB = 2.0**30


class Span(NamedTuple):
    """One call, or one reallocation (named `source -> target`), of one iteration in a schedule."""

    name: str
    iteration: int
    start_at: float
    end_at: float


def schedule(problem: Problem, plan: Sequence[int]) -> list[Span]:
    """Who runs when in one plan, by start: calls and reallocations of all iterations. Same rule as `cost_s`."""
    checked = [int(option) for option in plan]
    spans, names = problem.single.spans(checked), problem.graph.names
    _, moves_s = problem.single.seconds(checked)
    free = {name for name, s in zip(names[len(problem.calls) :], moves_s, strict=True) if s == 0}
    listed = [
        Span(names[kind], iteration, *spans[node])
        for node, (iteration, kind) in enumerate(problem.graph.nodes)
        if names[kind] not in free
    ]
    return sorted(listed, key=lambda span: (span.start_at, span.end_at))


def fits(problem: Problem, plans: np.ndarray | list[list[int]]) -> np.ndarray:
    """Whether each plan's fullest GPU has room for it, (n, C) -> (n,)."""
    return problem.peak_bytes(plans) <= problem.memory_bytes


def aligned_meshes(gpus: int) -> list[tuple[int, int]]:
    """(first GPU, GPUs) of all aligned power-of-two slices."""
    sizes = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    return [(first, size) for size in sizes for first in range(0, gpus, size)]


def table(values: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A cost of two options from a matrix."""
    return lambda source, target: values[source, target]


def random_options(rng: np.random.Generator, call: str, gpus: int, count: int) -> Options:
    meshes = aligned_meshes(gpus)
    first, size = np.array([meshes[i] for i in rng.integers(len(meshes), size=count)]).T
    time_s = rng.uniform(0.5, 1.5, count) * rng.uniform(1, 8) / size**0.8
    return Options(call, first, size, time_s, rng.uniform(0, 20, count) * GIB / size, rng.uniform(0, 30, count) * GIB)


def random_ppo(rng: np.random.Generator, *, gpus: int = 4, options: int = 4, memory_gib: float = 60.0) -> Problem:
    """PPO's six calls with unrelated random costs."""
    names = ["generate", "reward", "reference", "value", "train_critic", "train_actor"]
    sizes = dict.fromkeys(names, options)
    f = lambda source, target: table(rng.uniform(0, 0.3, (sizes[source], sizes[target])))  # noqa: E731
    move = lambda s, t: table(rng.choice([0.0, 0.2, 0.5], (sizes[s], sizes[t])) * rng.uniform(0.5, 1))  # noqa: E731
    middle = ["reward", "reference", "value"]
    return Problem(
        [random_options(rng, name, gpus, options) for name in names],
        [
            *(Dependency("generate", name, seconds=f("generate", name)) for name in middle),
            *(Dependency(a, b, seconds=f(a, b)) for a in middle for b in ("train_actor", "train_critic")),
            Dependency("train_critic", "train_critic", lag=1),
            Dependency("train_critic", "value", lag=1),
        ],
        [
            Reallocation("train_actor", "generate", move("train_actor", "generate"), lambda s, t: (s != t) * GIB),
            Reallocation("train_critic", "value", move("train_critic", "value")),
        ],
        gpus,
        memory_gib * GIB,
    )


def random_graph(rng: np.random.Generator, *, gpus: int = 4, calls: int = 5, options: int = 4) -> Problem:
    """Any graph: random edges with lags 0 to 2 and random reallocations."""
    names = [f"c{i}" for i in range(calls)]
    edges = [
        Dependency(names[a], names[b], seconds=table(rng.uniform(0, 0.4, (options, options))))
        for a, b in itertools.combinations(range(calls), 2)
        if rng.random() < 0.4
    ]
    edges += [Dependency(*rng.choice(names, 2), lag=int(rng.integers(1, 3))) for _ in range(rng.integers(4))]
    pairs = {tuple(rng.choice(names, 2, replace=False)) for _ in range(rng.integers(4))}
    moves = [
        Reallocation(a, b, table(rng.choice([0.0, 0.3, 0.7], (options, options)) * rng.uniform(0.5, 1)))
        for a, b in sorted(pairs)
    ]
    made = [random_options(rng, name, gpus, options) for name in names]
    return Problem(made, edges, moves, gpus, 80 * GIB, int(rng.integers(2, 5)))


def ppo_node(*, gpus: int = 8, seed: int = 0, memory_gib: float = 80.0, scaling: float = 1.0) -> Problem:
    """PPO with 7B actor and critic: aligned meshes x (TP, PP, DP) x micro-batches, costs by rules of thumb with noise.

    The noise is per (call, layout, micro-batches), so that equal layouts on equal meshes cost the same wherever they
    are. Alone a call takes 1 / GPUs ** `scaling` of its time on one GPU. Bytes: 16 a parameter for training, 2 for
    inference; transfers by what the target's GPUs lack.
    """
    rng = np.random.default_rng(seed)
    layouts: dict[int, list[tuple[int, int]]] = {}
    for size in {size for _, size in aligned_meshes(gpus)}:
        powers = [2**i for i in range(size.bit_length()) if 2**i <= size]
        layouts[size] = [(tp, pp) for tp in powers for pp in powers if tp * pp <= size and tp <= 8 and pp <= 8]
    parameters = 8e9
    # name, model bytes a parameter kept, seconds on one GPU, what pipelining and tensor parallelism cost.
    kinds = {
        "generate": (2.0, 120.0, 0.5, 0.08),
        "reward": (2.0, 35.0, 0.15, 0.12),
        "reference": (2.0, 38.0, 0.15, 0.12),
        "value": (2.0, 35.0, 0.15, 0.12),
        "train_critic": (16.0, 150.0, 0.2, 0.15),
        "train_actor": (16.0, 160.0, 0.2, 0.15),
    }
    made, shapes = [], {}
    for name, (kept, alone_s, pipe, tensor) in kinds.items():
        rows, shape, noise = [], [], {}
        for (first, size), micro in itertools.product(aligned_meshes(gpus), (1, 2, 4)):
            for tp, pp in layouts[size]:
                dp = size // tp // pp
                drawn = noise.setdefault((size, tp, pp, micro), rng.uniform(0.97, 1.03))
                bubble = 1 + pipe * (pp - 1) / (micro * (pp if name != "generate" else 1))
                across = 1 + tensor * np.log2(tp) * (1 + 0.02 * micro)
                seconds = (
                    alone_s / size**scaling * bubble * across * (1 + 0.03 * np.log2(dp)) * (1 + 0.015 * micro) * drawn
                )
                resident = kept * parameters / (tp * pp * (dp if kept > 2 else 1)) + (
                    2 * parameters / (tp * pp) if kept > 2 else 0
                )
                rows.append((first, size, seconds, resident, 60e9 / size / micro * pp**0.5 + 1e9))
                shape.append((first, size, tp, pp))
        made.append(Options(name, *np.array(rows).T))
        shapes[name] = np.array(shape)

    def moved(source: str, target: str, volume_s: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        a, b = shapes[source], shapes[target]

        def seconds(s: np.ndarray, t: np.ndarray) -> np.ndarray:
            one, two = a[s], b[t]
            same = (one == two).all(axis=-1)
            shared = np.minimum(one[..., 0] + one[..., 1], two[..., 0] + two[..., 1]) - np.maximum(
                one[..., 0], two[..., 0]
            )
            lacking = 1 - np.maximum(shared, 0) / two[..., 1] / np.maximum(two[..., 2] * two[..., 3], 1)
            return np.where(same, 0.0, volume_s * lacking / (two[..., 2] * two[..., 3]))

        return seconds

    middle = ["reward", "reference", "value"]
    return Problem(
        made,
        [
            *(Dependency("generate", name, seconds=moved("generate", name, 0.02)) for name in middle),
            *(Dependency(a, b, seconds=moved(a, b, 0.02)) for a in middle for b in ("train_actor", "train_critic")),
            Dependency("train_critic", "train_critic", lag=1),
        ],
        [
            Reallocation("train_actor", "generate", moved("train_actor", "generate", 0.6)),
            Reallocation("train_critic", "value", moved("train_critic", "value", 0.6)),
        ],
        gpus,
        memory_gib * GIB,
    )

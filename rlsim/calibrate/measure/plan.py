"""Which points to measure, and in which order: in rounds, each over the whole range, ever finer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.calibrate.measure.journal import Point
from rlsim.cost.collectives import OPERATIONS
from rlsim.cost.memory import kv_page_bytes, rollout_weight_bytes
from rlsim.cost.transfer import kv_rank_bytes
from rlsim.models import Model

#: Points of every operator in the first round; the next has twice as many, and so on.
FIRST = {
    "gemm": 24,
    "collective": 18,
    "decode_attention": 12,
    "prefill_attention": 12,
    "decode_step": 8,
    "memory_bound": 6,
    "train_block": 4,
    "prefill_step": 4,
    "control": 4,
    "copy": 3,
    "optimizer": 1,
    "graph_capture": 1,
    "reshard": 1,
    "migrate": 1,
}


@dataclass(frozen=True)
class Task:
    """A point, and what its benchmark is called with: the point's values, unless the key alone does not tell."""

    point: Point
    arguments: tuple[Any, ...]

    @staticmethod
    def of(operator: str, *values: str | float, arguments: tuple[Any, ...] | None = None) -> Task:
        """The task of a point by its values."""
        return Task(Point(operator, values), values if arguments is None else arguments)


@dataclass(frozen=True)
class GridSetup:
    """What the grid depends on. `memory_bytes` is what one worker may use; a call that would take longer than
    `longest_call_s` on a slow core or an old GPU is left out."""

    device: str
    model: Model
    tps: tuple[int, ...]
    workers: int
    memory_bytes: float
    longest_call_s: float

    def quick(self, flops: float, size: float) -> bool:
        """Whether a call of this work and these bytes is short enough on a slow core, or an old GPU."""
        flop_per_s, bytes_per_s = (3e10, 4e9) if self.device == "cpu" else (1e14, 6e11)
        return flops / flop_per_s + size / bytes_per_s <= self.longest_call_s

    def fits(self, flops: float, size: float) -> bool:
        """Whether a call of this work and footprint (bytes) is worth measuring here."""
        return self.quick(flops, size) and size <= self.memory_bytes / 4

    def scores(self, bytes_: float) -> float:
        """Bytes of attention scores, which torch may keep on the CPU."""
        return bytes_ if self.device == "cpu" else 0.0

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(query heads, KV heads) on one device at every TP of the run."""
        attention = self.model.attention
        return list(dict.fromkeys((attention.heads // tp, attention.kv_heads_per_gpu(tp)) for tp in self.tps))


def plan(setup: GridSetup) -> list[Task]:
    """All points, each once, in the order to measure them.

    Every operator has the first of its points in the first round (`FIRST`), and in every further round twice as many.
    Within a round kernels and collectives come first, then whole steps of one TP after the other (the decoder fills the
    memory and takes its time to build), then changes of the layout.
    """
    makers = (_copies, _gemms, _decode_attention, _prefill_attention, _elementwise, _train, _optimizer, _collectives)
    phases = [[maker(setup) for maker in makers]]
    phases += [[_decode_steps(setup, tp), _prefill_steps(setup, tp), _captures(setup, tp)] for tp in setup.tps]
    phases += [[_reshards(setup), _migrations(setup), _controls(setup)]]
    ranked = []
    for phase, grids in enumerate(phases):
        for grid in grids:
            for index, task in enumerate({task.point: task for task in grid}.values()):
                ranked.append(((1 + index // FIRST[task.point.operator]).bit_length(), phase, task))
    return [task for *_, task in sorted(ranked, key=lambda found: found[:2])]


def level(place: int, count: int) -> int:
    """At which refinement a place in a row of `count` is first visited: the ends at 0, then the middle, and so on."""
    return 0 if place in (0, count - 1) else count.bit_length() - (place & -place).bit_length()


def coarse_to_fine(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every combination of the axes' values, those first that are coarse on all axes together."""
    ranked = [[(level(i, len(axis)), value) for i, value in enumerate(axis)] for axis in axes]
    combinations = sorted(itertools.product(*ranked), key=lambda found: sum(rank for rank, _ in found))
    return (tuple(value for _, value in found) for found in combinations)


def doublings(low: int, high: int, steps: int = 1) -> list[int]:
    """Whole numbers from `low` to at most `high`, `steps` to a doubling."""
    values = (round(low * 2 ** (exponent / steps)) for exponent in itertools.count())
    return list(dict.fromkeys(itertools.takewhile(lambda value: value <= high, values)))


def contexts(batch: int, mean: int, longest: int) -> list[int]:
    """`batch` context lengths with this mean and maximum: one of `longest` tokens, the rest alike.

    Raises `ValueError` if there are none.
    """
    rest = batch * mean - longest
    if batch == 1 or rest < batch - 1 or longest < mean:
        if longest == mean:
            return [mean] * batch
        raise ValueError(f"{batch} contexts cannot have a mean of {mean} and a longest of {longest}")
    base, more = divmod(rest, batch - 1)
    return [longest, *(base + (i < more) for i in range(batch - 1))]


# Kernels --------------------------------------------------------------------------------------------------------------


def _copies(setup: GridSetup) -> Iterator[Task]:
    kinds = ["device"] if setup.device == "cpu" else ["device", "host_to_device", "device_to_host"]
    for (size,) in coarse_to_fine([size for size in doublings(2**14, 2**32) if setup.fits(0, 4 * size)]):
        yield from (Task.of("copy", kind, size) for kind in kinds)


def _gemms(setup: GridSetup) -> Iterator[Task]:
    """Large squares first, for the peak rate; then the model's products at every TP it allows, the run's own first,
    and those of narrower and wider models, all at few token counts and then at ever more: held-out points need shapes
    enough."""
    model, element = setup.model, setup.model.dtype_bytes

    def fits(m: int, n: int, k: int) -> bool:
        return setup.fits(2.0 * m * n * k, element * (n * k + m * (n + k)))

    sides = [side for side in (512, 1024, 2048, 4096, 8192) if fits(side, side, side)]
    yield from (Task.of("gemm", side, side, side) for side in sides[-2:])
    degrees = [*setup.tps, *(tp for tp in (1, 2, 4, 8) if tp not in setup.tps and model.supports_tp(tp))]
    linears = [linear for tp in degrees for linear in (*model.layer.linears(tp), model.head(tp))]
    own = [(linear.n_out, linear.k_in) for linear in linears]
    others = [(round(n * a), round(k * b)) for a, b in ((0.5, 2), (2, 0.5), (0.75, 0.75), (1.5, 1.5)) for n, k in own]
    shapes = [shape for shape in dict.fromkeys([*own, *others]) if min(shape) >= 16]
    ranked = []
    for index, shape in enumerate(shapes):
        tokens = [m for m in [*doublings(1, 64), *doublings(96, 16384, 2)] if fits(m, *shape)]
        late = index / (len(own) / len(degrees))
        ranked += [(level(place, len(tokens)) + late, (m, *shape)) for place, m in enumerate(tokens)]
    yield from (Task.of("gemm", *values) for _, values in sorted(ranked, key=lambda found: found[0]))


def _decode_attention(setup: GridSetup) -> Iterator[Task]:
    """Equal contexts, and after every other point the same batch and mean with one long straggler."""
    dim = setup.model.head_dim
    grid = itertools.product(coarse_to_fine(doublings(1, 512), doublings(16, 2**17)), setup.heads)
    for index, ((batch, context), (q, kv)) in enumerate(grid):
        for longest in (context, 2 * context) if batch > 1 and index % 2 else (context,):
            read, shared = batch * longest, longest == context or batch > 2  # else nothing is left for the others
            if shared and setup.fits(4.0 * read * q * dim, 2.0 * read * kv * dim * setup.model.dtype_bytes):
                yield Task.of("decode_attention", batch, context, longest, q, kv, dim)


def _prefill_attention(setup: GridSetup) -> Iterator[Task]:
    """Whole prompts, and after every fourth point the same chunks on cached tokens."""
    dim = setup.model.head_dim
    grid = itertools.product(coarse_to_fine(doublings(16, 2**15), [1, 2, 4, 8, 16]), setup.heads)
    for index, ((new, batch), (q, kv)) in enumerate(grid):
        for prior in (0, 512, 4096) if index % 4 == 3 else (0,):
            pairs = float(new * (prior + new))
            size = 2.0 * batch * (prior + new) * (q + kv) * dim * setup.model.dtype_bytes
            if setup.fits(4.0 * batch * pairs * q * dim, setup.scores(4.0 * q * pairs) + size):
                yield Task.of("prefill_attention", batch, new, prior, q, kv, dim)


def _elementwise(setup: GridSetup) -> Iterator[Task]:
    """A layer's four kernels, with the bytes that the step model counts for them (`RooflineStep`)."""
    model = setup.model
    for (tokens,), tp in itertools.product(coarse_to_fine(doublings(1, 2**15)), setup.tps):
        heads, kv_heads = model.attention.heads // tp, model.attention.kv_heads_per_gpu(tp)
        width = model.layer.mlp.active_width // tp
        elements = 8 * model.hidden_size + (2 * heads + 3 * kv_heads) * model.head_dim + 3 * width
        size = int(tokens * elements * model.dtype_bytes)
        if setup.fits(0, 3 * size):
            arguments = (tokens, model.hidden_size, heads, kv_heads, model.head_dim, width)
            yield Task.of("memory_bound", 4, tokens, size, arguments=arguments)


def _train(setup: GridSetup) -> Iterator[Task]:
    model = setup.model
    if model.num_experts:  # the block measured is dense
        return
    q_dim, weights = model.attention.q_dim, model.layer.parameters
    passes = (("forward", 1), ("forward_backward", 3))
    for (tokens,), share, (direction, work) in itertools.product(coarse_to_fine(doublings(128, 2**15)), (1, 4), passes):
        length = tokens // share
        activations = tokens * (8 * model.hidden_size + 4 * q_dim + 4 * model.intermediate_size)
        scores = setup.scores(4.0 * share * length**2 * model.num_attention_heads)
        flops = work * (2.0 * weights * tokens + 4.0 * share * length**2 * q_dim)
        if setup.fits(flops, model.dtype_bytes * (2 * weights + 2 * activations) + scores):
            values = (direction, tokens, length)
            yield Task.of("train_block", model.name, *values, arguments=(model, *values))


def _optimizer(setup: GridSetup) -> Iterator[Task]:
    for (size,) in coarse_to_fine([size for size in doublings(2**14, 2**32) if setup.fits(0, 28 * size)]):
        yield Task.of("optimizer", size)


def _collectives(setup: GridSetup) -> Iterator[Task]:
    """Every operation at each group size; sizes are multiples of the group and of the element."""
    groups = [gpus for gpus in (2, 4, 8) if gpus <= setup.workers]
    sizes = [size for size in doublings(2**8, 2**30) if setup.fits(0, 8 * size)]
    for (size,), gpus, op in itertools.product(coarse_to_fine(sizes), groups, OPERATIONS):
        if op != "send_recv" or gpus == 2:
            yield Task.of("collective", op, gpus, size)


# Whole steps ----------------------------------------------------------------------------------------------------------


def _step_fits(setup: GridSetup, tp: int, tokens: float, pairs: float, cached: float) -> bool:
    """Whether a step over `tokens` new tokens with `pairs` of queries and keys and `cached` tokens read is short
    enough, and these tokens have room beside the weights, a little less than an engine would take."""
    model = setup.model
    flops = 2.0 * model.active_parameters * tokens + 4.0 * model.num_hidden_layers * model.attention.q_dim * pairs
    weights, kv = rollout_weight_bytes(model, tp), cached * kv_page_bytes(model, tp, 1)
    return weights + kv <= 0.8 * setup.memory_bytes and setup.quick(flops / tp, weights + kv)


def _decode_steps(setup: GridSetup, tp: int) -> Iterator[Task]:
    """Batches by mean contexts, denser below a few thousand tokens; graphs before eager steps."""
    means = [*doublings(16, 4096, 2), *doublings(8192, 2**17)]
    grid = list(coarse_to_fine(doublings(1, 512), means))
    for mode in ("graph", "eager") if setup.device == "cuda" else ("eager",):
        for batch, mean in grid:
            if _step_fits(setup, tp, batch, batch * mean, batch * mean):
                values = (tp, mode, batch, batch * mean)
                yield Task.of("decode_step", setup.model.name, *values, arguments=(setup.model, *values))


def _prefill_steps(setup: GridSetup, tp: int) -> Iterator[Task]:
    sizes = doublings(32, 2**14)
    for tokens, length in coarse_to_fine(sizes, sizes):
        if length <= tokens and _step_fits(setup, tp, tokens, tokens * length, tokens):
            values = (tp, tokens, length)
            yield Task.of("prefill_step", setup.model.name, *values, arguments=(setup.model, *values))


def _captures(setup: GridSetup, tp: int) -> Iterator[Task]:
    for (batch,) in coarse_to_fine(doublings(1, 256) if setup.device == "cuda" else []):
        yield Task.of("graph_capture", setup.model.name, tp, batch, arguments=(setup.model, tp, batch))


# Changes of the layout ------------------------------------------------------------------------------------------------


def _layouts(setup: GridSetup) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.permutations(setup.tps, 2) if setup.workers % max(a, b) == 0]


def reshard_bytes(model: Model, from_tp: int) -> float:
    """Bytes that one rank receives when weights are gathered from TP `from_tp` (`rlsim.cost.transfer.reshard_s`)."""
    return model.weight_bytes * (1.0 - 1.0 / from_tp)


def _reshards(setup: GridSetup) -> Iterator[Task]:
    """From TP 1 nothing is received, so there is no rate to measure."""
    for tps in _layouts(setup):
        if tps[0] > 1:
            received = round(reshard_bytes(setup.model, tps[0]))
            yield Task.of("reshard", setup.model.name, *tps, received, arguments=(setup.model, *tps))


def _migrations(setup: GridSetup) -> Iterator[Task]:
    """A few sequences of some length each, dealt over the replicas."""
    model = setup.model
    for (tokens,), tps in itertools.product(coarse_to_fine(doublings(32, 2**14)), _layouts(setup)):
        lengths = [tokens] * (4 * setup.workers)
        handled = round(kv_rank_bytes(model, sum(lengths), tps[0]))
        if setup.fits(0, 4.0 * handled):
            yield Task.of("migrate", model.name, *tps, handled, arguments=(model, *tps, lengths))


def _controls(setup: GridSetup) -> Iterator[Task]:
    return (Task.of("control", what) for what in ("pause", "group_create") if setup.workers > 1)

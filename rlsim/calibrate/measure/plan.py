"""Which points to measure, and in which order: coarse over the whole range first, then ever finer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.calibrate.measure.attention import contexts
from rlsim.calibrate.measure.journal import Point
from rlsim.calibrate.measure.kernels import DIRECTIONS
from rlsim.cost.collectives import OPERATIONS
from rlsim.cost.memory import kv_page_bytes, rollout_weight_bytes
from rlsim.cost.transfer import kv_rank_bytes
from rlsim.layers import Linear
from rlsim.models import Model

#: Share of the budget that each operator gets (what one does not use goes to the others), and the points that it gets
#: before the shares count, so that a small budget still gives something of everything.
BUDGET = {
    "decode_step": (0.26, 8),
    "prefill_step": (0.10, 4),
    "gemm": (0.18, 24),
    "decode_attention": (0.12, 12),
    "prefill_attention": (0.06, 12),
    "memory_bound": (0.04, 6),
    "copy": (0.03, 3),
    "collective": (0.08, 18),
    "train_block": (0.05, 4),
    "optimizer": (0.02, 1),
    "graph_capture": (0.02, 1),
    "reshard": (0.02, 1),
    "migrate": (0.02, 1),
    "control": (0.01, 4),
}
SHARES = {operator: share for operator, (share, _) in BUDGET.items()}
FIRST = {operator: points for operator, (_, points) in BUDGET.items()}


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

    def call_s(self, flops: float, size: float) -> float:
        """Seconds of a call of this work and footprint (bytes) on a slow core, or an old GPU: only bounds the grid."""
        flop_per_s, bytes_per_s = (3e10, 4e9) if self.device == "cpu" else (1e14, 6e11)
        return flops / flop_per_s + size / bytes_per_s

    def fits(self, flops: float, size: float) -> bool:
        """Whether a call of this work and footprint (bytes) is worth measuring here."""
        return self.call_s(flops, size) <= self.longest_call_s and size <= self.memory_bytes / 4


#: The tasks of every operator, in the order to measure them.
Phase = dict[str, list[Task]]


def plan(setup: GridSetup) -> list[Phase]:
    """Phases to go through one after another: kernels and collectives, whole steps of one TP after the other (the
    decoder fills the memory and takes its time to build), and changes of the layout."""
    cuda = setup.device == "cuda"
    kernels = {
        "copy": _copies(setup),
        "gemm": _gemms(setup),
        "decode_attention": _decode_attention(setup),
        "prefill_attention": _prefill_attention(setup),
        "memory_bound": _elementwise(setup),
        "train_block": _train(setup),
        "optimizer": _optimizer(setup),
        "collective": _collectives(setup),
    }
    steps: list[Mapping[str, Iterable[Task]]] = [
        {
            "decode_step": _decode_steps(setup, tp),
            "prefill_step": _prefill_steps(setup, tp),
            "graph_capture": _captures(setup, tp) if cuda else (),
        }
        for tp in setup.tps
    ]
    controls = [Task.of("control", what) for what in ("pause", "group_create")] if setup.workers > 1 else []
    changes = {"reshard": _reshards(setup), "migrate": _migrations(setup), "control": controls}
    return [phase for phase in map(_distinct, [kernels, *steps, changes]) if phase]


def _distinct(phase: Mapping[str, Iterable[Task]]) -> Phase:
    tasks = {operator: list({task.point: task for task in found}.values()) for operator, found in phase.items()}
    return {operator: found for operator, found in tasks.items() if found}


def levels(count: int) -> list[int]:
    """At which refinement each of `count` places in a row is first visited: the ends at 0, the middle at 1, the middles
    of both halves at 2, and so on."""
    found = [0] * count
    ranges = [(0, count - 1)]
    level = 0
    while ranges:
        level += 1
        halves = []
        for low, high in ranges:
            if high - low >= 2:
                middle = (low + high) // 2
                found[middle] = level
                halves += [(low, middle), (middle, high)]
        ranges = halves
    return found


def coarse_to_fine(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every combination of the axes' values, those first that are coarse on all axes together."""
    ranked = [list(zip(levels(len(axis)), axis, strict=True)) for axis in axes]
    combinations = sorted(itertools.product(*ranked), key=lambda found: sum(level for level, _ in found))
    return (tuple(value for _, value in found) for found in combinations)


def doublings(low: int, high: int, steps: int = 1) -> list[int]:
    """Whole numbers from `low` to at most `high`, `steps` to a doubling."""
    found: list[int] = []
    exponent = 0
    while (value := round(low * 2 ** (exponent / steps))) <= high:
        if not found or value > found[-1]:
            found.append(value)
        exponent += 1
    return found


def _copies(setup: GridSetup) -> Iterator[Task]:
    kinds = ["device"] if setup.device == "cpu" else ["device", "host_to_device", "device_to_host"]
    sizes = doublings(2**14, 2**32)
    for (size,) in coarse_to_fine([size for size in sizes if setup.fits(0, 4 * size)]):
        yield from (Task.of("copy", kind, size) for kind in kinds)


def _shapes(setup: GridSetup) -> list[tuple[int, int]]:
    """(n, k) of the model's products at every TP it allows, the run's own first; then of narrower and wider models."""
    model = setup.model
    degrees = [*setup.tps, *(tp for tp in (1, 2, 4, 8) if tp not in setup.tps and model.supports_tp(tp))]
    linears: list[Linear] = []
    for tp in degrees:
        linears += [*model.layer.linears(tp), model.head(tp)]
    own = [(linear.n_out, linear.k_in) for linear in linears]
    others = [(round(n * a), round(k * b)) for a, b in ((0.5, 2), (2, 0.5), (0.75, 0.75), (1.5, 1.5)) for n, k in own]
    return list(dict.fromkeys(shape for shape in [*own, *others] if min(shape) >= 16))


def _gemms(setup: GridSetup) -> Iterator[Task]:
    """All shapes at few token counts, then ever more: held-out points need shapes enough. Large products come first:
    they give the peak rate."""
    element = setup.model.dtype_bytes
    own = len(setup.model.layer.linears()) + 1
    counts = [*doublings(1, 64), *doublings(96, 16384, 2)]
    ranked = []
    for index, (n, k) in enumerate(_shapes(setup)):
        tokens = [m for m in counts if setup.fits(2.0 * m * n * k, element * (n * k + m * (n + k)))]
        ranked += [(level + index / own, n, k, m) for level, m in zip(levels(len(tokens)), tokens, strict=True)]
    largest = [(-1.0, n, k, m) for n, k, m in _largest(setup)]
    for _, n, k, m in sorted(largest + ranked, key=lambda found: found[0]):
        yield Task.of("gemm", m, n, k)


def _largest(setup: GridSetup) -> Iterator[tuple[int, int, int]]:
    """Square products for the peak rate, as large as the time for one call allows."""
    sides = [side for side in (512, 1024, 2048, 4096, 8192) if setup.fits(2.0 * side**3, 12.0 * side**2)]
    return ((side, side, side) for side in sides[-2:])


def _heads(setup: GridSetup) -> list[tuple[int, int]]:
    """(query heads, KV heads) on one device at every TP of the run."""
    attention = setup.model.attention
    return list(dict.fromkeys((attention.heads // tp, attention.kv_heads_per_gpu(tp)) for tp in setup.tps))


def _decode_attention(setup: GridSetup) -> Iterator[Task]:
    """Equal contexts, and after every other point the same batch and mean with one long straggler."""
    model = setup.model
    grid = itertools.product(coarse_to_fine(doublings(1, 512), doublings(16, 2**17)), _heads(setup))
    for index, ((batch, context), (q, kv)) in enumerate(grid):
        for longest in (context, 2 * context) if batch > 1 and index % 2 else (context,):
            token_bytes = 2.0 * kv * model.head_dim * model.dtype_bytes
            try:
                contexts(batch, context, longest)
            except ValueError:
                continue
            if setup.fits(4.0 * batch * longest * q * model.head_dim, batch * longest * token_bytes):
                yield Task.of("decode_attention", batch, context, longest, q, kv, model.head_dim)


def _prefill_attention(setup: GridSetup) -> Iterator[Task]:
    """Whole prompts, and after every other point the same chunks on cached tokens."""
    model = setup.model
    grid = itertools.product(coarse_to_fine(doublings(16, 2**15), [1, 2, 4, 8, 16]), _heads(setup))
    for index, ((new, batch), (q, kv)) in enumerate(grid):
        for prior in (0, 512, 4096) if index % 4 == 3 else (0,):
            flops = 4.0 * batch * new * (prior + new) * q * model.head_dim
            scores = 4.0 * q * new * (prior + new) if setup.device == "cpu" else 0.0  # torch may keep them all
            if setup.fits(flops, scores + 2.0 * batch * (prior + new) * (q + kv) * model.head_dim * model.dtype_bytes):
                yield Task.of("prefill_attention", batch, new, prior, q, kv, model.head_dim)


def _elementwise(setup: GridSetup) -> Iterator[Task]:
    """A layer's four kernels, with the bytes that the step model counts for them (`RooflineStep`)."""
    model = setup.model
    for (tokens,), tp in itertools.product(coarse_to_fine(doublings(1, 2**15)), setup.tps):
        heads, kv_heads = model.attention.heads // tp, model.attention.kv_heads_per_gpu(tp)
        width = model.layer.mlp.active_width // tp
        elements = 8 * model.hidden_size + (2 * heads + 3 * kv_heads) * model.head_dim + 3 * width
        size = int(tokens * elements * model.dtype_bytes)
        arguments = (tokens, model.hidden_size, heads, kv_heads, model.head_dim, width)
        if setup.fits(0, 3 * size):
            yield Task.of("memory_bound", 4, tokens, size, arguments=arguments)


def _train(setup: GridSetup) -> Iterator[Task]:
    model = setup.model
    if model.num_experts:  # the block measured is dense
        return
    q_dim, weights = model.attention.q_dim, model.layer.parameters
    for (tokens,), share, direction in itertools.product(coarse_to_fine(doublings(128, 2**15)), (1, 4), DIRECTIONS):
        length = tokens // share
        activations = tokens * (8 * model.hidden_size + 4 * q_dim + 4 * model.intermediate_size)
        scores = share * length**2 * model.num_attention_heads if setup.device == "cpu" else 0
        work = (3 if direction == "forward_backward" else 1) * (
            2.0 * weights * tokens + 4.0 * share * length**2 * q_dim
        )
        if setup.fits(work, model.dtype_bytes * (2 * weights + 2 * activations) + 4.0 * scores):
            yield Task.of(
                "train_block", model.name, direction, tokens, length, arguments=(model, direction, tokens, length)
            )


def _optimizer(setup: GridSetup) -> Iterator[Task]:
    sizes: Iterable[int] = doublings(2**14, 2**32)
    for (size,) in coarse_to_fine([size for size in sizes if setup.fits(0, 28 * size)]):
        yield Task.of("optimizer", size)


def _collectives(setup: GridSetup) -> Iterator[Task]:
    """Every operation at each group size; sizes are multiples of the group and of the element."""
    groups = [gpus for gpus in (2, 4, 8) if gpus <= setup.workers]
    if not groups:
        return
    sizes = doublings(2**8, 2**30)
    for (size,) in coarse_to_fine([size for size in sizes if setup.fits(0, 8 * size)]):
        for gpus, op in itertools.product(groups, OPERATIONS):
            if op != "send_recv" or gpus == 2:
                yield Task.of("collective", op, gpus, size)


def _kv_tokens(setup: GridSetup, tp: int) -> float:
    """Tokens of KV that a replica may hold beside its weights, a little less than an engine would take."""
    free = 0.8 * setup.memory_bytes - rollout_weight_bytes(setup.model, tp)
    return free / kv_page_bytes(setup.model, tp, 1)


def _step_fits(setup: GridSetup, tp: int, tokens: float, pairs: float, cached: float) -> bool:
    """Whether a step over `tokens` new tokens with `pairs` of queries and keys and `cached` tokens read is short
    enough."""
    model = setup.model
    flops = 2.0 * model.active_parameters * tokens + 4.0 * model.num_hidden_layers * model.attention.q_dim * pairs
    size = rollout_weight_bytes(model, tp) + cached * kv_page_bytes(model, tp, 1)
    return setup.call_s(flops / tp, size) <= setup.longest_call_s


def _decode_steps(setup: GridSetup, tp: int) -> Iterator[Task]:
    """Batches by mean contexts, denser below a few thousand tokens, within the KV budget; graphs before eager steps."""
    batches, means = doublings(1, 512), [*doublings(16, 4096, 2), *doublings(8192, 2**17)]
    ranked = []
    for batch, coarse in zip(batches, levels(len(batches)), strict=True):
        fit = [
            mean
            for mean in means
            if batch * mean <= _kv_tokens(setup, tp) and _step_fits(setup, tp, batch, batch * mean, batch * mean)
        ]
        ranked += [(coarse + level, batch, mean) for level, mean in zip(levels(len(fit)), fit, strict=True)]
    modes = ("graph", "eager") if setup.device == "cuda" else ("eager",)
    for mode in modes:
        for _, batch, mean in sorted(ranked):
            values = (tp, mode, batch, batch * mean)
            yield Task.of("decode_step", setup.model.name, *values, arguments=(setup.model, *values))


def _prefill_steps(setup: GridSetup, tp: int) -> Iterator[Task]:
    sizes = doublings(32, 2**14)
    fit = [
        (tokens, length)
        for tokens, length in coarse_to_fine(sizes, sizes)
        if length <= tokens <= _kv_tokens(setup, tp) and _step_fits(setup, tp, tokens, tokens * length, tokens)
    ]
    for tokens, length in fit:
        arguments = (setup.model, tp, tokens, length)
        yield Task.of("prefill_step", setup.model.name, tp, tokens, length, arguments=arguments)


def _captures(setup: GridSetup, tp: int) -> Iterator[Task]:
    for (batch,) in coarse_to_fine(doublings(1, 256)):
        yield Task.of("graph_capture", setup.model.name, tp, batch, arguments=(setup.model, tp, batch))


def _layouts(setup: GridSetup) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.permutations(setup.tps, 2) if setup.workers % max(a, b) == 0]


def reshard_bytes(model: Model, from_tp: int) -> float:
    """Bytes that one rank receives when weights are gathered from TP `from_tp` (`rlsim.cost.transfer.reshard_s`)."""
    return model.weight_bytes * (1.0 - 1.0 / from_tp)


def _reshards(setup: GridSetup) -> Iterator[Task]:
    """From TP 1 nothing is received, so there is no rate to measure."""
    model = setup.model
    for source, target in _layouts(setup):
        if source > 1:
            received = round(reshard_bytes(model, source))
            values = (source, target, received)
            yield Task.of("reshard", model.name, *values, arguments=(model, source, target))


def _migrations(setup: GridSetup) -> Iterator[Task]:
    """A few sequences of some length each, dealt over the replicas."""
    model = setup.model
    for (tokens,), (source, target) in itertools.product(coarse_to_fine(doublings(32, 2**14)), _layouts(setup)):
        contexts = [tokens] * (4 * setup.workers)
        handled = round(kv_rank_bytes(model, sum(contexts), source))
        if setup.fits(0, 4.0 * handled):
            arguments = (model, source, target, contexts)
            yield Task.of("migrate", model.name, source, target, handled, arguments=arguments)

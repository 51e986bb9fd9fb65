"""The measuring itself: point after point until the budget is spent. Every attempt is on disk before the next begins,
one line each, so that an interruption loses the one under way and no more."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from rlsim.calibrate.measure.bench import NOISY, Timing
from rlsim.calibrate.measure.host import MachineFacts
from rlsim.calibrate.measurements import KEYS, Measurements
from rlsim.cost.calibration import Source
from rlsim.cost.collectives import OPERATIONS
from rlsim.cost.memory import kv_page_bytes, rollout_weight_bytes
from rlsim.errors import CalibrationError
from rlsim.models.model import Model

ATTEMPTS = 4  # at a noisy point
#: What became of a point.
MEASURED, TOO_NOISY, IMPOSSIBLE, LEFT = STATES = ("measured", "too noisy", "not possible", "left (budget)")

#: Is told the point to measure next, how many of how many are done, and the seconds spent.
Report = Callable[["Point", int, int, float], None]


class Point(NamedTuple):
    """One row to measure: an operator and the values of its key columns, in the order of `measurements.KEYS`."""

    operator: str
    values: tuple[int | float | str, ...]

    def row(self) -> dict[str, Any]:
        return dict(zip(KEYS[self.operator], self.values, strict=True))


@dataclass
class Journal:
    """The journal file of one calibration run, open for more attempts: the machine, then a line for each attempt."""

    path: Path
    machine: MachineFacts
    attempts: defaultdict[Point, list[Timing]] = field(default_factory=lambda: defaultdict(list))

    @staticmethod
    def start(path: Path, machine: MachineFacts, *, fresh: bool = False) -> Journal:
        """The journal at `path`, begun for `machine`, or gone on with if there is one.

        A last line cut short by an interruption is removed. Raises `CalibrationError` if the journal there is damaged
        or of another machine or model; `fresh` discards it instead.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_bytes() if path.exists() else b""
        if there and not there.startswith(b'{"device":'):
            raise CalibrationError(f"{path}: is not rlsim's journal; move it away, or give another --out")
        lines = [] if fresh else there.split(b"\n")[:-1]  # what follows the last line break was cut short
        if not lines:
            path.write_text(machine.model_dump_json() + "\n", encoding="utf-8")
            return Journal(path, machine)
        journal, number = Journal(path, machine), 1
        try:
            journal.machine = MachineFacts.model_validate_json(lines[0])
            for line in lines[1:]:
                number += 1
                record = json.loads(line)
                operator, values = record.pop("point")
                point = Point(operator, tuple(values))
                point.row()  # it has the columns of its table
                journal.attempts[point].append(Timing(**record))
        except (ValueError, TypeError, LookupError, AttributeError):
            raise CalibrationError(f"{path}:{number}: damaged; mend the line, or begin anew with --fresh") from None
        machine.check_same(journal.machine, path)
        os.truncate(path, there.rindex(b"\n") + 1)
        return journal

    def add(self, point: Point, attempt: Timing) -> None:
        """Keeps an attempt, on disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"point": point, **asdict(attempt)}) + "\n")
        self.attempts[point].append(attempt)

    @property
    def spent_s(self) -> float:
        """Seconds that measuring took so far, over all runs."""
        return sum(attempt.took_s for found in self.attempts.values() for attempt in found)

    def best(self, point: Point) -> Timing:
        """The attempt at a point that has the smallest spread."""
        return min(self.attempts[point], key=lambda attempt: attempt.spread)

    def state(self, point: Point) -> str:
        """What became of a point, one of `STATES`."""
        if point not in self.attempts:
            return LEFT
        best = self.best(point)
        if best.impossible:
            return IMPOSSIBLE
        if best.spread <= NOISY:
            return MEASURED
        return LEFT if len(self.attempts[point]) < ATTEMPTS else TOO_NOISY

    def measurements(self, notes: Iterable[str] = ()) -> Measurements:
        """The measured points as tables; all others are in none."""
        rows = defaultdict[str, list[dict[str, Any]]](list)
        for point in self.attempts:
            if self.state(point) == MEASURED:
                best = self.best(point)
                rows[point.operator].append({**point.row(), "seconds": best.seconds, "spread": best.spread})
        versions = self.machine.versions
        source = Source(
            project=f"own measurement on {self.machine.name}",
            commit=f"rlsim {versions.get('rlsim', '')}".strip(),
            licence="own",
            files=(self.path.name,),
            engine_version=f"torch {versions.get('torch', '')}".strip(),
        )
        return Measurements({name: pd.DataFrame(found) for name, found in rows.items()}, (source,), tuple(notes))

    def counts(self, points: Iterable[Point]) -> dict[str, dict[str, int]]:
        """By operator, how many of these points are in each of `STATES`."""
        found: dict[str, dict[str, int]] = {}
        for point in points:
            found.setdefault(point.operator, dict.fromkeys(STATES, 0))[self.state(point)] += 1
        return found


def measure_all(
    rounds: Mapping[Point, int],
    journal: Journal,
    measure_point: Callable[[Point], Timing],
    *,
    budget_s: float,
    report: Report = lambda *_: None,
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Measures the points into `journal`, round after round in their order, until they are done or `budget_s` seconds
    of measuring are spent, those of the journal included.

    The noisy points of a round are tried again before the
    next round begins; after four attempts they are refused.
    """
    spent_s, done = journal.spent_s, sum(journal.state(point) != LEFT for point in rounds)
    for number, tried in itertools.product(sorted(set(rounds.values())), range(ATTEMPTS)):
        for point in (point for point, own in rounds.items() if own == number):
            if journal.state(point) != LEFT or len(journal.attempts.get(point, ())) != tried:
                continue
            if spent_s >= budget_s:
                return
            report(point, done, len(rounds), spent_s)
            began = now()
            found = measure_point(point)
            journal.add(point, found := replace(found, took_s=now() - began))
            spent_s += found.took_s
            done += journal.state(point) != LEFT


# Which points, and in which order: in rounds, each over the whole range, ever finer -----------------------------------


#: Points of every operator in the first round; the next has twice as many, and so on.
FIRST = {
    "gemm": 24,
    "collective": 18,
    "decode_attention": 12,
    "prefill_attention": 12,
    "decode_step": 8,
    "memory_bound": 6,
    "prefill_step": 4,
    "copy": 3,
}

T = TypeVar("T")
Grid = Iterable[tuple[str | float, ...]]  # values of one operator's points, coarse ones first


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

    def fits(self, flops: float, size: float, share: float = 0.25) -> bool:
        """Whether a call of this work and these bytes is short enough, and they are no more than that share of the
        memory."""
        flop_per_s, bytes_per_s = (3e10, 4e9) if self.device == "cpu" else (1e14, 6e11)
        return flops / flop_per_s + size / bytes_per_s <= self.longest_call_s and size <= share * self.memory_bytes

    def sizes(self, low: int, high: int, footprint: float) -> list[int]:
        """Doublings as far as `footprint` bytes for each fit."""
        return coarse_to_fine([[size for size in doublings(low, high) if self.fits(0, footprint * size)]])

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(query heads, KV heads) on one device at every TP of the run."""
        attention = self.model.attention
        return list(dict.fromkeys((attention.heads // tp, attention.kv_heads_per_gpu(tp)) for tp in self.tps))


def plan(setup: GridSetup) -> dict[Point, int]:
    """All points with their rounds, in the order to measure them.

    Every operator has the first of its points in the first round (`FIRST`), and in every further round twice as many.
    Within a round kernels and collectives come first, then whole steps of one TP after the other (the decoder fills the
    memory and takes its time to build).
    """
    kinds = ["device"] if setup.device == "cpu" else ["device", "host_to_device", "device_to_host"]
    phases: list[dict[str, Grid]] = [
        {
            "copy": [(kind, size) for size in setup.sizes(2**14, 2**32, 4) for kind in kinds],
            "gemm": _gemms(setup),
            "decode_attention": _decode_attention(setup),
            "prefill_attention": _prefill_attention(setup),
            "memory_bound": _elementwise(setup),
            "collective": _collectives(setup),
        },
        *(_steps(setup, tp) for tp in setup.tps),
    ]
    rounds = {
        Point(operator, values): (1 + index // FIRST[operator]).bit_length()
        for grids in phases
        for operator, grid in grids.items()
        for index, values in enumerate(dict.fromkeys(grid))
    }
    return dict(sorted(rounds.items(), key=lambda found: found[1]))


def level(place: int, count: int) -> int:
    """At which refinement a place in a row of `count` is first visited: the ends at 0, then the middle, and so on."""
    return 0 if place in (0, count - 1) else count.bit_length() - (place & -place).bit_length()


def coarse_to_fine(rows: Sequence[Sequence[T]]) -> list[T]:
    """The values of all rows, those first that are coarse both among the rows and in their row."""
    ranked = [
        (level(i, len(rows)) + level(j, len(row)), value) for i, row in enumerate(rows) for j, value in enumerate(row)
    ]
    return [value for _, value in sorted(ranked, key=lambda found: found[0])]


def doublings(low: int, high: int, steps: int = 1) -> list[int]:
    """Whole numbers from `low` to at most `high`, `steps` to a doubling."""
    values = (round(low * 2 ** (exponent / steps)) for exponent in itertools.count())
    return list(dict.fromkeys(itertools.takewhile(lambda value: value <= high, values)))


def equal_contexts(batch: int, total: int) -> list[int]:
    """`batch` whole numbers, as equal as possible, that add up to `total`."""
    return [total // batch + (i < total % batch) for i in range(batch)]


def contexts(batch: int, mean: int, longest: int) -> list[int]:
    """`batch` context lengths with this mean and maximum: one of `longest` tokens, the rest alike."""
    return [longest, *equal_contexts(batch - 1, batch * mean - longest)] if batch > 1 else [longest]


# The grid of every operator: values of `measurements.KEYS` -----------------------------------------------------------


def _gemms(setup: GridSetup) -> Grid:
    """Large squares first, for the peak rate; then the model's products at every TP it allows, the run's own first,
    and those of narrower and wider models: held-out points need shapes enough."""
    model, element = setup.model, setup.model.dtype_bytes

    def fits(m: int, n: int, k: int) -> bool:
        return setup.fits(2.0 * m * n * k, element * (n * k + m * (n + k)))

    squares = [(side,) * 3 for side in (512, 1024, 2048, 4096, 8192) if fits(side, side, side)]
    degrees = [*setup.tps, *(tp for tp in (1, 2, 4, 8) if tp not in setup.tps and model.supports_tp(tp))]
    linears = [linear for tp in degrees for linear in (*model.layer.linears(tp), model.head(tp))]
    own = [(linear.n_out, linear.k_in) for linear in linears]
    others = [(round(n * a), round(k * b)) for a, b in ((0.5, 2), (2, 0.5), (0.75, 0.75), (1.5, 1.5)) for n, k in own]
    shapes = [shape for shape in dict.fromkeys([*own, *others]) if min(shape) >= 16]
    tokens = [*doublings(1, 64), *doublings(96, 16384, 2)]
    return [*squares[-2:], *coarse_to_fine([[(m, *shape) for m in tokens if fits(m, *shape)] for shape in shapes])]


def _decode_attention(setup: GridSetup) -> Grid:
    """Equal contexts, and after every other point the same batch and mean with one long straggler."""
    dim = setup.model.head_dim
    sizes = coarse_to_fine([[(batch, context) for context in doublings(16, 2**17)] for batch in doublings(1, 512)])
    for index, ((batch, context), (q, kv)) in enumerate(itertools.product(sizes, setup.heads)):
        for longest in (context, 2 * context) if batch > 2 and index % 2 else (context,):
            read = batch * longest
            if setup.fits(4.0 * read * q * dim, 2.0 * read * kv * dim * setup.model.dtype_bytes):
                yield batch, context, longest, q, kv, dim


def _prefill_attention(setup: GridSetup) -> Grid:
    """Whole prompts, and after every fourth point the same chunks on cached tokens."""
    dim = setup.model.head_dim
    sizes = coarse_to_fine([[(new, batch) for batch in (1, 2, 4, 8, 16)] for new in doublings(16, 2**15)])
    for index, ((new, batch), (q, kv)) in enumerate(itertools.product(sizes, setup.heads)):
        for prior in (0, 512, 4096) if index % 4 == 3 else (0,):
            pairs = float(new * (prior + new))
            size = 2.0 * batch * (prior + new) * (q + kv) * dim * setup.model.dtype_bytes
            scores = 4.0 * q * pairs if setup.device == "cpu" else 0.0  # of all pairs: torch may keep them
            if setup.fits(4.0 * batch * pairs * q * dim, size + scores):
                yield batch, new, prior, q, kv, dim


def elementwise_shape(model: Model, tp: int) -> tuple[int, int, int]:
    """(query heads, KV heads, MLP width) of a layer on one device."""
    attention = model.attention
    return attention.heads // tp, attention.kv_heads_per_gpu(tp), model.layer.mlp.active_width // tp


def _elementwise(setup: GridSetup) -> Grid:
    """A layer's four kernels at the run's first TP, with the bytes that the step model counts (`RooflineStep`)."""
    model = setup.model
    heads, kv_heads, width = elementwise_shape(model, setup.tps[0])
    elements = 8 * model.hidden_size + (2 * heads + 3 * kv_heads) * model.head_dim + 3 * width
    token_bytes = int(elements * model.dtype_bytes)
    return ((4, tokens, tokens * token_bytes) for tokens in setup.sizes(1, 2**15, 3 * token_bytes))


def _collectives(setup: GridSetup) -> Grid:
    """Every operation at each group size; sizes are multiples of the group and of the element."""
    groups = [gpus for gpus in (2, 4, 8) if gpus <= setup.workers]
    for size, gpus, op in itertools.product(setup.sizes(2**8, 2**30, 8), groups, OPERATIONS):
        if op != "send_recv" or gpus == 2:
            yield op, gpus, size


def _steps(setup: GridSetup, tp: int) -> dict[str, Grid]:
    """Decode steps of batches by mean contexts, denser below a few thousand tokens, from graphs where there are any;
    prompts by tokens and length."""
    model, mode = setup.model, "graph" if setup.device == "cuda" else "eager"
    weights, token = rollout_weight_bytes(model, tp), kv_page_bytes(model, tp, 1)

    def fits(tokens: float, pairs: float, cached: float) -> bool:
        """A step over `tokens` new tokens with `pairs` of queries and keys, and `cached` tokens read: these have a
        little less room beside the weights than an engine would take."""
        flops = 2.0 * model.active_parameters * tokens + 4.0 * model.num_hidden_layers * model.attention.q_dim * pairs
        return setup.fits(flops / tp, weights + cached * token, 0.8)

    means = [*doublings(16, 4096, 2), *doublings(8192, 2**17)]
    decodes = coarse_to_fine(
        [[(b, b * mean) for mean in means if fits(b, b * mean, b * mean)] for b in doublings(1, 512)]
    )
    sizes = doublings(32, 2**14)
    prompts = coarse_to_fine(
        [[(n, length) for length in sizes if length <= n and fits(n, n * length, n)] for n in sizes]
    )
    return {
        "decode_step": [(model.name, tp, mode, *step) for step in decodes],
        "prefill_step": [(model.name, tp, *prompt) for prompt in prompts],
    }

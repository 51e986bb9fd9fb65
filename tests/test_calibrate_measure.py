"""`rlsim calibrate`: the clock, the journal, the order of measuring, and a whole run on the CPU."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import cases, invoke, tables

from rlsim.base.schema import load
from rlsim.calibrate.measure.bench import NOISY, Bench, Effort, Timing, measure, timing
from rlsim.calibrate.measure.host import MachineFacts, describe_cluster, write_cluster
from rlsim.calibrate.measure.journal import (
    ATTEMPTS,
    FIRST,
    GridSetup,
    Journal,
    Point,
    coarse_to_fine,
    contexts,
    doublings,
    level,
    measure_all,
    plan,
)
from rlsim.calibrate.measurements import KEYS
from rlsim.cost.collectives import OPERATIONS
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model
from rlsim.models.precision import PRECISIONS

TINY = tables("bases")["calibrate measure tiny"]


def tiny(**changes: object) -> Model:
    return Model.model_validate({"name": "tiny", **TINY, "dtype_bytes": 4, **changes})


def facts(**changes: object) -> MachineFacts:
    given = tables("bases")["machine"]
    return MachineFacts.model_validate({**given, **changes})


def gemm(m: int) -> Point:
    return Point("gemm", (m, 64, 64))


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


# The clock ------------------------------------------------------------------------------------------------------------


def ticking(*seconds: float) -> tuple[Clock, Callable[[], None]]:
    """A clock, and a run that takes these times in turn, the last one for ever."""
    now, times = Clock(), itertools.chain(seconds, itertools.repeat(seconds[-1]))

    def run() -> None:
        now.at += next(times)

    return now, run


def test_measure_gives_the_median_and_half_the_interquartile_range() -> None:
    now, run = ticking(9.0, 1.0, 2.0, 3.0, 4.0, 100.0)
    found = measure(run, device="cpu", effort=Effort(1, min_repeats=5, min_time_s=0.0, max_time_s=1e9), now=now)
    assert found == Timing(seconds=3.0, spread=(4.0 - 2.0) / 2 / 3.0, repeats=5)
    assert timing([1.0, 2.0, 3.0, 4.0]).spread > NOISY
    assert timing([1.0, 1.01, 1.02, 1.03]).spread < NOISY
    assert timing([1.0, 1.0, 1.0, 50.0]).spread > NOISY
    assert timing([0.0, 0.0]).spread > NOISY


@pytest.mark.parametrize(("undo", "batch"), [(None, 200), (lambda: None, 1)])
def test_short_calls_are_timed_in_batches_unless_each_is_taken_back(
    undo: Callable[[], None] | None, batch: int
) -> None:
    now, run = ticking(1e-6)
    found = measure(run, device="cpu", effort=Effort(1, min_repeats=3, min_time_s=0.0), undo=undo, calls=2, now=now)
    assert found.seconds == pytest.approx(0.5e-6)
    assert now.at == pytest.approx((1 + 3 * batch) * 1e-6, rel=0.01)  # batches of 200 us


# The journal ----------------------------------------------------------------------------------------------------------


def written(path: Path, count: int = 3) -> Journal:
    journal = Journal.start(path, facts())
    for m in range(1, count + 1):
        journal.add(gemm(m), Timing(m * 1e-6, 0.01, 7, 0.1))
    return journal


def test_journal_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "measurements.jsonl"
    journal = written(path)
    journal.add(gemm(9), Timing(1e-6, 0.5, 7, 0.2))
    again = Journal.start(path, facts(date="2027-01-01"))
    assert again.attempts == journal.attempts
    assert again.spent_s == pytest.approx(0.5)
    assert again.machine.date == "2026-01-01"
    tables = again.measurements().tables
    assert tables["gemm"].m.tolist() == [1, 2, 3], "noisy points are in no table"
    assert "torch 2.9" in again.measurements().sources[0].engine_version


def test_journal_of_another_set_up_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    written(path)
    with pytest.raises(CalibrationError, match=r"another set-up: model tiny \(abc\) \(now big \(abc\)\); .*--fresh"):
        Journal.start(path, facts(model="big (abc)"))
    with pytest.raises(CalibrationError, match=r"torch 2\.9 \(now 3\.0\)"):
        Journal.start(path, facts(versions={"torch": "3.0"}))
    with pytest.raises(CalibrationError, match="name Some CPU"):
        Journal.start(path, facts(name="Other CPU"))
    assert not Journal.start(path, facts(model="big (abc)"), fresh=True).attempts
    assert len(path.read_text().splitlines()) == 1


def test_a_last_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    written(path)
    with path.open("a") as file:
        file.write('{"point": ["gemm", [4, 64')
    journal = Journal.start(path, facts())
    assert len(journal.attempts) == 3
    journal.add(gemm(4), Timing(1e-6, 0.0, 0, 0.1))
    assert len(Journal.start(path, facts()).attempts) == 4
    assert len(path.read_text().splitlines()) == 5


@cases("calibrate_measure", "a damaged line is named")
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "measurements.jsonl"
    written(path)
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CalibrationError, match=r"measurements\.jsonl:3: damaged; mend the line, or .* --fresh"):
        Journal.start(path, facts())


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    path.write_text('{"operator": "gemm"}\n')
    for fresh in (False, True):
        with pytest.raises(CalibrationError, match="is not rlsim's journal"):
            Journal.start(path, facts(), fresh=fresh)


# The order of measuring -----------------------------------------------------------------------------------------------


def test_coarse_to_fine_visits_ends_then_middles() -> None:
    assert [level(i, 5) for i in range(5)] == [0, 2, 1, 2, 0]
    assert [level(i, 8) for i in range(8)] == [0, 3, 2, 3, 1, 3, 2, 0]
    assert level(0, 1) == 0
    assert coarse_to_fine([[10, 20, 30, 40, 50]]) == [10, 50, 30, 20, 40]
    grid = coarse_to_fine(["abc", "def", "ghij"])
    assert set(grid[:4]) == set("acgj")
    assert len(set(grid)) == 10
    assert doublings(1, 10) == [1, 2, 4, 8]
    assert doublings(4, 16, 2) == [4, 6, 8, 11, 16]


def test_operands_are_as_cold_as_in_a_step() -> None:
    bench = Bench("cpu", "float32", tiny(num_hidden_layers=4), 1, cache_bytes=32e6, effort=Effort())
    weights = rollout_weight_bytes(bench.model, 1)
    assert bench.copies(weights / 10) == 10
    assert bench.copies(20e6) == 1
    assert bench.copies(20e6, kv=True) == 4, "64 of the 83 MB of weights and KV that pass evict everything"
    assert bench.copies(100.0) == 1024


def test_the_plan_has_every_operator_once_within_bounds() -> None:
    setup = GridSetup("cpu", tiny(), (1, 2), 2, 4e9, 0.05)
    points = plan(setup)
    assert list(points.values()) == sorted(points.values())
    rows = {operator: [point.row() for point in points if point.operator == operator] for operator in FIRST}
    imported = {gemm_of(precision) for precision in PRECISIONS[1:]}  # from others' tables alone: a bench runs bf16
    imported |= {"decode_attention_fp8", "prefill_attention_fp8", "experts", "other_experts", "exchange"}
    assert set(FIRST) == set(KEYS) - imported
    for operator, found in rows.items():
        assert len(found) >= 4, operator
    shapes = {(row["n"], row["k"]) for row in rows["gemm"]}
    model = tiny()
    for tp in (1, 2):
        assert {(linear.n_out, linear.k_in) for linear in [*model.layer.linears(tp), model.head(tp)]} <= shapes
    assert any(row["longest"] > row["context"] for row in rows["decode_attention"])
    for row in rows["decode_attention"]:
        assert sum(contexts(row["batch"], row["context"], row["longest"])) == row["batch"] * row["context"]
    assert {row["prior"] for row in rows["prefill_attention"]} == {0, 512, 4096}
    assert {row["op"] for row in rows["collective"]} == set(OPERATIONS)
    alone = {point.operator for point in plan(replace(setup, workers=1, tps=(1,)))}
    assert alone == set(FIRST) - {"collective"}
    small = plan(replace(setup, longest_call_s=0.001))
    assert sum(point.operator == "gemm" for point in small) < len(rows["gemm"])


GEMMS = {gemm(m): 1 + (m > 10) for m in range(1, 41)}  # ten points in the first round, the others in the second


def suite(tmp_path: Path, outcome: object, *, budget_s: float = 1e9, points: dict[Point, int] = GEMMS):
    """A run over fake outcomes: `outcome(point, attempt)` is (seconds it takes, what it finds)."""
    now, journal, order = Clock(), Journal.start(tmp_path / "j.jsonl", facts()), []

    def measure_point(point: Point) -> Timing:
        order.append(point)
        took, found = outcome(point, order.count(point))  # type: ignore[operator]
        now.at += took
        return found

    measure_all(points, journal, measure_point, budget_s=budget_s, now=now)
    return {name: tuple(count.values()) for name, count in journal.counts(points).items()}, journal, order


GOOD, BAD = Timing(1e-6, 0.01, 7), Timing(1e-6, 0.5, 7)


def test_noisy_points_are_tried_again_at_the_end_of_their_round_and_then_refused(tmp_path: Path) -> None:
    def outcome(point: Point, attempt: int) -> tuple[float, Timing]:
        m = point.row()["m"]
        if m == 1:  # always noisy, the second time least
            return 1.0, replace(BAD, spread=0.2 if attempt == 2 else 0.5)
        return 1.0, BAD if m == 2 and attempt == 1 else GOOD

    became, journal, order = suite(tmp_path, outcome)
    assert [point.row()["m"] for point in order[:16]] == [*range(1, 11), 1, 2, 1, 1, 11, 12]
    assert order.count(gemm(1)) == ATTEMPTS == len(journal.attempts[gemm(1)])
    assert journal.best(gemm(1)).spread == 0.2
    assert became["gemm"] == (39, 1, 0, 0)
    assert 1 not in journal.measurements().table("gemm").m.tolist()
    assert Journal.start(journal.path, facts()).attempts == journal.attempts


def test_a_second_run_goes_on_with_the_attempts_at_a_noisy_point(tmp_path: Path) -> None:
    suite(tmp_path, lambda *_: (1.0, BAD), budget_s=12.0)
    _, journal, order = suite(tmp_path, lambda *_: (1.0, BAD), budget_s=40.0)
    assert [point.row()["m"] for point in order[:9]] == [3, 4, 5, 6, 7, 8, 9, 10, 1]
    assert {len(journal.attempts[gemm(m)]) for m in range(1, 11)} == {ATTEMPTS}
    assert journal.spent_s == 40.0


def test_what_the_device_cannot_do_is_recorded_once(tmp_path: Path) -> None:
    became, journal, order = suite(
        tmp_path, lambda point, _: (1.0, Timing(0.0, 0.0, 0, impossible="out of memory") if point == gemm(3) else GOOD)
    )
    assert order.count(gemm(3)) == 1
    assert journal.best(gemm(3)).impossible == "out of memory"
    assert became["gemm"] == (39, 0, 1, 0)


def test_the_budget_ends_the_run(tmp_path: Path) -> None:
    points = GEMMS | {Point("copy", ("device", n)): 3 for n in range(1, 11)}
    became, journal, _ = suite(tmp_path, lambda *_: (2.0, GOOD), budget_s=85.0, points=points)
    assert became == {"gemm": (40, 0, 0, 0), "copy": (3, 0, 0, 7)}
    assert journal.spent_s == 86.0  # the point under way is finished


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    _, journal, first = suite(tmp_path, lambda *_: (1.0, GOOD), budget_s=10.0)
    _, journal, second = suite(tmp_path, lambda *_: (1.0, GOOD), budget_s=25.0)
    assert (len(first), len(second)) == (10, 15)
    assert not set(first) & set(second)
    assert len(journal.path.read_text().splitlines()) == 1 + 25


# What is written about the machine ------------------------------------------------------------------------------------


def test_the_cluster_file_loads_and_says_what_was_measured(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path / "j.jsonl", facts())
    journal.add(Point("gemm", (512, 512, 512)), Timing(2 * 512**3 / 50e9, 0.0, 7))
    journal.add(Point("copy", ("device", 1_000_000)), Timing(2e6 / 20e9, 0.0, 7))
    journal.add(Point("collective", ("all_gather", 2, 8_000)), Timing(1e-5, 0.0, 7))
    cluster = describe_cluster(journal.measurements(), journal.machine)
    write_cluster(cluster, tmp_path / "cluster.yaml")
    again = load(tmp_path / "cluster.yaml", Cluster)
    assert again == cluster
    assert again.gpu.name == "cpu-some-cpu-2-ghz"
    assert again.gpus == 2
    assert again.gpu.bf16_flop_per_s == pytest.approx(50e9)
    assert again.gpu.memory_bytes_per_s == pytest.approx(20e9)
    assert again.intra.bytes_per_s == pytest.approx(4_000 / 1e-5)
    assert again.gpu.memory_bytes == pytest.approx(16e9 * 0.5 / 2)
    assert "float32" in again.gpu.source
    with pytest.raises(CalibrationError, match="larger --budget"):
        describe_cluster(Journal.start(tmp_path / "k.jsonl", facts()).measurements(), facts())


def test_a_known_gpu_keeps_its_data_sheet(tmp_path: Path) -> None:
    machine = facts(device="cuda", name="NVIDIA H100 80GB HBM3")
    cluster = describe_cluster(Journal.start(tmp_path / "j.jsonl", machine).measurements(), machine)
    assert cluster.gpu.bf16_flop_per_s == 989.4e12
    write_cluster(cluster, tmp_path / "cluster.yaml")
    assert load(tmp_path / "cluster.yaml", Cluster).gpu == cluster.gpu


# The command ----------------------------------------------------------------------------------------------------------


@cases("calibrate_measure", "mistakes are named")
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    pytest.importorskip("torch")
    result = invoke("calibrate", *arguments)
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = invoke("calibrate", "--device", "cpu")
    assert result.exit_code != 0
    assert "pip install 'rlsim[gpu]'" in str(result.exception)

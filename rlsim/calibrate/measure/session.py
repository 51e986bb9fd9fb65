"""`rlsim calibrate`: measure this machine within a budget, then fit and write what was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlsim.base.output import check_own_file
from rlsim.base.refusals import refuse
from rlsim.calibrate.build import build_calibration
from rlsim.calibrate.measure.bench import NOISY, Bench, Effort, Timing
from rlsim.calibrate.measure.host import describe_cluster, devices, machine_facts, write_cluster, write_model
from rlsim.calibrate.measure.journal import LEFT, TOO_NOISY, GridSetup, Journal, Point, Report, measure_all, plan
from rlsim.calibrate.measure.workers import Workers
from rlsim.calibrate.show import write_chart
from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import Calibration, Reference
from rlsim.errors import CalibrationError
from rlsim.models.model import Model, load_model

JOURNAL = "measurements.jsonl"
CPU_DTYPE, GPU_DTYPE = "float32", "bfloat16"
QUICK_S = 120.0  # budgets below this give every point less time

#: What the CPU is measured with unless told otherwise: small enough to decode in milliseconds, every part there.
TINY = Model(
    name="tiny-llama",
    title="A small llama-shaped decoder for the CPU",
    source="rlsim calibrate",
    model_type="llama",
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=8192,
)


@dataclass(frozen=True)
class Measured:
    """The journal of a run and what became of its points. `model` has the bytes of the numbers it was run with."""

    folder: Path
    journal: Journal
    model: Model
    counts: dict[str, dict[str, int]]


def measure_machine(
    device: str,
    model_name: str | None,
    tps: tuple[int, ...],
    budget_s: float,
    out: Path | None,
    fresh: bool,
    report: Report,
) -> Measured:
    """Measures until the budget is spent or nothing is left, going on where an earlier run stopped unless `fresh`.

    Without `tps` degrees are powers of two up to the devices there are (to 2 on the CPU). Raises `CalibrationError`
    without torch or such a device, for TP degrees that it does not have, for the journal of another set-up, and if no
    point could be measured; `ConfigError` for a model that does not split.
    """
    found = devices(device)
    from rlsim.calibrate.measure.steps import joined, run_point, warm_up  # there is a torch

    dtype, element = (CPU_DTYPE, 4) if device == "cpu" else (GPU_DTYPE, 2)
    shape = TINY if model_name is None and device == "cpu" else load_model(model_name or "llama-3.1-8b")
    model = shape.model_copy(update={"dtype_bytes": element})
    tps = _degrees(device, tps, found)
    for tp in tps:
        model.check_tp(tp)
    workers = found if device == "cuda" else max(tps)
    facts = machine_facts(device, model, workers=workers, dtype=dtype)
    folder = out or Path(f"calibrate-{facts.gpu}")
    for name in (f"{facts.gpu}-torch.yaml", "cluster.yaml", "model.yaml", "fit.html"):
        if folder.is_dir():
            check_own_file(folder / name, CalibrationError)
    journal = Journal.start(folder / JOURNAL, facts, fresh=fresh)
    most_s = max(0.05, budget_s / 200.0)
    quick = Effort(warmup=2, min_repeats=5, min_time_s=0.01, max_time_s=most_s)
    bench = Bench(device, dtype, model, tps[0], facts.cache_bytes, quick if budget_s < QUICK_S else Effort())
    points = plan(GridSetup(device, model, tps, workers, facts.worker_memory_bytes, min(0.5, budget_s / 1000.0)))
    with Workers(workers, device=device) as team:
        team.call(warm_up)

        def measure_point(point: Point) -> Timing:
            return joined(team.call(run_point, bench, point))

        measure_all(points, journal, measure_point, budget_s=budget_s, report=report)
    if not journal.measurements().tables:
        reasons = {one.impossible for found in journal.attempts.values() for one in found} - {""}
        why = "; ".join(sorted(reasons)[:3]) or f"the budget of {budget_s:g} s was over before a point was calm enough"
        raise CalibrationError(f"nothing could be measured: {why}")
    return Measured(folder, journal, model, journal.counts(points))


def fit_machine(measured: Measured, base: Calibration | None) -> tuple[Calibration, tuple[Path, ...]]:
    """Fits what was measured and writes `NAME.yaml`, `cluster.yaml`, `model.yaml` and a chart beside the journal.

    Raises `CalibrationError` if too little was measured and `base` does not give the rest.
    """
    facts = measured.journal.machine
    tables = measured.journal.measurements(_notes(measured))
    cluster = describe_cluster(tables, facts)
    try:
        built = build_calibration(
            tables,
            name=f"{facts.gpu}-torch",
            gpu=facts.gpu,
            engine="torch",
            reference=Reference.of(cluster),
            base=base,
            date=facts.date,
            script="rlsim calibrate",
            models={measured.model.name: measured.model},
        )
    except CalibrationError as error:
        noisy, left = (sum(count[state] for count in measured.counts.values()) for state in (TOO_NOISY, LEFT))
        if not noisy + left:
            raise
        raise CalibrationError(
            f"{error}. The budget left {left:,} points, and {noisy:,} were too noisy: what was measured is kept, the "
            "same command with a larger --budget goes on from there"
        ) from None
    cluster_file, model_file = measured.folder / "cluster.yaml", measured.folder / "model.yaml"
    write_cluster(cluster, cluster_file)
    write_model(measured.model, model_file)
    chart = measured.folder / "fit.html"
    write_chart(built.points, chart)
    return built.fit, (write_yaml(built.fit, measured.folder), cluster_file, model_file, chart)


def _degrees(device: str, given: tuple[int, ...], found: int) -> tuple[int, ...]:
    most = found if device == "cuda" else min(found, 2)
    tps = tuple(sorted(set(given))) or tuple(1 << i for i in range(most.bit_length()) if 1 << i <= min(most, 8))
    refuse("--tp", CalibrationError, tps=tps, found=found, device=device)
    return tps


def _notes(measured: Measured) -> tuple[str, ...]:
    facts = measured.journal.machine
    noisy = sum(count[TOO_NOISY] for count in measured.counts.values())
    return (
        f"{facts.dtype}; medians of repeats; {noisy} points with a spread above {NOISY:.0%} refused",
        f"all {facts.workers} devices measured at once; attention by torch",
        "operands are as cold as in a step of the model: a benchmark goes through as many bytes between two uses",
        *(f"{what}: {value}" for what, value in {**facts.versions, **facts.clocks}.items()),
    )

"""`rlsim calibrate`: measure this machine's kernels and fit them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlsim.base.formats import Table, written
from rlsim.base.output import written_by_rlsim
from rlsim.base.refusals import refuse
from rlsim.cli.common import PRINTED, Commands, echo, paths_only, progress_bar, say_notes, tokens_of, write_json
from rlsim.cli.tables import print_tables
from rlsim.errors import CalibrationError

if TYPE_CHECKING:
    from rlsim.calibrate.measure.journal import Point
    from rlsim.calibrate.measure.session import Measured
    from rlsim.calibrate.write import FromLog
    from rlsim.cost.calibration import Calibration

app = Commands(
    help="Measure this machine and fit the measurements, or import those of others.",
    epilog="Example: rlsim calibrate --device cpu --budget 2m",
)


@app.callback(invoke_without_command=True)
def calibrate(
    context: typer.Context,
    device: str = "cuda",
    model: str | None = None,
    tp: str = "",
    budget: str = "10m",
    out: Path | None = None,
    base: str | None = None,
    fresh: bool = False,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Measure kernels, whole steps and links of this machine within a budget, and fit a calibration to them.

    Interrupt it whenever you like: the same command goes on where it stopped.
    """
    if context.invoked_subcommand is not None:
        return
    from rlsim.calibrate.measure.session import fit_machine, measure_machine
    from rlsim.cost.calibration import load_calibration

    donor, budget_s = None if base is None else load_calibration(base), _budget(budget)
    try:
        with progress_bar(quiet or json_file == PRINTED, "seconds") as bar:

            def report(point: Point, done: int, planned: int, spent_s: float) -> None:
                if bar:
                    bar(int(spent_s), int(budget_s), f"{point.operator}, {done:,} of {planned:,} points")

            measured = measure_machine(device, model, _degrees(tp), budget_s, out, fresh, report)
    except KeyboardInterrupt:
        typer.echo("rlsim: what was measured so far is kept; the same command goes on from there", err=True)
        raise
    calibration, files = fit_machine(measured, donor)
    _print_fitted(calibration, files, json_file, quiet, measured)


@app.command("import")
def import_(
    format: str,  # noqa: A002 - what it is
    paths: list[Path],
    gpu: str,
    engine: str,
    version: str | None = None,
    base: str | None = None,
    name: str | None = None,
    out: Path = Path(),
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fit a calibration to measurements that others have published, in their own layouts and units.

    Example: rlsim calibrate import nccl-tests all_reduce.txt --gpu h100-sxm --engine vllm --base h100-vllm
    """
    from rlsim.calibrate.importers import import_calibration
    from rlsim.cost.calibration import load_calibration

    path = import_calibration(format, paths, gpu=gpu, engine=engine, version=version, base=base, name=name, out=out)
    _print_fitted(load_calibration(path), (path,), json_file, quiet)


@app.command("from-run")
def from_run_(
    log: Path,
    experiment: Path | None = None,
    model: str | None = None,
    cluster: str | None = None,
    base: str | None = None,
    tp: int | None = None,
    prompts: int | None = None,
    responses: int | None = None,
    cap: str | None = None,
    prompt_tokens: int | None = None,
    backend: str | None = None,
    settings: list[str] | None = None,
    trace: Path | None = None,
    warmup: int = 2,
    name: str | None = None,
    out: Path = Path(),
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fit training efficiency and host time to your own run, and test them on steps it was not fitted to.

    \b
    Example: rlsim calibrate from-run verl.log my-run.yaml
    Example: rlsim calibrate from-run verl.log --model qwen2.5-7b --cluster 8xh100 --calibration h100-vllm
    """
    from rlsim.calibrate.from_run import from_run
    from rlsim.calibrate.write import write

    given = _keys(settings or [])
    result = from_run(
        log, experiment, model=model, cluster=cluster, calibration=base, tp=tp, prompts=prompts, responses=responses,
        cap=tokens_of("--cap", cap), prompt_tokens=prompt_tokens, backend=backend, train=given["train"],
        engine=given["engine"], trace=trace, name=name, warmup=warmup,
    )  # fmt: skip
    title = f"Errors on {len(result.held_out)} steps not fitted"
    _print_errors(result, title, write(result.calibration, out), json_file, quiet)


@app.command("from-engine")
def from_engine_(
    log: Path,
    model: str,
    tp: int,
    base: str,
    precision: str | None = None,
    kv_precision: str = "bf16",
    release: str = "",
    name: str | None = None,
    out: Path = Path(),
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fit whole iterations to what your engine logs in service, and test them on batch sizes left out of the fit.

    A .csv has columns batch, context_mean (tokens of a sequence) or context_total (of all), seconds, and where prompts
    run too prefill_tokens, prefill_sequences, cached_tokens.

    \b
    Example: rlsim calibrate from-engine server.log --model qwen2.5-7b --tp 2 --calibration h100-sglang
    Example: rlsim calibrate from-engine steps.csv --model llama-3.1-8b --tp 1 --calibration h100-vllm --out mine.yaml
    """
    from rlsim.calibrate.from_engine import from_engine
    from rlsim.calibrate.write import write

    result = from_engine(
        log, model=model, tp=tp, calibration=base, precision=precision, kv_precision=kv_precision, release=release,
        name=name,
    )  # fmt: skip
    title = f"Errors on iterations of {model} at TP{tp} that were left out of the fit"
    _print_errors(result, title, write(result.calibration, out), json_file, quiet)


@app.command("show")
def show_(
    name: str,
    model: str | None = None,
    cluster: str | None = None,
    speculation: str | None = None,
    out: Path | None = None,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Show what kernels reach of the data sheet's FLOP/s or bandwidth, by shape, or how long a model's steps take.

    \b
    Example: rlsim calibrate show h100-vllm
    Example: rlsim calibrate show my-gpu/calibration.yaml --out efficiency.html
    Example: rlsim calibrate show a40-sglang --model llama-3.1-8b --cluster 8xa40 --out latencies.png
    Example: rlsim calibrate show h100-vllm --model qwen3-8b --speculation "{method: eagle3, num_speculative_tokens: 3}"
    """
    from rlsim.base.reading import parse_yaml, plain
    from rlsim.base.schema import validate
    from rlsim.calibrate import show
    from rlsim.calibrate.measurements import node_of
    from rlsim.cost.calibration import load_calibration
    from rlsim.cost.speculation import Speculation
    from rlsim.models.hardware import load_cluster
    from rlsim.models.model import load_model

    calibration = load_calibration(name)
    refuse("rlsim calibrate show", model=model, speculation=speculation)
    if model is None:
        found = shown = show.efficiencies(calibration)
        title, form = f"{calibration.name}: share of the data sheet's rate", "{:.0%}"
        said = f"Seconds at {calibration.gpu}'s data sheet over a kernel's, launch included. Over 100%: from caches."
    elif speculation is not None:
        machine = load_cluster(cluster) if cluster else node_of(calibration.gpu)
        drafts = validate(plain(parse_yaml(speculation, "--speculation")), Speculation, "--speculation")
        found = show.gains(load_model(model), machine, calibration, drafts)
        title, form = f"{calibration.name}: gain of {model} on {machine.name} by k drafted tokens a step", "{:.2f}"
        shown, each = show.by_line(found), ", ".join(f"{chance:.2g}" for chance in drafts.accepted)
        said = (
            f"Time of a token without drafts over that with them, one replica at TP{found.tp[0]}, by its responses; "
            f"accepted up to each position: {each}; –: more than the KV cache holds."
        )
    else:
        machine = load_cluster(cluster) if cluster else node_of(calibration.gpu)
        found = show.latencies(load_model(model), machine, calibration)
        title, form = f"{calibration.name}: milliseconds of a decode step of {model} on {machine.name}", "{:.2f}"
        shown = show.by_line(found)
        said = "Milliseconds, by responses on all GPUs together; –: more than the KV cache holds."
    if out is not None:
        show.write(shown, title, out)
    if write_json(json_file, json.loads(found.to_json(orient="records"))) or paths_only(quiet, out):
        return
    parts = []
    for kernel, rows in shown.groupby("kernel", sort=False):
        values = rows.pivot_table("value", "line", "at", sort=False, dropna=False)
        heads = [rows.axis.iloc[0], *(f"{at:,.0f}" for at in values.columns)]
        lines = [
            (str(line), *("–" if math.isnan(value) else form.format(value) for value in row))
            for line, row in zip(values.index, values.to_numpy(), strict=True)
        ]
        parts.append(Table(str(kernel).replace("_", " "), heads, lines))
    print_tables(parts)
    echo(said)
    if out is not None:
        echo(f"chart: {out}")


def _keys(items: list[str]) -> dict[str, dict[str, object]]:
    """`train.a=1` and `engine.b=2` as nested mappings, values read as YAML."""
    from rlsim.experiment.load import parse_overrides, set_path

    data: dict[str, dict[str, object]] = {"train": {}, "engine": {}}
    for item in items:
        key, equals, _ = item.partition("=")
        part, dot, _ = key.partition(".")
        refuse("rlsim calibrate from-run", CalibrationError, item=item, known=equals and dot and part in data)
    for key, value in parse_overrides(items).items():
        set_path(data, key, value, "--set ")
    return data


def _print_errors(result: FromLog, title: str, path: Path, json_file: Path | None, quiet: bool) -> None:
    data: dict[str, Any] = {"file": str(path), "errors": json.loads(result.errors.to_json(orient="records"))}
    data |= {"excluded": {**result.excluded}, "notes": [*result.notes]}
    if write_json(json_file, data) or paths_only(quiet, path):
        return
    headings = [name.removesuffix("_s").replace("_", " ") for name in result.errors.columns]
    rows = [[_error(str(name), value) for name, value in row.items()] for row in result.errors.to_dict("records")]
    print_tables([Table(title, headings, rows)])
    for reason, count in result.excluded.items():
        echo(f"left out: {count}: {reason}")
    say_notes(result.notes)
    _print_file(path)


def _print_file(path: Path) -> None:
    from rlsim.cost.tables import csv_of

    echo(f"wrote {path}" + (f" and its tables, {csv_of(path).name}" if written_by_rlsim(csv_of(path)) else ""))


def _error(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    if name.endswith("_s"):
        return f"{1e3 * value:.3g} ms"
    return f"{value:+.1%}" if name.endswith("bias") else f"{value:.1%}"


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise CalibrationError(f"--tp {text}: expected whole numbers with commas between, such as 1,2,4") from None


def _budget(text: str) -> float:
    from rlsim.units import seconds

    try:
        value = seconds(text.strip() + "in" if text.strip().endswith("m") else text)
    except ValueError as error:
        raise CalibrationError(f"--budget: {error}") from None
    refuse("rlsim calibrate", CalibrationError, text=text, value=value)
    return value


def _print_fitted(
    calibration: Calibration,
    files: Sequence[Path],
    json_file: Path | None,
    quiet: bool,
    measured: Measured | None = None,
) -> None:
    residuals = {name: found.model_dump(mode="json") for name, found in calibration.residuals.items()}
    points = measured.counts if measured else {}
    data = {"files": [*map(str, files)], "points": points, "residuals": residuals}
    if write_json(json_file, data) or paths_only(quiet, *files):
        return
    if measured is not None:
        headings = ("operator", *next(iter(points.values())))
        rows = [[operator, *(f"{n:,}" for n in count.values())] for operator, count in points.items()]
        print_tables([Table(f"Points measured on {measured.journal.machine.name}", headings, rows)])
    title = f"Errors of {calibration.name} on points that its fits have not seen"
    found = written("residuals", calibration.residuals.items())
    print_tables([Table.of(title, found, 5, prose=5)])
    for path in files:
        _print_file(path)

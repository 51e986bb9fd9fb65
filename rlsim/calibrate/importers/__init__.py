"""Public measurement sets as `Measurements`, and straight to a calibration file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import cast, get_args

from rlsim.base.output import check_own_file
from rlsim.base.refusals import refuse
from rlsim.calibrate.build import build_calibration
from rlsim.calibrate.importers import aiconfigurator, nccl_tests
from rlsim.calibrate.measurements import Measurements, node_of
from rlsim.calibrate.show import write_chart
from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import Engine, Reference, carried_to, load_calibration
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, load_gpu

FORMATS = ("aiconfigurator", "nccl-tests")
SCRIPT = "rlsim calibrate import"
ENGINES: tuple[Engine, ...] = get_args(Engine)


def import_calibration(
    format: str,  # noqa: A002 - the word of the command line
    paths: list[Path],
    *,
    gpu: str | Cluster,
    engine: str,
    version: str | None = None,
    base: str | None = None,
    name: str | None = None,
    out: Path,
) -> Path:
    """Reads tables of one of `FORMATS`, fits them, and writes `out/NAME.yaml` and beside it the chart `NAME.html`.

    `gpu` (of the catalogue, or nodes that have it) and `engine` say what was measured, `version` which release of the
    engine to take (aiconfigurator), `base` the calibration that what was not measured comes from. The name is
    `<gpu>-<engine>` by default. Returns the path of the calibration. Raises `CalibrationError` (and `CatalogueError`
    for an unknown GPU or base) with one message; then nothing is written.
    """
    known, given = {"formats": FORMATS, "engines": ENGINES}, {"format": format, "paths": paths, "out": out}
    refuse("tables to import", CalibrationError, engine=engine, **given, **known)
    known_engine = cast(Engine, engine)
    node = node_of(load_gpu(gpu).name) if isinstance(gpu, str) else gpu
    stem = name or f"{node.gpu.name}-{known_engine}"
    for suffix in (".yaml", ".html"):
        check_own_file(out / f"{stem}{suffix}", CalibrationError)
    donor = carried_to(load_calibration(base), node) if base is not None else None
    measured, reference = read_format(format, paths, node, known_engine, version)
    built = build_calibration(
        measured,
        name=stem,
        gpu=node.gpu.name,
        engine=known_engine,
        reference=reference,
        base=donor,
        date=datetime.date.today().isoformat(),
        script=SCRIPT,
        cold=False,
    )
    write_chart(built.points, out / f"{stem}.html")
    return write_yaml(built.fit, out)


def read_format(
    format: str,  # noqa: A002 - the word of the command line
    paths: list[Path],
    node: Cluster,
    engine: Engine,
    version: str | None,
) -> tuple[Measurements, Reference]:
    """The tables of one of `FORMATS` joined, and the data-sheet figures that their efficiencies are relative to."""
    reference, gpu = Reference.of(node), node.gpu.name
    if format == "aiconfigurator":
        folders = [aiconfigurator.gpu_folder(path, gpu) for path in paths]
        parts = (aiconfigurator.read(folder, engine, version, gpu=gpu, reference=reference) for folder in folders)
        return Measurements.merge(parts), reference
    if version is not None:
        raise CalibrationError(f"{format} tables have no engine versions; leave --version out")
    return nccl_tests.read(paths, gpu=gpu, reference=reference), reference

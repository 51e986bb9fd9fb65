"""What the seeds are fed to: the commands themselves, in this process, and what they call where that takes too long."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import click

from fuzz import checks, seeds
from fuzz.seeds import Seed
from rlsim.errors import ConfigError


class Target(NamedTuple):
    """What reads the files of a seed: `run(main, seed, rng)` raises `RlsimError` to refuse them.

    `share` is how many of the cases of a long run it gets, in comparison with the others.
    """

    seeds: Callable[[], Sequence[Seed]]
    run: Callable[[Path, Seed, random.Random], None]
    share: float


MOST_GPUS = 64  # of an experiment that is run
_LARGEST = {"workflow.prompts": 2, "workflow.responses": 2, "workflow.steps": 1, "trace.cap": 256}
_SLOW = ("real", "searched", "plan")  # systems that search


@functools.cache
def _app() -> click.Command:
    import typer

    from rlsim.cli import app

    return typer.main.get_command(app)


def command(*arguments: str | Path) -> str:
    """A command of rlsim as `rlsim.cli.main` runs it, and what it prints; a usage error is a refusal too."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        try:
            _app().main([str(one) for one in arguments], prog_name="rlsim", standalone_mode=False)
        except (click.ClickException, click.exceptions.Exit) as error:
            raise ConfigError(str(error) or type(error).__name__) from None
    return out.getvalue()


# Traces ---------------------------------------------------------------------------------------------------------------


def trace_import(main: Path, seed: Seed, rng: random.Random) -> None:
    from rlsim.trace import read_trace
    from rlsim.trace.files import write_trace
    from rlsim.trace.importers import import_trace

    inputs = main if seed.main == "." else Path(str(main).removesuffix(seed.main))
    options = [option.replace("{inputs}", str(inputs).rstrip("/")) for option in seed.options]
    if rng.random() < 0.2:
        command("trace", "import", main, "out.parquet", *options)
    else:  # what the command calls; with fewer rows for distributions, of which it takes 10,000
        pairs = list(zip(options[::2], options[1::2], strict=True))
        given = {name.removeprefix("--"): value for name, value in pairs if name in ("--format", "--tokenizer")}
        columns = dict(value.split("=") for name, value in pairs if name == "--column")
        write_trace(import_trace(main, columns=columns, rows=100, **given), "out.parquet")
    checks.trace(read_trace("out.parquet"))


def trace_describe(main: Path, _: Seed, rng: random.Random) -> None:
    from rlsim.trace import read_trace

    json.loads(command("trace", "describe", main, "--json", "-"), parse_constant=_no_constant)
    checks.trace(read_trace(main))
    if rng.random() < 0.02:
        command("trace", "fit", main, "--components", rng.choice("12"), "--out", "fit.yaml")
    if rng.random() < 0.02:
        command("trace", "describe", main, "--chart", "chart.html")


def _no_constant(text: str) -> float:
    raise checks.NonsenseError(f"{text} in what is printed")


def trace_generate(main: Path, _: Seed, __: random.Random) -> None:
    from rlsim.trace import read_trace
    from rlsim.trace.generate import draw_trace, load_recipe

    recipe = load_recipe(main)
    if recipe.prompts * recipe.responses > 20_000:
        return
    checks.trace(draw_trace(recipe))
    command("trace", "generate", main, "--out", "out.parquet")
    checks.trace(read_trace("out.parquet"))


# Experiments ----------------------------------------------------------------------------------------------------------


def tiny_run(main: Path, overrides: Any = (), *, most_systems: int = 2) -> None:
    """An experiment as `rlsim run` reads it; if it is small enough its first case runs for one short step."""
    from rlsim.experiment.case import cases_of
    from rlsim.experiment.load import load_experiment, with_settings
    from rlsim.experiment.run import run_loaded
    from rlsim.hardware import load_any_cluster

    experiment, shown, folder = load_experiment(main, overrides)
    _, first = next(iter(cases_of(experiment, shown)))
    dumped = first.model_dump()
    less: dict[str, Any] = {}
    for key, most in _LARGEST.items():
        section, _, name = key.partition(".")
        less[key] = min(dumped[section][name], most)
    if first.trace.fixed is not None:
        less["trace.fixed"] = min(first.trace.fixed, 256)
    systems = [one for one in first.systems if not any(slow in json.dumps(one, default=str) for slow in _SLOW)]
    less |= {"seeds": 1, "systems": systems[:most_systems] or ["verl"], "baseline": None}
    small = with_settings(first, less, shown)
    cluster = small.cluster
    if (
        isinstance(cluster, str)
        and not cluster.endswith((".yaml", ".yml"))
        and load_any_cluster(cluster).gpus > MOST_GPUS
    ):
        return
    checks.result(run_loaded(small, shown, folder))


def run(main: Path, _: Seed, __: random.Random) -> None:
    tiny_run(main)


def sweep(main: Path, _: Seed, __: random.Random) -> None:
    command("sweep", main, "--dry-run", "--json", "-")


def setting(main: Path, _: Seed, rng: random.Random) -> None:
    from rlsim.experiment.load import load_experiment

    text = (main.parent / "setting.txt").read_bytes().decode("utf-8", "surrogateescape")
    if rng.random() < 0.5:
        load_experiment(main, [text])
    else:
        tiny_run(main, [text], most_systems=1)


# Calibrations ---------------------------------------------------------------------------------------------------------


def calibration(main: Path, _: Seed, rng: random.Random) -> None:
    """A calibration's file, read, priced with, and run with."""
    from rlsim.cost.calibration import load_calibration
    from rlsim.schema import _loaded

    _loaded.cache_clear()  # another file may be there at the same tick of the clock
    found = load_calibration(main)
    checks.costs(found)
    if rng.random() < 0.3:
        path = main.with_name("e.yaml")
        path.write_text(
            seeds.SMALL.replace("h100-vllm", "../inputs/c.yaml").replace("8xh100", f"8x{found.gpu.partition('-')[0]}")
            .replace("path: t.parquet", "fixed: 100") + "systems: [{verl: {tp: 2}}, pat]\n"
        )  # fmt: skip
        tiny_run(path)


def calibration_values(main: Path, _: Seed, __: random.Random) -> None:
    """What a calibration holds, validated and priced with; parsing its YAML would take most of the time."""
    from rlsim.cost.calibration import Calibration
    from rlsim.schema import validate

    try:
        data = json.loads(main.read_bytes())
    except (ValueError, RecursionError):
        return
    checks.costs(validate(data, Calibration, str(main)))


def calibrate_import(main: Path, seed: Seed, rng: random.Random) -> None:
    """The tables of every case are read; those that pass are now and then fitted too, which takes longer."""
    from rlsim.calibrate.importers import read_format
    from rlsim.cost.calibration import load_calibration
    from rlsim.hardware import load_gpu

    kind, _, gpu = seed.options[:3]
    measured, _ = read_format(kind, [main], load_gpu(gpu), "vllm", None)
    for table in measured.tables.values():
        checks.amounts(map(float, table.seconds), "a measured time")
    if rng.random() < (0.2 if kind == "nccl-tests" else 0.02):
        command("calibrate", "import", kind, main, *seed.options[1:], "--name", "made")
        checks.costs(load_calibration(Path("made.yaml").resolve()))


def derive(main: Path, _: Seed, rng: random.Random) -> None:
    from rlsim.trace import read_trace

    options = ("--batch", "8x2", "--cap", "1K") if rng.random() < 0.7 else ()
    command("trace", "import", main, "out.parquet", "--derive", *options)
    checks.trace(read_trace("out.parquet"))


def from_run(main: Path, _: Seed, rng: random.Random) -> None:
    from rlsim.verl.log import read_log

    read_log(main)
    if rng.random() < 0.01:
        run_of = ("--model", "qwen2.5-1.5b", "--cluster", "8xh100", "--calibration", "h100-vllm", "--tp", "2")
        batch = ("--prompts", "8", "--responses", "2", "--cap", "1K")
        command("calibrate", "from-run", main, *run_of, *batch, "--out", "made.yaml")


def init(main: Path, seed: Seed, __: random.Random) -> None:
    command("init", "made", *seed.options, main, "--gpu", "h100", "--trace", "rollpacker-math", "--out", "made.yaml")


# Results --------------------------------------------------------------------------------------------------------------


def compare(main: Path, _: Seed, rng: random.Random) -> None:
    command("compare", main)


def timeline(main: Path, _: Seed, rng: random.Random) -> None:
    command("timeline", main, "--out", "timeline.json")
    json.loads(Path("timeline.json").read_text(encoding="utf-8"), parse_constant=_no_constant)


def report(main: Path, _: Seed, rng: random.Random) -> None:
    command("report", main, "--out", "page.html")


TARGETS = {
    "trace-import": Target(seeds.rollouts, trace_import, 16),
    "trace-describe": Target(seeds.traces, trace_describe, 10),
    "trace-generate": Target(seeds.recipes, trace_generate, 0.1),
    "trace-derive": Target(seeds.logs, derive, 16),
    "calibration": Target(seeds.calibrations, calibration, 0.3),
    "calibration-values": Target(seeds.calibration_values, calibration_values, 16),
    "calibrate-import": Target(seeds.measurements, calibrate_import, 6),
    "calibrate-from-run": Target(seeds.logs, from_run, 18),
    "run": Target(seeds.experiments, run, 1),
    "sweep": Target(seeds.sweeps, sweep, 1),
    "set": Target(seeds.settings, setting, 12),
    "init": Target(seeds.frameworks, init, 0.5),
    "compare": Target(seeds.results, compare, 1),
    "compare-sweep": Target(seeds.swept, compare, 0.5),
    "timeline": Target(seeds.results, timeline, 1),
    "report": Target(seeds.results, report, 0.05),
    "report-sweep": Target(seeds.swept, report, 0.05),
}

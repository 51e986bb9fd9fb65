"""`rlsim tune`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.base.formats import number
from rlsim.cli import complete
from rlsim.cli.common import Json, check_json, echo, named, progress_bar, write_json
from rlsim.cli.tables import Table
from rlsim.frameworks.draft import written

if TYPE_CHECKING:
    from rlsim.results.tune.answer import Tuned
    from rlsim.results.tune.trial import Configuration

_REFUSED = {"start": "that would not start", "memory": "that exceed memory", "other": "that are refused"}
#: Means that are shown, in words, and their decimals.
_MEANS = (
    ("step_time_s", "seconds of a step", 1),
    ("responses_per_s", "responses trained on a second", 2),
    ("staleness_mean", "mean staleness, updates", 2),
)


def tune(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [KEY=VALUE]...",
            help="A veRL script or configuration, one of NeMo-RL or AReaL, or an experiment; then overrides.",
        ),
    ],
    gpu: Annotated[str | None, named("GPU of the catalogue; configurations name none.", complete.gpus)] = None,
    cluster: Annotated[str | None, named("Cluster of the catalogue, instead of --gpu.", complete.clusters)] = None,
    model: Annotated[str | None, named("Model of the catalogue, or a config.json.", complete.models)] = None,
    trace: Annotated[str | None, named("Trace of response lengths.", complete.traces)] = None,
    calibration: Annotated[str | None, named("Calibration.", complete.calibrations)] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to spend.")] = 60.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Sets to try instead: the same answer on any machine.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Leave this key as it is; repeatable.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="What a change may alter beside speed: numerics, algorithm, staleness; repeatable."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars of a GPU-hour: what it costs, too.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a core).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search and of the draws.")] = 0,
    json_file: Json = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Search the settings of your framework for those that train fastest, and say how sure that is.

    \b
    Example: rlsim tune run_qwen3-8b.sh --gpu h100
    Example: rlsim tune experiment.yaml --budget 30 --keep memory_utilization
    """
    from rlsim.results.tune.answer import tune as search

    check_json(json_file)
    configuration = _configuration(sources, gpu, cluster, model, trace, calibration)
    with progress_bar(quiet) as bar:
        told = (lambda share, what: bar(min(int(100 * share), 100), 100, what)) if bar else (lambda *_: None)
        found = search(
            configuration,
            budget_s=budget,
            trials=trials,
            workers=workers,
            seed=seed,
            keep=keep or (),
            allow=allow or (),
            progress=told,
        )
    if not write_json(json_file, found.as_json()):
        _print(found, price)


def _configuration(
    sources: list[str], gpu: str | None, cluster: str | None, model: str | None, trace: str | None,
    calibration: str | None,
) -> Configuration:  # fmt: skip
    """Where the settings come from, told by what the first file is."""
    from rlsim.errors import ConfigError
    from rlsim.experiment.load import framework_of
    from rlsim.frameworks.parts import Options
    from rlsim.results.tune.trial import FRAMEWORKS, Configuration

    name, option = framework_of(Path(sources[0]))
    if name and not option:
        raise ConfigError(f"{sources[0]}: configurations of {name} are not read")
    options = Options(Path(), gpu, cluster, model, None, calibration, trace, None)
    if name and not (gpu or cluster):
        raise ConfigError(f"{sources[0]}: configurations name no GPU: give --gpu, such as h100, or --cluster")
    if not name:
        folder = Path(sources[0]).resolve().parent if Path(sources[0]).is_file() else Path()
        options = Options(folder)
    return Configuration(FRAMEWORKS[option], tuple(sources), options)


def _print(found: Tuned, price: float | None) -> None:
    """The answer, last on the screen; tables before it."""
    from rlsim.cli.tables import print_tables
    from rlsim.cli.terminal import Console

    say = Console(soft_wrap=True).print
    refused = ", ".join(f"{count} {_REFUSED[kind]}" for kind, count in found.excluded.items())
    say(
        f"{found.evaluated} sets of settings tried in {found.seconds:.0f} s"
        + (f"; of these {refused}" if refused else "")
    )
    print_tables([*_changes(found), _means(found, price), *_rests(found)])
    if any(not row["gains"] for row in found.assumptions):
        say("time was over: what has no gain above was not tried at its ends; give a larger --budget")
    for other in found.beside:
        keys = " ".join(f"{key}={written(value)}" for key, value in other["changes"].items())
        say(f"left alone, as it {other['what']} (--allow {other['kind']}): {keys}: {other['gain']:.2f} times more")
    say(f"binds now: {found.binds}")
    for line in verdict(found):
        echo(line)


def _changes(found: Tuned) -> Iterator[Table]:
    if found.changes:
        rows = [[one.key, written(one.value), number(one.alone, 2), number(one.within, 2)] for one in found.changes]
        title = "Changes, times as fast: each alone, and the whole set over the set without it"
        yield Table(["key", "value", "alone", "within"], rows, title=title)


def _means(found: Tuned, price: float | None) -> Table:
    rows = [
        [words, number(found.before.get(name), digits), number(found.after.get(name), digits)]
        for name, words, digits in _MEANS
    ]
    if price is not None:
        dollars = [price * found.gpus / 3.6 / means["responses_per_s"] for means in (found.before, found.after)]
        rows.append(["dollars for 1,000 responses", *(number(one, 2) for one in dollars)])
    return Table(["means", "now", "tuned"], rows)


def _rests(found: Tuned) -> Iterator[Table]:
    if found.assumptions:
        rows = [
            [row["assumed"], " to ".join(map(_two, row["gains"])), row["taken"], " to ".join(row["ends"])]
            for row in found.assumptions
        ]
        title = "What the answer rests on: the gain at both ends of what is assumed"
        yield Table(["assumed", "gain there", "taken", "range"], rows, title=title, words=(0, 1, 2, 3), prose=3)


def _two(value: float | None) -> str:
    return number(value, 2)


def verdict(found: Tuned) -> list[str]:
    """The answer in a sentence, and the lines to paste."""
    if not found.best:
        return ["Keep the settings as they are: nothing that was tried is faster on fresh draws."]
    lines = [f"  {key}={written(value)}" for key, value in found.best.items()]
    if math.isnan(found.gain):
        return [
            "As configured it does not fit. These settings do, and are the fastest of those that were tried:",
            *lines,
        ]
    interval = f"95%: {found.gain_low:.2f} to {found.gain_high:.2f}"
    if not math.isnan(found.model_low):
        interval += f"; with errors of costs {found.model_low:.2f} to {found.model_high:.2f}"
    head = f"These settings are {found.gain:.2f} times as fast ({interval})"
    turning = [row["assumed"] for row in found.assumptions if any(one is not None and one < 1 for one in row["gains"])]
    if not found.sure:
        head += ", which is not told apart from no gain"
    elif turning:
        head += f", unless {' or '.join(turning)} lies at the wrong end of its range"
    return [f"{head}:", *lines]

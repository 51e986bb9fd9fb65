"""`rlsim tune`."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsim.base.formats import Table, number, share, written
from rlsim.base.reading import read_text, read_yaml
from rlsim.base.refusals import refuse, sentence
from rlsim.cli.common import echo, progress_bar, say, write_json
from rlsim.cli.tables import print_tables
from rlsim.errors import ConfigError
from rlsim.frameworks.draft import check_new, override

if TYPE_CHECKING:
    from rlsim.results.tune.answer import Tuned
    from rlsim.results.tune.parts import Parts
    from rlsim.results.tune.trial import Configuration

_REFUSED = {
    "start": "would not start", "memory": "exceed memory", "stale": "are staler than allowed",
    "slow": "take longer to simulate than was left", "other": "are refused",
}  # fmt: skip


def tune(
    sources: list[str],
    gpu: str | None = None,
    gpu_like: str | None = None,
    network: str | None = None,
    cluster: str | None = None,
    model: str | None = None,
    trace: str | None = None,
    calibration: str | None = None,
    log: Path | None = None,
    rollouts: Path | None = None,
    check: Path | None = None,
    budget: float = 60.0,
    trials: int | None = None,
    keep: list[str] | None = None,
    allow: list[str] | None = None,
    max_staleness: str | None = None,
    on_policy: bool = False,
    gpus: int | None = None,
    money: bool = False,
    price: str | None = None,
    systems: bool = False,
    write: Path | None = None,
    workers: int | None = None,
    seed: int = 0,
    json_file: Path | None = None,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Search the settings of your framework for those that train fastest, and say how sure that is.

    \b
    Example: rlsim tune run_qwen3-8b.sh --gpu h100
    Example: rlsim tune run.sh --gpu h100 --log run.log --rollouts dump/ --write run.tuned.sh
    Example: rlsim tune run.tuned.sh --gpu h100 --check new.log
    Example: rlsim tune experiment.yaml --budget 30 --keep memory_utilization --systems
    """
    from rlsim.results.tune.answer import Wish
    from rlsim.results.tune.answer import tune as search
    from rlsim.results.tune.own import Own
    from rlsim.results.tune.space import Bound

    if write is not None:
        check_new(write, Path(sources[0]))
    files = [text for text in sources[1:] if write and Path(text).exists()]
    refuse("rlsim tune", files=files, rollouts=rollouts, log=log, on_policy=on_policy, max_staleness=max_staleness)
    bound = Bound.of("max:0") if on_policy else Bound.of(max_staleness) if max_staleness is not None else None
    wish = Wish(keep or (), allow or (), bound, gpus, money, systems)
    given = {"cluster": cluster, "model": model, "calibration": calibration, "trace": trace, "network": network}
    configuration = _configuration(sources, gpu, gpu_like, given)
    dollars = None if price is None else _price(price, configuration)
    own = Own.of(configuration) if log or check or Path(sources[0]).is_file() else None
    if own is not None:
        configuration = own.corrected(configuration)
    if check is not None and own is not None:
        _print_check(own, configuration, check, json_file)
        return
    if log is not None and own is not None:
        configuration, fitted = own.fitted(configuration, log, rollouts)
        parts, steps = ", ".join(written("fitted", fitted.errors)["error"]), len(fitted.held_out)
        of = f"mean errors on {steps} steps it was not fitted to: {parts}"
        echo(f"calibrated to your log: {of}; wrote {own.calibration}")
    with progress_bar(quiet) as bar:
        told = (lambda share, what: bar(min(int(100 * share), 100), 100, what)) if bar else (lambda *_: None)
        found = search(
            configuration, wish, budget_s=budget, trials=trials, workers=workers, seed=seed, progress=told
        )  # fmt: skip
    error = own.error if own is not None else None
    if error is not None and found.best:
        found = replace(found, model_low=found.gain / (1 + error), model_high=found.gain * (1 + error))
    both = [] if dollars is None else _dollars_of_both(found, dollars)
    costs = {"dollars_per_1000": [None if math.isnan(one) else one for one in both]} if both else {}
    printed = write_json(json_file, found.as_json() | {"own_error": error} | costs)
    if not printed:
        _print(found, dollars, error, verbose=verbose)
    inside, again = configuration.write(found.best, write) if write is not None and found.best else ([], [])
    if write is not None and not printed:
        more = [f"with {' '.join(inside)} as given"] * bool(inside) + [f"give it {' '.join(again)} again"] * bool(again)
        echo(", ".join([f"wrote {write}", *more]) if found.best else "nothing to change: no file was written")


def _configuration(
    sources: list[str], gpu: str | None, gpu_like: str | None, given: dict[str, str | None]
) -> Configuration:
    from rlsim.experiment.load import framework_of
    from rlsim.frameworks.parts import Options
    from rlsim.results.tune.trial import FRAMEWORKS, Configuration

    name, option = framework_of(Path(sources[0]))
    missing = name and not (gpu or gpu_like or given["cluster"])
    refuse("GPU of a configuration", source=sources[0], missing=missing)
    if name:
        options = Options.of(Path(), gpu, gpu_like, **given)
    else:
        options = Options(Path(sources[0]).resolve().parent if Path(sources[0]).is_file() else Path())
    return Configuration(FRAMEWORKS[option], tuple(sources), options)


def _price(text: str, configuration: Configuration) -> float:
    """Dollars of an hour of the configuration's GPU: `--price` is one number, or a table by GPU (see there)."""
    from rlsim.experiment.build import LoadedExperiment
    from rlsim.models.hardware import node_types

    with suppress(ValueError):
        return _positive(text)
    path = Path(text)
    try:
        if path.suffix in (".yaml", ".yml"):
            rows = list(read_yaml(path).items())
        elif path.suffix == ".csv":
            rows = [row for row in csv.reader(read_text(path).splitlines()) if row[1:] and row[0] != "gpu"]
        else:
            rows = [part.split("=") for part in text.split(",")]
        prices = {str(name).strip().lower(): _positive(value) for name, value in rows}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"--price {text}: expected dollars of a GPU-hour: 2.5, h100=2.5,h200=3.8, or a file of such rows "
            "(.yaml: h100: 2.5; .csv: h100,2.5)"
        ) from None
    gpu = LoadedExperiment.of(configuration.experiment({}), configuration.options.folder).cluster.kinds[0]
    names = [gpu.lower(), *(name for name, node in node_types().items() if node.gpu.name == gpu)]
    for name in names:
        if name in prices:
            return prices[name]
    raise ConfigError(f"--price {text}: has no price of {gpu}; it has {', '.join(prices)}")


def _positive(value: Any) -> float:
    """A price; raises `ValueError` or `TypeError` for what is none."""
    if not 0 <= (price := float(value)) < math.inf:
        raise ValueError(value)
    return price


def _print_check(own: Any, configuration: Configuration, log: Path, json_file: Path | None) -> None:
    table, why_not = own.check(configuration, log)
    data = {"phases": table.to_dict("records"), "own_error": own.error, "checks": own.checks}
    if write_json(json_file, data):
        return
    print_tables([Table.of("", written("check", table))])
    if own.error is not None:
        runs = f"{len(own.checks)} run{'s' * (len(own.checks) != 1)} of yours"
        echo(f"over {runs} steps were predicted within {own.error:.1%} in the mean: the interval of what is tuned next")
    echo(f"not calibrated to it: {why_not}" if why_not else f"the next tuning starts from {own.calibration}")


def _print(found: Tuned, price: float | None, error: float | None, *, verbose: bool) -> None:
    from rlsim.results.tune.systems import FEW, LATE

    refused = ", ".join(f"{count} {_REFUSED[kind]}" for kind, count in found.excluded.items())
    say(
        f"{found.evaluated} sets of settings tried in {found.seconds:.0f} s"
        + (f"; of these {refused}" if refused else "")
    )
    print_tables([*(_parts(found.parts) if verbose and found.parts else ()), *_changes(found), _means(found, price),
                  *_frontiers(found, price), *_systems(found), *_rests(found)])  # fmt: skip
    if found.untried:
        say(f"not tried: {', '.join(found.untried)}; give a larger --budget, or more --trials")
    for line in found.no_gpus:
        say(line)
    for why in (FEW, LATE):
        if names := [name for name, own in found.not_tried.items() if own == why]:
            say(f"systems {why}: {', '.join(names)}; give a larger --budget")
    for name, why in found.not_tried.items() if verbose else ():
        say(f"does not apply: {name}: {why}", "dim")
    if not found.unfit and any(not row["gains"] for row in found.assumptions):
        say("time was over: what has no gain above was not tried at its ends; give a larger --budget")
    for other in found.beside:
        keys = " ".join(override(key, value) for key, value in other["changes"].items())
        asked = "--gpus N" if other["kind"] == "gpus" else f"--allow {other['kind']}"
        say(f"left alone, as it {other['what']} ({asked}): {keys}: {other['gain']:.2f} times more")
    for words, why in found.unsteady.items():
        say(f"{words} it is not steady, so its rate may not last: {why}")
    say(f"binds {'as tuned' if found.best else 'as configured'}: {found.binds}{_idle(found.parts)}")
    for line in verdict(found, error):
        echo(line)


def _changes(found: Tuned) -> Iterator[Table]:

    if found.changes:
        title = "Changes, times as fast: alone, and in the set (needed: without it the set does not fit)"
        yield Table.of(title, written("changes", found.changes, override=override), words=(2,), prose=2)


def _dollars(price: float, gpus: float, rate: float) -> float:
    return price * gpus / 3.6 / rate if rate else math.nan


def _dollars_of_both(found: Tuned, price: float) -> list[float]:
    both = zip(found.gpus, (found.before, found.after), strict=True)
    return [_dollars(price, gpus, means.get("responses_per_s", 0.0)) for gpus, means in both]


def _means(found: Tuned, price: float | None) -> Table:
    each = zip((found.before, found.after), found.gpus, _dollars_of_both(found, price or 0.0), strict=True)
    both = [{**means, "gpus": gpus, "dollars": dollars} for means, gpus, dollars in each]
    rows = written("means", both, several=found.gpus[0] != found.gpus[1], priced=price is not None)
    return Table("", ["means", "as configured", "tuned"], [[name, *cells] for name, cells in rows.items()])


def _frontiers(found: Tuned, price: float | None) -> Iterator[Table]:
    words = {"staleness": "Staleness, and the fastest that was found with it", "gpus": "GPUs, and the fastest on them"}
    for name, each in found.frontiers.items():
        several = name == "gpus" or any(row["gpus"] != found.gpus[0] for row in each)
        known = {"of": name, "several": several, "cost": price is not None and partial(_dollars, price)}
        yield Table.of(f"{words[name]} (search's draw)", written("frontier", each, **known), words=())


def _systems(found: Tuned) -> Iterator[Table]:
    from rlsim.results.tune.answer import LEAST

    better = [row for row in found.systems if row["gain"] >= LEAST]
    if found.systems:
        others = ", ".join(row["system"] for row in found.systems if row not in better)
        caption = f"no faster: {others}" if others else ""
        title = "Systems that must be built, times as fast as the settings above (95%: the first five, three draws)"
        yield Table.of(title, written("systems", better), 1, caption=caption)


def _rests(found: Tuned) -> Iterator[Table]:
    if found.assumptions:
        own = number(found.assumptions[0]["gain"])
        told = f": the gain at both ends of what is assumed (search's draw: {own} as taken; no fit: not both run there)"
        title = f"What the answer rests on{'' if found.unfit else told}"
        yield Table.of(title, written("rests", found.assumptions), 1, 2, 3, prose=3)


def _parts(parts: Parts) -> Iterator[Table]:
    memory = written("memory", parts.memory.fillna({"why_not": ""}))
    yield Table.of("What fits: rollout, GB of each GPU", memory, words=(8,), prose=8)
    yield Table.of("What fits: the other calls, GB", written("calls", parts.memory_calls))
    causes = [name for name in parts.idle.columns if name != "busy"]
    means = parts.idle[causes].mean()
    rows = [[_cause(name), share(means[name], 1)] for name in causes]
    barriers = [[f"stage barrier: {row['waits_for'] or 'nothing runs'}", share(row["share"], 1)]
                for row in parts.waits.to_dict("records")]  # fmt: skip
    yield Table("", ["idle, by cause", "share of GPU time"], [*rows, *barriers])


def _cause(name: str) -> str:
    words = {"kv_limit": "KV cache or max_num_seqs", "tool_queues": "queues for sandboxes and workers"}
    return words.get(name, name.replace("_", " "))


def _idle(parts: Parts | None) -> str:
    from rlsim.results.tune.parts import CAUSES

    if parts is None:
        return ""
    means = parts.idle[["idle", *CAUSES]].mean()
    cause = _cause(str(means[list(CAUSES)].idxmax()))
    idle = share(means["idle"], 0)
    return f"; GPUs are idle for {idle}" + f", most of it for {cause}" * (idle != share(0.0, 0))


def verdict(found: Tuned, error: float | None = None) -> list[str]:
    """The answer in a sentence, and the lines to paste."""

    few, many = found.gpus
    turning = [row["assumed"] for row in found.assumptions if any(one is not None and one < 1 for one in row["gains"])]
    answer = sentence(
        "tuned",
        **vars(found),
        few=few,
        many=many,
        each=number(found.gain * few / many if many else math.nan),
        fast="cheap" if found.money else "fast",
        took=number(found.after.get("step_time_s"), 1),
        modelled=not math.isnan(found.model_low),
        whose="errors of costs" if error is None else "the errors of your own runs",
        sure=found.sure,
        turning=" or ".join(turning),
    )
    return [answer, *(f"  {override(key, value)}" for key, value in found.best.items())]

"""How good the answers of `rlsim tune` are: against a longer search, random legal sets, and the settings as they are.

    python benchmarks/tune.py CLONES                    # folders verl, nemo, areal, slime: hours
    python benchmarks/tune.py CLONES --only areal-gsm8k --short 60 --long 120 --random 20 --seeds 5

benchmarks/tune.yaml lists the configurations. Budgets are seconds of CPU in one process: 120 are what a minute on two
cores has. All sets are judged on the same fresh draws, paired; of synchronous configurations one step each. Prints a
line of JSON for each configuration: gains over the settings as they are, ratios with 95% intervals, how many sets were
tried, and whether the printed settings, read as `rlsim init` reads them and run, give the predicted throughput to the
digit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import rlsim
from rlsim.base.reading import plain, read_yaml
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.summary import mean_ratio
from rlsim.frameworks.parts import Options
from rlsim.results.tune.answer import Wish, tune
from rlsim.results.tune.search import changes_of
from rlsim.results.tune.space import axes_of
from rlsim.results.tune.trial import Configuration, Run, tried

#: Draws of the judgement, and of random sets, which no search has seen.
JUDGED_FROM, RANDOM = 900_000, 12_345


def random_best(configuration: Configuration, count: int) -> tuple[dict[str, Any], int]:
    """The fastest of so many random sets that run, and how many were drawn for these."""
    axes = axes_of(LoadedExperiment.of(configuration.experiment({}), configuration.options.folder))
    generator, best, rate, ran, drawn = np.random.default_rng(5), dict[str, Any](), 0.0, 0, 0
    while ran < count and drawn < 60 * count:
        drawn += 1
        choice = frozenset(
            (i, int(generator.integers(len(axis.options)))) for i, axis in enumerate(axes) if generator.random() < 0.5
        )
        trial = tried(configuration, changes_of(axes, choice), Run(RANDOM, 1))
        ran += not trial.kind
        if trial.rate > rate:
            best, rate = dict(trial.changes), trial.rate
    return best, drawn


def same_digits(configuration: Configuration, changes: Mapping[str, Any]) -> bool:
    """Whether the changed configuration, run as an experiment, gives what its trial gave."""
    experiment = configuration.experiment(changes)
    data = json.loads(experiment.model_dump_json(exclude_unset=True)) | {"systems": list(experiment.systems)}
    result = rlsim.run({**data, "seeds": [JUDGED_FROM], "certainty": 0, "cases": {}})
    row = result.summary().set_index("system").loc[result.manifest["baseline"]]
    return bool(tried(configuration, changes, Run(JUDGED_FROM)).rate == row["responses_per_s"])


def judged(name: str, configuration: Configuration, given: argparse.Namespace) -> dict[str, Any]:
    """The line of a configuration."""
    wish = Wish()
    short = tune(configuration, wish, budget_s=given.short, workers=1, clock=time.process_time)
    long = tune(configuration, wish, budget_s=given.long, workers=1, seed=1, clock=time.process_time)
    random, drawn = random_best(configuration, given.random)
    sets = {"now": {}, "short": dict(short.best), "long": dict(long.best), "random": random}
    rates = {
        which: np.array([tried(configuration, one, Run(JUDGED_FROM + seed, 1)).rate for seed in range(given.seeds)])
        for which, one in sets.items()
    }
    ratios = {}
    for which, base in (("short", "now"), ("long", "now"), ("short", "long"), ("short", "random")):
        if rates[base].all() and rates[which].all():
            pairs = (rates[which] / rates[base]).tolist()
            ratios[f"{which}/{base}"] = [*mean_ratio(pairs)]
    return {
        "name": name, "sets": short.evaluated, "ran": short.legal, "long_sets": long.evaluated, "random": given.random,
        "drawn": drawn, **ratios, "promised": [short.gain, short.gain_low, short.gain_high], "best": sets,
        "same_digits": same_digits(configuration, short.best),
    }  # fmt: skip


def main() -> None:
    """Judge every configuration, one after the other."""
    parser = argparse.ArgumentParser(description="How good the answers of rlsim tune are.")
    parser.add_argument("clones", type=Path, help="folder with clones of the projects")
    parser.add_argument("--only", action="append", help="names of configurations")
    parser.add_argument("--short", type=float, default=120, help="CPU seconds of the answer that is judged")
    parser.add_argument("--long", type=float, default=1200, help="CPU seconds of the longer search")
    parser.add_argument("--random", type=int, default=200, help="random legal sets")
    parser.add_argument("--seeds", type=int, default=20, help="fresh draws")
    given = parser.parse_args()
    for row in plain(read_yaml(Path(__file__).with_suffix(".yaml")))["configurations"]:
        if given.only and row["name"] not in given.only:
            continue
        file = given.clones / row["of"] / row["file"] if row["of"] else Path(row["file"])
        options = Options(Path(), "h100") if row["of"] else Options(file.resolve().parent)
        configuration = Configuration(row["of"], (str(file), *row.get("more", ())), options)
        print(json.dumps(judged(row["name"], configuration, given)), flush=True)


if __name__ == "__main__":
    main()

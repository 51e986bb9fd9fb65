"""Part `sensitivity`: how far the published figures depend on what the papers leave open, one input at a time.

What is changed are rows of the evidence (`sensitivity.yaml`); here is what a setting cannot say, and what is shown.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evidence.validate import pat, real, rollpacker
from evidence.validate.parts import Options, Section
from evidence.validate.rows import markdown
from evidence.validate.runs import run
from rlsim.base.reading import read_yaml
from rlsim.base.schema import Schema, load, validate
from rlsim.cost.calibration import load_calibration
from rlsim.experiment.build import find_trace
from rlsim.experiment.load import load_experiment, set_path
from rlsim.experiment.result import Result
from rlsim.trace.files import write_trace
from rlsim.trace.generate import Recipe, draw_trace


class Study(Schema):
    """An experiment, what is set in all of its runs, and the changes by what they are in words."""

    experiment: str
    always: dict[str, Any]
    changes: dict[str, dict[str, Any]]

    def runs(self, scratch: Path) -> Iterator[tuple[str, Result]]:
        """The experiment under each change in turn; files go to `scratch`."""
        for what, change in self.changes.items():
            settings: dict[str, Any] = {}
            for given in (self.always, change):
                for name, value in given.get("make", {}).items():
                    settings |= _MADE[name](scratch, value, self.experiment)
                settings |= {key: value for key, value in given.items() if key != "make"}
            yield what, run(self.experiment, overrides=settings)


class Studies(Schema):
    """The studies by what they are of."""

    pat: Study
    pat_batch: Study
    pat_a40: Study
    rollpacker_7b: Study
    rollpacker_32b: Study
    timeouts: Study
    preemptions: Study
    fused: Study
    oppo: Study
    real: Study


def section(options: Options) -> Section:
    """Every setting of every system (about five minutes)."""
    studies = load(options.evidence / "sensitivity.yaml", Studies)
    shown = {"timeouts": _timeouts, "preemptions": _preemptions, "fused": _fused, "real": _real}
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in Studies.model_fields:
            options.progress(f"sensitivity: {name}")
            rows = []
            for what, result in getattr(studies, name).runs(Path(folder)):
                rows += shown.get(name, _pat if name.startswith("pat") else _speedups)(what, result, options)
            headings = dict.fromkeys(key for row in rows for key in row)
            tables[name] = markdown(list(headings), [[_figure(row.get(key)) for key in headings] for row in rows])
    return Section((), (), tables, None, "")


def _figure(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "—" if value is None or math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


# ---- what is shown of a run: rows by heading -------------------------------------------------------------------------

Rows = list[dict[str, float | str]]


def _pat(what: str, result: Result, _: Options) -> Rows:
    """Generation times (s), and PAT's speedups of generation and of the step over the fastest static TP.

    "As published" is the step's speedup of PAT that deals responses anew at a switch alone, where the study has it.
    """
    rows: Rows = []
    mean = pat.means(result)
    for case in dict.fromkeys(case for case, _ in mean):
        static = {name: mean[case, name] for name in pat.STATIC if (case, name) in mean}  # a TP may not fit
        best, best_step = (min(one[column] for one in static.values()) for column in ("gen_time_s", "step_time_s"))
        own, published = mean[case, "pat"], mean.get((case, "as published"))
        rows.append(
            {"setting": f"{what}, cap {case}" if case else what}
            | {name: static[name]["gen_time_s"] if name in static else math.nan for name in pat.STATIC}
            | {"pat": own["gen_time_s"], "over best": best / own["gen_time_s"]}
            | {"over TP2": static["verl-tp2"]["gen_time_s"] / own["gen_time_s"] if "verl-tp2" in static else math.nan}
            | {"step over best": best_step / own["step_time_s"]}
            | ({"as published": best_step / published["step_time_s"]} if published else {})
            | {"switches": own["switches"]}
        )
    return rows


def _speedups(what: str, result: Result, _: Options) -> Rows:
    """Every system over the baseline."""
    return [{"setting": what} | {system: values["speedup"] for system, values in rollpacker.by_system(result).items()}]


def _timeouts(what: str, result: Result, _: Options) -> Rows:
    mean = rollpacker.scored_s(result)
    fixed_s, adaptive_s = mean["fixed"], mean["adaptive"]
    return [{"setting": what, "fixed s": fixed_s, "adaptive s": adaptive_s, "fixed / adaptive": fixed_s / adaptive_s}]


def _preemptions(what: str, result: Result, _: Options) -> Rows:
    """Preemptions, and the time of short rounds at TP2 over TP1."""
    mean = rollpacker.means(result)
    short, long, other = mean["tp1", "short"], mean["tp1", "long"], mean["tp2", "short"]
    few = short["preemptions"]
    return [{
        "setting": what,
        "preemptions a short round, TP1": few,
        "short / long": few / long["preemptions"] if long["preemptions"] else math.nan,
        "TP2 / TP1": other["preemptions"] / few if few else math.nan,
        "time TP2 / TP1": other["gen_time_s"] / short["gen_time_s"],
    }]  # fmt: skip


def _fused(_: str, result: Result, __: Options) -> Rows:
    """RollPacker over the strengthened RLHFuse, by what that is taken to be."""
    found = [(name, values["speedup"]) for name, values in rollpacker.by_system(result).items()]
    return [{"setting": name, "RollPacker's speedup": 1 / speedup} for name, speedup in found[1:]]


def _real(what: str, result: Result, options: Options) -> Rows:
    """REAL's two published plans: calls and iterations against the published seconds."""
    found, steps, published = real.call_seconds(result), real.step_seconds(result), real.call_published_s(options)
    ratios = [[found[name, call] / s for call, s in published[name].items()] for name in real.PLANS]
    within = sum(abs(ratio - 1) <= 0.25 for own in ratios for ratio in own)
    row: dict[str, float | str] = {"setting": what, "calls within 25%": f"{within} of {sum(map(len, ratios))}"}
    row |= {f"ratios, {name}": f"{min(own):.2f}–{max(own):.2f}" for name, own in zip(real.PLANS, ratios, strict=True)}
    row |= {f"{name} s": f"{steps['', name]:.1f}" for name in real.PLANS}
    return [row | {"gain": f"{steps['', 'heuristic'] / steps['', 'published-plan']:.2f}"}]


# ---- what a setting cannot say: settings, from a value of `make` and the experiment's name --------------------------


def _host_time(scratch: Path, factors: tuple[float, float], _: str) -> dict[str, Any]:
    """vLLM's calibration with host time per step and per sequence multiplied, as a file; SGLang's has none."""
    from ruamel.yaml import YAML

    step, sequence = factors
    calibration = load_calibration("h100-vllm")
    host = calibration.host
    changed = {
        "step_s": host.step_s * step,
        "sequence_s": host.sequence_s * sequence,
        "prefill_s": host.prefill_s * step,
    }
    path = scratch / f"host-{step:g}-{sequence:g}.yaml"
    data = calibration.model_copy(update={"host": host.model_copy(update=changed)}).model_dump(mode="json")
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(data, file)
    return {"calibration": str(path)}


def _trace(scratch: Path, change: tuple[str, dict[str, Any]], _: str) -> dict[str, Any]:
    """A shipped trace drawn with changes of its recipe, as a file."""
    name, settings = change
    recipe = read_yaml(find_trace(name, Path()).with_suffix(".yaml"))
    for key, value in settings.items():
        set_path(recipe, key, value)
    path = scratch / f"{name}-{len(list(scratch.iterdir()))}.parquet"
    write_trace(draw_trace(validate(recipe, Recipe)), path)
    return {"trace.path": str(path)}


def _without(_: Path, system: str, experiment: str) -> dict[str, Any]:
    """All systems of the experiment but one."""
    return {"systems": [one for one in load_experiment(experiment)[0].systems if one != system]}


_MADE: dict[str, Callable[[Path, Any, str], dict[str, Any]]] = {
    "host_time": _host_time, "recipe": _trace, "without": _without,
}  # fmt: skip

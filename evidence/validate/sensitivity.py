"""Part `sensitivity`: how far the published figures depend on what the papers leave open, one input at a time.

What is changed are rows of the evidence (`sensitivity.yaml`); here is what a setting cannot say, and what is shown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evidence.validate import real
from evidence.validate.parts import Options, Section
from evidence.validate.published import by_case, evaluated, named, run, told
from evidence.validate.rows import markdown
from rlsim.base.reading import read_yaml
from rlsim.base.schema import Schema, validate
from rlsim.cost.calibration import load_calibration
from rlsim.experiment.build import find_trace
from rlsim.experiment.load import load_experiment, set_path
from rlsim.experiment.result import Result
from rlsim.trace.files import write_trace
from rlsim.trace.generate import Recipe, draw_trace

Rows = list[dict[str, str]]


class Study(Schema):
    """An experiment, what is set in all of its runs, and the changes by what they are in words.

    `columns` are expressions of what is told of a case by system (`runs.by_case`), or of each system but the first
    (`each: system`); without them every system's speedup is shown.
    """

    experiment: str
    always: dict[str, Any]
    changes: dict[str, dict[str, Any]]
    columns: dict[str, str] = Field(default_factory=dict)
    each: Literal["case", "system"] = "case"

    def results(self, scratch: Path) -> Iterator[tuple[str, Result]]:
        for what, change in self.changes.items():
            settings: dict[str, Any] = {}
            for given in (self.always, change):
                for name, value in given.get("make", {}).items():
                    settings |= _MADE[name](scratch, value, self.experiment)
                settings |= {key: value for key, value in given.items() if key != "make"}
            yield what, run(self.experiment, overrides=settings)

    def rows(self, what: str, result: Result) -> Rows:
        if self.each == "system":
            _, *others = told(result).items()
            return [{"setting": system, **self._cells(own)} for system, own in others]
        cases = by_case(result).items()
        return [{"setting": f"{what}, cap {case}" if case else what, **self._cells(own)} for case, own in cases]

    def _cells(self, names: dict[str, Any]) -> dict[str, str]:
        cells = {} if self.columns else {system: own["speedup"] for system, own in names.items()}
        for heading, expression in self.columns.items():
            with suppress(KeyError, ZeroDivisionError):  # a TP that does not fit, no preemption
                cells[heading] = evaluated(expression, named(names))
        return {name: f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for name, value in cells.items()}


def section(options: Options) -> Section:
    """Every setting of every system (about five minutes)."""
    path, tables = options.evidence / "sensitivity.yaml", {}
    with tempfile.TemporaryDirectory() as folder:
        for name, given in read_yaml(path).items():
            options.progress(f"sensitivity: {name}")
            study, rows = validate(given, Study, f"{path}: {name}"), Rows()
            for what, result in study.results(Path(folder)):
                rows += _real(what, told(result), options) if name == "real" else study.rows(what, result)
            headings = dict.fromkeys(["setting", *study.columns, *(key for row in rows for key in row)])
            tables[name] = markdown([*headings], [[row.get(key, "—") for key in headings] for row in rows])
    return Section((), (), tables, "")


def _real(what: str, found: dict[str, Any], options: Options) -> Rows:
    """REAL's two published plans: calls and iterations against the published seconds."""
    published, steady_s = real.call_published_s(options), {plan: found[plan]["steady_s"] for plan in real.PLANS}
    ratios = [[found[plan][f"{call}_s"] / s for call, s in published[plan].items()] for plan in real.PLANS]
    within = sum(abs(ratio - 1) <= 0.25 for own in ratios for ratio in own)
    row = {"setting": what, "calls within 25%": f"{within} of {sum(map(len, ratios))}"}
    row |= {f"ratios, {name}": f"{min(own):.2f}–{max(own):.2f}" for name, own in zip(real.PLANS, ratios, strict=True)}
    row |= {f"{plan} s": f"{seconds:.1f}" for plan, seconds in steady_s.items()}
    return [row | {"gain": f"{steady_s['heuristic'] / steady_s['published-plan']:.2f}"}]


# ---- what a setting cannot say: settings, from a value of `make` and the experiment's name --------------------------


def _host_time(scratch: Path, factors: tuple[float, float], _: str) -> dict[str, Any]:
    """vLLM's calibration with host time per step and per sequence multiplied, as a file; SGLang's has none."""
    by = dict(zip(("step_s", "sequence_s", "prefill_s"), (*factors, factors[0]), strict=True))
    calibration = load_calibration("h100-vllm")
    host = calibration.host.model_copy(update={name: getattr(calibration.host, name) * x for name, x in by.items()})
    path = scratch / f"host-{factors[0]:g}-{factors[1]:g}.yaml"
    path.write_text(calibration.model_copy(update={"host": host}).model_dump_json(), encoding="utf-8")
    return {"calibration": str(path)}


def _trace(scratch: Path, change: tuple[str, dict[str, Any]], _: str) -> dict[str, Any]:
    name, settings = change
    recipe = read_yaml(find_trace(name, Path()).with_suffix(".yaml"))
    for key, value in settings.items():
        set_path(recipe, key, value)
    path = scratch / f"{name}-{len(list(scratch.iterdir()))}.parquet"
    write_trace(draw_trace(validate(recipe, Recipe)), path)
    return {"trace.path": str(path)}


def _without(_: Path, system: str, experiment: str) -> dict[str, Any]:
    return {"systems": [one for one in load_experiment(experiment)[0].systems if one != system]}


_MADE: dict[str, Callable[[Path, Any, str], dict[str, Any]]] = {
    "host_time": _host_time, "recipe": _trace, "without": _without,
}  # fmt: skip

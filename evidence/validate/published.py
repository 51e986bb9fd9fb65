"""Published figures as rows of a file of the evidence: what was published, and what of rlsim's it is compared with; the
experiments that they are compared with, and every number that is taken from their results, by name."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from pydantic import Field

from evidence.validate.parts import Options, Section
from evidence.validate.rows import Kind, Row, number, summarise
from rlsim.base.schema import Schema, load
from rlsim.errors import ConfigError
from rlsim.experiment import run as experiments
from rlsim.experiment.result import Result

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max}
#: What stands in an expression for a quotient or difference of seconds; rates are none.
_OF_SECONDS = re.compile(r"\S*(?<!per)_s\)? [/-] \S*(?<!per)_s")


class Published(Schema):
    """One figure. `value` and `of` are numbers or expressions; `of` has names of what the part computes."""

    case: str
    quantity: str
    value: float | str
    of: str
    kind: Kind = "output"
    bound: float | None = None
    note: str = ""  # `{name[of][part]:.0f}` stands for what the part computes
    seconds: str = ""  # the expression of seconds behind a ratio, where `of` is not one


class Figures(Schema):
    """The figures of one paper; `runs`: the experiments that they are compared with; `given`: what else the part needs
    of the paper."""

    source: str
    rows: tuple[Published, ...]
    runs: dict[str, Run] = Field(default_factory=dict)
    given: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def results(self) -> dict[str, Result]:
        return {name: one.result() for name, one in self.runs.items()}


def figures(options: Options, part: str) -> Figures:
    """The figures of a part. Raises `ConfigError` for a file that is missing or damaged."""
    return load(options.evidence / f"{part}.yaml", Figures)


def published_rows(
    options: Options, part: str, found: Mapping[str, Any], whose: str = "published", file: str = ""
) -> list[Row]:
    """Every figure of a part beside what rlsim finds: numbers by name, in mappings by name.

    `file`: the file's name, if it is not the part's. Raises `ConfigError` for a name that is not there, with the row.
    """
    names = named(found)
    rows = []
    for item in figures(options, file or part).rows:
        try:
            value, simulated = evaluated(str(item.value), names), evaluated(item.of, names)
            seconds = _seconds(str(item.value), {}, f"{whose} "), _seconds(item.seconds or item.of, names)
            text = "; ".join(filter(None, (item.note.format(**names), *seconds)))
        except (KeyError, TypeError, SyntaxError) as error:
            raise ConfigError(f"{file or part}.yaml: {item.case}, {item.quantity}: {item.of}: {error}") from None
        rows.append(Row(part, item.case, item.quantity, value, simulated, text, item.kind, bound=item.bound))
    return rows


def published_section(options: Options, part: str, found: Mapping[str, Any], **tables: str) -> Section:
    """The section of a paper's figures, and other tables."""
    return Section(tuple(published_rows(options, part, found)), (), tables)


def measured_section(rows: Sequence[Row], depth: int, **tables: str) -> Section:
    """The section of measured rows; those whose cases agree in the first `depth` components are summarised together."""
    return Section(tuple(rows), tuple(summarise(rows, depth)), tables, "measured")


def evaluated(text: str, names: Mapping[str, Any]) -> float:
    """An expression of numbers, names with dots, the four operations, and `min` and `max` of names that are there."""
    return float(_value(ast.parse(text, mode="eval").body, names))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Attribute):
        return _value(node.value, names)[node.attr]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        there = []
        for argument in node.args:
            with suppress(KeyError):
                there.append(_value(argument, names))
        return _FUNCTIONS[node.func.id](there)
    return names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)


def _seconds(text: str, names: Mapping[str, Any], whose: str = "") -> str:
    """The seconds that an expression divides or subtracts, to read beside its value; "" for another expression."""
    if not (_OF_SECONDS.fullmatch(text) if names else re.fullmatch(r"[\d.]+ / [\d.]+", text)):
        return ""
    left, sign, right = text.split()
    return f"{whose}{number(evaluated(left, names))} {sign} {number(evaluated(right, names))} s"


def named(found: Any) -> Any:
    """Mappings with names that an expression can have: verl-tp2 is verl_tp2, + reward is reward, 6K is at_6K."""
    if not isinstance(found, Mapping):
        return found
    names = {re.sub(r"\W+", "_", str(key)).strip("_"): value for key, value in found.items()}
    return {f"at_{name}" if name[:1].isdigit() else name: named(value) for name, value in names.items()}


class Run(Schema):
    """An experiment, shipped or spelled out, and what is set in it."""

    experiment: str | dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)

    def result(self, more: Mapping[str, Any] = MappingProxyType({})) -> Result:
        return run(self.experiment, {**self.set, **more})


def run(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})) -> Result:
    """`rlsim.run`, without worlds: what is compared with published figures is the calibration itself."""
    return experiments.run(source, overrides={**overrides, "certainty": 0})


def told(result: Result) -> dict[str, Any]:
    """What `by_case` says; of a result of one case without a name, of that case."""
    cases = by_case(result)
    return cases[""] if [*cases] == [""] else cases


def by_case(result: Result) -> dict[str, Any]:
    """By case and system the numbers of the summary and:

    - `generate_s` and so on: mean seconds of each call; `scored_s`: from the start of generation to the last score;
    - `steady_s`: mean seconds of a step without the first and the last, which overlap on one side only;
    - `every`, `short`, `long`: means of all steps, of a kind of round.
    """
    steps, key = result.steps, ["case", "system"]
    found: dict[Any, dict[str, Any]] = _by(result.summary().set_index(key))
    calls = result.calls.assign(seconds=result.calls["end_at"] - result.calls["start_at"])
    for (*at, call), mean in _by(calls.groupby([*key, "call"])[["seconds"]].mean()).items():
        found[tuple(at)][f"{call}_s"] = mean["seconds"]
    of_kind = {kind: rows.groupby([*key, "seed", "step"]) for kind, rows in calls.groupby("kind")}
    if {"reward", "generate"} <= of_kind.keys():
        scored = of_kind["reward"]["end_at"].max() - of_kind["generate"]["start_at"].min()
        for at, seconds in scored.groupby(key).mean().to_dict().items():
            found[at]["scored_s"] = seconds
    kinds = pd.concat([steps.assign(round="every"), steps])
    for (*at, kind), means in _by(kinds.groupby([*key, "round"]).mean(numeric_only=True)).items():
        found[tuple(at)][kind] = means
    for at, times in steps.groupby(key)["step_time_s"]:
        found[at]["steady_s"] = float(times.iloc[1:-1].mean())
    cases: dict[str, Any] = {}
    for (case, system), own in found.items():
        cases.setdefault(case, {})[system] = own
    return cases


def busy_share(calls: pd.DataFrame, spans: pd.DataFrame, scoring: str, kinds: Sequence[str], gpus: int) -> float:
    """Share of the time of so many GPUs, from the start of generation to the end of scoring, that is of these kinds."""
    key = ["seed", "step"]
    times = calls.set_index(key)
    starts, ends = times[times["call"] == "generate"]["start_at"], times[times["call"] == scoring]["end_at"]
    at_work = spans[spans["kind"].isin(kinds)]
    seconds = at_work["end_at"].clip(upper=ends.loc[[*zip(*(at_work[k] for k in key), strict=True)]].to_numpy())
    busy_s = ((seconds - at_work["start_at"]).clip(lower=0) * at_work["gpus"]).sum()
    return float(busy_s / (gpus * (ends - starts).sum()))


def _by(frame: pd.DataFrame) -> dict[Any, dict[str, Any]]:
    return {at: {str(name): value for name, value in row.items()} for at, row in frame.to_dict("index").items()}

"""Verdicts on tables: no sentence and no colour that its table contradicts, on random tables."""

import math
import random
import re
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from rlsim.experiment.summary import EXPLAINED
from rlsim.experiment.verdict import Judged, decided, judge
from rlsim.results.report.method import cases_sentence
from rlsim.results.report.speedups import VERDICTS, speedups

NAN = math.nan
#: What answers say, each of which must be met.
KINDS = (
    "is the fastest", "may be faster still", "Nothing beats", "Nothing is surely", "cannot be told apart", "comes next",
    "as fast as", "All systems are as fast", "No system can be compared", "nothing to compare it with",
    "trains on the most", "Not comparable", "Not steady: s", "tokens per second", "one seed, no interval",
)  # fmt: skip
CLAIM = "is the fastest:| is faster than \\w+:| comes next, with| cannot be told apart from it, with"
FIGURE = r"(?P<ratio>[\d.]+) times the (?P<unit>responses|tokens) per second of (?P<base>\w+) \((?P<basis>[^;]*);"


def random_table(draw: random.Random) -> tuple[pd.DataFrame, str]:
    """A table as `Result.summary` has it, with intervals of any width and any of its marks, and its baseline."""
    seeds, worlds, unlike = draw.random() < 0.8, draw.random() < 0.6, draw.random() < 0.4
    spread = draw.choice([0.0005, 0.01, 0.05, 0.3])
    rows = []
    for i in range(draw.randint(1, 7)):
        ratio = math.exp(draw.gauss(0, spread)) if i else 1.0
        lengths = draw.choice([1.0, 0.7, 1.015]) if unlike and i else 1.0
        half, model = abs(draw.gauss(0, spread)) * bool(i), abs(draw.gauss(0, spread)) * bool(i)
        tokens = ratio * lengths
        rows.append(
            {
                "system": f"s{i}",
                "responses_per_s": 10 * ratio,
                "tokens_per_s": 1e4 * tokens,
                "speedup": ratio,
                "speedup_low": ratio * math.exp(-half) if seeds else NAN,
                "speedup_high": ratio * math.exp(half) if seeds else NAN,
                "token_speedup": tokens,
                "token_speedup_low": tokens * math.exp(-half) if seeds else NAN,
                "token_speedup_high": tokens * math.exp(half) if seeds else NAN,
                "speedup_model_low": ratio * math.exp(-model) if worlds and i else NAN,
                "speedup_model_high": ratio * math.exp(model) if worlds and i else NAN,
                "unsteady": draw.choice(["", "", "", "", "it fills", "it drifts"]),
            }
        )
    draw.shuffle(rows)
    table = pd.DataFrame(rows)
    if draw.random() < 0.1:
        table = table[table["system"] != "s0"]
        table.loc[:, [name for name in table if "speedup" in str(name)]] = NAN
    return (table, "s0") if len(table) else (random_table(draw))


class Truth(NamedTuple):
    """Whether a system can be compared, and the ratio, its unit and the interval that decide."""

    comparable: bool
    ratio: float
    unit: str
    low: float
    high: float


def truth(table: pd.DataFrame, baseline: str) -> dict[str, Truth]:
    """By system, from the table alone."""
    rows = {row["system"]: row for row in table.to_dict("records")}
    steady = {name: row["unsteady"] == "" for name, row in rows.items()}
    compared = steady.get(baseline, True)
    unlike = [abs(row["speedup"] / row["token_speedup"] - 1) > EXPLAINED for name, row in rows.items() if steady[name]]
    by = "token_speedup" if any(unlike) else "speedup"
    found = {}
    for name, row in rows.items():
        ends = [row[f"{by}_low"], row[f"{by}_high"]]
        ends += [row[f"speedup_model_{end}"] * row[by] / row["speedup"] for end in ("low", "high")]
        known = [float(np.round(end, 3)) for end in ends if not math.isnan(end)] or [NAN]  # as they are printed
        unit = "tokens" if by == "token_speedup" else "responses"
        found[name] = Truth(compared and steady[name], row[by], unit, min(known), max(known))
    return found


def contradictions(text: str, base: str, true: dict[str, Truth]) -> list[str]:
    """What the sentences say that the table does not."""
    others = {name: one for name, one in true.items() if one.comparable and name != base}
    found = []

    def claim(holds: object, what: str) -> None:
        if not holds:
            found.append(f"{what}: {text}")

    claim("1.00 times" not in text.split(";")[0] or "apart" in text, "1.00 times is no gain")
    if named := re.search(r"(\w+) is the fastest", text):
        best = others[named[1]]
        claim(not any(one.ratio > best.ratio for one in others.values()), "not the best ratio")
        claim((best.ratio if math.isnan(best.low) else best.low) > 1, "not surely faster")
    if named := re.search(r"(\w+) is faster than (\w+):", text):
        claim(others[named[1]].low > 1, "not surely faster")
        rival = others[re.search(r"(\w+) may be faster still", text)[1]]  # type: ignore[index]
        claim(rival.ratio > others[named[1]].ratio and rival.low <= 1, "no rival")
    if re.search(r"Nothing (beats|is surely)", text):
        surely = [one.ratio >= 1.005 and (one.ratio if math.isnan(one.low) else one.low) > 1 for one in others.values()]
        claim(not any(surely), "something beats it")
    if named := re.search(r"(\w+) cannot be told apart", text):
        claim(others[named[1]].low <= 1 <= others[named[1]].high, "the interval excludes 1")
    for name in re.findall(r"(\w+)(?=[\w, ]* (?:is|are) as fast as)", text):
        claim(name in ("and", "more") or abs(true[name].ratio - 1) <= 0.005, "not as fast")
    for name in re.findall(r"(s\d+) \(prompts", text):
        claim(not true[name].comparable, "comparable")
    if figure := re.search(rf"(?P<who>s\d+)(?: {CLAIM}) {FIGURE}", text):
        row = true[figure["who"]]
        claim(figure["unit"] == row.unit, "not the unit that decides")
        claim(abs(float(figure["ratio"]) - row.ratio) <= 0.0051, "not its ratio")
        if ends := re.findall(r"interval ([\d.]+) to ([\d.]+)", figure["basis"]):
            claim(np.allclose([float(end) for end in ends[0]], [row.low, row.high], atol=0.0051), "not its interval")
        else:
            claim(math.isnan(row.low), "an interval is not told")
    return found


def test_no_verdict_that_its_table_contradicts() -> None:
    draw, kinds = random.Random(7), dict[str, int]()
    for _ in range(500):
        table, baseline = random_table(draw)
        verdict = judge(table, baseline)
        text, true = " ".join(verdict.sentences()), truth(table, baseline)
        assert contradictions(text, baseline, true) == []
        for row in speedups(verdict).to_dict("records"):
            low, high = (row["speedup"] if math.isnan(row[end]) else row[end] for end in ("low", "high"))
            assert row["verdict"] in VERDICTS
            right = {"faster": low > 1, "slower": high < 1, "not told apart": low <= 1 <= high,
                     "as fast": f"{row['speedup']:.2f}" == "1.00", "baseline": row["system"] == baseline,
                     "not comparable": not true[row["system"]].comparable}  # fmt: skip
            assert right[row["verdict"]], (row, text)
            if row["verdict"] not in ("baseline", "not comparable"):
                assert true[row["system"]].comparable
                assert row["low"] == pytest.approx(true[row["system"]].low, nan_ok=True)
        told = re.search(r"In (\d) of 1", cases_sentence([verdict]))
        assert (told is not None and told[1] == "1") == bool(re.search("is the fastest|is faster than", text))
        kinds |= {kind: kinds.get(kind, 0) + 1 for kind in KINDS if kind in text}
    assert [kind for kind in KINDS if kinds.get(kind, 0) < 3] == []


def test_an_interval_is_not_rounded_twice() -> None:
    """1.255177 is 1.255 where it decides, and 1.26 in print, as elsewhere."""
    assert Judged("a", "faster", 1.262, round(1.255177, 3), 1.27, "seeds", 1.0, "").texts == ["1.26", "1.26", "1.27"]


def test_sweeps_are_decided_point_by_point() -> None:
    """Lengths differ at p only; at q the system that is ahead is not steady, at r the baseline."""
    table = pd.DataFrame(
        {"point": [*"ppqqrr"], "case": "", "system": [*"ababab"],
         "speedup": [1.0, 1.4, 1.0, 1.4, 1.0, 1.2], "speedup_low": [1.0, 1.3] * 3, "speedup_high": [1.0, 1.5] * 3,
         "token_speedup": [1.0, 0.7, 1.0, 0.7, 1.0, 1.2], "token_speedup_low": [1.0, 0.65] * 3,
         "token_speedup_high": [1.0, 0.75] * 3, "unsteady": ["", "", "", "it drifts", "it fills", ""]}
    )  # fmt: skip
    verdicts = {(str(point), ""): judge(rows, "a") for point, rows in table.groupby("point")}
    drawn = decided(table, verdicts)
    assert drawn["unit"].tolist() == ["tokens"] * 2 + ["responses"] * 4
    assert drawn["speedup"].tolist() == drawn["token_speedup"].tolist() == [1.0, 0.7, 1.0, 1.4, 1.0, 1.2]
    assert drawn.loc[1, ["speedup_low", "speedup_high"]].tolist() == [0.65, 0.75]
    assert (drawn["unsteady"] != "").tolist() == [False, False, False, True, True, True]
    assert verdicts["p", ""].outcomes == {"a": "baseline", "b": "slower"}

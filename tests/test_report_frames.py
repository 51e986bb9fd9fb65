"""The tables behind a report's charts, against figures computed by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import drawn
from result_tables import RUN, table

from rlsim.experiment.columns import TABLES
from rlsim.experiment.result import Result
from rlsim.results.report.chosen_run import Choice
from rlsim.results.report.gantt import (
    active_replicas,
    active_sequences,
    by_group,
    gantt,
    generation,
    gpus_by_tp,
    merged,
)
from rlsim.results.report.lengths import survival, trained_lengths
from rlsim.results.report.page import Figure, Page, Text, sections_of
from rlsim.results.report.shares import gpu_shares
from rlsim.results.report.speedups import seed_speedups
from rlsim.results.report.style import BUBBLE, GREY
from rlsim.results.report.sweep_page import (
    _labels,
    best_systems,
    cut,
    is_grid,
    is_number,
    label,
    levels,
    lines_chart,
    map_chart,
    sweep_blocks,
    sweep_findings,
    varying,
)


def span(gpu: int, gpus: int, start: float, end: float, kind: str, **more: Any) -> dict[str, Any]:
    return RUN | {"gpu": gpu, "gpus": gpus, "start_at": start, "end_at": end, "kind": kind, "tp": gpus} | more


def results(**tables: pd.DataFrame) -> Result:
    """One step of 10 s on four GPUs."""
    empty = {name: table(name) for name in TABLES}
    empty["steps"] = table("steps", RUN | {"step_time_s": 10.0})
    return Result(**{**empty, **tables}, manifest={"systems": {"": ["a"]}, "baseline": "a"})


CHOICE = Choice("", ("a",), 0, 0, "")


def test_shares_of_gpu_seconds() -> None:
    spans = table(
        "spans",
        span(0, 4, 0.0, 5.0, "decode"),  # 20 of 40 GPU-seconds
        span(0, 2, 5.0, 7.0, "train"),  # 4
        span(2, 1, 4.0, 9.0, "judge", shared=True),  # beside decode until 5: alone for 4
        span(3, 1, 9.0, 12.0, "decode"),  # 1 of it within the run
    )
    shares = gpu_shares(results(spans=spans), {"": 4})
    assert dict(zip(shares["kind"], shares["share"], strict=True)) == pytest.approx(
        {"decode": 21 / 40, "train": 4 / 40, "judge": 4 / 40, BUBBLE: 11 / 40}
    )


def test_speedup_of_every_seed() -> None:
    times = {("base", 0): 10.0, ("base", 1): 20.0, ("fast", 0): 5.0, ("fast", 1): 16.0}
    work = {"trained": 8, "tokens": 800}
    rows = [RUN | work | {"system": name, "seed": seed, "step_time_s": time} for (name, seed), time in times.items()]
    one = results(steps=table("steps", *rows))
    one = Result(**{**one.__dict__, "manifest": {"baseline": "base"}})
    frame = seed_speedups(one, "").set_index(["system", "seed"])["speedup"]
    assert frame.to_dict() == {("base", 0): 1.0, ("base", 1): 1.0, ("fast", 0): 2.0, ("fast", 1): 1.25}


def test_share_of_responses_at_least_as_long() -> None:
    curve = survival(np.array([1, 2, 2, 4]))
    assert dict(zip(curve["tokens"], curve["share"], strict=True)) == {1: 1.0, 2: 0.75, 4: 0.25}
    long = survival(np.arange(1, 5001))
    assert len(long) <= 251
    assert long["tokens"].iloc[-1] == 5000
    assert long["share"].iloc[-1] == pytest.approx(1 / 5000)


def test_systems_whose_steady_steps_trained_on_the_same_lengths_are_one_line() -> None:
    rows = [
        RUN | {"system": name, "response_tokens": tokens, "trained": tokens != 9}
        for name, lengths in (("a", (4, 8, 9)), ("b", (8, 4, 9)), ("c", (8, 8, 9)))
        for tokens in lengths
    ]
    filling = RUN | {"system": "b", "step": 1, "steady": False}  # of overlapping steps
    rows.append(filling | {"response_tokens": 100, "trained": True})
    steps = table("steps", *(RUN | {"system": name} for name in "abc")).merge(table("steps", filling), how="outer")
    one = results(responses=table("responses", *rows), steps=steps)
    groups = trained_lengths(Result(**{**one.__dict__, "manifest": {"systems": {"": ["a", "b", "c"]}}}), "")
    assert [group.systems for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].tokens.tolist() == [4, 8]
    assert groups[0].share_at(8) == 0.5


def test_active_sequences_replicas_and_gpus() -> None:
    stays = pd.DataFrame(
        {"admitted_at": [0.0, 1.0, 3.0, 0.0, np.nan], "left_at": [3.0, 2.0, 4.0, 0.5, 5.0]}
    )  # the second was preempted and came back as the third, the fourth was aborted, the last only waited
    at = np.array([0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert active_sequences(stays, at).tolist() == [2, 1, 2, 1, 1, 0, 0]
    spans = table(
        "spans",
        span(0, 2, 0.0, 2.0, "decode", label="replica 0"),
        span(4, 2, 0.0, 2.0, "decode", label="replica 0"),  # the same replica on a second run of GPUs
        span(2, 2, 0.0, 4.0, "prefill", label="replica 1", tp=4),
    )
    assert active_replicas(spans, at).tolist() == [2, 2, 2, 1, 1, 0, 0]
    by_tp = gpus_by_tp(spans, at)
    assert by_tp[by_tp["tp"] == 2]["gpus"].tolist() == [4, 4, 4, 0, 0, 0, 0]
    assert by_tp[by_tp["tp"] == 4]["gpus"].tolist() == [2, 2, 2, 2, 2, 0, 0]


def test_generation_counts_from_its_begin() -> None:
    one = results(
        calls=table("calls", RUN | {"call": "generate", "kind": "generate", "start_at": 2.0, "end_at": 6.0}),
        stays=table(
            "stays",
            RUN | {"call": "generate", "admitted_at": 2.0, "left_at": 4.0},
            RUN | {"call": "generate", "admitted_at": 2.0, "left_at": 6.0},
            RUN | {"call": "judge", "admitted_at": 2.0, "left_at": 6.0},
        ),
        spans=table("spans", span(0, 4, 2.0, 6.0, "decode", label="replica 0"), span(0, 4, 6.0, 9.0, "train")),
        switches=table("switches", RUN | {"at": 3.0, "from_tp": 2, "to_tp": 4, "weights_s": 0.5, "kv_s": 0.25}),
    )
    shown = generation(one, CHOICE, "a", moments=5)
    assert shown.duration_s == 4.0
    assert shown.sequences["at_s"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert shown.sequences["active"].tolist() == [2, 2, 1, 1, 0]
    assert shown.sequences["batch"].tolist()[:4] == [2.0, 2.0, 1.0, 1.0]
    assert np.isnan(shown.sequences["batch"].iloc[4])
    assert shown.switches[["at_s", "from_tp", "to_tp", "pause_s"]].values.tolist() == [[1.0, 2, 4, 0.75]]
    assert generation(results(), CHOICE, "a") is None


def test_timeline_by_gpu() -> None:
    spans = table(
        "spans",
        span(0, 2, -1.0, 1.0, "decode"),  # begun in the step before
        span(0, 2, 1.0, 3.0, "decode"),  # goes on: one mark
        span(0, 2, 4.0, 5.0, "decode"),
        span(1, 1, 4.0, 6.0, "judge", shared=True),
        span(3, 1, 9.0, 11.0, "train"),  # ends in the step after
    )
    shown = gantt(results(spans=spans), CHOICE, "a", 4, 8)
    marks = shown.marks.sort_values(["kind", "start_s"])
    assert marks[["kind", "start_s", "end_s"]].values.tolist() == [
        ["decode", 0.0, 3.0],
        ["decode", 4.0, 5.0],
        ["judge", 4.0, 6.0],
        ["train", 9.0, 10.0],
    ]
    assert marks["what"].tolist() == ["GPU 0–1, TP 2", "GPU 0–1, TP 2", "GPU 1, TP 1", "GPU 3, TP 1"]
    assert shown.marks["low"].round(2).min() == 0.06
    assert shown.beside
    assert not shown.resolution_s


def test_marks_are_merged_only_as_far_as_needed() -> None:
    many = [span(0, 1, i, i + 0.85, "decode", start_s=float(i), end_s=i + 0.85) for i in range(100)]
    frame = pd.DataFrame(many).assign(label="", shared=False)
    exact, bridged = merged(frame, 100.0, most=100)
    assert (len(exact), bridged) == (100, 0.0)
    fewer, bridged = merged(frame, 100.0, most=99)
    assert len(fewer) == 1
    assert 0.1 <= bridged < 0.3


def test_timeline_by_groups_of_gpus() -> None:
    spans = pd.DataFrame(
        [
            {"gpu": 0, "gpus": 12, "start_s": 0.0, "end_s": 4.0, "kind": "decode"},  # all of row 0, half of row 1
            {"gpu": 12, "gpus": 4, "start_s": 3.0, "end_s": 4.0, "kind": "train"},  # half a bin of row 1
        ]
    )
    marks = by_group(spans, [0, 8, 16], 8.0, bins=4)
    inside = marks.assign(low=(marks["low"] % 1 - 0.06) / 0.88, high=(marks["high"] % 1 - 0.06) / 0.88)
    found = inside[["kind", "start_s", "end_s", "low", "high", "what"]].round(6).values.tolist()
    assert found == [
        ["decode", 0.0, 4.0, 0.0, 1.0, "100% of the row's GPUs"],
        ["decode", 0.0, 4.0, 0.0, 0.5, "50% of the row's GPUs"],
        ["train", 2.0, 4.0, 0.5, 0.75, "25% of the row's GPUs"],
    ]


def points(axes: dict[str, list[Any]], systems: tuple[str, ...] = ("verl", "pat", "other")) -> pd.DataFrame:
    """A made-up sweep: `pat` is ahead where the first axis is large."""
    grid = pd.MultiIndex.from_product(axes.values(), names=list(axes)).to_frame(index=False)
    same = {"bubble_fraction": 0.1, "tail_fraction": 0.2, "unsteady": "", "unit": "responses", "staleness_max": 0}
    rows = []
    for number, point in enumerate(grid.to_dict("records")):
        for order, system in enumerate(systems):
            speedup = 1 + 0.1 * order * (number - 1)
            more = {"speedup": speedup, "speedup_low": speedup - 0.05, "speedup_high": speedup + 0.05}
            more |= {"token_speedup": speedup, "step_time_s": 100 / speedup, "responses_per_s": speedup}
            rows.append({**point, "system": system, **same, **more})
    return pd.DataFrame(rows)


def test_axes_of_a_sweep() -> None:
    frame = points({"cap": [8192, 4096], "engine": ["vllm", "sglang"], "fixed": [1]})
    assert varying(frame, ["cap", "engine", "fixed"]) == ["cap", "engine"]
    assert levels(frame["cap"]) == ["4,096", "8,192"]
    assert levels(frame["engine"]) == ["vllm", "sglang"]
    texts = [label(value) for value in (np.int64(8192), 0.125, True, None, "a")]
    assert texts == ["8,192", "0.125", "true", "none", "a"]
    assert is_grid(frame, ["cap", "engine"])
    diagonal = pd.DataFrame({"x": range(9), "y": range(9)})
    assert not is_grid(diagonal, ["x", "y"])


def test_slices_and_best_systems_of_a_sweep() -> None:
    frame = points({"cap": [1, 2], "prompts": [1, 2], "eta": [1.1, 1.2]})
    parts = list(cut(frame, ["cap", "prompts", "eta"]))
    assert [part.fixed for part in parts] == [{"eta": 1.1}, {"eta": 1.2}]
    assert all(len(part.points) == 12 for part in parts)
    best = best_systems(points({"cap": [1, 2, 3]}), ["cap"])
    assert best[["cap", "system"]].values.tolist() == [[1, "verl"], [2, "verl"], [3, "other"]]
    found = sweep_findings(points({"cap": [1, 2, 3]}), ["cap"], "verl")
    assert found[0] == "Best mean at 3 points, by responses: verl in 2, other in 1."
    assert found[1] == "The largest speedup over verl is 1.20 by responses: other at cap 3."
    found = sweep_findings(points({"cap": [3]}).drop(columns="cap"), [], "verl")
    assert found[0] == "Best mean at 1 point, by responses: verl in 1."
    assert found[1].startswith("The largest speedup over verl is ")
    assert found[1].endswith(": pat.")


def test_what_puts_prompts_off_is_best_at_no_point_of_a_sweep() -> None:
    frame = points({"cap": [1, 2, 3]})
    frame.loc[frame["system"] == "other", "unsteady"] = "it drifts"
    assert best_systems(frame, ["cap"])["system"].tolist() == ["verl", "verl", "pat"]
    frame.loc[frame["cap"] == 2, "unsteady"] = "it fills"
    first, second, third, _ = sweep_findings(frame, ["cap"], "verl")
    assert first == "Best mean at 2 points, by responses: verl in 1, pat in 1."
    assert second.startswith("Not comparable, as they or their baseline are not steady, in 5 rows: other, verl, pat")
    assert third == "The largest speedup over verl is 1.10 by responses: pat at cap 3."


def test_what_cannot_be_compared_is_drawn_grey_and_no_faster() -> None:
    frame = points({"cap": [1, 2], "prompts": [8, 16]})
    frame.loc[frame["system"] == "other", "unsteady"] = "it drifts"
    drawn = map_chart(frame[frame["system"] == "other"], ["cap", "prompts"], "speedup")
    assert drawn["layer"][0]["encoding"]["color"]["condition"] == {"test": "datum.late", "value": GREY}
    assert all(row["late"] and row["text"].endswith(" †") for row in drawn["data"]["values"])
    blocks = [block for block in sweep_blocks(frame, ["cap", "prompts"], "verl") if isinstance(block, Figure)]
    assert ["Grey" in block.caption for block in blocks] == [False, False, True]  # the best, pat, other
    assert all("responses" in block.caption and "tokens" not in block.caption for block in blocks)
    lines = lines_chart(frame[frame["prompts"] == 8], "cap", "speedup")
    bars = {row["system"]: row["low"] is not None for row in lines["data"]["values"]}
    assert bars == {"verl": True, "pat": True, "other": False}
    assert lines["layer"][2]["encoding"]["color"]["condition"]["test"] == "datum.late"
    frame.loc[(frame["cap"] == 2), "unit"] = "tokens"
    captions = [block.caption for block in sweep_blocks(frame, ["cap", "prompts"], "verl") if isinstance(block, Figure)]
    assert all("responses or, where lengths of steady systems differ at a point, tokens" in one for one in captions)


def test_ends_of_an_axis_in_the_facts_are_the_least_and_the_most() -> None:
    assert _labels(pd.Series([5, 3, 9, 4, 1, 2, 8, 7, 6])) == ["1", "…", "9"]


def test_values_of_an_axis_that_are_close_or_missing_are_told_apart() -> None:
    close = [0.90001, 0.90002, 0.90003]
    frame = points({"eta": close, "stage": [float("nan"), 3.0], "on": [None, True, False]})
    assert len(best_systems(frame, ["eta", "stage", "on"])) == 18
    assert varying(frame, ["eta", "stage", "on"]) == ["eta", "stage", "on"]
    assert levels(frame["eta"]) == [repr(value) for value in close]
    assert (levels(frame["stage"]), is_number(frame["stage"])) == (["none", "3"], False)
    assert levels(frame["on"]) == ["none", "true", "false"]


def test_a_system_without_a_speedup_at_any_point_is_not_drawn() -> None:
    frame = points({"cap": [1, 2], "prompts": [8, 16]})
    alone = (frame["system"] == "other") & (frame["cap"] == 2)  # where the baseline did not run
    frame = frame[alone | ((frame["system"] != "other") & (frame["cap"] == 1))]
    frame.loc[alone, ["speedup", "speedup_low", "speedup_high"]] = np.nan
    blocks = sweep_blocks(frame, ["cap", "prompts"], "verl")
    texts = [block.text for block in blocks if isinstance(block, Text)]
    assert texts == ["other has no speedup: verl did not run at any of its points."]


def test_findings_leave_out_the_baseline_of_each_point() -> None:
    frame = points({"cap": [1, 2, 3]})
    own = frame["system"].eq("other") & (frame["cap"] == 3) | frame["system"].eq("verl") & (frame["cap"] < 3)
    frame.loc[own, "speedup"] = [99.0, 0.01, 99.0]
    for sentence in sweep_findings(frame, ["cap"], "the point's baseline", own)[1:]:
        assert not any(number in sentence for number in ("99", "0.01"))


def dots() -> pd.DataFrame:
    """Points of a random sweep."""
    places = np.random.default_rng(0).uniform(1, 900, (20, 2))
    return pd.concat([points({"cap": [int(cap)], "eta": [float(eta)]}) for cap, eta in places])


@pytest.mark.parametrize(
    ("frame", "axes", "charts"),
    [
        (points({"cap <b>": [1024, 2048, 16384]}), ["cap <b>"], {"sweep-speedup", "sweep-throughput"}),
        (points({"engine": ["a", "<i>b</i>"]}), ["engine"], {"sweep-speedup", "sweep-throughput"}),
        (points({"stage": [np.nan, 3.0], "on": [None, True]}), ["stage", "on"], {"sweep-best", "sweep-map-1"}),
        (
            points({"cap": [1, 2], "prompts": [8, 16], "eta": [1.1, 1.2]}),
            ["cap", "prompts", "eta"],
            {"sweep-best-1", "sweep-map-1-2", "sweep-map-2-1"},
        ),
        (dots(), ["cap", "eta"], {"sweep-map-1", "sweep-map-2"}),
    ],
    ids=["number", "name", "missing", "three", "dots"],
)
def test_charts_of_a_sweep_are_drawn(frame: pd.DataFrame, axes: list[str], charts: set[str], tmp_path: Path) -> None:
    page = Page(
        "A sweep", "", sweep_findings(frame, axes, "verl"), sections_of(("", "", sweep_blocks(frame, axes, "verl")))
    )
    assert {figure.id for figure in page.figures} >= charts
    page.write(tmp_path / "page.html")
    assert drawn(tmp_path / "page.html", tmp_path / "browser") == {figure.id for figure in page.figures}

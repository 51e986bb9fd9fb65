"""Throughput: what it counts, in which steps, and that nothing shows a system faster than it says."""

import html
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import invoke, tables
from result_tables import RUN, table

import rlsim
from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.columns import CALL_PARTS
from rlsim.experiment.parts import PARTS_OF_A_STEP, tail_stretches
from rlsim.experiment.result import Result
from rlsim.experiment.summary import means, rate_notes
from rlsim.experiment.verdict import judge
from rlsim.results.report.method import findings
from rlsim.results.report.shares import batch_parts, gpu_shares

SMALL: dict[str, Any] = tables("bases")["throughput"]

# What is counted -----------------------------------------------------------------------------------------------------


def test_rates_count_trained_work_of_steady_steps() -> None:
    rows = [
        {"step_time_s": 10.0, "steady": True, "trained": 8, "tokens": 900, "trained_response_tokens": 800,
         "response_tokens": 600, "observed_tokens": 400, "wasted_tokens": 200, "gen_time_s": 4.0, "gen_bound_s": 1.0,
         "bubble_fraction": 0.5, "tail_fraction": 0.4},
        {"step_time_s": 30.0, "steady": True, "trained": 4, "tokens": 300, "trained_response_tokens": 200,
         "response_tokens": 200, "gen_time_s": 8.0, "gen_bound_s": 2.0, "bubble_fraction": 0.1, "tail_fraction": 0.0},
        {"step_time_s": 500.0, "trained": 8, "steady": False, "tokens": 10**6},
    ]  # fmt: skip
    found = means(table("steps", *(RUN | {"step": i} | row for i, row in enumerate(rows))), ["system"]).loc["a"]
    assert found["responses_per_s"] == pytest.approx(12 / 40)
    assert found["tokens_per_s"] == pytest.approx(1200 / 40)
    assert found["response_tokens_per_s"] == pytest.approx(1000 / 40)
    assert found["generated_tokens_per_s"] == pytest.approx((1200 - 400) / 40), "of a third tools are the source"
    assert found["responses_per_gen_s"] == pytest.approx(12 / 12)
    assert (found["step_time_s"], found["trained"]) == (20.0, 6.0)
    assert found["bubble_fraction"] == pytest.approx((0.5 * 10 + 0.1 * 30) / 40)
    assert found["tail_fraction"] == pytest.approx(0.4 * 5 / (5 + 27)), "of busy time"
    assert found["wasted_fraction"] == pytest.approx(200 / 1200)
    assert found["bound_share"] == pytest.approx(3 / 12)


def test_how_long_a_single_response_is_left() -> None:
    """Between the last and the last but one of a batch, of a generation that its first response begins."""
    endless = {"name": "scored by the sample", "use": [{"areal": {"tp": 1, "eta": 0, "rollout_gpus": 4}}]}
    found = rlsim.run({**SMALL, "systems": [*SMALL["systems"], endless]})
    for (system, seed, step), own in found.responses.groupby(["system", "seed", "step"]):
        finished = own.loc[own["trained"], "finish_at"].sort_values().to_numpy()
        (row,) = found.steps.query(f"system == '{system}' and seed == {seed} and step == {step}").to_dict("records")
        assert row["one_left_s"] == pytest.approx(finished[-1] - finished[-2])
        assert row["one_left_fraction"] == pytest.approx(row["one_left_s"] / row["gen_time_s"])
    times = found.steps.groupby("system", sort=False)[["one_left_s", "gen_time_s"]].sum()
    shares = times["one_left_s"] / times["gen_time_s"]
    assert found.summary()["one_left_fraction"].tolist() == pytest.approx(shares.tolist())


# A system that trains on less ----------------------------------------------------------------------------------------

STOPPER = '''
from rlsim.sim.actions import Stop
from rlsim.sim.control import RolloutControl


class Stopper(RolloutControl):
    """Ends generation once half of the responses are there."""

    def on_finish(self, view):
        return [Stop()] if view.unfinished() <= 0.5 * 32 else None
'''


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an experiment in which one system trains on the first half of its responses."""
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "stopping_policy.py").write_text(STOPPER)
    systems = [{"verl": {"tp": 2}}, {"name": "stopper", "use": ["stopping_policy:Stopper", {"verl": {"tp": 2}}]}]
    trace = {"path": "deepscaler-llama-3.1-8b", "cap": "16K"}
    (folder / "x.json").write_text(json.dumps({**SMALL, "trace": trace, "systems": systems}))
    return folder


def flattering(folder: Path) -> tuple[float, float, float]:
    """Of the run in a folder: baseline over stopper in step time and in generation time, and the true speedup."""
    steps = pd.read_parquet(folder / "steps.parquet")
    by = steps.groupby("system")[["step_time_s", "gen_time_s", "trained"]].sum()
    step, gen = (by.loc["verl", name] / by.loc["stopper", name] for name in ("step_time_s", "gen_time_s"))
    return step, gen, step * by.loc["stopper", "trained"] / by.loc["verl", "trained"]


def drawn_speedups(page: str, system: str) -> list[float]:
    """The speedups of a system in the charts of a page."""
    found = []
    for figure, spec in re.findall(r'<script type="application/json" id="spec-([^"]*)">(.*?)</script>', page, re.S):
        rows = [row for rows in json.loads(spec).get("datasets", {}).values() for row in rows]
        column = "value" if figure == "sweep-speedup" else "speedup"
        found += [row[column] for row in rows if row.get("system") == system and column in row]
    return found


def output(*arguments: str | Path) -> str:
    result = invoke(*arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("in_process")
def test_a_system_that_trains_on_less_is_never_shown_faster_than_its_throughput(
    stopping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stopping)
    monkeypatch.syspath_prepend(stopping)
    ran, swept = tmp_path / "run", tmp_path / "sweep"
    texts = {"run": output("run", "x.json", "--out", ran)}
    step, gen, true = flattering(ran)
    assert min(step, gen) > 1.2 * true, "the step times must flatter, or nothing is tested"
    grid = ("--grid", "memory_utilization=[0.8, 0.9]")
    texts["sweep"] = output("sweep", "x.json", *grid, "--out", swept)
    texts["compare"] = output("compare", ran)
    texts["compare of a sweep"] = output("compare", swept)
    texts["compare, CSV"] = output("compare", ran, "--csv", "-")
    for name, folder in (("report", ran), ("report of a sweep", swept)):
        output("report", folder)
        page = (folder / "report.html").read_text(encoding="utf-8")
        texts[name] = html.unescape(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S))
        assert 0 < max(drawn_speedups(page, "stopper")) < 1.1 * true
    result = rlsim.read_result(ran)
    texts["findings"] = " ".join(findings(result))
    for name, text in texts.items():
        shown = set(re.findall(r"\d+\.\d+", text))
        assert not shown & {f"{value:.{digits}f}" for value in (step, gen) for digits in (2, 3)}, name
        if name != "findings":
            assert "stopper" in text, name
    row = result.summary().set_index("system").loc["stopper"]
    assert row["speedup"] == pytest.approx(true, rel=0.05)  # a geometric mean over seeds
    assert row["gen_speedup"] < gen / 1.2
    parts = batch_parts(result.summary(), 32).groupby("system")["time_s"].sum()
    assert parts["verl"] / parts["stopper"] == pytest.approx(true, rel=1e-9)
    compared = rlsim.compare([ran]).table.set_index("system").loc["stopper"]
    assert compared["speedup"] == pytest.approx(row["speedup"])
    assert (compared["step_difference_s"] < 0) == (true > 1)
    assert any("stopper trains on 50.0% of a batch each step" in note for note in result.notes)


def test_ratios_that_differ_are_explained() -> None:
    def steps(system: str, tokens: int, **more: Any) -> dict[str, Any]:
        return RUN | {"system": system, "step_time_s": 10.0, "trained": 8, "tokens": tokens} | more

    same = table("steps", steps("base", 800), steps("other", 790))
    assert list(rate_notes(same, "base", 8)) == []
    shorter = table("steps", steps("base", 800), steps("short", 400, wasted_tokens=100))
    (note,) = rate_notes(shorter, "base", 8)
    assert "short trains on 1.00 times the responses per second of base, but 0.50 times the tokens" in note
    assert "50 tokens in the mean, prompts counted, against 100, as the first to finish are trained on" in note
    (why,) = rate_notes(table("steps", steps("base", 800), steps("tail", 400, put_back=1)), "base", 8)
    assert "generated again later" in why
    # It may be the baseline.
    row = RUN | {"step_time_s": 10.0, "trained": 8}
    plain, late = row | {"system": "verl", "tokens": 800}, row | {"system": "tail", "tokens": 400, "put_back": 1}
    (note,) = rate_notes(table("steps", plain, late), "tail", 8)
    assert note.startswith("verl trains on 1.00 times the responses per second of tail, but 2.00 times the tokens")
    assert note.endswith("as under tail prompts that are not finished in time are generated again later")
    (note,) = rate_notes(table("steps", plain, late | {"put_back": 0}), "tail", 8)
    assert note.endswith("as the two train on other responses")


@pytest.mark.usefixtures("in_process")
def test_what_puts_its_longest_prompts_off_is_nowhere_the_fastest(tmp_path: Path) -> None:
    tail = {"name": "tail", "use": [{"verl": {"tp": 2}}, {"tail_batching": {"eta": 1.5}}]}
    config = {**SMALL, "systems": [*SMALL["systems"], tail], "model": "qwen2.5-7b"}
    config |= {"trace": {"path": "rollpacker-math", "cap": "8K"}, "workflow": {**SMALL["workflow"], "prompts": 16}}
    (tmp_path / "x.json").write_text(json.dumps(config))
    for command in (["run", "--out"], ["sweep", "--grid", "trace.cap=[8K]", "--out"]):
        shown = output(command[0], tmp_path / "x.json", *command[1:], tmp_path / command[0])
        assert len(re.findall(r"\] +not comparable\b", shown)) == 1, shown  # and verl is not marked
        told = "of the speedup, over" if command[0] == "run" else "or by tokens where lengths of steady systems differ"
        assert f"95% interval: {told}" in shown.replace("of the speedup, or by", "or by"), shown
    result = rlsim.read_result(tmp_path / "run")
    row = result.summary().set_index("system").loc["tail"]
    assert (row["held_back"] > 0.5, row["speedup"] > 2) == (True, True), "it puts the longer half of the tokens off"
    found = findings(result)
    assert found[0].startswith("No system can be compared with verl yet. Not comparable: ")
    assert not any("is the fastest" in sentence for sentence in found)
    assert judge(result.summary().tail(1), "tail").sentences()[1].startswith("Not steady: tail (more tokens are begun")
    shown = output("compare", tmp_path / "run")
    assert len(re.findall(r"^tail †  ", shown, re.MULTILINE)) >= 2, "in both tables, and in each part of a wide one"
    assert "† not steady" in shown
    assert "verl †" not in shown
    assert re.search(r"^verl +tail †", output("compare", tmp_path / "run", "--baseline", "tail"), re.MULTILINE)
    (note,) = [note for note in rlsim.compare([tmp_path / "run"]).notes if "not steady" in note]
    assert "tail: not steady: more tokens are begun than trained on in the counted steps" in note
    notes = result.notes
    assert any(note.startswith("tail: not steady, so not compared: more tokens are begun") for note in notes)
    assert any("times the responses per second of verl, but" in note for note in notes)


# Steps that overlap --------------------------------------------------------------------------------------------------

ONE_STEP_OFF: dict[str, Any] = tables("bases")["throughput one step off"]


@pytest.fixture(scope="module")
def overlapping() -> Result:
    return rlsim.run(ONE_STEP_OFF)


def test_means_leave_out_fill_and_drain(overlapping: Result) -> None:
    assert overlapping.steps["steady"].tolist() == [False, True, True, True, True, False]
    assert "means are of 4 of 6 steps, numbers 1 to 4 counted from 0" in overlapping.notes
    steady = overlapping.steps[overlapping.steps["steady"]]
    row = overlapping.summary().iloc[0]
    assert row["step_time_s"] == pytest.approx(steady["step_time_s"].mean())
    assert row["responses_per_s"] == pytest.approx(32 * 4 / steady["step_time_s"].sum())
    assert overlapping.steps["step_time_s"].iloc[0] > 1.2 * row["step_time_s"], "the first step fills the pipeline"


def test_warmup_is_a_setting_and_an_option(tmp_path: Path) -> None:
    asked = rlsim.run(ONE_STEP_OFF, overrides={"workflow.warmup": 2})
    assert asked.steps["steady"].tolist() == [False, False, True, True, False, False], "whole periods of two steps"
    with pytest.raises(ConfigError, match="warmup 4 of 6 steps leaves too few to measure"):
        rlsim.run(ONE_STEP_OFF, overrides={"workflow.warmup": 4})
    few = rlsim.run(ONE_STEP_OFF, overrides={"workflow.steps": 2})
    assert few.steps["steady"].all()
    assert any("it fills for 1 step, and 2 are counted" in note for note in few.notes)
    assert any(note.endswith("take 4 workflow.steps or more") for note in few.notes)
    (tmp_path / "x.json").write_text(json.dumps(SMALL))
    output("run", tmp_path / "x.json", "--warmup", "1", "--out", tmp_path / "out")
    assert pd.read_parquet(tmp_path / "out" / "steps.parquet")["steady"].tolist() == [False, True] * 2


def test_each_second_of_a_step_counts_once_where_steps_overlap(overlapping: Result) -> None:
    """A step of 2 s whose generation of 2 s ran beside the step before is 2 s long, not 4."""
    steps = overlapping.steps
    parts = [*PARTS_OF_A_STEP, "waiting_time_s"]
    np.testing.assert_allclose(steps[parts].sum(axis=1), steps["step_time_s"], rtol=1e-12)
    assert (steps[parts] >= 0).all(axis=None)
    steady = steps[steps["steady"]]
    assert (steady["gen_exposed_s"] < steady["gen_time_s"]).all(), "part of it ran beside the step before"
    whole = batch_parts(overlapping.summary(), 32)["time_s"].sum()
    assert whole == pytest.approx(overlapping.summary()["step_time_s"].iloc[0])
    shares = gpu_shares(overlapping, {"": 8})
    idle = shares.loc[shares["kind"] == "idle (bubble)", "share"].iloc[0]
    assert idle == pytest.approx(overlapping.summary()["bubble_fraction"].iloc[0])
    calls = overlapping.calls[overlapping.calls["kind"] != "generate"]  # and the parts of a call come to its time
    parts_s = calls[[part.name for part in CALL_PARTS]].sum(axis=1)
    np.testing.assert_allclose(parts_s, calls["end_at"] - calls["start_at"], rtol=1e-9)
    assert (calls.loc[calls["kind"] == "sync", "weights_s"] > 0).all()
    assert (calls.loc[calls["call"] == "score", "data_s"] > 0).all()


# The tail ------------------------------------------------------------------------------------------------------------


def tables_of(
    batches: list[tuple[float, float, int]], gpus: int = 1
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One replica: each response decodes from the first moment to the second, with so many iterations."""
    stays = [
        RUN | {"call": "generate", "response": i, "replica": 0, "gpu": 0, "gpus": gpus, "admitted_at": start,
               "decoding_at": start, "left_at": end, "start_tokens": 10, "end_tokens": 10 + count}
        for i, (start, end, count) in enumerate(batches)
    ]  # fmt: skip
    end = max(last for _, last, _ in batches)
    span = RUN | {"gpu": 0, "gpus": gpus, "start_at": 0.0, "end_at": end, "kind": "decode", "label": "replica 0"}
    call = RUN | {"call": "generate", "kind": "generate", "end_at": end}
    return table("stays", *stays), table("spans", span), table("calls", call)


def test_the_tail_is_decoding_at_under_half_of_the_full_throughput() -> None:
    # Four responses, an iteration a second while all four decode and two a second for fewer: 4, 6, 4 and 2 tokens/s.
    found = tail_stretches(*tables_of([(0, 10, 10), (0, 20, 30), (0, 30, 50), (0, 40, 70)], gpus=2))
    assert found[["gpu", "gpus", "start_at", "end_at", "tail_s"]].values.tolist() == [[0, 2, 30.0, 40.0, 10.0]]
    assert tail_stretches(*tables_of([(0, 10, 10)] * 4)).empty
    assert tail_stretches(table("stays"), table("spans"), table("calls")).empty


def test_a_gpu_is_measured_by_what_it_reached_under_any_replica() -> None:
    """Two replicas of one GPU with two responses each; then one of both GPUs with the last response."""
    stays, spans, _ = (pd.concat(parts) for parts in zip(
        *(tables_of([(0, 10, 10), (0, 10, 10)]) for _ in range(2)), strict=True
    ))  # fmt: skip
    stays = stays.reset_index(drop=True)
    stays.loc[2:, ["replica", "gpu"]] = 1  # the second replica's rows follow the first's
    spans = spans.reset_index(drop=True)
    spans.loc[1, ["gpu", "label"]] = [1, "replica 1"]
    last = RUN | {"call": "generate", "response": 4, "replica": 2, "gpu": 0, "gpus": 2, "admitted_at": 11.0,
                  "decoding_at": 11.0, "left_at": 21.0, "start_tokens": 10, "end_tokens": 25}  # fmt: skip
    slow = RUN | {"gpu": 0, "gpus": 2, "start_at": 11.0, "end_at": 21.0, "kind": "decode", "label": "replica 2"}
    whole = pd.concat([stays, table("stays", last)]), pd.concat([spans, table("spans", slow)])
    call = table("calls", RUN | {"call": "generate", "kind": "generate"})
    (row,) = tail_stretches(*whole, call).to_dict("records")  # 1.5 tokens/s over two GPUs against 2 on one
    assert row == {"gpu": 0, "gpus": 2, "start_at": 11.0, "end_at": 21.0, "tail_s": 10.0}


@pytest.mark.parametrize("rule", [None, {"bounded_staleness": {"eta": 2, "concurrent": 16}}])
def test_the_tail_agrees_with_an_independent_count(overlapping: Result, rule: dict[str, Any] | None) -> None:
    """Seconds by replica, counted one stretch of time after the other from the responses' own stays.

    One rollout generates for all steps under a `rule`: what a replica does then is of no one step.
    """
    result = overlapping
    if rule:
        system = {"name": "apart", "use": [{"verl": {"tp": 1}}, {"split": {"rollout_gpus": 4}}, rule]}
        result = rlsim.run(
            ONE_STEP_OFF, overrides={"systems": [system], "workflow": {"prompts": 8, "responses": 4, "steps": 4}}
        )
    all_stays, all_spans = (frame.assign(step=0) if rule else frame for frame in (result.stays, result.spans))
    found = tail_stretches(result.stays, result.spans, result.calls)
    assert not rule or len(found)
    for step in all_stays["step"].unique():
        stays = all_stays[(all_stays["step"] == step) & (all_stays["call"] == "generate")]
        stays = stays[stays["decoding_at"].notna()]
        for replica, own in stays.groupby("replica"):
            spans = all_spans[(all_spans["step"] == step) & (all_spans["label"] == f"replica {replica}")]
            spans = spans[spans["kind"] == "decode"]
            rates: list[tuple[float, float, float]] = []
            moments = sorted({*own["decoding_at"], *own["left_at"]})
            for a, b in itertools.pairwise(moments):
                here = own[(own["decoding_at"] <= a) & (own["left_at"] >= b)]
                seconds = (spans["end_at"].clip(upper=b) - spans["start_at"].clip(lower=a)).clip(lower=0).sum()
                if len(here) and seconds > 1e-9:
                    # All of the batch advance together: any of them tells how many iterations there were.
                    at = [self_progress(own, here.iloc[0], moment) for moment in (a, b)]
                    rates.append((a, seconds, len(here) * (at[1] - at[0]) / seconds))
            most = max(rate for _, _, rate in rates)
            expected = sum(seconds for _, seconds, rate in rates if rate < 0.5 * most)
            gpu = int(own["gpu"].iloc[0])
            mine = found[(found["gpu"] == gpu) & (found["start_at"] >= moments[0]) & (found["end_at"] <= moments[-1])]
            assert mine["tail_s"].sum() == pytest.approx(expected, abs=1e-9)


def self_progress(own: pd.DataFrame, one: pd.Series, moment: float) -> int:
    """Iterations of a replica by a moment at which a response joined or left its batch."""
    joined = own[own["decoding_at"] == moment]
    if len(joined):
        return int(joined["iteration"].iloc[0])
    left = own[own["left_at"] == moment].iloc[0]
    prefilled = int(left["decoding_at"] > left["admitted_at"])
    return int(left["end_tokens"] - left["start_tokens"] - prefilled + left["iteration"])


# What a reviewer found ------------------------------------------------------------------------------------------------


def test_a_step_that_trains_on_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero_policy.py").write_text(STOPPER.replace("Stopper", "Zero").replace("0.5 * 32", "1000"))
    monkeypatch.syspath_prepend(tmp_path)
    systems = [{"name": "zero", "use": ["zero_policy:Zero", "tail_batching", {"verl": {"tp": 2}}]}]
    with pytest.raises(PolicyError, match=r"zero.*step 0 trains on no response"):
        rlsim.run(SMALL, overrides={"systems": systems, "baseline": None, "seeds": 1})


def test_runs_measured_over_other_steps_are_not_paired(tmp_path: Path) -> None:
    for name, warmup in (("a", 0), ("b", 1)):
        rlsim.run(SMALL, overrides={"workflow.warmup": warmup}, out=tmp_path / name)
    found = rlsim.compare([tmp_path / "a", tmp_path / "b"])
    assert not found.table["paired"].all()
    assert any("not paired (workflow.warmup is 1 against 0)" in note for note in found.notes)

"""The report: figures that agree with the results, and a page on which a browser draws every chart."""

import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import drawn
from conftest import cases, invoke, tables

import rlsim
from rlsim.base.charts import chart_spec, save_chart, vega_script
from rlsim.base.formats import Table
from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.result import Result
from rlsim.experiment.verdict import judge
from rlsim.models.hardware import load_cluster
from rlsim.models.precision import PRECISIONS
from rlsim.results.report.chosen_run import choose
from rlsim.results.report.gantt import MOST_MARKS, gantt
from rlsim.results.report.method import findings
from rlsim.results.report.shares import batch_parts, gpu_shares
from rlsim.results.report.speedups import beaten, frontier, frontier_chart
from rlsim.results.report.style import BUBBLE
from rlsim.results.report.sweep_page import sweep_page
from rlsim.results.report.write import report_page, write_report

HOSTILE = '<script>alert("x")</script> & "co"'


def experiment(**changes: Any) -> dict[str, Any]:
    systems = [{"verl": {"tp": [1]}}, {"pat": {"start_tp": 1}}, {"name": HOSTILE, "use": ["rlhfuse"]}]
    return {**tables("bases")["report"], "name": HOSTILE, "systems": systems, **changes}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "grpo"
    rlsim.run(experiment(), out=folder)
    return folder


@pytest.fixture(scope="module")
def result(results: Path) -> Result:
    return rlsim.read_result(results)


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    return rlsim.write_report(results)


@pytest.fixture(scope="module")
def judged() -> Result:
    """Rewards from a judge beside other calls on the same GPUs, chunks scored, rounds of two kinds, sixteen GPUs."""
    small = {"workflow.prompts": 12, "workflow.responses": 4, "workflow.steps": 3}
    systems = [{"verl": {"tp": 1}}, {"rollpacker": {"start_tp": 1}}, {"rlhfuse_plus": {"tp": 1}}]
    return rlsim.run("rollpacker_7b", seeds=1, overrides={**small, "systems": systems})


@pytest.fixture(scope="module")
def ppo() -> Result:
    return rlsim.run("oppo_7b", seeds=1, overrides={"workflow.prompts": 14, "workflow.steps": 2, "trace.cap": "1K"})


@pytest.fixture(scope="module")
def large() -> Result:
    """1,024 GPUs."""
    kilo = load_cluster("2x8xh100").model_dump(mode="json") | {"name": "kilo", "nodes": 128}
    workflow = {"prompts": 64, "responses": 8, "steps": 1}
    systems = [{"verl": {"tp": 8}}]
    return rlsim.run(experiment(cluster=kilo, workflow=workflow, systems=systems, baseline=None, seeds=1, cases={}))


class Links(HTMLParser):
    """Whatever a page would load, and the elements that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "srcset", "data", "poster", "background")
        ]
        self.loads += [value or "" for name, value in attrs if name == "href" and tag != "a"]


def test_a_browser_draws_every_chart(page: Path, results: Path, result: Result, tmp_path: Path) -> None:
    assert page == results / "report.html"
    names = {figure.id for figure in report_page(result, choose(result)).figures}
    assert names >= {"cases", "speedups-2k", "step-b-1k-b", "gpu-time-2k", "lengths-2k", "generation-1", "timeline-2"}
    assert drawn(page, tmp_path) == names


def test_a_browser_draws_judges_chunks_and_a_thousand_gpus(
    judged: Result, ppo: Result, large: Result, tmp_path: Path
) -> None:
    for number, one in enumerate((judged, ppo, large)):
        shown = drawn(write_report(one, tmp_path / f"{number}.html"), tmp_path / f"browser-{number}")
        assert shown == {figure.id for figure in report_page(one, choose(one)).figures}


def test_a_page_needs_nothing_and_lets_nothing_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'" in text
    assert text.count("window.vegaEmbed") == 1  # the libraries are there once, not per chart
    assert len(text) < 1_500_000
    links = Links()
    links.feed(text)
    assert [load for load in links.loads if load and not load.startswith("data:")] == []
    assert not re.search(r"@import|url\(\s*['\"]?http", text)
    assert 'alert("x")' not in text
    assert "img" not in {tag for tag, _ in links.tags}
    assert "<b>1K" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in text


def test_a_page_can_be_read_without_its_charts(page: Path) -> None:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    tags = [tag for tag, _ in links.tags]
    ids = {attrs["id"] for _, attrs in links.tags if "id" in attrs}
    assert {attrs["href"] for tag, attrs in links.tags if tag == "a"} <= {f"#{name}" for name in ids}
    assert all("aria-labelledby" in attrs for tag, attrs in links.tags if tag in ("figure", "section"))
    assert tags.count("figcaption") == tags.count("figure")
    assert tags.count("caption") == tags.count("table")
    assert tags.count("h1") == 1


def test_every_switch_is_a_rule_in_the_chart_of_generation(result: Result) -> None:
    choice = choose(result, systems=["pat"])
    (chart,) = (one.chart for one in report_page(result, choice).figures if one.id == "generation-1")
    switches = choice.rows(result.switches, "pat").query("step == @choice.step")
    assert len(switches) > 0
    assert any(len(rows) == len(switches) and "from_tp" in rows[0] for rows in chart_spec(chart)["datasets"].values())


def test_the_same_results_make_the_same_page(page: Path, result: Result, tmp_path: Path) -> None:
    assert write_report(result, tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_shares_of_gpu_time_and_parts_of_a_step_agree_with_the_summary(
    result: Result, judged: Result, ppo: Result, large: Result
) -> None:
    assert judged.spans["shared"].any()
    for one in (result, judged, ppo, large):
        summary = one.summary()
        shares = gpu_shares(one, {case: record["gpus"] for case, record in one.manifest["setups"].items()})
        assert (shares["share"] >= 0).all()
        assert shares.groupby(["case", "system"])["share"].sum().to_numpy() == pytest.approx(1.0)
        idle = shares[shares["kind"] == BUBBLE].set_index(["case", "system"])["share"]
        bubble = summary.set_index(["case", "system"])["bubble_fraction"]
        assert idle.loc[bubble.index].to_numpy() == pytest.approx(bubble.to_numpy(), abs=1e-9)
        for case, rows in summary.groupby("case"):
            parts = batch_parts(rows, one.manifest["setups"][case]["batch"])
            whole = parts.groupby("system")["time_s"].sum()
            assert whole[rows["system"]].to_numpy() == pytest.approx(rows["step_time_s"].to_numpy())
            generation = parts[parts["part"] == "generation"].set_index("system")["time_s"]
            assert generation[rows["system"]].to_numpy() == pytest.approx(rows["gen_time_s"].to_numpy())


def test_findings_name_the_fastest_system_and_the_error_of_the_calibration(judged: Result) -> None:
    text = " ".join(findings(judged))
    best = judge(judged.summary(), str(judged.manifest["baseline"])).first
    assert f"{best.system} " in text
    assert "not measured on h800-sxm" in text
    residuals = judged.manifest["calibration"]["residuals"]
    medians = [r["median"] for name, r in residuals.items() if not any(f"_{kind}" in name for kind in PRECISIONS)]
    assert f"off by {min(medians):.1%} to {max(medians):.1%}" in text


def test_baseline_and_best_other_at_the_median_step_are_shown(result: Result) -> None:
    choice = choose(result)
    assert (choice.case, choice.systems[0]) == ("2K", "verl-tp1")
    times = choice.rows(result.steps, "verl-tp1")
    shown = times.loc[times["step"] == choice.step, "step_time_s"].iloc[0]
    every = result.steps.query("case == '2K' and system == 'verl-tp1'")["step_time_s"].sort_values().tolist()
    assert shown == every[(len(every) - 1) // 2]
    chosen = choose(result, case="<b>1K</b>", systems=["pat"], seed=1, step=1)
    assert (chosen.case, chosen.systems, chosen.seed, chosen.step) == ("<b>1K</b>", ("pat",), 1, 1)


@cases("report", "what was not run cannot be shown")
def test_what_was_not_run_cannot_be_shown(result: Result, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RlsimError, match=re.escape(message)):
        choose(result, **asked)


def test_a_timeline_of_any_size_has_few_marks(result: Result, judged: Result, large: Result) -> None:
    for one in (result, judged, large):
        choice = choose(one)
        setup = one.manifest["setups"][choice.case]
        for system in choice.systems:
            shown = gantt(one, choice, system, setup["gpus"], setup["gpus_per_node"])
            assert 0 < len(shown.marks) <= MOST_MARKS
            assert len(shown.rows) <= 32
            assert shown.marks["low"].min() >= 0
            assert shown.marks["high"].max() <= len(shown.rows)
            assert (shown.marks["end_s"] > shown.marks["start_s"]).all()
            assert shown.marks["end_s"].max() <= shown.duration_s * (1 + 1e-9)


def test_command_writes_page_and_pictures(ppo: Result, tmp_path: Path) -> None:
    results = ppo.write(tmp_path / "ppo")
    written, pictures = tmp_path / "page.html", tmp_path / "pictures"
    arguments = ["report", str(results), "--out", str(written), "--title", "My run"]
    done = invoke(*arguments, "--system", "oppo", "--png", pictures, "--svg", pictures)
    assert done.exit_code == 0, done.output
    assert str(written) in done.output
    text = written.read_text(encoding="utf-8")
    assert "<h1>My run</h1>" in text
    ids = re.findall(r'id="chart-([^"]+)"', text)
    assert {path.name for path in pictures.iterdir()} == {f"{name}{end}" for name in ids for end in (".png", ".svg")}
    assert (pictures / "timeline-1.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (pictures / "step.svg").read_text(encoding="utf-8")


def test_results_in_memory_need_a_path(result: Result) -> None:
    with pytest.raises(ConfigError, match="give the report's path"):
        write_report(result)


@pytest.mark.usefixtures("in_process")
def test_a_sweep_is_reported_with_its_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    workflow = {"prompts": 2, "responses": 2, "steps": 1}
    base = experiment(cases={}, systems=[{"verl": {"tp": [1, 2]}}], seeds=1, workflow=workflow)
    axes = {"trace.cap": ["1K", "2K"], "memory_utilization": [0.9, 0.2]}  # 20% hold no model
    sweep = rlsim.sweep(base, axes=axes, out=tmp_path / "sweep")
    assert len(sweep.failed) == 2
    page = rlsim.write_report(tmp_path / "sweep")
    assert page == tmp_path / "sweep" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "trace.cap (tokens)" in text
    (shown,) = [block for block in sweep_page(sweep).sections[1].blocks if isinstance(block, Table) and block.rows[2:]]
    verdicts = [dict(zip(shown.headings, row, strict=True))["verdict"] for row in shown.rows]
    assert (verdicts[0], set(verdicts[1::2]) <= {"faster", "slower", "as fast"}) == ("baseline", True)
    assert "95% interval" in shown.headings
    assert all(error.splitlines()[0][:40] in html.unescape(text) for error in sweep.failed.values())
    assert {"sweep-speedup", "sweep-throughput"} <= drawn(page, tmp_path / "browser")
    with pytest.raises(ConfigError, match="is a sweep"):
        rlsim.write_report(tmp_path / "sweep", seed=0)


def test_the_script_of_pages_is_of_the_vega_lite_that_charts_are_written_for() -> None:
    import altair as alt

    script = vega_script()
    assert f'"{alt.SCHEMA_VERSION.removeprefix("v")}"' in script  # else make it anew: rlsim/data/vega/README.md
    assert "</script" not in script
    assert "<!--" not in script


def test_without_the_extra_pages_are_written_and_pictures_say_what_they_need(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    figure = report_page(rlsim.read_result(results), choose(rlsim.read_result(results))).figures[0].chart
    rlsim.write_report(results, tmp_path / "page.html")
    save_chart(figure, tmp_path / "chart.html")
    for draw in (
        lambda: rlsim.write_report(results, tmp_path / "other.html", svg=tmp_path / "charts"),
        lambda: save_chart(figure, tmp_path / "chart.png"),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'rlsim\[charts\]'; \.html needs nothing more"):
            draw()
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "chart.html"}


# -------------------------------------------------------------------------------------------------------- staleness


@pytest.fixture(scope="module")
def stale() -> Result:
    """Systems that are stale beside two that are not."""
    apart, static = {"tp": 2, "rollout_gpus": 4}, {"verl": {"tp": 2}}
    named = {"name": HOSTILE, "use": [static, {"split": {"rollout_gpus": 4}}, {"bounded_staleness": {"eta": 1}}]}
    systems = [static, {"one_step_off": apart}, {"areal": {**apart, "eta": [0, 2]}}, named]
    workflow = {"prompts": 8, "responses": 4, "steps": 6}
    changes = {"systems": systems, "workflow": workflow, "training": {"backend": "fsdp"}, "baseline": "verl"}
    return rlsim.run(experiment(**changes, seeds=2, cases={}))


def test_the_frontier_is_what_the_summary_says(stale: Result) -> None:
    rows, summary = frontier(stale, "").set_index("system"), stale.summary().set_index("system")
    unit = judge(stale.summary(), "verl").unit
    assert rows["rate"].to_dict() == pytest.approx(summary[f"{unit}_per_s"].to_dict())
    assert rows["staleness"].to_dict() == pytest.approx(summary["staleness_mean"].to_dict())
    assert (rows["low"] < rows["high"]).all()
    assert not rows.loc["areal-eta0", "best"]  # verl is faster and no staler
    rivals = rows[rows["comparable"]]
    assert rivals.loc[rivals["rate"].idxmax(), "best"]
    rates = pd.DataFrame({"rate": [1.0, 1.001, 2.0, 1.9], "staleness": [0.0, 0.0, 1.0, 1.5]})
    assert [beaten(rates, row) for _, row in rates.iterrows()] == [False, False, False, True]


def test_a_notebook_shows_the_interval_and_the_verdict_that_the_terminal_does(stale: Result, result: Result) -> None:
    for one in (stale, result):
        shown = html.unescape(one._repr_html_())
        for case, rows in one.summary().groupby("case"):
            verdict = judge(rows, str(one.manifest["baseline"]))
            assert str(case) in shown
            assert all(f"<td>{row.interval}</td>\n      <td>{row.outcome}</td>" in shown for row in verdict.rows)
            assert " ".join(verdict.sentences(one.manifest["tuned"][case])) in shown


def test_the_frontier_is_of_the_unit_of_the_verdict(stale: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = stale.summary()
    for times, unit in ((1.0, "responses"), (0.5, "tokens")):
        told = summary.assign(token_speedup=summary["speedup"] * times, unsteady="")
        monkeypatch.setattr(Result, "summary", lambda self, told=told: told)
        rows = frontier(stale, "").set_index("system")
        assert rows["rate"].to_dict() == pytest.approx(summary.set_index("system")[f"{unit}_per_s"].to_dict())
        assert f"{unit} trained on per second" in str(frontier_chart(rows.reset_index()))


def test_what_is_not_comparable_yet_beats_nobody(stale: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = stale.summary()
    fastest = summary.loc[summary["responses_per_s"].idxmax(), "system"]
    late = summary.assign(unsteady=np.where(summary["system"] == fastest, "it fills", ""))
    monkeypatch.setattr(Result, "summary", lambda self: late)
    rows = frontier(stale, "").set_index("system")
    assert not rows.loc[fastest, ["best", "comparable"]].any()
    others = rows.drop(index=fastest)
    assert others.loc[others["rate"].idxmax(), "best"]


def test_a_browser_draws_staleness_where_there_is_any(stale: Result, result: Result, tmp_path: Path) -> None:
    assert "frontier" in drawn(write_report(stale, tmp_path / "stale.html"), tmp_path / "browser")
    assert "frontier-2k" not in {figure.id for figure in report_page(result, choose(result)).figures}

"""The validation: rows, summaries, bounds, the page and the command."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT, invoke

from evidence.validate import papers, parts, pat, transfer
from evidence.validate.page import blocks, read_page, stale, write_page
from evidence.validate.parts import PARTS, Options, Section
from evidence.validate.published import evaluated, figures, named, published_rows, told
from evidence.validate.rows import Bound, Row, Target, Targets, bounds_of, load_targets, summarise, verdicts
from evidence.validate.serving import AISIMULATE, SERVED, TABLE, TODAY, run_rows
from evidence.validate.transfer import SettingFit, TransferFits, left_out_rows, read_runs, shipped_fits
from rlsim.cost.calibration import FrontEndFit, HostFit, load_calibration
from rlsim.errors import ConfigError

PAGE = read_page(ROOT / "docs" / "validation.md")
PAPERS = ("pat", "rollpacker", "oppo", "real")
NONE = Targets(targets=(), bounds=())


def rows(*errors: float, case: str = "vllm/qwen") -> tuple[Row, ...]:
    return tuple(Row("serving", f"{case}/{i}", "tpot_s", 2.0, 2.0 * (1 + e)) for i, e in enumerate(errors))


def section(*errors: float) -> Section:
    found = rows(*errors)
    return Section(found, tuple(summarise(found, depth=2)), {"words": "Some text.\n"}, "")


def test_summaries_by_hand() -> None:
    (found,) = summarise(rows(0.1, -0.3, 0.2), depth=2)
    assert (found.group, found.count) == ("vllm/qwen", 3)
    assert (found.mean, found.median, found.bias) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.0))
    assert found.p90 == pytest.approx(0.28)
    assert [s.group for s in summarise((*rows(0.1), *rows(0.2, case="sglang/qwen")), depth=1)] == ["vllm", "sglang"]
    assert Row("pat", "x", "speedup", 1.25, 1.0).record()["error"] == pytest.approx(-0.2)


def test_the_first_bound_of_a_statistic_counts() -> None:
    bounds = (
        Bound(part="serving", group="vllm/*", quantity="tpot_s", limit=0.3, why="a reason"),
        Bound(part="serving", group="*", quantity="*", limit=0.1),
        Bound(part="serving", group="*", quantity="*", statistic="median", limit=0.1),
        Bound(part="serving", group="*", quantity="*", kind="input", limit=0.1),
    )
    targets = Targets(targets=(), bounds=bounds)
    found = [(b.statistic, round(b.value, 3), b.fine) for b in bounds_of(targets, (), section(0.1, -0.3).summaries)]
    assert found == [("mean", 0.2, True), ("median", 0.2, False)]


def test_a_kept_bound_above_its_target_is_a_miss() -> None:
    """Errors of +10 and -45% under a bound of 50% and a target of 15%: one of two is missed, and the bound is kept."""
    targets = Targets(targets=(Target(part="oppo", within=0.15),), bounds=())
    found = [Row("oppo", f"case{i}", "speedup", 2.0, 2.0 * (1 + e), bound=0.5) for i, e in enumerate((0.1, -0.45))]
    lines = verdicts(targets, found, bounds_of(targets, found, ()))
    assert lines == [
        "2 output rows: 1 within their target, 1 missed (worst: case1, speedup, -45%; target 15%); errors -45% to +10%",
        "no worse than before: 2 of 2 bounds",
    ]
    assert [targets.cell(row) for row in found] == ["15%", "15% **missed**"]


def test_every_row_has_a_target_and_no_bound_has_grown() -> None:
    """By file: how many bounds, and their sum; a bound may only shrink (new rows: three targets of prime-rl's, eight of
    PAT's naive switch and memory, fifteen of RollPacker's planner, streams, lengths and judge, five of TRL's engine
    and Δ, seven of REAL's costs, eight of offline batches, four of LoRA)."""
    targets = load_targets(ROOT / "evidence")
    assert all(targets.within(Row(part, "x", "y", 1, 1, kind=kind)) <= 0.2
               for part in PARTS for kind in ("input", "output", "left-out"))  # fmt: skip
    most = {
        "pat": (57, 7.13),
        "rollpacker": (59, 12.57),
        "oppo": (11, 5.13),
        "real": (30, 9.02),
        "targets": (74, 13.276),
    }
    found = {part: [row.bound for row in figures(Options(), part).rows] for part in PAPERS}
    found["targets"] = [bound.limit for bound in targets.bounds]
    for part, (count, total) in most.items():
        assert len(found[part]) <= count
        assert sum(found[part]) <= total + 1e-9, part


def test_no_two_rows_of_the_page_have_the_same_name() -> None:
    assert list(PAGE) == list(PARTS)
    for part, text in PAGE.items():
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
        names = [tuple(row[:3]) for row in rows if len(row) == 8 and re.fullmatch(r"[+-][\d.]+%", row[5])]
        assert len(names) == len(set(names)), part
        assert names or part in ("transfer", "kernels", "serving", "throughput", "papers", "sensitivity"), part


def test_a_row_is_an_expression_of_what_a_part_finds(tmp_path: Path) -> None:
    """40 / 20 s published; 30 / 20 s found, and the seconds of both stand beside the ratio."""
    line = "{case: a, quantity: speedup, value: 40 / 20, of: verl_tp2.step_s / reward.step_s, bound: 0.3}"
    (tmp_path / "oppo.yaml").write_text(f"source: a paper\nrows:\n  - {line}\n")
    found = {"verl-tp2": {"step_s": 30.0}, "+ reward": {"step_s": 20.0}}
    (row,) = published_rows(Options(evidence=tmp_path), "oppo", found)
    assert (row.reference, row.simulated, row.note) == (2.0, 1.5, "published 40 / 20 s; 30 / 20 s")
    with pytest.raises(ConfigError, match=r"oppo.yaml: a, speedup: verl_tp2.step_s / reward.step_s: 'reward'"):
        published_rows(Options(evidence=tmp_path), "oppo", {"verl-tp2": {"step_s": 30.0}})


def test_a_page_keeps_what_is_not_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(page, {"serving": section(0.1)}, NONE)
    page.write_text(page.read_text() + "\nProse by hand.\n")
    write_page(page, {"kernels": section(0.2)}, NONE)
    write_page(page, {"serving": section(0.3)}, NONE)
    text = page.read_text()
    assert set(read_page(page)) == {"kernels", "serving"}
    assert text.count("## serving") == text.count("Prose by hand.") == text.count("<!-- serving.words -->") == 1
    assert "errors +30% to +30%" in text
    assert "errors +10% to +10%" not in text
    missing = [part for part in PARTS if part not in ("kernels", "serving")]
    assert stale(page, {"serving": section(0.3)}, NONE, ["serving"]) == missing
    assert stale(page, {"serving": section(0.1)}, NONE, ["serving"]) == ["serving", *missing]
    assert stale(page, {"serving": section(0.1)}, NONE, []) == missing
    fresh = page.read_text()
    page.write_text(
        fresh.replace("<!-- serving.words -->", "<!-- serving.old -->\nOld.\n<!-- end -->\n\n<!-- serving.words -->")
    )
    assert stale(page, {"serving": section(0.3)}, NONE, ["serving"]) == ["serving", *missing], "no longer made"
    write_page(page, {"serving": section(0.3)}, NONE)
    assert "Old." not in page.read_text()
    page = tmp_path / "notes.md"
    page.write_text("my notes\n")
    with pytest.raises(ConfigError, match="not a validation page"):
        write_page(page, {"serving": section(0.1)}, NONE)
    assert page.read_text() == "my notes\n"


def test_an_exceeded_bound_stands_out_on_the_page() -> None:
    targets = Targets(targets=(), bounds=(Bound(part="serving", group="*", quantity="*", limit=0.1),))
    assert "**exceeded**" in blocks(section(0.5), targets)["bounds"]


def test_without_a_clone_a_part_says_where_its_rows_are(tmp_path: Path) -> None:
    found = parts.run_part("serving", Options(evidence=tmp_path / "evidence"))
    assert "a clone of rlsim has it" in str(found)
    with pytest.raises(Exception, match="unknown part of the validation 'kernel'; did you mean 'kernels'"):
        parts.run_part("kernel", Options())


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Section | str]:
    found: dict[str, Section | str] = {"serving": section(0.01), "kernels": "no tables"}
    monkeypatch.setattr(parts, "run_part", lambda name, options: found[name])
    return found


def test_the_command_writes_json_and_a_page(stub: dict[str, Section | str], tmp_path: Path) -> None:
    target, page = tmp_path / "rows.json", tmp_path / "page.md"
    done = invoke("validate", "kernels", "serving", "--json", target, "--page", page, catch_exceptions=False)
    assert done.exit_code == 0
    assert "kernels: skipped: no tables" in done.output
    (record,) = json.loads(target.read_text())
    assert set(record) == {"part", "case", "quantity", "kind", "reference", "simulated", "error"}
    assert list(read_page(page)) == ["serving"]


def test_a_part_of_tables_alone_prints_and_writes_them(stub: dict[str, Section | str], tmp_path: Path) -> None:
    stub["papers"] = Section((), (), {"table": "| paper | what |\n| --- | --- |\n| PAT | switches |"}, reference="")
    arguments = ["validate", "papers", "--json", str(tmp_path / "papers.json")]
    assert "| PAT | switches |" in invoke(*arguments, catch_exceptions=False).output
    assert "| PAT | switches |" in json.loads((tmp_path / "papers.json").read_text())[0]["tables"]["table"]


def test_the_command_fails_beyond_a_bound_and_on_a_stale_page(stub: dict[str, Section | str], tmp_path: Path) -> None:
    found = (Row("kernels", "h100-sxm-vllm/x", "gemm_s", 1.0, 1.5),)
    stub["kernels"] = Section(found, tuple(summarise(found, depth=1)))
    done = invoke("validate", "kernels")
    assert done.exit_code == 1
    assert "h100-sxm-vllm gemm_s: median error 50.0% is beyond its bound of 5.0%" in done.output
    page = tmp_path / "page.md"
    write_page(page, {"serving": Section((), (), {"words": "Older text.\n"}, "")}, NONE)
    done = invoke("validate", "serving", "--check", page)
    assert done.exit_code == 1
    assert "tables of serving are stale" in done.output


# Published figures ----------------------------------------------------------------------------------------------------


def test_what_is_told_of_a_result_by_hand() -> None:
    """Two steps at 0 and 10 s; calls of 4 and 2 s, then a score 1 s later."""
    key = {"case": "6K", "system": "verl-tp2", "seed": 0}
    steps, calls = [], []
    for step, (longest, gen_s, kind) in enumerate(((20000, 4.0, "short"), (24576, 2.0, "long"))):
        at, times = 10.0 * step, {"gen_time_s": gen_s, "step_time_s": gen_s + 1}
        steps.append({**key, "step": step, "round": kind, "longest_tokens": longest, **times})
        for name, start, end in (("generate", at, at + gen_s), ("reward", at + gen_s, at + gen_s + 1)):
            calls.append({**key, "step": step, "call": name, "kind": name, "start_at": start, "end_at": end})
    summary = pd.DataFrame([{"case": "6K", "system": "verl-tp2", "speedup": 1.0}])
    made = SimpleNamespace(steps=pd.DataFrame(steps), calls=pd.DataFrame(calls), summary=lambda: summary)
    own = told(made)["6K"]["verl-tp2"]  # type: ignore[arg-type]
    assert (own["speedup"], own["generate_s"], own["reward_s"], own["scored_s"]) == (1.0, 3.0, 1.0, 4.0)
    assert [own[kind]["gen_time_s"] for kind in ("every", "short", "long")] == [3.0, 4.0, 2.0]
    names = named({"6K": {"verl-tp2": own}})
    assert evaluated("min(at_6K.verl_tp1.generate_s, at_6K.verl_tp2.generate_s) / 2", names) == 1.5


def test_by_the_papers_own_latencies_pat_gains_nothing_over_static_tp8() -> None:
    found = pat.latencies(seeds=5)
    assert found["tp8_s"] < found["tp2_s"]
    assert 1 <= found["best_s"] / found["pat_s"] < 1.02


def test_how_far_ratios_and_orders_agree(tmp_path: Path) -> None:
    """Errors of 20 and 60% of the two ratios; x is above 1 and above y in both, y above 1 in the paper alone."""
    (tmp_path / "docs" / "validation").mkdir(parents=True)
    (tmp_path / "evidence").mkdir()
    rows = [
        ("x", "speedup", 2, "run.x.speedup", "output", "+20.0%"),
        ("y", "speedup", 1.5, "run.y.speedup", "output", "-60.0%"),
        ("x", "gen_s", 4, "run.x.gen_s", "output", "+50.0%"),
        ("y", "gen_s", 3, "run.y.gen_s", "output", "+0.0%"),
        ("z", "gen_s", 5, "other.z.gen_s", "output", "-90.0%"),
        ("z", "share", 5, "run.z.speedup", "input", "+90.0%"),
    ]
    for part in papers.PAPERS:
        own = rows if part == "pat" else rows[:1]
        keys = ("case", "quantity", "value", "of", "kind")
        lines = [f"  - {json.dumps(dict(zip(keys, row[:-1], strict=True)))}" for row in own]
        (tmp_path / "evidence" / f"{part}.yaml").write_text("\n".join(["source: a paper", "rows:", *lines]))
        (tmp_path / "docs" / "validation" / f"{part}.figures.csv").write_text(
            "\n".join(["error", *(row[-1] for row in own)])
        )
    found = papers.agreement(Options(evidence=tmp_path / "evidence"))
    assert "| PAT | 2 | 40.0% | 40.0% | **missed** | 4 | 3 |" in found["ratios"]
    assert "| all | 5 | 28.0% | 20.0% | **missed** | 7 | 6 |" in found["ratios"]
    assert found["orders"].splitlines()[2:] == ["| PAT | speedup | y | 1 | 1.5 : 1 | 0.6 : 1 |"]


@pytest.mark.parametrize("part", ["pat", "rollpacker", "oppo", "real"])
def test_what_is_more_than_30_percent_off_says_what_would_explain_it(part: str) -> None:
    """Figures with a unit: the remark names an input that the paper does not state, with its value."""
    shown = pd.read_csv(ROOT / "docs" / "validation" / f"{part}.figures.csv", keep_default_na=False)
    for _, row in shown[shown["kind"] == "output"].iterrows():
        far = abs(float(row["error"].rstrip("%"))) > 30 and not papers.RATIO.search(row["quantity"])
        assert not far or re.search(r"\d|see above", row["remark"]), (row["case"], row["quantity"])


def test_what_an_input_was_fitted_to_never_stands_alone() -> None:
    """Beside every RollPacker speedup with the fitted efficiency: that it is, and the speedup without."""
    rows = {row.case: row for row in figures(Options(), "rollpacker").rows if row.quantity == "speedup"}
    fitted = [case for case, row in rows.items() if row.note.startswith("training efficiency fitted")]
    assert len(fitted) == 8
    assert all("the calibration's" in rows[f"{case}-unfitted"].note for case in fitted)


# Part transfer --------------------------------------------------------------------------------------------------------

QWEN = "qwen3-32b"
HEADINGS = "model,gpu,engine,release,tp,prompt_tokens,response_tokens,concurrency,ttft_ms,tpot_ms"
SETTINGS = ("vllm/qwen3-32b/tp2", "vllm/qwen3-32b/tp8")


def fit(left_out: str, step_s: float, without: str = "") -> SettingFit:
    host = HostFit(step_s=step_s, sequence_s=0.0, source="test")
    return SettingFit(engine="vllm", left_out=left_out, without=without, host=host, front_end=FrontEndFit())


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> TransferFits:
    """Steps of 1 ms where all was seen, of 2 and 3 ms where TP2 and TP8 were not, of 9 ms without a term."""
    known = (fit("", 1e-3), fit(SETTINGS[0], 2e-3), fit(SETTINGS[1], 3e-3))
    known += tuple(fit(one, 9e-3, "a term") for one in SETTINGS)
    found = TransferFits(date="today", script="none", source="test", fits=known)
    monkeypatch.setattr(transfer, "shipped_fits", lambda: found)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / TABLE
    lines = [f"{QWEN},h100-sxm,vllm,1,{tp},64,8,{users},50,8" for tp in (2, 8) for users in (1, 2)]
    path.write_text("\n".join((HEADINGS, *lines)) + "\n", encoding="utf-8")
    more = f"{HEADINGS},gpu,precision,dp,ep,lengths".replace("model,gpu,", "model,")
    today = "llama-3.1-8b,vllm,0.18.0,1,64,8,2,50,8,h100-sxm,fp8,1,1,uniform"
    (tmp_path / TODAY).write_text(f"{more}\n{today}\n")
    (tmp_path / AISIMULATE).write_text(f"{more},of,peer_ttft_ms,peer_tpot_ms\n{today},today,75,6\n")
    return tmp_path


def test_each_setting_under_the_fit_that_has_not_seen_it(fits: TransferFits, data: Path) -> None:
    """One user: a step of decoding is its kernels and the host's time, so the fits differ by their steps."""
    runs = read_runs(data)
    whole = fits.of("vllm")
    fitted_rows = [row for run in runs for row in run_rows("transfer", run, "input", whole.host, whole.front_end)]
    left_out, fitted = (
        {row.case: row.simulated for row in rows if row.quantity == "tpot_s"}
        for rows in (left_out_rows(runs, fits), fitted_rows)
    )
    term = {row.case: row.simulated for row in left_out_rows(runs, fits, "a term") if row.quantity == "tpot_s"}
    for setting, later_s in zip(SETTINGS, (1e-3, 2e-3), strict=True):
        case = f"{setting}/64+8x1"
        assert left_out[case] - fitted[case] == pytest.approx(later_s, rel=1e-6)
        assert term[case] - fitted[case] == pytest.approx(8e-3, rel=1e-6)


def test_the_part_is_told_by_settings(fits: TransferFits, data: Path) -> None:
    found = transfer.section(Options(evidence=data))
    assert found.summarised
    told = [(s.group, s.quantity, s.kind, s.count) for s in found.summaries]
    assert (SETTINGS[1], "tpot_s", "left-out", 2) in told
    assert ("vllm", "ttft_s", "left-out", 4) in told
    (tp8,) = (s for s in found.summaries if s.group == SETTINGS[1] and s.quantity == "tpot_s" and s.kind == "left-out")
    errors = [
        r.error for r in found.rows if r.case.startswith(SETTINGS[1]) and r.quantity == "tpot_s" and r.kind == tp8.kind
    ]
    record = tp8.record()
    assert record["case"] == SETTINGS[1]
    assert record["error"] == pytest.approx(sum(map(abs, errors)) / 2, rel=1e-5)
    assert "| vllm | a term |" in found.tables["ablation"]
    (family,) = found.tables["families"].splitlines()[2:]
    assert family.startswith("| h100-sxm/vllm/llama-3.1-8b | 1 |")
    last = found.tables["peers"].splitlines()[-1].split(" | ")
    assert (last[0], last[1], last[3], last[5]) == ("| all", "1", "25.0% / 25.0%", "50.0% / 50.0% |")


def test_a_fit_that_leaves_nothing_out_says_so() -> None:
    """SGLang's fits have no host time, with a setting and without it."""
    rows = transfer.fits_table(shipped_fits()).splitlines()
    assert all(("leaves nothing out" in row) == row.startswith("| sglang/") for row in rows[2:])


def test_shipped_fits_are_those_of_the_calibrations_and_leave_out_every_tp() -> None:
    shipped = shipped_fits()
    for engine in SERVED:
        calibration, whole = load_calibration(f"h100-{engine}"), shipped.of(engine)
        ahead = engine in ("vllm", "trtllm")  # vLLM since 0.14, whose kernels these are
        assert calibration.host == whole.host.model_copy(update={"overlapped": ahead})
        assert calibration.front_end == whole.front_end
        left_out = {f.left_out for f in shipped.fits if f.engine == engine and f.left_out and not f.without}
        assert len(left_out) >= 2
        for term in shipped.terms(engine):
            assert {f.left_out for f in shipped.fits if f.engine == engine and f.without == term} == left_out
        for name, (low, high) in whole.intervals.items():
            value = getattr(whole.host if hasattr(whole.host, name) else whole.front_end, name)
            assert low <= value <= high
    with pytest.raises(KeyError):
        shipped.of("torch")


def test_the_better_mode_is_chosen_wherever_runs_differ_by_a_tenth() -> None:
    """Asynchronous against synchronous training, as measured and as rlsim says: the gains on the page."""
    pages = [pd.read_csv(ROOT / "docs/validation" / f"{part}.figures.csv") for part in ("steps", "asynchronous")]
    rows = pd.concat(pages).query("quantity == 'gain'")[["measured", "rlsim"]].astype(float)
    gains = [(measured, said) for measured, said in rows.to_numpy() if abs(math.log(measured)) > math.log(1.1)]
    right = sum((measured > 1) == (said > 1) for measured, said in gains)
    assert len(gains) >= 9
    assert right >= 0.9 * len(gains)

"""The validation: rows, summaries, bounds, the page and the command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import altair as alt
import pandas as pd
import pytest
from typer.testing import CliRunner

from rlsim.cli import app
from rlsim.errors import ConfigError
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.validate import parts, pat
from rlsim.validate.bounds import BOUNDS, Bound, checked
from rlsim.validate.page import page_text, read_sections, section_text, stale, write_page
from rlsim.validate.parts import PARTS, Options, Section, Skipped, kernel_folder
from rlsim.validate.rollpacker import CUMULATIVE
from rlsim.validate.rows import Row, summarise

ROOT = Path(__file__).resolve().parents[1]
PAGE = read_sections(ROOT / "docs" / "validation.md")


def rows(*errors: float, case: str = "vllm/qwen") -> tuple[Row, ...]:
    return tuple(Row("serving", f"{case}/{i}", "tpot_s", 2.0, 2.0 * (1 + e)) for i, e in enumerate(errors))


def section(*errors: float) -> Section:
    found = rows(*errors)
    return Section(found, tuple(summarise(found, depth=2)), "Some text.\n")


def test_an_error_is_simulated_over_reference_less_one() -> None:
    row = Row("pat", "x", "speedup", 1.25, 1.0)
    assert row.error == pytest.approx(-0.2)
    assert row.record() == {
        "part": "pat",
        "case": "x",
        "quantity": "speedup",
        "kind": "output",
        "reference": 1.25,
        "simulated": 1.0,
        "error": -0.2,
    }


def test_summaries_by_hand() -> None:
    (found,) = summarise(rows(0.1, -0.3, 0.2), depth=2)
    assert (found.group, found.count) == ("vllm/qwen", 3)
    assert (found.mean, found.median, found.bias) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.0))
    assert found.p90 == pytest.approx(0.28)
    assert [s.group for s in summarise((*rows(0.1), *rows(0.2, case="sglang/qwen")), depth=1)] == ["vllm", "sglang"]


def test_the_first_bound_of_a_statistic_counts() -> None:
    bounds = (
        Bound("serving", "vllm/*", "tpot_s", "mean", 0.3, missed="a reason"),
        Bound("serving", "*", "*", "mean", 0.1),
        Bound("serving", "*", "*", "median", 0.1),
        Bound("serving", "*", "*", "mean", 0.1, kind="input"),
    )
    found = [
        (b.statistic, round(value, 3), fine) for _, b, value, fine in checked(section(0.1, -0.3).summaries, bounds)
    ]
    assert found == [("mean", 0.2, True), ("median", 0.2, False)]


def test_every_missed_target_says_what_it_was_and_why() -> None:
    for bound in BOUNDS:
        assert not bound.missed or ("%" in bound.missed and ":" in bound.missed)


def test_a_page_keeps_the_sections_that_are_not_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(page, {"serving": section(0.1)})
    write_page(page, {"kernels": section(0.2)})
    assert list(read_sections(page)) == ["kernels", "serving"]
    assert page.read_text() == page_text(read_sections(page))
    assert "## Whole engines" in page.read_text()
    missing = [part for part in PARTS if part not in ("kernels", "serving")]
    assert stale(page, {"serving": section(0.1)}, ["serving"]) == missing
    changed = Section((), (), "Other text.\n")
    assert stale(page, {"serving": changed}, ["serving"]) == ["serving", *missing]
    assert stale(page, {"serving": changed}, []) == missing


def test_what_is_no_validation_page_is_not_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "notes.md"
    page.write_text("my notes\n")
    with pytest.raises(ConfigError, match="not a validation page"):
        write_page(page, {"serving": section(0.1)})
    assert page.read_text() == "my notes\n"


def test_an_exceeded_bound_stands_out_on_the_page() -> None:
    found = rows(0.5)
    summaries = summarise((Row("kernels", "h100-sxm-vllm/x", "gemm_s", 1.0, 1.5),), depth=1)
    assert "**exceeded**" in section_text("kernels", Section(found, tuple(summaries), "text"))


def test_the_committed_page_has_every_part() -> None:
    assert list(read_sections(ROOT / "docs" / "validation.md")) == list(PARTS)


def test_without_a_clone_a_part_says_where_its_rows_are(tmp_path: Path) -> None:
    found = parts.run_part("serving", Options(evidence=tmp_path / "evidence"))
    assert isinstance(found, Skipped)
    assert "a clone has it" in found.reason


def test_kernel_tables_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no kernel tables there"):
        kernel_folder(tmp_path)
    monkeypatch.setenv("RLSIM_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="no kernel tables there"):
        kernel_folder(None)
    (tmp_path / "kernels").mkdir()
    assert kernel_folder(None) == tmp_path


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Section | Skipped]:
    found: dict[str, Section | Skipped] = {"serving": section(0.01), "kernels": Skipped("no tables")}
    monkeypatch.setattr(parts, "run_part", lambda name, options: found[name])
    return found


def test_the_command_writes_json_and_a_page(stub: dict[str, Section | Skipped], tmp_path: Path) -> None:
    target, page = tmp_path / "rows.json", tmp_path / "page.md"
    done = CliRunner().invoke(
        app, ["validate", "kernels", "serving", "--json", str(target), "--page", str(page)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "kernels: skipped: no tables" in done.output
    (record,) = json.loads(target.read_text())
    assert set(record) == {"part", "case", "quantity", "kind", "reference", "simulated", "error"}
    assert list(read_sections(page)) == ["serving"]


def test_the_command_fails_beyond_a_bound_and_on_a_stale_page(
    stub: dict[str, Section | Skipped], tmp_path: Path
) -> None:
    found = (Row("kernels", "h100-sxm-vllm/x", "gemm_s", 1.0, 1.5),)
    stub["kernels"] = Section(found, tuple(summarise(found, depth=1)), "text")
    done = CliRunner().invoke(app, ["validate", "kernels"])
    assert done.exit_code == 1
    assert "h100-sxm-vllm gemm_s: median error 50.0% is beyond its bound of 5.0%" in done.output
    page = tmp_path / "page.md"
    write_page(page, {"serving": Section((), (), "Older text.\n")})
    done = CliRunner().invoke(app, ["validate", "serving", "--check", str(page)])
    assert done.exit_code == 1
    assert "section serving is stale" in done.output


def test_nothing_is_written_where_no_part_could_run(stub: dict[str, Section | Skipped], tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    done = CliRunner().invoke(
        app, ["validate", "kernels", "--json", str(tmp_path / "old.json"), "--page", str(tmp_path / "p.md")]
    )
    assert str(done.exception) == "no part of the validation could run here"
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "p.md").exists()


def test_pages_are_looked_at_before_the_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "run_part", lambda *_: pytest.fail("ran before it was known that the page is of use"))
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "serving.png").write_text("mine")
    for option, page, why in (
        ("--page", "latin.md", "latin.md: cannot be read: byte 3 is no UTF-8 text"),
        ("--check", "latin.md", "latin.md: cannot be read: byte 3 is no UTF-8 text"),
        ("--check", "nofile.md", "nofile.md: no such file"),
        ("--page", "new.md", "serving.png: exists, and .*new.md does not show it"),
    ):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(app, ["validate", "serving", option, str(tmp_path / page)], catch_exceptions=False)


def test_a_page_replaces_the_charts_that_it_shows(tmp_path: Path) -> None:
    charted = Section((), (), "Text.\n", alt.Chart(pd.DataFrame({"a": [1]})).mark_point())
    for _ in range(2):
        write_page(tmp_path / "page.md", {"serving": charted})
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["serving.png"]


def test_an_unknown_part_is_named_with_the_nearest() -> None:
    with pytest.raises(Exception, match="unknown part of the validation 'kernel'; did you mean 'kernels'"):
        parts.run_part("kernel", Options())


# Published figures ----------------------------------------------------------------------------------------------------


def result_of(rows: list[dict[str, object]]) -> Result:
    return SimpleNamespace(steps=pd.DataFrame(rows))  # type: ignore[return-value]


def test_pats_figures_are_of_steps_that_reach_the_cap_and_count_generated_tokens() -> None:
    step = {"case": "", "tokens": 999.0, "response_tokens": 443_428.0, "bubble_fraction": 0.0, "switches": 1}
    rows: list[dict[str, object]] = []
    for system, gen_s, step_s in (("verl-tp2", 134.3, 172.5), ("pat", 87.9, 125.6)):
        rows.append({**step, "system": system, "longest_tokens": 24576, "gen_time_s": gen_s, "step_time_s": step_s})
        rows.append({**step, "system": system, "longest_tokens": 20000, "gen_time_s": 1.0, "step_time_s": 1.0})
    found = {(row.case, row.quantity): row for row in pat._h100(result_of(rows), "")}
    assert all(abs(row.error) < 0.01 for row in found.values())
    assert found["h100-24k", "generated_tokens_per_s"].simulated == pytest.approx(443_428 / 125.6)


def test_pats_experiments_run_under_its_engine_and_under_verls_default() -> None:
    ran = {name: load_experiment(name)[0].calibration for name in ("pat_vs_static", "pat_a40")}
    assert ran == {"pat_vs_static": "h100-sglang-0.5.10", "pat_a40": "a40-sglang"}  # PAT ran SGLang 0.4.8
    shown = [row.split(" | ")[0] for row in PAGE["pat"].splitlines() if row.startswith("| ")]
    for case in ("h100-24k-verl", "h100-24k", "a40-6k", "a40-16k"):
        engines = {case, case.replace("-verl", "") + "-vllm" + "-verl" * case.endswith("-verl")}
        assert {f"| {one}" for one in engines} <= set(shown)


def test_what_an_input_was_fitted_to_never_stands_alone() -> None:
    """Beside every RollPacker speedup with the fitted efficiency: that it is, and the speedup without."""
    rows = [row.strip("| ").split(" | ") for row in PAGE["rollpacker"].splitlines() if row.startswith("| ")]
    speedups = {row[0]: row for row in rows if row[1] == "speedup" and row[2] == "output"}
    for experiment, systems in CUMULATIVE.items():
        for part in systems:
            case = f"{experiment.partition('_')[2]}-{part.strip('+ ').replace(' ', '-')}"
            assert "fitted to the stage shares" in speedups[case][-1]
            assert "calibration's" in speedups[f"{case}-unfitted"][-1]


def test_readme_says_the_unfitted_speedup_before_the_fitted_one() -> None:
    told = [row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "as a whole" in row]
    assert ["not fitted" in row for row in told] == [True, False]
    assert "fitted to the published stage shares, an input" in told[1]

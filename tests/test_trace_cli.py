"""The command group `rlsim trace`, and the numbers and chart of `describe`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Command, invoke

from rlsim.base.catalogue import data_dir
from rlsim.base.charts import save_chart
from rlsim.errors import TraceError
from rlsim.results.report.lengths import trace_chart
from rlsim.trace import make_trace, read_trace, write_trace
from rlsim.trace.describe import describe
from rlsim.trace.fit import load_fit

SHIPPED = data_dir("traces") / "rollpacker-math.parquet"


def run(*arguments: object) -> str:
    """The command's output; its error is raised."""
    result = invoke("trace", *arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def small() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "prompt_id": np.repeat(np.arange(40), 4),
            "sample_id": np.tile(np.arange(4), 40),
            "response_tokens": rng.integers(10, 900, 160),
            "task": np.repeat(["math", "code"], 80),
        }
    )


def test_import_writes_a_trace(tmp_path: Path) -> None:
    rows = small().rename(columns={"response_tokens": "n_out"})
    rows.to_csv(tmp_path / "in.csv", index=False)
    out = run(
        "import", tmp_path / "in.csv", tmp_path / "out.parquet", "--column", "response_tokens=n_out", "--cap", "1K"
    )
    assert "160 responses of 40 prompts" in out
    assert read_trace(tmp_path / "out.parquet").meta.cap_tokens == 1024


def test_describe_prints_a_table_or_json() -> None:
    text = run("describe", SHIPPED, "--above", "4K,8K", "--cap", "8K")
    assert "P90" in text
    assert "share above 4,096" in text
    assert run("describe", Path(SHIPPED).stem, "--above", "4K,8K", "--cap", "8K") == text
    found = json.loads(run("describe", SHIPPED, "--json", "-", "--above", "4000"))["parts"][0]
    assert found["share_above"]["4000"] == pytest.approx(0.053, abs=0.006)
    assert found["samples_per_prompt"] == {"24": 768}


def test_description_by_hand() -> None:
    frame = pd.DataFrame({"prompt_id": [0, 0, 1, 1], "sample_id": [0, 1, 0, 1], "response_tokens": [10, 20, 30, 1000]})
    part = describe(make_trace(frame), cap_tokens=100, above=(15, 100))["parts"][0]
    assert part["mean_tokens"] == 40
    assert part["quantiles"]["P50"] == 25
    assert part["max_over_median"] == 4
    assert part["share_at_cap"] == 0.25
    assert part["share_above"] == {15: 0.75, 100: 0.0}
    assert part["samples_per_prompt"] == {2: 2}
    tasks = describe(make_trace(small()))["parts"]
    assert [p["part"] for p in tasks] == ["all", "task code", "task math"]


def test_what_scripts_read(folder: Path, call: Command) -> None:
    imported = call("trace", "import", "lengths.csv", "mine.parquet", "--json", "-")
    assert set(json.loads(imported.out)) == {"file", "responses", "prompts", "notes"}
    assert call("trace", "import", "lengths.csv", "mine.parquet", "--quiet").out == "mine.parquet\n"
    assert call("trace", "fit", "mine.parquet", "--quiet", "--json", "fit.json").out == ""
    assert load_fit(folder / "fit.json").goodness.ks > 0
    assert call("trace", "describe", "mine.parquet", "--quiet", "--chart", "mine.html").out == "mine.html\n"
    recipe = data_dir("traces") / "deepscaler-llama-3.1-8b.yaml"
    generated = call("trace", "generate", recipe, "--out", "new.parquet", "--json", "-")
    assert all(fact["ok"] for fact in json.loads(generated.out))
    checked = call("check", "base.yaml", "--json", "-")
    assert json.loads(checked.out)["runs"] > 0
    assert call("check", "base.yaml", "--quiet").out == ""


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_charts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"c{suffix}"
    run("describe", SHIPPED, "--chart", path)
    data = path.read_bytes()
    assert data[:4] == b"\x89PNG" if suffix == ".png" else b"Response lengths of rollpacker-math" in data
    if suffix == ".html":
        assert b"https://cdn" not in data
    save_chart(trace_chart(make_trace(small())), path)
    save_chart(trace_chart(make_trace(small().assign(response_tokens=5))), path)


def test_fit_prints_and_writes(tmp_path: Path) -> None:
    trace = written(small(), tmp_path)
    text = run("fit", trace, "--out", tmp_path / "f.yaml", "--cap", "512")
    assert "KS distance" in text
    assert "cap_tokens: 512" in (tmp_path / "f.yaml").read_text()


RECIPE: dict[str, Any] = {
    "name": "t", "prompts": 100, "responses": 4, "cap_tokens": 8192, "groups": {"icc": 0.7, "tolerance": 0.1},
    "lengths": {"facts": [{"above": 1000, "share": 0.2, "tolerance": 0.01}]},
}  # fmt: skip


def test_generate_checks_then_writes(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(json.dumps(RECIPE))
    assert "met" in run("generate", path, "--check-only")
    assert [p.name for p in tmp_path.iterdir()] == ["t.yaml"]
    assert "400 responses" in run("generate", path)
    run("generate", path, "--out", tmp_path / "u.parquet")
    assert (tmp_path / "u.parquet").read_bytes() == (tmp_path / "t.parquet").read_bytes()


def test_generate_writes_no_trace_that_misses_its_facts(tmp_path: Path) -> None:
    facts = [{"above": 1000, "share": 0.2, "tolerance": 1e-9}]
    path = tmp_path / "t.yaml"
    path.write_text(json.dumps(RECIPE | {"prompts": 33, "responses": 1, "lengths": {"facts": facts}}))
    with pytest.raises(TraceError, match=r"share above 1000 tokens: wanted 0\.2"):
        run("generate", path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.yaml"]


def test_describe_shows_rewards_where_there_are_any_and_some_of_many_epochs(tmp_path: Path) -> None:
    frame = small().drop(columns="task")
    assert "reward" not in run("describe", written(frame, tmp_path))
    frame["correct"] = [True, True, False, False] * 20 + [True] * 40 + [None] * 40
    frame["reward"] = np.tile([1.0, -0.5], 80)
    frame["reward_time_s"] = np.tile([0.5, 1.5], 80)
    frame["judge_tokens"] = 300
    path = written(frame, tmp_path)
    part = json.loads(run("describe", path, "--json", "-"))["parts"][0]
    assert part["correct_share"] == pytest.approx(80 / 120, abs=1e-4)  # 40 were not judged
    assert part["mixed_prompts"] == pytest.approx(20 / 30, abs=1e-4)
    assert (part["reward_mean"], part["reward_min"], part["reward_max"]) == (0.25, -0.5, 1.0)
    assert (part["reward_time_mean_s"], part["reward_time_max_s"]) == (1.0, 1.5)
    text = run("describe", path)
    for words in ("right", "66.67%", "mean reward", "-0.50 to 1.00", "longest reward call (s)", "answer of the judge"):
        assert words in text
    assert "longest test case" in run("describe", data_dir("traces") / "rollpacker-code.parquet")
    frame = pd.concat([small().drop(columns="task").assign(epoch=e) for e in range(30)])
    text = run("describe", written(frame, tmp_path))
    assert "epoch 0" in text.replace("\n", " ")
    assert "5 of 31 columns: --json has the rest" in text
    assert len(json.loads(run("describe", tmp_path / "t.parquet", "--json", "-"))["parts"]) == 31


def written(frame: pd.DataFrame, tmp_path: Path) -> Path:
    write_trace(make_trace(frame), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"

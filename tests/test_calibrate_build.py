"""From measurements to a calibration: fits on small and large tables, what is borrowed, what is missing, the chart."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import Command

from rlsim.calibrate.build import PUBLISHED, build_calibration
from rlsim.calibrate.fit.attention import CHUNK, with_windows
from rlsim.calibrate.measurements import COLUMNS, Fitted, Measurements, measured_node
from rlsim.calibrate.show import MOST, calibration_chart, efficiencies, write_chart
from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import Calibration, Reference, Source, load_calibration
from rlsim.cost.fits import carried_operators
from rlsim.cost.kernel import Surface
from rlsim.cost.operators import Operators
from rlsim.cost.products import GEMM_AXES
from rlsim.cost.profile import prompts_of
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.errors import CalibrationError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

CPU = Reference(bf16_flop_per_s=1e11, memory_bytes_per_s=1e10, sm_count=1, l2_bytes=3e7, link_bytes_per_s=5e9)
TINY = load_model("qwen2.5-1.5b").model_copy(
    update={
        "name": "tiny",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    }
)
OWN = Source(project="this machine", commit="as measured", licence="own", files=("journal",))
H100 = load_calibration("h100-vllm")


def frame(columns: str, rows: list[tuple[object, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


def small_gemms() -> pd.DataFrame:
    """5% from a plain law, 24 rows of 6 shapes."""
    noise = np.random.default_rng(0)
    shapes = ((512, 128), (128, 128), (256, 128), (128, 256), (192, 128), (1024, 128))
    rows = [(m, n, k, 2e-6 + 2 * m * n * k / 5e10 + 2 * n * k / 8e9) for m in (1, 4, 16, 64) for n, k in shapes]
    return frame("m n k seconds", [(m, n, k, s * np.exp(noise.normal(0, 0.02))) for m, n, k, s in rows])


def small_tables() -> dict[str, pd.DataFrame]:
    """Everything a small CPU run measures, each from a simple law."""
    decode = [(b, c, c, 4, 2, 32, 3e-6 + 1e-6 * b + b * c * 256 / 5e9) for b in (1, 4, 8) for c in (64, 128, 256, 512)]
    unequal = [(8, 100, 400, 4, 2, 32, 3e-6 + 8e-6 + 8 * (100 + 0.5 * 300) * 256 / 5e9)]
    prompts = [(b, n, 0, 4, 2, 32, 5e-6 + b * 256 * n * n / 3e10) for b in (1, 4) for n in (16, 64, 128, 256)]
    steps = [
        ("tiny", tp, "eager", b, b * c, (3e-4 + 1e-5 * b + b * c * 2e-8) / tp**0.5)
        for tp in (1, 2)
        for b in (1, 4, 8, 16)
        for c in (64, 256, 512)
    ]
    prefills = [("tiny", 1, t, n, 1e-4 + t * 1e-6 + t * n * 1e-9) for t in (64, 256, 512) for n in (64, 256) if n <= t]
    sizes = (256, 1024, 4096, 16384, 65536, 2**20)
    return {
        "copy": frame("kind bytes seconds", [("device", 1e6, 2.5e-4), ("host_to_device", 1e6, 2e-4)]),
        "gemm": small_gemms(),
        "decode_attention": frame("batch context longest q_heads kv_heads head_dim seconds", decode + unequal),
        "prefill_attention": frame("batch new prior q_heads kv_heads head_dim seconds", prompts),
        "memory_bound": frame(
            "kernels tokens bytes seconds", [(1, t, t * 512, 1e-6 + t * 512 / 4e9) for t in (1, 4, 16, 64, 256)]
        ),
        "collective": frame(
            "op gpus bytes seconds", [(op, 2, s, 3e-5 + s / 2e9) for op in ("all_reduce", "all_gather") for s in sizes]
        ),
        "decode_step": frame("model tp mode batch context_tokens seconds", steps),
        "prefill_step": frame("model tp tokens length seconds", prefills),
    }


def build(tables: dict[str, pd.DataFrame], **more: object) -> Fitted[Calibration]:
    options: dict[str, object] = {
        "name": "cpu-torch",
        "gpu": "cpu",
        "engine": "torch",
        "reference": CPU,
        "date": "2026-11-21",
        "script": "a test",
        "models": {"tiny": TINY},
        **more,
    }
    return build_calibration(Measurements(tables, (OWN,)), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built() -> Fitted[Calibration]:
    return build(small_tables())


# Small tables ---------------------------------------------------------------------------------------------------------


def test_a_small_run_gives_a_whole_calibration(built: Fitted[Calibration], tmp_path: Path) -> None:
    calibration = built.fit
    assert load_calibration(write_yaml(calibration, tmp_path)) == calibration
    assert calibration.provenance.sources == (OWN,)
    assert not any("not measured, from" in note for note in calibration.provenance.notes)
    assert "measured device copy: 8 GB/s (80.0% of the reference)" in calibration.provenance.notes


def test_points_hold_every_row_and_say_what_was_held_out(built: Fitted[Calibration]) -> None:
    assert tuple(built.points.columns) == COLUMNS
    counts = built.points.groupby("operator").size()
    assert (counts["gemm"], counts["decode_attention"], counts["decode_step"]) == (24, 12, 24)
    error = built.points.fitted_s / built.points.measured_s - 1.0
    assert np.allclose(built.points.error, error)
    for operator in ("gemm", "decode_attention", "prefill_attention", "memory_bound", "nccl"):
        unseen = built.points[(built.points.operator == operator) & built.points.held_out]
        residual = built.fit.residuals[operator]
        assert residual.count == len(unseen) > 0
        assert residual.median == pytest.approx(unseen.error.abs().median(), rel=1e-3, abs=1e-9)


def test_held_out_rows_do_not_move_a_fit() -> None:
    """Wrong times in the held-out rows alone leave the fit as it is, and show in the residual."""
    table = small_gemms()
    first = build({"gemm": table}, base=H100)
    unseen = set(first.points[(first.points.operator == "gemm") & first.points.held_out].label)
    labels = [f"{m} x {n} x {k}" for m, n, k in zip(table.m, table.n, table.k, strict=True)]
    spoilt = table.assign(seconds=table.seconds * [3.0 if label in unseen else 1.0 for label in labels])
    second = build({"gemm": spoilt}, base=H100)
    assert second.fit.operators.gemm == first.fit.operators.gemm
    assert second.fit.residuals["gemm"].median > 0.5


def test_unequal_contexts_give_the_skew(built: Fitted[Calibration]) -> None:
    assert built.fit.operators.decode_attention.skew == pytest.approx(0.5, abs=0.02)
    tables = small_tables()
    tables["decode_attention"] = tables["decode_attention"].query("longest == context")
    equal = build(tables).fit
    assert equal.operators.decode_attention.skew == 0
    assert any("skew of unequal contexts was not measured" in note for note in equal.provenance.notes)


# Whole steps ----------------------------------------------------------------------------------------------------------


def test_whole_steps_become_tables_that_give_the_measured_times(built: Fitted[Calibration]) -> None:
    tables = small_tables()
    assert {(one.model, one.tp) for one in built.fit.iterations} == {("tiny", 1), ("tiny", 2)}
    for tp in (1, 2):
        step = step_cost(TINY, tp, measured_node("cpu", CPU), built.fit)
        for row in tables["decode_step"].query("tp == @tp").to_dict("records"):
            assert step.decode(row["batch"]).step_s(row["context_tokens"]) == pytest.approx(row["seconds"], rel=2e-3)
        for row in tables["prefill_step"].query("tp == @tp").to_dict("records"):  # of 64 tokens and 256 two each
            assert step.prefill_s(prompts_of(row["tokens"], row["length"])) == pytest.approx(row["seconds"], rel=0.1)
    assert built.fit.residuals["decode_step"].p90 < 0.1  # three batch sizes: the inner one by the outer two


def test_steps_from_graphs_are_preferred() -> None:
    tables = small_tables()
    graphs = tables["decode_step"].assign(mode="graph", seconds=lambda t: t.seconds / 2)
    tables["decode_step"] = pd.concat([tables["decode_step"], graphs])
    calibration = build(tables).fit
    first = graphs.query("tp == 1 and batch == 1").iloc[0]
    step = step_cost(TINY, 1, measured_node("cpu", CPU), calibration)
    assert step.decode(1).step_s(first.context_tokens) == pytest.approx(first.seconds, rel=2e-3)
    assert calibration.runtime.graph_batch_sizes == PUBLISHED.graph_batch_sizes
    assert calibration.runtime.graph_capture_s == pytest.approx(PUBLISHED.graph_capture_s, rel=1e-3)


def test_host_time_is_what_steps_leave_over_the_operators() -> None:
    """Steps made of the operators' own sum and a known host time give that host time back."""
    tables = {name: table for name, table in small_tables().items() if name not in ("decode_step", "prefill_step")}
    bare = build(tables, base=H100).fit
    host = H100.host.model_copy(update={"step_s": 0.0, "sequence_s": 0.0, "prefill_s": 0.0})
    bare = bare.model_copy(update={"host": host, "iterations": ()})
    batches = (1, 2, 4, 8, 16, 32)
    step = step_cost(TINY, 1, measured_node("cpu", CPU), bare)
    rows = [
        ("tiny", 1, "eager", b, b * c, step.decode(b).step_s(b * c) + 2e-3 + 5e-5 * b)
        for b in batches
        for c in (64, 256)
    ]
    tables["decode_step"] = frame("model tp mode batch context_tokens seconds", rows)
    found = build(tables).fit.host
    assert found.step_s == pytest.approx(2e-3, rel=0.02)
    assert found.sequence_s == pytest.approx(5e-5, rel=0.02)


# Runtime and training -------------------------------------------------------------------------------------------------


def test_layout_changes(built: Fitted[Calibration]) -> None:
    runtime = built.fit.runtime
    assert (runtime.graph_capture_s, runtime.graph_batch_sizes) == (0.0, ())
    assert runtime.switch_control_s == pytest.approx(1.4)
    assert "PAT's figures on 8xA40" in runtime.source
    assert build(small_tables(), base=H100).fit.runtime.source == H100.runtime.source


def test_training_is_what_own_products_reach_beside_the_frameworks_of_the_base(built: Fitted[Calibration]) -> None:
    own = built.fit.training.flop_efficiency
    assert 0.0 < own["torch"] == own["fsdp"] < own["megatron"] < 1.0
    joined = build(small_tables(), base=H100).fit.training.flop_efficiency
    assert joined == {**H100.training.flop_efficiency, "torch": own["torch"]}


# What is not measured -------------------------------------------------------------------------------------------------


def test_what_is_missing_is_listed_with_the_nearest_remedy() -> None:
    with pytest.raises(CalibrationError) as error:
        build({"gemm": small_gemms()}, name="mine", gpu="h100-sxm", engine="vllm")
    text = str(error.value)
    for word in ("decode_attention", "prefill_attention", "memory_bound", "collective", "host time"):
        assert word in text
    assert text.endswith("--base h100-sxm-vllm")
    assert " gemm" not in text
    with pytest.raises(CalibrationError, match="nothing was measured"):
        build({})


def test_what_is_not_measured_comes_from_the_base_and_says_so() -> None:
    built = build({"gemm": small_gemms()}, base=H100, gpu="h100-sxm", engine="vllm", reference=H100.reference)
    calibration = built.fit
    assert calibration.operators.decode_attention == H100.operators.decode_attention
    assert calibration.operators.gemm != H100.operators.gemm
    assert set(built.points.operator) == {"gemm"}
    assert calibration.residuals["decode_attention"].note.startswith("of h100-sxm-vllm, not measured here")
    assert calibration.host.source.startswith("not measured, from h100-sxm-vllm")
    assert calibration.provenance.sources == (OWN, *H100.provenance.sources)
    assert any("not measured, from h100-sxm-vllm: decode_attention" in note for note in calibration.provenance.notes)
    built = build(small_tables(), base=H100, models={})
    assert built.fit.iterations == ()
    assert any("no table of whole iterations of tiny: its shape" in note for note in built.fit.provenance.notes)


def test_another_gpus_corrections_are_taken_over_of_few_rows_and_of_attention() -> None:
    assert H100.operators.gemm.table is not None
    table = small_tables()["decode_attention"]
    operators = build({"decode_attention": table}, base=H100).fit.operators
    assert operators.gemm.table is not None
    before, after = (Surface(one.gemm.table, GEMM_AXES) for one in (H100.operators, operators))
    assert CPU.flops_per_byte == 10.0
    assert after(1, 4096, 16384) == before(1, 4096, 16384) != 1
    assert [after(rows, 4096, 16384) for rows in (16, 64, 4096)] == [1.0, 1.0, 1.0]
    assert operators.gemm == carried_operators(H100.operators, H100.reference, CPU).gemm
    assert operators.prefill_attention == H100.operators.prefill_attention


def test_collectives_keep_the_bases_group_sizes() -> None:
    rows = [("all_reduce", 2, s, 1e-3 + s / 1e9) for s in (1024, 65536, 2**20, 2**24)]
    few = [("all_gather", 2, 1024, 1e-3)]
    calibration = build({"collective": frame("op gpus bytes seconds", rows + few)}, base=H100).fit
    nccl = calibration.collectives.nccl
    assert nccl["all_gather"] == H100.collectives.nccl["all_gather"]
    assert any("all_gather on 2 GPUs: 1 message sizes" in note for note in calibration.provenance.notes)
    assert nccl["all_reduce"][2].time_s[0] > 9e-4
    assert nccl["all_reduce"][8] == H100.collectives.nccl["all_reduce"][8]
    assert any("all_reduce on 4, 8 GPUs" in note for note in calibration.provenance.notes)


@pytest.mark.parametrize(
    ("operator", "rows"),
    [("gemm", 7), ("decode_attention", 5), ("prefill_attention", 4), ("memory_bound", 3), ("collective", 2)],
)
def test_too_few_rows_name_the_operator_and_how_many_are_needed(operator: str, rows: int) -> None:
    table = small_tables()[operator].head(rows)
    with pytest.raises(CalibrationError, match=rf"{operator}.*at least {rows + 1} are needed"):
        build({operator: table}, base=H100)


def test_one_device_has_no_collectives() -> None:
    tables = small_tables()
    tables["decode_step"] = tables["decode_step"].query("tp == 1")
    del tables["collective"]
    calibration = build(tables).fit
    assert calibration.collectives.nccl == {}
    assert any("no TP beyond 1" in note for note in calibration.provenance.notes)


# Large tables ---------------------------------------------------------------------------------------------------------


def test_large_tables_get_the_full_fits_and_their_held_out_rows() -> None:
    """Times from the formulas of the H100: the points' held-out rows are those that the fits' residuals count."""
    operators = Operators(H100.operators, H100.reference)
    widths, tokens = (1024, 4096, 6144, 8192, 16384, 28672), (1, 4, 16, 64, 256, 1024, 4096)
    gemm = [(m, n, k, operators.gemm_s(m, n, k)) for n in widths for k in widths for m in tokens]
    heads = ((8, 1), (16, 2), (32, 4), (32, 8))
    decode = [
        (b, c, c, q, kv, 128, operators.decode_kernels.curve(b, kv, 128).step_s(b * c))
        for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for c in (16, 64, 1024, 4096, 8192, 16384, 65536)
        for q, kv in heads
    ]
    prefill = [
        (b, n, 0, q, kv, 128, operators.prefill_attention_s([(n, 0)] * b, q, kv, 128))
        for b in (1, 4, 16)
        for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192)
        for q, kv in heads
    ]
    tables = {
        "gemm": frame("m n k seconds", gemm),
        "decode_attention": frame("batch context longest q_heads kv_heads head_dim seconds", decode),
        "prefill_attention": frame("batch new prior q_heads kv_heads head_dim seconds", prefill),
    }
    for cold in (True, False):
        built = build(tables, base=H100, gpu="h100-sxm", engine="vllm", reference=H100.reference, cold=cold)
        for operator in tables:
            points = built.points[(built.points.operator == operator) & built.points.held_out]
            residual = built.fit.residuals[operator]
            assert "few-constant" not in residual.note
            assert residual.count == len(points)
            assert residual.median == pytest.approx(points.error.abs().median(), rel=0.02, abs=1e-4)
            assert residual.median < 0.06


def test_chunks_of_llama_4_are_no_windows() -> None:
    """SGLang's rows of 8,192 tokens take the time of chunks, or of all tokens: no kernel is made of them, and none is
    judged by them. Under vLLM they are windows, and have a residual that many other rows do not hide."""
    rows = [
        (batch, tokens, window, 8, 1, 128, 1e-4)
        for batch in range(1, 9)
        for tokens in (10_240, 16_384)
        for window in (CHUNK, 1024)
    ]
    table = frame("batch tokens window q_heads kv_heads head_dim seconds", rows)
    for operator in ("decode_attention", "prefill_attention"):
        known = getattr(H100.operators, operator), H100.reference, operator
        smaller = with_windows(*known, table[table.window < CHUNK], "sglang")
        assert with_windows(*known, table, "sglang") == smaller
        assert with_windows(*known, table[table.window == CHUNK], "sglang") == (known[0], {})
        _, residuals = with_windows(*known, table, "vllm")
        assert residuals[f"{operator}_windows_of_{CHUNK}"].ranges["window"] == (CHUNK, CHUNK)


# The chart ------------------------------------------------------------------------------------------------------------


def test_chart_has_a_panel_for_every_operator(built: Fitted[Calibration]) -> None:
    panels = {row["panel"] for row in calibration_chart(built.points)["data"]["values"]}
    assert len(panels) == built.points.operator.nunique()
    assert any(re.fullmatch(r"memory bound\nheld out: median .*%, p90 .*%, \d+ points?", name) for name in panels)


def test_chart_thins_out_large_tables_but_keeps_the_worst() -> None:
    rng = np.random.default_rng(1)
    measured = np.exp(rng.uniform(-14, -3, 6000))
    error = rng.normal(0, 0.02, 6000)
    error[17] = 4.0
    points = pd.DataFrame({"operator": "gemm", "label": [f"row {i}" for i in range(6000)], "measured_s": measured})
    points = points.assign(fitted_s=measured * (1 + error), error=error, held_out=np.arange(6000) % 4 == 0)
    labels = [row["label"] for row in calibration_chart(points)["data"]["values"] if row["label"]]
    assert len(labels) <= MOST
    assert "row 17" in labels


def test_charts_are_written_whole_or_not_at_all(built: Fitted[Calibration], tmp_path: Path) -> None:
    few = built.points[built.points.operator == "gemm"]
    write_chart(few, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    write_chart(few, tmp_path / "a.html")
    assert "vega" in (tmp_path / "a.html").read_text().lower()
    with pytest.raises(CalibrationError, match=r"one of \.html"):
        write_chart(few, tmp_path / "a.pdf")
    with pytest.raises(CalibrationError, match="does not exist"):
        write_chart(few, tmp_path / "no" / "a.svg")
    with pytest.raises(CalibrationError, match="no points"):
        write_chart(few.head(0), tmp_path / "b.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.svg"]


# Shares of the data sheet -------------------------------------------------------------------------------------------


def test_shares_are_seconds_of_the_data_sheet_over_those_of_the_kernel() -> None:
    launch = H100.operators.gemm.model_copy(
        update={"launch_s": 1e-3, "efficiency": {"compute": 1e6, "memory": 1e6}, "tiles": (), "table": None}
    )
    found = efficiencies(H100.model_copy(update={"operators": H100.operators.model_copy(update={"gemm": launch})}))
    products, others = found[found.kernel == "gemm"], found[found.kernel != "gemm"]
    weights_s = 2.0 * (4096**2 + 2 * 4096) / H100.reference.memory_bytes_per_s
    (share,) = products[(products.line == "n = k = 4,096") & (products["at"] == 1)].value
    assert share == pytest.approx(weights_s / 1e-3, rel=1e-3)
    assert others.value.between(0, 1).all()
    assert {"decode_attention", "prefill_attention", "experts_mxfp4", "gemm_fp8"} <= {*others.kernel}


def test_the_command_shows_tables_and_a_chart(tmp_path: Path, call: Command) -> None:
    shown = call("calibrate", "show", "a40-sglang", "--out", tmp_path / "shares.svg")
    assert (shown.code, "n = k = 4,096" in shown.out) == (0, True)
    assert "256 sequences" in (tmp_path / "shares.svg").read_text()


def test_the_command_shows_decode_steps(tmp_path: Path, call: Command) -> None:
    """By TP, responses on the cluster and context, as the engine takes them; a missing one has no room."""
    asked = ("calibrate", "show", "a40-sglang", "--model", "llama-3.1-8b")
    shown = call(*asked, "--out", tmp_path / "steps.svg")
    assert (shown.code, "context 16,384" in shown.out, " –" in shown.out) == (0, True, True)
    assert "TP8" in (tmp_path / "steps.svg").read_text()
    rows = {(r["context"], r["tp"], r["batch"]): r["step_s"] for r in json.loads(call(*asked, "--json", "-").out)}
    costs = RolloutCostModel(load_model("llama-3.1-8b"), load_cluster("8xa40"), load_calibration("a40-sglang"))
    assert rows[1024, 2, 128] == pytest.approx(costs.step(2).decode(32).step_s(32 * 1024))
    assert rows[4096, 8, 4] == pytest.approx(costs.step(8).decode(4).step_s(4 * 4096))
    assert rows[65536, 1, 256] is None
    half = json.loads(call(*asked, "--cluster", "4xa40", "--json", "-").out)
    assert {row["tp"] for row in half} == {1, 2, 4}


def test_the_command_shows_gains_of_drafts(tmp_path: Path, call: Command) -> None:
    asked = ("calibrate", "show", "a40-sglang", "--model", "llama-3.1-8b", "--speculation")
    of = "{method: eagle3, num_speculative_tokens: 2, acceptance: 0.7}"
    shown = call(*asked, of, "--out", tmp_path / "gains.svg")
    assert (shown.code, "k = 2" in shown.out, "each position: 0.7, 0.49" in shown.out) == (0, True, True)
    rows = {
        (r["context"], r["drafted"], r["batch"]): r["gain"] for r in json.loads(call(*asked, of, "--json", "-").out)
    }
    assert 1.2 < rows[1024, 1, 1] < 1.7 < rows[1024, 2, 1] < 2.19

"""`rlsim calibrate from-engine`: logs made of a known factor give it back, what is wrong is refused, and its use."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, invoke
from scipy.optimize import lsq_linear

import rlsim
from rlsim.calibrate.from_engine import from_engine, read_engine_log
from rlsim.calibrate.measurements import measured_node
from rlsim.calibrate.steps import iteration_times
from rlsim.cost.calibration import load_calibration
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk
from rlsim.errors import CalibrationError, CatalogueError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

MODEL, H100 = "qwen2.5-7b", load_cluster("8xh100")
BATCHES = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
POOL = 600_000
STARTS = (
    "\x1b[36m(EngineCore_DP0 pid=7)\x1b[0m INFO [core.py:93] Initializing a V1 LLM engine (v0.11.0) with config: ...",
    f"(EngineCore_DP0 pid=7) INFO [kv_cache_utils.py] GPU KV cache size: {POOL:,} tokens",
)


def step_s(engine: str, batch: int, context: float) -> float:
    """Of an engine whose decode steps take 1.2 times as long as shipped, with 32 sequences or more 1.5 times."""
    factor = 1.5 if batch >= 32 else 1.2
    return factor * step_cost(load_model(MODEL), 2, H100, f"h100-{engine}").decode(batch).step_s(batch * context)


def sglang() -> list[str]:
    prefill_s = 1.1 * step_cost(load_model(MODEL), 2, H100, "h100-sglang").prefill_s([Chunk(1024, 0)] * 8)
    prefill = (
        "[2026-04-05 20:02:51 TP0] Prefill batch, #new-seq: 8, #new-token: 8192, #cached-token: 0, token usage: 0.1, "
        f"#running-req: 0, #queue-req: 9, cuda graph: False, input throughput (token/s): {8192 / prefill_s:.2f}"
    )
    decodes = [
        f"[2026-04-05 20:02:51 TP0] Decode batch, #running-req: {batch}, #token: {batch * context}, token usage: 0.1, "
        f"cuda graph: True, gen throughput (token/s): {batch / step_s('sglang', batch, context):.3f}, #queue-req: 0"
        for batch in BATCHES
        for context in (1000, 1000, 4000, 4000)  # the first after each change tells of both
    ]
    return [prefill, prefill, prefill, *decodes]


def vllm() -> list[str]:
    return [
        *STARTS,
        *(
            "(APIServer pid=9) INFO [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
            f"throughput: {batch / step_s('vllm', batch, context):.2f} tokens/s, Running: {batch} reqs, "
            f"Waiting: 0 reqs, GPU KV cache usage: {100 * batch * context / POOL:.3f}%, Prefix cache hit rate: 0.0%"
            for batch in BATCHES
            for context in (1000, 1000, 4000, 4000)
        ),
    ]


def iterations() -> list[str]:
    """vLLM's lines of single iterations."""
    form = (
        "Iteration(7): 0 context requests, 0 context tokens, {} generation requests, {} generation tokens, iteration "
        "elapsed time: {}"
    )
    return [
        STARTS[1],
        form.format(0, 0, "3.21 ms (dummy)"),
        *(
            form.format(batch, batch, f"{1e3 * step_s('vllm', batch, context):.4f} ms, GPU KV cache usage: ")
            + f"{100 * batch * context / POOL:.3f}%"
            for batch in BATCHES
            for context in (1000, 4000)
        ),
    ]


def table() -> list[str]:
    rows = [f"{b},{c},0,{step_s('vllm', b, c)}" for b in BATCHES for c in (1000, 4000)]
    return ["batch,context_mean,prefill_tokens,seconds", *rows]


def written(folder: Path, lines: list[str], name: str = "log.txt") -> Path:
    (folder / name).write_text("\n".join([*lines, ""]))
    return folder / name


@pytest.mark.parametrize(
    ("lines", "engine", "release"),
    [(sglang, "sglang", "0.5.14"), (vllm, "vllm", "0.11.0"), (iterations, "vllm", "0.24.0"), (table, "vllm", "0.24.0")],
)
def test_a_log_of_a_known_factor_gives_it_back(lines, engine: str, release: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = written(tmp_path, lines(), "log.csv" if lines is table else "log.txt")
    found = from_engine(log, model=MODEL, tp=2, calibration=f"h100-{engine}")
    served = step_cost(load_model(MODEL), 2, H100, found.calibration)
    for batch in BATCHES:
        for context in (1000, 4000):
            want = step_s(engine, batch, context)
            assert served.decode(batch).step_s(batch * context) == pytest.approx(want, rel=0.01)
    assert found.calibration.release == release
    errors = found.errors.set_index("iterations").loc["decode_step"]
    assert errors.base_mean == pytest.approx(0.2, abs=0.06)
    assert errors["mean"] < 0.04 < errors.base_p90
    assert errors.off_s < 0.2 * errors.base_off_s
    assert found.calibration.residuals["decode_step"].count == errors.held_out
    if lines is sglang:
        prefill = found.calibration.iterations[0].prefill
        assert prefill.factor == (1.1,)


def test_what_is_no_single_iteration_is_left_out(tmp_path: Path) -> None:
    lines = sglang()
    speculative = lines[-1].replace("cuda graph", "accept len: 2.8, accept rate: 0.7, cuda graph")
    found = read_engine_log(written(tmp_path, ["Started", *lines, speculative, lines[0], lines[-1]]))
    assert found.excluded == {
        "other work or a pause in its time": 4,  # the first prefill, and what follows another kind
        "of another size than the line before": 11,
        "speculative decoding": 1,
    }
    assert len(found.rows) == len(lines) - 2 - 11


@pytest.mark.parametrize(
    ("lines", "name", "message"),
    [
        ([vllm()[5]], "a.log", r"a\.log:1: the log does not say before how large the KV cache is.*\n.*559,232"),
        (sglang()[:1], "a.log", r"no iteration of an engine; 1 lines: other work or a pause"),
        (sglang(), "a.log", "a log of sglang; calibration h100-sxm-vllm is for vllm"),
        (table()[:5], "a.csv", "4 iterations that only decode; at least 6 are needed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(lines: list[str], name: str, message: str, tmp_path: Path) -> None:
    log = written(tmp_path, lines, name)
    with pytest.raises(CalibrationError, match=message):
        from_engine(log, model=MODEL, tp=2, calibration="h100-vllm")


def test_a_precision_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="unknown precision 'fp7'; did you mean 'fp8'"):
        from_engine(written(tmp_path, vllm()), model=MODEL, tp=2, calibration="h100-vllm", precision="fp7")


def test_the_command_prints_its_errors_and_its_file_serves_a_run(tmp_path: Path) -> None:
    log, out = written(tmp_path, table(), "steps.csv"), tmp_path / "mine.yaml"
    arguments = ["calibrate", "from-engine", str(log), "--model", MODEL, "--tp", "2", "--calibration", "h100-vllm"]
    result = invoke(*arguments, "--out", out)
    assert result.exit_code == 0, result.exception
    assert "decode_step" in result.stdout
    again = invoke(*arguments, "--out", out, "--json", "-")
    assert json.loads(again.stdout)["errors"][0]["mean"] >= 0.0
    found, base = load_calibration(out), load_calibration("h100-vllm")
    assert (found.name, len(found.iterations)) == ("mine", 1)
    assert found.operators == base.operators
    assert from_engine(log, model=MODEL, tp=2, calibration=out).calibration.iterations == found.iterations  # once more

    def run(calibration: str, tp: int) -> rlsim.Result:
        experiment = {
            "name": "own", "cluster": "8xh100", "model": MODEL, "calibration": calibration, "seeds": 1,
            "trace": {"path": "rollpacker-math", "cap": 512}, "systems": [{"verl": {"tp": tp}}],
            "workflow": {"prompts": 32, "responses": 4, "steps": 1},
        }  # fmt: skip
        return rlsim.run(experiment)

    own, elsewhere = run(str(out), 2), run(str(out), 4)
    ratio = own.steps.gen_time_s.iloc[0] / run("h100-vllm", 2).steps.gen_time_s.iloc[0]
    assert 1.1 < ratio < 1.5
    rows = [{row["name"] for row in one.manifest["ledger"][""]["assumed"]} for one in (own, elsewhere)]
    assert not {"engine at another TP", "host beside the GPU"} & rows[0]
    assert {"engine at another TP", "host beside the GPU"} <= rows[1]


# Requests of a real engine --------------------------------------------------------------------------------------------

BASE, RELEASE, WINDOW_S = "rtx-pro-6000-vllm", "0.19.0", 0.5
#: The source states no TP. Weights alone of a 32B in bf16 take 36 ms at TP1, where steps of 26 ms were measured.
TPS = {"llama-3.1-8b": 1, "qwen3-30b-a3b": 2, "qwen3-32b": 2}


def windows(requests: pd.DataFrame) -> pd.DataFrame:
    """Mean decode steps of half seconds after the last prefill: sequences, tokens of each and seconds.

    All running sequences take part in each step. So a response's tokens but the first are the steps between its first
    and its last; how many steps each window has follows from all responses together (least squares, with a pull to
    windows that are alike).
    """
    first, last = requests.first_token_s.to_numpy(float), requests.last_token_s.to_numpy(float)
    ends = np.arange(0.0, last.max() + WINDOW_S, WINDOW_S)
    inside = np.clip(last[:, None], ends[:-1], ends[1:]) - np.clip(first[:, None], ends[:-1], ends[1:])
    share, alike = inside / WINDOW_S, np.diff(np.eye(len(ends) - 1), axis=0)
    steps = lsq_linear(
        np.vstack([share, alike]),
        np.concatenate([requests.output_tokens - 1.0, np.zeros(len(alike))]),
        bounds=(0, np.inf),
    ).x
    middle = (ends[:-1] + ends[1:]) / 2
    grown = np.clip((middle - first[:, None]) / (last - first)[:, None], 0.0, 1.0)
    contexts = requests.input_tokens.to_numpy(float)[:, None] + grown * requests.output_tokens.to_numpy(float)[:, None]
    batch = share.sum(axis=0)
    whole = (ends[:-1] >= first.max()) & (ends[1:] <= last.max()) & (batch >= 1.0)
    found = {"batch": batch.round(), "context_mean": (contexts * share).sum(axis=0) / batch.clip(1e-9)}
    return pd.DataFrame({**found, "seconds": WINDOW_S / steps})[whole]


def halves(rows: pd.DataFrame, model: str, folder: Path) -> list[float]:
    """Mean errors before and after on every second window, from a table of the others."""
    paths = [folder / f"{i}.csv" for i in range(2)]
    for path, part in zip(paths, (rows[::2], rows[1::2]), strict=True):
        part.to_csv(path, index=False)
    asked, found = read_engine_log(paths[1]).rows, []
    fit = from_engine(paths[0], model=model, tp=TPS[model], calibration=BASE, release=RELEASE)
    for one in (load_calibration(BASE), fit.calibration):
        cost = step_cost(load_model(model), TPS[model], measured_node(one.gpu, one.reference), one)
        found.append(float((iteration_times(cost, asked) / asked.seconds - 1).abs().mean()))
    return found


@pytest.mark.parametrize("model", TPS)
def test_half_an_engines_iterations_tell_the_other_half(model: str, tmp_path: Path) -> None:
    """Within 4% on average, where the calibration that was there before is at least 1.5 times as far off."""
    requests = pd.read_csv(ROOT / "evidence" / "vllm_requests.csv")
    before, after = halves(windows(requests[requests.model == model]), model, tmp_path)
    assert after < 0.04
    assert before > 1.5 * after

"""`from_run`: reads veRL's logs in every form, recovers known efficiencies, refuses what is wrong."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import simpy
from conftest import cases, tables

from rlsim import errors
from rlsim.calibrate.from_run import FromRun, from_run
from rlsim.calibrate.run_fit import HostTimes, doubts
from rlsim.calibrate.write import write
from rlsim.cost.calibration import Calibration, HostFit, load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.memory import kept_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CalibrationError
from rlsim.frameworks.verl.lengths import Batch, Logged, reconstruct
from rlsim.frameworks.verl.log import read_log
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.control import RolloutControl
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout
from rlsim.sim.stage import GenerationStage
from rlsim.trace import TraceMeta, make_trace, write_trace

MODEL, CLUSTER, BASE = "r1-distill-qwen-1.5b", "8xh100", "h100-vllm"
PROMPTS, RESPONSES, CAP = 64, 8, 2048
STEPS = 48
FSDP = TrainStrategy(dp=8, zero_stage=3, micro_batch_tokens=16384)
TRUE_STEP_S, TRUE_SEQUENCE_S, TRUE_EFFICIENCY = 6e-3, 2.5e-4, 0.31
NOISE, OUTLIERS = 0.02, (9, 14, 21, 34)
Metrics = dict[str, float]
RUN: dict[str, Any] = {"model": MODEL, "cluster": CLUSTER, "calibration": BASE, "tp": 1, "cap": CAP}
RUN |= {"prompts": PROMPTS, "responses": RESPONSES}

# Reading -------------------------------------------------------------------------------------------------------------

#: As veRL 0.4 printed it under Ray, values shortened; the forms differ from version to version.
LINE = (
    "step:{step} - global_seqlen/min:246455.000 - actor/entropy:0.354 - actor/grad_norm:np.float64(0.0001285) - "
    "perf/mfu/actor:0.277 - training/global_step:{step}.000 - response_length/mean:308.049 - "
    "response_length/max:1024.000 - response_length/clip_ratio:0.036 - prompt_length/mean:101.037 - "
    "timing_s/generate_sequences:59.778 - timing_s/reshard:4.391 - timing_s/gen:{gen} - timing_s/reward:1.479 - "
    "timing_s/old_log_prob:35.029 - timing_s/adv:0.215 - timing_s/update_actor:140.568 - timing_s/step:252.485 - "
    "timing_per_token_ms/gen:0.047 - perf/total_num_tokens:2094523.000 - perf/time_per_step:252.485 - "
    "perf/throughput:1036.956"
)
RAY = "\x1b[36m(TaskRunner pid=678203)\x1b[0m "
CONFIG = f"""{RAY}{{'actor_rollout_ref': {{'actor': {{'ppo_mini_batch_size': 256,
{RAY}                                  'strategy': 'fsdp2'}},
(WorkerDict pid=7) a line of another process {{
{RAY}                        'rollout': {{'n': 5,
{RAY}                                    'tensor_model_parallel_size': 2}}}},
{RAY} 'data': {{'max_response_length': 1024, 'train_batch_size': 1024}}}}
"""


def save(folder: Path, text: str, name: str = "run.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_console_lines_are_found_among_rays_noise(tmp_path: Path) -> None:
    noise = f"{RAY}\nTraining Progress:   0%|          | 0/210 [00:00<?, ?it/s]\r"
    text = (
        "++ python3 -m verl.trainer.main_ppo data.train_batch_size=1024\n"
        + CONFIG
        + f"{RAY}step:0 - val-core/openai/gsm8k/reward/mean@1:0.221\n"
        + "".join(
            f"{noise}{RAY}{LINE.format(step=step, gen=70 + step)}\x1b[32m [repeated 2x]\x1b[0m\r\n" for step in (1, 2)
        )
    )
    log = read_log(save(tmp_path, text))
    assert list(log.steps.index) == [0, 1, 2]
    assert math.isnan(log.steps.gen_s[0])
    assert log.steps.gen_s[2] == 72
    assert log.steps.reshard_s[1] == 4.391
    assert log.steps.step_s[1] == 252.485
    assert log.steps.mfu_actor[1] == 0.277
    assert log.steps.throughput[2] == 1036.956
    assert "actor/grad_norm" in log.names
    assert log.config.whole("actor_rollout_ref.rollout.n") == 5
    assert log.config.text("actor_rollout_ref.actor.strategy") == "fsdp2"
    assert log.config.whole("data.train_batch_size") == 1024
    line = int(log.steps.line[2])
    assert "step:2 -" in text.split("\n")[line - 1]


def metrics_of(line: str) -> Metrics:
    pairs = (pair.rpartition(":") for pair in line.split(" - ")[1:])
    return {name: float(value.removeprefix("np.float64(").removesuffix(")")) for name, _, value in pairs}


def as_console(rows: dict[int, Metrics]) -> str:
    lines = [" - ".join([f"step:{step}", *(f"{k}:{v!r}" for k, v in row.items())]) for step, row in rows.items()]
    return "".join(f"{RAY}{line}\n" for line in lines)


def as_jsonl(rows: dict[int, Metrics]) -> str:
    return "".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in rows.items())


def as_table(rows: dict[int, Metrics], header: Callable[[str], str], step: str) -> str:
    names = list(next(iter(rows.values())))
    table = [[step, *map(header, names)], *([number, *(row[n] for n in names)] for number, row in rows.items())]
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in table) + "\n"


def as_tensorboard_csv(rows: dict[int, Metrics]) -> str:
    lines = [f"0,{name},{value!r},{step}" for step, row in rows.items() for name, value in row.items()]
    return "\n".join(["run,tag,value,step", *lines]) + "\n"


#: Exports by a name of the file.
FORMS: dict[str, Callable[[dict[int, Metrics]], str]] = {
    "a.jsonl": as_jsonl,
    "w.json": lambda rows: json.dumps([{"_step": n, "_runtime": 3.5, "_note": None, **row} for n, row in rows.items()]),
    "t.csv": lambda rows: as_table(rows, lambda name: name, "training/global_step"),
    "w.csv": lambda rows: as_table(rows, lambda name: f"qwen - {name}", "Step"),
    "tb.csv": as_tensorboard_csv,
}
OTHERS: dict[str, Metrics] = tables("bases")["calibrate from run others"]


@pytest.mark.parametrize("framework", OTHERS)
@pytest.mark.parametrize("form", ["a.jsonl", "w.csv"])
def test_exports_of_other_frameworks_are_read(framework: str, form: str, tmp_path: Path) -> None:
    log = read_log(save(tmp_path, FORMS[form](dict.fromkeys((1, 2), OTHERS[framework]))))
    row = log.steps.loc[2]
    times = ["gen_s", "old_log_prob_s", "ref_log_prob_s", "update_actor_s", "response_mean", "prompt_mean"]
    assert row[times].tolist() == [60.0, 9.0, 9.0, 30.0, 700.0, 100.0]
    assert any("half of that" in note for note in log.notes) == (framework == "NeMo-RL")
    assert math.isnan(row["step_s"]) == (framework == "AReaL")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_table(form: str, tmp_path: Path) -> None:
    rows = {step: metrics_of(LINE.format(step=step, gen=70 + step)) for step in (1, 2, 3)}
    for row in rows.values():
        del row["training/global_step"]
    console = read_log(save(tmp_path, as_console(rows)))
    other = read_log(save(tmp_path, FORMS[form](rows), "other"))
    assert other.steps.drop(columns="line").equals(console.steps.drop(columns="line"))


#: Two steps as consoles print them, and the value of each metric in the first.
CONSOLES: dict[str, tuple[str, dict[str, float]]] = {
    "NeMo-RL": (
        "\n".join(
            f"{'=' * 25} Step {step}/100 {'=' * 25}\n▶ Generating responses for batch of size 512...\n"
            f"📊 Training Results:\n  • Loss: 0.1032\n  • Mean Generation Length: 812.4000\n⏱️  Timing:\n"
            f"  • Total step time: 66.55s\n  • generation: 32.52s (48.9%)\n  • policy_training: 25.05s (37.6%)\n"
            "  • policy_and_reference_logprobs: 4.78s (7.2%)\n"
            for step in (1, 2)
        ),
        {"step_s": 66.55, "gen_s": 32.52, "update_actor_s": 25.05, "old_log_prob_s": 2.39, "response_mean": 812.4},
    ),
    "slime": (
        "".join(
            f"(Train pid=1) rollout {step}: {{'rollout/response_lengths': 1000.0, 'rollout/total_lengths': 1120.0}}\n"
            f"(Rollout pid=2) perf {step}: {{'perf/rollout_time': np.float64(245.6), 'rollout/total': 8192}}\n"
            f"(Train pid=1) perf {step}: {{'perf/log_probs_time': 20.0, 'perf/actor_train_time': 230.0}}\n"
            for step in (1, 2)
        ),
        {"gen_s": 245.6, "old_log_prob_s": 20.0, "update_actor_s": 230.0, "response_mean": 1000, "prompt_mean": 120},
    ),
    "TRL": (
        "".join(
            f"{{'loss': {loss}, 'completions/mean_length': '827.975', 'note': 'a, b', 'step_time': '281.24'}}\n"
            "  1%|          | 1/1000 [04:41<78:02:42, 281.24s/it]\n"
            for loss in ("'0.002'", 0.002)
        ),
        {"step_s": 281.24, "response_mean": 827.975},
    ),
}


@pytest.mark.parametrize("framework", CONSOLES)
def test_consoles_of_other_frameworks_are_read(framework: str, tmp_path: Path) -> None:
    text, expected = CONSOLES[framework]
    log = read_log(save(tmp_path, text))
    assert list(log.steps.index) == [1, 2]
    assert log.steps.loc[1, list(expected)].to_dict() == expected
    assert not any("more than once" in note or "was cut" in note for note in log.notes)
    end = {"NeMo-RL": "Total step time", "slime": "30.0", "TRL": "step_time"}[framework]
    cut = read_log(save(tmp_path, text[: text.rindex(end)]))
    assert any("step 2 (line" in note and "was cut while being written" in note for note in cut.notes)


def test_names_of_older_versions(tmp_path: Path) -> None:
    old = {"timing/gen": "gen_s", "timing_s/old": "old_log_prob_s", "mfu/actor": "mfu_actor"}
    metrics = " - ".join(f"{name}:0.5" for name in old)
    log = read_log(save(tmp_path, f"(main_task pid=1) step:1 - {metrics} - actor/lr:0.0\n"))
    assert log.steps.loc[1, list(old.values())].tolist() == [0.5] * 3


def test_a_resumed_run_counts_as_logged_last_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    lines = [LINE.format(step=step, gen=gen) for step, gen in ((1, 70), (2, 71), (2, 72), (3, 73))]
    log = read_log(save(tmp_path, "\n".join(lines)[: -len("timing_s/step:252.485 - ") - 200]))
    assert list(log.steps.gen_s) == [70, 72]
    assert any("1 steps were logged more than once" in note for note in log.notes)
    assert any("step 3" in note and "cut while being written" in note for note in log.notes)


def test_a_byte_order_mark_compression_and_rows_of_a_step_by_parts_change_nothing(tmp_path: Path) -> None:
    rows = {step: metrics_of(LINE.format(step=step, gen=70 + step)) for step in (1, 2, 3)}
    plain = read_log(save(tmp_path, as_console(rows))).steps
    (tmp_path / "run.log.gz").write_bytes(gzip.compress(as_console(rows).encode()))
    halves = [{n: dict([*row.items()][part::2]) for n, row in rows.items()} for part in (0, 1)]
    by_parts = save(tmp_path, "".join(as_jsonl({n: half[n]}) for n in rows for half in halves), "parts.jsonl")
    marked = save(tmp_path, "\ufeff" + as_console(rows), "marked.log")
    for log in map(read_log, (marked, tmp_path / "run.log.gz", by_parts)):
        assert log.steps.drop(columns="line").equals(plain.drop(columns="line"))
        assert not any("more than once" in note for note in log.notes)
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(as_console(rows).encode())[:-20])
    with pytest.raises(CalibrationError, match=r"cut.log.gz: cannot be read"):
        read_log(tmp_path / "cut.log.gz")


# Lengths -------------------------------------------------------------------------------------------------------------


def logged(mean: float, longest: float = math.nan, clip: float = math.nan) -> Logged:
    return Logged(3, "run.log:3", mean, longest, clip, 100.0)


@pytest.mark.parametrize(
    ("mean", "longest", "clip"), [(300, 1024, 0.02), (620, 1024, 0.4), (900, 1024, 0.8), (157, 811, 0)]
)
def test_lengths_have_the_logged_mean_longest_and_share_at_the_cap(mean: float, longest: float, clip: float) -> None:
    batch = reconstruct(logged(mean, longest, clip), 128, 8, 1024)
    assert batch.response_tokens.mean() == pytest.approx(mean, rel=2e-3)
    assert (batch.response_tokens >= 1023).mean() == pytest.approx(clip, abs=0.01)
    assert batch.response_tokens.max() <= 1024
    assert batch.response_tokens.max() == pytest.approx(longest, rel=0.03)
    assert (batch.total_tokens - batch.response_tokens == 100).all()


@cases("calibrate_import", "contradicting lengths are refused")
def test_contradicting_lengths_are_refused(mean: float, longest: float, clip: float, message: str) -> None:
    with pytest.raises(CalibrationError, match=f"run.log:3: step 3: response_length.*{message}"):
        reconstruct(logged(mean, longest, clip), 32, 8, 1024)


# A run with known efficiencies ---------------------------------------------------------------------------------------


def rollout_s(costs: RolloutCostModel, prompt_tokens: int, lengths: np.ndarray) -> float:
    """The whole rollout through the simulator with the true host time in its calibration."""
    env = simpy.Environment()
    rollout = Rollout(
        env,
        GenerationStage(
            mesh=[tuple(range(8))],
            tp=1,
            requests=[Request(i, i // RESPONSES, prompt_tokens, int(n)) for i, n in enumerate(lengths)],
            costs=costs,
            config=EngineConfig(),
            control=RolloutControl(),
            cap_tokens=CAP,
        ),
    )
    env.run(until=rollout.done)
    return float(env.now)


def lengths_of(step: int) -> np.ndarray:
    """Lengths of prompts that settle 65% of the variance of log length, longer from step to step."""
    rng = np.random.default_rng(step)
    prompt, sample = rng.standard_normal((PROMPTS, 1)), rng.standard_normal((PROMPTS, RESPONSES))
    spread = 0.7 * (math.sqrt(0.65) * prompt + math.sqrt(0.35) * sample)
    return np.clip(200.0 * 4.0 ** (step / STEPS) * np.exp(spread), 1, CAP).astype(int).ravel()


def calls_at(efficiency: float) -> CallCosts:
    """Calls of the run's trainer by a calibration that has that share of the peak."""
    base = load_calibration(BASE)
    training = base.training.model_copy(update={"flop_efficiency": {"fsdp": efficiency}})
    base = base.model_copy(update={"training": training})
    return CallCosts({"actor": load_model(MODEL)}, load_cluster(CLUSTER), base, "fsdp")


def synthetic(growing: bool = True, steps: int = STEPS, of: Calibration | None = None) -> dict[int, Metrics]:
    """Random lengths, growing over training or always the same; times from the simulator, with noise and outliers, by
    the calibration `of`, else the base with the true host times."""
    rng = np.random.default_rng(11)
    base, model, cluster = load_calibration(BASE), load_model(MODEL), load_cluster(CLUSTER)
    host = HostFit(step_s=TRUE_STEP_S, sequence_s=TRUE_SEQUENCE_S, prefill_s=base.host.prefill_s, source="true")
    true = of or base.model_copy(update={"host": host})
    costs = RolloutCostModel(model, cluster, true, resident_bytes=kept_bytes(model, FSDP))
    calls = calls_at(TRUE_EFFICIENCY)
    rows: dict[int, Metrics] = {}
    for step in range(1, steps + 1):
        lengths = lengths_of(step if growing else 0)
        total = lengths + 120
        times = {
            "timing_s/gen": rollout_s(costs, 120, lengths),
            "timing_s/old_log_prob": calls.of("actor", FSDP).forward_s(total).total_s,
            "timing_s/update_actor": calls.of("actor", FSDP).train_s(total).total_s,
        }
        for name in times:
            times[name] *= math.exp(NOISE * rng.standard_normal()) * (1.6 if step in OUTLIERS else 1.0)
        if step % 10 == 0:
            times["timing_s/testing"] = 40.0
        whole = sum(times.values()) + 3.0
        rows[step] = {
            "response_length/mean": float(lengths.mean()),
            "response_length/max": float(lengths.max()),
            "response_length/clip_ratio": float((lengths >= CAP).mean()),
            "prompt_length/mean": 120.0,
            **times,
            "timing_s/step": whole,
            "perf/total_num_tokens": float(total.sum()),
            "perf/throughput": float(total.sum()) / whole / 8,
        }
    return rows


@pytest.fixture(scope="module")
def rows() -> dict[int, Metrics]:
    return synthetic()


@pytest.fixture(scope="module")
def fitted(rows: dict[int, Metrics], tmp_path_factory: pytest.TempPathFactory) -> FromRun:
    return from_run(save(tmp_path_factory.mktemp("run"), as_console(rows), "my-run.log"), **RUN)


def test_a_run_on_a_gpu_that_is_described(rows: dict[int, Metrics], fitted: FromRun, tmp_path: Path) -> None:
    cluster = load_cluster(CLUSTER).model_dump(mode="json")
    gpu = {**cluster["gpu"], "name": "mine", "like": cluster["gpu"]["name"]}
    log = save(tmp_path, as_console(rows))
    found = from_run(log, **RUN | {"cluster": {**cluster, "gpu": gpu}})
    assert found.calibration.gpu == "mine"
    pd.testing.assert_frame_equal(found.errors, fitted.errors)  # its figures are the measured GPU's
    with pytest.raises(CalibrationError, match="has 'mine'"):
        from_run(log, **RUN | {"cluster": {**cluster, "gpu": {**gpu, "like": None}}})


def error_of(result: FromRun, quantity: str, column: str) -> float:
    return float(result.errors.set_index("quantity").loc[quantity, column])


def test_known_efficiencies_are_recovered(
    rows: dict[int, Metrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lengths that were run, noise and outliers in the times leave all three within a few percent."""

    def as_run(one: Logged, prompts: int, responses: int, cap: int, deal: int) -> Batch:
        lengths = lengths_of(one.step)
        return Batch(np.repeat(np.arange(prompts), responses), np.full(len(lengths), 120), lengths)

    monkeypatch.setattr("rlsim.calibrate.from_run.reconstruct", as_run)
    result = from_run(save(tmp_path, as_console(rows)), **RUN)
    assert result.calibration.training.flop_efficiency["fsdp"] == pytest.approx(TRUE_EFFICIENCY, rel=0.015)
    assert result.calibration.host.step_s == pytest.approx(TRUE_STEP_S, rel=0.05)
    assert result.calibration.host.sequence_s == pytest.approx(TRUE_SEQUENCE_S, rel=0.05)
    assert any("both numbers fitted" in note for note in result.notes)
    assert error_of(result, "gen_s", "median") < 0.02


def test_a_host_beside_the_gpu_is_kept_where_it_explains_the_run(tmp_path: Path) -> None:
    """At this TP next to nothing of it is to be seen; at another it may decide."""
    base = load_calibration("h100-sxm-vllm")
    assert base.host.in_rollouts.overlapped
    log = save(tmp_path, as_console(synthetic(steps=20, of=base)))
    result = from_run(log, **RUN | {"calibration": base.name})
    assert result.calibration.host == base.host
    assert any("beside the GPU, explains the run as well" in note for note in result.notes)
    assert error_of(result, "gen_s", "mean") == error_of(result, "gen_s", "base_mean")
    slower = save(tmp_path, as_console(synthetic(steps=20)), "slower.log")
    assert from_run(slower, **RUN | {"calibration": base.name}).calibration.host.step_s > 1e-3


def test_a_run_that_speculates_is_not_fitted(rows: dict[int, Metrics], tmp_path: Path) -> None:
    drafts = "{'method': 'eagle3', 'num_speculative_tokens': 3}"
    kwargs = f"{{'rollout': {{'engine_kwargs': {{'vllm': {{'speculative_config': {drafts}}}}}}}}}"
    config = f"{RAY}{{'actor_rollout_ref': {kwargs},\n{RAY} 'data': {{'max_response_length': {CAP}}}}}\n"
    with pytest.raises(CalibrationError, match="the run speculates"):
        from_run(save(tmp_path, config + as_console(rows)), **RUN)
    given = {"speculation": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(CalibrationError, match="the run speculates"):
        from_run(save(tmp_path, as_console(rows)), **RUN, engine=given)


def test_log_probs_slower_than_training_and_a_time_of_every_call_are_told_apart(
    rows: dict[int, Metrics], tmp_path: Path
) -> None:
    true, calls = calls_at(TRUE_EFFICIENCY), calls_at(0.15)
    slow = {step: dict(rows[step]) for step in range(1, 33)}
    fixed_s = 0.5 * rows[1]["timing_s/old_log_prob"]
    for step, row in slow.items():
        total = lengths_of(step) + 120
        slower_s = calls.of("actor", FSDP).forward_s(total).total_s
        ratio = slower_s / true.of("actor", FSDP).forward_s(total).total_s
        row["timing_s/old_log_prob"] = row["timing_s/old_log_prob"] * ratio + fixed_s
        row["timing_s/update_actor"] += fixed_s
    result = from_run(save(tmp_path, as_console(slow)), **RUN)
    training = result.calibration.training
    assert training.flop_efficiency["fsdp"] == pytest.approx(TRUE_EFFICIENCY, rel=0.05)
    assert training.forward_efficiency["fsdp"] == pytest.approx(0.15, rel=0.1)
    assert training.call_s["fsdp"] == pytest.approx(fixed_s, rel=0.3)
    assert error_of(result, "old_log_prob_s", "median") < 0.03
    assert error_of(result, "update_actor_s", "median") < 0.03
    again = CallCosts({"actor": load_model(MODEL)}, load_cluster(CLUSTER), result.calibration, "fsdp")
    cost, total = again.of("actor", FSDP), lengths_of(20) + 120
    assert cost.forward_s(total).total_s + again.call_s == pytest.approx(slow[20]["timing_s/old_log_prob"], rel=0.1)
    assert cost.train_s(total).total_s + again.call_s == pytest.approx(slow[20]["timing_s/update_actor"], rel=0.1)


def test_they_are_recovered_from_reconstructed_lengths_with_errors_near_the_noise(fitted: FromRun) -> None:
    """Lengths that are only reconstructed blur which of the two host times is which (seen: 29% and 20%), not what they
    come to."""
    host = fitted.calibration.host
    assert fitted.calibration.training.flop_efficiency["fsdp"] == pytest.approx(TRUE_EFFICIENCY, rel=0.02)
    assert host.step_s == pytest.approx(TRUE_STEP_S, rel=0.3)
    assert host.sequence_s == pytest.approx(TRUE_SEQUENCE_S, rel=0.25)
    batch = 30  # about the mean of the run: 64 sequences at first, one at last
    assert host.step_s + batch * host.sequence_s == pytest.approx(TRUE_STEP_S + batch * TRUE_SEQUENCE_S, rel=0.05)
    assert not set(fitted.used) & set(fitted.held_out)
    assert len(fitted.used) + len(fitted.held_out) + sum(fitted.excluded.values()) == STEPS
    assert fitted.excluded == {"warm-up": 2, "with validation": 4}
    for quantity in ("gen_s", "old_log_prob_s", "update_actor_s"):
        # The median of |N(0, σ)| is 0.67 σ; reconstructed lengths add 1 to 3% to gen.
        assert error_of(fitted, quantity, "median") < (0.04 if quantity == "gen_s" else 0.025)
        assert abs(error_of(fitted, quantity, "bias")) < 0.02
        assert error_of(fitted, quantity, "steps") == len(fitted.held_out)
    assert error_of(fitted, "step_s", "median") < 0.04
    assert error_of(fitted, "gen_s", "base_mean") > 0.3
    assert error_of(fitted, "gen_s", "mean") < 0.1
    points = fitted.points[(fitted.points.operator == "gen_s") & fitted.points.held_out]
    assert sorted(points.label) == sorted(f"step {step}" for step in fitted.held_out)
    assert error_of(fitted, "gen_s", "mean") == pytest.approx(points.error.abs().mean())
    assert error_of(fitted, "gen_s", "bias") == pytest.approx(points.error.median())


def test_held_out_steps_do_not_touch_the_fit(rows: dict[int, Metrics], tmp_path: Path) -> None:
    spoilt = {step: dict(rows[step]) for step in range(1, 15)}
    fitted = from_run(save(tmp_path, as_console(spoilt)), **RUN)
    for step in fitted.held_out[:4]:
        for name in ("timing_s/gen", "timing_s/update_actor", "timing_s/step"):
            spoilt[step][name] *= 3.0
        spoilt[step]["perf/throughput"] /= 3.0
    again = from_run(save(tmp_path, as_console(spoilt)), **RUN)
    assert again.calibration.training.flop_efficiency == fitted.calibration.training.flop_efficiency
    assert again.calibration.host.step_s == fitted.calibration.host.step_s
    assert error_of(again, "gen_s", "mean") > error_of(fitted, "gen_s", "mean") + 0.05


def test_the_file_says_where_its_numbers_are_from(fitted: FromRun, tmp_path: Path) -> None:
    base = load_calibration(BASE)
    path = write(fitted.calibration, tmp_path / "new")
    assert path == tmp_path / "new" / "h100-sxm-vllm-my-run.yaml"
    read = load_calibration(path)
    assert read.training.flop_efficiency == {
        **base.training.flop_efficiency,
        **fitted.calibration.training.flop_efficiency,
    }
    assert read.training.flop_efficiency["megatron"] == base.training.flop_efficiency["megatron"]
    assert read.operators == base.operators
    assert read.host.prefill_s == base.host.prefill_s
    assert read.provenance.sources[0].files == ("my-run.log",)
    assert read.provenance.script == "rlsim calibrate from-run"
    assert any("that were not fitted: gen_s" in note for note in read.provenance.notes)
    assert str(tmp_path.parent) not in path.read_text()
    assert read.residuals["run_gen"].count == len(fitted.held_out)
    assert set(base.residuals) < set(read.residuals)
    assert (
        write(fitted.calibration, tmp_path / "mine.yaml").stem
        == load_calibration(tmp_path / "mine.yaml").name
        == "mine"
    )


def test_equal_steps_leave_one_host_number(tmp_path: Path) -> None:
    alike = synthetic(growing=False, steps=16)
    result = from_run(save(tmp_path, as_console(alike)), **RUN)
    assert any("too alike" in note for note in result.notes)
    base, host = load_calibration(BASE).host, result.calibration.host
    assert (host.step_s == base.step_s) != (host.sequence_s == base.sequence_s)
    assert error_of(result, "gen_s", "median") < 0.05


def test_a_trace_gives_the_lengths(rows: dict[int, Metrics], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    frame = {
        "prompt_id": np.repeat(np.arange(200), 8),
        "sample_id": np.tile(np.arange(8), 200),
        "response_tokens": np.clip(rng.lognormal(math.log(400), 0.7, 1600), 1, CAP).astype(int),
    }
    trace = tmp_path / "run.parquet"
    write_trace(make_trace(pd.DataFrame(frame), TraceMeta(name="run", cap_tokens=CAP)), trace)
    result = from_run(save(tmp_path, as_console(rows)), trace=trace, name="mine", **RUN)
    assert result.calibration.name == "mine"
    assert any("drawn from run.parquet" in note for note in result.notes)
    assert result.calibration.training.flop_efficiency["fsdp"] == pytest.approx(TRUE_EFFICIENCY, rel=0.03)
    assert error_of(result, "gen_s", "median") < 0.04


def test_settings_come_from_the_logs_configuration(rows: dict[int, Metrics], tmp_path: Path) -> None:
    few = as_console({step: rows[step] for step in range(1, 10)})
    fitted = from_run(save(tmp_path, few), **RUN)
    config = (
        f"{RAY}{{'actor_rollout_ref': {{'rollout': {{'n': {RESPONSES}, 'tensor_model_parallel_size': 1}}}}, "
        f"'data': {{'train_batch_size': {PROMPTS}, 'max_response_length': {CAP}}}, "
        "'trainer': {'nnodes': 1, 'n_gpus_per_node': 8}}\n"
    )
    path = save(tmp_path, config + few)
    result = from_run(path, model=MODEL, cluster=CLUSTER, calibration=BASE)
    assert result.calibration.host == fitted.calibration.host.model_copy(
        update={"source": result.calibration.host.source}
    )
    with pytest.raises(CalibrationError, match=r"the run had 8 GPUs .* cluster 2x8xh100 has 16"):
        from_run(path, model=MODEL, cluster="2x8xh100", calibration=BASE)


# What is wrong with a log --------------------------------------------------------------------------------------------


@cases("calibrate_import", "unusable logs")
def test_unusable_logs_are_refused(
    change: dict[str, Any], message: str, rows: dict[int, Metrics], tmp_path: Path
) -> None:
    """Metrics are set, renamed, or multiplied by the factor of what their names begin with."""
    wrong = {step: row | change.get("set", {}) for step, row in rows.items()}
    for row in wrong.values():
        row |= {new: row.pop(old) for old, new in change.get("rename", {}).items()}
        row |= {k: row[k] * by for of, by in change.get("scale", {}).items() for k in row if k.startswith(of)}
    with pytest.raises(CalibrationError, match=message):
        from_run(save(tmp_path, as_console(wrong)), **RUN)


def test_few_steps_and_a_rollout_of_another_unit_are_refused(rows: dict[int, Metrics], tmp_path: Path) -> None:
    few = {step: rows[step] for step in range(1, 8)}
    with pytest.raises(CalibrationError, match=r"5 usable steps of 7 in the log \(2 warm-up\); at least 6"):
        from_run(save(tmp_path, as_console(few)), **RUN)
    wrong = {step: {k: v for k, v in rows[step].items() if "step" not in k} for step in range(1, 10)}
    for row in wrong.values():
        row["timing_s/gen"] *= 1000.0
    with pytest.raises(CalibrationError, match=r"of which kernels take .*; are the times in ms"):
        from_run(save(tmp_path, as_console(wrong)), **RUN)


@cases("calibrate_import", "wrong arguments are refused")
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: str, message: str, rows: dict[int, Metrics], tmp_path: Path
) -> None:
    with pytest.raises(getattr(errors, error), match=message):
        from_run(save(tmp_path, as_console(rows)), **{**RUN, **arguments})


def test_an_experiment_says_what_the_log_does_not(rows: dict[int, Metrics], tmp_path: Path) -> None:
    """The fit is the same whether arguments or the experiment of the run give its settings; arguments come first."""
    few = {step: {k: v for k, v in rows[step].items() if k != "prompt_length/mean"} for step in range(1, 10)}
    log = save(tmp_path, as_console(few))
    with pytest.raises(CalibrationError, match="give --prompt-tokens, or the experiment"):
        from_run(log, **RUN)
    experiment = {
        "name": "mine", "model": MODEL, "cluster": CLUSTER, "calibration": BASE,
        "trace": {"fixed": 500, "cap": CAP, "default_prompt_tokens": 120},
        "workflow": {"prompts": PROMPTS, "responses": RESPONSES, "steps": 1},
        "training": {"micro_batch_tokens": "8K"},
        "baseline": "mine",
        "systems": [{"verl": {"tp": [1, 2, "best"]}}, {"name": "mine", "use": [{"verl": {"tp": 1}}]}],
    }  # fmt: skip
    said = from_run(log, experiment)
    given = from_run(log, **RUN, prompt_tokens=120, train={"micro_batch_tokens": "8K"})
    assert said.errors.equals(given.errors)
    assert said.calibration.host == given.calibration.host
    with pytest.raises(CalibrationError, match=r"are an MFU of .* for qwen2.5-32b"):
        from_run(log, experiment, model="qwen2.5-32b")


def test_a_run_that_is_not_what_it_logs_is_doubted(rows: dict[int, Metrics], tmp_path: Path) -> None:
    few = {step: {**rows[step], "perf/mfu/actor": 1.018, "num_turns/mean": 6.5} for step in range(1, 10)}
    notes = from_run(save(tmp_path, as_console(few)), **{**RUN, "prompts": None, "responses": None}).notes
    assert any("512 sequences a step" in note for note in notes)  # worked out from the tokens
    assert any("veRL logs an MFU of 1.02, here it is 0." in note for note in notes)
    assert any("6.5 messages a conversation: gen holds tool or environment time" in note for note in notes)
    base = load_calibration(BASE)
    assert not doubts(base, HostTimes(4.9 * base.host.step_s, 4.9 * base.host.sequence_s, ""))
    (note,) = doubts(base, HostTimes(base.host.step_s, 15.0 * base.host.sequence_s, ""))
    assert f"host.sequence_s is {15 * base.host.sequence_s:.3g} s, 15 times that of {base.name}" in note

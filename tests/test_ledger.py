"""The assumption ledger: whose every value is, what is assumed, and what each assumption is worth."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from conftest import loaded_of, placed_of
from test_asynchronous import EXPERIMENT
from test_frameworks import AREAL
from test_frameworks import BASE as NEMO

import rlsim
from rlsim.base.refusals import holds
from rlsim.cli.tables import print_ledgers
from rlsim.cost.assumed import AssumedCosts
from rlsim.cost.calibration import load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.step import Lookups
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.ledger import (
    ASSUMED,
    GIVEN,
    OWN,
    AssumedRecord,
    EndRecord,
    LedgerRecord,
    facts_of,
    ledger_of,
    ledgers,
    source_of,
    table,
    turns,
)
from rlsim.experiment.load import load_experiment, with_settings
from rlsim.experiment.result import Result, read_result
from rlsim.frameworks.areal import from_areal
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.nemo import from_nemo
from rlsim.frameworks.parts import RULE_CHECK, Options
from rlsim.frameworks.verl.experiment import from_verl
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."


def _verl(model: str, batch: int, samples: int, prompt: int, response: int, mini: int, **more: Any) -> list[str]:
    """Overrides of veRL as public reports give them, on one node of 8 GPUs."""
    keys = {
        "data.train_batch_size": batch, "data.max_prompt_length": prompt, "data.max_response_length": response,
        "actor_rollout_ref.model.path": model, ROLLOUT + "n": samples, ACTOR + "ppo_mini_batch_size": mini,
        ROLLOUT + "name": "vllm", ROLLOUT + "gpu_memory_utilization": 0.6, "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**keys, **more}.items()]


#: Public reports (issues of verl and slime), with fewer prompts where that leaves the case what it is.
CASES = {
    "01": ("h100", _verl("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 64, 5, 512, 512, 32, **{
        ROLLOUT + "tensor_model_parallel_size": 8, ACTOR + "use_dynamic_bsz": True,
        ACTOR + "ppo_max_token_len_per_gpu": 24000, ACTOR + "use_kl_loss": True})),
    "09": ("h800", _verl("Qwen/Qwen3.5-9B", 32, 5, 1024, 2048, 32, **{
        ROLLOUT + "name": "sglang", ROLLOUT + "tensor_model_parallel_size": 8, ROLLOUT + "gpu_memory_utilization": 0.35,
        ACTOR + "strategy": "megatron", ACTOR + "megatron.tensor_model_parallel_size": 2,
        ACTOR + "use_dynamic_bsz": True, ACTOR + "ppo_max_token_len_per_gpu": 4096, ACTOR + "use_kl_loss": True})),
    "10": ("b200", _verl("Qwen/Qwen3.5-9B", 64, 5, 1024, 1024, 32, **{
        ROLLOUT + "tensor_model_parallel_size": 2, ACTOR + "use_dynamic_bsz": True,
        ACTOR + "ppo_max_token_len_per_gpu": 3000, ACTOR + "use_kl_loss": True})),
    "12": ("h800", _verl("Qwen/Qwen3-1.7B-Base", 16, 16, 1024, 8192, 16, **{
        ROLLOUT + "name": "sglang", ROLLOUT + "tensor_model_parallel_size": 1, ACTOR + "use_dynamic_bsz": True,
        ACTOR + "ppo_max_token_len_per_gpu": 16384})),
    "16": ("h100", _verl("Qwen/Qwen2.5-VL-7B-Instruct", 32, 16, 8192, 20480, 32, **{
        ROLLOUT + "tensor_model_parallel_size": 1, ACTOR + "ppo_micro_batch_size_per_gpu": 1, "trainer.nnodes": 4,
        ACTOR + "fsdp_config.param_offload": True, ACTOR + "fsdp_config.optimizer_offload": True})),
    "24": ("h100", _verl("Qwen/Qwen2.5-7B-Instruct", 32, 5, 1024, 8192, 16, **{
        ROLLOUT + "tensor_model_parallel_size": 2, ACTOR + "ppo_micro_batch_size_per_gpu": 4,
        ACTOR + "fsdp_config.param_offload": True, ACTOR + "fsdp_config.optimizer_offload": True})),
}  # fmt: skip


def drafted(case: str, folder: Path) -> Draft:
    gpu, settings = CASES[case]
    return from_verl(settings, Options(folder, gpu=gpu))


def ran(case: str, folder: Path, *systems: Any, **more: Any) -> tuple[LedgerRecord, Result]:
    """One step of a case under one seed, and what its assumptions are worth."""
    data = drafted(case, folder).data() | {"seeds": 1} | ({"systems": list(systems)} if systems else {})
    data["workflow"]["steps"] = 1
    result = rlsim.run(data, overrides=more, what_if=True)
    return LedgerRecord.model_validate(result.manifest["ledger"][""]), result


#: What the other assumptions are about, stated: nothing is run at the ends of their ranges.
STATED: dict[str, Any] = {
    "training.driver_per_token": "0.18 us", "workflow.reward.time_per_response": "0.21 ms", "costs.kernels": 1,
    "costs.host_per_sequence": "56 us", "costs.skew": 0.0, "weight_sync": "bucketed",
}  # fmt: skip
UNDER_FSDP = {**STATED, "training.attention": "flash_attention_2", "training.host_memory": "pageable"}


def row_of(ledger: LedgerRecord, name: str) -> AssumedRecord:
    return next(row for row in ledger.assumed if row.name == name)


# What init writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["verl", "nemo", "areal"])
def test_a_substitute_trace_gives_lengths_alone(framework: str, tmp_path: Path) -> None:
    if framework == "verl":
        draft = drafted("24", tmp_path)
    else:
        read, text = (from_nemo, NEMO) if framework == "nemo" else (from_areal, AREAL)
        (tmp_path / "mine.yaml").write_text(text)
        model = {"nemo": "policy.model_name", "areal": "actor.path"}[framework]
        draft = read([str(tmp_path / "mine.yaml"), f"{model}=Qwen/Qwen2.5-7B"], Options(tmp_path, gpu="h100"))
    data = draft.data()
    assert data["workflow"]["reward"] == {"from_trace": False, **RULE_CHECK}
    assert {"trace.path", "workflow.reward"} <= set(data["sources"]["assumed"])
    assert re.search(r"lengths alone, mean [\d,]+ tokens", draft.text())
    loaded = loaded_of(data, (), tmp_path)
    assert "reward_time_s" in loaded.trace.frame
    assert set(loaded.scoring._check_s) == {0.21e-3}


def test_sources_survive_the_file(tmp_path: Path) -> None:
    drafted("24", tmp_path).write(tmp_path / "made.yaml")
    experiment = load_experiment(tmp_path / "made.yaml", {"training.driver_per_token": "0 s"})[0]
    assert source_of(experiment, "workflow.reward.workers") == source_of(experiment, "trace.path") == ASSUMED
    assert source_of(experiment, "engine.max_num_seqs") == "veRL 0.9's default"
    assert source_of(experiment, "workflow.prompts") == GIVEN
    assert source_of(experiment, "training.driver_per_token") == GIVEN  # as overridden
    assert source_of(experiment, "training.attention") == source_of(experiment, "costs.recurrent") == OWN
    again = with_settings(experiment, {"training.attention": "flash_attention_3"}, "a case")
    assert source_of(again, "training.attention") == GIVEN
    assert source_of(again, "weight_sync") == OWN
    assert source_of(again, "workflow.reward.workers") == ASSUMED
    with pytest.raises(ConfigError, match=r"unknown key 'trase'; did you mean 'trace'"):
        load_experiment({**drafted("24", tmp_path).data(), "sources": {"assumed": ["trase.path"]}})


# The table -----------------------------------------------------------------------------------------------------------


def test_rows_of_the_table_fit_the_schema(tmp_path: Path) -> None:
    speculation = {"engine.speculation": {"method": "eagle3", "num_speculative_tokens": 1, "refresh": 9}}
    experiment = load_experiment(drafted("24", tmp_path).data(), speculation)[0]
    facts = facts_of(LoadedExperiment.of(experiment, tmp_path), Lookups())
    for row in table():
        assert holds(row.when, facts) in (True, False), row.name
        assert (row.taken + row.why).format(**facts)
        for end in row.range or ():
            given = {row.key: attrgetter(row.key)(experiment) if end == "same" else end}
            if row.key == "training.cpu_optimizer_rate":  # which is of nothing without it
                given["training.cpu_optimizer"] = 1.0
            with_settings(experiment, given, row.name)


def ledger_rows(case: str, folder: Path, **more: Any) -> dict[str, str]:
    """What a case assumes before anything ran, and what was taken."""
    loaded = loaded_of(drafted(case, folder).data(), more, folder)
    return {row.name: row.taken for row in ledger_of(loaded, Lookups()).assumed}


def test_what_the_cases_assume(tmp_path: Path) -> None:
    usual = {"response lengths", "prompt lengths", "time of a reward check", "driver's time per token",
             "host time per sequence", "way of the new weights"}  # fmt: skip
    known = {case: ledger_rows(case, tmp_path) for case in CASES}
    assert all(usual <= set(rows) for rows in known.values())
    assert {case for case, rows in known.items() if "linear attention, Mamba" in rows} == {"09", "10"}
    assert {case for case, rows in known.items() if "network between nodes" in rows} == {"16"}
    assert not any("offloaded states in" in rows for rows in known.values()), "veRL's code says"
    assert {case for case, rows in known.items() if "context skew" in rows} >= {"10"}
    assert known["12"]["response lengths"] == "aime-r1-distill-like: mean 6,422 tokens"
    given = {"costs": {"recurrent": 12}, "workflow.reward.time_per_response": "1 ms", "trace.path": "rollpacker-math"}
    assert not {"linear attention, Mamba", "time of a reward check", "response lengths"} & set(
        ledger_rows("09", tmp_path, **given)
    )
    # FSDP on H100 has a slow kernel; on A800, where it reaches what others do, and Megatron on H800 have not.
    name = "attention kernel of training"
    assert known["24"][name] == "flash_attention_2"
    assert name not in known["09"]
    assert name not in ledger_rows("24", tmp_path, cluster="8xa800", calibration="a800-vllm")
    assert name not in ledger_rows("24", tmp_path, **{"training.attention": "flash_attention_3"})
    assert "experts under FSDP" not in known["24"]
    assert "kernel of FP8 experts" not in ledger_rows("24", tmp_path, **{"engine.precision": "fp8_block"})
    assert "experts under FSDP" in ledger_rows("24", tmp_path, model="qwen3-30b-a3b")
    pcie = "collectives over PCIe"  # L40S's came from one board; A40's fit PAT's own node
    assert pcie not in known["24"]
    assert pcie in ledger_rows("24", tmp_path, cluster="8xl40s", calibration="l40s-vllm")
    assert pcie not in ledger_rows("24", tmp_path, cluster="8xa40", calibration="a40-vllm")


def test_a_trace_that_is_carried_beyond_its_facts_says_so(tmp_path: Path) -> None:
    """RollPacker's curves end at 16,383 tokens, alone and mixed; lengths that are scaled end twice as far."""
    rows = {"lengths beyond those published", "lengths under another cap"}
    given: dict[str, Any] = {"cluster": "2x8xh800", "calibration": "h800-vllm"}

    def told(path: Any, cap: str, **more: Any) -> dict[str, str]:
        settings = {**given, "trace": {"path": path, "cap": cap, **more}}
        loaded = loaded_of("rollpacker_32b", settings)
        return {row.name: row.taken for row in ledger_of(loaded, Lookups()).assumed if row.name in rows}

    beyond = told("rollpacker-math", "32K")
    assert beyond == {"lengths beyond those published": "1.0% of the responses, by the fit",
                      "lengths under another cap": "as published"}  # fmt: skip
    assert told(["rollpacker-math", "rollpacker-judge"], "32K").keys() == rows
    assert told("rollpacker-math", "16K") == told("rollpacker-math", "32K", scale=2) == {}


# Worths --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "prompts", "slow_check"), [("24", 32, 1.08), ("01", 64, 1.25)])
def test_no_headline_hangs_on_check_times_that_nobody_gave(
    case: str, prompts: int, slow_check: float, tmp_path: Path
) -> None:
    """The trace's 0.63 s a check on 16 workers were a third of the step, and turned the advice."""
    systems = [{"name": "as-configured", "use": [{"verl": {"tp": 2}}]},
               {"name": "beside", "use": [{"verl": {"tp": 2}}, "reward_beside"]}]  # fmt: skip
    stated = {key: value for key, value in UNDER_FSDP.items() if "reward" not in key}
    ledger, result = ran(case, tmp_path, *systems, **stated, **{"engine.async_scheduling": True})
    assert result.steps["reward_time_s"].iloc[0] == pytest.approx(prompts * 5 * 0.21e-3, rel=0.01)
    assert ledger.base.speedups["beside"] < 1.01
    low, high = (one.speedups["beside"] for one in row_of(ledger, "time of a reward check").ends)
    assert low < 1.01
    assert high < slow_check  # the ledger tells what a slow check would be worth


def test_a_roofline_of_linear_attention_is_loud(tmp_path: Path) -> None:
    """Case 09: 28 s predicted, 290 measured, which lies within the range; the headline says so."""
    ledger, _ = ran("09", tmp_path, {"name": "as-configured", "use": [{"verl": {"tp": 8}}]}, **STATED)
    assert ledger.assumed[0].name == ledger.weighed[0].name == "linear attention, Mamba"
    low, high = ledger.assumed[0].ends
    assert low.step_s == pytest.approx(ledger.base.step_s, rel=1e-9)
    assert high.step_s > 5 * ledger.base.step_s
    assert "linear attention" in turns(ledger)


def test_guessed_lengths_have_their_worth_in_seconds(tmp_path: Path) -> None:
    """Case 12: a mean of 1,000 tokens for one of 6,203 takes the step from 759 to 83 s."""
    ledger, _ = ran("12", tmp_path, {"name": "as-configured", "use": [{"verl": {"tp": 1}}]}, **UNDER_FSDP)
    low, high = row_of(ledger, "response lengths").ends
    assert ledger.base.step_s
    assert low.step_s
    assert high.step_s
    assert low.step_s < 0.25 * ledger.base.step_s < 0.25 * high.step_s
    assert "response lengths" in turns(ledger)
    assert f"{ledger.base.step_s:,.1f} s" in turns(ledger)


def test_worths_are_of_whole_periods_in_the_unit_of_the_verdict_and_of_what_can_be_compared() -> None:
    """Of a cycle of short rounds and a long one: 1.16 times the tokens, which decide, and 1.23 the responses; short
    rounds alone would say 1.11 and 1.33. What is not steady (5.9 times) is left out."""
    trace, workflow = {"path": "rollpacker-math", "cap": "2K"}, {**EXPERIMENT["workflow"], "steps": 16}
    areal = {"areal": {"tp": 1, "rollout_gpus": 4, "eta": 7}}
    made = {**EXPERIMENT, "trace": trace, "workflow": workflow, "systems": ["verl", "tail_batching", areal]}
    found = rlsim.run(made, overrides=STATED, what_if=True)
    of = {str(system): own for system, own in found.steps.groupby("system")}
    cycle = (of["tail_batching"]["block"] == 0).sum()
    rates = {name: own["tokens"][:cycle].sum() / own["step_time_s"][:cycle].sum() for name, own in of.items()}
    ledger = LedgerRecord.model_validate(found.manifest["ledger"][""])
    assert cycle > 2
    assert ledger.base.speedups["tail_batching"] == pytest.approx(rates["tail_batching"] / rates["verl"])
    assert ledger.others == ["tail_batching"]
    assert "tokens trained on per second" in ledger.legend


def end(step_s: float | None, **speedups: float) -> EndRecord:
    return EndRecord(settings={"trace.scale": 1.0}, shown="× 2", step_s=step_s, speedups={"base": 1.0, **speedups})


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            [end(10.0, a=1.5), end(11.0, a=1.3, b=1.6)],
            "decides who is first: with lengths at × 2 it is b, 1.60 times the responses",
        ),
        ([end(10.0, a=1.5), end(11.0, a=0.9, c=1.2)], "and the gain of a from 0.90 to 1.50 times"),  # c and a are even
        ([end(10.0, a=1.5), end(11.0, a=1.3, b=1.305)], ""),  # within what two runs differ by
        ([end(10.0, a=1.5), end(31.0, a=1.4)], "takes the step of 10.0 s from 10.0 to 31.0 s; most by itself: lengths"),
        ([end(9.0, a=1.5), end(12.0, a=1.0)], "and the gain of a from 1.00 to 1.50 times"),
        ([end(9.0, a=1.5), end(12.0, a=1.4)], ""),
    ],
)
def test_one_sentence_for_the_headline(ends: list[EndRecord], said: str) -> None:
    row = AssumedRecord(name="lengths", key="trace.scale", taken="mean 7", why="", ends=ends)
    ledger = LedgerRecord(
        assumed=[row], defaults={}, measured=[], baseline="base", base=end(10.0, a=1.5, b=1.2, c=1.495)
    )
    assert said in turns(ledger) if said else turns(ledger) == ""


def test_the_ledger_is_printed_and_kept(tmp_path: Path, call: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    drafted("24", tmp_path).write(tmp_path / "made.yaml")
    sizes = ["workflow.steps=1", "workflow.prompts=4", "training.mini_batches=1"]
    sizes += [f"{key}={value}" for key, value in UNDER_FSDP.items()]
    small = ["--seeds", "1", *(text for size in sizes for text in ("--set", size))]
    printed = call("run", "made.yaml", *small).out
    assert "Assumed, as nobody gave them" in printed
    assert "run --what-if" in printed
    assert "assumed (taken)" in call("run", "made.yaml", *small, "--what-if").out
    kept = dict(ledgers(read_result(next((tmp_path / "results").iterdir())).manifest))[""]
    assert kept.defaults["veRL 0.9's default"]
    print_ledgers([("", kept)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "×" in line or (" … " in line and not line.startswith("from"))) <= 80
    assert any(line.startswith("response lengths") for line in lines)


# Costs that are not measured -----------------------------------------------------------------------------------------


def cost_of(tmp_path: Path, case: str, **costs: Any) -> RolloutCostModel:
    data = {**drafted(case, tmp_path).data(), "costs": costs}
    data["engine"] = data["engine"] | {"async_scheduling": False}  # the host's time adds to a step
    return placed_of(data, (), tmp_path).rollout_costs


def test_stated_costs_change_what_they_say(tmp_path: Path) -> None:
    plain = cost_of(tmp_path, "24").step(2).decode(8).step_s(8000.0)
    assert cost_of(tmp_path, "24", kernels=2.0).step(2).decode(8).step_s(8000.0) == pytest.approx(2 * plain)
    more = cost_of(tmp_path, "24", host_per_sequence="155.68 us").step(2).decode(8).step_s(8000.0)
    assert more - plain == pytest.approx(8 * 100e-6, rel=1e-6)  # the calibration's 55.68 us
    assert cost_of(tmp_path, "24", skew=0.3).step(2).skew == 0.3
    recurrent = [cost_of(tmp_path, "09", recurrent_served=x).step(8).decode(8).step_s(8000.0) for x in (1.0, 2.0, 3.0)]
    assert recurrent[2] - recurrent[1] == pytest.approx(recurrent[1] - recurrent[0])
    assert recurrent[1] > recurrent[0]
    data = {**drafted("16", tmp_path).data(), "costs": {"network": 0.5}}
    halved = loaded_of(data, (), tmp_path).cluster
    assert halved.inter.bytes_per_s == load_cluster("4x8xh100").inter.bytes_per_s / 2  # type: ignore[union-attr]


def test_products_of_experts_under_fsdp_can_be_stated() -> None:
    calibration = load_calibration("h100-vllm")
    plain, twice = (
        CallCosts({"actor": load_model("qwen3-30b-a3b")}, load_cluster("8xh100"), one, "fsdp")
        for one in (calibration, calibration.drawn(0, AssumedCosts(training=2.0)))
    )
    shares = [costs.of("actor", TrainStrategy()).efficiency.flop for costs in (plain, twice)]
    assert shares[1] == shares[0] / 2


def test_scaled_lengths(tmp_path: Path) -> None:
    data = drafted("24", tmp_path).data()
    data["trace"].pop("max_prompt_tokens")  # of three times as long prompts it would leave more out
    plain = loaded_of(data, (), tmp_path)
    data["trace"] |= {"scale": 0.5, "prompt_scale": 3}
    scaled = loaded_of(data, (), tmp_path)
    ratio = scaled.trace.response_tokens.mean() / plain.trace.response_tokens.mean()
    assert ratio == pytest.approx(0.5, rel=1e-3)
    assert scaled.longest_prompt == 3 * plain.longest_prompt

"""Systems of many parts on a real machine, from YAML to tables: nothing is lost, doubled, or held by two at once."""

import copy
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import cases, loaded_of, placed_of, tables
from test_asynchronous import check_gpus

import rlsim
from evidence.validate.parts import Options
from evidence.validate.published import figures
from rlsim.cost.derived import crowded, streamed
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.roofline import step_cost
from rlsim.cost.transfer import host_copy_s
from rlsim.errors import RlsimError
from rlsim.experiment.result import Result
from rlsim.experiment.schema import RewardSpec
from rlsim.experiment.systems import parse_systems
from rlsim.experiment.workflows import TraceScoring
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.request import Request
from rlsim.trace import TraceMeta, make_trace, mix, read_trace

STEPS = 6
EXPERIMENT: dict[str, Any] = tables("bases")["rollpacker"]

VERL = {"verl": {"tp": 1}}
SYSTEMS: dict[str, list[Any]] = tables("bases")["rollpacker systems"]


def experiment(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EXPERIMENT), **changes}


@cache
def result() -> Result:
    systems = [{"name": name, "use": parts} for name, parts in SYSTEMS.items()]
    return rlsim.run(experiment(systems=systems, baseline="plain"))


def of(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    return frame[frame["system"] == name]


@pytest.mark.parametrize("name", SYSTEMS)
def test_nothing_is_lost_doubled_or_held_by_two(name: str) -> None:
    steps, responses, spans = (of(table, name) for table in (result().steps, result().responses, result().spans))
    assert (steps["trained"] == 64).all()
    assert (steps["staleness_max"] == 0).all()
    trained = responses[responses["trained"]]
    assert trained["scored_at"].notna().all()
    assert (trained.groupby(["step", "position"]).size() == 4).all()
    assert trained["position"].nunique() == STEPS * 16  # no prompt twice
    launched = responses["position"].nunique()
    assert responses["position"].max() == launched - 1
    assert launched == STEPS * 16 + steps["dropped"].sum() + steps["waiting"].iloc[-1]
    tokens = trained.groupby("step")["response_tokens"].sum()
    assert (tokens.to_numpy() + steps["wasted_tokens"].to_numpy() == steps["response_tokens"].to_numpy()).all()
    unfinished = responses[responses["finish_at"].isna()]
    assert unfinished["aborted"].all()
    assert not unfinished["trained"].any()
    check_gpus(spans)
    parts = steps[["gen_exposed_s", "prep_time_s", "train_time_s", "sync_time_s"]].sum(axis=1)
    np.testing.assert_allclose(parts, steps["step_time_s"], rtol=1e-9)
    assert (steps["gen_exposed_s"] <= steps["gen_time_s"] * (1 + 1e-9)).all()
    assert steps["bubble_fraction"].between(0, 1).all()
    assert (steps["gen_bound_s"] <= steps["gen_time_s"]).all()


def test_the_shipped_experiment_has_the_published_order() -> None:
    """And its large steps: what RollPacker's paper says about its parts, on a period of the 7B experiment."""
    shown = [{"name": "verl", "use": [VERL]}, {"name": "tail", "use": [VERL, "tail_batching"]},
             {"rollpacker": {"start_tp": 1}}]  # fmt: skip
    found = rlsim.run("rollpacker_7b", seeds=1, overrides={"workflow.steps": 5, "systems": shown})
    speedup = found.summary()["speedup"].tolist()
    assert speedup == sorted(speedup)
    assert speedup[1] > 1.2
    assert speedup[-1] > 1.6


def test_a_node_that_runs_dry_before_it_switches_is_there_for_what_is_launched_next() -> None:
    parts = [{"pat": {"start_tp": 1}}, "dynamic_sampling", "tail_batching"]
    settings = experiment(systems=[{"name": "x", "use": parts}], trace={"path": "rollpacker-math", "cap": "16K"})
    work = {"workflow.prompts": 4, "workflow.responses": 2, "workflow.steps": 20}
    found = rlsim.run(settings, overrides=work | {"seeds": [0, 4]})
    assert (found.steps["trained"] == 8).all()


def test_streams_use_gpus_that_generation_gave_up() -> None:
    for name in ("stream", "rollpacker", "rlhfuse-plus"):
        steps, calls = of(result().steps, name), of(result().calls, name)
        assert steps["released_gpu_s"].sum() > 0
        generate, train = (calls[calls["kind"] == kind].set_index("step") for kind in ("generate", "train"))
        assert (train["start_at"] < generate["end_at"]).any()
    assert of(result().steps, "rlhfuse")["released_gpu_s"].sum() > 0


def test_a_reserved_judges_gpus_generate_nothing_and_train_and_a_colocated_one_shares_all() -> None:
    spans = result().spans
    plain = of(spans, "plain")
    assert set(plain.loc[plain["kind"] == "reward", "gpu"]) == {6, 7}
    assert plain.loc[plain["kind"].isin(("decode", "prefill", "mixed", "switch")), "gpu"].max() < 6
    calls = of(result().calls, "plain").groupby("call")["gpus"].first()
    assert calls[["generate", "reward", "old_log_prob", "train"]].tolist() == [6, 2, 8, 8]
    judge = of(spans, "judge")
    assert judge.loc[judge["kind"] == "reward", "shared"].all()
    assert set(judge.loc[judge["kind"] == "decode", "gpu"]) == set(range(8))


def judged(while_training: str, *parts: Any, **changes: Any) -> Result:
    """Judged responses only: two of eight GPUs are the judge's."""
    reward = {"workers": 4, "judge": {"model": "qwen2.5-1.5b", "while_training": while_training}}
    work = {"prompts": 32, "responses": 8, "steps": 2, "reward": reward}
    trace = {"path": "rollpacker-judge", "cap": "2K"}
    return rlsim.run(experiment(systems=[{"name": "x", "use": [VERL, *parts]}], workflow=work, trace=trace, **changes))


def test_the_judges_gpus_join_training_unless_they_are_kept_apart() -> None:
    offloaded, resident, apart = (judged(how) for how in ("offloaded", "resident", "apart"))

    def seconds(result: Result, call: str) -> float:
        calls = result.calls[result.calls["call"] == call]
        return float((calls["end_at"] - calls["start_at"]).mean())

    for joined in (offloaded, resident):
        assert joined.calls.groupby("call")["gpus"].first()[["train", "old_log_prob"]].tolist() == [8, 8]
        assert 0.7 < seconds(joined, "train") / seconds(apart, "train") < 0.95  # 6 / 8, and the update itself
        assert seconds(joined, "generate") == pytest.approx(seconds(apart, "generate"), rel=1e-12)
    assert apart.calls.groupby("call")["gpus"].first()[["train", "old_log_prob"]].tolist() == [6, 6]
    assert apart.spans.loc[apart.spans["kind"].isin(["train", "old_log_prob", "ref_log_prob"]), "gpu"].max() < 6
    # Its weights are back long before the first response is judged, which generation has to be over for.
    assert offloaded.steps["step_time_s"].tolist() == pytest.approx(resident.steps["step_time_s"].tolist())
    assert [r.manifest["judge"][""]["x"]["while_training"] for r in (offloaded, apart)] == ["offloaded", "apart"]


def test_an_offloaded_judge_judges_once_its_weights_are_there() -> None:
    result = judged("offloaded", "async_reward")
    model, cluster = load_model("qwen2.5-1.5b"), load_cluster("8xh800")
    load_s = host_copy_s(rollout_weight_bytes(model, 1), cluster.host)
    for step in (0, 1):  # noqa: B007 - pandas reads it
        start = result.calls.query("step == @step and call == 'generate'")["start_at"].iloc[0]
        spans = result.spans.query("step == @step and kind == 'reward'").sort_values("start_at")
        assert spans["start_at"].iloc[0] == pytest.approx(start)
        assert spans["end_at"].iloc[0] - start == pytest.approx(load_s)
        first = result.responses.query("step == @step")["score_start_at"].min()
        assert first >= start + load_s * (1 - 1e-9)


def test_a_resident_judge_takes_memory_from_training_and_training_from_the_judge() -> None:
    """14B on 24 of 32 GPUs fits beside the judge's context, not beside its weights too."""
    settings = {
        **figures(Options(), "rollpacker").runs["shares_judge"].set,
        "workflow.steps": 1,
        "training.micro_batch_tokens": "32K",
    }
    where = "workflow.reward.judge.while_training"
    assert len(rlsim.run("rollpacker_7b", overrides=settings | {"seeds": 1}).steps) == 1
    with pytest.raises(RlsimError, match=r"the judge at rest 17\.38 GB .*while_training=offloaded"):
        rlsim.run("rollpacker_7b", overrides={**settings, "seeds": 1, where: "resident"})
    joined, alone = (placed_of("rollpacker_7b", [f"{where}={at}"]).judge for at in ("resident", "apart"))
    assert 0 < joined.capacity_pages < 0.95 * alone.capacity_pages  # optimizer states stay


@cases("experiments", "a judge whose gpus train in pieces gets them in time")
def test_a_judge_whose_gpus_train_in_pieces_gets_them_in_time(parts: list[Any], training: dict[str, int]) -> None:
    """A replica of training that spans GPUs of the rollout and of the judge must not keep the judge from its own."""
    found = rlsim.run(
        experiment(systems=[{"name": "x", "use": [VERL, *parts]}], training={"backend": "megatron", **training}),
        overrides={"workflow.steps": 3},
    )
    assert (found.steps["trained"] == 64).all()
    check_gpus(found.spans)


def test_in_pieces_costs_about_as_much_as_at_once() -> None:
    """Where nothing is given up, a streamed call has the same work to do after generation."""
    settings = experiment(
        trace={"path": "aime-r1-distill-like", "cap": "4K"},
        systems=[{"name": "verl", "use": [VERL]}, {"name": "pieces", "use": [VERL, {"stream": {"trigger": 0.999}}]}],
    )
    settings_of_work = {"workflow.prompts": 64, "workflow.steps": 3, "workflow.reward.workers": 9999}
    training = {"backend": "megatron", "tp": 2, "pp": 2}
    found = rlsim.run(settings, overrides={**settings_of_work, "training": training})
    after = found.steps.assign(s=lambda f: f["prep_time_s"] + f["train_time_s"]).groupby("system")["s"].sum()
    assert after["pieces"] == pytest.approx(after["verl"], rel=0.15)


def test_lists_make_variants_but_of_tp_that_the_judge_leaves_no_room_for() -> None:
    loaded = loaded_of(
        experiment(systems=[{"name": "t", "use": [{"tail_batching": {"eta": [1.25, 1.5]}}, {"verl": {"tp": [1, 2]}}]}])
    )
    assert loaded.trace.meta.name == "rollpacker-math + rollpacker-code + rollpacker-judge"
    assert [s.name for s in parse_systems(loaded.experiment.systems)] == [
        "t-eta1.25-tp1",
        "t-eta1.25-tp2",
        "t-eta1.5-tp1",
        "t-eta1.5-tp2",
    ]
    found = rlsim.run(experiment(systems=[{"verl": {"tp": [1, 2, 4]}}]), overrides={"workflow.steps": 1})
    assert set(found.steps["system"]) == {"verl-tp1", "verl-tp2"}
    assert any("verl-tp4 left out: TP 4 does not divide the 6 GPUs of a node" in note for note in found.notes)


def test_rewards_of_mixed_traces(tmp_path: Any) -> None:
    rows = {"prompt_id": [0, 0, 1, 1], "sample_id": [0, 1, 0, 1], "response_tokens": [10, 20, 30, 4000]}
    one = make_trace(pd.DataFrame(rows | {"correct": [True, False, True, True]}), TraceMeta(name="one"))
    two = make_trace(pd.DataFrame(rows | {"reward": [0.5, 0.0, 1.0, 1.0]}), TraceMeta(name="two"))
    mixed = mix([one, two])
    scoring = TraceScoring(mixed, RewardSpec(), mixed.cut(2048)[1])
    coded = read_trace("traces/rollpacker-code.parquet")
    (note,) = TraceScoring(coded, RewardSpec(time_per_response=1.0), coded.cut(2048)[1]).notes
    assert note.startswith("workflow.reward.time_per_response has no effect")
    assert not TraceScoring(mixed, RewardSpec(time_per_response=1.0), mixed.cut(2048)[1]).notes
    assert scoring.says_rewards
    worth = [scoring.job(Request(0, 0, 1, 1, row=row)).reward for row in range(8)]
    assert worth == [1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 1.0, 0.0]  # the long ones are cut
    neither = make_trace(pd.DataFrame(rows), TraceMeta(name="three"))
    mixed = mix([one, neither])
    assert not TraceScoring(mixed, RewardSpec(), mixed.cut(2048)[1]).says_rewards


def test_wrapped_costs_still_count_what_lies_outside_the_calibration() -> None:
    model, cluster = load_model("qwen2.5-7b"), load_cluster("8xh800")

    def extrapolated(wrap: Any) -> int:
        inner = step_cost(model, 1, cluster, "h800-vllm")
        cost = wrap(inner)
        cost.decode(4).steps_s(4 * 900_000, 10)
        return int(cost.lookups().table()["decode_attention"]["extrapolated"])

    alone = extrapolated(lambda step: step)
    assert alone > 0
    assert extrapolated(lambda step: crowded(step, 1.3)) == alone
    assert extrapolated(lambda step: streamed(step, 0.1)) == alone
    assert extrapolated(lambda step: crowded(streamed(step, 0.1), 1.3)) == alone

"""Plans: memory worked out by hand, refusals, the engine against the light estimator, frameworks, `rlsim plan`."""

import copy
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command, cases, placed_of, tables
from hypothesis import given
from hypothesis import strategies as st
from plan_problems import fits
from ruamel.yaml import YAML

import rlsim
from rlsim.cost.ledger import Ledger, Row, total
from rlsim.cost.memory import stage_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.plan_report import search_plan
from rlsim.experiment.planning import ENGINE_SHARES, PlanSpace
from rlsim.experiment.result import Result
from rlsim.models.hardware import load_cluster
from rlsim.models.model import Model
from rlsim.policies.plan import ExplicitPlan
from rlsim.policies.stream_trainer import StreamTrainer
from rlsim.workflow import Call, Edge, Placement, Workflow, colocated, dpo, grpo, ppo, remax
from rlsim.workflow.memory import BatchSize, PlanMemory
from rlsim.workflow.plan import Plan, check_meshes, same_weights, with_transfers

SMALL = "qwen2.5-1.5b"
PPO: dict[str, Any] = tables("bases")["plans ppo"]
#: Models of which little fits on a GPU.
BIG = {"model": "llama-3-7b", "models": {"critic": "llama-3-7b", "reward": "llama-3-7b"}}
#: A plan of PPO with calls side by side.
APART: dict[str, dict[str, Any]] = tables("bases")["plans apart"]


def experiment(**changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(PPO)
    for key, value in changes.items():
        merged = isinstance(value, Mapping) and key not in ("models", "cluster")
        made[key] = {**made[key], **value} if merged else value
    return made


def planned(calls: Mapping[str, Any], *others: Any) -> list[Any]:
    return [{"name": "planned", "use": [{"plan": {"calls": calls}}, *others]}]


def on(gpus: Sequence[int], **degrees: Any) -> Placement:
    return Placement(tuple(gpus), TrainStrategy(**degrees))


# ---- memory ----------------------------------------------------------------------------------------------------------

#: 16,779,264 parameters a layer: 4 · 1024² of attention, 3 · 1024 · 4096 of MLP, 2 · 1024 of norms.
TINY = Model(
    name="tiny", model_type="llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, head_dim=128, vocab_size=1000,
)  # fmt: skip
PARAMETERS = 4 * 16_779_264 + 2 * 1_024_000 + 1024  # with embedding, head and final norm
BATCH = BatchSize(sequences=8, mean_tokens=100.0, longest_tokens=150)


def tiny_memory(gpu_bytes: float = 85e9) -> PlanMemory:
    cluster = load_cluster("8xh100")
    small = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"memory_bytes": gpu_bytes})})
    return PlanMemory(grpo(old_log_probs=False), {"actor": TINY, "reference": TINY}, small, BATCH)


def tiny_plan(**changes: Placement) -> Plan:
    placed = {
        "generate": on(range(4), dp=4),
        "ref_log_prob": on(range(2), dp=2, micro_batches=1),
        "train": on(range(4), dp=2, tp=2, zero_stage=1, micro_batches=2, sequence_parallel=True),
    }
    return with_transfers(grpo(old_log_probs=False), {**placed, **changes})


def parts(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Bytes by holder and part."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.holder, {})[row.part] = row.bytes
    return found


def test_the_ledger_of_a_small_plan_by_hand() -> None:
    ledger = tiny_memory().ledger(tiny_plan())
    kept, working = (parts(row for row in ledger.rows if row.stays == stays) for stays in (True, False))
    half = (PARAMETERS + 4 * 2 * 1024) / 2  # TP 2, whose GPUs each have the norms of the layers
    # Two of eight sequences in a micro-batch: 200 tokens; four layers keep 2 · 1024 / 2 bytes of each, one layer all.
    everything = 2 * (4 * 1024 / 2 + (4 * 1024 + 3 * 4096) / 2)
    context = {"context and communication": 2 * 2**30}
    assert kept == {
        "train": {"parameters": 2 * half, "optimizer states": 12 * half / 2},
        "ref_log_prob": {"parameters": 2 * PARAMETERS},
    }
    assert working == {
        "generate": {"weights": 2 * PARAMETERS, **context},
        "ref_log_prob": {
            "gathered layers": 0.0,
            "activations": 400 * 2 * (4 * 1024 + 4 * 1024 + 3 * 4096),
            "logits": 0.0,  # of 1,000 words: less than a layer's live tensors, and not there with them
            **context,
        },
        "train": {
            "gradients": 4 * half,
            "gathered layers": 0.0,
            "activations": 200 * (4 * 1024 + everything + 2 * (1024 + 3 * 4096) / 2),  # and the MLP's gradients
            "logits": 0.0,
            **context,
        },
    }
    phases = {"generate": (0, 0), "ref_log_prob": (1, 1), "train": (2, 2)}
    assert {(row.start, row.end) for row in ledger.rows if row.stays} == {(0, sys.maxsize)}
    assert all((row.start, row.end) == phases[row.holder] for row in ledger.rows if not row.stays)
    assert ledger.staying((2, 3)) == (2, 2 * half + 6 * half)
    assert ledger.staying((1, 2, 3)) == (1, 2 * half + 6 * half + 2 * PARAMETERS)
    assert ledger.staying((1, 2, 3), but="train") == (1, 2 * PARAMETERS)
    assert ledger.staying(()) == (0, 0.0)


@given(st.data())
def test_the_peak_is_the_largest_sum_over_gpus_and_phases(data: st.DataObject) -> None:
    """Against the plain sum over every GPU and every phase."""
    phases = {f"call{n}": tuple(sorted(data.draw(st.sets(st.integers(0, 7), min_size=1)))) for n in range(3)}
    spans = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(sorted)
    rows = tuple(
        Row("holder", "part", size, frozenset(gpus), *(span or ()))
        for size, gpus, span in data.draw(
            st.lists(st.tuples(st.integers(0, 99), st.sets(st.integers(0, 7)), st.none() | spans), max_size=8)
        )
    )
    ledger = Ledger(phases, rows)
    for at, (phase, gpus) in enumerate(phases.items()):
        sums = {g: sum(r.bytes for r in rows if g in r.gpus and r.start <= at <= r.end) for g in gpus}
        gpu, held = ledger.fullest(phase)
        assert (gpu, total(held)) == (min(g for g in gpus if sums[g] == max(sums.values())), max(sums.values()))
    stays = {g: sum(row.bytes for row in rows if row.stays and g in row.gpus) for g in range(8)}
    assert ledger.staying(range(8))[1] == max(stays.values())


def test_a_plan_fits_to_the_byte_or_is_refused_with_the_call_the_gpu_and_the_bytes() -> None:
    def check(gpu_bytes: float, plan: Plan) -> None:
        memory = tiny_memory(gpu_bytes)
        memory.check(memory.ledger(plan), plan)

    gpu, held = tiny_memory().ledger(tiny_plan()).fullest("train")
    assert gpu == 0
    check(total(held), tiny_plan())
    with pytest.raises(CapacityError, match=r"tiny: call train .* on GPU 0: parameters .* ref_log_prob between its"):
        check(total(held) - 1, tiny_plan())
    with pytest.raises(CapacityError, match="on GPU 3: "):
        check(total(held) - 1, tiny_plan(ref_log_prob=on((3,), micro_batches=1)))


def test_offloaded_states_take_room_only_while_their_call_runs() -> None:
    offloaded = on(range(4), dp=2, tp=2, zero_stage=1, micro_batches=2, sequence_parallel=True, offload=True)
    plain, moved = (tiny_memory().ledger(plan) for plan in (tiny_plan(), tiny_plan(train=offloaded)))
    assert not [row for row in moved.rows if row.holder == "train" and row.stays]
    assert total(moved.fullest("train")[1]) == total(plain.fullest("train")[1])


def test_calls_in_pieces_are_side_by_side_unless_weights_swap_and_gradients_leave() -> None:
    states = {"parameters": 2 * PARAMETERS, "gradients": 4 * PARAMETERS, "optimizer states": 12 * PARAMETERS}

    def held(batch: BatchSize = BATCH, **stream: Any) -> dict[str, set[str]]:
        """By call: the states that its GPUs hold."""
        workflow = StreamTrainer.model_validate(stream).rewired(grpo())
        memory = PlanMemory(workflow, {"actor": TINY, "reference": TINY}, load_cluster("8xh100"), batch)
        whole = TrainStrategy(dp=2, zero_stage=0, gradients="fp32", offload=True)
        ledger = memory.ledger(colocated(workflow, (0, 1), whole))
        rows = {phase: [row for row in ledger.fullest(phase)[1] if row.part in states] for phase in ledger.phases}
        assert all(row.bytes == states[row.part] for of in rows.values() for row in of)
        return {name: {f"{row.holder} {row.part}" for row in of} for name, of in rows.items()}

    actor, reference = {f"train {part}" for part in states}, {"ref_log_prob parameters"}
    beside = held(gradients="gpu")
    assert beside["old_log_prob"] == beside["ref_log_prob"] == beside["train"] == actor | reference
    swapped = held(gradients="gpu", swap=True)
    assert swapped["old_log_prob"] == {"old_log_prob parameters"}
    assert (swapped["ref_log_prob"], swapped["train"]) == (reference, actor)
    away = held(gradients="host")  # the update, after the last log-probs, takes more than a piece beside them
    assert away["ref_log_prob"] == {"train parameters"} | reference
    assert away["train"] == actor
    longer = replace(BATCH, longest_tokens=100_000)
    assert held(longer, gradients="host")["train"] == actor - {"train optimizer states"} | reference


def test_a_copy_of_a_trained_model_stays_while_others_run_but_the_same_weights_are_there_once() -> None:
    workflow = ppo()
    models = dict.fromkeys(("actor", "reference", "critic", "reward"), TINY)
    memory = PlanMemory(workflow, models, load_cluster("8xh100"), BATCH)
    values = workflow.call("values")
    [(kept, _)] = memory.of(values, TrainStrategy(dp=4))
    assert kept == {"parameters": 2 * PARAMETERS}  # from critic_sync on, past generation, to its use
    assert memory.of(values, TrainStrategy(dp=4), holds_weights=True)[0][0] == {}
    assert memory.of(values, TrainStrategy(dp=4, offload=True))[0][0] == {}


def test_each_stage_keeps_its_own_layers_whichever_peaks() -> None:
    """Ten layers over four stages: three each; the last, which peaks at its logits, has one and the head."""
    ten, ends = TINY.model_copy(update={"num_hidden_layers": 10, "vocab_size": 20_000}), 20_000 * 1024
    many = BatchSize(sequences=4000, mean_tokens=100.0, longest_tokens=150)
    workflow = grpo(old_log_probs=False)
    memory = PlanMemory(workflow, {"actor": ten, "reference": ten}, load_cluster("8xh100"), many)
    calls = {"generate": on(range(8), dp=8), "ref_log_prob": on(range(8), dp=2, pp=4), "train": on(range(8), dp=8)}
    ledger = memory.ledger(with_transfers(workflow, calls))
    held = [[row.bytes for row in ledger.held(gpu, "generate") if row.holder == "ref_log_prob"] for gpu in range(8)]
    three = 3 * 16_779_264
    each = (three + ends, three, three, three / 3 + ends + 1024)
    assert held == [[2 * each[gpu // 2]] for gpu in range(8)]
    assert ledger.fullest("ref_log_prob")[0] == 6


# ---- plans as graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workflow", [grpo(), grpo(reward_model=True), ppo(), ppo(old_log_probs=True), remax(old_log_probs=True), dpo()]
)
def test_every_call_on_a_trained_model_gets_its_new_weights(workflow: Workflow) -> None:
    trained = {call.model for call in workflow.calls if call.kind == "train"}
    for call in workflow.calls:
        if call.kind in ("generate", "inference") and call.model in trained:
            assert any(e.lag == 1 and workflow.call(e.source).kind == "sync" for e in workflow.into(call.name))


def test_a_call_that_no_weights_reach_is_refused_unless_it_runs_as_training_does() -> None:
    calls = (
        Call("generate", "generate", "actor"),
        Call("again", "inference", "actor"),
        Call("train", "train", "actor"),
    )
    sync = Call("weight_sync", "sync", "actor")
    edges = (Edge("generate", "again"), Edge("again", "train"), Edge("train", "weight_sync"))
    workflow = Workflow("own", (*calls, sync), (*edges, Edge("weight_sync", "generate", lag=1)))
    same = {"generate": on(range(8), dp=8), "again": on(range(8), dp=8), "train": on(range(8), dp=8)}
    check_meshes(workflow, with_transfers(workflow, same), load_cluster("8xh100"))
    apart = with_transfers(workflow, {**same, "again": on(range(4), dp=4)})
    with pytest.raises(ConfigError, match=r"call again has other GPUs .* no sync call of workflow own"):
        check_meshes(workflow, apart, load_cluster("8xh100"))


def test_new_weights_take_the_gpus_of_both_sides_or_none() -> None:
    workflow = grpo(reference=False)
    train = on(range(4), dp=2, tp=2)
    generate, again = on(range(2, 8), dp=6), on(range(4), dp=2, tp=2)
    plan = with_transfers(workflow, {"generate": generate, "old_log_prob": again, "train": train})
    assert plan.of("weight_sync").gpus == tuple(range(8))
    assert plan.of("old_log_prob_sync").gpus == ()
    assert same_weights(train, again)
    assert not same_weights(on(range(4), dp=4, zero_stage=3), on(range(4), dp=4))
    assert not same_weights(train, on(range(4, 8), dp=2, tp=2))


# ---- plans spelled out -----------------------------------------------------------------------------------------------


def refusal(calls: Mapping[str, Any], *others: Any, **changes: Any) -> str:
    with pytest.raises(RlsimError) as refused:
        rlsim.run(experiment(systems=planned(calls, *others), **changes))
    message = str(refused.value)
    assert "system 'planned': " in message
    return message.partition("system 'planned': ")[2]


def changed(**calls: Any) -> dict[str, Any]:
    return {**APART, **calls}


@cases("plans", "a plan that makes no sense is refused")
def test_a_plan_that_makes_no_sense_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal({call: where for call, where in changed(**changes).items() if where is not None})


@pytest.mark.parametrize("layout", [{"verl": {"tp": 4}}, "pat"])
def test_a_layout_that_contradicts_the_plan_is_refused(layout: Any) -> None:
    assert "the plan says how generation uses its GPUs (replicas of 2)" in refusal(APART, layout)
    assert rlsim.run(experiment(systems=planned(changed(generate={}), layout))).steps["initial_tp"].gt(0).all()


def test_a_plan_beyond_a_gpu_is_refused_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    message = refusal(APART, model="llama-3-34b")
    assert "llama-3-34b: call train (DP 2, TP 2, PP 1, ZeRO 1) does not fit on GPU 0: parameters 35.32 GB + " in message
    assert "GB > 85.03 GB of h100-sxm" in message
    message = refusal(changed(generate={"gpus": "3", "tp": 1}), trace={"cap": "3M"})
    assert message.startswith("call generate does not fit on GPU 3: qwen2.5-1.5b rollout at TP 1 does not fit: ")


def test_generation_has_whole_parameters_where_training_shards_them() -> None:
    """Under ZeRO-3 the new weights must be gathered, though the degrees are the same."""
    calls = {call: {"tp": 1} for call in ("generate", "old_log_prob", "train")} | {"ref_log_prob": {}}
    training, workflow = {"backend": "fsdp", "mini_batches": 1}, {"algorithm": "grpo", "steps": 2}
    given = experiment(workflow=workflow, models={}, training=training, systems=planned(calls))
    calls_of = rlsim.run(given).calls.set_index("call")
    assert (calls_of.loc["weight_sync", "end_at"] > calls_of.loc["weight_sync", "start_at"]).all()
    assert (calls_of.loc["weight_sync", "gpus"] == 8).all()
    assert (calls_of.loc["old_log_prob_sync", "gpus"] == 0).all()


def test_a_search_knows_the_critics_own_recomputation() -> None:
    """All lengths are equal: the engine takes as long as the search says, and less than with the actor's."""
    given = experiment(models=PPO["models"], training={"critic_recompute": "none"})
    report = search_plan(given, evaluations=300)
    steps = rlsim.run({**given, "systems": [{"name": "found", "use": report.as_parts}]}).steps
    took_s = steps["step_time_s"].iloc[1]
    assert took_s == pytest.approx(report.found.cost_s, rel=1e-6)
    assert report.found.cost_s < search_plan(experiment(models=PPO["models"]), evaluations=300).found.cost_s


def test_a_reference_has_weights_of_a_type_of_its_own() -> None:
    """FSDP's actor comes in for log-probs as it is trained, in fp32; what is not trained in bf16, or as it is said."""
    for frozen, each in (("bf16", 2), ("fp32", 4)):
        training = {"backend": "fsdp", "offload": True, "frozen_weights": frozen}
        rows = placed_of(experiment(training=training)).ledger.rows
        held = {row.holder: row.bytes for row in rows if row.part == "parameters"}
        assert held["values"] == held["train_critic"]
        assert held["train"] == held["ref_log_prob"] * 4 / each


def test_the_critic_has_epochs_micro_batches_and_states_of_its_own() -> None:
    """Colocated PPO: each key changes what the critic's calls take, and nobody else's."""

    def seconds(**training: Any) -> Any:
        calls = rlsim.run(experiment(models=PPO["models"], training={"offload": True, "pp": 2, **training})).calls
        first = calls[calls["step"] == 0].set_index("call")
        return first["end_at"] - first["start_at"]

    usual, twice, resident = seconds(), seconds(critic_epochs=2), seconds(critic_offload=False)
    single = seconds(critic_micro_batch_sequences=1)
    others = [name for name in usual.index if name not in ("train_critic", "values")]
    for changed in (twice, resident, single):
        assert changed[others].tolist() == pytest.approx(usual[others].tolist())
    assert 1.3 * usual["train_critic"] < twice["train_critic"] < 2 * usual["train_critic"], "states come in once"
    assert (resident["values"] < usual["values"], resident["train_critic"] < usual["train_critic"]) == (True, True)
    assert single["train_critic"] < usual["train_critic"], "more micro-batches leave smaller bubbles"
    assert seconds(critic_micro_batch_tokens=4096).tolist() == pytest.approx(usual.tolist())


def everywhere(**given: Any) -> dict[str, dict[str, Any]]:
    """Calls of GRPO that all have this in the plan."""
    return {"generate": {"tp": 2}} | dict.fromkeys(("old_log_prob", "ref_log_prob", "train"), given)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}])
def test_a_call_is_spread_as_training_says_unless_the_plan_does(degrees: dict[str, int]) -> None:
    """Weights wait in host memory, as a model that is not trained does without a plan."""
    given = experiment(models={}, workflow={"algorithm": "grpo", "steps": 1}, training={"offload": True, **degrees})
    alone = [{"verl": {"tp": 2}}, *planned(everywhere())]
    own = planned(everywhere(tp=1, pp=1, cp=1))
    steps = rlsim.run({**given, "systems": alone}).steps.set_index("system")["train_time_s"]
    assert steps["planned"] == pytest.approx(steps["verl"], rel=1e-4)
    plain = rlsim.run({**given, "systems": own}).steps["train_time_s"].iloc[0]
    assert plain != pytest.approx(steps["planned"], rel=1e-3)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_new_weights_come_from_where_the_plan_leaves_them(backend: str) -> None:
    def sync_s(training: bool, plan: bool) -> float:
        given = {"backend": backend, "offload": training}
        systems = planned(everywhere(offload=plan))
        steps = rlsim.run(
            experiment(models={}, workflow={"algorithm": "grpo", "steps": 1}, training=given, systems=systems)
        ).steps
        return float(steps["sync_time_s"].iloc[0]) - 0.5525  # the engine's sleep and waking

    assert sync_s(False, True) == sync_s(True, True) > 1.05 * sync_s(True, False)
    assert sync_s(False, False) == sync_s(True, False)


def test_the_heuristics_micro_batches_are_not_of_generation() -> None:
    cut, plain = {"megatron": {"micro_batches": 4}}, {"megatron": {}}
    systems = [{"name": name, "use": [part]} for name, part in (("cut", cut), ("plain", plain))]
    given = experiment(**BIG, systems=systems, workflow={"steps": 1})
    took_s = rlsim.run(given).steps.set_index("system")["gen_time_s"]
    assert took_s["cut"] == took_s["plain"]


# ---- the engine against the light estimator --------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = tables("bases")["plans settings"]


def space_of(given: dict[str, Any]) -> PlanSpace:
    return PlanSpace(placed_of(given))


@cache
def space_in(setting: str) -> PlanSpace:
    return space_of(experiment(**{"workflow": {"steps": 5}, **SETTINGS[setting]}))


def random_plans(space: PlanSpace, count: int, rng: np.random.Generator) -> list[list[int]]:
    """Plans that fit, every other one with pipeline stages in generation."""
    problem = space.problem
    piped = [i for i, (_, option) in enumerate(space.options["generate"]) if option.strategy.pp > 1]
    at = [call.name for call in space.calls].index("generate")
    plans: list[list[int]] = []
    while len(plans) < count:
        plan = [int(rng.integers(options)) for options in problem.sizes]
        if len(plans) % 2:
            plan[at] = int(rng.choice(piped))
        if fits(problem, [plan])[0]:
            plans.append(plan)
    return plans


def test_a_bound_on_the_plans_keeps_the_fastest_options_of_each_call() -> None:
    whole = space_in("ppo")
    few = PlanSpace(whole._placed, most_plans=1e6)
    assert few.problem.space <= 1e6 < whole.problem.space
    most = max(len(options) for options in few.options.values())
    for name, options in whole.options.items():
        times = sorted(option.time_s for _, option in options)
        assert [option.time_s for _, option in few.options[name]] in (times[:most], [o.time_s for _, o in options])
    assert math.prod(min(most + 1, len(options)) for options in whole.options.values()) > 1e6


def test_a_search_over_context_parallelism_has_all_it_had_and_more() -> None:
    """Training and inference split sequences, inside a node; the engine takes as long as the estimator says."""
    given, without = experiment(workflow={"steps": 5}), space_in("ppo")
    within = PlanSpace(without._placed, context_parallel=True)
    for name, options in within.options.items():
        strategies = [candidate.strategy for _, candidate in options]
        assert set(without.options[name]) <= set(options)
        assert ({s.cp for s in strategies} == {1}) == (name == "generate")
        assert max(s.cp * s.tp for s in strategies) <= 8
    split = [i for i, (_, option) in enumerate(within.options["train"]) if option.strategy.cp > 1]
    at = [call.name for call in within.calls].index("train")
    (plan,) = random_plans(within, 1, np.random.default_rng(1))
    plan[at] = next(i for i in split if fits(within.problem, [[*plan[:at], i, *plan[at + 1 :]]])[0])
    spelled = ExplicitPlan.of(within.plan(plan), within.workflow).model_dump(exclude_none=True)
    steps = rlsim.run({**given, "systems": [{"name": "own", "use": [{"plan": spelled}]}]}).steps
    assert steps["step_time_s"].to_numpy()[1:-1] == pytest.approx(within.problem.cost_s([plan])[0], rel=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_engine_takes_as_long_as_the_estimator_says(setting: str) -> None:
    given = experiment(**{"workflow": {"steps": 5}, **SETTINGS[setting]})
    space = space_in(setting)
    plans = random_plans(space, 4, np.random.default_rng(5))
    costs = space.problem.cost_s(plans)
    assert np.ptp(costs) > 0.1 * min(costs), "a wrong estimate would be seen"
    for at_once, one in zip(zip(*space.problem.durations(np.array(plans)), strict=True), plans, strict=True):
        assert [x.tolist() for x in at_once] == [*map(pytest.approx, space.problem.single.seconds(one))]
    found = [ExplicitPlan.of(space.plan(plan), space.workflow) for plan in plans]
    systems = [{"name": str(i), "use": [{"plan": one.model_dump(exclude_none=True)}]} for i, one in enumerate(found)]
    result = rlsim.run({**given, "systems": systems})
    assert (result.steps["staleness_max"] == 0).all()
    for i, expected in enumerate(costs):
        # The first step fills the overlap of steps and the last one empties it.
        steps = result.steps.loc[result.steps["system"] == str(i), "step_time_s"].to_numpy()[1:-1]
        assert steps == pytest.approx(expected, rel=1e-6), found[i]


def test_plans_that_the_estimator_finds_room_for_run_and_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that crowds the GPUs, those that fill them most; some wait for KV cache."""
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    given = experiment(**BIG, workflow={"steps": 3, "prompts": 2048})
    space, rng = space_of(given), np.random.default_rng(7)
    problem = space.problem
    drawn = rng.integers(problem.sizes, size=(4000, len(problem.sizes)))
    fitting = drawn[fits(problem, drawn)]
    order = np.argsort(problem.peak_bytes(fitting))
    at = [call.name for call in space.calls].index("generate")
    share = np.array([space.options["generate"][plan[at]][1].memory_share for plan in fitting[order]])
    short_of_kv = order[share == min(ENGINE_SHARES)]
    assert problem.peak_bytes(fitting[order[-2:]]).min() > 0.95 * problem.memory_bytes
    fullest = fitting[[*order[-2:], *short_of_kv[-1:]]]
    found = [ExplicitPlan.of(space.plan(plan.tolist()), space.workflow) for plan in fullest]
    systems = [{"name": str(i), "use": [{"plan": one.model_dump(exclude_none=True)}]} for i, one in enumerate(found)]
    result = rlsim.run({**given, "systems": systems})
    assert result.steps["preemptions"].gt(0).any()
    for i, expected in enumerate(problem.cost_s(fullest)):
        steps = result.steps.loc[result.steps["system"] == str(i), "step_time_s"].to_numpy()[1:-1]
        assert steps == pytest.approx(expected, rel=0.01), found[i]


def test_a_frozen_model_generates_beside_the_actor() -> None:
    """In an engine of its own model: as fast as if it were the actor, and never stale."""
    given = tables("bases")["remax in two calls"]
    workflow = given["workflow"]
    calls = [
        {**one, "model": "teacher"} if one["name"] == "greedy" else one
        for one in workflow["calls"]
        if one["name"] != "push_greedy"
    ]
    workflow = {**workflow, "calls": calls, "edges": [e for e in workflow["edges"] if "push_greedy" not in str(e)]}
    apart = {"generate": {"gpus": "0-3", "tp": 2}, "greedy": {"gpus": "4-7", "tp": 2}}
    apart |= {name: {} for name in ("reward_score", "ref_log_prob", "train")}
    models, system = {**given["models"], "teacher": "llama-3.1-8b"}, planned(apart)
    result = rlsim.run({**given, "models": models, "workflow": workflow, "systems": system})
    actor = rlsim.run({**given, "model": "llama-3.1-8b", "systems": system})
    took_s = [ran.calls.query("call == 'greedy'").eval("end_at - start_at").tolist() for ran in (result, actor)]
    assert took_s[0] == pytest.approx(took_s[1], rel=1e-9)
    assert (result.responses["staleness"] == 0).all()


def test_micro_batches_of_generation_take_turns_and_half_of_the_memory() -> None:
    """Of equal lengths two halves take twice as long as a half, which is less than all in as little memory."""
    given = experiment(workflow={"algorithm": "grpo", "steps": 1, "prompts": 512, "reference": False}, models={})
    space = space_of(given)
    options = [option for _, option in space.options["generate"] if option.strategy.gpus == 1]
    whole, halves = (next(o for o in options if o.strategy.micro_batches == parts) for parts in (None, 2))
    assert halves.memory_share < whole.memory_share
    spelled = {"gpus": "0", "tp": 1, "memory_share": halves.memory_share}
    cuts = {"none": {}, "halves": {"micro_batches": 2}}
    rest = {name: {"gpus": "0"} for name in ("old_log_prob", "train")}
    systems = [
        {"name": name, "use": [{"plan": {"calls": {"generate": {**spelled, **cut}, **rest}}}]}
        for name, cut in cuts.items()
    ]
    ran = {
        n: rlsim.run({**given, "workflow": {**given["workflow"], "prompts": n}, "systems": systems}) for n in (256, 512)
    }
    of = {(n, row.system): row.gen_time_s for n, result in ran.items() for row in result.steps.itertuples()}
    assert of[512, "halves"] == pytest.approx(2 * of[256, "none"], rel=1e-9)
    assert of[512, "halves"] == pytest.approx(halves.time_s, rel=1e-9)
    assert of[512, "halves"] < of[512, "none"]
    preempted = ran[512].steps.set_index("system")["preemptions"]
    assert preempted["none"] > preempted["halves"] == 0


@pytest.mark.parametrize(
    ("engine", "gigabytes"),
    [
        ("vllm", 0.55 * 85.03),
        ("sglang", 0.55 * (85.03 - 2.74) + 1.25 + 2.74),
        ("trtllm", 39.31 + 0.55 * (85.03 - 39.31)),
    ],
)
def test_a_share_of_memory_is_what_the_engine_makes_of_it(engine: str, gigabytes: float) -> None:
    """34B on two GPUs: 35.32 GB of weights, 1.25 of working memory, 2.74 of context and buffers; 2.15 are any one's."""
    given = experiment(
        model="llama-3-34b", cluster="2x8xh100", calibration=f"h100-{engine}", models={},
        trace={"fixed": 512, "cap": 512}, training={"tp": 8, "recompute": "full"},
        workflow={"algorithm": "grpo", "prompts": 32, "reference": False},
    )  # fmt: skip
    loaded, _, folder = load_experiment(given)
    setup, calls = LoadedExperiment.of(loaded, folder), {"generate": {"tp": 2, "memory_share": 0.55}}
    plan = ExplicitPlan.model_validate({"calls": calls | {"old_log_prob": {}, "train": {}}})
    placed = PlacedExperiment(setup, setup.algorithm, None, plan)
    (row,) = (row for row in placed.ledger_of(placed.unchecked_plan).rows if row.part == "rollout engine")
    assert row.bytes / 1e9 == pytest.approx(gigabytes - 2.147, abs=0.02)
    if engine == "trtllm":
        with pytest.raises(CapacityError, match=r"rollout engine 62.30 GB .* = 99.78 GB > 85.03 GB"):
            placed.check(placed.unchecked_plan)


# ---- placements of frameworks ----------------------------------------------------------------------------------------


def busy_gpus(result: Result, system: str) -> dict[str, set[int]]:
    """GPUs on which each call ran; generation's are those of prefill and decode."""
    found: dict[str, set[int]] = {}
    for row in result.spans[result.spans["system"] == system].itertuples():
        kind = "generate" if row.kind in ("prefill", "decode", "mixed") else row.kind
        found.setdefault(kind, set()).update(range(row.gpu, row.gpu + row.gpus))
    return found


@pytest.mark.ci
def test_real_is_no_slower_than_the_heuristic_and_the_same_seed_finds_the_same_plan() -> None:
    real = {"real": {"method": "mcmc", "evaluations": 200, "pipelined_generation": False}}
    given = experiment(**BIG, systems=["megatron", real], workflow={"steps": 3})
    first, again = rlsim.run(given), rlsim.run(given)
    total = first.steps.groupby("system")["step_time_s"].sum()
    assert total["real"] <= total["megatron"]
    assert first.calls.equals(again.calls)


def test_a_searched_plan_leaves_the_gpus_of_a_judge_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes, the last one of them the judge's."""
    monkeypatch.chdir(tmp_path)
    text = "prompt_id,sample_id,response_tokens,judge_tokens\n"
    path = "judged.csv"
    judge = {"model": SMALL, "reserved": 0.5}
    given = experiment(
        cluster="2x8xh100", models={}, trace={"fixed": None, "path": path},
        workflow={"algorithm": "grpo", "prompts": 16, "responses": 4, "reward": {"judge": judge}, "steps": 2},
        systems=[{"real": {"evaluations": 100}}],
    )  # fmt: skip
    Path(path).write_text(text + "".join(f"{i // 4},{i % 4},200,20\n" for i in range(128)))
    result = rlsim.run(given)
    assert busy_gpus(result, "real").pop("reward") <= set(range(8, 16))
    assert set().union(*(gpus for call, gpus in busy_gpus(result, "real").items() if call != "reward")) <= set(range(8))
    found = search_plan(given, evaluations=100)
    assert {gpu for call in found.space.calls for gpu in found.plan.of(call.name).gpus} == set(range(8))
    some = {**given, "workflow": {**given["workflow"], "reward": {"judge": {**judge, "reserved": 0.25}}}}
    for refused in (rlsim.run, search_plan):
        with pytest.raises(ConfigError, match="some of every node"):
            refused(some)


# ---- rlsim plan ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with (tmp_path / "ppo.yaml").open("w") as file:
        YAML().dump(experiment(workflow={"steps": 4}), file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ci
def test_a_plan_found_is_written_and_takes_as_long_when_it_is_run(folder: Path, call: Command) -> None:
    files = ("--out", "plan.yaml", "--json", "plan.json", "--chart", "search.svg")
    search = ("plan", "ppo.yaml", "--method", "mcmc", "--evaluations", "200")
    code, shown, _ = call(*search, *files, "--apply")
    assert code == 0
    found = json.loads((folder / "plan.json").read_text())
    assert f"iteration: {found['iteration_time_s']:.2f} s" in shown
    assert (folder / "search.svg").read_text().startswith("<svg")
    part = YAML(typ="safe").load(folder / "plan.yaml")
    assert part["plan"] == found["plan"]
    result = rlsim.run("ppo.yaml", overrides={"systems": [{"name": "written", "use": [part]}], "workflow.steps": 5})
    assert result.steps["step_time_s"].to_numpy()[1:-1] == pytest.approx(found["iteration_time_s"], rel=0.01)
    assert (folder / "results" / "plans" / "steps.parquet").is_file()


def micro_batch(batch: BatchSize, call: Call, strategy: TrainStrategy, **how: bool) -> int:
    return batch.micro_batch_tokens(call, TINY, strategy, **how)


def test_no_micro_batch_holds_more_than_a_rank_has() -> None:
    """Nor is a sequence cut between two."""
    many = replace(BATCH, sequences=1000)
    for longest, tokens in ((150, 8192), (20_000, 20_000)):
        own = replace(many, longest_tokens=longest)
        assert micro_batch(own, ppo().call("train"), TrainStrategy(micro_batch_tokens=8192)) == tokens
    workflow = remax()
    train, reward, reference = (workflow.call(name) for name in ("train", "reward_score", "ref_log_prob"))
    batch = replace(BATCH, mini_batches=2, baselines=4)  # eight responses of at most 150 tokens
    spread = TrainStrategy(dp=2, cp=2)
    assert micro_batch(batch, train, spread) == 2 * 150  # of one mini-batch
    assert micro_batch(batch, reference, spread) == 4 * 150
    assert micro_batch(batch, reward, spread) == 6 * 150  # it scores the baselines too
    assert micro_batch(batch, reference, spread, as_they_come=True) == 8 * 150
    assert micro_batch(batch, train, TrainStrategy(dp=16)) == 150
    assert micro_batch(batch, reward, replace(spread, micro_batches=1)) == 6 * 100
    piped = TrainStrategy(pp=4, micro_batch_tokens=300, recompute="none")  # 1,200 tokens in flight: a rank has 600
    stages = stage_bytes(TINY, piped, 300, backward=True, rank_tokens=4 * 150)
    memory = PlanMemory(workflow, dict.fromkeys(("actor", "reference", "reward"), TINY), load_cluster("8xh100"), batch)
    assert [states | parts for states, parts in memory.of(train, piped)] == stages


@pytest.mark.parametrize("call", ["train", "train_critic", "values", "ref_log_prob", "reward_score"])
def test_the_worst_micro_batch_is_of_the_longest_that_the_limits_allow(call: str) -> None:
    """Of every call alike: as many of the longest as it takes; a budget, or one sequence that is longer."""
    which = ppo().call(call)
    lengths = np.array([[10, 40, 20, 30, 10, 50, 60, 70], [10, 40, 20, 30, 150, 50, 60, 70]])
    batch = replace(BATCH, drawn=lengths, limit_tokens=500)
    pairs = TrainStrategy(dp=2, micro_batch_sequences=2)
    drawn = micro_batch(batch, which, pairs)
    assert 150 < drawn <= 150 + 70  # the longest of this step with another one
    assert micro_batch(batch, which, pairs, worst=True) == 2 * 500
    own = replace(pairs, log_prob_micro_batch_sequences=4)
    assert micro_batch(batch, which, own, worst=True) == (2 if which.kind == "train" else 4) * 500
    assert micro_batch(batch, which, replace(own, dp=8), worst=True) == 500  # a rank has one sequence
    budget = TrainStrategy(dp=2, micro_batch_tokens=300)
    assert [micro_batch(batch, which, budget, worst=worst) for worst in (False, True)] == [300, 500]
    wide = replace(budget, micro_batch_tokens=900)
    assert micro_batch(batch, which, wide, worst=True) == 900
    held = partial(batch.rank_tokens, which, TINY)  # of four sequences, or of eight; 430 tokens are in all
    assert 430 / 2 <= held(pairs) <= 150 + 70 + 60 + 50
    assert (held(pairs, worst=True), held(replace(pairs, dp=1), worst=True)) == (4 * 500, 8 * 500)
    assert (held(pairs, as_they_come=True), held(replace(pairs, micro_batches=2))) == (430, 4 * 100)
    assert replace(batch, drawn=np.zeros((0, 0), np.int64)).rank_tokens(which, TINY, pairs) == 4 * 150

"""`rlsim advise` for daily use: the headline, the settings of the user's framework, --quick, processes."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_advise import SLOW, SMALL, result_of
from typer.testing import CliRunner

from rlsim.cli import app
from rlsim.errors import CapacityError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import Job, Ran, in_turn, remembering
from rlsim.experiment.load import load_experiment
from rlsim.experiment.run import run_loaded
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.frameworks.areal import from_areal
from rlsim.frameworks.keys import Keys
from rlsim.frameworks.nemo import from_nemo
from rlsim.frameworks.parts import Options
from rlsim.frameworks.verl.experiment import from_verl
from rlsim.frameworks.verl.settings import TP
from rlsim.policies.registry import BUILTIN
from rlsim.results.advise.advice import Advice, advise
from rlsim.results.advise.headline import Headline, headline
from rlsim.results.advise.quick import contenders
from rlsim.results.advise.ranking import candidates, ranking
from rlsim.results.sweeps.local import in_processes

TINY: dict[str, Any] = {"trace.cap": 256, "workflow.prompts": 2, "workflow.responses": 2}
ALL_BUT_VERL = [name for name in BUILTIN if name != "verl"]
#: On so few GPUs a plan is found in a tenth of the time.
PAIR: dict[str, Any] = {**TINY, "cluster": "2xh100"}
VERL = ("data.train_batch_size=64", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=64")  # fmt: skip


# The headline ---------------------------------------------------------------------------------------------------------


def said(times: dict[str, list[float]], systems: dict[str, Any], framework: str = "veRL", **more: Any) -> Headline:
    """The headline where systems have these parts; the baseline is b."""
    specs = {name: parse_systems([{"name": name, "use": parts}])[0] for name, parts in systems.items()}
    return headline(ranking(result_of(times, **more)), "b", Keys(framework, "vllm", 8), specs)


STATIC: dict[str, Any] = {"b": [{"verl": {"tp": 2}}], "x": [{"verl": {"tp": 4}}], "pat": ["pat"]}


def test_the_headline_says_what_to_do_and_what_it_divides_by() -> None:
    found = said({"b": [10.0, 20.0], "x": [5.0, 10.0]}, STATIC)
    assert found.text == (
        "Run x: 2.00 times the responses per second of b (95% interval 2.00 to 2.00 over seeds; 1.07 against 0.533)."
    )
    assert found.how == "Change these settings of veRL:"
    assert found.changes == (f"{TP}=4",)
    own = said({"b": [10.0, 20.0], "x": [5.0, 10.0]}, STATIC, "")
    assert (own.how, own.changes) == ("It is this line of `systems`:", ("- verl: {tp: 4}",))


@pytest.mark.parametrize("x", [[10.0, 20.0], [12.0, 21.0], [4.0, 40.0]])
def test_the_headline_keeps_what_nothing_beats_and_says_what_was_tried(x: list[float]) -> None:
    found = said({"b": [10.0, 20.0], "x": x}, STATIC)
    assert found.text.startswith("Keep b. ")
    assert found.how == f"Of its settings these were tried, and no others: {TP} = 4."
    assert found.changes == ()


def test_settings_come_before_what_must_be_built() -> None:
    times = {"b": [10.0, 20.0], "pat": [5.0, 10.0], "x": [8.0, 16.0]}
    found = said(times, STATIC)
    assert found.text.startswith("Run x: 1.25 times")
    assert "pat would have 2.00 times" in found.text
    assert found.text.endswith("but veRL has no settings for it.")
    assert found.changes == (f"{TP}=4",)
    alone = said({name: times[name] for name in ("b", "pat")}, STATIC, "NeMo-RL")
    assert alone.text.startswith("Keep the settings of NeMo-RL. pat is the fastest: 2.00 times")
    assert alone.how.startswith("NeMo-RL has no settings for pat: it would have to be built in.")
    assert alone.changes == ()


def test_one_seed_is_told_as_such() -> None:
    assert "(one seed, no interval; " in said({"b": [10.0], "x": [5.0]}, STATIC).text


def test_the_headline_divides_by_no_baseline_that_puts_off_its_work() -> None:
    found = said({"b": [10.0, 20.0], "x": [5.0, 10.0]}, STATIC, waiting={"b": 1})
    assert found.text.startswith("Nothing to advise yet. No system can be compared with b yet.")
    assert found.how == "Ask with more --steps."


# The user's words -----------------------------------------------------------------------------------------------------

APART = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=4",
         "trainer.n_gpus_per_node=4", "async_training.staleness_threshold=0.5", "rollout.total_rollout_steps=6400",
         "actor_rollout_ref.actor.ppo_mini_batch_size=16")  # fmt: skip
NEMO = ("grpo.num_prompts_per_step=64", "grpo.num_generations_per_prompt=4", "policy.model_name=Qwen/Qwen2.5-7B",
        "policy.max_total_sequence_length=4096", "cluster.gpus_per_node=8", "cluster.num_nodes=1",
        "policy.generation.backend=vllm", "policy.train_micro_batch_size=1", "policy.logprob_batch_size=1",
        "policy.train_global_batch_size=64")  # fmt: skip
AREAL = ("actor.path=Qwen/Qwen2.5-7B", "train_dataset.batch_size=64", "gconfig.n_samples=4",
         "gconfig.max_new_tokens=2048", "cluster.n_nodes=1", "cluster.n_gpus_per_node=8",
         "actor.backend=fsdp:d4", "rollout.backend=vllm:d2t2",
         "rollout.max_head_offpolicyness=1")  # fmt: skip


@pytest.mark.parametrize(
    ("read", "given", "framework", "changes"),
    [
        (from_verl, VERL, "veRL", {"verl": {"tp": 4}}),
        (from_verl, VERL, "veRL", {"verl": {"tp": 1}}),
        (from_verl, VERL, "veRL", {"dynamic_sampling": {}}),
        (from_verl, (*VERL, *APART), "veRL", {"verl_fully_async": {"trigger_parameter_sync_step": 2}}),
        (from_nemo, NEMO, "NeMo-RL", {"verl": {"tp": 4}}),
        (from_nemo, NEMO, "NeMo-RL", {"dynamic_sampling": {}}),
        (from_areal, AREAL, "AReaL", {"areal": {"tp": 4}}),
        (from_areal, AREAL, "AReaL", {"areal": {"eta": 3}}),
    ],
)
def test_what_is_advised_is_read_back_the_same(
    read: Callable[..., Any], given: tuple[str, ...], framework: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """`init` makes of the changed configuration the system that the change is advised for, in the framework's words."""

    def made(*lines: str) -> SystemSpec:
        data = read([*given, *lines], Options(tmp_path, "h100")).data()
        assert data["framework"].startswith(framework)
        return parse_systems([{"name": "x", "use": data["systems"][0]["use"]}])[0]

    keys, before = Keys(framework, "vllm", 8), made()
    own = {part.policy: dict(part.parameters) for part in before.parts}
    wanted = {policy: {**own.get(policy, {}), **changes.get(policy, {})} for policy in {**own, **changes}}
    (after,) = parse_systems([{"name": "x", "use": [{name: value} for name, value in wanted.items()]}])
    lines, back = keys.changes(before, after), keys.changes(after, before)
    assert lines
    assert back
    assert keys.changes(before, before) == ()
    assert made(*lines).key == after.key
    assert made(*lines, *back).key == before.key


def test_what_a_framework_has_no_keys_for() -> None:
    static, pat, tuned = parse_systems([{"verl": {"tp": 2}}, "pat", {"name": "best", "use": ["verl"]}])
    (beside,) = parse_systems([{"name": "x", "use": [{"verl": {"tp": 2}}, "reward_beside"]}])
    assert Keys("veRL", "vllm", 8).changes(static, pat) is None
    assert Keys("veRL", "vllm", 8).changes(static, tuned) is None  # to be tuned: no value
    assert Keys("veRL", "vllm", 8).changes(static, beside) == ("reward_model.launch_reward_fn_async=True",)
    assert Keys("AReaL", "vllm", 8).changes(static, beside) is None
    staged = Keys("veRL", "vllm", 8, pp=2, per_tp=2)
    assert staged.changes(*parse_systems([{"verl": {"tp": [2, 4]}}])) == (f"{TP}=2",)


# Processes ------------------------------------------------------------------------------------------------------------


def test_jobs_and_processes_come_to_what_runs_in_turn_come_to() -> None:
    """In a world of the calibration's errors too."""
    systems = ["verl", {"pat": {"start_tp": 1}}, {"name": "found", "use": [{"real": {"evaluations": 200}}]}]
    loaded = load_experiment(SMALL, {**PAIR, "systems": systems, "draw": 3})
    plain = run_loaded(*loaded)
    for execute in (in_turn, in_processes(2)):
        jobs = run_loaded(*loaded, execute=execute)
        for table in ("steps", "responses", "spans", "calls"):
            pd.testing.assert_frame_equal(getattr(plain, table), getattr(jobs, table), check_exact=True)
        assert plain.manifest["plans"] == jobs.manifest["plans"]
    assert list(plain.manifest["plans"][""]) == ["found"]


def test_an_advice_tells_its_progress_and_what_its_assumptions_are_worth() -> None:
    seen: list[tuple[int, int, str]] = []
    stated = {"training": {"recompute": "full", "micro_batch_tokens": 4096}, "costs": {"host_per_sequence": 5e-5},
              "weight_sync": "naive", "workflow.reward.time_per_response": 0.01, "memory_utilization": 0.8}  # fmt: skip
    overrides = {**TINY, **stated, "cluster": "4xh100", "certainty": 2}
    found = advise(SMALL, overrides=overrides, skip=ALL_BUT_VERL, workers=1, progress=lambda *now: seen.append(now))
    worths = found.result.manifest["ledger"][""]
    assert worths["base"]["step_s"] > 0
    assert "driver's time per token" in [row["name"] for row in worths["assumed"]]
    assert all(end["step_s"] > 0 for row in worths["assumed"] for end in row["ends"])
    assert seen[0] == (0, 1, "what fits")
    assert any(what == "all systems: verl-tp4" for _, _, what in seen)
    assert all(done <= total for done, total, _ in seen)
    ranked = found.tables["ranking"].set_index("system")
    assert ranked.loc["verl-tp4", "speedup_model_low"] < ranked.loc["verl-tp4", "speedup_model_high"]


def test_no_job_is_done_twice() -> None:
    done: list[str] = []

    def counting(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterable[tuple[Job, Ran | RlsimError]]:
        for job, answer in in_turn(jobs, begun):
            done.append(f"{job.name} {job.seeds}")
            yield job, answer

    execute = remembering(counting)
    for seeds in (1, 2):
        run_loaded(*load_experiment(SMALL, {**TINY, "seeds": seeds}), execute=execute)
    assert done == ["verl (0,)", "verl (1,)"]


def test_what_goes_wrong_in_a_job_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text(
        "from rlsim import RolloutControl\n\n\nclass Breaks(RolloutControl):\n"
        "    def initial_tp(self, context):\n        raise RuntimeError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {**TINY, "systems": ["breaks:Breaks"]}
    with pytest.raises(RlsimError, match="no such thing"):
        run_loaded(*load_experiment(SMALL, given), execute=in_processes(2))


def test_what_is_optional_is_left_out_where_it_does_not_fit() -> None:
    given = {
        **TINY,
        "memory_utilization": 0.3,
        "systems": [{"verl": {"tp": 8}}, {"name": "one", "use": [{"verl": {"tp": 1}}]}],
    }
    result = run_loaded(*load_experiment(SMALL, given), optional=["one"])
    assert any(note.startswith("one left out: ") for note in result.notes)
    with pytest.raises(CapacityError, match="system 'one'"):
        run_loaded(*load_experiment(SMALL, given))


def test_an_interrupt_ends_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsim.results.advise.runs.run_loaded", interrupted)
    done = CliRunner().invoke(app, ["advise", "pat_vs_static", "--quick", "--workers", "1"])
    assert done.exit_code == 130
    assert done.output.strip() == "rlsim: interrupted; nothing was written"
    assert not list(tmp_path.iterdir())


# Quick ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Path]:
    out = tmp_path_factory.mktemp("quick") / "out"
    return advise(SMALL, overrides=PAIR, skip=SLOW, quick=True, what_if=False, workers=1, out=out), out


def test_quick_screens_all_and_says_what_it_leaves_out(quick: tuple[Advice, Path]) -> None:
    found, out = quick
    screened, ranked = found.tables["screened"], found.tables["ranking"]
    assert len(screened) > len(ranked)
    assert set(ranked["system"]) <= set(screened["system"])
    assert screened["speedup_low"].isna().all()
    assert ranked["speedup_low"].notna().all()
    assert screened["system"].iloc[0] in set(ranked["system"])
    (note,) = [note for note in found.notes if note.startswith("quick: ")]
    assert f"the other {len(screened) - len(ranked)} were dropped" in note
    data = json.loads((out / "advice.json").read_text())
    assert data["headline"] == found.headline.text
    assert data["settings"] == {"seeds": [0, 1, 2], "steps": 1, "quick": True}


def test_contenders_are_the_best_the_baseline_and_the_best_in_verl() -> None:
    ranked = ranking(result_of({"b": [9.0], "x": [5.0], "y": [6.0], "z": [7.0], "v": [8.0], "w": [8.5]}))
    assert contenders(ranked, "b", ["b", "v", "w"]) == ["x", "y", "v", "b"]


def test_a_part_that_chooses_its_tp_is_not_run_again_from_it() -> None:
    busy = load_experiment(SMALL, {"workflow.prompts": 512})[0]  # auto is TP 1
    simulator = Simulator(LoadedExperiment.of(busy, Path()), search=False)
    names = [[entry["name"] for entry in candidates(simulator, parse_systems(own))[0]] for own in ([], ["pat"])]
    assert len([name for name in names[0] if name.startswith("pat")]) == 3
    assert len([name for name in names[1] if name.startswith("pat")]) == 2

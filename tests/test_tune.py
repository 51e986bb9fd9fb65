"""`rlsim tune`: the space is what frameworks read, what it finds is what arithmetic says, and its answer repeats."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Command, sample, tables

import rlsim
from rlsim.base.catalogue import data_dir
from rlsim.base.reading import plain, read_yaml
from rlsim.cli.tables import parts
from rlsim.cli.tuning import _changes, _frontiers, _idle, _price, _print, verdict
from rlsim.errors import CapacityError, ConfigError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.frameworks.draft import check_new, write_changes, yaml_text
from rlsim.frameworks.mapping import names, unlike, unlike_rows
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import Settings
from rlsim.policies.registry import BUILTIN
from rlsim.results.tune import answer, systems
from rlsim.results.tune.answer import Change, Tuned, Wish, tune
from rlsim.results.tune.parts import CAUSES, Parts, parts_of
from rlsim.results.tune.search import Job, measuring, search
from rlsim.results.tune.space import ALTERS, Axis, Bound, axes_of, baseline_of, divisors, token_budgets
from rlsim.results.tune.systems import CONTENDERS, FEW, LATE, ranked
from rlsim.results.tune.trial import Configuration, Run, StartError, Trial, tried
from rlsim.trace import write_trace
from rlsim.trace.importers import import_trace

VERL = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct", "data.train_batch_size=16", "data.max_prompt_length=256",
    "data.max_response_length=1024", "trainer.n_gpus_per_node=8", "trainer.nnodes=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4", "algorithm.adv_estimator=grpo",
)  # fmt: skip
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SEQS = "actor_rollout_ref.rollout.max_num_seqs"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
#: Steps of hardly any work, for tests of what their size has no part in.
LIGHT = {"prompts": 4, "responses": 4, "steps": 1}


def verl(*more: str) -> Configuration:
    return Configuration("verl", (*VERL, *more), Options(Path(), "h100"))


def own(folder: Path, **changed: Any) -> Configuration:
    """A configuration that is an experiment."""
    data = {
        "name": "own", "cluster": "8xh100", "model": "qwen2.5-1.5b", "calibration": "h100-vllm", "seeds": 1,
        "trace": {"path": "rollpacker-math", "cap": "1K"}, "workflow": {"prompts": 16, "responses": 4, "steps": 3},
        "systems": [{"verl": {"tp": 1}}], **changed,
    }  # fmt: skip
    (folder / "own.yaml").write_text("\n".join(f"{key}: {yaml_text(value)}" for key, value in data.items()))
    return Configuration("", (str(folder / "own.yaml"),), Options(folder))


@pytest.fixture
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an answer's seconds, for tests that don't look at it: what assumptions and other changes would turn."""
    for name in ("_beside", "_turns"):
        monkeypatch.setattr(answer, name, lambda *_: [])


def all_but(configuration: Configuration, *names: str, allow: Sequence[str] = ()) -> list[str]:
    """The settings of a configuration that may be tuned, without these."""
    loaded = LoadedExperiment.of(configuration.experiment({}), configuration.options.folder)
    return [key for axis in axes_of(loaded, allow) if axis.name not in names for key in axis.options[0]]


@pytest.mark.parametrize(
    ("framework", "of"),
    [("veRL", "verl"), ("NeMo-RL", "nemo"), ("AReaL", "areal"), ("slime", "slime"), ("SkyRL", "skyrl")],
)
def test_what_is_tuned_is_what_the_framework_reads(framework: str, of: str) -> None:
    known = {key for table in (of, *(f"{of}-{engine}" for engine in ("vllm", "sglang", "trtllm"))) for _, keys in
             names(table).values() for key in keys}  # fmt: skip
    rows = plain(read_yaml(data_dir("frameworks") / "space.yaml"))[framework]
    asked = {key for row in rows for key in (row.get("set") or [row["key"]])}
    folder = Path(rlsim.__file__).parent / "frameworks"
    sources = [*(folder / of).glob("*.py"), *folder.glob("*.py"), *(folder.parent / "data").glob("*.csv")]
    read = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    unread = {key for key in asked - known if key not in read}
    assert unread == set()
    for row in (row for row in rows if isinstance(row["values"], list)):  # nor is what it costs not represented
        for value in row["values"]:
            keys = row.get("set") or [row["key"]]
            config = Settings(given=dict.fromkeys(keys, value), origin=dict.fromkeys(keys, ""))
            assert unlike(config, unlike_rows(of)) == []
    assert {row.get("alters", "") for row in rows} <= {"", *ALTERS}


def test_axes_keep_what_is_kept_and_alter_what_is_allowed(tmp_path: Path) -> None:
    loaded = LoadedExperiment.of(verl().experiment({}), Path())
    plainly = {axis.name: axis for axis in axes_of(loaded)}
    assert [option[TP] for option in plainly[TP].options] == [1, 2, 4, 8]
    assert not any(axis.alters for axis in plainly.values())
    assert TP not in {axis.name for axis in axes_of(loaded, keep=[TP])}
    more = {axis.name: axis.alters for axis in axes_of(loaded, ALTERS)}
    assert set(more.values()) == {"", *ALTERS}
    drafted = verl().experiment({f"{KWARGS}.method": "eagle3", f"{KWARGS}.num_speculative_tokens": 4})
    options = {axis.name: axis.options for axis in axes_of(LoadedExperiment.of(drafted, Path()))}
    assert options.keys() - plainly == {KWARGS, f"{KWARGS}.num_speculative_tokens"}
    assert [*options[f"{KWARGS}.num_speculative_tokens"][2].values()] == [3]
    assert divisors(12) == [1, 2, 4]
    acting = own(tmp_path, trace={"path": "swe-agents", "cap": "1K"}, environment={"sandboxes": 8}).experiment({})
    options = {axis.name: axis.options for axis in axes_of(LoadedExperiment.of(acting, tmp_path))}
    assert [*options["environment.sandboxes"]] == [{"environment.sandboxes": one} for one in (8, 16, 32, None)]  # of 64
    assert token_budgets(1500)[:3] == [2048, 3072, 3072]


@pytest.mark.parametrize(
    ("key", "rollout", "nodes", "splits", "more"),
    [
        ("rollout.", 3, 1, [1, 2, 3, 4, 5, 6, 7], ()),  # one step off
        ("rollout.", 8, 2, [2, 4, 6, 8, 10, 12, 14], ()),
        ("rollout.", 8, 2, [2, 4, 6, 8, 10, 12, 14], ("async_training.staleness_threshold=0.5",)),
        ("actor_rollout_ref.rollout.", 3, 1, [1, 2, 3, 4, 5, 6, 7], ("trainer.v1.trainer_mode=separate_async",)),
    ],
)
def test_every_split_of_the_gpus_between_generation_and_training_is_an_option(
    key: str, rollout: int, nodes: int, splits: list[int], more: tuple[str, ...]
) -> None:
    """Whatever the asynchronous trainer, in keys that it reads; no split has other GPUs than are configured."""
    batch = ("data.train_batch_size=420", "actor_rollout_ref.actor.ppo_mini_batch_size=420", f"{TP}=1")
    sides = [f"{side}nnodes=1" for side in (key, "trainer.")]
    sides += [f"{key}n_gpus_per_node={rollout}", f"trainer.n_gpus_per_node={8 * nodes - rollout}"]
    split = verl(*batch, *sides, *more)
    loaded = LoadedExperiment.of(split.experiment({}), Path())
    (axis,) = (axis for axis in axes_of(loaded) if "trainer.n_gpus_per_node" in axis.name)
    assert f"{key}n_gpus_per_node" in axis.options[0]
    found = [split.experiment(option) for option in axis.options]
    assert {one.cluster for one in found} == {loaded.experiment.cluster}
    assert [next(iter(one.systems[0]["use"][0].values()))["rollout_gpus"] for one in found] == splits


SKYRL = ("trainer.placement.colocate_all=false", "trainer.train_batch_size=512", "trainer.policy_mini_batch_size=512")
WHOLE = "trainer.n_gpus_per_node=8"


@pytest.mark.parametrize(
    ("framework", "given", "rollouts"),
    [
        ("verl", (*VERL, "rollout.nnodes=1", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4"), [4, 8, 16]),
        ("verl", (*VERL, "rollout.nnodes=1", "rollout.n_gpus_per_node=8", "trainer.nnodes=1", WHOLE), [4, 8, 16]),
        ("verl", (*VERL, "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1",
                  "actor_rollout_ref.rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4"), [4, 8, 16]),
        ("nemo", ("nemo_async.yaml",), [4, 8, 16]),
        ("nemo", ("nemo_async.yaml", "cluster.num_nodes=1", "policy.generation.colocated.resources.gpus_per_node=4"),
         [4, 8, 16]),
        ("slime", ("slime.sh", "NUM_GPUS=4", "--colocate=false", "--rollout-num-gpus=4"), [4, 8, 16]),
        ("skyrl", ("skyrl.sh", *SKYRL, "NUM_GPUS=4"), [4, 8, 16]),
        ("", ({"areal": {"tp": 1, "rollout_gpus": 2, "eta": 1}},), [2, 4, 8]),
    ],
)  # fmt: skip
def test_each_side_of_split_gpus_grows_with_their_number(
    framework: str, given: tuple[Any, ...], rollouts: list[int], tmp_path: Path
) -> None:
    """In keys that the framework reads, by the share that each side has, up to 32 GPUs."""
    configuration = own(tmp_path, systems=[*given]) if not framework else framed(tmp_path, framework, *given)
    loaded = LoadedExperiment.of(configuration.experiment({}), tmp_path)
    (axis,) = (axis for axis in axes_of(loaded, ["gpus"], most_gpus=32) if axis.alters == "gpus")
    found = [configuration.experiment(option) for option in axis.options]
    assert [LoadedExperiment.of(one, tmp_path).cluster.gpus for one in found] == [8, 16, 32]
    assert [of["rollout_gpus"] for of in map(of_split, found)] == rollouts


@pytest.mark.parametrize(
    ("placed", "apart", "splits"),
    [
        (("critic_num_gpus_per_node=2", "policy_num_gpus_per_node=2", "ref_num_gpus_per_node=2"), {"critic": 2}, 9),
        (("ref_num_gpus_per_node=2", "policy_num_gpus_per_node=2", "colocate_policy_ref=false"), {"reference": 2}, 9),
        (("critic_num_gpus_per_node=2", "ref_num_gpus_per_node=1", "policy_num_gpus_per_node=1",
          "colocate_policy_ref=false"), {"critic": 2, "reference": 1}, 6),
    ],
)  # fmt: skip
def test_skyrls_split_counts_the_gpus_of_a_critic_and_a_reference(
    placed: tuple[str, ...], apart: dict[str, int], splits: int, tmp_path: Path
) -> None:
    """No split has other GPUs than are configured, on one node or several, and each is another one."""
    critic = "trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct"
    sizes = [f"trainer.placement.{one}" for one in placed]
    more = (*["trainer.algorithm.advantage_estimator=gae", critic] * ("critic" in apart), *sizes)
    micro = ("trainer.micro_train_batch_size_per_gpu=1", "trainer.micro_forward_batch_size_per_gpu=1")
    loss = "trainer.algorithm.use_kl_loss=true"
    split = framed(tmp_path, "skyrl", "skyrl.sh", *SKYRL, "NUM_GPUS=4", *micro, loss, *more)
    loaded = LoadedExperiment.of(split.experiment({}), tmp_path)
    assert of_split(loaded.experiment)["apart"] == apart
    axes = axes_of(loaded, ["gpus"], most_gpus=16)
    grows, axis = sorted((one for one in axes if "policy_num" in one.name), key=lambda one: not one.alters)
    twice = split.experiment(grows.options[-1])
    assert LoadedExperiment.of(twice, tmp_path).cluster.gpus == 2 * loaded.cluster.gpus
    assert of_split(twice)["apart"] == {name: 2 * count for name, count in apart.items()}
    found = []
    for option in axis.options:
        with suppress(StartError):  # a batch does not divide
            found.append(split.experiment(option))
    assert {one.cluster for one in found} == {loaded.experiment.cluster}
    assert len(axis.options) == splits
    assert len({str(of_split(one)) for one in found}) == len(found) > 2


def framed(folder: Path, framework: str, *given: str) -> Configuration:
    """A configuration of a framework; files are those of `cases`."""
    for name in ("slime.sh", "skyrl.sh", "nemo_async.yaml"):
        (folder / name).write_text(sample(f"frameworks/{name}"))
    (folder / "base.yaml").write_text(sample("frameworks/nemo.yaml"))
    sources = (str(folder / text) if (folder / text).is_file() else text for text in given)
    return Configuration(framework, tuple(sources), Options(folder, "h100"))


def of_split(experiment: Any) -> dict[str, Any]:
    """What the baseline says of GPUs that generate alone."""
    parts = baseline_of(experiment.systems, experiment.baseline).parts
    return next(dict(part.parameters) for part in parts if "rollout_gpus" in part.parameters)


@pytest.mark.parametrize(("given", "moved"), [((), 1.0), (("--optimizer-cpu-offload",), 0.0)])
def test_slimes_optimizer_is_tried_where_it_is_not(tmp_path: Path, given: tuple[str, ...], moved: float) -> None:
    (tmp_path / "run.sh").write_text(sample("frameworks/slime.sh"))
    slime = Configuration("slime", (str(tmp_path / "run.sh"), *given), Options(tmp_path, "h100"))
    loaded = LoadedExperiment.of(slime.experiment({}), tmp_path)
    (axis,) = (axis for axis in axes_of(loaded) if "--optimizer-cpu-offload" in axis.name)
    (option,) = axis.options
    assert slime.experiment(option).training.cpu_optimizer == moved != loaded.experiment.training.cpu_optimizer


def test_what_takes_more_gpus_than_are_allowed_does_not_count() -> None:
    more = Trial({"trainer.nnodes": 2}, {"responses_per_s": 9.0}, gpus=16)
    assert Wish().judged(more, configured=8).kind == "other"
    assert Wish(most_gpus=16).judged(more, configured=8).rate == Wish().judged(more, configured=16).rate == 9.0


def test_what_would_not_start_or_fit_is_told_apart() -> None:
    run = Run(1, 1)
    assert tried(verl(), {"actor_rollout_ref.rollout.max_num_batched_tokens": 16, SEQS: 64}, run).kind == "start"
    with pytest.raises(StartError, match="max_num_batched_tokens"):
        verl().experiment({"actor_rollout_ref.rollout.max_num_batched_tokens": 16, SEQS: 64})
    assert tried(verl(), {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-72B-Instruct"}, run).kind == "memory"


def test_a_trial_is_what_the_experiment_of_the_changed_configuration_gives() -> None:
    """To the last digit: `rlsim init` with the printed lines, then `rlsim run`."""
    changes = {TP: 1, SEQS: 512}
    experiment = verl(*(f"{key}={value}" for key, value in changes.items())).experiment({})
    data = json.loads(experiment.model_dump_json(exclude_unset=True)) | {"systems": list(experiment.systems)}
    result = rlsim.run({**data, "seeds": [5], "certainty": 0}, overrides={"workflow.steps": 2})
    row = result.summary().set_index("system").loc["as-configured"]
    found = tried(verl(), changes, Run(5, 2))
    assert found.rate == row["responses_per_s"]
    assert found.means["step_time_s"] == row["step_time_s"]


def trace_of(folder: Path, cap: str, *lengths: tuple[int, int]) -> dict[str, Any]:
    """Responses of these prompts and lengths."""
    rows = "\n".join(f"{prompt},40,{length}" for prompt, length in lengths)
    (folder / "own.csv").write_text(f"prompt_id,prompt_tokens,response_tokens\n{rows}\n")
    write_trace(import_trace(folder / "own.csv", cap_tokens=1024 * int(cap[:-1])), folder / "own.parquet")
    return {"path": "own.parquet", "cap": cap}


#: Problems whose best setting follows by arithmetic: the experiment, and what its best set has.
KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = tables("bases")["tune known"]


@pytest.mark.slow
@pytest.mark.parametrize("problem", KNOWN)
def test_known_optima_are_found_in_the_whole_space(problem: str, tmp_path: Path) -> None:
    given, best = KNOWN[problem]
    if given.get("trace") == "long tail":  # one long response among 31 short ones in each group
        lengths = [(prompt, 16 if sample else 4000) for prompt in range(4) for sample in range(32)]
        given = {**given, "trace": trace_of(tmp_path, "4K", *lengths)}
    found = tune(own(tmp_path, **given), trials=40, workers=1)
    for key, values in best.items():
        assert found.best[key] in (values if isinstance(values, list) else [values]), found.best
    assert found.gain_low > 1
    assert found.evaluated >= 40


def test_settings_of_training_that_pay_only_together_are_found() -> None:
    """Three of twelve, each of which alone makes training longer: what training costs is searched on its own first."""
    axes = [Axis(name, ({name: 1}, {name: 2}, {name: 3})) for name in "abcdefghijkl"]

    def measure(jobs: Sequence[Job], most_s: float = math.inf) -> list[Trial]:
        found = []
        for changes, run in jobs:
            own = sum(changes.get(name) == 3 for name in "abc")
            means = {"train_time_s": 5.0 if own == 3 else 10.0 + own, "kept_bytes": 1e9}
            if run.rollout:
                means["gen_exposed_s"] = 10.0 + 0.1 * sum(changes.get(name, 2) - 2 for name in "defghijkl")
            seconds = means["train_time_s"] + means.get("gen_exposed_s", 0.0)
            found.append(Trial(changes, means | {"responses_per_s": 1 / seconds}))
        return found

    for seed in range(3):
        tried_sets = search(axes, measure, Run(seed), lambda count: count >= 120, lambda _: None, lambda: math.inf)
        assert len(tried_sets) < 140
        assert all(tried_sets[0].changes.get(name) == 3 for name in "abc")


def test_calls_beside_generation_are_priced_as_they_run() -> None:
    """Without generation the same seconds, and all else that a trial refuses is refused."""
    for changes in ({}, {TP: 1}):
        whole, priced = (tried(verl(), changes, Run(5, 1, rollout=rollout)) for rollout in (True, False))
        for name in ("train_time_s", "prep_time_s"):
            assert priced.means[name] == pytest.approx(whole.means[name], rel=1e-9)
    assert tried(verl(), {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-72B-Instruct"}, Run(5, 1, rollout=False)).kind


def test_what_is_best_already_stays(tmp_path: Path) -> None:
    """Two processes give what one gives; nothing that gains nothing is changed."""
    configuration = own(tmp_path)
    wish = Wish(all_but(configuration, "engine.graphs"))
    found = tune(configuration, wish, trials=5, workers=1)
    assert dict(found.best) == {}
    assert found.gain == 1.0
    assert not found.sure
    again = tune(configuration, wish, trials=5, workers=2)
    assert again.as_json() | {"seconds": 0} == found.as_json() | {"seconds": 0}


def test_a_gain_that_is_none_on_other_draws_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search thought of it, and however it is told: no set is recommended as 1.00 times as fast."""
    monkeypatch.setattr(answer, "_raced", lambda *_: {"engine.max_num_seqs": 1024})
    monkeypatch.setattr(answer, "_simplified", lambda best, *_: best)
    found = tune(own(tmp_path, workflow=LIGHT), trials=2, workers=1)
    assert (found.best, found.gain, found.changes, found.assumptions) == ({}, 1.0, [], [])
    assert found.after == found.before
    assert verdict(found)[0].startswith("Keep the settings as they are")


def test_changes_are_taken_out_by_as_many_steps_as_the_answer_is_told_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step alone keeps what later, longer responses are slower with (veRL's GSPO: no offload, 4%)."""
    steps = []

    def simplified(best: dict[str, Any], *more: Any) -> dict[str, Any]:
        steps.extend(run.steps for run in more[2])
        return best

    monkeypatch.setattr("rlsim.results.tune.answer._simplified", simplified)
    configuration = own(tmp_path)
    tune(configuration, Wish(all_but(configuration, "engine.max_num_seqs", "rollout.tp")), trials=4, workers=1)
    assert steps == [3, 3, 3]


def test_a_change_is_shown_with_what_it_is_kept_for() -> None:
    """The same draws decide whether a change stays and tell what the set has of it; one that fails where the set runs
    is needed."""
    seconds = {("a", 1): 0.8, ("a", 2): 1.1, ("b", 1): 1.02, ("b", 2): 1.0}

    def measure(jobs: Sequence[Any], most_s: float = 0.0) -> list[Trial]:
        rates = [float(np.prod([1 / seconds.get((key, run.seed), 1) for key in changes])) for changes, run in jobs]
        fails = [run.seed == 2 and "c" not in changes for changes, run in jobs]
        return [Trial({}, {"responses_per_s": rate * (not no)}) for rate, no in zip(rates, fails, strict=True)]

    axes, runs = [Axis(key, ({key: 1},)) for key in "abc"], [Run(1), Run(2)]
    best = answer._simplified(dict.fromkeys("abc", 1), axes, measure, runs, bare=False)
    assert best == {"a": 1, "c": 1}
    worths = answer._worths(best, axes, {}, Trial({}), measure, runs)
    assert {one.key: one.within for one in worths} == {
        "a": pytest.approx((0.8 * 1.1) ** -0.5),
        "c": pytest.approx(math.nan, nan_ok=True),
    }
    split = Axis("a + b", ({"a": 1, "b": 1},))
    told = answer._worths({"a": 1, "b": 1}, [*axes[:2], split], {}, Trial({}), measure, runs[:1])
    assert [one.key for one in told] == ["a", "b"], "a key is told once, with what is set with it"
    (only,) = answer._worths({"a": 1}, axes, {}, Trial({}), measure, runs[:1])
    assert only.alone == only.within == pytest.approx(1 / 0.8), "of one change both are the same comparison"


def test_what_a_change_makes_to_be_assumed_is_tried_where_it_is(tmp_path: Path) -> None:
    """A draft of the set alone, or of the configuration alone: the other one runs as it is."""
    drafts = {"method": "eagle3", "num_speculative_tokens": 3}
    plain, gains = own(tmp_path), []
    drafted = replace(plain, sources=(*plain.sources, f"engine.speculation={yaml_text(drafts)}"))
    for configuration, changes in ((plain, {"engine.speculation": drafts}), (drafted, {"engine.speculation": None}),
                                   (plain, {"memory_utilization": 0.7})):  # fmt: skip
        with measuring(configuration, 1, Wish().judged) as measure:
            rows = answer._turns(changes, configuration.experiment(changes), measure, Run(1, 1), lambda: True)
        row = {row["assumed"]: row for row in rows}.get("acceptance of drafted tokens")
        gains += [[*row["gains"], row["gain"]]] if row else []
    assert "engine's share of memory" not in {row["assumed"] for row in rows}, "the set gives it"
    (low, high, taken), back = gains
    assert low < taken < high
    assert back == pytest.approx([1 / low, 1 / high, 1 / taken])


@pytest.mark.ci
def test_a_configuration_that_does_not_fit(tmp_path: Path) -> None:
    """Where a change makes it fit, that is the answer; where none does, that is told."""
    tight = own(tmp_path, model="qwen2.5-7b", cluster="2xh100", training={"micro_batch_tokens": 100_000})
    assert tried(tight, {}, Run(1, 1)).kind == "memory"
    found = tune(tight, Wish(all_but(tight, "training.offload", "training.micro_batch_tokens")), trials=12, workers=1)
    assert found.best
    assert "does not fit" in found.unfit
    _told_without_ratios(found)
    with pytest.raises(CapacityError, match="none of the"):
        tune(tight, Wish(all_but(tight, "engine.graphs")), trials=4, workers=1)


def _told_without_ratios(found: Tuned) -> None:
    """There is nothing to compare with: no ratio to the configuration, anywhere."""
    assert not found.before
    data = found.as_json()
    assert [data[name] for name in ("gain", "gain_low", "gain_high", "model_low", "model_high")] == [None] * 5
    assert not any(row["gains"] for row in data["assumptions"])
    assert not any(change["alone"] for change in data["changes"])
    json.dumps(data, allow_nan=False)
    head = verdict(found)[0]
    assert "As configured it does not fit" in head
    assert f"These settings do, in {found.after['step_time_s']:.1f} seconds a step" in head
    assert "times" not in head


def test_a_configuration_that_would_fit_with_luck(tmp_path: Path) -> None:
    """Its micro-batch holds prompts with short responses, and none with long ones: it fits under no seed."""
    lengths = [(prompt, 30_000 if prompt % 2 else 16) for prompt in range(8) for _ in range(8)]
    configuration = own(tmp_path, cluster="1xh100", workflow={"prompts": 1, "responses": 8, "steps": 1},
                        trace=trace_of(tmp_path, "32K", *lengths),
                        training={"micro_batch_sequences": 8})  # fmt: skip
    assert {tried(configuration, {}, Run(seed, 1)).kind for seed in range(8)} == {"memory"}
    keep = all_but(configuration, "training.micro_batch_sequences")
    _told_without_ratios(tune(configuration, Wish(keep), trials=6, workers=1))


def test_tune_from_the_command_line(tmp_path: Path, call: Command) -> None:
    own(tmp_path, engine={"graphs": False})
    keep = [word for axis in ("training.offload", "memory_utilization") for word in ("--keep", axis)]
    written = ("--price", "2.5", "--json", tmp_path / "found.json", "--quiet")
    given = ("workflow.prompts=12", "--write", tmp_path / "tuned.yaml")
    done = call("tune", tmp_path / "own.yaml", *given, "--trials", "16", "--workers", "1", *keep, *written)
    assert done.code == 0, done.err
    assert "engine.graphs=true" in done.out.splitlines()[-2]
    assert done.out.splitlines()[-1] == f"wrote {tmp_path / 'tuned.yaml'}, with workflow.prompts=12 as given"
    assert "dollars for 1,000 responses" in done.out
    assert "binds as tuned: " in done.out
    assert "now" not in done.out.split()
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"best", "gain", "gain_low", "gain_high", "model_low", "model_high", "evaluated", "legal", "excluded",
            "seconds", "binds", "assumptions"} <= set(found)  # fmt: skip
    assert found["best"] == {"engine.graphs": True}
    assert found["model_low"] <= found["gain"] <= found["model_high"]
    assert all(f"{one:#.3g}" in done.out for one in found["dollars_per_1000"])


def test_idle_gpus_have_a_cause_where_they_are_idle() -> None:
    def parts(idle: float) -> Parts:
        shares = pd.DataFrame([dict.fromkeys(CAUSES, 0.0) | {"idle": idle, "kv_limit": idle}])
        return Parts(shares, pd.DataFrame(), pd.DataFrame(), pd.DataFrame())

    assert _idle(parts(0.02)) == "; GPUs are idle for 2%, most of it for KV cache or max_num_seqs"
    assert _idle(parts(0.004)) == "; GPUs are idle for 0%"


def test_memory_is_told_of_the_gpus_that_each_side_has(tmp_path: Path) -> None:
    """Six of eight GPUs train in stages that eight could not form."""
    late = own(
        tmp_path,
        workflow={"prompts": 12, "responses": 4, "steps": 2},
        training={"backend": "megatron", "pp": 6},
        systems=[{"one_step_off": {"tp": 2, "rollout_gpus": 2}}],
    )
    parts = parts_of(LoadedExperiment.of(late.experiment({}), tmp_path), tmp_path, Run(3, 1))
    fits = parts.memory.set_index("tp")
    assert fits.index[fits.fits].tolist() == [1, 2]
    assert "the 2 GPUs of a node that generation has" in str(fits.loc[4, "why_not"])
    assert not fits.resident_gb.any()
    assert parts.memory_calls.fits.all()


def test_idle_time_of_steps_that_overlap_is_of_as_many_as_they_need(tmp_path: Path) -> None:
    workflow = {"prompts": 16, "responses": 4, "steps": 6}
    late = own(tmp_path, workflow=workflow, systems=[{"one_step_off": {"tp": 1, "rollout_gpus": 4}}])
    loaded = LoadedExperiment.of(late.experiment({}), tmp_path)
    (idle,) = parts_of(loaded, tmp_path, Run(3, 1)).idle["idle"]  # of one step generation is waited for
    assert idle == pytest.approx(tried(late, {}, Run(3)).means["bubble_fraction"], abs=0.01)


def test_changes_keep_the_name_of_their_setting_on_a_narrow_terminal() -> None:
    key = f"actor_rollout_ref.{'actor.' * 9}size"  # wider than the room beside the numbers
    changes = [Change(key, 2, 1.31, 1.12), Change("short", 4, 1.41, 1.22)]
    (table,) = _changes(Tuned({key: 2, "short": 4}, *[1.0] * 5, {}, {}, changes=changes))
    (_, lines), *more = parts(table, 80)
    assert not more
    assert [line.split() for line in lines] == [["1.31", "1.12", f"{key}=2"], ["1.41", "1.22", "short=4"]]


def test_prices_by_gpu(tmp_path: Path) -> None:
    configuration = own(tmp_path)
    (tmp_path / "prices.yaml").write_text("H100-SXM: 2\nh200: 3.8\n")
    (tmp_path / "prices.csv").write_text("gpu,dollars\nh200,3.8\nh100,2.5\n")
    files = (str(tmp_path / "prices.yaml"), str(tmp_path / "prices.csv"))
    texts = ("2.5", "h100=2.5,h200=3.8", "H100-SXM = 2.5", *files)
    assert [_price(text, configuration) for text in texts] == [2.5, 2.5, 2.5, 2.0, 2.5]
    for text, why in (("h200=3.8", "has no price of h100-sxm; it has h200"), ("h100", "expected dollars of a GPU-hour"),
                      ("-1", "expected dollars"), ("h100=-1", "expected dollars"), ("no.csv", "no such")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            _price(text, configuration)


def test_mistakes_are_told(tmp_path: Path, call: Command) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " ".join(VERL))
    assert "give --gpu" in call("tune", str(script)).err
    assert "did you mean" in call("tune", str(script), "--gpu", "h100", "--keep", f"{SEQS}s").err
    assert "unknown numeric" in call("tune", str(script), "--gpu", "h100", "--allow", "numeric").err
    with pytest.raises(ConfigError, match="no such"):
        Configuration("", ("nowhere.yaml",), Options(Path())).experiment({})


# Bounds, systems, own runs -------------------------------------------------------------------------------------------


def test_a_bound_of_staleness() -> None:
    means = {"staleness_mean": 1.04, "staleness_p95": 2.0, "staleness_max": 3.0}
    assert [Bound.of(text).kept(means) for text in ("mean:1", "p95:1", "p95:2", "max:2", "3")] == [
        True, False, True, False, True,
    ]  # fmt: skip
    for text in ("median:1", "max:-1", "mean:x", "max:inf"):
        with pytest.raises(RlsimError, match="staleness"):
            Bound.of(text)


@pytest.mark.usefixtures("nothing_beside")
@pytest.mark.parametrize("most", [0.0, 1.0])
def test_what_is_staler_than_allowed_does_not_count(most: float, tmp_path: Path) -> None:
    configuration = own(tmp_path, systems=[{"areal": {"tp": 1, "rollout_gpus": 4, "eta": 2}}],
                        workflow={"prompts": 4, "responses": 4, "steps": 6})  # fmt: skip
    keep = all_but(configuration, "system.eta", allow=ALTERS)
    found = tune(configuration, Wish(keep, bound=Bound("max", most), most_gpus=8), trials=6, workers=1)
    assert found.excluded["stale"] >= 2  # eta of 1, 4 and 8
    assert found.best == {"system.eta": 0}, "what is configured breaks the bound, and is no answer"
    assert found.gain < 1
    assert [row["staleness"] for row in found.frontiers["staleness"]] == [0.0], "what is configured is not allowed"


def test_tables_of_staleness_and_gpus_price_each_set_by_its_own_gpus() -> None:
    """A dollar for a GPU-hour; every number of GPUs has its row, be it slower than a smaller one."""

    def ran(rate: float, gpus: int, staleness: float) -> Trial:
        means = {"responses_per_s": rate, "step_time_s": 1.0, "staleness_mean": staleness}
        return Trial({}, means, gpus=gpus)

    trials = [ran(40.0, 8, 1.0), ran(30.0, 8, 0.0), ran(35.0, 16, 0.0), ran(20.0, 32, 1.0)]
    found = Tuned({}, *[1.0] * 5, {}, {}, gpus=(8, 16), frontiers=answer._frontiers(trials, ["staleness", "gpus"]))
    stale, sizes = (dict(zip(table.headings, zip(*table.rows, strict=True), strict=True))
                    for table in _frontiers(found, 1.0))  # fmt: skip
    assert (stale["gpus"], sizes["gpus"]) == (("16", "8"), ("8", "16", "32"))
    assert (stale["responses/s"], sizes["responses/s"]) == (("35.00", "40.00"), ("40.00", "35.00", "20.00"))
    cost = "dollars for 1,000"
    assert (stale[cost], sizes[cost]) == (("0.127", "0.0556"), ("0.0556", "0.127", "0.444"))


@pytest.mark.usefixtures("nothing_beside")
def test_more_gpus_are_tried_where_that_is_asked_and_money_counts_each(tmp_path: Path) -> None:
    configuration = own(tmp_path)
    keep = all_but(configuration)
    found = tune(configuration, Wish(keep, bound=Bound("max", 1.0), most_gpus=16), trials=4, workers=1)
    assert found.best == {"cluster": "2x8xh100"}
    assert found.gpus == (8, 16)
    assert "gpus" in found.frontiers
    assert "staleness" not in found.frontiers, "no setting that was tried alters it"
    assert [row["gpus"] for row in found.frontiers["gpus"]] == [8, 16]
    told = f"{found.gain:.2f} times as fast on 16 GPUs instead of 8, {found.gain / 2:.2f} times as fast per GPU (95%"
    assert told in verdict(found)[0]
    assert "on 16 GPUs instead of 8 (95%" in verdict(replace(found, money=True))[0]
    cheap = tune(configuration, Wish(keep, most_gpus=16, money=True), trials=4, workers=1)
    assert not cheap.best  # twice the GPUs are less than twice as fast
    assert found.gain < 2
    most = tune(configuration, Wish(keep, most_gpus=32), trials=3, workers=1)
    assert [row["gpus"] for row in most.frontiers["gpus"]] == [8, 16, 32], "each number that is asked for"


def test_numbers_of_gpus_without_a_run_are_told() -> None:
    axis, wish = Axis("a + b", ({"a": 1, "b": 8}, {"a": 2, "b": 16}), "gpus"), Wish(most_gpus=16)
    fails = [Trial({**axis.options[1], "c": 3}, problem="neither", kind="start"),
             Trial(axis.options[1], problem="does not divide", kind="start")]  # fmt: skip
    runs = Trial({**axis.options[1], "c": 4}, {"responses_per_s": 1.0}, gpus=16)
    assert answer._no_gpus(fails, [axis], wish) == ["nothing runs with a=2 b=16: does not divide"]
    assert answer._no_gpus([*fails, runs], [axis], wish) == []
    (none,) = answer._no_gpus(fails, [], wish)
    assert none.startswith("--gpus 16 has no effect: ")
    assert answer._no_gpus(fails, [], Wish()) == []


def ranks(configuration: Configuration, *runs: Run, judged: Any = None, bound: Any = None, in_time: Any = None) -> Any:
    """The systems beside a configuration."""
    loaded = LoadedExperiment.of(configuration.experiment({}), configuration.options.folder)
    spec, more = baseline_of(loaded.experiment.systems, None), [in_time] if in_time else []
    with measuring(configuration, 1, judged or Wish().judged) as measure:
        return ranked(loaded, {}, spec, measure, [*runs], bound, *more)


def test_systems_that_must_be_built_are_ranked_or_refused_with_a_reason(tmp_path: Path) -> None:
    configuration = own(tmp_path, workflow=LIGHT)
    rows, refused = ranks(configuration, *(Run(seed, 1) for seed in (1, 2, 3)))
    names = [row["system"] for row in rows]
    assert {*names, *refused} == set(BUILTIN)
    assert {"tail_batching", "rlhfuse", "verl"} <= {*names}
    assert [row["gain"] for row in rows] == sorted((row["gain"] for row in rows), reverse=True)
    assert sum(row["gain_low"] == row["gain_low"] for row in rows) == CONTENDERS
    assert "no response of the trace is judged" in refused["colocated_judge"]
    assert "reward" in refused["oppo"]  # the reason for which it cannot run
    assert all("--max-staleness" in refused[name] for name in ("laminar", "areal", "overcommit", "lagged"))


def test_the_budget_is_shared_and_what_it_is_too_short_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that goes on by one at each look: systems, four between two looks, have 40% of the time."""
    several = [name for name in BUILTIN if name not in ("tail_batching", "rollpacker", "rlhfuse", "rlhfuse_plus")]
    monkeypatch.setattr(systems, "BUILTIN", several)
    looks, configuration = iter(range(10_000)), own(tmp_path)
    wish = Wish(systems=True, most_gpus=16)
    found = tune(configuration, wish, budget_s=10, workers=1, clock=lambda: float(next(looks)))
    assert "training.offload" in found.untried
    assert "cluster" not in found.untried, "what may be altered is tried first"
    late = [name for name, why in found.not_tried.items() if why == LATE]
    assert late
    assert 0 < len(found.systems) <= 8
    _print(found, None, None, verbose=False)
    told = capsys.readouterr().out
    assert f"not tried: {', '.join(found.untried)}; give a larger --budget, or more --trials" in told
    assert f"systems not tried, as time was over: {', '.join(late)}; give a larger --budget" in told


def test_systems_whose_steps_are_not_comparable_run_for_longer_or_have_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few short rounds of tail batching are no measure of it: the first whole periods are (of 8 steps)."""
    monkeypatch.setattr(systems, "BUILTIN", ["tail_batching", "tail_consolidation"])
    configuration = own(tmp_path, workflow=LIGHT)
    seen = list[Trial]()

    def kept(trial: Trial) -> Trial:
        seen.append(trial)
        return trial

    (row, other), _ = ranks(configuration, Run(1, 2), judged=kept)
    seen.clear()
    in_time = lambda _: not any(trial.unsteady for trial in seen)  # noqa: E731
    (only,), refused = ranks(configuration, Run(1, 2), judged=kept, in_time=in_time)
    assert only["system"] == "tail_consolidation"
    assert refused == {"tail_batching": FEW}
    row = row if row["system"] == "tail_batching" else other
    settings = {"certainty": 0, "seeds": [1], "workflow.steps": 8, "draw": 0, "cases": {}}
    tail = {"name": "tail", "use": [{"tail_batching": {}}, {"verl": {"tp": int(row["with"].removeprefix("tp "))}}]}
    result = rlsim.run(str(tmp_path / "own.yaml"), overrides={**settings, "systems": [{"verl": {"tp": 1}}, tail]})
    summary = result.summary().set_index("system")
    assert summary.loc["tail", "unsteady"] == ""
    assert row["gain"] == pytest.approx(summary.loc["tail", "speedup"])


def test_a_trial_that_takes_longer_than_is_left_ends_then(tmp_path: Path) -> None:
    configuration = own(tmp_path, workflow=LIGHT)
    run = Run(77, 1)
    ended = tried(configuration, {"engine.max_num_seqs": 8}, run, most_s=0.001)
    assert (ended.kind, ended.rate, ended.problem) == ("slow", 0.0, "it took over 0.001 s")
    with measuring(configuration, 1, Wish().judged) as measure:
        assert [trial.kind for trial in measure([({"engine.max_num_seqs": 4}, run)], 60.0)] == [""]
    assert tried(configuration, {"engine.max_num_seqs": 8}, run).rate > 0, "nothing of it stays behind"


def test_staleness_is_told_in_optimizer_steps_too(tmp_path: Path) -> None:
    workflow, training = {"prompts": 4, "responses": 4, "steps": 3}, {"mini_batches": 2, "epochs": 3}
    late = own(tmp_path, workflow=workflow, training=training, systems=[{"one_step_off": {"tp": 1, "rollout_gpus": 4}}])
    means = tried(late, {}, Run(3)).means
    assert means["staleness_mean"] > 0
    assert means["staleness_optimizer_steps"] == 6 * means["staleness_mean"]


@pytest.mark.usefixtures("nothing_beside")
def test_rates_that_would_not_last_are_told(tmp_path: Path, call: Command) -> None:
    split = {"areal": {"tp": 1, "rollout_gpus": 4, "eta": 2}}
    own(tmp_path, workflow={"prompts": 4, "responses": 4, "steps": 3}, trace={"fixed": 64, "cap": 64}, systems=[split])
    done = call("tune", tmp_path / "own.yaml", "--trials", "2", "--workers", "1", "--quiet")
    assert "as configured it is not steady, so its rate may not last: it fills for " in done.out


SCRIPT = """set -x
tp=4
python3 -m verl.trainer.main_ppo \\
{} \\
    actor_rollout_ref.rollout.tensor_model_parallel_size="${{tp}}" \\
    trainer.total_epochs=15 $@
"""


def script(folder: Path) -> Path:
    path = folder / "run.sh"
    path.write_text(SCRIPT.format(" \\\n".join(f"    {line}" for line in VERL if not line.startswith(TP))))
    return path


def test_a_script_of_verl_goes_apart_only_where_its_program_can(tmp_path: Path) -> None:
    """Before 0.9 one step off is a program of its own, which no setting of a synchronous script starts."""
    path = script(tmp_path)
    for version, modes in (("0.8", set[str]()), ("0.9", {"separate_async"})):
        given = Configuration("verl", (str(path),), Options(tmp_path, "h100"), version)
        loaded = LoadedExperiment.of(given.experiment({}), tmp_path)
        apart = [axis for axis in axes_of(loaded, ("staleness",)) if axis.alters == "staleness"]
        assert {str(one["trainer.v1.trainer_mode"]) for axis in apart for one in axis.options} == modes
    experiment = given.experiment(apart[0].options[3])
    (system, _) = experiment.systems
    assert system["use"][0]["verl_fully_async"]["rollout_gpus"] == 4
    assert experiment.workflow.old_log_probs == given.experiment({}).workflow.old_log_probs


def test_the_written_script_is_the_changed_configuration(tmp_path: Path) -> None:
    path, out = script(tmp_path), tmp_path / "tuned.sh"
    changes = {TP: 2, SEQS: 512, "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype": "fp8"}
    write_changes(path, changes, out)
    options = Options(Path(), "h100")
    before, after = (Configuration("verl", (str(one),), options) for one in (path, out))
    left_out = {"name", "description", "sources"}
    assert after.experiment({}).model_dump(exclude=left_out) == before.experiment(changes).model_dump(exclude=left_out)
    assert "++actor_rollout_ref.rollout.engine_kwargs" in out.read_text()
    with pytest.raises(ConfigError, match="exists"):
        write_changes(path, changes, out)


def test_what_is_written_has_what_was_given_beside_the_file(tmp_path: Path, call: Command) -> None:
    """The gain is of both; what no line of the file can have is to be given again."""
    path, out = script(tmp_path), tmp_path / "tuned.sh"
    given = ("data.train_batch_size=32", "trainer.test_freq=5", "tp=2")
    configuration = Configuration("verl", (str(path), *given), Options(tmp_path, "h100"))
    assert configuration.write({SEQS: 512}, out) == ([*given[:2]], ["tp=2"])
    assert "data.train_batch_size=32" in out.read_text()
    after = Configuration("verl", (str(out), "tp=2"), Options(tmp_path, "h100")).experiment({})
    assert (after.workflow.prompts, after.engine.max_num_seqs) == (32, 512)
    again = call("tune", path, out, "--gpu", "h100", "--write", tmp_path / "more.sh")
    assert "--write takes one file and settings" in again.err


@pytest.mark.parametrize("given", [(), ("workflow.prompts=8", "systems.0.use.0.verl.tp=2")])
def test_what_is_written_of_an_experiment_runs(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Settings of its system are written where it has them."""
    configuration = own(tmp_path, systems=[{"name": "one", "use": [{"verl": {"tp": 4}}]}, "pat"], baseline="one")
    configuration = replace(configuration, sources=(*configuration.sources, *given))
    out = tmp_path / "tuned.yaml"
    for changes in ({"system.tp": 1, "engine.graphs": False}, {"engine.graphs": False}):
        out.unlink(missing_ok=True)
        assert configuration.write(changes, out) == ([*given], [])
        found = load_experiment(out)[0]
        assert found.engine.graphs is False
        assert found.workflow.prompts == (8 if given else 16)
        spec = baseline_of(found.systems, found.baseline)
        assert dict(spec.parts[0].parameters)["tp"] == (1 if "system.tp" in changes else 2 if given else 4)


def test_what_would_be_written_otherwise_than_computed_is_not(tmp_path: Path) -> None:
    """A value that the command of a script sets a second time, in a form that is not found."""
    path, out = script(tmp_path), tmp_path / "tuned.sh"
    path.write_text(path.read_text().replace("trainer.total_epochs=15", f"trainer.total_epochs=15 {SEQS}=64"))
    configuration = Configuration("verl", (str(path),), Options(tmp_path, "h100"))
    with pytest.raises(ConfigError, match="would not read as what was computed"):
        configuration.write({SEQS: 512}, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [("a.yaml", "defaults: ../base.yaml"), ("a.yaml", "defaults:\n  - base.yaml"), ("a.sh", 'cd "$(dirname "$0")"'),
     ("a.sh", 'source "$(dirname -- "${BASH_SOURCE[0]}")/model.sh"')],
)  # fmt: skip
def test_what_names_files_by_where_it_lies_is_written_beside_itself(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    path.write_text(f"{line}\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=f"in the same folder, such as .*tuned{path.suffix}"):
        check_new(tmp_path / "other" / name, path)
    check_new(tmp_path / f"mine{path.suffix}", path)
    path.write_text("defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n")  # Hydra's, which veRL itself finds
    check_new(tmp_path / "other" / name, path)


def test_the_written_yaml_is_the_changed_configuration(tmp_path: Path) -> None:
    path, out = tmp_path / "own.yaml", tmp_path / "tuned.yaml"
    configuration = own(tmp_path)
    write_changes(path, {"engine.graphs": False, "workflow.responses": 2}, out)
    after = Configuration("", (str(out),), Options(tmp_path)).experiment({})
    assert after == configuration.experiment({}).__class__.model_validate(
        {**after.model_dump(exclude_unset=True), "systems": after.systems}
    )
    assert (after.engine.graphs, after.workflow.responses, after.workflow.prompts) == (False, 2, 16)


def log_of(folder: Path, factor: float, *more: str, steps: int = 12) -> Path:
    """A log of steps that take `factor` times what a run of the script is predicted to take, a critic's in parts."""
    configuration = Configuration("verl", (str(script(folder)), *more), Options(Path(), "h100"))
    means = tried(configuration, {}, Run(0)).means
    actor_s, critic = means["train_time_s"], bool(means["values_s"])
    lines = []
    for step in range(1, steps + 1):
        jitter = factor * (1 + 0.01 * (step % 3))
        values = {
            "timing_s/gen": means["gen_time_s"] * jitter, "timing_s/update_actor": actor_s * (1 - critic / 2) * jitter,
            **({"timing_s/values": means["values_s"] * jitter, "timing_s/update_critic": actor_s / 2 * jitter}
               if critic else {}),
            "timing_s/old_log_prob": means["old_log_prob_s"] * jitter,
            "timing_s/step": means["step_time_s"] * jitter, "response_length/mean": 400 + 10 * (step % 4),
            "response_length/max": 1024, "response_length/clip_ratio": 0.02, "prompt_length/mean": 120,
        }  # fmt: skip
        lines.append(f"step:{step} - " + " - ".join(f"{name}:{value:.4f}" for name, value in values.items()))
    path = folder / "run.log"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.usefixtures("nothing_beside")
def test_own_runs_are_checked_and_give_the_interval(tmp_path: Path, call: Command) -> None:
    path, log = script(tmp_path), log_of(tmp_path, 1.25)
    done = call("tune", str(path), "--gpu", "h100", "--check", str(log))
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "run.rlsim" / "checks.json").read_text())["checks"]
    assert found[0]["errors"]["step"] == pytest.approx(1 / 1.26 - 1, abs=0.04)
    assert found[0]["errors"]["old log-probs"] == pytest.approx(1 / 1.26 - 1, abs=0.04)
    assert "reference log-probs" not in found[0]["errors"], "the log has none"
    assert "over 1 run of yours" in done.out
    told = call("tune", str(path), "--gpu", "h100", "--trials", "2", "--workers", "1", "--json", "-", "--quiet")
    data = json.loads(told.out)
    assert data["own_error"] == pytest.approx(abs(found[0]["errors"]["step"]))
    assert not data["best"] or data["model_low"] == pytest.approx(data["gain"] / (1 + data["own_error"]))
    (tmp_path / "run.rlsim" / "checks.json").write_text("{")
    assert "is damaged" in call("tune", str(path), "--gpu", "h100", "--trials", "2", "--workers", "1").err


@pytest.mark.usefixtures("nothing_beside")
def test_a_critics_calls_are_checked_beside_the_actors(tmp_path: Path, call: Command) -> None:
    gae, path = "algorithm.adv_estimator=gae", script(tmp_path)
    done = call("tune", str(path), gae, "--gpu", "h100", "--check", str(log_of(tmp_path, 1.25, gae)))
    assert done.code == 0, done.err
    errors = json.loads((tmp_path / "run.rlsim" / "checks.json").read_text())["checks"][0]["errors"]
    assert {"values", "training"} <= errors.keys()
    assert list(errors.values()) == pytest.approx([1 / 1.26 - 1] * len(errors), abs=0.05)


def test_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    configuration = own(tmp_path, engine={"graphs": False})

    def interrupt(share: float, what: str) -> None:
        if what.startswith("21 tried"):
            raise KeyboardInterrupt

    found = tune(configuration, trials=60, workers=1, progress=interrupt)
    assert found.evaluated == 21
    assert found.best["engine.graphs"] is True
    assert all(not row["gains"] for row in found.assumptions)
    with pytest.raises(KeyboardInterrupt):
        tune(configuration, trials=60, workers=1, progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

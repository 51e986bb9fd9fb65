"""Configurations of veRL's asynchronous recipes, NeMo-RL, AReaL, slime and SkyRL as experiments, key by key."""

import ast
import contextlib
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from conftest import cases, invoke, sample
from hypothesis import given
from test_init import SCRIPT, some
from test_init import given as options

import rlsim
from rlsim.base.catalogue import data_dir
from rlsim.base.reading import read_yaml, shipped
from rlsim.base.schema import validate
from rlsim.cost.calibration import load_calibration
from rlsim.cost.step import Lookups
from rlsim.errors import CatalogueError, ConfigError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.ledger import ledger_of
from rlsim.experiment.schema import Experiment, TraceSpec, TrainingSpec, WorkflowSpec
from rlsim.frameworks import READERS as READ
from rlsim.frameworks.areal import GENERATES, TRAINS, Allocation, allocation, both_sides, from_areal
from rlsim.frameworks.draft import Draft, write_changes, written, yaml_text
from rlsim.frameworks.mapping import FUNCTIONS, Reading, names
from rlsim.frameworks.names import find_cluster
from rlsim.frameworks.nemo import from_nemo
from rlsim.frameworks.parts import ENGINES, Options, check
from rlsim.frameworks.settings import COUNT, FLAG, SHARE, TEXT, WHOLE, Kind, Settings
from rlsim.frameworks.skyrl import from_skyrl
from rlsim.frameworks.skyrl import takes as skyrl_takes
from rlsim.frameworks.slime import from_slime
from rlsim.frameworks.slime import takes as slime_takes
from rlsim.frameworks.sources import parsed, read_sources
from rlsim.frameworks.verl.config import takes as verl_takes
from rlsim.frameworks.verl.experiment import from_verl
from rlsim.frameworks.verl.run import TrainingArguments
from rlsim.models.hardware import load_gpu
from rlsim.policies.registry import load_policy
from rlsim.results.tune.space import axes_of
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import EngineConfig

#: What makes a made experiment small enough to be run here.
SMALL = {"workflow.steps": 1, "workflow.prompts": 8, "workflow.warmup": 0, "trace.cap": 128}


def system(draft: Draft) -> Any:
    return draft.data()["systems"][0]["use"]


def runs(draft: Draft, tmp_path: Path, **overrides: Any) -> None:
    """The draft as a file passes the check, and its configured system runs a step."""
    assert check(draft, tmp_path) == ""
    draft.write(tmp_path / "made.yaml")
    only = [{"name": "as-configured", "use": system(draft)}]
    result = rlsim.run(tmp_path / "made.yaml", seeds=1, overrides={**SMALL, **overrides, "systems": only})
    assert list(result.summary().system) == ["as-configured"]


# veRL -----------------------------------------------------------------------------------------------------------------

FULLY = sample("frameworks/fully_async.sh")


def verl(tmp_path: Path, *sources: str, text: str = FULLY, **more: Any) -> Draft:
    (tmp_path / "run.sh").write_text(text)
    return from_verl([str(tmp_path / "run.sh"), *sources], options(tmp_path, **more))


def without(text: str, *keys: str) -> str:
    """A script without some settings."""
    return " ".join(word for word in text.split(" ") if not word.startswith(keys))


ONE_STEP = without(FULLY, "async_training.", "rollout.total").replace("train_batch_size=0", "train_batch_size=64")
BOTH = without(FULLY, "async_training.", "rollout.").replace("train_batch_size=0", "train_batch_size=32")
TOGETHER = without(BOTH, "actor_rollout_ref.hybrid_engine").replace("$((8 - n_gpus_rollout))", "8")


@cases("frameworks", "nodes of both sides")
def test_nodes_of_both_sides(tmp_path: Path, training: list[int], rollout: list[int], cluster: str) -> None:
    sides = {"trainer": training, "rollout": rollout}
    settings = [f"{side}.nnodes={n}" for side, (n, _) in sides.items()]
    settings += [f"{side}.n_gpus_per_node={gpus}" for side, (_, gpus) in sides.items()]
    draft = verl(tmp_path, *settings, text=ONE_STEP, gpu=cluster.rpartition("x")[2])
    assert draft.data()["cluster"] == cluster
    assert system(draft)[0]["one_step_off"]["rollout_gpus"] == rollout[0] * rollout[1]
    named = verl(tmp_path, *settings, text=ONE_STEP, gpu=None, cluster=cluster)
    assert named.data()["cluster"] == cluster


def test_trainers_of_v1(tmp_path: Path) -> None:
    given = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1",
             "actor_rollout_ref.rollout.n_gpus_per_node=2")  # fmt: skip
    apart = verl(tmp_path, *given, "trainer.v1.separate_async.num_warmup_batches=2", text=BOTH)
    ahead = {"staleness_threshold": 2.0, "trigger_parameter_sync_step": 4, "per_replica": None}
    assert some(system(apart)[0]["verl_fully_async"], ahead) == ahead
    assert apart.data()["workflow"]["prompts"] == 4 * 8
    assert apart.data()["workflow"]["old_log_probs"] is True  # of v1 this is off: bypass_mode
    runs(apart, tmp_path)
    strict = verl(tmp_path, *given, "trainer.v1.sampler.max_off_policy_strategy=wait",
                  "algorithm.filter_groups.enable=True", text=BOTH)  # fmt: skip
    for said in ("strategy (as given) = wait", "responses every 2 s", "dropped prompts give their places"):
        assert any(said in item for item in strict.missing), said
    assert "dynamic_sampling" in system(strict)
    switch = "trainer.v1.separate_async.hybrid_rollout."
    lent = verl(tmp_path, *given, f"{switch}enable_switch=True", f"{switch}switch_threshold_ratio=0.5", text=BOTH)
    assert system(lent)[-1] == {"hybrid_rollout": {"until": 0.5}}
    assert any("adaptive_switch_threshold" in item for item in lent.missing)
    assert check(lent, tmp_path) == ""
    draft = verl(tmp_path, "trainer.v1.trainer_mode=colocate_async", text=TOGETHER)
    assert system(draft) == [{"colocated_async": {"tp": 1, "active": 2}}, "async_reward"]
    assert check(draft, tmp_path) == ""
    text = without(FULLY, "rollout.", "actor_rollout_ref.hybrid_engine", "async_training.")
    with pytest.raises(ConfigError, match=r"async_training.require_batches, but no GPUs of generation"):
        verl(tmp_path, "async_training.require_batches=1", text=text)


# NeMo-RL --------------------------------------------------------------------------------------------------------------

BASE = sample("frameworks/nemo.yaml")
ASYNC = sample("frameworks/nemo_async.yaml")


def nemo(tmp_path: Path, *sources: str, text: str = BASE, **more: Any) -> Draft:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "mine.yaml").write_text(text)
    return from_nemo([str(tmp_path / "mine.yaml"), *sources], options(tmp_path, **more))


def test_pat_switches_within_a_node(tmp_path: Path) -> None:
    tp = "policy.generation.vllm_cfg.tensor_parallel_size="
    assert [one["name"] for one in nemo(tmp_path, tp + "2").data()["systems"]] == ["as-configured", "best-tp", "pat"]
    over_nodes = nemo(tmp_path, tp + "16", "cluster.num_nodes=2", "policy.model_name=Qwen/Qwen3-235B-A22B")
    assert [one["name"] for one in over_nodes.data()["systems"]] == ["as-configured", "best-tp"]


@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        ([], "together"),
        (["policy.generation.vllm_cfg.async_engine=true"], None),
        (["policy.generation.backend=sglang"], "together"),
        (["policy.generation.backend=sglang", "++policy.generation.use_async_rollouts=true"], None),
    ],
)
def test_nemos_turns(settings: list[str], turns: str | None, tmp_path: Path) -> None:
    """What is generated is limited by the turn, and all take one at once where rollouts are not asynchronous."""
    lengths = ("policy.max_total_sequence_length=24000", "policy.generation.max_new_tokens=512")
    data = nemo(tmp_path, "grpo.max_rollout_turns=4", *lengths, *settings, trace="swe-agents").data()
    assert (data["trace"]["cap"], data["trace"]["max_model_len"]) == (24000, 24000)
    assert data["environment"] == {"max_turns": 4} | ({"turns": turns} if turns else {})


def test_inheritance(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {x: 1, y: 2, z: {u: 1}}\nb: 1\nc: {x: 1}\nd: {x: 5}")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\nb: {y: '${a.x}'}\nc: null")
    (tmp_path / "c.yaml").write_text("defaults: [a.yaml, ./b.yaml]\na: {x: 3, z: {_override_: true, v: 2}}\nd: {}")
    config = read_sources([str(tmp_path / "c.yaml"), "++a.y=${div:${a.x},2}"], "it", "--from")
    assert config.given == {"a.x": 3, "a.y": 1.5, "a.z.v": 2, "b.y": 3, "c": None, "d.x": 5}
    assert config.origin["a.x"] == "c.yaml:2"
    assert config.origin["b.y"] == "b.yaml:2"
    assert config.inherited == {"a.yaml", "b.yaml"}


# AReaL ----------------------------------------------------------------------------------------------------------------

AREAL = sample("frameworks/areal.yaml")


def areal(tmp_path: Path, *sources: str, text: str = AREAL, **more: Any) -> Draft:
    (tmp_path / "mine.yaml").write_text(text)
    return from_areal([str(tmp_path / "mine.yaml"), *sources], options(tmp_path, **more))


@cases("frameworks", "allocation modes")
def test_allocation_modes(mode: str, generation: list[Any], training: list[Any], shared: bool) -> None:
    assert both_sides(mode, "here") == (Allocation(*generation), Allocation(*training), shared)


@pytest.mark.parametrize(
    "text", ["sglang", "sglang:x4", "fsdp:d4", "sglang:d4d2", "sglang:d4t2m2", "sglang:d0", "d4", ""]
)
def test_what_is_no_allocation(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        allocation(text, "here", GENERATES)
    with pytest.raises(ConfigError, match="expected generation and training"):
        both_sides(text, "here")
    assert allocation("megatron:d2p2t4e4", "here", TRAINS) == Allocation("megatron", 2, 4, 2, 1, 4)
    assert allocation("megatron:d2p2t4e4", "here", TRAINS).gpus == 16  # experts take no further ones


def test_older_areal(tmp_path: Path) -> None:
    text = AREAL.replace('  backend: "sglang:d2t2"\n', "").replace('  backend: "fsdp:d2t2"\n', "")
    text = text.replace('ref: {backend: "${actor.backend}", ', "ref: {")
    draft = areal(tmp_path, "allocation_mode=sglang.d6p1t1+d2p1t1", text=text)
    assert system(draft)[0]["areal"]["rollout_gpus"] == 6
    assert system(draft)[0]["areal"]["tp"] == 1
    colocated = ["allocation_mode=vllm:d8t1|fsdp:d8t1", "rollout.max_head_offpolicyness=0"]
    assert system(areal(tmp_path, *colocated, text=text)) == [{"verl": {"tp": 1}}]
    with pytest.raises(ConfigError, match="asynchronous training on the GPUs that generate is not simulated"):
        areal(tmp_path, colocated[0], text=text)


def test_training_may_be_cut_otherwise_than_generation(tmp_path: Path) -> None:
    draft = areal(tmp_path, "rollout.backend=sglang:d2", "actor.backend=fsdp:d1t4", "cluster.n_gpus_per_node=6")
    assert draft.data()["cluster"] == "6xh100"
    assert draft.data()["training"]["tp"] == 4
    assert "TP 4" not in check(draft, tmp_path)
    assert check(areal(tmp_path, "rollout.backend=sglang:d2", "actor.backend=fsdp:d3t2"), tmp_path) == ""


def test_areals_micro_batches_by_count(tmp_path: Path) -> None:
    one, two = (
        areal(tmp_path, "actor.mb_spec.max_tokens_per_mb=null", f"actor.mb_spec.n_mbs={count}").data()["training"]
        for count in (1, 2)
    )
    share = 16 * 4 // (2 * 2)  # a rank's share of a mini-batch
    assert (one["micro_batch_sequences"], two["micro_batch_sequences"]) == (share, share // 2)


def test_areals_legacy_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"legacy layout .* group_size is gconfig.n_samples; .*cluster.n_nodes"):
        areal(tmp_path, text=sample("frameworks/areal_legacy.yaml"))


# slime ----------------------------------------------------------------------------------------------------------------

#: After slime's scripts: the GPUs of the machine are counted, the model's arguments are in a file that lies elsewhere.
SLIME = sample("frameworks/slime.sh")
ASYNC_SLIME = SLIME.replace("--colocate", "--rollout-num-gpus 4").replace("train.py", "train_async.py")


def slime(tmp_path: Path, *sources: str, text: str = SLIME, **more: Any) -> Draft:
    (tmp_path / "run-mine.sh").write_text(text)
    return from_slime([str(tmp_path / "run-mine.sh"), *sources], options(tmp_path, **more))


def test_a_value_that_would_have_to_be_run_is_told_where_nothing_needs_it(tmp_path: Path) -> None:
    draft = slime(tmp_path, "--seed=$(date +%s)")
    assert any("$(seq 16 8 256) would have to be run: CUDA graphs of these batches" in item for item in draft.missing)
    assert "--seed" in draft.unread


def test_a_plain_list_of_flags_is_read_as_well(tmp_path: Path) -> None:
    flags = "\n".join(
        line for line in SLIME.split("\n") if re.match(" +--(?!runtime|actor)", line) and "\\" not in line
    )
    draft = slime(tmp_path, "--colocate", "--hf-checkpoint=Qwen/Qwen2.5-1.5B", text=flags)
    assert draft.data()["training"]["micro_batch_tokens"] == 8192
    assert system(draft) == [{"verl": {"tp": 2}}]


def test_changes_are_written_into_a_script_of_flags(tmp_path: Path) -> None:
    before = slime(tmp_path).data()
    changes = {
        "--rollout-num-gpus-per-engine": 4, "--recompute-granularity": None, "--recompute-method": None,
        "--recompute-num-layers": None, "--colocate": False, "program": "train_async.py", "--rollout-num-gpus": 4,
        "--actor-num-gpus-per-node": 4, "--use-rollout-logprobs": True,
    }  # fmt: skip
    write_changes(tmp_path / "run-mine.sh", changes, tmp_path / "tuned.sh")
    given = [f"{key}={yaml_text(value)}" for key, value in changes.items()]
    tuned = from_slime([str(tmp_path / "tuned.sh")], options(tmp_path)).data()
    expected = slime(tmp_path, *given).data()
    assert {**tuned, "name": ""} == {**expected, "name": ""} != {**before, "name": ""}
    text = (tmp_path / "tuned.sh").read_text()
    assert "recompute" not in text
    assert "#--hf-checkpoint /root/Qwen3-4B" in text


def test_what_stands_behind_a_flag_without_values_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 train.py --colocate $MORE --rollout-num-gpus 8 $MORE")
    write_changes(tmp_path / "run.sh", {"--colocate": False}, tmp_path / "tuned.sh")
    assert " ".join((tmp_path / "tuned.sh").read_text().split()) == "python3 train.py $MORE --rollout-num-gpus 8 $MORE"


# SkyRL ----------------------------------------------------------------------------------------------------------------

ENGINE = "generator.inference_engine."
SKYRL = sample("frameworks/skyrl.sh")
APART_SKYRL = SKYRL.replace("colocate_all=true", "colocate_all=false").replace("NUM_GPUS:=8", "NUM_GPUS:=4")
FULLY_SKYRL = APART_SKYRL.replace("trainer.strategy", "trainer.fully_async.enabled=true trainer.strategy")


def skyrl(tmp_path: Path, *sources: str, text: str = SKYRL, **more: Any) -> Draft:
    (tmp_path / "run-mine.sh").write_text(text)
    return from_skyrl([str(tmp_path / "run-mine.sh"), *sources], options(tmp_path, **more))


@pytest.mark.parametrize("reader", [verl, nemo, slime, skyrl])
def test_what_tune_proposes_of_drafts_is_read_so(reader: Callable[..., Draft], tmp_path: Path) -> None:
    """Of a configuration without drafts, those with an assumed acceptance; of one with them other numbers, and none."""

    def data(*changes: Mapping[str, Any]) -> Any:
        return reader(tmp_path, *(f"{key}={written(value)}" for one in changes for key, value in one.items())).data()

    def proposed(*changes: Mapping[str, Any]) -> Any:
        """By what they alter: method and tokens of each option, None where nothing is drafted."""
        found = dict[str, list[Any]]()
        for axis in axes_of(LoadedExperiment.of(validate(data(*changes), Experiment), tmp_path), ["drafts"]):
            for option in axis.options if "specul" in axis.name else ():
                spec = validate(data(*changes, option), Experiment).engine.speculation
                one = spec and (spec.method, spec.num_speculative_tokens)
                found.setdefault(axis.alters, []).append(one)
        return found

    flags = reader is slime  # SGLang's
    guesses = proposed()
    assert guesses == {"drafts": [("eagle3", 1), ("eagle3", 3), *[("ngram", 3)] * (not flags)]}
    loaded = LoadedExperiment.of(validate(data(), Experiment), tmp_path)
    first = next(axis for axis in axes_of(loaded, ["drafts"]) if axis.alters == "drafts").options[1]
    assert proposed(first) == {"": [*(("eagle3", k) for k in (1, 2, 3, 5)), None]}


def test_skyrls_limits_of_a_turn_and_of_a_trajectory(tmp_path: Path) -> None:
    lengths = skyrl(tmp_path).data()
    assert (lengths["trace"]["cap"], lengths["trace"]["max_model_len"]) == (4 * 512, 3072 + 512)
    acts = partial(skyrl, tmp_path, "generator.max_input_length=24000", trace="swe-agents")
    data = acts().data()
    assert (data["trace"]["cap"], data["trace"]["max_model_len"]) == (24512, 24512)  # what tools return counts
    assert data["environment"] == {"max_turns": 4, "workers": 16}
    assert not any("max_turns" in item for item in acts().missing)
    alone = acts("environment.skyrl_gym.max_env_workers=0").data()["environment"]
    assert alone["workers"] == 1  # the event loop itself
    text = without(SKYRL.replace("skyrl.train.entrypoints.main_base", "mine.main_mine"), "environment.")
    own = acts(text=text)  # with a generator of its own
    assert own.data()["environment"] == {"max_turns": 4}
    assert any("mine.main_mine is read as" in note for note in own.notes)
    shorter = skyrl(tmp_path, f"{ENGINE}engine_init_kwargs.max_model_len=2048")
    assert shorter.data()["trace"]["max_model_len"] == 2048


def test_skyrls_keys_of_before(tmp_path: Path) -> None:
    """A layout without `inference_engine`, in YAML: with the defaults of its time."""
    old = re.sub(r"generator\.inference_engine\.num_engines", "generator.num_inference_engines", SKYRL)
    old = re.sub(r"generator\.inference_engine\.tensor", "generator.inference_engine_tensor", old)
    draft = skyrl(tmp_path, "+generator.engine_init_kwargs.max_model_len=2048", text=old)
    new = skyrl(tmp_path, f"{ENGINE}enforce_eager=true", f"{ENGINE}engine_init_kwargs.max_model_len=2048")
    told = ("framework", "sources")
    assert {**draft.data(), **dict.fromkeys(told)} == {**new.data(), **dict.fromkeys(told)}
    assert draft.data()["framework"] == "SkyRL 0.2"
    assert any("releases up to 0.2 take" in note for note in draft.notes)
    (tmp_path / "mine.yaml").write_text("""
defaults: [_self_, {megatron_config@trainer.policy.megatron_config: policy}]
trainer: {placement: {policy_num_gpus_per_node: 8}, train_batch_size: 256, critic: {model: {path: null}}}
generator: {num_inference_engines: 8, model_name: "${trainer.policy.model.path}", enforce_eager: false}
""")
    read = from_skyrl([str(tmp_path / "mine.yaml"), "trainer.train_batch_size=512"], options(tmp_path))
    assert read.data()["workflow"]["prompts"] == 512
    assert any("megatron_config@trainer" in note for note in read.notes)
    assert "graphs" not in read.data()["engine"]


# GPUs and networks that the catalogue has not -------------------------------------------------------------------------


def test_a_gpu_is_described_by_one_that_it_is_like(tmp_path: Path) -> None:
    options = Options.of(tmp_path, "mine", "h100,48GB,864GB/s,494.7T")
    draft = slime(tmp_path, gpu=options.gpu, described=options.described, network="100Gb")
    assert check(draft, tmp_path) == ""
    loaded = LoadedExperiment.of(validate(draft.data(), Experiment), tmp_path)
    gpu, known = loaded.cluster.gpu_at(0), load_gpu("h100-sxm")
    assert (gpu.name, gpu.like, gpu.memory_bytes, gpu.memory_bytes_per_s) == ("mine", "h100-sxm", 48e9, 864e9)
    assert gpu.fp8_flop_per_s == pytest.approx(known.fp8_flop_per_s / 2, rel=1e-3)  # in proportion to bf16
    assert (gpu.sm_count, gpu.l2_bytes) == (known.sm_count, known.l2_bytes)
    inter = loaded.cluster.around([0]).inter
    assert (inter.bytes_per_s, inter.shared_by_gpus) == (12.5e9, 8)
    calibration, source = loaded.calibrations["mine"], load_calibration("h100-sxm-sglang")
    assert calibration.reference.memory_bytes_per_s == 864e9
    assert calibration.operators == source.operators  # shares of the peaks
    assert "nothing is measured on it" in calibration.provenance.notes[0]
    rows = {row.name: row.taken for row in ledger_of(loaded, Lookups()).assumed}
    assert rows["link inside a node"] == "450 GB/s a GPU, as nodes of h100-sxm have"
    assert loaded.cluster.joined_at(1.0, 0.07).around([0]).intra.bytes_per_s == pytest.approx(31.5e9)
    assert {"cluster.gpu", "calibration"} <= set(draft.data()["sources"]["assumed"])
    runs(draft, tmp_path)
    without = Options.of(tmp_path, "mine", "l40s,80GB")
    draft = slime(tmp_path, gpu=without.gpu, described=without.described, network="100Gb")
    own = ledger_of(LoadedExperiment.of(validate(draft.data(), Experiment), tmp_path), Lookups()).assumed
    assert [row.name for row in own if row.key == "costs.link"] == ["collectives over PCIe"], "one row says it"


def test_a_network_alone_is_written_out(tmp_path: Path) -> None:
    cluster = slime(tmp_path, "--actor-num-nodes=2", network="25Gb/s").data()["cluster"]
    assert (cluster["name"], cluster["gpu"], cluster["nodes"]) == ("2x8xh100", "h100-sxm", 2)
    assert cluster["inter"]["bytes_per_s"] == "25Gb/s"
    options = Options.of(tmp_path, None, "l40s 24GB")
    assert (options.gpu, options.described) == ("l40s", ("l40s-like", "24GB"))
    with pytest.raises(CatalogueError, match="l40s"):
        find_cluster("l40s", 2, 8)  # the catalogue knows of no network
    found = find_cluster("l40s", 2, 8, network=True)
    assert (found.nodes, found.gpus_per_node, found.gpu.name) == (2, 8, "l40s")


# Settings and mistakes ------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[..., Draft]] = {
    "verl": partial(verl, text=SCRIPT),
    "fully async": verl,
    "fully async by default": partial(verl, text=without(FULLY, "async_training.")),
    "one step off": partial(verl, text=ONE_STEP),
    "recipe of partial rollouts": partial(verl, text=TOGETHER),
    "nemo": nemo,
    "nemo async": partial(nemo, text=ASYNC),
    "areal": areal,
    "slime": slime,
    "slime async": partial(slime, text=ASYNC_SLIME),
    "slime apart": partial(slime, text=ASYNC_SLIME.replace("train_async", "train")),
    "skyrl": skyrl,
    "skyrl apart": partial(skyrl, text=APART_SKYRL),
    "skyrl one step off": partial(skyrl, text=APART_SKYRL.replace("main_base", "main_async")),
    "skyrl fully async": partial(skyrl, text=FULLY_SKYRL),
}


@cases("frameworks", "a configuration becomes an experiment")
def test_a_configuration_becomes_an_experiment(
    tmp_path: Path,
    reader: str,
    settings: list[str],
    whole: dict[str, Any],
    parts: dict[str, Any],
    says: dict[str, list[str]],
) -> None:
    draft = READERS[reader](tmp_path, *settings)
    data = draft.data() | {"system": system(draft)}
    assert some(data, whole) == whole
    assert {section: some(data[section], keys) for section, keys in parts.items()} == parts
    text = "\n".join([draft.text(), *draft.notes])
    assert not [part for part in says.get("text", ()) if part not in text]
    assert draft.missing == says.get("missing", [])
    assert {*says.get("unread", ())} <= {*draft.unread}
    runs(draft, tmp_path)


@cases("frameworks", "settings")
def test_settings(
    tmp_path: Path, reader: str, settings: list[str], section: str, expected: dict[str, Any], said: list[str]
) -> None:
    """`said` are parts of what is noted or not represented; what is expected as null is not there."""
    draft = READERS[reader](tmp_path, *settings)
    data = draft.data()
    data["system"] = next(iter(system(draft)[0].values()))
    assert some(data.get(section, {}), expected) == expected
    for part in said:
        assert any(part in text for text in (*draft.notes, *draft.missing)), part
    assert check(draft, tmp_path) == ""


@cases("frameworks", "what is not started")
def test_what_a_framework_does_not_start_with(
    tmp_path: Path, reader: str, settings: list[str], said: str | None
) -> None:
    notes = [note for note in READERS[reader](tmp_path, *settings).notes if "does not start" in note]
    assert any(said in note for note in notes) if said else not notes


@cases("frameworks", "mistakes")
def test_mistakes(tmp_path: Path, reader: str, settings: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(RlsimError, match=message):
        READERS[reader](tmp_path, *settings, **more)


# Both ways ------------------------------------------------------------------------------------------------------------

#: A script that has some of its words in quotes.
QUOTED = SCRIPT.replace("data.train_batch_size=64", "'data.train_batch_size=64'").replace(
    "trainer.n_gpus_per_node=8", '"trainer.n_gpus_per_node=8"'
)
#: Of each framework a configuration, the end of its file's name, and what reads its settings.
SETTINGS: dict[str, tuple[str, str, Callable[[list[str]], Settings]]] = {
    "verl": (QUOTED, ".sh", lambda files: read_sources(files, "veRL", "--from-verl", "verl", verl_takes)),
    "nemo": (BASE, ".yaml", lambda files: read_sources(files, "NeMo-RL", "--from-nemo", "nemo")),
    "areal": (AREAL, ".yaml", lambda files: read_sources(files, "AReaL", "--from-areal", "areal")),
    "slime": (SLIME, ".sh", lambda files: read_sources(files, "slime", "--from-slime", "slime", slime_takes)),
    "skyrl": (SKYRL, ".sh", lambda files: read_sources(files, "SkyRL", "--from-skyrl", "skyrl", skyrl_takes)),
}
#: Values of settings, by the kinds that most have.
OF_KIND = {
    FLAG: st.booleans(), WHOLE: st.integers(1, 10**9), COUNT: st.integers(0, 10**9), SHARE: st.floats(0.01, 1.0),
    TEXT: st.sampled_from(("org/Model-1.5B", "a.b_c-d", "x1")),
}  # fmt: skip


@pytest.mark.parametrize("of", SETTINGS)
@given(data=st.data())
@hypothesis.settings(max_examples=8, deadline=None)
def test_changes_that_are_written_are_read_again_and_nothing_else_changes(of: str, data: st.DataObject) -> None:
    text, end, read = SETTINGS[of]
    known = {keys[0]: kind for kind, keys in names(of).values() if kind in OF_KIND and keys[0] != "program"}
    chosen = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=6, unique=True))
    changes = {key: data.draw(OF_KIND[known[key]], label=key) for key in chosen}
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / f"own{end}", Path(folder) / f"tuned{end}"
        before.write_text(text)
        write_changes(before, changes, after)
        was, now = read([str(before)]), read([str(after)])
    off = {key for key, value in changes.items() if key.startswith("--") and value is False}  # such flags are taken out
    assert {key: now.given.get(key, False) for key in changes} == changes
    assert now.given.keys() == (was.given | changes).keys() - off
    assert now.doubts.keys() == was.doubts.keys() - changes.keys()


# The command ----------------------------------------------------------------------------------------------------------


#: Valid configurations of each reader; what it asks for follows from reading them.
CONFIGURATIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "verl": (verl, (FULLY, SCRIPT, SCRIPT + " actor_rollout_ref.actor.strategy=megatron")),
    "nemo": (nemo, (ASYNC, BASE)),
    "areal": (areal, (AREAL,)),
    "slime": (slime, (SLIME, ASYNC_SLIME.replace("${NUM_GPUS}", "4"))),
    "skyrl": (skyrl, (SKYRL, FULLY_SKYRL)),
}
#: A value of each kind that a setting may be given by mistake.
VALUES = ("auto", "'10'", "[1]", "{a: 1}", ".nan", "x" * 300)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_setting_that_is_asked_for_is_refused_or_taken_whatever_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, every: int
) -> None:
    """One or two kinds of values for each setting, or all of them."""
    read, texts = CONFIGURATIONS[name]
    asked, walked, get = set[str](), set[str](), Settings.get

    def noting(self: Settings, kind: Kind[Any], *keys: str) -> Any:
        asked.update(self.keys(*keys))
        return get(self, kind, *keys)

    for text in texts:
        # What is the same for all is read once.
        monkeypatch.setattr("rlsim.frameworks.sources.read_yaml", cache(read_yaml))
        monkeypatch.setattr("rlsim.frameworks.sources.parsed", cache(parsed))
        with monkeypatch.context() as patched:
            patched.setattr(Settings, "get", noting)
            read(tmp_path, text=text)
        for number, key in enumerate(sorted(asked - walked)):
            for value in VALUES[number % every :: every]:
                with contextlib.suppress(RlsimError):
                    read(tmp_path, f"{key}={value}", text=text)
        walked |= asked
    assert len(walked) > 50


@pytest.mark.parametrize(
    ("option", "text", "program"),
    [
        ("--from-nemo", BASE, "NeMo-RL 0.7"),
        ("--from-areal", AREAL, "AReaL 1.0"),
        ("--from-verl", FULLY, "veRL 0.9"),
        ("--from-slime", SLIME, "slime 0.3"),
        ("--from-skyrl", SKYRL, "SkyRL 0.3"),
    ],
)
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, text: str, program: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = "mine.sh" if option in ("--from-verl", "--from-slime", "--from-skyrl") else "mine.yaml"
    Path(name).write_text(text)
    done = invoke("init", option, name, "--gpu", "h100", "--out", "made.yaml")
    assert done.exit_code == 0, done.output
    assert "run it: rlsim run made.yaml" in done.output
    assert f"\n  {program}'s default: [" in Path("made.yaml").read_text()  # of `sources`
    assert invoke("check", "made.yaml").exit_code == 0
    named = invoke("init", "other", option, name, "--cluster", "8xh100", "--model", "qwen3-8b")
    assert "other.yaml" in named.output
    assert "model: qwen3-8b" in Path("other.yaml").read_text()


# The tables of mappings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", READ)
def test_every_row_of_a_mapping_names_settings_facts_and_keys_that_there_are(of: str) -> None:
    head = (data_dir("frameworks") / f"{of}.yaml").read_text().partition("\n- ")[0]
    facts = {*re.findall(r"`(\w+)(?:\(\))?`", head), *Reading(of, Settings()).facts}
    facts |= {row["fact"] for row in shipped(f"frameworks/{of}.yaml") if "fact" in row}
    settings = {name for one in (of, *(f"{of}-{engine}" for engine in ENGINES)) for name in names(one)}
    blocks = {"workflow": WorkflowSpec, "training": TrainingSpec, "engine": EngineConfig, "run": TrainingArguments,
              "environment": EnvironmentConfig, "trace": TraceSpec}  # fmt: skip
    for row in shipped(f"frameworks/{of}.yaml"):
        said = " ".join(str(row.get(key, "")) for key in ("says", "value", "note", "missing", "refused"))
        sources = [row["from"]] if isinstance(row.get("from"), str) else row.get("from", [])
        asked = {*sources, *re.findall(r"\[(\w+)\]", said)}
        for expression in (
            row.get("if", "True"),
            row.get("is", "True"),
            *re.findall(r"\{([^{}]+?)(?::[^{}:']*)?\}", said),
        ):
            asked |= {node.id for node in ast.walk(ast.parse(expression.strip())) if isinstance(node, ast.Name)}
        assert asked <= settings | facts | FUNCTIONS.keys(), row
        section, _, key = row.get("ours", "").rpartition(".")
        if section in blocks:
            assert key in blocks[section].model_fields or (section, key) in (
                ("run", "gradients"),
                ("run", "weights"),
            ), row
        elif section == "draft":
            assert key in ("gpus", "per_node", "tp", "engine", "use", "cap", "prompts", "memory"), row
        elif section:
            assert key in load_policy(section).model_fields, row

"""`rlsim init`: a starter, and veRL configurations as experiments, with where each value is from."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, invoke, loaded_of, placed_of, sample, tables
from test_calibrate_import import nccl_text

import rlsim
from rlsim.base.reading import read_yaml
from rlsim.base.refusals import code_of
from rlsim.calibrate.importers import nccl_tests
from rlsim.cli.starter import starter
from rlsim.errors import CatalogueError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.refusals import conditions, starts_of
from rlsim.experiment.schema import Experiment
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.mapping import own_limits
from rlsim.frameworks.names import find_cluster, find_model, nearest_trace
from rlsim.frameworks.parts import Options, check
from rlsim.frameworks.settings import Unknown
from rlsim.frameworks.shell import read_script
from rlsim.frameworks.verl.config import read_config, takes
from rlsim.frameworks.verl.experiment import from_verl
from rlsim.frameworks.verl.settings import VERSIONS, defaults, release
from rlsim.models.hardware import load_cluster, load_gpu
from rlsim.models.model import load_model

SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
SCRIPT = sample("frameworks/verl.sh")


def draft_of(tmp_path: Path, *sources: str, text: str = SCRIPT, version: str = VERSIONS[-1], **options: Any) -> Draft:
    (tmp_path / "run.sh").write_text(text)
    return from_verl([str(tmp_path / "run.sh"), *sources], given(tmp_path, **options), version)


def given(folder: Path, **options: Any) -> Options:
    return Options(folder, **{"gpu": "h100", "trace": "rollpacker-math", **options})


def some(data: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """What the data have at the keys that are expected."""
    return {key: data.get(key) for key in expected}


# Shell ----------------------------------------------------------------------------------------------------------------


@cases("init", "what a script sets")
def test_what_a_script_sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    given: dict[str, str],
    expected: dict[str, Any],
    said: str | None,
) -> None:
    """A value, or with its line, or why it is not known; `said` stands in a note. Nothing is run for it."""
    monkeypatch.chdir(tmp_path)
    script = read_script(sample(text[1:]) if text[0] == "@" else text, "run.sh", given, takes)
    found = {override.key: override for override in script.overrides}
    for key, value in expected.items():
        if isinstance(value, dict):
            assert isinstance(found[key].value, Unknown)
            assert all(part in str(getattr(found[key].value, name)) for name, part in value.items())
        else:
            assert ([found[key].value, found[key].line] if isinstance(value, list) else found[key].value) == value
    assert said is None or any(said in note for note in script.notes)
    assert not [*tmp_path.iterdir()]


def test_what_slurm_tells_a_script(tmp_path: Path) -> None:
    lines = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:8\n"
    text = lines + SCRIPT.replace("${NNODES:-1}", "$SLURM_JOB_NUM_NODES").replace(
        "=8 \\\n", "=$SLURM_GPUS_ON_NODE \\\n"
    )
    draft = draft_of(tmp_path, text=text)
    assert draft.data()["cluster"] == "2x8xh100"
    assert any("SLURM_JOB_NUM_NODES = 2, as its line '#SBATCH --nodes=2' says" in note for note in draft.notes)
    assert draft_of(tmp_path, "SLURM_JOB_NUM_NODES=4", text=text).data()["cluster"] == "4x8xh100"


@cases("init", "what is no rl training that is simulated")
def test_what_is_no_rl_training_that_is_simulated(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft_of(tmp_path, text=text)


@cases("init", "what no shell reads")
def test_what_no_shell_reads_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_script(text, "run.sh", {}, takes)


# From veRL ------------------------------------------------------------------------------------------------------------


def test_a_script_becomes_an_experiment_that_runs(tmp_path: Path) -> None:
    draft = draft_of(tmp_path)
    draft.write(tmp_path / "made.yaml")
    experiment, _, folder = load_experiment(tmp_path / "made.yaml")
    assert experiment.cluster == "8xh100"
    assert experiment.model == "qwen2.5-7b"
    assert experiment.calibration == "h100-sxm-sglang"
    assert experiment.workflow.algorithm == "grpo"
    assert (experiment.workflow.prompts, experiment.workflow.responses) == (64, 8)
    assert experiment.workflow.reference
    assert experiment.trace.cap == 4096
    assert experiment.training.micro_batch_tokens == 20000
    assert experiment.training.mini_batches == 4
    assert experiment.training.offload
    assert experiment.engine.max_num_seqs == 256  # veRL 0.9's default
    assert experiment.memory_utilization == 0.6  # nothing of training stays on the GPU
    assert experiment.routing == "contiguous"
    assert check(draft, folder) == ""
    small = {"workflow.steps": 1, "workflow.prompts": 2, "trace.cap": 256, "trace.path": "rollpacker-math"}
    result = rlsim.run(tmp_path / "made.yaml", seeds=1, overrides=small)
    assert list(result.summary().system) == ["as-configured", "verl-best", "pat"]
    assert set(result.responses.query("system == 'as-configured'").tp_history) == {"2"}


def test_every_value_says_where_it_is_from(tmp_path: Path) -> None:
    text = draft_of(tmp_path, trace=None).text()
    lines = SCRIPT.splitlines()
    for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n", "data.max_response_length"):
        number = next(i for i, line in enumerate(lines, 1) if f"{key}=" in line)
        assert f"{key} (run.sh:{number})" in text
    assert "actor_rollout_ref.rollout.max_num_seqs: veRL 0.9's default" in text
    assert "Qwen2.5-7B-Instruct has the shape of qwen2.5-7b" in text
    assert "give --trace for your own lengths" in text.replace("\n#   ", " ")


def test_devices_and_nodes_of_another_maker(tmp_path: Path) -> None:
    """A script that asks for Ascend's plugin runs on GPUs here, and a node of 16 devices is two of 8."""
    asks = "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\n"
    chosen = 'if [ "$DEVICE" = npu ]; then\n  PER_NODE=7\nelse\n  PER_NODE=16\nfi\n'
    text = asks + chosen + SCRIPT.replace("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node=$PER_NODE")
    draft = draft_of(tmp_path, text=text)
    assert draft.data()["cluster"] == "2x8xh100"
    assert any("nodes of 16" in note for note in draft.notes)


@cases("init", "scripts of recipes and places that are not known")
def test_scripts_of_recipes_and_places_that_are_not_known(tmp_path: Path, old: str, new: str, said: str) -> None:
    draft = draft_of(tmp_path, text=SCRIPT.replace(old, new))
    assert draft.data()["model"] == "qwen2.5-7b"
    notes = [note for note in draft.notes if "main_ppo" in note]
    assert said in notes[0] if said else not notes


def test_filtered_groups_and_keys_that_are_not_known(tmp_path: Path) -> None:
    unknown = "actor_rollout_ref.rollout.engine_kwargs.sglang.nothing_known"
    draft = draft_of(tmp_path, "algorithm.filter_groups.enable=True", f"{unknown}=3")
    for system in draft.data()["systems"]:  # another batch as long as too few prompts count
        assert system["use"][1:3] == ["dynamic_sampling", {"gen_batches": {"prompts": 64}}]
    assert draft.unread == [unknown]
    assert "# Not represented" in draft_of(tmp_path, "trainer.test_freq=5").text()


@cases("init", "settings of verl")
def test_settings_of_verl(
    tmp_path: Path, settings: list[str], options: dict[str, Any], expected: dict[str, Any], said: str | None
) -> None:
    """`said` stands among what is noted, not represented or does not fit; what is expected as null is not there."""
    draft = draft_of(tmp_path, *settings, **options)
    found, unfit = draft.data(), check(draft, tmp_path)
    for section, values in expected.items():
        assert (some(found[section], values) if isinstance(values, dict) else found.get(section)) == values
    assert said is None or said in "\n".join([*draft.notes, *draft.missing, unfit])
    assert said is not None or draft.missing == draft_of(tmp_path).missing
    assert not unfit or (said is not None and said in unfit)


def test_rewards_come_by_the_sample_since_verl_has_a_reward_loop(tmp_path: Path) -> None:
    def parts(*settings: str, **options: Any) -> list[list[Any]]:
        return [system["use"][1:] for system in draft_of(tmp_path, *settings, **options).data()["systems"]]

    assert parts() == [["async_reward"]] * 3
    assert parts(version="0.6") == parts("reward_model.use_reward_loop=False", version="0.7") == [[]] * 3
    assert parts("reward_model.enable=True", reward_model="llama-3.1-8b") == [[]] * 3
    assert parts("trainer.v1.trainer_mode=colocate_async") == [["async_reward"]] * 2


def test_the_file_that_a_script_names_is_read_where_it_lies_beside(tmp_path: Path) -> None:
    text = SCRIPT.replace("main_ppo", "main_ppo --config-name=own")
    assert "the file of --config-name own is not read" in "\n".join(draft_of(tmp_path, text=text).notes)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text("defaults: [ppo_trainer]\ntrainer: {test_freq: 5}\ndata: {seed: 1}\n")
    draft = draft_of(tmp_path, text=text)
    assert not any("is not read: give" in note for note in draft.notes)
    assert any("trainer.test_freq (own.yaml:2)" in item for item in draft.missing)


@cases("init", "what verl's engines and releases leave out")
def test_what_bears_on_time_or_memory_is_noted(
    tmp_path: Path, settings: list[str], release: str, said: str | None
) -> None:
    vllm = "actor_rollout_ref.rollout.name=vllm"
    missing = draft_of(tmp_path, vllm, *settings, version=release).missing
    plain = draft_of(tmp_path, vllm, *settings[1:], version=release).missing
    assert any(said in item for item in missing) if said else missing == plain


def test_limits_that_an_engine_sets_itself() -> None:
    assert own_limits("vllm", load_gpu("a100-sxm-80gb"), "server")["max_num_batched_tokens"] == 2048
    assert own_limits("vllm", load_gpu("h200-sxm"))["max_num_batched_tokens"] == 16384


def test_a_replica_may_be_whole_nodes(tmp_path: Path) -> None:
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size="
    wide = ["MODEL_PATH=Qwen/Qwen3-8B", "trainer.nnodes=4"]
    draft = draft_of(tmp_path, *wide, f"{tp}16")
    assert [list(system["use"][0]) for system in draft.data()["systems"]] == [["verl"], ["verl"]]  # no PAT
    assert any("a replica is on 2 nodes" in note for note in draft.notes)
    assert check(draft, tmp_path) == ""
    with pytest.raises(ConfigError, match="nor is it whole nodes that divide the 4"):
        draft_of(tmp_path, *wide, f"{tp}24")


def test_experts_that_no_stage_holds(tmp_path: Path) -> None:
    degrees = ("tensor_model_parallel_size=4", "pipeline_model_parallel_size=2", "expert_model_parallel_size=2")
    settings = ["MODEL_PATH=Qwen/Qwen3-30B-A3B", *(f"+actor_rollout_ref.actor.megatron.{one}" for one in degrees)]
    with pytest.raises(ConfigError, match=r"without .*expert_tensor_parallel_size Megatron cuts an expert over TP"):
        draft_of(tmp_path, *settings)
    whole = draft_of(tmp_path, *settings, "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1")
    assert some(whole.data()["training"], expected := {"ep": 2, "expert_tp": 1}) == expected


def test_defaults_are_those_of_the_release(tmp_path: Path) -> None:
    without_mode = SCRIPT.replace("    actor_rollout_ref.rollout.mode=sync \\\n", "")
    assert draft_of(tmp_path, text=without_mode).data()["routing"] == "round_robin"
    assert "routing" not in draft_of(tmp_path, text=without_mode, version="0.6").data()
    assert release("v0.6.1") == "0.6"
    assert defaults("0.3", True)["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == 4
    assert all(set(defaults(version, False)) == set(defaults("0.9", False)) for version in VERSIONS)
    with pytest.raises(ConfigError, match=r"one of: 0.2, 0.3"):
        release("1.7")


def test_the_engines_share_of_memory_excludes_training(tmp_path: Path) -> None:
    text = SCRIPT.replace("offload=True", "offload=False")
    draft = draft_of(tmp_path, text=text)
    draft.write(tmp_path / "made.yaml")
    placed = placed_of(tmp_path / "made.yaml")
    _, beside = placed.ledger.staying(placed.gpus)
    kv_bytes = placed.rollout_costs.capacity_pages(2) * 16 * placed.rollout_costs.model.kv_bytes_per_token / 2
    offloaded = draft_of(tmp_path).data() | {"name": "offloaded"}
    own = placed_of(offloaded, (), tmp_path).rollout_costs.capacity_pages(2)
    assert beside > 1e10
    gpu = placed.loaded.cluster.gpu_at(0)
    assert placed.loaded.experiment.memory_utilization == pytest.approx(0.6 + beside / gpu.memory_bytes, abs=1e-4)
    assert kv_bytes == pytest.approx(own * 16 * placed.rollout_costs.model.kv_bytes_per_token / 2, rel=1e-3)


def test_hydra_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / ".hydra"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(sample("frameworks/hydra.yaml").replace("nnodes: 1", "nnodes: 2"))
    draft = from_verl([str(tmp_path / "outputs")], given(tmp_path, gpu=None, cluster="2x8xh100"))
    data = draft.data()
    assert data["name"] == "mine-x"
    assert data["training"]["mini_batches"] == 1
    assert data["training"]["micro_batch_tokens"] == 4096
    assert data["systems"][0]["use"] == [{"verl": {"tp": 2}}, "async_reward"]  # ??? has no value: the default
    assert "data.train_batch_size (config.yaml:1)" in draft.text()
    assert check(draft, tmp_path) == ""
    overrides = folder / "overrides.yaml"
    overrides.write_text("- data.train_batch_size=16\n- actor_rollout_ref.model.path=Qwen/Qwen3-8B\n")
    assert from_verl([str(overrides)], given(tmp_path, gpu="h200")).data()["workflow"]["prompts"] == 16
    log = tmp_path / "run.log"
    config = {"actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-8B"}, "rollout": {"n": 3}}, "data": {"x": 1}}
    log.write_text(f"(TaskRunner pid=7) {config!r}\n(TaskRunner pid=7) step:1 - timing_s/gen:3.0\n")
    assert from_verl([str(log)], Options(tmp_path, "h100")).data()["workflow"]["responses"] == 3


def test_an_unknown_value_is_an_error_only_where_it_is_needed(tmp_path: Path) -> None:
    needed = SCRIPT.replace("data.train_batch_size=64", "data.train_batch_size=$BATCH")
    with pytest.raises(ConfigError, match=r"run.sh:11: data.train_batch_size: variable BATCH is not set; give BATCH="):
        draft_of(tmp_path, text=needed)
    assert draft_of(tmp_path, "BATCH=16", text=needed).data()["workflow"]["prompts"] == 16
    unneeded = SCRIPT.replace("$HOME/gsm8k.parquet", "$DATA/gsm8k.parquet").replace("'qwen2.5 7b'", "x_$(date +%s)")
    assert draft_of(tmp_path, text=unneeded).data()["name"] == "run"
    nodes = SCRIPT.replace("${NNODES:-1}", "$SLURM_NNODES")
    assert draft_of(tmp_path, text=nodes, gpu=None, cluster="2x8xh100").data()["cluster"] == "2x8xh100"


# Names ----------------------------------------------------------------------------------------------------------------


@cases("init", "models by their published names")
def test_models_by_their_published_names(tmp_path: Path, path: str, expected: str) -> None:
    assert find_model(path, tmp_path)[0] == expected


@pytest.mark.parametrize("path", ["Qwen/Qwen3-Omni-30B-A3B", "Qwen/Qwen3-8B-FP8", "google/gemma-7b", "qwen3-80b"])
def test_models_of_another_shape_are_not_taken_for_a_known_one(tmp_path: Path, path: str) -> None:
    with pytest.raises(CatalogueError, match=r"give --model a name .* or the path of its config.json"):
        find_model(path, tmp_path)


HF: dict[str, dict[str, Any]] = tables("bases")["init hf"]


@pytest.mark.parametrize("kind", HF)
def test_a_hugging_face_config_is_a_model(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"my-{kind}"
    folder.mkdir()
    shape = {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **shape, **HF[kind]}))
    draft = starter("mine", folder=tmp_path, model=str(folder), trace="rollpacker-math")
    assert draft.data()["model"] == f"my-{kind}/config.json"  # from the experiment's own folder
    draft.write(tmp_path / "mine.yaml")
    overrides = {"workflow.steps": 1, "workflow.prompts": 1, "trace.cap": 64, "systems": [{"verl": {"tp": 1}}]}
    overrides |= {"seeds": 1, "baseline": "verl"}
    assert rlsim.run(tmp_path / "mine.yaml", overrides=overrides).manifest["model"]["model_type"] == kind
    (folder / "config.json").write_text(json.dumps({"model_type": "dbrx", **shape}))
    with pytest.raises(ConfigError, match="model_type 'dbrx' is not supported; one of: llama, mistral, mixtral"):
        starter("mine", folder=tmp_path, model=str(folder))


def test_clusters_and_traces_of_the_catalogue() -> None:
    assert find_cluster("h800", 2, 8).name == "2x8xh800"
    assert find_cluster("h100", 1, 4) == load_cluster("4xh100")
    assert find_cluster("h200-sxm", 4, 8) == load_cluster("4x8xh200")
    with pytest.raises(CatalogueError, match="does not know the link between nodes of l40s"):
        find_cluster("l40s", 2, 8)
    with pytest.raises(CatalogueError, match="h100-sxm"):
        find_cluster("h1000", 1, 8)
    assert nearest_trace(load_model("llama-3.1-8b"), 8192, rewards=False)[0] == "deepscaler-llama-3.1-8b"
    assert nearest_trace(load_model("qwen2.5-32b"), 8192, rewards=False)[0] == "dapo-growing"
    assert nearest_trace(load_model("qwen2.5-32b"), 8192, rewards=True)[0] == "rollpacker-math"
    assert nearest_trace(load_model("r1-distill-qwen-1.5b"), 16000, rewards=False)[0] == "aime-r1-distill-like"
    found = [nearest_trace(load_model("qwen2.5-1.5b"), cap, rewards=False)[0] for cap in (8192, 1024)]
    assert found == ["aime-r1-distill-like", "rollpacker-math"]  # of the first all would be cut at 1,024


# The command ----------------------------------------------------------------------------------------------------------


command = partial(invoke, "init")


def test_command_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("first").exit_code == 0
    made = Path("first.yaml").read_text()
    again = command("first")
    assert "first.yaml exists; give --force" in str(again.exception)
    assert Path("first.yaml").read_text() == made
    Path("run.sh").write_text(SCRIPT)
    forced = command("--from-verl", "run.sh", "--gpu", "h100", "--out", "first.yaml", "--force")
    assert forced.exit_code == 0, forced.output
    assert Path("first.yaml").read_text() != made
    assert "run it: rlsim run first.yaml" in forced.output


def test_command_says_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace("Qwen2.5-7B-Instruct", "Qwen2.5-32B").replace("offload=True", "offload=False")
    Path("run.sh").write_text(text)
    done = command("--from-verl", "run.sh", "--gpu", "a40", "--out", "big.yaml")
    assert done.exit_code == 1
    assert "does not run as it stands" in done.output
    assert "DOES NOT RUN AS IT STANDS" in Path("big.yaml").read_text()


def test_nccl_tests_make_a_calibration_beside_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all_reduce.txt").write_text(nccl_text())
    monkeypatch.chdir(tmp_path)
    done = command("mine", "--cluster", "8xh100", "--nccl", "all_reduce.txt", "--out", str(tmp_path / "m.yaml"))
    assert done.exit_code == 0, done.output
    assert read_yaml(tmp_path / "m.yaml")["calibration"] == "mine-calibration.yaml"
    monkeypatch.chdir(Path(nccl_tests.__file__).parent)  # found beside the experiment, from anywhere
    assert loaded_of(tmp_path / "m.yaml").kind((0,)).calibration.name == "mine-calibration"


def test_nccl_tests_of_a_gpu_that_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    Path("all_reduce.txt").write_text(nccl_text())
    like = ("--gpu", "mine", "--gpu-like", "h100,94GB,3.9TB/s")
    done = command("own", "--from-verl", "run.sh", *like, "--nccl", "all_reduce.txt")
    assert done.exit_code == 0, done.output
    fitted = loaded_of(Path("own.yaml")).kind((0,)).calibration
    assert (fitted.name, fitted.gpu) == ("own-calibration", "mine")


# Found by running the example scripts of veRL under a shell, and by odd configurations ------------------------------


ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout"))
#: A configuration that starts, with micro-batches of so many sequences (64 prompts × 8 responses on 8 GPUs).
FIXED = (
    f"{ACTOR}use_dynamic_bsz=False", f"{ACTOR}ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}mode=async",
    f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=4", f"{ROLLOUT}name=vllm",
)  # fmt: skip


@cases("init", "what verl does not start with")
def test_what_verl_does_not_start_with(tmp_path: Path, settings: list[str], release: str, said: str) -> None:
    notes = [note for note in draft_of(tmp_path, *FIXED, *settings, version=release).notes if "does not start" in note]
    assert any(said in note for note in notes) if said else not notes


def test_of_overrides_alone_notes_say_the_configuration(tmp_path: Path) -> None:
    notes = from_verl(["actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"], given(tmp_path)).notes
    assert any(note.startswith("the configuration: no micro-batch size is given") for note in notes)


def test_comments_hold_no_control_characters(tmp_path: Path) -> None:
    sources = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", 'actor_rollout_ref.rollout.quantization="a\\0"']
    assert " = a\\x00: here in bf16" in from_verl(sources, given(tmp_path)).text()


def test_every_start_condition_has_a_source_and_words_for_its_names() -> None:
    for row in conditions():
        assert row.at
        assert row.says.format(**dict.fromkeys(code_of(row.refused).co_names, 1))
    assert len({row.refused + row.of + row.until for row in conditions()}) == len(conditions())


@cases("init", "an experiment that its engine or framework would not start with")
def test_an_experiment_that_its_engine_or_framework_would_not_start_with(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    experiment: dict[str, Any] = {
        "name": "e", "cluster": "8xh100", "model": "qwen2.5-7b", "calibration": "h100-vllm", "seeds": 1,
        "trace": {"fixed": 1000, "cap": "1K"}, "systems": [{"verl": {"tp": 2}}], "training": {"backend": "fsdp"},
        "workflow": {"algorithm": "grpo", "prompts": 8, "responses": 8, "steps": 1},
    }  # fmt: skip
    for key, value in settings.items():
        experiment[key] = {**experiment.get(key, {}), **value} if isinstance(value, dict) else value
    found = starts_of(LoadedExperiment.of(Experiment.model_validate(experiment), tmp_path))
    assert any(said in reason and "does not start with it" in reason for reason in found) if said else not found


def test_a_file_that_hydra_composes(tmp_path: Path) -> None:
    path = tmp_path / "ppo_megatron_trainer.yaml"
    path.write_text(sample("frameworks/hydra_composes.yaml"))
    draft = from_verl([str(path)], given(tmp_path))
    assert draft.data()["training"]["backend"] == "megatron"
    assert draft.data()["training"]["tp"] == 4
    assert any("the files under `defaults` are not read" in note for note in draft.notes)
    draft.entries["memory_utilization"] = Entry(read_config([str(path)], "0.9").given[SHARE])
    assert "memory_utilization: 0.55" in draft.text()  # as a number that YAML can write
    path = tmp_path / "config.yaml"
    path.write_text(sample("frameworks/hydra_merged.yaml"))
    data = from_verl([str(path)], given(tmp_path)).data()
    assert data["cluster"] == "2x8xh100"
    assert data["training"]["mini_batches"] == 3  # of 45, 45 and 10 prompts

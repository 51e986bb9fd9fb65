import json
from pathlib import Path

import pytest

from rlsim.base import catalogue
from rlsim.errors import CatalogueError, ConfigError
from rlsim.models.model import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def write(path: Path, **changes: object) -> Path:
    data = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name", catalogue.names("models"))
def test_every_model_loads_and_adds_up(name: str) -> None:
    model = load_model(name.upper())
    assert model.name == name
    layers = sum(layer.parameters for layer in model.layers)
    assert layers + model.embedding_parameters + model.hidden_size == model.parameters
    assert model.active_parameters <= model.parameters
    if model.expert_precision is None:
        assert model.weight_bytes == 2 * model.parameters


def test_critic_has_a_scalar_head() -> None:
    actor = load_model("llama-3.1-8b")
    critic = actor.as_critic()
    assert critic.scalar_head
    assert not actor.scalar_head
    assert actor.parameters - critic.parameters == 128256 * 4096 - 4096
    assert critic.head().n_out == 1


def test_tp_that_does_not_fit() -> None:
    model = load_model("qwen2.5-7b")  # 28 heads
    assert [tp for tp in (1, 2, 4, 8) if model.supports_tp(tp)] == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"^qwen2.5-7b: TP 8 does not divide its 28 heads"):
        model.check_tp(8)


def test_config_json_of_hugging_face(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    model = load_model(folder)
    assert model == load_model(str(folder / "config.json"))
    assert (model.name, model.head_dim, model.attention.q_dim, model.attention.kv_dim) == ("tiny", 16, 64, 32)
    # embedding + final norm + 2 layers of (q, o) + (k, v) + MLP + 2 norms, by hand
    assert model.parameters == 6400 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, r"config.json: hidden_size: required, but missing"),
        ({"model_type": ["qwen2"]}, r"config.json: model_type \['qwen2'\] is not supported"),
        ({"model_type": "dbrx"}, r"config.json: model_type 'dbrx' is not supported; one of: llama, "),
        ({"model_type": "mamba"}, r"config.json: model_type 'mamba' is not supported: no layer with a KV cache$"),
        ({"quantization_config": {"bits": 4}}, r"quantised weights are not supported"),
        ({"num_attention_heads": 3}, r"num_attention_heads must be a multiple of num_key_value_heads"),
        ({"vocab_size": -1}, r"config.json: vocab_size: .*more than 0"),
        ({"model_type": "qwen3_moe"}, r"'qwen3_moe' does not go with num_experts 0"),
    ],
)
def test_bad_config_json(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(write(tmp_path / "bad", **changes))


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"^unknown model 'llama-3.1-80b'; did you mean 'llama-3.1-8b'"):
        load_model("llama-3.1-80b")
    with pytest.raises(ConfigError, match=r"config.json: no such file$"):
        load_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not readable JSON"):
        load_model(tmp_path)


def test_a_catalogue_file_refuses_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(catalogue.names("models")["qwen3-8b"].read_text() + "hiden_size: 3\n")
    with pytest.raises(ConfigError, match=r"m.yaml:15:1: hiden_size: unknown key; did you mean 'hidden_size'"):
        load_model(path)


def test_a_copy_has_layers_of_its_own() -> None:
    model = load_model("llama-3.1-8b")
    assert sum(model.groups.values()) == len(model.layers) == 32
    shorter = model.model_copy(update={"num_hidden_layers": 4})
    assert sum(shorter.groups.values()) == len(shorter.layers) == 4
    assert shorter == model.model_copy(update={"num_hidden_layers": 4}), "what was worked out is no part of a model"

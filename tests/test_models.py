import json
from pathlib import Path

import pytest

from rlsim import catalogue
from rlsim.errors import CatalogueError, ConfigError
from rlsim.layers import Dense, Experts, Linear
from rlsim.models import Model, load_model

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


def test_kv_bytes_per_token() -> None:
    assert load_model("llama-3.1-8b").kv_bytes_per_token == 131_072
    assert load_model("qwen2.5-7b").kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert load_model("qwen3-30b-a3b").kv_bytes_per_token == 2 * 48 * 4 * 128 * 2


def test_active_parameters_of_a_mixture() -> None:
    model = load_model("qwen3-30b-a3b")  # "3.3B activated" by its model card
    assert model.active_parameters == model.parameters - 48 * 120 * 3 * 2048 * 768
    assert model.active_parameters == pytest.approx(3.3e9, rel=0.02)


def test_linear_layers_under_tp() -> None:
    model = load_model("llama-3.1-8b")
    assert model.layer.linears(8) == (
        Linear("qkv", 768, 4096),
        Linear("o", 4096, 512),
        Linear("gate_up", 3584, 4096),
        Linear("down", 4096, 1792),
    )
    assert model.head(8) == Linear("head", 16032, 4096, quantised=False)
    weights = [sum(x.n_out * x.k_in for x in model.layer.linears(tp)) * tp for tp in (1, 2, 4, 8)]
    assert len(set(weights)) == 1


def test_kv_heads_are_replicated_when_too_few() -> None:
    model = load_model("qwen2.5-3b")  # 16 heads, 2 KV heads
    assert [model.attention.kv_heads_per_gpu(tp) for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert model.layer.linears(8)[0].n_out == 2 * 128 + 2 * 128


def test_experts() -> None:
    model = load_model("qwen3-30b-a3b")
    assert model.layer.mlp == Experts(experts=128, active=8, width=768)
    assert [linear.name for linear in model.layer.linears(2)] == ["qkv", "o", "router"]
    assert load_model("qwen3-8b").layer.mlp == Dense(width=12288)


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


def test_biases_and_defaults(tmp_path: Path) -> None:
    plain = load_model(write(tmp_path / "a"))
    qwen2 = load_model(write(tmp_path / "b", model_type="qwen2"))
    biased = load_model(write(tmp_path / "c", attention_bias=True, mlp_bias=True))
    assert qwen2.parameters - plain.parameters == 2 * (64 + 2 * 32)
    assert biased.parameters - plain.parameters == 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
    assert load_model(write(tmp_path / "d", num_key_value_heads=...)).attention.kv_dim == 64


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


def test_records_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_model("qwen3-8b").hidden_size = 1  # type: ignore[misc]
    assert isinstance(load_model("qwen3-8b"), Model)


def test_a_copy_has_layers_of_its_own() -> None:
    model = load_model("llama-3.1-8b")
    assert sum(model.groups.values()) == len(model.layers) == 32
    shorter = model.model_copy(update={"num_hidden_layers": 4})
    assert sum(shorter.groups.values()) == len(shorter.layers) == 4
    assert shorter == model.model_copy(update={"num_hidden_layers": 4}), "what was worked out is no part of a model"

"""Families of models: published counts, caches, what is read from a config.json, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, Talk, cases, tables

from rlsim.base import catalogue
from rlsim.cost.calibration import load_calibration
from rlsim.cost.experts import expert_load
from rlsim.cost.flops import attention_work, forward_flops
from rlsim.cost.memory import (
    activation_bytes_per_token,
    kv_page_bytes,
    kv_shape,
    stage_parts,
)
from rlsim.cost.reallocation import common_bytes
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.cost.strategy import TrainEfficiency, TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.errors import CalibrationError, CatalogueError, ConfigError
from rlsim.experiment.run import check_experiment
from rlsim.models.hardware import load_cluster
from rlsim.models.layers import Mamba2, NoAttention, NoFeedForward
from rlsim.models.model import Model, load_model

H100 = load_cluster("8xh100")

PUBLISHED: dict[str, int] = tables("architectures")["published"]
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", *_HEADS, "vocab_size")
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def config(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), **more}


LLAMA = config("llama", 64, 128, 4, 4, 2, 100)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model(**words: Any) -> Model:
    return Model(**{"name": "tiny", **LLAMA, **words})


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
    assert (critic.scalar_head, actor.scalar_head) == (True, False)
    assert actor.parameters - critic.parameters == 128256 * 4096 - 4096
    assert critic.head().n_out == 1


def test_tp_that_does_not_fit() -> None:
    model, hybrid = load_model("qwen2.5-7b"), load_model("nemotron-3-nano-30b-a3b")  # 28 heads; groups of Mamba heads
    assert [tp for tp in (1, 2, 4, 8) if model.supports_tp(tp)] == [1, 2, 4]
    assert [tp for tp in (1, 2, 4, 8, 16, 32) if hybrid.supports_tp(tp)] == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match=r"^qwen2.5-7b: TP 8 does not divide its 28 heads"):
        model.check_tp(8)


def test_a_copy_has_layers_of_its_own() -> None:
    model = load_model("llama-3.1-8b")
    assert sum(model.groups.values()) == len(model.layers) == 32
    shorter = model.model_copy(update={"num_hidden_layers": 4})
    assert sum(shorter.groups.values()) == len(shorter.layers) == 4
    assert shorter == model.model_copy(update={"num_hidden_layers": 4}), "what was worked out is no part of a model"


@cases("architectures", "published of other configurations")
def test_published_counts_of_other_configurations(words: dict[str, Any], parameters: int) -> None:
    assert Model(**words).parameters == parameters


def test_layers_for_multi_token_prediction_are_counted_apart() -> None:
    following = load_model("qwen3-next-80b-a3b")  # its page counts them
    assert following.parameters + following.mtp_parameters == 81_324_862_720
    air = load_model("glm-4.5-air")  # and here a copy of embedding and head with them
    assert air.parameters + air.mtp_parameters + air.embedding_parameters == 110_468_824_832
    assert load_model("deepseek-v3").mtp_parameters == pytest.approx(11.5e9, rel=0.01)  # its README_WEIGHTS
    assert load_model("mixtral-8x7b").mtp_parameters == 0
    assert load_model("mimo-7b").mtp_parameters == 177_223_680 + 2 * 4096**2 + 3 * 4096  # vLLM's mimo_mtp.py
    sparse = load_model("glm-5")  # 62 or 79 layers have an index; the pages of DeepSeek's count its two scales, too
    assert sparse.parameters + sparse.mtp_parameters == 753_864_139_008
    shared = load_model("glm-5.2")
    assert shared.parameters + shared.mtp_parameters == 753_329_940_480
    assert sum(bool(layer.attention.index_bytes) for layer in shared.layers) == 21
    indexed = load_model("deepseek-v3.2").layers[-1].parameters - load_model("deepseek-v3").layers[-1].parameters
    assert 62 * (indexed + 64 * 12 + 56) == 685_396_921_376 - 684_531_386_000
    # Qwen3.5 in all, less a vision tower of 27 layers and a projection from 4 patches to the text's width.
    for name, total in {"9b": 9_653_104_368, "35b-a3b": 35_951_822_704, "397b-a17b": 403_397_928_944}.items():
        text = load_model(f"qwen3.5-{name}")
        assert text.parameters + text.mtp_parameters == total - 437_132_016 - (4 * 1152 + 1) * text.hidden_size
    tencent = load_model("hy3")  # its card: 295B, and 3.8B for multi-token prediction
    assert tencent.parameters == pytest.approx(295e9, rel=0.001)
    assert tencent.mtp_parameters == pytest.approx(3.8e9, rel=0.015)


@cases("architectures", "rounded counts")
def test_rounded_counts(words: dict[str, Any] | str, billions: float, active: float) -> None:
    found = load_model(words) if isinstance(words, str) else Model(name="-", **words)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=0.055)


def test_what_a_sequence_caches() -> None:
    latent = load_model("deepseek-v3")
    assert latent.kv_bytes_per_token == 61 * 576 * 2 == 70_272
    windows = load_model("gpt-oss-20b")  # 12 of 24 layers see 128 tokens
    assert windows.kv_bytes_per_token == 24 * 2 * 8 * 64 * 2
    assert windows.sequence_bytes(100) == 100 * windows.kv_bytes_per_token
    assert windows.sequence_bytes(1000) == (12 * 1000 + 12 * 128) * 2 * 8 * 64 * 2
    assert windows.sequence_bytes(100, 1000) == windows.sequence_bytes(100) + windows.sequence_bytes(1000)
    hybrid = load_model("qwen3-next-80b-a3b")  # 12 of 48 layers cache, 36 have a state
    assert hybrid.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert hybrid.state_bytes == 36 * 2 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert hybrid.sequence_bytes(1000) == 1000 * hybrid.kv_bytes_per_token + hybrid.state_bytes
    assert hybrid.sequence_bytes(1000, 1000) == 2 * hybrid.sequence_bytes(1000)
    gemma = load_model("gemma-3-27b")  # every sixth of 62 layers is full
    assert sum(layer.attention.window_tokens is None for layer in gemma.layers) == 10
    sparse = load_model("deepseek-v3.2")  # an index caches its keys whatever the precision
    assert sparse.kv_bytes_per_token == 61 * (576 * 2 + 128 + 4)
    eight = sparse.served(kv_precision="fp8")
    assert kv_page_bytes(eight, 8, 1) == eight.kv_bytes_per_token == eight.sequence_bytes(1) == 61 * (576 + 128 + 4)
    shape = kv_shape(sparse, 8)  # what is beyond the tokens that a query sees stays
    assert (shape.window_tokens, shape.units(9000, 16)) == (2048, 563)


def test_heads_that_differ_from_layer_to_layer() -> None:
    windowed, full = load_model("gemma-4-31b").layers[4:6]
    assert (windowed.attention.cached_elements(), full.attention.cached_elements()) == (2 * 16 * 256, 2 * 4 * 512)
    assert [one.n_out for one in (windowed.linears()[0], full.linears()[0])] == [8192 + 2 * 4096, 16384 + 2048]
    full, windowed = load_model("mimo-v2-flash").layers[:2]
    assert (full.attention.cached_elements(8), windowed.attention.cached_elements(8)) == (192 + 128, 192 + 128)
    assert (full.linears()[1].k_in, windowed.attention.cached_elements()) == (64 * 128, 8 * (192 + 128))
    assert windowed.attention.parameters(4096, 1) - full.attention.parameters(4096, 1) == 4096 * 4 * 320 + 64  # sinks


def test_nemotrons_by_their_patterns() -> None:
    nano, large = load_model("nemotron-3-nano-30b-a3b"), load_model("nemotron-3-super-120b-a12b")
    # Their pages leave out the biases that balance the routers' load: one for every expert of a layer.
    assert nano.parameters - 23 * 128 == 31_577_937_344
    assert large.parameters + large.mtp_parameters - (40 + 1) * 512 == 123_611_012_096
    assert nano.active_parameters == pytest.approx(3.6e9, rel=0.01)  # the report: 3.2B without its embedding
    assert nano.active_parameters - nano.vocab_size * nano.hidden_size == pytest.approx(3.2e9, rel=0.01)
    assert large.active_parameters == pytest.approx(12.7e9, rel=0.01)  # the report: 12.7B
    mixer, experts, attention = nano.layers[0], nano.layers[1], nano.layers[5]
    assert isinstance(mixer.attention, Mamba2)
    assert isinstance(experts.attention, NoAttention)
    assert isinstance(attention.mlp, NoFeedForward)
    assert (mixer.blocks, experts.blocks, attention.blocks, nano.blocks) == (1, 1, 1, 52)


def test_what_a_state_space_mixer_weighs_and_keeps() -> None:
    mixer = Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, chunk_tokens=128, kernel=4, state_scale=2)
    inner, convolved = 64 * 64, 64 * 64 + 2 * 8 * 128
    projections = 2688 * (inner + convolved + 64) + inner * 2688
    assert mixer.parameters(2688, 1) == projections + (4 + 1) * convolved + 3 * 64 + inner
    assert mixer.parameters(2688, 8) == mixer.parameters(2688, 1) / 8
    assert 16 * mixer.parameters(2688, 16) > mixer.parameters(2688, 1)  # a group on every GPU, twice as many
    # vLLM: mamba2_state_shape; the state in fp32, what is convolved in bf16
    assert 2 * mixer.state_elements == 4 * 64 * 64 * 128 + 2 * 3 * convolved
    nano = load_model("nemotron-3-nano-30b-a3b")
    assert nano.state_bytes == 23 * 2 * mixer.state_elements
    assert nano.kv_bytes_per_token == 6 * 2 * 2 * 128 * 2
    assert kv_shape(nano, 2).state_tokens == pytest.approx(nano.state_bytes / nano.kv_bytes_per_token)
    assert nano.sequence_bytes(4096) == 4096 * nano.kv_bytes_per_token + nano.state_bytes
    # over 8 GPUs a state that moves is cut, and the 2 KV heads are copied
    assert nano.sequence_bytes(4096, tp=8) == 4096 * nano.kv_bytes_per_token / 2 + nano.state_bytes / 8
    # In a chunk of C tokens: C · C · N a group, C · C · P a head; into the state and out of it C · P · N a head each.
    chunk = 2 * 128 * 128 * (8 * 128 + 64 * 64) + 2 * 2 * 128 * 64 * 64 * 128
    assert attention_work(mixer).token_flops == chunk / 128


def test_experts_in_a_latent_and_without_a_gate() -> None:
    layer = load_model("nemotron-3-super-120b-a12b").layers[1]
    assert [(one.name, one.n_out, one.k_in) for one in layer.linears(2)] == [
        ("router", 512, 4096),
        ("latent_in", 1024, 4096),  # on every GPU whole
        ("latent_out", 4096, 1024),
        ("up", 2688, 4096),
        ("down", 4096, 2688),
    ]
    assert layer.expert_weights() == 512 * 2 * 1024 * 2688
    assert layer.parameters - layer.active_parameters == 490 * 2 * 1024 * 2688
    assert layer.tensors() == 1 + 2 + 2 + 2 + 2 * 512  # norm, router and its bias, latent, shared, experts


def test_a_hybrid_of_olmo_by_hand() -> None:
    sizes = {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96}
    hybrid = Model(
        name="-", **config("olmo_hybrid", 3840, 11008, 32, 30, 30, 100352), **sizes, linear_value_head_dim=192
    )
    key, value = 30 * 96, 30 * 192
    linear = 3840 * (2 * key + 3 * value + 2 * 30) + 4 * (2 * key + value) + 2 * 30 + 192
    full, around = 4 * 3840**2 + 2 * 3840, 3 * 3840 * 11008 + 2 * 3840
    assert hybrid.parameters == 24 * linear + 8 * full + 32 * around + 2 * 100352 * 3840 + 3840


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_counts_of_words_that_mean_the_same_when_read_again(name: str, parameters: int) -> None:
    known = load_model(name)
    assert known.parameters == parameters
    again = Model(**known.model_dump(exclude_defaults=True))
    assert again == known
    assert again.layers == known.layers


# config.json ----------------------------------------------------------------------------------------------------------


def read(folder: Path, **words: Any) -> Model:
    given = {key: value for key, value in {**LLAMA, **words}.items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(given))
    return load_model(folder)


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    text = {**config("gemma3_text", 64, 128, 12, 4, 2, 100), "head_dim": 16, "sliding_window": 8}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    found = load_model(tmp_path)
    assert found.note == "the text part of gemma3; its other parts are not counted"
    assert found.tie_word_embeddings
    assert found.layer_types.count("full_attention") == 2
    assert found.layers == Model(name="-", **text).layers


SAID: dict[str, Callable[[Model], Any]] = {
    "sliding": lambda model: [i for i, kind in enumerate(model.layer_types) if kind == "sliding_attention"],
    "windows": lambda model: [layer.attention.window_tokens for layer in model.layers],
    "experts": lambda model: [i for i, layer in enumerate(model.layers) if layer.expert_weights()],
    "widths": lambda model: [list(getattr(layer.mlp, "widths", ())) for layer in model.layers],
    "tensors": lambda model: model.layers[0].tensors(),
    "outputs": lambda model: [one.n_out for one in model.layers[0].linears()[:6]],
    "split": lambda model: model.layers[0].attention.split,
    "layer_types": lambda model: list(model.layer_types),
}


@cases("architectures", "words of the layers")
def test_words_of_the_layers(tmp_path: Path, words: dict[str, Any], expected: dict[str, Any]) -> None:
    more = EXPERTS if "with" in words else {}
    model = read(tmp_path, **more, **{name: value for name, value in words.items() if name != "with"})
    assert {name: SAID.get(name, lambda model, name=name: getattr(model, name))(model) for name in expected} == expected


def test_config_json_of_hugging_face(tmp_path: Path) -> None:
    tiny = read(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=True, rope_theta=5e5)
    assert tiny == load_model(str(tmp_path / "config.json"))
    assert (tiny.name, tiny.head_dim, tiny.attention.q_dim, tiny.attention.kv_dim) == (tmp_path.name, 16, 64, 32)
    # embedding + final norm + 4 layers of (q, o) + (k, v) + MLP + 2 norms, by hand
    assert tiny.parameters == 6400 + 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)


@cases("architectures", "hugging face names are models")
def test_hugging_face_names_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_model(name) == load_model(shape).model_copy(update={"note": load_model(name).note})
    assert ("what it sees" in load_model(name).note) == ("VL" in name)
    Path(name).mkdir(parents=True)  # a folder of that name is what it says
    if "/" in name:
        with pytest.raises(ConfigError, match="no such file"):
            load_model(name)


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"^unknown model 'llama-3.1-80b'; did you mean 'llama-3.1-8b'"):
        load_model("llama-3.1-80b")
    with pytest.raises(ConfigError, match=r"config.json: no such file$"):
        load_model(tmp_path / "config.json")
    path = tmp_path / "m.yaml"
    path.write_text(catalogue.names("models")["qwen3-8b"].read_text() + "hiden_size: 3\n")
    with pytest.raises(ConfigError, match=r"m.yaml:15:1: hiden_size: unknown key; did you mean 'hidden_size'"):
        load_model(path)


@cases("architectures", "what is not supported or says too little is named")
def test_what_is_not_supported_or_says_too_little_is_named(tmp_path: Path, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **words)


def test_words_that_change_nothing_are_passed_over_and_those_that_nobody_knows_noted(tmp_path: Path) -> None:
    idle = {"index_topk": None, "num_kv_shared_layers": 0, "is_encoder_decoder": False, "hidden_act": "gelu"}
    assert read(tmp_path, **idle) == read(tmp_path)
    known = {"rope_theta": 1e4, "bos_token_id": 1, "rms_norm_eps": 1e-6, "n_group": 8, "use_cache": True, "hyper": None}
    assert not read(tmp_path, **known).note
    assert read(tmp_path, **known, hyper_widths=[8]).note.endswith("taken to change nothing: hyper_widths")


# Costs ----------------------------------------------------------------------------------------------------------------


def mixture(**words: Any) -> Model:
    """Four layers of glm4_moe's kind, two of them dense."""
    more = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    sizes = config("glm4_moe", 1024, 8192, 4, 16, 4, 32000)
    return Model(**{"name": "mixture", **sizes, "moe_intermediate_size": 512, **more, **words})


def step(shape: Model, tp: int = 1) -> RooflineStep:
    return RooflineStep(shape, tp, H100, load_calibration("h100-sglang"))


def test_products_of_first_dense_layers_and_shared_experts() -> None:
    kernels = step(mixture(), tp=2)
    gemm, tokens = kernels.operators.gemm_s, 48
    attention = gemm(tokens, 512 + 2 * 128, 1024) + gemm(tokens, 1024, 512)
    dense = gemm(tokens, 8192, 1024) + gemm(tokens, 1024, 4096)
    load = expert_load(tokens, 8, 2)
    shared = gemm(tokens, 512, 1024) + gemm(tokens, 1024, 256)
    routed = kernels.operators.experts_s(load, 1024, 256)
    expected = 4 * attention + 2 * dense + 2 * (gemm(tokens, 8, 1024) + shared + routed)
    assert kernels.breakdown(tokens, 1000)["products"] == pytest.approx(expected, rel=1e-12)


def parts_of(kind: str, **words: Any) -> Model:
    """Four layers of one kind of nemotron_h's, behind one of attention."""
    sizes = {"mamba_num_heads": 32, "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    shape = config("nemotron_h", 1024, 4096, 5, 16, 4, 32000, hybrid_override_pattern="*" + 4 * kind)
    return Model(**{"name": "parts", **shape, **sizes, **words})


def test_a_layer_that_is_one_part_costs_that_part() -> None:
    tokens, alone = 48, parts_of("*")
    gemm = step(alone, tp=2).operators.gemm_s
    attention = gemm(tokens, 1024 + 2 * 256, 1024) + gemm(tokens, 1024, 1024)
    assert step(alone, tp=2).breakdown(tokens, 1000)["products"] == pytest.approx(5 * attention, rel=1e-12)
    dense = gemm(tokens, 2048, 1024) + gemm(tokens, 1024, 2048)  # up and down, no gate
    found = step(parts_of("-"), tp=2).breakdown(tokens, 1000)
    assert found["products"] == pytest.approx(attention + 4 * dense, rel=1e-12)
    assert found["attention"] == pytest.approx(step(alone, tp=2).breakdown(tokens, 1000)["attention"] / 5, rel=1e-12)
    # one all-reduce a layer, and that of the embedding
    reduced = step(alone, tp=2).collectives.time_s("all_reduce", tokens * 1024 * 2, 2, 1)
    assert found["all_reduce"] == pytest.approx(6 * reduced, rel=1e-12)
    move = step(alone, tp=2).operators.memory_bound_s
    norm, activation = move(tokens * 4 * 1024 * 2, tokens), move(tokens * 2 * 2048 * 2, tokens)
    rotary, ends = move(tokens * (2 * (8 + 2) + 2) * 128 * 2, tokens), 2 * move(tokens * 2 * 1024 * 2, tokens)
    assert found["elementwise"] == pytest.approx(5 * norm + 4 * activation + rotary + ends, rel=1e-12)


def test_a_state_space_mixer_reads_and_writes_its_state() -> None:
    kernels = step(parts_of("M"))
    mixer = parts_of("M").layers[1].attention
    state_s = kernels.operators.memory_bound_s(2 * 32 * mixer.state_elements * 2, 32 * mixer.inner)
    attention_s = step(parts_of("*")).breakdown(32, 3200)["attention"] / 5
    assert kernels.breakdown(32, 3200)["attention"] == pytest.approx(attention_s + 4 * state_s, rel=1e-12)
    assert kernels.prefill_s([Chunk(8192, 0)]) > kernels.prefill_s([Chunk(4096, 0)]) > 0


@pytest.mark.parametrize(
    ("gpu", "tp", "measured"),  # microseconds by sequences, vllm-project/vllm#31722: bf16, Qwen3-Next
    [
        ("h200", 4, {32: 13.6, 128: 33.76, 256: 60.29, 512: 113.28, 1024: 215.12}),
        ("h200", 2, {32: 20.29, 128: 59.17, 256: 111.14, 512: 212.7, 1024: 420.22}),
        ("b200", 4, {32: 8.22, 128: 24.54, 256: 42.11, 512: 80.8}),
    ],
)
def test_a_gated_delta_net_decodes_as_measured(gpu: str, tp: int, measured: dict[int, float]) -> None:
    net = RooflineStep(load_model("qwen3-next-80b-a3b"), tp, load_cluster(f"8x{gpu}"), load_calibration(f"{gpu}-vllm"))
    by_batch = {batch: net._attentions[0][1].curve(batch).step_s(0.0) * 1e6 for batch in (1, 2, 4, 8, 16, *measured)}
    assert [*by_batch.values()] == sorted(by_batch.values())
    assert by_batch[1] < 3.0  # #35777: about 3 us
    assert {batch: by_batch[batch] for batch in measured} == pytest.approx(measured, rel=0.19)


@pytest.mark.parametrize(
    ("name", "tp", "measured_ms"),  # flash-linear-attention on H200, 8,192 tokens: QwenLM/FlashQLA@6e5d2ea, benchmark
    [("qwen3.5-397b-a17b", 1, 0.814), ("qwen3.5-397b-a17b", 2, 0.466), ("qwen3.5-27b", 1, 0.665)],
)
def test_a_gated_delta_net_trains_as_measured(name: str, tp: int, measured_ms: float) -> None:
    def layer(recurrent: float) -> Any:
        strategy, efficiency = TrainStrategy(tp=tp), TrainEfficiency(flop=0.5, recurrent=recurrent)
        layers = TrainCost(load_model(name), load_cluster("8xh200"), Talk(), strategy, efficiency)._layers
        return next(one for one in layers if one.attention_token_s)

    one, slow = layer(1.0), layer(3.0)
    assert 8192e3 * one.attention_token_s == pytest.approx(measured_ms, rel=0.16)
    assert slow.attention_token_s == pytest.approx(3.0 * one.attention_token_s)
    assert (slow.linear_s, slow.weights_s, slow.expert_s) == (one.linear_s, one.weights_s, one.expert_s)
    assert one.memory_s < slow.memory_s < 3.0 * one.memory_s  # the convolution's and the norms' bytes, not the MLP's


def test_training_of_layers_that_are_one_part() -> None:
    plain = TrainStrategy(recompute="none")
    dense, mixer = parts_of("-").layers[1], parts_of("M").layers[1]
    assert activation_bytes_per_token(dense, plain)[0] == 2 * (2 * 1024 + 2 * 4096)  # up, and its square
    inner, convolved = 32 * 64, 32 * 64 + 2 * 8 * 128
    assert activation_bytes_per_token(mixer, plain)[0] == 2 * (2 * 1024 + 2 * convolved + 2 * inner)
    for kind in "M-E":
        shape = parts_of(kind)
        flops = 2 * (sum(layer.active_weights for layer in shape.layers) + 32000 * 1024)
        flops += sum(attention_work(layer.attention).token_flops for layer in shape.layers)
        assert forward_flops(shape, [100]) == pytest.approx(100 * flops + 4 * 2048 * 100 * 101 / 2)
        cost = TrainCost(shape, H100, Talk(), TrainStrategy(dp=8, zero_stage=3), TrainEfficiency(flop=0.5))
        assert cost.train_s([500] * 16).total_s > 3 * 1000 * flops / H100.gpu.bf16_flop_per_s


def test_bytes_of_training_layers_that_are_one_part() -> None:
    tokens, efficiency = 512, TrainEfficiency(flop=1.0, attention=1.0, memory=1.0)
    bandwidth = H100.gpu.memory_bytes_per_s
    endless = {"bf16_flop_per_s": 1e30, "sm_count": 10**20}
    bytes_alone = H100.model_copy(update={"gpu": H100.gpu.model_copy(update=endless)})

    def forward_bytes(kind: str) -> float:
        cost = TrainCost(parts_of(kind), bytes_alone, Talk(), TrainStrategy(), efficiency)
        return cost.forward_s([tokens]).compute_s * bandwidth

    norm_and_addition = (2 + 3) * 1024
    rotary, dense = 2 * (16 + 4) * 128, 2 * 4096  # up is read, its square written
    inner, convolved = 32 * 64, 32 * 64 + 2 * 8 * 128
    head = tokens * 32000 * 16
    for kind, own in (("*", rotary), ("-", dense), ("M", 2 * convolved + 3 * inner)):
        weights = 2 * sum(layer.parameters for layer in parts_of(kind).layers)
        expected = weights + 2 * tokens * (5 * norm_and_addition + rotary + 4 * own) + head
        assert forward_bytes(kind) == pytest.approx(expected, rel=1e-6)


def test_sparse_attention_reads_what_its_index_chooses() -> None:
    sizes = config("deepseek_v32", 1024, 4096, 2, 128, 128, 32000, q_lora_rank=512, first_k_dense_replace=2, **MLA)
    sparse = Model(name="sparse", **sizes, **EXPERTS, index_n_heads=64, index_head_dim=128, index_topk=2048)
    dense = Model(name="dense", **{**sizes, "model_type": "deepseek_v3"}, **EXPERTS)
    cost, other = step(sparse), step(dense)
    attention, keys = (
        [kernels.breakdown(32, 32 * tokens)["attention"] for tokens in (2048, 40_000, 80_000)]
        for kernels in (other, cost)
    )
    index_s = keys[0] - attention[0]  # of the tokens that both see
    assert 0 < index_s < attention[0]
    grows = (keys[2] - keys[1]) / (attention[2] - attention[1])
    assert grows == pytest.approx((128 + 4 + 8) / (2 * 576), rel=0.05)  # bytes of a token, of one and the other
    (_, latent), (_, index) = cost._attentions
    assert latent.prefill_s([(2048, 0)]) == pytest.approx(other._attentions[0][1].prefill_s([(2048, 0)]), rel=1e-12)
    later = [latent.prefill_s([(4096, prior)]) for prior in (2**16, 2**17)]
    assert later[0] == pytest.approx(later[1], rel=0.02)
    assert index.prefill_s([(4096, 2**17)]) == pytest.approx(2 * index.prefill_s([(4096, 2**16)]), rel=0.05)
    work = attention_work(sparse.layers[0].attention).pair_flops
    assert work - attention_work(dense.layers[0].attention).pair_flops == 2 * 64 * 128


def test_what_no_table_has_is_named() -> None:
    kernels = step(load_model("qwen3-next-80b-a3b"), 4)
    kernels.decode(8).step_s(8 * 1000)
    kernels.prefill_s([Chunk(1000, 0)])
    assert "linear_attention 1 (e.g. a roofline, not measured)" in " ".join(kernels.lookups().note())
    kernels = step(load_model("nemotron-nano-9b-v2"), 4)
    kernels.prefill_s([Chunk(1000, 0)])  # a prompt alone
    with pytest.raises(CalibrationError, match="state_space"):
        kernels.lookups().refuse_extrapolated("h100-sglang")


def test_stages_of_unlike_layers() -> None:
    mixed = mixture()
    dense, experts = mixed.layers[0].parameters, mixed.layers[-1].parameters
    embedding = mixed.vocab_size * mixed.hidden_size
    assert experts < dense
    pp2 = TrainStrategy(pp=2)
    assert stage_parts(mixed, pp2) == [(2 * dense + embedding, pp2)]  # the head and its norm are on the other stage
    common = common_bytes(mixed, 1, 2) / 2
    np.testing.assert_array_equal(common[0] - [embedding, embedding + mixed.hidden_size], [2 * dense, 2 * experts])


def experiment(name: str, cap: int, **trace: Any) -> dict[str, Any]:
    told = {"calibration": "h100-sglang", "model": name, "training": {"offload": True}}
    return {**TINY, **told, "trace": {"fixed": cap, "cap": cap, "default_prompt_tokens": 96, **trace}}


def test_windows_and_chunks_that_are_outgrown_are_simulated() -> None:
    shape = load_model("gemma-2-9b")
    assert shape.within(4097) is shape
    assert shape.within(4096).attention.window_tokens is None
    assert [check_experiment(experiment("gemma-2-9b", cap=cap)).runs for cap in (4000, 4001)] == [1, 1]
    chunks = load_model("llama-4-scout-17b-16e")
    assert chunks.simulated == "yes"
    assert step(chunks, tp=8).decode(4).step_s(4 * 9000) < step(chunks, tp=8).decode(4).step_s(4 * 8192)
    assert check_experiment(experiment(chunks.name, cap=9000) | {"cluster": "8x8xh100"}).runs > 0
    notes = check_experiment(experiment("gemma-3-4b", cap=512)).notes
    assert "gemma-3-4b: the text part; its vision part is not counted" in notes


def test_mxfp4_experts_are_lent_where_the_calibration_lacks_them() -> None:
    assert check_experiment(experiment("gpt-oss-20b", cap=9000)).runs == 1
    step = RooflineStep(load_model("gpt-oss-20b"), 1, load_cluster("8xl40s"), load_calibration("l40s-vllm"))
    step.decode(64)
    assert "experts_mxfp4" in " ".join(step.lookups().note())


def test_a_cap_beyond_the_context_is_refused() -> None:
    assert check_experiment(experiment("qwen3-8b", cap=40_960 - 96)).runs == 1
    message = "trace.cap of 40,960 tokens after a prompt of up to 96 exceeds the context of qwen3-8b, 40,960 tokens"
    with pytest.raises(ConfigError, match=message):
        check_experiment(experiment("qwen3-8b", cap=40_960))
    assert check_experiment(experiment("qwen3-8b", cap=40_960, max_model_len=40_960)).runs == 1
    assert load_model("llama-3-7b").max_position_embeddings is None
    assert check_experiment(experiment("llama-3-7b", cap=40_960)).runs == 1

"""What Hugging Face's families of language models call things, and the layers that their words mean.

A family is a `model_type`. What its config.json leaves out is as transformers' configuration classes have it, what it
does not say at all as in its modelling code (`models/*/configuration_*.py` and `modeling_*.py`, version 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from rlsim.errors import shown
from rlsim.layers import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba2,
    NoAttention,
    NoFeedForward,
)
from rlsim.precision import KvPrecision, Precision
from rlsim.schema import Name, Schema
from rlsim.unsupported import FEATURES


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's modelling code has beyond RMS norms, rotary embedding, gated MLPs and grouped-query attention.

    `qkv_bias`: on q, k and v, whatever `attention_bias` says; `o_bias`: `attention_bias` is of o, too. `norms`: RMS
    norms over the hidden state in a layer. `latent`: its attention is MLA. `experts`: whether it has any; None: as
    `num_experts` says. `one_part`: a layer is attention or a feed-forward, as `layer_types` says. `narrow`: what it
    calls `intermediate_size` is the width of an expert. `state`: the kind of its layers that keep one in the place of a
    KV cache. `gated_mlp`: its MLPs, and experts, have a gate. The rest as in `FullAttention` and `Experts`. `defaults`:
    of words that published configurations leave out.
    """

    qkv_bias: bool = False
    o_bias: bool = True
    latent: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    gated: bool = False
    sinks: bool = False
    norms: int = 2
    one_part: bool = False
    state: str = ""
    gated_mlp: bool = True
    experts: bool | None = False
    narrow: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """What its `layer_types` may be."""
        return {_FULL, *WINDOWED, self.state, *((_MLP, _MOE) if self.one_part else ())}


_GRANITE_MOE = Family(experts=True, narrow=True)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=True, narrow=True),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen2_moe": Family(qkv_bias=True, o_bias=False, experts=True, shared_gate=True),
    "qwen3": Family(head_norms=True),
    "qwen3_moe": Family(head_norms=True, experts=True),
    "qwen3_next": Family(head_norms=True, gated=True, state="linear_attention", experts=True, shared_gate=True),
    "qwen3_5": Family(head_norms=True, gated=True, state="linear_attention"),
    "qwen3_5_moe": Family(head_norms=True, gated=True, state="linear_attention", experts=True, shared_gate=True),
    "phi3": Family(),
    "granite": Family(),
    "seed_oss": Family(o_bias=False),
    "smollm3": Family(defaults={"tie_word_embeddings": True}),
    "deepseek_v2": Family(latent=True, experts=True),
    "deepseek_v3": Family(latent=True, experts=True, router_bias=True),
    "kimi_k2": Family(latent=True, experts=True, router_bias=True),
    "glm4": Family(qkv_bias=True, o_bias=False, norms=4),
    "glm4_moe": Family(o_bias=False, experts=True, router_bias=True),
    "gpt_oss": Family(
        sinks=True,
        experts=True,
        narrow=True,
        router_bias=True,
        expert_bias=True,
        defaults={"attention_bias": True},
    ),
    "glm4_moe_lite": Family(latent=True, experts=True, router_bias=True),
    "hy_v3": Family(head_norms=True, experts=True, router_bias=True, defaults={"first_k_dense_replace": 1}),
    "gemma": Family(defaults={"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": Family(norms=4, defaults=_GEMMA),
    "gemma3": Family(
        head_norms=True,
        norms=4,
        defaults={
            **_GEMMA,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "llama4": Family(experts=True, narrow=True, defaults={"sliding_window": 8192, "head_dim": 128}),
    "mimo": Family(qkv_bias=True, o_bias=False),
    "olmo2": Family(whole_norms=True),
    "olmo3": Family(whole_norms=True, defaults={"sliding_window": 4096}),
    "olmoe": Family(whole_norms=True, experts=True, narrow=True),
    "exaone4": Family(head_norms=True, defaults={"sliding_window": 4096}),
    "ernie4_5": Family(defaults={"tie_word_embeddings": True}),
    "ernie4_5_moe": Family(
        experts=True, router_bias=True, defaults={"tie_word_embeddings": True, "first_k_dense_replace": 1}
    ),
    "minimax_m2": Family(whole_norms=True, experts=True, narrow=True, router_bias=True),
    "glm4v_moe": Family(
        o_bias=False,
        experts=True,
        router_bias=True,
        defaults={"attention_bias": True, "first_k_dense_replace": 1},
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": Family(
        state="mamba",
        experts=None,
        narrow=True,
        defaults={
            "ssm_state_size": 256,
            "mamba_num_heads": 128,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 256,
            "shared_expert_intermediate_size": 1024,
        },
    ),
    "nemotron_h": Family(
        norms=1,
        one_part=True,
        state="mamba",
        gated_mlp=False,
        experts=None,
        router_bias=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21_504,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
            "mamba_ssm_dtype": "float32",
            "n_shared_experts": 1,
        },
    ),
}

#: The text part of a multimodal model, by its own `model_type` or the whole model's, and the family that it is of.
TEXT_PARTS = {
    "gemma3_text": "gemma3",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4v_moe",
    "llama4_text": "llama4",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
}

_RENAMED = {
    "num_local_experts": "num_experts",  # mixtral, gpt_oss, llama4
    "n_routed_experts": "num_experts",  # deepseek, glm
    "num_shared_experts": "n_shared_experts",  # hy_v3
    "moe_num_experts": "num_experts",  # ernie
    "moe_num_shared_experts": "n_shared_experts",
    "moe_k": "num_experts_per_tok",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "decoder_sparse_step",
    "shared_intermediate_size": "shared_expert_intermediate_size",  # granite
    "layers_block_type": "layer_types",  # nemotron_h
    "mtp_layers_block_type": "mtp_layer_types",
    "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
    "attention_head_dim": "head_dim",
    "mamba_n_heads": "mamba_num_heads",  # granite
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
    "interleave_moe_layer_step": "decoder_sparse_step",  # llama4
    "attention_chunk_size": "sliding_window",
    "mtp_num_hidden_layers": "num_nextn_predict_layers",
}
LayerType = Literal[
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "mlp", "moe"
]
_FULL, _SLIDING, _CHUNKED, _LINEAR, _MAMBA, _MLP, _MOE = get_args(LayerType)
#: Layers with a window of tokens, and layers that cache no token.
WINDOWED, UNCACHED = (_SLIDING, _CHUNKED), (_LINEAR, _MAMBA, _MLP, _MOE)
#: What nemotron_h and granitemoehybrid call kinds of layers, in a pattern or by name.
_KINDS = {"M": _MAMBA, "*": _FULL, "-": _MLP, "E": _MOE, "attention": _FULL, "linear_attention": _MAMBA}

#: Families whose layers are Mamba-2 if nothing is said.
MIXED = ("nemotron_h", "granitemoehybrid")

#: Layers that a model may have.
MOST_LAYERS = 10_000

#: The families that are known.
MODEL_TYPES = tuple(FAMILIES)

_LINEAR_SIZES: tuple[str, ...] = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_MAMBA_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "chunk_size")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Config(Schema):
    """The shape of a model in the words of its `config.json`, where families differ in one family's."""

    name: Name
    title: str = ""
    source: str = Field(default="", description="where the shape is from")
    note: str = Field(default="", description="what is left out, or taken otherwise than the file says")
    model_type: str = Field(description=f"one of {', '.join(MODEL_TYPES)}")
    architectures: tuple[str, ...] = Field(default=(), description="a `…ForSequenceClassification` has a scalar head")
    hidden_size: int = Field(gt=0, le=1_000_000)
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    vocab_size: int = Field(gt=0, le=100_000_000)
    tie_word_embeddings: bool = Field(default=False, description="the LM head is the embedding")
    max_position_embeddings: int | None = Field(
        default=None, gt=0, description="longest prompt and response together, tokens; none: not known"
    )
    num_nextn_predict_layers: int = Field(
        default=0, ge=0, le=1000, description="layers for multi-token prediction; counted apart from all others"
    )
    dtype_bytes: float = Field(
        default=2, ge=0.125, le=8, description="bytes of a number that is not quantised; 2 = bf16"
    )
    precision: Precision = Field(
        default="bf16", description="as an engine serves the matrices of its layers; router, embedding and head not"
    )
    expert_precision: Precision | None = Field(default=None, description="of experts, if it is another")
    kv_precision: KvPrecision = Field(default="bf16", description="of the KV cache in an engine")
    kv_window_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="room in an engine's KV cache for each token of a sequence in layers with a window, over that in "
        "others; default: for no more tokens than the window has",
    )

    num_attention_heads: int = Field(gt=0, le=100_000)
    num_key_value_heads: int = Field(gt=0, le=100_000)
    head_dim: int = Field(gt=0, le=100_000)
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o (qwen2: always on q, k, v only)")
    use_qk_norm: bool = Field(default=False, description="glm4_moe: a norm on each query and key head")
    layer_types: tuple[LayerType, ...] = Field(
        default=(),
        description="the attention of every layer; none: full_attention. nemotron_h: the one part of every layer",
    )
    mtp_layer_types: tuple[LayerType, ...] = Field(
        default=(), description="nemotron_h: the layers of each layer for multi-token prediction"
    )
    sliding_window: int | None = Field(default=None, gt=0, description="tokens of a window, or of a chunk (llama4)")
    q_lora_rank: int | None = Field(default=None, gt=0, le=1_000_000, description="latent attention: of the queries")
    kv_lora_rank: int | None = Field(default=None, gt=0, le=1_000_000, description="latent attention: what is cached")
    qk_nope_head_dim: int = Field(default=0, ge=0, le=100_000)
    qk_rope_head_dim: int = Field(default=0, ge=0, le=100_000)
    v_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_num_key_heads: int = Field(default=0, ge=0, le=100_000, description="linear attention: heads and their size")
    linear_num_value_heads: int = Field(default=0, ge=0, le=100_000)
    linear_key_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_value_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_conv_kernel_dim: int = Field(default=0, ge=0, le=1000)
    mamba_num_heads: int = Field(default=0, ge=0, le=100_000, description="Mamba-2: heads and their size")
    mamba_head_dim: int = Field(default=0, ge=0, le=100_000)
    n_groups: int = Field(default=0, ge=0, le=100_000, description="Mamba-2: groups of heads")
    ssm_state_size: int = Field(default=0, ge=0, le=100_000, description="Mamba-2: numbers kept for each channel")
    conv_kernel: int = Field(default=0, ge=0, le=1000, description="Mamba-2: taps of its convolution")
    chunk_size: int = Field(default=0, ge=0, le=100_000, description="Mamba-2: tokens of a chunk of a prompt")
    mamba_ssm_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None, description="type of the state of linear attention and Mamba-2; none: the model's"
    )

    intermediate_size: int = Field(gt=0, le=10_000_000, description="width of the dense MLP")
    mlp_bias: bool = Field(default=False, description="biases on gate, up and down")
    num_experts: int = Field(default=0, ge=0, le=100_000, description="experts per layer; 0 for a dense model")
    num_experts_per_tok: int = Field(default=0, ge=0, le=100_000)
    moe_intermediate_size: int = Field(default=0, ge=0, le=10_000_000, description="width of one expert")
    shared_expert_intermediate_size: int = Field(
        default=0, ge=0, le=10_000_000, description="width of the expert that every token passes"
    )
    moe_latent_size: int = Field(
        default=0, ge=0, le=1_000_000, description="nemotron_h: width of a token for its experts; 0: hidden_size"
    )
    first_k_dense_replace: int = Field(default=0, ge=0, le=MOST_LAYERS, description="first layers without experts")
    moe_layer_freq: int = Field(default=1, gt=0, le=MOST_LAYERS, description="layers 0, n, 2n, … have experts")
    decoder_sparse_step: int = Field(
        default=1, gt=0, le=MOST_LAYERS, description="layers n - 1, 2n - 1, … have experts"
    )
    mlp_only_layers: tuple[int, ...] = Field(default=(), description="numbers of layers without experts")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Every family's words become those of this record, with Hugging Face's own defaults."""
        return canonical(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(unsupported(self.model_type))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        family = FAMILIES[self.model_type]
        experts = _MOE in self.layer_types if family.one_part else family.experts
        if experts is not None and experts != bool(self.num_experts):
            raise ValueError(f"model_type {self.model_type!r} does not go with num_experts {self.num_experts}")
        if self.num_experts and not (0 < self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size):
            raise ValueError("experts need moe_intermediate_size and num_experts_per_tok, at most num_experts")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if set(WINDOWED) & set(self.layer_types) and not self.sliding_window:
            raise ValueError("layers with a window need sliding_window")
        if strange := set(self.layer_types + self.mtp_layer_types) - family.kinds:
            raise ValueError(f"{self.model_type} has no layers of {', '.join(sorted(strange))}")
        if self.layer_types and set(self.layer_types) <= set(UNCACHED):
            raise ValueError("models without any layer that has a KV cache are not supported")
        needed = _LINEAR_SIZES if _LINEAR in self.layer_types else ()
        needed += _MAMBA_SIZES if _MAMBA in self.layer_types else ()
        needed += _LATENT_SIZES if family.latent else ()
        if _MAMBA in self.layer_types and self.n_groups and self.mamba_num_heads % self.n_groups:
            raise ValueError("mamba_num_heads must be a multiple of n_groups")
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"the attention of {self.model_type} needs {', '.join(missing)}")
        return self


def unsupported(model_type: object) -> str:
    """What to say of a `model_type` that no family has."""
    said = f"model_type {shown(model_type)} is not supported"
    if isinstance(model_type, str) and model_type in FEATURES:
        return f"{said}: {FEATURES[model_type]}"
    return f"{said}; one of: {', '.join(MODEL_TYPES)}"


def family_name(model_type: Any) -> Any:
    """The family of a `model_type`; what is no name of one comes back as it is."""
    return TEXT_PARTS.get(model_type, model_type) if isinstance(model_type, str) else model_type


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The words of any family as `Model` has them; what makes no sense is left for its checks."""
    kind = family_name(config.get("model_type"))
    if kind not in FAMILIES:
        return dict(config)
    given = {_RENAMED.get(key, key): value for key, value in {**FAMILIES[kind].defaults, **config}.items()}
    data = {key: value for key, value in given.items() if value is not None} | {"model_type": kind}
    heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
    data.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and heads and isinstance(hidden, int):
        data.setdefault("head_dim", hidden // heads)
    if kind == "ernie4_5" and data.pop("use_bias", False):
        data |= {"attention_bias": True, "mlp_bias": True}
    if kind in MIXED:
        _mixers(kind, data)
    _experts(kind, data)
    _attention_kinds(kind, data)
    return data


def _mixers(kind: str, data: dict[str, Any]) -> None:
    """The kinds of layers of families with Mamba-2, and the sizes that follow from others."""
    layers = data.get("num_hidden_layers")
    plain = [_MAMBA] * layers if isinstance(layers, int) and layers <= MOST_LAYERS else []
    pattern = data.pop("hybrid_override_pattern", plain)
    predicted = kind == "nemotron_h" and data.get("num_nextn_predict_layers")
    following = data.pop("mtp_hybrid_override_pattern", "*E" if predicted else [])
    for key, value in (("layer_types", pattern), ("mtp_layer_types", following)):
        found = data.setdefault(key, value)
        if not isinstance(found, str | list | tuple):
            raise ValueError(f"expected the kinds of the layers of a {kind}, got {shown(found)}")
        data[key] = tuple(_KINDS.get(one, one) if isinstance(one, str) else one for one in found)
    if kind == "nemotron_h":
        data.setdefault("num_hidden_layers", len(data["layer_types"]))
        if _MOE not in data["layer_types"]:
            data.pop("num_experts", None)
    sizes = data.pop("mamba_expand", 2), data.get("hidden_size"), data.get("mamba_num_heads")
    if data.get("mamba_head_dim", "auto") == "auto" and all(isinstance(size, int) and size for size in sizes):
        expand, hidden, heads = sizes
        data["mamba_head_dim"] = expand * hidden // heads


def _experts(kind: str, data: dict[str, Any]) -> None:
    """Widths of experts: some families call that of an expert `intermediate_size`."""
    if FAMILIES[kind].narrow:
        dense = data.pop("intermediate_size_mlp", data.get("intermediate_size"))
        if "intermediate_size" in data:
            data.setdefault("moe_intermediate_size", data["intermediate_size"])
            if kind == "llama4":
                data.setdefault("shared_expert_intermediate_size", data["intermediate_size"])
            data["intermediate_size"] = dense
    shared, width = data.pop("n_shared_experts", None), data.get("moe_intermediate_size", 0)
    if kind == "qwen3_5_moe":
        data.setdefault("intermediate_size", width)  # it has no dense layers
    if kind == "granitemoehybrid" and not data.get("num_experts"):
        data["intermediate_size"] = data["shared_expert_intermediate_size"]
    layers = data.get("num_hidden_layers")
    parts = data.pop("mlp_layer_types", None)  # what transformers 5 writes in the place of first_k_dense_replace
    if parts is not None:
        if not isinstance(parts, list | tuple) or {*map(str, parts)} - {"dense", "sparse"} or len(parts) != layers:
            raise ValueError(f'mlp_layer_types: expected "dense" or "sparse" for each layer, got {shown(parts)}')
        data |= {"first_k_dense_replace": 0, "moe_layer_freq": 1, "decoder_sparse_step": 1}
        data["mlp_only_layers"] = tuple(index for index, part in enumerate(parts) if part == "dense")
    last = data.pop("moe_layer_end_index", -1)
    if kind == "ernie4_5_moe" and isinstance(last, int) and isinstance(layers, int) and last >= 0:
        data.setdefault("mlp_only_layers", tuple(range(last + 1, min(layers, MOST_LAYERS))))
    width = data.pop("moe_shared_expert_intermediate_size", width)
    if isinstance(shared, int) and isinstance(width, int):
        data.setdefault("shared_expert_intermediate_size", shared * width)


def _attention_kinds(kind: str, data: dict[str, Any]) -> None:
    """`layer_types`, where not all are full, and the window of those that have one."""
    layers: Any = data.get("num_hidden_layers")
    window = data.get("sliding_window")
    asked, first = data.pop("use_sliding_window", False), data.pop("max_window_layers", 0)
    every = data.pop("sliding_window_pattern", 4 if kind == "exaone4" else 6)
    pattern = [_SLIDING] * (every - 1) + [_FULL] if isinstance(every, int) and 0 < every <= MOST_LAYERS else []
    if isinstance(every, str) and not set(every) - {"L", "G"}:
        pattern = [_SLIDING if one == "L" else _FULL for one in every]
    if not pattern and kind in ("gemma3", "exaone4"):
        raise ValueError(f"sliding_window_pattern: expected every how many layers one is full, got {shown(every)}")
    interval = data.pop("full_attention_interval", 4)
    roped, spaced = data.pop("no_rope_layers", None), data.pop("no_rope_layer_interval", 4)
    if not all(isinstance(count, int) and 0 < count <= MOST_LAYERS for count in (layers, interval, spaced)):
        return
    numbers = range(1, layers + 1)
    types: list[str] = []
    match kind:
        case "qwen2" | "qwen3" if asked and window and isinstance(first, int):
            types = [_SLIDING if number > first else _FULL for number in numbers]
        case "qwen2_moe" if asked and window and isinstance(first, int):
            types = [_SLIDING if number % 2 and number <= first else _FULL for number in numbers]
        case "qwen3_moe" if asked:
            types = [_SLIDING] * layers if window else []
        case "mistral" | "mixtral" | "phi3":
            types = [_SLIDING] * layers if window else []
        case "gemma2" | "gpt_oss":
            types = [_SLIDING if number % 2 else _FULL for number in numbers]
        case "gemma3":
            types = [pattern[index % len(pattern)] for index in range(layers)]
        case "exaone4":
            types = [pattern[index % len(pattern)] if window else _FULL for index in range(layers)]
        case "olmo3":
            types = [_SLIDING if number % 4 else _FULL for number in numbers]
        case "llama4":
            plain = [number % spaced for number in numbers]
            rotary = roped if isinstance(roped, list | tuple) and roped else plain
            types = [_CHUNKED if window and one else _FULL for one in rotary]
        case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
            types = [_LINEAR if number % interval else _FULL for number in numbers]
    found = data.setdefault("layer_types", types)
    if not isinstance(found, list | tuple):
        return
    named = {one for one in found if isinstance(one, str)}
    if not types and kind not in MIXED and all(one == _FULL for one in found):
        del data["layer_types"]  # all alike, however many there are
    if not named & set(WINDOWED):
        data.pop("sliding_window", None)


@lru_cache(maxsize=512)
def layers_of(config: Config) -> tuple[Layer, ...]:
    """The layers of a model, first to last."""
    kinds = config.layer_types or (_FULL,) * config.num_hidden_layers
    made = {
        key: _layer(config, *key)
        for key in dict.fromkeys((kind, _has_experts(config, i)) for i, kind in enumerate(kinds))
    }
    return tuple(made[kind, _has_experts(config, index)] for index, kind in enumerate(kinds))


@lru_cache(maxsize=512)
def following_layers_of(config: Config) -> tuple[Layer, ...]:
    """The layers of each of a model's layers for multi-token prediction: one like its last, if it says nothing."""
    return tuple(_layer(config, kind, kind == _MOE) for kind in config.mtp_layer_types) or layers_of(config)[-1:]


def _layer(config: Config, kind: LayerType, experts: bool) -> Layer:
    family = FAMILIES[config.model_type]
    alone = family.one_part and kind not in (_MLP, _MOE)
    return Layer(
        hidden=config.hidden_size,
        attention=_attention(config, family, kind),
        mlp=NoFeedForward() if alone else _feed_forward(config, family, experts or kind == _MOE),
        norms=family.norms,
    )


def _feed_forward(config: Config, family: Family, experts: bool) -> FeedForward:
    if not experts:
        return Dense(width=config.intermediate_size, bias=config.mlp_bias, gated=family.gated_mlp)
    return Experts(
        experts=config.num_experts,
        active=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        shared_width=config.shared_expert_intermediate_size,
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
        bias=family.expert_bias,
        gated=family.gated_mlp,
        latent_width=config.moe_latent_size,
    )


def _attention(config: Config, family: Family, kind: LayerType) -> Attention:
    if kind in (_MLP, _MOE):
        return NoAttention()
    state_scale = 4 / config.dtype_bytes if config.mamba_ssm_dtype == "float32" else 1
    if kind == _MAMBA:
        return Mamba2(
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            state_dim=config.ssm_state_size,
            chunk_tokens=config.chunk_size,
            kernel=config.conv_kernel,
            state_scale=state_scale,
        )
    if kind == _LINEAR:
        return LinearAttention(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
            state_scale=state_scale,
        )
    if family.latent and config.kv_lora_rank:
        return LatentAttention(
            heads=config.num_attention_heads,
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
            bias=config.attention_bias,
        )
    return FullAttention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window_tokens=None if kind == _FULL else config.sliding_window,
        chunked=kind == _CHUNKED,
        qkv_bias=family.qkv_bias or config.attention_bias,
        o_bias=family.o_bias and config.attention_bias,
        head_norms=family.head_norms or (config.model_type == "glm4_moe" and config.use_qk_norm),
        whole_norms=family.whole_norms,
        gated=family.gated,
        sinks=family.sinks,
    )


def _has_experts(config: Config, index: int) -> bool:
    return (
        config.num_experts > 0
        and index >= config.first_k_dense_replace
        and index % config.moe_layer_freq == 0
        and (index + 1) % config.decoder_sparse_step == 0
        and index not in config.mlp_only_layers
    )

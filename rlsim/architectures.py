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

from rlsim.layers import Attention, Dense, Experts, FullAttention, LatentAttention, Layer, LinearAttention
from rlsim.precision import KvPrecision, Precision
from rlsim.schema import Name, Schema


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's modelling code has beyond RMS norms, rotary embedding, gated MLPs and grouped-query attention.

    `qkv_bias`: on q, k and v, whatever `attention_bias` says; `o_bias`: `attention_bias` is of o, too. `norms`: RMS
    norms over the hidden state in a layer. `latent`: its attention is MLA. The rest as in `FullAttention` and
    `Experts`. `defaults`: of words that published configurations leave out.
    """

    qkv_bias: bool = False
    o_bias: bool = True
    latent: bool = False
    head_norms: bool = False
    gated: bool = False
    sinks: bool = False
    norms: int = 2
    experts: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=True),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen2_moe": Family(qkv_bias=True, o_bias=False, experts=True, shared_gate=True),
    "qwen3": Family(head_norms=True),
    "qwen3_moe": Family(head_norms=True, experts=True),
    "qwen3_next": Family(head_norms=True, gated=True, experts=True, shared_gate=True),
    "qwen3_5": Family(head_norms=True, gated=True),
    "qwen3_5_moe": Family(head_norms=True, gated=True, experts=True, shared_gate=True),
    "phi3": Family(),
    "granite": Family(),
    "seed_oss": Family(o_bias=False),
    "smollm3": Family(defaults={"tie_word_embeddings": True}),
    "deepseek_v2": Family(latent=True, experts=True),
    "deepseek_v3": Family(latent=True, experts=True, router_bias=True),
    "kimi_k2": Family(latent=True, experts=True, router_bias=True),
    "glm4": Family(qkv_bias=True, o_bias=False, norms=4),
    "glm4_moe": Family(o_bias=False, experts=True, router_bias=True),
    "gpt_oss": Family(sinks=True, experts=True, router_bias=True, expert_bias=True, defaults={"attention_bias": True}),
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
    "llama4": Family(experts=True, defaults={"sliding_window": 8192, "head_dim": 128}),
}

#: The text part of a multimodal model, by its own `model_type` or the whole model's, and the family that it is of.
TEXT_PARTS = {
    "gemma3_text": "gemma3",
    "glm4v_text": "glm4",
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
    "interleave_moe_layer_step": "decoder_sparse_step",  # llama4
    "attention_chunk_size": "sliding_window",
    "mtp_num_hidden_layers": "num_nextn_predict_layers",
}
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
_FULL, _SLIDING, _CHUNKED, _LINEAR = get_args(LayerType)

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
        default=(), description="the attention of every layer; none: full_attention"
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
    mamba_ssm_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None, description="type of the state of linear attention; none: the model's"
    )

    intermediate_size: int = Field(gt=0, le=10_000_000, description="width of the dense MLP")
    mlp_bias: bool = Field(default=False, description="biases on gate, up and down")
    num_experts: int = Field(default=0, ge=0, le=100_000, description="experts per layer; 0 for a dense model")
    num_experts_per_tok: int = Field(default=0, ge=0, le=100_000)
    moe_intermediate_size: int = Field(default=0, ge=0, le=10_000_000, description="width of one expert")
    shared_expert_intermediate_size: int = Field(
        default=0, ge=0, le=10_000_000, description="width of the expert that every token passes"
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
        if FAMILIES[self.model_type].experts != bool(self.num_experts):
            raise ValueError(f"model_type {self.model_type!r} does not go with num_experts {self.num_experts}")
        if self.num_experts and not (0 < self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size):
            raise ValueError("experts need moe_intermediate_size and num_experts_per_tok, at most num_experts")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if {_SLIDING, _CHUNKED} & set(self.layer_types) and not self.sliding_window:
            raise ValueError("layers with a window need sliding_window")
        needed = _LINEAR_SIZES if _LINEAR in self.layer_types else ()
        needed += _LATENT_SIZES if FAMILIES[self.model_type].latent else ()
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"the attention of {self.model_type} needs {', '.join(missing)}")
        return self


def unsupported(model_type: object) -> str:
    """What to say of a `model_type` that no family has."""
    return f"model_type {model_type!r} is not supported; one of: {', '.join(MODEL_TYPES)}"


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
    _experts(kind, data)
    _attention_kinds(kind, data)
    return data


def _experts(kind: str, data: dict[str, Any]) -> None:
    """Widths of experts: some families call that of an expert `intermediate_size`."""
    if kind in ("mixtral", "gpt_oss", "llama4"):
        dense = data.pop("intermediate_size_mlp", data.get("intermediate_size"))
        if "intermediate_size" in data:
            data.setdefault("moe_intermediate_size", data["intermediate_size"])
            if kind == "llama4":
                data.setdefault("shared_expert_intermediate_size", data["intermediate_size"])
            data["intermediate_size"] = dense
    shared, width = data.pop("n_shared_experts", 0), data.get("moe_intermediate_size", 0)
    if kind == "qwen3_5_moe":
        data.setdefault("intermediate_size", width)  # it has no dense layers
    if isinstance(shared, int) and isinstance(width, int) and shared:
        data.setdefault("shared_expert_intermediate_size", shared * width)


def _attention_kinds(kind: str, data: dict[str, Any]) -> None:
    """`layer_types`, where not all are full, and the window of those that have one."""
    layers: Any = data.get("num_hidden_layers")
    window = data.get("sliding_window")
    asked, first = data.pop("use_sliding_window", False), data.pop("max_window_layers", 0)
    every = data.pop("sliding_window_pattern", 6)
    interval = data.pop("full_attention_interval", 4)
    roped, spaced = data.pop("no_rope_layers", None), data.pop("no_rope_layer_interval", 4)
    if not all(isinstance(count, int) and 0 < count <= MOST_LAYERS for count in (layers, every, interval, spaced)):
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
            types = [_SLIDING if number % every else _FULL for number in numbers]
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
    if not types and all(one == _FULL for one in found):
        del data["layer_types"]  # all alike, however many there are
    if not named & {_SLIDING, _CHUNKED}:
        data.pop("sliding_window", None)


@lru_cache(maxsize=512)
def layers_of(config: Config) -> tuple[Layer, ...]:
    """The layers of a model, first to last."""
    family = FAMILIES[config.model_type]
    kinds = config.layer_types or (_FULL,) * config.num_hidden_layers
    attention = {kind: _attention(config, family, kind) for kind in dict.fromkeys(kinds)}
    dense = Dense(width=config.intermediate_size, bias=config.mlp_bias)
    experts = Experts(
        experts=config.num_experts,
        active=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        shared_width=config.shared_expert_intermediate_size,
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
        bias=family.expert_bias,
    )
    return tuple(
        Layer(
            hidden=config.hidden_size,
            attention=attention[kind],
            mlp=experts if _has_experts(config, index) else dense,
            norms=family.norms,
        )
        for index, kind in enumerate(kinds)
    )


def _attention(config: Config, family: Family, kind: str) -> Attention:
    if kind == _LINEAR:
        return LinearAttention(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
            state_scale=4 / config.dtype_bytes if config.mamba_ssm_dtype == "float32" else 1,
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

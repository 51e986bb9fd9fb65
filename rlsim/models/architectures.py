"""The shape of a language model in the words of its config.json, and the layers that these mean."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, model_validator

from rlsim.base.schema import Name, Schema
from rlsim.models.config_words import canonical
from rlsim.models.families import (
    CHUNKED,
    FAMILIES,
    FULL,
    LINEAR,
    MAMBA,
    MLP,
    MODEL_TYPES,
    MOE,
    MOST_LAYERS,
    SIZES,
    UNCACHED,
    Family,
    LayerType,
)
from rlsim.models.layers import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    FullAttention,
    Index,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba2,
    NoAttention,
    NoFeedForward,
)
from rlsim.models.precision import KvPrecision, Precision


class Config(Schema):
    """The shape of a model in the words of its `config.json`, where families differ in one family's."""

    name: Name
    title: str = ""
    source: str = ""
    note: str = ""
    model_type: str = Field(description=f"one of {', '.join(MODEL_TYPES)}")
    architectures: tuple[str, ...] = ()
    hidden_size: int = Field(gt=0, le=1_000_000)
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    vocab_size: int = Field(gt=0, le=100_000_000)
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = Field(default=None, gt=0)
    num_nextn_predict_layers: int = Field(default=0, ge=0, le=1000)
    dtype_bytes: float = Field(default=2, ge=0.125, le=8)
    precision: Precision = "bf16"
    expert_precision: Precision | None = None
    kv_precision: KvPrecision = "bf16"
    kv_window_share: float | None = Field(default=None, gt=0, le=1)

    num_attention_heads: int = Field(gt=0, le=100_000)
    num_key_value_heads: int = Field(gt=0, le=100_000)
    head_dim: int = Field(gt=0, le=100_000)
    attention_bias: bool = False
    use_qk_norm: bool = False
    layer_types: tuple[LayerType, ...] = ()
    mtp_layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = Field(default=None, gt=0)
    q_lora_rank: int | None = Field(default=None, gt=0, le=1_000_000)
    kv_lora_rank: int | None = Field(default=None, gt=0, le=1_000_000)
    qk_nope_head_dim: int = Field(default=0, ge=0, le=100_000)
    qk_rope_head_dim: int = Field(default=0, ge=0, le=100_000)
    v_head_dim: int = Field(default=0, ge=0, le=100_000)
    index_n_heads: int = Field(default=0, ge=0, le=100_000)
    index_head_dim: int = Field(default=0, ge=0, le=100_000)
    index_topk: int = Field(default=0, ge=0, le=10_000_000)
    indexer_types: tuple[Literal["full", "shared"], ...] = ()
    num_global_key_value_heads: int = Field(default=0, ge=0, le=100_000)
    global_head_dim: int = Field(default=0, ge=0, le=100_000)
    attention_k_eq_v: bool = False
    swa_num_attention_heads: int = Field(default=0, ge=0, le=100_000)
    swa_num_key_value_heads: int = Field(default=0, ge=0, le=100_000)
    swa_head_dim: int = Field(default=0, ge=0, le=100_000)
    swa_v_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_num_key_heads: int = Field(default=0, ge=0, le=100_000)
    linear_num_value_heads: int = Field(default=0, ge=0, le=100_000)
    linear_key_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_value_head_dim: int = Field(default=0, ge=0, le=100_000)
    linear_conv_kernel_dim: int = Field(default=0, ge=0, le=1000)
    mamba_num_heads: int = Field(default=0, ge=0, le=100_000)
    mamba_head_dim: int = Field(default=0, ge=0, le=100_000)
    n_groups: int = Field(default=0, ge=0, le=100_000)
    ssm_state_size: int = Field(default=0, ge=0, le=100_000)
    conv_kernel: int = Field(default=0, ge=0, le=1000)
    chunk_size: int = Field(default=0, ge=0, le=100_000)
    mamba_ssm_dtype: Literal["bfloat16", "float16", "float32"] | None = None

    intermediate_size: int = Field(gt=0, le=10_000_000)
    mlp_bias: bool = False
    num_experts: int = Field(default=0, ge=0, le=100_000)
    num_experts_per_tok: int = Field(default=0, ge=0, le=100_000)
    moe_intermediate_size: int = Field(default=0, ge=0, le=10_000_000)
    shared_expert_intermediate_size: int = Field(default=0, ge=0, le=10_000_000)
    moe_latent_size: int = Field(default=0, ge=0, le=1_000_000)
    first_k_dense_replace: int = Field(default=0, ge=0, le=MOST_LAYERS)
    moe_layer_freq: int = Field(default=1, gt=0, le=MOST_LAYERS)
    decoder_sparse_step: int = Field(default=1, gt=0, le=MOST_LAYERS)
    mlp_only_layers: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Every family's words become those of this record, with Hugging Face's own defaults."""
        return canonical(data) if isinstance(data, dict) else data

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def uncached(self) -> bool:
        """Whether no layer has a KV cache."""
        return bool(self.layer_types) and set(self.layer_types) <= set(UNCACHED)

    @property
    def unsaid(self) -> list[str]:
        """Words that its kinds of attention need, and that say nothing."""
        parts = [kind for kind in (LINEAR, MAMBA) if kind in self.layer_types]
        parts += ["latent"] * self.family.latent + ["index"] * self.family.sparse
        words = ["q_lora_rank"] * self.family.sparse + [word for part in parts for word in SIZES[part].values()]
        return [word for word in words if not getattr(self, word)]


@lru_cache(maxsize=512)
def layers_of(config: Config) -> tuple[Layer, ...]:
    """The layers of a model, first to last."""
    layers = config.num_hidden_layers
    kinds = config.layer_types or (FULL,) * layers
    indices = config.indexer_types or ("full",) * layers
    each = [(kind, _has_experts(config, i), indices[i] == "shared") for i, kind in enumerate(kinds)]
    made = {key: _layer(config, *key) for key in dict.fromkeys(each)}
    return tuple(made[key] for key in each)


@lru_cache(maxsize=512)
def following_layers_of(config: Config) -> tuple[Layer, ...]:
    """The layers of each of a model's layers for multi-token prediction: one like its last, if it says nothing."""
    last, kinds = config.num_hidden_layers - 1, config.layer_types or (FULL,)
    following = [(kind, kind == MOE) for kind in config.mtp_layer_types] or [(kinds[-1], _has_experts(config, last))]
    return tuple(_layer(config, kind, experts) for kind, experts in following)


def _layer(config: Config, kind: LayerType, experts: bool, shared: bool = False) -> Layer:
    family = config.family
    alone = family.one_part and kind not in (MLP, MOE)
    return Layer(
        hidden=config.hidden_size,
        attention=_attention(config, family, kind, shared),
        mlp=NoFeedForward() if alone else _feed_forward(config, family, experts or kind == MOE),
        norms=family.norms + (family.expert_norms if experts else 0),
    )


def _feed_forward(config: Config, family: Family, experts: bool) -> FeedForward:
    if not experts:
        return Dense(width=config.intermediate_size, bias=config.mlp_bias, gated=family.gated_mlp)
    return Experts(
        **_sizes(config, MOE),
        shared_gate=family.shared_gate,
        router_bias=_said(config, family.router_bias),
        bias=family.expert_bias,
        gated=family.gated_mlp,
    )


def _attention(config: Config, family: Family, kind: LayerType, shared: bool) -> Attention:
    if kind in (MLP, MOE):
        return NoAttention()
    state_scale = 4 / config.dtype_bytes if config.mamba_ssm_dtype == "float32" else 1
    if kind == MAMBA:
        return Mamba2(**_sizes(config, kind), state_scale=state_scale)
    if kind == LINEAR:
        gate_rank = config.linear_value_head_dim if family.channel_gates else 0
        return LinearAttention(**_sizes(config, kind), gate_rank=gate_rank, state_scale=state_scale)
    if family.latent and config.kv_lora_rank:
        return LatentAttention(
            heads=config.num_attention_heads,
            q_rank=config.q_lora_rank,
            **_sizes(config, "latent"),
            bias=config.attention_bias,
            index=Index(**_sizes(config, "index"), shared=shared) if family.sparse else None,
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim, v_dim = config.head_dim, config.v_head_dim
    if kind == FULL:
        head_dim = config.global_head_dim or head_dim
        kv_heads = (config.attention_k_eq_v and config.num_global_key_value_heads) or kv_heads
    else:
        heads, kv_heads = config.swa_num_attention_heads or heads, config.swa_num_key_value_heads or kv_heads
        head_dim, v_dim = config.swa_head_dim or head_dim, config.swa_v_head_dim or v_dim
    return FullAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=0 if v_dim == head_dim else v_dim,
        window_tokens=None if kind == FULL else config.sliding_window,
        chunked=kind == CHUNKED,
        qkv_bias=family.qkv_bias or config.attention_bias,
        o_bias=family.o_bias and config.attention_bias,
        head_norms=_said(config, family.head_norms),
        whole_norms=family.whole_norms,
        gated=family.gated,
        sinks=family.sinks if isinstance(family.sinks, bool) else kind == family.sinks,
        one_kv=kind == FULL and config.attention_k_eq_v,
    )


def _sizes(config: Config, kind: str) -> dict[str, Any]:
    return {size: getattr(config, word) for size, word in SIZES[kind].items()}


def _said(config: Config, flag: bool | str) -> bool:
    """Whether a family has what its row says, or the word that it names."""
    return flag if isinstance(flag, bool) else bool(getattr(config, flag))


def _has_experts(config: Config, index: int) -> bool:
    return (
        config.num_experts > 0
        and index >= config.first_k_dense_replace
        and index % config.moe_layer_freq == 0
        and (index + 1) % config.decoder_sparse_step == 0
        and index not in config.mlp_only_layers
    )

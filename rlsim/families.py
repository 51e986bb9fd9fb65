"""Hugging Face's families of language models, each a `model_type`, and what sets their layers apart.

What a config.json leaves out is as transformers' configuration classes have it, what it does not say at all as in its
modelling code (`models/*/configuration_*.py` and `modeling_*.py`, version 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rlsim.errors import shown
from rlsim.unsupported import FEATURES

LayerType = Literal[
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "mlp", "moe"
]
FULL, SLIDING, CHUNKED, LINEAR, MAMBA, MLP, MOE = get_args(LayerType)
#: Layers with a window of tokens, and layers that cache no token.
WINDOWED, UNCACHED = (SLIDING, CHUNKED), (LINEAR, MAMBA, MLP, MOE)


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
        return {FULL, *WINDOWED, self.state, *((MLP, MOE) if self.one_part else ())}


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

#: Layers that a model may have.
MOST_LAYERS = 10_000

#: The families that are known.
MODEL_TYPES = tuple(FAMILIES)


def unsupported(model_type: object) -> str:
    """What to say of a `model_type` that no family has."""
    said = f"model_type {shown(model_type)} is not supported"
    if isinstance(model_type, str) and model_type in FEATURES:
        return f"{said}: {FEATURES[model_type]}"
    return f"{said}; one of: {', '.join(MODEL_TYPES)}"


def family_name(model_type: Any) -> Any:
    """The family of a `model_type`; what is no family's name comes back as it is, and what is no text as none."""
    return TEXT_PARTS.get(model_type, model_type) if isinstance(model_type, str) else None

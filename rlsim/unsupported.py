"""What of Hugging Face's models rlsim has no costs for, by the name of the feature.

A family is refused by its `model_type`, a configuration of any family by words that change its arithmetic or its
memory. What a word means is taken from transformers' and vLLM's modelling code (2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_BIASED_NORMS = "norms with biases"
_ENCODER = "an encoder beside the decoder"
_HEARS = "a model that hears and speaks around its language model"
_LIGHTNING = "lightning attention"
_MAMBA_1 = "Mamba-1 layers"
_NO_CACHE = "no layer with a KV cache"
_SHAPES = "layers of different shapes (block_configs)"
_SHARED_KV = "layers that share the KV cache of others (num_kv_shared_layers)"
_SPARSE = "sparse attention (index_topk)"

#: Features of families that are not supported.
FEATURES: Mapping[str, str] = {
    "bailing_hybrid": _LIGHTNING,
    "bart": _ENCODER,
    "cohere": "attention and feed-forward side by side",
    "cohere2": "attention and feed-forward side by side",
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "compressed sparse attention and hyper-connections",
    "falcon_h1": "attention and Mamba-2 side by side in a layer",
    "falcon_mamba": _NO_CACHE,
    "gemma3n": f"{_SHARED_KV} and embeddings of every layer",
    "gemma3n_text": f"{_SHARED_KV} and embeddings of every layer",
    "gemma4": f"heads of two sizes, {_SHARED_KV}",
    "gemma4_text": f"heads of two sizes, {_SHARED_KV}",
    "glm_moe_dsa": _SPARSE,
    "gpt2": "learned positions and norms with biases",
    "jamba": _MAMBA_1,
    "kimi_linear": "linear attention (Kimi delta attention)",
    "lfm2": "short convolutions in the place of attention",
    "lfm2_moe": "short convolutions in the place of attention",
    "longcat_flash": "experts that compute nothing",
    "mamba": _NO_CACHE,
    "mamba2": _NO_CACHE,
    "mimo_v2_flash": "other heads in layers with a window",
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "mllama": "cross-attention to images",
    "nemotron": _BIASED_NORMS,
    "nemotron-nas": _SHAPES,
    "nemotron_h_puzzle": _SHAPES,
    "opt": "learned positions and norms with biases",
    "phi": _BIASED_NORMS,
    "phimoe": _BIASED_NORMS,
    "qwen2_5_omni": _HEARS,
    "qwen2_audio": _HEARS,
    "qwen3_omni_moe": _HEARS,
    "stablelm": _BIASED_NORMS,
    "starcoder2": _BIASED_NORMS,
    "t5": _ENCODER,
    "t5gemma": _ENCODER,
    "whisper": _ENCODER,
    "zamba2": "layers that share their weights",
}

#: Activations between the matrices of an MLP with a gate; which of them it is costs the same.
_GATED = ("silu", "swish", "swiglu", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_tanh", "gelu_pytorch_tanh")


def _ungated(value: Any) -> bool:
    return isinstance(value, str) and value.lower() not in _GATED


#: Words of a configuration: which of their values mean that, and what they mean.
WORDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "index_topk": (bool, _SPARSE),
    "num_kv_shared_layers": (bool, _SHARED_KV),
    "hidden_size_per_layer_input": (bool, "embeddings of every layer (hidden_size_per_layer_input)"),
    "attention_k_eq_v": (bool, "keys that are values (attention_k_eq_v)"),
    "global_head_dim": (bool, "heads of two sizes (global_head_dim)"),
    "swa_head_dim": (bool, "other heads in layers with a window (swa_head_dim)"),
    "swa_num_key_value_heads": (bool, "other heads in layers with a window (swa_num_key_value_heads)"),
    "block_configs": (bool, _SHAPES),
    "compress_ratios": (bool, "compressed attention (compress_ratios)"),
    "hc_mult": (bool, "hyper-connections (hc_mult)"),
    "cross_attention_layers": (bool, "cross-attention (cross_attention_layers)"),
    "is_encoder_decoder": (bool, f"{_ENCODER} (is_encoder_decoder)"),
    "attn_type_list": (lambda value: isinstance(value, list) and 0 in value, f"{_LIGHTNING} (attn_type_list)"),
    "zero_expert_num": (bool, "experts that compute nothing (zero_expert_num)"),
    "hidden_act": (_ungated, "an activation without a gate (hidden_act)"),
    "hidden_activation": (_ungated, "an activation without a gate (hidden_activation)"),
    "mamba_proj_bias": (bool, "Mamba-2 with biases on its projections (mamba_proj_bias)"),
    "use_bias": (bool, "biases on all projections (use_bias)"),
    "use_conv_bias": (lambda value: value is False, "Mamba-2 without a bias on its convolution (use_conv_bias)"),
    "mamba_conv_bias": (lambda value: value is False, "Mamba-2 without a bias on its convolution (mamba_conv_bias)"),
    "moe_latent_size": (bool, "experts in a latent (moe_latent_size)"),
}

#: Words that a family does have costs for.
KNOWN = {"ernie4_5": ("use_bias",), "nemotron_h": ("moe_latent_size", "hidden_act")}


def features(config: Mapping[str, Any], family: str) -> list[str]:
    """What the words of a configuration say of its model, of that family, that rlsim has no costs for."""
    beside = KNOWN.get(family, ())
    return [what for word, (means, what) in WORDS.items() if word not in beside and means(config.get(word))]

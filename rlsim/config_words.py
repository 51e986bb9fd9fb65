"""The words of any family's config.json in those of `rlsim.architectures.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsim.errors import shown
from rlsim.families import CHUNKED, FAMILIES, FULL, LINEAR, MAMBA, MLP, MOE, MOST_LAYERS, SLIDING, WINDOWED, family_name

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

#: What nemotron_h and granitemoehybrid call kinds of layers, in a pattern or by name.
_KINDS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE, "attention": FULL, "linear_attention": MAMBA}

#: Families whose layers are Mamba-2 if nothing is said.
MIXED = ("nemotron_h", "granitemoehybrid")


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
    plain = [MAMBA] * layers if isinstance(layers, int) and layers <= MOST_LAYERS else []
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
        if MOE not in data["layer_types"]:
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
        data["intermediate_size"] = data.get("shared_expert_intermediate_size")
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
    pattern = [SLIDING] * (every - 1) + [FULL] if isinstance(every, int) and 0 < every <= MOST_LAYERS else []
    if isinstance(every, str) and not set(every) - {"L", "G"}:
        pattern = [SLIDING if one == "L" else FULL for one in every]
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
            types = [SLIDING if number > first else FULL for number in numbers]
        case "qwen2_moe" if asked and window and isinstance(first, int):
            types = [SLIDING if number % 2 and number <= first else FULL for number in numbers]
        case "qwen3_moe" if asked:
            types = [SLIDING] * layers if window else []
        case "mistral" | "mixtral" | "phi3":
            types = [SLIDING] * layers if window else []
        case "gemma2" | "gpt_oss":
            types = [SLIDING if number % 2 else FULL for number in numbers]
        case "gemma3":
            types = [pattern[index % len(pattern)] for index in range(layers)]
        case "exaone4":
            types = [pattern[index % len(pattern)] if window else FULL for index in range(layers)]
        case "olmo3":
            types = [SLIDING if number % 4 else FULL for number in numbers]
        case "llama4":
            plain = [number % spaced for number in numbers]
            rotary = roped if isinstance(roped, list | tuple) and roped else plain
            types = [CHUNKED if window and one else FULL for one in rotary]
        case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
            types = [LINEAR if number % interval else FULL for number in numbers]
    found = data.setdefault("layer_types", types)
    if not isinstance(found, list | tuple):
        return
    named = {one for one in found if isinstance(one, str)}
    if not types and kind not in MIXED and all(one == FULL for one in found):
        del data["layer_types"]  # all alike, however many there are
    if not named & set(WINDOWED):
        data.pop("sliding_window", None)

"""The words of any family's config.json as those of `architectures.Config`, by `rlsim/data/families.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from rlsim.errors import shown
from rlsim.models.families import (
    FAMILIES,
    FULL,
    KINDS,
    LINEAR,
    MOE,
    MOST_LAYERS,
    WINDOWED,
    WORDS,
    Family,
    family_name,
    flat,
    unsupported,
)


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The words of any family as `Model` has them; what makes no sense is left for its checks.

    Raises `ValueError` for a `model_type` that no family has.
    """
    kind = family_name(config.get("model_type"))
    if kind is None:
        return dict(config)
    if kind not in FAMILIES:
        raise ValueError(unsupported(kind))
    family, data = FAMILIES[kind], dict[str, Any]()
    for word, value in flat({**family.defaults, **config}).items():
        data |= dict.fromkeys(family.words.get(word) or WORDS.get(word) or (word,), value)
    for word, value in family.defaults.items():
        if isinstance(value, str) and data[word] == value:  # the name of another word
            data[word] = data.get(value, value)
    data = {key: value for key, value in data.items() if value is not None} | {"model_type": kind}
    heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
    data.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and heads and isinstance(hidden, int):
        data.setdefault("head_dim", hidden // heads)
    sizes = data.pop("mamba_expand", 2), hidden, data.get("mamba_num_heads")
    if data.get("mamba_head_dim", "auto") == "auto" and all(isinstance(size, int) and size for size in sizes):
        data["mamba_head_dim"] = sizes[0] * sizes[1] // sizes[2]
    _layers(family, data)
    _experts(family, data)
    _indices(family, data)
    return data


def _indices(family: Family, data: dict[str, Any]) -> None:
    """Which layers of sparse attention have an index of their own (transformers: `GlmMoeDsaConfig`)."""
    pattern, offset = data.pop("index_topk_pattern", None), data.pop("index_skip_topk_offset", 2)
    layers: Any = data.get("num_hidden_layers")
    every = data.pop("index_topk_freq", 1)
    if not family.sparse or not all(isinstance(count, int) for count in (layers, every, offset)):
        return
    if isinstance(pattern, str | list | tuple):
        data.setdefault("indexer_types", tuple({"F": "full", "S": "shared"}.get(one, one) for one in pattern))
    elif every > 1 and layers <= MOST_LAYERS:
        own = (max(index - offset + 1, 0) % every == 0 for index in range(layers))
        data.setdefault("indexer_types", tuple("full" if one else "shared" for one in own))


def _layers(family: Family, data: dict[str, Any]) -> None:
    """`layer_types`, where not all are full, and the window of those that have one."""
    asked, bound = data.pop("use_sliding_window", False), data.pop("max_window_layers", 0)
    pattern = _pattern(family, data)
    for key in ("layer_types", "mtp_layer_types"):
        if key in data:
            data[key] = _kinds(family, data[key])
    if "layer_types" in data:
        data.setdefault("num_hidden_layers", len(data["layer_types"]))
    layers: Any = data.get("num_hidden_layers")
    if "layer_types" not in data and isinstance(layers, int) and 0 < layers <= MOST_LAYERS:
        kinds = list(islice(cycle(pattern), layers))
        if family.windows and not (asked and isinstance(bound, int)):
            kinds = [FULL] * layers
        elif family.windows == "after":
            kinds = [FULL if index < bound else kind for index, kind in enumerate(kinds)]
        elif family.windows == "before":
            kinds = [FULL if index >= bound else kind for index, kind in enumerate(kinds)]
        if not data.get("sliding_window"):
            kinds = [FULL if kind in WINDOWED else kind for kind in kinds]
        data["layer_types"] = tuple(kinds)
    kinds = data.get("layer_types", ())
    if {*kinds} <= {FULL} and not family.state and "sliding_window" not in family.defaults:
        data.pop("layer_types", None)  # as they are if nothing is said, however many there are
    if not {*kinds} & {*WINDOWED}:
        data.pop("sliding_window", None)


def _pattern(family: Family, data: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of a family's layers, over and over, as the configuration says or else the table."""
    layers, numbers = data.get("num_hidden_layers"), data.pop(family.numbers, None)
    if isinstance(numbers, list | tuple) and isinstance(layers, int):
        return tuple(family.state if number + 1 in numbers else FULL for number in range(min(layers, MOST_LAYERS)))
    letters = found = family.layers or "G"
    for word in reversed(family.every):
        said = data.pop(word, None)
        if isinstance(said, list | tuple):  # a number for each layer
            found = "".join(letters[0] if one else letters[-1] for one in said) or found
        elif isinstance(said, int) and 0 < said <= MOST_LAYERS:
            found = letters[0] * (said - 1) + letters[-1]
        elif isinstance(said, str) and said and {*said} <= {*KINDS}:
            found = said
        elif said is not None:
            raise ValueError(f"{word}: expected every how many layers one is full, got {shown(said)}")
    return _kinds(family, found)


def _kinds(family: Family, pattern: Any) -> tuple[Any, ...]:
    if not isinstance(pattern, str | list | tuple):
        raise ValueError(f"expected the kinds of the layers, got {shown(pattern)}")
    named = (KINDS.get(one, one) if isinstance(one, str) else one for one in pattern)
    return tuple(family.state if one == LINEAR and family.state else one for one in named)


def _experts(family: Family, data: dict[str, Any]) -> None:
    if family.narrow:
        dense = data.pop("intermediate_size_mlp", data.get("intermediate_size"))
        if "intermediate_size" in data:
            data.setdefault("moe_intermediate_size", data["intermediate_size"])
            data["intermediate_size"] = dense
        if family.experts is None and not data.get("num_experts"):
            data["intermediate_size"] = data.get("shared_expert_intermediate_size")
    if family.one_part and MOE not in data.get("layer_types", ()):
        data.pop("num_experts", None)
    for word in ("num_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"):
        each = data.get(word)
        if isinstance(each, list | tuple) and len({*map(str, each)}) == 1:  # hunyuan: of each layer
            data[word] = each[0]
    layers, freq = data.get("num_hidden_layers"), data.get("moe_layer_freq")
    parts = data.pop("mlp_layer_types", None)  # what transformers 5 writes in the place of first_k_dense_replace
    if isinstance(freq, list | tuple):  # mimo_v2_flash
        parts = ["sparse" if one else "dense" for one in freq]
    if parts is not None:
        if not isinstance(parts, list | tuple) or {*map(str, parts)} - {"dense", "sparse"} or len(parts) != layers:
            raise ValueError(f'mlp_layer_types: expected "dense" or "sparse" for each layer, got {shown(parts)}')
        data |= {"first_k_dense_replace": 0, "moe_layer_freq": 1, "decoder_sparse_step": 1}
        data["mlp_only_layers"] = tuple(index for index, part in enumerate(parts) if part == "dense")
    last = data.pop("moe_layer_end_index", -1)
    if isinstance(last, int) and isinstance(layers, int) and last >= 0:
        data.setdefault("mlp_only_layers", tuple(range(last + 1, min(layers, MOST_LAYERS))))
    shared, width = data.pop("n_shared_experts", None), data.get("moe_intermediate_size", 0)
    width = data.pop("moe_shared_expert_intermediate_size", width)
    if isinstance(shared, int) and isinstance(width, int):
        data.setdefault("shared_expert_intermediate_size", shared * width)

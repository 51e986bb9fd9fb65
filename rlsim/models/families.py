"""Families of language models: rows of `rlsim/data/families.yaml`, each a `model_type` of Hugging Face.

The same table has the words of their config.json, and what of them rlsim has no costs for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ruamel.yaml import YAML

from rlsim.base.catalogue import DATA
from rlsim.errors import shown

LayerType = Literal[
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "mlp", "moe"
]
FULL, SLIDING, CHUNKED, LINEAR, MAMBA, MLP, MOE = get_args(LayerType)
#: Layers with a window of tokens, and layers that cache no token.
WINDOWED, UNCACHED = (SLIDING, CHUNKED), (LINEAR, MAMBA, MLP, MOE)

#: Layers that a model may have.
MOST_LAYERS = 10_000

_TABLE = YAML(typ="safe", pure=True).load(DATA / "families.yaml")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's modelling code has beyond RMS norms, rotary embedding, gated MLPs and grouped-query attention.

    - Attention: `qkv_bias` on q, k and v, whatever `attention_bias` says; `o_bias`: `attention_bias` is of o, too;
      `latent`: it is MLA, `sparse`: with an index; `channel_gates`: linear attention has a decay for each channel;
      `sinks`: in all layers, or those of a kind; the rest as in `FullAttention`. `head_norms`, `router_bias`: a text is
      the word of a configuration that says so.
    - Layers: `norms` over the hidden state in each, `expert_norms` more where experts are; `one_part`: one is attention
      or a feed-forward, as `layer_types` says; `layers`: the letters of their kinds (`kinds` of the table), over and
      over; `every`: the words of a configuration that say so otherwise: a pattern, how many have one full layer, or a
      number for each layer, 0 for full; `numbers`: the word that counts up the layers of its `state`. `windows`: under
      `use_sliding_window` only, of them the layers `after` or `before` `max_window_layers`, or all (`asked`). `state`:
      the kind of layers that keep one in the place of a KV cache.
    - Feed-forward: `gated_mlp`: MLPs and experts have a gate; `experts`: whether it has any, None as `num_experts`
      says; `narrow`: its `intermediate_size` is the width of an expert; the rest as in `Experts`.
    """

    also: Sequence[str] = ()
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    knows: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    o_bias: bool = True
    latent: bool = False
    sparse: bool = False
    channel_gates: bool = False
    head_norms: bool | str = False
    whole_norms: bool = False
    gated: bool = False
    sinks: bool | str = False
    norms: int = 2
    expert_norms: int = 0
    one_part: bool = False
    layers: str = ""
    every: Sequence[str] = ()
    numbers: str = ""
    windows: str = ""
    state: str = ""
    gated_mlp: bool = True
    experts: bool | None = False
    narrow: bool = False
    shared_gate: bool = False
    router_bias: bool | str = False
    expert_bias: bool = False

    @property
    def kinds(self) -> set[str]:
        """What its `layer_types` may be."""
        return {FULL, *WINDOWED, self.state, *((MLP, MOE) if self.one_part else ())}

    def missing(self, config: Mapping[str, Any]) -> list[str]:
        """What the words of a configuration of the family say of its model that rlsim has no costs for."""
        config = flat(config)
        return [
            f"{row['is']} ({word})"
            for word, row in _TABLE["means"].items()
            if word not in self.knows and word not in self.words and _changes(config.get(word), row.get("but"))
        ]

    def unread(self, config: Mapping[str, Any], read: Collection[str]) -> list[str]:
        """Words of a configuration that say something and mean nothing here; `read` are those of the shape."""
        known = {*read, *self.words, *WORDS, *_TABLE["means"], *self.every, self.numbers}
        return [
            word
            for word, value in config.items()
            if value and word not in known and not any(fnmatchcase(word, idle) for idle in _TABLE["idle"].split())
        ]


def _changes(value: Any, but: Sequence[Any] | None) -> bool:
    """Whether a word with this value changes anything: one that says something, or (for lists has one) not in `but`."""
    if value is None or but is None:
        return bool(value)
    values = value if isinstance(value, list) else [value]
    return any((one.lower() if isinstance(one, str) else one) not in but for one in values)


FAMILIES = {name: Family(**row) for name, row in _TABLE["families"].items()}
#: What all families call the words of `rlsim.models.architectures.Config` besides, and the kinds of layers.
WORDS: Mapping[str, Sequence[str]] = {
    word: [meant] if isinstance(meant, str) else meant for word, meant in _TABLE["words"].items()
}
KINDS: Mapping[str, str] = _TABLE["kinds"]
#: The sizes of parts of a layer (`rlsim.models.layers`), and the word that has each.
SIZES: Mapping[str, Mapping[str, str]] = _TABLE["sizes"]
#: The families that are known.
MODEL_TYPES = tuple(FAMILIES)
_FAMILY_OF = {name: family for family, row in FAMILIES.items() for name in (family, *row.also)}
_REFUSED = {name: why for why, names in _TABLE["refused"].items() for name in names}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the words of the records in it besides, as `record.word`."""
    inner = {word: value for word, value in config.items() if isinstance(value, dict)}
    return {**config, **{f"{word}.{key}": one for word, value in inner.items() for key, one in value.items()}}


def unsupported(model_type: object) -> str:
    """What to say of a `model_type` that no family has."""
    said = f"model_type {shown(model_type)} is not supported"
    if isinstance(model_type, str) and model_type in _REFUSED:
        return f"{said}: {_REFUSED[model_type]}"
    return f"{said}; one of: {', '.join(MODEL_TYPES)}"


def family_name(model_type: Any) -> Any:
    """The family of a `model_type`; what is no family's name comes back as it is, and what is no text as none."""
    return _FAMILY_OF.get(model_type, model_type) if isinstance(model_type, str) else None

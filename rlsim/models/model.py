"""Language models: an embedding, layers and a head, read from Hugging Face's `config.json`.

The catalogue's own files (`rlsim/data/models/*.yaml`) use the same words, so both are read by the same code. What the
layers of a family are is in `rlsim.models.architectures`, what a layer weighs and caches in `rlsim.models.layers`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rlsim.base import catalogue
from rlsim.base.reading import exists, is_folder, read_json
from rlsim.base.refusals import refuse
from rlsim.base.schema import load, validate
from rlsim.errors import ConfigError, unknown_name
from rlsim.models.architectures import Config, following_layers_of, layers_of
from rlsim.models.config_words import canonical
from rlsim.models.families import FAMILIES, MODEL_TYPES, WINDOWED, family_name, unsupported
from rlsim.models.layers import Experts, FullAttention, LatentAttention, Layer, Linear, LinearAttention, Mamba2
from rlsim.models.names import UNSEEN, known_shape, short_name
from rlsim.models.precision import (
    KV_BYTES,
    WEIGHT_BYTES,
    KvPrecision,
    Precision,
    leaves_attention,
    published_precision,
)


class Model(Config):
    """A decoder-only transformer, field names as in Hugging Face's `config.json`."""

    # Layers ----------------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, first to last."""
        return layers_of(self)

    @cached_property
    def groups(self) -> Mapping[Layer, int]:
        """The different layers, and how many there are of each."""
        return self.stages(1)[0]

    def stages(self, pp: int) -> tuple[Mapping[Layer, int], ...]:
        """`groups` of every pipeline stage: of ⌈layers / pp⌉ layers each, the last ones of what is left."""
        return _stages(self, pp)

    def fullest_stage(self, pp: int, of: Callable[[Layer], float]) -> float:
        """The most that `of` a layer adds up to in one of `pp` pipeline stages."""
        return max(sum(count * of(layer) for layer, count in stage.items()) for stage in self.stages(pp))

    @property
    def blocks(self) -> int:
        """Parts with a residual connection in all layers: attention and feed-forward count one each."""
        return sum(count * layer.blocks for layer, count in self.groups.items())

    @property
    def layer(self) -> Layer:
        """The layer that all are like; raises `ConfigError` for a model whose layers differ."""
        if len(self.groups) > 1:
            raise ConfigError(f"{self.name}: its layers are not all alike; only such models can be measured")
        return self.layers[0]

    @property
    def simulated(self) -> str:
        """Whether a rollout's costs can be computed, and what of them is not measured."""
        kinds = {type(layer.attention) for layer in self.groups}
        if LinearAttention in kinds:
            return "yes; linear attention not measured"
        if Mamba2 in kinds:
            return "yes; Mamba-2 not measured"
        if any(layer.attention.index_bytes for layer in self.groups):
            return "yes; sparse attention not measured, on GPUs with tables of latent attention"
        return "yes; latent attention on GPUs with its tables" if LatentAttention in kinds else "yes"

    @property
    def attention(self) -> FullAttention:
        """The plain attention over all tokens before that all layers share; raises `ConfigError` if it is not so."""
        attention = self.layers[0].attention
        special = [name for layer in self.groups for name in layer.attention.special]
        if not special and len({layer.attention for layer in self.groups}) > 1:
            special.append("attention that differs from layer to layer")
        if special or not isinstance(attention, FullAttention):
            raise self.beyond(dict.fromkeys(special))
        return attention

    def beyond(self, features: Iterable[str]) -> ConfigError:
        """The error that names what the cost models lack."""
        return ConfigError(
            f"{self.name} has {', '.join(features)}, which rlsim counts but cannot simulate here yet (docs/models.md)"
        )

    def within(self, tokens: int) -> Model:
        """The model as sequences of at most so many tokens meet it: a window that none outgrows is none."""
        if self.sliding_window is None or self.sliding_window < tokens:
            return self
        kinds = ("full_attention" if kind in WINDOWED else kind for kind in self.layer_types)
        return self.model_copy(update={"layer_types": tuple(kinds), "sliding_window": None})

    @property
    def scalar_head(self) -> bool:
        """Whether the model ends in one number per token (a critic or reward model) instead of vocabulary logits."""
        return any(not name.endswith(_GENERATES) for name in self.architectures)

    def as_critic(self) -> Model:
        """The same body with a scalar head, as PPO's critic and reward models have it."""
        return self.model_copy(update={"name": f"{self.name}-critic", "architectures": ("ForTokenClassification",)})

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def head_parameters(self) -> int:
        """Weights of the output head that the embedding does not already hold."""
        if self.scalar_head:
            return self.hidden_size
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding and the output head."""
        return self.vocab_size * self.hidden_size + self.head_parameters

    @property
    def parameters(self) -> int:
        """All weights, the final norm included, layers for multi-token prediction not."""
        layers = sum(count * layer.parameters for layer, count in self.groups.items())
        return layers + self.embedding_parameters + self.hidden_size

    def adapters(self, lora_rank: int | None) -> float:
        """LoRA's weights over all others (`Layer.adapter_parameters`); 0 without."""
        added = sum(count * layer.adapter_parameters(lora_rank or 0) for layer, count in self.groups.items())
        return added / self.parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes: `parameters` without the experts it is not routed to."""
        idle = sum(count * (layer.parameters - layer.active_parameters) for layer, count in self.groups.items())
        return self.parameters - idle

    @property
    def mtp_parameters(self) -> int:
        """Weights of the layers for multi-token prediction, which generation and training leave out.

        Each is a layer like the last one (nemotron_h: the layers of `mtp_layer_types`), a projection of two hidden
        states to one, and three norms; embedding and head are the model's own (DeepSeek-V3 2024, section 2.2).
        """
        around = 2 * self.hidden_size**2 + 3 * self.hidden_size
        return self.num_nextn_predict_layers * (sum(one.parameters for one in following_layers_of(self)) + around)

    def layer_bytes(self, layer: Layer, tp: int = 1) -> float:
        """Bytes of one layer's weights on one GPU under TP `tp`, in the serving types."""
        matrices = layer.quantised_weights(tp)
        rest = (layer.parameters_per_gpu(tp) - layer.expert_weights(tp) - matrices) * self.dtype_bytes
        return rest + matrices * self._bytes_of(self.precision) + self.expert_bytes(layer, tp)

    def expert_bytes(self, layer: Layer, tp: int = 1) -> float:
        """Those of them that are the matrices of experts."""
        return layer.expert_weights(tp) * self._bytes_of(self.of_experts)

    def _bytes_of(self, precision: Precision) -> float:
        return self.dtype_bytes if precision == "bf16" else WEIGHT_BYTES[precision]

    @property
    def of_experts(self) -> Precision:
        """The precision of experts; of a dense model that of all matrices."""
        return self.expert_precision or self.precision

    @property
    def quantised_parameters(self) -> int:
        """Weights that an engine serves in another precision than they are trained in."""
        total = 0
        for layer, count in self.groups.items():
            total += count * layer.quantised_weights() * (self.precision != "bf16")
            total += count * layer.expert_weights() * (self.of_experts != "bf16")
        return total

    def served(
        self,
        precision: Precision | None = None,
        kv_precision: KvPrecision = "bf16",
        window_share: float | None = None,
    ) -> Model:
        """The model as an engine serves it: all matrices of its layers in that precision, or as they are published."""
        weights = {} if precision is None else {"precision": precision, "expert_precision": None}
        share = window_share if any(layer.attention.window_tokens for layer in self.groups) else None
        return self.model_copy(update={**weights, "kv_precision": kv_precision, "kv_window_share": share})

    def cached_elements(self, layer: Layer, tp: int = 1) -> float:
        """Numbers that a GPU's KV cache has room for in a layer, for each token that it keeps there."""
        windowed = layer.attention.window_tokens is not None and self.kv_window_share is not None
        share = self.kv_window_share or 0.0 if windowed else 1.0
        return layer.attention.cached_elements(tp) * share + layer.attention.index_bytes / self.kv_element_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in the serving types."""
        layers = sum(count * self.layer_bytes(layer) for layer, count in self.groups.items())
        return layers + (self.embedding_parameters + self.hidden_size) * self.dtype_bytes

    def tensors(self, *, stacked: bool = False) -> int:
        """Weights and biases that have a name of their own in a checkpoint; `stacked`: experts of a layer are two."""
        layers = sum(count * layer.tensors(stacked=stacked) for layer, count in self.groups.items())
        return layers + 2 + (self.head_parameters > 0)

    # Cache -----------------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token over all GPUs of a replica, in the layers that keep it: no replicated heads."""
        each = {layer: layer.attention.cached_elements() * self.kv_element_bytes for layer in self.groups}
        return sum(count * (each[layer] + layer.attention.index_bytes) for layer, count in self.groups.items())

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of one number of the KV cache."""
        return self.dtype_bytes if self.kv_precision == "bf16" else KV_BYTES[self.kv_precision]

    @property
    def state_bytes(self) -> float:
        """What linear attention or Mamba-2 keeps of a sequence, whatever its length, over all GPUs of a replica."""
        kept = sum(count * layer.attention.state_elements for layer, count in self.groups.items())
        return kept * self.dtype_bytes

    def sequence_bytes(self, *tokens: int, tp: int = 1) -> float:
        """KV cache and state of sequences of so many tokens on one of `tp` GPUs: layers with a window keep no more than
        its tokens, those with chunks the last one's, or what `kv_window_share` says. Replicated KV heads count on
        each; a state is cut."""
        kept = 0.0
        for layer, count in self.groups.items():
            window = None if self.kv_window_share is not None else layer.attention.window_tokens
            if window is None:
                there = sum(tokens)
            elif layer.attention.chunked:
                there = sum((one - 1) % window + 1 for one in tokens if one)
            else:
                there = sum(min(one, window) for one in tokens)
            kept += count * self.cached_elements(layer, tp) * there
        return kept * self.kv_element_bytes + len(tokens) * self.state_bytes / tp

    # Tensor parallelism ----------------------------------------------------------------------------------------------

    def supports_tp(self, tp: int) -> bool:
        """Whether heads and MLPs split evenly over `tp` GPUs (KV heads are replicated when there are too few)."""
        return tp > 0 and all(layer.splits(tp) and not self._cut_blocks(layer, tp) for layer in self.groups)

    def _cut_blocks(self, layer: Layer, tp: int, expert_tp: int | None = None) -> list[int]:
        """Widths of the MLP that TP cuts inside a block of 128 weights, which engines refuse (vLLM, SGLang:
        `validate_fp8_block_shape`)."""
        if "fp8_block" not in (self.precision, self.of_experts):
            return []
        degrees = (tp if expert_tp is None else expert_tp, tp) if isinstance(layer.mlp, Experts) else (tp,)
        cut = zip(layer.mlp.widths, degrees, strict=False)
        return [width for width, degree in cut if degree > 1 and width // degree % 128]

    def check_tp(self, tp: int, expert_tp: int | None = None) -> None:
        """Raises `ConfigError` if the model cannot be split over `tp` GPUs, its experts over `expert_tp` of them."""
        for layer in self.groups:
            if tp < 1 or not layer.splits(tp, expert_tp):
                heads = ", ".join(f"{count} {name}" for name, count in layer.attention.split.items())
                widths = " and ".join(map(str, layer.mlp.widths))
                parts = " and ".join(part for part in (heads, widths and f"MLP width {widths}") if part)
                degree = f"TP {tp}" if expert_tp in (None, tp) else f"TP {tp} (of an expert {expert_tp})"
                raise ConfigError(f"{self.name}: {degree} does not divide its {parts}")
            for width in self._cut_blocks(layer, tp, expert_tp):
                raise ConfigError(
                    f"{self.name}: TP {tp} cuts its MLP width {width} inside a block of 128 weights that share a "
                    "scale; engines refuse that in fp8_block"
                )

    def head(self, tp: int = 1) -> Linear:
        """The output head on one GPU: the vocabulary is cut over `tp` GPUs, a scalar head is not."""
        return Linear(
            "head", 1 if self.scalar_head else math.ceil(self.vocab_size / tp), self.hidden_size, quantised=False
        )


#: What classes of transformers that end in vocabulary logits are called.
_GENERATES = ("CausalLM", "ForConditionalGeneration", "LMHeadModel")


@lru_cache(maxsize=1024)
def _stages(model: Model, pp: int) -> tuple[Mapping[Layer, int], ...]:
    if not 1 <= pp <= model.num_hidden_layers:
        raise ConfigError(f"{model.name}: PP {pp} does not go with its {model.num_hidden_layers} layers")
    size = math.ceil(model.num_hidden_layers / pp)
    return tuple(Counter(model.layers[first : first + size]) for first in range(0, model.num_hidden_layers, size))


def load_model(name_or_path: str | Path) -> Model:
    """A model by its name in the catalogue or on Hugging Face (`Qwen/Qwen3-8B`), or from a file or folder.

    A path may lead to a Hugging Face `config.json`, to the folder it lies in, or to a YAML file as in
    `rlsim/data/models`; keys of a `config.json` that are not known are noted. Raises
    `CatalogueError` for an unknown name and `ConfigError` for a file that is missing, damaged, incomplete, of
    an unsupported `model_type`, or quantised to what no engine's measured kernels multiply.
    """
    known, text = catalogue.names("models"), str(name_or_path)
    if text.lower() in known:
        return load(known[text.lower()], Model)
    named = not isinstance(name_or_path, Path) and not text.endswith((".json", ".yaml", ".yml"))
    if named and text.count("/") < 2 and not exists(Path(text)):
        if (found := known_shape(text)) is None:
            raise unknown_name("model", short_name(text), known)
        model = load(known[found.model], Model)
        return model.model_copy(update={"note": found.said}) if found.said.endswith(UNSEEN) else model
    path = Path(name_or_path)
    path = path / "config.json" if is_folder(path) else path
    if path.suffix != ".json":
        return load(path, Model)
    return validate(_from_config_json(path), Model, source=str(path))


def _from_config_json(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a config.json: expected an object")
    notes: list[str] = []
    types: dict[str, Precision] = {}
    text = config.get("text_config", config.get("llm_config"))  # the second as InternVL has it
    if isinstance(text, dict):
        notes = [f"the text part of {config.get('model_type')}; its other parts are not counted"]
        whole = {key: config[key] for key in ("architectures", "model_type", "quantization_config") if key in config}
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**tied, **whole, **text}
    if family_name(config.get("model_type")) not in MODEL_TYPES:
        raise ConfigError(f"{path}: {unsupported(config.get('model_type'))}")
    family = FAMILIES[family_name(config["model_type"])]
    quantised: Any = config.get("quantization_config")
    precision = published_precision(quantised)
    experts_only = precision == "mxfp4" or (precision is not None and leaves_attention(quantised))
    given = {"kind": config["model_type"], "beyond": family.missing(config), "one_part": family.one_part}
    refuse("config.json", path=path, quantised=quantised, precision=precision, experts_only=experts_only, **given)
    if precision is not None:
        types = {"expert_precision" if experts_only else "precision": precision}
        notes.append(
            f"its {'experts' if experts_only else 'weights'} are published in {precision}: engines serve them so "
            "unless engine.precision says otherwise, training takes bf16"
        )
    try:
        data = canonical({**config, **_longest(config), **types})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    said = {key: data[key] for key in Model.model_fields if key in data}
    if strange := family.unread(config, Model.model_fields):
        notes.append(f"words of its config.json that are not known, taken to change nothing: {', '.join(strange)}")
    if "expert_precision" in types and not data.get("num_experts"):
        raise ConfigError(
            f"{path}: weights of which attention is not quantised are supported where the others are experts; give the "
            "config.json of the unquantised model"
        )
    return {**said, "name": path.parent.name or path.stem, "source": str(path), "note": "; ".join(notes)}


def _longest(config: Mapping[str, Any]) -> dict[str, int]:
    """The longest sequence under the file's rope scaling, by vLLM's rule (`_get_and_verify_max_len`).

    YaRN multiplies the length that it names as the original one; longrope, llama3 and gemma3's lengths are already
    those after scaling; other types multiply `max_position_embeddings`.
    """
    longest = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(longest, int) or not isinstance(scaling, dict):
        return {}
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor", 1.0)
    grows = kind not in ("su", "longrope", "llama3", "mrope", "default") and isinstance(factor, int | float)
    if not grows or not math.isfinite(factor) or family_name(config.get("model_type")) == "gemma3":
        return {}
    original = scaling.get("original_max_position_embeddings", longest) if kind == "yarn" else longest
    return {"max_position_embeddings": max(longest, int(original * factor))} if isinstance(original, int) else {}

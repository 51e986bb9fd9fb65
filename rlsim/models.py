"""Transformer shapes: parameters and bytes of a decoder-only model, read from its Hugging Face `config.json`.

The catalogue's own files (`rlsim/data/models/*.yaml`) use the same field names, so both are read by the same code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rlsim import catalogue
from rlsim.errors import ConfigError, unknown_name
from rlsim.reading import is_folder, read_json
from rlsim.schema import Name, Schema, load, validate

#: Supported `model_type`s: llama-like blocks (RMS norms, rotary embedding, gated MLP, grouped-query attention).
#: qwen2 has biases on q, k and v; qwen3 has norms on each query and key head; qwen3_moe replaces the MLP by experts.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix multiplication of a layer on one GPU: (tokens × `k_in`) · (`k_in` × `n_out`), `count` times."""

    name: Name
    n_out: int
    k_in: int
    count: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts part of a layer on one GPU: every token passes `top_k` of `experts` gated MLPs."""

    experts: int
    top_k: int
    intermediate: int  # width of one expert on this GPU, after TP sharding
    hidden: int


class Model(Schema):
    """A decoder-only transformer, field names as in Hugging Face's `config.json`."""

    name: Name
    title: str = ""
    source: str = Field(default="", description="where the shape is from")
    model_type: str = Field(description=f"one of {', '.join(MODEL_TYPES)}")
    architectures: tuple[str, ...] = Field(default=(), description="a `…ForSequenceClassification` has a scalar head")
    hidden_size: int = Field(gt=0, le=1_000_000)
    intermediate_size: int = Field(gt=0, le=10_000_000, description="width of the dense MLP")
    num_hidden_layers: int = Field(gt=0, le=10_000)
    num_attention_heads: int = Field(gt=0, le=100_000)
    num_key_value_heads: int = Field(gt=0, le=100_000)
    head_dim: int = Field(gt=0, le=100_000)
    vocab_size: int = Field(gt=0, le=100_000_000)
    tie_word_embeddings: bool = Field(default=False, description="the LM head is the embedding")
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o (qwen2: always on q, k, v only)")
    mlp_bias: bool = Field(default=False, description="biases on gate, up and down")
    num_experts: int = Field(default=0, ge=0, le=100_000, description="experts per layer; 0 for a dense model")
    num_experts_per_tok: int = Field(default=0, ge=0, le=100_000)
    moe_intermediate_size: int = Field(default=0, ge=0, le=10_000_000, description="width of one expert")
    dtype_bytes: float = Field(default=2, ge=0.125, le=8, description="bytes of one weight or KV element; 2 = bf16")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Hugging Face's own defaults: a KV head per head, and heads that share the hidden size."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("num_key_value_heads") is None and "num_attention_heads" in data:
            data["num_key_value_heads"] = data["num_attention_heads"]
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("head_dim") is None and isinstance(heads, int) and heads and isinstance(hidden, int):
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {self.model_type!r} is not supported; one of: {', '.join(MODEL_TYPES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.model_type.endswith("_moe") != bool(self.num_experts):
            raise ValueError(f"model_type {self.model_type!r} does not go with num_experts {self.num_experts}")
        if self.num_experts and not (0 < self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size):
            raise ValueError("experts need moe_intermediate_size and num_experts_per_tok, at most num_experts")
        return self

    @property
    def scalar_head(self) -> bool:
        """Whether the model ends in one number per token (a critic or reward model) instead of vocabulary logits."""
        return any("CausalLM" not in name for name in self.architectures)

    def as_critic(self) -> Model:
        """The same body with a scalar head, as PPO's critic and reward models have it."""
        return self.model_copy(update={"name": f"{self.name}-critic", "architectures": ("ForTokenClassification",)})

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together (as much again for values)."""
        return self.num_key_value_heads * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's gated MLP, or of its router and all its experts."""
        if self.num_experts:
            return self.hidden_size * self.num_experts * (1 + 3 * self.moe_intermediate_size)
        bias = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return 3 * self.hidden_size * self.intermediate_size + bias

    @property
    def norm_parameters(self) -> int:
        """RMS-norm weights of one layer: before attention and MLP, and per query and key head (qwen3)."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.model_type.startswith("qwen3") else 0)

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def attention_parameters(self) -> int:
        """Weights and biases of one layer's q, k, v and o projections."""
        weights = self.hidden_size * (2 * self.q_dim + 2 * self.kv_dim)
        return weights + self.qkv_bias * (self.q_dim + 2 * self.kv_dim) + self.attention_bias * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Weights of one transformer layer."""
        return self.attention_parameters + self.mlp_parameters + self.norm_parameters

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
        """All weights, the final norm included."""
        return self.num_hidden_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes: `parameters` without the experts it is not routed to."""
        idle = self.num_experts - self.num_experts_per_tok
        return self.parameters - self.num_hidden_layers * 3 * self.hidden_size * self.moe_intermediate_size * idle

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in the serving type."""
        return self.parameters * self.dtype_bytes

    @property
    def layer_bytes(self) -> float:
        """Bytes of one layer's weights in the serving type."""
        return self.layer_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token over all GPUs of a replica: 2 · layers · kv_dim · bytes (no replicated heads)."""
        return 2 * self.num_hidden_layers * self.kv_dim * self.dtype_bytes

    def tensors(self, *, stacked: bool = False) -> int:
        """Weights and biases that have a name of their own in a checkpoint; `stacked`: experts of a layer are two."""
        attention = 4 + 3 * self.qkv_bias + self.attention_bias
        norms = 4 if self.model_type.startswith("qwen3") else 2
        mlp = 3 * (1 + self.mlp_bias)
        if self.num_experts:
            mlp = 1 + (2 if stacked else 3 * self.num_experts)
        return self.num_hidden_layers * (attention + norms + mlp) + 2 + (self.head_parameters > 0)

    def supports_tp(self, tp: int) -> bool:
        """Whether heads and MLP split evenly over `tp` GPUs (KV heads are replicated when there are too few)."""
        kv = self.num_key_value_heads
        widths = [self.num_attention_heads, self.moe_intermediate_size if self.num_experts else self.intermediate_size]
        return tp > 0 and all(width % tp == 0 for width in widths) and (kv % tp == 0 or tp % kv == 0)

    def check_tp(self, tp: int) -> None:
        """Raises `ConfigError` if the model cannot be split over `tp` GPUs."""
        if not self.supports_tp(tp):
            raise ConfigError(
                f"{self.name}: TP {tp} does not divide its {self.num_attention_heads} heads, "
                f"{self.num_key_value_heads} KV heads and MLP width "
                f"{self.moe_intermediate_size if self.num_experts else self.intermediate_size}"
            )

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads on one GPU of a replica; at least one, so that heads are replicated when tp exceeds their number."""
        return max(self.num_key_value_heads // tp, 1)

    def linear_layers(self, tp: int = 1) -> tuple[Linear, ...]:
        """The matrix multiplications of one layer on one GPU under TP `tp`, in order (Megatron's column-row split).

        Of a mixture of experts the last is the router; the experts are in `experts`. Raises `ConfigError` if the
        model cannot be split over `tp` GPUs.
        """
        self.check_tp(tp)
        q, kv, hidden = self.q_dim // tp, self.kv_heads_per_gpu(tp) * self.head_dim, self.hidden_size
        attention = (Linear("qkv", q + 2 * kv, hidden, 1), Linear("o", hidden, q, 1))
        if self.num_experts:
            return (*attention, Linear("router", self.num_experts, hidden, 1))
        width = self.intermediate_size // tp
        return (*attention, Linear("gate_up", 2 * width, hidden, 1), Linear("down", hidden, width, 1))

    def experts(self, tp: int = 1) -> Experts | None:
        """The experts of one layer on one GPU, each cut over `tp` GPUs; None for a dense model."""
        if not self.num_experts:
            return None
        self.check_tp(tp)
        return Experts(self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size // tp, self.hidden_size)

    def head(self, tp: int = 1) -> Linear:
        """The output head on one GPU: the vocabulary is cut over `tp` GPUs, a scalar head is not."""
        return Linear("head", 1 if self.scalar_head else math.ceil(self.vocab_size / tp), self.hidden_size, 1)


def load_model(name_or_path: str | Path) -> Model:
    """A model by its name in the catalogue (letter case does not matter), or from a file or folder.

    A path may lead to a Hugging Face `config.json`, to the folder it lies in, or to a YAML file as in
    `rlsim/data/models`; keys of a `config.json` that say nothing about the shape are passed over. Raises
    `CatalogueError` for an unknown name and `ConfigError` for a file that is missing, damaged, incomplete, quantised or
    of an unsupported `model_type`.
    """
    known = catalogue.names("models")
    text = str(name_or_path)
    if text.lower() in known:
        path = known[text.lower()]
    elif isinstance(name_or_path, Path) or "/" in text or text.endswith((".json", ".yaml", ".yml")):
        path = Path(name_or_path)
        path = path / "config.json" if is_folder(path) else path
    else:
        raise unknown_name("model", text, known)
    if path.suffix != ".json":
        return load(path, Model)
    return validate(_from_config_json(path), Model, source=str(path))


def _from_config_json(path: Path) -> dict[str, Any]:
    """The keys of a `config.json` that `Model` knows, after refusing what it cannot describe."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a config.json: expected an object")
    model_type = data.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type {model_type!r} is not supported; one of: {', '.join(MODEL_TYPES)}")
    if data.get("quantization_config"):
        raise ConfigError(f"{path}: quantised weights are not supported; give the config.json of the unquantised model")
    if data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"{path}: models that mix dense and expert layers are not supported")
    if model_type == "mistral" and data.get("sliding_window"):
        raise ConfigError(f"{path}: sliding-window attention is not supported")
    given = {key: data[key] for key in Model.model_fields if key in data and data[key] is not None}
    return {**given, "name": path.parent.name or path.stem, "source": str(path)}

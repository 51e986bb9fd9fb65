"""Number formats of weights, activations and KV caches: what they take in memory, and the peak rates they reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

#: `fp8`: 8 bits with a scale for each tensor; `fp8_block`: with one for each block of 128 × 128 weights (DeepSeek-V3
#: 2024, section 3.3). `nvfp4`, `mxfp4`: 4 bits with an 8-bit scale for each 16 or 32 weights (OCP MX).
Precision = Literal["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

#: Numbers of a KV cache; fp8 has one scale for a whole layer.
KvPrecision = Literal["bf16", "fp8"]
KV_BYTES: dict[KvPrecision, float] = {"bf16": 2.0, "fp8": 1.0}

#: Bytes of one weight, its share of the scales included.
WEIGHT_BYTES: dict[Precision, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4.0 / (128 * 128),
    "nvfp4": 0.5 + 1.0 / 16,
    "mxfp4": 0.5 + 1.0 / 32,
}

#: Bytes of one activation as a matrix product reads it: quantised like the weights, `fp8_block` with an fp32 scale for
#: each 128 of a token. With MXFP4 weights activations stay in bf16 (vLLM's and SGLang's kernels for gpt-oss on Hopper).
ACTIVATION_BYTES: dict[Precision, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4.0 / 128,
    "nvfp4": 0.5 + 1.0 / 16,
    "mxfp4": 2.0,
}

N = TypeVar("N", float, NDArray[np.float64])


class Rates(Protocol):
    """Peak dense tensor-core rates of a GPU, None where it has no such tensor cores; its SMs and its memory's rate."""

    @property
    def sm_count(self) -> int: ...

    @property
    def memory_bytes_per_s(self) -> float: ...

    @property
    def bf16_flop_per_s(self) -> float: ...

    @property
    def fp8_flop_per_s(self) -> float | None: ...

    @property
    def fp4_flop_per_s(self) -> float | None: ...


def peak_flop_per_s(rates: Rates, precision: Precision) -> float | None:
    """The peak rate of products in that format: that of the type in which the activations are multiplied."""
    if ACTIVATION_BYTES[precision] == 2.0:
        return rates.bf16_flop_per_s
    return rates.fp4_flop_per_s if precision == "nvfp4" else rates.fp8_flop_per_s


def product_bytes(precision: Precision, m: N, n: N, k: N) -> N:
    """Bytes that a product of an m×k activation and a k×n weight reads, and its bf16 result."""
    return WEIGHT_BYTES[precision] * n * k + ACTIVATION_BYTES[precision] * m * k + 2.0 * m * n


def quantising_bytes(precision: Precision, m: N, k: N) -> N:
    """Bytes that quantising m×k bf16 activations before the product reads and writes; 0 where they stay in bf16."""
    activation = ACTIVATION_BYTES[precision]
    return (2.0 + activation) * m * k if activation < 2.0 else 0.0 * m


def published_precision(config: Any) -> Precision | None:
    """What the `quantization_config` of a `config.json` says of the weights; None if rlsim knows no such precision.

    As transformers (`fp8`, `mxfp4`), compressed-tensors (`config_groups`) and NVIDIA's modelopt (`quant_algo`, as in
    TensorRT-LLM) write them. Quantised weights with bf16 activations run other kernels, which were not measured.
    """
    if not isinstance(config, Mapping):
        return None
    match config.get("quant_method"):
        case "mxfp4":
            return "mxfp4"
        case "fp8":
            block = config.get("weight_block_size")
            return "fp8" if not block else "fp8_block" if block == [128, 128] else None
        case "modelopt":
            return _MODELOPT.get(str(config.get("quant_algo")))
        case "compressed-tensors":
            groups = config.get("config_groups")
            found = {_compressed(group) for group in groups.values()} if isinstance(groups, Mapping) else {None}
            return found.pop() if len(found) == 1 else None
    return None


#: Names of products of attention, and of Nemotron-H's attention, Mamba-2 and MLPs.
_ATTENDS = r"attn|mixer(\*|\.\w+_proj|$)"


def leaves_attention(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` names products of attention among the modules that it leaves as they are.

    compressed-tensors calls that list `ignore`, modelopt `exclude_modules`, transformers `modules_to_not_convert`;
    names may be patterns. Most lists have norms, routers and the LM head, which are never quantised in any case.
    """
    lists = (config.get(key) for key in ("ignore", "exclude_modules", "modules_to_not_convert"))
    names = [name for found in lists if isinstance(found, list) for name in found if isinstance(name, str)]
    return any(re.search(_ATTENDS, name) and not re.search("norm|indexer", name) for name in names)


_MODELOPT: dict[str, Precision] = {"FP8": "fp8", "FP8_BLOCK_SCALES": "fp8_block", "NVFP4": "nvfp4"}
#: compressed-tensors: bits of weights and activations, and the weights that share a scale.
_COMPRESSED: dict[tuple[Any, Any, Any], Precision] = {
    (8, 8, "tensor"): "fp8",
    (8, 8, "channel"): "fp8",
    (8, 8, "block"): "fp8_block",
    (4, 4, "tensor_group"): "nvfp4",
}


def _compressed(group: Any) -> Precision | None:
    parts = [group.get(key) for key in ("weights", "input_activations")] if isinstance(group, Mapping) else []
    known = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "float"]
    if len(known) < 2:
        return None
    return _COMPRESSED.get((known[0].get("num_bits"), known[1].get("num_bits"), str(known[0].get("strategy"))))

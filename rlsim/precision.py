"""Number formats of weights, activations and KV caches, and what they take in memory."""

from __future__ import annotations

from typing import Literal

#: `fp8`: 8 bits with a scale for each tensor; `fp8_block`: with one for each block of 128 × 128 weights (DeepSeek-V3
#: 2024, section 3.3). `nvfp4`, `mxfp4`: 4 bits with an 8-bit scale for each 16 or 32 weights (OCP MX).
Precision = Literal["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4"]

#: Bytes of one weight, its share of the scales included.
WEIGHT_BYTES: dict[Precision, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4.0 / (128 * 128),
    "nvfp4": 0.5 + 1.0 / 16,
    "mxfp4": 0.5 + 1.0 / 32,
}

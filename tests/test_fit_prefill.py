"""The fit of prompt attention finds whether a kernel packs the heads that share a KV head, on times that a kernel of
either sort would take."""

import itertools

import pandas as pd
import pytest

from rlsim.calibrate.fit.prefill import kernel_prefill_attention
from rlsim.calibrate.fit.windows import CHUNK, with_windows
from rlsim.cost.calibration import load_calibration
from rlsim.cost.operators import Operators

CALIBRATION = load_calibration("h100-vllm")
FITS, REFERENCE = CALIBRATION.operators, CALIBRATION.reference
PLAIN = FITS.prefill_attention.model_copy(update={"correction": None, "head_dims": {}})
HEADS = ((1, 1), (2, 1), (8, 1), (8, 8), (32, 4), (64, 8))
SHAPES = [*itertools.product((1, 4, 16, 64), (16, 32, 64, 128, 512, 2048), HEADS)]


def operators(packed: bool) -> Operators:
    fit = PLAIN.model_copy(update={"packed": packed})
    return Operators(FITS.model_copy(update={"prefill_attention": fit}), REFERENCE)


@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_that_packs_heads_is_known_by_its_times(packed: bool) -> None:
    known = operators(packed)
    rows = [
        (batch, new, 0, q, kv, 128, known.prefill_attention_s([(new, 0)] * batch, q, kv, 128))
        for batch, new, (q, kv) in SHAPES
    ]
    table = pd.DataFrame(rows, columns=["batch", "new", "prior", "q_heads", "kv_heads", "head_dim", "seconds"])
    found = kernel_prefill_attention(table, REFERENCE)
    assert found.fit.packed is packed
    assert found.residuals["prefill_attention"].p90 < 0.03


def test_chunks_of_llama_4_are_no_windows_of_prompts() -> None:
    """SGLang's rows of 8,192 tokens take the time of chunks: no factor is made of them, and none is judged by them."""
    rows = [(1, tokens, window, 8, 1, 128, 1.0) for tokens in (10_240, 16_384) for window in (CHUNK, 1024)]
    columns = ["batch", "tokens", "window", "q_heads", "kv_heads", "head_dim", "seconds"]
    table = pd.DataFrame([(batch, *rest) for batch in range(1, 9) for _, *rest in rows], columns=columns)
    _, both = with_windows(FITS, REFERENCE, {"prefill_windows": table})
    _, windows = with_windows(FITS, REFERENCE, {"prefill_windows": table[table.window < CHUNK]})
    assert both == windows
    assert with_windows(FITS, REFERENCE, {"prefill_windows": table[table.window == CHUNK]})[1] == {}

"""Which rows of prompts in windows are fitted."""

import pandas as pd

from rlsim.calibrate.fit.attention import CHUNK, with_windows
from rlsim.cost.calibration import load_calibration

CALIBRATION = load_calibration("h100-vllm")


def test_chunks_of_llama_4_are_no_windows_of_prompts() -> None:
    """SGLang's rows of 8,192 tokens take the time of chunks: no kernel is made of them, and none is judged by them."""
    rows = [(1, tokens, window, 8, 1, 128, 1.0) for tokens in (10_240, 16_384) for window in (CHUNK, 1024)]
    columns = ["batch", "tokens", "window", "q_heads", "kv_heads", "head_dim", "seconds"]
    table = pd.DataFrame([(batch, *rest) for batch in range(1, 9) for _, *rest in rows], columns=columns)
    fit, ref, operator = CALIBRATION.operators.prefill_attention, CALIBRATION.reference, "prefill_attention"
    assert with_windows(fit, ref, operator, table) == with_windows(fit, ref, operator, table[table.window < CHUNK])
    assert with_windows(fit, ref, operator, table[table.window == CHUNK]) == (fit, {})

"""Microsoft Vidur's layers (`mlp.csv`): times in milliseconds, of several statistics the median."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from rlsim.calibrate.importers.reading import MS

KERNELS = [
    f"time_stats.{name}.median" for name in ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
]


def elementwise_table(paths: Iterable[Path]) -> pd.DataFrame:
    """A layer's four elementwise kernels together: kernels, tokens, bytes, seconds, and as key the model and tokens.

    Rows timed as zero, shorter than the clock's tick, are left out.
    """
    keys, found = ["num_tensor_parallel_workers", "num_tokens"], []
    for path in paths:
        table = pd.read_csv(path).groupby(keys, as_index=False).median(numeric_only=True)
        tokens, tp = table.num_tokens, table.num_tensor_parallel_workers
        of_heads = (table.n_head + table.n_kv_head) / tp * (table.n_embd / table.n_head) * 4.0
        size = tokens * (table.n_embd * 8.0 + of_heads + table.n_expanded_embd / tp * 6.0)
        seconds = sum(table[name] for name in KERNELS) * MS
        key = path.parent.name + "/" + tokens.astype(str)
        columns = {"kernels": len(KERNELS), "tokens": tokens, "bytes": size, "seconds": seconds, "key": key}
        found.append(pd.DataFrame(columns))
    rows = pd.concat(found, ignore_index=True)
    return rows[rows.seconds > 0]

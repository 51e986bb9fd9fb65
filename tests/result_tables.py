"""Result tables made by hand."""

from typing import Any

import pandas as pd

from rlsim.experiment.columns import TABLES

RUN = {"case": "", "system": "a", "seed": 0, "step": 0}
BLANK = {"string": "", "bool": False, "int64": 0, "float64": 0.0}


def table(name: str, *rows: dict[str, Any]) -> pd.DataFrame:
    """A result table of these rows; columns that a row leaves out are zero or empty, and every step is steady."""
    columns = TABLES[name]
    filled = [{c.name: row.get(c.name, c.name == "steady" or BLANK[c.dtype]) for c in columns} for row in rows]
    return pd.DataFrame(filled, columns=[c.name for c in columns]).astype({c.name: c.dtype for c in columns})

"""Fits what a decode step without CUDA graphs takes the host to launch, and training's share of the peak, to PPO steps.

    python scripts/fit_eager.py

Two numbers of ReaLHF's runs: seconds to launch a layer, and each of its two collectives under tensor parallelism. The
steps of the heuristic, TP8, give their sum. Those of searched plans, which prefer lower degrees, tell the two apart:
they are predicted with the plan that rlsim finds for each of a few shares of the collectives, and the share in between
that meets the measured steps is taken. Then the share of the peak at which the heuristic's steps come out right on
average. Each model is fitted alone; `rlsim.cost.calibration.EAGER` and `rlsim.validate.steps.EFFICIENCY` hold the fit
to the smaller one. Takes ten minutes, most of it searches for plans.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import EagerFit, load_calibration
from rlsim.validate.parts import Options
from rlsim.validate.rows import Row
from rlsim.validate.steps import EFFICIENCY, REALHF, realhf_rows

#: Share of a layer's launches under tensor parallelism that its two collectives are.
SHARES = (0.0, 0.3, 0.6)


def steps(
    table: pd.DataFrame, layer_s: float, collective_s: float, folder: Path, efficiency: float = EFFICIENCY
) -> list[Row]:
    """The runs of `table` with these launches."""
    eager = EagerFit(layer_s=layer_s, collective_s=collective_s, source="tried")
    calibration = load_calibration("a800-sglang").model_copy(update={"eager": eager})
    return list(realhf_rows(table, Options(), write_yaml(calibration, folder), efficiency))


def slope(rows: Sequence[Row], size: int, *, measured: bool) -> float:
    """Seconds a step gains with each generated token, over the rows of a model: all train on as many tokens."""
    mine = [row for row in rows if f"-{size}b/" in row.case]
    tokens = [int(row.case.rpartition("x")[2]) for row in mine]
    return float(np.polyfit(tokens, [row.reference if measured else row.simulated for row in mine], 1)[0])


def main() -> None:
    """Fit and print."""
    table = pd.read_csv(Options().evidence / REALHF)
    heuristic = table[table["plan"] != "searched"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for size in (7, 34):
            mine = heuristic[heuristic["model_b_parameters"] == size]

            def excess(whole_s: float, mine: pd.DataFrame = mine, size: int = size) -> float:
                rows = steps(mine, whole_s, 0.0, folder)
                return slope(rows, size, measured=False) - slope(rows, size, measured=True)

            whole_s = float(brentq(excess, 0.5e-3, 3e-3, xtol=5e-6))
            print(f"{size}B, heuristic: {whole_s * 1e3:.3f} ms a layer with its collectives at TP8", flush=True)
            searched = table[(table["plan"] == "searched") & (table["model_b_parameters"] == size)]
            measured_s, tokens_s = 0.0, []
            for share in SHARES:
                rows = steps(searched, whole_s * (1 - share), whole_s * share / 2, folder)
                measured_s = slope(rows, size, measured=True)
                tokens_s.append(slope(rows, size, measured=False))
                print(
                    f"  collectives {share:.0%} of that: searched plans {tokens_s[-1] * 1e3:.1f} ms a token", flush=True
                )
            # The larger the share of collectives, the less a token takes under low degrees.
            share = float(np.interp(measured_s, tokens_s[::-1], SHARES[::-1]))
            print(
                f"  measured {measured_s * 1e3:.1f} ms a token: collectives {share:.0%}, layer_s "
                f"{whole_s * (1 - share) * 1e3:.3f}e-3, collective_s {whole_s * share / 2 * 1e3:.3f}e-3",
                flush=True,
            )

            def bias(efficiency: float, mine: pd.DataFrame = mine, whole_s: float = whole_s) -> float:
                rows = steps(mine, whole_s, 0.0, folder, efficiency)
                return float(np.mean([np.log1p(row.error) for row in rows]))

            print(f"  training at {brentq(bias, 0.3, 0.9, xtol=1e-3):.3f} of the peak", flush=True)


if __name__ == "__main__":
    main()

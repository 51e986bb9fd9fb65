"""Fits the training efficiency of RollPacker's setup to the published stage shares of its baseline.

    python scripts/fit_stage_shares.py

One number for three tasks: the share of peak at which training's mean share of a veRL step is the published 22% (23, 21
and 22%; an input figure, never an output). Takes half a minute. `experiments/rollpacker_*.yaml` and their ablations
hold the result.
"""

from __future__ import annotations

from statistics import fmean

from scipy.optimize import brentq

from rlsim.validate.parts import Options
from rlsim.validate.published import figures
from rlsim.validate.rollpacker import TASKS, share_settings, stage_shares
from rlsim.validate.runs import run


def training_share(efficiency: float) -> float:
    """Mean over the three tasks."""
    found = []
    for task in TASKS:
        settings = share_settings(task) | {"training.efficiency": efficiency, "seeds": 2}
        found.append(stage_shares(run("rollpacker_7b", overrides=settings))[2])
    return sum(found) / len(found)


def main() -> None:
    """Fit and print."""
    rows = figures(Options(), "rollpacker").rows
    published = fmean(float(row.value) for row in rows if row.quantity == "training share")
    fitted = float(brentq(lambda x: training_share(x) - published, 0.03, 0.6, xtol=5e-4))
    print(
        f"training.efficiency: {fitted:.3f}   (training share {training_share(fitted):.3f}, published {published:.3f})"
    )


if __name__ == "__main__":
    main()

"""Fits the host's time to launch a layer with experts to a published iteration of Megatron Core.

    python scripts/fit_expert_launch.py

Of the iterations of `rlsim.validate.steps_trainer` the one with the smallest micro-batches (1,024 tokens on a GPU) is
the only one that the GPU's work and its messages leave far too fast. `EXPERT_LAUNCH_S` is what brings it to its
measured seconds; all others take longer than that for each layer, so they say nothing of it.
"""

from __future__ import annotations

from scipy.optimize import brentq

from rlsim.validate.steps_trainer import iterations


def fitted_s() -> float:
    """Seconds of the forward pass of one layer."""
    (smallest,) = (one for one in iterations() if one.kind == "input")
    return float(brentq(lambda launch_s: smallest.simulated_s(launch_s) - smallest.iteration_s, 1e-4, 2e-2))


def main() -> None:
    """Fit and print."""
    found = fitted_s()
    print(f"EXPERT_LAUNCH_S = {found * 1e3:.2f}e-3")
    for one in iterations():
        without, now = (one.simulated_s(launch_s) / one.iteration_s - 1 for launch_s in (0.0, found))
        print(f"{one.case}: {without:+.1%} without launches, {now:+.1%} with them ({one.kind})")


if __name__ == "__main__":
    main()

"""Part `asynchronous`: measured steps of trainers that relax synchrony, and their gain over synchronous ones.

Of some of veRL's runs the mean response is not stated: what makes the synchronous run as long as it was is an input,
and the asynchronous run on the same lengths is predicted. AReaL's mean follows from its table; nothing is fitted there.
"""

from __future__ import annotations

import pandas as pd

from evidence.validate.parts import Options, Section
from evidence.validate.published import measured_section, published_rows
from evidence.validate.rows import markdown
from evidence.validate.steps_stated import stated

CURVE = ("step_time_s", "responses_per_s", "staleness_mean", "staleness_p95", "rollout_idle", "trainer_idle")


def section(options: Options) -> Section:
    """Every figure of every run (about two minutes)."""
    found = stated(options, "asynchronous")
    rows = published_rows(options, "asynchronous", found, whose="measured")
    curve = [
        [arm, *("—" if pd.isna(own[name]) else f"{own[name]:.3g}" for name in CURVE)]
        for arm, own in found["areal"].items()
    ]
    return measured_section(rows, 2, curve=markdown(("system", *CURVE), curve))

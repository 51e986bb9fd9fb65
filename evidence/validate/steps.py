"""Part `steps`: measured steps of real RL runs, by framework and plan, beside rlsim's."""

from __future__ import annotations

import pandas as pd
from scipy.stats import spearmanr

from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, measured_section, published_rows
from evidence.validate.rows import Row, markdown
from evidence.validate.runs import told
from evidence.validate.steps_nemo import SPENT, nemo_rows
from evidence.validate.steps_stated import stated
from evidence.validate.steps_trainer import trainer_rows

VERL = "verl_steps.csv"


def section(options: Options) -> Section:
    """Every measured step (about three minutes, most of it the search for plans)."""
    options.progress("ReaLHF")
    steps = {name: told(result) for name, result in figures(options, "realhf_steps").results().items()}
    realhf = published_rows(options, "steps", steps, file="realhf_steps")
    order = spearmanr([one.reference for one in realhf], [one.simulated for one in realhf])[0]
    nemo, refused, spent = nemo_rows(options)
    options.progress("trainers alone")
    found = [*realhf, *nemo, *trainer_rows(options.evidence), *verl_rows(options)]
    not_run = "\n".join(("Rows that cannot run, and why:", "", *refused)) if refused else "All rows run as published."
    tables = {
        "realhf_order": f"Rank correlation of rlsim's steps of ReaLHF with the measured ones: {order:.2f}.",
        "nemo_spent": markdown(SPENT, spent),
        "nemo_not_run": not_run,
    }
    return measured_section(found, 1, **tables)


def verl_rows(options: Options) -> list[Row]:
    """Every phase, and the step, of every row of veRL's that can be run."""
    table = pd.read_csv(options.evidence / VERL).set_index("id")
    measured = {f"row_{number}": phases for number, phases in table.to_dict("index").items()}
    found = stated(options, "verl_steps") | {"measured": measured}
    return published_rows(options, "steps", found, whose="measured", file="verl_steps")

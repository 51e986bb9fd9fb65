"""Part `agent_shapes`: shapes of open traces of agents, as imported and as their fit generates them.

The traces are files of trajectories that are no part of rlsim (`agentic` in the folder of data). Generated: as many
prompts with as many samples, the mean of five draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.rows import Row, summarise, summary_table
from rlsim.trace import read_trace
from rlsim.trace.fit import fit_trace
from rlsim.trace.generate import Recipe, draw_trace
from rlsim.trace.schema import Trace
from rlsim.trace.turns import recorded_s

DRAWS = 5
#: Longer than any trajectory there is: what is generated is not cut.
_NO_CAP = 2_000_000


def shape(trace: Trace) -> dict[str, float]:
    """Turns, tokens of a turn and of a call, seconds of recorded calls, and growth of the context (tokens)."""
    cells = list(trace.frame["turns"].dropna())
    calls = np.array([len(turns) - 1 for turns in cells])
    generated = np.array([sum(turn.generated_tokens for turn in turns) for turns in cells])
    observed = np.array([sum(turn.observation_tokens for turn in turns[:-1]) for turns in cells])
    grown, call_s = generated + observed, recorded_s(cells)
    seconds = {"tool_s_mean": float(np.mean(call_s)), "tool_s_p95": float(np.quantile(call_s, 0.95))} if call_s else {}
    return {
        "calls_median": float(np.median(calls)), "calls_p95": float(np.quantile(calls, 0.95)),
        "generated_per_turn": generated.sum() / (calls + 1).sum(), "observed_per_call": observed.sum() / calls.sum(),
        "observed_share": observed.sum() / grown.sum(),
        "context_growth_mean": float(grown.mean()), "context_growth_p95": float(np.quantile(grown, 0.95)), **seconds,
    }  # fmt: skip


def compared(path: Path) -> Iterator[Row]:
    """The rows of one trace."""
    trace = read_trace(path)
    prompts, fit, measured = trace.frame["prompt_id"].nunique(), fit_trace(trace), shape(trace)
    size = {"prompts": prompts, "responses": round(len(trace.frame) / prompts), "cap_tokens": _NO_CAP}
    recipe = Recipe.model_validate({"name": path.stem, **size, "lengths": {"fit": fit}})
    drawn = [shape(draw_trace(recipe.model_copy(update={"seed": seed}))) for seed in range(DRAWS)]
    for name, value in measured.items():
        yield Row("agent_shapes", path.stem, name, value, float(np.mean([one[name] for one in drawn])))


def section(options: Options) -> Section | str:
    """Every trace of the folder (a minute)."""
    paths = sorted((options.kernels / "agentic").glob("*.parquet")) if options.kernels else []
    if not paths:
        return "no traces of agents are here (they are no part of rlsim); --data FOLDER says where agentic is"
    rows: list[Row] = []
    for path in paths:
        options.progress(f"agent_shapes: {path.stem}")
        rows += compared(path)
    by_quantity = summarise([Row("agent_shapes", "all", r.quantity, r.reference, r.simulated) for r in rows], depth=1)
    return Section(tuple(rows), tuple(by_quantity), {"summaries": summary_table(by_quantity)}, "measured")

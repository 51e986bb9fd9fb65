"""Part `serving`: TTFT and TPOT of measured serving runs on H100 against rlsim's own engine in the same closed loop.

What the runs' source does not say is taken from the generator of benchmark configurations of the project that collected
them (aiconfigurator: `generator/rule_plugin/benchmark/*.rule`, `backend_templates/benchmark/bench_run.sh.j2`, and
`eval/benchmarks/genai_perf_runner.py`):

- A warm-up comes first, so the measured part begins with all `concurrency` requests at once on an idle engine.
- Each run's number of requests can be read off its means: a mean of N whole nanoseconds, times N, is a whole number.
  That gives 10 a user for vLLM, and 20 a user but at most 2,000 for TensorRT-LLM and SGLang.
- The token budget of an iteration is not the engines' default of 8,192 but written for each run: concurrency + prompt +
  1,500 (`max_num_tokens`, `max-num-batched-tokens`), for SGLang prompt + 1,500 (`max-prefill-tokens`). At most
  `concurrency` sequences run.
- vLLM and TensorRT-LLM run prompts and decodes in one iteration, SGLang prompts first (its mixed chunks are off by
  default).
- TensorRT-LLM's first tokens come late by the time of one response over the number of users, at 1 and 4 GPUs and both
  prompt lengths: one request is always waiting for a place. Why is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.cost.calibration import Engine, HostFit, load_calibration
from rlsim.cost.host import HostedStep
from rlsim.cost.memory import rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.errors import CalibrationError
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.sim.closed_loop import Load, Served, closed_loop
from rlsim.sim.request import EngineConfig
from rlsim.validate.charts import error_panels
from rlsim.validate.parts import Options, Section, Skipped
from rlsim.validate.published import filled_text
from rlsim.validate.rows import Kind, Row, markdown, summarise, summary_table, table

TABLE = "engine/h100_serving.csv"
CLUSTER = "8xh100"
GPU = "h100-sxm"
MODELS = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b"}

#: Releases that were measured, in the order in which they are reported.
SERVED: dict[Engine, str] = {"trtllm": "1.0.0rc3", "vllm": "0.12.0", "sglang": "0.5.1.post1"}
QUANTITIES = ("tpot_s", "ttft_s")

#: Mean absolute errors to reach on runs that were not fitted.
TARGET = {"tpot_s": 0.06, "ttft_s": 0.25}

#: What else could be true of the runs, to see what the results hang on.
VARIANTS: dict[str, dict[str, float | int]] = {
    "as assumed": {},
    "token budget 8,192, the engines' default": {"batched_tokens": 8192},
    "5 requests a user": {"rounds": 5},
    "40 requests a user": {"rounds": 40},
    "1 ms in the front end for each request": {"front_end_s": 1e-3},
    "a place for every user": {"idle_slots": 0},
    "a place for all users but one": {"idle_slots": 1},
}


@dataclass(frozen=True)
class ServingRun:
    """One measured run: lengths in tokens, means over its requests in seconds; `fitted` if host time may be fitted to
    it."""

    engine: Engine
    model: str
    tp: int
    prompt_tokens: int
    response_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    fitted: bool

    @property
    def case(self) -> str:
        """`vllm/qwen3-32b/tp2/1024+512x64`."""
        lengths = f"{self.prompt_tokens}+{self.response_tokens}x{self.concurrency}"
        return f"{self.engine}/{self.model}/tp{self.tp}/{lengths}"


@dataclass(frozen=True)
class Protocol:
    """What is assumed of the benchmark (see the module's text); None stands for what is said there."""

    front_end_s: float = 0.0  # that the server's front end is busy with a request before the engine has it
    rounds: int | None = None  # requests per user
    batched_tokens: int | None = None  # token budget of an iteration
    idle_slots: int | None = None  # users that find no place in the engine

    def load(self, run: ServingRun) -> Load:
        users = run.concurrency
        if self.rounds is not None:
            requests = self.rounds * users
        else:
            requests = 10 * users if run.engine == "vllm" else min(20 * users, 2000)
        return Load(run.prompt_tokens, run.response_tokens, users, requests)

    def config(self, run: ServingRun) -> EngineConfig:
        """The engine's settings. vLLM's V1 scheduler and the other two keep no pages free when admitting."""
        prompt, users = run.prompt_tokens, run.concurrency
        idle = self.idle_slots if self.idle_slots is not None else int(run.engine == "trtllm")
        if self.batched_tokens is not None:
            budget = self.batched_tokens
        elif run.engine == "sglang":  # takes prompts until the limit is passed, at most 8,192 tokens (a chunk)
            budget = min(-(-(prompt + 1500) // prompt) * prompt, 8192)
        else:
            budget = users + prompt + 1500
        return EngineConfig(
            chunked_prefill=run.engine != "sglang",
            max_num_batched_tokens=budget,
            max_num_seqs=users - idle,
            watermark=0.0,
        )


#: Columns of the table of runs: names, whole numbers, and other numbers.
_NAMES, _WHOLE = ["model", "backend"], ["tp", "prompt_tokens", "response_tokens", "concurrency"]
_NUMBERS = [*_WHOLE, "ttft_ms", "tpot_ms"]


def read_runs(data: Path) -> list[ServingRun]:
    """The measured runs below folder `data`, by engine, TP, lengths and concurrency.

    Host time may be fitted to every second run of a group (same engine, TP and lengths), beginning with the first in
    every second group and with the second in the others: a checkerboard, so each half has every length and concurrency.

    Raises `CalibrationError` for a table that is missing or damaged, with the row.
    """
    runs: list[ServingRun] = []
    groups = _read_table(data / TABLE).groupby(["backend", *_WHOLE[:-1]])
    for group, (_, rows) in enumerate(groups):
        for place, row in enumerate(rows.sort_values("concurrency").to_dict("records")):
            runs.append(
                ServingRun(
                    engine=row["backend"],
                    model=MODELS[row["model"]],
                    **{name: int(row[name]) for name in _WHOLE},
                    ttft_s=row["ttft_ms"] * 1e-3,
                    tpot_s=row["tpot_ms"] * 1e-3,
                    fitted=(group + place) % 2 == 0,
                )
            )
    return runs


def _read_table(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read as a table of serving runs: {error}") from None
    needed = [*_NAMES, *_NUMBERS]
    if missing := [name for name in needed if name not in table.columns]:
        raise CalibrationError(
            f"{path}: no column {', '.join(missing)}; a table of serving runs has {', '.join(needed)}"
        )
    if table.empty:
        raise CalibrationError(f"{path}: holds no serving run")
    for known, column in ((SERVED, "backend"), (MODELS, "model")):
        strange = table[~table[column].isin(known)]
        if len(strange):
            row, value = strange.index[0] + 2, strange[column].iloc[0]
            raise CalibrationError(f"{path}, row {row}: unknown {column} {value!r}; known: {', '.join(sorted(known))}")
    numbers = table[_NUMBERS].apply(pd.to_numeric, errors="coerce")
    wrong = ~(numbers > 0) | ~np.isfinite(numbers)
    wrong[_WHOLE] |= numbers[_WHOLE] % 1 != 0
    if wrong.to_numpy().any():
        row, column = np.argwhere(wrong.to_numpy())[0]
        name = _NUMBERS[column]
        expected = f"a positive {'whole ' if name in _WHOLE else ''}number"
        raise CalibrationError(f"{path}, row {row + 2}: {name} is {table[name].iloc[row]}, expected {expected}")
    return table.assign(**numbers)


@cache
def kernels(engine: Engine, model: str, tp: int) -> StepCost:
    """The shipped H100 calibration's step cost without host time."""
    calibration = load_calibration(f"{GPU}-{engine}")
    bare = calibration.model_copy(update={"host": HostFit(step_s=0.0, sequence_s=0.0, source="none")})
    return step_cost(load_model(model), tp, load_cluster(CLUSTER), bare)


def simulate(run: ServingRun, cost: StepCost, protocol: Protocol | None = None) -> Served:
    """The run on rlsim's engine, with the KV cache that `rollout_memory` leaves at 90% of the GPU's memory."""
    protocol = protocol or Protocol()
    config = protocol.config(run)
    memory = rollout_memory(
        load_model(run.model),
        load_cluster(CLUSTER).gpu,
        run.tp,
        page_tokens=config.page_tokens,
        max_batched_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
    )
    return closed_loop(cost, memory.pages, config, protocol.load(run), front_end_s=protocol.front_end_s)


def serving_rows(
    data: Path, hosts: Mapping[Engine, HostFit] | None = None, protocol: Protocol | None = None
) -> list[Row]:
    """Two rows a run, `tpot_s` and `ttft_s`: inputs for runs that host time was fitted to, outputs for the others.

    `hosts` stands for the host times of the shipped calibrations. Raises `CalibrationError` for a missing or damaged
    table.
    """
    rows = []
    for run in read_runs(data):
        host = hosts[run.engine] if hosts is not None else load_calibration(f"{GPU}-{run.engine}").host
        served = simulate(run, HostedStep(kernels(run.engine, run.model, run.tp), host), protocol)
        kind: Kind = "input" if run.fitted else "output"
        note = f"{served.preemptions} preemptions" if served.preemptions else ""
        rows.append(Row("serving", run.case, "tpot_s", run.tpot_s, served.tpot_s, note, kind))
        rows.append(Row("serving", run.case, "ttft_s", run.ttft_s, served.ttft_s, note, kind))
    return rows


def section(options: Options) -> Section | Skipped:
    """Every measured run on rlsim's engine, and once for each other assumption about the runs (half a minute)."""
    if options.data is None or not (options.data / TABLE).is_file():
        return Skipped("the measured serving runs are not here (they are no part of rlsim); --data FOLDER says where")
    options.progress("serving")
    rows = serving_rows(options.data)
    summaries = tuple(summarise(rows, depth=2))
    text = filled_text(
        "serving",
        summaries=summary_table(summaries),
        figures=table(rows, "measured"),
        variants="" if options.quick else _variants(options.data, options.progress),
    )
    return Section(tuple(rows), summaries, text, _chart(rows))


def _variants(data: Path, progress: Callable[[str], None]) -> str:
    """Mean absolute errors of all runs of each engine under each assumption about the benchmark."""
    cells = []
    for name, changes in VARIANTS.items():
        progress(f"serving: {name}")
        cells.append((name, *_means(serving_rows(data, protocol=Protocol(**changes)))))  # type: ignore[arg-type]
    bare = HostFit(step_s=0.0, sequence_s=0.0, source="none")
    cells.append(("no host time", *_means(serving_rows(data, dict.fromkeys(SERVED, bare)))))
    return "Mean absolute errors of all runs, TPOT / TTFT:\n\n" + markdown(("assumption", *SERVED), cells)


def _means(rows: Sequence[Row]) -> list[str]:
    means = []
    for engine in SERVED:
        of = [[abs(r.error) for r in rows if r.case.startswith(f"{engine}/") and r.quantity == q] for q in QUANTITIES]
        means.append(" / ".join(f"{np.mean(errors):.1%}" for errors in of))
    return means


def _chart(rows: Sequence[Row]) -> object:
    frame = pd.DataFrame(
        {
            "measured": [row.reference * 1e3 for row in rows],
            "simulated": [row.simulated * 1e3 for row in rows],
            "quantity": [row.quantity.removesuffix("_s").upper() for row in rows],
            "engine": [row.case.split("/")[0] for row in rows],
        }
    )
    return error_panels(frame, "Serving runs", facet="quantity", colour="engine", unit="ms")

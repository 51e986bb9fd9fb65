"""Part `serving`: TTFT and TPOT of measured serving runs on H100 against rlsim's own engine in the same closed loop.

What the runs' source does not say is taken from the generator of benchmark configurations of the project that collected
them (aiconfigurator: `generator/rule_plugin/benchmark/*.rule`, `backend_templates`, `eval/benchmarks`), and from the
engines' own code:

- A warm-up comes first, so the measured part begins with all `concurrency` requests at once on an idle engine.
- Each run's number of requests can be read off its means: a mean of N whole nanoseconds, times N, is a whole number.
  That gives 10 a user for vLLM, and 20 a user but at most 2,000 for TensorRT-LLM and SGLang.
- The token budget of an iteration is not the engines' default of 8,192 but written for each run: concurrency + prompt +
  1,500 (`max_num_tokens`, `max-num-batched-tokens`), for SGLang prompt + 1,500 (`max-prefill-tokens`). At most
  `concurrency` sequences run.
- vLLM runs chunks of prompts and decodes in one iteration. TensorRT-LLM does too, but takes whole prompts only
  (`enable_chunked_prefill` is off). SGLang runs prompts first, as many whole ones as the budget holds.
- In TensorRT-LLM's bf16 runs first tokens come late by the time of one response over the number of users, at 1 and 4
  GPUs and both prompt lengths: one request is always waiting for a place. Why is not known. In its FP8 runs none waits:
  their first tokens come no later for longer responses.
- TensorRT-LLM admits a request once there is KV for all its tokens (`GUARANTEED_NO_EVICT`, its default): here as many
  as whole ones of mean length fit.
- SGLang's overlapped loop hands out a prefill's first tokens once the next prefill is launched (until its pull request
  11856, after this release).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from evidence.validate.closed_loop import Intake, Load, Served, closed_loop
from evidence.validate.parts import Options, Section
from evidence.validate.rows import Kind, Row, markdown, read_rows, summarise, summary_table
from rlsim.base.reading import plain, read_yaml
from rlsim.base.schema import Schema
from rlsim.cost.calibration import Calibration, Engine, FrontEndFit, HostFit, load_calibration
from rlsim.cost.derived import hosted
from rlsim.cost.engine_memory import engine_memory_of
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.memory import rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.model import Model, load_model
from rlsim.models.precision import Precision
from rlsim.sim.request import EngineConfig

TABLE = "h100_serving.csv"
TODAY = "today_serving.csv"
AISIMULATE = "aisimulate.csv"
SETTINGS = Path(__file__).parents[1] / "run_settings.yaml"

#: Whose kernels each engine's runs are simulated with: of SGLang the release nearest to the one that was measured.
CALIBRATIONS: dict[Engine, str] = {
    "trtllm": "h100-sxm-trtllm",
    "vllm": "h100-sxm-vllm",
    "sglang": "h100-sxm-sglang-0.5.10",
}
#: Releases that were measured, in the order in which they are reported.
SERVED: dict[Engine, str] = {"trtllm": "1.0.0rc3", "vllm": "0.12.0", "sglang": "0.5.1.post1"}
QUANTITIES = ("tpot_s", "ttft_s")
NO_HOST = HostFit(step_s=0.0, sequence_s=0.0, source="none")

#: What else could be true of the runs, to see what the results hang on.
VARIANTS: dict[str, dict[str, int]] = {
    "as assumed": {},
    "token budget 8,192, the engines' default": {"batched_tokens": 8192},
    "5 requests a user": {"rounds": 5},
    "40 requests a user": {"rounds": 40},
    "a place for every user": {"idle_slots": 0},
    "a place for all users but one": {"idle_slots": 1},
    "KV cache of an engine told the users": {"profiled_sequences": 0},
}

#: Share of a GPU that each engine is given: vLLM's default; SGLang's own rule keeps 13.5 GiB for activations and graphs
#: (1.5 MiB for each of 8,192 tokens of a chunk, 2 MiB for each graph's batch size), its runs leave a little less; of
#: TensorRT-LLM as the generator sets it.
SHARES: dict[Engine, float] = {"vllm": 0.9, "sglang": 0.8, "trtllm": 0.8}
#: Sequences that the engine's memory is sized for where the benchmark does not say: vLLM's default on an H100.
PROFILED_SEQUENCES = 1024


class RunSettings(Schema):
    """How some runs were made; the table says what each means. `runs`: fields of those that it is said of."""

    runs: dict[str, str | int] = Field(default={})
    looks: tuple[tuple[int, int], ...] = ()
    waits: tuple[int, int] = (0, 0)
    batched_tokens: PositiveInt | None = None
    batched_prompts: PositiveInt | None = None
    share: PositiveFloat | None = None
    kv: Literal["bf16", "fp8"] | None = None
    moe_backend: str | None = None
    prompt_graphs: bool = True
    sequences: int | None = None
    really: dict[str, int | str] = Field(default={})
    cold: bool = False
    left_out: str = ""

    def budget(self, prompt_tokens: int) -> int:
        """Tokens of an iteration, by the nominal length of a prompt."""
        return self.batched_tokens or (self.batched_prompts or 0) * prompt_tokens or 8192


@cache
def run_settings() -> tuple[RunSettings, ...]:
    """The rows of `run_settings.yaml`."""
    return tuple(RunSettings.model_validate(row) for row in plain(read_yaml(SETTINGS)))


class ServingRun(Schema):
    """One measured run: lengths in tokens, means over its requests in milliseconds.

    `precision` is that of the weights (`mxfp4`: of experts alone, as published). `lengths`: `equal`, or `uniform` from
    0.8 of them on. `of`: which rows of a comparison it is one of; `peer_`: what another simulator said of it.
    """

    engine: Engine
    release: str = ""
    model: str
    gpu: str
    tp: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    concurrency: PositiveInt
    ttft_ms: PositiveFloat
    tpot_ms: PositiveFloat
    precision: Precision = "bf16"
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    lengths: Literal["equal", "uniform"] = "equal"
    of: str = ""
    peer_ttft_ms: float = 0.0
    peer_tpot_ms: float = 0.0

    def seconds(self, quantity: str) -> float:
        """A quantity (`tpot_s`, `peer_ttft_s`) in seconds."""
        return float(getattr(self, quantity.removesuffix("s") + "ms")) * 1e-3

    @property
    def case(self) -> str:
        """`vllm/qwen3-32b/tp2/1024+512x64`."""
        lengths = f"{self.prompt_tokens}+{self.response_tokens}x{self.concurrency}"
        return f"{self.setting}/{lengths}"

    @property
    def setting(self) -> str:
        """`vllm/qwen3-32b/tp2`."""
        degrees = "".join(f"-{name}{n}" for name, n in (("ep", self.ep), ("dp", self.dp)) if n > 1)
        return f"{self.engine}/{self.model}/tp{self.tp}{degrees}"

    @property
    def family(self) -> str:
        """Model, GPU and engine: `b200-sxm/vllm/gpt-oss-120b`. What a fit that leaves it out has not seen."""
        return f"{self.gpu}/{self.engine}/{self.model}"

    @property
    def plans_ahead(self) -> bool | None:
        """Whether vLLM schedules a step while the one before runs: InferenceX' scripts ask for it (lengths that differ
        are its client's), releases since 0.14 do so by themselves; None for other engines."""
        if self.engine != "vllm":
            return None
        release = self.release and tuple(map(int, self.release.split(".")[:2]))
        return self.lengths == "uniform" or bool(release and release >= (0, 14))

    @property
    def settings(self) -> RunSettings:
        """How it was made, as far as that is known: rows are of InferenceX' runs, whose client draws lengths, if they
        do not say otherwise."""
        said = [(row, {"lengths": "uniform", **row.runs}) for row in run_settings()]
        own = [row for row, of in said if all(getattr(self, name) == value for name, value in of.items())]
        return RunSettings(**{name: getattr(row, name) for row in reversed(own) for name in row.model_fields_set})

    @property
    def intake(self) -> Intake:
        every = [iterations for users, iterations in self.settings.looks if users <= self.concurrency]
        return Intake(self.engine == "sglang" or bool(self.plans_ahead), (every or [1])[-1], *self.settings.waits)

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def cluster(self) -> Cluster:
        return load_cluster("8x" + self.gpu.partition("-sxm")[0])

    @property
    def layout(self) -> ReplicaLayout:
        return ReplicaLayout(ep=self.ep, attention_dp=self.dp)

    @property
    def served(self) -> Model:
        """The model as it was served. FP8 and FP4 weights have an FP8 KV cache under TensorRT-LLM and on Blackwell."""
        small = self.precision != "bf16" and (self.engine == "trtllm" or self.gpu.startswith("b"))
        published = None if self.precision == "mxfp4" else self.precision
        return load_model(self.model).served(published, self.settings.kv or ("fp8" if small else "bf16"))


@dataclass(frozen=True)
class Protocol:
    """What is assumed of the benchmark (see the module's text); None stands for what is said there."""

    rounds: int | None = None  # requests per user
    batched_tokens: int | None = None  # token budget of an iteration
    idle_slots: int | None = None  # users that find no place in the engine
    profiled_sequences: int = PROFILED_SEQUENCES  # that vLLM sizes its memory for; 0: as many as there are users
    simulated_rounds: int | None = None  # of those; the others are taken to go like all but the first

    def load(self, run: ServingRun) -> Load:
        users = run.concurrency
        if self.rounds is not None:
            requests = self.rounds * users
        else:
            few = run.engine == "vllm" or run.lengths == "uniform"
            requests = 10 * users if few else min(20 * users, 2000)
        simulated = None if self.simulated_rounds is None else self.simulated_rounds * users
        shortest = 0.8 if run.lengths == "uniform" else 1.0
        return Load(run.prompt_tokens, run.response_tokens, users, requests, simulated, shortest)

    def config(self, run: ServingRun) -> EngineConfig:
        """The engine's settings. vLLM's V1 scheduler and the other two keep no pages free when admitting."""
        prompt, users = run.prompt_tokens, run.concurrency
        waits = run.engine == "trtllm" and run.precision == "bf16"
        idle = int(waits) if self.idle_slots is None else self.idle_slots
        if self.batched_tokens is not None or run.lengths == "uniform":
            budget = self.batched_tokens or run.settings.budget(prompt)
        elif run.engine == "sglang":
            budget = prompt + 1500
        elif run.engine == "trtllm":
            budget = users + (prompt + 1500) // prompt * prompt
        else:
            budget = users + prompt + 1500
        return EngineConfig(
            chunked_prefill=run.engine != "sglang",
            max_num_batched_tokens=max(budget, prompt) if run.engine == "sglang" else budget,
            max_num_seqs=users - idle,
            watermark=0.0,
        )

    def pages(self, run: ServingRun, draft_bytes: tuple[float, float] = (0.0, 0.0)) -> int:
        config, told = self.config(run), run.settings.sequences
        memory = rollout_memory(
            run.served,
            run.cluster.gpu,
            run.gpus,
            layout=run.layout,
            page_tokens=config.page_tokens,
            memory_utilization=run.settings.share or SHARES[run.engine],
            max_batched_tokens=config.max_num_batched_tokens,
            max_sequences=max(config.max_num_seqs, self.profiled_sequences if told is None else told)
            if run.engine == "vllm"
            else run.concurrency,
            rule=engine_memory_of(run.engine, run.release if run.engine == "vllm" else ""),
            draft_bytes=draft_bytes,
        )
        return memory.pages


AS_ASSUMED = Protocol()


def read_runs(evidence: Path, name: str = TABLE) -> list[ServingRun]:
    """The measured runs of a folder as they really were, by engine, TP, lengths and concurrency.

    Raises `ConfigError` if the table is missing or damaged, with the row.
    """
    runs = [run.model_copy(update=run.settings.really) for run in read_rows(evidence / name, ServingRun)]
    return sorted(runs, key=lambda r: (r.engine, r.tp, r.prompt_tokens, r.response_tokens, r.concurrency))


def calibration_of(run: ServingRun) -> str:
    """The name of the calibration that has the engine's kernels on the run's GPU."""
    own = f"{run.gpu}-{run.engine}"
    return CALIBRATIONS[run.engine] if run.precision == "bf16" and CALIBRATIONS[run.engine].startswith(own) else own


def kernels_of(calibration: Calibration, run: ServingRun) -> StepCost:
    """A calibration's step cost of the run's model in its layout, without host time."""
    bare = calibration.model_copy(update={"host": NO_HOST}).with_experts(run.settings.moe_backend)
    return step_cost(run.served, run.gpus, run.cluster, bare, run.layout, prompt_graphs=run.settings.prompt_graphs)


_KERNELS: dict[tuple[object, ...], StepCost] = {}


def kernels(run: ServingRun) -> StepCost:
    """That of the shipped calibration, made once for each setting."""
    key = (run.gpu, run.setting, run.precision)
    if key not in _KERNELS:
        _KERNELS[key] = kernels_of(load_calibration(calibration_of(run)), run)
    return _KERNELS[key]


def simulate(
    run: ServingRun, bare: StepCost, host: HostFit, front_end: FrontEndFit, protocol: Protocol = AS_ASSUMED
) -> Served:
    """The run on rlsim's engine, whose kernels take the times of `bare`."""
    cost, config, load, pages = (
        hosted(bare, host, run.dp),
        protocol.config(run),
        protocol.load(run),
        protocol.pages(run),
    )
    if run.engine == "trtllm":
        whole = math.ceil((run.prompt_tokens + run.response_tokens) * (1 + load.shortest) / 2 / config.page_tokens)
        config = config.model_copy(update={"max_num_seqs": max(min(config.max_num_seqs, pages // whole), 1)})
    return closed_loop(cost, pages, config, load, front_end, run.intake)


def run_rows(
    part: str, run: ServingRun, kind: Kind, host: HostFit, front_end: FrontEndFit, protocol: Protocol = AS_ASSUMED
) -> list[Row]:
    """Two rows of a run, `tpot_s` and `ttft_s`, with the shipped kernels."""
    served = simulate(run, kernels(run), host, front_end, protocol)
    note = f"{served.preemptions} preemptions" if served.preemptions else ""
    return [Row(part, run.case, name, run.seconds(name), getattr(served, name), note, kind) for name in QUANTITIES]


def serving_rows(evidence: Path, protocol: Protocol = AS_ASSUMED, *, hosted: bool = True) -> list[Row]:
    """The rows of every run, with the host time of the shipped calibrations, or without any and without a front end.

    They are inputs: the shipped host time is fitted to all of them.
    """
    rows = []
    for run in read_runs(evidence):
        calibration = load_calibration(CALIBRATIONS[run.engine]).scheduled(run.plans_ahead)
        fits = (calibration.host, calibration.front_end) if hosted else (NO_HOST, FrontEndFit())
        rows += run_rows("serving", run, "input", *fits, protocol)
    return rows


def section(options: Options) -> Section:
    """Every measured run on rlsim's engine, and once for each other assumption about the runs (minutes)."""
    options.progress("serving")
    rows = serving_rows(options.evidence)
    summaries = tuple(summarise(rows, depth=2))
    tables = {
        "summaries": summary_table(summaries),
        "variants": "" if options.quick else _variants(options.evidence, options.progress),
    }
    return Section(tuple(rows), summaries, tables, "")


def _variants(evidence: Path, progress: Callable[[str], None]) -> str:
    """Mean absolute errors of all runs of each engine under each assumption about the benchmark."""
    cells = []
    for name, changes in VARIANTS.items():
        progress(f"serving: {name}")
        cells.append((name, *_means(serving_rows(evidence, Protocol(**changes)))))
    cells.append(("no host time, no front end", *_means(serving_rows(evidence, hosted=False))))
    return markdown(("assumption", *SERVED), cells)


def _means(rows: Sequence[Row]) -> list[str]:
    means = {(found.group, found.quantity): f"{found.mean:.1%}" for found in summarise(rows, depth=1)}
    return [" / ".join(means[engine, quantity] for quantity in QUANTITIES) for engine in SERVED]

"""Part `throughput`: tokens a second of whole batches under TensorRT-LLM, all requests at once and of equal lengths, as
NVIDIA prints them for its releases: what a rollout is, up to its tail.

No constant is fitted to them. In view of them it was decided that a rollout under TensorRT-LLM has no host time per
sequence (`HostFit.behind_server`), and whose experts stand for those without a table.

`trtllm-bench throughput` sets the engine's limits itself (`tensorrt_llm/bench/build/tuning.py`, since 0.20): as many
sequences as whole requests fit into the KV cache by its own arithmetic, 4,096 at most, rounded up, and tokens for these
and their share of prompts; whole prompts are taken (chunked prefill is off). The engine gets 0.95 of the memory that is
left. With data-parallel attention the limits are each GPU's. Limits of 0.14, which had files of them, are taken as
those of the later releases.

Which layout mixtures had under 1.0 is taken from the page after it: data-parallel attention.
"""

from __future__ import annotations

import math

from pydantic import PositiveFloat

from evidence.validate.closed_loop import Load, closed_loop
from evidence.validate.parts import Options, Section
from evidence.validate.rows import Row, read_rows, summarise, summary_table
from evidence.validate.serving import ServingRun, calibration_of, kernels
from rlsim.cost.calibration import load_calibration
from rlsim.cost.derived import hosted
from rlsim.cost.engine_memory import engine_memory_of
from rlsim.cost.memory import rollout_memory
from rlsim.models.precision import KV_BYTES, WEIGHT_BYTES
from rlsim.sim.request import EngineConfig

TABLE = "offline_throughput.csv"
KV_SHARE, PAGE_TOKENS = 0.95, 16


class OfflineRun(ServingRun):
    """A measured run, whose `concurrency` is all its requests, by generated tokens a second of all GPUs."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens_per_s: PositiveFloat

    @property
    def shown(self) -> str:
        layout = self.setting.rpartition("/")[2]
        what = f"{self.release}/{self.gpu}/{self.model}-{self.precision}"
        return f"{what}/{layout}/{self.prompt_tokens}+{self.response_tokens}"

    def limits(self) -> tuple[int, int]:
        """The most sequences and tokens of an iteration of one group of GPUs."""
        model, prompt, response = self.served, self.prompt_tokens, self.response_tokens
        heads = max(self.gpus, model.num_key_value_heads)
        token_bytes = 2 * model.num_hidden_layers * heads * model.head_dim * KV_BYTES[model.kv_precision]
        room = self.cluster.gpu.memory_bytes * self.gpus - model.parameters * WEIGHT_BYTES[self.precision]
        fitting = min(KV_SHARE * room / token_bytes / (prompt + response), 4096)
        unit = 32 if fitting < 256 else 128 if fitting < 1024 else 256
        sequences = max(64, unit * math.ceil(fitting / unit))
        tokens = min(fitting * (1 + prompt / response), 32768)
        unit = 256 if tokens < 4096 else 512 if tokens < 8192 else 1024
        return sequences, max(2048, unit * math.ceil(tokens / unit), prompt + sequences)

    def rate(self) -> float:
        """Generated tokens a second on rlsim's engine. Raises `CapacityError` if no request fits."""
        sequences, tokens = self.limits()
        memory = rollout_memory(
            self.served,
            self.cluster.gpu,
            self.gpus,
            layout=self.layout,
            page_tokens=PAGE_TOKENS,
            memory_utilization=KV_SHARE,
            max_batched_tokens=tokens,
            max_sequences=sequences,
            rule=engine_memory_of("trtllm"),
        )
        whole = math.ceil((self.prompt_tokens + self.response_tokens) / PAGE_TOKENS)
        own = max(min(sequences, memory.pages // whole // self.dp), 1)  # a request has KV for all its tokens
        budget = own + max((tokens - own) // self.prompt_tokens, 1) * self.prompt_tokens
        config = EngineConfig(
            page_tokens=PAGE_TOKENS, max_num_batched_tokens=budget * self.dp, max_num_seqs=own * self.dp, watermark=0.0
        )
        cost = hosted(kernels(self), load_calibration(calibration_of(self)).host.in_rollouts, self.dp)
        load = Load(self.prompt_tokens, self.response_tokens, self.concurrency, self.concurrency)
        return closed_loop(cost, memory.pages, config, load).tokens_per_s


def section(options: Options) -> Section:
    """All runs; if quick, those of one release."""
    options.progress("throughput")
    runs = [one for one in read_rows(options.evidence / TABLE, OfflineRun) if not options.quick or one.release == "1.0"]
    rows = [Row("throughput", run.shown, "tokens_per_s", run.tokens_per_s, run.rate()) for run in runs]
    releases, families = summarise(rows, 1), summarise(rows, 3)
    tables = {"releases": summary_table(releases), "families": summary_table(families)}
    return Section(tuple(rows), (*releases, *families), tables, "", summarised=True)

"""How fast the engine is: 40 generation stages of 4,096 responses on 64 replicas, against two yardsticks.

- A bare SimPy loop that sleeps through the very timeouts the engine scheduled and does nothing between them.
- The token-by-token reference of the tests, on a size that it can do.

    python benchmarks/rollout.py            # a minute
    python benchmarks/rollout.py --quick    # seconds, a tenth of the size, for CI

The contenders take turns, and medians are compared: a machine that is busy with other things slows them all. The last line
of output is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import simpy

from rlsim.cost.calibration import load_calibration
from rlsim.cost.machine import Machine
from rlsim.cost.strategy import TrainStrategy
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.sim.control import ControlContext, RolloutControl
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.simulation import CallTimes, Outcome, Simulation
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference import RefEngine, RefRequest  # noqa: E402
from reference import simulate as step_token_by_token  # noqa: E402

CAP_TOKENS = 16_384
CONFIG = EngineConfig()
GENERATION = Workflow("generation", (Call("generate", "generate", "actor"),), (Edge("generate", "generate", lag=1),))

Lengths = Sequence[tuple[int, int]]  # prompt and response tokens of each request of a step


class OneGpuEach(RolloutControl):
    """Every GPU a replica of its own, from start to end."""

    def initial_tp(self, context: ControlContext) -> int:  # noqa: ARG002
        """The layout every step starts with."""
        return 1


class NoOtherCalls(CallTimes):
    """The workflow is generation alone."""


def h800s(nodes: int) -> Machine:
    """Qwen3-8B under SGLang on nodes of 8 H800."""
    cluster = load_cluster("8x8xh800").model_copy(update={"nodes": nodes})
    strategy = TrainStrategy(dp=cluster.gpus, zero_stage=3, offload=True)
    calibration = load_calibration("h800-sxm-sglang")
    return Machine(
        load_model("qwen3-8b"), cluster, calibration, train=strategy, inference=strategy, backend="fsdp"
    )


def draw(steps: int, responses: int, *, median_tokens: float = 1_100, longer: int = 1, seed: int = 0) -> list[Lengths]:
    """Long-tailed response lengths, `longer` times as long in the end, and prompts of about 500 tokens, by step."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(median_tokens), 0.9, (steps, responses)).clip(1, CAP_TOKENS).astype(int) * longer
    prompts = rng.integers(300, 700, (steps, responses))
    return [list(zip(p, r, strict=True)) for p, r in zip(prompts.tolist(), drawn.tolist(), strict=True)]


def simulation(machine: Machine, lengths: Sequence[Lengths], gpus: int | None = None) -> Simulation:
    """Generation stages one after the other, on all GPUs or on the first few."""

    def launch(step: int) -> list[Request]:
        return [Request(i, i // 8, prompt, tokens) for i, (prompt, tokens) in enumerate(lengths[step])]

    return Simulation(
        workflow=GENERATION,
        plan=Plan({"generate": Placement(tuple(range(gpus or machine.cluster.gpus)))}),
        cluster=machine.cluster,
        control=OneGpuEach(),
        initial_tp=1,
        launch=launch,
        costs=machine,
        times=NoOtherCalls(),
        config=CONFIG,
        cap_tokens=max(tokens for step in lengths for _, tokens in step),
        steps=len(lengths),
    )




def run_engine(machine: Machine, lengths: Sequence[Lengths], gpus: int | None = None) -> Outcome:
    """The run that is measured: requests made, generated, recorded as columns and spans."""
    return simulation(machine, lengths, gpus).run()


def timeouts_of(machine: Machine, lengths: Sequence[Lengths]) -> list[float]:
    """The delays of all timeouts that the engine schedules."""
    delays: list[float] = []
    original = simpy.Timeout.__init__

    def note(self: simpy.Timeout, env: simpy.Environment, delay: float, value: object = None) -> None:
        delays.append(delay)
        original(self, env, delay, value)

    with patch.object(simpy.Timeout, "__init__", note):
        run_engine(machine, lengths)
    return delays


def run_bare(delays: Sequence[float], processes: int) -> None:
    """Sleep through `delays`, shared by so many processes, and do nothing between."""

    def sleep(share: Sequence[float]) -> Iterator[simpy.Event]:
        for delay in share:
            yield env.timeout(delay)

    env = simpy.Environment()
    for i in range(processes):
        env.process(sleep(delays[i::processes]))
    env.run()


def run_token_by_token(machine: Machine, lengths: Lengths, nodes: int) -> dict[int, float]:
    """When each response finishes, by the reference."""
    result = step_token_by_token(
        [RefRequest(i, i // 8, prompt, tokens) for i, (prompt, tokens) in enumerate(lengths)],
        nodes=nodes,
        gpus_per_node=machine.cluster.gpus_per_node,
        tp=1,
        costs=machine,
        engine=RefEngine(
            page_tokens=CONFIG.page_tokens,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            chunked_prefill=CONFIG.chunked_prefill,
            watermark_pages=CONFIG.watermark_pages(machine.capacity_pages(1)),
        ),
        cap_tokens=max(tokens for _, tokens in lengths),
        control=OneGpuEach(),
    )
    return result.finish_at

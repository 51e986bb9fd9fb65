"""How fast the engine is: 40 generation stages of 4,096 responses on 64 replicas, against two yardsticks.

- A bare SimPy loop that sleeps through the very timeouts the engine schedules where a control is told of each response,
  and does nothing between them: in one process (`ratio_to_bare_simpy`, the stricter: SimPy's queue holds one event) and
  in as many as there are replicas.
- The token-by-token reference of the tests, on a size that it can do.

    python benchmarks/rollout.py            # a minute
    python benchmarks/rollout.py --quick    # seconds, an eightieth of the size, for CI

The contenders take turns, and medians of their CPU times are compared: a machine that is busy with other things slows
them all. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import simpy
from scale import peak_mb, shown

from rlsim.cost.calibration import load_calibration
from rlsim.cost.rollout import RolloutCostModel
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.batching import PromptFeed
from rlsim.sim.control import ControlContext, Prompt, RolloutControl, RolloutView
from rlsim.sim.moment import Sleep
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.reward import RewardFunction
from rlsim.sim.run import simulate
from rlsim.sim.simulation import CallTimes, Simulation
from rlsim.workflow import Call, Edge, Placement, Plan, Workflow

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference import RefEngine, RefRequest, RefResult, RefRollout

CAP_TOKENS = 16_384
CONFIG = EngineConfig()
GENERATION = Workflow("generation", (Call("generate", "generate", "actor"),), (Edge("generate", "generate", lag=1),))

Lengths = Sequence[tuple[int, int]]  # prompt and response tokens of each request of a step


class OneGpuEach(RolloutControl):
    """Every GPU a replica of its own, from start to end."""

    def initial_tp(self, context: ControlContext) -> int:  # noqa: ARG002
        """The layout every step starts with."""
        return 1


class ToldOfEach(OneGpuEach):
    """Is told of every response at its moment, as a deciding control is, and decides nothing."""

    def on_finish(self, view: RolloutView) -> None:
        """Go on."""


class NoOtherCalls(CallTimes):
    """The workflow is generation alone."""


class NoRewards(RewardFunction):
    """Nothing is scored."""

    workers = 0


def h800s(nodes: int) -> RolloutCostModel:
    """Qwen3-8B under SGLang on nodes of 8 H800."""
    cluster = load_cluster("8x8xh800").model_copy(update={"nodes": nodes})
    calibration = load_calibration("h800-sxm-sglang")
    return RolloutCostModel(load_model("qwen3-8b"), cluster, calibration)


def draw(steps: int, responses: int, *, median_tokens: int = 1_100, cap_tokens: int = CAP_TOKENS) -> list[Lengths]:
    """Long-tailed response lengths and prompts of about 500 tokens, by step."""
    rng = np.random.default_rng(0)
    tokens = rng.lognormal(np.log(median_tokens), 0.9, (steps, responses)).clip(1, cap_tokens).astype(int)
    prompts = rng.integers(300, 700, (steps, responses))
    return [list(zip(p, t, strict=True)) for p, t in zip(prompts.tolist(), tokens.tolist(), strict=True)]


def simulation(
    costs: RolloutCostModel, lengths: Sequence[Lengths], gpus: int | None = None, control: type[OneGpuEach] = OneGpuEach
) -> Simulation:
    """Generation stages one after the other, on all GPUs or on the first few."""

    prompts = len(lengths[0]) // 8

    def requests(launched: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
        step = lengths[launched[0].position // prompts]
        return [
            Request(first_id + i, launched[i // samples].position, prompt, tokens)
            for i, (prompt, tokens) in enumerate(step)
        ]

    return Simulation(
        workflow=GENERATION,
        plan=Plan({"generate": Placement(tuple(range(gpus or costs.cluster.gpus)))}),
        cluster=costs.cluster,
        control=control(),
        initial_tp=1,
        feasible_tps=(1,),
        feed=PromptFeed(prompts, 8),
        requests=requests,
        costs=costs,
        times=NoOtherCalls(),
        scoring=NoRewards(),
        config=CONFIG,
        cap_tokens=max(tokens for step in lengths for _, tokens in step),
        steps=len(lengths),
    )


def run_engine(costs: RolloutCostModel, lengths: Sequence[Lengths], gpus: int | None = None) -> Outcome:
    """The run that is measured: requests made, generated, recorded as columns and spans."""
    return simulate(simulation(costs, lengths, gpus))


def timeouts_of(costs: RolloutCostModel, lengths: Sequence[Lengths]) -> list[float]:
    """The delays of all timeouts and sleeps that the engine schedules where a control is told of each response: one for
    each."""
    delays: list[float] = []
    timeout, sleep = simpy.Timeout.__init__, Sleep.__init__

    def note(self: simpy.Timeout, env: simpy.Environment, delay: float, value: object = None) -> None:
        delays.append(delay)
        timeout(self, env, delay, value)

    def note_sleep(self: Sleep, env: simpy.Environment, until: float | None = None) -> None:
        if until is not None:
            delays.append(until - env.now)
        sleep(self, env, until)

    with patch.object(simpy.Timeout, "__init__", note), patch.object(Sleep, "__init__", note_sleep):
        simulate(simulation(costs, lengths, control=ToldOfEach))
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


def run_token_by_token(costs: RolloutCostModel, lengths: Lengths) -> RefResult:
    """The reference's answer, on all nodes of `costs`."""
    return RefRollout(
        requests=tuple(RefRequest(i, i // 8, prompt, tokens) for i, (prompt, tokens) in enumerate(lengths)),
        node_gpus=(costs.cluster.gpus_per_node,) * costs.cluster.nodes,
        tp=1,
        costs=costs,
        engine=RefEngine(
            page_tokens=CONFIG.page_tokens,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            chunked_prefill=CONFIG.chunked_prefill,
            free_pages=CONFIG.watermark_pages(costs.capacity_pages(1)),
        ),
        cap_tokens=CAP_TOKENS,
        control=OneGpuEach(),
    ).simulate()


def check_equal(outcome: Outcome, reference: RefResult) -> None:
    """Both must have done the same work."""
    finished_at = outcome.responses[0].finished_at
    expected = [reference.finish_at[i] for i in range(len(finished_at))]
    np.testing.assert_allclose(finished_at, expected, rtol=1e-9, atol=0)


def peak_mb_of_fresh_process(quick: bool) -> float:
    """The same of a process that does nothing but the run."""
    command = [sys.executable, __file__, "--peak-memory", *(["--quick"] if quick else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def medians(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """CPU seconds of each, the median of so many; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            gc.collect()
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description="How fast the engine is.")
    parser.add_argument("--quick", action="store_true", help="an eightieth of the size, for CI")
    parser.add_argument("--peak-memory", action="store_true", help="only do the run once and print this process's MB")
    parser.add_argument("--repeats", type=int, default=5, help="medians of so many (5)")
    arguments = parser.parse_args()
    gc.set_threshold(1_000_000)  # as runs of experiments do
    steps, responses, part = (2, 1_024, 1) if arguments.quick else (40, 4_096, 10)
    small, median_tokens = (8, 500) if arguments.quick else (64, 4_000)

    if arguments.peak_memory:
        run_engine(h800s(nodes=8), draw(steps, responses))
        print(peak_mb())
        return
    peak = peak_mb_of_fresh_process(arguments.quick)  # first: on Linux a child's peak includes its parent's

    costs, lengths = h800s(nodes=8), draw(steps, responses)
    replicas = costs.cluster.gpus
    delays = timeouts_of(costs, lengths)
    short = draw(part, responses, median_tokens=140, cap_tokens=CAP_TOKENS // 8)
    twice = draw(part, 2 * responses, median_tokens=140, cap_tokens=CAP_TOKENS // 8)
    long = [[(prompt, 8 * tokens) for prompt, tokens in step] for step in short]
    node, few = h800s(nodes=1), draw(1, small, median_tokens=median_tokens)
    reference = run_token_by_token(node, few[0])
    check_equal(run_engine(node, few), reference)
    reruns = 20  # of what takes less than a millisecond

    took = medians(
        {
            "engine": lambda: run_engine(costs, lengths),
            "told of each": lambda: simulate(simulation(costs, lengths, control=ToldOfEach)),
            "bare": lambda: run_bare(delays, 1),
            "bare processes": lambda: run_bare(delays, replicas),
            "short": lambda: run_engine(costs, short),
            "twice": lambda: run_engine(costs, twice),
            "long": lambda: run_engine(costs, long),
            "few": lambda: [run_engine(node, few) for _ in range(reruns)],
            "token by token": lambda: run_token_by_token(node, few[0]),
        },
        arguments.repeats,
    )
    result = {
        "replicas": replicas,
        "responses": steps * responses,
        "tokens": sum(tokens for step in lengths for _, tokens in step),
        "timeouts": len(delays),
        "engine_s": took["engine"],
        "told_of_each_s": took["told of each"],
        "bare_s": took["bare"],
        "bare_processes_s": took["bare processes"],
        "ratio_to_bare_simpy": took["engine"] / took["bare"],
        "ratio_told_of_each": took["told of each"] / took["bare"],
        "ratio_to_bare_simpy_processes": took["engine"] / took["bare processes"],
        "time_ratio_2x_responses": took["twice"] / took["short"],
        "time_ratio_8x_tokens": took["long"] / took["short"],
        "token_by_token_iterations": len(reference.iterations),
        "token_by_token_s": took["token by token"],
        "speedup_over_token_by_token": reruns * took["token by token"] / took["few"],
        "peak_mb": peak,
    }
    shown(result)


if __name__ == "__main__":
    main()

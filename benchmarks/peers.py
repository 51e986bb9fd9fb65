"""rlsim beside AISimulate: the same batch rollouts of Qwen3-8B on H200, wall time and predicted makespan.

    python benchmarks/peers.py --venv PATH                       # two minutes; PATH: where AISimulate is installed
    python benchmarks/peers.py --venv PATH --page docs/peers.md  # and put the tables into the page
    python benchmarks/peers.py --venv PATH --quick               # 64 and 128 responses, once each

All requests arrive at once, 512-token prompts, lognormal lengths (median 2,000, sigma 0.9) capped at 16,384, seeded.
Both tools: TP1, 8,192 batched tokens, 512 sequences, chunked prefill, pages of 64 tokens, requests dealt in turn.

AISimulate prices GPU kernels alone, so the row `rlsim` does too; other rows change one thing, `rlsim, host time` adds
what the calibration says the engine's host takes between iterations (vLLM before 0.14). Each run is a process of its
own, the tools take turns, and the least of each time stands (a machine that is busy with other things slows both):

- `wall_s`: simulation in the process, database or calibration loaded (AISimulate's own `wall_time_ms`; building and
  running rlsim's simulation, no step priced beforehand);
- `again_s`: rlsim's once more, steps priced, as every further step and seed of an experiment is;
- `process_s`: a whole process from start to end, file in and answer out.

The last line of output is JSON, a list of rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rollout import Lengths, simulation

from rlsim import __version__
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.step import Chunk
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.request import EngineConfig
from rlsim.sim.run import simulate
from rlsim.sim.simulation import Simulation

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.validate.page import with_measured, without_long_tables
from evidence.validate.rows import markdown

CAP_TOKENS, PROMPT_TOKENS = 16_384, 512
ENGINE = EngineConfig(page_tokens=64, max_num_seqs=512, max_num_batched_tokens=8_192, chunked_prefill=True)
MODEL, CLUSTER = load_model("qwen3-8b"), load_cluster("8xh200")
STEPS = {
    "decode": [(1, 1_000), (1, 16_000), (8, 8_000), (64, 2_000), (256, 1_000), (256, 3_000), (512, 1_000)],
    "prefill": [(1, 512), (4, 512), (16, 512)],
    "kinds": [(8, 8_000), (64, 2_000), (512, 1_000)],
}
HOW_TO = """AISimulate is not at {venv}. To put it there (Python 3.11 or later, 1.5 GB; only pre-releases have wheels):

    python3 -m venv {venv}
    {venv}/bin/pip install --pre --only-binary aisimulate aisimulate
"""
CONFIGURATION = Path(__file__).with_name("aisimulate.yaml")


class Case(NamedTuple):
    """One rollout."""

    responses: int
    replicas: int

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.responses} responses, {self.replicas} replica{'s' if self.replicas > 1 else ''}"


CASES = (Case(512, 1), Case(512, 8), Case(4_096, 1), Case(4_096, 8))
QUICK = (Case(64, 1), Case(128, 8))


#: What a tool says of a rollout (`makespan_s`), and how long it took over it: `wall_s`, `again_s`, `process_s`.
Answer = dict[str, float]


def write_requests(path: Path, responses: int) -> None:
    """A rollout as a trace in Mooncake's layout, which both tools read here."""
    lengths = np.random.default_rng(0).lognormal(np.log(2_000), 0.9, responses).clip(1, CAP_TOKENS).astype(int)
    lines = (
        {"request_id": f"r{i}", "timestamp": 0.0, "input_length": PROMPT_TOKENS, "output_length": n, "hash_ids": [i]}
        for i, n in enumerate(lengths.tolist())
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


# ---- rlsim -----------------------------------------------------------------------------------------------------------


def kernels_only(calibration: Calibration) -> Calibration:
    """A calibration whose engine needs no time on the host."""
    host = {"step_s": 0.0, "sequence_s": 0.0, "prefill_s": 0.0}
    return calibration.model_copy(update={"host": calibration.host.model_copy(update=host)})


def costs_of(calibration: Calibration) -> RolloutCostModel:
    """Qwen3-8B on H200, nothing priced yet."""
    return RolloutCostModel(
        MODEL,
        CLUSTER,
        calibration,
        page_tokens=ENGINE.page_tokens,
        max_batched_tokens=ENGINE.max_num_batched_tokens,
        max_sequences=ENGINE.max_num_seqs,
    )


def rollout(calibration: Calibration, requests: Lengths, replicas: int, **changes: Any) -> Simulation:
    """One generation stage, dealt in turn as AISimulate deals it; `changes` to the simulation."""
    plain = simulation(costs_of(calibration), [requests], replicas)
    return dataclasses.replace(plain, **{"config": ENGINE, "routing": "round_robin", **changes})


def makespan_s(made: Simulation) -> float:
    """When the last response is finished."""
    return float(simulate(made).responses[0].finished_at.max())


def variants() -> dict[str, tuple[Calibration, dict[str, Any]]]:
    """rlsim as AISimulate is, and what else it models: by name, the calibration and what changes in the simulation."""
    measured = load_calibration("h200-vllm")
    plain = kernels_only(measured)
    attention = plain.operators.decode_attention.model_copy(update={"skew": 0.0})
    even = plain.model_copy(
        update={"operators": plain.operators.model_copy(update={"decode_attention": attention})},
    )
    return {
        "rlsim": (plain, {}),
        "rlsim, host time": (measured.scheduled(False), {}),
        "rlsim, no skew of contexts": (even, {}),
        "rlsim, contiguous shares": (plain, {"routing": "contiguous"}),
        "rlsim, prefill apart": (plain, {"config": ENGINE.model_copy(update={"chunked_prefill": False})}),
    }


def timed(path: Path, replicas: int, variant: str) -> Answer:
    """The makespan, and the seconds of a first and a second simulation."""
    calibration, changes = variants()[variant]
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    requests = [(line["input_length"], line["output_length"]) for line in lines]
    gc.collect()
    start = time.perf_counter()
    first = rollout(calibration, requests, replicas, **changes)
    answer = makespan_s(first)
    wall_s = time.perf_counter() - start
    second = rollout(calibration, requests, replicas, **changes, costs=first.costs)
    start = time.perf_counter()
    if makespan_s(second) != answer:
        raise SystemExit("rlsim contradicts itself")
    return {"makespan_s": answer, "wall_s": wall_s, "again_s": time.perf_counter() - start}


def run_rlsim(path: Path, case: Case, variant: str) -> Answer:
    """Once, in a process of its own."""
    command = [sys.executable, __file__, "--simulate", str(path), "--replicas", str(case.replicas), "--as", variant]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {**json.loads(done.stdout), "process_s": time.perf_counter() - start}


# ---- AISimulate ------------------------------------------------------------------------------------------------------


def predicted(venv: Path, path: Path, *options: str) -> dict[str, Any]:
    """What AISimulate says of the rollout in a file, in a process of its own."""
    said = path.with_name("aisimulate")
    shutil.copy(CONFIGURATION, path.parent)
    command = (str(venv / "bin" / "aisimulate"), "predict", "-c", CONFIGURATION.name, "--output-dir", said.name)
    done = subprocess.run([*command, "--overwrite", *options], cwd=path.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"aisimulate failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((said / "prediction.json").read_text(encoding="utf-8"))
    return found


def run_aisimulate(venv: Path, path: Path, case: Case) -> Answer:
    """Once."""
    start = time.perf_counter()
    said = predicted(venv, path, "--set", f"engine.workers.aggregated.parallelism.replicas={case.replicas}")
    process_s = time.perf_counter() - start
    if said["completed_requests"] != case.responses:
        raise SystemExit(f"aisimulate finished {said['completed_requests']} of {case.responses} requests")
    return {"makespan_s": said["duration_ms"] / 1e3, "wall_s": said["wall_time_ms"] / 1e3, "process_s": process_s}


def python(venv: Path, *arguments: str) -> str:
    """What the Python beside AISimulate prints last."""
    command = [str(venv / "bin" / "python"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


# ---- the page docs/peers.md ---------------------------------------------------------------------------------------


Price = tuple[str, float, float]  # what both tools put a number to: rlsim's and AISimulate's, tokens or seconds


def tables(rows: list[dict[str, Any]], variants: Sequence[str], priced: list[Price], peer: str) -> dict[str, str]:
    """What the page shows, by name."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    of = {(row["case"], row["tool"]): row for row in rows}
    time_head = ("rollout", "AISimulate s", "rlsim s", "faster", "again s", "faster", "processes s", "faster")
    times, spans, one_digit = [], [], "{:.1f}".format
    others = [name for name in variants if name != "rlsim"]
    for case in cases:
        theirs, ours = of[case, "aisimulate"], of[case, "rlsim"]
        wall_s, process_s, makespan = theirs["wall_s"], theirs["process_s"], theirs["makespan_s"]
        again = f"{ours['again_s']:.4f}", f"{wall_s / ours['again_s']:.0f}×"
        processes = f"{process_s:.2f}, {ours['process_s']:.2f}", f"{process_s / ours['process_s']:.1f}×"
        times.append(
            (case, f"{wall_s:.2f}", f"{ours['wall_s']:.4f}", f"{wall_s / ours['wall_s']:.0f}×", *again, *processes)
        )
        said = [of[case, name]["makespan_s"] for name in others]
        difference = f"{ours['makespan_s'] / makespan - 1:+.1%}"
        spans.append((case, one_digit(makespan), one_digit(ours["makespan_s"]), difference, *map(one_digit, said)))
    span_head = ("makespan, s", "AISimulate", "rlsim", "difference", *(name.removeprefix("rlsim, ") for name in others))
    shown = [
        (what, *(f"{x * 1e3:.2f}" if x < 1 else f"{x:,.0f}" for x in both), f"{both[0] / both[1] - 1:+.1%}")
        for what, *both in priced
    ]
    where = (
        f"Measured {datetime.now(UTC).date().isoformat()} on a machine with {os.cpu_count()} CPU cores: rlsim "
        f"{__version__} under Python {sys.version_info.major}.{sys.version_info.minor}, AISimulate {peer}."
    )
    return {
        "makespans": f"{where}\n\n{markdown(span_head, spans)}",
        "prices": markdown(("ms", "rlsim", "AISimulate", "difference"), shown),
        "times": markdown(time_head, times),
    }


# ---- side by side ----------------------------------------------------------------------------------------------------


def measure(venv: Path, cases: Iterable[Case], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A row per case and tool."""
    rows = []
    for case in cases:
        path = folder / "rollout.jsonl"
        write_requests(path, case.responses)
        answers: dict[str, list[Answer]] = {}
        for turn in range(repeats):
            answers.setdefault("aisimulate", []).append(run_aisimulate(venv, path, case))
            for variant in variants() if turn == 0 else ["rlsim"]:
                answers.setdefault(variant, []).append(run_rlsim(path, case, variant))
        for tool, said in answers.items():
            row = {"case": case.name, "tool": tool, "makespan_s": round(said[0]["makespan_s"], 3)}
            for what in ("wall_s", "again_s", "process_s"):
                row[what] = round(min(one[what] for one in said), 5) if what in said[0] else None
            print(row, flush=True)
            rows.append(row)
    return rows


def prices(venv: Path, capacity: int) -> list[Price]:
    """Single engine steps, decode steps by kind of kernel, and a replica's KV cache."""
    costs = costs_of(kernels_only(load_calibration("h200-vllm")))
    here = costs.step(1)
    script = str(Path(__file__).with_name("aisimulate_steps.py"))
    there = json.loads(python(venv, script, json.dumps(STEPS)))
    found: list[Price] = []
    for (batch, context), other in zip(STEPS["decode"], there["decode"], strict=True):
        what = f"decode, batch {batch}, context {context:,}"
        found.append((what, here.decode(batch).step_s(batch * context), other))
    for (batch, tokens), other in zip(STEPS["prefill"], there["prefill"], strict=True):
        found.append((f"prefill, {batch} × {tokens} tokens", here.prefill_s([Chunk(tokens, 0)] * batch), other))
    for (batch, context), kinds in zip(STEPS["kinds"], there["kinds"], strict=True):
        ours = here.breakdown(batch, batch * context)
        for kind, other in kinds.items():
            found.append((f"{kind} of batch {batch}, context {context:,}", ours[kind], other))
    return [*found, ("KV cache of a replica, tokens", costs.capacity_pages(1) * ENGINE.page_tokens, capacity)]


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description="rlsim beside AISimulate.")
    parser.add_argument("--venv", type=Path, help="virtual environment with AISimulate")
    parser.add_argument("--quick", action="store_true", help="small rollouts, once each")
    parser.add_argument("--repeats", type=int, default=5, help="the least of so many processes (5)")
    parser.add_argument("--page", type=Path, help="Markdown page to put the tables into")
    parser.add_argument("--simulate", type=Path, help="only simulate this file in rlsim")
    parser.add_argument("--replicas", type=int, default=1, help="for --simulate")
    parser.add_argument("--as", dest="variant", default="rlsim", help="for --simulate: which row of the table")
    arguments = parser.parse_args()
    if arguments.simulate:
        print(json.dumps(timed(arguments.simulate, arguments.replicas, arguments.variant)))
        return
    venv = arguments.venv or Path("aisimulate-venv")
    if not (venv / "bin" / "aisimulate").exists():
        sys.exit(HOW_TO.format(venv=venv))
    with tempfile.TemporaryDirectory() as scratch:
        cases, repeats = (QUICK, 1) if arguments.quick else (CASES, arguments.repeats)
        rows = measure(venv.absolute(), cases, Path(scratch), repeats)
        said = predicted(venv.absolute(), Path(scratch) / "rollout.jsonl", "--detail", "memory")
    capacity = int(said["memory_diagnostics"]["aggregated"]["total_kv_size_tokens"])
    peer = python(venv, "-c", "import importlib.metadata as m; print(m.version('aisimulate'))")
    parts = tables(rows, list(variants()), prices(venv.absolute(), capacity), peer)
    print("\n\n".join(parts.values()))
    if arguments.page:
        text = arguments.page.read_text(encoding="utf-8")
        short = {name: without_long_tables(part, arguments.page, name) for name, part in parts.items()}
        arguments.page.write_text(with_measured(text, short), encoding="utf-8")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

"""Seeds: every kind of file that ships or that an importer reads, small enough to be read in milliseconds."""

from __future__ import annotations

import functools
import gzip
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
ROWS = 48  # of a shipped trace


@dataclass(frozen=True)
class Seed:
    """Files as a user would have them, by path; `main` is the file or folder that a command is given.

    `options` go with the command. `fixed` are files that stay as they are.
    """

    name: str
    files: Mapping[str, bytes]
    main: str
    options: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


def collected(make: Callable[[Path], Iterable[Seed]]) -> Callable[[], Sequence[Seed]]:
    """A function that makes the seeds once, with a folder to make their files in."""

    @functools.cache
    def seeds() -> Sequence[Seed]:
        with tempfile.TemporaryDirectory() as folder:
            return tuple(make(Path(folder)))

    return seeds


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _parquet(frame: pd.DataFrame) -> bytes:
    sink = io.BytesIO()
    frame.to_parquet(sink)
    return sink.getvalue()


@functools.cache
def short_trace(name: str) -> bytes:
    """The first rows of a shipped trace, with its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(ROOT / "traces" / f"{name}.parquet").slice(0, ROWS)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


# Traces ---------------------------------------------------------------------------------------------------------------


@collected
def traces(_: Path) -> Iterable[Seed]:
    """Traces in rlsim's schema: those that ship, as Parquet, CSV and JSON Lines."""
    for path in sorted((ROOT / "traces").glob("*.parquet")):
        yield Seed(path.stem, {"t.parquet": short_trace(path.stem)}, "t.parquet")
    frame = pd.read_parquet(io.BytesIO(short_trace("rollpacker-code")))
    lines = frame.to_json(orient="records", lines=True).encode()
    csv = frame.assign(test_run_s=[json.dumps(list(runs)) for runs in frame["test_run_s"]]).to_csv(index=False).encode()
    for name, data in {"t.csv": csv, "t.jsonl": lines}.items():
        yield Seed(name, {name: data}, name)
        yield Seed(f"{name}.gz", {f"{name}.gz": gzip.compress(data, mtime=0)}, f"{name}.gz")


@collected
def rollouts(folder: Path) -> Iterable[Seed]:
    """Dumps and traces of every layout that is imported."""
    import dump_samples as samples
    from test_import_serving import AZURE, AZURE_2024, AZURE_2025, BURSTGPT_1, BURSTGPT_3

    samples.tokenizer(folder / "tokens")
    tokenizer = {"tokens/tokenizer.json": (folder / "tokens" / "tokenizer.json").read_bytes()}
    made: dict[str, Path] = {}
    with_tokenizer = ("verl", "trl", "roll")
    made["verl"] = samples.verl(folder / "verl")
    made["areal"] = samples.areal(folder / "areal")
    nemo = [samples.nemo_row(i, [7, 8, 9], [1, 1, 0, 1, 1], 0.5) for i in range(4)]
    made["nemo-rl"] = samples.jsonl(folder / "nemo" / "train_data_step3.jsonl", nemo)
    older = [{k: v for k, v in row.items() if k not in ("token_ids", "token_loss_mask")} for row in nemo]
    made["nemo-rl-older"] = samples.jsonl(folder / "nemo-older" / "train_data_step3.jsonl", older)
    (folder / "slime").mkdir()
    sample = [samples.slime_sample(i, f"q{i // 2}", 5, 6 + i) for i in range(4)]
    sample[1] |= {"loss_mask": [1, 1, 0, 0, 1, 1, 1], "reward": {"score": 0.5, "acc": True}}
    made["slime"] = samples.slime(folder / "slime" / "0.pt", 0, sample)
    made["trl"] = samples.trl(folder / "trl", 5, [("a", 3), ("a", 4), ("b", 5), ("b", 6)])
    step = samples.roll_step(1, ["a", "a", "b", "b"], [3, 4, 5, 6])
    made["roll"] = samples.jsonl(folder / "roll" / "rollout_dump_data.step_1.jsonl", [step])
    board = {"prompt": "p", "response": "r r", "response_tokens": ["r", "r", "", ""], "new_response_mask": [1, 1, 0, 0],
             "logprobs": [-0.1] * 4, "reward": 1.0, "step": 1}  # fmt: skip
    made["roll-board"] = samples.jsonl(folder / "board" / "data_1.jsonl", [board, board])
    made["servegen"] = samples.servegen(folder / "servegen", 0, {10: 0.5, 200: 0.25, 900: 0.25}, [0.5, 0.0, 2.0, 0.1])
    mooncake = [
        {"timestamp": 3000 * i, "input_length": 90 + i, "output_length": 5 + i, "hash_ids": [1]} for i in range(4)
    ]
    made["mooncake"] = samples.jsonl(folder / "mooncake" / "trace.jsonl", mooncake)
    texts = {
        "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,5\n0.5,20,8\n1.25,30,900\n",
        "vidur-ratio": "num_total_tokens,pd_ratio,arrived_at\n110,10,0.5\n400,3,1.5\n",
        "azure": AZURE, "azure-2024": AZURE_2024, "azure-2025": AZURE_2025,
        "burstgpt": BURSTGPT_1, "burstgpt-3": BURSTGPT_3,
        "histogram": "response_tokens,expected_requests\n10,5\n200,8.5\n900,0\n",
        "cdf": "length,cdf,task\n10,0.2,math\n200,0.9,math\n50,0.5,code\n900,1.0,code\n",
    }  # fmt: skip
    for name, text in texts.items():
        made[name] = folder / name / "table.csv"
        made[name].parent.mkdir()
        made[name].write_text(text)
    mapped = [{"id": f"p{i // 2}", "output_len": 10 + i, "text": "x"} for i in range(4)]
    made["columns"] = samples.jsonl(folder / "columns" / "r.jsonl", mapped)
    for name, path in made.items():
        top = path if path.is_dir() else path.parent
        files, options, fixed = files_in(top), (), ()
        if name in with_tokenizer:
            files |= tokenizer
            options, fixed = ("--tokenizer", "{inputs}/tokens"), ("tokens/tokenizer.json",)
            files = {f"rollouts/{k}" if not k.startswith("tokens/") else k: v for k, v in files.items()}
        if name == "columns":
            options = ("--column", "response_tokens=output_len", "--column", "prompt_id=id", "--cap", "16K")
        inside = "rollouts" if name in with_tokenizer else ""
        mains = {inside or "."} if path.is_dir() else {str(Path(inside) / path.name)}
        if name == "servegen":
            mains = {".", "chunk-0-dataset.json"} & {".", *files}
        for main in sorted(mains):
            yield Seed(f"{name} {main}", files, main, options, fixed)
        layout = name.partition("-")[0] if name != "nemo-rl" else name
        if layout in ("vidur", "azure", "burstgpt", "mooncake", "servegen", "slime", "nemo-rl", "histogram", "cdf"):
            yield Seed(f"{name} told", files, sorted(mains)[0], (*options, "--format", layout), fixed)
        if name in with_tokenizer:  # the tokenizer itself may be damaged
            yield Seed(
                f"{name} tokenizer", files, sorted(mains)[0], options, tuple(f for f in files if f not in tokenizer)
            )


@collected
def recipes(_: Path) -> Iterable[Seed]:
    """Recipes of shipped traces, with few prompts, and those in the documentation."""
    for path in sorted((ROOT / "traces").glob("*.yaml")):
        text = re.sub(r"^prompts: \d+", "prompts: 24", path.read_text(), flags=re.M)
        text = re.sub(r"^responses: \d+", "responses: 4", text, flags=re.M)
        text = re.sub(r"tolerance: [\d.]+", "tolerance: 0.9", text)  # few responses do not meet facts exactly
        text = re.sub(r"^( *)icc: ([\d.]+)", r"\1icc: \2\n\1tolerance: 0.9", text, flags=re.M)
        yield Seed(path.stem, {"recipe.yaml": text.encode()}, "recipe.yaml")
    fit = {
        "model": {"components": [{"weight": 0.7, "median_tokens": 700, "sigma": 0.8, "prompt_share": 0.5},
                                 {"weight": 0.3, "median_tokens": 3000, "sigma": 0.6, "prompt_share": 0.4}]},
        "cap_tokens": 16384, "goodness": {"ks": 0.01, "ks_single_lognormal": 0.05},
        "provenance": {"trace": "x", "responses": 400, "prompts": 100},
    }  # fmt: skip
    rewards = {"correct": {"share": 0.5}, "sandbox": {"cases": 2, "run": {"median": 0.2, "p95": 2.0}}}
    recipe = {"name": "of-fit", "prompts": 24, "responses": 4, "cap_tokens": "16K", "lengths": {"fit": "fit.json"},
              "task": "math", "growth": {"factors": [1.0, 1.3]}, "seed": 3, "rewards": rewards}  # fmt: skip
    yield Seed("fit", {"recipe.yaml": json.dumps(recipe).encode(), "fit.json": json.dumps(fit).encode()}, "recipe.yaml")


# Experiments ----------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"```yaml\n(.*?)```", re.S)
SMALL = """\
name: small
cluster: 8xh100
model: qwen2.5-1.5b
calibration: h100-vllm
trace: {path: t.parquet, cap: 1K}
workflow: {algorithm: grpo, prompts: 2, responses: 2, steps: 1}
seeds: 1
"""
#: Systems that between them use every policy that ships.
SYSTEMS = (
    "systems: [{verl: {tp: [1, best]}}, pat]\nbaseline: verl-tp1\n",
    "systems: [rollpacker, {name: both, use: [pat, {tail_batching: {eta: 1.5}}, stream]}]\n",
    "systems: [rlhfuse, oppo]\ntraining: {tp: 2, backend: megatron}\nmodels: {reward: qwen2.5-1.5b}\n",
    "systems: [trl, openrlhf, nemo_aligner, deepspeed_chat]\n",
    """\
systems: [{name: filter, use: [verl, {dynamic_sampling: {}}]}]
cases: {a: {trace.cap: 512}, b: {engine.page_tokens: 32}}
""",
    "systems: [{one_step_off: {rollout_gpus: 4}}, {areal: {rollout_gpus: 4, eta: 2}}]\n",
    """\
systems: [{verl_fully_async: {rollout_gpus: 4, trigger_parameter_sync_step: 1}}, {nemo_async: {rollout_gpus: 4}}]
""",
    "systems: [{streamrl: {parts_per_step: 1}}, {colocated_async: {active: 2}}]\n",
    "systems: [{laminar: {rollout_gpus: 4}}, partial_rollout]\n",
    """\
systems: [verl]
engine: {max_num_seqs: 64, max_num_batched_tokens: 4096, page_tokens: 16}
training: {backend: fsdp, micro_batch_tokens: 8K, zero_stage: 3, recompute: full, offload: true, mini_batches: 2}
""",
)


def _documented(pattern: str) -> Iterable[tuple[str, str]]:
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        for number, block in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
            beside = re.search(r"\b(spare|judges|under_way):", block)  # a module
            if re.search(pattern, block, re.M) and not beside:
                yield f"{page.name} {number}", block


@collected
def experiments(_: Path) -> Iterable[Seed]:
    """Experiments that ship, those in the documentation, and small ones with every policy."""
    beside = {name: short_trace("rollpacker-math") for name in ("t.parquet", "lengths.parquet")}
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        names = re.findall(r"traces/([\w.-]+)\.parquet", path.read_text())
        files = {f"traces/{name}.parquet": short_trace(name) for name in names}
        yield Seed(path.stem, {"e.yaml": path.read_bytes(), **files}, "e.yaml", fixed=tuple(files))
    for systems in SYSTEMS:
        yield Seed(
            f"small {systems[:30]}", {"e.yaml": (SMALL + systems).encode(), **beside}, "e.yaml", fixed=tuple(beside)
        )
    for name, block in _documented(r"^systems:"):
        whole = block if re.search(r"^trace:", block, re.M) else SMALL + block
        yield Seed(name, {"e.yaml": whole.encode(), **beside}, "e.yaml", fixed=tuple(beside))
    cluster = (ROOT / "rlsim/data/clusters/8xh100.yaml").read_bytes()
    config = json.dumps(
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 5632, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "max_position_embeddings": 4096, "rope_theta": 1e4}, indent=1,
    ).encode()  # fmt: skip
    own = (
        SMALL.replace("cluster: 8xh100", "cluster: ../inputs/c.yaml").replace("qwen2.5-1.5b", "../inputs/m/config.json")
        + SYSTEMS[0]
    )
    files = {"e.yaml": own.encode(), "c.yaml": cluster, "m/config.json": config, **beside}
    for fixed in (("e.yaml", "c.yaml"), ("e.yaml", "m/config.json")):
        yield Seed(f"own parts but {fixed[1]}", files, "e.yaml", fixed=(*beside, *fixed))
    for path in sorted((ROOT / "rlsim/data/models").glob("*b.yaml"))[:12:3]:
        files = {
            "e.yaml": own.replace("m/config.json", "m.yaml").encode(),
            "m.yaml": path.read_bytes(),
            "c.yaml": cluster,
        }
        yield Seed(path.stem, {**files, **beside}, "e.yaml", fixed=(*beside, "e.yaml", "c.yaml"))
    yield Seed("trace", {"e.yaml": (SMALL + SYSTEMS[0]).encode(), **beside}, "e.yaml", fixed=("e.yaml",))
    judged = {"t.parquet": short_trace("rollpacker-judge"), "u.parquet": short_trace("rollpacker-code")}
    reward = SMALL.replace("t.parquet", "[t.parquet, u.parquet]").replace(
        "steps: 1", "steps: 1, reward: {judge: {tp: 1}, workers: 4}"
    )
    yield Seed("judge", {"e.yaml": (reward + SYSTEMS[1]).encode(), **judged}, "e.yaml", fixed=tuple(judged))
    yield Seed("judge traces", {"e.yaml": (reward + SYSTEMS[1]).encode(), **judged}, "e.yaml", fixed=("e.yaml",))


@collected
def sweeps(_: Path) -> Iterable[Seed]:
    """Sweeps that ship and those in the documentation."""
    beside = {"small.yaml": (SMALL + SYSTEMS[0]).encode(), "t.parquet": short_trace("rollpacker-math")}
    own = """\
name: s
experiment: small.yaml
set: {seeds: 1}
axes:
- grid: {trace.cap: [512, 1K], workflow.prompts: [1, 2]}
"""
    more = """\
- zip: {engine.page_tokens: [16, 32], workflow.steps: [1, 2]}
- random:
    points: 3
    seed: 1
    keys: {memory_utilization: {uniform: [0.5, 0.9]}, workflow.responses: {int: [1, 2]}}
"""
    listed = "name: l\nexperiment: small.yaml\naxes:\n- list: [{trace.cap: 1K}, {trace.cap: 512, systems: [pat]}]\n"
    texts = {"own": own, "more": own + more, "listed": listed}
    texts |= {path.stem: path.read_text() for path in (ROOT / "sweeps").glob("*.yaml")}
    texts |= dict(_documented(r"^axes:"))
    for name, text in texts.items():
        yield Seed(name, {"s.yaml": text.encode(), **beside}, "s.yaml", fixed=tuple(beside))


CLUSTER = (
    "cluster={gpu: h100-sxm, nodes: 1, gpus_per_node: 8, intra: {name: x, bytes_per_s: 450 GB/s, latency_s: 1 us}, "
    "host: {name: p, bytes_per_s: 50 GB/s, latency_s: 1 us}}"
)
SETTINGS = (
    "trace.cap=8K", "workflow.prompts=4", "workflow={prompts: 2, responses: 2, steps: 1}", "seeds=[0, 1]", "seeds=2",
    "systems.0={verl: {tp: 2}}", "systems=[verl, pat]", "engine.page_tokens=16", "training.tp=2", "baseline=pat",
    "cases={a: {trace.cap: 512}}", "memory_utilization=0.9", "workflow.reward.timeout=2 s",
    "models={critic: qwen2.5-1.5b}", CLUSTER,
)  # fmt: skip


@collected
def settings(_: Path) -> Iterable[Seed]:
    """Settings of the command line, as a text that is mutated and then given."""
    files = {"e.yaml": (SMALL + SYSTEMS[0]).encode(), "t.parquet": short_trace("rollpacker-math")}
    for text in SETTINGS:
        yield Seed(text[:20], {"setting.txt": text.encode(), **files}, "e.yaml", fixed=("e.yaml", "t.parquet"))


# Calibrations ---------------------------------------------------------------------------------------------------------


@collected
def calibrations(_: Path) -> Iterable[Seed]:
    """The smallest of the shipped calibrations, and one that carries whole iterations: to parse one takes long."""
    for path in sorted((ROOT / "calibration").glob("*.yaml"), key=lambda path: path.stat().st_size)[:4]:
        yield Seed(path.stem, {"c.yaml": path.read_bytes()}, "c.yaml")
    served = {
        "model": "llama-3.1-8b", "model_type": "llama", "tp": 1, "level": 1.1, "source": "a log",
        "decode": {"axes": [{"name": "batch", "knots": [1, 8, 64]}, {"name": "context", "knots": [100, 9000]}],
                   "factor": [1.1, 1.2, 1.0, 0.9, 1.3, 1.1]},
        "prefill": {"axes": [{"name": "tokens", "knots": [16, 8192]}], "factor": [1.4, 1.1]},
    }  # fmt: skip
    text = (ROOT / "calibration" / "a40-vllm.yaml").read_text() + f"iterations: [{json.dumps(served)}]\n"
    yield Seed("iterations", {"c.yaml": text.encode()}, "c.yaml")


@collected
def calibration_values(_: Path) -> Iterable[Seed]:
    """What all shipped calibrations hold, already parsed."""
    from rlsim.reading import parse_yaml

    texts = {path.stem: path.read_bytes() for path in sorted((ROOT / "calibration").glob("*.yaml"))}
    texts["iterations"] = next(seed.files["c.yaml"] for seed in calibrations() if seed.name == "iterations")
    for name, text in texts.items():
        yield Seed(name, {"c.json": json.dumps(parse_yaml(text.decode(), name)).encode()}, "c.json")


@collected
def measurements(folder: Path) -> Iterable[Seed]:
    """Tables of nccl-tests and aiconfigurator."""
    import test_calibrate_import as samples

    h100 = ("--gpu", "h100-sxm", "--engine", "vllm", "--base", "h100-vllm")
    for program in samples.BUS:
        yield Seed(
            f"nccl {program}", {"run.txt": samples.nccl_text(program).encode()}, "run.txt", ("nccl-tests", *h100)
        )
        report = json.dumps(samples.nccl_json(program), indent=1).encode()
        yield Seed(f"nccl json {program}", {"run.json": report}, "run.json", ("nccl-tests", *h100))
    kernels = {
        "gemm/vllm/0.14.0/gemm_perf": samples.gemm_rows(),
        "attention/vllm/0.14.0/generation_attention_perf": samples.attention_rows("generation_attention"),
        "attention/vllm/0.14.0/context_attention_perf": samples.attention_rows("context_attention"),
        "comm/vllm/0.14.0/custom_allreduce_perf": samples.collective_rows(custom=True),
        "comm/nccl/2.29/nccl_perf": samples.collective_rows(custom=False),
    }
    layout = {f"h100_sxm/{name}.parquet": _parquet(table) for name, table in kernels.items()}
    layout["h100_sxm/gemm/vllm/0.15.0/reuse.yaml"] = b"reuse:\n- {table: gemm_perf, from_version: 0.14.0}\n"
    yield Seed("aiconfigurator", layout, "h100_sxm", ("aiconfigurator", *h100))


@collected
def logs(_: Path) -> Iterable[Seed]:
    """veRL's metrics in every form."""
    import test_calibrate_from_run as samples

    rows = {step: samples.metrics_of(samples.LINE.format(step=step, gen=70 + step)) for step in range(1, 10)}
    for step, row in rows.items():
        tokens = 16 * (row["response_length/mean"] + row["prompt_length/mean"])
        row |= {"timing_s/update_actor": 140.0 + step, "timing_s/step": 260.0 + 2 * step}
        row |= {"perf/total_num_tokens": tokens, "perf/throughput": tokens / row["timing_s/step"] / 8}
    config = samples.CONFIG.replace("'n': 5", "'n': 2").replace("'train_batch_size': 1024", "'train_batch_size': 8")
    console = config + samples.as_console(rows)
    yield Seed("console", {"run.log": console.encode()}, "run.log")
    forms = {"a.jsonl": samples.as_jsonl, "w.json": samples.as_wandb_json, "t.csv": samples.as_csv,
             "w.csv": samples.as_wandb_csv, "tb.csv": samples.as_tensorboard_csv}  # fmt: skip
    for name, form in forms.items():
        yield Seed(name, {name: form(rows).encode()}, name)


@collected
def frameworks(_: Path) -> Iterable[Seed]:
    """veRL's scripts, Hydra's YAML and the log that prints one; NeMo-RL's and AReaL's YAML."""
    from test_frameworks import AREAL, ASYNC, BASE, FULLY, ONE_STEP
    from test_init import SCRIPT

    hydra = """\
data: {train_batch_size: 16, max_prompt_length: 256, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", use_dynamic_bsz: true,
          ppo_max_token_len_per_gpu: "${oc.select:nothing.there,4096}"}
  rollout: {name: vllm, n: 4, tensor_model_parallel_size: "???", response_length: "${data.max_response_length}"}
trainer: {nnodes: 1, n_gpus_per_node: 8, experiment_name: "${trainer.project_name}-x", project_name: mine}
"""
    more = r"""
ARGS=(actor_rollout_ref.rollout.n=4 "data.train_batch_size=${B:-32}")
GPU=h100
if [ "$GPU" = h100 ]; then tp=2; elif [[ -z $GPU ]]; then tp=4; else tp=$((2**2)); fi
MODE=fast
case "$MODE" in fast|quick) n=1 ;; *) n=2 ;; esac
for m in a b; do echo $m; done
python3 -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \
  trainer.nnodes=$n actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=gae trainer.n_gpus_per_node=8 \
  critic.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.strategy=megatron <<EOF
text
EOF
"""
    config = (
        "(T pid=7) {'actor_rollout_ref': {'model': {'path': 'Qwen/Qwen3-8B'}, 'rollout': {'n': 3}}, 'data': {'x': 1}}\n"
    )
    told = "- data.train_batch_size=16\n- actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"
    inherits = {"base.yaml": BASE, "a.yaml": ASYNC}
    made: dict[str, tuple[str, str, dict[str, str]]] = {
        "script": ("verl", "run.sh", {"run.sh": SCRIPT}),
        "conditions": ("verl", "run.sh", {"run.sh": more}),
        "hydra": ("verl", "config.yaml", {"config.yaml": hydra}),
        "hydra folder": ("verl", ".", {".hydra/config.yaml": hydra, ".hydra/overrides.yaml": told}),
        "overrides": ("verl", "overrides.yaml", {"overrides.yaml": told}),
        "log": ("verl", "run.log", {"run.log": config + "(T pid=7) step:1 - timing_s/gen:3.0\n"}),
        "fully async": ("verl", "run.sh", {"run.sh": FULLY}),
        "one step off": ("verl", "run.sh", {"run.sh": ONE_STEP}),
        "nemo": ("nemo", "base.yaml", {"base.yaml": BASE}),
        "nemo async": ("nemo", "a.yaml", inherits),
        "areal": ("areal", "a.yaml", {"a.yaml": AREAL}),
    }
    for name, (framework, main, files) in made.items():
        yield Seed(name, {path: text.encode() for path, text in files.items()}, main, (f"--from-{framework}",))


# Results --------------------------------------------------------------------------------------------------------------


def _small() -> dict[str, Any]:
    return {
        "name": "small", "cluster": "8xh100", "model": "qwen2.5-1.5b", "calibration": "h100-vllm",
        "trace": {"path": str(ROOT / "traces" / "rollpacker-code.parquet"), "cap": 300},
        "workflow": {"prompts": 2, "responses": 2, "steps": 2}, "seeds": 2,
        "systems": ["verl", "pat"],
    }  # fmt: skip


@collected
def results(folder: Path) -> Iterable[Seed]:
    """Directories that `rlsim run` wrote."""
    from rlsim.experiment.run import run

    run(_small(), out=folder / "one")
    run({**_small(), "seeds": 1, "cases": {"a": {"trace.cap": 300}, "b": {"trace.cap": 200}}}, out=folder / "cases")
    for name in ("one", "cases"):
        yield Seed(name, {f"results/{path}": data for path, data in files_in(folder / name).items()}, "results")


@collected
def swept(folder: Path) -> Iterable[Seed]:
    """Directories that `rlsim sweep` wrote."""
    from rlsim.sweeps.points import load_sweep
    from rlsim.sweeps.run import sweep

    small = {**_small(), "seeds": 1}
    small["workflow"] = {"prompts": 2, "responses": 2, "steps": 1}
    definition = load_sweep(small, axes={"trace.cap": [200, 300]})
    sweep(definition, out=folder / "sweep", workers=1)
    yield Seed("sweep", {f"results/{path}": data for path, data in files_in(folder / "sweep").items()}, "results")

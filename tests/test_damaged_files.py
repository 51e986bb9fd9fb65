"""Files of users and of other programs, damaged: sane results, or one message, exit code 2 and nothing written.

The first part is one property of every command that reads files; the rest are faults that it has found.
`FUZZ_CASES=1000 pytest tests/test_damaged_files.py -k changed` tries as many changes for each command.
"""

import gzip
import io
import json
import os
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import dump_samples as dumps
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_calibrate_from_run as metrics
import test_calibrate_import as kernels
import test_frameworks
from conftest import LENGTHS, ROOT, TINY, Command, cases, sample, tables
from damage import damaged
from test_init import SCRIPT
from test_trace_cli import RECIPE

import rlsim
from rlsim.base.reading import plain
from rlsim.base.schema import validate
from rlsim.base.tables import floats
from rlsim.calibrate.from_engine import from_engine
from rlsim.calibrate.importers import aiconfigurator, read_format
from rlsim.cost.calibration import Calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.step import Chunk
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.tables import csv_of, read_calibration
from rlsim.errors import RlsimError, TraceError
from rlsim.frameworks.verl.log import read_log
from rlsim.frameworks.verl.run import batch_of
from rlsim.models.hardware import load_cluster, node_types
from rlsim.models.model import load_model
from rlsim.trace import read_trace
from rlsim.trace.files import write_trace
from rlsim.trace.importers import import_trace

HUGE = 10**400  # a whole number that no float holds


class Sample(NamedTuple):
    """Files as a user would have them, the one or the folder that a command is given, and options of its own."""

    files: dict[str, bytes]
    main: str
    options: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()  # files that nothing damages


def below(folder: Path) -> dict[str, bytes]:
    return {f"in/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rollouts(folder: Path) -> Iterator[Sample]:
    words = dumps.tokenizer(folder / "words").read_bytes()
    for name, path in dumps.layouts(folder).items():
        files, main = below(path if path.is_dir() else path.parent), "in" if path.is_dir() else f"in/{path.name}"
        if name in ("verl", "trl", "roll"):
            yield Sample(files | {"words/t.json": words}, main, ("--tokenizer", "words/t.json"), ("words/t.json",))
            yield Sample(files | {"words/t.json": words}, main, ("--tokenizer", "words/t.json"), tuple(files))
        else:
            yield Sample(files, main)
            told = name.partition(" ")[0]
            yield Sample(files, main, ("--format", told) if told not in ("roll", "areal") else ())
    rows = [{"id": f"p{i // 2}", "output_len": 10 + i, "text": "x"} for i in range(4)]
    columns = ("--column", "response_tokens=output_len", "--column", "prompt_id=id", "--cap", "16K")
    yield Sample({"in.jsonl": dumps.jsonl(folder / "r.jsonl", rows).read_bytes()}, "in.jsonl", columns)


def short_trace(name: str) -> bytes:
    """The first rows of a shipped trace, with its metadata."""
    sink = io.BytesIO()
    pq.write_table(pq.read_table(ROOT / "traces" / f"{name}.parquet").slice(0, 48), sink, write_page_checksum=True)
    return sink.getvalue()


def traces(_: Path) -> Iterator[Sample]:
    for name in ("rollpacker-code", "rollpacker-judge", "dapo-growing"):
        yield Sample({"t.parquet": short_trace(name)}, "t.parquet")
    frame = pd.read_parquet(io.BytesIO(short_trace("rollpacker-code")))
    runs = [json.dumps(list(one)) for one in frame["test_run_s"]]
    csv = frame.assign(test_run_s=runs).to_csv(index=False).encode()
    for name, data in {"t.csv": csv, "t.jsonl": frame.to_json(orient="records", lines=True).encode()}.items():
        yield Sample({name: data}, name)
        yield Sample({f"{name}.gz": gzip.compress(data, mtime=0)}, f"{name}.gz")


def recipes(_: Path) -> Iterator[Sample]:
    yield Sample({"t.yaml": json.dumps(RECIPE | {"prompts": 100}).encode()}, "t.yaml", ("--check-only",))
    parts = [{"weight": 0.7, "median_tokens": 700, "sigma": 0.8, "prompt_share": 0.5},
             {"weight": 0.3, "median_tokens": 3000, "sigma": 0.6, "prompt_share": 0.4}]  # fmt: skip
    fit = {"model": {"components": parts}, "cap_tokens": 16384, "goodness": {"ks": 0.01, "ks_single_lognormal": 0.05},
           "provenance": {"trace": "x", "responses": 400, "prompts": 100}}  # fmt: skip
    rewards = {"correct": {"share": 0.5}, "sandbox": {"cases": 2, "run": {"median": 0.2, "p95": 2.0}}}
    recipe = {"name": "of-fit", "prompts": 24, "responses": 4, "cap_tokens": "16K", "lengths": {"fit": "fit.json"},
              "task": "math", "growth": {"factors": [1.0, 1.3]}, "seed": 3, "rewards": rewards}  # fmt: skip
    yield Sample({"t.yaml": json.dumps(recipe).encode(), "fit.json": json.dumps(fit).encode()}, "t.yaml")


SMALL = {**TINY, "trace": {"path": "t.csv", "cap": "1K"}}
#: Systems that between them use every kind of policy, and sections that go with them.
EXPERIMENTS: tuple[dict[str, Any], ...] = tables("bases")["damaged experiments"]
QUICK = ("workflow.prompts=2", "workflow.responses=2", "workflow.steps=1", "trace.cap=256")
ONCE = ("--seeds", "1", "--quiet", "--out", "out", *(word for one in QUICK for word in ("--set", one)))


def experiments(_: Path) -> Iterator[Sample]:
    for more in EXPERIMENTS:
        yield Sample({"e.yaml": json.dumps(SMALL | more, indent=1).encode(), "t.csv": LENGTHS.encode()}, "e.yaml", ONCE)
    model = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 4,
             "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 5632,
             "torch_dtype": "bfloat16"}  # fmt: skip
    own = {"c.yaml": (ROOT / "rlsim/data/clusters/8xh100.yaml").read_bytes(), "m.json": json.dumps(model).encode(),
           "e.yaml": json.dumps(SMALL | {"cluster": "c.yaml", "model": "m.json"}).encode()}  # fmt: skip
    yield Sample(own | {"t.csv": LENGTHS.encode()}, "e.yaml", ONCE, ("e.yaml",))


def calibrations(_: Path) -> Iterator[Sample]:
    smallest = min((ROOT / "calibration").glob("h100*.yaml"), key=lambda path: path.stat().st_size)
    files = {"c.yaml": smallest.read_bytes(), "c.csv": csv_of(smallest).read_bytes()}
    yield Sample(files | {"e.yaml": json.dumps(TINY | {"calibration": "c.yaml"}).encode()}, "e.yaml", ONCE, ("e.yaml",))


def calibration_values(_: Path) -> Iterator[Sample]:
    """What calibrations hold: to parse their YAML takes most of the time."""
    for name in ("h100-sxm-vllm", "a40-vllm", "b200-sxm-vllm"):
        values = plain(read_calibration(ROOT / "calibration" / f"{name}.yaml"))
        yield Sample({"c.json": json.dumps(values).encode()}, "c.json")


def priced(main: Path) -> None:
    """Every price of a calibration that is accepted is a time."""
    calibration = validate(json.loads(main.read_bytes()), Calibration, str(main))
    model, cluster = load_model("llama-3.1-8b"), load_cluster("2x8xh100")
    costs, tokens = RolloutCostModel(model, cluster, calibration), np.array([300, 9000, 12, 777] * 8)
    times = []
    for tp in (1, 8):
        step = costs.step(tp)
        decodes = [step.decode(batch).step_s(batch * context) for batch in (1, 64, 700) for context in (1, 40_000)]
        prefills = [step.prefill_s(chunks) for chunks in ([Chunk(1, 0)], [Chunk(2048, 9000), Chunk(100, 0)])]
        assert min(decodes + prefills) > 0
        times += [*decodes, *prefills, step.mixed_s(4, 3000, [Chunk(512, 0)])]
    switch = costs.switch(8, 2, 8, [500, 9000], 40, "migrate", True)
    times += [switch.weights_s, switch.kv_s, switch.graph_s, switch.control_s]
    times += [costs.transfer_s([400, 9000], 2, 4, same_node=same) for same in (True, False)]
    for backend, strategy in (
        ("fsdp", TrainStrategy(dp=16, zero_stage=3, micro_batch_tokens=16384)),
        ("megatron", TrainStrategy(dp=2, tp=4, pp=2, sequence_parallel=True, zero_stage=1, micro_batch_tokens=16384)),
    ):
        call = CallCosts({"actor": model}, cluster, calibration, backend, None).of("actor", strategy)
        times += [call.train_s(tokens).total_s, call.forward_s(tokens).total_s]
    assert np.isfinite(times).all()
    assert min(times) >= 0


def sweeps(_: Path) -> Iterator[Sample]:
    beside = {"small.yaml": json.dumps(SMALL).encode(), "t.csv": LENGTHS.encode()}
    axes: list[dict[str, Any]] = [
        {"grid": {"trace.cap": [512, "1K"], "workflow.prompts": [1, 2]}},
        {"zip": {"engine.page_tokens": [16, 32], "workflow.steps": [1, 2]}},
        {"random": {"points": 3, "seed": 1, "keys": {"memory_utilization": {"uniform": [0.5, 0.9]},
                                                     "workflow.responses": {"int": [1, 2]}}}},
    ]  # fmt: skip
    for some in (axes, [{"list": [{"trace.cap": "1K"}, {"trace.cap": 512, "systems": ["pat"]}]}]):
        text = json.dumps({"name": "s", "experiment": "small.yaml", "set": {"seeds": 1}, "axes": some}, indent=1)
        yield Sample({"s.yaml": text.encode(), **beside}, "s.yaml", ("--dry-run", "--json", "-"), tuple(beside))


LINK = "{name: x, bytes_per_s: 450 GB/s, latency_s: 1 us}"
SETTINGS = (
    "trace.cap=8K", "workflow={prompts: 2, responses: 2, steps: 1}", "seeds=[0, 1]", "systems.0={verl: {tp: 2}}",
    "systems=[verl, pat]", "engine.page_tokens=16", "cases={a: {trace.cap: 512}}", "memory_utilization=0.9",
    "workflow.reward.timeout=2 s", "models={critic: qwen2.5-1.5b}",
    f"cluster={{gpu: h100-sxm, nodes: 1, gpus_per_node: 8, intra: {LINK}, host: {LINK}}}",
)  # fmt: skip


def settings(_: Path) -> Iterator[Sample]:
    files = {"e.yaml": json.dumps(SMALL).encode(), "t.csv": LENGTHS.encode()}
    for text in SETTINGS:  # which is read from its file, as damaged
        yield Sample({"set.txt": text.encode(), **files}, "e.yaml", ("--set", "@set.txt"), tuple(files))


def measurements(_: Path) -> Iterator[Sample]:
    yield Sample({"run.txt": kernels.nccl_text().encode()}, "run.txt")


def kernel_tables(folder: Path) -> Iterator[Sample]:
    layout = {
        "gemm/vllm/0.14.0/gemm_perf": kernels.gemm_rows()[::6],
        "attention/vllm/0.14.0/generation_attention_perf": kernels.attention_rows("generation_attention")[::4],
        "attention/vllm/0.14.0/context_attention_perf": kernels.attention_rows("context_attention")[::4],
        "comm/vllm/0.14.0/custom_allreduce_perf": kernels.collective_rows(custom=True),
        "comm/nccl/2.29/nccl_perf": kernels.collective_rows(custom=False),
    }
    for name, table in layout.items():
        path = folder / "h100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)
    reuse = b"reuse:\n- {table: gemm_perf, from_version: 0.14.0}\n"
    yield Sample(below(folder / "h100_sxm") | {"in/gemm/vllm/0.15.0/reuse.yaml": reuse}, "in")


def measured(main: Path) -> None:
    kind = "aiconfigurator" if main.is_dir() else "nccl-tests"
    found, _ = read_format(kind, [main], node_types()["h100"], "vllm", None)
    for table in found.tables.values():
        assert np.isfinite(table.seconds.to_numpy(float)).all()
        assert (table.seconds >= 0).all()


def logs(_: Path) -> Iterator[Sample]:
    rows = {step: metrics.metrics_of(metrics.LINE.format(step=step, gen=70 + step)) for step in range(1, 6)}
    for row in rows.values():
        row["perf/total_num_tokens"] = 16 * (row["response_length/mean"] + row["prompt_length/mean"])
    batch = ("--derive", "--batch", "8x2", "--cap", "1K")
    config = metrics.CONFIG.replace("'n': 5", "'n': 2").replace("'train_batch_size': 1024", "'train_batch_size': 8")
    for options in (batch, ("--derive",)):
        yield Sample({"run.log": (config + metrics.as_console(rows)).encode()}, "run.log", options)
    for name, form in metrics.FORMS.items():
        yield Sample({name: form(rows).encode()}, name, batch)


SHELL = sample("frameworks/words.sh")


def frameworks(_: Path) -> Iterator[Sample]:
    config = {"actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-8B"}, "rollout": {"n": 3}}, "data": {"x": 1}}
    told = "- data.train_batch_size=16\n- actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"
    made = (
        ("verl", {"run.sh": SCRIPT}),
        ("verl", {"run.sh": SHELL}),
        ("verl", {"config.yaml": sample("frameworks/hydra.yaml")}),
        ("verl", {"overrides.yaml": told}),
        ("verl", {"run.log": f"(T pid=7) {config!r}\n(T pid=7) step:1 - timing_s/gen:3.0\n"}),
        ("verl", {"run.sh": test_frameworks.FULLY}),
        ("nemo", {"a.yaml": test_frameworks.ASYNC, "base.yaml": test_frameworks.BASE}),
        ("areal", {"a.yaml": test_frameworks.AREAL}),
    )
    for framework, texts in made:
        files = {path: text.encode() for path, text in texts.items()}
        yield Sample(files, next(iter(files)), (f"--from-{framework}",))


def results(folder: Path) -> Iterator[Sample]:
    rlsim.run({**TINY, "systems": ["verl", "pat"]}, seeds=2, out=folder / "run")
    yield Sample(below(folder / "run"), "in")


def swept(folder: Path) -> Iterator[Sample]:
    rlsim.sweep(TINY, axes={"trace.cap": [200, 300]}, out=folder / "sweep", workers=1)
    yield Sample(below(folder / "sweep"), "in")


class Reader(NamedTuple):
    """A command, with * for its file, or a function; what it reads; how many changes are tried."""

    reads: tuple[str, ...] | Callable[[Path], None]
    samples: Callable[[Path], Iterator[Sample]]
    changes: int


INIT = ("init", "made", "*", "--gpu", "h100", "--trace", "rollpacker-math", "--out", "made.yaml")
READERS = {
    "rollouts": Reader(("trace", "import", "*", "out.parquet"), rollouts, 80),
    "traces": Reader(("trace", "describe", "*", "--json", "-"), traces, 30),
    "recipes": Reader(("trace", "generate", "*"), recipes, 10),
    "metric logs": Reader(("trace", "import", "*", "out.parquet"), logs, 50),
    "measurements": Reader(measured, measurements, 20),
    "kernel tables": Reader(measured, kernel_tables, 16),
    "experiments": Reader(("run", "*"), experiments, 10),
    "calibrations": Reader(("run", "*"), calibrations, 2),
    "values of calibrations": Reader(priced, calibration_values, 40),
    "sweeps": Reader(("sweep", "*"), sweeps, 10),
    "settings": Reader(("check", "*"), settings, 40),
    "configurations": Reader(INIT, frameworks, 20),
    "results": Reader(("compare", "*"), results, 5),
    "results, as a timeline": Reader(("timeline", "*", "--out", "timeline.json"), results, 4),
    "results of sweeps": Reader(("compare", "*"), swept, 4),
}


#: Whose messages may be of several sources together, or of what a file was read for.
UNNAMED = ("settings", "configurations", "values of calibrations")


@cache
def samples_of(make: Callable[[Path], Iterator[Sample]]) -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        return list(make(Path(folder)))


class HangError(BaseException):
    """A case took longer than it may; no `Exception`, so that nothing on the way takes it for its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `HangError` in what takes more processor time."""

    def late(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Case:
    """Gives samples to readers, each in a folder of its own, and checks what must hold of all."""

    def __init__(self, folder: Path, call: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.call, self.monkeypatch = folder, call, monkeypatch

    def accepted(self, name: str, number: int, sample: Sample, changed: str = "") -> bool:
        """Whether the files are accepted, with results that can be; else they are refused with one message."""
        place = self.folder / str(number)
        given = {place / path: data for path, data in {**sample.files, "keep.txt": b"mine"}.items()}
        for path, data in given.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.monkeypatch.chdir(place)
        try:
            with limited(20.0), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                done, told = self.read(READERS[name].reads, sample)
            if not done and name not in UNNAMED:
                assert any(Path(path).name in told for path in sample.files), f"no file is named: {told}"
            assert all(path.read_bytes() == data for path, data in given.items()), "a file was changed"
            made = {path for path in place.rglob("*") if path.is_file()} - {*given}
            assert done or not made, f"refused, and written all the same: {made}"
            self.check(place)
        except BaseException as error:
            error.add_note(f"{name}: case {number}, {changed} of {sample.main} in {place}")
            raise
        return done

    def read(self, reads: tuple[str, ...] | Callable[[Path], None], sample: Sample) -> tuple[bool, str]:
        """Whether the files are accepted, and what was said."""
        if callable(reads):
            try:
                reads(Path(sample.main))
            except (RlsimError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                return False, str(error)
            return True, ""
        options = [
            Path(one[1:]).read_bytes().decode("utf-8", "surrogateescape") if one[0] == "@" else one
            for one in sample.options
        ]
        words = [sample.main if word == "*" else word for word in reads]
        if reads[0] == "init":  # whose option names the file
            words.insert(words.index(sample.main), options.pop(0))
        code, out, err = self.call(*words, *options)
        assert code in (0, 1, 2)
        if code == 2:
            assert out == ""
            assert "Traceback" not in err
            assert err.startswith(("Usage: ", "rlsim: error: "))
            assert err.count("rlsim: error: ") <= 1
            assert len(err) > 30
        return code != 2, err

    @staticmethod
    def check(place: Path) -> None:
        """What was written can be read, and is sane."""
        if (place / "out.parquet").exists():
            trace = read_trace(place / "out.parquet")
            assert (trace.response_tokens >= 1).all()
            for name in ("prompt_tokens", "reward_time_s", "arrival_s"):
                values = trace.frame.get(name, pd.Series(dtype=float)).dropna().to_numpy(np.float64)
                assert np.isfinite(values).all()
                assert (values >= 0).all()
        if (place / "out").exists():
            steps = rlsim.read_result(place / "out").steps
            assert (steps["trained"] > 0).all()
            assert np.isfinite(steps["step_time_s"]).all()
            assert (steps["step_time_s"] > 0).all()
        if (place / "timeline.json").exists():
            json.loads((place / "timeline.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture
def case(tmp_path: Path, call: Command, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, call, monkeypatch)


@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_refused_or_give_sane_results(name: str, case: Case) -> None:
    """A change follows from the reader and its number alone. The first case is a whole sample, which is accepted."""
    found = samples_of(READERS[name].samples)
    assert case.accepted(name, 0, found[0])
    for number in range(1, 1 + (int(os.environ.get("FUZZ_CASES", "0")) or READERS[name].changes)):
        rng = random.Random(f"{name}/{number}")
        sample = rng.choice(found)
        file = rng.choice([path for path in sample.files if path not in sample.whole])
        files = sample.files | {file: damaged(file, sample.files[file], rng)}
        case.accepted(name, number, sample._replace(files=files), file)


# What it has found ----------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Path], Any]] = {
    "trace": read_trace,
    "import": import_trace,
    "dump": lambda path: import_trace(path, tokenizer=dumps.tokenizer(path.parent)),
    "log": read_log,
    "batch": lambda path: batch_of(read_log(path), cap=100),
    "gemms": aiconfigurator.gemms,
    "engine log": partial(from_engine, model="qwen2.5-7b", tp=2, calibration="h100-vllm"),
}


@cases("damaged_files", "refused")
def test_refused(tmp_path: Path, reader: str, name: str, text: Any, message: str) -> None:
    """With the file, the line, and what was expected there."""
    if text is not None and not isinstance(text, str):
        text = "\n".join(map(json.dumps, text)) if name.endswith(".jsonl") else json.dumps(text)
    if text is not None:
        (tmp_path / name).write_text(text.replace("HUGE", str(HUGE)).replace("DEEP", "[" * 100_000))
    with pytest.raises(RlsimError, match=message) as error:
        FUNCTIONS[reader](tmp_path / name)
    assert (tmp_path / name).name in str(error.value)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("task", pa.array([b"math", b"\xff"]), "row 1: task is bytes, not text"),
        ("response_tokens", pa.array([b"5", b"6"]), "row 1: response_tokens is not a number"),
        ("arrival_s", pa.array([1, 2], pa.timestamp("s")), "row 1: arrival_s is not a number"),
        ("prompt_id", pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"),
                                                             pa.py_buffer(b"a\xe1ab")]), "not a readable Parquet file"),
    ],
)  # fmt: skip
def test_columns_of_other_types(tmp_path: Path, column: str, values: Any, message: str) -> None:
    base = {"prompt_id": pa.array([1, 2]), "sample_id": pa.array([0, 0]), "response_tokens": pa.array([5, 6])}
    pq.write_table(pa.table(base | {column: values}), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=f"t.parquet.*{message}"):
        read_trace(tmp_path / "t.parquet")


def test_half_a_character_can_be_written(tmp_path: Path) -> None:
    row = {"prompt_id": "a\ud800", "sample_id": 0, "response_tokens": 5, "task": "\udfff", "o\ud800dd": 1}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    write_trace(read_trace(tmp_path / "t.jsonl"), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.frame["prompt_id"].tolist() == ["a?"]
    assert trace.meta.notes == ("columns left out: o?dd",)


def test_numbers_of_every_spelling() -> None:
    odd = [None, True, "x", "1_0", "²", b"5", [1], HUGE, float("nan")]
    assert np.isnan(floats(pd.Series(odd, dtype=object))).all()
    assert floats(pd.Series([1, 2.5, "3", " 4 ", "1e3"], dtype=object)).tolist() == [1, 2.5, 3, 4, 1000]
    assert np.isnan(floats(pd.Series([True, False]))).all()

"""Every way out that a message about memory names makes the experiment fit, as named; and the worst that can meet."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import Command, cases, tables

from rlsim.errors import CapacityError, RlsimError
from rlsim.experiment.load import parse_overrides
from rlsim.experiment.run import check_experiment
from rlsim.frameworks.parts import Options
from rlsim.results.tune.trial import Configuration, Run, tried

CASES_OF_USERS = Path(__file__).parent / "cases"
CASES: dict[str, dict[str, Any]] = tables("bases")["remedies"]
SYSTEM = {"systems": [{"verl": {"tp": 2}}], "baseline": None, "seeds": 1}


def message_of(settings: dict[str, Any]) -> str:
    """Why the experiment does not fit; empty if it does."""
    try:
        check_experiment("pat_vs_static", settings)
    except CapacityError as error:
        return str(error)
    return ""


def ways_out(message: str) -> list[dict[str, Any]]:
    """The settings of each way out that a message names, as overrides."""
    before, _, named = message.rpartition("it fits with ")
    found = [one.split(" and ") for one in named.split(", or ") if before]
    return [parse_overrides(re.sub(r"^(\d+) nodes$", r"cluster=\1x8xh100", text) for text in one) for one in found]


@pytest.mark.parametrize("case", CASES)
def test_the_experiment_fits_with_each_way_out_that_is_named(case: str, tmp_path: Path) -> None:
    settings = {**SYSTEM, **CASES[case]}
    if settings.get("trace.path") == "long":
        rows = {
            "prompt_id": [n // 8 for n in range(128)],
            "prompt_tokens": 500,
            "response_tokens": [90_000] + 127 * [9],
        }
        pd.DataFrame({**rows, "sample_id": [n % 8 for n in range(128)]}).to_parquet(tmp_path / "long.parquet")
        settings["trace.path"] = str(tmp_path / "long.parquet")
    message = message_of(settings)
    assert " GB > " in message, "does not fit"
    ways = ways_out(message)
    assert bool(ways) != ("no setting that was tried makes it fit" in message)
    alone = "no setting that was tried does alone" in message
    assert {len(way) > 1 for way in ways} <= ({True} if alone else {True, False})
    for way in ways:
        assert message_of({**settings, **way}) == "", way


@pytest.mark.parametrize(("seed", "runs", "least"), [(11, 2, 2), pytest.param(7, 24, 8, marks=pytest.mark.slow)])
def test_random_configurations_that_do_not_fit_are_refused_with_what_helps(seed: int, runs: int, least: int) -> None:
    """Over models, backends, micro-batches and caps: what is named fits; where nothing is, nothing tried alone does."""
    rng, refused = np.random.default_rng(seed), 0
    choices: dict[str, list[Any]] = {
        "model": ["llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3-70b"],
        "cluster": ["8xh100", "2x8xh100"],
        "training.backend": ["fsdp", "megatron"],
        "training.cp": [1, 2],
        "training.offload": [False, True],
        "training.micro_batch_sequences": [None, 8, 64],
        "training.micro_batch_tokens": ["16K", "128K"],
        "training.recompute": ["none", "full"],
        "memory_utilization": [0.4, 0.9],
    }
    for _ in range(runs):
        drawn = {key: values[rng.integers(len(values))] for key, values in choices.items()}
        settings = {**SYSTEM, **{key: value for key, value in drawn.items() if value is not None}}
        if not (message := message_of(settings)):
            continue
        refused += 1
        ways = ways_out(message)
        assert ways or "no setting that was tried makes it fit" in message
        assert all(message_of({**settings, **way}) == "" for way in ways), (settings, ways)
    assert refused >= least


def test_no_way_out_is_what_the_framework_does_not_start_with() -> None:
    """Ulysses over 8 GPUs does not divide the 28 heads of Qwen2.5-7B; over 4 it is not enough."""
    large = {"model": "qwen2.5-7b", "training.cp": 1, "trace.cap": "16K", "training.micro_batch_tokens": "512K"}
    for framework, named in (("", True), ("veRL 0.9", False)):
        ways = ways_out(message_of({**SYSTEM, **large, "framework": framework}))
        assert ({"training.cp": 8} in ways) == named
        assert any("training.micro_batch_tokens" in way for way in ways)


def test_more_nodes_are_no_way_out_where_nothing_is_known_to_join_them() -> None:
    for cluster, joined in (("8xa40", True), ("8xl40s", False)):
        gpu = {"cluster": cluster, "calibration": f"{cluster[2:]}-vllm"}
        message = message_of({**SYSTEM, **gpu, "model": "qwen2.5-32b"})
        assert " GB > " in message
        assert ("nodes" in message) == joined


def source(cap: str, training: dict[str, Any], **workflow: int) -> dict[str, Any]:
    """Responses of 100 tokens under a cap far above."""
    return {
        "name": "limits", "cluster": "8xh100", "model": "llama-3.1-8b", "calibration": "h100-vllm", "seeds": 1,
        "trace": {"fixed": 100, "cap": cap}, "workflow": {"steps": 1, **workflow},
        "training": {"offload": True, **training}, "systems": [{"verl": {"tp": 2}}],
    }  # fmt: skip


def notes_on(what: str, source: dict[str, Any] | str, settings: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    return [note for note in check_experiment(source, settings).notes if note.startswith(what)]


def test_a_way_out_is_enough_for_the_longest_that_may_meet() -> None:
    """A budget below one sequence of the limits holds it all the same: the trace's own are of 100 tokens."""
    given = source("120K", {"micro_batch_tokens": "1M"}, prompts=1024, responses=16)
    with pytest.raises(CapacityError) as refused:
        check_experiment(given)
    ways = ways_out(str(refused.value))
    assert ways
    for way in ways:
        assert not notes_on("memory", given, way), way


# ---- the worst that can meet -----------------------------------------------------------------------------------------


@cases("experiments", "reported ooms are refused or warned of")
def test_reported_ooms_are_refused_or_warned_of(
    source: str, arguments: list[str], expected: str, call: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = "--from-nemo" if source.endswith(".yaml") else "--from-verl"
    code, out, err = call("init", kind, str(CASES_OF_USERS / source), *arguments, "--out", "made.yaml")
    if code == 0:
        assert "memory is enough for the trace's lengths, not for" in out.replace("\n", " ")
        code, out, err = call("check", "made.yaml")
        assert code == 0
        assert ways_out(out.replace("\n", " "))
    assert re.search(expected, (out + err).replace("\n", " "))


def test_fixed_micro_batches_that_fit_at_the_limits_are_not_warned_of(tmp_path: Path, call: Command) -> None:
    """Ulysses 2 halves what four sequences of 1,024 + 16,384 tokens need in training, and eight in log-probs: at most
    69,632 tokens on a GPU, whose logits of 4 bytes are 42.4 GB. Without Ulysses they are 84.7 GB."""
    made = str(tmp_path / "made.yaml")
    assert call("init", "--from-verl", str(CASES_OF_USERS / "23/verl453.sh"), "--gpu", "h100", "--out", made).code == 0
    assert "memory" not in call("check", made).out
    (note,) = notes_on("memory", made, {"training.cp": 1})
    assert re.search(r"old_log_prob with 8 of 17,408 tokens .* has 139,264, .* logits 84\.71 GB .*training\.cp=2", note)


def test_time_is_that_of_the_lengths_and_memory_that_of_the_limits() -> None:
    """Sequences of 100 tokens under a cap of 64K: a micro-batch of four is 400 tokens to compute, 256K to hold."""
    given = source("120K", {"micro_batch_sequences": 4}, prompts=16, responses=4)
    (note,) = notes_on("memory", given)
    assert re.search(r"with 4 of ([\d,]+) tokens \(the longest prompt and trace\.cap\)", note)
    tokens = source("120K", {"micro_batch_tokens": 400}, prompts=16, responses=4)
    assert not [note for note in check_experiment(tokens).notes if "4 of" in note]
    for setting in ways_out(note):
        assert not notes_on("memory", given, setting)


def kv_source(share: float) -> dict[str, Any]:
    trace = {"fixed": 4096, "cap": 4096, "default_prompt_tokens": 512}
    return {**source("4K", {}, prompts=64, responses=8), "trace": trace, "memory_utilization": share}


def test_a_kv_cache_that_does_not_hold_the_batch_is_told_with_the_share_that_would() -> None:
    """128 responses a replica of 512 + 4,096 tokens, 131,072 bytes each; eight share a prompt: vLLM caches prefixes."""
    (note,) = notes_on("KV cache", kv_source(0.4))
    numbers = [int(text.replace(",", "")) for text in re.findall(r"[\d,]{6,}", note)]
    assert numbers[1] == 128 * (4096 + 512 // 8)
    assert numbers[2] == 128 * (4096 + 512)
    share = float(re.search(r"memory_utilization ([\d.]+) has", note)[1])  # type: ignore[index]
    extra = (numbers[1] - numbers[0]) * 65_536  # of KV on each of two GPUs
    assert share == pytest.approx(0.4 + extra / (79.19 * 2**30), abs=0.012)  # a watermark of 1% of the pages
    assert not notes_on("KV cache", kv_source(share))
    (alone,) = notes_on("KV cache", kv_source(0.4), {"workflow.prompts": 512, "workflow.responses": 1})
    assert f"need about {128 * (4096 + 512):,} ({128 * (4096 + 512):,} if all" in alone  # nobody shares a prompt
    assert notes_on("KV cache", kv_source(share - 0.02))
    with pytest.raises(
        RlsimError, match=r"memory_utilization: 1 of a GPU is more than is free when vllm starts.*0\.99"
    ):
        check_experiment(kv_source(1.0))
    sglang = {**kv_source(1.0), "calibration": "h100-sglang"}
    assert check_experiment(sglang).runs


def test_less_than_the_margin_is_noted_and_tune_refuses_it(tmp_path: Path) -> None:
    """Micro-batches of 80,000 tokens make 84.4 of 85.03 GB, of 77,000 82.1: with 3% kept free there are 82.5."""
    given = source("1K", {"micro_batch_tokens": 80_000}, prompts=1024, responses=16)
    (note,) = notes_on("memory", given)
    assert re.search(
        r"up to 7% higher. .* = 84\.42 GB > 82\.48 GB of h100-sxm, 3% of it kept free; it fits with ", note
    )
    for way in ways_out(note):
        assert not notes_on("memory", given, way), way
    assert not notes_on("memory", given, {"training.micro_batch_tokens": 77_000})
    made = tmp_path / "made.yaml"
    made.write_text(yaml.safe_dump(given))
    found = tried(Configuration("", (str(made),), Options(tmp_path)), {"engine.max_num_seqs": 128}, Run(1, 1))
    assert found.kind == "memory"
    assert found.problem in note

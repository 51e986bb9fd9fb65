"""Timelines: the file is what viewers expect, and shows what the results say."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import invoke
from hypothesis import HealthCheck, given, settings
from test_engine import simulate
from trace_checks import Trace
from workloads import Workload, workloads

import rlsim
from rlsim.errors import ConfigError
from rlsim.experiment.frames import stays_frame
from rlsim.experiment.load import read_experiment
from rlsim.results.report.timeline import Tracks, _in_order, held_by, write_timeline

SMALL: dict[str, Any] = {"workflow.steps": 2, "seeds": 1, "certainty": 0}


@pytest.fixture(scope="module")
def pat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Switches, on one node; two seeds."""
    folder = tmp_path_factory.mktemp("pat") / "results"
    pat = {"name": "pat", "use": [{"pat": {"redispatch": False}}]}
    changes = {**SMALL, "calibration": "h100-vllm", "systems": [{"verl": {"tp": [2, 4]}}, pat], "baseline": None}
    rlsim.run("pat_vs_static", seeds=2, overrides=changes, out=folder)
    return folder


@pytest.fixture(scope="module")
def rollpacker(tmp_path_factory: pytest.TempPathFactory) -> rlsim.Result:
    """Two nodes: a judge beside the rollout, CPU workers; responses aborted, released, migrated; a stream trainer."""
    systems = [{"name": "all", "use": ["rollpacker"]}, "rlhfuse"]
    small = {"workflow.steps": 6, "workflow.prompts": 8, "systems": systems, "baseline": None}
    return rlsim.run("rollpacker_7b", seeds=1, overrides=small)


@pytest.fixture(scope="module")
def oppo() -> rlsim.Result:
    """Chunks are scored while responses are generated; some go on in a later step."""
    return rlsim.run("oppo_7b", seeds=1, overrides={"workflow.steps": 3, "systems": ["oppo"], "baseline": None})


def written(results: rlsim.Result | Path, path: Path, **chosen: Any) -> Trace:
    write_timeline(results, path / "timeline.json", **chosen)
    trace = Trace(path / "timeline.json")
    trace.check()
    return trace


def rows(table: pd.DataFrame, system: str, seed: int = 0) -> pd.DataFrame:
    return table[(table["system"] == system) & (table["seed"] == seed)]


def check_gpus(trace: Trace, spans: pd.DataFrame, nodes: int, per_node: int) -> None:
    """The slices of every GPU's tracks together are its spans."""
    shown = {}
    for node in range(nodes):
        for name, slices in trace.named(f"node {node}").items():
            gpu = int(name.split()[1])
            assert gpu // per_node == node
            shared = "(shared)" in name
            shown[gpu, shared] = shown.get((gpu, shared), []) + [(s.end - s.start, s.name) for s in slices]
    for shared in (False, True):
        for gpu in range(nodes * per_node):
            mine = spans[(spans["gpu"] <= gpu) & (gpu < spans["gpu"] + spans["gpus"]) & (spans["shared"] == shared)]
            slices = shown.get((gpu, shared), [])
            assert len(slices) == len(mine)
            for kind, of_kind in mine.groupby("kind"):
                total = sum(dur for dur, name in slices if name == kind) / 1e6
                expected = (of_kind["end_at"] - of_kind["start_at"]).sum()
                assert total == pytest.approx(expected, abs=1e-6 * len(of_kind))


def check_requests(trace: Trace, stays: pd.DataFrame) -> None:
    """Phases sum up to what the stays say; tokens and degrees are theirs."""
    phases: dict[str, float] = {}
    tokens = finished = 0
    for slices in trace.slices.values():
        for s in slices:
            phase, _, number = s.name.partition(" ")
            if phase in ("queued", "prefill", "decode") and number:
                assert s.args["response"] == int(number)
                phases[phase] = phases.get(phase, 0) + (s.end - s.start) / 1e6
                tokens += s.args.get("tokens", 0)
                finished += s.args.get("left") == "finished"
    admitted = stays["admitted_at"].fillna(stays["left_at"])
    decoding = stays["decoding_at"].fillna(stays["left_at"])
    expected = {
        "queued": (admitted - stays["arrived_at"]).sum(),
        "prefill": (decoding - admitted).sum(),
        "decode": (stays["left_at"] - decoding).sum(),
    }
    for phase, total in expected.items():
        assert phases.get(phase, 0.0) == pytest.approx(total, abs=1e-6 * len(stays))
    decoded = stays[np.rint(stays["left_at"] * 1e6) > np.rint(decoding * 1e6)]
    assert tokens == (decoded["end_tokens"] - decoded["start_tokens"]).sum()
    assert finished == (decoded["left"] == "finished").sum()


def test_a_run_with_switches(pat: Path, tmp_path: Path) -> None:
    result = rlsim.read_result(pat)
    trace = written(pat, tmp_path, system="pat", seed=1)
    assert trace.about["system"] == "pat"
    assert (trace.about["seed"], trace.about["steps"]) == (1, [0, 1])
    check_gpus(trace, rows(result.spans, "pat", 1), nodes=1, per_node=8)
    stays = rows(result.stays, "pat", 1)
    check_requests(trace, stays)
    moved = (stays["left"] == "switched").sum()
    assert len(trace.flows) == moved > 0
    for flow in trace.flows.values():
        source, target = (trace.at(end["tid"], end["ts"]) for end in (flow["s"], flow["f"]))
        assert source.name.split()[1] == target.name.split()[1]  # the same response
        assert target.name.startswith("paused")  # while its node switches
        assert source.args["tp"] != target.args["tp"]
    steps = trace.named("pat · seed 1")["steps"]
    ends = rows(result.steps, "pat", 1)["step_time_s"].cumsum()
    assert [s.end for s in steps] == pytest.approx(list(ends * 1e6), abs=1)
    # All sequences are active from the start to the first finish; the KV in use peaks at what the steps say.
    [run] = [pid for pid, name in trace.groups.items() if name == "pat · seed 1"]
    assert max(value for _, value in trace.counters[run, "active sequences"]) == 128
    calls = rows(result.calls, "pat", 1)
    assert {name.removesuffix(" (2)") for name in trace.named("pat · seed 1")} == {"steps", *calls["call"]}


def test_counters_of_a_rollout_that_never_stops_hold_all_its_responses(tmp_path: Path) -> None:
    """AReaL's replicas generate for two steps and more at once: their stays overlap."""
    few = {"workflow.prompts": 16, "workflow.responses": 4, "workflow.steps": 3, "trace.cap": "1K", "baseline": None}
    areal = {"areal": {"tp": 2, "rollout_gpus": 4, "eta": 1}}
    result = rlsim.run("pat_vs_static", overrides={**SMALL, **few, "systems": [areal]})
    trace, stays = written(result, tmp_path), result.stays
    [run] = [pid for pid, name in trace.groups.items() if name.startswith("areal")]
    shown = dict(trace.counters[run, "active sequences"])
    admitted, left = (np.rint(stays[name].to_numpy() * 1e6) for name in ("admitted_at", "left_at"))
    moments = np.unique([*admitted, *left])
    held = [int(((admitted <= at) & (at < left)).sum()) for at in moments]
    at, value = map(np.array, zip(*sorted(shown.items()), strict=True))
    assert value[np.searchsorted(at, moments, side="right") - 1].tolist() == held
    assert stays.groupby("step")["arrived_at"].min().iloc[1] < stays.groupby("step")["left_at"].max().iloc[0]


def test_a_judge_beside_the_rollout_and_workers(rollpacker: rlsim.Result, tmp_path: Path) -> None:
    trace = written(rollpacker, tmp_path, system="all")
    spans, stays = rows(rollpacker.spans, "all"), rows(rollpacker.stays, "all")
    assert spans["shared"].any()
    check_gpus(trace, spans, nodes=2, per_node=8)
    check_requests(trace, stays)
    assert any(name.startswith("reward · GPU") for name in trace.groups.values())
    responses = rows(rollpacker.responses, "all")
    judged = stays[stays["call"] == "reward"][["step", "response"]].drop_duplicates()
    scored = responses.dropna(subset=["score_start_at", "scored_at"])
    on_workers = scored.merge(judged, how="left", indicator=True).query("_merge == 'left_only'")
    busy_s = sum(s.end - s.start for track in trace.named("rewards · CPU workers").values() for s in track) / 1e6
    assert busy_s == pytest.approx((on_workers["scored_at"] - on_workers["score_start_at"]).sum(), rel=1e-5)
    assert {flow["s"]["name"] for flow in trace.flows.values()} <= {"released", "migrated"}


def test_migrations_are_arrows_between_replicas(rollpacker: rlsim.Result, tmp_path: Path) -> None:
    trace = written(rollpacker, tmp_path, system="rlhfuse")
    stays = rows(rollpacker.stays, "rlhfuse")
    assert len(trace.flows) == (stays["left"] == "migrated").sum() > 0
    for flow in trace.flows.values():
        assert flow["s"]["name"] == "migrated"
        assert flow["s"]["pid"] != flow["f"]["pid"]


def test_responses_that_go_on_in_a_later_step(oppo: rlsim.Result, tmp_path: Path) -> None:
    trace = written(oppo, tmp_path)
    check_requests(trace, oppo.stays)
    check_gpus(trace, oppo.spans, nodes=1, per_node=8)


def test_plans_on_two_nodes(tmp_path: Path) -> None:
    systems = read_experiment("real_7b_7b")[0]["systems"][:2]  # the third searches for its plan
    small = {"workflow.steps": 2, "workflow.prompts": 16, "trace.cap": 512, "systems": systems}
    result = rlsim.run("real_7b_7b", seeds=1, overrides=small)
    for system in result.manifest["systems"][""]:
        trace = written(result, tmp_path, system=system)
        check_gpus(trace, rows(result.spans, system), nodes=2, per_node=8)
        check_requests(trace, rows(result.stays, system))


def test_what_is_not_named_is_the_first(pat: Path, tmp_path: Path) -> None:
    timeline = write_timeline(pat, tmp_path / "a.json")
    assert (timeline.run.case, timeline.run.system, timeline.run.seed) == ("", "verl-tp2", 0)
    assert timeline.run.steps == (0, 1)
    assert timeline.run.others["system"] == ["verl-tp2", "verl-tp4", "pat"]
    # From memory, from the directory, and compressed: the same.
    write_timeline(rlsim.read_result(pat), tmp_path / "b.json")
    write_timeline(pat, tmp_path / "c.json.gz")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Trace(tmp_path / "a.json").slices == Trace(tmp_path / "c.json.gz").slices
    without = written(pat, tmp_path, requests=False)
    assert set(without.groups.values()) == {"verl-tp2 · seed 0", "node 0"}
    both = written(pat, tmp_path, system="pat")
    one = written(pat, tmp_path, system="pat", steps=[1])
    assert {s.args["step"] for track in one.slices.values() for s in track if "step" in s.args} == {1}
    assert [s.name for s in one.named("pat · seed 0")["steps"]] == ["step 1"]
    assert one.named("pat · seed 0")["steps"] == both.named("pat · seed 0")["steps"][1:]  # at the moments of the run


def test_many_requests_have_tracks_in_first_steps(pat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsim.results.report.timeline.MOST_STAYS", 200)
    assert write_timeline(pat, tmp_path / "timeline.json", system="pat").with_requests == (0,)
    trace, stays = Trace(tmp_path / "timeline.json"), rlsim.read_result(pat).stays
    check_requests(trace, rows(stays, "pat").query("step == 0"))
    assert [s.name for s in trace.named("pat · seed 0")["steps"]] == ["step 0", "step 1"]
    done = invoke("timeline", pat, "--system", "pat", "--out", tmp_path / "timeline.json")
    assert "requests have tracks in step 0: --steps chooses others" in done.output


def test_what_has_no_timeline(pat: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a sweep, which has no timeline"):
        write_timeline(tmp_path, out)
    copy = shutil.copytree(pat, tmp_path / "results")
    (copy / "stays.parquet").unlink()
    with pytest.raises(ConfigError, match=r"stays\.parquet: no such file"):
        write_timeline(copy, out)


def test_command(pat: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    done = invoke("timeline", pat, "--system", "pat", "--steps", "0-1", "--out", out)
    assert done.exit_code == 0, done.output
    assert "timeline of pat · seed 0 · steps 0–1" in done.output
    assert "--system chooses another: verl-tp2, verl-tp4" in done.output
    json.loads(out.read_text(encoding="utf-8"))
    assert invoke("timeline", pat, "--gzip", "-q").stdout.split() == [str(pat / "timeline.json.gz")]
    assert Trace(pat / "timeline.json.gz").about["system"] == "verl-tp2"


# ------------------------------------------------------------------------------------------------------ its parts


def test_tracks_never_overlap_and_are_few() -> None:
    rng = np.random.default_rng(0)
    made: list[tuple[int, int]] = []
    tracks = Tracks(lambda key, number: (made.append((key, number)), (key, number))[1])
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start in np.sort(rng.integers(0, 1000, 1200)).tolist():
        key, end = int(rng.integers(0, 3)), start + int(rng.integers(0, 40))
        seen.setdefault(tracks.place(key, start, end), []).append((start, end))
    for slices in seen.values():
        slices.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(slices))
    assert len(made) == len(set(made)) == len(seen)
    one_after_the_other = Tracks(lambda key, number: (key, number))
    assert {one_after_the_other.place(0, start, end) for start, end in ((0, 5), (5, 9), (9, 12))} == {(0, 0)}


@settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, max_examples=40)
@given(workloads())
def test_what_replicas_hold_is_what_their_stays_say(work: Workload) -> None:
    """At every moment: who is admitted, who waits, and contexts between those of the ends of their phases."""
    frame = stays_frame(simulate(work)[1].stays).assign(call="generate", step=0)
    if frame.empty:
        return
    stays = _in_order(frame, ["generate"])
    held = held_by(stays)
    arrived, admitted, decoding, left = (
        stays[f"{name}_us"].to_numpy() for name in ("arrived", "admitted", "decoding", "left")
    )
    start, end = stays["start_tokens"].to_numpy(), stays["end_tokens"].to_numpy()
    for at, waiting, active, kv in held[["at", "waiting", "active", "kv_tokens"]].itertuples(index=False):
        inside = (admitted <= at) & (at < left)
        assert waiting == ((arrived <= at) & (at < admitted)).sum()
        assert active == inside.sum()
        within = np.divide(at - decoding, left - decoding, out=np.zeros(len(left)), where=left > decoding)
        assert kv == pytest.approx((start + (end - start) * within.clip(0, 1))[inside].sum(), abs=1)
    assert held[["active", "waiting", "kv_tokens"]].iloc[-1].tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------------------- results that say nonsense


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("stays", lambda rows: rows.assign(left="bored"), "column left: expected one of finished"),
        ("spans", lambda rows: rows.assign(gpu=rows["gpu"] + 1), "expected GPUs 0 to 7, got 1 to 8"),
    ],
)
def test_results_that_say_nonsense_are_refused(
    pat: Path, tmp_path: Path, table: str, change: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    result = rlsim.read_result(pat)
    replace(result, **{table: change(getattr(result, table))}).write(tmp_path / "results")  # as if rlsim had written it
    with pytest.raises(ConfigError, match=message):
        write_timeline(tmp_path / "results", tmp_path / "timeline.json")
